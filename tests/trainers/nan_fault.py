"""Non-finite numbers that tests plant in a model."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

NAN = float("nan")


def poison(x: Tensor) -> Tensor:
    """Return `x` with one NaN; its gradient does not change."""
    at = torch.zeros_like(x)
    at.view(-1)[3] = NAN
    return x + at


class NaNFault:
    """Hooks on one rank that make one value NaN."""

    def __init__(self, kind: str, model: Any, rank: int) -> None:
        layer = model.model.layers[1]
        self.handles: list[Any] = []
        if dist.get_rank() != rank:
            return
        if kind == "activation":
            self.handles = [layer.mlp.up_proj.register_forward_hook(lambda m, a, out: poison(out))]
        elif kind == "attention":  # between two modules, in received values
            self.handles = [layer.self_attn.o_proj.register_forward_pre_hook(lambda m, args: (poison(args[0]),))]
        elif kind == "logits":
            self.handles = [model.lm_head.register_forward_hook(lambda m, a, out: out * float("inf"))]
        elif kind == "gradient":
            self.handles = [layer.mlp.register_forward_hook(self._poison_backward)]
        elif kind == "parameter":
            self.handles = [layer.mlp.down_proj.register_forward_pre_hook(self._poison_weight)]
        elif kind == "weight":
            p = layer.self_attn.k_proj.weight
            local = p.to_local() if hasattr(p, "to_local") else p
            local.detach().view(-1)[5] = float("inf")

    def _poison_backward(self, module: Any, args: Any, out: Tensor) -> Tensor:
        out = out.clone()
        out.register_hook(poison)
        return out

    def _poison_weight(self, module: Any, args: Any) -> None:
        self.handles.append(module.weight.register_hook(poison))

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()
