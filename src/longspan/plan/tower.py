"""A vision tower, the images and videos that a job shows it, and what it sends, saves and computes.

Patches of images and video frames pass through blocks, whose attention stays within an image or a frame. Mergers join
`merge` x `merge` patches to an embedding. Ranks of a sequence group encode equal numbers of images or frames, up to one
(`longspan.core.layout.split_by_cost`), and send the embeddings to the ranks that hold their tokens. Tests compare what
is sent with `longspan.hf.forward.vision` to the byte.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from longspan.core.errors import LongspanError
from longspan.core.layout import Layout
from longspan.core.validation import LARGEST_COUNT, check_number
from longspan.plan.job import CostContext
from longspan.plan.layers.base import Parameter, Sent

ENCODERS = 2
"""Kinds of pictures of a family, of which replicas tell each other whether a batch has any: images and videos."""


@dataclass(frozen=True, eq=False)
class Tower:
    """A vision tower. Sizes are in elements."""

    depth: int  # number of blocks
    width: int  # hidden size
    heads: int  # attention heads of a block
    ffn: int  # intermediate size of a block's MLP
    gated: bool  # three matrices in the MLP, rather than two
    rms: bool  # RMSNorms, rather than LayerNorms
    patch: int  # side of a patch in pixels
    frames: int  # video frames of a patch
    channels: int  # of a pixel
    merge: int  # side in patches of what one embedding covers
    out: int  # elements of an embedding
    deepstack: int  # mergers besides the last one, whose embeddings go to later layers of the language model
    # side in patches of the windows within which a block attends; None: all attend to the whole frame
    window: int | None
    full: frozenset[int]  # numbers of the blocks that attend to the whole frame all the same
    marks_frames: bool  # whether each frame of a video has its own start and end token, rather than each video
    any_size: bool  # whether pictures of any size become patches, rather than pictures or tiles of one size
    block: tuple[Parameter, ...]  # weights of one block
    before: tuple[Parameter, ...]  # weights before the blocks
    after: tuple[Parameter, ...]  # weights after the blocks

    @property
    def outside(self) -> tuple[Parameter, ...]:
        return (*self.before, *self.after)

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return (*self.before, *self.block * self.depth, *self.after)

    @property
    def patch_elements(self) -> int:
        """Pixel values of a patch."""
        return self.channels * self.frames * self.patch**2

    @property
    def row(self) -> int:
        """Elements that the language model receives for an embedding, deepstack included."""
        return self.out * (1 + self.deepstack)

    @cached_property
    def params(self) -> int:
        return sum(p.numel for p in self.parameters)

    def product_flops(self, patches: int) -> float:
        """Return the FLOPs of the products of a forward; a merger's are run once per `merge` x `merge` patches."""
        before, block, after = (
            sum(p.numel for p in parameters if len(p.shape) > 1 and "pos" not in p.name)
            for parameters in (self.before, self.block, self.after)
        )
        return 2.0 * patches * (before + self.depth * block + after / self.merge**2)

    def attention_flops(self, height: int, width: int) -> float:
        """Return the FLOPs of all blocks' attention in the forward of one frame of `height` x `width` patches."""
        whole = self.depth if self.window is None else sum(block < self.depth for block in self.full)
        pairs = whole * (height * width) ** 2
        if self.window is not None:
            rows, columns = (sum(side**2 for side in _cut(size, self.window)) for size in (height, width))
            pairs += (self.depth - whole) * rows * columns
        return 4.0 * self.width * pairs

    # What it saves for its backward, in bytes per patch, with `b` bytes per element.

    def _norm_saved(self, b: int) -> int:
        """Return what a norm saves: an RMSNorm its input in fp32 and a number, a LayerNorm its input and two; and the
        output, which is the input of a product.
        """
        return (4 * self.width + 4 if self.rms else b * self.width + 8) + b * self.width

    def block_saved(self, b: int) -> int:
        """Return what a block saves.

        Attention saves q and k, the packed QKV (of which v is a part), the output of each window or frame, all outputs
        joined, and the log-sum-exps.
        """
        attention = 7 * b * self.width + 4 * self.heads
        return 2 * self._norm_saved(b) + attention + (4 if self.gated else 2) * b * self.ffn

    def ends_saved(self, b: int) -> int:
        """Return what is saved outside the blocks: cosines and sines in fp32, pixels that were cast, and in each merger
        its norm and the input and output of its activation function.
        """
        rotary = 2 * 4 * self.width // self.heads
        cast = self.patch_elements * b if b < 4 else 0
        merger = 2 * b * self.width
        deepstack = self.deepstack * (merger + b * self.width + 8 // self.merge**2)
        return rotary + cast + self._norm_saved(b) + merger + deepstack


def _cut(size: int, window: int) -> list[int]:
    """Return the sizes of the windows along one dimension."""
    return [window] * (size // window) + [size % window] * (size % window > 0)


@dataclass(frozen=True)
class PictureShape:
    """Equal images, or the frames of a video, in each sequence of a job."""

    kind: str  # "image" or "video"
    units: int  # images, or frames as the tower sees them (`Tower.frames` of the video each).
    height: int  # of each, in patches
    width: int  # of each, in patches

    @property
    def patches(self) -> int:
        return self.height * self.width

    def rows(self, tower: Tower) -> int:
        return self.patches // tower.merge**2

    def runs(self, tower: Tower) -> int:
        """Return the runs of placeholders, each between a start and an end token."""
        return 1 if self.kind == "video" and not tower.marks_frames else self.units

    def tokens(self, tower: Tower) -> int:
        """Return the tokens of all units, start and end tokens included."""
        return self.units * self.rows(tower) + 2 * self.runs(tower)


def read_pictures(flag: str, text: str, tower: Tower) -> PictureShape:
    """Return the pictures of a flag: "256x448x448" is 256 images, or frames of a video, of 448 x 448 pixels.

    Sides are rounded to what an embedding covers, as transformers' processors do; frames are filled up.
    """
    if not tower.any_size:
        raise LongspanError(
            f"{flag} {text}: this model's processor scales pictures to one size, or cuts them into tiles; "
            f"memory='auto' of longspan.parallelize counts those of each batch"
        )
    if not re.fullmatch(r"\d+x\d+x\d+", text):
        raise LongspanError(f"{flag} {text} is not NUMBERxHEIGHTxWIDTH, such as 256x448x448 (sizes in pixels)")
    number, *sides = (int(part) for part in text.split("x"))
    for size in (number, *sides):
        check_number(f"a number of {flag} {text}", size, 1, LARGEST_COUNT, whole=True)
    covered = tower.patch * tower.merge
    height, width = (max(1, round(side / covered)) * tower.merge for side in sides)
    if flag == "--video":
        return PictureShape("video", math.ceil(number / tower.frames), height, width)
    return PictureShape("image", number, height, width)


# ---------------------------------------------------------------------------------------------------------------------
# A rank's share of the pictures, and its costs.


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


def most_patches(c: CostContext) -> int:
    """Return the patches of the rank with the largest share."""
    return sum(share.patches for share in shares(c))


def pictures_sent(c: CostContext) -> Iterator[Sent]:
    """Yield what pictures send in a micro-batch, besides a tower's weights."""
    tower = c.model.tower
    if tower is None:
        return
    if c.mesh.data > 1 and c.job.weight_sharding:
        others = c.mesh.fsdp_ranks - 1
        yield Sent("all_gather", "fsdp", "kinds of pictures", ENCODERS * 8 * others, method=False)
    row = tower.row * c.b
    for share in shares(c):
        yield Sent("all_to_all", "sequence", "embeddings to their tokens", share.sent * row, method=False)
        if c.job.mode == "train":
            yield Sent("all_to_all", "sequence", "gradients of embeddings", share.received * row, method=False)


def held_by_tower(c: CostContext) -> int:
    """Return the bytes that are held until a tower's backward, on the rank with the largest share.

    A sequence's pixels in fp32, which every rank is given; the embeddings of the rank's tokens; what the tower saves.
    """
    tower, b = c.model.tower, c.b
    if tower is None:
        return 0
    pixels = 4 * tower.patch_elements * sum(p.units * p.patches for p in c.job.pictures)
    embeddings = tower.row * b * sum(share.rows for share in shares(c))
    block = tower.block_saved(b) if c.job.memory.checkpointing == "none" else b * tower.width
    return pixels + embeddings + most_patches(c) * (tower.depth * block + tower.ends_saved(b))


def in_block_backward(tower: Tower, c: CostContext) -> int:
    """Return the bytes of a block's backward: gradients of hidden states and MLP; with checkpoints what it saves."""
    b = c.b
    recomputed = tower.block_saved(b) - (b * tower.width if not tower.rms or b == 4 else 0)
    gradients = b * (tower.width + (1 + tower.gated) * tower.ffn)
    most = max((share.patches for share in shares(c)), default=0)
    return most * (gradients + (0 if c.job.memory.checkpointing == "none" else recomputed))


def tower_flops(c: CostContext, *, largest: bool) -> tuple[float, float]:
    """Return the FLOPs of a forward's products and attention in one micro-batch: of the rank with the largest share, or
    of all ranks together.
    """
    tower, products, attention = c.model.tower, 0.0, 0.0
    for pictures in () if tower is None else c.job.pictures:
        assert tower is not None
        units = -(-pictures.units // c.layout.size) if largest else pictures.units
        products += tower.product_flops(units * pictures.patches)
        attention += units * tower.attention_flops(pictures.height, pictures.width)
    return products, attention
