"""What a checkpoint's marker keeps of the run that made it: compared key by key, and the model's config made from it.

`longspan train` writes it (`state["identity"]`); whoever reads a checkpoint compares with it.
"""

from __future__ import annotations

import json
from typing import Any

from longspan.checkpoint.folder import Checkpoint
from longspan.core.errors import LongspanError
from longspan.hf.pretrained import first_line

#: Of a model's config: what does not change what the model computes.
_BESIDE = {
    "transformers_version",
    "_name_or_path",
    "name_or_path",
    "dtype",
    "torch_dtype",
    "use_cache",
    "architectures",
}
#: Which library wrote the model's config: keys that only one version knows are not compared with another one's.
_LIBRARY = "transformers"
#: Differences that are named; of the rest their number.
_NAMED = 6


def model_identity(model_config: Any) -> dict[str, Any]:
    """What a Hugging Face config says of what the model computes, and which transformers says so. Plain JSON values."""
    import transformers

    values = {name: value for name, value in model_config.to_dict().items() if name not in _BESIDE}
    plain: dict[str, Any] = json.loads(json.dumps({"model": values, _LIBRARY: transformers.__version__}, default=str))
    return plain


def differences(before: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What differs, by dotted key: (as it was, as it is); None for what is not there."""
    old, new = flat(before), flat(now)
    same_library = old.get(_LIBRARY) == new.get(_LIBRARY)
    found = {}
    for name in sorted((old.keys() | new.keys()) - {_LIBRARY}):
        both = name in old and name in new
        if old.get(name) != new.get(name) and (both or same_library or not name.startswith("model.")):
            found[name] = (old.get(name), new.get(name))
    return found


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values by dotted key."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found.update(flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value})
    return found


def kept_model(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """The part of the kept identity that `model_identity` makes; None where `longspan train` did not write it."""
    identity = checkpoint.state.get("identity") if isinstance(checkpoint.state, dict) else None
    model = identity.get("model") if isinstance(identity, dict) else None
    if not isinstance(identity, dict) or not isinstance(model, dict) or not isinstance(model.get("model_type"), str):
        return None
    return {"model": model, _LIBRARY: identity.get(_LIBRARY)}


def kept_model_config(checkpoint: Checkpoint) -> Any:
    """The Hugging Face config that the run was made with, from what the marker keeps. No code but transformers' own.

    Raises:
        LongspanError: if the marker keeps none, or this version of transformers makes another config of it.
    """
    kept = kept_model(checkpoint)
    own = "give the config.json that the run was made from: --config FILE"
    if kept is None:
        raise LongspanError(
            f"checkpoint {checkpoint.path} keeps no model config, so `longspan train` did not write it; {own}"
        )
    from transformers import CONFIG_MAPPING

    name = kept["model"]["model_type"]
    try:
        found = CONFIG_MAPPING[name].from_dict(dict(kept["model"]))
        changed = differences(kept, model_identity(found))
    except Exception as error:
        raise LongspanError(
            f"checkpoint {checkpoint.path}: transformers makes no config of the model type {name} that it keeps: "
            f"{type(error).__name__}: {first_line(error)}; {own}"
        ) from error
    if changed:
        raise LongspanError(
            f"checkpoint {checkpoint.path}: transformers does not make the config that it keeps: "
            f"{_format_value(changed)}; {own}"
        )
    return found


def check_same_model(checkpoint: Checkpoint, flag: str, model_config: Any) -> None:
    """Refuse another model's config than the one that the run was made with, where the marker keeps that.

    Args:
        checkpoint: of the run.
        flag: what named the config, for messages.
        model_config: the Hugging Face config.

    Raises:
        LongspanError: with every key that differs.
    """
    kept = kept_model(checkpoint)
    changed = differences(kept, model_identity(model_config)) if kept is not None else {}
    if changed:
        raise LongspanError(
            f"{flag} is of another model than checkpoint {checkpoint.path}: {_format_value(changed)}; give the run's "
            "own, or leave it out"
        )


def _format_value(changed: dict[str, tuple[Any, Any]]) -> str:
    parts = [f"{name} was {before}, is {now}" for name, (before, now) in changed.items()]
    return "; ".join(parts[:_NAMED]) + (f"; and {len(parts) - _NAMED} more" if len(parts) > _NAMED else "")
