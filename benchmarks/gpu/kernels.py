"""Attention kernels: accuracy against fp64 in units of rounding (`tests/tolerance.py`), and speed."""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import longspan
from benchmarks.common import DTYPES
from benchmarks.gpu.setup import BELOW, FAILED, MEASURED, OK, SKIPPED, STOPPED, WRONG, Row, Setup, brief
from longspan.attn.kernels import flash
from longspan.attn.mask import Mask
from longspan.core.errors import LongspanError
from tests.oracle import Case, errors, make, options
from tests.tolerance import MARGIN

NAMES = ("auto", "cudnn", "flash", "sdpa", "tiled")
"""Names of kernels, except those that compile."""

FLEX = ("a mask function", "softcap", "documents and sinks")

BF16, FP32 = torch.bfloat16, torch.float32


def cases(setup: Setup) -> dict[str, Case]:
    """Return the cases in order of value."""
    n = setup.size(600, 40)
    cuts = [n // 11, n // 11 + 1, n // 3, n // 2 + 7]
    ids = tuple(sum(i >= c for c in cuts) for i in range(n))
    wide = setup.size(128, 16)
    masks: dict[str, dict[str, Any]] = {
        "causal": {},
        "window": {"window": n // 6},
        "documents": {"documents": ids},
        "sinks": {"sinks": True},
        "softcap": {"softcap": 20.0},
        "window and sinks": {"window": n // 6, "sinks": True},
        "documents in a window": {"documents": ids, "window": n // 9},
        "documents and sinks": {"documents": ids, "sinks": True},
        "a query without keys": {"documents": (-1,) * 9 + ids[9:]},
        "bidirectional": {"causal": False},
        "window to both sides": {"causal": False, "window": n // 6},
        "chunks": {"chunk_size": n // 4},
        "prefix": {"prefix": n // 3},
        "alibi": {"alibi": True},
        "a mask function": {"mod": "striped"},
    }
    found: dict[str, Case] = {}

    def add(what: str, dtype: torch.dtype, dim: int, kv_heads: int, **mask: Any) -> None:
        name = f"{what}, {'bf16' if dtype == BF16 else 'fp32'}, D={dim}, 8/{kv_heads} heads"
        found[name] = Case(n, 1, 8, kv_heads, dim, dim, dtype=dtype, **mask)

    for dtype in (BF16, FP32):
        for what, mask in masks.items():
            add(what, dtype, wide, 2, **mask)
    for dtype in (BF16, FP32):
        for dim in (24,) if setup.quick else (64, 96, 256, 100, 512):
            add("causal", dtype, dim, 2)
            add("window", dtype, dim, 2, window=n // 6)
        for kv_heads in (1,) if setup.quick else (8, 1):
            add("causal", dtype, wide, kv_heads)
            add("documents", dtype, wide, kv_heads, documents=ids)
    return found


def attend(
    case: Case, kernel: Any, setup: Setup, grad: bool = True, sp: longspan.SequenceSharding | None = None
) -> dict[str, Tensor]:
    """Return the output of the full sequence, and this rank's part of the gradients, on the CPU.

    `sp` is by default that of one device.
    """
    sp = sp or setup.one_device()
    x = {name: t.to(setup.device) for name, t in make(case).items()}
    leaves = {name: t.requires_grad_(grad) for name, t in x.items() if name in ("q", "k", "v", "sinks")}
    q, k, v = (sp.shard(leaves[name]) for name in "qkv")
    out = longspan.attention(q, k, v, sp, sinks=leaves.get("sinks"), kernel=kernel, **options_of(case, x))
    if grad:
        out.backward(sp.shard(x["grad"]).to(out.dtype))
    found = {"out": sp.gather(out.detach(), length=case.n)}
    found |= {f"d{name}": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    return {name: t.cpu().double() for name, t in found.items()}


def options_of(case: Case, x: dict[str, Tensor]) -> dict[str, Any]:
    """Return `options` of a case, with the ids of documents on the host, which reads them."""
    return {name: t.cpu() if name == "documents" and t is not None else t for name, t in options(case, x).items()}


def accuracy(setup: Setup) -> Iterator[Row]:
    """Every kernel but those that compile, every kind of mask, head_dim and number of KV heads, forward and backward,
    against fp64."""
    for kernel, (name, dtype) in itertools.product(NAMES[1:], DTYPES.items()):
        tried = {what: case for what, case in cases(setup).items() if case.dtype == dtype}
        yield setup.row(f"{kernel}, {name}", functools.partial(against_fp64, setup, kernel, tried), 5.0)


def flex(setup: Setup) -> Iterator[Row]:
    """FlexAttention, whose compilation takes most of the time, on three kinds of masks: forward and backward, against
    fp64. It has no backward without a GPU."""
    for what, case in cases(setup).items():
        if what.startswith(FLEX) and case.dtype == BF16:
            measure = functools.partial(against_fp64, setup, "flex", {what: case}, grad=setup.on_gpu)
            yield setup.row(what, measure, 20.0)


def against_fp64(setup: Setup, kernel: str, tried: dict[str, Case], grad: bool = True) -> tuple[str, str, float]:
    """Return figure, verdict and largest error of a kernel."""
    worst, where, runs, left_out, raised = 0.0, "", 0, 0, False
    bad, refused = [], set[str]()
    for name, case in tried.items():
        try:
            if not setup.time_left(5.0 if setup.on_gpu else 1.0):
                left_out += 1
                continue
            found = errors(case, attend(case, kernel, setup, grad))
        except LongspanError as error:
            refused.add(str(error).split(";")[0])
            continue
        except Exception as error:  # the other cases still run
            raised = True
            bad.append(f"{name}: {brief(error)}")
            continue
        runs += 1
        of, error = max(found.items(), key=lambda item: item[1])
        if error >= worst:
            worst, where = error, f"{of} of {name}"
        if error > MARGIN:
            bad.append(f"{of} of {name}: {error:.3g}")
    figure = f"{worst:.2f} of {MARGIN:g} at most ({where}; {runs} cases)"
    figure += "".join(f"; {text}" for text in [*bad, *refused, *[f"{left_out} cases not begun"][: left_out > 0]])
    verdict = FAILED if raised else WRONG if bad else OK if runs else f"{SKIPPED}: no case"
    return figure, verdict, worst


# --- speed


Kernels = Mapping[str, tuple[str, Callable[[], contextlib.AbstractContextManager[Any]]]]
"""Label -> the kernel's name, and what must be patched while it runs."""

PLAIN: Kernels = {name: (name, contextlib.nullcontext) for name in NAMES}


def speed(setup: Setup) -> Iterator[Row]:
    """TFLOP/s of each kernel, forward and backward, by mask; "auto" should be within a tenth of the fastest."""
    causal = [("causal", n, {}, Mask()) for n in setup.size((16384, 131072), (256,))]
    more = [("causal", n, {}, Mask()) for n in setup.size((65536, 32768), ())]
    for tried in (*causal, *_packed(setup), *more):
        yield from _speed_of(setup, *tried)


def _packed(setup: Setup) -> list[tuple[str, int, dict[str, Any], Mask]]:
    """Return documents and a window: name, tokens, options, mask."""
    n = setup.size(16384, 256)
    cuts = torch.linspace(0, n, 33).round().to(torch.int64)
    segments = (tuple(itertools.pairwise(cuts.tolist())),)
    return [
        ("32 documents", n, {"cu_seqlens": cuts}, Mask(segments=segments)),
        ("a window of an eighth", n, {"window": n // 8}, Mask(window=n // 8)),
    ]


def _speed_of(
    setup: Setup, mask_name: str, n: int, how: dict[str, Any], mask: Mask, kernels: Kernels = PLAIN
) -> Iterator[Row]:
    heads, _, dim = _sizes(setup)
    what = f"{mask_name}, {n:,} tokens"
    flops = 4 * heads * dim * sum(region.pairs for region in mask.regions(0, n, n))
    rates: dict[str, tuple[float, float, float]] = {}
    for label, (kernel, patched) in kernels.items():
        if not setup.time_left(10.0 if setup.on_gpu else 1.0):
            yield Row(f"{label}, {what}", "", f"{STOPPED}: the item's time was up")
            continue
        try:
            with patched():
                forward, both = both_ways(setup, n, kernel=kernel, **how)
                f = setup.seconds(forward)
                b = max(setup.seconds(both) - f, 1e-9)
        except LongspanError:  # such as cudnn with a window, or what is not installed
            continue
        except Exception as error:
            yield Row(f"{label}, {what}", brief(error), FAILED)
            continue
        rates[label] = flops / f / 1e12, 2.5 * flops / b / 1e12, f + b
    for label, (f_rate, b_rate, seconds) in rates.items():
        slower = seconds / min(each for *_, each in rates.values())
        verdict = MEASURED if label != "auto" or not setup.on_gpu else OK if slower <= 1.1 else BELOW
        figure = f"forward {f_rate:.4g}, backward {b_rate:.4g} TFLOP/s; {slower:.2f} x the fastest's time"
        yield Row(f"{label}, {what}", figure, verdict, {"forward": f_rate, "backward": b_rate})


def flash4(setup: Setup) -> Iterator[Row]:
    """FlashAttention-4 (PyPI: flash-attn-4) in the calls of kernel "flash", beside torch's FlashAttention-2 and flex:
    against fp64, then TFLOP/s. `kernel_with_lse` cannot run it: the log-sum-exp that it returns has no gradient."""
    try:
        functions = flash4_functions(importlib.import_module("flash_attn.cute.interface"))
    except ImportError as error:
        yield Row("FlashAttention-4", "", f"{SKIPPED}: flash-attn-4 is not installed ({brief(error)})")
        return
    patched = functools.partial(mock.patch.multiple, flash, **functions)
    masks = ("causal", "window", "documents", "documents in a window", "bidirectional")
    dim = setup.size(128, 16)
    tried = {
        what: case
        for what, case in cases(setup).items()
        if what.split(",")[0] in masks and case.dtype == BF16 and f"D={dim}," in what
    }
    with patched():
        yield setup.row("FlashAttention-4, bf16", functools.partial(against_fp64, setup, "flash", tried), 5.0)
    kernels = {"FlashAttention-2": PLAIN["flash"], "FlashAttention-4": ("flash", patched)}
    kernels |= {"flex": ("flex", contextlib.nullcontext)} if setup.on_gpu else {}  # it has no backward on a CPU
    for each in (*_packed(setup), ("causal", setup.size(16384, 256), {}, Mask())):
        yield from _speed_of(setup, *each, kernels)


def flash4_functions(interface: Any) -> dict[str, Any]:
    """Return FlashAttention-4's forward and backward, called as torch's, which kernel "flash" calls."""

    def how(ends: Sequence[Any], causal: bool, scale: float, left: int, right: int) -> dict[str, Any]:
        of_q, of_k, longest_q, longest_k = ends
        varlen = {"cu_seqlens_q": of_q, "cu_seqlens_k": of_k, "max_seqlen_q": longest_q, "max_seqlen_k": longest_k}
        limits = (None if limit < 0 else limit for limit in (left, right))
        window = dict(zip(("window_size_left", "window_size_right"), limits, strict=True))
        return {"softmax_scale": scale, "causal": causal, **window, **({} if of_q is None else varlen)}

    def forward(
        q: Tensor, k: Tensor, v: Tensor, *more: Any, scale: float, window_size_left: int, window_size_right: int
    ) -> Any:
        *ends, _, causal, _ = more
        options = how(ends, causal, scale, window_size_left, window_size_right)
        return interface._flash_attn_fwd(q, k, v, return_lse=True, **options)

    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *more: Any, scale: float,
        window_size_left: int, window_size_right: int,
    ) -> Any:  # fmt: skip
        *ends, _, causal, _, _ = more
        options = how(ends, causal, scale, window_size_left, window_size_right)
        return interface._flash_attn_bwd(q, k, v, out, grad.contiguous(), lse, **options)

    return {"_flash": forward, "_flash_backward": backward}


def first_calls(setup: Setup) -> Iterator[Row]:
    """Forward and backward at 20 new lengths: the first call, for which cuDNN builds a plan, and the second."""
    lengths = [setup.size(8192, 64) - setup.size(129, 3) * i for i in range(20)]
    for kernel in ("cudnn", "flash", "sdpa"):

        def measure(kernel: str = kernel) -> tuple[str, str, dict[str, list[float]]]:
            found: dict[str, list[float]] = {"first": [], "second": []}
            for n in lengths:
                _, both = both_ways(setup, n, kernel=kernel)
                for times in found.values():
                    setup.wait()
                    begin = time.perf_counter()
                    both()
                    setup.wait()
                    times.append(time.perf_counter() - begin)
            first, second = (1e3 * statistics.median(times) for times in found.values())
            return f"first call {first:.2f} ms, second {second:.2f} ms (medians)", MEASURED, found

        yield setup.row(f"{kernel}, {lengths[-1]:,} to {lengths[0]:,} tokens", measure, 5.0)


def _sizes(setup: Setup) -> tuple[int, int, int]:
    return setup.size((32, 8, 128), (4, 2, 32))


def both_ways(
    setup: Setup, n: int, dtype: torch.dtype = BF16, dim: int = 0, **how: Any
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return a forward, and a forward with its backward."""
    heads, kv_heads, usual = _sizes(setup)
    g = torch.Generator(setup.device).manual_seed(0)
    q, k, v, grad = (
        torch.randn(1, n, h, dim or usual, device=setup.device, generator=g, dtype=dtype)
        for h in (heads, kv_heads, kv_heads, heads)
    )
    sp = setup.one_device()

    def forward() -> Tensor:
        return longspan.attention(q.detach(), k.detach(), v.detach(), sp, **how)

    def both() -> None:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        longspan.attention(*leaves, sp, **how).backward(grad)

    return forward, both
