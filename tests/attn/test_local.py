"""Local kernels on one device against the oracle; memory of masks."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor

import longspan
from longspan.core.errors import LongspanError
from tests.attn.attention import PLAIN, one_device, run
from tests.oracle import Case, errors, make
from tests.tolerance import MARGIN

pytestmark = [pytest.mark.fast, pytest.mark.rounding]


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_kernels_agree_with_the_oracle(kernel: str, name: str) -> None:
    case = PLAIN[name]
    found = errors(case, run(case, one_device(), kernel))
    assert max(found.values()) <= MARGIN, found


def test_flex_has_no_backward_on_cpu() -> None:
    x = make(Case())
    with pytest.raises(LongspanError, match="no backward on CPU; use kernel='auto'"):
        longspan.attention(x["q"].requires_grad_(), x["k"], x["v"], one_device(), kernel="flex")


def _plain(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None) -> Tensor:
    assert causal
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * (scale or q.shape[3] ** -0.5)
    scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)


def test_any_callable_is_a_kernel() -> None:
    case = Case(n=12)
    found = errors(case, run(case, one_device(), _plain))
    assert max(found.values()) <= MARGIN, found
    x = make(Case(n=12))
    with pytest.raises(LongspanError, match="the kernel _plain has no keyword window, which this attention needs"):
        longspan.attention(x["q"], x["k"], x["v"], one_device(), window=3, kernel=_plain)
    with pytest.raises(LongspanError, match="has no keyword causal, scale"):
        longspan.attention(x["q"], x["k"], x["v"], one_device(), kernel=lambda q, k, v: q)
    with pytest.raises(LongspanError, match=r"the kernel returned the shape \(1, 4, 12, 8\), .* = \(1, 12, 4, 8\)"):
        wrong = lambda q, k, v, *, causal, scale: q.transpose(1, 2).contiguous()  # noqa: E731
        longspan.attention(x["q"], x["k"], x["v"], one_device(), kernel=wrong)


class _FlashAttn(types.ModuleType):
    """The package's functions, computed by longspan's formula."""

    @staticmethod
    def flash_attn_func(
        q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None, causal: bool, window_size: tuple[int, int],
        softcap: float,
    ) -> Tensor:  # fmt: skip
        left, right = window_size
        assert right in (-1, 0) and (left == -1 or causal)
        options: dict[str, Any] = {"scale": softmax_scale, "softcap": softcap or None}
        window = None if left < 0 else left + 1
        return longspan.attention(q, k, v, one_device(), causal=causal, window=window, kernel="eager", **options)

    @classmethod
    def flash_attn_varlen_func(
        cls, q: Tensor, k: Tensor, v: Tensor, ends_q: Tensor, ends_k: Tensor, longest_q: int, longest_k: int, **options:
    Any ) -> Tensor:  # fmt: skip
        assert ends_q.dtype == torch.int32 and torch.equal(ends_q, ends_k)
        assert longest_q == longest_k == int(ends_q.diff().max())
        sizes = ends_q.diff().tolist()
        parts = zip(q.split(sizes), k.split(sizes), v.split(sizes), strict=True)
        return torch.cat([cls.flash_attn_func(a[None], b[None], c[None], **options)[0] for a, b, c in parts])


@pytest.mark.parametrize("name", ["bidirectional", "window", "documents and padding"])
def test_arguments_of_flash_attn(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", _FlashAttn("flash_attn"))
    case = PLAIN[name]
    found = errors(case, run(case, one_device(), "flash_attn"))
    assert max(found.values()) <= MARGIN, found


def test_flash_attn_cannot_do_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", _FlashAttn("flash_attn"))
    x = make(Case(sinks=True))
    with pytest.raises(LongspanError, match="cannot do sinks; use kernel='auto'"):
        longspan.attention(x["q"], x["k"], x["v"], one_device(), sinks=x["sinks"], kernel="flash_attn")


NO_SQUARE: dict[str, dict[str, Any]] = {
    "short window": {"window": 64},
    "long window": {"window": 1500},
    "window to both sides": {"window": 700, "causal": False},
    "chunks": {"chunk_size": 512},
    "documents": {"cu_seqlens": torch.arange(0, 4097, 256)},
    "prefix": {"prefix": 300},
    "sinks": {"sinks": torch.zeros(2)},
    "softcap": {"softcap": 5.0},
    "alibi": {"alibi": torch.ones(2)},
    "mask function": {"mask_mod": lambda b, h, q, kv: q >= kv},
}


@pytest.mark.parametrize("name", NO_SQUARE)
def test_a_mask_never_makes_a_square_tensor(name: str) -> None:
    n = 4096
    q, k, v = (torch.randn(1, n, heads, 8).requires_grad_() for heads in (2, 1, 1))

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            for x in out if isinstance(out, tuple) else [out]:
                if isinstance(x, Tensor):
                    self.numel = max(self.numel, x.numel())
            return out

    with Largest() as largest:
        longspan.attention(q, k, v, one_device(), **NO_SQUARE[name]).sum().backward()
    assert largest.numel <= n * n // 16  # a square for each head would be 32 times as much
