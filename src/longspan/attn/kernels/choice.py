"""Which kernel computes an attention, and why: decided from facts that are alike on every rank, and always said."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor

from longspan.attn.kernels import flash as flash  # registers itself
from longspan.attn.kernels import flash_attn as flash_attn  # registers itself
from longspan.attn.kernels.base import ALIASES, REGISTRY, BlockKernel, Kernel, Need
from longspan.attn.kernels.custom import FunctionKernel
from longspan.attn.kernels.eager import EAGER
from longspan.attn.kernels.flex import FLEX, compiles
from longspan.attn.kernels.sdpa import SDPA, SHORT_WINDOW, beyond_sdpa
from longspan.attn.kernels.tiled import TILED
from longspan.attn.score import Scores
from longspan.core.checked import spell
from longspan.core.errors import LongspanError

AnyKernel = str | Kernel | Callable[..., Tensor]
"""What a caller may ask for: a name, a kernel of one's own, or a function `f(q, k, v, *, causal, scale, ...)`."""

_log = logging.getLogger("longspan")


@dataclass(frozen=True)
class Choice:
    """A kernel and the reason for it.

    Attributes:
        name: "sdpa", "tiled", "flash_attn", "flex", "eager", or that of a kernel of one's own.
        reason: why this one.
    """

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


def choose_kernel(kernel: AnyKernel, need: Need) -> tuple[Kernel, Choice]:
    """The kernel that `kernel` stands for here, and why.

    Raises:
        LongspanError: for a kernel that is unknown, not installed, or cannot do this; with one that can.
    """
    if isinstance(kernel, str) and kernel not in ("auto", *REGISTRY, *ALIASES):
        raise LongspanError(
            f"kernel={kernel!r} is unknown; choose {', '.join(('auto', *REGISTRY))}, or pass a callable"
        )
    found, choice = _auto(need) if kernel == "auto" else _asked_for(as_kernel(kernel), need)
    if need.grad and gives_lse(found):
        refuse_learnt_biases(found.name, need.scores, need.device)
    return found, choice


def _asked_for(found: Kernel, need: Need) -> tuple[Kernel, Choice]:
    refusal = found.refuses(need)
    if refusal is not None:
        raise LongspanError(refusal)
    if need.ring > 1 and found is SDPA:
        why = f"in a ring blocks are added up by log-sum-exps; {TILED.describe(need)}"
        return TILED, Choice(TILED.name, why)
    if need.ring > 1 and found is not EAGER and not gives_lse(found):
        raise LongspanError(
            f"the kernel {found.name} gives no log-sum-exps, by which a ring of {need.ring} adds up blocks; use "
            f"kernel='auto', or ring=1 with more ulysses"
        )
    return found, Choice(found.name, found.describe(need))


def as_kernel(kernel: AnyKernel) -> Kernel:
    """The kernel of a name, or a function as one.

    Raises:
        LongspanError: for what is neither.
    """
    if isinstance(kernel, str):
        return REGISTRY[ALIASES.get(kernel, kernel)]
    if isinstance(kernel, Kernel):
        return kernel
    function: Any = kernel
    if not callable(function):
        known = ", ".join(("auto", *REGISTRY))
        raise LongspanError(f"kernel={spell(kernel)} is neither a name ({known}) nor a callable")
    return FunctionKernel(function)


def gives_lse(kernel: Kernel) -> TypeGuard[BlockKernel]:
    """Whether a kernel computes block by block, with log-sum-exps (`BlockKernel`)."""
    return all(hasattr(kernel, name) for name in ("prepare", "forward", "backward", "accumulate"))


def _auto(need: Need) -> tuple[Kernel, Choice]:
    mask, scores = need.mask, need.scores
    more, tiles = beyond_sdpa(need), TILED.describe(need)
    if need.ring > 1:
        why = "a ring adds up blocks by their log-sum-exps"
        unlike_flash = mask.mod is not None or mask.window is not None or scores.softcap is not None or scores.has_bias
        if compiles(need.device) and unlike_flash:
            return FLEX, Choice(FLEX.name, f"{why}; {FLEX.describe(need)}")
        return TILED, Choice(TILED.name, f"{why}; {tiles}")
    wanted = f"sdpa cannot do {', '.join(more)}"
    if not more:
        if mask.window is None or mask.window <= SHORT_WINDOW:
            return SDPA, Choice(SDPA.name, SDPA.describe(need))
        wanted = f"sdpa would materialize the mask of a window of {mask.window} tokens, twice as wide"
    if compiles(need.device):
        return FLEX, Choice(FLEX.name, f"{wanted}; FlexAttention compiles it")
    return TILED, Choice(TILED.name, f"{wanted}; {tiles}")


def refuse_learnt_biases(kernel: str, scores: Scores, device: torch.device) -> None:
    """Refuse a bias that is learnt, with a kernel that gives it no gradient: one that computes block by block.

    Raises:
        LongspanError: with the way out.
    """
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


@functools.cache
def tell(choice: Choice) -> None:
    """Log a choice, the first time that it is made in this process."""
    _log.info("attention kernel %s", choice)
