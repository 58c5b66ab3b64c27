"""The planner against this machine: memory and time of a training step, predicted and measured.

    python -m benchmarks.plan_accuracy [--no-time | --no-memory]

Memory: bytes of tensors at the peak of a step (weights, gradients, optimizer states, activations, buffers) on the rank
with most, from torch's profiler, next to the planner's total. Neither counts other memory (libraries, the allocator's
slack, gloo's threads). Steps are those of `longspan train`: `longspan.parallelize`, AdamW.

Time: `longspan bench` measures this machine first (matrix products, attention, every collective). The planner
predicts the step from that file alone. The step is then measured in two runs minutes apart, and the faster one's median
counts. Two ranks on two cores, as the planner does not describe ranks that share a core.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import common
from benchmarks.workloads import Workload, training_step
from longspan.core.memory import FASTEST, Memory
from longspan.core.parallel import ParallelConfig

SMALL = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 8, "num_key_value_heads": 2}
WIDE = {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8, "num_key_value_heads": 4}
FP32, BF16 = {"dtype": "fp32"}, {"dtype": "bf16"}
WHOLE = {"weight_sharding": False}
CHECKPOINTED = {"memory": Memory(checkpointing="full")}
# (config, context, ranks {data, ring, ulysses}, options of the job)
MEMORY_CASES: list[tuple[dict[str, Any], int, dict[str, int], dict[str, Any]]] = [
    ({**SMALL, "num_hidden_layers": 4, "vocab_size": 512}, 4096, {"ulysses": 2}, BF16),
    ({**SMALL, "num_hidden_layers": 4, "vocab_size": 512}, 4096, {"ulysses": 2}, FP32),
    ({**SMALL, "num_hidden_layers": 2, "vocab_size": 8192}, 8192, {"ulysses": 4}, BF16),
    ({**SMALL, "num_hidden_layers": 4, "vocab_size": 512}, 4096, {"ulysses": 4}, FP32),
    ({**WIDE, "num_hidden_layers": 4, "vocab_size": 32000}, 2048, {"ulysses": 2}, BF16),
    ({**WIDE, "num_hidden_layers": 6, "vocab_size": 1024}, 4096, {"ulysses": 2, "data": 2}, FP32),
    ({**WIDE, "num_hidden_layers": 4, "vocab_size": 1024}, 2048, {"ulysses": 2}, {**FP32, **WHOLE}),
    ({**WIDE, "num_hidden_layers": 4, "vocab_size": 1024}, 4096, {"ulysses": 2}, {**BF16, **WHOLE}),
    ({**WIDE, "num_hidden_layers": 8, "vocab_size": 512}, 8192, {"ulysses": 4}, {**BF16, **CHECKPOINTED}),
    ({**WIDE, "num_hidden_layers": 8, "vocab_size": 512}, 512, {"ulysses": 2}, BF16),
    ({**SMALL, "num_hidden_layers": 4, "vocab_size": 512}, 4096, {"ring": 2}, FP32),
    ({**SMALL, "num_hidden_layers": 4, "vocab_size": 512}, 8192, {"ring": 2, "ulysses": 2}, BF16),
    ({**WIDE, "num_hidden_layers": 8, "vocab_size": 512}, 8192, {"ring": 4}, {**BF16, **CHECKPOINTED}),
    ({**WIDE, "num_hidden_layers": 4, "vocab_size": 512}, 4096, {"ring": 4}, FP32),
]
U2, R2 = {"ulysses": 2}, {"ring": 2}
TIME_CASES: list[tuple[dict[str, Any], int, dict[str, int], dict[str, Any]]] = [
    ({**WIDE, "num_hidden_layers": 2, "vocab_size": 512}, 2048, U2, FP32),
    ({**WIDE, "num_hidden_layers": 4, "vocab_size": 512}, 4096, U2, FP32),
    ({**WIDE, "num_hidden_layers": 2, "vocab_size": 8192}, 4096, U2, FP32),
    ({**WIDE, "num_hidden_layers": 2, "vocab_size": 512}, 8192, U2, FP32),
    ({**SMALL, "num_hidden_layers": 4, "vocab_size": 512}, 4096, U2, {**FP32, **CHECKPOINTED}),
    ({**WIDE, "num_hidden_layers": 4, "vocab_size": 512}, 2048, U2, {**FP32, **WHOLE}),
    ({**WIDE, "num_hidden_layers": 2, "vocab_size": 512}, 4096, R2, FP32),
    ({**WIDE, "num_hidden_layers": 2, "vocab_size": 512}, 8192, R2, FP32),
]


def main(memory: bool = True, time: bool = True, repeats: int = 5, name: str = "plan-accuracy") -> None:
    """Compare `memory` and `time` (of `repeats` steps of a case); `name` is the report's."""
    env = common.environment(["longspan", "torch", "transformers"])
    results: dict[str, Any] = {}
    parts = []
    if memory:
        results["memory"] = [memory_case(*case) for case in MEMORY_CASES]
        parts.append(render_memory(results["memory"]))
    if time:
        results["time"], results["link"] = time_cases(repeats)
        parts.append(render_time(results["time"], results["link"]))
    common.write_report(name, "The planner against this machine", env, "\n\n".join(parts), results)


def written(options: dict[str, Any]) -> dict[str, Any]:
    """Return options as JSON."""
    return {name: value.describe() if isinstance(value, Memory) else value for name, value in options.items()}


# --- predicted ------------------------------------------------------------------------------------


def predicted(config: dict[str, Any], context: int, ranks: dict[str, int], options: dict[str, Any], gpu: str) -> Any:
    from longspan.plan import Job, cost, read_hardware
    from longspan.plan.from_model import shape_from_config

    shape = shape_from_config({"model_type": "llama", "max_position_embeddings": 1 << 20, **config}, "case")
    job = Job(context=context, batch=ranks.get("data", 1), **options)
    return cost(shape, job.on(**ranks), read_hardware(gpu))


# --- measured -------------------------------------------------------------------------------------


def make_step(config: dict[str, Any], context: int, ranks: dict[str, int], options: dict[str, Any]) -> Workload:
    """Return a training step of this rank, as `longspan train` makes it."""
    import transformers

    import longspan

    sp = longspan.SequenceSharding(longspan.init_mesh(**ranks))
    torch.manual_seed(0)
    llama = transformers.LlamaConfig(**config, max_position_embeddings=1 << 20)
    model = transformers.AutoModelForCausalLM.from_config(llama).train()
    ids = torch.randint(0, config["vocab_size"], (1, context), generator=torch.Generator().manual_seed(sp.data_rank))
    fsdp, memory = options.get("weight_sharding", True), options.get("memory", FASTEST)
    return training_step(model, sp, ids, common.DTYPES[options["dtype"]], fsdp=fsdp, memory=memory)


def measure_memory(*case: Any) -> dict[str, int]:
    step = make_step(*case)
    step.run()
    dist.barrier()
    most = torch.tensor([step.state_bytes(), common.memory_rise(step.run)])
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return {"at_rest": int(most[0]), "rise": int(most[1])}


def measure_time(
    config: dict[str, Any], context: int, ranks: dict[str, int], options: dict[str, Any], n: int
) -> list[float]:
    step = make_step(config, context, ranks, options)
    wall, _ = common.alternate({"": step.run}, n)
    return wall[""]


def memory_case(config: dict[str, Any], context: int, ranks: dict[str, int], options: dict[str, Any]) -> dict[str, Any]:
    plan = predicted(config, context, ranks, options, "cpu")
    world = math.prod(ranks.values())
    found = common.run_ranks(measure_memory, world, config, context, ranks, options)
    row = {
        "config": config, "context": context, "ranks": ranks, "options": written(options),
        "predicted": plan.memory_total_bytes, "items": plan.memory_bytes,
        "measured": found["at_rest"] + found["rise"], **found,
    }  # fmt: skip
    print(
        describe(row), f"predicted / measured {row['predicted'] / row['measured']:.3f}", row["items"], found, flush=True
    )
    return row


def time_cases(repeats: int) -> tuple[list[dict[str, Any]], str]:
    from longspan.bench import BenchConfig
    from longspan.bench import run as bench

    with tempfile.TemporaryDirectory() as folder:
        links = {axis: Path(folder) / f"{axis}.toml" for axis in ("ulysses", "ring")}
        for axis, link in links.items():
            if bench(BenchConfig(parallel=ParallelConfig(**{axis: 2}), dtype="fp32", out=link)):
                raise SystemExit("longspan bench failed")
        # Two rounds, so that a slow minute of the machine (up to 40 %) affects one of them.
        rounds = [[common.run_ranks(measure_time, 2, *case, repeats) for case in TIME_CASES] for _ in range(2)]
        rows = []
        for case, *seconds in zip(TIME_CASES, *rounds, strict=True):
            config, context, ranks, options = case
            plan = predicted(*case, str(links[next(iter(ranks))]))
            rows.append({
                "config": config, "context": context, "ranks": ranks, "options": written(options),
                "predicted": plan.step_seconds, "compute": plan.compute_seconds, "exposed": plan.exposed_seconds,
                "measured": min(statistics.median(times) for times in seconds), "seconds": seconds,
            })  # fmt: skip
            print(describe(rows[-1]), f"{plan.step_seconds:.3f} {rows[-1]['measured']:.3f}", flush=True)
        return rows, "\n".join(link.read_text() for link in links.values())


# --- the tables -----------------------------------------------------------------------------------


def describe(row: dict[str, Any]) -> str:
    c, options = row["config"], row["options"]
    extra = "".join(f", {k.replace('_', ' ')} {v}" for k, v in options.items() if k != "dtype")
    ranks = " ".join(f"{k}={v}" for k, v in row["ranks"].items())
    return (
        f"{c['num_hidden_layers']} layers of {c['hidden_size']}, vocabulary {c['vocab_size']:,}, "
        f"{row['context']:,} tokens, {ranks}, {options['dtype']}{extra}"
    )


def render_memory(rows: list[dict[str, Any]]) -> str:
    ratios = [row["predicted"] / row["measured"] for row in rows]
    cells = [
        [describe(row), f"{row['predicted'] / 2**20:.1f}", f"{row['measured'] / 2**20:.1f}", f"{ratio:.3f}"]
        for row, ratio in zip(rows, ratios, strict=True)
    ]
    table = common.table(["memory of a step", "predicted MiB", "measured MiB", "predicted/measured"], cells)
    spread = f"least {min(ratios):.3f}, most {max(ratios):.3f} in {len(rows)} cases"
    return f"{table}\n\n- memory, predicted over measured: {spread}."


def render_time(rows: list[dict[str, Any]], link: str) -> str:
    cells = [
        [describe(r), f"{r['predicted']:.3f}", f"{r['measured']:.3f}", f"{r['predicted'] / r['measured']:.3f}",
         f"{r['exposed'] / r['predicted']:.2f}"]
        for r in rows
    ]  # fmt: skip
    ratios = [r["predicted"] / r["measured"] for r in rows]
    table = common.table(["time of a step", "predicted s", "measured s", "predicted/measured", "share sent"], cells)
    summary = f"- time, predicted over measured: least {min(ratios):.3f}, most {max(ratios):.3f} in {len(rows)} cases."
    return f"{table}\n\n{summary}\n\nWhat `longspan bench` measured before:\n\n```toml\n{link}```"


if __name__ == "__main__":
    common.command(main, __doc__)
