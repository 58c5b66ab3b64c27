"""A Hugging Face Llama training step: longspan.parallelize against DeepSpeed's UlyssesSPAttentionHF (ALST).

    python benchmarks/hf_step_vs_alst.py [--quick]

A step is forward, backward, the sum of the gradients over ranks, and AdamW, on replicated weights, so that only the
sequence method differs. Times come from alternating steps in the same processes. The floor is one rank's part of the
work without communication (its results are wrong): the rest is the cost of a sequence method. Peak memory comes from
new processes for each method: the rise of the process's high-water mark over a step (`VmHWM`, reset through
/proc/self/clear_refs), and the peak bytes of tensors by torch's profiler, which does not depend on the C library.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import alst
import common
import torch
import torch.distributed as dist

from longspan.bench import peers
from longspan.core.memory import LONGEST, Memory
from longspan.tracing.record import memory_rise

MIB = 2**20
MEMORY_OPTIONS = {  # the name of the method after "longspan"
    "checkpointing=save_attention": Memory(checkpointing="save_attention"),
    "checkpointing=selective": Memory(checkpointing="selective"),
    "checkpointing=full": Memory(checkpointing="full"),
    "checkpointing=full, offload=disk": Memory(checkpointing="full", offload="disk"),
    "tiled_mlp=0": Memory(tiled_mlp=0),
    "tiled_norms": Memory(tiled_norms=True),
    "head_chunks=0": Memory(head_chunks=0),
    "checkpointing=full, few": Memory(checkpointing="full", layers_per_checkpoint=0),
    "few": dataclasses.replace(LONGEST, layers_per_checkpoint=0),
    "disk": dataclasses.replace(LONGEST, offload="disk"),
    "all on disk": dataclasses.replace(LONGEST, offload="disk", checkpointing="save_attention"),
}
METHODS = ("longspan", "alst", "alst+tiled")
FLOOR = "floor"
Step = Callable[[], float]
# For memory: the C library returns freed blocks of 64 KiB and more to the system, so the resident set follows tensors.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}


def main() -> None:
    args = parse_args()
    env = common.environment(["longspan", "torch", "transformers", "deepspeed"])
    shape = vars(args)
    rows = []
    for ranks in args.ranks:
        for tokens in args.tokens:
            for dtype in args.dtypes:
                row = {"ranks": ranks, "tokens": tokens, "dtype": dtype}
                row |= common.run_ranks(time_all, ranks, shape, tokens, dtype, args.methods)
                if not args.no_memory:
                    row["memory"] = {
                        m: common.run_ranks(measure_memory, ranks, shape, tokens, dtype, m, env=MALLOC)
                        for m in args.methods
                    }
                rows.append(row)
                print(render([row], shape, env["cores"]), flush=True)
                text = render(rows, shape, env["cores"])  # after every row, in case a long run is interrupted
                common.write_report(args.name, "A Hugging Face Llama training step: longspan against ALST", env, text,
                                    {"shape": shape, "rows": rows})  # fmt: skip
    print(text)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], help="sequence-parallel ranks (Ulysses)")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 16384])
    parser.add_argument("--dtypes", nargs="+", choices=list(common.DTYPES), default=["fp32", "bf16"])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--ffn", type=int, default=1408)
    parser.add_argument("--q-heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--tile-mib", type=int, default=64, help="logits per tile in ALST's TiledFusedLogitsLoss")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="longspan and ALST's")
    parser.add_argument("--rises", type=int, default=3, help="steps whose peak memory is measured")
    parser.add_argument("--repeats", type=int, default=5, help="timed steps of each method")
    parser.add_argument("--no-memory", action="store_true", help="times only")
    parser.add_argument("--quick", action="store_true", help="2,048 tokens, 2 layers, for a first look")
    parser.add_argument("--name", default="hf-step-vs-alst", help="name of the report")
    args = parser.parse_args()
    args.profiled = True
    if args.quick:
        args.tokens, args.layers, args.repeats, args.name = [2048], 2, 5, args.name + "-quick"
    return args


# --- the model, the batch and the three steps -------------------------------------------------------


def build_model(shape: dict[str, Any], tokens: int, dtype: str, attention: str = "sdpa") -> Any:
    """Return the same small Llama on every call and rank."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=shape["hidden"], intermediate_size=shape["ffn"], num_hidden_layers=shape["layers"],
        num_attention_heads=shape["q_heads"], num_key_value_heads=shape["kv_heads"], vocab_size=shape["vocab"],
        max_position_embeddings=tokens, use_cache=False, tie_word_embeddings=False, attn_implementation=attention,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(common.DTYPES[dtype]).train()


def full_batch(shape: dict[str, Any], tokens: int) -> dict[str, torch.Tensor]:
    """Return random tokens; the first tenth of the labels is masked."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, shape["vocab"], (1, tokens), generator=generator)
    labels = ids.clone()
    labels[:, : tokens // 10] = -100
    return {"input_ids": ids, "labels": labels}


class Method:
    """One method's model, shard of the batch and optimizer; `step()` is measured."""

    def __init__(self, name: str, shape: dict[str, Any], tokens: int, dtype: str) -> None:
        self.name = name
        batch = full_batch(shape, tokens)
        model = build_model(shape, tokens, dtype, alst.without_exchange() if name == FLOOR else "sdpa")
        if name == FLOOR:
            self.model = model
            mine = {key: x[:, : tokens // dist.get_world_size()].contiguous() for key, x in batch.items()}
            self.forward_backward = lambda: _plain_step(self.model, mine)
        elif name.startswith("longspan"):
            import longspan

            sp = longspan.SequenceSharding(longspan.init_mesh(ulysses=dist.get_world_size()))
            memory: Any = MEMORY_OPTIONS.get(name.partition(" ")[2]) or name.partition(" ")[2] or "fastest"
            self.model = longspan.parallelize(model, sp, fsdp=False, memory=memory)
            shard = longspan.shard_batch(batch, sp)
            self.forward_backward = lambda: _plain_step(self.model, shard)
        else:
            self.model = model
            longest = name == "alst longest"
            if longest:
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
                alst.tile_mlps(model)
            tiled = longest or "tiled" in name
            step = alst.AlstStep(model, tokens, 1, tiled_loss_mib=shape["tile_mib"] if tiled else None)
            alst_shard = step.shard(batch)
            self.forward_backward = lambda: step(alst_shard)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def step(self) -> float:
        self.optimizer.zero_grad(set_to_none=True)
        loss = float(self.forward_backward())
        self.optimizer.step()
        return loss


def _plain_step(model: Any, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    loss.backward()
    return loss.detach()


# --- time -------------------------------------------------------------------------------------------


def time_all(shape: dict[str, Any], tokens: int, dtype: str, names: Sequence[str] = METHODS) -> dict[str, Any]:
    """Compare gradients, then time alternating steps. The first of `names` is longspan's, the second ALST's."""
    peers.start_deepspeed()
    ours, theirs = names[:2]
    methods = {name: Method(name, shape, tokens, dtype) for name in names}
    agreement = compare_gradients(methods)
    if shape["profiled"]:
        methods[FLOOR] = Method(FLOOR, shape, tokens, dtype)
    limit = 1e-4 if dtype == "fp32" else 5e-2
    if agreement["grad_error"] > limit:
        raise SystemExit(f"the methods disagree, so their times cannot be compared: {agreement}")
    losses: dict[str, list[float]] = {name: [] for name in methods}
    timers = {name: (lambda n=name: losses[n].append(methods[n].step())) for name in methods}
    seconds, cpu = common.alternate(timers, shape["repeats"])
    parts = {name: split(method) for name, method in methods.items()} if shape["profiled"] else {}
    return {
        "agreement": agreement,
        "losses": losses,
        "seconds": seconds,
        "cpu_seconds": cpu,
        "seconds_by_part": parts,
        "median": {name: common.median(t) for name, t in seconds.items()},
        "time_over": {name: common.paired_ratio(seconds[ours], seconds[name]) for name in list(methods)[1:]},
        "cpu_over": {name: common.paired_ratio(cpu[ours], cpu[name]) for name in list(methods)[1:]},
        "floor_over_alst": common.paired_ratio(seconds[FLOOR], seconds[theirs]) if FLOOR in methods else None,
    }


def compare_gradients(methods: dict[str, Method]) -> dict[str, Any]:
    """Return the first losses, and the largest relative difference of a parameter's gradient, in norm."""
    losses, grads = {}, {}
    for name, method in methods.items():
        losses[name] = float(method.forward_backward())
        named = sorted(method.model.named_parameters())
        grads[name] = [p.grad.double() for _, p in named if p.grad is not None]
        method.optimizer.zero_grad(set_to_none=True)
    if len({len(g) for g in grads.values()}) != 1:
        counts = {name: len(g) for name, g in grads.items()}
        raise SystemExit(f"gradients missing: {counts}")
    base = grads[list(methods)[1]]
    worst = max(float((a - b).norm() / b.norm()) for name in methods for a, b in zip(grads[name], base, strict=True))
    return {"first_loss": losses, "grad_error": worst, "parameters": len(base)}


def split(method: Method) -> dict[str, float]:
    """Return the seconds of one step by kind of operation on this rank, from torch's profiler."""
    groups = {
        "attention kernel": ("flash_attention",),
        "collectives": ("all_to_all", "alltoall", "all_reduce", "allreduce", "all_gather", "allgather"),
        "matmul": ("aten::mm", "aten::addmm", "aten::bmm"),
        "copies": ("aten::copy_", "aten::cat"),
        "softmax": ("log_softmax", "nll_loss"),
    }
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        method.step()
    totals = dict.fromkeys([*groups, "other"], 0.0)
    for event in profile.key_averages():
        group = next((g for g, keys in groups.items() if any(k in event.key for k in keys)), "other")
        totals[group] += event.self_cpu_time_total / 1e6
    return totals


# --- memory -----------------------------------------------------------------------------------------


def measure_memory(shape: dict[str, Any], tokens: int, dtype: str, name: str) -> dict[str, float]:
    """Return the peak MiB of one step above the level before it, the largest over ranks."""
    if not name.startswith("longspan"):
        peers.start_deepspeed()
    method = Method(name, shape, tokens, dtype)
    method.step()  # allocates optimizer state, gloo's buffers and tables
    rises = []
    for _ in range(shape["rises"]):
        method.optimizer.zero_grad(set_to_none=True)  # a step's own gradients belong to its rise
        rises.append(rss_rise(method.step))
    method.optimizer.zero_grad(set_to_none=True)
    tensors = tensor_peak(method.step) if shape["profiled"] else 0.0
    mine = torch.tensor([common.median(rises), max(rises), tensors], dtype=torch.float64)
    dist.all_reduce(mine, op=dist.ReduceOp.MAX)
    return dict(zip(("rss_rise_mib", "rss_rise_max_mib", "tensor_peak_mib"), (mine / MIB).tolist(), strict=True))


def rss_rise(step: Step) -> float:
    """Return the bytes by which the resident set rises during a step."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")
    before = status_kib("VmRSS")
    step()
    return (status_kib("VmHWM") - before) * 1024.0


def status_kib(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {field}")


def tensor_peak(step: Step) -> float:
    """Return the peak bytes of tensors that a step allocates."""
    rise = memory_rise(step)
    if not rise:
        raise RuntimeError("the profiler recorded no allocation")
    return float(rise)


# --- the table --------------------------------------------------------------------------------------


def render(rows: list[dict[str, Any]], shape: dict[str, Any], cores: int) -> str:
    header = ["P", "tokens", "dtype", "method", "step s", "ours/theirs", "CPU ours/theirs", "peak RSS rise MiB",
              "ours/theirs", "tensor peak MiB", "ours/theirs"]  # fmt: skip
    cells = []
    for row in rows:
        for name in row["median"]:
            memory = row.get("memory", {})
            ours, theirs = memory.get("longspan"), memory.get(name)
            line = [str(row["ranks"]), f"{row['tokens']:,}", row["dtype"], name, f"{row['median'][name]:.2f}"]
            line += [f"{row[key][name]:.3f}" if name in row[key] else "" for key in ("time_over", "cpu_over")]
            for key in ("rss_rise_mib", "tensor_peak_mib"):
                line.append(f"{theirs[key]:.0f}" if theirs else "")
                line.append(f"{ours[key] / theirs[key]:.3f}" if theirs and name != "longspan" else "")
            cells.append(line)
    parts = list(rows[0]["seconds_by_part"]["longspan"])
    part_cells = [
        [str(row["ranks"]), f"{row['tokens']:,}", row["dtype"], name]
        + [f"{row['seconds_by_part'][name][part]:.2f}" for part in parts]
        for row in rows
        for name in row["median"]
    ]
    errors = max(row["agreement"]["grad_error"] for row in rows)
    lines = [
        common.table(header, cells),
        "",
        "Goals: time at most 0.9, peak memory at most 0.7, against ALST with its tiled loss. The floor is the same work"
        " with no communication and the model's own loss; it takes "
        + ", ".join(f"{row['floor_over_alst']:.3f} ({row['tokens']:,} {row['dtype']})" for row in rows)
        + " of ALST's time.",
        "",
        f"Llama: {shape['layers']} layers, hidden {shape['hidden']}, {shape['q_heads']} query and"
        f" {shape['kv_heads']} KV heads, FFN {shape['ffn']}, vocabulary {shape['vocab']:,}; batch 1, AdamW.",
        "`alst` is ALST with the loss of its tutorial (the model's own, weighted over ranks); `alst+tiled` with its"
        f" TiledFusedLogitsLoss, tiles of {shape['tile_mib']} MiB.",
        f"Largest relative difference of a parameter's gradient from ALST's on the first step: {errors:.1e}.",
        "",
        "Where rank 0's time goes in one profiled step (seconds, self time):",
        "",
        common.table(["P", "tokens", "dtype", "method", *parts], part_cells),
    ]
    if any(row["ranks"] > cores for row in rows):
        lines += ["", f"P above {cores} shares {cores} cores, so ranks take turns."]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
