"""What the planner says of a method on this mesh, of links and speeds that were measured on it as `bench link` does."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from longspan.bench.compute import Compute, ranks_on_node
from longspan.bench.config import BenchConfig
from longspan.bench.links import Messages, measure_links
from longspan.bench.report import Measurement, as_toml
from longspan.comm.mesh import init_mesh
from longspan.plan.cost.collective import Sent
from longspan.plan.cost.communication import communication, layer_method
from longspan.plan.cost.compute import layer_seconds
from longspan.plan.cost.times import layer_exposed, seconds_of
from longspan.plan.hardware import CATALOGUE, Hardware, read_hardware
from longspan.plan.job import Job, Mesh
from longspan.plan.models.shape import ModelShape
from longspan.plan.search import cost

if TYPE_CHECKING:
    from longspan.bench.methods import Row


@dataclass(frozen=True)
class Prediction:
    """Seconds of one run.

    Attributes:
        communication: in which a collective is in flight.
        total: of the whole.
        peak_bytes: held at once on the rank that holds most; None for an attention.
    """

    communication: float
    total: float
    peak_bytes: int | None = None


MOST_SIZES = 6
"""Sizes in which a collective is measured on an axis, at most."""


def messages(what: str, shape: ModelShape, asked: Sequence[tuple[Job, Mesh]]) -> dict[tuple[str, str], list[float]]:
    """(axis, collective) -> bytes that a rank sends in a call: those of all these jobs, thinned where they are many."""
    found: dict[tuple[str, str], set[float]] = {}
    for job, mesh in asked:
        for sent in _sent(what, shape, job, mesh):
            if mesh.size(sent.axis) > 1 and sent.bytes:
                found.setdefault((sent.axis, sent.op), set()).add(float(sent.bytes))
    return {where: _thinned(sorted(sizes)) for where, sizes in found.items()}


def _sent(what: str, shape: ModelShape, job: Job, mesh: Mesh) -> list[Sent]:
    if what == "attention":
        return layer_method(shape, shape.layers[0], job, mesh)
    every = communication(shape, job, mesh, CATALOGUE["cpu"])
    return [Sent(each.op, each.axis, each.what, each.bytes_per_gpu, each.count, each.method) for each in every]


def _thinned(sizes: list[float]) -> list[float]:
    """Without those within a tenth of the one before; of what remains the ends and what lies evenly between."""
    kept = sizes[:1]
    for size in sizes[1:]:
        if size > 1.1 * kept[-1]:
            kept.append(size)
    kept[-1] = sizes[-1]
    if len(kept) <= MOST_SIZES:
        return kept
    return [kept[round(i * (len(kept) - 1) / (MOST_SIZES - 1))] for i in range(MOST_SIZES)]


def hardware_of(
    config: BenchConfig, mesh: Mesh, compute: Compute, device: torch.device, sent: Messages
) -> tuple[str, Hardware]:
    """The hardware file of a mesh of these ranks, and what the planner reads in it. Collective.

    Its links are measured with messages of the sizes `sent`, as a link's rate depends on them.
    """
    asked = replace(
        BenchConfig("link", rounds=max(2, config.times // 2), dtype=config.dtype),
        data_degree=mesh.data, ring=mesh.ring, ulysses=mesh.ulysses, tensor=mesh.tensor,
    )  # fmt: skip
    links = measure_links(
        asked, init_mesh(mesh.data, mesh.ring, mesh.ulysses, mesh.tensor, device_type=device.type), device, sent
    )
    sizes = {**asked.degrees, "fsdp": mesh.weights}
    text = as_toml(
        Measurement(
            name=str(mesh),
            dtype=config.dtype,
            measured=f"{mesh}, in the same job",
            ranks_per_node=ranks_on_node(),
            compute=compute,
            degrees={axis: sizes[axis] for axis in links},
            links=links,
            on_gpu=device.type == "cuda",
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "link.toml")
        path.write_text(text)
        return text, read_hardware(path)


def predict(what: str, shape: ModelShape, job: Job, row: Row, hardware: Hardware) -> Prediction:
    """Of one attention, forward and backward, or one training step."""
    mesh = row.mesh
    if what == "step":
        plan = cost(shape, job, mesh, hardware)
        return Prediction(plan.comm_seconds, plan.step_seconds, plan.memory_total_bytes)
    layer = shape.layers[0]
    computing = layer_seconds(shape, layer, job, mesh, hardware)
    attention = computing.attention_forward + computing.attention_backward
    return Prediction(
        seconds_of(layer_method(shape, layer, job, mesh), mesh, hardware),
        layer_exposed(shape, layer, computing, job, mesh, hardware) + attention,
    )
