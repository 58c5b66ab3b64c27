"""The mesh's axes and their options: one value, passed from the command line to the mesh."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from longspan.core.experts import Experts
from longspan.core.layout import LAYOUTS, LayoutName
from longspan.core.validation import LARGEST_COUNT, LARGEST_JOB, check_choice, check_number

AXES = ("data", "ring", "ulysses", "tensor")
"""Axes of a mesh, in the order of the ranks: neighbours share the axes to the right."""

TensorStyle = Literal["tp", "megatron-sp"]
TENSOR_STYLES: tuple[TensorStyle, ...] = ("tp", "megatron-sp")


@dataclass(frozen=True)
class Axes:
    """Sizes of a mesh's axes: data x ring x ulysses x tensor ranks in all."""

    data: int = 1
    """Size of the data axis: replicas that read different sequences."""
    ring: int = 1
    """Size of the ring axis: blocks of a sequence, whose keys and values are sent round a ring (Ring Attention)."""
    ulysses: int = 1
    """Size of the ulysses axis: ranks that share a block and swap tokens for heads (Ulysses). ring x ulysses ranks
    share a sequence."""
    tensor: int = 1
    """Size of the tensor axis: ranks that share each layer's weights and hold the same tokens (tensor parallelism)."""

    def __post_init__(self) -> None:
        for axis, size in self.degrees.items():
            check_number(axis, size, 1, LARGEST_JOB, whole=True)
        check_number(f"the product of {self}", self.ranks, 1, LARGEST_JOB)

    def __str__(self) -> str:
        """Format the axes larger than 1."""
        return " ".join(f"{axis}={size}" for axis, size in self.degrees.items() if size > 1) or "one rank"

    @property
    def degrees(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def ranks(self) -> int:
        return math.prod(self.degrees.values())

    @property
    def sequence_ranks(self) -> int:
        return self.ring * self.ulysses

    @property
    def fsdp_ranks(self) -> int:
        """Ranks over which FSDP shards weights and gradients are averaged: all but the tensor axis."""
        return self.data * self.sequence_ranks


@dataclass(frozen=True)
class MeshOptions:
    """How ranks share the work on a mesh, whatever its sizes."""

    tensor_style: TensorStyle = "tp"
    """tp: all-reduce hidden states after attention and MLP. megatron-sp: all-gather and reduce-scatter them instead (as
    many bytes), and shard norms and residuals by tokens."""
    experts: Experts = 1
    """Number of neighbouring ranks, of data x ring x ulysses, that share the experts of a mixture of experts. Tokens
    are sent to them and back. 1: FSDP gathers all experts on every rank. auto: the largest group in which every rank
    has experts."""
    layout: LayoutName = "auto"
    """How tokens are placed on a ring. zigzag balances a causal mask; contiguous sends least under sliding windows.
    auto: zigzag."""
    overlap_chunks: int | Literal["auto"] = "auto"
    """Chunks of heads in the Ulysses all-to-all, each overlapped with the attention of another. At most a rank's query
    heads (with a ring its KV heads). 1: no overlap. auto: several where a Ulysses group spans hosts and sends enough,
    else 1."""

    def __post_init__(self) -> None:
        check_choice("tensor_style", self.tensor_style, TENSOR_STYLES)
        check_choice("layout", self.layout, ("auto", *LAYOUTS))
        if not isinstance(self.experts, str) or self.experts != "auto":
            check_number("experts", self.experts, 1, LARGEST_JOB, whole=True)
        if not isinstance(self.overlap_chunks, str) or self.overlap_chunks != "auto":
            check_number("overlap_chunks", self.overlap_chunks, 1, LARGEST_COUNT, whole=True)


@dataclass(frozen=True)
class ParallelConfig(MeshOptions, Axes):
    """How ranks share the work: data x ring x ulysses x tensor of them in all."""

    def __post_init__(self) -> None:
        Axes.__post_init__(self)
        MeshOptions.__post_init__(self)


def widths_of(size: int) -> tuple[int, ...]:
    """Return the numbers of ranks that may share one sample of an elastic batch: the divisors of a group's size."""
    return tuple(width for width in range(1, size + 1) if size % width == 0)


def axes_of_width(ulysses: int, width: int) -> tuple[int, int]:
    """Return ring and ulysses of a width, in a sequence group whose ulysses axis is `ulysses`.

    As much of a width as possible is ulysses, as ranks that share it are neighbours. It divides the group's axis, so
    the model's heads serve it.
    """
    inner = math.gcd(ulysses, width)
    return width // inner, inner


def groups_of_widths(mesh: Axes) -> list[tuple[str, int]]:
    """Return axis and ranks of the process groups that narrower widths need, besides those of the mesh."""
    found = dict[tuple[str, int, int], tuple[str, int]]()  # key: axis, ranks, and their distance
    for width in widths_of(mesh.ring * mesh.ulysses)[1:-1]:
        ring, inner = axes_of_width(mesh.ulysses, width)
        if 1 < inner < mesh.ulysses:
            found["ulysses", inner, 1] = "ulysses", inner
        if ring > 1:
            found["ring", ring, inner] = "ring", ring
        if ring > 1 and inner > 1:
            found["sequence", width, 1] = "sequence", width
        if mesh.tensor > 1:
            found["model", width, 1] = "model", width * mesh.tensor
    return list(found.values())


# A test compares them with the kernels that are registered when torch is imported.
KernelName = Literal["auto", "sdpa", "flash", "cudnn", "tiled", "flex", "eager"]
