"""Hooks around the forward of a parallelized model: a full batch becomes this rank's, or is refused.

At every forward all ranks compare their batches and hear of one another's errors before anyone raises (`alike.py`),
because a rank that raises alone leaves the others waiting in the next collective.
"""

from __future__ import annotations

import contextlib
import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from longspan.comm.consistency import is_on_cpu
from longspan.comm.errors import on_every_rank
from longspan.compat.torch_api import not_compiled, version_of
from longspan.compat.transformers_api import cache_name, own_positions, take_cache
from longspan.core.errors import LongspanError
from longspan.core.validation import format_value
from longspan.hf.batch import IGNORE, SequenceInfo, cut_batch, fill_padding, real_tokens
from longspan.hf.forward.kv_cache import CachedInfo, ShardedCache, last_tokens
from longspan.hf.forward.loss import mean_loss, mean_row_loss, problem_of
from longspan.hf.forward.outputs import KeptLogits, head_of, without_deferred
from longspan.hf.forward.pooled import PooledHead
from longspan.hf.forward.registry import ModelBinding, check_positions
from longspan.hf.forward.scored import Scoring, labels_to_score, scored_output
from longspan.hf.support import (
    HELP,
    attention_dropout,
    labels_each_row,
    labels_each_token,
    no_router_loss,
    refuse_dropout,
    router_top_k,
)
from longspan.hf.weights.fsdp import reshard
from longspan.hf.weights.gradients import GradientSum
from longspan.losses.load_balancing import load_balancing_loss

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from transformers import PreTrainedModel

    from longspan.comm.mesh import SequenceSharding
    from longspan.hf.checks.batches import BatchCheck
    from longspan.hf.checks.guards import Guard, RestCheck
    from longspan.hf.memory_options import MemoryManager
    from longspan.hf.tensor_parallel.layers import TensorParallel
    from longspan.hf.weights.optimizer_in_backward import InBackward
    from longspan.losses.deferred_logits import DeferredLogits


@dataclass
class _Owed:
    """What `leave` adds to the output of the forward under way.

    Attributes:
        labels: kept back from the model, `[B, L]`; None where there are none, or the model calls its loss function.
        items: the divisor of the loss, None for the number of labels that count.
        real: which of my tokens count in the router's loss, `[B, L]`; None where the model is not asked for it.
        as_tuple: whether the caller wants a tuple.
    """

    labels: Tensor | None = None
    items: Any = None
    real: Tensor | None = None
    as_tuple: bool = False
    scored: Tensor | None = None
    info: SequenceInfo | None = None


class ForwardHooks:
    """The hooks around a model's forward.

    A causal LM calls its loss function, whose place `loss` takes. Where that is not so (a masked LM computes its own
    cross entropy, a classifier's logits are those of some tokens or of rows) or not enough (a mixture of experts adds
    the loss of its routers), the labels are kept back, and the loss is computed from the logits when the forward has
    ended.

    Args:
        model: the transformers model with a language-model head.
        sp: its sharding.
        binding: what `bind_layers` made of it.
        batches: compares the batches of all ranks; None where there is one.
        guard: whether the model is still what it was when it was parallelized; None likewise.
        rest: checksums of this rank's weights between steps, if asked for.
        logits: whether the model makes its logits in training too, where the loss needs none.
        memory options: what is done for the memory's sake, in training.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        sp: SequenceSharding,
        binding: ModelBinding,
        *,
        batches: BatchCheck | None = None,
        guard: Guard | None = None,
        rest: RestCheck | None = None,
        logits: bool = False,
        memory_options: MemoryManager | None = None,
    ) -> None:
        self.batches, self.guard, self.rest, self.memory_options = batches, guard, rest, memory_options
        self.name = type(model).__name__  # FSDP will make another class of it
        self.sp = sp
        self.binding = binding
        self.owed = _Owed()
        self.loss_due = False
        self.computed: tuple[Tensor, int] | None = None
        self.cached: CachedInfo | None = None
        self.signature, self.cache_name = inspect.signature(model.forward), cache_name(model.forward)
        self.gradients: GradientSum | None = None
        self.tensor: TensorParallel | None = None
        self.in_backward: InBackward | None = None
        self.masked = labels_each_token(model)
        self.pooled = PooledHead(model, sp) if labels_each_row(model) else None
        self.rows: int | None = None  # so many first rows of a batch count in the loss of a classifier
        self.config: Any = model.config
        self.scoring = Scoring()
        self.top_k = router_top_k(model)
        self.dropout = attention_dropout(model)
        self.own_positions = own_positions(model)
        self.head, self.makes_logits, self.wants_deferred = head_of(model), logits, False
        self.wants_loss_alone = False
        self.kept: KeptLogits | None = None  # since the first forward with logits_to_keep
        self.losses = 0  # computed so far by longspan; a trainer checks whether a forward added one
        if self.head is not None and memory_options is not None:
            self.head.loss = memory_options.memory.head_loss
        self.rotary = any("Rotary" in type(module).__name__ for module in model.modules())

    @not_compiled
    def enter(self, model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        cache = take_cache(dict(zip(self.signature.parameters, args, strict=False)) | kwargs)
        if isinstance(cache, ShardedCache):
            return self._enter_with_cache(model, cache, args, kwargs)
        self.cached = None  # of a forward that broke off
        if self.gradients is not None:
            self.gradients.forget_unfinished()
        scored = bool(kwargs.pop("fused_lm_head", False))
        batch, cut = self._cut(model, args, kwargs)
        if torch.is_grad_enabled():
            fill_padding(cut, self.sp, None if self.pooled is not None else cut.get("labels"))
        info = cut["longspan"]
        self.owed, self.computed = _Owed(), None
        if scored:
            self.owed.scored, self.owed.info = labels_to_score(cut), info
        tokens = _tokens_of(cut)
        if self.memory_options is not None and model.training:
            memory_options = self.memory_options
            if memory_options.choose(info.length, len(tokens)):
                on_every_rank(lambda: memory_options.reserve(model, tokens), self.sp.mesh_group)
        if self.memory_options is not None:
            self.memory_options.keep_routing(self._wants_router_loss(model, batch))
        if self._wants_router_loss(model, batch):
            self.owed.real = real_tokens(info, self.sp, len(tokens), tokens.device)
        if self.masked or self.pooled is not None or self.owed.real is not None:
            self.owed.labels, self.owed.items = cut.pop("labels", None), cut.pop("num_items_in_batch", None)
            self.owed.as_tuple = not _or_default(
                cut.pop("return_dict", None), getattr(model.config, "return_dict", True)
            )
            cut["return_dict"] = True
        self.loss_due = cut.get("labels") is not None
        if self.head is not None:
            needs_none = self.loss_due or self.owed.labels is not None
            unasked = self.wants_loss_alone or (model.training and not self.makes_logits)
            self.head.armed = self.wants_deferred or scored or (needs_none and unasked)
        self.binding.max_position = info.max_position
        # A mask of ones tells transformers not to look for packed sequences in these positions: `info` has them, of
        # the whole sequence. Padding and documents are in `info` too.
        shape = tokens.shape[:2]
        if self.tensor is not None:  # and how many tokens a rank routes
            shape = torch.Size((shape[0], self.tensor.group.tokens(shape[1])))
        cut["attention_mask"] = torch.ones(shape, dtype=torch.bool, device=tokens.device)
        cut["use_cache"] = False
        if self.pooled is not None:
            self.pooled.begin(batch, cut)
        keep = cut.pop("logits_to_keep", None)
        if self.kept is None and (isinstance(keep, Tensor) or keep) and self.head is not None:
            self.kept = KeptLogits(self.head.module)
        if self.kept is not None:
            self.kept.begin(keep, info, self.sp)
        return (), cut

    @not_compiled
    def leave(self, model: PreTrainedModel, args: Any, output: Any) -> Any:
        cached, self.cached = self.cached, None
        if cached is not None and cached.cache is not None:
            cached.cache.end()
        if self.loss_due:
            raise LongspanError(
                f"{self.name} computed a loss of its own instead of calling its loss_function, so it would "
                f"be that of one rank's tokens; remove what patches its forward (a fused loss, say)"
            )
        idle = [layer.name for layer in self.binding.layers if not layer.seen]
        if idle:
            raise LongspanError(
                f"layer {idle[0]} of {self.name} ({len(idle)} of {len(self.binding.layers)} layers) did not "
                f"call its attention through transformers' registry; it cannot be sharded in this version"
            )
        if self.computed is not None:
            self._check_nothing_was_added(output)
        owed, self.owed, self.computed = self.owed, _Owed(), None
        if owed.scored is not None:
            assert owed.info is not None
            aux = self._losses(model, output, owed).get("aux_loss")
            return scored_output(model, output, owed.scored, self.sp, owed.info, aux, self.scoring)
        if owed.labels is not None or owed.real is not None:
            losses = self._losses(model, output, owed)
            output = type(output)(**{**output, **losses})  # made anew, since the order of its entries counts
        if not self.wants_deferred:
            output = without_deferred(output)
        return output.to_tuple() if owed.as_tuple else output

    def _enter_with_cache(
        self, model: PreTrainedModel, cache: ShardedCache, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """New tokens behind those of a cache: a chunk of a prompt, or what is generated."""
        problem: Exception | None = None
        batch, tokens = dict(kwargs), None
        try:
            if self.guard is not None:
                self.guard.check(model)
            batch = self._by_name(args, kwargs)
            if self.tensor is not None and self.tensor.style == "megatron-sp":
                self.tensor.refuse(batch, self.config)
            batch.pop("cache", None)
            tokens = cache.read({**batch, "position_ids": self._positions(batch, cache.kv_placement.length)})
            if is_on_cpu(batch):
                _check_ids(model, batch, self.rotary)
            check_positions(model, tokens.max_position)
        except Exception as error:  # of any kind: the other ranks must hear of it
            problem = error
        if self.batches is not None:
            self.batches.compare(model, {**batch, "cache": cache.describe()}, False, problem)
        elif problem is not None:
            raise problem
        assert tokens is not None
        self.owed, self.computed, self.loss_due = _Owed(), None, False
        if self.head is not None:
            self.head.armed = False
        if self.kept is not None:
            self.kept.picked = None
        cut, self.cached = cache.begin(batch, tokens)
        self.binding.max_position = tokens.max_position
        return (), {**cut, self.cache_name: cache}

    @not_compiled
    def keep_last(self, decoder: nn.Module, args: Any, output: Any) -> Any:
        """Return the hidden states of the last tokens alone, on every rank, if only their logits are asked for."""
        if self.cached is None or not self.cached.keep:
            return output
        if self.tensor is not None:
            hidden = self.tensor.last_tokens(output[0], self.cached)
        else:
            hidden = last_tokens(output[0], self.cached, self.sp)
        if isinstance(output, tuple):
            return hidden, *output[1:]
        output["last_hidden_state"] = hidden
        return output

    @not_compiled
    def give_back(self, model: PreTrainedModel, args: Any, output: Any) -> None:
        """After FSDP's own hooks: what a forward without gradients has gathered, no backward would release."""
        if not torch.is_grad_enabled() and not self.wants_deferred:
            reshard(model)

    @contextlib.contextmanager
    def deferring(self) -> Iterator[None]:
        """Within this, a forward gives its logits as `DeferredLogits`."""
        self.wants_deferred = True
        try:
            yield
        finally:
            self.wants_deferred = False

    @contextlib.contextmanager
    def only_loss(self) -> Iterator[None]:
        """Within this, a forward that is given labels makes no logits, in evaluation either."""
        self.wants_loss_alone = True
        try:
            yield
        finally:
            self.wants_loss_alone = False

    @not_compiled
    def loss(
        self,
        logits: Tensor | DeferredLogits,
        labels: Tensor,
        vocab_size: int | None = None,
        num_items_in_batch: Any = None,
        **_: Any,
    ) -> Tensor:
        """Takes the place of the model's loss function. The hook before the forward has shifted the labels."""
        self.loss_due = False
        loss = self._mean(logits, labels, num_items_in_batch)
        self.computed = loss, version_of(loss)
        return loss

    def _mean(self, logits: Tensor | DeferredLogits, labels: Tensor, items: Any) -> Tensor:
        self.losses += 1
        if self.batches is None:
            return mean_loss(logits, labels, self.sp, items)[0]
        loss, carried = mean_loss(logits, labels, self.sp, items, self.batches.to_carry())
        self.batches.carried(carried)
        return loss

    def _mean_of_rows(self, logits: Tensor, labels: Tensor) -> Tensor:
        self.losses += 1
        carry = None if self.batches is None else self.batches.to_carry()
        problem = problem_of(self.config, labels)
        loss, carried = mean_row_loss(logits, labels, problem, self.sp, self.rows, carry)
        if self.batches is not None:
            self.batches.carried(carried)
        return loss

    def _check_nothing_was_added(self, output: Any) -> None:
        """Another term of the loss would be that of one rank's tokens, and its gradient summed over the ranks."""
        if self.computed is None:
            return
        computed, version = self.computed
        found = output.get("loss") if isinstance(output, dict) else output[0]
        if found is not computed or version_of(computed) != version:
            raise LongspanError(
                f"{self.name} adds a term of its own to the loss of its tokens; longspan knows how to sum "
                f"the load-balancing loss of a mixture of experts over the ranks, and no other"
            )

    def _wants_router_loss(self, model: PreTrainedModel, batch: Mapping[str, Any]) -> bool:
        asked = batch.get("output_router_logits")
        return bool(_or_default(asked, getattr(model.config.get_text_config(), "output_router_logits", False)))

    def _losses(self, model: PreTrainedModel, output: Any, owed: _Owed) -> dict[str, Tensor]:
        """`loss` and `aux_loss` of the global batch, as far as they are owed."""
        losses = {}
        if owed.labels is not None:
            logits = output["logits"]
            if self.pooled is None:
                losses["loss"] = self._mean(logits, owed.labels, owed.items)
            else:  # of num_items_in_batch a classifier of transformers makes nothing either
                losses["loss"] = self._mean_of_rows(logits, owed.labels)
        if owed.real is not None:
            assert self.top_k is not None
            logits = output["router_logits"]
            if output["logits"].requires_grad and not any(x.requires_grad for x in logits):
                raise LongspanError(
                    "the router logits have no gradient, so the router loss would train nothing: reentrant gradient "
                    'checkpointing loses it; pass {"use_reentrant": False}'
                )
            real = owed.real if self.tensor is None else self.tensor.my_rows(owed.real)
            losses["aux_loss"] = load_balancing_loss(logits, self.top_k, self.sp, real)
            if "loss" in losses:
                losses["loss"] = losses["loss"] + model.router_aux_loss_coef * losses["aux_loss"]
        return losses

    def _by_name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        named = dict(zip(self.signature.parameters, args, strict=False))
        twice = sorted(named.keys() & kwargs.keys())
        if twice or len(named) < len(args):
            self.signature.bind(*args, **kwargs)  # raises Python's own error
        batch = {**named, **kwargs}
        cache = take_cache(batch)
        return batch if cache is None else {**batch, "cache": cache}

    def _refuse(self, model: PreTrainedModel, batch: Mapping[str, Any]) -> None:
        cache = batch.get("cache")
        if cache is not None or batch.get("use_cache"):
            kind = f"{self.cache_name} is a {type(cache).__name__}" if cache is not None else "use_cache=True"
            raise LongspanError(
                f"{kind}: a parallelized model keeps its keys and values in a cache over the ranks; pass "
                f"{self.cache_name}=longspan.ShardedCache(model) (generate makes one by itself), or leave both out"
            )
        if batch.get("output_attentions"):
            raise LongspanError(
                "output_attentions=True is not supported on a parallelized model, attention weights are never made; "
                "leave it out"
            )
        if self.top_k is None and self._wants_router_loss(model, batch):
            raise LongspanError(no_router_loss(self.name))
        self._check_keep(batch)
        if batch.get("encoder_hidden_states") is not None:
            raise LongspanError(
                f"encoder_hidden_states ask {self.name} for cross attention to another sequence; {HELP}"
            )
        if batch.get("labels") is not None and "labels" not in self.signature.parameters:
            raise LongspanError(f"{self.name} takes no labels, it has no head that predicts tokens; leave them out")
        if self.tensor is not None and self.tensor.style == "megatron-sp":
            self.tensor.refuse(batch, self.config)
        if self.pooled is not None:
            self.pooled.check(batch)
        if model.training and self.memory_options is not None:
            self.memory_options.check()
        if model.training:
            refuse_dropout(self.dropout)
        if self.gradients is not None:
            self.gradients.check(model)

    def _check_keep(self, batch: Mapping[str, Any]) -> None:
        keep = batch.get("logits_to_keep")
        if keep is None or (isinstance(keep, int) and keep == 0):
            return
        if self.head is None or "logits_to_keep" not in self.signature.parameters:
            raise LongspanError(f"{self.name} takes no logits_to_keep; leave it out")
        places = isinstance(keep, Tensor) and keep.dim() == 1 and len(keep) and keep.dtype in (torch.int64, torch.int32)
        if not places and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 0):
            raise LongspanError(
                f"logits_to_keep={format_value(keep)}: give a number of last tokens, or an integer tensor [k] of "
                "places in the sequence"
            )
        if batch.get("labels") is not None:
            raise LongspanError("logits_to_keep with labels: the loss needs the logits of all tokens; leave one out")

    def _cut(
        self, model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The batch by name, and cut, when all ranks have heard whether everyone's is sound, and alike."""
        problem: Exception | None = None
        batch, cut = dict(kwargs), dict[str, Any]()
        try:
            if self.guard is not None:
                self.guard.check(model)
            batch = self._by_name(args, kwargs)
            if self.rest is not None:
                self.rest.before_forward()
            self._refuse(model, batch)
            if is_on_cpu(batch) or (self.batches is not None and self.batches.thorough):
                _check_ids(model, batch, self.rotary)
                self._check_labels(model, batch)
            cut = self._part_of(model, batch)
            check_positions(model, cut["longspan"].max_position)
            if self.memory_options is not None and model.training:
                self.memory_options.reserve(model, _tokens_of(cut))
        except Exception as error:  # of any kind: the other ranks must hear of it
            problem = error
        if self.batches is not None:
            self.batches.compare(model, batch, self._wants_router_loss(model, batch), problem)
        elif problem is not None:
            raise problem
        return batch, cut

    def _check_labels(self, model: PreTrainedModel, batch: Mapping[str, Any]) -> None:
        """Refuse labels that the model's head does not have."""
        size, kind = model.config.get_text_config().vocab_size, "vocabulary has {} ids"
        if self.pooled is not None or model.loss_type == "ForTokenClassification":
            size, kind = model.config.num_labels, "model has {} labels"
        for key in ("labels", "shift_labels"):
            labels = batch.get(key)
            if not isinstance(labels, Tensor) or labels.numel() == 0:
                continue
            if self.pooled is not None and problem_of(model.config, labels) != "single_label_classification":
                continue
            wrong = ((labels < 0) | (labels >= size)) & (labels != IGNORE)
            if bool(wrong.any()):
                raise LongspanError(
                    f"`{key}` holds {int(labels[wrong][0])}, the {kind.format(size)}: 0 to {size - 1}, or {IGNORE} "
                    f"where no loss is computed"
                )

    def _positions(self, batch: Mapping[str, Any], past: int = 0) -> Tensor | None:
        """Return the position ids of a batch: those it contains, or those that the model computes itself."""
        own, given, mask = self.own_positions, batch.get("position_ids"), batch.get("attention_mask")
        if given is not None or own is None:
            return given
        ids = batch.get("input_ids")
        if own.of_ids is None or own.of_embeds is None:
            return None if mask is None else (mask.long().cumsum(-1) * mask.long() - 1)[:, past:]
        return own.of_embeds(batch["inputs_embeds"]) if ids is None else own.of_ids(ids, past)

    def _part_of(self, model: PreTrainedModel, batch: dict[str, Any]) -> dict[str, Any]:
        if self.pooled is not None and "longspan" not in batch:
            labels = {key: batch[key] for key in ("labels",) if batch.get(key) is not None}
            batch = {key: value for key, value in batch.items() if key != "labels"}
            return cut_batch(batch, self.sp, own_positions=self._positions(batch)) | labels
        if "longspan" not in batch:
            return cut_batch(batch, self.sp, shift=not self.masked, own_positions=self._positions(batch))
        info = batch["longspan"]
        if not isinstance(info, SequenceInfo):
            raise LongspanError(
                f"the key `longspan` of a batch comes from longspan.shard_batch, got {type(info).__name__}"
            )
        own = self.own_positions
        if info.counted and own is not None and (own.of_ids is not None or info.segments is not None):
            raise LongspanError(
                f"{self.name} computes position ids from its tokens or mask, but this batch was sharded without them; "
                "give longspan.shard_batch the position_ids"
            )
        if batch.get("labels") is not None and info.shifted == self.masked and self.pooled is None:
            kind = "model of each token, whose labels are not" if self.masked else "causal LM, whose labels are"
            raise LongspanError(
                f"{self.name} is a {kind} shifted; cut its batches with longspan.shard_batch(batch, sp, "
                f"shift={not self.masked})"
            )
        return dict(batch)


def _tokens_of(cut: Mapping[str, Any]) -> Tensor:
    """Ids of my tokens, or their embeddings."""
    tokens: Tensor = cut["input_ids"] if cut.get("input_ids") is not None else cut["inputs_embeds"]
    return tokens


def _or_default(value: Any, default: Any) -> Any:
    return default if value is None else value


def _check_ids(model: PreTrainedModel, batch: Mapping[str, Any], rotary: bool) -> None:
    """Refuse ids that the model's tables do not have: cut, they would fail on the one rank that holds them."""
    config = model.config.get_text_config()
    size, ids = config.vocab_size, batch.get("input_ids")
    if isinstance(ids, Tensor) and ids.numel():
        wrong = (ids < 0) | (ids >= size)
        if bool(wrong.any()):
            raise LongspanError(
                f"`input_ids` holds {int(ids[wrong][0])}, the vocabulary has {size} ids: 0 to {size - 1}"
            )
    types, positions = batch.get("token_type_ids"), batch.get("position_ids")
    if isinstance(types, Tensor) and types.numel():
        kinds = getattr(config, "type_vocab_size", None) or size
        if not 0 <= int(types.min()) <= int(types.max()) < kinds:
            raise LongspanError(
                f"`token_type_ids` holds {int(types.min())} to {int(types.max())}, the model has {kinds} types from 0"
            )
    if isinstance(positions, Tensor) and positions.numel() and not rotary and int(positions.min()) < 0:
        raise LongspanError(f"`position_ids` holds {int(positions.min())}, the model's learnt positions start at 0")
