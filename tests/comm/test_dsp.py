"""Dynamic Sequence Parallelism on real ranks against one process: output, every gradient, and what is sent."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import longspan
from longspan.attn.methods.dsp import plan_dims
from longspan.comm.mesh import SequenceSharding
from longspan.comm.reshard import shard_sizes
from longspan.core.errors import LongspanError
from tests.counting import count_sent
from tests.pool import on_ranks

B, C = 2, 8
ROWS, COLUMNS = 1, 2


class Block(nn.Module):
    """Attends along one dimension of `[B, rows, columns, C]`, with a condition for each row. None: an MLP alone."""

    def __init__(self, dim: int | None) -> None:
        super().__init__()
        self.dim = dim
        self.qkv, self.out = nn.Linear(C, 3 * C), nn.Linear(C, C)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        y = self.qkv(x * condition).tanh()
        if self.dim is None:
            return x + self.out(y[..., :C])
        q, k, v = y.movedim(self.dim, 2).chunk(3, -1)
        return x + self.out(F.scaled_dot_product_attention(q, k, v).movedim(2, self.dim))


def _stack(attends: list[int | None], sizes: dict[int, int]) -> tuple[nn.ModuleList, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    blocks = nn.ModuleList(Block(dim) for dim in attends).double()
    x = torch.randn(B, sizes[ROWS], sizes[COLUMNS], C, dtype=torch.float64, requires_grad=True)
    condition = torch.randn(B, sizes[ROWS], 1, C, dtype=torch.float64, requires_grad=True)
    return blocks, x, condition, torch.randn_like(x)


def _whole(attends: list[int | None], sizes: dict[int, int]) -> tuple[Tensor, list[Tensor]]:
    blocks, x, condition, weight = _stack(attends, sizes)
    y = x
    for block in blocks:
        y = block(y, condition)
    return y, list(torch.autograd.grad((y * weight).sum(), [x, condition, *blocks.parameters()]))


def _sharding() -> SequenceSharding:
    size = dist.get_world_size()
    mesh = longspan.init_mesh(ring=2, ulysses=size // 2, device_type="cpu")
    return longspan.SequenceSharding(mesh)


def _equals_one_process(attends: list[int | None], sizes: dict[int, int]) -> None:
    sp = _sharding()
    blocks, x, condition, weight = _stack(attends, sizes)
    shards = longspan.dsp(sp, attends, sizes)
    y = shards.shard(x)
    for i, block in enumerate(blocks):
        y = shards.switch(y, i)
        of_rows = shards.dims[i] == ROWS
        y = block(y, shards.shard(condition, i) if of_rows else condition)
    whole = shards.gather(y)
    # Half of the loss from this rank's part, and half from the whole, of which every rank takes an equal share.
    loss = (y * shards.shard(weight, -1)).sum() / 2 + (whole * weight).sum() / (2 * sp.size)
    grads = torch.autograd.grad(loss, [x, condition, *blocks.parameters()])
    expected, expected_grads = _whole(attends, sizes)
    torch.testing.assert_close(whole, expected)
    for grad, true in zip(grads, expected_grads, strict=True):
        dist.all_reduce(grad)
        torch.testing.assert_close(grad, true)


STACK: list[int | None] = [COLUMNS, ROWS, ROWS, None, COLUMNS]
SIZES = [{ROWS: 4, COLUMNS: 8}, {ROWS: 5, COLUMNS: 7}, {ROWS: 6, COLUMNS: 3}]  # the last: fewer columns than 4 ranks


@pytest.mark.parametrize(("world", "sizes"), [(2, SIZES[0]), (2, SIZES[1]), *((4, sizes) for sizes in SIZES)])
def test_equals_one_process(get_pool: Any, world: int, sizes: dict[int, int]) -> None:
    get_pool(world).run(_equals_one_process, STACK, sizes)


@pytest.mark.parametrize("sizes", SIZES[:2])
@on_ranks(4)
def test_sends_what_the_formula_says(sizes: dict[int, int]) -> None:
    sp = _sharding()
    shards = longspan.dsp(sp, STACK, sizes)
    assert shards.dims == (ROWS, COLUMNS, COLUMNS, COLUMNS, ROWS) and shards.switches == 2
    x = shards.shard(torch.randn(B, sizes[ROWS], sizes[COLUMNS], C, requires_grad=True))
    with count_sent() as log:
        y = x
        for i in range(len(STACK)):
            y = shards.switch(y, i)
    with count_sent() as log_backward:
        y.sum().backward()
    mine = {dim: shard_sizes(n, sp.size)[sp.rank] for dim, n in sizes.items()}
    to_columns = mine[ROWS] * (sizes[COLUMNS] - mine[COLUMNS]) * B * C * 4
    to_rows = mine[COLUMNS] * (sizes[ROWS] - mine[ROWS]) * B * C * 4
    assert [(sent.op, sent.bytes) for sent in log] == [("all_to_all", to_columns), ("all_to_all", to_rows)]
    assert [(sent.op, sent.bytes) for sent in log_backward] == [("all_to_all", to_columns), ("all_to_all", to_rows)]
    if sizes == SIZES[0]:  # N * d / P * (P - 1) / P elements, where the dimensions divide
        elements = B * sizes[ROWS] * sizes[COLUMNS] * C
        assert to_columns == to_rows == 4 * elements // sp.size * (sp.size - 1) // sp.size


def _fewest_switches(attends: tuple[int | None, ...], dims: int) -> int:
    """Try every plan."""
    plans = itertools.product(range(dims), repeat=len(attends))
    valid = [p for p in plans if all(d != a for d, a in zip(p, attends, strict=True))]
    return min(sum(a != b for a, b in itertools.pairwise(p)) for p in valid)


def test_no_plan_has_fewer_switches() -> None:
    for dims in (2, 3):
        for attends in itertools.product([None, *range(dims)], repeat=4):
            plan = plan_dims(attends, dict.fromkeys(range(dims), 4))
            assert all(d != a for d, a in zip(plan, attends, strict=True))
            assert sum(a != b for a, b in itertools.pairwise(plan)) == _fewest_switches(attends, dims), attends


def test_one_dimension_throughout_needs_no_switch() -> None:
    assert plan_dims([2, None, 2], {1: 4, 2: 8}) == (1, 1, 1)
    assert plan_dims([None], {1: 4, 2: 8}) == (2,)  # the larger one
    assert plan_dims([(1, 2), 1], {1: 4, 2: 8, 3: 2}) == (3, 3)


def test_wrong_arguments_raise() -> None:
    sp = longspan.SequenceSharding(longspan.init_mesh())
    with pytest.raises(LongspanError, match=r"block 1 attends along \(1, 2\), which leaves none .* \[1, 2\] to shard"):
        longspan.dsp(sp, [1, (1, 2)], {1: 4, 2: 8})
    with pytest.raises(LongspanError, match="`attends` is empty"):
        longspan.dsp(sp, [], {1: 4, 2: 8})
    with pytest.raises(LongspanError, match="`attends` must list what each block attends along, got 2"):
        longspan.dsp(sp, 2, {1: 4, 2: 8})  # type: ignore[arg-type]
    with pytest.raises(LongspanError, match="`sizes` must be a dict of dimensions and their sizes, got"):
        longspan.dsp(sp, [1, 2], [4, 8])  # type: ignore[arg-type]
    with pytest.raises(LongspanError, match=r"sizes\[2\] must be at least 1, got 0"):
        longspan.dsp(sp, [1], {1: 4, 2: 0})
    with pytest.raises(LongspanError, match="`sp` must be a longspan.SequenceSharding"):
        longspan.dsp(4, [1], {1: 4, 2: 8})  # type: ignore[arg-type]
    with pytest.raises(LongspanError, match=r"every rank holds 4 entries of dimension 1, got .* \(1, 5, 8\)"):
        longspan.dsp(sp, [2, 1], {1: 4, 2: 8}).shard(torch.zeros(1, 5, 8))


@on_ranks(2)
def test_a_shard_of_another_size_raises() -> None:
    shards = longspan.dsp(_sharding(), [2, 1], {1: 5, 2: 8})
    wrong = torch.zeros(1, 4, 8)
    with pytest.raises(LongspanError, match=r"holds [32] entries of dimension 1, got a tensor of shape \(1, 4, 8\)"):
        shards.switch(wrong, 1)
    with pytest.raises(LongspanError, match=r"holds 4 entries of dimension 2, got a tensor of shape \(1, 4, 8\)"):
        shards.gather(wrong)
