"""The planner's figures of Llama-2-70B at a million tokens, to 0.1 %."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.plan_published import ROWS, Row
from longspan.plan import CATALOGUE, Collective, Job, Plan, cost, read_model
from longspan.plan.cost.weights import shard_elements
from longspan.plan.from_model import shape_from_config
from longspan.plan.limits import refusal
from longspan.plan.methods import SHORT, compare

GB, MS, MB = 1e9, 1e-3, 1e6
N, P = 1_000_000, 8
LLAMA, GPT = read_model("llama-2-70b"), read_model("gpt-7b")  # grouped-query attention; one KV head per query head
LAYER = LLAMA.layers[0]
HEADS = LAYER.mixing
A100 = CATALOGUE["a100-80gb"]
NODE_OF_ONE = replace(A100, gpus_per_node=1)  # every GPU in a node of its own: all that is sent crosses InfiniBand
# The figures leave out the latency that the planner adds.
NO_LATENCY = replace(A100, intra=replace(A100.intra, latency=dict.fromkeys(A100.intra.latency, 0.0)))
PREFILL = Job(context=N, mode="prefill")
ULYSSES = cost(LLAMA, PREFILL.on(ulysses=P), NO_LATENCY)
TP = cost(LLAMA, PREFILL.on(tensor=P), NO_LATENCY)
RING = cost(LLAMA, PREFILL.on(ring=P), A100)
ON_GPT = cost(GPT, PREFILL.on(ulysses=P), A100)
TRAINING = cost(LLAMA, Job(context=N).on(ulysses=P), NO_LATENCY)
SHORT_TP, SHORT_ULYSSES = (
    m.plan
    for m in compare(LLAMA, Job(context=SHORT, mode="prefill"), P, A100)
    if m.plan is not None and m.name in ("TP", "Ulysses")
)


def sent(plan: Plan, what: str) -> Collective:
    (found,) = [c for c in plan.comm if c.what == what]
    return found


def method(plan: Plan) -> tuple[float, float]:
    """GB and seconds of all layers that the method sends."""
    return sum(c.bytes_total for c in plan.comm if c.method) / GB, sum(c.seconds for c in plan.comm if c.method)


GATHER, SCATTER = sent(ULYSSES, "weights of a layer"), sent(TRAINING, "gradients of a layer")
TRAINING_GATHER, REDUCED = sent(TRAINING, "weights of a layer"), sent(TP, "hidden states summed")
ACROSS_NODES = method(cost(LLAMA, PREFILL.on(ulysses=P), NODE_OF_ONE))
SHORT_REDUCED = sent(SHORT_TP, "hidden states summed")
FIGURES: dict[str, list[tuple[float, float]]] = {
    "1 weights": [(LLAMA.params / 1e9, 68.98), (LLAMA.params * 2 / GB, 137.95)],
    "2 weight shard": [(ULYSSES.memory_bytes["weights"] / GB, 17.24)],
    "3 parameters of a layer": [
        (LAYER.matmul_params_active / 1e6, 855.64), (LAYER.params - LAYER.matmul_params_active, 16_384)
    ],
    "4 weights of a layer": [(LAYER.params * 2 / GB, 1.711)],
    "5 all-gather of a layer": [(GATHER.bytes_per_gpu / GB, 1.497), (GATHER.seconds / GATHER.count / MS, 4.99)],
    "6 all-gather of all layers": [(GATHER.seconds / MS, 399.3)],
    # Three times the forward's, with gradients in bf16 (longspan scatters them in fp32, so half their time counts).
    "7 weight traffic of a training step": [
        (TRAINING_GATHER.seconds + SCATTER.seconds / 2, 1.198), (TRAINING_GATHER.count, 160), (SCATTER.count, 80)
    ],
    "8 Q, K, V of the sequence": [
        (N * HEADS.q_heads * HEADS.head_dim * 2 / GB, 16.384), (N * HEADS.kv_heads * HEADS.head_dim * 2 / GB, 2.048),
        (ULYSSES.memory_bytes["qkv"] * P / GB, 20.48),
    ],
    "9 Q, K, V of a GPU": [(ULYSSES.memory_bytes["qkv"] / GB, 2.56)],
    "10 TP all-reduce": [(REDUCED.bytes_per_gpu / GB, 28.672), (REDUCED.seconds / REDUCED.count / MS, 95.57)],
    "11 TP per layer and in all": [
        (TP.comm_bytes_per_gpu_per_layer / GB, 57.344), (method(TP)[0], 4587.5), (method(TP)[1] / 80 / MS, 191.1),
        (method(TP)[1], 15.29),
    ],
    "12 first all-to-all": [(sent(ULYSSES, "Q, K, V to heads").bytes_per_gpu / GB, 2.24)],
    "13 second all-to-all": [(sent(ULYSSES, "O to tokens").bytes_per_gpu / GB, 1.792)],
    "14 Ulysses per layer and in all": [
        (ULYSSES.comm_bytes_per_gpu_per_layer / GB, 4.032), (method(ULYSSES)[0], 322.6),
        (method(ULYSSES)[1] / 80 / MS, 13.44), (method(ULYSSES)[1], 1.075),
    ],
    "15 TP over Ulysses": [(TP.comm_bytes_per_gpu_per_layer / ULYSSES.comm_bytes_per_gpu_per_layer, 14.22)],
    "16 across nodes": [(ACROSS_NODES[1] / 80 / MS, 161.3), (ACROSS_NODES[1], 12.90)],
    "17 KV cache": [
        (ULYSSES.memory_bytes["kv_cache"] / GB, 40.96), (ULYSSES.memory_bytes["kv_cache"] * P / GB, 327.7)
    ],
    "18 memory of a GPU": [(ULYSSES.memory_total_bytes / GB, 78.47)],
    "19 a short prompt with TP": [
        (2 * SHORT_REDUCED.bytes_per_gpu / MB, 7.340), (SHORT_REDUCED.seconds / 80 / MS, 0.02447 + 0.010)
    ],
    "20 a short prompt with Ulysses": [
        (SHORT_ULYSSES.comm_bytes_per_gpu_per_layer / MB, 0.516), (method(SHORT_ULYSSES)[1] / 80 / MS, 0.00172 + 0.030)
    ],
    "21 one all-to-all": [(sent(ON_GPT, "O to tokens").bytes_per_gpu / 2, N * GPT.d_model / P**2 * (P - 1))],
    "22 Ulysses with MHA is four of them": [
        (ON_GPT.comm_bytes_per_gpu_per_layer, 4 * sent(ON_GPT, "O to tokens").bytes_per_gpu)
    ],
    "24 ring attention": [
        (RING.comm_bytes_per_gpu_per_layer / GB, 3.584), (sent(RING, "K, V to the next").count, (P - 1) * 80)
    ],
    "28 ring all-gather": [(GATHER.bytes_per_gpu, (P - 1) * shard_elements(LAYER.parameters, P) * 2)],
}  # fmt: skip


@pytest.mark.parametrize("figure", FIGURES)
def test_figure(figure: str) -> None:
    for value, expected in FIGURES[figure]:
        assert value == pytest.approx(expected, rel=1e-3)


def test_18_memory_of_a_gpu_item_by_item() -> None:
    assert {name: round(size / GB, 2) for name, size in ULYSSES.memory_bytes.items() if size} == {
        "weights": 17.24, "gathered_weights": 3.42, "kv_cache": 40.96, "qkv": 2.56, "attention_workspace": 6.14,
        "hidden": 6.14, "reserve": 2.0,
    }  # fmt: skip
    assert ULYSSES.fits


def test_23_and_29_megatron_sp_does_not_shrink_with_the_ranks() -> None:
    """Each of its collectives sends half of an all-reduce."""
    for ranks in (2, 4, 8):
        plan = cost(LLAMA, PREFILL.on(tensor=ranks, tensor_style="megatron-sp"), A100)
        for what in ("hidden states gathered", "hidden states summed"):
            assert sent(plan, what).bytes_per_gpu == pytest.approx(N * LLAMA.d_model * 2 * (ranks - 1) / ranks)
            assert sent(plan, what).count == 160  # one of each around attention, one of each around the MLP
    assert REDUCED.bytes_per_gpu == 2 * sent(plan, "hidden states summed").bytes_per_gpu


def test_25_lasp2_does_not_grow_with_the_tokens() -> None:
    hybrid = shape_from_config(
        {
            "model_type": "minimax", "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
            "head_dim": 64, "num_key_value_heads": 2, "intermediate_size": 1024, "num_local_experts": 4,
            "num_experts_per_tok": 2, "vocab_size": 1000, "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        },
        "hybrid",
    )  # fmt: skip
    for context in (100_000, 1_000_000):
        plan = cost(hybrid, Job(context=context, mode="prefill").on(ring=P), A100)
        states = sent(plan, "states of recurrent layers")
        # fp32, with a column of decays; with zigzag a rank has two runs of tokens.
        assert (states.bytes_per_gpu, states.count) == (2 * 4 * 8 * 64 * (64 + 1) * (P - 1), 3)


def test_26_limits() -> None:
    assert refusal(LLAMA, PREFILL.on(ulysses=64)) is None
    assert "needs at least 128 query heads, the model has 64" in str(refusal(LLAMA, PREFILL.on(ulysses=128)))
    assert refusal(LLAMA, PREFILL.on(ulysses=64, ring=2)) is None


def test_30_prefetch_hides_the_gather_and_holds_two_layers() -> None:
    assert ULYSSES.compute_seconds / 80 > 0.05 > GATHER.seconds / GATHER.count
    outer = sum(sent(ULYSSES, f"weights of {what}").seconds for what in ("the embedding", "final norm and head"))
    # Exposed: the exchanges, embedding and head, and the first layer's gather.
    exposed = method(ULYSSES)[1] + outer + GATHER.seconds / GATHER.count
    assert ULYSSES.exposed_seconds == pytest.approx(exposed, rel=1e-3)
    assert ULYSSES.memory_bytes["gathered_weights"] == 2 * 2 * LAYER.params


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.model}, {row.context}")
def test_published_steps_are_planned_within_15_percent(row: Row) -> None:
    plan = row.plan
    if row.seconds is not None:
        assert plan.step_seconds == pytest.approx(row.seconds, rel=0.15)
    if row.gigabytes is not None:
        assert plan.memory_total_bytes + row.besides(plan) == pytest.approx(1e9 * row.gigabytes, rel=0.15)


def test_attention_is_as_fast_as_measured_at_its_length() -> None:
    h100 = CATALOGUE["h100"]
    assert h100.attention_fractions("causal", 65536) == (0.606, 0.534)
    assert h100.attention_fractions("causal", 1 << 20) == (0.548, 0.543)
    assert h100.attention_fractions("causal", 100) == (0.583, 0.515)
    forward, backward = h100.attention_fractions("window", 1024)  # half-way between 512 and 2048
    assert (forward, backward) == pytest.approx(((0.109 + 0.245) / 2, (0.125 + 0.276) / 2))
    assert CATALOGUE["a100-80gb"].attention_fractions("causal", 65536) == (0.45, 0.45)
