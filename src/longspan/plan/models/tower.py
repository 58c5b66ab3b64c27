"""Vision towers, from the `vision_config` of a `config.json`; and the images and videos that a job shows them.

Qwen's families: patches of images and video frames pass through `blocks`, whose attention stays within an image or a
frame, and mergers join `merge` x `merge` patches to an embedding. Weights are named as transformers 5 names them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from longspan.core.errors import LongspanError
from longspan.core.validation import LARGEST_COUNT, check_number
from longspan.plan.layers import Parameter
from longspan.plan.models.blocks import gated, linear, norm
from longspan.plan.models.family import Config


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
    block: tuple[Parameter, ...]  # weights of one block
    before: tuple[Parameter, ...]  # weights before the blocks
    after: tuple[Parameter, ...]  # weights after the blocks

    @property
    def outside(self) -> tuple[Parameter, ...]:
        """The weights outside the blocks."""
        return (*self.before, *self.after)

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """All weights, in the order of the module."""
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
        """Elements of all weights."""
        return sum(p.numel for p in self.parameters)

    def product_flops(self, patches: int) -> float:
        """Return the FLOPs of the products of a forward; a merger's are run once per `merge` x `merge` patches."""
        before, block, after = (
            sum(p.numel for p in parameters if len(p.shape) > 1 and "pos_embed" not in p.name)
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
class Pictures:
    """Equal images, or the frames of a video, in each sequence of a job."""

    kind: str  # "image" or "video"
    units: int  # images, or frames as the tower sees them (`Tower.frames` of the video each).
    height: int  # of each, in patches
    width: int  # of each, in patches

    @property
    def patches(self) -> int:
        """Patches of a unit."""
        return self.height * self.width

    def rows(self, tower: Tower) -> int:
        """Return the embeddings of a unit."""
        return self.patches // tower.merge**2

    def runs(self, tower: Tower) -> int:
        """Return the runs of placeholders, each between a start and an end token."""
        return 1 if self.kind == "video" and not tower.marks_frames else self.units

    def tokens(self, tower: Tower) -> int:
        """Return the tokens of all units, start and end tokens included."""
        return self.units * self.rows(tower) + 2 * self.runs(tower)

    def flag(self, tower: Tower) -> str:
        """Return the flag of `longspan plan`; `read_pictures` reads it."""
        of_video = self.kind == "video"
        number, side = self.units * (tower.frames if of_video else 1), tower.patch
        return f"--{'video' if of_video else 'images'} {number}x{self.height * side}x{self.width * side}"


def read_pictures(flag: str, text: str, tower: Tower) -> Pictures:
    """Return the pictures of a flag: "256x448x448" is 256 images, or frames of a video, of 448 x 448 pixels.

    Sides are rounded to what an embedding covers, as transformers' processors do; frames are filled up.
    """
    if not re.fullmatch(r"\d+x\d+x\d+", text):
        raise LongspanError(f"{flag} {text} is not NUMBERxHEIGHTxWIDTH, such as 256x448x448 (sizes in pixels)")
    number, *sides = (int(part) for part in text.split("x"))
    for size in (number, *sides):
        check_number(f"a number of {flag} {text}", size, 1, LARGEST_COUNT, whole=True)
    covered = tower.patch * tower.merge
    height, width = (max(1, round(side / covered)) * tower.merge for side in sides)
    if flag == "--video":
        return Pictures("video", math.ceil(number / tower.frames), height, width)
    return Pictures("image", number, height, width)


# ---------------------------------------------------------------------------------------------------------------------
# Families, by the `vision_config` of their configs.

_DEFAULTS: dict[str, Any] = {
    "depth": 32, "num_heads": 16, "in_channels": 3, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip


def _config(values: Any, defaults: dict[str, Any], where: str) -> Config:
    if not isinstance(values, dict):
        raise LongspanError(f"{where}: vision_config must be an object, as in the published config.json")
    return Config(values, {**_DEFAULTS, **defaults}, {"in_channels": ("in_channels", "in_chans")}, f"{where}: vision")


def _tower(c: Config, *, width: int, out: int, ffn: int, mlp: Iterator[Parameter], after: Iterator[Parameter],
           **kinds: Any) -> Tower:  # fmt: skip
    heads, patch, frames, channels = (
        c.count(name) for name in ("num_heads", "patch_size", "temporal_patch_size", "in_channels")
    )
    if width % heads:
        raise LongspanError(f"{c.where}: the hidden size {width} does not divide by num_heads={heads}")
    rms, learnt = kinds.get("rms", False), kinds.pop("positions", 0)
    before = [Parameter("patch_embed.proj.weight", (width, channels, frames, patch, patch))]
    if learnt:
        before += [Parameter("patch_embed.proj.bias", (width,)), Parameter("pos_embed.weight", (learnt, width))]
    block = [
        *norm("norm1", width, not rms),
        *norm("norm2", width, not rms),
        *linear("attn.qkv", width, 3 * width, bias=True),
        *linear("attn.proj", width, width, bias=True),
        *mlp,
    ]
    return Tower(
        **{"deepstack": 0, "window": None, "full": frozenset(), "marks_frames": False, "gated": False, "rms": False,
           **kinds},
        depth=c.count("depth"), width=width, heads=heads, ffn=ffn, patch=patch, frames=frames, channels=channels,
        merge=c.count("spatial_merge_size"), out=out, block=tuple(block), before=tuple(before), after=tuple(after),
    )  # fmt: skip


def _two_layers(names: tuple[str, str], inputs: int, ffn: int, outputs: int) -> Iterator[Parameter]:
    yield from linear(names[0], inputs, ffn, bias=True)
    yield from linear(names[1], ffn, outputs, bias=True)


def _qwen2_merger(width: int, out: int, c: Config, *, rms: bool) -> Iterator[Parameter]:
    merged = width * c.count("spatial_merge_size") ** 2
    yield from norm("merger.ln_q", width, not rms)
    yield from _two_layers(("merger.mlp.0", "merger.mlp.2"), merged, merged, out)


def qwen2_tower(values: Any, where: str) -> Tower:
    """Return the tower of Qwen2-VL."""
    c = _config(values, {"embed_dim": 1280, "hidden_size": 3584, "mlp_ratio": 4}, where)
    width = c.count("embed_dim")
    ffn, out = width * c.count("mlp_ratio"), c.d
    mlp = _two_layers(("mlp.fc1", "mlp.fc2"), width, ffn, width)
    return _tower(c, width=width, out=out, ffn=ffn, mlp=mlp, after=_qwen2_merger(width, out, c, rms=False))


def qwen2_5_tower(values: Any, where: str) -> Tower:
    """Return the tower of Qwen2.5-VL: most blocks attend within windows."""
    defaults = {
        "hidden_size": 3584, "intermediate_size": 3420, "window_size": 112, "out_hidden_size": 3584,
        "fullatt_block_indexes": (7, 15, 23, 31),
    }  # fmt: skip
    c = _config(values, defaults, where)
    out, merge = c.count("out_hidden_size"), c.count("spatial_merge_size")
    window = c.count("window_size") // merge // c.count("patch_size") * merge
    return _tower(
        c, width=c.d, out=out, ffn=c.ffn, mlp=gated("mlp", c.d, c.ffn, bias=True), gated=True, rms=True,
        after=_qwen2_merger(c.d, out, c, rms=True), window=window, full=frozenset(c.find("fullatt_block_indexes")[1]),
    )  # fmt: skip


def qwen3_tower(values: Any, where: str) -> Tower:
    """Return the tower of Qwen3-VL: learnt positions, and mergers after several blocks."""
    defaults = {
        "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "patch_size": 16, "out_hidden_size": 3584,
        "num_position_embeddings": 2304, "deepstack_visual_indexes": (8, 16, 24),
    }  # fmt: skip
    c = _config(values, defaults, where)
    out, deepstack = c.count("out_hidden_size"), len(c.find("deepstack_visual_indexes")[1])
    return _tower(
        c, width=c.d, out=out, ffn=c.ffn, mlp=_two_layers(("mlp.linear_fc1", "mlp.linear_fc2"), c.d, c.ffn, c.d),
        after=_qwen3_mergers(c, out, deepstack), deepstack=deepstack, positions=c.count("num_position_embeddings"),
        marks_frames=True,
    )  # fmt: skip


def _qwen3_mergers(c: Config, out: int, deepstack: int) -> Iterator[Parameter]:
    merged = c.d * c.count("spatial_merge_size") ** 2
    for name, normed in (("merger", c.d), *((f"deepstack_merger_list.{i}", merged) for i in range(deepstack))):
        yield from norm(f"{name}.norm", normed, bias=True)
        yield from _two_layers((f"{name}.linear_fc1", f"{name}.linear_fc2"), merged, merged, out)
