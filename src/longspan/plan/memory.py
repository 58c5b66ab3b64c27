"""Where a GPU's memory goes, item by item, at the moment of a step when it holds most.

A training step has such moments: the loss (all activations are kept, the logits exist); the backward of the last layer
(activations are still kept, a layer's gradients are under way) and of the first (gradients of all others exist); the
gradients of embeddings and head; the sum of gradients where weights are not sharded; the optimizer. Each is summed up
from its items; the largest one is what must fit, and its items are what is reported. A forward alone has two: inside
attention, and inside the MLP.

What a layer keeps for its backward follows transformers' Llama layer and `longspan.attention` tensor by tensor;
`benchmarks/plan_accuracy.py` compares it with measured peaks. Experts and linear attention are estimates.

Letters: L tokens of a rank (all its sequences at once), b bytes per element, d hidden size, f MLP size, V vocabulary.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from longspan.plan.communication import heads_of, local_batch, local_tokens, shard_elements

if TYPE_CHECKING:
    from longspan.plan.hardware import Hardware
    from longspan.plan.job import Job, Mesh
    from longspan.plan.shapes import LayerShape, ModelShape

ITEMS = {
    "weights": "weights at rest: this GPU's shard",
    "optimizer": "optimizer state",
    "gradients": "gradients at rest, and of the layers under way",
    "gathered_weights": "weights gathered to compute with: embeddings and head, a layer, and the next one prefetched",
    "activations": "what layers keep for the backward",
    "qkv": "Q, K and V of this GPU",
    "attention_workspace": "buffers of the exchange and the attention's output",
    "mlp": "intermediates of the MLP under way",
    "hidden": "hidden states under way, and their gradients",
    "logits": "logits, their gradient, and the loss's fp32 tiles",
    "kv_cache": "keys and values of all layers",
    "comm_buffers": "buffers of the ring: the block that arrives, gradients that travel",
    "reserve": "what torch, CUDA and NCCL keep for themselves",
}
"""The items of `memory`, and what they are."""

PREFILL_TILES = 16
"""Tiles of the MLP in prefill and decode where the job does not say: without a backward, tiles cost nothing."""


@dataclass(frozen=True)
class Scale:
    """What all items are made of, for one job on one mesh."""

    tokens: int
    b: int
    d: int
    on_cpu: bool
    hidden_shards: int


def cache_bytes(layer: LayerShape, job: Job, mesh: Mesh) -> int:
    """One layer's KV cache on the GPU that holds most of it: its heads (ulysses), its tokens (ring)."""
    batch = local_batch(job, mesh)
    if layer.kind == "linear":
        return batch * (layer.state_elements // mesh.tensor) * job.bytes_per_element
    tokens = -(-min(job.context, layer.window or job.context) // mesh.ring)
    if layer.latent_dim:  # one latent vector serves all heads, so heads cannot share it out
        return batch * tokens * layer.latent_dim * job.bytes_per_element
    heads = max(s.kv_heads for s in heads_of(layer.q_heads, layer.kv_heads, mesh.tensor, mesh.ulysses))
    return batch * tokens * heads * (layer.head_dim + layer.v_head_dim) * job.bytes_per_element


def memory(model: ModelShape, job: Job, mesh: Mesh, hardware: Hardware) -> dict[str, int]:
    """Bytes of every item of `ITEMS` on the GPU that holds most, at the moment when they sum up to most."""
    scale = Scale(
        tokens=local_tokens(job, mesh) * local_batch(job, mesh),
        b=job.bytes_per_element,
        d=model.d_model,
        on_cpu=not hardware.overlaps,
        # Megatron SP shards what lies between the layers' matrices over the tensor ranks; plain TP repeats it.
        hidden_shards=mesh.tensor if job.tensor_style == "megatron-sp" else 1,
    )
    constant = _weights(model, job, mesh)
    if job.mode == "train":
        moments = _training(model, job, mesh, scale)
    else:
        moments = _forward(model, job, mesh, scale)
        constant["kv_cache"] = sum(count * cache_bytes(layer, job, mesh) for layer, count in model.layer_kinds)
    most = max(moments, key=lambda items: sum(items.values()))
    constant["reserve"] = int(hardware.reserve_bytes)
    return {name: int(constant.get(name, 0) + most.get(name, 0)) for name in ITEMS}


def _weights(model: ModelShape, job: Job, mesh: Mesh) -> dict[str, int]:
    shard = _at_rest(model, job, mesh)
    state = {"adamw": 8, "sgd": 0}[job.optimizer] if job.mode == "train" else 0
    return {"weights": shard * job.bytes_per_weight, "optimizer": shard * state}


def _ranks(job: Job, mesh: Mesh) -> int:
    return mesh.weights if job.weight_sharding else 1


def _at_rest(model: ModelShape, job: Job, mesh: Mesh) -> int:
    """Elements of all weights that a GPU holds."""
    ranks = _ranks(job, mesh)
    layers = sum(count * shard_elements(layer.parameters, ranks, mesh.tensor) for layer, count in model.layer_kinds)
    return layers + shard_elements(model.root, ranks, mesh.tensor)


def _gathered(model: ModelShape, job: Job, mesh: Mesh, layers: int) -> int:
    """Bytes of gathered weights: the root's, and of so many of the largest layers. None where nothing is sharded."""
    if _ranks(job, mesh) == 1:
        return 0
    largest = max(layer.params for layer, _ in model.layer_kinds)
    return (model.root_params + layers * largest) // mesh.tensor * job.bytes_per_element


# ---------------------------------------------------------------------------------------------------------------------
# Training.


def _training(model: ModelShape, job: Job, mesh: Mesh, s: Scale) -> list[dict[str, int]]:
    t, shard, tokens = mesh.tensor, _at_rest(model, job, mesh), s.tokens
    autocast = _autocast(job, mesh)
    per_layer = {layer: tokens * kept_per_token(layer, job, mesh, s, autocast) for layer, _ in model.layer_kinds}
    kept_input = 0 if job.activation_offload else tokens * s.d * (4 if autocast else s.b) // s.hidden_shards
    if job.activation_checkpointing:
        kept = len(model.layers) * kept_input
        one = max(per_layer.values())
    else:
        kept = sum(count * per_layer[layer] for layer, count in model.layer_kinds)
        one = 0
    kept += 0 if job.activation_checkpointing else tokens * s.d * 4 * autocast  # the embedding's output
    casts = _cast_weights(model, mesh) if autocast else 0
    final_norm = tokens * _norm(s, s.d, autocast) + tokens * s.d * s.b
    vocab = model.vocab // t
    logits = tokens * vocab * s.b if not job.tiled_loss else min(tokens * vocab * s.b, _tile(s))
    tile = min(tokens * vocab * 4, _tile(s)) * (2 if s.b == 2 else 1)
    earlier = shard * 4 if job.batch > mesh.data else 0  # gradients of earlier micro-batches
    head = model.vocab * s.d // t
    widest, largest = _widest(model, t, s), max(layer.params for layer, _ in model.layer_kinds) // t
    under_way = (2 * widest if job.tiled_mlp == 1 else 2 * widest // job.tiled_mlp) * tokens
    hidden = 2 * tokens * s.d * (4 if autocast else s.b) // s.hidden_shards
    ring = _ring_buffers(model, job, mesh, backward=True)
    own = int(_ranks(job, mesh) > 1)
    # A reduce-scatter takes its gradients flat in fp32; gloo makes a copy of what it is given.
    flat = 4 * own * (2 if s.on_cpu else 1)
    moments = [
        {
            "activations": kept + final_norm,
            "logits": 2 * logits + tile,
            "gradients": earlier,
            "gathered_weights": _gathered(model, job, mesh, 1) + casts,
        },
        {
            "activations": kept + final_norm,
            "logits": logits,
            "hidden": hidden // 2,
            "gradients": earlier + head * (s.b if own else 4),
            "gathered_weights": _gathered(model, job, mesh, 1) + casts,
        },
        {
            "activations": kept + one,
            "mlp": under_way,
            "hidden": hidden,
            "comm_buffers": ring,
            # Of the head and the layer in the compute dtype, then flat for the reduce-scatter.
            "gradients": earlier + (head + largest) * s.b + largest * flat,
            "gathered_weights": _gathered(model, job, mesh, 2) + casts,
        },
        {
            "activations": (kept_input if job.activation_checkpointing else max(per_layer.values())) + one,
            "mlp": under_way,
            "hidden": hidden,
            "comm_buffers": ring,
            "gradients": shard * 4 + (head + largest) * s.b * own + largest * flat,
            "gathered_weights": _gathered(model, job, mesh, 1),
        },
        # Embeddings and head come last, all at once, while the first layer's may still be on their way.
        {"gradients": shard * 4 + head * s.b * own + (model.root_params // t + largest) * flat},
        {"gradients": shard * 4, "optimizer": 8 * _largest_shard(model, job, mesh) if s.on_cpu else 0},
    ]
    if _ranks(job, mesh) == 1 and mesh.weights > 1:
        moments.append({"gradients": shard * 4 + 4 * min(shard, 1 << 25)})
    return moments


def _autocast(job: Job, mesh: Mesh) -> bool:
    """bf16 over fp32 weights that are not sharded: torch casts what goes into each product, and keeps the rest fp32."""
    return job.dtype == "bf16" and not job.weight_sharding


def _norm(s: Scale, features: int, autocast: bool) -> int:
    """Bytes per token that an RMSNorm keeps: its input in fp32, one number, and the normalised input."""
    return features * 4 + 4 + features * (4 if autocast else s.b)


def kept_per_token(layer: LayerShape, job: Job, mesh: Mesh, s: Scale, autocast: bool) -> int:
    """Bytes per token of a rank that one layer keeps for its backward."""
    b, t = s.b, mesh.tensor
    # A linear layer keeps its input: one tensor for Q, K and V and one for gate and up; autocast makes five.
    kept = (2 * _norm(s, s.d, autocast) + (5 if autocast else 2) * b * s.d) // s.hidden_shards
    kept += _attention_kept(layer, mesh, s) + _mlp_kept(layer, job, s) // t
    if any("q_norm" in p.name for p in layer.parameters):
        kept += _norm(s, (layer.q_heads + layer.kv_heads) * layer.head_dim // t, autocast)
    kept += 2 * _norm(s, s.d, autocast) if any("post_feedforward" in p.name for p in layer.parameters) else 0
    return kept


def _attention_kept(layer: LayerShape, mesh: Mesh, s: Scale) -> int:
    """Q, K, V, the output as computed and as it goes into the projection, and a log-sum-exp per head.

    Per token of the rank: the heads of the rank with most, over the tokens of the whole group.
    """
    if layer.kind == "linear":  # an estimate: what goes in and out, and the gates
        return s.b * 3 * (layer.q_heads * layer.v_head_dim + 2 * layer.kv_heads * layer.head_dim) // mesh.tensor
    u = mesh.ulysses
    shares = heads_of(layer.q_heads, layer.kv_heads, mesh.tensor, u)
    mine = max(shares, key=lambda share: (share.q_heads, share.kv_heads))
    q, out = mine.q_heads * layer.head_dim, mine.q_heads * layer.v_head_dim
    kv = mine.kv_heads * (layer.head_dim + layer.v_head_dim)
    kept = u * (s.b * (q + kv + out) + 4 * mine.q_heads)
    if s.on_cpu:
        kept += u * s.b * kv  # laid heads-first for the CPU's kernel
    if u > 1:
        kept += s.b * layer.q_heads * layer.v_head_dim // mesh.tensor
    return kept


def _mlp_kept(layer: LayerShape, job: Job, s: Scale) -> int:
    if job.tiled_mlp > 1:
        return 0  # computed again, a tile at a time
    gated = 4 if layer.gated else 2
    routed = layer.experts_per_token * (gated * s.b * layer.expert_ffn + 2 * s.b * s.d) if layer.experts else 0
    return gated * s.b * (layer.ffn + layer.shared_ffn) + routed


def _widest(model: ModelShape, tensor: int, s: Scale) -> int:
    """Bytes per token of the widest MLP intermediate."""
    kinds = [layer for layer, _ in model.layer_kinds]
    return s.b * max(k.ffn + k.shared_ffn + k.experts_per_token * k.expert_ffn for k in kinds) // tensor


def _tile(s: Scale) -> int:
    """Bytes of fp32 logits that the loss looks at together: `longspan.loss.TILE_ELEMENTS`."""
    return 4 << (20 if s.on_cpu else 24)


@functools.lru_cache(maxsize=256)
def _matrices(model: ModelShape) -> int:
    layers = sum(
        count * sum(p.numel for p in layer.parameters if len(p.shape) > 1) for layer, count in model.layer_kinds
    )
    return layers + model.vocab * model.d_model


def _cast_weights(model: ModelShape, mesh: Mesh) -> int:
    """bf16 copies of all matrices, which autocast makes once and the backward keeps."""
    return 2 * _matrices(model) // mesh.tensor


def _largest_shard(model: ModelShape, job: Job, mesh: Mesh) -> int:
    ranks = _ranks(job, mesh)
    sizes = [shard_elements((p,), ranks, mesh.tensor) for layer, _ in model.layer_kinds for p in layer.parameters]
    return max(sizes + [shard_elements((p,), ranks, mesh.tensor) for p in model.root])


def _ring_buffers(model: ModelShape, job: Job, mesh: Mesh, *, backward: bool) -> int:
    """The K and V that arrive while others compute; in the backward dK and dV in fp32 besides, twice."""
    if mesh.ring == 1:
        return 0
    most = 0
    for layer, _ in model.layer_kinds:
        if layer.kind == "linear":
            continue
        heads = max(s.kv_heads for s in heads_of(layer.q_heads, layer.kv_heads, mesh.tensor, mesh.ulysses))
        tokens = local_tokens(job, mesh) * mesh.ulysses * local_batch(job, mesh)
        most = max(most, tokens * heads * (layer.head_dim + layer.v_head_dim))
    return most * (job.bytes_per_element + (2 * 4 if backward else 0))


# ---------------------------------------------------------------------------------------------------------------------
# A forward alone.


def _forward(model: ModelShape, job: Job, mesh: Mesh, s: Scale) -> list[dict[str, int]]:
    t, tokens = mesh.tensor, s.tokens
    gathered = _gathered(model, job, mesh, 2)
    softmax = [layer for layer, _ in model.layer_kinds if layer.kind != "linear"]
    qkv = out = packed = 0
    for layer in softmax:
        width = layer.q_heads * layer.head_dim + layer.kv_heads * (layer.head_dim + layer.v_head_dim)
        shares = heads_of(layer.q_heads, layer.kv_heads, t, mesh.ulysses)
        heads = max(
            share.q_heads * layer.head_dim + share.kv_heads * (layer.head_dim + layer.v_head_dim) for share in shares
        )
        qkv = max(qkv, tokens * width * s.b // t)
        packed = max(packed, tokens * mesh.ulysses * heads * s.b)
        out = max(out, tokens * layer.q_heads * layer.v_head_dim * s.b // t)
    exchanged = mesh.ulysses > 1 and job.mode != "decode"
    # Sending: what is sent and what arrives. Computing: what arrived and the output.
    workspace = max(2 * packed, packed + out) if exchanged else out
    gated = 3 if any(layer.gated for layer, _ in model.layer_kinds) else 2
    tiles = job.tiled_mlp if job.tiled_mlp > 1 else (1 if job.mode == "train" else PREFILL_TILES)
    return [
        {
            "gathered_weights": gathered,
            "qkv": qkv,
            "attention_workspace": workspace,
            "hidden": tokens * s.d * s.b // s.hidden_shards,
            "comm_buffers": _ring_buffers(model, job, mesh, backward=False),
        },
        {
            "gathered_weights": gathered,
            "hidden": 2 * tokens * s.d * s.b // s.hidden_shards,
            "mlp": tokens * _widest(model, t, s) * gated // tiles,
            "logits": local_batch(job, mesh) * model.vocab // t * (s.b + 4),
        },
    ]
