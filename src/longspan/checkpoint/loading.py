"""Load a checkpoint, on the mesh that saved it or on another. Only a verified checkpoint is read."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors

from longspan.checkpoint.damage import Checkpoint, newest_undamaged, read_verified
from longspan.checkpoint.folder import MARKER, SHARDS, step_of
from longspan.checkpoint.ranks import Ranks, check_finite, short_name
from longspan.comm.arguments import check_module, check_optimizer
from longspan.compat.torch_api import NO_GROUP_WARNING
from longspan.compat.torch_checkpoint import as_plain, flat_names
from longspan.core.errors import LongspanError
from longspan.core.validation import as_path
from longspan.hf.weights.quantized import split_state


def load(checkpoint: Checkpoint | Path | str, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Read weights and optimizer state in place, on this mesh or another, sharded by FSDP or not. Collective.

    Args:
        checkpoint: from a function of `damage.py`, or the path of one, or of a run's folder: then the newest undamaged
            one. It is verified here unless it is already.
        model: its weights are replaced.
        optimizer: of the model; its state is replaced, and the options of its groups, if these have the same weights.

    Raises:
        LongspanError: on every rank, if the checkpoint is damaged or of another model.
    """
    checkpoint = _verified(checkpoint, model, optimizer)  # first: `get_state_dict` creates the state of a new optimizer
    optimizer_state: Any
    model_state, optimizer_state = get_state_dict(model, optimizer)
    model_state, packed = split_state(model, model_state)
    _read(checkpoint, flat_names({"model": model_state, "optimizer": as_plain(optimizer_state)["state"]}))
    for name, states in optimizer_state["state"].items():  # what is no tensor
        for key in states:
            states[key] = checkpoint.values["others"].get(f"optimizer.{name}.{key}", states[key])
    set_state_dict(model, optimizer, model_state_dict=model_state | packed, optim_state_dict=optimizer_state)
    saved = checkpoint.values["groups"]
    if [group["params"] for group in saved] == [group["params"] for group in optimizer_state["param_groups"]]:
        for group, options in zip(optimizer.param_groups, saved, strict=True):
            group.update({k: _like(group.get(k), value) for k, value in options.items() if k != "params"})


def _like(now: Any, saved: Any) -> Any:
    """Return an option of a group as JSON has kept it, as a tuple or a tensor if it is one."""
    if isinstance(now, Tensor):
        return torch.full_like(now, saved)
    return tuple(saved) if isinstance(saved, list) else saved


def load_weights(checkpoint: Checkpoint | Path | str, model: torch.nn.Module) -> None:
    """Read the weights only, in the dtypes of `model`; no optimizer is needed.

    Collective. Arguments are as in `load`.
    """
    checkpoint = _verified(checkpoint, model)
    model_state, packed = split_state(model, get_model_state_dict(model))
    tensors = _read(checkpoint, flat_names({"model": model_state}))
    check_finite(tensors, f"checkpoint {checkpoint.path} cannot be used", Ranks(), "use an older one")
    set_model_state_dict(model, model_state | packed)


def _verified(checkpoint: Checkpoint | Path | str, model: Any, *optimizers: Any) -> Checkpoint:
    def check() -> Checkpoint | Path:
        check_module("model", model)
        for optimizer in optimizers:
            check_optimizer("optimizer", optimizer)
        return checkpoint if isinstance(checkpoint, Checkpoint) else as_path("checkpoint", checkpoint).absolute()

    path = Ranks().each(check)
    if isinstance(path, Checkpoint):
        return path if path.verified else read_verified(path.path)
    if step_of(path) is not None or Ranks().first((path / MARKER).is_file):
        return read_verified(path)
    found, problems = newest_undamaged(path)
    if found is None:
        raise LongspanError(
            "; ".join([f"{path} holds no checkpoint; give a checkpoint, or the folder that holds a run's", *problems])
        )
    for problem in problems:
        warnings.warn(f"passed over a damaged checkpoint: {problem}", stacklevel=4)
    return found


def _read(checkpoint: Checkpoint, flat: dict[str, Any]) -> dict[str, Tensor]:
    """Fill the tensors in place, and return them. Collective."""
    tensors = {name: x for name, x in flat.items() if isinstance(x, Tensor)}
    reader, ranks = HuggingFaceStorageReader(str(checkpoint.path / SHARDS)), Ranks()

    def check() -> None:
        saved = {name: tuple(entry.size) for name, entry in reader.read_metadata().state_dict_metadata.items()}  # type: ignore[union-attr]
        check_names(checkpoint.path, {name: tuple(x.shape) for name, x in tensors.items()}, saved)

    ranks.each(check)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=NO_GROUP_WARNING)
            load_tensors(tensors, storage_reader=reader, process_group=ranks.group, no_dist=ranks.size == 1)
    except (Exception, CheckpointException) as error:
        raise LongspanError(f"checkpoint {checkpoint.path} cannot be read: {error}") from error
    return tensors


def check_names(path: Path, mine: dict[str, tuple[int, ...]], saved: dict[str, tuple[int, ...]]) -> None:
    """Raise unless the checkpoint has the names and shapes of a model; name the first that differs."""
    parts = {name.partition(".")[0] for name in mine}
    saved = {name: shape for name, shape in saved.items() if name.partition(".")[0] in parts}
    fix = "use the model, the settings and the torch it was made with, or start anew"
    for name, shape in mine.items():
        if saved.get(name) == shape:
            continue
        if _has_other_bits(name, saved):
            raise LongspanError(
                f"checkpoint {path} is of another optimizer: {short_name(name)} has 8 or 4 bits a value in one of the "
                f"two only; use the optimizer it was made with, and for few bits a mesh on which each rank's shard of "
                f"a weight has a multiple of 256 values"
            )
        kind = "model" if name.startswith("model.") else "optimizer"
        saved_shape = f"there it has the shape {saved[name]}" if name in saved else "it has none of this name"
        raise LongspanError(
            f"checkpoint {path} is of another {kind}: {short_name(name)} has the shape {shape}, {saved_shape}; {fix}"
        )
    extra = sorted(saved.keys() - mine.keys())
    if extra:
        raise LongspanError(
            f"checkpoint {path} is of another model: this model lacks {len(extra)} of its tensors, "
            f"{short_name(extra[0])} of the shape {saved[extra[0]]} among them; {fix}"
        )


def _has_other_bits(name: str, shapes: dict[str, tuple[int, ...]]) -> bool:
    """Return whether an optimizer state is saved in another form: values, or codes and scales of 8 or 4 bits."""
    return f"{name}.codes" in shapes or (
        name.endswith((".codes", ".scale")) and (name in shapes or name.rpartition(".")[0] in shapes)
    )
