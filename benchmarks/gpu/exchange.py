"""Communication on one GPU: four ranks over a transport that is as late as possible, and NCCL in a group of one."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import longspan
from benchmarks.common import DTYPES
from benchmarks.gpu import model
from benchmarks.gpu.kernels import BF16, attend, cases
from benchmarks.gpu.setup import BELOW, MEASURED, OK, WRONG, Row, Setup
from longspan.comm.agree import gather_numbers
from longspan.comm.all_to_all import (
    gather_heads,
    head_spans,
    scatter_heads,
    start_gather,
    start_scatter,
    write_heads,
)
from longspan.comm.collectives import P2PMessage, post, wait_for
from longspan.core.heads import split_heads
from longspan.core.memory import Memory
from tests.attn.late import LateTransport
from tests.fakes import fake_world
from tests.oracle import Case, errors
from tests.tolerance import MARGIN

RANKS = 4
MESHES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "USP 2 x 2": ({"ring": 2, "ulysses": 2}, {}),
    "ulysses 4, heads in two chunks": ({"ulysses": 4}, {"overlap_chunks": 2}),
    "ring 4": ({"ring": 4}, {}),
    "ulysses 4": ({"ulysses": 4}, {}),
}
MASKS = ("documents and sinks", "window", "causal", "bidirectional")


def late(setup: Setup) -> Iterator[Row]:
    """Attention of four ranks over a transport that is as late as possible, output and gradients against fp64; and the
    rate at which the all-to-all packs and unpacks."""
    for kernel, masks in (("auto", MASKS), ("cudnn", MASKS[2:])):
        for dtype, what in itertools.product(DTYPES, MESHES):
            tried = {mask: case_of(setup, mask, DTYPES[dtype]) for mask in masks[: setup.size(4, 1)]}
            yield setup.row(
                f"{what}, {kernel}, {dtype}", functools.partial(on_mesh, setup, *MESHES[what], kernel, tried), 5.0
            )
    yield from _copies(setup)


def case_of(setup: Setup, mask: str, dtype: torch.dtype) -> Case:
    """Return a case whose length the ranks do not divide."""
    case = next(c for name, c in cases(setup).items() if name.startswith(f"{mask}, ") and c.dtype == dtype)
    return dataclasses.replace(case, n=case.n - 3, documents=case.documents and case.documents[3:])


def on_mesh(
    setup: Setup, axes: dict[str, int], options: dict[str, Any], kernel: str, tried: dict[str, Case]
) -> tuple[str, str, float]:
    """Return figure, verdict and largest error of some cases on a mesh of four ranks."""
    transport, found = LateTransport(setup.device), dict[str, dict[str, Tensor]]()
    while transport.unsettled():
        found = {}
        for rank in range(RANKS):
            with fake_world(rank, RANKS), transport.installed():
                sp = longspan.SequenceSharding(longspan.init_mesh(**axes, device_type=setup.device), **options)
                for what, case in tried.items():
                    transport.begin(what)
                    mine = attend(case, kernel, setup, sp=sp)
                    sums = found.setdefault(what, {})
                    sums.update({k: sums.get(k, 0) + x if k != "out" else x for k, x in mine.items()})
    worst, where = max(
        (error, f"{of} of {what}") for what, case in tried.items() for of, error in errors(case, found[what]).items()
    )
    figure = f"{worst:.2f} of {MARGIN:g} at most ({where}; {len(tried)} masks, {transport.passes} passes)"
    return figure, OK if worst <= MARGIN else WRONG, worst


def _copies(setup: Setup) -> Iterator[Row]:
    n, heads, kv_heads, dim = setup.size(32768, 512), 32, 8, 128
    xs = [torch.empty(1, n, h, dim, dtype=BF16, device=setup.device).normal_() for h in (heads, kv_heads, kv_heads)]
    nbytes, into = sum(x.nbytes for x in xs), torch.empty_like(xs[0])
    copy = 2 * into.nbytes / setup.seconds(lambda: into.copy_(xs[0]))
    yield Row("a plain copy", f"{copy / 1e9:.0f} GB/s", MEASURED, copy)
    with fake_world(0, 8), mock.patch.object(dist, "all_to_all_single", lambda *_, **__: None):
        group, shards = dist.group.WORLD, split_heads(heads, kv_heads, 8)
        kinds = ["q", "kv", "kv"]
        spans = head_spans(shards, kinds)
        packed = scatter_heads(xs, kinds, shards, group)
        out = packed[..., : heads // 8 * dim].unflatten(2, (-1, dim)).transpose(0, 1).contiguous()

        def unpack() -> object:  # as the backward of the scatter
            started = start_gather(packed, [dim] * 3, spans, group, overlapped=False)
            write_heads(started.wait(), xs, spans, [False] * 3)
            return None

        for what, run, size in (
            ("scatter_heads packs q, k and v", lambda: scatter_heads(xs, kinds, shards, group), nbytes),
            ("its backward unpacks their gradients", unpack, nbytes),
            ("gather_heads packs and unpacks the output", lambda: gather_heads(out, shards, group), 2 * xs[0].nbytes),
        ):
            rate = 2 * size / setup.seconds(run)
            verdict = MEASURED if not setup.on_gpu else OK if rate >= 0.85 * copy else BELOW
            figure = f"{rate / 1e9:.0f} GB/s, {rate / copy:.2f} of a plain copy (goal 0.85)"
            yield Row(f"{what}, {n:,} tokens of 8 ranks", figure, verdict, rate / copy)


# --- NCCL in a group of one


def nccl(setup: Setup) -> Iterator[Row]:
    """NCCL, and gloo beside it, in a group of one (on a CPU gloo alone): asynchronous all-to-all, messages to oneself,
    FSDP2 with weights in host memory, and CPU and GPU tensors in flight together."""
    device = torch.device(setup.device, 0) if setup.on_gpu else None
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if setup.on_gpu else "gloo", store=dist.HashStore(), rank=0, world_size=1, device_id=device
    )  # type: ignore[attr-defined]
    try:
        for what, check in {
            "an all-to-all in flight": _all_to_all,
            "a message to oneself": _to_oneself,
            "gloo and NCCL in flight together": _together,
            "FSDP2 with weights in host memory": functools.partial(
                model.check, memory=Memory(cpu_offload=True), dtype=BF16, fsdp=True
            ),
        }.items():
            yield setup.row(what, functools.partial(check, setup), 5.0)
    finally:
        dist.destroy_process_group()


def _all_to_all(setup: Setup) -> tuple[str, str]:
    q, k = (torch.randn(1, setup.size(8192, 64), heads, 64, device=setup.device) for heads in (8, 2))
    spans = head_spans(split_heads(8, 2, 1), ["q", "kv"])
    started = start_scatter([q, k], spans, dist.group.WORLD, overlapped=True)
    expected = torch.cat([q, k], 2).transpose(0, 1).flatten(2)
    return f"{q.nbytes + k.nbytes:,} bytes", OK if torch.equal(started.wait(), expected) else WRONG


def _to_oneself(setup: Setup) -> tuple[str, str]:
    sent = [torch.randn(setup.size(1 << 20, 100), device=setup.device) for _ in range(2)]
    received = [torch.full_like(x, torch.nan) for x in sent]
    messages = [[P2PMessage(x, 0, tag) for tag, x in enumerate(xs)] for xs in (sent, received)]
    # gloo connects no rank to itself.
    with contextlib.nullcontext() if setup.on_gpu else LateTransport(setup.device).installed():
        wait_for(post(*messages, dist.group.WORLD))
    return "two messages", OK if all(map(torch.equal, received, sent)) else WRONG


def _together(setup: Setup) -> tuple[str, str]:
    group = dist.group.WORLD
    xs = [torch.full((1 << 16,), 3.0, device=device) for device in (setup.device, "cpu") for _ in range(2)]
    works = [dist.all_reduce(x, group=group, async_op=True) for x in xs]
    rows = gather_numbers([5, 7], group)
    for work in works:
        work.wait()
    right = rows == [[5, 7]] and all(bool((x == 3).all()) for x in xs)
    return f"{len(xs)} all-reduces and a gather", OK if right else WRONG
