"""The seam of recurrent layers: what a mixer reads, and what it must return to be passed states.

Shape suffixes: B batch, T tokens, H value heads, K key dim, V value dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


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
    """One fragment from a known state, zero unless the fragment begins a row.

    Attributes:
        out: O, `[B, T, H, V]`.
        state: S, `[B, H, K, V]`.
        response: R, `[B, T, H, K]`; None if nothing enters.
        transition: M, `[B, H, K, columns]`: a matrix, or one column of factors; None for 1, or if nothing enters.
    """

    out: Tensor
    state: Tensor
    response: Tensor | None = None
    transition: Tensor | None = None


class Mixer(Protocol):
    """A recurrent layer's local computation."""

    @property
    def causal(self) -> bool:
        """False if every token of a document sees all of it; such a mixer has no transition."""

    def columns(self, tokens: Tokens) -> int:
        """Return the columns of a transition: the key dim for a matrix, 1 for factors, 0 for none."""

    def local(self, tokens: Tokens, state: Tensor | None, receives: bool) -> Local:
        """Compute one fragment, from `state` (None: zero); with `receives` also its response and transition."""


@dataclass(frozen=True)
class ChunkFunction:
    """A mixer made of a model's own chunk function, of which nothing is known but its arguments.

    The state is widened by the identity and the values by as many zeros: then the further columns of the output are
    the response, and those of the final state the transition.

    Attributes:
        function: `f(q, k, v, g=, beta=, initial_state=, output_final_state=, ...)` returns the output
            `[batch, tokens, value heads, value dim]` and the final state `[batch, value heads, key dim, value dim]`,
            as those of transformers and flash-linear-attention do.
        options: its further arguments.
    """

    function: Callable[..., tuple[Tensor, Tensor | None]]
    options: Mapping[str, Any] = field(default_factory=dict)
    causal: bool = True

    def columns(self, tokens: Tokens) -> int:
        """Return the key dim: transitions are matrices."""
        return tokens.k.shape[3]

    def local(self, tokens: Tokens, state: Tensor | None, receives: bool) -> Local:
        """Call the function once."""
        values, width = tokens.v, tokens.v.shape[3]
        if receives:
            assert state is None  # a document that entered does not begin here
            values, state = widened(tokens, None)
        out, final = self.function(
            tokens.q, tokens.k, values, g=tokens.decay, beta=tokens.beta, initial_state=state, output_final_state=True,
            **self.options,
        )  # fmt: skip
        assert final is not None
        final = final.to(tokens.state_dtype)
        if not receives:
            return Local(out, final)
        return Local(out[..., :width], final[..., :width], out[..., width:], final[..., width:])


def widened(tokens: Tokens, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the values with a zero for every key dim, and `state` (None: zero) with the identity."""
    heads, K, V = tokens.state_shape
    batch, time = tokens.v.shape[:2]
    if state is None:
        state = tokens.v.new_zeros(batch, heads, K, V, dtype=tokens.state_dtype)
    eye = torch.eye(K, dtype=state.dtype, device=state.device).expand(batch, heads, K, K)
    return torch.cat([tokens.v, tokens.v.new_zeros(batch, time, heads, K)], -1), torch.cat([state, eye], -1)
