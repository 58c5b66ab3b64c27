"""Split a forward's tokens over the ranks in front of its blocks, and join them again."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from longspan.comm.mesh import SequenceSharding
from longspan.comm.reshard import gather_along, shard_along, shard_sizes
from longspan.compat.friends_api import checkpoint_function, set_checkpoint_function, transformer_output
from longspan.compat.torch_api import not_compiled
from longspan.core.errors import LongspanError
from longspan.core.layout import choose_layout
from longspan.diffusion.structure import (
    Block,
    Cut,
    Paths,
    Structure,
    block_lists,
    made_of,
    map_tensors,
    named_arguments,
    tensors_in,
)

Lengths = tuple[int, ...]
"""Tokens of each stream on all ranks together."""


class Tokens:
    """How many tokens each stream of the running forward has, and which of them this rank holds.

    Each stream is split alone, as evenly as possible, so no rank holds padding. A rank's tokens are those of its
    streams, one after the other; in the order of ranks these are all tokens, in another order than a processor's. A
    stream with fewer tokens than ranks, such as a short text, is held by every rank and split in attention alone.
    """

    def __init__(self, sp: SequenceSharding, *, gather_output: bool = True) -> None:
        self.sp, self.gather_output = copy.copy(sp), gather_output
        # Full attention is balanced over a ring without zigzag, and a contiguous layout keeps the order of ranks.
        self.sp.layout = choose_layout("contiguous", sp.ring_size, sp.ulysses_size)
        self.lengths: Lengths = ()
        self.unit = 1  # tokens that stay together: those of a row, where blocks convolve pixels
        self.mine: Tensor | None = None  # without `gather_output`, from the last projection to the end of the forward
        self.is_split = False  # while a checkpointed block runs
        self.blocks: dict[nn.Module, tuple[inspect.Signature, Block, tuple[str, ...]]] = {}
        self.plans: dict[Any, Any] = {}  # of attention in a ring

    def whole(self, cut: Cut) -> int:
        return sum(self.lengths[stream] for stream in cut.streams)

    def held(self, stream: int) -> int:
        """How many tokens of a stream this rank holds: all of one that has fewer tokens than there are ranks."""
        n = self.lengths[stream]
        return n if n < self.sp.size else self.unit * shard_sizes(n // self.unit, self.sp.size)[self.sp.rank]

    def ranks_of(self, lengths: Lengths) -> tuple[int, ...]:
        """How many tokens each rank holds of parts with these lengths."""
        return _of_ranks(lengths, self.sp.size)

    def order_of(self, lengths: Lengths, device: torch.device) -> Tensor | None:
        """Return each token's index in the processor's order, in the order of ranks; None if both orders agree."""
        return _order(lengths, self.sp.size, device)

    def split(self, x: Tensor, cut: Cut, name: str) -> Tensor:
        """Return this rank's part of a tensor; of what is this rank's part already, the tensor itself."""
        held, whole = x.shape[cut.dim], self.whole(cut)
        if held == whole:
            parts = x.split([self.lengths[stream] for stream in cut.streams], cut.dim)
            short = self.sp.size
            parts = [x if x.shape[cut.dim] < short else self._shard(x, cut.dim) for x in parts]
            return parts[0] if len(parts) == 1 else torch.cat(parts, cut.dim)
        mine = sum(map(self.held, cut.streams))
        if held not in (1, mine):
            raise LongspanError(f"`{name}` has {held} tokens, the model {whole}; give one entry per token")
        return x

    def _shard(self, x: Tensor, dim: int) -> Tensor:
        return shard_along(x.unflatten(dim, (-1, self.unit)), dim, self.sp.group).flatten(dim, dim + 1)

    def _gather(self, x: Tensor, dim: int, length: int) -> Tensor:
        rows = x.unflatten(dim, (x.shape[dim] // self.unit, self.unit))
        return gather_along(rows, dim, length // self.unit, self.sp.group).flatten(dim, dim + 1)

    def join(self, x: Tensor, cut: Cut) -> Tensor:
        """Return the tokens of all ranks."""
        parts = x.split([self.held(stream) for stream in cut.streams], cut.dim)
        wholes = [
            part if n < self.sp.size else self._gather(part, cut.dim, n)
            for part, n in zip(parts, (self.lengths[stream] for stream in cut.streams), strict=True)
        ]
        return wholes[0] if len(wholes) == 1 else torch.cat(wholes, cut.dim)

    def join_output(self, x: Tensor, cut: Cut) -> Tensor:
        """Return all tokens of the output.

        Without `gather_output`, keep this rank's tokens for `output_of_rank`; the model arranges a tensor without data.
        """
        if self.gather_output:
            return self.join(x, cut)
        self.mine = x
        return x.new_empty([*x.shape[: cut.dim], self.whole(cut), *x.shape[cut.dim + 1 :]], device="meta")

    def output_of_rank(self, model: nn.Module, args: Any, output: Any) -> Any:
        """Return an output with this rank's tokens, after a forward without `gather_output`."""
        mine, self.mine = self.mine, None
        assert mine is not None
        return (mine,) if isinstance(output, tuple) else transformer_output(mine)

    def split_arguments(self, module: nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
        """Return the arguments of a block by name, with this rank's part of those that it splits."""
        signature, block, streams = self.blocks[module]
        arguments = named_arguments(signature, module, args, kwargs)
        if streams and not self.is_split:
            cuts = {path: cut.dim for (path, _), cut in block.arguments.items() if cut is not None}
            sizes = {path: x.shape[cuts[path]] for path, x in tensors_in(arguments) if path in streams}
            self.lengths = tuple(sizes[name] for name in streams)
            self.unit = arguments["width"] if block.by_rows else 1
            if self.lengths[0] // self.unit < self.sp.size:
                raise LongspanError(
                    f"the latents have {self.lengths[0] // self.unit} rows of tokens, fewer than the {self.sp.size} "
                    f"ranks, and rows are not cut; use fewer ranks"
                )
        if block.by_rows:
            arguments["height"] = self.held(0) // self.unit
        split: dict[str, Any] = self._with(arguments, block.arguments, self.split)
        return split

    def _with(self, value: Any, paths: Paths, change: Any) -> Any:
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

    @contextlib.contextmanager
    def of_forward(self, lengths: Lengths, unit: int) -> Iterator[None]:
        """Run a block on split arguments, with the lengths of its own forward; another one may have run since."""
        before = self.lengths, self.unit, self.is_split
        self.lengths, self.unit, self.is_split = lengths, unit, True
        try:
            yield
        finally:
            self.lengths, self.unit, self.is_split = before

    def split_before_checkpoints(self, model: Any) -> None:
        """Split a block's arguments before it is checkpointed, or the whole ones would be saved.

        The block sees the lengths of its forward when it is recomputed.
        """
        found = checkpoint_function(model)
        if found is None:
            return
        checkpoint = getattr(found, "without_lengths", found)

        def checkpointed(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if block not in self.blocks:
                return checkpoint(block, *args, **kwargs)
            arguments = self.split_arguments(block, args, kwargs)
            lengths, unit = self.lengths, self.unit

            def run(*args: Any) -> Any:
                with self.of_forward(lengths, unit):
                    return block(**dict(zip(arguments, args, strict=True)))

            return checkpoint(run, *arguments.values())

        checkpointed.without_lengths = checkpoint  # type: ignore[attr-defined]
        set_checkpoint_function(model, checkpointed)

    # -----------------------------------------------------------------------------------------------------------------

    def install(self, model: nn.Module, structure: Structure) -> list[tuple[str, nn.Module, tuple[Any, ...]]]:
        """Hook the splits and joins into a model; return its attention modules with the calls of each."""
        lists, attention = block_lists(model), []
        for region in structure.regions:
            last = lists[region[-1]][-1]
            for path in region:
                for i, module in enumerate(lists[path]):
                    block = structure.blocks[path].get(made_of(module))
                    if block is None:
                        raise _unknown(f"{path}.{i}", module, structure.blocks[path])
                    streams = structure.streams[path] if path == region[0] and not i else ()
                    self.blocks[module] = inspect.signature(type(module).forward), block, streams
                    module.register_forward_pre_hook(self._split_hook(), with_kwargs=True)
                    attention += [
                        (f"{path}.{i}.{name}".rstrip("."), module.get_submodule(name), calls)
                        for name, calls in block.attention.items()
                    ]
            if not structure.exits:
                last.register_forward_hook(self._join_hook(self.blocks[last][1].outputs))
        for path, stream in structure.exits.items():
            model.get_submodule(path).register_forward_hook(self._join_exit_hook(Cut(1, (stream,))))
        return attention

    def _join_hook(self, paths: Paths) -> Any:
        return lambda module, args, output: self._with(output, paths, lambda x, cut, _: self.join(x, cut))

    def _join_exit_hook(self, cut: Cut) -> Any:
        return lambda module, args, output: self.join_output(output, cut)

    def _split_hook(self) -> Any:
        @not_compiled
        def split_arguments(module: nn.Module, args: Any, kwargs: Any) -> Any:
            return None if self.is_split else ((), self.split_arguments(module, args, kwargs))

        return split_arguments


@functools.lru_cache(maxsize=64)
def _of_ranks(lengths: Lengths, ranks: int) -> tuple[int, ...]:
    return tuple(map(sum, zip(*(shard_sizes(n, ranks) for n in lengths), strict=True)))


@functools.lru_cache(maxsize=16)
def _order(lengths: Lengths, ranks: int, device: torch.device) -> Tensor | None:
    if len(lengths) == 1 or ranks == 1:
        return None
    starts = [0, *itertools.accumulate(lengths)]
    parts = [
        (torch.arange(n) + start).split(list(shard_sizes(n, ranks))) for n, start in zip(lengths, starts, strict=False)
    ]
    return torch.cat([of_stream[rank] for rank in range(ranks) for of_stream in parts]).to(device)


def _unknown(path: str, block: nn.Module, kinds: Iterable[frozenset[tuple[str, str]]]) -> LongspanError:
    """Return the error of a block that consists of what no block of the small copy has."""
    others = sorted(made_of(block).difference(*kinds)) or [("", type(block).__name__)]
    name, kind = next(((name, kind) for name, kind in others if name.endswith("()")), others[0])
    if name.endswith("()"):
        return LongspanError(
            f"{path}.{name[:-2]} has the attention processor {kind}, which longspan does not know there; use the one "
            f"that diffusers sets"
        )
    return LongspanError(f"{path} has another {name or kind} ({kind}) than diffusers makes from its config")
