"""torch's attention with log-sum-exp, forward and backward, and FlexAttention.

`scaled_dot_product_attention` is public and gives the output alone; a ring adds blocks up by their log-sum-exps, which
only the operators below it give. They are called as their schemas say, which a test compares.
"""

from __future__ import annotations

import importlib.util
from typing import Any, NoReturn

import torch

from longspan.compat.gone import gone


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
    """The module `torch.nn.attention.flex_attention`: `flex_attention`, `create_block_mask`, `AuxRequest`, `BlockMask`.

    Versions: torch 2.11 to 2.13; public, but log-sum-exps were asked for otherwise before 2.9 (`AuxRequest`). Public
    way: this one. When gone: LongspanError.
    """
    try:
        from torch.nn.attention import flex_attention
    except ImportError as error:
        raise gone("torch", "torch.nn.attention.flex_attention", "kernel='flex'", "kernel='auto'") from error
    for name in ("flex_attention", "create_block_mask", "AuxRequest"):
        if not hasattr(flex_attention, name):
            raise gone("torch", f"torch.nn.attention.flex_attention.{name}", "kernel='flex'", "kernel='auto'")
    return flex_attention


def flex_attention(*args: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """FlexAttention's output and log-sum-exp. Versions and public way: as `flex`."""
    module = flex()
    out, aux = module.flex_attention(*args, return_aux=module.AuxRequest(lse=True), **options)
    return out, aux.lse


def flex_block_mask(*args: Any, **options: Any) -> Any:
    """FlexAttention's `create_block_mask`. Versions and public way: as `flex`."""
    return flex().create_block_mask(*args, **options)


def tree_leaves(tree: Any) -> list[Any]:
    """What stands at the ends of nested lists, tuples and dicts.

    Versions: torch 2.11 to 2.13. Public way: none yet. When gone: LongspanError.
    """
    try:
        from torch.utils import _pytree
    except ImportError as error:
        raise gone("torch", "torch.utils._pytree", "looking at nested values") from error
    return list(_pytree.tree_leaves(tree))
