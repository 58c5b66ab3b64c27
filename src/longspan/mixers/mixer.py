"""The seam of recurrent layers: what a mixer reads, and what it must return to be passed states; the mixer
of a model's own function.

Shape suffixes: B batch, T tokens, H value heads (channels), K key dim, V value dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from longspan.core.errors import LongspanError


class Tokens(NamedTuple):
    """What a mixer reads, each `[batch, tokens, heads, ...]`; `decay` and `beta` are per value head."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor | None = None
    beta: Tensor | None = None

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Value heads, key dim, value dim."""
        return self.v.shape[2], self.k.shape[3], self.v.shape[3]

    @property
    def state_dtype(self) -> torch.dtype:
        """fp32, or fp64 for fp64 tokens."""
        return torch.promote_types(self.q.dtype, torch.float32)

    def part(self, rows: slice, start: int, stop: int) -> Tokens:
        """Return some tokens of some rows."""
        return Tokens(*(None if x is None else x[rows, start:stop] for x in self))  # type: ignore[arg-type]


class Local(NamedTuple):
    """One fragment from a known state, zero unless the fragment begins a row."""

    state: Tensor  # S, the state after it, `[B, H, K, V]`
    # M, `[B, H, K, columns]`: a matrix, or one column of factors; None for 1, or if nothing is received.
    transition: Tensor | None
    # Returns the output `[B, T, H, V]` for the state `[B, H, K, V]` that is received, or None.
    finish: Callable[[Tensor | None], Tensor]


class Mixer(Protocol):
    """A recurrent layer's local computation."""

    @property
    def causal(self) -> bool:
        """False if every token of a document sees all of it; such a mixer has no transition."""

    def columns(self, tokens: Tokens) -> int:
        """Return the columns of a transition: the key dim for a matrix, 1 for factors, 0 for none."""

    def local(self, tokens: Tokens, state: Tensor | None, receives: bool) -> Local:
        """Compute one fragment, from `state` (None: zero); with `receives`, `finish` gets another one."""


@dataclass(frozen=True)
class ChunkFunction:
    """A mixer made of a model's own chunk function, of which nothing is known but its arguments.

    The state is widened by the identity and the values by as many zeros: then the further columns of the output are
    the response, and those of the final state the transition.
    """

    # `f(q, k, v, g=, beta=, initial_state=, output_final_state=, ...)` returns the output `[batch, tokens, value heads,
    # value dim]` and the final state `[batch, value heads, key dim, value dim]`, as those of transformers and flash-
    # linear-attention do.
    function: Callable[..., tuple[Tensor, Tensor | None]]
    options: Mapping[str, Any] = field(default_factory=dict)  # its further arguments
    causal: bool = True

    def columns(self, tokens: Tokens) -> int:
        """Return the key dim: transitions are matrices."""
        return tokens.k.shape[3]

    def local(self, tokens: Tokens, state: Tensor | None, receives: bool) -> Local:
        """Call the function once."""
        values, V, K = tokens.v, tokens.v.shape[3], tokens.k.shape[3]
        if receives:
            assert state is None  # a document that entered does not begin here
            eye = torch.eye(K, dtype=tokens.state_dtype, device=values.device).expand(
                len(values), values.shape[2], K, K
            )
            values, state = F.pad(values, (0, K)), F.pad(eye, (V, 0))
        out, final = self.function(
            tokens.q, tokens.k, values, g=tokens.decay, beta=tokens.beta, initial_state=state, output_final_state=True,
            **self.options,
        )  # fmt: skip
        heads, _, _ = tokens.state_shape
        wanted = [tuple(values.shape), (len(values), heads, K, values.shape[3])]
        found = [tuple(x.shape) if isinstance(x, Tensor) else x for x in (out, final)]
        if found != wanted or final is None:
            raise LongspanError(
                f"{getattr(self.function, '__name__', self.function)} must return an output {wanted[0]} and a state "
                f"{wanted[1]} for values {wanted[0]}, whose last dim may differ from the layer's; it returned "
                f"{found[0]} and {found[1]}"
            )
        final = final.to(tokens.state_dtype)

        def finish(entered_BHKV: Tensor | None) -> Tensor:
            if entered_BHKV is None:
                return out[..., :V]
            response_BHTK = out[..., V:].to(entered_BHKV.dtype).transpose(1, 2)
            return out[..., :V] + (response_BHTK @ entered_BHKV).transpose(1, 2)

        return Local(final[..., :V], final[..., V:] if receives else None, finish)
