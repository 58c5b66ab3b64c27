"""Make small pictures and sounds for a model, by the arguments of its encoder functions and the sizes of its config."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPooling

from longspan.compat.reading import rows_of_forward
from longspan.compat.torch_api import on_meta

MODALITIES = ("image", "video", "audio")

_SETTINGS = {
    "vision_feature_layer", "vision_feature_select_strategy", "vision_aspect_ratio", "interpolate_pos_encoding",
    "downsample_mode", "return_dict", "kwargs", "args", "sample", "padding_cache", "encoder_inputs_embeds", "cache",
    "use_cache",
}  # fmt: skip
"""Arguments of encoder functions that are read from the config, and are no entries of a batch."""


def encoder_arguments(core: Any, modality: str) -> list[str]:
    """Return the batch keys that an encoder function reads, pixels first; empty if the model has no such function."""
    function = getattr(core, f"get_{modality}_features", None)
    if function is None:
        return []
    return [name for name in inspect.signature(function).parameters if name not in _SETTINGS]


def example(
    core: Any, modality: str, draw: torch.Generator, number: int = 2, frames: int = 2, inside: bool = False
) -> dict[str, Tensor] | None:
    """Return entries of a batch for `number` pictures or sounds that the encoder accepts; None if none was found.

    A video with a grid has `frames` frames: some models want text between them. `inside`: see `run_encoder`.
    """

    for inputs in _candidates(core.config, modality, encoder_arguments(core, modality), number, draw, frames):
        try:
            with torch.no_grad():
                rows = rows_in(run_encoder(core, modality, inputs, inside))
                if modality == "audio" and rows.numel():  # the last one is the shortest
                    last = {key: x[-1:] for key, x in inputs.items()}
                    rows = rows_in(run_encoder(core, modality, last, inside))
        except Exception:  # of any kind: inputs of another form
            continue
        if rows.numel() and (rows.is_meta or bool(rows.isfinite().all())):
            return inputs
    return None


def run_encoder(core: Any, modality: str, given: Mapping[str, Tensor], inside: bool = False) -> Any:
    """Run an encoder function, or (`inside`) the forward up to where it inserts rows.

    If the module is on the meta device, inputs keep their values as long as possible.
    """
    with contextlib.ExitStack() as stack:
        if next(core.parameters()).is_meta:
            stack.enter_context(torch.no_grad())
            stack.enter_context(on_meta())
        if inside:
            return BaseModelOutputWithPooling(pooler_output=rows_of_forward(core, modality, given))
        return getattr(core, f"get_{modality}_features")(**given, return_dict=True)


def rows_in(output: Any) -> Tensor:
    """Return an encoder's output, a row per embedding: `[rows, width]`. Deepstack features are further columns."""
    parts = [output[_field(output)], *(output.get("deepstack_features") or [])]
    joined = [_joined(part, output.get("attention_mask")) for part in parts]
    return torch.cat(joined, 1) if len(joined) > 1 else joined[0]


def sizes_in(output: Any) -> list[int]:
    """Return the embeddings of each picture, or of all if the output does not tell them apart."""
    x, real = output[_field(output)], output.get("attention_mask")
    if real is not None:
        return [int(count) for count in real.sum(1)]
    parts = x if not isinstance(x, Tensor) else x if x.dim() > 2 else [x]
    return [math.prod(part.shape[:-1]) for part in parts]


def with_rows(output: Any, rows: Tensor) -> Any:
    """Return an output of the encoder with `rows` alone, in the columns of `rows_in`."""
    deep, before = output.get("deepstack_features"), output[_field(output)]
    pooled, *more = rows.split((before if isinstance(before, Tensor) else before[0]).shape[-1], 1)
    kept = {key: x for key, x in output.items() if key not in ("hidden_states", "attentions")}
    kept |= {} if deep is None else {"deepstack_features": [(x,) for x in more]}
    mine = pooled.view(*(1,) * (before.dim() - 2), *pooled.shape) if isinstance(before, Tensor) else (pooled,)
    kept |= {key: mine for key in ("last_hidden_state", "pooler_output") if kept.get(key) is not None}
    if "attention_mask" in kept:  # of padded sounds: no row is padding
        kept["attention_mask"] = torch.ones(1, len(pooled), dtype=torch.bool, device=pooled.device)
    return type(output)(**kept)


def _field(output: Any) -> str:
    """Return the field with the embeddings of an encoder's output."""
    return "last_hidden_state" if output.get("pooler_output") is None else "pooler_output"


def _joined(embeddings: Tensor | tuple[Tensor, ...] | list[Tensor], real: Tensor | None) -> Tensor:
    if real is not None:  # of padded sounds
        return embeddings[real]
    x = embeddings if isinstance(embeddings, Tensor) else torch.cat(tuple(x.flatten(0, -2) for x in embeddings))
    return x if x.dim() == 2 else x.flatten(0, -2)


def _candidates(
    config: Any, modality: str, names: list[str], number: int, draw: torch.Generator, shown: int
) -> Iterator[dict[str, Tensor]]:
    if modality == "audio":
        yield from _sounds(config, names, number, draw)
        return
    vision = next((c for n in ("vision_config", "vq_config") if (c := getattr(config, n, None)) is not None), config)

    def first(*keys: str, default: int) -> int:
        found = (x for c in (vision, config) for key in keys if (x := getattr(c, key, None)))
        x = next(found, default)
        return int(x[0] if isinstance(x, list | tuple) else x)

    merge = 2 * first("spatial_merge_size", "merge_size", default=1)
    for each in dict.fromkeys(
        [merge, first("pooling_kernel_size", "downsample_factor", "scale_factor", default=2), 4, 6]
    ):
        sizes = _Sizes(
            number=number,
            frames=1 if modality == "image" else shown,
            channels=first("in_channels", "num_channels", default=3),
            side=first("image_size", "resolution", default=16),
            patch=first("patch_size", "spatial_patch_size", default=4),
            depth=first("temporal_patch_size", "patch_temporal", "video_temporal_patch_size", default=1),
            merge=each,
        )
        video = modality == "video"
        for more, *shapes in (*_patches(names[1:], sizes, video), *_pictures(names[1:], sizes, video, draw)):
            for shape in shapes:
                yield {names[0]: torch.randn(shape, generator=draw), **more}


@dataclass(frozen=True)
class _Sizes:
    """Sizes of small pictures."""

    number: int  # pictures
    frames: int  # of each, in a grid
    channels: int
    side: int  # of a whole picture, in pixels
    patch: int
    depth: int  # frames in a patch
    merge: int  # side of what one embedding covers, in patches


def _named(others: list[str], *ends: str) -> str | None:
    return next((key for key in others if key.endswith(ends)), None)


def _patches(others: list[str], s: _Sizes, video: bool) -> Iterator[tuple[Any, ...]]:
    """Yield entries of a batch beside the patches of pictures, and shapes that the patches may have with them."""
    n, c, patch, h, w = s.number, s.channels, s.patch, s.merge, 2 * s.merge
    if (key := _named(others, "grid_thw", "grid_hw")) is not None:
        axes = [s.frames, h, w] if key.endswith("thw") else [h, w]
        count = math.prod(axes) * n
        more = {key: torch.tensor([axes] * n)}
        if (key := _named(others, "merge_sizes")) is not None:
            more[key] = torch.tensor([2 if video else 1] * n)
        shapes = [x for d in dict.fromkeys((s.depth, 1, 2)) for x in ((c * d * patch**2,), (c, d, patch, patch))]
        yield more, *((count, *shape) for shape in (*shapes, (c, patch, patch)))
    for key in (key for key in others if "target_sizes" in key):
        strips = (1, c, patch, patch * h * w * n), (n, c, patch, patch * h * w)
        yield {key: torch.tensor([[h, w]] * n)}, *strips, (n, c, h * patch, w * patch)
    if "spatial_shapes" in others:
        mask = torch.ones(n, h * w, dtype=torch.int64)
        more = {"spatial_shapes": torch.tensor([[h, w]] * n), "pixel_attention_mask": mask}
        yield more, (n, h * w, c * patch**2)
    if (key := _named(others, "position_ids")) is not None:
        at = torch.tensor(list(itertools.product(range(w), range(w))))
        more = {key: at.expand(n * s.frames, -1, -1).contiguous()}
        more |= {"num_frames_per_video": torch.tensor([s.frames] * n)} if "num_frames_per_video" in others else {}
        for size in dict.fromkeys((patch, patch * s.merge // 2, patch * s.merge)):
            yield more, (n * s.frames, len(at), c * size**2)
    if (key := _named(others, "token_pooling")) is not None:
        patches = s.side // patch
        half = patches // 2
        pool = torch.arange(patches**2).view(half, 2, half, 2).permute(0, 2, 1, 3).reshape(-1, 4)
        grid = torch.tensor([[1, half, half] if video else [half, half, 0, 0]] * n)
        more = {key: torch.cat([pool + i * patches**2 for i in range(n)]), str(_named(others, "grids")): grid}
        yield more, (n, patches**2, c * patch**2)


def _pictures(others: list[str], s: _Sizes, video: bool, draw: torch.Generator) -> Iterator[tuple[Any, ...]]:
    """Yield entries of a batch beside whole pictures, and shapes that their pixels may have with them."""
    n, c, whole = s.number, s.channels, (s.channels, s.side, s.side)
    if video:
        for d in dict.fromkeys((2, 4, s.depth, 8)):
            yield {}, (n, d, *whole), (n, c, d, s.side, s.side)
    sized = {"image_sizes": torch.tensor([[s.side, s.side]] * n)} if "image_sizes" in others else {}
    if sized:
        yield sized, (n, 2, *whole)
        yield {"image_sizes": torch.tensor([[s.side, 2 * s.side]] * n)}, (n, 3, *whole)
    if "pixel_attention_mask" in others:
        for mask in (torch.ones(1, n, s.side, s.side, dtype=torch.int64), torch.ones(1, n, dtype=torch.bool)):
            yield {"pixel_attention_mask": mask}, (1, n, *whole)
    if "high_res_pixel_values" in others:
        for side in (2 * s.side, s.side):
            yield {"high_res_pixel_values": torch.randn(n, c, side, side, generator=draw)}, (n, *whole)
    yield sized, (n, *whole)
    yield {}, (n, *whole)
    yield sized, (n, 1, *whole)
    yield {}, (n, (s.side // s.patch) ** 2, c * s.patch**2)


def _sounds(config: Any, names: list[str], number: int, draw: torch.Generator) -> Iterator[dict[str, Tensor]]:
    """Make sounds of features or samples; the last one is shorter, if a mask or lengths can say so."""
    audio = getattr(config, "audio_config", None) or getattr(config, "encoder_config", None)
    widths = ("num_mel_bins", "feature_size", "input_feat_size", "input_dim")
    bins = next((x for name in widths if (x := getattr(audio, name, None))), 16) * getattr(
        audio, "num_stacked_frames", 1
    )
    for length, short in itertools.product((64, 100, 160, 256, 400, 1280, 2560, 3000), (3, 4)):
        real = torch.ones(number, length, dtype=torch.bool)
        real[number - 1, short * length // 4 :] = False
        more = {name: real.long() if "attention" in name else real for name in names[1:] if "mask" in name}
        more |= {name: real.sum(1) for name in names[1:] if "lengths" in name}
        if short == 4 or more:
            features = [(bins, length), (length, bins), (128, length), (length, 128)]
            for shape in [(length,), (1, length)] if "values" in names[0] else features:
                yield {names[0]: torch.randn((number, *shape), generator=draw), **more}
