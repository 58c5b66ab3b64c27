"""Memory options for a mesh; and suggestions for a job that does not fit: other memory options, or more GPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

from longspan.core.errors import LongspanError
from longspan.core.memory import FASTEST, Memory, flags_to_add
from longspan.plan.hardware import Hardware
from longspan.plan.job import Job, Mesh
from longspan.plan.limits import GB, mesh_refusal, positions_refusal, refusal
from longspan.plan.memory_search import (
    MOST_GPUS_WITH_OPTIONS,
    NOTHING_FIXED,
    Fixed,
    chosen_plan,
    fastest_that_fits,
    least_memory,
    longest,
    smallest_memory_candidates,
)
from longspan.plan.search import MOST_GPUS, Plan, format_items, meshes, plan_mesh
from longspan.plan.shape import ModelShape


def choose_memory(
    model: ModelShape, job: Job, mesh: Mesh, hardware: Hardware, fixed: Fixed = NOTHING_FIXED
) -> tuple[Memory, str]:
    """Return the fastest combination of memory options that fits, and a sentence: its cost, and what does not fit.

    The job's own memory options are ignored; those of `fixed` stay as they are.

    Raises:
        LongspanError: if the mesh cannot hold the job (`longspan.plan.limits.refusal`), or nothing fits: with the sum,
            item by item, of the combination that needs least, and suggestions.
    """
    # Not whether images and video fit in the context: those of several rows may be given as one row's.
    problem = positions_refusal(model, job) or mesh_refusal(model, job, mesh)
    if problem is not None:
        raise LongspanError(problem)
    plan = fastest_that_fits(model, job, mesh, hardware, fixed)
    if plan is not None:
        return plan.job.memory, plan.decisions[0]
    least = least_memory(model, job, mesh, hardware, fixed)
    suggestions = find_suggestions(model, job, mesh.gpus, hardware, fixed, chooses=True)
    raise LongspanError(
        f"{job.context:,} tokens do not fit on {mesh} of {hardware.name} with any memory options: with "
        f"{least.job.memory.describe()} it still {least.short_of(0)[0]}. Item by item: "
        f"{format_items(least.memory_bytes)}. {suggestions.describe()}",
        code="LS105",
    )


def fixed_options(model: ModelShape, options: Fixed) -> Fixed:
    """Return fixed memory options, and those that 4-bit weights exclude."""
    return {"cpu_offload": False, **options} if model.packed else options


@dataclass(frozen=True)
class Suggestions:
    """Plans that fit, for a job that does not; None if none was found or looked for."""

    job: Job  # the job that does not fit
    fixed: Fixed  # memory options that stay as they are
    memory_options: Plan | None  # on the same GPUs, with other memory options
    # on more GPUs, a power of two, with the job's memory options, or with those that the planner chooses
    more: Plan | None
    fewer: Plan | None  # the same on fewer GPUs than `more`, in whole nodes
    longest: Plan | None  # without any of these, the longest context on the same GPUs
    searched: int  # the most GPUs that were looked at

    def describe(self) -> str:
        """Return sentences: flags to add to the job's on these GPUs, and how many GPUs suffice."""
        job, sentences = self.job, []
        if self.memory_options is not None:
            level_given = job.memory != replace(FASTEST, **self.fixed)
            hint = "" if level_given else " (--memory auto finds it)"
            flags = " ".join(flags_to_add(job.memory, self.memory_options.job.memory))
            sentences.append(f"On these GPUs {self.memory_options.mesh} fits with {flags}{hint}.")
        if self.more is not None:
            more = self.more
            options = f" with {more.job.memory.describe()}" if more.job.memory != job.memory else ""
            unchanged = "" if options else ", the job as it is"
            sentences.append(
                f"{more.mesh.gpus:,} GPUs suffice{unchanged}: {more.mesh}{options}, "
                f"{more.memory_total_bytes / GB:.1f} GB each."
            )
            if self.fewer is not None:
                sentences.append(f"So do {self.fewer.mesh.gpus:,}: {self.fewer.mesh}.")
        elif self.memory_options is not None:
            sentences.append(
                f"With the memory options as they are, no number of GPUs up to {self.searched:,} suffices."
            )
        return " ".join(sentences) or self._nothing_suffices()

    def _nothing_suffices(self) -> str:
        nothing = f"No memory options suffice, nor do up to {self.searched:,} GPUs"
        if not self.job.weight_sharding:
            return f"{nothing}: weights are whole on every GPU; FSDP would shard them."
        if self.longest is None:
            return f"{nothing}, at any context."
        disk = self.job.memory.offload != "disk" and "offload" not in self.fixed
        return (
            f"{nothing}; the longest context that fits on these is {self.longest.job.context:,} tokens "
            f"({self.longest.mesh}, {self.longest.job.memory.describe()}); "
            f"{'a disk (--offload disk) or ' if disk else ''}more host memory may allow more."
        )


def find_suggestions(
    model: ModelShape,
    job: Job,
    gpus: int,
    hardware: Hardware,
    fixed: Fixed = NOTHING_FIXED,
    chooses: bool = False,
) -> Suggestions:
    """Search plans for a job that does not fit on so many GPUs, on meshes without a tensor axis.

    `chooses`: whether the planner chose the memory options, and so has tried all of them on these GPUs.
    """
    fixed_options = fixed
    if not chooses:  # memory options that the job has, stay
        own = {f.name: getattr(job.memory, f.name) for f in fields(Memory)}
        fixed_options = {name: value for name, value in own.items() if value != getattr(FASTEST, name)} | dict(fixed)

    def with_chosen_options(mesh: Mesh) -> Plan | None:
        smallest = smallest_memory_candidates(job, hardware, fixed_options)
        if not any(Plan(model, replace(job, memory=memory), mesh, hardware).fits for memory in smallest):
            return None
        plan = chosen_plan(model, job, mesh, hardware, fixed_options)
        return plan if plan.fits else None

    def as_it_is(mesh: Mesh) -> Plan | None:
        return plan_mesh(model, job, mesh, hardware) if Plan(model, job, mesh, hardware).fits else None

    few = gpus <= MOST_GPUS_WITH_OPTIONS  # memory options are chosen mesh by mesh
    memory_options = _fastest(model, job, gpus, with_chosen_options) if few and not chooses else None
    limit = MOST_GPUS_WITH_OPTIONS if chooses else MOST_GPUS
    more, fewer = _on_more(model, job, gpus, hardware, with_chosen_options if chooses else as_it_is, limit)
    nothing = memory_options is None and more is None
    reached = longest(model, job, gpus, hardware, fixed_options) if few and nothing else None
    return Suggestions(job, fixed, memory_options, more, fewer, reached, max(limit, gpus))


def _fastest(model: ModelShape, job: Job, gpus: int, plan_of: Callable[[Mesh], Plan | None]) -> Plan | None:
    plans = (plan_of(m) for m in meshes(gpus) if m.tensor == 1 and refusal(model, job, m) is None)
    return min((plan for plan in plans if plan is not None), key=lambda plan: plan.step_seconds, default=None)


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
