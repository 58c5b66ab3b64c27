"""Attention forward and backward: longspan, DeepSpeed's DistributedAttention, and the local kernel alone.

    python -m benchmarks.attention_vs_deepspeed [--quick]

All run in the same processes, in alternation, with torch's SDPA as the local kernel. DeepSpeed takes it as a callable
and runs twice: with the plain call of its users, and with longspan's call ("same kernel": only the all-to-alls differ).
The floor is longspan's local kernel on one rank's part of the work (all tokens, heads / P) without communication.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import longspan
from benchmarks import common, peers
from benchmarks.workloads import as_leaves, attention_workload
from longspan.comm.mesh import MeshGroups

HEAD_DIM = 64
ONE_DEVICE = longspan.SequenceSharding(MeshGroups("cpu"))


def main(
    ranks: tuple[int, ...] = (2, 4),
    tokens: tuple[int, ...] = (2048, 4096, 8192),
    heads: tuple[str, ...] = ("8/8", "8/4", "8/2"),
    dtypes: tuple[str, ...] = ("fp32", "bf16"),
    repeats: int = 7,
    quick: bool = False,
    name: str = "attention-vs-deepspeed",
) -> None:
    """Time all.

    Args:
        ranks: sequence-parallel ranks (Ulysses).
        tokens: lengths.
        heads: query heads / KV heads.
        dtypes: of the tensors.
        repeats: timed rounds at 8,192 tokens; more below.
        quick: 2,048 tokens only, for a first look.
        name: of the report.
    """
    if quick:
        tokens, repeats, name = (2048,), 5, name + "-quick"
    env = common.environment(["longspan", "torch", "deepspeed"])
    rows: list[dict[str, Any]] = []
    for world in ranks:
        rows += common.run_ranks(measure, world, tokens, heads, dtypes, repeats)
    text = render(rows, env["cores"])
    common.write_report(name, "Attention, forward and backward: longspan against DeepSpeed", env, text, rows)


def measure(
    tokens: tuple[int, ...], heads: tuple[str, ...], dtypes: tuple[str, ...], repeats: int
) -> list[dict[str, Any]]:
    """Return every case, the same on every rank."""
    peers.start_deepspeed()
    sp = longspan.SequenceSharding(longspan.init_mesh(ulysses=dist.get_world_size()))
    rows = []
    for n in tokens:
        rounds = repeats * max(1, min(4, 8192 // n))
        for pair in heads:
            for dtype in dtypes:
                q_heads, kv_heads = map(int, pair.split("/"))
                row = case(sp, n, q_heads, kv_heads, common.DTYPES[dtype], rounds)
                rows.append({"ranks": sp.size, "tokens": n, "heads": pair, "dtype": dtype, **row})
    return rows


def case(sp: Any, n: int, q_heads: int, kv_heads: int, dtype: torch.dtype, rounds: int) -> dict[str, Any]:
    """Check that all agree, then time them."""
    torch.manual_seed(sp.rank)
    local = n // sp.size
    mine = leaves(local, q_heads, kv_heads, dtype)
    grad = torch.randn(1, local, q_heads * HEAD_DIM).to(dtype)
    floor_kv = max(1, kv_heads // sp.size)
    floor = leaves(n, q_heads // sp.size, floor_kv, dtype)
    floor_grad = torch.randn(1, n, q_heads // sp.size * HEAD_DIM).to(dtype)

    ours = step(lambda q, k, v: longspan.attention(q, k, v, sp, causal=True), mine, grad)
    theirs = step(peers.deepspeed_attention(sp.group, kv_heads), mine, grad)
    same = step(peers.deepspeed_attention(sp.group, kv_heads, longspan_kernel), mine, grad)
    alone = step(longspan_kernel, floor, floor_grad)

    expected = theirs()
    errors = {name: common.relative_error(x, expected[name]) for name, x in ours().items()}
    limit = 1e-5 if dtype == torch.float32 else 2e-2
    if max(errors.values()) > limit:
        raise RuntimeError(f"the two disagree, so their times cannot be compared: {errors}")
    candidates = {"longspan": ours, "deepspeed": theirs, "deepspeed same kernel": same, "floor": alone}
    wall, cpu = common.alternate(candidates, rounds)
    return {
        "errors": errors,
        "seconds": wall,
        "cpu_seconds": cpu,
        "median": {name: common.median(t) for name, t in wall.items()},
        "ours_over": {name: common.paired_ratio(wall["longspan"], wall[name]) for name in list(candidates)[1:]},
        "cpu_ours_over": {name: common.paired_ratio(cpu["longspan"], cpu[name]) for name in list(candidates)[1:]},
    }


def longspan_kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return the causal attention of one device as longspan calls SDPA, as DeepSpeed's local kernel."""
    return longspan.attention(q, k, v, ONE_DEVICE, kernel="sdpa")


def leaves(n: int, q_heads: int, kv_heads: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return as_leaves(*(torch.randn(1, n, h, HEAD_DIM).to(dtype) for h in (q_heads, kv_heads, kv_heads)))


def step(attend: peers.Attend, inputs: list[torch.Tensor], grad: torch.Tensor) -> Any:
    """Return forward and backward as in a layer, with the output flat for the output projection.

    Gradients accumulate in `.grad` in the inputs' layout, so the copy of a strided gradient is included.
    """
    work = attention_workload(inputs, grad, lambda *qkv: attend(*qkv).reshape(grad.shape).contiguous())

    def step() -> dict[str, torch.Tensor]:
        work.run()
        return work.results()

    return step


HEADER = ["P", "tokens", "heads", "dtype", "longspan ms", "DeepSpeed ms", "same kernel ms", "floor ms",
          "ours/DeepSpeed", "ours/same kernel", "ours/floor", "CPU ours/DeepSpeed", "CPU ours/same kernel",
          "CPU ours/floor", "max difference"]  # fmt: skip
PEERS = ("deepspeed", "deepspeed same kernel", "floor")


def cells(row: dict[str, Any]) -> list[str]:
    return [
        str(row["ranks"]), f"{row['tokens']:,}", row["heads"], row["dtype"],
        *(f"{1e3 * row['median'][name]:.1f}" for name in ("longspan", *PEERS)),
        *(f"{row[key][name]:.3f}" for key in ("ours_over", "cpu_ours_over") for name in PEERS),
        f"{max(row['errors'].values()):.1e}",
    ]  # fmt: skip


def render(rows: list[dict[str, Any]], cores: int) -> str:
    lines = [common.table(HEADER, [cells(row) for row in rows]), ""]
    for name in ("deepspeed", "deepspeed same kernel"):
        for key, clock in (("ours_over", "time"), ("cpu_ours_over", "CPU time")):
            ratios = [row[key][name] for row in rows]
            met = sum(r <= 1.0 for r in ratios)
            lines.append(
                f"- ours over {name}, {clock}: median {common.median(ratios):.3f}, best {min(ratios):.3f}, worst"
                f" {max(ratios):.3f}; at most 1.0 in {met} of {len(ratios)} cases."
            )
    lines += [
        "",
        "The goal is at most 1.0 of DeepSpeed's time. Times are medians over rounds of the slowest rank's forward +"
        " backward, batch 1, causal, head_dim 64; ratios are medians of the ratios within a round. CPU time is summed"
        " over ranks and feels other load on the machine less than the clock does. DeepSpeed runs with the plain SDPA"
        " call, and (same kernel) with longspan's; the floor is longspan's local kernel alone. `max difference` is"
        " between the two results (output, dq, dk, dv), relative to the largest value.",
        "With fewer KV heads than ranks, DeepSpeed gets them repeated to one per rank, as it refuses fewer.",
    ]
    if any(row["ranks"] > cores for row in rows):
        lines.append(f"With P above {cores}, ranks share {cores} cores, so computing and communication alternate.")
    return "\n".join(lines)


if __name__ == "__main__":
    common.command(main, __doc__)
