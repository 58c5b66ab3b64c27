"""Recipes parse and train; the container of the Dockerfile."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from longspan.cli import main
from longspan.cli_values import read_flags
from longspan.core.sections import make
from longspan.recipes import recipes
from longspan.train import TrainConfig
from tests.chats import chat, make_tokenizer, write_rows
from tests.training import LLAMA

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", recipes())
def test_recipe_is_written_and_is_a_valid_config(name, tmp_path, capsys):
    out = tmp_path / "mine.toml"
    assert main(["recipes", "--name", name, "--out", str(out)]) == 0
    assert re.search(r"change its [1-9]\d* lines marked EDIT", capsys.readouterr().out)
    values, _ = read_flags(TrainConfig, out, "longspan train")
    if "quantize" in values:
        pytest.importorskip("bitsandbytes")
    make(TrainConfig, **values).check()
    assert main(["recipes", "--name", name, "--out", str(out)]) == 2  # it is not overwritten
    assert "exists" in capsys.readouterr().err


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    """A small model with a tokenizer and a chat template, and data of each kind."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("toy")
    make_tokenizer().save_pretrained(folder / "model")
    LlamaForCausalLM(LlamaConfig(**LLAMA)).save_pretrained(folder / "model")
    write_rows(folder / "chat.jsonl", [{"messages": chat(n)} for n in range(20)])
    write_rows(folder / "text.jsonl", [{"text": "The sea was calm. " * (n % 9 + 1)} for n in range(40)])
    pairs = [{"prompt": chat(n)[:2], "chosen": chat(n)[2:3], "rejected": chat(n)[4:5]} for n in range(20)]
    write_rows(folder / "preference.jsonl", pairs)
    return folder


@pytest.mark.parametrize("name", recipes())
def test_recipe_trains_a_toy_model(name, toy, tmp_path, capsys):
    """In one process: ranks and sizes are the test's, everything else is the recipe's."""
    path = tmp_path / "recipe.toml"
    path.write_text(recipes()[name])
    values, _ = read_flags(TrainConfig, path, "longspan train")
    kind = "preference" if "dpo" in values else values.get("format", "text")
    data = toy / f"{kind}.jsonl"
    flags = {"model": toy / "model", "data": data, "out": tmp_path / "run", "context": 256, "steps": 2, "batch": 1}
    if "eval_data" in values:
        flags["eval-data"] = data
    flags |= {"ulysses": 1, "ring": 1, "data-degree": 1, "warmup": 1, "dtype": "fp32", "rope-scaling": "as-is"}
    status = main(
        ["train", "--from", str(path), *(part for key, value in flags.items() for part in (f"--{key}", str(value)))]
    )
    printed = capsys.readouterr()
    assert status == 0, printed.err
    assert "step 2/2" in printed.out and any((tmp_path / "run" / "hf").glob("*config.json"))


def test_list_names_every_recipe(capsys):
    assert main(["recipes"]) == 0
    listed = capsys.readouterr().out
    assert all(re.search(rf"^{name} +[A-Z]", listed, re.MULTILINE) for name in recipes())
    assert main(["recipes", "--name", "longer-contxt"]) == 2
    assert "longer-context" in capsys.readouterr().err


def test_dockerfile_copies_what_exists_and_installs_from_registries_only():
    lines = (ROOT / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    instructions = [line.split() for line in lines if line.strip() and not line.startswith("#")]
    assert {parts[0] for parts in instructions} <= {"ARG", "FROM", "RUN", "COPY", "WORKDIR", "ENV", "ENTRYPOINT"}
    for parts in instructions:
        if parts[0] == "COPY":
            assert all((ROOT / source).exists() for source in parts[1:-1])
    assert not any(
        re.search(r"https?://(?!pypi\.org|download\.pytorch\.org)", " ".join(parts)) for parts in instructions
    )
