"""Seconds of a step: computing, by stated efficiencies or measured speeds, and communication that overlaps with it.

A product of T tokens with W weights is 2*T*W FLOPs. Attention is 2*(D + Dv) FLOPs per query head and (query, key) pair
that the mask allows. A backward is twice a product's forward and 2.5 times the attention's, as flash kernels recompute
the scores (Dao 2023, arXiv:2307.08691). Checkpointing adds one forward, with or without the attention's mixing; a tiled
MLP adds its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from longspan.plan.cost.communication import input_recompute_sent, method_sent
from longspan.plan.cost.peak_memory import Offloaded
from longspan.plan.cost.saved import checkpoint_per_token, recomputes_mlp_act
from longspan.plan.cost.slices import layers_by_slices
from longspan.plan.cost.weights import (
    block_weights_sent,
    layer_weights_sent,
    shard_elements,
    sums_gradients_once,
    trained_elements,
)
from longspan.plan.hardware import Hardware
from longspan.plan.job import CostContext, Job
from longspan.plan.layers.attended_keys import RingSchedule
from longspan.plan.layers.base import Sent
from longspan.plan.shape import LayerShape, ModelShape
from longspan.plan.tower import most_patches, tower_flops

NORM_BYTES = 32
"""Memory traffic of a norm in eager torch, in bytes per feature: it computes in fp32, one operation at a time."""

# ---------------------------------------------------------------------------------------------------------------------
# FLOPs.


def model_flops(model: ModelShape, job: Job) -> float:
    """Return the FLOPs that a step needs over all GPUs, without recomputation (for model FLOP utilisation)."""
    tokens, train = job.batch * (1 if job.mode == "decode" else job.context), job.mode == "train"
    times = 3.0 if train else 1.0
    head = 2.0 + model.head.trained if train else 1.0
    total = 2.0 * (tokens if train else job.batch) * model.vocab * model.d_model * head
    for layer, count in model.layer_kinds:
        backward = train and layer.has_backward
        products = 2.0 + layer.trained_share if backward else 1.0  # no gradients of frozen weights
        total += count * products * 2.0 * tokens * layer.matmul_params_active
        total += layer.mixing.flops(job, count * (times if backward else 1.0))
    if model.teacher is not None and train:
        total += 2.0 * (tokens - job.batch) * model.vocab * model.teacher.d_model  # a prefill has the last token's
        total += model_flops(model.teacher, replace(job, mode="prefill", pictures=()))
    if job.mode != "decode":
        total += job.batch * times * sum(tower_flops(CostContext(model, job), largest=False))
    return total


# ---------------------------------------------------------------------------------------------------------------------
# Computing.


def matmul_speed(hardware: Hardware, job: Job) -> float:
    """Return the FLOP/s of products."""
    measured_in = hardware.measured_dtype or "bf16"
    ratio = {("bf16", "fp32"): hardware.fp32_ratio, ("fp32", "bf16"): 1 / hardware.fp32_ratio}
    return hardware.flops * ratio.get((measured_in, job.dtype), 1.0) * hardware.matmul_efficiency


@dataclass(frozen=True)
class LayerSeconds:
    """Seconds of one layer and one micro-batch."""

    forward: float
    backward: float  # of the backward, recomputation included
    attention_forward: float = 0.0  # of one forward of the attention alone, which ring messages overlap with
    attention_backward: float = 0.0


def layer_seconds(layer: LayerShape, c: CostContext, hardware: Hardware) -> LayerSeconds:
    """Return the seconds of computing one layer for one micro-batch."""
    c = c.of_layer(layer)
    job = c.job
    products = 2.0 * c.tokens * layer.matmul_params_active / c.mesh.tensor
    moved = c.tokens * _elementwise_bytes(layer, c) / hardware.memory_bandwidth
    # The backward of elementwise work, like that of a product, takes about twice its forward.
    matmul = products / matmul_speed(hardware, job) + moved
    attention = layer.mixing.max_flops(c) * _kernel_overhead(layer, job, hardware)
    mask = "causal" if layer.mixing.window is None else "window"
    forward, backward = _attention_seconds(attention, (mask, layer.mixing.seen(job.context)), hardware, job)
    if job.mode == "decode":
        read = layer.active_params / c.mesh.tensor * c.b + layer.mixing.cache_bytes(c)
        return LayerSeconds(max(matmul + forward, read / hardware.memory_bandwidth), 0.0)
    accumulated, accumulated_back = layer.mixing.accumulated_bytes(c)
    forward += accumulated / hardware.memory_bandwidth
    backward += accumulated_back / hardware.memory_bandwidth
    if job.mode == "prefill":
        return LayerSeconds(matmul + forward, 0.0, forward)
    recomputed = _recompute_seconds(layer, c, hardware, matmul, forward)
    # Without the products for the gradients of frozen weights.
    back = 2.0 * matmul - (1.0 - layer.trained_share) * products / matmul_speed(hardware, job)
    return LayerSeconds(matmul + forward, back + backward + recomputed, forward, backward)


def tower_seconds(c: CostContext, hardware: Hardware) -> tuple[float, float]:
    """Return the seconds of a vision tower's forward and backward in a micro-batch, on the rank with most patches."""
    tower = c.model.tower
    if tower is None or c.job.mode == "decode":
        return 0.0, 0.0
    products, attention = tower_flops(c, largest=True)
    # Two norms, two residuals, rotary embeddings of q and k, the MLP's activation function, as in a decoder layer.
    act = (5 if tower.gated else 2) * c.b * tower.ffn
    each = tower.width * (2 * NORM_BYTES + (6 + 18) * c.b) + act
    moved = most_patches(c) * tower.depth * each / hardware.memory_bandwidth
    frame = max((p.patches for p in c.job.pictures), default=1)
    forward, backward = _attention_seconds(attention, ("causal", frame), hardware, c.job)
    linear = products / matmul_speed(hardware, c.job) + moved
    if c.job.mode != "train":
        return linear + forward, 0.0
    recomputed = 0.0 if c.job.memory.checkpointing == "none" else linear + forward
    return linear + forward, 2.0 * linear + backward + recomputed


def _recompute_seconds(layer: LayerShape, c: CostContext, hardware: Hardware, matmul: float, attention: float) -> float:
    """Return the seconds of what one layer's backward recomputes.

    `matmul` and `attention` are the seconds of the layer's forward without attention, and of the attention's forward.
    """
    memory, bandwidth = c.job.memory, hardware.memory_bandwidth
    again = matmul + (0.0 if layer.mixing.checkpointed(c) else attention)
    inputs = c.job.recomputed_inputs(len(c.model.layers)) / len(c.model.layers)
    seconds = 0.0 if memory.checkpointing == "none" else again * (1 + inputs)
    if memory.tiled:
        weights = sum(layer.mlp.active(p) for p in layer.parameters if p.name.startswith("mlp.") and len(p.shape) > 1)
        seconds += 2.0 * weights * c.tokens / c.mesh.tensor / matmul_speed(hardware, c.job)
        # Each norm for its own backward, and for that of the layer it feeds.
        seconds += c.tokens * 4 * NORM_BYTES * c.d / bandwidth
    slices = len(layer.mixing.slices(c))
    if slices > 1:
        matrices = (p for p in layer.parameters if not p.name.startswith("mlp.") and len(p.shape) > 1)
        seconds += 2.0 * sum(p.numel for p in matrices) * c.tokens / matmul_speed(hardware, c.job)
        # Each slice reads the normed input for its projections, twice, and for their gradients.
        seconds += (3 * slices - 2) * c.tokens * NORM_BYTES * c.d / bandwidth if memory.tiled else 0.0
    if recomputes_mlp_act(c.job):  # SwiGLU: the function (2) and the product (3), then the function for the gate
        seconds += c.tokens * 7 * c.b * layer.mlp.width / c.mesh.tensor / bandwidth
    return seconds


def _kernel_overhead(layer: LayerShape, job: Job, hardware: Hardware) -> float:
    """Return attention's time over that of its FLOPs: for full blocks on the diagonal, and the softmax itself."""
    if job.mode == "decode" or not layer.mixing.q_heads:
        return 1.0
    block = hardware.attention_block / layer.mixing.seen(job.context)
    width = 2 * hardware.attention_width / (layer.mixing.head_dim + layer.mixing.v_head_dim)
    return (1.0 + block) * (1.0 + width)


def _elementwise_bytes(layer: LayerShape, c: CostContext) -> float:
    """Return one token's memory traffic in a layer's forward, outside products and attention, in eager torch.

    `NORM_BYTES` for a norm; in elements, 9 per element of Q and K for rotary embeddings, 3 for a residual, 5 for
    SwiGLU, 2 each for packing and unpacking.
    """
    b, mixing = c.b, layer.mixing
    q, kv = mixing.q_heads * mixing.head_dim, mixing.kv_heads * (mixing.head_dim + mixing.v_head_dim)
    packed = 2 * b * (2 * q + kv) if c.mesh.ulysses > 1 and mixing.shards_heads else 0
    heads = 9 * b * (q + kv / 2) + packed + 5 * b * layer.mlp.width
    return 2 * NORM_BYTES * c.d + 6 * b * c.d + heads / c.mesh.tensor


def _attention_seconds(flops: float, attended: tuple[str, float], hardware: Hardware, job: Job) -> tuple[float, float]:
    """Return the seconds of the forward, and of the backward (2.5 times the FLOPs).

    `attended`: the kind of mask, and the most keys of a query.
    """
    peak = matmul_speed(hardware, job) / hardware.matmul_efficiency
    of_forward, of_backward = hardware.attention_fractions(*attended)
    forward = flops / (hardware.attention_forward_flops or peak * of_forward)
    if hardware.attention_flops:
        return forward, 3.5 * flops / hardware.attention_flops - forward
    return forward, 2.5 * flops / (peak * of_backward)


def optimizer_seconds(c: CostContext, hardware: Hardware) -> float:
    """Return the optimizer's time.

    AdamW reads a weight, its gradient and two moments and writes three of them: 28 bytes.
    """
    if c.job.mode != "train":
        return 0.0
    moved = trained_elements(c) * 28.0
    if c.on_host:  # whose memory a node's ranks share
        return moved * min(c.mesh.ranks, hardware.gpus_per_node) / hardware.host_memory_bandwidth
    return moved / hardware.memory_bandwidth


# ---------------------------------------------------------------------------------------------------------------------
# A step, and the communication that computing hides.


def step_times(c: CostContext, hardware: Hardware) -> tuple[float, float]:
    """Return the seconds of computing in a step, without the optimizer, and of communication that overlaps with it."""
    micro = c.micro_batches
    sums = 1 if sums_gradients_once(c, hardware) else micro
    compute, hidden, first_gather = head_seconds(c, hardware), 0.0, 0.0
    for layer, of_slices, count in layers_by_slices(c):
        computing = layer_seconds(layer, of_slices, hardware)
        compute += count * (computing.forward + computing.backward)
        hidden += count * micro * hidden_layer_seconds(layer, computing, of_slices, hardware)
        # While a layer computes, the next layer's weights are gathered, and the last one's gradients scattered.
        weights = layer_weights_sent(layer, c)
        if not weights:
            continue
        gather, *rest = (c.job.forwards * _hideable([sent], c, hardware) for sent in weights)
        unsummed = rest[:1]  # the gather of the backward
        in_forward = min(gather, computing.forward)
        hidden += count * micro * in_forward
        hidden += count * sums * min(sum(rest), computing.backward)
        hidden += count * (micro - sums) * min(sum(unsummed), computing.backward)
        first_gather = max(first_gather, in_forward)  # which overlaps with nothing
    forward, backward = tower_seconds(c, hardware)
    compute += forward + backward
    for sent, computing_of in zip(block_weights_sent(c), (forward, backward, backward), strict=False):
        hidden += micro * min(_hideable([sent], c, hardware), computing_of)
    # Recomputed inputs are needed at once: only a ring overlaps, with its attention.
    if recomputed := c.job.recomputed_inputs(len(c.model.layers)):
        attention = layer_seconds(c.model.layers[0], c, hardware).attention_forward
        hidden += micro * min(_hideable(_ring(input_recompute_sent(c)), c, hardware), attention * recomputed)
    if (teacher := c.teacher) is not None:
        its_own, overlapped = step_times(teacher, hardware)
        head = 2.0 * c.tokens * c.model.vocab / c.mesh.tensor * teacher.d / matmul_speed(hardware, c.job)
        compute, hidden = compute + its_own + head, hidden + micro * overlapped
    return micro * compute, hidden - micro * first_gather


def head_seconds(c: CostContext, hardware: Hardware) -> float:
    """Return the seconds of head and loss: of every token in training, else of the last one of a sequence."""
    train = c.job.mode == "train"
    logits = (c.tokens if train else c.sequences) * c.model.vocab / c.mesh.tensor
    products = 2.0 * logits * c.d / matmul_speed(hardware, c.job)
    # The loss's forward and backward read and write the logits some eight times in fp32.
    return (2 + c.model.head.trained) * products + 32.0 * logits / hardware.memory_bandwidth if train else products


def hidden_layer_seconds(layer: LayerShape, computing: LayerSeconds, c: CostContext, hardware: Hardware) -> float:
    """Return the overlapped communication of one layer's sequence and tensor methods in one micro-batch.

    A ring's next block is sent while the current one computes, and a chunk of heads while another computes; an
    all-to-all of all heads and an all-gather wait for their data. The part of a message that takes the cores
    (`Hardware.hideable`) overlaps with nothing. `computing`: the layer's seconds.
    """
    c = c.of_layer(layer)
    sents = method_sent(layer, c)
    hidden, ring = _hidden_all_to_all(sents, computing, c, hardware), _ring(sents)
    schedule = layer.mixing.ring_schedule(c) if ring else None
    if schedule is not None:
        hidden += _hideable(ring, c, hardware) - _ring_waits(ring, computing, schedule, c, hardware)
    return hidden


def _ring(sents: Sequence[Sent]) -> list[Sent]:
    return [sent for sent in sents if sent.op == "p2p"]


def _hidden_all_to_all(sents: Sequence[Sent], computing: LayerSeconds, c: CostContext, hardware: Hardware) -> float:
    """Return the seconds of one layer's all-to-alls that overlap with the attention of other chunks of heads.

    The first chunk's scatter and the last chunk's gather overlap with nothing; the others with at most n - 1 of n parts
    of the attention. If chunks share a KV head, it is sent with the first of them and its gradient with the last, so
    that these messages are larger than an n-th.
    """
    if c.job.overlap_chunks == 1:
        return 0.0

    def seconds(what: str) -> list[float]:
        return [
            _hideable([sent], c, hardware) for sent in sents if sent.op == "all_to_all" and sent.what.endswith(what)
        ]

    outputs = seconds("O to tokens")
    if len(outputs) < 2:
        return 0.0
    forwards, backwards = c.job.attention_passes
    forward = sum(seconds("Q, K, V to heads")[1:]) + sum(outputs[:-1])
    backward = sum(seconds("dO to heads")[1:]) + sum(seconds("dQ, dK, dV to tokens")[:-1])
    part = (len(outputs) - 1) / len(outputs)
    hidden = min(forward, forwards * computing.attention_forward * part)
    return hidden + min(backward, backwards * computing.attention_backward * part)


def _ring_waits(
    ring: list[Sent], computing: LayerSeconds, schedule: RingSchedule, c: CostContext, hardware: Hardware
) -> float:
    """Return the seconds that one layer's forwards and backwards wait for ring messages.

    `ring`: P2P messages of the layer, in pairs: keys and values, gradients.
    """
    steps = schedule.routes.steps
    if steps == 0:
        return 0.0
    forwards, backwards = c.job.attention_passes
    # Chunks of heads one after the other are like one with all their messages: both sides of `ring_wait` grow alike.
    kv, gradient = (_hideable(rows, c, hardware) / steps for rows in (ring[::2], ring[1::2]))
    kv, gradient = kv / (forwards + backwards), gradient / max(1, backwards)
    forward = ring_wait(kv, 0.0, computing.attention_forward, schedule.own, steps)
    return forwards * forward + backwards * ring_wait(kv, gradient, computing.attention_backward, schedule.own, steps)


def ring_wait(kv: float, gradient: float, attention: float, own: float, steps: int) -> float:
    """Return the seconds that a rank of a ring waits for messages in one forward or backward of an attention.

    Step 0 computes the rank's own block, each further step a received block. While a step computes, the next
    step's block arrives, and from step 2 on a gradient of the step before. A backward leaves half of its own block
    for the end, to overlap with the last gradient.

    Args:
        kv: seconds of a message of keys and values.
        gradient: seconds of a message of gradients, 0 in a forward.
        attention: seconds of computing, all steps together.
        own: fraction of it in step 0.
        steps: hops of the block that travels furthest, at least 1.
    """
    first, each = attention * own * (0.5 if gradient else 1.0), attention * (1 - own) / steps
    arriving = [kv - first] + [kv - each] * (steps > 1) + [gradient - each] * (steps > 1) + [gradient - first]
    between = max(0, steps - 2) * max(0.0, kv + gradient - each)
    return sum(max(0.0, wait) for wait in arriving) + between


def seconds_of(sents: Sequence[Sent], c: CostContext, hardware: Hardware) -> float:
    """Return the seconds of all calls."""
    return sum(sent.calls * _seconds_of_call(sent, c, hardware) for sent in sents)


def _hideable(sents: Sequence[Sent], c: CostContext, hardware: Hardware) -> float:
    """Return the seconds that can overlap with computing."""
    return sum(
        sent.calls * _seconds_of_call(sent, c, hardware) * hardware.hideable(sent.op, sent.axis) for sent in sents
    )


def _seconds_of_call(sent: Sent, c: CostContext, hardware: Hardware) -> float:
    return hardware.seconds(sent.op, sent.axis, sent.bytes, *c.groups[sent.axis])


# ---------------------------------------------------------------------------------------------------------------------
# Offloads. Checkpoints leave layer by layer in the forward, and return in the backward. With `cpu_offload` weights
# arrive for both, and gradients leave. An offloaded KV cache arrives layer by layer. A GPU's host link carries both
# directions at a time.

PINNED_WEIGHT = 4
"""Bytes of a weight that cross to the GPU under `cpu_offload`: the GPU casts it."""


Bottleneck = tuple[float, float]
"""The bytes/s that the host link needs to overlap fully, and its bytes/s."""


def offload_wait(c: CostContext, hardware: Hardware, stored: Offloaded) -> tuple[float, Bottleneck | None]:
    """Return the seconds of a step that wait for the host link, and its bottleneck; None if nothing moves."""
    if not stored.host_bytes:
        return 0.0, None
    train, micro, ranks, tensor = c.job.mode == "train", c.micro_batches, c.weight_ranks, c.mesh.tensor
    sums, speed = 1 if sums_gradients_once(c, hardware) else micro, hardware.host_bandwidth
    seconds, needed = 0.0, 0.0
    # A chunk fetches what the chunks before it have stored, a token the whole cache.
    fetched = (c.job.forwards - 1) / 2 if c.job.mode == "prefill" else 1.0
    for layer, count in c.model.layer_kinds:
        computing = layer_seconds(layer, c, hardware)
        weights = shard_elements(layer.parameters, ranks, tensor) * PINNED_WEIGHT if c.on_host else 0
        saved = checkpoint_per_token(layer, c).total * c.tokens if train and c.offloads else 0
        is_on_host = stored.host_bytes.get("kv_cache") and layer.mixing.cached_per_token
        cached = layer.mixing.cache_bytes(c) * fetched if is_on_host else 0
        gradients = weights * sums / micro
        # The two directions of the link run concurrently.
        forward, backward = max(saved, weights + cached), max(saved + weights, gradients)
        for size, overlap in ((forward, computing.forward), (backward, computing.backward * train)):
            if overlap:
                seconds += count * micro * max(0.0, size / speed - overlap)
                needed = max(needed, size / overlap)
    if c.on_host:  # nothing overlaps with the weights outside the layers
        root = shard_elements(c.model.root, ranks, tensor) * PINNED_WEIGHT
        seconds += micro * root * (2 if train else 1) / speed
    return seconds, (needed, speed) if needed else None
