"""One call that shards a Hugging Face language model: its sequence, and with FSDP2 its weights.

    model = longspan.parallelize(model, sp)
    out = model(**batch)            # the same full batch on every rank of a sequence group
    out.loss.backward()             # gradients of the mean over the global batch

Nothing of the training loop changes. At the entrance the batch is cut; inside, tokens stay where they are, but for two
All-to-Alls around each attention; at the end the loss is the exact mean of the whole batch.
"""

from __future__ import annotations

import itertools
import warnings
from typing import TYPE_CHECKING, TypeVar

from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from longspan.attention import Kernel
from longspan.entrance import Entrance
from longspan.errors import LongspanError
from longspan.families import check_model, decoder_layers, transformers_model
from longspan.gradients import GradientSum
from longspan.huggingface import bind_layers
from longspan.layout import split_heads
from longspan.savers import refuse_savers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from longspan.mesh import SequenceSharding

Model = TypeVar("Model", bound=nn.Module)


def parallelize(
    model: Model,
    sp: SequenceSharding,
    *,
    fsdp: bool = True,
    mp_policy: MixedPrecisionPolicy | None = None,
    kernel: Kernel = "auto",
    check_batches: int = 3,
) -> Model:
    """Shard the sequence of a Hugging Face language model over `sp`, and with `fsdp` its weights over data x sequence.

    In place, and the model is returned. Call it on every rank, with the same weights, after PEFT has wrapped the model
    and before the optimizer is made.

    Args:
        model: a transformers causal or masked LM, or a PEFT model around one, on its device. With `fsdp` it may still
            be on the CPU: FSDP2 moves it layer by layer, each rank its shard.
        sp: how the sequence lies over the ranks.
        fsdp: shard weights, gradients and optimizer state by FSDP2: one group per decoder layer, gathered one layer
            ahead in forward and backward, released after forward. False: every rank holds all weights, and gradients
            are summed over all ranks at the end of each backward.
        mp_policy: FSDP's mixed precision; by default everything stays in the parameters' dtype.
        kernel: the local attention, by name or any callable; see `longspan.attention.local.local_attention`.
        check_batches: for so many first forwards, compare the batch over the sequence group and name the ranks that
            were given another one.

    Returns:
        `model`. Its forward takes the full batch, or one cut by `longspan.shard_batch` (with `shift=False` for a masked
        LM); `loss` is the mean over every unmasked token of the global batch, equal on every rank; `logits` are those
        of this rank's tokens. With `output_router_logits=True` a mixture of experts adds its load-balancing loss over
        all tokens of the global batch, `aux_loss`. There is no KV cache: `use_cache` is off.

    Raises:
        LongspanError: for a model that would not compute the same when sharded (naming the layer and the reason), heads
            that `sp` cannot hold, or options that do not go together.
    """
    inner = transformers_model(model)
    if hasattr(inner, "longspan_entrance"):
        raise LongspanError(f"{type(inner).__name__} is parallelized already; a model is given to parallelize once")
    if sp.tensor_size > 1:
        raise LongspanError(f"`tensor={sp.tensor_size}`: tensor parallelism is not in this version; use `tensor=1`")
    if mp_policy is not None and (not fsdp or sp.world_size == 1):
        why = "with fsdp=False" if not fsdp else "on one rank, where nothing is sharded,"
        raise LongspanError(f"mp_policy is FSDP's; {why} use torch.autocast, or cast the model")
    check_model(inner, sp, kernel)
    _check_head_counts(inner, sp)
    _warn_of_dropout(inner)
    binding = bind_layers(inner, sp, kernel)
    entrance = Entrance(inner, sp, binding, check_batches)
    inner.longspan_entrance = entrance
    inner.register_forward_pre_hook(entrance.enter, with_kwargs=True)
    inner.register_forward_hook(entrance.leave)
    inner.loss_function = entrance.loss
    if sp.world_size > 1:
        if fsdp:
            _apply_fsdp(inner, sp, mp_policy)
            refuse_savers(model, inner)
        else:
            entrance.gradients = GradientSum(inner.parameters(), sp)
    return model


def _check_head_counts(model: PreTrainedModel, sp: SequenceSharding) -> None:
    config = model.config.get_text_config()
    q_heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or q_heads
    idle = sum(
        share.q_heads == 0
        for share in split_heads(q_heads, kv_heads, sp.ulysses_size, kv_replication=sp.kv_replication)
    )
    if idle:
        fits = max(u for u in range(1, q_heads + 1) if sp.size % u == 0)
        warnings.warn(
            f"`ulysses={sp.ulysses_size}` is more than the model's {q_heads} query heads: {idle} of them compute no "
            f"attention; try `ulysses={fits}, ring={sp.size // fits}`",
            stacklevel=3,
        )


def _warn_of_dropout(model: nn.Module) -> None:
    active = [name for name, module in model.named_modules() if _draws(module)]
    if active:
        warnings.warn(
            f"{len(active)} dropout layers ({active[0]}, ...): each rank draws for its own tokens, so a run depends on "
            f"the number of ranks; give every rank a seed of its own",
            stacklevel=3,
        )


def _draws(module: nn.Module) -> bool:
    """Whether a layer draws random numbers in training: dropout as a module or as a number, or a router's jitter."""
    numbers = (value for name, value in vars(module).items() if "dropout" in name or "jitter" in name)
    return (isinstance(module, nn.Dropout) and module.p > 0) or any(isinstance(p, float) and p > 0 for p in numbers)


def _apply_fsdp(model: PreTrainedModel, sp: SequenceSharding, mp_policy: MixedPrecisionPolicy | None) -> None:
    """`fully_shard` each decoder layer and the rest. Gradients are summed: the loss is divided by all tokens."""
    policy = mp_policy or MixedPrecisionPolicy()
    layers = decoder_layers(model)
    for layer in layers:
        fully_shard(layer, mesh=sp.fsdp_mesh, mp_policy=policy, reshard_after_forward=True)
    fully_shard(model, mesh=sp.fsdp_mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # a plain sum: gloo has no pre-multiplied one
    for layer, following in itertools.pairwise(layers):
        assert isinstance(layer, FSDPModule) and isinstance(following, FSDPModule)
        layer.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([layer])
