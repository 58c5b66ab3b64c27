"""Linear layers that torchao has converted to float8: they round on several ranks as on one.

A scale per token needs nothing. One scale for all tokens is that of the largest entry over all ranks, so no tile, no
padding and no layer that only some ranks run may be among them. FSDP's float8 all-gather is torchao's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor

from longspan.comm.weights import FLOAT8_PER_TOKEN
from longspan.compat.friends_api import (
    float8_layers,
    float8_scales_span_tokens,
    has_one_float8_scale,
    share_float8_scales,
)
from longspan.compat.reading import mixer_layers, tower_modules
from longspan.core.errors import LongspanError
from longspan.hf.forward.stage import ForwardCall, Stage

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from longspan.comm.mesh import SequenceSharding


def check_float8(model: PreTrainedModel, sp: SequenceSharding) -> None:
    """Raise for linear layers in float8 that would round differently than on one device."""
    layers = float8_layers(model)
    head = next((path for path, layer in layers.items() if layer is model.get_output_embeddings()), None)
    if head is not None:
        raise LongspanError(
            f"{head} is in float8, but the loss multiplies tiles of tokens by its weight as it is; leave it out: "
            "convert_to_float8_training(model, module_filter_fn=lambda module, name: name != "
            f"{head!r})"
        )
    if layers and sp.tensor_size > 1:
        raise LongspanError(
            f"layer {next(iter(layers))} is in float8, whose scales span the features that `tensor={sp.tensor_size}` "
            f"shards; use `ulysses={sp.ulysses_size * sp.tensor_size}` instead"
        )
    spanning = {path: layer for path, layer in layers.items() if float8_scales_span_tokens(layer)}
    if sp.fsdp_size == 1 or not spanning:
        return
    partial = {*tower_modules(model), *(x for layer in mixer_layers(model).values() for x in layer.modules())}
    for path, layer in spanning.items():
        if layer in partial:
            raise LongspanError(
                f"layer {path} is in float8 with a scale over all tokens, and not every rank runs it on the same "
                f"tokens; leave it out by module_filter_fn, or use {FLOAT8_PER_TOKEN}"
            )
        if not has_one_float8_scale(layer):
            raise LongspanError(
                f"layer {path} is in float8 with scales over all tokens of a feature, but each rank would round its "
                f'tokens by its own scale; use the recipe "tensorwise", or {FLOAT8_PER_TOKEN}'
            )


class SharedScales(Stage):
    """Lets float8 layers with one scale for all tokens round by the largest entry over all ranks."""

    @staticmethod
    def of(model: PreTrainedModel, sp: SequenceSharding) -> SharedScales | None:
        """Share the scales of a model's layers; None if there are none to share."""
        layers = [layer for layer in float8_layers(model).values() if float8_scales_span_tokens(layer)]
        if sp.fsdp_size == 1 or not layers:
            return None

        def reduce(largest: Tensor) -> None:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=sp.fsdp_group)

        for layer in layers:
            share_float8_scales(layer, reduce)
        return SharedScales()

    def check(self, call: ForwardCall) -> None:
        info = call.info
        padded = info.local_length * info.sp.size
        if info.elastic or (info.sharded and padded != info.new):
            what = "elastic batches give ranks other" if info.elastic else f"{info.new} tokens would be padded to"
            fix = "leave out `elastic`" if info.elastic else f"pad the batch to {padded} (pad_to_multiple_of)"
            raise LongspanError(
                f"float8 layers have one scale for all tokens, and {what} {'tokens' if info.elastic else padded}; "
                f"{fix}, or use {FLOAT8_PER_TOKEN}"
            )
