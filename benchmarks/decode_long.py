"""Generated tokens over a cache that is larger than the CPU's: 1, 2 and 4 ranks, and plain transformers on one process.

    python -m benchmarks.decode_long [--quick]

The cache is filled with random keys and values, the same for every row of the table: at such lengths a prefill would
take minutes. The rows take turns, so that another load on the machine disturbs all of them. The table has the
milliseconds of a token (median, and the fastest), the CPU time of the busiest rank in its best turn, which waits of any
kind do not change, the bytes of cache and weights that a rank reads, and the error of the logits.

Below it: the host's time for a token of a deep, narrow model, whose operators compute next to nothing: as an ordinary
step, and what is left of it if the step is replayed as a CUDA graph (`cuda_graph=True`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor

import longspan
from benchmarks import common
from longspan.cache.static import StaticDecode
from longspan.comm.consistency import local_part
from longspan.core.heads import split_heads
from longspan.hf.state import state_of
from tests.pool import RankPool

HEADS, DIM, HIDDEN, LAYERS = 16, 64, 1024, 2
SIZES = {False: (24576, 3, 16), True: (256, 2, 4)}  # cached tokens, turns, tokens of a turn
MESHES: dict[int, list[dict[str, int]]] = {
    1: [{}],
    2: [{"ring": 2}, {"ulysses": 2}, {"tensor": 2}],
    4: [{"ring": 4}, {"ring": 2, "tensor": 2}],
}


def _model() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=HIDDEN, intermediate_size=2 * HIDDEN, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=HEADS, head_dim=DIM, max_position_embeddings=1 << 20,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config).float().eval()


def _keys_and_values(cached: int) -> list[list[Tensor]]:
    g = torch.Generator().manual_seed(1)
    return [[torch.randn(1, HEADS, cached, DIM, generator=g) for _ in range(2)] for _ in range(LAYERS)]


def _made(axes: dict[str, int] | None, cached: int, room: int) -> tuple[Any, Any]:
    """Return a model and its filled cache; plain transformers' if `axes` is None."""
    model = _model()
    if axes is None:
        plain = transformers.DynamicCache(config=model.config)
        for layer, (k, v) in enumerate(_keys_and_values(cached)):
            plain.update(k, v, layer)
        return model, plain
    sp = longspan.SequenceSharding(longspan.init_mesh(**axes))
    model = longspan.parallelize(model, sp, fsdp=False)
    cache = longspan.ShardedCache(model, room=cached + room)
    cache.kv_placement.add(sp.layout, cached)
    mine = split_heads(HEADS // sp.tensor_size, HEADS // sp.tensor_size, sp.ulysses_size)[sp.ulysses_rank]
    first = sp.tensor_rank * HEADS // sp.tensor_size
    heads = slice(first + mine.kv_start, first + mine.kv_stop)
    for layer, parts in enumerate(_keys_and_values(cached)):
        held = cache.kv_placement.held(sp.ring_rank)
        cache.layer_cache(layer).fill([torch.cat([x[:, heads, a:b] for a, b in held], 2) for x in parts], 0)
    return model, cache


@torch.no_grad()
def _turn(axes: dict[str, int] | None, cached: int, ids: Tensor) -> dict[str, Any]:
    """Decode some tokens; return their median seconds and logits."""
    model, cache = _made(axes, cached, ids.shape[1])
    times, logits, cpu = [], [], []
    for new in ids.split(1, 1):
        began, worked = time.perf_counter(), time.process_time()
        logits.append(model(input_ids=new, past_key_values=cache, logits_to_keep=1).logits[0, -1])
        times.append(time.perf_counter() - began)
        cpu.append(time.process_time() - worked)
    stored = cache.nbytes if axes is not None else sum(x.keys.nbytes + x.values.nbytes for x in cache.layers)
    weights = sum(local_part(p).nbytes for name, p in model.named_parameters() if "embed" not in name)
    middle, worked = statistics.median(times), statistics.median(cpu)
    return {
        "s": middle,
        "fastest_s": min(times),
        "cpu_s": worked,
        "logits": torch.stack(logits),
        "cache": stored,
        "weights": weights,
    }


def measure(quick: bool) -> list[dict[str, Any]]:
    cached, turns, n = SIZES[quick]
    ids = torch.randint(0, 512, (1, n), generator=torch.Generator().manual_seed(2))
    rows: list[tuple[str, int, dict[str, int] | None]] = [("plain transformers", 1, None)]
    for world in (1, 2) if quick else (1, 2, 4):
        for axes in MESHES[world]:
            rows.append((" ".join(f"{axis}={size}" for axis, size in axes.items()) or "one rank", world, axes))
    pools = {world: RankPool(world, timeout=600) for world in {world for _, world, _ in rows}}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name, *_ in rows}
    for _ in range(turns):
        for name, world, axes in rows:
            ranks = pools[world].run(_turn, axes, cached, ids)
            found[name].append(ranks[0] | {key: max(one[key] for one in ranks) for key in ("s", "fastest_s", "cpu_s")})
    for pool in pools.values():
        pool.close()
    expected = found["plain transformers"][0]["logits"]
    return [
        {
            "mesh": name,
            "ms": 1e3 * statistics.median(one["s"] for one in turns_of),
            "fastest_ms": 1e3 * min(one["fastest_s"] for one in turns_of),
            "cpu_ms": 1e3 * min(one["cpu_s"] for one in turns_of),
            "cache_mib": turns_of[-1]["cache"] / 2**20,
            "weights_mib": turns_of[-1]["weights"] / 2**20,
            "error": float((turns_of[0]["logits"] - expected).norm() / expected.norm()),
        }
        for name, turns_of in found.items()
    ]


@torch.no_grad()
def host_times(quick: bool) -> dict[str, float]:
    """Return microseconds of a token on one rank: plain, an ordinary step, and a replayed one without its replay."""
    layers, tokens = (2, 10) if quick else (32, 100)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=2,
    )  # fmt: skip
    plain = transformers.AutoModelForCausalLM.from_config(config).eval()
    sp = longspan.SequenceSharding(longspan.init_mesh())
    model = longspan.parallelize(transformers.AutoModelForCausalLM.from_config(config).eval(), sp, fsdp=False)
    replayed = longspan.ShardedCache(model)
    replayed.static = StaticDecode(torch.device("cpu"), _captured_and_not_replayed)
    state_of(model).forward.replay_decode_steps()
    ids, times = torch.zeros(1, 64, dtype=torch.int64), {}
    caches = {
        "plain transformers": (plain, transformers.DynamicCache(config=config)),
        "an ordinary step": (model, longspan.ShardedCache(model)),
        "around a replay": (model, replayed),
    }
    for name, (of, cache) in caches.items():
        of(input_ids=ids, past_key_values=cache)
        each = []
        for _ in range(tokens):
            began = time.perf_counter()
            of(input_ids=ids[:, :1], past_key_values=cache, logits_to_keep=1)
            each.append(time.perf_counter() - began)
        times[name] = 1e6 * statistics.median(each)
    return times


def _captured_and_not_replayed(run: Callable[[], list[Any]]) -> Callable[[], list[Any]]:
    out = run()
    return lambda: out


def main(quick: bool = False) -> None:
    """Decode; `quick`: a short cache, to see that it runs, not how fast."""
    torch.set_num_threads(1)
    env = common.environment(["longspan", "torch", "transformers"])
    rows, host = measure(quick), host_times(quick)
    cached, turns, n = SIZES[quick]
    table = common.table(
        ["mesh", "ms/token", "fastest", "CPU ms", "cache MiB", "weights MiB", "error"],
        [
            [
                row["mesh"], f"{row['ms']:.1f}", f"{row['fastest_ms']:.1f}", f"{row['cpu_ms']:.1f}",
                f"{row['cache_mib']:.0f}", f"{row['weights_mib']:.0f}", f"{row['error']:.1e}",
            ]
            for row in rows
        ],
    )  # fmt: skip
    text = (
        f"{table}\n\nLlama: {LAYERS} layers, hidden {HIDDEN}, {HEADS} heads of {DIM}; fp32; {cached:,} cached tokens, "
        f"{turns} turns of {n} tokens.\n\nHost time of a token, a Llama of {2 if quick else 32} narrow layers, "
        f"in microseconds: " + ", ".join(f"{name} {us:,.0f}" for name, us in host.items()) + "."
    )
    name = "decode-long" + ("-quick" if quick else "")
    common.write_report(name, "Generated tokens over a long cache", env, text, [*rows, host])


if __name__ == "__main__":
    common.command(main, __doc__)
