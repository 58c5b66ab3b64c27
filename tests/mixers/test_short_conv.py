"""Short convolutions on real ranks, equal to one device's: runs shorter than the kernel, documents, gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import longspan
from longspan.core.errors import LongspanError
from longspan.mixers.short_conv import short_conv
from tests.counting import count_sent
from tests.mixers.recurrence import relative_errors
from tests.pool import RankPool

Ids = tuple[tuple[int, ...], ...]


def _inputs(n: int, kernel: int, batch: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(n)
    shapes = {"x": (batch, n, 3), "weight": (3, kernel), "bias": (3,), "dout": (batch, n, 3)}
    return {name: torch.randn(*shape, generator=g, dtype=torch.float64) for name, shape in shapes.items()}


def _one_device(n: int, kernel: int, ids: Ids) -> dict[str, torch.Tensor]:
    x = _inputs(n, kernel, len(ids))
    leaves = {name: x[name].requires_grad_() for name in ("x", "weight", "bias")}
    rows = []
    for row, of_row in zip(leaves["x"], torch.tensor(ids), strict=True):
        out = torch.zeros_like(row)
        for i in of_row[of_row >= 0].unique():
            padded = F.pad(row[of_row == i].T, (kernel - 1, 0))
            part = F.conv1d(padded[None], leaves["weight"].unsqueeze(1), leaves["bias"], groups=3)[0].T
            out = out.index_put((of_row == i,), part)
        rows.append(out)
    out = torch.stack(rows)
    out.backward(x["dout"])
    return {"out": out.detach()} | {f"d{name}": leaf.grad for name, leaf in leaves.items()}  # type: ignore[dict-item]


def _sharded(n: int, kernel: int, ids: Ids, ring: int, layout: str) -> dict[str, torch.Tensor]:
    sp = longspan.SequenceSharding(longspan.init_mesh(ring=ring, ulysses=dist.get_world_size() // ring), layout)
    x = _inputs(n, kernel, len(ids))
    leaves = {name: x[name].requires_grad_() for name in ("x", "weight", "bias")}
    documents = torch.tensor(ids) if len({*ids[0]}) > 1 or len(ids) > 1 else None
    out = short_conv(sp.shard(leaves["x"]), leaves["weight"], sp, leaves["bias"], n, documents)
    out.backward(sp.shard(x["dout"]))
    found = {"out": sp.gather(out.detach(), length=n)}
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        dist.all_reduce(leaf.grad)
        found[f"d{name}"] = leaf.grad
    return found


@settings(max_examples=15)
@given(
    n=st.integers(1, 30),
    kernel=st.integers(1, 6),
    mesh=st.sampled_from(
        [(2, 2, "contiguous"), (2, 2, "zigzag"), (4, 4, "contiguous"), (4, 4, "zigzag"), (4, 2, "zigzag")]
    ),
    cuts=st.lists(st.lists(st.integers(0, 30), max_size=4), min_size=1, max_size=2),
)
def test_equal_to_one_device(
    get_pool: Any, n: int, kernel: int, mesh: tuple[int, int, str], cuts: list[list[int]]
) -> None:
    ids = tuple(tuple(sum(i >= c for c in row) - (len(row) > 2) for i in range(n)) for row in cuts)
    assume(max(map(max, ids)) >= 0)  # of padding alone the oracle has no gradient
    world, ring, layout = mesh
    expected = _one_device(n, kernel, ids)
    for found in get_pool(world).run(_sharded, n, kernel, ids, ring, layout):
        errors = relative_errors(found, expected)
        assert max(errors.values()) <= 1e-12, errors


def test_runs_shorter_than_the_kernel(pool4: RankPool) -> None:
    for n, layout in ((7, "contiguous"), (8, "zigzag"), (5, "contiguous")):
        expected = _one_device(n, 6, ((0,) * n,))
        for found in pool4.run(_sharded, n, 6, ((0,) * n,), 4, layout):
            errors = relative_errors(found, expected)
            assert max(errors.values()) <= 1e-12, (n, layout, errors)


def _sent(n: int) -> list[tuple[str, int]]:
    sp = longspan.SequenceSharding(longspan.init_mesh(ring=4))
    x = sp.shard(torch.ones(2, n, 3)).requires_grad_()
    with count_sent() as log:
        short_conv(x, torch.ones(3, 4), sp).sum().backward()
    return [(entry.op, entry.bytes) for entry in log]


def test_one_message_of_the_last_tokens(pool4: RankPool) -> None:
    size = 3 * 4 * 2 * 2 * 3 * 3  # to 3 ranks: fp32, 2 runs of a zigzag rank, 2 rows, 3 tokens, 3 channels
    for n in (32, 64):
        assert pool4.run(_sent, n) == [[("all_gather", size), ("reduce_scatter", size)]] * 4


def test_a_kernel_of_other_channels_is_refused() -> None:
    sp = longspan.SequenceSharding(longspan.init_mesh())
    with pytest.raises(LongspanError, match=r"3 channels needs `weight` \[channels, kernel\] .* got \(2, 4\) and None"):
        short_conv(torch.ones(1, 8, 3), torch.ones(2, 4), sp)
