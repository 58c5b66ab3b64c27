"""The stage that checks a full batch, and replaces it by this rank's tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from longspan.comm.consistency import is_on_cpu
from longspan.comm.mesh import SequenceSharding
from longspan.compat.transformers_api import count_mask
from longspan.core.errors import LongspanError
from longspan.hf.batch.compare import BatchCheck
from longspan.hf.batch.documents import tokens_of
from longspan.hf.batch.shard import SequenceInfo, cut_batch, fill_padding
from longspan.hf.forward.binding import check_positions
from longspan.hf.forward.loss import check_labels, problem_of
from longspan.hf.forward.stage import ForwardCall, ModelTraits, Stage
from longspan.hf.model.pretrained import position_range
from longspan.hf.model.support import HELP, refuse_dropout
from longspan.hf.model.vision import PICTURE_KEYS, image_spans

if TYPE_CHECKING:
    from longspan.hf.forward.tensor import TensorParallel


class ShardBatch(Stage):
    """Shard the batch, unless `longspan.shard_batch` has; raise for what cannot be sharded and ids outside the model's
    tables.

    `batches` decides whether this forward may wait for the GPU.
    """

    def __init__(self, traits: ModelTraits, tensor: TensorParallel | None, batches: BatchCheck | None) -> None:
        self.traits, self.tensor, self.batches = traits, tensor, batches

    def check(self, call: ForwardCall) -> None:
        _refuse_arguments(call.batch, self.traits)
        if call.model.training:
            refuse_dropout(self.traits.dropout)
        if is_on_cpu(call.batch) or (self.batches is not None and self.batches.thorough):
            check_ids(call.model, call.batch, self.traits)
            self._check_labels(call.model, call.batch)
        if "longspan" in call.batch:
            self._check_sharded(call.batch, call.sp)
            call.inputs = {key: value for key, value in call.batch.items() if key != self.traits.image_types}
        else:
            call.inputs = self._shard(call)
        if call.info.nodes is not None:
            self._check_trees(call)
        if call.info.weights is not None and (self.traits.labels_per_row or call.scored):
            what = "the fused head of TRL" if call.scored else f"{self.traits.name}, which labels rows,"
            raise LongspanError(f"{what} takes no `loss_weights`; leave them out")
        call.segments, call.has_holes = call.info.segments, call.info.visible is not None
        check_positions(position_range(call.model.config), call.info.max_position)
        call.tokens = tokens_of(call.inputs)

    def before(self, call: ForwardCall) -> None:
        inputs = call.inputs
        if torch.is_grad_enabled():
            fill_padding(inputs, call.sp, None if self.traits.labels_per_row else inputs.get("labels"))
        call.tokens = tokens = tokens_of(inputs)
        # A mask of ones: transformers then does not look for packed documents in these positions. Padding and
        # documents are in `call.info`.
        rows, length = tokens.shape[:2]
        if self.tensor is not None:  # an expert-parallel router masks the tokens that it routes
            length = self.tensor.group.tokens(length)
        inputs["attention_mask"] = torch.ones(rows, length, dtype=torch.bool, device=tokens.device)
        inputs["use_cache"] = False

    def _shard(self, call: ForwardCall) -> dict[str, Any]:
        batch = call.batch
        positions = self.traits.positions(batch)
        if positions is not None and positions.dim() > 2 and not self.traits.rotary_3d:
            raise LongspanError(
                f"`position_ids` has the shape {tuple(positions.shape)}, and {self.traits.name} takes one position per "
                f"token: [rows, tokens]"
            )
        if self.traits.encoders:
            batch = {key: value for key, value in batch.items() if key not in PICTURE_KEYS}
        if not self.traits.labels_per_row:
            cut = cut_batch(
                batch, call.sp, shift=not self.traits.labels_per_token, own_positions=positions,
                placeholders=self.traits.placeholders, elastic=call.elastic,
            )  # fmt: skip
            key = self.traits.image_types
            if key is not None and batch.get(key) is not None:
                types = batch[key]
                del cut[key]
                cut["longspan"] = dataclasses.replace(cut["longspan"], bidirectional=image_spans(types))
            return cut
        labels = batch.get("labels")
        tokens = {key: value for key, value in batch.items() if key != "labels"}
        return cut_batch(tokens, call.sp, own_positions=positions) | ({} if labels is None else {"labels": labels})

    def _check_sharded(self, batch: Mapping[str, Any], sp: SequenceSharding) -> None:
        info, own, name = batch["longspan"], self.traits.own_positions, self.traits.name
        unshifted = self.traits.labels_per_token
        types = None if self.traits.image_types is None else batch.get(self.traits.image_types)
        if types is not None and bool((types == 1).any()):
            raise LongspanError(
                f"`{self.traits.image_types}` marks tokens of images, which longspan.shard_batch has cut; give the "
                f"model the whole batch"
            )
        if not isinstance(info, SequenceInfo):
            raise LongspanError(
                f"the key `longspan` of a batch comes from longspan.shard_batch, got {type(info).__name__}"
            )
        if info.layout != sp.layout:
            raise LongspanError(
                f"this batch was sharded with {info.layout}, the model with {sp.layout}; give "
                "longspan.shard_batch the sharding of the model"
            )
        if self.traits.rotary_3d:  # a batch without pictures, as all that are sharded: its tokens count
            own = None
        if info.counted and own is not None and (own is not count_mask or info.segments is not None):
            raise LongspanError(
                f"{name} computes position ids from its tokens or mask, but this batch was sharded without them; "
                "give longspan.shard_batch the position_ids"
            )
        if batch.get("labels") is not None and info.shifted == unshifted and not self.traits.labels_per_row:
            kind = "model of each token, whose labels are not" if unshifted else "causal LM, whose labels are"
            raise LongspanError(
                f"{name} is a {kind} shifted; shard its batches with longspan.shard_batch(batch, sp, "
                f"shift={not unshifted})"
            )

    def _check_trees(self, call: ForwardCall) -> None:
        """Raise for models that depend on the order of tokens in other ways than attention's mask and positions."""
        traits = self.traits
        refused = {
            "is no causal language model": traits.labels_per_token or traits.labels_per_row,
            "takes pictures": bool(traits.encoders),
            "computes position ids from its tokens": traits.own_positions not in (None, count_mask),
            "adds a router loss, which would count shared tokens once (set output_router_logits=False)": (
                call.wants_router_loss
            ),
        }
        for why, applies in refused.items():
            if applies:
                raise LongspanError(
                    f"{traits.name} {why}: it cannot take trees (`tin` and `tout`); give it each sequence by itself"
                )

    def _check_labels(self, model: PreTrainedModel, batch: Mapping[str, Any]) -> None:
        """Raise for labels outside the model's vocabulary or classes."""
        size, kind = model.config.get_text_config().vocab_size, "vocabulary has {} ids"
        if self.traits.labels_per_row or model.loss_type == "ForTokenClassification":
            size, kind = model.config.num_labels, "model has {} labels"
        for key in ("labels", "shift_labels"):
            labels = batch.get(key)
            if not isinstance(labels, Tensor) or labels.numel() == 0:
                continue
            if self.traits.labels_per_row and problem_of(model.config, labels) != "single_label_classification":
                continue
            check_labels(key, labels, size, kind)


def _refuse_arguments(batch: Mapping[str, Any], traits: ModelTraits) -> None:
    name, cache = traits.name, batch.get("cache")
    if cache is not None or batch.get("use_cache"):
        given = f"`cache` is a {type(cache).__name__}" if cache is not None else "use_cache=True"
        raise LongspanError(
            f"{given}: a parallelized model keeps its keys and values in a cache sharded over the ranks; pass "
            f"cache=longspan.ShardedCache(model) (`generate` makes one itself), or leave both out"
        )
    if batch.get("output_attentions"):
        raise LongspanError(
            "output_attentions=True is not supported on a parallelized model: attention weights are never made; "
            "leave it out"
        )
    if batch.get("encoder_hidden_states") is not None:
        raise LongspanError(f"encoder_hidden_states ask {name} for cross attention to another sequence; {HELP}")
    if batch.get("labels") is not None and not traits.accepts("labels"):
        raise LongspanError(f"{name} takes no labels: it has no head that predicts tokens; leave them out")


def check_ids(model: PreTrainedModel, batch: Mapping[str, Any], traits: ModelTraits) -> None:
    """Raise for ids outside the model's tables: after sharding, only the rank that holds one would fail."""
    config = model.config.get_text_config()
    size, ids = config.vocab_size, batch.get("input_ids")
    if isinstance(ids, Tensor) and ids.numel():
        wrong = (ids < 0) | (ids >= size)
        if bool(wrong.any()):
            raise LongspanError(
                f"`input_ids` holds {int(ids[wrong][0])}, the vocabulary has {size} ids: 0 to {size - 1}", code="LS302"
            )
    types, positions = batch.get("token_type_ids"), batch.get("position_ids")
    if isinstance(types, Tensor) and types.numel():
        kinds = getattr(config, "type_vocab_size", None) or size
        if not 0 <= int(types.min()) <= int(types.max()) < kinds:
            raise LongspanError(
                f"`token_type_ids` holds {int(types.min())} to {int(types.max())}, the model has {kinds} types from 0"
            )
    if isinstance(positions, Tensor) and positions.numel() and not traits.rotary and int(positions.min()) < 0:
        raise LongspanError(f"`position_ids` holds {int(positions.min())}, the model's learnt positions start at 0")
