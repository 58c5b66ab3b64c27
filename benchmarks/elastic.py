"""Elastic batches against the fixed mesh and against plain packing, on loopback and on slow links.

    python -m benchmarks.elastic             # as root for the slow links (`benchmarks/cluster.py`)
    python -m benchmarks.elastic --no-slow   # loopback alone

A small Llama trains on the same samples in three ways, each over the same ranks and with the same memory (tokens of a
rank). Fixed: each sample by itself over all ranks. Packing: samples packed into rows of all ranks, best fit. Elastic:
`longspan.elastic_batches`, whose schedule knows the speed of these cores and links from `longspan bench`. Each
accumulates gradients over its forwards and sums them over the ranks once. The losses are compared first. Goal: 1.5
times the tokens per second of both on log-normal lengths.

A fourth way shows what no schedule can beat: each rank computes an even share of the samples alone, without messages
and without the limit of memory.
"""

from __future__ import annotations

import contextlib
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers

import longspan
from benchmarks import cluster, common
from longspan.bench import BenchConfig
from longspan.bench.hardware import as_toml, measure_hardware
from longspan.core.parallel import ParallelConfig
from longspan.hf.weights.gradients import no_sync

GOAL = 1.5
WAYS = ("elastic", "packing", "fixed", "no messages")
KINDS = ("log-normal", "uniform", "one long")
IGNORE = -100
SIZES = (1 << 12, 1 << 16, 1 << 18, 1 << 20)  # bytes of the messages here


def best_fit(lengths: list[tuple[int, int]], room: int) -> list[list[int]]:
    """Return samples in packs of at most `room` tokens: the longest first, each into the fullest pack that fits."""
    packs: list[tuple[int, list[int]]] = []
    for number, length in sorted(lengths, key=lambda item: -item[1]):
        fitting = [pack for pack in packs if pack[0] + length <= room]
        used, members = max(fitting, key=lambda pack: pack[0], default=(0, []))
        packs = [pack for pack in packs if pack[1] is not members]
        packs.append((used + length, [*members, number]))
    return [members for _, members in packs]


def main(
    ranks: int = 4, samples: int = 48, rounds: int = 5, rates: tuple[str, ...] = ("200mbit", "50mbit"),
    slow: bool = True, kinds: tuple[str, ...] = KINDS, name: str = "elastic",
) -> None:  # fmt: skip
    """Measure the three ways on each distribution of lengths and each rate of links.

    Args:
        ranks: ranks; on slow links each on its own host.
        samples: samples of a step.
        rounds: timed steps of each way.
        rates: of slow links, as `tc` writes them.
        slow: False: loopback alone.
        kinds: distributions of lengths on loopback; slow links have the first, log-normal.
        name: of the report.
    """
    env = common.environment(["longspan", "torch", "transformers"])
    env["ranks"] = f"{ranks}, gloo, one thread each: over loopback, then each in a network namespace (tc tbf)"
    rows = []
    for rate in (None, *(rates if slow else ())):
        for kind in kinds if rate is None else KINDS[:1]:
            arguments = {"kind": kind, "samples": samples, "rounds": rounds}
            if rate is None:
                found = common.run_ranks(measure, ranks, *arguments.values())
            else:
                with cluster.hosts(ranks, rate) as net:
                    found = cluster.run_on(net, measure, timeout=900.0, **arguments)
            rows.append({"rate": rate, "kind": kind, **found})
            print(rows[-1], flush=True)
    common.write_report(name, "Width per sample against a fixed mesh and packing", env, describe(rows), rows)


def lengths_of(kind: str, count: int) -> list[int]:
    """Return lengths from 30 to 3,000."""
    draw = random.Random(7)
    if kind == "uniform":
        return [draw.randint(30, 3000) for _ in range(count)]
    if kind == "log-normal":
        return [min(3000, max(30, int(draw.lognormvariate(5.5, 1.1)))) for _ in range(count)]
    return [3000, *(draw.randint(30, 200) for _ in range(count - 1))]


def measure(kind: str, samples: int, rounds: int) -> dict[str, Any]:
    """Return the seconds of each way's steps, of the slowest rank, and the tokens of a step."""
    ranks = dist.get_world_size()
    sp = longspan.SequenceSharding(longspan.init_mesh(ulysses=ranks))
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=8, max_position_embeddings=4096,
    )  # fmt: skip
    torch.manual_seed(0)
    model = longspan.parallelize(transformers.LlamaForCausalLM(config), sp, fsdp=False, check_weights=0)
    lengths, draw = lengths_of(kind, samples), torch.Generator().manual_seed(1)
    data = [torch.randint(0, 512, (n,), generator=draw) for n in lengths]
    room = -(-max(lengths) // ranks)
    labels = sum(lengths) - len(lengths)

    def row(ids: list[torch.Tensor]) -> dict[str, Any]:
        marked = [torch.cat([torch.tensor([IGNORE]), x[1:]]) for x in ids]
        positions = [torch.arange(len(x)) for x in ids]
        tensors = {"input_ids": ids, "labels": marked, "position_ids": positions}
        return {name: torch.cat(x)[None] for name, x in tensors.items()} | {"num_items_in_batch": labels}

    def fixed() -> Iterator[dict[str, Any]]:
        return (row([ids]) for ids in data)

    def packing() -> Iterator[dict[str, Any]]:
        packs = best_fit(list(enumerate(lengths)), room * ranks)
        return (row([data[i] for i in pack]) for pack in packs)

    hardware = measured_hardware(ranks)
    items = [{"input_ids": ids} for ids in data]
    loader = longspan.elastic_batches(
        items, sp, model, tokens_per_step=1 << 30, tokens_per_rank=room, epochs=1 << 30, gpu=hardware
    )

    def elastic() -> Iterator[dict[str, Any]]:
        return iter(next(iter(loader)))

    def no_messages() -> Iterator[dict[str, Any]]:
        shares: list[list[int]] = [[] for _ in range(ranks)]
        for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
            min(shares, key=lambda share: sum(lengths[j] for j in share)).append(i)
        mine = [(i, lengths[i]) for i in shares[sp.rank]]
        count = max(len(best_fit([(i, lengths[i]) for i in share], room * ranks)) for share in shares)
        packs = best_fit(mine, room * ranks)
        packs += [[]] * (count - len(packs))
        return ({**(row([data[i] for i in pack]) if pack else nothing), "sequence_width": 1} for pack in packs)

    padding = torch.zeros(1, 1, dtype=torch.int64)
    nothing = {"input_ids": padding, "labels": padding + IGNORE, "position_ids": padding, "num_items_in_batch": labels}
    ways: dict[str, Callable[[], Iterator[dict[str, Any]]]] = dict(
        zip(WAYS, (elastic, packing, fixed, no_messages), strict=True)
    )
    forwards = {way: len(list(batches())) for way, batches in ways.items()}
    losses = {way: _step(model, list(batches())) for way, batches in ways.items()}
    for way, loss in losses.items():
        if abs(loss - losses["fixed"]) > 1e-4 * losses["fixed"]:
            raise SystemExit(f"{way} has the loss {loss}, the fixed mesh {losses['fixed']}")
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(rounds):
        for way in (*WAYS[number % 4 :], *WAYS[: number % 4]):
            dist.barrier()
            start = time.perf_counter()
            _step(model, list(ways[way]()))
            took = torch.tensor(time.perf_counter() - start)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            seconds[way].append(took.item())
    return {"tokens": sum(lengths), "forwards": forwards, "seconds": seconds, "losses": losses}


def measured_hardware(ranks: int) -> str:
    """Return the path of a file of `longspan bench`, measured by these ranks."""
    config = BenchConfig(parallel=ParallelConfig(1, 1, ranks, 1), dtype="fp32", sizes=SIZES, rounds=3)
    text = as_toml(measure_hardware(config, torch.device("cpu"), "here", "in the same job"))
    path = Path(tempfile.mkdtemp(), "link.toml")
    path.write_text(text)
    return str(path)


def _step(model: Any, batches: list[dict[str, Any]]) -> float:
    model.zero_grad()
    total = 0.0
    for batch in batches:
        with contextlib.nullcontext() if batch is batches[-1] else no_sync(model):
            loss = model(**batch).loss
            loss.backward()
        total += float(loss.detach())
    return total


def describe(rows: list[dict[str, Any]]) -> str:
    cells, judged = [], []
    for row in rows:
        links, seconds = row["rate"] or "loopback", row["seconds"]
        for way in WAYS:
            median = common.median(seconds[way])
            ratio = common.paired_ratio(seconds[way], seconds["elastic"])
            speed = f"{row['tokens'] / median:,.0f}"
            cells.append([links, row["kind"], way, str(row["forwards"][way]), f"{median:.3f}", speed, f"{ratio:.2f}"])
        if row["kind"] == "log-normal":
            packing, fixed = (common.paired_ratio(seconds[way], seconds["elastic"]) for way in ("packing", "fixed"))
            judged.append(
                f"- {links}, log-normal: {fixed:.2f} times the tokens per second of the fixed mesh, {packing:.2f} "
                f"times those of packing (goal {GOAL})."
            )
    return "\n".join(
        [
            common.table(["links", "lengths", "way", "forwards", "seconds", "tokens/s", "of elastic"], cells),
            "",
            *judged,
            "- seconds: of a step's forwards and backwards, of the slowest rank, medians; of elastic: the median over",
            "  rounds of the ratio of seconds in a round. The schedule is made anew in every step.",
            "- Llama of 4 layers, hidden size 128, 8 heads, fp32, weights on every rank, one sum of gradients a step.",
        ]
    )


if __name__ == "__main__":
    common.command(main, __doc__)
