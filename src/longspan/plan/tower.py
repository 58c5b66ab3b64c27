"""The sizes of a vision tower, and the images and videos that a job shows it.

Patches of images and video frames pass through blocks, whose attention stays within an image or a frame. Mergers join
`merge` x `merge` patches to an embedding.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cached_property

from longspan.core.errors import LongspanError
from longspan.core.validation import LARGEST_COUNT, check_number
from longspan.plan.layers import Parameter


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
