"""Save and load: torch's Distributed Checkpoint between folders that are whole."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

from longspan.checkpoint.choosing import newest, verify
from longspan.checkpoint.disk import DiskFull, check_room, format_disk_full
from longspan.checkpoint.folder import (
    MAKING,
    MARKER,
    Checkpoint,
    FileRecord,
    format_marker,
    prune,
    put_in_place,
    remove,
    remove_or_warn,
    step_path,
    way_out,
    write_durably,
)
from longspan.checkpoint.ranks import Ranks, check_ranks, checked_on_all
from longspan.checkpoint.tensors import INDEX, IndexReader, PlainPlanner, SummingWriter, format_index, read_index
from longspan.comm.arguments import check_module, check_optimizer
from longspan.compat.torch_api import NO_GROUP_WARNING
from longspan.compat.torch_checkpoint import flat_names
from longspan.compat.torchao_api import as_plain
from longspan.core.errors import LongspanError
from longspan.core.system import is_full
from longspan.core.validation import as_path, check_count, checked_call, format_value

_PER_TENSOR = 2048
"""Bytes that torch's files and the index need for a tensor, beside its content, at most."""


def _check_state(name: str, state: Any) -> None:
    if not isinstance(state, dict):
        raise LongspanError(f"`{name}` must be a dict of plain values, {{}} for none, got {format_value(state)}")


def _check_source(name: str, checkpoint: Any) -> Any:
    """Return a `Checkpoint` as it is, or a checked path."""
    return checkpoint if isinstance(checkpoint, Checkpoint) else as_path(name, checkpoint)


@dataclass(frozen=True)
class Pending:
    """A checkpoint that is to be written: where, and what of it this rank holds."""

    folder: Path
    step: int
    tensors: dict[str, Any]
    state: dict[str, Any]
    keep: int
    needed: int

    @property
    def path(self) -> Path:
        return step_path(self.folder, self.step)

    @property
    def making(self) -> Path:
        return self.folder / f"{MAKING}{self.step:08d}"


@checked_call(
    checked_on_all,
    folder=as_path,
    step=check_count,
    model=check_module,
    optimizer=check_optimizer,
    state=_check_state,
    keep=check_count,
)
def save(
    folder: Path | str,
    step: int,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    *,
    keep: int = 0,
) -> Path:
    """Write the checkpoint of a step. Collective: every rank of the job calls it.

    Each file's checksum is taken while it is written; then another rank reads the file back, and only when all are as
    they were written does the checkpoint get its marker and its name. Afterwards the newest `keep` ones are kept (0:
    all), and those of later steps, which a run that went back to an older checkpoint has left behind, are removed; one
    that cannot be removed is warned of.

    Raises:
        DiskFull: on every rank, with the bytes that are missing.
        LongspanError: on every rank, if any rank cannot write, `state` is not JSON, or a weight or the optimizer's
            state is not finite. In both cases what was written is removed, and the checkpoints before stay.
    """
    ranks = Ranks()
    with one_process_is_fine():
        return write(prepare(Path(folder), step, model, optimizer, state, keep, ranks), ranks)


def prepare(
    folder: Path,
    step: int,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    keep: int,
    ranks: Ranks,
) -> Pending:
    """What there is to write, checked: plain values, all numbers finite. Collective.

    Raises:
        LongspanError: on every rank, naming the first tensor that is not finite, or saying what of `state` is not JSON.
    """

    def check_json() -> None:
        try:
            format_marker(step, state, {})
        except (TypeError, ValueError, RecursionError) as error:
            raise LongspanError(f"the state of a checkpoint is kept as JSON, and this one is not: {error}") from error

    ranks.first(check_json)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    tensors: dict[str, Any] = {"model": model_state, "optimizer": as_plain(optimizer_state)}
    flat = flat_names(tensors)
    check_finite(flat, f"checkpoint {step_path(folder, step)} is not written", ranks)
    # Whatever several ranks hold is written once; a DTensor's size is that of the whole.
    whole = sum(x.numel() * x.element_size() for x in flat.values() if isinstance(x, Tensor))
    needed = whole + _PER_TENSOR * len(flat) * ranks.size
    return Pending(folder, step, tensors, state, keep, needed)


def write(pending: Pending, ranks: Ranks) -> Path:
    """Write what `prepare` found. Collective; may run beside the training, on a group of its own.

    Raises:
        LongspanError: as `save`.
    """
    path, making = pending.path, pending.making
    what = f"checkpoint {path}"

    def begin() -> None:
        for left in pending.folder.glob(f"{MAKING}*"):  # by a run that was killed while it saved
            remove_or_warn(left)
        making.mkdir(parents=True)
        check_room(pending.folder, pending.needed, what)

    try:
        ranks.first(begin)
        metadata, parts = _write_tensors(pending, ranks)
        parts[0][INDEX] = ranks.first(lambda: write_durably(making / INDEX, format_index(metadata)))
        _read_back(making, parts, ranks)
        ranks.first(lambda: _complete(pending, _joined(parts)))
    except DiskFull as error:
        why = str(error)
        _clean(making, ranks)  # first: what this one took is free again
        raise DiskFull(ranks.first(lambda: format_disk_full(pending.folder, pending.needed, what, why))) from error
    except LongspanError:
        _clean(making, ranks)
        raise
    return path


def _write_tensors(pending: Pending, ranks: Ranks) -> tuple[Metadata, list[dict[str, FileRecord]]]:
    """torch's metadata, and what each rank has written."""
    writer = SummingWriter(pending.making)
    problem: BaseException | None = None
    metadata = None
    try:
        metadata = state_dict_saver.save(
            pending.tensors, storage_writer=writer, process_group=ranks.group, no_dist=ranks.size == 1
        )
    except CheckpointException as error:  # on every rank alike
        problem = error
    except Exception as error:
        if ranks.size > 1:  # the ranks cannot speak to one another any more
            raise
        problem = error
    if metadata is None:
        _explain(pending.path, writer.files.error, problem, ranks)
    assert metadata is not None
    return metadata, ranks.gather(writer.files.records)


def _explain(path: Path, mine: OSError | None, problem: BaseException | None, ranks: Ranks) -> NoReturn:
    """Say why torch could not write: its own words are of what followed from it."""
    failures = getattr(problem, "failures", {})  # of torch's CheckpointException: by rank
    own = failures.get(ranks.rank, (None,))[0]
    mine = mine or (own if isinstance(own, OSError) else None)
    said = ranks.gather(None if mine is None else (mine.errno, mine.strerror))
    rank = next((rank for rank, error in enumerate(said) if error is not None), None)
    if rank is None:
        raise LongspanError(f"checkpoint {path} cannot be written: {cause(problem)}") from problem
    error = OSError(*said[rank])
    kind = DiskFull if is_full(error) else LongspanError
    raise kind(f"checkpoint {path} cannot be written: rank {rank}: OSError: {error}") from problem


def _joined(parts: list[dict[str, FileRecord]]) -> dict[str, FileRecord]:
    return {name: record for part in parts for name, record in part.items()}


def _read_back(making: Path, parts: list[dict[str, FileRecord]], ranks: Ranks) -> None:
    """Every rank reads what the rank before it has written, and looks whether all files are there."""
    found = Checkpoint(making, 0, {}, _joined(parts))

    def look() -> None:
        problem = found.wrong_size() or found.wrong_content(list(parts[ranks.rank - 1]))
        if problem:
            raise LongspanError(f"{problem}: the disk does not hold what was written, or the ranks do not share it")

    ranks.each(look)


def _complete(pending: Pending, records: dict[str, FileRecord]) -> None:
    write_durably(pending.making / MARKER, format_marker(pending.step, pending.state, records))
    put_in_place(pending.making, pending.path)
    prune(pending.folder, pending.step, pending.keep)


def _clean(making: Path, ranks: Ranks) -> None:
    """Remove what was begun; no rank writes any more when all have raised. What stays is removed by the next save."""
    if ranks.rank == 0:
        with contextlib.suppress(OSError):
            remove(making)


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

    All files are verified first, unless `verify` or `choose` has done so; nothing in them is executed. From a
    run's folder, the newest checkpoint is read. `ranks` are by default those of the job's own group.

    Raises:
        LongspanError: on every rank, if the checkpoint is damaged or of another model.
    """
    ranks = ranks or Ranks()
    checkpoint = _verified(checkpoint, ranks)  # first: torch fills the state of an optimizer that has none
    model_state, optimizer_state = get_state_dict(model, optimizer)
    plain = as_plain(optimizer_state)
    whole: dict[str, Any] = {"model": model_state, "optimizer": plain}
    _read(checkpoint, whole, ranks)
    optimizer_state = _filled(optimizer_state, whole["optimizer"])
    set_state_dict(model, optimizer, model_state_dict=whole["model"], optim_state_dict=optimizer_state)


def _filled(state: Any, read: Any) -> Any:
    """What was read, but for tensors of 8 bits: these were read in place, by their codes and scales."""
    if isinstance(state, dict) and isinstance(read, dict):
        return {key: _filled(state[key], value) if key in state else value for key, value in read.items()}
    return state if isinstance(read, dict) else read


@checked_call(checked_on_all, checkpoint=_check_source, model=check_module, ranks=check_ranks)
def load_weights(checkpoint: Checkpoint | Path | str, model: torch.nn.Module, ranks: Ranks | None = None) -> None:
    """As `load`, of the weights alone: no optimizer is needed, and nothing of its state is read. Collective.

    Weights take the dtype of the model's.

    Raises:
        LongspanError: on every rank, if the checkpoint is damaged or of another model, or a weight is not finite.
    """
    ranks = ranks or Ranks()
    checkpoint = _verified(checkpoint, ranks)
    whole: dict[str, Any] = {"model": get_model_state_dict(model)}
    _read(checkpoint, whole, ranks)
    check_finite(flat_names(whole), f"checkpoint {checkpoint.path} is no good", ranks, hint="take an older one")
    set_model_state_dict(model, whole["model"])


def _verified(checkpoint: Checkpoint | Path | str, ranks: Ranks) -> Checkpoint:
    if not isinstance(checkpoint, Checkpoint):
        return newest(Path(checkpoint), ranks, "checkpoint")
    if checkpoint.verified:
        return checkpoint
    try:
        return verify(checkpoint.path, ranks)
    except LongspanError as error:
        hint = ranks.first(lambda: way_out(checkpoint.path))
        raise LongspanError(f"{error}; {hint}") from error


def _read(checkpoint: Checkpoint, whole: dict[str, Any], ranks: Ranks) -> None:
    """Fill the parts "model" and "optimizer" that are in `whole`, and leave the others alone."""
    sizes = {name: record.size for name, record in checkpoint.files.items()}

    def look() -> Metadata:
        metadata = read_index((checkpoint.path / INDEX).read_text(), sizes)
        check_names(checkpoint.path, flat_names(whole), metadata, tuple(whole))
        return metadata

    metadata = ranks.each(look)
    try:
        with one_process_is_fine():
            state_dict_loader.load(
                whole,
                storage_reader=IndexReader(checkpoint.path, metadata),
                planner=PlainPlanner(),
                process_group=ranks.group,
                no_dist=ranks.size == 1,
            )
    except (Exception, CheckpointException) as error:
        hint = ranks.first(lambda: way_out(checkpoint.path))
        raise LongspanError(f"checkpoint {checkpoint.path} cannot be read: {cause(error)}; {hint}") from error


def check_names(path: Path, flat: dict[str, Any], metadata: Metadata, parts: tuple[str, ...]) -> None:
    """Refuse the checkpoint of another model or optimizer before anything is read: other names or shapes.

    Of the checkpoint, only `parts` ("model", "optimizer") are compared.

    Raises:
        LongspanError: naming the first tensor that differs.
    """
    saved = {k: e for k, e in metadata.state_dict_metadata.items() if k.partition(".")[0] in parts}
    shapes = {name: tuple(e.size) for name, e in saved.items() if isinstance(e, TensorStorageMetadata)}
    mine = {name: tuple(x.shape) for name, x in flat.items() if isinstance(x, Tensor)}
    use = "use the model, the settings and the torch it was made with, or another --out"
    for name, shape in mine.items():
        if shapes.get(name) != shape:
            if _other_bits(name, shapes):
                raise LongspanError(
                    f"checkpoint {path} is of another optimizer: {_short(name)} has 8 bits a value in one of the two "
                    f"only; use the --optimizer it was made with, and for 8 bits a mesh on which each rank's part of a "
                    f"weight is as many whole blocks of 256 values"
                )
            there = f"there it has the shape {shapes[name]}" if name in shapes else "it has none of this name"
            raise LongspanError(
                f"checkpoint {path} is of another model: {_short(name)} has the shape {shape}, {there}; {use}"
            )
    extra = sorted(shapes.keys() - mine.keys())
    if extra:
        raise LongspanError(
            f"checkpoint {path} is of another model: it has {len(extra)} tensors that this one has not, "
            f"{_short(extra[0])} of the shape {shapes[extra[0]]} among them; {use}"
        )
    missing = sorted(flat.keys() - saved.keys())
    if missing:
        raise LongspanError(f"checkpoint {path} is of another optimizer: it has no {missing[0]}; {use}")


def _other_bits(name: str, shapes: dict[str, tuple[int, ...]]) -> bool:
    """Whether a state is there in the other of two forms: its values, or codes of 8 bits and their scales."""
    return f"{name}.codes" in shapes or (name.endswith((".codes", ".scale")) and name.rpartition(".")[0] in shapes)


def _short(name: str) -> str:
    return name.removeprefix("model.") if name.startswith("model.") else f"the optimizer's {name}"


# --- numbers


_KEPT = "what was saved before is kept: go on from it, and if it comes back, with a smaller --lr or a longer --warmup"


def check_finite(flat: dict[str, Any], what: str, ranks: Ranks, hint: str = _KEPT) -> None:
    """Refuse NaN and infinity in weights and optimizer state, on every rank alike. Collective.

    (A buffer may hold infinities, as masks do; NaN it may not.)

    Raises:
        LongspanError: naming the first tensor, the rank that holds it, and how much of it is wrong.
    """
    found = None
    floating = [(name, x) for name, x in flat.items() if isinstance(x, Tensor) and x.is_floating_point()]
    local = [(name, x.to_local() if isinstance(x, DTensor) else x) for name, x in floating]
    # A sum is finite only if all is (it may overflow all the same, so then all is looked at); it takes a quarter of the
    # time. One number to wait for, not one a tensor: on a GPU each would wait for all that was queued.
    sums = [x.sum(dtype=torch.float32) for _, x in local if x.numel()]
    if sums and not bool(torch.isfinite(torch.stack([x.to(sums[0].device) for x in sums])).all()):
        found = next((text for name, x in local if (text := _wrong_numbers(name, x))), None)
    said = [(rank, text) for rank, text in enumerate(ranks.gather(found)) if text]
    if said:
        rank, text = said[0]
        on = f" on rank {rank}" if ranks.size > 1 else ""
        raise LongspanError(f"{what}: {text}{on} (of {len(said)} ranks with such numbers); {hint}")


def _wrong_numbers(name: str, x: Tensor) -> str | None:
    wrong = ~torch.isfinite(x)
    count = int(wrong.sum())
    return f"{_short(name)} holds {x[wrong][0].item()} ({count:,} of {x.numel():,} numbers)" if count else None


def cause(error: BaseException | None) -> str:
    """The first line of what went wrong on the first rank where something did."""
    failures = getattr(error, "failures", None)  # of torch's CheckpointException: by rank
    if failures:
        rank = min(failures)
        return f"rank {rank}: {cause(failures[rank][0])}"
    return f"{type(error).__name__}: {(str(error).strip() or '?').splitlines()[0]}"


@contextlib.contextmanager
def one_process_is_fine() -> Iterator[None]:
    """Torch warns when it saves or loads without a process group; here that is a run on one device."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=NO_GROUP_WARNING)
        yield
