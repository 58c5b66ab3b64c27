"""`longspan plan`: read the flags, search, show the result."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from longspan.core.errors import LongspanError
from longspan.core.memory import LONGEST
from longspan.core.rope import scaling_for
from longspan.plan.config import PlanConfig
from longspan.plan.hardware import Hardware, read_hardware
from longspan.plan.job import Job, Mesh
from longspan.plan.memory_search import STEP, MemoryRow, longest, memory_rows, search_memory_options
from longspan.plan.methods import compare
from longspan.plan.models.read import read_model
from longspan.plan.models.shape import ModelShape
from longspan.plan.search import Search, search
from longspan.plan.suggestions import Suggestions, describe_suggestions, find_suggestions, suggestion_text
from longspan.plan.views.memory_options import memory_options_dict
from longspan.plan.views.report import to_dict

__all__ = ["PlanConfig", "run"]


def run(config: PlanConfig) -> int:
    """Plan, and print the result.

    Returns:
        0 if something fits, else 1.

    Raises:
        LongspanError: for an unknown model or GPU, impossible sizes, or a file that cannot be written.
    """
    config.check()
    model = dataclasses.replace(read_model(config.model), rope=config.rope())
    hardware = _hardware(config)
    _check(config, model, hardware)
    job, found = _search(config, model, hardware)
    methods = compare(model, job, config.gpus, hardware) if config.compare else []
    suggestions = _suggestions(config, found, model, job, hardware) if found.recommended is None else None
    rows = _memory_options(found, job, hardware) if config.memory_options else []
    report: dict[str, Any] = {}
    if config.json or config.html:
        memory_options = memory_options_dict(rows, config.gpus) if rows else None
        report = to_dict(found, model, job, config.gpus, hardware, methods, memory_options, suggestions)
    if config.json:
        print(json.dumps(report, indent=1))
    else:
        from longspan.plan.views.tables import show

        text = "" if suggestions is None else describe_suggestions(suggestions, job, config.fixed())
        show(found, model, job, config.gpus, hardware, methods, config.top, rows, text)
    if config.html or config.png:
        _write_pictures(config, report, model, job, hardware)
    # To train, only a plan that `longspan train` runs counts.
    usable = found.recommended if job.mode == "train" else found.fastest
    return 0 if usable is not None else 1


def _write_pictures(
    config: PlanConfig, report: dict[str, Any], model: ModelShape, job: Job, hardware: Hardware
) -> None:
    """Write the page (`--html`) and the picture (`--png`)."""
    from longspan.plan.views.curves import grid
    from longspan.plan.views.drawing import draw
    from longspan.plan.views.page import render
    from longspan.plan.views.settings import settings_grid

    settings = settings_grid(model, job, config.gpus, hardware) if config.html else None
    more_meshes = [Mesh(*sizes) for sizes in settings["meshes"]] if settings else []
    points = grid(model, job, config.gpus, hardware, more_meshes)
    if config.html:
        page = render(report, points, settings)
        _write("page", config.html, lambda path: path.write_text(page, encoding="utf-8"), config.json)
    if config.png:
        _write("picture", config.png, lambda path: draw(points, path), config.json)


def _check(config: PlanConfig, model: ModelShape, hardware: Hardware) -> None:
    """Raise for what no mesh changes: positions that the model cannot have, memory options that the hardware lacks."""
    if config.context != "max":
        scaling_for(model.positions, model.rope, config.context, model.name)
    job = config.job()
    if hardware.on_cpu and (job.memory.cpu_offload or job.memory.offload == "host"):
        flag = "--cpu-offload" if job.memory.cpu_offload else "--offload host"
        raise LongspanError(
            f"{flag} moves data from a GPU to its host's memory, and --gpu {config.gpu} has no GPU; leave it out"
        )


def _search(config: PlanConfig, model: ModelShape, hardware: Hardware) -> tuple[Job, Search]:
    """Return the job, with the context and the memory options of the recommended plan, and what was found."""
    job, fixed = config.job(), config.fixed()
    if config.context == "max":
        if config.level == "longest":
            fixed = {**{f.name: getattr(LONGEST, f.name) for f in dataclasses.fields(LONGEST)}, **fixed}
        best = longest(model, job, config.gpus, hardware, fixed)
        if best is None:
            shortest = dataclasses.replace(job, context=STEP)
            raise LongspanError(
                f"--context max: not even {STEP:,} tokens fit on {config.gpus} x {hardware.name}. "
                f"{suggestion_text(model, shortest, config.gpus, hardware, fixed, chooses=True)}"
            )
        job = dataclasses.replace(best.job, memory=job.memory)
        found = search_memory_options(model, job, config.gpus, hardware, fixed)
    elif config.level == "auto":
        found = search_memory_options(model, job, config.gpus, hardware, fixed)
    else:
        return job, search(model, job, config.gpus, hardware)
    chosen = found.recommended or next(iter(found.plans), None)
    return (job if chosen is None else dataclasses.replace(job, memory=chosen.job.memory)), found


def _suggestions(
    config: PlanConfig, found: Search, model: ModelShape, job: Job, hardware: Hardware
) -> Suggestions | None:
    """Return suggestions, or None if memory is not the reason why nothing is recommended."""
    best = found.fastest
    if not found.plans or (best is not None and best.runs):
        return None
    return find_suggestions(model, job, config.gpus, hardware, config.fixed(), config.chooses)


def _memory_options(found: Search, job: Job, hardware: Hardware) -> list[MemoryRow]:
    """Return the rows of the recommended mesh, else of the nearest that this version runs."""
    running = [plan for plan in found.plans if plan.runs]
    plan = found.recommended or next(iter(running or found.plans), None)
    return [] if plan is None else memory_rows(plan.model, job, plan.mesh, hardware)


def _write(what: str, path: Path, write: Callable[[Path], object], quietly: bool) -> None:
    """Write a file and say so; `quietly`: on stderr, as stdout is JSON."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise LongspanError(f"the {what} cannot be written to {path}: {error}") from error
    print(f"{what} written to {path}", file=sys.stderr if quietly else sys.stdout)


def _hardware(config: PlanConfig) -> Hardware:
    hardware = read_hardware(config.gpu)
    changed: dict[str, Any] = {}
    if config.efficiency is not None:
        changed["matmul_efficiency"] = config.efficiency
    if config.attention_efficiency is not None:
        changed |= {
            "attention_efficiency": config.attention_efficiency,
            "attention_flops": None,
            "attention_forward_flops": None,
            "attention_block": 0.0,
            "attention_width": 0.0,
        }
    if config.gpus_per_node is not None:
        changed["gpus_per_node"] = config.gpus_per_node
    return dataclasses.replace(hardware, **changed)
