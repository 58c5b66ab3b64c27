"""Where a model comes from: its class, its config, and its weights (safetensors files, an adapter, or a seed)."""

from __future__ import annotations

import contextlib
import copy
import json
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longspan.core.errors import LongspanError, require
from longspan.hf.model.pretrained import check_weights, first_line, kind_of
from longspan.hf.weights.quantized import layers_in_4_bits, nf4


@dataclass(frozen=True)
class Origin:
    """How to make a model."""

    auto: Any  # the `AutoModel...` class that chooses the model's class
    config: Any  # the Hugging Face config; not changed
    dtype: torch.dtype
    name: str | None = None  # the folder, or the model on the hub, with the weights; None: random weights
    seed: int = 0  # of random weights
    label: str = "the config"  # names the model in messages
    strict: bool = True  # raise on missing weights, and warn of unused ones
    options: Mapping[str, Any] = field(default_factory=dict)  # of `auto.from_config` and `auto.from_pretrained`
    adapter: str | None = None  # the folder of a PEFT adapter
    four_bits: torch.dtype | None = None  # what linear layers with 4-bit weights compute in; None: none have such

    def build(self) -> Any:
        """Make the full model on the CPU, or raise if transformers cannot, or weights are missing. Seeds torch."""
        torch.manual_seed(self.seed)
        options = {"config": copy.deepcopy(self.config), "dtype": self.dtype, **self.options}
        if self.four_bits is not None:
            options |= {"quantization_config": nf4(self.four_bits), "device_map": {"": "cpu"}}
        with self._transformers_errors():
            if self.name is None:
                return self.auto.from_config(**options)
            model, info = self.auto.from_pretrained(self.name, output_loading_info=True, **options)
            self.check(info)
        for layer in layers_in_4_bits(model).values():
            layer.quant_state.dtype = layer.compute_dtype
        return self.adapted(model)

    def on_meta(self) -> Any:
        """Make the model on the meta device, without the adapter."""
        with self._transformers_errors(), torch.device("meta"):
            return self.auto.from_config(copy.deepcopy(self.config), dtype=self.dtype, **self.options)

    def adapted(self, model: Any) -> Any:
        """Add the adapter; its weights train like all others."""
        if self.adapter is None:
            return model
        trained = {p: p.requires_grad for p in model.parameters()}
        wrapped = with_adapter(model, self.adapter, self.name)
        for p in wrapped.parameters():  # PEFT has frozen them
            if trained.get(p, True):
                p.requires_grad_(True)
        return wrapped.get_base_model()

    def check(self, info: dict[str, Any]) -> None:
        """Check the loading info of `from_pretrained`, if this origin is strict."""
        if self.strict:
            check_weights(self.label, info)

    @contextlib.contextmanager
    def _transformers_errors(self) -> Iterator[None]:
        try:
            yield
        except LongspanError:
            raise
        except Exception as error:
            kind = kind_of(self.config)
            why = first_line(error) if kind is None else f"it is {kind} ({self.config.model_type})"
            raise LongspanError(f"{self.label} cannot be made by {self.auto.__name__}: {why}") from error


def with_adapter(model: Any, adapter: str, base: str | None, **changes: Any) -> Any:
    """Return PEFT's model around a base model, with a folder's adapter.

    `changes` are of the adapter's settings: with any, its weights alone train. `base` names the base model in messages.
    """
    require("an adapter", "peft")
    import peft

    try:
        config = peft.PeftConfig.from_pretrained(adapter)
        if config.is_prompt_learning:
            raise LongspanError("prompt learning puts tokens before the text, which is not supported")
        for name, value in changes.items():
            setattr(config, name, value)
        # In the model's dtype, not in fp32: FSDP shards a layer's weights in one dtype.
        trains = {"config": config, "is_trainable": True} if changes else {}
        with warnings.catch_warnings():
            # A model on the meta device gets the adapter's modules here, and its weights with its own.
            warnings.filterwarnings("ignore", "for .*: copying from a non-meta parameter in the checkpoint to a meta")
            wrapped = peft.PeftModel.from_pretrained(model, adapter, autocast_adapter_dtype=False, **trains)
        saved = peft.utils.load_peft_weights(adapter, device="cpu").keys()
    except Exception as error:  # PEFT raises any kind
        raise LongspanError(
            f"the adapter {adapter} cannot be put on its base model {base}: {first_line(error)}"
        ) from error
    differ = sorted(saved ^ peft.get_peft_model_state_dict(wrapped).keys())
    if differ:
        raise LongspanError(
            f"the adapter {adapter} does not fit its base model {base}: only one of the two has {differ[0]}; check "
            "base_model_name_or_path in adapter_config.json"
        )
    return wrapped


SAMPLE = 4 << 10
"""Bytes at the start and at the end of each tensor that enter its digest."""

_LONGEST_HEADER = 100 << 20  # safetensors' own limit


@dataclass(frozen=True)
class TensorInFile:
    """One tensor: the file, the dtype's name in it ("BF16"), the shape, and the bytes from `start` to `stop`."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class WeightFiles:
    """All tensors of a model's files, by the files' own keys."""

    tensors: dict[str, TensorInFile]

    @classmethod
    def find(cls, name: str) -> WeightFiles | None:
        """Read the headers of the files that `from_pretrained(name)` reads; None if they are not safetensors."""
        from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

        single = _or_none(lambda: cached_file(name, SAFE_WEIGHTS_NAME))
        if single is not None:
            return cls(_read_header(Path(single)))
        index = _or_none(lambda: cached_file(name, SAFE_WEIGHTS_INDEX_NAME))
        if index is None:
            return None
        tensors: dict[str, TensorInFile] = {}
        with _reading(index):
            for part in sorted(set(json.loads(Path(index).read_text())["weight_map"].values())):
                tensors |= _read_header(Path(str(cached_file(name, part))))
        return cls(tensors)

    def digests(self) -> dict[str, int]:
        """Return a checksum of dtype, shape, and the first and last `SAMPLE` bytes of each tensor, by key."""
        digests = dict[str, int]()
        for file in dict.fromkeys(tensor.file for tensor in self.tensors.values()):
            with _reading(file), file.open("rb") as opened:
                digests |= {k: _digest(opened, x) for k, x in self.tensors.items() if x.file == file}
        return digests

    def read(self, key: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Read rows `start` to `stop` of a tensor, or all, to the CPU in the file's dtype."""
        from safetensors import safe_open

        file = self.tensors[key].file
        with _reading(file), safe_open(file, framework="pt", device="cpu") as opened:
            rows: Tensor = opened.get_tensor(key) if stop is None else opened.get_slice(key)[start:stop]
        return rows


@contextlib.contextmanager
def _reading(file: str | Path) -> Iterator[None]:
    """Name the file in what Python or safetensors, which has its own exceptions, say of it."""
    try:
        yield
    except LongspanError:
        raise
    except Exception as error:
        raise LongspanError(f"{file} cannot be read: {error}; fetch it again") from error


def _or_none(find: Callable[[], str | None]) -> str | None:
    try:
        return find()
    except OSError:
        return None


def _read_header(file: Path) -> dict[str, TensorInFile]:
    """Read a safetensors file's first 8 bytes, the header's length (little-endian), and the header in JSON."""
    with _reading(file), file.open("rb") as opened:
        size, length = file.stat().st_size, int.from_bytes(opened.read(8), "little")
        if length > min(size, _LONGEST_HEADER):
            raise ValueError(f"its header would have {length:,} bytes")
        header, begin = json.loads(opened.read(length)), 8 + length
        tensors = {
            key: TensorInFile(file, x["dtype"], tuple(x["shape"]), *(begin + offset for offset in x["data_offsets"]))
            for key, x in header.items()
            if key != "__metadata__"
        }
        end = max((tensor.stop for tensor in tensors.values()), default=begin)
        if end != size:
            raise ValueError(f"it has {size:,} bytes, its header says {end:,}")
    return tensors


def _digest(opened: Any, tensor: TensorInFile) -> int:
    digest = zlib.crc32(f"{tensor.dtype} {tensor.shape}".encode())
    for start in (tensor.start, max(tensor.start, tensor.stop - SAMPLE)):
        opened.seek(start)
        digest = zlib.crc32(opened.read(min(SAMPLE, tensor.stop - start)), digest)
    return digest
