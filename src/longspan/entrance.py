"""The entrance of a parallelized model: where a full batch becomes this rank's, and what is refused there.

In the first forwards all ranks compare their batches and hear of one another's errors before anyone raises, because a
rank that raises alone leaves the others waiting in the next collective.
"""

from __future__ import annotations

import inspect
import zlib
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.errors import LongspanError
from longspan.gradients import GradientSum
from longspan.huggingface import ModelBinding, attention_layers, check_positions
from longspan.loss import causal_lm_loss
from longspan.shard import IGNORE, SequenceInfo, cut_batch, digest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedModel

    from longspan.mesh import SequenceSharding


class Entrance:
    """The hooks around a model's forward.

    Args:
        model: the transformers causal LM.
        sp: its sharding.
        binding: what `bind_layers` made of it.
        check_batches: for so many first forwards, compare the batches of all ranks.
    """

    def __init__(self, model: PreTrainedModel, sp: SequenceSharding, binding: ModelBinding, check_batches: int) -> None:
        self.sp = sp
        self.binding = binding
        self.checks_left = check_batches if sp.world_size > 1 else 0
        self.loss_due = False
        self.signature = inspect.signature(model.forward)
        self.gradients: GradientSum | None = None
        self.dropouts = {n: m for n, m in attention_layers(model).items() if getattr(m, "attention_dropout", 0)}

    def enter(self, model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        batch = self._by_name(args, kwargs)
        if self.gradients is not None:
            self.gradients.forget_unfinished()
        cut = self._cut(model, batch)
        self.loss_due = cut.get("labels") is not None
        self.binding.max_position = cut["longspan"].max_position
        tokens = cut["input_ids"] if cut.get("input_ids") is not None else cut["inputs_embeds"]
        # A mask of ones tells transformers not to look for packed sequences in these positions: `info` has them, of
        # the whole sequence. Padding and documents are in `info` too.
        cut["attention_mask"] = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
        cut["use_cache"] = False
        return (), cut

    def leave(self, model: PreTrainedModel, args: Any, output: Any) -> None:
        if self.loss_due:
            raise LongspanError(
                f"{type(model).__name__} computed a loss of its own instead of calling its loss_function, so it would "
                f"be that of one rank's tokens; remove what patches its forward (a fused loss, say)"
            )
        idle = [layer.name for layer in self.binding.layers if not layer.seen]
        if idle:
            raise LongspanError(
                f"layer {idle[0]} of {type(model).__name__} ({len(idle)} of {len(self.binding.layers)} layers) did not "
                f"call its attention through transformers' registry; it cannot be sharded in this version"
            )

    def loss(
        self, logits: Tensor, labels: Tensor, vocab_size: int | None = None, num_items_in_batch: Any = None, **_: Any
    ) -> Tensor:
        """Takes the place of the model's loss function. The entrance has shifted the labels already."""
        self.loss_due = False
        return causal_lm_loss(logits, labels, self.sp, num_items_in_batch)

    def _by_name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        bound = self.signature.bind_partial(*args, **kwargs).arguments
        named = {name: value for name, value in bound.items() if name != "kwargs"}
        return {**named, **bound.get("kwargs", {})}

    def _refuse(self, model: PreTrainedModel, batch: Mapping[str, Any]) -> None:
        if batch.get("past_key_values") is not None or batch.get("use_cache"):
            raise LongspanError(
                "a parallelized model keeps no KV cache in this version (generate() needs one): call it without "
                "past_key_values and use_cache, or generate with a model that was not parallelized"
            )
        for key in ("output_attentions", "output_router_logits"):
            if batch.get(key):
                raise LongspanError(f"{key}=True is not supported on a parallelized model; leave it out")
        keep = batch.get("logits_to_keep")
        if keep is not None and not (isinstance(keep, int) and keep == 0):
            raise LongspanError("logits_to_keep counts from the end of the sequence, which is cut here; leave it out")
        if model.training and self.dropouts:
            name, layer = next(iter(self.dropouts.items()))
            raise LongspanError(
                f"layer {name} has attention dropout {layer.attention_dropout}, which would depend on the number of "
                f"ranks; set attention_dropout=0.0 in the config, or call model.eval()"
            )
        if self.gradients is not None:
            self.gradients.check(model)

    def _cut(self, model: PreTrainedModel, batch: dict[str, Any]) -> dict[str, Any]:
        """Cut the batch. In the first forwards all ranks first hear whether everyone's batch is sound, and alike."""
        problem = None
        cut: dict[str, Any] = {}
        try:
            self._refuse(model, batch)
            if self.checks_left > 0 or all(x.device.type == "cpu" for x in batch.values() if isinstance(x, Tensor)):
                _check_ids(model, batch)
            cut = dict(batch) if "longspan" in batch else cut_batch(batch, self.sp)
            if not isinstance(cut["longspan"], SequenceInfo):
                given = type(cut["longspan"]).__name__
                raise LongspanError(f"the key `longspan` of a batch comes from longspan.shard_batch, got {given}")
            check_positions(model, cut["longspan"])
        except LongspanError as error:
            problem = error
        if self.checks_left > 0:
            self.checks_left -= 1
            _compare_batches(batch, self.sp, problem)
        if problem is not None:
            raise problem
        return cut


def _check_ids(model: PreTrainedModel, batch: Mapping[str, Any]) -> None:
    """Refuse ids that the vocabulary does not have: cut, they would fail on the one rank that holds them."""
    size = model.config.get_text_config().vocab_size
    for key in ("input_ids", "labels", "shift_labels"):
        ids = batch.get(key)
        if not isinstance(ids, Tensor) or ids.numel() == 0:
            continue
        wrong = (ids < 0) | (ids >= size)
        if key != "input_ids":
            wrong &= ids != IGNORE
        if bool(wrong.any()):
            but = "" if key == "input_ids" else f", or {IGNORE} where no loss is computed"
            raise LongspanError(
                f"`{key}` holds {int(ids[wrong][0])}, the vocabulary has {size} ids: 0 to {size - 1}{but}"
            )


def _compare_batches(batch: Mapping[str, Any], sp: SequenceSharding, problem: LongspanError | None) -> None:
    """Raise on every rank alike: for a batch that differs within its sequence group, or one that some rank refuses."""
    group = sp.world_group
    assert group is not None
    info = batch.get("longspan")
    # Of a batch that was cut beforehand the parts differ, what they were cut from must not.
    crc = zlib.crc32(repr(info).encode()) if isinstance(info, SequenceInfo) else digest(batch)
    mine = torch.tensor([crc, problem is not None], dtype=torch.int64, device=sp.device)
    rows = [torch.zeros_like(mine) for _ in range(sp.world_size)]
    dist.all_gather(rows, mine, group=group)
    ranks = dist.get_process_group_ranks(group)
    said = [row.tolist() for row in rows]
    for first in range(0, sp.world_size, sp.size):
        _compare_group(ranks[first : first + sp.size], [crc for crc, _ in said[first : first + sp.size]], sp)
    refusing = [rank for rank, (_, refused) in zip(ranks, said, strict=True) if refused]
    if refusing:
        texts: list[Any] = [None] * sp.world_size
        dist.all_gather_object(texts, None if problem is None else str(problem), group=group)
        text = next(text for text in texts if text is not None)
        raise LongspanError(text if len(refusing) == len(ranks) else f"rank {refusing[0]} refused its batch: {text}")


def _compare_group(ranks: list[int], seen: list[int], sp: SequenceSharding) -> None:
    if len(set(seen)) == 1:
        return
    usual = max(Counter(seen).items(), key=lambda item: (item[1], item[0] == seen[0]))[0]
    others = ", ".join(str(rank) for rank, crc in zip(ranks, seen, strict=True) if crc != usual)
    same = ", ".join(str(rank) for rank, crc in zip(ranks, seen, strict=True) if crc == usual)
    raise LongspanError(
        f"the ranks of a sequence group need the same full batch: ranks {others} were given another one than ranks "
        f"{same}; seed or shard the data loader by sp.data_rank (of {sp.data_size}), not by the process's rank"
    )
