"""The optimizer, its learning-rate schedule, and gradient clipping."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from longspan.compat.torch_checkpoint import adamw8bit
from longspan.train.config import TrainConfig


def make_optimizer(model: torch.nn.Module, config: TrainConfig, device: torch.device) -> torch.optim.Optimizer:
    """Return AdamW over all trainable parameters; weight decay applies to matrices only."""
    options = config.optimizer
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": options.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    if options.optimizer == "adamw8bit":
        return adamw8bit(groups, options.lr, options.betas)
    return torch.optim.AdamW(groups, lr=options.lr, betas=options.betas, fused=device.type == "cuda" or None)


def make_scheduler(optimizer: torch.optim.Optimizer, config: TrainConfig, done: int) -> Any:
    """Return transformers' schedule after `done` steps.

    The rate is a function of the step and of this run's settings, so a resumed run may change them.
    """
    from transformers import get_scheduler

    options = config.optimizer
    for group in optimizer.param_groups:
        group["initial_lr"] = options.lr
        _set_rate(group, options.lr)
        group["betas"] = options.betas
        group["weight_decay"] = options.weight_decay if group["params"] and group["params"][0].ndim >= 2 else 0.0
    names = {"cosine": "cosine", "linear": "linear", "constant": "constant_with_warmup"}
    scheduler = get_scheduler(
        names[options.schedule], optimizer, num_warmup_steps=options.warmup, num_training_steps=config.steps
    )
    scheduler.last_epoch = done
    for group, rate in zip(optimizer.param_groups, scheduler.lr_lambdas, strict=True):
        _set_rate(group, options.lr * rate(done))
    return scheduler


def _set_rate(group: dict[str, Any], rate: float) -> None:
    # torchao's optimizers read their rate from a tensor, which must be changed in place.
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def clip_gradients(model: torch.nn.Module, limit: float) -> float:
    """Scale all gradients to a global L2 norm of at most `limit` (0: no limit); return the norm before."""
    parameters = [p for p in model.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    if limit:
        torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)
    return norm.item()
