"""When the gradients of several micro-batches are summed over the ranks: after each, or once, after the last."""

from __future__ import annotations

WHOLE_GRADIENTS = 1 / 8
"""Part of a device's memory that whole gradients may take, where weights are sharded, so that they are summed once."""


def sums_once(sharded: bool, gradient_bytes: float, memory_bytes: float) -> bool:
    """Whether `longspan train` sums once by itself.

    Without sharding that costs nothing: a rank holds whole gradients either way. With FSDP each rank then holds, from
    the first micro-batch to the last, the gradients of the whole model instead of its shard's.

    Args:
        sharded: whether the weights are.
        gradient_bytes: of all gradients, in the dtype in which they are summed.
        memory_bytes: of a device.
    """
    return not sharded or gradient_bytes <= WHOLE_GRADIENTS * memory_bytes
