"""Indexed attention (DeepSeek-V3.2): bytes, memory and time of a layer, next to one process and to dense attention.

    python -m benchmarks.indexed [--tokens 512] [--dense-up-to 512]

A decoder layer of DeepSeek-V3.2 with small sizes takes a training step on two ranks and in one process of transformers,
whose indexer and mask are tokens x tokens. "Dense" is attention alone: all heads of the same choice, given as a mask,
by the Ulysses all-to-all, next to the same choice read by indices. Runs that need tokens x tokens are made up to
`--dense-up-to`. Bytes hold on any machine; times are CPU seconds of all ranks, which other load hardly changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor

import longspan
from benchmarks import common
from longspan.attn.indexed import Lists, Packing, attend_to_chosen
from longspan.plan import Job, ParallelConfig
from longspan.plan.from_model import shape_from_config
from longspan.plan.job import CostContext
from tests.counting import count_sent

CONFIG: dict[str, Any] = {
    "model_type": "deepseek_v32", "vocab_size": 128, "hidden_size": 256, "intermediate_size": 256,
    "num_hidden_layers": 1, "mlp_layer_types": ["dense"], "num_attention_heads": 16, "num_key_value_heads": 16,
    "q_lora_rank": 96, "kv_lora_rank": 48, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
    "index_topk": 128, "index_n_heads": 4, "index_head_dim": 32, "n_group": 1, "topk_group": 1,
    "max_position_embeddings": 1 << 20,
}  # fmt: skip
RANKS = 2
HEADS, DIM, VALUE, WIDTH, RANK = 16, 48, 32, 64, 48


def _model() -> Any:
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[CONFIG["model_type"]](**CONFIG)
    return transformers.AutoModelForCausalLM.from_config(config).float()


def _step(model: Any, tokens: int) -> Callable[[], None]:
    ids = torch.randint(0, CONFIG["vocab_size"], (1, tokens), generator=torch.Generator().manual_seed(1))

    def run() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

    return run


def _measured(runs: dict[str, Callable[[], None]], rounds: int) -> dict[str, dict[str, Any]]:
    """Return CPU seconds of all ranks, peak bytes and bytes sent of each."""
    found: dict[str, dict[str, Any]] = {}
    for name, run in runs.items():
        with count_sent() as sent:
            run()
        by_op = common.most_sent(sent)
        by_op.pop("all_reduce", None)  # sums of the loss and of the weights' gradients
        found[name] = {"sent": sum(by_op.values()), "bytes": common.memory_rise(run)}
    _, seconds = common.alternate(runs, rounds, warmup=0)
    return {name: {**each, "seconds": common.median(seconds[name])} for name, each in found.items()}


def _layer(tokens: int, rounds: int) -> dict[str, Any]:
    sp = longspan.SequenceSharding(longspan.init_mesh(ring=RANKS))
    model = longspan.parallelize(_model(), sp, fsdp=False, check_batches=0)
    row = _measured({"step": _step(model, tokens)}, rounds)["step"]
    job = Job(context=tokens, dtype="fp32").on(**ParallelConfig(ring=RANKS).degrees)
    shape = shape_from_config(CONFIG, "benchmark")
    mixing = shape.layers[0].mixing.sent(CostContext(shape, job))
    row["planned"] = sum(each.bytes * each.calls for each in mixing)
    return row


def _attention(tokens: int, rounds: int) -> dict[str, dict[str, Any]]:
    """Attention of random vectors to random earlier tokens, read by indices, and as a mask of all heads."""
    ring = longspan.SequenceSharding(longspan.init_mesh(ring=RANKS), "contiguous")
    ulysses = longspan.SequenceSharding(longspan.init_mesh(ulysses=RANKS))
    mine, top_k = tokens // RANKS, min(CONFIG["index_topk"], tokens)
    generator = torch.Generator().manual_seed(2)
    chosen = torch.stack([torch.randperm(tokens, generator=generator)[:top_k] for _ in range(tokens)])
    chosen = torch.where(chosen <= torch.arange(tokens)[:, None], chosen, -1)
    local = chosen[ring.rank * mine : (ring.rank + 1) * mine][None, :, None].int()
    q, c = torch.randn(1, mine, HEADS, WIDTH).requires_grad_(), torch.randn(1, mine, 1, WIDTH).requires_grad_()
    heads = [torch.randn(1, mine, HEADS, dim).requires_grad_() for dim in (DIM, DIM, VALUE)]

    def by_indices() -> None:
        attend_to_chosen(q, ring.gather(c), Lists(local), Packing.of_latents(RANK, WIDTH), 0.1).sum().backward()

    allowed = torch.zeros(tokens, tokens + 1, dtype=torch.bool).scatter_(1, chosen.where(chosen >= 0, tokens), True)

    def pairs(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return allowed[i, j]

    def as_mask() -> None:
        longspan.attention(*heads, ulysses, scale=0.1, mask_mod=pairs).sum().backward()

    rows = _measured({"indices": by_indices, "mask": as_mask}, rounds)
    rows["mask"]["bytes"] += allowed.nbytes
    return rows


def _all(tokens: tuple[int, ...], dense_up_to: int, rounds: int) -> list[dict[str, Any]]:
    data = []
    for n in tokens:
        data.append({"tokens": n, "layer": _layer(n, rounds)})
        if n <= dense_up_to:
            # Each rank runs its own.
            plain = _measured({"step": _step(_model(), n)}, rounds)["step"]
            data[-1]["one_process"] = {**plain, "seconds": plain["seconds"] / RANKS}
            data[-1]["attention"] = _attention(n, rounds)
    return data


def main(
    tokens: tuple[int, ...] = (4096, 16384, 65536),
    dense_up_to: int = 8192,
    rounds: int = 1,
    name: str = "indexed",
) -> None:
    """Measure every length."""
    env = common.environment(["torch", "transformers"])
    layers, attention = list[list[str]](), list[list[str]]()
    data = common.run_ranks(_all, RANKS, tokens, dense_up_to, rounds)
    for row in data:
        n, ours, plain, rows = f"{row['tokens']:,}", row["layer"], row.get("one_process"), row.get("attention")
        layers.append([n, *_cells(ours), f"{ours['sent']:,}", f"{ours['planned']:,}", *_cells(plain)])
        if rows is not None:
            both = rows["indices"], rows["mask"]
            attention.append([n, *(x for one in both for x in (*_cells(one), f"{one['sent']:,}"))])
    text = (
        common.table(["tokens", "CPU s", "MiB a rank", "bytes sent", "planned", "one process: CPU s", "MiB"], layers)
        + f"\n\nA step of one layer, fp32, on {RANKS} ranks, and in one process of transformers (sdpa).\n\n"
    )
    text += common.table(
        ["tokens", "indices: CPU s", "MiB a rank", "bytes sent", "mask: CPU s", "MiB a rank", "bytes sent"], attention
    ) + (
        f"\n\nAttention alone, forward and backward, of {HEADS} heads to {CONFIG['index_topk']} chosen tokens: by "
        f"indices into {WIDTH} elements a token, and with all heads and a mask of tokens x tokens by the Ulysses "
        f"all-to-all."
    )
    common.write_report(name, "Indexed attention", env, text, data)


def _cells(row: dict[str, Any] | None) -> list[str]:
    return ["-", "-"] if row is None else [f"{row['seconds']:.2f}", f"{row['bytes'] / 2**20:,.0f}"]


if __name__ == "__main__":
    common.command(main, __doc__)
