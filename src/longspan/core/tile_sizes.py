"""Sizes of tiles, buckets and groups, shared by the code that uses them and the planner; and of free memory."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Sequence
from pathlib import Path

from longspan.core.layout import Span

GRADIENT_BUCKET = 1 << 22
"""Elements of one all-reduce of `longspan.hf.weights.gradients.GradientAverage`, which copies at most one bucket. A
larger parameter has a bucket of its own and is summed in place."""

LOSS_TILE = (1 << 24, 1 << 20)
"""Logits that the loss computes together in fp32: 64 MiB on a GPU, 4 MiB (a cache) on a CPU."""

STATE_TILE = LOSS_TILE
"""Elements of the states of single tokens that `longspan.mixers` computes together."""


INDEXED_TILE = (1 << 25, 1 << 21)
"""Elements that indexed attention computes together, on a GPU and on a CPU: of a block of queries, their scores with
all keys (by the indexer), or the keys that they read."""


def rows_of_tile(tile: tuple[int, int], elements: int, on_cpu: bool) -> int:
    """Return the rows of a tile, of `elements` each."""
    return max(1, tile[on_cpu] // max(1, elements))


def gradient_buckets(
    sizes: Sequence[int], kinds: Sequence[Hashable] | None = None, limit: int = GRADIENT_BUCKET
) -> list[range]:
    """Group gradients that are summed together: neighbours of one kind (dtypes), about `limit` elements.

    A larger parameter has a bucket of its own. Return the indices of each bucket's parameters.
    """
    starts: list[int] = []
    filled = 0
    for i, size in enumerate(sizes):
        if not starts or filled + size > limit or (kinds is not None and kinds[i] != kinds[i - 1]):
            starts.append(i)
            filled = 0
        filled += size
    return [range(start, stop) for start, stop in zip(starts, [*starts[1:], len(sizes)], strict=True)]


WHOLE_GRADIENTS = 1 / 8
"""Part of a device's memory that unsharded gradients may take, with FSDP, to be reduced once."""


def reduces_once(sharded: bool, gradient_bytes: float, memory_bytes: float) -> bool:
    """Return whether `--reduce auto` reduces gradients once, after the last micro-batch, instead of after each.

    Without FSDP (`sharded`) this costs no memory: every rank holds the whole model's gradients anyway. With FSDP every
    rank then holds them, instead of its shard, from the first micro-batch to the last.
    """
    return not sharded or gradient_bytes <= WHOLE_GRADIENTS * memory_bytes


def even_span(length: int, rank: int, size: int) -> Span:
    """Return the entries of one of `size` ranks, as `DTensor` and FSDP2 shard them: the last ranks have fewer."""
    each = -(-length // size)
    return min(rank * each, length), min((rank + 1) * each, length)


HEAD_TILE = ((1 << 27, 1024), (1 << 22, 64))
"""Deferred logits, on a GPU and on a CPU: elements of a tile (512 MiB and 16 MiB in fp32) and its fewest tokens. Tiles
have many tokens, because each reads and writes the gradient of the whole head."""

HEAD_ROWS = 1 << 14
"""Rows of a head's gradient that are accumulated at a time, if it is wider than a tile's gradient."""

NARROW_PARTS = 4
"""Parts of a half-precision tile of logits that are converted to fp32 one after another; the tile has twice the
rows."""


DIVERGENCE_TENSORS = 4
"""A tile of a divergence computes with so many tensors of logits, and has fewer tokens for it."""


def head_tile(vocabulary: int, on_cpu: bool) -> int:
    """Return the tokens of a tile of deferred logits, a power of 2."""
    elements, fewest = HEAD_TILE[on_cpu]
    return max(fewest, 1 << max(1, elements // vocabulary).bit_length() - 1)


def mlp_rows(tokens: int, hidden: int, width: int, on_cpu: bool) -> int:
    """Return the tokens of a tile of an MLP.

    A tile's intermediates, about six in forward and backward, take about a quarter of the hidden states of all tokens.
    `width` is the widest intermediate's.
    """
    return max(FEWEST_ROWS[on_cpu] // (1 + on_cpu), -(-tokens * hidden // (4 * 6 * width)))


def most_mlp_tiles(hidden: int, width: int) -> int:
    """Return the most tiles of an MLP, for any number of tokens, by `mlp_rows`."""
    return -(-4 * 6 * width // hidden)


def norm_rows(tokens: int, on_cpu: bool) -> int:
    """Return the tokens of a tile of a norm, which makes about three fp32 copies of it."""
    return max(FEWEST_ROWS[on_cpu], -(-tokens // 32))


def layers_held(layers: int, per_checkpoint: int) -> tuple[int, int]:
    """Return how many layer inputs are held with `per_checkpoint` layers in a group.

    At the end of the forward, and the most, when a group's inputs have been recomputed.
    """
    groups = -(-layers // per_checkpoint)
    last = layers - (groups - 1) * per_checkpoint
    return groups, max(groups + last - 1, groups - 1 + (per_checkpoint - 1) * (groups > 1))


def layers_per_checkpoint(layers: int, grouped: bool) -> int:
    """Return the layers that share one saved input: if `grouped`, the smallest group that holds the fewest inputs."""
    return min(range(1, layers + 1), key=lambda n: layers_held(layers, n)[1]) if grouped else 1


FEWEST_ROWS = 2048, 512
"""Fewest tokens of a tile of an MLP or a norm, on a GPU and on a CPU. Matmuls of fewer rows are slow, and each tile
reads and writes the fp32 sums of the weights' gradients, which on an H100 takes, by its maker's figures, as long as 200
rows. On a CPU, tiles of MLPs may have half as many: that is no slower, and the intermediates of 512 rows are as large
as an eighth of the hidden states of 16,384 tokens.
"""


def free_memory() -> int | None:
    """Return the bytes that processes of this machine can still allocate, or None if unknown."""
    limits = []
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        limits.append(next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")))
    with contextlib.suppress(OSError, ValueError):  # "max": no limit
        group = Path("/sys/fs/cgroup")
        limits.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    return min(limits, default=None)
