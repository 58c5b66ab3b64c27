"""torch's attention with log-sum-exp, forward and backward, and FlexAttention.

The public `scaled_dot_product_attention` returns the output alone. A ring merges blocks by their log-sum-exps, which
only its private operators return. A test compares their schemas with the descriptions here.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from longspan.core.errors import LongspanError

_aten = torch.ops.aten

flash_cpu = _aten._scaled_dot_product_flash_attention_for_cpu
"""(q, k, v [B, H, S, D], dropout_p, is_causal, *, attn_mask, scale) -> (out, lse fp32 [B, H, S])."""

flash_cpu_backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward
"""(grad_out, q, k, v, out, lse, dropout_p, is_causal, *, attn_mask, scale) -> (dq, dk, dv)."""

flash_cuda = _aten._scaled_dot_product_flash_attention
"""(q, k, v [B, H, S, D], dropout_p, is_causal, return_debug_mask, *, scale) -> (out, lse, cu_seqlens of q, of k,
longest q, longest k, rng state, an unused tensor, debug mask)."""

flash_cuda_backward = _aten._scaled_dot_product_flash_attention_backward
"""(grad_out, q, k, v, out, lse, cu_seqlens of q, of k, longest q, longest k, dropout_p, is_causal, rng seed, rng
offset, *, scale) -> (dq, dk, dv)."""

flash_varlen = _aten._flash_attention_forward
"""(q, k, v [B, S, H, D] or packed [T, H, D], cu_seqlens of q, of k, longest q, longest k, dropout_p, is_causal,
return_debug_mask, *, scale, window_size_left, window_size_right, ...) -> (out, lse, rng state, unused, debug mask)."""

flash_varlen_backward = _aten._flash_attention_backward
"""(grad_out, q, k, v, out, lse, cu_seqlens of q, of k, longest q, longest k, dropout_p, is_causal, rng state, unused,
*, scale, window_size_left, window_size_right) -> (dq, dk, dv)."""

cudnn = _aten._scaled_dot_product_cudnn_attention
"""(q, k, v [B, H, S, D], attn_bias, compute_log_sumexp, dropout_p, is_causal, return_debug_mask, *, scale) ->
(out, lse, cu_seqlens of q, of k, longest q, longest k, rng seed, rng offset, debug mask)."""

cudnn_backward = _aten._scaled_dot_product_cudnn_attention_backward
"""(grad_out, q, k, v, out, lse, rng seed, rng offset, attn_bias, cu_seqlens of q, of k, longest q, longest k,
dropout_p, is_causal, *, scale) -> (dq, dk, dv)."""


def flex() -> Any:
    """Return the module `torch.nn.attention.flex_attention`, which takes a moment to import."""
    return importlib.import_module("torch.nn.attention.flex_attention")


def flex_attend() -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a function of FlexAttention's output and log-sum-exp, without graph breaks.

    It takes the tensors of a BlockMask, whose lengths are numbers, as a compiler would make a program for each. Tokens
    come in blocks, `[B, heads, blocks, block, D]`, so that a compiler knows that blocks divide the length even if their
    number is dynamic: FlexAttention then checks no borders.
    """
    module = flex()

    def attend(
        q: Tensor, k: Tensor, v: Tensor, blocks: tuple[Tensor | None, ...], mask_mod: Any, score_mod: Any,
        scale: float | None, enable_gqa: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        size = q.shape[3], k.shape[3]
        q, k, v = (x.view(*x.shape[:2], x.shape[2] * x.shape[3], x.shape[4]) for x in (q, k, v))
        mask = module.BlockMask((q.shape[2], k.shape[2]), *blocks, BLOCK_SIZE=size, mask_mod=mask_mod)
        out, aux = module.flex_attention(
            q, k, v, score_mod=score_mod, block_mask=mask, scale=scale, enable_gqa=enable_gqa,
            return_aux=module.AuxRequest(lse=True),
        )  # fmt: skip
        return out, aux.lse

    return attend


def flex_attend_backward() -> Callable[..., tuple[Tensor, Tensor, Tensor]] | None:
    """Return a function of FlexAttention's dq, dk and dv, from output and log-sum-exp; None if torch cannot trace it.

    It takes what `flex_attend`'s function does, and after `v` the output, its log-sum-exp (natural logarithm) and its
    gradient. They may be those of a whole row of scores, of which `k` and `v` are one block.

    The compiler traces a call of this operator from torch 2.13 on. Autograd would run the forward a second time.
    """
    module = flex()
    hops: Any = importlib.import_module("torch._higher_order_ops.flex_attention")
    tracing = importlib.import_module("torch._dynamo.variables.higher_order_ops")
    if not hasattr(getattr(tracing, "FlexAttentionBackwardHighOrderVariable", None), "create_wrapped_node"):
        return None
    hops.create_fw_bw_graph = _among_fake_tensors(hops.create_fw_bw_graph)

    def unchanged(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return score

    def attend_backward(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad: Tensor, blocks: tuple[Tensor | None, ...],
        mask_mod: Any, score_mod: Any, scale: float | None, enable_gqa: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        size = q.shape[3], k.shape[3]
        q, k, v, out, lse, grad = (x.view(*x.shape[:2], x.shape[2] * x.shape[3], -1) for x in (q, k, v, out, lse, grad))
        for x in (q, k, v):  # as flex_attention does
            torch._dynamo.mark_static(x, -3)
            torch._dynamo.mark_static(x, -1)
        mask = module.BlockMask((q.shape[2], k.shape[2]), *blocks, BLOCK_SIZE=size, mask_mod=mask_mod)
        options = module._apply_kernel_options(q, k, v, False, None, module.AuxRequest(lse=True))
        dq, dk, dv, _ = torch.ops.higher_order.flex_attention_backward(
            q, k, v, out, lse[..., 0] / math.log(2), grad, None, score_mod or unchanged, None, mask.as_tuple(),
            1 / math.sqrt(q.shape[3]) if scale is None else scale, options, (), (),
        )  # fmt: skip
        return dq, dk, dv

    return attend_backward


def _among_fake_tensors(differentiate: Callable[..., Any]) -> Callable[..., Any]:
    """Let torch differentiate a score function as within AOTAutograd: with gradients, fake tensors and tensor indices.

    Version 2.13 sees to none of them if the compiler traces a call of the backward operator.
    """
    index = importlib.import_module("torch._dynamo._trace_wrapped_higher_order_op").TransformGetItemToIndex
    fake_mode_of = importlib.import_module("torch._guards").detect_fake_mode

    def within(score_mod: Any, index_values: Any, other_buffers: Any) -> Any:
        with torch.enable_grad(), index(), fake_mode_of(index_values) or contextlib.nullcontext():
            return differentiate(score_mod, index_values, other_buffers)

    return within


RECOMPILE_LIMIT = 64
"""Programs of one function: each kind of layer needs two or three; torch's default is 8."""


def compiled_whole(function: Callable[..., Any], what: str, hint: str, **options: Any) -> Callable[..., Any]:
    """Return `torch.compile(function, fullgraph=True)` that raises LongspanError at the limit of programs.

    At the limit torch would run the plain function: for FlexAttention with all scores materialized, and a line in the
    log. A size that differs between calls is dynamic from the second program on, a marked one (`mark_dynamic`) from the
    first. The error names the function by `what`, and suggests `hint`.
    """
    compiled = torch.compile(function, fullgraph=True, **options)
    dynamo = importlib.import_module("torch._dynamo")

    def run(*args: Any) -> Any:
        limit = max(dynamo.config.recompile_limit, RECOMPILE_LIMIT)
        try:
            with dynamo.config.patch(recompile_limit=limit):
                return compiled(*args)
        except dynamo.exc.FailOnRecompileLimitHit as error:
            raise LongspanError(
                f"{what} has been compiled {limit} times in this process, each time for other arguments, and these "
                f"need one more; {hint}, or raise torch._dynamo.config.recompile_limit above {limit} "
                f"(TORCH_LOGS=recompiles shows what differs)"
            ) from error

    return run


def mark_dynamic(x: Tensor, *dims: int) -> Tensor:
    """Return `x` with dynamic sizes in `dims` for a compiler; sizes of 0 and 1 stay static."""
    importlib.import_module("torch._dynamo").mark_dynamic(x, list(dims))
    return x
