"""The levers of memory on a Hugging Face model: which of its modules are checkpointed, and which run tile by tile."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from longspan.core.buckets import mlp_rows, norm_rows
from longspan.core.errors import LongspanError
from longspan.core.memory import Memory
from longspan.hf.registry import LayerBinding
from longspan.hf.support import attention_layers, decoder_layers
from longspan.memory.checkpointing import CheckpointedLayer, LayerCall
from longspan.memory.tiles import Tiled

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel

    from longspan.memory.offload import Store


class Levers:
    """What `parallelize` does to a model for its memory's sake, and what each forward asks of it.

    Args:
        model: the transformers model, its attention layers bound, before FSDP.
        memory: the levers.
        store: where what checkpointing keeps lies; None: where it is.

    Raises:
        LongspanError: for a model that a lever does not fit, naming the layer.
    """

    def __init__(self, model: PreTrainedModel, memory: Memory, store: Store | None = None) -> None:
        self.memory, self.store = memory, store
        found = LeverModules(model, memory)
        self.layers = found.layers
        self.bindings = [binding for layer in found.layers for binding in _bindings(layer)]
        self.routers = any(_routes(mlp) for mlp in found.mlps)
        hidden = model.config.get_text_config().hidden_size
        for mlp in found.mlps:
            widths = [max(p.shape[-2:]) for p in mlp.parameters() if p.dim() > 1]
            rows = functools.partial(mlp_rows, hidden=hidden, width=max(widths), tiles=memory.tiled_mlp)
            Tiled(mlp, found.names[mlp], rows, draws=any(draws(module) for module in mlp.modules()))
        for norm in found.norms:
            Tiled(norm, found.names[norm], norm_rows)
        if memory.checkpointing != "none":
            for layer in found.layers:
                self._checkpoint(layer)

    def check(self, router_loss: bool) -> None:
        """Refuse a forward that does not go together with a lever.

        Args:
            router_loss: whether the model is asked for the loss of its routers.

        Raises:
            LongspanError: naming both.
        """
        if router_loss and self.routers:
            raise LongspanError(
                "output_router_logits=True needs the routers' logits of all tokens at once, and tiled_mlp="
                f"{self.memory.tiled_mlp} runs the experts tile by tile; use tiled_mlp=1, or output_router_logits=False"
            )
        enabled = any(getattr(layer, "gradient_checkpointing", False) for layer in self.layers)
        if enabled and self.memory.checkpointing != "none":
            raise LongspanError(
                f"gradient_checkpointing_enable() was called on a model that has memory.checkpointing="
                f"{self.memory.checkpointing!r}: each layer would be checkpointed twice; call "
                f"gradient_checkpointing_disable(), or parallelize with checkpointing='none'"
            )

    def reserve(self, model: PreTrainedModel, tokens: Tensor) -> None:
        """Have room in the store for what one forward keeps, before its first layer.

        Args:
            model: the model.
            tokens: ids, or embeddings, of my tokens: `[B, L, ...]`.

        Raises:
            LongspanError: there is none, with the bytes.
        """
        if self.store is None or not torch.is_grad_enabled():
            return
        config = model.config.get_text_config()
        element = next(model.parameters()).dtype.itemsize
        heads = config.num_attention_heads
        width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
        per_token = config.hidden_size * element
        if self.memory.checkpointing == "output":
            per_token += width * element + 4 * heads
        if self.memory.checkpointing == "attention":  # q, k and v of at most as many heads, output twice
            per_token += 5 * width * element + 4 * heads
        self.store.reserve(per_token * tokens.shape[:2].numel() * len(self.layers))

    def _checkpoint(self, layer: nn.Module) -> None:
        bound = _bindings(layer)

        def tell(keeper: LayerCall | None) -> None:
            for binding in bound:
                binding.keeper = keeper

        CheckpointedLayer(layer, self.memory, self.store, tell, draws=any(draws(module) for module in layer.modules()))


def _bindings(layer: nn.Module) -> list[LayerBinding]:
    found = (getattr(module, "longspan_layer", None) for module in layer.modules())
    return [binding for binding in found if isinstance(binding, LayerBinding)]


class LeverModules:
    """The modules that levers are about; nothing is changed.

    Attributes:
        layers: the decoder layers.
        mlps: parts of a layer that hold matrices and no attention, where `tiled_mlp` asks for them.
        norms: of the layers, where `tiled_norms` asks for them.
        names: of all modules.

    Raises:
        LongspanError: for a model that a lever does not fit, naming the layer.
    """

    def __init__(self, model: PreTrainedModel, memory: Memory) -> None:
        self.layers = decoder_layers(model)
        self.names = {module: name for name, module in model.named_modules()}
        self.mlps = [mlp for layer in self.layers for mlp in self._mlps(layer)] if memory.tiled_mlp != 1 else []
        self.norms = [*self._norms()] if memory.tiled_norms else []

    def _mlps(self, layer: nn.Module) -> Iterator[nn.Module]:
        attends = set(attention_layers(layer).values())
        found = [
            child
            for child in layer.children()
            if not any(module in attends for module in child.modules()) and any(p.dim() > 1 for p in child.parameters())
        ]
        if not found:
            raise LongspanError(
                f"{self.names[layer]} ({type(layer).__name__}) has no MLP of its own that could run tile by tile; use "
                f"tiled_mlp=1"
            )
        for child in found:
            if not _takes_one(child):
                raise LongspanError(
                    f"{self.names[child]} ({type(child).__name__}) is called with more than hidden states, so it "
                    f"cannot run tile by tile; use tiled_mlp=1"
                )
            yield child

    def _norms(self) -> Iterator[nn.Module]:
        for module in (module for layer in self.layers for module in layer.modules()):
            leaf = [*module.parameters()] and not [*module.children()]
            if "Norm" in type(module).__name__ and leaf and _takes_one(module):
                yield module


def _routes(mlp: nn.Module) -> bool:
    """Whether an MLP is a mixture of experts."""
    return any(
        "Router" in type(module).__name__ or hasattr(module, "num_experts") or hasattr(module, "experts")
        for module in mlp.modules()
    )


def draws(module: nn.Module) -> bool:
    """Whether a layer draws random numbers in training: dropout as a module or as a number, or a router's jitter."""
    numbers = (value for name, value in vars(module).items() if "dropout" in name or "jitter" in name)
    return (isinstance(module, nn.Dropout) and module.p > 0) or any(isinstance(p, float) and p > 0 for p in numbers)


def _takes_one(module: nn.Module) -> bool:
    """Whether a module can be called with one tensor alone, and needs no more."""
    parameters = inspect.signature(module.forward).parameters.values()
    needed = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return len(needed) == 1
