"""The diffusers models that can be sharded: where their tokens are split and joined, and where tokens mix."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from longspan.compat.diffusers_api import attention_backend, hooks_of, is_processor_of_diffusers, split_plan
from longspan.core.errors import LongspanError
from longspan.hf.diffusion import inputs
from longspan.hf.diffusion.inputs import Draw, Inputs


@dataclass(frozen=True)
class Split:
    """Shard one dimension of an argument or output, if it has the expected number; named as in diffusers' plans."""

    split_dim: int
    expected_dims: int
    split_output: bool = False


@dataclass(frozen=True)
class Join:
    """Gather one dimension of a module's output."""

    gather_dim: int


Plan = Mapping[str, Mapping[str | int, Split] | Join]
"""By module ("" is the model, `*` stands for each of a list): splits by argument name or output index, or a join."""


@dataclass(frozen=True)
class Family:
    """How one class of diffusers is sharded.

    Attributes:
        inputs: returns random inputs.
        accepts: arguments of its forward besides `hidden_states`, `timestep`, `encoder_hidden_states`, `return_dict`
            and attention arguments that hold nothing but a LoRA scale.
        blocks: module lists, sharded block by block by FSDP.
        patches: patch size by dimension of `hidden_states`, from the config. Empty if these are tokens already: then
            the output is one row for each token, instead of pixels.
        channels_last: whether a token of the output lists the channels of its first pixel first, instead of the pixels
            of its first channel.
        attention: modules in which tokens of all ranks mix. All others (cross attention to a replicated text, a text
            refiner) compute local queries.
        processors: classes that compute such an attention, by one `scaled_dot_product_attention`.
        streams: arguments whose tokens attend to each other, in the order in which the processors concatenate them.
        needs_text: whether each rank needs a token of each stream; else one of `hidden_states` will do.
        plan: where tokens are split and joined. None: the model's `_cp_plan`.
        unsupported: a config entry, and the value for which tokens also mix outside these attention modules.
    """

    inputs: Callable[[Draw], Inputs]
    accepts: tuple[str, ...]
    blocks: tuple[str, ...]
    patches: Callable[[Any], dict[int, int]] = lambda config: {}
    channels_last: bool = False
    attention: tuple[str, ...] = ()
    processors: tuple[str, ...] = ()
    streams: tuple[str, ...] = ("hidden_states",)
    needs_text: bool = False
    plan: Plan | None = None
    unsupported: tuple[str, Any] | None = None


_HIDDEN_AND_TEXT: Mapping[str | int, Split] = {"hidden_states": Split(1, 3), "encoder_hidden_states": Split(1, 3)}
_DOUBLE_AND_SINGLE = ("transformer_blocks", "single_transformer_blocks")

_LOCAL_PROCESSORS = ("AttnProcessor", "AttnProcessor2_0", "XFormersAttnProcessor")
"""Of attention to one frame, to the text, or among the text's tokens."""

_BACKENDS = ("native", "_native_cudnn", "_native_efficient", "_native_flash", "_native_math")

FAMILIES = {
    "LatteTransformer3DModel": Family(
        inputs=inputs.latte,
        accepts=("encoder_attention_mask", "enable_temporal_attentions"),
        blocks=("transformer_blocks", "temporal_transformer_blocks"),
        patches=lambda config: {2: 1, 3: config.patch_size, 4: config.patch_size},
        channels_last=True,
    ),
    "WanTransformer3DModel": Family(
        inputs=inputs.wan,
        accepts=("encoder_hidden_states_image",),
        blocks=("blocks",),
        patches=lambda config: dict(zip((2, 3, 4), config.patch_size, strict=True)),
        channels_last=True,
        attention=("blocks.*.attn1",),
        processors=("WanAttnProcessor",),
    ),
    "LTXVideoTransformer3DModel": Family(
        inputs=inputs.ltx,
        accepts=("encoder_attention_mask", "num_frames", "height", "width", "rope_interpolation_scale", "video_coords"),
        blocks=("transformer_blocks",),
        attention=("transformer_blocks.*.attn1",),
        processors=("LTXVideoAttnProcessor",),
        # Its `_cp_plan` also splits the text, which every rank needs whole here.
        plan={
            "": {"hidden_states": Split(1, 3), "timestep": Split(1, 2)},
            "rope": {0: Split(1, 3, split_output=True), 1: Split(1, 3, split_output=True)},
            "proj_out": Join(1),
        },
    ),
    "FluxTransformer2DModel": Family(
        inputs=inputs.flux,
        accepts=("pooled_projections", "img_ids", "txt_ids", "guidance"),
        blocks=_DOUBLE_AND_SINGLE,
        attention=("transformer_blocks.*.attn", "single_transformer_blocks.*.attn"),
        processors=("FluxAttnProcessor",),
        streams=("encoder_hidden_states", "hidden_states"),
    ),
    "CogVideoXTransformer3DModel": Family(
        inputs=inputs.cogvideox,
        accepts=("timestep_cond", "ofs", "image_rotary_emb"),
        blocks=("transformer_blocks",),
        patches=lambda config: {1: config.patch_size_t or 1, 3: config.patch_size, 4: config.patch_size},
        attention=("transformer_blocks.*.attn1",),
        processors=("CogVideoXAttnProcessor2_0",),
        streams=("encoder_hidden_states", "hidden_states"),
        plan={
            "": {"image_rotary_emb": Split(0, 2)},
            "transformer_blocks.0": _HIDDEN_AND_TEXT,
            "proj_out": Join(1),
        },
    ),
    "HunyuanVideoTransformer3DModel": Family(
        inputs=inputs.hunyuan_video,
        accepts=("encoder_attention_mask", "pooled_projections", "guidance"),
        blocks=_DOUBLE_AND_SINGLE,
        patches=lambda config: {2: config.patch_size_t, 3: config.patch_size, 4: config.patch_size},
        attention=("transformer_blocks.*.attn", "single_transformer_blocks.*.attn"),
        processors=("HunyuanVideoAttnProcessor2_0",),
        streams=("hidden_states", "encoder_hidden_states"),
        needs_text=True,  # its processor counts the text's tokens from the end, where -0 is the start
        plan={
            "rope": {0: Split(0, 2, split_output=True), 1: Split(0, 2, split_output=True)},
            "transformer_blocks.0": _HIDDEN_AND_TEXT,
            "proj_out": Join(1),
        },
        unsupported=("image_condition_type", "token_replace"),
    ),
    "QwenImageTransformer2DModel": Family(
        inputs=inputs.qwen_image,
        accepts=("encoder_hidden_states_mask", "img_shapes", "guidance", "additional_t_cond"),
        blocks=("transformer_blocks",),
        attention=("transformer_blocks.*.attn",),
        processors=("QwenDoubleStreamAttnProcessor2_0",),
        streams=("encoder_hidden_states", "hidden_states"),
        needs_text=True,  # its rotation reshapes to unknown sizes, which fails for no token
    ),
}
"""By the name of the class."""


def family_of(model: nn.Module) -> Family:
    """Return how a model of diffusers is sharded.

    Raises:
        LongspanError: for an unknown class, variant or attention processor.
    """
    name = type(model).__name__
    family = FAMILIES.get(name)
    if family is None:
        raise LongspanError(f"{name} of diffusers cannot be sharded; longspan supports {', '.join(sorted(FAMILIES))}")
    config: Any = model.config
    if family.unsupported is not None:
        key, value = family.unsupported
        if config.get(key) == value:
            raise LongspanError(f"{name} with {key}={value!r} cannot be sharded: it treats some tokens separately")
    check_modules(model, family)
    return family


def check_modules(model: nn.Module, family: Family) -> None:
    """Raise if an attention's processor or backend, or a hook of diffusers, is one that longspan does not know.

    Users may change them after `parallelize`.
    """
    shared = matching(model, family.attention)
    for path, module in model.named_modules():
        for hook in hooks_of(module):
            raise LongspanError(
                f"{path or type(model).__name__} has diffusers' {hook}, which would decide or compute on one rank's "
                f"tokens; remove it, as by disable_cache()"
            )
        processor: Any = getattr(module, "processor", None)
        if processor is None:
            continue
        known = family.processors if path in shared else (*family.processors, *_LOCAL_PROCESSORS)
        if not is_processor_of_diffusers(processor, known):
            raise LongspanError(
                f"{path} has the attention processor {type(processor).__name__}, which longspan does not know; use "
                f"{' or '.join(known)}"
            )
        if path in shared and (backend := attention_backend(processor)) not in _BACKENDS:
            raise LongspanError(
                f"{path} has the attention backend {backend!r}, which does not call scaled_dot_product_attention; use "
                f"{', '.join(_BACKENDS)}"
            )


def plan_of(model: nn.Module, family: Family) -> Plan:
    """Return where a model's tokens are split and joined."""
    if family.plan is not None:
        return family.plan
    plan = split_plan(model)
    if not plan and family.attention:
        raise LongspanError(
            f"{type(model).__name__} has no `_cp_plan` in this version of diffusers; use diffusers 0.42"
        )
    return plan


def matching(model: nn.Module, patterns: tuple[str, ...]) -> dict[str, nn.Module]:
    """Return the modules whose path matches a pattern, in which `*` stands for a number."""
    wanted = re.compile("|".join(re.escape(p).replace(r"\*", r"\d+") for p in patterns) or r"(?!)")
    return {path: module for path, module in model.named_modules() if wanted.fullmatch(path)}
