"""How a vision tower encodes pictures: patches with a grid of each, whole pictures, tiles, or pooled frames.

A unit is the smallest input that a vision tower can encode alone: a picture, a tile of one, or a video frame, where the
tower's attention stays within frames. Units are in the order of their placeholders in the batch.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longspan.compat.torch_api import to_device
from longspan.compat.transformers_api import tiles_of_image
from longspan.core.errors import LongspanError


@dataclass(frozen=True)
class Units:
    """The units of one modality in a batch."""

    patches: tuple[int, ...]  # per unit: its cost in the tower
    rows: tuple[int, ...]  # per unit: its embeddings in the language model


@dataclass(frozen=True)
class Encoder(ABC):
    """One modality of a family: its batch keys, and how the tower encodes some of its units."""

    modality: str  # "image" or "video": the key of the model's `mm_encoder_outputs`
    pixels: str  # batch key of the pixels
    token: str  # config entry with the id of placeholders

    inside = False  # whether the forward changes or adds rows before it inserts them

    @property
    def all_keys(self) -> tuple[str, ...]:
        """Batch keys of pixels, and of what else the encoder function reads by rule."""
        return (self.pixels,)

    @abstractmethod
    def units(self, core: Any, batch: Mapping[str, Any]) -> Units:
        """Return the units of a batch; raise if its tensors are inconsistent."""

    @abstractmethod
    def part(self, core: Any, batch: Mapping[str, Any], start: int, stop: int) -> dict[str, Any]:
        """Return the arguments of the model's `get_image_features` (or video) for units `start` to `stop`."""

    @abstractmethod
    def smallest(self, core: Any, device: torch.device) -> dict[str, Any]:
        """Return a batch of one small unit."""

    def encode(self, core: Any, batch: Mapping[str, Any], start: int, stop: int, device: torch.device) -> Any:
        """Run the tower on units `start` to `stop`; `rows_of` returns their embeddings from the output."""
        run = getattr(core, f"get_{self.modality}_features")
        part = self.part(core, batch, start, stop)  # `generate` may leave the prompt's pixels on the host
        return run(**{key: to_device(x, device) for key, x in part.items()}, return_dict=True)

    def select(self, core: Any, batch: Mapping[str, Any], units: Sequence[int]) -> dict[str, Any]:
        """Return a batch of some units, in their order."""
        starts = [u for i, u in enumerate(units) if not i or units[i - 1] != u - 1]
        stops = [u + 1 for i, u in enumerate(units) if i + 1 == len(units) or units[i + 1] != u + 1]
        parts = [self.part(core, batch, start, stop) for start, stop in zip(starts, stops, strict=True)]
        return parts[0] if len(parts) == 1 else {key: torch.cat([part[key] for part in parts]) for key in parts[0]}


@dataclass(frozen=True)
class GridEncoder(Encoder):
    """Patches of all pictures in one tensor, with a grid (frames, height, width) of each. A unit is a frame."""

    grid: str
    frames_apart: bool = False  # whether the processor writes text (its time) between a video's frames

    def units(self, core: Any, batch: Mapping[str, Any]) -> Units:
        grids, merge = batch[self.grid].tolist(), core.visual.spatial_merge_size
        for i, (t, h, w) in enumerate(grids):
            if min(t, h, w) < 1 or h % merge or w % merge:
                raise LongspanError(
                    f"`{self.grid}` has frames of {h} x {w} patches for {self.modality} {i}; the model merges "
                    f"{merge} x {merge} patches: both must be multiples of {merge}"
                )
        given, needed = len(batch[self.pixels]), sum(t * h * w for t, h, w in grids)
        if given != needed:
            raise LongspanError(
                f"`{self.pixels}` holds {given} patches, the {len(grids)} grids of `{self.grid}` {needed}; give each "
                f"{self.modality} its grid (frames, height, width) in patches"
            )
        patches = tuple(h * w for t, h, w in grids for _ in range(t))
        return Units(patches, tuple(size // merge**2 for size in patches))

    def part(self, core: Any, batch: Mapping[str, Any], start: int, stop: int) -> dict[str, Any]:
        grids, frames, first, last = list[list[int]](), 0, 0, 0
        for t, h, w in batch[self.grid].tolist():
            before, mine = max(0, min(t, start - frames)), min(t, stop - frames)
            first, last = first + before * h * w, last + max(0, mine) * h * w
            if mine > before:
                grids.append([mine - before, h, w])
            frames += t
        pixels, grid = batch[self.pixels], batch[self.grid]
        return {self.pixels: pixels[first:last], self.grid: grid.new_tensor(grids)}

    def smallest(self, core: Any, device: torch.device) -> dict[str, Any]:
        merge, embed = core.visual.spatial_merge_size, core.visual.patch_embed
        width = embed.in_channels * embed.temporal_patch_size * embed.patch_size**2
        grid = torch.tensor([[1, merge, merge]])
        return {self.pixels: torch.zeros(merge**2, width, device=device), self.grid: grid}


@dataclass(frozen=True)
class ImageEncoder(Encoder):
    """Pictures, or tiles of them, as `[pictures, channels, height, width]`, each of which is a unit.

    If they differ in size, they are padded, and `image_sizes` has the height and width of each.
    """

    rows: Callable[[Any, int, int, bool], int]
    """Return the embeddings of a picture, given its height and width in patches and whether it has `image_sizes`."""

    def units(self, core: Any, batch: Mapping[str, Any]) -> Units:
        sizes, (count, _, height, width) = batch.get("image_sizes"), batch[self.pixels].shape
        each = [[height, width]] * count if sizes is None else sizes.tolist()
        if len(each) != count:
            raise LongspanError(f"`image_sizes` has {len(each)} entries, `{self.pixels}` {count} pictures")
        outside = next((i for i, (h, w) in enumerate(each) if h > height or w > width), None)
        if outside is not None:
            raise LongspanError(
                f"`image_sizes` gives {each[outside]} for picture {outside}, more than the {[height, width]} pixels of "
                f"`{self.pixels}`; pad the pixels to the largest picture"
            )
        patch = _two(core.config.vision_config.patch_size)
        grids = [(h // patch[0], w // patch[1]) for h, w in each]
        rows = tuple(self.rows(core, h, w, sizes is not None) for h, w in grids)
        return Units(tuple(h * w for h, w in grids), rows)

    def part(self, core: Any, batch: Mapping[str, Any], start: int, stop: int) -> dict[str, Any]:
        return {key: batch[key][start:stop] for key in (self.pixels, "image_sizes") if batch.get(key) is not None}

    def encode(self, core: Any, batch: Mapping[str, Any], start: int, stop: int, device: torch.device) -> Any:
        part = self.part(core, batch, start, stop)
        if sum(self.units(core, part).rows) == 1:  # of one embedding, transformers' Mistral3 squeezes the row away
            batch, start, stop = {key: torch.cat([x, x]) for key, x in part.items()}, 0, 2
        return super().encode(core, batch, start, stop, device)

    def smallest(self, core: Any, device: torch.device) -> dict[str, Any]:
        vision = core.config.vision_config
        sizes = inspect.signature(core.get_image_features).parameters.get("image_sizes")
        sized = sizes is not None and sizes.default is sizes.empty
        side = core.config.spatial_merge_size if sized else None
        height, width = _two(vision.image_size) if side is None else (side * size for size in _two(vision.patch_size))
        channels = getattr(vision, "num_channels", 3)
        batch = {self.pixels: torch.zeros(1, channels, height, width, device=device)}
        if sized:
            batch["image_sizes"] = torch.tensor([[height, width]])
        return batch


def _two(size: int | Sequence[int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def llava_rows(core: Any, h: int, w: int, sized: bool) -> int:
    """Return the embeddings of a picture or tile of LLaVA, as `ImageEncoder.rows`."""
    class_token = any(
        name.endswith(("class_embedding", "cls_token")) for name, _ in core.vision_tower.named_parameters()
    )
    dropped = core.config.vision_feature_select_strategy == "default"
    return h * w if sized else h * w + class_token - dropped


@dataclass(frozen=True)
class TileEncoder(Encoder):
    """Images as tiles `[images, tiles, channels, height, width]`, with the height and width of each in `image_sizes`.

    A unit is an image: the model joins its tiles, and ends each row of patches with a learnt newline. Of rows with
    several images each is one tile (`batch_num_images`).
    """

    def units(self, core: Any, batch: Mapping[str, Any]) -> Units:
        sizes, (images, room, *_) = batch["image_sizes"].tolist(), batch[self.pixels].shape
        if len(sizes) != images:
            raise LongspanError(f"`image_sizes` has {len(sizes)} entries, `{self.pixels}` {images} images")
        tiles = self._tiles(core, batch)
        few = next((i for i, count in enumerate(tiles) if count > room), None)
        if few is not None:
            raise LongspanError(
                f"image {few} of {sizes[few]} pixels has {tiles[few]} tiles, `{self.pixels}` has room for {room} per "
                f"image; give the `image_sizes` and `batch_num_images` of the processor"
            )
        side = core.config.vision_config.image_size // core.config.vision_config.patch_size
        of_tile = llava_rows(core, side, side, False)
        each = zip(tiles, sizes, strict=True)
        return Units(tuple(count * side**2 for count in tiles), tuple(self._rows(core, *x, of_tile) for x in each))

    def _tiles(self, core: Any, batch: Mapping[str, Any]) -> list[int]:
        sizes, tile = batch["image_sizes"].tolist(), core.config.vision_config.image_size
        cut = [tiles_of_image(h, w, core.config.image_grid_pinpoints, tile) for h, w in sizes]
        return [count if several else 1 for count, several in zip(cut, self._is_cut(batch), strict=True)]

    def _is_cut(self, batch: Mapping[str, Any]) -> list[bool]:
        """Return whether each image is cut into tiles: those that are the only one of their row."""
        if _IS_CUT in batch:
            return [bool(x) for x in batch[_IS_CUT]]
        counts, images = batch.get("batch_num_images"), len(batch["image_sizes"])
        if counts is None:
            return [True] * images
        numbers = [int(n) for n in counts.flatten()]
        return [n == 1 for n in numbers for _ in range(n)]

    def _rows(self, core: Any, tiles: int, size: list[int], of_tile: int) -> int:
        """Return the embeddings of an image, from the shapes that the model's own function returns."""
        config, options = core.config, inspect.signature(core.pack_image_features).parameters
        given = {name: getattr(config, name) for name in _PACKING if name in options}
        x, newline = torch.empty(tiles, of_tile, 1, device="meta"), torch.empty(1, device="meta")
        packed, _ = core.pack_image_features([x], [size], image_newline=newline, **given)
        return len(packed[0])

    def part(self, core: Any, batch: Mapping[str, Any], start: int, stop: int) -> dict[str, Any]:
        return {key: batch[key][start:stop] for key in (self.pixels, "image_sizes")}

    def select(self, core: Any, batch: Mapping[str, Any], units: Sequence[int]) -> dict[str, Any]:
        is_cut = torch.tensor(self._is_cut(batch))
        return super().select(core, batch, units) | {_IS_CUT: is_cut[list(units)]}

    def encode(self, core: Any, batch: Mapping[str, Any], start: int, stop: int, device: torch.device) -> Any:
        if all(self._is_cut(batch)):
            return super().encode(core, batch, start, stop, device)
        # The model derives which images are cut from their number per row, and a row may lie on several ranks. Pass the
        # cut images as rows of one image, the others as one row. The model ignores a second image that is missing.
        is_cut = self._is_cut(batch)[start:stop]
        order = sorted(range(stop - start), key=lambda i: not is_cut[i])
        at = torch.tensor(order)
        part = {
            key: to_device(x, device).index_select(0, to_device(at, device))
            for key, x in self.part(core, batch, start, stop).items()
        }
        whole = len(is_cut) - sum(is_cut)
        part["batch_num_images"] = torch.tensor([1] * sum(is_cut) + ([max(2, whole)] if whole else []))
        output = core.get_image_features(**part, return_dict=True)
        ordered = dict(zip(order, output.pooler_output, strict=True))
        output.pooler_output = [ordered[i] for i in range(len(order))]
        return output

    def smallest(self, core: Any, device: torch.device) -> dict[str, Any]:
        vision = core.config.vision_config
        size, channels = vision.image_size, getattr(vision, "num_channels", 3)
        tiles = tiles_of_image(size, size, core.config.image_grid_pinpoints, size)
        pixels = torch.zeros(1, tiles, channels, size, size, device=device)
        return {self.pixels: pixels, "image_sizes": torch.tensor([[size, size]])}


_IS_CUT, _ENDS_VIDEO = "image_is_cut", "frame_ends_video"
"""Keys that `Encoder.select` adds to a batch: facts of each unit that the selected rows or videos no longer show."""

_PACKING = ("vision_feature_select_strategy", "vision_aspect_ratio")
"""Entries of the config that the function which joins tiles may take."""


@dataclass(frozen=True)
class PooledFrameEncoder(Encoder):
    """Videos `[videos, frames, channels, height, width]`. A unit is a frame, pooled 2 x 2; a newline ends a video."""

    def units(self, core: Any, batch: Mapping[str, Any]) -> Units:
        vision, (videos, frames, *_) = core.config.vision_config, batch[self.pixels].shape
        side = vision.image_size // vision.patch_size
        rows = (-(-side // 2)) ** 2
        return Units((side**2,) * videos * frames, ((rows,) * (frames - 1) + (rows + 1,)) * videos)

    def part(self, core: Any, batch: Mapping[str, Any], start: int, stop: int) -> dict[str, Any]:
        return {self.pixels: batch[self.pixels].flatten(0, 1)[None, start:stop]}

    def _ends_video(self, batch: Mapping[str, Any]) -> Tensor:
        """Return whether each frame is the last one of its video."""
        if _ENDS_VIDEO in batch:
            ends: Tensor = batch[_ENDS_VIDEO]
            return ends
        videos, frames = batch[self.pixels].shape[:2]
        return torch.tensor([*[False] * (frames - 1), True] * videos)

    def select(self, core: Any, batch: Mapping[str, Any], units: Sequence[int]) -> dict[str, Any]:
        frames = batch[self.pixels].flatten(0, 1)[None, list(units)]
        return {self.pixels: frames, _ENDS_VIDEO: self._ends_video(batch)[list(units)]}

    def encode(self, core: Any, batch: Mapping[str, Any], start: int, stop: int, device: torch.device) -> Any:
        output = super().encode(core, batch, start, stop, device)
        x = output.pooler_output[0]  # all frames as one video, then a newline
        newline = len(x) - 1
        of_frame, at = newline // (stop - start), list[int]()
        for i, ends in enumerate(self._ends_video(batch)[start:stop].tolist()):
            at += range(i * of_frame, (i + 1) * of_frame)
            at += [newline] if ends else []
        output.pooler_output = x[to_device(torch.tensor(at), x.device)][None]
        return output

    def smallest(self, core: Any, device: torch.device) -> dict[str, Any]:
        vision = core.config.vision_config
        shape = 1, 1, getattr(vision, "num_channels", 3), vision.image_size, vision.image_size
        return {self.pixels: torch.zeros(shape, device=device)}
