"""What a vision tower costs: its shares of the pictures, what it sends, saves and computes.

Ranks of a sequence group encode equal numbers of images or frames, up to one (`longspan.core.layout.split_by_cost`),
and send the embeddings to the ranks that hold their tokens. Tests compare what is sent with
`longspan.hf.forward.vision` to the byte.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

from longspan.core.layout import Layout
from longspan.plan.cost.weights import shard_elements
from longspan.plan.job import CostContext
from longspan.plan.layers.base import Sent
from longspan.plan.tower import Tower

ENCODERS = 2
"""Kinds of pictures of a family, of which replicas tell each other whether a batch has any: images and videos."""


# ---------------------------------------------------------------------------------------------------------------------
# Shares.


class Share(NamedTuple):
    """Numbers of one kind of pictures, each the max over ranks."""

    patches: int  # that a rank encodes
    rows: int  # embeddings that a rank's tokens need
    sent: int  # embeddings that a rank sends to others
    received: int  # embeddings that a rank receives from others, whose gradients it returns


def shares(c: CostContext) -> list[Share]:
    """Return the ranks' shares of each of the job's pictures; none without a vision tower."""
    tower, found, start = c.model.tower, list[Share](), 0
    if tower is None:
        return []
    for pictures in c.job.pictures:
        run = pictures.units * pictures.rows(tower) // pictures.runs(tower)
        share = _share(pictures.units, pictures.rows(tower), run, start, c.layout, c.job.context)
        patches = -(-pictures.units // c.layout.size) * pictures.patches
        found.append(Share(patches, *share))
        start += pictures.tokens(tower)
    return found


@functools.lru_cache(maxsize=1024)
def _share(units: int, rows: int, run: int, start: int, layout: Layout, context: int) -> tuple[int, int, int]:
    """Return the embeddings needed, sent and received, each the max over ranks.

    Units of `rows` embeddings each begin at token `start`; `run` embeddings stand between a start and an end token.
    """
    every = units * rows

    def before(token: int) -> int:
        """Return the embeddings of the tokens before a token."""
        runs, rest = divmod(max(0, token - start), run + 2)
        return min(every, runs * run + min(max(0, rest - 1), run))

    each = -(-units // layout.size) * rows
    needed, sent, received = 0, 0, 0
    for rank in range(layout.size):
        first, last = min(rank * each, every), min((rank + 1) * each, every)
        spans = [(before(a), before(b)) for a, b in layout.spans(context, rank)]
        mine = sum(b - a for a, b in spans)
        stays = sum(max(0, min(b, last) - max(a, first)) for a, b in spans)
        needed, sent, received = max(needed, mine), max(sent, last - first - stays), max(received, mine - stays)
    return needed, sent, received


# ---------------------------------------------------------------------------------------------------------------------
# Sent.


def vision_sent(c: CostContext) -> Iterator[Sent]:
    """Yield what a vision tower sends in a micro-batch."""
    tower, f, train = c.model.tower, c.mesh.fsdp_ranks, c.job.mode == "train"
    if tower is None:
        return
    if c.mesh.data > 1 and c.job.weight_sharding:
        yield Sent("all_gather", "fsdp", "kinds of pictures", ENCODERS * 8 * (f - 1), method=False)
    row = tower.row * c.b
    for share in shares(c):
        yield Sent("all_to_all", "sequence", "embeddings to their tokens", share.sent * row, method=False)
        if train:
            yield Sent("all_to_all", "sequence", "gradients of embeddings", share.received * row, method=False)
    yield from block_weights_sent(c)


def block_weights_sent(c: CostContext) -> list[Sent]:
    """Return FSDP's traffic for all blocks and pictures: weights gathered for forward and backward, fp32 gradients."""
    tower, f, passes = c.model.tower, c.mesh.fsdp_ranks, len(c.job.pictures)
    if tower is None or not passes or not c.job.weight_sharding or f == 1:
        return []
    shard = shard_elements(tower.block, f) * (f - 1)
    gather = Sent("all_gather", "fsdp", "weights of a tower block", shard * c.b, tower.depth * passes, method=False)
    if c.job.mode != "train":
        return [gather]
    # FSDP sums the gradients of both passes, of images and of video, and scatters them once.
    scatter = Sent("reduce_scatter", "fsdp", "gradients of a tower block", shard * 4, tower.depth, method=False)
    return [gather, gather, scatter]


# ---------------------------------------------------------------------------------------------------------------------
# Memory, in bytes.


def pixel_bytes(c: CostContext) -> int:
    """Return the bytes of a sequence's pixels in fp32, which every rank is given."""
    tower = c.model.tower
    return 0 if tower is None else 4 * tower.patch_elements * sum(p.units * p.patches for p in c.job.pictures)


def embedding_bytes(c: CostContext) -> int:
    """Return the bytes of the embeddings of a rank's tokens."""
    tower = c.model.tower
    return 0 if tower is None else tower.row * c.b * sum(share.rows for share in shares(c))


def saved_by_tower(c: CostContext) -> int:
    """Return the bytes that a tower saves for its backward on the rank with the largest share."""
    tower = c.model.tower
    if tower is None:
        return 0
    blocks = tower.depth * (_block_saved(tower, c) if c.job.memory.checkpointing == "none" else c.b * tower.width)
    return most_patches(c) * (blocks + _ends_saved(tower, c))


def in_block_backward(c: CostContext) -> int:
    """Return the bytes of a block's backward: gradients of hidden states and MLP; with checkpoints what it saves."""
    tower = c.model.tower
    if tower is None:
        return 0
    b = c.b
    recomputed = _block_saved(tower, c) - (b * tower.width if not tower.rms or b == 4 else 0)
    gradients = b * (tower.width + (1 + tower.gated) * tower.ffn)
    most = max((share.patches for share in shares(c)), default=0)
    return most * (gradients + (0 if c.job.memory.checkpointing == "none" else recomputed))


def most_patches(c: CostContext) -> int:
    """Return the patches of the rank with the largest share."""
    return sum(share.patches for share in shares(c))


def _norm_saved(tower: Tower, c: CostContext) -> int:
    """Return the bytes per patch that a norm saves: an RMSNorm its input in fp32 and a number, a LayerNorm its input
    and two; and the output, which is the input of a product.
    """
    given = 4 * tower.width + 4 if tower.rms else c.b * tower.width + 8
    return given + c.b * tower.width


def _block_saved(tower: Tower, c: CostContext) -> int:
    """Return the bytes per patch that a block saves.

    Attention saves q and k, the packed QKV (of which v is a part), the output of each window or frame, all outputs
    joined, and the log-sum-exps.
    """
    attention = 7 * c.b * tower.width + 4 * tower.heads
    mlp = (4 if tower.gated else 2) * c.b * tower.ffn
    return 2 * _norm_saved(tower, c) + attention + mlp


def _ends_saved(tower: Tower, c: CostContext) -> int:
    """Return the bytes per patch that are saved outside the blocks: cosines and sines in fp32, pixels that were cast,
    and in each merger its norm and the input and output of its activation function.
    """
    rotary = 2 * 4 * tower.width // tower.heads
    cast = tower.patch_elements * c.b if c.b < 4 else 0
    merger = 2 * c.b * tower.width
    deepstack = tower.deepstack * (merger + c.b * tower.width + 8 // tower.merge**2)
    return rotary + cast + _norm_saved(tower, c) + merger + deepstack


# ---------------------------------------------------------------------------------------------------------------------
# Compute.


def tower_flops(c: CostContext, *, largest: bool) -> tuple[float, float]:
    """Return the FLOPs of a forward's products and attention in one micro-batch: of the rank with the largest share, or
    of all ranks together.
    """
    tower, products, attention = c.model.tower, 0.0, 0.0
    for pictures in c.job.pictures if tower is not None else ():
        assert tower is not None
        units = -(-pictures.units // c.layout.size) if largest else pictures.units
        products += tower.product_flops(units * pictures.patches)
        attention += units * tower.attention_flops(pictures.height, pictures.width)
    return products, attention
