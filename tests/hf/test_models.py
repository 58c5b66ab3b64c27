"""Every family of models on every mesh: loss, logits and every gradient equal those of one process."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import masking_utils as masks

import longspan
from longspan.core import tile_sizes
from longspan.hf.forward.attention import MaskRequest, longspan_mask
from tests.choose import confirming, each_value
from tests.models import (
    FAMILIES,
    MASKED,
    ON_4_RANKS,
    Truth,
    alone,
    batch,
    build,
    check_loss,
    compare,
    inputs_of,
    packed,
    padded,
    sharding,
    truth_about,
    truth_of,
    with_holes,
)
from tests.pool import RankPool, on_ranks

pytestmark = pytest.mark.versions


def _run(
    family: str, changes: dict[str, Any], meshes: list[tuple[int, int, bool]], whole: dict[str, Any], truth: Truth
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of ranks without heads
        for data, ring, fsdp in meshes:
            sp = sharding(data, ring)
            compare(truth, longspan.parallelize(build(family, **changes), sp, fsdp=fsdp), whole, sp)


def _packed_from_2(family: str) -> dict[str, Any]:
    whole = packed(family)
    return {**whole, "position_ids": whole["position_ids"] + 2}


def _without_positions(family: str) -> dict[str, Any]:
    whole = padded(family, "right" if family in MASKED else "left")
    whole["input_ids"][0, 20] = 0  # Roberta computes positions from the ids, whatever the mask says
    del whole["position_ids"]
    return whole


AUX: dict[str, Any] = {"output_router_logits": True, "router_aux_loss_coef": 0.7}
EXPERTS = ["Qwen3Moe", "Mixtral", "GptOss"]
NO_FSDP, RINGS, BOTH = [(1, 1, False)], [(1, 1, True), (1, 2, True)], [(1, 2, True)]


def _case(
    name: str,
    family: str,
    meshes: list[tuple[int, int, bool]],
    inputs: Any = inputs_of,
    *args: Any,
    ranks: int = 4,
    **changes: Any,
) -> Any:
    """Parameters of `test_one_process`: ranks and meshes of them, a family and changes to its config, its inputs."""
    return pytest.param(ranks, family, meshes, inputs, args, changes, id=f"{name}, {family}")


def _rope(kind: str, positions: int, **parameters: Any) -> Any:
    rope = {"rope_type": kind, "rope_theta": 10000.0, **parameters}
    return _case(f"rope {kind}", "Llama", [(1, 1, True)], max_position_embeddings=positions, rope_parameters=rope)


CASES = [
    _case("data parallelism alone", "Llama", [(4, 1, True), (4, 1, False)]),
    # FSDP sums the gradients of all ranks: a rank without a gradient would run other collectives than the others.
    _case("sinks, ranks without heads", "GptOss", [(1, 1, True), *NO_FSDP], num_attention_heads=2,
          num_key_value_heads=2, hidden_size=16),
    _case("uneven heads", "Llama", [(1, 1, True)], num_attention_heads=6, hidden_size=48),
    _case("ranks without heads", "Llama", NO_FSDP, num_attention_heads=2, num_key_value_heads=1, hidden_size=16),
    # 21 tokens over 4 ranks: only the last rank has positions beyond the original 12 or 16.
    _rope("dynamic", 16, factor=2.0),
    _rope("longrope", 96, short_factor=[1.0] * 4, long_factor=[4.0] * 4, factor=8.0,
          original_max_position_embeddings=12),
    *confirming([_rope("yarn", 128, factor=4.0, original_max_position_embeddings=32), _rope("linear", 64, factor=2.0)]),
    # Layers without an index; a mask with a window of 0 that no layer uses; layers with heads of several sizes.
    *(_case("unusual configs", f, [(1, 1 + (f < "E"), f != "Albert")], ranks=2)
      for f in ("Albert", "DistilBert", "Qwen2Moe", "Gemma4Text")),
    # Gemma-3's windows then extend to both sides, with a size that follows from the config's.
    _case("bidirectional decoder", "Gemma3Text", BOTH, ranks=2, use_bidirectional_attention=True, sliding_window=12),
    _case("padding left", "Llama", BOTH, padded, "left"),
    _case("padding left", "Bert", BOTH, padded, "left", ranks=2),
    *(_case("padding right", f, RINGS[:1], padded, "right", ranks=2) for f in ("GptOss", "ModernBert")),
    *confirming([_case("padding left", "Llama4Text", [(1, 2, True)], padded, "left")]),
    *confirming([_case("padding right", "Mistral", [(2, 1, True)], padded, "right")]),
    _case("packed", "Llama", [(1, 1, True), (1, 4, True)], packed),
    *confirming(_case("packed", f, [(1, 4, True)], packed) for f in ("Gemma2", "GPT2", "Mistral")),
    _case("packed", "Llama4Text", RINGS, packed),
    _case("chunks follow positions", "Llama4Text", RINGS[:1], _packed_from_2),
    *(_case("own positions", f, BOTH, _without_positions, ranks=2) for f in ("Roberta", "OPT")),
    *confirming(_case("own positions", f, BOTH, _without_positions) for f in ("Esm", "BioGpt")),
    _case("holes", "Llama4Text", BOTH, with_holes),
    _case("holes", "Bert", BOTH, with_holes, ranks=2),
    _case("untied head", "Bert", RINGS[:1], ranks=2, tie_word_embeddings=False),
    _case("holes", "Qwen3Moe", BOTH, with_holes, ranks=2, **AUX),
    _case("router loss", "Qwen3Moe", [(2, 1, True), (1, 4, True)], **AUX),
    _case("router loss", "GptOss", [(2, 2, True), *NO_FSDP], **AUX),
    *confirming([_case("router loss", "Mixtral", [(2, 2, True), *NO_FSDP], **AUX)]),
    *confirming([_case("router loss", "Qwen3Moe", [(1, 1, True), (1, 2, True), (2, 2, True), (2, 1, False)], **AUX)]),
    *confirming(_case(f"router loss, padding {side}", "Qwen3Moe", [(data, 1, True)], padded, side, **AUX)
                for side, data in (("left", 1), ("right", 2))),
    _case("router loss, packed", "Mixtral", NO_FSDP, packed, ranks=2, **AUX),
    # One process computes logits of the labelled tokens alone: the same loss.
    _case("sparse prediction", "ModernBert", RINGS[:1], ranks=2, sparse_prediction=True),
]  # fmt: skip


@pytest.mark.parametrize(("ranks", "family", "meshes", "inputs", "args", "changes"), CASES)
def test_one_process(
    get_pool: Callable[[int], RankPool],
    ranks: int,
    family: str,
    meshes: list[Any],
    inputs: Any,
    args: tuple[Any, ...],
    changes: dict[str, Any],
) -> None:
    plain = {} if "sparse_prediction" in changes else changes
    truth = truth_of(build(family, **plain), inputs(family, *args))
    if "output_router_logits" in changes and inputs is inputs_of:
        assert truth.exact.aux_loss is not None and abs(truth.exact.loss - truth_about(family).exact.loss) > 0.1
    get_pool(ranks).run(_run, family, changes, meshes, inputs(family, *args), truth)


# What these have beside Llama's layers, one axis shows; the others' masks and scores differ by head or layer.
ON_2_RANKS = ("Qwen2", "Qwen3", "Mistral", "Mixtral", "Phi3", "Olmo2", "Olmo3", "GPTNeoX", "GPT2", "Bert")


@pytest.mark.parametrize(
    ("family", "everywhere"),
    [*((f, f == "Llama") for f in FAMILIES), *confirming((f, True) for f in FAMILIES if f != "Llama")],
)
def test_every_family(get_pool: Callable[[int], RankPool], family: str, everywhere: bool) -> None:
    """Llama on all meshes of 4 ranks, others on a ring of two with two Ulysses ranks, some on one of these alone."""
    number, ranks = list(FAMILIES).index(family), 4
    meshes = ON_4_RANKS if everywhere else [(1, 2, number % 2 == 0)]
    if family in ON_2_RANKS and not everywhere:
        ranks, meshes = 2, [(1, 1 + number % 2, number % 4 < 2)]
    get_pool(ranks).run(_run, family, {}, meshes, inputs_of(family), truth_about(family))


# Uneven heads matter to sinks, biases of heads, chunks, softcap, norms over heads and MHA. The other families run on 8
# ranks in `benchmarks/models_verified.py`.
ON_8_RANKS = ("GptOss", *confirming(("Llama4Text", "Qwen3Moe", "Llama", "Gemma2", "Olmo2", "GPTNeoX", "Bert")))


@pytest.mark.parametrize("family", ON_8_RANKS)
def test_families_on_8_ranks_with_uneven_heads_and_fewer_kv_heads(pool8: RankPool, family: str) -> None:
    heads: dict[str, Any] = {"num_attention_heads": 12, "hidden_size": 96}
    if FAMILIES[family].get("num_key_value_heads", 4) is not None:
        heads["num_key_value_heads"] = 4
    truth = truth_about(family, tuple(heads.items()))
    pool8.run(_run, family, heads, [(1, 1, True)], inputs_of(family), truth, timeout=120)


def test_rotary_tables_of_sliding_layers_alone() -> None:
    reference, model = (build("Gemma3Text", layer_types=["sliding_attention"] * 2) for _ in range(2))
    model.config.rope_parameters = {"sliding_attention": model.config.rope_parameters["sliding_attention"]}
    longspan.parallelize(model, longspan.SequenceSharding(longspan.init_mesh()))
    torch.testing.assert_close(model(**batch()).loss, reference(**batch()).loss)


def _divides(family: str) -> Any:
    """A model that divides by its hidden states and by the output of its attention, without an epsilon."""
    model = build(family)
    with torch.no_grad():
        model.get_input_embeddings().weight[0] = 0  # the padding token's
    if family == "Llama":
        for layer in model.model.layers:
            layer.register_forward_pre_hook(lambda _, args: (args[0] / args[0].norm(dim=-1, keepdim=True), *args[1:]))
            layer.self_attn.o_proj.register_forward_pre_hook(lambda _, args: args[0] / args[0].norm(dim=-1)[..., None])
    return model


def _run_divides(cases: list[tuple[str, dict[str, Any], Truth]]) -> None:
    sp = sharding(ring=2)
    for family, whole, truth in cases:
        compare(truth, longspan.parallelize(_divides(family), sp, fsdp=False), whole, sp)


def test_padding_causes_no_nan(pool4: RankPool) -> None:
    """21 tokens do not divide. If a hidden state is 0, its square root has no derivative, and 0 x inf is NaN."""
    cases = []
    for family in ("Gemma3nText", "Llama"):
        whole = {name: x[:2] for name, x in inputs_of(family).items()}
        some = {name: x[1:] for name, x in padded(family, "right").items()}
        if family == "Llama":  # one process divides 0 by 0 at padding with id 0
            some["input_ids"] = some["input_ids"].clamp(min=2)
        for one in (whole, some):
            cases.append((family, one, truth_of(_divides(family), one)))
    pool4.run(_run_divides, cases)


# ---------------------------------------------------------------------------------------------------------------------
# Each document equals a run of its own.


@pytest.mark.parametrize(
    ("how", "family"),
    each_value(["document_ids", "cu_seq_lens", "seq_idx"], ["GptOss", "Llama4Text", "ModernBert"]),
)
def test_marked_documents_equal_separate_runs(pool4: RankPool, family: str, how: str) -> None:
    sizes = (5, 9, 7)
    # Llama-4's temperature counts tokens through the whole row, in transformers too.
    changes = {"attn_temperature_tuning": False} if family == "Llama4Text" else {}
    whole = {name: x[3:] for name, x in inputs_of(family).items()}
    begins = torch.tensor([0, 5, 14])
    whole["labels"] = whole["labels"].index_fill(1, begins, -100)  # as packing collators do
    truth = alone(family, changes, whole, sizes)
    whole["position_ids"] = torch.cat([torch.arange(size) for size in sizes])[None]
    ids = torch.arange(3).repeat_interleave(torch.tensor(sizes))[None]
    borders = torch.tensor([0, 5, 14, 21], dtype=torch.int32)
    marks: dict[str, dict[str, Any]] = {
        "document_ids": {"document_ids": ids + 7},
        "seq_idx": {"seq_idx": ids.int()},
        "cu_seq_lens": {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders, "max_length_q": 9, "max_length_k": 9},
    }
    pool4.run(_run, family, changes, [(1, 1, True)], {**whole, **marks[how]}, truth)


# ---------------------------------------------------------------------------------------------------------------------
# The auxiliary loss of a mixture of experts.


def _router_loss_by_tiles(families: list[str], truths: list[Truth]) -> None:
    tile_sizes.FEWEST_ROWS = 2, 2
    memories = ["longest", longspan.Memory(tiled=True), longspan.Memory(tiled=True, checkpointing="selective")]
    for family, truth in zip(families, truths, strict=True):
        for memory in memories if family == "Mixtral" else memories[:1]:
            sp = sharding()
            model = longspan.parallelize(build(family, **AUX), sp, fsdp=family == "Mixtral", memory=memory)
            compare(truth, model.train(), batch(), sp)


def test_router_loss_by_tiles(pool2: RankPool) -> None:
    pool2.run(_router_loss_by_tiles, EXPERTS, [truth_about(family, tuple(AUX.items())) for family in EXPERTS])


def _router_loss_checkpointed(truth: Truth) -> None:
    sp = sharding(data=2)
    model = longspan.parallelize(build("Qwen3Moe", **AUX), sp)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    compare(truth, model.train(), batch(), sp)
    model.zero_grad()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(longspan.LongspanError, match="reentrant gradient checkpointing loses it"):
        model(**{name: x[:2] for name, x in batch().items()})


def test_router_loss_with_checkpointed_layers(pool4: RankPool) -> None:
    pool4.run(_router_loss_checkpointed, truth_about("Qwen3Moe", tuple(AUX.items())))


@on_ranks(2)
def test_router_loss_of_one_call() -> None:
    sp = sharding()
    whole = batch()
    model = longspan.parallelize(build("Mixtral", router_aux_loss_coef=0.7), sp, fsdp=False)
    asked = model(**whole, output_router_logits=True)
    reference = build("Mixtral", router_aux_loss_coef=0.7)
    truth = truth_of(reference, {**whole, "output_router_logits": True})
    check_loss(float(asked.loss.detach()), truth)
    check_loss(float(asked.aux_loss.detach()), truth, "aux_loss")
    assert model(**whole).aux_loss is None
    with torch.no_grad():
        judged = model.eval()(whole["input_ids"], output_router_logits=True)
        plain = model(**whole, output_router_logits=True, return_dict=False)
        expected = reference(**whole, output_router_logits=True, return_dict=False)
    assert judged.loss is None
    check_loss(float(judged.aux_loss), truth, "aux_loss")
    assert isinstance(plain, tuple) and len(plain) == len(expected) - 1  # no KV cache
    check_loss(float(plain[0]), truth)
    check_loss(float(plain[1]), truth, "aux_loss")
    divided = model(**whole, output_router_logits=True, num_items_in_batch=100)
    check_loss(
        float(divided.loss.detach()),
        truth_of(reference, {**whole, "output_router_logits": True, "num_items_in_batch": 100}),
    )


# ---------------------------------------------------------------------------------------------------------------------
# Masked language models.


@on_ranks(2)
def test_masked_lm() -> None:
    sp = sharding()
    whole = batch()
    model, reference = longspan.parallelize(build("Bert"), sp), build("Bert")
    truth = truth_of(reference, whole)
    plain = model(**whole, return_dict=False)
    assert isinstance(plain, tuple) and len(plain) == 1  # no logits in training
    untied = longspan.parallelize(build("Bert", tie_word_embeddings=False), sp)
    assert len(untied(**whole, return_dict=False)) == 1
    check_loss(float(plain[0].detach()), truth)
    with pytest.raises(longspan.LongspanError, match="`shift_labels` are labels of a causal LM"):
        model(input_ids=whole["input_ids"], shift_labels=whole["labels"])
    items = model(**whole, num_items_in_batch=torch.tensor(100))
    count = int((whole["labels"] != -100).sum())
    check_loss(float(items.loss.detach()) * 100 / count, truth)
    assert model(input_ids=whole["input_ids"]).loss is None


# ---------------------------------------------------------------------------------------------------------------------
# Masks, read from the mask functions of models.


def _mask(name: str, *args: Any) -> Any:
    return getattr(masks, name)(*args)


@pytest.mark.parametrize("size", [1, 2, 8, 100])
def test_masks_are_recognized(size: int) -> None:
    padding = torch.zeros(3, dtype=torch.int64)
    window = longspan_mask(mask_function=_mask("sliding_window_causal_mask_function", size), local_size=size)
    assert window == MaskRequest(causal=True, window=size)
    both = longspan_mask(mask_function=_mask("sliding_window_bidirectional_mask_function", size), local_size=size)
    assert both == MaskRequest(causal=False, window=size + 1)  # transformers: |i - j| <= size
    chunks = longspan_mask(mask_function=_mask("chunked_causal_mask_function", size, padding), local_size=size)
    assert chunks == (MaskRequest(causal=True, chunk_size=size) if size > 1 else MaskRequest(causal=True, window=1))


def test_other_masks_raise() -> None:
    assert longspan_mask() == MaskRequest(causal=True)
    assert longspan_mask(mask_function=masks.bidirectional_mask_function) == MaskRequest(causal=False)
    everything = masks.or_masks(masks.causal_mask_function, lambda *_: torch.tensor(True))  # Gemma-3's bidirectional
    assert longspan_mask(mask_function=everything) == MaskRequest(causal=False)
    ids = torch.zeros(1, 9, dtype=torch.int64)  # a mask that depends on the tokens, even if it equals the causal one
    packed = masks.and_masks(masks.causal_mask_function, masks.packed_sequence_mask_function(ids))
    with pytest.raises(
        longspan.LongspanError, match=r"and_masks\(causal_mask_function, packed_sequence_mask_function\)"
    ):
        longspan_mask(mask_function=packed)
    prefix = masks.or_masks(masks.causal_mask_function, lambda b, h, i, j: j < 3)
    with pytest.raises(
        longspan.LongspanError,
        match=r"or_masks\(causal_mask_function, .*\) \(local size None\), which is not supported",
    ):
        longspan_mask(mask_function=prefix)
    with pytest.raises(longspan.LongspanError, match=r"sliding_window_overlay\) \(local size 4\)"):
        longspan_mask(mask_function=masks.and_masks(masks.sliding_window_overlay(5)), local_size=4)


def test_a_mask_request_is_no_tensor() -> None:
    mask = longspan_mask()
    with pytest.raises(longspan.LongspanError, match="a layer uses .dtype of its attention mask, so it derives"):
        _ = mask.dtype
    with pytest.raises(longspan.LongspanError, match="a layer slices its attention mask"):
        _ = mask[:, :3]
    assert not hasattr(mask, "shape") and copy.deepcopy(mask) == mask == pickle.loads(pickle.dumps(mask))
