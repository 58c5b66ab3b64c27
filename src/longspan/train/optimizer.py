"""Which weights of a model are trained (freezing by pattern, LoRA by PEFT), by which optimizer and learning rates."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import warnings
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor, Replicate

from longspan.compat.torch_api import orthogonalized
from longspan.compat.torch_checkpoint import LOW_BIT, low_bit_adamw
from longspan.core.errors import LongspanError
from longspan.hf.pretrained import first_line, is_adapter, read_adapter
from longspan.hf.support import transformers_model
from longspan.hf.vision import tower_modules
from longspan.hf.weights.origin import with_adapter
from longspan.train.config import OptimizerSection, TrainConfig, TuningSection


def tuned(model: Any, options: TuningSection, seed: int, adapter: str | None = None, *, images: bool = False) -> Any:
    """Freeze weights of a loaded model, or put LoRA on it, or the LoRA of a folder; return it in training mode.

    A vision tower is frozen, its LoRA too, unless the data has `images`, and always with LoRA. LoRA's random weights
    depend on the seed alone, so that all ranks make the same.
    """
    inner = model
    if adapter is not None:
        base = model.config.name_or_path
        model = with_adapter(model, adapter, base, lora_dropout=options.lora_dropout).float()
    elif options.lora is not None:
        model = _with_lora(model, options, seed)
    for module in () if images else tower_modules(inner):  # PEFT has changed it in place
        module.requires_grad_(False)
    if adapter is not None or options.lora is not None:
        return model.train()
    for name in matching(model, "--freeze", options.freeze):
        model.get_parameter(name).requires_grad_(False)
    if not any(p.requires_grad for p in model.parameters()):
        raise LongspanError(f"--freeze {' '.join(options.freeze)} freezes all weights; leave some to train")
    return model.train()


def frozen(model: Any) -> Any:
    """Freeze a loaded model, for evaluation."""
    return model.requires_grad_(False).eval()


def continued(config: TrainConfig) -> TrainConfig:
    """Return the config with the settings of LoRA that the folder of an adapter (--model) has; any other unchanged."""
    name = config.model.model
    if name is None or not is_adapter(name):
        return config
    settings = json.loads(read_adapter(name)[0])
    kind = settings.get("peft_type")
    other = settings.get("modules_to_save") or settings.get("trainable_token_indices") or settings.get("bias") != "none"
    if kind != "LORA" or other:
        what = f"is of the kind {kind}" if kind != "LORA" else "trains more than LoRA"
        raise LongspanError(
            f"--model {name} {what}, and `longspan train` continues LoRA alone; merge it first "
            "(peft.PeftModel.from_pretrained(base, adapter).merge_and_unload().save_pretrained(folder)), or train it "
            "in your own script: apply PEFT first, then call longspan.parallelize"
        )
    targets = settings["target_modules"]
    found = {
        "lora": settings["r"], "lora_alpha": settings["lora_alpha"], "rslora": settings["use_rslora"],
        "dora": settings["use_dora"], "lora_targets": () if isinstance(targets, str) else tuple(sorted(targets)),
    }  # fmt: skip
    defaults = TuningSection()
    for key, value in found.items():
        given = getattr(config.tuning, key)
        if given not in (getattr(defaults, key), value):
            flag = key.replace("_", "-")
            raise LongspanError(f"--{flag} {given}: the adapter {name} has {value}, which stays; leave --{flag} out")
    return dataclasses.replace(config, tuning=dataclasses.replace(config.tuning, **found))


def matching(model: nn.Module, flag: str, patterns: tuple[str, ...]) -> list[str]:
    """Return the names of the parameters that match any of the patterns; raise for a pattern without any."""
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise LongspanError(
                f"{flag} {pattern} is the name of no weight; they are named like {names[0]} and {names[-1]}, and * "
                "stands for any characters"
            )
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def _with_lora(model: Any, options: TuningSection, seed: int) -> Any:
    import peft

    assert options.lora is not None
    tower = tower_modules(model)
    seen = [re.escape(name) for name, module in model.named_modules() if module in tower]
    name = str(model.config.name_or_path)
    # PEFT records it; absolute, as the adapter is used in other working directories.
    model.name_or_path = os.path.abspath(name) if name and Path(name).exists() else name
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=model.name_or_path,
        r=options.lora,
        lora_alpha=options.lora_alpha or 2 * options.lora,
        lora_dropout=options.lora_dropout,
        target_modules=list(options.lora_targets) or "all-linear",
        exclude_modules="|".join(seen) if seen and not options.lora_targets else None,
        use_rslora=options.rslora,
        use_dora=options.dora,
    )
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # PEFT 0.21 asks transformers for a deprecated property
            torch.manual_seed(seed)
            adapted = peft.get_peft_model(model, config)
    except Exception as error:  # PEFT raises any kind
        raise LongspanError(f"--lora {options.lora} cannot be put on the model: {first_line(error)}") from error
    return adapted


# --- the optimizer


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
