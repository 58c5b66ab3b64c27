"""The tensor axis: a model sharded over it computes what one process does; what it cannot shard is refused."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import longspan
from longspan import LongspanError
from longspan.comm.tensor import TensorGroup
from longspan.core.memory import Memory
from longspan.hf.preconditions import Checked, ParallelizeOptions
from tests.choose import confirming
from tests.fakes import fake_world
from tests.fuzz.families import build as small_model
from tests.models import (
    UNEVEN,
    Case,
    Truth,
    batch,
    build,
    compare,
    compare_cases,
    lora_on_experts,
    on_mesh,
    truth_of,
    widened,
)
from tests.pool import on_ranks

pytestmark = pytest.mark.versions

EIGHT = {"num_attention_heads": 8}
BIASED = {**EIGHT, "num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}
SAVING = Memory(checkpointing="selective")
SP: dict[str, Any] = {"tensor_style": "megatron-sp"}
ON_4: list[Case] = [({"tensor": 4}, {**SP, "fsdp": False}), ({"tensor": 2, "ring": 2}, {"memory": SAVING})]

# Every mesh of 4 ranks with a tensor axis, both styles, with FSDP and without, and other options. Four ranks share
# two KV heads of GptOss, Mixtral and Phi-3.
FAMILIES: dict[str, tuple[dict[str, Any], list[Case]]] = {
    "Llama": (
        {**BIASED, "tie_word_embeddings": True},
        [
            ({"tensor": 4}, {}),
            ({"tensor": 2, "ulysses": 2}, {**SP, "memory": "longest"}),
            ({"tensor": 2, "ring": 2}, {"fsdp": False}),
            ({"tensor": 2, "data": 2}, {**SP, "fsdp": False}),
        ],
    ),
    "Qwen3": (
        {},
        [
            ({"tensor": 2, "ring": 2}, {**SP, "memory": SAVING}),
            ({"tensor": 2, "ulysses": 2}, {"fsdp": False, "logits": True}),
        ],
    ),
    "Gemma3Text": ({}, [({"tensor": 2, "ring": 2}, SP)]),
    "GptOss": (
        {"output_router_logits": True},
        [({"tensor": 2, "ulysses": 2}, {}), ({"tensor": 4}, {**SP, "fsdp": False})],
    ),
    "Mixtral": ({"output_router_logits": True}, [({"tensor": 2, "data": 2}, SP), ({"tensor": 4}, {"fsdp": False})]),
    "Qwen3Moe": ({"output_router_logits": True}, [({"tensor": 2, "ring": 2}, SP)]),
    "uneven": (UNEVEN, [({"tensor": 4}, {**SP, "fsdp": False}), ({"tensor": 2, "ring": 2}, {"memory": "longest"})]),
    # Norms over all heads, of queries and of keys that two ranks share.
    "Olmo2": ({**UNEVEN, "num_attention_heads": 4, "num_key_value_heads": 2}, ON_4),
    "Olmo3": ({}, [({"tensor": 2, "ring": 2}, {**SP, "memory": "longest"})]),
    "Olmoe": ({"output_router_logits": True, "num_experts": 7}, ON_4),
    "Phi3": ({"vocab_size": 61}, ON_4[:1]),
    "Glm4": ({"vocab_size": 61, "intermediate_size": 50, "attention_bias": True}, ON_4),
    "DeepseekV2": ({}, ON_4),
    "DeepseekV3": ({"num_attention_heads": 6, "num_key_value_heads": 6, "attention_bias": True}, ON_4[:1]),
    "GraniteMoe": ({"output_router_logits": True}, [({"tensor": 2, "ring": 2}, SP)]),
    "HunYuanDenseV1": ({}, [({"tensor": 4}, SP)]),
    "HunYuanMoEV1": ({}, [({"tensor": 2, "ulysses": 2}, {})]),
    "Llama4Text": ({"num_local_experts": 7, "num_experts_per_tok": 1}, ON_4[1:]),
}


def a_model(family: str, **changes: Any) -> Any:
    return build("Llama" if family == "uneven" else family, **{"vocab_size": 64, **changes})


CONFIRMING = (  # plans like others'
    "Olmoe", "GraniteMoe", "HunYuanDenseV1", "HunYuanMoEV1", "DeepseekV2", "Qwen3Moe", "Olmo3", "Glm4",
)  # fmt: skip


@pytest.mark.parametrize("family", [*(f for f in FAMILIES if f not in CONFIRMING), *confirming(CONFIRMING)])
def test_loss_logits_and_gradients_equal_those_of_one_process(pool4: Any, family: str) -> None:
    changes, cases = FAMILIES[family]
    make = functools.partial(a_model, family, **changes)
    pool4.run(compare_cases, make, cases, truth_of(make(), batch()), timeout=180)


def test_on_eight_ranks(pool8: Any) -> None:
    case: Case = {"tensor": 2, "ring": 2, "ulysses": 2}, SP
    make = functools.partial(a_model, "Llama", **BIASED)
    pool8.run(compare_cases, make, [case], truth_of(make(), batch()), timeout=180)


# ---------------------------------------------------------------------------------------------------------------------
# Adapters, log-probabilities, the norm of gradients, the parameters per rank.


def _lora(model: Any) -> Any:
    import peft

    torch.manual_seed(3)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return peft.get_peft_model(model, peft.LoraConfig(r=3, target_modules=targets, init_lora_weights=False))


def _lora_and_more(truth: Truth, of_router: Truth) -> dict[str, float]:
    model = longspan.parallelize(_lora(a_model("Qwen3")), sp := on_mesh({"tensor": 2, "ring": 2}), **SP)
    compare(truth, model, batch(), sp)
    with pytest.raises(longspan.LongspanError, match="LoRA on experts, which are sharded with it by `experts` only"):
        longspan.parallelize(lora_on_experts(a_model("Qwen3Moe")), on_mesh({"tensor": 4}), fsdp=False)
    router = lora_on_experts(a_model("Qwen3Moe"), ["mlp.gate.weight"])
    compare(of_router, longspan.parallelize(router, sp := on_mesh({"tensor": 4}), fsdp=False), batch(), sp)
    model = longspan.parallelize(a_model("Llama", **BIASED).double(), sp := on_mesh({"tensor": 2, "ulysses": 2}))
    found = longspan.token_logprobs(model, batch(), entropy=True, top1=True, gather=True)
    (found[0].sum() + found[1].sum()).backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    held = sum(p.to_local().numel() for p in model.parameters() if isinstance(p, DTensor))
    whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
    assert len(grads) == len(list(model.parameters())) and sp.tensor_size == 2
    return {
        "logprobs": float(found[0].sum()), "entropy": float(found[1].sum()), "top1": float(found[2].sum()),
        "norm": float(whole), "held": held,
    }  # fmt: skip


def test_lora_logprobs_and_the_norm_of_gradients(pool4: Any) -> None:
    made = _lora(a_model("Qwen3")), lora_on_experts(a_model("Qwen3Moe"), ["mlp.gate.weight"])
    truths = (truth_of(model, batch()) for model in made)
    results = pool4.run(_lora_and_more, *truths, timeout=180)
    one = widened(a_model("Llama", **BIASED))
    inputs = batch()
    logits = one(input_ids=inputs["input_ids"], use_cache=False).logits
    labels = inputs["labels"][:, 1:]
    log_p = torch.log_softmax(logits[:, :-1], -1)
    counts = labels != -100
    mine = log_p.gather(-1, labels.clamp(min=0)[..., None])[..., 0][counts].sum()
    entropy = -(log_p.exp() * log_p).sum(-1)[counts].sum()
    (mine + entropy).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in one.parameters() if p.grad is not None])
    top1 = (log_p.argmax(-1) == labels)[counts].sum()
    for found in results:
        assert found["top1"] == float(top1)
        for name, exact in (("logprobs", mine), ("entropy", entropy), ("norm", norm)):
            assert abs(found[name] - float(exact)) <= 1e-12 * abs(float(exact)), (name, found, exact)
    total = sum(p.numel() for p in one.parameters())
    assert max(found["held"] for found in results) < 0.3 * total  # a quarter, norms and padding aside


# ---------------------------------------------------------------------------------------------------------------------
# Errors.


def _refusal(model: Any, tensor: int, others: int = 1, **options: Any) -> str:
    with fake_world(0, tensor * others):
        sp = on_mesh({"tensor": tensor, "ulysses": others})
        with pytest.raises(LongspanError) as error:
            Checked(model, sp, ParallelizeOptions(**options))
    return str(error.value)


@pytest.mark.parametrize(
    ("family", "changes", "tensor", "said"),
    [
        ("Llama", {"num_attention_heads": 4}, 8, ("tensor=8", "4 query heads", "try `tensor=4, ulysses=2`")),
        ("Llama", {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48}, 8, ("6 query", "tensor=4")),
        ("Llama", {"intermediate_size": 5}, 4, ("5 features", "mlp", "tensor=2, ulysses=2")),
        ("Mixtral", {"num_local_experts": 6}, 4, ("6 experts", "tensor=2")),
        ("GPT2", {}, 2, ("no tensor-parallel plan", "gpt2", "tensor=1")),
        (
            "Llama",
            {"base_model_tp_plan": {"layers.*.self_attn.q_proj": "colwise_gather_output"}},
            2,
            ("colwise_gather_output", "q_proj", "any order", "tensor=1"),
        ),
        ("Llama", {"attention_dropout": 0.5}, 2, ("draws", "set it to 0")),
    ],
)
def test_too_few_heads_features_or_experts_are_refused(
    family: str, changes: dict[str, Any], tensor: int, said: Any
) -> None:
    """With the numbers and a mesh that fits, before any collective."""
    text = _refusal(build(family, **{"vocab_size": 64, **changes}), tensor)
    assert all(part in text for part in said), text


def test_other_adapters_and_styles_are_refused() -> None:
    import peft

    wide = peft.get_peft_model(a_model("Llama"), peft.LoraConfig(r=2, target_modules=["q_proj"], use_dora=True))
    text = _refusal(wide, 2)
    assert "lora_magnitude_vector" in text and "LoRA" in text
    assert "'tp'" in _refusal(a_model("Llama"), 2, tensor_style="ring")
    text = _refusal(small_model("causal/gemma3n_text", {}, 0), 2)
    assert "Gemma3nTextAltUp model.layers.0.altup reads the weight of" in text and "tensor=1" in text
    text = _refusal(small_model("causal/gemma4_text", {}, 0), 2, **SP)
    assert "embed_tokens_per_layer embeds all tokens" in text


@on_ranks(2)
def test_a_layer_without_its_batch_is_refused_for_uneven_tokens() -> None:
    model = longspan.parallelize(a_model("Nemotron"), on_mesh({"tensor": 2}), **SP)
    with pytest.raises(LongspanError, match="self_attn does not pass on keyword arguments"):
        model(**batch())


@on_ranks(4)
def test_a_rank_of_the_tensor_group_that_differs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    sp = on_mesh({"tensor": 2, "ulysses": 2})
    odd = dist.get_rank() == 3  # tensor rank 1 of the second Ulysses rank
    with pytest.raises(LongspanError, match=r"different weights(.|\n)*rank 3"):
        longspan.parallelize(a_model("Llama", seed=int(odd)), sp)
    with pytest.raises(LongspanError) as error:
        longspan.parallelize(a_model("Llama"), sp, logits=odd)
    assert "logits" in str(error.value) and "rank 3" in str(error.value)
    with monkeypatch.context() as patched, pytest.raises(LongspanError) as error:
        if odd:  # whose kernels might take other collectives
            patched.setattr("longspan.hf.preconditions.fla_kernels", lambda: "0.6.0")
        longspan.parallelize(a_model("Llama"), sp)
    assert "flash-linear-attention" in str(error.value) and "rank 3" in str(error.value)
    model = longspan.parallelize(a_model("Llama"), sp)
    with pytest.raises(LongspanError, match="ranks 3 were given another"):
        model(**batch(seed=5 if odd else 1))


def test_copy_in_copies_only_if_a_gradient_is_needed() -> None:
    group, x = TensorGroup("of two ranks", 2, 0), torch.randn(3, requires_grad=True)
    assert group.copy_in(x) is not x
    assert group.copy_in(x.detach()).data_ptr() == x.data_ptr()
    with torch.no_grad():
        assert group.copy_in(x) is x
