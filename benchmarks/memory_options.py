"""Each memory option alone: the peak memory of a training step that it saves, and the time that it adds.

    python benchmarks/memory_options.py [--quick]

A Hugging Face Llama on CPU ranks, replicated weights. Peak memory of a step comes from new processes for each memory
option (the rise of the high-water mark), times from alternating steps in the same processes.
"""

from __future__ import annotations

import argparse
from typing import Any

import common
import hf_step_vs_alst as steps

SINGLE = [name for name in steps.MEMORY_OPTIONS if name not in ("few", "disk", "all on disk")]
NAMES = ["longspan", *(f"longspan {name}" for name in SINGLE),
         "longspan longest", "longspan few", "longspan disk", "longspan all on disk"]  # fmt: skip


def main() -> None:
    args = parse_args()
    env = common.environment(["longspan", "torch", "transformers"])
    shape = vars(args)
    memory = {
        name: common.run_ranks(steps.rise, args.ranks, shape, args.tokens, args.dtype, name, env=steps.MALLOC)
        for name in NAMES
    }
    times = common.run_ranks(measure_times, args.ranks, shape, args.tokens, args.dtype)
    rows = [
        {"memory_option": name.partition(" ")[2] or "none", "peak_mib": memory[name], "seconds": times[name]}
        for name in NAMES
    ]
    base = rows[0]
    cells = [
        [row["memory_option"], f"{row['peak_mib']:.0f}", f"{base['peak_mib'] - row['peak_mib']:+.0f}",
         f"{common.median(row['seconds']):.2f}", f"{common.paired_ratio(row['seconds'], base['seconds']):.2f}"]
        for row in rows
    ]  # fmt: skip
    text = common.table(["memory_option", "peak MiB", "saved MiB", "step s", "time over none"], cells)
    text += (
        f"\n\n{args.tokens:,} tokens over {args.ranks} ranks (Ulysses), {args.dtype}; Llama: {args.layers} layers,"
        f" hidden {args.hidden}, {args.q_heads} query and {args.kv_heads} KV heads, FFN {args.ffn}, vocabulary"
        f" {args.vocab:,}; batch 1, AdamW. `longest` is checkpointing=full, tiled_mlp=0 and tiled_norms; `few` the"
        " same with layers_per_checkpoint=0, `disk` with offload=disk, `all on disk` that with"
        " checkpointing=save_attention."
        " Of the peak, gradients and the optimizer's temporaries are the same in every row."
    )
    print(text)
    common.write_report(args.name, "Each memory option of memory alone", env, text, {"shape": shape, "rows": rows})


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--dtype", choices=list(common.DTYPES), default="fp32")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--ffn", type=int, default=704)
    parser.add_argument("--q-heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=3, help="timed steps of each")
    parser.add_argument("--quick", action="store_true", help="2,048 tokens, 2 layers, for a first look")
    parser.add_argument("--name", default="memory_options", help="name of the report")
    args = parser.parse_args()
    if args.quick:
        args.tokens, args.layers, args.name = 2048, 2, args.name + "-quick"
    return args


def measure_times(shape: dict[str, Any], tokens: int, dtype: str) -> dict[str, list[float]]:
    methods = {name: steps.Method(name, shape, tokens, dtype) for name in NAMES}
    seconds, _ = common.alternate({name: method.step for name, method in methods.items()}, shape["repeats"])
    return seconds


if __name__ == "__main__":
    main()
