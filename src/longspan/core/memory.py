"""What is done to save memory, one memory option each, as one value: `longspan.parallelize(model, sp,
memory=Memory(...))`.

Every memory option is exact; each says what it saves and what it costs. The planner costs the same value (`longspan
plan --memory ...`), so a table of memory options and what a run really holds are about the same thing.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from longspan.core.errors import LongspanError
from longspan.core.validation import LARGEST_COUNT, check_flag, check_number, checked_call, path_of, spell

Checkpointing = Literal["none", "attention", "output", "layers"]
Offload = Literal["none", "host", "disk"]
MemoryLevel = Literal["fastest", "longest", "auto"]

HeadLossName = Literal["tiled", "torch", "liger"]

CHECKPOINTING: tuple[Checkpointing, ...] = ("none", "attention", "output", "layers")
OFFLOAD: tuple[Offload, ...] = ("none", "host", "disk")
HEAD_LOSSES: tuple[HeadLossName, ...] = ("tiled", "torch", "liger")
LEVELS: tuple[MemoryLevel, ...] = ("fastest", "longest", "auto")


@dataclass(frozen=True)
class Memory:
    """The memory options.

    Attributes:
        checkpointing: what of a layer is kept for its backward.
            none: all that autograd saves.
            attention: the layer's input, and all that its attention has saved (q, k and v as the exchange brought them,
            output, log-sum-exp); norms, projections and MLP run again, no exchange, ring or attention kernel does.
            output: the layer's input, and of its attention the output of my tokens and the log-sum-exp; neither a
            ring's forward nor the kernel's runs again, and the backward's exchange brings q, k and v along.
            layers: the layer's input alone; all of it runs again.
        layers_per_checkpoint: layers that share one kept input, the first's. In the backward the others' inputs are
            made again from it, by running the layers between without gradients; then each layer is computed again by
            itself, as ever. So of n layers about 2 sqrt(n) inputs are held in the place of n, for a forward
            more of all layers but the last of each group. 0: as many as hold the fewest. 1: each keeps its own. Layers
            that draw random numbers, or take in something else than the one before gave, begin a group.
        offload: where what checkpointing keeps lies until its backward: host memory (from a GPU), or a file on a disk.
        offload_folder: folder of that file, on a disk that is local to the rank; "" for the system's folder for
            temporary files.
        tiled_mlp: tiles of tokens that an MLP works through, forward and backward, so that its intermediates exist for
            one tile at a time (computed again in the backward). 0: as many as make a tile's intermediates about as
            large as the hidden states. 1: no tiles.
        tiled_norms: norms keep their input alone; what they give is computed again in the backward, for themselves and
            for the linear layers and tiled MLPs that take it in.
        recompute_mlp_act: an MLP keeps what its matrices gave, and its backward computes the activation function and
            the product with it again, bit for bit (elementwise work: as fused SwiGLU kernels do). Where a layer is
            checkpointed, or its MLP tiled, nothing of this is kept anyway.
        head_chunks: pieces in which the heads go through the exchange and the attention, one after the other (at most
            the KV heads of a rank), so that what is there between the two All-to-Alls is 1/pieces. 0: as many as a rank
            has KV heads. 1: all at once.
        head_loss: what computes the loss without logits: our tiles; torch's linear_cross_entropy, or Liger's kernel,
            where they fit.
        cpu_offload: weights, gradients and optimizer states stay in the host's memory (FSDP2's CPUOffloadPolicy).
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
            value = getattr(self, name)
            if not isinstance(value, str) or value not in choices:
                raise LongspanError(f"{name}={spell(value)} is unknown; choose {', '.join(choices)}")
        check_number("tiled_mlp", self.tiled_mlp, 0, LARGEST_COUNT, whole=True)
        check_number("head_chunks", self.head_chunks, 0, LARGEST_COUNT, whole=True)
        check_number("layers_per_checkpoint", self.layers_per_checkpoint, 0, LARGEST_COUNT, whole=True)
        for name in ("tiled_norms", "recompute_mlp_act", "cpu_offload"):
            check_flag(name, getattr(self, name))
        if self.offload != "none" and self.checkpointing == "none":
            raise LongspanError(
                f"offload={self.offload!r} moves what checkpointing keeps, and checkpointing='none' keeps everything "
                f"where it is; add checkpointing='layers' (or 'output', 'attention')"
            )
        if self.layers_per_checkpoint != 1 and self.checkpointing == "none":
            raise LongspanError(
                f"layers_per_checkpoint={self.layers_per_checkpoint} says how many layers share what checkpointing "
                f"keeps, and checkpointing='none' keeps everything; add checkpointing='layers' (or 'output')"
            )
        if self.offload_folder:
            path_of("offload_folder", self.offload_folder)
            if self.offload != "disk":
                raise LongspanError(
                    f"offload_folder={self.offload_folder!r} is where offload='disk' writes, and offload is "
                    f"{self.offload!r}"
                )

    @property
    def recompute_all_to_all(self) -> bool:
        """Whether attention saves q, k, v and output of my tokens, and its backward exchanges them again."""
        return self.head_chunks != 1 or self.checkpointing == "output"

    def described(self) -> str:
        """What differs from the fastest, in a few words."""
        parts = [
            f"{f.name}={getattr(self, f.name)}" for f in dataclasses.fields(self) if getattr(self, f.name) != f.default
        ]
        return ", ".join(parts) or "every layer's activations are kept"


Memory.__init__ = checked_call()(Memory.__init__)  # type: ignore[method-assign]

FASTEST = Memory()
"""What costs a product or a transfer to have again is kept; logits are made by tiles, activation functions twice."""

LONGEST = Memory(checkpointing="layers", tiled_mlp=0, tiled_norms=True)
"""The least memory without offload in which no layer's forward runs more than twice."""


def memory_of(asked: object) -> Memory:
    """The memory options of a level, or those that were given.

    Raises:
        LongspanError: for what is neither.
    """
    if isinstance(asked, Memory):
        return asked
    levels = {"fastest": FASTEST, "longest": LONGEST}
    if isinstance(asked, str) and asked in levels:
        return levels[asked]
    raise LongspanError(f"memory={spell(asked)} is unknown; choose fastest, longest or auto, or give a longspan.Memory")
