"""Which kernel computes an attention, and why: decided from facts that are alike on every rank, and always said."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longspan.attn.mask import Mask
from longspan.attn.score import Scores
from longspan.core.checked import spell
from longspan.core.errors import LongspanError

Kernel = str | Callable[..., Tensor]

NAMES = ("auto", "sdpa", "block", "flash_attn", "flex", "eager")

SHORT_WINDOW = 256
"""The longest window that "auto" gives to sdpa, whose mask of a window has twice the pairs that attend. Up to here that
costs no more than the many small tiles of "block" (`benchmarks/mask_cost.py`)."""

_log = logging.getLogger("longspan")


@dataclass(frozen=True)
class Choice:
    """A kernel and the reason for it.

    Attributes:
        name: "sdpa", "block", "flash_attn", "flex", "eager", or that of a callable.
        reason: why this one.
    """

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


def choose_kernel(
    kernel: Kernel,
    mask: Mask,
    scores: Scores,
    *,
    device: torch.device,
    grad: bool,
    ring: int = 1,
    same_length: bool = True,
) -> Choice:
    """The kernel that `kernel` stands for here.

    Args:
        kernel: as `longspan.attention` takes it.
        mask: what to compute.
        scores: what to compute.
        device: where.
        grad: whether gradients will be asked for.
        ring: ranks of the ring; from 2 on a kernel must give log-sum-exps that blocks are added up by.
        same_length: whether there are as many queries as keys.

    Raises:
        LongspanError: for a kernel that is unknown, not installed, or cannot do this; with one that can.
    """
    if not isinstance(kernel, str) and not callable(kernel):
        raise LongspanError(f"kernel={spell(kernel)} is neither a name ({', '.join(NAMES)}) nor a callable")
    if not isinstance(kernel, str):
        return _callable(kernel, mask, scores, ring, same_length)
    if kernel not in NAMES:
        raise LongspanError(f"kernel={kernel!r} is unknown; choose {', '.join(NAMES)}, or pass a callable")
    if kernel != "eager" and grad:
        _refuse_learnt_biases(kernel, scores, device)
    if kernel == "auto":
        return _auto(mask, scores, device, ring, same_length)
    if kernel == "eager":
        return Choice("eager", "the formula written out; its memory grows with the square of the tokens")
    if kernel == "block":
        return Choice("block", _how_tiles_run(mask, scores, device))
    _check_named(kernel, beyond_sdpa(mask, scores, same_length), device, grad, ring)
    if kernel == "sdpa" and ring > 1:
        return Choice("block", f"in a ring blocks are added up by log-sum-exps; {_how_tiles_run(mask, scores, device)}")
    return Choice(kernel, "asked for")


def _auto(mask: Mask, scores: Scores, device: torch.device, ring: int, same_length: bool) -> Choice:
    more = beyond_sdpa(mask, scores, same_length)
    tiles = _how_tiles_run(mask, scores, device)
    compiles = device.type == "cuda" and importlib.util.find_spec("triton") is not None
    if ring > 1:
        materialized = mask.mod is not None or mask.window is not None or scores.softcap is not None or scores.has_bias
        if compiles and materialized:
            return Choice("flex", "a ring adds up blocks by their log-sum-exps; FlexAttention compiles mask and scores")
        return Choice("block", f"a ring adds up blocks by their log-sum-exps; {tiles}")
    wanted = f"sdpa cannot do {', '.join(more)}"
    if not more:
        if mask.window is None or mask.window <= SHORT_WINDOW:
            return Choice("sdpa", "torch's scaled_dot_product_attention takes this mask, run by run")
        wanted = f"sdpa would write out the mask of a window of {mask.window} tokens, twice as wide"
    if compiles:
        return Choice("flex", f"{wanted}; FlexAttention compiles it")
    return Choice("block", f"{wanted}; {tiles}")


def beyond_sdpa(mask: Mask, scores: Scores, same_length: bool = True) -> list[str]:
    """What of mask and scores `sdpa` cannot do, by name."""
    named = {
        "softcap": scores.softcap is not None,
        "sinks": scores.sinks is not None,
        "alibi": scores.alibi is not None,
        "bias": scores.bias is not None,
        "mask_mod": mask.mod is not None,
        "prefix": mask.prefix is not None,
        "a window to both sides": mask.window is not None and not mask.causal,
        "keys of another sequence or length": mask.kv_segments is not None or mask.q_start > 0 or not same_length,
    }
    return [name for name, there in named.items() if there]


def _how_tiles_run(mask: Mask, scores: Scores, device: torch.device) -> str:
    if scores.softcap is not None:
        return "tiles of 256 x 1024 as matrix products, because of the softcap"
    if device.type == "cpu":
        return "tiles through torch's flash attention for CPU, in fp32"
    if mask.mod is not None or scores.has_bias:
        return "tiles of 256 x 1024 as matrix products, because mask or bias must be written out"
    return "tiles through torch's flash attention, those with a mask as matrix products"


def _check_named(kernel: str, more: list[str], device: torch.device, grad: bool, ring: int) -> None:
    if kernel == "sdpa" and more:
        raise LongspanError(f"kernel='sdpa' cannot do {' or '.join(more)}; use kernel='auto', which takes one that can")
    if kernel == "flash_attn" and ring > 1:
        raise LongspanError(
            f"kernel='flash_attn' cannot be used in a ring of {ring}; use kernel='auto' (torch's flash attention by "
            f"tiles), or ring=1"
        )
    if kernel == "flex" and device.type == "cpu" and grad:
        raise LongspanError("kernel='flex': FlexAttention has no backward on CPU; use kernel='auto' or 'block'")
    if kernel == "flash_attn":
        unable = [name for name in more if name not in ("softcap", "a window to both sides")]
        if unable:
            raise LongspanError(f"kernel='flash_attn' cannot do {' or '.join(unable)}; use kernel='auto'")
        import_flash_attn()


def import_flash_attn() -> Any:
    """The package flash_attn.

    Raises:
        LongspanError: if it is not installed; how to install it.
    """
    try:
        return importlib.import_module("flash_attn")
    except ImportError as error:
        raise LongspanError(
            f"kernel='flash_attn' is not installed ({error}); `pip install flash-attn`, or use kernel='sdpa'"
        ) from error


def _refuse_learnt_biases(kernel: str, scores: Scores, device: torch.device) -> None:
    learnt = scores.alibi is not None and scores.alibi.requires_grad
    if scores.bias is not None and not learnt:
        at = torch.zeros(1, dtype=torch.int64, device=device)
        added = scores.bias_of(1, at, at, torch.float32)
        learnt = added is not None and added.requires_grad
    if learnt:
        raise LongspanError(
            f"kernel={kernel!r} gives no gradient to a bias that is learnt; use kernel='eager' (exact, but its memory "
            f"grows with the square of the tokens), or detach the bias"
        )


# ---------------------------------------------------------------------------------------------------------------------
# Any callable.


def _callable(kernel: Callable[..., Tensor], mask: Mask, scores: Scores, ring: int, same_length: bool) -> Choice:
    name = getattr(kernel, "__name__", repr(kernel))
    if ring > 1:
        raise LongspanError(
            f"the kernel {name} gives no log-sum-exps, by which a ring of {ring} adds up blocks; use kernel='auto', or "
            f"ring=1 with more ulysses"
        )
    unable = [what for what in beyond_sdpa(mask, scores, same_length) if what == "prefix" or what.startswith("keys")]
    if unable:
        raise LongspanError(f"the kernel {name} cannot be told of {' or '.join(unable)}; use kernel='auto'")
    keywords_of(kernel, mask, scores)
    return Choice(name, "passed as a callable")


def keywords_of(kernel: Callable[..., Tensor], mask: Mask, scores: Scores) -> dict[str, Any]:
    """What a callable kernel is told beside `causal` and `scale`.

    Raises:
        LongspanError: if it has no such keyword.
    """
    extra: dict[str, Any] = {
        "window": mask.window,
        "rows": mask.segments,
        "softcap": scores.softcap,
        "sinks": scores.sinks,
    }
    extra |= {"mask_mod": mask.mod, "alibi": scores.alibi, "bias": scores.bias}
    extra = {name: value for name, value in extra.items() if value is not None}
    name = getattr(kernel, "__name__", repr(kernel))
    try:
        parameters = inspect.signature(kernel).parameters.values()
    except ValueError as error:
        raise LongspanError(
            f"the kernel {name} has no Python signature; wrap it in a function f(q, k, v, *, causal, scale)"
        ) from error
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        missing = sorted({"causal", "scale", *extra} - {p.name for p in parameters})
        if missing:
            raise LongspanError(f"the kernel {name} has no keyword {', '.join(missing)}, which this attention needs")
    return extra


@functools.cache
def tell(choice: Choice) -> None:
    """Log a choice, the first time that it is made in this process."""
    _log.info("attention kernel %s", choice)
