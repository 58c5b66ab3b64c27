"""Outputs without logits, which say so when read, and the exchange of selected or all tokens between ranks."""

from __future__ import annotations

import functools
import sys
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from longspan.comm.gather import gather_into
from longspan.losses.deferred_logits import LOGITS_HINT, DeferredLogits, Head, LogitsNotMade

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

    from longspan.comm.mesh import SequenceSharding
    from longspan.core.layout import Layout


def head_of(model: PreTrainedModel) -> Head | None:
    """Return the model's head, ready to be deferred; None if it has none, or its bias is added outside it (ESM)."""
    module = model.get_output_embeddings()
    parents = [m for m in model.modules() if any(child is module for child in m.children())]
    biases = [bias for parent in parents if isinstance(bias := getattr(parent, "bias", None), nn.Parameter)]
    outside = any(bias is not getattr(module, "bias", None) for bias in biases)
    return None if module is None or outside else Head(module)


def without_deferred(output: Any) -> Any:
    """Return a model's output without `DeferredLogits`."""
    if isinstance(output, ModelOutput):
        if not isinstance(output.get("logits"), DeferredLogits):
            return output
        entries = {name: value for name, value in output.items() if name != "logits"}
        kind: Any = type(output)
        return _without_logits(kind)(**entries)
    if isinstance(output, tuple):
        return tuple(value for value in output if not isinstance(value, DeferredLogits))
    return output


@functools.cache
def _without_logits(kind: Any) -> Any:
    """Return a subclass of an output whose `logits` is None and warns why."""

    def read(_: Any) -> None:
        asking = sys._getframe(1).f_globals.get("__name__", "")
        if asking.partition(".")[0] not in ("torch", "transformers"):  # FSDP reads every entry of an output
            warnings.warn(f"logits is None: {LOGITS_HINT}", stacklevel=2)

    def item(self: Any, key: Any) -> Any:
        if key == "logits":
            raise LogitsNotMade(f"this output has no logits: {LOGITS_HINT}")
        try:
            return kind.__getitem__(self, key)
        except IndexError as error:
            raise LogitsNotMade(f"this output has no entry {key}, as it has no logits: {LOGITS_HINT}") from error

    logits = property(read, lambda self, value: None)
    return type(kind.__name__, (kind,), {"logits": logits, "__getitem__": item, "__module__": kind.__module__})


class PickedTokens:
    """Gather selected tokens of the sequence from the ranks that hold them to every rank of the group.

    Args:
        tokens: their positions in the sequence.
        length: of the sequence.
        sp: the sharding, its layout that of the sequence.
    """

    def __init__(self, tokens: Sequence[int], length: int, sp: SequenceSharding) -> None:
        spans = [(rank, span) for rank in range(sp.size) for span in sp.layout.padded_spans(length, rank)]
        held = list[list[int]]([] for _ in range(sp.size))  # by rank: local indices of its picked tokens
        at = list[tuple[int, int]]()  # by token: its rank, and its number among that rank's picked tokens
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
        """Select my tokens, and join those of all ranks."""
        return self.join(self.select(x_BL))


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_Bm: Tensor, picked: PickedTokens) -> Tensor:
        ctx.picked, ctx.shape = picked, x_Bm.shape
        every = x_Bm[None]
        if picked.sp.size > 1:
            mine = x_Bm.contiguous()
            every = mine.new_empty(picked.sp.size, *mine.shape)
            assert picked.sp.group is not None
            gather_into(every.view(-1), mine.view(-1), group=picked.sp.group)
        return every.movedim(0, 1).flatten(1, 2)[:, picked.at]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        picked: PickedTokens = ctx.picked
        grad = grads[0].new_zeros(ctx.shape)
        if picked.from_me:
            places, numbers = map(list, zip(*picked.from_me, strict=True))
            grad[:, numbers] = grads[0][:, places]
        return grad, None


class Gathered(torch.autograd.Function):
    """Gather all tokens on every rank; the gradient of my tokens is that of this rank's own loss."""

    @staticmethod
    def forward(ctx: Any, x_BL: Tensor, sp: SequenceSharding, layout: Layout, length: int) -> Tensor:
        placed = sp.with_layout(layout)
        ctx.placed = placed
        return placed.gather(x_BL, dim=1, length=length)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.placed.shard(grads[0].contiguous(), dim=1), None, None, None
