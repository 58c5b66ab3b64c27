"""Verify a diffusion transformer of diffusers: its output, and the gradients of weights and inputs.

The folder is that of the transformer, whose `config.json` names its class, or of a pipeline with a `transformer/`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from longspan.comm.agree import on_every_rank
from longspan.comm.mesh import SequenceSharding
from longspan.core.errors import LongspanError
from longspan.core.reading import values
from longspan.core.validation import read_text
from longspan.diffusion.small import Draw, Inputs, find_inputs, without_zeros
from longspan.diffusion.structure import map_tensors, tensors_in
from longspan.hf.model.pretrained import first_line
from longspan.hf.parallelize import parallelize
from longspan.verify.config import VerifyConfig
from longspan.verify.runs import Tensors, gradient_parts, make_report, unsharded_runs, whole_part

if TYPE_CHECKING:
    from longspan.verify.report import Report

_OF_LANGUAGE_MODELS = ("dtype", "kernel", "memory", "text", "text_field", "tokenizer")
"""Flags that mean nothing to a diffusion transformer."""


@dataclass(frozen=True)
class Transformer:
    """A transformer's files: its class, its settings, and the folder of its weights (None: random ones)."""

    config: VerifyConfig
    name: str
    settings: dict[str, Any]
    folder: Path | None

    @property
    def facts(self) -> dict[str, Any]:
        """What must be equal on every rank."""
        return {"the model": json.dumps(self.settings, sort_keys=True, default=str)}

    def build(self) -> Any:
        """Return the model in fp32."""
        import diffusers

        diffusers.utils.logging.set_verbosity_error()  # it warns of the copy in fp64
        try:
            if self.folder is not None:
                return getattr(diffusers, self.name).from_pretrained(self.folder, torch_dtype=torch.float32)
            torch.manual_seed(self.config.seed)
            return without_zeros(getattr(diffusers, self.name).from_config(self.settings).float(), 0.02)
        except Exception as error:  # of any kind
            raise LongspanError(f"diffusers cannot make this {self.name}: {first_line(error)}") from error


def open_transformer(config: VerifyConfig) -> Transformer:
    """Return the transformer of `--model`, and check what can be checked without its weights."""
    path = config_file(config)
    assert path is not None
    settings = json.loads(read_text("--model", path))
    name = settings["_class_name"]
    try:
        import diffusers
    except ImportError as error:
        raise LongspanError(f"a {name} needs diffusers; install it: pip install 'longspan[diffusers]'") from error
    if "Transformer" not in name or not hasattr(diffusers, name):
        raise LongspanError(f"--model {path} is a {name}; longspan takes transformers of diffusers")
    if config.parallel.tensor > 1:
        raise LongspanError(
            f"{name} has no tensor axis, got --tensor {config.parallel.tensor}; use --ring or --ulysses"
        )
    given, defaults = values(config), values(VerifyConfig())
    option = next((option for option in _OF_LANGUAGE_MODELS if given[option] != defaults[option]), None)
    if option is not None:
        raise LongspanError(
            f"--{option.replace('_', '-')} {given[option]} does not apply to a {name}, which is verified in fp32 on "
            "random latents, without memory options; leave it out"
        )
    return Transformer(config, name, settings, None if config.random_weights else path.parent)


def config_file(config: VerifyConfig) -> Path | None:
    """Return the `config.json` of a transformer of diffusers; None for other models."""
    given = Path(config.model)
    candidates = [given] if given.is_file() else [given / "transformer" / "config.json", given / "config.json"]
    for path in candidates:
        try:
            if isinstance(json.loads(path.read_text()).get("_class_name"), str):
                return path
        except (OSError, ValueError, AttributeError, RecursionError):
            continue
    return None


def compare(opened: Transformer) -> Report:
    """Return the report of a transformer, the same on every rank. Collective."""
    config = opened.config
    sp = SequenceSharding.of(config.parallel)
    model = on_every_rank(opened.build, sp.world_group).to(sp.device)
    inputs, target, tokens = on_every_rank(lambda: _inputs(model, config), sp.world_group)
    run = run_with(inputs, target)
    references = unsharded_runs(lambda: model, run, config, sp.host_group)
    model = parallelize(model, sp, fsdp=config.fsdp)
    found = run(model)
    parts = {
        name: whole_part(found[name]) for name in ("loss", "output", *sorted(found.keys() & tensors_in(inputs).keys()))
    }
    parts |= gradient_parts(model, sp)
    about = {"tokens": tokens, "text": "random latents and text", "data": 1}
    return make_report(config, sp, references, parts, about)


def run_with(inputs: Inputs, target: Tensor) -> Callable[[nn.Module], Tensors]:
    """Return a function that runs a model forward and backward.

    It returns "loss" `[1]`, "output", and each gradient under the name of its parameter or input, and clears them.
    diffusers computes rotary angles and most norms in fp32 in every run.
    """

    def run(model: nn.Module) -> Tensors:
        dtype = next(model.parameters()).dtype
        own = map_tensors(inputs, lambda _, x: _copied(x, dtype))
        out = model(**own, return_dict=False)[0]
        loss = (out - target.to(out)).square().mean()
        loss.backward()
        found = {"loss": loss.detach().reshape(1), "output": out.detach().flatten(0, -2)}
        grads = {name: x.grad for name, x in tensors_in(own).items()}
        found |= {name: grad.flatten(0, -2) for name, grad in grads.items() if grad is not None and grad.dim() > 1}
        if not hasattr(model, "longspan_state"):
            found |= {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}
            model.zero_grad(set_to_none=True)
        return found

    return run


def _copied(x: Tensor, dtype: torch.dtype) -> Tensor:
    x_copied = x.detach().to(dtype if x.is_floating_point() else x.dtype, copy=True)
    return x_copied.requires_grad_(x.requires_grad)


def _inputs(model: Any, config: VerifyConfig) -> tuple[Inputs, Tensor, int]:
    """Return random inputs of about `--context` tokens, an odd number where possible, a target, and the tokens."""
    generator, device = torch.Generator().manual_seed(config.seed), next(model.parameters()).device
    scale = max(1, math.isqrt(config.context // 75))
    scale -= 1 - scale % 2
    draw = Draw(model.config, config.batch, (5, 3 * scale, 5 * scale), 5, generator, device)
    layout, inputs = find_inputs(model, draw)
    tokens = math.prod(draw.grid if "F" in layout or "N" in layout else draw.grid[1:])
    with torch.no_grad():
        shape = model(**inputs, return_dict=False)[0].shape
    return inputs, draw.normal(*shape, trained=False), tokens
