"""Kernels of one's own: a function that gives the output, or one that gives the log-sum-exp too.

Whoever needs more control inherits from `BlockKernel`. A function of the second kind serves in rings as well.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from longspan.attn.kernels.base import AutogradKernel, BackwardInputs, Blocks, KernelRequest
from longspan.attn.kernels.flex import backward_by_autograd
from longspan.attn.kernels.sdpa import beyond_sdpa, segments_with_chunks
from longspan.attn.kernels.tiled import TiledKernel, TileScores, for_device
from longspan.attn.score import Scores
from longspan.core.errors import LongspanError
from longspan.core.validation import check_function, checked_call


class FunctionKernel(AutogradKernel):
    """A function `f(q, k, v, *, causal, scale, **more) -> out` on `[B, S, heads, D]`, differentiable.

    `more` holds `window`, `segments`, `softcap`, `sinks`, `mask_mod`, `alibi`, `bias` when they are set; a function
    that has no such keyword is refused. (Older functions may call the segments `rows`.)
    """

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function = function
        self.name = getattr(function, "__name__", repr(function))

    def refuses(self, need: KernelRequest) -> str | None:
        """A ring, and what the function has no keyword for."""
        if need.ring > 1:
            return (
                f"the kernel {self.name} gives no log-sum-exps, by which a ring of {need.ring} adds up blocks; use "
                f"kernel='auto', ring=1 with more ulysses, or a function that gives them (longspan.kernel_with_lse)"
            )
        unable = [what for what in beyond_sdpa(need) if what == "prefix" or what.startswith(("keys", "the mask"))]
        if unable:
            return f"the kernel {self.name} cannot be told of {' or '.join(unable)}; use kernel='auto'"
        needed = {"causal", "scale", *self._more(need.mask.segments or need.mask.chunk, need.mask, need.scores)}
        missing = sorted(needed - self._keywords) if self._keywords is not None else []
        if missing:
            return f"the kernel {self.name} has no keyword {', '.join(missing)}, which this attention needs"
        return None

    def describe(self, need: KernelRequest) -> str:
        """Whose it is."""
        return "passed as a callable"

    @functools.cached_property
    def _keywords(self) -> frozenset[str] | None:
        """Names that the function takes; None for any."""
        try:
            parameters = inspect.signature(self.function).parameters.values()
        except ValueError as error:
            raise LongspanError(
                f"the kernel {self.name} has no Python signature; wrap it in a function f(q, k, v, *, causal, scale)"
            ) from error
        return None if any(p.kind is p.VAR_KEYWORD for p in parameters) else frozenset(p.name for p in parameters)

    def _more(self, segments: Any, mask: Any, scores: Scores) -> dict[str, Any]:
        old = self._keywords is not None and "rows" in self._keywords and "segments" not in self._keywords
        given = {"window": mask.window, "rows" if old else "segments": segments, "softcap": scores.softcap}
        given |= {"sinks": scores.sinks, "mask_mod": mask.mod, "alibi": scores.alibi, "bias": scores.bias}
        return {name: value for name, value in given.items() if value is not None}

    def prepare_batch(self, blocks: Blocks) -> tuple[Any, Any]:
        """Segments, chunks cut too, and the mask."""
        return segments_with_chunks(blocks), blocks.mask

    def run(self, q_BSHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, prepared: Any, scores: Scores) -> Tensor:
        """One call; what it gives is checked."""
        segments, mask = prepared
        more = self._more(segments, mask, scores)
        out: Tensor = self.function(q_BSHD, k_BTKD, v_BTKD, causal=mask.causal, scale=scores.scale, **more)
        expected = (*q_BSHD.shape[:3], v_BTKD.shape[3])
        if tuple(out.shape) != expected:
            raise LongspanError(
                f"the kernel returned the shape {tuple(out.shape)}, [B, S, heads, D] = {expected} is needed"
            )
        return out


class LseKernel(TiledKernel):
    """A function that gives output and log-sum-exp, called tile by tile: any mask, on one device and in rings.

    See `kernel_with_lse`.
    """

    def __init__(self, function: Callable[..., tuple[Tensor, Tensor]]) -> None:
        self.function = function
        self.name = getattr(function, "__name__", repr(function))

    def refuses(self, need: KernelRequest) -> str | None:
        """A softcap, of which a tile's function is not told."""
        if need.scores.softcap is not None:
            return f"the kernel {self.name} cannot be told of softcap; use kernel='auto'"
        return None

    def describe(self, need: KernelRequest) -> str:
        """Whose it is."""
        return "passed as a callable that gives log-sum-exps, called tile by tile"

    def laid(self, xs: Sequence[Tensor], v_dim: int, scores: Scores) -> list[Tensor]:
        """In fp32 on a CPU; heads of v as long as they are."""
        return for_device(*xs)

    def tile_forward(self, q: Tensor, k: Tensor, v: Tensor, how: TileScores) -> tuple[Tensor, Tensor]:
        """The function's output and log-sum-exp, checked."""
        bias, empty = how.bias, None
        if bias is not None:  # rows that see nothing are given something, or the gradient of their lse were NaN
            empty = torch.isneginf(bias).all(-1)
            bias = bias.masked_fill(empty[..., None], 0.0)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        found: Any = self.function(q, k, v, causal=how.kind == "causal", scale=how.scale, bias=bias)
        shapes = [tuple(x.shape) for x in found] if isinstance(found, tuple) else [type(found).__name__]
        B, Q, H = q.shape[:3]
        expected = [(B, Q, H, v.shape[3]), (B, H, Q)]
        if shapes != expected:
            raise LongspanError(
                f"the kernel {self.name} returned {shapes}; (out, lse) of [B, Q, H, Dv] and [B, H, Q] is needed: "
                f"{expected}"
            )
        out, lse = found
        if empty is not None:
            empty = empty.expand(lse.shape)
            lse = torch.where(empty, -torch.inf, lse)
            out = torch.where(empty.transpose(1, 2)[..., None], 0.0, out)
        return out.transpose(1, 2), lse

    def tile_backward(
        self, done: BackwardInputs, k: Tensor, v: Tensor, how: TileScores
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The function once more, and autograd's backward of it."""
        return backward_by_autograd(functools.partial(self.tile_forward, how=how), done, k, v)


@checked_call()
def kernel_with_lse(function: Callable[..., tuple[Tensor, Tensor]]) -> LseKernel:
    """A kernel from a function that gives the log-sum-exp too, so that it serves in rings.

    Args:
        function: `f(q, k, v, *, causal, scale, bias) -> (out, lse)`, differentiable in both, for one tile: q
            `[B, Q, H, D]`, k and v `[B, T, K, D]` with K dividing H; `causal` only where Q = T, the tile on the
            diagonal; `bias` what is added to the scores, -inf where a mask hides a key, broadcast to `[B, H, Q, T]`, or
            None. `out` is `[B, Q, H, Dv]`, `lse` the log of the sum of the exponentials of the scores, `[B, H, Q]`,
            fp32 at least.

    Returns:
        What `longspan.attention(kernel=...)` and `longspan.parallelize(kernel=...)` take. Also usable as a decorator.
    """
    check_function("function", function, "q, k, v, *, causal, scale, bias")
    return LseKernel(function)
