"""Checks of user input: numbers and their ranges, paths, text files, TOML."""

from __future__ import annotations

import difflib
import errno
import inspect
import math
import numbers
import os
import re
import sys
import tempfile
import tomllib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from longspan.core.errors import LongspanError

LARGEST_COUNT = 1 << 40
"""The largest count of anything (tokens, steps, documents): more is a typo."""

LARGEST_JOB = 1 << 16
"""The most ranks of a job."""

LONGEST_WAIT_S = 30 * 24 * 3600
"""The longest time-out in seconds."""

LARGEST_SEED = (1 << 63) - 1
"""The largest seed that torch, numpy and Python's own generator all take."""

_FILE_ENDINGS = (".txt", ".json", ".jsonl", ".parquet", ".toml", ".csv", ".gz", ".zst", ".zip", ".safetensors", ".bin")


def format_value(value: object) -> str:
    """Return a value for an error message, shortened to fit a line."""
    try:
        text = repr(value)
    except Exception:  # an integer of more digits than Python prints, an object whose repr fails
        text = f"a value of type {type(value).__name__} that cannot be printed"
    if "\n" in text:  # a model, a tensor
        text = f"an instance of {type(value).__name__}"
    return text if len(text) <= 100 else f"{text[:60]}...{text[-12:]} ({len(text)} characters)"


# --- numbers


def check_number(
    name: str,
    value: Any,
    least: float = -math.inf,
    most: float = math.inf,
    *,
    above: bool = False,
    below: bool = False,
    whole: bool = False,
) -> None:
    """Raise unless `value` is a number in its range; NaN and the infinities are in no range.

    Args:
        name: of the value in messages ("--lr").
        value: to check.
        least: smallest allowed value; with `above`, exclusive.
        most: largest allowed value; with `below`, exclusive.
        above: `least` itself is not allowed.
        below: `most` itself is not allowed.
        whole: only integers are allowed.

    Raises:
        LongspanError: with the value and the range.
    """
    kinds = (int, numbers.Integral) if whole else (int, float, numbers.Real)  # numpy's as well
    fits = isinstance(value, kinds) and not isinstance(value, bool)
    too_low = fits and not (value > least if above else value >= least)
    too_high = fits and not (value < most if below else value <= most)
    if fits and not too_low and not too_high and (isinstance(value, kinds[:1]) or math.isfinite(value)):
        return
    # A number outside the range: name the limit that it exceeds. Anything else, and NaN: name both.
    low = (
        [f"{'above' if above else 'at least'} {least:,}"]
        if least > -math.inf and not (too_high and not too_low)
        else []
    )
    high = [f"{'below' if below else 'at most'} {most:,}"] if most < math.inf and not (too_low and not too_high) else []
    endless = ["finite"] if most == math.inf and isinstance(value, float) and not math.isfinite(value) else []
    allowed = " and ".join(endless + low + high)
    form = "" if fits else "an integer " if whole else "a number "
    raise LongspanError(f"{name} must be {(form + allowed).strip()}, got {format_value(value)}")


def check_count(name: str, value: Any) -> None:
    """Raise unless `value` is an integer of 0 or more."""
    check_number(name, value, 0, LARGEST_COUNT, whole=True)


def check_counts(config: Any, least: int, *names: str) -> None:
    """Raise unless the fields of these names, where they are given, are numbers of `least` or more."""
    for name in names:
        if getattr(config, name) is not None:
            check_number(f"--{name.replace('_', '-')}", getattr(config, name), least, LARGEST_COUNT)


def check_flag(name: str, value: Any) -> None:
    """Raise unless `value` is True or False (to Python, "no" is true)."""
    if not isinstance(value, bool):
        raise LongspanError(f"{name} must be True or False, got {format_value(value)}")


def check_function(name: str, value: Any, arguments: str) -> None:
    """Raise unless `value` is a function of these arguments. In "q, k, *, scale" the last is given by name."""
    expected = f"{name} must be a function ({arguments})"
    if not callable(value):
        raise LongspanError(f"{expected}, got {format_value(value)} ({type(value).__name__})")
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):  # some builtins have none
        return
    try:
        by_place, _, by_name = arguments.partition(", *, ")
        signature.bind(*by_place.split(", "), **dict.fromkeys(filter(None, by_name.split(", "))))
    except TypeError as error:
        raise LongspanError(f"{expected}, this one takes {signature}") from error


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raise unless `value` is one of the names."""
    if not isinstance(value, str) or value not in choices:
        raise LongspanError(f"{name}={format_value(value)} is unknown; {suggest_choice(value, choices)}")


def suggest_choice(value: Any, choices: Collection[str]) -> str:
    """Return a hint with all choices, and with the closest one first if one is close."""
    close = difflib.get_close_matches(str(value), list(choices), n=1, cutoff=0.6)
    *names, last = map(repr, choices)
    return f"{f'did you mean {close[0]!r}? Choose' if close else 'choose'} {', '.join(names)} or {last}"


def check_processes(ranks: int, mesh: str) -> None:
    """Raise for more ranks than one machine can start. `mesh` is for the message."""
    cores = os.cpu_count() or 1
    most = max(64, 4 * cores)
    if ranks > most:
        raise LongspanError(
            f"{mesh} starts {ranks} processes on this machine, which has {cores} cores; at most {most} are allowed: "
            "choose smaller degrees, or start the job by torchrun on several machines"
        )


def refuse_unknown(function: str, given: Collection[str], known: Collection[str]) -> None:
    """Raise for keyword arguments that a function does not have, with the nearest name or all names."""
    for name in given:
        if name not in known:
            raise LongspanError(f"{function}() has no argument {name!r}; {nearest(name, known)}")


def as_path(name: str, value: Any) -> Path:
    """Return a path that was given as text or as a `Path`."""
    if not isinstance(value, str | os.PathLike):
        raise LongspanError(
            f"`{name}` must be a path (text or pathlib.Path), got {format_value(value)} ({type(value).__name__})"
        )
    return path_of(f"`{name}`", os.fspath(value))


def nearest(name: str, known: Collection[str]) -> str:
    """Return a hint with the known name that is closest to `name`, or with all names if none is close."""
    begin = [each for each in known if name and each.startswith(name)]
    close = begin or difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"there are {', '.join(known)}"


# --- paths


def check_text(name: str, text: str) -> str:
    """Raise for text with a NUL byte, which no file name can have; return the text."""
    if "\0" in text:
        raise LongspanError(f"{name} {format_value(text)} has a NUL byte, which no name can have; remove it")
    return text


def check_name(name: str, text: str) -> None:
    """Raise for an empty name, and for what `check_text` refuses."""
    if not check_text(name, text):
        raise LongspanError(f"{name} is empty; remove the flag, or give a name")


def path_of(name: str, text: str) -> Path:
    """Return the path that a user wrote, with `~` expanded; it need not exist.

    Raises:
        LongspanError: for no text, a NUL byte, an unknown user, and a path that is too long.
    """
    if not check_text(name, text):
        raise LongspanError(f"{name} is empty; give a path")
    try:
        path = Path(text).expanduser()
        path.lstat()
    except RuntimeError as error:
        raise LongspanError(f"{name} {text}: this machine has no user of that name; write the full path") from error
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise LongspanError(f"{name} {format_value(text)} is too long for a path; give a shorter one") from error
    return path


def existing_path(name: str, text: str) -> Path | None:
    """Return the file or folder at a path, or None. Raise for a broken link, and as `path_of`."""
    path = path_of(name, text)
    try:
        if path.is_symlink() and not path.exists():
            raise LongspanError(f"{name} {path} is a link to {os.readlink(path)}, which does not exist")
        return path if path.exists() else None
    except OSError as error:  # a folder that may not be searched, a loop of links
        raise LongspanError(f"{name} {path} cannot be reached: {error.strerror or error}") from error


def near(text: str) -> str:
    """Return a hint with similar names in the folder of a missing path, or ""."""
    path = Path(text)
    try:
        names = os.listdir(path.parent)
    except OSError:
        return ""
    close = difflib.get_close_matches(path.name, [name for name in names if not name.startswith(".")], n=3)
    return f" (did you mean {' or '.join(str(path.parent / name) for name in close)}?)" if close else ""


def means_a_path(text: str) -> bool:
    """Whether a text can only be a path, and not a name on the Hugging Face hub (NAME or OWNER/NAME)."""
    plain = re.fullmatch(r"[A-Za-z0-9_][\w.\-]*(/[A-Za-z0-9_][\w.\-]*)?(:[\w.\-]+)?", text, re.ASCII) is not None
    return not plain or text.lower().endswith(_FILE_ENDINGS)


def _refuses_files(existing: Path) -> str:
    """Return why nothing can be written to a file or into a folder, or "". A file system may refuse even root."""
    if not os.access(existing, os.W_OK):
        return "permission denied"
    if existing.is_dir():
        try:
            tempfile.TemporaryFile(dir=existing).close()  # it never has a name, or is removed at once
        except OSError as error:
            return f"{existing} takes no files ({(error.strerror or str(error)).lower()})"
    return ""


def check_output(name: str, path: Path, *, folder: bool = False, example: str = "NAME") -> None:
    """Raise for a file, or with `folder` a folder, that cannot be written, without leaving anything."""
    what = "folder" if folder else "file"
    existing = next((p for p in (path, *path.parents) if os.path.lexists(p)), Path())
    if not existing.exists():
        problem = f"{existing} is a link to nothing"
    elif existing != path and not existing.is_dir():
        problem = f"{existing} is not a folder"
    elif why := _refuses_files(existing):
        problem = why
    elif existing == path and path.is_dir() != folder:
        other = "file; give a folder" if folder else f"folder; give a file, such as {name} {path / example}"
        raise LongspanError(f"{name} {path} is a {other}")
    else:
        return
    raise LongspanError(f"{name} {path} cannot be written: {problem}; give another {what}")


# --- files


def write_file(what: str, path: Path, write: Callable[[Path], object], out: IO[str] | None = None) -> None:
    """Make the folder, write a file, and print its path to `out`, by default stdout."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise LongspanError(f"the {what} cannot be written to {path}: {error}") from error
    print(f"{what} written to {path}", file=out or sys.stdout)


def read_text(name: str, path: Path) -> str:
    """Return the text of a settings file, or raise LongspanError."""
    try:
        if path.exists() and not path.is_file():  # a pipe might never end
            raise LongspanError(f"{name} {path} cannot be read: it is not a regular file")
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise LongspanError(
            f"{name} {path} cannot be read: it is not UTF-8 text ({error}); save it as UTF-8"
        ) from error
    except OSError as error:
        raise LongspanError(f"{name} {path} cannot be read: {error.strerror or error}") from error


@dataclass(frozen=True)
class Toml:
    """The values of a TOML file, and line numbers by the path of keys. `name` is the flag that named the file."""

    name: str
    path: Path
    values: dict[str, Any]
    lines: dict[tuple[str, ...], int]

    def error(self, message: str, *keys: str) -> LongspanError:
        """Return an error about the value at `keys`, with the file and the line."""
        return LongspanError(f"{self.name} {self.where(*keys)}: {message}")

    def where(self, *keys: str) -> str:
        """Return the file, and the line of the value at `keys` (or of its table)."""
        for known in (keys[:n] for n in range(len(keys), 0, -1)):
            if known in self.lines:
                return f"{self.path}, line {self.lines[known]}"
        return str(self.path)


def read_toml(name: str, path: Path) -> Toml:
    """Read a TOML file; raise LongspanError with the line if it is invalid."""
    text = read_text(name, path)
    try:
        values = tomllib.loads(f"{text}\n")  # without it, an error at the end would have no line
    except RecursionError as error:
        raise LongspanError(f"{name} {path} is not readable TOML: it is nested too deeply") from error
    except ValueError as error:  # TOMLDecodeError, or an integer of thousands of digits
        raise LongspanError(f"{name} {path} is not TOML: {format_value(str(error))}") from error
    return Toml(name, path, values, _lines(text))


def _lines(text: str) -> dict[tuple[str, ...], int]:
    """Return the line of every key and table. Lines of a multi-line string may look like keys, which does no harm."""
    lines: dict[tuple[str, ...], int] = {}
    table: tuple[str, ...] = ()
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[+([^\[\]=]+)\]", line):
            keys = table = _keys(header[1])
        elif pair := re.match(r"\s*([\w\-.\"' ]+?)\s*=", line):
            keys = (*table, *_keys(pair[1]))
        else:
            continue
        for n in range(1, len(keys) + 1):
            lines.setdefault(keys[:n], number)
    return lines


def _keys(dotted: str) -> tuple[str, ...]:
    return tuple(part.strip().strip("\"'") for part in dotted.split("."))
