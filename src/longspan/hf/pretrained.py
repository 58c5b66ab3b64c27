"""A Hugging Face config as the jobs and the model integration read it. Needs no torch until a config is opened."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any, Literal

from longspan.core.errors import LongspanError
from longspan.core.rope import (
    AS_IS,
    RopeAsked,
    RopeScaling,
    RopeState,
    full_table,
    rope_state,
    scaled_table,
    scaling_for,
)
from longspan.core.validation import existing_path, format_value, means_a_path, near, read_text
from longspan.plan.models.catalogue import CONFIGS, ELSEWHERE, HUB
from longspan.ranks import launch

HUB_WAIT_S = 5
"""Seconds in which the Hugging Face hub has to answer whether it has a name."""


def check_source(flag: str, name: str, *, local: bool = False, kind: Literal["model", "dataset"] = "model") -> None:
    """Refuse what names neither a file or folder here nor anything on the Hugging Face hub, without a long wait.

    The hub is asked only for what can be a name there: a path with a slip in it is said at once.

    Args:
        flag: the option that named it, for messages.
        name: what is to be read.
        local: whether it must be here.
        kind: what it would be on the hub.

    Raises:
        LongspanError: with what lies near, and the way out.
    """
    path = existing_path(flag, name)
    if path is None and (local or means_a_path(name)):
        hub = "" if local else ", and no name on the Hugging Face hub either (NAME or OWNER/NAME)"
        raise LongspanError(
            f"{flag} {name} does not exist{near(name)}{hub}; give the path of a file or folder that is there"
        )
    if path is None:
        check_on_hub(flag, name, kind)


def check_names(model: str | None, config: Path | None, data: str | None, tokenizer: str | None) -> None:
    """`check_source` for all that a command was given. Needs neither torch nor transformers, so it takes no time.

    Raises:
        LongspanError: as `check_source`.
    """
    if model is not None:
        _refuse_planners_name("--model", model)
        check_source("--model", model)
    if config is not None:
        check_source("--config", str(config), local=True)
    if tokenizer is not None and tokenizer != "bytes":
        check_source("--tokenizer", tokenizer)
    if data is not None and data != "pydoc" and not means_a_path(data):
        check_source("--data", data, kind="dataset")


def check_on_hub(flag: str, name: str, kind: Literal["model", "dataset"]) -> None:
    """Refuse a name that is nothing here, in no cache, and not on the Hugging Face hub, or that cannot be asked for.

    One small question, before the libraries ask theirs, which they repeat and wait for. What has asked it already (the
    command that starts the ranks) is not asked again.

    Raises:
        LongspanError: saying what was looked for, and what lies near.
    """
    if launch.under_torchrun() and not launch.started_elsewhere():
        return
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, RepositoryNotFoundError

    repository = name.partition(":")[0] if kind == "dataset" else name
    if Path(constants.HF_HUB_CACHE, f"{kind}s--{repository.replace('/', '--')}").is_dir():
        return
    if constants.HF_HUB_OFFLINE:
        if kind == "dataset":  # it may be in a cache of its own, and says at once if not
            return
        raise not_found(flag, name, kind, "but HF_HUB_OFFLINE is set")
    file = "config.json" if kind == "model" else "README.md"
    try:
        get_hf_file_metadata(hf_hub_url(repository, file, repo_type=kind), timeout=HUB_WAIT_S)
    except (EntryNotFoundError, GatedRepoError):  # it is there
        return
    except RepositoryNotFoundError as error:
        raise not_found(flag, name, kind, None) from error
    except Exception as error:  # of whichever library for HTTP it uses
        raise not_found(
            flag, name, kind, f"but {constants.ENDPOINT} cannot be reached ({first_line(error)})"
        ) from error


def not_found(flag: str, name: str, kind: Literal["model", "dataset"], offline: str | None) -> LongspanError:
    """The error for a name that is nothing here; `offline` says why the hub could not be asked, if it could not."""
    if offline is None:
        hub = f"the Hugging Face hub has no {kind} of that name either (or it is private, and you are not logged in)"
    else:
        hub = f"as a name on the Hugging Face hub it would need the network, {offline}"
    return LongspanError(
        f"{flag} {name}: there is no file or folder {Path(name).absolute()}{near(name)}, and {hub}; give the path of a "
        "file or folder that is there"
    )


ADAPTER = "adapter_config.json"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


def is_adapter(name: str) -> bool:
    """Return whether a folder holds a PEFT adapter and no model of its own."""
    return Path(name, ADAPTER).is_file() and not Path(name, "config.json").exists()


def base_of(flag: str, name: str) -> str:
    """Return the base model of an adapter's folder; of anything else the name itself.

    Raises:
        LongspanError: for an adapter that names no base model, or one that cannot be found.
    """
    if not is_adapter(name):
        return name
    path = Path(name, ADAPTER)
    try:
        base = json.loads(read_text(flag, path)).get("base_model_name_or_path")
    except (ValueError, AttributeError) as error:
        if isinstance(error, LongspanError):
            raise
        raise LongspanError(f"{flag} {path} is damaged: {first_line(error)}; save the adapter again") from error
    if not isinstance(base, str) or not base:
        raise LongspanError(f"{flag} {path} names no base model; set base_model_name_or_path in it")
    try:
        check_source("its base model", base)
    except LongspanError as error:
        raise LongspanError(
            f"{flag} {name} is an adapter: {error} (or set base_model_name_or_path in {ADAPTER})"
        ) from error
    return base


def read_adapter(name: str) -> tuple[str, bool]:
    """Return an adapter's settings, and whether PEFT computes a part of it from the base model's weights.

    Raises:
        LongspanError: if they cannot be read.
    """
    text = read_text("the adapter", Path(name, ADAPTER))
    found = json.loads(text)
    copies = found.get("modules_to_save") or found.get("trainable_token_indices")
    return text, bool(copies) or isinstance(found.get("init_lora_weights"), str)


def refuse_adapter(flag: str, name: str) -> None:
    """Refuse an adapter's folder where a whole model is needed.

    Raises:
        LongspanError: saying how to make one.
    """
    if is_adapter(name):
        raise LongspanError(
            f"{flag} {name} is a PEFT adapter, and `longspan train` trains all weights of a model; merge it first "
            "(peft.PeftModel.from_pretrained(base, adapter).merge_and_unload().save_pretrained(folder)), or train the "
            "adapter in your own script: apply PEFT first, then call longspan.parallelize"
        )


def has_tokenizer(name: str) -> bool:
    """Return whether a folder has a tokenizer; a model on the hub is assumed to have one."""
    folder = Path(name)
    return not folder.is_dir() or any((folder / file).exists() for file in _TOKENIZER_FILES)


def tokenizer_of(flag: str, name: str) -> str:
    """Return where a model's tokenizer is: an adapter without one uses its base model's."""
    return name if has_tokenizer(name) else base_of(flag, name)


def read_model_config(flag: str, name: str, context: int, rope: RopeAsked = AS_IS) -> tuple[Any, RopeScaling | None]:
    """The Hugging Face config of a model, by name, folder or file, with the RoPE scaling that is asked for.

    Args:
        flag: the option that named it, for messages.
        name: what `AutoConfig.from_pretrained` takes.
        context: tokens of the sequences it is for.
        rope: the RoPE scaling.

    Returns:
        The config, and the scaling that it was given, if any.

    Raises:
        LongspanError: if there is none, it is no language model's, or its position range is shorter than the context
            and cannot be made longer.
    """
    _refuse_planners_name(flag, name)
    check_source(flag, name, local=flag == "--config")
    name = base_of(flag, name)
    _check_json(flag, name)
    from transformers import AutoConfig

    try:
        found = AutoConfig.from_pretrained(name)
    except Exception as error:
        raise LongspanError(f"{flag} {name}: no model config can be read there: {first_line(error)}") from error
    return found, check_language_model(f"{flag} {name}", found, context, rope)


def kind_of(config: Any) -> str | None:
    """What a Hugging Face config is of, where it is of no language model over one sequence of tokens."""
    if getattr(config, "is_encoder_decoder", False):
        return "an encoder-decoder"
    sorts = {"vision_config": "a vision-language model", "audio_config": "an audio-language model"}
    return next((said for part, said in sorts.items() if getattr(config, part, None) is not None), None)


def _has_text_model(config: Any) -> bool:
    """Whether transformers makes a causal or masked LM of a config."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING

    return type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or type(config) in MODEL_FOR_MASKED_LM_MAPPING


def without_dropout(config: Any) -> Any:
    """Set every probability of dropout of a Hugging Face config to 0, in place; returned."""
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        for key, value in list(vars(part).items()):
            if isinstance(value, float) and "drop" in key:
                setattr(part, key, 0.0)
    return config


def check_language_model(where: str, found: Any, context: int, rope: RopeAsked = AS_IS) -> RopeScaling | None:
    """Refuse the config of what is no language model, or of one for shorter sequences; give it a RoPE scaling.

    Args:
        where: what the config is of, for messages.
        found: the Hugging Face config; changed in place where a scaling is taken.
        context: tokens of the sequences it is for.
        rope: the RoPE scaling.

    Returns:
        The scaling that was taken.

    Raises:
        LongspanError: with the numbers and the way out.
    """
    kind = kind_of(found)
    if getattr(found, "is_encoder_decoder", False) or (kind is not None and not _has_text_model(found)):
        raise LongspanError(
            f"{where} is {kind} ({found.model_type}); longspan takes causal language models (decoder-only), and to "
            "verify masked ones: give one of those"
        )
    vocabulary = getattr(found.get_text_config(), "vocab_size", None)
    if not isinstance(vocabulary, int) or vocabulary < 1:
        raise LongspanError(
            f"{where} is not the config of a language model: its vocab_size is {format_value(vocabulary)}"
        )
    if not _has_text_model(found):
        raise LongspanError(f"{where} is of the type {found.model_type}, of which transformers has no language model")
    scaling = scaling_for(positions_of(found), rope, context, where)
    if scaling is not None:
        _scale(found.get_text_config(), scaling)
        _check_kept(where, found.get_text_config(), scaling)
    return scaling


def positions_of(config: Any) -> RopeState:
    """What a Hugging Face config says of its positions."""
    text = config.get_text_config()
    limit: object = getattr(text, "max_position_embeddings", None)
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        raise LongspanError(
            f"max_position_embeddings {format_value(limit)} of the model's config must be an integer above 0"
        )
    rotary = isinstance(getattr(text, "rope_parameters", None), dict)
    return rope_state(text.to_dict(), limit, rotary, _rotary_dims(text) if rotary else None)


def _rotary_dims(text: Any) -> int | None:
    """Return how many dimensions of a head are turned; None where the config does not say, or its layers differ."""
    from longspan.compat.transformers_api import LAYERS_DIFFER

    try:
        dims = getattr(text, "head_dim", None)
        if dims is None and getattr(text, "num_attention_heads", None):
            dims = text.hidden_size // text.num_attention_heads
        _, table = full_table(text.rope_parameters)
    except LAYERS_DIFFER:
        return None
    except LongspanError:  # no table for full attention
        return None
    part = table.get("partial_rotary_factor") or 1.0
    return int(dims * part) if isinstance(dims, int) and isinstance(part, int | float) else None


def _scale(text: Any, scaling: RopeScaling) -> None:
    """Change a text config in place: what is made from it, or saved with it, has the scaling."""
    key, table = full_table(text.rope_parameters)
    scaled = scaled_table(table, scaling)
    text.rope_parameters = scaled if key is None else {**text.rope_parameters, key: scaled}
    text.max_position_embeddings = scaling.positions
    if hasattr(text, "original_max_position_embeddings"):  # Phi-3: transformers takes this one before the table's
        text.original_max_position_embeddings = scaling.original


def _check_kept(where: str, text: Any, scaling: RopeScaling) -> None:
    """Refuse a scaling that is gone, or another one, once the model has been saved and loaded."""
    try:
        again = type(text).from_dict(text.to_dict())
        why = (
            ""
            if again.rope_parameters == text.rope_parameters
            else f"it makes {format_value(again.rope_parameters)} of it"
        )
    except Exception as error:  # whatever a config class raises
        why = first_line(error)
    if why:
        raise LongspanError(
            f"--rope-scaling {scaling.kind}: transformers does not take it for {where} ({type(text).__name__}): {why}; "
            f"take another scaling, or change its config.json by hand"
        )


def position_range(config: Any) -> int | None:
    """How many positions a model knows; None where it does not say, or its RoPE grows with the length ("dynamic")."""
    return positions_of(config).reach


def _refuse_planners_name(flag: str, name: str) -> None:
    """`longspan plan` knows sizes by short names, which name no weights."""
    short = name.lower()
    if short in CONFIGS and existing_path(flag, name) is None:
        take = f"--model {HUB[short]}" if short in HUB else ELSEWHERE[short]
        raise LongspanError(
            f"{flag} {name} is a name that `longspan plan` has for a model's sizes, and names no weights; give {take}, "
            "or a folder that is here"
        )


def _check_json(flag: str, name: str) -> None:
    """Refuse a file that holds no JSON object: what transformers says of it is not always clear."""
    path = existing_path(flag, name)
    if path is None:
        return
    if path.is_dir():
        if not (path / "config.json").exists():
            raise LongspanError(
                f"{flag} {name} has no config.json; give the folder of a model or of a PEFT adapter, or a config.json "
                "itself"
            )
        path = path / "config.json"
    try:
        found = json.loads(read_text(flag, path))
    except (ValueError, RecursionError) as error:
        if isinstance(error, LongspanError):
            raise
        raise LongspanError(f"{flag} {path} is not JSON: {first_line(error)}; give a model's config.json") from error
    if not isinstance(found, dict):
        raise LongspanError(f"{flag} {path} holds {format_value(found)}, not an object; give a model's config.json")


def check_weights(name: str, info: dict[str, Any]) -> None:
    """Refuse a model that lacks weights, and name those it has no place for: transformers makes up the one, at random,
    and leaves the other aside.

    Args:
        name: what was loaded, for messages.
        info: what `from_pretrained(..., output_loading_info=True)` says.

    Raises:
        LongspanError: naming the first that are missing.
    """
    missing, strange = sorted(map(str, info["missing_keys"])), sorted(map(str, info["unexpected_keys"]))
    if missing:
        raise LongspanError(
            f"{name} lacks {len(missing)} weights that a model of its config has, they would be random: "
            f"{_some(missing)}; give a folder that holds all of them"
        )
    if strange and launch.is_first_rank():
        warnings.warn(
            f"{name} holds {len(strange)} weights that its config has no place for; they are left aside: "
            f"{_some(strange)}",
            stacklevel=3,
        )


def _some(names: list[str], count: int = 4) -> str:
    return ", ".join(names[:count]) + (", ..." if len(names) > count else "")


def first_line(error: BaseException) -> str:
    """An error of a library in one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
