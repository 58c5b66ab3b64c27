"""In how many slices of heads each layer runs, if `head_slices` is 0 (`longspan.memory.head_slices`).

Slices cost time: the backward computes projections a third time, and the norm in front of them once per slice. Most
layers need none. A step's peak is usually that of the last layer's backward, in which all layers' inputs are saved.
When the backward reaches an earlier layer, the inputs behind it are free. So each layer runs in the fewest slices with
which its attention stays below the highest peak of an attention in slices. Peaks of MLPs do not count, as their tiles
are smaller on a CPU than planned.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from longspan.plan.cost.training_peaks import peaks_in_attention
from longspan.plan.job import CostContext
from longspan.plan.shape import LayerShape


@functools.lru_cache(maxsize=1024)
def slices_of_layers(c: CostContext) -> tuple[int, ...]:
    """Return the number of slices of heads of each layer, in order, as `Memory.head_slices`."""
    layers, memory = len(c.model.layers), c.job.memory
    most = max(len(layer.mixing.slices(c)) for layer, _ in c.model.layer_kinds)
    if memory.head_slices or most == 1:
        return (memory.head_slices or 1,) * layers
    if memory.checkpointing != "full" or c.offloads:  # then a layer's backward frees other memory, or none
        return (most,) * layers
    counts = [1 << power for power in range(most.bit_length()) if 1 << power < most]
    peaks = {count: peaks_in_attention(with_slices(c, count)) for count in (*counts, most)}
    limit = max(peaks[most])

    def peak(count: int, behind: int) -> float:
        """Return the peak of a layer's backward, with so many layers behind it."""
        last, before, first = peaks[count]
        # Inputs and gradients change by the same bytes from layer to layer.
        return before + (first - before) * (behind - 1) / max(1, layers - 2) if behind else last

    return tuple(
        next((count for count in counts if peak(count, behind) <= limit), most) for behind in reversed(range(layers))
    )


def layers_by_slices(c: CostContext) -> Iterator[tuple[LayerShape, CostContext, int]]:
    """Yield distinct layers with the context of their slices, and how many there are."""
    for (layer, count), layers in Counter(zip(c.model.layers, slices_of_layers(c), strict=True)).items():
        yield layer, c if count == c.job.memory.head_slices else with_slices(c, count), layers


def with_slices(c: CostContext, count: int) -> CostContext:
    """Return the context with `count` slices of heads in each layer."""
    return replace(c, job=replace(c.job, memory=replace(c.job.memory, head_slices=count)))
