"""`longspan.compile_layers`: torch.compile for the layers of a parallelized model."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from longspan.hf.state import state_of
from longspan.memory.checkpointing import COMPILED, CheckpointedLayer, forward_of


def compile_layers(model: nn.Module, **options: Any) -> None:
    """Compile the decoder layers of a parallelized model with `torch.compile`, for training.

    Each layer is compiled by itself, inside its activation checkpoint. Graphs break at attention, at collectives and at
    modules that run tile by tile: these run uncompiled, so every memory option stays, and no logits are computed.
    Without gradients, in `model.eval()` and in generation, layers are not compiled.

        model = longspan.parallelize(model, sp, memory="longest")
        longspan.compile_layers(model, dynamic=True)

    Args:
        model: as `longspan.parallelize` returned it.
        options: of `torch.compile`; not `fullgraph=True`, as there are several graphs.

    Raises:
        LongspanError: for a model that is not parallelized.
    """
    state = state_of(model)
    compiled = functools.cache(lambda forward: torch.compile(forward, **options))  # once for all layers of a class
    for layer in state.memory.layers:
        setattr(layer, COMPILED, compiled(type(layer).forward))
        if not isinstance(layer.forward, CheckpointedLayer):
            layer.forward = lambda *args, layer=layer, **kwargs: forward_of(layer)(layer, *args, **kwargs)
