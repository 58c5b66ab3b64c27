"""The model and the batch that a `VerifyConfig` names.

Shape suffixes: B rows of the global batch, S tokens.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch

from longspan import checkpoint
from longspan.checkpoint import Checkpoint, Ranks
from longspan.checkpoint.identity import check_same_model, kept_model_config
from longspan.core.errors import LongspanError
from longspan.core.validation import path_of
from longspan.data import BYTES, DocumentSource, SequenceStream, TextTokenizer, load_tokenizer
from longspan.hf.pretrained import (
    base_of,
    check_language_model,
    is_adapter,
    read_model_config,
    tokenizer_of,
    without_dropout,
)
from longspan.hf.tensor_parallel.layers import tensor_plan
from longspan.hf.weights.sources import Origin
from longspan.verify.config import VerifyConfig


@dataclass(frozen=True)
class Inputs:
    """What is to be verified, opened and checked; no weights are loaded yet.

    Attributes:
        model_config: the Hugging Face config, without dropout and cache.
        batch_BS: the global batch.
        checkpoint: where the weights come from (`--resume`), or None.
    """

    model_config: Any
    batch_BS: dict[str, torch.Tensor]
    checkpoint: Checkpoint | None = None


def open_inputs(config: VerifyConfig, found: Checkpoint | None = None) -> Inputs:
    """Open everything but the checkpoint, which `find_checkpoint` has `found`.

    Raises:
        LongspanError: for a missing or unfit model, tokenizer or text, or a model that `--tensor` cannot cut.
    """
    model_config = load_model_config(config, found)
    if config.parallel.tensor > 1:
        model = model_origin(config, model_config).on_meta()
        tensor_plan(model, config.parallel.tensor, 0, config.parallel.tensor_style, config.parallel.sequence_ranks)
    return Inputs(model_config, make_batch(config, model_config), found)


def open_resumed(config: VerifyConfig, ranks: Ranks, *, content: bool = True) -> Inputs:
    """As `open_inputs`, with the checkpoint that `--resume` names. Collective where there is a process group.

    Args:
        config: with `resume`.
        ranks: who takes part.
        content: compare the content of the checkpoint's files with their checksums.

    Raises:
        LongspanError: on every rank, for a checkpoint that is damaged, or of another model than `--config`.
    """
    assert config.resume is not None
    found = checkpoint.newest(path_of("--resume", config.resume), ranks, content=content)
    return ranks.each(lambda: open_inputs(config, found))


def load_model_config(config: VerifyConfig, found: Checkpoint | None = None) -> Any:
    """The model's Hugging Face config, with dropout and the cache switched off.

    Dropout draws other numbers on other ranks by design, so a comparison runs without; a cache only costs memory.

    Raises:
        LongspanError: if there is none, it is not that of the checkpoint `found`, its position range is shorter than
            the context, or it is a mixture of experts in bf16.
    """
    name, opened = _open_config(config, found)
    text = opened.get_text_config()
    experts = max(getattr(text, key, None) or 0 for key in ("num_local_experts", "num_experts", "n_routed_experts"))
    if experts > 1 and config.dtype == "bf16":
        raise LongspanError(
            f"{name} has {experts} experts: in bf16 rounding alone sends some tokens to other experts, sharded or not, "
            "so no error tells a fault from rounding; verify this model with --dtype fp32"
        )
    text.use_cache = False
    return without_dropout(opened)


def _open_config(config: VerifyConfig, found: Checkpoint | None) -> tuple[str, Any]:
    """What the config is of, for messages, and the config."""
    if found is not None and config.config is None:
        name, opened = f"checkpoint {found.path}", kept_model_config(found)
        check_language_model(name, opened, config.context)
        return name, opened
    flag = "--model" if config.model is not None else "--config"
    name = f"{flag} {config.model or config.config}"
    opened, _ = read_model_config(flag, str(config.model or config.config), config.context, config.rope())
    if found is not None:
        check_same_model(found, name, opened)
    return name, opened


def build_model(config: VerifyConfig, model_config: Any) -> Any:
    """The pristine Hugging Face model on the CPU, in training mode, its weights in the dtype asked for.

    Raises:
        LongspanError: if transformers cannot make such a model of it.
    """
    return model_origin(config, model_config).build().train()


def model_origin(config: VerifyConfig, model_config: Any) -> Origin:
    """What the model is made from.

    A masked LM where the config's `architectures` name one (BERT), else a causal LM; of a checkpoint always a causal
    LM, since `longspan train` trains no other. There, weights are random until `checkpoint.load_weights` has read them.

    Its attention is transformers' own `sdpa`, or `eager` for a model that has no `sdpa`, or has a softcap (Gemma-2),
    which the `sdpa` of older versions leaves out without a word. Random weights (`--config`) depend on the seed alone.

    Raises:
        LongspanError: if transformers cannot make such a model of it.
    """
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM
    from transformers.utils import logging

    from longspan.compat.transformers_api import has_no_sdpa

    logging.disable_progress_bar()  # every rank loads the model, and more than once
    architectures = getattr(model_config, "architectures", None) or ()
    classifier = next((name for name in architectures if name.endswith("Classification")), None)
    if classifier is not None:
        raise LongspanError(
            f"{config.model or config.config or config.resume} is a {classifier}; longspan verify compares language "
            f"models: give it the one that this was made from, whose layers are the same"
        )
    masked = config.resume is None and any(name.endswith("ForMaskedLM") for name in architectures)
    softcap = getattr(getattr(model_config, "text_config", model_config), "attn_logit_softcapping", None)
    origin = Origin(
        AutoModelForMaskedLM if masked else AutoModelForCausalLM,
        model_config,
        torch.float32 if config.dtype == "fp32" else torch.bfloat16,
        None if config.model is None else base_of("--model", config.model),
        config.seed,
        adapter=config.model if config.model is not None and is_adapter(config.model) else None,
        said=str(config.model or config.config or config.resume),
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
    """The global batch, the same on every rank: `input_ids` and `labels`, int64 [B, S].

    Labels are masked (-100) unevenly: the first 40 % of a sequence, as a prompt, a little less in each further one,
    and a tenth of the rest at random. So ranks have different numbers of tokens that count, some none, and a mean of
    means is not the mean.

    Raises:
        LongspanError: for text that is missing or too short, or a tokenizer that does not belong to the model.
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
    labels_BS[:, -1] = input_ids_BS[:, -1]  # at least one counts
    return {"input_ids": input_ids_BS, "labels": labels_BS}


def _read_text(config: VerifyConfig, rows: int, vocabulary: int) -> torch.Tensor:
    assert config.data is not None
    name = config.tokenizer or (BYTES if config.model is None else tokenizer_of("--model", config.model))
    source = DocumentSource(config.data, text_field=config.text_field, shuffle=0)
    stream = SequenceStream(source, TextTokenizer(load_tokenizer(name)), config.tokens)
    ids_BS = np.stack([sequence.ids for sequence in islice(stream, rows)])
    if ids_BS.max() >= vocabulary:
        raise LongspanError(
            f"tokenizer {name} gives the id {ids_BS.max()}, the model's vocabulary has {vocabulary} entries; "
            "give the model's own with --tokenizer"
        )
    return torch.from_numpy(ids_BS)
