"""What every collective of a step sends, counted as the code sends it.

The rows for Ulysses, the ring, FSDP, the gradient sum and the loss are compared with the running code to the byte in
the tests. Tensor parallelism, Megatron SP and LASP-2 are formulas (the sources stand beside them).

Shapes: L tokens of a rank, B sequences at once, b bytes per element, P ranks of a group.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from longspan.core.accumulation import sums_once
from longspan.core.heads import HeadShard, split_heads
from longspan.core.routes import choose_impl
from longspan.plan.job import layout_of
from longspan.plan.ring import Lap, lap

if TYPE_CHECKING:
    from collections.abc import Iterator

    from longspan.plan.hardware import Hardware
    from longspan.plan.job import Job, Mesh
    from longspan.plan.shapes import LayerShape, ModelShape, Parameter

GRADIENT_BUCKET = 1 << 25
"""Elements of one all-reduce of `longspan.hf.gradients.GradientSum`."""


@dataclass(frozen=True)
class Collective:
    """One kind of collective in a step.

    Attributes:
        op: one of `longspan.plan.hardware.OPS`.
        axis: the mesh axis it runs over; `fsdp` is data x ring x ulysses together, `sequence` ring x ulysses.
        what: what is sent.
        bytes_per_gpu: bytes that one GPU sends in one call (the GPU that sends most, where they differ).
        count: calls in a step.
        seconds: of all calls together.
        link: "intra" or "inter": whether the group stays inside a node.
        beside: what it runs beside (the attention to the block at hand, a neighbouring layer's computing); "" where
            everything waits for it.
        method: whether the sequence or tensor method sends it, rather than weights, gradients and loss.
    """

    op: str
    axis: str
    what: str
    bytes_per_gpu: int
    count: int
    seconds: float
    link: str
    beside: str
    method: bool

    @property
    def bytes_total(self) -> int:
        """Bytes that one GPU sends in a step."""
        return self.bytes_per_gpu * self.count


@dataclass(frozen=True)
class Sent:
    """Bytes of one call, before a link is known."""

    op: str
    axis: str
    what: str
    bytes: int
    calls: int = 1
    method: bool = True


def communication(model: ModelShape, job: Job, mesh: Mesh, hardware: Hardware) -> tuple[Collective, ...]:
    """Every collective of one step, in the order of the forward, equal ones counted together."""
    together: dict[tuple[str, str, str, int, bool], int] = {}
    for sent in _step(model, job, mesh, once=sums_gradients_once(model, job, mesh, hardware)):
        if sent.bytes and sent.calls and mesh.size(sent.axis) > 1:
            key = (sent.op, sent.axis, sent.what, sent.bytes, sent.method)
            together[key] = together.get(key, 0) + sent.calls
    return tuple(
        Collective(
            op=op,
            axis=axis,
            what=what,
            bytes_per_gpu=size,
            count=count,
            seconds=count * hardware.seconds(op, axis, size, mesh.stride(axis), mesh.size(axis)),
            link=hardware.link_of(mesh.stride(axis), mesh.size(axis)),
            beside=_beside(op, what) if hardware.overlaps else "",
            method=method,
        )
        for (op, axis, what, size, method), count in together.items()
    )


def _beside(op: str, what: str) -> str:
    if op == "p2p":
        return "attention"
    return "computing" if what in ("weights of a layer", "gradients of a layer") else ""


def _step(model: ModelShape, job: Job, mesh: Mesh, once: bool) -> Iterator[Sent]:
    micro = micro_batches(job, mesh)
    summed = 1 if once else micro
    for layer, layers in model.layer_kinds:
        for sent in (*layer_method(model, layer, job, mesh), *layer_weights(layer, job, mesh)):
            times = layers * (summed if _sums_gradients(sent) else micro)
            yield Sent(sent.op, sent.axis, sent.what, sent.bytes, sent.calls * times, sent.method)
    for sent in around_the_layers(model, job, mesh):
        times = summed if _sums_gradients(sent) else micro
        yield Sent(sent.op, sent.axis, sent.what, sent.bytes, sent.calls * times, sent.method)


def _sums_gradients(sent: Sent) -> bool:
    return sent.axis == "fsdp" and (sent.op == "reduce_scatter" or "gradients" in sent.what)


def sums_gradients_once(model: ModelShape, job: Job, mesh: Mesh, hardware: Hardware) -> bool:
    """Whether a step of several micro-batches sums its gradients over the ranks once, as `longspan train` decides."""
    whole = model.params // mesh.tensor * 4
    sharded = job.weight_sharding and mesh.weights > 1
    return micro_batches(job, mesh) > 1 and sums_once(sharded, whole, hardware.memory_bytes)


def micro_batches(job: Job, mesh: Mesh) -> int:
    """Forwards and backwards of one step: training takes a replica's sequences one after the other."""
    return max(1, job.batch // mesh.data) if job.mode == "train" else 1


def local_tokens(job: Job, mesh: Mesh) -> int:
    """Tokens of one sequence on one rank, padding included; in decode one new token, held by every rank."""
    return 1 if job.mode == "decode" else layout_of(job, mesh).local_length(job.context)


def local_batch(job: Job, mesh: Mesh) -> int:
    """Sequences that are on a GPU at once: one in training (the rest is accumulated), a replica's share otherwise."""
    return 1 if job.mode == "train" else max(1, -(-job.batch // mesh.data))


def passes(job: Job) -> tuple[int, int]:
    """How often a layer's forward and its backward run."""
    if job.mode != "train":
        return 1, 0
    return (2 if job.activation_checkpointing else 1), 1


@functools.lru_cache(maxsize=4096)
def heads_of(q_heads: int, kv_heads: int, tensor: int, ulysses: int) -> tuple[HeadShard, ...]:
    """Which heads each Ulysses rank computes, of those that tensor parallelism leaves it."""
    q = -(-q_heads // tensor)
    kv = max(1, kv_heads // tensor)
    return split_heads(q, kv if q % kv == 0 else q, ulysses)


# ---------------------------------------------------------------------------------------------------------------------
# The method: one layer's activations.


def layer_method(model: ModelShape, layer: LayerShape, job: Job, mesh: Mesh) -> list[Sent]:
    """What the sequence and tensor methods send for one layer and one micro-batch, forward and backward."""
    sent: list[Sent] = []
    if layer.kind == "linear":
        sent += _lasp2(layer, job, mesh)
    elif job.mode == "decode":
        sent += _decode(layer, job, mesh)
    else:
        sent += _sequence(layer, job, mesh)
    return sent + _tensor(model, job, mesh)


def _sequence(layer: LayerShape, job: Job, mesh: Mesh) -> list[Sent]:
    """Ulysses and ring together, of the rank that sends most where they differ (heads or blocks that are not alike)."""
    if mesh.sequence == 1:
        return []
    shares = heads_of(layer.q_heads, layer.kv_heads, mesh.tensor, mesh.ulysses)
    alike = dict.fromkeys((share.q_heads, share.kv_heads) for share in shares)  # in the order of the ranks
    kinds = [_ulysses(layer, job, mesh, *heads) + _ring(layer, job, mesh, heads[1]) for heads in alike]
    return max(kinds, key=lambda sent: sum(each.bytes * each.calls for each in sent))


def _ulysses(layer: LayerShape, job: Job, mesh: Mesh, q_heads: int, kv_heads: int) -> list[Sent]:
    """Two All-to-Alls each way: Q, K and V packed in one, O in one (arXiv:2309.14509, section 3.2).

    A rank sends its tokens' rows to every other rank (the widths of their heads), and its heads' outputs to every
    other rank's tokens.

    Args:
        layer: the layer.
        job: the job.
        mesh: the mesh.
        q_heads: query heads that the rank computes.
        kv_heads: KV heads that these need.
    """
    u = mesh.ulysses
    if u == 1:
        return []
    shares = heads_of(layer.q_heads, layer.kv_heads, mesh.tensor, u)
    rows = local_tokens(job, mesh) * local_batch(job, mesh) * job.bytes_per_element
    all_packed, all_out = _widths(shares, layer.head_dim, layer.v_head_dim)
    packed, out = q_heads * layer.head_dim + kv_heads * (layer.head_dim + layer.v_head_dim), q_heads * layer.v_head_dim
    forwards, backwards = passes(job)
    sent = [
        Sent("all_to_all", "ulysses", "Q, K, V to heads", rows * (all_packed - packed), forwards),
        Sent("all_to_all", "ulysses", "O to tokens", rows * (u - 1) * out, forwards),
    ]
    if backwards:
        sent += [
            Sent("all_to_all", "ulysses", "dO to heads", rows * (all_out - out), backwards),
            Sent("all_to_all", "ulysses", "dQ, dK, dV to tokens", rows * (u - 1) * packed, backwards),
        ]
    return sent


@functools.lru_cache(maxsize=4096)
def _widths(shares: tuple[HeadShard, ...], d: int, dv: int) -> tuple[int, int]:
    """Elements of a token's packed row, and of its output, over all ranks."""
    return sum(s.q_heads * d + s.kv_heads * (d + dv) for s in shares), sum(s.q_heads * dv for s in shares)


def lap_of(layer: LayerShape, job: Job, mesh: Mesh) -> Lap:
    """How the blocks of a softmax layer go round the ring."""
    return lap(layout_of(job, mesh), job.context, layer.kind, layer.window)


def block_elements(layer: LayerShape, job: Job, mesh: Mesh, kv_heads: int) -> int:
    """Elements of a block's keys and values: what one message of a ring holds."""
    tokens = local_tokens(job, mesh) * mesh.ulysses * local_batch(job, mesh)
    return tokens * kv_heads * (layer.head_dim + layer.v_head_dim)


def impl_of(layer: LayerShape, job: Job, mesh: Mesh, kv_heads: int) -> str:
    """How keys and values of a layer go round, "p2p" or "allgather": what the code decides for these heads."""
    whole = mesh.ring * block_elements(layer, job, mesh, kv_heads) * job.bytes_per_element
    return choose_impl(job.ring_impl, whole, lap_of(layer, job, mesh).routes)


def _ring(layer: LayerShape, job: Job, mesh: Mesh, kv_heads: int) -> list[Sent]:
    """Each KV head of a block once a hop (Liu et al. 2023, arXiv:2310.01889), as far as the mask needs it.

    In the backward they travel again, and each rank that a block visits sends a gradient of it, in fp32. All-gathered,
    every block goes everywhere at once, and the gradients are reduce-scattered.
    """
    r = mesh.ring
    if r == 1:
        return []
    elements = block_elements(layer, job, mesh, kv_heads)
    block, gradient = elements * job.bytes_per_element, elements * 4
    forwards, backwards = passes(job)
    if impl_of(layer, job, mesh, kv_heads) == "allgather":
        return [
            Sent("all_gather", "ring", "K, V of all blocks", block * (r - 1), forwards + backwards),
            Sent("reduce_scatter", "ring", "dK, dV of all blocks", gradient * (r - 1), backwards),
        ]
    round_it = lap_of(layer, job, mesh)
    kv, home = forwards + backwards, backwards
    sends, visits = max(
        zip(round_it.sends, round_it.visits, strict=True), key=lambda n: n[0] * kv * block + n[1] * home * gradient
    )
    return [
        Sent("p2p", "ring", "K, V to the next", block, sends * kv),
        Sent("p2p", "ring", "dK, dV on and home", gradient, visits * home),
    ]


def _decode(layer: LayerShape, job: Job, mesh: Mesh) -> list[Sent]:
    """One new token over a KV cache sharded by heads (ulysses) and tokens (ring): outputs are gathered or merged."""
    shares = heads_of(layer.q_heads, layer.kv_heads, mesh.tensor, mesh.ulysses)
    widest = max(s.q_heads for s in shares) * layer.v_head_dim
    b, batch = job.bytes_per_element, local_batch(job, mesh)
    merged = batch * max(s.q_heads for s in shares) * (layer.v_head_dim + 1) * 4  # partial outputs and log-sum-exps
    return [
        Sent("all_gather", "ulysses", "O of all heads", b * batch * widest * (mesh.ulysses - 1)),
        Sent("all_reduce", "ring", "O and log-sum-exp merged", 2 * merged * (mesh.ring - 1) // mesh.ring),
    ]


def _lasp2(layer: LayerShape, job: Job, mesh: Mesh) -> list[Sent]:
    """Linear attention: one AllGather of the states, whatever the length (Sun et al. 2025, arXiv:2502.07563)."""
    p = mesh.sequence
    if p == 1 or job.mode == "decode":
        return []
    state = job.bytes_per_element * local_batch(job, mesh) * layer.state_elements // mesh.tensor
    return [Sent("all_gather", "sequence", "states of linear attention", state * (p - 1), sum(passes(job)))]


def _tensor(model: ModelShape, job: Job, mesh: Mesh) -> list[Sent]:
    """Two sums of the hidden state a layer: after attention and after the MLP (Megatron-LM, arXiv:1909.08053).

    Megatron SP (arXiv:2205.05198) makes of each AllReduce an AllGather and a ReduceScatter: the same bytes.
    """
    t = mesh.tensor
    if t == 1:
        return []
    forwards, backwards = passes(job)
    hidden = job.bytes_per_element * local_batch(job, mesh) * local_tokens(job, mesh) * model.d_model
    sums = 2 * (forwards + backwards)
    if job.tensor_style == "tp":
        return [Sent("all_reduce", "tensor", "hidden states summed", 2 * hidden * (t - 1) // t, sums)]
    return [
        Sent("all_gather", "tensor", "hidden states gathered", hidden * (t - 1) // t, sums),
        Sent("reduce_scatter", "tensor", "hidden states summed", hidden * (t - 1) // t, sums),
    ]


# ---------------------------------------------------------------------------------------------------------------------
# Weights, gradients, loss.


@functools.lru_cache(maxsize=4096)
def shard_elements(parameters: tuple[Parameter, ...], ranks: int, tensor: int = 1) -> int:
    """Elements of one rank's shard, as FSDP2 cuts: every parameter along its first dimension, padded to equal parts."""
    return sum(-(-p.shape[0] // ranks) * (p.numel // p.shape[0]) for p in parameters) // tensor


def layer_weights(layer: LayerShape, job: Job, mesh: Mesh) -> list[Sent]:
    """FSDP, for one layer: gathered for the forward and again for the backward, gradients scattered in fp32."""
    f = mesh.weights
    if not job.weight_sharding or f == 1:
        return []
    shard = shard_elements(layer.parameters, f, mesh.tensor)
    gathered = shard * (f - 1) * job.bytes_per_element
    sent = [Sent("all_gather", "fsdp", "weights of a layer", gathered, method=False)]
    if job.mode == "train":
        sent += [
            Sent("all_gather", "fsdp", "weights of a layer", gathered, method=False),
            Sent("reduce_scatter", "fsdp", "gradients of a layer", shard * (f - 1) * 4, method=False),
        ]
    return sent


@functools.lru_cache(maxsize=64)
def outer_groups(model: ModelShape) -> tuple[tuple[str, tuple[Parameter, ...]], ...]:
    """FSDP's groups outside the layers, as `longspan.hf.fsdp` makes them: all one where embedding and head are tied,
    else the embedding, learnt positions if there are any, final norm and head.
    """
    if model.tied:
        return (("embeddings and head", model.root),)
    embedding, *rest = model.root
    positions = tuple(p for p in rest if len(p.shape) > 1 and p is not rest[-1])
    head = tuple(p for p in rest if p not in positions)
    groups = (("the embedding", (embedding,)), ("positions", positions), ("final norm and head", head))
    return tuple((what, parameters) for what, parameters in groups if parameters)


def around_the_layers(model: ModelShape, job: Job, mesh: Mesh) -> list[Sent]:
    """Embeddings, head, loss; without FSDP the sum of all gradients.

    FSDP gathers each of their groups once a step: an embedding's backward needs no weights, a head's comes right after
    its forward.
    """
    f = mesh.weights
    if f == 1:
        return []
    # Five int64: what a batch is, compared by the hosts of all ranks before anything else.
    sent = [Sent("all_gather", "fsdp", "batches compared", 5 * 8 * (f - 1), method=False)]
    if job.weight_sharding:
        for what, parameters in outer_groups(model):
            shard = shard_elements(parameters, f, mesh.tensor) * (f - 1)
            sent.append(Sent("all_gather", "fsdp", f"weights of {what}", shard * job.bytes_per_element, method=False))
            if job.mode == "train":
                sent.append(Sent("reduce_scatter", "fsdp", f"gradients of {what}", shard * 4, method=False))
    if job.mode == "train":
        # Three fp64 numbers: the sum of the tokens' losses, their count, and the digests of batches on a GPU.
        sent.append(Sent("all_reduce", "fsdp", "loss", 2 * 24 * (f - 1) // f, method=False))
        if not job.weight_sharding:
            sent += _gradient_sum(model, mesh)
    return sent


def _gradient_sum(model: ModelShape, mesh: Mesh) -> list[Sent]:
    """One flag per parameter, then the gradients in fp32 in buckets: what `longspan.hf.gradients.GradientSum` does."""
    f = mesh.weights
    buckets, flags = _buckets(model)
    sent = [Sent("all_reduce", "fsdp", "which gradients exist", 2 * 4 * flags * (f - 1) // f, method=False)]
    for elements in buckets:
        size = 2 * 4 * (elements // mesh.tensor) * (f - 1) // f
        sent.append(Sent("all_reduce", "fsdp", "gradients", size, method=False))
    return sent


@functools.lru_cache(maxsize=64)
def _buckets(model: ModelShape) -> tuple[tuple[int, ...], int]:
    """Elements of every bucket, and the number of parameters; in the order of the model's parameters."""
    first = [p for p in model.root if "embed" in p.name or "wte" in p.name or "wpe" in p.name]
    last = [p for p in model.root if p not in first]
    in_order = [*first, *(p for layer in model.layers for p in layer.parameters), *last]
    buckets: list[int] = []
    for p in in_order:
        if not buckets or buckets[-1] + p.numel > GRADIENT_BUCKET:
            buckets.append(0)
        buckets[-1] += p.numel
    return tuple(buckets), len(in_order)
