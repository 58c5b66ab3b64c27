"""Memory options, as one value: `longspan.parallelize(model, sp, memory=Memory(...))`, and `--memory` of a command.

Every option is exact, and the planner costs the same value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Self

from longspan.core.errors import LongspanError
from longspan.core.reading import OneFlag, as_word, fields_of
from longspan.core.validation import check_choice, check_count, check_flag, format_value

Checkpointing = Literal["none", "selective", "full", "grouped"]
Offload = Literal["none", "host"]
MemoryLevel = Literal["fastest", "longest", "auto"]

CHECKPOINTING: tuple[Checkpointing, ...] = ("none", "selective", "full", "grouped")
OFFLOAD: tuple[Offload, ...] = ("none", "host")


@dataclass(frozen=True)
class Memory:
    """Options that save memory. Each trades time or bandwidth for it; none changes the result.

    Attributes:
        checkpointing: what a layer saves for its backward; the rest is recomputed.
            none: everything that autograd saves, but activation functions and products in MLPs.
            selective: the layer's input, and its attention's output and log-sum-exp. Neither the ring's forward nor the
            kernel runs twice; the all-to-all of the backward also carries q, k and v.
            full: the layer's input. Recomputes the whole layer.
            grouped: the input of the first layer of each group. The backward recomputes the other inputs from it
            without gradients, then each layer as usual. Of n layers about 2 sqrt(n) inputs are held instead of n, for
            one more forward of every layer but the last of each group. A layer that draws random numbers, or whose
            input is not the previous layer's output, starts a group.
        offload: "host": saved activations of a GPU wait for the backward in pinned host memory.
        tiled: MLPs work through tiles of tokens, forward and backward, so that their intermediates exist for one tile
            at a time, which are then about as large as the hidden states; the backward recomputes them. Norms save
            their input only; the backward recomputes their output, also for the linear layers and MLPs that read it.
        head_slices: slices of heads in which an attention layer runs one after another in training, forward and
            backward, so that q, k, v, the attention's output and the buffers of the all-to-all exist for one slice at
            a time. The backward recomputes each slice, but runs no kernel again that returned its log-sum-exp. At most
            one slice per query head of a rank. 0: up to 8 slices, and one for a model that cannot be sliced; with
            checkpointing "full" and no offload, in each layer the fewest that keep the peak, by the planner.
        cpu_offload: keep weights, gradients and optimizer states in host memory (FSDP2's CPUOffloadPolicy).
    """

    checkpointing: Checkpointing = "none"
    offload: Offload = "none"
    tiled: bool = False
    head_slices: int = 1
    cpu_offload: bool = False

    def __post_init__(self) -> None:
        for name, choices in (("checkpointing", CHECKPOINTING), ("offload", OFFLOAD)):
            check_choice(name, getattr(self, name), choices)
        check_count("head_slices", self.head_slices)
        for name in ("tiled", "cpu_offload"):
            check_flag(name, getattr(self, name))
        if self.offload != "none" and self.checkpointing == "none":
            raise LongspanError(
                f"offload={self.offload!r} moves what checkpointing saves, and checkpointing is 'none'; "
                f"add checkpointing='full' (or 'selective')"
            )

    @property
    def recompute_all_to_all(self) -> bool:
        """Whether attention saves my tokens' q, k, v and output, and its backward repeats the all-to-all."""
        return self.checkpointing == "selective"

    @property
    def recomputes_layers(self) -> bool:
        """Whether the backward recomputes whole layers, their attention too."""
        return self.checkpointing in ("full", "grouped")

    def describe(self) -> str:
        """Return the options that differ from `FASTEST`, as text."""
        changed = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return ", ".join(f"{name}={as_word(value)}" for name, value in changed.items()) or "fastest"


FASTEST = Memory()
"""Save what needs a matmul or communication to recompute; recompute activation functions; tile the loss."""

LONGEST = Memory(checkpointing="full", tiled=True, head_slices=0)
"""The least memory without offload, with at most two forwards per layer."""


def memory_of(asked: object) -> Memory:
    """Return the options of a level ("fastest", "longest"), or `asked` itself if it is a `Memory`."""
    if isinstance(asked, Memory):
        return asked
    levels = {"fastest": FASTEST, "longest": LONGEST}
    if isinstance(asked, str) and asked in levels:
        return levels[asked]
    raise LongspanError(
        f"memory={format_value(asked)} is unknown; choose fastest, longest or auto, or give a longspan.Memory"
    )


@dataclass(frozen=True)
class MemoryChoice(OneFlag):
    """The memory options that a user asks for: `auto,offload=host`, or in YAML `{level: auto, offload: host}`."""

    level: MemoryLevel = "fastest"  # chooses the options that are not given; auto: the planner does
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])  # given ones, as fields of `Memory`

    @classmethod
    def of(cls, level: MemoryLevel = "fastest", **options: Any) -> Self:
        choice = cls(level, options)
        choice.to_memory()
        return choice

    @classmethod
    def keys(cls) -> dict[str, Any]:
        return {"level": MemoryLevel, **fields_of(Memory)}

    def given(self) -> dict[str, Any]:
        return {"level": self.level, **self.options}

    @property
    def chooses(self) -> bool:
        """Whether the planner chooses."""
        return self.level == "auto"

    def to_memory(self) -> Memory:
        """Return the options; if the planner chooses, `FASTEST` with the given ones."""
        given = dict(self.options)
        if self.chooses and given.get("offload", "none") != "none":  # it needs a checkpointing
            given.setdefault("checkpointing", "full")
        return replace(LONGEST if self.level == "longest" else FASTEST, **given)
