"""Which memory options to take: the fastest combination that fits, the longest context, and each memory option on its
own.

`longspan.parallelize(memory="auto")` and `longspan train --memory auto` ask `longspan.plan.suggestions.choose`. The
memory options
are looked for on a lattice of a hundred combinations: of a count either 1 or 0 ("as many as it takes"), and a disk only
where it is asked for, since writing wears it out. For more than 1,024 GPUs only eight combinations are tried.
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
"""The longest context is looked for in multiples of so many tokens."""

LONGEST_LOOKED_FOR = 1 << 32
"""Tokens at which the search for the longest context stops."""

MOST_GPUS = 1 << 10
"""GPUs for which all combinations are tried on each mesh, and the longest context is searched."""

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
    """Return the combinations to try, with `fixed` memory options as they are given. With `many_gpus`, only eight."""
    axes = {**_LATTICE, **(_MANY_GPUS if many_gpus else {})}
    if hardware.on_cpu:  # its ranks compute in the host's memory as it is
        axes |= {"offload": ("none",), "cpu_offload": (False,)}
    if not job.weight_sharding:  # it moves what FSDP holds
        axes["cpu_offload"] = (False,)
    if job.mode != "train":  # nothing is kept for a backward
        axes |= {
            "checkpointing": ("none",), "layers_per_checkpoint": (1,), "offload": ("none",), "tiled_norms": (False,),
        }  # fmt: skip
    wanted = "layers_per_checkpoint" in (fixed or {})
    axes |= {name: (value,) for name, value in (fixed or {}).items()}
    found = []
    for values in itertools.product(*axes.values()):
        memory_options = dict(zip(axes, values, strict=True))
        moved, shared = memory_options["offload"] != "none", memory_options["layers_per_checkpoint"] != 1
        # What lies elsewhere need not be fewer, unless that is asked for.
        if (memory_options["checkpointing"] != "none" or not (moved or shared)) and (wanted or not (moved and shared)):
            found.append(Memory(**memory_options))
    if not found:
        Memory(**dict(fixed or {}))  # it says what cannot be together
    return found


def fastest_memory_options(
    model: ModelShape, job: Job, mesh: Mesh, hardware: Hardware, fixed: Mapping[str, Any] | None = None
) -> tuple[Memory, str] | None:
    """`longspan.plan.suggestions.choose`; None where nothing fits."""
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
        # Of combinations that take the same time, to four digits, the one of fewest memory options.
        return float(f"{seconds(each):.4g}"), _memory_options(each.memory)

    bare = min(jobs, key=lambda each: _memory_options(each.memory))
    asked = sum(value != getattr(FASTEST, name) for name, value in (fixed or {}).items())
    # No memory option shortens a step, except head chunks, if an overlapped exchange is sent in them.
    nothing_faster = bare in fitting and _memory_options(bare.memory) == asked and job.overlap_chunks == 1
    ordered = [bare] if nothing_faster else sorted(jobs, key=order)
    at = next(at for at, each in enumerate(ordered) if each in fitting)
    memory = ordered[at].memory
    why = f"memory: {memory.described()}; {seconds(ordered[at]):,.1f} s a step by this model"
    if at:
        before = cost(model, ordered[at - 1], mesh, hardware)
        why += (
            f". What is faster ({at} of {len(ordered)} combinations) does not fit; the last of these, "
            f"{before.job.memory.described()}, {before.reasons[0]}"
        )
    return memory, why


def _memory_options(memory: Memory) -> int:
    return sum(getattr(memory, f.name) != f.default for f in fields(memory))


def least_memory(
    model: ModelShape, job: Job, mesh: Mesh, hardware: Hardware, fixed: Mapping[str, Any] | None = None
) -> Plan:
    """The combination that needs least of the GPU's memory."""
    jobs = [replace(job, memory=memory) for memory in lattice(job, hardware, fixed)]

    def short(each: Job) -> tuple[bool, int]:
        held = sum(memory_items(model, each, mesh, hardware).values())
        return held > hardware.memory_bytes, held

    return cost(model, min(jobs, key=short), mesh, hardware)


def chosen_plan(
    model: ModelShape, job: Job, mesh: Mesh, hardware: Hardware, fixed: Mapping[str, Any] | None = None
) -> Plan:
    """A plan with the memory options that `choose` takes; with those that need least where nothing fits."""
    found = fastest_memory_options(model, job, mesh, hardware, fixed)
    if found is None:
        return least_memory(model, job, mesh, hardware, fixed)
    plan = planned(model, replace(job, memory=found[0]), mesh, hardware)
    return plan if found[0] == FASTEST else replace(plan, notes=(found[1], *plan.notes))


def search_memory_options(
    model: ModelShape, job: Job, gpus: int, hardware: Hardware, fixed: Mapping[str, Any] | None = None
) -> Search:
    """`longspan.plan.search.search`, each mesh with the memory options that `choose` takes."""

    def plan_of(model: ModelShape, job: Job, mesh: Mesh, hardware: Hardware) -> Plan:
        return chosen_plan(model, job, mesh, hardware, fixed)

    return search(model, job, gpus, hardware, plan_of)


# ---------------------------------------------------------------------------------------------------------------------
# The longest context.


def smallest_memory_candidates(job: Job, hardware: Hardware, fixed: Mapping[str, Any] | None) -> list[Memory]:
    """Of the lattice, the combinations one of which needs least: two moments may weigh differently."""
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
    """The longest context, in multiples of 1,024 tokens, that fits on so many GPUs, on the mesh and with the memory
    options that are the fastest at it; None where none does. Of what this version runs alone, but for memory options
    that are fixed.

    Raises:
        LongspanError: if `gpus` is below 1 or above `MOST_GPUS`.
    """
    check_values(model=model, job=job, hardware=hardware)
    check_number("gpus with --context max", gpus, 1, MOST_GPUS, whole=True)
    reached, at_it = _furthest(model, job, smallest_memory_candidates(job, hardware, fixed), gpus, hardware)
    if not reached:
        return None
    plans = [chosen_plan(model, replace(job, context=reached), mesh, hardware, fixed) for mesh in at_it]
    return min((plan for plan in plans if plan.fits), key=lambda plan: plan.step_seconds, default=None)


def _furthest(
    model: ModelShape, job: Job, memories: list[Memory], gpus: int, hardware: Hardware
) -> tuple[int, list[Mesh]]:
    """Return the longest context that fits with one of `memories`, and the meshes that it fits on.

    It is a multiple of 1,024 tokens, or 0 if none fits.
    """
    candidates = [mesh for mesh in meshes(gpus) if may_run(model, job, mesh)]
    # Those that cut the sequence into most parts first: they are the likely ones, and what they reach bounds the rest.
    candidates.sort(key=lambda mesh: -mesh.sequence)
    reached, at_it = 0, list[Mesh]()
    for mesh in candidates:
        for memory in memories:
            with_it = replace(job, memory=memory)
            if reached and not _fits_at(model, with_it, reached + STEP, mesh, hardware):
                if mesh not in at_it and _fits_at(model, with_it, reached, mesh, hardware):
                    at_it.append(mesh)
                continue
            found = _whole(model, longest_context(model, with_it, mesh, hardware, LONGEST_LOOKED_FOR))
            if found > reached:
                reached, at_it = found, [mesh]
    return reached, at_it


def longest_context_on(
    model: ModelShape, job: Job, mesh: Mesh, hardware: Hardware, fixed: Mapping[str, Any] | None = None
) -> int | None:
    """The longest context, in multiples of 1,024 tokens, that fits on one mesh by any memory options; None: none
    does.
    """
    check_values(model=model, job=job, mesh=mesh, hardware=hardware)
    found = [
        _whole(model, longest_context(model, replace(job, memory=memory), mesh, hardware, LONGEST_LOOKED_FOR))
        for memory in smallest_memory_candidates(job, hardware, fixed)
    ]
    return max(found, default=0) or None


def _whole(model: ModelShape, context: int) -> int:
    """In multiples of `STEP`, but for the end of the model's positions."""
    return context if context == model.furthest else context // STEP * STEP


def _fits_at(model: ModelShape, job: Job, context: int, mesh: Mesh, hardware: Hardware) -> bool:
    job = replace(job, context=context)
    return refusal(model, job, mesh) is None and fits_in_memory(model, job, mesh, hardware)


def may_run(model: ModelShape, job: Job, mesh: Mesh) -> bool:
    """Whether this version runs the mesh, and it can hold the job at some context."""
    at_some_context = replace(job, context=max(job.context, STEP * mesh.sequence))
    return not unsupported_mesh(model, mesh) and mesh_refusal(model, at_some_context, mesh) is None


# ---------------------------------------------------------------------------------------------------------------------
# Each memory option on its own.


@dataclass(frozen=True)
class MemoryRow:
    """One memory option, or several together, on a mesh.

    Attributes:
        name: of the row.
        plan: the job with it.
        saved_bytes: less than with none, per GPU; below 0 where it takes more.
        max_context: the longest that fits on as many GPUs, in multiples of 1,024 tokens; 0 where none does.
        max_mesh: the mesh that it fits on; None if there is none.
    """

    name: str
    plan: Plan
    saved_bytes: int
    max_context: int
    max_mesh: Mesh | None


def _rows(job: Job, mesh: Mesh, hardware: Hardware) -> Iterator[tuple[str, Memory]]:
    yield "none", FASTEST
    for kept in CHECKPOINTING[1:]:
        yield f"checkpointing {kept}", Memory(checkpointing=kept)
    if not hardware.on_cpu:
        yield "checkpointing full, offload host", Memory(checkpointing="full", offload="host")
    yield "checkpointing full, offload disk", Memory(checkpointing="full", offload="disk")
    yield "checkpointing full, a few per checkpoint", Memory(checkpointing="full", layers_per_checkpoint=0)
    yield "tiled MLP", Memory(tiled_mlp=0)
    yield "tiled norms", Memory(tiled_norms=True)
    yield "activation functions kept", Memory(recompute_mlp_act=False)
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
    """Return a row for each memory option, for several together, and for what `longest` finds: bytes saved and time on
    `mesh`, and the longest context on any mesh of as many GPUs. Of training.

    Raises:
        LongspanError: for another mode, or if the mesh cannot hold the job.
    """
    if job.mode != "train":
        raise LongspanError(
            f"--memory-options is about what a backward needs, and --mode is {job.mode}; take --mode train"
        )
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
