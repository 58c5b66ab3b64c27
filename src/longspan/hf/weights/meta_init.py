"""Models whose weights have no memory yet: stubs while a model is made and changed, meta tensors while it is sharded.

A stub is a tensor of any size in the memory of one number, on the CPU: libraries that add to a model (PEFT) then make
what they add on the CPU, with values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from longspan.comm.digests import local_part
from longspan.core.errors import LongspanError


def stub(shape: Iterable[int], dtype: torch.dtype) -> Tensor:
    """A tensor of NaN (of zeros, where there is none): what is computed of it shows."""
    value = math.nan if dtype.is_floating_point else 0
    return torch.full((), value, dtype=dtype).expand(tuple(shape))


def tied_names(model: nn.Module) -> list[list[str]]:
    """The names of each parameter, in the model's order: several where it is tied."""
    found: dict[nn.Parameter, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        found.setdefault(p, []).append(name)
    return list(found.values())


def put(model: nn.Module, name: str, value: Tensor) -> None:
    """Set a parameter or buffer by its name."""
    owner, _, own = name.rpartition(".")
    setattr(model.get_submodule(owner), own, value)


def vacate(model: nn.Module, stubs: Mapping[nn.Parameter, str]) -> dict[str, str]:
    """Put a model's stubs on the meta device, ties kept.

    Args:
        model: it may hold the model whose parameters the stubs were, and parameters of its own.
        stubs: and their names.

    Returns:
        Their names in `model` -> names in `stubs`.

    Raises:
        LongspanError: if a stub has gone, or another parameter was computed of one.
    """
    names = {}
    gone = dict(stubs)
    for (first, *others), p in zip(tied_names(model), list(model.parameters()), strict=True):
        if p not in stubs:
            if p.is_floating_point() and bool(p.isnan().any()):
                raise LongspanError(
                    f"parameter {first}, which `prepare` has made, was computed of weights (or is NaN), and they are "
                    f"not loaded yet; {_WAY_OUT}"
                )
            continue
        names[first] = stubs[p]
        gone.pop(p)
        empty = nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        for name in (first, *others):
            put(model, name, empty)
    if gone:
        name = next(iter(gone.values()))
        raise LongspanError(f"`prepare` has replaced parameter {name}, which is not loaded yet; {_WAY_OUT}")
    return names


_WAY_OUT = "load the whole model with transformers, change it, and give it to longspan.parallelize"


def materialize(model: nn.Module, device: torch.device) -> None:
    """Give memory to what is on the meta device, under FSDP2 to this rank's shards; all else keeps its values."""
    ties = tied_names(model)
    both: dict[str, Any] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    kept = {name: local_part(x).clone() for name, x in both.items() if not x.is_meta}
    del both
    model.to_empty(device=device)
    for first, *others in ties:
        for name in others:
            put(model, name, model.get_parameter(first))
    both = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, values in kept.items():
        local_part(both[name]).copy_(values)
