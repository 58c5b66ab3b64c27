"""Activation checkpointing per layer, in which attention need not be recomputed.

A layer saves its input, and the backward recomputes the layer (Chen et al. 2016, arXiv:1604.06174; torch's
non-reentrant checkpoint). The expensive part is attention: an all-to-all, a ring, a kernel whose cost is quadratic in
the length. So a layer may also save of its attention:

    "selective"       output and log-sum-exp: no kernel runs again (`longspan.attn.methods.chunked`)
    "save_attention"  everything that autograd saves: nothing of it runs again (`longspan.memory.saved_attention`)

What is saved may be offloaded. With `layers_per_checkpoint`, a group of layers saves only the input of its first layer;
the backward recomputes the other inputs, each of which is the previous layer's output.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

from longspan.compat.torch_api import not_compiled, version_of
from longspan.core.errors import LongspanError

if TYPE_CHECKING:
    from longspan.core.memory import Memory
    from longspan.memory.offload.store import Future, Store


SMALL = 4096
"""Bytes up to which a tensor is not worth offloading."""


class OnDevice:
    """A saved tensor that stays on its device, with the interface of `Future`."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()  # avoid a reference cycle with the node that holds this

    def get(self) -> Tensor:
        return self.tensor


def put(store: Store | None, tensor: Tensor) -> OnDevice | Future:
    """Offload a tensor to the store, if there is one and the tensor is not small."""
    return OnDevice(tensor) if store is None or tensor.nbytes < SMALL else store.put(tensor.detach())


class SavedAttention:
    """The tensors that one attention saves."""

    def __init__(self, store: Store | None, tensors: Sequence[Tensor]) -> None:
        self.stored = [put(store, x) for x in tensors]
        self.fetched: list[Tensor] | None = None

    def tensors(self) -> list[Tensor]:
        """Return the tensors on their device; fetch them once for the layer's recomputation and its backward."""
        if self.fetched is None:
            self.fetched = [stored.get() for stored in self.stored]
        return self.fetched

    def drop(self) -> None:
        """Release the fetched tensors. A second backward, of a retained graph, fetches them again."""
        self.fetched = None


@dataclass
class LayerCall:
    """One call of a checkpointed layer: implements `SavedAttentions` for its attentions.

    Attributes:
        store: where to offload; None: nowhere.
        save_all: save everything that attention saves (`checkpointing="save_attention"`).
        recomputing: whether the layer is being recomputed.
        saved: what each attention saved, in the order of their calls.
        next: index of the attention that is recomputed next.
    """

    store: Store | None
    save_all: bool = False
    recomputing: bool = False
    saved: list[SavedAttention] = field(default_factory=list)
    next: int = 0

    def save(self, tensors: Sequence[Tensor]) -> SavedAttention:
        """Save the tensors of the attention that runs."""
        self.saved.append(SavedAttention(self.store, tensors))
        return self.saved[-1]

    def load_next(self) -> SavedAttention:
        """Return what the next attention saved in the forward."""
        if self.next == len(self.saved):
            raise LongspanError(
                f"a checkpointed layer called {len(self.saved)} attentions in its forward and calls another one when "
                f"recomputed, so it does not compute the same twice; use checkpointing='full' or 'none'"
            )
        self.next += 1
        return self.saved[self.next - 1]

    def start_recompute(self) -> None:
        """Start a recomputation of the layer."""
        self.recomputing, self.next = True, 0


COMPILED = "longspan_compiled"
"""Attribute of a layer that holds its compiled forward, if it has one (`longspan.compile_layers`)."""


def forward_of(layer: nn.Module) -> Callable[..., Any]:
    """Return the function that computes a layer, which is its first argument: the compiled one in training."""
    compiled = layer.__dict__.get(COMPILED) if layer.training else None
    # Look the class up at each call: FSDP replaces it.
    return compiled or type(layer).forward


class CheckpointedLayer:
    """Replaces a layer's `forward` by one that saves its input only.

    Args:
        layer: the module. Hooks around its call, FSDP's among them, run outside.
        memory: the memory options.
        store: where to offload; None: nowhere.
        bind: called with the `LayerCall` that saves what the layer's attentions compute, and with None after the call.
        draws: whether the layer draws random numbers, which must be the same when it is recomputed.
        groups: the model's layer groups; None: every layer saves its own input.
    """

    def __init__(
        self,
        layer: nn.Module,
        memory: Memory,
        store: Store | None,
        bind: Callable[[LayerCall | None], None],
        *,
        draws: bool,
        groups: LayerGroups | None = None,
    ) -> None:
        self.layer, self.memory, self.store, self.bind, self.draws = layer, memory, store, bind, draws
        self.groups = groups or LayerGroups()
        self._checkpointed = not_compiled(self._checkpoint)  # a compiler breaks its graph here
        layer.forward = self  # of the instance, so hooks around the call stay

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        off = self.memory.checkpointing == "none"
        if off or not torch.is_grad_enabled() or not self.layer.training:
            return self._forward(*args, **kwargs)
        return self._checkpointed(*args, **kwargs)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        return forward_of(self.layer)(self.layer, *args, **kwargs)

    def _checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        saves = self.memory.checkpointing in ("save_attention", "selective")
        call = LayerCall(self.store, save_all=self.memory.checkpointing == "save_attention")
        inputs = _Inputs(args, kwargs, self.store, self.groups.previous_output(self, [*args, *kwargs.values()]))

        def run(_: Tensor) -> Any:
            positional, named = inputs.for_recompute() if call.recomputing else inputs.for_forward()
            return self._forward(*positional, **named)

        out = checkpoint(
            run,
            inputs.anchor,  # tells torch the device
            use_reentrant=False,
            preserve_rng_state=self.draws,
            context_fn=lambda: (self.binding(call if saves else None), _Recomputing(self, call, saves)),
        )
        self.groups.record(GroupMember(self, call if saves else None, inputs), out)
        return out

    def recompute_output(self, call: LayerCall | None, inputs: _Inputs, *, next_in_backward: bool) -> Any:
        """Recompute the layer's output without gradients, using what its attention saved."""
        positional, named = inputs.peek()
        sharded: FSDPModule | None = self.layer if isinstance(self.layer, FSDPModule) else None
        if sharded is not None:
            sharded.unshard()
        if call is not None and not call.saved:  # nothing in its attention needs a gradient
            call = None
        if call is not None:
            call.start_recompute()
        try:
            with torch.no_grad(), self.binding(call):
                return self._forward(*positional, **named)
        finally:
            if call is not None:
                for saved in call.saved:
                    saved.drop()  # the layer's own backward fetches it again
            if sharded is not None and not next_in_backward:
                sharded.reshard()

    @contextlib.contextmanager
    def binding(self, call: LayerCall | None) -> Iterator[None]:
        """Bind `call` to the layer's attentions for the body."""
        self.bind(call)
        try:
            yield
        finally:
            self.bind(None)


class _Recomputing(contextlib.AbstractContextManager[None]):
    """Around a layer's recomputation. A class, as torch enters it again for every backward of a retained graph."""

    def __init__(self, layer: CheckpointedLayer, call: LayerCall, saves: bool) -> None:
        self.layer, self.call, self.saves = layer, call, saves

    def __enter__(self) -> None:
        self.call.start_recompute()
        if self.saves:
            self.layer.bind(self.call)

    def __exit__(self, *_: object) -> None:
        self.layer.bind(None)


# ---------------------------------------------------------------------------------------------------------------------
# Groups of layers that share one saved input.


@dataclass
class GroupMember:
    """One call of a layer in a group, from which the next layer can recompute its input."""

    layer: CheckpointedLayer
    call: LayerCall | None
    inputs: _Inputs
    index: int = 0

    def output(self, *, next_in_backward: bool) -> Tensor:
        """Recompute the output of the call."""
        out: Tensor = _hidden(self.layer.recompute_output(self.call, self.inputs, next_in_backward=next_in_backward))
        return out


class LayerGroups:
    """Remembers the previous layer call during a forward, to find layers whose input is the previous layer's output.

    Args:
        per_checkpoint: layers of a group.
        last: the model's last layer.
    """

    def __init__(self, per_checkpoint: int = 1, last: nn.Module | None = None) -> None:
        self.per_checkpoint, self.last = per_checkpoint, last
        self._member: GroupMember | None = None
        self._output: Tensor | None = None
        self._version = 0

    def previous_output(self, layer: CheckpointedLayer, values: Sequence[Any]) -> RecomputedInput | None:
        """Return a layer's input as the previous layer's output; None if the layer starts a group."""
        member, output, self._member, self._output = self._member, self._output, None, None
        if member is None or output is None or member.index + 1 >= self.per_checkpoint:
            return None
        if layer.draws or member.layer.draws:
            return None
        inputs = [x for x in values if isinstance(x, Tensor) and x.requires_grad]
        # FSDP passes on another tensor object with the same memory.
        if len(inputs) != 1 or inputs[0].data_ptr() != output.data_ptr() or inputs[0].shape != output.shape:
            return None
        if inputs[0].stride() != output.stride() or inputs[0].dtype != output.dtype:
            return None
        return RecomputedInput(member) if version_of(output) == self._version else None

    def record(self, member: GroupMember, out: Any) -> None:
        """Remember a call and its output until the next layer runs."""
        hidden = _hidden(out)
        if self.per_checkpoint == 1 or member.layer.layer is self.last or not isinstance(hidden, Tensor):
            return
        previous = member.inputs.recomputed
        member.index = 0 if previous is None else previous.member.index + 1
        self._member, self._output, self._version = member, hidden.detach(), version_of(hidden)


def _hidden(out: Any) -> Any:
    """Return the hidden states in a layer's output."""
    return out[0] if isinstance(out, tuple) else out


class RecomputedInput:
    """A layer's input that is not saved, but recomputed as the previous layer's output.

    This also recomputes the inputs between the group's first layer and this one. They stay until their own layers,
    whose backwards come next, have used them.
    """

    def __init__(self, member: GroupMember) -> None:
        self.member = member
        self._value: Tensor | None = None

    def get(self) -> Tensor:
        """Return the input, and keep no reference to it."""
        value = self._recompute(next_in_backward=True)
        self._value = None
        return value

    def peek(self) -> Tensor:
        """Return the input, and keep it for its own layer."""
        return self._recompute(next_in_backward=False)

    def _recompute(self, *, next_in_backward: bool) -> Tensor:
        if self._value is None:
            self._value = self.member.output(next_in_backward=next_in_backward)
        return self._value


class _Inputs:
    """A layer's arguments. Those that need a gradient may be offloaded, or recomputed; masks and positions are shared
    by all layers and stay.
    """

    def __init__(
        self, args: Sequence[Any], named: Mapping[str, Any], store: Store | None, recomputed: RecomputedInput | None
    ) -> None:
        self.recomputed = recomputed  # stands for the one input that needs a gradient
        self.original: tuple[Any, ...] | None = (*args, *named.values())
        self.anchor = next(x for x in self.original if isinstance(x, Tensor)).new_empty(0)
        self.names, self.count = tuple(named), len(args)
        self.needs_grad = [isinstance(x, Tensor) and x.requires_grad for x in self.original]
        pairs = zip(self.original, self.needs_grad, strict=True)
        self.saved = [(recomputed or put(store, x)) if needs else x for x, needs in pairs]

    def for_forward(self) -> tuple[list[Any], dict[str, Any]]:
        """Return views of the inputs.

        A norm that made an input can recompute it, so linear layers would save other tensors than in the recomputation,
        where the input has no history. A view has none in either run.
        """
        original, self.original = self.original, None
        assert original is not None
        pairs = zip(original, self.needs_grad, strict=True)
        return self._as_arguments([x.view_as(x) if needs else x for x, needs in pairs])

    def for_recompute(self) -> tuple[list[Any], dict[str, Any]]:
        """Return the inputs as leaves that need a gradient."""
        return self._as_arguments([x.get().detach().requires_grad_() if needs else x for x, needs in self._pairs()])

    def peek(self) -> tuple[list[Any], dict[str, Any]]:
        """Return the inputs for a run without gradients before the layer's own recomputation."""
        return self._as_arguments([_peek(x) if needs else x for x, needs in self._pairs()])

    def _pairs(self) -> Iterator[tuple[Any, bool]]:
        return zip(self.saved, self.needs_grad, strict=True)

    def _as_arguments(self, values: list[Any]) -> tuple[list[Any], dict[str, Any]]:
        return values[: self.count], dict(zip(self.names, values[self.count :], strict=True))


def _peek(x: Any) -> Tensor:
    return x.peek() if isinstance(x, RecomputedInput) else x.get()
