"""Whether a model with a prompt and its KV cache fits, as `longspan generate` runs it: the prompt in chunks."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from longspan.core.errors import LongspanError
from longspan.plan.cost.memory import memory
from longspan.plan.limits import GB, refusal
from longspan.plan.search import meshes, spelled_items

if TYPE_CHECKING:
    from collections.abc import Iterator

    from longspan.plan.hardware import Hardware
    from longspan.plan.job import Job, Mesh
    from longspan.plan.models.shape import ModelShape

MOST_RANKS = 1 << 10
"""Ranks up to which one looks for a mesh that would do."""


def largest_moment(model: ModelShape, job: Job, mesh: Mesh, hardware: Hardware, chunk: int) -> dict[str, int]:
    """Bytes, item by item, when most is held: while the last chunk of a prompt is computed, or while a token is.

    Args:
        model: what runs.
        job: `context` is all tokens that the cache comes to hold.
        mesh: the mesh.
        hardware: on what.
        chunk: tokens of the prompt at once, over all ranks.
    """
    cache = sum(
        count * layer.mixer.cache_bytes(replace(job, mode="prefill"), mesh) for layer, count in model.layer_kinds
    )
    prefill = replace(job, mode="prefill", context=min(chunk, job.context))
    moments = [memory(model, each, mesh, hardware) for each in (prefill, replace(job, mode="decode"))]
    return max(({**items, "kv_cache": cache} for items in moments), key=lambda items: sum(items.values()))


def check_fits(model: ModelShape, job: Job, mesh: Mesh, hardware: Hardware, chunk: int) -> None:
    """Refuse what will not fit.

    Args:
        model: what runs.
        job: `context` is all tokens that the cache comes to hold.
        mesh: the mesh.
        hardware: on what.
        chunk: tokens of the prompt at once, over all ranks.

    Raises:
        LongspanError: if the mesh cannot hold the job, or the memory is too small: with the sum, item by item, and the
            mesh that would do, or the longest cache that fits.
    """
    asked = replace(job, mode="decode")  # fewer tokens than ranks will do
    problem = refusal(model, asked, mesh)
    if problem is not None:
        raise LongspanError(problem)
    items = largest_moment(model, job, mesh, hardware, chunk)
    if sum(items.values()) <= hardware.memory_bytes:
        return
    raise LongspanError(
        f"{job.context:,} tokens do not fit on {mesh} of {hardware.name}: they need {sum(items.values()) / GB:.2f} "
        f"GB of {hardware.memory_bytes / GB:.2f} GB per rank. Item by item: {spelled_items(items)}. "
        f"{_what_would_do(model, asked, mesh, hardware, chunk)}"
    )


def _fits(model: ModelShape, job: Job, mesh: Mesh, hardware: Hardware, chunk: int) -> bool:
    return sum(largest_moment(model, job, mesh, hardware, chunk).values()) <= hardware.memory_bytes


def _what_would_do(model: ModelShape, job: Job, mesh: Mesh, hardware: Hardware, chunk: int) -> str:
    said = []
    ranks = mesh.gpus
    while ranks <= MOST_RANKS:
        sharded = replace(job, weight_sharding=True) if ranks > 1 else job
        for other in _meshes_of(ranks):
            if refusal(model, sharded, other) is None and _fits(model, sharded, other, hardware, chunk):
                total = sum(largest_moment(model, sharded, other, hardware, chunk).values())
                weights = " with FSDP" if not job.weight_sharding and ranks > 1 else ""
                flags = f"--ring {other.ring} --ulysses {other.ulysses}"
                said.append(f"{ranks:,} ranks of this kind would do: {flags}{weights}, {total / GB:.2f} GB each.")
                break
        if said:
            break
        ranks = 1 << ranks.bit_length()
    else:
        said.append(f"Up to {MOST_RANKS:,} ranks of this kind would not do.")
    longest = _longest(model, job, mesh, hardware, chunk)
    if longest:
        said.append(f"On {mesh} {longest:,} tokens fit (prompt and --max-new-tokens together).")
    return " ".join(said)


def _meshes_of(ranks: int) -> Iterator[Mesh]:
    """Meshes that generate runs on: ring x ulysses; those of most heads first."""
    found = [mesh for mesh in meshes(ranks) if mesh.data == mesh.tensor == 1]
    yield from sorted(found, key=lambda mesh: mesh.ring)


def _longest(model: ModelShape, job: Job, mesh: Mesh, hardware: Hardware, chunk: int) -> int:
    low, high = 0, job.context
    while high - low > 1:
        middle = (low + high) // 2
        if _fits(model, replace(job, context=middle), mesh, hardware, chunk):
            low = middle
        else:
            high = middle
    return low
