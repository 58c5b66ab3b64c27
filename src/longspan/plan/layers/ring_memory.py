"""What a ring holds while softmax attention computes: KV blocks on their way, results under way; in bytes.

On the rank whose block is one run of tokens: the tile on its diagonal is the whole block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from longspan.plan.cost.per_rank import local_batch, local_tokens
from longspan.plan.cost.saved import Buffers
from longspan.plan.layers import exchange

if TYPE_CHECKING:
    from longspan.plan.cost.saved import Scale
    from longspan.plan.job import Job, Mesh
    from longspan.plan.layers.softmax import Softmax


def _block(job: Job, mesh: Mesh, s: Scale) -> tuple[int, int]:
    """Tokens of a block; bytes per element of what a tile takes and gives: a CPU's are fp32."""
    return local_tokens(job, mesh) * local_batch(job, mesh) * mesh.ulysses, 4 if s.on_cpu else s.b


def buffers_forward(layer: Softmax, job: Job, mesh: Mesh, s: Scale) -> Buffers:
    """In a forward."""
    heads = exchange.busiest(layer, mesh)
    tokens, of_a_tile = _block(job, mesh, s)
    sums = tokens * 4 * (heads.out + heads.q_heads)
    copies = tokens * 4 * (heads.q + heads.kv) * (s.b < of_a_tile)
    tile = tokens * heads.out * (of_a_tile + 4)  # a tile's output, and its weighted copy in fp32
    gathered = exchange.impl(layer, job, mesh, heads.kv_heads) == "allgather"
    # My own block as a message, the one at hand and the one that comes; or all of them.
    blocks = 1 + (mesh.ring if gathered else min(exchange.schedule(layer, job, mesh).routes.rounds, 2))
    return Buffers(blocks * s.b * heads.kv * tokens, sums + copies + tile)


def buffers_backward(layer: Softmax, job: Job, mesh: Mesh, s: Scale) -> Buffers:
    """In a backward."""
    heads = exchange.busiest(layer, mesh)
    tokens, of_a_tile = _block(job, mesh, s)
    block, gradient = s.b * heads.kv * tokens, 4 * heads.kv * tokens
    # The output's gradient; dQ, and dK and dV of my own block, in fp32.
    sums = tokens * (s.b * heads.out + 4 * (heads.q + heads.kv))
    copies = tokens * 4 * (heads.q + heads.kv + 2 * heads.out) * (s.b < of_a_tile)
    tile = tokens * of_a_tile * (heads.q + heads.kv)
    if exchange.impl(layer, job, mesh, heads.kv_heads) == "allgather":
        parts = mesh.ring * block + (mesh.ring - 1) * gradient
        # All gradients are laid side by side to be reduced, and gloo makes a copy of what it is given.
        together = mesh.ring * gradient * (2 if s.on_cpu else 1)
        of_queries = tokens * 4 * (heads.q + 2 * heads.out) * (s.b < of_a_tile)
        moments = [Buffers(parts, sums + copies + tile), Buffers(parts + together, sums + of_queries)]
    else:
        routes = exchange.schedule(layer, job, mesh).routes
        directions, rounds = any(routes.right) + any(routes.left), routes.rounds
        # (blocks, gradients) while a tile is computed: at first mine, then one that has come and I add to; from step
        # 2 on a gradient comes and one leaves besides. At last one leaves and mine has come home.
        held = [(1, 0), (min(rounds, 2), 1)] + [(1 + (rounds > 2), 3)] * (rounds > 1)
        moments = [Buffers(directions * (n * block + m * gradient), sums + copies + tile) for n, m in held]
        moments.append(Buffers(directions * (block + 2 * gradient), sums))
    return max(moments, key=lambda buffers: buffers.total)
