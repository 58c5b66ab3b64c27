"""What a run logs before its first step, and a dry run."""

from __future__ import annotations

import torch

from longspan.core.errors import LongspanError
from longspan.core.formatting import parameters
from longspan.core.layout import choose_layout
from longspan.core.memory import FASTEST
from longspan.hf.preconditions import check_ahead
from longspan.hf.weights.fsdp import check_cpu_offload
from longspan.memory.offload import store_for
from longspan.train.config import TrainConfig
from longspan.train.inputs import Inputs, check_inputs, model_origin


def run_summary(config: TrainConfig, inputs: Inputs, weights: int, device: torch.device) -> list[str]:
    """Return lines about the model of `weights` parameters, the ranks, the job, and what is unusual about it."""
    parallel = config.parallel
    ring = f"ring {parallel.ring} x " if parallel.ring > 1 else ""
    tensor = f" x tensor {parallel.tensor}" if parallel.tensor > 1 else ""
    layout = choose_layout(parallel.layout, parallel.ring, parallel.ulysses).kind
    how = f" ({layout}, {parallel.ring_impl})" if ring else ""
    lines = [
        f"{type(inputs.model_config).__name__.removesuffix('Config')}, {parameters(weights)}; "
        f"{parallel.ranks} {device.type} ranks, data {parallel.data_degree} x {ring}ulysses {parallel.ulysses}{tensor}"
        f"{how}; {config.dtype}, FSDP {'on' if config.fsdp else 'off'}; context {config.tokens:,}, batch "
        f"{config.sequences} = {config.sequences * config.tokens:,} tokens per step"
    ]
    if inputs.rope is not None:
        lines.append(str(inputs.rope))
    memory = config.memory.to_memory()
    if memory != FASTEST:
        lines.append(f"memory: {memory.describe()}")
    return [*lines, *(f"warning: passed over a damaged checkpoint: {problem}" for problem in inputs.passed_over)]


def dry_run(config: TrainConfig) -> list[str]:
    """Check a resolved config as far as possible without ranks and weights; return lines about what would run.

    Raises:
        LongspanError: for anything that the run would refuse.
    """
    inputs = check_inputs(config)
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
    lines.append(f"{config.steps} steps from {start}; text of {config.data.data}; to {config.checkpoints}{export}")
    return lines
