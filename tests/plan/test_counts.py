"""The planner and the code are one: every collective of a step, by count and to the byte, on fake process groups."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import longspan
from longspan.attn.mask import Mask as AttentionMask
from longspan.attn.prepare import pairs_of_blocks, readers_of_blocks
from longspan.core.heads import split_head_chunks, split_heads
from longspan.core.layout import Layout
from longspan.core.memory import LONGEST, Memory
from longspan.core.parallel import TensorStyle
from longspan.core.routes import ring_routes
from longspan.memory.tiles import Tiled
from longspan.mixers.short_conv import short_conv
from longspan.plan import Hardware, Job, ModelShape, ParallelConfig, Plan, cost, read_hardware
from longspan.plan.cost.communication import method_sent
from longspan.plan.from_model import shape_from_config
from longspan.plan.job import CostContext
from longspan.plan.layers import CAUSAL, AttendedKeys, Causal, Chunk, Linear, Window
from longspan.plan.layers.attended_keys import ring_schedule
from longspan.plan.shape import Tuning
from tests.choose import confirming, each_value, grouped
from tests.counting import count_sent
from tests.fakes import fake_world
from tests.plan.jobs import job_on
from tests.trainers.fitting import tuned_model

CPU: Hardware = read_hardware("cpu")
LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 96, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 6, "max_position_embeddings": 4096,
}  # fmt: skip


Shape = tuple[int, int, int, int]


def sharding(
    mesh: ParallelConfig,
    layout: str = "auto",
    overlap_chunks: Any = "auto",
) -> longspan.SequenceSharding:
    made = longspan.init_mesh(data=mesh.data, ring=mesh.ring, ulysses=mesh.ulysses, tensor=mesh.tensor)
    return longspan.SequenceSharding(made, layout, overlap_chunks=overlap_chunks)


def attention_sent(
    rank: int,
    mesh: ParallelConfig,
    shape: Shape,
    n: int,
    batch: int,
    dtype: Any,
    layout: str = "auto",
    overlap_chunks: Any = "auto",
    **mask: Any,
) -> Counter[tuple[str, int]]:
    """What one attention, forward and backward, sends from `rank`."""
    q_heads, kv_heads, d, dv = shape
    with fake_world(rank, mesh.ranks):
        sp = sharding(mesh, layout, overlap_chunks)
        tokens = sp.layout.local_length(n)
        q, k, v = (
            torch.zeros(batch, tokens, heads, width, dtype=dtype, requires_grad=True)
            for heads, width in ((q_heads, d), (kv_heads, d), (kv_heads, dv))
        )
        with count_sent() as sent:
            longspan.attention(q, k, v, sp, length=n, **mask).sum().backward()
    return Counter((one.op, one.bytes) for one in sent)


@pytest.mark.parametrize(
    ("dtype", "shape", "ulysses"),
    each_value(
        [torch.float32, torch.bfloat16],
        grouped(
            [
                ((8, 8, 16, 16), 2),
                ((8, 8, 16, 16), 8),
                ((8, 2, 16, 16), 4),  # KV heads replicated
                ((8, 1, 16, 16), 8),  # MQA
                ((6, 6, 8, 8), 4),  # heads that do not divide
                ((12, 3, 8, 8), 8),
                ((5, 1, 8, 8), 2),
                ((14, 2, 8, 8), 4),
                ((8, 4, 16, 8), 4),  # values of another head_dim, as in MLA
            ]
        ),
    ),
)
def test_ulysses_attention_sends_what_is_planned(shape: Shape, ulysses: int, dtype: torch.dtype) -> None:
    n, batch = 37, 2
    mesh = ParallelConfig(ulysses=ulysses)
    by_rank = [attention_sent(rank, mesh, shape, n, batch, dtype) for rank in range(ulysses)]
    most = max(by_rank, key=total)
    job = Job(context=n, dtype="fp32" if dtype == torch.float32 else "bf16")
    assert most == planned_for(a_model(*shape), job, mesh, batch)
    assert sum(most.values()) == 4


def planned_for(model: ModelShape, job: Job, mesh: ParallelConfig, batch: int) -> Counter[tuple[str, int]]:
    # In training a replica takes its sequences one by one: the two of this batch are twice the bytes of one.
    planned: Counter[tuple[str, int]] = Counter()
    for sent in method_sent(model.layers[0], CostContext(model, job.on(**mesh.degrees))):
        if sent.calls:
            planned[(sent.op, batch * sent.bytes)] += sent.calls
    return planned


MHA, GQA, MQA, UNEVEN = (8, 8, 4, 4), (8, 2, 4, 4), (4, 1, 4, 4), (6, 3, 4, 4)
RING_MESHES = [
    ParallelConfig(ring=2),
    ParallelConfig(ring=4),
    ParallelConfig(ring=8),
    ParallelConfig(ring=2, ulysses=2),
    ParallelConfig(ring=4, ulysses=2),
]
RING_MESHES += [ParallelConfig(ring=2, ulysses=4), ParallelConfig(ring=3, ulysses=2)]
KEYS: dict[str, Any] = {"": Causal, "window": Window, "chunk_size": Chunk}
MASKS: list[dict[str, int]] = [{}, {"window": 5}, {"window": 14}, {"chunk_size": 9}]


@pytest.mark.parametrize(("layout", "mesh"), each_value(["zigzag", "contiguous"], RING_MESHES), ids=str)
def test_a_ring_sends_what_is_planned(mesh: ParallelConfig, layout: Any) -> None:
    """Every mask, with heads that divide and that do not, and lengths that do not (a few tokens leave ranks empty)."""
    for i, mask in enumerate(MASKS):
        for n in (37, 64, 9):
            shape = [MHA, GQA, MQA, UNEVEN][(i + n) % 4]
            dtype = torch.bfloat16 if n == 37 else torch.float32
            by_rank = [attention_sent(rank, mesh, shape, n, 1, dtype, layout, **mask) for rank in range(mesh.ranks)]
            keys = KEYS[next(iter(mask), "")](*mask.values())
            model = a_model(*shape, keys=keys)
            job = Job(context=n, dtype="bf16" if n == 37 else "fp32", parallel=ParallelConfig(layout=layout))
            assert max(by_rank, key=total) == planned_for(model, job, mesh, 1), (mask, n, shape)


@pytest.mark.parametrize(
    ("chunks", "mesh"),
    each_value([2, 3, 8], [ParallelConfig(ulysses=2), ParallelConfig(ulysses=3), ParallelConfig(ring=2, ulysses=2)]),
    ids=str,
)
def test_an_exchange_in_chunks_sends_what_is_planned(mesh: ParallelConfig, chunks: int) -> None:
    """Chunks that divide a rank's KV groups and that do not, and chunks of the queries of one KV head.

    Chunks in which a rank has nothing to send are in tests/attn/test_head_slices.py: torch's fake group refuses them.
    """
    shapes = ((16, 8, 4, 4), (14, 7, 4, 6), (12, 6, 4, 4), (24, 3, 4, 4), (16, 2, 4, 6))
    cut = {shape: split_head_chunks(split_heads(*shape[:2], mesh.ulysses), 1, chunks) for shape in shapes}
    some = [s for s in shapes if all(mine.q_heads for run in cut[s] for piece in run for mine in piece)]
    assert some
    for shape in some:
        by_rank = [
            attention_sent(rank, mesh, shape, 36, 1, torch.float32, overlap_chunks=chunks) for rank in range(mesh.ranks)
        ]
        job = Job(context=36, dtype="fp32", parallel=ParallelConfig(overlap_chunks=chunks))
        assert max(by_rank, key=total) == planned_for(a_model(*shape), job, mesh, 1), shape


# A sequence of 24 tokens cuts convolutions' halos out of runs of 3 tokens on 4 ranks with zigzag, 9 leave ranks empty.
RECURRENT = [(None, False, 0), ("head", False, 1), ("key", False, 1), ("head", True, 6)]


@pytest.mark.parametrize(
    ("mesh", "layout"),
    [
        (ParallelConfig(ring=r, ulysses=u), layout)
        for r, u in ((2, 1), (4, 1), (2, 2), (1, 4))
        for layout in ("contiguous", "zigzag")
    ],
    ids=str,
)
def test_recurrent_layers_send_what_is_planned(mesh: ParallelConfig, layout: str) -> None:
    for i, (n, (decay, delta, columns)) in enumerate(itertools.product((24, 9), RECURRENT)):
        dtype: Any = ("bf16", "fp32")[i % 2]
        mixing = Linear(4, 2, 6, 5, columns=columns, channels=7, kernel=4)
        job = Job(context=n, dtype=dtype, parallel=ParallelConfig(layout=layout))
        planned = Counter[tuple[str, int]]()
        for s in mixing.sent(CostContext(a_model(*MHA), job.on(**mesh.degrees))):
            planned[s.op, 2 * s.bytes] += s.calls
        for rank in range(mesh.ranks):
            assert recurrent_sent(rank, mesh, layout, n, dtype, decay, delta) == planned, (n, decay, delta)


def recurrent_sent(
    rank: int, mesh: ParallelConfig, layout: str, n: int, dtype: str, decay: str | None, delta: bool
) -> Counter[tuple[str, int]]:
    """What a convolution of 7 channels by 4 tokens and linear attention send, forward and backward, of two rows."""
    of = torch.float32 if dtype == "fp32" else torch.bfloat16
    with fake_world(rank, mesh.ranks):
        sp = sharding(mesh, layout)
        tokens = sp.layout.local_length(n)
        q, k = (torch.ones(2, tokens, 2, 6, dtype=of, requires_grad=True) for _ in "qk")
        v, x = torch.ones(2, tokens, 4, 5, dtype=of), torch.ones(2, tokens, 7, dtype=of, requires_grad=True)
        g = None if decay is None else torch.zeros(2, tokens, 4, *((6,) if decay == "key" else ()))
        with count_sent() as sent:
            y = short_conv(x, torch.ones(7, 4, dtype=of), sp, length=n)
            beta = torch.ones(2, tokens, 4) if delta else None
            out = longspan.linear_attention(q, k, v, sp, decay=g, beta=beta, length=n)
            (y.float().sum() + out.float().sum()).backward()
    return Counter((one.op, one.bytes) for one in sent)


def a_model(q_heads: int, kv_heads: int, d: int, dv: int, keys: AttendedKeys = CAUSAL) -> ModelShape:
    heads = {"num_attention_heads": q_heads, "num_key_value_heads": kv_heads, "head_dim": d}
    config = {**LLAMA, **heads, "hidden_size": 6 * q_heads}
    model = shape_from_config(config, "test")
    layer = model.layers[0]
    mixing = dataclasses.replace(layer.mixing, v_head_dim=dv, keys=keys)  # type: ignore[call-arg]
    return dataclasses.replace(model, layers=(dataclasses.replace(layer, mixing=mixing), *model.layers[1:]))


MOE = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MLA = {
    "model_type": "deepseek_v3", "head_dim": 4, "num_key_value_heads": 8, "q_lora_rank": 24, "kv_lora_rank": 16,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 24, "n_shared_experts": 1,
}  # fmt: skip
NEXT = {
    "model_type": "qwen3_next", "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 5,
    "linear_conv_kernel_dim": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}  # fmt: skip
NEMOTRON = {
    "model_type": "nemotron_h", "hybrid_override_pattern": "M-*ME", "mamba_num_heads": 4, "mamba_head_dim": 5,
    "n_groups": 2, "ssm_state_size": 6, "chunk_size": 8, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 24,
}  # fmt: skip
DSA = {
    **MLA, "model_type": "glm_moe_dsa", "index_topk": 6, "index_n_heads": 2, "index_head_dim": 10,
    "indexer_types": ["full", "shared", "full"],
}  # fmt: skip
V4 = {
    "model_type": "deepseek_v4", "num_key_value_heads": 1, "num_hidden_layers": 3, "q_lora_rank": 24,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "hc_mult": 2, "o_groups": 2,
    "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}, "sliding_window": 8,
    "mlp_layer_types": ["hash_moe", "moe", "moe"], "o_lora_rank": 8, "index_n_heads": 2, "index_head_dim": 10,
    "index_topk": 3, "partial_rotary_factor": 0.5, "head_dim": 8,
}  # fmt: skip
M3 = {
    "model_type": "minimax_m3_vl_text", "num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 4,
    "dense_intermediate_size": 48, "shared_intermediate_size": 16, "mlp_layer_types": ["dense"] * 3,
    "layer_types": ["minimax_m3_sparse", "full_attention", "minimax_m3_sparse"], "index_n_heads": 4,
    "index_head_dim": 4, "index_block_size": 4, "index_topk_blocks": 3,
}  # fmt: skip
QWEN4 = {
    **NEXT, "model_type": "qwen4_exp_text", "layer_types": ["linear_attention", "indexed_attention"], "hc_count": 2,
    "num_hidden_layers": 2, "hc_lowrank": 8, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 10,
    "indexer_budget": 8, "indexer_compress_ratio": 4, "head_dim": 8,
}  # fmt: skip
KIMI = {
    "model_type": "kimi_linear", "pad_token_id": 0, "num_hidden_layers": 5, "num_key_value_heads": 8,
    "linear_num_heads": 2, "linear_head_dim": 6, "q_lora_rank": None, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4, "v_head_dim": 6, "num_experts": 4, "num_experts_per_token": 2, "moe_intermediate_size": 24,
}  # fmt: skip
MINIMAX = {
    "model_type": "minimax", "layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2,
    "num_local_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
LFM2 = {"model_type": "lfm2", "layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False}
CHECKPOINTED = Memory(checkpointing="full")
CASES = [
    (ParallelConfig(ring=2), MINIMAX, {"dtype": "bf16"}),
    (ParallelConfig(ring=2, ulysses=2), NEMOTRON, {"memory": CHECKPOINTED}),
    (ParallelConfig(ulysses=2), NEMOTRON, {"weight_sharding": False}),
    (ParallelConfig(ulysses=4), KIMI, {}),
    (ParallelConfig(ring=4), NEXT, {"dtype": "bf16"}),
    (
        ParallelConfig(ring=2),
        NEXT,
        {"layout": "contiguous", "memory": Memory(checkpointing="grouped")},
    ),
    (ParallelConfig(ulysses=4), MOE, {}),
    (ParallelConfig(data=2, ulysses=2), MLA, {}),
    (ParallelConfig(ulysses=4), {"model_type": "gemma3_text", "sliding_window": 8}, {}),
    (ParallelConfig(ulysses=2), {}, {}),
    (ParallelConfig(ulysses=4), {}, {}),
    (ParallelConfig(ulysses=8), {}, {}),  # 4 KV heads: replicated
    (ParallelConfig(data=2, ulysses=4), {}, {}),
    (ParallelConfig(data=4, ulysses=2), {}, {"dtype": "bf16"}),
    (ParallelConfig(data=8), {}, {}),
    (ParallelConfig(ulysses=4), {"tie_word_embeddings": True}, {}),
    (
        ParallelConfig(data=3, ulysses=2),
        {"vocab_size": 97, "hidden_size": 56, "intermediate_size": 83},
        {},
    ),  # shards are padded
    (ParallelConfig(ulysses=4), {}, {"weight_sharding": False}),
    (ParallelConfig(data=2, ulysses=2), {"tie_word_embeddings": True}, {"weight_sharding": False}),
    (ParallelConfig(ulysses=4), {}, {"memory": CHECKPOINTED}),
    (ParallelConfig(ulysses=4), {}, {"dtype": "bf16", "memory": CHECKPOINTED}),
    (
        ParallelConfig(ulysses=4),
        {"num_hidden_layers": 7},
        {"memory": Memory(checkpointing="grouped")},
    ),
    (
        ParallelConfig(ring=2, ulysses=2),
        {"num_hidden_layers": 4},
        {"memory": Memory(checkpointing="grouped", head_slices=0)},
    ),
    (
        ParallelConfig(ulysses=4),
        {"num_hidden_layers": 5},
        {"memory": Memory(checkpointing="selective", tiled=True)},
    ),
    (ParallelConfig(ulysses=2), {}, {"memory": Memory(checkpointing="selective", head_slices=0)}),
    (ParallelConfig(ulysses=2), {}, {"memory": Memory(head_slices=3)}),
    (ParallelConfig(ulysses=4), {}, {"dtype": "bf16", "memory": LONGEST}),
    (ParallelConfig(data=2, ulysses=2), {"model_type": "qwen3"}, {}),
    (ParallelConfig(ulysses=4), {"model_type": "qwen2"}, {"dtype": "bf16"}),
    (ParallelConfig(ring=4), {}, {}),
    (ParallelConfig(ring=2), {}, {"dtype": "bf16"}),
    (ParallelConfig(ring=2, ulysses=2), {}, {"dtype": "bf16", "memory": CHECKPOINTED}),
    (ParallelConfig(data=2, ring=2, ulysses=2), {}, {"weight_sharding": False}),
    (ParallelConfig(ring=4), {"model_type": "gemma3_text", "sliding_window": 8}, {}),
    (ParallelConfig(ring=4), {"model_type": "gemma3_text", "sliding_window": 8}, {}),
    (ParallelConfig(ring=4), {"model_type": "mistral", "sliding_window": 8}, {"layout": "contiguous"}),
    (ParallelConfig(ring=2, ulysses=2), {"model_type": "mistral", "sliding_window": 5}, {}),
    (ParallelConfig(ring=2, ulysses=2), MLA, {}),
    (ParallelConfig(tensor=2), {}, {}),
    (ParallelConfig(tensor=4), {}, {"tensor_style": "megatron-sp"}),
    (ParallelConfig(tensor=2, ulysses=2), {"attention_bias": True}, {"dtype": "bf16"}),
    (
        ParallelConfig(tensor=2, ulysses=2),
        {"tie_word_embeddings": True},
        {"tensor_style": "megatron-sp", "dtype": "bf16"},
    ),
    (ParallelConfig(tensor=2, data=2, ring=2), {"model_type": "qwen3"}, {"tensor_style": "megatron-sp"}),
    (ParallelConfig(tensor=2, data=2), {}, {"weight_sharding": False}),
    (ParallelConfig(tensor=2, ulysses=2), {}, {"weight_sharding": False, "tensor_style": "megatron-sp"}),
    (ParallelConfig(tensor=2, ulysses=2), {"model_type": "qwen3"}, {"memory": CHECKPOINTED}),
    (ParallelConfig(tensor=4, ulysses=2), {}, {"memory": CHECKPOINTED, "tensor_style": "megatron-sp"}),
    (ParallelConfig(tensor=2), {"model_type": "gemma3_text", "sliding_window": 8}, {"memory": CHECKPOINTED}),
    (ParallelConfig(ulysses=16), {"num_attention_heads": 16, "num_key_value_heads": 16, "num_hidden_layers": 2}, {}),
    (ParallelConfig(ring=2, ulysses=2), LFM2, {}),
    (ParallelConfig(ring=2, ulysses=2), DSA, {"dtype": "bf16", "memory": CHECKPOINTED}),
    (ParallelConfig(data=2, ulysses=2), DSA, {"weight_sharding": False}),
    (ParallelConfig(ring=2, ulysses=2), V4, {"memory": CHECKPOINTED}),
    (ParallelConfig(ulysses=2), M3, {}),
    (ParallelConfig(ring=2, ulysses=2), QWEN4, {"memory": CHECKPOINTED}),
]


# Each axis and option of these is in another case.
CONFIRMING = (9, 10, 12, 14, 19, 24, 25, 28, 30, 33, 35, 41, 42, 53)


@pytest.mark.parametrize(
    ("mesh", "config", "options"),
    [*(case for at, case in enumerate(CASES) if at not in CONFIRMING), *confirming(CASES[at] for at in CONFIRMING)],
)
def test_a_training_step_sends_what_is_planned(
    mesh: ParallelConfig, config: dict[str, Any], options: dict[str, Any]
) -> None:
    """Exchange, FSDP's gathers and scatters, gradient sum, loss: a parallelized model's forward and backward."""
    config, options = {**LLAMA, **config}, {"dtype": "fp32", **options}
    n = 37
    ranks = range(
        mesh.ranks if mesh.ring > 1 else min(2, mesh.ranks)
    )  # a ring's ranks differ, and not the first two alone
    measured = max((step_sent(rank, mesh, config, n, options) for rank in ranks), key=total)
    plan = cost(shape_from_config(config, "test"), job_on(mesh, context=n, batch=mesh.data, **options), CPU)
    assert measured == sent_by(plan)


MOE = {
    "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("mesh", "experts", "options"),
    [
        (ParallelConfig(ulysses=4), 4, {}),
        (ParallelConfig(data=2, ulysses=2), 2, {"dtype": "bf16"}),
        (ParallelConfig(ulysses=4), 2, {"memory": Memory(checkpointing="full")}),
        (ParallelConfig(ring=2, ulysses=2), 4, {"memory": Memory(checkpointing="full", tiled=True)}),
        (ParallelConfig(ulysses=4), 2, {"memory": Memory(tiled=True)}),
        (ParallelConfig(ulysses=4), 2, {"memory": Memory(checkpointing="grouped")}),
        (ParallelConfig(data=2, ulysses=2), 4, {"tuning": Tuning(lora=3)}),
    ],
)
def test_experts_over_data_and_sequence_send_what_is_planned(
    mesh: ParallelConfig, experts: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers of tokens, tokens there and back, each rank's experts; with a router that gives all experts as many."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    from longspan.hf.weights import experts as module

    route, send = Qwen3MoeTopKRouter.forward, module.all_to_all_rows

    def evenly(self: Any, hidden: torch.Tensor) -> Any:
        logits, weights, index = route(self, hidden)
        return logits, weights, torch.arange(index.numel()).view_as(index) % 8

    def equal_numbers(x: torch.Tensor, *args: Any) -> Any:  # the fake group receives nothing
        received = send(x, *args)
        return received if x.is_floating_point() else x

    monkeypatch.setattr(Qwen3MoeTopKRouter, "forward", evenly)
    monkeypatch.setattr(module, "all_to_all_rows", equal_numbers)
    monkeypatch.setattr(Tiled, "_check_independence", lambda self, hidden: None)  # of the first call only
    config, options = {**LLAMA, **MOE}, {"dtype": "fp32", **options, "experts": experts}
    n = 64
    measured = max((step_sent(rank, mesh, config, n, options) for rank in range(mesh.ranks)), key=total)
    model = shape_from_config(config, "test", options.pop("tuning", Tuning()))
    plan = cost(model, job_on(mesh, context=n, batch=mesh.data, **options), CPU)
    assert measured == sent_by(plan)


@pytest.mark.parametrize(
    ("mesh", "config", "options", "tuning"),
    [
        (ParallelConfig(data=3, ulysses=2), {}, {"dtype": "bf16"}, Tuning(lora=5)),
        (ParallelConfig(ulysses=4), {}, {"memory": CHECKPOINTED}, Tuning(lora=3, quantize=True)),
        (ParallelConfig(ulysses=4), {"tie_word_embeddings": True}, {}, Tuning(lora=3, targets=("q_proj", "up_proj"))),
        (ParallelConfig(ulysses=2), {}, {"weight_sharding": False}, Tuning(lora=3)),
        (ParallelConfig(tensor=2, ulysses=2), {}, {}, Tuning(lora=4)),
        (
            ParallelConfig(tensor=2, ulysses=2),
            {},
            {"tensor_style": "megatron-sp", "dtype": "bf16"},
            Tuning(4, ("q_proj", "down_proj")),
        ),
        (ParallelConfig(ulysses=2), {}, {}, Tuning(freeze=("*.layers.0.*", "lm_head.*"))),
        *(  # the first layer has no backward
            (mesh, {"tie_word_embeddings": False}, options, Tuning(freeze=("*embed_tokens*", "*.layers.0.*")))
            for mesh, options in (
                (ParallelConfig(ulysses=2), {}),
                (ParallelConfig(ring=2), {"memory": Memory(checkpointing="selective")}),
                (ParallelConfig(tensor=2), {}),
            )
        ),
        (ParallelConfig(ulysses=4), MOE, {}, Tuning(lora=3)),
    ],
)
def test_a_step_of_few_weights_sends_what_is_planned(
    mesh: ParallelConfig, config: dict[str, Any], options: dict[str, Any], tuning: Tuning
) -> None:
    if tuning.quantize:
        pytest.importorskip("bitsandbytes")
    config, options = {**LLAMA, **config}, {"dtype": "fp32", **options}
    model = shape_from_config(config, "test", tuning)
    plan = cost(model, job_on(mesh, context=37, batch=mesh.data, **options), CPU)
    assert step_sent(0, mesh, config, 37, {**options, "tuning": tuning}) == sent_by(plan)


@pytest.mark.parametrize(
    ("mesh", "teacher", "options"),
    [
        (ParallelConfig(ulysses=2), {"hidden_size": 64, "num_hidden_layers": 2}, {"memory": CHECKPOINTED}),
        (ParallelConfig(ring=2), {"model_type": "qwen3", "tie_word_embeddings": True}, {"dtype": "bf16"}),
        (ParallelConfig(ulysses=2), {}, {"weight_sharding": False}),
        (ParallelConfig(tensor=2), {"hidden_size": 64}, {}),
    ],
)
def test_a_step_with_a_teacher_sends_what_is_planned(
    mesh: ParallelConfig, teacher: dict[str, Any], options: dict[str, Any]
) -> None:
    """Its forward, and its head once more for the loss, which has more sums per token on a tensor axis."""
    options, teacher = {"dtype": "fp32", **options}, {**LLAMA, **teacher}
    model = shape_from_config(LLAMA, "test").taught_by(shape_from_config(teacher, "teacher"))
    plan = cost(model, job_on(mesh, context=37, batch=mesh.data, **options), CPU)
    assert plan.model.teacher is not None
    at_rest = (
        plan.memory_bytes["weights"] - Plan(shape_from_config(LLAMA, "test"), plan.job, CPU).memory_bytes["weights"]
    )
    if mesh.tensor == 1:
        assert at_rest == plan.model.teacher.params * plan.c.b // plan.c.weight_ranks
    by_rank = [step_sent(rank, mesh, LLAMA, 37, options, teacher=teacher) for rank in range(mesh.ring)]
    assert max(by_rank, key=total) == sent_by(plan)


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("once", [True, False])
def test_accumulated_gradients_are_summed_as_planned(sharded: bool, once: bool) -> None:
    """Once, after the last of three micro-batches; after each where whole gradients take too much of the memory."""
    mesh, options = ParallelConfig(data=2, ulysses=2), {"dtype": "fp32", "weight_sharding": sharded}
    hardware = CPU if once else dataclasses.replace(CPU, memory_bytes=1e5)
    model = shape_from_config(LLAMA, "test")
    plan = cost(model, job_on(mesh, context=37, batch=3 * mesh.data, **options), hardware)  # type: ignore[arg-type]
    waits = 2 if once or not sharded else 0
    assert max((step_sent(rank, mesh, LLAMA, 37, options, 3, waits) for rank in (0, 1)), key=total) == sent_by(plan)


@pytest.mark.parametrize(
    ("mesh", "config", "sharded"),
    each_value(
        [ParallelConfig(ulysses=4), ParallelConfig(ring=4), ParallelConfig(ring=2, ulysses=2), ParallelConfig(ring=2)],
        grouped(
            [
                ({}, True),
                ({"model_type": "mistral", "sliding_window": 8}, False),
                (MLA, True),
                (DSA, True),
                (QWEN4, True),
                # As many entries on each of 4 ranks as are planned.
                ({**V4, "compress_rates": {"compressed_sparse_attention": 3, "heavily_compressed_attention": 6}}, True),
            ]
        ),
    ),
    ids=str,
)
def test_a_prompt_in_chunks_and_a_token_send_what_is_planned(
    mesh: ParallelConfig, config: dict[str, Any], sharded: bool
) -> None:
    """Chunks of 20, 20 and 5 tokens (of the last, all ranks compute all), and one token: exchange, queries that travel,
    partial outputs, FSDP's gathers for each forward.
    """
    check_generation(mesh, config, sharded)


@pytest.mark.parametrize(
    ("mesh", "style"),
    each_value(
        [ParallelConfig(tensor=4), ParallelConfig(ring=2, tensor=2), ParallelConfig(ulysses=2, tensor=2)],
        ["tp", "megatron-sp"],
    ),
    ids=str,
)
def test_on_a_tensor_axis_they_send_hidden_states_too(mesh: ParallelConfig, style: TensorStyle) -> None:
    """Sums, or gathers and scatters, of the tokens of each forward; logits of the last token."""
    check_generation(mesh, {}, style == "tp", style)


def check_generation(mesh: ParallelConfig, config: dict[str, Any], sharded: bool, style: TensorStyle = "tp") -> None:
    config, n, chunk = {**LLAMA, **config}, 45, 20
    by_rank = [generation_sent(rank, mesh, config, n, chunk, sharded, style) for rank in range(mesh.ranks)]
    shape = shape_from_config(config, "test")
    for at, mode in enumerate(("prefill", "decode")):
        options: dict[str, Any] = {"prefill_chunk": chunk} if mode == "prefill" else {}
        options |= {"weight_sharding": sharded, "tensor_style": style}
        job = job_on(mesh, context=n, mode=mode, dtype="fp32", **options)
        assert max((sent[at] for sent in by_rank), key=total) == sent_by(cost(shape, job, CPU)), mode


def generation_sent(
    rank: int, mesh: ParallelConfig, config: dict[str, Any], n: int, chunk: int, sharded: bool, style: TensorStyle
) -> list[Counter[tuple[str, int]]]:
    """What a prompt in chunks sends from `rank`, and what one token behind it does."""
    import transformers

    with fake_world(rank, mesh.ranks), torch.no_grad():
        cls = transformers.CONFIG_MAPPING[config["model_type"]]
        model = transformers.AutoModelForCausalLM.from_config(cls(**config))
        model = longspan.parallelize(model.eval(), sharding(mesh), fsdp=sharded, tensor_style=style)
        cache, tokens, found = longspan.ShardedCache(model), torch.zeros(1, n, dtype=torch.long), []
        for forwards in (tokens.split(chunk, 1), (tokens[:, :1],)):
            with count_sent() as sent:
                for ids in forwards:
                    model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
            found.append(Counter((one.op, one.bytes) for one in sent))
        return found


def sent_by(plan: Plan) -> Counter[tuple[str, int]]:
    planned: Counter[tuple[str, int]] = Counter()
    for c in plan.comm:
        planned[c.op, c.bytes_per_gpu] += c.count
    return planned


def total(log: Counter[tuple[str, int]]) -> int:
    return sum(size * count for (_, size), count in log.items())


def step_sent(
    rank: int,
    mesh: ParallelConfig,
    config: dict[str, Any],
    n: int,
    options: dict[str, Any],
    micro: int = 1,
    waits: int = 0,
    teacher: dict[str, Any] | None = None,
) -> Counter[tuple[str, int]]:
    import transformers
    from torch.distributed.fsdp import MixedPrecisionPolicy

    def build(config: dict[str, Any]) -> Any:
        return transformers.AutoModelForCausalLM.from_config(
            transformers.CONFIG_MAPPING[config["model_type"]](**config)
        )

    with fake_world(rank, mesh.ranks):
        sp = sharding(mesh, options.get("layout", "auto"))
        model = tuned_model(build(config), options.get("tuning"))
        sharded, bf16 = options.get("weight_sharding", True), options["dtype"] == "bf16"
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 and mesh.fsdp_ranks > 1 else None
        by_transformers = options.get("memory") == CHECKPOINTED and "experts" not in options
        memory_options = "fastest" if by_transformers else options.get("memory", "fastest")
        passed = {"tensor_style": options.get("tensor_style", "tp"), "experts": options.get("experts", 1)}
        model = longspan.parallelize(model, sp, fsdp=sharded, mp_policy=policy, memory=memory_options, **passed)
        if teacher is not None:
            kind = {"fsdp": sharded, "mp_policy": policy, "tensor_style": passed["tensor_style"]}
            other = longspan.parallelize(build(teacher).requires_grad_(False), sp, **kind)
        if by_transformers:
            model.gradient_checkpointing_enable()
        model.train()
        tokens = torch.zeros(1, n, dtype=torch.long)
        batch = {"input_ids": tokens, "labels": tokens}
        with count_sent() as sent:
            for i in range(micro):
                with longspan.no_sync(model) if i < waits else contextlib.nullcontext():
                    taught = teacher is not None
                    loss = longspan.distillation_loss(model, other, batch, beta=0.5) if taught else model(**batch).loss
                    loss.backward()
    return Counter((one.op, one.bytes) for one in sent)


def a_mask(keys: AttendedKeys) -> AttentionMask:
    return AttentionMask(**{name: keys.limit for name, of in KEYS.items() if name and isinstance(keys, of)})


@settings(max_examples=150, deadline=None)
@given(
    n=st.integers(1, 300),
    ring=st.integers(1, 12),
    ulysses=st.integers(1, 3),
    layout=st.sampled_from(["zigzag", "contiguous"]),
    keys=st.one_of(st.just(CAUSAL), st.builds(Window, st.integers(1, 80)), st.builds(Chunk, st.integers(1, 80))),
)
def test_ring_schedule_matches_attention(n: int, ring: int, ulysses: int, layout: Any, keys: AttendedKeys) -> None:
    cut = Layout(ring, ulysses, layout)
    found = ring_schedule(cut, n, keys)
    work = pairs_of_blocks(cut, (n, n), a_mask(keys).limited_to(n), 1)
    assert found.routes == ring_routes(readers_of_blocks(work))
    assert found.pairs == tuple(sum(row) for row in work)
    steps = range(1, found.routes.steps + 1)
    sends = [
        sum(found.routes.has_hop(rank, direction, step) for step in steps for direction in (1, -1))
        for rank in range(ring)
    ]
    assert found.routes.sends == tuple(sends)
    received = [
        sum(0 < (rank - j) % ring <= found.routes.right[j] for j in range(ring))
        + sum(0 < (j - rank) % ring <= found.routes.left[j] for j in range(ring))
        for rank in range(ring)
    ]
    assert found.routes.received == tuple(received) and sum(received) == sum(sends)
    busiest = max(range(ring), key=lambda rank: found.pairs[rank])
    assert found.own == work[busiest][busiest] / sum(work[busiest])


def test_counting_sees_a_collective_that_nobody_planned() -> None:
    """The comparison can fail: one all-reduce too many is seen."""
    with fake_world(0, 4), count_sent() as sent:
        dist.all_reduce(torch.zeros(10))
    assert [(one.op, one.bytes) for one in sent] == [("all_reduce", 60)]
