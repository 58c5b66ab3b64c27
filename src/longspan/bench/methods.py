"""The methods that `bench attention` and `bench step` compare, their meshes, and the planner's job of each."""

from __future__ import annotations

import difflib
import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from longspan.bench.command import MAX_CONTEXT, BenchConfig
from longspan.bench.workloads import (
    AttentionInputs,
    StepInputs,
    Workload,
    longspan_step,
    sequence_attention,
    tensor_attention,
)
from longspan.core.cache import CACHE_DTYPES
from longspan.core.errors import LongspanError
from longspan.core.validation import existing_path, format_value
from longspan.plan.job import Job, Mesh
from longspan.plan.models import CONFIGS, read_model, shape_from_config
from longspan.plan.models.shape import ModelShape


@dataclass(frozen=True)
class Method:
    """A method to compare, on any number of ranks."""

    name: str  # in `--methods`
    meshes: Callable[[int], Mapping[str, Mesh]]  # number of ranks -> candidates: names and meshes
    # Functions of a candidate and its inputs that make one rank's workload; None if it has none.
    attention: Callable[[Candidate, AttentionInputs], Workload] | None = None
    step: Callable[[Candidate, StepInputs], Workload] | None = None
    package: str = ""  # that it needs; "" for longspan's own methods
    job: Mapping[str, Any] = field(default_factory=dict)  # settings of the planner's job
    options: Mapping[str, Any] = field(default_factory=dict)  # settings of its workload
    planned: bool = True  # whether the planner has formulas for it


@dataclass(frozen=True)
class Candidate:
    """A method on a mesh: one row of the table."""

    name: str  # such as "usp-2x4"
    method: Method
    mesh: Mesh


def _usp_meshes(ranks: int, name: str = "usp-{ulysses}x{ring}") -> dict[str, Mesh]:
    """Return every mesh with both axes above 1."""
    meshes = [Mesh(ulysses=size, ring=ranks // size) for size in range(2, ranks) if ranks % size == 0]
    return {name.format(ulysses=mesh.ulysses, ring=mesh.ring): mesh for mesh in meshes}


def _one_axis(axis: str, name: str = "", **settings: Any) -> Method:
    """Return a method whose mesh has all ranks on one axis."""
    name = name or axis
    return Method(name, lambda ranks: {name: Mesh(**{axis: ranks})}, **settings)


def _peer_attention(candidate: Candidate, inputs: AttentionInputs) -> Workload:
    from longspan.bench.peers import peer_attention  # needs transformers

    return peer_attention(candidate, inputs)


def _peer_step(candidate: Candidate, inputs: StepInputs) -> Workload:
    from longspan.bench.peers import peer_step

    return peer_step(candidate, inputs)


_SEQUENCE: dict[str, Any] = {"attention": sequence_attention, "step": longspan_step}
_TENSOR: dict[str, Any] = {"attention": tensor_attention, "step": longspan_step}
_PEER: dict[str, Any] = {"attention": _peer_attention, "step": _peer_step, "planned": False}

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        _one_axis("tensor", "tp", **_TENSOR),
        _one_axis("tensor", "megatron-sp", job={"tensor_style": "megatron-sp"}, **_TENSOR),
        _one_axis("data", "fsdp", **_SEQUENCE),
        # Without `overlap`, all heads are sent at once, whatever `SequenceSharding` would choose.
        _one_axis("ulysses", **_SEQUENCE),
        _one_axis("ulysses", "ulysses-overlap", options={"overlap": True}, **_SEQUENCE),
        _one_axis("ulysses", "ulysses-default", options={"overlap": "auto"}, **_SEQUENCE),
        # Approximations: one byte per element on the wire.
        *(
            _one_axis(
                "ulysses", f"ulysses-{dtype}", job={"wire_dtype": dtype}, options={"wire_dtype": dtype}, **_SEQUENCE
            )
            for dtype in CACHE_DTYPES
            if dtype != "exact"
        ),
        _one_axis("ring", **_SEQUENCE),
        Method("usp", _usp_meshes, **_SEQUENCE),
        _one_axis("data", "fsdp-no-prefetch", step=longspan_step, options={"prefetch": False}),
        _one_axis("ulysses", "ulysses-no-prefetch", step=longspan_step, options={"prefetch": False}),
        # The wrong placement across nodes: neighbouring ranks form rings, ranks far apart form Ulysses groups.
        Method(
            "usp-swapped",
            lambda ranks: _usp_meshes(ranks, "usp-{ulysses}x{ring}-swapped"),
            options={"swapped": True},
            planned=False,
            **_SEQUENCE,
        ),
        _one_axis("ulysses", "deepspeed", package="deepspeed", **_PEER),
        _one_axis("ulysses", "alst", package="deepspeed", **_PEER),
        Method(
            "yunchang",
            lambda ranks: {
                f"yunchang-{ranks}x1": Mesh(ulysses=ranks),
                **_usp_meshes(ranks, "yunchang-{ulysses}x{ring}"),
            },
            package="yunchang",
            **_PEER,
        ),
    )
}

DEFAULT = ("tp", "megatron-sp", "fsdp", "ulysses", "ring", "usp")
"""The methods that are compared by default, together with the peers that are installed."""


def select(names: Sequence[str], what: str, ranks: int) -> tuple[Candidate, ...]:
    """Return the candidates of methods or single candidates ("usp", "usp-2x4"); by default those of `DEFAULT`."""
    every = {
        name: Candidate(name, method, mesh)
        for method in METHODS.values()
        for name, mesh in method.meshes(ranks).items()
    }
    if not names:
        peers = [m.name for m in METHODS.values() if m.package and getattr(m, what) and installed(m.package)]
        return tuple(c for name in (*DEFAULT, *peers) for c in every.values() if c.method.name == name)
    selected: list[Candidate] = []
    for name in names:
        found = [candidate for candidate in every.values() if name in (candidate.name, candidate.method.name)]
        if not found and name in METHODS:
            raise LongspanError(f"--methods {name}: {ranks} ranks have no mesh for it; give a number with two factors")
        if not found:
            close = difflib.get_close_matches(name, [*METHODS, *every], n=1, cutoff=0.5)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(METHODS)}"
            raise LongspanError(f"--methods {format_value(name)} is unknown; {hint}")
        method = found[0].method
        if not getattr(method, what):
            measurable = [other.name for other in METHODS.values() if getattr(other, what)]
            raise LongspanError(f"--methods {name} is not measured by `bench {what}`; it has {', '.join(measurable)}")
        if method.package and not installed(method.package):
            raise LongspanError(
                f"--methods {name} needs {method.package}, which is not installed (pip install --no-deps "
                f"{method.package}; DS_BUILD_OPS=0 for deepspeed); install it, or leave the method out"
            )
        selected += [candidate for candidate in found if candidate not in selected]
    return tuple(selected)


def installed(package: str) -> bool:
    """Whether a package can be found, without importing it."""
    return importlib.util.find_spec(package) is not None


# --- for the planner


def read_config(config: BenchConfig) -> dict[str, Any]:
    """Return the config.json of the measured model, with the sizes of its heads filled in."""
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
