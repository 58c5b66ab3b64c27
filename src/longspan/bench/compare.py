"""`bench attention` and `bench step`: every method on the ranks of the job, next to formulas and predictions.

A prediction is the planner's, from the links and the speed that `bench link` measures on the method's mesh.
"""

from __future__ import annotations

import dataclasses
import gc
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from longspan.bench.config import BenchConfig
from longspan.bench.hardware import MeasuredHardware, as_toml, measure_compute, measure_hardware
from longspan.bench.measure import Measurement, measure
from longspan.bench.meters import DTYPES
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


@dataclass(frozen=True)
class Prediction:
    """The planner's prediction of one run."""

    communication: float  # seconds in which a collective is in flight
    total: float  # seconds
    peak_bytes: int | None = None  # on the rank with the highest peak; None for an attention


@dataclass(frozen=True)
class Result:
    """One candidate at one context. Bytes are by collective, on the rank that sends most."""

    candidate: Candidate
    context: int  # tokens of a sequence
    sequences: int = 1  # of all ranks
    measured: Measurement | None = None
    formula: dict[str, int] | None = None  # planned bytes of the method; None without a formula
    # Planned bytes of weights, gradients and loss
    other_formula: dict[str, int] = dataclasses.field(default_factory=dict)
    predicted: Prediction | None = None
    reason: str | None = None  # why it is not measured

    @property
    def sent(self) -> tuple[int, int]:
        """Bytes sent for the method, and for everything else (weights, gradients, loss), on the rank with most.

        The planned bytes of everything else are subtracted by collective. Without a formula of the method, what
        remains is the method's.
        """
        assert self.measured is not None
        total = sum(self.measured.sent.values())
        left = {op: count - self.other_formula.get(op, 0) for op, count in self.measured.sent.items()}
        if self.formula is None:
            method = sum(max(0, count) for count in left.values())
        else:
            method = sum(count for op, count in left.items() if op in self.formula)
        return method, total - method


@dataclass(frozen=True)
class Comparison:
    """All results, the same on every rank."""

    what: str  # "attention" or "step"
    measured: str  # date, machine and versions
    ranks: int
    shape: str  # description of the model or attention
    dtype: str
    results: tuple[Result, ...]  # in the order of contexts and methods
    # Hardware file of each mesh measured for predictions
    hardware: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def contexts(self) -> list[int]:
        return list(dict.fromkeys(result.context for result in self.results))


def compare(config: BenchConfig, ranks: int, device: torch.device, measured: str) -> Comparison:
    """Measure every method at every context. Collective over all ranks of the job."""
    candidates = select(config.methods, config.what, ranks)
    model = read_config(config)
    hardware = _measure_hardware(config, model, candidates, device) if config.predict else {}
    shardings = ShardingCache(device, config.overlap_chunks)
    read = {mesh: hardware for mesh, (_, hardware) in hardware.items()}
    results = [
        result
        for context in config.tokens
        for result in _compare_at(config, model, candidates, context, shardings, read)
    ]
    if all(result.measured is None for result in results):
        reasons = "; ".join(f"{result.candidate.name}: {result.reason}" for result in results)
        raise LongspanError(f"no method can be measured: {reasons}")
    return Comparison(
        what=config.what,
        measured=measured,
        ranks=ranks,
        shape=_describe(config, model),
        dtype=config.dtype,
        results=tuple(results),
        hardware={mesh: text for mesh, (text, _) in hardware.items()},
    )


def _measure_hardware(
    config: BenchConfig, model: dict[str, Any], candidates: tuple[Candidate, ...], device: torch.device
) -> dict[str, tuple[str, Hardware]]:
    """Return the hardware of every mesh that the planner has formulas for: its file, and the same parsed."""
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
            hardware[str(mesh)] = _parse(measure_hardware(link, device, str(mesh), text, sizes, compute))
    return hardware


def _compare_at(
    config: BenchConfig,
    model: dict[str, Any],
    candidates: tuple[Candidate, ...],
    context: int,
    shardings: ShardingCache,
    hardware: dict[str, Hardware],
) -> list[Result]:
    """Return the results of all candidates at one context."""
    workloads: dict[str, Workload] = {}
    results = {}
    shape = shape_of(config.what, model)
    for candidate in candidates:
        name, mesh, job = candidate.name, candidate.mesh, job_of(config, candidate, context)
        reason = refusal(shape, job, mesh)
        if reason is None:
            try:
                workload = workloads[name] = _make_workload(config, model, candidate, context, shardings)
            except LongspanError as error:  # the same on every rank, as it depends on sizes alone
                reason = str(error)
        if reason is not None:
            if name in config.methods or candidate.method.name in config.methods:
                raise LongspanError(f"--methods {name} at {context} tokens: {reason}")
            results[name] = Result(candidate, context, reason=reason)
            continue
        planned, known = candidate.method.planned, hardware.get(str(mesh))
        method, other = formula(config.what, shape, job, mesh)
        results[name] = Result(
            candidate,
            context,
            workload.sequences,
            # A peer's step uses longspan's FSDP and sum of the loss, but has no formula for its attention.
            formula=method if planned else None,
            other_formula=other,
            predicted=predict(config.what, shape, job, mesh, known) if planned and known else None,
        )
    for name, found in measure(workloads, config.times, shardings.device).items() if workloads else ():
        results[name] = dataclasses.replace(results[name], measured=found)
    workloads.clear()
    gc.collect()  # models have reference cycles
    return list(results.values())


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


def _parse(hardware: MeasuredHardware) -> tuple[str, Hardware]:
    """Return the hardware file, and the same as the planner reads it."""
    text = as_toml(hardware)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "link.toml")
        path.write_text(text)
        return text, read_hardware(path)


def predict(what: str, shape: ModelShape, job: Job, mesh: Mesh, hardware: Hardware) -> Prediction:
    """Return the prediction for one attention, forward and backward, or one training step."""
    if what == "step":
        plan = cost(shape, job, mesh, hardware)
        return Prediction(plan.comm_seconds, plan.step_seconds, plan.memory_total_bytes)
    layer, c = shape.layers[0], CostContext(shape, job, mesh, hardware.on_cpu)
    computing = layer_seconds(layer, c, hardware)
    in_flight = seconds_of(method_sent(layer, c), c, hardware)
    exposed = in_flight - hidden_layer_seconds(layer, computing, c, hardware)
    return Prediction(in_flight, exposed + computing.attention_forward + computing.attention_backward)
