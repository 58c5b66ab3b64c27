"""The Ulysses all-to-all: swap "local tokens, all heads" for "all tokens, local heads", and back.

DeepSpeed-Ulysses (Jacobs et al. 2023, arXiv:2309.14509, section 3.1). Two operators do all of it:

    longspan::scatter_heads   [B, L, H, D] x several tensors    ->  [S, B, W]    W: local heads of all tensors, packed
    longspan::gather_heads    [S, B, W] or [S, B, h, D]         ->  [B, L, H, D] x several tensors

Each is the other's adjoint and is registered as its gradient; if no head is sent to two ranks, the adjoint is also the
inverse. They are custom operators, not autograd Functions: `torch.compile` may inline a Function whose body fills a
buffer by a collective, and then returns zero gradients silently.

On the wire the sequence comes first. A block from rank r is then a run of rows, and the blocks of all ranks in order
are the whole sequence. So packing costs one copy, and receiving none; the way back is the mirror image.

With a wire dtype other than "exact", elements are rounded to one byte with a scale per token and head
(`longspan.comm.quantize`), in the same message, forward and backward. A rank rounds its own part too, so that all
tokens of a head are alike. Gradients of a replicated head are summed afterwards, in fp32.

Shape suffixes: S tokens of the sequence, L = S/P tokens of a rank, B batch, H heads, h heads of one rank, D elements of
a head, W packed row, R ranks that hold the same heads, G groups of such ranks.
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
from longspan.core.layout import Span
from longspan.core.validation import LARGEST_COUNT, check_number, format_value
from longspan.ranks.heartbeat import waiting

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from longspan.core.cache_dtype import CacheDtype

_HeadSpans = list[list[Span]]
"""`spans[rank][tensor]`: the heads of each tensor that a rank holds. Operators take it as a flat list of integers."""


# ---------------------------------------------------------------------------------------------------------------------
# Any two dimensions: the public functions.


def seq_to_heads(x: Tensor, group: dist.ProcessGroup | None, seq_dim: int = 1, head_dim: int = 2) -> Tensor:
    """Swap "local tokens, all heads" for "all tokens, local heads": one all-to-all. Its gradient is `heads_to_seq`.

    Args:
        x: local tokens and all heads, in any order of dimensions: `[B, L, H, D]`, `[B, H, L, D]`, `[L, H, D]`, ...
            Every rank holds the same number of tokens.
        group: the ranks that share the sequence. None, or a group of one, returns `x` itself.
        seq_dim: the dimension of the tokens.
        head_dim: the dimension of the heads. They are split as evenly as possible, in order, larger shards first; with
            fewer heads than ranks some ranks get none.

    Returns:
        The same dimensions with all tokens and the local heads. The memory order is the wire's (tokens outermost).

    Raises:
        LongspanError: if the two dimensions are the same or `x` does not have them.
    """
    return reshard(x, group, gather_dim=seq_dim, shard_dim=head_dim)


def heads_to_seq(
    x: Tensor, group: dist.ProcessGroup | None, seq_dim: int = 1, head_dim: int = 2, *, heads: int | None = None
) -> Tensor:
    """Swap "all tokens, local heads" for "local tokens, all heads": one all-to-all, the inverse of `seq_to_heads`.

    Args:
        x: all tokens (a multiple of the group's size) and the local shard of the heads, as `seq_to_heads` split them.
        group: the ranks that share the sequence.
        seq_dim: the dimension of the tokens.
        head_dim: the dimension of the heads.
        heads: total number of heads; default: local heads x ranks. If heads do not divide evenly, every rank must pass
            it, because a rank cannot see how many the others hold.

    Raises:
        LongspanError: if the tokens do not divide by the ranks, or the local heads are not this rank's shard of
            `heads`.
    """
    seq_dim, head_dim = _two_dims(x, seq_dim, head_dim)
    check_group(group)
    if heads is not None:
        check_number("heads", heads, 1, LARGEST_COUNT, whole=True)
    if group is None or group.size() == 1:
        return x
    total = x.shape[head_dim] * group.size() if heads is None else heads
    shards = split_heads(total, total, group.size())
    _check_heads_to_seq(x, seq_dim, head_dim, total, shards[group.rank()].q_heads, group)
    rows = x.movedim(seq_dim, 0)
    at = head_dim + (head_dim < seq_dim)  # the heads' dimension once the tokens come first
    x_SBhD = _as_rows(rows, at)
    flat_spans = _flat_spans(shards, ["q"])
    (out_BLHD,) = _gather_heads(x_SBhD.flatten(2), [total], [x_SBhD.shape[3]], flat_spans, group)
    return _from_rows(out_BLHD.transpose(0, 1), rows, at, total).movedim(0, seq_dim)


def reshard(x: Tensor, group: dist.ProcessGroup | None, gather_dim: int, shard_dim: int) -> Tensor:
    """Gather `gather_dim` and shard `shard_dim` instead: one all-to-all between any two dimensions.

    This is the switch of Dynamic Sequence Parallelism (Zhao et al. 2024, arXiv:2403.10266); `seq_to_heads` is the
    case of tokens and heads. Its gradient is the reshard with the two dimensions swapped.

    Args:
        x: a tensor sharded along `gather_dim`, equally on every rank.
        group: the ranks it is sharded over. None, or a group of one, returns `x` itself.
        gather_dim: the dimension to gather.
        shard_dim: the dimension to shard; its shards differ by at most one, larger ones first.

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
    shards = split_heads(total, total, group.size())
    out_SBW = _scatter_heads([x_LBHD.transpose(0, 1)], _flat_spans(shards, ["q"]), group)
    local = shards[group.rank()].q_heads
    out_SBhD = out_SBW.unflatten(2, (local, x_LBHD.shape[3]))
    return _from_rows(out_SBhD, rows, at, local).movedim(0, gather_dim)


def _as_rows(rows: Tensor, at: int) -> Tensor:
    """View `[L, ..., H, ...]` with the heads at dimension `at` as `[L, B, H, D]`; a copy if there is no such view."""
    before = rows.shape[1:at].numel()
    return rows.reshape(rows.shape[0], before, rows.shape[at], rows.shape[at + 1 :].numel())


def _from_rows(out_LBHD: Tensor, rows: Tensor, at: int, heads: int) -> Tensor:
    """Undo `_as_rows`: `[tokens, B, heads, D]` with the dimensions of `rows`."""
    return out_LBHD.reshape(out_LBHD.shape[0], *rows.shape[1:at], heads, *rows.shape[at + 1 :])


def _two_dims(x: Tensor, a: int, b: int) -> tuple[int, int]:
    check_tensor("x", x)
    n = x.dim()
    integers = all(isinstance(dim, int) and not isinstance(dim, bool) for dim in (a, b))
    if not integers or not (-n <= a < n and -n <= b < n) or a % n == b % n:
        raise LongspanError(
            f"a tensor of shape {tuple(x.shape)} has no two different dimensions {format_value(a)} and "
            f"{format_value(b)}"
        )
    return a % n, b % n


def _check_heads_to_seq(
    x: Tensor, seq_dim: int, head_dim: int, total: int, local: int, group: dist.ProcessGroup
) -> None:
    size = group.size()
    if x.shape[head_dim] != local:
        raise LongspanError(
            f"heads_to_seq: rank {group.rank()} of {size} holds {x.shape[head_dim]} heads, its share of {total} is "
            f"{local}; pass heads=<heads of all ranks together>"
        )
    if x.shape[seq_dim] % size:
        raise LongspanError(
            f"heads_to_seq: {x.shape[seq_dim]} tokens do not divide over {size} ranks; pad them to a multiple of {size}"
        )
    if 0 in (n for dim, n in enumerate(x.shape) if dim != head_dim):  # a rank may have no heads
        raise LongspanError(f"heads_to_seq: a tensor of shape {tuple(x.shape)} has nothing to exchange")


# ---------------------------------------------------------------------------------------------------------------------
# Attention's all-to-alls, differentiable.


def scatter_heads(
    xs_BLHD: Sequence[Tensor],
    kinds: Sequence[str],
    shards: Sequence[HeadShard],
    group: dist.ProcessGroup,
    wire_dtype: CacheDtype = "exact",
) -> Tensor:
    """Send the heads of q, k and v of the local tokens to their ranks, in one all-to-all.

    Args:
        xs_BLHD: tensors of the same tokens, each with its own number of heads and head_dim.
        kinds: for each tensor "q" or "kv": whether it has query heads or KV heads.
        shards: the heads of each rank of `group`. A KV head in two shards is sent twice, and its gradient is the sum
            of what the two ranks return.
        group: the Ulysses group.
        wire_dtype: dtype of what is sent, also of the gradient.

    Returns:
        `[S, B, W]`: for every token of the sequence the local heads of the first tensor, then those of the second, ...
    """
    return _scatter_heads(list(xs_BLHD), _flat_spans(shards, kinds), group, wire_dtype)


def gather_heads(
    out_BShD: Tensor, shards: Sequence[HeadShard], group: dist.ProcessGroup, wire_dtype: CacheDtype = "exact"
) -> Tensor:
    """Send the attention output of the local heads back to the tokens' ranks, in one all-to-all: `[B, L, H, D]`."""
    out_SBhD = out_BShD.transpose(0, 1)
    flat_spans = _flat_spans(shards, ["q"])
    (out_BLHD,) = _gather_heads(out_SBhD, [shards[-1].q_stop], [out_BShD.shape[3]], flat_spans, group, wire_dtype)
    return out_BLHD


def _flat_spans(shards: Sequence[HeadShard], kinds: Sequence[str]) -> list[int]:
    """Flatten the head spans of each rank and tensor: [rank][tensor][start, stop]."""
    flat: list[int] = []
    for shard in shards:
        for kind in kinds:
            flat += [shard.q_start, shard.q_stop] if kind == "q" else [shard.kv_start, shard.kv_stop]
    return flat


def _head_spans(flat: list[int], tensors: int) -> _HeadSpans:
    """Undo `_flat_spans`."""
    spans = list(zip(flat[::2], flat[1::2], strict=True))
    return [spans[i : i + tensors] for i in range(0, len(spans), tensors)]


def _scatter_heads(
    xs_BLHD: list[Tensor], flat_spans: list[int], group: dist.ProcessGroup, wire_dtype: CacheDtype = "exact"
) -> Tensor:
    out_SBW: Tensor = torch.ops.longspan.scatter_heads(
        xs_BLHD, flat_spans, group.size(), group.rank(), group_name(group), wire_dtype
    )
    return out_SBW


def _gather_heads(
    x_SBW: Tensor,
    heads: list[int],
    dims: list[int],
    flat_spans: list[int],
    group: dist.ProcessGroup,
    wire_dtype: CacheDtype = "exact",
) -> list[Tensor]:
    outs_BLHD: list[Tensor] = torch.ops.longspan.gather_heads(
        x_SBW, heads, dims, flat_spans, group.size(), group.rank(), group_name(group), wire_dtype
    )
    return outs_BLHD


# ---------------------------------------------------------------------------------------------------------------------
# The same, started and waited for, outside of autograd.


class AllToAll:
    """An all-to-all in flight; it keeps both buffers alive until `wait`."""

    def __init__(self, received: Tensor, sent: Tensor, work: dist.Work | None, finish: Callable[[Tensor], Tensor]):
        self._buffers: tuple[Tensor, Tensor] | None = (received, sent)
        self._work, self._finish = work, finish

    def wait(self) -> Tensor:
        """Return the result, once. On a GPU the stream waits, not the host."""
        assert self._buffers is not None
        received, _ = self._buffers
        if self._work is not None:
            with waiting():
                self._work.wait()
        self._buffers = self._work = None
        return self._finish(received)


def start_scatter(
    xs_BLHD: Sequence[Tensor],
    kinds: Sequence[str],
    shards: Sequence[HeadShard],
    group: dist.ProcessGroup,
    *,
    overlapped: bool,
    wire_dtype: CacheDtype = "exact",
) -> AllToAll:
    """Start `scatter_heads`, outside of autograd.

    Args:
        xs_BLHD: as for `scatter_heads`.
        kinds: as there.
        shards: as there.
        group: as there.
        overlapped: whether it stays in flight until `wait`; otherwise it completes at once.
        wire_dtype: as there.
    """
    spans, dims = _head_spans(_flat_spans(shards, kinds), len(xs_BLHD)), [x.shape[3] for x in xs_BLHD]
    widths = _widths(spans, dims)
    batch, tokens = xs_BLHD[0].shape[:2]
    local_width, size = widths[group.rank()], group.size()
    wire = _WireFormat(batch * tokens, spans, dims, group.rank(), wire_dtype)
    packed = _pack(list(xs_BLHD), spans, widths)
    return _start(packed, wire, group, overlapped, lambda received: received.view(size * tokens, batch, local_width))


def start_gather_into(
    outs_BLHD: Sequence[Tensor],
    packed_SBW: Tensor,
    kinds: Sequence[str],
    shards: Sequence[HeadShard],
    group: dist.ProcessGroup,
    *,
    overlapped: bool,
    accumulate: bool = False,
    wire_dtype: CacheDtype = "exact",
) -> AllToAll:
    """Start to send some heads back to the tokens' ranks; `wait` writes them into `outs_BLHD`. Outside of autograd.

    Args:
        outs_BLHD: local tokens and all heads of each tensor. Heads that are in no shard stay as they are.
        packed_SBW: for every token of the sequence the local heads of the first tensor, then of the second, ...
        kinds: as for `scatter_heads`.
        shards: the heads that each rank returns.
        group: the Ulysses group.
        overlapped: as for `start_scatter`.
        accumulate: whether to add KV heads to `outs_BLHD`, as gradients of replicated KV heads need (`outs_BLHD` should
            be fp32 at least). Query heads are always overwritten.
        wire_dtype: as for `scatter_heads`.
    """
    spans, dims = _head_spans(_flat_spans(shards, kinds), len(outs_BLHD)), [out.shape[3] for out in outs_BLHD]
    widths = _widths(spans, dims)
    batch, tokens = outs_BLHD[0].shape[:2]
    rows = batch * tokens
    wire = _WireFormat(rows, spans, dims, group.rank(), wire_dtype, gathers=True)

    def write(received: Tensor) -> Tensor:
        for block, width, of_rank in zip(_split_blocks(received, rows, widths), widths, spans, strict=True):
            col = 0
            for out_BLHD, kind, (start, stop) in zip(outs_BLHD, kinds, of_rank, strict=True):
                h, d = stop - start, out_BLHD.shape[3]
                if h:
                    part_LBW = block.view(tokens, batch, width)[..., col : col + h * d]
                    part_BLhD = part_LBW.unflatten(2, (h, d)).transpose(0, 1)
                    into_BLhD = out_BLHD[:, :, start:stop]
                    into_BLhD.add_(part_BLhD) if accumulate and kind == "kv" else into_BLhD.copy_(part_BLhD)
                col += h * d
        return received

    return _start(packed_SBW.contiguous().view(-1), wire, group, overlapped, write)


def _start(
    packed: Tensor,
    wire: _WireFormat,
    group: dist.ProcessGroup,
    overlapped: bool,
    finish: Callable[[Tensor], Tensor],
) -> AllToAll:
    dtype = packed.dtype
    send = wire.encode(packed)
    del packed

    def decode(received: Tensor) -> Tensor:
        return finish(wire.decode(received, dtype))

    if not overlapped:
        return AllToAll(_all_to_all(send, *wire.splits, group), send[:0], None, decode)
    received = send.new_empty(sum(wire.splits[1]))
    work = _all_to_all_single(received, send, *wire.splits, group, async_op=True)
    return AllToAll(received, send, work, decode)


# ---------------------------------------------------------------------------------------------------------------------
# The wire.


class _WireFormat:
    """The flat send and receive buffers of one all-to-all: their splits by rank, and their encoding.

    Args:
        rows: packed rows of each block: batch x local tokens.
        spans: the heads of each rank and tensor.
        dims: head_dim of each tensor.
        rank: this rank.
        wire_dtype: "exact", "int8" or "fp8".
        gathers: whether local heads are sent to their tokens' ranks; otherwise local tokens to their heads' ranks.
    """

    def __init__(
        self,
        rows: int,
        spans: _HeadSpans,
        dims: Sequence[int],
        rank: int,
        wire_dtype: str,
        *,
        gathers: bool = False,
    ) -> None:
        of_ranks = [[(stop - start, d) for (start, stop), d in zip(row, dims, strict=True)] for row in spans]
        of_local = [of_ranks[rank]] * len(of_ranks)
        self._rows, self._wire_dtype = rows, wire_dtype
        self._sent, self._received = (of_local, of_ranks) if gathers else (of_ranks, of_local)

    @property
    def splits(self) -> tuple[list[int], list[int]]:
        """Elements of the send and of the receive buffer, by rank; bytes if quantized."""

        def width(vectors: list[tuple[int, int]]) -> int:
            if self._wire_dtype == "exact":
                return sum(count * d for count, d in vectors)
            return quantized_width(vectors)

        return [self._rows * width(v) for v in self._sent], [self._rows * width(v) for v in self._received]

    def encode(self, packed: Tensor) -> Tensor:
        if self._wire_dtype == "exact":
            return packed
        return quantize_rows(packed, self._rows, self._sent, self._wire_dtype)

    def decode(self, received: Tensor, dtype: torch.dtype) -> Tensor:
        if self._wire_dtype == "exact":
            return received
        return dequantize_rows(received, self._rows, self._received, self._wire_dtype, dtype)


def _all_to_all(send: Tensor, send_splits: list[int], recv_splits: list[int], group: dist.ProcessGroup) -> Tensor:
    recv = send.new_empty(sum(recv_splits))
    _all_to_all_single(recv, send, send_splits, recv_splits, group)
    return recv


def _all_to_all_single(
    recv: Tensor,
    send: Tensor,
    send_splits: list[int],
    recv_splits: list[int],
    group: dist.ProcessGroup,
    *,
    async_op: bool = False,
) -> dist.Work | None:
    even = len({*send_splits, *recv_splits}) == 1
    work: dist.Work | None = dist.all_to_all_single(
        recv,
        send,
        None if even else recv_splits,
        None if even else send_splits,
        group=group,
        async_op=async_op,
    )
    return work


def _widths(spans: _HeadSpans, dims: Sequence[int]) -> list[int]:
    """Return the elements of a packed row, by rank."""
    return [sum((stop - start) * d for (start, stop), d in zip(row, dims, strict=True)) for row in spans]


def _split_blocks(flat: Tensor, rows: int, widths: list[int]) -> list[Tensor]:
    return list(flat.split([rows * w for w in widths]))


def _ranks_per_head(spans: _HeadSpans, tensor: int, heads: int) -> int:
    """Return R if the heads of `tensor` are split evenly and each shard is held by R neighbouring ranks; 0 if not."""
    of_tensor = [row[tensor] for row in spans]
    h = of_tensor[0][1] - of_tensor[0][0]
    if h == 0 or heads % h or len(of_tensor) % (heads // h):
        return 0
    r = len(of_tensor) // (heads // h)
    regular = all(span == (i // r * h, (i // r + 1) * h) for i, span in enumerate(of_tensor))
    return r if regular else 0


# ---------------------------------------------------------------------------------------------------------------------
# The operators: pack, all-to-all; all-to-all, unpack.


@torch.library.custom_op("longspan::scatter_heads", mutates_args=())
def _scatter_op(
    xs_BLHD: list[Tensor], flat_spans: list[int], size: int, rank: int, group: str, wire_dtype: str
) -> Tensor:
    spans, dims = _head_spans(flat_spans, len(xs_BLHD)), [x.shape[3] for x in xs_BLHD]
    widths = _widths(spans, dims)
    batch, tokens = xs_BLHD[0].shape[:2]
    wire = _WireFormat(batch * tokens, spans, dims, rank, wire_dtype)
    send = wire.encode(_pack(xs_BLHD, spans, widths))
    recv = wire.decode(_all_to_all(send, *wire.splits, find_group(group)), xs_BLHD[0].dtype)
    return recv.view(size * tokens, batch, widths[rank])


def _pack(xs_BLHD: list[Tensor], spans: _HeadSpans, widths: list[int]) -> Tensor:
    """Copy the heads of each rank into one send buffer, rank after rank. Every element is copied once."""
    batch, tokens = xs_BLHD[0].shape[:2]
    send = xs_BLHD[0].new_empty(tokens * batch * sum(widths))
    blocks = _split_blocks(send, tokens * batch, widths)
    blocks_LBW = [block.view(tokens, batch, w) for block, w in zip(blocks, widths, strict=True)]
    equal_rows = len(set(widths)) == 1
    cols = [0] * len(widths)  # the next tensor's first column in each rank's rows
    for t, x_BLHD in enumerate(xs_BLHD):
        d = x_BLHD.shape[3]
        r = _ranks_per_head(spans, t, x_BLHD.shape[2]) if equal_rows else 0
        if r and len(set(cols)) == 1:  # the regular case: one copy for all ranks
            h = spans[0][t][1]
            send_GRLBW = send.view(-1, r, tokens, batch, widths[0])
            into_GRLBhD = send_GRLBW[..., cols[0] : cols[0] + h * d].unflatten(4, (h, d))
            x_GLBhD = x_BLHD.unflatten(2, (-1, h)).permute(2, 1, 0, 3, 4)
            into_GRLBhD.copy_(x_GLBhD.unsqueeze(1).expand_as(into_GRLBhD))
        else:
            for p, row in enumerate(spans):
                start, stop = row[t]
                if stop > start:
                    into_LBW = blocks_LBW[p][..., cols[p] : cols[p] + (stop - start) * d]
                    into_LBW.unflatten(2, (stop - start, d)).copy_(x_BLHD[:, :, start:stop].transpose(0, 1))
        cols = [c + (row[t][1] - row[t][0]) * d for c, row in zip(cols, spans, strict=True)]
    return send


@_scatter_op.register_fake
def _(xs_BLHD: list[Tensor], flat_spans: list[int], size: int, rank: int, group: str, wire_dtype: str) -> Tensor:
    width = _widths(_head_spans(flat_spans, len(xs_BLHD)), [x.shape[3] for x in xs_BLHD])[rank]
    return xs_BLHD[0].new_empty(size * xs_BLHD[0].shape[1], xs_BLHD[0].shape[0], width)


@torch.library.custom_op("longspan::gather_heads", mutates_args=())
def _gather_op(
    x_SBW: Tensor,
    heads: list[int],
    dims: list[int],
    flat_spans: list[int],
    size: int,
    rank: int,
    group: str,
    wire_dtype: str,
) -> list[Tensor]:
    spans = _head_spans(flat_spans, len(heads))
    tokens, batch = x_SBW.shape[0] // size, x_SBW.shape[1]
    wire = _WireFormat(tokens * batch, spans, dims, rank, wire_dtype, gathers=True)
    send = wire.encode(x_SBW.contiguous().view(-1))  # no copy if the tokens come first
    recv = _all_to_all(send, *wire.splits, find_group(group))
    del send  # free it before the received buffer is copied
    recv = wire.decode(recv, x_SBW.dtype)
    return _unpack(recv, tokens, batch, heads, dims, spans)


def _unpack(
    recv: Tensor, tokens: int, batch: int, heads: list[int], dims: list[int], spans: _HeadSpans
) -> list[Tensor]:
    """Mirror `_pack`: every element is copied once; the parts of a replicated head are summed, in fp32 at least."""
    widths = _widths(spans, dims)
    blocks = _split_blocks(recv, tokens * batch, widths)
    blocks_LBW = [block.view(tokens, batch, w) for block, w in zip(blocks, widths, strict=True)]
    equal_rows = len(set(widths)) == 1
    cols = [0] * len(widths)
    outs_BLHD = []
    for t, (H, d) in enumerate(zip(heads, dims, strict=True)):
        r = _ranks_per_head(spans, t, H) if equal_rows else 0
        if r and len(set(cols)) == 1:
            h = spans[0][t][1]
            recv_GRLBW = recv.view(-1, r, tokens, batch, widths[0])
            part_GRLBhD = recv_GRLBW[..., cols[0] : cols[0] + h * d].unflatten(4, (h, d))
            out_BLHD = recv.new_empty(batch, tokens, H, d)
            into_GLBhD = out_BLHD.unflatten(2, (-1, h)).permute(2, 1, 0, 3, 4)
            into_GLBhD.copy_(part_GRLBhD[:, 0] if r == 1 else part_GRLBhD.sum(1))
        else:
            out_BLHD = _sum_spans(blocks_LBW, [row[t] for row in spans], cols, H, d)
        outs_BLHD.append(out_BLHD)
        cols = [c + (row[t][1] - row[t][0]) * d for c, row in zip(cols, spans, strict=True)]
    return outs_BLHD


def _sum_spans(blocks_LBW: list[Tensor], spans: list[Span], cols: list[int], heads: int, d: int) -> Tensor:
    """Write every rank's span of heads into one `[B, L, H, D]`, adding spans that overlap."""
    tokens, batch = blocks_LBW[0].shape[:2]
    overlap = any(a[1] > b[0] for a, b in itertools.pairwise(spans))
    dtype = torch.promote_types(blocks_LBW[0].dtype, torch.float32) if overlap else blocks_LBW[0].dtype
    out_BLHD = blocks_LBW[0].new_zeros(batch, tokens, heads, d, dtype=dtype)
    for block_LBW, col, (start, stop) in zip(blocks_LBW, cols, spans, strict=True):
        if stop > start:
            part_LBhD = block_LBW[..., col : col + (stop - start) * d].unflatten(2, (stop - start, d))
            out_BLHD[:, :, start:stop] += part_LBhD.transpose(0, 1)
    return out_BLHD.to(blocks_LBW[0].dtype)


@_gather_op.register_fake
def _(
    x_SBW: Tensor,
    heads: list[int],
    dims: list[int],
    flat_spans: list[int],
    size: int,
    rank: int,
    group: str,
    wire_dtype: str,
) -> list[Tensor]:
    return [x_SBW.new_empty(x_SBW.shape[1], x_SBW.shape[0] // size, h, d) for h, d in zip(heads, dims, strict=True)]


def _scatter_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    xs_BLHD, ctx.flat_spans, ctx.size, ctx.rank, ctx.group, ctx.wire_dtype = inputs
    ctx.heads, ctx.dims = [x.shape[2] for x in xs_BLHD], [x.shape[3] for x in xs_BLHD]


def _scatter_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    grads = torch.ops.longspan.gather_heads(
        grad, ctx.heads, ctx.dims, ctx.flat_spans, ctx.size, ctx.rank, ctx.group, ctx.wire_dtype
    )
    return grads, None, None, None, None, None


def _gather_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x_SBW, _, _, ctx.flat_spans, ctx.size, ctx.rank, ctx.group, ctx.wire_dtype = inputs
    ctx.shape = x_SBW.shape[2:]


def _gather_backward(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    grad = torch.ops.longspan.scatter_heads(grads, ctx.flat_spans, ctx.size, ctx.rank, ctx.group, ctx.wire_dtype)
    return grad.unflatten(2, ctx.shape), None, None, None, None, None, None, None


_scatter_op.register_autograd(_scatter_backward, setup_context=_scatter_setup)
_gather_op.register_autograd(_gather_backward, setup_context=_gather_setup)
