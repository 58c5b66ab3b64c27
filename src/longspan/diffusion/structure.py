"""What a transformer of diffusers does with tokens, read from one forward of a small copy.

The copy's inputs have numbers of tokens that no width equals, so the sizes of what its blocks get and return tell which
dimension holds which tokens, and the lengths at each attention who attends to whom. The copy is then sharded and
compared with itself (`check.py`): nothing here is trusted before.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from longspan.core.errors import LongspanError

REPLICATED = -1
"""Stands for tokens that every rank holds, in the place of a stream's number."""


@dataclass(frozen=True)
class Cut:
    """A dimension with the tokens of one stream, or of several, concatenated in this order."""

    dim: int
    streams: tuple[int, ...]


@dataclass(frozen=True)
class Attention:
    """Whose tokens are the queries and the keys of a call that mixes tokens.

    `kind`: "softmax", "sum" (a product over all tokens, of linear attention) or "rows" (a convolution over rows of
    pixels).
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    kind: str = "softmax"


Paths = dict[tuple[str, int], Cut | None]
"""By the path of a tensor in arguments or outputs, and its number of dimensions; None: every rank has it whole."""


@dataclass(frozen=True)
class Block:
    """How one kind of block is sharded."""

    arguments: Paths
    outputs: Paths
    attention: dict[str, tuple[Attention, ...]]  # by the path of a module in the block: its calls, in order
    by_rows: bool = False  # whether it takes `height` and `width`, as its tokens are pixels: whole rows are split


@dataclass(frozen=True)
class Structure:
    """Where a model's tokens are split and joined, and where they mix."""

    streams: dict[str, tuple[str, ...]]  # of the first list of each region: the arguments with its streams, in order
    blocks: dict[str, dict[frozenset[tuple[str, str]], Block]]  # by list, and by what a block consists of
    regions: tuple[tuple[str, ...], ...]  # lists of blocks between a split and a join
    exits: dict[str, int]  # modules whose output is joined, with its stream; none: the last block of each region
    all_lists: tuple[str, ...]  # also those that are not sharded


def tensors_in(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor in nested tuples, lists and dicts, with its path."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from tensors_in(each, f"{path}.{key}" if path else str(key))
    elif isinstance(value, tuple | list):
        for i, each in enumerate(value):
            yield from tensors_in(each, f"{path}.{i}" if path else str(i))


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


def made_of(block: nn.Module) -> frozenset[tuple[str, str]]:
    """Return what a block consists of: each module's and processor's path and class; adapters count as their base."""
    found = {("()", type(block.processor).__name__)} if hasattr(block, "processor") else set()
    for name, child in block.named_children():
        module = getattr(child, "base_layer", child)  # PEFT's
        kind = "Linear" if isinstance(module, nn.Linear) else type(module).__name__  # quantized ones are subclasses
        found |= {(name, kind)} | {(f"{name}{'' if path == '()' else '.'}{path}", of) for path, of in made_of(module)}
    return frozenset(found)


def processors_of(model: nn.Module) -> dict[str, type]:
    """Return the class of each attention processor, by the path of its module."""
    return {path: type(m.processor) for path, m in model.named_modules() if hasattr(m, "processor")}


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


@dataclass
class _Call:
    """A call of a block."""

    path: str  # of its list
    block: nn.Module
    arguments: dict[tuple[str, int], tuple[int, ...]]  # shapes
    outputs: dict[tuple[str, int], tuple[int, ...]] = field(default_factory=dict)
    sides: tuple[int, int] = (0, 0)  # `height` and `width`, if the block takes them
    attention: dict[str, list[tuple[str, int, int]]] = field(default_factory=dict)  # kind, queries, keys


class Recorder(TorchFunctionMode):
    """Records the calls of blocks, and of what mixes tokens in them, in a `with` block."""

    def __init__(self, model: nn.Module, rows: int, disturbed: tuple[str, str] | None = None) -> None:
        """`rows`: of the batch; `disturbed`: a list of blocks, and an argument of its first block that is changed."""
        super().__init__()
        self.model, self.rows, self.disturbed = model, rows, disturbed
        self.first_rows: list[tuple[Tensor, Tensor]] = []  # of queries and keys in that block
        self.calls: list[_Call] = []
        self.after: list[tuple[str, tuple[int, ...]]] = []  # modules called after the last block: path, output shape
        self._stack: list[str] = []  # paths of running modules in the block
        self._running: _Call | None = None
        self._handles: list[Any] = []

    def __enter__(self) -> Any:
        for path, modules in block_lists(self.model).items():
            for block in modules:
                self._record_block(path, block)
        for path, module in self.model.named_children():
            self._handles.append(module.register_forward_hook(self._after(path)))
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        for handle in self._handles:
            handle.remove()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def _record_block(self, path: str, block: nn.Module) -> None:
        signature = inspect.signature(type(block).forward)

        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            named = named_arguments(signature, module, args, kwargs)
            shapes = {(name, x.dim()): tuple(x.shape) for name, x in tensors_in(named)}
            changed = None if self.disturbed is None or self.disturbed[0] != path else self.disturbed[1]
            first = all(call.path != path for call in self.calls)
            self._running = _Call(path, block, shapes)
            if all(isinstance(named.get(side), int) for side in ("height", "width")):
                self._running.sides = named["height"], named["width"]
            self.calls.append(self._running)
            self.after.clear()
            if changed is None or not first:
                return None
            return (), map_tensors(named, lambda name, x: x + x.cos() if name == changed else x)

        def after(module: nn.Module, args: Any, output: Any) -> None:
            assert self._running is not None
            self._running.outputs = {(name, x.dim()): tuple(x.shape) for name, x in tensors_in(output)}
            self._running = None

        self._handles.append(block.register_forward_pre_hook(before, with_kwargs=True))
        self._handles.append(block.register_forward_hook(after))
        for name, module in block.named_modules():
            self._handles.append(module.register_forward_pre_hook(lambda *_, name=name: self._stack.append(name)))
            self._handles.append(module.register_forward_hook(lambda *_: (self._stack.pop(), None)[1]))

    def _after(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if isinstance(output, Tensor):
                self.after.append((path, tuple(output.shape)))

        return hook

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._running is not None and self._stack:
            calls = self._running.attention.setdefault(self._stack[-1], [])
            if func is F.scaled_dot_product_attention:
                q, k = (kwargs.get(name, args[i] if i < len(args) else None) for i, name in enumerate(("query", "key")))
                calls.append(("softmax", q.shape[-2], k.shape[-2]))
                self.first_rows.append((q[..., 0, :], k[..., 0, :]))
            elif is_product(func) and args[0].dim() == args[1].dim() == 4:
                calls.append(("sum", args[0].shape[-1], args[0].shape[-1]))
            elif is_over_rows(func, args) and args[0].shape[-2:] == self._running.sides:
                n = args[0].shape[-2] * args[0].shape[-1]
                calls.append(("rows", n, n))
        return func(*args, **kwargs)


def is_product(func: Any) -> bool:
    """Return whether a function is a product of matrices."""
    return func in (torch.matmul, Tensor.matmul, Tensor.__matmul__)


def is_over_rows(func: Any, args: Any) -> bool:
    """Return whether a function convolves neighbouring rows, as `nn.Conv2d` calls it."""
    return func is F.conv2d and len(args) == 7 and args[1].shape[-2] > 1


# ---------------------------------------------------------------------------------------------------------------------
# From a recording to a structure.


def candidates(recorded: Sequence[Recorder], text: int, is_first: Callable[[str, str], bool]) -> Iterator[Structure]:
    """Yield structures that fit the recorded forwards of one model, the one that gathers least first.

    Args:
        recorded: a forward with each variant of the inputs.
        is_first: `comes_first` of an argument of a list's first block.
        text: tokens of the text: lists of blocks with no more tokens are not sharded.
    """
    calls = [call for each in recorded for call in each.calls]
    paths = list(dict.fromkeys(call.path for call in calls))
    streams = {path: _streams(recorded[0], path) for path in paths}
    mixing = {call.path for call in calls if any(call.attention.values())}
    sharded = [path for path in paths if path in mixing and any(size > text for size in streams[path].values())]
    if not sharded:
        raise LongspanError("no list of its blocks takes and returns all tokens of the latents")
    for longest in (False, True):
        if longest:  # the others, such as a text that each row holds another part of, stay on every rank
            if all(len(set(streams[path].values())) == 1 for path in sharded):
                return
            streams = {path: {n: x for n, x in of.items() if x == max(of.values())} for path, of in streams.items()}
        base = tuple(dict.fromkeys(streams[sharded[0]].values()))
        last = {base.index(shape[1]): path for path, shape in recorded[0].after if len(shape) == 3 and shape[1] in base}
        exits = {path: stream for stream, path in last.items()}
        together, apart = (tuple(sharded),), tuple((path,) for path in sharded)
        tries: list[tuple[tuple[tuple[str, ...], ...], dict[str, int]]] = [(together, exits)] if exits else []
        tries += [(together, {}), (apart, {})][: len(sharded)]
        for regions, at in tries:
            yield Structure(
                {region[0]: _names(streams[region[0]]) for region in regions},
                {
                    path: _blocks(
                        [c for c in calls if c.path == path],
                        tuple(dict.fromkeys(streams[region[0]].values())),
                        is_first(region[0], _names(streams[region[0]])[0]),
                        longest,
                    )
                    for region in regions
                    for path in region
                },
                regions,
                at,
                tuple(paths),
            )


def _names(streams: dict[str, int]) -> tuple[str, ...]:
    """Return one argument of each length: the same tokens may come in several."""
    return tuple({size: name for name, size in reversed(streams.items())}[n] for n in dict.fromkeys(streams.values()))


def comes_first(plain: Recorder, disturbed: Recorder) -> bool:
    """Return whether the tokens of a disturbed argument come first where they are concatenated with others.

    That is so if the first row of all joint queries or keys of the disturbed block is another.
    """
    assert disturbed.disturbed is not None
    path, name = disturbed.disturbed
    first = 0
    for call in plain.calls:
        sites = [site for of_module in call.attention.values() for site in of_module if site[0] == "softmax"]
        if call.path == path:
            shape = call.arguments[name, 3]
            length = shape[0] if shape[1] == plain.rows else shape[1]
            for i, (_, *sizes) in enumerate(sites, first):
                for before, after, size in zip(plain.first_rows[i], disturbed.first_rows[i], sizes, strict=True):
                    if size > length:
                        return not torch.equal(before, after)
            return True
        first += len(sites)
    return True


def _streams(recorded: Recorder, path: str) -> dict[str, int]:
    """Return the tokens of each argument of a list's first block that the block returns changed."""
    call = next(call for call in recorded.calls if call.path == path)
    arguments = {name: shape for (name, dims), shape in call.arguments.items() if dims == 3}
    found: dict[str, int] = {}
    for (_, dims), shape in call.outputs.items():
        name = next((name for name, x in arguments.items() if x == shape and name not in found), None)
        if dims == 3 and name is not None:
            found[name] = shape[0] if shape[1] == recorded.rows else shape[1]
    return {name: found[name] for name in arguments if name in found}


def _blocks(
    calls: list[_Call], base: tuple[int, ...], in_order: bool, longest: bool
) -> dict[frozenset[tuple[str, str]], Block]:
    """Return the kinds of blocks of a list.

    Not `in_order`: the last stream, or what is replicated, comes first. `longest`: what exceeds a stream is replicated.
    """
    order = tuple(range(len(base)))[:: 1 if in_order else -1]

    def of(size: int) -> tuple[int, ...] | None:
        if size in base:
            return (base.index(size),)
        return order if len(base) > 1 and size == sum(base) else None

    def cut(name: str, shape: tuple[int, ...]) -> Cut | None:
        found = [Cut(dim, streams) for dim, size in enumerate(shape) if (streams := of(size)) is not None]
        if len(found) != 1 or ("mask" in name and len(found[0].streams) > 1):
            return None  # attention permutes a mask of all tokens itself
        return found[0]

    def attention(kind: str, queries: int, keys: int, replicated: set[int]) -> Attention | None:
        if kind != "softmax":
            found = of(queries)
            return None if found is None else Attention(found, found, kind)
        q, k = of(queries), of(keys)
        if longest:
            q, k = ((0, REPLICATED)[:: 1 if in_order else -1] if n > base[0] else of(n) for n in (queries, keys))
        if k is None:
            part = next((of(keys - more) for more in sorted(replicated) if of(keys - more)), None)
            k = (REPLICATED,) if part is None else ((*part, REPLICATED) if in_order else (REPLICATED, *part))
        return Attention((REPLICATED,) if q is None else q, k)

    kinds: dict[frozenset[tuple[str, str]], Block] = {}
    for call in calls:
        replicated = {shape[1] for (_, dims), shape in call.arguments.items() if dims == 3} - set(base)
        sites = {
            path: tuple(x for x in (attention(*one, replicated) for one in of_module) if x is not None)
            for path, of_module in call.attention.items()
        }
        sharing = [x for site in sites.values() for x in site if set(x.keys) != {REPLICATED}]
        block = Block(
            {key: cut(key[0], shape) for key, shape in call.arguments.items()},
            {key: cut(key[0], shape) for key, shape in call.outputs.items()},
            {path: site for path, site in sites.items() if any(set(x.keys) != {REPLICATED} for x in site)},
            call.sides[0] * call.sides[1] in base and not any(x.kind == "softmax" for x in sharing),
        )
        before = kinds.setdefault(made_of(call.block), block)
        before.arguments.update({k: v for k, v in block.arguments.items() if k not in before.arguments})
    return kinds
