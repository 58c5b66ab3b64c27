"""Peak memory of one GPU, item by item; the KV cache; what is in the host's memory.

A step has several peak candidates, such as the loss or the backward of the first layer. Each is summed from its items;
the largest is reported. `training_peaks.py` lists those of a training step, this file those of a forward without a
backward (prefill, decode). `benchmarks/plan_accuracy.py` compares the sum with measured peaks.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

from longspan.core.parallel import groups_of_widths
from longspan.plan.cost.saved import checkpoint_bytes, mlp_tiles
from longspan.plan.cost.training_peaks import accumulated_bytes, training_peaks
from longspan.plan.cost.weights import gathered_bytes, sums_gradients_once, trained_elements, weights_at_rest
from longspan.plan.hardware import ALL_TO_ALL_BYTES, COMMUNICATOR_BYTES, Hardware
from longspan.plan.job import CostContext
from longspan.plan.layers.base import Buffers, Mlp, TokenMixing

ITEMS = {
    "weights": "weights at rest: this GPU's shard",
    "optimizer": "optimizer state",
    "gradients": "gradients at rest, and of the layers in their backward",
    "gathered_weights": "weights gathered for compute: a layer, and the next one prefetched; embedding, head",
    "activations_hidden": "saved for the backward: layers' inputs, inputs of norms and products",
    "activations_attention": "saved for the backward: Q, K, V, outputs, log-sum-exps",
    "activations_mlp": "saved for the backward: intermediates of the MLPs",
    "vision": "pixels of the batch, what the vision tower saves for the backward, embeddings of images and video",
    "qkv": "Q, K and V of this GPU",
    "attention_workspace": "buffers of the all-to-all, the attention's output, a ring's fp32 sums",
    "mlp": "intermediates of the current MLP",
    "hidden": "current hidden states, and their gradients",
    "logits": "a tile of logits and its gradient",
    "kv_cache": "keys and values of all layers, or of two if they are offloaded to a host; states of recurrent layers",
    "comm_buffers": "buffers of the ring: current and next KV block, gradients in flight",
    "reserve": "held by torch, CUDA and NCCL themselves; on a CPU, what a plan is rounded up by",
}
"""The items of `peak_memory`, with a description."""


PREFILL_TILES = 16
"""Tiles of MLP and norms in prefill and decode, unless the job sets them: without a backward, tiles cost nothing."""

CPU_MARGIN = 0.8
"""Part of the other items that is added on a CPU: attention computes in fp32 there, gloo copies messages, and recurrent
layers run as transformers' code in torch."""

FRAME_STATES = 2
"""Hidden states that transformers' frames hold: the embeddings, and the layer's input."""


def peak_memory(c: CostContext, hardware: Hardware, tiles: int = PREFILL_TILES) -> dict[str, int]:
    """Return the bytes of every item of `ITEMS` at the peak, max over ranks.

    Without FSDP, bf16 training is torch's autocast, which holds fp32 tensors beside bf16 ones: planned as fp32, with
    bf16 copies of all weights. `tiles`: of MLP and norms in prefill and decode, unless the job sets them.
    """
    casts = 0
    if c.job.mode == "train" and c.job.dtype == "bf16" and not c.job.weight_sharding:
        casts, c = 2 * c.model.params // c.mesh.tensor, replace(c, job=replace(c.job, dtype="fp32"))
    items = dict(_without_reserve(c, sums_gradients_once(c, hardware), tiles))
    items["gathered_weights"] += casts
    margin = CPU_MARGIN * sum(items.values()) if hardware.on_cpu else 0
    return {**items, "reserve": int(hardware.reserve_bytes + margin + _communicators(c, hardware))}


def _communicators(c: CostContext, hardware: Hardware) -> float:
    """Return the bytes that NCCL needs for the narrower groups of elastic batches."""
    if hardware.on_cpu or not c.job.elastic:
        return 0.0
    groups = groups_of_widths(c.mesh)
    peers = sum(min(ranks, hardware.gpus_per_node) - 1 for axis, ranks in groups if axis == "ulysses")
    return COMMUNICATOR_BYTES * len(groups) + ALL_TO_ALL_BYTES * peers


@functools.lru_cache(maxsize=4096)
def _without_reserve(c: CostContext, once: bool, tiles: int) -> Mapping[str, int]:
    """Return `peak_memory` without the reserve: the same for many kinds of GPU.

    `once`: whether gradients of all micro-batches are summed over the ranks once.
    """
    at_rest = {} if c.on_host else weights_at_rest(c)
    if c.job.mode == "train":
        peaks = training_peaks(c, once)
        if c.teacher is not None:
            accumulated = {"gradients": accumulated_bytes(c, once)}
            peaks += [{**peak, **accumulated} for peak in _forward_peaks(c.teacher, tiles=1)]
    else:
        at_rest["kv_cache"] = cache_on_device(c)
        chunk = min((tokens for tokens, _ in c.job.prompt_chunks[:1]), default=c.job.context)
        peaks = _forward_peaks(replace(c, job=replace(c.job, context=chunk)), tiles)
    peak = max(peaks, key=lambda items: sum(items.values()))
    return {name: int(at_rest.get(name, 0) + peak.get(name, 0)) for name in ITEMS}


# ---------------------------------------------------------------------------------------------------------------------
# A forward without a backward.


def _forward_peaks(c: CostContext, tiles: int) -> list[dict[str, int]]:
    """Return the peak candidates: in attention, the norm behind it, the MLP, the sum of its parts, the last norm.

    Megatron SP shards hidden states over the tensor ranks, and gathers them before the products. With TP every rank
    holds them, and sums a copy of each product's output. Experts compute a rank's own tokens: they gather nothing, and
    with TP join the ranks' tokens afterwards.
    """
    stream = c.tokens * c.d * c.b // c.hidden_shards
    all_tokens = c.tokens * c.d * c.b if c.mesh.tensor > 1 and c.mesh.tensor_style == "megatron-sp" else 0
    # The sum with attention's output, and two fp32 tensors of a tile: an RMSNorm's input and its result.
    norm = (FRAME_STATES + 1) * stream + 2 * c.tokens * c.d * 4 // c.hidden_shards // tiles
    mlps = {layer.mlp for layer, _ in c.model.layer_kinds}
    layers = {"gathered_weights": gathered_bytes(c, 2)}
    head = {"logits": c.sequences * c.model.vocab // c.mesh.tensor * (c.b + 4)}
    in_mlp = max(_in_mlp(mlp, c) for mlp in mlps)
    intermediates = _mlp_intermediates(c, tiles)
    return [
        {**layers, **_attention(c), "hidden": (FRAME_STATES + 1) * stream + all_tokens},
        {**layers, "hidden": norm},
        {**layers, **head, "hidden": in_mlp, "mlp": intermediates},
        {**layers, "hidden": max(_mlp_sum(mlp, c) for mlp in mlps)},
        # There is no layer's input any more.
        {**head, "gathered_weights": gathered_bytes(c, 0, heads=2), "hidden": norm - stream},
    ]


def _attention(c: CostContext) -> dict[str, int]:
    """Return what attention holds besides hidden states, in the layer that needs most."""
    return max(
        (mixing_peak(layer.mixing, c) for layer, _ in c.model.layer_kinds), key=lambda items: sum(items.values())
    )


def mixing_peak(mixing: TokenMixing, c: CostContext) -> dict[str, int]:
    """Return the largest of three peaks: sending q, k and v; the kernel or the ring; sending the output back."""
    qkv, out, packed = _buffers(mixing, c)
    ring = mixing.ring_buffers(c)
    all_to_all = c.mesh.ulysses > 1 and c.job.mode != "decode"
    peaks = [Buffers(ring.comm, packed * all_to_all + max(out, ring.workspace))]
    if all_to_all:  # sent and received buffer; and behind the kernel those of the output, and the output
        peaks += [Buffers(0, 2 * packed), Buffers(0, 3 * out)]
    peak = max(peaks, key=lambda each: each.total)
    return {"qkv": qkv, "attention_workspace": peak.workspace, "comm_buffers": peak.comm}


def _buffers(mixing: TokenMixing, c: CostContext) -> tuple[int, int, int]:
    """Return `TokenMixing.forward_buffers`; a chunk over latent vectors also holds the layer's own q, k and v."""
    cached = mixing.cache_mixing(c)
    if c.job.prefill_chunk is None or cached is mixing:
        return mixing.forward_buffers(c)
    qkv, out, packed = cached.forward_buffers(c)
    return mixing.forward_buffers(c)[0] + qkv, out, packed


def _in_mlp(mlp: Mlp, c: CostContext) -> int:
    """Return the sum with attention's output, its norm, and the MLP's input from all tensor ranks."""
    stream, all_tokens = c.tokens * c.d * c.b // c.hidden_shards, c.tokens * c.d * c.b
    entering = 0
    if mlp.experts > 1:
        entering = all_tokens // c.mesh.tensor if c.mesh.tensor > c.hidden_shards else 0
    elif c.mesh.tensor > 1 and c.mesh.tensor_style == "megatron-sp":
        entering = all_tokens
    return (FRAME_STATES + 2) * stream + entering


def _mlp_sum(mlp: Mlp, c: CostContext) -> int:
    """Return the hidden states while the tensor ranks' MLP outputs are summed, or the experts' tokens joined."""
    if c.mesh.tensor == 1:  # the MLP's own intermediates are more
        return 0
    part = c.tokens * c.d * c.b
    if mlp.experts > 1:
        part //= c.mesh.tensor
    elif c.mesh.tensor_style == "megatron-sp":  # several rows are transposed first
        part *= 1 + (c.sequences > 1)
    return _in_mlp(mlp, c) + part + c.tokens * c.d * c.b // c.hidden_shards


def _mlp_intermediates(c: CostContext, tiles: int) -> int:
    """Return the intermediates of one tile of the widest MLP."""
    layers = [layer for layer, _ in c.model.layer_kinds]
    widest = c.b * max(layer.mlp.width for layer in layers) // c.mesh.tensor
    asked = min(mlp_tiles(layer, c) for layer in layers)
    return c.tokens * widest * max(2 + layer.mlp.gated for layer in layers) // (asked if asked > 1 else tiles)


# ---------------------------------------------------------------------------------------------------------------------
# The KV cache. An offloaded one is on the device for two layers, the current and the next one, with room for the tokens
# being computed. A layer with a window then holds what all of these tokens attend to, which is more than it caches.
# States of recurrent layers stay on the device.


def cache_on_device(c: CostContext) -> int:
    """Return the bytes of the cache in the device's memory."""
    return staged_bytes(c) if c.job.cache.offload == "host" else key_value_bytes(c) + state_bytes(c)


def key_value_bytes(c: CostContext) -> int:
    """Return the bytes of all layers' keys and values, max over ranks."""
    return sum(n * layer.mixing.cache_bytes(c) for layer, n in c.model.layer_kinds if layer.mixing.cached_per_token)


def state_bytes(c: CostContext) -> int:
    """Return the bytes of all recurrent layers' states, equal on every rank."""
    return sum(n * layer.mixing.cache_bytes(c) for layer, n in c.model.layer_kinds if not layer.mixing.cached_per_token)


def staged_bytes(c: CostContext, generated: int = 0, chunk: int | None = None) -> int:
    """Return the bytes of an offloaded cache on the device: two consecutive layers with keys and values, max over
    forwards and ranks, and the states of recurrent layers.

    The job's context is the prompt, `generated` are tokens after it, one per forward. `chunk` tokens of the prompt are
    computed at a time: the job's by default, or else all.
    """
    job = c.job
    length = min(chunk or job.prefill_chunk or job.context, job.context)
    last = job.context % length or length
    # (prompt, generated, tokens of the forward)
    forwards = [(job.context, generated, 1)] if generated or job.mode == "decode" else []
    if generated or job.mode != "decode":
        forwards.append((job.context, 0, last))
        if last < length:  # a window holds most in a full chunk
            forwards.append((job.context - last, 0, length))
    staged = [_staged(replace(c, job=replace(job, context=n)), more, chunk, step) for n, more, step in forwards]
    return max(staged) + state_bytes(c)


def _staged(c: CostContext, generated: int, chunk: int | None, step: int) -> int:
    kinds = {layer: layer.mixing.cache_by_rank(c, generated, chunk, step) for layer, _ in c.model.layer_kinds}
    current = [kinds[layer] for layer in c.model.layers if layer.mixing.cached_per_token]
    none = [0] * c.mesh.sequence_ranks
    is_first_forward = step == c.job.context + generated  # the cache is empty: nothing to prefetch
    prefetched = [none] * len(current) if is_first_forward else [*current[1:], none]
    pairs = [pair for one, other in zip(current, prefetched, strict=True) for pair in zip(one, other, strict=True)]
    return max((sum(pair) for pair in pairs), default=0)


# ---------------------------------------------------------------------------------------------------------------------
# What memory options move to the host's memory, which the GPUs of a node share.

HOST_SHARE = 0.9
"""Fraction of a node's memory that ranks may fill: the system, processes and the file cache need the rest."""


@dataclass(frozen=True)
class Offloaded:
    """What is stored outside a GPU."""

    host_bytes: dict[str, int]  # of one rank in its host's memory, by item
    ranks_per_node: int  # ranks that share a host

    @property
    def host_node_bytes(self) -> int:
        """Bytes in the host's memory, all ranks of a node."""
        return sum(self.host_bytes.values()) * self.ranks_per_node

    def fits(self, hardware: Hardware) -> bool:
        """Whether it fits in a node's memory."""
        return self.host_node_bytes <= HOST_SHARE * hardware.host_memory


def offloaded_bytes(c: CostContext, hardware: Hardware) -> Offloaded:
    """Return the bytes outside the GPU."""
    job = c.job
    train, host = job.mode == "train", dict[str, int]()
    if c.on_host:
        host |= weights_at_rest(c)
        if train:
            host["gradients"] = trained_elements(c) * 4
    if train and c.offloads:
        host["activations"] = checkpoint_bytes(c)
    if not train and job.cache.offload == "host":
        host["kv_cache"] = key_value_bytes(c)
    host = {name: nbytes for name, nbytes in host.items() if nbytes}
    return Offloaded(host, min(c.mesh.ranks, hardware.gpus_per_node))
