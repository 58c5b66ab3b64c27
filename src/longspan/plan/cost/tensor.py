"""What the tensor axis cuts and sends, as `longspan.hf.tensor_parallel.layers` does it.

TP sums hidden states twice a layer, after attention and after the MLP (Megatron-LM, arXiv:1909.08053). Megatron SP
(arXiv:2205.05198) splits each AllReduce into an AllGather and a ReduceScatter of the same bytes. Outside the layers the
embedding's parts are summed, the head's input is gathered and its gradient summed, and the softmax sends three numbers
per token. Weights that every rank holds, and that see only some heads or tokens, have their gradients summed.

Experts receive tokens by all-to-all. How many depends on the router; an even distribution is assumed.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import replace

from longspan.core.tile_sizes import NARROW_PARTS, head_tile
from longspan.plan.job import Job, Mesh, forwards_of, layer_passes, local_batch, local_tokens
from longspan.plan.layers import Parameter, Sent
from longspan.plan.models.shape import LayerShape, ModelShape

_COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
_ROWS = ("o_proj", "down_proj")


@functools.lru_cache(maxsize=4096)
def cut_shape(p: Parameter, tensor: int) -> tuple[int, ...]:
    """Return the shape of one tensor rank's part of a weight."""
    dim = _cut_dim(p.name)
    if tensor == 1 or dim is None or dim >= len(p.shape):
        return p.shape
    return (*p.shape[:dim], -(-p.shape[dim] // tensor), *p.shape[dim + 1 :])


def _cut_dim(name: str) -> int | None:
    owner, _, own = name.rpartition(".")
    last = owner.rpartition(".")[2]
    if "shared_expert" in name:
        return None
    if ".experts." in name or own == "sinks" or last in _COLUMNS:
        return 0
    return 1 if last in _ROWS and own == "weight" else None


def can_cut(layer: LayerShape) -> bool:
    """Whether `longspan.hf.tensor_parallel.plan` can cut such a layer: separate projections, norms per head."""
    owners = {p.name.rpartition(".")[0].rpartition(".")[2]: p for p in layer.parameters}
    dim = getattr(layer.mixer, "head_dim", 0)
    per_head = all(owners[name].shape[0] == dim for name in ("q_norm", "k_norm") if name in owners)
    gated = "experts" in owners or {"gate_proj", "up_proj", "down_proj"} <= owners.keys()
    return per_head and gated and {"q_proj", "k_proj", "v_proj", "o_proj"} <= owners.keys()


def _has_experts(layer: LayerShape) -> bool:
    return any(".experts." in p.name for p in layer.parameters)


def _hidden_states(tokens: int, model: ModelShape, job: Job, mesh: Mesh) -> tuple[int, int]:
    """Return the bytes that a rank sends of so many hidden states: in an AllReduce; in an AllGather."""
    t = mesh.tensor
    row = job.bytes_per_element * local_batch(job, mesh) * model.d_model
    return 2 * tokens * row * (t - 1) // t, -(-tokens // t) * row * (t - 1)


def layer_tensor_sent(model: ModelShape, layer: LayerShape, job: Job, mesh: Mesh) -> list[Sent]:
    """Return the traffic of one layer and one micro-batch, forward and backward; of a prompt, all its chunks."""
    if mesh.tensor == 1:
        return []
    sent = []
    for tokens, count in forwards_of(job, mesh):
        sent += [replace(one, calls=one.calls * count) for one in _layer(model, layer, job, mesh, tokens)]
    if job.mode == "train":
        sent += _gradients(layer.parameters, job, mesh, _has_experts(layer))
    return sent


def _layer(model: ModelShape, layer: LayerShape, job: Job, mesh: Mesh, tokens: int) -> list[Sent]:
    t, experts = mesh.tensor, _has_experts(layer)
    forwards, backwards = layer_passes(job)
    # A recomputed layer ends with its MLP's last product. Only a norm behind it needs that product's sum again.
    last = forwards if any("post_feedforward" in p.name for p in layer.parameters) else 1
    both, half = _hidden_states(tokens, model, job, mesh)
    sent = []
    if job.tensor_style == "tp":
        calls = forwards + backwards if experts else forwards + last + 2 * backwards
        sent.append(Sent("all_reduce", "tensor", "hidden states summed", both, calls))
        if experts:
            sent.append(Sent("all_gather", "tensor", "tokens of a mixture of experts", half, last + backwards))
    else:
        gather_calls = forwards + backwards if experts else 2 * (forwards + backwards)
        scatter_calls = forwards + backwards if experts else forwards + last + 2 * backwards
        sent += [
            Sent("all_gather", "tensor", "hidden states gathered", half, gather_calls),
            Sent("reduce_scatter", "tensor", "hidden states summed", half, scatter_calls),
        ]
    if experts:
        rows = -(-tokens // t) * local_batch(job, mesh) * layer.mlp.per_token
        size = rows * (t - 1) // t * model.d_model * job.bytes_per_element
        sent.append(Sent("all_to_all", "tensor", "tokens to their experts", size, forwards + last + 2 * backwards))
    return sent


def outer_tensor_sent(model: ModelShape, job: Job, mesh: Mesh, on_cpu: bool) -> list[Sent]:
    """Return the traffic of embedding, head and loss for one micro-batch; of a prompt, all its chunks."""
    if mesh.tensor == 1:
        return []
    if job.mode == "train":
        return _training(model, job, mesh, on_cpu)
    sent = []
    for tokens, count in forwards_of(job, mesh):
        sent += [replace(one, calls=one.calls * count) for one in _forward(model, job, mesh, tokens)]
    return sent


def _forward(model: ModelShape, job: Job, mesh: Mesh, tokens: int) -> list[Sent]:
    """Return embeddings, and the last token's logits. Megatron SP first finds the rank that holds the last token."""
    t = mesh.tensor
    both, half = _hidden_states(tokens, model, job, mesh)
    _, last = _hidden_states(1, model, job, mesh)
    logits = -(-model.vocab // t) * (t - 1) * job.bytes_per_element * local_batch(job, mesh)
    if job.tensor_style == "tp":
        stream = [Sent("all_reduce", "tensor", "embeddings", both, method=False)]
    else:
        stream = [
            Sent("reduce_scatter", "tensor", "embeddings", half, method=False),
            Sent("all_gather", "tensor", "hidden states, for the last token", half, method=False),
            Sent("all_gather", "tensor", "the head's input", last, method=False),
        ]
    return [*stream, Sent("all_gather", "tensor", "logits of the last token", logits, method=False)]


def _training(model: ModelShape, job: Job, mesh: Mesh, on_cpu: bool) -> list[Sent]:
    t, tokens = mesh.tensor, local_tokens(job, mesh)
    both, half = _hidden_states(tokens, model, job, mesh)
    ops = [("all_reduce", both)] if job.tensor_style == "tp" else [("all_gather", half), ("reduce_scatter", half)]
    sent = [Sent(op, "tensor", "embeddings and the head's input", size, 2, method=False) for op, size in ops]
    for rows, calls in _softmax_rows(tokens, -(-model.vocab // t), job, mesh, on_cpu).items():
        for numbers, what in ((1, "largest logits"), (2, "sums and labels of the softmax")):  # fp32, per token
            sent.append(Sent("all_reduce", "tensor", what, 2 * 4 * numbers * rows * (t - 1) // t, calls, method=False))
    return sent + _gradients(tuple(p for p in model.root if len(p.shape) == 1), job, mesh, experts=False)


def _softmax_rows(tokens: int, vocabulary: int, job: Job, mesh: Mesh, on_cpu: bool) -> dict[int, int]:
    """Return {tokens per softmax: calls}: one per tile of logits, in half precision one per part of a tile."""
    rows = head_tile(vocabulary, on_cpu)
    sharded = job.weight_sharding and (mesh.weights > 1 or job.memory.cpu_offload)
    if job.dtype == "fp32" or not sharded:  # autocast computes logits in fp32
        return _parts(tokens, rows)
    rows = min(tokens, 2 * rows)
    part = -(-rows // NARROW_PARTS)
    calls: Counter[int] = Counter()
    for tile, tiles in _parts(tokens, rows).items():
        for size, count in _parts(tile, part).items():
            calls[size] += count * tiles
    return calls


def _parts(total: int, part: int) -> dict[int, int]:
    """Return {size: count} of the parts of `total`; the last part is the remainder."""
    return {size: count for size, count in ((part, total // part), (total % part, 1)) if size and count}


def _gradients(parameters: tuple[Parameter, ...], job: Job, mesh: Mesh, experts: bool) -> list[Sent]:
    t = mesh.tensor
    return [
        Sent("all_reduce", "tensor", "gradients of whole weights", 2 * size * (t - 1) // t, method=False)
        for size in (p.numel * job.bytes_per_element for p in parameters if _is_summed(p, job, experts))
    ]


def _is_summed(p: Parameter, job: Job, experts: bool) -> bool:
    """Whether each tensor rank computes only a part of a weight's gradient."""
    if _cut_dim(p.name) is not None:
        return False
    owner = p.name.rpartition(".")[0].rpartition(".")[2]
    per_head = owner in ("q_norm", "k_norm") or (owner in _ROWS and p.name.endswith("bias"))
    return job.tensor_style == "megatron-sp" or per_head or (experts and p.name.startswith("mlp."))
