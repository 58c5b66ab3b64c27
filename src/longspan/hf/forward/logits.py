"""The stages that decide which logits a forward makes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from longspan.core.errors import LongspanError
from longspan.core.validation import format_value
from longspan.hf.forward.outputs import PickedTokens, without_deferred
from longspan.hf.forward.stage import ForwardCall, ForwardOptions, ModelTraits, Stage

if TYPE_CHECKING:
    from longspan.comm.mesh import SequenceSharding
    from longspan.losses.deferred_logits import Head


class DeferLogits(Stage):
    """Make no logits if the loss is all that is needed: the head then returns `DeferredLogits`.

    Args:
        head: the model's; None if it has none that can be deferred.
        options: of the caller.
    """

    def __init__(self, head: Head | None, options: ForwardOptions) -> None:
        self.head, self.options = head, options

    def reset(self) -> None:
        if self.head is not None:
            self.head.defer_next = False

    def before(self, call: ForwardCall) -> None:
        options = self.options
        call.has_labels = call.inputs.get("labels") is not None
        loss_suffices = options.loss_only or (call.model.training and not options.make_logits)
        if self.head is not None:
            self.head.defer_next = options.return_deferred or call.scored or (call.has_labels and loss_suffices)

    def after(self, call: ForwardCall, output: Any) -> Any:
        return output if self.options.return_deferred else without_deferred(output)


class SelectLogits(Stage):
    """`logits_to_keep`: run the head on selected tokens only, and return their logits on every rank.

    Args:
        traits: of the model.
        head: the model's; None if it has none.
        sp: the sharding.
    """

    def __init__(self, traits: ModelTraits, head: Head | None, sp: SequenceSharding) -> None:
        self.traits, self.head, self.sp = traits, head, sp
        self.picked: PickedTokens | None = None
        self.hooked = False

    def reset(self) -> None:
        self.picked = None

    def check(self, call: ForwardCall) -> None:
        keep = call.batch.get("logits_to_keep")
        if keep is None or (isinstance(keep, int) and keep == 0):
            return
        if self.head is None or not self.traits.accepts("logits_to_keep"):
            raise LongspanError(f"{self.traits.name} takes no logits_to_keep; leave it out")
        positions = (
            isinstance(keep, Tensor) and keep.dim() == 1 and len(keep) and keep.dtype in (torch.int64, torch.int32)
        )
        if not positions and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 0):
            raise LongspanError(
                f"logits_to_keep={format_value(keep)}: give a number of last tokens, or an integer tensor [k] of "
                "places in the sequence"
            )
        if call.batch.get("labels") is not None:
            raise LongspanError("logits_to_keep with labels: the loss needs the logits of all tokens; leave one out")

    def before(self, call: ForwardCall) -> None:
        keep = call.inputs.pop("logits_to_keep", None)
        if self.head is None or not (isinstance(keep, Tensor) or keep):
            return
        self._hook_head()
        info = call.info
        tokens = _selected(keep, info.length)
        if tokens:
            self.picked = PickedTokens(tokens, info.length, self.sp.with_layout(info.layout))

    def after(self, call: ForwardCall, output: Any) -> Any:
        self.picked = None
        return output

    def _hook_head(self) -> None:
        """Put hooks on the head, at the first forward that selects tokens."""
        if self.hooked or self.head is None:
            return
        self.hooked = True
        head = self.head.module
        head.register_forward_pre_hook(lambda _, args: args if self.picked is None else self.picked.select(*args))
        head.register_forward_hook(lambda _, args, out: out if self.picked is None else self.picked.join(out))


def _selected(keep: int | Tensor, n: int) -> Sequence[int]:
    """Return the positions that `logits_to_keep` selects of a sequence of n tokens.

    Raises:
        LongspanError: for a position outside the sequence.
    """
    if not isinstance(keep, Tensor):
        return range(max(0, n - keep), n)
    positions = [int(i) for i in keep.tolist()]
    outside = next((i for i in positions if not -n <= i < n), None)
    if outside is not None:
        raise LongspanError(f"`logits_to_keep` holds {outside}, the sequence has {n} tokens: {-n} to {n - 1}")
    return [i % n for i in positions]
