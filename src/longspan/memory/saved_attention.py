"""Attention in a checkpointed layer that saves everything and is not recomputed (`checkpointing="save_attention"`).

The attention runs once, in an inner autograd graph whose saved tensors may be offloaded. The layer's recomputation
takes the saved output. The gradient of the output enters the inner graph at its end, and the gradients of q, k and v
are caught at its start:

    layer:                q, k, v -> _SavedAttention -> out -> ...
    inner graph:  _CatchInputGradient -> plan(q, k, v)

The output's gradient is passed to the inner graph by hooks and a list: autograd holds a backward's arguments as long as
it runs, which here is all of the attention's backward.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from longspan.compat.torch_api import graph_is_kept
from longspan.memory.checkpointing import put

if TYPE_CHECKING:
    from longspan.attn.prepare import AttentionPlan
    from longspan.attn.score import Scores
    from longspan.memory.checkpointing import LayerCall, Stored


def saved_attention(plan: AttentionPlan, q: Tensor, k: Tensor, v: Tensor, scores: Scores, call: LayerCall) -> Tensor:
    """Return `plan(q, k, v, scores)`, `[B, L, H, Dv]`; run it once per layer call, and save all for the backward."""
    passed: list[Tensor] = []
    out: Tensor = _SavedAttention.apply(plan, scores, call, passed, q, k, v, scores.sinks)  # type: ignore[no-untyped-call]

    def catch(grad: Tensor) -> Tensor:
        passed.append(grad)
        return grad.new_empty(()).expand(grad.shape)  # takes no memory

    if out.requires_grad:
        out.register_hook(catch)
    return out


class _SavedAttention(torch.autograd.Function):
    """Holds the inner graph: the forward builds it, the backward runs through it."""

    @staticmethod
    def forward(
        ctx: Any, plan: AttentionPlan, scores: Scores, call: LayerCall, passed: list[Tensor], *inputs: Tensor | None
    ) -> Tensor:
        if call.recomputing:
            (out,) = call.load_next().tensors()
            return out.detach()
        ctx.grads, ctx.anchor = {}, torch.empty(0, device=inputs[0].device, requires_grad=True)  # type: ignore[union-attr]
        needs_grad = ctx.needs_input_grad[4:]
        if not any(needs_grad):  # no backward: save only what a layer that is recomputed for its MLP reads
            q, k, v, _ = inputs
            assert q is not None and k is not None and v is not None
            out = plan(q, k, v, scores)
            call.save([out])
            return out

        def inner(i: int, x: Tensor | None) -> Tensor | None:
            if x is None or not needs_grad[i]:
                return x
            entered: Tensor = _CatchInputGradient.apply(ctx.anchor, x.detach(), ctx.grads, i)  # type: ignore[no-untyped-call]
            return entered

        # Do not offload a weight: FSDP frees its storage, and fills it again.
        weight, store = None if inputs[3] is None else inputs[3].untyped_storage().data_ptr(), call.layer.store

        stored: list[_StoredTensor] = []

        def pack(x: Tensor) -> Stored:
            if x.untyped_storage().data_ptr() == weight:
                return put(None, x)
            stored.append(_StoredTensor(x, get := put(store, x)))
            return get

        with torch.enable_grad(), saved_tensors_hooks(pack, lambda get: get()):
            q, k, v, sinks = (inner(i, x) for i, x in enumerate(inputs))
            assert q is not None and k is not None and v is not None
            out = plan(q, k, v, dataclasses.replace(scores, sinks=sinks))
        out.register_hook(lambda _: passed.pop())
        ctx.edge = get_gradient_edge(out)
        # Without an all-to-all, attention saves its output, heads first. Do not store it again.
        again = next((x.stored for x in stored if x.equals(out.transpose(1, 2))), None)
        ctx.saved = call.save([out]) if again is None else call.save_stored([lambda: again().transpose(1, 2)])
        return out.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        ctx.saved.release()  # the modules after attention have used the output
        torch.autograd.grad([ctx.edge], [ctx.anchor], [grads[0]], retain_graph=graph_is_kept(), allow_unused=True)
        found = dict(ctx.grads)
        ctx.grads.clear()
        return None, None, None, None, *(found.get(i) for i in range(4))


class _StoredTensor:
    """Remembers a tensor that was stored, and does not keep it alive."""

    def __init__(self, x: Tensor, stored: Stored) -> None:
        self.stored = stored
        self._storage, self._at = weakref.ref(x.untyped_storage()), (x.data_ptr(), x.shape, x.stride(), x.dtype)

    def equals(self, x: Tensor) -> bool:
        """Whether `x` is the same tensor. A freed tensor's memory may have been allocated again."""
        return self._storage() is not None and self._at == (x.data_ptr(), x.shape, x.stride(), x.dtype)


class _CatchInputGradient(torch.autograd.Function):
    """Catches the gradient of an input. A leaf instead would keep the input alive as long as the graph."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor, grads: dict[int, Tensor], i: int) -> Tensor:
        ctx.grads, ctx.i = grads, i
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.grads[ctx.i] = grads[0]
        return grads[0].new_empty(0), None, None, None
