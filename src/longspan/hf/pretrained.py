"""A Hugging Face config as the jobs and the model integration read it. Needs no torch until a config is opened."""

from __future__ import annotations

import json
import warnings
from typing import Any

from longspan.core.checked import existing_path, means_a_path, read_text, spell
from longspan.core.errors import LongspanError
from longspan.ranks import launch


def check_source(flag: str, name: str, *, local: bool = False) -> None:
    """Refuse what names neither a file or folder here nor, by its form, anything on the Hugging Face hub.

    The hub is asked only for what can be a name there: a path with a slip in it is said at once.

    Args:
        flag: the option that named it, for messages.
        name: what is to be read.
        local: whether it must be here.

    Raises:
        LongspanError: with the way out.
    """
    path = existing_path(flag, name)
    if path is None and (local or means_a_path(name)):
        hub = "" if local else ", and no name on the Hugging Face hub either (NAME or OWNER/NAME)"
        raise LongspanError(f"{flag} {name} does not exist{hub}; give the path of a file or folder that is there")


def read_model_config(flag: str, name: str, context: int) -> Any:
    """The Hugging Face config of a model, by name, folder or file.

    Args:
        flag: the option that named it, for messages.
        name: what `AutoConfig.from_pretrained` takes.
        context: tokens of the sequences it is for.

    Raises:
        LongspanError: if there is none, it is no language model's, or its position range is shorter than the context.
    """
    check_source(flag, name, local=flag == "--config")
    _check_json(flag, name)
    from transformers import AutoConfig

    try:
        found = AutoConfig.from_pretrained(name)
    except Exception as error:
        raise LongspanError(f"{flag} {name}: no model config can be read there: {first_line(error)}") from error
    check_language_model(f"{flag} {name}", found, context)
    return found


def check_language_model(where: str, found: Any, context: int) -> None:
    """Refuse the config of what is no language model, or of one for shorter sequences.

    Args:
        where: what the config is of, for messages.
        found: the Hugging Face config.
        context: tokens of the sequences it is for.

    Raises:
        LongspanError: with the numbers and the way out.
    """
    vocabulary = getattr(found.get_text_config(), "vocab_size", None)
    if not isinstance(vocabulary, int) or vocabulary < 1:
        raise LongspanError(f"{where} is not the config of a language model: its vocab_size is {spell(vocabulary)}")
    limit = position_range(found)
    if limit is not None and context > limit:
        raise LongspanError(
            f"--context {context} is longer than the {limit} positions of {where} (max_position_embeddings); "
            f"give --context {limit} or less, or a config with RoPE scaling and a larger max_position_embeddings"
        )


def position_range(config: Any) -> int | None:
    """How many positions a model knows; None where it does not say, or its RoPE grows with the length ("dynamic")."""
    text = config.get_text_config()
    limit: object = getattr(text, "max_position_embeddings", None)
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        raise LongspanError(f"max_position_embeddings {spell(limit)} of the model's config must be an integer above 0")
    rope = getattr(text, "rope_parameters", None)
    return None if isinstance(rope, dict) and rope.get("rope_type") == "dynamic" else limit


def _check_json(flag: str, name: str) -> None:
    """Refuse a file that holds no JSON object: what transformers says of it is not always clear."""
    path = existing_path(flag, name)
    if path is None:
        return
    if path.is_dir():
        if not (path / "config.json").exists():
            raise LongspanError(
                f"{flag} {name} has no config.json; give the folder of a model, or a config.json itself"
            )
        path = path / "config.json"
    try:
        found = json.loads(read_text(flag, path))
    except (ValueError, RecursionError) as error:
        if isinstance(error, LongspanError):
            raise
        raise LongspanError(f"{flag} {path} is not JSON: {first_line(error)}; give a model's config.json") from error
    if not isinstance(found, dict):
        raise LongspanError(f"{flag} {path} holds {spell(found)}, not an object; give a model's config.json")


def check_weights(name: str, info: dict[str, Any]) -> None:
    """Refuse a model that lacks weights, and name those it has no place for: transformers makes up the one, at random,
    and leaves the other aside.

    Args:
        name: what was loaded, for messages.
        info: what `from_pretrained(..., output_loading_info=True)` says.

    Raises:
        LongspanError: naming the first that are missing.
    """
    missing, strange = sorted(map(str, info["missing_keys"])), sorted(map(str, info["unexpected_keys"]))
    if missing:
        raise LongspanError(
            f"{name} lacks {len(missing)} weights that a model of its config has, they would be random: "
            f"{_some(missing)}; give a folder that holds all of them"
        )
    if strange and launch.is_first_rank():
        warnings.warn(
            f"{name} holds {len(strange)} weights that its config has no place for; they are left aside: "
            f"{_some(strange)}",
            stacklevel=3,
        )


def _some(names: list[str], count: int = 4) -> str:
    return ", ".join(names[:count]) + (", ..." if len(names) > count else "")


def first_line(error: BaseException) -> str:
    """An error of a library in one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
