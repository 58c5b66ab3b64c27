"""torchao's optimizer states of 8 bits: a class of tensors, which checkpoints and meshes know nothing of."""

from __future__ import annotations

import importlib
import importlib.metadata
import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from longspan.core.errors import LongspanError

_HOMES = ("torchao.optim", "torchao.prototype.low_bit_optim")
_FEWEST = 4096  # values of a weight whose states are worth blocks of 8 bits (as in bitsandbytes)


def check_torchao() -> str:
    """The version of the torchao that there is.

    Versions: torchao 0.9 to 0.18. Public way: this one. When gone: LongspanError.

    Raises:
        LongspanError: if there is none, or none with an AdamW of 8-bit states.
    """
    _adamw8bit()
    return importlib.metadata.version("torchao")


def _adamw8bit() -> Any:
    for home in _HOMES:
        try:
            return importlib.import_module(home).AdamW8bit
        except (ImportError, AttributeError):
            continue
    raise LongspanError(
        "--optimizer adamw8bit needs torchao (torchao.optim.AdamW8bit), and it is not there or cannot be imported: "
        'pip install ".[adamw8bit]" (torchao), on every machine; or leave --optimizer at adamw'
    )


def adamw8bit(groups: list[dict[str, Any]], lr: float, betas: tuple[float, float]) -> torch.optim.Optimizer:
    """torchao's AdamW8bit, with states that are alike on all ranks, so that a checkpoint can hold them.

    torchao decides about 8 bits by each rank's part of a weight, which may differ from rank to rank. Here a weight's
    states have 8 bits if every rank's part of it is a number of whole blocks of 256 values.

    Versions: torchao 0.9 to 0.18, whose `_new_buffer` makes a state. Public way: none. When gone: torchao's own states,
    which `as_plain` refuses where ranks differ.
    """
    kind = _adamw8bit()

    class AdamW8bit(kind):  # type: ignore[misc, valid-type]
        def _new_buffer(self, p: Tensor, signed: bool) -> Tensor:
            local = p.to_local() if isinstance(p, DTensor) else p
            blocks = _scale_shape(p, self.block_size) is not None
            out: Tensor = self._subclass_zeros(local, signed, self.block_size) if blocks else torch.zeros_like(local)
            return _like(p, out, tuple(p.shape)).to(p.device)

    made: torch.optim.Optimizer = AdamW8bit(groups, lr=lr, betas=betas)
    return made


def as_plain(state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state dict, with codes and scales for each tensor of 8 bits: plain tensors that share its memory.

    Codes have the weight's shape, and scales as many rows as there are rows of whole blocks: sharded like the weight,
    they can be read on another mesh.

    Versions: torchao 0.9 to 0.18 (`codes`, `scale`). Public way: none. When gone: an AttributeError.
    """
    if "state" not in state:
        return state
    return {**state, "state": {name: _plain_values(values) for name, values in state["state"].items()}}


def _plain_values(values: Any) -> Any:
    return {key: _plain(x) for key, x in values.items()} if isinstance(values, dict) else values


def _plain(x: Any) -> Any:
    local = x.to_local() if isinstance(x, DTensor) else x
    if not (isinstance(local, Tensor) and hasattr(local, "codes") and hasattr(local, "scale")):
        return x
    block = local.codes.numel() // local.scale.numel()
    shape = _scale_shape(x, block)
    if shape is None:
        raise LongspanError(
            f"an optimizer state of 8 bits and the shape {tuple(x.shape)} is not of whole blocks of {block} values on "
            f"every rank, and cannot be kept in a checkpoint; make the optimizer by longspan train, or use AdamW"
        )
    scale = local.scale.view(-1, shape[1])
    return {"codes": _like(x, local.codes, tuple(x.shape)), "scale": _like(x, scale, shape)}


def _scale_shape(x: Tensor, block: int) -> tuple[int, int] | None:
    """Of the scales of a weight: rows of whole blocks, blocks in one. None where a rank's part is no whole blocks."""
    if not x.dim() or x.numel() < _FEWEST or x.numel() % block:
        return None
    width = math.prod(x.shape[1:])
    rows = block // math.gcd(width, block)  # the fewest that are whole blocks
    if isinstance(x, DTensor):
        ranks = x.device_mesh.size()
        part = -(-x.shape[0] // ranks)
        if x.placements != (Shard(0),) or part % rows or part * (ranks - 1) >= x.shape[0]:
            return None
    return x.shape[0] // rows, rows * width // block


def _like(x: Tensor, local: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A rank's part of what lies over the ranks as `x` does, and has `shape` in all."""
    if not isinstance(x, DTensor):
        return local
    stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    whole: Tensor = DTensor.from_local(
        local, x.device_mesh, x.placements, run_check=False, shape=torch.Size(shape), stride=stride
    )
    return whole
