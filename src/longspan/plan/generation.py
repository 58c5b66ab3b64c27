"""Whether a model fits with a prompt and its KV cache (`longspan generate`), or a whole text (`longspan score`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from longspan.core.errors import LongspanError
from longspan.core.experts import divisors
from longspan.core.tile_sizes import head_tile
from longspan.plan.cost.peak_memory import HOST_SHARE, offloaded_bytes, peak_memory
from longspan.plan.hardware import Hardware
from longspan.plan.job import CostContext, Job
from longspan.plan.limits import GB, refusal
from longspan.plan.search import bisect_largest, format_items
from longspan.plan.shape import ModelShape

Items = Callable[[Job], dict[str, int]]

MOST_RANKS = 1 << 10
"""The most ranks among which a mesh that fits is searched."""


def peak_items(model: ModelShape, job: Job, hardware: Hardware, chunk: int) -> dict[str, int]:
    """Return the bytes, item by item, at the peak: in the prompt's last chunk, or in a token's forward.

    The job's context is all tokens that the cache will hold; `chunk` tokens of the prompt are computed at a time, over
    all ranks.
    """
    jobs = [replace(job, mode=mode, prefill_chunk=chunk) for mode in ("prefill", "decode")]
    peaks = [peak_memory(CostContext(model, each), hardware, tiles=1) for each in jobs]
    return max(peaks, key=lambda items: sum(items.values()))


def scoring_peak_items(model: ModelShape, job: Job, hardware: Hardware) -> dict[str, int]:
    """Return the bytes, item by item, of a forward over a text of `job.context` tokens: no cache, and the head tile by
    tile.
    """
    c = CostContext(model, replace(job, mode="prefill"))
    items = {**peak_memory(c, hardware, tiles=1), "kv_cache": 0}
    rows = min(-(-job.context // job.parallel.sequence_ranks), head_tile(model.vocab, on_cpu=False))
    return {**items, "logits": rows * model.vocab * (4 if job.dtype == "fp32" else 8)}


def check_fits(model: ModelShape, job: Job, hardware: Hardware, chunk: int) -> None:
    """Raise if the prompt and its cache do not fit. Arguments as of `peak_items`.

    Raises:
        LongspanError: if the mesh cannot hold the job, or the memory is too small: with the sum, item by item, the
            smallest mesh that fits, and the longest cache that fits.
    """
    asked = replace(job, mode="decode")  # which allows fewer tokens than ranks
    held = "prompt and --max-new-tokens together"
    _check(model, asked, hardware, lambda j: peak_items(model, j, hardware, chunk), f" ({held})")


def does_not_fit(model: ModelShape, job: Job, hardware: Hardware, chunk: int) -> str | None:
    """Return why the prompt and its cache do not fit, in a few words; None if they do. Arguments as of `peak_items`."""
    problem = refusal(model, replace(job, mode="decode"))
    return problem or _short_of(model, job, hardware, peak_items(model, job, hardware, chunk))


def _short_of(model: ModelShape, job: Job, hardware: Hardware, items: dict[str, int]) -> str | None:
    """Return which memory is too small for these items and what is offloaded, in a few words; None if none is."""
    total = sum(items.values())
    if total > hardware.memory_bytes:
        return f"{total / GB:.2f} of {hardware.memory_bytes / GB:.2f} GB per rank"
    stored = offloaded_bytes(CostContext(model, job), hardware)
    return None if stored.fits(hardware) else f"{stored.host_node_bytes / GB:.2f} GB of host memory per node"


def check_score_fits(model: ModelShape, job: Job, hardware: Hardware) -> None:
    """Raise if a text of `job.context` tokens to score does not fit.

    Raises:
        LongspanError: as `check_fits`.
    """
    asked = replace(job, mode="prefill")
    _check(model, asked, hardware, lambda j: scoring_peak_items(model, j, hardware), " (--max-tokens)")


def _check(model: ModelShape, job: Job, hardware: Hardware, items_of: Items, tokens_are: str) -> None:
    problem = refusal(model, job)
    if problem is not None:
        raise LongspanError(problem)

    def fits(job: Job) -> bool:
        return _short_of(model, job, hardware, items_of(job)) is None

    if fits(job):
        return
    items, stored = items_of(job), offloaded_bytes(CostContext(model, job), hardware)
    needed = f"{sum(items.values()) / GB:.2f} GB of {hardware.memory_bytes / GB:.2f} GB per rank"
    if stored.host_bytes:
        needed += (
            f", and {stored.host_node_bytes / GB:.2f} GB of {HOST_SHARE * hardware.host_memory / GB:.2f} GB of host "
            f"memory per node ({format_items(stored.host_bytes)} of each rank)"
        )
    sentences = [
        f"{job.context:,} tokens do not fit on {job.parallel} of {hardware.name}: they need {needed}.",
        f"Item by item: {format_items(items)}.",
        _enough_ranks(model, job, items_of, fits),
    ]
    longest = bisect_largest(lambda context: fits(replace(job, context=context)), 0, job.context)
    if longest:
        sentences.append(f"On {job.parallel} {longest:,} tokens fit{tokens_are}.")
    raise LongspanError(" ".join(sentences), code="LS105")


def _enough_ranks(model: ModelShape, job: Job, items_of: Items, fits: Callable[[Job], bool]) -> str:
    """Say which mesh of as many ranks, or of the next powers of two, fits: ring x ulysses, largest ulysses first."""
    ranks = job.parallel.ranks
    while ranks <= MOST_RANKS:
        sharded = replace(job, weight_sharding=True) if ranks > 1 else job
        candidates = [sharded.on(data=1, ring=ring, ulysses=ranks // ring, tensor=1) for ring in divisors(ranks)]
        enough = next((one for one in candidates if refusal(model, one) is None and fits(one)), None)
        if enough is not None:
            total = sum(items_of(enough).values())
            weights = " with FSDP" if not job.weight_sharding and ranks > 1 else ""
            flags = f"--ring {enough.parallel.ring} --ulysses {enough.parallel.ulysses}"
            return f"{ranks:,} ranks of this kind suffice: {flags}{weights}, {total / GB:.2f} GB each."
        ranks = 1 << ranks.bit_length()
    return f"Up to {MOST_RANKS:,} ranks of this kind do not suffice."
