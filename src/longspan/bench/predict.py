"""The planner's prediction for a method, from the links and the speed that `bench link` measures on its mesh."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from longspan.bench.compute import Compute, ranks_on_node
from longspan.bench.config import BenchConfig
from longspan.bench.hardware_file import MeasuredHardware, as_toml
from longspan.bench.links import MessageSizes, measure_links
from longspan.comm.mesh import init_mesh
from longspan.core.parallel import ParallelConfig
from longspan.plan.cost.communication import communication, method_sent
from longspan.plan.cost.times import exposed_layer_seconds, layer_seconds, seconds_of
from longspan.plan.hardware import CATALOGUE, Hardware, read_hardware
from longspan.plan.job import Job, Mesh
from longspan.plan.layers import Sent
from longspan.plan.models.shape import ModelShape
from longspan.plan.search import cost


@dataclass(frozen=True)
class Prediction:
    """What the planner expects of one run.

    Attributes:
        communication: seconds in which a collective is in flight.
        total: seconds of the run.
        peak_bytes: on the rank with the highest peak; None for an attention.
    """

    communication: float
    total: float
    peak_bytes: int | None = None


MAX_SIZES = 6
"""The most sizes at which a collective is measured on an axis."""


def message_sizes(what: str, shape: ModelShape, runs: Sequence[tuple[Job, Mesh]]) -> dict[tuple[str, str], list[float]]:
    """Return (axis, collective) -> bytes that a rank sends in one call of these runs, at most `MAX_SIZES` of them."""
    found: dict[tuple[str, str], set[float]] = {}
    for job, mesh in runs:
        for sent in _sent(what, shape, job, mesh):
            if mesh.size(sent.axis) > 1 and sent.bytes:
                found.setdefault((sent.axis, sent.op), set()).add(float(sent.bytes))
    return {key: _thin_out(sorted(sizes)) for key, sizes in found.items()}


def _sent(what: str, shape: ModelShape, job: Job, mesh: Mesh) -> list[Sent]:
    if what == "attention":
        return method_sent(shape, shape.layers[0], job, mesh)
    every = communication(shape, job, mesh, CATALOGUE["cpu"])
    return [Sent(each.op, each.axis, each.what, each.bytes_per_gpu, each.count, each.method) for each in every]


def _thin_out(sizes: list[float]) -> list[float]:
    """Drop sizes within 10 % of the one before, then all but `MAX_SIZES` evenly spread ones; keep both ends."""
    kept = sizes[:1]
    for size in sizes[1:]:
        if size > 1.1 * kept[-1]:
            kept.append(size)
    kept[-1] = sizes[-1]
    if len(kept) <= MAX_SIZES:
        return kept
    return [kept[round(i * (len(kept) - 1) / (MAX_SIZES - 1))] for i in range(MAX_SIZES)]


def measure_hardware(
    config: BenchConfig, mesh: Mesh, compute: Compute, device: torch.device, sizes: MessageSizes
) -> tuple[str, Hardware]:
    """Measure the links of a mesh with messages of these sizes, as their rate depends on it. Collective.

    Returns:
        The hardware file, and the same as the planner reads it.
    """
    parallel = ParallelConfig(mesh.data, mesh.ring, mesh.ulysses, mesh.tensor)
    link_config = BenchConfig("link", rounds=max(2, config.times // 2), dtype=config.dtype, parallel=parallel)
    links = measure_links(
        link_config, init_mesh(mesh.data, mesh.ring, mesh.ulysses, mesh.tensor, device_type=device.type), device, sizes
    )
    degrees = {**link_config.parallel.degrees, "fsdp": mesh.weights}
    text = as_toml(
        MeasuredHardware(
            name=str(mesh),
            dtype=config.dtype,
            measured=f"{mesh}, in the same job",
            ranks_per_node=ranks_on_node(),
            compute=compute,
            degrees={axis: degrees[axis] for axis in links},
            links=links,
            on_gpu=device.type == "cuda",
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "link.toml")
        path.write_text(text)
        return text, read_hardware(path)


def predict(what: str, shape: ModelShape, job: Job, mesh: Mesh, hardware: Hardware) -> Prediction:
    """Return the prediction for one attention, forward and backward, or one training step."""
    if what == "step":
        plan = cost(shape, job, mesh, hardware)
        return Prediction(plan.comm_seconds, plan.step_seconds, plan.memory_total_bytes)
    layer = shape.layers[0]
    computing = layer_seconds(shape, layer, job, mesh, hardware)
    attention = computing.attention_forward + computing.attention_backward
    return Prediction(
        seconds_of(method_sent(shape, layer, job, mesh), mesh, hardware),
        exposed_layer_seconds(shape, layer, computing, job, mesh, hardware) + attention,
    )
