"""Models without memory for their weights: stubs while a model is made and changed, meta tensors while it is sharded.

A stub has any shape in the memory of one number, on the CPU. So libraries that add to a model (PEFT) make their own
parameters on the CPU, with values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from longspan.comm.digests import local_part
from longspan.core.errors import LongspanError

_FIX = "load the whole model with transformers, change it, and give it to longspan.parallelize"


def stub(shape: Iterable[int], dtype: torch.dtype) -> Tensor:
    """Return a stub of NaN, which shows in whatever is computed from it; of zeros for integers."""
    value = math.nan if dtype.is_floating_point else 0
    return torch.full((), value, dtype=dtype).expand(tuple(shape))


def tied_names(model: nn.Module) -> list[list[str]]:
    """Return the names of each parameter, in the model's order: several for a tied one."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(p, []).append(name)
    return list(names.values())


def set_tensor(model: nn.Module, name: str, value: Tensor) -> None:
    """Set a parameter or buffer by its name."""
    owner, _, own = name.rpartition(".")
    setattr(model.get_submodule(owner), own, value)


def to_meta(model: nn.Module, stubs: Mapping[nn.Parameter, str]) -> dict[str, str]:
    """Move stubs to the meta device; ties and other parameters stay.

    Args:
        model: may wrap the model that the stubs belonged to, and have other parameters.
        stubs: with the names they had.

    Returns:
        By name in `model`, the name in `stubs`.

    Raises:
        LongspanError: if a stub was replaced, or another parameter was computed from one.
    """
    names = {}
    missing = dict(stubs)
    for (first, *others), p in zip(tied_names(model), list(model.parameters()), strict=True):
        if p not in stubs:
            if p.is_floating_point() and bool(p.isnan().any()):
                raise LongspanError(
                    f"`prepare` computed {first} from weights, which are not loaded yet (or it is NaN); {_FIX}"
                )
            continue
        names[first] = missing.pop(p)
        empty = nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        for name in (first, *others):
            set_tensor(model, name, empty)
    if missing:
        name = next(iter(missing.values()))
        raise LongspanError(f"`prepare` has replaced parameter {name}, which is not loaded yet; {_FIX}")
    return names


def materialize(model: nn.Module, device: torch.device) -> None:
    """Allocate tensors that are on the meta device (under FSDP2, this rank's shards); the others keep their values."""
    ties = tied_names(model)
    tensors: dict[str, Any] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    values = {name: local_part(x).clone() for name, x in tensors.items() if not x.is_meta}
    del tensors
    model.to_empty(device=device)
    for first, *others in ties:
        for name in others:
            set_tensor(model, name, model.get_parameter(first))
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, x in values.items():
        local_part(tensors[name]).copy_(x)
