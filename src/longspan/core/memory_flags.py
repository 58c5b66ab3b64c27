"""The memory options of `longspan.core.memory` as flags of a command; `longspan plan` and `longspan train` have the
same.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, ClassVar, Literal, TypeVar

from longspan.core.errors import LongspanError
from longspan.core.memory import FASTEST, LONGEST, Memory, MemoryLevel

Flags = TypeVar("Flags")


@dataclass(frozen=True, kw_only=True)
class MemoryFlags:
    """The memory options that save memory."""

    default_level: ClassVar[MemoryLevel] = "fastest"  # of by-flags, where no flag sets a memory option

    memory: Literal["by-flags", "fastest", "longest", "auto"] = "by-flags"
    """The memory options that save memory, together. fastest: none. longest: the least memory without offload. auto:
    the fastest combination that fits by the planner, for each mesh (a disk is used where it is asked for, and not
    otherwise). The flags below set one memory option each, whatever this says. by-flags: exactly what these flags say;
    without any, plan and train take auto, and verify takes fastest."""
    checkpointing: Literal["by-memory", "none", "save_attention", "selective", "full"] = "by-memory"
    """What of a layer is kept for its backward: everything, its input and all of its attention, its input and its
    attention's output, its input alone. by-memory: as --memory says."""
    grad_checkpointing: bool = False
    """The same as --checkpointing full."""
    layers_per_checkpoint: int | None = None
    """Layers that share one kept input; the others' are made again in the backward. 1: each keeps its own. 0: as many
    as hold the fewest."""
    offload: Literal["by-memory", "none", "host", "disk"] = "by-memory"
    """Where that lies until the backward: on the GPU, in the host's memory, on a local disk."""
    tiled_mlp: int | None = None
    """Tiles in which the MLP works through its tokens, forward and backward. 1: all at once. 0: as many as make a
    tile's intermediates about as large as the hidden states."""
    tiled_norms: bool = False
    """Norms keep their input alone, and are computed again in the backward."""
    recompute_mlp_act: bool | None = None
    """The MLP's activation function and product are computed again in the backward; on by itself."""
    head_chunks: int | None = None
    """Pieces in which heads go through exchange and attention. 1: all at once. 0: one for each of a rank's KV heads."""
    cpu_offload: bool = False
    """Weights, gradients and optimizer states stay in the host's memory."""

    def fixed(self) -> dict[str, Any]:
        """The memory options that a flag of their own sets, by the fields of `Memory`.

        Raises:
            LongspanError: for two flags that say different things of one memory option.
        """
        given: dict[str, Any] = {
            "checkpointing": None if self.checkpointing == "by-memory" else self.checkpointing,
            "offload": None if self.offload == "by-memory" else self.offload,
            "layers_per_checkpoint": self.layers_per_checkpoint,
            "tiled_mlp": self.tiled_mlp,
            "tiled_norms": self.tiled_norms or None,
            "recompute_mlp_act": self.recompute_mlp_act,
            "head_chunks": self.head_chunks,
            "cpu_offload": self.cpu_offload or None,
        }
        if self.grad_checkpointing:
            if given["checkpointing"] not in (None, "full"):
                raise LongspanError(
                    f"--grad-checkpointing is --checkpointing full, and --checkpointing {self.checkpointing} is "
                    f"given too; leave one of them out"
                )
            given["checkpointing"] = "full"
        return {name: value for name, value in given.items() if value is not None}

    @property
    def level(self) -> MemoryLevel:
        """The level in force: `memory`, or what `by-flags` stands for."""
        if self.memory != "by-flags":
            return self.memory
        return "fastest" if self.fixed() else self.default_level

    @property
    def chooses(self) -> bool:
        """Whether the planner chooses memory options."""
        return self.level == "auto"

    def levels(self) -> Memory:
        """The memory options that are asked for; of those that the planner chooses, the fixed ones over the fastest.

        Raises:
            LongspanError: for memory options that cannot be together.
        """
        fixed = self.fixed()
        # It chooses a checkpointing to go with them.
        if self.chooses and (fixed.get("offload", "none") != "none" or fixed.get("layers_per_checkpoint", 1) != 1):
            fixed.setdefault("checkpointing", "full")
        return replace(LONGEST if self.level == "longest" else FASTEST, **fixed)


def flags_to_add(given: Memory, wanted: Memory) -> list[str]:
    """The flags that make the memory options of a command `wanted`, where they are `given` now: of those that differ
    alone.
    """
    said = []
    for field in fields(Memory):
        name, value = field.name.replace("_", "-"), getattr(wanted, field.name)
        if value == getattr(given, field.name):
            continue
        said.append(f"--{'' if value else 'no-'}{name}" if isinstance(value, bool) else f"--{name} {value}")
    return said


def flags_last(kind: type[Flags]) -> type[Flags]:
    """A config class whose help and messages name its own fields first, and those that it shares after them."""
    inherited = {field.name for base in kind.__mro__[1:] if is_dataclass(base) for field in fields(base)}
    config: Any = kind
    found: dict[str, Any] = config.__dataclass_fields__
    own = {name: field for name, field in found.items() if name not in inherited}
    config.__dataclass_fields__ = {**own, **found}
    return kind
