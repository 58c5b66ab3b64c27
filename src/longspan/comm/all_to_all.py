"""The exchange: one All-to-All swaps "my tokens, all heads" for "all tokens, my heads", and back.

The method is DeepSpeed-Ulysses (Jacobs et al. 2023, arXiv:2309.14509, section 3.1). Two operators do all of it:

    longspan::scatter_heads   [B, S/P, H, D] x several tensors  ->  [S, B, w]          w: my heads, all tensors, packed
    longspan::gather_heads    [S, B, w] or [S, B, h, D]         ->  [B, S/P, H, D] x several tensors

They are adjoint to each other, so each is registered as the other's gradient; where no head goes to two ranks that
adjoint is also the inverse. They are custom operators and not autograd Functions because `torch.compile` may inline
a Function whose body fills a buffer by a collective, and then gives zero gradients without a word.

On the wire the sequence comes first. A block from rank r is then a run of rows, blocks from all ranks in order are the
whole sequence, and what arrives is used where it lies: packing costs one copy, arrival none. The way back mirrors it.

With a code other than "exact" what travels is rounded to a byte per element with a scale per token and head
(`longspan.comm.quantize`), in the same message: forwards and backwards, and what a rank keeps for itself too, so that
all tokens of a head are alike. Copies of one head's gradient are added up after that, in fp32.

Shape suffixes: S tokens of the sequence, L = S/P tokens of a rank, B batch, H heads, D elements of a head, W a packed
row.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.comm.arguments import check_group, check_tensor
from longspan.comm.mesh import find_group, group_name
from longspan.comm.quantize import dequantize_rows, quantize_rows, quantized_width
from longspan.core.errors import LongspanError
from longspan.core.heads import HeadShard, split_heads
from longspan.core.validation import LARGEST_COUNT, check_number, format_value
from longspan.ranks.heartbeat import waiting

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from longspan.core.cache_dtype import CacheDtype

# Ranges of heads travel through the operators as one flat list of integers, [rank][tensor][start, stop].


def seq_to_heads(x: Tensor, group: dist.ProcessGroup | None, seq_dim: int = 1, head_dim: int = 2) -> Tensor:
    """Swap "my tokens, all heads" for "all tokens, my heads". One All-to-All; its gradient is `heads_to_seq`.

    Args:
        x: my tokens and all heads, in any order of dimensions: `[B, L, H, D]`, `[B, H, L, D]`, `[L, H, D]`, ...
            Every rank holds the same number of tokens.
        group: the ranks that share the sequence. None, or a group of one, returns `x` itself.
        seq_dim: the dimension of the tokens.
        head_dim: the dimension of the heads. They are dealt as evenly as they go, in order, larger shares first;
            with fewer heads than ranks some ranks get none.

    Returns:
        The same dimensions with all tokens and my heads. The memory order is the wire's (tokens outermost).

    Raises:
        LongspanError: if the two dimensions are the same or `x` does not have them.
    """
    return reshard(x, group, gather_dim=seq_dim, shard_dim=head_dim)


def heads_to_seq(
    x: Tensor, group: dist.ProcessGroup | None, seq_dim: int = 1, head_dim: int = 2, *, heads: int | None = None
) -> Tensor:
    """The inverse of `seq_to_heads`: all tokens and my heads in, my tokens and all heads out. One All-to-All.

    Args:
        x: all tokens (a multiple of the group's size) and my share of the heads, as `seq_to_heads` dealt them.
        group: the ranks that share the sequence.
        seq_dim: the dimension of the tokens.
        head_dim: the dimension of the heads.
        heads: heads of all ranks together, by default my heads x ranks. Where heads do not divide evenly, every rank
            must pass it: a rank cannot see from its own share how many the others hold.

    Raises:
        LongspanError: if the tokens do not divide by the ranks, or my heads are not my share of `heads`.
    """
    seq_dim, head_dim = _two_dims(x, seq_dim, head_dim)
    check_group(group)
    if heads is not None:
        check_number("heads", heads, 1, LARGEST_COUNT, whole=True)
    size = 1 if group is None else group.size()
    if size == 1:
        return x
    assert group is not None
    total = x.shape[head_dim] * size if heads is None else heads
    shares = split_heads(total, total, size)
    mine = shares[group.rank()]
    if x.shape[head_dim] != mine.q_heads:
        raise LongspanError(
            f"heads_to_seq: rank {group.rank()} of {size} holds {x.shape[head_dim]} heads, its share of {total} is "
            f"{mine.q_heads}; pass heads=<heads of all ranks together>"
        )
    if x.shape[seq_dim] % size:
        raise LongspanError(
            f"heads_to_seq: {x.shape[seq_dim]} tokens do not divide over {size} ranks; pad them to a multiple of {size}"
        )
    if 0 in (n for dim, n in enumerate(x.shape) if dim != head_dim):  # of the heads a rank may have none
        raise LongspanError(f"heads_to_seq: a tensor of shape {tuple(x.shape)} has nothing to exchange")
    rows = x.movedim(seq_dim, 0)
    at = head_dim + (head_dim < seq_dim)  # where the heads are once the tokens come first
    x_SBHD = _as_rows(rows, at)
    (out_BLHD,) = _gather_heads(x_SBHD.flatten(2), [total], [x_SBHD.shape[3]], _ranges([shares], ["q"]), group)
    return _from_rows(out_BLHD.transpose(0, 1), rows, at, total).movedim(0, seq_dim)


def reshard(x: Tensor, group: dist.ProcessGroup | None, gather_dim: int, shard_dim: int) -> Tensor:
    """Gather `gather_dim` and shard `shard_dim` instead: one All-to-All between any two dimensions.

    This is the switch of Dynamic Sequence Parallelism (Zhao et al. 2024, arXiv:2403.10266); `seq_to_heads` is the
    case of tokens and heads. Its gradient is the reshard with the two dimensions swapped.

    Args:
        x: a tensor sharded along `gather_dim`, equally on every rank.
        group: the ranks it is sharded over. None, or a group of one, returns `x` itself.
        gather_dim: the dimension to make whole.
        shard_dim: the dimension to cut; its parts differ by at most one, larger parts first.

    Raises:
        LongspanError: if the two dimensions are the same or `x` does not have them.
    """
    gather_dim, shard_dim = _two_dims(x, gather_dim, shard_dim)
    check_group(group)
    if group is None or group.size() == 1:
        return x
    if not x.numel():
        raise LongspanError(f"a tensor of shape {tuple(x.shape)} has nothing to exchange over {group.size()} ranks")
    rows = x.movedim(gather_dim, 0)
    at = shard_dim + (shard_dim < gather_dim)
    x_LBHD = _as_rows(rows, at)
    total = x_LBHD.shape[2]
    shares = split_heads(total, total, group.size())
    out_SBW = _scatter_heads([x_LBHD.transpose(0, 1)], _ranges([shares], ["q"]), group)
    mine = shares[group.rank()].q_heads
    return _from_rows(out_SBW.unflatten(2, (mine, x_LBHD.shape[3])), rows, at, mine).movedim(0, gather_dim)


def scatter_heads(
    xs: Sequence[Tensor],
    kinds: Sequence[str],
    shares: Sequence[HeadShard],
    group: dist.ProcessGroup,
    code: CacheDtype = "exact",
) -> Tensor:
    """Q, K and V of my tokens to their heads' ranks, in ONE All-to-All.

    Args:
        xs: tensors of the same tokens, each `[B, L, its heads, its head_dim]`.
        kinds: for each of them "q" or "kv": whose heads it has.
        shares: which heads each rank of `group` computes; a KV head in two shares is sent twice, and its gradient
            is the sum of what the two ranks return.
        group: the Ulysses group.
        code: how it travels, of `longspan.core.cache_dtype.CACHE_DTYPES`, and its gradient too.

    Returns:
        `[S, B, W]`: for every token of the sequence my heads of the first tensor, then those of the second, and so on.
    """
    return _scatter_heads(list(xs), _ranges([shares] * len(xs), kinds), group, code)


class Exchange:
    """An All-to-All that has been started; it holds both its buffers until it is over."""

    def __init__(self, received: Tensor, sent: Tensor, work: dist.Work | None, finish: Callable[[Tensor], Tensor]):
        self._buffers: tuple[Tensor, Tensor] | None = (received, sent)
        self._work, self._finish = work, finish

    def wait(self) -> Tensor:
        """What it brings, once; on a GPU the stream waits, not the host."""
        assert self._buffers is not None
        received, _ = self._buffers
        if self._work is not None:
            with waiting():
                self._work.wait()
        self._buffers = self._work = None
        return self._finish(received)


def start_scatter(
    xs: Sequence[Tensor],
    kinds: Sequence[str],
    shares: Sequence[HeadShard],
    group: dist.ProcessGroup,
    *,
    beside: bool,
    code: CacheDtype = "exact",
) -> Exchange:
    """`scatter_heads`, started; outside of autograd.

    Args:
        xs: as for `scatter_heads`.
        kinds: as there.
        shares: as there.
        group: as there.
        beside: whether it is under way while something else runs, until its `wait`; else it is over at once.
        code: as there.
    """
    by_rank = _by_rank(_ranges([shares] * len(xs), kinds), len(xs))
    dims = [x.shape[3] for x in xs]
    widths = _widths(by_rank, dims)
    batch, tokens = xs[0].shape[:2]
    mine, size = widths[group.rank()], group.size()
    wire = _Wire(batch * tokens, by_rank, dims, group.rank(), code)
    send = _pack(list(xs), by_rank, widths)
    return _started(send, wire, group, beside, lambda received: received.view(size * tokens, batch, mine))


def _started(
    send: Tensor,
    wire: _Wire,
    group: dist.ProcessGroup,
    beside: bool,
    finish: Callable[[Tensor], Tensor],
) -> Exchange:
    dtype = send.dtype
    send = wire.coded(send)

    def read(received: Tensor) -> Tensor:
        return finish(wire.read(received, dtype))

    if not beside:
        return Exchange(_all_to_all(send, *wire.splits, group_name(group)), send[:0], None, read)
    send_splits, recv_splits = wire.splits
    received = send.new_empty(sum(recv_splits))
    even = len({*send_splits, *recv_splits}) == 1
    work = dist.all_to_all_single(
        received, send, None if even else recv_splits, None if even else send_splits, group=group, async_op=True
    )
    return Exchange(received, send, work, read)


def gather_heads(
    o: Tensor, shares: Sequence[HeadShard], group: dist.ProcessGroup, code: CacheDtype = "exact"
) -> Tensor:
    """The attention's output back to its tokens, in one All-to-All: `[B, S, my heads, D]` to `[B, L, all heads, D]`."""
    rows = o.transpose(0, 1)
    (out,) = _gather_heads(rows, [shares[-1].q_stop], [o.shape[3]], _ranges([shares], ["q"]), group, code)
    return out


def start_gather_into(
    outs: Sequence[Tensor],
    packed_SBW: Tensor,
    kinds: Sequence[str],
    shares: Sequence[HeadShard],
    group: dist.ProcessGroup,
    *,
    beside: bool,
    add: bool = False,
    code: CacheDtype = "exact",
) -> Exchange:
    """The way back of some of the heads, in ONE All-to-All, into their places once it is waited for; outside of
    autograd.

    Args:
        outs: of my tokens, each `[B, L, all its heads, its head_dim]`. Heads that are in nobody's share stay as they
            are.
        packed_SBW: for every token of the sequence my heads of the first tensor, then those of the second, and so on.
        kinds: as for `scatter_heads`.
        shares: which of the heads each rank returns.
        group: the Ulysses group.
        beside: as for `start_scatter`.
        add: whether KV heads are added to what is there, as the gradients of those that went to several ranks must be
            (which wants sums in fp32 at least); the others, and query heads, are put there.
        code: as for `scatter_heads`.
    """
    by_rank = _by_rank(_ranges([shares] * len(outs), kinds), len(outs))
    dims = [out.shape[3] for out in outs]
    widths = _widths(by_rank, dims)
    batch, tokens = outs[0].shape[:2]
    rows = batch * tokens
    send, wire = packed_SBW.contiguous().view(-1), _Wire(rows, by_rank, dims, group.rank(), code, home=True)

    def put(received: Tensor) -> Tensor:
        for block, width, of_rank in zip(_split(received, rows, widths), widths, by_rank, strict=True):
            col = 0
            for out, kind, (start, stop) in zip(outs, kinds, of_rank, strict=True):
                heads, d = stop - start, out.shape[3]
                if heads:
                    part = block.view(tokens, batch, width)[..., col : col + heads * d].unflatten(2, (heads, d))
                    into = out[:, :, start:stop]
                    into.add_(part.transpose(0, 1)) if add and kind == "kv" else into.copy_(part.transpose(0, 1))
                col += heads * d
        return received

    return _started(send, wire, group, beside, put)


def _two_dims(x: Tensor, a: int, b: int) -> tuple[int, int]:
    check_tensor("x", x)
    n = x.dim()
    whole = all(isinstance(dim, int) and not isinstance(dim, bool) for dim in (a, b))
    if not whole or not (-n <= a < n and -n <= b < n) or a % n == b % n:
        raise LongspanError(
            f"a tensor of shape {tuple(x.shape)} has no two different dimensions {format_value(a)} and "
            f"{format_value(b)}"
        )
    return a % n, b % n


def _as_rows(rows: Tensor, at: int) -> Tensor:
    """`[L, ..., H, ...]` with the heads at dimension `at` as `[L, B, H, D]`. A view wherever one exists."""
    before = rows.shape[1:at].numel()
    return rows.reshape(rows.shape[0], before, rows.shape[at], rows.shape[at + 1 :].numel())


def _from_rows(out: Tensor, rows: Tensor, at: int, heads: int) -> Tensor:
    """`[tokens, B, heads, D]` with the dimensions of `rows` again."""
    return out.reshape(out.shape[0], *rows.shape[1:at], heads, *rows.shape[at + 1 :])


def _ranges(shares: Sequence[Sequence[HeadShard]], kinds: Sequence[str]) -> list[int]:
    flat: list[int] = []
    for of_rank in zip(*shares, strict=True):
        for share, kind in zip(of_rank, kinds, strict=True):
            flat += [share.q_start, share.q_stop] if kind == "q" else [share.kv_start, share.kv_stop]
    return flat


def _scatter_heads(xs: list[Tensor], ranges: list[int], group: dist.ProcessGroup, code: CacheDtype = "exact") -> Tensor:
    out: Tensor = torch.ops.longspan.scatter_heads(xs, ranges, group.size(), group.rank(), group_name(group), code)
    return out


def _gather_heads(
    y: Tensor,
    heads: list[int],
    dims: list[int],
    ranges: list[int],
    group: dist.ProcessGroup,
    code: CacheDtype = "exact",
) -> list[Tensor]:
    out: list[Tensor] = torch.ops.longspan.gather_heads(
        y, heads, dims, ranges, group.size(), group.rank(), group_name(group), code
    )
    return out


class _Wire:
    """The flat buffers of one All-to-All as they travel: what of them goes where, and how it is coded.

    Args:
        rows: packed rows of each block: a rank's tokens, of all of the batch.
        by_rank: [rank][tensor] -> (start, stop), the heads of each rank.
        dims: elements of a head, of each tensor.
        rank: this one.
        code: of `longspan.core.cache_dtype.CACHE_DTYPES`.
        home: whether my heads go to their tokens; else my tokens to their heads.
    """

    def __init__(
        self,
        rows: int,
        by_rank: list[list[tuple[int, int]]],
        dims: Sequence[int],
        rank: int,
        code: str,
        *,
        home: bool = False,
    ) -> None:
        of_ranks = [[(stop - start, d) for (start, stop), d in zip(row, dims, strict=True)] for row in by_rank]
        of_mine = [of_ranks[rank]] * len(of_ranks)
        self._rows, self._code = rows, code
        self._sent, self._received = (of_mine, of_ranks) if home else (of_ranks, of_mine)

    @property
    def splits(self) -> tuple[list[int], list[int]]:
        """Elements for each rank, and from each: bytes where they are coded."""

        def width(runs: list[tuple[int, int]]) -> int:
            return sum(count * d for count, d in runs) if self._code == "exact" else quantized_width(runs)

        return [self._rows * width(runs) for runs in self._sent], [self._rows * width(runs) for runs in self._received]

    def coded(self, send: Tensor) -> Tensor:
        """What travels of a buffer of packed rows."""
        return send if self._code == "exact" else quantize_rows(send, self._rows, self._sent, self._code)

    def read(self, received: Tensor, dtype: torch.dtype) -> Tensor:
        """The packed rows that have arrived."""
        if self._code == "exact":
            return received
        return dequantize_rows(received, self._rows, self._received, self._code, dtype)


# ---------------------------------------------------------------------------------------------------------------------
# The two operators.


def _by_rank(ranges: list[int], tensors: int) -> list[list[tuple[int, int]]]:
    """The flat list of ranges as [rank][tensor] -> (start, stop)."""
    pairs = list(zip(ranges[::2], ranges[1::2], strict=True))
    return [pairs[i : i + tensors] for i in range(0, len(pairs), tensors)]


def _widths(by_rank: list[list[tuple[int, int]]], dims: Sequence[int]) -> list[int]:
    """Elements of a packed row, per rank."""
    return [sum((stop - start) * d for (start, stop), d in zip(row, dims, strict=True)) for row in by_rank]


def _repeats(by_rank: list[list[tuple[int, int]]], tensor: int, heads: int) -> int:
    """r if `tensor`'s heads are dealt in equal runs, each run to r neighbouring ranks; 0 if they are not."""
    runs = [row[tensor] for row in by_rank]
    size = runs[0][1] - runs[0][0]
    if size == 0 or heads % size or len(runs) % (heads // size):
        return 0
    r = len(runs) // (heads // size)
    regular = all(run == (i // r * size, (i // r + 1) * size) for i, run in enumerate(runs))
    return r if regular else 0


def _all_to_all(send: Tensor, send_splits: list[int], recv_splits: list[int], group: str) -> Tensor:
    """The one collective. Splits are in elements of the flat buffers."""
    recv = send.new_empty(sum(recv_splits))
    even = len({*send_splits, *recv_splits}) == 1
    dist.all_to_all_single(
        recv,
        send,
        None if even else recv_splits,
        None if even else send_splits,
        group=find_group(group),
    )
    return recv


@torch.library.custom_op("longspan::scatter_heads", mutates_args=())
def _scatter_op(xs: list[Tensor], ranges: list[int], size: int, rank: int, group: str, code: str) -> Tensor:
    by_rank, dims = _by_rank(ranges, len(xs)), [x.shape[3] for x in xs]
    widths = _widths(by_rank, dims)
    batch, tokens = xs[0].shape[:2]
    wire = _Wire(batch * tokens, by_rank, dims, rank, code)
    send = wire.coded(_pack(xs, by_rank, widths))
    recv = wire.read(_all_to_all(send, *wire.splits, group), xs[0].dtype)
    return recv.view(size * tokens, batch, widths[rank])


def _pack(xs: list[Tensor], by_rank: list[list[tuple[int, int]]], widths: list[int]) -> Tensor:
    """One send buffer, rank after rank, from strided `[B, L, H, D]`: every element is copied once."""
    batch, tokens = xs[0].shape[:2]
    send = xs[0].new_empty(tokens * batch * sum(widths))
    even = len(set(widths)) == 1
    col = [0] * len(widths)
    blocks = [
        block.view(tokens, batch, w) for block, w in zip(_split(send, tokens * batch, widths), widths, strict=True)
    ]
    for t, x in enumerate(xs):
        d = x.shape[3]
        r = _repeats(by_rank, t, x.shape[2]) if even else 0
        if r and len(set(col)) == 1:  # the regular case, in one copy for all ranks
            h = by_rank[0][t][1]
            block = send.view(-1, r, tokens, batch, widths[0])[..., col[0] : col[0] + h * d].unflatten(4, (h, d))
            block.copy_(x.unflatten(2, (-1, h)).permute(2, 1, 0, 3, 4).unsqueeze(1).expand_as(block))
        else:
            for p, row in enumerate(by_rank):
                start, stop = row[t]
                if stop > start:
                    part = blocks[p][..., col[p] : col[p] + (stop - start) * d]
                    part.unflatten(2, (stop - start, d)).copy_(x[:, :, start:stop].transpose(0, 1))
        col = [c + (row[t][1] - row[t][0]) * d for c, row in zip(col, by_rank, strict=True)]
    return send


def _split(flat: Tensor, rows: int, widths: list[int]) -> list[Tensor]:
    return list(flat.split([rows * w for w in widths]))


@_scatter_op.register_fake
def _(xs: list[Tensor], ranges: list[int], size: int, rank: int, group: str, code: str) -> Tensor:
    width = _widths(_by_rank(ranges, len(xs)), [x.shape[3] for x in xs])[rank]
    return xs[0].new_empty(size * xs[0].shape[1], xs[0].shape[0], width)


@torch.library.custom_op("longspan::gather_heads", mutates_args=())
def _gather_op(
    y: Tensor, heads: list[int], dims: list[int], ranges: list[int], size: int, rank: int, group: str, code: str
) -> list[Tensor]:
    by_rank = _by_rank(ranges, len(heads))
    widths = _widths(by_rank, dims)
    tokens, batch = y.shape[0] // size, y.shape[1]
    wire = _Wire(tokens * batch, by_rank, dims, rank, code, home=True)
    send = wire.coded(y.contiguous().view(-1))  # no copy where the tokens come first
    recv = _all_to_all(send, *wire.splits, group)
    del send  # before what has arrived is copied in its turn
    recv = wire.read(recv, y.dtype)
    return _unpack(recv, tokens, batch, heads, dims, by_rank, widths)


def _unpack(
    recv: Tensor,
    tokens: int,
    batch: int,
    heads: list[int],
    dims: list[int],
    by_rank: list[list[tuple[int, int]]],
    widths: list[int],
) -> list[Tensor]:
    """The mirror of `_pack`: every element is copied once, copies of one head are summed (in fp32 at least)."""
    blocks = [
        block.view(tokens, batch, w) for block, w in zip(_split(recv, tokens * batch, widths), widths, strict=True)
    ]
    even = len(set(widths)) == 1
    col = [0] * len(widths)
    outs = []
    for t, (h_all, d) in enumerate(zip(heads, dims, strict=True)):
        r = _repeats(by_rank, t, h_all) if even else 0
        if r and len(set(col)) == 1:
            h = by_rank[0][t][1]
            block = recv.view(-1, r, tokens, batch, widths[0])[..., col[0] : col[0] + h * d].unflatten(4, (h, d))
            out = recv.new_empty(batch, tokens, h_all, d)
            into = out.unflatten(2, (-1, h)).permute(2, 1, 0, 3, 4)
            into.copy_(block[:, 0] if r == 1 else block.sum(1))
        else:
            out = _sum_runs(blocks, [row[t] for row in by_rank], col, h_all, d)
        outs.append(out)
        col = [c + (row[t][1] - row[t][0]) * d for c, row in zip(col, by_rank, strict=True)]
    return outs


def _sum_runs(blocks: list[Tensor], runs: list[tuple[int, int]], col: list[int], heads: int, d: int) -> Tensor:
    """Put every rank's run of heads in its place, adding where runs overlap."""
    tokens, batch = blocks[0].shape[:2]
    overlap = any(a[1] > b[0] for a, b in itertools.pairwise(runs))
    dtype = torch.promote_types(blocks[0].dtype, torch.float32) if overlap else blocks[0].dtype
    out = blocks[0].new_zeros(batch, tokens, heads, d, dtype=dtype)
    for block, c, (start, stop) in zip(blocks, col, runs, strict=True):
        if stop > start:
            part = block[..., c : c + (stop - start) * d].unflatten(2, (stop - start, d))
            out[:, :, start:stop] += part.transpose(0, 1)
    return out.to(blocks[0].dtype)


@_gather_op.register_fake
def _(
    y: Tensor, heads: list[int], dims: list[int], ranges: list[int], size: int, rank: int, group: str, code: str
) -> list[Tensor]:
    return [y.new_empty(y.shape[1], y.shape[0] // size, h, d) for h, d in zip(heads, dims, strict=True)]


def _scatter_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    xs, ctx.ranges, ctx.size, ctx.rank, ctx.group, ctx.code = inputs
    ctx.heads, ctx.dims = [x.shape[2] for x in xs], [x.shape[3] for x in xs]


def _scatter_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    grads = torch.ops.longspan.gather_heads(
        grad, ctx.heads, ctx.dims, ctx.ranges, ctx.size, ctx.rank, ctx.group, ctx.code
    )
    return grads, None, None, None, None, None


def _gather_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    y, _, _, ctx.ranges, ctx.size, ctx.rank, ctx.group, ctx.code = inputs
    ctx.shape = y.shape[2:]


def _gather_backward(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    grad = torch.ops.longspan.scatter_heads(grads, ctx.ranges, ctx.size, ctx.rank, ctx.group, ctx.code)
    return grad.unflatten(2, ctx.shape), None, None, None, None, None, None, None


_scatter_op.register_autograd(_scatter_backward, setup_context=_scatter_setup)
_gather_op.register_autograd(_gather_backward, setup_context=_gather_setup)
