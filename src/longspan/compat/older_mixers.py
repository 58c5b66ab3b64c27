"""Recurrent layers of transformers before 5.15, which call kernels, or else compute inline: no function to replace.

The path with kernels is run, and functions stand in for them, under the names that newer versions have.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

_NEWER = {
    "causal_conv1d_fn": "causal_conv1d_fn",
    "chunk_gated_delta_rule": "torch_chunk_gated_delta_rule",
    "mamba_chunk_scan_combined": "mamba2_chunk_scan",
}
"""Globals of a layer's file, or attributes of the layer, by their names in 5.15 and newer."""

_OTHERS = {"selective_scan_fn", "cuda"}  # Mamba's scan; Falcon-H1 switches the CUDA device
_PLAIN = "torch_forward"  # without kernels; those of Nemotron-H and Zamba-2 clamp time steps in another way


def older_mixer_functions(module: Any) -> dict[str, Any]:
    """Return the kernels that a layer calls by their newer names; None for one that is not installed.

    Versions: 5.5 to 5.14, where Gated DeltaNet, Mamba-2, Bamba, Granite-hybrid and LFM2 do. When gone: empty.
    """
    kind: Any = type(module)
    names = _names_of_kernels(kind)
    if not names:
        return {}
    file = _with_kernels(kind).__globals__
    found = {_NEWER[name]: getattr(module, name, file.get(name)) for name in names}
    return {**found, "causal_conv1d_fn": found["causal_conv1d_fn"] or _causal_conv1d}


@functools.lru_cache(maxsize=256)
def _names_of_kernels(kind: Any) -> list[str]:
    names, plain = _names(_with_kernels(kind)), getattr(kind, _PLAIN, None)
    if "causal_conv1d_fn" not in names or _OTHERS & names or (plain and "time_step_limit" not in _names(plain)):
        return []
    return [name for name in _NEWER if name in names]


def older_forward_with(module: Any, functions: dict[str, Any]) -> Callable[..., Any]:
    """Return a layer's forward as `forward_with` does, with functions by their newer names. When gone: unused."""
    original, forward = _with_kernels(type(module)), inspect.signature(unwrapped(type(module).forward))
    ours = {name: functions[newer] for name, newer in _NEWER.items() if newer in functions}
    if scan := functions.get("mamba2_chunk_scan"):
        ours["mamba_chunk_scan_combined"] = lambda *args, **options: (
            scan(*args, **{**options, "return_final_states": False}).contiguous(), None,
        )  # fmt: skip
    copied = types.FunctionType(
        original.__code__, {**original.__globals__, **ours}, None, original.__defaults__, original.__closure__
    )
    # "training": in training, Mamba-2 would call a kernel that fuses convolution and scan.
    overridden = _Overridden(module, {**ours, "training": False})
    names = list(forward.parameters)[1:4]  # hidden states, cache, mask

    def compute(*args: Any, **kwargs: Any) -> Any:
        given = forward.bind(module, *args, **kwargs).arguments
        return copied(overridden, *(given.get(name) for name in names))

    return compute


class _Overridden:
    """A module with some attributes replaced, for a forward that is called with it as `self`."""

    def __init__(self, module: Any, others: dict[str, Any]) -> None:
        vars(self).update(others, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _with_kernels(kind: Any) -> Any:
    return unwrapped(getattr(kind, "cuda_kernels_forward", kind.forward))


def unwrapped(function: Any) -> Any:
    """Return a function without its decorators.

    Versions: 5.14 and 5.15 have one that hides the function. When gone: as `inspect.unwrap`.
    """
    function = inspect.unwrap(function)
    hidden = getattr(getattr(function, "__code__", None), "co_freevars", ())
    if "forward_func" not in hidden:
        return function
    return unwrapped(function.__closure__[hidden.index("forward_func")].cell_contents)


def _names(function: Any) -> set[str]:
    """Return the names of the globals and attributes in a function."""
    code = getattr(function, "__code__", None)
    return set() if code is None else {*code.co_names}


def _causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None) -> Tensor:
    size = weight.shape[1] - 1
    out = F.conv1d(x, weight.unsqueeze(1), bias, padding=size, groups=len(weight))[..., : x.shape[2]]
    return F.silu(out) if activation in ("silu", "swish") else out
