"""Seeded bad input: command lines, files of flags, data, hardware files, model configs.

Everything runs in this process without any rank; a command that would start ranks counts as accepted. A few hundred
tries take seconds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
import json
import os
import random
import shlex
import signal
import tempfile
import traceback
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from longspan import cli
from longspan.core.errors import LongspanError
from longspan.core.reading import flags_of, is_one_flag
from longspan.train.arguments import Ours
from tests.chaos.counts import Budget, Counts

LIMIT_S = 120.0  # of one attempt; the first ones import, and other programs may use the cores
MODEL = Path(__file__).parents[2] / "examples" / "llama-tiny.json"


@dataclass(frozen=True)
class Attempt:
    """One try: `run` takes an empty folder, and raises or returns an exit code; a `bad` one must be refused."""

    kind: str
    what: str
    bad: bool
    run: Callable[[Path], int]


@dataclass(frozen=True)
class Result:
    """The outcome of an attempt, a name of `tests.chaos.counts.COLUMNS`, and its message."""

    attempt: Attempt
    outcome: str
    message: str


class Started(BaseException):
    """A command started its ranks."""


class _TooLong(BaseException):
    """An attempt exceeded its limit."""


# --- one attempt


def judge(attempt: Attempt, *, limit_s: float = LIMIT_S) -> Result:
    """Run an attempt in a temporary folder.

    The outcome is "harmless" for input that is accepted, and need not be refused; "silent" for bad input that is
    accepted; "wrong" for a refusal that leaves files behind.
    """
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        folder = Path(name)
        try:
            with _limit(limit_s):
                code = attempt.run(folder)
            outcome, message = ("refused", "") if code == 2 else ("harmless", f"exit code {code}")
        except Started:
            outcome, message = "harmless", "started"
        except LongspanError as error:
            outcome, message = "refused", str(error)
        except _TooLong:
            outcome, message = "hung", f"no answer within {limit_s} s"
        except Exception:
            outcome, message = "traceback", traceback.format_exc()
        if outcome == "refused" and (folder / "out").exists():
            outcome, message = "wrong", " ".join(sorted(str(p.relative_to(folder)) for p in folder.rglob("out*")))
        if outcome == "harmless" and attempt.bad:
            outcome = "silent"
        return Result(attempt, outcome, message)


@contextlib.contextmanager
def _limit(seconds: float) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise _TooLong

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def command(*argv: str) -> int:
    """Run `longspan ARGV` in this process without ranks; return its exit code. A refusal must print a reason."""
    output = io.StringIO()
    with (
        mock.patch("longspan.ranks.launch.launch", side_effect=Started),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(output),
    ):
        code = cli.main(list(argv))
    if code == 2 and (not output.getvalue().strip() or "Traceback" in output.getvalue()):
        raise AssertionError(f"refused without a clear message: {output.getvalue()!r}")
    return code


# --- wrong values of flags, by type

BAD_INTEGERS = ("-1", "nan", "inf", "", "1.5", "0x10", "9" * 25, "1" * 5000, "k", "12q", "_", "--seed", "1\0")
EXTREME_INTEGERS = ("0", "1", str(1 << 14), str(1 << 16), str((1 << 16) + 1), str(1 << 34), str(1 << 40), "1M")
BAD_FLOATS = ("nan", "inf", "-inf", "-1", "", "abc", "1e999", "0x1p3", "1,5")
BAD_PATHS = ("x" * 5000, "a/" + "y" * 300, "nul\0byte", "~nobody-of-this-name/x", "")
BAD_VALUES = ("nope=1", "auto,", "auto,nope", "auto,level=1,nope=2", "=", ",", "a\0b,c")
BAD_CHOICES = ("nope", "", "AUTO ", "0")

_BASE = {
    "train": (
        "sft",
        "--model_name_or_path",
        str(MODEL),
        "--dataset_name",
        "pydoc",
        "--context",
        "64",
        "--output_dir",
        "{}/out",
    ),
    "verify": ("--model", str(MODEL), "--context", "64"),
    "plan": ("--model", "llama-3.1-8b", "--context", "8k"),
    "bench": ("--ulysses", "2", "--out", "{}/out/link.toml"),
}
# Any text may be the name of a model on a hub.
_FREE = {"name"}


def _fields(name: str) -> dict[str, Any]:
    if name == "train":
        own = {name: kind for name, (_, kind) in flags_of(Ours).items() if typing.get_origin(kind) is not list}
        return {**own, "max_steps": int, "learning_rate": float, "save_steps": float}
    module, config_name, _ = cli.COMMANDS[name]
    config = getattr(__import__(module, fromlist=[config_name]), config_name)
    return {name: kind for name, (_, kind) in flags_of(config).items()}


def _inner(kind: Any) -> Any:
    parts = [part for part in typing.get_args(kind) if part is not type(None)]
    optional = isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union
    if optional and int in parts and len(parts) == 2:  # a number, or a word for one
        return int
    return parts[0] if optional and len(parts) == 1 else kind


def _bad_words(command: str, name: str, kind: Any, draw: random.Random) -> list[str] | None:
    """Return words after a flag that a command must refuse; None if there are none."""
    kind, given = _inner(kind), kind
    if is_one_flag(kind):
        return [draw.choice(BAD_VALUES)]
    if kind is int:
        return [draw.choice(BAD_INTEGERS)]
    if kind is float:
        return [draw.choice(BAD_FLOATS)]
    if kind is bool:
        takes_words = given is not bool or command == "train"  # True and False
        return [draw.choice(("maybe", "2", *([] if takes_words else ["True"])))]
    if kind is Path or (kind is str and name in ("text", "model", "tokenizer", "gpu", "resume")):
        return [draw.choice(BAD_PATHS)]
    if kind is str:
        return None if name in _FREE else ["nul\0byte" if name != "kernel" else "nope"]
    if typing.get_origin(kind) is typing.Literal:
        return [draw.choice(BAD_CHOICES)]
    if typing.get_origin(kind) is list:
        return None  # any names
    if typing.get_origin(kind) is tuple:
        pool = BAD_FLOATS if typing.get_args(kind)[0] is float else BAD_INTEGERS
        return draw.choice(([draw.choice(pool), "0.9"], ["0.9", draw.choice(pool)], ["0.5"], []))
    raise NotImplementedError(f"{name}: {kind}")


def _flags(draw: random.Random) -> Attempt:
    """Return a command line with a wrong or unknown flag."""
    name = draw.choice(list(_BASE))
    fields = _fields(name)
    argv = [name, *_BASE[name]]
    trick = draw.random()
    if trick < 0.06:
        argv.append(draw.choice(("--nope", "extra", "--config", "--=3", "--\0", "--seed", "-x")))
        bad = True
    else:
        field = draw.choice(list(fields))
        words = _bad_words(name, field, fields[field], draw)
        bad = words is not None
        if _inner(fields[field]) is int and draw.random() < 0.4:  # perhaps valid
            words, bad = [draw.choice(EXTREME_INTEGERS)], False
        flag = f"--{field.replace('_', '-')}"
        argv = _without(argv, flag)
        if words and len(words) == 1 and draw.random() < 0.5:
            argv.append(f"{flag}={words[0]}")
        else:
            argv += [flag, *(words if words is not None else ["x"])]
    return _command_attempt("flags", argv, bad)


def _without(argv: list[str], flag: str) -> list[str]:
    if flag not in argv:
        return argv
    at = argv.index(flag)
    return argv[:at] + argv[at + 2 :]


def _command_attempt(kind: str, argv: list[str], bad: bool, prepare: Callable[[Path], None] | None = None) -> Attempt:
    def run(folder: Path) -> int:
        if prepare is not None:
            prepare(folder)
        with contextlib.chdir(folder):
            return command(*(word.replace("{}", str(folder)) for word in argv))

    return Attempt(
        kind, shlex.join(word if len(word) < 80 else f"{word[:20]}...({len(word)})" for word in argv), bad, run
    )


# --- files of flags

_YAML_LINES = (
    "seed: nan", "seed: 1.5", 'seed: "0.1"', "seed: true", "seed: 2024-01-01", "seed: -1", "seed: [1]", "seed: {a: 1}",
    "seed: 99999999999999999999", "seed: " + "1" * 5000, "timeout: .inf", "timeout: 0.5", "text: 5", "text: true",
    "text: [pydoc, --seed, 7]", 'tokenizer: [bytes, "--no-fsdp"]', "batch: 0", "batch: [2]", 'fsdp: "no"', "fsdp: 0",
    "fsdp: []", "nope: 1", "--seed: 1", "seed=3 --batch: 1", "no-fsdp: true", "config: x.yaml", "config: {}",
    "dry-run: 1\ndry_run: 1", "seed: 1\nseed: 2", ": 3", "seed", "- seed", "x" * 100_000, "a: " + "[" * 20_000,
    "seed: [", "seed: !!python/object:os.system {}", "\0", "kernel: 3", "kernel: Flash", "memory: 3", "memory: nope",
    "memory: {nope: 1}", "memory: {offload: host}", "memory: longest,nope=1", "rope: yarn",
    'text: "a\\0b"', "help: true", "ring: 0", "data: 1e3", "dtype: [fp32]",
)  # fmt: skip


def _yaml(draw: random.Random) -> Attempt:
    """Return a command with a bad file of flags."""
    lines = draw.choice(_YAML_LINES)
    before = draw.choice(("", "# a comment\n", "json: true\n"))
    bad_bytes = draw.random() < 0.05

    def prepare(folder: Path) -> None:
        text = (before + lines).encode()
        (folder / "run.yaml").write_bytes(b"# \xff\xfe\n" + text if bad_bytes else text)

    attempt = _command_attempt("yaml", ["verify", *_BASE["verify"], "--config", "{}/run.yaml"], True, prepare)
    return dataclasses.replace(attempt, what=f"run.yaml: {before + lines!r:.90}")


# --- data


def _text(path: Path) -> None:
    path.write_text("Once upon a time there was a text.\n" * 20)


def _json_lines(path: Path, rows: list[Any]) -> None:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))


def _parquet(path: Path, columns: dict[str, list[Any]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table(columns), path)


_GOOD_ROW = {"text": "Once upon a time there was a text. " * 5}


def _data(draw: random.Random) -> Attempt:
    """Return a command with data that is broken or of mixed kinds."""
    kind = draw.randrange(12)
    at, bad = "data", True

    def prepare(folder: Path) -> None:
        nonlocal at
        data = folder / "data"
        data.mkdir()
        number = draw.randrange(1, 40)
        if kind == 0:  # rows without the field
            lacking = {"body": "x" * 50}
            rows = [
                _GOOD_ROW if i % 2 == 0 else draw.choice((lacking, {"text": 3}, [1], "not json"))
                for i in range(number + 1)
            ]
            _json_lines(data / "a.jsonl", rows)
        elif kind == 1:
            _text(data / "a.txt")
            _parquet(data / "b.parquet", {draw.choice(("body", "Text")): ["x" * 50] * 50})
        elif kind == 2:
            _text(data / "a.txt")
            _parquet(data / "b.parquet", {"text": list(range(50))})
        elif kind == 3:
            _parquet(data / "a.parquet", {"text": ["x" * 100] * 5})
            _parquet(data / "b.parquet", {"body": ["x" * 100] * 5})
        elif kind == 4:
            (data / draw.choice(("a.txt", "a.jsonl", "a.parquet"))).write_bytes(
                draw.randbytes(number * 7) + b"\xff\xfe"
            )
        elif kind == 5:
            (data / draw.choice(("a.txt", "a.jsonl", "a.parquet"))).touch()
        elif kind == 6:
            (data / "a.txt").symlink_to(data / "gone.txt")
            _text(data / "b.txt")
        elif kind == 7:
            _text(data / "b.txt")
            (data / "loop").symlink_to(data)
            (data / "a.txt").symlink_to(data / "a.txt")
        elif kind == 8:
            _json_lines(data / "a.jsonl", [_GOOD_ROW, '{"text": "\\ud800 alone"}'])
        elif kind == 9:
            _json_lines(data / "a.jsonl", [_GOOD_ROW, '{"text": ' + "[" * 100_000])
        elif kind == 10:
            os.mkfifo(data / "a.txt")
        else:
            _text(data / "a.txt")
            (data / "b.parquet").write_bytes((data / "a.txt").read_bytes())

    argv = [
        "train",
        *_without(_without(list(_BASE["train"]), "--dataset_name"), "--context"),
        *["--dataset_name", "{}/data", "--context", "4k"],
    ]
    attempt = _command_attempt("data", argv, bad, prepare)
    return dataclasses.replace(attempt, what=f"data of kind {kind}")


def _missing_data(draw: random.Random) -> Attempt:
    """Return a command with a missing file."""
    names = ("gone.txt", "./gone", "{}/gone", "a/b/c", "gone/", "~/gone-from-here", "s3://gone/x", "gone.jsonl")
    argv = ["train", *_without(list(_BASE["train"]), "--dataset_name"), f"--dataset_name={draw.choice(names)}"]
    return _command_attempt("data", argv, True)


# --- hardware files

_HARDWARE = 'like = "h100"\n'
_HARDWARE_LINES = (
    'like = "me.toml"', 'like = "other.toml"', "like = 3", 'like = "h1000"', "memory_bytes = -1", "memory_bytes = nan",
    "memory_bytes = inf", "memory_bytes = true", 'memory_bytes = "80e9"', "memory_bytes = 0", "flops = nan",
    "flops = 1e400",
    "gpus_per_node = 0", "gpus_per_node = 1.5", "gpus_per_node = -8", "matmul_efficiency = 2",
    "matmul_efficiency = nan",
    "overlaps = 3", 'overlaps = "no"', "on_cpu = []", "name = 3", "name = []", "nope = 1", "intra = 3",
    "[intra]\nbandwidth = nan",
    "[intra]\nbandwidth = 0", "[intra]\nbandwidth = 1e9\nlatency = -1", "[intra]\nbandwidth = 1e9\nlatency = nan",
    '[intra]\nbandwidth = 1e9\nlatency = "fast"', "[intra]\nbandwidth = 1e9\nnope = 3", "[intra]\nlatency = 1e-6",
    "[intra]\nbandwidth = 1e9\nlatency = {all_to_all = -1}", "[intra]\nbandwidth = 1e9\nlatency = {nope = 1}",
    '[intra]\nbandwidth = 1e9\nlatency = {all_to_all = "x"}', "[inter]\nbandwidth = 1e9\nlatency = []",
    "links = 3", "links = []", "[links]\nulysses = 3", "[links.ulysses]\nall_to_all = 3",
    "[links.nope.all_to_all]\nlatency=1\nbandwidth=1",
    "[links.ulysses.nope]\nlatency = 1\nbandwidth = 1", "[links.ulysses.all_to_all]\nlatency = 1",
    "[links.ulysses.all_to_all]\nlatency = -1\nbandwidth = 1", "[links.ulysses.all_to_all]\nlatency = 1\nbandwidth = 0",
    "[links.ulysses.all_to_all]\nlatency = nan\nbandwidth = 1",
    "[links.ulysses.all_to_all]\nlatency = 1\nbandwidth = 1\nnope = 1",
    "[links.ulysses.all_to_all]\nlatency = 1\nbandwidth = 1\nhidden = 2",
    "[links.ulysses.all_to_all]\nlatency = 1\nbandwidth = 1\nhidden = nan",
    "attention_flops = 0", "attention_flops = nan", "reserve_bytes = nan", "reserve_bytes = inf",
    "attention_block = inf",
    "memory_bytes = 1\nmemory_bytes = 2", "memory_bytes =", "a = " + "[" * 20_000, "\0", "flops = " + "1" * 5000,
    "dtype = 3", 'measured = "today"\ndtype = "fp7"', "measured = 3",
)  # fmt: skip


def _hardware(draw: random.Random) -> Attempt:
    line = draw.choice(_HARDWARE_LINES)

    def prepare(folder: Path) -> None:
        head = "" if "like" in line else _HARDWARE
        (folder / "me.toml").write_text(f"{head}{line}\n")
        (folder / "other.toml").write_text('like = "me.toml"\n')

    attempt = _command_attempt("hardware", ["plan", "--model", "llama-3.1-8b", "--gpu", "me.toml"], True, prepare)
    return dataclasses.replace(attempt, what=f"me.toml: {line!r:.90}")


# --- a model's config

_CONFIG_CHANGES: tuple[dict[str, Any], ...] = (
    {"hidden_size": -1}, {"hidden_size": "128"}, {"hidden_size": None}, {"num_attention_heads": 0}, {"vocab_size": 1.5},
    {"num_hidden_layers": 0}, {"num_hidden_layers": 10**30}, {"num_key_value_heads": 3}, {"model_type": 3},
    {"model_type": "nope"}, {"model_type": None}, {"rope_parameters": 3}, {"rope_parameters": {"rope_type": "nope"}},
    {"max_position_embeddings": -1}, {"max_position_embeddings": "many"}, {"head_dim": 0},
    {"tie_word_embeddings": "yes"},
    {"hidden_size": 127}, {"intermediate_size": [1]}, {"layer_types": ["nope"]}, {"layer_types": 3},
    {"vocab_size": 10**18},
)  # fmt: skip


def _config(draw: random.Random) -> Attempt:
    change = draw.choice(_CONFIG_CHANGES)
    text = draw.choice((None, None, None, "", "[]", "3", "{", "\0", '"x"', "[" * 100_000, "{}"))
    name = draw.choice(("plan", "train", "verify"))

    def prepare(folder: Path) -> None:
        whole = json.dumps({**json.loads(MODEL.read_text()), **change})
        (folder / "config.json").write_text(whole if text is None else text)

    flags = {
        "plan": ["plan", "--model", "config.json", "--gpu", "cpu"],
        "train": [
            "train",
            *_without(list(_BASE["train"]), "--model_name_or_path"),
            "--model_name_or_path",
            "config.json",
        ],
        "verify": ["verify", "--model", "config.json", "--context", "64"],
    }[name]
    # Strange values are up to transformers; a file without a config must be refused.
    attempt = _command_attempt("config", flags, text is not None, prepare)
    return dataclasses.replace(attempt, what=f"{name} with {change if text is None else text!r:.60}")


# --- the campaign

MAKERS: dict[str, tuple[Callable[[random.Random], Attempt], ...]] = {
    "flags": (_flags,),
    "yaml": (_yaml,),
    "data": (_data, _missing_data),
    "hardware": (_hardware,),
    "config": (_config,),
}


def attempts(seed: int, tries: int) -> Iterator[Attempt]:
    """Yield `tries` attempts that depend on the seed alone."""
    kinds = list(MAKERS)
    for number in range(tries):
        draw = random.Random(f"{seed} {number}")
        yield draw.choice(MAKERS[kinds[number % len(kinds)]])(draw)


def campaign(seed: int, tries: int, calls: int) -> list[Result]:
    """Run `tries` inputs and `calls` of the public functions."""
    from tests.chaos import api

    # Before any limit applies: an import that an alarm interrupts stays half done.
    for name in ("torch", "transformers", "pyarrow.parquet", "longspan.train.command", "longspan.verify.inputs"):
        importlib.import_module(name)
    return [judge(each) for each in attempts(seed, tries)] + [judge(each) for each in api.attempts(seed, calls)]


def run(budget: Budget, counts: Counts) -> None:
    """Make the attempts in this process."""
    for seed in budget.seeds(20):
        for result in campaign(seed, 100, 100):
            what = f"{result.attempt.kind}: {result.attempt.what}"
            counts.add(result.outcome, f"seed {seed}: {what}: {result.message.strip()[-300:]}")
