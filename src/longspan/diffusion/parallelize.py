"""Shard a diffusion transformer: check it on every rank, split and join its tokens, average its gradients."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
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
from longspan.diffusion.check import Known, at_entrance, read, shard_tokens
from longspan.diffusion.structure import map_tensors, named_arguments, unknown_block
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
    tokens = Tokens(sp, gather_output=options.gather_output)
    known = read(model, sp)
    entrance = _Entrance(model, sp, known, tokens, options)
    if not (options.gather_output or known.keeps_tokens):
        raise LongspanError(
            f"{entrance.name} has no single projection of its tokens at the end; leave out gather_output=False"
        )
    attention = f"{shard_tokens(model, known.structure, tokens)} layers by {_method(sp)}"
    if not options.gather_output:
        tokens.keep_output(model)
    gradients = None
    if sp.shards_weights(fsdp=options.fsdp, cpu_offload=False):
        _apply_fsdp(model, sp, known.structure.all_lists, options.mp_policy)
        model.register_forward_hook(_reshard_without_backward)
        refuse_saving_shards(model, model, _SAVE)
    elif sp.fsdp_size > 1:
        gradients = GradientAverage(model.parameters(), sp)
    refuse_copies(model)
    model.longspan_state = DiffusionState(sp, attention, gradients, tokens)
    entrance.gradients = gradients
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


def _method(sp: SequenceSharding) -> str:
    if sp.ring_size == 1:
        return "Ulysses"
    return "a ring" if sp.ulysses_size == 1 else "Ulysses in a ring"


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


class _Entrance:
    """A forward pre-hook: compare the inputs over the ranks, let their gradients be averaged, and check them."""

    def __init__(
        self, model: Any, sp: SequenceSharding, known: Known, tokens: Tokens, options: ParallelizeOptions
    ) -> None:
        self.sp, self.known, self.tokens = sp, known, tokens
        self.name = type(model).__name__  # FSDP renames the class
        self.signature = inspect.signature(type(model).forward)
        self.accepted = {*known.arguments, "return_dict", *_ATTENTION_ARGUMENTS}
        self.gradients: GradientAverage | None = None
        self.inputs = None
        if sp.world_size > 1:
            replicas = ReplicaCheck(0 if options.fsdp else options.check_weights)
            self.inputs = BatchCheck(sp, options.check_batches, replicas)

    def __call__(self, model: Any, args: Any, kwargs: Any) -> tuple[tuple[()], dict[str, Any]]:
        if self.gradients is not None:
            self.gradients.forget_unfinished()  # if the last backward raised
        whole, mine, problem = dict(kwargs), dict[str, Any](), None
        try:
            whole = named_arguments(self.signature, model, args, kwargs)
            self._check(model, whole)
            if self.gradients is not None:
                self.gradients.check(model)
            known = self.known
            mine = at_entrance(self._replicated(whole), known.structure, self.tokens, known.time_per_token)
        except Exception as error:  # of any kind: the other ranks must raise too
            problem = error
        if self.inputs is not None:
            self.inputs.compare(model, _flat(whole), False, problem, self.sp)
        elif problem is not None:
            raise problem
        self.tokens.split_before_checkpoints(model)
        return (), mine

    def _replicated(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Average the gradient of each input over the sequence group, as the gradients of weights are averaged."""
        group = self.sp.group
        if group is None:
            return arguments
        averaged: dict[str, Any] = map_tensors(
            arguments, lambda _, x: scale_gradient(replicate(x, group_name(group)), 1 / self.sp.size)
        )
        return averaged

    def _check(self, model: Any, arguments: Mapping[str, Any]) -> None:
        name = self.name
        given = {key for key, value in arguments.items() if value is not None}
        if given - self.accepted:
            raise LongspanError(
                f"`{min(given - self.accepted)}` is not supported for {name} sharded over ranks; leave it out"
            )
        for key in given & {*_ATTENTION_ARGUMENTS}:
            if set(arguments[key]) - {"scale"}:
                raise LongspanError(f"`{key}` may hold a LoRA `scale` alone, got {sorted(arguments[key])}")
        _check_hooks(model)
        if problem := unknown_block(model, self.known.structure):  # as after a processor was set
            raise LongspanError(problem)
        self.known.check(arguments, model.config, self.sp.size)


def _flat(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments with each value of a tuple, list or dict by its own name."""
    flat: dict[str, Any] = {}
    for name, value in arguments.items():
        if isinstance(value, tuple | list):
            flat |= _flat({f"{name}[{i}]": each for i, each in enumerate(value)})
        elif isinstance(value, dict):
            flat |= _flat({f"{name}[{key!r}]": each for key, each in value.items()})
        else:
            flat[name] = value
    return flat
