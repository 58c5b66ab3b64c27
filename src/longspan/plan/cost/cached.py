"""A KV cache that lies in the host's memory: what of it is on the device, on the host, and under way.

Of the layer that runs, and of the next one, what they hold is on the device, with room for the tokens under way. Of a
layer with a window that is more than it keeps: what all of these tokens see.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from longspan.plan.job import Job, Mesh
    from longspan.plan.models.shape import ModelShape


def held_bytes(model: ModelShape, job: Job, mesh: Mesh) -> int:
    """Bytes of all layers' keys and values, on the rank that holds most."""
    return sum(count * layer.mixer.cache_bytes(job, mesh) for layer, count in model.layer_kinds)


def staged_bytes(model: ModelShape, job: Job, mesh: Mesh, generated: int = 0, chunk: int | None = None) -> int:
    """Bytes of two layers that run one after the other, in the forward where they are most, on the rank with most.

    Args:
        model: what runs.
        job: its context is the prompt.
        mesh: the mesh.
        generated: tokens that came behind it one by one.
        chunk: tokens of a chunk of the prompt; None as the job has it, or else all at once. Of `decode` every forward
            is one of a token.
    """
    length = min(chunk or job.prefill_chunk or job.context, job.context)
    last = job.context % length or length
    forwards = [(job.context, generated, 1)] if generated or job.mode == "decode" else []
    if generated or job.mode != "decode":
        forwards.append((job.context, 0, last))
    if (generated or job.mode != "decode") and last < length:  # a window has most in a whole chunk
        forwards.append((job.context - last, 0, length))
    return max(_most(model, replace(job, context=n), mesh, more, chunk, step) for n, more, step in forwards)


def _most(model: ModelShape, job: Job, mesh: Mesh, generated: int, chunk: int | None, step: int) -> int:
    kinds = {layer: layer.mixer.staged_by_rank(job, mesh, generated, chunk, step) for layer, _ in model.layer_kinds}
    each = [kinds[layer] for layer in model.layers]
    nothing = [0] * len(each[0])
    first = step == job.context + generated  # nothing is held yet that could come beforehand
    following = [nothing] * len(each) if first else [*each[1:], nothing]
    return max(a + b for one, other in zip(each, following, strict=True) for a, b in zip(one, other, strict=True))


def brought_bytes(held: int, job: Job) -> float:
    """Bytes of a layer that come to the device in a step: for every chunk what those before it left; for a token, all.

    Args:
        held: bytes of the layer at the end of the step.
        job: what is computed.
    """
    return held * (job.forwards - 1) / 2 if job.mode == "prefill" else float(held)
