"""Small models of each family, from their configs, and batches for them: the same on every rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

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

FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {"head_dim": 8},
    "Mistral": {"sliding_window": 7},
    "Phi3": {},
    "Olmo2": {},
    "GPTNeoX": {"num_key_value_heads": None},
}


def build(family: str, seed: int = 0, **changes: Any) -> Any:
    """A causal LM of `family` in fp32, with random weights that depend on `seed` alone."""
    import transformers

    options = {**BASE, **FAMILIES.get(family, {}), **changes}
    options = {name: value for name, value in options.items() if value is not None}
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**options)
    return transformers.AutoModelForCausalLM.from_config(config).float()


def batch(rows: int = 4, n: int = 21, seed: int = 1, vocab: int = 61) -> dict[str, Tensor]:
    """Token ids and labels with very uneven numbers of valid tokens: row 0 has none, row 1 only in its second half."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, vocab, (rows, n), generator=g)
    labels = ids.clone()
    labels[0, : n if rows > 1 else n // 3] = -100
    labels[1 % rows, : n // 2] = -100
    return {"input_ids": ids, "labels": labels}


def rows_of(whole: dict[str, Any], data_rank: int, data_size: int) -> dict[str, Any]:
    """The rows of a global batch that one replica reads."""
    out = {}
    for name, value in whole.items():
        if isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] > 1:
            value = value.chunk(data_size)[data_rank]
        out[name] = value
    return out


def gradients(model: Any) -> dict[str, Tensor]:
    """Whole gradients by parameter name, gathered where FSDP holds shards."""
    out = {}
    for name, p in model.named_parameters():
        if p.grad is not None:
            out[name] = (p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad).detach().clone()
    return out
