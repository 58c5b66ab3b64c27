"""Random pictures in a batch of token ids, with the placeholders that a processor would write.

Shape suffixes: B rows of the batch, S tokens.
"""

from __future__ import annotations

import inspect
import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longspan.core.errors import LongspanError
from longspan.hf.encoders import Encoder, GridEncoder, ImageEncoder
from longspan.hf.vision import core_of, encoders_of

_TEXT_TOKENS = 60
"""Pictures grow with the sequence: the smallest ones take a third of so many tokens."""


@dataclass(frozen=True)
class Pictures:
    """The pictures of one row of a batch.

    Attributes:
        inputs: entries of a batch, `[pictures, ...]` or `[patches, ...]`.
        counts: images and videos.
    """

    inputs: dict[str, Tensor]
    counts: Counter[str]


def joined(rows: tuple[Pictures, ...]) -> dict[str, Tensor]:
    """Return the entries of a batch of these rows."""
    names = dict.fromkeys(name for row in rows for name in row.inputs)
    return {name: torch.cat([row.inputs[name] for row in rows if name in row.inputs]) for name in names}


def add_pictures(batch_BS: dict[str, Tensor], model: Any, seed: int) -> tuple[Pictures, ...]:
    """Put two images and a video, as far as the model takes them, into each row of a batch, and return them.

    Ids become placeholders, in place, and the batch gets each token's kind if the model reads it. With three or more
    rows, the last one has text only. `model` has no weights.

    Raises:
        LongspanError: if a row has too few tokens for one picture.
    """
    draw = torch.Generator().manual_seed(seed + 1)
    ids_BS, labels_BS = batch_BS["input_ids"], batch_BS["labels"]
    config, core = model.config, core_of(model)
    # One token may stand for the placeholders of both modalities (GLM): one of them is enough.
    encoders = tuple({encoder.token: encoder for encoder in encoders_of(model)}.values())
    _remove_special(ids_BS, config)
    kinds_BS = torch.zeros_like(ids_BS)
    rows = []
    for row in range(len(ids_BS)):
        chosen = _choose(encoders, core, ids_BS.shape[1], draw) if row < 2 or row < len(ids_BS) - 1 else []
        room = ids_BS.shape[1] - sum(picture.tokens for picture in chosen)
        at, inputs = room // (len(chosen) + 1), dict[str, list[Tensor]]()
        for picture in chosen:
            for run in picture.runs:
                ids_BS[row, at : at + run] = getattr(config, picture.encoder.token)
                labels_BS[row, at : at + run] = -100
                kinds_BS[row, at : at + run] = 1 + (picture.encoder.modality == "video")
                at += run + 1
            at += room // (len(chosen) + 1)
            for name, x in picture.inputs.items():
                inputs.setdefault(name, []).append(x)
        counts = Counter(picture.encoder.modality for picture in chosen)
        rows.append(Pictures({name: torch.cat(xs) for name, xs in inputs.items()}, counts))
    accepted = inspect.signature(model.forward).parameters
    batch_BS |= {name: kinds_BS for name in ("mm_token_type_ids", "token_type_ids") if name in accepted}
    return tuple(rows)


def _remove_special(ids_BS: Tensor, config: Any) -> None:
    """Replace placeholders and other special tokens among random ids, in place."""
    parts = (config, config.get_text_config())
    special = {value for part in parts for name, value in vars(part).items() if name.endswith(("_token_id", "_index"))}
    known = sorted(value for value in special if isinstance(value, int))
    other = next(value for value in range(len(known) + 1) if value not in known)
    ids_BS[torch.isin(ids_BS, torch.tensor(known))] = other


@dataclass(frozen=True)
class _Picture:
    encoder: Encoder
    inputs: dict[str, Tensor]
    runs: tuple[int, ...]  # placeholders, between which there is a token of text

    @property
    def tokens(self) -> int:
        return sum(self.runs) + len(self.runs)


def _choose(encoders: tuple[Encoder, ...], core: Any, tokens: int, draw: torch.Generator) -> list[_Picture]:
    """Return an image, a video and another image, or as many of these as fit into three quarters of a row."""
    scale = max(1, math.isqrt(tokens // _TEXT_TOKENS))
    pairs = [(encoder, _examples(encoder, core, scale, draw)) for encoder in encoders]
    made = [_picture(encoder, core, examples[0]) for encoder, examples in pairs]
    made += [_picture(encoder, core, x) for encoder, examples in pairs for x in examples[1:]]
    chosen, left = list[_Picture](), 3 * tokens // 4
    for picture in made:
        if picture.tokens <= left:
            chosen.append(picture)
            left -= picture.tokens
    if not chosen:
        least = min(picture.tokens for picture in made)
        raise LongspanError(
            f"a picture of this model takes {least} tokens, more than three quarters of the {tokens} in a sequence; "
            f"give --context {2 * least} or more"
        )
    return chosen


def _picture(encoder: Encoder, core: Any, inputs: dict[str, Tensor]) -> _Picture:
    rows = encoder.units(core, inputs).rows
    apart = isinstance(encoder, GridEncoder) and encoder.modality == "video" and encoder.frames_apart
    return _Picture(encoder, inputs, rows if apart else (sum(rows),))


def _examples(encoder: Encoder, core: Any, scale: int, draw: torch.Generator) -> list[dict[str, Tensor]]:
    """Return the entries of a batch for one video of three frames, or two images, of random pixels."""
    small = encoder.smallest(core, torch.device("cpu"))
    if isinstance(encoder, GridEncoder):
        merge = int(small[encoder.grid][0, 1])
        width = small[encoder.pixels].shape[1]
        shapes = [(1, 2, 3), (1, 1, 2)] if encoder.modality == "image" else [(3, 2, 2)]
        grids = [torch.tensor([[t, scale * merge * h, scale * merge * w]]) for t, h, w in shapes]
        return [{encoder.pixels: _pixels((int(grid.prod()), width), draw), encoder.grid: grid} for grid in grids]
    shape = tuple(small[encoder.pixels].shape)
    if isinstance(encoder, ImageEncoder) and "image_sizes" in small:  # of any size, padded to the largest
        height, width = small["image_sizes"][0].tolist()
        padded = (*shape[:2], 2 * scale * height, 3 * scale * width)
        sizes = [torch.tensor([[scale * height * h, scale * width * w]]) for h, w in ((2, 3), (1, 2))]
        return [{encoder.pixels: _pixels(padded, draw), "image_sizes": size} for size in sizes]
    return [small | {encoder.pixels: _pixels(shape, draw)} for _ in range(2)]


def _pixels(shape: tuple[int, ...], draw: torch.Generator) -> Tensor:
    """Return random numbers that bf16 can represent, so that runs in any dtype see the same."""
    return torch.randn(shape, generator=draw).bfloat16().float()
