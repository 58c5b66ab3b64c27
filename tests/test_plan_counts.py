"""The planner and the code are one: every collective of a step, by count and to the byte, on fake process groups."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import longspan
from longspan.plan import Hardware, Job, Mesh, cost, read_hardware
from longspan.plan.communication import layer_method
from longspan.plan.shapes import ModelShape, shape_from_config
from tests.counting import count_sent

CPU: Hardware = read_hardware("cpu")
LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 96, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 6, "max_position_embeddings": 4096,
}  # fmt: skip


@contextlib.contextmanager
def fake_world(rank: int, size: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def attention_sent(rank: int, mesh: Mesh, shape: tuple[int, int, int, int], n: int, batch: int, dtype: Any) -> Any:
    """What one attention, forward and backward, sends from `rank`."""
    q_heads, kv_heads, d, dv = shape
    with fake_world(rank, mesh.gpus):
        sp = longspan.SequenceSharding(longspan.init_mesh(data=mesh.data, ulysses=mesh.ulysses))
        tokens = sp.layout.local_length(n)
        q, k, v = (
            torch.zeros(batch, tokens, heads, width, dtype=dtype, requires_grad=True)
            for heads, width in ((q_heads, d), (kv_heads, d), (kv_heads, dv))
        )
        with count_sent() as sent:
            longspan.attention(q, k, v, sp, length=n).sum().backward()
    return Counter((one.op, one.bytes) for one in sent)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "ulysses"),
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
    ],
)
def test_ulysses_attention_sends_what_is_planned(
    shape: tuple[int, int, int, int], ulysses: int, dtype: torch.dtype
) -> None:
    q_heads, kv_heads, d, dv = shape
    n, batch = 37, 2
    mesh = Mesh(ulysses=ulysses)
    by_rank = [attention_sent(rank, mesh, shape, n, batch, dtype) for rank in range(ulysses)]
    most = max(by_rank, key=lambda log: sum(size * count for (_, size), count in log.items()))
    model = a_model(q_heads, kv_heads, d, dv)
    job = Job(context=n, batch=batch, dtype="fp32" if dtype == torch.float32 else "bf16")
    # In training a replica takes its sequences one by one: the two of this batch are twice the bytes of one.
    planned: Counter[tuple[str, int]] = Counter()
    for sent in layer_method(model, model.layers[0], job, mesh):
        planned[("all_to_all", batch * sent.bytes)] += sent.calls
    assert most == planned
    assert sum(most.values()) == 4


def a_model(q_heads: int, kv_heads: int, d: int, dv: int) -> ModelShape:
    config = {**LLAMA, "num_attention_heads": q_heads, "num_key_value_heads": kv_heads, "head_dim": d}
    model = shape_from_config(config, "test")
    object.__setattr__(model.layers[0], "v_head_dim", dv)
    return model


MOE = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MLA = {
    "model_type": "deepseek_v3", "head_dim": 4, "num_key_value_heads": 8, "q_lora_rank": 24, "kv_lora_rank": 16,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 24, "n_shared_experts": 1,
}  # fmt: skip
CASES = [
    (Mesh(ulysses=4), MOE, {}),
    (Mesh(data=2, ulysses=2), MLA, {}),
    (Mesh(ulysses=4), {"model_type": "gemma3_text", "sliding_window": 8}, {}),
    (Mesh(ulysses=2), {}, {}),
    (Mesh(ulysses=4), {}, {}),
    (Mesh(ulysses=8), {}, {}),  # 4 KV heads: replicated
    (Mesh(data=2, ulysses=4), {}, {}),
    (Mesh(data=4, ulysses=2), {}, {"dtype": "bf16"}),
    (Mesh(data=8), {}, {}),
    (Mesh(ulysses=4), {"tie_word_embeddings": True}, {}),
    (Mesh(data=3, ulysses=2), {"vocab_size": 97, "hidden_size": 56, "intermediate_size": 83}, {}),  # shards are padded
    (Mesh(ulysses=4), {}, {"weight_sharding": False}),
    (Mesh(data=2, ulysses=2), {"tie_word_embeddings": True}, {"weight_sharding": False}),
    (Mesh(ulysses=4), {}, {"activation_checkpointing": True}),
    (Mesh(ulysses=4), {}, {"dtype": "bf16", "activation_checkpointing": True}),
    (Mesh(data=2, ulysses=2), {"model_type": "qwen3"}, {}),
    (Mesh(ulysses=4), {"model_type": "qwen2"}, {"dtype": "bf16"}),
    (Mesh(ulysses=16), {"num_attention_heads": 16, "num_key_value_heads": 16, "num_hidden_layers": 2}, {}),
]


@pytest.mark.parametrize(("mesh", "config", "options"), CASES)
def test_a_training_step_sends_what_is_planned(mesh: Mesh, config: dict[str, Any], options: dict[str, Any]) -> None:
    """Exchange, FSDP's gathers and scatters, gradient sum, loss: a parallelized model's forward and backward."""
    config, options = {**LLAMA, **config}, {"dtype": "fp32", **options}
    n = 37
    measured = max((step_sent(rank, mesh, config, n, options) for rank in range(min(2, mesh.gpus))), key=total)
    plan = cost(shape_from_config(config, "test"), Job(context=n, batch=mesh.data, **options), mesh, CPU)
    planned: Counter[tuple[str, int]] = Counter()
    for c in plan.comm:
        planned[(c.op, c.bytes_per_gpu)] += c.count
    assert measured == planned


def total(log: Counter[tuple[str, int]]) -> int:
    return sum(size * count for (_, size), count in log.items())


def step_sent(
    rank: int, mesh: Mesh, config: dict[str, Any], n: int, options: dict[str, Any]
) -> Counter[tuple[str, int]]:
    import transformers
    from torch.distributed.fsdp import MixedPrecisionPolicy

    with fake_world(rank, mesh.gpus):
        sp = longspan.SequenceSharding(longspan.init_mesh(data=mesh.data, ulysses=mesh.ulysses))
        cls = transformers.CONFIG_MAPPING[config["model_type"]]
        model = transformers.AutoModelForCausalLM.from_config(cls(**config))
        sharded, bf16 = options.get("weight_sharding", True), options["dtype"] == "bf16"
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else None
        model = longspan.parallelize(model, sp, fsdp=sharded, mp_policy=policy, check_batches=0)
        if options.get("activation_checkpointing"):
            model.gradient_checkpointing_enable()
        model.train()
        tokens = torch.zeros(1, n, dtype=torch.long)
        with count_sent() as sent:
            model(input_ids=tokens, labels=tokens).loss.backward()
    return Counter((one.op, one.bytes) for one in sent)


def test_counting_sees_a_collective_that_nobody_planned() -> None:
    """The comparison can fail: one all-reduce too many is seen."""
    with fake_world(0, 4), count_sent() as sent:
        dist.all_reduce(torch.zeros(10))
    assert [(one.op, one.bytes) for one in sent] == [("all_reduce", 60)]


def test_the_planner_has_the_sizes_of_the_code() -> None:
    """Buckets and tiles are written down twice, as the planner may not import what needs torch."""
    from longspan.gradients import GradientSum
    from longspan.loss import TILE_ELEMENTS
    from longspan.plan.communication import GRADIENT_BUCKET
    from longspan.plan.memory import Scale, _tile

    assert GradientSum.bucket_elements == GRADIENT_BUCKET
    tiles = [_tile(Scale(1, 2, 1, on_cpu=on_cpu, hidden_shards=1)) for on_cpu in (False, True)]
    assert tiles == [4 * elements for elements in TILE_ELEMENTS]
