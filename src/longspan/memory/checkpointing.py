"""Activation checkpointing by layers, in which attention need not run again.

A layer keeps its input, and is computed again in the backward (Chen et al. 2016, arXiv:1604.06174; torch's
non-reentrant checkpoint). What that repeats is worst in attention: an exchange, a ring, a kernel whose cost grows with
the square of the length. So a layer may keep of its attention either everything that autograd saved
(`checkpointing="save_attention"`: nothing of it runs again) or output and log-sum-exp (`"selective"`: the kernel does
not).
Whatever is kept may lie elsewhere meanwhile. And not every layer need keep its input: it is what the layer before
gives, so a group of layers may keep the first's alone and make the others' again (`layers_per_checkpoint`).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

from longspan.compat.torch_api import graph_is_kept, not_compiled, version_of
from longspan.core.errors import LongspanError

if TYPE_CHECKING:
    from longspan.attn.methods.base import SavedTensors
    from longspan.attn.prepare import AttentionPlan
    from longspan.attn.score import Scores
    from longspan.core.memory import Memory
    from longspan.memory.offload.choice import Store, Stored


_SMALL = 4096  # bytes; not worth a way to the host and back


class Here:
    """A tensor that stays where it is."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()  # not the output of a node that holds this: that would be a circle

    def get(self) -> Tensor:
        return self.tensor

    def drop(self) -> None:
        pass


def put(store: Store | None, tensor: Tensor) -> Stored:
    """Into the store, if there is one."""
    return Here(tensor) if store is None or tensor.nbytes < _SMALL else store.put(tensor.detach())


class KeptTensors:
    """What one attention keeps; given back to the store when nobody can ask for it any more."""

    def __init__(self, store: Store | None, tensors: Sequence[Tensor]) -> None:
        self.stored = [put(store, x) for x in tensors]
        self.here: list[Tensor] | None = None

    def tensors(self) -> list[Tensor]:
        """On their device; fetched once for the layer's second run and its backward."""
        if self.here is None:
            self.here = [stored.get() for stored in self.stored]
        return self.here

    def drop(self) -> None:
        """The backward has used them. (A second backward, of a graph that was retained, fetches them again.)"""
        self.here = None

    def __del__(self) -> None:
        for stored in self.stored:
            stored.drop()


@dataclass
class LayerCall:
    """One call of a checkpointed layer: the `SavedAttentions` of its attentions, and its inputs.

    Attributes:
        store: where what is kept lies.
        whole: whether all that attention saves is kept (`checkpointing="save_attention"`).
        recomputing: whether the layer is being computed again.
    """

    store: Store | None
    whole: bool = False
    recomputing: bool = False
    kept: list[KeptTensors] = field(default_factory=list)
    at: int = 0

    def save(self, tensors: Sequence[Tensor]) -> SavedTensors:
        """Record what one attention keeps."""
        self.kept.append(KeptTensors(self.store, tensors))
        return self.kept[-1]

    def load_next(self) -> SavedTensors:
        """What the next attention has kept."""
        if self.at == len(self.kept):
            raise LongspanError(
                f"a checkpointed layer called {len(self.kept)} attentions in its forward, and now calls another one: "
                f"it does not compute the same twice; use checkpointing='full' or 'none'"
            )
        self.at += 1
        return self.kept[self.at - 1]


COMPILED = "longspan_compiled"
"""Attribute of a layer that holds its compiled forward, if it has one (`longspan.compile_layers`)."""


def forward_of(layer: nn.Module) -> Callable[..., Any]:
    """Return the function that computes a layer, which is its first argument: the compiled one in training."""
    compiled = layer.__dict__.get(COMPILED) if layer.training else None
    # Look the class up at each call: FSDP replaces it.
    return compiled or type(layer).forward


class CheckpointedLayer:
    """A layer that keeps its input alone, in the place of its `forward`.

    Args:
        layer: the module. Hooks around its call, FSDP's among them, stay outside, where its class has them.
        memory: the memory options.
        store: where what is kept lies; None: where it is.
        tell: is told, for the time of a call, who keeps what its attentions compute; None: nobody.
        draws: whether the layer draws random numbers, which must be the same when it is computed again.
        chain: what the layers of the model know of one another; None: each keeps its own input.
    """

    def __init__(
        self,
        layer: nn.Module,
        memory: Memory,
        store: Store | None,
        tell: Callable[[LayerCall | None], None],
        *,
        draws: bool,
        chain: Chain | None = None,
    ) -> None:
        self.layer, self.memory, self.store, self.tell, self.draws = layer, memory, store, tell, draws
        self.chain = chain or Chain()
        self._checkpointed = not_compiled(self._checkpoint)  # a compiler breaks its graph here
        layer.forward = self  # the instance's

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        off = self.memory.checkpointing == "none"
        if off or not torch.is_grad_enabled() or not self.layer.training:
            return self._forward(*args, **kwargs)
        return self._checkpointed(*args, **kwargs)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        return forward_of(self.layer)(self.layer, *args, **kwargs)

    def _checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        keeps = self.memory.checkpointing in ("save_attention", "selective")
        call = LayerCall(self.store, whole=self.memory.checkpointing == "save_attention")
        inputs = _Inputs(args, kwargs, self.store, self.chain.before(self, [*args, *kwargs.values()]))

        def run(_: Tensor) -> Any:
            positional, named = inputs.again() if call.recomputing else inputs.first()
            return self._forward(*positional, **named)

        out = checkpoint(
            run,
            inputs.anchor,  # says on which device
            use_reentrant=False,
            preserve_rng_state=self.draws,
            context_fn=lambda: (self._during(call if keeps else None), self._again(call, keeps)),
        )
        self.chain.gave(Member(self, call if keeps else None, inputs), out)
        return out

    def between(self, call: LayerCall | None, inputs: _Inputs, *, next_in_backward: bool) -> Any:
        """What the layer gives, made again without gradients; what it keeps of its attention is not computed again."""
        positional, named = inputs.look()
        sharded: FSDPModule | None = self.layer if isinstance(self.layer, FSDPModule) else None
        if sharded is not None:
            sharded.unshard()
        if call is not None and not call.kept:  # nothing in its attention had a gradient
            call = None
        if call is not None:
            call.recomputing, call.at = True, 0
        try:
            with torch.no_grad(), self._during(call):
                return self._forward(*positional, **named)
        finally:
            if call is not None:
                for kept in call.kept:
                    kept.drop()  # its backward fetches it when it comes
            if sharded is not None and not next_in_backward:
                sharded.reshard()

    @contextlib.contextmanager
    def _during(self, keeper: LayerCall | None) -> Iterator[None]:
        self.tell(keeper)
        try:
            yield
        finally:
            self.tell(None)

    def _again(self, call: LayerCall, keeps: bool) -> contextlib.AbstractContextManager[None]:
        return _Again(self, call, keeps)


@dataclass
class Member:
    """One call of a layer, as the layer behind it knows it."""

    layer: CheckpointedLayer
    call: LayerCall | None
    inputs: _Inputs
    at: int = 0

    def output(self, *, next_in_backward: bool) -> Tensor:
        """What the call gave, made again."""
        made: Tensor = _hidden(self.layer.between(self.call, self.inputs, next_in_backward=next_in_backward))
        return made


class Chain:
    """Which call of a layer came before, for the time of a forward: whether a layer takes in what that one gave.

    Args:
        per_checkpoint: layers that share a kept input.
        last: the layer behind which nothing follows.
    """

    def __init__(self, per_checkpoint: int = 1, last: nn.Module | None = None) -> None:
        self.per_checkpoint, self.last = per_checkpoint, last
        self._member: Member | None = None
        self._gave: Tensor | None = None
        self._version = 0

    def before(self, layer: CheckpointedLayer, values: Sequence[Any]) -> Remade | None:
        """The input of a layer as what the one before gives; None where it begins a group."""
        member, gave, self._member, self._gave = self._member, self._gave, None, None
        if member is None or gave is None or member.at + 1 >= self.per_checkpoint or layer.draws or member.layer.draws:
            return None
        asked = [x for x in values if isinstance(x, Tensor) and x.requires_grad]
        # FSDP hands on another tensor object with the same memory.
        if len(asked) != 1 or asked[0].data_ptr() != gave.data_ptr() or asked[0].shape != gave.shape:
            return None
        if asked[0].stride() != gave.stride() or asked[0].dtype != gave.dtype or version_of(gave) != self._version:
            return None
        return Remade(member)

    def gave(self, member: Member, out: Any) -> None:
        """What a call gave. It is held until the next layer takes it."""
        hidden = _hidden(out)
        if self.per_checkpoint == 1 or member.layer.layer is self.last or not isinstance(hidden, Tensor):
            return
        before = member.inputs.before
        member.at = 0 if before is None else before.member.at + 1
        self._member, self._gave, self._version = member, hidden.detach(), version_of(hidden)


def _hidden(out: Any) -> Any:
    """The hidden states in what a layer returns."""
    return out[0] if isinstance(out, tuple) else out


class Remade:
    """A layer's input that nobody keeps: what the layer before gives, made again when it is asked for.

    The inputs between the group's first layer and this one are made on the way, and stay until their own layers, whose
    backwards come next, have taken them.
    """

    def __init__(self, member: Member) -> None:
        self.member = member
        self._made: Tensor | None = None

    def get(self) -> Tensor:
        """The input; the caller holds it from now on."""
        made = self._make(next_in_backward=True)
        self._made = None
        return made

    def look(self) -> Tensor:
        """The input, which its own layer will ask for later."""
        return self._make(next_in_backward=False)

    def _make(self, *, next_in_backward: bool) -> Tensor:
        if self._made is None:
            self._made = self.member.output(next_in_backward=next_in_backward)
        return self._made

    def drop(self) -> None:
        """Nobody asks for it any more."""
        self._made = None


class _Again(contextlib.AbstractContextManager[None]):
    """Around the layer's second run. (torch enters it once more for every backward of a retained graph.)"""

    def __init__(self, layer: CheckpointedLayer, call: LayerCall, keeps: bool) -> None:
        self.layer, self.call, self.keeps = layer, call, keeps

    def __enter__(self) -> None:
        self.call.recomputing, self.call.at = True, 0
        if self.keeps:
            self.layer.tell(self.call)

    def __exit__(self, *_: object) -> None:
        self.layer.tell(None)


class _Inputs:
    """A layer's arguments. Tensors of this layer alone, to which gradients flow, go to the store while nobody needs
    them; masks and positions are every layer's.
    """

    def __init__(
        self, args: Sequence[Any], named: Mapping[str, Any], store: Store | None, before: Remade | None = None
    ) -> None:
        self.before = before  # the one input that gradients flow to is not kept, but made again
        self.given: tuple[list[Any], dict[str, Any]] | None = list(args), dict(named)
        values = [*args, *named.values()]
        self.anchor = next(x for x in values if isinstance(x, Tensor)).new_empty(0)
        self.names, self.count = tuple(named), len(args)
        self.kept: list[Any] = []  # a store may refuse
        self.asked = [isinstance(x, Tensor) and x.requires_grad for x in values]
        self.kept = [(before or put(store, x)) if asked else x for x, asked in zip(values, self.asked, strict=True)]

    def first(self) -> tuple[list[Any], dict[str, Any]]:
        """Return views of the inputs for the layer's first run.

        A norm that made an input can recompute it, so linear layers would save other tensors than in the second run,
        where the input has no history. A view has none in either run.
        """
        given, self.given = self.given, None
        assert given is not None
        values = [*given[0], *given[1].values()]
        return self._sorted([x.view_as(x) if asked else x for x, asked in zip(values, self.asked, strict=True)])

    def again(self) -> tuple[list[Any], dict[str, Any]]:
        """For the layer's second run."""
        return self._sorted([x.get().detach().requires_grad_() if asked else x for x, asked in self._pairs()])

    def look(self) -> tuple[list[Any], dict[str, Any]]:
        """For a run between, that leaves everything to the second one."""
        return self._sorted([_looked_at(x) if asked else x for x, asked in self._pairs()])

    def _pairs(self) -> Iterator[tuple[Any, bool]]:
        return zip(self.kept, self.asked, strict=True)

    def _sorted(self, values: list[Any]) -> tuple[list[Any], dict[str, Any]]:
        return values[: self.count], dict(zip(self.names, values[self.count :], strict=True))

    def __del__(self) -> None:
        for x, asked in zip(self.kept, self.asked, strict=False):
            if asked:
                x.drop()


def _looked_at(x: Any) -> Tensor:
    return x.look() if isinstance(x, Remade) else x.get()


# ---------------------------------------------------------------------------------------------------------------------
# Attention of which everything is kept.


def kept_attention(plan: AttentionPlan, q: Tensor, k: Tensor, v: Tensor, scores: Scores, call: LayerCall) -> Tensor:
    """`plan(q, k, v, scores)` in a checkpointed layer: it runs once, and all that it saves is kept.

    Args:
        plan: of the attention.
        q: my tokens, `[B, L, H, D]`.
        k: `[B, L, K, D]`.
        v: `[B, L, K, Dv]`.
        scores: scale, sinks, ... of the layer.
        call: of the layer.
    """
    passed: list[Tensor] = []
    out: Tensor = _KeptAttention.apply(plan, scores, call, passed, q, k, v, scores.sinks)  # type: ignore[no-untyped-call]
    caught: Tensor = _Catching.apply(out, passed)  # type: ignore[no-untyped-call]
    return caught


class _KeptAttention(torch.autograd.Function):
    """A graph of its own inside: the layer's second run takes its output and leaves it alone.

    The output's gradient goes there by `passed`: a backward's arguments are held as long as it runs, which here is all
    of the attention's backward.
    """

    @staticmethod
    def forward(
        ctx: Any, plan: AttentionPlan, scores: Scores, call: LayerCall, passed: list[Tensor], *inputs: Tensor | None
    ) -> Tensor:
        if call.recomputing:
            (out,) = call.load_next().tensors()
            return out.detach()
        ctx.found, ctx.anchor = {}, torch.empty(0, device=inputs[0].device, requires_grad=True)  # type: ignore[union-attr]
        asked = ctx.needs_input_grad[4:]

        def entering(i: int, x: Tensor | None) -> Tensor | None:
            if x is None or not asked[i]:
                return x
            entered: Tensor = _Entering.apply(ctx.anchor, x.detach(), ctx.found, i)  # type: ignore[no-untyped-call]
            return entered

        # A weight is nobody's activation: FSDP frees its storage, and fills it again.
        weight = None if inputs[3] is None else inputs[3].untyped_storage().data_ptr()

        def pack(x: Tensor) -> Any:
            stays = x.nbytes < _SMALL or x.untyped_storage().data_ptr() == weight
            return Here(x) if stays else _Dropping(put(call.store, x))

        with torch.enable_grad(), saved_tensors_hooks(pack, lambda stored: stored.get()):
            q, k, v, sinks = (entering(i, x) for i, x in enumerate(inputs))
            assert q is not None and k is not None and v is not None
            made = plan(q, k, v, dataclasses.replace(scores, sinks=sinks))
            leaving: Tensor = _Leaving.apply(made, passed)  # type: ignore[no-untyped-call]
        ctx.edge = get_gradient_edge(leaving)
        ctx.kept = call.save([made])
        return made.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        kept = graph_is_kept()
        ctx.kept.drop()  # what came after it has used the output
        torch.autograd.grad([ctx.edge], [ctx.anchor], [grads[0]], retain_graph=kept, allow_unused=True)
        found = dict(ctx.found)
        ctx.found.clear()
        return None, None, None, None, *(found.get(i) for i in range(4))


class _Catching(torch.autograd.Function):
    """Behind the attention: catches its output's gradient, and hands on one that takes no memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, passed: list[Tensor]) -> Tensor:
        ctx.passed = passed
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.passed.append(grads[0])
        return grads[0].new_empty(()).expand(grads[0].shape), None


class _Leaving(torch.autograd.Function):
    """The end of the graph inside: what was caught goes on, and is held by nobody else."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, passed: list[Tensor]) -> Tensor:
        ctx.passed = passed
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:
        return ctx.passed.pop(), None


class _Entering(torch.autograd.Function):
    """An input of the graph inside. Its gradient is caught here: a leaf would keep the tensor as long as the graph."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor, found: dict[int, Tensor], i: int) -> Tensor:
        ctx.found, ctx.i = found, i
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.found[ctx.i] = grads[0]
        return grads[0].new_empty(0), None, None, None


class _Dropping:
    """A stored tensor that is given back when autograd lets it go."""

    def __init__(self, stored: Stored) -> None:
        self.stored = stored

    def get(self) -> Tensor:
        return self.stored.get()

    def __del__(self) -> None:
        self.stored.drop()
