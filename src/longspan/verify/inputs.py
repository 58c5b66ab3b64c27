"""The model and the batch of a `VerifyConfig`.

Shape suffixes: B rows of the global batch, S tokens.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch

from longspan import checkpoint
from longspan.checkpoint import Checkpoint, Ranks
from longspan.checkpoint.identity import check_same_model, saved_model_config
from longspan.core.errors import LongspanError
from longspan.core.validation import path_of
from longspan.data import BYTES, DocumentSource, SequenceStream, TextTokenizer, load_tokenizer
from longspan.hf.preconditions import check_axes
from longspan.hf.pretrained import (
    base_of,
    check_language_model,
    is_adapter,
    language_model_class,
    read_model_config,
    takes_pictures,
    tokenizer_of,
    without_dropout,
)
from longspan.hf.weights.origin import Origin
from longspan.verify.config import VerifyConfig
from longspan.verify.pictures import Pictures, add_pictures, joined


@dataclass(frozen=True)
class Inputs:
    """The checked inputs of a verification; weights are not loaded yet.

    Attributes:
        model_config: the Hugging Face config, without dropout and cache.
        batch_BS: the global batch.
        pictures: those of each row, to add to a batch of these rows; empty for other than vision-language models.
        checkpoint: source of the weights with `--resume`, else None.
    """

    model_config: Any
    batch_BS: dict[str, torch.Tensor]
    pictures: tuple[Pictures, ...] = ()
    checkpoint: Checkpoint | None = None

    def rows(self, start: int, stop: int) -> dict[str, torch.Tensor]:
        """Return some rows of the batch, with their pictures."""
        cut = {name: x[start:stop] for name, x in self.batch_BS.items()}
        return cut | joined(self.pictures[start:stop])

    def describe(self) -> dict[str, Any]:
        """Return what the report says of the inputs besides the flags."""
        about: dict[str, Any] = {"pictures": dict(sum((row.counts for row in self.pictures), Counter[str]()))}
        if (checkpoint := self.checkpoint) is not None:
            size = sum(record.size for record in checkpoint.files.values())
            about |= {"model": str(checkpoint.path), "weights": "given"}
            about |= {"checkpoint": {"step": checkpoint.step, "files": len(checkpoint.files), "bytes": size}}
        return about


def open_inputs(config: VerifyConfig, resumed: Checkpoint | None = None) -> Inputs:
    """Open and check the inputs; `resumed` is the checkpoint of `--resume`."""
    model_config = load_model_config(config, resumed)
    check_axes(model_origin(config, model_config).on_meta, config.parallel, fsdp=config.fsdp)
    batch_BS = make_batch(config, model_config)
    if not takes_pictures(model_config):
        return Inputs(model_config, batch_BS, (), resumed)
    pictures = add_pictures(batch_BS, model_origin(config, model_config).on_meta(), config.seed)
    return Inputs(model_config, batch_BS, pictures, resumed)


def open_resumed(config: VerifyConfig, ranks: Ranks, *, content: bool = True) -> Inputs:
    """Open the checkpoint of `--resume`, then the inputs. Collective over `ranks`.

    `content` compares the checkpoint's files with their checksums.
    """
    assert config.resume is not None
    resumed = checkpoint.newest_verified(path_of("--resume", config.resume), ranks, content=content)
    return ranks.each(lambda: open_inputs(config, resumed))


def load_model_config(config: VerifyConfig, resumed: Checkpoint | None = None) -> Any:
    """Return the model's Hugging Face config without dropout, which differs between ranks, and without cache."""
    name, opened = _open_config(config, resumed)
    text = opened.get_text_config()
    text.use_cache = False
    found = without_dropout(opened)
    experts = max(getattr(text, key, None) or 0 for key in ("num_local_experts", "num_experts", "n_routed_experts"))
    if experts > 1 and config.dtype == "bf16" and _has_experts(config, found):
        raise LongspanError(
            f"{name} has {experts} experts: in bf16 rounding alone sends some tokens to other experts, sharded or not, "
            "so no error tells a fault from rounding; verify this model with --dtype fp32"
        )
    return found


def _has_experts(config: VerifyConfig, model_config: Any) -> bool:
    """Whether a layer has experts: configs may state a number of them (Nemotron-H) whose layers are all dense."""
    return any("expert" in name for name, _ in model_origin(config, model_config).on_meta().named_parameters())


def _open_config(config: VerifyConfig, resumed: Checkpoint | None) -> tuple[str, Any]:
    """Return the model's name for messages, and its config."""
    if resumed is not None and config.config is None:
        name, opened = f"checkpoint {resumed.path}", saved_model_config(resumed)
        check_language_model(name, opened, config.context)
        return name, opened
    flag = "--model" if config.model is not None else "--config"
    name = f"{flag} {config.model or config.config}"
    opened, _ = read_model_config(flag, str(config.model or config.config), config.context, config.rope())
    if resumed is not None:
        check_same_model(resumed, name, opened)
    return name, opened


def build_model(config: VerifyConfig, model_config: Any) -> Any:
    """Return the unsharded Hugging Face model on the CPU, in training mode and in the verified dtype."""
    return model_origin(config, model_config).build().train()


def model_origin(config: VerifyConfig, model_config: Any) -> Origin:
    """Return the source of the model's weights and class.

    It is a masked LM if the config's `architectures` name one (BERT), a vision-language model, else a causal LM. The
    weights of a checkpoint of `longspan train` are random until `checkpoint.load_weights`.

    Attention is transformers' `sdpa`, or `eager` for a model without `sdpa` or with a softcap (Gemma-2), which older
    versions of `sdpa` silently ignore. Random weights (`--config`) depend on the seed alone.
    """
    from transformers import AutoModelForMaskedLM
    from transformers.utils import logging

    from longspan.compat.transformers_api import has_no_sdpa

    logging.disable_progress_bar()  # every rank loads the model, some twice
    architectures = getattr(model_config, "architectures", None) or ()
    classifier = next((name for name in architectures if name.endswith("Classification")), None)
    if classifier is not None:
        raise LongspanError(
            f"{config.model or config.config or config.resume} is a {classifier}; longspan verify compares language "
            f"models: give the language model that it was made from, which has the same layers"
        )
    masked = config.resume is None and any(name.endswith("ForMaskedLM") for name in architectures)
    softcap = getattr(getattr(model_config, "text_config", model_config), "attn_logit_softcapping", None)
    origin = Origin(
        AutoModelForMaskedLM if masked else language_model_class(model_config),
        model_config,
        torch.float32 if config.dtype == "fp32" else torch.bfloat16,
        None if config.model is None else base_of("--model", config.model),
        config.seed,
        adapter=config.model if config.model is not None and is_adapter(config.model) else None,
        label=str(config.model or config.config or config.resume),
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


def make_batch(config: VerifyConfig, model_config: Any) -> dict[str, torch.Tensor]:
    """Return the global batch, the same on every rank: `input_ids` and `labels`, int64 [B, S].

    Labels are masked (-100) unevenly: the first 40 % of the first sequence, less in each further one, and 10 % of the
    rest at random. So ranks have different numbers of unmasked tokens, some none, and a mean of means is wrong.
    """
    draw = torch.Generator().manual_seed(config.seed)
    rows, tokens = config.batch * config.parallel.data_degree, config.tokens
    vocabulary = model_config.get_text_config().vocab_size
    if config.data is None:
        input_ids_BS = torch.randint(vocabulary, (rows, tokens), generator=draw)
    else:
        input_ids_BS = _read_text(config, rows, vocabulary)
    labels_BS = input_ids_BS.clone()
    labels_BS[torch.rand(rows, tokens, generator=draw) < 0.1] = -100
    for row in range(rows):
        labels_BS[row, : int(0.4 * tokens * (rows - row) / rows)] = -100
    labels_BS[:, -1] = input_ids_BS[:, -1]  # at least one is unmasked
    return {"input_ids": input_ids_BS, "labels": labels_BS}


def _read_text(config: VerifyConfig, rows: int, vocabulary: int) -> torch.Tensor:
    assert config.data is not None
    name = config.tokenizer or (BYTES if config.model is None else tokenizer_of("--model", config.model))
    source = DocumentSource(config.data, text_field=config.text_field, format="text", shuffle=0)
    stream = SequenceStream(source, TextTokenizer(load_tokenizer(name)), config.tokens)
    ids_BS = np.stack([sequence.ids for sequence in islice(stream, rows)])
    if ids_BS.max() >= vocabulary:
        raise LongspanError(
            f"tokenizer {name} gives the id {ids_BS.max()}, the model's vocabulary has {vocabulary} entries; "
            "give the model's own with --tokenizer"
        )
    return torch.from_numpy(ids_BS)
