"""Compare a run with the one that wrote a checkpoint, key by key, and make the model's config from a checkpoint.

`longspan train` saves its identity in the marker (`state["identity"]`).
"""

from __future__ import annotations

import json
from typing import Any

from longspan.checkpoint.damage import Checkpoint
from longspan.core.errors import LongspanError
from longspan.core.formatting import listed
from longspan.hf.pretrained import first_line

_IRRELEVANT = {
    "transformers_version",
    "_name_or_path",
    "name_or_path",
    "dtype",
    "torch_dtype",
    "use_cache",
    "architectures",
}
"""Keys of a model's config that do not change what the model computes."""

_LIBRARY = "transformers"
"""The version that wrote the config. Keys that only one version knows are not compared with another version's."""


def model_identity(model_config: Any) -> dict[str, Any]:
    """Return what a Hugging Face config says of the model's computation, and transformers' version, as JSON values."""
    import transformers

    values = {name: value for name, value in model_config.to_dict().items() if name not in _IRRELEVANT}
    plain: dict[str, Any] = json.loads(json.dumps({"model": values, _LIBRARY: transformers.__version__}, default=str))
    return plain


def differences(before: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return (value before, value now) of each dotted key that differs; None for a missing one."""
    old, new = flat(before), flat(now)
    same_library = old.get(_LIBRARY) == new.get(_LIBRARY)
    changed = {}
    for name in sorted((old.keys() | new.keys()) - {_LIBRARY}):
        comparable = (name in old and name in new) or same_library or not name.startswith("model.")
        if comparable and old.get(name) != new.get(name):
            changed[name] = (old.get(name), new.get(name))
    return changed


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values by dotted key."""
    by_key: dict[str, Any] = {}
    for name, value in values.items():
        by_key.update(flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value})
    return by_key


def saved_model_config(checkpoint: Checkpoint) -> Any:
    """Return the Hugging Face config in the marker, or raise if transformers makes another one of it."""
    saved = _saved_identity(checkpoint)
    fix = "give the config.json that the run was made from: --config FILE"
    if saved is None:
        raise LongspanError(
            f"checkpoint {checkpoint.path} has no model config, so `longspan train` did not write it; {fix}"
        )
    from transformers import CONFIG_MAPPING

    name = saved["model"]["model_type"]
    try:
        config = CONFIG_MAPPING[name].from_dict(dict(saved["model"]))
        changed = differences(saved, model_identity(config))
    except Exception as error:
        raise LongspanError(
            f"checkpoint {checkpoint.path}: transformers makes no config of the saved model type {name}: "
            f"{type(error).__name__}: {first_line(error)}; {fix}"
        ) from error
    if changed:
        raise LongspanError(
            f"checkpoint {checkpoint.path}: transformers does not make the saved config: {_listed(changed)}; {fix}"
        )
    return config


def check_same_model(checkpoint: Checkpoint, flag: str, model_config: Any) -> None:
    """Raise if `flag` named another model's Hugging Face config than the one in the marker, if that has one."""
    saved = _saved_identity(checkpoint)
    changed = differences(saved, model_identity(model_config)) if saved is not None else {}
    if changed:
        raise LongspanError(
            f"{flag} is of another model than checkpoint {checkpoint.path}: {_listed(changed)}; give the run's "
            "own, or leave it out"
        )


def _saved_identity(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """Return what `model_identity` made for the run; None if `longspan train` did not write the checkpoint."""
    identity = checkpoint.state.get("identity") if isinstance(checkpoint.state, dict) else None
    model = identity.get("model") if isinstance(identity, dict) else None
    if not isinstance(identity, dict) or not isinstance(model, dict) or not isinstance(model.get("model_type"), str):
        return None
    return {"model": model, _LIBRARY: identity.get(_LIBRARY)}


def _listed(changed: dict[str, tuple[Any, Any]]) -> str:
    parts = [f"{name} was {before}, is {now}" for name, (before, now) in changed.items()]
    return listed(parts, 6)
