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

from longspan.plan.communication import GRADIENT_BUCKET, heads_of, local_batch, local_tokens, shard_elements

if TYPE_CHECKING:
    from longspan.plan.hardware import Hardware
    from longspan.plan.job import Job, Mesh
    from longspan.plan.shapes import LayerShape, ModelShape

ITEMS = {
    "weights": "weights at rest: this GPU's shard",
    "optimizer": "optimizer state",
    "gradients": "gradients at rest, and of the layers under way",
    "gathered_weights": "weights gathered to compute with: embeddings and head, a layer, and the next one prefetched",
    "activations_hidden": "kept for the backward: layers' inputs, what norms and products take in",
    "activations_attention": "kept for the backward: Q, K, V, outputs, log-sum-exps",
    "activations_mlp": "kept for the backward: intermediates of the MLPs",
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
        on_cpu=hardware.on_cpu,
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
    shard = elements_at_rest(model, job, mesh)
    state = {"adamw": 8, "sgd": 0}[job.optimizer] if job.mode == "train" else 0
    return {"weights": shard * job.bytes_per_weight, "optimizer": shard * state}


def _ranks(job: Job, mesh: Mesh) -> int:
    return mesh.weights if job.weight_sharding else 1


def elements_at_rest(model: ModelShape, job: Job, mesh: Mesh) -> int:
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


@dataclass(frozen=True)
class Kept:
    """Bytes that layers keep for their backward, by kind."""

    hidden: int = 0
    attention: int = 0
    mlp: int = 0

    def __add__(self, other: Kept) -> Kept:
        return Kept(self.hidden + other.hidden, self.attention + other.attention, self.mlp + other.mlp)

    def __mul__(self, times: int) -> Kept:
        return Kept(self.hidden * times, self.attention * times, self.mlp * times)

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


def _training(model: ModelShape, job: Job, mesh: Mesh, s: Scale) -> list[dict[str, int]]:
    """The moments of a training step: loss, head, last layer, first layer, embeddings, optimizer, gradient sum."""
    t, shard, tokens = mesh.tensor, elements_at_rest(model, job, mesh), s.tokens
    sharded, autocast = _ranks(job, mesh) > 1, _autocast(job, mesh)
    at_loss, last_layer, before_it, first_layer = _kept(model, job, mesh, s)
    at_head = at_loss + Kept(hidden=tokens * (_norm(s, s.d, autocast) + s.d * s.b))  # the last norm, the head's input
    largest = max(layer.params for layer, _ in model.layer_kinds) // t
    head = model.vocab * s.d // t
    logits, tile = _logits(model, job, mesh, s)
    earlier = shard * 4 if job.batch > mesh.data else 0  # gradients of earlier micro-batches
    casts = _cast_weights(model, mesh) if autocast else 0
    # A reduce-scatter takes its gradients flat in fp32; gloo makes a copy of what it is given.
    flat = (8 if s.on_cpu else 4) if sharded else 0
    hidden = tokens * s.d * (4 if autocast else s.b) // s.hidden_shards
    backward = {
        "mlp": 2 * _widest(model, t, s) * tokens // job.tiled_mlp,
        "hidden": 2 * hidden,
        "comm_buffers": _ring_buffers(model, job, mesh, backward=True),
    }
    one_gathered = _gathered(model, job, mesh, 1) + casts
    under_way = (head + largest) * s.b  # gradients in the compute dtype, of the head and a layer
    moments = [
        {**at_head.items(), "logits": 2 * logits + tile, "gradients": earlier, "gathered_weights": one_gathered},
        {
            **at_head.items(),
            "logits": logits,
            "hidden": hidden,
            "gradients": earlier + head * (s.b if sharded else 4),
            "gathered_weights": one_gathered,
        },
        {
            **last_layer.items(),
            **backward,
            "gradients": earlier + under_way,
            "gathered_weights": _gathered(model, job, mesh, 2) + casts,
        },
        # The layer before it: what the last one kept is gone, its gradients are on their way.
        {
            **before_it.items(),
            **backward,
            "gradients": earlier + under_way + largest * flat + (0 if earlier else largest * 4 // _ranks(job, mesh)),
            "gathered_weights": _gathered(model, job, mesh, 2) + casts,
        },
        {
            **first_layer.items(),
            **backward,
            "gradients": shard * 4 + under_way * sharded + largest * flat,
            "gathered_weights": _gathered(model, job, mesh, 1),
        },
        # Embeddings and head come last, all at once, while the first layer's may still be on their way.
        {"gradients": shard * 4 + head * s.b * sharded + (model.root_params // t + largest) * flat},
        {"gradients": shard * 4, "optimizer": 8 * _largest_shard(model, job, mesh) if s.on_cpu else 0},
    ]
    if model.tied:  # the table's two gradients, and their sum
        in_layers = shard - shard_elements(model.root, _ranks(job, mesh), t)
        summing = {"gradients": in_layers * 4 + 3 * head * s.b + largest * flat}
        moments.append({**summing, "gathered_weights": _gathered(model, job, mesh, 0)})
    if not sharded and mesh.weights > 1:
        moments.append({"gradients": shard * 4 + 4 * min(shard, GRADIENT_BUCKET)})
    return moments


def _kept(model: ModelShape, job: Job, mesh: Mesh, s: Scale) -> tuple[Kept, Kept, Kept, Kept]:
    """What is kept at the loss, and in the backward of the last layer, of the one before it, and of the first one."""
    autocast = _autocast(job, mesh)
    layers = {layer: kept_per_token(layer, job, mesh, s, autocast) * s.tokens for layer, _ in model.layer_kinds}
    largest = max(layers.values(), key=lambda kept: kept.total)
    if not job.activation_checkpointing:
        embedded = Kept(hidden=s.tokens * s.d * 4 if autocast else 0)  # fp32, and cast by the first layer
        together = sum((layers[layer] * count for layer, count in model.layer_kinds), embedded)
        # Without the smallest layer at most: which one is last does not matter, only that no moment is understated.
        smallest = min(layers.values(), key=lambda kept: kept.total)
        before = together + smallest * -1 if len(model.layers) > 1 else together
        return together, together, before, largest
    # Every layer's input, and all that one layer keeps while it is computed again.
    each = 0 if job.activation_offload else s.tokens * s.d * (4 if autocast else s.b) // s.hidden_shards
    inputs = Kept(hidden=each * len(model.layers))
    before = Kept(hidden=each * max(1, len(model.layers) - 1))
    return inputs, inputs + largest, before + largest, Kept(hidden=each) + largest


def _logits(model: ModelShape, job: Job, mesh: Mesh, s: Scale) -> tuple[int, int]:
    """Bytes of the logits, and of the loss's fp32 tile of them (twice where they are bf16: cast, then computed)."""
    whole = s.tokens * (model.vocab // mesh.tensor)
    tile = min(whole * 4, _tile(s)) * (2 if s.b == 2 else 1)
    return (min(whole * s.b, _tile(s)) if job.tiled_loss else whole * s.b), tile


def _autocast(job: Job, mesh: Mesh) -> bool:
    """bf16 over fp32 weights that are not sharded: torch casts what goes into each product, and keeps the rest fp32."""
    return job.dtype == "bf16" and not job.weight_sharding


def _norm(s: Scale, features: int, autocast: bool) -> int:
    """Bytes per token that an RMSNorm keeps: its input in fp32, one number, and the normalised input."""
    return features * 4 + 4 + features * (4 if autocast else s.b)


def kept_per_token(layer: LayerShape, job: Job, mesh: Mesh, s: Scale, autocast: bool) -> Kept:
    """Bytes per token of a rank that one layer keeps for its backward."""
    # A linear layer keeps its input: one tensor for Q, K and V and one for gate and up; autocast makes five.
    norms = 4 if any("post_feedforward" in p.name for p in layer.parameters) else 2
    hidden = norms * _norm(s, s.d, autocast) + (5 if autocast else 2) * s.b * s.d
    attention = _attention_kept(layer, mesh, s)
    q_norm = next((p for p in layer.parameters if "q_norm" in p.name), None)
    if q_norm is not None:
        heads = (layer.q_heads + layer.kv_heads) // mesh.tensor
        # A norm of each head (Qwen3) keeps a number a head, a norm of all of Q and one of all of K (OLMo-2) one each.
        numbers = heads if q_norm.numel == layer.head_dim else 2
        attention += _norm(s, heads * layer.head_dim, autocast) + 4 * (numbers - 1)
    return Kept(hidden // s.hidden_shards, attention, _mlp_kept(layer, job, s) // mesh.tensor)


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
    tiles = job.tiled_mlp if job.tiled_mlp > 1 else PREFILL_TILES
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
