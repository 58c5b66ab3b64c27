"""Recurrent layers and short convolutions of a transformers model, run on fragments of a sharded sequence.

transformers' layers call functions of their modelling file: `causal_conv1d_fn`, `torch_chunk_gated_delta_rule`,
`mamba2_chunk_scan` and a few more. Each layer's instance gets a copy of its class's forward whose globals have those of
`mixer_functions.py` in their place. These run the original function on each fragment, and pass states and halos between
ranks (`longspan.mixers`). Layers that call no such function (MiniMax, RecurrentGemma) have methods replaced, on the
instance. Neither the class nor the module is changed.

A recurrent layer starts at the first real token of a row, and of a document: padding is outside of all fragments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from longspan.compat.torch_api import not_compiled
from longspan.compat.transformers_api import forward_with, mixer_functions
from longspan.core.errors import LongspanError
from longspan.hf.batch import SequenceInfo
from longspan.hf.forward.mixer_functions import READ_PADDING, REPLACEMENTS, no_shortcut
from longspan.hf.forward.stage import ForwardCall, Stage
from longspan.hf.support import HELP, attention_layers, decoder_layers, mixer_layers
from longspan.mixers.fragments import FragmentTable, fragment_table
from longspan.mixers.mixer import Mixer, Tokens
from longspan.mixers.state_passing import run_mixer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from longspan.comm.mesh import SequenceSharding


class MixerLayers(Stage):
    """The recurrent layers and short convolutions of a model; raise if one was bypassed.

    Attributes:
        layers: in the order of the model.
        info: of the forward in progress, for models that do not pass on keyword arguments (Mamba).
    """

    def __init__(self, model: PreTrainedModel, sp: SequenceSharding) -> None:
        self.name = type(model).__name__
        self.info: SequenceInfo | None = None
        self.layers = [MixerBinding(path, module, sp) for path, module in mixer_layers(model).items()]
        for layer in decoder_layers(model):
            if mixer_layers(layer) and not attention_layers(layer):
                layer.register_forward_pre_hook(self._carry, with_kwargs=True)

    def check(self, call: ForwardCall) -> None:
        if self.layers and call.info.visible is not None:
            raise LongspanError(
                f"`attention_mask` has zeros between the ones of a row, and the recurrent layers of {self.name} "
                f"({self.layers[0].name}, ...) would read those tokens; move padding to the ends of the rows"
            )
        unmasked = [layer.name for layer in self.layers if not READ_PADDING.isdisjoint(layer.functions)]
        padded = [b for b, row in enumerate(call.info.segments or ()) if row and row[0][0] > 0]
        if unmasked and padded:
            raise LongspanError(
                f"row {padded[0]} of the batch begins with padding, and in transformers the recurrent layers of "
                f"{self.name} ({unmasked[0]}, ...) read padding as if it were tokens; move it to the ends of the rows"
            )

    def before(self, call: ForwardCall) -> None:
        self.info = call.info

    def after(self, call: ForwardCall, output: Any) -> Any:
        bypassed = [layer for layer in self.layers if layer.missing]
        if bypassed:
            raise LongspanError(
                f"layer {bypassed[0].name} of {self.name} ({len(bypassed)} of {len(self.layers)} layers) did not call "
                f"{', '.join(sorted(bypassed[0].missing))}; {HELP}"
            )
        return output

    def reset(self) -> None:
        self.info = None

    def _carry(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Pass the batch's facts to a layer's mixer, in place of the mask, which is None or all ones here.

        Some layers drop keyword arguments, and all pass on the mask. A checkpoint of the layer saves it, too.
        """
        info = kwargs.get("longspan", self.info)
        if info is None or "attention_mask" not in kwargs:
            return args, kwargs
        return args, {**kwargs, "attention_mask": _Carried(info)}


@dataclass(frozen=True)
class _Carried:
    """Stands for the mask of a layer, and carries the facts of its batch."""

    info: SequenceInfo


class MixerBinding:
    """Replaces the `forward` of a recurrent layer or short convolution.

    Attributes:
        name: of the module.
        info: of the call in progress. It arrives with the call, as a checkpoint may run the layer after the next batch
            has started.
        missing: functions that the layer's last call should have called, and did not.
    """

    def __init__(self, name: str, module: nn.Module, sp: SequenceSharding) -> None:
        self.name, self.sp = name, sp
        self.group = sp.group if sp.size > 1 else None
        self.info: SequenceInfo | None = None
        self.functions = mixer_functions(module)
        self.missing = self.wanted = {name for name in self.functions if REPLACEMENTS[name] is not no_shortcut}
        self.compute = forward_with(module, {name: self._replaced(name) for name in self.functions})
        # On the instance, so that hooks around `__call__` still run; and a compiler must not move collectives.
        module.forward = not_compiled(self._forward)

    def _replaced(self, name: str) -> Callable[..., Any]:
        ours, original = REPLACEMENTS[name], self.functions[name]

        def function(*args: Any, **kwargs: Any) -> Any:
            self.missing = self.missing - {name}
            return ours(self, original, *args, **kwargs)

        return function

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        info, mask = kwargs.pop("longspan", None), kwargs.get("attention_mask")
        if isinstance(mask, _Carried):
            info, kwargs["attention_mask"] = mask.info, None
        if not isinstance(info, SequenceInfo):
            raise LongspanError(
                f"layer {self.name} was called without the keyword arguments of the model's forward, so it does not "
                f"know its batch; {HELP}"
            )
        outer, self.info, self.missing = self.info, info, self.wanted
        try:
            return self.compute(*args, **kwargs)
        finally:
            self.info = outer

    def table(self, batch: int) -> FragmentTable:
        """Return my fragments of the batch, made once per batch: thousands of documents are not hashed per layer."""
        assert self.info is not None
        key = "fragments", self.sp.layout, self.sp.rank, batch
        if key not in self.info.plans:
            self.info.plans[key] = fragment_table(*key[1:3], self.info.length, batch, self.info.segments)
        table: FragmentTable = self.info.plans[key]
        return table

    def run(self, mixer: Mixer, tokens: Tokens) -> Tensor:
        """Run a mixer on my tokens."""
        try:
            out, _ = run_mixer(mixer, tokens, self.table(tokens.v.shape[0]), self.group)
        except LongspanError as error:
            raise LongspanError(f"layer {self.name}: {error}") from error
        return out
