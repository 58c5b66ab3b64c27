"""What the planner decides before the start: `memory: auto` and `context: max`; and a dry run."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from longspan.compat.friends_api import has_fla
from longspan.core.errors import LongspanError
from longspan.core.formatting import parameters
from longspan.core.layout import choose_layout
from longspan.core.memory import FASTEST, LONGEST, Memory, memory_of
from longspan.hf.memory import MemoryModules, hardware_of_ranks
from longspan.hf.preconditions import check_ahead, check_axes
from longspan.hf.weights.origin import Origin
from longspan.plan.from_model import adapted, shape_of_model, weights_named
from longspan.plan.job import Job
from longspan.plan.memory_options import STEP, choose_memory, fixed_options, longest_context_with_options
from longspan.plan.shape import Tuning
from longspan.train import model as models
from longspan.train.arguments import Arguments


@dataclass(frozen=True)
class Resolved:
    """A run whose context and memory options are known."""

    context: int | None  # tokens per sequence; None: max_length is None, so no sequence is cut
    memory: Memory
    config: Any  # the model's, for this context
    teacher: Origin | None = None
    messages: tuple[str, ...] = ()  # of the planner


def resolve(arguments: Arguments) -> Resolved:
    """Return the context and the memory options, by the planner where it is asked. Starts no rank.

    Raises:
        LongspanError: for a model that cannot be sharded as asked, a context beyond its positions, and what does not
            fit.
    """
    ours, training, parallel = arguments.ours, arguments.training, arguments.ours.parallel
    context: Any = ours.context if ours.context is not None else getattr(training, "max_length", None)
    longest = context == "max"
    shortest = max(2, parallel.sequence_ranks)
    length = (context if isinstance(context, int) else shortest) + arguments.generated
    config = models.read_config(arguments, length)
    teacher = models.teacher_of(arguments, config, length)
    model = models.origin_of(arguments, config).on_meta()
    check_axes(lambda: model, parallel, fsdp=ours.shard_weights)
    if teacher is not None:
        check_axes(teacher.on_meta, parallel, fsdp=ours.shard_weights)
    weights_named(model, ours.freeze)
    level, fixed = ours.memory.level, dict(ours.memory.options)
    fixed = {**_of_trl(arguments), **fixed}
    chosen = dataclasses.replace(FASTEST if level == "auto" else memory_of(level), **fixed)
    unknown = Resolved(context if isinstance(context, int) else None, chosen, config, teacher)
    if (level != "auto" and not longest) or context is None:
        return unknown
    peft = arguments.model
    asked = peft.lora_target_modules
    targets = [asked] if isinstance(asked, str) and asked != "all-linear" else asked if isinstance(asked, list) else ()
    rank = peft.lora_r if peft.use_peft else None
    tuning = Tuning(rank, tuple(targets), tuple(ours.freeze), peft.use_dora, peft.load_in_4bit)
    try:
        shape = shape_of_model(adapted(model, tuning), packs=tuning.quantize)
    except LongspanError:
        if "memory" in arguments.given or longest:
            raise
        return unknown  # the planner cannot read this model, so it chooses nothing
    beside = model if arguments.trainer.reference and not peft.use_peft else None
    if teacher is not None:
        beside = teacher.on_meta()
    if beside is not None:
        shape = dataclasses.replace(shape, teacher=shape_of_model(beside))
    fixed = dict(fixed_options(shape, fixed))
    if level == "longest":
        fixed = {**{f.name: getattr(LONGEST, f.name) for f in dataclasses.fields(LONGEST)}, **fixed}
    if level == "auto" and MemoryModules(model).untiled is not None:
        fixed.setdefault("tiled", False)  # do not choose an option that the model cannot use
    packed = getattr(training, "packing", False) and training.packing_strategy != "wrapped"
    rows = training.per_device_train_batch_size * arguments.trainer.sequences
    added = arguments.generated
    job = Job(
        context=1 if longest else context * rows if packed else context + added,
        batch=parallel.data * (1 if packed or ours.elastic else rows),
        dtype="bf16" if training.bf16 else "fp32",
        weight_sharding=ours.shard_weights,
        parallel=parallel,
        documents=packed,
        elastic=ours.elastic,
        fused=has_fla() or not torch.cuda.is_available(),
    )
    hardware = hardware_of_ranks(ours.rank_memory, parallel.ranks)
    messages = [f"{hardware.memory_bytes / 1e9:.2f} GB for a rank, {parallel}"]
    if longest:
        context, message = _longest_context(shape, job, hardware, fixed)
        messages.append(message)
        job = dataclasses.replace(job, context=context)
        # The rows of a forward are packed into one, or have what is generated behind them.
        context = context // rows if packed else context - added
    try:
        memory, message = choose_memory(shape, job, hardware, fixed)
    except LongspanError as error:
        if "memory" in arguments.given or longest:
            raise
        raise LongspanError(f"{error} To start it all the same, give `memory: fastest`") from error
    return Resolved(context, memory, config, teacher, (*messages, message))


def _of_trl(arguments: Arguments) -> dict[str, Any]:
    """Return the memory options that TRL's own keys mean."""
    training, found = arguments.training, dict[str, Any]()
    if arguments.given & {"gradient_checkpointing", "activation_checkpointing"}:
        found["checkpointing"] = "full" if arguments.checkpoints else "none"
    if getattr(training, "activation_offloading", False):
        found |= {"checkpointing": "full", "offload": "host"}
    return found


def _longest_context(shape: Any, job: Job, hardware: Any, fixed: dict[str, Any]) -> tuple[int, str]:
    """Return the longest context that fits, within the model's positions, and a message for the user."""
    fits = longest_context_with_options(shape, job, hardware, fixed)
    if fits is None:
        choose_memory(shape, dataclasses.replace(job, context=STEP), hardware, fixed)  # raises with the reason
        raise LongspanError(f"context: max: not even {STEP:,} tokens fit on {job.parallel}")
    reach = shape.positions.reach
    context = fits if reach is None else min(fits, reach)
    bound = "" if context == fits else f"; {fits:,} would fit, the model's positions end at {context:,}"
    return context, f"context: {context:,} tokens{bound}"


def summary(arguments: Arguments, resolved: Resolved) -> list[str]:
    """Return lines about the model, the ranks and the job."""
    training, parallel = arguments.training, arguments.ours.parallel
    model = models.origin_of(arguments, resolved.config).on_meta()
    axes = str(parallel)
    if parallel.ring > 1:
        layout = choose_layout(parallel.layout, parallel.ring, parallel.ulysses).kind
        axes += f" ({layout})"
    rows = training.per_device_train_batch_size * training.gradient_accumulation_steps * parallel.data
    weights = sum(p.numel() for p in model.parameters())
    name = models.name_of(arguments)
    random = ", random weights" if models.is_random(name) else ""
    length = "any length" if resolved.context is None else f"{resolved.context:,} tokens"
    lines = [
        f"{type(model).__name__}, {parameters(weights)}{random}; {axes}; {'bf16' if training.bf16 else 'fp32'}; "
        f"a step has {rows} sequences of {length}"
    ]
    if resolved.memory != FASTEST:
        lines.append(f"memory: {resolved.memory.describe()}")
    return lines


def dry_run(arguments: Arguments, resolved: Resolved) -> list[str]:
    """Check a run as far as possible without ranks and weights; return lines about what would run."""
    model = models.origin_of(arguments, resolved.config).on_meta()
    check_ahead(
        model,
        device=torch.device("cuda" if torch.cuda.is_available() else "cpu"),
        ring_size=arguments.ours.parallel.ring,
        fsdp=arguments.ours.shard_weights,
        kernel=arguments.ours.kernel,
        memory_options=resolved.memory,
    )
    steps = arguments.training.max_steps
    length = f"{steps} steps" if steps > 0 else f"{arguments.training.num_train_epochs:g} epochs"
    return [
        "dry run: no rank is started, nothing is trained or written",
        *summary(arguments, resolved),
        f"{length}, to {arguments.training.output_dir}",
    ]
