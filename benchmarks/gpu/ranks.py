"""Several GPUs of one machine: `longspan verify` of the mesh, its links, and steps that others publish, each beside
its plan and, where DeepSpeed is installed, beside ALST's attention in the same step.

Every row starts its own ranks, as the library does (`longspan.ranks.launch`), so one that runs out of memory or hangs
does not affect the others.
"""

from __future__ import annotations

import copy
import functools
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import longspan
from benchmarks import common, peers
from benchmarks.gpu.setup import MEASURED, OK, WRONG, Numbers, Row, Setup, beside, brief
from benchmarks.gpu.steps import (
    FULL,
    Step,
    device_hardware,
    fill,
    generation,
    measure,
    numbers_of,
    require_fit,
    trained,
)
from benchmarks.methods import METHODS, installed
from benchmarks.workloads import Candidate, ShardingCache, StepInputs
from longspan.bench.command import BenchConfig
from longspan.bench.links import measure_links
from longspan.core.memory import LONGEST, Memory
from longspan.core.parallel import Axes, ParallelConfig
from longspan.hf.weights.sources import Files, materialize, to_meta
from longspan.plan import longest_context
from longspan.plan.names import find_config
from longspan.plan.search import bisect_largest
from longspan.plan.shape import Tuning
from longspan.ranks import launch
from longspan.verify import VerifyConfig
from longspan.verify import worker as verify_worker
from tests.hf import pictures
from tests.models import build

K = 1 << 10
RIVAL = "alst"
"""The method of `benchmarks.methods` in the same step."""


@dataclass(frozen=True)
class Case:
    """A step to measure.

    Attributes:
        what: names the row.
        model: a built-in model of the planner.
        tiny: the family of `tests.models` that stands for it without a GPU.
        ranks: GPUs; on a machine with fewer, all of them, if the plan then fits.
        context: tokens; 0: the longest that the planner says fits and takes at most `seconds`.
        axis: the mesh's axis of all ranks.
        changes: fields of the model's config to change.
        options: further arguments of `Step`.
        rival: whether ALST's attention is measured in the same step.
        published: what others report of such a step.
        seconds: the most that a step of the longest context may take.
        needs: seconds that must be left to begin.
    """

    what: str
    model: str
    tiny: str = "Llama"
    ranks: int = 8
    context: int = 128 * K
    axis: str = "ulysses"
    changes: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    rival: bool = False
    published: str = ""
    seconds: float = 90.0
    needs: float = 45.0

    def on(self, setup: Setup) -> int:
        """Return how many ranks run it."""
        return min(self.ranks, setup.ranks)

    def step(self, setup: Setup) -> Step:
        """Return the step, a tiny one if it should be quick; if the longest context is asked for, with a short one."""
        if setup.quick:
            config = (pictures.build if self.tiny in pictures.FAMILIES else build)(self.tiny).config.to_dict()
        else:
            config = copy.deepcopy({**find_config(self.model)[1], **self.changes})
        config.get("text_config", config)["max_position_embeddings"] = 1 << 22
        options = {"memory": FULL, **self.options}
        if not setup.on_gpu:
            options["memory"] = replace(options["memory"], offload="none")  # a CPU has nothing to move
        return Step(config, {self.axis: self.on(setup)}, setup.size(self.context or K, 128), **options)


PUBLISHED = [
    *(Case(f"Qwen3-4B, {n}K", "qwen3-4b", ranks=4, context=n * K, rival=True) for n in (32, 64, 128)),
    *(Case(f"Llama-3.1-8B, {n}K", "llama-3.1-8b", context=n * K, rival=True) for n in (128, 256)),
]
KINDS = [
    Case(
        "a hybrid: 8 layers of Qwen3-Next, 128K", "qwen3-next-80b-a3b", "Qwen3Next", changes={"num_hidden_layers": 8},
        options={"experts": "auto"},
    ),
    Case("a vision model: Qwen3-VL-4B, 32K", "qwen3-vl-4b", "Qwen3VL", context=32 * K),
    Case(
        "a mixture of experts: 24 layers of Qwen3-30B-A3B, 64K", "qwen3-30b-a3b", "Qwen3Moe", context=64 * K,
        changes={"num_hidden_layers": 24}, options={"experts": "auto"},
    ),
    Case("LoRA of rank 16: Llama-3.1-8B, 128K", "llama-3.1-8b", options={"tuning": Tuning(lora=16)}),
]  # fmt: skip
GENERATION = Case("Llama-3.1-8B, 128K", "llama-3.1-8b", options={"mode": "prefill", "memory": Memory()})
LONGEST_CASES = [
    Case("the longest of Qwen3-1.7B", "qwen3-1.7b", ranks=1, context=0, options={"memory": LONGEST}),
    Case("the longest of Llama-3.1-8B", "llama-3.1-8b", context=0, options={"memory": LONGEST}),
]
MILLION = Case(
    "Qwen3-8B, 1M", "qwen3-8b", context=1 << 20, axis="ring", published="TRL: 364 s on 8 H100", needs=450,
    options={"memory": Memory(checkpointing="full", offload="host")},
)  # fmt: skip


def start(setup: Setup, ranks: int, body: Callable[..., Any], *args: Any) -> Any:
    """Run `body(*args)` on new ranks, and return the first one's value."""
    hidden = {} if setup.on_gpu else {"CUDA_VISIBLE_DEVICES": ""}
    with mock.patch.object(launch, "START_METHOD", "spawn" if setup.on_gpu else "fork"):
        return common.run_ranks(body, ranks, *args, env=hidden)


# --- the mesh and its links


def mesh(setup: Setup) -> Iterator[Row]:
    """`longspan verify` on all ranks: loss, logits and every gradient of the sharded run against one process; and the
    links, against what the planner assumes of this card."""
    ring = 2 if setup.ranks % 4 == 0 else 1
    axes = {"ring": ring, "ulysses": setup.ranks // ring}

    def verified() -> tuple[str, str]:
        small = build("Llama", num_attention_heads=8, num_key_value_heads=8, hidden_size=setup.size(512, 32))
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "config.json")
            path.write_text(json.dumps(small.config.to_dict()))
            config = VerifyConfig(model=str(path), context=setup.size(128, 64), parallel=ParallelConfig(**axes))
            report = start(setup, setup.ranks, verify_worker, config)
        return f"{len(report.checks)} comparisons", OK if report.passed else WRONG

    yield setup.row(f"verify, {ParallelConfig(**axes)}", verified, 60.0)
    for axis in setup.size(("ulysses", "ring"), ("ring",)):

        def links(axis: str = axis) -> tuple[Any, ...]:
            found, assumed = start(setup, setup.ranks, measured_links, setup, axis)
            figure = ", ".join(f"{op} {speed / 1e9:.1f} GB/s" for op, speed in found.items())
            return figure, MEASURED, {"measured": found, "planned": assumed}, f"{assumed / 1e9:.0f} GB/s"

        yield setup.row(f"links, {axis} {setup.ranks}", links, 30.0)


def measured_links(setup: Setup, axis: str) -> tuple[dict[str, float], float]:
    """Return bytes/s that a rank sends in each collective on an axis of all ranks, and what is assumed. Collective."""
    ranks = dist.get_world_size()
    sizes = setup.size(BenchConfig().sizes, (1 << 10, 1 << 12, 1 << 14))
    config = BenchConfig(sizes=sizes, rounds=setup.size(10, 2), parallel=Axes(**{axis: ranks}))
    found = measure_links(config, longspan.init_mesh(**{axis: ranks}, device_type=setup.device), common.device())
    return {op: link.bandwidth for op, link in found[axis].items()}, device_hardware(setup).intra.bandwidth


# --- steps


def published(setup: Setup) -> Iterator[Row]:
    """Training steps of lengths that others publish: AdamW, bf16, FSDP2, each layer recomputed. The rival is the same
    step with the attention of DeepSpeed's ALST and, as in its tutorial, the logits of all of a rank's tokens."""
    for case in PUBLISHED[: setup.size(None, 1)]:
        yield case_row(setup, case)


def kinds(setup: Setup) -> Iterator[Row]:
    """Training steps of other kinds of models."""
    for case in KINDS[: setup.size(None, 2)]:
        yield case_row(setup, case)


def generated(setup: Setup) -> Iterator[Row]:
    """A prompt in one forward, and a token after it, with whole weights on every rank."""
    case, both = GENERATION, list[tuple[Numbers, Numbers]]()

    def run() -> tuple[Any, ...]:
        both.extend(start(setup, case.on(setup), generate_on_ranks, setup, case))
        return beside(setup, *both[0])

    yield setup.row(f"prefill, {case.what}", run, 60.0)
    if both:
        yield setup.row(f"a token, {case.what}", functools.partial(beside, setup, *both[1]), 0.0)


def longest(setup: Setup) -> Iterator[Row]:
    """The longest context that fits nine tenths of the memory by the plan, and whose step takes at most 90 s: on one
    GPU, and on all."""
    for case in LONGEST_CASES[setup.size(0, 1) :]:
        yield case_row(setup, case)


def million(setup: Setup) -> Iterator[Row]:
    """A million tokens in a ring, activations in the host's memory."""
    yield case_row(setup, MILLION)


def case_row(setup: Setup, case: Case) -> Row:
    """Return the row of a case."""
    named = [case.what]

    def run() -> tuple[Any, ...]:
        ranks = case.on(setup)
        context, measured, planned = start(setup, ranks, train_on_ranks, setup, case)
        named.append(f"{context:,} tokens, {case.axis} {ranks}")
        rival = _rival(setup, case, ranks) if case.rival else None
        return beside(setup, measured, planned, rival or case.published or None)

    row = setup.row(case.what, run, case.needs)
    return replace(row, what=", ".join(named))


def _rival(setup: Setup, case: Case, ranks: int) -> Numbers | str:
    """Return ALST's numbers, or why there are none."""
    if not installed(METHODS[RIVAL].package):
        return f"{METHODS[RIVAL].package} is not installed"
    try:
        return dict(start(setup, ranks, rival_on_ranks, setup, case))
    except Exception as error:  # such as too little memory, which is a result
        return brief(error)


def train_on_ranks(setup: Setup, case: Case) -> tuple[int, Numbers, Numbers]:
    """Return the context, and what is measured and planned. Collective."""
    step, hardware = case.step(setup), device_hardware(setup)
    if case.context == 0:
        step = _longest(step, setup, case)
    plan = step.plan(hardware)
    require_fit(plan)
    sp = longspan.SequenceSharding(longspan.init_mesh(**step.axes, device_type=setup.device))
    return step.context, measure(setup, *trained(step, sp)), numbers_of(plan)


def _longest(step: Step, setup: Setup, case: Case) -> Step:
    """Return the step with the longest context, rounded down to 1,024 tokens a rank."""
    device = device_hardware(setup)
    hardware = replace(device, memory_bytes=0.9 * device.memory_bytes)
    first, most, grain = step.plan(hardware), setup.size(case.seconds, 0.05), setup.size(K, 16) * case.on(setup)

    def quick_enough(context: int) -> bool:
        return replace(step, context=context).plan(hardware).step_seconds <= most

    fits = longest_context(first.model, first.job, hardware) // grain
    context = grain * max(1, bisect_largest(lambda n: quick_enough(n * grain), 1, max(2, fits)))
    return replace(step, context=context)


def generate_on_ranks(setup: Setup, case: Case) -> list[tuple[Numbers, Numbers]]:
    """Return what is measured and planned of a prefill, and of a token. Collective."""
    step, hardware = case.step(setup), device_hardware(setup)
    plans = [step.plan(hardware), step.plan(hardware, "decode")]
    for plan in plans:
        require_fit(plan)
    sp = longspan.SequenceSharding(longspan.init_mesh(**step.axes, device_type=setup.device))
    return list(zip(generation(setup, step, sp), map(numbers_of, plans), strict=True))


def rival_on_ranks(setup: Setup, case: Case) -> Numbers:
    """Return what is measured of the same step with the rival's attention. Collective."""
    step = case.step(setup)
    shardings = ShardingCache(common.device())
    inputs = _ShardedInputs(dict(step.config), step.context, torch.bfloat16, shardings, step=step)
    workload = peers.peer_step(Candidate(RIVAL, METHODS[RIVAL], ParallelConfig(**step.axes)), inputs)
    workload.run()
    return measure(setup, workload.run, workload.state_bytes)


@dataclass(frozen=True)
class _ShardedInputs(StepInputs):
    """A model whose ranks fill their own shards, with transformers' activation checkpointing."""

    step: Any = None

    def model(self) -> Any:
        """Make the model on the meta device; its buffers have values."""
        source = Files.of(self.step.origin, None, later=True)
        assert source is not None
        to_meta(source.model, {p: name for name, p in source.model.named_parameters()})
        source.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return source.model.train()

    def fill(self, model: Any, sp: longspan.SequenceSharding) -> None:
        """Allocate this rank's shards, and fill them."""
        materialize(model, sp.device)
        fill(model)
