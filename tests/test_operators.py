"""The operators of torch that attention calls, on tensors that have shapes only: names, arguments, what comes back.

They are private to torch, and may change from one version to the next. Each is called here as attention calls it, on
the "meta" device, where an operator checks its arguments and says what it would give; so a torch that has changed one
fails here, and not on somebody's GPU. What a version does not have is skipped by name, but for what all of them have.
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
    """The state of a dropout that is not used."""
    return meta(dtype=torch.int64)


# ---------------------------------------------------------------------------------------------------------------------
# One call a tile: no mask or the causal one, equal groups of KV heads.


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [H, K, 1])
def test_flash_attention(kv_heads: int, causal: bool) -> None:
    q, k, v = meta(B, H, Q, D), meta(B, kv_heads, T, D), meta(B, kv_heads, T, D)
    run, back = (operator(f"_scaled_dot_product_flash_attention{end}") for end in ("", "_backward"))
    out, lse, *_ = run(q, k, v, 0.0, causal, False, scale=0.1)
    assert shapes([out, lse]) == [((B, H, Q, D), BF16), ((B, H, Q), FP32)]
    grads = back(meta(B, H, Q, D), q, k, v, out, lse, None, None, Q, T, 0.0, causal, zero(), zero(), scale=0.1)
    assert shapes(grads) == shapes([q, k, v])


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kv_heads", [H, K])
def test_flash_attention_for_cpu(kv_heads: int, masked: bool) -> None:
    q, k, v = (meta(B, heads, n, D, dtype=FP32) for heads, n in ((H, Q), (kv_heads, T), (kv_heads, T)))
    bias = meta(1, 1, Q, T, dtype=FP32) if masked else None
    run, back = (operator(f"_scaled_dot_product_flash_attention_for_cpu{end}") for end in ("", "_backward"))
    out, lse = run(q, k, v, 0.0, False, attn_mask=bias, scale=0.1)
    assert shapes([out, lse]) == [((B, H, Q, D), FP32), ((B, H, Q), FP32)]
    grads = back(meta(B, H, Q, D, dtype=FP32), q, k, v, out, lse, 0.0, False, attn_mask=bias, scale=0.1)
    assert shapes(grads) == shapes([q, k, v])


def test_cpu_really_has_it_with_groups_and_masks() -> None:
    """What meta cannot say: the kernel takes fewer KV heads, and a mask that is broadcast, and gives natural logs."""
    q, k = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 7, 8)
    bias = torch.zeros(1, 1, 5, 7).masked_fill(torch.ones(5, 7).triu(3) > 0, -torch.inf)
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, k, 0.0, False, attn_mask=bias, scale=0.5)
    wide = k.repeat_interleave(2, 1)
    scores = q @ wide.mT * 0.5 + bias
    torch.testing.assert_close(out, scores.softmax(-1) @ wide)
    torch.testing.assert_close(lse, scores.logsumexp(-1))


# ---------------------------------------------------------------------------------------------------------------------
# Windows and documents: flash attention with borders, `[tokens, heads, D]` of all documents in a row.

CUMULATIVE = meta(5, dtype=torch.int32)


@pytest.mark.parametrize("window", [(None, None), (31, 0), (31, 31)])
def test_flash_attention_of_documents(window: tuple[int | None, int | None]) -> None:
    q, k, v = meta(B * Q, H, D), meta(B * T, K, D), meta(B * T, K, D)
    run, back = (operator(f"_flash_attention_{way}") for way in ("forward", "backward"))
    borders = CUMULATIVE, CUMULATIVE, Q, T
    limits = {"window_size_left": window[0], "window_size_right": window[1]}
    out, lse, state, unused, _ = run(q, k, v, *borders, 0.0, True, False, scale=0.1, **limits)
    assert shapes([out]) == [((B * Q, H, D), BF16)]
    assert lse.dtype == FP32 and lse.numel() == H * B * Q, lse.shape  # [H, tokens]
    grad = meta(B * Q, H, D)
    grads = back(grad, q, k, v, out, lse, *borders, 0.0, True, state, unused, scale=0.1, **limits)
    assert shapes(grads) == shapes([q, k, v])


@pytest.mark.parametrize("window", [(None, None), (31, 0)])
def test_flash_attention_with_a_window(window: tuple[int | None, int | None]) -> None:
    q, k, v = meta(B, Q, H, D), meta(B, T, K, D), meta(B, T, K, D)
    run, back = (operator(f"_flash_attention_{way}") for way in ("forward", "backward"))
    limits = {"window_size_left": window[0], "window_size_right": window[1]}
    out, lse, state, unused, _ = run(q, k, v, None, None, Q, T, 0.0, True, False, scale=0.1, **limits)
    assert shapes([out, lse]) == [((B, Q, H, D), BF16), ((B, H, Q), FP32)]
    none = meta(0, dtype=torch.int32)
    for borders in ((none, none), (None, None)):  # "no borders", in both ways
        grads = back(meta(B, Q, H, D), q, k, v, out, lse, *borders, Q, T, 0.0, True, state, unused, scale=0.1, **limits)
        assert shapes(grads) == shapes([q, k, v])


@pytest.mark.parametrize("kernel", ["flash", "cudnn"])
@pytest.mark.parametrize("mask", [{}, {"causal": False}, {"documents": torch.arange(48)[None] // 7}])
def test_a_kernel_calls_them_as_they_are(kernel: str, mask: dict[str, Any]) -> None:
    """The whole of a layer on tensors without data: torch's own operators check what they are given."""
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


@pytest.mark.parametrize("dim", [64, 100, 512])
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
# By name: an argument that moves is found even where a meta kernel would let it pass.

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
"""Arguments in order, a star before those that are passed by name; a version may have more behind them, by name."""


@pytest.mark.parametrize("name", ORDER)
def test_arguments_are_where_they_were(name: str) -> None:
    found = operator(name)._schema.arguments
    by_order = [a.name for a in found if not a.kwarg_only]
    by_name = {a.name for a in found if a.kwarg_only}
    wanted = ORDER[name].split()
    assert by_order == [a for a in wanted if not a.startswith("*")]
    assert {a[1:] for a in wanted if a.startswith("*")} <= by_name
    new = [a for a in found if a.kwarg_only and f"*{a.name}" not in wanted]
    assert all(a.has_default_value() for a in new), new
