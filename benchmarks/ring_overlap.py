"""Does a ring hide its communication? Ring Attention over links as slow as the attention takes long.

    python -m benchmarks.ring_overlap        # as root, on Linux (see cluster.py)

A ring of R ranks computes R blocks and passes keys and values on R - 1 times; the next block is in flight while the
current one is computed. Links have the rate at which a hop takes as long as a block of the forward, both measured. This
is the hardest case: slower links cannot be hidden, faster ones have less to hide. Measured in the same processes:

    ring       `longspan.attention`
    computing  the same calls without sending     (the ring's `post` does nothing; blocks hold old values)
    sending    the same calls without computing   (the tiles' kernels do nothing)

Goal: ring <= 1.15 x max(computing, sending). `bound` is the minimum for the order of the steps, as not every round has
as much to send as to compute.

Each rank is pinned to a core. With more ranks than cores they take turns, also when computing alone. Sending needs CPU
time too, which it does not on GPUs. Two columns separate this from waiting: the share of the ring's time in which cores
were idle (none in a perfect overlap), and the ring's CPU time beyond that of computing alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F

import longspan
from benchmarks import cluster, common
from longspan.attn.kernels.tiled import TiledKernel

GOAL = 1.15
DIM = 64
PASSES = ("forward", "backward")
# The C library keeps freed blocks of up to 32 MiB, as GPU allocators do: fresh pages for every hop would be timed too.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
# Ranks, the layout, whether causal, tokens of a rank.
CASES = {
    "ring of 2, bidirectional": (2, "contiguous", False, 6144),
    "ring of 4, bidirectional": (4, "contiguous", False, 3072),
    "ring of 4, causal, zigzag": (4, "zigzag", True, 4096),
}


def main(
    cases: tuple[str, ...] = tuple(CASES), heads: int = 4, kv_heads: int = 4, repeats: int = 9,
    name: str = "ring-overlap",
) -> None:  # fmt: skip
    """Measure some of `CASES`."""
    env = common.environment(["longspan", "torch"])
    env["ranks"] = "each in a network namespace and pinned to a core, gloo over slow links (tc tbf), 1 thread each"
    results = [measure_case(case, heads, kv_heads, repeats) for case in cases]
    text = describe(results, heads, kv_heads)
    common.write_report(name, "How much of its communication a ring hides", env, text, results)


def measure_case(name: str, heads: int, kv_heads: int, repeats: int) -> dict[str, Any]:
    ranks, layout, causal, tokens = CASES[name]
    task = {"layout": layout, "causal": causal, "tokens": tokens, "heads": heads, "kv_heads": kv_heads}
    cores = sorted(os.sched_getaffinity(0))
    with cluster.hosts(ranks) as net:
        task |= {"repeats": repeats, "net": dataclasses.asdict(net)}
        measured = cluster.run_on(net, measure, timeout=1800, cores=cores, env=KEEP_MEMORY, **task)
    block_bytes = 2 * tokens * kv_heads * DIM * 4
    shape = {"ranks": ranks, "cores": min(ranks, len(cores)), "tokens_per_rank": tokens, "block_bytes": block_bytes}
    result = {"case": name, **shape, **measured}
    print(f"{name}: links of {result['rate']}", {p: f"{ring_over_max(result[p]):.3f}" for p in PASSES}, flush=True)
    return result


# --- a rank -----------------------------------------------------------------------------------------


def measure(
    layout: str, causal: bool, tokens: int, heads: int, kv_heads: int, repeats: int, net: dict[str, Any]
) -> dict[str, Any]:
    """The rate of the links, and seconds of the clock and of the CPU of every candidate, round by round."""
    ranks = dist.get_world_size()
    mesh = longspan.init_mesh(ring=ranks)
    ring = longspan.SequenceSharding(mesh, layout=layout)
    n = ranks * tokens
    torch.manual_seed(0)  # the same full sequence on every rank
    whole = [torch.randn(1, n, h, DIM) for h in (heads, kv_heads, kv_heads)]
    qkv = [ring.shard(x).clone().requires_grad_() for x in whole]
    grad = torch.randn_like(qkv[0])

    def attention() -> torch.Tensor:
        return longspan.attention(*qkv, ring, causal=causal, length=n)

    out = attention()
    q, k, v = (x.transpose(1, 2) for x in whole)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True).transpose(1, 2)
    if (error := common.relative_error(out, ring.shard(expected))) > 1e-4:
        raise RuntimeError(f"the ring is off by {error:.1e}")
    del expected, q, k, v, whole

    def forward() -> None:
        with torch.no_grad():
            attention()

    def backward() -> None:
        torch.autograd.grad(out, qkv, grad, retain_graph=True)

    answer: dict[str, Any] = {}
    for name, by_ring in (("forward", forward), ("backward", backward)):
        alone: dict[str, Callable[[], object]] = {
            "computing": inside(nothing_sent, by_ring),
            "sending": inside(nothing_computed, by_ring),
        }
        if name == "forward":
            answer["rate"] = match_links(alone, ranks, cluster.Hosts(**net))
        wall, cpu = common.alternate({"ring": by_ring, **alone}, repeats)
        answer[name] = {"wall": wall, "cpu": cpu}
    return answer


def match_links(alone: dict[str, Callable[[], object]], ranks: int, net: cluster.Hosts) -> str:
    """Give the links the rate at which a hop takes as long as a block, and say which that is."""
    assert net.rate is not None
    bits = cluster.bits_per_second(net.rate)
    rate = net.rate
    for _ in range(3):  # what a link carries is not what a hop gets of it: try, measure, mend
        wall, _ = common.alternate(alone, 5)
        bits *= common.median(wall["sending"]) / (ranks - 1) / (common.median(wall["computing"]) / ranks)
        rate = f"{bits / 1e6:.0f}mbit"
        if dist.get_rank() == 0:
            cluster.set_rate(net, rate)
    return rate


def inside(
    context: Callable[[], contextlib.AbstractContextManager[None]], work: Callable[[], None]
) -> Callable[[], None]:
    def run() -> None:
        with context():
            work()

    return run


@contextlib.contextmanager
def nothing_sent() -> Iterator[None]:
    with mock.patch.object(importlib.import_module("longspan.attn.methods.ring"), "post", lambda *_, **__: []):
        yield


@contextlib.contextmanager
def nothing_computed() -> Iterator[None]:
    nothing = {"accumulate": lambda *_: None, "accumulate_gradients": lambda *_: None}
    with mock.patch.multiple(TiledKernel, **nothing):
        yield


# --- the report -------------------------------------------------------------------------------------


def ring_over_max(measured: dict[str, Any]) -> float:
    """Median over the rounds of ring / max(computing, sending)."""
    wall = measured["wall"]
    longer = [max(pair) for pair in zip(wall["computing"], wall["sending"], strict=True)]
    return common.paired_ratio(wall["ring"], longer)


def bound(name: str, ranks: int, computing: float, sending: float) -> float:
    """The least seconds of this order of steps, for a ring of R that takes `computing` and `sending` alone.

    Forward: R blocks are computed, and all but the last hide a hop. Backward: the same hops; from round 2 on the
    gradients (fp32, as long as the blocks) of the round before go behind them. Half of a rank's own block hides the
    first hop, the other half the last gradient's way home.
    """
    block, hops = computing / ranks, ranks - 1
    if name == "forward":
        return hops * max(block, sending / hops) + block
    hop = sending / (2 * hops)
    in_flight = [hop * ((turn < hops) + (turn >= 2)) for turn in range(1, ranks)]
    return 2 * max(block / 2, hop) + sum(max(block, load) for load in in_flight)


def describe(results: list[dict[str, Any]], heads: int, kv_heads: int) -> str:
    rows = []
    for result in results:
        ranks = result["ranks"]
        for name in PASSES:
            wall, cpu = result[name]["wall"], result[name]["cpu"]
            t = {candidate: common.median(times) for candidate, times in wall.items()}
            longer = max(t["computing"], t["sending"])
            least = bound(name, ranks, t["computing"], t["sending"])
            hidden = (t["computing"] + t["sending"] - t["ring"]) / min(t["computing"], t["sending"])
            busy = common.median([c / w for c, w in zip(cpu["ring"], wall["ring"], strict=True)]) / result["cores"]
            more = common.paired_ratio(cpu["ring"], cpu["computing"]) - 1
            rows.append(
                [result["case"], name, result["rate"]]
                + [f"{t[candidate]:.3f}" for candidate in ("computing", "sending", "ring")]
                + [f"{ring_over_max(result[name]):.3f}", f"{least / longer:.3f}"]
                + [f"{share:.0%}" for share in (hidden, 1 - busy, more)]
            )
    tokens = ", ".join(f"{result['tokens_per_rank']:,}" for result in results)
    header = ["", "pass", "links", "computing s", "sending s", "ring s"]
    header += ["ring / max", "bound / max", "hidden", "cores idle", "more CPU"]
    return "\n".join(
        [
            common.table(header, rows),
            "",
            f"- goal: ring / max at most {GOAL}; max is that of computing and sending alone, and the ratio the median",
            "  over the rounds of the ratio within a round. Seconds are medians, of the slowest rank.",
            "- bound: the ratio if each hop overlaps with a block, and only hops without a block are exposed.",
            "- hidden: (computing + sending - ring) / the shorter of the two; 100 % is a perfect overlap.",
            "- cores idle: the share of the ring's time in which its cores had nothing to do.",
            "- more CPU: the ring's CPU time beyond that of computing alone. It cannot be hidden where ranks are CPUs.",
            f"- fp32, {heads}/{kv_heads} heads of {DIM}, batch 1; tokens of a rank: {tokens}.",
        ]
    )


if __name__ == "__main__":
    cluster.exit_on_missing(lambda: common.command(main, __doc__))
