"""Which modules of a multimodal model encode pictures, and how: by family, or by the rule of `rule.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from longspan.attn.segments import Segments, runs_of
from longspan.compat.reading import ENCODER_OUTPUTS, tower_modules, vision_core
from longspan.hf.model.encoders import Encoder, GridEncoder, ImageEncoder, PooledFrameEncoder, TileEncoder, llava_rows
from longspan.hf.model.rule import encoders_by_rule

PIXEL_KEYS = (
    "pixel_values", "pixel_values_videos", "pixel_values_local", "high_res_pixel_values", "input_features",
    "input_values",
)  # fmt: skip

PICTURE_KEYS = (
    *PIXEL_KEYS, "image_grid_thw", "video_grid_thw", "second_per_grid_ts", "image_sizes", "mm_token_type_ids",
    "batch_num_images", "image_sizes_videos", "image_grid_hw", "image_position_ids", "video_position_ids",
    "num_frames_per_video", "pixel_mask", "pixel_attention_mask", "tile_fine_mask", "spatial_shapes", "target_sizes",
    "target_sizes_videos", "image_merge_sizes", "video_merge_sizes", "image_token_pooling", "image_grids",
    "video_token_pooling", "video_grids", "num_local_patches", "input_features_mask", "feature_attention_mask",
    "audio_feature_lengths", "input_values_mask", "chunk_sample_lengths", "padding_mask", "video_second_per_grid",
    ENCODER_OUTPUTS,
)  # fmt: skip
"""Batch keys that describe pictures. They are not sharded by tokens; the vision tower's stage consumes them."""


def _images(rows: Callable[[Any, int, int, bool], int]) -> tuple[Encoder, ...]:
    return (ImageEncoder("image", "pixel_values", "image_token_id", rows),)


_IMAGES = GridEncoder("image", "pixel_values", "image_token_id", "image_grid_thw")
_QWEN2 = (_IMAGES, GridEncoder("video", "pixel_values_videos", "video_token_id", "video_grid_thw"))
_QWEN3 = (_IMAGES, GridEncoder("video", "pixel_values_videos", "video_token_id", "video_grid_thw", frames_apart=True))
_GLM = (_IMAGES, GridEncoder("video", "pixel_values_videos", "image_token_id", "video_grid_thw", frames_apart=True))

FAMILIES: dict[str, tuple[Encoder, ...]] = {
    "qwen2_vl": _QWEN2,
    "qwen2_5_vl": _QWEN2,
    "qwen3_vl": _QWEN3,
    "qwen3_vl_moe": _QWEN3,
    "qwen3_5": _QWEN3,
    "qwen3_5_moe": _QWEN3,
    "glm4v": _GLM,
    "glm4v_moe": _GLM,
    "glm46v": _GLM,
    "llava": _images(llava_rows),
    "mistral3": _images(
        lambda core, h, w, sized: (h // core.config.spatial_merge_size) * (w // core.config.spatial_merge_size)
    ),
    "llava_onevision": (
        TileEncoder("image", "pixel_values", "image_token_id"),
        PooledFrameEncoder("video", "pixel_values_videos", "video_token_id"),
    ),
    **dict.fromkeys(("gemma3", "shieldgemma2"), _images(lambda core, h, w, sized: core.config.mm_tokens_per_image)),
}
"""The modalities of families, by their config's `model_type`, whose units are smaller than pictures, or that see both
ways; others are found by rule (`rule.py`)."""

IMAGE_TYPES = dict.fromkeys(("gemma3", "shieldgemma2"), "token_type_ids")
"""Families in whose language model the tokens of an image see each other, and the batch key that is 1 for them."""


def chunk_around(spans: Segments, length: int, chunk: int) -> int | None:
    """Return the largest chunk size up to `chunk` that cuts no span of `length` tokens, nor begins a chunk with one;
    None if there is none.
    """
    inside = torch.zeros(length, dtype=torch.bool)  # where no chunk may begin
    for start, stop in {span for row in spans for span in row}:
        inside[start:stop] = True
    return next((size for size in range(chunk, 0, -1) if not bool(inside[size::size].any())), None)


def image_spans(types_Bn: Tensor) -> Segments | None:
    """Return the runs of image tokens in each row, given the batch's `IMAGE_TYPES`; None if there are none."""
    rows = runs_of(types_Bn == 1)
    return rows if any(rows) else None


def core_of(model: nn.Module) -> Any:
    """Return the module of a multimodal model that holds encoders and language model; None for other models."""
    return vision_core(model) if isinstance(model, PreTrainedModel) else None


def encoders_of(model: nn.Module) -> tuple[Encoder, ...]:
    """Return the modalities of a multimodal model; none for other models.

    Raises:
        LongspanError: if the family is not in `FAMILIES`, and the rule does not hold for it.
    """
    if core_of(model) is None:
        return ()
    assert isinstance(model, PreTrainedModel)
    return FAMILIES.get(model.config.model_type) or encoders_by_rule(model)


def tower_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the layers of the vision tower, which support activation checkpointing."""
    tower = tower_modules(model)
    lists = [m for m in model.modules() if m in tower and isinstance(m, nn.ModuleList)]
    return [block for blocks in lists for block in blocks if hasattr(block, "gradient_checkpointing")]
