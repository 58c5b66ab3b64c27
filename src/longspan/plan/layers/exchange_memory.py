"""What the backward of a softmax attention holds beside what is saved: bytes of the exchange and of the kernel.

Kept apart from the formulas of what is sent, because these are what a measurement may correct.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from longspan.plan.cost.saved import Buffers, offloads
from longspan.plan.layers import exchange

if TYPE_CHECKING:
    from longspan.plan.cost.saved import Scale
    from longspan.plan.job import Job, Mesh
    from longspan.plan.layers.softmax import Softmax

KERNEL_SUM = 4
"""Bytes per element of dQ that a GPU's flash backward adds up in fp32, beside dQ itself."""

KERNEL_REPEATED = True
"""Whether that backward writes dK and dV for every query head, and adds them up by group afterwards."""


def kernel_backward(layer: Softmax, mesh: Mesh, s: Scale) -> int:
    """Bytes of the kernel's own, all heads of the rank at once."""
    if s.on_cpu:
        return 0
    heads = exchange.busiest(layer, mesh)
    repeated = s.b * (heads.q + heads.out) if KERNEL_REPEATED and heads.q_heads > heads.kv_heads else 0
    return s.tokens * mesh.ulysses * (KERNEL_SUM * heads.q + repeated)


def buffers_backward(layer: Softmax, job: Job, mesh: Mesh, s: Scale) -> Buffers:
    """At the worst of three moments: gradients (recompute: with Q, K, V and output) sent to heads; the kernel, or the
    ring; gradients sent back. In pieces of the heads each is a piece's, and what has come back so far lies beside.
    """
    heads, mine = exchange.busiest(layer, mesh), exchange.of_my_tokens(layer, mesh)
    pieces, tokens, u = exchange.chunks(layer, job, mesh), s.tokens, mesh.ulysses
    recompute, exchanged = job.memory.recompute_all_to_all and u > 1, u > 1
    ring = layer.ring_buffers(job, mesh, s, backward=True)
    in_heads = tokens * u * s.b
    gradients = in_heads * (heads.q + heads.kv)
    brought = in_heads * (heads.q + heads.kv + heads.out) if recompute else 0
    result = tokens * s.b * (mine.q + mine.kv)  # of my tokens, of all heads
    of_output = tokens * s.b * mine.out  # the gradient that comes in
    stays = of_output + (result if pieces > 1 else 0)
    if mesh.ring > 1:  # its sums hold the output's gradient in head layout
        computing = ring.workspace + -(-(kernel_backward(layer, mesh, s) + brought) // pieces)
        return Buffers(ring.comm, computing + (stays if recompute or pieces > 1 else 0))
    computing = brought + gradients + in_heads * heads.out * exchanged + kernel_backward(layer, mesh, s)
    sending = brought + in_heads * heads.out + of_output + (result + of_output if recompute else 0)
    # The kernel's node is done, and what it saved is gone with it: where nobody else keeps it.
    kept = job.memory.checkpointing == "save_attention" and not offloads(job, s)
    gone = 0 if recompute or kept else in_heads * (heads.q + heads.kv + heads.out)
    returning = 2 * gradients + (result if pieces == 1 else 0) - gone
    if pieces == 1 and not recompute:  # the gradient that came in goes when it has been sent
        return Buffers(0, max(computing, of_output + sending, returning) if exchanged else computing + of_output)
    moments = [computing, *((sending, returning) if exchanged else ())]
    return Buffers(0, stays + -(-max(moments) // pieces))
