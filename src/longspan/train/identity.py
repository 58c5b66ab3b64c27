"""What a run and the checkpoint that it goes on from must have in common, and how they differ."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from longspan.checkpoint import Checkpoint
from longspan.checkpoint.identity import model_identity
from longspan.core.sections import values
from longspan.data import DocumentSource
from longspan.train.config import TrainConfig

_SAMPLE = 64 << 10
_MOST_FILES = 1024
#: Files that are named; of the rest their number.
_NAMED = 6
_LONGEST = 100  # characters of a value that are shown
_SETTINGS = (
    "lr", "schedule", "warmup", "steps", "weight_decay", "betas", "clip", "optimizer", "dtype", "grad_dtype", "context",
    "wire_dtype",
)  # fmt: skip
#: The one key that may change when the user says so.
BATCH = "batch"


def run_identity(config: TrainConfig, model_config: Any, tokenizer: Any, source: DocumentSource) -> dict[str, Any]:
    """Plain values, to be kept in checkpoints.

    Args:
        config: of the run.
        model_config: the Hugging Face config.
        tokenizer: the Hugging Face tokenizer.
        source: the documents. Of files, beside names and sizes, samples of their content are kept.
    """
    sampled = sample_files(source.files)
    whole = {
        **source.identity,
        **({"data": [[*entry, sampled.get(entry[0])] for entry in source.identity["data"]]} if sampled else {}),
        "pack": config.data.pack,
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


def sample_files(files: Mapping[str, Path]) -> dict[str, str]:
    """A checksum of the beginning, middle and end of every file (of 1,024 of them, where there are more), by name.

    With the files' names and sizes, which `DocumentSource.identity` has, it notices text that was changed in place;
    reading all of it would take as long as the training.
    """
    sampled = {}
    for name in sorted(files)[:: -(-len(files) // _MOST_FILES) or 1]:
        crc, size = 0, files[name].stat().st_size
        with files[name].open("rb") as opened:
            for start in sorted({0, max(0, size // 2 - _SAMPLE // 2), max(0, size - _SAMPLE)}):
                opened.seek(start)
                crc = zlib.crc32(opened.read(_SAMPLE), crc)
        sampled[name] = f"{crc:08x}"
    return sampled


# ---------------------------------------------------------------------------------------------------------------------
# What is said of a run that goes on.


def format_change(data: str, name: str, before: Any, now: Any) -> str:
    """One difference between a checkpoint's identity and this run's; of the data's files, those that differ."""
    if name == "data" and all(isinstance(entry, list) and len(entry) == 3 for entry in [*(before or []), *(now or [])]):
        return f"the files of --data {data} differ: {_spell_files(before, now)}"
    return f"{name} was {_cut(before)}, is {_cut(now)}"


def _cut(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _spell_files(before: list[Any], now: list[Any]) -> str:
    old, new = ({name: (size, crc) for name, size, crc in files} for files in (before, now))
    changed = []
    for name in sorted(old.keys() & new.keys()):
        (was, crc), (size, other) = old[name], new[name]
        if was != size:
            changed.append(f"{name} ({was:,} bytes then, {size:,} now)")
        elif crc != other and crc is not None and other is not None:
            changed.append(f"{name} (as long, with other text)")
    kinds = {"new": sorted(new.keys() - old.keys()), "gone": sorted(old.keys() - new.keys()), "changed": changed}
    return "; ".join(f"{kind}: {_some(names)}" for kind, names in kinds.items() if names) or "their order"


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def settings_of(config: TrainConfig) -> dict[str, Any]:
    """What may change where a run goes on, and changes the numbers. Plain values, to be kept in checkpoints."""
    every = values(config)
    return {name: json.loads(json.dumps(every[name])) for name in _SETTINGS}


def changed_settings(resume: Checkpoint, config: TrainConfig) -> str | None:
    """One line that names every setting that is not as it was before, with both values; None if there is none."""
    before, now = resume.state.get("settings"), settings_of(config)
    if not isinstance(before, dict):
        return None
    parts = [
        f"{name} was {_format_value(before[name])}, is {_format_value(value)}"
        for name, value in now.items()
        if name in before
        and before[name] != value
        and not (name == "steps" and config.optimizer.schedule == "constant")
    ]
    return f"{', '.join(parts)} from step {resume.step + 1} on" if parts else None


def _format_value(value: Any) -> str:
    """3e-4 and not 0.0003, as a rate is written."""
    if not isinstance(value, float) or not 0 < abs(value) < 1e-3:
        return f"{value:g}" if isinstance(value, float) else str(value)
    digits, power = f"{value:.6e}".split("e")
    return f"{float(digits):g}e{int(power)}"
