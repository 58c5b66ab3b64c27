"""Muon on sharded matrices, for a trainer's `optimizer_cls_and_kwargs`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from longspan.compat.torch_api import orthogonalized
from longspan.core.errors import LongspanError
from longspan.hf.model.support import transformers_model
from longspan.hf.state import is_parallelized, state_of


def muon() -> Callable[..., Muon]:
    """Return a function that makes a `Muon` for a model's trained weights; transformers calls both.

        trainer = longspan.trainer(Trainer)(..., optimizer_cls_and_kwargs=(muon, {"lr": 2e-4, "weight_decay": 0.1}))

    Weight decay applies to matrices only. Embeddings and the LM head are trained by AdamW.
    """
    return _muon_of


def _muon_of(model: nn.Module, *, weight_decay: float = 0.0, **options: Any) -> Muon:
    tables, trained = _tables(model), [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    sp = state_of(model).sp if is_parallelized(model) else None
    if sp is not None and sp.tensor_size > 1 and sp.fsdp_size > 1:
        raise LongspanError(
            f"Muon gathers a matrix from FSDP's ranks, and tensor={sp.tensor_size} shards it a second time; use "
            f"optim='adamw_torch', or tensor=1, ulysses={sp.ulysses_size * sp.tensor_size}"
        )
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {(m, d): [] for m in (False, True) for d in (True, False)}
    for name, p in trained:
        matrix = p.ndim == 2 and name.endswith("weight") and p not in tables
        groups[matrix, p.ndim >= 2 and not name.endswith("bias")].append(p)  # biases of experts are stored as a matrix
    made = {
        key: {"params": params, "weight_decay": weight_decay if key[1] else 0.0}
        for key, params in groups.items()
        if params or key == (False, True)  # torch loads at most one group without weights
    }
    others, matrices = ([group for key, group in made.items() if key[0] is matrix] for matrix in (False, True))
    if any(group["params"] for group in others):
        others = [group for group in others if group["params"]]
    return Muon(others, matrices, **options)


def _tables(model: nn.Module) -> set[nn.Parameter]:
    """Return the weights of embeddings and of the LM head."""
    inner = transformers_model(model)
    tables = [module for module in inner.modules() if isinstance(module, nn.Embedding)]
    found = [*tables, inner.get_input_embeddings(), inner.get_output_embeddings()]
    return {p for module in found if isinstance(module, nn.Module) for p in module.parameters()}


class Muon(torch.optim.Optimizer):
    """torch.optim.Muon for `matrices`, and AdamW for others: one optimizer, with one state and one schedule.

    Of a sharded matrix each rank keeps its rows of the momentum. They are gathered, as every rank orthogonalises the
    whole matrix: the same numbers as in one process. An update has the root mean square of AdamW's (0.2), as with
    torch's `adjust_lr_fn="match_rms_adamw"`.
    """

    momentum = 0.95

    def __init__(self, others: list[dict[str, Any]], matrices: list[dict[str, Any]], **options: Any) -> None:
        self.adamw = torch.optim.AdamW(others, **options)
        super().__init__([*others, *matrices], self.adamw.defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        others = len(self.adamw.param_groups)
        self.adamw.param_groups, self.adamw.state = self.param_groups[:others], self.state  # loading replaces them
        self.adamw.step()
        for group in self.param_groups[others:]:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, float(group["lr"]), group["weight_decay"])

    def _update(self, p: Tensor, lr: float, weight_decay: float) -> None:
        assert p.grad is not None
        momentum = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p.grad))
        momentum.lerp_(p.grad, 1 - self.momentum)
        update = p.grad.lerp(momentum, self.momentum)
        if isinstance(update, DTensor):
            whole = orthogonalized(update.full_tensor())
            replicated = DTensor.from_local(whole, update.device_mesh, [Replicate()] * update.device_mesh.ndim)
            update = replicated.redistribute(update.device_mesh, update.placements)
        else:
            update = orthogonalized(update)
        p.mul_(1 - lr * weight_decay)
        p.add_(update, alpha=-lr * 0.2 * math.sqrt(max(p.shape)))
