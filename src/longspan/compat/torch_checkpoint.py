"""Private names of torch's Distributed Checkpoint, and of torchao's 8-bit and 4-bit optimizer states, tensor classes
that checkpoints and meshes do not support.
"""

from __future__ import annotations

import math
import zlib
from typing import Any

import torch
from torch import Tensor
from torch.compiler import config as compiler
from torch.distributed.tensor import DTensor, Shard

from longspan.core.errors import LongspanError


def flat_names(state: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a nested state by the names that torch saves them under: keys and indices joined by dots.

    Weights that torchao gathers in float8, and optimizer states made like them, are plain tensors of the same memory.
    """
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    return {name: _unwrapped(x) for name, x in flatten_state_dict(state)[0].items()}


def _unwrapped(x: Any) -> Any:
    local: Any = x.to_local() if isinstance(x, DTensor) else x
    wraps = type(local).__name__ == "WeightWithDynamicFloat8CastTensor"
    return _like(x, local._tensor, tuple(x.shape)) if wraps else x


_FEWEST = 4096  # elements of a weight for which low-bit states pay (as in bitsandbytes)


def low_bit_adamw(kind: Any) -> type[torch.optim.Optimizer]:
    """Return torchao's AdamW8bit or AdamW4bit (`kind`) with the same kind of state on all ranks, so that a checkpoint
    can store it.

    torchao chooses few bits by each rank's part of a weight, and parts differ. Here a weight's states have them if
    every rank's part consists of whole blocks (`block_size` elements). torchao's `_new_buffer` makes a state.
    """

    class LowBitAdamW(kind):  # type: ignore[misc]
        def __init__(self, params: Any, **options: Any) -> None:
            super().__init__(params, **options)
            # Compiled code is cached on disk by the whole weight's shape; ranks have different parts, of 8 or 4 bits.
            weights = [p for group in self.param_groups for p in group["params"]]
            locals_ = [p.to_local() if isinstance(p, DTensor) else p for p in weights]
            parts = [(x.shape, _scale_shape(p, self.block_size)) for p, x in zip(weights, locals_, strict=True)]
            self.tag = f"longspan {kind.__name__} {zlib.crc32(str(parts).encode())}"

        def _new_buffer(self, p: Tensor, signed: bool) -> Tensor:
            local = p.to_local() if isinstance(p, DTensor) else p
            blocks = _scale_shape(p, self.block_size) is not None
            out: Tensor = self._subclass_zeros(local, signed, self.block_size) if blocks else torch.zeros_like(local)
            return _like(p, out, tuple(p.shape)).to(p.device)

        def step(self, closure: Any = None) -> Any:
            with compiler.patch(cache_key_tag=self.tag):  # type: ignore[attr-defined]
                return super().step(closure)

    return LowBitAdamW


def as_plain(state: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state dict with each low-bit tensor as plain codes and scales that share its memory.

    Codes of 8 bits have the weight's shape; scales, and codes of 4 bits, as many rows as there are rows of whole
    blocks. Sharded like the weight, they can be loaded on another mesh.
    """
    if "state" not in state:
        return state
    plain = {
        name: {key: _plain(x) for key, x in values.items()} if isinstance(values, dict) else values
        for name, values in state["state"].items()
    }
    return {**state, "state": plain}


def _plain(x: Any) -> Any:
    local = x.to_local() if isinstance(x, DTensor) else x
    if not (isinstance(local, Tensor) and hasattr(local, "codes") and hasattr(local, "scale")):
        return x
    packed = local.codes.numel() < local.numel()  # 4 bits, two in a byte
    block = local.numel() // local.scale.numel()
    shape = _scale_shape(x, block)
    if shape is None:
        raise LongspanError(
            f"a low-bit optimizer state of shape {tuple(x.shape)} does not consist of whole blocks of {block} elements "
            "on every rank, so a checkpoint cannot store it; make the optimizer by longspan.trainer, or use AdamW"
        )
    codes, codes_shape = local.codes, tuple(x.shape)
    if packed:
        codes_shape = (shape[0], shape[1] * block // 2)
        codes = codes.view(-1, codes_shape[1])
    return {"codes": _like(x, codes, codes_shape), "scale": _like(x, local.scale.view(-1, shape[1]), shape)}


def _scale_shape(x: Tensor, block: int) -> tuple[int, int] | None:
    """Return (rows of whole blocks, blocks in such a row), or None if a rank's part is not of whole blocks."""
    if not x.dim() or x.numel() < _FEWEST or x.numel() % block:
        return None
    width = math.prod(x.shape[1:])
    rows = block // math.gcd(width, block)  # the fewest with whole blocks
    if isinstance(x, DTensor):
        ranks = x.device_mesh.size()
        part = -(-x.shape[0] // ranks)
        if x.placements != (Shard(0),) or part % rows or part * (ranks - 1) >= x.shape[0]:
            return None
    return x.shape[0] // rows, rows * width // block


def _like(x: Tensor, local: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return `local` as a rank's part of a tensor of `shape` that is sharded like `x`."""
    if not isinstance(x, DTensor):
        return local
    stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    sharded: Tensor = DTensor.from_local(
        local, x.device_mesh, x.placements, run_check=False, shape=torch.Size(shape), stride=stride
    )
    return sharded
