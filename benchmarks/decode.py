"""Generation on each mesh, compared with one process and with the planner.

    python -m benchmarks.decode [--quick]

The table has a row per mesh (the first is one process with transformers' own model and cache) and dtype of the cache:

- seconds of the prefill (to the first token), and generated tokens per second, by the median token. The plain process
  and one rank take turns in one process; the other meshes run after them;
- MiB of keys and values on the rank with most, and planned (equal for the exact cache);
- MiB of tensors at the peak of the prefill, and planned;
- bytes that a rank sends per generated token, and for a step of 128 new tokens, each next to the formula (equal);
- relative error of the logits of all generated tokens, which are forced to be the same.

Below it: the formulas for the reference's step of 128 tokens, Llama-2-70B on 8 GPUs in bf16. Ranks are processes on
CPUs over gloo, so ratios of bytes hold on any machine, times do not.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import Tensor

import longspan
from benchmarks import common
from longspan.comm.weights import local_part
from longspan.plan import Job, ParallelConfig, cost, read_hardware, read_model
from longspan.plan.from_model import shape_from_config
from longspan.plan.generation import peak_items
from longspan.plan.job import CostContext
from tests.counting import count_sent
from tests.pool import RankPool

SHORT = 128  # tokens of the reference's short step
SIZES = {False: (1024, 6, 4096, 48), True: (64, 2, 192, 6)}  # hidden, layers, prompt, generated


def _model(quick: bool) -> Any:
    hidden, layers, prompt, new = SIZES[quick]
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=prompt + new + 1 + SHORT,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config).float().eval()


def _timed(model: Any, cache: Any, ids: Tensor, prompt: int) -> tuple[float, float, Tensor]:
    """Return seconds of the prefill, tokens per second after it, and the logits of every new token."""
    times = [time.perf_counter()]
    logits = [model(input_ids=ids[:, :prompt], cache=cache, logits_to_keep=1).logits[:, -1]]
    times.append(time.perf_counter())
    for i in range(prompt, ids.shape[1]):
        logits.append(model(input_ids=ids[:, i : i + 1], cache=cache, use_cache=True).logits[:, -1])
        times.append(time.perf_counter())
    prefill, *tokens = (after - before for before, after in itertools.pairwise(times))
    return prefill, 1 / statistics.median(tokens), torch.stack(logits, 1)


@torch.no_grad()
def _in_turns(quick: bool, ids: Tensor) -> tuple[dict[str, Any], Tensor]:
    """Return the row of plain transformers, and its logits; time it and one rank in turns."""
    prompt, plain = SIZES[quick][2], _model(quick)
    ours = longspan.parallelize(_model(quick), longspan.SequenceSharding(longspan.init_mesh()), fsdp=False)
    runs: dict[str, list[tuple[float, float]]] = {"plain": [], "one rank": []}
    for _ in range(1 if quick else 5):
        cache = transformers.DynamicCache(config=plain.config)
        *figures, expected = _timed(plain, cache, ids, prompt)
        runs["plain"].append(tuple(figures))
        runs["one rank"].append(_timed(ours, longspan.ShardedCache(ours, room=ids.shape[1] + 1), ids, prompt)[:2])
    medians = {name: [statistics.median(column) for column in zip(*each, strict=True)] for name, each in runs.items()}
    nbytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    row = {
        "mesh": "one process", "cache": "exact", "prefill_s": medians["plain"][0],
        "tokens_per_s": medians["plain"][1], "cache_bytes": nbytes, "planned_bytes": nbytes, "memory_bytes": 0,
        "planned_memory_bytes": 0, "sent_per_token": 0, "planned_per_token": 0, "sent_short": 0, "planned_short": 0,
        "logits_error": 0.0, "one_rank": medians["one rank"],
    }  # fmt: skip
    return row, expected


@torch.no_grad()
def _on_mesh(quick: bool, mesh: ParallelConfig, dtype: str, ids: Tensor, expected: Tensor) -> dict[str, Any]:
    _, _, prompt, _ = SIZES[quick]
    axes = {axis: getattr(mesh, axis) for axis in ("ring", "ulysses", "tensor")}
    sp = longspan.SequenceSharding(longspan.init_mesh(**axes))
    source = _model(quick)
    shape = shape_from_config(source.config.to_dict(), "benchmark")
    model = longspan.parallelize(source, sp, fsdp=False)
    cache = longspan.ShardedCache(model, room=ids.shape[1] + 1, dtype=dtype)
    prefill, rate, logits = _timed(model, cache, ids, prompt)
    generated = ids.shape[1] - prompt
    nbytes = cache.nbytes
    with count_sent() as sent:
        model(input_ids=ids[:, :1], cache=cache, logits_to_keep=1)
    with count_sent() as sent_short:
        model(input_ids=ids[:, :SHORT], cache=cache, logits_to_keep=1)
    token = Job(context=prompt, mode="decode", dtype="fp32", weight_sharding=False)
    short = replace(token, context=SHORT, mode="prefill", prefill_chunk=SHORT)
    stored = replace(token, cache=dtype)
    planned = [
        layer.mixing.cache_by_rank(CostContext(shape, stored.on(**mesh.degrees)), generated, prompt)[sp.rank]
        for layer in shape.layers
    ]
    cached = replace(token, context=prompt + generated, cache=dtype)
    of_rank = peak_items(shape, cached.on(**mesh.degrees), read_hardware("cpu"), prompt)
    per_token, of_short = (
        sum(one.bytes_per_gpu * one.count for one in cost(shape, job.on(**mesh.degrees), read_hardware("cpu")).comm)
        for job in (token, short)
    )
    return {
        "mesh": str(mesh),
        "cache": dtype,
        "prefill_s": prefill,
        "tokens_per_s": rate,
        "cache_bytes": nbytes,
        "planned_bytes": sum(planned),
        "memory_bytes": _memory(model, ids[:, :prompt], dtype, ids.shape[1]),
        "planned_memory_bytes": sum(of_rank.values()),
        "sent_per_token": sum(one.bytes for one in sent),
        "planned_per_token": per_token,
        "sent_short": sum(one.bytes for one in sent_short),
        "planned_short": of_short,
        "logits_error": float((logits - expected).norm() / expected.norm()),
    }


def _memory(model: Any, ids: Tensor, dtype: str, room: int) -> int:
    """Return the peak bytes of tensors on this rank while a prompt is read: weights, cache, activations."""
    weights = sum(local_part(p).nbytes for p in model.parameters())

    def prefill() -> None:
        cache = longspan.ShardedCache(model, room=room, dtype=dtype)
        model(input_ids=ids, cache=cache, logits_to_keep=1)

    return weights + common.memory_rise(prefill)


def measure(quick: bool) -> Iterator[dict[str, Any]]:
    _, _, prompt, new = SIZES[quick]
    ids = torch.randint(0, 512, (1, prompt + new), generator=torch.Generator().manual_seed(1))
    for world in (1, 2) if quick else (1, 2, 4):
        pool = RankPool(world, timeout=600)
        if world == 1:
            plain, expected = pool.run(_in_turns, quick, ids)[0]
            one_rank = dict(zip(("prefill_s", "tokens_per_s"), plain.pop("one_rank"), strict=True))
            yield plain
        for mesh in dict.fromkeys(
            (ParallelConfig(ulysses=world), ParallelConfig(ring=world), ParallelConfig(tensor=world))
        ):
            for dtype in ("exact", "int8", "fp8") if world < 4 and mesh.tensor == 1 else ("exact",):
                rows = pool.run(_on_mesh, quick, mesh, dtype, ids, expected)
                if world == 1:
                    rows[0] |= {"mesh": "one rank", **(one_rank if dtype == "exact" else {})}
                most = {
                    name: max(row[name] for row in rows) for name in ("memory_bytes", "sent_per_token", "sent_short")
                }
                yield max(rows, key=lambda row: float(row["cache_bytes"])) | most
        pool.close()


def _reference() -> str:
    """Return bytes and seconds of a layer's communication in the reference's step of 128 tokens (figures 19, 20)."""
    model, hardware = read_model("llama-2-70b"), read_hardware("a100-80gb")
    lines = [f"{SHORT} tokens of {model.name} on 8 x {hardware.name}, a layer:", ""]
    for mesh in (ParallelConfig(ulysses=8), ParallelConfig(tensor=8)):
        plan = cost(model, Job(context=SHORT, mode="prefill", prefill_chunk=SHORT).on(**mesh.degrees), hardware)
        sent = [one for one in plan.comm if one.method]
        nbytes, seconds = (
            sum(x) / len(model.layers) for x in ((s.bytes_total for s in sent), (s.seconds for s in sent))
        )
        lines.append(f"- {mesh}: {nbytes / 1e6:.3f} MB in {1e6 * seconds:.1f} us")
    return "\n".join(lines)


def main(quick: bool = False, name: str = "decode") -> None:
    """Generate on every mesh; `quick`: a tiny model, to see that it runs, not how fast."""
    env = common.environment(["longspan", "torch", "transformers"])
    rows = list(measure(quick))
    hidden, layers, prompt, new = SIZES[quick]
    shape = f"Llama: {layers} layers, hidden {hidden}, 8 query and 4 KV heads; fp32, weights replicated or sharded"
    run = f"over the tensor axis; a prompt of {prompt:,} tokens, then {new} one by one, then {SHORT} at once (B/128)."
    text = f"{_table(rows)}\n\n{shape} {run}\n\n{_reference()}"
    name += "-quick" if quick else ""
    common.write_report(name, "Generation on every mesh, compared with one process", env, text, rows)


def _table(rows: list[dict[str, Any]]) -> str:
    header = ["mesh", "cache", "prefill s", "tokens/s", "cache MiB", "plan", "all MiB", "plan", "B/token", "plan"]
    header += ["B/128", "plan", "error"]
    return common.table(
        header,
        [
            [
                row["mesh"], row["cache"], f"{row['prefill_s']:.3f}", f"{row['tokens_per_s']:.1f}",
                f"{row['cache_bytes'] / 2**20:.3f}", f"{row['planned_bytes'] / 2**20:.3f}",
                *(f"{row[name] / 2**20:.1f}" if row[name] else "" for name in ("memory_bytes", "planned_memory_bytes")),
                f"{row['sent_per_token']:,}", f"{row['planned_per_token']:,}", f"{row['sent_short']:,}",
                f"{row['planned_short']:,}", f"{row['logits_error']:.1e}",
            ]
            for row in rows
        ],
    )  # fmt: skip


if __name__ == "__main__":
    common.command(main, __doc__)
