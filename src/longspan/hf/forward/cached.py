"""The stage of a forward with a KV cache: a chunk of a prompt, or generated tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from longspan.comm.consistency import is_on_cpu
from longspan.compat.torch_api import not_compiled
from longspan.hf.forward.binding import check_positions
from longspan.hf.forward.kv_cache import CachedInfo, NewTokens, last_tokens
from longspan.hf.forward.shard_batch import check_ids
from longspan.hf.forward.stage import ForwardCall, ModelTraits, Stage

if TYPE_CHECKING:
    from longspan.comm.mesh import SequenceSharding
    from longspan.hf.tensor_parallel.layers import TensorParallel


class CachedTokens(Stage):
    """Shard the new tokens and append them to the cache.

    Args:
        traits: of the model.
        sp: the sharding.
        tensor: the tensor axis, if there is one.
    """

    def __init__(self, traits: ModelTraits, sp: SequenceSharding, tensor: TensorParallel | None) -> None:
        self.traits, self.sp, self.tensor = traits, sp, tensor
        self.new: NewTokens | None = None
        self.info: CachedInfo | None = None

    def reset(self) -> None:
        self.new = self.info = None

    def check(self, call: ForwardCall) -> None:
        assert call.cache is not None
        positions = self.traits.positions(call.batch, call.cache.kv_placement.length)
        self.new = call.cache.read({**call.batch, "position_ids": positions})
        if is_on_cpu(call.batch):
            check_ids(call.model, call.batch, self.traits)
        check_positions(call.model, self.new.max_position)

    def before(self, call: ForwardCall) -> None:
        assert call.cache is not None and self.new is not None
        inputs, self.info = call.cache.begin(call.batch, self.new)
        call.inputs = {**inputs, self.traits.cache_name: call.cache}

    def after(self, call: ForwardCall, output: Any) -> Any:
        assert call.cache is not None
        call.cache.end()
        self.reset()
        return output

    @not_compiled
    def keep_last(self, decoder: nn.Module, args: Any, output: Any) -> Any:
        """Hook behind the decoder: return hidden states of the last tokens only, if only their logits are needed."""
        info = self.info
        if info is None or not info.keep:
            return output
        if self.tensor is not None:
            hidden = self.tensor.last_tokens(output[0], info)
        else:
            hidden = last_tokens(output[0], info, self.sp)
        if isinstance(output, tuple):
            return hidden, *output[1:]
        output["last_hidden_state"] = hidden
        return output
