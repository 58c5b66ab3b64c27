"""FLOPs of a step, and the seconds that computing them takes: a stated efficiency, or measured speeds.

A matrix product of T tokens with W weights is 2*T*W FLOPs; attention is 2*(D + Dv) FLOPs per query head and pair
(query, key) that the mask allows; a backward is twice a matrix product's forward and 2.5 times the attention's (the
flash kernels compute the scores again: Dao 2023, arXiv:2307.08691). Checkpointing adds one more forward, of
all or without the attention's mixing; a tiled MLP its own, whether the layer's is added or not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from longspan.plan.cost.memory import elements_at_rest
from longspan.plan.cost.memory_options import recomputes_mlp_act
from longspan.plan.cost.per_rank import local_batch, local_tokens, runs_between

if TYPE_CHECKING:
    from longspan.plan.hardware import Hardware
    from longspan.plan.job import Job, Mesh
    from longspan.plan.models.shape import LayerShape, ModelShape


@dataclass(frozen=True)
class Work:
    """FLOPs of one GPU: in matrix products, in attention."""

    matmul: float
    attention: float


def layer_work(layer: LayerShape, job: Job, mesh: Mesh) -> Work:
    """Forward FLOPs of one layer on the GPU that has most, for one micro-batch."""
    batch, tokens = local_batch(job, mesh), local_tokens(job, mesh)
    matmul = 2.0 * batch * tokens * layer.matmul_params_active / mesh.tensor
    return Work(matmul, layer.mixer.busiest_flops(job, mesh))


def head_work(model: ModelShape, job: Job, mesh: Mesh) -> float:
    """Forward FLOPs of the head: every token in training, the last one of a sequence otherwise."""
    tokens = local_tokens(job, mesh) if job.mode == "train" else 1
    return 2.0 * local_batch(job, mesh) * tokens * model.vocab * model.d_model / mesh.tensor


def model_flops(model: ModelShape, job: Job) -> float:
    """FLOPs that a step needs, over all GPUs, nothing counted twice (for model FLOP utilisation)."""
    tokens = job.batch * (1 if job.mode == "decode" else job.context)
    times = 3.0 if job.mode == "train" else 1.0
    total = 2.0 * (tokens if job.mode == "train" else job.batch) * model.vocab * model.d_model * times
    for layer, count in model.layer_kinds:
        total += count * times * 2.0 * tokens * layer.matmul_params_active
        total += layer.mixer.flops(job, count * times)
    return total


def speed(hardware: Hardware, job: Job) -> float:
    """FLOP/s of matrix products."""
    measured_in = hardware.measured_dtype or "bf16"
    ratio = {("bf16", "fp32"): hardware.fp32_ratio, ("fp32", "bf16"): 1 / hardware.fp32_ratio}
    return hardware.flops * ratio.get((measured_in, job.dtype), 1.0) * hardware.matmul_efficiency


@dataclass(frozen=True)
class LayerSeconds:
    """Seconds of one layer and one micro-batch.

    Attributes:
        forward: of the forward.
        backward: of the backward, with what it computes again.
        attention_forward: of one forward of the attention alone, which what a ring sends may run beside.
        attention_backward: the same of its backward.
    """

    forward: float
    backward: float
    attention_forward: float = 0.0
    attention_backward: float = 0.0


def layer_seconds(model: ModelShape, layer: LayerShape, job: Job, mesh: Mesh, hardware: Hardware) -> LayerSeconds:
    """Seconds of computing one layer, one micro-batch."""
    work = layer_work(layer, job, mesh)
    tokens = local_batch(job, mesh) * local_tokens(job, mesh)
    moved = tokens * elementwise_bytes(model, layer, job, mesh) / hardware.memory_bandwidth
    # A backward of elementwise work, as of a matrix product, is about twice the forward.
    matmul = work.matmul / speed(hardware, job) + moved
    forward, both = _attention_seconds(work.attention * _more(layer, job, hardware), hardware, job)
    backward = both - forward
    if job.mode == "decode":
        reading = _decode_bytes(layer, job, mesh) / hardware.memory_bandwidth
        return LayerSeconds(max(matmul + forward, reading), 0.0)
    merged, summed = layer.mixer.added_up(job, mesh)
    forward, backward = forward + merged / hardware.memory_bandwidth, backward + summed / hardware.memory_bandwidth
    if job.mode == "prefill":
        return LayerSeconds(matmul + forward, 0.0, forward)
    again = {"none": 0.0, "full": matmul + forward}.get(job.memory.checkpointing, matmul)
    between = runs_between(len(model.layers), job) / len(model.layers)
    again += between * (matmul + (forward if job.memory.checkpointing == "full" else 0.0))
    if job.memory.tiled_mlp != 1:
        weights = sum(layer.mlp.active(p) for p in layer.parameters if p.name.startswith("mlp.") and len(p.shape) > 1)
        again += 2.0 * weights * tokens / mesh.tensor / speed(hardware, job)
    if job.memory.tiled_norms:
        # Each for its own backward, and for that of what takes in its output.
        again += tokens * 4 * NORM_BYTES * model.d_model / hardware.memory_bandwidth
    if recomputes_mlp_act(job):  # SwiGLU: the function (2) and the product (3), then the function for the gate
        again += tokens * 7 * job.bytes_per_element * layer.mlp.width / mesh.tensor / hardware.memory_bandwidth
    return LayerSeconds(matmul + forward, 2.0 * matmul + backward + again, forward, backward)


NORM_BYTES = 32
"""What eager torch reads and writes for a norm, in bytes per feature: it computes in fp32, an operation at a time."""


def _more(layer: LayerShape, job: Job, hardware: Hardware) -> float:
    """How much longer attention takes than its FLOPs say: whole blocks on the diagonal, and the softmax itself."""
    if job.mode == "decode":
        return 1.0
    block = hardware.attention_block / layer.mixer.seen(job.context)
    width = 2 * hardware.attention_width / (layer.mixer.head_dim + layer.mixer.v_head_dim)
    return (1.0 + block) * (1.0 + width)


def elementwise_bytes(model: ModelShape, layer: LayerShape, job: Job, mesh: Mesh) -> float:
    """Bytes that one token moves through memory in a layer's forward, outside of matrix products and attention.

    What eager torch reads and writes: `NORM_BYTES` for a norm, for
    rotary embeddings 9 elements per element of Q and K, a residual 3, SwiGLU 5, packing and unpacking 2 each.
    """
    b = job.bytes_per_element
    mixer = layer.mixer
    q, kv = mixer.q_heads * mixer.head_dim, mixer.kv_heads * (mixer.head_dim + mixer.v_head_dim)
    packed = 2 * b * (2 * q + kv) if mesh.ulysses > 1 else 0
    heads = 9 * b * (q + kv / 2) + packed + 5 * b * layer.mlp.width
    return 2 * NORM_BYTES * model.d_model + 6 * b * model.d_model + heads / mesh.tensor


def _attention_seconds(flops: float, hardware: Hardware, job: Job) -> tuple[float, float]:
    """Forward alone, and forward with backward (3.5 times the FLOPs)."""
    assumed = speed(hardware, job) / hardware.matmul_efficiency * hardware.attention_efficiency
    return (
        flops / (hardware.attention_forward_flops or assumed),
        3.5 * flops / (hardware.attention_flops or assumed),
    )


def _decode_bytes(layer: LayerShape, job: Job, mesh: Mesh) -> float:
    """What one decoded token reads: the layer's weights, and its part of the cache."""
    return layer.active_params / mesh.tensor * job.bytes_per_element + layer.mixer.cache_bytes(job, mesh)


def loss_seconds(model: ModelShape, job: Job, mesh: Mesh, hardware: Hardware) -> float:
    """The loss reads and writes the logits some eight times in fp32, forward and backward together."""
    if job.mode != "train":
        return 0.0
    return 32.0 * local_tokens(job, mesh) * model.vocab / mesh.tensor / hardware.memory_bandwidth


def optimizer_seconds(model: ModelShape, job: Job, mesh: Mesh, hardware: Hardware) -> float:
    """AdamW reads a weight, its gradient and two moments and writes three of them: 28 bytes; SGD 12."""
    if job.mode != "train":
        return 0.0
    moved = elements_at_rest(model, job, mesh) * (28.0 if job.optimizer == "adamw" else 12.0)
    if job.memory.cpu_offload and not hardware.on_cpu:  # by the host's cores, from a memory that a node's ranks share
        return moved * min(mesh.gpus, hardware.gpus_per_node) / hardware.host_memory_bandwidth
    return moved / hardware.memory_bandwidth
