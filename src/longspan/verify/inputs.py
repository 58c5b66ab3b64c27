"""The model and the batch of a `VerifyConfig`.

Shape suffixes: B rows of the global batch, S tokens.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longspan.core.errors import LongspanError
from longspan.hf.model.encoders import Encoder, GridEncoder, ImageEncoder
from longspan.hf.model.pretrained import (
    base_of,
    is_adapter,
    language_model_class,
    read_model_config,
    takes_pictures,
    tokenizer_of,
    without_dropout,
)
from longspan.hf.model.prompts import BYTES, load_tokenizer, naming, open_dataset, text_ids
from longspan.hf.model.support import check_model
from longspan.hf.model.vision import core_of, encoders_of
from longspan.hf.preconditions import check_axes
from longspan.hf.weights.origin import Origin
from longspan.ranks.facts import model_facts
from longspan.verify.config import VerifyConfig

_TEXT_TOKENS = 60
"""Pictures grow with the sequence: the smallest ones take a third of so many tokens."""


@dataclass(frozen=True)
class Inputs:
    """The checked inputs of a verification; weights are not loaded yet."""

    config: VerifyConfig
    model_config: Any  # without dropout and cache
    rows: tuple[dict[str, Tensor], ...]  # of the global batch: ids and labels [1, S], pictures `[pictures, ...]`
    pictures: dict[str, int]  # how many images and videos all rows have

    @property
    def facts(self) -> dict[str, Any]:
        """What must be equal on every rank."""
        return model_facts(self.model_config)

    def batch(self, start: int, stop: int, device: torch.device) -> dict[str, Tensor]:
        """Return some rows as one batch, on a device."""
        rows = self.rows[start:stop]
        names = dict.fromkeys(name for row in rows for name in row)
        return {name: torch.cat([row[name] for row in rows if name in row]).to(device) for name in names}


def open_inputs(config: VerifyConfig) -> Inputs:
    """Open and check the inputs."""
    model_config = load_model_config(config)
    origin = model_origin(config, model_config)
    check_axes(origin.on_meta, config.parallel, fsdp=config.fsdp)
    batch_BS = make_batch(config, model_config)
    rows = [{name: x[row : row + 1] for name, x in batch_BS.items()} for row in range(len(batch_BS["labels"]))]
    counts = Counter[str]()
    if takes_pictures(model_config):
        counts = add_pictures(rows, origin.on_meta(), config.seed)
    return Inputs(config, model_config, tuple(rows), dict(counts))


def load_model_config(config: VerifyConfig) -> Any:
    """Return the model's Hugging Face config without dropout, which differs between ranks, and without cache."""
    name = config.model
    opened = read_model_config("--model", name, config.context, weights=not config.random_weights)
    text = opened.get_text_config()
    text.use_cache = False
    found = without_dropout(opened)
    experts = max(getattr(text, key, None) or 0 for key in ("num_local_experts", "num_experts", "n_routed_experts"))
    routed = experts > 1 and config.run_dtype == "bf16"
    # Configs may state a number of experts (Nemotron-H) whose layers are all dense.
    weights = model_origin(config, found).on_meta().named_parameters() if routed else ()
    if any("expert" in name for name, _ in weights):
        raise LongspanError(
            f"--model {name} has {experts} experts: in bf16 rounding alone sends some tokens to other experts, "
            "sharded or not, so no error tells a fault from rounding; verify this model with --dtype fp32"
        )
    return found


def model_origin(config: VerifyConfig, model_config: Any) -> Origin:
    """Return the source of the model's weights and class.

    It is a masked LM if the config's `architectures` name one (BERT), a vision-language model, else a causal LM.

    transformers chooses the attention, but `eager` with a softcap (Gemma-2), which its `sdpa` silently ignores. Random
    weights (of a config.json) depend on the seed alone.
    """
    from transformers import AutoModelForMaskedLM
    from transformers.utils import logging

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
    name = config.model
    return Origin(
        AutoModelForMaskedLM if masked else language_model_class(model_config),
        model_config,
        torch.float32 if config.run_dtype == "fp32" else torch.bfloat16,
        None if config.random_weights else base_of("--model", name),
        config.seed,
        adapter=name if is_adapter(name) else None,
        label=name,
        strict=False,
        options={"trust_remote_code": False, **({} if softcap is None else {"attn_implementation": "eager"})},
    )


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
    """Return the ids of the texts of --text, joined, and repeated from the start if they are too short."""
    source, column, parts, length = str(config.text), config.text_field, list[Any](), 0
    name = config.tokenizer or (BYTES if config.random_weights else tokenizer_of("--model", config.model))
    tokenizer = load_tokenizer(name)
    with naming(source):
        dataset = open_dataset(source, streaming=True)
        columns = list(next(iter(dataset), {}))
        if column not in columns:
            found = ", ".join(columns) or "no rows"
            raise LongspanError(
                f"{source} has no column {column!r}; it has {found}: choose one with --text-field", code="LS501"
            )
        for row in itertools.chain.from_iterable(itertools.repeat(dataset)):
            parts.append(text_ids(tokenizer, str(row[column] or ""), last=True))
            length += len(parts[-1])
            if length >= rows * config.tokens:
                break
    ids_BS = np.concatenate(parts)[: rows * config.tokens].reshape(rows, config.tokens)
    if ids_BS.max() >= vocabulary:
        raise LongspanError(
            f"tokenizer {name} gives the id {ids_BS.max()}, the model's vocabulary has {vocabulary} entries; "
            "give the model's own with --tokenizer"
        )
    return torch.from_numpy(ids_BS)


# --- random pictures, with the placeholders that a processor would write


def add_pictures(rows: list[dict[str, Tensor]], model: Any, seed: int) -> Counter[str]:
    """Put two images and a video, as far as the model takes them, into each row, and return how many there are.

    Ids become placeholders, in place, and a row gets each token's kind if the model reads it. With three or more rows,
    the last one has text only. `model` has no weights.
    """
    draw, counts = torch.Generator().manual_seed(seed + 1), Counter[str]()
    accepted = inspect.signature(model.forward).parameters
    for number, row in enumerate(rows):
        ids_S, labels_S = row["input_ids"][0], row["labels"][0]
        _remove_special(ids_S, model.config)
        kinds_S = torch.zeros_like(ids_S)
        chosen = _choose(model, len(ids_S), draw) if number < 2 or number < len(rows) - 1 else []
        room = len(ids_S) - sum(picture.tokens for picture in chosen)
        at, inputs = room // (len(chosen) + 1), dict[str, list[Tensor]]()
        for picture in chosen:
            counts[picture.encoder.modality] += 1
            for run in picture.runs:
                ids_S[at : at + run] = getattr(model.config, picture.encoder.token)
                labels_S[at : at + run] = -100
                kinds_S[at : at + run] = 1 + (picture.encoder.modality == "video")
                at += run + 1
            at += room // (len(chosen) + 1)
            for name, x in picture.inputs.items():
                inputs.setdefault(name, []).append(x)
        row |= {name: kinds_S[None] for name in ("mm_token_type_ids", "token_type_ids") if name in accepted}
        row |= {name: torch.cat(xs) for name, xs in inputs.items()}
    return counts


def _remove_special(ids_S: Tensor, config: Any) -> None:
    """Replace placeholders and other special tokens among random ids, in place."""
    parts = (config, config.get_text_config())
    values = [x for part in parts for name, x in vars(part).items() if name.endswith(("_token_id", "_index"))]
    known = sorted({x for value in values for x in (value if isinstance(value, list) else [value]) if type(x) is int})
    other = next(value for value in range(len(known) + 1) if value not in known)
    ids_S[torch.isin(ids_S, torch.tensor(known))] = other


@dataclass(frozen=True)
class _Picture:
    encoder: Encoder
    inputs: dict[str, Tensor]  # entries of a batch, `[1, ...]` or `[patches, ...]`
    runs: tuple[int, ...]  # placeholders, between which there is a token of text

    @property
    def tokens(self) -> int:
        return sum(self.runs) + len(self.runs)


def _choose(model: Any, tokens: int, draw: torch.Generator) -> list[_Picture]:
    """Return an image, a video and another image, or as many of these as fit into three quarters of a row."""
    core, scale = core_of(model), max(1, math.isqrt(tokens // _TEXT_TOKENS))
    check_model(model, torch.device("cpu"), 1, "auto")
    first, second = list[_Picture](), list[_Picture]()
    # One token may stand for the placeholders of both modalities (GLM): one of them is enough.
    for encoder in {encoder.token: encoder for encoder in encoders_of(model)}.values():
        made = list[_Picture]()
        for inputs in _examples(encoder, core, scale, draw):
            rows = encoder.units(core, inputs).rows
            apart = isinstance(encoder, GridEncoder) and encoder.modality == "video" and encoder.frames_apart
            made.append(_Picture(encoder, inputs, rows if apart else (sum(rows),)))
        first.append(made[0])
        second += made[1:]
    chosen, left = list[_Picture](), 3 * tokens // 4
    for picture in first + second:
        if picture.tokens <= left:
            chosen.append(picture)
            left -= picture.tokens
    if not chosen:
        least = min(picture.tokens for picture in first)
        raise LongspanError(
            f"a picture of this model takes {least} tokens, more than three quarters of the {tokens} in a sequence; "
            f"give --context {2 * least} or more"
        )
    return chosen


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
