"""When to reduce accumulated gradients over the ranks: after each micro-batch, or once after the last."""

from __future__ import annotations

WHOLE_GRADIENTS = 1 / 8
"""Share of a device's memory that unsharded gradients may take, with FSDP, to be reduced once."""


def sums_once(sharded: bool, gradient_bytes: float, memory_bytes: float) -> bool:
    """Return whether `--reduce auto` reduces once, after the last micro-batch.

    Without FSDP this costs no memory: ranks hold whole gradients anyway. With FSDP every rank then holds the whole
    model's gradients, instead of its shard, from the first micro-batch to the last.

    Args:
        sharded: whether FSDP shards the weights.
        gradient_bytes: of all gradients, in the dtype of the reduction.
        memory_bytes: of a device.
    """
    return not sharded or gradient_bytes <= WHOLE_GRADIENTS * memory_bytes
