"""Resolve `--memory auto` and `--context max` by the machine, and `--tokens` and `--epochs` by the data."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import TYPE_CHECKING, Any

from longspan.core.errors import LongspanError
from longspan.core.memory import FASTEST, LONGEST, Memory, MemoryFlags
from longspan.core.sections import replace
from longspan.hf.planning import hardware_of_ranks
from longspan.plan.job import Job, Mesh
from longspan.plan.memory_search import STEP, longest_context_on
from longspan.plan.models.tuning import Tuning, tuned_shape
from longspan.plan.suggestions import choose_memory
from longspan.train.config import TrainConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from longspan.core.rope import RopeAsked
    from longspan.plan.hardware import Hardware
    from longspan.plan.models.shape import ModelShape
    from longspan.train.inputs import Inputs

_SAMPLE = 2048
"""Sequences whose mean length stands for all, for --tokens: the data may be without end."""


def resolve_memory(config: TrainConfig, hardware: Hardware | None = None) -> tuple[TrainConfig, list[str]]:
    """Return the config with a number as context and explicit memory options, and messages for the user.

    The LoRA of an adapter's folder (--model) becomes explicit, too. `hardware` is by default this machine; ranks
    compare their settings later, which finds machines that differ.
    """
    from longspan.hf.memory_options import MemoryModules
    from longspan.hf.planning import shape_of_model
    from longspan.train.optimizer import continued

    config = continued(config)
    parallel, flags, longest_context = config.parallel, config.memory, config.context == "max"
    model = _model_on_meta(config)
    try:
        shape = shape_of_model(model)
    except LongspanError:
        if flags.memory == "auto" or longest_context:
            raise
        return config, []  # the planner cannot read this model, so it chooses nothing
    asked = config.tuning
    tuning = Tuning(asked.lora, asked.lora_targets, asked.freeze, asked.dora, asked.quantize == "nf4")
    shape = tuned_shape(shape, tuning)
    job = Job(
        context=1 if longest_context else config.context_tokens,
        batch=config.sequences_per_forward,
        dtype=config.dtype,
        weight_sharding=config.fsdp,
        tensor_style=parallel.tensor_style,
        experts=parallel.experts,
        documents=config.data.pack not in ("auto", "stream"),
    )
    mesh = Mesh(**parallel.degrees)
    for layer, _ in shape.layer_kinds:
        problem = layer.mixer.ulysses_refusal(job, mesh)
        if problem is not None:
            raise LongspanError(problem)
    if flags.level != "auto" and not longest_context:
        return config, []
    fixed = tuning.fixed(flags.fixed())
    if flags.level == "auto" and MemoryModules(model).untiled is not None:
        fixed.setdefault("tiled_mlp", 1)  # do not choose a memory option that the model cannot use
    if flags.level == "longest":
        fixed = {**{f.name: getattr(LONGEST, f.name) for f in dataclasses.fields(LONGEST)}, **fixed}
    hardware = hardware or hardware_of_ranks(flags.rank_memory, min(parallel.ranks, config.nproc or parallel.ranks))
    besides = ""
    if config.data.dpo is not None and config.tuning.lora is None:
        used = reference_bytes(config, sum(p.numel() for p in model.parameters()))
        hardware = dataclasses.replace(hardware, memory_bytes=hardware.memory_bytes - used)
        besides = f" besides {used / 1e9:.2f} GB of the reference"
    messages = [f"{hardware.memory_bytes / 1e9:.2f} GB for a rank{besides}, {mesh}"]
    if longest_context:
        context, message = _longest_context(shape, job, mesh, hardware, fixed, config.model.rope())
        job = dataclasses.replace(job, context=context)
        messages.append(message)
    by_default = flags.memory == "by-flags" and not longest_context
    try:
        memory, message = choose_memory(shape, job, mesh, hardware, fixed)
    except LongspanError as error:
        if not by_default:
            raise
        raise LongspanError(f"{error} To start it all the same, give --memory fastest") from error
    if by_default and memory == FASTEST:
        return config, []
    return _with(dataclasses.replace(config, context=job.context), memory), [*messages, message]


def reference_bytes(config: TrainConfig, weights: int) -> float:
    """Return the memory on a rank of a frozen model with this many weights, the reference of --dpo."""
    sharded = config.fsdp and config.parallel.fsdp_ranks > 1
    ranks = config.parallel.tensor * (config.parallel.fsdp_ranks if sharded else 1)
    return weights * (2 if sharded and config.dtype == "bf16" else 4) / ranks


def _model_on_meta(config: TrainConfig) -> PreTrainedModel:
    """Return the model without weights, once it is known that `--tensor` and `--experts` can shard it."""
    from longspan.hf.preconditions import check_axes
    from longspan.hf.pretrained import read_model_config
    from longspan.train.inputs import load_model_config, model_flag, model_origin

    parallel = config.parallel
    if config.context == "max":  # unscaled: the longest context follows from its positions and --rope-scaling
        model_config, _ = read_model_config(*model_flag(config), max(2, parallel.ranks))
    else:
        model_config, _ = load_model_config(config)
    model = model_origin(config, model_config).on_meta()
    check_axes(lambda: model, parallel, fsdp=config.fsdp)
    return model


def _longest_context(
    shape: ModelShape, job: Job, mesh: Mesh, hardware: Hardware, fixed: dict[str, Any], rope: RopeAsked
) -> tuple[int, str]:
    """Return the longest context that fits, within the model's positions, and a message for the user."""
    fits = longest_context_on(shape, job, mesh, hardware, fixed)
    if fits is None:
        shortest = dataclasses.replace(job, context=STEP)
        choose_memory(shape, shortest, mesh, hardware, fixed)  # raises with the reason
        raise LongspanError(f"--context max: not even {STEP:,} tokens fit on {mesh}")
    end = dataclasses.replace(shape, rope=rope).furthest
    context = fits if end is None else min(fits, end)
    bound = "" if context == fits else f"; {fits:,} would fit, the model's positions end at {context:,}"
    return context, f"--context max: {context:,} tokens{bound}"


def _with(config: TrainConfig, memory: Memory) -> TrainConfig:
    names = {field.name for field in dataclasses.fields(MemoryFlags)}
    chosen = {name: value for name, value in dataclasses.asdict(memory).items() if name in names}
    return replace(config, memory="fastest", grad_checkpointing=False, **chosen)


# --- the number of steps


def resolve_steps(config: TrainConfig, inputs: Inputs) -> tuple[TrainConfig, str | None]:
    """Return the config with the number of steps, and a message about it; None if --steps gives it.

    A run that is resumed with the same length, batch and context has the same number of steps. Otherwise what it has
    not trained on yet is divided by the tokens of a step.
    """
    if config.knows_steps:
        return config, None
    resume, total = inputs.resume, config.tokens
    before = None if resume is None else resume.state.get("length")
    if before is not None and before[:-1] == length_of(config)[:-1]:
        return dataclasses.replace(config, steps=before[-1]), None
    mean: float = config.context_tokens  # of a sequence, without padding
    counted = ""
    if config.epochs is not None or inputs.pack in ("best-fit", "none"):
        tokens, sequences = _count(config, inputs, None if config.epochs is not None else _SAMPLE)
        mean = tokens / sequences
        counted = f"; sequences have {mean:,.1f} tokens"
        if config.epochs is not None:
            total = round(config.epochs * tokens)
            counted = f"; an epoch has {tokens:,} tokens in {sequences:,.1f} sequences"
    assert total is not None
    done, trained = (0, 0) if resume is None else (resume.step, resume.state["tokens"])
    steps = done + math.ceil(max(0, total - trained) / mean / config.sequences - 1e-9)
    config = dataclasses.replace(config, steps=max(1, steps))
    config.check_length()
    asked = f"--tokens {config.tokens:,}" if config.epochs is None else f"--epochs {config.epochs:g}"
    return config, f"{asked}: {config.last_step:,} steps{counted}"


def _count(config: TrainConfig, inputs: Inputs, most: int | None) -> tuple[int, float]:
    """Return the tokens and sequences of an epoch, or its first `most` sequences; a cut last one counts as a part."""
    stream = inputs.stream(inputs.source, config.context_tokens, epochs=1)
    lengths = [len(s.ids) for s in itertools.islice(stream, most)]
    whole = inputs.pack in ("best-fit", "none")
    return sum(lengths), len(lengths) if whole else sum(lengths) / config.context_tokens


def length_of(config: TrainConfig) -> list[Any]:
    """Return what the number of steps depends on, and then the number, as plain values for a checkpoint."""
    return [
        config.tokens,
        config.epochs,
        config.sequences,
        config.context_tokens,
        config.last_step if config.knows_steps else None,
    ]
