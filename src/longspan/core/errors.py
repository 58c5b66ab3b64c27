"""Errors that a user can correct: wrong input, a missing package, a disk."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
from collections.abc import Iterator

#: The extra of pyproject.toml that installs an optional package.
EXTRAS = {
    "accelerate": "train",
    "bitsandbytes": "qlora",
    "datasets": "train",
    "diffusers": "diffusers",
    "lm_eval": "eval",
    "mlflow": "mlflow",
    "peft": "peft",
    "safetensors": "hf",
    "tensorboard": "train",
    "torchao": "adamw8bit",
    "trackio": "trackio",
    "transformers": "hf",
    "trl": "train",
    "wandb": "wandb",
}


class LongspanError(ValueError):
    """Invalid input. The message has the value, what is allowed, and the fix.

    Raised before any collective and from facts that are the same on every rank, so that all ranks raise it or none.
    The command line prints the message without a traceback.

    Args:
        message: one to three lines.
        code: of the entry in docs/reference/errors.md; both end the message.
    """

    def __init__(self, message: str = "", *, code: str | None = None) -> None:
        super().__init__(f"{message} {see(code)}" if code else message)


def see(code: str) -> str:
    """Return the end of a message with a code."""
    return f"[{code}, see docs/reference/errors.md]"


def require(use: str, *packages: str) -> None:
    """Raise if an optional package (a key of `EXTRAS`) is not installed; none is imported. `use` is what needs it."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise not_installed(use, package)


def missing_package(error: BaseException | None) -> str | None:
    """Return the optional package that a failed import lacks, looking through errors that wrap it (transformers)."""
    while error is not None:
        package = (getattr(error, "name", None) or "").partition(".")[0]
        if package in EXTRAS:
            return package
        error = error.__cause__
    return None


def not_installed(use: str, package: str) -> LongspanError:
    """Return the error for an optional package that is not installed."""
    extra, name = EXTRAS[package], package.replace("_", "-")
    return LongspanError(
        f"{use} needs {name}, which is not installed; install longspan with its extra {extra!r} "
        f'(pip install ".[{extra}]"), or pip install {name}',
        code="LS101",
    )


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def is_full(error: BaseException | None) -> bool:
    """Return whether an error means a full disk, an exhausted quota or the maximum file size."""
    return isinstance(error, OSError) and error.errno in _FULL


def format_os_error(error: OSError) -> str:
    """Format an error of the operating system in one line."""
    where = f": {error.filename}" if error.filename else ""
    return f"[Errno {error.errno}] {error.strerror}{where}" if error.strerror else f"{type(error).__name__}: {error}"


class DiskFull(LongspanError):
    """The disk has no room for new files; complete ones stay."""


@contextlib.contextmanager
def os_errors_as_longspan_errors() -> Iterator[None]:
    """Raise an OSError of the body as a LongspanError, or as `DiskFull`."""
    try:
        yield
    except OSError as error:
        raise (DiskFull if is_full(error) else LongspanError)(format_os_error(error)) from error
