"""Short causal convolutions over a sharded sequence: the last `kernel - 1` tokens of the run before, by one all-gather.

If a run is shorter than the kernel, the tokens before the next run come from several runs. One index, computed once per
batch, selects them.

Shape suffixes: B batch, T tokens, C channels, J slots, X = kernel - 1 tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from longspan.comm.arguments import check_tensor, describe
from longspan.comm.collectives import all_gather
from longspan.comm.mesh import group_name
from longspan.compat.torch_api import not_compiled
from longspan.core.errors import LongspanError
from longspan.mixers.fragments import Fragment, FragmentTable, fragment_table, read_documents
from longspan.mixers.state_passing import depend, zero_of

if TYPE_CHECKING:
    from longspan.comm.mesh import SequenceSharding


def short_conv(
    x: Tensor,
    weight: Tensor,
    sp: SequenceSharding,
    bias: Tensor | None = None,
    length: int | None = None,
    documents: Tensor | None = None,
) -> Tensor:
    """Convolve each channel with its own kernel, causally and within documents, as `torch.conv1d` does.

    Convolve q, k and v as channels of one tensor: that is one message, and the backward's collectives have one order.

    Args:
        x: local tokens, `[batch, tokens, channels]`.
        weight: `[channels, kernel]`, equal on every rank; its gradient, and that of `bias`, is this rank's part.
        sp: the sharding.
        bias: `[channels]`.
        length, documents: as for `longspan.linear_attention`.

    Returns:
        `[batch, tokens, channels]`, zero outside of documents.

    Raises:
        LongspanError: for tensors that do not fit, equally on every rank.
    """
    check_tensor("x", x, 3)
    check_tensor("weight", weight, 2)
    if weight.shape[0] != x.shape[2] or not weight.shape[1] or (bias is not None and bias.shape != x.shape[2:]):
        raise LongspanError(
            f"a convolution of {x.shape[2]} channels needs `weight` [channels, kernel] and `bias` [channels] or None, "
            f"got {tuple(weight.shape)} and {describe(bias)}"
        )
    length, segments = read_documents(x, sp, length, documents)
    table = fragment_table(sp.layout, sp.rank, length, x.shape[0], segments)

    size = weight.shape[1] - 1

    def convolve(x_BCT: Tensor) -> Tensor:
        return F.conv1d(x_BCT, weight.unsqueeze(1), bias, padding=size, groups=x.shape[2])[..., : x_BCT.shape[2]]

    return run_short_conv(convolve, size, x, table, sp.group if sp.size > 1 else None)[0]


@not_compiled
def run_short_conv(
    convolve: Callable[[Tensor], Tensor],
    size: int,
    x: Tensor,
    table: FragmentTable,
    group: dist.ProcessGroup | None,
    *,
    initial: Tensor | None = None,
    return_last: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Run a convolution on my tokens, fragment by fragment. A compiler runs it as it is.

    Args:
        convolve: a causal convolution of `[rows, channels, tokens]`, of the same shape, with zeros before the first.
        size: earlier tokens that a token reads.
        x: local tokens, `[batch, tokens, channels]`.
        table: their fragments.
        group: the sequence group; None for one rank.
        initial: `[batch, size, channels]`, the tokens before the first document of every row, equal on every rank.
        return_last: whether to return the last tokens of every row, `initial` included.

    Returns:
        The output, zero outside of documents, and the last tokens `[batch, size, channels]` or None.
    """
    before, last, link = list[Tensor](), None, None
    if size and (group is not None or return_last):
        before, last, link = _tokens_before(x, size, table, group, initial, return_last)
    elif return_last:
        last = x[:, :0]

    def of_fragment(rows: slice, f: Fragment) -> Tensor:
        part, earlier = x[rows, f.start : f.stop].mT, before[f.slot][rows] if f.enters and size else None
        if f.first and initial is not None and size:
            earlier = initial[rows]
        # Contiguous, like the gradient of a sliced output: torch takes 1.5 times as long for transposed ones.
        part = F.pad(part, (size, 0)) if earlier is None else torch.cat([earlier.mT, part], 2)
        return convolve(part)[..., size:].mT

    outs = [[of_fragment(rows, f) for f in fragments] for rows, fragments in table.groups]
    # A rank with padding only connects x and the weights.
    out = table.join(outs) if any(outs) else zero_of(x, convolve(x.new_zeros(1, x.shape[2], 1))) + torch.zeros_like(x)
    entered = any(f.enters for _, fragments in table.groups for f in fragments)
    return out if entered or link is None else depend(out, link), last


def _tokens_before(
    x: Tensor,
    size: int,
    table: FragmentTable,
    group: dist.ProcessGroup | None,
    initial: Tensor | None,
    return_last: bool,
) -> tuple[list[Tensor], Tensor | None, Tensor]:
    """Return the `size` tokens before each of my runs, the last ones of all or None, and a zero that depends on what
    came.
    """
    empty = x.new_zeros(x.shape[0], size, x.shape[2])

    def tail(rows: slice, f: Fragment) -> Tensor:
        part = x[rows, max(f.start, f.stop - size) : f.stop]
        if f.first and initial is not None:
            return torch.cat([initial[rows], part], 1)[:, -size:]
        return F.pad(part, (0, 0, size - part.shape[1], 0))

    tails = {(f.slot, rows.start): tail(rows, f) for rows, fragments in table.groups for f in fragments if f.last}
    gathered = table.stack_slots(tails, empty)
    if not gathered.requires_grad:
        gathered = gathered + zero_of(x)
    if group is not None:
        gathered = all_gather(gathered, group_name(group))

    if return_last:
        gathered = torch.cat([gathered, (empty if initial is None else initial).unsqueeze(0)])
    places = _places(table, size, return_last, x.device)
    before = list(gathered.flatten(0, 2).index_select(0, places.flatten()).view(*places.shape, x.shape[2]))
    last = before.pop() if return_last else None
    return before, last, gathered[:0].sum()


@functools.lru_cache(maxsize=16)
def _places(table: FragmentTable, size: int, last: bool, device: torch.device) -> Tensor:
    """Return the places of the `size` tokens before each of my runs, and with `last` of the row's last tokens.

    The result is `[slots, batch, size]`, or with `last` `[slots + 1, batch, size]`. Places are indices into the tails
    of all runs, followed by the tokens before the first document: `[ranks * slots + 1, batch, size]`. A token that a
    run does not read has an arbitrary place.
    """
    batch = len(table.filled[0])
    after_all = len(table.runs)

    def row_before(run: int, row: int, reaching: range) -> list[int]:
        found: list[int] = []
        for other in reversed(reaching):
            # A run may be shorter than what is missing: runs before it have the rest. The first run's tail is padded.
            missing = size - len(found)
            tokens = missing if other == reaching.start else min(table.sizes[other][row], missing)
            end = (table.place(other) * batch + row + 1) * size
            found[:0] = range(end - tokens, end)
        start = (len(table.runs) * batch + row) * size if run == after_all else 0
        return found or list(range(start, start + size))

    runs = [*table.mine, after_all] if last else table.mine
    places = [[row_before(run, row, reaching) for row, reaching in enumerate(table.earlier(run))] for run in runs]
    return torch.tensor(places, device=device)
