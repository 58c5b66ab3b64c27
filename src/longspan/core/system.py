"""Free memory of this machine, and errors of its disks."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

from longspan.core.errors import LongspanError

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


def free_memory() -> int | None:
    """Return the bytes that processes of this machine can still allocate, or None if unknown."""
    limits = []
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        limits.append(next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")))
    with contextlib.suppress(OSError, ValueError):  # "max": no limit
        group = Path("/sys/fs/cgroup")
        limits.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    return min(limits, default=None)
