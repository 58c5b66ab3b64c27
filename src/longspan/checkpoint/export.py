"""Export a model as a Hugging Face folder, or as a PEFT adapter, by their own `save_pretrained`.

`longspan verify --model OUT` compares what was exported, loaded again, with one process.
"""

from __future__ import annotations

import copy
import os
import re
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule

from longspan.checkpoint.ranks import Ranks, check_finite
from longspan.comm.arguments import as_dtype
from longspan.compat.transformers_api import new_model
from longspan.core.errors import LongspanError
from longspan.core.validation import as_path
from longspan.hf.model.pretrained import without_progress_bars
from longspan.hf.model.support import transformers_model
from longspan.hf.weights.quantized import dequantize, layers_in_4_bits

_WEIGHTS = ("model*.safetensors", "adapter_model*.safetensors", "model.safetensors.index.json")


def export(
    folder: Path | str,
    model: torch.nn.Module,
    config: Any = None,
    tokenizer: Any = None,
    dtype: torch.dtype | str | None = None,
) -> None:
    """Write the model as a Hugging Face folder, or its PEFT adapter, as `save_pretrained`. Collective; rank 0 writes.

    Files are written next to their place and then renamed. Other files of the folder stay, but older weights go. All
    files get the modes that the umask asks for.

    Args:
        folder: made if it does not exist.
        model: sharded or not; a transformers model, or a PEFT model around one.
        config: the (base) model's config from before `longspan.parallelize`; by default the one it has now.
        tokenizer: saved with it; None for none.
        dtype: of the weights on disk, or its name; by default the model's.

    Raises:
        DiskFull: on every rank, if the disk is full.
        LongspanError: on every rank, if a weight is not finite or rank 0 cannot write. The older export then stays.
    """
    ranks = Ranks()

    def check() -> tuple[Path, Any, torch.dtype]:
        path, inner = as_path("folder", folder), transformers_model(model)
        if path.exists() and not path.is_dir():
            raise LongspanError(f"{path} is a file; give a folder")
        return path, inner, inner.dtype if dtype is None else as_dtype("dtype", dtype)

    folder, inner, saved_dtype = ranks.each(check)
    config = copy.deepcopy(inner.config) if config is None else config
    if getattr(config, "quantization_config", None) is not None and layers_in_4_bits(model):
        config = copy.deepcopy(config)
        del config.quantization_config  # the export is dequantized
    tensors = {f"model.{name}": x for name, x in model.state_dict().items()}
    check_finite(tensors, f"{folder} is not exported", ranks, "export an earlier checkpoint")
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state: dict[str, Any] = get_model_state_dict(model, options=options)  # empty except on rank 0

    def write() -> None:
        with without_progress_bars(), torch.random.fork_rng(devices=[]):  # an export must not change what a run draws
            making = folder / ".making"
            shutil.rmtree(making, ignore_errors=True)
            making.mkdir(parents=True)
            try:
                if _is_peft(model):
                    plain = _plain_peft(model, config)
                else:
                    dequantize(model, state)
                    plain = _plain(model, config, saved_dtype)
                plain.save_pretrained(str(making), state_dict=_cast(state, saved_dtype))
                if tokenizer is not None:
                    tokenizer.save_pretrained(making)
                _move(making, folder)
            except Exception as error:
                shutil.rmtree(making, ignore_errors=True)
                raise (_system_error(error) or error) from error

    ranks.first(write)


def _plain(model: Any, config: Any, dtype: torch.dtype | None = None) -> Any:
    """Return a new model of this config on the meta device, with the names and ties of `from_pretrained`, without FSDP.

    It is of the class of a model, or of a PEFT model's base model.
    """
    inner: Any = transformers_model(model)
    kind = next(cls for cls in type(inner).__mro__ if not issubclass(cls, FSDPModule))  # FSDP subclasses it
    with torch.device("meta"):
        plain: Any = new_model(kind, copy.deepcopy(config), dtype)
    if (generation := getattr(inner, "generation_config", None)) is not None:
        plain.generation_config = generation
    return plain


def _plain_peft(model: Any, config: Any) -> Any:
    """Return a PEFT model like `model`, on the meta device, without longspan and FSDP."""
    import peft

    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT 0.21 asks transformers for a deprecated property
        plain = _plain(model, config)
        for name, adapter in model.peft_config.items():
            adapter = copy.deepcopy(adapter)
            if adapter.base_model_name_or_path and not isinstance(plain, peft.PeftModel):
                plain.name_or_path = adapter.base_model_name_or_path  # or PEFT replaces it by the model's
            if hasattr(adapter, "init_lora_weights"):  # some ways to initialise read weights
                adapter.init_lora_weights = False
            if isinstance(plain, peft.PeftModel):
                plain.add_adapter(name, adapter)
            else:
                plain = peft.get_peft_model(plain, adapter, adapter_name=name)
    return plain


def _cast(state: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Return the weights in the dtype on disk. Empty `state` meanwhile, so that only one weight exists twice."""
    weights: dict[str, Any] = {}
    seen: dict[Any, Tensor] = {}
    for name in list(state):
        x = state.pop(name)
        key = (x.untyped_storage().data_ptr(), x.storage_offset(), x.shape, x.stride())
        if key not in seen:  # tied weights stay tied
            seen[key] = x.to(dtype) if x.is_floating_point() else x
        weights[name] = seen[key]
    return weights


def _move(making: Path, folder: Path) -> None:
    """Give the files their places, the weights' index and config last; remove older weights."""
    mask = os.umask(0)
    os.umask(mask)
    new = {path.relative_to(making) for path in making.rglob("*") if path.is_file()}
    for name in sorted(new, key=lambda name: (name.suffix == ".json", name)):
        os.chmod(making / name, 0o666 & ~mask)  # safetensors creates files that only their owner can read
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(making / name, folder / name)
    for pattern in _WEIGHTS:
        for old in folder.glob(pattern):
            if old.relative_to(folder) not in new:
                old.unlink()
    shutil.rmtree(making)


def _is_peft(model: Any) -> bool:
    peft = sys.modules.get("peft")  # imported by whoever made such a model
    return peft is not None and isinstance(model, peft.PeftModel)


def _system_error(error: Exception) -> OSError | None:
    """Return the system's error in an error of safetensors, which is written in Rust and words it differently."""
    number = re.search(r"\(os error (\d+)\)|Os \{ code: (\d+)", str(error))  # safetensors before 0.5 has the second
    if number is None or isinstance(error, OSError):
        return None
    code = int(number[1] or number[2])
    return OSError(code, os.strerror(code))
