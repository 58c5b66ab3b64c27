"""Kernel "flash_attn": the package of that name (Dao 2023, arXiv:2307.08691), all documents of a batch in one call.

Shape suffixes: B batch, S tokens, H query heads, K KV heads, D head_dim of q and k, V of v.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longspan.attn.kernels.base import AutogradKernel, Blocks, KernelRequest, register
from longspan.attn.kernels.sdpa import SDPA, segments_with_chunks
from longspan.attn.score import Scores
from longspan.core.errors import LongspanError


def import_flash_attn() -> Any:
    """Import the package flash_attn; raise with an installation hint if it is missing."""
    try:
        return importlib.import_module("flash_attn")
    except ImportError as error:
        raise LongspanError(
            f"kernel='flash_attn' is not installed ({error}); `pip install flash-attn`, or use kernel='sdpa'"
        ) from error


@dataclass(frozen=True, eq=False, slots=True)
class Packed:
    """One call for all segments."""

    options: dict[str, Any]  # keyword arguments of the package's functions
    at: Tensor | None = None  # indices of all segments' tokens in `[B * S]`, int64; None without segments
    ends: Tensor | None = None  # the segments' borders among these tokens, int32 [segments + 1] (`cu_seqlens`)
    longest: int = 0  # tokens of the longest segment


class FlashAttnKernel(AutogradKernel):
    """Causal or not, windows, segments, chunks, softcap."""

    name = "flash_attn"
    computes = SDPA.computes | {"softcap", "a window to both sides"}

    def refuses(self, request: KernelRequest) -> str | None:
        import_flash_attn()
        return None

    def describe(self, request: KernelRequest) -> str:
        return "the package flash_attn, all segments in one call"

    def prepare_batch(self, blocks: Blocks) -> Packed:
        """Return indices and borders of the segments, on the device."""
        mask, segments, S = blocks.mask, segments_with_chunks(blocks), blocks.lengths[0]
        left = -1 if mask.window is None else mask.window - 1
        options = {
            "causal": mask.causal,
            "window_size": (left, 0 if mask.window is not None and mask.causal else left),
            "softcap": blocks.kind.softcap or 0.0,
        }
        if segments is None:
            return Packed(options)
        runs = [(b * S + start, b * S + stop) for b, row in enumerate(segments) for start, stop in row]
        at = torch.cat([torch.arange(start, stop) for start, stop in runs])
        sizes = torch.tensor([0, *(stop - start for start, stop in runs)])
        ends = sizes.cumsum(0).to(torch.int32)
        longest = max(stop - start for start, stop in runs)
        return Packed(options, at.to(blocks.device), ends.to(blocks.device), longest)

    def run(self, q_BSHD: Tensor, k_BSKD: Tensor, v_BSKV: Tensor, prepared: Packed, scores: Scores) -> Tensor:
        flash, options = import_flash_attn(), {**prepared.options, "softmax_scale": scores.scale}
        at, ends = prepared.at, prepared.ends
        if at is None:
            out: Tensor = flash.flash_attn_func(q_BSHD, k_BSKD, v_BSKV, **options)
            return out
        B, S = q_BSHD.shape[:2]
        q, k, v = (x.flatten(0, 1).index_select(0, at) for x in (q_BSHD, k_BSKD, v_BSKV))
        packed = flash.flash_attn_varlen_func(q, k, v, ends, ends, prepared.longest, prepared.longest, **options)
        out = packed.new_zeros(B * S, *packed.shape[1:]).index_copy(0, at, packed).unflatten(0, (B, S))
        return out


register(FlashAttnKernel())
