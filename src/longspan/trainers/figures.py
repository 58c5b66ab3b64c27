"""How fast a step is: FLOPs of a model's training, a device's peak, memory, and the share of communication."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.profiler import profile

from longspan.plan.hardware import CATALOGUE
from longspan.plan.job import Job
from longspan.plan.layers import Softmax
from longspan.tracing.spans import covered

if TYPE_CHECKING:
    from longspan.plan.shape import ModelShape


def model_flops(
    shape: ModelShape,
    tokens: int,
    attention_pairs: int,
    *,
    trained: float = 1.0,
    forwards: int = 1,
    backwards: int = 1,
    frozen: int = 0,
) -> float:
    """Return the FLOPs of training a causal LM on some tokens and (query, key) pairs, without recomputation.

    A weight costs 2 per token that it multiplies in a forward, 2 in the backward, and 2 for its gradient if it is among
    the `trained` share; an expert multiplies only its own tokens. Attention's are those of causal pairs within
    documents and windows, recurrences' those of their chunks: Chowdhery et al., "PaLM", 2022, appendix B. The first
    `frozen` layers have no backward. A teacher has a forward alone (`backwards=0`).
    """
    of_weights = shape.vocab * shape.d_model + sum(kind.matmul_params_active * n for kind, n in shape.layer_kinds)
    skipped = Counter(shape.layers[:frozen])
    of_frozen = sum(kind.matmul_params_active * n for kind, n in skipped.items())
    total = float(((2 * forwards + backwards * (2 + 2 * trained)) * of_weights - 2 * of_frozen) * tokens)
    for layer, count in shape.layer_kinds:
        job, times, mixing = Job(context=tokens), (forwards + 2 * backwards) * count - 2 * skipped[layer], layer.mixing
        if isinstance(mixing, Softmax):
            total += times * mixing.flops(job, min(1.0, attention_pairs / mixing.keys.pairs(tokens)))
        else:
            total += mixing.flops(job, times)
    return total


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the dense bf16 peak of a device in FLOP/s; None for another dtype, or a device unknown to the planner."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return None
    words = set(re.split(r"\W+", torch.cuda.get_device_name(device).lower()))
    if "h100" in words and words & {"pcie", "nvl"}:  # slower than the SXM card of the catalogue
        return None
    return next((gpu.flops for name, gpu in CATALOGUE.items() if name.partition("-")[0] in words), None)


def peak_memory(device: torch.device) -> float:
    """Return the peak of this process in GiB: allocated on the device, or on CPU the resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


_NAMES, _OF_PART = ("input_ids", "attention_mask"), ("ids", "mask")


def count_tokens(batch: Mapping[str, Any]) -> Tensor:
    """Return a batch's tokens without padding, and its (query, key) pairs within documents: int64 [2]."""
    if "prompt_ids" in batch:  # and what TRL generated behind it
        both = [torch.cat([batch[f"{part}_{key}"] for part in ("prompt", "completion")], 1) for key in _OF_PART]
        return count_tokens(dict(zip(_NAMES, both, strict=True)))
    if "chosen_input_ids" in batch:  # of TRL's CPO and ORPO
        rows = [{key: batch[f"{row}_{key}"] for key in _NAMES} for row in ("chosen", "rejected")]
        return torch.stack([count_tokens(each) for each in rows]).sum(0)
    positions, mask = batch.get("position_ids"), batch.get("attention_mask")
    ids = next((batch[key] for key in ("input_ids", "inputs_embeds") if batch.get(key) is not None), None)
    if ids is None:
        return torch.zeros(2, dtype=torch.int64)
    if positions is not None and positions.shape == ids.shape[:2]:
        real = torch.ones_like(positions) if mask is None or mask.dim() != 2 else mask
        return torch.stack([real.sum(), ((positions + 1) * real).sum()])
    lengths = torch.full((len(ids),), ids.shape[1]) if mask is None or mask.dim() != 2 else mask.long().sum(1)
    return torch.stack([lengths.sum(), (lengths * (lengths + 1) // 2).sum()])


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
