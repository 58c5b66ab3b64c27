"""The file that activations lie in: nameless, reserved in advance, and past the page cache where the disk can."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import warnings
import weakref
from pathlib import Path
from typing import Any

import torch

from longspan.core.errors import LongspanError
from longspan.core.system import format_os_error, is_full

BLOCK = 4096
"""Bytes: what O_DIRECT asks of the memory, the place in the file and the length, on all file systems that take it."""

_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT)
_NO_FALLOCATE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
_IN_MEMORY = ("tmpfs", "ramfs")


class SpillFile:
    """A file without a name in `folder`: the system takes it back when the process ends, however it ends.

    With O_DIRECT, where the file system takes it: what goes through the page cache fills a machine's (or a container's)
    memory with what was to be out of it, until the kernel throttles the writer.

    Args:
        folder: on a disk of this machine.
        direct: False leaves O_DIRECT out.

    Attributes:
        direct: whether it is used.
        size: bytes that are reserved.

    Raises:
        LongspanError: the folder is missing, is none, or cannot be written to.
    """

    def __init__(self, folder: str, direct: bool = True) -> None:
        self.folder, self.size = folder, 0
        path = Path(folder)
        if not path.is_dir():
            what = "is no folder" if path.exists() else "does not exist"
            raise LongspanError(f"offload_folder={folder!r} {what}; make it, or give another one on a local disk")
        try:
            fd = _open_nameless(folder)
        except OSError as error:
            raise LongspanError(
                f"offload_folder={folder!r} cannot be written to: {format_os_error(error)}; give another one on a "
                "local disk"
            ) from error
        self._fd = fd
        self._close = weakref.finalize(self, os.close, fd)
        self.direct = direct and _set_direct(fd)
        if _kind_of(fd) in _IN_MEMORY:
            warnings.warn(
                f"offload_folder={folder!r} is itself in memory ({_kind_of(fd)}): what is offloaded there still takes "
                "memory of the host; give a folder on a disk",
                stacklevel=4,
            )

    def reserve(self, size: int) -> None:
        """Have room for `size` bytes on the disk, so that no later write fails for want of it.

        Raises:
            LongspanError: with the bytes that are needed and free.
        """
        if size <= self.size:
            return
        if size - self.size > self._free():
            raise LongspanError(self._format_disk_full(size - self.size))
        try:
            self._allocate(size)
        except OSError as error:
            with contextlib.suppress(OSError):  # what was allocated before it failed
                os.ftruncate(self._fd, self.size)
            if not is_full(error):
                raise LongspanError(self.describe(error)) from error
            raise LongspanError(self._format_disk_full(size - self.size, error)) from error
        self.size = size

    def _allocate(self, size: int) -> None:
        try:
            os.posix_fallocate(self._fd, self.size, size - self.size)
        except OSError as error:
            if error.errno not in _NO_FALLOCATE:
                raise
            os.ftruncate(self._fd, size)

    def write(self, data: memoryview, at: int) -> None:
        """All of `data`, whose length, like `at`, is a multiple of `BLOCK`, in memory that starts at one."""
        done = 0
        while done < len(data):
            done = self._further(done, os.pwrite(self._fd, data[done:], at + done))
        if not self.direct:
            # Begins to write it to the disk, and takes clean pages out of the cache.
            os.posix_fadvise(self._fd, at, len(data), os.POSIX_FADV_DONTNEED)

    def read(self, into: memoryview, at: int) -> None:
        """Fill `into`, of which the same is asked as of what `write` is given."""
        done = 0
        while done < len(into):
            done = self._further(done, os.preadv(self._fd, [into[done:]], at + done))
        if not self.direct:
            os.posix_fadvise(self._fd, at, len(into), os.POSIX_FADV_DONTNEED)

    def _further(self, done: int, count: int) -> int:
        """Where to go on after a call that moved `count` bytes, which may be fewer than asked."""
        after = done + count
        if self.direct:  # goes on at a block, or at once ends there
            after -= after % BLOCK
        if after <= done:
            raise OSError(errno.EIO, f"the disk moved {count} bytes and then no more")
        return after

    def close(self) -> None:
        """Give the disk's room back."""
        self._close()

    def describe(self, error: OSError) -> str:
        """An error of reading or writing, with the folder."""
        if is_full(error):
            return self._format_disk_full(0, error)
        return (
            f"activations that lie in offload_folder={self.folder!r} cannot be written or read: "
            f"{format_os_error(error)}; give another folder, or offload='none'"
        )

    def _free(self) -> int:
        found = os.fstatvfs(self._fd)
        return found.f_bavail * found.f_frsize

    def _format_disk_full(self, needed: int, error: OSError | None = None) -> str:
        said = f" ({format_os_error(error)}: a quota or a limit of the system?)" if error else ""
        return (
            f"activations do not fit on the disk of offload_folder={self.folder!r}: {needed:,} bytes more are needed "
            f"for this rank, beside {self.size:,} that it has, and {self._free():,} bytes are free{said}; give a "
            "folder on a larger disk, keep less (checkpointing='full'), or share the sequence among more ranks"
        )


def _open_nameless(folder: str) -> int:
    flags = os.O_RDWR | os.O_CLOEXEC
    try:
        return os.open(folder, flags | os.O_TMPFILE, 0o600)
    except OSError as error:
        if error.errno not in _NO_TMPFILE:
            raise
    fd, name = tempfile.mkstemp(prefix=".longspan-offload-", dir=folder)
    os.unlink(name)
    return fd


def _set_direct(fd: int) -> bool:
    """Whether the file takes O_DIRECT, tried out by writing and reading a block: some refuse only then."""
    import fcntl

    before = fcntl.fcntl(fd, fcntl.F_GETFL)
    block = memory_of(aligned(BLOCK))
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, before | os.O_DIRECT)
        if os.pwrite(fd, block, 0) == BLOCK and os.preadv(fd, [block], 0) == BLOCK:
            return True
    except OSError:
        pass
    fcntl.fcntl(fd, fcntl.F_SETFL, before)
    return False


def _kind_of(fd: int) -> str:
    """The kind of file system that a file is on; empty where the system does not tell."""
    device = os.fstat(fd).st_dev
    with contextlib.suppress(OSError, IndexError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            if line.split()[2] == f"{os.major(device)}:{os.minor(device)}":
                return line.partition(" - ")[2].split()[0]
    return ""


def aligned(nbytes: int, pinned: bool = False) -> torch.Tensor:
    """uint8 `[nbytes]` in the host's memory that starts at a multiple of `BLOCK`."""
    whole = torch.empty(nbytes + BLOCK, dtype=torch.uint8, pin_memory=pinned)
    return whole[-whole.data_ptr() % BLOCK :][:nbytes]


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a uint8 `[n]` of the host."""
    array: Any = tensor.numpy()
    return memoryview(array)
