"""What an attention saves for its backward: q, k, v, the output and the log-sum-exp, each byte once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import longspan
from tests.fakes import fake_world

B, S, H, K, D = 2, 48, 8, 4, 16


def saved(sp: longspan.SequenceSharding, dtype: torch.dtype, laid: str, **options: Any) -> dict[int, Tensor]:
    """What autograd is given to keep, by storage; q, k and v come as a model gives them."""
    L = S // sp.size
    if laid == "one tensor":  # a fused projection's
        x = torch.zeros(B, L, H + 2 * K, D, dtype=dtype, requires_grad=True) * 1
        q, k, v = x.split([H, K, K], 2)
    else:
        q, k, v = (torch.zeros(B, h, L, D, dtype=dtype, requires_grad=True).transpose(1, 2) * 1 for h in (H, K, K))
    found: dict[int, Tensor] = {}

    def keep(x: Tensor) -> Tensor:
        found[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = longspan.attention(q, k, v, sp, **options)
    out.sum().backward()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("laid", ["heads first", "one tensor"])
@pytest.mark.parametrize("kernel", ["auto", "tiled"])
@pytest.mark.parametrize(("ring", "ulysses"), [(1, 1), (1, 2), (2, 1), (2, 2), (1, 4), (4, 1)])
def test_each_byte_is_saved_once(ring: int, ulysses: int, kernel: str, laid: str, dtype: torch.dtype) -> None:
    with fake_world(0, ring * ulysses):
        sp = longspan.SequenceSharding(longspan.init_mesh(ring=ring, ulysses=ulysses))
        found = saved(sp, dtype, laid, kernel=kernel)
    tokens = B * S // ring
    expected = tokens * (dtype.itemsize * D * (2 * H + 2 * K) + 4 * H) // ulysses
    assert sum(x.untyped_storage().nbytes() for x in found.values()) == expected, [x.shape for x in found.values()]
