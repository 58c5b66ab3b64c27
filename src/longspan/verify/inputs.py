"""The model and the batch of a `VerifyConfig`.

Shape suffixes: B rows of the global batch, S tokens.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longspan.core.errors import LongspanError
from longspan.hf.encoders import Encoder, GridEncoder, ImageEncoder
from longspan.hf.preconditions import check_axes
from longspan.hf.pretrained import (
    base_of,
    is_adapter,
    language_model_class,
    read_model_config,
    takes_pictures,
    tokenizer_of,
    without_dropout,
)
from longspan.hf.prompts import BYTES, load_tokenizer, rows_of_ids
from longspan.hf.vision import core_of, encoders_of
from longspan.hf.weights.origin import Origin
from longspan.verify.config import VerifyConfig

_TEXT_TOKENS = 60
"""Pictures grow with the sequence: the smallest ones take a third of so many tokens."""


@dataclass(frozen=True)
class Pictures:
    """The pictures of one row of a batch."""

    inputs: dict[str, Tensor]  # entries of a batch, `[pictures, ...]` or `[patches, ...]`
    counts: Counter[str]  # of images and videos


@dataclass(frozen=True)
class Inputs:
    """The checked inputs of a verification; weights are not loaded yet."""

    model_config: Any  # without dropout and cache
    batch_BS: dict[str, Tensor]  # the global one
    pictures: tuple[Pictures, ...] = ()  # of each row, for a vision-language model

    def rows(self, start: int, stop: int) -> dict[str, Tensor]:
        """Return some rows of the batch, with their pictures."""
        cut = {name: x[start:stop] for name, x in self.batch_BS.items()}
        return cut | joined(self.pictures[start:stop])

    def describe(self) -> dict[str, Any]:
        """Return what the report says of the inputs besides the flags."""
        return {"pictures": dict(sum((row.counts for row in self.pictures), Counter[str]()))}


def open_inputs(config: VerifyConfig) -> Inputs:
    """Open and check the inputs."""
    model_config = load_model_config(config)
    check_axes(model_origin(config, model_config).on_meta, config.parallel, fsdp=config.fsdp)
    batch_BS = make_batch(config, model_config)
    if not takes_pictures(model_config):
        return Inputs(model_config, batch_BS)
    pictures = add_pictures(batch_BS, model_origin(config, model_config).on_meta(), config.seed)
    return Inputs(model_config, batch_BS, pictures)


def load_model_config(config: VerifyConfig) -> Any:
    """Return the model's Hugging Face config without dropout, which differs between ranks, and without cache."""
    name = config.model.model
    opened, _ = read_model_config("--model", name, config.context, config.model.rope, weights=not config.random_weights)
    text = opened.get_text_config()
    text.use_cache = False
    found = without_dropout(opened)
    experts = max(getattr(text, key, None) or 0 for key in ("num_local_experts", "num_experts", "n_routed_experts"))
    if experts > 1 and config.dtype == "bf16" and _has_experts(config, found):
        raise LongspanError(
            f"--model {name} has {experts} experts: in bf16 rounding alone sends some tokens to other experts, "
            "sharded or not, so no error tells a fault from rounding; verify this model with --dtype fp32"
        )
    return found


def _has_experts(config: VerifyConfig, model_config: Any) -> bool:
    """Whether a layer has experts: configs may state a number of them (Nemotron-H) whose layers are all dense."""
    return any("expert" in name for name, _ in model_origin(config, model_config).on_meta().named_parameters())


def build_model(config: VerifyConfig, model_config: Any) -> Any:
    """Return the unsharded Hugging Face model on the CPU, in training mode and in the verified dtype."""
    return model_origin(config, model_config).build().train()


def model_origin(config: VerifyConfig, model_config: Any) -> Origin:
    """Return the source of the model's weights and class.

    It is a masked LM if the config's `architectures` name one (BERT), a vision-language model, else a causal LM.

    Attention is transformers' `sdpa`, or `eager` for a model without `sdpa` or with a softcap (Gemma-2), which older
    versions of `sdpa` silently ignore. Random weights (of a config.json) depend on the seed alone.
    """
    from transformers import AutoModelForMaskedLM
    from transformers.utils import logging

    from longspan.compat.transformers_api import has_no_sdpa

    logging.disable_progress_bar()  # every rank loads the model, some twice
    architectures = getattr(model_config, "architectures", None) or ()
    classifier = next((name for name in architectures if name.endswith("Classification")), None)
    if classifier is not None:
        raise LongspanError(
            f"{config.model} is a {classifier}; longspan verify compares language "
            f"models: give the language model that it was made from, which has the same layers"
        )
    masked = any(name.endswith("ForMaskedLM") for name in architectures)
    softcap = getattr(getattr(model_config, "text_config", model_config), "attn_logit_softcapping", None)
    name = config.model.model
    origin = Origin(
        AutoModelForMaskedLM if masked else language_model_class(model_config),
        model_config,
        torch.float32 if config.dtype == "fp32" else torch.bfloat16,
        None if config.random_weights else base_of("--model", name),
        config.seed,
        adapter=name if is_adapter(name) else None,
        label=name,
        strict=False,
        options={"attn_implementation": "sdpa" if softcap is None else "eager", "trust_remote_code": False},
    )
    try:
        origin.on_meta()
    except LongspanError as error:
        if not has_no_sdpa(error.__cause__):
            raise
        origin = dataclasses.replace(origin, options={**origin.options, "attn_implementation": "eager"})
    return origin


def make_batch(config: VerifyConfig, model_config: Any) -> dict[str, Tensor]:
    """Return the global batch, the same on every rank: `input_ids` and `labels`, int64 [B, S].

    Labels are masked (-100) unevenly: the first 40 % of the first sequence, less in each further one, and 10 % of the
    rest at random. So ranks have different numbers of unmasked tokens, some none, and a mean of means is wrong.
    """
    draw = torch.Generator().manual_seed(config.seed)
    rows, tokens = config.batch * config.parallel.data, config.tokens
    vocabulary = model_config.get_text_config().vocab_size
    if config.text is None:
        input_ids_BS = torch.randint(vocabulary, (rows, tokens), generator=draw)
    else:
        input_ids_BS = _read_text(config, rows, vocabulary)
    labels_BS = input_ids_BS.clone()
    labels_BS[torch.rand(rows, tokens, generator=draw) < 0.1] = -100
    for row in range(rows):
        labels_BS[row, : int(0.4 * tokens * (rows - row) / rows)] = -100
    labels_BS[:, -1] = input_ids_BS[:, -1]  # at least one is unmasked
    return {"input_ids": input_ids_BS, "labels": labels_BS}


def _read_text(config: VerifyConfig, rows: int, vocabulary: int) -> Tensor:
    assert config.text is not None
    name = config.tokenizer or (BYTES if config.random_weights else tokenizer_of("--model", config.model.model))
    ids_BS = rows_of_ids(config.text, config.text_field, load_tokenizer(name), rows, config.tokens)
    if ids_BS.max() >= vocabulary:
        raise LongspanError(
            f"tokenizer {name} gives the id {ids_BS.max()}, the model's vocabulary has {vocabulary} entries; "
            "give the model's own with --tokenizer"
        )
    return torch.from_numpy(ids_BS)


# --- random pictures, with the placeholders that a processor would write


def joined(rows: tuple[Pictures, ...]) -> dict[str, Tensor]:
    """Return the entries of a batch of these rows."""
    names = dict.fromkeys(name for row in rows for name in row.inputs)
    return {name: torch.cat([row.inputs[name] for row in rows if name in row.inputs]) for name in names}


def add_pictures(batch_BS: dict[str, Tensor], model: Any, seed: int) -> tuple[Pictures, ...]:
    """Put two images and a video, as far as the model takes them, into each row of a batch, and return them.

    Ids become placeholders, in place, and the batch gets each token's kind if the model reads it. With three or more
    rows, the last one has text only. `model` has no weights.
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
