"""Memory options that fit: the fastest combination on a mesh, the longest context, and suggestions if nothing fits.

`longspan.parallelize(memory="auto")` calls `choose_memory` for each batch larger than all before, and `longspan train`
with `memory: auto` once, for the run's context (train/resolve.py): before the ranks start, and again on every rank; the
ranks compare the results. The search covers up to 48 combinations; `head_slices` is 1 or 0 (automatic). For more than
1,024 GPUs it covers eight first, and all only if none of these fits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from longspan.core.errors import LongspanError
from longspan.core.memory import CHECKPOINTING, FASTEST, Memory
from longspan.core.settings import changed
from longspan.core.validation import check_number
from longspan.plan.hardware import Hardware
from longspan.plan.job import Job
from longspan.plan.limits import GB, mesh_refusal, positions_refusal, refusal, unsupported_mesh
from longspan.plan.search import (
    MOST_GPUS,
    Plan,
    Search,
    cost,
    format_items,
    longest_context,
    on_meshes,
    search,
)
from longspan.plan.shape import ModelShape

STEP = 1024
"""The longest context is a multiple of so many tokens."""

CONTEXT_LIMIT = 1 << 32
"""Tokens at which the search for the longest context stops."""

MOST_GPUS_WITH_OPTIONS = 1 << 10
"""The most GPUs for which all combinations are tried on each mesh, and the longest context is searched."""

Fixed = Mapping[str, Any]
"""Memory options that stay as they are, by the fields of `Memory`."""

NOTHING_FIXED: Fixed = {}

_VALUES: dict[str, tuple[Any, ...]] = {
    "checkpointing": CHECKPOINTING,
    "offload": ("none", "host"),
    "tiled": (False, True),
    "head_slices": (1, 0),
    "cpu_offload": (False, True),
}


def combinations(job: Job, hardware: Hardware, fixed: Fixed = NOTHING_FIXED, *, few: bool = False) -> list[Memory]:
    """Return the combinations to try, each with the `fixed` memory options; with `few`, only eight."""
    off = {name: (getattr(FASTEST, name),) for name in _VALUES}
    without: set[str] = {"offload", "head_slices", "cpu_offload"} if few else set()
    if hardware.on_cpu:  # it computes in the host's memory
        without |= {"offload", "cpu_offload"}
    if not job.weight_sharding:  # it moves FSDP's shards
        without.add("cpu_offload")
    if job.mode != "train":  # nothing is saved for a backward
        without |= {"checkpointing", "offload", "head_slices"}
    tried = {name: off[name] if name in without else values for name, values in _VALUES.items()}
    tried |= {name: (value,) for name, value in fixed.items()}
    every = []
    for values in itertools.product(*tried.values()):
        options = dict(zip(tried, values, strict=True))
        offloads, how = options["offload"] != "none", options["checkpointing"]
        # Layers need not share a checkpoint that is offloaded, unless that is asked for.
        needless = how == "none" or (how == "grouped" and "checkpointing" not in fixed)
        if not (offloads and needless):
            every.append(Memory(**options))
    if not every:
        Memory(**fixed)  # raises for options that exclude each other
    return every


def _options_in_use(plan: Plan) -> int:
    return len(changed(plan.job.memory))


def chosen_plan(model: ModelShape, job: Job, hardware: Hardware, fixed: Fixed = NOTHING_FIXED) -> Plan:
    """Return the plan of the fastest combination that fits, with the reason as its decision.

    If nothing fits, return the plan that needs least of the GPU's memory, without a decision.
    """
    plans: list[Plan] = []
    for few in (True, False) if job.parallel.ranks > MOST_GPUS_WITH_OPTIONS else (False,):
        plans = [Plan(model, replace(job, memory=m), hardware) for m in combinations(job, hardware, fixed, few=few)]
        if any(plan.fits for plan in plans):
            break
    else:
        return min(plans, key=lambda plan: plan.memory_total_bytes)

    def order(plan: Plan) -> tuple[float, int]:
        # Of combinations with the same time, to four digits, prefer the fewest memory options.
        return float(f"{plan.step_seconds:.4g}"), _options_in_use(plan)

    bare = min(plans, key=_options_in_use)
    asked = sum(value != getattr(FASTEST, name) for name, value in fixed.items())
    nothing_faster = bare.fits and _options_in_use(bare) == asked  # no memory option shortens a step
    ordered = [bare] if nothing_faster else sorted(plans, key=order)
    at = next(at for at, plan in enumerate(ordered) if plan.fits)
    plan = ordered[at]
    why = f"memory: {plan.job.memory.describe()}; {plan.step_seconds:,.1f} s a step by this model"
    if at:
        before = ordered[at - 1]
        why += (
            f". The next faster combination does not fit ({at} of {len(ordered)} are faster): "
            f"{before.job.memory.describe()}, {before.reasons[0]}"
        )
    return replace(plan, decisions=(why,))


def search_memory_options(
    model: ModelShape, job: Job, gpus: int, hardware: Hardware, fixed: Fixed = NOTHING_FIXED
) -> Search:
    """Return `longspan.plan.search.search`, each mesh with the memory options of `chosen_plan`."""

    def plan_of(model: ModelShape, job: Job, hardware: Hardware) -> Plan:
        return chosen_plan(model, job, hardware, fixed)

    return search(model, job, gpus, hardware, plan_of)


def choose_memory(model: ModelShape, job: Job, hardware: Hardware, fixed: Fixed = NOTHING_FIXED) -> tuple[Memory, str]:
    """Return the fastest combination of memory options that fits, and a sentence: its cost, and what does not fit.

    The job's own memory options are ignored; those of `fixed` stay as they are.

    Raises:
        LongspanError: if the mesh cannot hold the job (`longspan.plan.limits.refusal`), or nothing fits: with the sum,
            item by item, of the combination that needs least, and suggestions.
    """
    # Not whether images and video fit in the context: those of several rows may be given as one row's.
    problem = positions_refusal(model, job) or mesh_refusal(model, job)
    if problem is not None:
        raise LongspanError(problem)
    plan = chosen_plan(model, job, hardware, fixed)
    if plan.fits:
        return plan.job.memory, plan.decisions[0]
    suggestions = find_suggestions(model, job, job.parallel.ranks, hardware, fixed, chooses=True)
    raise LongspanError(
        f"{job.context:,} tokens do not fit on {job.parallel} of {hardware.name} with any memory options: with "
        f"{plan.job.memory.describe()} it still {plan.short_of(0)[0]}. Item by item: "
        f"{format_items(plan.memory_bytes)}. {suggestions.describe()}",
        code="LS105",
    )


def fixed_options(model: ModelShape, options: Fixed) -> Fixed:
    """Return fixed memory options, and those that 4-bit weights exclude."""
    return {"cpu_offload": False, **options} if model.packed else options


# ---------------------------------------------------------------------------------------------------------------------
# The longest context.


def smallest_memory_candidates(job: Job, hardware: Hardware, fixed: Fixed) -> list[Memory]:
    """Return the few combinations among which is the one that needs least memory, wherever the peak is."""
    every = combinations(job, hardware, fixed)
    if job.mode != "train":
        return every
    best = {"tiled": (True,), "head_slices": (0, 1), "checkpointing": ("selective", "full", "grouped")}
    open_options = {name: values for name, values in best.items() if name not in fixed}
    return [memory for memory in every if all(getattr(memory, name) in of for name, of in open_options.items())]


def search_longest_context(
    model: ModelShape, job: Job, gpus: int, hardware: Hardware, fixed: Fixed = NOTHING_FIXED
) -> Plan | None:
    """Return the fastest plan of the longest context that fits on so many GPUs, or None.

    The context is a multiple of 1,024 tokens. Only meshes that this version runs count.

    Raises:
        LongspanError: if `gpus` is below 1 or above `MOST_GPUS_WITH_OPTIONS`.
    """
    check_number("gpus with --context max", gpus, 1, MOST_GPUS_WITH_OPTIONS, whole=True)
    options = smallest_memory_candidates(job, hardware, fixed)
    reached, fits_on = _furthest(model, _running(model, job, gpus), options, hardware)
    if not reached:
        return None
    plans = [chosen_plan(model, replace(one, context=reached), hardware, fixed) for one in fits_on]
    return min((plan for plan in plans if plan.fits), key=lambda plan: plan.step_seconds, default=None)


def longest_context_with_options(
    model: ModelShape, job: Job, hardware: Hardware, fixed: Fixed = NOTHING_FIXED
) -> int | None:
    """Return the longest context, a multiple of 1,024 tokens, that fits on a mesh with any memory options, or None."""
    options = smallest_memory_candidates(job, hardware, fixed)
    return _furthest(model, [job], options, hardware)[0] or None


def _furthest(
    model: ModelShape, candidates: list[Job], options: list[Memory], hardware: Hardware
) -> tuple[int, list[Job]]:
    """Return the longest context that fits with one of `options`, and which of the jobs, on their meshes, it fits.

    It is a multiple of 1,024 tokens, or the end of the model's positions, or 0 if none fits.
    """
    reached, fits_on = 0, list[Job]()

    def fits(job: Job, context: int) -> bool:
        job = replace(job, context=context)
        return refusal(model, job) is None and Plan(model, job, hardware).fits

    # Most sequence ranks first: these likely reach furthest, and then the others need one check each.
    for job in sorted(candidates, key=lambda job: -job.parallel.sequence_ranks):
        for memory in options:
            with_memory = replace(job, memory=memory)
            if reached and not fits(with_memory, reached + STEP):
                if job not in fits_on and fits(with_memory, reached):
                    fits_on.append(job)
                continue
            context = longest_context(model, with_memory, hardware, CONTEXT_LIMIT)
            context = context if context == model.furthest else context // STEP * STEP
            if context > reached:
                reached, fits_on = context, [job]
    return reached, fits_on


def _running(model: ModelShape, job: Job, gpus: int) -> list[Job]:
    """Return the job on the meshes that this version runs, and that can hold it at some context."""

    def holds(job: Job) -> bool:
        at_some_context = replace(job, context=max(job.context, STEP * job.parallel.sequence_ranks))
        return mesh_refusal(model, at_some_context) is None

    return [one for one in on_meshes(job, gpus) if not unsupported_mesh(model, one.parallel) and holds(one)]


# ---------------------------------------------------------------------------------------------------------------------
# Suggestions for a job that does not fit.


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
        """Return sentences: memory options that fit on these GPUs, and how many GPUs suffice."""
        job, sentences = self.job, []
        if self.memory_options is not None:
            level_given = job.memory != replace(FASTEST, **self.fixed)
            hint = "" if level_given else " (--memory auto finds it)"
            options = self.memory_options.job.memory.describe()
            sentences.append(f"On these GPUs {self.memory_options.mesh} fits with {options}{hint}.")
        if self.more is not None:
            more = self.more
            options = f" with {more.job.memory.describe()}" if more.job.memory != job.memory else ""
            unchanged = "" if options else ", the job as it is"
            sentences.append(
                f"{more.mesh.ranks:,} GPUs suffice{unchanged}: {more.mesh}{options}, "
                f"{more.memory_total_bytes / GB:.1f} GB each."
            )
            if self.fewer is not None:
                sentences.append(f"So do {self.fewer.mesh.ranks:,}: {self.fewer.mesh}.")
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
        return (
            f"{nothing}; the longest context that fits on these is {self.longest.job.context:,} tokens "
            f"({self.longest.mesh}, {self.longest.job.memory.describe()}); more host "
            f"memory may allow more."
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
        fixed_options = changed(job.memory) | dict(fixed)

    def with_chosen_options(job: Job) -> Plan | None:
        smallest = smallest_memory_candidates(job, hardware, fixed_options)
        if not any(Plan(model, replace(job, memory=memory), hardware).fits for memory in smallest):
            return None
        plan = chosen_plan(model, job, hardware, fixed_options)
        return plan if plan.fits else None

    def as_it_is(job: Job) -> Plan | None:
        return cost(model, job, hardware) if Plan(model, job, hardware).fits else None

    few = gpus <= MOST_GPUS_WITH_OPTIONS  # memory options are chosen mesh by mesh
    memory_options = _fastest(model, job, gpus, with_chosen_options) if few and not chooses else None
    limit = MOST_GPUS_WITH_OPTIONS if chooses else MOST_GPUS
    more, fewer = _on_more(model, job, gpus, hardware, with_chosen_options if chooses else as_it_is, limit)
    nothing = memory_options is None and more is None
    reached = search_longest_context(model, job, gpus, hardware, fixed_options) if few and nothing else None
    return Suggestions(job, fixed, memory_options, more, fewer, reached, max(limit, gpus))


def _fastest(model: ModelShape, job: Job, gpus: int, plan_of: Callable[[Job], Plan | None]) -> Plan | None:
    jobs = (one for one in on_meshes(job, gpus) if one.parallel.tensor == 1 and refusal(model, one) is None)
    plans = map(plan_of, jobs)
    return min((plan for plan in plans if plan is not None), key=lambda plan: plan.step_seconds, default=None)


def _on_more(
    model: ModelShape, job: Job, gpus: int, hardware: Hardware, plan_of: Callable[[Job], Plan | None], limit: int
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
