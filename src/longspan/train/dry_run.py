"""A dry run: all that can be known of a run before any rank is there and any weight is read, and what it would do."""

from __future__ import annotations

import torch

from longspan.core.errors import LongspanError
from longspan.core.layout import choose_layout
from longspan.hf.preconditions import check_ahead
from longspan.hf.weights.fsdp import check_cpu_offload
from longspan.memory.offload import store_for
from longspan.train.config import TrainConfig
from longspan.train.inputs import check_inputs, model_origin
from longspan.train.summary import what_runs


def dry_run(config: TrainConfig) -> list[str]:
    """Check a run, and say what it would do.

    Model, tokenizer, text (of which the first sequence is read), folders, checkpoints to go on from, RoPE scaling,
    memory options. No weights are read or made, no rank is started, nothing is written.

    Args:
        config: of the run, with memory options and context resolved.

    Returns:
        Lines to be shown.

    Raises:
        LongspanError: for what the run would refuse.
    """
    inputs = check_inputs(config)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = model_origin(config, inputs.model_config).on_meta()
    memory_options = config.memory.to_memory()
    check_ahead(
        model,
        device=device,
        ring_size=config.parallel.ring,
        fsdp=config.fsdp,
        kernel=config.model.kernel,
        memory_options=memory_options,
    )
    layout = choose_layout(config.parallel.layout, config.parallel.ring, config.parallel.ulysses)
    ring = f"ring {config.parallel.ring} x " if config.parallel.ring > 1 else ""
    tensor = f" x tensor {config.parallel.tensor}" if config.parallel.tensor > 1 else ""
    how = f" ({layout.kind}, {config.parallel.ring_impl})" if config.parallel.ring > 1 else ""
    weights = sum(p.numel() for p in model.parameters())
    said = [
        "dry run: no rank is started, nothing is trained or written",
        *what_runs(config, inputs, weights, device.type, f"{ring}ulysses {config.parallel.ulysses}{tensor}{how}"),
    ]
    try:
        check_cpu_offload(device, memory_options.cpu_offload)
        store_for(memory_options, device)
    except LongspanError as error:  # the ranks may run elsewhere
        said.append(f"warning: not on this machine, which has no GPU: {error}")
    at = "the beginning" if inputs.resume is None else f"step {inputs.resume.step} ({inputs.resume.path})"
    export = "" if config.checkpoint.export == "never" else f", {config.exported}"
    said.append(f"{config.steps} steps from {at}; text of {config.data.data}; to {config.checkpoints}{export}")
    return said
