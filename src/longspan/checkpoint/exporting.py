"""Hugging Face folders: a whole model for `from_pretrained`, or a PEFT adapter; opened again before they count."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule

from longspan.checkpoint.disk import DiskFull, check_room, format_disk_full
from longspan.checkpoint.folder import MAKING, FileRecord, put_in_place, remove, write_durably
from longspan.checkpoint.ranks import Ranks, check_ranks, checked_on_all
from longspan.checkpoint.saving import check_finite
from longspan.comm.arguments import as_dtype, check_module
from longspan.compat.transformers_api import new_model
from longspan.core.errors import LongspanError
from longspan.core.validation import as_path, check_choice, checked_call
from longspan.hf.support import transformers_model

RECORD = "longspan.json"
"""In an exported folder: the files that longspan wrote there. What is not in it belongs to somebody else."""

_BESIDE = 1 << 20
"""Bytes of an export that are no weights, about."""


def _as_dtype(name: str, dtype: Any) -> torch.dtype | None:
    return None if dtype is None else as_dtype(name, dtype)


def _check_kind(name: str, kind: Any) -> None:
    check_choice(name, kind, ("adapter", "merged"))


@checked_call(checked_on_all, folder=as_path, model=check_module, dtype=_as_dtype, peft=_check_kind, ranks=check_ranks)
def export(
    folder: Path | str,
    model: torch.nn.Module,
    config: Any = None,
    tokenizer: Any = None,
    dtype: torch.dtype | str | None = None,
    generation: Any = None,
    *,
    peft: Literal["adapter", "merged"] = "adapter",
    ranks: Ranks | None = None,
    step: int | None = None,
) -> None:
    """Write the model as a Hugging Face folder (safetensors, config, tokenizer). Collective; rank 0 writes.

    The folder is made under another name, loaded again, compared tensor by tensor, and renamed. All files get the modes
    that the umask asks for.

    Args:
        folder: replaced if longspan wrote what is in it.
        model: as it is trained, sharded or not; a transformers model, or a PEFT model around one.
        config: the (base) model's config as it was before `longspan.parallelize`; by default the one it has now.
        tokenizer: saved beside it; None for none.
        dtype: of the weights on disk, or its name; by default the model's.
        generation: the model's generation config, if it has one. By default, without `config`, the model's.
        peft: of a PEFT model write "adapter": what PEFT's own `save_pretrained` writes (adapter_config.json and
            adapter_model.safetensors), to be put on the base model again; or "merged": one model, the adapter's change
            added to its weights in the dtype that they are trained in.
        ranks: who takes part; by default those of the job's own group.
        step: of the run that the weights are of, to be found again by `exported_step`.

    Raises:
        DiskFull: on every rank, with the bytes that are missing.
        LongspanError: on every rank, if `folder` holds what longspan did not write, a weight is not finite, rank 0
            cannot write, or what it wrote does not load as the same weights. What was there before is then kept.
    """
    folder, ranks = Path(folder), ranks or Ranks()
    inner: Any = transformers_model(model)
    if config is None:
        config, generation = copy.deepcopy(inner.config), generation or getattr(inner, "generation_config", None)
    kept: torch.dtype = inner.dtype if dtype is None else as_dtype("dtype", dtype)
    ranks.first(lambda: check_replaceable(folder))
    check_finite(_own_weights(model), f"{folder} is not exported", ranks)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state: dict[str, Any] = get_model_state_dict(model, options=options)  # empty but on rank 0
    work = _Export(folder, model, config, tokenizer, kept, generation, step)
    needed = _BESIDE + sum(
        x.numel() * (kept.itemsize if x.is_floating_point() else x.element_size()) for x in state.values()
    )

    def write() -> None:
        with _quiet(), torch.random.fork_rng(devices=[]):  # the run draws on as if nothing had been exported
            folder.parent.mkdir(parents=True, exist_ok=True)
            if peft_class(model) is None or peft == "merged":
                check_room(folder.parent, needed, str(folder))
            work.write(state, peft)

    try:
        ranks.first(write)
    except DiskFull as error:
        why = f"{folder} cannot be exported: {error}"
        raise DiskFull(ranks.first(lambda: format_disk_full(folder.parent, needed, str(folder), why))) from error


@checked_call(folder=as_path)
def check_replaceable(folder: Path) -> None:
    """Refuse to replace a folder that holds what longspan did not write.

    Raises:
        LongspanError: naming a file.
    """
    if folder.is_dir():
        try:
            written = set(json.loads((folder / RECORD).read_text())["files"])
        except FileNotFoundError:
            written = set()
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise LongspanError(f"{folder / RECORD} cannot be read: {error}; {_MOVE}") from error
        found = {str(p.relative_to(folder)) for p in folder.rglob("*") if not p.is_dir()} - {RECORD}
        foreign = sorted(found - written)
        if foreign:
            raise LongspanError(
                f"{folder} holds {len(foreign)} files that longspan did not write ({foreign[0]}, ...), and an export "
                f"would replace them; {_MOVE}"
            )
    elif folder.exists():
        raise LongspanError(f"{folder} is a file, an export would replace it; {_MOVE}")


_MOVE = "move it away, give another --out, or --export never"


@dataclass(frozen=True)
class _Export:
    """What rank 0 writes, and where."""

    folder: Path
    model: Any
    config: Any
    tokenizer: Any
    dtype: torch.dtype
    generation: Any
    step: int | None

    def write(self, state: dict[str, Any], peft: str) -> None:
        making = self.folder.with_name(f"{MAKING}{self.folder.name}")
        try:
            remove(making)
            if peft_class(self.model) is None:
                self._write_model(making, state)
            elif peft == "merged":
                self._write_model(making, self._merge(state))
            else:
                self._write_adapters(making, self._cast(state))
            if self.tokenizer is not None:
                self.tokenizer.save_pretrained(making)
            _record(making, self.step)
            put_in_place(making, self.folder)
        except Exception as error:
            with contextlib.suppress(OSError):
                remove(making)
            said_by_system = _as_os_error(error)
            if said_by_system is None:
                raise
            raise said_by_system from error

    # --- a whole model

    def _write_model(self, making: Path, state: dict[str, Any]) -> None:
        cls = plain_class(self.model)
        weights = self._cast(state)
        # An untouched model of this config knows its name, its tied weights and nothing of longspan or FSDP.
        with torch.device("meta"):
            plain = new_model(cls, copy.deepcopy(self.config), self.dtype)
        if self.generation is not None:
            plain.generation_config = self.generation
        plain.save_pretrained(making, state_dict=dict(weights))  # it empties what it is given
        found, info = cls.from_pretrained(making, dtype=self.dtype, output_loading_info=True, local_files_only=True)
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if info[kind]:
                first = sorted(map(str, info[kind]))[0]
                raise LongspanError(
                    f"{self.folder} was not exported: opened again, {len(info[kind])} of its weights are "
                    f"{kind.removesuffix('_keys')} ({first}); export a model that from_pretrained can load"
                )
        self._compare(weights, found.state_dict())

    def _cast(self, state: dict[str, Any]) -> dict[str, Any]:
        """The weights as they are on disk; takes them out of `state` one by one, so that not all are there twice."""
        weights: dict[str, Any] = {}
        seen: dict[Any, Tensor] = {}
        for name in list(state):
            x = state.pop(name)
            key = (x.untyped_storage().data_ptr(), x.storage_offset(), x.shape, x.stride())
            if key not in seen:  # tied weights stay tied
                seen[key] = x.to(self.dtype) if x.is_floating_point() else x
            weights[name] = seen[key]
            if x.is_floating_point() and not bool(torch.isfinite(weights[name]).all()):
                raise LongspanError(f"{self.folder} is not exported: {name} is not finite as {self.dtype}")
        return weights

    def _compare(self, written: dict[str, Any], found: dict[str, Any]) -> None:
        """Every tensor, bit for bit."""
        for name, x in written.items():
            other = found.get(name)
            if other is None or other.shape != x.shape or not torch.equal(other.to(x.dtype), x):
                there = "is not there" if other is None else "is another one"
                raise LongspanError(
                    f"{self.folder} was not exported: opened again, {name} {there}; the disk does not hold what was "
                    "written, or this model's config ties or renames weights that differ"
                )

    # --- PEFT

    def _write_adapters(self, making: Path, weights: dict[str, Any]) -> None:
        import peft

        # PEFT does all of it, given the whole weights, and a model whose class is not FSDP's.
        self._plain_peft(self.model.peft_config).save_pretrained(str(making), state_dict=dict(weights))
        for name in self.model.peft_config:
            written = peft.get_peft_model_state_dict(self.model, state_dict=weights, adapter_name=name)
            place = making if name == "default" else making / name
            again = self._plain_peft({name: peft.PeftConfig.from_pretrained(str(place))})
            tensors = peft.utils.load_peft_weights(str(place), device="cpu")
            result = peft.set_peft_model_state_dict(again, tensors, adapter_name=name, low_cpu_mem_usage=True)
            wanted = peft.get_peft_model_state_dict(again, adapter_name=name).keys()
            strange = [*result.unexpected_keys, *sorted(wanted ^ tensors.keys())]
            if strange:
                raise LongspanError(
                    f"{self.folder} was not exported: opened again, {strange[0]} of the adapter {name!r} is not there "
                    "or fits nothing in the model; give the config that the base model was made from"
                )
            self._compare(written, tensors)

    def _merge(self, state: dict[str, Any]) -> dict[str, Any]:
        """The base model's weights with the active adapters added, by PEFT itself."""
        configs = self.model.peft_config
        if any(config.is_prompt_learning for config in configs.values()):
            raise LongspanError('prompt learning changes no weights and cannot be merged; use peft="adapter"')
        whole = self._plain_peft(configs)
        whole.load_state_dict(state, assign=True)
        state.clear()
        merged = whole.merge_and_unload(adapter_names=list(self.model.active_adapters))
        return dict(merged.state_dict())

    def _plain_peft(self, configs: dict[str, Any]) -> Any:
        """A PEFT model like this one, without longspan, FSDP or storage."""
        import peft

        with torch.device("meta"):
            cls = plain_class(self.model.get_base_model())
            whole: Any = new_model(cls, copy.deepcopy(self.config))
            for name, config in configs.items():
                config = copy.deepcopy(config)
                if hasattr(config, "init_lora_weights"):  # what comes in is trained; some ways to begin need weights
                    config.init_lora_weights = False
                if isinstance(whole, peft.PeftModel):
                    whole.add_adapter(name, config)
                else:
                    whole = peft.get_peft_model(whole, config, adapter_name=name)
        return whole


def peft_class(model: Any) -> Any:
    """PEFT's class, if `model` is one of PEFT's models."""
    peft = sys.modules.get("peft")  # whoever has such a model has imported it
    return type(model) if peft is not None and isinstance(model, peft.PeftModel) else None


def plain_class(model: Any) -> Any:
    """The class of a model before FSDP made another of it."""
    inner = model.get_base_model() if peft_class(model) is not None else model
    return next(cls for cls in type(inner).__mro__ if not issubclass(cls, FSDPModule))


def _own_weights(model: torch.nn.Module) -> dict[str, Any]:
    return {f"model.{name}": x for name, x in model.state_dict().items() if isinstance(x, Tensor)}


@checked_call(folder=as_path)
def exported_step(folder: Path) -> int | None:
    """The step that an export is of, if one is there whole (by its files' sizes) and says so."""
    try:
        record = json.loads((folder / RECORD).read_text())
        whole = all((folder / name).stat().st_size == size for name, (size, _) in record["files"].items())
        step = record.get("step")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return step if whole and isinstance(step, int) else None


def _record(making: Path, step: int | None) -> None:
    """Write down what is there, and give all files one mode: safetensors are made for their owner alone."""
    files = {str(path.relative_to(making)): FileRecord.of(path) for path in sorted(making.rglob("*")) if path.is_file()}
    listed = {name: [record.size, f"{record.crc32:08x}"] for name, record in files.items()}
    digest = zlib.crc32(json.dumps(listed, sort_keys=True).encode())
    record = {"files": listed, "crc32": f"{digest:08x}"} | ({} if step is None else {"step": step})
    write_durably(making / RECORD, json.dumps(record, indent=1) + "\n")
    mode = (making / RECORD).stat().st_mode & 0o777  # what the umask leaves
    for name in files:
        os.chmod(making / name, mode)


def _as_os_error(error: Exception) -> OSError | None:
    """safetensors writes in Rust, and says what the system said in its own words."""
    number = re.search(r"\(os error (\d+)\)|Os \{ code: (\d+)", str(error))  # safetensors before 0.5 has the second
    if number is not None and not isinstance(error, OSError):
        code = int(number[1] or number[2])
        return OSError(code, os.strerror(code))
    return None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bars: nobody waits for what is opened again."""
    from transformers.utils import logging

    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()
