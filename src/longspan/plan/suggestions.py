"""Memory options for a mesh; and suggestions for a job that does not fit: other memory options, or more GPUs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from longspan.core.errors import LongspanError
from longspan.core.memory import FASTEST, Memory
from longspan.core.memory_flags import flags_to_add
from longspan.plan.limits import GB, refusal
from longspan.plan.memory_search import (
    MOST_GPUS,
    chosen_plan,
    fastest_memory_options,
    least_memory,
    longest,
    smallest_memory_candidates,
)
from longspan.plan.search import MOST_GPUS as MOST_SEARCHED
from longspan.plan.search import Plan, check_values, fits_in_memory, format_items, meshes, planned

if TYPE_CHECKING:
    from longspan.plan.hardware import Hardware
    from longspan.plan.job import Job, Mesh
    from longspan.plan.models.shape import ModelShape


def choose(
    model: ModelShape, job: Job, mesh: Mesh, hardware: Hardware, fixed: Mapping[str, Any] | None = None
) -> tuple[Memory, str]:
    """Return the fastest combination of memory options that fits, and a sentence: its cost, and what does not fit.

    Args:
        model: the model.
        job: the job; its own memory options are ignored.
        mesh: the mesh.
        hardware: the kind of GPU.
        fixed: memory options that stay as they are, by the fields of `Memory`.

    Raises:
        LongspanError: if the mesh cannot hold the job (`longspan.plan.limits.refusal`), or nothing fits: with the sum,
            item by item, of the combination that needs least, and suggestions.
    """
    check_values(model=model, job=job, mesh=mesh, hardware=hardware)
    problem = refusal(model, job, mesh)
    if problem is not None:
        raise LongspanError(problem)
    found = fastest_memory_options(model, job, mesh, hardware, fixed)
    if found is not None:
        return found
    least = least_memory(model, job, mesh, hardware, fixed)
    raise LongspanError(
        f"{job.context:,} tokens do not fit on {mesh} of {hardware.name} with any memory options: with "
        f"{least.job.memory.describe()} it still {least.short_of(0)[0]}. Item by item: "
        f"{format_items(least.memory_bytes)}. "
        f"{suggestion_text(model, job, mesh.gpus, hardware, fixed, chooses=True)}"
    )


@dataclass(frozen=True)
class Suggestions:
    """Plans that fit, for a job that does not; None if none was found or looked for.

    Attributes:
        memory_options: on the same GPUs, with other memory options.
        more: on more GPUs, a power of two, with the job's memory options, or with those that the planner chooses.
        fewer: the same on fewer GPUs than `more`, in whole nodes.
        longest: without any of these, the longest context on the same GPUs.
        searched: the most GPUs that were looked at.
    """

    memory_options: Plan | None = None
    more: Plan | None = None
    fewer: Plan | None = None
    longest: Plan | None = None
    searched: int = 0


def find_suggestions(
    model: ModelShape,
    job: Job,
    gpus: int,
    hardware: Hardware,
    fixed: Mapping[str, Any] | None = None,
    chooses: bool = False,
) -> Suggestions:
    """Search plans for a job that does not fit, on meshes without a tensor axis.

    Args:
        model: the model.
        job: the job.
        gpus: number of GPUs on which it does not fit.
        hardware: the kind of GPU.
        fixed: memory options that stay as they are, by the fields of `Memory`.
        chooses: whether the planner chose the memory options: then it has tried all of them on these GPUs.
    """
    if not chooses:  # memory options that the job has, stay
        own = {f.name: getattr(job.memory, f.name) for f in fields(Memory)}
        fixed = {name: value for name, value in own.items() if value != getattr(FASTEST, name)} | dict(fixed or {})

    def with_chosen_options(mesh: Mesh) -> Plan | None:
        smallest = (replace(job, memory=memory) for memory in smallest_memory_candidates(job, hardware, fixed))
        if not any(fits_in_memory(model, each, mesh, hardware) for each in smallest):
            return None
        plan = chosen_plan(model, job, mesh, hardware, fixed)
        return plan if plan.fits else None

    def as_it_is(mesh: Mesh) -> Plan | None:
        return planned(model, job, mesh, hardware) if fits_in_memory(model, job, mesh, hardware) else None

    few = gpus <= MOST_GPUS  # memory options are chosen mesh by mesh
    memory_options = _fastest(model, job, gpus, with_chosen_options) if few and not chooses else None
    limit = MOST_GPUS if chooses else MOST_SEARCHED
    more, fewer = _on_more(model, job, gpus, hardware, with_chosen_options if chooses else as_it_is, limit)
    reached = longest(model, job, gpus, hardware, fixed) if few and memory_options is None and more is None else None
    return Suggestions(memory_options, more, fewer, reached, max(limit, gpus))


def _fastest(model: ModelShape, job: Job, gpus: int, plan_of: Callable[[Mesh], Plan | None]) -> Plan | None:
    found = (plan_of(m) for m in meshes(gpus) if m.tensor == 1 and refusal(model, job, m) is None)
    return min((plan for plan in found if plan is not None), key=lambda plan: plan.step_seconds, default=None)


def _on_more(
    model: ModelShape, job: Job, gpus: int, hardware: Hardware, plan_of: Callable[[Mesh], Plan | None], limit: int
) -> tuple[Plan | None, Plan | None]:
    """Return the fastest plan on the first power of two of GPUs that fits; and on fewer, in whole nodes."""
    count = 1 << gpus.bit_length()
    while count <= limit:
        more = _fastest(model, job, count, plan_of)
        if more is not None:
            node = hardware.gpus_per_node
            step = max(node, count // 16) if count > node else 1
            between = range(count // 2 + step, count, step)
            fewer = (_fastest(model, job, n, plan_of) for n in between if n > gpus)
            return more, next((plan for plan in fewer if plan is not None), None)
        count *= 2
    return None, None


def suggestion_text(
    model: ModelShape,
    job: Job,
    gpus: int,
    hardware: Hardware,
    fixed: Mapping[str, Any] | None = None,
    chooses: bool = False,
) -> str:
    """Return `find_suggestions` in sentences."""
    return describe_suggestions(find_suggestions(model, job, gpus, hardware, fixed, chooses), job, fixed)


def describe_suggestions(found: Suggestions, job: Job, fixed: Mapping[str, Any] | None = None) -> str:
    """Return sentences: flags to add on these GPUs, and how many GPUs suffice. Flags that the job has are left out."""
    sentences = []
    if found.memory_options is not None:
        level_given = job.memory != replace(FASTEST, **dict(fixed or {}))
        hint = "" if level_given else " (--memory auto finds it)"
        flags = " ".join(flags_to_add(job.memory, found.memory_options.job.memory))
        sentences.append(f"On these GPUs {found.memory_options.mesh} fits with {flags}{hint}.")
    if found.more is not None:
        more = found.more
        options = f" with {more.job.memory.describe()}" if more.job.memory != job.memory else ""
        unchanged = "" if options else ", the job as it is"
        sentences.append(
            f"{more.mesh.gpus:,} GPUs suffice{unchanged}: {more.mesh}{options}, "
            f"{more.memory_total_bytes / GB:.1f} GB each."
        )
        if found.fewer is not None:
            sentences.append(f"So do {found.fewer.mesh.gpus:,}: {found.fewer.mesh}.")
    elif found.memory_options is not None:
        sentences.append(f"With the memory options as they are, no number of GPUs up to {found.searched:,} suffices.")
    return " ".join(sentences) or _nothing_found(found, job, fixed)


def _nothing_found(found: Suggestions, job: Job, fixed: Mapping[str, Any] | None) -> str:
    nothing = f"No memory options suffice, nor do up to {found.searched:,} GPUs"
    if not job.weight_sharding:
        return f"{nothing}: weights are whole on every GPU; FSDP would shard them."
    if found.longest is None:
        return f"{nothing}, at any context."
    held = found.longest
    disk = "" if job.memory.offload == "disk" or "offload" in (fixed or {}) else "a disk (--offload disk) or "
    return (
        f"{nothing}; the longest context that fits on these is {held.job.context:,} tokens ({held.mesh}, "
        f"{held.job.memory.describe()}); {disk}more host memory may allow more."
    )
