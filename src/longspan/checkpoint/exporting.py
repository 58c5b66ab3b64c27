"""Export a model as a Hugging Face folder, or as a PEFT adapter, and load it again before it replaces an older one."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule

from longspan.checkpoint.folder import (
    MAKING,
    FileRecord,
    check_room,
    format_disk_full,
    put_in_place,
    remove,
    write_durably,
)
from longspan.checkpoint.ranks import Ranks, check_finite, check_ranks, checked_on_all
from longspan.comm.arguments import as_dtype, check_module
from longspan.compat.transformers_api import new_model
from longspan.core.errors import DiskFull, LongspanError
from longspan.core.validation import as_path, check_choice, checked_call
from longspan.hf.pretrained import without_progress_bars
from longspan.hf.support import transformers_model
from longspan.hf.weights.quantized import dequantize, layers_in_4_bits

RECORD = "longspan.json"
"""File of an exported folder that lists what longspan wrote. An export replaces no other file."""

_OTHER_BYTES = 1 << 20
"""Bytes of an export besides its weights, about."""

_MOVE = "move it away, give another --out, or --export never"


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

    The folder is written under another name, loaded again, compared tensor by tensor, and renamed. All files get the
    modes that the umask asks for.

    Args:
        folder: replaced if it holds only what longspan wrote.
        model: sharded or not; a transformers model, or a PEFT model around one.
        config: the (base) model's config from before `longspan.parallelize`; by default the one it has now.
        tokenizer: saved with it; None for none.
        dtype: of the weights on disk, or its name; by default the model's.
        generation: the model's generation config, if it has one. By default, without `config`, the model's.
        peft: of a PEFT model, "adapter" writes what PEFT's `save_pretrained` writes; "merged" writes one model with
            the adapter added to its weights, in the dtype in which they are trained.
        ranks: the ranks that take part; by default all of the job.
        step: of the run; `exported_step` returns it.

    Raises:
        DiskFull: on every rank, with the bytes that are missing.
        LongspanError: on every rank, if `folder` holds other files, a weight is not finite, rank 0 cannot write, or
            the export does not load as the same weights. The older export then stays.
    """
    folder, ranks = Path(folder), ranks or Ranks()
    inner: Any = transformers_model(model)
    if config is None:
        config, generation = copy.deepcopy(inner.config), generation or getattr(inner, "generation_config", None)
    if getattr(config, "quantization_config", None) is not None and layers_in_4_bits(model):
        config = copy.deepcopy(config)
        del config.quantization_config  # the export is dequantized
    saved_dtype: torch.dtype = inner.dtype if dtype is None else as_dtype("dtype", dtype)
    ranks.first(lambda: check_replaceable(folder))
    if peft == "merged" and _is_peft(model):
        check_mergeable(model)
    tensors = {f"model.{name}": x for name, x in model.state_dict().items()}
    check_finite(tensors, f"{folder} is not exported", ranks, "export an earlier checkpoint")
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state: dict[str, Any] = get_model_state_dict(model, options=options)  # empty except on rank 0
    if not _is_peft(model) or peft == "merged":
        ranks.first(lambda: dequantize(model, state))
    sizes = (x.numel() * (saved_dtype if x.is_floating_point() else x.dtype).itemsize for x in state.values())
    needed = _OTHER_BYTES + sum(sizes)
    work = _Export(folder, model, config, tokenizer, saved_dtype, generation)

    def write() -> None:
        with without_progress_bars(), torch.random.fork_rng(devices=[]):  # an export must not change what a run draws
            folder.parent.mkdir(parents=True, exist_ok=True)
            if not _is_peft(model) or peft == "merged":
                check_room(folder.parent, needed, str(folder))
            work.write(state, peft, step)

    try:
        ranks.first(write)
    except DiskFull as error:
        why = f"{folder} cannot be exported: {error}"
        raise DiskFull(ranks.first(lambda: format_disk_full(folder.parent, needed, str(folder), why))) from error


@checked_call(folder=as_path)
def check_replaceable(folder: Path) -> None:
    """Raise if a folder holds files that longspan did not write, naming one."""
    if folder.is_dir():
        try:
            written = set(json.loads((folder / RECORD).read_text())["files"])
        except FileNotFoundError:
            written = set()
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise LongspanError(f"{folder / RECORD} cannot be read: {error}; {_MOVE}") from error
        files = {str(p.relative_to(folder)) for p in folder.rglob("*") if not p.is_dir()} - {RECORD}
        foreign = sorted(files - written)
        if foreign:
            raise LongspanError(
                f"{folder} holds {len(foreign)} files that longspan did not write ({foreign[0]}, ...), and an export "
                f"would replace them; {_MOVE}"
            )
    elif folder.exists():
        raise LongspanError(f"{folder} is a file, an export would replace it; {_MOVE}")


@checked_call(folder=as_path)
def exported_step(folder: Path) -> int | None:
    """Return the step of an export if all its files have their sizes; None if one does not, or the step is unknown."""
    try:
        record = json.loads((folder / RECORD).read_text())
        complete = all((folder / name).stat().st_size == size for name, (size, _) in record["files"].items())
        step = record.get("step")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return step if complete and isinstance(step, int) else None


@dataclass(frozen=True)
class _Export:
    """The work of rank 0; fields as in `export`."""

    folder: Path
    model: Any
    config: Any
    tokenizer: Any
    dtype: torch.dtype
    generation: Any

    def write(self, state: dict[str, Any], peft: str, step: int | None) -> None:
        making = self.folder.with_name(f"{MAKING}{self.folder.name}")
        try:
            remove(making)
            if not _is_peft(self.model):
                self._write_model(making, state)
            elif peft == "merged":
                self._write_model(making, self._merge(state))
            else:
                self._write_adapters(making, state)
            if self.tokenizer is not None:
                self.tokenizer.save_pretrained(making)
            _write_record(making, step)
            put_in_place(making, self.folder)
        except Exception as error:
            with contextlib.suppress(OSError):
                remove(making)
            system_error = _system_error(error)
            if system_error is None:
                raise
            raise system_error from error

    def _write_model(self, making: Path, state: dict[str, Any]) -> None:
        cls = _plain_class(self.model)
        weights = self._cast(state)
        # A new model of this config has the names and ties of `from_pretrained`, without longspan and FSDP.
        with torch.device("meta"):
            plain = new_model(cls, copy.deepcopy(self.config), self.dtype)
        if self.generation is not None:
            plain.generation_config = self.generation
        plain.save_pretrained(making, state_dict=dict(weights))  # it empties its argument
        loaded, info = cls.from_pretrained(making, dtype=self.dtype, output_loading_info=True, local_files_only=True)
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if info[kind]:
                raise self._error(
                    f"{len(info[kind])} of its weights are {kind.removesuffix('_keys')} "
                    f"({min(map(str, info[kind]))}); export a model that from_pretrained can load"
                )
        self._compare(weights, loaded.state_dict())

    def _write_adapters(self, making: Path, state: dict[str, Any]) -> None:
        import peft

        weights = self._cast(state)
        self._plain_peft(self.model.peft_config).save_pretrained(str(making), state_dict=dict(weights))
        for name in self.model.peft_config:
            written = peft.get_peft_model_state_dict(self.model, state_dict=weights, adapter_name=name)
            path = str(making if name == "default" else making / name)
            loaded = self._plain_peft({name: peft.PeftConfig.from_pretrained(path)})
            tensors = peft.utils.load_peft_weights(path, device="cpu")
            result = peft.set_peft_model_state_dict(loaded, tensors, adapter_name=name, low_cpu_mem_usage=True)
            expected = peft.get_peft_model_state_dict(loaded, adapter_name=name).keys()
            differ = [*result.unexpected_keys, *sorted(expected ^ tensors.keys())]
            if differ:
                raise self._error(
                    f"{differ[0]} of the adapter {name!r} is missing or not in the model; give the config that the "
                    "base model was made from"
                )
            self._compare(written, tensors)

    def _merge(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the base model's weights with the active adapters added, by PEFT itself."""
        configs = self.model.peft_config
        if any(config.is_prompt_learning for config in configs.values()):
            raise LongspanError('prompt learning changes no weights and cannot be merged; use peft="adapter"')
        model = self._plain_peft(configs)
        model.load_state_dict(state, assign=True)
        state.clear()
        return dict(model.merge_and_unload(adapter_names=list(self.model.active_adapters)).state_dict())

    def _plain_peft(self, configs: dict[str, Any]) -> Any:
        """Return a PEFT model like this one, on the meta device, without longspan and FSDP."""
        import peft

        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # PEFT 0.21 asks transformers for a deprecated property
            model: Any = new_model(_plain_class(self.model), copy.deepcopy(self.config))
            for name, config in configs.items():
                config = copy.deepcopy(config)
                if config.base_model_name_or_path and not isinstance(model, peft.PeftModel):
                    model.name_or_path = config.base_model_name_or_path  # or PEFT replaces it by the model's
                if hasattr(config, "init_lora_weights"):  # some ways to initialise read weights
                    config.init_lora_weights = False
                if isinstance(model, peft.PeftModel):
                    model.add_adapter(name, config)
                else:
                    model = peft.get_peft_model(model, config, adapter_name=name)
        return model

    def _cast(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the weights in the dtype on disk. Empty `state` meanwhile, so that only one weight exists twice."""
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

    def _compare(self, written: dict[str, Any], loaded: dict[str, Any]) -> None:
        """Raise unless every tensor that was written was loaded, bit for bit."""
        for name, x in written.items():
            other = loaded.get(name)
            if other is None or other.shape != x.shape or not torch.equal(other.to(x.dtype), x):
                raise self._error(
                    f"{name} {'is missing' if other is None else 'differs'}; the disk does not hold what was written, "
                    "or this model's config ties or renames weights that differ"
                )

    def _error(self, why: str) -> LongspanError:
        return LongspanError(f"{self.folder} was not exported: loaded again, {why}")


def _is_peft(model: Any) -> bool:
    peft = sys.modules.get("peft")  # imported by whoever made such a model
    return peft is not None and isinstance(model, peft.PeftModel)


def check_mergeable(model: Any) -> None:
    """Raise if an adapter is on a table that embedding and LM head share: adding it would change both."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    inner = model.get_base_model()
    tables = [table for table in (inner.get_input_embeddings(), inner.get_output_embeddings()) if table is not None]
    weights = {x.get_base_layer().weight if isinstance(x, BaseTunerLayer) else x.weight for x in tables}
    if len(weights) < len(tables) and any(isinstance(table, BaseTunerLayer) for table in tables):
        raise LongspanError(
            "the adapter is on the embedding or the LM head, which share one weight, so it cannot be merged: both "
            "would change; export the adapter, or leave them out of its targets"
        )


def _plain_class(model: Any) -> Any:
    """Return the class of a model, or of a PEFT model's base model, before FSDP subclassed it."""
    inner = model.get_base_model() if _is_peft(model) else model
    return next(cls for cls in type(inner).__mro__ if not issubclass(cls, FSDPModule))


def _write_record(making: Path, step: int | None) -> None:
    """List all files, and give them one mode: safetensors creates files that only their owner can read."""
    files = {str(path.relative_to(making)): FileRecord.of(path) for path in sorted(making.rglob("*")) if path.is_file()}
    listed = {name: [record.size, f"{record.crc32:08x}"] for name, record in files.items()}
    record = {"files": listed} | ({} if step is None else {"step": step})
    write_durably(making / RECORD, json.dumps(record, indent=1) + "\n")
    mode = (making / RECORD).stat().st_mode & 0o777  # what the umask leaves
    for name in files:
        os.chmod(making / name, mode)


def _system_error(error: Exception) -> OSError | None:
    """Return the system's error in an error of safetensors, which is written in Rust and words it differently."""
    number = re.search(r"\(os error (\d+)\)|Os \{ code: (\d+)", str(error))  # safetensors before 0.5 has the second
    if number is None or isinstance(error, OSError):
        return None
    code = int(number[1] or number[2])
    return OSError(code, os.strerror(code))
