"""Small vision-language models with random weights, and batches of text, images and videos for them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from longspan.compat.transformers_api import tiles_of_image
from tests.models import BASE, HYBRIDS, Truth, truth_of

IMAGE, VIDEO, START, END = 57, 58, 59, 60  # ids of placeholders and of the tokens around them

_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
_TEXT = {name: value for name, value in BASE.items() if name != "pad_token_id"}
_TOKENS = {
    "image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END,
}  # fmt: skip

_VISION = {
    "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4, "out_hidden_size": 32,
}  # fmt: skip
_DEEP = {**_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

GRIDS: dict[str, dict[str, Any]] = {
    "Qwen2VL": {
        "text_config": {**_TEXT, "rope_parameters": _MROPE},
        "vision_config": {
            "depth": 2, "embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2, "num_heads": 2, "patch_size": 4,
        },
    },
    "Qwen2_5_VL": {
        "text_config": {**_TEXT, "rope_parameters": _MROPE},
        "vision_config": {**_VISION, "window_size": 16, "fullatt_block_indexes": [1], "tokens_per_second": 2},
    },
    "Qwen3VL": {
        "text_config": {**_TEXT, "head_dim": 8, "rope_parameters": _MROPE},
        "vision_config": _DEEP,
    },
    "Qwen3VLMoe": {
        "text_config": {**_TEXT, **_EXPERTS, "head_dim": 8, "rope_parameters": _MROPE},
        "vision_config": _DEEP,
    },
    "Qwen3_5": {
        "text_config": {**_TEXT, **HYBRIDS["Qwen3_5Text"], "rope_parameters": {**_MROPE, "partial_rotary_factor": 1.0}},
        "vision_config": {**_VISION, "num_position_embeddings": 16},
    },
    "Qwen3_5Moe": {
        "text_config": {
            **_TEXT, **HYBRIDS["Qwen3_5MoeText"], "rope_parameters": {**_MROPE, "partial_rotary_factor": 1.0},
            "num_experts": 4, "moe_intermediate_size": 16,
        },
        "vision_config": {**_VISION, "num_position_embeddings": 16},
    },
    "Glm46V": {
        "text_config": {**_TEXT, "rope_parameters": {**_MROPE, "partial_rotary_factor": 1.0}},
        "vision_config": {**_VISION, "image_size": 16, "model_type": "glm4v_vision"},
    },
    "Glm4v": {
        "text_config": {**_TEXT, "rope_parameters": {**_MROPE, "partial_rotary_factor": 1.0}},
        "vision_config": {**_VISION, "image_size": 16},
    },
    "Glm4vMoe": {
        "text_config": {
            **_TEXT, "moe_intermediate_size": 16, "num_experts_per_tok": 2, "n_routed_experts": 4,
            "rope_parameters": {**_MROPE, "partial_rotary_factor": 1.0},
        },
        "vision_config": {**_VISION, "image_size": 16},
    },
}  # fmt: skip

_VIT = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 4,
}  # fmt: skip

_TILES = {
    "text_config": {**BASE, "model_type": "llama"},
    "vision_feature_layer": -1,
    "image_grid_pinpoints": [[16, 32], [32, 16], [32, 32], [48, 48]],
    "image_token_id": IMAGE,
}

SQUARES: dict[str, dict[str, Any]] = {
    "Llava": {
        "text_config": {**BASE, "model_type": "llama"},
        "vision_config": {**_VIT, "model_type": "clip_vision_model"},
        "vision_feature_layer": -1,
        "image_token_id": IMAGE,
    },
    "InternVL": {
        "text_config": {**BASE, "model_type": "qwen2"},
        "vision_config": {**_VIT, "image_size": [16, 16], "patch_size": [4, 4], "model_type": "internvl_vision"},
        "image_token_id": IMAGE,
    },
    "LlavaPixtral": {
        "text_config": {**BASE, "model_type": "llama"},
        "vision_config": {**_VIT, "image_size": 32, "head_dim": 8, "model_type": "pixtral"},
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "image_token_id": IMAGE,
    },
    "AyaVision": {
        "text_config": {**BASE, "model_type": "cohere2"},
        "vision_config": {**_VIT, "model_type": "siglip_vision_model", "vision_use_head": False},
        "image_token_index": IMAGE,
    },
    "Cohere2Vision": {
        "text_config": {**BASE, "model_type": "cohere2"},
        "vision_config": {**_VIT, "model_type": "siglip_vision_model", "vision_use_head": False},
        "alignment_intermediate_size": 24,
        "image_token_id": IMAGE,
    },
    "LlavaNext": {**_TILES, "vision_config": {**_VIT, "model_type": "clip_vision_model"}},
    "LlavaOnevision": {
        **_TILES,
        "vision_config": {**_VIT, "model_type": "siglip_vision_model", "vision_use_head": False},
        "vision_aspect_ratio": "anyres_max_2",  # so that large images are scaled down
        "video_token_id": VIDEO,
    },
    "Gemma3": {
        "text_config": {
            **BASE,
            "model_type": "gemma3_text",
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "vision_config": {**_VIT, "model_type": "siglip_vision_model", "vision_use_head": False},
        "mm_tokens_per_image": 16,  # more than the window
        "image_token_id": IMAGE,
    },
    "Mistral3": {
        "text_config": {**BASE, "model_type": "mistral", "head_dim": 8},
        "vision_config": {**_VIT, "image_size": 32, "head_dim": 8, "model_type": "pixtral"},
        "image_token_id": IMAGE,
    },
}
"""Families that take images, or tiles and frames, as pixels in two dimensions."""

FAMILIES = GRIDS | SQUARES

CLASSES = {"LlavaPixtral": "Llava"}
"""Names of classes that differ from those of the families here."""

FRAMES_APART = ("Qwen3VL", "Qwen3VLMoe", "Qwen3_5", "Qwen3_5Moe", "Glm4v", "Glm4vMoe", "Glm46V")
"""Families with text between the frames of a video."""


def build(family: str, seed: int = 0, **changes: Any) -> Any:
    """Return a vision-language model of `family` in fp32, with random weights that depend on `seed` alone."""
    import transformers

    kind = CLASSES.get(family, family)
    config = getattr(transformers, f"{kind}Config")(
        **{**(_TOKENS if family in GRIDS else {}), **FAMILIES[family], **changes}
    )
    torch.manual_seed(seed)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).float()
    with torch.no_grad():
        for name, p in model.named_parameters():  # so that pictures matter
            if "language_model" not in name and "norm" not in name and p.dim() > 1:
                p.mul_(4)
    return model


Part = int | tuple[str, int, int, int]
"""A number of text tokens, or an image or video of (frames, height, width) patches."""

Rows = tuple[tuple[Part, ...], ...]

ROWS: Rows = ((3, ("image", 1, 4, 6), 4, ("video", 3, 4, 4), 3), (9,), (("image", 1, 8, 4), 1, ("image", 1, 2, 2), 5))
IMAGES: Rows = (ROWS[2], (7, ("image", 1, 4, 4)), (12,))
VIDEOS: Rows = ((2, ("video", 2, 4, 4), 3), (9,), (("video", 3, 2, 4), 4, ("video", 1, 4, 4), 1))

SQUARE_ROWS: Rows = ((3, ("image", 1, 4, 4), 4, ("image", 1, 8, 4), 2), (9,), (("image", 1, 4, 4), 1))

TILES: dict[str, Rows] = {
    "LlavaNext": ((3, ("image", 1, 6, 8), 4), (9,), (("image", 1, 4, 4), 1, ("image", 1, 8, 4), 2)),
    "LlavaOnevision": (
        (3, ("image", 1, 6, 8), 4, ("video", 3, 4, 4), 2),
        (9,),
        (("image", 1, 8, 4), 1, ("image", 1, 4, 4), 2, ("video", 3, 4, 4)),
        (1, ("image", 1, 8, 4)),
    ),
}
"""Rows for families that cut images into tiles; OneVision only images that are alone in their row."""

_KEYS = {"image": ("pixel_values", "image_grid_thw"), "video": ("pixel_values_videos", "video_grid_thw")}


def batch(
    family: str, rows: Rows = ROWS, *, side: str = "left", keep: Sequence[int] | None = None, seed: int = 1
) -> dict[str, Tensor]:
    """Return a batch of rows with labels, padded on one side; `keep` chooses rows of it, with their pictures."""
    g = torch.Generator().manual_seed(seed)
    made = [_row(family, row, g) for row in rows]
    n = max(len(ids) for ids, *_ in made)
    ids, kinds, real = (torch.zeros(len(rows), n, dtype=torch.long) for _ in range(3))
    pictures: dict[str, list[Tensor]] = {}
    for b, (row_ids, row_kinds, row_pictures) in enumerate(made):
        at = slice(n - len(row_ids), n) if side == "left" else slice(0, len(row_ids))
        ids[b, at], kinds[b, at], real[b, at] = torch.tensor(row_ids), torch.tensor(row_kinds), 1
        for key, x in row_pictures if keep is None or b in keep else ():
            pictures.setdefault(key, []).append(x)
    types = {"Gemma3": "token_type_ids"} | dict.fromkeys(GRIDS, "mm_token_type_ids")
    if family in TILES and "pixel_values" in pictures:
        most = max(x.shape[1] for x in pictures["pixel_values"])
        pictures["pixel_values"] = [pad(x, (0,) * 7 + (most - x.shape[1],)) for x in pictures["pixel_values"]]
    if family == "LlavaOnevision" and "pixel_values" in pictures:
        counts = [sum(key == "pixel_values" for key, _ in of_row) for *_, of_row in made]
        pictures["batch_num_images"] = [
            torch.tensor([n]) for b, n in enumerate(counts) if n and (not keep or b in keep)
        ]
    whole = {"input_ids": ids} | ({types[family]: kinds} if family in types else {})
    whole["labels"] = torch.where((real == 1) & (ids < IMAGE), ids, -100)
    if not bool(real.all()):
        whole["attention_mask"] = real
    if keep is not None:
        whole = {key: x[list(keep)] for key, x in whole.items()}
    return whole | {key: torch.cat(xs) for key, xs in pictures.items()}


def _row(
    family: str, row: tuple[Part, ...], g: torch.Generator
) -> tuple[list[int], list[int], list[tuple[str, Tensor]]]:
    """Return ids and kinds of a row's tokens, and its pictures by their keys in a batch."""
    ids, kinds, pictures = list[int](), list[int](), []
    images = sum(not isinstance(part, int) and part[0] == "image" for part in row)
    for part in row:
        if isinstance(part, int):
            ids += torch.randint(3, IMAGE, (part,), generator=g).tolist()
            kinds += [0] * part
            continue
        kind, t, h, w = part
        if family in SQUARES and kind == "video":  # LLaVA-OneVision's: frames of 4 x 4 patches, pooled
            pictures.append(("pixel_values_videos", torch.randn(1, t, 3, 16, 16, generator=g)))
            ids += [START, *[VIDEO] * (4 * t + 1), END]
            kinds += [0] * (4 * t + 3)
            continue
        if family in SQUARES:
            size, more = _square(family, h, w, images == 1, g)
            ids += [START, *[IMAGE] * size, END]
            kinds += [0, *[1] * size, 0]
            pictures += more
            continue
        pixels, grid = _KEYS[kind]
        pictures += [
            (pixels, torch.randn(t * h * w, _patch_width(family), generator=g)), (grid, torch.tensor([[t, h, w]]))
        ]  # fmt: skip
        token = VIDEO if kind == "video" and not family.startswith("Glm") else IMAGE
        for size in [h * w // 4] * t if family in FRAMES_APART else [t * h * w // 4]:
            ids += [START, *[token] * size, END]
            kinds += [0, *[1 if kind == "image" else 2] * size, 0]
    return ids, kinds, pictures


def _square(family: str, h: int, w: int, alone: bool, g: torch.Generator) -> tuple[int, list[tuple[str, Tensor]]]:
    """Return the tokens of an image of one of `SQUARES`, and its entries of a batch; `alone` if its row has no other.

    Only Pixtral's images and those in tiles differ in size.
    """
    size = torch.tensor([[4 * h, 4 * w]])
    if family in ("Mistral3", "LlavaPixtral"):
        pixels = torch.randn(1, 3, 32, 32, generator=g)
        return h * w // (4 if family == "Mistral3" else 1), [("pixel_values", pixels), ("image_sizes", size)]
    if family in TILES:
        cut = alone or family == "LlavaNext"
        tiles = tiles_of_image(4 * h, 4 * w, _TILES["image_grid_pinpoints"], 16) if cut else 1
        pixels = torch.randn(1, tiles, 3, 16, 16, generator=g)
        return _tokens_of_tiles(family, tiles, h, w), [("pixel_values", pixels), ("image_sizes", size)]
    tokens = {"Llava": 16, "InternVL": 4, "AyaVision": 4, "Cohere2Vision": 4, "Gemma3": 16}[family]
    return tokens, [("pixel_values", torch.randn(1, 3, 16, 16, generator=g))]


@functools.cache
def _tokens_of_tiles(family: str, tiles: int, h: int, w: int) -> int:
    """Return how many embeddings transformers makes of an image."""
    counts = {"batch_num_images": torch.tensor([1 + (tiles == 1)])} if family == "LlavaOnevision" else {}
    sizes, pixels = torch.tensor([[4 * h, 4 * w]]), torch.zeros(1, tiles, 3, 16, 16)
    output = build(family).get_image_features(pixel_values=pixels, image_sizes=sizes, **counts, return_dict=True)
    return len(output.pooler_output[0])


def _patch_width(family: str) -> int:
    vision = FAMILIES[family]["vision_config"]
    return 3 * vision.get("temporal_patch_size", 2) * vision["patch_size"] ** 2


def rows_for(family: str) -> Rows:
    """Return rows with all that one batch of a family may hold; GLM has one placeholder for images and videos."""
    if family in SQUARES:
        return TILES.get(family, SQUARE_ROWS)
    return VIDEOS if family.startswith("Glm") else ROWS


@functools.cache
def truth_about(family: str, rows: Rows, side: str = "left") -> Truth:
    """Return `truth_of` a family, computed once by the test process and sent to the ranks."""
    return truth_of(build(family), batch(family, rows, side=side))
