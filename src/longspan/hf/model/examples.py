"""Make small pictures and sounds for a model, by the arguments of its encoder functions and the sizes of its config."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

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
    core: Any, modality: str, draw: torch.Generator, number: int = 2, frames: int = 2
) -> dict[str, Tensor] | None:
    """Return entries of a batch for `number` pictures or sounds that the encoder accepts; None if none was found.

    A video with a grid has `frames` frames: some models want text between them.
    """

    for inputs in _candidates(core.config, modality, encoder_arguments(core, modality), number, draw, frames):
        try:
            with torch.no_grad():
                rows = rows_in(run_encoder(core, modality, inputs))
        except Exception:  # of any kind: inputs of another form
            continue
        if rows.numel() and (rows.is_meta or bool(rows.isfinite().all())):
            return inputs
    return None


def run_encoder(core: Any, modality: str, given: Mapping[str, Tensor]) -> Any:
    """Run an encoder function. If the module is on the meta device, inputs keep their values as long as possible."""
    run = getattr(core, f"get_{modality}_features")
    if not next(core.parameters()).is_meta:
        return run(**given, return_dict=True)
    with torch.no_grad(), on_meta():
        return run(**given, return_dict=True)


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

    def first(*keys: str, default: Any = None) -> Any:
        found = (x for c in (vision, config) for key in keys if (x := getattr(c, key, None)))
        x = next(found, default)
        return x[0] if isinstance(x, list | tuple) else x

    patch, channels = (
        first("patch_size", "spatial_patch_size", default=4),
        first("in_channels", "num_channels", default=3),
    )
    side, merge = first("image_size", "resolution", default=16), 2 * (first("spatial_merge_size", "merge_size") or 1)
    frames = first("temporal_patch_size", "patch_temporal", "video_temporal_patch_size", default=1)
    merges = dict.fromkeys([merge, first("pooling_kernel_size", "downsample_factor", "scale_factor", default=2), 4, 6])
    for each in merges:
        yield from _pictures(names, number, draw, patch, channels, side, each, frames, modality, shown)


def _pictures(
    names: list[str], number: int, draw: torch.Generator, patch: int, channels: int, side: int, merge: int, frames: int,
    modality: str, shown: int,
) -> Iterator[dict[str, Tensor]]:  # fmt: skip
    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw)

    pixels, others = names[0], names[1:]
    grid = next((n for n in others if n.endswith(("grid_thw", "grid_hw"))), None)
    t = 1 if modality == "image" else shown
    h, w = merge, 2 * merge
    if grid is not None:
        axes = [t, h, w] if grid.endswith("thw") else [h, w]
        count = math.prod(axes) * number
        more = {grid: torch.tensor([axes] * number)}
        if any(n.endswith("merge_sizes") for n in others):
            more[next(n for n in others if n.endswith("merge_sizes"))] = torch.tensor(
                [2 if modality == "video" else 1] * number
            )
        for depth in dict.fromkeys((frames, 1, 2)):
            yield {pixels: noise(count, channels * depth * patch**2), **more}
            yield {pixels: noise(count, channels, depth, patch, patch), **more}
        yield {pixels: noise(count, channels, patch, patch), **more}
        return
    if any("target_sizes" in n for n in others):
        sizes = torch.tensor([[h, w]] * number)
        for name in (n for n in others if "target_sizes" in n):
            yield {pixels: noise(1, channels, patch, patch * h * w * number), name: sizes}
            yield {pixels: noise(number, channels, patch, patch * h * w), name: sizes}
            yield {pixels: noise(number, channels, h * patch, w * patch), name: sizes}
    if "spatial_shapes" in others:
        mask = torch.ones(number, h * w, dtype=torch.int64)
        yield {pixels: noise(number, h * w, channels * patch**2), "spatial_shapes": torch.tensor([[h, w]] * number),
               "pixel_attention_mask": mask}  # fmt: skip
    if any(n.endswith("position_ids") for n in others):
        name = next(n for n in others if n.endswith("position_ids"))
        at = torch.tensor(list(itertools.product(range(2 * merge), range(2 * merge))))
        of = number * t
        extra: dict[str, Tensor] = (
            {"num_frames_per_video": torch.tensor([t] * number)} if "num_frames_per_video" in others else {}
        )
        for size in dict.fromkeys((patch, patch * merge // 2, patch * merge)):
            width = channels * size**2
            yield {pixels: noise(of, len(at), width), name: at.expand(of, -1, -1).contiguous(), **extra}
    if "image_token_pooling" in others or "video_token_pooling" in others:
        s = side // patch
        pool = torch.arange(s * s).view(s // 2, 2, s // 2, 2).permute(0, 2, 1, 3).reshape(-1, 4)
        pool = torch.cat([pool + i * s * s for i in range(number)])
        name = next(n for n in others if n.endswith("pooling"))
        grids = next(n for n in others if n.endswith("grids"))
        axes = [s // 2, s // 2, 0, 0] if modality == "image" else [1, s // 2, s // 2]
        yield {pixels: noise(number, s * s, channels * patch**2), name: pool, grids: torch.tensor([axes] * number)}
    if modality == "video":
        for depth in dict.fromkeys((2, 4, frames, 8)):
            yield {pixels: noise(number, depth, channels, side, side)}
            yield {pixels: noise(number, channels, depth, side, side)}
    sized: dict[str, Tensor] = {"image_sizes": torch.tensor([[side, side]] * number)} if "image_sizes" in others else {}
    if sized:
        yield {pixels: noise(number, 2, channels, side, side), **sized}
        yield {
            pixels: noise(number, 3, channels, side, side),
            **sized,
            "image_sizes": torch.tensor([[side, 2 * side]] * number),
        }
    if "pixel_attention_mask" in others:
        yield {
            pixels: noise(1, number, channels, side, side),
            "pixel_attention_mask": torch.ones(1, number, side, side, dtype=torch.int64),
        }
        yield {
            pixels: noise(1, number, channels, side, side),
            "pixel_attention_mask": torch.ones(1, number, dtype=torch.bool),
        }
    if "high_res_pixel_values" in others:
        yield {
            pixels: noise(number, channels, side, side),
            "high_res_pixel_values": noise(number, channels, 2 * side, 2 * side),
        }
        yield {
            pixels: noise(number, channels, side, side),
            "high_res_pixel_values": noise(number, channels, side, side),
        }
    yield {pixels: noise(number, channels, side, side), **sized}
    yield {pixels: noise(number, channels, side, side)}
    yield {pixels: noise(number, 1, channels, side, side), **sized}
    yield {pixels: noise(number, (side // patch) ** 2, channels * patch**2)}


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
