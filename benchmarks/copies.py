"""Bytes copied, and their time, around each all-to-all by longspan and by DeepSpeed's two implementations.

    python benchmarks/copies.py

torch's profiler records every copy kernel of one attention's forward and backward, with its shapes and duration. Copies
are sorted by when they start: before the first all-to-all, before the local kernel, before the last all-to-all, and
after it; in the backward likewise. The bytes do not depend on the machine or its load. Copies inside the local kernel
are excluded.
"""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import Any

import common
import torch
import torch.distributed as dist

from longspan.bench import peers

HEAD_DIM = 64
MOVERS = {"aten::copy_", "aten::cat", "aten::index_select", "aten::gather", "aten::index", "aten::index_put_",
          "aten::index_copy_", "aten::index_add_", "aten::add_", "aten::add", "aten::sum"}  # fmt: skip
ITEM_BYTES = {"float": 4, "double": 8, "c10::BFloat16": 2, "long int": 8, "int": 4, "bool": 1}
STAGES = ("in", "arrival", "back", "after")
IMPLEMENTATIONS = ("longspan", "longspan, recomputed", "longspan, plain kernel", "DistributedAttention", "ALST")


def main(
    ranks: tuple[int, ...] = (2, 4),
    batches: tuple[int, ...] = (1, 2),
    heads: tuple[str, ...] = ("8/8", "8/4"),
    tokens: int = 2048,
    name: str = "copies",
) -> None:
    """Count copies; `heads` are query heads / KV heads, `name` is the report's."""
    env = common.environment(["longspan", "torch", "deepspeed"])
    rows = []
    for world in ranks:
        for batch in batches:
            for pair in heads:
                rows += common.run_ranks(measure, world, batch, tokens, pair)
    title = "Bytes copied around the all-to-alls: longspan against DeepSpeed"
    common.write_report(name, title, env, render(rows), rows)


def measure(batch: int, tokens: int, heads: str) -> list[dict[str, Any]]:
    """One profiled forward + backward of each implementation, fp32; copies of rank 0 by stage."""
    import longspan
    from longspan.attn.mask import Mask
    from longspan.attn.prepare import prepare
    from longspan.attn.score import Scores
    from longspan.attn.shapes import Shapes

    peers.start_deepspeed()
    sp = longspan.SequenceSharding(longspan.init_mesh(ulysses=dist.get_world_size()))
    q_heads, kv_heads = map(int, heads.split("/"))
    n = tokens // sp.size
    shapes = Shapes.of(
        *(torch.empty(batch, n, h, HEAD_DIM).requires_grad_() for h in (q_heads, kv_heads, kv_heads)), Scores()
    )
    recomputed = prepare(shapes, sp, Mask(), Scores(), (tokens, tokens), recompute_all_to_all=True)
    attends = {
        "longspan": lambda q, k, v: longspan.attention(q, k, v, sp, causal=True),
        "longspan, recomputed": lambda q, k, v: longspan.attention(q, k, v, sp, plan=recomputed),
        "longspan, plain kernel": lambda q, k, v: longspan.attention(q, k, v, sp, causal=True, kernel=plain_kernel),
        "DistributedAttention": peers.deepspeed_attention(sp.group, kv_heads),
        "ALST": peers.alst_attention(sp.group, q_heads, kv_heads, HEAD_DIM, n * sp.size, batch),
    }
    torch.manual_seed(sp.rank)
    inputs = [torch.randn(batch, n, h, HEAD_DIM).requires_grad_() for h in (q_heads, kv_heads, kv_heads)]
    grad = torch.randn(batch, n, q_heads * HEAD_DIM)
    unit = grad.nbytes
    rows = []
    for name in IMPLEMENTATIONS:
        run(attends[name], inputs, grad)  # first call: tables, operator registration
        dist.barrier()
        forward, backward = profile(attends[name], inputs, grad)
        rows.append({
            "ranks": sp.size, "batch": batch, "heads": heads, "implementation": name,
            "q_bytes": unit, "packed_bytes": unit * (q_heads + 2 * kv_heads) // q_heads,
            "forward": forward, "backward": backward,
        })  # fmt: skip
    return rows


def plain_kernel(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float | None
) -> torch.Tensor:
    """torch's SDPA on what the exchange brought, as it lies: the exchange copies nothing."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    gqa = q.shape[1] != k.shape[1]
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=gqa)
    return out.transpose(1, 2)


def run(attend: peers.Attend, inputs: list[torch.Tensor], grad: torch.Tensor) -> None:
    for x in inputs:
        x.grad = None
    with torch.profiler.record_function("forward"):
        out = attend(*inputs).reshape(grad.shape).contiguous()
    with torch.profiler.record_function("backward"):
        out.backward(grad)


def profile(attend: peers.Attend, inputs: list[torch.Tensor], grad: torch.Tensor) -> list[dict[str, Any]]:
    """`[forward, backward]`: bytes and number of copies per stage, and the collectives called."""
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, record_shapes=True) as recorded:
        run(attend, inputs, grad)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("ph") == "X"]
    spans = {e["name"]: e for e in events if e["name"] in ("forward", "backward") and e["cat"] == "user_annotation"}
    return [by_stage(inside(events, spans[name])) for name in ("forward", "backward")]


def inside(events: list[dict[str, Any]], span: dict[str, Any]) -> list[dict[str, Any]]:
    """Events that start within a span, in order, on whichever thread: a backward may run on another."""
    return sorted(
        (e for e in events if e is not span and span["ts"] <= e["ts"] < span["ts"] + span["dur"]), key=lambda e: e["ts"]
    )


def by_stage(events: list[dict[str, Any]]) -> dict[str, Any]:
    kernels = [e for e in events if "flash_attention" in e["name"]]
    exchanges = [e for e in events if e["name"].startswith("c10d::alltoall")]
    others = [e for e in events if e["name"].startswith("c10d::") and not e["name"].startswith("c10d::alltoall")]
    if not kernels or not exchanges:
        raise RuntimeError(
            f"the profile shows {len(kernels)} kernels and {len(exchanges)} exchanges: cannot sort copies"
        )
    kernel_start, kernel_end = kernels[0]["ts"], max(e["ts"] + e["dur"] for e in kernels)
    starts = [e["ts"] for e in exchanges]
    last_in = max((ts for ts in starts if ts < kernel_start), default=starts[0])
    first_back = min((ts for ts in starts if ts > kernel_end), default=starts[-1])
    stages = {name: {"copies": 0, "bytes": 0, "ms": 0.0} for name in STAGES}
    for event in events:
        if event["name"] not in MOVERS or kernel_start <= event["ts"] < kernel_end:
            continue
        moved = output_bytes(event)
        if not moved or within_mover(event, events):
            continue
        if event["ts"] < kernel_start:
            stage = "in" if event["ts"] < last_in else "arrival"
        else:
            stage = "back" if event["ts"] < first_back else "after"
        stages[stage]["copies"] += 1
        stages[stage]["bytes"] += moved
        stages[stage]["ms"] += event["dur"] / 1e3
    return {"stages": stages, "exchanges": len(exchanges), "other_collectives": [e["name"] for e in others]}


def within_mover(event: dict[str, Any], events: list[dict[str, Any]]) -> bool:
    """Whether another mover (`cat` calling `copy_`) already counts these bytes."""
    return any(
        e is not event and e["name"] in MOVERS and e["tid"] == event["tid"]
        and e["ts"] <= event["ts"] and event["ts"] + event["dur"] <= e["ts"] + e["dur"]
        for e in events
    )  # fmt: skip


def output_bytes(event: dict[str, Any]) -> int:
    """Bytes written: the first tensor of an in-place op, all the inputs of a `cat`, else the largest input."""
    dims, types = event["args"]["Input Dims"], event["args"]["Input type"]
    if event["name"] == "aten::cat":
        return sum(math.prod(d) for d in dims[0] if d) * 4  # a list of fp32 tensors; the profiler gives no type for it
    sizes = [math.prod(d) * ITEM_BYTES.get(t, 0) for d, t in zip(dims, types, strict=False) if d]
    return (sizes[0] if event["name"].endswith("_") else max(sizes)) if sizes else 0


def render(rows: list[dict[str, Any]]) -> str:
    header = ["P", "batch", "heads", "pass", "implementation", *STAGES, "copied in all", "copies", "ms",
              "All-to-Alls", "other"]  # fmt: skip
    cells = []
    for row in rows:
        for way in ("forward", "backward"):
            found = row[way]
            stages = [found["stages"][s] for s in STAGES]
            total = sum(s["bytes"] for s in stages)
            cells.append([
                str(row["ranks"]), str(row["batch"]), row["heads"], way, row["implementation"],
                *(f"{s['bytes'] / row['q_bytes']:.2f}" for s in stages),
                f"{total / row['q_bytes']:.2f}", str(sum(s["copies"] for s in stages)),
                f"{sum(s['ms'] for s in stages):.2f}",
                str(found["exchanges"]), str(len(found["other_collectives"])),
            ])  # fmt: skip
    return "\n".join([
        common.table(header, cells),
        "",
        "Bytes are in units of one rank's queries ([batch, tokens / P, query heads, head_dim]), the size of the output;"
        " packed Q, K and V are 3.00 of them for 8/8 and 2.00 for 8/4. The least is one copy of Q, K, V on the way in"
        " and one of O after; in backward one of the output's gradient in, and one of dQ, dK, dV after. Sending dQ, dK,"
        " dV in one All-to-All instead of three costs one copy more, on the way back.",
        "On a CPU longspan's own kernel lays K and V heads-first before it starts;"
        " `plain kernel` is torch's attention on what arrives, as on a GPU: nothing is copied on arrival.",
        "`other` counts collectives that are not All-to-Alls (ALST gathers position ids in every layer).",
    ])  # fmt: skip


if __name__ == "__main__":
    common.command(main, __doc__)
