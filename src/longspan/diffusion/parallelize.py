"""Shard a diffusion transformer: check it on every rank, split and join its tokens, average its gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from longspan.comm.collectives import replicate, scale_gradient
from longspan.comm.mesh import SequenceSharding, group_name
from longspan.comm.weights import (
    ReplicaCheck,
    agree_on_model,
    broadcast_weights,
    check_float8_scales,
    digests_to_compare,
)
from longspan.compat.friends_api import hooks_of, is_parallel, version_of_diffusers
from longspan.compat.torch_api import average_gradients
from longspan.core.errors import LongspanError
from longspan.core.validation import check_flag
from longspan.diffusion.attention import shard_tokens
from longspan.diffusion.check import Known, at_entrance, read
from longspan.diffusion.structure import leaves, map_tensors, named_arguments, unknown_block
from longspan.diffusion.tokens import Tokens
from longspan.hf.batch.compare import BatchCheck
from longspan.hf.forward.misuse import refuse_copies, refuse_saving_shards
from longspan.hf.model.support import draws
from longspan.hf.preconditions import ParallelizeOptions, facts_of
from longspan.hf.state import DiffusionState
from longspan.hf.weights.fsdp import reshard
from longspan.hf.weights.gradients import GradientAverage

_ATTENTION_ARGUMENTS = ("attention_kwargs", "joint_attention_kwargs")
_SAVE = (
    "gather them on every rank by torch.distributed.checkpoint.state_dict.get_model_state_dict with "
    "full_state_dict=True, and load them into a plain model"
)
_OPTIONS = ("fsdp", "mp_policy", "weights", "check_batches", "check_weights", "gather_output")


def shard_diffusion_model(model: Any, sp: SequenceSharding, options: ParallelizeOptions) -> None:
    """Shard a diffusion transformer in place, as `longspan.parallelize` documents. Collective."""

    for name, default in vars(ParallelizeOptions()).items():
        if name not in _OPTIONS and getattr(options, name) != default:
            raise LongspanError(f"`{name}` is an option of language models; leave it out for a model of diffusers")

    def check() -> tuple[None, dict[str, str], dict[str, int]]:
        _check_alone(model, sp, options)
        facts = facts_of(model, sp, options) | {"diffusers": version_of_diffusers()}
        return None, facts, digests_to_compare(model, sp, options.weights)

    agree_on_model(sp, check)
    if options.weights == "broadcast":
        broadcast_weights(model, sp)
    tokens, known, name = Tokens(sp, gather_output=options.gather_output), read(model, sp), type(model).__name__
    if not (options.gather_output or known.keeps_tokens):
        raise LongspanError(f"{name} has no single projection of its tokens at the end; leave out gather_output=False")
    layers = shard_tokens(model, known.structure, tokens)
    if not options.gather_output:
        model.register_forward_hook(tokens.output_of_rank)
    gradients = batches = None
    if sp.shards_weights(fsdp=options.fsdp, cpu_offload=False):
        _apply_fsdp(model, sp, known.structure.all_lists, options.mp_policy)
        model.register_forward_hook(_reshard_without_backward)
        refuse_saving_shards(model, model, _SAVE)
    elif sp.fsdp_size > 1:
        gradients = GradientAverage(model.parameters(), sp)
    if sp.world_size > 1:
        batches = BatchCheck(sp, options.check_batches, ReplicaCheck(0 if options.fsdp else options.check_weights))
    refuse_copies(model)
    model.longspan_state = DiffusionState(sp, layers, gradients, tokens)
    entrance = _Entrance(name, known, tokens, batches, gradients)
    model.register_forward_pre_hook(entrance, with_kwargs=True)


# ---------------------------------------------------------------------------------------------------------------------
# Checks of the model.


def _check_alone(model: Any, sp: SequenceSharding, options: ParallelizeOptions) -> None:
    if hasattr(model, "longspan_state"):
        raise LongspanError(f"{type(model).__name__} is parallelized already; a model is given to parallelize once")
    check_flag("gather_output", options.gather_output)
    if is_parallel(model):
        raise LongspanError(f"{type(model).__name__} is parallelized by diffusers' enable_parallelism; load it again")
    if sp.tensor_size > 1:
        raise LongspanError(
            f"diffusion transformers have no tensor axis, got tensor={sp.tensor_size}; use ring or ulysses instead"
        )
    _check_hooks(model)
    for path, module in model.named_modules():
        heads = getattr(module, "heads", None) or getattr(module, "num_heads", None)
        if hasattr(module, "processor") and isinstance(heads, int) and heads < sp.ulysses_size:
            raise LongspanError(
                f"{path} has {heads} heads, which {sp.ulysses_size} ranks cannot share; use `ulysses={heads}` and a "
                f"ring"
            )
    dropout = next((name for name, module in model.named_modules() if draws(module)), None)
    if dropout is not None:
        raise LongspanError(f"{dropout} has dropout, which would depend on the number of ranks; set it to 0")
    check_float8_scales(model, sp)


def _check_hooks(model: nn.Module) -> None:
    """Raise for a hook of diffusers, which users may add after `parallelize`, too."""
    for path, module in model.named_modules():
        for hook in hooks_of(module):
            raise LongspanError(
                f"{path or type(model).__name__} has diffusers' {hook}, which would decide or compute on one rank's "
                f"tokens; remove it, as by disable_cache()"
            )


def _apply_fsdp(model: Any, sp: SequenceSharding, lists: Iterable[str], mp_policy: MixedPrecisionPolicy | None) -> None:
    """Shard each block, and then all other weights, by FSDP. Gradients are averaged."""
    options: dict[str, Any] = {"mesh": sp.fsdp_mesh, "mp_policy": mp_policy or MixedPrecisionPolicy()}
    for name in lists:
        for block in model.get_submodule(name):
            fully_shard(block, **options)
    fully_shard(model, **options)
    average_gradients(model, sp.fsdp_size)


def _reshard_without_backward(model: Any, args: Any, output: Any) -> None:
    """Release the weights outside the blocks after sampling, or the next forward would not see an optimizer's step."""
    if not torch.is_grad_enabled():
        reshard(model)


# ---------------------------------------------------------------------------------------------------------------------
# The entrance of a forward.


@dataclass(frozen=True)
class _Entrance:
    """A forward pre-hook: compare the inputs over the ranks, let their gradients be averaged, and check them."""

    name: str  # of the model's class, which FSDP renames
    known: Known
    tokens: Tokens
    batches: BatchCheck | None
    gradients: GradientAverage | None

    def __call__(self, model: Any, args: Any, kwargs: Any) -> tuple[tuple[()], dict[str, Any]]:
        if self.gradients is not None:
            self.gradients.forget_unfinished()  # if the last backward raised
        whole, mine, problem = dict(kwargs), dict[str, Any](), None
        try:
            whole = named_arguments(model, args, kwargs)
            self._check(model, whole)
            if self.gradients is not None:
                self.gradients.check(model)
            mine = at_entrance(self._replicated(whole), self.known.structure, self.tokens)
        except Exception as error:  # of any kind: the other ranks must raise too
            problem = error
        if self.batches is not None:
            self.batches.compare(model, leaves(whole), False, problem, self.tokens.sp)
        elif problem is not None:
            raise problem
        self.tokens.split_before_checkpoints(model)
        return (), mine

    def _replicated(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Average the gradient of each input over the sequence group, as the gradients of weights are averaged."""
        sp = self.tokens.sp
        if sp.group is None:
            return arguments
        name = group_name(sp.group)
        averaged: dict[str, Any] = map_tensors(arguments, lambda _, x: scale_gradient(replicate(x, name), 1 / sp.size))
        return averaged

    def _check(self, model: Any, arguments: Mapping[str, Any]) -> None:
        given = {key for key, value in arguments.items() if value is not None}
        if others := given - {*self.known.arguments, "return_dict", *_ATTENTION_ARGUMENTS}:
            raise LongspanError(f"`{min(others)}` is not supported for {self.name} sharded over ranks; leave it out")
        for key in given & {*_ATTENTION_ARGUMENTS}:
            if set(arguments[key]) - {"scale"}:
                raise LongspanError(f"`{key}` may hold a LoRA `scale` alone, got {sorted(arguments[key])}")
        _check_hooks(model)
        if problem := unknown_block(model, self.known.structure):  # as after a processor was set
            raise LongspanError(problem)
        self.known.check(arguments, model.config, self.tokens.sp.size)
