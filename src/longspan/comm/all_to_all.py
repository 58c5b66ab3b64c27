"""The Ulysses all-to-all: swap "local tokens, all heads" for "all tokens, local heads", and back.

DeepSpeed-Ulysses (Jacobs et al. 2023, arXiv:2309.14509, section 3.1). Two operators do all of it:

    longspan::scatter_heads   [B, L, H, D] x several tensors  ->  [S, B, W]    W: local heads of all tensors, packed
    longspan::gather_heads    [S, B, W]                       ->  [B, L, H, D] x several tensors

Each is the other's adjoint and is registered as its gradient; if no head is sent to two ranks, the adjoint is also the
inverse. They are custom operators, not autograd Functions: `torch.compile` may inline a Function whose body fills a
buffer by a collective, and then returns zero gradients silently.

On the wire the sequence comes first. A block from rank r is then a run of rows, and the blocks of all ranks in order
are the whole sequence. So scattering copies when it packs and not when it receives; gathering mirrors it.

Gradients of a replicated head are summed in fp32.

Shape suffixes: S tokens of the sequence, L = S/P tokens of a rank, B batch, H heads, h heads of one rank, D elements of
a head, W packed row, P ranks, G equal parts of a tensor's heads, R ranks that hold the same part.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.comm.mesh import find_group, group_name
from longspan.core.layout import Span
from longspan.ranks.watch import waiting

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from longspan.core.heads import HeadShard

Runs = tuple[tuple[int, int], ...]
"""Content of a packed row: (heads, elements of a head) of each tensor."""

HeadSpans = tuple[tuple[Span, ...], ...]
"""`spans[rank][tensor]`: the heads of each tensor that a rank holds. Operators take it as a flat list of integers."""


# ---------------------------------------------------------------------------------------------------------------------
# Attention's all-to-alls, differentiable.


def scatter_heads(
    xs_BLHD: Sequence[Tensor],
    kinds: Sequence[str],
    shards: Sequence[HeadShard],
    group: dist.ProcessGroup,
) -> Tensor:
    """Send the heads of q, k and v of the local tokens to their ranks, in one all-to-all.

    Args:
        xs_BLHD: tensors of the same tokens, each with its own number of heads and head_dim.
        kinds: for each tensor "q" or "kv": whether it has query heads or KV heads.
        shards: the heads of each rank of `group`. A KV head in two shards is sent twice, and its gradient is the sum
            of what the two ranks return.
        group: the ranks of the Ulysses axis.

    Returns:
        `[S, B, W]`: for every token of the sequence the local heads of the first tensor, then those of the second, ...
    """
    spans = head_spans(shards, kinds)
    out_SBW: Tensor = torch.ops.longspan.scatter_heads(list(xs_BLHD), _flatten(spans), group_name(group))
    return out_SBW


def gather_heads(out_BShD: Tensor, shards: Sequence[HeadShard], group: dist.ProcessGroup) -> Tensor:
    """Send the attention output of the local heads back to the tokens' ranks, in one all-to-all: `[B, L, H, D]`."""
    heads, dims, spans = [shards[-1].q_stop], [out_BShD.shape[3]], head_spans(shards, ["q"])
    outs: list[Tensor] = torch.ops.longspan.gather_heads(
        out_BShD.transpose(0, 1), heads, dims, _flatten(spans), group_name(group)
    )
    return outs[0]


def head_spans(shards: Sequence[HeadShard], kinds: Sequence[str]) -> HeadSpans:
    """Return the heads of each rank and tensor; `kinds` says of each tensor whether it has "q" or "kv" heads."""
    of_kind = {"q": [(s.q_start, s.q_stop) for s in shards], "kv": [(s.kv_start, s.kv_stop) for s in shards]}
    return tuple(zip(*(of_kind[kind] for kind in kinds), strict=True))


def _flatten(spans: HeadSpans) -> list[int]:
    return [end for of_rank in spans for span in of_rank for end in span]


@functools.lru_cache(maxsize=256)
def _unflatten(flat_spans: tuple[int, ...], tensors: int) -> HeadSpans:
    spans = tuple(zip(flat_spans[::2], flat_spans[1::2], strict=True))
    return tuple(spans[i : i + tensors] for i in range(0, len(spans), tensors))


# ---------------------------------------------------------------------------------------------------------------------
# The same, started and waited for, outside of autograd.


class AllToAll:
    """An all-to-all of packed rows. Making one starts it; it holds both buffers until `wait`.

    Args:
        packed: rows for the first rank, then rows for the second, ...
        rows: rows for each rank: batch x local tokens.
        sent: content of a row for each rank.
        received: content of a row from each rank.
        group: the ranks.
        overlapped: whether it stays in flight until `wait`; otherwise it completes at once.
        finish: makes the result from the flat buffer of received rows.
    """

    def __init__(
        self,
        packed: Tensor,
        rows: int,
        sent: Sequence[Runs],
        received: Sequence[Runs],
        group: dist.ProcessGroup,
        *,
        overlapped: bool,
        finish: Callable[[Tensor], Tensor],
    ) -> None:
        send_splits, recv_splits = ([rows * _row_width(runs) for runs in of] for of in (sent, received))
        recv = packed.new_empty(sum(recv_splits))
        if len({*send_splits, *recv_splits}) == 1:
            send_splits = recv_splits = None  # type: ignore[assignment]
        self._work = dist.all_to_all_single(recv, packed, recv_splits, send_splits, group=group, async_op=overlapped)
        self._buffers: tuple[Tensor, ...] | None = (recv, packed) if overlapped else (recv,)
        self._finish = finish

    def wait(self) -> Tensor:
        """Return the result, once. On a GPU the stream waits, not the host."""
        assert self._buffers is not None
        recv, *_ = self._buffers
        if self._work is not None:
            with waiting():
                self._work.wait()
        self._buffers = self._work = None
        return self._finish(recv)


def start_scatter(
    xs_BLHD: Sequence[Tensor], spans: HeadSpans, group: dist.ProcessGroup, *, overlapped: bool
) -> AllToAll:
    """Start `scatter_heads`; `wait` returns its result."""
    batch, tokens = xs_BLHD[0].shape[:2]
    rows, size = batch * tokens, group.size()
    sent = _row_contents(spans, tuple(x.shape[3] for x in xs_BLHD))
    received = [sent[group.rank()]] * size
    local_width = _row_width(received[0])

    def as_sequence(recv: Tensor) -> Tensor:
        return recv.view(size * tokens, batch, local_width)

    packed = _pack(xs_BLHD, spans, rows * sum(map(_row_width, sent)))
    return AllToAll(packed, rows, sent, received, group, overlapped=overlapped, finish=as_sequence)


def start_gather(
    packed_SBW: Tensor,
    dims: Sequence[int],
    spans: HeadSpans,
    group: dist.ProcessGroup,
    *,
    overlapped: bool,
    finish: Callable[[Tensor], Tensor] = lambda recv: recv,
) -> AllToAll:
    """Start to send heads, packed as `start_scatter` returns them, back to the tokens' ranks.

    `dims` are the head_dims D of the tensors. `wait` returns what `finish` makes of the received buffer, which
    `write_heads` takes.
    """
    received = _row_contents(spans, tuple(dims))
    sent = [received[group.rank()]] * group.size()
    rows = packed_SBW.shape[0] // group.size() * packed_SBW.shape[1]
    packed = packed_SBW.contiguous().view(-1)  # no copy if the tokens come first; else it is freed before `finish`
    return AllToAll(packed, rows, sent, received, group, overlapped=overlapped, finish=finish)


# ---------------------------------------------------------------------------------------------------------------------
# Packing: a buffer of rows `[L, B, W]` for (or from) each rank.


@functools.lru_cache(maxsize=256)
def _row_contents(spans: HeadSpans, dims: tuple[int, ...]) -> tuple[Runs, ...]:
    """Return the content of each rank's row: heads and head_dim of each tensor."""
    return tuple(tuple((stop - start, d) for (start, stop), d in zip(of_rank, dims, strict=True)) for of_rank in spans)


def _row_width(runs: Runs) -> int:
    return sum(heads * d for heads, d in runs)


def _split_rows(packed: Tensor, spans: HeadSpans, xs_BLHD: Sequence[Tensor]) -> list[list[Tensor]]:
    """View a packed buffer as the heads `[B, L, h, D]` of each rank and tensor; `xs_BLHD` have the tensors' shapes."""
    batch, tokens = xs_BLHD[0].shape[:2]
    contents = _row_contents(spans, tuple(x.shape[3] for x in xs_BLHD))
    blocks = packed.split([tokens * batch * _row_width(runs) for runs in contents])
    views = []
    for block, runs in zip(blocks, contents, strict=True):
        parts_LBW = block.view(tokens, batch, _row_width(runs)).split([h * d for h, d in runs], 2)
        views.append([part.unflatten(2, run).transpose(0, 1) for part, run in zip(parts_LBW, runs, strict=True)])
    return views


def _pair_parts(packed: Tensor, spans: HeadSpans, xs_BLHD: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]] | None:
    """View a packed buffer as `[G, R, L, B, h, D]` of each tensor, and the tensor as `[G, L, B, h, D]`.

    So one copy serves all ranks: with 2 KV heads over 4 ranks, G = 2 and R = 2. None unless each tensor is cut into G
    equal parts, and R neighbouring ranks hold the heads of each (or the same chunk of each).
    """
    cuts = _regular_cuts(spans, tuple(x.shape[2] for x in xs_BLHD))
    if cuts is None:
        return None
    batch, tokens = xs_BLHD[0].shape[:2]
    widths = [cut.heads * x.shape[3] for cut, x in zip(cuts, xs_BLHD, strict=True)]
    parts_PLBW = packed.view(len(spans), tokens, batch, -1).split(widths, 3)
    return [
        (
            part_PLBW.unflatten(3, (cut.heads, x_BLHD.shape[3])).unflatten(0, (cut.parts, cut.copies)),
            x_BLHD.unflatten(2, (cut.parts, cut.step))[:, :, :, cut.first : cut.first + cut.heads].permute(
                2, 1, 0, 3, 4
            ),
        )
        for part_PLBW, cut, x_BLHD in zip(parts_PLBW, cuts, xs_BLHD, strict=True)
    ]


class _RegularCut(NamedTuple):
    """How the heads of a tensor are cut into equal parts."""

    parts: int
    copies: int  # neighbouring ranks that hold the same part
    heads: int  # heads of its part that a rank holds
    first: int  # the first of them, counted within the part
    step: int  # all heads of a part


@functools.lru_cache(maxsize=256)
def _regular_cuts(spans: HeadSpans, heads: tuple[int, ...]) -> tuple[_RegularCut, ...] | None:
    """Return the cut of each tensor, of `heads` heads; None if one is not cut into equal parts."""
    cuts = []
    for total, of_tensor in zip(heads, zip(*spans, strict=True), strict=True):
        (start, stop), copies = of_tensor[0], of_tensor.count(of_tensor[0])
        parts = len(spans) // copies
        step = total // parts
        expected = ((i // copies * step + start, i // copies * step + stop) for i in range(len(spans)))
        if start == stop or stop > step or step * parts != total or of_tensor != tuple(expected):
            return None
        cuts.append(_RegularCut(parts, copies, stop - start, start, step))
    return tuple(cuts)


def copy_wide(into: Tensor, x: Tensor) -> None:
    """Copy in elements of 16 or 8 bytes where strides allow it: a GPU thread copies one element of a strided tensor."""
    divisor, itemsize = math.gcd(_alignment(into), _alignment(x)), x.dtype.itemsize
    for wide in (torch.complex128, torch.int64):
        if itemsize < wide.itemsize and divisor * itemsize % wide.itemsize == 0:
            into, x = into.view(wide), x.view(wide)
            break
    into.copy_(x)


def _alignment(x: Tensor) -> int:
    """Return a divisor of the storage offset, the last dim and all strides: so many elements can be viewed as one."""
    *strides, last = x.stride()
    return math.gcd(x.storage_offset(), x.shape[-1], *strides) if last == 1 else 1


def _pack(xs_BLHD: Sequence[Tensor], spans: HeadSpans, elements: int) -> Tensor:
    """Copy the heads of each rank into one send buffer, rank after rank. Every element is copied once."""
    send = xs_BLHD[0].new_empty(elements)
    pairs = _pair_parts(send, spans, xs_BLHD)
    if pairs is not None:
        for part_GRLBhD, x_GLBhD in pairs:
            copy_wide(part_GRLBhD, x_GLBhD.unsqueeze(1))
        return send
    for parts_BLhD, of_rank in zip(_split_rows(send, spans, xs_BLHD), spans, strict=True):
        for part_BLhD, x_BLHD, (start, stop) in zip(parts_BLhD, xs_BLHD, of_rank, strict=True):
            copy_wide(part_BLhD, x_BLHD[:, :, start:stop])
    return send


def _unpack(recv: Tensor, spans: HeadSpans, outs_BLHD: list[Tensor]) -> list[Tensor]:
    """Mirror `_pack` into `outs_BLHD`: the parts of a replicated head are summed, in fp32 or wider."""
    pairs = _pair_parts(recv, spans, outs_BLHD)
    if pairs is not None:
        for part_GRLBhD, out_GLBhD in pairs:  # regular cuts; torch sums half precision in fp32 and rounds once
            copy_wide(out_GLBhD, part_GRLBhD[:, 0] if part_GRLBhD.shape[1] == 1 else part_GRLBhD.sum(1))
        return outs_BLHD
    wide = torch.promote_types(recv.dtype, torch.float32)
    replicated = [any(a[1] > b[0] for a, b in itertools.pairwise(of_tensor)) for of_tensor in zip(*spans, strict=True)]
    sums = [torch.zeros_like(out, dtype=wide) if adds else out for out, adds in zip(outs_BLHD, replicated, strict=True)]
    write_heads(recv, sums, spans, replicated)
    return [x.to(recv.dtype) for x in sums]


def write_heads(recv: Tensor, outs_BLHD: Sequence[Tensor], spans: HeadSpans, adds: Sequence[bool]) -> None:
    """Write, or for some tensors add, every rank's heads to `outs_BLHD`; heads that no rank has stay as they are."""
    pairs = _pair_parts(recv, spans, outs_BLHD)
    if pairs is not None:
        for (part_GRLBhD, out_GLBhD), add in zip(pairs, adds, strict=True):
            for part_GLBhD in part_GRLBhD.unbind(1):  # one after the other: rounded as rank by rank
                out_GLBhD.add_(part_GLBhD) if add else copy_wide(out_GLBhD, part_GLBhD)
        return
    for parts_BLhD, of_rank in zip(_split_rows(recv, spans, outs_BLHD), spans, strict=True):
        for part_BLhD, out_BLHD, (start, stop), add in zip(parts_BLhD, outs_BLHD, of_rank, adds, strict=True):
            into_BLhD = out_BLHD[:, :, start:stop]
            into_BLhD.add_(part_BLhD) if add else copy_wide(into_BLhD, part_BLhD)


# ---------------------------------------------------------------------------------------------------------------------
# The operators: pack, all-to-all; all-to-all, unpack.


@torch.library.custom_op("longspan::scatter_heads", mutates_args=())
def _scatter_op(xs_BLHD: list[Tensor], flat_spans: list[int], group: str) -> Tensor:
    spans = _unflatten(tuple(flat_spans), len(xs_BLHD))
    return start_scatter(xs_BLHD, spans, find_group(group), overlapped=False).wait()


@_scatter_op.register_fake
def _(xs_BLHD: list[Tensor], flat_spans: list[int], group: str) -> Tensor:
    ranks, (batch, tokens) = find_group(group), xs_BLHD[0].shape[:2]
    local = _unflatten(tuple(flat_spans), len(xs_BLHD))[ranks.rank()]
    width = sum((stop - start) * x.shape[3] for (start, stop), x in zip(local, xs_BLHD, strict=True))
    return xs_BLHD[0].new_empty(ranks.size() * tokens, batch, width)


@torch.library.custom_op("longspan::gather_heads", mutates_args=())
def _gather_op(x_SBW: Tensor, heads: list[int], dims: list[int], flat_spans: list[int], group: str) -> list[Tensor]:
    spans, ranks = _unflatten(tuple(flat_spans), len(heads)), find_group(group)
    recv = start_gather(x_SBW, dims, spans, ranks, overlapped=False).wait()
    return _unpack(recv, spans, _new_outputs(x_SBW, heads, dims, ranks.size()))


@_gather_op.register_fake
def _(x_SBW: Tensor, heads: list[int], dims: list[int], flat_spans: list[int], group: str) -> list[Tensor]:
    return _new_outputs(x_SBW, heads, dims, find_group(group).size())


def _new_outputs(x_SBW: Tensor, heads: list[int], dims: list[int], size: int) -> list[Tensor]:
    tokens, batch = x_SBW.shape[0] // size, x_SBW.shape[1]
    return [x_SBW.new_empty(batch, tokens, H, d) for H, d in zip(heads, dims, strict=True)]


def _scatter_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    xs_BLHD, *ctx.rest = inputs
    ctx.heads, ctx.dims = [x.shape[2] for x in xs_BLHD], [x.shape[3] for x in xs_BLHD]


def _scatter_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return torch.ops.longspan.gather_heads(grad, ctx.heads, ctx.dims, *ctx.rest), None, None


def _gather_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x_SBW, _, _, *ctx.rest = inputs
    ctx.shape = x_SBW.shape[2:]  # heads and head_dim, or both in one dimension


def _gather_backward(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    grad_SBW = torch.ops.longspan.scatter_heads(grads, *ctx.rest)
    return grad_SBW.unflatten(2, ctx.shape), None, None, None, None


_scatter_op.register_autograd(_scatter_backward, setup_context=_scatter_setup)
_gather_op.register_autograd(_gather_backward, setup_context=_gather_setup)
