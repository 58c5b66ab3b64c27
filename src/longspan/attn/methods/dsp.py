"""Dynamic Sequence Parallelism: switch the sharded dimension between blocks that each attend along one dimension.

Zhao et al. 2024, arXiv:2403.10266. A video model's spatial block attends along the patches of a frame, its temporal
block along the frames. While the patches are whole on a rank, the frames can be sharded, and the other way round. So
nothing is sent inside a block; where the attended dimension changes, one all-to-all of the hidden states moves the
shards: `N*d/P * (P-1)/P` elements per rank. Ulysses, with the frames sharded throughout, sends four times as many in
every temporal block (q, k, v and output), so twice as many in all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from longspan.comm.arguments import check_dim, check_sharding, check_tensor, describe
from longspan.comm.mesh import SequenceSharding
from longspan.comm.reshard import gather_along, reshard, shard_along, shard_sizes
from longspan.core.errors import LongspanError
from longspan.core.validation import LARGEST_COUNT, check_number, format_value

Attends = int | tuple[int, ...] | None
"""The dimensions that a block needs whole."""


def dsp(sp: SequenceSharding, attends: Sequence[Attends], sizes: Mapping[int, int]) -> DynamicSharding:
    """Plan which dimension is sharded in each block of a stack, with as few switches as possible.

        shards = longspan.dsp(sp, attends=[2, 1] * layers, sizes={1: frames, 2: patches})
        x = shards.shard(x)                 # x [B, frames, patches, C] is whole on every rank
        for i, block in enumerate(blocks):
            x = shards.switch(x, i)         # one all-to-all, where one is needed
            x = block(x)                    # attends along dimension `attends[i]`, which is whole
        x = shards.gather(x)

    Args:
        sp: the sharding. All ranks of its sequence group share each dimension, on any mesh.
        attends: for each block the dimension it attends along, several, or None for a block that attends along none
            (an MLP): that one never needs a switch.
        sizes: whole size of each dimension that may be sharded. It need not divide by the ranks.

    Raises:
        LongspanError: if a block attends along every dimension of `sizes`.
    """
    check_sharding(sp)
    if not isinstance(attends, list | tuple):
        raise LongspanError(f"`attends` must list what each block attends along, got {describe(attends)}")
    for each in attends:
        for dim in each if isinstance(each, tuple) else () if each is None else (each,):
            check_number("a dimension in `attends`", dim, 0, LARGEST_COUNT, whole=True)
    if not isinstance(sizes, Mapping) or not sizes:
        raise LongspanError(f"`sizes` must be a dict of dimensions and their sizes, got {describe(sizes)}")
    for dim, size in sizes.items():
        check_number("a dimension of `sizes`", dim, 0, LARGEST_COUNT, whole=True)
        check_number(f"sizes[{dim}]", size, 1, LARGEST_COUNT, whole=True)
    return DynamicSharding(sp, dict(sizes), plan_dims(attends, sizes))


def plan_dims(attends: Sequence[Attends], sizes: Mapping[int, int]) -> tuple[int, ...]:
    """Return the dimension to shard in each block: a run of blocks keeps one as long as none attends along it.

    Each run is as long as possible, so no plan has fewer switches. Of equally long runs the larger dimension is taken,
    as it balances better.
    """
    needs = [set() if a is None else {a} if isinstance(a, int) else set(a) for a in attends]
    if not needs:
        raise LongspanError("`attends` is empty; name the dimension that each block attends along")
    dims: list[int] = []
    for i, need in enumerate(needs):
        if dims and dims[-1] not in need:
            dims.append(dims[-1])
            continue
        runs = {d: next((j for j in range(i, len(needs)) if d in needs[j]), len(needs)) - i for d in sizes}
        best = max(sizes, key=lambda d: (runs[d], sizes[d]), default=None)
        if best is None or not runs[best]:
            raise LongspanError(
                f"block {i} attends along {format_value(attends[i])}, which leaves none of the dimensions "
                f"{sorted(sizes)} to shard; shard its heads by longspan.attention instead"
            )
        dims.append(best)
    return tuple(dims)


@dataclass(frozen=True)
class DynamicSharding:
    """The plan of `longspan.dsp`."""

    sp: SequenceSharding
    sizes: Mapping[int, int]  # whole size of each dimension that may be sharded
    dims: tuple[int, ...]  # the sharded dimension in each block

    @property
    def switches(self) -> int:
        """All-to-alls in one forward; a backward has as many."""
        return sum(a != b for a, b in zip(self.dims, self.dims[1:], strict=False))

    def shard(self, x: Tensor, block: int = 0, dim: int | None = None) -> Tensor:
        """Return this rank's part, in a block, of a tensor that every rank holds whole.

        Differentiable: the gradient is this rank's part, zero elsewhere.

        Args:
            x: the hidden states, or what goes with them: position embeddings, conditioning for each frame.
            block: the block's number.
            dim: the dimension of `x` that corresponds to the sharded one; default: the same number.
        """
        check_tensor("x", x)
        dim = check_dim(x, self.dims[block] if dim is None else dim)
        self._check_size(x, dim, self.sizes[self.dims[block]], "every rank holds")
        return shard_along(x, dim, self.sp.group)

    def switch(self, x: Tensor, block: int) -> Tensor:
        """Return the hidden states as a block needs them: one all-to-all, or `x` itself if no switch is needed."""
        check_tensor("x", x)
        before, after = self.dims[max(0, block - 1)], self.dims[block]
        if before == after or self.sp.size == 1:
            return x
        self._check_size(x, after, self.sizes[after], "every rank holds")
        self._check_size(x, before, self._local(before), f"rank {self.sp.rank} of {self.sp.size} holds")
        return reshard(x, self.sp.group, before, after, length=self.sizes[before])

    def gather(self, x: Tensor, block: int = -1) -> Tensor:
        """Return a block's hidden states whole, on every rank. Gradients are summed over ranks, as in `sp.gather`."""
        check_tensor("x", x)
        dim = self.dims[block]
        self._check_size(x, dim, self._local(dim), f"rank {self.sp.rank} of {self.sp.size} holds")
        return gather_along(x, dim, self.sizes[dim], self.sp.group)

    def _local(self, dim: int) -> int:
        return shard_sizes(self.sizes[dim], self.sp.size)[self.sp.rank]

    def _check_size(self, x: Tensor, dim: int, size: int, who: str) -> None:
        if dim >= x.dim() or x.shape[dim] != size:
            raise LongspanError(f"dsp: {who} {size} entries of dimension {dim}, got a tensor of shape {tuple(x.shape)}")
