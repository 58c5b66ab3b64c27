"""Shapes of models, which the planner reads from transformers' modules on the meta device."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from longspan.core.cache import CacheConfig
from longspan.core.errors import LongspanError
from longspan.core.parallel import ParallelConfig
from longspan.plan import cost, read_hardware
from longspan.plan.from_model import read_model, shape_from_config, shape_of_model
from longspan.plan.job import CostContext, Job
from longspan.plan.layers import Linear, Mlp, Parallel, Softmax, Window, messages
from longspan.plan.names import MODELS
from longspan.plan.shape import Tuning
from tests.choose import confirming
from tests.models import FAMILIES, HYBRIDS, MORE, build
from tests.said import says

pytestmark = [pytest.mark.fast, pytest.mark.versions]

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
SHARED = ("Albert", "Zamba", "Zamba2")  # layers that share weights, which the planner counts in each


def _on_meta(config: dict[str, Any]) -> Any:
    with torch.device("meta"):
        made = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(config)
        seeing = "vision_config" in config
        auto = transformers.AutoModelForImageTextToText if seeing else transformers.AutoModelForCausalLM
        return auto.from_config(made)


_TYPES = {values["config"]["model_type"]: name for name, values in MODELS.items()}  # the last model of each type


@pytest.mark.parametrize("name", [*_TYPES.values(), *confirming(set(MODELS) - set(_TYPES.values()))])
def test_parameters_of_built_in_models_are_those_of_transformers(name: str) -> None:
    model, shape = _on_meta(MODELS[name]["config"]), read_model(name)
    assert shape.params == sum(p.numel() for p in model.parameters())
    assert shape.params == PUBLISHED.get(name, shape.params)
    text = model.config.get_text_config()
    assert (shape.d_model, shape.vocab, len(shape.layers)) == (
        text.hidden_size, text.vocab_size, text.num_hidden_layers,
    )  # fmt: skip
    assert shape.tied == (model.get_output_embeddings().weight is model.get_input_embeddings().weight)
    assert PUBLISHED.keys() <= MODELS.keys()


@pytest.mark.parametrize("family", [*FAMILIES, *HYBRIDS, *confirming(MORE)])
def test_every_family_that_can_be_sharded_is_read(family: str) -> None:
    model = build(family)
    shape = shape_of_model(model)
    params = sum(p.numel() for p in model.parameters())
    assert shape.params > params if family in SHARED else shape.params == params
    assert all(layer.mixing.q_heads or layer.mlp.width or layer.mixing.name == "linear" for layer in shape.layers)
    plan = cost(shape, Job(context=64, dtype="fp32").on(ulysses=2), read_hardware("h100"))
    assert plan.memory_total_bytes > 0 and plan.step_seconds > 0


def test_a_layer_of_llama_2_70b() -> None:
    model = read_model("llama-2-70b")
    ((layer, count),) = model.layer_kinds
    assert (count, layer.params) == (80, 855_638_016 + 16_384)
    assert layer.matmul_params_active == 855_638_016
    assert layer.mixing.cached_per_token == 2 * 8 * 128
    assert (model.q_heads, model.kv_heads, model.root_params) == (64, 8, 2 * 32000 * 8192 + 8192)


def test_equal_layers_are_one_object() -> None:
    model = read_model("gemma-3-4b")
    assert len({id(layer) for layer in model.layers}) == 2
    (sliding, n_sliding), (full, n_full) = model.layer_kinds
    assert (sliding.mixing.name, sliding.mixing.window, n_sliding) == ("sliding", 1024, 29)
    assert (full.mixing.name, full.mixing.window, n_full) == ("full", None, 5)
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
    assert layer.mixing == Softmax(64, 8, 64, 64, Window(128), sinks=True)


def test_latent_attention_caches_the_latent_vector() -> None:
    """Only if it is smaller: keys and values of one of 128 heads are 320 elements, of two 640."""
    model = read_model("deepseek-v3")
    layer = model.layers[0]
    assert layer.mixing == Softmax(128, 128, 192, 128, latent_dim=512 + 64, rope_dim=64)
    assert layer.mixing.cached_per_token == 512 + 64
    job = Job(context=1024, mode="decode")
    for mesh, elements in (
        (ParallelConfig(ring=64), 576 / 64),
        (ParallelConfig(ulysses=64), 576),
        (ParallelConfig(ulysses=128), 320),
    ):
        assert layer.mixing.cache_bytes(CostContext(model, job.on(**mesh.degrees))) == 1024 * 2 * elements
    expanded = replace(job, cache=CacheConfig(latent=False))
    assert layer.mixing.cache_bytes(CostContext(model, expanded.on(ulysses=64))) == 1024 * 2 * 2 * 320
    # It attends with heads of 576 and 512 over one KV head, so partial outputs are wider.
    (sent,) = messages.decode(layer.mixing, CostContext(model, job.on(ulysses=64)))
    assert sent.bytes == 2 * 512 * 2 * 63


def test_recurrent_layers() -> None:
    """Each kind: heads, state and convolution, as the layer computes with them."""
    delta = {"columns": 128, "channels": 8192, "kernel": 4, "decays": "head"}
    first = {
        "qwen3-next-80b-a3b": Linear(32, 16, 128, 128, **delta),  # type: ignore[arg-type]
        "kimi-linear-48b-a3b": Linear(32, 32, 128, 128, **{**delta, "channels": 3 * 4096, "decays": "key"}),  # type: ignore[arg-type]
        "nemotron-h-8b": Linear(128, 8, 128, 64, columns=1, chunk=128, channels=128 * 64 + 2 * 8 * 128, kernel=4),
        "minimax-text-01": Linear(64, 64, 128, 128, columns=1, chunk=256, decays="head"),
    }
    for name, mixing in first.items():
        model = read_model(name)
        assert model.layers[0].mixing == mixing, name
        full = next(layer for layer in model.layers if layer.mixing.shards_heads)
        assert model.q_heads == full.mixing.q_heads  # those that softmax attention exchanges
    assert (mixing.state_elements, mixing.cached_per_token) == (64 * 128 * 128, 0)
    latent = Softmax(32, 32, 192, 128, latent_dim=576, rope_dim=64, sliceable=False)  # its plan names no attention
    assert read_model("kimi-linear-48b-a3b").layers[3].mixing == latent


def test_attention_and_a_recurrence_in_one_layer() -> None:
    shape = shape_of_model(build("FalconH1"))
    mixing = shape.layers[0].mixing
    assert isinstance(mixing, Parallel)
    c = CostContext(shape, Job(context=64).on(ulysses=2))
    alone = Softmax(*(getattr(mixing, name) for name in ("q_heads", "kv_heads", "head_dim", "v_head_dim")))
    assert mixing.sent(c) == [*alone.sent(c), *mixing.beside.sent(c)]
    assert mixing.saved(c) == alone.saved(c) + mixing.beside.saved(c)
    assert mixing.max_flops(c) == alone.max_flops(c) + mixing.beside.max_flops(c)
    decode = CostContext(shape, Job(context=64, mode="decode").on(ulysses=2))
    assert mixing.cache_bytes(decode) == alone.cache_bytes(decode) + mixing.beside.cache_bytes(decode)


@pytest.mark.parametrize("family", ["Mistral", "Qwen3", "Gemma3Text", "Olmo2", "GPTNeoX"])
def test_cached_elements_per_token_equal_those_of_transformers(family: str) -> None:
    model = build(family).to("meta")
    with torch.device("meta"):
        cache = model(input_ids=torch.zeros(2, 5, dtype=torch.int64), use_cache=True).past_key_values
    held = [(x.keys.numel() + x.values.numel()) / (2 * x.keys.shape[2]) for x in cache.layers]
    assert held == [layer.mixing.cached_per_token for layer in shape_of_model(model).layers]


# ---------------------------------------------------------------------------------------------------------------------
# Which weights are trained.


def test_lora_adapts_the_weights_that_peft_adapts() -> None:
    """As flags say it, and as a model with adapters shows it: of experts, too."""
    import peft

    cases: list[tuple[str, tuple[str, ...]]] = [
        ("Llama", ()), ("Qwen3Moe", ()), ("Qwen3Moe", ("q_proj", "down_proj")), ("Mixtral", ("w2",)),
        ("DeepseekV3", ("gate",)), ("GptOss", ()),
    ]  # fmt: skip
    for family, targets in cases:
        base = build(family)
        config = base.config.to_dict()
        model = peft.get_peft_model(base, peft.LoraConfig(r=3, target_modules=list(targets) or "all-linear"))
        trained = sorted(p.numel() for p in model.parameters() if p.requires_grad)
        for found in (shape_from_config(config, "test", Tuning(lora=3, targets=targets)), shape_of_model(base)):
            planned = [p for layer in found.layers for p in layer.parameters if p.trained]
            assert sorted(p.numel for p in planned) == trained, (family, targets)
            assert all(".lora_" in p.name and ".default" not in p.name for p in planned)
            adapted = {p.name.partition(".lora_")[0] for p in planned if ".experts." in p.name}
            assert adapted <= {p.name for layer in found.layers for p in layer.parameters}
            assert found.params == sum(p.numel() for p in model.parameters())


def test_lora_on_experts_needs_two_on_each_rank() -> None:
    eight = shape_from_config(build("Qwen3Moe", num_experts=8).config.to_dict(), "test", Tuning(lora=3))
    assert CostContext(eight, Job(context=64, batch=8, parallel=ParallelConfig(experts="auto")).on(data=8)).experts == 4
    with pytest.raises(LongspanError, match=r"experts=8 leaves a rank without 2, which LoRA .* 8 experts; use 4"):
        cost(eight, Job(context=64, batch=8, parallel=ParallelConfig(experts=8)).on(data=8), read_hardware("cpu"))


def test_frozen_weights_and_weights_in_4_bits() -> None:
    config = MODELS["qwen3-0.6b"]["config"]
    frozen = shape_from_config(config, "test", Tuning(freeze=("*embed_tokens*", "*.layers.[0-3].*")))
    assert [layer.has_backward for layer in frozen.layers[3:5]] == [False, True]
    weights = [*frozen.root, *(p for layer in frozen.layers for p in layer.parameters)]
    of_trained = sum(p.numel for p in weights if p.trained)
    assert of_trained == frozen.params - frozen.root[0].numel - 4 * frozen.layers[0].params
    packed = shape_from_config(config, "test", Tuning(lora=8, quantize=True))
    matrices = [p for p in packed.layers[0].parameters if len(p.shape) == 2]
    assert packed.packed and all(p.packed != (".lora_" in p.name) for p in matrices)
    with pytest.raises(LongspanError, match=r"freeze=\* leaves no weight to train"):
        shape_from_config(config, "test", Tuning(freeze=("*",)))
    with pytest.raises(LongspanError, match="--tuning 8,targets=nothing cannot be put on the model: Target mod"):
        shape_from_config(config, "test", Tuning(8, ("nothing",)))


# ---------------------------------------------------------------------------------------------------------------------
# Names, files, and what is refused.


def test_names_as_on_the_hub() -> None:
    for written, name in {
        "LLaMA-2-7B": "llama-2-7b",
        "meta-llama/Llama-2-70b-hf": "llama-2-70b",
        "meta-llama/Llama-2-13b-chat-hf": "llama-2-13b",
        "meta-llama/Meta-Llama-3.1-8B-Instruct": "llama-3.1-8b",
        "google/gemma-3-27b-it": "gemma-3-27b",
        "mistralai/Mistral-7B-v0.1": "mistral-7b",
        "deepseek-ai/DeepSeek-V3": "deepseek-v3",
    }.items():
        assert read_model(written).name == name


def test_a_file_or_its_folder(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(MODELS["qwen3-0.6b"]["config"]))
    for path in (file, tmp_path):
        model = read_model(str(path))
        assert (model.name, model.params) == (str(path), 596_049_920)


def _unreadable(name_or_path: object) -> str:
    with pytest.raises(LongspanError) as error:
        read_model(str(name_or_path))
    return str(error.value)


def test_an_unknown_name() -> None:
    fix = "for another model give the path of its config.json"
    near = _unreadable("Qwen/Qwen3-9B")
    assert near.startswith("model Qwen/Qwen3-9B is not built in (did you mean 'qwen3-") and near.endswith(f"?); {fix}")
    assert _unreadable("zzz") == f"model zzz is not built in (there are {', '.join(MODELS)}); {fix}"
    # v0.3 has another shape than v0.1.
    assert "did you mean 'mistral-7b'" in _unreadable("mistralai/Mistral-7B-v0.3")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    assert (
        _unreadable(file) == f"there is no file {file}; give the path of a config.json, or one of {', '.join(MODELS)}"
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


LLAMA = {"model_type": "llama", "vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "lama"}, "does not know model_type 'lama', and the planner reads only models that .* builds"),
        ({"model_type": None}, "does not know model_type None"),
        ({"hidden_size": 0}, "hidden_size must be at least 1, got 0"),
        ({"num_hidden_layers": -2}, "num_hidden_layers must be at least 1, got -2"),
        ({"hidden_size": "64"}, "transformers cannot read this config: .*hidden_size"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 does not divide by num_key_value_heads=3"),
        ({"layer_types": ["full_attention"]}, "transformers cannot read this config: .*layer_type"),
        (
            {"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 3, "num_key_value_heads": 4},
            "num_experts_per_tok=3 is more than the 2 experts of a layer",
        ),
        ({"model_type": "t5gemma"}, "attends to an encoder|cannot build a causal"),
        ({"model_type": "vit"}, "cannot build a causal language model of this config"),
    ],
)
def test_configs_that_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LongspanError, match=rf"^my/config.json\b.*{message}"):
        shape_from_config({**LLAMA, **changes}, "my/config.json")


def test_attention_dropout_is_noted() -> None:
    (reason,) = shape_from_config({**LLAMA, "attention_dropout": 0.1}, "test").refused
    assert re.match(r"attention dropout \(attention_dropout=0.1\) is not trained", reason)
