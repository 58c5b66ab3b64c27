"""`longspan.explain`: what was chosen for a parallelized model, and why."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from longspan.core.validation import checked_call
from longspan.hf.state import state_of

if TYPE_CHECKING:
    from torch import nn


@checked_call()
def explain(model: nn.Module) -> str:
    """Return what `parallelize` chose for a model: mesh, layout, memory options and why, and in its last forward the
    attention kernel of each kind of layer.

    Raises:
        LongspanError: for a model that is not parallelized.
    """
    state = state_of(model)
    sp = state.sp
    tensor = "" if state.tensor is None else f" tensor={sp.tensor_size} ({state.tensor.style})"
    axes = f"data={sp.data_size} ring={sp.ring_size} ulysses={sp.ulysses_size}{tensor}"
    lines = [f"mesh: {axes}, layout {sp.layout.kind}"]
    if sp.wire_dtype != "exact" and sp.ulysses_size > 1:
        lines.append(f"exchange: {sp.wire_dtype}, LOSSY: a byte per element, a scale per token and head")
    lines.append(f"memory: {state.memory.memory.describe()} ({state.memory.why})")
    chosen = Counter(str(layer.choice) for layer in state.attention.layers if layer.choice is not None)
    lines += [f"attention of {count} layers: {choice}" for choice, count in chosen.items()]
    if not chosen:
        lines.append("attention: chosen at the first forward")
    return "\n".join(lines)
