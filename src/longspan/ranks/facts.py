"""What must be equal on every rank of a command, by its name in errors; `longspan.comm.agree` compares it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

from longspan.core.reading import values


def settings(config: Any, leave_out: Iterable[str] = ()) -> dict[str, Any]:
    """Return the settings of a configuration by flag, without `nproc`, which may differ between machines."""
    return {
        name: value if isinstance(value, (bool, int, float, str, list, tuple, type(None))) else str(value)
        for name, value in values(config).items()
        if name not in {"nproc", *leave_out}
    }


def versions() -> dict[str, str]:
    """Return the versions of the libraries that decide what is computed and sent, and the kind of device."""
    from importlib.metadata import PackageNotFoundError, version

    import torch

    import longspan

    found = {"torch": str(torch.__version__), "longspan": longspan.__version__}
    with contextlib.suppress(PackageNotFoundError):
        found["transformers"] = version("transformers")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return {**{f"version of {name}": number for name, number in found.items()}, "device": device}


def model_facts(model_config: Any) -> dict[str, Any]:
    """Return a Hugging Face config key by key, without the path that it was read from."""
    keys = model_config.to_dict()
    return {f"model config's {key}": value for key, value in sorted(keys.items()) if key != "_name_or_path"}
