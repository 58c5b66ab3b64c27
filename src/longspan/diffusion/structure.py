"""What a transformer of diffusers does with tokens, read from one forward of a small copy.

The copy's inputs have numbers of tokens that no width equals, so the sizes of what its blocks get and return tell which
dimension holds which tokens, and the lengths at each attention who attends to whom. The copy is then sharded and
compared with itself (`check.py`): nothing here is trusted before.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from longspan.compat.friends_api import is_of_diffusers
from longspan.core.errors import LongspanError

REPLICATED = -1
"""Stands for tokens that every rank holds, in the place of a stream's number."""


@dataclass(frozen=True)
class Cut:
    """A dimension with the tokens of one stream, or of several, concatenated in this order."""

    dim: int
    streams: tuple[int, ...]
    of_rows: bool = False  # whether it has those of each row of the batch, one row after the other, whole


@dataclass(frozen=True)
class Attention:
    """Whose tokens are the queries and the keys of a call that mixes tokens, of a kind that `mixing` names."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    kind: str = "softmax"


Shapes = dict[tuple[str, int], tuple[int, ...]]
Paths = dict[tuple[str, int], Cut | None]
"""By the path of a tensor in arguments or outputs, and its number of dimensions; None: every rank has it whole."""


@dataclass(frozen=True)
class Block:
    """How one kind of block is sharded."""

    arguments: Paths
    outputs: Paths
    attention: dict[str, tuple[Attention, ...]]  # by the path of a module in the block: its calls, in order
    # Arguments with a batch of other tokens, as of frames: these are sharded while it runs, and its own are not.
    switched: frozenset[tuple[str, int]]

    @property
    def by_rows(self) -> bool:
        """Whether it takes `height` and `width`, as its tokens are pixels: whole rows are split."""
        return any(call.kind == "rows" for calls in self.attention.values() for call in calls)


Kind = frozenset[tuple[str, str]]


@dataclass(frozen=True)
class Structure:
    """Where a model's tokens are split and joined, and where they mix."""

    regions: dict[tuple[str, ...], tuple[str, ...]]  # lists between a split and a join: arguments with their streams
    blocks: dict[str, dict[Kind, Block]]  # by list, and by what a block consists of
    exits: dict[str, int]  # modules whose output is joined, with its stream; none: the last block of each region
    all_lists: tuple[str, ...]  # also those that are not sharded
    time_per_token: bool  # whether it takes a time step for each token

    @property
    def has_streams(self) -> bool:
        """Whether blocks return other tokens than those of the latents, too."""
        return any(len(arguments) > 1 for arguments in self.regions.values())


def map_leaves(value: Any, change: Callable[[str, Any], Any], path: str = "") -> Any:
    """Return nested tuples, lists and dicts with each value changed, of a path such as `angles[0]`."""
    if isinstance(value, dict):
        return {key: map_leaves(x, change, f"{path}[{key!r}]" if path else str(key)) for key, x in value.items()}
    if isinstance(value, tuple | list):
        changed = [map_leaves(x, change, f"{path}[{i}]") for i, x in enumerate(value)]
        return type(value)(changed) if type(value) in (tuple, list) else type(value)(*changed)  # a named tuple
    return change(path, value)


def map_tensors(value: Any, change: Callable[[str, Tensor], Tensor]) -> Any:
    """Return nested tuples, lists and dicts with each tensor changed."""
    return map_leaves(value, lambda path, x: change(path, x) if isinstance(x, Tensor) else x)


def leaves(value: Any) -> dict[str, Any]:
    """Return each value in nested tuples, lists and dicts, by its path."""
    found: dict[str, Any] = {}
    map_leaves(value, found.__setitem__)
    return found


def tensors_in(value: Any) -> dict[str, Tensor]:
    """Return each tensor in nested tuples, lists and dicts, by its path."""
    return {path: x for path, x in leaves(value).items() if isinstance(x, Tensor)}


def made_of(block: nn.Module) -> Kind:
    """Return the path and class of each of diffusers' modules in a block, and of each attention processor."""
    found: dict[str, Any] = {}
    for path, module in block.named_modules():
        if path and is_of_diffusers(module):
            found[path] = module
        if hasattr(module, "processor"):
            found[f"{path}.processor"] = module.processor
    return frozenset((path, type(part).__name__) for path, part in found.items())


def unknown_block(model: nn.Module, structure: Structure) -> str:
    """Return which of a model's blocks is of no kind that the small copy has, and why; "" if each is."""
    lists = block_lists(model)
    for path, kinds in structure.blocks.items():
        for i, block in enumerate(lists[path]):
            if (kind := made_of(block)) not in kinds:
                name, of = min(kind.difference(*kinds), default=("", type(block).__name__))
                return (
                    f"{path}.{i}.{name} is {of}, which longspan does not know there; use what diffusers makes from the "
                    f"model's config"
                )
    return ""


_signature = functools.cache(inspect.signature)


def named_arguments(module: nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a forward by name; those of `**kwargs` too."""
    signature = _signature(type(module).forward)
    arguments = dict(list(signature.bind(module, *args, **kwargs).arguments.items())[1:])
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            arguments |= arguments.pop(name, {})
    return arguments


def block_lists(model: nn.Module) -> dict[str, nn.ModuleList]:
    """Return the outermost lists of modules, by path."""
    found: dict[str, nn.ModuleList] = {}
    for path, module in model.named_modules():
        inside = any(path.startswith(other + ".") for other in found)
        if isinstance(module, nn.ModuleList) and not inside:
            found[path] = module
    return found


# ---------------------------------------------------------------------------------------------------------------------
# One forward, recorded.


def mixing(func: Any, args: Any, kwargs: Any) -> tuple[str, int, int]:
    """Return how a function of torch may mix tokens, and of how many queries and keys.

    "softmax"; "sum": a product over all tokens, of linear attention; "rows": a convolution over rows of pixels, as
    `nn.Conv2d` calls it; "": not at all.
    """
    if func is F.scaled_dot_product_attention:
        q, k = (kwargs[name] if name in kwargs else args[i] for i, name in enumerate(("query", "key")))
        return "softmax", q.shape[-2], k.shape[-2]
    if func in (torch.matmul, Tensor.matmul, Tensor.__matmul__) and all(x.dim() == 4 for x in args[:2]):
        return "sum", args[0].shape[-1], args[0].shape[-1]
    if func is F.conv2d and len(args) == 7 and args[1].shape[-2] > 1:
        pixels = math.prod(args[0].shape[-2:])
        return "rows", pixels, pixels
    return "", 0, 0


def _shapes(value: Any) -> Shapes:
    return {(path, x.dim()): tuple(x.shape) for path, x in tensors_in(value).items()}


@dataclass
class _Call:
    """A call of a block."""

    path: str  # of its list
    kind: Kind
    arguments: Shapes
    outputs: Shapes = field(default_factory=dict)
    mixing: dict[str, list[tuple[str, int, int]]] = field(default_factory=lambda: defaultdict(list))  # by module


class Recorder(TorchFunctionMode):
    """Records the calls of a model's blocks, and of what mixes tokens in them, in a `with` block. Leaves its hooks."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.calls: list[_Call] = []
        self.after: dict[str, tuple[int, ...]] = {}  # output shapes of modules called after the last block, by path
        self._running: list[str] = []  # paths of modules in the block
        for path, modules in block_lists(model).items():
            for block in modules:
                self._record_block(path, block)
        for path, module in model.named_children():
            module.register_forward_hook(functools.partial(self._record_after, path))

    def _record_block(self, path: str, block: nn.Module) -> None:
        kind = made_of(block)

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            self.calls.append(_Call(path, kind, _shapes(named_arguments(module, args, kwargs))))
            self.after.clear()

        def after(module: nn.Module, args: Any, output: Any) -> None:
            self.calls[-1].outputs = _shapes(output)

        block.register_forward_pre_hook(before, with_kwargs=True)
        block.register_forward_hook(after)
        for name, module in block.named_modules():
            module.register_forward_pre_hook(lambda *_, name=name: self._running.append(name))
            module.register_forward_hook(lambda *_: (self._running.pop(), None)[1])

    def _record_after(self, path: str, module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            self.after[path] = tuple(output.shape)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = mixing(func, args, kwargs or {})
        if self._running and found[0]:
            self.calls[-1].mixing[self._running[-1]].append(found)
        return func(*args, **(kwargs or {}))


# ---------------------------------------------------------------------------------------------------------------------
# From a recording to a structure.


def candidates(recorded: Sequence[Recorder], rows: int, text: int) -> Iterator[Structure]:
    """Yield structures that fit the recorded forwards of one model, the one that gathers least first.

    Args:
        recorded: a forward with each variant of the inputs.
        rows: of the batch.
        text: tokens of the text: lists of blocks with no more tokens are not sharded.

    Raises:
        LongspanError: if none has all tokens.
    """
    calls = [call for each in recorded for call in each.calls]
    by_list = {path: [call for call in calls if call.path == path] for path in dict.fromkeys(c.path for c in calls)}
    streams = {path: _streams(of_list[0], rows) for path, of_list in by_list.items()}
    mixing_lists = [path for path, of_list in by_list.items() if any(call.mixing for call in of_list)]
    large = [
        i for i, call in enumerate(calls) if call.path in mixing_lists and max(streams[call.path], default=0) > text
    ]
    between = {call.path for call in calls[min(large, default=0) : max(large, default=-1) + 1]}
    sharded = tuple(path for path in mixing_lists if path in between)
    if not sharded:
        raise LongspanError("no list of its blocks takes and returns all tokens of the latents")
    # Without `all_streams`, the others, such as a text that each row holds another part of, stay on every rank.
    for all_streams in (True, False):
        if not all_streams:
            streams = {path: {max(of): of[max(of)]} for path, of in streams.items() if of}
        base = list(streams[sharded[0]])
        last = {shape[1]: path for path, shape in recorded[0].after.items() if len(shape) == 3 and shape[1] in base}
        exits = {path: base.index(n) for n, path in last.items()}
        apart = [(path,) for path in sharded]
        for regions, joined in (([sharded], exits), ([sharded], {}), (apart, {})):
            for backwards in (True, False):
                blocks: dict[str, dict[Kind, Block]] = {}
                base_of = {path: list(streams[region[0]]) for region in regions for path in region}
                for call in calls:
                    if call.path in base_of:
                        block = _block(call, base_of[call.path], backwards, rows)
                        before = blocks.setdefault(call.path, {}).setdefault(call.kind, block)
                        before.arguments.update(block.arguments | before.arguments)
                first = {region: tuple(streams[region[0]].values()) for region in regions}
                yield Structure(first, blocks, joined, tuple(by_list), len(recorded) > 1)


def _streams(call: _Call, rows: int) -> dict[int, str]:
    """Return the numbers of tokens that a block takes and returns, with the first argument of each."""
    returned = [shape for (_, dims), shape in call.outputs.items() if dims == 3]
    found: dict[int, str] = {}
    for (name, _), shape in call.arguments.items():
        if shape in returned:
            found.setdefault(shape[0] if shape[1] == rows else shape[1], name)
    return found


def _block(call: _Call, base: list[int], backwards: bool, rows: int) -> Block:
    """Return how a block is sharded.

    Args:
        base: tokens of each stream.
        backwards: whether the last stream, or what is replicated, comes first where tokens are concatenated.
        rows: of the batch.
    """
    joint = tuple(range(len(base))) if len(base) > 1 else (0, REPLICATED)
    joint = joint[::-1] if backwards else joint
    of = {sum(base): joint} | {n: (i,) for i, n in enumerate(base)}
    returned = _streams(call, rows).values()
    texts = {shape[1] for (_, dims), shape in call.arguments.items() if dims == 3}

    def cut(name: str, shape: tuple[int, ...]) -> Cut | None:
        found = [Cut(dim, of[n]) for dim, n in enumerate(shape) if n in of]
        if not found and name not in returned and shape and shape[0] % rows == 0 and shape[0] // rows in base:
            found = [Cut(0, of[shape[0] // rows], of_rows=True)]
        if len(found) != 1 or ("mask" in name and len(found[0].streams) > 1):
            return None  # attention permutes a mask of all tokens itself
        return found[0]

    def whose(n: int, queries: int) -> tuple[int, ...]:
        if len(base) == 1 and n > base[0] and (n == queries or n - base[0] in texts):
            return joint
        return of.get(n, (REPLICATED,))

    sites = {}
    for path, site in call.mixing.items():
        found = tuple(Attention(whose(q, q), whose(k, q), kind) for kind, q, k in site if kind == "softmax" or q in of)
        if any(set(x.keys) != {REPLICATED} for x in found):
            sites[path] = found
    batch = min(call.outputs.values(), default=())[:1]
    switches = bool(sites) and all(len(x) > 1 and x[0] > rows and x[1] in of for x in call.outputs.values())
    return Block(
        {key: cut(key[0], shape) for key, shape in call.arguments.items()},
        {key: cut(key[0], shape) for key, shape in call.outputs.items()},
        sites,
        frozenset(key for key, shape in call.arguments.items() if switches and shape[:1] == batch),
    )
