"""`bench attention` and `bench step`: every method on the ranks of the job, next to formulas and predictions."""

from __future__ import annotations

import dataclasses
import gc
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from longspan.bench.compute import measure_compute
from longspan.bench.config import BenchConfig
from longspan.bench.measure import Measurement, measure
from longspan.bench.methods import Candidate, load_function, select
from longspan.bench.predict import Prediction, measure_hardware, message_sizes, predict
from longspan.bench.shapes import job_of, read_config, shape_of
from longspan.bench.workloads import AttentionInputs, ShardingCache, Workload
from longspan.core.errors import LongspanError
from longspan.plan.limits import refusal

if TYPE_CHECKING:
    from longspan.plan.hardware import Hardware

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Result:
    """One candidate at one context.

    Attributes:
        candidate: the method and its mesh.
        context: tokens of a sequence.
        sequences: sequences that all ranks compute together.
        measured: None if it cannot be measured.
        formula: planned bytes that the method sends, by collective, on the rank that sends most; None if it has no
            formula.
        other_formula: planned bytes of weights, gradients and loss, by collective.
        predicted: the planner's prediction from links measured on this mesh; None without `--predict`.
        reason: why it cannot be measured.
    """

    candidate: Candidate
    context: int
    sequences: int = 1
    measured: Measurement | None = None
    formula: dict[str, int] | None = None
    other_formula: dict[str, int] = dataclasses.field(default_factory=dict)
    predicted: Prediction | None = None
    reason: str | None = None


@dataclass(frozen=True)
class Comparison:
    """Everything measured; the same on every rank.

    Attributes:
        what: "attention" or "step".
        measured: date, machine and versions.
        ranks: of the job.
        shape: description of the model or attention.
        dtype: compute dtype.
        results: in the order of contexts and methods.
        hardware: hardware file of each mesh measured for predictions.
    """

    what: str
    measured: str
    ranks: int
    shape: str
    dtype: str
    results: tuple[Result, ...]
    hardware: dict[str, str] = dataclasses.field(default_factory=dict)


def compare(config: BenchConfig, ranks: int, device: torch.device, measured: str) -> Comparison:
    """Measure every method at every context. Collective over all ranks of the job.

    Raises:
        LongspanError: on every rank, for bad input or a named method that cannot be measured.
    """
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
            sizes = message_sizes(config.what, shape, possible)
            hardware[str(mesh)] = measure_hardware(config, mesh, compute, device, sizes)
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
    reasons: dict[str, str] = {}
    shape = shape_of(config.what, model)
    for candidate in candidates:
        reason = refusal(shape, job_of(config, candidate, context), candidate.mesh)
        if reason is None:
            try:
                workloads[candidate.name] = _make_workload(config, model, candidate, context, shardings)
            except LongspanError as error:  # the same on every rank, as it depends on sizes alone
                reason = str(error)
        if reason is not None:
            reasons[candidate.name] = reason
            if candidate.name in config.methods or candidate.method.name in config.methods:
                raise LongspanError(f"--methods {candidate.name} at {context} tokens: {reason}")
    measured = measure(workloads, config.times, shardings.device) if workloads else {}
    results = []
    for candidate in candidates:
        name = candidate.name
        if name in reasons:
            results.append(Result(candidate, context, reason=reasons[name]))
            continue
        method, other = formula(config, model, candidate, context)
        known = hardware.get(str(candidate.mesh)) if candidate.method.planned else None
        job = job_of(config, candidate, context)
        results.append(
            Result(
                candidate,
                context,
                workloads[name].sequences,
                measured[name],
                # A peer's step uses longspan's FSDP and sum of the loss, but has no formula for its attention.
                formula=method if candidate.method.planned else None,
                other_formula=other,
                predicted=None if known is None else predict(config.what, shape, job, candidate.mesh, known),
            )
        )
    workloads.clear()
    gc.collect()  # models have reference cycles
    return results


def _make_workload(
    config: BenchConfig, model: dict[str, Any], candidate: Candidate, context: int, shardings: ShardingCache
) -> Workload:
    dtype = _DTYPES[config.dtype]
    workload: Workload
    if config.what == "step":
        from longspan.bench.step import StepInputs

        workload = load_function(candidate.method.step)(candidate, StepInputs(model, context, dtype, shardings))
    else:
        heads, kv_heads, head_dim = (model[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        inputs = AttentionInputs(context, heads, kv_heads, head_dim, dtype, shardings)
        workload = load_function(candidate.method.attention)(candidate, inputs)
    return workload


def formula(
    config: BenchConfig, model: dict[str, Any], candidate: Candidate, context: int
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the planned bytes that a rank sends, by collective: for the method, and for everything else."""
    from longspan.plan.cost.communication import communication, method_sent
    from longspan.plan.hardware import CATALOGUE

    shape, job = shape_of(config.what, model), job_of(config, candidate, context)
    method: Counter[str] = Counter()
    other: Counter[str] = Counter()
    if config.what == "attention":
        for sent in method_sent(shape, shape.layers[0], job, candidate.mesh):
            method[sent.op] += sent.bytes * sent.calls
    else:
        for each in communication(shape, job, candidate.mesh, CATALOGUE["cpu"]):
            (method if each.method else other)[each.op] += each.bytes_total
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
