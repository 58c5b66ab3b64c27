"""The reference figures (docs/reference/figures.md), one test each, to 0.1 %."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from longspan.plan import CATALOGUE, Collective, Job, Mesh, Plan, cost, read_model
from longspan.plan.cost.weights import shard_elements
from longspan.plan.limits import refusal
from longspan.plan.methods import SHORT, compare
from longspan.plan.models import shape_from_config

GB, MS, MB = 1e9, 1e-3, 1e6
N, P = 1_000_000, 8
LLAMA = read_model("llama-2-70b")
LAYER = LLAMA.layers[0]
A100 = CATALOGUE["a100-80gb"]
NODE_OF_ONE = replace(A100, gpus_per_node=1)  # every GPU in a node of its own: all that is sent crosses InfiniBand
# The figures leave out the latency that the planner adds.
NO_LATENCY = replace(A100, intra=replace(A100.intra, latency=dict.fromkeys(A100.intra.latency, 0.0)))
PREFILL = Job(context=N, mode="prefill")
ULYSSES = cost(LLAMA, PREFILL, Mesh(ulysses=P), NO_LATENCY)
TP = cost(LLAMA, PREFILL, Mesh(tensor=P), NO_LATENCY)


def exactly(value: float) -> Any:
    return pytest.approx(value, rel=1e-3)


def sent(plan: Plan, what: str) -> Collective:
    (found,) = [c for c in plan.comm if c.what == what]
    return found


def method(plan: Plan) -> tuple[float, float]:
    """GB and seconds of all layers that the method sends."""
    return (
        sum(c.bytes_total for c in plan.comm if c.method) / GB,
        sum(c.seconds for c in plan.comm if c.method),
    )


def test_1_weights() -> None:
    assert LLAMA.params / 1e9 == exactly(68.98)
    assert LLAMA.params * 2 / GB == exactly(137.95)


def test_2_weight_shard() -> None:
    assert ULYSSES.memory_bytes["weights"] / GB == exactly(17.24)


def test_3_parameters_of_a_layer() -> None:
    assert LAYER.matmul_params_active / 1e6 == exactly(855.64)
    assert LAYER.params - LAYER.matmul_params_active == 16_384


def test_4_weights_of_a_layer() -> None:
    assert LAYER.params * 2 / GB == exactly(1.711)


def test_5_all_gather_of_a_layer() -> None:
    gather = sent(ULYSSES, "weights of a layer")
    assert gather.bytes_per_gpu / GB == exactly(1.497)
    assert gather.seconds / gather.count / MS == exactly(4.99)


def test_6_all_gather_of_all_layers() -> None:
    assert sent(ULYSSES, "weights of a layer").seconds / MS == exactly(399.3)


def test_7_weight_traffic_of_a_training_step() -> None:
    """Three times the forward's, with gradients in bf16 (longspan scatters them in fp32, so half their time counts)."""
    plan = cost(LLAMA, Job(context=N), Mesh(ulysses=P), NO_LATENCY)
    gathers, scatters = sent(plan, "weights of a layer"), sent(plan, "gradients of a layer")
    assert gathers.count == 160 and scatters.count == 80
    assert gathers.seconds + scatters.seconds / 2 == exactly(1.198)


def test_8_q_k_v_of_the_whole_sequence() -> None:
    q = N * LAYER.mixer.q_heads * LAYER.mixer.head_dim * 2 / GB
    k = N * LAYER.mixer.kv_heads * LAYER.mixer.head_dim * 2 / GB
    assert (q, k) == (exactly(16.384), exactly(2.048))
    assert ULYSSES.memory_bytes["qkv"] * P / GB == exactly(q + 2 * k) == exactly(20.48)


def test_9_q_k_v_of_a_gpu() -> None:
    assert ULYSSES.memory_bytes["qkv"] / GB == exactly(2.56)


def test_10_tensor_parallel_all_reduce() -> None:
    reduced = sent(TP, "hidden states summed")
    assert reduced.op == "all_reduce"
    assert reduced.bytes_per_gpu / GB == exactly(28.672)
    assert reduced.seconds / reduced.count / MS == exactly(95.57)


def test_11_tensor_parallel_per_layer_and_in_all() -> None:
    assert TP.comm_bytes_per_gpu_per_layer / GB == exactly(57.344)
    in_all, seconds = method(TP)
    assert in_all == exactly(4587.5)
    assert seconds / 80 / MS == exactly(191.1) and seconds == exactly(15.29)


def test_12_first_all_to_all() -> None:
    assert sent(ULYSSES, "Q, K, V to heads").bytes_per_gpu / GB == exactly(2.24)


def test_13_second_all_to_all() -> None:
    assert sent(ULYSSES, "O to tokens").bytes_per_gpu / GB == exactly(1.792)


def test_14_ulysses_per_layer_and_in_all() -> None:
    assert ULYSSES.comm_bytes_per_gpu_per_layer / GB == exactly(4.032)
    in_all, seconds = method(ULYSSES)
    assert in_all == exactly(322.6)
    assert seconds / 80 / MS == exactly(13.44) and seconds == exactly(1.075)


def test_15_tensor_parallel_over_ulysses() -> None:
    assert TP.comm_bytes_per_gpu_per_layer / ULYSSES.comm_bytes_per_gpu_per_layer == exactly(14.22)


def test_16_across_nodes() -> None:
    _, seconds = method(cost(LLAMA, PREFILL, Mesh(ulysses=P), NODE_OF_ONE))
    assert seconds / 80 / MS == exactly(161.3)
    assert seconds == exactly(12.90)


def test_17_kv_cache() -> None:
    assert ULYSSES.memory_bytes["kv_cache"] / GB == exactly(40.96)
    assert ULYSSES.memory_bytes["kv_cache"] * P / GB == exactly(327.7)


def test_18_memory_of_a_gpu() -> None:
    items = ULYSSES.memory_bytes
    assert {name: round(size / GB, 2) for name, size in items.items() if size} == {
        "weights": 17.24, "gathered_weights": 3.42, "kv_cache": 40.96, "qkv": 2.56, "attention_workspace": 5.12,
        "hidden": 6.14, "reserve": 2.0,
    }  # fmt: skip
    assert ULYSSES.memory_total_bytes / GB == exactly(77.45) and ULYSSES.fits


@pytest.fixture(scope="module")
def short() -> dict[str, Plan]:
    methods = compare(LLAMA, Job(context=SHORT, mode="prefill"), P, A100)
    return {m.name: m.plan for m in methods if m.plan is not None}


def test_19_a_short_step_with_tensor_parallelism(short: dict[str, Plan]) -> None:
    reduced = sent(short["TP"], "hidden states summed")
    assert 2 * reduced.bytes_per_gpu / MB == exactly(7.340)
    assert reduced.seconds / 80 / MS == exactly(0.02447 + 0.010)


def test_20_a_short_step_with_ulysses(short: dict[str, Plan]) -> None:
    assert short["Ulysses"].comm_bytes_per_gpu_per_layer / MB == exactly(0.516)
    _, seconds = method(short["Ulysses"])
    assert seconds / 80 / MS == exactly(0.00172 + 0.030)


GPT = read_model("gpt-7b")  # MHA
ON_GPT = cost(GPT, PREFILL, Mesh(ulysses=P), A100)


def test_21_one_all_to_all() -> None:
    assert sent(ON_GPT, "O to tokens").bytes_per_gpu / 2 == exactly(N * GPT.d_model / P**2 * (P - 1))


def test_22_ulysses_with_mha_is_four_of_them() -> None:
    one = sent(ON_GPT, "O to tokens").bytes_per_gpu
    assert ON_GPT.comm_bytes_per_gpu_per_layer == exactly(4 * one)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_23_megatron_sp_does_not_shrink_with_the_ranks(ranks: int) -> None:
    plan = cost(LLAMA, replace(PREFILL, tensor_style="megatron-sp"), Mesh(tensor=ranks), A100)
    for what in ("hidden states gathered", "hidden states summed"):
        assert sent(plan, what).bytes_per_gpu == exactly(N * LLAMA.d_model * 2 * (ranks - 1) / ranks)
        assert sent(plan, what).count == 160  # one of each around attention, one of each around the MLP


def test_24_ring_attention() -> None:
    plan = cost(LLAMA, PREFILL, Mesh(ring=P), A100)
    assert plan.comm_bytes_per_gpu_per_layer / GB == exactly(3.584)
    assert sent(plan, "K, V to the next").count == (P - 1) * 80


def test_25_lasp2_does_not_grow_with_the_tokens() -> None:
    hybrid = shape_from_config(
        {
            "model_type": "minimax", "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
            "head_dim": 64, "num_key_value_heads": 2, "intermediate_size": 1024, "num_local_experts": 4,
            "num_experts_per_tok": 2, "vocab_size": 1000, "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        },
        "hybrid",
    )  # fmt: skip
    states = []
    for context in (100_000, 1_000_000):
        plan = cost(hybrid, Job(context=context, mode="prefill"), Mesh(ring=P), A100)
        states.append(sent(plan, "states of linear attention"))
    assert states[0].bytes_per_gpu == states[1].bytes_per_gpu == 2 * 8 * 64 * 64 * (P - 1)
    assert states[0].count == 3


def test_26_limits() -> None:
    job = replace(PREFILL, kv_replication=False)
    assert refusal(LLAMA, job, Mesh(ulysses=8)) is None
    assert "needs 16 KV heads or replication, the model has 8" in str(refusal(LLAMA, job, Mesh(ulysses=16)))
    assert refusal(LLAMA, PREFILL, Mesh(ulysses=64)) is None
    assert "needs at least 128 query heads, the model has 64" in str(refusal(LLAMA, PREFILL, Mesh(ulysses=128)))
    assert refusal(LLAMA, PREFILL, Mesh(ulysses=64, ring=2)) is None


def test_28_ring_all_gather() -> None:
    shard = shard_elements(LAYER.parameters, P) * 2
    assert sent(ULYSSES, "weights of a layer").bytes_per_gpu == (P - 1) * shard


def test_29_reduce_scatter_is_half_of_all_reduce() -> None:
    halved = cost(LLAMA, replace(PREFILL, tensor_style="megatron-sp"), Mesh(tensor=P), A100)
    assert sent(TP, "hidden states summed").bytes_per_gpu == 2 * sent(halved, "hidden states summed").bytes_per_gpu


def test_30_prefetch_hides_the_gather_and_holds_two_layers() -> None:
    gather = sent(ULYSSES, "weights of a layer")
    a_layer = ULYSSES.compute_seconds / 80
    assert a_layer > 0.05 > gather.seconds / gather.count
    around = sum(sent(ULYSSES, f"weights of {what}").seconds for what in ("the embedding", "final norm and head"))
    _, exchanges = method(ULYSSES)
    # Not hidden: the exchanges, embedding and head, and the first layer's gather, which has nothing before it.
    assert ULYSSES.exposed_seconds == exactly(exchanges + around + gather.seconds / gather.count)
    gathered = ULYSSES.memory_bytes["gathered_weights"]
    assert gathered == 2 * 2 * LAYER.params
