"""Why a mesh cannot hold a job, and notes on a mesh that can."""

from __future__ import annotations

import math
from collections.abc import Iterator

from longspan.core.errors import LongspanError
from longspan.core.experts import ExpertLayout, divisors, most_ranks
from longspan.core.heads import split_groups
from longspan.core.parallel import ParallelConfig
from longspan.core.rope import settings_of
from longspan.core.tile_sizes import even_span
from longspan.plan.cost.weights import can_cut
from longspan.plan.job import CostContext, Job
from longspan.plan.shape import LayerShape, ModelShape
from longspan.plan.tower import most_patches

GB = 1e9

LONGEST_RING = 1 << 11
"""The longest ring that can be planned: a plan takes time quadratic in its ranks."""


def refusal(model: ModelShape, job: Job) -> str | None:
    """Return the reason why the job's mesh cannot hold it, whatever the memory, or None."""
    return positions_refusal(model, job) or pictures_refusal(model, job) or mesh_refusal(model, job)


def pictures_refusal(model: ModelShape, job: Job) -> str | None:
    """Return the reason why a sequence cannot hold the job's images and video, or None."""
    if not job.pictures:
        return None
    if model.tower is None:
        return f"{model.name} has no vision tower, so a job for it has no images or video"
    tokens = sum(pictures.tokens(model.tower) for pictures in job.pictures)
    if tokens > job.context:
        return f"images and video are {tokens:,} tokens, and the context has {job.context:,}; use at least {tokens:,}"
    return None


def positions_refusal(model: ModelShape, job: Job) -> str | None:
    """Return the reason why the model has no positions for the context, and no RoPE scaling gives them, or None."""
    if job.mode == "train" and job.context < 2:
        return f"context {job.context}: a sequence needs 2 tokens to learn from"
    try:
        model.longer(job.context)
    except LongspanError as error:
        return str(error)
    return None


def mesh_refusal(model: ModelShape, job: Job) -> str | None:
    """Return the reason why a mesh cannot hold a job, positions left out, or None."""
    mesh = job.parallel
    if model.teacher is not None and (problem := refusal(model.teacher, job)) is not None:
        return f"the teacher, {model.teacher.name}: {problem}"
    if job.batch % mesh.data:
        return (
            f"data={mesh.data} needs a batch that is a multiple of {mesh.data}, the batch is {job.batch}; "
            f"try batch={mesh.data} or data={math.gcd(job.batch, mesh.data)}"
        )
    if mesh.ring > LONGEST_RING:
        return f"ring={mesh.ring} is longer than the {LONGEST_RING} ranks that can be planned; use more ulysses or data"
    if mesh.sequence_ranks > job.context and job.mode != "decode":
        return f"ring={mesh.ring} x ulysses={mesh.ulysses} is more ranks than the context has tokens ({job.context})"
    if model.tower is not None and mesh.tensor > 1:
        return (
            f"tensor={mesh.tensor}: a vision tower is not sharded over a tensor axis; use `ulysses` or `ring` instead"
        )
    if mesh.experts not in ("auto", 1) and not any(layer.mlp.experts for layer, _ in model.layer_kinds):
        return f"experts={mesh.experts}: {model.name} has no experts; leave it out"
    if mesh.tensor > 1 and model.packed:
        return f"tensor={mesh.tensor} cannot shard weights in 4 bits; use `ulysses` or `ring` instead"
    for layer, _ in model.layer_kinds:
        problem = (
            _tensor_refusal(layer, mesh.tensor) or _experts_refusal(layer, job) or layer.mixing.ulysses_refusal(job)
        )
        if problem is not None:
            return problem
    return None


def _tensor_refusal(layer: LayerShape, t: int) -> str | None:
    if t == 1:
        return None
    if not layer.mixing.shards_heads:
        return f"tensor={t}: a recurrent layer is sharded by tokens only; use `ulysses` or `ring` instead"
    q, kv, width, what = layer.mixing.q_heads, layer.mixing.kv_heads, layer.mlp.ffn, "the MLP's intermediate size"
    if layer.adapts_experts:
        return f"tensor={t} does not shard LoRA on experts; use `experts` instead"
    if layer.mlp.experts > 1:
        width, what = layer.mlp.experts, "the number of experts"
    if not all(shard.q_heads for shard in split_groups(q, kv, t)):
        return f"tensor={t} leaves a rank without any of the model's {q} query heads; try tensor={math.gcd(q, t)}"
    if even_span(width, t - 1, t)[0] == width:
        return f"tensor={t} leaves a rank without a share of {what} ({width}); try tensor={math.gcd(width, t)}"
    return None


def _experts_refusal(layer: LayerShape, job: Job) -> str | None:
    mesh = job.parallel
    asked, ranks, count = mesh.experts, mesh.fsdp_ranks, layer.mlp.experts
    if asked == "auto" or asked == 1:
        return None
    if mesh.tensor > 1 or not job.weight_sharding:
        what = f"tensor={mesh.tensor}" if mesh.tensor > 1 else "weights without FSDP"
        return f"experts={asked} and {what}: experts are sharded over data x ring x ulysses by FSDP; leave out one"
    if ranks % asked:
        fits = ", ".join(map(str, divisors(ranks)))
        return f"experts={asked} does not divide the {ranks} ranks of data x ring x ulysses; use {fits}"
    fewest = layer.fewest_experts
    if count and not ExpertLayout(count, ranks, asked).fits(fewest):
        most, few = most_ranks(count, ranks, fewest), "any" if fewest == 1 else f"{fewest}, which LoRA on them needs,"
        return f"experts={asked} leaves a rank without {few} of the {count} experts; use {most}"
    return None


def notes(c: CostContext) -> Iterator[str]:
    """Yield what the user should know of a mesh that can hold the job."""
    model, job, mesh = c.model, c.job, c.mesh
    kv = max(1, model.kv_heads // mesh.tensor)
    if mesh.ulysses > kv:
        yield f"ulysses={mesh.ulysses} needs {mesh.ulysses} KV heads or replication, the model has {kv}: replicated"
    values = model.longer(job.context)
    if values is not None:
        yield (
            f"the model's positions end at {model.positions.limit:,}: its config needs {settings_of(values)} "
            "(docs/how-to/train.md)"
        )
    if model.tower is not None and job.pictures:
        tokens = sum(pictures.tokens(model.tower) for pictures in job.pictures)
        patches = sum(pictures.units * pictures.patches for pictures in job.pictures)
        yield (
            f"images and video: {tokens:,} tokens of {patches:,} patches, of which one GPU encodes up to "
            f"{most_patches(c):,}"
        )
    elif model.tower is not None and job.mode == "train":
        yield "no images or video are planned (--images, --video): the vision tower takes memory for its weights alone"
    if job.mode == "prefill" and job.prefill_chunk is None:
        yield (
            "the prompt is one forward; `longspan generate` splits it into chunks, which need less memory: "
            "--prefill-chunk plans that"
        )
    yield from unsupported(model, job)


def unsupported_mesh(model: ModelShape, mesh: ParallelConfig) -> list[str]:
    """Return what this version plans but does not run on a mesh."""
    if mesh.tensor > 1 and not all(can_cut(layer) for layer, _ in model.layer_kinds):
        return [f"tensor={mesh.tensor} is planned from its formulas: what this family sends is not counted exactly"]
    return []


def unsupported(model: ModelShape, job: Job) -> list[str]:
    """Return what this version plans but does not run for a model and a job."""
    reasons = unsupported_mesh(model, job.parallel)
    return [*reasons, *model.refused] if job.mode == "train" else reasons
