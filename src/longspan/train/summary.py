"""What a run says of itself before its first step, and a dry run instead of it."""

from __future__ import annotations

from longspan.core.formatting import parameters
from longspan.core.memory import FASTEST
from longspan.train.config import TrainConfig
from longspan.train.inputs import Inputs


def what_runs(config: TrainConfig, inputs: Inputs, weights: int, device: str, sequence: str) -> list[str]:
    """Lines: the model, the ranks, the job; its RoPE scaling; its memory options; checkpoints that were passed over.

    Args:
        config: of the run.
        inputs: what it is made from.
        weights: of the model.
        device: kind of the ranks' devices.
        sequence: the ranks that share one, in words.
    """
    said = [
        f"{type(inputs.model_config).__name__.removesuffix('Config')}, {parameters(weights)}; "
        f"{config.parallel.ranks} {device} ranks, data {config.parallel.data_degree} x {sequence}; {config.dtype}, "
        f"FSDP {'on' if config.fsdp else 'off'}; context {config.tokens:,}, batch {config.sequences} = "
        f"{config.sequences * config.tokens:,} tokens per step"
    ]
    if inputs.rope is not None:
        said.append(str(inputs.rope))
    memory_options = config.memory.to_memory()
    if memory_options != FASTEST:
        said.append(f"memory: {memory_options.describe()}")
    return [*said, *(f"warning: passed over a damaged checkpoint: {problem}" for problem in inputs.passed_over)]
