"""Shapes of models, compared with transformers' own modules on the meta device."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from longspan.core.errors import LongspanError
from longspan.hf.planning import tuning_of
from longspan.hf.pretrained import positions_of
from longspan.plan import cost, read_hardware
from longspan.plan.job import CostContext, Job, Mesh
from longspan.plan.layers import Linear, Mlp, Softmax, Window, exchange
from longspan.plan.models import CONFIGS, FAMILIES, ModelShape, Parameter, read_model, shape_from_config
from longspan.plan.models.family import EXPERT_COUNTS
from longspan.plan.models.read import BUILT_IN
from longspan.plan.models.tuning import STORED_ONE_BY_ONE, Tuning, tuned_shape
from tests.choose import confirming
from tests.models import build
from tests.said import says

# Other than the sizes that `_random_config` draws for every model type. Each entry is one case.
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "llama": [{}, {"attention_bias": True, "mlp_bias": True, "head_dim": 24, "tie_word_embeddings": True}],
    "mistral": [{}, {"sliding_window": None}, {"num_key_value_heads": 2, "rope_theta": 1e6}],
    "mixtral": [{}, {"sliding_window": 9, "num_local_experts": 4, "num_experts_per_tok": 3}],
    "qwen2": [
        {},
        {"use_sliding_window": True, "max_window_layers": 2, "sliding_window": 7},
        {"layer_types": ["full_attention", "sliding_attention", "full_attention"] * 2, "use_sliding_window": True},
    ],
    "qwen3": [{"num_key_value_heads": 4}, {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}],
    "qwen3_moe": [
        {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20},
        {"num_local_experts": 9, "mlp_only_layers": [1], "decoder_sparse_step": 2, "use_sliding_window": True},
        {"num_experts": 0},
    ],
    "qwen3_next": [
        {"num_experts": 6, "num_experts_per_tok": 2, "mlp_only_layers": [1]},
        {"full_attention_interval": 3, "linear_num_key_heads": 2, "linear_num_value_heads": 6, "num_experts": 16},
    ],
    "kimi_linear": [
        {"num_experts": 6, "num_experts_per_token": 2, "linear_num_heads": 2, "linear_head_dim": 6},
        {
            "q_lora_rank": 10,
            "attention_bias": True,
            "num_shared_experts": 2,
            "first_k_dense_replace": 3,
            "linear_attn_config": {
                "head_dim": 5,
                "num_heads": 3,
                "short_conv_kernel_size": 3,
                "full_attn_layers": [2, 6],
                "kda_layers": [1, 3, 4, 5],
            },
        },
    ],
    "nemotron_h": [
        {"hybrid_override_pattern": "M-*EM-", "n_routed_experts": 3, "n_groups": 4, "head_dim": 6},
        {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
            "moe_latent_size": 12,
            "use_conv_bias": False,
            "use_bias": True,
            "mlp_bias": True,
            "conv_kernel": 3,
        },
    ],
    "qwen3_5_text": [
        {"linear_num_key_heads": 2, "linear_num_value_heads": 6},
        {"full_attention_interval": 3, "linear_conv_kernel_dim": 2, "tie_word_embeddings": True},
    ],
    "qwen3_5_moe_text": [{"num_experts": 6, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 12}],
    "olmo_hybrid": [
        {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_value_head_dim": 6},
        {"num_hidden_layers": 3, "attention_bias": True},
    ],
    "lfm2": [
        {"full_attn_idxs": [2, 4], "block_multiple_of": 8},
        {"layer_types": ["conv", "full_attention"] * 3, "block_auto_adjust_ff_dim": False, "conv_bias": True},
    ],
    "lfm2_moe": [
        {
            "layer_types": ["conv", "full_attention"] * 3,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
        },
    ],
    "bamba": [
        {"mamba_n_heads": 4, "attn_layer_indices": [2, 5], "mamba_n_groups": 2, "mamba_d_state": 6},
        {
            "mamba_n_heads": 8,
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
            "mlp_bias": True,
            "attn_layer_indices": [0],
        },
    ],
    "granitemoehybrid": [
        {"mamba_n_heads": 4, "layer_types": ["mamba", "attention"] * 3, "num_local_experts": 3},
        {
            "mamba_n_heads": 2,
            "num_local_experts": 0,
            "shared_intermediate_size": 20,
            "attention_bias": True,
            "layer_types": ["linear_attention"] * 5 + ["full_attention"],
        },
    ],
    "minimax": [{}, {"layer_types": ["linear_attention"] * 5 + ["full_attention"], "num_local_experts": 3}],
    "phi3": [{}, {"sliding_window": 11, "num_key_value_heads": 2}],
    "olmo2": [{}, {"num_key_value_heads": 2, "attention_bias": True}],
    "gemma2": [{}, {"sliding_window": 17, "tie_word_embeddings": False}],
    "gemma3_text": [{}, {"sliding_window_pattern": 2, "head_dim": 12, "num_key_value_heads": 1}],
    "gpt_oss": [
        {"num_local_experts": 4},
        {"layer_types": ["full_attention"] * 6, "num_local_experts": 8, "head_dim": 8},
    ],
    "deepseek_v3": [
        {"n_routed_experts": 8, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_shared_experts": 2},
        {"q_lora_rank": None, "kv_lora_rank": 20, "v_head_dim": 12, "attention_bias": True, "num_local_experts": 16},
    ],
    "gpt2": [{}, {"n_inner": 40, "tie_word_embeddings": False, "n_positions": 50}],
    "gpt_neox": [{}, {"attention_bias": False, "tie_word_embeddings": True}],
}
CASES = [(model_type, i) for model_type, variants in VARIANTS.items() for i in range(len(variants))]

# Parameters of the published checkpoints.
PUBLISHED = {
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "mistral-7b": 7_241_732_096,
    "gemma-3-1b": 999_885_952,
    "nemotron-h-8b": 8_100_852_736,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
}


def _random_config(model_type: str, variant: int) -> dict[str, Any]:
    rng = random.Random(f"{model_type} {variant}")
    heads = rng.choice([4, 8])
    config: dict[str, Any] = {"vocab_size": rng.randint(50, 99), "pad_token_id": 0}
    sizes = [heads * 2 * rng.randint(3, 9), 6, heads, rng.randint(20, 70)]
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    if model_type == "gpt2":
        names, sizes = ("n_embd", "n_layer", "n_head"), sizes[:3]
    elif "num_key_value_heads" in FAMILIES[model_type.removesuffix("_text")].defaults:
        config["num_key_value_heads"] = rng.choice([1, 2, 4])  # the default is for a larger model
    return {"model_type": model_type, **config, **dict(zip(names, sizes, strict=True)), **VARIANTS[model_type][variant]}


def _build(config: dict[str, Any]) -> Any:
    import transformers

    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(_transformers_config(config))


def _transformers_config(config: dict[str, Any]) -> Any:
    import transformers

    return transformers.CONFIG_MAPPING[config["model_type"]].from_dict(config)


def _layers_of(model: Any) -> tuple[str, Any]:
    base = model.base_model
    name = "h" if hasattr(base, "h") else "layers"
    return f"{model.base_model_prefix}.{name}.", getattr(base, name)


def _shapes_of(module: Any, without: str = "no prefix") -> list[tuple[str, tuple[int, ...]]]:
    return [(name, tuple(p.shape)) for name, p in module.named_parameters() if not name.startswith(without)]


MLP_NAMES = r"^(feed_forward|block_sparse_moe)\.|^(?=shared_mlp\.)"


def _layer_shapes_of(layer: Any) -> list[tuple[str, tuple[int, ...]]]:
    """An MLP has our name for it; in Nemotron-H it may be a layer alone."""
    names = MLP_NAMES + r"|^mixer\." * (getattr(layer, "block_type", None) in ("mlp", "moe"))
    return [(re.sub(names, "mlp.", name), size) for name, size in _shapes_of(layer)]


def _ours(parameters: tuple[Parameter, ...]) -> list[tuple[str, tuple[int, ...]]]:
    return [(p.name, p.shape) for p in parameters]


def _kind_of(layer: Any, config: Any) -> tuple[str, int | None]:
    """The kind and the window that a transformers layer computes with."""
    attention = getattr(layer, "self_attn", getattr(layer, "mixer", None))
    recurrent = any(getattr(layer, name, None) is not None for name in ("linear_attn", "mamba", "conv"))
    if recurrent or any(x in type(attention).__name__ for x in ("Lightning", "Delta", "Mamba")):
        return "linear", None
    if getattr(layer, "block_type", None) in ("mlp", "moe"):
        return "no", None
    window = getattr(attention, "sliding_window", getattr(config, "sliding_window", None))
    if hasattr(attention, "layer_type") and attention.layer_type == "full_attention":
        window = None
    return ("full", None) if window is None else ("sliding", window)


def _assert_as_transformers(shape: ModelShape, config: dict[str, Any]) -> None:
    model = _build(config)
    theirs = positions_of(model.config)
    assert shape.positions == (theirs if theirs.rotary else replace(theirs, dims=shape.positions.dims))
    prefix, layers = _layers_of(model)
    by_layer = [sorted(_ours(layer.parameters)) for layer in shape.layers]
    assert by_layer == [sorted(_layer_shapes_of(layer)) for layer in layers]
    head = next(name for name, module in model.named_modules() if module is model.get_output_embeddings())
    root = [(name.replace(head, "lm_head"), size) for name, size in _shapes_of(model, without=prefix)]
    assert sorted(_ours(shape.root)) == sorted(root)  # GPT-NeoX's head once had another name
    assert shape.params == sum(p.numel() for p in model.parameters())
    assert shape.tied == (model.get_output_embeddings().weight is model.get_input_embeddings().weight)
    assert [(layer.mixer.name, layer.mixer.window) for layer in shape.layers] == [
        _kind_of(x, model.config) for x in layers
    ]
    assert shape.d_model == model.config.hidden_size
    assert shape.vocab == model.config.vocab_size
    assert shape.max_position == model.config.max_position_embeddings


@pytest.mark.parametrize(("model_type", "variant"), CASES)
def test_small_models_are_as_transformers_builds_them(model_type: str, variant: int) -> None:
    config = _random_config(model_type, variant)
    _assert_as_transformers(shape_from_config(config, model_type), config)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_defaults_are_those_of_the_config_class(model_type: str) -> None:
    import transformers

    family = FAMILIES[model_type]
    config = transformers.CONFIG_MAPPING[model_type]()
    tied = config.tie_word_embeddings  # of the whole model: Qwen3-VL-MoE's language model has another default
    config = config.get_text_config()
    for key in {"tie_word_embeddings", "attention_bias", "num_key_value_heads", *family.defaults}:
        names = EXPERT_COUNTS if key == "num_experts" else family.spellings.get(key, (key,))
        name = next((name for name in names if hasattr(config, name)), names[0])
        if key == "sliding_window" and not getattr(config, "use_sliding_window", True):
            continue  # the class has set it to None
        expected = tied if key == "tie_word_embeddings" else getattr(config, name, None)
        if key == "num_key_value_heads" and key not in family.defaults:
            assert expected in (None, config.num_attention_heads)
        elif expected is not None:
            assert family.defaults.get(key, False) == expected, key


def test_every_supported_model_type_is_compared() -> None:
    towers = {name for name, family in FAMILIES.items() if family.tower is not None}  # in test_plan_vision.py
    assert {name.removesuffix("_text") for name in VARIANTS} == set(FAMILIES) - towers


ONE_OF_EACH_TYPE = {config["model_type"]: name for name, config in CONFIGS.items()}.values()


@pytest.mark.parametrize(
    "name", [*ONE_OF_EACH_TYPE, *confirming(name for name in CONFIGS if name not in ONE_OF_EACH_TYPE)]
)
def test_built_in_models_are_as_transformers_builds_them(name: str) -> None:
    _assert_as_transformers(read_model(name), CONFIGS[name])


def test_parameters_of_the_published_checkpoints() -> None:
    assert {name: read_model(name).params for name in PUBLISHED} == PUBLISHED


def test_a_layer_of_llama_2_70b() -> None:
    model = read_model("llama-2-70b")
    ((layer, count),) = model.layer_kinds
    assert (count, layer.params) == (80, 855_638_016 + 16_384)
    assert layer.matmul_params_active == 855_638_016
    assert layer.mixer.cached_per_token == 2 * 8 * 128
    assert (model.q_heads, model.kv_heads, model.root_params) == (64, 8, 2 * 32000 * 8192 + 8192)


def test_equal_layers_are_one_object() -> None:
    model = read_model("gemma-3-4b")
    assert len({id(layer) for layer in model.layers}) == 2
    (sliding, n_sliding), (full, n_full) = model.layer_kinds
    assert (sliding.mixer.name, sliding.mixer.window, n_sliding) == ("sliding", 1024, 29)
    assert (full.mixer.name, full.mixer.window, n_full) == ("full", None, 5)
    assert model.layers[5] is full
    assert model.layers[0] is sliding


def test_active_parameters() -> None:
    # The gpt-oss model card: 3.61 and 5.13 billion active, the head counted and the embedding not.
    for name, billions in (("gpt-oss-20b", 3.61), ("gpt-oss-120b", 5.13)):
        model = read_model(name)
        assert round((model.active_params - model.vocab * model.d_model) / 1e9, 2) == billions
    dense, sparse = (layer for layer, _ in read_model("deepseek-v3").layer_kinds)
    assert dense.active_params == dense.params
    assert sparse.params - sparse.active_params == (256 - 8) * 3 * 7168 * 2048
    assert dense.mlp == Mlp(18432, gated=True)
    assert sparse.mlp == Mlp(2048, gated=True, experts=256, per_token=8, shared_ffn=2048)


def test_matrices_exclude_norms_biases_and_sinks() -> None:
    layer = read_model("gpt-oss-20b").layers[0]
    attention = 2880 * 64 * (64 + 8 + 8) + 64 * 64 * 2880
    assert layer.matmul_params_active == attention + 2880 * 32 + 4 * 3 * 2880 * 2880
    assert layer.mixer == Softmax(64, 8, 64, 64, Window(128), sinks=True)


def test_latent_attention_caches_the_latent_vector() -> None:
    """Only if it is smaller: keys and values of one of 128 heads are 320 elements, of two 640."""
    model = read_model("deepseek-v3")
    layer = model.layers[0]
    assert layer.mixer == Softmax(128, 128, 192, 128, latent_dim=512 + 64, rope_dim=64)
    assert layer.mixer.cached_per_token == 512 + 64
    job = Job(context=1024, mode="decode")
    for mesh, elements in ((Mesh(ring=64), 576 / 64), (Mesh(ulysses=64), 576), (Mesh(ulysses=128), 320)):
        assert layer.mixer.cache_bytes(CostContext(model, job, mesh)) == 1024 * 2 * elements
    expanded = replace(job, cache_latent=False)
    assert layer.mixer.cache_bytes(CostContext(model, expanded, Mesh(ulysses=64))) == 1024 * 2 * 2 * 320
    # It attends with heads of 576 and 512 over one KV head, so partial outputs are wider.
    (sent,) = exchange.decode(layer.mixer, CostContext(model, job, Mesh(ulysses=64)))
    assert sent.bytes == 2 * 512 * 2 * 63


def test_linear_layers_have_a_state_and_no_cache() -> None:
    model = shape_from_config(_random_config("qwen3_next", 1), "small")
    linear, full = (layer for layer, _ in model.layer_kinds)
    assert (linear.mixer.name, linear.mixer) == (
        "linear",
        Linear(6, 2, 128, 128, columns=128, channels=10 * 128, kernel=4),
    )
    assert isinstance(linear.mixer, Linear)
    assert (linear.mixer.state_elements, linear.mixer.cached_per_token) == (6 * 128 * 128, 0)
    assert full.mixer.cached_per_token == 2 * full.mixer.kv_heads * full.mixer.head_dim
    # The model's heads are those that softmax attention exchanges, not the 32 of the linear layers.
    assert shape_from_config(_random_config("qwen3_next", 0), "small").q_heads == full.mixer.q_heads


def test_the_text_part_of_a_multimodal_config() -> None:
    # As published for the 4B: heads and vocabulary are left out.
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    config = {"model_type": "gemma3", "text_config": {**text, "model_type": "gemma3_text"}}
    assert shape_from_config(config, "4b").params == read_model("gemma-3-4b").params
    assert shape_from_config({**config, "tie_word_embeddings": False}, "4b").tied is False


def test_names_as_on_the_hub() -> None:
    for written, name in {
        "LLaMA-2-7B": "llama-2-7b",
        "meta-llama/Llama-2-70b-hf": "llama-2-70b",
        "meta-llama/Llama-2-13b-chat-hf": "llama-2-13b",
        "meta-llama/Meta-Llama-3.1-8B-Instruct": "llama-3.1-8b",
        "google/gemma-3-27b-it": "gemma-3-27b",
        "google/gemma-3-1b-pt": "gemma-3-1b",
        "mistralai/Mistral-7B-v0.1": "mistral-7b",
        "deepseek-ai/DeepSeek-V3": "deepseek-v3",
    }.items():
        assert read_model(written).name == name


def test_a_file_or_its_folder(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIGS["qwen3-0.6b"]))
    for path in (file, tmp_path):
        model = read_model(str(path))
        assert (model.name, model.params) == (str(path), 596_049_920)


def test_lora_adapts_the_weights_that_peft_adapts() -> None:
    """As a config and its flags say, and as a model with adapters shows: of experts, too."""
    import peft
    from peft.utils.transformers_weight_conversion import _MODEL_TO_CONVERSION_PATTERN as patterns

    assert all(patterns[name] in ("mixtral", "qwen2_moe") for name in STORED_ONE_BY_ONE)
    cases: list[tuple[str, tuple[str, ...]]] = [
        ("Qwen3Moe", ()), ("Qwen3Moe", ("q_proj", "down_proj")), ("Mixtral", ()), ("Mixtral", ("w2",)),
        ("DeepseekV3", ()), ("DeepseekV3", ("gate",)), ("GptOss", ()),
    ]  # fmt: skip
    for family, targets in cases:
        base = build(family)
        shape = shape_from_config(base.config.to_dict(), "test")
        model = peft.get_peft_model(base, peft.LoraConfig(r=3, target_modules=list(targets) or "all-linear"))
        trained = sorted(p.numel() for p in model.parameters() if p.requires_grad)
        for tuning in (Tuning(lora=3, targets=targets), tuning_of(base)):
            found = tuned_shape(shape, tuning)
            planned = [p.numel for layer in found.layers for p in layer.parameters if p.trained]
            assert sorted(planned) == trained, (family, tuning)
    eight = tuned_shape(shape_from_config(build("Qwen3Moe", num_experts=8).config.to_dict(), "test"), Tuning(lora=3))
    assert CostContext(eight, Job(context=64, batch=8, experts="auto"), Mesh(data=8)).experts == 4  # two on each rank
    with pytest.raises(LongspanError, match=r"experts=8 leaves a rank without 2, which LoRA .* 8 experts; use 4"):
        cost(eight, Job(context=64, batch=8, experts=8), Mesh(data=8), read_hardware("cpu"))


@pytest.mark.parametrize("model_type", ["granite", "smollm3"])
def test_a_config_like_llamas(model_type: str) -> None:
    config = {**_transformers_config({**_random_config("llama", 0), "model_type": model_type}).to_dict()}
    shape = shape_from_config(config, "another")
    assert shape.assumption == f"model_type {model_type!r} is not known; read as a Llama's"
    _assert_as_transformers(shape, {**config, "model_type": model_type})


def test_chunked_layers() -> None:
    config = {**_llama(rms_norm_eps=1e-5, hidden_act="silu"), "model_type": "new", "attention_chunk_size": 8}
    types = ["chunked_attention", "full_attention"]
    model = shape_from_config({**config, "layer_types": types}, "new")
    assert [(layer.mixer.name, layer.mixer.window) for layer in model.layers] == [("chunked", 8), ("full", None)]


def _llama(**changes: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    return {"model_type": "llama", "vocab_size": 100, **sizes, **changes}


def _refusal(config: dict[str, Any]) -> str:
    with pytest.raises(LongspanError) as error:
        shape_from_config(config, "my/config.json")
    return str(error.value)


def _unreadable(name_or_path: object) -> str:
    with pytest.raises(LongspanError) as error:
        read_model(str(name_or_path))
    return str(error.value)


def test_an_unknown_name() -> None:
    fix = "for another model give the path of its config.json"
    near = _unreadable("Qwen/Qwen3-9B")
    assert near.startswith("model Qwen/Qwen3-9B is not built in (did you mean 'qwen3-") and near.endswith(f"?); {fix}")
    assert _unreadable("zzz") == f"model zzz is not built in (there are {', '.join(BUILT_IN)}); {fix}"
    # v0.3 has another shape than v0.1.
    assert "did you mean 'mistral-7b'" in _unreadable("mistralai/Mistral-7B-v0.3")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    assert _unreadable(file) == (
        f"there is no file {file}; give the path of a config.json, or one of {', '.join(BUILT_IN)}"
    )
    assert _unreadable(tmp_path) == (
        f"the folder {tmp_path} has no config.json; give a folder that has one, or the file itself"
    )
    file.write_text("{not json")
    assert _unreadable(file).startswith(f"{file} is not JSON (Expecting property name")
    assert _unreadable(file).endswith("; give the config.json of a Hugging Face model")
    file.write_bytes(b"\xff\xfe{}")
    assert _unreadable(file).startswith(f"--model {file} cannot be read: it is not UTF-8 text")
    file.write_text("[1, 2]")
    assert says(_unreadable(file), f"{file} holds a JSON list ... give the config.json of a Hugging Face model")


def test_missing_sizes_are_all_named() -> None:
    missing = "my/config.json ... num_hidden_layers, num_attention_heads, intermediate_size, vocab_size; ... state them"
    assert says(_refusal({"model_type": "llama", "hidden_size": 64, "vocab_size": None}), missing)
    only = "my/config.json ... no n_head; ... state it"
    assert says(_refusal({"model_type": "gpt2", "vocab_size": 9, "n_embd": 8, "n_layer": 2}), only)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 0}, "hidden_size must be at least 1, got 0"),
        ({"num_hidden_layers": -2}, "num_hidden_layers must be at least 1, got -2"),
        ({"vocab_size": 10.5}, "vocab_size must be an integer ... got 10.5"),
        ({"intermediate_size": "96"}, "intermediate_size must be an integer ... got '96'"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings='no' must be true or false"),
        (
            {"num_key_value_heads": 3},
            "num_attention_heads=4 ... num_key_value_heads=3 ... use 3 or 6",
        ),
        ({"num_key_value_heads": 8}, "num_attention_heads=4 ... num_key_value_heads=8 ... use 8"),
        ({"hidden_size": 66}, "hidden_size=66 ... num_attention_heads=4 ... use 64 or 68"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder=true; only causal decoders are supported, set it to false"),
        (
            {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5},
            "layer_types[0] is 'sliding_attention' ... 'full_attention' ... remove layer_types or change the model",
        ),
        (
            {"layer_types": ["full_attention", "mamba"]},
            "layer_types[1] is 'mamba' ... full_attention, attention, sliding_attention",
        ),
        (
            {"layer_types": ["full_attention"]},
            "layer_types ... 2 layers ... 1 entries",
        ),
    ],
)
def test_impossible_values(changes: dict[str, Any], message: str) -> None:
    assert says(_refusal(_llama(**changes)), f"my/config.json: ... {message}")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            _llama(model_type="qwen3", num_key_value_heads=4, layer_types=["sliding_attention"] * 2),
            "layer_types has sliding_attention ... (use_sliding_window is false) ... set sliding_window in tokens",
        ),
        (
            _llama(model_type="gemma2", sliding_window=None),
            "layer_types has sliding_attention ... set sliding_window in tokens",
        ),
        (
            _llama(model_type="mixtral", num_key_value_heads=4, num_local_experts=2, num_experts_per_tok=3),
            "num_experts_per_tok=3 is more than the 2 experts of a layer",
        ),
        (
            _llama(model_type="mistral"),
            "num_attention_heads=4 ... num_key_value_heads=8 (the default) ... use 8",
        ),
        (
            _llama(model_type="deepseek_v3", moe_layer_freq=2),
            "moe_layer_freq=2; transformers builds 1 only, set it to 1",
        ),
        (
            _llama(model_type="deepseek_v3", kv_lora_rank=None),
            "kv_lora_rank is null; it must be an integer, at least 1",
        ),
        (
            _llama(model_type="minimax", num_key_value_heads=4, attn_type_list=[0, 1]),
            "attn_type_list ... give layer_types, with 'linear_attention' for 0 and 'full_attention' for 1",
        ),
        (
            _llama(model_type="minimax", num_key_value_heads=4, sliding_window=5),
            "sliding_window is not supported for this model_type; set it to null",
        ),
        (
            _llama(model_type="gemma3", use_bidirectional_attention=True),
            "use_bidirectional_attention=true; only causal decoders are supported, set it to false",
        ),
    ],
)
def test_impossible_values_of_one_model_type(config: dict[str, Any], message: str) -> None:
    assert says(_refusal(config), f"my/config.json: ... {message}")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            {"model_type": "mamba", "state_size": 16, "hidden_size": 64},
            "it has state_size; it has no num_hidden_layers",
        ),
        (_llama(model_type="falcon_h1", mamba_d_state=8), "it has mamba_d_state"),
        (_llama(model_type="t5gemma", is_encoder_decoder=True), "it has is_encoder_decoder"),
    ],
)
def test_model_types_that_are_not_supported(config: dict[str, Any], reason: str) -> None:
    message = _refusal(config)
    model_type = config["model_type"]
    assert f"model_type {model_type!r} is not supported, and it cannot be read as a Llama's: {reason}" in message
    assert message.endswith(f"Supported are {', '.join(sorted(FAMILIES))}")


@pytest.mark.parametrize(
    ("config", "assumed"),
    [
        (_llama(model_type="gemma", hidden_act="gelu", head_dim=16), "its MLP, of hidden_act 'gelu', is assumed"),
        (_llama(model_type="starcoder2", sliding_window=8), "sliding_window=8 is ignored"),
        (_llama(model_type="olmoe", num_experts=8, num_experts_per_tok=2), "every layer is assumed to have experts"),
    ],
)
def test_an_unknown_family_is_read_from_its_config(config: dict[str, Any], assumed: str) -> None:
    shape = shape_from_config(config, "another")
    assert shape.assumption is not None and assumed in shape.assumption
    assert len(shape.layers) == 2 and shape.layers[0].mlp.ffn == 96
    assert shape.layers[0].mlp.experts == config.get("num_experts", 0)
    assert any(assumed in note for note in cost(shape, Job(context=512), Mesh(ulysses=2), read_hardware("h100")).notes)


DENSE = ("llama", "mistral", "qwen2", "qwen3", "phi3", "olmo2", "gemma2", "gemma3_text", "gpt_neox")


@pytest.mark.parametrize("model_type", DENSE)
def test_cached_elements_per_token_equal_those_of_transformers(model_type: str) -> None:
    for variant in range(len(VARIANTS[model_type])):
        config = _random_config(model_type, variant)
        with torch.device("meta"):
            cache = _build(config)(input_ids=torch.zeros(2, 5, dtype=torch.int64), use_cache=True).past_key_values
        held = [(x.keys.numel() + x.values.numel()) / (2 * x.keys.shape[2]) for x in cache.layers]
        assert held == [layer.mixer.cached_per_token for layer in shape_from_config(config, model_type).layers]
