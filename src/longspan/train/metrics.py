"""What a training step is measured by, and where the figures go: a display, a JSONL file and TensorBoard."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import resource
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler import profile

from longspan.tracing.spans import covered

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
    """The figures of one optimizer step, over the whole job where not said otherwise.

    Attributes:
        step: optimizer steps done, this one included.
        loss: mean over the unmasked tokens of the step's sequences.
        grad_norm: L2 norm of all gradients, before clipping.
        lr: learning rate of this step.
        tokens: tokens trained on since the beginning of the run, earlier parts of a resumed run included.
        tokens_per_s: of the steps since the last report, without what stands between steps (checkpoints, profiler).
        step_s: seconds of those steps, mean.
        communication: share of this step's wall time in which a collective was in flight, mean over ranks; see
            `CommunicationSampler`. None on one rank.
        peak_memory_gib: of the rank that used most, since its start: what CUDA's allocator handed out, or on CPU the
            resident memory of the process, libraries included.
        peak_reserved_gib: what CUDA's allocator held of the device at most, the rank that held most, since its start;
            None on CPU.
        reserved_ratio: `peak_reserved_gib` over `peak_memory_gib`, of the rank where that is largest: what is above 1
            lies in pieces that nothing fitted into. None on CPU.
        offload_gb_per_s: bandwidth of this rank's offload since the last report, both ways together, while it moved;
            None without one.
        offload_waited: share of the steps' time that computing waited for it (exposed); None without one.
        mfu: model FLOP/s over the devices' dense bf16 peak; see `model_flops`. None where unknown (CPU, fp32, an
            unlisted device, mixtures of experts).
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    tokens_per_s: float
    step_s: float
    communication: float | None
    peak_memory_gib: float
    mfu: float | None
    peak_reserved_gib: float | None = None
    reserved_ratio: float | None = None
    offload_gb_per_s: float | None = None
    offload_waited: float | None = None

    def line(self, steps: int, width: int | None = None) -> str:
        """Format the figures for a log: in one line, or in lines of `width` columns that break between figures."""
        parts = [
            f"step {self.step}/{steps}",
            f"loss {self.loss:.4f}",
            f"grad {self.grad_norm:.3g}",
            f"lr {self.lr:.2e}",
            f"{self.tokens_per_s:,.0f} tokens/s",
            f"mem {self.peak_memory_gib:.2f} GiB",
        ]
        if self.peak_reserved_gib is not None and self.reserved_ratio is not None:
            parts[-1] += f" (reserved {self.peak_reserved_gib:.2f}, x{self.reserved_ratio:.2f})"
        if self.offload_gb_per_s is not None and self.offload_waited is not None:
            parts.append(f"offload {self.offload_gb_per_s:.2f} GB/s, waited {self.offload_waited:.0%}")
        if self.communication is not None:
            parts.append(f"comm {self.communication:.0%}")
        if self.mfu is not None:
            parts.append(f"MFU {self.mfu:.1%}")
        parts.append(f"ETA {_duration((steps - self.step) * self.step_s)}")
        lines = [""]
        for part in parts:
            longer = f"{lines[-1]}  {part}" if lines[-1] else part
            if width is None or len(longer) <= width:
                lines[-1] = longer
            else:
                lines.append(f"  {part}")
        return "\n".join(lines)


def _duration(seconds: float) -> str:
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02}:{s:02}"


# --- what is measured


def model_flops(model: torch.nn.Module, config: Any, tokens: int, attention_pairs: int) -> float | None:
    """FLOPs that one training step (forward and backward) of a causal LM needs; what is recomputed is not counted.

    6 per matmul weight and token, plus 12 * head_dim per query head, layer and pair (query, key) of causal
    attention: Chowdhery et al., "PaLM", 2022, appendix B, but with the pairs that causal attention really has (half of
    them for one long document, fewer for packed ones) instead of all. Sliding windows are not taken into account.

    Args:
        model: with unsharded or FSDP-sharded parameters (a sharded one knows its whole size).
        config: its Hugging Face config.
        tokens: of the whole step.
        attention_pairs: of the whole step.

    Returns:
        None for a mixture of experts, where not every weight works on every token.
    """
    text = config.get_text_config()
    if any(getattr(text, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
        return None
    weights = sum(p.numel() for p in model.parameters() if p.ndim >= 2)
    if not text.tie_word_embeddings:  # a lookup is no matmul; a tied table is the head as well
        weights -= text.vocab_size * text.hidden_size
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    pair_flops = 12 * head_dim * text.num_attention_heads * text.num_hidden_layers
    return float(6 * weights * tokens + pair_flops * attention_pairs)


def peak_flops(device: torch.device, dtype: str) -> float | None:
    """The dense peak of one device in FLOP/s, where it is known; only bf16's are listed."""
    if device.type != "cuda" or dtype != "bf16":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_BF16_FLOPS if part in name), None)


def peak_memory_gib(device: torch.device) -> float:
    """This process's peak so far: CUDA's allocated memory, or on CPU its resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def peak_memory(device: torch.device) -> list[float]:
    """`peak_memory_gib`; what CUDA's allocator held at most, in GiB; and the second over the first. On CPU the last two
    are 0: there is no allocator that reserves.
    """
    used = peak_memory_gib(device)
    if device.type != "cuda":
        return [used, 0.0, 0.0]
    reserved = torch.cuda.max_memory_reserved(device) / 2**30
    return [used, reserved, reserved / used if used else 0.0]


class CommunicationSampler:
    """Measures in which share of a stretch of time a collective was in flight on this rank.

    The stretch runs under torch's profiler. Counted is the union of the intervals of all of gloo's operations (from
    the call to its end) or NCCL's kernels, so two at once count once. In flight means: waiting for a slower rank is
    included, and so is communication that overlaps with computation. It is what could be won at most if
    communication cost nothing; where ranks share cores, as in tests on a CPU, it is mostly waiting.

    `share` is the last measured one, None before.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self.share: float | None = None

    @contextlib.contextmanager
    def measure(self) -> Iterator[None]:
        """Measure what runs inside; it must end synchronised with the device."""
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


# --- where it goes


class MetricsLog:
    """Writes `metrics.jsonl` and TensorBoard files to a run's folder. Only rank 0 makes one.

    A resumed run goes on in the same files; what had been written after the step it resumes from is dropped.
    """

    def __init__(self, folder: Path, resumed_step: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "metrics.jsonl"
        if self.path.exists():
            kept = "".join(_lines_until(self.path, resumed_step))
            if kept != self.path.read_text():
                rewritten = self.path.with_name(f"{self.path.name}.new")  # a full disk leaves the old one as it is
                rewritten.write_text(kept)
                rewritten.replace(self.path)
        self._file = self.path.open("ab", buffering=0)
        self._board: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=resumed_step + 1)

    def write(self, metrics: StepMetrics) -> None:
        """Append one step.

        Raises:
            OSError: if there is no room, say; no part of the line is then left, and the next one may be tried.
        """
        values = dataclasses.asdict(metrics)
        line = (json.dumps(values) + "\n").encode()
        before = os.fstat(self._file.fileno()).st_size
        try:
            done = 0
            while done < len(line):
                done += self._file.write(line[done:]) or 0
        except OSError:
            with contextlib.suppress(OSError):
                self._file.truncate(before)
            raise
        for name, value in values.items():
            if name != "step" and value is not None:
                self._board.add_scalar(f"train/{name}", value, metrics.step)

    def close(self) -> None:
        """Flush and close both. What TensorBoard has no room for is in the other file, as far as there is room."""
        self._file.close()
        with contextlib.suppress(OSError):
            self._board.close()


def _lines_until(path: Path, step: int) -> list[str]:
    lines = path.read_text().splitlines(keepends=True)
    return [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]


@dataclass
class Display:
    """Progress on rank 0: a live bar on a terminal, plain lines otherwise."""

    steps: int
    started: int = 0
    _progress: Any = field(default=None, init=False)
    _task: Any = field(default=None, init=False)

    def __enter__(self) -> Display:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console()
        if console.is_terminal:
            columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=24), TimeRemainingColumn())
            self._progress = Progress(*columns, TextColumn("{task.fields[figures]}"), console=console)
            self._task = self._progress.add_task("train", total=self.steps, completed=self.started, figures="")
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def say(self, text: str) -> None:
        """A line that stays."""
        if self._progress is not None:
            self._progress.console.print(text, highlight=False, markup=False)
        else:
            print(text, flush=True)

    def step(self, step: int, metrics: StepMetrics | None) -> None:
        """A step is done; `metrics` where they were measured."""
        if self._progress is not None:
            self._progress.update(self._task, completed=step)
        if metrics is None:
            return
        width = None if self._progress is None else shutil.get_terminal_size().columns
        self.say(metrics.line(self.steps, width))
        if self._progress is not None:
            figures = f"loss {metrics.loss:.4f}  {metrics.tokens_per_s:,.0f} tokens/s"
            self._progress.update(self._task, figures=figures)


class Quiet(Display):
    """The display of the other ranks: nothing."""

    def __enter__(self) -> Quiet:
        return self

    def say(self, text: str) -> None:
        """Say nothing."""

    def step(self, step: int, metrics: StepMetrics | None) -> None:
        """Show nothing."""
