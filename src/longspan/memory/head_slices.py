"""Run an attention module slice by slice over its heads, forward and backward: tensor parallelism in time.

The module of transformers runs once per slice, with the weights of that slice's heads: the rows of the projections to
q, k and v, and the columns of the output projection, that a rank of a tensor axis would have. They are views of the
whole weights. The slices' outputs are summed; the backward recomputes each slice. So q, k, v, the attention's output
and their copies for an all-to-all exist for one slice at a time (as in UPipe, arXiv:2602.21196).

Four details save more:

- The output projection of each slice adds to one sum: its output does not exist by itself.
- The first projections read the module's input tile by tile, as a norm computes it from its own input
  (`longspan.memory.tiles`), once per slice for all projections; the gradient of the input is summed likewise.
- Sums of all slices are as large as the hidden states, what a slice adds to them is smaller. So the inputs of output
  projections, and in the backward the gradients of first projections, wait until several slices' are as large as the
  sum. It is allocated when fewer slices' saved outputs are left, or no attention follows.
- Each slice saves its attention's output and log-sum-exp, if the kernel returns that: no kernel runs again. Under a
  checkpoint they are saved when the layer is recomputed; a selective checkpoint holds them from the forward on.

Shape suffixes: T tokens of all rows, D features of the module's input, O outputs of a projection.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longspan.comm.tensor import BareModule, Rule
from longspan.compat.torch_api import flatten_tree, not_compiled, without_torch_function
from longspan.core.errors import LongspanError
from longspan.memory.tiles import (
    ForwardState,
    InputSource,
    Uncomputed,
    is_autocast_on,
    note_tile_reader,
    or_computed,
    tiles_of,
)


class Attention(Protocol):
    """The binding of an attention layer."""

    layer_call: Any  # saves what its attention computes; None: nothing is saved
    saves_lse: bool  # whether its kernel returns the log-sum-exp


@dataclass(frozen=True)
class HeadCut:
    """How the weights of one attention module are cut into slices. Names are relative to the module."""

    count: int
    rules: Mapping[str, Rule]  # of every weight
    last: str  # the output projection
    # Returns the values of weights that are stored in 4 bits, by name.
    unpack: Mapping[str, Callable[[], Tensor]] = field(default_factory=dict)
    # For a module that reads its numbers of query and KV heads from its config: those of each slice.
    heads: tuple[tuple[int, int], ...] | None = None

    def part(self, name: str, weight: Tensor, number: int) -> Tensor:
        """Return a slice of a weight: a view, unless its rows are not neighbours."""
        rule = self.rules[name]
        if rule.dim is None:
            return torch.zeros_like(weight) if rule.first and number else weight
        assert rule.parts is not None
        return rule.parts.of_whole(weight, rule.dim, number)

    def is_shared(self, name: str) -> bool:
        """Return whether several slices use the same entries of a weight."""
        rule = self.rules[name]
        if rule.dim is None:
            return not rule.first
        assert rule.parts is not None
        return sum(stop - start for spans in rule.parts.spans for start, stop in spans) > rule.parts.length

    def entries(self, name: str, number: int) -> object:
        """Return which entries of a weight a slice uses; slices that use the same ones have equal results."""
        rule = self.rules[name]
        if rule.dim is None:
            return rule.first and number
        assert rule.parts is not None
        return rule.parts.spans[number]

    def add_part(self, total: Tensor, name: str, gradient: Tensor, number: int) -> None:
        """Add the gradient of a slice of a weight to that of the weight."""
        rule = self.rules[name]
        if rule.dim is None:
            if not (rule.first and number):
                total.add_(gradient)
            return
        assert rule.parts is not None
        at = 0
        for start, stop in rule.parts.spans[number]:
            total.narrow(rule.dim, start, stop - start).add_(gradient.narrow(rule.dim, at, stop - start))
            at += stop - start


class SlicedAttention:
    """Replaces an attention module's `forward` by one that runs slice by slice in training, if it has a `cut`.

    `runs_whole`: returns whether a call with these keyword arguments is not sliced, because it has a KV cache.
    """

    def __init__(
        self, module: nn.Module, name: str, attention: Attention, runs_whole: Callable[[dict[str, Any]], bool]
    ) -> None:
        self.module, self.name, self.attention, self.runs_whole = module, name, attention, runs_whole
        self.cut: HeadCut | None = None
        self.bare = BareModule(module)
        self.readers: list[str] = []  # weights that multiply the module's input; found in the first slice
        self._sliced = not_compiled(self._run_slices)  # a compiler breaks its graph here
        module.forward = self._forward  # on the instance, so that hooks around `__call__` still run

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.cut is None or not self.module.training or self.runs_whole(kwargs):
            return self.bare(*args, **kwargs)
        return self._sliced(self.cut, args, kwargs)

    def _run_slices(self, cut: HeadCut, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = "" if args else "hidden_states"
        hidden: Tensor = args[0] if args else kwargs[name]
        leaves, _ = flatten_tree((args[1:], kwargs))
        others = [x for x in leaves if isinstance(x, Tensor) and x is not hidden]
        if torch.is_grad_enabled() and any(x.requires_grad for x in others):
            raise LongspanError(
                f"{self.name} was called with tensors besides the hidden states that need a gradient, so it cannot "
                f"run in slices of its heads; use head_slices=1"
            )
        more = (args[1:], kwargs) if args else ((), {k: x for k, x in kwargs.items() if k != name})
        hidden = or_computed(hidden)
        source = InputSource.of(hidden) if torch.is_grad_enabled() else None
        if source is None and isinstance(hidden, Uncomputed):  # made by a norm of a norm's output
            hidden = hidden.whole()
        note_tile_reader(hidden)
        saves = self.attention.saves_lse and torch.is_grad_enabled()
        call = _Call(self, cut, more[0], more[1], named=not args, saves=saves)
        out = _Sliced.apply(call, source, hidden, *dict(self.module.named_parameters()).values())  # type: ignore[no-untyped-call]
        return (out, *call.rest) if call.rest is not None else out


@dataclass
class _Call:
    """One call of a sliced attention."""

    sliced: SlicedAttention
    cut: HeadCut
    args: tuple[Any, ...]  # after the hidden states
    kwargs: dict[str, Any]
    named: bool  # whether the hidden states are a keyword argument
    saves: bool  # whether the slices save what their attentions compute
    rest: tuple[Any, ...] | None = None  # what the module returns after its output; None if it returns only a tensor

    def run(
        self, number: int, hidden: Tensor, own: dict[str, Tensor], last: Callable[..., Tensor], saves: Any
    ) -> Tensor:
        """Run the module with the weights `own` of a slice, and `last` as its output projection."""
        sliced, cut = self.sliced, self.cut
        args = self.args if self.named else (hidden, *self.args)
        kwargs = {**self.kwargs, "hidden_states": hidden} if self.named else self.kwargs
        swapped = {f"module.{name}": x for name, x in own.items() if name not in cut.unpack}
        replaced = {name.rpartition(".")[0]: _packed(own, name) for name in cut.unpack}
        replaced[cut.last] = last
        attention, before = sliced.attention, sliced.attention.layer_call
        attention.layer_call = saves
        try:
            heads = None if cut.heads is None else cut.heads[number]
            with _replaced(sliced.module, replaced), _heads(sliced.module, heads):
                out = torch.func.functional_call(sliced.bare, swapped, args, kwargs)
        finally:
            attention.layer_call = before
        self.rest = tuple(out[1:]) if isinstance(out, tuple) else None
        first: Tensor = out[0] if isinstance(out, tuple) else out
        return first

    def weights(self) -> dict[str, Tensor]:
        """Return the whole weights as they are now: gathered, under FSDP; those in 4 bits by their values."""
        found = {name: p.detach() for name, p in self.sliced.module.named_parameters()}
        return found | {name: unpack() for name, unpack in self.cut.unpack.items()}


def _packed(own: dict[str, Tensor], name: str) -> Callable[[Tensor], Tensor]:
    """Return the forward of a 4-bit linear layer that multiplies by its unpacked weight."""

    def forward(x: Tensor) -> Tensor:
        weight, bias = own[name], own.get(f"{name.rpartition('.')[0]}.bias")
        if x.dtype == weight.dtype:
            return F.linear(x, weight, bias)
        return F.linear(x.to(weight.dtype), weight, bias).to(x.dtype)

    return forward


@contextlib.contextmanager
def _replaced(module: nn.Module, forwards: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Run `forwards` instead of these inner modules in this context."""
    inner: dict[Any, Callable[..., Any]] = {module.get_submodule(path): run for path, run in forwards.items()}
    before = {m: m.__dict__.get("forward") for m in inner}
    for m, run in inner.items():
        m.forward = run
    try:
        yield
    finally:
        for m, own in before.items():
            if own is None:
                del m.forward
            else:
                m.forward = own


@contextlib.contextmanager
def _heads(module: Any, heads: tuple[int, int] | None) -> Iterator[None]:
    """Let a module with a fused projection find these numbers of query and KV heads in this context."""
    if heads is None:
        yield
        return
    names = "num_attention_heads", "num_key_value_heads"
    before = [getattr(module.config, name) for name in names]
    try:
        module.config.num_attention_heads, module.config.num_key_value_heads = heads
        module.num_key_value_heads = heads[1]
        yield
    finally:
        module.config.num_attention_heads, module.config.num_key_value_heads = before
        module.num_key_value_heads = before[1]


# ---------------------------------------------------------------------------------------------------------------------
# What a slice's attention saves.


class _Saved:
    """The tensors that one attention saved; see `longspan.attn.methods.base.SavedTensors`."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = [x.detach() for x in tensors]

    def tensors(self) -> list[Tensor]:
        return self._tensors

    def release(self) -> None:
        self._tensors = []


class SliceCall:
    """One run of a slice: collects what its attentions save, or loads it (`SavedAttentions`).

    `layer_call`: the call of a selective checkpoint, which then holds what is saved.
    """

    def __init__(self, layer_call: Any = None, saved: list[Any] | None = None) -> None:
        self.layer_call, self.saved, self.next = layer_call, saved or [], 0
        self.recomputing = saved is not None or (layer_call is not None and layer_call.recomputing)

    def save(self, tensors: Sequence[Tensor]) -> Any:
        self.saved.append(_Saved(tensors) if self.layer_call is None else self.layer_call.save(tensors))
        return self.saved[-1]

    def load_next(self) -> Any:
        if self.layer_call is not None:
            return self.layer_call.load_next()
        self.next += 1
        return self.saved[self.next - 1]


# ---------------------------------------------------------------------------------------------------------------------
# The slices, forward and backward.


class _Sliced(torch.autograd.Function):
    """Compute all slices; in the backward, recompute each with its gradients."""

    @staticmethod
    def forward(ctx: Any, call: _Call, source: InputSource | None, hidden: Tensor, *_: Tensor) -> Tensor:
        attention, cut = call.sliced.attention, call.cut
        layer_call, weights = attention.layer_call, call.weights()
        total, each = _Sum(call, weights), list[list[Any]]()
        given = None
        if isinstance(hidden, Uncomputed):
            given = _Input(hidden.norm_input, source, hidden.shape, needs_grad=False)
        for number in range(cut.count):
            own = {name: cut.part(name, x, number) for name, x in weights.items()}
            saves = SliceCall(layer_call) if call.saves else None
            # Nothing needs a gradient here, but the attention saves its output only with gradients enabled.
            with torch.set_grad_enabled(saves is not None):
                reads = None if given is None else _Reads(given, own, call.sliced.readers)
                x = hidden.detach() if reads is None else reads.stand_in()
                out = call.run(number, x, own, total.adder(own), saves)
            if reads is not None:
                reads.leaves.clear()  # a reference cycle
            if out is not total.returned:
                raise LongspanError(
                    f"{call.sliced.name} ({type(call.sliced.module).__name__}) changes the result of its output "
                    f"projection, so it cannot run in slices of its heads; use head_slices=1"
                )
            each.append([] if saves is None else saves.saved)
        ctx.call, ctx.source, ctx.shape = call, source, hidden.shape
        ctx.needs_grad = ctx.needs_input_grad[2:]
        ctx.state = ForwardState(hidden.device, draws=False)
        # A selective checkpoint holds what was saved. Otherwise autograd does: a full checkpoint then drops it.
        ctx.held = each if layer_call is not None else None
        tensors = [[saved.tensors() for saved in of_slice] for of_slice in each] if layer_call is None else []
        ctx.counts = [[len(x) for x in of_slice] for of_slice in tensors]
        ctx.save_for_backward(*([hidden] if source is None else []), *flatten_tree(tensors)[0])
        return total.finish()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        call, source, saved = ctx.call, ctx.source, list(ctx.saved_tensors)
        cut, weights = call.cut, call.weights()
        x = saved.pop(0) if source is None else source.saved.get()
        needs_grad, *of_weights = ctx.needs_grad
        trained = [
            name for (name, _), needs in zip(call.sliced.module.named_parameters(), of_weights, strict=True) if needs
        ]
        totals = {
            name: torch.zeros_like(weights[name], dtype=_wide(weights[name]) if cut.is_shared(name) else None)
            for name in trained
        }

        def add(number: int, name: str, gradient: Tensor) -> None:
            cut.add_part(totals[name], name, gradient, number)

        given = _Input(x, source, ctx.shape, needs_grad)
        for number in range(cut.count):
            saves = None
            if ctx.held is not None:
                saves = SliceCall(saved=ctx.held[number])
            elif ctx.counts[number]:
                saves = SliceCall(saved=[_Saved([saved.pop(0) for _ in range(n)]) for n in ctx.counts[number]])
            own = {name: cut.part(name, w, number) for name, w in weights.items()}
            own |= {name: own[name].detach().requires_grad_() for name in trained}
            with ctx.state.restored(), torch.enable_grad():
                found = _slice_gradients(call, number, given, own, trained, grad, saves)
            for each in [] if saves is None else saves.saved:
                each.release()
            for name, gradient in found.items():
                add(number, name, gradient)
            if number + 1 == cut.count or given.is_full():
                given.add_waiting(add)
        names = (name for name, _ in call.sliced.module.named_parameters())
        of_hidden = given.sum().view(ctx.shape) if needs_grad else None
        return None, None, of_hidden, *(totals[n].to(weights[n].dtype) if n in totals else None for n in names)


def _slice_gradients(
    call: _Call, number: int, given: _Input, own: dict[str, Tensor], trained: list[str], grad: Tensor, saves: Any
) -> dict[str, Tensor]:
    """Recompute a slice, give `given` its gradients of the input's projections, and return those of other weights."""
    reads = _Reads(given, own, call.sliced.readers)
    module = call.sliced.module.get_submodule(call.cut.last)
    last = getattr(module, "forward")  # noqa: B009 - of the instance
    if type(module) is nn.Linear or f"{call.cut.last}.weight" in call.cut.unpack:
        weight, bias = own[f"{call.cut.last}.weight"], own.get(f"{call.cut.last}.bias")

        def last(x: Tensor) -> Tensor:
            return _Last.apply(x, weight, bias)  # type: ignore[no-untyped-call, no-any-return]

    out = call.run(number, reads.stand_in(), own, last, saves)
    leaves = {name: own[name] for name in trained}
    inputs = [reads.anchor, *reads.leaves, *leaves.values()]
    found = list(without_torch_function(torch.autograd.grad, [out], inputs, [grad], allow_unused=True))
    del out, found[0]
    for _ in reads.leaves:
        given.add(found.pop(0))
    reads.leaves.clear()  # a reference cycle
    for weight, bias, gradient in reads.found:
        name = reads.names[id(weight)]
        key = name, call.cut.entries(name, number)
        given.add_later(key, _OfProjection(number, name, weight, bias, gradient))
    reads.found.clear()
    return {name: g for name, g in zip(leaves, found, strict=True) if g is not None}


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


class _Sum:
    """The sum of the slices' outputs.

    `returned`: what the output projection of the last slice returned, in place of the sum if that is not known yet.
    """

    def __init__(self, call: _Call, weights: dict[str, Tensor]) -> None:
        self.value: Tensor | None = None
        self.returned: Tensor | None = None
        self.path = call.cut.last
        self.module = call.sliced.module.get_submodule(self.path)
        self.plain = type(self.module) is nn.Linear or f"{self.path}.weight" in call.cut.unpack
        self.compute: Callable[[Tensor], Tensor] = self.module.forward
        self.waiting: list[tuple[Tensor, Tensor, Tensor | None]] = []  # input, weight and bias of several slices

    def adder(self, own: dict[str, Tensor]) -> Callable[[Tensor], Tensor]:
        """Return the output projection of a slice, which adds its output to the sum."""

        def add(x: Tensor) -> Tensor:
            if not self.plain:
                y = self.compute(x)
                self.value = self.returned = y if self.value is None else self.value.add_(y)
                return self.value
            weight = own[f"{self.path}.weight"]
            self.waiting.append((x, weight, own.get(f"{self.path}.bias")))
            if self.value is not None or sum(x.shape[-1] for x, *_ in self.waiting) >= len(weight):
                self._add_waiting()
            self.returned = _without_memory(x, len(weight))
            return self.returned

        return add

    def finish(self) -> Tensor:
        """Return the sum."""
        self._add_waiting()
        assert self.value is not None
        return self.value

    def _add_waiting(self) -> None:
        for x, weight, bias in self.waiting:
            if self.value is None:
                self.value = F.linear(x, weight, bias)
            elif self.value.dtype == x.dtype == weight.dtype:
                self.value.view(-1, self.value.shape[-1]).addmm_(x.reshape(-1, x.shape[-1]), weight.t())
            else:  # autocast
                self.value.add_(F.linear(x, weight))
        self.waiting.clear()


def _without_memory(x: Tensor, features: int) -> Tensor:
    """Return a tensor without memory in place of a linear layer's output."""
    return x.new_full((), float("nan")).expand(*x.shape[:-1], features)


class _Last(torch.autograd.Function):
    """An output projection without its output, which nothing reads."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bias = None if bias is None else bias.dtype
        return _without_memory(x, len(weight))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        grad = grad.reshape(-1, grad.shape[-1])
        cast = weight.to(grad.dtype)
        return (
            (grad @ cast).view(x.shape).to(x.dtype) if of_x else None,
            (grad.t() @ x.reshape(-1, x.shape[-1]).to(grad.dtype)).to(weight.dtype) if of_weight else None,
            grad.sum(0).to(ctx.bias) if of_bias else None,
        )


# ---------------------------------------------------------------------------------------------------------------------
# The module's input in the backward.


@dataclass
class _OfProjection:
    """The gradient of a projection of the module's input, `[T, O]`: that of a slice, or the sum of several."""

    number: int  # of a slice
    name: str  # of the weight
    weight: Tensor
    bias: Tensor | None
    gradient: Tensor


class _Input:
    """The module's input, from a saved tensor or a norm's input, and its gradient so far.

    `waiting`: gradients of projections of the input that the sum does not contain yet.
    """

    def __init__(self, saved: Tensor, source: InputSource | None, shape: torch.Size, needs_grad: bool) -> None:
        self.saved, self.source, self.shape = saved, source, shape
        self.count = 1 if source is None or source.norm is None else source.norm.count_tiles(saved)
        self.dtype = saved.dtype if source is None else source.dtype
        self.needs_grad = needs_grad
        self.gradient: Tensor | None = None
        self.waiting = dict[Any, _OfProjection]()  # by the entries of the weight

    def tiles(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield all tokens of the input, `[T, D]`, in tiles."""
        for span, tile in tiles_of(self.saved, self.count):
            with torch.no_grad():
                yield span, (tile if self.source is None else self.source.input_of(tile))[0]

    def whole(self) -> Tensor:
        """Return the input of all tokens."""
        return torch.cat([tile for _, tile in self.tiles()]).view(self.shape)

    def sum(self) -> Tensor:
        """Return the gradient so far, `[T, D]`."""
        if self.gradient is None:
            self.gradient = self.saved.new_zeros(self.shape[:-1].numel(), self.shape[-1], dtype=self.dtype)
        return self.gradient

    def add(self, gradient: Tensor | None) -> None:
        if gradient is not None and self.needs_grad:
            self.sum().add_(gradient.reshape(-1, self.shape[-1]))

    def add_later(self, entries: Any, found: _OfProjection) -> None:
        """Add a projection's gradient to that of an earlier slice with the same entries of the weight, or keep it."""
        earlier = self.waiting.setdefault(entries, found)
        if earlier is not found:
            earlier.gradient = earlier.gradient.to(_wide(found.gradient)) + found.gradient

    def is_full(self) -> bool:
        """Return whether what waits takes more memory than the sum will."""
        if not self.needs_grad or self.gradient is not None:
            return True
        return sum(x.gradient.nbytes for x in self.waiting.values()) > self.shape.numel() * self.dtype.itemsize

    def add_waiting(self, add: Callable[[int, str, Tensor], None]) -> None:
        """Add what waits to the input's gradient, and pass those of weights and biases to `add(slice, name, _)`."""
        waiting, sums = list(self.waiting.values()), dict[int, Tensor]()
        self.waiting.clear()
        for span, tile in self.tiles():
            for i, x in enumerate(waiting):
                grad = x.gradient[span].to(tile.dtype)
                if self.needs_grad:
                    self.sum()[span].addmm_(grad, x.weight.detach())
                if x.weight.requires_grad:
                    product = grad.t() @ tile
                    if i in sums:
                        sums[i] += product
                    else:
                        sums[i] = product.to(_wide(product)) if self.count > 1 else product
        for i, gradient in sums.items():
            add(waiting[i].number, waiting[i].name, gradient)
        for x in waiting:
            if x.bias is not None and x.bias.requires_grad:
                add(x.number, _bias_of(x.name), x.gradient.sum(0))


class _Reads:
    """The linear layers that read the module's input in one slice.

    The first one that is called computes all of them, tile by tile, so that each tile of the input is computed once. In
    the backward `_Input` computes their gradients together.
    """

    def __init__(self, given: _Input, own: dict[str, Tensor], readers: list[str]) -> None:
        self.given, self.own, self.readers = given, own, readers
        self.names = {id(x): name for name, x in own.items()}
        self.backward = given.needs_grad or any(x.requires_grad for x in own.values())
        self.anchor = torch.empty(0, device=given.saved.device, requires_grad=self.backward)
        self.leaves: list[Tensor] = []  # the stand-in, and the whole input if a function read it
        self.made: dict[str, Tensor] = {}  # outputs that no layer has returned yet
        self.found: list[tuple[Tensor, Tensor | None, Tensor]] = []  # weight, bias, and the output's gradient

    def stand_in(self) -> Tensor:
        """Return a tensor without memory in place of the input; linear layers that read it call `linear`."""
        given = self.given
        x: _StandIn = _StandIn.like(given.saved, given.shape, given.dtype, requires_grad=self.backward)
        x.reads = self
        self.leaves.append(x)
        return x

    def whole(self) -> Tensor:
        """Return the whole input, for a function that is not a linear layer."""
        if len(self.leaves) == 1:
            self.leaves.append(self.given.whole().requires_grad_(self.backward))
        return self.leaves[1]

    def linear(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the output of a linear layer for the input."""
        name = self.names.get(id(weight))
        if name is None:
            return F.linear(self.whole(), weight, bias)
        if name not in self.readers:
            self.readers.append(name)
        if name not in self.made:
            self._compute([name] if self.made or self.readers[0] != name else self.readers)
        return _Read.apply(self.anchor, self, [self.made.pop(name)], weight, bias)  # type: ignore[no-untyped-call, no-any-return]

    def _compute(self, names: list[str]) -> None:
        for name in names:
            weight = self.own[name]
            self.made[name] = weight.new_empty(self.given.shape[:-1].numel(), len(weight))
        for span, tile in self.given.tiles():
            for name in names:
                weight, bias = self.own[name].detach(), self.own.get(_bias_of(name))
                into = self.made[name][span]
                if bias is None:
                    torch.mm(tile, weight.t(), out=into)
                else:
                    torch.addmm(bias.detach(), tile, weight.t(), out=into)


def _bias_of(name: str) -> str:
    return f"{name.rpartition('.')[0]}.bias"


class _StandIn(Uncomputed):
    """Stands for the module's input. Linear layers that read it call `_Reads.linear`."""

    reads: _Reads

    def whole(self) -> Tensor:
        return self.reads.whole()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and not kwargs and isinstance(args[0], cls):
            x, weight, bias = (*args, None)[:3]
            if weight.dtype == x.dtype and not is_autocast_on(weight.device):
                return x.reads.linear(weight, bias)
        return super().__torch_function__(func, types, args, kwargs)


class _Read(torch.autograd.Function):
    """The output of a linear layer of the module's input; its gradients are computed later, by `_Input`."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, reads: _Reads, made: list[Tensor], weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        ctx.reads, ctx.weight, ctx.bias = reads, weight, bias
        return made.pop().view(*reads.given.shape[:-1], -1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        ctx.reads.found.append((ctx.weight, ctx.bias, grad.reshape(-1, grad.shape[-1])))
        return None, None, None, None, None
