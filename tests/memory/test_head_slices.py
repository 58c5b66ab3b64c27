"""Attention in slices of its heads: every gradient against the same model in one slice, and what is refused."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import longspan
from longspan.attn.methods.local import LocalAttention
from longspan.comm.mesh import MeshGroups
from longspan.core import tile_sizes
from longspan.core.errors import LongspanError
from longspan.core.heads import slices_of
from longspan.core.memory import FASTEST, LONGEST, Memory
from longspan.hf.weights.attention_slices import AttentionSlices
from longspan.memory import head_slices
from longspan.plan.from_model import shape_of_model
from tests.choose import confirming
from tests.fakes import fake_world
from tests.models import FAMILIES as FAMILIES_OF_MODELS
from tests.models import HYBRIDS, Case, batch, build, compare_cases, gradients, truth_of
from tests.pool import RankPool

ONE_DEVICE = longspan.SequenceSharding(MeshGroups("cpu"))
EIGHT = {"num_attention_heads": 8, "num_key_value_heads": 4}

# Slices that share KV heads, and uneven ones; norms per head, sinks, fused projections, gates, latent vectors.
FAMILIES: dict[str, tuple[dict[str, Any], int]] = {
    "Llama": ({**EIGHT, "attention_bias": True}, 3),
    "Qwen3": (EIGHT, 8),
    "GptOss": (EIGHT, 8),
    "Phi3": (EIGHT, 8),
    "DeepseekV3": ({}, 2),
    "Qwen3Next": ({}, 4),
    "Gemma2": ({}, 4),
    "Glm4": ({"attention_bias": True}, 2),
    "DeepseekV2": ({}, 4),
    "GPTNeoX": ({}, 2),
    "Llama4Text": ({}, 2),
}
CONFIRMING = "Gemma2", "Glm4", "DeepseekV2", "GPTNeoX", "Llama4Text"


@pytest.mark.parametrize("family", [*(f for f in FAMILIES if f not in CONFIRMING), *confirming(CONFIRMING)])
def test_gradients_equal_those_of_one_slice(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp64, with what each way of checkpointing saves. Norms of the other families compute in fp32 all the same."""
    monkeypatch.setattr(tile_sizes, "FEWEST_ROWS", (2, 2))
    changes, slices = FAMILIES[family]
    model = build(family, **changes).double()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    limit = 1e-12 if family in ("Llama", "GptOss", "Phi3", "Glm4", "GPTNeoX") else 1e-6
    truth = _gradients(copy.deepcopy(model), FASTEST)
    for memory in (
        Memory(head_slices=slices),
        Memory(checkpointing="full", tiled=True, head_slices=slices),
        Memory(checkpointing="selective", head_slices=slices),
        Memory(checkpointing="grouped", head_slices=slices),
    ):
        made = copy.deepcopy(model)
        found = _gradients(made, memory)
        assert all(sliced.cut is not None for sliced in made.longspan_state.memory.sliced.values())
        for name, gradient in truth.items():
            torch.testing.assert_close(found[name], gradient, rtol=limit, atol=limit * float(gradient.abs().max()))


def test_layers_run_in_the_fewest_slices_that_keep_the_peak() -> None:
    """That of the longest batch so far. Gradients equal those of plain transformers, also when the slices change."""
    plain = build("Llama", **EIGHT, num_hidden_layers=8, max_position_embeddings=2048).double().train()
    model = longspan.parallelize(copy.deepcopy(plain), ONE_DEVICE, memory=LONGEST)
    found = []
    for length in (96, 1536, 96):
        ids = torch.arange(length)[None] % plain.config.vocab_size
        for each in (plain, model):
            each.zero_grad()
            each(input_ids=ids, labels=ids).loss.backward()
        sliced = model.longspan_state.memory.sliced
        cuts = [sliced[f"model.layers.{layer}.self_attn"].cut for layer in range(8)]
        found.append([1 if cut is None else cut.count for cut in cuts])
        for name, gradient in gradients(plain).items():
            limit = 1e-6 * float(gradient.abs().max())
            torch.testing.assert_close(gradients(model)[name], gradient, rtol=1e-6, atol=limit)
    assert found[0] != found[1] == found[2] and found[1] == [2, 2, 2, 4, 4, 4, 8, 8], found


def test_gradients_of_projections_wait_for_several_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until they are larger than the gradient of the input: four slices of q, k and v are twice as large."""
    flushed, add_waiting = list[int](), head_slices._Input.add_waiting

    def record(given: Any, add: Any) -> None:
        flushed.append(len(given.waiting))
        add_waiting(given, add)

    monkeypatch.setattr(head_slices._Input, "add_waiting", record)
    _gradients(build("Llama", **EIGHT, num_hidden_layers=1), Memory(head_slices=4))
    assert flushed == [9, 3]


# For each layer, and the last norm: whether its norms compute nothing, because all readers go tile by tile.
READ_BY_TILES: dict[str, tuple[dict[str, Any], dict[int, list[bool | None]]]] = {
    "Llama": (EIGHT, {1: [None, True], 2: [True, True]}),
    "Qwen3": (EIGHT, {1: [None, None, None, True], 2: [None, None, True, True]}),  # norms of heads first
    "Phi": ({}, {1: [False], 2: [True]}),  # one norm for attention and MLP
    "Gemma2": ({}, {1: [None, None, True, None], 2: [True, None, True, None]}),  # and norms behind both
}


@pytest.mark.parametrize("family", [*("Llama", "Phi"), *confirming(["Qwen3", "Gemma2"])])
def test_norms_that_are_read_tile_by_tile_compute_nothing(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first forward finds them; steps behind it equal those of plain transformers, whatever reads the norm."""
    monkeypatch.setattr(tile_sizes, "FEWEST_ROWS", (2, 2))
    changes, expected = READ_BY_TILES[family]
    plain = build(family, **changes).double().train()
    models = {
        slices: longspan.parallelize(copy.deepcopy(plain), ONE_DEVICE, memory=Memory(tiled=True, head_slices=slices))
        for slices in expected
    }
    for _ in range(3):
        for model in (plain, *models.values()):
            model(**batch(rows=2)).loss.backward()
    for slices, model in models.items():
        norms = [norm.uncomputed for norm in model.longspan_state.memory.norms]
        assert norms == [*expected[slices] * plain.config.num_hidden_layers, None]
        for name, gradient in gradients(plain).items():
            limit = 1e-6 * float(gradient.abs().max())
            torch.testing.assert_close(gradients(model)[name], gradient, rtol=1e-6, atol=limit)


def _double(_: Any, args: tuple[Tensor]) -> None:
    args[0].mul_(2)


def _hook(_: Any, args: tuple[Tensor]) -> None:
    if args[0].requires_grad:
        args[0].register_hook(lambda gradient: 2 * gradient)


def _double_without_gradient(_: Any, args: tuple[Tensor]) -> None:
    with torch.no_grad():
        args[0].mul_(2)


@pytest.mark.parametrize("hook", [_double, _double_without_gradient, _hook])
def test_hooks_may_change_a_norm_that_computes_nothing(hook: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the steps in which the norm learns of its readers, too."""
    monkeypatch.setattr(tile_sizes, "FEWEST_ROWS", (2, 2))
    plain = build("Llama", num_hidden_layers=1).double().train()
    model = longspan.parallelize(copy.deepcopy(plain), ONE_DEVICE, memory=Memory(checkpointing="full", tiled=True))
    for each in (plain, model):
        each.model.layers[0].mlp.register_forward_pre_hook(hook)
        for _ in range(3):
            each(**batch(rows=2)).loss.backward()
    for name, gradient in gradients(plain).items():
        limit = 1e-6 * float(gradient.abs().max())
        torch.testing.assert_close(gradients(model)[name], gradient, rtol=1e-6, atol=limit)


def test_norms_forget_their_readers_with_other_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tile_sizes, "FEWEST_ROWS", (2, 2))
    model = longspan.parallelize(build("Llama", **EIGHT), ONE_DEVICE, memory=LONGEST).train()
    found = []
    for memory in (LONGEST, Memory(tiled=True), LONGEST):
        model.longspan_state.memory.set(memory, None, "the test asks for it")
        for _ in range(2):
            model(**batch(rows=2)).loss.backward()
        found.append(model.longspan_state.memory.norms[0].uncomputed)
    assert found == [True, False, True]


def _gradients(model: Any, memory: Memory, inputs: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    longspan.parallelize(model, ONE_DEVICE, memory=memory).train()
    model(**(inputs or batch(rows=2))).loss.backward()
    return gradients(model)


def _lora(model: Any) -> Any:
    import peft

    torch.manual_seed(3)
    config = peft.LoraConfig(r=3, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config)


def _in_4_bits(model: Any) -> Any:
    bnb = pytest.importorskip("bitsandbytes")
    for layer in model.model.layers:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            old = getattr(layer.self_attn, name)
            made = bnb.nn.Linear4bit(
                old.in_features, old.out_features, bias=False, compute_dtype=torch.float32, quant_type="nf4"
            )
            made.weight = bnb.nn.Params4bit(old.weight.data, requires_grad=False, quant_type="nf4").to("cpu")
            made.quant_state = made.weight.quant_state
            setattr(layer.self_attn, name, made)
    return _lora(model)


@pytest.mark.parametrize("kind", ["lora", "frozen", "4 bits"])
def test_weights_that_are_not_trained(kind: str) -> None:
    def make() -> Any:
        model = build("Llama", **EIGHT, **({"hidden_size": 64} if kind == "4 bits" else {}))
        if kind == "4 bits":
            return _in_4_bits(model)
        for module in (
            model.model.embed_tokens,
            model.model.layers[0].self_attn,
            model.model.layers[0].input_layernorm,
        ):
            module.requires_grad_(kind == "lora")
        return _lora(model.double()) if kind == "lora" else model.double()

    truth, limit = _gradients(make(), FASTEST), 1e-4 if kind == "4 bits" else 1e-6
    for memory in (Memory(head_slices=4), LONGEST, Memory(checkpointing="selective", tiled=True, head_slices=2)):
        found = _gradients(make(), memory)
        assert found.keys() == truth.keys()
        for name, gradient in truth.items():
            torch.testing.assert_close(found[name], gradient, rtol=limit, atol=limit * float(gradient.abs().max()))


# ---------------------------------------------------------------------------------------------------------------------
# On ranks.

# With 4 Ulysses ranks a slice has fewer KV heads than there are ranks.
ON_4: list[Case] = [
    ({"ulysses": 4}, {"memory": "longest"}),
    ({"ring": 2, "ulysses": 2}, {"memory": Memory(checkpointing="selective", tiled=True, head_slices=3)}),
    ({"data": 2, "ulysses": 2}, {"memory": Memory(head_slices=0), "fsdp": False}),
    ({"ring": 4}, {"memory": "longest"}),
]


@pytest.mark.parametrize("family", ["Llama", *confirming(["GptOss", "DeepseekV3"])])
def test_on_four_ranks(pool4: RankPool, family: str) -> None:
    make = functools.partial(build, family, **({} if family == "DeepseekV3" else EIGHT), attention_bias=True)
    pool4.run(compare_cases, make, ON_4, truth_of(make(), batch()), timeout=180)


# ---------------------------------------------------------------------------------------------------------------------
# How often a kernel runs, and where there are no slices.


@pytest.mark.parametrize(
    ("memory", "runs"),
    [
        (Memory(head_slices=4), 1),
        (Memory(checkpointing="full", head_slices=4), 2),
        (Memory(checkpointing="selective", head_slices=4), 1),
    ],
)
def test_how_often_the_kernel_of_a_slice_runs(memory: Memory, runs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[int]()
    plain = LocalAttention.forward

    def counted(self: Any, q: Tensor, *args: Any) -> Any:
        calls.append(q.shape[1])
        return plain(self, q, *args)

    monkeypatch.setattr(LocalAttention, "forward", counted)
    model = build("Llama", **EIGHT)
    _gradients(model, memory)
    assert calls == [2] * (2 * 4 * runs)  # of two heads, in two layers
    calls.clear()
    with torch.no_grad():
        model.eval()(**batch())
    assert all(heads == 8 for heads in calls)


def test_a_kernel_that_returns_no_log_sum_exp_runs_again() -> None:
    made = {}
    for slices in (1, 4):
        model = longspan.parallelize(
            build("Llama", **EIGHT), ONE_DEVICE, kernel="sdpa", memory=Memory(checkpointing="full", head_slices=slices)
        ).train()
        model(**batch()).loss.backward()
        made[slices] = gradients(model)
    for name, gradient in made[1].items():
        torch.testing.assert_close(made[4][name], gradient, rtol=1e-4, atol=1e-5)


def test_slices_are_at_most_the_query_heads_of_a_rank() -> None:
    assert [slices_of(asked, 32, 8) for asked in (0, 1, 2, 9)] == [4, 1, 2, 4]
    assert slices_of(0, 128, 1) == 8 and slices_of(0, 2, 4) == 1


@pytest.mark.parametrize(
    ("family", "reason"), [("GPT2", "no tensor-parallel plan"), ("Olmo2", "normalizes all heads together")]
)
def test_attention_that_cannot_be_sliced(family: str, reason: str) -> None:
    with pytest.raises(LongspanError, match=f"head_slices=2.*{reason}.*use `head_slices=1`"):
        longspan.parallelize(build(family), ONE_DEVICE, memory=Memory(head_slices=2))
    model = longspan.parallelize(build(family), ONE_DEVICE, memory="longest")
    assert not model.longspan_state.memory.sliced


def test_slices_beside_a_tensor_axis_are_refused() -> None:
    with fake_world(0, 2), pytest.raises(LongspanError, match="head_slices=2 .*tensor=2.*use head_slices=1"):
        sp = longspan.SequenceSharding(longspan.init_mesh(tensor=2))
        longspan.parallelize(build("Llama", vocab_size=64), sp, memory=Memory(head_slices=2))


def test_the_planner_slices_the_models_that_parallelize_slices() -> None:
    for family in (*FAMILIES_OF_MODELS, *HYBRIDS):
        model = build(family)
        planned = any(getattr(layer.mixing, "sliceable", False) for layer, _ in shape_of_model(model).layer_kinds)
        try:
            sliced = bool(AttentionSlices(model, 1, 0).cuts())
        except LongspanError:
            sliced = False
        assert planned == sliced, family
