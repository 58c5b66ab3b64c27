"""`model.longspan_state`: what `parallelize` made of a model, and `longspan.explain`, which describes it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from longspan.core.errors import LongspanError

if TYPE_CHECKING:
    from torch import nn

    from longspan.comm.mesh import SequenceSharding
    from longspan.diffusion.tokens import Tokens
    from longspan.hf.forward.binding import AttentionLayers
    from longspan.hf.forward.hooks import ForwardHooks
    from longspan.hf.forward.mixers import MixerLayers
    from longspan.hf.forward.stage import ModelTraits
    from longspan.hf.forward.tensor import TensorParallel
    from longspan.hf.memory import MemoryManager
    from longspan.hf.weights.experts import ExpertGroups
    from longspan.hf.weights.gradients import GradientAverage
    from longspan.losses.deferred_logits import Head


@dataclass
class ParallelState:
    """The parts of a parallelized model."""

    config: Any  # the model's own copy
    sp: SequenceSharding
    traits: ModelTraits  # from before FSDP
    attention: AttentionLayers
    mixers: MixerLayers
    memory: MemoryManager
    head: Head | None
    tensor: TensorParallel | None  # None if the tensor axis has size 1
    gradients: GradientAverage | None  # None with FSDP or on one rank
    experts: ExpertGroups | None  # None if experts are sharded as other weights
    forward: ForwardHooks = field(init=False)


@dataclass
class DiffusionState:
    """The parts of a parallelized diffusion transformer."""

    sp: SequenceSharding
    layers: int  # in which tokens of different ranks attend to each other
    gradients: GradientAverage | None  # None with FSDP or on one rank
    tokens: Tokens


def is_parallelized(model: nn.Module) -> bool:
    """Return whether `longspan.parallelize` returned this model, or the one inside a wrapper."""
    return any(hasattr(module, "longspan_state") for module in model.modules())


def state_of(model: nn.Module) -> ParallelState:
    """Return the state of a parallelized model, or of the one inside a wrapper; raise if there is none."""
    for module in model.modules():
        state = getattr(module, "longspan_state", None)
        if isinstance(state, ParallelState):
            return state
        if isinstance(state, DiffusionState):
            raise LongspanError(f"{type(model).__name__} is a diffusion transformer; this is for language models")
    raise LongspanError(f"{type(model).__name__} is not parallelized; call longspan.parallelize(model, sp) first")


def explain(model: nn.Module) -> str:
    """Return what `parallelize` chose for a model: mesh, layout, memory options and why, and in its last forward the
    attention kernel of each kind of layer.

    Raises:
        LongspanError: for a model that is not parallelized.
    """
    diffusion = getattr(model, "longspan_state", None)
    if isinstance(diffusion, DiffusionState):
        sp = diffusion.sp
        axes = f"data={sp.data_size} ring={sp.ring_size} ulysses={sp.ulysses_size}"
        return f"mesh: {axes}\nattention between ranks: in {diffusion.layers} layers"
    state = state_of(model)
    sp = state.sp
    tensor = "" if state.tensor is None else f" tensor={sp.tensor_size} ({state.tensor.style})"
    axes = f"data={sp.data_size} ring={sp.ring_size} ulysses={sp.ulysses_size}{tensor}"
    lines = [f"mesh: {axes}, layout {sp.layout.kind}"]
    if state.experts is not None:
        lines.append(f"experts: over {state.experts.size} neighbouring ranks, tokens are sent to them")
    lines.append(f"memory: {state.memory.options.describe()} ({state.memory.why})")
    if state.memory.options.head_slices != 1:
        counts = [sliced.cut.count for sliced in state.memory.sliced.values() if sliced.cut is not None]
        lines.append(f"slices of heads: {max(counts, default=1)}, in {len(counts)} attention layers")
    chosen = Counter(str(layer.choice) for layer in state.attention.layers if layer.choice is not None)
    lines += [f"attention of {count} layers: {choice}" for choice, count in chosen.items()]
    if state.attention.layers and not chosen:
        lines.append("attention: chosen at the first forward")
    if state.mixers.layers:
        lines.append(f"recurrent layers and short convolutions: {len(state.mixers.layers)}, by state passing")
    return "\n".join(lines)
