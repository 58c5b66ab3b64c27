"""A model's step, planned and measured: of one rank in a world that sends nothing, or of real ranks.

Models have random weights: on several ranks each fills its own shards, so that no host holds a whole model.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

import longspan
from benchmarks.gpu.setup import SKIPPED, Numbers, Row, Setup, beside
from longspan.bench.timing import reduce, synchronize, wait_for_all
from longspan.comm.weights import local_part
from longspan.core.errors import LongspanError
from longspan.core.memory import LONGEST, Memory
from longspan.hf.loading import load_sharded
from longspan.hf.memory import hardware_of
from longspan.hf.model.pretrained import language_model_class
from longspan.hf.weights.origin import Origin
from longspan.plan import Hardware, Job, Plan, cost, read_hardware
from longspan.plan.from_model import adapted, shape_from_config
from longspan.plan.job import Mode
from longspan.plan.shape import ALL_TRAINED, Tuning
from longspan.plan.tower import PictureShape
from longspan.verify.inputs import add_pictures
from tests.counting import count_sent
from tests.fakes import fake_world

BF16, FP32 = torch.bfloat16, torch.float32
FULL = Memory(checkpointing="full")
WARM = 1024
"""Tokens of a first step, which allocates the optimizer's state."""


@dataclass(frozen=True)
class Step:
    """A step of a model: its `config.json`, the mesh's axes, and the options of the job."""

    config: Mapping[str, Any]
    axes: Mapping[str, int]
    context: int
    memory: Memory = FULL
    mode: Mode = "train"
    tuning: Tuning = ALL_TRAINED
    experts: Any = 1

    @functools.cached_property
    def origin(self) -> Origin:
        options = {name: x for name, x in self.config.items() if name != "model_type"}
        config = transformers.AutoConfig.for_model(self.config["model_type"], **options)
        config.get_text_config().use_cache = self.mode != "train"
        dtype = FP32 if self.mode == "train" and not self.tuning.quantize else BF16
        return Origin(language_model_class(config), config, dtype, four_bits=BF16 if self.tuning.quantize else None)

    @functools.cached_property
    def batch(self) -> dict[str, Tensor]:
        """The whole batch, on the CPU; with pictures for a vision-language model."""
        vocabulary = self.origin.config.get_text_config().vocab_size
        ids = torch.randint(vocabulary, (1, self.context), generator=torch.Generator().manual_seed(0))
        row = {"input_ids": ids, "labels": ids.clone()}
        if "vision_config" in self.config:
            add_pictures([row], self.origin.on_meta(), 0)
        return row

    def plan(self, hardware: Hardware, mode: Mode | None = None) -> Plan:
        """Return the plan, in `mode` if it is given."""
        pictures = [
            PictureShape(name.partition("_")[0], *grid)
            for name, grids in (self.batch.items() if "vision_config" in self.config else ())
            if name.endswith("_grid_thw")
            for grid in grids.tolist()
        ]
        job = Job(
            self.context, mode=mode or self.mode, weight_sharding=self.mode == "train", memory=self.memory,
            pictures=tuple(pictures),
        )  # fmt: skip
        shape = shape_from_config(self.config, "benchmark", self.tuning)
        return cost(shape, job.on(**self.axes, experts=self.experts), hardware)

    def model(self, sp: longspan.SequenceSharding) -> Any:
        """Return the parallelized model, in training mode if it is trained. Collective."""
        train = self.mode == "train"
        options: dict[str, Any] = {"fsdp": train, "memory": self.memory, "experts": self.experts}
        if train and sp.world_size > 1:
            options["mp_policy"] = MixedPrecisionPolicy(BF16, FP32)
        if train and sp.world_size > 1 and dist.get_backend() != "fake":
            model = load_sharded(self.origin, sp, later=True, prepare=self.prepare, **options)
            fill(model)
        else:
            model = longspan.parallelize(self.prepare(self.build(sp.device)), sp, **options)
        return model.train(train)

    def build(self, device: torch.device) -> Any:
        """Make the whole model on a device, with random weights."""
        if not self.tuning.quantize:
            with device:
                return self.origin.build()
        with tempfile.TemporaryDirectory() as folder:  # transformers quantizes only weights that it reads
            replace(self.origin, four_bits=None).build().save_pretrained(folder)
            return replace(self.origin, name=folder).build().to(device)

    def prepare(self, model: Any) -> Any:
        """Put LoRA on a model if it is asked for."""
        if self.tuning.quantize:  # its weights are bytes, which cannot have a gradient
            import peft

            peft.get_peft_model(model, peft.LoraConfig(r=self.tuning.lora, target_modules="all-linear"))
            return model
        return model if self.tuning == ALL_TRAINED else adapted(model, self.tuning)


def fill(model: Any) -> None:
    """Set this rank's shards to random numbers, and norms to 1."""
    torch.manual_seed(dist.get_rank())
    with torch.no_grad():
        for name, p in model.named_parameters():
            local = local_part(p)
            local.fill_(float("norm" in name)) if p.dim() == 1 else local.normal_(std=0.02)


def _device(setup: Setup) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if setup.on_gpu else torch.device("cpu")


def device_hardware(setup: Setup) -> Hardware:
    """Return this device for the planner."""
    return hardware_of(_device(setup)) if setup.on_gpu else read_hardware("cpu")


def numbers_of(plan: Plan, sends: bool = True) -> Numbers:
    """Return what is planned; with `sends=False` sending takes no time, but its bytes are counted."""
    return {
        "seconds": plan.step_seconds if sends else plan.compute_seconds + plan.offload_seconds,
        "sent": sum(each.bytes_total for each in plan.comm),
        "memory": plan.memory_total_bytes - plan.memory_bytes.get("reserve", 0),
    }


# --- measured


def measure(setup: Setup, run: Callable[[], object], at_rest: Callable[[], int]) -> Numbers:
    """Return seconds, bytes sent and peak memory of `run`, each of the rank with most. Collective.

    Its time is the median of three runs, or of those that fit into some seconds. On a CPU it runs once, and memory is
    `at_rest`, the bytes that are always held, and the peak of what it allocates.
    """
    device, times, sent = _device(setup), list[float](), [0]

    def timed() -> None:
        wait_for_all(device)
        with count_sent() as log:
            begin = time.perf_counter()
            run()
            synchronize(device)
            seconds = torch.tensor([time.perf_counter() - begin])
        times.extend(reduce(seconds, dist.ReduceOp.MAX, device).tolist())
        sent[0] = sum(each.bytes for each in log)

    if setup.on_gpu:
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        while not times or (len(times) < 3 and sum(times) < 6):
            timed()
        peak = torch.cuda.max_memory_allocated()
    else:
        from tests.host_memory import peak_of  # it needs pytest

        with tempfile.TemporaryDirectory() as folder:
            peak = at_rest() + peak_of(timed, Path(folder) / "trace.json")
    most = reduce(torch.tensor([*sent, peak], dtype=torch.float64), dist.ReduceOp.MAX, device)
    return {"seconds": statistics.median(times), "sent": float(most[0]), "memory": float(most[1])}


Run = Callable[..., None]
"""Runs a step, of the first tokens if their number is given."""


def trained(
    step: Step, sp: longspan.SequenceSharding, change: Callable[[Any], object] = lambda model: None, warm: int = WARM
) -> tuple[Run, Callable[[], int]]:
    """Return a training step (forward, backward and AdamW) and the bytes that it always holds. Collective.

    It has run once, with `warm` tokens. `change` is called with the parallelized model.
    """
    model = step.model(sp)
    change(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    batch = {name: x.to(sp.device) for name, x in step.batch.items()}

    def run(tokens: int | None = None) -> None:
        part = {name: x[:, :tokens] if name in ("input_ids", "labels") else x for name, x in batch.items()}
        with torch.autocast(sp.device.type, BF16, enabled=sp.world_size == 1):
            loss = model(**part).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def at_rest() -> int:
        states = (x for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor))
        return sum(local_part(x).nbytes for x in (*model.parameters(), *states))

    run(None if len(batch) > 2 else min(warm, step.context))  # pictures need all their tokens
    return run, at_rest


@torch.no_grad()
def generation(setup: Setup, step: Step, sp: longspan.SequenceSharding) -> tuple[Numbers, Numbers]:
    """Measure a prefill, and a token after it. Collective."""
    model = step.model(sp)
    ids = step.batch["input_ids"].to(sp.device)
    caches: list[Any] = []

    def prefill(tokens: int = step.context) -> None:
        caches[:] = [longspan.ShardedCache(model, room=tokens + 16)]
        model(ids[:, :tokens], cache=caches[0], use_cache=True, logits_to_keep=1)

    def token() -> None:
        model(ids[:, :1], cache=caches[0], use_cache=True, logits_to_keep=1)

    def at_rest() -> int:
        return sum(p.nbytes for p in model.parameters())

    prefill(min(WARM, step.context))
    first = measure(setup, prefill, at_rest)
    token()
    return first, measure(setup, token, at_rest)


# --- one GPU: rank 0 of 8

WIDE: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 8,
    "num_key_value_heads": 8, "num_hidden_layers": 2, "vocab_size": 8192, "max_position_embeddings": 1 << 22,
}  # fmt: skip
"""Small enough for a million tokens in ten seconds."""
GROUPED = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
MESHES = ({"ulysses": 8}, {"ring": 8}, {"ring": 2, "ulysses": 4})


def steps(setup: Setup) -> Iterator[Row]:
    """Training steps of rank 0 of 8 with FSDP2, against `longspan plan`: time, bytes and peak memory. Nothing is sent,
    so the planned time is that of computing. On a CPU, the peak of its tensors. Those with `head_slices` run attention
    in slices of its heads: 32 query heads over 8 KV heads."""
    small = {"hidden_size": 128, "intermediate_size": 352, "vocab_size": 512}
    wide, local = {**WIDE, **setup.size({}, small)}, setup.size(32768, 256)
    grouped = {**wide, **GROUPED, **setup.size({}, {"head_dim": 16})}
    options = {"no option": Memory(), "selective": Memory(checkpointing="selective"), "longest": LONGEST}
    tried = [("full", wide, axes, local, FULL) for axes in setup.size(MESHES, MESHES[2:])]
    tried += [(name, wide, MESHES[0], local, options[name]) for name in setup.size((*options,), ())]
    for slices in setup.size((1, 2, 4), (4,)):
        tiled = Memory(checkpointing="full", tiled=True, head_slices=slices)
        tried.append((f"head_slices={slices}", grouped, MESHES[0], local, tiled))
    tried += [("full", wide, axes, 131072, FULL) for axes in setup.size(MESHES[:2], ())]
    for name, config, axes, tokens, memory in tried:
        yield from fake_step(setup, f"{name}, {tokens:,} tokens a rank", Step(config, axes, 8 * tokens, memory))


def fake_step(setup: Setup, what: str, step: Step) -> Iterator[Row]:
    """Yield the row of a training step of rank 0 in a world that sends nothing."""
    hardware = device_hardware(setup)
    plan = step.plan(hardware)
    what = ", ".join([what, *[" x ".join(f"{axis} {size}" for axis, size in step.axes.items())][: bool(step.axes)]])
    if setup.on_gpu and not plan.fits:
        yield Row(what, "", f"{SKIPPED}: {plan.short_of()[0]}")
        return

    def run() -> tuple[Any, ...]:
        with first_rank(setup, step) as sp:
            return beside(setup, measure(setup, *trained(step, sp)), numbers_of(plan, sends=False))

    yield setup.row(what, run, 3 * plan.compute_seconds + 3)


@contextlib.contextmanager
def first_rank(setup: Setup, step: Step) -> Iterator[longspan.SequenceSharding]:
    """Make this process the first rank of a step's mesh, in a world that sends nothing."""
    with fake_world(0, math.prod(step.axes.values())):
        yield longspan.SequenceSharding(longspan.init_mesh(**step.axes, device_type=setup.device))


def require_fit(plan: Plan) -> None:
    """Raise if a plan does not fit."""
    if not plan.fits:
        raise LongspanError(f"{plan.mesh} {plan.short_of()[0]}")
