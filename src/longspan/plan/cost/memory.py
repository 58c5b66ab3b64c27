"""Where a GPU's memory goes, item by item, at the moment of a step when it holds most.

A training step has such moments: the loss (all activations are kept, the logits exist); the backward of the last layer
(activations are still kept, a layer's gradients are under way) and of the first (gradients of all others exist); the
gradients of embeddings and head; the sum of gradients where weights are not sharded; the optimizer. Each is summed up
from its items; the largest one is what must fit, and its items are what is reported. A forward alone has these: inside
attention, the norm behind it, and the MLP; behind the MLP, whose parts a tensor axis sums; inside the last norm.

What a layer saves is in `saved.py`; `benchmarks/plan_accuracy.py` compares the sum with measured peaks.

Letters: L tokens of a rank (all its sequences at once), b bytes per element, d hidden size, f MLP size, V vocabulary.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING

from longspan.core.tile_sizes import GRADIENT_BUCKET, HEAD_ROWS, LOSS_TILE, NARROW_PARTS, head_tile
from longspan.plan.cost import hidden_states
from longspan.plan.cost.cached import held_bytes, staged_bytes
from longspan.plan.cost.memory_options import (
    mlp_tiles,
    mlp_under_way,
    mlp_weight_sums,
    norm_bytes,
    norm_of_mlp_under_way,
    norm_under_way,
)
from longspan.plan.cost.per_rank import local_batch, local_tokens
from longspan.plan.cost.saved import (
    Buffers,
    SavedActivations,
    Scale,
    again_per_token,
    autocasts,
    freed_per_token,
    kept_per_token,
    offloads,
    saved_in_a_step,
    saved_per_token,
)
from longspan.plan.cost.weights import outer_groups, shard_elements, sums_gradients_once

if TYPE_CHECKING:
    from collections.abc import Iterator

    from longspan.plan.hardware import Hardware
    from longspan.plan.job import Job, Mesh
    from longspan.plan.layers.base import Mixer
    from longspan.plan.models.shape import ModelShape

ITEMS = {
    "weights": "weights at rest: this GPU's shard",
    "optimizer": "optimizer state",
    "gradients": "gradients at rest, and of the layers under way",
    "gathered_weights": "weights gathered to compute with: a layer, and the next one prefetched; embedding, head",
    "activations_hidden": "kept for the backward: layers' inputs, what norms and products take in",
    "activations_attention": "kept for the backward: Q, K, V, outputs, log-sum-exps",
    "activations_mlp": "kept for the backward: intermediates of the MLPs",
    "qkv": "Q, K and V of this GPU",
    "attention_workspace": "buffers of the exchange, the attention's output, a ring's sums in fp32",
    "mlp": "intermediates of the MLP under way",
    "hidden": "hidden states under way, and their gradients",
    "logits": "a tile of logits and its gradient; or all of them",
    "kv_cache": "keys and values of all layers; where they lie in the host's memory, of two",
    "comm_buffers": "buffers of the ring: blocks at hand and arriving, gradients that travel",
    "reserve": "what torch, CUDA and NCCL keep for themselves",
}
"""The items of `memory`, and what they are."""

PREFILL_TILES = 16
"""Tiles of MLP and norms in prefill and decode where the job does not say: without a backward, tiles cost nothing."""


def memory(model: ModelShape, job: Job, mesh: Mesh, hardware: Hardware, tiles: int = PREFILL_TILES) -> dict[str, int]:
    """Bytes of every item of `ITEMS` on the GPU that holds most, at the moment when they sum up to most.

    Args:
        model: what runs.
        job: what is computed.
        mesh: the mesh.
        hardware: on what.
        tiles: of MLP and norms in prefill and decode, where the job does not say.
    """
    at_once = job
    if job.mode == "prefill" and job.prefill_chunk is not None:
        at_once = replace(job, context=min(job.prefill_chunk, job.context))
    scale = scale_of(model, at_once, mesh, hardware)
    constant = {} if on_host(job, scale) else weights_at_rest(model, job, mesh)
    if job.mode == "train":
        moments = _training(model, job, mesh, scale, once=sums_gradients_once(model, job, mesh, hardware))
    else:
        moments = _forward(model, at_once, mesh, scale, tiles)
        constant["kv_cache"] = _cache(model, job, mesh, hardware)
    most = max(moments, key=lambda items: sum(items.values()))
    constant["reserve"] = int(hardware.reserve_bytes)
    return {name: int(constant.get(name, 0) + most.get(name, 0)) for name in ITEMS}


def _cache(model: ModelShape, job: Job, mesh: Mesh, hardware: Hardware) -> int:
    """Bytes of keys and values in the device's memory; a CPU's is the host's."""
    held = held_bytes(model, job, mesh) if job.cache_offload == "none" or hardware.on_cpu else 0
    return held + (0 if job.cache_offload == "none" else staged_bytes(model, job, mesh))


def scale_of(model: ModelShape, job: Job, mesh: Mesh, hardware: Hardware) -> Scale:
    """What all items are made of."""
    return Scale(
        tokens=local_tokens(job, mesh) * local_batch(job, mesh),
        b=job.bytes_per_element,
        d=model.d_model,
        on_cpu=hardware.on_cpu,
        # Megatron SP shards what lies between the layers' matrices over the tensor ranks; plain TP repeats it.
        hidden_shards=mesh.tensor if job.tensor_style == "megatron-sp" else 1,
    )


def on_host(job: Job, s: Scale) -> bool:
    """Whether weights, gradients and optimizer states lie in the host's memory and not in this one."""
    return job.memory.cpu_offload and not s.on_cpu


def weights_at_rest(model: ModelShape, job: Job, mesh: Mesh) -> dict[str, int]:
    """Bytes of a rank's weights and optimizer state."""
    shard = elements_at_rest(model, job, mesh)
    state = {"adamw": 8, "sgd": 0}[job.optimizer] if job.mode == "train" else 0
    return {"weights": shard * job.bytes_per_weight, "optimizer": shard * state}


def _ranks(job: Job, mesh: Mesh) -> int:
    return mesh.weights if job.weight_sharding else 1


def gathers(job: Job, mesh: Mesh) -> bool:
    """Whether weights are gathered to compute with: shards, or what lies on the host."""
    return _ranks(job, mesh) > 1 or job.memory.cpu_offload


def elements_at_rest(model: ModelShape, job: Job, mesh: Mesh) -> int:
    """Elements of all weights that a GPU holds."""
    ranks = _ranks(job, mesh)
    layers = sum(count * shard_elements(layer.parameters, ranks, mesh.tensor) for layer, count in model.layer_kinds)
    return layers + shard_elements(model.root, ranks, mesh.tensor)


def _outer(model: ModelShape) -> tuple[int, int]:
    """Elements outside the layers: what FSDP keeps gathered all through a step (all of them, where embedding and head
    are tied), and the head's own group. The embedding's is gathered in its forward alone.
    """
    sizes = {what: sum(p.numel for p in parameters) for what, parameters in outer_groups(model)}
    head = sizes.get("final norm and head", 0)
    return model.root_params - sizes.get("the embedding", 0) - head, head


def _gathered(model: ModelShape, job: Job, mesh: Mesh, layers: int, heads: int = 0) -> int:
    """Bytes of gathered weights: what stays gathered, and of so many of the largest layers and of the head's group.
    None where nothing is sharded, nor on the host.
    """
    if not gathers(job, mesh):
        return 0
    largest = max(layer.params for layer, _ in model.layer_kinds)
    kept, head = _outer(model)
    return (kept + heads * head + layers * largest) // mesh.tensor * job.bytes_per_element


# ---------------------------------------------------------------------------------------------------------------------
# Training.


def _training(model: ModelShape, job: Job, mesh: Mesh, s: Scale, once: bool) -> list[dict[str, int]]:
    """The moments of a training step: loss, head, last layer, first layer, embeddings, optimizer, gradient sum."""
    t, shard, tokens = mesh.tensor, elements_at_rest(model, job, mesh), s.tokens
    sharded, autocast, to_host = gathers(job, mesh), autocasts(job), on_host(job, s)
    at_rest = 0 if to_host else shard * 4
    turns = _cosines(model, job, s)
    at_loss, last_layer, before_it, first_layer = (x + turns for x in saved_in_a_step(model, job, mesh, s))
    at_loss = at_loss + _on_disk(model, job, mesh, s) * -1
    # The last norm, and the head's input.
    at_head = at_loss + SavedActivations(
        hidden=tokens * (norm_bytes(s, s.d, autocast, again=job.memory.tiled_norms) + s.d * s.b)
    )
    largest = max(layer.params for layer, _ in model.layer_kinds) // t
    head = model.vocab * s.d // t
    # Gradients of earlier micro-batches: whole ones until they are summed.
    earlier = (model.params // t * 4 if once else at_rest) if job.batch > mesh.data else 0
    # An embedding of its own has no gradient before all layers' backwards are over.
    to_come = (
        0
        if earlier or to_host
        else 4
        * sum(
            shard_elements(parameters, _ranks(job, mesh), t)
            for what, parameters in outer_groups(model)
            if what in ("the embedding", "positions")
        )
    )
    casts = _cast_weights(model, mesh) if autocast else 0
    if to_host:  # a layer's shard as it came, in fp32, before it is cast and gathered
        casts += largest * 4 // _ranks(job, mesh)
    # A reduce-scatter takes its gradients flat in fp32; gloo makes a copy of what it is given.
    flat = (8 if s.on_cpu else 4) if sharded else 0
    hidden = _hidden(job, mesh, s)
    # A head of its own: gathered beside the last layer (twice, until its copy is taken), scattered before that one's
    # backward, in which what was sent of it is still held. A tied one stays to the end.
    own_head = _outer(model)[1] // t * sharded
    at_loss_gathered = casts + (_gathered(model, job, mesh, 0, heads=2) if own_head else _gathered(model, job, mesh, 1))
    at_head_gathered = casts + _gathered(model, job, mesh, 1, heads=1)
    two_gathered = casts + _gathered(model, job, mesh, 2)
    sent_head = own_head * 4 + (0 if earlier else own_head * 4 // _ranks(job, mesh))
    # Gradients in the compute dtype, of a layer and of a head that stays.
    late = 0 if model.tied else largest
    under_way = (largest + (0 if own_head else head)) * s.b
    scattered = 0 if earlier else largest * 4 // _ranks(job, mesh)
    # In a layer's own backward its gradients are not at rest yet.
    own = scattered if sharded and not to_host else 0
    backwards = [
        (last_layer, {"gradients": earlier + under_way + sent_head, "gathered_weights": two_gathered}),
        # The layer before it: what the last one kept is gone, its gradients are on their way.
        (before_it, {"gradients": earlier + under_way + largest * flat + scattered, "gathered_weights": two_gathered}),
        (
            first_layer,
            {
                "gradients": at_rest - to_come - own + under_way * sharded + largest * flat,
                "gathered_weights": casts * to_host + _gathered(model, job, mesh, 1),
            },
        ),
    ]
    at_the_loss = _tiled_loss if job.tiled_loss else _whole_logits
    moments = [
        *(
            {**at_head.items(), **items, "gradients": earlier + items["gradients"], "gathered_weights": gathered}
            for items, gathered in zip(
                at_the_loss(model, job, mesh, s), (at_loss_gathered, at_head_gathered), strict=True
            )
        ),
        *_in_a_backward(model, job, mesh, s, backwards, hidden),
        # Embeddings come last, while the first layer's may still be on their way; a tied table waits for these.
        {"gradients": at_rest + head * s.b * sharded + (model.root_params // t - own_head + late) * flat},
        {"gradients": at_rest, "optimizer": 8 * _largest_shard(model, job, mesh) if s.on_cpu else 0},
    ]
    if own_head:  # on its way, the last layer being gathered
        flat_head = own_head * max(flat, 4 + s.b)
        gathered = _gathered(model, job, mesh, 1)
        moments.append(
            {**at_loss.items(), "hidden": hidden, "gradients": earlier + flat_head, "gathered_weights": gathered}
        )
    if model.tied:  # the table's two gradients, and their sum; the head's, where it is nobody else's, becomes the sum
        in_layers = 0 if to_host else 4 * (shard - shard_elements(model.root, _ranks(job, mesh), t))
        summing = {"gradients": in_layers + (2 if job.tiled_loss and s.b == 4 else 3) * head * s.b + largest * flat}
        moments.append({**summing, "gathered_weights": _gathered(model, job, mesh, 0)})
    if not sharded and mesh.weights > 1:
        moments.append({"gradients": shard * 4 + 4 * min(shard, GRADIENT_BUCKET)})
    return moments


def _in_a_backward(
    model: ModelShape,
    job: Job,
    mesh: Mesh,
    s: Scale,
    backwards: list[tuple[SavedActivations, dict[str, int]]],
    hidden: int,
) -> Iterator[dict[str, int]]:
    """The moments inside some layers' backwards, from what is saved there and what else there is: in the MLP, and in
    the attention, when what comes behind it is gone.
    """
    of_mlps = [
        (
            mlp_under_way(layer, job, mesh, s) + norm_of_mlp_under_way(layer, job, mesh, s),
            mlp_weight_sums(layer, job, mesh, s),
        )
        for layer, _ in model.layer_kinds
    ]
    widest, sums = max(of_mlps, key=sum)
    autocast = autocasts(job)
    of_layers = [freed_per_token(layer, job, mesh, s, autocast) for layer, _ in model.layer_kinds]
    freed = min(of_layers, key=lambda saved: saved.total) * s.tokens
    away = _on_disk(model, job, mesh, s)
    of_mlp = min(saved_per_token(layer, job, mesh, s, autocast).mlp for layer, _ in model.layer_kinds) * s.tokens
    each = [layer.mixer.backward_buffers(job, mesh, s) for layer, _ in model.layer_kinds]
    buffers = max(each, key=lambda held: held.total)
    exchanged = _exchanged_again(model, job, mesh, s)
    again = max((again_per_token(layer, job, mesh, s, autocast).total for layer, _ in model.layer_kinds)) * s.tokens
    for saved, rest in backwards:
        if exchanged:  # what the layer will save is not there yet, but its normalised input and the gradient are
            yield {**saved.items(), **rest, "attention_workspace": exchanged - again, "hidden": 2 * hidden}
        here = saved + away * -1
        yield {
            **here.items(), **rest, "gradients": rest["gradients"] + sums, "mlp": widest, "hidden": 2 * hidden,
        }  # fmt: skip
        if job.memory.tiled_norms:  # the MLP's backward is over
            behind = here + SavedActivations(mlp=-of_mlp)
            yield {**behind.items(), **rest, "hidden": 2 * hidden + norm_under_way(job, s)}
        yield {**(saved + freed * -1).items(), **rest, **buffers.items(), "hidden": hidden}


def _cosines(model: ModelShape, job: Job, s: Scale) -> SavedActivations:
    """Cosines and sines of my tokens' positions, which all layers share."""
    dims = (model.positions.dims or 0) if model.positions.rotary else 0
    return SavedActivations(hidden=2 * dims * s.tokens * (4 if autocasts(job) else s.b))


def _on_disk(model: ModelShape, job: Job, mesh: Mesh, s: Scale) -> SavedActivations:
    """Of what counts as kept of a layer, what a CPU has on its disk until the attention's own backward, as it reads
    nothing ahead: all that the attention keeps but its output.
    """
    if not (s.on_cpu and offloads(job, s) and job.memory.checkpointing == "save_attention"):
        return SavedActivations()
    autocast, kinds = autocasts(job), [layer for layer, _ in model.layer_kinds]
    kept = min(kept_per_token(layer, job, mesh, s, autocast).attention for layer in kinds)
    freed = min((freed_per_token(layer, job, mesh, s, autocast) for layer in kinds), key=lambda saved: saved.total)
    return SavedActivations(attention=max(0, kept - freed.attention) * s.tokens)


def _exchanged_again(model: ModelShape, job: Job, mesh: Mesh, s: Scale) -> int:
    """Bytes of the attention of a checkpointed layer that is computed again with its exchange, q, k and v of my tokens
    among them: when they are sent, as what is sent and what arrives; when the output has come home, as what arrived,
    the output there, as it came, and in its place. 0 where it is not computed again.
    """
    if mesh.ulysses == 1 or job.memory.checkpointing not in ("full", "selective"):
        return 0
    most = 0
    for layer, _ in model.layer_kinds:
        (qkv, out, packed), n = layer.mixer.forward_buffers(mesh, s), layer.mixer.chunks(job, mesh)
        home = packed + 3 * out if n == 1 else -(-(packed + 2 * out) // n) + out
        most = max(most, qkv + -(-2 * packed // n), qkv + home * (job.memory.checkpointing == "full"))
    return most


def _whole_logits(model: ModelShape, job: Job, mesh: Mesh, s: Scale) -> list[dict[str, int]]:
    """In the loss's backward: logits, their gradient, an fp32 tile (twice where they are bf16: cast, then computed). In
    the head's: logits, and the gradients of its input and of its weights.
    """
    head = model.vocab * s.d // mesh.tensor * (s.b if gathers(job, mesh) else 4)
    logits = s.tokens * -(-model.vocab // mesh.tensor) * s.b
    tile = min(logits // s.b * 4, 4 * LOSS_TILE[s.on_cpu]) * (2 if s.b == 2 else 1)
    return [
        {"logits": 2 * logits + tile, "gradients": 0},
        {"logits": logits, "hidden": _hidden(job, mesh, s), "gradients": head},
    ]


def _tiled_loss(model: ModelShape, job: Job, mesh: Mesh, s: Scale) -> list[dict[str, int]]:
    """Logits tile by tile (`longspan.losses.cross_entropy`): from the forward on there are the gradient of the head's
    input and, added up in fp32, of its weights; in the backward these are cast.
    """
    autocast, head, hidden = autocasts(job), model.vocab * s.d // mesh.tensor, _hidden(job, mesh, s)
    # In fp32 one buffer is logits, then probabilities, then gradient. A cast makes another, autograd a third.
    rows, v = head_tile(model.vocab, s.on_cpu), -(-model.vocab // mesh.tensor)
    narrow = min(s.tokens, 2 * rows)  # without autocast: twice the rows, cast part by part
    tile = min(s.tokens, rows) * v * (4 if s.b == 4 else 8)
    if s.b == 2 and not autocast:
        tile = (narrow * 2 + -(-narrow // NARROW_PARTS) * 4) * v
    cast = head * s.b if s.b == 2 and not autocast else 0
    more = head * (4 + 2) if autocast else min(cast, HEAD_ROWS * s.d * s.b)
    return [
        {"logits": tile, "hidden": hidden, "gradients": head * 4 + more},
        {"hidden": hidden, "gradients": head * 4 + cast},
    ]


def _hidden(job: Job, mesh: Mesh, s: Scale) -> int:
    """Bytes of hidden states, or of their gradient."""
    return s.tokens * s.d * (4 if autocasts(job) else s.b) // s.hidden_shards


def _widest(model: ModelShape, tensor: int, s: Scale) -> int:
    """Bytes per token of the widest MLP intermediate."""
    return s.b * max(layer.mlp.width for layer, _ in model.layer_kinds) // tensor


def _ring_buffers(model: ModelShape, job: Job, mesh: Mesh, s: Scale, *, backward: bool) -> Buffers:
    """What a ring holds while it computes, of the layer that needs most."""
    each = [layer.mixer.ring_buffers(job, mesh, s, backward=backward) for layer, _ in model.layer_kinds]
    return max(each, key=lambda buffers: buffers.total)


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


# ---------------------------------------------------------------------------------------------------------------------
# A forward alone.


def _in_forward(mixer: Mixer, job: Job, mesh: Mesh, s: Scale) -> tuple[int, int, int]:
    """`Mixer.forward_buffers`; of a chunk over latent vectors the layer's own q, k and v are there too."""
    held = mixer.in_cache(job, mesh)
    if job.prefill_chunk is None or held is mixer:
        return mixer.forward_buffers(mesh, s)
    qkv, out, packed = held.forward_buffers(mesh, s)
    return mixer.forward_buffers(mesh, s)[0] + qkv, out, packed


def _forward(model: ModelShape, job: Job, mesh: Mesh, s: Scale, tiles: int) -> list[dict[str, int]]:
    """The moments of a forward alone: attention, the norm behind it, the MLP, the sum of its parts, the last norm."""
    weights, at_head = {"gathered_weights": _gathered(model, job, mesh, 2)}, _gathered(model, job, mesh, 0, heads=2)
    mlps = {layer.mlp for layer, _ in model.layer_kinds}
    head = {"logits": local_batch(job, mesh) * model.vocab // mesh.tensor * (s.b + 4)}
    in_mlp = max(hidden_states.in_mlp(mlp, job, mesh, s) for mlp in mlps)
    behind_mlp = max(hidden_states.behind_mlp(mlp, job, mesh, s) for mlp in mlps)
    return [
        {**weights, **_in_attention(model, job, mesh, s), "hidden": hidden_states.in_attention(job, mesh, s)},
        {**weights, "hidden": hidden_states.in_norm(s, tiles)},
        {**weights, **head, "hidden": in_mlp, "mlp": _in_mlp(model, job, mesh, s, tiles)},
        {**weights, "hidden": behind_mlp},
        {**head, "gathered_weights": at_head, "hidden": hidden_states.in_last_norm(s, tiles)},
    ]


def _in_attention(model: ModelShape, job: Job, mesh: Mesh, s: Scale) -> dict[str, int]:
    """What a forward's attention holds beside hidden states, of the layer that needs most."""
    each = [_in_forward(layer.mixer, job, mesh, s) for layer, _ in model.layer_kinds]
    qkv, out, packed = (max(sizes) for sizes in zip(*each, strict=True))
    exchanged = mesh.ulysses > 1 and job.mode != "decode"
    ring = _ring_buffers(model, job, mesh, s, backward=False)
    # Sending: what is sent and what arrives. Computing: what arrived and the output, or what a ring adds it up in.
    computing = max(out, ring.workspace)
    workspace = max(2 * packed, packed + computing) if exchanged else computing
    pieces = min(layer.mixer.chunks(job, mesh) for layer, _ in model.layer_kinds)
    if pieces > 1:  # a piece's buffers, and the output that has come back so far
        workspace = -(-workspace // pieces) + out
    return {"qkv": qkv, "attention_workspace": workspace, "comm_buffers": ring.comm}


def _in_mlp(model: ModelShape, job: Job, mesh: Mesh, s: Scale, tiles: int) -> int:
    """Bytes of a forward's intermediates of the widest MLP: of a tile, the job's, or one of `tiles`."""
    matrices = max(layer.mlp.matrices for layer, _ in model.layer_kinds)
    own = min(mlp_tiles(layer, job, mesh, s) for layer, _ in model.layer_kinds)
    return s.tokens * _widest(model, mesh.tensor, s) * matrices // (own if own > 1 else tiles)
