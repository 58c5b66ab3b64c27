"""One call that shards a Hugging Face language model: its sequence, and with FSDP2 its weights.

    model = longspan.parallelize(model, sp)
    out = model(**batch)            # the same full batch on every rank of a sequence group
    out.loss.backward()             # gradients of the mean over the global batch

Nothing of the training loop changes. Before the forward the batch is cut; inside, tokens stay where they are, but for
two All-to-Alls around each attention; at the end the loss is the exact mean of the whole batch.
"""

from __future__ import annotations

import functools
import json
import warnings
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
import transformers
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from longspan.attn.kernels.choice import AnyKernel, table_of
from longspan.comm.arguments import check_sharding
from longspan.comm.consistency import ReplicaCheck, broadcast_weights, check_same_model
from longspan.comm.digests import digests_of, weights_of
from longspan.core.errors import LongspanError
from longspan.core.heads import HeadShard, split_groups, split_heads
from longspan.core.memory import FASTEST, Memory, MemoryLevel, memory_of
from longspan.core.validation import check_flag, checked_call, format_value
from longspan.hf.checks.batches import BatchCheck
from longspan.hf.checks.guards import Guard, RestCheck, forbid
from longspan.hf.checks.savers import refuse_savers
from longspan.hf.checks.version import check_version
from longspan.hf.forward.hooks import ForwardHooks
from longspan.hf.forward.registry import ModelBinding, bind_layers
from longspan.hf.generate import Generate
from longspan.hf.memory_options import Auto, MemoryManager, MemoryModules
from longspan.hf.support import (
    Place,
    attention_dropout,
    check_model,
    draws,
    innermost_decoder,
    refuse_dropout,
    switch_dropout_off,
    transformers_model,
)
from longspan.hf.tensor_parallel.layers import TensorParallel, TensorStyle, check_style, tensor_plan
from longspan.hf.weights.fsdp import apply_fsdp, check_cpu_offload, gather_group_of
from longspan.hf.weights.gradients import GradientSum
from longspan.memory.offload.choice import store_for

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from longspan.comm.mesh import SequenceSharding

Model = TypeVar("Model", bound=nn.Module)


@checked_call(sp=lambda _, sp: check_sharding(sp))
def parallelize(
    model: Model,
    sp: SequenceSharding,
    *,
    fsdp: bool = True,
    mp_policy: MixedPrecisionPolicy | None = None,
    kernel: AnyKernel = "auto",
    weights: Literal["same", "broadcast"] = "same",
    check_batches: int | None = None,
    check_weights: int = 100,
    check_at_rest: bool = False,
    logits: bool = False,
    memory: MemoryLevel | Memory = "fastest",
    dropout: float | None = None,
    tensor_style: TensorStyle = "tp",
) -> Model:
    """Shard the sequence of a Hugging Face language model over `sp`, and with `fsdp` its weights over data x sequence.

    In place, and the model is returned. Call it on every rank, with the same weights, after PEFT has wrapped the model
    and before the optimizer is made. What must be alike on all ranks (options, config, parameters, versions, weights)
    is compared first.

    Args:
        model: a transformers causal or masked LM, a classifier of tokens, one of sequences that scores every token and
            takes the last one's (a reward model), or a PEFT model around one, on its device. With `fsdp` it may still
            be on the CPU: FSDP2 moves it layer by layer, each rank its shard.
        sp: how the sequence lies over the ranks.
        fsdp: shard weights, gradients and optimizer state by FSDP2: one group per decoder layer, gathered one layer
            ahead in forward and backward, released after forward; embedding, and final norm and head, are groups of
            their own unless they are tied (`longspan.hf.weights.fsdp`). False: every rank holds all weights, and
            gradients are summed over all ranks at the end of each backward.
        mp_policy: FSDP's mixed precision; by default everything stays in the parameters' dtype.
        kernel: the local attention, by name or any callable; see `longspan.attention`.
        weights: "same": the ranks must hold the same weights, which a digest of each parameter and buffer shows.
            "broadcast": every rank gets those of the first.
        check_batches: for so many first forwards, compare over the ranks what the model is called with, before anything
            in it could hang, and name the ranks that were given another batch (or no labels, another shape, another
            mode). None: in every forward, which costs one gather of five numbers between the hosts. From the fourth
            forward on, the values of a batch on a GPU are compared without waiting for it: by the loss's all-reduce, so
            that a difference is reported some forwards later, and none where there are no labels. 0: never.
        check_weights: with `fsdp=False`, every so many training forwards compare a digest of all weights over the
            ranks, which should update them alike. 0: never.
        check_at_rest: checksums of this rank's weights after each step of the optimizer, compared before its next one
            and at each forward: finds memory that changed by itself. Each costs one pass over this rank's weights.
        logits: True: the model makes its logits in training too. By default a forward in training that is given labels
            does not: head and cross entropy go tile by tile over the tokens, so that the largest tensor of a step
            never exists, and `out.logits` is None (`longspan.losses.cross_entropy`). Elsewhere logits are made.
        memory: what is done in training to save memory: "fastest" (nothing beyond that), "longest" (every memory option
            that stays on the device), "auto" (the fastest memory options that fit this device, by the planner, chosen
            at the first training forward and again whenever a batch is larger than all before), or a `longspan.Memory`
            that names each memory option. `longspan.explain(model)` says what was taken, and why.
        dropout: 0.0: every dropout of the model is set to 0, in its layers and its config, so that a model with dropout
            in its attention can be trained. None: the model's stay; those in attention are refused in training, since
            what they draw would depend on the number of ranks. Nothing else is taken.
        tensor_style: over the mesh's `tensor` axis, where it is more than 1: "tp": every rank of a tensor group holds
            the whole residual stream, and each layer sums it twice. "megatron-sp": each holds its tokens of it, which
            are gathered before attention and MLP, and summed and scattered behind; see
            `longspan.hf.tensor_parallel.layers`.

    Returns:
        `model`. Its forward takes the full batch, or one cut by `longspan.shard_batch` (with `shift=False` for a masked
        LM or a classifier of tokens); `loss` is the mean over every unmasked token of the global batch, equal on every
        rank; `logits` are those of this rank's tokens, where they are made. Of a classifier of sequences `loss` is the
        mean over the rows of the global batch, and `logits` are those of this replica's rows, equal on every rank of
        its sequence group; a loss of one's own that each of these ranks makes of them has the gradients of one. With
        `output_router_logits=True` a mixture of experts adds its load-balancing loss over all tokens of the global
        batch, `aux_loss`. There is no KV cache: `use_cache` is off.

    Raises:
        LongspanError: on every rank alike: for a model that would not compute the same when sharded (naming the layer
            and the reason), heads that `sp` cannot hold, options that do not go together, or ranks that were given
            different models, weights or options (naming the ranks and what differs).
    """
    options = {
        "fsdp": fsdp,
        "mp_policy": mp_policy,
        "kernel": kernel,
        "weights": weights,
        "check_batches": check_batches,
        "check_weights": check_weights,
        "check_at_rest": check_at_rest,
        "logits": logits,
        "memory": memory,
        "dropout": dropout,
        "tensor_style": tensor_style,
    }
    inner: PreTrainedModel | None = None
    facts, digests, problem = dict[str, str](), dict[str, int](), None
    memory_options, store, auto = FASTEST, None, None
    try:
        memory_options = FASTEST if memory == "auto" else memory_of(memory)
        inner = _checked(model, sp, options)
        _check_memory_options(inner, memory_options, fsdp=fsdp)
        if sp.tensor_size > 1 and memory_options.head_loss != "tiled":
            raise LongspanError(
                f"head_loss={memory_options.head_loss!r} knows no vocabulary cut over `tensor={sp.tensor_size}`; "
                "use 'tiled'"
            )
        auto = Auto(inner, sp, fsdp, mp_policy, tensor_style) if memory == "auto" else None
        check_cpu_offload(sp.device, memory_options.cpu_offload)
        store = store_for(memory_options, sp.device)
        facts = _facts(model, sp, options)
        if sp.job_size > 1 and weights == "same":
            digests = digests_of(weights_of(model))
    except Exception as error:  # of any kind: the other ranks must hear of it
        problem = error
    check_same_model(sp, facts, digests, problem)
    check_version(sp, parallelize)
    assert inner is not None
    if dropout is not None:
        switch_dropout_off(inner)
    if weights == "broadcast":
        broadcast_weights(inner, sp)
    if sp.data_rank == sp.rank == sp.tensor_rank == 0:  # it is the same on all
        _warn_of_idle_ranks(inner, sp)
        _warn_of_dropout(inner)
    binding = bind_layers(inner, sp, kernel, memory_options)
    hooks = _set_hooks(inner, sp, binding, MemoryManager(inner, memory_options, store, auto), logits)
    sharded = sp.shards_weights(fsdp=fsdp, cpu_offload=memory_options.cpu_offload)
    sums = not fsdp and sp.world_size > 1
    if sp.job_size > 1:
        hooks.batches = BatchCheck(sp, check_batches, ReplicaCheck(inner, check_weights if sums else 0))
    if sp.job_size > 1 or sharded:
        hooks.guard = Guard(inner, sp, mp_policy)
        forbid(model, inner)
        if sp.tensor_size > 1:
            hooks.guard.remember(inner)
            plan = tensor_plan(inner, sp.tensor_size, sp.tensor_rank, tensor_style, sp.size)
            hooks.tensor = TensorParallel(inner, sp, tensor_style, plan, hooks.head)
        if sharded:
            if hooks.tensor is None:
                hooks.guard.remember(inner)
            apply_fsdp(inner, sp, mp_policy, cpu_offload=memory_options.cpu_offload)
            inner.register_forward_hook(hooks.give_back)
            if hooks.head is not None:
                hooks.head.gather = functools.partial(gather_group_of, inner, hooks.head.module)
        elif sums:
            hooks.gradients = GradientSum(inner.parameters(), sp)
        if hooks.guard.sharded:
            refuse_savers(model, inner)
    if check_at_rest:
        hooks.rest = RestCheck(inner)
    return model


def check_ahead(
    model: PreTrainedModel,
    *,
    device: torch.device,
    ring_size: int,
    fsdp: bool,
    kernel: AnyKernel,
    memory_options: Memory,
) -> None:
    """What `parallelize`, or the first forward in training, would refuse of a model, before there are any ranks.

    Args:
        model: it may be on the meta device.
        device: of the ranks.
        ring_size: blocks of a sequence.
        fsdp: whether weights are sharded where there are several ranks.
        kernel: the local attention.
        memory options: of memory.

    Raises:
        LongspanError: naming the layer and the reason.
    """
    check_model(model, Place(device, ring_size), kernel, recompute_all_to_all=memory_options.recompute_all_to_all)
    _check_memory_options(model, memory_options, fsdp=fsdp)
    refuse_dropout(attention_dropout(model))


def _check_memory_options(model: PreTrainedModel, memory_options: Memory, *, fsdp: bool) -> None:
    MemoryModules(model).check(memory_options)
    if memory_options.cpu_offload and not fsdp:
        raise LongspanError("cpu_offload=True is FSDP's, and fsdp is off; leave one of them")


def _checked(model: nn.Module, sp: SequenceSharding, options: dict[str, Any]) -> PreTrainedModel:
    """The transformers model inside, or what speaks against sharding it."""
    inner = transformers_model(model)
    name = type(inner).__name__
    if hasattr(inner, "longspan_hooks"):
        raise LongspanError(f"{name} is parallelized already; a model is given to parallelize once")
    check_style(options["tensor_style"], sp.tensor_size)
    fsdp, mp_policy, weights = (options[option] for option in ("fsdp", "mp_policy", "weights"))
    if mp_policy is not None and not isinstance(mp_policy, MixedPrecisionPolicy):
        raise LongspanError(
            f"mp_policy={format_value(mp_policy)} is no policy; give torch.distributed.fsdp.MixedPrecisionPolicy("
            "param_dtype=torch.bfloat16, reduce_dtype=torch.float32)"
        )
    for option in ("fsdp", "check_at_rest", "logits"):
        check_flag(option, options[option])
    memory_options = FASTEST if options["memory"] == "auto" else memory_of(options["memory"])
    if mp_policy is not None and not sp.shards_weights(fsdp=fsdp, cpu_offload=memory_options.cpu_offload):
        why = "with fsdp=False" if not fsdp else "on one rank, where nothing is sharded,"
        raise LongspanError(f"mp_policy is FSDP's; {why} use torch.autocast, or cast the model")
    if weights not in ("same", "broadcast"):
        raise LongspanError(f"weights={weights!r} is unknown; choose 'same' or 'broadcast'")
    dropout = options["dropout"]
    if dropout is not None and (isinstance(dropout, bool) or dropout != 0):
        raise LongspanError(
            f"dropout={format_value(dropout)}: it takes 0.0 alone, which switches the model's dropout off; other "
            "values are set in the config that the model is made from"
        )
    for option in ("check_batches", "check_weights"):
        value = options[option]
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            raise LongspanError(f"{option}={value!r} must be a number of forwards, 0 for none")
    for parameter, p in inner.named_parameters():
        if isinstance(p, DTensor):
            raise LongspanError(
                f"parameter {parameter} of {name} is sharded already; give longspan.parallelize the plain model, it "
                f"shards weights by itself (fsdp=True)"
            )
        if p.is_meta and (not fsdp or weights == "broadcast"):
            raise LongspanError(
                f"parameter {parameter} of {name} is on the meta device and has no values; load them first, or use "
                f"fsdp=True with weights='same', then model.to_empty and load its shards"
            )
    recompute_all_to_all = options["memory"] != "auto" and memory_of(options["memory"]).recompute_all_to_all
    check_model(inner, Place(sp.device, sp.ring_size), options["kernel"], recompute_all_to_all=recompute_all_to_all)
    if sp.tensor_size > 1:
        tensor_plan(inner, sp.tensor_size, sp.tensor_rank, options["tensor_style"], sp.size)
    _shards_of(inner, sp)
    return inner


def _facts(model: nn.Module, sp: SequenceSharding, options: dict[str, Any]) -> dict[str, str]:
    """What must be alike on every rank, by the name that a message gives it; weights aside."""
    config = getattr(model, "config", None)
    settings = config.to_dict() if isinstance(config, transformers.PreTrainedConfig) else {}
    facts = {option: getattr(value, "__qualname__", repr(value)) for option, value in options.items()}
    facts["kernel"] = getattr(options["kernel"], "name", facts["kernel"])
    facts |= {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "the kernel table's rows": table_of(options["kernel"]).rows_of(sp.device),  # of this GPU, if one has its own
        "the mesh": f"{tuple(sp.mesh.shape)}, {sp.layout.kind}, ring_impl={sp.ring_impl!r}, {sp.kv_replication}, "
        f"overlap_chunks={sp.overlap_chunks}, wire_dtype={sp.wire_dtype}",
        "the model's class": type(model).__name__,
    }
    # Where files lie may differ from machine to machine.
    facts |= {f"config.{k}": json.dumps(v, default=str) for k, v in settings.items() if k not in ("_name_or_path",)}
    for kind, tensors in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, x in tensors:
            trained = ", trained" if x.requires_grad else ""
            values = ", no values (meta device)" if x.is_meta else ""
            facts[f"{kind} {name}"] = f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}{trained}{values}"
    return facts


def _set_hooks(
    model: PreTrainedModel, sp: SequenceSharding, binding: ModelBinding, memory_options: MemoryManager, logits: bool
) -> ForwardHooks:
    hooks = ForwardHooks(model, sp, binding, logits=logits, memory_options=memory_options)
    model.longspan_hooks = hooks
    model.register_forward_pre_hook(hooks.enter, with_kwargs=True)
    model.register_forward_hook(hooks.leave)
    if model.can_generate():
        innermost_decoder(model).register_forward_hook(hooks.keep_last)
        model.generate = Generate(model, sp)
    model.loss_function = hooks.loss
    return hooks


def _shards_of(model: PreTrainedModel, sp: SequenceSharding) -> tuple[HeadShard, ...]:
    """The heads of each Ulysses rank; refused where the mesh cannot hold them."""
    config = model.config.get_text_config()
    q_heads: int = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or q_heads
    mine = split_groups(q_heads, kv_heads, sp.tensor_size)[sp.tensor_rank]
    return split_heads(mine.q_heads, mine.kv_heads, sp.ulysses_size, kv_replication=sp.kv_replication)


def _warn_of_idle_ranks(model: PreTrainedModel, sp: SequenceSharding) -> None:
    shards = _shards_of(model, sp)
    idle, q_heads = sum(shard.q_heads == 0 for shard in shards), shards[-1].q_stop
    if idle:
        fits = max(u for u in range(1, q_heads + 1) if sp.size % u == 0)
        warnings.warn(
            f"`ulysses={sp.ulysses_size}` is more than the model's {q_heads} query heads: {idle} of them compute no "
            f"attention; try `ulysses={fits}, ring={sp.size // fits}`",
            stacklevel=3,
        )


def _warn_of_dropout(model: nn.Module) -> None:
    active = [name for name, module in model.named_modules() if draws(module)]
    if active:
        warnings.warn(
            f"{len(active)} dropout layers ({active[0]}, ...): each rank draws for its own tokens, so a run depends on "
            f"the number of ranks; give every rank a seed of its own",
            stacklevel=3,
        )
