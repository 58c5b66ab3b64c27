"""Qwen's vision-language models: the language model of a Qwen next to a vision tower (`tower.py`)."""

from __future__ import annotations

from dataclasses import replace

from longspan.plan.models import families
from longspan.plan.models.tower import qwen2_5_tower, qwen2_tower, qwen3_tower

_ROOT = ("model.language_model.embed_tokens", "", "model.language_model.norm")
_QWEN2, _QWEN3, _QWEN3_MOE = (families.FAMILIES[name] for name in ("qwen2", "qwen3", "qwen3_moe"))
_QWEN2_VL = replace(_QWEN2, root=_ROOT, defaults={**_QWEN2.defaults, "num_key_value_heads": 8, "max_window_layers": 80})
_NO_WINDOW = {"use_sliding_window": False, "max_position_embeddings": 128000}

FAMILIES = {
    "qwen2_vl": replace(_QWEN2_VL, tower=qwen2_tower),
    "qwen2_5_vl": replace(_QWEN2_VL, tower=qwen2_5_tower),
    "qwen3_vl": replace(
        _QWEN3,
        root=_ROOT,
        tower=qwen3_tower,
        defaults={"num_key_value_heads": 32, "head_dim": 128, **_NO_WINDOW},
        types=lambda c, layer: "full_attention",
        listed=False,
    ),
    "qwen3_vl_moe": replace(
        _QWEN3_MOE,
        root=_ROOT,
        tower=qwen3_tower,
        defaults={
            "num_key_value_heads": 16,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "decoder_sparse_step": 1,
            **_NO_WINDOW,
        },
        types=lambda c, layer: "full_attention",
    ),
}
