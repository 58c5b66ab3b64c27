"""Built-in models: the keys of each published `config.json` that decide its shape. Standard library only.

Read them with `longspan.plan.read_model`. Keys left out have the defaults of the config class in transformers 5.
"""

from __future__ import annotations

from typing import Any

_LLAMA_2 = {"model_type": "llama", "vocab_size": 32000, "max_position_embeddings": 4096}
_LLAMA_3 = {
    "model_type": "llama",
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
_QWEN_3 = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
}
_QWEN_3_MOE = {
    **_QWEN_3,
    "model_type": "qwen3_moe",
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
# The text part of the published configs. The 1B has a vocabulary and a context of its own, and no RoPE scaling.
_GEMMA_3 = {
    "model_type": "gemma3_text",
    "vocab_size": 262208,
    "head_dim": 256,
    "sliding_window": 1024,
    "max_position_embeddings": 131072,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}
_GPT_OSS = {
    "model_type": "gpt_oss",
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "max_position_embeddings": 131072,
}
# The GPT models of DeepSpeed-Ulysses (arXiv 2309.14509), of which the paper states the parameters alone: 1.2, 7 and
# 30 billion. A guess: widths, depths and heads. They are those of "1.3B", "6.7B" and "30B" in the authors' launch
# scripts (Megatron-DeepSpeed, examples_deepspeed/sequence_parallel), and give 1.21, 6.44 and 29.0 billion without the
# embedding. A guess as well: the vocabulary (GPT-2's) and the tied head (Megatron's default). Sixteen heads allow the
# smallest a Ulysses degree of 16; the paper ran it on 64 GPUs and does not say with which degree.
# They are written as GPT-NeoX's, which is GPT-2's layer with rotary positions: at the paper's million tokens a table of
# learnt positions would outweigh the smallest model.
_GPT = {
    "model_type": "gpt_neox",
    "vocab_size": 50257,
    "tie_word_embeddings": True,
    "max_position_embeddings": 1048576,
}


def _sizes(layers: int, d: int, ffn: int, heads: int) -> dict[str, Any]:
    return {"num_hidden_layers": layers, "hidden_size": d, "intermediate_size": ffn, "num_attention_heads": heads}


CONFIGS: dict[str, dict[str, Any]] = {
    "llama-2-7b": {**_LLAMA_2, **_sizes(32, 4096, 11008, 32)},
    "llama-2-13b": {**_LLAMA_2, **_sizes(40, 5120, 13824, 40)},
    "llama-2-70b": {**_LLAMA_2, **_sizes(80, 8192, 28672, 64), "num_key_value_heads": 8},
    "llama-3.1-8b": {**_LLAMA_3, **_sizes(32, 4096, 14336, 32)},
    "llama-3.1-70b": {**_LLAMA_3, **_sizes(80, 8192, 28672, 64)},
    "llama-3.1-405b": {**_LLAMA_3, **_sizes(126, 16384, 53248, 128)},
    "qwen3-0.6b": {**_QWEN_3, **_sizes(28, 1024, 3072, 16), "tie_word_embeddings": True},
    "qwen3-1.7b": {**_QWEN_3, **_sizes(28, 2048, 6144, 16), "tie_word_embeddings": True},
    "qwen3-4b": {**_QWEN_3, **_sizes(36, 2560, 9728, 32), "tie_word_embeddings": True},
    "qwen3-8b": {**_QWEN_3, **_sizes(36, 4096, 12288, 32)},
    "qwen3-14b": {**_QWEN_3, **_sizes(40, 5120, 17408, 40)},
    "qwen3-32b": {**_QWEN_3, **_sizes(64, 5120, 25600, 64)},
    "qwen3-30b-a3b": {**_QWEN_3_MOE, **_sizes(48, 2048, 6144, 32), "moe_intermediate_size": 768},
    "qwen3-235b-a22b": {**_QWEN_3_MOE, **_sizes(94, 4096, 12288, 64), "moe_intermediate_size": 1536},
    # v0.1: the later versions of the 7B have no window.
    "mistral-7b": {
        "model_type": "mistral",
        "vocab_size": 32000,
        **_sizes(32, 4096, 14336, 32),
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "max_position_embeddings": 32768,
    },
    "gemma-3-1b": {
        **_GEMMA_3,
        **_sizes(26, 1152, 6912, 4),
        "num_key_value_heads": 1,
        "vocab_size": 262144,
        "sliding_window": 512,
        "max_position_embeddings": 32768,
        "rope_scaling": None,
    },
    "gemma-3-4b": {**_GEMMA_3, **_sizes(34, 2560, 10240, 8), "num_key_value_heads": 4},
    "gemma-3-12b": {**_GEMMA_3, **_sizes(48, 3840, 15360, 16), "num_key_value_heads": 8},
    "gemma-3-27b": {**_GEMMA_3, **_sizes(62, 5376, 21504, 32), "num_key_value_heads": 16, "head_dim": 128},
    "gpt-oss-20b": {**_GPT_OSS, "num_hidden_layers": 24, "num_local_experts": 32},
    "gpt-oss-120b": {**_GPT_OSS, "num_hidden_layers": 36, "num_local_experts": 128},
    # Without the module for multi-token prediction, which transformers does not build.
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        "vocab_size": 129280,
        **_sizes(61, 7168, 18432, 128),
        "num_key_value_heads": 128,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "max_position_embeddings": 163840,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 40.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
        },
    },
    # Recurrent layers. Without the module for multi-token prediction, as above.
    "qwen3-next-80b-a3b": {
        "model_type": "qwen3_next",
        "vocab_size": 151936,
        **_sizes(48, 2048, 5120, 16),
        "max_position_embeddings": 262144,
    },
    "kimi-linear-48b-a3b": {
        "model_type": "kimi_linear",
        "vocab_size": 163840,
        **_sizes(27, 2304, 9216, 32),
        "q_lora_rank": None,
        "linear_attn_config": {
            "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
            "kda_layers": [layer for layer in range(1, 27) if layer % 4],
            "head_dim": 128,
            "num_heads": 32,
            "short_conv_kernel_size": 4,
        },
    },
    "nemotron-h-8b": {
        "model_type": "nemotron_h",
        "vocab_size": 131072,
        "hidden_size": 4096,
        "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
        "max_position_embeddings": 8192,
    },
    # Softmax attention in every eighth layer.
    "minimax-text-01": {
        "model_type": "minimax",
        "vocab_size": 200064,
        **_sizes(80, 6144, 9216, 64),
        "head_dim": 128,
        "num_local_experts": 32,
        "layer_types": (["linear_attention"] * 7 + ["full_attention"]) * 10,
        "max_position_embeddings": 10240000,
    },
    "gpt-1.2b": {**_GPT, **_sizes(24, 2048, 8192, 16)},
    "gpt-7b": {**_GPT, **_sizes(32, 4096, 16384, 32)},
    "gpt-30b": {**_GPT, **_sizes(64, 6144, 24576, 64)},
}
"""A config by the name that `read_model` takes, in lower case."""


def _qwen2_5_vl(tower_ffn: int, d: int, **text: Any) -> dict[str, Any]:
    vision = {
        "depth": 32, "hidden_size": 1280, "intermediate_size": tower_ffn, "num_heads": 16, "out_hidden_size": d,
        "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
    }  # fmt: skip
    shared = {"model_type": "qwen2_5_vl", "vocab_size": 152064, "max_position_embeddings": 128000}
    return {**shared, **text, "vision_config": vision}


def _qwen3_vl(depth: int, width: int, ffn: int, after: list[int], text: dict[str, Any]) -> dict[str, Any]:
    vision = {
        "depth": depth, "hidden_size": width, "intermediate_size": ffn, "num_heads": 16, "patch_size": 16,
        "out_hidden_size": text["hidden_size"], "deepstack_visual_indexes": after, "num_position_embeddings": 2304,
    }  # fmt: skip
    model_type = "qwen3_vl_moe" if "num_experts" in text else "qwen3_vl"
    text = {**text, "model_type": f"{model_type}_text", "max_position_embeddings": 262144}
    tied = text.pop("tie_word_embeddings", False)
    return {"model_type": model_type, "tie_word_embeddings": tied, "text_config": text, "vision_config": vision}


_LARGE = (27, 1152, 4304, [8, 16, 24])

VISION_CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2.5-vl-3b": _qwen2_5_vl(
        3420, 2048, **_sizes(36, 2048, 11008, 16), num_key_value_heads=2, vocab_size=151936, tie_word_embeddings=True
    ),
    "qwen2.5-vl-7b": _qwen2_5_vl(3420, 3584, **_sizes(28, 3584, 18944, 28), num_key_value_heads=4),
    "qwen2.5-vl-32b": _qwen2_5_vl(3456, 5120, **_sizes(64, 5120, 27648, 40), num_key_value_heads=8),
    "qwen2.5-vl-72b": _qwen2_5_vl(3456, 8192, **_sizes(80, 8192, 29568, 64), num_key_value_heads=8),
    "qwen3-vl-2b": _qwen3_vl(
        24, 1024, 4096, [5, 11, 17], {**_QWEN_3, **_sizes(28, 2048, 6144, 16), "tie_word_embeddings": True}
    ),
    "qwen3-vl-4b": _qwen3_vl(
        24, 1024, 4096, [5, 11, 17], {**_QWEN_3, **_sizes(36, 2560, 9728, 32), "tie_word_embeddings": True}
    ),
    "qwen3-vl-8b": _qwen3_vl(*_LARGE, {**_QWEN_3, **_sizes(36, 4096, 12288, 32)}),
    "qwen3-vl-32b": _qwen3_vl(*_LARGE, {**_QWEN_3, **_sizes(64, 5120, 25600, 64)}),
    "qwen3-vl-30b-a3b": _qwen3_vl(*_LARGE, {**_QWEN_3_MOE, **_sizes(48, 2048, 6144, 32), "moe_intermediate_size": 768}),
}
"""Vision-language models, by the names that `read_model` takes."""

HUB: dict[str, str] = {
    **{f"llama-2-{size}b": f"meta-llama/Llama-2-{size}b-hf" for size in (7, 13, 70)},
    **{f"llama-3.1-{size}b": f"meta-llama/Llama-3.1-{size}B" for size in (8, 70, 405)},
    **{f"qwen3-{size.lower()}": f"Qwen/Qwen3-{size}" for size in ("0.6B", "1.7B", "4B", "8B", "14B", "32B")},
    "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B",
    "qwen3-235b-a22b": "Qwen/Qwen3-235B-A22B",
    "mistral-7b": "mistralai/Mistral-7B-v0.1",
    "qwen3-next-80b-a3b": "Qwen/Qwen3-Next-80B-A3B-Instruct",
    "kimi-linear-48b-a3b": "moonshotai/Kimi-Linear-48B-A3B-Base",
    "nemotron-h-8b": "nvidia/Nemotron-H-8B-Base-8K",
    "minimax-text-01": "MiniMaxAI/MiniMax-Text-01-hf",
    "gemma-3-1b": "google/gemma-3-1b-pt",
}
"""Where the Hugging Face hub has weights of a built-in model that `longspan train` takes as they are."""

ELSEWHERE: dict[str, str] = {
    # Published with a vision tower, which is not sharded; quantized; not at all.
    **{f"gemma-3-{size}b": f"--model FOLDER_OF_THE_TEXT_PART_OF_GEMMA-3-{size}B" for size in (4, 12, 27)},
    **{f"gpt-oss-{size}b": f"--model FOLDER_OF_GPT-OSS-{size}B_IN_BF16" for size in (20, 120)},
    "deepseek-v3": "--model FOLDER_OF_DEEPSEEK-V3_IN_BF16",
    **{f"gpt-{size}b": f"--config CONFIG_OF_GPT-{size}B" for size in ("1.2", "7", "30")},
}
"""Of the others, what stands in a command for what the user has to make first."""
