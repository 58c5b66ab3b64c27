"""What softmax attention sends: Ulysses, the ring, both together, and decoding over a sharded cache.

Compared with the running code to the byte in the tests (decoding is a formula).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from longspan.core.cache_dtype import vector_bytes
from longspan.core.heads import split_head_chunks, split_overlap_chunks
from longspan.core.kv_placement import is_sharded
from longspan.core.routes import choose_ring_impl
from longspan.plan.cost.collective import Sent
from longspan.plan.cost.per_rank import heads_of, local_batch, local_tokens, mixing_passes
from longspan.plan.cost.ring import RingSchedule, ring_schedule
from longspan.plan.cost.saved import Buffers
from longspan.plan.job import layout_of

if TYPE_CHECKING:
    from longspan.core.heads import HeadShard
    from longspan.plan.job import Job, Mesh
    from longspan.plan.layers.softmax import Softmax


@dataclass(frozen=True)
class Busiest:
    """Elements of a token's queries, keys and values, and output on the rank with most heads; its numbers of heads."""

    q: int
    kv: int
    out: int
    q_heads: int
    kv_heads: int


def busiest(layer: Softmax, mesh: Mesh) -> Busiest:
    """The rank with most heads."""
    shares = heads_of(layer.q_heads, layer.kv_heads, mesh.tensor, mesh.ulysses)
    mine = max(shares, key=lambda share: (share.q_heads, share.kv_heads))
    kv = mine.kv_heads * (layer.head_dim + layer.v_head_dim)
    return Busiest(mine.q_heads * layer.head_dim, kv, mine.q_heads * layer.v_head_dim, mine.q_heads, mine.kv_heads)


def of_my_tokens(layer: Softmax, mesh: Mesh) -> Busiest:
    """The same of a rank's own tokens, before an exchange: all heads that tensor parallelism leaves."""
    (mine,) = heads_of(layer.q_heads, layer.kv_heads, mesh.tensor, 1)
    q, kv = mine.q_heads, mine.kv_heads
    return Busiest(q * layer.head_dim, kv * (layer.head_dim + layer.v_head_dim), q * layer.v_head_dim, q, kv)


def chunks(layer: Softmax, job: Job, mesh: Mesh) -> int:
    """Pieces in which heads go through exchange and attention: at most the KV heads of a rank, which 0 stands for."""
    most = max(1, busiest(layer, mesh).kv_heads)
    return min(job.memory.head_chunks or most, most)


@dataclass(frozen=True)
class Piece:
    """Heads of a rank that go through exchange and attention together: query heads; KV heads that come with them; KV
    heads whose gradients go home with theirs.
    """

    q: int
    kv: int
    kv_home: int


def pieces(layer: Softmax, job: Job, mesh: Mesh) -> tuple[tuple[Piece, ...], ...]:
    """Every piece, for each Ulysses rank, as `longspan.attn.prepare` cuts them."""
    shares = heads_of(layer.q_heads, layer.kv_heads, mesh.tensor, mesh.ulysses)
    return _pieces(shares, job.memory.head_chunks, overlapped(layer, job, mesh))


def overlapped(layer: Softmax, job: Job, mesh: Mesh) -> int:
    """Chunks of heads of which one is under way while another computes; 1: nothing is."""
    if mesh.ulysses == 1:
        return 1
    shares = heads_of(layer.q_heads, layer.kv_heads, mesh.tensor, mesh.ulysses)
    return max(1, min(job.overlap_chunks, max(s.kv_heads if mesh.ring > 1 else s.q_heads for s in shares)))


@functools.lru_cache(maxsize=4096)
def _pieces(shares: tuple[HeadShard, ...], head_chunks: int, overlapping: int) -> tuple[tuple[Piece, ...], ...]:
    runs = tuple((run,) for run in split_head_chunks(shares, head_chunks))
    cut = split_overlap_chunks(shares, max(overlapping, len(runs))) if overlapping > 1 else runs

    def of(shard: HeadShard, at: int, count: int) -> Piece:
        kv = shard.kv_heads
        return Piece(shard.q_heads, kv if at == 0 else 0, kv if at == count - 1 else 0)

    return tuple(
        tuple(of(piece[rank], at, len(run)) for run in cut for at, piece in enumerate(run))
        for rank in range(len(shares))
    )


def sequence(layer: Softmax, job: Job, mesh: Mesh) -> list[Sent]:
    """Ulysses and ring together, of the rank that sends most where they differ (heads or blocks that are not alike)."""
    if mesh.sequence == 1:
        return []
    of_ranks = pieces(layer, job, mesh)
    alike = dict.fromkeys(of_ranks)  # in the order of the ranks
    kinds = [
        [
            sent
            for at, heads in enumerate(mine)
            for sent in (
                *_ulysses(layer, job, mesh, tuple(rank[at] for rank in of_ranks), heads),
                *_ring(layer, job, mesh, heads.kv),
            )
        ]
        for mine in alike
    ]
    return max(kinds, key=lambda sent: sum(each.bytes * each.calls for each in sent))


def _ulysses(layer: Softmax, job: Job, mesh: Mesh, of_ranks: tuple[Piece, ...], mine: Piece) -> list[Sent]:
    """Two All-to-Alls each way: Q, K and V packed in one, O in one (arXiv:2309.14509, section 3.2).

    A rank sends its tokens' rows to every other rank (the widths of their heads), and its heads' outputs to every
    other rank's tokens. With `recompute_all_to_all` only local q, k, v and output are saved: the backward
    sends Q, K, V and the output along with the output's gradient. Compressed, a head's elements are a byte each, and a
    scale.

    Args:
        layer: the layer.
        job: the job.
        mesh: the mesh.
        of_ranks: what each rank computes.
        mine: the same of this rank.
    """
    u = mesh.ulysses
    if u == 1:
        return []
    rows = local_tokens(job, mesh) * local_batch(job, mesh)
    of_q, of_v = (vector_bytes(job.wire_dtype, d, job.bytes_per_element) for d in (layer.head_dim, layer.v_head_dim))
    all_packed, all_out, _ = _widths(of_ranks, of_q, of_v)
    packed, out, home = _widths((mine,), of_q, of_v)
    forwards, backwards = mixing_passes(job)
    sent = [
        Sent("all_to_all", "ulysses", "Q, K, V to heads", rows * (all_packed - packed), forwards),
        Sent("all_to_all", "ulysses", "O to tokens", rows * (u - 1) * out, forwards),
    ]
    if backwards:
        what, width = "dO to heads", all_out - out
        if job.memory.recompute_all_to_all:
            what, width = "Q, K, V, O, dO to heads", all_packed - packed + 2 * width
        sent += [
            Sent("all_to_all", "ulysses", what, rows * width, backwards),
            Sent("all_to_all", "ulysses", "dQ, dK, dV to tokens", rows * (u - 1) * home, backwards),
        ]
    return sent


@functools.lru_cache(maxsize=4096)
def _widths(heads: tuple[Piece, ...], d: int, dv: int) -> tuple[int, int, int]:
    """Size of a token's packed row, of its output, and of its gradients' row, over a piece of several ranks, in the
    units of a head's `d` and `dv`.
    """
    return (
        sum(piece.q * d + piece.kv * (d + dv) for piece in heads),
        sum(piece.q * dv for piece in heads),
        sum(piece.q * d + piece.kv_home * (d + dv) for piece in heads),
    )


def schedule(layer: Softmax, job: Job, mesh: Mesh) -> RingSchedule:
    """How the KV blocks of a layer go round the ring."""
    return ring_schedule(layout_of(job, mesh), job.context, layer.reach)


def block_elements(layer: Softmax, job: Job, mesh: Mesh, kv_heads: int) -> int:
    """Elements of a KV block: what one P2P message of a ring holds."""
    tokens = local_tokens(job, mesh) * mesh.ulysses * local_batch(job, mesh)
    return tokens * kv_heads * (layer.head_dim + layer.v_head_dim)


def impl(layer: Softmax, job: Job, mesh: Mesh, kv_heads: int) -> str:
    """How keys and values of a layer go round, "p2p" or "allgather": what the code decides for these heads."""
    whole = mesh.ring * block_elements(layer, job, mesh, kv_heads) * job.bytes_per_element
    return choose_ring_impl(job.ring_impl, whole, schedule(layer, job, mesh).routes)


def _ring(layer: Softmax, job: Job, mesh: Mesh, kv_heads: int) -> list[Sent]:
    """Each KV head of a block once a step (Liu et al. 2023, arXiv:2310.01889), as far as the mask needs it.

    In the backward they travel again, and each rank that a block comes to sends a gradient of it, in fp32.
    All-gathered, every block goes everywhere at once, and the gradients are reduce-scattered.
    """
    r = mesh.ring
    if r == 1:
        return []
    elements = block_elements(layer, job, mesh, kv_heads)
    block, gradient = elements * job.bytes_per_element, elements * 4
    forwards, backwards = mixing_passes(job)
    if impl(layer, job, mesh, kv_heads) == "allgather":
        return [
            Sent("all_gather", "ring", "K, V of all blocks", block * (r - 1), forwards + backwards),
            Sent("reduce_scatter", "ring", "dK, dV of all blocks", gradient * (r - 1), backwards),
        ]
    routes = schedule(layer, job, mesh).routes
    kv, home = forwards + backwards, backwards
    sends, received = max(
        zip(routes.sends, routes.received, strict=True), key=lambda n: n[0] * kv * block + n[1] * home * gradient
    )
    return [
        Sent("p2p", "ring", "K, V to the next", block, sends * kv),
        Sent("p2p", "ring", "dK, dV on and home", gradient, received * home),
    ]


def decode(layer: Softmax, job: Job, mesh: Mesh, tokens: int = 1) -> list[Sent]:
    """So few new tokens over a KV cache sharded by heads (ulysses) and tokens (ring) that every rank computes them: one
    all-gather of the outputs of all heads, or, over a ring, of partial outputs and log-sum-exps in fp32.
    """
    layer = layer.in_cache(job, mesh)
    heads = max(share.q_heads for share in heads_of(layer.q_heads, layer.kv_heads, mesh.tensor, mesh.ulysses))
    if mesh.sequence == 1:
        return []
    if mesh.ring == 1:
        width = local_batch(job, mesh) * tokens * heads * job.bytes_per_element * layer.v_head_dim
        return [Sent("all_gather", "ulysses", "O of all heads", width * (mesh.ulysses - 1))]
    partial = local_batch(job, mesh) * tokens * heads * (layer.v_head_dim + 1) * 4
    return [Sent("all_gather", "sequence", "O and log-sum-exp of all parts", partial * (mesh.sequence - 1))]


def chunk(layer: Softmax, job: Job, mesh: Mesh, tokens: int, ulysses_rank: int | None = None) -> list[Sent]:
    """A chunk of a prompt over a KV cache: the exchange, and over a ring queries to the keys and partial outputs home.

    Args:
        layer: the layer.
        job: of the prompt; its context does not count.
        mesh: the mesh.
        tokens: of the chunk, more than are computed by every rank (`longspan.core.kv_placement.is_sharded`).
        ulysses_rank: whose; None: of the one that sends most.

    Returns:
        What it sends. The ring's bytes do not depend on what the cache holds.
    """
    layer = layer.in_cache(job, mesh)
    shares = heads_of(layer.q_heads, layer.kv_heads, mesh.tensor, mesh.ulysses)
    of_ranks = tuple(Piece(share.q_heads, share.kv_heads, share.kv_heads) for share in shares)
    b, d, dv = job.bytes_per_element, layer.head_dim, layer.v_head_dim
    rows = layout_of(job, mesh).local_length(tokens) * local_batch(job, mesh)

    def packed_of(piece: Piece) -> int:
        return piece.q * d + piece.kv * layer.kv_width

    all_packed = sum(map(packed_of, of_ranks))
    kinds = []
    for mine in of_ranks if ulysses_rank is None else of_ranks[ulysses_rank : ulysses_rank + 1]:
        packed, out = packed_of(mine), mine.q * dv
        block = rows * mesh.ulysses * mine.q * (mesh.ring - 1)
        sent = [
            Sent("all_to_all", "ulysses", "Q, K, V to heads", rows * b * (all_packed - packed)),
            Sent("all_gather", "ring", "Q to all keys", block * d * b),
            Sent("all_to_all", "ring", "O and log-sum-exp home", block * (dv + 1) * 4),
            Sent("all_to_all", "ulysses", "O to tokens", rows * b * (mesh.ulysses - 1) * out),
        ]
        kinds.append([each for each in sent if mesh.size(each.axis) > 1])
    return max(kinds, key=lambda sent: sum(each.bytes for each in sent))


def prompt(layer: Softmax, job: Job, mesh: Mesh) -> list[Sent]:
    """A whole prompt that comes in chunks of `job.prefill_chunk`."""
    assert job.prefill_chunk is not None
    whole, rest = divmod(job.context, job.prefill_chunk)
    sent = []
    for tokens, times in ((job.prefill_chunk, whole), (rest, 1)):
        if tokens and times:
            one = chunk if is_sharded(layout_of(job, mesh), tokens) else decode
            sent += [replace(each, calls=each.calls * times) for each in one(layer, job, mesh, tokens)]
    return sent


def in_chunk(layer: Softmax, job: Job, mesh: Mesh) -> Buffers:
    """What a rank holds beside the exchange while it computes a chunk, the job's context: over a ring the queries of
    all blocks; and three outputs in fp32, log-sum-exps along: the kernel's sum, what it adds, and the two weighed. Over
    a ring, these are again the partial outputs as computed, as sent, and as they arrive.
    """
    layer = layer.in_cache(job, mesh)
    heads = busiest(layer, mesh)
    tokens = local_tokens(job, mesh) * local_batch(job, mesh) * mesh.sequence
    queries = tokens * heads.q * job.bytes_per_element if mesh.ring > 1 else 0
    return Buffers(comm=queries, workspace=3 * tokens * heads.q_heads * (layer.v_head_dim + 1) * 4)
