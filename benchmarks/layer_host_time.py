"""Host time of a layer's attention without its kernels: tiny tensors, with and without packed documents.

    python benchmarks/layer_host_time.py --before ../longspan-before/src

One process, one thread, no communication, forward only. `attention`: a user's call; `layer`: the call of a model's
layer, with a plan prepared once per batch. With `--before`, an older version runs in another process, in turns,
and the ratio is the median over turns of new over old. The older version needs `longspan.prepare_attention`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

CASES = [(64, 0), (64, 8), (1024, 8), (1024, 64), (1024, 512)]  # tokens, documents

MEASURE = """
import json, statistics, sys, time
import torch
import longspan
from longspan.comm.mesh import OneDeviceMesh

torch.set_num_threads(1)
sp = longspan.SequenceSharding(OneDeviceMesh("cpu"))


def median_us(call):
    for _ in range(10):
        call()
    times = []
    for _ in range(60):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e6 * statistics.median(times)


found = []
for tokens, documents in json.loads(sys.argv[1]):
    q, k, v = (torch.randn(1, tokens, heads, 8) for heads in (2, 1, 1))
    ids = torch.arange(tokens)[None] // (tokens // documents) if documents else None
    with torch.no_grad():
        call = median_us(lambda: longspan.attention(q, k, v, sp, documents=ids))
        plan = longspan.prepare_attention(q, k, v, sp, documents=ids)
        layer = median_us(lambda: longspan.attention(q, k, v, sp, plan=plan))
    found.append({"attention": call, "layer": layer})
print(json.dumps(found))
"""


def run(sources: Path) -> list[dict[str, float]]:
    env = {**os.environ, "PYTHONPATH": str(sources), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", MEASURE, json.dumps(CASES)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    answer: list[dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return answer


def main() -> None:
    import common

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="`src` of an older version")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--name", default="layer-host-time", help="name of the report")
    args = parser.parse_args()
    here = Path(__file__).resolve().parents[1] / "src"
    sides = {"now": here, **({"before": args.before.resolve()} if args.before else {})}
    env = common.environment(["torch"])
    turns: dict[str, list[list[dict[str, float]]]] = {side: [] for side in sides}
    for turn in range(args.turns):
        for side in sorted(sides, reverse=bool(turn % 2)):
            turns[side].append(run(sides[side]))
    rows: list[dict[str, Any]] = []
    for i, (tokens, documents) in enumerate(CASES):
        for what in ("attention", "layer"):
            times = {side: [turn[i][what] for turn in turns[side]] for side in sides}
            row = {"tokens": tokens, "documents": documents, "what": what}
            row |= {f"{side}_us": statistics.median(found) for side, found in times.items()}
            if "before" in times:
                row["ratio"] = common.paired_ratio(times["now"], times["before"])
            rows.append(row)
    header = [
        "tokens",
        "documents",
        "what",
        *(f"{side}, us" for side in sides),
        *(["now/before"] * ("before" in sides)),
    ]
    cells = [
        [
            f"{row['tokens']:,}",
            str(row["documents"]),
            row["what"],
            *(f"{row[f'{side}_us']:.0f}" for side in sides),
            *([f"{row['ratio']:.2f}"] if "ratio" in row else []),
        ]
        for row in rows
    ]
    text = common.table(header, cells)
    print(text)
    common.write_report(args.name, "Host time of an attention layer", env, text, rows)


if __name__ == "__main__":
    main()
