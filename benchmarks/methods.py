"""Methods of attention, or of a training step, on the same ranks: time, bytes and memory, next to formulas.

    python -m benchmarks.methods attention --ranks 4 --contexts 2048 8192 --dtype fp32
    torchrun --nproc-per-node 8 -m benchmarks.methods step --methods tp ulysses usp --predict --trace runs/trace

Without torchrun, ranks are processes on this machine. Each method runs over all ranks of the job, in turns. A `step` is
forward, backward and AdamW. A prediction is the planner's, from links measured on the method's mesh in the same job.

Columns:
- in flight: seconds with a collective in flight, including the wait for slower ranks; exposed: those of them in which
  the rank computes nothing
- transfer, with --predict: from the last rank's call to the last rank's end; planned, planned both: the planner's
  transfer and total
- sent: bytes of the rank that sends most; formula: the planner's ("= sent" if equal); other: weights, gradients, loss
- peak: weights, optimizer state and the rise of one run
"""

from __future__ import annotations

import dataclasses
import difflib
import gc
import importlib.util
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import transformers
import tyro

from benchmarks import common
from benchmarks.peers import peer_attention, peer_step
from benchmarks.timing import reduce_times, rotate
from benchmarks.workloads import (
    AttentionInputs,
    Candidate,
    Method,
    ShardingCache,
    StepInputs,
    Workload,
    longspan_step,
    sequence_attention,
    tensor_attention,
)
from longspan.bench import BenchConfig
from longspan.bench.command import describe_run
from longspan.bench.hardware import as_toml, measure_hardware
from longspan.bench.timing import synchronize, wait_for_all
from longspan.core.errors import LongspanError
from longspan.core.formatting import seconds as time_text
from longspan.core.formatting import size
from longspan.core.parallel import ParallelConfig
from longspan.plan.cost.communication import communication, method_sent
from longspan.plan.cost.times import hidden_layer_seconds, layer_seconds, seconds_of
from longspan.plan.from_model import shape_from_config
from longspan.plan.hardware import CATALOGUE, Hardware, read_hardware
from longspan.plan.job import CostContext, Job
from longspan.plan.layers import Sent
from longspan.plan.limits import refusal
from longspan.plan.search import cost
from longspan.plan.shape import ModelShape
from longspan.tracing.record import Recorder, gather_trace
from longspan.tracing.spans import RankTrace, covered, figures, imbalance, read_trace
from tests.counting import count_sent

MAX_CONTEXT = 1 << 27
MAX_SIZES = 6
"""The most sizes at which a collective is measured for a prediction."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Comparison:
    """What to compare, on which sizes."""

    what: tyro.conf.Positional[Literal["attention", "step"]]
    """One attention, or one training step."""
    ranks: int = 2
    """Ranks to start on this machine; those of torchrun's job under torchrun."""
    methods: tuple[str, ...] = ()
    """tp, megatron-sp, fsdp (a whole sequence per rank), ulysses, ring, usp (every mesh with both axes, or one, as
    usp-2x4: ulysses x ring), usp-swapped (ring inside), ulysses-overlap (chunks of heads), ulysses-default (chunks as
    SequenceSharding chooses), fsdp-no-prefetch, ulysses-no-prefetch, deepspeed, alst,
    yunchang. Default: the first six, and the installed ones of the last three."""
    contexts: tuple[int, ...] = (2048, 8192)
    """Tokens of a sequence; each is measured."""
    model: str | None = None
    """A folder or name that transformers reads: its sizes, with random weights, replace those below."""
    heads: int = 16
    kv_heads: int = 4
    head_dim: int = 64
    ffn: int = 2816
    layers: int = 2
    vocab: int = 1024
    overlap_chunks: int = 4
    """Chunks of heads of ulysses-overlap."""
    dtype: Literal["bf16", "fp32"] = "bf16"
    rounds: int = 10
    """Timed runs of each method; the median counts."""
    predict: bool = False
    """Also measure the links of each mesh, with the sizes that the methods send, and predict by the planner."""
    trace: Path | None = None
    """Folder for each method's trace of all ranks, for ui.perfetto.dev."""
    json: Path | None = None
    """File for the results."""


def main(comparison: tyro.conf.OmitArgPrefixes[Comparison]) -> None:
    """Compare, print the tables, and write the files."""
    found = common.run_ranks(compare, comparison.ranks, comparison)
    if found is None:  # not the first rank of torchrun's job
        return
    for row in found["rows"]:
        trace = row.pop("trace", None)
        if comparison.trace is not None and trace is not None:
            comparison.trace.mkdir(parents=True, exist_ok=True)
            path = comparison.trace / f"{row['method']}-{row['context']}.trace.json"
            path.write_text(json.dumps({"traceEvents": trace}))
    print(tables(found))
    if comparison.json is not None:
        comparison.json.write_text(json.dumps(found))


# --- candidates


def _usp_meshes(ranks: int, name: str = "usp-{ulysses}x{ring}") -> dict[str, ParallelConfig]:
    """Return every mesh with both axes above 1."""
    meshes = [ParallelConfig(ulysses=size, ring=ranks // size) for size in range(2, ranks) if ranks % size == 0]
    return {name.format(ulysses=mesh.ulysses, ring=mesh.ring): mesh for mesh in meshes}


def _one_axis(axis: str, name: str = "", **settings: Any) -> Method:
    """Return a method whose mesh has all ranks on one axis."""
    name = name or axis
    return Method(name, lambda ranks: {name: ParallelConfig(**{axis: ranks})}, **settings)


_SEQUENCE: dict[str, Any] = {"attention": sequence_attention, "step": longspan_step}
_TENSOR: dict[str, Any] = {"attention": tensor_attention, "step": longspan_step}
_PEER: dict[str, Any] = {"attention": peer_attention, "step": peer_step, "planned": False}

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        _one_axis("tensor", "tp", **_TENSOR),
        _one_axis("tensor", "megatron-sp", parallel={"tensor_style": "megatron-sp"}, **_TENSOR),
        _one_axis("data", "fsdp", **_SEQUENCE),
        # Without `overlap`, all heads are sent at once, whatever `SequenceSharding` would choose.
        _one_axis("ulysses", **_SEQUENCE),
        _one_axis("ulysses", "ulysses-overlap", options={"overlap": True}, **_SEQUENCE),
        _one_axis("ulysses", "ulysses-default", options={"overlap": "auto"}, **_SEQUENCE),
        _one_axis("ring", **_SEQUENCE),
        Method("usp", _usp_meshes, **_SEQUENCE),
        _one_axis("data", "fsdp-no-prefetch", step=longspan_step, options={"prefetch": False}),
        _one_axis("ulysses", "ulysses-no-prefetch", step=longspan_step, options={"prefetch": False}),
        # The wrong placement across nodes: neighbouring ranks form rings, ranks far apart form Ulysses groups.
        Method(
            "usp-swapped",
            lambda ranks: _usp_meshes(ranks, "usp-{ulysses}x{ring}-swapped"),
            options={"swapped": True},
            planned=False,
            **_SEQUENCE,
        ),
        _one_axis("ulysses", "deepspeed", package="deepspeed", **_PEER),
        _one_axis("ulysses", "alst", package="deepspeed", **_PEER),
        Method(
            "yunchang",
            lambda ranks: {
                f"yunchang-{ranks}x1": ParallelConfig(ulysses=ranks),
                **_usp_meshes(ranks, "yunchang-{ulysses}x{ring}"),
            },
            package="yunchang",
            **_PEER,
        ),
    )
}

DEFAULT = ("tp", "megatron-sp", "fsdp", "ulysses", "ring", "usp")
"""The methods that are compared by default, together with the peers that are installed."""


def select(names: Sequence[str], what: str, ranks: int) -> tuple[Candidate, ...]:
    """Return the candidates of methods or single candidates ("usp", "usp-2x4"); by default those of `DEFAULT`."""
    every = {
        name: Candidate(name, method, mesh)
        for method in METHODS.values()
        for name, mesh in method.meshes(ranks).items()
    }
    if not names:
        peers = [m.name for m in METHODS.values() if m.package and getattr(m, what) and installed(m.package)]
        return tuple(c for name in (*DEFAULT, *peers) for c in every.values() if c.method.name == name)
    selected: list[Candidate] = []
    for name in names:
        found = [candidate for candidate in every.values() if name in (candidate.name, candidate.method.name)]
        if not found and name in METHODS:
            raise LongspanError(f"--methods {name}: {ranks} ranks have no mesh for it; give a number with two factors")
        if not found:
            close = difflib.get_close_matches(name, [*METHODS, *every], n=1, cutoff=0.5)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(METHODS)}"
            raise LongspanError(f"--methods {name} is unknown; {hint}")
        method = found[0].method
        if not getattr(method, what):
            raise LongspanError(f"--methods {name} is not measured as {what}; leave it out")
        if method.package and not installed(method.package):
            raise LongspanError(
                f"--methods {name} needs {method.package}, which is not installed (pip install --no-deps "
                f"{method.package}); install it, or leave the method out"
            )
        selected += [candidate for candidate in found if candidate not in selected]
    return tuple(selected)


def installed(package: str) -> bool:
    """Whether a package can be found, without importing it."""
    return importlib.util.find_spec(package) is not None


# --- the compared model, for transformers and for the planner


def read_config(c: Comparison) -> dict[str, Any]:
    """Return the keys of the measured model's config.json."""
    if c.model is not None:
        config = transformers.AutoConfig.from_pretrained(c.model).get_text_config()
        return {"head_dim": config.hidden_size // config.num_attention_heads, **config.to_dict()}
    return {
        "model_type": "llama", "hidden_size": c.heads * c.head_dim, "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads, "head_dim": c.head_dim, "intermediate_size": c.ffn,
        "num_hidden_layers": c.layers, "vocab_size": c.vocab, "rms_norm_eps": 1e-6,
        "max_position_embeddings": MAX_CONTEXT,
    }  # fmt: skip


def shape_of(what: str, model: dict[str, Any]) -> ModelShape:
    """Return the planner's shape; for an attention, one layer with a hidden size of heads x head_dim."""
    if what == "step":
        return shape_from_config(model, "the measured model")
    width = model["num_attention_heads"] * model["head_dim"]
    sizes = {key: model[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim")}
    more = {"intermediate_size": width, "num_hidden_layers": 1, "vocab_size": 64, "rms_norm_eps": 1e-6}
    limits = {"max_position_embeddings": MAX_CONTEXT}
    return shape_from_config({"model_type": "llama", "hidden_size": width, **sizes, **more, **limits}, "an attention")


def job_of(c: Comparison, candidate: Candidate, context: int) -> Job:
    """Return the planner's job of a candidate: one sequence per replica."""
    method = candidate.method
    chunks = c.overlap_chunks if method.options.get("overlap") is True else 1
    parallel = dataclasses.replace(candidate.mesh, overlap_chunks=chunks, **method.parallel)
    return Job(context=context, batch=parallel.data, dtype=c.dtype, parallel=parallel)


# --- measuring


def compare(c: Comparison) -> Row | None:
    """Return every method at every context, on the first rank; `trace` of a row are the events of its ranks.

    Collective over all ranks of the job.
    """
    ranks, device = dist.get_world_size(), common.device()
    for context in c.contexts:
        if context % (2 * ranks):
            raise LongspanError(
                f"--contexts {context} does not divide into two equal parts for each of {ranks} ranks (a zigzag ring "
                f"has two), so methods would not have equal work; give a multiple of {2 * ranks}"
            )
    candidates, model = select(c.methods, c.what, ranks), read_config(c)
    hardware = _measure_hardware(c, model, candidates, device) if c.predict else {}
    shardings = ShardingCache(device, c.overlap_chunks)
    parsed = {mesh: _parse(text) for mesh, text in hardware.items()}
    rows = [row for context in c.contexts for row in _compare_at(c, model, candidates, context, shardings, parsed)]
    if all("reason" in row for row in rows):
        raise LongspanError("no method can be measured: " + "; ".join(f"{r['method']}: {r['reason']}" for r in rows))
    if dist.get_rank():
        return None
    heads = f"{model['num_attention_heads']}/{model['num_key_value_heads']} heads of {model['head_dim']}"
    step = f"{model['num_hidden_layers']} layers, hidden {model['hidden_size']}, FFN {model['intermediate_size']}, "
    shape = f"causal attention, {heads}" if c.what == "attention" else f"training step, {step}{heads}"
    measured = describe_run(device, ranks)
    return {"what": c.what, "measured": measured, "shape": shape, "dtype": c.dtype, "rows": rows, "hardware": hardware}


def _compare_at(
    c: Comparison,
    model: dict[str, Any],
    candidates: tuple[Candidate, ...],
    context: int,
    shardings: ShardingCache,
    hardware: dict[str, Hardware],
) -> list[Row]:
    """Return the rows of all candidates at one context."""
    workloads: dict[str, Workload] = {}
    rows: dict[str, Row] = {}
    shape = shape_of(c.what, model)
    for candidate in candidates:
        name, mesh, job = candidate.name, candidate.mesh, job_of(c, candidate, context)
        row = rows[name] = {"method": name, "mesh": mesh.degrees, "context": context}
        reason = refusal(shape, job)
        if reason is None:
            try:
                workload = workloads[name] = _make_workload(c, model, candidate, context, shardings)
            except LongspanError as error:  # the same on every rank, as it depends on sizes alone
                reason = str(error)
        if reason is not None:
            if name in c.methods or candidate.method.name in c.methods:
                raise LongspanError(f"--methods {name} at {context} tokens: {reason}")
            row["reason"] = reason
            continue
        planned, known = candidate.method.planned, hardware.get(str(mesh))
        method, other = formula(c.what, shape, job)
        row |= {
            "sequences": workload.sequences,
            # A peer's step uses longspan's FSDP and sum of the loss, but has no formula for its attention.
            "formula_bytes": method if planned else None,
            "around_bytes": other,
            "predicted": predict(c.what, shape, job, known) if planned and known else None,
        }
    for name, found in measure(workloads, c.rounds, shardings.device).items() if workloads else ():
        rows[name] |= found
        rows[name]["method_bytes"] = _method_bytes(rows[name])
        rows[name]["other_bytes"] = sum(found["sent_bytes"].values()) - rows[name]["method_bytes"]
    workloads.clear()
    gc.collect()  # models have reference cycles
    return list(rows.values())


def _make_workload(
    c: Comparison, model: dict[str, Any], candidate: Candidate, context: int, shardings: ShardingCache
) -> Workload:
    dtype = common.DTYPES[c.dtype]
    if c.what == "step":
        assert candidate.method.step is not None
        return candidate.method.step(candidate, StepInputs(model, context, dtype, shardings))
    heads, kv_heads, head_dim = (model[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    assert candidate.method.attention is not None
    inputs = AttentionInputs(context, heads, kv_heads, head_dim, dtype, shardings)
    return candidate.method.attention(candidate, inputs)


def measure(workloads: Mapping[str, Workload], rounds: int, device: torch.device) -> dict[str, Row]:
    """Return everything measured of each workload, and its `trace`. Collective over all ranks.

    Each runs twice as a warm-up, the second time with its bytes counted. Then each runs once per round, behind a
    barrier and in rotating order, so that a disturbance touches one round of each.
    """
    sent = {}
    for name, workload in workloads.items():
        workload.run()
        with count_sent() as log:
            workload.run()
        sent[name] = common.most_sent(log)
    parts: dict[str, dict[str, list[float]]] = {
        part: {name: [] for name in workloads} for part in ("forward", "backward", "total")
    }
    for _, name in rotate(list(workloads), rounds):
        wait_for_all(device)
        start = time.perf_counter()
        out = workloads[name].forward()
        synchronize(device)
        middle = time.perf_counter()
        workloads[name].backward(out)
        synchronize(device)
        end = time.perf_counter()
        for part, seconds in (("forward", middle - start), ("backward", end - middle), ("total", end - start)):
            parts[part][name].append(seconds)
    parts = {part: reduce_times(times, dist.ReduceOp.MAX, device) for part, times in parts.items()}
    found = {}
    for name, workload in workloads.items():
        recorder = Recorder(device)
        with recorder.step(lambda: wait_for_all(device)):
            workload.run()
        trace = gather_trace(recorder.events)
        traces = read_trace(trace)
        of_ranks = [figures(of_rank) for of_rank in traces]
        found[name] = {
            "seconds": {part: _spread(times[name]) for part, times in parts.items()},
            "rounds": parts["total"][name],
            "communication_seconds": statistics.fmean(f.communication for f in of_ranks),
            "exposed_seconds": statistics.fmean(f.exposed for f in of_ranks),
            "transfer_seconds": transfer(traces),
            "imbalance": imbalance([f.computing for f in of_ranks]),
            "figures": [vars(f) for f in of_ranks],
            "sent_bytes": sent[name],
            "peak_bytes": _peak_bytes(workload, device),
            "trace": trace,
        }
    return found


def transfer(traces: Sequence[RankTrace]) -> float:
    """Return the seconds of communication without the wait for slower ranks.

    The i-th collective counts from the last rank's call to the last rank's end, as in `longspan bench`. If ranks have
    different numbers of collectives, return the mean time in flight, including waits.
    """
    sent = [trace.communication for trace in traces]
    if len({len(spans) for spans in sent}) != 1:
        return sum(map(covered, sent)) / len(sent) / 1e6
    return covered(tuple(max(ends) for ends in zip(*of_all, strict=True)) for of_all in zip(*sent, strict=True)) / 1e6


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    """Return median and quartiles over rounds."""
    values = seconds if len(seconds) > 1 else [*seconds, *seconds]
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "low": low, "high": high}


def _peak_bytes(workload: Workload, device: torch.device) -> int:
    """Return the bytes held at the peak of a run, on the rank with the highest."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        workload.run()
        synchronize(device)
        rise = torch.cuda.max_memory_allocated(device) - before
    else:
        rise = common.memory_rise(workload.run)
    peak = torch.tensor(workload.state_bytes() + rise, device=device)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    return int(peak)


# --- formulas and predictions


def _method_bytes(row: Row) -> int:
    """Return the bytes sent for the method itself, not for weights, gradients and loss, whose planned bytes are
    subtracted by collective. Without a formula of the method, what remains is the method's.
    """
    planned = row["formula_bytes"]
    left = {op: count - row["around_bytes"].get(op, 0) for op, count in row["sent_bytes"].items()}
    if planned is None:
        return sum(max(0, count) for count in left.values())
    return sum(count for op, count in left.items() if op in planned)


def _planned(what: str, shape: ModelShape, job: Job) -> Sequence[Sent]:
    """Return what an attention or a step sends by the planner's formulas."""
    c = CostContext(shape, job)
    if what == "attention":
        return method_sent(shape.layers[0], c)
    every = communication(c, CATALOGUE["cpu"])
    return [Sent(each.op, each.axis, each.what, each.bytes_per_gpu, each.count, each.method) for each in every]


def formula(what: str, shape: ModelShape, job: Job) -> tuple[dict[str, int], dict[str, int]]:
    """Return the planned bytes that a rank sends, by collective: for the method, and for everything else."""
    method, other = Counter[str](), Counter[str]()
    for sent in _planned(what, shape, job):
        (method if sent.method else other)[sent.op] += sent.bytes * sent.calls
    return dict(method), dict(other)


def _measure_hardware(
    c: Comparison, model: dict[str, Any], candidates: tuple[Candidate, ...], device: torch.device
) -> dict[str, str]:
    """Return the hardware file of every mesh that the planner has formulas for."""
    shape, hardware = shape_of(c.what, model), {}
    planned = [candidate for candidate in candidates if candidate.method.planned]
    for mesh in {str(candidate.mesh): candidate.mesh for candidate in planned}.values():
        jobs = [job_of(c, candidate, n) for candidate in planned if candidate.mesh == mesh for n in c.contexts]
        sizes = {axis: ranks for axis, (_, ranks) in CostContext(shape, jobs[0]).groups.items()}
        sent = {
            each.bytes * sizes[each.axis] // (sizes[each.axis] - 1)
            for job in jobs
            if refusal(shape, job) is None
            for each in _planned(c.what, shape, job)
            if sizes[each.axis] > 1 and each.bytes
        }
        if sent:
            few = len(sent) < 3
            measured = thin_out(sorted({*sent, 4 * max(sent), 16 * max(sent)} if few else sent))
            bench = BenchConfig(parallel=mesh, sizes=measured, rounds=max(2, c.rounds // 2), dtype=c.dtype)
            hardware[str(mesh)] = as_toml(measure_hardware(bench, device, str(mesh), f"{mesh}, in the same job"))
    return hardware


def thin_out(sizes: Sequence[int]) -> tuple[int, ...]:
    """Drop sizes within 10 % of the one before, then all but `MAX_SIZES` evenly spread ones; keep both ends."""
    thinned = list(sizes[:1])
    for each in sizes[1:]:
        if each > 1.1 * thinned[-1]:
            thinned.append(each)
    thinned[-1] = sizes[-1]
    if len(thinned) <= MAX_SIZES:
        return tuple(thinned)
    return tuple(thinned[round(i * (len(thinned) - 1) / (MAX_SIZES - 1))] for i in range(MAX_SIZES))


def _parse(text: str) -> Hardware:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "link.toml")
        path.write_text(text)
        return read_hardware(path)


def predict(what: str, shape: ModelShape, job: Job, hardware: Hardware) -> dict[str, float]:
    """Return the prediction for one attention, forward and backward, or one training step: seconds."""
    if what == "step":
        plan = cost(shape, job, hardware)
        return {"communication": plan.comm_seconds, "total": plan.step_seconds}
    layer, c = shape.layers[0], CostContext(shape, job)
    computing = layer_seconds(layer, c, hardware)
    in_flight = seconds_of(method_sent(layer, c), c, hardware)
    exposed = in_flight - hidden_layer_seconds(layer, computing, c, hardware)
    return {
        "communication": in_flight,
        "total": exposed + computing.attention_forward + computing.attention_backward,
    }


# --- tables


def by_context(data: Row) -> Iterator[tuple[int, list[Row]]]:
    """Yield each context with its rows."""
    for context in dict.fromkeys(row["context"] for row in data["rows"]):
        yield context, [row for row in data["rows"] if row["context"] == context]


def tables(data: Row) -> str:
    """Return a table for each context, the fastest per sequence first."""
    predicted = any(row.get("predicted") for row in data["rows"])
    header = ["method", "forward", "backward", "both", "spread", "in flight", "exposed"]
    header += ["transfer", "planned", "planned both"] if predicted else []
    header += ["sent", "formula", "other", "peak"]
    blocks = [f"{data['shape']}, {data['dtype']}: {data['measured']}"]
    for context, rows in by_context(data):
        timed = {row["method"]: row for row in rows if "seconds" in row}
        ordered = sorted(timed.values(), key=lambda row: row["seconds"]["total"]["median"] / row["sequences"])
        lines = [common.table(header, [_cells(row, predicted) for row in ordered]), ""]
        for row in rows:
            if "reason" in row:
                lines.append(f"- {row['method']} is not measured: {row['reason']}")
            elif row["sequences"] > 1:
                lines.append(f"- {row['method']} shards no sequence: {row['sequences']} sequences at once, one a rank")
        if "tp" in timed and "ulysses" in timed and timed["ulysses"]["method_bytes"]:
            lines.append(f"- {tp_over_ulysses(timed['tp'], timed['ulysses'])}")
        blocks.append(f"{context:,} tokens\n\n" + "\n".join(lines).rstrip())
    return "\n\n".join(blocks)


def _cells(row: Row, predicted: bool) -> list[str]:
    total, planned = row["seconds"]["total"], row["predicted"]
    cells = [time_text(row["seconds"][name]["median"]) for name in ("forward", "backward", "total")]
    cells += [f"{(total['high'] - total['low']) / total['median']:.0%}"]
    cells += [time_text(row[f"{name}_seconds"]) for name in ("communication", "exposed")]
    if predicted:
        cells += [time_text(row["transfer_seconds"])]
        cells += ["-", "-"] if planned is None else [time_text(planned[name]) for name in ("communication", "total")]
    sent, written = row["method_bytes"], "none"
    if row["formula_bytes"] is not None:
        expected = sum(row["formula_bytes"].values())
        written = "= sent" if sent == expected else f"{size(expected)} ({sent - expected:+,} B)"
    return [row["method"], *cells, size(sent), written, size(row["other_bytes"]), size(row["peak_bytes"])]


def tp_over_ulysses(tp: Row, ulysses: Row) -> str:
    """Return tensor parallelism's communication over Ulysses' at one context."""
    sent = tp["method_bytes"] / ulysses["method_bytes"]
    planned = sum(tp["formula_bytes"].values()) / sum(ulysses["formula_bytes"].values())
    seconds = tp["communication_seconds"] / max(ulysses["communication_seconds"], 1e-12)
    return (
        f"TP sends {sent:.2f} times Ulysses' bytes (formula {planned:.2f}) and communicates {seconds:.2f} times as long"
    )


if __name__ == "__main__":
    common.command(main, __doc__)
