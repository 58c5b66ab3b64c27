"""`longspan plan`: reads what was asked for, searches, and shows it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from longspan.core.errors import LongspanError
from longspan.plan.config import PlanConfig
from longspan.plan.hardware import Hardware, read_hardware
from longspan.plan.methods import compare
from longspan.plan.models.read import read_model
from longspan.plan.search import search
from longspan.plan.views.report import to_dict

__all__ = ["PlanConfig", "run"]


def run(config: PlanConfig) -> int:
    """Plan, and show it.

    Returns:
        0 where something fits, 1 where nothing does.

    Raises:
        LongspanError: for an unknown model or GPU, impossible sizes, or a file that cannot be written.
    """
    config.check()
    model = read_model(config.model)
    hardware = _hardware(config)
    job = config.job()
    found = search(model, job, config.gpus, hardware)
    methods = compare(model, job, config.gpus, hardware) if config.compare else []
    report: dict[str, Any] | None = None
    if config.json or config.html:
        report = to_dict(found, model, job, config.gpus, hardware, methods)
    if config.json:
        print(json.dumps(report, indent=1))
    else:
        from longspan.plan.views.tables import show

        show(found, model, job, config.gpus, hardware, methods, config.top)
    if config.html or config.png:
        from longspan.plan.views.curves import grid

        points = grid(model, job, config.gpus, hardware)
        if config.html:
            from longspan.plan.views.page import render

            assert report is not None
            page = render(report, points)
            _write("page", config.html, lambda path: path.write_text(page, encoding="utf-8"))
        if config.png:
            from longspan.plan.views.drawing import draw

            _write("picture", config.png, lambda path: draw(points, path))
    return 0 if found.recommended is not None else 1


def _write(what: str, path: Path, write: Callable[[Path], object]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise LongspanError(f"the {what} cannot be written to {path}: {error}") from error


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
