"""Hidden states that a forward without a backward holds at once, moment by moment, in bytes.

Beside those that a layer works on, transformers' own frames keep two until the last layer has run: the embeddings,
which the decoder's forward goes on naming, and what the layer was given, which its loop does. Attention and MLP keep
their normalised input for as long as they run.

A tensor axis of style "megatron-sp" cuts all of these over its ranks, and gathers the whole in front of the matrices;
of style "tp" every rank holds them whole, and sums a copy of what came out. A mixture of experts works on a rank's own
tokens in both styles: it gathers nothing in front, and with "tp" joins the ranks' tokens behind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from longspan.plan.cost.per_rank import local_batch

if TYPE_CHECKING:
    from longspan.plan.cost.saved import Scale
    from longspan.plan.job import Job, Mesh
    from longspan.plan.layers.mlp import Mlp

KEPT = 2
"""The embeddings, and the layer's input."""


def in_attention(job: Job, mesh: Mesh, s: Scale) -> int:
    """Inside attention: its normalised input, and all tokens of it where they are gathered."""
    return (KEPT + 1) * _stream(s) + (_whole(s) if _gathers(job, mesh) else 0)


def in_norm(s: Scale, tiles: int) -> int:
    """In the norm behind attention: the sum with attention's output, and of a tile two tensors in fp32, an RMSNorm's
    input and what it makes of it.
    """
    return (KEPT + 1) * _stream(s) + 2 * s.tokens * s.d * 4 // s.hidden_shards // tiles


def in_mlp(mlp: Mlp, job: Job, mesh: Mesh, s: Scale) -> int:
    """Inside the MLP: the sum with attention's output, the norm of it, and all tokens of that."""
    entering = 0
    if mlp.experts > 1:
        entering = _whole(s) // mesh.tensor if mesh.tensor > s.hidden_shards else 0
    elif _gathers(job, mesh):
        entering = _whole(s)
    return (KEPT + 2) * _stream(s) + entering


def behind_mlp(mlp: Mlp, job: Job, mesh: Mesh, s: Scale) -> int:
    """While the tensor ranks' parts of the MLP's output are added up, or their tokens joined: beside what there is in
    the MLP the part, and the sum. 0 without a tensor axis: the MLP's own intermediates are more.
    """
    if mesh.tensor == 1:
        return 0
    part = _whole(s)
    if mlp.experts > 1:
        part //= mesh.tensor
    elif _gathers(job, mesh):  # of rows the tokens come first to be scattered; gloo makes a copy of what it is given
        part *= 1 + (local_batch(job, mesh) > 1) + s.on_cpu
    return in_mlp(mlp, job, mesh, s) + part + _stream(s)


def in_last_norm(s: Scale, tiles: int) -> int:
    """In the norm behind the last layer: as in another, but there is no layer's input."""
    return in_norm(s, tiles) - _stream(s)


def _gathers(job: Job, mesh: Mesh) -> bool:
    return mesh.tensor > 1 and job.tensor_style == "megatron-sp"


def _stream(s: Scale) -> int:
    """A rank's part of the residual stream."""
    return s.tokens * s.d * s.b // s.hidden_shards


def _whole(s: Scale) -> int:
    """All tokens of a rank's sequence shard."""
    return s.tokens * s.d * s.b
