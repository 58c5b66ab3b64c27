"""Names of argparse, diffusers, TRL, PEFT, lm-evaluation-harness, flash-linear-attention and torchao.

diffusers and TRL are inspected, not imported: a model's class tells where it comes from.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
from collections.abc import Callable
from typing import Any

from longspan.core.errors import require

_PATCHED = "_fused_forward"

#: flash-linear-attention's module and function, by (decay per key dim, delta rule).
_FUNCTIONS = {
    (False, False): ("fla.ops.simple_gla", "chunk_simple_gla"),
    (True, False): ("fla.ops.gla", "chunk_gla"),
    (False, True): ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
    (True, True): ("fla.ops.kda", "chunk_kda"),
}


def actions_of(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return the arguments of a parser, of which `longspan train` lists the keys."""
    return parser._actions


def float8_layers(model: Any) -> dict[str, Any]:
    """Return torchao's linear layers that multiply in float8, by their paths."""
    made = sys.modules.get("torchao.float8.float8_linear")  # imported by whoever made such a layer
    return {} if made is None else {p: m for p, m in model.named_modules() if isinstance(m, made.Float8Linear)}


def float8_scales_span_tokens(layer: Any) -> bool:
    """Return whether a scale of a float8 layer is that of several tokens: the largest entry of all of them.

    Products with weights may have a scale per token. Gradients of weights sum over tokens: any scale spans them.
    """
    config = layer.config
    with_weights = config.cast_config_input, config.cast_config_grad_output
    of_weights = config.cast_config_input_for_grad_weight, config.cast_config_grad_output_for_grad_weight
    coarse = (cast for cast in with_weights if cast.scaling_granularity.value != "axiswise")
    return any(cast.scaling_type.value != "disabled" for cast in (*coarse, *of_weights))


def float8_of(layer: Any) -> tuple[bool, bool]:
    """Return whether a linear layer rounds to float8 by scales over tokens, and whether FSDP gathers its weight so."""
    if not float8_layers(layer):
        return False, False
    return float8_scales_span_tokens(layer), bool(layer.config.enable_fsdp_float8_all_gather)


def has_one_float8_scale(layer: Any) -> bool:
    """Return whether a float8 layer rounds its inputs, and its output's gradient, by one scale each."""
    config = layer.config
    casts = config.cast_config_input, config.cast_config_grad_output
    again = config.cast_config_input_for_grad_weight, config.cast_config_grad_output_for_grad_weight
    scales = {(cast.scaling_granularity.value, cast.scaling_type.value) for cast in casts}
    return scales == {("tensorwise", "dynamic")} and casts == again


def share_float8_scales(layer: Any, reduce: Callable[[Any], None]) -> None:
    """Let a layer with one scale round by the largest entry over all ranks; `reduce` makes a maximum that of all ranks.

    As in torchao's tensor parallelism, inputs and gradients reach the layer's matmul cast already.
    """
    import torch
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args
    from torchao.float8.float8_scaling_utils import hp_tensor_and_scale_to_float8
    from torchao.float8.float8_training_tensor import GemmInputRole
    from torchao.float8.float8_utils import amax_to_scale

    config, products = layer.config, layer.linear_mm_config
    of_input, of_gradient = config.cast_config_input, config.cast_config_grad_output

    def cast(x: Any, dtype: Any, role: Any) -> Any:
        largest = x.detach().abs().max()
        reduce(largest)
        scale = amax_to_scale(largest, dtype, round_scales_to_power_of_2=config.round_scales_to_power_of_2)
        return hp_tensor_and_scale_to_float8(x, scale, dtype, products, role)

    class CastGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return cast(grad, of_gradient.target_dtype, GemmInputRole.GRAD_OUTPUT)

    def forward(x: Any) -> Any:
        if torch.is_autocast_enabled():
            x = x.to(torch.get_autocast_dtype("cuda"))
        x = cast(x, of_input.target_dtype, GemmInputRole.INPUT)
        out = CastGradient.apply(matmul_with_hp_or_float8_args.apply(x, layer.weight.t(), products, config))  # type: ignore[no-untyped-call]
        return out if layer.bias is None else out + layer.bias.to(out.dtype)

    layer.forward = forward


def fused_head_of(model: Any) -> dict[str, Any] | None:
    """Return the arguments of TRL's fused head, if it replaces a model's forward (`temperature`, ...); else None."""
    patched = vars(model).get("forward")
    function = getattr(patched, "__func__", patched)
    code = getattr(function, "__code__", None)
    if function is None or code is None or code.co_name != _PATCHED:
        return None
    return dict(inspect.getclosurevars(function).nonlocals)


def count_tokens_once(trainer: Any, times: int) -> None:
    """Wrap a GRPOTrainer's generation, which sums tokens over all processes, so that shared tokens count once.

    `times`: ranks that generate the same tokens.
    """
    generate = trainer._generate

    def counted(prompts: list[Any]) -> Any:
        before = trainer.state.num_input_tokens_seen
        generated = generate(prompts)
        seen = before + (trainer.state.num_input_tokens_seen - before) // times
        trainer.state.num_input_tokens_seen = seen
        trainer._metrics["train" if trainer.model.training else "eval"]["num_tokens"] = [seen]
        return generated

    trainer._generate = counted


def draws_by_itself(trainer: Any) -> bool:
    """Return whether a trainer of TRL has the method that generates completions of its prompts."""
    return hasattr(trainer, "_generate")


def metrics_of(trainer: Any) -> Any:
    """Return what a trainer of TRL logs with its next record: lists of numbers, by mode and name."""
    return trainer._metrics


def micro_batches(trainer: Any, make: Callable[[], Any]) -> Any:
    """Return the loader of an AsyncGRPOTrainer as `make`, its own method, makes it, before accelerate prepares it."""
    trainer.accelerator.prepare = lambda loader: loader
    try:
        return make()
    finally:
        del trainer.accelerator.prepare


def count_flops_of_replicas(trainer: Any, ranks: int) -> None:
    """Let an AsyncGRPOTrainer divide its FLOPs by those of all `ranks` of a replica, which it counts as one process."""
    if trainer._peak_flops_per_device is not None:
        trainer._peak_flops_per_device *= ranks


_PICTURES = ("pixel_values", "image_grid_thw", "pixel_attention_mask", "spatial_shapes", "image_sizes",
             "token_type_ids", "mm_token_type_ids", "image_position_ids")  # fmt: skip


def pictures_of_distillation(inputs: Any) -> dict[str, Any]:
    """Return the arguments that a DistillationTrainer passes to its model besides tokens and mask."""
    return {key: inputs[key] for key in _PICTURES if key in inputs}


def harness_command_line() -> Any:
    """Return the class of the harness's command line, which every rank runs after it has registered longspan's model.

    The command `lm_eval` knows no models of other packages.
    """
    require("lm-evaluation-harness", "lm_eval")
    from lm_eval._cli import HarnessCLI

    return HarnessCLI


def has_fla() -> bool:
    """Return whether flash-linear-attention is installed; it is not imported."""
    return importlib.util.find_spec("fla") is not None


def fla_kernels() -> str:
    """Return the version of flash-linear-attention's kernels, and whether this GPU runs them.

    Newer versions exchange states themselves, so ranks whose versions differ would run different collectives.
    """
    version = next((d.version for d in importlib.metadata.distributions(name="fla-core")), "not installed")
    return version if _is_ampere() else f"{version}, no GPU from Ampere on"


def fla_function(decay_per_key: bool, delta_rule: bool) -> Callable[..., Any] | None:
    """Return `f(q, k, v, g=, beta=, initial_state=, output_final_state=)`, or None without flash-linear-attention.

    All are called without a scale; missing decays are zeros. Before fla-core 0.5.2, KDA's backward was 10 % off.
    """
    module, name = _FUNCTIONS[decay_per_key, delta_rule]
    try:
        function = getattr(importlib.import_module(module), name)
    except ImportError:
        return None
    return functools.partial(_call, function, delta_rule)


def fla_over_ranks(decay_per_key: bool, **options: Any) -> Callable[..., Any] | None:
    """Return `f(q, k, v, g=, beta=, **sequence)`, flash-linear-attention's delta rule over the ranks of a group.

    `sequence` are the arguments of its `build_cp_context`, and `options` those of the function. None before fla-core
    0.6, and on GPUs older than Ampere.

    When gone: values are widened by the identity, which doubles the kernels' time.
    """
    module, name = _FUNCTIONS[decay_per_key, True]
    try:
        build = importlib.import_module("fla.ops.cp").build_cp_context
        function = getattr(importlib.import_module(module), name)
    except ImportError:
        return None
    knows = "layout" in inspect.signature(build).parameters and "cp_context" in inspect.signature(function).parameters
    if not knows or not _is_ampere():
        return None

    def run(q: Any, k: Any, v: Any, g: Any, beta: Any, **sequence: Any) -> Any:
        g = v.new_zeros(v.shape[:3]) if g is None else g
        return function(q, k, v, g=g, beta=beta, cp_context=build(**sequence), **options)[0]

    return run


def _is_ampere() -> bool:
    import torch

    return torch.version.cuda is not None and torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)


def _call(function: Callable[..., Any], delta_rule: bool, q: Any, k: Any, v: Any, **more: Any) -> Any:
    heads = v.shape[2] // k.shape[2]
    if heads > 1:
        q, k = q.repeat_interleave(heads, 2), k.repeat_interleave(heads, 2)
    if more["g"] is None:
        more["g"] = v.new_zeros(v.shape[:3])
    if not delta_rule:
        del more["beta"]
    return function(q, k, v, scale=1.0, **more)


# --- diffusers


def is_model_of_diffusers(model: Any) -> bool:
    """Return whether a model's class is one of diffusers."""
    return any(
        c.__name__ == "ModelMixin" and c.__module__.partition(".")[0] == "diffusers" for c in type(model).__mro__
    )


def is_parallel(model: Any) -> bool:
    """Return whether diffusers itself parallelizes a model."""
    return getattr(model, "_parallel_config", None) is not None


def version_of_diffusers() -> str:
    """Return the version of diffusers that made a model."""
    return str(sys.modules["diffusers"].__version__)


def is_of_diffusers(x: Any) -> bool:
    """Return whether the class of an object, such as an attention processor, is one of diffusers."""
    return type(x).__module__.partition(".")[0] == "diffusers"


def hooks_of(module: Any) -> list[str]:
    """Return the classes of diffusers' hooks on a module, such as caches, without those that move or cast weights."""
    registry = getattr(module, "_diffusers_hook", None)
    kinds = [type(hook) for hook in getattr(registry, "hooks", {}).values()]
    of_weights = ("group_offloading", "layerwise_casting")
    return [kind.__name__ for kind in kinds if kind.__module__.rpartition(".")[2] not in of_weights]


def checkpoint_function(model: Any) -> Callable[..., Any] | None:
    """Return the function that checkpoints a block, `f(block, *args)`; None if checkpointing was never enabled."""
    function: Callable[..., Any] | None = getattr(model, "_gradient_checkpointing_func", None)
    return function


def set_checkpoint_function(model: Any, function: Callable[..., Any]) -> None:
    """Replace what `checkpoint_function` returns."""
    model._gradient_checkpointing_func = function


def transformer_output(sample: Any) -> Any:
    """Return Latte's output, with `sample`."""
    from diffusers.models.modeling_outputs import Transformer2DModelOutput

    return Transformer2DModelOutput(sample=sample)
