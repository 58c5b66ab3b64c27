"""Ask the planner whether a text and its cache fit in memory, before loading."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from longspan.core.errors import LongspanError
from longspan.generate.config import GenerateConfig
from longspan.hf.memory import hardware_of_ranks
from longspan.hf.model.pretrained import is_adapter
from longspan.plan.cost.peak_memory import offloaded_bytes
from longspan.plan.cost.weights import can_cut
from longspan.plan.from_model import shape_of
from longspan.plan.generation import check_fits, check_score_fits, does_not_fit, peak_items
from longspan.plan.job import CostContext, Job

if TYPE_CHECKING:
    from longspan.generate.config import ModelFlags
    from longspan.plan.hardware import Hardware
    from longspan.plan.shape import ModelShape


def question(
    config: ModelFlags, model_config: Any, tokens: int, shape: ModelShape | None = None
) -> tuple[ModelShape, Job, Hardware]:
    """Return what the planner is asked: whether this many tokens, cached or scored, fit."""
    import torch

    dtype = config.dtype
    if dtype == "auto":
        dtype = "fp32" if model_config.dtype in (None, torch.float32) else "bf16"
    job = Job(
        context=tokens,
        mode="prefill",
        dtype=dtype,
        weight_sharding=config.fsdp and config.parallel.ranks > 1,
        parallel=config.parallel,
    )
    if isinstance(config, GenerateConfig):
        job = replace(job, cache=config.cache)
    hardware = hardware_of_ranks(config.rank_memory, config.parallel.ranks)
    return shape or shape_of(model_config), job, hardware


def choose_weights(config: GenerateConfig, model_config: Any, tokens: int) -> tuple[GenerateConfig, str | None]:
    """Decide `--weights auto` for a prompt of `tokens`: return the config, and the choice with its reason, if any.

    Replicated weights are not gathered for every token, and neither are those on a tensor axis.
    """
    given = config.parallel
    if config.weights != "auto" or given.ranks == 1:
        return config, None
    sharded = replace(config, weights="sharded")
    if given.experts not in (1, "auto"):
        return sharded, f"sharded, as --experts {given.experts} shards them"
    try:
        shape = shape_of(model_config)
    except LongspanError as error:
        return sharded, f"sharded, as the planner cannot read this model ({error})"
    needed, meshes = list[str](), [given]
    splits = all(can_cut(layer) for layer, _ in shape.layer_kinds) and not is_adapter(config.model)
    if given.ulysses > 1 and given.tensor == 1 and splits:
        meshes.append(replace(given, ulysses=1, tensor=given.ulysses))
    for parallel in meshes:
        chosen = replace(config, weights="replicated", parallel=parallel)
        asked = question(chosen, model_config, tokens + config.max_new_tokens, shape)
        problem = does_not_fit(*asked, chosen.chunk)
        if problem is None:
            axis = "" if parallel is given else f" with {parallel} instead of {given}"
            why = "as they fit" if parallel is given else needed[0]
            return chosen, f"replicated{axis}, {why}; nothing is gathered for a token"
        needed.append(f"with {parallel} they do not fit ({problem})")
    return sharded, f"sharded, every token gathers them: replicated {'; '.join(needed)}"


def check_memory(config: GenerateConfig, model_config: Any, tokens: int) -> str:
    """Raise if a prompt of `tokens` and its cache do not fit; return the planned memory in a line."""
    total = tokens + config.max_new_tokens
    try:
        asked = question(config, model_config, total)
    except LongspanError as error:
        return f"the planner cannot read this model, so its memory was not checked ({error})"
    check_fits(*asked, config.chunk)
    items, (shape, job, hardware) = peak_items(*asked, config.chunk), asked
    on_host = offloaded_bytes(CostContext(shape, job), hardware).host_bytes.get("kv_cache", 0)
    host = f"; {on_host / 1e9:.2f} GB of cache are in host memory" if on_host else ""
    pictures = "; what encoding the pictures needs is not planned" if config.pictures else ""
    return (
        f"planned: {sum(items.values()) / 1e9:.2f} of {hardware.memory_bytes / 1e9:.2f} GB per rank, "
        f"{items['kv_cache'] / 1e9:.2f} GB of it for the cache of {total:,} tokens{host}{pictures}"
    )


def check_score_memory(config: ModelFlags, model_config: Any, tokens: int) -> None:
    """Raise if scoring a text of `tokens` does not fit; a model that the planner cannot read is not checked."""
    try:
        asked = question(config, model_config, tokens)
    except LongspanError:
        return
    check_score_fits(*asked)
