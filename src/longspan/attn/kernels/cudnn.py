"""Kernel "cudnn": cuDNN's attention with its log-sum-exp, tile by tile, for masks without windows.

Each document is a separate call, so it is for long sequences, causal or not.

Shape suffixes: B batch, H query heads, K KV heads, Q queries, T keys, D head_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longspan.attn.kernels.base import BackwardInputs, KernelRequest, register
from longspan.attn.kernels.flash import unfit_for_gpu, unlike_flash
from longspan.attn.kernels.tiled import TiledKernel, TileScores
from longspan.compat.torch_attention import cudnn as _cudnn
from longspan.compat.torch_attention import cudnn_backward as _cudnn_backward

_LARGEST = 128


class CudnnKernel(TiledKernel):
    """Masks whose tiles are full or triangles; masked tiles of a custom mask go to "tiled"."""

    name = "cudnn"
    self_check = True

    def refuses(self, request: KernelRequest) -> str | None:
        unable = unlike_flash(request) + ["window"] * (request.mask.window is not None)
        if unable:
            return f"kernel='cudnn' cannot do {' or '.join(unable)}; use kernel='auto'"
        unfit = _unfit(request)
        return None if unfit is None else f"kernel='cudnn' {unfit}; use kernel='auto'"

    def describe(self, request: KernelRequest) -> str:
        return "cuDNN's attention, tile by tile"

    def tile_forward(self, q: Tensor, k: Tensor, v: Tensor, how: TileScores) -> tuple[Tensor, Tensor]:
        """One call."""
        if _leaves(q, k, how):
            return super().tile_forward(q, k, v, how)
        out, lse, *_ = _cudnn(q, k, v, None, True, 0.0, how.kind == "causal", False, scale=how.scale)
        return out, lse.view(q.shape[:3])  # [B, H, Q, 1] in some versions

    def tile_backward(
        self, inputs: BackwardInputs, k: Tensor, v: Tensor, how: TileScores
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One call."""
        q = inputs.q
        if _leaves(q, k, how):
            return super().tile_backward(inputs, k, v, how)
        zero = torch.zeros((), dtype=torch.int64, device=q.device)  # the state of a dropout that is not used
        lse, causal = inputs.lse.contiguous()[..., None], how.kind == "causal"
        saved = (inputs.out, lse, zero, zero, None, None, None, q.shape[2], k.shape[2])
        dq, dk, dv = _cudnn_backward(inputs.grad, q, k, v, *saved, 0.0, causal, scale=how.scale)
        return dq, dk, dv


def _leaves(q: Tensor, k: Tensor, how: TileScores) -> bool:
    """Whether a tile is not for cuDNN: its mask is materialized, or it has a single query or key."""
    return how.kind == "masked" or min(q.shape[2], k.shape[2]) == 1


def _unfit(request: KernelRequest) -> str | None:
    """Return why cuDNN's attention does not support such tensors; None if it does."""
    dims = request.head_dims
    unfit_dim = dims[0] != dims[1] or dims[0] % 8 or dims[0] > _LARGEST
    return unfit_for_gpu(request) or (
        f"needs one head_dim, a multiple of 8 of at most {_LARGEST}, these tensors have {dims[0]} and {dims[1]}"
        if unfit_dim
        else None
    )


register(CudnnKernel())
