"""Saved activations: what a layer saves for its backward, in bytes, tensor by tensor.

It follows transformers' Llama layer and `longspan.attention`; tests compare what a layer saves with what autograd
does. Experts and linear attention are estimates.

Letters: b bytes per element, d hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from longspan.core.tile_sizes import layers_held, layers_per_checkpoint
from longspan.plan.cost.memory_options import (
    OFFLOADED_LAYERS,
    mlp_act_bytes,
    norm_bytes,
    recomputes_mlp_act,
    stream_bytes,
)
from longspan.plan.cost.per_rank import runs_between
from longspan.plan.cost.weights import layer_gradient

if TYPE_CHECKING:
    from collections.abc import Sequence

    from longspan.plan.job import Job, Mesh
    from longspan.plan.models.shape import LayerShape, ModelShape


@dataclass(frozen=True)
class Scale:
    """What all items are made of, for one job on one mesh."""

    tokens: int
    b: int
    d: int
    on_cpu: bool
    hidden_shards: int


@dataclass(frozen=True)
class SavedActivations:
    """Bytes that layers save for their backward, by kind."""

    hidden: int = 0
    attention: int = 0
    mlp: int = 0

    def __add__(self, other: SavedActivations) -> SavedActivations:
        return SavedActivations(self.hidden + other.hidden, self.attention + other.attention, self.mlp + other.mlp)

    def __mul__(self, times: int) -> SavedActivations:
        return SavedActivations(self.hidden * times, self.attention * times, self.mlp * times)

    @property
    def total(self) -> int:
        """All kinds together."""
        return self.hidden + self.attention + self.mlp

    def items(self) -> dict[str, int]:
        """Under the names of `ITEMS`."""
        return {
            "activations_hidden": self.hidden,
            "activations_attention": self.attention,
            "activations_mlp": self.mlp,
        }


@dataclass(frozen=True)
class Buffers:
    """Bytes of a ring beside what its layer saves: KV blocks on their way, and results under way."""

    comm: int = 0
    workspace: int = 0

    @property
    def total(self) -> int:
        """Both together."""
        return self.comm + self.workspace

    def items(self) -> dict[str, int]:
        """Under the names of `longspan.plan.cost.memory.ITEMS`."""
        return {"comm_buffers": self.comm, "attention_workspace": self.workspace}


def saved_per_token(layer: LayerShape, job: Job, mesh: Mesh, s: Scale, autocast: bool) -> SavedActivations:
    """Bytes per token of a rank that one layer saves for its backward."""
    before, behind = _around(layer, job, s, autocast)
    mixer = layer.mixer
    attention = mixer.saved(mesh, s, recompute_all_to_all=job.memory.recompute_all_to_all)
    q_norm = next((p for p in layer.parameters if "q_norm" in p.name), None)
    if q_norm is not None:
        heads = (mixer.q_heads + mixer.kv_heads) // mesh.tensor
        again = job.memory.tiled_norms
        # A norm of each head (Qwen3) saves a number a head, a norm of all of Q and one of all of K (OLMo-2) one each.
        numbers = 1 if again else heads if q_norm.numel == mixer.head_dim else 2
        attention += norm_bytes(s, heads * mixer.head_dim, autocast, again=again) + 4 * (numbers - 1)
    return SavedActivations((before + behind) // s.hidden_shards, attention, _mlp(layer, job, mesh, s))


def kept_per_token(layer: LayerShape, job: Job, mesh: Mesh, s: Scale, autocast: bool) -> SavedActivations:
    """Bytes per token of a rank that checkpointing keeps of a layer: its input, and what it keeps of the attention."""
    return SavedActivations(stream_bytes(s, autocast) // s.hidden_shards, layer.mixer.kept(job, mesh, s))


def again_per_token(layer: LayerShape, job: Job, mesh: Mesh, s: Scale, autocast: bool) -> SavedActivations:
    """Bytes per token of a rank that a layer saves while it is computed again, beside what checkpointing has kept."""
    kept = SavedActivations(attention=layer.mixer.kept(job, mesh, s))
    if job.memory.tiled_norms:  # the first norm's input is the layer's
        kept = kept + SavedActivations(hidden=stream_bytes(s, autocast) // s.hidden_shards)
    return saved_per_token(layer, job, mesh, s, autocast) + kept * -1


def freed_per_token(layer: LayerShape, job: Job, mesh: Mesh, s: Scale, autocast: bool) -> SavedActivations:
    """Of `saved_per_token`, what is gone when the backward reaches the attention itself: all that comes behind it."""
    _, behind = _around(layer, job, s, autocast)
    of_mlp = SavedActivations(hidden=behind // s.hidden_shards, mlp=_mlp(layer, job, mesh, s))
    return layer.mixer.freed(of_mlp, job, mesh, s)


def _around(layer: LayerShape, job: Job, s: Scale, autocast: bool) -> tuple[int, int]:
    """What norms save, and products take in, before the attention and behind it."""
    norms = 2 if any("post_feedforward" in p.name for p in layer.parameters) else 1
    # A linear layer saves its input: one tensor for Q, K and V and one for gate and up; autocast makes five.
    q_k_v, gate_up = (3, 2) if autocast else (1, 1)
    normed = norms * norm_bytes(s, s.d, autocast, again=job.memory.tiled_norms)
    # In tiles the MLP keeps its input, before any cast.
    of_mlp = gate_up * s.b * s.d if job.memory.tiled_mlp == 1 else stream_bytes(s, autocast)
    if job.memory.tiled_norms and not autocast:  # what goes in is made again from what the norms keep
        return normed, normed
    return normed + q_k_v * s.b * s.d, normed + of_mlp


def _mlp(layer: LayerShape, job: Job, mesh: Mesh, s: Scale) -> int:
    # In tiles it is computed again, a tile at a time.
    if job.memory.tiled_mlp != 1:
        return 0
    return layer.mlp.saved(s) // mesh.tensor - (mlp_act_bytes(layer, mesh, s) if recomputes_mlp_act(job) else 0)


# ---------------------------------------------------------------------------------------------------------------------
# Of all layers, at the moments of a step.


def autocasts(job: Job) -> bool:
    """bf16 over fp32 weights that are not sharded: torch casts what goes into each product, and keeps the rest fp32."""
    return job.dtype == "bf16" and not job.weight_sharding


def saved_in_a_step(model: ModelShape, job: Job, mesh: Mesh, s: Scale) -> Sequence[SavedActivations]:
    """What is saved at the loss, and in the backward of the last layer, of the one before it, and of the first one."""
    autocast = autocasts(job)
    if job.memory.checkpointing == "none":
        layers = {layer: saved_per_token(layer, job, mesh, s, autocast) * s.tokens for layer, _ in model.layer_kinds}
        largest = max(layers.values(), key=lambda saved: saved.total)
        embedded = SavedActivations(hidden=s.tokens * s.d * 4 if autocast else 0)  # fp32, and cast by the first layer
        together = sum((layers[layer] * count for layer, count in model.layer_kinds), embedded)
        # Without the smallest layer at most: which one is last does not matter, only that no moment is understated.
        smallest = min(layers.values(), key=lambda saved: saved.total)
        before = together + smallest * -1 if len(model.layers) > 1 else together
        return together, together, before, largest
    # What is kept of every layer, and all that one layer saves while it is computed again.
    n = len(model.layers)
    group = layers_per_checkpoint(n, job.memory.layers_per_checkpoint)
    inputs, most_inputs = layers_held(n, group)
    one = SavedActivations(hidden=stream_bytes(s, autocast) // s.hidden_shards * s.tokens)
    # In the first group's backward the inputs that were made again go as gradients come.
    gradient = min(layer_gradient(layer, job, mesh) for layer, _ in model.layer_kinds)
    first = SavedActivations(hidden=max(0, one.hidden - gradient) * (min(group, n) - 1))
    kinds = [(kept_per_token(layer, job, mesh, s, autocast) * s.tokens, count) for layer, count in model.layer_kinds]
    again = [again_per_token(layer, job, mesh, s, autocast) * s.tokens for layer, _ in model.layer_kinds]
    largest = max(again, key=lambda saved: saved.total)
    most = max((kept for kept, _ in kinds), key=lambda saved: saved.total)
    if offloads(job, s):
        resident = 1 if s.on_cpu else OFFLOADED_LAYERS  # a CPU reads nothing ahead
        stays, before = (most * min(layers, resident) for layers in (n, max(1, n - 1)))
        if group > 1:  # those that are made again stay here, and there are fewer that leave
            fewer = one.hidden * min(min(inputs, resident) + group - 1, most_inputs)
            stays = before = replace(stays, hidden=fewer)
        return stays, stays + largest, before + largest, most + first + largest
    together = sum((kept * count for kept, count in kinds), SavedActivations())
    least = min((kept for kept, _ in kinds), key=lambda saved: saved.total)
    if group > 1:  # of the last group's backward, or of the one before
        held, of_group = together + one * (inputs - n), together + one * (most_inputs - n)
        return held, of_group + largest, of_group + largest, most + first + largest
    before = together + least * -1 if n > 1 else together
    return together, together + largest, before + largest, most + largest


def offloads(job: Job, s: Scale) -> bool:
    """Whether what checkpointing keeps leaves this memory; a CPU's ranks compute in the host's as it is."""
    return job.memory.offload == "disk" or (job.memory.offload == "host" and not s.on_cpu)


def kept_bytes(model: ModelShape, job: Job, mesh: Mesh, s: Scale) -> int:
    """Bytes that checkpointing keeps of all layers, wherever they lie."""
    if job.memory.checkpointing == "none":
        return 0
    autocast = autocasts(job)
    each = ((kept_per_token(layer, job, mesh, s, autocast).total, count) for layer, count in model.layer_kinds)
    remade = runs_between(len(model.layers), job) * stream_bytes(s, autocast) // s.hidden_shards
    return sum(s.tokens * kept * count for kept, count in each) - s.tokens * remade
