"""`bench attention` and `bench step`: every method on the ranks of the job, beside formulas and predictions."""

from __future__ import annotations

import dataclasses
import gc
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from longspan.bench.compute import measure_compute
from longspan.bench.config import BenchConfig
from longspan.bench.measure import Measured, measure
from longspan.bench.methods import Row, builder, chosen
from longspan.bench.predict import Prediction, hardware_of, messages, predict
from longspan.bench.shapes import job_of, read_config, shape_of
from longspan.bench.workloads import Case, Shardings, Work
from longspan.core.errors import LongspanError
from longspan.plan.limits import refusal

if TYPE_CHECKING:
    from longspan.plan.hardware import Hardware

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Entry:
    """One method at one context.

    Attributes:
        row: the method and its mesh.
        context: tokens of a sequence.
        sequences: of them that all ranks together handle.
        measured: what was measured; None where it cannot be.
        formula: bytes that the planner says the rank that sends most sends for the method, by collective; None where it
            has no formula.
        around: the same for weights, gradients and loss.
        predicted: what the planner says of the time, of links measured on this mesh; None where it was not asked.
        reason: why it cannot be measured.
    """

    row: Row
    context: int
    sequences: int = 1
    measured: Measured | None = None
    formula: dict[str, int] | None = None
    around: dict[str, int] = dataclasses.field(default_factory=dict)
    predicted: Prediction | None = None
    reason: str | None = None


@dataclass(frozen=True)
class Comparison:
    """All that was measured; the same on every rank.

    Attributes:
        what: "attention" or "step".
        measured: when, where and by what.
        ranks: of the job.
        shape: what was measured, in words.
        dtype: what was computed in.
        entries: in the order of contexts and methods.
        hardware: of each mesh that was measured for predictions, its hardware file.
    """

    what: str
    measured: str
    ranks: int
    shape: str
    dtype: str
    entries: tuple[Entry, ...]
    hardware: dict[str, str] = dataclasses.field(default_factory=dict)


def compare(config: BenchConfig, ranks: int, device: torch.device, measured: str) -> Comparison:
    """Measure every method at every context. Collective over all ranks of the job.

    Raises:
        LongspanError: on bad input, on every rank alike; for a method that was named and cannot be measured.
    """
    rows = chosen(config.methods, config.what, ranks)
    model = read_config(config)
    hardware: dict[str, tuple[str, Hardware]] = {}
    if config.predict:
        compute = measure_compute(config, device)
        shape = shape_of(config.what, model)
        for mesh in {str(row.mesh): row.mesh for row in rows if row.kind.planned}.values():
            of_mesh = [row for row in rows if row.kind.planned and row.mesh == mesh]
            jobs = [(job_of(config, row, context), mesh) for row in of_mesh for context in config.tokens]
            possible = [(job, on) for job, on in jobs if refusal(shape, job, on) is None]
            if possible:
                sent = messages(config.what, shape, possible)
                hardware[str(mesh)] = hardware_of(config, mesh, compute, device, sent)
    entries: list[Entry] = []
    shardings = Shardings(device, config.overlap_chunks)
    for context in config.tokens:
        entries += _at(config, model, rows, context, shardings, {mesh: read for mesh, (_, read) in hardware.items()})
    if all(entry.measured is None for entry in entries):
        raise LongspanError(f"no method can be measured: {'; '.join(f'{e.row.name}: {e.reason}' for e in entries)}")
    return Comparison(
        what=config.what,
        measured=measured,
        ranks=ranks,
        shape=_spell(config, model),
        dtype=config.dtype,
        entries=tuple(entries),
        hardware={mesh: text for mesh, (text, _) in hardware.items()},
    )


def _at(
    config: BenchConfig,
    model: dict[str, Any],
    rows: tuple[Row, ...],
    context: int,
    shardings: Shardings,
    hardware: dict[str, Hardware],
) -> list[Entry]:
    works: dict[str, Work] = {}
    reasons: dict[str, str] = {}
    shape = shape_of(config.what, model)
    for row in rows:
        reason = refusal(shape, job_of(config, row, context), row.mesh)
        if reason is None:
            try:
                works[row.name] = _work(config, model, row, context, shardings)
            except LongspanError as error:  # alike on every rank: of sizes alone
                reason = str(error)
        if reason is not None:
            reasons[row.name] = reason
            if row.name in config.methods or row.kind.name in config.methods:
                raise LongspanError(f"--methods {row.name} at {context} tokens: {reason}")
    found = measure(works, config.times, shardings.device) if works else {}
    entries = []
    for row in rows:
        if row.name in reasons:
            entries.append(Entry(row, context, reason=reasons[row.name]))
            continue
        method: dict[str, int] | None
        method, around = formula(config, model, row, context)
        if not row.kind.planned:  # a peer's step has longspan's FSDP and a sum of the loss around its attention
            method = None
        known = hardware.get(str(row.mesh)) if row.kind.planned else None
        predicted = None if known is None else predict(config.what, shape, job_of(config, row, context), row, known)
        entries.append(Entry(row, context, works[row.name].sequences, found[row.name], method, around, predicted))
    works.clear()
    gc.collect()
    return entries


def _work(config: BenchConfig, model: dict[str, Any], row: Row, context: int, shardings: Shardings) -> Work:
    dtype = _DTYPES[config.dtype]
    if config.what == "step":
        from longspan.bench.step import StepCase

        made: Work = builder(row.kind.step)(row, StepCase(model, context, dtype, shardings))
        return made
    heads, kv_heads, head_dim = (model[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    case = Case(context, heads, kv_heads, head_dim, dtype, shardings)
    made = builder(row.kind.attention)(row, case)
    return made


def formula(
    config: BenchConfig, model: dict[str, Any], row: Row, context: int
) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes that the planner says one rank sends, by collective: for the method, and around it."""
    from longspan.plan.cost.communication import communication, layer_method
    from longspan.plan.hardware import CATALOGUE

    shape, job = shape_of(config.what, model), job_of(config, row, context)
    method: Counter[str] = Counter()
    around: Counter[str] = Counter()
    if config.what == "attention":
        for sent in layer_method(shape, shape.layers[0], job, row.mesh):
            method[sent.op] += sent.bytes * sent.calls
        return dict(method), {}
    for each in communication(shape, job, row.mesh, CATALOGUE["cpu"]):
        (method if each.method else around)[each.op] += each.bytes_total
    if row.mesh.tensor > 1:  # a plain step, which does around its layers as it likes
        from longspan.bench.step import around_split

        around = Counter(around_split(shape, context, row, job.bytes_per_element))
    return dict(method), dict(around)


def _spell(config: BenchConfig, model: dict[str, Any]) -> str:
    heads = f"{model['num_attention_heads']}/{model['num_key_value_heads']} heads of {model['head_dim']}"
    name = f"{config.model}, " if config.model else ""
    if config.what == "attention":
        return f"causal attention, {name}{heads}"
    return (
        f"training step, {name}{model['num_hidden_layers']} layers, hidden {model['hidden_size']}, {heads}, "
        f"FFN {model['intermediate_size']}, vocabulary {model['vocab_size']:,}"
    )
