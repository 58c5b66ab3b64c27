"""What of a job lies on one rank: tokens, sequences, heads, and how often it is computed."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from longspan.core.heads import HeadShard, split_groups, split_heads
from longspan.core.kv_placement import is_sharded
from longspan.core.tile_sizes import layers_held, layers_per_checkpoint
from longspan.plan.job import layout_of

if TYPE_CHECKING:
    from longspan.plan.job import Job, Mesh


def micro_batches(job: Job, mesh: Mesh) -> int:
    """Forwards and backwards of one step: training takes a replica's sequences one after the other."""
    return max(1, job.batch // mesh.data) if job.mode == "train" else 1


def local_tokens(job: Job, mesh: Mesh) -> int:
    """Tokens of one sequence on one rank, padding included; in decode one new token, held by every rank."""
    return 1 if job.mode == "decode" else layout_of(job, mesh).local_length(job.context)


def forwards_of(job: Job, mesh: Mesh) -> list[tuple[int, int]]:
    """Tokens of one sequence on one rank, and how often: of each forward of a prompt in chunks, of whose last one every
    rank may compute all tokens; else those of the one forward.
    """
    if job.mode != "prefill" or job.prefill_chunk is None:
        return [(local_tokens(job, mesh), 1)]
    layout, (whole, rest) = layout_of(job, mesh), divmod(job.context, job.prefill_chunk)
    return [
        (layout.local_length(tokens) if is_sharded(layout, tokens) else tokens, times)
        for tokens, times in ((job.prefill_chunk, whole), (rest, 1))
        if tokens and times
    ]


def local_batch(job: Job, mesh: Mesh) -> int:
    """Sequences that are on a GPU at once: one in training (the rest is accumulated), a replica's share otherwise."""
    return 1 if job.mode == "train" else max(1, -(-job.batch // mesh.data))


def passes(job: Job) -> tuple[int, int]:
    """How often a layer's forward and its backward run."""
    if job.mode != "train":
        return 1, 0
    return (1 if job.memory.checkpointing == "none" else 2), 1


def runs_between(layers: int, job: Job) -> int:
    """Layers whose forward runs once more, without gradients, to make inputs again that nobody keeps: all but the last
    of each group of `Memory.layers_per_checkpoint`.
    """
    if job.mode != "train" or job.memory.checkpointing == "none":
        return 0
    return layers - layers_held(layers, layers_per_checkpoint(layers, job.memory.layers_per_checkpoint))[0]


def mixing_passes(job: Job) -> tuple[int, int]:
    """How often a layer's attention runs, forward and backward: `checkpointing` may keep its result, and then exchange,
    ring and kernel do not run again with the layer.
    """
    if job.mode != "train":
        return 1, 0
    return (2 if job.memory.checkpointing == "full" else 1), 1


@functools.lru_cache(maxsize=4096)
def heads_of(q_heads: int, kv_heads: int, tensor: int, ulysses: int) -> tuple[HeadShard, ...]:
    """Which heads each Ulysses rank computes, of those that tensor parallelism leaves it."""
    most = max(split_groups(q_heads, kv_heads, tensor), key=lambda shard: (shard.q_heads, shard.kv_heads))
    return split_heads(most.q_heads, most.kv_heads, ulysses)
