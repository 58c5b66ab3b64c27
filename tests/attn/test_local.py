"""Local kernels on one device against the oracle; memory of masks."""

from __future__ import annotations

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
@pytest.mark.parametrize("kernel", ["auto", "eager"])
def test_kernels_agree_with_the_oracle(kernel: str, name: str) -> None:
    case = PLAIN[name]
    found = errors(case, run(case, one_device(), kernel))
    assert max(found.values()) <= MARGIN, found


def test_flex_has_no_backward_on_cpu() -> None:
    x = make(Case())
    with pytest.raises(LongspanError, match="no backward on CPU; use kernel='auto'"):
        longspan.attention(x["q"].requires_grad_(), x["k"], x["v"], one_device(), kernel="flex")


def test_sdpa_computes_causal_and_full_attention() -> None:
    for causal in (True, False):
        case = Case(n=12, causal=causal)
        found = errors(case, run(case, one_device(), "sdpa"))
        assert max(found.values()) <= MARGIN, found


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
