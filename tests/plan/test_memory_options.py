"""The memory options in the planner: bytes by hand, what they send and cost, which are chosen, their flags."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from longspan.cli import main, parse
from longspan.core.errors import LongspanError
from longspan.core.memory import FASTEST, LONGEST, Memory
from longspan.core.rope import ModelPositions
from longspan.plan import CATALOGUE, Hardware, Job, ParallelConfig, cost, longest_context, read_hardware, read_model
from longspan.plan.command import PlanConfig
from longspan.plan.cost.saved import (
    mlp_backward_bytes,
    mlp_tiles,
)
from longspan.plan.cost.times import NORM_BYTES
from longspan.plan.from_model import shape_from_config
from longspan.plan.job import CostContext
from longspan.plan.memory_options import choose_memory, combinations, search_longest_context

H100, CPU = CATALOGUE["h100"], CATALOGUE["cpu"]
LLAMA = read_model("llama-3.1-8b")
CONFIG = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8, "head_dim": 8,
    "num_key_value_heads": 4, "intermediate_size": 96, "vocab_size": 256,
}  # fmt: skip
SMALL = shape_from_config(CONFIG, "small")
LAYER = SMALL.layers[0]
TWO = ParallelConfig(ulysses=2)
# Bytes per token: hidden states 64 elements of 2 bytes, Q and output as many, K and V 64 together.
HIDDEN, Q, KV, OUT = 128, 128, 128, 128


# ---- Bytes, by hand.


def test_a_tile_of_the_mlp() -> None:
    each = 4 * 2 * 96 + 2 * 2 * 96  # what a forward saves, and two gradients under way
    for tokens, memory_options, tiles in (
        (81920, Memory(tiled=True), 4 * each // HIDDEN),
        (8192, Memory(tiled=True), 4),  # of 2,048 tokens at least
        (100, Memory(tiled=True), 1),
    ):
        job = Job(context=2 * tokens, memory=memory_options)
        c = CostContext(SMALL, job.on(ulysses=2))
        assert mlp_tiles(LAYER, c) == tiles
        sums = 4 * 3 * 64 * 96 if tiles > 1 else 0
        rows = -(-tokens // tiles)
        assert mlp_backward_bytes(LAYER, c) == ((each + 3 * 4 * 64) * rows, sums)  # and a norm in fp32, three times
        assert mlp_backward_bytes(LAYER, replace(c, job=replace(job, dtype="fp32")))[1] == 0


def test_offloaded_bytes() -> None:
    saved = 512 * HIDDEN
    job = Job(context=1024, memory=Memory(checkpointing="full"))
    here, host = (
        cost(SMALL, replace(job, memory=replace(job.memory, offload=where)).on(ulysses=2), H100)  # type: ignore[arg-type]
        for where in ("none", "host")
    )
    assert (here.offloaded.host_bytes, host.offloaded.host_bytes) == ({}, {"activations": 4 * saved})
    assert host.offloaded.host_node_bytes == 2 * 4 * saved
    long = Job(context=1 << 22, memory=Memory(checkpointing="full"))
    layer = (1 << 21) * HIDDEN
    gone = cost(SMALL, replace(long, memory=replace(long.memory, offload="host")).on(ulysses=2), H100)
    before = cost(SMALL, long.on(ulysses=2), H100)
    assert before.memory_total_bytes - gone.memory_total_bytes == pytest.approx(2 * layer, rel=1e-3)


def test_weights_on_the_host() -> None:
    job = Job(context=1 << 16, memory=LONGEST)
    held, moved = (cost(LLAMA, replace(job, memory=m), H100) for m in (LONGEST, replace(LONGEST, cpu_offload=True)))
    n = LLAMA.params
    assert held.memory_bytes["weights"] == 4 * n and held.memory_bytes["optimizer"] == 8 * n
    assert moved.memory_bytes["weights"] == moved.memory_bytes["optimizer"] == 0
    assert moved.offloaded.host_bytes == {"weights": 4 * n, "optimizer": 8 * n, "gradients": 4 * n}
    assert moved.step_seconds > held.step_seconds and moved.memory_bytes["gathered_weights"] > 0
    with pytest.raises(LongspanError, match="weight_sharding is off"):
        Job(context=8192, weight_sharding=False, memory=Memory(cpu_offload=True))


def test_a_host_that_is_too_small() -> None:
    job = Job(context=1 << 20, memory=replace(LONGEST, offload="host"))
    small = replace(H100, host_memory=100e9)
    assert cost(LLAMA, job.on(ulysses=8), H100).fits
    plan = cost(LLAMA, job.on(ulysses=8), small)
    assert plan.headroom_bytes > 0 and not plan.fits
    assert "275 GB of 90 GB of host memory per node (of each GPU: activations 34.4 GB)" in plan.reasons[0]
    assert longest_context(LLAMA, job.on(ulysses=8), small) < longest_context(LLAMA, job.on(ulysses=8), H100)


# ---- What is sent, and how long it takes.


def sent(memory_options: Memory, mesh: ParallelConfig = TWO) -> dict[str, tuple[int, int]]:
    """(bytes, calls) of a layer, by what is sent."""
    plan = cost(
        SMALL,
        Job(context=1024, memory=memory_options).on(**mesh.degrees),
        H100,
    )
    return {c.what: (c.bytes_total // 4, c.count // 4) for c in plan.comm if c.method}


def test_the_all_to_all_of_each_memory_option() -> None:
    """512 tokens, of whose rows half is another rank's: Q + K + V one way, an output the other."""
    to_heads, out = 512 * (Q + KV) // 2, 512 * OUT // 2
    plain = {
        "Q, K, V to heads": (to_heads, 1), "O to tokens": (out, 1),
        "dO to heads": (out, 1), "dQ, dK, dV to tokens": (to_heads, 1),
    }  # fmt: skip
    assert sent(FASTEST) == sent(Memory(tiled=True)) == plain
    twice = {"Q, K, V to heads": (2 * to_heads, 2), "O to tokens": (2 * out, 2)}
    assert sent(Memory(checkpointing="full")) == {**plain, **twice}
    wide = {name: each for name, each in plain.items() if name != "dO to heads"}
    wide["Q, K, V, O, dO to heads"] = (to_heads + 2 * out, 1)
    assert sent(Memory(checkpointing="selective")) == wide
    slices = {name: (size, 2 * calls) for name, (size, calls) in plain.items()}
    for checkpointing, of_q, of_o in (("none", 2, 2), ("selective", 2, 3), ("full", 3, 3)):
        again = {"Q, K, V to heads": (of_q * to_heads, 2 * of_q), "O to tokens": (of_o * out, 2 * of_o)}
        assert sent(Memory(checkpointing=checkpointing, head_slices=2)) == {**slices, **again}  # type: ignore[arg-type]


def test_a_ring_in_slices_of_heads_sends_the_same() -> None:
    plain, slices = (
        sent(memory_options, ParallelConfig(ring=4)) for memory_options in (FASTEST, Memory(head_slices=4))
    )
    assert slices == {what: (size, 4 * calls) for what, (size, calls) in plain.items()}
    selective, full = (sent(Memory(checkpointing=how), ParallelConfig(ring=4)) for how in ("selective", "full"))  # type: ignore[arg-type]
    assert selective == plain and full["K, V to the next"][1] == plain["K, V to the next"][1] * 3 // 2


def test_the_time_of_each_memory_option() -> None:
    """A second forward, of everything or without the attention; a tiled MLP adds its own."""
    job, mesh = Job(context=1 << 19), ParallelConfig(ulysses=8)
    seconds = {
        m: cost(LLAMA, replace(job, memory=m).on(**mesh.degrees), H100).step_seconds for m in combinations(job, H100)
    }
    assert seconds[FASTEST] == min(seconds.values())
    ordered = [seconds[Memory(checkpointing=how)] for how in ("none", "selective", "full", "grouped")]  # type: ignore[arg-type]
    assert ordered == sorted(set(ordered))
    matmul = (3 * 4096 * 14336) * 2.0 * (1 << 16) * 32 / (H100.flops * H100.matmul_efficiency)
    norms = 4 * NORM_BYTES * 4096 * (1 << 16) * 32 / H100.memory_bandwidth
    act = 7 * 2 * LLAMA.layers[0].mlp.width * (1 << 16) * 32 / H100.memory_bandwidth
    for memory, saved in ((FASTEST, act), (Memory(checkpointing="full"), 0.0)):
        assert seconds[replace(memory, tiled=True)] - seconds[memory] == pytest.approx(matmul + norms - saved)


def test_a_step_waits_for_a_slow_host_link() -> None:
    job, mesh = Job(context=1 << 14, memory=Memory(checkpointing="full", offload="host")), ParallelConfig(ulysses=8)
    slow = replace(H100, host_bandwidth=1e8)
    fast, waits = cost(LLAMA, job.on(**mesh.degrees), H100), cost(LLAMA, job.on(**mesh.degrees), slow)
    assert fast.offload_seconds == 0 < waits.offload_seconds
    assert waits.step_seconds == pytest.approx(fast.step_seconds + waits.offload_seconds)
    assert any("the host link needs" in note and "wait for it" in note for note in waits.notes)


# ---- Which are chosen.


def test_the_fastest_that_fits_is_chosen() -> None:
    job, mesh = Job(context=1 << 19), ParallelConfig(ulysses=8)
    found, why = choose_memory(LLAMA, job.on(**mesh.degrees), H100)
    fitting = {m: cost(LLAMA, replace(job, memory=m).on(**mesh.degrees), H100) for m in combinations(job, H100)}
    seconds = min(plan.step_seconds for plan in fitting.values() if plan.fits)
    assert fitting[found].fits and fitting[found].step_seconds == pytest.approx(seconds, rel=1e-3)
    assert found.describe() in why and "does not fit" in why and "GB per GPU" in why
    short, nothing_faster = choose_memory(LLAMA, replace(job, context=4096).on(**mesh.degrees), H100)
    assert short == FASTEST and "does not fit" not in nothing_faster
    fixed, _ = choose_memory(LLAMA, job.on(**mesh.degrees), H100, {"checkpointing": "full", "head_slices": 2})
    assert (fixed.checkpointing, fixed.head_slices) == ("full", 2)


def test_on_many_gpus_all_options_are_tried_if_the_few_do_not_fit() -> None:
    job = Job(context=1 << 24, batch=64).on(data=64, ring=4, ulysses=8)
    few = combinations(job, H100, few=True)
    unlimited = replace(LLAMA, positions=ModelPositions())
    assert not any(cost(unlimited, replace(job, memory=memory), H100).fits for memory in few)
    found, _ = choose_memory(unlimited, job, H100)
    assert found not in few and cost(unlimited, replace(job, memory=found), H100).fits


def test_the_error_lists_items_and_suggestions_if_nothing_fits() -> None:
    with pytest.raises(LongspanError) as error:
        choose_memory(LLAMA, Job(context=4 << 20), H100)
    for part in (
        "4,194,304 tokens do not fit on one rank of h100",
        "activations_hidden",
        "GB per GPU",
        "GPUs suffice",
    ):
        assert part in str(error.value), part
    with pytest.raises(LongspanError, match="offload='host' moves what checkpointing saves"):
        choose_memory(LLAMA, Job(context=8192), H100, {"checkpointing": "none", "offload": "host"})
    with pytest.raises(LongspanError, match="needs at least 64 query heads"):
        choose_memory(LLAMA, Job(context=8192).on(ulysses=64), H100)


def test_the_longest_context_fits_and_the_next_does_not() -> None:
    found = search_longest_context(LLAMA, Job(context=1), 2, H100)
    assert found is not None and found.fits and found.runs and found.job.context % 1024 == 0
    longer = replace(found.job, context=found.job.context + 1024)
    with pytest.raises(LongspanError):
        choose_memory(LLAMA, longer.on(**found.mesh.degrees), H100)
    assert search_longest_context(read_model("llama-3.1-405b"), Job(context=1), 1, read_hardware("l40s")) is None


def goal(name: str, gpus: int, fixed: dict[str, Any] | None = None, hardware: Hardware = H100) -> int:
    found = search_longest_context(read_model(name), Job(context=1), gpus, hardware, fixed or {})
    return 0 if found is None else found.job.context


def test_the_goals() -> None:
    """The longest contexts reach the goals and equal docs/explanation/planner.md."""
    page = (Path(__file__).parents[2] / "docs" / "explanation" / "planner.md").read_text()
    for name, gpus, least in (("llama-3.1-8b", 1, 600_000), ("llama-3.1-8b", 8, 5_000_000), ("llama-3.1-70b", 32, 4e6)):
        context = goal(name, gpus)
        assert context >= least
        assert f"| `{name}`, {gpus} | {context:,} |" in page
    assert goal("llama-3.1-8b", 1, {"cpu_offload": False}) == 0  # 128 GB of weights, gradients and AdamW


# ---- Said and read.


def test_the_levels() -> None:
    def memory_options(*words: str) -> Memory:
        return parse(PlanConfig, ["--model", "x", *words], prog="p").job().memory  # type: ignore[no-any-return]

    assert memory_options() == FASTEST and memory_options("--memory", "longest") == LONGEST
    assert memory_options("--memory", "longest,checkpointing=none") == replace(LONGEST, checkpointing="none")
    assert memory_options("--memory", "checkpointing=full") == Memory(checkpointing="full")
    assert memory_options("--memory", "auto,offload=host") == Memory(checkpointing="full", offload="host")


def shown(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert main(["plan", "--model", "llama-3.1-8b", *args]) == 0
    return capsys.readouterr().out


def test_auto_and_max_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    report = json.loads(shown(capsys, "--context", "2M", "--memory", "auto", "--json"))
    best = report["recommended"]
    assert best["fits"] and best["memory"]["checkpointing"] != "none" and best["reasons"][0].startswith("memory: ")
    assert report["job"]["memory"] == best["memory"]
    report = json.loads(shown(capsys, "--gpus", "2", "--context", "max", "--json"))
    best = report["recommended"]
    assert report["job"]["context"] == best["max_context"] // 1024 * 1024 >= 600_000
    assert best["memory"]["cpu_offload"] and best["host_node_bytes"] == 2 * sum(best["host_bytes"].values())
    assert f"context: {report['job']['context']}" in best["yaml"] and "cpu_offload: true" in best["yaml"]
    assert main(["plan", "--model", "llama-3.1-405b", "--gpu", "l40s", "--gpus", "1", "--context", "max"]) == 2
    assert "not even 1,024 tokens fit" in capsys.readouterr().err


def test_max_in_a_file(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for text, context in (("max", "max"), ("128k", 131072), ("4096", 4096)):
        (tmp_path / "plan.yaml").write_text(f"model: x\ncontext: {text}\nmemory: {{head_slices: 0}}\n")
        config = parse(PlanConfig, ["--config", str(tmp_path / "plan.yaml")], prog="p")
        assert (config.context, config.memory.to_memory().head_slices) == (context, 0)
    (tmp_path / "plan.yaml").write_text("model: x\ncontext: most\n")
    assert main(["plan", "--config", str(tmp_path / "plan.yaml")]) == 2
    assert "context: 'most' is invalid" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("context", "ring", "ulysses", "batch"), [(1 << 12, 1, 8, 1), (1 << 17, 2, 2, 3), (999, 3, 1, 1)]
)
def test_no_memory_option_is_faster_than_none(context: int, ring: int, ulysses: int, batch: int) -> None:
    for fixed in ({}, {"checkpointing": "full"}, {"tiled": True}):
        job, mesh = Job(context=context, batch=batch), ParallelConfig(ring=ring, ulysses=ulysses)
        times = {
            m: cost(LLAMA, replace(job, memory=m).on(**mesh.degrees), H100).step_seconds
            for m in combinations(job, H100, fixed)
        }
        assert times[Memory(**fixed)] <= min(times.values()) * 1.0001
