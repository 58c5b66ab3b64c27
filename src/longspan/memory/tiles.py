"""Run a module tile by tile over its tokens, forward and backward: an MLP, a norm.

Such a module computes each token independently, so its intermediates (in an MLP several times as wide as the hidden
states) need exist for one tile at a time. The forward saves only the input. The backward recomputes each tile and its
gradients, and adds up those of the weights in fp32 or wider. So FSDP gathers the weights once, with their layer, and
each weight has one gradient, whatever the number of tiles (as ALST's TiledMLP, arXiv:2506.13996).

Three details save more:

- A node of its own saves the input before the module runs. When a checkpointed layer is recomputed, torch stops as soon
  as it has what the backward needs, which is before the layer's last MLP: that MLP runs once less.
- The output of a norm is not saved for the tiled MLP or linear layer that reads it: they recompute it from the norm's
  input, which is saved anyway (`InputSource`).
- The backward of a tiled MLP continues through its norm tile by tile (`_NormThenModule`).
- The output of a norm whose readers run tile by tile (tiled MLPs, slices of heads) is never computed whole
  (`Uncomputed`). The first forward finds these norms.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from longspan.comm.tensor import BareModule
from longspan.compat.torch_api import (
    TENSOR_FACTS,
    as_subclass,
    flatten_tree,
    has_forward_hooks,
    not_compiled,
    version_of,
    waits_for_gradient,
    without_torch_function,
)
from longspan.core.errors import LongspanError
from longspan.losses.tile_gradients import TileGradients, autocast_state

_CHECKED_TOKENS = 4


class TiledExperts(Protocol):
    """Experts of a tiled module that may be on other ranks: the ranks plan all tiles together."""

    def routes(self, run: Callable[[Tensor], Any], tiles: Sequence[Tensor]) -> Sequence[Any]:
        """Return where each tile's rows go, also in its recomputation. `run` computes a tile. Collective.

        There are more than `tiles` if another rank has more: the last tiles are empty.
        """
        ...

    def along(self, route: Any) -> contextlib.AbstractContextManager[None]:
        """Send rows along one of `routes` in this context."""
        ...

    def unsaved(self) -> contextlib.AbstractContextManager[None]:
        """Save no route for a recomputation in this context."""
        ...


class Tiled:
    """Replaces a module's `forward` by one that goes tile by tile, if it is `on`.

    Args:
        module: called with hidden states `[B, L, ...]`, or `[B * L, dim]`, alone. Returns a tensor, or several, each
            with the tokens in the same two dimensions, or in one.
        name: of the module, for errors.
        rows: returns the tokens of a tile from the number of tokens and whether they are on a CPU.
        draws: whether the module draws random numbers.
        cheap: whether its output is recomputed rather than saved, as a norm's.
        experts: the module's experts, which may be on other ranks.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        rows: Callable[[int, bool], int],
        *,
        draws: bool = False,
        cheap: bool = False,
        experts: TiledExperts | None = None,
    ) -> None:
        self.module, self.name, self.draws, self.cheap = module, name, draws, cheap
        self._rows, self.experts = rows, experts
        self.bare = BareModule(module)
        self.compute, self.trained = self.bare.forward, self.bare.trained
        self.checked, self.on = False, True
        # Of a norm: whether all readers of its output run tile by tile, so it is not computed whole; None: not known.
        self.uncomputed: bool | None = None
        self.out_dtypes = dict[Any, torch.dtype]()  # of a norm's output, by what decides it (`_dtypes`)
        self.saves_router_logits = False  # those of the routers within it, of all tokens, for the router loss
        self.routers = [
            TiledRouter(child) for child in module.modules() if "Router" in type(child).__name__ and child is not module
        ]
        # A compiler breaks its graph at these.
        self._with_grad, self._without_grad = not_compiled(self._forward_with_grad), not_compiled(self._forward_no_grad)
        module.forward = self._forward  # on the instance, so that hooks around `__call__` still run

    def count_tiles(self, hidden: Tensor) -> int:
        """Return the number of tiles of an input."""
        tokens = _count(hidden)
        return -(-max(1, tokens) // max(1, self._rows(tokens, hidden.is_cpu)))

    def plan(self, hidden: Tensor, run: Tiled | _NormThenModule | None = None) -> TilePlan:
        """Return how the input of `run`, this module by default, is cut; collective if experts are on other ranks."""
        count, computes = self.count_tiles(hidden), run or self
        if self.experts is None:
            return TilePlan(count, [None] * count)
        tiles = [tile for _, tile in tiles_of(hidden, count)]
        return TilePlan(count, self.experts.routes(lambda tile: computes.compute_with(tile, {}), tiles))

    def along(self, route: Any) -> contextlib.AbstractContextManager[None]:
        """Send rows to experts along a tile's route in this context."""
        return contextlib.nullcontext() if self.experts is None or route is None else self.experts.along(route)

    def compute_with(self, hidden: Tensor, parameters: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """Return the module's outputs for a tile, with these parameters, then its routers' logits if they are saved."""
        routers = self.routers if self.saves_router_logits else []
        for router in routers:
            router.recorded = []
        try:
            out = self.bare.compute(hidden, parameters)
            logits = [router.take(self.name) for router in routers]
        finally:
            for router in routers:
                router.recorded = None
        return (*(out if isinstance(out, tuple) else (out,)), *logits)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.on or kwargs or len(args) != 1:
            return self.compute(*args, **kwargs)
        (hidden,) = args
        if hidden.dim() == 2:  # an OPT layer flattens its hidden states
            out = self._forward(hidden := hidden[None])
            found = [_at(x, hidden, slice(None)) for x in (out if isinstance(out, tuple) else [out])]
            return tuple(found) if isinstance(out, tuple) else found[0]
        return self._with_grad(hidden) if torch.is_grad_enabled() else self._without_grad(hidden)

    def _forward_no_grad(self, hidden: Tensor) -> Any:
        plan = self.plan(hidden)
        if len(plan.routes) == 1:
            with self.along(plan.routes[0]):
                return self.compute(hidden)
        self._check_independence(hidden)
        note_tile_reader(hidden)
        return self._result(self._mark_output(_run_tiles(self, hidden, plan), hidden), hidden)

    def _mark_output(self, outs: Sequence[Tensor], hidden: Tensor) -> Sequence[Tensor]:
        """Return `outs`, with the norm as an attribute if they are a norm's output: `note_tile_reader` reads it."""
        if self.cheap and outs[0].shape == hidden.shape:
            self.out_dtypes[self._dtypes(hidden)] = outs[0].dtype
            setattr(outs[0], _NORM, self)
        return outs

    def _forward_with_grad(self, hidden: Tensor) -> Any:
        self._check_independence(hidden)
        hidden = or_computed(hidden)
        parameters = self.trained()
        if not hidden.requires_grad and not parameters:
            return self.compute(hidden)
        source, saved = InputSource.of(hidden), hidden
        norm_input = None if source is None or self.cheap else _input_of_norm(hidden)
        if norm_input is None and isinstance(hidden, Uncomputed):
            saved = hidden = hidden.whole()
        note_tile_reader(hidden)
        if norm_input is not None:
            assert source is not None and source.norm is not None
            both = _NormThenModule(source.norm, self)
            source = InputSource(source.saved, None, norm_input.dtype)
            outs = _TiledCall.apply(both, source, norm_input, hidden, *both.trained().values())  # type: ignore[no-untyped-call]
            return self._result(outs, hidden)
        if source is None and hidden.requires_grad:
            saved = _SaveInput.apply(hidden)  # type: ignore[no-untyped-call]
            source = InputSource(_SavedInput(saved.grad_fn), None, hidden.dtype)
        dtype = self._dtype_if_uncomputed(hidden) if self.cheap and source is not None else None
        outs = _TiledCall.apply(self, source, saved, dtype, *parameters.values())  # type: ignore[no-untyped-call]
        if self.cheap and source is not None:
            setattr(outs[0], _NORM_INPUT, saved)
            if dtype is None:
                self._mark_output(outs, hidden)
            else:
                outs[0].made_by = self
        return self._result(outs, hidden)

    def _dtype_if_uncomputed(self, hidden: Tensor) -> torch.dtype | None:
        """Return the dtype of a norm's output that is not to be computed whole; None if it is."""
        if not self.uncomputed or has_forward_hooks(self.module) or self.count_tiles(hidden) == 1:
            return None
        return self.out_dtypes.get(self._dtypes(hidden))

    def _dtypes(self, hidden: Tensor) -> tuple[Any, ...]:
        """Return the dtypes of input, weights and autocast."""
        device = hidden.device
        autocast = torch.get_autocast_dtype(device.type) if is_autocast_on(device) else None
        return hidden.dtype, autocast, *(p.dtype for p in self.module.parameters())

    def _result(self, outs: Sequence[Tensor], hidden: Tensor) -> Any:
        """Return the module's own output, and show the logits of all tokens to each router's hooks."""
        if self.saves_router_logits and self.routers:
            outs, logits = outs[: -len(self.routers)], outs[-len(self.routers) :]
            for router, x in zip(self.routers, logits, strict=True):
                router.show(x, hidden)
        return outs[0] if len(outs) == 1 else tuple(outs)

    def _check_independence(self, hidden: Tensor) -> None:
        """Raise on the first call if the module does not compute tokens independently; same tokens on every rank."""
        if self.checked or self.draws:  # random outputs cannot be compared
            return
        self.checked = True
        drawn = torch.randn(1, _CHECKED_TOKENS, *hidden.shape[2:], generator=torch.Generator().manual_seed(0))
        x, half = drawn.to(hidden.device, hidden.dtype), _CHECKED_TOKENS // 2
        unsaved = contextlib.nullcontext() if self.experts is None else self.experts.unsaved()
        with torch.no_grad(), unsaved:
            all_outs, half_outs = (self.compute_with(tokens, {}) for tokens in (x, x[:, :half]))
        for a, b in zip(all_outs, half_outs, strict=True):
            a, b = _tokens_first(a, _CHECKED_TOKENS)[:half], _tokens_first(b, half)
            if not torch.allclose(a.float(), b.float(), rtol=0.05, atol=0.05 * float(a.abs().max())):
                raise LongspanError(
                    f"{self.name} ({type(self.module).__name__}) computes a token differently when fewer tokens are "
                    f"in the batch, so it cannot run tile by tile; use tiled=False"
                )


class TiledRouter:
    """Records a router's logits of each tile, and shows those of all tokens to the router's hooks once.

    The router returns a tuple, the logits first. transformers records them by a hook on its call. Within a tile the
    hook sees None.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.compute: Callable[..., Any] = module.forward
        self.recorded: list[Tensor] | None = None  # a list within a tile
        self.all_logits: Tensor | None = None
        module.forward = self._forward

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.all_logits is not None:
            return self.all_logits, None, None
        out = self.compute(*args, **kwargs)
        if self.recorded is None or not isinstance(out, tuple):
            return out
        self.recorded.append(out[0])
        return None, *out[1:]

    def take(self, name: str) -> Tensor:
        """Return the logits of the tile that was computed."""
        recorded, self.recorded = self.recorded or [], None
        if len(recorded) != 1:
            raise LongspanError(
                f"the router {type(self.module).__name__} of {name} does not return its logits first, so tiles "
                f"cannot save them; use tiled=False, or output_router_logits=False"
            )
        return recorded[0]

    def show(self, logits: Tensor, hidden: Tensor) -> None:
        """Call the router's hooks with the logits of all tokens."""
        self.all_logits = logits
        try:
            self.module(hidden)
        finally:
            self.all_logits = None


# ---------------------------------------------------------------------------------------------------------------------
# Norms whose output is recomputed.


class _NormThenModule:
    """A norm and the tiled module that reads it, for a backward through both tile by tile: the gradient between them
    exists for one tile at a time.
    """

    def __init__(self, norm: Tiled, module: Tiled) -> None:
        self.norm, self.module = norm, module
        self.draws = module.draws

    def trained(self) -> dict[str, Tensor]:
        """See `Tiled.trained`; the norm's first."""
        of_norm, of_module = self.norm.trained(), self.module.trained()
        return {f"0.{name}": p for name, p in of_norm.items()} | {f"1.{name}": p for name, p in of_module.items()}

    def compute_with(self, hidden: Tensor, parameters: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """See `Tiled.compute_with`; `hidden` is a tile of the norm's input."""
        of_norm, of_module = (
            {name[2:]: p for name, p in parameters.items() if name.startswith(prefix)} for prefix in ("0.", "1.")
        )
        return self.module.compute_with(self.norm.compute_with(hidden, of_norm)[0], of_module)


_NORM_INPUT = "longspan_norm_input"
"""Attribute of a norm's output: the norm's input, with its gradient."""

_NORM = "longspan_norm"
"""Attribute of a norm's whole output: the norm."""


class Uncomputed(Tensor):
    """Stand for a norm's output that exists only tile by tile. Functions of torch get the whole tensor."""

    made_by: Tiled  # the norm
    computed: Tensor | None = None  # the whole tensor, if a function got it

    @classmethod
    def like(cls, x: Tensor, shape: torch.Size, dtype: torch.dtype, *, requires_grad: bool) -> Any:
        """Return a stand-in on the device of `x`. Its values are NaN, so that reading them by mistake shows."""
        nothing = x.new_full((), float("nan"), dtype=dtype).expand(shape)
        return as_subclass(cls, nothing, requires_grad)

    @property
    def norm_input(self) -> Tensor:
        found: Tensor = getattr(self, _NORM_INPUT)
        return found

    def whole(self) -> Tensor:
        """Compute the tensor. From now on the norm computes its whole output, because a reader needs it."""
        if self.computed is None:
            self.made_by.uncomputed = False
            with torch.enable_grad():  # later readers may need its gradient
                self.computed = _Whole.apply(self)  # type: ignore[no-untyped-call]
        assert self.computed is not None
        return self.computed

    def compute(self) -> Tensor:
        """Return the values of `whole`."""
        with torch.no_grad():
            (out,) = _run_tiles(self.made_by, self.norm_input, self.made_by.plan(self.norm_input))
        return out

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in TENSOR_FACTS:
            return without_torch_function(func, *args, **kwargs or {})
        leaves, rebuilt = flatten_tree((args, kwargs or {}))
        args, kwargs = rebuilt([x.whole() if isinstance(x, Uncomputed) else x for x in leaves])
        return func(*args, **kwargs)


class _Whole(torch.autograd.Function):
    """Compute a norm's output after the norm has returned a stand-in, which gets the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Uncomputed) -> Tensor:
        node: Any = x.grad_fn
        out = x.compute()
        ctx.tiled, ctx.source, ctx.version = node.tiled, node.source, version_of(out)  # for `InputSource.of`
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def or_computed(x: Tensor) -> Tensor:
    """Return `x`, or the whole tensor that it stands for if a function got it: it may have been changed or hooked."""
    computed = x.computed if isinstance(x, Uncomputed) else None
    return x if computed is None else computed


def note_tile_reader(x: Tensor) -> None:
    """Note that `x` is read tile by tile, if it is the whole output of a tiled norm."""
    norm: Tiled | None = getattr(x, _NORM, None)
    if norm is not None and norm.uncomputed is None:
        norm.uncomputed = True


def _input_of_norm(normed: Tensor) -> Tensor | None:
    """Return the input of the norm that made `normed`; None if unknown, or if `normed` itself needs its gradient."""
    norm_input: Tensor | None = getattr(normed, _NORM_INPUT, None)
    return None if norm_input is None or not norm_input.requires_grad or waits_for_gradient(normed) else norm_input


class _SavedInput:
    """A tensor that a node saves for several readers: under a checkpoint, a node's saved tensors can be read once per
    backward.
    """

    def __init__(self, node: Any) -> None:
        self.node = node
        self.tensor: Tensor | None = None
        self.normed: Tensor | None = None  # the norm's output, for the linear layers that read it

    def get(self) -> Tensor:
        if self.tensor is None:
            (self.tensor,) = self.node.saved_tensors
        return self.tensor

    def drop(self) -> None:
        """Free the tensors after the last reader. A second backward, of a retained graph, reads the node again."""
        self.tensor = self.normed = None


class InputSource:
    """Where the backward finds the input of a module: a saved tensor, or what `norm` computes from it, in `dtype`."""

    def __init__(self, saved: _SavedInput, norm: Tiled | None, dtype: torch.dtype) -> None:
        self.saved, self.norm, self.dtype = saved, norm, dtype

    @classmethod
    def of(cls, x: Tensor) -> InputSource | None:
        """Return the source of `x` if a norm made it that can recompute it; None if `x` must be saved."""
        node: Any = x.grad_fn
        tiled = getattr(node, "tiled", None)
        if not (isinstance(tiled, Tiled) and tiled.cheap):
            return None
        if not isinstance(x, Uncomputed) and version_of(x) != node.version:  # written to since, without gradients
            return None
        source: InputSource | None = node.source
        return None if source is None or source.norm is not None else cls(source.saved, tiled, x.dtype)

    def input_of(self, tile: Tensor) -> Tensor:
        """Return the input for a tile of the saved tensor."""
        return tile if self.norm is None else self.norm.compute_with(tile, {})[0]

    def full_output(self) -> Tensor:
        """Recompute the norm's output of all tokens, tile by tile, without gradients."""
        assert self.norm is not None
        if self.saved.normed is None:
            with torch.no_grad():
                saved = self.saved.get()
                (self.saved.normed,) = _run_tiles(self.norm, saved, self.norm.plan(saved))
        return self.saved.normed


class _SaveInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


# ---------------------------------------------------------------------------------------------------------------------
# The tiles, forward and backward.


class _TiledCall(torch.autograd.Function):
    """Compute all tiles; in the backward, recompute each with its gradients.

    With `_NormThenModule`, `hidden` is the norm's input and `normed` its output. `normed` gets no gradient from here,
    but keeps its edge: the norm's node runs after all readers of `normed`, and frees the saved input. If `normed` is a
    dtype, the output is not computed (`Uncomputed`).
    """

    @staticmethod
    def forward(
        ctx: Any,
        tiled: Tiled | _NormThenModule,
        source: InputSource | None,
        hidden: Tensor,
        normed: Tensor | torch.dtype | None,
        *parameters: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.tiled, ctx.source = tiled, source
        ctx.set_materialize_grads(False)
        if source is None:
            ctx.save_for_backward(hidden)
        hidden_needs_grad, _, *parameters_need_grad = ctx.needs_input_grad[2:]
        ctx.needs_grad = [hidden_needs_grad, *parameters_need_grad]
        ctx.last_reader = source is not None and source.norm is None and not isinstance(normed, Tensor)
        ctx.state = ForwardState(hidden.device, draws=tiled.draws)
        module = _module_of(tiled)
        ctx.saves_router_logits = module.saves_router_logits
        if isinstance(normed, torch.dtype):
            ctx.plan = module.plan(hidden)
            return (Uncomputed.like(hidden, hidden.shape, normed, requires_grad=False),)
        run, x = tiled, hidden
        if isinstance(normed, Tensor) and not isinstance(normed, Uncomputed):
            run, x = module, normed
        ctx.plan = module.plan(x, run)
        outs = _run_tiles(run, x, ctx.plan)
        ctx.mark_non_differentiable(*(x for x in outs if not x.is_floating_point()))
        ctx.version = version_of(outs[0])
        return tuple(outs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        source: InputSource | None = ctx.source
        found: tuple[Tensor | None, list[Tensor | None]] = None, [None for _ in ctx.needs_grad[1:]]
        if any(g is not None for g in grads):
            (hidden,) = ctx.saved_tensors if source is None else (source.saved.get(),)
            # As in this forward; another one may have run since.
            _module_of(ctx.tiled).saves_router_logits = ctx.saves_router_logits
            with ctx.state.restored(), torch.enable_grad():
                found = _tiled_gradients(ctx.tiled, source, hidden, ctx.plan, grads, ctx.needs_grad)
        if ctx.last_reader:  # the readers of this module's output ran before it
            assert source is not None
            source.saved.drop()
        grad_hidden, grad_parameters = found
        return None, None, grad_hidden, None, *grad_parameters


def _module_of(tiled: Tiled | _NormThenModule) -> Tiled:
    return tiled.module if isinstance(tiled, _NormThenModule) else tiled


def _tiled_gradients(
    tiled: Tiled | _NormThenModule,
    source: InputSource | None,
    hidden: Tensor,
    plan: TilePlan,
    grads: Sequence[Tensor | None],
    needs_grad: list[bool],
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Return the gradients of the input and of each trained parameter from those of the outputs."""
    trained, wide = tiled.trained(), len(plan.routes) > 1
    gradients = TileGradients(
        hidden.flatten(0, 1), trained, needs_grad, dtype=None if source is None else source.dtype, wide=wide
    )
    grads = tuple(None if g is None else g.contiguous() for g in grads)  # one copy here, not one per tile
    for span, tile, route in plan.tiles_of(hidden):
        with torch.no_grad():
            x = tile if source is None else source.input_of(tile)
        x = gradients.leaf(x)
        with _module_of(tiled).along(route):
            outs = tiled.compute_with(x, gradients.stand_ins)
        pairs = [
            (y, _at(g, hidden, span).reshape(y.shape))
            for y, g in zip(outs, grads, strict=True)
            if g is not None and y.requires_grad
        ]
        gradients.add(span, x, [y for y, _ in pairs], [g for _, g in pairs])
        del outs, pairs
    of_hidden, sums = gradients.of_hidden, zip(gradients.of_parameters(), trained.values(), strict=True)
    return (
        None if of_hidden is None else of_hidden.view(hidden.shape),
        [None if x is None else x.to(p.dtype) for x, p in sums],
    )


def _run_tiles(tiled: Tiled | _NormThenModule, hidden: Tensor, plan: TilePlan) -> list[Tensor]:
    """Return all outputs of a module for all tokens."""
    outs: list[Tensor] = []
    for span, tile, route in plan.tiles_of(hidden):
        with _module_of(tiled).along(route):
            of_tile = tiled.compute_with(tile, {})
        outs = outs or [_empty_output(x, tile, hidden) for x in of_tile]
        for out, x in zip(outs, of_tile, strict=True):
            _at(out, hidden, span).copy_(_tokens_first(x, tile.shape[1]))
    return outs


def is_autocast_on(device: torch.device) -> bool:
    """Return whether autocast is on."""
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


def _count(hidden: Tensor) -> int:
    return hidden.shape[:2].numel()


def tiles_of(hidden: Tensor, tiles: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield the tiles `[1, rows, ...]` of all tokens of the batch, and their span among the tokens."""
    flat = hidden.reshape(1, _count(hidden), *hidden.shape[2:])
    rows = -(-_count(hidden) // tiles)
    for tile in range(tiles):
        span = slice(tile * rows, (tile + 1) * rows)
        yield span, flat[:, span]


@dataclass(frozen=True)
class TilePlan:
    """How an input is cut: `count` tiles, then empty ones up to as many as there are `routes` to experts."""

    count: int
    routes: Sequence[Any]

    def tiles_of(self, hidden: Tensor) -> Iterator[tuple[slice, Tensor, Any]]:
        """Yield span, tile and route of each tile."""
        tokens = _count(hidden)
        nothing = slice(tokens, tokens), hidden.reshape(1, tokens, *hidden.shape[2:])[:, tokens:]
        tiles = itertools.chain(tiles_of(hidden, self.count), itertools.repeat(nothing))
        for (span, tile), route in zip(tiles, self.routes, strict=False):
            yield span, tile, route


def _empty_output(x: Tensor, tile: Tensor, hidden: Tensor) -> Tensor:
    """Allocate an output for all tokens; `x` is the output of a tile, `[1, rows, ...]` or `[rows, ...]`."""
    batched = x.dim() > 1 and x.shape[0] == 1 and x.shape[1] == tile.shape[1]
    leading = hidden.shape[:2] if batched else (_count(hidden),)
    return x.new_empty(*leading, *x.shape[2 if batched else 1 :])


def _tokens_first(x: Tensor, rows: int) -> Tensor:
    """Return an output `[1, rows, ...]` or `[rows, ...]` as `[rows, ...]`."""
    if x.dim() > 1 and x.shape[0] == 1 and x.shape[1] == rows:
        return x[0]
    if x.shape[0] == rows:
        return x
    raise LongspanError(
        f"a tiled module returned a tensor of shape {tuple(x.shape)} for {rows} tokens; use tiled=False"
    )


def _at(x: Tensor, hidden: Tensor, span: slice) -> Tensor:
    """Return some tokens of a tensor of all tokens, `[B, L, ...]` or `[B * L, ...]`."""
    batched = x.shape[:2] == hidden.shape[:2]
    return (x.reshape(-1, *x.shape[2:]) if batched else x)[span]


class ForwardState:
    """The autocast state now and, if the forward draws random numbers, the state of the generators."""

    def __init__(self, device: torch.device, *, draws: bool) -> None:
        self._device, kind = device, device.type
        self._autocast = autocast_state(device) if torch.amp.is_autocast_available(kind) else None
        self._host_rng = torch.get_rng_state() if draws else None
        self._device_rng = torch.get_device_module(device).get_rng_state(device) if draws and kind != "cpu" else None

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the state for the body."""
        with contextlib.ExitStack() as stack:
            if self._host_rng is not None:
                devices = [] if self._device_rng is None else [self._device]
                kind = self._device.type if devices else "cuda"
                stack.enter_context(torch.random.fork_rng(devices, device_type=kind))
                torch.set_rng_state(self._host_rng)
            if self._device_rng is not None:
                torch.get_device_module(self._device).set_rng_state(self._device_rng, self._device)
            if self._autocast is not None:
                stack.enter_context(torch.autocast(**self._autocast, cache_enabled=False))
            yield
