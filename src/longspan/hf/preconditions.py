"""What `parallelize` requires: checked on each rank alone, then compared, so that all ranks raise or none.

`check_ahead` checks the same of a model before there are ranks.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from longspan.attn.kernels.choice import AnyKernel
from longspan.comm.mesh import SequenceSharding
from longspan.comm.weights import agree_on_model, digests_to_compare
from longspan.compat.friends_api import fla_kernels, float8_layers
from longspan.compat.reading import INDEXED, attention_layers, mixer_layers
from longspan.core.errors import LongspanError
from longspan.core.experts import Experts
from longspan.core.heads import HeadShard, split_groups, split_heads
from longspan.core.memory import FASTEST, Memory, MemoryLevel, memory_of
from longspan.core.parallel import ParallelConfig
from longspan.core.validation import check_choice, check_count, check_flag, format_value
from longspan.hf.forward.float8 import check_float8
from longspan.hf.memory import AutoMemory, MemoryModules, PlannedModel
from longspan.hf.model.support import attention_dropout, check_model, heads_of, refuse_dropout, transformers_model
from longspan.hf.model.vision import core_of
from longspan.hf.state import is_parallelized
from longspan.hf.weights.experts import expert_groups
from longspan.hf.weights.fsdp import check_cpu_offload
from longspan.hf.weights.quantized import check_quantized
from longspan.hf.weights.tensor_rules import STYLES, TensorRules, TensorStyle
from longspan.memory.offload import store_for


@dataclass(frozen=True)
class ParallelizeOptions:
    """The options of `longspan.parallelize`, whose docstring documents each."""

    fsdp: bool = True
    mp_policy: MixedPrecisionPolicy | None = None
    kernel: AnyKernel = "auto"
    weights: str = "same"
    check_batches: int | None = None
    check_weights: int = 100
    logits: bool = False
    memory: MemoryLevel | Memory = "fastest"
    dropout: float | None = None
    tensor_style: TensorStyle = "tp"
    gather_output: bool = True
    experts: Experts = 1


def check_on_every_rank(model: nn.Module, sp: SequenceSharding, options: ParallelizeOptions) -> Checked:
    """Check model and options on this rank, then compare them over all ranks. Collective."""

    def check() -> tuple[Checked, dict[str, str], dict[str, int]]:
        checked = Checked(model, sp, options)
        return checked, facts_of(model, sp, options), digests_to_compare(model, sp, options.weights)

    return agree_on_model(sp, check)


class Checked:
    """What one rank can check by itself, and what the checks find."""

    def __init__(self, model: nn.Module, sp: SequenceSharding, options: ParallelizeOptions) -> None:
        self.model = inner = transformers_model(model)
        if is_parallelized(inner):
            raise LongspanError(f"{type(inner).__name__} is parallelized already; a model is given to parallelize once")
        # With `memory="auto"` the options before the first batch.
        self.memory = memory = FASTEST if options.memory == "auto" else memory_of(options.memory)
        self.shards_weights = sp.shards_weights(fsdp=options.fsdp, cpu_offload=memory.cpu_offload)
        self.sums_gradients = not options.fsdp and sp.fsdp_size > 1  # after each backward: all ranks hold all weights
        _check_options(options, sp, self.shards_weights)
        _check_parameters(inner, options)
        check_quantized(inner, sp, options.mp_policy, memory, self.shards_weights)
        check_float8(inner, sp)
        self.modules = _check_structure(inner, sp.device, sp.ring_size, options.kernel, memory, fsdp=options.fsdp)
        self.tensor_rules: TensorRules | None = None
        if sp.tensor_size > 1:
            _refuse_tensor_axis(inner, sp, memory)
            self.tensor_rules = TensorRules(inner, sp.tensor_size, sp.tensor_rank, options.tensor_style, sp.size)
        # None if experts are sharded as other weights.
        self.experts = expert_groups(
            inner, options.experts, ranks=sp.fsdp_size, tensor=sp.tensor_size, fsdp=options.fsdp
        )
        heads_of_ranks(inner, sp)
        self.planned: PlannedModel | None = None
        if options.memory == "auto" or memory.head_slices == 0:
            kind = AutoMemory if options.memory == "auto" else PlannedModel
            self.planned = kind(inner, sp, options.fsdp, options.mp_policy, options.tensor_style, options.experts)
        check_cpu_offload(sp.device, memory.cpu_offload)
        self.store = store_for(memory, sp.device)  # of offloaded activations


def _refuse_tensor_axis(model: PreTrainedModel, sp: SequenceSharding, memory: Memory) -> None:
    if memory.head_slices > 1:
        raise LongspanError(
            f"head_slices={memory.head_slices} slices heads that `tensor={sp.tensor_size}` shards; use head_slices=1"
        )
    if core_of(model) is not None:
        raise LongspanError(
            f"{type(model).__name__} has a vision tower, which is not sharded over `tensor={sp.tensor_size}`; use "
            f"`ulysses={sp.ulysses_size * sp.tensor_size}` instead"
        )
    mixer = next(iter(mixer_layers(model).items()), None)
    if mixer is not None:
        path, layer = mixer
        raise LongspanError(
            f"layer {path} ({type(layer).__name__}) cannot be sharded over `tensor={sp.tensor_size}`: a recurrent "
            "layer is sharded by tokens only, as transformers' plans gather its projections: each rank would compute "
            f"all heads; use `ulysses={sp.ulysses_size * sp.tensor_size}` instead"
        )


def check_ahead(
    model: PreTrainedModel,
    *,
    device: torch.device,
    ring_size: int,
    fsdp: bool,
    kernel: AnyKernel,
    memory_options: Memory,
) -> None:
    """Raise for what `parallelize`, or the first training forward, would refuse, before there are ranks.

    The model may be on the meta device; `device` is that of the ranks.
    """
    _check_structure(model, device, ring_size, kernel, memory_options, fsdp=fsdp)
    refuse_dropout(attention_dropout(model))


def check_axes(make: Callable[[], PreTrainedModel], parallel: ParallelConfig, *, fsdp: bool) -> None:
    """Raise if a tensor axis or `experts` cannot shard the model, before there are ranks.

    `make` returns the model, which may be on the meta device; it is called if there is something to check.
    """
    if parallel.tensor == 1 and parallel.experts == 1:
        return
    model = transformers_model(make())
    if parallel.tensor > 1:
        TensorRules(model, parallel.tensor, 0, parallel.tensor_style, parallel.sequence_ranks)
    expert_groups(model, parallel.experts, ranks=parallel.fsdp_ranks, tensor=parallel.tensor, fsdp=fsdp)


def _check_structure(
    model: PreTrainedModel, device: torch.device, ring_size: int, kernel: AnyKernel, memory: Memory, *, fsdp: bool
) -> MemoryModules:
    check_model(model, device, ring_size, kernel, memory.recompute_all_to_all)
    modules = MemoryModules(model)
    modules.check(memory)
    if memory.cpu_offload and not fsdp:
        raise LongspanError("cpu_offload=True needs FSDP, and fsdp is off; leave one of them out")
    return modules


def _check_options(options: ParallelizeOptions, sp: SequenceSharding, shards_weights: bool) -> None:
    check_choice("tensor_style", options.tensor_style, STYLES)
    check_choice("weights", options.weights, ("same", "broadcast"))
    check_flag("fsdp", options.fsdp)
    check_flag("logits", options.logits)
    check_count("check_weights", options.check_weights)
    if options.check_batches is not None:
        check_count("check_batches", options.check_batches)
    why = "with fsdp=False" if not options.fsdp else "on one rank, where nothing is sharded,"
    for applies, reason in (
        (
            options.gather_output is not True,
            f"gather_output={format_value(options.gather_output)} is an option of diffusion transformers; a language "
            f"model's logits are those of this rank's tokens",
        ),
        (
            options.mp_policy is not None and not shards_weights,
            f"mp_policy is FSDP's; {why} use torch.autocast, or cast the model",
        ),
        (
            options.dropout is not None and (isinstance(options.dropout, bool) or options.dropout != 0),
            f"dropout={format_value(options.dropout)}: it takes 0.0 alone, which switches the model's dropout off; set "
            f"other values in the config that the model is made from",
        ),
    ):
        if applies:
            raise LongspanError(reason)


def _check_parameters(model: PreTrainedModel, options: ParallelizeOptions) -> None:
    for name, p in model.named_parameters():
        parameter = f"parameter {name} of {type(model).__name__}"
        if isinstance(p, DTensor):
            raise LongspanError(
                f"{parameter} is sharded already; give longspan.parallelize the plain model, it shards weights by "
                f"itself (fsdp=True)"
            )
        if p.is_meta and (not options.fsdp or options.weights == "broadcast"):
            raise LongspanError(
                f"{parameter} is on the meta device and has no values; load them first, or use fsdp=True with "
                f"weights='same', then model.to_empty and load its shards"
            )


def facts_of(model: nn.Module, sp: SequenceSharding, options: ParallelizeOptions) -> dict[str, str]:
    """Return what must be the same on every rank, by its name in errors; without weights."""
    config: Any = getattr(model, "config", None)
    settings = config.to_dict() if isinstance(config, transformers.PreTrainedConfig) else config
    facts = {option: getattr(value, "__qualname__", repr(value)) for option, value in vars(options).items()}
    facts["kernel"] = getattr(options.kernel, "name", facts["kernel"])
    facts |= {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "flash-linear-attention": fla_kernels(),
        "the mesh": f"{tuple(sp.mesh.shape)}, {sp.layout.kind}, overlap_chunks={sp.overlap_chunks}",
        "the model's class": type(model).__name__,
    }
    facts |= {f"float8 layer {path}": repr(layer.config) for path, layer in float8_layers(model).items()}
    # The folder of the model's files may differ between machines, and diffusers' names of defaults have a set's order.
    ignored = ("_name_or_path", "_use_default_values")
    facts |= {f"config.{k}": json.dumps(v, default=str) for k, v in (settings or {}).items() if k not in ignored}
    for kind, tensors in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, x in tensors:
            trained = ", trained" if x.requires_grad else ""
            values = ", no values (meta device)" if x.is_meta else ""
            facts[f"{kind} {name}"] = f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}{trained}{values}"
    return facts


def heads_of_ranks(model: PreTrainedModel, sp: SequenceSharding) -> tuple[HeadShard, ...]:
    """Return the heads of each Ulysses rank of this tensor rank; none for a model that sends no heads."""
    if not attention_layers(model) or model.config.get_text_config().model_type in INDEXED:  # they send no heads
        return ()
    mine = split_groups(*heads_of(model.config), sp.tensor_size)[sp.tensor_rank]
    return split_heads(mine.q_heads, mine.kv_heads, sp.ulysses_size)
