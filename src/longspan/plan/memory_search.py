"""The search for memory options: the fastest combination that fits, the longest context, and each option alone.

`longspan.parallelize(memory="auto")` and `longspan train` call `plan.suggestions.choose_memory`. The
search covers up to 160 combinations: counts are 1 or 0 (automatic), and a disk is used only if asked for, since
writing wears it out. For more than 1,024 GPUs it covers eight.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from longspan.core.errors import LongspanError
from longspan.core.memory import CHECKPOINTING, FASTEST, LONGEST, Memory
from longspan.core.validation import check_number
from longspan.plan.hardware import Hardware
from longspan.plan.job import Job, Mesh
from longspan.plan.limits import mesh_refusal, refusal, unsupported_mesh
from longspan.plan.search import Plan, Search, cost, longest_context, meshes, plan_mesh, search
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
    "layers_per_checkpoint": (1, 0),
    "offload": ("none", "host"),
    "tiled_mlp": (1, 0),
    "tiled_norms": (False, True),
    "head_chunks": (1, 0),
    "cpu_offload": (False, True),
}


def combinations(job: Job, hardware: Hardware, fixed: Fixed = NOTHING_FIXED, *, few: bool = False) -> list[Memory]:
    """Return the combinations to try, each with the `fixed` memory options; with `few`, only eight."""
    off = {name: (getattr(FASTEST, name),) for name in _VALUES}
    without: set[str] = (
        {"layers_per_checkpoint", "offload", "tiled_norms", "head_chunks", "cpu_offload"} if few else set()
    )
    if hardware.on_cpu:  # it computes in the host's memory
        without |= {"offload", "cpu_offload"}
    if not job.weight_sharding:  # it moves FSDP's shards
        without.add("cpu_offload")
    if job.mode != "train":  # nothing is saved for a backward
        without |= {"checkpointing", "layers_per_checkpoint", "offload", "tiled_norms"}
    tried = {name: off[name] if name in without else values for name, values in _VALUES.items()}
    tried |= {name: (value,) for name, value in fixed.items()}
    every = []
    for values in itertools.product(*tried.values()):
        options = dict(zip(tried, values, strict=True))
        offloads, grouped = options["offload"] != "none", options["layers_per_checkpoint"] != 1
        needs_checkpoints = options["checkpointing"] == "none" and (offloads or grouped)
        # Layers need not share a checkpoint that is offloaded, unless that is asked for.
        needless = offloads and grouped and "layers_per_checkpoint" not in fixed
        if not needs_checkpoints and not needless:
            every.append(Memory(**options))
    if not every:
        Memory(**fixed)  # raises for options that exclude each other
    return every


def fastest_that_fits(
    model: ModelShape, job: Job, mesh: Mesh, hardware: Hardware, fixed: Fixed = NOTHING_FIXED
) -> Plan | None:
    """Return the plan of the fastest combination that fits, with the reason as its decision; None if nothing fits."""
    few = mesh.gpus > MOST_GPUS_WITH_OPTIONS
    plans = _plans(model, job, mesh, hardware, combinations(job, hardware, fixed, few=few))
    if not any(plan.fits for plan in plans):
        return None

    def order(plan: Plan) -> tuple[float, int]:
        # Of combinations with the same time, to four digits, prefer the fewest memory options.
        return float(f"{plan.step_seconds:.4g}"), _options_in_use(plan)

    bare = min(plans, key=_options_in_use)
    asked = sum(value != getattr(FASTEST, name) for name, value in fixed.items())
    # No memory option shortens a step, except head chunks, if an overlapped exchange is sent in them.
    nothing_faster = bare.fits and _options_in_use(bare) == asked and job.overlap_chunks == 1
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


def _plans(model: ModelShape, job: Job, mesh: Mesh, hardware: Hardware, options: Iterable[Memory]) -> list[Plan]:
    return [Plan(model, replace(job, memory=memory), mesh, hardware) for memory in options]


def _options_in_use(plan: Plan) -> int:
    return sum(getattr(plan.job.memory, f.name) != f.default for f in fields(Memory))


def least_memory(model: ModelShape, job: Job, mesh: Mesh, hardware: Hardware, fixed: Fixed = NOTHING_FIXED) -> Plan:
    """Return the plan that needs least of the GPU's memory."""
    plans = _plans(model, job, mesh, hardware, combinations(job, hardware, fixed))
    return min(plans, key=lambda plan: plan.memory_total_bytes)


def chosen_plan(model: ModelShape, job: Job, mesh: Mesh, hardware: Hardware, fixed: Fixed = NOTHING_FIXED) -> Plan:
    """Return the plan with the memory options of `fastest_that_fits`; if nothing fits, the plan that needs least."""
    chosen = fastest_that_fits(model, job, mesh, hardware, fixed)
    if chosen is None:
        return least_memory(model, job, mesh, hardware, fixed)
    plan = plan_mesh(model, chosen.job, mesh, hardware)
    return plan if plan.job.memory == FASTEST else replace(plan, decisions=(*chosen.decisions, *plan.decisions))


def search_memory_options(
    model: ModelShape, job: Job, gpus: int, hardware: Hardware, fixed: Fixed = NOTHING_FIXED
) -> Search:
    """Return `longspan.plan.search.search`, each mesh with the memory options of `fastest_that_fits`."""

    def plan_of(model: ModelShape, job: Job, mesh: Mesh, hardware: Hardware) -> Plan:
        return chosen_plan(model, job, mesh, hardware, fixed)

    return search(model, job, gpus, hardware, plan_of)


# ---------------------------------------------------------------------------------------------------------------------
# The longest context.


def smallest_memory_candidates(job: Job, hardware: Hardware, fixed: Fixed) -> list[Memory]:
    """Return the few combinations among which is the one that needs least memory, wherever the peak is."""
    every = combinations(job, hardware, fixed)
    if job.mode != "train":
        return every
    best = {"tiled_mlp": (0,), "tiled_norms": (True,), "head_chunks": (0, 1), "checkpointing": ("selective", "full")}
    open_options = {name: values for name, values in best.items() if name not in fixed}
    return [memory for memory in every if all(getattr(memory, name) in of for name, of in open_options.items())]


def longest(model: ModelShape, job: Job, gpus: int, hardware: Hardware, fixed: Fixed = NOTHING_FIXED) -> Plan | None:
    """Return the fastest plan of the longest context that fits on so many GPUs, or None.

    The context is a multiple of 1,024 tokens. Only meshes that this version runs count.

    Raises:
        LongspanError: if `gpus` is below 1 or above `MOST_GPUS_WITH_OPTIONS`.
    """
    check_number("gpus with --context max", gpus, 1, MOST_GPUS_WITH_OPTIONS, whole=True)
    options = smallest_memory_candidates(job, hardware, fixed)
    reached, fits_on = _furthest(model, job, options, _running_meshes(model, job, gpus), hardware)
    if not reached:
        return None
    plans = [chosen_plan(model, replace(job, context=reached), mesh, hardware, fixed) for mesh in fits_on]
    return min((plan for plan in plans if plan.fits), key=lambda plan: plan.step_seconds, default=None)


def longest_context_on(
    model: ModelShape, job: Job, mesh: Mesh, hardware: Hardware, fixed: Fixed = NOTHING_FIXED
) -> int | None:
    """Return the longest context, a multiple of 1,024 tokens, that fits on a mesh with any memory options, or None."""
    options = smallest_memory_candidates(job, hardware, fixed)
    return _furthest(model, job, options, [mesh], hardware)[0] or None


def _furthest(
    model: ModelShape, job: Job, options: list[Memory], candidates: list[Mesh], hardware: Hardware
) -> tuple[int, list[Mesh]]:
    """Return the longest context that fits with one of `options`, and the meshes that it fits on.

    It is a multiple of 1,024 tokens, or the end of the model's positions, or 0 if none fits.
    """
    reached, fits_on = 0, list[Mesh]()

    def fits(job: Job, mesh: Mesh, context: int) -> bool:
        job = replace(job, context=context)
        return refusal(model, job, mesh) is None and Plan(model, job, mesh, hardware).fits

    # Most sequence ranks first: these likely reach furthest, and then the others need one check each.
    for mesh in sorted(candidates, key=lambda mesh: -mesh.sequence):
        for memory in options:
            with_memory = replace(job, memory=memory)
            if reached and not fits(with_memory, mesh, reached + STEP):
                if mesh not in fits_on and fits(with_memory, mesh, reached):
                    fits_on.append(mesh)
                continue
            context = longest_context(model, with_memory, mesh, hardware, CONTEXT_LIMIT)
            context = context if context == model.furthest else context // STEP * STEP
            if context > reached:
                reached, fits_on = context, [mesh]
    return reached, fits_on


def _running_meshes(model: ModelShape, job: Job, gpus: int) -> list[Mesh]:
    """Return the meshes that this version runs, and that can hold the job at some context."""

    def holds(mesh: Mesh) -> bool:
        at_some_context = replace(job, context=max(job.context, STEP * mesh.sequence))
        return mesh_refusal(model, at_some_context, mesh) is None

    return [mesh for mesh in meshes(gpus) if not unsupported_mesh(model, mesh) and holds(mesh)]


# ---------------------------------------------------------------------------------------------------------------------
# Each memory option alone.


@dataclass(frozen=True)
class MemoryRow:
    """One memory option, or several together, on a mesh."""

    name: str
    plan: Plan  # the job with it
    saved_bytes: int  # per GPU, against no memory options; negative if it takes more
    max_context: int  # the longest that fits on as many GPUs, in multiples of 1,024 tokens; 0 if none fits
    max_mesh: Mesh | None  # a mesh that it fits on, or None


def _named_options(job: Job, hardware: Hardware) -> dict[str, Memory]:
    full = Memory(checkpointing="full")
    named = {
        "none": FASTEST,
        **{f"checkpointing {name}": Memory(checkpointing=name) for name in CHECKPOINTING[1:]},
        "checkpointing full, offload host": replace(full, offload="host"),
        "checkpointing full, offload disk": replace(full, offload="disk"),
        "checkpointing full, a few per checkpoint": replace(full, layers_per_checkpoint=0),
        "tiled MLP": Memory(tiled_mlp=0),
        "tiled norms": Memory(tiled_norms=True),
        "activation functions saved": Memory(recompute_mlp_act=False),
        "head chunks": Memory(head_chunks=0),
        "cpu offload": Memory(cpu_offload=True),
        "longest": LONGEST,
        "longest, a few layers per checkpoint": replace(LONGEST, layers_per_checkpoint=0),
        "longest, offload host": replace(LONGEST, offload="host"),
        "longest, offload host, cpu offload": replace(LONGEST, offload="host", cpu_offload=True),
        "longest, offload disk, cpu offload": replace(LONGEST, offload="disk", cpu_offload=True),
    }
    moves_weights = job.weight_sharding and not hardware.on_cpu
    return {
        name: memory
        for name, memory in named.items()
        if (moves_weights or not memory.cpu_offload) and not (hardware.on_cpu and memory.offload == "host")
    }


def memory_rows(model: ModelShape, job: Job, mesh: Mesh, hardware: Hardware) -> list[MemoryRow]:
    """Return a row for each memory option, for several together, and for what `longest` finds.

    A row has the bytes saved and the time on `mesh`, and the longest context on any mesh of as many GPUs.

    Raises:
        LongspanError: for another mode, or if the mesh cannot hold the job.
    """
    if job.mode != "train":
        raise LongspanError(f"--memory-options is for training, and --mode is {job.mode}; use --mode train")
    asked = _named_options(job, hardware)
    best = longest(model, job, mesh.gpus, hardware)
    if best is not None:
        asked["the longest context of all (--context max)"] = best.job.memory
    candidates = _running_meshes(model, job, mesh.gpus)
    without = cost(model, replace(job, memory=FASTEST), mesh, hardware).memory_total_bytes
    rows: list[MemoryRow] = []
    for name, memory in asked.items():
        plan = cost(model, replace(job, memory=memory), mesh, hardware)
        reached, fits_on = _furthest(model, job, [memory], candidates, hardware)
        on = mesh if mesh in fits_on or not fits_on else fits_on[0]
        rows.append(MemoryRow(name, plan, without - plan.memory_total_bytes, reached, on if reached else None))
    return rows
