"""One call that shards a Hugging Face language model: its sequence, and with FSDP2 its weights.

    model = longspan.parallelize(model, sp)
    out = model(**batch)            # the same full batch on every rank of a sequence group
    out.loss.backward()             # gradients of the mean over the global batch

The training loop stays as it is. Before the forward the batch is sharded by tokens; each attention runs between two
all-to-alls (or in a ring); the loss is the exact mean over the global batch.
"""

from __future__ import annotations

import functools
import warnings
from typing import Literal, TypeVar

from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import PreTrainedModel

from longspan.attn.kernels.choice import AnyKernel
from longspan.comm.arguments import check_sharding
from longspan.comm.mesh import SequenceSharding
from longspan.comm.weights import ReplicaCheck, broadcast_weights
from longspan.compat.friends_api import is_model_of_diffusers
from longspan.compat.versions import untested
from longspan.core.experts import Experts
from longspan.core.memory import Memory, MemoryLevel
from longspan.diffusion.parallelize import shard_diffusion_model
from longspan.hf.batch.compare import BatchCheck
from longspan.hf.cache.generate import replace_generate
from longspan.hf.forward.binding import AttentionLayers
from longspan.hf.forward.float8 import SharedScales
from longspan.hf.forward.hooks import ForwardHooks
from longspan.hf.forward.logits import head_of
from longspan.hf.forward.misuse import ModelChangeCheck, refuse_copies, refuse_saving_shards
from longspan.hf.forward.mixers import MixerLayers
from longspan.hf.forward.stage import ModelTraits
from longspan.hf.forward.tensor import TensorParallel
from longspan.hf.memory import MemoryManager
from longspan.hf.model.support import draws, switch_dropout_off
from longspan.hf.preconditions import Checked, ParallelizeOptions, check_on_every_rank, heads_of_ranks
from longspan.hf.state import ParallelState
from longspan.hf.weights.fsdp import apply_fsdp, gather_group_of
from longspan.hf.weights.gradients import GradientAverage
from longspan.hf.weights.quantized import prepare_layers
from longspan.hf.weights.tensor_rules import TensorStyle
from longspan.losses.deferred_logits import Head

Model = TypeVar("Model", bound=nn.Module)


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
    logits: bool = False,
    memory: MemoryLevel | Memory = "fastest",
    dropout: float | None = None,
    tensor_style: TensorStyle = "tp",
    gather_output: bool = True,
    experts: Experts = 1,
) -> Model:
    """Shard the sequence of a Hugging Face model over `sp`, and with `fsdp` its weights over data x sequence.

    The model is changed in place and returned. Call this on every rank, with the same weights, after PEFT has wrapped
    the model and before the optimizer is made. Options, config, parameters, versions and weights are first compared
    over the ranks.

    A diffusion transformer of diffusers (`longspan.diffusion`) gets the same inputs on every rank of a sequence
    group, and returns its whole output on each. If each rank makes the same loss of it, `backward` gives every weight
    and input its exact gradient; replicas (`data`) are averaged. Of the options only `fsdp`, `mp_policy`, `weights`,
    `check_batches`, `check_weights` and `gather_output` apply.

    Args:
        model: a transformers causal or masked LM, a token classifier, a sequence classifier that scores every token
            and takes the last one's score (a reward model), a vision-language model, or a PEFT model around one, on its
            device. With `fsdp` it may still be on the CPU: FSDP2 moves it layer by layer, each rank its shard.
        sp: the sequence sharding.
        fsdp: shard weights, gradients and optimizer state by FSDP2, in the groups of `longspan.hf.weights.fsdp`.
            False: every rank holds all weights, and gradients are averaged over all ranks after each backward.
        mp_policy: FSDP's mixed precision; by default everything stays in the parameters' dtype.
        kernel: the local attention, by name or any callable; see `longspan.attention`.
        weights: "same": raise if the ranks' weights differ, by a digest of each parameter and buffer. "broadcast":
            copy the first rank's weights to all ranks.
        check_batches: number of first forwards in which to compare over the ranks what the model is called with, and
            name the ranks that got another batch, shape or mode. None: every forward, at the cost of one gather of six
            numbers between hosts. Values on a GPU, which the host waits for, and pixels are compared in the first
            three forwards, and then in every hundredth. 0: never.
        check_weights: with `fsdp=False`, compare a digest of all weights over the ranks every `check_weights` training
            forwards. 0: never.
        logits: True: compute logits in training too. By default a training forward with labels computes none: head and
            cross entropy run tile by tile over the tokens, and `out.logits` is None (`longspan.losses.cross_entropy`).
        memory: how to save memory in training. "fastest": not at all. "longest": every memory option that stays on the
            device. "auto": the fastest memory options that fit the free memory of the fullest rank, chosen by the
            planner at the first training forward and at each batch larger than all before. A `longspan.Memory`: exactly
            these. `longspan.explain(model)` returns the choice and its reason.
        dropout: 0.0: set every dropout of the model to 0, in its layers and its config. None: keep the model's dropout;
            attention dropout then raises in training, since it would depend on the number of ranks.
        tensor_style: used if the mesh's `tensor` axis is more than 1. "tp": every rank of a tensor group holds the
            whole residual stream, with two all-reduces per layer. "megatron-sp": each rank holds its tokens of the
            stream, with an all-gather before attention and MLP, and a reduce-scatter after each.
        gather_output: False: a diffusion transformer returns this rank's tokens only, `[batch, tokens, values of a
            patch]`, for which `longspan.shard_target` cuts a target. Make the loss by `longspan.global_mean`.
        experts: number of neighbouring ranks, of data x sequence, that share the experts of a mixture of experts: each
            token is sent to the ranks of its experts and back, instead of weights to every rank. Weights at rest are
            sharded the same way. 1: gather weights. "auto": the largest group in which every rank has experts.

    Returns:
        `model`. Its forward takes whole batches, with the entries that `longspan.shard_batch` lists, and pictures.

        - `loss` is the mean over every unmasked token of the global batch, equal on every rank. For a sequence
          classifier it is the mean over the rows of the global batch.
        - `logits`, if computed, are those of this rank's tokens. For a sequence classifier they are those of this
          replica's rows, equal on every rank of the sequence group.
        - With `output_router_logits=True` a mixture of experts adds `aux_loss`, its load-balancing loss over all tokens
          of the global batch.
        - `use_cache` is off, except with a `longspan.ShardedCache`.

        Gradients follow the convention of DDP and FSDP: they are averaged over the ranks. A loss that every rank
        computes alike counts once, `loss` above and a penalty added to it among them; a mean over a rank's own tokens
        counts as its share (`longspan.global_mean` is the exact mean of uneven shares).

    Raises:
        LongspanError: on every rank: for a model that would compute something else when sharded (naming the layer and
            the reason), heads that do not fit `sp`, incompatible options, or ranks with different models, weights or
            options (naming the ranks and the difference).
    """
    check_sharding(sp)
    options = ParallelizeOptions(
        fsdp, mp_policy, kernel, weights, check_batches, check_weights, logits, memory, dropout,
        tensor_style, gather_output, experts,
    )  # fmt: skip
    if is_model_of_diffusers(model):
        shard_diffusion_model(model, sp, options)
        return model
    checked = check_on_every_rank(model, sp, options)
    inner, memory = checked.model, checked.memory
    _prepare_weights_and_dropout(inner, sp, options)
    traits = ModelTraits(inner)
    attention, mixers = AttentionLayers(inner, kernel, memory), MixerLayers(inner)
    memory_manager = MemoryManager(checked.modules, sp, memory, checked.store, checked.planned)
    head = head_of(inner)
    batches, model_changes = _consistency_checks(model, sp, options, checked)
    rules = checked.tensor_rules
    tensor = None if rules is None else TensorParallel(inner, sp, tensor_style, rules, head)
    gradients = _shard_weights(sp, options, checked, head)
    state = ParallelState(
        inner.config, sp, traits, attention, mixers, memory_manager, head, tensor, gradients, checked.experts
    )
    scales = SharedScales.of(inner, sp)
    state.forward = ForwardHooks(inner, state, batches, model_changes, scales, compute_logits=logits)
    state.forward.install(inner, fsdp=checked.shards_weights)
    if inner.can_generate():
        replace_generate(inner)
    if sp.tensor_size > 1 or checked.shards_weights:
        refuse_saving_shards(model, inner)
    refuse_copies(inner)
    inner.longspan_state = state
    return model


def _prepare_weights_and_dropout(model: PreTrainedModel, sp: SequenceSharding, options: ParallelizeOptions) -> None:
    prepare_layers(model, sp.device)
    if options.dropout is not None:
        switch_dropout_off(model)
    if options.weights == "broadcast":
        broadcast_weights(model, sp)
    if sp.data_rank == sp.rank == sp.tensor_rank == 0:  # the warnings are the same on all ranks
        if (warning := untested()) is not None:
            warnings.warn(warning, stacklevel=3)
        _warn_of_idle_ranks(model, sp)
        _warn_of_dropout(model)


def _consistency_checks(
    model: nn.Module, sp: SequenceSharding, options: ParallelizeOptions, checked: Checked
) -> tuple[BatchCheck | None, ModelChangeCheck | None]:
    """Return what compares batches over the ranks, and what detects changes of the model; None where not needed."""
    inner, batches = checked.model, None
    if sp.world_size > 1:
        replicas = ReplicaCheck(options.check_weights if checked.sums_gradients else 0)
        batches = BatchCheck(sp, options.check_batches, replicas)
    elif not checked.shards_weights:
        return None, None
    sharded = sp.tensor_size > 1 or checked.shards_weights
    return batches, ModelChangeCheck(inner, sp, options.mp_policy, sharded=sharded)


def _shard_weights(
    sp: SequenceSharding, options: ParallelizeOptions, checked: Checked, head: Head | None
) -> GradientAverage | None:
    """Shard weights by FSDP, or return the sum over the ranks that their gradients need without it."""
    model = checked.model
    if checked.shards_weights:
        apply_fsdp(model, sp, options.mp_policy, cpu_offload=checked.memory.cpu_offload, experts=checked.experts)
        if head is not None:
            head.gather = functools.partial(gather_group_of, model, head.module)
        return None
    return GradientAverage(model.parameters(), sp) if checked.sums_gradients else None


def _warn_of_idle_ranks(model: PreTrainedModel, sp: SequenceSharding) -> None:
    shards = heads_of_ranks(model, sp)
    if not shards:
        return
    idle, q_heads = sum(shard.q_heads == 0 for shard in shards), shards[-1].q_stop
    if idle:
        fits = max(u for u in range(1, q_heads + 1) if sp.size % u == 0)
        warnings.warn(
            f"`ulysses={sp.ulysses_size}` is more than the model's {q_heads} query heads: {idle} of the ranks compute "
            f"no attention; try `ulysses={fits}, ring={sp.size // fits}`",
            stacklevel=3,
        )


def _warn_of_dropout(model: nn.Module) -> None:
    active = [name for name, module in model.named_modules() if draws(module)]
    if active:
        warnings.warn(
            f"{len(active)} dropout layers ({active[0]}, ...): each rank draws for its own tokens, so a run depends on "
            f"the number of ranks; dropout=0.0 switches them off",
            stacklevel=3,
        )
