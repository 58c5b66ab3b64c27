"""The file of offloaded activations: unnamed, reserved in advance, and written past the page cache if possible."""

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

from longspan.core.errors import LongspanError, format_os_error, is_full

BLOCK = 4096
"""Bytes. O_DIRECT needs memory, file offset and length to be multiples of it, on every file system that supports it."""

_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT)
_NO_FALLOCATE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
_IN_MEMORY = ("tmpfs", "ramfs")


class OffloadFile:
    """An unnamed file in `folder`: the system deletes it when the process ends, however it ends.

    Uses O_DIRECT if the file system supports it (`direct`). The page cache would fill the memory of the machine (or
    container) with the bytes that offload should move out of it, until the kernel throttles the writer.
    """

    def __init__(self, folder: str, direct: bool = True) -> None:
        self.folder, self.size = folder, 0
        path = Path(folder)
        if not path.is_dir():
            what = "is not a folder" if path.exists() else "does not exist"
            raise LongspanError(f"offload_folder={folder!r} {what}; create it, or use a folder on a local disk")
        try:
            fd = _open_unnamed(folder)
        except OSError as error:
            raise LongspanError(
                f"offload_folder={folder!r} cannot be written to: {format_os_error(error)}; use another folder on a "
                "local disk"
            ) from error
        self._fd = fd
        weakref.finalize(self, os.close, fd)
        self.direct = direct and _set_direct(fd)
        if _file_system_of(fd) in _IN_MEMORY:
            warnings.warn(
                f"offload_folder={folder!r} is on {_file_system_of(fd)}, which lies in host memory: offloading there "
                "saves nothing; use a folder on a disk",
                stacklevel=4,
            )

    def reserve(self, size: int) -> None:
        """Reserve `size` bytes on the disk in all, or raise: then no later write runs out of space."""
        if size <= self.size:
            return
        if size - self.size > self._free():
            raise LongspanError(self._disk_full(size - self.size))
        try:
            self._allocate(size)
        except OSError as error:
            with contextlib.suppress(OSError):  # undo a partial allocation
                os.ftruncate(self._fd, self.size)
            if not is_full(error):
                raise LongspanError(self.describe(error)) from error
            raise LongspanError(self._disk_full(size - self.size, error)) from error
        self.size = size

    def _allocate(self, size: int) -> None:
        try:
            os.posix_fallocate(self._fd, self.size, size - self.size)
        except OSError as error:
            if error.errno not in _NO_FALLOCATE:
                raise
            os.ftruncate(self._fd, size)

    def write(self, data: memoryview, offset: int) -> None:
        """Write all of `data`. Its length, its address and `offset` are multiples of `BLOCK`."""
        done = 0
        while done < len(data):
            done = self._advance(done, os.pwrite(self._fd, data[done:], offset + done))
        if not self.direct:
            # Start writing to the disk, and drop clean pages from the cache.
            os.posix_fadvise(self._fd, offset, len(data), os.POSIX_FADV_DONTNEED)

    def read(self, into: memoryview, offset: int) -> None:
        """Fill `into`, aligned as for `write`."""
        done = 0
        while done < len(into):
            done = self._advance(done, os.preadv(self._fd, [into[done:]], offset + done))
        if not self.direct:
            os.posix_fadvise(self._fd, offset, len(into), os.POSIX_FADV_DONTNEED)

    def _advance(self, done: int, count: int) -> int:
        """Return where to continue after a call that moved `count` bytes, perhaps fewer than requested."""
        after = done + count
        if self.direct:  # continue at a block
            after -= after % BLOCK
        if after <= done:
            raise OSError(errno.EIO, f"the disk moved {count} bytes and then no more")
        return after

    def describe(self, error: OSError) -> str:
        """Return an error message for a failed read or write."""
        if is_full(error):
            return self._disk_full(0, error)
        return (
            f"activations in offload_folder={self.folder!r} cannot be written or read: {format_os_error(error)}; "
            "use another folder, or offload='none'"
        )

    def _free(self) -> int:
        status = os.fstatvfs(self._fd)
        return status.f_bavail * status.f_frsize

    def _disk_full(self, needed: int, error: OSError | None = None) -> str:
        reason = f" ({format_os_error(error)}: a quota or a limit of the system?)" if error else ""
        return (
            f"activations do not fit on the disk of offload_folder={self.folder!r}: this rank needs {needed:,} bytes "
            f"more than its {self.size:,}, and {self._free():,} bytes are free{reason}; use a folder on a larger "
            "disk, save less (checkpointing='full'), or shard the sequence over more ranks"
        )


def _open_unnamed(folder: str) -> int:
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
    """Set O_DIRECT and return whether it works. Write and read a block: some file systems refuse only then."""
    import fcntl

    before = fcntl.fcntl(fd, fcntl.F_GETFL)
    block = buffer_of(aligned_buffer(BLOCK))
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, before | os.O_DIRECT)
        if os.pwrite(fd, block, 0) == BLOCK and os.preadv(fd, [block], 0) == BLOCK:
            return True
    except OSError:
        pass
    fcntl.fcntl(fd, fcntl.F_SETFL, before)
    return False


def _file_system_of(fd: int) -> str:
    device = os.fstat(fd).st_dev
    with contextlib.suppress(OSError, IndexError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            if line.split()[2] == f"{os.major(device)}:{os.minor(device)}":
                return line.partition(" - ")[2].split()[0]
    return ""


def aligned_buffer(nbytes: int, pinned: bool = False) -> torch.Tensor:
    """Allocate uint8 `[nbytes]` of host memory at a multiple of `BLOCK`."""
    whole = torch.empty(nbytes + BLOCK, dtype=torch.uint8, pin_memory=pinned)
    return whole[-whole.data_ptr() % BLOCK :][:nbytes]


def buffer_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a host tensor, uint8 `[n]`."""
    array: Any = tensor.numpy()
    return memoryview(array)
