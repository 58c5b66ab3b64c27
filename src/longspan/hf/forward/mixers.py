"""Recurrent layers and short convolutions of a transformers model, run on fragments of a sharded sequence.

transformers' layers call functions of their modelling file: `causal_conv1d_fn`, `torch_chunk_gated_delta_rule`,
`mamba2_chunk_scan` and a few more. Each layer's instance gets a copy of its class's forward whose globals have those of
`mixer_functions.py` in their place. These run the original function on each fragment, and pass states and halos between
ranks (`longspan.mixers`). A layer that calls no such function (MiniMax) has its forward replaced. Neither
the class nor the module is changed.

A recurrent layer starts at the first real token of a row, and of a document: padding is outside of all fragments.

With a cache, the prompt is read in the same way, from the state of the tokens before it (`RecurrentLayer`). Every rank
then computes each generated token by the layer's own update, which sends nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn

from longspan.cache.recurrent import RecurrentLayer
from longspan.compat.reading import attention_layers, decoder_layers, mixer_layers
from longspan.compat.torch_api import not_compiled
from longspan.compat.transformers_api import forward_with, mixer_functions
from longspan.core.errors import LongspanError
from longspan.core.layout import Layout
from longspan.hf.batch.shard import SequenceInfo, carry_info, take_info
from longspan.hf.cache.kv_cache import CachedInfo, ShardedCache
from longspan.hf.forward.mixer_functions import REPLACEMENTS, no_shortcut
from longspan.hf.forward.stage import ForwardCall, Stage
from longspan.hf.model.support import HELP
from longspan.mixers.fragments import FragmentTable, fragment_table
from longspan.mixers.mixer import Mixer, Tokens
from longspan.mixers.short_conv import run_short_conv
from longspan.mixers.state_passing import pass_states

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class MixerLayers(Stage):
    """The recurrent layers and short convolutions of a model; raise if one was bypassed."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.info: SequenceInfo | None = None  # for models that do not pass on keyword arguments (Mamba)
        self.layers = [MixerBinding(path, module) for path, module in mixer_layers(model).items()]

        def carry(layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            return args, carry_info(kwargs, self.info)

        for layer in decoder_layers(model):
            if mixer_layers(layer) and not attention_layers(layer):
                layer.register_forward_pre_hook(carry, with_kwargs=True)

    def check(self, call: ForwardCall) -> None:
        if self.layers and call.cache is None and call.info.nodes is not None:
            raise LongspanError(
                f"the recurrent layers of {call.traits.name} ({self.layers[0].name}, ...) read tokens one after the "
                f"other, and a tree (`tin` and `tout`) has several tokens after one; give each sequence by itself"
            )
        if self.layers and call.info.visible is not None:
            raise LongspanError(
                f"`attention_mask` has zeros between the ones of a row, and the recurrent layers of {call.traits.name} "
                f"({self.layers[0].name}, ...) would read those tokens; move padding to the ends of the rows"
            )

    def before(self, call: ForwardCall) -> None:
        self.info = call.info

    def after(self, call: ForwardCall, output: Any) -> Any:
        bypassed = [layer for layer in self.layers if layer.missing]
        if bypassed:
            raise LongspanError(
                f"layer {bypassed[0].name} of {call.traits.name} ({len(bypassed)} of {len(self.layers)} layers) did "
                f"not call {', '.join(sorted(bypassed[0].missing))}; {HELP}"
            )
        return output

    def reset(self) -> None:
        self.info = None


class MixerBinding:
    """Replaces the `forward` of a recurrent layer or short convolution."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        # Of the call in progress, with which it arrives: a checkpoint may run a layer after the next batch has started.
        self.info: SequenceInfo | None = None
        self.cached: RecurrentLayer | None = None  # the layer's state, in a forward with a cache
        self.functions = mixer_functions(module)
        self.wanted = {name for name in self.functions if REPLACEMENTS[name] is not no_shortcut}
        self.calls = Counter(self.wanted)  # of each function in the layer's last call
        self.compute = forward_with(module, {name: self._replaced(name) for name in self.functions})
        for part in module.modules():
            if isinstance(part, nn.Conv1d | nn.Conv2d | nn.RNNBase):
                part.register_forward_pre_hook(self._refuse)
        # On the instance, so that hooks around `__call__` still run; and a compiler must not move collectives.
        module.forward = not_compiled(self._forward)

    def _replaced(self, name: str) -> Callable[..., Any]:
        ours, original = REPLACEMENTS[name], self.functions[name]

        def function(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            return ours(self, original, *args, **kwargs)

        return function

    def _refuse(self, part: nn.Module, args: Any) -> None:
        raise LongspanError(
            f"layer {self.name} calls a {type(part).__name__}, which would see the tokens of one rank only; convolve "
            f"by causal_conv1d_fn of its file, which is sharded"
        )

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        info = take_info(self.name, kwargs)
        outer, self.info, self.calls = (self.info, self.cached), info, Counter()
        if isinstance(info, CachedInfo):
            self.cached = cached = info.cache.recurrent_layer(self.name)
            cached.begin(info.updates_states)
            args = tuple(cached if isinstance(x, ShardedCache) else x for x in args)
            kwargs = {name: cached if isinstance(x, ShardedCache) else x for name, x in kwargs.items()}
        try:
            return self.compute(*args, **kwargs)
        finally:
            if self.cached is not None and self.cached.is_read:
                self.calls = Counter(self.wanted)  # its own update calls other functions
            self.info, self.cached = outer

    @property
    def missing(self) -> set[str]:
        """Functions that the layer should have called, and did not."""
        return self.wanted - self.calls.keys()

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks that share the tokens of the call in progress; None for one."""
        assert self.info is not None
        return self.info.sp.group if self.info.sp.size > 1 and self.info.sharded else None

    def table(self, batch: int) -> FragmentTable:
        """Return my fragments of the batch, made once per batch: thousands of documents are not hashed per layer."""
        info = self.info
        assert info is not None
        key = "fragments", batch
        if key not in info.prepared:
            layout, rank = (info.sp.layout, info.sp.rank) if info.sharded else (Layout(), 0)
            info.prepared[key] = fragment_table(layout, rank, info.new, batch, info.new_segments)
        table: FragmentTable = info.prepared[key]
        return table

    def _check_one_state(self, functions: set[str] | None = None) -> None:
        """Raise if the layer has called a function twice, whose states a cache would confuse."""
        twice = next(
            (name for name, calls in self.calls.items() if calls > 1 and name in (functions or self.calls)), None
        )
        if twice is not None:
            raise LongspanError(
                f"layer {self.name} calls {twice} twice, and a cache holds one state per layer; the model trains and "
                f"scores, but cannot generate: call it without a cache"
            )

    def convolve(self, convolution: Callable[[Tensor], Tensor], size: int, x_BCT: Tensor) -> Tensor:
        """Run a causal convolution of `[rows, channels, tokens]`, which looks back at `size` tokens, on my tokens."""
        cached, initial = self.cached, None
        if cached is not None:
            self._check_one_state({"causal_conv1d_fn"})
            initial = None if cached.conv is None else cached.conv.mT
        table = self.table(x_BCT.shape[0])
        out_BTC, last_BXC = run_short_conv(
            convolution, size, x_BCT.mT, table, self.group, initial=initial, return_last=cached is not None
        )
        if cached is not None and last_BXC is not None:
            cached.conv = last_BXC.mT.contiguous()
        return out_BTC.mT

    def run_from_state(self, mixer: Mixer, tokens: Tokens) -> tuple[Tensor, Tensor | None]:
        """Run a mixer from the cached state, if there is a cache, and store the state after its last token."""
        if self.cached is None:
            return self.run(mixer, tokens, None)
        self._check_one_state()
        out, self.cached.recurrent = self.run(mixer, tokens, self.cached.recurrent)
        return out, self.cached.recurrent

    def run(self, mixer: Mixer, tokens: Tokens, initial_state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Run a mixer on my tokens, and with a cache return the state after the last token."""
        table = self.table(tokens.v.shape[0])
        try:
            return pass_states(
                mixer, tokens, table, self.group, initial_state=initial_state, return_state=self.cached is not None
            )
        except LongspanError as error:
            raise LongspanError(f"layer {self.name}: {error}") from error
