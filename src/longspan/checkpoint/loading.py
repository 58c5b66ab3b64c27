"""Load a checkpoint, on the mesh that saved it or on another. Only a verified checkpoint is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from longspan.checkpoint.damage import Checkpoint, newest_verified, read_verified, resume_hint
from longspan.checkpoint.ranks import Ranks, check_finite, check_ranks, checked_on_all, short_name
from longspan.checkpoint.tensors import (
    INDEX,
    IndexReader,
    WeightsOnlyPlanner,
    cause,
    read_index,
    without_group_warning,
)
from longspan.comm.arguments import check_module, check_optimizer
from longspan.compat.torch_checkpoint import as_plain, flat_names
from longspan.core.errors import LongspanError
from longspan.core.validation import as_path, checked_call
from longspan.hf.weights.quantized import split_state


def _check_source(name: str, checkpoint: Any) -> Any:
    return checkpoint if isinstance(checkpoint, Checkpoint) else as_path(name, checkpoint)


@checked_call(
    checked_on_all, checkpoint=_check_source, model=check_module, optimizer=check_optimizer, ranks=check_ranks
)
def load(
    checkpoint: Checkpoint | Path | str,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    ranks: Ranks | None = None,
) -> None:
    """Read weights and optimizer state in place, on this mesh or another, sharded by FSDP or not. Collective.

    Args:
        checkpoint: from a function of `damage.py`, or a path as `newest_verified` takes it. It is verified here unless
            it is already.
        model: its weights are replaced.
        optimizer: of the model; its state is replaced, and the options of its groups, if these have the same weights.
        ranks: the ranks that take part; by default all of the job.

    Raises:
        LongspanError: on every rank, if the checkpoint is damaged or of another model.
    """
    ranks = ranks or Ranks()
    checkpoint = _verified(checkpoint, ranks)  # first: `get_state_dict` creates the state of a new optimizer
    options = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    model_state, optimizer_state = get_state_dict(model, optimizer)
    model_state, packed = split_state(model, model_state)
    groups = _members(optimizer_state)
    parts: dict[str, Any] = {"model": model_state, "optimizer": as_plain(optimizer_state)}
    _read(checkpoint, parts, ranks)
    optimizer_state = _with_low_bit_states(optimizer_state, parts["optimizer"])
    regrouped = _members(optimizer_state) != groups
    set_state_dict(model, optimizer, model_state_dict=parts["model"] | packed, optim_state_dict=optimizer_state)
    # torch gives options to the wrong groups if weights changed theirs, and none to groups without weights.
    for group, own in zip(optimizer.param_groups, options, strict=True):
        group.update(own if regrouped else {k: v for k, v in own.items() if k not in group})


def _members(optimizer_state: dict[str, Any]) -> list[list[str]]:
    return [list(group["params"]) for group in optimizer_state["param_groups"]]


def _with_low_bit_states(state: Any, read: Any) -> Any:
    """Return the values that were read, but low-bit tensors of `state`: their codes and scales were read in place."""
    if isinstance(state, dict) and isinstance(read, dict):
        return {key: _with_low_bit_states(state[key], value) if key in state else value for key, value in read.items()}
    return state if isinstance(read, dict) else read


@checked_call(checked_on_all, checkpoint=_check_source, model=check_module, ranks=check_ranks)
def load_weights(checkpoint: Checkpoint | Path | str, model: torch.nn.Module, ranks: Ranks | None = None) -> None:
    """Read the weights only, in the dtypes of `model`; no optimizer is needed.

    Collective. Arguments are as in `load`.
    """
    ranks = ranks or Ranks()
    checkpoint = _verified(checkpoint, ranks)
    model_state, packed = split_state(model, get_model_state_dict(model))
    parts: dict[str, Any] = {"model": model_state}
    _read(checkpoint, parts, ranks)
    check_finite(flat_names(parts), f"checkpoint {checkpoint.path} cannot be used", ranks, "use an older one")
    set_model_state_dict(model, parts["model"] | packed)


def _verified(checkpoint: Checkpoint | Path | str, ranks: Ranks) -> Checkpoint:
    if not isinstance(checkpoint, Checkpoint):
        return newest_verified(Path(checkpoint), ranks, "checkpoint")
    return checkpoint if checkpoint.verified else read_verified(checkpoint.path, ranks)


def _read(checkpoint: Checkpoint, parts: dict[str, Any], ranks: Ranks) -> None:
    """Fill the given parts ("model", "optimizer") in place. Collective."""
    sizes = {name: record.size for name, record in checkpoint.files.items()}

    def check() -> Metadata:
        metadata = read_index((checkpoint.path / INDEX).read_text(), sizes)
        check_names(checkpoint.path, flat_names(parts), metadata, tuple(parts))
        return metadata

    metadata = ranks.each(check)
    try:
        with without_group_warning():
            state_dict_loader.load(
                parts,
                storage_reader=IndexReader(checkpoint.path, metadata),
                planner=WeightsOnlyPlanner(),
                process_group=ranks.group,
                no_dist=ranks.size == 1,
            )
    except (Exception, CheckpointException) as error:
        hint = ranks.first(lambda: resume_hint(checkpoint.path))
        raise LongspanError(f"checkpoint {checkpoint.path} cannot be read: {cause(error)}; {hint}") from error


def check_names(path: Path, tensors: dict[str, Any], metadata: Metadata, parts: tuple[str, ...]) -> None:
    """Raise unless the checkpoint's `parts` have the names and shapes of `tensors`; name the first that differs."""
    saved = {k: e for k, e in metadata.state_dict_metadata.items() if k.partition(".")[0] in parts}
    shapes = {name: tuple(e.size) for name, e in saved.items() if isinstance(e, TensorStorageMetadata)}
    mine = {name: tuple(x.shape) for name, x in tensors.items() if isinstance(x, Tensor)}
    fix = "use the model, the settings and the torch it was made with, or another --out"
    for name, shape in mine.items():
        if shapes.get(name) == shape:
            continue
        if _has_other_bits(name, shapes):
            raise LongspanError(
                f"checkpoint {path} is of another optimizer: {short_name(name)} has 8 or 4 bits a value in one of the "
                f"two only; use the --optimizer it was made with, and for few bits a mesh on which each rank's shard "
                f"of a weight has a multiple of 256 values"
            )
        saved_shape = f"there it has the shape {shapes[name]}" if name in shapes else "it has none of this name"
        raise LongspanError(
            f"checkpoint {path} is of another model: {short_name(name)} has the shape {shape}, {saved_shape}; {fix}"
        )
    extra = sorted(shapes.keys() - mine.keys())
    if extra:
        raise LongspanError(
            f"checkpoint {path} is of another model: this model lacks {len(extra)} of its tensors, "
            f"{short_name(extra[0])} of the shape {shapes[extra[0]]} among them; {fix}"
        )
    missing = sorted(tensors.keys() - saved.keys())
    if missing:
        raise LongspanError(f"checkpoint {path} is of another optimizer: it has no {missing[0]}; {fix}")


def _has_other_bits(name: str, shapes: dict[str, tuple[int, ...]]) -> bool:
    """Return whether an optimizer state is saved in another form: values, or codes and scales of 8 or 4 bits."""
    return f"{name}.codes" in shapes or (
        name.endswith((".codes", ".scale")) and (name in shapes or name.rpartition(".")[0] in shapes)
    )
