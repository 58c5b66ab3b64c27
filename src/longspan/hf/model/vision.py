"""Vision-language models by family: which modules encode pictures, and how."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from longspan.attn.segments import Segments, runs_of
from longspan.compat.reading import ENCODER_OUTPUTS, tower_modules, vision_core
from longspan.hf.model.encoders import Encoder, GridEncoder, ImageEncoder, PooledFrameEncoder, TileEncoder, llava_rows

PIXEL_KEYS = ("pixel_values", "pixel_values_videos")

PICTURE_KEYS = (
    *PIXEL_KEYS, "image_grid_thw", "video_grid_thw", "second_per_grid_ts", "image_sizes", "mm_token_type_ids",
    "batch_num_images", "image_sizes_videos", ENCODER_OUTPUTS,
)  # fmt: skip
"""Batch keys that describe pictures. They are not sharded by tokens; the vision tower's stage consumes them."""


def _images(rows: Callable[[Any, int, int, bool], int]) -> tuple[Encoder, ...]:
    return (ImageEncoder("image", "pixel_values", "image_token_id", rows),)


_SHUFFLED = _images(lambda core, h, w, sized: h * w // core.config.downsample_factor**2)
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
    "internvl": _images(lambda core, h, w, sized: int(h * w * core.config.downsample_ratio**2)),
    "aya_vision": _SHUFFLED,
    "cohere2_vision": _SHUFFLED,
    "mistral3": _images(
        lambda core, h, w, sized: (h // core.config.spatial_merge_size) * (w // core.config.spatial_merge_size)
    ),
    "llava_next": (TileEncoder("image", "pixel_values", "image_token_id"),),
    "llava_onevision": (
        TileEncoder("image", "pixel_values", "image_token_id"),
        PooledFrameEncoder("video", "pixel_values_videos", "video_token_id"),
    ),
    "gemma3": _images(lambda core, h, w, sized: core.config.mm_tokens_per_image),
}
"""The modalities of each family that can be sharded, by its config's `model_type`."""

IMAGE_TYPES = {"gemma3": "token_type_ids"}
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
    """Return the module of a vision-language model that holds tower and language model; None if its family is not in
    `FAMILIES`.
    """
    known = isinstance(model, PreTrainedModel) and model.config.model_type in FAMILIES
    return vision_core(model) if known else None


def encoders_of(model: nn.Module) -> tuple[Encoder, ...]:
    """Return the modalities of a vision-language model; none for other models."""
    return () if core_of(model) is None else FAMILIES[model.config.model_type]  # type: ignore[union-attr,index]


def tower_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the layers of the vision tower, which support activation checkpointing."""
    tower = tower_modules(model)
    lists = [m for m in model.modules() if m in tower and isinstance(m, nn.ModuleList)]
    return [block for blocks in lists for block in blocks if hasattr(block, "gradient_checkpointing")]


def rows_of(output: Any) -> Tensor:
    """Return the tower's output, a row per embedding: `[rows, width]`. Deepstack features are further columns."""
    parts = [output.pooler_output, *(output.get("deepstack_features") or [])]
    return torch.cat([_joined(part) for part in parts], 1) if len(parts) > 1 else _joined(parts[0])


def with_rows(output: Any, rows: Tensor) -> Any:
    """Return an output of the tower that contains only `rows`, which are laid out as `rows_of` returns them."""
    deep = output.get("deepstack_features")
    width = _joined(output.pooler_output).shape[1]
    pooled, *more = rows.split(width, 1)
    parts = {} if deep is None else {"deepstack_features": [(x,) for x in more]}
    before = output.pooler_output
    after = pooled.view(*(1,) * (before.dim() - 2), *pooled.shape) if isinstance(before, Tensor) else (pooled,)
    return type(output)(pooler_output=after, **parts)


def _joined(embeddings: Tensor | tuple[Tensor, ...] | list[Tensor]) -> Tensor:
    x = embeddings if isinstance(embeddings, Tensor) else torch.cat(tuple(embeddings))
    return x if x.dim() == 2 else x.flatten(0, -2)
