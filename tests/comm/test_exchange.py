"""All-to-alls between two dimensions in any order: results, inverse and adjoint."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from longspan import exchange
from longspan.comm import all_to_all
from longspan.comm.reshard import gather_along, move_shards, move_shards_together, shard_along, shard_sizes
from longspan.core.errors import LongspanError
from longspan.core.heads import split_head_chunks, split_heads
from tests.choose import each_value
from tests.counting import count_sent
from tests.pool import RankPool

pytestmark = pytest.mark.fast

ORDERS = {"BSHD": (1, 2), "BHSD": (2, 1), "SHD": (0, 1), "HSD": (1, 0), "BSDH": (1, 3), "HBSD": (2, 0)}


def _whole(order: str, n: int, heads: int) -> torch.Tensor:
    sizes = {"B": 2, "S": n, "H": heads, "D": 3}
    shape = [sizes[c] for c in order]
    count = torch.tensor(shape).prod()
    return torch.arange(int(count), dtype=torch.float64).view(shape)


def _round_trip(order: str, local: int, heads: int) -> None:
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    seq_dim, head_dim = ORDERS[order]
    whole = _whole(order, local * size, heads)
    mine = whole.narrow(seq_dim, rank * local, local).clone().requires_grad_()
    y = exchange.seq_to_heads(mine, group, seq_dim, head_dim)
    assert torch.equal(y, shard_along(whole, head_dim, group))
    back = exchange.heads_to_seq(y, group, seq_dim, head_dim, heads=heads)
    assert torch.equal(back, mine)
    # The adjoint: <f(x), u> summed over ranks is <x, grad f(u)> summed over ranks; a permutation gives it exactly.
    u = torch.sin(torch.arange(y.numel(), dtype=torch.float64).view(y.shape) + rank)
    (grad,) = torch.autograd.grad(y, mine, u, retain_graph=True)
    assert torch.equal(grad, exchange.heads_to_seq(u, group, seq_dim, head_dim, heads=heads))
    w = torch.cos(torch.arange(mine.numel(), dtype=torch.float64).view(mine.shape) + rank)
    (through_both,) = torch.autograd.grad(back, mine, w)
    assert torch.equal(through_both, w)


@pytest.mark.parametrize(("order", "world"), each_value(ORDERS, [2, 4]))
def test_round_trip(get_pool, world: int, order: str) -> None:  # type: ignore[no-untyped-def]
    for local, heads in [(3, 4), (1, 5), (2, 3)]:  # even, uneven, fewer heads than 4 ranks
        get_pool(world).run(_round_trip, order, local, heads)


def _reshard(shape: tuple[int, ...], gather_dim: int, shard_dim: int) -> None:
    size, group = dist.get_world_size(), dist.group.WORLD
    whole = torch.arange(int(torch.tensor(shape).prod())).view(shape).double()
    x = shard_along(whole, gather_dim, group).clone().requires_grad_()
    y = exchange.reshard(x, group, gather_dim, shard_dim, length=shape[gather_dim])
    mine = shard_along(whole, shard_dim, group)
    assert torch.equal(y, mine)
    back = exchange.reshard(y, group, shard_dim, gather_dim, length=shape[shard_dim])
    assert torch.equal(back, x)
    (grad,) = torch.autograd.grad(y, x, mine.square())
    assert torch.equal(grad, x.square())
    (grad,) = torch.autograd.grad(gather_along(back, gather_dim, shape[gather_dim], group), x, whole)
    assert torch.equal(grad, size * x)


@settings(max_examples=25)
@given(data=st.data())
def test_reshard_between_any_two_dims(pool2: RankPool, data: st.DataObject) -> None:
    ndim = data.draw(st.integers(2, 5))
    gather_dim, shard_dim = data.draw(st.permutations(range(ndim)))[:2]
    shape = [data.draw(st.integers(1, 4)) for _ in range(ndim)]
    pool2.run(_reshard, tuple(shape), gather_dim, shard_dim)


def _two_backwards() -> list[str]:
    x = torch.randn(1, 2, 4, 3, dtype=torch.float64, requires_grad=True)
    with count_sent() as log:
        y = exchange.seq_to_heads(x, dist.group.WORLD)
        forward = len(log)
        (g,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
    (gg,) = torch.autograd.grad(g.sum(), x)
    assert forward == 1 and torch.allclose(gg, 6 * x)  # d/dx sum(3 x^2)
    return [entry.op for entry in log]


def test_one_all_to_all_each_way_and_second_derivatives(pool2: RankPool) -> None:
    assert pool2.run(_two_backwards) == [["all_to_all"] * 2] * 2


def _opcheck() -> None:
    group = dist.group.WORLD
    shards, kinds = split_heads(6, 3, dist.get_world_size()), ["q", "kv", "kv"]
    xs = [torch.randn(1, 2, h, 3, requires_grad=True) for h in (6, 3, 3)]
    plan = all_to_all._flatten(all_to_all.head_spans(shards, kinds)), group.group_name
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(torch.ops.longspan.scatter_heads.default, (xs, *plan), test_utils=checks)
    y = all_to_all.scatter_heads(xs, kinds, shards, group).detach().requires_grad_()
    torch.library.opcheck(torch.ops.longspan.gather_heads.default, (y, [6, 3, 3], [3] * 3, *plan), test_utils=checks)
    x = torch.randn(2, 3, 5, requires_grad=True)
    sizes = [3] * dist.get_world_size(), list(shard_sizes(5, dist.get_world_size()))
    torch.library.opcheck(torch.ops.longspan.reshard.default, (x, 1, 2, *sizes, group.group_name), test_utils=checks)


def test_operators_pass_opcheck(pool2: RankPool) -> None:
    pool2.run(_opcheck)


def test_without_a_group_the_input_is_returned() -> None:
    x = torch.randn(1, 4, 2, 3)
    assert exchange.seq_to_heads(x, None) is x
    assert exchange.heads_to_seq(x, None) is x
    assert exchange.reshard(x, None, 1, 3) is x


def _bad_input() -> None:
    group = dist.group.WORLD
    with pytest.raises(LongspanError, match=r"two different dimensions are needed, got 1 and 1 of the shape \(2, 3\)"):
        exchange.seq_to_heads(torch.zeros(2, 3), group, 1, 1)
    with pytest.raises(LongspanError, match=r"`dim`=5 is no dimension of a tensor of shape"):
        exchange.reshard(torch.zeros(2, 3), group, 0, 5)
    with pytest.raises(LongspanError, match="holds 3 entries of dimension 0, but its shard of length=9 is [45]"):
        exchange.reshard(torch.zeros(3, 4), group, 0, 1, length=9)
    with pytest.raises(LongspanError, match="5 tokens do not divide over 2 ranks"):
        exchange.heads_to_seq(torch.zeros(1, 5, 2, 3), group)
    with pytest.raises(LongspanError, match="holds 3 entries of dimension 2, but its shard of length=8 is 4"):
        exchange.heads_to_seq(torch.zeros(1, 4, 3, 3), group, heads=8)


def test_bad_input(pool2: RankPool) -> None:
    pool2.run(_bad_input)


# ---------------------------------------------------------------------------------------------------------------------
# Copies.


class _Copies(TorchDispatchMode):
    """Lists the bytes of an element, and of all elements, of each copy, concatenation or addition in place."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.copy_, torch.ops.aten.add_):
            self.found.append((args[0].itemsize, args[0].nbytes))
        if func.overloadpacket in (torch.ops.aten.stack, torch.ops.aten.cat, torch.ops.aten.clone):
            self.found.append((out.itemsize, out.nbytes))
        return out


def _spans(heads: tuple[int, int], ranks: int, chunks: int) -> list[list[list[tuple[int, int]]]]:
    """Return the heads of q, k and v of each rank, for each chunk."""
    groups = split_head_chunks(split_heads(*heads, ranks), chunks)
    return [all_to_all.head_spans(shards, ["q", "kv", "kv"]) for group in groups for shards in group]


# Heads, ranks, chunks, head_dim: and the copies of a chunk's pack and unpack, and the bytes of their elements.
COPIES = [
    ((32, 8), 8, 1, 128, 3, 3, 16),
    ((32, 16), 8, 2, 128, 3, 3, 16),
    ((32, 8), 8, 1, 36, 3, 3, 8),
    ((32, 8), 8, 1, 33, 3, 3, 2),
    ((16, 2), 8, 1, 64, 3, 1 + 2 * 4, 16),  # four ranks' gradients of a KV head are added in turn
    ((10, 5), 4, 1, 64, 12, 12, 16),  # uneven: rank by rank
]


@pytest.mark.parametrize(("heads", "ranks", "chunks", "dim", "packs", "unpacks", "itemsize"), COPIES)
def test_one_copy_serves_all_ranks(
    heads: tuple[int, int], ranks: int, chunks: int, dim: int, packs: int, unpacks: int, itemsize: int
) -> None:
    draw = torch.Generator().manual_seed(0)
    xs = [torch.randn(2, 5, h, dim, generator=draw).to(torch.bfloat16) for h in (heads[0], heads[1], heads[1])]
    adds = [False, *[ranks > heads[1]] * 2]
    outs = [torch.zeros_like(x, dtype=torch.float32 if add else x.dtype) for x, add in zip(xs, adds, strict=True)]
    expected = [out.clone() for out in outs]
    for spans in _spans(heads, ranks, chunks):
        sent_heads = sum(stop - start for of in spans for start, stop in of)
        with _Copies() as packing:
            sent = all_to_all._pack(xs, spans, 2 * 5 * dim * sent_heads)
        by_rank = [x[:, :, a:b].transpose(0, 1).flatten(2) for of in spans for x, (a, b) in zip(xs, of, strict=True)]
        rows = [torch.cat(by_rank[i : i + 3], 2).flatten() for i in range(0, len(by_rank), 3)]
        assert torch.equal(sent, torch.cat(rows))
        assert packing.found and len(packing.found) == packs
        assert sum(nbytes for _, nbytes in packing.found) == sent.nbytes and {n for n, _ in packing.found} == {itemsize}
        with _Copies() as unpacking:
            all_to_all.write_heads(sent, outs, spans, adds)
        assert len(unpacking.found) == unpacks
        assert unpacking.found[0][0] == itemsize
        for of in spans:
            for into, x, (a, b), add in zip(expected, xs, of, adds, strict=True):
                into[:, :, a:b] = into[:, :, a:b] + x[:, :, a:b] if add else x[:, :, a:b]
    assert all(torch.equal(out, true) for out, true in zip(outs, expected, strict=True))


def _moved_together(heads: int) -> None:
    """Move the heads of three tensors whose tokens do not divide over the ranks: 5 and 4 of 9."""
    group, ranks = dist.group.WORLD, dist.get_world_size()
    tokens, of_heads = shard_sizes(9, ranks), shard_sizes(heads, ranks)
    torch.manual_seed(dist.get_rank())
    qkv = [torch.randn(2, heads, tokens[dist.get_rank()], 8, requires_grad=True) for _ in "qkv"]
    how = group, 2, 1, tokens, of_heads
    expected = [move_shards(x, *how) for x in qkv]  # type: ignore[arg-type]
    weights = [torch.randn_like(x) for x in expected]
    grads = torch.autograd.grad(expected, qkv, weights)
    with _Copies() as forward:
        moved = move_shards_together(qkv, *how)
    with _Copies() as backward:
        found = torch.autograd.grad(moved, qkv, weights)
    for mine, true in zip((*moved, *found), (*expected, *grads), strict=True):
        assert torch.equal(mine, true)
    for copies, xs in ((forward, qkv), (backward, expected)):
        assert sum(nbytes for _, nbytes in copies.found) == sum(x.nbytes for x in xs)


@pytest.mark.parametrize("heads", [4, 5])
def test_tensors_moved_together_are_copied_once(pool2: RankPool, heads: int) -> None:
    pool2.run(_moved_together, heads)
