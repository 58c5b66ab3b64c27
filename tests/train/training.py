"""A small model, its data, and runs of `longspan train` on them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from longspan.ranks.watch import Watch
from tests.train.chats import GENERATION, make_tokenizer, write_rows
from tests.trainers.fitting import as_launched

LLAMA = {
    "model_type": "llama",
    "vocab_size": 384,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
"""config.json of a Llama over bytes."""

COMMON: dict[str, Any] = {
    "max_steps": 20, "learning_rate": 3e-3, "logging_steps": 1, "report_to": "none", "use_cpu": True, "bf16": False,
    "save_strategy": "steps", "save_steps": 20, "disable_tqdm": True, "seed": 7, "max_length": 64,
    "gradient_checkpointing": False, "dataloader_pin_memory": False, "per_device_train_batch_size": 4,
    "lr_scheduler_type": "cosine", "warmup_steps": 2, "logging_nan_inf_filter": False,
}  # fmt: skip
"""Keys of a run that `trl` takes as well."""


def write_config(folder: Path, **changes: Any) -> Path:
    """Write `LLAMA` with changes as config.json in `folder`; return its path."""
    path = folder / "config.json"
    path.write_text(json.dumps(LLAMA | changes))
    return path


def make_toy(folder: Path) -> Path:
    """Write a small model with its tokenizer, a wider teacher, chats, preferences and texts."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**{**LLAMA, "eos_token_id": 0})
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    wider = {"hidden_size": 48, "num_attention_heads": 6, "initializer_range": 0.2}
    LlamaForCausalLM(LlamaConfig(**{**config.to_dict(), **wider})).save_pretrained(folder / "teacher")
    make_tokenizer(GENERATION).save_pretrained(folder / "model")
    chats, pairs = [], []
    for at in range(60):
        question = [{"role": "user", "content": f"What is the {at}?" + " The other." * (at % 5)}]
        answers = [[{"role": "assistant", "content": f"It is the {word}, {at}."}] for word in ("one", "answer")]
        chats.append({"messages": [*question, *answers[0], *question, *answers[1]]})
        pairs.append({"prompt": question, "chosen": answers[0], "rejected": answers[1]})
    write_rows(folder / "chats.jsonl", chats)
    write_rows(folder / "pairs.jsonl", pairs)
    (folder / "texts").mkdir()
    for at in range(8):
        (folder / "texts" / f"{at}.txt").write_text(f"It is the text {at}, and that is the other. " * (10 + 5 * at))
    return folder


def config_of(toy: Path, method: str, out: Path, **changes: Any) -> Path:
    """Write a file that `trl` reads, too; return its path."""
    data = "chats.jsonl" if method in ("sft", "gkd") else "pairs.jsonl"
    keys = {
        "model_name_or_path": str(toy / "model"), "output_dir": str(out),
        "datasets": [{"path": "json", "data_files": str(toy / data)}], **COMMON, **changes,
    }  # fmt: skip
    path = out.parent / f"{out.name}.yaml"
    path.write_text(yaml.safe_dump(keys))
    return path


def train(argv: list[str]) -> None:
    """Train on this rank of a pool."""
    from longspan.train.arguments import read
    from longspan.train.command import train_rank

    settings = read(argv)
    with as_launched():
        train_rank(settings, Watch())


def log_of(out: Path, step: int = 20) -> list[dict[str, Any]]:
    """Return what a run logged of each step until its checkpoint at `step`."""
    state = json.loads((out / f"checkpoint-{step}" / "trainer_state.json").read_text())
    return [entry for entry in state["log_history"] if "loss" in entry or "eval_loss" in entry]


def losses_of(out: Path, step: int = 20) -> dict[int, float]:
    """Return step -> loss."""
    return {entry["step"]: entry["loss"] for entry in log_of(out, step) if "loss" in entry}


# --- jobs as values


@dataclass(frozen=True)
class Job:
    """A run of `longspan train sft`: the value of each key."""

    keys: dict[str, Any]

    def but(self, **changes: Any) -> Job:
        """Return the run with other values of some keys."""
        return Job(self.keys | changes)

    def __getattr__(self, key: str) -> Any:
        return self.keys[key]

    @property
    def out(self) -> Path:
        return Path(self.keys["output_dir"])

    @property
    def argv(self) -> list[str]:
        """The command's arguments."""
        return ["sft", *(word for key, value in self.keys.items() for word in (f"--{key}", str(value)))]


def small_job(folder: Path, out: Path, **changes: Any) -> Job:
    """Return a run on sequences of 61 tokens from random weights, which logs every step and saves every second one."""
    base = {
        "model_name_or_path": write_config(folder), "dataset_name": "pydoc", "packing": True, "context": 61,
        "packing_strategy": "wrapped", "per_device_train_batch_size": 2, "max_steps": 4, "learning_rate": 1e-2,
        "warmup_steps": 1, "bf16": False, "logging_steps": 1, "save_steps": 2, "report_to": "none", "output_dir": out,
        "memory": "fastest", "disable_tqdm": True,
    }  # fmt: skip
    return Job({key: str(value) if isinstance(value, Path) else value for key, value in (base | changes).items()})
