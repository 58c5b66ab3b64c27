"""The stages around a model's layers: memory options, and attention layers that must all have run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from longspan.comm.errors import on_every_rank
from longspan.core.errors import LongspanError
from longspan.hf.forward.stage import ForwardCall, Stage

if TYPE_CHECKING:
    from longspan.comm.mesh import SequenceSharding
    from longspan.hf.forward.binding import ModelBinding
    from longspan.hf.memory_options import MemoryManager


class MemoryOptions(Stage):
    """Choose memory options for the batch (`memory="auto"`) and reserve room for what its layers save."""

    def __init__(self, memory: MemoryManager, sp: SequenceSharding) -> None:
        self.memory, self.sp = memory, sp

    def check(self, call: ForwardCall) -> None:
        assert call.tokens is not None
        if call.model.training:
            self.memory.check()
            self.memory.reserve(call.model, call.tokens)

    def before(self, call: ForwardCall) -> None:
        model, tokens = call.model, call.tokens
        assert tokens is not None
        if model.training and self.memory.choose(call.info.length, len(tokens)):
            on_every_rank(lambda: self.memory.reserve(model, tokens), self.sp.mesh_group)
        self.memory.keep_routing(call.wants_router_loss)


class AttentionLayers(Stage):
    """Tell length-dependent RoPEs the largest position; raise if an attention layer bypassed longspan."""

    def __init__(self, binding: ModelBinding, name: str) -> None:
        self.binding, self.name = binding, name

    def before(self, call: ForwardCall) -> None:
        self.binding.max_position = call.info.max_position

    def after(self, call: ForwardCall, output: Any) -> Any:
        layers = self.binding.layers
        bypassed = [layer.name for layer in layers if not layer.seen]
        if bypassed:
            raise LongspanError(
                f"layer {bypassed[0]} of {self.name} ({len(bypassed)} of {len(layers)} layers) did not call its "
                f"attention through transformers' registry; it cannot be sharded in this version"
            )
        return output
