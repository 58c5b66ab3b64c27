"""Activation checkpointing per layer, in which attention need not be recomputed.

A layer saves its input, and the backward recomputes the layer (Chen et al. 2016, arXiv:1604.06174; torch's
non-reentrant checkpoint). The expensive part is attention: an all-to-all, a ring, a kernel whose cost is quadratic in
the length. So with "selective" a layer also saves its attention's output and log-sum-exp, and no kernel runs again
(`longspan.attn.methods.head_chunks`).

What is saved may be offloaded. With "grouped", a group of layers saves only the input of its first layer; the backward
recomputes the other inputs, each of which is the previous layer's output.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

from longspan.compat.torch_api import graph_is_kept, not_compiled, version_of
from longspan.core.errors import LongspanError
from longspan.core.memory import FASTEST, Memory

if TYPE_CHECKING:
    from longspan.memory.offload.store import Store


SMALL = 4096
"""Bytes up to which a tensor is not worth offloading."""


Stored = Callable[[], Tensor]
"""Returns a saved tensor on its device, wherever it is."""


def put(store: Store | None, tensor: Tensor) -> Stored:
    """Offload a tensor to the store, if there is one and the tensor is not small."""
    tensor = tensor.detach()  # avoid a reference cycle with the node that holds this
    return (lambda: tensor) if store is None or tensor.nbytes < SMALL else store.put(tensor).get


class SavedAttention:
    """The tensors that one attention saves."""

    def __init__(self, stored: Sequence[Stored]) -> None:
        self.stored = stored
        self.fetched: list[Tensor] | None = None

    def tensors(self) -> list[Tensor]:
        """Return the tensors on their device; fetch them once for the layer's recomputation and its backward."""
        if self.fetched is None:
            self.fetched = [get() for get in self.stored]
        return self.fetched

    def drop(self) -> None:
        """Release the fetched tensors. A second backward, of a retained graph, fetches them again."""
        self.fetched = None

    def release(self) -> None:
        """Free the tensors after their backward, unless the graph is kept for another one."""
        self.drop()
        if not graph_is_kept():
            self.stored = ()


class LayerCall:
    """One call of a checkpointed layer: implements `SavedAttentions` for its attentions."""

    def __init__(self, layer: CheckpointedLayer, inputs: _Inputs) -> None:
        self.layer, self.inputs, self.checkpointing = layer, inputs, layer.memory.checkpointing
        self.recomputing = False
        self.next = 0  # the attention that is recomputed next
        self.index = 0  # of the layer in its group
        self._values, self._returned = list[Any](), 0  # of `once`; how many a recomputation has got back
        self._runs_again = False
        self._saved: list[SavedAttention] = []  # in the order of the attentions' calls

    def save(self, tensors: Sequence[Tensor]) -> SavedAttention:
        """Save the tensors of the attention that runs."""
        self._saved.append(SavedAttention([put(self.layer.store, x) for x in tensors]))
        return self._saved[-1]

    def load_next(self) -> SavedAttention:
        """Return what the next attention saved in the forward."""
        if self.next == len(self._saved):
            raise LongspanError(
                f"a checkpointed layer called {len(self._saved)} attentions in its forward and calls another one when "
                f"recomputed, so it does not compute the same twice; use checkpointing='full' or 'none'"
            )
        self.next += 1
        return self._saved[self.next - 1]

    def once(self, compute: Callable[[], Any]) -> Any:
        """Return what `compute` returns in the forward, and the same value, in the same order, in a recomputation."""
        if not self._runs_again:
            self._values.append(compute())
            return self._values[-1]
        self._returned += 1
        if self._returned > len(self._values):
            raise LongspanError(
                f"a checkpointed layer called its experts {len(self._values)} times in its forward and more often when "
                f"recomputed, so it does not compute the same twice; use checkpointing='none'"
            )
        return self._values[self._returned - 1]

    def forward(self) -> Any:
        """Compute the layer, or recompute it with gradients."""
        if self.recomputing:
            return self._compute(self.inputs.for_recompute(), again=True)
        return self._compute(self.inputs.for_forward(), again=False)

    def _compute(self, arguments: tuple[list[Any], dict[str, Any]], *, again: bool) -> Any:
        positional, named = arguments
        self._runs_again, self._returned = again, 0
        with self.layer.experts_in(self):
            return self.layer.compute(*positional, **named)

    def hidden(self, *, next_in_backward: bool) -> Tensor:
        """Recompute the layer's hidden states without gradients."""
        arguments, module = self.inputs.peek(), self.layer.layer
        if isinstance(module, FSDPModule):
            module.unshard()
        try:
            with torch.no_grad():
                out: Tensor = _hidden(self._compute(arguments, again=True))
                return out
        finally:
            if isinstance(module, FSDPModule) and not next_in_backward:
                module.reshard()


class _Bound(contextlib.AbstractContextManager[None]):
    """Lets the layer's attentions save into a call, or load from it.

    A class, as torch enters it again for every backward of a retained graph.
    """

    def __init__(self, call: LayerCall, *, recomputing: bool) -> None:
        self.call, self.recomputing = call, recomputing

    def __enter__(self) -> None:
        self.call.recomputing, self.call.next = self.recomputing, 0
        if self.call.checkpointing == "selective":
            self.call.layer.bind(self.call)

    def __exit__(self, *_: object) -> None:
        self.call.layer.bind(None)


COMPILED = "longspan_compiled"
"""Attribute of a layer that holds its compiled forward, if it has one (`longspan.compile_layers`)."""


EXPERTS = "longspan_experts"
"""Attribute of a module whose experts are on several ranks."""


def forward_of(layer: nn.Module) -> Callable[..., Any]:
    """Return the function that computes a layer, which is its first argument: the compiled one in training."""
    compiled = layer.__dict__.get(COMPILED) if layer.training else None
    # Look the class up at each call: FSDP replaces it.
    return compiled or type(layer).forward


class CheckpointedLayer:
    """Replaces a layer's `forward` by one that saves its input only. Hooks around its call, FSDP's too, run outside.

    While it runs, each of its `attentions` has the `LayerCall` that saves what it computes as `layer_call`. `draws`:
    whether the layer draws random numbers, which must be the same when it is recomputed.
    """

    def __init__(self, layer: nn.Module, attentions: Sequence[Any], groups: LayerGroups, *, draws: bool) -> None:
        self.layer, self.attentions, self.groups, self.draws = layer, attentions, groups, draws
        self.memory: Memory = FASTEST
        self.store: Store | None = None
        self._checkpointed = not_compiled(self._checkpoint)  # a compiler breaks its graph here
        layer.forward = self  # on the instance, so that hooks around `__call__` still run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        off = self.memory.checkpointing == "none"
        if off or not torch.is_grad_enabled() or not self.layer.training:
            return self.compute(*args, **kwargs)
        return self._checkpointed(*args, **kwargs)

    def compute(self, *args: Any, **kwargs: Any) -> Any:
        return forward_of(self.layer)(self.layer, *args, **kwargs)

    def bind(self, call: LayerCall | None) -> None:
        for attention in self.attentions:
            attention.layer_call = call

    @functools.cached_property
    def experts(self) -> list[Any]:
        """The layer's experts that are on other ranks: `ExpertParallel`."""
        found = (module.__dict__.get(EXPERTS) for module in self.layer.modules())
        return [experts for experts in found if experts is not None]

    @contextlib.contextmanager
    def experts_in(self, call: LayerCall) -> Iterator[None]:
        """Let the layer's experts save in `call` what its recomputation needs."""
        for experts in self.experts:
            experts.layer_call = call
        try:
            yield
        finally:
            for experts in self.experts:
                experts.layer_call = None

    def _checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        if self.store is not None:
            self.store.start_layer()
        inputs = _Inputs(args, kwargs, self.store, self.groups.previous_output(self, [*args, *kwargs.values()]))
        call = LayerCall(self, inputs)
        out = checkpoint(
            lambda _: call.forward(),
            inputs.anchor,  # tells torch the device
            use_reentrant=False,
            preserve_rng_state=self.draws,
            context_fn=lambda: (_Bound(call, recomputing=False), _Bound(call, recomputing=True)),
        )
        self.groups.record(call, out)
        return out


# ---------------------------------------------------------------------------------------------------------------------
# Groups of layers that share one saved input.


class LayerGroups:
    """Remembers the previous layer call during a forward, to find layers whose input is the previous layer's output.

    A group has `per_checkpoint` layers; `last` is the model's last layer.
    """

    def __init__(self, per_checkpoint: int = 1, last: nn.Module | None = None) -> None:
        self.per_checkpoint, self.last = per_checkpoint, last
        self._call: LayerCall | None = None
        self._output: Tensor | None = None
        self._version = 0

    def previous_output(self, layer: CheckpointedLayer, values: Sequence[Any]) -> RecomputedInput | None:
        """Return a layer's input as the previous layer's output; None if the layer starts a group."""
        call, output, self._call, self._output = self._call, self._output, None, None
        if call is None or output is None or call.index + 1 >= self.per_checkpoint:
            return None
        if layer.draws or call.layer.draws:
            return None
        inputs = [x for x in values if isinstance(x, Tensor) and x.requires_grad]
        # FSDP passes on another tensor object with the same memory.
        if len(inputs) != 1 or inputs[0].data_ptr() != output.data_ptr() or inputs[0].shape != output.shape:
            return None
        if inputs[0].stride() != output.stride() or inputs[0].dtype != output.dtype:
            return None
        return RecomputedInput(call) if version_of(output) == self._version else None

    def record(self, call: LayerCall, out: Any) -> None:
        """Remember a call and its output until the next layer runs."""
        hidden = _hidden(out)
        if self.per_checkpoint == 1 or call.layer.layer is self.last or not isinstance(hidden, Tensor):
            return
        previous = call.inputs.recomputed
        call.index = 0 if previous is None else previous.call.index + 1
        self._call, self._output, self._version = call, hidden.detach(), version_of(hidden)


def _hidden(out: Any) -> Any:
    """Return the hidden states in a layer's output."""
    return out[0] if isinstance(out, tuple) else out


class RecomputedInput:
    """A layer's input that is not saved, but recomputed as the previous layer's output.

    This also recomputes the inputs between the group's first layer and this one. They stay until their own layers,
    whose backwards come next, have used them.
    """

    def __init__(self, call: LayerCall) -> None:
        self.call = call  # of the previous layer
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
            self._value = self.call.hidden(next_in_backward=next_in_backward)
        return self._value


class _Inputs:
    """A layer's arguments. Those that need a gradient may be offloaded or recomputed; all layers share the others."""

    def __init__(
        self, args: Sequence[Any], named: Mapping[str, Any], store: Store | None, recomputed: RecomputedInput | None
    ) -> None:
        self.recomputed = recomputed  # stands for the one input that needs a gradient
        self.original: tuple[Any, ...] | None = (*args, *named.values())
        self.anchor = next(x for x in self.original if isinstance(x, Tensor)).new_empty(0)
        self.names, self.count = tuple(named), len(args)
        self.needs_grad = [isinstance(x, Tensor) and x.requires_grad for x in self.original]
        pairs = zip(self.original, self.needs_grad, strict=True)
        self.saved = [(recomputed.get if recomputed else put(store, x)) if needs else x for x, needs in pairs]

    def for_forward(self) -> tuple[list[Any], dict[str, Any]]:
        """Return views of the inputs.

        A norm that made an input can recompute it, so linear layers would save other tensors than in the recomputation,
        where the input has no history. A view has none in either run.
        """
        original, self.original = self.original, None
        assert original is not None
        return self._as_arguments(original, lambda x: x.view_as(x))

    def for_recompute(self) -> tuple[list[Any], dict[str, Any]]:
        """Return the inputs as leaves that need a gradient."""
        return self._as_arguments(self.saved, lambda get: get().detach().requires_grad_())

    def peek(self) -> tuple[list[Any], dict[str, Any]]:
        """Return the inputs for a run without gradients before the layer's own recomputation."""
        recomputed = self.recomputed
        return self._as_arguments(self.saved, lambda get: recomputed.peek() if recomputed else get())

    def _as_arguments(self, values: Sequence[Any], tensor: Callable[[Any], Tensor]) -> tuple[list[Any], dict[str, Any]]:
        out = [tensor(x) if needs else x for x, needs in zip(values, self.needs_grad, strict=True)]
        return out[: self.count], dict(zip(self.names, out[self.count :], strict=True))
