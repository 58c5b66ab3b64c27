"""Split a forward's tokens over the ranks, and join them again; split a target in the same way."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from longspan.comm.mesh import SequenceSharding
from longspan.comm.reshard import gather_along, shard_along, shard_sizes
from longspan.compat.friends_api import checkpoint_function, set_checkpoint_function, transformer_output
from longspan.compat.torch_api import not_compiled
from longspan.core.errors import LongspanError
from longspan.diffusion.families import Family, Join, Plan, Split, matching
from longspan.hf.state import DiffusionState

Lengths = dict[str, int]
"""Tokens on all ranks together, by the name of a split argument: of each stream, and of what belongs to its tokens."""


class Tokens:
    """How many tokens each stream of the running forward has, and which of them this rank holds.

    Each stream is split alone, as evenly as possible, so no rank holds padding. A rank's tokens are those of its
    streams, one after the other; in the order of ranks these are all tokens, in another order than a processor's.
    """

    def __init__(self, sp: SequenceSharding, family: Family, *, gather_output: bool = True) -> None:
        self.sp, self.family, self.gather_output = sp, family, gather_output
        self.lengths: Lengths = {}
        self.mine: Tensor | None = None  # without `gather_output`, from the last projection to the end of the forward
        self.is_split = False  # while a checkpointed block runs
        self.of_modules: dict[nn.Module, tuple[inspect.Signature, Mapping[str, Split]]] = {}

    @property
    def of_ranks(self) -> tuple[int, ...]:
        """How many tokens each rank holds."""
        sizes = [shard_sizes(self.lengths[name], self.sp.size) for name in self.family.streams]
        return tuple(map(sum, zip(*sizes, strict=True)))

    def order(self, device: torch.device) -> Tensor | None:
        """Return each token's index in the processor's order, in the order of ranks; None if both orders agree."""
        return _order(tuple(self.lengths[name] for name in self.family.streams), self.sp.size, device)

    def split(self, x: Any, how: Split, name: str | int) -> Any:
        """Return this rank's part of an argument or output, or of each tensor in it."""
        if x is None:
            return None
        if isinstance(x, tuple | list):
            return type(x)(self.split(each, how, name) for each in x)
        if name == "timestep" and (x.dim() < how.expected_dims or x.shape[how.split_dim] == 1):  # one for all tokens
            return x
        if x.dim() != how.expected_dims:
            raise LongspanError(
                f"`{name}` must have {how.expected_dims} dimensions, got a tensor of shape {tuple(x.shape)}"
            )
        self.lengths[str(name)] = x.shape[how.split_dim]
        return shard_along(x, how.split_dim, self.sp.group)

    def check_lengths(self) -> None:
        """Raise on every rank if position embeddings or time steps are not one per token.

        Some ranks' parts could still fit: those ranks would wait for the others, or broadcast a single time step.
        """
        streams = {name: self.lengths[name] for name in self.family.streams}
        for name, length in self.lengths.items():
            if length not in streams.values():
                kind = "the rotary embedding" if name.isdigit() else f"`{name}`"
                tokens = " and ".join(f"`{stream}` {n}" for stream, n in streams.items())
                raise LongspanError(f"{kind} has {length} tokens, {tokens}; give one entry per token")

    def join(self, x: Tensor, dim: int) -> Tensor:
        """Return all tokens of the output.

        Without `gather_output`, keep this rank's tokens for `output_of_rank`; the model arranges a tensor without data.
        """
        length = self.lengths["hidden_states"]
        if not self.gather_output:
            self.mine = x
            return x.new_empty([*x.shape[:dim], length, *x.shape[dim + 1 :]], device="meta")
        return gather_along(x, dim, length, self.sp.group)

    def output_of_rank(self, model: nn.Module, args: Any, output: Any) -> Any:
        """Return an output with this rank's tokens, after a forward without `gather_output`."""
        mine, self.mine = self.mine, None
        assert mine is not None
        return (mine,) if isinstance(output, tuple) else transformer_output(mine)

    def split_arguments(self, module: nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
        """Return the arguments of a module of the plan by name, with this rank's part of those that it splits."""
        signature, splits = self.of_modules[module]
        return split_named(named_arguments(signature, module, args, kwargs), splits, self)

    @contextlib.contextmanager
    def of_forward(self, lengths: Lengths) -> Iterator[None]:
        """Run a block on split arguments, with the lengths of its own forward; another one may have run since."""
        before = self.lengths, self.is_split
        self.lengths, self.is_split = lengths, True
        try:
            yield
        finally:
            self.lengths, self.is_split = before

    def split_before_checkpoints(self, model: Any) -> None:
        """Split a block's arguments before it is checkpointed, or the whole ones would be saved.

        The block sees the lengths of its forward when it is recomputed.
        """
        found, lengths = checkpoint_function(model), self.lengths
        if found is None:
            return
        checkpoint = getattr(found, "without_lengths", found)

        def checkpointed(block: nn.Module, *args: Any) -> Any:
            def run(*args: Any) -> Any:
                with self.of_forward(lengths):
                    return block(*args)

            if block in self.of_modules:
                args = tuple(self.split_arguments(block, args, {}).values())
            return checkpoint(run, *args)

        checkpointed.without_lengths = checkpoint  # type: ignore[attr-defined]
        set_checkpoint_function(model, checkpointed)


@functools.lru_cache(maxsize=16)
def _order(lengths: tuple[int, ...], ranks: int, device: torch.device) -> Tensor | None:
    if len(lengths) == 1 or ranks == 1:
        return None
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    parts = [
        (torch.arange(n) + start).split(list(shard_sizes(n, ranks))) for n, start in zip(lengths, starts, strict=True)
    ]
    return torch.cat([of_stream[rank] for rank in range(ranks) for of_stream in parts]).to(device)


def install(model: nn.Module, plan: Plan, tokens: Tokens) -> None:
    """Hook the splits and joins of a plan, other than those of the model's own arguments."""
    for path, entry in plan.items():
        if not path:
            continue
        modules = matching(model, (path,))
        if not modules:
            raise LongspanError(f"{type(model).__name__} has no module {path}, where its tokens are split")
        for module in modules.values():
            _hook(module, entry, tokens)


def _hook(module: nn.Module, entry: Mapping[str | int, Split] | Join, tokens: Tokens) -> None:
    if not isinstance(entry, Mapping):
        dim = entry.gather_dim
        module.register_forward_hook(lambda module, args, output: tokens.join(output, dim))
        return
    arguments = {str(name): how for name, how in entry.items() if not how.split_output}
    outputs = {index: how for index, how in entry.items() if how.split_output}
    if arguments and module in tokens.of_modules:  # two entries name this module
        signature, others = tokens.of_modules[module]
        tokens.of_modules[module] = signature, {**others, **arguments}
    elif arguments:
        tokens.of_modules[module] = inspect.signature(type(module).forward), arguments

        @not_compiled
        def split_arguments(module: nn.Module, args: Any, kwargs: Any) -> Any:
            return None if tokens.is_split else ((), tokens.split_arguments(module, args, kwargs))

        module.register_forward_pre_hook(split_arguments, with_kwargs=True)
    if outputs:

        def split_outputs(module: nn.Module, args: Any, output: Any) -> Any:
            return tuple(tokens.split(x, outputs[i], i) if i in outputs else x for i, x in enumerate(output))

        module.register_forward_hook(split_outputs)


def named_arguments(signature: inspect.Signature, module: nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a forward by name."""
    bound = signature.bind(module, *args, **kwargs)
    return dict(list(bound.arguments.items())[1:])


def split_named(arguments: dict[str, Any], splits: Mapping[str, Split], tokens: Tokens) -> dict[str, Any]:
    """Return the arguments with this rank's part of some."""
    return {name: tokens.split(x, splits[name], name) if name in splits else x for name, x in arguments.items()}


def shard_target(model: Any, target: Tensor, output: Tensor) -> Tensor:
    """Return the part of a target that belongs to this rank's output of a diffusion transformer.

        model = longspan.parallelize(transformer, sp, gather_output=False)
        output = model(noisy, timestep, text).sample                     # [batch, my tokens, values of a patch]
        mine = longspan.shard_target(model, target, output)              # of the same shape
        longspan.global_mean((output - mine) ** 2, sp).backward()        # the mean over target and replicas

    Args:
        model: a model parallelized with `gather_output=False`.
        target: whole and the same on every rank, in the shape that the model returns on one device.
        output: what the model returned on this rank.

    Raises:
        LongspanError: for another model, or for a target of another shape.
    """
    state = getattr(model, "longspan_state", None)
    family = state.family if isinstance(state, DiffusionState) else None
    if family is None:
        raise LongspanError(
            f"`model` must be a diffusion transformer parallelized with gather_output=False, got "
            f"{type(model).__name__}; the output of other models needs the whole target"
        )
    assert isinstance(state, DiffusionState)
    whole, group = _to_tokens(target, family, model.config), state.sp.group
    for dim in range(1, whole.dim() - 1):
        mine = shard_along(whole, dim, group)
        if mine.shape == output.shape:
            return mine
    raise LongspanError(
        f"a target of shape {tuple(target.shape)} has no part like this rank's output {tuple(output.shape)}; give it "
        f"in the shape that the model returns on one device"
    )


def _to_tokens(x: Tensor, family: Family, config: Any) -> Tensor:
    """Return `[B, tokens, values]` of pixels, as the model's last projection; for Latte `[B, frames, patches, values]`.

    Tokens are returned as they are.
    """
    patches = family.patches(config)
    if not patches:
        return x
    channels = next(dim for dim in range(1, 5) if dim not in patches)
    x = x.movedim(channels, -1)  # [B, frames, height, width, C]
    for dim, patch in zip((1, 3, 5), patches.values(), strict=True):
        x = x.unflatten(dim, (-1, patch))
    values = (2, 4, 6, 7) if family.channels_last else (7, 2, 4, 6)
    x = x.permute(0, 1, 3, 5, *values).flatten(4)
    return x.flatten(1, 3) if family.attention else x.flatten(2, 3)
