"""`longspan train` of some weights: LoRA as PEFT trains it, and freezing by pattern."""

from __future__ import annotations

import json
import os
import re
import shutil
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from longspan.core.errors import LongspanError
from longspan.core.memory import LONGEST
from longspan.core.sections import replace
from longspan.train import TrainConfig
from longspan.train.memory_choice import resolve
from tests.models import widened
from tests.pool import RankError, RankPool
from tests.tolerance import excess_of_losses, roughly
from tests.training import LLAMA, losses_of, refused, said_by, small_run, train, train_on, weights_of


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


def _plain_losses(config: TrainConfig, lora: dict[str, Any], dtype: torch.dtype) -> dict[int, float]:
    """The same training by PEFT and torch in one process, in a plain loop."""
    from transformers import get_scheduler

    from longspan.data import deal
    from longspan.train.inputs import open_local

    steps = deal(
        iter(open_local(config).sequences(config.context_tokens)),
        batch=2,
        micro_batch=2,
        data_size=1,
        data_rank=0,
        pack="stream",
    )
    model: Any = AutoModelForCausalLM.from_pretrained(config.model.model, dtype=torch.float32)
    torch.manual_seed(config.seed)
    model = get_peft_model(model, LoraConfig(**lora)).train()
    model = widened(model) if dtype == torch.float64 else model
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": [p for p in trained if p.ndim > 1]}, {"params": [], "weight_decay": 0.0}]
    groups[1]["params"] = [p for p in trained if p.ndim == 1]  # DoRA's magnitudes
    optimizer = torch.optim.AdamW(groups, lr=config.optimizer.lr, betas=config.optimizer.betas, weight_decay=0.1)
    scheduler = get_scheduler("cosine", optimizer, config.optimizer.warmup, config.steps)
    losses = {}
    for number, step in enumerate(islice(steps, config.steps), 1):
        loss = model(**step.micro_batches[0], use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, config.optimizer.clip)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses[number] = loss.item()
    return losses


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
}


@pytest.mark.parametrize("kind", KINDS)
def test_lora_trains_as_peft_does_in_one_process(
    config: TrainConfig, base: Path, pool2: RankPool, tmp_path: Path, kind: str
) -> None:
    """Exported as an adapter and merged, plain PEFT and plain transformers compute the same from both."""
    ours, lora = KINDS[kind]
    relative = os.path.relpath(base)
    config = replace(config, model=relative, **ours)
    plain, exact = (_plain_losses(config, lora, dtype) for dtype in (torch.float32, torch.float64))
    said = pool2.run(said_by, config, timeout=240)[0]
    assert re.search(r"\ntrained: [1-4],\d{3} of 4\d,\d{3} weights\n", said)
    assert excess_of_losses(losses_of(config.out), plain, exact) <= 1
    merged = replace(config, lora_export="merged", out=tmp_path / "merged")
    shutil.copytree(config.checkpoints, merged.checkpoints)
    train_on(pool2, merged)
    adapter = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), config.out / "hf").eval()
    whole = AutoModelForCausalLM.from_pretrained(merged.out / "hf").eval()
    ids = torch.arange(100, 140)[None]
    with torch.no_grad():
        adapted, from_merged = adapter(input_ids=ids).logits, whole(input_ids=ids).logits
        untrained = AutoModelForCausalLM.from_pretrained(base)(input_ids=ids).logits
    assert torch.allclose(adapted, from_merged, atol=roughly(torch.float32))
    assert (adapted - untrained).abs().max() > 0.05
    written = json.loads((config.out / "hf" / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == str(base) and written["use_dora"] == (kind == "DoRA")


def test_a_run_with_lora_resumes_to_the_bit(config: TrainConfig, pool2: RankPool, tmp_path: Path) -> None:
    whole = replace(config, lora=4, ulysses=2)
    train_on(pool2, whole)
    cut = replace(whole, out=tmp_path / "cut")
    shutil.copytree(whole.checkpoints / "step-00000002", cut.checkpoints / "step-00000002")
    refused(cut, r"tuning\.lora was 4, is 8; give the same", lora=8)
    train_on(pool2, cut)
    assert losses_of(cut.out) == {step: loss for step, loss in losses_of(whole.out).items() if step > 2}
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (cut.out / "hf" / name).read_bytes() == (whole.out / "hf" / name).read_bytes()


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


def test_dora_on_a_tensor_axis_is_refused(config: TrainConfig, pool2: RankPool) -> None:
    with pytest.raises(RankError, match="only LoRA's A and B can be sharded"):
        train_on(pool2, replace(config, lora=4, dora=True, tensor=2))


def test_few_trained_weights_start_where_the_plan_of_all_does_not_fit(config: TrainConfig) -> None:
    tight = replace(config, rank_memory=1e-4, ulysses=2)
    with pytest.raises(LongspanError, match=r"do not fit .* give --memory fastest"):
        resolve(tight)
    resolved, messages = resolve(replace(tight, lora=4))
    assert resolved.memory.to_memory() == LONGEST
    assert "do not fit" in messages[-1] and messages[-1].endswith("so it starts with all memory options")
