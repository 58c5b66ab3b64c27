"""Kernel "cudnn": cuDNN's attention with its log-sum-exp, tile by tile: what has no window and touches no score.

It knows no window, and of documents each is a call, so that it is for long sequences, causal or not. "auto" does not
take it unless a table says so (`table.toml`).

Shape suffixes: B batch, H query heads, K KV heads, Q queries, T keys, D head_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longspan.attn.kernels.base import BackwardInputs, KernelRequest, register
from longspan.attn.kernels.flash import unlike_flash
from longspan.attn.kernels.tiled import TiledKernel, TileScores
from longspan.compat.torch_attention import cudnn as _cudnn
from longspan.compat.torch_attention import cudnn_backward as _cudnn_backward

_LARGEST = 128


class CudnnKernel(TiledKernel):
    """Masks whose tiles are whole or triangles; the others of a mask of one's own are left to "tiled"."""

    name = "cudnn"

    def refuses(self, need: KernelRequest) -> str | None:
        """Windows, what must touch every score, and tensors that cuDNN's attention does not take."""
        unable = unlike_flash(need) + ["window"] * (need.mask.window is not None)
        if unable:
            return f"kernel='cudnn' cannot do {' or '.join(unable)}; use kernel='auto', which takes one that can"
        unfit = _unfit(need)
        return None if unfit is None else f"kernel='cudnn' {unfit}; use kernel='auto'"

    def describe(self, need: KernelRequest) -> str:
        """What it does."""
        return "cuDNN's attention, tile by tile"

    def tile_forward(self, q: Tensor, k: Tensor, v: Tensor, how: TileScores) -> tuple[Tensor, Tensor]:
        """One call."""
        if _leaves(q, k, how):
            return super().tile_forward(q, k, v, how)
        out, lse, *_ = _cudnn(q, k, v, None, True, 0.0, how.kind == "causal", False, scale=how.scale)
        return out, lse.view(q.shape[:3])  # [B, H, Q, 1] in some versions

    def tile_backward(
        self, done: BackwardInputs, k: Tensor, v: Tensor, how: TileScores
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One call."""
        q = done.q
        if _leaves(q, k, how):
            return super().tile_backward(done, k, v, how)
        zero = torch.zeros((), dtype=torch.int64, device=q.device)  # the state of a dropout that is not used
        lse, causal = done.lse.contiguous()[..., None], how.kind == "causal"
        saved = (done.out, lse, zero, zero, None, None, None, q.shape[2], k.shape[2])
        dq, dk, dv = _cudnn_backward(done.grad, q, k, v, *saved, 0.0, causal, scale=how.scale)
        return dq, dk, dv


def _leaves(q: Tensor, k: Tensor, how: TileScores) -> bool:
    """Whether a tile is not for cuDNN: its mask is written out, or it is a single query or key."""
    return how.kind == "masked" or min(q.shape[2], k.shape[2]) == 1


def _unfit(need: KernelRequest) -> str | None:
    """Why cuDNN's attention does not take such tensors."""
    if need.device.type != "cuda" or torch.version.hip is not None:
        return f"is for NVIDIA's GPUs, these tensors are on device {need.device.type!r}"
    if torch.cuda.get_device_capability(need.device) < (8, 0):
        return "needs a GPU of compute capability 8.0 (Ampere) or newer"
    if need.dtype not in (torch.float16, torch.bfloat16):
        return f"takes fp16 and bf16, these tensors are {str(need.dtype).removeprefix('torch.')}"
    dims = need.head_dims
    if dims[0] != dims[1] or dims[0] % 8 or dims[0] > _LARGEST:
        return f"takes one head_dim, a multiple of 8 of at most {_LARGEST}, these tensors have {dims[0]} and {dims[1]}"
    return None


CUDNN = CudnnKernel()
register(CUDNN)
