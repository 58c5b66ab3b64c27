"""The measured model as a config, as the planner's shape and as its job. Imports no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from longspan.bench.config import MAX_CONTEXT, BenchConfig
from longspan.bench.methods import Candidate
from longspan.core.validation import existing_path
from longspan.plan.job import Job
from longspan.plan.models import CONFIGS, read_model, shape_from_config
from longspan.plan.models.shape import ModelShape


def read_config(config: BenchConfig) -> dict[str, Any]:
    """Return the config.json of the measured model, with the sizes of its heads filled in.

    Raises:
        LongspanError: for a model that the planner cannot read.
    """
    if config.model is None:
        return {
            "model_type": "llama",
            "hidden_size": config.heads * config.head_dim,
            "num_attention_heads": config.heads,
            "num_key_value_heads": config.kv_heads,
            "head_dim": config.head_dim,
            "intermediate_size": config.ffn,
            "num_hidden_layers": config.layers,
            "vocab_size": config.vocab,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": MAX_CONTEXT,
        }
    shape = read_model(config.model)
    softmax = shape.layers[0].mixer
    known = {
        "num_attention_heads": softmax.q_heads,
        "num_key_value_heads": softmax.kv_heads,
        "head_dim": softmax.head_dim,
        "hidden_size": shape.d_model,
        "intermediate_size": shape.layers[0].mlp.ffn,
        "num_hidden_layers": len(shape.layers),
        "vocab_size": shape.vocab,
    }
    path = existing_path("--model", config.model)
    if path is None:
        written: dict[str, Any] = dict(CONFIGS[shape.name])
    else:
        written = json.loads((path / "config.json" if path.is_dir() else Path(path)).read_text())
    return {**written, **{key: value for key, value in known.items() if written.get(key) is None}}


def shape_of(what: str, model: dict[str, Any]) -> ModelShape:
    """Return the planner's shape; for an attention, one layer with a hidden size of heads x head_dim."""
    if what == "step":
        return shape_from_config(model, "the measured model")
    width = model["num_attention_heads"] * model["head_dim"]
    sizes = {key: model[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim")}
    more = {"intermediate_size": width, "num_hidden_layers": 1, "vocab_size": 64, "rms_norm_eps": 1e-6}
    limits = {"max_position_embeddings": MAX_CONTEXT}
    return shape_from_config({"model_type": "llama", "hidden_size": width, **sizes, **more, **limits}, "an attention")


def job_of(config: BenchConfig, candidate: Candidate, context: int) -> Job:
    """Return the planner's job of a candidate: one sequence per replica."""
    method = candidate.method
    chunks = config.overlap_chunks if method.options.get("overlap") is True else 1
    return Job(context=context, batch=candidate.mesh.data, dtype=config.dtype, overlap_chunks=chunks, **method.job)
