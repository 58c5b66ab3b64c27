"""A parallelized Hugging Face model against the same model in one process: loss, logits and every gradient."""

from __future__ import annotations

import contextlib
import copy
import functools
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

import longspan
from longspan.comm.mesh import MeshGroups
from longspan.core.errors import LongspanError
from tests.choose import confirming, each_value, grouped
from tests.counting import count_sent
from tests.models import (
    NO_ATTENTION,
    Truth,
    batch,
    build,
    check_gradients,
    check_loss,
    compare,
    gradients,
    rows_of,
    run_of,
    sharding,
    truth_by,
    truth_of,
    widened,
)
from tests.pool import RankPool, on_ranks
from tests.said import says
from tests.tolerance import excess_of_rows, roughly

pytestmark = pytest.mark.versions

ONE_DEVICE = longspan.SequenceSharding(MeshGroups("cpu"))


def _compare(reference: Any, model: Any, whole: dict[str, Any], sp: longspan.SequenceSharding) -> None:
    """Both models on one global batch: equal loss, logits and gradients."""
    compare(truth_of(reference, whole), model, whole, sp)


BATCHES = [batch(seed=s) for s in (1, 2, 3)]
ITEMS = sum(int((b["labels"][:, 1:] != -100).sum()) for b in BATCHES)


def _accumulated(fsdp: bool, once: bool, truths: list[Truth]) -> None:
    sp = sharding(data=2)
    model = longspan.parallelize(build("Llama"), sp, fsdp=fsdp)
    batches, items = BATCHES, ITEMS
    total, sums = 0.0, []
    for whole in batches:
        with longspan.no_sync(model) if once and whole is not batches[-1] else contextlib.nullcontext():
            out = model(**rows_of(whole, sp.data_rank, 2), num_items_in_batch=torch.tensor(items))
            with count_sent() as sent:
                out.loss.backward()
        sums.append(sum(one.op == ("reduce_scatter" if fsdp else "all_reduce") for one in sent))
        total += float(out.loss.detach())
    assert total > 0
    check_gradients(gradients(model), truths[0])
    groups = len(_groups(model)) if fsdp else 2  # or which parameters have gradients, and one bucket of them
    assert sums == ([0, 0, groups] if once else [groups] * 3)
    assert groups == (4 if fsdp else 2)
    # Summed gradients do not change; only the next step's are added.
    before = gradients(model)
    with longspan.no_sync(model):
        model(**rows_of(batches[0], sp.data_rank, 2)).loss.backward()
    if not fsdp:
        assert all(torch.equal(grad, before[name]) for name, grad in gradients(model).items())
    model(**rows_of(batches[1], sp.data_rank, 2)).loss.backward()
    check_gradients(gradients(model), truths[1])


@pytest.mark.parametrize(("fsdp", "once"), [(True, False), (False, True), *confirming([(True, True)])])
def test_gradient_accumulation(pool4: RankPool, fsdp: bool, once: bool) -> None:
    steps = [{**b, "num_items_in_batch": ITEMS} for b in BATCHES]
    # The gradients of the last run: those of all batches so far.
    truths = [
        truth_by(build("Llama"), lambda m, run=run: [run_of(m, b) for b in run][-1])
        for run in (steps, steps + BATCHES[:2])
    ]
    pool4.run(_accumulated, fsdp, once, truths)


def test_no_sync_requires_a_parallelized_model() -> None:
    model = build("Llama")
    with pytest.raises(LongspanError, match="LlamaForCausalLM is not parallelized"), longspan.no_sync(model):
        pass
    longspan.parallelize(model, ONE_DEVICE)
    with longspan.no_sync(model):  # alone there is nothing to sum
        model(**batch()).loss.backward()
    assert model.lm_head.weight.grad is not None


@pytest.mark.parametrize(
    ("reentrant", "fsdp", "family"),
    each_value(grouped([(False, True), (False, False), (True, False)]), ["Qwen3", "Llama4Text", "Bert"]),
)
@on_ranks(2)
def test_gradient_checkpointing(family: str, reentrant: bool, fsdp: bool) -> None:
    sp = sharding()
    model = longspan.parallelize(build(family), sp, fsdp=fsdp)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.train()
    whole, other = batch(), batch(seed=5, n=17)
    # Two forwards before the first backward: a recomputed layer needs the facts of its own batch.
    first, second = model(**whole), model(**other)
    (first.loss + second.loss).backward()
    truth = truth_by(build(family), lambda m: [run_of(m, b) for b in (whole, other)][-1])
    check_gradients(gradients(model), truth)


@on_ranks(2)
def test_models_in_one_process_are_independent() -> None:
    sp = sharding()
    base = build("Llama")
    config = base.config
    teacher = transformers.LlamaForCausalLM(config).float().eval()  # shares the config object with the student
    assert teacher.config is base.config
    whole = batch()
    before = teacher(**whole).logits.detach()
    student = longspan.parallelize(base, sp)
    student(**whole).loss.backward()
    assert torch.equal(teacher(**whole).logits, before)  # the whole sequence, unsharded, to the bit
    assert teacher.config._attn_implementation == "sdpa" and student.config._attn_implementation == "longspan"
    other = longspan.parallelize(build("Qwen3", seed=3), sp, fsdp=False)
    _compare(build("Qwen3", seed=3), other, whole, sp)
    student.zero_grad()
    _compare(build("Llama"), student, whole, sp)


def _evaluate(truth: Truth) -> None:
    sp = sharding()
    model = longspan.parallelize(build("Llama"), sp).eval()
    whole = batch()
    with torch.no_grad():
        out = model(input_ids=whole["input_ids"])
        positional = model(whole["input_ids"])
        scored = model(**whole)
    assert out.loss is None and out.past_key_values is None
    assert torch.equal(positional.logits, out.logits) and torch.equal(scored.logits, out.logits)
    check_loss(float(scored.loss), truth)
    with torch.inference_mode():
        assert torch.equal(model(**whole).loss, scored.loss)
    embedded = model(inputs_embeds=build("Llama").get_input_embeddings()(whole["input_ids"]))
    for found in (out, embedded):
        logits = sp.gather(found.logits.detach(), length=21)
        assert excess_of_rows(logits, truth.single.logits, truth.exact.logits) <= 1


def test_evaluation_and_embeddings(pool4: RankPool) -> None:
    pool4.run(_evaluate, truth_of(build("Llama").eval(), batch()))


@on_ranks(2)
def test_bf16_and_autocast() -> None:
    sp = sharding()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = longspan.parallelize(build("Llama"), sp, mp_policy=policy)
    whole = batch()
    out = model(**whole)
    out.loss.backward()
    reference = build("Llama")
    truth = Truth(run_of(reference.bfloat16(), whole), run_of(widened(build("Llama")), whole))
    assert out.loss.dtype == torch.float32
    assert {grad.dtype for grad in gradients(model).values()} == {torch.float32}
    check_gradients(gradients(model), truth)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = longspan.parallelize(build("Llama"), sp, fsdp=False)(**whole)
    assert abs(float(cast.loss.detach()) / float(out.loss.detach()) - 1) < roughly(torch.bfloat16)


# ---------------------------------------------------------------------------------------------------------------------
# Errors.


def _refusals(cases: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]]) -> list[str]:
    messages = []
    for family, changes, call, options in cases:
        with pytest.raises(LongspanError) as error:
            sp = longspan.SequenceSharding(longspan.init_mesh(ulysses=dist.get_world_size()))
            model = longspan.parallelize(build(family, **changes), sp, **options)
            model(**{**batch(), **call})
        messages.append(str(error.value))
    return messages


FALCON: dict[str, Any] = {"num_key_value_heads": None, "intermediate_size": None}
BERT = {"num_key_value_heads": None, "hidden_dropout_prob": 0.0}
ROUTER = {"output_router_logits": True}

# Family, changes to its config, to the batch, options of parallelize, and the error.
REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any], str]] = [
    # Of a model.
    ("Gemma2", {}, {}, {"kernel": "sdpa"}, "layer model.layers.0.self_attn: kernel='sdpa' cannot do softcap"),
    ("GptOss", {}, {}, {"kernel": "sdpa"}, "layer model.layers.0.self_attn: kernel='sdpa' cannot do sinks"),
    ("xLSTM", {**NO_ATTENTION, "num_heads": 2}, {}, {},
     "layer backbone.blocks.0 (xLSTMBlock) of xLSTMForCausalLM mixes tokens without going through attention"),
    ("MobileBert", {**BERT, "embedding_size": 16}, {}, {},
     "embeddings of MobileBertForMaskedLM ... neighbours (trigram_input=True)"),
    ("Bloom", {}, {}, {}, "every attention layer of BloomForCausalLM adds ALiBi biases to its scores"),
    ("Mpt", {"num_key_value_heads": None}, {}, {}, "every attention layer of MptForCausalLM adds ALiBi biases"),
    ("Falcon", FALCON, {}, {}, "layer transformer.h.0.self_attention of FalconForCausalLM does not go through"),
    ("Bert", {**BERT, "is_decoder": True, "add_cross_attention": True}, {}, {},
     "bert.encoder.layer.0.crossattention (BertAttention) of BertForMaskedLM ... another sequence"),
    ("GPT2", {"add_cross_attention": True}, {}, {},
     "transformer.h.0.crossattention (GPT2Attention) of GPT2LMHeadModel ... another sequence"),
    ("RoFormer", BERT, {}, {}, "makes positions of its own from tokens or mask"),
    ("Esm", {**BERT, "token_dropout": True}, {}, {}, "set token_dropout=False"),
    ("Llama4Text", ROUTER, {}, {}, "output_router_logits=True asks Llama4ForCausalLM for an auxiliary loss over all"),
    ("Llama", {"output_attentions": True, "attn_implementation": "eager"}, {}, {}, "has output_attentions=True"),
    ("Llama", {}, {}, {"kernel": "flash"}, "kernel='flash' is for NVIDIA"),
    ("Llama", {}, {}, {"fsdp": False, "mp_policy": MixedPrecisionPolicy()}, "mp_policy is FSDP's"),
    # Of a call.
    ("Llama", {"attention_dropout": 0.1}, {}, {},
     "model.layers.0.self_attn has attention dropout 0.1 ... attention_dropout=0.0 in the config"),
    ("GPT2", {"attn_pdrop": 0.1}, {}, {},
     "transformer.h.0.attn has attention dropout 0.1 ... attn_pdrop=0.0 in the config ... or call model.eval()"),
    ("OPT", {"layerdrop": 0.1}, {}, {}, "model.decoder (OPTDecoder) has layerdrop 0.1 ... set layerdrop=0.0 in the"),
    ("Bert", {"attention_probs_dropout_prob": 0.1}, {}, {}, "set attention_probs_dropout_prob=0.0 in the config"),
    ("Llama", {"max_position_embeddings": 16}, {}, {}, "positions up to 20, the model's range is 16"),
    ("GPT2", {"max_position_embeddings": 16}, {}, {}, "positions up to 20, the model's range is 16"),
    ("Llama", {}, {"labels": torch.full((4, 21), 61)}, {}, "`labels` holds 61, the vocabulary has 61 ids: 0 to 60, or"),
    ("Llama", {}, {"labels": torch.full((4, 21), -1)}, {}, "`labels` holds -1"),
    ("Llama", {}, {"input_ids": torch.full((4, 21), 99)}, {}, "`input_ids` holds 99, the vocabulary has 61 ids"),
    ("Bert", {}, {"token_type_ids": torch.full((4, 21), 2)}, {}, "`token_type_ids` holds 2 to 2, the model has 2"),
    ("GPT2", {}, {"position_ids": torch.arange(-1, 20)}, {}, "`position_ids` holds -1, the model's learnt positions"),
    ("Llama", {}, {"use_cache": True}, {}, "ShardedCache(model)"),
    ("Llama", {}, {"output_attentions": True}, {}, "output_attentions=True is not supported"),
    ("Llama", {}, ROUTER, {}, "output_router_logits=True asks LlamaForCausalLM for an auxiliary loss over all tokens"),
    ("Llama", {}, {"logits_to_keep": 1}, {}, "logits_to_keep with labels"),
    ("Llama", {}, {"cache_position": torch.arange(1, 22)}, {}, "must be torch.arange(0, 21)"),
    ("GPT2", {}, {"encoder_hidden_states": torch.zeros(4, 9, 32)}, {}, "ask GPT2LMHeadModel for cross attention"),
    ("Llama", {}, {"cu_seqlens": 3.0}, {}, "layer model.layers.0.self_attn passes cu_seqlens to its attention, not"),
]  # fmt: skip


def test_errors_name_the_layer_or_the_argument(pool2: RankPool) -> None:
    messages, others = pool2.run(_refusals, [case[:4] for case in REFUSED], timeout=120)
    assert messages == others
    for (*case, text), message in zip(REFUSED, messages, strict=True):
        assert says(message, text), (case, message)


@on_ranks(2)
def test_dropout_0_switches_every_dropout_off() -> None:
    plain = build("GPT2", attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0).train()
    expected = plain(**batch(), use_cache=False).loss
    expected.backward()
    model = build("GPT2", attn_pdrop=0.1, resid_pdrop=0.2, embd_pdrop=0.3)
    longspan.parallelize(model, sharding(), fsdp=False, dropout=0.0)
    loss = model.train()(**batch()).loss
    loss.backward()
    left = [module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)]
    left += [model.config.attn_pdrop, model.config.resid_pdrop, model.config.embd_pdrop]
    assert len(left) > 5 and not any(left)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for name, p in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, p.grad, rtol=1e-4, atol=1e-6)
    with pytest.raises(LongspanError, match=r"dropout=0.1: it takes 0.0 alone"):
        longspan.parallelize(plain, sharding(), dropout=0.1)


@on_ranks(2)
def test_a_forward_that_raises_leaves_the_generator_as_it_was() -> None:
    model = longspan.parallelize(build("Llama").train(), sharding(), fsdp=False)
    before = torch.get_rng_state()

    def fail(*_: Any) -> None:
        raise RuntimeError("in a layer")

    handle = model.model.layers[0].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="in a layer"):
        model(**batch())
    assert torch.equal(torch.get_rng_state(), before)
    handle.remove()
    model(**batch())
    assert torch.equal(torch.get_rng_state(), before)


def test_unsupported_models_raise() -> None:
    t5 = transformers.T5Config(d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2, vocab_size=11)
    whisper = transformers.WhisperConfig(
        d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=16, decoder_ffn_dim=16, vocab_size=11, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1,
    )  # fmt: skip
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = transformers.BlipConfig(
        text_config={**small, "vocab_size": 11, "encoder_hidden_size": 16},
        vision_config={**small, "image_size": 8, "patch_size": 4},
    )
    bert = build("Bert").config
    encoder_decoder = "is an encoder-decoder: the cross attention"
    for model, text in (
        (torch.nn.Linear(2, 2), "needs a transformers model .* got Linear"),
        (transformers.T5ForConditionalGeneration(t5), f"T5ForConditionalGeneration {encoder_decoder}"),
        (transformers.WhisperForConditionalGeneration(whisper), f"WhisperForConditionalGeneration {encoder_decoder}"),
        (
            transformers.WhisperForCausalLM(copy.deepcopy(whisper)),
            r"encoder_attn \(WhisperAttention\) of .* is cross attention",
        ),
        (
            transformers.BlipForConditionalGeneration(vision),
            "is a vision-language model that cannot be sharded: layer vision_model",
        ),
        (transformers.BertModel(bert), r"layer pooler \(BertPooler\) of BertModel looks at the first token"),
        (transformers.BertForQuestionAnswering(bert), "has the loss ForQuestionAnswering; longspan.parallelize takes"),
    ):
        with pytest.raises(LongspanError, match=text):
            longspan.parallelize(model, ONE_DEVICE)
    headless = longspan.parallelize(transformers.BertModel(bert, add_pooling_layer=False), ONE_DEVICE)
    with pytest.raises(LongspanError, match="BertModel takes no labels: it has no head that predicts tokens"):
        headless(**batch())
    plain = transformers.BertModel(bert, add_pooling_layer=False)
    plain.load_state_dict(headless.state_dict())
    ids = batch()["input_ids"]
    single, exact = (m(ids).last_hidden_state.detach() for m in (plain, copy.deepcopy(plain).double()))
    assert excess_of_rows(headless(ids).last_hidden_state, single, exact) <= 1


@on_ranks(4)
def test_gradients_that_only_some_ranks_have() -> None:
    """Without FSDP: a parameter that only some ranks use is averaged; one that none uses gets no gradient."""
    from longspan.hf.weights.gradients import GradientAverage

    sp = sharding()
    a, b, c = (torch.nn.Parameter(torch.ones(3)) for _ in range(3))
    GradientAverage([a, b, c], sp)
    for _ in range(2):  # twice: accumulated gradients are not averaged again
        loss: Tensor = a.sum() + (b.sum() if dist.get_rank() == 0 else 0)
        loss.backward()
    assert a.grad is not None and torch.equal(a.grad, torch.full((3,), 2.0))
    assert b.grad is not None and torch.equal(b.grad, torch.full((3,), 2.0 / sp.size))
    assert c.grad is None
    d, e = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    summed = GradientAverage([d, e], sp)
    for waits in (True, True, False):  # a parameter that only an earlier backward of some ranks used is averaged too
        summed.deferred = waits
        (d if waits and dist.get_rank() == 0 else e).sum().backward()
    assert d.grad is not None and torch.equal(d.grad, torch.full((3,), 2.0 / sp.size))
    assert e.grad is not None and torch.equal(e.grad, torch.full((3,), 3 - 2.0 / sp.size))


@on_ranks(4)
def test_fsdp_shards_each_layer_and_prefetches_the_next() -> None:
    from torch.distributed.fsdp import FSDPModule

    sp = sharding(data=2)
    model = longspan.parallelize(build("Llama", num_hidden_layers=3), sp)
    layers, embedding, tail = list(model.model.layers), model.model.embed_tokens, [model.model.norm, model.lm_head]
    assert all(isinstance(module, FSDPModule) for module in (model, *layers, embedding, *tail))
    states = [module._get_fsdp_state() for module in (embedding, *layers, tail[0])]
    assert states[-1] is tail[1]._get_fsdp_state()  # one group
    assert [s._states_to_forward_prefetch for s in states] == [[s] for s in states[1:]] + [[]]
    assert [s._states_to_backward_prefetch for s in states] == [[], []] + [[s] for s in states[1:-1]]
    for p in model.parameters():  # a quarter of every weight: sharded over data x sequence
        assert p.device_mesh.size() == 4 and p.to_local().numel() <= -(-p.shape[0] // 4) * p[0].numel()
    model(**rows_of(batch(), sp.data_rank, 2)).loss.backward()
    local = sum(p.to_local().numel() for p in layers[0].parameters())
    assert local < sum(p.numel() for p in layers[0].parameters())  # sharded again after forward and backward


def _groups(model: Any) -> list[tuple[int, list[str]]]:
    """Return FSDP's groups, the largest first: the elements that each gathers, and the names of its parameters."""
    from torch.distributed.fsdp import FSDPModule

    names = {id(p): name for name, p in model.named_parameters()}
    states = {id(m._get_fsdp_state()): m._get_fsdp_state() for m in model.modules() if isinstance(m, FSDPModule)}
    held = [[p.sharded_param for p in state._fsdp_param_group.fsdp_params] for state in states.values()
            if state._fsdp_param_group is not None]  # fmt: skip
    return sorted(((sum(p.numel() for p in group), [names[id(p)] for p in group]) for group in held), reverse=True)


OUTER: dict[str, tuple[str, dict[str, Any], list[list[str]]]] = {
    "llama": ("Llama", {}, [["lm_head.weight", "model.norm.weight"], ["model.embed_tokens.weight"]]),
    "neox": ("GPTNeoX", {}, [["gpt_neox.embed_in.weight"],
             ["gpt_neox.final_layer_norm.bias", "gpt_neox.final_layer_norm.weight", "lm_head.weight"]]),
    "gpt2, untied": ("GPT2", {"tie_word_embeddings": False}, [["transformer.wpe.weight"], ["transformer.wte.weight"],
                     ["lm_head.weight", "transformer.ln_f.bias", "transformer.ln_f.weight"]]),
    "tied": ("Llama", {"tie_word_embeddings": True}, [["model.embed_tokens.weight", "model.norm.weight"]]),
}  # fmt: skip


def _outer_groups(family: str, changes: dict[str, Any], outer: list[list[str]], truth: Truth) -> None:
    sp = sharding(data=2)
    model = longspan.parallelize(build(family, **changes), sp)
    groups = _groups(model)
    layers = [names for _, names in groups if any(".layers." in name or ".h." in name for name in names)]
    assert len(layers) == 3
    assert sorted(sorted(names) for _, names in groups if names not in layers) == sorted(outer)
    # Only the norm is gathered with a table: the largest group is one table, not embedding and head.
    hidden, largest = 32, groups[0][0]
    assert 640 * hidden <= largest <= 640 * hidden + 2 * hidden
    model(**rows_of(batch(vocab=640), sp.data_rank, 2)).loss.backward()
    model.zero_grad()
    compare(truth, model, batch(vocab=640), sp)  # prefetching differs from the second forward on


@pytest.mark.parametrize("case", ["gpt2, untied", "tied", *confirming(["llama", "neox"])])
def test_embedding_and_head_are_separate_groups(pool4: RankPool, case: str) -> None:
    family, changes, outer = OUTER[case]
    changes = {"vocab_size": 640, "num_hidden_layers": 3, **changes}
    pool4.run(_outer_groups, family, changes, outer, truth_of(build(family, **changes), batch(vocab=640)))


ADAPTED: dict[str, dict[str, Any]] = {
    "attention": {"target_modules": ["q_proj", "v_proj"]},
    "embedding and head": {"target_modules": ["embed_tokens", "lm_head", "q_proj"]},
    "trained head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
}


def _adapted(kind: str) -> Any:
    from peft import LoraConfig, get_peft_model

    model = build("Llama")
    torch.manual_seed(7)
    return get_peft_model(model, LoraConfig(r=4, init_lora_weights=False, **ADAPTED[kind])).float()


def _compare_adapted(kind: str, truth: Truth) -> None:
    sp = sharding(data=2)
    model = longspan.parallelize(_adapted(kind), sp, fsdp=kind != "attention")
    compare(truth, model, batch(), sp)
    if kind == "attention":
        assert all("lora" in name for name in gradients(model))
        return
    embedding, head = ([names for _, names in _groups(model) if any(part in name for name in names)]
                       for part in ("embed_tokens", "lm_head"))  # fmt: skip
    assert len(embedding) == len(head) == 1 and embedding != head


@pytest.mark.parametrize("kind", ADAPTED)
def test_adapters_have_the_gradients_of_one_process(pool4: RankPool, kind: str) -> None:
    """Without FSDP; with FSDP on embedding and head, whose backward may read weights."""
    pool4.run(_compare_adapted, kind, truth_of(_adapted(kind), batch()))


@on_ranks(2)
def test_masked_lms_and_models_without_a_head() -> None:
    """A masked LM's head shares table and bias with other modules; a model without a head has no last group."""
    from longspan.hf.weights.fsdp import outer_groups

    assert outer_groups(build("Bert")) == (None, [])
    untied = build("ModernBert", tie_word_embeddings=False)
    embedding, tail = outer_groups(untied)
    assert embedding is untied.get_input_embeddings() and tail == [untied.model.final_norm, untied.decoder]
    headless = transformers.LlamaModel(build("Llama").config)
    assert outer_groups(headless) == (headless.embed_tokens, [])
    sp = sharding()
    for changes in ({}, {"tie_word_embeddings": False}):
        model = longspan.parallelize(build("ModernBert", **changes), sp)
        _compare(build("ModernBert", **changes), model, batch(), sp)
    plain, ids = copy.deepcopy(headless), batch()["input_ids"]
    sharded = longspan.parallelize(headless, sp)
    found = sp.gather(sharded(ids).last_hidden_state.detach(), length=21)
    exact = copy.deepcopy(plain).double()(ids).last_hidden_state
    assert excess_of_rows(found, plain(ids).last_hidden_state.detach(), exact.detach()) <= 1


@on_ranks(4, timeout=30)
def test_an_invalid_batch_of_one_replica_raises_on_all() -> None:
    """One of two replicas gets an invalid batch: both must raise, or the other waits forever."""
    sp = sharding(data=2)
    model = longspan.parallelize(build("Llama"), sp)
    for change, text in (
        ({"labels": batch()["labels"][:2, :-1]}, r"`labels` has the shape \(2, 20\), the batch has 2 rows of 21"),
        ({"position_ids": torch.arange(120, 141)[None]}, "the batch has positions up to 140, the model's range is"),
    ):
        mine = rows_of(batch(), sp.data_rank, 2) | (change if sp.data_rank == 1 else {})
        with pytest.raises(LongspanError, match=f"^rank 2 refused its batch: {text}"):
            model(**mine)


_LLAMA_FORWARD: Any = transformers.LlamaForCausalLM.forward


@functools.wraps(_LLAMA_FORWARD)
def _with_a_penalty(self: Any, *args: Any, labels: Any = None, **kwargs: Any) -> Any:
    out = _LLAMA_FORWARD(self, *args, **kwargs)
    if labels is not None:
        out.loss = self.loss_function(out.logits, labels, self.vocab_size) + out.logits.square().mean()
    return out


@functools.wraps(_LLAMA_FORWARD)
def _of_tokens(self: Any, *args: Any, labels: Any = None, **kwargs: Any) -> Any:
    out = _LLAMA_FORWARD(self, *args, **kwargs)
    if labels is not None:
        out.loss = self.loss_function(out.logits, labels, self.vocab_size)
    return out


def test_a_loss_that_is_no_cross_entropy_of_tokens_is_refused() -> None:
    sp = longspan.SequenceSharding(longspan.init_mesh())
    z_loss = longspan.parallelize(build("Bamba", z_loss_coefficient=1e-3), sp)
    with pytest.raises(LongspanError, match="adds a term of its own, the z-loss"):
        z_loss(**batch())
    for forward, refused in ((_with_a_penalty, True), (_of_tokens, False)):
        with mock.patch.object(transformers.LlamaForCausalLM, "forward", forward):
            model = longspan.parallelize(build("Llama"), sp)
            with (
                pytest.raises(LongspanError, match="computes a loss of its own")
                if refused
                else contextlib.nullcontext()
            ):
                model(**batch())
    replaced = transformers.ElectraForPreTraining(
        transformers.ElectraConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, vocab_size=61
        )
    )
    with pytest.raises(LongspanError, match="ElectraForPreTraining computes a loss of its own from labels"):
        longspan.parallelize(replaced, sp, dropout=0.0)(**batch())


@on_ranks(2)
def test_gradients_after_a_backward_that_raised() -> None:
    sp = sharding()
    model = longspan.parallelize(build("Llama"), sp, fsdp=False)
    whole = batch()

    def fail(_: Tensor) -> None:
        raise RuntimeError("planted")

    loss = model(**whole).loss
    handle = model.model.layers[0].self_attn.q_proj.weight.register_hook(fail)
    with pytest.raises(RuntimeError, match="planted"):
        loss.backward()
    handle.remove()
    model.zero_grad()
    _compare(build("Llama"), model, whole, sp)
    with pytest.raises(LongspanError, match=r"call loss.backward\(\), which averages them"):
        torch.autograd.grad(model(**whole).loss, list(model.parameters()))


@on_ranks(2)
def test_two_backwards_of_a_retained_graph() -> None:
    whole, reference = batch(), build("Llama")
    loss = reference(**whole).loss
    loss.backward(retain_graph=True)
    loss.backward()
    expected = gradients(reference)
    for fsdp in (True, False):
        model = longspan.parallelize(build("Llama"), sharding(), fsdp=fsdp)
        loss = model(**whole).loss
        loss.backward(retain_graph=True)
        loss.backward()
        for name, found in gradients(model).items():
            torch.testing.assert_close(found, expected[name], rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def _selected_logits(positions: Any) -> None:
    """Compare some tokens' logits on every rank, and the gradients of a loss that each rank computes from them."""
    ids = batch()["input_ids"]
    reference = build("Llama").double()
    for ring, fsdp in ((1, True), (2, False)):
        model = longspan.parallelize(build("Llama").double(), sharding(ring=ring), fsdp=fsdp)
        reference.zero_grad()
        for keep in (1, 5, positions):
            expected = reference(ids, logits_to_keep=keep).logits
            out = model(ids, logits_to_keep=keep, cache_position=torch.arange(21))
            torch.testing.assert_close(out.logits, expected, rtol=1e-5, atol=1e-7)
            expected.square().sum().backward()
            out.logits.square().sum().backward()
        found = gradients(model)
        for name, grad in gradients(reference).items():
            torch.testing.assert_close(found[name], grad, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
        assert model(ids).logits.shape[1] < 21
        every = model(ids, logits_to_keep=torch.arange(21)).logits
        torch.testing.assert_close(every, reference(ids).logits, rtol=1e-5, atol=1e-7)
        with pytest.raises(LongspanError, match="`logits_to_keep` holds 21, the sequence has 21 tokens: -21 to 20"):
            model(ids, logits_to_keep=torch.tensor([21]))


def test_logits_to_keep(pool4: RankPool) -> None:
    pool4.run(_selected_logits, torch.tensor([3, -1, 17, 3]))
