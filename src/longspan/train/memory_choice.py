"""Resolve `--memory auto` and `--context max` on this machine, before any rank starts."""

from __future__ import annotations

import dataclasses

from longspan.core.errors import LongspanError
from longspan.core.memory import FASTEST, LONGEST, Memory
from longspan.core.memory_flags import MemoryFlags
from longspan.core.sections import replace
from longspan.hf.memory_auto import BASE_OF_A_RANK as BASE
from longspan.hf.memory_auto import device_memory, hardware_of
from longspan.plan.job import Job, Mesh
from longspan.plan.memory_search import STEP, longest_context_on
from longspan.plan.suggestions import choose
from longspan.train.config import TrainConfig


def resolve(config: TrainConfig) -> tuple[TrainConfig, list[str]]:
    """Return the config with a number as context and explicit memory options, and messages for the user.

    Depends only on the config, the model's config and the device's memory, so equal machines resolve the same. Ranks
    compare their settings later, which finds machines that differ.

    Raises:
        LongspanError: for a model that `--tensor` cannot shard, for a mesh that its heads do not allow, and if nothing
            fits, with the memory item by item and what would fit.
    """
    import torch

    from longspan.hf.memory_options import MemoryModules
    from longspan.hf.pretrained import read_model_config
    from longspan.hf.shapes import shape_of_model
    from longspan.hf.tensor_parallel.plan import tensor_plan
    from longspan.train.inputs import load_model_config, model_flag, model_origin

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    held = None if config.memory.rank_memory is None else 1e9 * config.memory.rank_memory
    if held is None and device.type == "cpu":  # the ranks share this machine's memory
        ranks_here = min(config.parallel.ranks, config.nproc or config.parallel.ranks)
        held = max(device_memory(device) / ranks_here - BASE, BASE / 4)
    hardware = hardware_of(device, held)
    if config.context == "max":  # unscaled: the longest context follows from its positions and --rope-scaling
        model_config, _ = read_model_config(*model_flag(config), max(2, config.parallel.ranks))
    else:
        model_config, _ = load_model_config(config)
    model = model_origin(config, model_config).on_meta()
    if config.parallel.tensor > 1:
        tensor_plan(model, config.parallel.tensor, 0, config.parallel.tensor_style, config.parallel.sequence_ranks)
    try:
        shape = shape_of_model(model)
    except LongspanError:
        if config.memory.memory == "auto" or config.context == "max":
            raise
        return config, []  # the planner cannot read this model, so it chooses nothing
    job = Job(
        context=1 if config.context == "max" else config.tokens,
        batch=config.micro_batch * config.parallel.data_degree,
        dtype=config.dtype,
        weight_sharding=config.fsdp,
        tensor_style=config.parallel.tensor_style,
    )
    mesh = Mesh(*config.parallel.degrees.values())
    for layer, _ in shape.layer_kinds:
        problem = layer.mixer.ulysses_refusal(job, mesh)
        if problem is not None:
            raise LongspanError(problem)
    if config.memory.level != "auto" and config.context != "max":
        return config, []
    fixed = config.memory.fixed()
    if config.memory.level == "auto" and MemoryModules(model).untiled is not None:
        fixed.setdefault("tiled_mlp", 1)  # do not choose a memory option that the model cannot use
    if config.memory.level == "longest":
        fixed = {**{f.name: getattr(LONGEST, f.name) for f in dataclasses.fields(LONGEST)}, **fixed}
    messages = [f"{held_of(hardware.memory_bytes)} for a rank, {mesh}"]
    if config.context == "max":
        found = longest_context_on(shape, job, mesh, hardware, fixed)
        if found is None:
            choose(shape, dataclasses.replace(job, context=STEP), mesh, hardware, fixed)  # raises with the reason
            raise LongspanError(f"--context max: not even {STEP:,} tokens fit on {mesh}")
        end = dataclasses.replace(shape, rope=config.model.rope()).furthest
        context = found if end is None else min(found, end)
        bound = "" if context == found else f"; {found:,} would fit, the model's positions end at {context:,}"
        messages.append(f"--context max: {context:,} tokens{bound}")
        job = dataclasses.replace(job, context=context)
    try:
        memory_options, why = choose(shape, job, mesh, hardware, fixed)
    except LongspanError as error:
        if config.memory.memory != "by-flags" or config.context == "max":
            raise
        raise LongspanError(f"{error} To start it all the same, give --memory fastest") from error
    if config.memory.memory == "by-flags" and memory_options == FASTEST and config.context != "max":
        return config, []
    messages.append(why)
    return _with(dataclasses.replace(config, context=job.context), memory_options), messages


def held_of(nbytes: float) -> str:
    """Format bytes as GB."""
    return f"{nbytes / 1e9:.2f} GB"


def _with(config: TrainConfig, memory_options: Memory) -> TrainConfig:
    flags = {field.name for field in dataclasses.fields(MemoryFlags)}
    chosen = {name: value for name, value in dataclasses.asdict(memory_options).items() if name in flags}
    return replace(config, memory="fastest", grad_checkpointing=False, **chosen)
