"""longspan's entry in the mask registry of transformers: which mask a model requests, read from its mask function."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longspan.attn.mask import Mask
from longspan.compat.torch_api import not_compiled
from longspan.compat.transformers_api import mask_function as transformers_mask
from longspan.compat.transformers_api import parts_of
from longspan.core.errors import LongspanError
from longspan.hf.support import HELP

_CAUSAL, _BIDIRECTIONAL = (transformers_mask(kind) for kind in ("causal", "bidirectional"))


class _NoTensor(LongspanError, AttributeError):
    """A model uses its mask as a tensor. `hasattr` and `getattr` still see a missing attribute."""


@dataclass(frozen=True)
class MaskRequest:
    """The mask that a model requests, in terms of `Mask`."""

    causal: bool
    window: int | None = None
    chunk_size: int | None = None

    def __getattr__(self, name: str) -> Any:
        raise _NoTensor(f"a layer uses .{name} of its attention mask, so it derives another mask from it; {HELP}")

    def __getitem__(self, index: Any) -> Any:
        raise LongspanError(f"a layer slices its attention mask, so it derives another mask from it; {HELP}")

    def allows(self, i: Tensor, j: Tensor) -> Tensor:
        """Return whether tokens i may attend to tokens j, of the same shape."""
        return Mask(self.causal, self.window, self.chunk_size).pairwise(i, j)


@not_compiled  # it reads closures, and returns no tensor
def longspan_mask(
    *_: Any,
    mask_function: Any = _CAUSAL,
    local_size: int | None = None,
    device: torch.device | str = "cpu",
    **more: Any,
) -> MaskRequest:
    """Return the mask that a model requests from the registry, without building a tensor.

    A mask function is opaque, so compare it with each supported mask, on tokens around the borders of windows and
    chunks. It sees no padding or documents: `ShardBatch` removes them from the inputs.

    Raises:
        LongspanError: for a mask that is none of causal, bidirectional, a sliding window of either, or causal chunks.
    """
    if local_size is not None and local_size < 1:  # a window that no layer uses (Qwen2-MoE), and that `Mask` refuses
        return MaskRequest(causal=True, window=local_size)
    if mask_function is _CAUSAL:
        return MaskRequest(causal=True)
    if mask_function is _BIDIRECTIONAL:
        return MaskRequest(causal=False)
    requests = [MaskRequest(causal=True), MaskRequest(causal=False)]
    if local_size is not None:
        requests = [
            MaskRequest(causal=True, window=local_size),
            MaskRequest(causal=True, chunk_size=local_size),
            MaskRequest(causal=False, window=local_size + 1),  # |i - j| <= size, in transformers' encoders
            MaskRequest(causal=False, window=local_size),
        ]
    tensors = list(_tensors_in(mask_function))
    if not any(x.dim() > 1 for x in tensors):  # otherwise it depends on the tokens
        i, j = _around(local_size or 1, device if tensors else "cpu")
        try:
            zero = torch.zeros_like(i)
            allowed = mask_function(zero, zero, i, j).bool().expand_as(i)
        except Exception:  # a function of another form may raise anything
            requests = []
        for request in requests:
            if torch.equal(allowed, request.allows(i, j)):
                return request
    raise LongspanError(
        f"the model asks for the attention mask {_name(mask_function)} (local size {local_size}), which is not "
        f"supported; supported are causal and bidirectional masks, sliding windows of both, causal chunks, padding and "
        f"packed documents"
    )


def _around(size: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Return pairs of tokens on both sides of every border that a window or chunk of `size` may have."""
    at = {0, 1, size - 1, size, size + 1, 2 * size - 1, 2 * size, 2 * size + 1, 3 * size + 1}
    steps = {d + e for d in (-size, 0, size) for e in (-2, -1, 0, 1, 2)}
    pairs = sorted({(i, j) for i in at for j in at | {i + step for step in steps} if j >= 0})
    i, j = torch.tensor(pairs, device=device).unbind(1)
    return i, j


def _tensors_in(function: Any) -> Iterator[Tensor]:
    for value in parts_of(function):
        if isinstance(value, Tensor):
            yield value
        elif callable(value):
            yield from _tensors_in(value)


def _name(function: Any) -> str:
    """Return the name of a mask function, with those that it combines."""
    name = str(getattr(function, "__qualname__", repr(function))).split(".<locals>")[0]
    parts = [_name(value) for value in parts_of(function) if callable(value) and not isinstance(value, Tensor)]
    return f"{name}({', '.join(parts)})" if parts else name
