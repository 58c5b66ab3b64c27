"""Built-in models by name, and the `config.json` of any other. Standard library only.

`models.json` holds the keys of published configs that decide a model's shape; other keys have the defaults of
transformers' config class. `hub` is where weights are that `longspan train` takes as they are; without it
`make` stands in a command for what the user has to make first.

DeepSeek-V3 and Qwen3-Next are without their modules for multi-token prediction, which transformers does not build.
Gemma-3 is the text part of the published configs. Mistral-7B is v0.1; later versions have no window. GPT 1.2B, 7B and
30B are those of DeepSpeed-Ulysses (arXiv 2309.14509), which states their parameters alone: widths, depths and heads are
those of "1.3B", "6.7B" and "30B" in the authors' launch scripts, the vocabulary is GPT-2's, and positions are rotary.
"""

from __future__ import annotations

import json
import os
from importlib.resources import files
from pathlib import Path
from typing import Any

from longspan.core.errors import LongspanError
from longspan.core.validation import existing_path, format_value, nearest, read_text

MODELS: dict[str, dict[str, Any]] = json.loads(
    files("longspan.plan").joinpath("models.json").read_text(encoding="utf-8")
)
"""By name in lower case: `config`, and `hub` or `make`, which vision-language models lack."""


def weights_of(name: str) -> str | None:
    """Return what `longspan train` takes for a built-in model; None for other names."""
    model = MODELS.get(name, {})
    return model.get("hub") or model.get("make")


def find_config(name_or_path: str | os.PathLike[str]) -> tuple[str, dict[str, Any]]:
    """Return a name for messages and the config of a built-in model, or of the `config.json` (or its folder) at a path.

    Built-in names may be written as on the Hugging Face hub ("meta-llama/Llama-2-70b-hf"). They win over folders of the
    same name in the current directory: write "./llama-2-7b" for the folder.

    Raises:
        LongspanError: for an unknown name (with the nearest), or a file that is missing or is not a JSON object.
    """
    if not isinstance(name_or_path, str | os.PathLike):
        raise LongspanError(
            f"model {format_value(name_or_path)} is neither a name nor a path; there are {', '.join(MODELS)}"
        )
    name_or_path = os.fspath(name_or_path)
    if name_or_path.lower() in MODELS:
        return name_or_path.lower(), MODELS[name_or_path.lower()]["config"]
    path = existing_path("--model", name_or_path)
    if path is not None or name_or_path.endswith(".json") or name_or_path.startswith((".", "/", "~")):
        return name_or_path, _read_json(path or Path(name_or_path))
    name = _plain_name(name_or_path)
    if name in MODELS:
        return name, MODELS[name]["config"]
    raise LongspanError(
        f"model {name_or_path} is not built in ({nearest(name, MODELS)}); for another model give the path of its "
        f"config.json"
    )


def _plain_name(name: str) -> str:
    """Return a hub name without the owner, and without words for the format or the fine-tuning."""
    words = name.lower().rstrip("/").rsplit("/", 1)[-1].split("-")
    plain = "-".join(word for word in words if word not in ("hf", "meta", "chat", "instruct", "it", "pt"))
    return "mistral-7b" if plain == "mistral-7b-v0.1" else plain


def _read_json(path: Path) -> dict[str, Any]:
    if path.is_dir():
        if not (path / "config.json").exists():
            raise LongspanError(f"the folder {path} has no config.json; give a folder that has one, or the file itself")
        path = path / "config.json"
    if not path.exists():
        raise LongspanError(f"there is no file {path}; give the path of a config.json, or one of {', '.join(MODELS)}")
    text = read_text("--model", path)
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise LongspanError(f"{path} is not JSON ({error}); give the config.json of a Hugging Face model") from error
    if not isinstance(config, dict):
        raise LongspanError(
            f"{path} holds a JSON {type(config).__name__}, not an object; give the config.json of a Hugging Face model"
        )
    return config
