"""The forward of a parallelized model: hooks, put there by `longspan.parallelize`, that run a list of stages.

Each stage has one concern (`Stage`); all share the `ForwardCall` in progress. Their methods run in this order:

    check    in list order; may raise; reads the whole batch, changes no input, runs no collective
             then all ranks compare their batches and errors: if any rank has raised, all raise
    before   in list order; cuts the batch, changes the inputs, may run collectives
             the model's own forward
    after    in reverse list order; changes the output
    reset    drops what is stored for this forward, also if it raised

A rank that raised alone would leave the others waiting in the next collective.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from longspan.compat.torch_api import not_compiled
from longspan.compat.transformers_api import take_cache
from longspan.core.errors import LongspanError
from longspan.hf.batch.compare import BatchCheck
from longspan.hf.batch.host import hide_from_fsdp, read_on_host, unhide
from longspan.hf.batch.shard import WIDTH, sharding_of
from longspan.hf.batch.trees import pack_batch
from longspan.hf.cache.cached import CachedTokens
from longspan.hf.forward.logits import DeferLogits, SelectLogits
from longspan.hf.forward.logprobs import ScoredLabels
from longspan.hf.forward.loss import GlobalLoss, HeldBackLabels, PooledHead, RouterLoss
from longspan.hf.forward.misuse import ModelChangeCheck
from longspan.hf.forward.random import RandomStream, WholeNoise
from longspan.hf.forward.shard_batch import ShardBatch
from longspan.hf.forward.stage import ForwardCall, ForwardOptions, Stage
from longspan.hf.forward.vision import EncodePictures, VisionTower
from longspan.hf.model.support import innermost_decoder
from longspan.hf.state import ParallelState
from longspan.hf.weights.fsdp import reshard


class ForwardHooks:
    """The stages of a model, and the hooks that run them.

    On one rank there is no `batches` (compares the ranks' batches) and no `model_changes`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        state: ParallelState,
        batches: BatchCheck | None,
        model_changes: ModelChangeCheck | None,
        scales: Stage | None,
        *,
        compute_logits: bool,
    ) -> None:
        traits, sp, tensor, head = state.traits, state.sp, state.tensor, state.head
        self.traits, self.sp, self.batches = traits, sp, batches
        self.options = ForwardOptions(compute_logits=compute_logits)
        self.losses = GlobalLoss(sp)
        self.running: tuple[ForwardCall, list[Stage]] | None = None
        self.returned_tokens: tuple[int, int] | None = None  # of a whole batch's logits without a loss: mine of all
        self.model, self.shards_weights, self.replays = model, False, False
        self.no_inference_mode = contextlib.ExitStack()

        self.model_changes, self.tensor, self.scales = model_changes, tensor, scales
        self.gradients = state.gradients
        self.vision = VisionTower(model, state) if traits.encoders else None
        self.encode = None if self.vision is None else EncodePictures(self.vision)
        self.shard, self.cached = ShardBatch(tensor, batches), CachedTokens(tensor)
        self.memory = state.memory
        self.defer, self.select, self.scored = DeferLogits(head), SelectLogits(head), ScoredLabels()
        pooled = PooledHead(model, traits.name, self.losses) if traits.labels_per_row else None
        self.held_back = pooled or HeldBackLabels(self.losses)
        self.router = RouterLoss(tensor)
        self.layers, self.mixers = state.attention, state.mixers
        self.noise, self.random = WholeNoise(sp), RandomStream(sp)

    def stages_of(self, call: ForwardCall) -> list[Stage]:
        """Compose the stages of one forward."""
        stages: list[Stage | None]
        if call.cache is not None:
            stages = [self.model_changes, self.tensor, self.cached, self.scales, self.vision, self.encode, self.layers]
            stages.append(self.mixers)
        else:
            stages = [
                self.model_changes,
                self.tensor,
                self.vision,
                self.shard,
                self.scales,
                self.memory,
                self.encode,
                self.defer,
                self.scored if call.scored else self.held_back,
                self.router if call.wants_router_loss else None,
                self.select,
                self.layers,
                self.mixers,
                self.noise,
                self.random,
            ]
        return [stage for stage in stages if stage is not None]

    def install(self, model: PreTrainedModel, *, fsdp: bool) -> None:
        """Put the hooks on the model, after FSDP's.

        FSDP's own hook gathers weights before `before`; after the forward it must see the final output, whose gradient
        gathers them again, so `after` runs first.
        """
        model.register_forward_pre_hook(self.before, with_kwargs=True)
        model.register_forward_hook(self.after, prepend=True)
        model.register_forward_hook(self.end, always_call=True)
        if model.can_generate():
            innermost_decoder(model).register_forward_hook(self.cached.keep_last)
        if fsdp:
            model.register_forward_hook(self.release_weights)
            model.register_forward_pre_hook(self.leave_inference_mode, prepend=True)
            model.register_forward_pre_hook(self.keep_on_host, prepend=True, with_kwargs=True)
            model.register_forward_hook(self.return_to_inference_mode, always_call=True)
        self.shards_weights = fsdp

    def replay_decode_steps(self) -> None:
        """Let the model's own forward, between the hooks, capture and replay decode steps of constant shapes."""
        if self.replays:
            return
        self.replays, forward = True, self.model.forward

        @functools.wraps(forward)
        def replaying(*args: Any, **kwargs: Any) -> Any:
            step = getattr(kwargs.get("longspan"), "step", None)
            if step is None or step.static is None:
                return forward(*args, **kwargs)
            return step.static.forward(forward, kwargs, kwargs["cache"])

        self.model.forward = replaying

    @not_compiled
    def before(self, model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run all checks, share their errors, then change the inputs."""
        self.returned_tokens = None
        if self.gradients is not None:
            self.gradients.forget_unfinished()  # if the last backward raised
        batch = unhide(kwargs)
        scored = bool(batch.pop("fused_lm_head", False))
        call = ForwardCall(model, self.traits, self.options, batch, self.sp, scored)
        stages: list[Stage] = []
        problem: Exception | None = None
        try:
            call.name_arguments(args)
            _choose_width(call)
            if call.cache is None:
                call.batch |= read_on_host(call.batch, ids=self.traits.reads_ids or self.options.shared_prefixes)
            if call.scored and self.options.shared_prefixes:
                call.packed = pack_batch(call.batch)
                call.batch = call.packed.entries
            stages = self.stages_of(call)
            self.running = call, stages
            for stage in stages:
                stage.check(call)
            if self.gradients is not None and call.cache is None:
                self.gradients.check(model)
        except Exception as error:  # of any kind: the other ranks must raise too
            problem = error
        try:
            self._raise_on_every_rank(call, problem)
        except Exception:
            self._reset()  # free the batch
            raise
        for stage in stages:
            stage.before(call)
        call.whole = {}  # free it during the forward
        return (), {**call.inputs, "longspan": call.info}

    @not_compiled
    def after(self, model: PreTrainedModel, args: Any, output: Any) -> Any:
        """Change the output, in reverse order."""
        assert self.running is not None
        call, stages = self.running
        for stage in reversed(stages):
            output = stage.after(call, output)
        if call.cache is None and not (call.has_labels or call.scored):
            mine, whole = call.info.local_length, call.info.length
            self.returned_tokens = (mine, whole) if mine != whole else None
        self._reset()
        return output

    @not_compiled
    def end(self, model: PreTrainedModel, args: Any, output: Any) -> None:
        """Drop what a forward has stored that raised."""
        self._reset()

    def _reset(self) -> None:
        _, stages = self.running or (None, [])
        self.running = None
        for stage in stages:
            stage.reset()

    def _raise_on_every_rank(self, call: ForwardCall, problem: Exception | None) -> None:
        """Raise on every rank if a rank has a problem, or if the ranks' batches differ (`BatchCheck`). Collective.

        They compare names, shapes, dtypes and the values on the CPU. Values on a GPU, for which the host waits, are
        compared in the first three forwards and every hundredth. `longspan generate` compares every 64th new token.
        """
        not_compared = call.cache is not None and call.cache.kv_placement.length + 1 < call.cache.compare_from
        if self.batches is None or not_compared:
            if problem is not None:
                raise problem
            return
        batch = {**call.batch, **call.pictures}
        if call.cache is not None:
            batch["cache"] = call.cache.describe()
        router_loss = call.cache is None and call.wants_router_loss
        self.batches.compare(call.model, batch, router_loss, problem, call.sp)

    @not_compiled
    def keep_on_host(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Hide a batch on the host from FSDP's hooks, which would move it to the GPU: `before` reads it on the host."""
        if self.sp.device.type == "cpu" or take_cache(dict(kwargs)) is not None:
            return None
        return args, hide_from_fsdp(kwargs)

    @not_compiled
    def leave_inference_mode(self, model: nn.Module, args: Any) -> None:
        """Before FSDP's hooks: its buffers, made in the first forward, could not be written in a later training."""
        if torch.is_inference_mode_enabled():
            self.no_inference_mode.enter_context(torch.inference_mode(False))
            self.no_inference_mode.enter_context(torch.no_grad())

    @not_compiled
    def return_to_inference_mode(self, model: nn.Module, args: Any, output: Any) -> None:
        """Also if the forward raised."""
        self.no_inference_mode.close()

    @not_compiled
    def release_weights(self, model: nn.Module, args: Any, output: Any) -> None:
        """Behind FSDP's hooks: release weights that a forward without gradients gathered, and no backward would."""
        if not torch.is_grad_enabled():
            reshard(model)


def _choose_width(call: ForwardCall) -> None:
    """Use the process groups of the batch's `sequence_width`; raise if the model cannot use this width."""
    asked = call.batch.get(WIDTH)
    if asked is None:
        return
    name = call.traits.name
    reason = (
        "a KV cache has one for all of its tokens" if call.cache is not None
        else f"{name} computes a loss of rows" if call.traits.labels_per_row
        else f"{name} shares pictures among all ranks of a sequence group" if call.traits.encoders
        else None
    )  # fmt: skip
    if reason is not None:
        raise LongspanError(f"`{WIDTH}={asked}` chooses the ranks of one batch, but {reason}; leave it out")
    call.sp = sharding_of(call.batch, call.sp)
    call.batch[WIDTH] = call.sp.size
