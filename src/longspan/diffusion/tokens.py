"""Split a forward's tokens over the ranks in front of its blocks, and join them again."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from longspan.comm.mesh import SequenceSharding
from longspan.comm.reshard import gather_along, move_shards, shard_along, shard_sizes
from longspan.compat.friends_api import checkpoint_function, set_checkpoint_function, transformer_output
from longspan.compat.torch_api import not_compiled
from longspan.core.errors import LongspanError
from longspan.core.layout import choose_layout
from longspan.diffusion.structure import REPLICATED, Block, Cut, Paths, map_tensors, named_arguments, tensors_in


@dataclass(frozen=True)
class Parts:
    """Tokens of several streams, one stream after the other, and which of them this rank holds.

    Each stream is split alone, as evenly as possible, so no rank holds padding. A stream with fewer tokens than ranks,
    such as a short text, is held by every rank and split in attention alone, as are tokens that no rank splits.
    """

    sp: SequenceSharding
    lengths: tuple[int, ...]  # of each stream, on all ranks together
    is_split: tuple[bool, ...]
    unit: int = 1  # tokens that stay together: those of a row, where blocks convolve pixels

    @property
    def shares(self) -> tuple[tuple[int, ...], ...]:
        """How many tokens of each stream are each rank's."""
        return tuple(tuple(self.unit * n for n in shard_sizes(m // self.unit, self.sp.size)) for m in self.lengths)

    @property
    def held(self) -> tuple[int, ...]:
        """How many tokens of each stream this rank holds."""
        pairs = zip(self.lengths, self.is_split, self.shares, strict=True)
        return tuple(share[self.sp.rank] if split else n for n, split, share in pairs)

    @property
    def here(self) -> int:
        """How many tokens this rank holds."""
        return sum(self.held)

    @property
    def of_ranks(self) -> tuple[int, ...]:
        """How many tokens of all streams are each rank's."""
        return tuple(map(sum, zip(*self.shares, strict=True)))

    def in_order_of_ranks(self, x: Tensor, dim: int) -> Tensor:
        """Return all tokens in the order of ranks, of all tokens."""
        if len(self.lengths) == 1 or self.sp.size == 1:
            return x
        streams = [part.split(share, dim) for part, share in zip(x.split(self.lengths, dim), self.shares, strict=True)]
        return torch.cat([part for of_rank in zip(*streams, strict=True) for part in of_rank], dim)

    def split(self, x: Tensor, dim: int) -> Tensor:
        """Return the tokens that this rank holds, of all tokens."""
        return self._each(x, dim, self.lengths, self._shard, split=True)

    def join(self, x: Tensor, dim: int) -> Tensor:
        """Return the tokens of all ranks; the inverse of `split`."""
        return self._each(x, dim, self.held, self._gather, split=True)

    def share(self, x: Tensor, dim: int) -> Tensor:
        """Return this rank's tokens of those that it holds, so that those of every rank count once."""
        return self._each(x, dim, self.held, self._shard, split=False)

    def whole(self, x: Tensor, dim: int) -> Tensor:
        """Return the inverse of `share`."""
        return self._each(x, dim, [share[self.sp.rank] for share in self.shares], self._gather, split=False)

    def _each(self, x: Tensor, dim: int, sizes: Sequence[int], change: Any, *, split: bool) -> Tensor:
        """Change each stream that is split, or each that is not."""
        if self.sp.size == 1 or split not in self.is_split:
            return x
        parts = zip(x.split(list(sizes), dim), self.lengths, self.is_split, strict=True)
        changed = [change(part, dim, n) if is_split == split else part for part, n, is_split in parts]
        return changed[0] if len(changed) == 1 else torch.cat(changed, dim)

    def _shard(self, x: Tensor, dim: int, length: int) -> Tensor:
        return shard_along(x.unflatten(dim, (-1, self.unit)), dim, self.sp.group).flatten(dim, dim + 1)

    def _gather(self, x: Tensor, dim: int, length: int) -> Tensor:
        rows = x.unflatten(dim, (x.shape[dim] // self.unit, self.unit))
        return gather_along(rows, dim, length // self.unit, self.sp.group).flatten(dim, dim + 1)


@dataclass(frozen=True)
class Sizes:
    """Those of a running block."""

    lengths: tuple[int, ...] = ()  # tokens of each stream, on all ranks together
    unit: int = 1  # see `Parts`
    rows: int = 0  # of the batch, if they are sharded instead of the tokens


class Tokens:
    """How many tokens each stream of the running forward has, and the hooks that split and join them."""

    def __init__(self, sp: SequenceSharding, *, gather_output: bool = True) -> None:
        self.sp, self.gather_output = copy.copy(sp), gather_output
        # Full attention is balanced over a ring without zigzag, and a contiguous layout keeps the order of ranks.
        self.sp.layout = choose_layout("contiguous", sp.ring_size, sp.ulysses_size)
        self.fewest = sp.size  # a stream of fewer tokens is not split
        self.sizes = Sizes()
        self.is_split = False  # while a checkpointed block runs
        # Those of a block that starts a region have the arguments of the streams.
        self.blocks: dict[nn.Module, tuple[Block, tuple[str, ...]]] = {}
        self.exits: dict[nn.Module, int] = {}  # see `Structure`
        self.plans: dict[Any, Any] = {}  # of attention in a ring, the last ones
        self.mine: Tensor | None = None  # this rank's tokens of the output, while the model arranges an index of all
        self.kept: tuple[Tensor, torch.Size] | None = None  # that index in the output's shape, and the shape of `mine`

    def parts(self, streams: tuple[int, ...], held: int | None = None) -> Parts:
        """Return the tokens of these streams; of a tensor that holds so many, the rest are `REPLICATED`."""
        lengths = [0 if stream == REPLICATED else self.sizes.lengths[stream] for stream in streams]
        split, unit = tuple(n // self.sizes.unit >= self.fewest for n in lengths), self.sizes.unit
        parts = Parts(self.sp, tuple(lengths), split, unit)
        if held is None or held == parts.here:
            return parts
        if REPLICATED not in streams or held < parts.here:
            raise LongspanError(f"q, k and v should hold this rank's {parts.here} tokens, got {held}")
        lengths[streams.index(REPLICATED)] = held - parts.here
        return Parts(self.sp, tuple(lengths), split, unit)

    def split(self, x: Tensor, cut: Cut, name: str) -> Tensor:
        """Return this rank's part of a tensor; of what is this rank's part already, the tensor itself."""
        parts, n = self.parts(cut.streams), x.shape[cut.dim]
        if cut.of_rows:
            return parts.split(x.unflatten(0, (-1, *parts.lengths)), 1).flatten(0, 1)
        if n == sum(parts.lengths):
            return parts.split(x, cut.dim)
        if n not in (1, parts.here):
            raise LongspanError(f"`{name}` has {n} tokens, the model {sum(parts.lengths)}; give one entry per token")
        return x

    def join(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Return the output of a block with the tokens of all ranks. A hook."""
        return _with(output, self.blocks[module][0].outputs, lambda x, cut, _: self.parts(cut.streams).join(x, cut.dim))

    def join_exit(self, module: nn.Module, args: Any, x: Tensor) -> Tensor:
        """Return all tokens of the output; without `gather_output` their places, and keep this rank's. A hook."""
        parts = self.parts((self.exits[module],))
        if self.gather_output:
            return parts.join(x, 1)
        self.mine, shape = x, (x.shape[0], *parts.lengths, x.shape[2])
        return places(shape, x.device)

    def output_of_rank(self, model: nn.Module, args: Any, output: Any) -> Any:
        """Return this rank's tokens of the output. A hook, for before FSDP, which needs an output with gradients."""
        mine, self.mine = self.mine, None
        assert mine is not None
        self.kept = output[0], mine.shape
        return (mine,) if isinstance(output, tuple) else transformer_output(mine)

    @not_compiled
    def split_all(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Split the arguments of a block. A hook."""
        return None if self.is_split else ((), self.split_arguments(module, args, kwargs))

    def split_arguments(self, module: nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
        """Return the arguments of a block by name, with this rank's part of those that it splits."""
        block, streams = self.blocks[module]
        arguments = named_arguments(module, args, kwargs)
        cut = {path: (x, c) for path, x in tensors_in(arguments).items() if (c := block.arguments.get((path, x.dim())))}
        lengths = self.sizes.lengths
        if streams:
            lengths = tuple(x.shape[c.dim] for x, c in (cut[name] for name in streams))
        rows = next(iter(cut.values()))[0].shape[0] if block.switched else 0
        self.sizes = Sizes(lengths, arguments["width"] if block.by_rows else 1, rows * (rows >= self.sp.size))
        if lengths[0] // self.sizes.unit < self.sp.size:
            raise LongspanError(
                f"the latents have {lengths[0] // self.sizes.unit} rows of tokens, fewer than the {self.sp.size} "
                f"ranks, and rows are not cut; use fewer ranks"
            )
        if block.by_rows:
            arguments["height"] = self.parts((0,)).held[0] // self.sizes.unit
        if self.sizes.rows:
            split: dict[str, Any] = map_tensors(
                arguments, lambda path, x: self._switch(x, cut.get(path)) if (path, x.dim()) in block.switched else x
            )
        else:
            split = _with(arguments, block.arguments, self.split)
        return split

    def _switch(self, x: Tensor, of: tuple[Tensor, Cut] | None) -> Tensor:
        """Return this rank's rows, with all their tokens."""
        if x.shape[0] != self.sizes.rows or self.sp.group is None:
            return x
        if of is None or x.shape[1] == self.sizes.lengths[0]:
            return shard_along(x, 0, self.sp.group)
        shares = shard_sizes(self.sizes.rows, self.sp.size)
        return move_shards(x, self.sp.group, 1, 0, self.parts((0,)).of_ranks, shares)

    def switch_back(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Return the output of a block that has its own rows, with this rank's tokens of all rows. A hook."""
        if not self.sizes.rows or self.sp.group is None:
            return output
        shares = shard_sizes(self.sizes.rows, self.sp.size)
        group, of_ranks = self.sp.group, self.parts((0,)).of_ranks
        return map_tensors(output, lambda _, x: move_shards(x, group, 0, 1, shares, of_ranks))

    @contextlib.contextmanager
    def of_forward(self, sizes: Sizes) -> Iterator[None]:
        """Run a block on split arguments, with the sizes of its own forward; another one may have run since."""
        before = self.sizes, self.is_split
        self.sizes, self.is_split = sizes, True
        try:
            yield
        finally:
            self.sizes, self.is_split = before

    def split_before_checkpoints(self, model: Any) -> None:
        """Split a block's arguments before it is checkpointed, or the whole ones would be saved.

        The block sees the sizes of its forward when it is recomputed.
        """
        found = checkpoint_function(model)
        if found is None:
            return
        checkpoint = getattr(found, "before_split", found)

        def checkpointed(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if block not in self.blocks:
                return checkpoint(block, *args, **kwargs)
            arguments = self.split_arguments(block, args, kwargs)
            sizes = self.sizes

            def run(*args: Any) -> Any:
                with self.of_forward(sizes):
                    return block(**dict(zip(arguments, args, strict=True)))

            return checkpoint(run, *arguments.values())

        checkpointed.before_split = checkpoint  # type: ignore[attr-defined]
        set_checkpoint_function(model, checkpointed)


def places(shape: Sequence[int], device: torch.device) -> Tensor:
    """Return the number of each entry of a tensor, in a dtype that a model which arranges entries keeps exact."""
    return torch.arange(math.prod(shape), dtype=torch.float64, device=device).view(*shape)


def _with(value: Any, paths: Paths, change: Callable[[Tensor, Cut, str], Tensor]) -> Any:
    """Return nested values with each tensor changed that has a cut."""

    def one(path: str, x: Tensor) -> Tensor:
        if (path, x.dim()) not in paths:
            if x.numel() <= 1:
                return x
            raise LongspanError(
                f"`{path}` of a block has {x.dim()} dimensions, {tuple(x.shape)}: how its tokens are split is not "
                f"known; leave out the argument that it comes from"
            )
        cut = paths[path, x.dim()]
        return x if cut is None else change(x, cut, path)

    return map_tensors(value, one)
