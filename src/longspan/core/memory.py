"""Memory options, as one value: `longspan.parallelize(model, sp, memory=Memory(...))`, and `--memory` of a command.

Every option is exact, and the planner costs the same value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Self

from longspan.core.errors import LongspanError
from longspan.core.reading import OneFlag, as_word, fields_of
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
        changed = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return ", ".join(f"{name}={as_word(value)}" for name, value in changed.items()) or "fastest"


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


@dataclass(frozen=True)
class MemoryChoice(OneFlag):
    """The memory options that a user asks for: `auto,offload=disk`, or in YAML `{level: auto, offload: disk}`."""

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
        # These need a checkpointing; the planner will choose it.
        if self.chooses and (given.get("offload", "none") != "none" or given.get("layers_per_checkpoint", 1) != 1):
            given.setdefault("checkpointing", "full")
        return replace(LONGEST if self.level == "longest" else FASTEST, **given)
