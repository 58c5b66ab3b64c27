"""How a vision tower encodes images that are cut into tiles, and videos of pooled frames."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longspan.compat.transformers_api import tiles_of_image
from longspan.core.errors import LongspanError
from longspan.hf.encoders import Encoder, Units, llava_rows


@dataclass(frozen=True)
class TileEncoder(Encoder):
    """Images as tiles `[images, tiles, channels, height, width]`, with the height and width of each in `image_sizes`.

    A unit is an image: the model joins its tiles, and ends each row of patches with a learnt newline. Of rows with
    several images each is one tile (`batch_num_images`).
    """

    @property
    def keys(self) -> tuple[str, ...]:
        return self.pixels, "image_sizes", "batch_num_images"

    def units(self, core: Any, batch: Mapping[str, Any]) -> Units:
        pixels, sizes = batch[self.pixels], batch.get("image_sizes")
        if pixels.dim() != 5:
            raise LongspanError(
                f"`{self.pixels}` has the shape {tuple(pixels.shape)}; it is [images, tiles, channels, height, width]"
            )
        _check_side(self.pixels, pixels, core)
        if sizes is None or tuple(sizes.shape) != (len(pixels), 2):
            got = "none" if sizes is None else f"the shape {tuple(sizes.shape)}"
            raise LongspanError(
                f"`{self.pixels}` holds {len(pixels)} images and needs `image_sizes` [{len(pixels)}, 2], the height "
                f"and width of each before it was cut into tiles; got {got}"
            )
        tiles = self._tiles(core, batch)
        few = next((i for i, count in enumerate(tiles) if count > pixels.shape[1]), None)
        if few is not None:
            raise LongspanError(
                f"image {few} of {sizes[few].tolist()} pixels has {tiles[few]} tiles, `{self.pixels}` has room for "
                f"{pixels.shape[1]} per image; give the `image_sizes` and `batch_num_images` of the processor"
            )
        side = core.config.vision_config.image_size // core.config.vision_config.patch_size
        of_tile = llava_rows(core, side, side, False)
        each = zip(tiles, sizes.tolist(), strict=True)
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
        if sum(numbers) != images:
            raise LongspanError(
                f"`batch_num_images` counts {sum(numbers)} images, `image_sizes` has {images}; give the number of "
                f"images of each row that has any"
            )
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
        part = {key: x[order].to(device) for key, x in self.part(core, batch, start, stop).items()}
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
        return {self.pixels: pixels, "image_sizes": torch.tensor([[size, size]], device=device)}


_IS_CUT, _ENDS_VIDEO = "image_is_cut", "frame_ends_video"
"""Keys that `Encoder.select` adds to a batch: facts of each unit that the selected rows or videos no longer show."""

_PACKING = ("vision_feature_select_strategy", "vision_aspect_ratio")
"""Entries of the config that the function which joins tiles may take."""


@dataclass(frozen=True)
class PooledFrameEncoder(Encoder):
    """Videos `[videos, frames, channels, height, width]`. A unit is a frame, pooled 2 x 2; a newline ends a video."""

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.pixels,)

    def units(self, core: Any, batch: Mapping[str, Any]) -> Units:
        pixels, vision = batch[self.pixels], core.config.vision_config
        if pixels.dim() != 5:
            raise LongspanError(
                f"`{self.pixels}` has the shape {tuple(pixels.shape)}; it is [videos, frames, channels, height, width]"
            )
        _check_side(self.pixels, pixels, core)
        videos, frames = pixels.shape[:2]
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
        output.pooler_output = x[torch.tensor(at, device=x.device)][None]
        return output

    def smallest(self, core: Any, device: torch.device) -> dict[str, Any]:
        vision = core.config.vision_config
        shape = 1, 1, getattr(vision, "num_channels", 3), vision.image_size, vision.image_size
        return {self.pixels: torch.zeros(shape, device=device)}


def _check_side(name: str, pixels: Tensor, core: Any) -> None:
    side = core.config.vision_config.image_size
    if tuple(pixels.shape[-2:]) != (side, side):
        raise LongspanError(
            f"`{name}` has {pixels.shape[-2]} x {pixels.shape[-1]} pixels, the vision tower takes {side} x {side}"
        )
