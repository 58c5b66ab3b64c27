"""Which weights of a model are trained: freezing by pattern, and LoRA by PEFT."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import warnings
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import nn

from longspan.core.errors import LongspanError
from longspan.hf.pretrained import first_line, is_adapter, read_adapter
from longspan.hf.vision import tower_modules
from longspan.hf.weights.origin import with_adapter
from longspan.train.config import TrainConfig, TuningSection


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
