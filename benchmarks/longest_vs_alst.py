"""Compare the longest settings of longspan and ALST on a Hugging Face Llama with replicated weights.

longspan: memory="longest", and the same with checkpointing="save_attention" and offload="disk". ALST: tiled loss, tiled
MLP and gradient checkpointing.

    python benchmarks/longest_vs_alst.py [--quick]

Peak memory of a step comes from a fresh group of processes per method and length (the rise of the process's high-water
mark), and its growth from the shortest and the longest, per token of a rank. Times come from alternating steps in the
same processes. Losses and gradients are compared first.
"""

from __future__ import annotations

import argparse
from typing import Any

import common
import hf_step_vs_alst as steps

OURS, THEIRS = ("longspan longest", "longspan all on disk"), "alst longest"


def main() -> None:
    args = parse_args()
    env = common.environment(["longspan", "torch", "transformers", "deepspeed"])
    shape = vars(args)
    rows: list[dict[str, Any]] = []
    for tokens in args.tokens:
        memory = {
            name: common.run_ranks(steps.measure_memory, args.ranks, shape, tokens, args.dtype, name, env=steps.MALLOC)
            for name in (*OURS, THEIRS)
        }
        row: dict[str, Any] = {"tokens": tokens, "memory": memory}
        if not args.no_time:
            row |= common.run_ranks(steps.time_all, args.ranks, shape, tokens, args.dtype, [*OURS, THEIRS])
        rows.append(row)
        text = render(rows, shape)
        print(text, flush=True)
        common.write_report(args.name, "The longest settings: longspan against ALST", env, text,
                            {"shape": shape, "rows": rows})  # fmt: skip


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="sequence-parallel ranks (Ulysses)")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 16384, 32768])
    parser.add_argument("--dtype", choices=list(common.DTYPES), default="fp32")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--ffn", type=int, default=704)
    parser.add_argument("--q-heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--tile-mib", type=int, default=64, help="logits per tile in ALST's TiledFusedLogitsLoss")
    parser.add_argument("--repeats", type=int, default=3, help="timed steps of each method")
    parser.add_argument("--rises", type=int, default=3, help="steps whose peak memory is measured")
    parser.add_argument("--no-time", action="store_true", help="memory only")
    parser.add_argument("--quick", action="store_true", help="4,096 and 8,192 tokens, for a first look")
    parser.add_argument("--name", default="longest-vs-alst", help="name of the report")
    args = parser.parse_args()
    args.profiled = False  # a profile of a long step takes longer than the step
    if args.quick:
        args.tokens, args.name = [4096, 8192], args.name + "-quick"
    return args


def render(rows: list[dict[str, Any]], shape: dict[str, Any]) -> str:
    header = ["tokens", "method", "peak MiB", "ours/theirs", "step s", "ours/theirs"]
    cells = []
    for row in rows:
        timed = "median" in row
        peaks = {name: row["memory"][name]["rss_rise_mib"] for name in (*OURS, THEIRS)}
        for name, peak in peaks.items():
            ours = name in OURS
            cells.append([
                f"{row['tokens']:,}", name, f"{peak:.0f}", f"{peak / peaks[THEIRS]:.3f}" if ours else "",
                f"{row['median'][name]:.2f}" if timed else "",
                f"{common.paired_ratio(row['seconds'][name], row['seconds'][THEIRS]):.3f}" if ours and timed else "",
            ])  # fmt: skip
    lines = [common.table(header, cells), ""]
    if len(rows) > 1:
        grown = {name: growth(rows, name, shape["ranks"]) for name in (*OURS, THEIRS)}
        lines += [
            f"Growth from {rows[0]['tokens']:,} to {rows[-1]['tokens']:,} tokens, KiB per further token of a rank:"
            " "
            + "; ".join(f"{name} {grown[name]:.1f}, {grown[name] / grown[THEIRS]:.3f}" for name in OURS)
            + f"; of ALST's {grown[THEIRS]:.1f}.",
            "",
        ]
    lines += [
        "Goals: peak and growth at most 0.6 of ALST's, time at most 1.0. The peak is the rise of the resident set over"
        " a step; at the shorter lengths it is that of the optimizer's temporaries and of the gradients' sum, at the"
        " longer ones that of a layer's backward.",
        f"Llama: {shape['layers']} layers, hidden {shape['hidden']}, {shape['q_heads']} query and"
        f" {shape['kv_heads']} KV heads, FFN {shape['ffn']}, vocabulary {shape['vocab']:,}; {shape['dtype']}, batch 1,"
        f" AdamW, {shape['ranks']} ranks, replicated weights. ALST: tiled loss (tiles of {shape['tile_mib']} MiB),"
        " tiled MLP (as many tiles as its documentation says), transformers' gradient checkpointing. `all on disk`:"
        ' memory="longest" with checkpointing="save_attention" and offload="disk".',
    ]
    errors = [row["agreement"]["grad_error"] for row in rows if "agreement" in row]
    if errors:
        lines.append(f"Largest relative difference of a parameter's gradient on the first step: {max(errors):.1e}.")
    return "\n".join(lines)


def growth(rows: list[dict[str, Any]], name: str, ranks: int) -> float:
    """KiB per further token of a rank, from the shortest to the longest."""
    kib = 1024 * (rows[-1]["memory"][name]["rss_rise_mib"] - rows[0]["memory"][name]["rss_rise_mib"])
    return float(kib / ((rows[-1]["tokens"] - rows[0]["tokens"]) / ranks))


if __name__ == "__main__":
    main()
