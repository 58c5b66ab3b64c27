"""A stage of a forward, and the forward in progress, which stages share. `hooks.py` says in which order they run."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import PreTrainedModel

from longspan.compat.transformers_api import has_own_cache, own_positions, take_cache
from longspan.core.errors import LongspanError
from longspan.hf.batch.shard import SequenceInfo, has_labels
from longspan.hf.batch.trees import PackedRows
from longspan.hf.cache.kv_cache import ShardedCache
from longspan.hf.model.support import attention_dropout, router_top_k
from longspan.hf.model.vision import IMAGE_TYPES, core_of, encoders_of
from longspan.losses.cross_entropy import CROSS_ENTROPY, TokenLoss

if TYPE_CHECKING:
    from longspan.comm.mesh import SequenceSharding


class Stage:
    """One concern of a forward."""

    def check(self, call: ForwardCall) -> None:
        """Raise if this rank cannot run the forward; store facts of the whole batch. No collectives."""

    def before(self, call: ForwardCall) -> None:
        """Change `call.inputs`. All ranks have passed all checks, so collectives are safe."""

    def after(self, call: ForwardCall, output: Any) -> Any:
        """Return the output, changed or as it is."""
        return output

    def reset(self) -> None:
        """Drop what is stored for the forward."""


class ModelTraits:
    """Facts about a model's class and config that decide its stages: read once, for all forwards."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.name = type(model).__name__  # before FSDP replaces it
        self.signature = inspect.signature(model.forward)
        self.own_cache = has_own_cache(model)  # it accepts no other cache with `use_cache`
        self.labels_per_token = model.loss_type in ("ForMaskedLM", "ForTokenClassification")  # not shifted
        self.labels_per_row = model.loss_type == "ForSequenceClassification"  # or a reward model
        self.top_k = router_top_k(model)  # experts per token, if the model's router loss is known
        self.dropout = attention_dropout(model)  # of the first attention layer that has it
        self.own_positions = own_positions(model)  # how the model computes position ids from tokens or mask
        self.rotary = any("Rotary" in type(module).__name__ for module in model.modules())  # negative ones are allowed
        self.rotary_3d = hasattr(core_of(model), "compute_3d_position_ids")  # axes of time, height and width
        self.encoders = encoders_of(model)  # of pictures; none if the model takes tokens only
        # Ids of tokens whose embeddings the encoders make.
        self.placeholders = tuple(sorted({getattr(model.config, encoder.token) for encoder in self.encoders}))
        # Batch key that is 1 for tokens of images, which see each other.
        self.image_types = IMAGE_TYPES.get(model.config.model_type) if self.encoders else None
        self.reads_ids = self.own_positions is not None or bool(self.encoders)  # on the host

    def accepts(self, argument: str) -> bool:
        return argument in self.signature.parameters

    def positions(self, batch: Mapping[str, Any], past: int = 0) -> Tensor | None:
        """Return the position ids of a full batch behind `past` cached tokens, given or computed as the model would;
        None if they count along rows.
        """
        given: Tensor | None = batch.get("position_ids")
        return given if given is not None or self.own_positions is None else self.own_positions(batch, past)


@dataclass
class ForwardOptions:
    """Options of the next forwards that are not arguments of the call: what a trainer has set, not facts."""

    compute_logits: bool = False  # in training with labels too
    loss_only: bool = False  # compute no logits in evaluation either, if there are labels
    rows: int | None = None  # of a classifier's batch that count in its loss; None for all
    # Returns the output of `fused_lm_head=True`, from logits and labels of my tokens; None: `score_for_trl`.
    score: Callable[[ForwardCall, Any, Tensor], Any] | None = None
    check: Callable[[ForwardCall], None] | None = None  # of a call with `fused_lm_head=True`: raises on every rank
    shared_prefixes: bool = False  # computed once, in calls with `fused_lm_head=True`
    token_loss: TokenLoss = CROSS_ENTROPY  # of which the loss of tokens is the mean
    replicas: int = 1  # a caller multiplies a loss with `num_items_in_batch` by this, so it is divided by it
    noise_tokens: int | None = None  # by which NEFTune scales its noise; None for those of the batch
    token_losses: Callable[[Tensor, Tensor, Tensor], None] | None = None  # gets my tokens' losses, labels, positions

    @contextlib.contextmanager
    def during(self, **options: Any) -> Iterator[None]:
        """Within this, have these options."""
        before = {name: getattr(self, name) for name in options}
        vars(self).update(options)
        try:
            yield
        finally:
            vars(self).update(before)


@dataclass
class ForwardCall:
    """One forward in progress, shared by its stages; what layers need of it is `info`."""

    model: PreTrainedModel
    traits: ModelTraits
    options: ForwardOptions
    batch: dict[str, Any]  # the caller's arguments by name; a KV cache that is no `ShardedCache` under "cache"
    sp: SequenceSharding  # of the ranks that share the batch, as in `info`: they compare it also without `info`
    scored: bool = False  # called with `fused_lm_head=True`
    cache: ShardedCache | None = None
    packed: PackedRows | None = None  # the batch's rows as one row, with `shared_prefixes`
    info: SequenceInfo = field(init=False)  # of the stage that reads the batch, in its `check`
    whole: dict[str, Any] = field(default_factory=dict)  # the batch without a cache, as `read_batch` returns it
    inputs: dict[str, Any] = field(default_factory=dict)  # what the model's forward receives; empty in checks
    router_loss: Tensor | None = None  # the load-balancing loss of all ranks
    patches: dict[str, int] = field(default_factory=dict)  # by modality: of the rank that encodes most
    pictures: dict[str, Any] = field(default_factory=dict)  # what ranks compare besides the batch

    def name_arguments(self, args: tuple[Any, ...]) -> None:
        """Add the positional arguments to the batch by name, and take the cache out of it."""
        signature = self.traits.signature
        named = dict(zip(signature.parameters, args, strict=False))
        if named.keys() & self.batch.keys() or len(named) < len(args):
            signature.bind(*args, **self.batch)  # raises Python's own error
        self.batch = named | self.batch
        if "longspan" in self.batch:
            raise LongspanError(
                "this batch was cut by longspan.shard_batch, which is for models of your own; pass the whole batch to "
                "the parallelized model, which shards it itself"
            )
        cache = take_cache(self.batch)
        if isinstance(cache, ShardedCache):
            self.cache = cache
        elif cache is not None:
            self.batch["cache"] = cache

    def note_token_losses(self, losses: Tensor, labels: Tensor) -> None:
        """Pass the losses of my tokens to a caller that asked for them."""
        if self.options.token_losses is not None:
            positions = self.inputs["position_ids"]
            self.options.token_losses(losses, labels, positions if positions.dim() < 3 else positions[0])

    @property
    def has_labels(self) -> bool:
        return has_labels(self.batch)

    @property
    def wants_router_loss(self) -> bool:
        default = getattr(self.model.config.get_text_config(), "output_router_logits", False)
        requested = self.batch.get("output_router_logits")
        return bool(default if requested is None else requested)
