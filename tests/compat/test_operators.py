"""torch's private attention operators, called as longspan calls them: names, arguments, and shapes of results.

They may change from one version of torch to the next. The "meta" device checks arguments and computes shapes without a
GPU. Operators that a version does not have are skipped by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import longspan
from tests.syncs import on_gpu, one_gpu

aten: Any = torch.ops.aten
B, H, K, Q, T, D = 2, 8, 2, 96, 160, 64
BF16, FP32 = torch.bfloat16, torch.float32


def meta(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def operator(name: str) -> Any:
    if not hasattr(aten, name):
        pytest.skip(f"torch {torch.__version__} has no aten::{name}")
    return getattr(aten, name).default


def shapes(xs: Sequence[Any]) -> list[tuple[tuple[int, ...], torch.dtype]]:
    return [(tuple(x.shape), x.dtype) for x in xs]


def zero() -> Tensor:
    """Return the state of a dropout of probability 0."""
    return meta(dtype=torch.int64)


# ---------------------------------------------------------------------------------------------------------------------
# No mask or a causal mask, equal groups of KV heads.


@pytest.mark.parametrize(("kv_heads", "causal"), [(H, False), (K, True), (1, True)])
def test_flash_attention(kv_heads: int, causal: bool) -> None:
    q, k, v = meta(B, H, Q, D), meta(B, kv_heads, T, D), meta(B, kv_heads, T, D)
    run, back = (operator(f"_scaled_dot_product_flash_attention{end}") for end in ("", "_backward"))
    out, lse, *_ = run(q, k, v, 0.0, causal, False, scale=0.1)
    assert shapes([out, lse]) == [((B, H, Q, D), BF16), ((B, H, Q), FP32)]
    grads = back(meta(B, H, Q, D), q, k, v, out, lse, None, None, Q, T, 0.0, causal, zero(), zero(), scale=0.1)
    assert shapes(grads) == shapes([q, k, v])


@pytest.mark.parametrize(("kv_heads", "masked"), [(H, False), (K, True)])
def test_flash_attention_for_cpu(kv_heads: int, masked: bool) -> None:
    q, k, v = (meta(B, heads, n, D, dtype=FP32) for heads, n in ((H, Q), (kv_heads, T), (kv_heads, T)))
    bias = meta(1, 1, Q, T, dtype=FP32) if masked else None
    run, back = (operator(f"_scaled_dot_product_flash_attention_for_cpu{end}") for end in ("", "_backward"))
    out, lse = run(q, k, v, 0.0, False, attn_mask=bias, scale=0.1)
    assert shapes([out, lse]) == [((B, H, Q, D), FP32), ((B, H, Q), FP32)]
    grads = back(meta(B, H, Q, D, dtype=FP32), q, k, v, out, lse, 0.0, False, attn_mask=bias, scale=0.1)
    assert shapes(grads) == shapes([q, k, v])


def test_flash_attention_for_cpu_supports_gqa_and_masks() -> None:
    """The real kernel: fewer KV heads, a broadcast mask, natural logarithms."""
    q, k = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 7, 8)
    bias = torch.zeros(1, 1, 5, 7).masked_fill(torch.ones(5, 7).triu(3) > 0, -torch.inf)
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, k, 0.0, False, attn_mask=bias, scale=0.5)
    wide = k.repeat_interleave(2, 1)
    scores = q @ wide.mT * 0.5 + bias
    torch.testing.assert_close(out, scores.softmax(-1) @ wide)
    torch.testing.assert_close(lse, scores.logsumexp(-1))


# ---------------------------------------------------------------------------------------------------------------------
# Flash attention with a window, and of documents: `[tokens, heads, D]`, with the borders of the documents.


@pytest.mark.parametrize("window", [(None, None), (31, 0), (31, 31)])
def test_flash_attention_of_documents(window: tuple[int | None, int | None]) -> None:
    q, k, v = meta(B * Q, H, D), meta(B * T, K, D), meta(B * T, K, D)
    lse = _windowed(q, k, v, window, meta(5, dtype=torch.int32), [meta(5, dtype=torch.int32)])
    assert lse.numel() == H * B * Q, lse.shape  # [H, tokens]


@pytest.mark.parametrize("window", [(None, None), (31, 0)])
def test_flash_attention_with_a_window(window: tuple[int | None, int | None]) -> None:
    q, k, v = meta(B, Q, H, D), meta(B, T, K, D), meta(B, T, K, D)
    lse = _windowed(q, k, v, window, None, [None, meta(0, dtype=torch.int32)])  # no borders, in two ways
    assert lse.shape == (B, H, Q)


def _windowed(
    q: Tensor, k: Tensor, v: Tensor, window: tuple[int | None, int | None], borders: Any, of_backward: list[Any]
) -> Tensor:
    run, back = (operator(f"_flash_attention_{way}") for way in ("forward", "backward"))
    limits = {"window_size_left": window[0], "window_size_right": window[1]}
    out, lse, state, unused, _ = run(q, k, v, borders, borders, Q, T, 0.0, True, False, scale=0.1, **limits)
    assert shapes([out]) == shapes([q]) and lse.dtype == FP32
    for x in of_backward:
        grads = back(torch.empty_like(q), q, k, v, out, lse, x, x, Q, T, 0.0, True, state, unused, scale=0.1, **limits)
        assert shapes(grads) == shapes([q, k, v])
    return lse  # type: ignore[no-any-return]


@pytest.mark.parametrize("kernel", ["flash", "cudnn"])
@pytest.mark.parametrize("mask", [{}, {"causal": False}, {"documents": torch.arange(48)[None] // 7}])
def test_a_layer_on_tensors_without_data(kernel: str, mask: dict[str, Any]) -> None:
    with on_gpu():
        q, k, v = (torch.empty(1, 48, h, 64, dtype=BF16, device="cuda", requires_grad=True) for h in (8, 2, 2))
        out = longspan.attention(q, k, v, one_gpu(), kernel=kernel, **mask)
        out.sum().backward()
        assert out.shape == q.shape and out.dtype == BF16
        assert all(x.grad is not None and x.grad.shape == x.shape for x in (q, k, v))


# ---------------------------------------------------------------------------------------------------------------------
# cuDNN, and the memory-efficient kernel.


def test_cudnn_attention() -> None:
    q, k, v = meta(B, H, Q, D), meta(B, H, T, D), meta(B, H, T, D)
    run, back = (operator(f"_scaled_dot_product_cudnn_attention{end}") for end in ("", "_backward"))
    out, lse, from_q, from_k, max_q, max_k, seed, offset, _ = run(q, k, v, None, True, 0.0, True, False, scale=0.1)
    assert shapes([out]) == [((B, H, Q, D), BF16)]
    assert lse.dtype == FP32 and lse.numel() == B * H * Q, lse.shape  # [B, H, Q] or [B, H, Q, 1]
    saved = (out, lse, seed, offset, None, from_q, from_k, max_q, max_k)
    grads = back(meta(B, H, Q, D), q, k, v, *saved, 0.0, True, scale=0.1)
    assert shapes(grads) == shapes([q, k, v])


@pytest.mark.parametrize("dim", [64, 100])
def test_efficient_attention(dim: int) -> None:
    q, k, v = (meta(B, H, n, dim, dtype=FP32) for n in (Q, T, T))
    run, back = (operator(f"_scaled_dot_product_efficient_attention{end}") for end in ("", "_backward"))
    out, lse, seed, offset = run(q, k, v, None, True, 0.0, True, scale=0.1)
    assert shapes([out]) == [((B, H, Q, dim), FP32)]
    assert lse.dtype == FP32 and lse.shape[:2] == (B, H) and Q <= lse.shape[2] < Q + 32  # rows rounded up to 32
    mask = [True, True, True, False]
    grads = back(meta(B, H, Q, dim, dtype=FP32), q, k, v, None, out, lse, seed, offset, 0.0, mask, True, scale=0.1)
    assert shapes(grads[:3]) == shapes([q, k, v])


# ---------------------------------------------------------------------------------------------------------------------
# Order of arguments: a meta kernel might accept arguments that have moved.

ORDER = {
    "_scaled_dot_product_flash_attention": "query key value dropout_p is_causal return_debug_mask *scale",
    "_scaled_dot_product_flash_attention_backward": "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q "
    "max_k dropout_p is_causal philox_seed philox_offset *scale",
    "_scaled_dot_product_flash_attention_for_cpu": "query key value dropout_p is_causal *attn_mask *scale",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "grad_out query key value out logsumexp dropout_p "
    "is_causal *attn_mask *scale",
    "_flash_attention_forward": "query key value cum_seq_q cum_seq_k max_q max_k dropout_p is_causal return_debug_mask "
    "*scale *window_size_left *window_size_right",
    "_flash_attention_backward": "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p "
    "is_causal rng_state unused *scale *window_size_left *window_size_right",
    "_scaled_dot_product_cudnn_attention": "query key value attn_bias compute_log_sumexp dropout_p is_causal "
    "return_debug_mask *scale",
    "_scaled_dot_product_cudnn_attention_backward": "grad_out query key value out logsumexp philox_seed philox_offset "
    "attn_bias cum_seq_q cum_seq_k max_q max_k dropout_p is_causal *scale",
    "_scaled_dot_product_efficient_attention": "query key value attn_bias compute_log_sumexp dropout_p is_causal "
    "*scale",
    "_scaled_dot_product_efficient_attention_backward": "grad_out_ query key value attn_bias out logsumexp philox_seed "
    "philox_offset dropout_p grad_input_mask is_causal *scale",
}
"""Arguments in order, with a star if passed by name. A version may have more arguments, passed by name."""


@pytest.mark.parametrize("name", ORDER)
def test_order_of_arguments(name: str) -> None:
    found = operator(name)._schema.arguments
    by_order = [a.name for a in found if not a.kwarg_only]
    by_name = {a.name for a in found if a.kwarg_only}
    known = ORDER[name].split()
    assert by_order == [a for a in known if not a.startswith("*")]
    assert {a[1:] for a in known if a.startswith("*")} <= by_name
    new = [a for a in found if a.kwarg_only and f"*{a.name}" not in known]
    assert all(a.has_default_value() for a in new), new
