"""Bandwidth of activation offload to a disk and back, next to sequential writes and reads of as many bytes.

    python -m benchmarks.offload_bandwidth --folder /a/local/disk

One process, without computing. `store` puts tensors one by one and waits until all are written, then gets and drops
them from last to first. `plain` works like `dd`: one thread writes the same pieces to the same kind of file in order,
and reads them again. Both use O_DIRECT and the page cache; with the page cache, writes end with `fdatasync`, and reads
may come from the cache.
"""

from __future__ import annotations

import os
import tempfile
import time

import torch

from benchmarks import common
from longspan.memory.offload.disk import CHUNK_BYTES, IN_FLIGHT, DiskStore
from longspan.memory.offload.disk_file import OffloadFile, aligned_buffer, buffer_of

MIB = 1 << 20


def main(
    folder: str = tempfile.gettempdir(), tensor: int = 32, count: int = 64, repeats: int = 5,
    name: str = "offload-bandwidth",
) -> None:  # fmt: skip
    """Write and read `count` tensors of `tensor` MiB each; `folder` is on the disk to measure."""
    torch.set_num_threads(1)
    env = common.environment(["torch"])
    size = tensor * MIB
    x = torch.randint(0, 255, (size,), dtype=torch.uint8)
    found: dict[str, dict[str, list[float]]] = {}
    candidates = [(kind, direct) for direct in (True, False) for kind in (store, plain)]
    for turn in range(repeats + 1):  # the first warms up
        for kind, direct in candidates[turn % 4 :] + candidates[: turn % 4]:
            times = kind(folder, x, count, direct)
            if times is not None:
                ways = found.setdefault(f"{kind.__name__}, {'O_DIRECT' if direct else 'page cache'}", {})
                for way, seconds in zip(("write", "read"), times, strict=True):
                    ways.setdefault(way, []).extend([seconds] if turn else [])
    total = size * count
    rows = [
        [kind, *(f"{total / common.median(seconds) / 1e9:.2f}" for seconds in ways.values())]
        for kind, ways in found.items()
    ]
    text = common.table(["", "write GB/s", "read GB/s"], rows) + (
        f"\n\n- {count} tensors of {tensor} MiB, medians of {repeats} rounds in alternation; at most "
        f"{IN_FLIGHT // MIB} MiB on their way, pieces of {CHUNK_BYTES // MIB} MiB"
    )
    for way in ("write", "read"):
        if "store, O_DIRECT" in found:
            ratio = common.paired_ratio(found["store, O_DIRECT"][way], found["plain, O_DIRECT"][way])
            text += f"\n- {way}, O_DIRECT, time of store / plain: {ratio:.2f}"
    common.write_report(name, "Activations to a disk and back", env, text, found)


def store(folder: str, x: torch.Tensor, count: int, direct: bool) -> tuple[float, float] | None:
    """Seconds of writing and of reading through the store; None where there is no O_DIRECT."""
    disk = DiskStore(folder, x.device, direct=direct)
    if disk._file.direct != direct:
        return None
    disk.reserve(x.nbytes * count)
    began = time.perf_counter()
    stored = [disk.put(x) for _ in range(count)]
    with disk.changed:
        disk.changed.wait_for(lambda: not disk._bytes_in_flight)
    if not direct:
        os.fdatasync(disk._file._fd)
    written = time.perf_counter()
    while stored:
        stored.pop().get()
    return written - began, time.perf_counter() - written


def plain(folder: str, x: torch.Tensor, count: int, direct: bool) -> tuple[float, float] | None:
    """The same by one thread, in order, without a store."""
    file = OffloadFile(folder, direct)
    try:
        if file.direct != direct:
            return None
        file.reserve(x.nbytes * count)
        buffer = aligned_buffer(CHUNK_BYTES)
        buffer.copy_(x[:CHUNK_BYTES])
        piece = buffer_of(buffer)
        began = time.perf_counter()
        for at in range(0, x.nbytes * count, CHUNK_BYTES):
            os.pwrite(file._fd, piece, at)
        if not direct:
            os.fdatasync(file._fd)
        written = time.perf_counter()
        for at in range(0, x.nbytes * count, CHUNK_BYTES):
            os.preadv(file._fd, [piece], at)
        return written - began, time.perf_counter() - written
    finally:
        file.close()


if __name__ == "__main__":
    common.command(main, __doc__)
