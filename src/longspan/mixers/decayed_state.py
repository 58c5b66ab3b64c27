"""Mamba's correction: let each token read the state that entered, decayed by a factor per channel, element and token.

Shape suffixes: B batch, T tokens, H channels, K state size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from longspan.core.tile_sizes import STATE_TILE


def read_decayed(since_BTH: Tensor, A_HK: Tensor, state_BHK: Tensor, q_BTK: Tensor) -> Tensor:
    """Return `[B, T, H]`: for each token and channel the sum over k of `q . state . exp(since * A)`.

    The states of all tokens are `K` times as large as the result. They exist for a tile of tokens at a time, in the
    forward and, recomputed, in the backward. All tensors have one dtype, fp32 or fp64.
    """
    out: Tensor = _ReadDecayed.apply(since_BTH, A_HK, state_BHK, q_BTK)  # type: ignore[no-untyped-call]
    return out


class _ReadDecayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, since: Tensor, A: Tensor, state: Tensor, q: Tensor) -> Tensor:
        ctx.save_for_backward(since, A, state, q)
        out = torch.empty_like(since)
        for tile in _tiles(since, A):
            decayed = _decays(since[:, tile], A).mul_(state.unsqueeze(1))
            out[:, tile] = (decayed @ q[:, tile].unsqueeze(3)).squeeze(3)
            del decayed  # before the next one
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        since, A, state, q = ctx.saved_tensors
        dsince, dA, dstate, dq = (torch.zeros_like(x) for x in (since, A, state, q))
        for tile in _tiles(since, A):
            decays = _decays(since[:, tile], A)
            decayed = decays * state.unsqueeze(1)
            dq[:, tile] = (grad[:, tile].unsqueeze(2) @ decayed).squeeze(2)
            dread = grad[:, tile].unsqueeze(3) * q[:, tile].unsqueeze(2)
            dstate += decays.mul_(dread).sum(1)
            dexponent = decayed.mul_(dread)
            del dread
            dA += torch.mul(dexponent, since[:, tile].unsqueeze(3), out=decays).sum((0, 1))
            dsince[:, tile] = dexponent.mul_(A).sum(3)
            del decays, decayed, dexponent
        return dsince, dA, dstate, dq


def _tiles(since_BTH: Tensor, A_HK: Tensor) -> Iterator[slice]:
    batch, tokens, _ = since_BTH.shape
    size = max(1, STATE_TILE[since_BTH.device.type == "cpu"] // (batch * A_HK.numel()))
    return (slice(start, start + size) for start in range(0, tokens, size))


def _decays(since_BTH: Tensor, A_HK: Tensor) -> Tensor:
    return (since_BTH.unsqueeze(3) * A_HK).exp_()
