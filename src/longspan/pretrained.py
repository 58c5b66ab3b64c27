"""A Hugging Face config as the jobs and the model integration read it. Needs no torch until a config is opened."""

from __future__ import annotations

from typing import Any

from longspan.errors import LongspanError


def read_model_config(flag: str, name: str, context: int) -> Any:
    """The Hugging Face config of a model, by name, folder or file.

    Args:
        flag: the option that named it, for messages.
        name: what `AutoConfig.from_pretrained` takes.
        context: tokens of the sequences it is for.

    Raises:
        LongspanError: if there is none, or its position range is shorter than the context.
    """
    from transformers import AutoConfig

    try:
        found = AutoConfig.from_pretrained(name)
    except Exception as error:
        raise LongspanError(f"{flag} {name}: no model config can be read there: {first_line(error)}") from error
    limit = position_range(found)
    if limit is not None and context > limit:
        raise LongspanError(
            f"--context {context} is longer than the {limit} positions of {flag} {name} (max_position_embeddings); "
            f"give --context {limit} or less, or a config with RoPE scaling and a larger max_position_embeddings"
        )
    return found


def position_range(config: Any) -> int | None:
    """How many positions a model knows; None where it does not say, or its RoPE grows with the length ("dynamic")."""
    text = config.get_text_config()
    limit: int | None = getattr(text, "max_position_embeddings", None)
    rope = getattr(text, "rope_parameters", None) or {}
    return None if rope.get("rope_type") == "dynamic" else limit


def first_line(error: BaseException) -> str:
    """An error of a library in one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
