"""Each of `examples/*.yaml` trains at a toy size, and plain libraries load what it exports."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.pool import RankPool
from tests.train.training import train

pytestmark = pytest.mark.versions

pytest.importorskip("trl")

EXAMPLES = Path(__file__).parents[2] / "examples"

SMALL = {
    "max_steps": "2", "context": "64", "gradient_accumulation_steps": "1", "warmup_steps": "0", "save_steps": "2",
    "logging_steps": "1", "report_to": "none", "ulysses": "2", "ring": "1",
}  # fmt: skip
CHANGES: dict[str, dict[str, str]] = {
    "demo": {"context": "96"},
    "dpo": {"eval_steps": "1"},
    "longer-context": {"context": "1k"},
    "lora": {"eval_steps": "1"},
    "qlora": {},
    "several-nodes": {"context": "1k", "ulysses": "1", "ring": "2"},
    "sft": {},
}


@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.yaml")))
def test_an_example_trains(pool2: RankPool, toy: Path, name: str, tmp_path: Path) -> None:
    if name == "qlora":
        pytest.importorskip("bitsandbytes")
    path = EXAMPLES / f"{name}.yaml"
    keys: dict[str, Any] = yaml.safe_load(path.read_text())
    data = toy / ("pairs.jsonl" if name == "dpo" else "chats.jsonl")
    given: dict[str, str] = {**SMALL, **CHANGES[name], "output_dir": str(tmp_path / "run")}
    if name != "demo":
        given["model_name_or_path"] = str(toy / "model")
        given["dataset_name"] = str(data)
    if name in ("longer-context", "several-nodes"):
        given["dataset_name"] = str(toy / "texts")
    if "datasets" in keys:  # a list, which the command line does not take
        keys["datasets"] = [{**entry, "path": str(data)} for entry in keys["datasets"]]
        del given["dataset_name"]
    if "eval_datasets" in keys:
        shutil.copy(data, tmp_path / "held-out.jsonl")
        keys["eval_datasets"] = [str(tmp_path / "held-out.jsonl")]
    file = tmp_path / path.name
    file.write_text(yaml.safe_dump({**keys, **given}))
    pool2.run(train, ["dpo" if name == "dpo" else "sft", "--config", str(file)], timeout=240)
    state = json.loads((tmp_path / "run" / "checkpoint-2" / "trainer_state.json").read_text())
    assert state["global_step"] == 2
    weights = "adapter_model" if "use_peft" in keys else "model"
    assert (tmp_path / "run" / f"{weights}.safetensors").is_file()
