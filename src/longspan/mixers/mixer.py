"""The seam of recurrent layers: what a mixer reads, and what it must return to be passed states; two mixers.

Shape suffixes: B batch, T tokens, H value heads (channels), K key dim, V value dim, N chunks, C tokens of a chunk.
"""

from __future__ import annotations

import math
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


@dataclass(frozen=True)
class Scan:
    """A mixer whose state is as large as a token, in plain torch: RG-LRU's and RWKV's.

    `state = decay * state + v`, so `decay` is a factor, not its logarithm, and K is 1. transformers loops over tokens.
    This cuts T tokens into sqrt(T) chunks, and loops over the tokens of a chunk, for all chunks at once, then over the
    chunks.
    """

    before: bool = False  # whether a token's output is the state before it, not the one after it
    causal: bool = True

    def columns(self, tokens: Tokens) -> int:
        return 1

    def local(self, tokens: Tokens, state: Tensor | None, receives: bool) -> Local:
        assert tokens.decay is not None
        count, dtype = tokens.v.shape[1], tokens.state_dtype
        size = math.isqrt(count - 1) + 1
        factors_BNCH = F.pad(tokens.decay.to(dtype), (0, 0, 0, -count % size), value=1.0).unflatten(1, (-1, size))
        v_BNCHV = F.pad(tokens.v.to(dtype), (0, 0, 0, 0, 0, -count % size)).unflatten(1, (-1, size))
        kept_BNCH = F.pad(factors_BNCH.double().cumprod(2), (0, 0, 1, 0), value=1.0)
        of_chunk_BNHV = [torch.zeros_like(v_BNCHV[:, :, 0])]  # after each of its tokens, from zero
        for factor_BNH, v_BNHV in zip(factors_BNCH.unbind(2), v_BNCHV.unbind(2), strict=True):
            of_chunk_BNHV.append(v_BNHV + factor_BNH.unsqueeze(3) * of_chunk_BNHV[-1])
        kept_BNH = F.pad(kept_BNCH[:, :, -1].cumprod(1), (0, 0, 1, 0), value=1.0).to(dtype)
        kept_BNCHV = kept_BNCH.to(dtype).unsqueeze(4)
        starts_BHV = [torch.zeros_like(v_BNCHV[:, 0, 0]) if state is None else state[:, :, 0]]
        for added_BHV, kept_BHV in zip(of_chunk_BNHV[-1].unbind(1), kept_BNCHV[:, :, -1].unbind(1), strict=True):
            starts_BHV.append(added_BHV + kept_BHV * starts_BHV[-1])
        read = slice(0, -1) if self.before else slice(1, None)

        def finish(entered_BHKV: Tensor | None) -> Tensor:
            starts_BNHV = torch.stack(starts_BHV[:-1], 1)
            if entered_BHKV is not None:
                starts_BNHV = starts_BNHV + kept_BNH[:, :-1].unsqueeze(3) * entered_BHKV.transpose(1, 2)
            out_BNCHV = torch.stack(of_chunk_BNHV[read], 2) + kept_BNCHV[:, :, read] * starts_BNHV.unsqueeze(2)
            return out_BNCHV.flatten(1, 2)[:, :count]

        return Local(starts_BHV[-1].unsqueeze(2), kept_BNH[:, -1, :, None, None] if receives else None, finish)
