"""A step of a mixture of experts whose experts are sharded over data x sequence, next to FSDP alone.

    python -m benchmarks.experts
    python -m benchmarks.experts --tokens 512 --experts-in-all 64

FSDP alone (`experts=1`) gathers all experts of a layer on every rank; with `experts` ranks send each other tokens. Loss
and gradients are compared first. Bytes are what the rank with most sends in a step, next to the planner's, which
assumes a router that sends each expert as many tokens; here it is an untrained one. Memory is the rise over a step of
what tensors hold, without weights and optimizer state at rest, which are the same.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import transformers

import longspan
from benchmarks import common
from longspan.plan import Job, cost, read_hardware
from longspan.plan.from_model import shape_from_config
from tests.counting import count_sent

MIB = 2**20
PER_TOKEN, LAYERS = 2, 4


def main(
    ranks: int = 4,
    tokens: tuple[int, ...] = (512, 4096, 16384),
    experts_in_all: int = 32,
    repeats: int = 5,
    name: str = "experts",
) -> None:
    """Compare numbers of ranks over which experts are sharded."""
    env = common.environment(["longspan", "torch", "transformers"])
    rows = [row for n in tokens for row in common.run_ranks(measure, ranks, n, experts_in_all, repeats)]
    common.write_report(name, "Experts over the sequence group", env, describe(rows, ranks, experts_in_all), rows)


def settings(experts: int, tokens: int) -> dict[str, Any]:
    return {
        "model_type": "qwen3_moe", "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "head_dim": 32,
        "moe_intermediate_size": 384, "num_hidden_layers": LAYERS, "num_attention_heads": 8, "num_key_value_heads": 8,
        "num_experts": experts, "num_experts_per_tok": PER_TOKEN, "max_position_embeddings": tokens,
    }  # fmt: skip


def measure(tokens: int, experts: int, repeats: int) -> list[dict[str, Any]]:
    """Return a row for FSDP alone and for each number of ranks; run by every rank."""
    world = dist.get_world_size()
    sp = longspan.SequenceSharding(longspan.init_mesh(ulysses=world))
    given = settings(experts, tokens)
    config = transformers.Qwen3MoeConfig(**{key: value for key, value in given.items() if key != "model_type"})
    batch = torch.randint(0, 512, (1, tokens), generator=torch.Generator().manual_seed(0))
    sizes = [size for size in (1, 2, 4, 8) if world % size == 0]
    models: dict[int, Any] = {}
    for size in sizes:
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
        models[size] = longspan.parallelize(model, sp, experts=size).train()

    def step(size: int) -> float:
        loss = models[size](input_ids=batch, labels=batch).loss
        loss.backward()
        return float(loss.detach())

    rows, losses = [], {size: step(size) for size in sizes}
    for size in sizes:
        pairs = zip(models[size].parameters(), models[1].parameters(), strict=True)
        worst = max(common.relative_error(p.grad.full_tensor(), q.grad.full_tensor()) for p, q in pairs)
        if worst > 1e-3 or abs(losses[size] - losses[1]) > 1e-5:
            raise RuntimeError(
                f"experts={size}: gradients are off by {worst:.1e}, the loss by {losses[size] - losses[1]}"
            )
        rows.append({"tokens": tokens, "experts": size, "worst": worst})
    for row in rows:
        size = row["experts"]
        for model in models.values():
            model.zero_grad()
        rise = torch.tensor(common.memory_rise(lambda size=size: step(size)))
        dist.all_reduce(rise, op=dist.ReduceOp.MAX)
        with count_sent() as log:
            step(size)
        sent = common.most_sent(log)
        job = Job(context=tokens, dtype="fp32").on(experts=size)
        plan = cost(shape_from_config(given, "model"), job.on(ulysses=world), read_hardware("cpu"))
        planned = sum(each.bytes_total for each in plan.comm)
        row |= {"rise": int(rise), "sent": sent, "planned": planned}
    wall, cpu = common.alternate({str(size): lambda size=size: step(size) for size in sizes}, repeats)
    for row in rows:
        row |= {"wall": wall[str(row["experts"])], "cpu": cpu[str(row["experts"])]}
    return rows


def describe(rows: list[dict[str, Any]], ranks: int, experts: int) -> str:
    header = [
        "tokens",
        "experts=",
        "time / FSDP alone",
        "CPU time / FSDP alone",
        "memory MiB",
        "sent MiB",
        "planned MiB",
    ]
    cells = []
    for row in rows:
        alone = next(other for other in rows if other["tokens"] == row["tokens"] and other["experts"] == 1)
        cells.append(
            [
                f"{row['tokens']:,}", str(row["experts"]),
                f"{common.paired_ratio(row['wall'], alone['wall']):.2f}",
                f"{common.paired_ratio(row['cpu'], alone['cpu']):.2f}",
                f"{row['rise'] / MIB:.1f}", f"{sum(row['sent'].values()) / MIB:.1f}", f"{row['planned'] / MIB:.1f}",
            ]
        )  # fmt: skip
    worst = max(row["worst"] for row in rows)
    return "\n".join(
        [
            common.table(header, cells),
            "",
            f"- Qwen3-MoE, {LAYERS} layers, {experts} experts, {PER_TOKEN} per token; fp32; ulysses={ranks}.",
            "  A step is a forward and a backward. Memory is its rise, without weights and optimizer state at rest.",
            f"- gradients are within {worst:.0e} of FSDP alone, relative to the largest element.",
            "- planned: with a router that sends each expert as many tokens.",
        ]
    )


if __name__ == "__main__":
    common.command(main, __doc__)
