"""Kernels of torch for GPUs: "flash", with windows and all documents of a batch in one call, and "cudnn".

"flash" is torch's flash attention with its log-sum-exp (Dao 2023, arXiv:2307.08691). It computes any mask made of
regions, on one device, a Ulysses rank and in rings, but nothing that changes every score (a mask_mod, a softcap, a
bias). `flash_calls` turns a mask into calls.

Shape suffixes: B batch, H query heads, K KV heads, Q queries, T keys, D head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longspan.attn.kernels.base import (
    BY_REGIONS,
    BackwardInputs,
    BlockKernel,
    Blocks,
    GradientSum,
    KernelRequest,
    SoftmaxAccumulator,
    pad_heads,
    register,
)
from longspan.attn.kernels.flash_calls import FlashCall, flash_calls
from longspan.attn.kernels.tiled import TiledKernel, TileScores
from longspan.attn.score import Scores
from longspan.compat.torch_attention import cudnn as _cudnn
from longspan.compat.torch_attention import cudnn_backward as _cudnn_backward
from longspan.compat.torch_attention import flash_varlen as _flash
from longspan.compat.torch_attention import flash_varlen_backward as _flash_backward

_LARGEST, _LARGEST_CUDNN = 256, 128
"""Largest head_dims. For flash attention smaller ones are padded with zeros to a multiple of 8, which is exact."""


@dataclass(frozen=True, eq=False, slots=True)
class FlashBlock:
    """The calls of the local queries with one KV block."""

    calls: tuple[FlashCall, ...]  # their results are merged
    state: Tensor  # random number state of the unused dropout
    unused: Tensor  # another unused argument of the backward


class FlashKernel(BlockKernel):
    """Every mask that is made of regions, in a few calls of flash attention."""

    name = "flash"
    computes = BY_REGIONS | {"sinks"}

    def refuses(self, request: KernelRequest) -> str | None:
        unfit = _unfit(request)
        return None if unfit is None else f"kernel='flash' {unfit}; use kernel='auto'"

    def describe(self, request: KernelRequest) -> str:
        return "torch's flash attention, windows and documents in one call each"

    def prepare(self, blocks: Blocks) -> Sequence[FlashBlock | None]:
        """Return each block's calls."""
        state = torch.zeros(2, dtype=torch.uint64, device=blocks.device)
        unused = torch.empty(0, device=blocks.device)
        return [FlashBlock(calls, state, unused) if calls else None for calls in flash_calls(blocks)]

    def to_kernel_layout(self, xs: Sequence[Tensor], v_dim: int, scores: Scores) -> list[Tensor]:
        """See `BlockKernel`."""
        dim = _kernel_dim(max(xs[0].shape[3], v_dim))
        return [pad_heads(x, dim) for x in xs]

    def accumulate(
        self, into: SoftmaxAccumulator, q: Tensor, k: Tensor, v: Tensor, block: FlashBlock, scores: Scores
    ) -> None:
        scale, v_dim = scores.scale_of(k.shape[3]), v.shape[3]
        q, k, v = padded(q, k, v)
        for call in block.calls:
            out, lse, *_ = _flash(
                *(tokens.take(x) for tokens, x in ((call.queries, q), (call.keys, k), (call.keys, v))),
                *_borders(call),
                0.0,
                call.causal,
                False,
                **_how(call, scale),
            )
            out, rows, queries = call.queries.put(out, q.shape)
            lse = call.queries.put(lse.transpose(-1, -2), q.shape, -torch.inf)[0]
            into.add(out[..., :v_dim], lse, rows, queries)

    def accumulate_gradients(
        self,
        into: tuple[GradientSum, GradientSum, GradientSum],
        inputs: BackwardInputs,
        k: Tensor,
        v: Tensor,
        block: FlashBlock,
        scores: Scores,
    ) -> None:
        scale = scores.scale_of(k.shape[3])
        q, k, v, grad, out = padded(inputs.q, k, v, inputs.grad, inputs.out)
        for call in block.calls:
            of_q, of_k = call.queries, call.keys
            parts = _flash_backward(
                of_q.take(grad),
                of_q.take(q),
                of_k.take(k),
                of_k.take(v),
                of_q.take(out),
                of_q.take(inputs.lse).transpose(-1, -2).contiguous(),
                *_borders(call),
                0.0,
                call.causal,
                block.state,
                block.unused,
                **_how(call, scale),
            )
            for total, tokens, more in zip(into, (of_q, of_k, of_k), parts, strict=True):
                more, rows, columns = tokens.put(more, total.shape)
                at = slice(*rows or (None,)), slice(None), slice(*columns or (None,))
                total.add(more[..., : total.shape[3]], at)


def _unfit_for_gpu(request: KernelRequest) -> str | None:
    """Return why torch's attention kernels for GPUs do not support such tensors, whatever their head_dim."""
    if request.device.type != "cuda" or torch.version.hip is not None:
        where = "AMD's" if request.device.type == "cuda" else f"device {request.device.type!r}"
        return f"is for NVIDIA's GPUs, these tensors are on {where}"
    if torch.cuda.get_device_capability(request.device) < (8, 0):
        return "needs a GPU of compute capability 8.0 (Ampere) or newer"
    if request.dtype not in (torch.float16, torch.bfloat16):
        return f"needs fp16 or bf16, these tensors are {str(request.dtype).removeprefix('torch.')}"
    return None


def _unfit(request: KernelRequest) -> str | None:
    dim = max(request.head_dims)
    too_wide = f"needs a head_dim of at most {_LARGEST}, these tensors have {dim}" if dim > _LARGEST else None
    return _unfit_for_gpu(request) or too_wide


def padded(*xs: Tensor) -> list[Tensor]:
    """Pad heads to one head_dim that the kernel takes."""
    dim = _kernel_dim(max(x.shape[3] for x in xs))
    return [pad_heads(x, dim) for x in xs]


def _kernel_dim(dim: int) -> int:
    return -(-dim // 8) * 8


def _borders(call: FlashCall) -> tuple[Tensor | None, Tensor | None, int, int]:
    return *(call.ends or (None, None)), *call.longest


def _how(call: FlashCall, scale: float) -> dict[str, Any]:
    # is_causal sets the right limit. With an explicit one, FA2 does not pack the query heads of a lone query.
    left, right = (-1, -1) if call.causal else call.window
    return {"scale": scale, "window_size_left": left, "window_size_right": right}


class CudnnKernel(TiledKernel):
    """cuDNN's attention with its log-sum-exp, tile by tile, for masks without windows.

    Each document is a separate call, so it is for long sequences. Masked tiles of a custom mask go to "tiled".
    """

    name = "cudnn"
    computes = FlashKernel.computes - {"window", "a window to both sides"}

    def refuses(self, request: KernelRequest) -> str | None:
        unfit = _unfit_for_cudnn(request)
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


def _unfit_for_cudnn(request: KernelRequest) -> str | None:
    """Return why cuDNN's attention does not support such tensors; None if it does."""
    dim, v_dim = request.head_dims
    unfit = _unfit_for_gpu(request)
    if unfit is None and (dim != v_dim or dim % 8 or dim > _LARGEST_CUDNN):
        return f"needs one head_dim, a multiple of 8 of at most {_LARGEST_CUDNN}, these tensors have {dim} and {v_dim}"
    return unfit


FLASH = register(FlashKernel())
CUDNN = register(CudnnKernel())
