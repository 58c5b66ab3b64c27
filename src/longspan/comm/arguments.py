"""Check arguments of public functions: tensors, dimensions, groups, shardings.

They use facts that are the same on every rank, before anything is sent. (Numbers and flags: `core/validation.py`.)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from longspan.core.errors import LongspanError
from longspan.core.layout import Layout
from longspan.core.validation import format_value


def describe(value: object) -> str:
    """Format a value for an error message; of a tensor its dtype, shape and device."""
    if isinstance(value, Tensor):
        return f"a tensor {value.dtype} {tuple(value.shape)} on {value.device}"
    text = format_value(value)
    return text if text.startswith("an instance of") else f"{text} ({type(value).__name__})"


def check_tensor(name: str, x: Any, dims: int | None = None) -> None:
    """Raise unless `x` is a tensor, with `dims` dimensions if given."""
    if not isinstance(x, Tensor) or (dims is not None and x.dim() != dims):
        wanted = "a tensor" if dims is None else f"a tensor of {dims} dimension{'s' * (dims != 1)}"
        raise LongspanError(f"`{name}` must be {wanted}, got {describe(x)}")


def check_integers(name: str, x: Any, dims: int | None = None) -> None:
    """Raise unless `x` is a tensor of integers."""
    check_tensor(name, x, dims)
    if x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
        raise LongspanError(f"`{name}` must be a tensor of integers, got {describe(x)}")


def check_dim(x: Tensor, dim: Any, name: str = "dim") -> int:
    """Return a dimension of a tensor, counted from 0; raise if there is no such dimension."""
    n = x.dim()
    if isinstance(dim, bool) or not isinstance(dim, int) or not -n <= dim < n:
        raise LongspanError(f"`{name}`={format_value(dim)} is no dimension of a tensor of shape {tuple(x.shape)}")
    return dim % n


def check_two_dims(x: Any, a: Any, b: Any) -> tuple[int, int]:
    """Return two dimensions of a tensor, counted from 0; raise if they are the same or there is no such dimension."""
    check_tensor("x", x)
    first, second = check_dim(x, a), check_dim(x, b)
    if first == second:
        raise LongspanError(f"two different dimensions are needed, got {a} and {b} of the shape {tuple(x.shape)}")
    return first, second


def check_group(group: Any, name: str = "group") -> None:
    """Raise unless `group` is a process group, or None for a single process."""
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise LongspanError(
            f"`{name}` must be a process group or None, got {describe(group)}; a sharding has sp.ulysses_group, "
            "sp.ring_group and sp.group"
        )


DTYPES = {
    "fp32": torch.float32, "float32": torch.float32, "float": torch.float32,
    "bf16": torch.bfloat16, "bfloat16": torch.bfloat16,
    "fp16": torch.float16, "float16": torch.float16, "half": torch.float16,
    "fp64": torch.float64, "float64": torch.float64, "double": torch.float64,
}  # fmt: skip
"""Floating dtypes by their usual names."""


def as_dtype(name: str, value: Any) -> torch.dtype:
    """Return a floating dtype, given as such or by name ("bf16", "bfloat16", "torch.bfloat16").

    Raises:
        LongspanError: for anything else.
    """
    found = DTYPES.get(value.removeprefix("torch.")) if isinstance(value, str) else value
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise LongspanError(
            f"`{name}` must be a floating dtype of torch or its name, such as torch.bfloat16 or 'bf16', got "
            f"{describe(value)}"
        )
    return found


def check_module(name: str, model: Any) -> None:
    """Raise unless `model` is a torch.nn.Module."""
    if not isinstance(model, nn.Module):
        raise LongspanError(f"`{name}` must be a model (a torch.nn.Module), got {describe(model)}")


def check_optimizer(name: str, optimizer: Any) -> None:
    """Raise unless `optimizer` is a torch.optim.Optimizer."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise LongspanError(f"`{name}` must be a torch.optim.Optimizer object, got {describe(optimizer)}")


def check_sharding(sp: Any) -> None:
    """Raise unless `sp` is a `SequenceSharding`."""
    if not isinstance(getattr(sp, "layout", None), Layout):
        raise LongspanError(
            f"`sp` must be a longspan.SequenceSharding, got {describe(sp)}; make one of a mesh: "
            "SequenceSharding(longspan.init_mesh(ulysses=4))"
        )
