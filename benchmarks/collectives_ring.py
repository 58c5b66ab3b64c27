"""Compare collectives written out (AllGather through one rank and as a ring, ReduceScatter, AllReduce) with gloo's.

    python benchmarks/collectives_ring.py        # as root, on Linux (see cluster.py)

Each of four hosts has its own link of 1 Gbit/s, so that time is bytes over the busiest link: `ring_all_gather` sends
n (P-1) bytes from every rank, `naive_all_gather` n (P-1) P from one, after it has received n (P-1). In theory the ring
is P + 1 times faster, and its busiest rank sends P times less. Results are compared before they are timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cluster
import common
import torch
import torch.distributed as dist
from plain_collectives import naive_all_gather, ring_all_gather, ring_all_reduce, ring_reduce_scatter

SENT = Path(f"/sys/class/net/{cluster.INTERFACE}/statistics/tx_bytes")

# Name -> the bytes its busiest rank sends, and the bytes one after the other on the busiest link; in parts of n bytes.
THEORY: dict[str, Callable[[int], tuple[int, int]]] = {
    "naive_all_gather": lambda P: ((P - 1) * P, (P - 1) * (P + 1)),
    "ring_all_gather": lambda P: (P - 1, P - 1),
    "backend's all-gather": lambda P: (P - 1, P - 1),
    "ring_reduce_scatter": lambda P: (P - 1, P - 1),
    "backend's reduce-scatter": lambda P: (P - 1, P - 1),
    "ring_all_reduce": lambda P: (2 * (P - 1), 2 * (P - 1)),
    "backend's all-reduce": lambda P: (2 * (P - 1), 2 * (P - 1)),
}
PAIRS = (
    ("naive_all_gather", "ring_all_gather"),
    ("backend's all-gather", "ring_all_gather"),
    ("backend's reduce-scatter", "ring_reduce_scatter"),
    ("backend's all-reduce", "ring_all_reduce"),
)


def main(
    ranks: int = 4, rate: str = "1gbit", kib: tuple[int, ...] = (256, 2048, 16384), repeats: int = 9,
    name: str = "collectives-ring",
) -> None:  # fmt: skip
    """Time parts of `kib` KiB a rank over links of a `rate`."""
    env = common.environment(["longspan", "torch"])
    env["ranks"] = f"each in a network namespace, gloo over links of {rate} (tc tbf), 1 thread each"
    with cluster.hosts(ranks, rate) as net:
        results = cluster.run_on(net, measure_all, timeout=1800, kib=kib, repeats=repeats)
        text = describe(results, ranks, net)
    common.write_report(name, "Collectives as rings, over slow links", env, text, results)


def measure_all(kib: list[int], repeats: int) -> list[dict[str, Any]]:
    return [measure(each << 10, repeats) for each in kib]


def measure(n: int, repeats: int) -> dict[str, Any]:
    """Seconds of every candidate, round by round, and the bytes that each rank's interface sent in one run."""
    group, ranks, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    part = torch.full((n // 4,), float(rank))
    whole = torch.arange(ranks, dtype=torch.float32).repeat_interleave(n // 4) + rank
    gathered, scattered, reduced = torch.empty_like(whole), torch.empty_like(part), torch.empty_like(whole)

    def all_reduce() -> torch.Tensor:
        dist.all_reduce(reduced.copy_(whole))
        return reduced

    def all_gather() -> torch.Tensor:
        dist.all_gather_into_tensor(gathered, part)
        return gathered

    def reduce_scatter() -> torch.Tensor:
        dist.reduce_scatter_tensor(scattered, whole)
        return scattered

    candidates: dict[str, Callable[[], torch.Tensor]] = {
        "naive_all_gather": lambda: naive_all_gather(part, group),
        "ring_all_gather": lambda: ring_all_gather(part, group),
        "backend's all-gather": all_gather,
        "ring_reduce_scatter": lambda: ring_reduce_scatter(whole, group),
        "backend's reduce-scatter": reduce_scatter,
        "ring_all_reduce": lambda: ring_all_reduce(whole, group),
        "backend's all-reduce": all_reduce,
    }
    for name, other in PAIRS:
        if not torch.equal(candidates[name](), candidates[other]()):  # small integers: exact in any order
            raise RuntimeError(f"{name} and {other} disagree at {n} bytes")
    sent = {name: sent_by_each(run) for name, run in candidates.items()}
    wall, _ = common.alternate(dict(candidates), repeats)
    return {"part_bytes": n, "seconds": wall, "interface_bytes_by_rank": sent}


def sent_by_each(run: Callable[[], object]) -> list[int]:
    """Bytes that every rank's interface sends meanwhile, headers and acknowledgements among them."""
    dist.barrier()
    before = int(SENT.read_text())
    run()
    dist.barrier()
    time.sleep(0.5)  # a send has ended when the kernel has the bytes: the link is still at it
    mine = int(SENT.read_text()) - before
    everyone: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def describe(results: list[dict[str, Any]], ranks: int, net: cluster.Hosts) -> str:
    sections = []
    for result in results:
        n, seconds = result["part_bytes"], result["seconds"]
        rows = []
        for name, times in seconds.items():
            sends, serial = (count * n for count in THEORY[name](ranks))
            middle, predicted = common.median(times), serial / net.bytes_per_second
            counted = max(result["interface_bytes_by_rank"][name])
            spread = f"{min(times) * 1e3:,.1f} to {max(times) * 1e3:,.1f}"
            ms = [f"{predicted * 1e3:,.1f}", f"{middle * 1e3:,.1f}", f"{middle / predicted:.2f}", spread]
            rows.append([name, f"{sends:,}", f"{counted:,}", *ms])
        header = ["", "bytes sent, formula", "bytes sent, counted", "ms, formula", "ms, median", "median/formula", "ms"]
        ratios = [f"{a} / {b} {common.paired_ratio(seconds[a], seconds[b]):.2f}" for a, b in PAIRS]
        sections += [f"## A part of {n:,} bytes", common.table(header, rows), "- time: " + "; ".join(ratios) + "."]
    notes = [
        f"- theory of naive / ring: {ranks + 1} in time, {ranks} in bytes of the busiest rank.",
        f"- {ranks} hosts; links {net.rate}, of which TCP's data is {net.bytes_per_second / 1e6:.1f} MB/s. fp32.",
        "- bytes sent: of the busiest rank in one run; counted by its network interface, so with headers (one per",
        "  segment of up to 64 KiB that the kernel hands down), acknowledgements and gloo's own messages.",
        "- the backend's formulas are those of the best algorithm; what it really does, its counted bytes show.",
        "- ms: median, least and most over the rounds, each round the slowest rank's; ratios: median over the rounds",
        "  of the ratio within a round. The bucket of a link that has rested lets a first"
        f" {cluster.BURST >> 10} KiB pass at once,",
        "  so small parts may beat their formula.",
    ]
    return "\n\n".join(sections) + "\n\n" + "\n".join(notes)


if __name__ == "__main__":
    cluster.exit_on_missing(lambda: common.command(main, __doc__))
