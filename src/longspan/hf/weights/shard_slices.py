"""Where in a whole weight a rank's part of it lies: cut over a tensor group first, then in rows by FSDP2."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch.distributed.tensor import DTensor, Shard

from longspan.core.tile_sizes import even_span

if TYPE_CHECKING:
    from torch import Tensor

    from longspan.comm.mesh import SequenceSharding

Box = tuple[slice, ...]
"""Of every dimension, from where to where."""


def tensor_parts(p: Tensor) -> int:
    """How many ranks of a tensor group share a weight; 1 where each holds all of it, or there is no such group."""
    return _tensor_cut(p)[1]


def box_of(p: Tensor, sp: SequenceSharding, rank: int, tensor_rank: int) -> Box:
    """Which part of a weight a rank holds.

    Args:
        p: the weight, on any rank.
        sp: how it was parallelized.
        rank: in data x sequence.
        tensor_rank: in the tensor group.
    """
    shape = list(p.shape)
    starts = [0] * len(shape)
    dim, parts = _tensor_cut(p)
    if parts > 1:
        starts[dim], stop = even_span(shape[dim], tensor_rank, parts)
        shape[dim] = stop - starts[dim]
    if isinstance(p, DTensor) and "tensor" not in (p.device_mesh.mesh_dim_names or ())[:1]:
        first, stop = even_span(shape[0], rank, sp.world_size)
        starts[0], shape[0] = starts[0] + first, stop - first
    return tuple(slice(start, start + length) for start, length in zip(starts, shape, strict=True))


def my_box(p: Tensor, sp: SequenceSharding) -> Box:
    """Which part of a weight this rank holds."""
    return box_of(p, sp, sp.data_rank * sp.size + sp.rank, sp.tensor_rank)


def elements(box: Box) -> int:
    """How many numbers are in a part."""
    return math.prod(each.stop - each.start for each in box)


def _tensor_cut(p: Tensor) -> tuple[int, int]:
    """The dimension that a tensor group cuts, and into how many parts."""
    if not isinstance(p, DTensor) or "tensor" not in (p.device_mesh.mesh_dim_names or ()):
        return 0, 1
    axis = p.device_mesh.mesh_dim_names.index("tensor")  # type: ignore[union-attr]
    placement = p.placements[axis]
    return (placement.dim, p.device_mesh.size(axis)) if isinstance(placement, Shard) else (0, 1)
