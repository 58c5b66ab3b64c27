"""Modules that work through their tokens tile by tile, forward and backward: an MLP, a norm.

What such a module computes of a token depends on that token alone, so its intermediates (of an MLP several times as
wide as hidden states) need exist for one tile at a time. The forward keeps the input alone; the backward computes each
tile again, with its gradients, and adds up those of the weights, in fp32 at least. So weights are gathered once (by
FSDP, with their layer), and each has one gradient, whatever the number of tiles (as ALST's TiledMLP, arXiv:2506.13996).

The input is saved by a node of its own before the module runs: where a checkpointed layer is computed again, torch
stops as soon as what the backward needs is there, and that is before a layer's last MLP, which then runs once less.
What a norm gives is not saved either where a tiled MLP or a linear layer takes it in: they make it again from the
norm's input (`NormedLinear`), which is saved for the norm anyway. A tiled MLP's backward goes on through its norm tile
by tile (`_Through`).

Shape suffixes: T tokens, D hidden size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from longspan.comm.sharded_weights import seeing_local, trained_parameters
from longspan.compat.torch_api import not_compiled, waits_for_gradient
from longspan.core.errors import LongspanError
from longspan.losses.deferred_logits import Bare
from longspan.memory.activations import Kept

_PROBED = 4  # tokens with which a module is asked whether its tokens are independent


class Tiled:
    """A module whose calls go tile by tile, in the place of its `forward`.

    Args:
        module: called with hidden states `[B, L, ...]` alone, and gives a tensor, or several, each with the tokens in
            the same dimensions, or in one.
        name: of the module, for errors.
        rows: from the number of tokens and whether they are on a CPU: tokens of a tile.
        draws: whether it draws random numbers.
        light: whether its output is sooner computed again than saved, as a norm's.

    Attributes:
        on: whether calls go tile by tile; else the module runs as it is.
        routers: the routers within it.
        keeps_routing: whether the routers' logits of all tokens are saved, for the router loss.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        rows: Callable[[int, bool], int],
        *,
        draws: bool = False,
        light: bool = False,
    ) -> None:
        self.module, self.name, self.rows, self.draws, self.light = module, name, rows, draws, light
        self.compute: Callable[..., Any] = seeing_local(module, module.forward)
        self.bare = Bare(module, self.compute)
        self.probed, self.on, self.keeps_routing = False, True, False
        self.routers = [
            Router(child) for child in module.modules() if "Router" in type(child).__name__ and child is not module
        ]
        self._tiled, self._alone = not_compiled(self._by_tiles), not_compiled(self._forward_alone)  # graphs break here
        module.forward = self._forward  # the instance's: hooks around the call stay

    def trained(self) -> dict[str, Tensor]:
        """Parameters that gradients are asked for, by name, as they are now: gathered, under FSDP."""
        return trained_parameters(self.bare)

    def compute_with(self, hidden: Tensor, parameters: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """The module's outputs for a tile, with other tensors for some parameters."""
        routers = self.routers if self.keeps_routing else []
        for router in routers:
            router.taken = []
        try:
            out = torch.func.functional_call(self.bare, parameters, (hidden,)) if parameters else self.compute(hidden)
            logits = [x for router in routers for x in router.take(self.name)]
        finally:
            for router in routers:
                router.taken = None
        return (*(out if isinstance(out, tuple) else (out,)), *logits)

    def _given(self, outs: Sequence[Tensor], hidden: Tensor) -> Any:
        """Return the module's own output, and pass the logits of all tokens to each router's hooks."""
        if self.keeps_routing and self.routers:
            outs, logits = outs[: -len(self.routers)], outs[-len(self.routers) :]
            for router, x in zip(self.routers, logits, strict=True):
                router.give(x, hidden)
        return outs[0] if len(outs) == 1 else tuple(outs)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.on or kwargs or len(args) != 1:
            return self.compute(*args, **kwargs)
        return self._tiled(args[0]) if torch.is_grad_enabled() else self._alone(args[0])

    def _forward_alone(self, hidden: Tensor) -> Any:
        """Without gradients nothing is kept, but intermediates of all tokens would exist at once."""
        if _count(hidden) <= self.rows(_count(hidden), hidden.is_cpu):
            return self.compute(hidden)
        if not self.probed:
            self._probe(hidden)
        return self._given(_by_tiles(self, hidden), hidden)

    def _by_tiles(self, hidden: Tensor) -> Any:
        if not self.probed:
            self._probe(hidden)
        parameters = self.trained()
        if not hidden.requires_grad and not parameters:
            return self.compute(hidden)
        source, held = Source.of(hidden), hidden
        before = None if source is None or self.light else _input_of_norm(hidden)
        if before is not None:
            assert source is not None and source.norm is not None
            both = _Through(source.norm, self)
            saved = Source(source.held, None, before.dtype)
            outs = _TiledCall.apply(both, saved, before, hidden, *both.trained().values())  # type: ignore[no-untyped-call]
            return self._given(outs, hidden)
        if source is None and hidden.requires_grad:
            held = _Input.apply(hidden)  # type: ignore[no-untyped-call]
            source = Source(_Held(held.grad_fn), None, hidden.dtype)
        outs = _TiledCall.apply(self, source, held, None, *parameters.values())  # type: ignore[no-untyped-call]
        if self.light and source is not None:
            setattr(outs[0], _INPUT, held)
        return self._given(outs, hidden)

    def _probe(self, hidden: Tensor) -> None:
        """Refuse a module in which tokens are not independent; the same tokens on every rank."""
        self.probed = True
        if self.draws:
            return  # what it computes of a token is drawn
        drawn = torch.randn(1, _PROBED, *hidden.shape[2:], generator=torch.Generator().manual_seed(0))
        x = drawn.to(hidden.device, hidden.dtype)
        with torch.no_grad():
            together, alone = (self.compute_with(part, {}) for part in (x, x[:, : _PROBED // 2]))
        for a, b in zip(together, alone, strict=True):
            a = _tokens_first(a, _PROBED)[: _PROBED // 2]
            b = _tokens_first(b, _PROBED // 2)
            if not torch.allclose(a.float(), b.float(), rtol=0.05, atol=0.05 * float(a.abs().max())):
                raise LongspanError(
                    f"{self.name} ({type(self.module).__name__}) computes something else of a token when fewer "
                    f"tokens are beside it, so it cannot run tile by tile; use tiled_mlp=1"
                )


class Router:
    """Take a router's logits from each tile, and pass those of all tokens once to the hooks that record its output.

    transformers records the first output of a router by a hook on its call. Within a tile nothing is recorded.

    Args:
        module: the router; it returns a tuple, the logits first.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.compute: Callable[..., Any] = module.forward
        self.taken: list[Tensor] | None = None  # within a tile: its logits
        self.given: Tensor | None = None  # the logits of all tokens
        module.forward = self._forward

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.given is not None:
            return self.given, None, None
        out = self.compute(*args, **kwargs)
        if self.taken is None or not isinstance(out, tuple):
            return out
        self.taken.append(out[0])
        return None, *out[1:]

    def take(self, name: str) -> list[Tensor]:
        """Return the logits of the tile that was computed.

        Raises:
            LongspanError: for a router that does not return them.
        """
        found, self.taken = self.taken or [], None
        if len(found) != 1:
            raise LongspanError(
                f"the router {type(self.module).__name__} of {name} does not return its logits first, so tiles "
                f"cannot save them; use tiled_mlp=1, or output_router_logits=False"
            )
        return found

    def give(self, logits: Tensor, hidden: Tensor) -> None:
        """Call the router's hooks with the logits of all tokens."""
        self.given = logits
        try:
            self.module(hidden)
        finally:
            self.given = None


class _Through:
    """A norm and the tiled module that takes in what it gives, as one, for a backward that goes through both tile by
    tile: the gradient between them never exists of all tokens.

    Args:
        norm: the norm.
        tiled: the module.
    """

    def __init__(self, norm: Tiled, tiled: Tiled) -> None:
        self.norm, self.tiled = norm, tiled
        self.rows, self.draws = tiled.rows, tiled.draws

    def trained(self) -> dict[str, Tensor]:
        """As `Tiled.trained`, of both."""
        of_norm, of_module = self.norm.trained(), self.tiled.trained()
        return {f"0.{name}": p for name, p in of_norm.items()} | {f"1.{name}": p for name, p in of_module.items()}

    def compute_with(self, hidden: Tensor, parameters: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """As `Tiled.compute_with`, of a tile of the norm's input."""
        of_norm, of_module = (
            {name[2:]: p for name, p in parameters.items() if name.startswith(which)} for which in ("0.", "1.")
        )
        return self.tiled.compute_with(self.norm.compute_with(hidden, of_norm)[0], of_module)


_INPUT = "longspan_norm_input"
"""Name under which a norm's output, while it is there, has the input that the norm took in, with its gradient."""


def _input_of_norm(normed: Tensor) -> Tensor | None:
    """What the norm that made `normed` took in; None where that is not known, or its gradient is waited for."""
    before: Tensor | None = getattr(normed, _INPUT, None)
    return None if before is None or not before.requires_grad or waits_for_gradient(normed) else before


class _Held:
    """A tensor that a node saves, for several who need it: a checkpoint lets it be taken once in a backward."""

    def __init__(self, saved_by: Any) -> None:
        self.saved_by = saved_by
        self.here: Tensor | None = None
        self.normed: Tensor | None = None  # what the norm made of it, for the linear layers that take it in

    def get(self) -> Tensor:
        if self.here is None:
            (self.here,) = self.saved_by.saved_tensors
        return self.here

    def drop(self) -> None:
        """All have used it. (A second backward, of a graph that was retained, takes it again.)"""
        self.here = self.normed = None


class Source:
    """Where a tiled module's input is found in the backward.

    Args:
        held: a tensor that is saved.
        norm: makes the input of that tensor; None: it is the input.
        dtype: of the input.
    """

    def __init__(self, held: _Held, norm: Tiled | None, dtype: torch.dtype) -> None:
        self.held, self.norm, self.dtype = held, norm, dtype

    @classmethod
    def of(cls, x: Tensor) -> Source | None:
        """The norm that has made `x`, and can again; None where `x` must be saved."""
        tiled = getattr(x.grad_fn, "tiled", None)
        if not (isinstance(tiled, Tiled) and tiled.light):
            return None
        saved: Source | None = x.grad_fn.source  # type: ignore[union-attr]
        return None if saved is None or saved.norm is not None else cls(saved.held, tiled, x.dtype)

    def input_of(self, tile: Tensor) -> Tensor:
        """The input, of some tokens of what is saved."""
        return tile if self.norm is None else self.norm.compute_with(tile, {})[0]

    def whole(self) -> Tensor:
        """What the norm gives of all tokens, tile by tile; no gradients."""
        assert self.norm is not None
        if self.held.normed is None:
            with torch.no_grad():
                (self.held.normed,) = _by_tiles(self.norm, self.held.get())
        return self.held.normed


class NormedLinear:
    """A linear layer that does not save what a norm has given to it, in the place of its `forward`.

    Args:
        module: the layer.

    Attributes:
        on: whether it does; else the module runs as it is.
    """

    def __init__(self, module: nn.Linear) -> None:
        self.compute: Callable[..., Any] = module.forward
        self.on = True
        self._normed = not_compiled(self._without_input)  # a compiler breaks its graph here
        module.forward = self._forward  # type: ignore[method-assign]

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._normed(*args, **kwargs) if self.on else self.compute(*args, **kwargs)

    def _without_input(self, *args: Any, **kwargs: Any) -> Any:
        source = None if kwargs or len(args) != 1 else _taken(args[0])
        if source is None:
            return self.compute(*args, **kwargs)
        given = args[0].untyped_storage().data_ptr(), args[0].numel()  # the hook lives on: it must not hold the tensor

        def pack(x: Tensor) -> Any:
            return (source, x.shape) if (x.untyped_storage().data_ptr(), x.numel()) == given else Kept(x)

        with torch.autograd.graph.saved_tensors_hooks(pack, _given_again):
            return self.compute(*args)


def _taken(x: Any) -> Source | None:
    if not (isinstance(x, Tensor) and torch.is_grad_enabled()) or torch.is_autocast_enabled(x.device.type):
        return None  # autocast saves copies, which would be kept beside
    return Source.of(x)


def _given_again(packed: Any) -> Tensor:
    if isinstance(packed, Kept):
        return packed.get()
    source, shape = packed
    return source.whole().view(shape)  # type: ignore[no-any-return]


class _Input(torch.autograd.Function):
    """Saves a tiled module's input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class _TiledCall(torch.autograd.Function):
    """All tiles, forward; and backward, each computed again.

    Of a norm and what takes it in (`_Through`), `hidden` is the norm's input and `normed` what it has given. That has
    no gradient from here, but its edge stays: the norm's node, behind all who took it in, lets the input go.
    """

    @staticmethod
    def forward(
        ctx: Any,
        tiled: Tiled | _Through,
        source: Source | None,
        hidden: Tensor,
        normed: Tensor | None,
        *parameters: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.tiled, ctx.source, ctx.through = tiled, source, normed is not None
        ctx.set_materialize_grads(False)
        if source is None:
            ctx.save_for_backward(hidden)
        of_hidden, _, *of_parameters = ctx.needs_input_grad[2:]
        ctx.asked = of_hidden, *of_parameters
        ctx.random = _random_state(hidden.device) if tiled.draws else None
        ctx.autocast = _autocast_of(hidden.device)
        ctx.keeps_routing = (tiled.tiled if isinstance(tiled, _Through) else tiled).keeps_routing
        outs = (
            _by_tiles(tiled.tiled, normed)
            if isinstance(tiled, _Through) and normed is not None
            else _by_tiles(tiled, hidden)
        )
        ctx.mark_non_differentiable(*(x for x in outs if not x.is_floating_point()))
        return tuple(outs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        tiled: Tiled | _Through = ctx.tiled
        source: Source | None = ctx.source
        last = source is not None and source.norm is None and not ctx.through
        if all(g is None for g in grads):
            if source is not None and last:
                source.held.drop()
            return None, None, None, None, *(None for _ in ctx.asked[1:])
        (hidden,) = ctx.saved_tensors if source is None else (source.held.get(),)
        of_hidden, *of_parameters = ctx.asked
        trained = tiled.trained()
        # Stand-ins: hooks on the parameters themselves count a gradient as that of the whole backward.
        wanted = {
            name: p.detach().requires_grad_()
            for (name, p), asked in zip(trained.items(), of_parameters, strict=True)
            if asked
        }
        grads = tuple(None if g is None else g.contiguous() for g in grads)  # cut below: one copy, not one a tile
        # As in this forward: another one may have run since.
        (tiled.tiled if isinstance(tiled, _Through) else tiled).keeps_routing = ctx.keeps_routing
        dtype = hidden.dtype if source is None else source.dtype
        grad_hidden = (
            torch.empty_like(hidden, dtype=dtype, memory_format=torch.contiguous_format) if of_hidden else None
        )
        sums: dict[str, Tensor] = {}
        with _as_then(ctx.random, hidden.device), torch.enable_grad(), ctx.autocast():
            for part, tile in _tiles(tiled, hidden):
                with torch.no_grad():
                    x = tile if source is None else source.input_of(tile)
                x = x.detach().requires_grad_(of_hidden)
                made = tiled.compute_with(x, wanted)
                pairs = [
                    (y, _at(g, hidden, part).reshape(y.shape))
                    for y, g in zip(made, grads, strict=True)
                    if g is not None and y.requires_grad
                ]
                inputs = [*([x] if of_hidden else []), *wanted.values()]
                found = list(
                    torch.autograd.grad([y for y, _ in pairs], inputs, [g for _, g in pairs], allow_unused=True)
                )
                del made, pairs
                if grad_hidden is not None:
                    mine = found.pop(0)
                    into = _at(grad_hidden, hidden, part)
                    _ = into.zero_() if mine is None else into.copy_(mine.reshape(into.shape))
                for name, more in zip(wanted, found, strict=True):
                    _add(sums, name, more, several=tile.shape[1] < _count(hidden))
        if source is not None and last:  # those that took in what this module gave were before it
            source.held.drop()
        given = (
            sums[name].to(p.dtype) if name in sums else torch.zeros_like(p) if name in wanted else None
            for name, p in trained.items()
        )
        return None, None, grad_hidden, None, *given


def _by_tiles(tiled: Tiled | _Through, hidden: Tensor) -> list[Tensor]:
    """All outputs of a module, of all tokens."""
    outs: list[Tensor] = []
    for part, tile in _tiles(tiled, hidden):
        made = tiled.compute_with(tile, {})
        outs = outs or [_whole(x, tile, hidden) for x in made]
        for whole, x in zip(outs, made, strict=True):
            _at(whole, hidden, part).copy_(_tokens_first(x, tile.shape[1]))
    return outs


def _add(sums: dict[str, Tensor], name: str, more: Tensor | None, *, several: bool) -> None:
    """Add a tile's part of a weight's gradient, in fp32 at least where there are several."""
    if more is None:
        return
    if name in sums:
        sums[name] += more
    elif several:
        wide = torch.promote_types(more.dtype, torch.float32)
        # The first part may be a view of something that a tile has for itself, or expanded.
        sums[name] = more.to(wide, copy=True) if more.dtype != wide or not more.is_contiguous() else more
    else:
        sums[name] = more


def _count(hidden: Tensor) -> int:
    return hidden.shape[:2].numel()


def _tiles(tiled: Tiled | _Through, hidden: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Tiles `[1, rows, ...]` of all tokens of the batch, and where they are."""
    flat = hidden.reshape(1, _count(hidden), *hidden.shape[2:])
    rows = max(1, tiled.rows(_count(hidden), hidden.is_cpu))
    for start in range(0, max(1, _count(hidden)), rows):
        part = slice(start, start + rows)
        yield part, flat[:, part]


def _whole(x: Tensor, tile: Tensor, hidden: Tensor) -> Tensor:
    """Room for an output of all tokens, from that of a tile: `[1, rows, ...]` or `[rows, ...]`."""
    batched = x.dim() > 1 and x.shape[0] == 1 and x.shape[1] == tile.shape[1]
    leading = hidden.shape[:2] if batched else (_count(hidden),)
    return x.new_empty(*leading, *x.shape[2 if batched else 1 :])


def _tokens_first(x: Tensor, rows: int) -> Tensor:
    """`[rows, ...]` of an output `[1, rows, ...]` or `[rows, ...]`."""
    if x.dim() > 1 and x.shape[0] == 1 and x.shape[1] == rows:
        return x[0]
    if x.shape[0] == rows:
        return x
    raise LongspanError(
        f"a module that runs tile by tile gave a tensor of shape {tuple(x.shape)} for {rows} tokens; use tiled_mlp=1"
    )


def _at(whole: Tensor, hidden: Tensor, part: slice) -> Tensor:
    """Some tokens of a tensor of all of them, `[B, L, ...]` or `[B * L, ...]`."""
    batched = whole.shape[:2] == hidden.shape[:2]
    return (whole.reshape(-1, *whole.shape[2:]) if batched else whole)[part]


def _random_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    on_device = torch.get_device_module(device).get_rng_state(device) if device.type != "cpu" else None
    return torch.get_rng_state(), on_device


@contextlib.contextmanager
def _as_then(state: tuple[Tensor, Tensor | None] | None, device: torch.device) -> Iterator[None]:
    """Random numbers as they were drawn in the forward."""
    if state is None:
        yield
        return
    devices = [] if state[1] is None else [device]
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        torch.set_rng_state(state[0])
        if state[1] is not None:
            torch.get_device_module(device).set_rng_state(state[1], device)
        yield


def _autocast_of(device: torch.device) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """Autocast as it is now, for the backward, which knows nothing of it."""
    kind = device.type
    if not torch.amp.is_autocast_available(kind):
        return contextlib.nullcontext
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    return lambda: torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False)
