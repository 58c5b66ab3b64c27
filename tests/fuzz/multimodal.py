"""Small models of transformers' image-text-to-text types, and batches for them, made by rule."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from longspan.compat.reading import vision_core
from longspan.hf.model.examples import example, run_encoder, sizes_in
from longspan.hf.model.small import shrunk
from longspan.hf.model.vision import encoders_of
from tests.fuzz import families

_SOUNDS = ("audioflamingo3", "musicflamingo")
"""Types that read sounds, and that transformers lists elsewhere."""

_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}

_STARTS = {"vision_start_token_id": 55, "vision_end_token_id": 56, "audio_start_token_id": 54}
_WITH_AXES = {"rope_parameters": _ROPE}
_CODES = {f"<|visual token {i:06}|>": 20 + i for i in range(16)}

CHECKPOINTS: dict[str, dict[str, Any]] = {
    "chameleon": {"vocabulary_map": {"<image>": 60, **{f"IMGIMG{chr(65 + i)}Z": 20 + i for i in range(16)}}},
    "emu3": {"vocabulary_map": {"<image>": 60, "<|extra_200|>": 40, **_CODES}},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    "granite4_vision": {
        "deepstack_layer_map": [[-1, 0]], "downsample_rate": "1/2", "spatial_target_layers": [0, 1, 0, 1],
    },
    "blip_2_qformer": {"num_attention_heads": 4, "encoder_hidden_size": 32},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2},
    "deepseek_ocr2_sam_vision_model": {"downsample_channels": [32, 32]},
    "radio": {"video_temporal_patch_size": 2},
    **dict.fromkeys(("hunyuan_vl_text", "paddleocr_vl_text", "qwen2_5_omni_text", "qwen3_omni_moe_text"), _WITH_AXES),
    **dict.fromkeys(("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"), _STARTS),
    "step3p5": {"sliding_window": 8},
    "llama4_vision_model": {"intermediate_size": 128},
}  # fmt: skip
"""Values of types whose default config lacks what their checkpoints have."""


def types() -> dict[str, str]:
    """Return the class of each image-text-to-text and audio-text-to-text type."""
    from transformers.models.auto import modeling_auto as auto

    sounds = {name: auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES[name] for name in _SOUNDS}
    return auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES | auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES | sounds


def build(model_type: str, changes: dict[str, Any]) -> Any:
    """Return a small model in fp32."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    cls = CONFIG_MAPPING[model_type]
    config = shrunk(cls, {"max_position_embeddings": 256} | changes, CHECKPOINTS | families.AS_CHECKPOINTS)
    kind = getattr(transformers, types()[model_type])
    model = kind._from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "language_model" not in name and "norm" not in name and p.dim() > 1:
                p.mul_(4)
        for module in model.modules():  # of zeros, Gemma-3n's norms of padding have no finite gradient
            if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None:
                module.weight[module.padding_idx] = module.weight[module.padding_idx - 1]
    return model


def batch(model: Any, replica: tuple[int, int] = (0, 1), *, side: str = "left", seed: int = 1) -> dict[str, Tensor]:
    """Return a replica's part of four rows, two of them with pictures of each kind, padded on one side."""
    g = torch.Generator().manual_seed(seed)
    core, config = vision_core(model), model.config
    encoders = encoders_of(model)

    def text(n: int) -> list[int]:
        return torch.randint(3, 20, (n,), generator=g).tolist()

    rows, kinds = [text(3), text(9), text(1), text(6)], dict[int, int]()
    mine = range(4)[replica[0] * 4 // replica[1] : (replica[0] + 1) * 4 // replica[1]]
    made: dict[str, Tensor] = {}
    for number, encoder in enumerate(encoders):
        token = getattr(config, encoder.token)
        given = example(core, encoder.modality, g, frames=getattr(encoder, "frames", 1), inside=encoder.inside)
        if token in kinds or given is None:  # one token stands for images and videos
            continue
        kinds[token] = number + 1
        with torch.no_grad():
            output = run_encoder(core, encoder.modality, given, encoder.inside)
        sizes = sizes_in(output)
        apart = getattr(encoder, "apart", True) and len(sizes) == 2
        rows_of = (0, 2) if apart else (0,) * len(sizes)
        for row, size in zip(rows_of, sizes, strict=True):
            rows[row] += [*_start(config, encoder.modality), *[token] * size, *text(4)]
        here = [i for i, row in enumerate(rows_of) if row in mine]
        if here:
            made |= given if len(here) == len(sizes) else encoder.part(core, given, here[0], here[-1] + 1)
    n = max(map(len, rows))
    ids, real = torch.zeros(4, n, dtype=torch.long), torch.zeros(4, n, dtype=torch.long)
    for b, row in enumerate(rows):
        at = slice(n - len(row), n) if side == "left" else slice(0, len(row))
        ids[b, at], real[b, at] = torch.tensor(row), 1
    types = sum((torch.where(ids == token, kind, 0) for token, kind in kinds.items()), torch.zeros_like(ids))
    whole = {"input_ids": ids, "labels": torch.where((real == 1) & (types == 0), ids, -100), "attention_mask": real}
    accepted = inspect.signature(model.forward).parameters
    if "video_grid_thw" in made and "video_second_per_grid" in accepted:
        made["video_second_per_grid"] = torch.ones(len(made["video_grid_thw"]))
    whole |= {name: types for name in ("mm_token_type_ids", "token_type_ids") if name in accepted}
    return {key: x[mine.start : mine.stop] for key, x in whole.items()} | made


def _start(config: Any, modality: str) -> list[int]:
    """Return the token before a picture, if positions depend on it."""
    names = (f"{modality}_start_token_id", *(("vision_start_token_id",) if modality != "audio" else ()))
    ids = [x for name in names if isinstance(x := getattr(config, name, None), int) and x < 64]
    return ids[:1]
