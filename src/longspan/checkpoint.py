"""Checkpoints: sharded ones to go on from (torch's Distributed Checkpoint), and a Hugging Face folder to use.

A run's folder holds `checkpoints/step-00000100/`, made under another name and renamed when every rank has written its
part, and there `complete.json`, written last: the step, the place in the data, and the size of every file.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)

from longspan.errors import LongspanError

MARKER = "complete.json"
_NAME = re.compile(r"step-(\d{8})")
_MAKING = "making-"


@dataclass(frozen=True)
class Checkpoint:
    """One complete checkpoint on disk. `state` is what the trainer put beside the tensors."""

    path: Path
    step: int
    state: dict[str, Any]
    files: dict[str, int]

    @classmethod
    def at(cls, path: Path) -> Checkpoint:
        """The checkpoint in a folder, with all its files there and of the right size; their content is not read.

        Raises:
            LongspanError: naming the file that is missing or damaged, and the older checkpoints there are.
        """
        if not path.is_dir():
            raise LongspanError(f"checkpoint {path} does not exist; {_way_out(path)}")
        try:
            marker = json.loads((path / MARKER).read_text())
            found = cls(path, int(marker["step"]), marker["state"], marker["files"])
        except FileNotFoundError:
            raise LongspanError(f"checkpoint {path} is not complete: it has no {MARKER}; {_way_out(path)}") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise LongspanError(f"checkpoint file {path / MARKER} cannot be read: {error}; {_way_out(path)}") from error
        for name, size in found.files.items():
            file = path / name
            here = file.stat().st_size if file.is_file() else None
            if here != size:
                state = "is missing" if here is None else f"has {here} bytes instead of {size}"
                raise LongspanError(f"checkpoint file {file} {state}; {_way_out(path)}")
        return found


def _way_out(path: Path) -> str:
    older = [step for step in complete_steps(path.parent) if step_path(path.parent, step) != path]
    if older:
        return f"resume from an older one: --resume {step_path(path.parent, older[-1])}"
    return "there is no other one beside it; start again with another --out"


def step_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step is."""
    return folder / f"step-{step:08d}"


def complete_steps(folder: Path) -> list[int]:
    """The steps that have a complete checkpoint in a folder, ascending."""
    if not folder.is_dir():
        return []
    matches = [_NAME.fullmatch(path.name) for path in folder.iterdir() if (path / MARKER).is_file()]
    return sorted(int(match[1]) for match in matches if match)


def latest(folder: Path) -> Checkpoint | None:
    """The newest complete checkpoint, or None where there is none.

    Raises:
        LongspanError: if its files are not as they were written; an older one is never taken silently.
    """
    steps = complete_steps(folder)
    return Checkpoint.at(step_path(folder, steps[-1])) if steps else None


def save(
    folder: Path,
    step: int,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    *,
    keep: int = 0,
) -> Path:
    """Write the checkpoint of a step. Collective: every rank of the job calls it.

    Afterwards the newest `keep` ones are kept (0: all), and those of later steps, which a run that went back to an
    older checkpoint has left behind, are removed.

    Raises:
        LongspanError: on every rank, if any rank cannot write; the checkpoints before stay as they are.
    """
    making, path = folder / f"{_MAKING}{step:08d}", step_path(folder, step)

    def prepare() -> None:
        for left in folder.glob(f"{_MAKING}*"):  # by a run that was killed while it saved
            shutil.rmtree(left)
        making.mkdir(parents=True)

    def complete() -> None:
        files = {str(f.relative_to(making)): f.stat().st_size for f in sorted(making.rglob("*")) if f.is_file()}
        marker = {"step": step, "state": state, "files": files}
        (making / MARKER).write_text(json.dumps(marker, indent=1))
        _remove(path)
        making.rename(path)
        _prune(folder, step, keep)

    _on_first_rank(prepare, path)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    try:
        with _one_process_is_fine():
            state_dict_saver.save(
                {"model": model_state, "optimizer": optimizer_state},
                checkpoint_id=making,
                no_dist=not dist.is_initialized(),
            )
    except (Exception, CheckpointException) as error:  # torch's is no Exception
        raise LongspanError(f"checkpoint {path} cannot be written: {_cause(error)}") from error
    _on_first_rank(complete, path)
    return path


def _on_first_rank(action: Callable[[], None], path: Path) -> None:
    """Run `action` on rank 0 while the others wait; if the disk refuses it, every rank raises the same."""
    said: list[str | None] = [None]
    if _rank() == 0:
        try:
            action()
        except OSError as error:
            said = [str(error)]
    if dist.is_initialized():
        dist.broadcast_object_list(said, src=0)
    if said[0] is not None:
        raise LongspanError(f"{path} cannot be written: {said[0]}")


def _prune(folder: Path, step: int, keep: int) -> None:
    steps = complete_steps(folder)
    until = [s for s in steps if s <= step]
    for old in [s for s in steps if s > step] + (until[:-keep] if keep else []):
        _remove(step_path(folder, old))


def _remove(path: Path) -> None:
    if path.exists():
        (path / MARKER).unlink(missing_ok=True)  # first: what is left of it is not complete
        shutil.rmtree(path)


def load(checkpoint: Checkpoint, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Read weights and optimizer state in place, on this mesh or another, sharded by FSDP or not. Collective.

    Raises:
        LongspanError: on every rank, if the checkpoint is of another model or cannot be read.
    """
    model_state, optimizer_state = get_state_dict(model, optimizer)
    whole: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state}
    try:
        _check_shapes(checkpoint.path, whole)
        with _one_process_is_fine():
            state_dict_loader.load(whole, checkpoint_id=checkpoint.path, no_dist=not dist.is_initialized())
    except LongspanError:
        raise
    except (Exception, CheckpointException) as error:
        raise LongspanError(
            f"checkpoint {checkpoint.path} cannot be read: {_cause(error)}; {_way_out(checkpoint.path)}"
        ) from error
    set_state_dict(model, optimizer, model_state_dict=whole["model"], optim_state_dict=whole["optimizer"])


def _check_shapes(path: Path, whole: dict[str, Any]) -> None:
    """Refuse the checkpoint of another model before anything is read."""
    saved = FileSystemReader(path).read_metadata().state_dict_metadata
    for name, tensor in whole["model"].items():
        entry = saved.get(f"model.{name}")
        shape = tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else None
        if shape != tuple(tensor.shape):
            there = "it has none of this name" if shape is None else f"there it has the shape {shape}"
            raise LongspanError(
                f"checkpoint {path} is of another model: {name} has the shape {tuple(tensor.shape)}, {there}; use the "
                "model it was made with, or another --out"
            )


def _cause(error: BaseException) -> str:
    """The first line of what went wrong on the first rank where something did."""
    failures = getattr(error, "failures", None)  # of torch's CheckpointException: by rank
    if failures:
        rank = min(failures)
        return f"rank {rank}: {_cause(failures[rank][0])}"
    return f"{type(error).__name__}: {(str(error).strip() or '?').splitlines()[0]}"


def export(
    folder: Path, model: torch.nn.Module, config: Any, tokenizer: Any, dtype: torch.dtype, generation: Any = None
) -> None:
    """Write the model as a Hugging Face folder (safetensors, config, tokenizer). Collective; rank 0 writes.

    Args:
        folder: replaced if it is there.
        model: as it is trained, sharded or not.
        config: the model's config as it was before `longspan.parallelize`.
        tokenizer: saved beside it.
        dtype: of the weights on disk.
        generation: the model's generation config, if it has one of its own.

    Raises:
        LongspanError: on every rank, if rank 0 cannot write.
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state: dict[str, Any] = get_model_state_dict(model, options=options)

    def write() -> None:
        from transformers import AutoModelForCausalLM

        weights = {name: x.to(dtype) if x.is_floating_point() else x for name, x in state.items()}
        # An untouched model of this config knows its name, its tied weights and nothing of longspan or FSDP.
        with torch.device("meta"):
            plain = AutoModelForCausalLM.from_config(config, dtype=dtype)
        if generation is not None:
            plain.generation_config = generation
        making = folder.with_name(f"{_MAKING}{folder.name}")
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(making)
        plain.save_pretrained(making, state_dict=weights)
        tokenizer.save_pretrained(making)
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(folder)
        making.rename(folder)

    _on_first_rank(write, folder)


@contextlib.contextmanager
def _one_process_is_fine() -> Iterator[None]:
    """Torch warns when it saves or loads without a process group; here that is a run on one device."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
