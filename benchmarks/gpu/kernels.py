"""Every kernel against fp64: outputs and gradients, in units of rounding (`tests/tolerance.py`)."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import longspan
from benchmarks.gpu.setup import FAILED, MEASURED, OK, SKIPPED, STOPPED, WRONG, Row, Setup, brief
from longspan.compat.torch_attention import active_flash
from longspan.core.errors import LongspanError
from tests.oracle import Case, errors, make, options, truth_of
from tests.tolerance import MARGIN, NOT_MORE

NAMES = ("auto", "sdpa", "flash", "tiled", "cudnn", "flash_attn", "eager", "flex", "flash3", "flash4")
"""Names of kernels: slow ones, which compile, come late, and those that replace torch's flash attention last."""

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


def attend(case: Case, kernel: Any, setup: Setup, autocast: bool = False) -> dict[str, Tensor]:
    """Return output and gradients of one case, on the CPU."""
    x = {name: t.to(setup.device) for name, t in make(case).items()}
    leaves = {name: t.requires_grad_() for name, t in x.items() if name in ("q", "k", "v", "sinks")}
    with torch.autocast(setup.device, BF16) if autocast else contextlib.nullcontext():
        out = longspan.attention(
            leaves["q"], leaves["k"], leaves["v"], setup.one_device(),
            sinks=leaves.get("sinks"), kernel=kernel, **options_of(case, x),
        )  # fmt: skip
    out.backward(x["grad"].to(out.dtype))
    found = {"out": out, **{f"d{name}": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}}
    return {name: t.detach().cpu() for name, t in found.items()}


def options_of(case: Case, x: dict[str, Tensor]) -> dict[str, Any]:
    """Return `options` of a case, with the ids of documents on the host, which reads them."""
    return {name: t.cpu() if name == "documents" and t is not None else t for name, t in options(case, x).items()}


@dataclass
class _Tally:
    """Outcomes of one kernel in one dtype."""

    worst: float = 0.0
    where: str = ""
    runs: int = 0
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    refused: dict[str, list[str]] = field(default_factory=dict)


def chosen(case: Case, kernel: str, setup: Setup) -> tuple[str, str]:
    """Return the kernel that is used for `kernel`, and the reason."""
    x = {name: t.to(setup.device) for name, t in make(case).items()}
    q, k, v = (x[name].requires_grad_() for name in "qkv")
    choice = longspan.explain_kernel(
        q, k, v, setup.one_device(), kernel=kernel, sinks=x.get("sinks"), **options_of(case, x)
    )  # fmt: skip
    return choice.name, choice.reason


def accuracy(setup: Setup) -> Iterator[Row]:
    """Every kernel, every kind of mask, head_dim and number of KV heads, forward and backward, against fp64."""
    tallies: dict[tuple[str, str], _Tally] = {}
    seen: set[tuple[str, str]] = set()
    left_out = 0
    for kernel in NAMES:
        for name, case in cases(setup).items():
            if not setup.time_left(8.0 if setup.on_gpu else 1.0):
                left_out += 1
                continue
            _one(setup, kernel, name, case, tallies, seen)
    for (kernel, dtype), tally in tallies.items():
        yield from _rows(kernel, dtype, tally)
    if left_out:
        yield Row("runs that were left out", str(left_out), f"{STOPPED}: the item's time was up")


def _one(
    setup: Setup, kernel: str, name: str, case: Case,
    tallies: dict[tuple[str, str], _Tally], seen: set[tuple[str, str]],
) -> None:  # fmt: skip
    dtype = "bf16" if case.dtype == BF16 else "fp32"
    try:
        real, _ = chosen(case, kernel, setup)
    except LongspanError as error:
        if "unknown" not in str(error):
            reason = str(error).split(";")[0]
            tallies.setdefault((kernel, dtype), _Tally()).refused.setdefault(reason, []).append(name)
        return
    if (real, name) in seen:
        return
    own_flash()
    seen.add((real, name))
    tally = tallies.setdefault((real, dtype), _Tally())
    try:
        found = errors(case, attend(case, kernel, setup))
    except Exception as error:  # the other kernels still run
        tally.failed.append(f"{name}: {brief(error)}")
        return
    tally.runs += 1
    what, worst = max(found.items(), key=lambda item: item[1] if math.isfinite(item[1]) else math.inf)
    if worst > tally.worst or not math.isfinite(worst):
        tally.worst, tally.where = worst, f"{what} of {name}"
    if not worst <= MARGIN:
        tally.wrong.append(f"{what} of {name}: {worst:.3g}")


def _rows(kernel: str, dtype: str, tally: _Tally) -> Iterator[Row]:
    what = f"{kernel}, {dtype}"
    if tally.runs:
        figure = f"{tally.worst:.2f} of {MARGIN:g} at most ({tally.where}; {tally.runs} cases)"
        yield Row(what, figure, WRONG if tally.wrong else OK, dataclasses.asdict(tally))
    for line in tally.wrong:
        yield Row(what, line, WRONG)
    for line in tally.failed:
        yield Row(what, line, FAILED)
    for reason, names in tally.refused.items():
        yield Row(what, f"{len(names)} cases, such as {names[0]}", f"{SKIPPED}: {reason}")


def autocast(setup: Setup) -> Iterator[Row]:
    """Attention of bf16 tensors inside and outside of `torch.autocast`: fp32 parts must stay fp32."""
    n, dim = setup.size(600, 64), setup.size(128, 16)
    base = Case(n, 1, 8, 2, dim, dim, dtype=BF16)
    for what, case in {
        "causal": base,
        "documents": dataclasses.replace(base, documents=tuple(i * 5 // n for i in range(n))),
        "softcap": dataclasses.replace(base, softcap=20.0),
    }.items():
        seen = set()
        for kernel in ("auto", "tiled"):
            try:
                real, _ = chosen(case, kernel, setup)
            except LongspanError:
                continue
            if real in seen:
                continue
            seen.add(real)
            outside, inside = (_distances(case, attend(case, kernel, setup, cast)) for cast in (False, True))
            name, ratio = max(((k, inside[k] / outside[k]) for k in inside), key=lambda item: item[1])
            figure = f"{ratio:.3f} of {NOT_MORE:g} at most (error inside over outside, {name})"
            yield Row(f"{real}, {what}", figure, OK if ratio <= NOT_MORE else WRONG, ratio)


def _distances(case: Case, found: dict[str, Tensor]) -> dict[str, float]:
    truth = truth_of(case)
    return {name: float((y.double() - truth[name]).norm() / truth[name].norm()) for name, y in found.items()}


def choices(setup: Setup) -> Iterator[Row]:
    """The choice of "auto" for each kind of mask, and the reason."""
    for name, case in cases(setup).items():
        if case.dtype != BF16 or case.kv_heads != 2 or case.dim != setup.size(128, 16):
            continue
        with contextlib.suppress(LongspanError):
            kernel, reason = chosen(case, "auto", setup)
            yield Row(name, f"{kernel}: {reason}", MEASURED)


def own_flash() -> None:
    """Restore torch's own flash attention after "flash3" or "flash4" replaced it."""
    if active_flash() is not None:
        torch.nn.attention.restore_flash_attention_impl()


@functools.cache
def known(setup: Setup) -> tuple[str, ...]:
    """Return one name of each kernel that supports a causal mask without gradients."""
    found: dict[str, str] = {}
    q = torch.empty(1, 16, 8, 64, dtype=BF16, device=setup.device)
    for name in NAMES[1:]:
        with contextlib.suppress(LongspanError):
            found.setdefault(longspan.explain_kernel(q, q, q, setup.one_device(), kernel=name).name, name)
    return tuple(found.values())
