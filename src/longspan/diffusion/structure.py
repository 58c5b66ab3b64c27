"""What a transformer of diffusers does with tokens, read from one forward of a small copy.

The copy's inputs have numbers of tokens that no width equals, so the sizes of what its blocks get and return tell which
dimension holds which tokens, and the lengths at each attention who attends to whom. The copy is then sharded and
compared with itself (`check.py`): nothing here is trusted before.
"""

from __future__ import annotations

import functools
import inspect
import math
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
    """Whose tokens are the queries and the keys of a call that mixes tokens.

    `kind`: "softmax", "sum" (a product over all tokens, of linear attention) or "rows" (a convolution over rows of
    pixels).
    """

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
    by_rows: bool  # whether it takes `height` and `width`, as its tokens are pixels: whole rows are split
    # Arguments with a batch of other tokens, as of frames: these are sharded while it runs, and its own are not.
    switched: frozenset[tuple[str, int]]


@dataclass(frozen=True)
class Structure:
    """Where a model's tokens are split and joined, and where they mix."""

    regions: dict[tuple[str, ...], tuple[str, ...]]  # lists between a split and a join: arguments with their streams
    blocks: dict[str, dict[Kind, Block]]  # by list, and by what a block consists of
    exits: dict[str, int]  # modules whose output is joined, with its stream; none: the last block of each region
    all_lists: tuple[str, ...]  # also those that are not sharded


def tensors_in(value: Any) -> list[tuple[str, Tensor]]:
    """Return each tensor in nested tuples, lists and dicts, with its path."""
    found: list[tuple[str, Tensor]] = []

    def keep(path: str, x: Tensor) -> Tensor:
        found.append((path, x))
        return x

    map_tensors(value, keep)
    return found


def map_tensors(value: Any, change: Callable[[str, Tensor], Tensor], path: str = "") -> Any:
    """Return nested tuples, lists and dicts with each tensor changed."""
    if isinstance(value, Tensor):
        return change(path, value)
    if isinstance(value, dict):
        return {key: map_tensors(x, change, f"{path}.{key}" if path else str(key)) for key, x in value.items()}
    if isinstance(value, tuple | list):
        changed = [map_tensors(x, change, f"{path}.{i}" if path else str(i)) for i, x in enumerate(value)]
        return type(value)(changed) if type(value) in (tuple, list) else type(value)(*changed)  # a named tuple
    return value


Kind = frozenset[tuple[str, str]]


def made_of(block: nn.Module) -> Kind:
    """Return the path and class of each of diffusers' modules in a block, and of each processor, as `path.()`."""
    found: set[tuple[str, str]] = set()
    for path, module in block.named_modules():
        if path and is_of_diffusers(module):
            found.add((path, type(module).__name__))
        if hasattr(module, "processor"):
            found.add((f"{path}.()", type(module.processor).__name__))
    return frozenset(found)


def unknown_block(model: nn.Module, structure: Structure) -> str:
    """Return which of a model's blocks is of no kind that the small copy has, and why; "" if each is."""
    lists = block_lists(model)
    for path, kinds in structure.blocks.items():
        for i, block in enumerate(lists[path]):
            if (kind := made_of(block)) in kinds:
                continue
            others = sorted((name, of) for name, of in kind.difference(*kinds) if name.endswith(".()"))
            if not others:
                return f"{path}.{i} has other modules than diffusers makes from its config"
            ((name, of), *_) = others
            return (
                f"{path}.{i}.{name.removesuffix('.()')} has the attention processor {of}, which longspan does not know "
                f"there; use the one that diffusers sets"
            )
    return ""


def named_arguments(signature: inspect.Signature, module: nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a forward by name; those of `**kwargs` too."""
    bound = signature.bind(module, *args, **kwargs)
    arguments = dict(list(bound.arguments.items())[1:])
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


def _shapes(value: Any) -> Shapes:
    return {(path, x.dim()): tuple(x.shape) for path, x in tensors_in(value)}


@dataclass
class _Call:
    """A call of a block."""

    path: str  # of its list
    block: nn.Module
    arguments: Shapes
    sides: tuple[Any, Any]  # `height` and `width`, if the block takes them
    outputs: Shapes = field(default_factory=dict)
    attention: dict[str, list[tuple[str, int, int]]] = field(default_factory=dict)  # kind, queries, keys


class Recorder(TorchFunctionMode):
    """Records the calls of blocks, and of what mixes tokens in them, in a `with` block."""

    def __init__(self, model: nn.Module, rows: int) -> None:
        """`rows`: of the batch."""
        super().__init__()
        self.model, self.rows = model, rows
        self.calls: list[_Call] = []
        self.after: list[tuple[str, tuple[int, ...]]] = []  # modules called after the last block: path, output shape
        self._stack: list[str] = []  # paths of running modules in the block
        self._handles: list[Any] = []

    def __enter__(self) -> Any:
        for path, modules in block_lists(self.model).items():
            for block in modules:
                self._record_block(path, block)
        for path, module in self.model.named_children():
            self._handles.append(module.register_forward_hook(functools.partial(self._record_after, path)))
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        for handle in self._handles:
            handle.remove()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def _record_block(self, path: str, block: nn.Module) -> None:
        signature = inspect.signature(type(block).forward)

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            named = named_arguments(signature, module, args, kwargs)
            self.calls.append(_Call(path, block, _shapes(named), (named.get("height"), named.get("width"))))
            self.after.clear()

        def after(module: nn.Module, args: Any, output: Any) -> None:
            self.calls[-1].outputs = _shapes(output)

        self._handles.append(block.register_forward_pre_hook(before, with_kwargs=True))
        self._handles.append(block.register_forward_hook(after))
        for name, module in block.named_modules():
            self._handles.append(module.register_forward_pre_hook(lambda *_, name=name: self._stack.append(name)))
            self._handles.append(module.register_forward_hook(lambda *_: (self._stack.pop(), None)[1]))

    def _record_after(self, path: str, module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            self.after.append((path, tuple(output.shape)))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._stack:
            call = self.calls[-1]
            sites = call.attention.setdefault(self._stack[-1], [])
            if func is F.scaled_dot_product_attention:
                q, k = (kwargs.get(name, args[i] if i < len(args) else None) for i, name in enumerate(("query", "key")))
                sites.append(("softmax", q.shape[-2], k.shape[-2]))
            elif is_product(func) and args[0].dim() == args[1].dim() == 4:
                sites.append(("sum", args[0].shape[-1], args[0].shape[-1]))
            elif is_over_rows(func, args) and args[0].shape[-2:] == call.sides:
                sites.append(("rows", math.prod(call.sides), math.prod(call.sides)))
        return func(*args, **kwargs)


def is_product(func: Any) -> bool:
    """Return whether a function is a product of matrices."""
    return func in (torch.matmul, Tensor.matmul, Tensor.__matmul__)


def is_over_rows(func: Any, args: Any) -> bool:
    """Return whether a function convolves neighbouring rows, as `nn.Conv2d` calls it."""
    return func is F.conv2d and len(args) == 7 and args[1].shape[-2] > 1


# ---------------------------------------------------------------------------------------------------------------------
# From a recording to a structure.


def candidates(recorded: Sequence[Recorder], text: int) -> Iterator[Structure]:
    """Yield structures that fit the recorded forwards of one model, the one that gathers least first.

    Args:
        recorded: a forward with each variant of the inputs.
        text: tokens of the text: lists of blocks with no more tokens are not sharded.

    Raises:
        LongspanError: if none has all tokens.
    """
    calls = [call for each in recorded for call in each.calls]
    by_list = {path: [call for call in calls if call.path == path] for path in dict.fromkeys(c.path for c in calls)}
    rows = recorded[0].rows
    streams = {path: _streams(of_list[0], rows) for path, of_list in by_list.items()}
    mixing = [path for path, of_list in by_list.items() if any(any(call.attention.values()) for call in of_list)]
    large = {path for path in mixing if any(size > text for size in streams[path].values())}
    at = [i for i, call in enumerate(recorded[0].calls) if call.path in large]
    between = {call.path for call in recorded[0].calls[min(at, default=0) : max(at, default=0)]}
    sharded = tuple(path for path in mixing if path in large | between)
    if not sharded:
        raise LongspanError("no list of its blocks takes and returns all tokens of the latents")
    # Without `all_streams`, the others, such as a text that each row holds another part of, stay on every rank.
    for all_streams in (True, False):
        if not all_streams:
            streams = {path: {n: x for n, x in of.items() if x == max(of.values())} for path, of in streams.items()}
        base = tuple(dict.fromkeys(streams[sharded[0]].values()))
        exits = {
            base.index(shape[1]): path for path, shape in recorded[0].after if len(shape) == 3 and shape[1] in base
        }
        together, apart = (sharded,), tuple((path,) for path in sharded)
        for regions, joined in ((together, exits), (together, {}), (apart, {})):
            for backwards in (True, False):
                blocks = {
                    path: _blocks(by_list[path], tuple(dict.fromkeys(streams[region[0]].values())), backwards, rows)
                    for region in regions
                    for path in region
                }
                first = {region: _names(streams[region[0]]) for region in regions}
                yield Structure(first, blocks, {path: stream for stream, path in joined.items()}, tuple(by_list))


def _names(streams: dict[str, int]) -> tuple[str, ...]:
    """Return one argument of each length: the same tokens may come in several."""
    return tuple({size: name for name, size in reversed(streams.items())}[n] for n in dict.fromkeys(streams.values()))


def _streams(call: _Call, rows: int) -> dict[str, int]:
    """Return the tokens of each argument of a block that it returns changed."""
    arguments = {name: shape for (name, dims), shape in call.arguments.items() if dims == 3}
    found: dict[str, int] = {}
    for (_, dims), shape in call.outputs.items():
        name = next((name for name, x in arguments.items() if x == shape and name not in found), None)
        if dims == 3 and name is not None:
            found[name] = shape[0] if shape[1] == rows else shape[1]
    return {name: found[name] for name in arguments if name in found}


def _blocks(calls: list[_Call], base: tuple[int, ...], backwards: bool, rows: int) -> dict[Kind, Block]:
    """Return the kinds of blocks of a list.

    Args:
        base: tokens of each stream.
        backwards: whether the last stream, or what is replicated, comes first where tokens are concatenated.
        rows: of the batch.
    """
    joint = tuple(range(len(base))) if len(base) > 1 else (0, REPLICATED)
    joint = joint[::-1] if backwards else joint

    def of(size: int) -> tuple[int, ...] | None:
        if size in base:
            return (base.index(size),)
        return joint if len(base) > 1 and size == sum(base) else None

    returned = _streams(calls[0], rows)

    def cut(name: str, shape: tuple[int, ...]) -> Cut | None:
        found = [Cut(dim, streams) for dim, size in enumerate(shape) if (streams := of(size)) is not None]
        if not found and shape and shape[0] % rows == 0 and shape[0] // rows in base and name not in returned:
            found = [Cut(0, (base.index(shape[0] // rows),), of_rows=True)]
        if len(found) != 1 or ("mask" in name and len(found[0].streams) > 1):
            return None  # attention permutes a mask of all tokens itself
        return found[0]

    def attention(kind: str, queries: int, keys: int, replicated: set[int]) -> Attention:
        def parts(n: int) -> tuple[int, ...]:
            longer = len(base) == 1 and n > base[0] and (n == queries or n - base[0] in replicated)
            return of(n) or (joint if longer else (REPLICATED,))

        return Attention(parts(queries), parts(keys), kind)

    kinds: dict[Kind, Block] = {}
    for call in calls:
        replicated = {shape[1] for (_, dims), shape in call.arguments.items() if dims == 3}
        sites = {}
        for path, site in call.attention.items():
            found = tuple(attention(*one, replicated) for one in site if one[0] == "softmax" or of(one[1]))
            if any(set(x.keys) != {REPLICATED} for x in found):
                sites[path] = found
        batch = min(call.outputs.values(), default=())[:1]
        switches = bool(sites) and all(len(x) > 1 and x[0] > rows and of(x[1]) for x in call.outputs.values())
        block = Block(
            {key: cut(key[0], shape) for key, shape in call.arguments.items()},
            {key: cut(key[0], shape) for key, shape in call.outputs.items()},
            sites,
            by_rows=any(x.kind == "rows" for site in sites.values() for x in site),
            switched=frozenset(key for key, shape in call.arguments.items() if switches and shape[:1] == batch),
        )
        before = kinds.setdefault(made_of(call.block), block)
        before.arguments.update({k: v for k, v in block.arguments.items() if k not in before.arguments})
    return kinds
