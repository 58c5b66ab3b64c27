"""What the tensor axis cuts and sends, as `longspan.hf.tensor_parallel.layers` does it.

Two sums of the hidden state a layer, after attention and after the MLP (Megatron-LM, arXiv:1909.08053). Megatron SP
(arXiv:2205.05198) makes of each AllReduce an AllGather and a ReduceScatter: the same bytes. Around the layers the
embedding's parts are summed, the head's input is whole and its gradient summed, and of each token's softmax three
numbers travel. Weights that every rank holds, and that work on a part of heads or tokens, have their gradients summed.

A mixture of experts works on a rank's own tokens and sends them to their experts: how many go where the router says;
here, as if evenly.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from longspan.core.tile_sizes import NARROW_PARTS, head_tile
from longspan.plan.cost.collective import Sent
from longspan.plan.cost.per_rank import forwards_of, local_batch, local_tokens, passes

if TYPE_CHECKING:
    from longspan.plan.job import Job, Mesh
    from longspan.plan.models.shape import LayerShape, ModelShape, Parameter

_COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
_ROWS = ("o_proj", "down_proj")


@functools.lru_cache(maxsize=4096)
def cut_shape(p: Parameter, tensor: int) -> tuple[int, ...]:
    """One tensor rank's part of a weight."""
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


def known_to_cut(layer: LayerShape) -> bool:
    """Whether `longspan.hf.tensor_parallel.layers` can cut a layer like this one: separate projections, norms of single
    heads.
    """
    owners = {p.name.rpartition(".")[0].rpartition(".")[2]: p for p in layer.parameters}
    dim = getattr(layer.mixer, "head_dim", 0)
    of_heads = all(owners[name].shape[0] == dim for name in ("q_norm", "k_norm") if name in owners)
    gated = "experts" in owners or {"gate_proj", "up_proj", "down_proj"} <= owners.keys()
    return of_heads and gated and {"q_proj", "k_proj", "v_proj", "o_proj"} <= owners.keys()


def _summed(p: Parameter, job: Job, experts: bool) -> bool:
    """Whether each tensor rank's gradient of a weight is a part."""
    if _cut_dim(p.name) is not None:
        return False
    owner = p.name.rpartition(".")[0].rpartition(".")[2]
    of_heads = owner in ("q_norm", "k_norm") or (owner in _ROWS and p.name.endswith("bias"))
    return job.tensor_style == "megatron-sp" or of_heads or (experts and p.name.startswith("mlp."))


def _whole(tokens: int, model: ModelShape, job: Job, mesh: Mesh) -> tuple[int, int]:
    """Bytes that a rank sends of the hidden states of so many tokens: in an AllReduce, and in half of one."""
    t = mesh.tensor
    row = job.bytes_per_element * local_batch(job, mesh) * model.d_model
    return 2 * tokens * row * (t - 1) // t, -(-tokens // t) * row * (t - 1)


def layer_tensor(model: ModelShape, layer: LayerShape, job: Job, mesh: Mesh) -> list[Sent]:
    """One layer and one micro-batch, forward and backward; of a prompt in chunks all of its forwards."""
    if mesh.tensor == 1:
        return []
    sent = []
    for tokens, times in forwards_of(job, mesh):
        sent += [replace(one, calls=one.calls * times) for one in _layer(model, layer, job, mesh, tokens)]
    if job.mode == "train":
        sent += _gradients(layer.parameters, job, mesh, any(".experts." in p.name for p in layer.parameters))
    return sent


def _layer(model: ModelShape, layer: LayerShape, job: Job, mesh: Mesh, tokens: int) -> list[Sent]:
    t = mesh.tensor
    forwards, backwards = passes(job)
    experts = any(".experts." in p.name for p in layer.parameters)
    # A layer that is computed again ends with its MLP's last product: only a norm behind it needs the sum.
    last = forwards if any("post_feedforward" in p.name for p in layer.parameters) else 1
    both, half = _whole(tokens, model, job, mesh)
    sent = []
    if job.tensor_style == "tp":
        calls = forwards + backwards if experts else forwards + last + 2 * backwards
        sent.append(Sent("all_reduce", "tensor", "hidden states summed", both, calls))
        if experts:
            sent.append(Sent("all_gather", "tensor", "tokens of a mixture of experts", half, last + backwards))
    else:
        gathers = forwards + backwards if experts else 2 * (forwards + backwards)
        scatters = forwards + backwards if experts else forwards + last + 2 * backwards
        sent += [
            Sent("all_gather", "tensor", "hidden states gathered", half, gathers),
            Sent("reduce_scatter", "tensor", "hidden states summed", half, scatters),
        ]
    if experts:
        rows = -(-tokens // t) * local_batch(job, mesh) * layer.mlp.per_token
        size = rows * (t - 1) // t * model.d_model * job.bytes_per_element
        sent.append(Sent("all_to_all", "tensor", "tokens to their experts", size, forwards + last + 2 * backwards))
    return sent


def around_tensor(model: ModelShape, job: Job, mesh: Mesh, on_cpu: bool) -> list[Sent]:
    """Embedding, head and loss of one micro-batch; of a prompt in chunks those of all of its forwards."""
    if mesh.tensor == 1:
        return []
    if job.mode == "train":
        return _around(model, job, mesh, on_cpu)
    sent = []
    for tokens, times in forwards_of(job, mesh):
        sent += [replace(one, calls=one.calls * times) for one in _around_a_forward(model, job, mesh, tokens)]
    return sent


def _around_a_forward(model: ModelShape, job: Job, mesh: Mesh, tokens: int) -> list[Sent]:
    """Embeddings, and the logits of the last token alone: with the residual stream cut by tokens it is found first."""
    t = mesh.tensor
    both, half = _whole(tokens, model, job, mesh)
    _, last = _whole(1, model, job, mesh)
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


def _around(model: ModelShape, job: Job, mesh: Mesh, on_cpu: bool) -> list[Sent]:
    t = mesh.tensor
    tokens = local_tokens(job, mesh)
    both, half = _whole(tokens, model, job, mesh)
    sent = []
    if job.tensor_style == "tp":
        sent.append(Sent("all_reduce", "tensor", "embeddings and the head's input", both, 2, method=False))
    else:
        sent += [
            Sent(op, "tensor", "embeddings and the head's input", half, 2, method=False)
            for op in ("all_gather", "reduce_scatter")
        ]
    for rows, times in _softmax_rows(tokens, -(-model.vocab // t), job, mesh, on_cpu).items():  # fp32, of each token
        for numbers, what in ((1, "largest logits"), (2, "sums and labels of the softmax")):
            size = 2 * 4 * numbers * rows * (t - 1) // t
            sent.append(Sent("all_reduce", "tensor", what, size, times, method=False))
    return sent + _gradients(tuple(p for p in model.root if len(p.shape) == 1), job, mesh, experts=False)


def _softmax_rows(tokens: int, vocabulary: int, job: Job, mesh: Mesh, on_cpu: bool) -> dict[int, int]:
    """Tokens whose softmax is computed at a time, and how often: of a tile of logits, in half precision its parts."""
    rows = head_tile(vocabulary, on_cpu)
    sharded = job.weight_sharding and (mesh.weights > 1 or job.memory.cpu_offload)
    if job.dtype == "fp32" or not sharded:  # under autocast logits are not narrow
        return _cut(tokens, rows)
    rows = min(tokens, 2 * rows)
    part = -(-rows // NARROW_PARTS)
    found: Counter[int] = Counter()
    for tile, tiles in _cut(tokens, rows).items():
        for size, times in _cut(tile, part).items():
            found[size] += times * tiles
    return found


def _cut(whole: int, part: int) -> dict[int, int]:
    """The sizes of parts, the last one what is left, and how many there are of each."""
    return {size: times for size, times in ((part, whole // part), (whole % part, 1)) if size and times}


def _gradients(parameters: tuple[Parameter, ...], job: Job, mesh: Mesh, experts: bool) -> list[Sent]:
    t = mesh.tensor
    return [
        Sent("all_reduce", "tensor", "gradients of whole weights", 2 * size * (t - 1) // t, method=False)
        for size in (p.numel * job.bytes_per_element for p in parameters if _summed(p, job, experts))
    ]
