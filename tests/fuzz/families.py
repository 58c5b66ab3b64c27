"""Every causal and masked language model of the installed transformers, as a small model with random weights, and the
vision-language models of `tests/hf/pictures.py`.

The families are those of transformers' auto classes. A config starts as the family's default, and `shrunk` makes its
numbers small by their names, so that a new family of transformers needs no line here.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from longspan.hf.model.small import HEAD_DIM as HEAD_DIM
from longspan.hf.model.small import HEADS as HEADS
from longspan.hf.model.small import HIDDEN as HIDDEN
from longspan.hf.model.small import VOCABULARY as VOCABULARY
from longspan.hf.model.small import shrunk as shrunk
from tests.fuzz import multimodal
from tests.hf import pictures

PARAMETERS = 1_000_000
"""Parameters of the largest model that counts as small; the fuzzer skips families whose model is larger."""

AS_CHECKPOINTS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "deepseek_v4": {
        "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"], "num_hidden_layers": 2,
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        "mlp_layer_types": ["hash_moe", "moe"], "partial_rotary_factor": 0.5, "num_key_value_heads": 1,
        "index_n_heads": 32,  # of fewer, many scores are equal, and transformers chooses others in chunks
    },
    "dots3_note_text": {
        "layer_types": ["indexed_attention", "sliding_attention"], "mlp_layer_types": ["dense", "sparse"],
        "head_dim": 12, "swa_num_attention_heads": HEADS,
        "swa_num_key_value_heads": HEADS, "swa_q_lora_rank": 8, "swa_kv_lora_rank": 8, "swa_head_dim": 12,
        "swa_qk_nope_head_dim": 8, "swa_v_head_dim": 8, "num_hidden_layers": 2, "shared_experts_intermediate_size": 24,
    },
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "minimax_m3_vl_text": {
        "layer_types": ["minimax_m3_sparse", "full_attention"], "index_n_heads": 2, "index_block_size": 4,
        "index_topk_blocks": 2,
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 4,
        "indexer_compress_ratio": 2,
    },
    "zamba": {"layers_block_type": ["linear_attention", "hybrid", "hybrid"], "num_hidden_layers": 3},
}  # fmt: skip
"""Values of families whose default config, or its first layers, lack a kind of layer that their checkpoints have."""


def families() -> list[str]:
    """Return `causal/MODEL_TYPE` and `masked/MODEL_TYPE` for each in transformers' lists, its own name per class,
    `types/MODEL_TYPE` for each image-text-to-text type, and `vision/NAME`.
    """
    from transformers.models.auto import modeling_auto as auto

    found: dict[Any, str] = {}
    for kind, names in (
        ("causal", auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        ("masked", auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
    ):
        for model_type, name in names.items():
            cls = config_class(model_type)
            own = cls.model_type if names.get(cls.model_type) == name else model_type
            found.setdefault((kind, name, cls), f"{kind}/{own}")
    return [
        *found.values(),
        *(f"vision/{name}" for name in pictures.FAMILIES),
        *(f"types/{name}" for name in multimodal.types()),
    ]


def model_name(family: str) -> str:
    """Return the name of a family's class in transformers."""
    from transformers.models.auto import modeling_auto as auto

    kind, _, model_type = family.partition("/")
    causal, masked = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    return str((causal if kind == "causal" else masked)[model_type])


def config_class(model_type: str) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[model_type]


def default_model(family: str) -> Any:
    """Return the model of the family's default config."""
    kind, _, model_type = family.partition("/")
    return _auto(kind).from_config(config_class(model_type)(), dtype=torch.float32)


def _auto(kind: str) -> Any:
    import transformers

    return {"causal": transformers.AutoModelForCausalLM, "masked": transformers.AutoModelForMaskedLM,
            "types": transformers.AutoModelForMultimodalLM}[kind]  # fmt: skip


def build(family: str, changes: dict[str, Any], seed: int) -> Any:
    """Return a model of `family` in fp32 with random weights that depend on `seed` alone."""
    kind, _, model_type = family.partition("/")
    if kind == "types":
        torch.manual_seed(seed)
        model = multimodal.build(model_type, {**changes, "vocab_size": VOCABULARY})
        draw(model, seed)
        return model
    if kind == "vision":
        heads = {name: value for name, value in changes.items() if name == "num_key_value_heads"}
        return pictures.build(model_type, seed, text_config={**pictures.FAMILIES[model_type]["text_config"], **heads})
    cls = config_class(model_type)
    config = shrunk(cls, changes, AS_CHECKPOINTS)
    if kind == "causal" and getattr(config, "is_decoder", None) is False:
        config.is_decoder = True
    if getattr(config.get_text_config(), "attn_logit_softcapping", None):
        config._attn_implementation = "eager"  # with sdpa, transformers leaves out the softcap
    auto = _auto(kind)
    with torch.device("meta"):
        count = sum(p.numel() for p in auto.from_config(config, dtype=torch.float32).parameters())
    if count > PARAMETERS:
        raise ValueError(f"{family} has {count:,} parameters, its config was not made small")
    torch.manual_seed(seed)
    model = auto.from_config(config, dtype=torch.float32)
    draw(model, seed)
    return model


@torch.no_grad()
def draw(model: Any, seed: int) -> None:
    """Draw weights large enough that attention is not uniform, and biases and norms that differ."""
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        noise = torch.randn(p.shape, generator=generator)
        if p.dim() < 2:
            p += 0.1 * noise
        elif 0 < (std := float(p.std())) < 0.1:
            p *= min(0.15, 1 / math.sqrt(p.shape[-1])) / std
