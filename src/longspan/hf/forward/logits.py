"""The stages that decide which logits a forward computes.

A training forward with labels computes no logits: its head returns `longspan.losses.deferred_logits.DeferredLogits`,
from which the loss computes logits and gradients tile by tile. `SelectedTokens` gathers those of selected tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from longspan.comm.collectives import all_gather
from longspan.comm.mesh import SequenceSharding, group_name
from longspan.compat.transformers_api import reads
from longspan.core.errors import LongspanError
from longspan.core.validation import format_value
from longspan.hf.forward.stage import ForwardCall, Stage
from longspan.losses.deferred_logits import DeferredLogits, Head


def head_of(model: PreTrainedModel) -> Head | None:
    """Return the model's head, ready to be deferred; None if it has none, or its bias is added outside it (ESM)."""
    module = model.get_output_embeddings()
    parents = [m for m in model.modules() if any(child is module for child in m.children())]
    # Only a bias that the forward reads counts: BERT's module around the head has one that it does not.
    adds_bias = any(isinstance(getattr(m, "bias", None), nn.Parameter) and reads(m, "bias") for m in parents)
    return None if module is None or adds_bias else Head(module)


class DeferLogits(Stage):
    """Compute no logits if the loss is all that is needed: the head then returns `DeferredLogits`."""

    def __init__(self, head: Head | None) -> None:
        self.head = head

    def reset(self) -> None:
        if self.head is not None:
            self.head.defer_next = False

    def before(self, call: ForwardCall) -> None:
        if self.head is not None:
            options = call.options
            suffices = options.loss_only or (call.model.training and not options.compute_logits)
            self.head.defer_next = call.scored or (call.has_labels and suffices)

    def after(self, call: ForwardCall, output: Any) -> Any:
        if isinstance(output, tuple):
            return tuple(value for value in output if not isinstance(value, DeferredLogits))
        if not isinstance(output, ModelOutput) or not isinstance(output.get("logits"), DeferredLogits):
            return output
        entries = {name: value for name, value in output.items() if name != "logits"}
        return type(output)(**entries)


class SelectLogits(Stage):
    """`logits_to_keep`: run the head on selected tokens only, and return their logits on every rank."""

    def __init__(self, head: Head | None) -> None:
        self.head = head
        self.selected: SelectedTokens | None = None
        self.hooked = False

    def reset(self) -> None:
        self.selected = None

    def check(self, call: ForwardCall) -> None:
        keep = call.batch.get("logits_to_keep")
        if keep is None or (isinstance(keep, int) and keep == 0):
            return
        if self.head is None or not call.traits.accepts("logits_to_keep"):
            raise LongspanError(f"{call.traits.name} takes no logits_to_keep; leave it out")
        positions = (
            isinstance(keep, Tensor) and keep.dim() == 1 and len(keep) and keep.dtype in (torch.int64, torch.int32)
        )
        if not positions and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 0):
            raise LongspanError(
                f"logits_to_keep={format_value(keep)}: give a number of last tokens, or an integer tensor [k] of "
                "positions in the sequence"
            )
        if call.batch.get("labels") is not None:
            raise LongspanError("logits_to_keep with labels: the loss needs the logits of all tokens; leave one out")

    def before(self, call: ForwardCall) -> None:
        call.inputs.pop("logits_to_keep", None)
        keep = call.batch.get("logits_to_keep")  # on the host
        if self.head is None or not (isinstance(keep, Tensor) or keep):
            return
        if not self.hooked:  # the first forward that selects tokens
            self.hooked, head = True, self.head.module
            head.register_forward_pre_hook(lambda _, args: self.selected.select(*args) if self.selected else args)
            head.register_forward_hook(lambda _, args, out: self.selected.join(out) if self.selected else out)
        tokens = _selected(keep, call.info.length)
        if tokens:
            self.selected = SelectedTokens(tokens, call.info.length, call.sp)


def _selected(keep: int | Tensor, n: int) -> Sequence[int]:
    """Return the positions that `logits_to_keep` selects of a sequence of n tokens."""
    if not isinstance(keep, Tensor):
        return range(max(0, n - keep), n)
    positions = [int(i) for i in keep.tolist()]
    outside = next((i for i in positions if not -n <= i < n), None)
    if outside is not None:
        raise LongspanError(f"`logits_to_keep` holds {outside}, the sequence has {n} tokens: {-n} to {n - 1}")
    return [i % n for i in positions]


class SelectedTokens:
    """Gather selected tokens, given by their positions in the sequence of `length` tokens."""

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

    def select(self, x_BL: Tensor) -> Tensor:
        """Return the selected ones among my tokens, padded to the same number on every rank: `[B, most, ...]`."""
        return x_BL[:, self.mine + [0] * (self.most - len(self.mine))]

    def join(self, x_Bm: Tensor) -> Tensor:
        """Return the selected tokens of all ranks, in order."""
        every_PBm = x_Bm[None]
        if self.sp.size > 1:
            assert self.sp.group is not None
            every_PBm = all_gather(every_PBm, group_name(self.sp.group))
        return every_PBm.movedim(0, 1).flatten(1, 2)[:, self.at]

    def gather(self, x_BL: Tensor) -> Tensor:
        return self.join(self.select(x_BL))
