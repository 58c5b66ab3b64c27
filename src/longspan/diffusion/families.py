"""The diffusers models that can be sharded: where their tokens are split and joined, and where tokens mix."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from longspan.compat.friends_api import hooks_of, is_processor_of_diffusers, split_plan
from longspan.core.errors import LongspanError


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
    """How one class of diffusers is sharded."""

    accepts: tuple[str, ...]  # arguments of its forward besides those that all families take
    blocks: tuple[str, ...]  # module lists, sharded block by block by FSDP
    # Patch size by dimension of `hidden_states`, from the config. Empty if these are tokens already: then the output is
    # one row for each token, instead of pixels.
    patches: Callable[[Any], dict[int, int]] = lambda config: {}
    channels_last: bool = False  # a token of the output lists the channels of its first pixel first
    # Modules in which tokens of all ranks mix. Others (cross attention to a replicated text, a text refiner) have local
    # queries.
    attention: tuple[str, ...] = ()
    processors: tuple[str, ...] = ()  # classes that compute such an attention, by one `scaled_dot_product_attention`
    # Arguments whose tokens attend to each other, in the order in which the processors concatenate them.
    streams: tuple[str, ...] = ("hidden_states",)
    needs_text: bool = False  # each rank needs a token of each stream; else one of `hidden_states` will do
    plan: Plan | None = None  # where tokens are split and joined; None: the model's `_cp_plan`
    # Returns the tokens by the arguments that describe their grid; None if these are missing.
    grid: Callable[[Mapping[str, Any]], int | None] | None = None
    unsupported: tuple[str, Any] | None = None  # a config entry and value with which tokens mix elsewhere, too


_HIDDEN_AND_TEXT: Mapping[str | int, Split] = {"hidden_states": Split(1, 3), "encoder_hidden_states": Split(1, 3)}
_DOUBLE_AND_SINGLE = ("transformer_blocks", "single_transformer_blocks")

_LOCAL_PROCESSORS = ("AttnProcessor", "AttnProcessor2_0", "XFormersAttnProcessor")
"""Of attention to one frame, to the text, or among the text's tokens."""


def _grid_of_ltx(given: Mapping[str, Any]) -> int | None:
    sides: list[Any] = [given.get(name) for name in ("num_frames", "height", "width")]
    known = given.get("video_coords") is None and all(isinstance(n, int) for n in sides)
    return math.prod(sides) if known else None


def _grid_of_qwen(given: Mapping[str, Any]) -> int | None:
    grids = given.get("img_shapes")
    if not isinstance(grids, list) or not grids:
        return None
    of_first_row = grids[0] if isinstance(grids[0], list) else grids[:1]
    return sum(math.prod(grid) for grid in of_first_row)


FAMILIES = {
    "LatteTransformer3DModel": Family(
        accepts=("encoder_attention_mask", "enable_temporal_attentions"),
        blocks=("transformer_blocks", "temporal_transformer_blocks"),
        patches=lambda config: {2: 1, 3: config.patch_size, 4: config.patch_size},
        channels_last=True,
    ),
    "WanTransformer3DModel": Family(
        accepts=("encoder_hidden_states_image",),
        blocks=("blocks",),
        patches=lambda config: dict(zip((2, 3, 4), config.patch_size, strict=True)),
        channels_last=True,
        attention=("blocks.*.attn1",),
        processors=("WanAttnProcessor",),
    ),
    "LTXVideoTransformer3DModel": Family(
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
        grid=_grid_of_ltx,
    ),
    "FluxTransformer2DModel": Family(
        accepts=("pooled_projections", "img_ids", "txt_ids", "guidance"),
        blocks=_DOUBLE_AND_SINGLE,
        attention=("transformer_blocks.*.attn", "single_transformer_blocks.*.attn"),
        processors=("FluxAttnProcessor",),
        streams=("encoder_hidden_states", "hidden_states"),
    ),
    "CogVideoXTransformer3DModel": Family(
        accepts=("timestep_cond", "ofs", "image_rotary_emb"),
        blocks=("transformer_blocks",),
        patches=lambda config: {1: config.patch_size_t or 1, 3: config.patch_size, 4: config.patch_size},
        attention=("transformer_blocks.*.attn1",),
        processors=("CogVideoXAttnProcessor2_0",),
        streams=("encoder_hidden_states", "hidden_states"),
        plan={"": {"image_rotary_emb": Split(0, 2)}, "transformer_blocks.0": _HIDDEN_AND_TEXT, "proj_out": Join(1)},
    ),
    "HunyuanVideoTransformer3DModel": Family(
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
        accepts=("encoder_hidden_states_mask", "img_shapes", "guidance", "additional_t_cond"),
        blocks=("transformer_blocks",),
        attention=("transformer_blocks.*.attn",),
        processors=("QwenDoubleStreamAttnProcessor2_0",),
        streams=("encoder_hidden_states", "hidden_states"),
        needs_text=True,  # its rotation reshapes to unknown sizes, which fails for no token
        grid=_grid_of_qwen,
    ),
}
"""By the name of the class."""


def family_of(model: nn.Module) -> Family:
    """Return how a model of diffusers is sharded; raise for an unknown class, variant or attention processor."""
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
    """Raise for an attention processor or a hook of diffusers that longspan does not know.

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


def plan_of(model: nn.Module, family: Family) -> Plan:
    """Return where a model's tokens are split and joined."""
    return split_plan(model) if family.plan is None else family.plan


def matching(model: nn.Module, patterns: tuple[str, ...]) -> dict[str, nn.Module]:
    """Return the modules whose path matches a pattern, in which `*` stands for a number."""
    wanted = re.compile("|".join(re.escape(p).replace(r"\*", r"\d+") for p in patterns) or r"(?!)")
    return {path: module for path, module in model.named_modules() if wanted.fullmatch(path)}
