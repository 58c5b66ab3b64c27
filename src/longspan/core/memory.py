"""Memory options, as one value (`longspan.parallelize(model, sp, memory=Memory(...))`) and as flags of a command.

Every option is exact. The planner costs the same value (`longspan plan --memory ...`)."""

from __future__ import annotations

import dataclasses
import inspect
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, TypeVar

from longspan.core.errors import LongspanError
from longspan.core.validation import check_choice, check_count, check_flag, checked_call, format_value, path_of

Checkpointing = Literal["none", "save_attention", "selective", "full"]
Offload = Literal["none", "host", "disk"]
MemoryLevel = Literal["fastest", "longest", "auto"]

HeadLossName = Literal["tiled", "torch", "liger"]

CHECKPOINTING: tuple[Checkpointing, ...] = ("none", "save_attention", "selective", "full")
OFFLOAD: tuple[Offload, ...] = ("none", "host", "disk")
HEAD_LOSSES: tuple[HeadLossName, ...] = ("tiled", "torch", "liger")


@dataclass(frozen=True)
class Memory:
    """Options that save memory. Each trades time or bandwidth for it; none changes the result.

    Attributes:
        checkpointing: what a layer saves for its backward; the rest is recomputed.
            none: everything that autograd saves.
            save_attention: the layer's input and every tensor that its attention saves (q, k, v, output, log-sum-exp).
            Recomputes norms, projections and MLP; no all-to-all, ring or attention kernel runs twice.
            selective: the layer's input, and its attention's output and log-sum-exp. Neither the ring's forward nor the
            kernel runs twice; the all-to-all of the backward also carries q, k and v.
            full: the layer's input. Recomputes the whole layer.
        layers_per_checkpoint: layers that share one saved input, the first's. The backward recomputes the other inputs
            from it without gradients, then each layer as usual. Of n layers about 2 sqrt(n) inputs are held instead of
            n, for one more forward of every layer but the last of each group. 0: the smallest group that holds the
            fewest inputs. 1: every layer saves its input. A layer that draws random numbers, or whose input is not the
            previous layer's output, starts a group.
        offload: where saved activations wait for the backward: "host" (pinned memory, from a GPU) or "disk" (a file).
        offload_folder: folder of that file, on a disk local to the rank; "" for the system's temporary folder.
        tiled_mlp: tiles of tokens that an MLP works through, forward and backward, so that its intermediates exist for
            one tile at a time; the backward recomputes them. 0: chosen so that the intermediates of a tile are about as
            large as the hidden states. 1: no tiles.
        tiled_norms: norms save their input only. The backward recomputes their output, also for the linear layers and
            tiled MLPs that read it.
        recompute_mlp_act: an MLP saves the outputs of its first matmuls, and the backward recomputes the activation
            function and the product from them, bit for bit (elementwise, as fused SwiGLU kernels do). No effect in a
            checkpointed layer or a tiled MLP, which save neither, and for inputs of fewer than 8,192 elements.
        head_chunks: groups of heads that go through the all-to-all and the attention one after another (at most the KV
            heads of a rank), so that buffers between the two all-to-alls shrink to 1 / head_chunks. 0: one group per
            KV head of a rank. 1: all heads at once.
        head_loss: what computes the loss without logits: "tiled" (ours), or where they apply "torch"
            (linear_cross_entropy) and "liger".
        cpu_offload: keep weights, gradients and optimizer states in host memory (FSDP2's CPUOffloadPolicy).
    """

    checkpointing: Checkpointing = "none"
    layers_per_checkpoint: int = 1
    offload: Offload = "none"
    offload_folder: str = ""
    tiled_mlp: int = 1
    tiled_norms: bool = False
    recompute_mlp_act: bool = True
    head_chunks: int = 1
    head_loss: HeadLossName = "tiled"
    cpu_offload: bool = False

    def __post_init__(self) -> None:
        for name, choices in (("checkpointing", CHECKPOINTING), ("offload", OFFLOAD), ("head_loss", HEAD_LOSSES)):
            check_choice(name, getattr(self, name), choices)
        for name in ("tiled_mlp", "head_chunks", "layers_per_checkpoint"):
            check_count(name, getattr(self, name))
        for name in ("tiled_norms", "recompute_mlp_act", "cpu_offload"):
            check_flag(name, getattr(self, name))
        if self.offload != "none" and self.checkpointing == "none":
            raise LongspanError(
                f"offload={self.offload!r} moves what checkpointing saves, and checkpointing is 'none'; "
                f"add checkpointing='full' (or 'selective', 'save_attention')"
            )
        if self.layers_per_checkpoint != 1 and self.checkpointing == "none":
            raise LongspanError(
                f"layers_per_checkpoint={self.layers_per_checkpoint} groups layers that checkpointing recomputes, and "
                f"checkpointing is 'none'; add checkpointing='full' (or 'selective')"
            )
        if self.offload_folder:
            path_of("offload_folder", self.offload_folder)
            if self.offload != "disk":
                raise LongspanError(
                    f"offload_folder={self.offload_folder!r} needs offload='disk'; offload is {self.offload!r}"
                )

    @property
    def recompute_all_to_all(self) -> bool:
        """Whether attention saves my tokens' q, k, v and output, and its backward repeats the all-to-all."""
        return self.head_chunks != 1 or self.checkpointing == "selective"

    def describe(self) -> str:
        """Return the options that differ from `FASTEST`, as text."""
        parts = [
            f"{f.name}={getattr(self, f.name)}" for f in dataclasses.fields(self) if getattr(self, f.name) != f.default
        ]
        return ", ".join(parts) or "all activations saved"


Memory.__init__ = checked_call()(Memory.__init__)  # type: ignore[method-assign]

FASTEST = Memory()
"""Save what needs a matmul or communication to recompute; recompute activation functions; tile the loss."""

LONGEST = Memory(checkpointing="full", tiled_mlp=0, tiled_norms=True)
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
        """Return the options that flags set one by one, as fields of `Memory`."""
        names = {field.name for field in fields(Memory)}
        values = {field.name: (getattr(self, field.name), field.default) for field in fields(MemoryFlags)}
        given = {name: value for name, (value, unset) in values.items() if name in names and value != unset}
        if self.grad_checkpointing:
            if given.get("checkpointing", "full") != "full":
                raise LongspanError(
                    f"--grad-checkpointing means --checkpointing full and contradicts --checkpointing "
                    f"{self.checkpointing}; leave one of them out"
                )
            given["checkpointing"] = "full"
        return given

    @property
    def level(self) -> MemoryLevel:
        """The level that `memory` means; resolves "by-flags"."""
        if self.memory != "by-flags":
            return self.memory
        return "fastest" if self.fixed() else self.default_level

    @property
    def chooses(self) -> bool:
        return self.level == "auto"

    def to_memory(self) -> Memory:
        """Return the requested options; if the planner chooses, `FASTEST` with the fixed ones."""
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
