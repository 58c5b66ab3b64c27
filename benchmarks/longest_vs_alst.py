"""The longest settings of both: longspan with memory="longest" beside ALST with its tiled loss, tiled MLP and
gradient checkpointing, on a Hugging Face Llama that every rank holds whole.

    python benchmarks/longest_vs_alst.py [--quick]

Peak memory of a step comes from a fresh group of processes per method and length (the rise of the process's high-water
mark, and the peak of the bytes that torch holds), and its growth from the slope between lengths, per token of a rank.
Times come from alternating steps in the same processes. Losses and gradients are compared first.
"""

from __future__ import annotations

import argparse
from typing import Any

import common
import hf_step_vs_alst as steps

OURS, THEIRS = "longspan longest", "alst longest"


def main() -> None:
    args = parse_args()
    env = common.environment(["longspan", "torch", "transformers", "deepspeed"])
    shape = vars(args)
    rows: list[dict[str, Any]] = []
    for tokens in args.tokens:
        memory = {
            name: common.run_ranks(steps.measure_memory, args.ranks, shape, tokens, args.dtype, name, env=steps.MALLOC)
            for name in (OURS, THEIRS)
        }
        row: dict[str, Any] = {"tokens": tokens, "memory": memory}
        if not args.no_time:
            row |= common.run_ranks(steps.time_all, args.ranks, shape, tokens, args.dtype, [OURS, THEIRS])
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
    parser.add_argument("--no-time", action="store_true", help="memory only")
    parser.add_argument("--quick", action="store_true", help="4,096 and 8,192 tokens, for a first look")
    parser.add_argument("--name", default="longest-vs-alst", help="name of the report")
    args = parser.parse_args()
    if args.quick:
        args.tokens, args.name = [4096, 8192], args.name + "-quick"
    return args


def render(rows: list[dict[str, Any]], shape: dict[str, Any]) -> str:
    header = ["tokens", "method", "peak RSS rise MiB", "ours/theirs", "tensor peak MiB", "ours/theirs",
              "growth, KiB of tensors per token of a rank", "ours/theirs", "step s", "ours/theirs"]  # fmt: skip
    cells, before = [], None
    for row in rows:
        peaks = {name: row["memory"][name] for name in (OURS, THEIRS)}
        slopes = {name: slope(before, row, name, shape["ranks"]) for name in peaks}
        for name, peak in peaks.items():
            first = name == OURS
            ratio = {key: f"{peaks[OURS][key] / peaks[THEIRS][key]:.3f}" if first else "" for key in peak}
            growth = slopes[name]
            cells.append([
                f"{row['tokens']:,}", name, f"{peak['rss_rise_mib']:.0f}", ratio["rss_rise_mib"],
                f"{peak['tensor_peak_mib']:.0f}", ratio["tensor_peak_mib"],
                "" if growth is None else f"{growth:.2f}",
                f"{growth / slopes[THEIRS]:.3f}" if first and growth is not None else "",
                f"{row['median'][name]:.2f}" if "median" in row else "",
                f"{row['time_over'][THEIRS]:.3f}" if first and "median" in row else "",
            ])  # fmt: skip
        before = row
    lines = [
        common.table(header, cells),
        "",
        "Goals: peak and growth at most 0.6 of ALST's, time at most 1.0.",
        f"Llama: {shape['layers']} layers, hidden {shape['hidden']}, {shape['q_heads']} query and"
        f" {shape['kv_heads']} KV heads, FFN {shape['ffn']}, vocabulary {shape['vocab']:,}; {shape['dtype']}, batch 1,"
        f" AdamW, {shape['ranks']} ranks, weights whole on each. ALST: tiled loss (tiles of {shape['tile_mib']} MiB),"
        " tiled MLP (as many tiles as its documentation says), transformers' gradient checkpointing.",
    ]
    errors = [row["agreement"]["grad_error"] for row in rows if "agreement" in row]
    if errors:
        lines.append(f"Largest relative difference of a parameter's gradient on the first step: {max(errors):.1e}.")
    return "\n".join(lines)


def slope(before: Any, row: Any, name: str, ranks: int) -> float | None:
    """KiB of tensors per further token of a rank."""
    if before is None:
        return None
    kib = 1024 * (row["memory"][name]["tensor_peak_mib"] - before["memory"][name]["tensor_peak_mib"])
    return float(kib / ((row["tokens"] - before["tokens"]) / ranks))


if __name__ == "__main__":
    main()
