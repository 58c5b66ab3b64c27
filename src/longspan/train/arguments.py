"""The keys of `longspan train`: those of TRL's scripts, and ours, from a YAML file and the command line."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import itertools
import os
import re
import textwrap
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

import torch
import yaml
from trl import DatasetMixtureConfig, DPOConfig, ModelConfig, RewardConfig, ScriptArguments, SFTConfig, TrlParser

from longspan.compat.friends_api import actions_of
from longspan.core.cache import CacheDtype
from longspan.core.errors import LongspanError
from longspan.core.layout import LayoutName
from longspan.core.memory import FASTEST, Memory, memory_of
from longspan.core.parallel import KernelName, ParallelConfig, RingImpl, TensorStyle
from longspan.core.rope import RopeFlags
from longspan.core.validation import LONGEST_WAIT_S, check_number, format_value, read_text
from longspan.hf.pretrained import first_line

Class = TypeVar("Class", bound=type[Any])

METHODS = {"sft": SFTConfig, "dpo": DPOConfig, "reward": RewardConfig}
MUON = "muon"
KERNELS = {"sdpa": "sdpa", "eager": "eager", "flex_attention": "flex", "flash_attention_2": "flash_attn",
           "flash_attention_3": "flash3"}  # fmt: skip
"""Our kernel for each value of TRL's `attn_implementation`."""


def described(cls: Class) -> Class:
    """Let `--help` show the docstring of each field of a dataclass, and its own fields before inherited ones."""
    for base in cls.__mro__:
        if not dataclasses.is_dataclass(base):
            continue
        body: Any = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        for statement, after in itertools.pairwise(body.body):
            if isinstance(statement, ast.AnnAssign) and isinstance(after, ast.Expr):
                text = " ".join(ast.literal_eval(after.value).split()).replace("%", "%%")
                name: Any = statement.target
                cls.__dataclass_fields__[name.id].metadata = {"help": text}
    own = inspect.get_annotations(cls)
    fields: dict[str, Any] = cls.__dataclass_fields__
    cls.__dataclass_fields__ = {name: fields[name] for name in [*own, *fields] if name in fields}
    return cls


def count(key: str, text: str, *words: str) -> Any:
    """Return a count, which may have a suffix k (1024) or M (1024 * 1024), or one of some words."""
    match = re.fullmatch(r"([0-9]{1,15})([kKmM]?)", text)
    if match is not None:
        return int(match[1]) * {"": 1, "k": 1 << 10, "m": 1 << 20}[match[2].lower()]
    if text not in words:
        raise LongspanError(
            f"{key}: {format_value(text)} is no number (such as 4 or 128k), and not {' or '.join(words)}"
        )
    return text


@described
@dataclass(frozen=True, kw_only=True)
class Ours(RopeFlags):
    """Keys that TRL does not have."""

    data: int = 1
    """Size of the data axis: replicas that read different sequences."""
    ring: int = 1
    """Size of the ring axis: blocks of a sequence, whose keys and values are sent round a ring (Ring Attention)."""
    ulysses: int = 1
    """Size of the ulysses axis: ranks that share a block and swap tokens for heads (Ulysses). ring x ulysses ranks
    share a sequence."""
    tensor: int = 1
    """Size of the tensor axis: ranks that share each layer's weights and hold the same tokens."""
    tensor_style: TensorStyle = "tp"
    """tp: all-reduce hidden states. megatron-sp: all-gather and reduce-scatter them instead."""
    experts: str = "1"
    """Number of ranks that share the experts of a mixture of experts. auto: the largest possible."""
    layout: LayoutName = "auto"
    """How tokens are placed on a ring. auto: zigzag."""
    ring_impl: RingImpl = "auto"
    """How keys and values reach the other ring ranks. auto: p2p, unless they are small."""
    overlap_chunks: str = "auto"
    """Chunks of heads in the Ulysses all-to-all, each overlapped with the attention of another."""
    wire_dtype: CacheDtype = "exact"
    """Wire dtype of the Ulysses all-to-all. int8, fp8: LOSSY."""
    kernel: KernelName = "auto"
    """Local attention kernel."""
    ranks: int | None = None
    """Ranks that this command starts. By default data x ring x ulysses x tensor; under torchrun or srun it starts
    none."""
    context: str | None = None
    """Tokens per sequence (also 8k or 1M), in place of max_length. max: the longest that fits, by the planner, and
    within the model's positions."""
    memory: str = "auto"
    """Memory options. auto: the fastest that fit, by the planner. fastest, longest: all together. A mapping of options
    of `longspan.Memory`, such as {checkpointing: full, offload: host}, and optionally `level`, which chooses the
    others."""
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
    """Print this many sequences as the model will see them, tokens with a loss in green, and exit."""
    dry_run: bool = False
    """Check model, data and memory, print what would run, and exit. Starts no rank and writes nothing."""
    max_restarts: int = 0
    """How often to restart the ranks from the newest checkpoint after one died or was lost."""
    grace: int = 25
    """Seconds that ranks have to save and end after SIGTERM or Ctrl-C. Give more than a step and a save take."""
    timeout: int | None = None
    """Seconds after which a rank that stopped, hangs or is cut off ends the job and is named. By default 60, with GPUs
    300."""
    start_timeout: int = 600
    """Seconds within which all ranks must have started."""

    @functools.cached_property
    def parallel(self) -> ParallelConfig:
        values: dict[str, Any] = {f.name: getattr(self, f.name) for f in dataclasses.fields(ParallelConfig)}
        for key in ("experts", "overlap_chunks"):
            values[key] = count(key, values[key], "auto")
        return ParallelConfig(**values)

    @property
    def tokens(self) -> int | str | None:
        """Tokens per sequence, "max", or None if max_length gives them."""
        return None if self.context is None else count("context", self.context, "max")

    def memory_options(self) -> tuple[str, dict[str, Any]]:
        """Return the level that chooses the memory options, and those that are given one by one."""
        try:
            value: Any = yaml.safe_load(self.memory) if isinstance(self.memory, str) else self.memory
        except yaml.YAMLError as error:
            raise LongspanError(f"memory: {format_value(self.memory)} is no name or mapping of options") from error
        given: dict[str, Any] = dict(value) if isinstance(value, dict) else {"level": value}
        level = str(given.pop("level", "fastest"))
        if level != "auto":
            memory_of(level)
        known = [f.name for f in dataclasses.fields(Memory)]
        for name in given:
            if name not in known:
                raise LongspanError(f"memory: there is no option {name!r}; {suggestion(name, known)}")
        dataclasses.replace(FASTEST, **given)  # checks the values
        return level, given

    def check(self) -> None:
        """Raise on values out of range, or that exclude each other."""
        parallel = self.parallel
        self.memory_options()
        self.rope()
        if self.ranks is not None and self.ranks != parallel.ranks:
            raise LongspanError(
                f"ranks: {self.ranks} does not match the mesh: {parallel} needs {parallel.ranks}; leave ranks "
                f"out, or choose axes whose product is {self.ranks} [LS102]"
            )
        if self.tokens not in (None, "max"):
            check_number("context", self.tokens, max(2, parallel.sequence_ranks), whole=True)
        if self.rank_memory is not None:
            check_number("rank_memory", self.rank_memory, 0, above=True)
        for name in ("max_restarts", "preview"):
            check_number(name, getattr(self, name), 0, whole=True)
        for name in ("grace", "timeout", "start_timeout"):
            if (value := getattr(self, name)) is not None:
                check_number(name, value, 1, LONGEST_WAIT_S, whole=True)
        for name in ("early_stopping_patience", "profile"):
            if (value := getattr(self, name)) is not None:
                check_number(name, value, 1, whole=True)
        if self.dropout not in (None, 0):
            raise LongspanError(f"dropout: {self.dropout:g} is not allowed: only 0 is, which switches dropout off")


@dataclass(frozen=True)
class Settings:
    """The value of every key, as text and numbers, before TRL's classes are made of them."""

    method: str  # a key of METHODS
    values: dict[str, Any]
    given: frozenset[str]  # keys that the file or the command line sets

    @functools.cached_property
    def ours(self) -> Ours:
        """Our keys. Raise on values out of range."""
        ours: Ours = _made(Ours, self.values)
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
        classes = (ScriptArguments, METHODS[self.method], ModelConfig, DatasetMixtureConfig)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "`gradient_checkpointing` is deprecated")
                script, training, model, mixture = (_made(cls, values) for cls in classes)
        except (ValueError, TypeError, ImportError, NotImplementedError) as error:
            raise LongspanError(first_line(error)) from error
        if self.ours.elastic and (self.ours.data > 1 or training.max_length is None or values.get("packing")):
            raise LongspanError(
                "elastic: it packs samples itself, and needs `data: 1`, `packing: false` and a `context`"
            )
        if self.ours.early_stopping_patience is not None and not training.load_best_model_at_end:
            raise LongspanError("early_stopping_patience: it needs `load_best_model_at_end: true`")
        if model.attn_implementation not in (None, *KERNELS):
            raise LongspanError(
                f"attn_implementation: {model.attn_implementation} is no kernel of longspan; use {', '.join(KERNELS)}, "
                "or `kernel`"
            )
        if training.model_init_kwargs:
            raise LongspanError(
                f"model_init_kwargs: {format_value(training.model_init_kwargs)} would not reach the model; use dtype, "
                "attn_implementation, model_revision, or a changed config.json"
            )
        return Arguments(self.method, self.ours, script, training, model, mixture, self.given, bool(checkpoints), muon)


@dataclass(frozen=True)
class Arguments:
    """What a command was asked to do."""

    method: str
    ours: Ours
    script: ScriptArguments
    training: Any  # SFTConfig, DPOConfig or RewardConfig
    model: ModelConfig
    mixture: DatasetMixtureConfig
    given: frozenset[str]
    checkpoints: bool  # TRL's gradient_checkpointing, which our memory options do
    muon: bool  # the optimizer is Muon, which transformers does not have


class _Parser(TrlParser):  # type: ignore[misc]
    def error(self, message: str) -> NoReturn:
        raise LongspanError(re.sub(r"argument --(\w+)(?:/--[\w-]+)*: ", r"\1: ", message))


def parser_of(method: str) -> Any:
    """Return the parser of `longspan train METHOD`; `--help` shows our keys first."""
    name = f"longspan train {method}"
    parser = _Parser(
        (Ours, ScriptArguments, METHODS[method], ModelConfig, DatasetMixtureConfig),
        prog=name,
        usage=f"{name} --config run.yaml [--key value ...]",
        description=f"The keys of `trl {method}`, and before them those of longspan. The command line wins over the "
        "file.",
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
        refused = ("orpo", "cpo")
        why = "its loss reads whole logits, which no rank has; use dpo" if method in refused else "choose one first"
        raise LongspanError(
            f"longspan train has the methods {', '.join(METHODS)}, got {format_value(method)}: {why}. Example: "
            "longspan train sft --config run.yaml"
        )
    parser = parser_of(method)
    # The first of several: `--no_KEY`, which has the same name, comes after `--KEY`.
    actions = {action.dest: action for action in reversed(actions_of(parser))}
    known = sorted(actions.keys() - {"help"})
    rest, config = _split_config(rest)
    for name, value in config.pop("env", {}).items():
        os.environ[name] = str(value)
    for key, value in config.items():
        if key not in known:
            raise LongspanError(f"there is no key {key!r}; {suggestion(key, known, method)}")
        actions[key].default, actions[key].required = _value(actions[key], value), False
    parsed, unknown = parser.parse_known_args(rest)
    if unknown:
        raise LongspanError(f"there is no key {unknown[0]}; {suggestion(unknown[0], known, method, '--')}")
    on_command_line = {re.sub(r"^--(no[-_])?|=.*$", "", arg).replace("-", "_") for arg in rest if arg[:2] == "--"}
    return Settings(method, vars(parsed), frozenset({*config, *on_command_line}))


def _made(cls: type[Any], values: dict[str, Any]) -> Any:
    return cls(**{f.name: values[f.name] for f in dataclasses.fields(cls) if f.init and f.name in values})


def _split_config(args: list[str]) -> tuple[list[str], dict[str, Any]]:
    """Return the other arguments, and the content of the file of `--config`."""
    args = [part for arg in args for part in (arg.split("=", 1) if arg.startswith("--config=") else [arg])]
    if "--config" not in args:
        return args, {}
    at = args.index("--config")
    if at + 1 == len(args):
        raise LongspanError("--config needs a file: --config run.yaml")
    path = Path(args[at + 1])
    try:
        config = yaml.safe_load(read_text("--config", path))
    except yaml.YAMLError as error:
        raise LongspanError(f"--config {path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(config, dict) or not isinstance(config.get("env", {}), dict):
        raise LongspanError(f"--config {path} must be a mapping of keys to values, got {format_value(config)}")
    return args[:at] + args[at + 2 :], {str(key): value for key, value in config.items()}


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


def suggestion(name: str, known: list[str], method: str = "sft", prefix: str = "") -> str:
    """Return a hint for a key that does not exist: the closest one."""
    close = difflib.get_close_matches(name.lstrip("-").replace("-", "_"), known, n=1, cutoff=0.6)
    return f"did you mean {prefix}{close[0]}?" if close else f"longspan train {method} --help lists all"
