"""Mixers that call flash-linear-attention's kernels without widening the values to compute a transition.

Without a delta rule the transition is a factor that follows from the decays. With a delta rule, the kernels for context
parallelism exchange states themselves, as state passing does: one all-gather in the forward, and one of the gradients
in the backward. They take one row, in a contiguous or zigzag layout.

Shape suffixes: B batch, T tokens, H value heads, K key dim, V value dim, D is K or 1.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.mixers.fragments import FragmentTable
from longspan.mixers.mixer import ChunkFunction, Local, Tokens

WIDEST_KEY = 256
"""The largest key dim of the kernels for context parallelism."""


@dataclass(frozen=True)
class DecayFunction:
    """Linear attention without a delta rule, by a function of the kind that `ChunkFunction` takes."""

    function: Callable[..., tuple[Tensor, Tensor]]
    causal: bool = True

    def columns(self, tokens: Tokens) -> int:
        """Return 1 for a factor, 0 without decay."""
        return int(tokens.decay is not None)

    def local(self, tokens: Tokens, state: Tensor | None, receives: bool) -> Local:
        """Call the function once."""
        out_BTHV, final_BHKV = self.function(
            tokens.q, tokens.k, tokens.v, g=tokens.decay, beta=None, initial_state=state, output_final_state=True
        )
        dtype, (H, K, _) = tokens.state_dtype, tokens.state_shape
        kept_BTHD = transition = None
        if receives and tokens.decay is not None:
            kept_BTHD = tokens.decay.double().cumsum(1).exp().to(dtype)
            kept_BTHD = kept_BTHD.unsqueeze(-1) if kept_BTHD.dim() == 3 else kept_BTHD
            transition = kept_BTHD[:, -1].unsqueeze(-1).expand(-1, -1, K, -1)

        def finish(entered_BHKV: Tensor | None) -> Tensor:
            if entered_BHKV is None:
                return out_BTHV
            q_BTHK = tokens.q.to(dtype).repeat_interleave(H // tokens.q.shape[2], 2)
            if kept_BTHD is not None:
                q_BTHK = q_BTHK * kept_BTHD
            return out_BTHV + (q_BTHK.transpose(1, 2) @ entered_BHKV).transpose(1, 2)

        return Local(final_BHKV.to(dtype), transition, finish)


@dataclass(frozen=True)
class DeltaRuleFunction(ChunkFunction):
    """The delta rule: by `exchanging` over all ranks where that is possible, else by a function and state passing."""

    # `f(q, k, v, g=, beta=, group=, ...)` returns my tokens' output; the other arguments are those of `cut_sequence`.
    exchanging: Callable[..., Tensor] | None = None

    def over_ranks(self, tokens: Tokens, table: FragmentTable, group: dist.ProcessGroup) -> Tensor | None:
        """Return the output of my tokens, padding included; None, on every rank, if the kernels cannot."""
        if self.exchanging is None or tokens.k.shape[3] > WIDEST_KEY:
            return None
        cut = cut_sequence(table, tokens.q.device)
        if cut is None:
            return None
        return self.exchanging(tokens.q, tokens.k, tokens.v, g=tokens.decay, beta=tokens.beta, group=group, **cut)


@functools.lru_cache(maxsize=8)
def cut_sequence(table: FragmentTable, device: torch.device) -> dict[str, Any] | None:
    """Return the arguments of `build_cp_context`; None for several rows, or another layout than contiguous and zigzag.

    Padding is a separate sequence.
    """
    (first, *others), ranks = table.rows, len({rank for rank, _ in table.runs})
    fronts = tuple((rank, 0) for rank in range(ranks))
    zigzag = (*fronts, *((rank, 1) for rank in reversed(range(ranks - 1))))
    if others or table.runs not in (fronts, zigzag):
        return None
    bounds = sorted({0, ranks * table.tokens, *(bound for document in first for bound in document)})
    cu_seqlens = torch.tensor(bounds)
    return {
        "layout": "contiguous" if table.runs == fronts else "zigzag",
        "cu_seqlens": cu_seqlens.to(device),
        "cu_seqlens_cpu": cu_seqlens,
    }
