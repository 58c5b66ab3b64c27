"""The search for memory options: the fastest combination that fits, the longest context, and each option alone.

`longspan.parallelize(memory="auto")` and `longspan train --memory auto` call `longspan.plan.suggestions.choose`. The
search covers about a hundred combinations: counts are 1 or 0 (automatic), and a disk is used only if asked for, since
writing wears it out. For more than 1,024 GPUs it covers eight.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from longspan.core.errors import LongspanError
from longspan.core.memory import CHECKPOINTING, FASTEST, LONGEST, Memory
from longspan.core.validation import check_number
from longspan.plan.cost.memory import memory as memory_items
from longspan.plan.cost.offload import offload_cost
from longspan.plan.cost.times import optimizer_seconds, step_times
from longspan.plan.job import Job, Mesh
from longspan.plan.limits import mesh_refusal, refusal, unsupported_mesh
from longspan.plan.search import (
    Plan,
    Search,
    check_values,
    cost,
    fits_in_memory,
    longest_context,
    meshes,
    planned,
    search,
)

if TYPE_CHECKING:
    from longspan.plan.hardware import Hardware
    from longspan.plan.models.shape import ModelShape

STEP = 1024
"""The longest context is a multiple of so many tokens."""

CONTEXT_LIMIT = 1 << 32
"""Tokens at which the search for the longest context stops."""

MOST_GPUS = 1 << 10
"""The most GPUs for which all combinations are tried on each mesh, and the longest context is searched."""

_LATTICE: dict[str, tuple[Any, ...]] = {
    "checkpointing": CHECKPOINTING,
    "layers_per_checkpoint": (1, 0),
    "offload": ("none", "host"),
    "tiled_mlp": (1, 0),
    "tiled_norms": (False, True),
    "head_chunks": (1, 0),
    "cpu_offload": (False, True),
}


_MANY_GPUS: dict[str, tuple[Any, ...]] = {
    "layers_per_checkpoint": (1,),
    "offload": ("none",),
    "tiled_norms": (False,),
    "head_chunks": (1,),
    "cpu_offload": (False,),
}


def lattice(
    job: Job, hardware: Hardware, fixed: Mapping[str, Any] | None = None, *, many_gpus: bool = False
) -> list[Memory]:
    """Return the combinations to try, each with the `fixed` memory options; with `many_gpus`, only eight."""
    axes = {**_LATTICE, **(_MANY_GPUS if many_gpus else {})}
    if hardware.on_cpu:  # it computes in the host's memory
        axes |= {"offload": ("none",), "cpu_offload": (False,)}
    if not job.weight_sharding:  # it moves FSDP's shards
        axes["cpu_offload"] = (False,)
    if job.mode != "train":  # nothing is saved for a backward
        axes |= {
            "checkpointing": ("none",), "layers_per_checkpoint": (1,), "offload": ("none",), "tiled_norms": (False,),
        }  # fmt: skip
    wanted = "layers_per_checkpoint" in (fixed or {})
    axes |= {name: (value,) for name, value in (fixed or {}).items()}
    found = []
    for values in itertools.product(*axes.values()):
        memory_options = dict(zip(axes, values, strict=True))
        moved, shared = memory_options["offload"] != "none", memory_options["layers_per_checkpoint"] != 1
        # Offloaded checkpoints need not be shared between layers, unless that is asked for.
        if (memory_options["checkpointing"] != "none" or not (moved or shared)) and (wanted or not (moved and shared)):
            found.append(Memory(**memory_options))
    if not found:
        Memory(**dict(fixed or {}))  # raises for options that exclude each other
    return found


def fastest_memory_options(
    model: ModelShape, job: Job, mesh: Mesh, hardware: Hardware, fixed: Mapping[str, Any] | None = None
) -> tuple[Memory, str] | None:
    """Return what `longspan.plan.suggestions.choose` returns; None if nothing fits."""
    many = mesh.gpus > MOST_GPUS
    jobs = [replace(job, memory=memory) for memory in lattice(job, hardware, fixed, many_gpus=many)]
    fitting = {each for each in jobs if fits_in_memory(model, each, mesh, hardware)}
    if not fitting:
        return None
    times: dict[Job, tuple[float, float]] = {}

    def seconds(each: Job) -> float:
        on_gpu = replace(each, memory=replace(each.memory, offload="none"))  # the time of moving it is added below
        if on_gpu not in times:
            times[on_gpu] = step_times(model, on_gpu, mesh, hardware)
        moved = offload_cost(model, each, mesh, hardware).seconds
        return sum(times[on_gpu]) + optimizer_seconds(model, each, mesh, hardware) + moved

    def order(each: Job) -> tuple[float, int]:
        # Of combinations with the same time, to four digits, prefer the fewest memory options.
        return float(f"{seconds(each):.4g}"), _options_in_use(each.memory)

    bare = min(jobs, key=lambda each: _options_in_use(each.memory))
    asked = sum(value != getattr(FASTEST, name) for name, value in (fixed or {}).items())
    # No memory option shortens a step, except head chunks, if an overlapped exchange is sent in them.
    nothing_faster = bare in fitting and _options_in_use(bare.memory) == asked and job.overlap_chunks == 1
    ordered = [bare] if nothing_faster else sorted(jobs, key=order)
    at = next(at for at, each in enumerate(ordered) if each in fitting)
    memory = ordered[at].memory
    why = f"memory: {memory.describe()}; {seconds(ordered[at]):,.1f} s a step by this model"
    if at:
        before = cost(model, ordered[at - 1], mesh, hardware)
        why += (
            f". What is faster ({at} of {len(ordered)} combinations) does not fit; the last of these, "
            f"{before.job.memory.describe()}, {before.reasons[0]}"
        )
    return memory, why


def _options_in_use(memory: Memory) -> int:
    return sum(getattr(memory, f.name) != f.default for f in fields(memory))


def least_memory(
    model: ModelShape, job: Job, mesh: Mesh, hardware: Hardware, fixed: Mapping[str, Any] | None = None
) -> Plan:
    """Return the plan that needs least of the GPU's memory, preferably one that fits in it."""
    jobs = [replace(job, memory=memory) for memory in lattice(job, hardware, fixed)]

    def short(each: Job) -> tuple[bool, int]:
        held = sum(memory_items(model, each, mesh, hardware).values())
        return held > hardware.memory_bytes, held

    return cost(model, min(jobs, key=short), mesh, hardware)


def chosen_plan(
    model: ModelShape, job: Job, mesh: Mesh, hardware: Hardware, fixed: Mapping[str, Any] | None = None
) -> Plan:
    """Return the plan with the memory options of `choose`; if nothing fits, the plan that needs least."""
    found = fastest_memory_options(model, job, mesh, hardware, fixed)
    if found is None:
        return least_memory(model, job, mesh, hardware, fixed)
    plan = planned(model, replace(job, memory=found[0]), mesh, hardware)
    return plan if found[0] == FASTEST else replace(plan, notes=(found[1], *plan.notes))


def search_memory_options(
    model: ModelShape, job: Job, gpus: int, hardware: Hardware, fixed: Mapping[str, Any] | None = None
) -> Search:
    """Return `longspan.plan.search.search`, each mesh with the memory options of `choose`."""

    def plan_of(model: ModelShape, job: Job, mesh: Mesh, hardware: Hardware) -> Plan:
        return chosen_plan(model, job, mesh, hardware, fixed)

    return search(model, job, gpus, hardware, plan_of)


# ---------------------------------------------------------------------------------------------------------------------
# The longest context.


def smallest_memory_candidates(job: Job, hardware: Hardware, fixed: Mapping[str, Any] | None) -> list[Memory]:
    """Return the combinations one of which needs least memory; which one depends on the peak."""
    every = lattice(job, hardware, fixed)
    if job.mode != "train":
        return every
    given = fixed or {}
    best = {"tiled_mlp": 0, "tiled_norms": True, "head_chunks": 0}
    wanted = {name: value for name, value in best.items() if name not in given}
    if "checkpointing" not in given:
        every = [memory for memory in every if memory.checkpointing in ("selective", "full")]
    return [memory for memory in every if all(getattr(memory, name) == value for name, value in wanted.items())]


def longest(
    model: ModelShape, job: Job, gpus: int, hardware: Hardware, fixed: Mapping[str, Any] | None = None
) -> Plan | None:
    """Return the fastest plan of the longest context that fits on so many GPUs, or None.

    The context is a multiple of 1,024 tokens. Only meshes that this version runs count.

    Raises:
        LongspanError: if `gpus` is below 1 or above `MOST_GPUS`.
    """
    check_values(model=model, job=job, hardware=hardware)
    check_number("gpus with --context max", gpus, 1, MOST_GPUS, whole=True)
    reached, fits_on = _furthest(model, job, smallest_memory_candidates(job, hardware, fixed), gpus, hardware)
    if not reached:
        return None
    plans = [chosen_plan(model, replace(job, context=reached), mesh, hardware, fixed) for mesh in fits_on]
    return min((plan for plan in plans if plan.fits), key=lambda plan: plan.step_seconds, default=None)


def _furthest(
    model: ModelShape, job: Job, memories: list[Memory], gpus: int, hardware: Hardware
) -> tuple[int, list[Mesh]]:
    """Return the longest context that fits with one of `memories`, and the meshes that it fits on.

    It is a multiple of 1,024 tokens, or 0 if none fits.
    """
    candidates = [mesh for mesh in meshes(gpus) if may_run(model, job, mesh)]
    # Most sequence ranks first: these likely reach furthest, and then the others need one check each.
    candidates.sort(key=lambda mesh: -mesh.sequence)
    reached, fits_on = 0, list[Mesh]()
    for mesh in candidates:
        for memory in memories:
            with_memory = replace(job, memory=memory)
            if reached and not _fits_at(model, with_memory, reached + STEP, mesh, hardware):
                if mesh not in fits_on and _fits_at(model, with_memory, reached, mesh, hardware):
                    fits_on.append(mesh)
                continue
            found = _round_down(model, longest_context(model, with_memory, mesh, hardware, CONTEXT_LIMIT))
            if found > reached:
                reached, fits_on = found, [mesh]
    return reached, fits_on


def longest_context_on(
    model: ModelShape, job: Job, mesh: Mesh, hardware: Hardware, fixed: Mapping[str, Any] | None = None
) -> int | None:
    """Return the longest context, a multiple of 1,024 tokens, that fits on a mesh with any memory options, or None."""
    check_values(model=model, job=job, mesh=mesh, hardware=hardware)
    found = [
        _round_down(model, longest_context(model, replace(job, memory=memory), mesh, hardware, CONTEXT_LIMIT))
        for memory in smallest_memory_candidates(job, hardware, fixed)
    ]
    return max(found, default=0) or None


def _round_down(model: ModelShape, context: int) -> int:
    """Return a multiple of `STEP`, or the end of the model's positions."""
    return context if context == model.furthest else context // STEP * STEP


def _fits_at(model: ModelShape, job: Job, context: int, mesh: Mesh, hardware: Hardware) -> bool:
    job = replace(job, context=context)
    return refusal(model, job, mesh) is None and fits_in_memory(model, job, mesh, hardware)


def may_run(model: ModelShape, job: Job, mesh: Mesh) -> bool:
    """Whether this version runs the mesh, and the mesh can hold the job at some context."""
    at_some_context = replace(job, context=max(job.context, STEP * mesh.sequence))
    return not unsupported_mesh(model, mesh) and mesh_refusal(model, at_some_context, mesh) is None


# ---------------------------------------------------------------------------------------------------------------------
# Each memory option alone.


@dataclass(frozen=True)
class MemoryRow:
    """One memory option, or several together, on a mesh.

    Attributes:
        name: of the row.
        plan: the job with it.
        saved_bytes: per GPU, against no memory options; negative if it takes more.
        max_context: the longest that fits on as many GPUs, in multiples of 1,024 tokens; 0 if none fits.
        max_mesh: a mesh that it fits on, or None.
    """

    name: str
    plan: Plan
    saved_bytes: int
    max_context: int
    max_mesh: Mesh | None


def _rows(job: Job, mesh: Mesh, hardware: Hardware) -> Iterator[tuple[str, Memory]]:
    yield "none", FASTEST
    for name in CHECKPOINTING[1:]:
        yield f"checkpointing {name}", Memory(checkpointing=name)
    if not hardware.on_cpu:
        yield "checkpointing full, offload host", Memory(checkpointing="full", offload="host")
    yield "checkpointing full, offload disk", Memory(checkpointing="full", offload="disk")
    yield "checkpointing full, a few per checkpoint", Memory(checkpointing="full", layers_per_checkpoint=0)
    yield "tiled MLP", Memory(tiled_mlp=0)
    yield "tiled norms", Memory(tiled_norms=True)
    yield "activation functions saved", Memory(recompute_mlp_act=False)
    yield "head chunks", Memory(head_chunks=0)
    moves = job.weight_sharding and not hardware.on_cpu
    if moves:
        yield "cpu offload", Memory(cpu_offload=True)
    yield "longest", LONGEST
    yield "longest, a few layers per checkpoint", replace(LONGEST, layers_per_checkpoint=0)
    if not hardware.on_cpu:
        yield "longest, offload host", replace(LONGEST, offload="host")
    if moves:
        yield "longest, offload host, cpu offload", replace(LONGEST, offload="host", cpu_offload=True)
        yield "longest, offload disk, cpu offload", replace(LONGEST, offload="disk", cpu_offload=True)


def memory_rows(model: ModelShape, job: Job, mesh: Mesh, hardware: Hardware) -> list[MemoryRow]:
    """Return a row for each memory option, for several together, and for what `longest` finds.

    A row has the bytes saved and the time on `mesh`, and the longest context on any mesh of as many GPUs.

    Raises:
        LongspanError: for another mode, or if the mesh cannot hold the job.
    """
    if job.mode != "train":
        raise LongspanError(f"--memory-options is for training, and --mode is {job.mode}; use --mode train")
    rows: list[MemoryRow] = []
    asked = [*_rows(job, mesh, hardware)]
    found = longest(model, job, mesh.gpus, hardware)
    if found is not None:
        asked.append(("the longest context of all (--context max)", found.job.memory))
    for name, memory in asked:
        plan = cost(model, replace(job, memory=memory), mesh, hardware)
        before = rows[0].plan.memory_total_bytes if rows else plan.memory_total_bytes
        reached, held_by = _furthest(model, job, [memory], mesh.gpus, hardware)
        on = mesh if mesh in held_by or not held_by else held_by[0]
        rows.append(MemoryRow(name, plan, before - plan.memory_total_bytes, reached, on if reached else None))
    return rows
