"""Whether a model fits with a prompt and its KV cache (`longspan generate`), or a whole text (`longspan score`)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from longspan.core.errors import LongspanError
from longspan.core.tile_sizes import head_tile
from longspan.plan.cost.memory import memory
from longspan.plan.cost.offload import HOST_SHARE, offloaded_bytes
from longspan.plan.limits import GB, refusal
from longspan.plan.search import format_items, meshes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from longspan.plan.hardware import Hardware
    from longspan.plan.job import Job, Mesh
    from longspan.plan.models.shape import ModelShape

    Items = Callable[[Job, Mesh], dict[str, int]]

MOST_RANKS = 1 << 10
"""The most ranks among which a mesh that fits is searched."""


def peak_items(model: ModelShape, job: Job, mesh: Mesh, hardware: Hardware, chunk: int) -> dict[str, int]:
    """Return the bytes, item by item, at the peak: in the prompt's last chunk, or in a token's forward.

    Args:
        model: the model.
        job: `context` is all tokens that the cache will hold.
        mesh: the mesh.
        hardware: the kind of GPU.
        chunk: tokens of the prompt per chunk, over all ranks.
    """
    peaks = [
        memory(model, replace(job, mode=mode, prefill_chunk=chunk), mesh, hardware, tiles=1)
        for mode in ("prefill", "decode")
    ]
    return max(peaks, key=lambda items: sum(items.values()))


def scoring_peak_items(model: ModelShape, job: Job, mesh: Mesh, hardware: Hardware) -> dict[str, int]:
    """Return the bytes, item by item, of a forward over a whole text: no cache, and the head tile by tile.

    Args:
        model: the model.
        job: `context` is the tokens of the text.
        mesh: the mesh.
        hardware: the kind of GPU.
    """
    prefill = replace(job, mode="prefill")
    items = {**memory(model, prefill, mesh, hardware, tiles=1), "kv_cache": 0}
    rows = min(-(-job.context // mesh.sequence), head_tile(model.vocab, hardware.on_cpu))
    return {**items, "logits": rows * model.vocab * (4 if job.dtype == "fp32" else 8)}


def check_fits(model: ModelShape, job: Job, mesh: Mesh, hardware: Hardware, chunk: int) -> None:
    """Raise if the prompt and its cache do not fit.

    Args:
        model: the model.
        job: `context` is all tokens that the cache will hold.
        mesh: the mesh.
        hardware: the kind of GPU.
        chunk: tokens of the prompt per chunk, over all ranks.

    Raises:
        LongspanError: if the mesh cannot hold the job, or the memory is too small: with the sum, item by item, the
            smallest mesh that fits, and the longest cache that fits.
    """
    asked = replace(job, mode="decode")  # which allows fewer tokens than ranks
    held = "prompt and --max-new-tokens together"
    _check(model, asked, mesh, hardware, lambda j, m: peak_items(model, j, m, hardware, chunk), f" ({held})")


def check_score_fits(model: ModelShape, job: Job, mesh: Mesh, hardware: Hardware) -> None:
    """Raise if a text to score does not fit.

    Args:
        model: the model.
        job: `context` is the tokens of the text.
        mesh: the mesh.
        hardware: the kind of GPU.

    Raises:
        LongspanError: as `check_fits`.
    """
    asked = replace(job, mode="prefill")
    _check(model, asked, mesh, hardware, lambda j, m: scoring_peak_items(model, j, m, hardware), " (--max-tokens)")


def _check(model: ModelShape, job: Job, mesh: Mesh, hardware: Hardware, items_of: Items, means: str) -> None:
    problem = refusal(model, job, mesh)
    if problem is not None:
        raise LongspanError(problem)
    if _fits(model, job, mesh, hardware, items_of):
        return
    items, stored = items_of(job, mesh), offloaded_bytes(model, job, mesh, hardware)
    needed = f"{sum(items.values()) / GB:.2f} GB of {hardware.memory_bytes / GB:.2f} GB per rank"
    if stored.host_bytes:
        needed += (
            f", and {stored.host_node_bytes / GB:.2f} GB of {HOST_SHARE * hardware.host_memory / GB:.2f} GB of host "
            f"memory per node ({format_items(stored.host_bytes)} of each rank)"
        )
    raise LongspanError(
        f"{job.context:,} tokens do not fit on {mesh} of {hardware.name}: they need {needed}. Item by item: "
        f"{format_items(items)}. {_suggestions(model, job, mesh, hardware, items_of, means)}"
    )


def _suggestions(model: ModelShape, job: Job, mesh: Mesh, hardware: Hardware, items_of: Items, means: str) -> str:
    sentences = []
    ranks = mesh.gpus
    while ranks <= MOST_RANKS:
        sharded = replace(job, weight_sharding=True) if ranks > 1 else job
        found = next((m for m in _meshes_of(ranks) if _holds(model, sharded, m, hardware, items_of)), None)
        if found is not None:
            total = sum(items_of(sharded, found).values())
            weights = " with FSDP" if not job.weight_sharding and ranks > 1 else ""
            flags = f"--ring {found.ring} --ulysses {found.ulysses}"
            sentences.append(f"{ranks:,} ranks of this kind suffice: {flags}{weights}, {total / GB:.2f} GB each.")
            break
        ranks = 1 << ranks.bit_length()
    else:
        sentences.append(f"Up to {MOST_RANKS:,} ranks of this kind do not suffice.")
    longest = _longest(model, job, mesh, hardware, items_of)
    if longest:
        sentences.append(f"On {mesh} {longest:,} tokens fit{means}.")
    return " ".join(sentences)


def _holds(model: ModelShape, job: Job, mesh: Mesh, hardware: Hardware, items_of: Items) -> bool:
    return refusal(model, job, mesh) is None and _fits(model, job, mesh, hardware, items_of)


def _fits(model: ModelShape, job: Job, mesh: Mesh, hardware: Hardware, items_of: Items) -> bool:
    device = sum(items_of(job, mesh).values()) <= hardware.memory_bytes
    return device and offloaded_bytes(model, job, mesh, hardware).fits(hardware)


def _meshes_of(ranks: int) -> Iterator[Mesh]:
    """Yield the meshes that generate runs on: ring x ulysses, largest ulysses first."""
    found = [mesh for mesh in meshes(ranks) if mesh.data == mesh.tensor == 1]
    yield from sorted(found, key=lambda mesh: mesh.ring)


def _longest(model: ModelShape, job: Job, mesh: Mesh, hardware: Hardware, items_of: Items) -> int:
    low, high = 0, job.context
    while high - low > 1:
        middle = (low + high) // 2
        if _fits(model, replace(job, context=middle), mesh, hardware, items_of):
            low = middle
        else:
            high = middle
    return low
