"""Kernel "sdpa": one call of torch's `scaled_dot_product_attention`, causal or full, with autograd's gradients.

Shape suffixes: B batch, S tokens, H query heads, K KV heads, D head_dim of q and k, V of v.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from longspan.attn.kernels.base import AutogradKernel, Blocks, KernelRequest, register
from longspan.attn.score import Scores


class SdpaKernel(AutogradKernel):
    """Attention of all tokens, causal or to all of them."""

    name = "sdpa"

    def refuses(self, request: KernelRequest) -> str | None:
        return None

    def describe(self, request: KernelRequest) -> str:
        return "torch's scaled_dot_product_attention"

    def prepare(self, blocks: Blocks) -> tuple[bool]:
        """Return whether the attention is causal."""
        return (blocks.mask.causal,)

    def own_inputs(self, *qkv_BSHD: Tensor) -> tuple[Tensor, ...]:
        """See `AutogradKernel`: heads first on a CPU."""
        return tuple(x.transpose(1, 2) for x in _heads_first(*qkv_BSHD))

    def run(self, q_BSHD: Tensor, k_BSKD: Tensor, v_BSKV: Tensor, prepared: bool, scores: Scores) -> Tensor:
        """See `AutogradKernel`."""
        options: dict[str, Any] = {"is_causal": prepared, "scale": scores.scale}
        if q_BSHD.shape[2] != k_BSKD.shape[2]:  # a branch, because the comparison may be symbolic when compiled
            options["enable_gqa"] = True
        out_BHSV: Tensor = F.scaled_dot_product_attention(*_heads_first(q_BSHD, k_BSKD, v_BSKV), **options)
        return out_BHSV.transpose(1, 2)


def _heads_first(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return `[B, S, H, D]` as `[B, H, S, D]`: views, or copies on a CPU where they pay off."""
    q_BHSD, k_BKSD, v_BKSV = (x.transpose(1, 2) for x in (q, k, v))
    if q.device.type == "cpu":
        # The CPU kernel reads K and V again for every block of queries: contiguous heads are worth a copy.
        k_BKSD, v_BKSV = k_BKSD.contiguous(), v_BKSV.contiguous()
        if q.requires_grad and _within_a_row(q):
            # `q` is a view of the packed QKV buffer. Copy it, so that saving `q` does not keep K and V alive.
            q_BHSD = q_BHSD.contiguous()
    return q_BHSD, k_BKSD, v_BKSV


def _within_a_row(x_BSHD: Tensor) -> bool:
    """Whether the heads are a slice of wider rows, by strides, which a compiler knows."""
    B, _, H, D = x_BSHD.shape
    wider = x_BSHD.stride(1) > H * D and (B == 1 or x_BSHD.stride(0) > H * D)
    return wider and (H == 1 or x_BSHD.stride(2) == D)


SDPA = register(SdpaKernel())
