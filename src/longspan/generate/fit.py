"""Ask the planner whether a prompt and its cache fit in memory, before loading."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from longspan.core.errors import LongspanError
from longspan.hf.memory_auto import BASE_OF_A_RANK, device_memory, hardware_of
from longspan.hf.shapes import shape_of
from longspan.plan.cost.forward_memory import staged_bytes
from longspan.plan.cost.offload import offloaded_bytes
from longspan.plan.generation import check_fits, check_score_fits, peak_items
from longspan.plan.job import Job, Mesh
from longspan.plan.layers.softmax import Softmax
from longspan.ranks import launch

if TYPE_CHECKING:
    from longspan.generate.config import GenerateConfig, ModelFlags
    from longspan.plan.hardware import Hardware


def job_of(config: ModelFlags, model_config: Any, tokens: int) -> Job:
    """Return the planner's job: this many tokens in a cache, or scored."""
    import torch

    dtype = config.dtype
    if dtype == "auto":
        dtype = "fp32" if model_config.dtype in (None, torch.float32) else "bf16"
    return Job(
        context=tokens,
        mode="prefill",
        dtype=dtype,
        weight_sharding=config.fsdp and config.parallel.ranks > 1,
        layout=config.parallel.layout,
    )


def _cached_job(config: GenerateConfig, model_config: Any, tokens: int) -> Job:
    return replace(job_of(config, model_config, tokens), cache=config.cache, cache_latent=config.cache_latent)


def hardware_for(config: ModelFlags) -> Hardware:
    """Return this machine's devices, with the memory of a rank."""
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    memory = None if config.rank_memory is None else 1e9 * config.rank_memory
    if memory is None and device.type == "cpu" and not launch.under_torchrun():
        memory = max(
            device_memory(device) / (config.nproc or config.parallel.ranks) - BASE_OF_A_RANK, BASE_OF_A_RANK / 4
        )
    return hardware_of(device, memory)


def check_memory(config: GenerateConfig, model_config: Any, tokens: int) -> str:
    """Raise if a prompt and its cache do not fit.

    Args:
        config: of the command.
        model_config: the Hugging Face config.
        tokens: of the prompt.

    Returns:
        The planned memory in a line.

    Raises:
        LongspanError: with the planned memory by item, and a fix.
    """
    total = tokens + config.max_new_tokens
    try:
        shape = shape_of(model_config)
    except LongspanError as error:
        return f"the planner cannot read this model, so whether it fits was not checked ({error})"
    job, mesh, hardware = (
        replace(_cached_job(config, model_config, total), cache_offload=config.cache_offload),
        Mesh(*config.parallel.degrees.values()),
        hardware_for(config),
    )
    check_fits(shape, job, mesh, hardware, config.chunk)
    items = peak_items(shape, job, mesh, hardware, config.chunk)
    on_host = offloaded_bytes(shape, job, mesh, hardware).host_bytes.get("kv_cache", 0)
    host = f"; {on_host / 1e9:.2f} GB of cache are in host memory" if on_host else ""
    return (
        f"planned: {sum(items.values()) / 1e9:.2f} of {hardware.memory_bytes / 1e9:.2f} GB per rank, "
        f"{items['kv_cache'] / 1e9:.2f} GB of it for the cache of {total:,} tokens{host}"
    )


def check_score_memory(config: ModelFlags, model_config: Any, tokens: int) -> None:
    """Raise if scoring a text does not fit; a model that the planner cannot read is not checked.

    Args:
        config: of the command.
        model_config: the Hugging Face config.
        tokens: of the text.

    Raises:
        LongspanError: with the planned memory by item, and a fix.
    """
    try:
        shape = shape_of(model_config)
    except LongspanError:
        return
    job, mesh = job_of(config, model_config, tokens), Mesh(*config.parallel.degrees.values())
    check_score_fits(shape, job, mesh, hardware_for(config))


def planned_cache_bytes(config: GenerateConfig, model_config: Any, prompt: int, generated: int) -> int | None:
    """Return the planned bytes of the cache on the rank with most; None for a model that the planner cannot read.

    Args:
        config: of the command.
        model_config: the Hugging Face config.
        prompt: cached tokens of the prompt.
        generated: cached tokens after them.
    """
    try:
        shape = shape_of(model_config)
    except LongspanError:
        return None
    mesh, job = (
        Mesh(*config.parallel.degrees.values()),
        _cached_job(config, model_config, max(1, prompt)),
    )
    totals = [0] * mesh.sequence
    for layer, count in shape.layer_kinds:
        mixer = layer.mixer
        if not isinstance(mixer, Softmax):
            return None
        of_ranks = mixer.cache_by_rank(job, mesh, generated, config.chunk)
        totals = [total + count * one for total, one in zip(totals, of_ranks, strict=True)]
    return max(totals)


def planned_device_bytes(config: GenerateConfig, model_config: Any, prompt: int, generated: int) -> int | None:
    """Return the planned bytes of a cache in host memory that are on a device at a time; otherwise as above."""
    try:
        shape = shape_of(model_config)
    except LongspanError:
        return None
    mesh, job = Mesh(*config.parallel.degrees.values()), _cached_job(config, model_config, max(1, prompt))
    return staged_bytes(shape, job, mesh, generated, config.chunk)
