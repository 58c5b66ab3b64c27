"""Exported folders load as the same weights, or are absent. (tests/train/ exports after a run.)"""

from __future__ import annotations

import copy
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch

import longspan
from longspan import checkpoint
from longspan.checkpoint import DiskFull
from longspan.core.errors import LongspanError
from tests.checkpoint.disk import largest_file
from tests.pool import RankPool

pytestmark = pytest.mark.versions


def _config(**changes: Any) -> Any:
    from transformers import LlamaConfig

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    return LlamaConfig(**sizes | {"num_attention_heads": 4, "num_key_value_heads": 2} | changes)


def _model(seed: int = 0, **changes: Any) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(_config(**changes))


def _adapted(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, modules_to_save=["lm_head"])
    return get_peft_model(model, lora)


def _tokenizer() -> Any:
    from longspan.hf.model.prompts import load_tokenizer

    return load_tokenizer("bytes")


# --- files in the way, and failed exports


def test_an_export_replaces_older_weights_and_keeps_other_files(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    for name in ("model-00001-of-00002.safetensors", "model.safetensors.index.json"):
        (folder / name).write_text("older")
    checkpoint.export(folder, _model(1), _config(), None, torch.float32)
    assert {path.name for path in folder.iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors", "notes.txt",
    }  # fmt: skip
    with pytest.raises(LongspanError, match=r"notes\.txt is a file; give a folder"):
        checkpoint.export(folder / "notes.txt", _model(), _config())


def test_a_failed_export_leaves_the_older_one(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    checkpoint.export(folder, _model(), _config(), None, torch.float32)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    broken = _model()
    with torch.no_grad():
        broken.model.norm.weight[3] = float("nan")
    with pytest.raises(LongspanError, match=r"hf is not exported: model\.norm\.weight holds nan \(1 of"):
        checkpoint.export(folder, broken, _config(), None, torch.float32)
    with largest_file(20_000), pytest.raises(DiskFull, match=r"File too large"):
        checkpoint.export(folder, _model(), _config(), None, torch.float32)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_all_files_have_the_mode_of_the_umask(tmp_path: Path, mask: int = 0o027) -> None:
    before = os.umask(mask)
    try:
        checkpoint.export(tmp_path / "hf", _model(), _config(), _tokenizer(), torch.float32)
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "hf").iterdir()}
    assert "model.safetensors" in modes and set(modes.values()) == {0o666 & ~mask}, modes


# --- sharded, with adapters


def _export_adapted(folder: Path) -> dict[str, Any]:
    import accelerate

    sp = longspan.SequenceSharding(longspan.init_mesh(ulysses=2))
    model = longspan.parallelize(_adapted(_model()), sp, fsdp=True)
    checkpoint.export(folder / "adapter", model, _config(), _tokenizer(), torch.float32)
    said: dict[str, Any] = {}
    for name, call in {
        "peft": lambda: model.save_pretrained(folder / "peft"),
        "transformers": lambda: model.get_base_model().save_pretrained(folder / "transformers"),
    }.items():
        try:
            call()
        except LongspanError as error:
            said[name] = str(error)
    said["shards"] = type(
        accelerate.Accelerator(cpu=True).get_state_dict(model)[
            "base_model.model.lm_head.modules_to_save.default.weight"
        ]
    )
    return said


def test_an_adapted_model_is_exported_as_adapter(tmp_path: Path, pool2: RankPool) -> None:
    from peft import PeftModel

    said = pool2.run(_export_adapted, tmp_path, timeout=240)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter"]
    reference = _adapted(_model())
    trained = {name: x for name, x in reference.state_dict().items() if "lora" in name or "modules_to_save" in name}

    assert {"adapter_config.json", "adapter_model.safetensors"} <= {p.name for p in (tmp_path / "adapter").iterdir()}
    assert "FSDP" not in (tmp_path / "adapter" / "adapter_config.json").read_text()
    adapter = PeftModel.from_pretrained(_model(), tmp_path / "adapter").state_dict()
    assert len(trained) == 9 and all(torch.equal(adapter[name], x) for name, x in trained.items())

    for rank in said:
        for name in ("peft", "transformers"):
            assert "cannot save shards" in rank[name] and "longspan.checkpoint.export(folder, model)" in rank[name]
        assert rank["shards"].__name__ == "DTensor"


def _export_masked(folder: Path) -> None:
    from transformers import AutoModelForMaskedLM, BertConfig

    config = BertConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    sp = longspan.SequenceSharding(longspan.init_mesh(ulysses=2))
    model = longspan.parallelize(AutoModelForMaskedLM.from_config(copy.deepcopy(config)), sp)
    checkpoint.export(folder, model, config, None, torch.float32)


def test_a_masked_lm_is_exported_as_one(tmp_path: Path, pool2: RankPool) -> None:
    from transformers import AutoModelForMaskedLM

    pool2.run(_export_masked, tmp_path / "hf", timeout=240)
    model = AutoModelForMaskedLM.from_pretrained(tmp_path / "hf")
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["architectures"] == ["BertForMaskedLM"]
    torch.manual_seed(0)
    expected = AutoModelForMaskedLM.from_config(model.config).state_dict()
    assert all(torch.equal(x, expected[name]) for name, x in model.state_dict().items())
