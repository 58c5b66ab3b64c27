"""Where what checkpointing keeps lies until its backward."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Stored(Protocol):
    """A tensor that was moved away."""

    def get(self) -> Tensor: ...
    def drop(self) -> None: ...


class Store(Protocol):
    """Moves tensors away."""

    def put(self, tensor: Tensor) -> Stored: ...
