"""An attention saves q, k, v, the output and the log-sum-exp for its backward, each byte once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import longspan
from longspan.attn.methods import local
from tests.choose import grouped, pairwise
from tests.fakes import fake_world

B, S, H, K, D = 2, 48, 8, 4, 16


def saved(sp: longspan.SequenceSharding, dtype: torch.dtype, source: str, **options: Any) -> dict[int, Tensor]:
    """Return the tensors that autograd saves, by storage; q, k and v are laid out as in a model."""
    L = S // sp.size
    if source != "heads first":  # a fused projection
        x = torch.zeros(B, L, H + 2 * K, D, dtype=dtype, requires_grad=True) * 1
        q, k, v = x.split([H, K, K], 2)
        if source == "v of one tensor":  # q and k are rotated by their positions
            q, k = q * 1, k * 1
    else:
        q, k, v = (torch.zeros(B, h, L, D, dtype=dtype, requires_grad=True).transpose(1, 2) * 1 for h in (H, K, K))
    found: dict[int, Tensor] = {}

    def note(x: Tensor) -> Tensor:
        found[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        out = longspan.attention(q, k, v, sp, **options)
    out.sum().backward()
    return found


def once(rings: int, ulysses: int, dtype: torch.dtype) -> int:
    """Return the bytes of q, k, v, the output and the log-sum-exp of a rank."""
    return B * S // rings * (dtype.itemsize * D * (2 * H + 2 * K) + 4 * H) // ulysses


@pytest.mark.parametrize(
    ("source", "kernel", "rings", "ulysses"),
    pairwise(
        ["heads first", "one tensor", "v of one tensor"], ["auto", "tiled"], grouped([(1, 1), (1, 2), (2, 1), (2, 2)])
    ),
)
def test_each_byte_is_saved_once(rings: int, ulysses: int, kernel: str, source: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        with fake_world(0, rings * ulysses):
            sp = longspan.SequenceSharding(longspan.init_mesh(ring=rings, ulysses=ulysses))
            found = saved(sp, dtype, source, kernel=kernel)
        total = sum(x.untyped_storage().nbytes() for x in found.values())
        assert total == once(rings, ulysses, dtype), [x.shape for x in found.values()]


@pytest.mark.parametrize(
    ("source", "ulysses", "copies"),
    [("heads first", 1, 0), ("one tensor", 1, 0), ("v of one tensor", 1, 1), ("heads first", 2, 0)],
)
def test_without_a_ring_a_gpu_copies_only_a_v_that_is_a_view(
    monkeypatch: pytest.MonkeyPatch, source: str, ulysses: int, copies: int
) -> None:
    """Keys and values are not copied, unless saving v would keep a fused projection alive."""
    made: list[int] = []
    of = local.KVPair.of
    monkeypatch.setattr(local, "_kernel_rereads_kv", lambda device: False)
    monkeypatch.setattr(local.KVPair, "of", lambda *args: made.append(1) or of(*args))
    with fake_world(0, ulysses):
        sp = longspan.SequenceSharding(longspan.init_mesh(ulysses=ulysses))
        found = saved(sp, torch.float32, source, kernel="tiled")
    assert sum(x.untyped_storage().nbytes() for x in found.values()) == once(1, ulysses, torch.float32)
    assert len(made) == 2 * copies  # my block in forward and backward
