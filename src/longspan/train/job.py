"""The job of `longspan train`: check the config, start the ranks, train, and restart them if asked to."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from longspan.core.errors import LongspanError
from longspan.core.formatting import parameters
from longspan.core.layout import choose_layout
from longspan.core.memory import FASTEST
from longspan.core.sections import replace
from longspan.hf.pretrained import check_names
from longspan.ranks import agreement, launch
from longspan.train.config import TrainConfig

if TYPE_CHECKING:
    import torch

    from longspan.train.inputs import Inputs


def run(config: TrainConfig) -> int:
    """Train on ranks started here or by torchrun, and return the exit code 0; raise as `longspan.ranks.launch.launch`.

    With `dry_run` or `preview` print what would be done.
    """
    if config.max_restarts and (config.parallel.ranks == 1 or launch.under_torchrun()):
        raise LongspanError(
            f"--max-restarts {config.max_restarts} restarts ranks that this command starts, and it starts none; give "
            "torchrun's --max-restarts, or leave it out on one rank"
        )
    looks = config.dry_run or config.data.preview > 0
    opened = launch.open_first(config, _open, dry_run=looks)
    if config.data.preview:
        from longspan.train.old_preview import preview

        if launch.is_first_rank():
            preview(*(opened or _resolve(config)))
        return 0
    if config.dry_run:
        lines = dry_run(*(opened or _resolve(config)))
        if launch.is_first_rank():
            print(*lines, sep="\n", flush=True)
        return 0
    from longspan.train.afterwards import follow
    from longspan.train.inputs import finished

    nothing_to_do = None
    if opened is not None:
        config, inputs = opened
        nothing_to_do = finished(config, inputs)
    if nothing_to_do is not None:
        print(nothing_to_do, flush=True)
        return follow(config)
    try:
        _train(config)
    except launch.Stopped as stop:
        if stop.not_saved:
            print(f"longspan: {stop.not_saved}", file=sys.stderr)
        raise
    return follow(config) if launch.is_first_rank() else 0


def _open(config: TrainConfig) -> tuple[TrainConfig, Inputs]:
    from longspan.data import split_weight

    for data in config.data.data:
        check_names(config.model.model, config.model.config, split_weight(data)[0], config.model.tokenizer)
    return _resolve(config)


def _resolve(config: TrainConfig) -> tuple[TrainConfig, Inputs]:
    """Resolve --context max and --memory auto, and check the inputs; the first rank prints the planner's choice."""
    from longspan.train.afterwards import check_ahead
    from longspan.train.inputs import check_inputs
    from longspan.train.old_resolve import resolve_memory, resolve_steps

    config, messages = resolve_memory(config)
    config.check()
    if messages and launch.is_first_rank():
        print(*messages, sep="\n", flush=True)
    check_ahead(config)
    inputs = check_inputs(config)
    config, message = resolve_steps(config, inputs)
    if message and launch.is_first_rank():
        print(message, flush=True)
    return config, inputs


def _train(config: TrainConfig) -> None:
    for restart in range(config.max_restarts + 1):
        try:
            launch.launch(_train_rank, config, nproc=config.parallel.ranks, grace_s=config.grace)
            return
        except launch.RankFailed as error:
            if restart == config.max_restarts:
                raise
            text = f"longspan: {error}; restart {restart + 1} of {config.max_restarts}"
            print(text, file=sys.stderr, flush=True)
            config = replace(config, resume="auto")


def _train_rank(config: TrainConfig) -> None:
    with launch.joined(config.timeout, config.start_timeout) as watch:
        from transformers.utils.logging import disable_progress_bar

        from longspan.train.loop import Trainer

        if launch.started_elsewhere():
            with agreement.refusing_together():
                config, _ = _resolve(config)
        disable_progress_bar()  # it would show one per rank and file
        Trainer(config, watch).run()


# --- what a run logs before its first step, and a dry run


def run_summary(config: TrainConfig, inputs: Inputs, weights: int, device: torch.device) -> list[str]:
    """Return lines about the model of `weights` parameters, the ranks, the job, and what is unusual about it."""
    parallel = config.parallel
    ring = f"ring {parallel.ring} x " if parallel.ring > 1 else ""
    tensor = f" x tensor {parallel.tensor}" if parallel.tensor > 1 else ""
    layout = choose_layout(parallel.layout, parallel.ring, parallel.ulysses).kind
    how = f" ({layout}, {parallel.ring_impl})" if ring else ""
    ranks = f"{parallel.ranks} {device.type} rank{'s' if parallel.ranks > 1 else ''}"
    lines = [
        f"{type(inputs.model_config).__name__.removesuffix('Config')}, {parameters(weights)}; "
        f"{ranks}, data {parallel.data_degree} x {ring}ulysses {parallel.ulysses}{tensor}"
        f"{how}; {config.dtype}, FSDP {'on' if config.fsdp else 'off'}; context {config.context_tokens:,}, batch "
        f"{config.sequences} = {config.sequences * config.context_tokens:,} tokens per step"
    ]
    if inputs.rope is not None:
        lines.append(str(inputs.rope))
    memory = config.memory.to_memory()
    if memory != FASTEST:
        lines.append(f"memory: {memory.describe()}")
    return [*lines, *(f"warning: passed over a damaged checkpoint: {problem}" for problem in inputs.passed_over)]


def dry_run(config: TrainConfig, inputs: Inputs) -> list[str]:
    """Check a resolved config as far as possible without ranks and weights; return lines about what would run."""
    import torch

    from longspan.hf.preconditions import check_ahead
    from longspan.hf.weights.fsdp import check_cpu_offload
    from longspan.memory.offload import store_for
    from longspan.train.inputs import model_origin

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = model_origin(config, inputs.model_config).on_meta()
    memory = config.memory.to_memory()
    check_ahead(
        model,
        device=device,
        ring_size=config.parallel.ring,
        fsdp=config.fsdp,
        kernel=config.model.kernel,
        memory_options=memory,
    )
    weights = sum(p.numel() for p in model.parameters())
    lines = [
        "dry run: no rank is started, nothing is trained or written",
        *run_summary(config, inputs, weights, device),
    ]
    try:
        check_cpu_offload(device, memory.cpu_offload)
        store_for(memory, device)
    except LongspanError as error:  # the ranks may run elsewhere
        lines.append(f"warning: not on this machine, which has no GPU: {error}")
    start = "the beginning" if inputs.resume is None else f"step {inputs.resume.step} ({inputs.resume.path})"
    export = "" if config.checkpoint.export == "never" else f", {config.exported}"
    lines.append(f"{config.last_step} steps from {start}; text of {config.data.name}; to {config.checkpoints}{export}")
    return lines
