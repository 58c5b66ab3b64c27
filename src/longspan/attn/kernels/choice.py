"""Choose the kernel of an attention, from device, mask and tensors, and report why."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass

import torch

from longspan.attn.kernels.base import (
    BY_REGIONS,
    BY_SCORES,
    CHANGES_EACH_SCORE,
    REGISTRY,
    Kernel,
    KernelRequest,
    refusal,
    register,
    returns_lse,
)
from longspan.attn.kernels.flash import CUDNN, FLASH
from longspan.attn.kernels.flex import FLEX, compiles
from longspan.attn.kernels.sdpa import SDPA
from longspan.attn.kernels.tiled import TILED
from longspan.attn.score import Scores
from longspan.core.errors import LongspanError
from longspan.core.validation import format_value, nearest

AnyKernel = str | Kernel
"""A name, or a custom kernel (`BlockKernel`, `longspan.kernel_with_lse`)."""

CUDNN_LENGTHS, ANY_LENGTH_FROM = 8, 32_768
"""When "auto" takes cuDNN: for sequences of at least `ANY_LENGTH_FROM` tokens, and for the first `CUDNN_LENGTHS`
shorter lengths of a process. Other lengths take flash attention.

cuDNN builds a plan for each new length of a batch. That keeps the host busy for about 30 ms (transformers' decoding in
benchmarks/reports/2026-11-26-gpu.md), and again in the backward. Flash attention builds no plan, but takes 1.7 times as
long: with 32 heads of 128 on one of 8 ranks, 5 ms more in a layer of 32,768 tokens, and 0.3 ms in one of 8,192.
"""
_cudnn_lengths: set[tuple[int, int]] = set()

_log = logging.getLogger("longspan")


class EagerKernel(Kernel):
    """The formula with materialized scores, on any mesh, with gradients of learnt biases: `methods/reference.py`."""

    name = "eager"
    computes = BY_REGIONS | BY_SCORES

    def refuses(self, request: KernelRequest) -> str | None:
        return None

    def describe(self, request: KernelRequest) -> str:
        return "the formula with its scores materialized; its memory grows with the square of the tokens"


EAGER = register(EagerKernel())


@dataclass(frozen=True)
class Choice:
    """The name of a kernel ("sdpa", "flash", "tiled", ..., or a custom kernel's) and the reason for it."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


def choose_kernel(kernel: AnyKernel, request: KernelRequest) -> tuple[Kernel, Choice]:
    """Return the kernel that computes this request, and why.

    Raises:
        LongspanError: for a kernel that is unknown, not installed, or cannot compute this; the message names one that
            can.
    """
    if isinstance(kernel, str) and kernel not in ("auto", *REGISTRY):
        raise LongspanError(
            f"kernel={kernel!r} is unknown; {nearest(kernel, ('auto', *REGISTRY))}, or pass longspan.kernel_with_lse(f)"
        )
    if kernel == "auto":
        chosen, choice = _choose(request)
    else:
        chosen, choice = _check_requested(as_kernel(kernel), request)
    if request.grad and returns_lse(chosen):
        refuse_learnt_biases(chosen.name, request.scores, request.device)
    return chosen, choice


def _check_requested(kernel: Kernel, request: KernelRequest) -> tuple[Kernel, Choice]:
    missing_lse = _missing_lse(kernel, request)
    tiled_instead = kernel is SDPA and request.ring > 1
    if missing_lse is not None and not tiled_instead:
        changes = ["ring=1 with more ulysses"] if request.ring > 1 and kernel is not EAGER else []
        if request.lse:
            changes.append("head_chunks=1 and overlap_chunks=1 without checkpointing='selective'")
        other = " and ".join(changes)
        raise LongspanError(
            f"the kernel {missing_lse}; use kernel='auto' or 'tiled', a function that returns it "
            f"(longspan.kernel_with_lse), or {other}"
        )
    refused = refusal(kernel, request)
    if refused is not None:
        raise LongspanError(refused)
    if tiled_instead:
        return TILED, Choice(TILED.name, f"{missing_lse}; {TILED.describe(request)}")
    return kernel, Choice(kernel.name, kernel.describe(request))


def _missing_lse(kernel: Kernel, request: KernelRequest) -> str | None:
    """Return what needs the log-sum-exp that a kernel does not return; None if nothing does."""
    if returns_lse(kernel):
        return None
    if request.ring > 1 and kernel is not EAGER:
        return f"{kernel.name} returns no log-sum-exp, which a ring of {request.ring} needs to merge blocks"
    if request.lse:
        options = "head_chunks, overlap_chunks and checkpointing='selective'"
        return f"{kernel.name} returns no log-sum-exp, which {options} save for the backward"
    return None


def as_kernel(kernel: AnyKernel) -> Kernel:
    """Return the kernel with this name, or the custom kernel itself.

    Raises:
        LongspanError: for anything else.
    """
    if isinstance(kernel, str):
        return REGISTRY[kernel]
    given: object = kernel
    if isinstance(given, Kernel):
        return given
    known = ", ".join(("auto", *REGISTRY))
    raise LongspanError(
        f"kernel={format_value(kernel)} is neither a name ({known}) nor a kernel; make one of a function that returns "
        f"the output and its log-sum-exp by longspan.kernel_with_lse"
    )


def _choose(request: KernelRequest) -> tuple[Kernel, Choice]:
    """Return the first candidate that computes this; "tiled", the last, computes every option of today."""
    passed_over: list[str] = []
    for kernel in candidates(request):
        why_not = _why_not(kernel, request)
        if why_not is None:
            return kernel, Choice(kernel.name, "; ".join([*passed_over, kernel.describe(request)]))
        passed_over.append(why_not)
    raise LongspanError(f"no kernel computes this attention: {'; '.join(passed_over)}")


def candidates(request: KernelRequest) -> tuple[Kernel, ...]:
    """Return the kernels that "auto" tries, the fastest first (benchmarks/reports/2026-11-26-gpu.md, mask-cost.md)."""
    if request.device.type != "cuda":
        return SDPA, TILED
    options = {*request.options}
    if options & CHANGES_EACH_SCORE:
        return FLEX, TILED
    if options & BY_REGIONS:
        return FLASH, TILED
    # A compiler sees through sdpa.
    return (CUDNN, SDPA, FLASH, TILED) if _prefers_cudnn(request.device) else (SDPA, FLASH, TILED)


def _prefers_cudnn(device: torch.device) -> bool:
    """Return whether cuDNN comes first, as in torch's sdpa: on GPUs that FlashAttention-2 was not written for."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) in ((9, 0), (10, 0))


def _why_not(kernel: Kernel, request: KernelRequest) -> str | None:
    """Return in a few words why "auto" passes a kernel over; None if it does not."""
    missing_lse = _missing_lse(kernel, request)
    if missing_lse is not None:
        return missing_lse
    if kernel is FLEX and not compiles(request.device):
        return "flex cannot be compiled: it needs a GPU and Triton"
    runs_cudnn = kernel in (CUDNN, SDPA) and _prefers_cudnn(request.device) and refusal(CUDNN, request) is None
    if runs_cudnn and not _keeps_cudnn(request.tokens):
        return f"{kernel.name} would let cuDNN build a plan for one more length"
    refused = refusal(kernel, request)
    return None if refused is None else refused.split(";")[0].replace(f"kernel={kernel.name!r}", kernel.name)


def _keeps_cudnn(tokens: tuple[int, int] | None) -> bool:
    """Return whether cuDNN's plan for batches of these rows and tokens is worth its time."""
    if tokens is None or tokens[1] >= ANY_LENGTH_FROM or torch.compiler.is_compiling():
        return True
    if len(_cudnn_lengths) < CUDNN_LENGTHS:
        _cudnn_lengths.add(tokens)
    return tokens in _cudnn_lengths


def refuse_learnt_biases(kernel: str, scores: Scores, device: torch.device) -> None:
    """Raise for a learnt bias: a kernel that computes block by block has no gradient for it."""
    learnt = scores.alibi is not None and scores.alibi.requires_grad
    if scores.bias is not None and not learnt:
        at = torch.zeros(1, dtype=torch.int64, device=device)
        bias = scores.bias_of(1, at, at, torch.float32)
        learnt = bias is not None and bias.requires_grad
    if learnt:
        raise LongspanError(
            f"kernel={kernel!r} computes no gradient of a learnt bias; use kernel='eager' (exact, but its memory grows "
            f"with the square of the tokens), or detach the bias"
        )


@functools.cache
def log_choice(choice: Choice) -> None:
    """Log a choice once per process."""
    _log.info("attention kernel %s", choice)
