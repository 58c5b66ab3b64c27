"""`longspan train` of some weights: LoRA as PEFT trains it, on weights in 4 bits too, and freezing by pattern."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

import longspan
from longspan.core.errors import LongspanError
from longspan.core.sections import replace
from longspan.data import deal
from longspan.train import TrainConfig, run
from longspan.train.inputs import open_local
from longspan.train.old_resolve import resolve_memory
from tests.models import widened
from tests.pool import RankError, RankPool
from tests.tolerance import excess_of_losses, roughly
from tests.training import LLAMA, losses_of, plain_loop, refused, said_by, small_run, train, train_on, weights_of


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(3)
    LlamaForCausalLM(LlamaConfig(**LLAMA)).save_pretrained(folder)
    return folder


@pytest.fixture
def config(base: Path, tmp_path: Path) -> TrainConfig:
    """4 steps of two sequences of 60 tokens."""
    made = small_run(base / "config.json", tmp_path / "run", batch=2, lr=3e-2)
    return replace(made, config=None, model=str(base), tokenizer="bytes")


def _plain(name: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)


def _in_4_bits(name: Any, **options: Any) -> Any:
    pytest.importorskip("bitsandbytes")
    config = BitsAndBytesConfig(**{
        "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": torch.float32, **options,
    })  # fmt: skip
    return AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, quantization_config=config)


def _plain_losses(config: TrainConfig, lora: dict[str, Any], dtype: torch.dtype) -> dict[int, float]:
    """The same training by PEFT and torch in one process, in a plain loop."""
    model = _in_4_bits(config.model.model) if config.tuning.quantize == "nf4" else _plain(config.model.model)
    if dtype == torch.float64 and config.tuning.quantize == "nf4":
        model = model.dequantize()
    torch.manual_seed(config.seed)
    model = get_peft_model(model, LoraConfig(**lora)).train()
    return plain_loop(widened(model) if dtype == torch.float64 else model, config)


KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "LoRA": (
        {"lora": 4, "ulysses": 2},
        {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"},
    ),
    "rsLoRA of some, without FSDP": (
        {"lora": 4, "lora_alpha": 6, "rslora": True, "lora_targets": ("q_proj", "down_proj"), "ring": 2, "fsdp": False},
        {"r": 4, "lora_alpha": 6, "use_rslora": True, "target_modules": ["q_proj", "down_proj"]},
    ),
    "DoRA": (
        {"lora": 4, "dora": True, "ulysses": 2, "memory": "longest"},
        {"r": 4, "lora_alpha": 8, "use_dora": True, "target_modules": "all-linear"},
    ),
    "QLoRA": (
        {"lora": 4, "quantize": "nf4", "ulysses": 2, "memory": "longest"},
        {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"},
    ),
    "QLoRA of some, without FSDP": (
        {"lora": 4, "quantize": "nf4", "lora_targets": ("q_proj", "up_proj"), "ring": 2, "fsdp": False},
        {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "up_proj"]},
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_lora_trains_as_peft_does_in_one_process(
    config: TrainConfig, base: Path, pool2: RankPool, tmp_path: Path, kind: str
) -> None:
    """Exported as an adapter and merged, plain PEFT and plain transformers compute the same from both."""
    ours, lora = KINDS[kind]
    load = _in_4_bits if "quantize" in ours else _plain
    relative = os.path.relpath(base)
    config = replace(config, model=relative, **ours)
    plain, exact = (_plain_losses(config, lora, dtype) for dtype in (torch.float32, torch.float64))
    said = pool2.run(said_by, config, timeout=240)[0]
    trained = sum(p.numel() for p in get_peft_model(_plain(base), LoraConfig(**lora)).parameters() if p.requires_grad)
    assert re.search(rf"\ntrained: {trained:,} of 4\d,\d{{3}} weights\n", said)
    assert excess_of_losses(losses_of(config.out), plain, exact) <= 1
    merged = replace(config, lora_export="merged", out=tmp_path / "merged")
    shutil.copytree(config.checkpoints, merged.checkpoints)
    train_on(pool2, merged)
    adapter = PeftModel.from_pretrained(load(base), config.out / "hf").train()  # bitsandbytes infers in bf16 on CPUs
    whole = AutoModelForCausalLM.from_pretrained(merged.out / "hf").eval()
    ids = torch.arange(100, 140)[None]
    with torch.no_grad():
        adapted, from_merged = adapter(input_ids=ids).logits, whole(input_ids=ids).logits
        untrained = load(base).train()(input_ids=ids).logits
    assert torch.allclose(adapted, from_merged, atol=roughly(torch.float32))
    assert (adapted - untrained).abs().max() > 0.05
    written = json.loads((config.out / "hf" / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == str(base) and written["use_dora"] == (kind == "DoRA")


@pytest.mark.parametrize("quantize", ["none", "nf4"])
def test_a_run_with_lora_resumes_to_the_bit(
    config: TrainConfig, pool2: RankPool, tmp_path: Path, quantize: str
) -> None:
    if quantize == "nf4":
        pytest.importorskip("bitsandbytes")
    whole = replace(config, lora=4, quantize=quantize, ulysses=2)
    train_on(pool2, whole)
    cut = replace(whole, out=tmp_path / "cut")
    shutil.copytree(whole.checkpoints / "step-00000002", cut.checkpoints / "step-00000002")
    refused(cut, r"tuning\.lora was 4, is 8; give the same", lora=8)
    train_on(pool2, cut)
    assert losses_of(cut.out) == {step: loss for step, loss in losses_of(whole.out).items() if step > 2}
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (cut.out / "hf" / name).read_bytes() == (whole.out / "hf" / name).read_bytes()


def test_an_adapter_is_trained_further(config: TrainConfig, base: Path, tmp_path: Path) -> None:
    """On the base model that it names: the first loss is the adapter's; rank and targets stay, as in PEFT."""
    first = replace(config, lora=4, lora_targets=("q_proj", "down_proj"), steps=2, save_every=0)
    train(first)
    adapter = first.exported
    further = replace(config, model=str(adapter), out=tmp_path / "further", steps=2, data="pydoc", track="none")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "for .*: copying from a non-meta parameter")  # PEFT's load on the meta device
        assert run(further) == 0
    settings, before = (json.loads((f / "adapter_config.json").read_text()) for f in (further.exported, adapter))
    assert {**settings, "lora_dropout": 0} == {**before, "lora_dropout": 0} and settings["r"] == 4
    model: Any = PeftModel.from_pretrained(_plain(base), adapter).train()
    steps = deal(
        iter(open_local(config).sequences(61)), batch=2, micro_batch=2, data_size=1, data_rank=0, pack="stream"
    )
    loss = model(**next(steps).micro_batches[0], use_cache=False).loss.item()
    assert losses_of(further.out)[1] == pytest.approx(loss, rel=1e-6)
    assert losses_of(first.out)[1] != pytest.approx(loss, rel=1e-4)
    refused(further, r"--lora 8: the adapter .* has 4, which stays; leave --lora out", lora=8)
    (adapter / "adapter_config.json").write_text(json.dumps({**before, "peft_type": "IA3"}))
    refused(further, r"is of the kind IA3, and `longspan train` continues LoRA alone")


def test_a_run_with_lora_and_muon_resumes(config: TrainConfig, tmp_path: Path) -> None:
    whole = replace(config, lora=4, optimizer="muon", export="never", track="none")
    train(whole)
    cut = replace(whole, out=tmp_path / "cut")
    shutil.copytree(whole.checkpoints / "step-00000002", cut.checkpoints / "step-00000002")
    train(cut)
    assert losses_of(cut.out) == {step: loss for step, loss in losses_of(whole.out).items() if step > 2}


def test_frozen_weights_stay(config: TrainConfig, base: Path, pool2: RankPool) -> None:
    from safetensors.torch import load_file

    before = load_file(base / "model.safetensors")
    config = replace(config, freeze=("*embed_tokens*", "*.layers.0.*"), ulysses=2)
    train_on(pool2, config)
    after = weights_of(config.out)
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert same == {name for name in before if "embed" in name or ".layers.0." in name} != set()


def test_impossible_tuning_is_refused_before_a_rank_starts(config: TrainConfig, base: Path) -> None:
    refused(config, r"--rslora is an option of LoRA; give its rank, too: --lora 16", rslora=True)
    refused(config, r"--lora must be at least 1, got 0", lora=0)
    refused(
        config,
        r"--lora-dropout 0\.1: each of the 2 ranks would draw",
        lora=4,
        lora_dropout=0.1,
        ulysses=2,
    )
    refused(config, r"--freeze x: --lora 4 freezes all", lora=4, freeze=("x",))
    refused(config, r"--lora 4 adapts pretrained weights", lora=4, model=None, config=base / "config.json")
    refused(config, r"--lora 4 cannot be put on the model: Target modules .*no_such", lora=4, lora_targets=("no_such",))
    refused(config, r"--freeze x is the name of no weight; they are named like model\.embed_tokens", freeze=("x",))
    refused(config, r"--freeze \* freezes all weights; leave some to train", freeze=("*",))
    rope = {"rope_scaling": "linear", "context": 1024}
    refused(config, r"the folder of an adapter does not contain; give --lora-export merged", lora=4, **rope)


def _gradients(base: Path, storage: torch.dtype, options: dict[str, Any] | None) -> tuple[float, dict[str, Any]]:
    """Return the loss and LoRA's gradients on weights in 4 bits; of a plain model without `options`."""
    model = _in_4_bits(base, bnb_4bit_quant_storage=storage)
    torch.manual_seed(0)
    model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)).train()
    ids = torch.randint(384, (2, 61), generator=torch.Generator().manual_seed(1))
    if options is not None:
        sp = longspan.SequenceSharding(longspan.init_mesh(**options.pop("mesh")))
        model = longspan.parallelize(model, sp, **options)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    trained = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    return loss.item(), {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in trained.items()}


@pytest.mark.parametrize("fsdp", [True, False])
def test_a_model_loaded_in_4_bits_is_parallelized(base: Path, get_pool: Callable[[int], RankPool], fsdp: bool) -> None:
    """On 4 ranks, with bytes stored as bytes and as bf16, as other FSDP code needs them."""
    pytest.importorskip("bitsandbytes")
    storage = torch.uint8 if fsdp else torch.bfloat16
    options = {"mesh": {"data": 1, "ring": 2, "ulysses": 2}, "fsdp": fsdp, "memory": "longest"}
    loss, expected = _gradients(base, storage, None)
    for own_loss, gradients in get_pool(4).run(_gradients, base, storage, options):
        assert own_loss == pytest.approx(loss, rel=1e-6)
        for name, x in expected.items():
            assert (gradients[name] - x).norm() <= 1e-5 * x.norm(), name


def test_quantized_weights_that_cannot_be_sharded_are_refused(config: TrainConfig, base: Path, pool2: RankPool) -> None:
    pytest.importorskip("bitsandbytes")
    refused(config, r"--quantize is an option of LoRA; give its rank, too: --lora 16", quantize="nf4")
    refused(config, r"--quantize nf4 packs .*, and --tensor 2 .* --ulysses 2", lora=4, quantize="nf4", tensor=2)
    refused(config, r"--dora trains norms of whole weights, and --quantize nf4", lora=4, quantize="nf4", dora=True)
    refused(config, r"--quantize nf4 does not support --compile", lora=4, quantize="nf4", compile=True)
    with pytest.raises(RankError, match=r"has weights in 4 bits, .* `tensor=2` cannot shard them; use `ulysses=2`"):
        pool2.run(_gradients, base, torch.uint8, {"mesh": {"tensor": 2}})
    with pytest.raises(RankError, match=r"quantized \(bitsandbytes\), and would lose their scales"):
        pool2.run(_parallelize_in_8_bits, base)


def _parallelize_in_8_bits(base: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(base, quantization_config=BitsAndBytesConfig(load_in_8bit=True))
    longspan.parallelize(model, longspan.SequenceSharding(longspan.init_mesh(ulysses=2)))


def test_dora_on_a_tensor_axis_is_refused(config: TrainConfig, pool2: RankPool) -> None:
    with pytest.raises(RankError, match="only LoRA's A and B can be sharded"):
        train_on(pool2, replace(config, lora=4, dora=True, tensor=2))


def test_the_planner_counts_trained_weights_alone(config: TrainConfig) -> None:
    tight = replace(config, rank_memory=4e-4, ulysses=2)
    with pytest.raises(LongspanError, match=r"do not fit .* give --memory fastest"):
        resolve_memory(tight)
    resolve_memory(replace(tight, lora=4))
    with pytest.raises(LongspanError, match=r"do not fit .* Item by item: .*weights .* give --memory fastest"):
        resolve_memory(replace(tight, lora=4, rank_memory=1e-4))


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_lora_on_a_shared_table_is_not_merged(target: str) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    from longspan.checkpoint import check_mergeable

    for tied in (False, True):
        made = LlamaForCausalLM(LlamaConfig(**LLAMA | {"tie_word_embeddings": tied}))
        adapted = get_peft_model(made, LoraConfig(target_modules=[target]))
        with pytest.raises(LongspanError, match="share one weight") if tied else contextlib.nullcontext():
            check_mergeable(adapted)
