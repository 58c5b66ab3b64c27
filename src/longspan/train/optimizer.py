"""The optimizer, its learning-rate schedule, and gradient clipping."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor, Replicate

from longspan.compat.torch_api import orthogonalized
from longspan.compat.torch_checkpoint import LOW_BIT, low_bit_adamw
from longspan.hf.support import transformers_model
from longspan.train.config import OptimizerSection, TrainConfig
from longspan.train.tuning import matching


def make_optimizer(model: nn.Module, config: TrainConfig, device: torch.device) -> torch.optim.Optimizer:
    """Return the optimizer of all trainable parameters; weight decay applies to matrices only.

    A group says by `decays` whether it has weight decay. The biases of experts are stored as a matrix, and are none.
    """
    options = config.optimizer
    excluded = set(matching(model, "--no-decay", options.no_decay))
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]

    def groups(belongs: Callable[[str, nn.Parameter], bool]) -> list[dict[str, Any]]:
        mine = [
            (p, p.ndim >= 2 and not name.endswith("bias") and name not in excluded)
            for name, p in trained
            if belongs(name, p)
        ]
        return [
            {
                "params": [p for p, decays in mine if decays is wanted],
                "decays": wanted,
                "weight_decay": options.weight_decay if wanted else 0.0,
            }
            for wanted in (True, False)
        ]

    if options.optimizer in LOW_BIT:
        return low_bit_adamw(options.optimizer, groups(lambda *_: True), options.lr, options.betas)
    fused = device.type == "cuda" or None
    if options.optimizer == "adamw":
        return torch.optim.AdamW(groups(lambda *_: True), lr=options.lr, betas=options.betas, fused=fused)
    tables = _tables(model)

    def is_matrix(name: str, p: nn.Parameter) -> bool:
        return p.ndim == 2 and name.endswith("weight") and p not in tables

    others, matrices = groups(lambda name, p: not is_matrix(name, p)), groups(is_matrix)
    if not any(group["params"] for group in others):  # LoRA; torch loads at most one group without weights
        others, matrices = others[:1], [group for group in matrices if group["params"]]
    return Muon(others, matrices, lr=options.lr, betas=options.betas, fused=fused)


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


def initialise(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Create the state of all trained weights, as it is before the first step.

    Otherwise a checkpoint lacks the states of weights that have had no gradient (of a tower's unused layers, or before
    the first image), and cannot be loaded.
    """
    get_optimizer_state_dict(model, optimizer)  # takes a step with a learning rate of 0
    for state in optimizer.state.values():
        if "step" in state:
            state["step"].zero_()


def make_scheduler(optimizer: torch.optim.Optimizer, config: TrainConfig, done: int) -> Any:
    """Return transformers' schedule after `done` steps.

    The rate is a function of the step and of this run's settings, so a resumed run may change them.
    """
    options = config.optimizer
    for group in optimizer.param_groups:
        group["initial_lr"] = options.lr
        _set_rate(group, options.lr)
        group["betas"] = options.betas
        group["weight_decay"] = options.weight_decay if group["decays"] else 0.0
    scheduler = _schedule(optimizer, options, config.last_step)
    scheduler.last_epoch = done
    for group, rate in zip(optimizer.param_groups, scheduler.lr_lambdas, strict=True):
        _set_rate(group, options.lr * rate(done))
    return scheduler


def _schedule(optimizer: torch.optim.Optimizer, options: OptimizerSection, steps: int) -> Any:
    from transformers import get_scheduler

    lowest = options.min_lr / options.lr
    name: str = options.schedule
    settings: dict[str, Any] = {}
    if name == "cosine":
        name, settings = "cosine_with_min_lr", {"min_lr_rate": lowest}
    elif name == "linear" and lowest:
        name, settings = "polynomial", {"power": 1.0, "lr_end": options.min_lr}
    elif name == "constant":
        name = "constant_with_warmup"
    elif name == "wsd":
        decay = min(max(1, steps // 10), steps - options.warmup) if options.decay is None else options.decay
        name, settings = "warmup_stable_decay", {"num_decay_steps": decay, "decay_type": "1-sqrt"}
        settings["min_lr_ratio"] = lowest
    return get_scheduler(
        name,
        optimizer,
        num_warmup_steps=options.warmup,
        num_training_steps=steps,
        scheduler_specific_kwargs=settings,
    )


def _set_rate(group: dict[str, Any], rate: float) -> None:
    # torchao's optimizers read their rate from a tensor, which must be changed in place.
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def clip_gradients(model: nn.Module, limit: float) -> float:
    """Scale all gradients to a global L2 norm of at most `limit` (0: no limit); return the norm before."""
    parameters = [p for p in model.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    if limit:
        torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)
    return norm.item()
