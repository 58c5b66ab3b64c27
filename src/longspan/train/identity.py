"""What a run and the checkpoint that it resumes from must have in common, and how they differ."""

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

_SAMPLE_BYTES = 64 << 10
_MOST_SAMPLED = 1024  # files
_NAMED = 6  # files in a message; of the rest their number
_LONGEST = 100  # characters of a value in a message
_SETTINGS = (
    "lr", "schedule", "warmup", "steps", "weight_decay", "betas", "clip", "optimizer", "dtype", "grad_dtype", "context",
    "wire_dtype",
)  # fmt: skip
BATCH = "batch"
"""The key of an identity that may change with `--change-batch`."""


def run_identity(config: TrainConfig, model_config: Any, tokenizer: Any, source: DocumentSource) -> dict[str, Any]:
    """Return what a resumed run must have in common with this one, as plain values for its checkpoints."""
    samples = sample_files(source.files)
    identity = {
        **source.identity,
        "pack": config.data.pack,
        BATCH: config.sequences,
        "tokenizer": describe_tokenizer(tokenizer),
        **model_identity(model_config),
    }
    if samples:
        identity["data"] = [[*entry, samples.get(entry[0])] for entry in identity["data"]]
    plain: dict[str, Any] = json.loads(json.dumps(identity, default=str))
    return plain


def describe_tokenizer(tokenizer: Any) -> dict[str, Any]:
    """Return class, size and a digest of a tokenizer's vocabulary, special tokens and, if it is fast, rules."""
    rules: dict[str, Any] = {"vocabulary": sorted(tokenizer.get_vocab().items())}
    rules["special"] = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    if getattr(tokenizer, "is_fast", False):
        backend = json.loads(tokenizer.backend_tokenizer.to_str())
        rules["backend"] = {k: v for k, v in backend.items() if k not in ("version", "truncation", "padding")}
    digest = hashlib.sha256(json.dumps(rules, sort_keys=True).encode()).hexdigest()[:16]
    return {"class": type(tokenizer).__name__, "size": len(tokenizer), "content": digest}


def sample_files(files: Mapping[str, Path]) -> dict[str, str]:
    """Return a checksum of the beginning, middle and end of each file, by name; of many files, sample 1,024.

    Together with names and sizes it detects text that was changed in place, without reading everything.
    """
    samples = {}
    for name in sorted(files)[:: -(-len(files) // _MOST_SAMPLED) or 1]:
        crc, size = 0, files[name].stat().st_size
        with files[name].open("rb") as opened:
            for start in sorted({0, max(0, size // 2 - _SAMPLE_BYTES // 2), max(0, size - _SAMPLE_BYTES)}):
                opened.seek(start)
                crc = zlib.crc32(opened.read(_SAMPLE_BYTES), crc)
        samples[name] = f"{crc:08x}"
    return samples


def settings_of(config: TrainConfig) -> dict[str, Any]:
    """Return the settings that a resumed run may change and that change its numbers, as plain values."""
    given = values(config)
    return {name: json.loads(json.dumps(given[name])) for name in _SETTINGS}


# --- messages


def format_change(data: str, name: str, before: Any, now: Any) -> str:
    """Format one difference between a checkpoint's identity and this run's; of the data, name the changed files."""
    if name == "data" and all(isinstance(entry, list) and len(entry) == 3 for entry in [*(before or []), *(now or [])]):
        return f"the files of --data {data} differ: {_changed_files(before, now)}"
    return f"{name} was {_shortened(before)}, is {_shortened(now)}"


def _shortened(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _changed_files(before: list[Any], now: list[Any]) -> str:
    old, new = ({name: (size, crc) for name, size, crc in files} for files in (before, now))
    changed = []
    for name in sorted(old.keys() & new.keys()):
        (old_size, old_crc), (size, crc) = old[name], new[name]
        if old_size != size:
            changed.append(f"{name} ({old_size:,} bytes then, {size:,} now)")
        elif old_crc != crc and None not in (old_crc, crc):
            changed.append(f"{name} (as long, with other text)")
    kinds = {"new": sorted(new.keys() - old.keys()), "gone": sorted(old.keys() - new.keys()), "changed": changed}
    return "; ".join(f"{kind}: {_listed(names)}" for kind, names in kinds.items() if names) or "their order"


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def changed_settings(resume: Checkpoint, config: TrainConfig) -> str | None:
    """Return a line that names every setting that differs from the checkpoint's, with both values, or None."""
    before, now = resume.state.get("settings"), settings_of(config)
    if not isinstance(before, dict):
        return None
    parts = [
        f"{name} was {before[name]}, is {value}"
        for name, value in now.items()
        if name in before
        and before[name] != value
        and not (name == "steps" and config.optimizer.schedule == "constant")
    ]
    return f"{', '.join(parts)} from step {resume.step + 1} on" if parts else None
