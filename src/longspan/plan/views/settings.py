"""Data of the page's switches: the job with other checkpointing, memory options, kind of GPU and batch.

Every combination is planned at contexts and numbers of GPUs around the job's own, on all meshes without a tensor axis.
It has the memory of each mesh, and the times of the fastest that fit. `longspan.plan.views.curves.grid` has the rest of
a plan (collectives, notes), for the job as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any

from longspan.core.memory import CHECKPOINTING, FASTEST, Memory
from longspan.plan.cost.memory import ITEMS, memory
from longspan.plan.cost.offload import offload_cost, offloaded_bytes
from longspan.plan.cost.times import model_flops, optimizer_seconds, step_times
from longspan.plan.hardware import CATALOGUE, Hardware
from longspan.plan.job import AXES, Job, Mesh, RingImpl
from longspan.plan.limits import refusal, unsupported
from longspan.plan.models.shape import ModelShape
from longspan.plan.search import WORTH, fits_in_memory, meshes, planned
from longspan.plan.views.curves import contexts, gpu_counts, six
from longspan.plan.views.report import memory_flags

BEST = 4
"""Plans listed per point: the fastest that fit."""

BATCHES = 4
"""Factor of the largest batch over the job's; one sequence and the job's batch are planned too."""

CONTEXTS = 4
"""Factor by which planned contexts are longer or shorter than the job's."""

MORE_GPUS = 8
"""Factor of the most GPUs over the job's; the fewest are half of the job's."""

MOST_MESHES = 80
"""Meshes planned per context, over all numbers of GPUs and batches; those far from the job's are left out."""


@dataclass(frozen=True)
class Settings:
    """The positions of the switches.

    Attributes:
        checkpointing: of `Memory`; only the job's own without a backward.
        memory_options: by name, fields of `Memory` besides checkpointing.
        hardware: kinds of GPU, the job's first.
        batches: sequences per step.
        contexts: tokens, a subset of the grid's.
        gpus: numbers of GPUs, a subset of the grid's.
    """

    checkpointing: tuple[str, ...]
    memory_options: dict[str, dict[str, Any]]
    hardware: tuple[Hardware, ...]
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    gpus: tuple[int, ...]

    def memory(self, checkpointing: str, memory_options: str) -> Memory:
        """Return the memory options of two switches; without checkpointing nothing is offloaded."""
        found = Memory(
            **{
                **self.memory_options[memory_options],
                "checkpointing": checkpointing,
                "offload": "none",
                "offload_folder": "",
            }
        )
        wanted = {
            name: self.memory_options[memory_options].get(name, getattr(FASTEST, name))
            for name in ("offload", "offload_folder")
        }
        return found if checkpointing == "none" else replace(found, **wanted)


def settings_of(job: Job, gpus: int, hardware: Hardware) -> Settings:
    """Return the switches for a job."""
    batches = tuple(sorted({1, job.batch, BATCHES * job.batch}))
    near = tuple(n for n in contexts(job) if job.context <= CONTEXTS * n and n <= CONTEXTS * job.context)
    counts = [n for n in gpu_counts(gpus) if gpus <= 2 * n and n <= MORE_GPUS * gpus]
    counts.sort(key=lambda n: (n != gpus, max(n / gpus, gpus / n)))
    chosen, planned_for = [counts[0]], 0
    for n in counts:
        planned_for += sum(batch % mesh.data == 0 for mesh in _running(n) for batch in batches)
        if n not in chosen and planned_for <= (MOST_MESHES if gpus <= 128 else MOST_MESHES // 2):
            chosen.append(n)
    own = job.memory
    given = {f.name: getattr(own, f.name) for f in fields(Memory) if f.name != "checkpointing"}
    memory_options = _memory_options(job, hardware)
    if all(
        Memory(**{**each, "checkpointing": "full"}) != replace(own, checkpointing="full")
        for each in memory_options.values()
    ):
        memory_options = {"as given": given, **memory_options}
    return Settings(
        CHECKPOINTING if job.mode == "train" else (own.checkpointing,),
        memory_options,
        _kinds(hardware),
        batches,
        near,
        tuple(sorted(chosen)),
    )


def _memory_options(job: Job, hardware: Hardware) -> dict[str, dict[str, Any]]:
    tiled = {"tiled_mlp": 0, "tiled_norms": True, "head_chunks": 0}
    found: dict[str, dict[str, Any]] = {"none": {}, "tiles": tiled}
    if not hardware.on_cpu:  # it computes in the host's memory
        offload = {"offload": "host"} if job.mode == "train" else {}
        found["tiles, and the host's memory"] = {**tiled, **offload, "cpu_offload": job.weight_sharding}
    return found


def _kinds(own: Hardware) -> tuple[Hardware, ...]:
    """Return the job's kind and those of the catalogue; flags that change a catalogue kind apply to all."""
    if own.on_cpu:
        return (own,)
    others = [kind for name, kind in CATALOGUE.items() if name != own.name and not kind.on_cpu]
    if own.name in CATALOGUE:
        same = {name: getattr(own, name) for name in ("matmul_efficiency", "attention_efficiency", "gpus_per_node")}
        changed = {name: value for name, value in same.items() if value != getattr(CATALOGUE[own.name], name)}
        others = [replace(kind, **changed) for kind in others]
    return (own, *others)


def _running(gpus: int) -> Iterator[Mesh]:
    return (mesh for mesh in meshes(gpus) if mesh.tensor == 1)


def settings_grid(model: ModelShape, job: Job, gpus: int, hardware: Hardware) -> dict[str, Any]:
    """Return plans of every combination of settings, as plain data: sizes in bytes, times in seconds (six digits).

    Meshes and memories are indices into `meshes` and `memories`. Points are in the order checkpointing, memory options,
    batches, contexts, gpus, the last one fastest.

    - `held[point]`: [mesh, memory, mesh, memory, ...] of every mesh that can hold the job, least memory first.
    - `timed[kind][point]`: [mesh, memory, step, compute, exposed, ...] of the fastest that fit on a kind of GPU.
    - `flops[i][j]`: FLOPs that a step of `batches[i]` and `contexts[j]` needs (for MFU).
    - `flags[i][j]`: flags of `longspan plan` for `checkpointing[i]` with `memory_options[j]`; `asked`: the other flags.
    """
    chosen = settings_of(job, gpus, hardware)
    memories, mesh_indices = _Indices(), _Indices()
    held: list[list[int]] = []
    timed: list[list[list[float]]] = [[] for _ in chosen.hardware]
    for checkpointing, memory_options, batch, context, count in product(
        chosen.checkpointing, chosen.memory_options, chosen.batches, chosen.contexts, chosen.gpus
    ):
        asked = replace(job, memory=chosen.memory(checkpointing, memory_options), batch=batch, context=context)
        legal = [mesh for mesh in _running(count) if refusal(model, asked, mesh) is None]
        rows = [(mesh, _items(model, asked, mesh, hardware)) for mesh in legal]
        rows.sort(key=lambda row: sum(row[1]))
        held.append([index for mesh, items in rows for index in (mesh_indices.of(_sizes(mesh)), memories.of(items))])
        for kind, points in zip(chosen.hardware, timed, strict=True):
            best = sorted(filter(None, (_timed(model, asked, mesh, items, kind) for mesh, items in rows)), key=_order)
            points.append(
                [
                    n
                    for b in best[:BEST]
                    for n in (mesh_indices.of(_sizes(b.mesh)), memories.of(b.items), *map(six, b.times))
                ]
            )
    return {
        "checkpointing": chosen.checkpointing,
        "memory_options": list(chosen.memory_options),
        "hardware": [{"name": k.name, "memory_bytes": int(k.memory_bytes), "flops": k.flops} for k in chosen.hardware],
        "batches": chosen.batches,
        "contexts": chosen.contexts,
        "gpus": chosen.gpus,
        "own": {
            "checkpointing": chosen.checkpointing.index(job.memory.checkpointing),
            "memory_options": next(
                i
                for i, name in enumerate(chosen.memory_options)
                if chosen.memory(job.memory.checkpointing, name) == job.memory
            ),
            "hardware": 0,
            "batch": chosen.batches.index(job.batch),
        },
        "runs": not unsupported(model, job, Mesh()),
        "asked": _flags(job),
        "flags": [
            [" ".join(memory_flags(chosen.memory(each, name))) for name in chosen.memory_options]
            for each in chosen.checkpointing
        ],
        "flops": [
            [model_flops(model, replace(job, batch=batch, context=context)) for context in chosen.contexts]
            for batch in chosen.batches
        ],
        "meshes": mesh_indices.rows,
        "memories": memories.rows,
        "held": held,
        "timed": timed,
    }


def _flags(job: Job) -> str:
    """Return the flags of `longspan plan` that no switch or slider changes."""
    flags = [f"--mode {job.mode}", f"--dtype {job.dtype}", f"--optimizer {job.optimizer}"]
    named = {"layout": job.layout, "ring-impl": job.ring_impl}
    flags += [f"--{name} {value}" for name, value in named.items() if value != "auto"]
    flags += [f"--overlap-chunks {job.overlap_chunks}"] * (job.overlap_chunks > 1)
    flags += [f"--wire-dtype {job.wire_dtype}"] * (job.wire_dtype != "exact")
    switches = {"fsdp": job.weight_sharding, "tiled-loss": job.tiled_loss, "kv-replication": job.kv_replication}
    return " ".join([*flags, *(f"--no-{name}" for name, on in switches.items() if not on)])


class _Indices:
    """Distinct tuples in order of appearance, each with its index."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, ...], int] = {}

    def of(self, value: tuple[int, ...]) -> int:
        return self._found.setdefault(value, len(self._found))

    @property
    def rows(self) -> list[tuple[int, ...]]:
        return list(self._found)


def _sizes(mesh: Mesh) -> tuple[int, ...]:
    return tuple(getattr(mesh, axis) for axis in AXES)


def _items(model: ModelShape, job: Job, mesh: Mesh, hardware: Hardware) -> tuple[int, ...]:
    found = memory(model, job, mesh, hardware)
    return tuple(found[item] for item in ITEMS)


@dataclass(frozen=True)
class _Timed:
    """A mesh that fits: its memory, and the seconds of a step, of computing and of exposed communication."""

    mesh: Mesh
    items: tuple[int, ...]
    times: tuple[float, float, float]


def _order(plan: _Timed) -> tuple[float, int]:
    """Rank as `longspan.plan.search.search` does."""
    return plan.times[0], sum(plan.items)


def _timed(model: ModelShape, job: Job, mesh: Mesh, items: tuple[int, ...], hardware: Hardware) -> _Timed | None:
    """Return the result of `planned` without collectives and notes, or None if the mesh does not fit."""
    fits = sum(items) <= hardware.memory_bytes and offloaded_bytes(model, job, mesh, hardware).fits(hardware)
    impls: tuple[RingImpl, ...] = ("p2p", "allgather")
    other = [replace(job, ring_impl=impl) for impl in impls] if mesh.ring > 1 and job.ring_impl == "auto" else []
    if not fits and not other:
        return None
    if fits:
        step, *parts = _times(model, job, mesh, hardware)
        # No ring implementation saves more than the exposed communication.
        near = parts[1] > WORTH * step and any(_times(model, o, mesh, hardware)[0] < (1 - WORTH) * step for o in other)
        if not near:
            return _Timed(mesh, items, (step, parts[0], parts[1]))
    elif not any(fits_in_memory(model, each, mesh, hardware) for each in other):
        return None
    plan = planned(model, job, mesh, hardware)
    found = tuple(plan.memory_bytes[item] for item in ITEMS)
    return _Timed(mesh, found, (plan.step_seconds, plan.compute_seconds, plan.exposed_seconds))


def _times(model: ModelShape, job: Job, mesh: Mesh, hardware: Hardware) -> tuple[float, float, float]:
    """Return the seconds of a step, of computing, of exposed communication, as `longspan.plan.search.cost` does."""
    compute, exposed = step_times(model, job, mesh, hardware)
    compute += optimizer_seconds(model, job, mesh, hardware)
    return compute + exposed + offload_cost(model, job, mesh, hardware).seconds, compute, exposed
