"""The stage that checks a full batch, and replaces it by this rank's tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from longspan.comm.weights import is_on_cpu
from longspan.compat.transformers_api import count_mask
from longspan.core.errors import LongspanError
from longspan.hf.batch.compare import BatchCheck
from longspan.hf.batch.documents import tokens_of
from longspan.hf.batch.shard import cut_batch, fill_padding, place_batch, read_batch
from longspan.hf.forward.loss import check_labels, problem_of
from longspan.hf.forward.stage import ForwardCall, ModelTraits, Stage
from longspan.hf.model.pretrained import position_range
from longspan.hf.model.support import HELP, refuse_dropout
from longspan.hf.model.vision import PICTURE_KEYS, image_spans

if TYPE_CHECKING:
    from longspan.hf.forward.tensor import TensorParallel


class ShardBatch(Stage):
    """Shard the batch; raise for what cannot be sharded and ids outside the model's tables.

    `batches` decides whether this forward may wait for the GPU.
    """

    def __init__(self, tensor: TensorParallel | None, batches: BatchCheck | None) -> None:
        self.tensor, self.batches = tensor, batches

    def check(self, call: ForwardCall) -> None:
        batch, traits = call.batch, call.traits
        _refuse_arguments(batch, traits)
        if call.model.training:
            refuse_dropout(traits.dropout)
        if is_on_cpu(batch) or (self.batches is not None and self.batches.thorough):
            check_ids(call.model, batch, traits)
            _check_labels(call)
        self._read(call)
        if call.info.nodes is not None:
            _check_trees(call)
        if "loss_weights" in call.whole and (traits.labels_per_row or call.scored):
            what = "the fused head of TRL" if call.scored else f"{traits.name}, which labels rows,"
            raise LongspanError(f"{what} takes no `loss_weights`; leave them out")
        check_positions(position_range(call.model.config), call.info.max_position)

    def _read(self, call: ForwardCall) -> None:
        """Read the facts of the batch; labels of rows and pictures are not sharded by tokens."""
        traits = call.traits
        positions = traits.positions(call.batch)
        if positions is not None and positions.dim() > 2 and not traits.rotary_3d:
            raise LongspanError(
                f"`position_ids` has the shape {tuple(positions.shape)}, and {traits.name} takes one position per "
                f"token: [rows, tokens]"
            )
        others = (*(PICTURE_KEYS if traits.encoders else ()), *(("labels",) if traits.labels_per_row else ()))
        batch = {key: value for key, value in call.batch.items() if key not in others}
        call.whole, call.info = read_batch(batch, call.sp, shift=not traits.labels_per_token, own_positions=positions)
        types = call.whole.pop(traits.image_types or "", None)
        if types is not None:
            call.info = dataclasses.replace(call.info, bidirectional=image_spans(types))

    def before(self, call: ForwardCall) -> None:
        inputs, device = cut_batch(call.whole, call.info), tokens_of(call.whole).device
        device = call.sp.device if device.type == "cpu" else device
        inputs, call.info = place_batch(inputs, call.info, device)
        call.inputs = inputs
        if torch.is_grad_enabled():
            shift = not call.traits.labels_per_token
            call.info = fill_padding(inputs, call.whole, call.info, call.traits.placeholders, shift=shift)
        tokens = tokens_of(inputs)
        # A mask of ones: transformers then does not look for packed documents in these positions. Padding and
        # documents are in `call.info`.
        rows, length = tokens.shape[:2]
        if self.tensor is not None:  # an expert-parallel router masks the tokens that it routes
            length = self.tensor.group.tokens(length)
        inputs["attention_mask"] = torch.ones(rows, length, dtype=torch.bool, device=tokens.device)
        inputs["use_cache"] = False


def _check_trees(call: ForwardCall) -> None:
    """Raise for models that depend on the order of tokens in other ways than attention's mask and positions."""
    traits = call.traits
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


def _check_labels(call: ForwardCall) -> None:
    """Raise for labels outside the model's vocabulary or classes."""
    model, of_rows = call.model, call.traits.labels_per_row
    size, kind = model.config.get_text_config().vocab_size, "vocabulary has {} ids"
    if of_rows or model.loss_type == "ForTokenClassification":
        size, kind = model.config.num_labels, "model has {} labels"
    for key in ("labels", "shift_labels"):
        labels = call.batch.get(key)
        if not isinstance(labels, Tensor) or labels.numel() == 0:
            continue
        if of_rows and problem_of(model.config, labels) != "single_label_classification":
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


def check_positions(limit: int | None, max_position: int) -> None:
    """Raise for positions beyond a model's range, which is `position_range(model.config)`."""
    if limit is not None and max_position >= limit:
        raise LongspanError(
            f"the batch has positions up to {max_position}, the model's range is {limit} (max_position_embeddings); "
            f"shorten the context to {limit}, or give the config a RoPE scaling and a larger max_position_embeddings",
            code="LS203",
        )
