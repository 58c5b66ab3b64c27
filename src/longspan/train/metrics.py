"""The metrics of a training step: how they are measured, shown, and checked for a run that goes wrong."""

from __future__ import annotations

import contextlib
import os
import resource
import statistics
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.profiler import profile

from longspan.core.errors import LongspanError
from longspan.plan.job import Job
from longspan.plan.layers import Softmax
from longspan.tracing.spans import covered

if TYPE_CHECKING:
    from longspan.hf.checks.nonfinite import NonFinite
    from longspan.plan.models import ModelShape
    from longspan.train.config import TrainConfig

#: Dense bf16 peak of one device in FLOP/s, by a part of the name CUDA gives it; the makers' data sheets, without
#: sparsity. The first match counts.
PEAK_BF16_FLOPS = (
    ("B200", 2250e12),
    ("GH200", 989e12),
    ("H200", 989e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("H800", 989e12),
    ("H20", 148e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("L40S", 362e12),
    ("L4", 121e12),
    ("A10G", 70e12),
    ("RTX 6000 Ada", 364e12),
    ("RTX A6000", 155e12),
    ("RTX 4090", 165e12),
    ("RTX 3090", 71e12),
    ("MI300X", 1307e12),
    ("MI250X", 191.5e12),  # one of its two dies, which is what shows as a device
)


@dataclass(frozen=True)
class StepMetrics:
    """The metrics of one optimizer step, over the whole job unless stated otherwise; None where they do not apply."""

    step: int  # optimizer steps done, including this one
    loss: float  # mean over the unmasked tokens of the step's sequences
    grad_norm: float  # L2 norm of all gradients, before clipping
    lr: float  # of this step
    tokens: int  # trained on since step 0, across resumes
    tokens_per_s: float  # over the steps since the last report, without the time between steps (checkpoints, profiler)
    step_s: float  # mean of those steps
    communication: float | None  # share of this step's time with a collective in flight; see `CommunicationSampler`
    peak_memory_gib: float  # most of any rank since the start: CUDA's allocator, or the process's resident memory
    mfu: float | None  # model FLOP/s (`model_flops`) over the devices' dense bf16 peak
    peak_reserved_gib: float | None = None  # by CUDA's allocator, most of any rank since the start
    reserved_ratio: float | None = None  # over `peak_memory_gib`, most of any rank; above 1 is fragmentation
    offload_gb_per_s: float | None = None  # of this rank, both directions together, while it transferred
    offload_waited: float | None = None  # share of the steps' time that computation waited for the offload
    padding: float | None = None  # share of the sequences, since the last report
    truncated: int | None = None  # documents that were cut to the context, since step 0
    left_out: int | None = None  # documents (or cut sequences) that were too long or had no loss, since step 0
    reward_accuracy: float | None = None  # of preferences, since the last report; see `preferences.mean_of_pairs`
    reward_margin: float | None = None
    reward_chosen: float | None = None
    reward_rejected: float | None = None

    def line(self, steps: int) -> str:
        """Format for a log."""
        known = [text.format(value) for name, text in _SHOWN.items() if (value := getattr(self, name)) is not None]
        return "  ".join(
            [f"step {self.step}/{steps}", *known, f"ETA {timedelta(seconds=round((steps - self.step) * self.step_s))}"]
        )


_SHOWN = {
    "loss": "loss {:.4f}",
    "reward_accuracy": "accuracy {:.0%}",
    "reward_margin": "margin {:.3f}",
    "grad_norm": "grad {:.3g}",
    "lr": "lr {:.2e}",
    "tokens_per_s": "{:,.0f} tokens/s",
    "peak_memory_gib": "mem {:.2f} GiB",
    "peak_reserved_gib": "reserved {:.2f}",
    "reserved_ratio": "x{:.2f}",
    "offload_gb_per_s": "offload {:.2f} GB/s",
    "offload_waited": "waited {:.0%}",
    "padding": "padding {:.1%}",
    "truncated": "truncated {:,}",
    "left_out": "left out {:,}",
    "communication": "comm {:.0%}",
    "mfu": "MFU {:.1%}",
}


# --- measuring


def model_flops(
    shape: ModelShape, tokens: int, attention_pairs: int, *, trained: float = 1.0, forwards: int = 1, frozen: int = 0
) -> float:
    """Return the FLOPs of training a causal LM on some tokens and (query, key) pairs, without recomputation.

    A weight costs 2 per token that it multiplies in a forward, 2 in the backward, and 2 for its gradient if it is among
    the `trained` share; an expert multiplies only its own tokens. Attention's are those of causal pairs within
    documents and windows, recurrences' those of their chunks: Chowdhery et al., "PaLM", 2022, appendix B. The first
    `frozen` layers have no backward.
    """
    of_weights = shape.vocab * shape.d_model + sum(kind.matmul_params_active * n for kind, n in shape.layer_kinds)
    skipped = Counter(shape.layers[:frozen])
    of_frozen = sum(kind.matmul_params_active * n for kind, n in skipped.items())
    total = float(((2 * forwards + 2 + 2 * trained) * of_weights - 2 * of_frozen) * tokens)
    for layer, count in shape.layer_kinds:
        job, times, mixer = Job(context=tokens), (forwards + 2) * count - 2 * skipped[layer], layer.mixer
        if isinstance(mixer, Softmax):
            total += times * mixer.flops(job, min(1.0, attention_pairs / mixer.keys.pairs(tokens)))
        else:
            total += mixer.flops(job, times)
    return total


def peak_flops(device: torch.device, dtype: str) -> float | None:
    """Return the dense bf16 peak of a device in FLOP/s; None for another dtype or an unknown device."""
    if device.type != "cuda" or dtype != "bf16":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_BF16_FLOPS if part in name), None)


def peak_memory(device: torch.device) -> list[float]:
    """Return the peaks of this process: GiB allocated, GiB reserved by CUDA's allocator, and their ratio.

    On CPU the first is the resident memory, and the others are 0.
    """
    if device.type != "cuda":
        unit = 1 if sys.platform == "darwin" else 1024
        return [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30, 0.0, 0.0]
    used = torch.cuda.max_memory_allocated(device) / 2**30
    reserved = torch.cuda.max_memory_reserved(device) / 2**30
    return [used, reserved, reserved / used if used else 0.0]


class CommunicationSampler:
    """Measures the share of time in which a collective was in flight on this rank, by torch's profiler.

    It is the length of the union of the intervals of gloo's operations (from call to end) or NCCL's kernels, over the
    wall time. Waiting for a slower rank and communication that overlaps with computation are included, so it is an
    upper bound of what faster links could save.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self.share: float | None = None

    @contextlib.contextmanager
    def measure(self) -> Iterator[None]:
        """Measure the body, which must end synchronised with the device."""
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else each start and stop of the profiler prints a line
        device = "cuda" if self._on_cuda else None
        with profile(use_kineto=True, use_cpu=not self._on_cuda, use_device=device) as profiler:
            start = time.perf_counter()
            yield
            wall_ns = (time.perf_counter() - start) * 1e9
        # Kineto's own events: torch's parsed ones cost 0.1 ms each, and a step has tens of thousands.
        events = profiler.kineto_results.events() if profiler.kineto_results is not None else []
        spans = [(e.start_ns(), e.end_ns()) for e in events if self._is_collective(e.name())]
        self.share = covered(spans) / wall_ns

    def _is_collective(self, name: str) -> bool:
        return "nccl" in name.lower() if self._on_cuda else name.startswith("gloo:")


@dataclass
class Display:
    """Progress for the user: lines, and within `live` also a bar on a terminal. Shows nothing if not `enabled`."""

    steps: int
    enabled: bool = True
    _progress: Any = field(default=None, init=False)
    _task: Any = field(default=None, init=False)

    @contextlib.contextmanager
    def live(self, done: int = 0) -> Iterator[None]:
        """Show a bar on a terminal, with `done` steps done already."""
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console()
        if not (self.enabled and console.is_terminal):
            yield
            return
        columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=24), TimeRemainingColumn())
        with Progress(*columns, TextColumn("{task.fields[figures]}"), console=console) as self._progress:
            self._task = self._progress.add_task("train", total=self.steps, completed=done, figures="")
            yield
        self._progress = None

    def log(self, text: str) -> None:
        if self._progress is not None:
            self._progress.console.print(text, highlight=False, markup=False)
        elif self.enabled:
            print(text, flush=True)

    def step(self, step: int, metrics: StepMetrics | None) -> None:
        """Show that a step is done, with its metrics if it is reported."""
        if self._progress is not None:
            self._progress.update(self._task, completed=step)
        if metrics is None:
            return
        self.log(metrics.line(self.steps))
        if self._progress is not None:
            figures = f"loss {metrics.loss:.4f}  {metrics.tokens_per_s:,.0f} tokens/s"
            self._progress.update(self._task, figures=figures)


# --- spikes, gradients of zero, and values that are not finite

WINDOW = 20
"""Previous steps whose median loss is the baseline of a spike."""

_FEWEST = 5  # steps for a baseline


class Health:
    """Checks each step's loss and gradient norm, which are the same on every rank."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.losses: deque[float] = deque(maxlen=WINDOW)
        self.zeros = 0
        self.in_spike = False

    def look(self, step: int, loss: float, norm: float) -> str | None:
        """Check a step, by the flags of `LoggingSection`, and return a warning for the first one of a spike."""
        self._count_zeros(step, norm)
        median = statistics.median(self.losses) if len(self.losses) >= _FEWEST else None
        self.losses.append(loss)
        limit = self.config.logging.spike
        before, self.in_spike = self.in_spike, median is not None and 0 < limit * median < loss
        if median is None or not self.in_spike or before:
            return None
        text = f"step {step}: loss {loss:.4f} is {loss / median:.1f} times the median of previous steps ({median:.4f})"
        if self.config.logging.on_spike == "stop":
            raise LongspanError(
                f"{text}, more than --spike {limit:g}; resume from the last checkpoint with a smaller --lr (now "
                f"{self.config.optimizer.lr}), look at the data of this step, or pass --on-spike warn"
            )
        return f"warning: {text}"

    def _count_zeros(self, step: int, norm: float) -> None:
        self.zeros = self.zeros + 1 if norm == 0 else 0
        limit = self.config.logging.zero_gradients
        if limit and self.zeros >= limit:
            raise LongspanError(
                f"the gradient norm was exactly 0 in {self.zeros} steps in a row, up to step {step}: nothing is "
                f"learned; are all weights frozen, or all labels masked? --zero-gradients 0 continues anyway"
            )

    def format_updated(self, step: int, loss: float, norm: float) -> str:
        """Return the error for a norm that is not finite after an update in the backward: its gradients are freed."""
        options = self.config.optimizer
        return (
            f"loss {loss} and gradient norm {norm} at step {step}: the run has diverged, and with "
            f"--optimizer-in-backward the weights were updated before the norm was known; the last checkpoint is "
            f"untouched in {self.config.checkpoints}, resume from it with a smaller --lr (now {options.lr}) or a "
            f"longer --warmup (now {options.warmup}), or without --optimizer-in-backward to find the first bad value"
        )

    def format_nonfinite(self, step: int, loss: float, norm: float, first: NonFinite | None, started: int) -> str:
        """Return the error for a step that is not finite and did not update the weights.

        `first` is the first value that was not finite when the step was repeated from the same state; the run started
        after the step `started`.
        """
        what, config = f"loss {loss} and gradient norm {norm} at step {step}", self.config
        checkpoint = f"the last checkpoint is untouched in {config.checkpoints}"
        if first is None:
            return (
                f"{what}, and finite when the step was repeated from the same state: a transient fault of a machine "
                f"(memory, a device, a link), not of the model; {checkpoint}, the same command resumes from it; if it "
                f"happens again, test the machines"
            )
        if first.kind == "weight" and step == started + 1:
            origin = "checkpoint" if started else "model"
            return f"{what}: {first} already in the {origin} that the run started from; start from another one"
        if first.kind == "weight":
            return (
                f"{what}: {first} since the update of step {step - 1}, whose gradients were finite: the optimizer "
                f"caused it, or memory was damaged; {checkpoint}, resume from it, and if it happens again check the "
                f"optimizer's settings"
            )
        return (
            f"{what}: the run has diverged; first not finite: {first}; {checkpoint}, resume from a checkpoint with a "
            f"smaller --lr (now {config.optimizer.lr}) or a longer --warmup (now {config.optimizer.warmup})"
        )
