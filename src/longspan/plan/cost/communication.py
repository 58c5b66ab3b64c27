"""Every collective of a step, and what the tensor axis sends, as `longspan.hf.forward.tensor` does it.

Tests compare Ulysses, ring, recurrent layers, tensor parallelism, Megatron SP, FSDP, gradient sum and loss with the
running code to the byte.

TP sums hidden states twice a layer, after attention and after the MLP (Megatron-LM, arXiv:1909.08053). Megatron SP
(arXiv:2205.05198) splits each AllReduce into an AllGather and a ReduceScatter of the same bytes. Outside the layers the
embedding's parts are summed, the head's input is gathered and its gradient summed, and the softmax sends three numbers
per token. Weights that every rank holds, and that see only some heads or tokens, have their gradients summed.

Experts, over the tensor axis or over data x sequence, receive tokens by all-to-all. How many depends on the router; an
even distribution is assumed.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from longspan.core.tile_sizes import DIVERGENCE_TENSORS, NARROW_PARTS, head_tile, layers_per_checkpoint, most_mlp_tiles
from longspan.plan.cost.saved import mlp_tiles
from longspan.plan.cost.slices import layers_by_slices
from longspan.plan.cost.weights import (
    ROWS,
    block_weights_sent,
    cut_dim,
    gathers,
    layer_weights_sent,
    outer_groups,
    outer_weights_sent,
    sums_gradients,
    sums_gradients_once,
)
from longspan.plan.hardware import Hardware
from longspan.plan.job import CostContext
from longspan.plan.layers.base import Parameter, Sent
from longspan.plan.shape import LayerShape
from longspan.plan.tower import pictures_sent


@dataclass(frozen=True)
class Collective:
    """Equal collectives of a step.

    Attributes:
        op: one of `longspan.plan.hardware.OPS`.
        axis: mesh axis; `fsdp` is data x ring x ulysses together, `sequence` ring x ulysses, `experts` ranks over which
            experts are sharded, `replicas` ranks with the same experts.
        what: what is sent.
        bytes_per_gpu: sent by one GPU in one call, max over ranks.
        count: calls in a step.
        seconds: of all calls together.
        link: "intra" or "inter": whether the group stays inside a node.
        overlaps_with: the computation that it overlaps with ("attention", "computing"); "" for none.
        method: whether the sequence or tensor method sends it, rather than weights, gradients and loss.
    """

    op: str
    axis: str
    what: str
    bytes_per_gpu: int
    count: int
    seconds: float
    link: str
    overlaps_with: str
    method: bool

    @property
    def bytes_total(self) -> int:
        """Bytes that one GPU sends in a step."""
        return self.bytes_per_gpu * self.count


_PARTS = ("layer", "layer's experts", "tower block")
_OVERLAPPED = tuple(f"{what} of a {part}" for what in ("weights", "gradients") for part in _PARTS)


def communication(c: CostContext, hardware: Hardware) -> tuple[Collective, ...]:
    """Return every collective of one step in the order of the forward; equal ones are counted together."""
    calls: dict[Sent, int] = {}
    for sent in _step(c, sums_gradients_once(c, hardware)):
        if sent.bytes and sent.calls and c.groups[sent.axis][1] > 1:
            key = replace(sent, calls=1)
            calls[key] = calls.get(key, 0) + sent.calls
    return tuple(_timed(sent, count, c, hardware) for sent, count in calls.items())


def _timed(sent: Sent, count: int, c: CostContext, hardware: Hardware) -> Collective:
    stride, size = c.groups[sent.axis]
    computing = "computing" if sent.what in _OVERLAPPED else ""
    overlaps_with = "attention" if sent.op == "p2p" else computing
    return Collective(
        op=sent.op,
        axis=sent.axis,
        what=sent.what,
        bytes_per_gpu=sent.bytes,
        count=count,
        seconds=count * hardware.seconds(sent.op, sent.axis, sent.bytes, stride, size),
        link=hardware.link_of(stride, size),
        overlaps_with=overlaps_with if hardware.hideable(sent.op, sent.axis) else "",
        method=sent.method,
    )


def _times(sents: Iterable[Sent], times: int) -> list[Sent]:
    return [replace(sent, calls=sent.calls * times) for sent in sents]


def _step(c: CostContext, once: bool) -> Iterator[Sent]:
    micro, forwards = c.micro_batches, c.job.forwards
    sums = 1 if once else micro
    if c.teacher is not None:
        yield from _times(_of_teacher(c.teacher), micro)
    for layer, of_slices, layers in layers_by_slices(c):
        yield from _times(method_sent(layer, of_slices), layers * micro)
        others = (sent for sent in layer_tensor_sent(layer, c.of_layer(layer)) if not sent.method)
        weights = [*others, *layer_weights_sent(layer, c)]
        for sent in weights:
            yield from _times([sent], layers * forwards * (sums if sums_gradients(sent) else micro))
    untrained = [layer for layer in c.model.layers if not layer.has_backward]
    if c.job.mode == "train" and untrained:  # FSDP gathers it ahead, in the backward of the layer behind it
        yield from _times(layer_weights_sent(untrained[-1], c), micro)
    yield from _times((*input_recompute_sent(c), *outer_tensor_sent(c)), micro)
    for sent in outer_weights_sent(c):
        yield from _times([sent], sums if sums_gradients(sent) else micro * forwards)
    for sent in (*pictures_sent(c), *block_weights_sent(c)):
        yield from _times([sent], sums if sums_gradients(sent) else micro)


def _of_teacher(c: CostContext) -> Iterator[Sent]:
    """Yield what a teacher's forward sends, and what gathers its head a second time, for the loss of all tokens."""
    of_last_token = ("logits of the last token", "the head's input")
    yield from (sent for sent in _step(c, once=True) if sent.what not in of_last_token)
    if gathers(c):
        *_, (head, _) = outer_groups(c.model)
        yield from (sent for sent in outer_weights_sent(c) if sent.what == f"weights of {head}")


@functools.lru_cache(maxsize=4096)
def method_sent(layer: LayerShape, c: CostContext) -> tuple[Sent, ...]:
    """Return what the sequence and tensor methods send for one layer and one micro-batch, forward and backward."""
    c = c.of_layer(layer)
    tensor = (sent for sent in layer_tensor_sent(layer, c) if sent.method)
    return (*layer.mixing.sent(c), *tensor, *experts_sent(layer, c), *_scales_sent(layer, c))


def _scales_sent(layer: LayerShape, c: CostContext) -> list[Sent]:
    """Return what finds the largest entries of a layer's inputs and gradients, by which float8 layers round."""
    ranks, layers = c.mesh.fsdp_ranks, sum(p.shares_scales for p in layer.parameters)
    forwards, backwards = c.job.layer_passes
    size = 2 * c.b * (ranks - 1) // ranks
    return [Sent("all_reduce", "fsdp", "scales of activations", size, layers * (forwards + backwards))] * bool(layers)


def input_recompute_sent(c: CostContext) -> list[Sent]:
    """Return what recomputing layers' inputs sends in a micro-batch (`checkpointing="grouped"`).

    All layers but the last of each group run a further forward. Their weights are gathered for it, except for the layer
    whose backward comes next.
    """
    layers = c.model.layers
    recomputed: list[Sent] = []
    if not c.job.recomputed_inputs(len(layers)):
        return recomputed
    group = layers_per_checkpoint(len(layers), grouped=True)
    last_of_group = [min(at // group * group + group, len(layers)) - 1 for at in range(len(layers))]
    # Equal layers send the same: cost each kind once.
    runs = Counter(
        (layer, at < last - 1) for at, (layer, last) in enumerate(zip(layers, last_of_group, strict=True)) if at < last
    )
    forward = replace(c, job=replace(c.job, mode="prefill", batch=c.mesh.data))
    for (layer, gathers_weights), count in runs.items():
        sent = [*layer_tensor_sent(layer, forward), *experts_sent(layer, forward), *_scales_sent(layer, forward)]
        sent += [each for part in layer.mixing.slices(c) for each in part.sent(forward) if each.calls]
        if gathers_weights:
            sent += [each for each in layer_weights_sent(layer, forward)]
        recomputed += _times(sent, count)
    return recomputed


# ---------------------------------------------------------------------------------------------------------------------
# Experts over data x sequence.


def experts_sent(layer: LayerShape, c: CostContext) -> list[Sent]:
    """Return the traffic of a layer's experts and one micro-batch, forward and backward; of a prompt, all its chunks.

    First the ranks send each other, in int64, how many tokens of each tile go to each expert; recomputations reuse
    these numbers.
    """
    if c.experts == 1 or not layer.mlp.experts:
        return []
    others, held = c.experts - 1, c.expert_layout(layer.mlp.experts).held
    forwards, backwards = c.job.layer_passes
    numbers = 8 * held * others
    if c.job.memory.tiled:
        matrices = [p.shape for p in layer.parameters if p.name.startswith("mlp.") and len(p.shape) > 1]
        numbers *= most_mlp_tiles(c.d, max(max(shape[-2:]) for shape in matrices))
    sent = []
    for tokens, count in c.forwards:
        tiles = mlp_tiles(layer, c) if c.job.mode == "train" else 1
        rows = -(-tokens * c.sequences // tiles) * layer.mlp.per_token
        if c.job.memory.tiled:  # a checkpointed layer's last MLP is recomputed by its tiles alone
            forwards = 1 + backwards
        size = rows * others // c.experts * c.d * c.b
        calls = tiles * (2 * forwards + 2 * backwards) * count
        sent += [
            Sent("all_to_all", "experts", "numbers of tokens for experts", numbers, count),
            Sent("all_to_all", "experts", "tokens to their experts", size, calls),
        ]
    return sent


# ---------------------------------------------------------------------------------------------------------------------
# The tensor axis.


def _has_experts(layer: LayerShape) -> bool:
    return any(".experts." in p.name for p in layer.parameters)


def _hidden_states(tokens: int, c: CostContext) -> tuple[int, int]:
    """Return the bytes that a rank sends of so many hidden states: in an AllReduce; in an AllGather."""
    t, row = c.mesh.tensor, c.b * c.sequences * c.d
    return 2 * tokens * row * (t - 1) // t, -(-tokens // t) * row * (t - 1)


def layer_tensor_sent(layer: LayerShape, c: CostContext) -> list[Sent]:
    """Return the traffic of one layer and one micro-batch, forward and backward; of a prompt, all its chunks."""
    if c.mesh.tensor == 1:
        return []
    sent = []
    for tokens, count in c.forwards:
        sent += _times(_layer(layer, c, tokens), count)
    if c.job.mode == "train":
        sent += _gradients(layer.parameters, c, _has_experts(layer))
    return sent


def _layer(layer: LayerShape, c: CostContext, tokens: int) -> list[Sent]:
    t, experts = c.mesh.tensor, _has_experts(layer)
    forwards, backwards = c.job.layer_passes
    # A recomputed layer ends with its MLP's last product. Only a norm behind it needs that product's sum again.
    last = forwards if any("post_feedforward" in p.name for p in layer.parameters) else 1
    both, half = _hidden_states(tokens, c)
    sent = []
    if c.mesh.tensor_style == "tp":
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
        rows = -(-tokens // t) * c.sequences * layer.mlp.per_token
        size = rows * (t - 1) // t * c.d * c.b
        sent.append(Sent("all_to_all", "tensor", "tokens to their experts", size, forwards + last + 2 * backwards))
    return sent


def outer_tensor_sent(c: CostContext) -> list[Sent]:
    """Return the traffic of embedding, head and loss for one micro-batch; of a prompt, all its chunks."""
    if c.mesh.tensor == 1:
        return []
    if c.job.mode == "train":
        return _training(c)
    sent = []
    for tokens, count in c.forwards:
        sent += _times(_forward(c, tokens), count)
    return sent


def _forward(c: CostContext, tokens: int) -> list[Sent]:
    """Return embeddings, and the last token's logits. Megatron SP first finds the rank that holds the last token."""
    t = c.mesh.tensor
    both, half = _hidden_states(tokens, c)
    _, last = _hidden_states(1, c)
    logits = -(-c.model.vocab // t) * (t - 1) * c.b * c.sequences
    if c.mesh.tensor_style == "tp":
        stream = [Sent("all_reduce", "tensor", "embeddings", both, method=False)]
    else:
        stream = [
            Sent("reduce_scatter", "tensor", "embeddings", half, method=False),
            Sent("all_gather", "tensor", "hidden states, for the last token", half, method=False),
            Sent("all_gather", "tensor", "the head's input", last, method=False),
        ]
    return [*stream, Sent("all_gather", "tensor", "logits of the last token", logits, method=False)]


def _training(c: CostContext) -> list[Sent]:
    t = c.mesh.tensor
    both, half = _hidden_states(c.sequence_tokens, c)
    ops = [("all_reduce", both)] if c.mesh.tensor_style == "tp" else [("all_gather", half), ("reduce_scatter", half)]
    first = next((layer.parameters for layer in c.model.layers if layer.has_backward), ())
    # Only trained embeddings, or a trained norm in front of the first products, need the gradient of their input.
    needed = c.model.root[0].trained or any(p.trained for p in first if len(p.shape) == 1 and "norm" in p.name)
    calls = 1 + needed
    sent = [Sent(op, "tensor", "embeddings and the head's input", size, calls, method=False) for op, size in ops]
    parts = [(1, "largest logits"), (2, "sums and labels of the softmax")]  # fp32, per token
    if c.teacher is not None:
        parts = [(1, "largest logits")] * 2 + [(1, "sums of the softmax and of the divergence")] * 4
    for rows, calls in _softmax_rows(c).items():
        for numbers, what in parts:
            sent.append(Sent("all_reduce", "tensor", what, 2 * 4 * numbers * rows * (t - 1) // t, calls, method=False))
    return sent + _gradients(tuple(p for p in c.model.root if len(p.shape) == 1), c, experts=False)


def _softmax_rows(c: CostContext) -> dict[int, int]:
    """Return {tokens per softmax: calls}: one per tile of logits, in half precision one per part of a tile."""
    vocab = -(-c.model.vocab // c.mesh.tensor) * (1 if c.teacher is None else DIVERGENCE_TENSORS)
    tokens, rows = c.sequence_tokens, head_tile(vocab, on_cpu=False)
    if c.job.dtype == "fp32" or not gathers(c):  # autocast computes logits in fp32
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


def _gradients(parameters: tuple[Parameter, ...], c: CostContext, experts: bool) -> list[Sent]:
    t = c.mesh.tensor
    return [
        Sent("all_reduce", "tensor", "gradients of whole weights", 2 * size * (t - 1) // t, method=False)
        for size in (p.numel * c.b for p in parameters if _is_summed(p, c, experts))
    ]


def _is_summed(p: Parameter, c: CostContext, experts: bool) -> bool:
    """Whether each tensor rank computes only a part of a weight's gradient."""
    if not p.trained or cut_dim(p.name) is not None:
        return False
    if ".lora_" in p.name:  # A of a layer whose rows are cut, B of one whose columns are
        return True
    owner = p.name.rpartition(".")[0].rpartition(".")[2]
    per_head = owner in ("q_norm", "k_norm") or (owner in ROWS and p.name.endswith("bias"))
    return c.mesh.tensor_style == "megatron-sp" or per_head or (experts and p.name.startswith("mlp."))
