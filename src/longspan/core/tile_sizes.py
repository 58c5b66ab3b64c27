"""How many elements are handled at once, where the planner must know what the code does. Standard library only."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

GRADIENT_BUCKET = 1 << 22
"""Elements of one all-reduce of `longspan.hf.weights.gradients.GradientSum`, at least one parameter: so much is
copied at most (a parameter that has one to itself is summed where it lies)."""

LOSS_TILE = (1 << 24, 1 << 20)
"""Logits that the loss looks at together in fp32: 64 MiB on a GPU, 4 MiB (a cache) on a CPU."""


def gradient_buckets(
    sizes: Sequence[int], kinds: Sequence[Hashable] | None = None, limit: int = GRADIENT_BUCKET
) -> list[range]:
    """Gradients that are summed together: neighbours of one kind, about `limit` elements.

    Args:
        sizes: elements of each parameter, in the model's order.
        kinds: what must be alike in a bucket (dtypes); None where all are.
        limit: elements of a bucket; a larger parameter has one to itself.

    Returns:
        The places of each bucket's parameters.
    """
    starts: list[int] = []
    held = 0
    for i, size in enumerate(sizes):
        if not starts or held + size > limit or (kinds is not None and kinds[i] != kinds[i - 1]):
            starts.append(i)
            held = 0
        held += size
    return [range(start, stop) for start, stop in zip(starts, [*starts[1:], len(sizes)], strict=True)]


Span = tuple[int, int]
"""First entry of a dimension, and one past the last."""


def even_span(length: int, rank: int, size: int) -> Span:
    """Return the entries that `DTensor` and FSDP2 give to one of `size` ranks: the last ranks have fewer."""
    each = -(-length // size)
    return min(rank * each, length), min((rank + 1) * each, length)


HEAD_TILE = ((1 << 27, 1024), (1 << 22, 64))
"""Of logits that are made tile by tile, elements of a tile and the fewest tokens: 512 MiB of fp32 on a GPU, 16 MiB on a
CPU. Each tile reads and writes the gradient of the whole head, so it has many tokens."""

HEAD_ROWS = 1 << 14
"""Rows of a head's gradient that are added up in fp32 at a time, where a tile's part of it is narrower."""

NARROW_PARTS = 4
"""Parts of a tile of logits in half precision whose fp32 copies are made one after the other; it has twice the rows."""


def head_tile(vocabulary: int, on_cpu: bool) -> int:
    """Tokens of a tile of logits that are made for it: a power of 2."""
    elements, fewest = HEAD_TILE[on_cpu]
    return max(fewest, 1 << max(1, elements // vocabulary).bit_length() - 1)


def mlp_rows(tokens: int, hidden: int, width: int, tiles: int, on_cpu: bool) -> int:
    """Tokens of a tile of an MLP.

    Args:
        tokens: of a rank.
        hidden: features that go in.
        width: of its widest intermediate.
        tiles: that are asked for; 0 for as many as make what a tile needs, forward and backward (some six
            intermediates), about a quarter of the hidden states of all tokens.
        on_cpu: where it runs.
    """
    if tiles:
        return max(1, -(-tokens // tiles))
    return max(FEWEST_ROWS[on_cpu], -(-tokens * hidden // (4 * 6 * width)))


def norm_rows(tokens: int, on_cpu: bool) -> int:
    """Tokens of a tile of a norm, which makes some three copies of it in fp32."""
    return max(FEWEST_ROWS[on_cpu], -(-tokens // 32))


def layers_held(layers: int, per_checkpoint: int) -> tuple[int, int]:
    """Layers' inputs that are held under `Memory.layers_per_checkpoint`, with that number of layers of a group.

    Args:
        layers: of the model.
        per_checkpoint: layers that share one.

    Returns:
        When the forward has ended, and at the most: then a group's own have been made again.
    """
    groups = -(-layers // per_checkpoint)
    last = layers - (groups - 1) * per_checkpoint
    return groups, max(groups + last - 1, groups - 1 + (per_checkpoint - 1) * (groups > 1))


def layers_per_checkpoint(layers: int, asked: int) -> int:
    """Layers of a group: as asked, or (0) the fewest with which the fewest inputs are held."""
    return asked or min(range(1, layers + 1), key=lambda n: layers_held(layers, n)[1])


FEWEST_ROWS = 2048, 512
"""Tokens of a tile of an MLP or a norm, at least, on a GPU and on a CPU: products of fewer rows are slow, and each tile
reads and writes fp32 sums of the gradients of the MLP's weights, which takes an H100, by its maker's figures, about as
long as 200 rows."""
