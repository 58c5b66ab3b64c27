"""Models with recurrent layers and short convolutions: loss, logits and every gradient equal those of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import longspan
from tests.choose import confirming
from tests.memory.side_stream import offload_on_cpus
from tests.models import (
    BASE,
    HYBRIDS,
    NO_ATTENTION,
    Truth,
    alone,
    build,
    check_gradients,
    check_loss,
    compare,
    gradients,
    inputs_of,
    meshes,
    padded,
    sharding,
    truth_about,
    truth_of,
)
from tests.pool import RankPool
from tests.tolerance import excess

pytestmark = pytest.mark.versions

SIZES = (5, 9, 7)


def _documents(family: str) -> dict[str, Any]:
    """One row of three documents."""
    whole = {name: x[3:] for name, x in inputs_of(family).items()}
    whole["labels"] = whole["labels"].index_fill(1, torch.tensor([0, 5, 14]), -100)
    ids = torch.arange(3).repeat_interleave(torch.tensor(SIZES))[None]
    return {**whole, "document_ids": ids, "position_ids": torch.cat([*map(torch.arange, SIZES)])[None]}


def _inputs(family: str, kind: str) -> dict[str, Any]:
    if kind == "documents":
        return _documents(family)
    return padded(family, kind) if kind in ("left", "right") else inputs_of(family)


def _truth(family: str, kind: str, changes: dict[str, Any]) -> Truth:
    whole = _inputs(family, kind)
    return alone(family, changes, whole, SIZES) if kind == "documents" else truth_of(build(family, **changes), whole)


def _run(family: str, changes: dict[str, Any], ring: int, fsdp: bool, whole: dict[str, Any], truth: Truth) -> None:
    sp = sharding(ring=ring)
    compare(truth, longspan.parallelize(build(family, **changes), sp, fsdp=fsdp), whole, sp)


# 21 tokens, which 2 ranks do not divide. A ring's layout is zigzag: every rank has two runs.
KINDS = ("plain", "left", "right", "documents")
EVERY = [(family, ring, kind) for family in HYBRIDS for ring in (1, 2) for kind in KINDS]
CHOSEN = [(f, 1 + i % 2, KINDS[(i // 2) % 4]) for i, f in enumerate(HYBRIDS)]


@pytest.mark.parametrize(
    ("family", "ring", "kind"), [*CHOSEN, *confirming(case for case in EVERY if case not in CHOSEN)]
)
def test_one_process(pool2: RankPool, family: str, ring: int, kind: str) -> None:
    fsdp = (list(HYBRIDS).index(family) + ring + KINDS.index(kind)) % 2 == 0
    pool2.run(_run, family, {}, ring, fsdp, _inputs(family, kind), _truth(family, kind, {}))


ATTENTION_ALONE: dict[str, dict[str, Any]] = {
    "KimiLinear": {"layer_types": ["full_attention", "full_attention"]},
    "Bamba": {"attn_layer_indices": [0, 1]},
    "NemotronH": {"layer_types": ["full_attention", "mlp", "moe"]},
    "Jamba": {"attn_layer_period": 1, "attn_layer_offset": 0},
}
"""Configs of hybrid families that choose no recurrent layer."""


def _attention_alone(truths: dict[str, Truth]) -> None:
    for number, (family, truth) in enumerate(truths.items()):
        sp, whole = sharding(ring=1 + number % 2), inputs_of(family)
        plain, model = (build(family, **ATTENTION_ALONE[family]) for _ in range(2))
        model = longspan.parallelize(model, sp, memory="longest" if number % 2 else "fastest").train()
        compare(truth, model, whole, sp)
        ids = whole["input_ids"][:1]
        expected, found = (x.eval().generate(ids, max_new_tokens=2, do_sample=False) for x in (plain, model))
        assert torch.equal(found, expected), family


def test_hybrids_without_a_recurrent_layer(pool2: RankPool) -> None:
    truths = {f: truth_of(build(f, **changes), inputs_of(f)) for f, changes in ATTENTION_ALONE.items()}
    pool2.run(_attention_alone, truths)


def _heads(family: str) -> dict[str, Any]:
    """Return changes of a family, so that it has a head for each of 8 ranks."""
    heads = {**BASE, **HYBRIDS[family]}
    equal = heads["num_key_value_heads"] == heads["num_attention_heads"]
    wanted = {"num_attention_heads": 8, **({"num_key_value_heads": 8} if equal else {})}
    return {} if heads["num_attention_heads"] is None else wanted


def _on_meshes(family: str, changes: dict[str, Any], on: list[tuple[int, int, str]], truth: Truth) -> None:
    for number, (data, ring, layout) in enumerate(on):
        sp = sharding(data, ring, layout)
        fsdp = number % 2 == 0
        try:
            compare(truth, longspan.parallelize(build(family, **changes), sp, fsdp=fsdp), inputs_of(family), sp)
        except AssertionError as error:
            raise AssertionError(f"data={data}, ring={ring}, {layout}, fsdp={fsdp}: {error}") from error


# With a ring of 4, every rank has two runs of 3 tokens: as long as the halo of a convolution, or shorter.
SOME_OF_4 = [(1, 2, "auto"), (2, 1, "auto"), (1, 4, "contiguous"), (1, 4, "zigzag")]


@pytest.mark.parametrize("family", ["Qwen3Next", *confirming(["NemotronH"])])
def test_4_ranks(pool4: RankPool, family: str) -> None:
    pool4.run(_on_meshes, family, {}, SOME_OF_4, truth_about(family))


def check_every_mesh(get_pool: Callable[[int], RankPool], ranks: int, family: str) -> None:
    """Assert that a family equals one process on every mesh of so many ranks."""
    changes = _heads(family) if ranks == 8 else {}
    truth = truth_about(family, tuple(changes.items()))
    get_pool(ranks).run(_on_meshes, family, changes, meshes(ranks), truth, timeout=600)


@pytest.mark.parametrize(("ranks", "family"), confirming((ranks, family) for ranks in (4, 8) for family in HYBRIDS))
def test_every_mesh(get_pool: Callable[[int], RankPool], ranks: int, family: str) -> None:
    check_every_mesh(get_pool, ranks, family)


def _in_bf16(family: str, truth: Truth) -> None:
    sp = sharding(ring=2)
    compare(truth, longspan.parallelize(build(family).bfloat16(), sp, fsdp=False), inputs_of(family), sp)


@pytest.mark.parametrize("family", ["Bamba", *confirming(f for f in HYBRIDS if f != "Bamba")])
def test_bf16(pool2: RankPool, family: str) -> None:
    pool2.run(_in_bf16, family, truth_of(build(family).bfloat16(), inputs_of(family)))


def _mostly_padding(family: str) -> dict[str, Any]:
    """One row of 9 tokens and 12 of padding: the second of two ranks has padding only."""
    whole = {name: x[2:3] for name, x in padded(family, "right").items()}
    return {name: F.pad(x, (0, 3), value=-100 if name == "labels" else 0)[:, 3:] for name, x in whole.items()}


def _each_on_padding(families: list[str], truths: list[Truth]) -> None:
    for family, truth in zip(families, truths, strict=True):
        sp = sharding()
        compare(truth, longspan.parallelize(build(family), sp), _mostly_padding(family), sp)


def test_ranks_with_padding_alone(pool2: RankPool) -> None:
    families = ["Qwen3Next", "Mamba2", "Mamba", "Lfm2", "MiniMax"]
    truths = [truth_of(build(family), _mostly_padding(family)) for family in families]
    pool2.run(_each_on_padding, families, truths)


def _with_decays_alone(family: str) -> Any:
    model = build(family)
    for name, weight in model.named_parameters():
        weight.requires_grad_(name.endswith(("A_log", "dt_bias")))
    return model


def _decays_on_padding(families: list[str]) -> None:
    for family in families:
        plain, whole = _with_decays_alone(family), _mostly_padding(family)
        model = longspan.parallelize(_with_decays_alone(family), sharding(), fsdp=False)
        for each in (plain, model):
            each(**whole).loss.backward()
        found, expected = gradients(model), gradients(plain)
        assert found and found.keys() == expected.keys()
        for name, grad in expected.items():
            torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-5 * float(grad.abs().max()))


def test_ranks_with_padding_alone_and_frozen_weights(pool2: RankPool) -> None:
    """No token of the first layer has a gradient, and all ranks take part in the backward's collective."""
    pool2.run(_decays_on_padding, ["Bamba", "Mamba"], timeout=30)


# ---------------------------------------------------------------------------------------------------------------------
# Options of training.

AUX: tuple[tuple[str, Any], ...] = (("output_router_logits", True), ("router_aux_loss_coef", 0.7))


def _with_options(family: str, truth: Truth, whole: dict[str, Any]) -> None:
    sp = sharding(ring=2)
    model = longspan.parallelize(build(family), sp, memory="longest")
    compare(truth, model.train(), whole, sp)
    found = longspan.token_logprobs(model, whole, gather=True).detach()[:, :-1]
    labels = whole["labels"][:, 1:]
    single, exact = (
        run.logits[:, :-1].log_softmax(-1).gather(2, labels.clamp_min(0)[..., None])[..., 0][labels != -100]
        for run in (truth.single, truth.exact)
    )
    assert excess(found[labels != -100], single, exact) <= 1


WITH_OPTIONS = ("Qwen3Next", "Jamba")


@pytest.mark.parametrize("family", [*WITH_OPTIONS, *confirming(f for f in HYBRIDS if f not in WITH_OPTIONS)])
def test_memory_options_and_log_probabilities(pool2: RankPool, family: str) -> None:
    pool2.run(_with_options, family, truth_about(family), inputs_of(family))


OPTIONS = (
    longspan.Memory(checkpointing="selective", tiled=True),
    longspan.Memory(checkpointing="full", offload="host", tiled=True),
    longspan.Memory(checkpointing="grouped", head_slices=0),
)


def _with_each(family: str, truth: Truth) -> None:
    offload_on_cpus()
    for number, memory in enumerate(OPTIONS):
        sp = sharding(ring=1 + number % 2)
        model = longspan.parallelize(build(family), sp, memory=memory)
        compare(truth, model.train(), inputs_of(family), sp)


@pytest.mark.parametrize("family", ["NemotronH", *confirming(f for f in HYBRIDS if f != "NemotronH")])
def test_each_memory_option(pool2: RankPool, family: str) -> None:
    pool2.run(_with_each, family, truth_about(family))


def _with_router_loss(family: str, truth: Truth) -> None:
    sp = sharding()
    compare(truth, longspan.parallelize(build(family, **dict(AUX)), sp), inputs_of(family), sp)


@pytest.mark.parametrize("family", ["Qwen3Next", *confirming(["Jamba", "GraniteMoeHybrid"])])
def test_router_loss(pool2: RankPool, family: str) -> None:
    pool2.run(_with_router_loss, family, truth_about(family, AUX))


def _adapted(family: str) -> Any:
    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=2, target_modules=["in_proj", "out_proj", "q_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(build(family), config)


def _with_lora(truth: Truth) -> None:
    sp = sharding()
    model = longspan.parallelize(_adapted("Bamba"), sp)
    out = model(**inputs_of("Bamba"))
    out.loss.backward()
    check_loss(float(out.loss.detach()), truth)
    check_gradients(gradients(model), truth)


def test_lora(pool2: RankPool) -> None:
    pool2.run(_with_lora, truth_of(_adapted("Bamba"), inputs_of("Bamba")))


def _checkpointed_by_transformers(families: list[str], truths: list[Truth]) -> None:
    for family, truth in zip(families, truths, strict=True):
        sp = sharding()
        model = longspan.parallelize(build(family), sp)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        compare(truth, model.train(), inputs_of(family), sp)


def test_checkpointing_of_transformers(pool2: RankPool) -> None:
    """Mamba's layers get no keyword arguments from the model, Jamba's do not pass them on."""
    families = ["Mamba", "Jamba"]
    pool2.run(_checkpointed_by_transformers, families, [truth_about(family) for family in families])


# ---------------------------------------------------------------------------------------------------------------------
# What is refused.


def _refusals() -> None:
    sp = longspan.SequenceSharding(longspan.init_mesh(tensor=2))
    with pytest.raises(longspan.LongspanError, match=r"recurrent layer is sharded by tokens only.*use `ulysses=2`"):
        longspan.parallelize(build("Bamba"), sp)
    longspan.parallelize(build("FalconH1"), sharding(), memory="auto")
    model = longspan.parallelize(build("Bamba"), sharding())
    whole = inputs_of("Bamba")
    mask = torch.ones_like(whole["input_ids"])
    mask[0, 4] = 0
    with pytest.raises(longspan.LongspanError, match="has zeros between the ones of a row"):
        model(**whole, attention_mask=mask)
    for gone in ("RecurrentGemma", "Rwkv"):
        with pytest.raises(longspan.LongspanError, match="mixes tokens without going through attention"):
            longspan.parallelize(build(gone, **NO_ATTENTION, context_length=64), sharding())


def test_refusals(pool2: RankPool) -> None:
    pool2.run(_refusals)


def _with_nan(family: str) -> tuple[str, str]:
    """Return the error, and what `find_nonfinite` finds, of a hidden state with NaN on rank 1."""
    model = longspan.parallelize(build(family), sharding())
    if dist.get_rank() == 1:
        layer = model.model.layers[0]
        layer.register_forward_pre_hook(lambda _, args: (args[0].index_fill(1, torch.tensor([2]), torch.nan),))
    with pytest.raises(longspan.LongspanError) as error:
        model(**inputs_of(family))
    return str(error.value), str(longspan.find_nonfinite(model, inputs_of(family)))


def test_nan_in_a_state_names_layer_and_rank(pool2: RankPool) -> None:
    (error, first), other = pool2.run(_with_nan, "Bamba")
    assert other == (error, first)
    assert error.startswith("layer model.layers.0.mamba: rank 1 cannot pass its state: its state is not finite")
    assert first.startswith("what goes into model.layers.0 on rank 1 (128 of ")
