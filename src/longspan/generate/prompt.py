"""The text that a command was given, as token ids; what cannot be run is refused before any weight is loaded."""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from longspan.core.errors import LongspanError
from longspan.data import BYTES, TextTokenizer, load_tokenizer
from longspan.hf.pretrained import (
    base_of,
    check_language_model,
    has_tokenizer,
    position_range,
    read_model_config,
    tokenizer_of,
)
from longspan.ranks import launch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from longspan.generate.config import GenerateConfig, ModelFlags


@dataclass(frozen=True)
class Prompt:
    """What is run.

    Attributes:
        model_config: the Hugging Face config.
        ids: the token ids, int64 [S].
        text_tokens: how many of the first tokens belong to the text, whatever the question.
        key: name of the cache of these tokens in `--cache-dir`; "" without that option.
    """

    model_config: Any
    ids: NDArray[np.int64]
    text_tokens: int = 0
    key: str = ""

    @property
    def tokens(self) -> int:
        """How many."""
        return len(self.ids)


def tokenizer_name(config: ModelFlags) -> str:
    """The tokenizer that is used."""
    if config.tokenizer is not None:
        return config.tokenizer
    name = tokenizer_of("--model", config.model)
    return name if has_tokenizer(name) else BYTES


def read_given(text: str | None, file: Path | None, flag: str) -> str:
    """The text of a flag, a file, or stdin.

    Args:
        text: that was given.
        file: to read it from.
        flag: of `text`, for messages.

    Raises:
        LongspanError: where there is none, or it is no UTF-8.
    """
    if text is not None:
        return text
    if file is None and launch.started_elsewhere():
        raise LongspanError(f"ranks that torchrun has started have no common stdin; give {flag} or --file")
    if file is None and sys.stdin.isatty():
        raise LongspanError(f"there is no text; give {flag} TEXT or --file FILE, or pipe it in")
    where = "stdin" if file is None else f"--file {file}"
    try:
        found = sys.stdin.buffer.read() if file is None else file.read_bytes()
        decoded = found.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise LongspanError(f"{where} cannot be read: it is no UTF-8 text ({error}); save it as UTF-8") from error
    except OSError as error:
        raise LongspanError(f"{where} cannot be read: {error.strerror or error}") from error
    if not decoded:
        raise LongspanError(f"{where} is empty; give a text")
    return decoded


def open_prompt(config: GenerateConfig) -> Prompt:
    """The prompt that a `GenerateConfig` gives; no weights are loaded.

    Raises:
        LongspanError: for a missing or unfit model, tokenizer or text, and for more tokens than the model has
            positions.
    """
    model_config, _ = read_model_config("--model", config.model, 1)
    tokenizer = load_tokenizer(tokenizer_name(config))
    text = read_given(config.prompt, config.file, "--prompt")
    if config.question is not None:
        text = f"{text.rstrip()}\n\n{config.question}"
    ids = _encoded(config, tokenizer, text)
    check_ids(config, model_config, ids)
    fit_positions(config, model_config, len(ids), config.max_new_tokens)
    if config.cache_dir is None:
        return Prompt(model_config, ids)
    other = _encoded(config, tokenizer, text if config.question is None else f"{text.removesuffix(config.question)}?")
    length = min(len(ids) - 1, len(other))  # one token is left to compute, for the first new one
    differs = np.flatnonzero(ids[:length] != other[:length])
    kept = int(differs[0]) if len(differs) else length
    return Prompt(model_config, ids, kept, _cache_key(config, model_config, ids[:kept]))


def _cache_key(config: GenerateConfig, model_config: Any, ids: NDArray[np.int64]) -> str:
    """Return a digest of what keys and values depend on: tokens, config, files, dtypes, transformers' version."""
    import transformers

    names = {config.model, base_of("--model", config.model)}
    files = [
        (path.name, path.stat().st_size, path.stat().st_mtime_ns)
        for name in sorted(names)
        for path in sorted(Path(name).glob("*"))
        if path.suffix in (".safetensors", ".bin", ".json")
    ]
    facts = [sorted(names), files, model_config.to_json_string(), config.dtype, config.cache, transformers.__version__]
    return hashlib.sha256(json.dumps(facts).encode() + ids.tobytes()).hexdigest()[:24]


def _encoded(config: GenerateConfig, tokenizer: Any, text: str) -> NDArray[np.int64]:
    has_one = getattr(tokenizer, "chat_template", None) is not None
    if config.template == "chat" and not has_one:
        raise LongspanError(
            f"--template chat: the tokenizer {tokenizer_name(config)} has no chat template; use --template none"
        )
    if config.template == "none" or not has_one or (config.template == "auto" and config.question is None):
        return text_ids(tokenizer, text)
    message = [{"role": "user", "content": text}]
    written = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(written, add_special_tokens=False, verbose=False)["input_ids"]
    return np.asarray(ids, dtype=np.int64)


def text_ids(tokenizer: Any, text: str) -> NDArray[np.int64]:
    """The ids of a text that does not end: with the token for its beginning where the tokenizer puts one."""
    made = TextTokenizer(tokenizer)
    parts = [made.ids(part, first=number == 0, last=False) for number, part in enumerate(made.parts(text))]
    return np.concatenate(parts)


def check_ids(config: ModelFlags, model_config: Any, ids: NDArray[np.int64]) -> None:
    """Refuse ids that the model has no embedding for, and no ids at all.

    Raises:
        LongspanError: with the numbers.
    """
    size = model_config.get_text_config().vocab_size
    if not len(ids):
        raise LongspanError("the text has no tokens; give a longer one")
    if ids.max() >= size:
        raise LongspanError(
            f"tokenizer {tokenizer_name(config)} gives the id {ids.max()}, the model's vocabulary has {size} entries; "
            f"give the model's own with --tokenizer"
        )


def fit_positions(config: ModelFlags, model_config: Any, tokens: int, new: int = 0) -> None:
    """Give the model the RoPE scaling that is asked for, and refuse more tokens than it then knows positions.

    Args:
        config: names the model, and the scaling.
        model_config: its Hugging Face config; changed in place where a scaling is taken.
        tokens: of the text.
        new: that are generated behind them.

    Raises:
        LongspanError: with the numbers and the way out.
    """
    rope = config.rope()
    if rope.scaling != "as-is":
        check_language_model(f"--model {config.model}", model_config, tokens + new, rope)
    limit = position_range(model_config)
    if limit is None or tokens + new <= limit:
        return
    if new and tokens < limit:
        raise LongspanError(
            f"--max-new-tokens {new} behind the {tokens:,} tokens of the prompt are more than the {limit:,} positions "
            f"of --model {config.model} (max_position_embeddings); give --max-new-tokens {limit - tokens} or less"
            f"{_rope_hint(model_config, tokens + new, limit)}"
        )
    raise LongspanError(
        f"the text has {tokens:,} tokens, --model {config.model} has {limit:,} positions (max_position_embeddings); "
        f"give a shorter text{_rope_hint(model_config, tokens + new, limit)}"
    )


def _rope_hint(model_config: Any, wanted: int, limit: int) -> str:
    """How a model with rotary positions reaches further."""
    rope = getattr(model_config.get_text_config(), "rope_parameters", None)
    if not isinstance(rope, dict):
        return ""
    return f", or extend its rotary positions: --rope-scaling auto (a factor of {-(-wanted // limit)})"
