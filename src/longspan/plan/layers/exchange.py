"""What softmax attention sends: Ulysses, the ring, both together, and decoding over a sharded cache.

Compared with the running code to the byte in the tests (decoding is a formula).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from longspan.core.routes import choose_impl
from longspan.plan.cost.local import heads_of, local_batch, local_tokens, passes
from longspan.plan.cost.ring import RingSchedule, ring_schedule
from longspan.plan.cost.sent import Sent
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


def sequence(layer: Softmax, job: Job, mesh: Mesh) -> list[Sent]:
    """Ulysses and ring together, of the rank that sends most where they differ (heads or blocks that are not alike)."""
    if mesh.sequence == 1:
        return []
    shares = heads_of(layer.q_heads, layer.kv_heads, mesh.tensor, mesh.ulysses)
    alike = dict.fromkeys((share.q_heads, share.kv_heads) for share in shares)  # in the order of the ranks
    kinds = [_ulysses(layer, job, mesh, *heads) + _ring(layer, job, mesh, heads[1]) for heads in alike]
    return max(kinds, key=lambda sent: sum(each.bytes * each.calls for each in sent))


def _ulysses(layer: Softmax, job: Job, mesh: Mesh, q_heads: int, kv_heads: int) -> list[Sent]:
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
    return choose_impl(job.ring_impl, whole, schedule(layer, job, mesh).routes)


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
    forwards, backwards = passes(job)
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


def decode(layer: Softmax, job: Job, mesh: Mesh) -> list[Sent]:
    """One new token over a KV cache sharded by heads (ulysses) and tokens (ring): outputs are gathered or merged."""
    shares = heads_of(layer.q_heads, layer.kv_heads, mesh.tensor, mesh.ulysses)
    heads = max(s.q_heads for s in shares)
    b, batch = job.bytes_per_element, local_batch(job, mesh)
    merged = batch * heads * (layer.v_head_dim + 1) * 4  # partial outputs and log-sum-exps
    return [
        Sent("all_gather", "ulysses", "O of all heads", b * batch * heads * layer.v_head_dim * (mesh.ulysses - 1)),
        Sent("all_reduce", "ring", "O and log-sum-exp merged", 2 * merged * (mesh.ring - 1) // mesh.ring),
    ]
