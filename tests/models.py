"""Small models of each family, batches for them (the same on every rank), and the results of one process."""

from __future__ import annotations

import copy
import functools
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import longspan
from longspan.verify.judge import NUDGES
from longspan.verify.runs import fp64_casts, keep_furthest, nudged
from tests.tolerance import excess, excess_of_rows

BASE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def ropes(kind: str, positions: int) -> dict[str, Any]:
    """Return the config of a RoPE whose frequencies depend on the length, of 16 original positions."""
    table = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0, "short_factor": [1.0] * 4,
             "long_factor": [3.0] * 4, "original_max_position_embeddings": 16}  # fmt: skip
    return {"max_position_embeddings": positions, "rope_parameters": table}


ALTERNATING = ["sliding_attention", "full_attention"]
EXPERTS = {"num_experts_per_tok": 2, "head_dim": 8}

# Windows and chunks are shorter than the 21 tokens of `batch`, so that they matter; every kind of layer occurs. Some
# weights are larger than usual, as a softcap has no effect on small scores.
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {"use_sliding_window": True, "sliding_window": 6, "layer_types": ALTERNATING},
    "Qwen3": {"head_dim": 8},
    "Qwen3Moe": {**EXPERTS, "num_experts": 4, "moe_intermediate_size": 16},
    "Mistral": {"sliding_window": 7},
    "Mixtral": {**EXPERTS, "num_local_experts": 4, "sliding_window": 9},
    "Gemma2": {
        "head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8, "layer_types": ALTERNATING,
        "attn_logit_softcapping": 1.0, "initializer_range": 0.2, "attn_implementation": "eager",
    },
    "Gemma3Text": {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8, "layer_types": ALTERNATING},
    "GptOss": {
        "head_dim": 8, "sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2,
        "layer_types": ALTERNATING, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "attn_implementation": "eager",
    },
    "Phi3": {"sliding_window": 5},
    "Olmo2": {},
    "Olmo3": {"sliding_window": 6, "layer_types": ALTERNATING},
    "GPTNeoX": {"num_key_value_heads": None},
    "GPT2": {
        "num_key_value_heads": None, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0,
        "scale_attn_by_inverse_layer_idx": True,
    },
    "Llama4Text": {
        "head_dim": 8, "intermediate_size_mlp": 40, "num_local_experts": 4, "moe_layers": [1], "no_rope_layers": [1, 0],
        "attention_chunk_size": 8, "floor_scale": 4, "attn_scale": 0.5, "initializer_range": 0.2,
    },
    "Bert": {"num_key_value_heads": None, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "ModernBert": {"num_key_value_heads": None, "local_attention": 8, "layer_types": ALTERNATING},
}  # fmt: skip

MORE: dict[str, dict[str, Any]] = {
    "Albert": {**FAMILIES["Bert"], "embedding_size": 16},
    "DistilBert": {"num_key_value_heads": None, "intermediate_size": None, "dropout": 0.0, "attention_dropout": 0.0},
    "OPT": {"num_key_value_heads": None, "word_embed_proj_dim": 32, "ffn_dim": 48, "dropout": 0.0},
    "Qwen2Moe": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    },
    "Gemma4Text": {
        "head_dim": 8, "global_head_dim": 16, "sliding_window": 8, "layer_types": ALTERNATING,
        "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 61,
    },
    "Gemma3nText": {
        "head_dim": 8, "sliding_window": 8, "layer_types": ALTERNATING, "vocab_size_per_layer_input": 61,
        "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0, "laurel_rank": 4, "altup_num_inputs": 2,
        "activation_sparsity_pattern": [0.5, 0.0],
    },
    "Olmoe": {**EXPERTS, "num_experts": 4},
    "Glm4": {"head_dim": 8},
    "DeepseekV2": {
        "num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
        "v_head_dim": 6, "n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
        "moe_intermediate_size": 24, "n_shared_experts": 1,
    },
    "DeepseekV3": {
        "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
        "v_head_dim": 6, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1, "moe_intermediate_size": 24, "n_shared_experts": 1,
    },
    "GraniteMoe": {**EXPERTS, "num_local_experts": 4},
    "HunYuanDenseV1": {"head_dim": 8},
    "HunYuanMoEV1": {"head_dim": 8, "num_experts": 4, "moe_topk": 2},
}  # fmt: skip
MORE |= {name: {**FAMILIES["Bert"], "type_vocab_size": 1} for name in ("Roberta", "Camembert")}
MORE |= {name: FAMILIES["Bert"] for name in ("BioGpt", "Esm")}
"""Families that only some tests build."""

_DELTA_NET = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 8,
}  # fmt: skip
_MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 6, "mamba_chunk_size": 8}
_MAMBA1 = {"mamba_d_state": 4, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": 3}
_LINEAR, _FULL = "linear_attention", "full_attention"
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
NO_ATTENTION = {"num_attention_heads": None, "num_key_value_heads": None, "max_position_embeddings": None}

HYBRIDS: dict[str, dict[str, Any]] = {
    "Qwen3Next": {
        **_DELTA_NET, **_EXPERTS, "layer_types": [_LINEAR, _FULL], "head_dim": 8,
        "shared_expert_intermediate_size": 16,
    },
    "OlmoHybrid": {**_DELTA_NET, "layer_types": [_LINEAR, _FULL], "linear_num_key_heads": 4},
    "KimiLinear": {
        **_EXPERTS, "layer_types": [_LINEAR, _FULL], "linear_num_heads": 2, "linear_head_dim": 8,
        "num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
        "v_head_dim": 8,
    },
    "Bamba": {**_MAMBA2, "attn_layer_indices": [1]},
    "Mamba2": {
        **NO_ATTENTION, "num_heads": 4, "head_dim": 16, "n_groups": 2, "state_size": 6, "chunk_size": 8,
    },
    "NemotronH": {
        "layer_types": [_LINEAR, "mlp", _FULL, "moe"], "num_hidden_layers": None, "mamba_num_heads": 4,
        "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 6, "chunk_size": 8, "head_dim": 8, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 16,
    },
    "FalconH1": {**_MAMBA2, "head_dim": 8, "mamba_d_ssm": 64},
    "GraniteMoeHybrid": {
        **_MAMBA2, "layer_types": [_LINEAR, _FULL], "num_local_experts": 4, "num_experts_per_tok": 2,
        "shared_intermediate_size": 16,
    },
    "Zamba2": {
        "layers_block_type": [_LINEAR, "hybrid", "hybrid"], "num_hidden_layers": 3, "mamba_ngroups": 2,
        "n_mamba_heads": 4, "mamba_d_state": 6, "chunk_size": 8, "num_key_value_heads": 4, "num_mem_blocks": 1,
        "adapter_rank": 4,
    },
    "Mamba": {**NO_ATTENTION, "state_size": 4},
    "FalconMamba": {**NO_ATTENTION, "state_size": 4},
    "Jamba": {
        **_MAMBA1, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4, "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
    "Zamba": {
        "layers_block_type": [_LINEAR, "hybrid", "hybrid"], "num_hidden_layers": 3, "n_mamba_heads": 2,
        "mamba_d_state": 4, "mamba_dt_rank": 3, "num_key_value_heads": 4,
    },
    "Lfm2": {"layer_types": ["conv", _FULL], "block_auto_adjust_ff_dim": False},
    "Lfm2Moe": {
        **_EXPERTS, "layer_types": ["conv", _FULL], "num_dense_layers": 1,
    },
    "Lfm3": {"layer_types": ["conv", _FULL]},
    "Qwen3_5Text": {**_DELTA_NET, "layer_types": [_LINEAR, _FULL], "head_dim": 8},
    "Qwen3_5MoeText": {
        **_DELTA_NET, **_EXPERTS, "layer_types": [_LINEAR, _FULL], "head_dim": 8,
        "shared_expert_intermediate_size": 16,
    },
    "BailingHybrid": {
        "layer_types": [_LINEAR, _FULL], "num_key_value_heads": 4, "head_dim": 8, "kv_lora_rank": 16,
        "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "n_group": 1, "topk_group": 1,
        "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1,
    },
    "MiniMax": {
        "layer_types": [_LINEAR, _FULL], "num_local_experts": 4, "num_experts_per_tok": 2, "block_size": 8,
        "initializer_range": 0.2,
    },
}  # fmt: skip
"""Models with recurrent layers or short convolutions."""
MORE |= HYBRIDS

_INDEXED = {
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 6, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "mlp_layer_types": ["dense", "sparse", "dense"], "num_hidden_layers": 3, "moe_intermediate_size": 24,
    "n_shared_experts": 1, "index_topk": 6, "index_n_heads": 2, "index_head_dim": 8, "initializer_range": 0.2,
}  # fmt: skip
_SHARED = {"indexer_types": ["full", "shared", "full"]}

INDEXED: dict[str, dict[str, Any]] = {
    "DeepseekV32": _INDEXED,
    "GlmMoeDsa": {**_INDEXED, **_SHARED},
    "AXK2": {**_INDEXED, "gated_norm_rank": 4},
    "HYV4": {**_INDEXED, **_SHARED, "hc_mult": 2},
    "Dots3NoteText": {
        **_INDEXED,
        "layer_types": ["indexed_attention", "sliding_attention", "indexed_attention"],
        "sliding_window": 8,
        "head_dim": 12,
        "shared_experts_intermediate_size": 24,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 24,
        "swa_kv_lora_rank": 20,
        "swa_head_dim": 12,
        "swa_qk_nope_head_dim": 6,
        "swa_v_head_dim": 8,
    },
}
"""Models whose queries attend to the tokens that an indexer chooses. With two heads, many scores of it are equal: 0."""
MORE |= INDEXED

COMPRESSED: dict[str, dict[str, Any]] = {
    "DeepseekV4": {
        "num_key_value_heads": 1, "num_hidden_layers": 4, "head_dim": 8, "q_lora_rank": 24, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "n_shared_experts": 1, "intermediate_size": None, "moe_intermediate_size": 24,
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention",
                        "compressed_sparse_attention"],
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4}, "sliding_window": 5,
        "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"], "hc_mult": 2, "o_groups": 2, "o_lora_rank": 8,
        "index_n_heads": 2, "index_head_dim": 8, "index_topk": 3, "partial_rotary_factor": 0.5,
        "initializer_range": 0.2,
    },
    "MiniMaxM3VLText": {
        "head_dim": 8, "num_hidden_layers": 3, "rotary_dim": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
        "dense_intermediate_size": 48, "shared_intermediate_size": 16, "mlp_layer_types": ["dense", "sparse", "sparse"],
        "layer_types": ["minimax_m3_sparse", "full_attention", "minimax_m3_sparse"], "index_n_heads": 2,
        "index_head_dim": 4, "index_block_size": 3, "index_topk_blocks": 3, "initializer_range": 0.2,
    },
    "Qwen4ExpText": {
        **_DELTA_NET, **_EXPERTS, "layer_types": [_LINEAR, "indexed_attention"], "head_dim": 8, "hc_count": 2,
        "hc_lowrank": 8, "shared_expert_intermediate_size": 16, "indexer_n_heads": 2, "indexer_kv_heads": 1,
        "indexer_head_dim": 8, "indexer_budget": 4, "indexer_compress_ratio": 2, "initializer_range": 0.2,
    },
}  # fmt: skip
MORE |= COMPRESSED

UNEVEN: dict[str, Any] = {
    "num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48, "intermediate_size": 50, "vocab_size": 61,
    "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True,
}  # fmt: skip
"""A Llama whose heads, features and vocabulary no tensor axis divides."""

MASKED = {"Albert", "DistilBert", "Bert", "ModernBert", "MobileBert", "Esm", "Roberta", "Camembert"}
"""Masked language models: bidirectional, and the logits at a token predict that token."""


def build(family: str, seed: int = 0, **changes: Any) -> Any:
    """Return a language model of `family` in fp32, with random weights that depend on `seed` alone."""
    import transformers

    options = {**BASE, **FAMILIES.get(family, MORE.get(family, {})), **changes}
    options = {name: value for name, value in options.items() if value is not None}
    torch.default_generator.manual_seed(seed)  # `torch.manual_seed` formats the stack for each kind of device
    config = getattr(transformers, f"{family}Config")(**options)
    kind = transformers.AutoModelForMaskedLM if family in MASKED else transformers.AutoModelForCausalLM
    return kind.from_config(config).float()


def batch(rows: int = 4, n: int = 21, seed: int = 1, vocab: int = 61) -> dict[str, Tensor]:
    """Return token ids and labels with very different numbers of labels: row 0 has none, row 1 half."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, vocab, (rows, n), generator=g)
    labels = ids.clone()
    labels[0, : n if rows > 1 else n // 3] = -100
    labels[1 % rows, : n // 2] = -100
    return {"input_ids": ids, "labels": labels}


def rows_of(whole: dict[str, Any], data_rank: int, data_size: int) -> dict[str, Any]:
    """Return the rows of a global batch that one replica reads."""
    out = {}
    for name, value in whole.items():
        if isinstance(value, Tensor) and value.dim() > 1 and value.shape[0] > 1:
            value = value.chunk(data_size)[data_rank]
        out[name] = value
    return out


def gradients(model: Any) -> dict[str, Tensor]:
    """Return full gradients by parameter name, gathered from FSDP's shards."""
    out = {}
    for name, p in model.named_parameters():
        if p.grad is not None:
            out[name] = (p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad).detach().clone()
    return out


@dataclass
class Run:
    """The results of one forward and backward of a global batch."""

    loss: float
    logits: Tensor
    gradients: dict[str, Tensor]
    aux_loss: float | None


@dataclass
class Truth:
    """Results of one process in fp32, which show how large rounding is, and in fp64.

    Each number of `single` is the furthest from `exact` of several runs, whose weights differ in the last place, as a
    single run may be right by luck.
    """

    single: Run
    exact: Run


def widened(model: Any) -> Any:
    """Return a copy of `model` in fp64, with its loss, which transformers computes in fp32, in fp64 too."""
    wide = copy.deepcopy(model).double()
    if hasattr(wide, "set_experts_implementation"):
        wide.set_experts_implementation("eager")  # the grouped product of a mixture of experts has no fp64
    inner = wide.get_base_model() if hasattr(wide, "get_base_model") else wide  # PEFT's wrapper
    masked = "MaskedLM" in type(inner).__name__

    def loss(
        logits: Tensor, labels: Tensor, vocab_size: Any = None, num_items_in_batch: Any = None, **_: Any
    ) -> Tensor:
        targets = labels if masked else F.pad(labels, (0, 1), value=-100)[:, 1:]
        total = F.cross_entropy(logits.double().flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
        return total / ((targets != -100).sum() if num_items_in_batch is None else num_items_in_batch)

    inner.loss_function = loss
    return wide


def run_of(model: Any, whole: dict[str, Any]) -> Run:
    out = model(**whole, use_cache=False)  # with a cache, transformers ignores packed documents
    out.loss.backward()
    aux = getattr(out, "aux_loss", None)
    aux = None if aux is None else float(aux.detach())
    return Run(float(out.loss.detach()), out.logits.detach(), gradients(model), aux)


def truth_of(model: Any, whole: dict[str, Any]) -> Truth:
    return truth_by(model, lambda m: run_of(m, whole))


def truth_by(model: Any, run: Callable[[Any], Run], wide: Callable[[Any], Any] = widened) -> Truth:
    """Return the truth of a model by `run`, which is called with copies first, and `model` itself last.

    `wide` makes the copy that counts as exact; for a model that cannot run in fp64, a plain copy.
    """
    nudges = [nudged(model, seed) for seed in range(NUDGES)]
    widest = wide(model)
    with fp64_casts(widest):
        exact = run(widest)
    single = run(model)
    for other in map(run, nudges):
        keep_furthest(single.gradients, other.gradients, exact.gradients)
        keep_furthest({"logits": single.logits}, {"logits": other.logits}, {"logits": exact.logits})
        single.loss = _furthest(exact.loss, single.loss, other.loss)
        single.aux_loss = _furthest(exact.aux_loss, single.aux_loss, other.aux_loss)
    return Truth(single, exact)


def _furthest(exact: Any, *found: Any) -> Any:
    return None if exact is None else max(found, key=lambda value: abs(value - exact))


def sharding(data: int = 1, ring: int = 1, layout: str = "auto") -> longspan.SequenceSharding:
    """Return a sharding over all ranks of the job, as data x ring x ulysses."""
    ulysses = dist.get_world_size() // (data * ring)
    return longspan.SequenceSharding(longspan.init_mesh(data=data, ring=ring, ulysses=ulysses), layout)


def on_mesh(mesh: dict[str, int]) -> longspan.SequenceSharding:
    """Return a sharding by the names of a mesh's axes."""
    return longspan.SequenceSharding(longspan.init_mesh(**mesh))


Case = tuple[dict[str, int], dict[str, Any]]
"""A mesh and the options of `parallelize`."""


def compare_cases(make: Callable[[], Any], cases: list[Case], truth: Truth) -> None:
    """Compare a model that `make` returns with one process's results in each case."""
    for mesh, options in cases:
        model = longspan.parallelize(make(), sp := on_mesh(mesh), **options)
        try:
            compare(truth, model.eval() if options.get("logits") else model, batch(), sp)
        except AssertionError as error:
            raise AssertionError(f"{type(model).__name__} {mesh} {options}: {error}") from error


def lora_on_experts(
    model: Any, weights: Sequence[str] = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight")
) -> Any:
    """Put PEFT's LoRA on stacked experts, their router and on queries; it changes what the model computes."""
    import peft

    torch.manual_seed(3)
    config = peft.LoraConfig(r=3, target_modules=["q_proj"], target_parameters=list(weights), init_lora_weights=False)
    return peft.get_peft_model(model, config)


def meshes(ranks: int) -> list[tuple[int, int, str]]:
    """Return data, ring and layout of every mesh of so many ranks; the others are Ulysses."""
    powers = [1 << i for i in range(ranks.bit_length())]
    return [
        (data, ring, layout)
        for data, ring in itertools.product(powers[:-1], powers)
        if data * ring <= ranks
        for layout in (("contiguous", "zigzag") if ring > 1 else ("auto",))
    ]


def compare(
    truth: Truth, model: Any, whole: dict[str, Any], sp: longspan.SequenceSharding, mine: dict[str, Any] | None = None
) -> None:
    """Assert equal loss, logits and gradients of a parallelized model, and one loss on all ranks.

    Args:
        truth: of one process.
        model: parallelized, without gradients.
        whole: the global batch.
        sp: the model's sharding.
        mine: the rows of this replica, if `rows_of` cannot cut them.
    """
    mine = rows_of(whole, sp.data_rank, sp.data_size) if mine is None else mine
    out = model(**mine)
    out.loss.backward()
    loss = float(out.loss.detach())
    check_loss(loss, truth)
    if truth.exact.aux_loss is not None:
        check_loss(float(out.aux_loss.detach()), truth, "aux_loss")
    losses: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(losses, loss)
    assert len(set(losses)) == 1
    found = gradients(model)  # before the next forward, which leaves FSDP's last group gathered
    if model.training and model.longspan_state.head is not None:
        assert "logits" not in out
        with torch.no_grad():
            out = model(**{name: value for name, value in mine.items() if name != "labels"})
    logits = sp.gather(out.logits.detach(), dim=1, length=mine["input_ids"].shape[1])
    real = mine.get("attention_mask", torch.ones(mine["input_ids"].shape)).bool()
    single, exact = (run.logits.chunk(sp.data_size)[sp.data_rank][real] for run in (truth.single, truth.exact))
    assert excess_of_rows(logits[real], single, exact) <= 1, excess_of_rows(logits[real], single, exact)
    check_gradients(found, truth)


def check_loss(found: float, truth: Truth, name: str = "loss") -> None:
    single, exact = getattr(truth.single, name), getattr(truth.exact, name)
    assert excess(found, single, exact) <= 1, (name, found, single, exact)


def check_gradients(found: dict[str, Tensor], truth: Truth) -> None:
    """Assert that every gradient is that of one process, and that there are no others."""
    worst = gradient_excess(found, truth)
    assert max(worst.values()) <= 1, max(worst.items(), key=lambda item: item[1])


def gradient_excess(found: dict[str, Tensor], truth: Truth) -> dict[str, float]:
    single, exact = truth.single.gradients, truth.exact.gradients
    assert found.keys() == exact.keys(), found.keys() ^ exact.keys()
    rms = statistics.median(float(grad.norm()) / math.sqrt(grad.numel()) for grad in exact.values())
    noise = sorted(float((single[name] - x).norm() / x.norm()) for name, x in exact.items() if bool(x.any()))
    usual = noise[int(0.9 * (len(noise) - 1))]  # not the largest, which may come from cancellation
    return {name: excess(found[name], single[name], grad, rms, usual) for name, grad in exact.items()}


# --- every family on every mesh

# (data, ring, whether weights are sharded); the other ranks are ulysses.
SHARDED = [(1, 1, True), (2, 1, True), (1, 2, True), (1, 4, True), (2, 2, True)]
ON_4_RANKS = [*SHARDED, (2, 1, False)]


def inputs_of(family: str) -> dict[str, Any]:
    """Return `batch`, with the other inputs of a family."""
    whole: dict[str, Any] = batch()
    if family == "Bert":
        whole["token_type_ids"] = (torch.arange(21) > 9).long().expand(4, -1).contiguous()
    return whole


def padded(family: str, side: str) -> dict[str, Any]:
    """Return `inputs_of` a family with padding on one side, different in each row."""
    whole = inputs_of(family)
    n = whole["input_ids"].shape[1]
    mask = torch.ones_like(whole["input_ids"])
    for row, missing in enumerate((0, 3, 9, 1)):
        mask[row, n - missing :] = 0
    mask = mask if side == "right" else mask.flip(1)
    whole["input_ids"] = whole["input_ids"] * mask
    whole["labels"] = torch.where(mask == 1, whole["labels"], -100)
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    return {**whole, "attention_mask": mask, "position_ids": positions}


def alone(family: str, changes: dict[str, Any], whole: dict[str, Any], sizes: tuple[int, ...]) -> Truth:
    """Run each document by itself; the loss is the mean over the tokens of all."""
    model = build(family, **changes)
    return truth_by(model, lambda m: _each_alone(m, family, whole, sizes))


def _each_alone(model: Any, family: str, whole: dict[str, Any], sizes: tuple[int, ...]) -> Run:
    names = ("input_ids", "token_type_ids")
    logits = []
    start = 0
    for size in sizes:
        part = {name: whole[name][:, start : start + size] for name in names if name in whole}
        logits.append(model(**part, use_cache=False).logits)
        start += size
    joined = torch.cat(logits, 1)
    labels = whole["labels"] if family in MASKED else F.pad(whole["labels"], (0, 1), value=-100)[:, 1:]
    loss = F.cross_entropy(joined.flatten(0, 1), labels.flatten(), ignore_index=-100)
    loss.backward()
    return Run(float(loss.detach()), joined.detach(), gradients(model), None)


@functools.cache
def truth_about(family: str, changes: tuple[tuple[str, Any], ...] = (), inputs: Any = inputs_of, *args: Any) -> Truth:
    """Return `truth_of` a family, computed once by the test process and sent to the ranks."""
    return truth_of(build(family, **dict(changes)), inputs(family, *args))


def packed(family: str) -> dict[str, Any]:
    whole = {name: x[:2] for name, x in inputs_of(family).items()}
    positions = torch.cat([torch.arange(k) for k in (5, 9, 7)])
    return {**whole, "labels": whole["labels"].flip(0), "position_ids": torch.stack([positions, torch.arange(21)])}


def with_holes(family: str) -> dict[str, Any]:
    """A row of padding alone, zeros between ones, padding at either end, and labels in the holes."""
    whole = inputs_of(family)
    mask = torch.ones_like(whole["input_ids"])
    mask[0], mask[1, :4], mask[1, 9:12], mask[2, 5], mask[3, 3:8], mask[3, 18:] = 0, 0, 0, 0, 0, 0
    whole["labels"] = whole["labels"].flip(0)
    whole["labels"][0], whole["labels"][3, 18:] = -100, -100
    if family in MASKED:
        whole["labels"][1, :4] = -100
    return {**whole, "attention_mask": mask}
