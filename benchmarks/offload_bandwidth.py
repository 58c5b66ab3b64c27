"""Bandwidth of activation offload to a disk and back, next to sequential writes and reads of as many bytes.

    python benchmarks/offload_bandwidth.py --folder /a/local/disk     (--quick: 64 MiB)

One process, without computing. `store` puts tensors one by one and waits until all are written, then gets and drops
them from last to first. `plain` works like `dd`: one thread writes the same pieces to the same kind of file in order,
and reads them again. Both use O_DIRECT and the page cache; with the page cache, writes end with `fdatasync`, and reads
may come from the cache.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time

import common
import torch

from longspan.memory.offload.disk import CHUNK_BYTES, IN_FLIGHT, DiskStore
from longspan.memory.offload.disk_file import OffloadFile, aligned_buffer, buffer_of

MIB = 1 << 20
Seconds = dict[str, list[float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="on the disk to measure")
    parser.add_argument("--tensor", type=int, default=32, help="MiB of a tensor")
    parser.add_argument("--count", type=int, default=64, help="tensors")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="8 tensors of 8 MiB, 2 rounds")
    parser.add_argument("--name", default="offload-bandwidth", help="name of the report; empty for none")
    args = parser.parse_args()
    if args.quick:
        args.tensor, args.count, args.repeats = 8, 8, 2
    torch.set_num_threads(1)
    env = common.environment(["torch"])
    size = args.tensor * MIB
    x = torch.randint(0, 255, (size,), dtype=torch.uint8)
    found: dict[str, Seconds] = {}
    for turn in range(args.repeats + 1):  # the first warms up
        candidates = [(kind, direct) for direct in (True, False) for kind in ("store", "plain")]
        for kind, direct in candidates[turn % 4 :] + candidates[: turn % 4]:
            times = (store if kind == "store" else plain)(args.folder, x, args.count, direct)
            if times is None:
                continue
            name = f"{kind}, {'O_DIRECT' if direct else 'page cache'}"
            for way, seconds in zip(("write", "read"), times, strict=True):
                found.setdefault(name, {}).setdefault(way, []).extend([seconds] if turn else [])
    total = size * args.count
    rows = [
        [name, *(f"{total / common.median(seconds) / 1e9:.2f}" for seconds in ways.values())]
        for name, ways in found.items()
    ]
    text = common.table(["", "write GB/s", "read GB/s"], rows) + (
        f"\n\n- {args.count} tensors of {args.tensor} MiB, medians of {args.repeats} rounds in alternation; at most "
        f"{IN_FLIGHT // MIB} MiB on their way, pieces of {CHUNK_BYTES // MIB} MiB"
    )
    for way in ("write", "read"):
        if "store, O_DIRECT" in found:
            ratio = common.paired_ratio(found["store, O_DIRECT"][way], found["plain, O_DIRECT"][way])
            text += f"\n- {way}, O_DIRECT, time of store / plain: {ratio:.2f}"
    print(text)
    if args.name:
        common.write_report(args.name, "Activations to a disk and back", env, text, found)


def store(folder: str, x: torch.Tensor, count: int, direct: bool) -> tuple[float, float] | None:
    """Seconds of writing and of reading through the store; None where there is no O_DIRECT."""
    disk = DiskStore(folder, x.device, direct=direct)
    try:
        if disk._file.direct != direct:
            return None
        disk.reserve(x.nbytes * count)
        began = time.perf_counter()
        stored = [disk.put(x) for _ in range(count)]
        with disk._changed:
            disk._changed.wait_for(lambda: not disk._bytes_in_flight)
        if not direct:
            os.fdatasync(disk._file._fd)
        written = time.perf_counter()
        while stored:
            stored.pop().get()
        return written - began, time.perf_counter() - written
    finally:
        disk.close()


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
    main()
