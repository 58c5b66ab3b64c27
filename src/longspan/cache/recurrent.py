"""States of recurrent layers, short convolutions and compressors in a KV cache; every rank holds them whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


class RecurrentLayer:
    """The state of one recurrent layer or short convolution, equal on every rank of a sequence group.

    The layer gets this object as its cache. For one new token, `updates` is set: the layer reads the state here, and
    updates it in place. For a prompt, the layer finds no state: its replaced functions read the state
    here, and store the next one.

    Attributes:
        conv: the last inputs of its convolution, `[B, channels, kernel - 1]`, of a compressor or window, `[B, tokens,
            channels]`; None before the first forward.
        recurrent: its state, in the layer's own form; None before the first forward, or if it only convolves.
        updates: whether the forward in progress is one token per row, for the layer's own update.
        is_read: whether the layer has read its state here in the forward in progress.
    """

    def __init__(self) -> None:
        self.conv: Tensor | None = None
        self.recurrent: Tensor | None = None
        self.updates = self.is_read = False

    def begin(self, updates: bool) -> None:
        """Begin a forward of the layer."""
        self.updates, self.is_read = updates, False

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors that exist, by attribute."""
        both = {"conv": self.conv, "recurrent": self.recurrent}
        return {name: x for name, x in both.items() if x is not None}

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.tensors.values())

    @property
    def rows(self) -> int | None:
        """Rows of the batch; None before the first forward."""
        return next((len(x) for x in self.tensors.values()), None)

    def select_rows(self, indices: Tensor) -> None:
        """Keep these rows, in this order; a row may be repeated."""
        for name, x in self.tensors.items():
            setattr(self, name, x.index_select(0, indices.to(x.device)))

    # --- what a layer calls of transformers.Cache

    def get_conv_state(self, *_: Any, **__: Any) -> Tensor | None:
        self.is_read = self.updates
        return self.conv if self.updates else None

    def get_recurrent_state(self, *_: Any, **__: Any) -> Tensor | None:
        self.is_read = self.updates
        return self.recurrent if self.updates else None

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        return self.updates

    def update_conv_state(self, inputs: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return the inputs: the convolution itself finds those before them, and stores the last ones."""
        return inputs

    def update_recurrent_state(self, state: Tensor, *_: Any, **__: Any) -> Tensor:
        self.recurrent = state
        return state

    def is_recording_past(self, *_: Any) -> bool:
        return False
