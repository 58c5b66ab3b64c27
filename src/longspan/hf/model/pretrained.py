"""Find and check pretrained models: names, folders, adapters, configs. Needs no torch until a config is opened."""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from longspan.core.errors import LongspanError
from longspan.core.model import check_layers
from longspan.core.rope import merged
from longspan.core.validation import existing_path, format_value, means_a_path, near, read_text
from longspan.plan.names import weights_of
from longspan.ranks import launch
from longspan.ranks.job import FOLDER

HUB_WAIT_S = 5
"""Seconds to wait for the Hugging Face hub's answer whether it has a name."""


def check_source(flag: str, name: str, *, local: bool = False, kind: Literal["model", "dataset"] = "model") -> None:
    """Raise unless a name is a local path (`local`: only that) or on the Hugging Face hub, where no mistyped path is
    looked up.
    """
    path = existing_path(flag, name)
    if name.endswith(".gguf"):
        raise LongspanError(
            f"{flag} {name}: longspan reads safetensors, not GGUF. Convert it once, then give the folder:\n"
            f"  pip install gguf\n  python examples/from_gguf.py --file {name} --out FOLDER"
        )
    if path is None and (local or means_a_path(name)):
        hub = "" if local else ", and no name on the Hugging Face hub either (NAME or OWNER/NAME)"
        raise LongspanError(
            f"{flag} {name} does not exist{near(name)}{hub}; give the path of an existing file or folder"
        )
    if path is None:
        check_on_hub(flag, name, kind)


def check_names(model: str, data: str | None, tokenizer: str | None) -> None:
    """Run `check_source` for all names of a command. Takes no time: needs neither torch nor transformers."""
    _refuse_planners_name("--model", model)
    check_source("--model", model, local=model.endswith(".json"))
    if tokenizer is not None and tokenizer != "bytes":
        check_source("--tokenizer", tokenizer)
    if data is not None and data != "pydoc" and not means_a_path(data):
        check_source("--data", data, kind="dataset")


def check_on_hub(flag: str, name: str, kind: Literal["model", "dataset"]) -> None:
    """Raise unless a repository is in the local cache or on the Hugging Face hub.

    One short request: the libraries' own are repeated, with long timeouts. Ranks do not repeat what their command has
    asked.
    """
    if FOLDER in os.environ:
        return
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, RepositoryNotFoundError

    repository = name.partition(":")[0] if kind == "dataset" else name
    if Path(constants.HF_HUB_CACHE, f"{kind}s--{repository.replace('/', '--')}").is_dir():
        return
    if constants.HF_HUB_OFFLINE:
        if kind == "dataset":  # datasets has its own cache, and fails at once
            return
        raise not_found(flag, name, kind, "but HF_HUB_OFFLINE is set")
    file = "config.json" if kind == "model" else "README.md"
    try:
        get_hf_file_metadata(hf_hub_url(repository, file, repo_type=kind), timeout=HUB_WAIT_S)
    except (EntryNotFoundError, GatedRepoError):  # it exists
        return
    except RepositoryNotFoundError as error:
        raise not_found(flag, name, kind, None) from error
    except Exception as error:  # its HTTP library varies
        raise not_found(
            flag, name, kind, f"but {constants.ENDPOINT} cannot be reached ({first_line(error)})"
        ) from error


def not_found(flag: str, name: str, kind: Literal["model", "dataset"], offline: str | None) -> LongspanError:
    """Return the error for a name that does not exist; `offline`: why the hub could not be asked, or None."""
    if offline is None:
        hub = f"the Hugging Face hub has no {kind} of that name either (or it is private, and you are not logged in)"
    else:
        hub = f"as a name on the Hugging Face hub it would need the network, {offline}"
    return LongspanError(
        f"{flag} {name}: there is no file or folder {Path(name).absolute()}{near(name)}, and {hub}; give the path of "
        "an existing file or folder"
    )


ADAPTER = "adapter_config.json"
_WEIGHT_FILES = (".safetensors", ".bin", ".gguf")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


def is_adapter(name: str) -> bool:
    """Return whether a folder holds a PEFT adapter and no model of its own."""
    return Path(name, ADAPTER).is_file() and not Path(name, "config.json").exists()


def base_of(flag: str, name: str) -> str:
    """Return the base model of an adapter's folder; of anything else the name itself."""
    if not is_adapter(name):
        return name
    path = Path(name, ADAPTER)
    base = _read_json(flag, path, "save the adapter again").get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise LongspanError(f"{flag} {path} names no base model; set base_model_name_or_path in it")
    check_source(f"{path}: base_model_name_or_path", base)
    return base


def read_adapter(name: str) -> tuple[str, bool]:
    """Return an adapter's settings, and whether PEFT computes a part of it from the base model's weights."""
    settings = _read_json("the adapter", Path(name, ADAPTER), "save the adapter again")
    copies = settings.get("modules_to_save") or settings.get("trainable_token_indices")
    return json.dumps(settings, sort_keys=True), bool(copies) or isinstance(settings.get("init_lora_weights"), str)


def check_has_weights(label: str, name: str) -> None:
    """Raise for a folder without a file of weights; a model on the hub is assumed to have some."""
    folder = Path(name)
    if folder.is_dir() and not any(path.suffix in _WEIGHT_FILES for path in folder.iterdir()):
        raise LongspanError(
            f"{label} {name} has no weights: expected model.safetensors, or its shards and "
            "model.safetensors.index.json, or pytorch_model.bin; save the model there again, or, to train or verify it "
            f"with random weights, give {folder / 'config.json'}"
        )


def has_tokenizer(name: str) -> bool:
    """Return whether a folder has a tokenizer; a model on the hub is assumed to have one."""
    folder = Path(name)
    return not folder.is_dir() or any((folder / file).exists() for file in _TOKENIZER_FILES)


def tokenizer_of(flag: str, name: str) -> str:
    """Return where a model's tokenizer is: an adapter without one uses its base model's."""
    return name if has_tokenizer(name) else base_of(flag, name)


def load_processor(name: str) -> Any:
    """Return the Hugging Face processor of a name or folder, which `--tokenizer` or `--model` gave; raise if it has
    none.
    """
    from transformers import AutoProcessor

    try:
        processor = AutoProcessor.from_pretrained(name)
        if getattr(processor, "image_processor", None) is None:
            raise ValueError(f"it has a {type(processor).__name__} alone")
    except Exception as error:  # of any kind
        raise LongspanError(
            f"{name} has no processor of images: {first_line(error)}; give the folder of one with --tokenizer, such as "
            "that of the model that yours was made from",
            code="LS505",
        ) from error
    return processor


def read_model_config(
    flag: str, name: str, context: int, changes: Mapping[str, Any] | None = None, *, weights: bool = True
) -> Any:
    """Return the Hugging Face config of a model, folder or file, with `changes` of its values.

    `context` is in tokens per sequence; `flag` names the option in messages. Without `weights` a config.json is enough.
    """
    _refuse_planners_name(flag, name)
    check_source(flag, name, local=name.endswith(".json"))
    name = base_of(flag, name)
    _check_json(flag, name)
    if weights:
        check_has_weights(flag, name)
    config = open_config(f"{flag} {name}", name, changes or {})
    check_language_model(f"{flag} {name}", config, context)
    return config


def open_config(label: str, name: str, changes: Mapping[str, Any] | None = None) -> Any:
    """Return a model's Hugging Face config, by name, folder or file; `label` names it in an error.

    `changes` are values of it; those of `rope_parameters` are merged with its own (`longspan.core.rope.merged`).
    """
    from transformers import AutoConfig

    changes = dict(changes or {})
    try:
        if isinstance(given := changes.get("rope_parameters"), Mapping):
            own = getattr(AutoConfig.from_pretrained(name), "rope_parameters", None)
            changes["rope_parameters"] = merged(own or {}, given)
        config, unused = AutoConfig.from_pretrained(name, return_unused_kwargs=True, **changes)
    except Exception as error:  # of any kind
        raise LongspanError(f"{label}: no model config can be read there: {first_line(error)}") from error
    if unused:
        raise LongspanError(f"{label}: its config has no {next(iter(unused))}; leave it out")
    return config


_VISION, _AUDIO = "a vision-language model", "an audio-language model"


def kind_of(config: Any) -> str | None:
    """Return the kind of model, if it is not a language model over one sequence of tokens; else None."""
    if getattr(config, "is_encoder_decoder", False):
        return "an encoder-decoder"
    kinds = {"vision_config": _VISION, "audio_config": _AUDIO}
    return next((kind for part, kind in kinds.items() if getattr(config, part, None) is not None), None)


def takes_pictures(config: Any) -> bool:
    """Return whether a config is that of a model of text and pictures or sounds."""
    from transformers import MODEL_FOR_MULTIMODAL_LM_MAPPING

    return kind_of(config) in (_VISION, _AUDIO) and type(config) in MODEL_FOR_MULTIMODAL_LM_MAPPING


def language_model_class(config: Any) -> Any:
    """Return the class of transformers that makes a language model, or a multimodal one, of a config."""
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM

    return AutoModelForMultimodalLM if takes_pictures(config) else AutoModelForCausalLM


def _has_text_model(config: Any) -> bool:
    """Return whether transformers has a causal or masked LM for a config."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING

    return type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or type(config) in MODEL_FOR_MASKED_LM_MAPPING


def without_dropout(config: Any) -> Any:
    """Set every dropout probability of a Hugging Face config to 0, in place, and return it."""
    parts = [config, config.get_text_config(), *(getattr(config, name, None) for name in config.sub_configs)]
    for part in {id(part): part for part in parts if part is not None}.values():
        for key, value in list(vars(part).items()):
            if isinstance(value, float) and "drop" in key:
                setattr(part, key, 0.0)
    return config


def check_language_model(where: str, config: Any, context: int) -> None:
    """Raise unless a config is a language model's with positions for `context` tokens; `where` names it in messages."""
    from longspan.compat.reading import positions_of

    kind = kind_of(config)
    seen = takes_pictures(config)
    if not seen and (
        getattr(config, "is_encoder_decoder", False) or (kind is not None and not _has_text_model(config))
    ):
        raise LongspanError(
            f"{where} is {kind} ({config.model_type}); longspan takes causal language models (decoder-only), "
            f"vision-language models, and to verify masked ones: give one of those"
        )
    text = config.get_text_config()
    vocabulary = getattr(text, "vocab_size", None)
    if not isinstance(vocabulary, int) or vocabulary < 1:
        raise LongspanError(
            f"{where} is not the config of a language model: its vocab_size is {format_value(vocabulary)}"
        )
    if not seen and not _has_text_model(config):
        raise LongspanError(f"{where} is of the type {config.model_type}, of which transformers has no language model")
    positions_of(config).check(context, where)


def position_range(config: Any) -> int | None:
    """Return how many positions a model has; None if unknown, or if its RoPE grows with the length ("dynamic")."""
    from longspan.compat.reading import positions_of

    return positions_of(config).reach


def _refuse_planners_name(flag: str, name: str) -> None:
    """Raise for the short names of `longspan plan`, which have sizes but no weights."""
    short = name.lower()
    weights = weights_of(short)
    if weights is not None and existing_path(flag, name) is None:
        raise LongspanError(
            f"{flag} {name} is a short name of `longspan plan` for a model's sizes, without weights; give {flag} "
            f"{weights}, or a local folder"
        )


def _check_json(flag: str, name: str) -> None:
    """Raise for a file without a JSON object: transformers' own message is not always clear."""
    path = existing_path(flag, name)
    path = path / "config.json" if path is not None and path.is_dir() else path
    if path is not None and path.exists():
        check_layers(f"{flag} {name}", _read_json(flag, path, "give a model's config.json"))


def _read_json(flag: str, path: Path, fix: str) -> dict[str, Any]:
    try:
        value = json.loads(read_text(flag, path))
    except LongspanError:
        raise
    except (ValueError, RecursionError) as error:
        raise LongspanError(f"{flag} {path} is not JSON: {first_line(error)}; {fix}") from error
    if not isinstance(value, dict):
        raise LongspanError(f"{flag} {path} holds {format_value(value)}, not an object; {fix}")
    return value


def check_weights(name: str, info: dict[str, Any]) -> None:
    """Raise on missing weights, which transformers would initialise randomly; warn of unused ones.

    `info` is that of `from_pretrained(..., output_loading_info=True)`.
    """
    missing, unused = sorted(map(str, info["missing_keys"])), sorted(map(str, info["unexpected_keys"]))
    if missing:
        raise LongspanError(
            f"{name} lacks {len(missing)} weights that a model of its config has, they would be random: "
            f"{_some(missing)}; give a folder that holds all of them"
        )
    if unused and launch.is_first_rank():
        warnings.warn(
            f"{name} holds {len(unused)} weights that its config has no place for; they are not used: {_some(unused)}",
            stacklevel=3,
        )


def _some(names: list[str], count: int = 4) -> str:
    return ", ".join(names[:count]) + (", ..." if len(names) > count else "")


@contextlib.contextmanager
def without_progress_bars() -> Iterator[None]:
    """Hide transformers' progress bars."""
    from transformers.utils import logging

    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()


def first_line(error: BaseException) -> str:
    """Return the first line of a library's error."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
