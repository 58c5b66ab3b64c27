"""The planner: consistent and monotone costs, the command, rings, hardware files, bad input, JSON and tables."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from yaml import safe_load

from longspan.cli import main
from longspan.core.errors import LongspanError
from longspan.core.memory import FASTEST, LONGEST, Memory, MemoryChoice
from longspan.plan import (
    CATALOGUE,
    Hardware,
    Job,
    ModelShape,
    ParallelConfig,
    Plan,
    cost,
    longest_context,
    read_hardware,
    read_model,
    search,
)
from longspan.plan.cost.communication import method_sent
from longspan.plan.cost.times import LayerSeconds, hidden_layer_seconds, ring_wait, seconds_of, step_times
from longspan.plan.from_model import shape_from_config
from longspan.plan.hardware import OPS, MeasuredLink
from longspan.plan.job import CostContext
from longspan.plan.layers import Causal, Chunk, Window
from longspan.plan.limits import refusal
from longspan.plan.names import MODELS
from longspan.plan.search import on_meshes
from longspan.plan.views.report import SCHEMA, command, yaml
from longspan.train.arguments import Settings, read
from tests.choose import each_value
from tests.plan.jobs import job_on

A100 = CATALOGUE["a100-80gb"]
LLAMA = read_model("llama-3.1-8b")

kv_heads = st.sampled_from([1, 2, 4, 8])
SHAPES = st.builds(
    lambda layers, kv, group, d, ffn, vocab, tied: shape_from_config(
        {
            "model_type": "llama", "hidden_size": 8 * kv * group * d, "num_hidden_layers": layers, "head_dim": 32,
            "num_attention_heads": kv * group, "num_key_value_heads": kv, "intermediate_size": 128 * ffn,
            "vocab_size": vocab, "tie_word_embeddings": tied,
        },
        "drawn",
    ),
    st.integers(1, 12), kv_heads, st.sampled_from([1, 2, 3, 4]), st.integers(1, 16), st.integers(1, 16),
    st.sampled_from([256, 1000, 32000]), st.booleans(),
)  # fmt: skip
JOBS = st.builds(
    lambda context, mode, dtype, batch, options: job_on(
        ParallelConfig(), context=context, mode=mode, dtype=dtype, batch=batch, **options
    ),
    st.integers(64, 1 << 20),
    st.sampled_from(["train", "prefill", "decode"]),
    st.sampled_from(["bf16", "fp32"]),
    st.sampled_from([1, 2, 4]),
    st.fixed_dictionaries(
        {
            "weight_sharding": st.booleans(),
            "memory": st.sampled_from([FASTEST, Memory(checkpointing="full"), LONGEST]),
            "layout": st.sampled_from(["zigzag", "contiguous"]),
        }
    ),
)  # fmt: skip
MESHES = st.builds(ParallelConfig, *[st.sampled_from([1, 2, 4])] * 4)


def planned(model: ModelShape, job: Job, mesh: ParallelConfig) -> Plan:
    assume(refusal(model, job.on(**mesh.degrees)) is None)
    return cost(model, job.on(**mesh.degrees), A100)


# ---- Consistent and monotone.


@settings(max_examples=60, deadline=None)
@given(SHAPES, JOBS, MESHES)
def test_sums_are_totals(model: ModelShape, job: Job, mesh: ParallelConfig) -> None:
    plan = planned(model, job, mesh)
    assert all(size >= 0 for size in plan.memory_bytes.values())
    assert sum(plan.memory_bytes.values()) == plan.memory_total_bytes == A100.memory_bytes - plan.headroom_bytes
    assert plan.fits == (plan.memory_total_bytes <= A100.memory_bytes)
    assert plan.comm_seconds == pytest.approx(sum(c.seconds for c in plan.comm))
    assert plan.step_seconds == pytest.approx(plan.compute_seconds + plan.exposed_seconds)
    assert 0 <= plan.exposed_seconds <= plan.comm_seconds * (1 + 1e-9)
    assert 0 < plan.mfu < 1


@pytest.mark.parametrize(("hardware", "weight_sharding"), [(A100, False), (A100, True), (read_hardware("cpu"), False)])
def test_gradients_summed_once_are_counted_once(weight_sharding: bool, hardware: Hardware) -> None:
    model = read_model("qwen3-0.6b")
    one, four = (
        cost(model, Job(context=2048, batch=batch, weight_sharding=weight_sharding).on(ulysses=2), hardware)
        for batch in (1, 4)
    )
    assert four.exposed_seconds <= four.comm_seconds * (1 + 1e-9)
    sums = [sum(c.seconds for c in plan.comm if "gradients" in c.what) for plan in (one, four)]
    assert sums[0] > 0 and sums[1] == pytest.approx(sums[0])
    assert four.exposed_seconds < 4 * one.exposed_seconds - 2.9 * sums[0] * (not hardware.overlaps)


@settings(max_examples=80, deadline=None)
@given(SHAPES, JOBS, MESHES)
def test_axes_of_one_send_nothing(model: ModelShape, job: Job, mesh: ParallelConfig) -> None:
    plan = planned(model, job, mesh)
    for c in plan.comm:
        assert plan.c.groups[c.axis][1] > 1 and c.bytes_per_gpu > 0 and c.count > 0 and c.seconds > 0
    if mesh.ranks == 1:
        assert plan.comm == () and plan.exposed_seconds == 0


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(SHAPES, JOBS, MESHES, st.sampled_from(["data", "ring", "ulysses", "tensor"]))
def test_more_gpus_never_need_more_memory_each(model: ModelShape, job: Job, mesh: ParallelConfig, axis: str) -> None:
    """Along every axis. Only the first step off 1 may: then a collective needs buffers that one GPU did not."""
    mesh = replace(mesh, **{axis: max(2, getattr(mesh, axis))})
    job = replace(job, batch=2 * mesh.data)
    assume(mesh.fsdp_ranks > 1)
    larger = replace(mesh, **{axis: 2 * getattr(mesh, axis)})
    fewer, more = planned(model, job, mesh), planned(model, job, larger)
    # A ring's first block is full, and as long as the padding makes it: a token more for each rank that shares it.
    padding = 4 * job.batch * larger.ulysses * sum(layer.mixing.cached_per_token for layer in model.layers)
    padding = 0 if job.mode == "train" else padding
    assert more.memory_total_bytes <= fewer.memory_total_bytes + padding
    for name in ("weights", "optimizer", "kv_cache"):
        assert more.memory_bytes[name] <= fewer.memory_bytes[name] + (padding if name == "kv_cache" else 0), name


@pytest.mark.parametrize(
    ("mode", "name"),
    each_value(
        ["train", "prefill", "decode"], ["llama-3.1-8b", "qwen3-30b-a3b", "gpt-oss-20b", "gemma-3-4b", "deepseek-v3"]
    ),
)
def test_the_least_memory_never_grows_with_the_gpus(name: str, mode: Any) -> None:
    model, job = read_model(name), Job(context=1 << 18, mode=mode, batch=2)
    least = [min(p.memory_total_bytes for p in search(model, job, 1 << i, A100).plans) for i in range(7)]
    assert least == sorted(least, reverse=True)


@settings(max_examples=80, deadline=None)
@given(SHAPES, JOBS, MESHES, st.integers(1, 4))
def test_a_longer_context_never_needs_less(model: ModelShape, job: Job, mesh: ParallelConfig, times: int) -> None:
    """From 128 tokens a rank on, and in whole blocks.

    Below, a ring's messages take about as long as computing, and the share of the work that hides them depends on how
    many tokens the last blocks have: a few tokens more may take a few per cent less.
    """
    job = replace(job, context=-(-job.context // (128 * mesh.sequence_ranks)) * 128 * mesh.sequence_ranks)
    short, long = planned(model, job, mesh), planned(model, replace(job, context=job.context * times), mesh)
    assert long.memory_total_bytes >= short.memory_total_bytes
    assert long.step_seconds >= short.step_seconds


@settings(max_examples=20, deadline=None)
@given(SHAPES, JOBS, MESHES)
def test_the_longest_context_fits_and_one_token_more_does_not(
    model: ModelShape, job: Job, mesh: ParallelConfig
) -> None:
    planned(model, job, mesh)
    found = longest_context(model, job.on(**mesh.degrees), A100)
    assume(0 < found < 1 << 34)
    assert (
        cost(model, replace(job, context=max(found, mesh.sequence_ranks)).on(**mesh.degrees), A100).fits
        or found < mesh.sequence_ranks
    )
    assert not cost(model, replace(job, context=max(found + 1, mesh.sequence_ranks)).on(**mesh.degrees), A100).fits


def test_every_mesh_is_planned_or_has_a_reason() -> None:
    found = search(LLAMA, Job(context=131072, batch=2), 16, A100)
    every = {one.parallel for one in on_meshes(Job(context=131072), 16)}
    assert {str(p.mesh) for p in found.plans} | {str(mesh) for mesh, _ in found.rejected} == set(map(str, every))
    assert len(found.plans) + len(found.rejected) == len(every) == 35
    assert all(mesh.ranks == 16 for mesh in every)
    order = [(not p.fits, p.step_seconds) for p in found.plans if p.fits]
    assert order == sorted(order)


def test_masks_count_their_pairs() -> None:
    for n, window in ((10, 3), (10, 10), (7, 1), (12, 5)):
        sliding = sum(1 for i in range(n) for j in range(n) if 0 <= i - j < window)
        chunked = sum(1 for i in range(n) for j in range(i + 1) if i // window == j // window)
        assert Window(window).pairs(n) == sliding
        assert Chunk(window).pairs(n) == chunked
        assert Causal().pairs(n) == n * (n + 1) / 2


def test_a_window_costs_its_window() -> None:
    model = read_model("mistral-7b")
    job = Job(context=1 << 20, mode="prefill")
    # 4,096 tokens reach back one block of 131,072, not seven; under zigzag a block has two neighbours.
    for layout, messages in (("contiguous", 1), ("zigzag", 2)):
        plan = cost(model, job.on(layout=layout).on(ring=8), A100)  # type: ignore[arg-type]
        assert [c.count for c in plan.comm if c.axis == "ring"] == [messages * len(model.layers)]
    one = cost(model, replace(job, context=8192), A100).memory_bytes["kv_cache"]
    # The last 4,096 tokens of a prompt lie on one rank of a zigzag ring.
    assert plan.memory_bytes["kv_cache"] == one == cost(model, job.on(ring=4), A100).memory_bytes["kv_cache"]
    spread = replace(job.on(layout="contiguous"), context=1 << 14)
    assert cost(model, spread.on(ring=8), A100).memory_bytes["kv_cache"] < one


# ---- Which mesh.


def test_ulysses_is_faster_inside_a_node() -> None:
    """Over two nodes of 8, an all-to-all over all 16 is slower than one inside the node with a ring across."""
    job = Job(context=1 << 20, mode="prefill")
    model = read_model("llama-2-70b")
    inside = cost(model, job.on(ring=2, ulysses=8), A100)
    across = cost(model, job.on(ulysses=16), A100)
    assert inside.exposed_seconds < across.exposed_seconds
    assert {c.axis: c.link for c in inside.comm} == {"ulysses": "intra", "ring": "inter", "fsdp": "inter"}


def test_tensor_parallelism_wins_for_short_prompts() -> None:
    model, job = read_model("llama-2-70b"), Job(context=128, mode="prefill")
    tensor, ulysses = cost(model, job.on(tensor=8), A100), cost(model, job.on(ulysses=8), A100)
    method = [sum(c.seconds for c in plan.comm if c.method) for plan in (tensor, ulysses)]
    assert method[0] == pytest.approx(method[1], rel=0.1)  # about equal, although it sends 14 times as much
    assert tensor.exposed_seconds < ulysses.exposed_seconds  # and it gathers no weights


@pytest.mark.parametrize("gpus", [4, 16])
@pytest.mark.parametrize("ring", [1, 2, 4])
def test_train_parses_the_file(gpus: int, ring: int, tmp_path: Path) -> None:
    job = Job(context=65536, batch=4, memory=Memory(checkpointing="full"), weight_sharding=gpus == 16)
    job = job.on(layout="contiguous") if ring == 4 else job
    best = next(p for p in search(read_model("qwen3-0.6b"), job, gpus, A100).plans if p.mesh.ring == ring and p.runs)
    made = as_read(best, tmp_path)
    keys, ours = made.values, made.ours
    assert ours.parallel == best.mesh
    sequences = keys["per_device_train_batch_size"] * keys["gradient_accumulation_steps"] * ours.parallel.data
    assert (ours.context, sequences, keys["bf16"]) == (65536, 4, None)  # None: bf16
    assert ours.memory == MemoryChoice("fastest", {"checkpointing": "full"})
    assert ours.shard_weights == job.weight_sharding
    assert str(command(best)).split()[0] == ("longspan" if gpus == 4 else "torchrun")


def test_the_file_of_a_plan_is_written_or_its_absence_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv, out = ["plan", "--model", "qwen3-0.6b", "--gpus", "4", "--context", "64k"], tmp_path / "new" / "mine.yaml"
    assert main([*argv, "--out", str(out)]) == 0
    assert read(["sft", "--config", str(out), "--dataset_name", "text.txt"]).ours.context == 65536
    assert main([*argv, "--gpus", "1", "--context", "64M", "--out", str(tmp_path / "none.yaml")]) == 1
    assert "nothing is written" in capsys.readouterr().out and not (tmp_path / "none.yaml").exists()


def as_read(plan: Plan, folder: Path) -> Settings:
    """Return what `longspan train` reads of a plan's file."""
    (folder / "plan.yaml").write_text(str(yaml(plan)))
    return read(["sft", "--config", str(folder / "plan.yaml"), "--dataset_name", "text.txt"])


def test_a_path_in_the_file(tmp_path: Path) -> None:
    folder = tmp_path / "my 'best' \"model\" $HOME `id`;# {x}: [y], ü"
    folder.mkdir()
    file = folder / "config.json"
    file.write_text(json.dumps({**MODELS["qwen3-0.6b"]["config"]}))
    for source in (file, folder):
        best = search(read_model(str(source)), Job(context=8192), 2, A100).recommended
        assert best is not None and as_read(best, tmp_path).values["model_name_or_path"] == str(file)


def test_no_file_for_what_this_version_does_not_run() -> None:
    plan = cost(replace(read_model("gpt-1.2b"), vocab=50304), Job(context=1024).on(tensor=2), A100)
    assert yaml(plan) is command(plan) is None
    assert any("not counted exactly" in reason for reason in plan.reasons)
    assert "tensor: 2\n" in str(yaml(cost(LLAMA, Job(context=8192).on(tensor=2), A100)))
    for mode in ("prefill", "decode"):
        job = Job(context=8192, mode=mode).on(tensor_style="megatron-sp", tensor=2)  # type: ignore[arg-type]
        assert "tensor: 2\ntensor_style: megatron-sp\n" in str(yaml(cost(LLAMA, job, A100)))
    plan = cost(LLAMA, Job(context=8192, mode="prefill").on(ulysses=2), A100)
    assert "longspan generate " in str(command(plan)) and any("--prefill-chunk plans" in r for r in plan.reasons)
    several_texts = Job(context=8192, mode="prefill", batch=2).on(data=2)
    memory_options = Job(context=8192, mode="decode", memory=Memory(head_slices=0)).on(ulysses=2)
    assert yaml(cost(LLAMA, several_texts, A100)) is yaml(cost(LLAMA, memory_options, A100)) is None


# ---- Rings.


def test_zigzag_balances_a_causal_mask_and_contiguous_does_not() -> None:
    job = Job(context=65536)
    layer = LLAMA.layers[0]
    for ring in (2, 4, 8):
        whole = layer.mixing.max_flops(CostContext(LLAMA, job))
        zigzag, contiguous = (
            layer.mixing.max_flops(CostContext(LLAMA, job.on(layout=layout).on(ring=ring)))  # type: ignore
            for layout in ("zigzag", "contiguous")
        )
        assert zigzag * ring == pytest.approx(whole, rel=1e-3)
        assert contiguous / zigzag == pytest.approx(2 - 1 / ring, rel=1e-3)  # the last block sees all before it


@given(*[st.floats(0, 10)] * 3, st.floats(0.05, 1), st.integers(1, 9))
def test_ring_wait_is_the_sum_over_steps(kv: float, gradient: float, attention: float, own: float, steps: int) -> None:
    halves = 2 if gradient else 1  # of the rank's own block: the second hides the last gradient
    in_flight = [kv * (number < steps) + gradient * (number >= 2) for number in range(steps + 1)]
    computing = [attention * own / halves] + [attention * (1 - own) / steps] * steps
    if gradient:
        in_flight.append(gradient)
        computing.append(attention * own / halves)
    waited = sum(max(0.0, sent - computed) for sent, computed in zip(in_flight, computing, strict=True))
    assert ring_wait(kv, gradient, attention, own, steps) == pytest.approx(waited)


def test_a_ring_overlaps_with_a_long_attention() -> None:
    for context, hidden in ((1 << 8, False), (1 << 20, True)):
        plan = cost(LLAMA, Job(context=context, weight_sharding=False).on(ring=8), A100)
        moved = [c for c in plan.comm if c.axis == "ring"]
        assert {(c.op, c.overlaps_with) for c in moved} == {("p2p", "attention")}
        exposed = plan.exposed_seconds - sum(c.seconds for c in plan.comm if c.axis != "ring")
        assert (exposed < 0.01 * sum(c.seconds for c in moved)) == hidden


def shares(hidden: float | None, axes: tuple[str, ...] = ("ring", "ulysses", "fsdp"), **changes: Any) -> Hardware:
    """A100s whose collectives take a second, of which a fraction `hidden` overlaps with computing."""
    link = MeasuredLink(1.0, 1e30, (), hidden)
    return replace(A100, measured={(axis, op): link for axis in axes for op in OPS}, **changes)


@settings(max_examples=40, deadline=None)
@given(SHAPES, JOBS, MESHES, st.integers(1, 4), st.tuples(*[st.floats(0, 1)] * 2))
def test_exposed_time_falls_as_the_hidden_share_grows(
    model: ModelShape, job: Job, mesh: ParallelConfig, chunks: int, between: tuple[float, float]
) -> None:
    job = job.on(overlap_chunks=chunks)
    assume(refusal(model, job.on(**mesh.degrees)) is None)
    plans = [cost(model, job.on(**mesh.degrees), shares(hidden)) for hidden in (0.0, *sorted(between), 1.0)]
    exposed = [plan.exposed_seconds for plan in plans]
    assert all(more <= less * (1 + 1e-9) for less, more in itertools.pairwise(exposed))
    assert exposed[0] == pytest.approx(plans[0].comm_seconds)  # nothing hides
    for hidden, overlaps in ((0.0, False), (1.0, True)):
        c = CostContext(model, job.on(**mesh.degrees))
        assert step_times(c, shares(hidden)) == step_times(c, shares(None, overlaps=overlaps))


def exposed_of_layer(computing: LayerSeconds, c: CostContext, hardware: Hardware) -> float:
    layer = c.model.layers[0]
    return seconds_of(method_sent(layer, c), c, hardware) - hidden_layer_seconds(layer, computing, c, hardware)


@pytest.mark.parametrize("hidden", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("attention", [0.0, 1.0, 1e6])
def test_hidden_time_is_bounded_by_the_attention(hidden: float, attention: float) -> None:
    """Of four chunks three parts of each way, of a ring every message; a collective takes a second."""
    layer, computing = LLAMA.layers[0], LayerSeconds(0.0, 0.0, attention, attention)
    job = Job(context=4096, memory=FASTEST, parallel=ParallelConfig(overlap_chunks=4))
    exchanged = exposed_of_layer(computing, CostContext(LLAMA, job.on(ulysses=4)), shares(hidden))
    each_way = 4 * 2 * 1.0  # of four chunks, scatter and gather
    assert exchanged == pytest.approx(2 * (each_way - 0.75 * min(hidden * each_way, attention)))

    # On 8 ranks all four chunks of a rank share one KV head: the first chunk scatters 3 of 6 units, and the last one
    # gathers its gradient; O and dO are 4 units, 1 per chunk.
    slowly = {("ulysses", "all_to_all"): MeasuredLink(0.0, 1e6, (), hidden)}
    c = CostContext(LLAMA, job.on(ulysses=8))
    hardware, sent = replace(A100, measured=slowly), [s.bytes for s in method_sent(layer, c)]
    way = sum(sent) / 1e6 / 2
    shared = exposed_of_layer(computing, c, hardware)
    assert shared == pytest.approx(2 * (way - min(hidden * 0.6 * way, 0.75 * attention)))

    ring = CostContext(LLAMA, job.on(overlap_chunks=1).on(ring=2))
    schedule = layer.mixing.ring_schedule(ring)
    assert schedule is not None and schedule.routes.steps == 1
    # Forward: a block, while the rank's own is computed. Backward: that, and a gradient during the rest of its own.
    messages = [attention * schedule.own] + [attention * schedule.own * 0.5] * 2
    waits = sum(1 - hidden + max(0.0, hidden - overlap) for overlap in messages)
    assert exposed_of_layer(computing, ring, shares(hidden)) == pytest.approx(waits)


def test_a_search_refuses_too_many_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    for gpus in ("16385", "1048576", "9" * 20):
        assert main(["plan", "--model", "llama-2-7b", "--gpus", gpus]) == 2
        assert f"gpus must be at most 16,384, got {gpus}" in " ".join(capsys.readouterr().err.replace("│", " ").split())
    with pytest.raises(LongspanError, match=r"gpus must be at most 16,384, got 1048576"):
        search(LLAMA, Job(context=8192), 1 << 20, A100)
    found = search(LLAMA, Job(context=1 << 20), 1 << 14, A100)
    assert found.plans and any(
        "longer than the 2048 ranks that can be planned" in reason for _, reason in found.rejected
    )
    with pytest.raises(LongspanError, match=r"context must be at most 1,099,511,627,776"):
        Job(context=10**13)


def test_rings_of_thousands_are_planned() -> None:
    """A table of ranks x ranks would take minutes."""
    for layout in ("zigzag", "contiguous"):
        for name in ("llama-3.1-405b", "gemma-3-27b"):
            job = Job(context=1 << 22, parallel=ParallelConfig(layout=layout))  # type: ignore[arg-type]
            plan = cost(read_model(name), job.on(ring=2048), A100)
            assert plan.step_seconds > 0


# ---- Hardware.


def test_links_of_a_group_that_spans_nodes() -> None:
    sent = 16e9
    assert A100.seconds("all_gather", "fsdp", sent, 1, 8) == pytest.approx(5e-6 + sent / 300e9)
    assert A100.seconds("all_gather", "fsdp", sent, 1, 16) == pytest.approx(15e-6 + sent / 200e9)  # 8 cards of 25 GB/s
    assert A100.seconds("all_gather", "data", sent, 8, 2) == pytest.approx(15e-6 + sent / 25e9)  # one card
    crossing = sent * 8 / 15
    assert A100.seconds("all_to_all", "ulysses", sent, 1, 16) == pytest.approx(30e-6 + crossing / 25e9)
    assert A100.seconds("p2p", "ring", sent, 8, 2) == pytest.approx(8e-6 + sent / 25e9)
    assert A100.seconds("p2p", "ring", sent, 1, 1) == 0


LINK = "[links.ring.p2p]\nlatency = 1\nbandwidth = 1\n"
TOML = """
name = "mine"
memory_bytes = 24e9
flops = 1e12
memory_bandwidth = 1e11
gpus_per_node = 4
[intra]
bandwidth = 1e10
latency = 1e-4
[inter]
bandwidth = 1e9
"""


def test_hardware_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(TOML)
    mine = read_hardware(str(tmp_path / "mine.toml"))
    assert (mine.name, mine.memory_bytes, mine.gpus_per_node) == ("mine", 24e9, 4)
    assert mine.seconds("all_to_all", "ulysses", 1e10, 1, 4) == pytest.approx(1 + 1e-4)
    (tmp_path / "like.toml").write_text('like = "h100"\nmemory_bytes = 94e9\n')
    like = read_hardware(str(tmp_path / "like.toml"))
    assert (like.memory_bytes, like.flops, like.name) == (94e9, CATALOGUE["h100"].flops, "like")


def test_measured_links_override_the_catalogue(tmp_path: Path) -> None:
    measured = "\n".join(f"[links.ulysses.{op}]\nlatency = 0.5\nbandwidth = 2.0\nresidual = 0.1" for op in OPS)
    (tmp_path / "m.toml").write_text(f'like = "h100"\nmeasured = "today"\ndtype = "fp32"\n{measured}\n')
    found = read_hardware(str(tmp_path / "m.toml"))
    assert found.seconds("all_to_all", "ulysses", 10.0, 1, 8) == 5.5
    assert found.seconds("all_to_all", "ring", 10.0, 1, 8) == CATALOGUE["h100"].seconds(
        "all_to_all", "ring", 10.0, 1, 8
    )
    assert found.measured_dtype == "fp32"


def test_a_measured_hidden_share_overrides_overlaps(tmp_path: Path) -> None:
    for overlaps, otherwise in (("true", 1.0), ("false", 0.0)):
        (tmp_path / "m.toml").write_text(f'like = "h100"\noverlaps = {overlaps}\n{LINK}hidden = 0.25\n')
        found = read_hardware(str(tmp_path / "m.toml"))
        assert found.hideable("p2p", "ring") == 0.25
        assert found.hideable("all_to_all", "ulysses") == found.hideable("all_gather", "ring") == otherwise


def test_measured_points_override_the_line(tmp_path: Path) -> None:
    """A link that takes 1,000 bytes at once and 10 bytes a second beyond: no line says both."""
    points = "points = [[100, 1.0], [1000, 2.0], [2000, 102.0]]"
    link = f"[links.ulysses.all_to_all]\nlatency = 0.5\nbandwidth = 2.0\n{points}\n"
    (tmp_path / "m.toml").write_text(f'like = "h100"\n{link}')
    found = read_hardware(str(tmp_path / "m.toml"))
    expected = {50: 0.75, 100: 1.0, 550: 1.5, 1000: 2.0, 1500: 52.0, 2000: 102.0, 3000: 102.0 + 51.0}
    for sent, seconds in expected.items():  # beyond the last, at no less than the throughput of it
        assert found.seconds("all_to_all", "ulysses", sent, 1, 8) == pytest.approx(seconds), sent
    flat = MeasuredLink(0.5, 2.0, ((1000.0, 2.0), (2000.0, 1.0)))  # noise: at no more than ten times its throughput
    assert flat.seconds(4000) == pytest.approx(1.0 + 2000 * 1.0 / 2000 / 10)
    assert MeasuredLink(3.0, 2.0, ((1000.0, 2.0),)).seconds(500) == 2.0


# ---- Bad input.


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (TOML.replace("24e9", "0"), "line 3: memory_bytes of hardware mine must be above 0, got 0"),
        (TOML.replace("24e9", '"lots"'), "memory_bytes of hardware mine must be a number above 0, got 'lots'"),
        (TOML.replace("flops", "flop"), "unknown key 'flop'"),
        (TOML.replace("flops = 1e12\n", ""), "has no flops"),
        (TOML.partition("[inter]")[0], "has no inter"),
        ("= 3", "is not TOML"),
        (TOML.replace("1e-4", "-1e-4"), "line 9: intra.latency of all_to_all must be at least 0, got -0.0001"),
        (TOML.replace("1e-4", "{all_redcue = 1}"), "did you mean 'all_reduce'?"),
        (TOML.replace("bandwidth = 1e9", "bandwidth = inf"), "line 11: inter.bandwidth must be finite and above 0"),
        (TOML.replace("= 4", "= 4.5"), "line 6: gpus_per_node of hardware mine must be an integer"),
        ("overlaps = 'no'\n" + TOML, "line 1: overlaps of hardware mine must be True or False, got 'no'"),
        ("like = 3\n" + TOML, "line 1: like = 3 must be text"),
        ("links = 3\n" + TOML, "line 1: links = 3 must be a table"),
        (TOML + "[links.ulises.p2p]\nlatency = 1\nbandwidth = 1\n", "did you mean 'ulysses'?"),
        (TOML + "[links.ring.p2p]\nlatency = -1\nbandwidth = 1\n", "links.ring.p2p.latency must be at least 0, got -1"),
        (TOML + "[links.ring]\np2p = 3\n", "links.ring.p2p = 3 must be a table"),
        (TOML + LINK + "hidden = 1.5\n", "line 15: links.ring.p2p.hidden must be at most 1, got 1.5"),
        (TOML + LINK + "points = 3\n", "links.ring.p2p.points must be pairs of bytes and seconds, got 3"),
        (TOML + LINK + "points = [[2, 1.0], [1, 1.0]]\n", "must have ascending sizes, got [2, 1]"),
        (TOML + LINK + "points = [[2, 0]]\n", "links.ring.p2p.points with this time must be above 0, got 0"),
        ("a = " + "[" * 20000, "nested too deeply"),
    ],
)
def test_bad_hardware_files(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(LongspanError) as error:
        read_hardware(str(path))
    assert expected in str(error.value)


def test_circular_like_is_refused(tmp_path: Path) -> None:
    me, other = tmp_path / "me.toml", tmp_path / "other.toml"
    me.write_text(f'like = "{me}"')
    with pytest.raises(LongspanError, match=r"`like` leads back to .*me\.toml -> .*me\.toml"):
        read_hardware(str(me))
    me.write_text(f'like = "{other}"')
    other.write_text(f'like = "{tmp_path}/./me.toml"')
    with pytest.raises(LongspanError, match=r"me\.toml -> .*other\.toml -> .*me\.toml; name the catalogue"):
        read_hardware(str(me))
    other.write_text('like = "h100"\nflops = 1e12')
    assert read_hardware(str(me)).flops == 1e12


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--model", "llama-2-70"], "did you mean 'llama-2-70b'"),
        (["--model", "llama-2-7b", "--gpu", "a100"], "did you mean a100-40gb or a100-80gb?"),
        (["--model", "llama-2-7b", "--gpu", "missing.toml"], "missing.toml cannot be read"),
        (["--model", "llama-2-7b", "--context", "0"], "context must be at least 1, got 0"),
        (["--model", "llama-2-7b", "--html", "."], "--html . is a folder; give a file, such as --html plan.html"),
        (["--model", "~nobody-of-this-name/x"], "no user of that name"),
        (["--model", "x" * 5000], "is too long for a path"),
    ],
)
def test_bad_input_is_one_clear_line(args: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *args]) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert error.startswith("longspan: error: ") and error.count("\n") == 1


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--gpus", "0"], "gpus must be at least 1, got 0"),
        (["--gpu", "h100,efficiency=1.5"], "efficiency must be at most 1, got 1.5"),
        (["--gpu", "h100,efficiency=nan"], "efficiency must be above 0 and at most 1, got nan"),
        (["--memory", "offload=host"], "add checkpointing='full'"),
    ],
)
def test_a_bad_value_is_refused(args: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "llama-2-7b", *args]) == 2
    assert expected in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_a_context_that_is_not_a_number(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "llama-2-7b", "--context", "1.5M"]) == 2
    error = capsys.readouterr().err
    assert "--context" in error and "1e6 is" in error


# ---- Forms.


def shown(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert main(["plan", *args]) == 0
    return capsys.readouterr().out


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--model", "llama-2-70b", "--gpu", "a100-80gb", "--gpus", "8", "--context", "1000000", "--mode", "prefill"]
    report = json.loads(shown(capsys, *args, "--json", "--compare"))
    assert report["schema"] == SCHEMA == "longspan.plan/6"
    best = report["recommended"]
    assert best["mesh"] == {"data": 1, "ring": 1, "ulysses": 8, "tensor": 1} and best["fits"]
    for plan in report["plans"]:
        assert sum(plan["memory_bytes"].values()) == plan["memory_total_bytes"]
        assert plan["comm_seconds"] == pytest.approx(sum(c["seconds"] for c in plan["comm"]))
        assert {"op", "axis", "bytes_per_gpu", "count", "seconds"} <= plan["comm"][0].keys()
        assert plan["fits"] or "GB per GPU" in plan["reasons"][0]
    assert best["comm_bytes_per_gpu_per_layer"] == pytest.approx(4.032e9)
    assert {m["name"] for m in report["methods"]} >= {"TP", "Megatron SP", "FSDP only", "Ulysses", "Ring", "LASP-2"}
    assert all(row["reasons"] for row in report["rejected"])


def test_the_methods_side_by_side(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of the reference (section 3.7.3): 57.34 GB a layer against 4.03."""
    monkeypatch.setenv("COLUMNS", "120")
    args = ["--model", "llama-2-70b", "--gpu", "a100-80gb", "--context", "1000000", "--mode", "prefill", "--compare"]
    lines = shown(capsys, *args).splitlines()
    (tensor,) = [line for line in lines if line.lstrip().startswith("TP ")]
    (ulysses,) = [line for line in lines if line.lstrip().startswith("Ulysses ")]
    assert "2 all_reduce" in tensor and "57.34 GB" in tensor
    assert "2 all_to_all" in ulysses and "4.03 GB" in ulysses
    assert any("LASP-2 is for linear attention layers" in line for line in lines)
    methods = {method["name"]: method for method in json.loads(shown(capsys, *args, "--json"))["methods"]}
    short, apart = ([methods[name][f"seconds_per_layer_{at}"] for name in ("TP", "Ulysses")]
                    for at in ("at_128_tokens", "across_nodes"))  # fmt: skip
    assert short == pytest.approx([34.5e-6, 31.7e-6], rel=1e-2)  # start-up times decide
    assert apart == pytest.approx([2.29, 0.161], rel=1e-2)  # every GPU in a node of its own


def test_the_file_of_a_prompt_in_chunks(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--model", "llama-3.1-8b", "--gpu", "a100-80gb", "--gpus", "16", "--context", "1M"]
    reports = {}
    for mode, more in (
        ("prefill", ["--prefill-chunk", "64k", "--no-fsdp"]),
        ("prefill", ["--prefill-chunk", "64k", "--no-fsdp", "--cache", "int8"]),
        ("decode", ["--cache", "fp8"]),
        ("prefill", []),
    ):
        report = json.loads(shown(capsys, *args, "--mode", mode, *more, "--json"))
        reports[mode, *more] = report["recommended"]
        keys, mesh = safe_load(report["recommended"]["yaml"]), report["recommended"]["mesh"]
        assert {axis: keys.pop(axis, 1) for axis in mesh} == mesh and mesh["data"] == 1
        expected = {"model": "meta-llama/Llama-3.1-8B", "dtype": "bf16"}
        expected |= {"cache": {"dtype": more[-1]}} if "--cache" in more else {}
        expected |= {"prefill_chunk": 65536} if "--prefill-chunk" in more else {}
        assert keys == {**expected, "weights": "replicated" if "--no-fsdp" in more else "sharded"}
    exact, int8, _, at_once = reports.values()
    cache = exact["memory_bytes"]["kv_cache"]
    assert cache == 32 * 2 * 2 * 128 * 8 * (1 << 20) // 8 // (2 if exact["mesh"]["ring"] == 2 else 1)
    assert int8["memory_bytes"]["kv_cache"] == cache * (128 + 4) // 256
    assert exact["memory_bytes"]["qkv"] + exact["memory_bytes"]["hidden"] < at_once["memory_bytes"]["hidden"]
    for refused, expected in (
        (["--mode", "decode", "--prefill-chunk", "4"], "--prefill-chunk 4 is for --mode prefill"),
        (["--cache", "int8"], "--cache int8 is for --mode prefill and decode"),
        (["--tuning", "freeze=nothing*"], "freeze: nothing* is the name of no weight"),
    ):
        assert main(["plan", *args, *refused]) == 2
        assert expected in capsys.readouterr().err


def test_help_and_refused_flags_import_no_torch() -> None:
    script = (
        "import sys, longspan.plan\n"
        "from longspan.cli import main\n"
        "assert main(['plan', '--model', 'llama-2-7b', '--gpus', '0']) == 2\n"
        "try:\n    main(['plan', '--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = [m for m in ('torch', 'numpy', 'transformers') if m in sys.modules]\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_equal_models_have_equal_plans() -> None:
    """A second model with equal layers once counted q, k and v twice in a chunk of a prompt."""
    job, mesh = Job(context=8192, mode="prefill", prefill_chunk=2048), ParallelConfig(ring=2)
    first, second = (cost(read_model("llama-3.1-8b"), job.on(**mesh.degrees), A100).memory_bytes for _ in range(2))
    assert first == second
