"""torch's attention with log-sum-exp, forward and backward, and FlexAttention.

`scaled_dot_product_attention` is public and gives the output alone; a ring adds blocks up by their log-sum-exps, which
only the operators below it give. They are called as their schemas say, which a test compares.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from longspan.compat.gone import gone
from longspan.core.errors import LongspanError


def _aten(name: str) -> Any:
    """An operator; where torch has none of this name, something that says so when it is called.

    (Not at the import: a run on CPUs needs no operator for GPUs.)
    """
    found = getattr(torch.ops.aten, name, None)
    if found is not None:
        return found

    def missing(*_: Any, **__: Any) -> NoReturn:
        raise gone("torch", f"aten::{name}", "attention with its log-sum-exp", "kernel='eager'")

    return missing


# Of each operator: versions: torch 2.11 to 2.13. Public way: none gives the log-sum-exp. When gone: LongspanError when
# it is called.

flash_cpu = _aten("_scaled_dot_product_flash_attention_for_cpu")
"""(q, k, v [B, H, S, D], dropout_p, is_causal, *, attn_mask, scale) -> (out, lse fp32 [B, H, S])."""

flash_cpu_backward = _aten("_scaled_dot_product_flash_attention_for_cpu_backward")
"""(grad_out, q, k, v, out, lse, dropout_p, is_causal, *, attn_mask, scale) -> (dq, dk, dv)."""

flash_cuda = _aten("_scaled_dot_product_flash_attention")
"""(q, k, v [B, H, S, D], dropout_p, is_causal, return_debug_mask, *, scale) -> (out, lse, cu_seqlens of q, of k,
longest q, longest k, rng state, an unused tensor, debug mask)."""

flash_cuda_backward = _aten("_scaled_dot_product_flash_attention_backward")
"""(grad_out, q, k, v, out, lse, cu_seqlens of q, of k, longest q, longest k, dropout_p, is_causal, rng seed, rng
offset, *, scale) -> (dq, dk, dv)."""

flash_varlen = _aten("_flash_attention_forward")
"""(q, k, v [B, S, H, D] or packed [T, H, D], cu_seqlens of q, of k, longest q, longest k, dropout_p, is_causal,
return_debug_mask, *, scale, window_size_left, window_size_right, ...) -> (out, lse, rng state, unused, debug mask)."""

flash_varlen_backward = _aten("_flash_attention_backward")
"""(grad_out, q, k, v, out, lse, cu_seqlens of q, of k, longest q, longest k, dropout_p, is_causal, rng state, unused,
*, scale, window_size_left, window_size_right) -> (dq, dk, dv)."""

cudnn = _aten("_scaled_dot_product_cudnn_attention")
"""(q, k, v [B, H, S, D], attn_bias, compute_log_sumexp, dropout_p, is_causal, return_debug_mask, *, scale) ->
(out, lse, cu_seqlens of q, of k, longest q, longest k, rng seed, rng offset, debug mask)."""

cudnn_backward = _aten("_scaled_dot_product_cudnn_attention_backward")
"""(grad_out, q, k, v, out, lse, rng seed, rng offset, attn_bias, cu_seqlens of q, of k, longest q, longest k,
dropout_p, is_causal, *, scale) -> (dq, dk, dv)."""


# Implementations of flash attention that torch can put in the place of its own (FlashAttention-2), for the whole
# process. Of all four functions: versions: torch 2.11 to 2.13 (FA3 not in every one). Public way:
# `torch.nn.attention.activate_flash_attention_impl` and `current_flash_attention_impl`, a prototype.
# When gone: the implementation is refused, and torch's own is used.

FLASH_IMPLEMENTATIONS = {"flash3": "FA3", "flash4": "FA4"}
"""Names of kernels, and torch's names of what they run."""

_PACKAGES = {
    "FA3": ("flash_attn_interface", "flash-attn-3", ((9, 0),)),
    "FA4": ("flash_attn.cute.interface", "flash-attn-4", ((9, 0), (10, 0), (10, 3))),
}
"""Of each the module that torch imports, the package that has it, and compute capabilities of GPUs that it runs on."""


def missing_flash(implementation: str, device: torch.device) -> str | None:
    """Why "FA3" or "FA4" cannot be activated for a GPU, and how it can; None if it can. Nothing is imported."""
    module, package, capabilities = _PACKAGES[implementation]
    attention = torch.nn.attention
    known: list[str] = getattr(attention, "list_flash_attention_impls", list)()
    if implementation not in known or not hasattr(attention, "activate_flash_attention_impl"):
        return f"torch {torch.__version__} knows {', '.join(known) or 'no other flash attention'}; use a newer torch"
    capability = torch.cuda.get_device_capability(device)
    if capability not in capabilities:
        fits = ", ".join(f"{major}.{minor}" for major, minor in capabilities)
        return (
            f"{implementation} is for GPUs of compute capability {fits}, this one has {'.'.join(map(str, capability))}"
        )
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        found = None
    if found is None:
        return f"{implementation} is not installed (no module {module}); `pip install {package}`"
    return None


def active_flash() -> str | None:
    """Which implementation torch runs in the place of its own; None for its own."""
    current: Any = getattr(torch.nn.attention, "current_flash_attention_impl", None)
    active: str | None = None if current is None else current()
    return active


def activate_flash(implementation: str) -> None:
    """Have torch run "FA3" or "FA4" wherever it runs flash attention, in this whole process.

    `torch.nn.attention.restore_flash_attention_impl()` takes it back.
    """
    if active_flash() != implementation:
        torch.nn.attention.activate_flash_attention_impl(implementation)


def flex() -> Any:
    """The module `torch.nn.attention.flex_attention`: `flex_attention`, `BlockMask`, `AuxRequest`.

    Versions: torch 2.11 to 2.13; public, but log-sum-exps were asked for otherwise before 2.9 (`AuxRequest`). Public
    way: this one. When gone: LongspanError.
    """
    try:
        from torch.nn.attention import flex_attention
    except ImportError as error:
        raise gone("torch", "torch.nn.attention.flex_attention", "kernel='flex'", "kernel='auto'") from error
    for name in ("flex_attention", "BlockMask", "AuxRequest"):
        if not hasattr(flex_attention, name):
            raise gone("torch", f"torch.nn.attention.flex_attention.{name}", "kernel='flex'", "kernel='auto'")
    return flex_attention


def flex_attend() -> Callable[..., tuple[Tensor, Tensor]]:
    """FlexAttention's output and log-sum-exp, as one function that a compiler takes whole.

    It is given the tensors of a BlockMask and not the BlockMask, whose lengths are numbers: a compiler would make a
    program for each. Tokens come in blocks, `[B, heads, blocks, block, D]`, so that a compiler which knows nothing of
    the number of blocks still knows that they divide the length: FlexAttention then checks no borders.

    Versions and public way: as `flex`.
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


RECOMPILE_LIMIT = 64
"""Programs of one function: each kind of layer needs two or three, and torch's own limit is 8."""


def compiled_whole(function: Callable[..., Any], what: str, way_out: str, **options: Any) -> Callable[..., Any]:
    """`torch.compile(function, fullgraph=True)` whose limit of programs is an error, not a fallback.

    Without `fullgraph` torch runs a function that was compiled too often as it is: for FlexAttention with all scores
    materialized, and a line in the log. A size that differs between calls is left open from the second program on, one
    that is marked (`mark_dynamic`) from the first.

    Versions: torch 2.11 to 2.13 (`torch._dynamo.config.recompile_limit`, `torch._dynamo.exc.FailOnRecompileLimitHit`).
    Public way: `torch.compile(recompile_limit=)` from 2.13 on, for the number alone. When gone: torch's own limit, and
    torch's own exception.

    Args:
        function: to compile.
        what: names it in the error.
        way_out: ends the error.
        options: `torch.compile`'s.

    Returns:
        A function like it, that raises LongspanError with the number of programs.
    """
    compiled = torch.compile(function, fullgraph=True, **options)
    dynamo = importlib.import_module("torch._dynamo")
    at_limit: Any = getattr(dynamo.exc, "FailOnRecompileLimitHit", ())

    def run(*args: Any) -> Any:
        theirs = getattr(dynamo.config, "recompile_limit", None)
        limit = RECOMPILE_LIMIT if theirs is None else max(theirs, RECOMPILE_LIMIT)
        wider = dynamo.config.patch(recompile_limit=limit) if theirs is not None else contextlib.nullcontext()
        try:
            with wider:
                return compiled(*args)
        except at_limit as error:
            raise LongspanError(
                f"{what} has been compiled {limit} times in this process, each time for other arguments, and these "
                f"need one more; {way_out}, or raise torch._dynamo.config.recompile_limit above {limit} "
                f"(TORCH_LOGS=recompiles says what differs)"
            ) from error

    return run


def mark_dynamic(x: Tensor, *dims: int) -> Tensor:
    """`x`, whose sizes in `dims` a compiler leaves open. Sizes of 0 and 1 it never does.

    Versions: torch 2.11 to 2.13 (`torch._dynamo.mark_dynamic`, documented). Public way: this one. When gone: an
    AttributeError.
    """
    importlib.import_module("torch._dynamo").mark_dynamic(x, list(dims))
    return x


def tree_leaves(tree: Any) -> list[Any]:
    """What stands at the ends of nested lists, tuples and dicts.

    Versions: all. Public way: none yet. When gone: LongspanError.
    """
    try:
        from torch.utils import _pytree
    except ImportError as error:
        raise gone("torch", "torch.utils._pytree", "looking at nested values") from error
    return list(_pytree.tree_leaves(tree))
