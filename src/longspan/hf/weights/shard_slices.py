"""Which slices of a weight a rank holds: sharded over the tensor group first, then by rows by FSDP2."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.tensor import DTensor, Shard

from longspan.core.tile_sizes import even_span

if TYPE_CHECKING:
    from torch import Tensor

    from longspan.comm.mesh import SequenceSharding


def tensor_parts(p: Tensor) -> int:
    """Return over how many ranks of the tensor group a weight is sharded; 1 for none."""
    return _tensor_shard(p)[1]


def my_slices(p: Tensor, sp: SequenceSharding) -> tuple[slice, ...]:
    """Return the slices of a weight that this rank holds, one per dimension."""
    return slices_of(p, sp, sp.data_rank * sp.size + sp.rank, sp.tensor_rank)


def slices_of(p: Tensor, sp: SequenceSharding, rank: int, tensor_rank: int) -> tuple[slice, ...]:
    """Return the slices of a weight that the given rank of data x sequence and of the tensor group holds."""
    shape = list(p.shape)
    starts = [0] * len(shape)
    dim, parts = _tensor_shard(p)
    if parts > 1:
        starts[dim], stop = even_span(shape[dim], tensor_rank, parts)
        shape[dim] = stop - starts[dim]
    if isinstance(p, DTensor) and "tensor" not in (p.device_mesh.mesh_dim_names or ())[:1]:
        first, stop = even_span(shape[0], rank, sp.world_size)
        starts[0], shape[0] = starts[0] + first, stop - first
    return tuple(slice(start, start + length) for start, length in zip(starts, shape, strict=True))


def _tensor_shard(p: Tensor) -> tuple[int, int]:
    """Return the dimension that is sharded over the tensor group, and over how many ranks."""
    names = (p.device_mesh.mesh_dim_names or ()) if isinstance(p, DTensor) else ()
    if not isinstance(p, DTensor) or "tensor" not in names:
        return 0, 1
    axis = names.index("tensor")
    placement = p.placements[axis]
    return (placement.dim, p.device_mesh.size(axis)) if isinstance(placement, Shard) else (0, 1)
