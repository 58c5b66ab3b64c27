"""What a run and the checkpoint that it goes on from must have in common, and how they differ."""

from __future__ import annotations

import hashlib
import json
import zlib
from pathlib import Path
from typing import Any

from longspan.checkpoint.identity import model_identity
from longspan.train.config import TrainConfig

_SAMPLE = 64 << 10
_MOST_FILES = 1024
#: The one key that may change when the user says so.
BATCH = "batch"


def run_identity(config: TrainConfig, model_config: Any, tokenizer: Any, data: dict[str, Any]) -> dict[str, Any]:
    """Plain values, to be kept in checkpoints.

    Args:
        config: of the run.
        model_config: the Hugging Face config.
        tokenizer: the Hugging Face tokenizer.
        data: what the order of the documents depends on (`DocumentSource.identity`).
    """
    whole = {
        **data,
        "text": sample_files(config.data),
        "pack": config.pack,
        BATCH: config.sequences,
        "tokenizer": describe_tokenizer(tokenizer),
        **model_identity(model_config),
    }
    plain: dict[str, Any] = json.loads(json.dumps(whole, default=str))
    return plain


def describe_tokenizer(tokenizer: Any) -> dict[str, Any]:
    """Its class, its size, and a digest of what it does: vocabulary, special tokens, and a fast one's rules."""
    rules: dict[str, Any] = {"vocabulary": sorted(tokenizer.get_vocab().items())}
    rules["special"] = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    if getattr(tokenizer, "is_fast", False):
        backend = json.loads(tokenizer.backend_tokenizer.to_str())
        rules["backend"] = {k: v for k, v in backend.items() if k not in ("version", "truncation", "padding")}
    digest = hashlib.sha256(json.dumps(rules, sort_keys=True).encode()).hexdigest()[:16]
    return {"class": type(tokenizer).__name__, "size": len(tokenizer), "content": digest}


def sample_files(data: str) -> str | None:
    """A checksum of the beginning, middle and end of every file (of 1,024 of them, where there are more).

    With the files' names and sizes, which `DocumentSource.identity` has, it notices text that was changed in place;
    reading all of it would take as long as the training. None for what is no local file.
    """
    path = Path(data).expanduser()
    if not path.exists():
        return None
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    crc = 0
    for file in files[:: -(-len(files) // _MOST_FILES) or 1]:
        size = file.stat().st_size
        with file.open("rb") as opened:
            for start in sorted({0, max(0, size // 2 - _SAMPLE // 2), max(0, size - _SAMPLE)}):
                opened.seek(start)
                crc = zlib.crc32(opened.read(_SAMPLE), crc)
    return f"{crc:08x}"
