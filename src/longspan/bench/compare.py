"""`bench attention` and `bench step`: every method on the ranks of the job, next to formulas and predictions.

A prediction is the planner's, from the links and the speed that `bench link` measures on the method's mesh.
"""

from __future__ import annotations

import dataclasses
import gc
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from longspan.bench.command import BenchConfig
from longspan.bench.hardware import as_toml, measure_compute, measure_hardware
from longspan.bench.meters import DTYPES, measure
from longspan.bench.methods import Candidate, job_of, read_config, select, shape_of
from longspan.bench.workloads import AttentionInputs, ShardingCache, StepInputs, Workload
from longspan.core.errors import LongspanError
from longspan.core.parallel import ParallelConfig
from longspan.plan.cost.communication import communication, method_sent
from longspan.plan.cost.times import hidden_layer_seconds, layer_seconds, seconds_of
from longspan.plan.hardware import CATALOGUE, Hardware, read_hardware
from longspan.plan.job import CostContext, Job, Mesh
from longspan.plan.layers import Sent
from longspan.plan.limits import refusal
from longspan.plan.models.shape import ModelShape
from longspan.plan.search import cost


def compare(config: BenchConfig, ranks: int, device: torch.device, measured: str) -> dict[str, Any]:
    """Return every method at every context, in the schema of `--json` (docs/reference/json.md), and each row's `trace`.

    The same on every rank. Collective over all ranks of the job.
    """
    candidates = select(config.methods, config.what, ranks)
    model = read_config(config)
    hardware = _measure_hardware(config, model, candidates, device) if config.predict else {}
    shardings = ShardingCache(device, config.overlap_chunks)
    parsed = {mesh: _parse(text) for mesh, text in hardware.items()}
    rows = [
        row for context in config.tokens for row in _compare_at(config, model, candidates, context, shardings, parsed)
    ]
    if all("reason" in row for row in rows):
        reasons = "; ".join(f"{row['method']}: {row['reason']}" for row in rows)
        raise LongspanError(f"no method can be measured: {reasons}")
    return {
        "what": config.what,
        "measured": measured,
        "ranks": ranks,
        "shape": _describe(config, model),
        "dtype": config.dtype,
        "rows": rows,
        "hardware": hardware,
    }


def _measure_hardware(
    config: BenchConfig, model: dict[str, Any], candidates: tuple[Candidate, ...], device: torch.device
) -> dict[str, str]:
    """Return the hardware file of every mesh that the planner has formulas for."""
    compute, shape = measure_compute(config, device), shape_of(config.what, model)
    hardware = {}
    planned = [candidate for candidate in candidates if candidate.method.planned]
    for mesh in {str(candidate.mesh): candidate.mesh for candidate in planned}.values():
        jobs = [job_of(config, c, context) for c in planned if c.mesh == mesh for context in config.tokens]
        possible = [(job, mesh) for job in jobs if refusal(shape, job, mesh) is None]
        if possible:
            parallel = ParallelConfig(mesh.data, mesh.ring, mesh.ulysses, mesh.tensor)
            link = BenchConfig("link", rounds=max(2, config.times // 2), dtype=config.dtype, parallel=parallel)
            sizes = message_sizes(config.what, shape, possible)  # the rate of a link depends on them
            text = f"{mesh}, in the same job"
            hardware[str(mesh)] = as_toml(measure_hardware(link, device, str(mesh), text, sizes, compute))
    return hardware


def _compare_at(
    config: BenchConfig,
    model: dict[str, Any],
    candidates: tuple[Candidate, ...],
    context: int,
    shardings: ShardingCache,
    hardware: dict[str, Hardware],
) -> list[dict[str, Any]]:
    """Return the rows of all candidates at one context."""
    workloads: dict[str, Workload] = {}
    rows: dict[str, dict[str, Any]] = {}
    shape = shape_of(config.what, model)
    for candidate in candidates:
        name, mesh, job = candidate.name, candidate.mesh, job_of(config, candidate, context)
        row = rows[name] = {"method": name, "mesh": dataclasses.asdict(mesh), "context": context}
        reason = refusal(shape, job, mesh)
        if reason is None:
            try:
                workload = workloads[name] = _make_workload(config, model, candidate, context, shardings)
            except LongspanError as error:  # the same on every rank, as it depends on sizes alone
                reason = str(error)
        if reason is not None:
            if name in config.methods or candidate.method.name in config.methods:
                raise LongspanError(f"--methods {name} at {context} tokens: {reason}")
            row["reason"] = reason
            continue
        planned, known = candidate.method.planned, hardware.get(str(mesh))
        method, other = formula(config.what, shape, job, mesh)
        row |= {
            "sequences": workload.sequences,
            # A peer's step uses longspan's FSDP and sum of the loss, but has no formula for its attention.
            "formula_bytes": method if planned else None,
            "around_bytes": other,
            "predicted": predict(config.what, shape, job, mesh, known) if planned and known else None,
        }
    for name, found in measure(workloads, config.times, shardings.device).items() if workloads else ():
        rows[name] |= found
        rows[name]["method_bytes"] = _method_bytes(rows[name])
        rows[name]["other_bytes"] = sum(found["sent_bytes"].values()) - rows[name]["method_bytes"]
    workloads.clear()
    gc.collect()  # models have reference cycles
    return list(rows.values())


def _method_bytes(row: dict[str, Any]) -> int:
    """Return the bytes sent for the method itself, not for weights, gradients and loss, whose planned bytes are
    subtracted by collective. Without a formula of the method, what remains is the method's.
    """
    planned = row["formula_bytes"]
    left = {op: count - row["around_bytes"].get(op, 0) for op, count in row["sent_bytes"].items()}
    if planned is None:
        return sum(max(0, count) for count in left.values())
    return sum(count for op, count in left.items() if op in planned)


def _make_workload(
    config: BenchConfig, model: dict[str, Any], candidate: Candidate, context: int, shardings: ShardingCache
) -> Workload:
    dtype = DTYPES[config.dtype]
    if config.what == "step":
        assert candidate.method.step is not None
        return candidate.method.step(candidate, StepInputs(model, context, dtype, shardings))
    heads, kv_heads, head_dim = (model[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    assert candidate.method.attention is not None
    inputs = AttentionInputs(context, heads, kv_heads, head_dim, dtype, shardings)
    return candidate.method.attention(candidate, inputs)


def _planned(what: str, shape: ModelShape, job: Job, mesh: Mesh) -> Sequence[Sent]:
    """Return what an attention or a step sends by the planner's formulas."""
    c = CostContext(shape, job, mesh, on_cpu=True)
    if what == "attention":
        return method_sent(shape.layers[0], c)
    every = communication(c, CATALOGUE["cpu"])
    return [Sent(each.op, each.axis, each.what, each.bytes_per_gpu, each.count, each.method) for each in every]


def formula(what: str, shape: ModelShape, job: Job, mesh: Mesh) -> tuple[dict[str, int], dict[str, int]]:
    """Return the planned bytes that a rank sends, by collective: for the method, and for everything else."""
    method, other = Counter[str](), Counter[str]()
    for sent in _planned(what, shape, job, mesh):
        (method if sent.method else other)[sent.op] += sent.bytes * sent.calls
    return dict(method), dict(other)


def _describe(config: BenchConfig, model: dict[str, Any]) -> str:
    heads = f"{model['num_attention_heads']}/{model['num_key_value_heads']} heads of {model['head_dim']}"
    name = f"{config.model}, " if config.model else ""
    if config.what == "attention":
        return f"causal attention, {name}{heads}"
    return (
        f"training step, {name}{model['num_hidden_layers']} layers, hidden {model['hidden_size']}, {heads}, "
        f"FFN {model['intermediate_size']}, vocabulary {model['vocab_size']:,}"
    )


# --- predictions

MAX_SIZES = 6
"""The most sizes at which a collective is measured on an axis."""


def message_sizes(what: str, shape: ModelShape, runs: Sequence[tuple[Job, Mesh]]) -> dict[tuple[str, str], list[float]]:
    """Return (axis, collective) -> bytes that a rank sends in one call of these runs, at most `MAX_SIZES` of them."""
    found: dict[tuple[str, str], set[float]] = {}
    for job, mesh in runs:
        for sent in _planned(what, shape, job, mesh):
            if mesh.size(sent.axis) > 1 and sent.bytes:
                found.setdefault((sent.axis, sent.op), set()).add(float(sent.bytes))
    return {key: _thin_out(sorted(sizes)) for key, sizes in found.items()}


def _thin_out(sizes: list[float]) -> list[float]:
    """Drop sizes within 10 % of the one before, then all but `MAX_SIZES` evenly spread ones; keep both ends."""
    thinned = sizes[:1]
    for size in sizes[1:]:
        if size > 1.1 * thinned[-1]:
            thinned.append(size)
    thinned[-1] = sizes[-1]
    if len(thinned) <= MAX_SIZES:
        return thinned
    return [thinned[round(i * (len(thinned) - 1) / (MAX_SIZES - 1))] for i in range(MAX_SIZES)]


def _parse(text: str) -> Hardware:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "link.toml")
        path.write_text(text)
        return read_hardware(path)


def predict(what: str, shape: ModelShape, job: Job, mesh: Mesh, hardware: Hardware) -> dict[str, Any]:
    """Return the prediction for one attention, forward and backward, or one training step: seconds and peak bytes."""
    if what == "step":
        plan = cost(shape, job, mesh, hardware)
        return {
            "communication": plan.comm_seconds,
            "total": plan.step_seconds,
            "peak_bytes": plan.memory_total_bytes,
        }
    layer, c = shape.layers[0], CostContext(shape, job, mesh, hardware.on_cpu)
    computing = layer_seconds(layer, c, hardware)
    in_flight = seconds_of(method_sent(layer, c), c, hardware)
    exposed = in_flight - hidden_layer_seconds(layer, computing, c, hardware)
    total = exposed + computing.attention_forward + computing.attention_backward
    return {"communication": in_flight, "total": total, "peak_bytes": None}
