"""The keys of `longspan train`: those of TRL's scripts, and ours, from a YAML file and the command line."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os
import re
import typing
import warnings
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, Literal, NoReturn

import torch
from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, TrlParser

from longspan.compat.friends_api import actions_of
from longspan.core.errors import LongspanError
from longspan.core.memory import MemoryChoice
from longspan.core.parallel import KernelName, ParallelConfig
from longspan.core.reading import (
    convert,
    field_texts,
    flags_of,
    is_one_flag,
    read_yaml,
    split_config,
    suggestion,
    values,
    with_values,
)  # fmt: skip
from longspan.core.validation import LONGEST_WAIT_S, check_name, check_number, format_value, nearest, suggest_choice
from longspan.hf.model.pretrained import first_line
from longspan.ranks.job import Timeouts
from longspan.train import METHODS, Method
from longspan.trainers.mixin import REFUSED

MUON = "muon"
KERNELS = {"sdpa": "auto", "eager": "eager", "flex_attention": "flex", "flash_attention_2": "flash"}
"""Our kernel for each value of TRL's `attn_implementation`."""


@dataclass(frozen=True, kw_only=True)
class Ours:
    """Keys that TRL does not have."""

    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    kernel: KernelName = "auto"
    """Local attention kernel."""
    context: int | Literal["max"] | None = None
    """Tokens per sequence (also 8k or 1M), in place of max_length. max: the longest that fits, by the planner, and
    within the model's positions."""
    memory: MemoryChoice = field(default_factory=lambda: MemoryChoice("auto"))
    """Memory options. auto: the fastest that fit, by the planner. fastest, longest: all together. Or options of
    `longspan.Memory`, after a word that chooses the others or without: auto,offload=host or {checkpointing: full}."""
    rank_memory: float | None = None
    """GB that a rank may use, for `memory: auto` and `context: max`. By default its GPU's memory, or its share of the
    machine's."""
    elastic: bool = False
    """Give each sample of a step (per_device_train_batch_size x gradient_accumulation_steps) as many ranks as its
    length needs. A rank has at most context / (ring x ulysses) tokens at a time. Needs data: 1 and packing: false."""
    shard_weights: bool = True
    """Shard weights, gradients and optimizer over all ranks (FSDP2)."""
    grad_dtype: Literal["fp32", "bf16"] = "fp32"
    """dtype in which FSDP sums gradients over ranks."""
    dropout: float | None = None
    """0 switches off every dropout of the model."""
    freeze: list[str] = field(default_factory=list)
    """Weights that are not trained: patterns of their names, such as "*embed_tokens*"."""
    tokenizer: str | None = None
    """Name or folder of a tokenizer, or "bytes" (one token per byte, 384 ids). By default the model's; "bytes" for a
    model without weights and tokenizer."""
    eval_datasets: list[str] = field(default_factory=list)
    """Datasets or files to evaluate one by one, each with its own loss (eval_NAME_loss), in place of the split
    dataset_test_split."""
    early_stopping_patience: int | None = None
    """Stop after this many evaluations without a better metric_for_best_model. Needs load_best_model_at_end."""
    profile: int | None = None
    """Record this step of every rank with torch's profiler: output_dir/profile/step-N.trace.json."""
    preview: int = 0
    """Print this many sequences as the model will see them, tokens with a loss in ⟦ ⟧, and exit."""
    dry_run: bool = False
    """Check model, data and memory, print what would run, and exit. Starts no rank and writes nothing."""
    max_restarts: int = 0
    """How often to restart the ranks from the newest checkpoint after one died or was lost."""
    grace: int = 25
    """Seconds that ranks have to save and end after SIGTERM or Ctrl-C. Give more than a step and a save take."""
    timeouts: Timeouts = field(default_factory=Timeouts)

    def check(self) -> None:
        """Raise on values out of range."""
        if self.tokenizer is not None:
            check_name("tokenizer", self.tokenizer)
        if self.context not in (None, "max"):
            check_number("context", self.context, max(2, self.parallel.sequence_ranks), whole=True)
        if self.rank_memory is not None:
            check_number("rank_memory", self.rank_memory, 0, above=True)
        for name in ("max_restarts", "preview"):
            check_number(name, getattr(self, name), 0, whole=True)
        check_number("grace", self.grace, 1, LONGEST_WAIT_S, whole=True)
        for name in ("early_stopping_patience", "profile"):
            if (value := getattr(self, name)) is not None:
                check_number(name, value, 1, whole=True)
        if self.dropout not in (None, 0):
            raise LongspanError(f"dropout: {self.dropout:g} is not allowed: only 0 is, which switches dropout off")


def keys_of(config_class: type[Any]) -> type[Any]:
    """Return a dataclass of all keys of `config_class`, of types that TRL's parser takes: it has no unions."""
    defaults, keys = values(config_class()), []
    texts = {
        name: text for kind in (config_class, ParallelConfig, Timeouts) for name, text in field_texts(kind).items()
    }
    for name, (_, kind) in flags_of(config_class).items():
        parts = typing.get_args(kind)
        simple = not is_one_flag(kind) and (
            len(parts) < 2 or typing.get_origin(kind) is Literal or parts[1:] == (NoneType,)
        )
        default = defaults[name] if simple or defaults[name] is None else str(defaults[name])
        made: dict[str, Any] = {"default_factory": list} if isinstance(default, list) else {"default": default}
        keys.append(
            (name, kind if simple else str | None, field(**made, metadata={"help": texts[name].replace("%", "%%")}))
        )
    return dataclasses.make_dataclass("Ours", keys, kw_only=True)


KEYS = keys_of(Ours)


def class_of(method: str, kind: Literal["Config", "Trainer"]) -> Any:
    """Return TRL's class of a method."""
    of = METHODS[method]
    return getattr(importlib.import_module(of.module), f"{of.name}{kind}")


@dataclass(frozen=True)
class Settings:
    """The value of every key, as text and numbers, before TRL's classes are made of them."""

    method: str  # a key of METHODS
    values: dict[str, Any]
    given: frozenset[str]  # keys that the file or the command line sets

    @functools.cached_property
    def ours(self) -> Ours:
        """Our keys. Raise on values out of range."""
        given = {}
        for key, (_, kind) in flags_of(Ours).items():
            value = self.values[key]
            try:  # TRL's parser has converted the items of lists
                given[key] = value if isinstance(value, list) else convert(kind, value)
            except ValueError as error:
                raise LongspanError(f"{key}: {error}") from error
        ours = with_values(Ours(), given)
        ours.check()
        return ours

    def arguments(self, on_rank: bool = True) -> Arguments:
        """Make TRL's classes; on a rank they look at its device and process group.

        Raises:
            LongspanError: for what they refuse.
        """
        values = dict(self.values)
        if muon := values["optim"] == MUON:
            values["optim"] = "adamw_torch"  # of the weights that are no matrices
        checkpoints = values["gradient_checkpointing"] or values.get("activation_checkpointing")
        values |= {"gradient_checkpointing": False, "activation_checkpointing": None}  # `memory` decides it
        if not on_rank or not torch.cuda.is_available():
            values["use_cpu"] = True
        for key, why in REFUSED.items():
            if values.get(key):
                raise LongspanError(f"{key}: {format_value(values[key])} does not work with longspan train: {why}")
        classes = (ScriptArguments, class_of(self.method, "Config"), ModelConfig, DatasetMixtureConfig)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "`gradient_checkpointing` is deprecated")
                script, training, model, mixture = (_made(cls, values) for cls in classes)
        except (ValueError, TypeError, ImportError, NotImplementedError) as error:
            raise LongspanError(first_line(error)) from error
        packing = values.get("packing")
        cut = getattr(training, "max_length", None) is not None
        if self.ours.elastic and (self.ours.parallel.data > 1 or not cut or packing):
            raise LongspanError(
                "elastic: it packs samples itself, and needs `data: 1`, `packing: false` and a `context`"
            )
        if packing and METHODS[self.method].columns:
            raise LongspanError(f"packing: {self.method} trains on whole rows; leave it out, or use sft")
        if self.ours.early_stopping_patience is not None and not training.load_best_model_at_end:
            raise LongspanError("early_stopping_patience: it needs `load_best_model_at_end: true`")
        check_number("learning_rate", training.learning_rate, 0)
        if model.attn_implementation not in (None, *KERNELS):
            raise LongspanError(
                f"attn_implementation: {model.attn_implementation} is no kernel of longspan; use {', '.join(KERNELS)}, "
                "or `kernel`"
            )
        if self.ours.kernel not in ("auto", KERNELS.get(model.attn_implementation, self.ours.kernel)):
            raise LongspanError(
                f"kernel: {self.ours.kernel} and attn_implementation: {model.attn_implementation} are different "
                "kernels; leave one of them out"
            )
        for key in ("model_init_kwargs", "teacher_model_init_kwargs"):
            if not isinstance(given := getattr(training, key, None), dict | None):
                raise LongspanError(
                    f"{key}: {format_value(given)} must be values of the model's config by key, such as "
                    "{rope_parameters: {...}, max_position_embeddings: 131072}"
                )
        return Arguments(self.method, self.ours, script, training, model, mixture, self.given, bool(checkpoints), muon)


@dataclass(frozen=True)
class Arguments:
    """What a command was asked to do."""

    method: str
    ours: Ours
    script: ScriptArguments
    training: Any  # TRL's config class of the method
    model: ModelConfig
    mixture: DatasetMixtureConfig
    given: frozenset[str]
    checkpoints: bool  # TRL's gradient_checkpointing, which our memory options do
    muon: bool  # the optimizer is Muon, which transformers does not have

    @property
    def trainer(self) -> Method:
        return METHODS[self.method]

    @property
    def generated(self) -> int:
        """Tokens that the model may add to a sequence of `context` tokens in training."""
        return int(self.training.max_new_tokens) if getattr(self.training, "lmbda", 0) else 0


class _Parser(TrlParser):  # type: ignore[misc]
    def error(self, message: str) -> NoReturn:
        message = re.sub(r"argument --(\w+)(?:/--[\w-]+)*: ", r"\1: ", message)
        wrong, _, choices = message.partition(" (choose from ")
        if choices:
            known = re.findall(r"[\w.-]+", choices)
            hint = suggest_choice if len(known) < 20 else nearest
            message = f"{wrong}; {hint(wrong.rsplit(' ', 1)[-1].strip(chr(39)), known)}"
        raise LongspanError(message)


def parser_of(method: str) -> Any:
    """Return the parser of `longspan train METHOD`; `--help` shows our keys first."""
    name = f"longspan train {method}"
    parser = _Parser(
        (KEYS, ScriptArguments, class_of(method, "Config"), ModelConfig, DatasetMixtureConfig),
        prog=name,
        usage=f"{name} --config run.yaml [--key value ...]",
        description=f"The keys of TRL's {METHODS[method].name}Config and scripts, and before them those of longspan. "
        "The command line wins over the file.",
        allow_abbrev=False,
    )
    optim = next(action for action in actions_of(parser) if action.dest == "optim")
    optim.choices, optim.type = [*(str(getattr(x, "value", x)) for x in optim.choices or ()), MUON], str
    return parser


def read(argv: list[str]) -> Settings:
    """Return the settings of `longspan train METHOD [--config run.yaml] [--key value ...]`.

    Raises:
        LongspanError: for an unknown key and a value of a wrong type.
        SystemExit: after --help.
    """
    method, *rest = argv
    if method not in METHODS:
        raise LongspanError(
            f"longspan train has no method {format_value(method)}; {nearest(method, METHODS)} (example: longspan train "
            "sft --config run.yaml)"
        )
    parser = parser_of(method)
    # The first of several: `--no_KEY`, which has the same name, comes after `--KEY`.
    actions = {action.dest: action for action in reversed(actions_of(parser))}
    known = sorted(actions.keys() - {"help"})
    rest, path = split_config(rest)
    config = {} if path is None else read_yaml(path)
    env = config.pop("env", {})
    if not isinstance(env, dict):
        raise LongspanError(f"env: {format_value(env)} must be a mapping of names to values")
    os.environ.update({str(name): str(value) for name, value in env.items()})
    for key, value in config.items():
        if key not in known:
            raise LongspanError(
                f"--config {path}: there is no key {format_value(key)}; {suggestion(key, known, parser.prog)}"
            )
        actions[key].default, actions[key].required = _value(actions[key], value), False
    parsed, unknown = parser.parse_known_args(rest)
    if unknown:
        raise LongspanError(f"there is no key {unknown[0]}; {suggestion(unknown[0], known, parser.prog, '--')}")
    on_command_line = {re.sub(r"^--(no[-_])?|=.*$", "", arg).replace("-", "_") for arg in rest if arg[:2] == "--"}
    return Settings(method, vars(parsed), frozenset({*config, *on_command_line}))


def _made(cls: type[Any], values: dict[str, Any]) -> Any:
    return cls(**{f.name: values[f.name] for f in dataclasses.fields(cls) if f.init and f.name in values})


def _value(action: Any, value: Any) -> Any:
    """Return a value of the file as a default: argparse converts text, and so checks it."""
    several = action.nargs == "+"
    if several and not isinstance(value, list):
        value = [value]
    if several and all(isinstance(item, str | int | float) for item in value):
        return [action.type(str(item)) for item in value]
    if isinstance(value, dict | list) and action.type in (int, float):
        raise LongspanError(f"{action.dest}: {format_value(value)} is not a number")
    return str(value) if isinstance(value, bool | int | float) else value
