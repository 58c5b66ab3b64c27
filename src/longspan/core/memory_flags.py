"""The memory options of `longspan.core.memory` as command-line flags, shared by plan, train and verify."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, TypeVar

from longspan.core.errors import LongspanError
from longspan.core.memory import FASTEST, LONGEST, Memory, MemoryLevel

Flags = TypeVar("Flags")


@dataclass(frozen=True, kw_only=True)
class MemoryFlags:
    """Memory options."""

    default_level: ClassVar[MemoryLevel] = "fastest"  # of by-flags, if no flag sets a memory option

    memory: Literal["by-flags", "fastest", "longest", "auto"] = "by-flags"
    """Set all memory options together. fastest: none. longest: the least memory without offload. auto: the fastest
    combination that fits by the planner, for each mesh; it uses a disk only with --offload disk. Each flag below
    overrides one option. by-flags: only the flags below; without any, plan and train use auto, verify uses fastest."""
    checkpointing: Literal["by-memory", "none", "save_attention", "selective", "full"] = "by-memory"
    """What a layer saves for its backward; the rest is recomputed. none: everything that autograd saves.
    save_attention: its input and everything its attention saves. selective: its input, and its attention's output and
    log-sum-exp. full: its input. by-memory: as --memory says."""
    grad_checkpointing: bool = False
    """The same as --checkpointing full."""
    layers_per_checkpoint: int | None = None
    """Layers that share one saved input; the backward recomputes the others. 1: every layer saves its input. 0: the
    number that holds the fewest inputs."""
    offload: Literal["by-memory", "none", "host", "disk"] = "by-memory"
    """Where saved activations wait for the backward: on the GPU, in host memory, or on a local disk."""
    tiled_mlp: int | None = None
    """Tiles of tokens that an MLP works through, forward and backward. 1: no tiles. 0: chosen so that the intermediates
    of a tile are about as large as the hidden states."""
    tiled_norms: bool = False
    """Norms save only their input; the backward recomputes them."""
    recompute_mlp_act: bool | None = None
    """Recompute the MLP's activation function and product in the backward; on by default."""
    head_chunks: int | None = None
    """Groups of heads that go through all-to-all and attention one after another. 1: all heads at once. 0: one group
    per KV head of a rank."""
    cpu_offload: bool = False
    """Keep weights, gradients and optimizer states in host memory."""

    def fixed(self) -> dict[str, Any]:
        """Return the options that flags set one by one, as fields of `Memory`.

        Raises:
            LongspanError: two flags contradict each other.
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
                    f"--grad-checkpointing means --checkpointing full and contradicts --checkpointing "
                    f"{self.checkpointing}; leave one of them out"
                )
            given["checkpointing"] = "full"
        return {name: value for name, value in given.items() if value is not None}

    @property
    def level(self) -> MemoryLevel:
        """The level that `memory` means; resolves "by-flags"."""
        if self.memory != "by-flags":
            return self.memory
        return "fastest" if self.fixed() else self.default_level

    @property
    def chooses(self) -> bool:
        """Whether the planner chooses memory options."""
        return self.level == "auto"

    def to_memory(self) -> Memory:
        """Return the requested options; if the planner chooses, `FASTEST` with the fixed ones.

        Raises:
            LongspanError: options contradict each other.
        """
        fixed = self.fixed()
        # These need a checkpointing; the planner will choose it.
        if self.chooses and (fixed.get("offload", "none") != "none" or fixed.get("layers_per_checkpoint", 1) != 1):
            fixed.setdefault("checkpointing", "full")
        return replace(LONGEST if self.level == "longest" else FASTEST, **fixed)


def flags_to_add(given: Memory, target: Memory) -> list[str]:
    """Return the flags that change a command's memory options from `given` to `target`."""
    flags = []
    for field in fields(Memory):
        name, value = field.name.replace("_", "-"), getattr(target, field.name)
        if value == getattr(given, field.name):
            continue
        flags.append(f"--{'' if value else 'no-'}{name}" if isinstance(value, bool) else f"--{name} {value}")
    return flags


def flags_last(kind: type[Flags]) -> type[Flags]:
    """Reorder the fields of a config class so that help and messages list its own before inherited ones."""
    config: Any = kind
    all_fields: dict[str, Any] = config.__dataclass_fields__
    own_first = [name for cls in kind.__mro__ for name in inspect.get_annotations(cls) if name in all_fields]
    config.__dataclass_fields__ = {name: all_fields[name] for name in own_first}
    return kind
