"""Gather tokens from the ranks that hold them to every rank of the group; each rank's own loss gives their gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from longspan.compat.torch_api import gather_into

if TYPE_CHECKING:
    from collections.abc import Sequence

    from longspan.comm.mesh import SequenceSharding
    from longspan.hf.batch import SequenceInfo


def gather_tokens(x_BL: Tensor, sp: SequenceSharding, info: SequenceInfo) -> Tensor:
    """Return `[B, n, ...]` of all tokens; my tokens get the gradient of this rank's loss alone."""
    return _Gathered.apply(x_BL, sp, info.length)  # type: ignore[no-untyped-call, no-any-return]


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BL: Tensor, sp: SequenceSharding, length: int) -> Tensor:
        ctx.sp = sp
        return sp.gather(x_BL, dim=1, length=length)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.sp.shard(grads[0].contiguous(), dim=1), None, None


class SelectedTokens:
    """Gather selected tokens of the sequence.

    Args:
        tokens: their positions in the sequence.
        length: of the sequence.
        sp: the sharding, its layout that of the sequence.
    """

    def __init__(self, tokens: Sequence[int], length: int, sp: SequenceSharding) -> None:
        spans = [(rank, span) for rank in range(sp.size) for span in sp.layout.padded_spans(length, rank)]
        held = list[list[int]]([] for _ in range(sp.size))  # by rank: local indices of its selected tokens
        at = list[tuple[int, int]]()  # by token: its rank, and its number among that rank's selected tokens
        for token in tokens:
            rank, (start, _) = next((r, span) for r, span in spans if span[0] <= token < span[1])
            before = sum(b - a for r, (a, b) in spans if r == rank and b <= start)
            at.append((rank, len(held[rank])))
            held[rank].append(before + token - start)
        self.sp, self.mine, self.most = sp, held[sp.rank], max(map(len, held))
        self.at = [rank * self.most + number for rank, number in at]  # among what all ranks have selected
        self.from_me = [(i, number) for i, (rank, number) in enumerate(at) if rank == sp.rank]

    def select(self, x_BL: Tensor) -> Tensor:
        """Return the selected ones among my tokens, padded to the same number on every rank: `[B, most, ...]`."""
        return x_BL[:, self.mine + [0] * (self.most - len(self.mine))]

    def join(self, x_Bm: Tensor) -> Tensor:
        """Return the selected tokens of all ranks, in order; my tokens get the gradient of this rank's loss alone."""
        return _Joined.apply(x_Bm, self)  # type: ignore[no-untyped-call, no-any-return]

    def gather(self, x_BL: Tensor) -> Tensor:
        return self.join(self.select(x_BL))


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_Bm: Tensor, selected: SelectedTokens) -> Tensor:
        ctx.selected, ctx.shape = selected, x_Bm.shape
        every = x_Bm[None]
        if selected.sp.size > 1:
            mine = x_Bm.contiguous()
            every = mine.new_empty(selected.sp.size, *mine.shape)
            assert selected.sp.group is not None
            gather_into(every.view(-1), mine.view(-1), group=selected.sp.group)
        return every.movedim(0, 1).flatten(1, 2)[:, selected.at]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        selected: SelectedTokens = ctx.selected
        grad = grads[0].new_zeros(ctx.shape)
        if selected.from_me:
            positions, numbers = map(list, zip(*selected.from_me, strict=True))
            grad[:, numbers] = grads[0][:, positions]
        return grad, None
