"""Offload of activations: tensors return bit for bit, memory stays bounded, and errors say what to do."""

from __future__ import annotations

import errno
import gc
import itertools
import os
import random
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from longspan.core.errors import LongspanError
from longspan.core.memory import Memory
from longspan.memory.offload import host, store_for
from longspan.memory.offload.disk import DiskStore
from longspan.memory.offload.host import HostStore
from tests.checkpoint.disk import largest_file
from tests.memory.side_stream import LateSide
from tests.pool import RankError, run_forked

CPU = torch.device("cpu")
MIB = 1 << 20

KINDS: dict[str, Callable[[], Tensor]] = {
    "fp32": lambda: torch.randn(3000),
    "tokens first": lambda: torch.randn(2, 50, 3, 4).transpose(1, 2),
    "gaps": lambda: torch.randn(40, 30)[:, 3:7],
    "offset": lambda: torch.randn(7, 100)[3],
    "expanded": lambda: torch.randn(5, 1).expand(5, 9),
    "bf16": lambda: torch.randn(4097).to(torch.bfloat16),
    "fp8": lambda: torch.randn(33).to(torch.float8_e4m3fn),
    "bool": lambda: torch.rand(8193) > 0.5,
    "int64": lambda: torch.randint(-9, 9, (512,)),
    "conjugate": lambda: torch.randn(5, 6, dtype=torch.complex64).conj(),
    "trained": lambda: torch.randn(6, requires_grad=True),
    "0-dim": lambda: torch.tensor(2.5, dtype=torch.float64),
    "empty": lambda: torch.zeros(3, 0, 2),
    "large": lambda: torch.randn(20_000),
}


def _bits(x: Tensor) -> Tensor:
    return x.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8).clone()


def _same(x: Tensor, kind: tuple[Any, ...], bits: Tensor) -> bool:
    return (x.dtype, x.shape) == kind and torch.equal(_bits(x), bits) and not x.requires_grad


def _disk(folder: Path, **options: Any) -> DiskStore:
    return DiskStore(str(folder), CPU, **{"chunk_bytes": 4096, "in_flight": 16384, "read_ahead": 0, **options})


@pytest.fixture
def disk(tmp_path: Path) -> DiskStore:
    return _disk(tmp_path)


def _written(store: DiskStore) -> None:
    with store.changed:
        assert store.changed.wait_for(lambda: not store._bytes_in_flight, timeout=60)


@pytest.fixture
def gate(disk: DiskStore, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Return an event that every write waits for."""
    opened, write = threading.Event(), disk._file.write

    def waiting(data: memoryview, at: int) -> None:
        assert opened.wait(60)
        write(data, at)

    monkeypatch.setattr(disk._file, "write", waiting)
    return opened


# --- tensors return bit for bit

OPS = st.lists(st.tuples(st.sampled_from(["put", "put", "get", "abandon", "step"]), st.integers(0, 99)), max_size=40)


def _play(store: Any, ops: list[tuple[str, int]], lifo: bool, step: Callable[[], None]) -> None:
    torch.manual_seed(0)
    stored: list[tuple[Any, tuple[Any, ...], Tensor]] = []
    names = sorted(KINDS)
    for what, number in ops:
        at = -1 if lifo else number % max(1, len(stored))
        if what == "put":
            x = KINDS[names[number % len(names)]]()
            stored.append((store.put(x), (x.dtype, x.shape), _bits(x)))
            del x
        elif what == "step":
            step()
        elif stored and what == "get":
            future, kind, bits = stored[at]
            assert _same(future.get(), kind, bits)
        elif stored and what == "abandon":
            stored.pop(at)
    while stored:
        future, kind, bits = stored.pop()
        assert _same(future.get(), kind, bits)
        assert _same(future.get(), kind, bits)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[DiskStore]]:
    folder = tmp_path_factory.mktemp("disk")
    yield [_disk(folder), _disk(folder, via_host=True, read_ahead=20_000), _disk(folder, direct=False)]
    assert not list(folder.iterdir())


@given(ops=OPS, lifo=st.booleans(), which=st.integers(0, 2))
def test_a_disk_returns_every_tensor(played: list[DiskStore], ops: list[Any], lifo: bool, which: int) -> None:
    store = played[which]
    _play(store, ops, lifo, lambda: _written(store))
    _written(store)
    store.reserve(0)  # drops abandoned entries
    with store.changed:
        assert store.changed.wait_for(lambda: not store._allocator.used, timeout=60)


@settings(max_examples=40)
@given(ops=OPS, lifo=st.booleans(), in_flight=st.integers(0, 3))
@example([("put", 5), ("put", 5), ("put", 5), ("get", 2), ("abandon", 1), ("get", 0)], False, 0)  # prefetched in vain
def test_the_host_returns_every_tensor(ops: list[Any], lifo: bool, in_flight: int) -> None:
    """Copies run as late as possible, or earlier if a step is drawn; the side stream checks which tensors are alive."""
    side = LateSide()
    store = HostStore(side, in_flight=in_flight)
    _play(store, ops, lifo, side.step)
    store.reserve(0)
    assert not any(allocator.used for _, allocator in store._pool._chunks)


def test_strides_are_restored_and_a_tensor_put_twice_is_two_entries(disk: DiskStore) -> None:
    x = torch.randn(2, 50, 3, 4).permute(0, 2, 3, 1)
    first, second = disk.put(x), disk.put(x)
    _written(disk)
    assert first.get().stride() == x.stride()
    del first
    assert torch.equal(second.get(), x)


def test_threads_share_a_store(disk: DiskStore) -> None:
    def work(seed: int) -> None:
        rng = random.Random(seed)
        mine = [(torch.full((rng.randrange(5000),), float(seed * 1000 + i))) for i in range(30)]
        stored = [disk.put(x) for x in mine]
        wrong.extend(i for i, (x, s) in enumerate(zip(mine, stored, strict=True)) if not torch.equal(s.get(), x))
        rng.shuffle(stored)
        while stored:
            stored.pop()

    wrong: list[int] = []
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong and not any(thread.is_alive() for thread in threads)
    disk.reserve(0)  # drops abandoned entries
    with disk.changed:
        assert disk.changed.wait_for(lambda: not disk._allocator.used, timeout=60)


# --- memory is bounded


def _tracked(alive: set[int], nbytes: int, number: int) -> Tensor:
    """Return a tensor; its number is in `alive` until its memory is freed."""
    array = np.random.default_rng(number).integers(0, 255, nbytes, np.uint8)
    alive.add(number)
    weakref.finalize(array, alive.discard, number)
    return torch.from_numpy(array)


@pytest.mark.parametrize("by_bytes", [True, False])
def test_memory_does_not_grow_with_the_number_of_layers(tmp_path: Path, by_bytes: bool) -> None:
    size, count, few = MIB, 32, 5
    limit = {"in_flight": few * size} if by_bytes else {"in_flight": count * size, "max_tensors": few}
    store = _disk(tmp_path, chunk_bytes=size // 4, **limit)
    store.reserve(count * size)
    alive: set[int] = set()
    stored: list[Any] = []
    for number in range(count):
        stored.append(store.put(_tracked(alive, size, number)))
        assert len(alive) <= few + 1
    _written(store)
    assert not alive
    for number in reversed(range(count)):
        assert torch.equal(stored.pop().get(), _tracked(set(), size, number))
        assert sum(entry.fetch is not None for entry in store.entries.values()) <= few


def test_a_put_waits_while_too_much_is_in_flight(disk: DiskStore, gate: threading.Event) -> None:
    first = [disk.put(torch.full((2048,), float(i))) for i in range(2)]  # 16 KiB, the limit
    late: list[Any] = []
    thread = threading.Thread(target=lambda: late.append(disk.put(torch.full((10_000,), 7.0))))
    thread.start()
    thread.join(0.3)
    assert thread.is_alive() and not late
    assert torch.equal(first[0].get(), torch.zeros(2048))  # still on the device
    gate.set()
    thread.join(60)
    assert torch.equal(late[0].get(), torch.full((10_000,), 7.0))
    assert disk.stats.take()["waited"] > 0


def test_the_file_does_not_grow_from_step_to_step_and_abandoned_space_is_freed(disk: DiskStore) -> None:
    sizes = []
    for step in range(4):
        stored = [disk.put(torch.randn(1000 + 700 * i)) for i in range(8)]
        while stored:
            stored.pop(-(step % 2)).get()
        _written(disk)
        sizes.append(os.fstat(disk._file._fd).st_size)
    assert len(set(sizes)) == 1
    disk.put(torch.randn(5000))
    gc.collect()
    _written(disk)
    disk.reserve(0)
    assert disk._allocator.used == 0


@pytest.mark.parametrize("in_flight", [0, 2])
def test_the_device_holds_few_tensors_and_memory_is_pinned_once(in_flight: int) -> None:
    side = LateSide()
    store = HostStore(side, in_flight=in_flight)
    alive: set[int] = set()
    numbers = itertools.count()
    for _ in range(3):
        store.reserve(16 * 1000)
        stored = []
        for _ in range(16):
            stored.append(store.put(_tracked(alive, 1000, next(numbers))))
            assert len(alive) <= in_flight
        while stored:
            stored.pop().get()
            assert sum(entry.fetch is not None for entry in store.entries.values()) <= 1
        assert len(side.chunks) == 1
    assert side.chunks[0].nbytes == 64 * MIB


# --- prefetching


def test_a_disk_prefetches_the_entry_before(disk: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = [disk.put(torch.full((2000,), float(i))) for i in range(4)]
    _written(disk)
    offsets, read = [s._entry.offset for s in stored], disk._file.read
    seen: list[int] = []
    monkeypatch.setattr(disk._file, "read", lambda into, at: (seen.append(at), read(into, at)))
    stored[3].get()
    with disk.changed:
        assert disk.changed.wait_for(lambda: not any(e.pending for e in disk.entries.values()), timeout=60)
    assert {at // 4096 for at in seen} == {at // 4096 + k for at in offsets[2:] for k in (0, 1)}
    stored.pop()
    while stored:
        stored.pop().get()
    assert len(seen) == len(set(seen)) == 8  # nothing is read twice


def test_the_side_stream_prefetches_the_entry_before() -> None:
    side = LateSide()
    store = HostStore(side, in_flight=0)
    stored = [store.put(torch.full((n,), float(n))) for n in (100, 4, 100, 4)]  # large and small ones
    begun = len(side.begun)
    for so_far in (2, 4, 4, 4):
        stored.pop().get()
        assert len(side.begun) - begun == so_far


def test_a_layer_is_fetched_in_its_order() -> None:
    side = LateSide()
    store = HostStore(side, in_flight=0)
    stored = []
    for _ in range(3):
        store.start_layer()
        stored += [store.put(torch.randn(n)) for n in (100, 100, 4)]
    begun = len(side.begun)
    for at, so_far in ((6, 2), (7, 4), (8, 4), (3, 5), (4, 7), (5, 7), (0, 8), (1, 9), (2, 9)):
        stored[at].get()
        assert len(side.begun) - begun == so_far  # nothing is copied twice


def test_a_dropped_tensor_leaves_the_device() -> None:
    side = LateSide()
    store = HostStore(side)
    x = torch.randn(100)
    stored, alive = store.put(x), weakref.ref(x.untyped_storage())
    del x
    assert alive() is not None and not side.begun[0].executed  # on its way
    del stored
    store.reserve(0)
    assert alive() is None and side.begun[0].executed


def test_useless_prefetches_are_cancelled(disk: DiskStore) -> None:
    stored = [disk.put(torch.randn(500)) for _ in range(30)]
    _written(disk)
    for one in random.Random(0).sample(stored, 30):
        one.get()
        assert sum(entry.fetch is not None for entry in disk.entries.values()) <= 2


# --- errors


def _fails(number: int) -> Callable[..., Any]:
    def call(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    return call


def _says(store_folder: Path, *words: str) -> str:
    return "(?s)" + "".join(f"(?=.*{word})" for word in (str(store_folder), *words))


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_failed_write_raises_at_the_next_call(
    disk: DiskStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(os, "pwrite", _fails(number))
        lost = disk.put(torch.randn(5000))
        _written(disk)
    for call in (lost.get, lambda: disk.put(torch.randn(3))):
        with pytest.raises(LongspanError, match=_says(tmp_path, f"Errno {number}")):
            call()
    del lost, call
    gc.collect()
    x = torch.randn(5000)
    assert torch.equal(disk.put(x).get(), x)


def test_a_failed_read_raises_and_is_retried(disk: DiskStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(5000)
    stored = disk.put(x)
    _written(disk)
    with monkeypatch.context() as broken:
        broken.setattr(os, "preadv", _fails(errno.EIO))
        with pytest.raises(LongspanError, match=_says(tmp_path, "Input/output error")):
            stored.get()
    assert torch.equal(stored.get(), x)


@pytest.mark.parametrize(("most", "direct"), [(4096, True), (5000, True), (5000, False)])
def test_short_writes_and_reads_are_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, direct: bool
) -> None:
    store = _disk(tmp_path, direct=direct, chunk_bytes=16384)
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: min(most, pwrite(fd, data, at)))
    monkeypatch.setattr(os, "preadv", lambda fd, into, at: min(most, preadv(fd, into, at)))
    x = torch.randn(20_000)
    stored = store.put(x)
    _written(store)
    assert torch.equal(stored.get(), x)
    monkeypatch.setattr(os, "preadv", lambda fd, into, at: 0)  # the file has become shorter
    with pytest.raises(LongspanError, match=r"Errno 5\b"):
        stored.get()


def test_a_full_disk_is_refused_with_the_bytes(disk: DiskStore, tmp_path: Path) -> None:
    with pytest.raises(LongspanError, match=_says(tmp_path, r"1,125,899,906,842,624 bytes more", "bytes are free")):
        disk.reserve(1 << 50)
    before = os.fstat(disk._file._fd).st_size
    with largest_file(8192):
        with pytest.raises(LongspanError, match=_says(tmp_path, r"40,960 bytes more", r"Errno 27\b")):
            disk.reserve(40_000)
        with pytest.raises(LongspanError, match=r"Errno 27\b"):
            disk.put(torch.randn(10_000))
    assert os.fstat(disk._file._fd).st_size <= max(before, 4096)
    x = torch.randn(10_000)
    assert torch.equal(disk.put(x).get(), x)


def test_unusable_folders_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    for name, word in (("nowhere", "does not exist"), ("file", "is not a folder")):
        memory = Memory(checkpointing="full", offload="disk", offload_folder=str(tmp_path / name))
        with pytest.raises(LongspanError, match=_says(tmp_path / name, word)):
            store_for(memory, CPU)
    for number in (errno.EROFS, errno.EACCES):
        with monkeypatch.context() as broken:
            broken.setattr(os, "open", _fails(number))
            with pytest.raises(LongspanError, match=_says(tmp_path, f"Errno {number}")):
                _disk(tmp_path)


@pytest.mark.parametrize("without", ["O_TMPFILE", "posix_fallocate", "O_DIRECT"])
def test_file_systems_with_fewer_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without: str) -> None:
    opened = os.open
    if without == "O_TMPFILE":
        monkeypatch.setattr(
            os, "open", lambda p, f, *a, **k: _fails(errno.EOPNOTSUPP)() if f & os.O_TMPFILE == os.O_TMPFILE
            else opened(p, f, *a, **k),
        )  # fmt: skip
    elif without == "posix_fallocate":
        monkeypatch.setattr(os, "posix_fallocate", _fails(errno.EOPNOTSUPP))
    else:
        monkeypatch.setattr("longspan.memory.offload.disk_file._set_direct", lambda fd: False)
    store = _disk(tmp_path)
    monkeypatch.undo()
    assert not list(tmp_path.iterdir())
    store.reserve(50_000)
    x = torch.randn(9000)
    stored = store.put(x)
    _written(store)
    assert torch.equal(stored.get(), x)


def test_a_tensor_written_to_in_flight_is_an_error(disk: DiskStore, gate: threading.Event) -> None:
    x = torch.randn(100)
    stored = disk.put(x)
    x.add_(1)
    gate.set()
    _written(disk)
    with pytest.raises(LongspanError, match="in place"):
        stored.get()


def test_stores_of_each_device() -> None:
    assert store_for(Memory(), CPU) is None
    with pytest.raises(LongspanError, match="is a CPU.*offload='disk'"):
        store_for(Memory(checkpointing="full", offload="host"), CPU)
    assert isinstance(store_for(Memory(checkpointing="full", offload="disk"), CPU), DiskStore)
    with pytest.raises(LongspanError, match="mps"):
        store_for(Memory(checkpointing="full", offload="disk"), torch.device("mps"))


def test_full_host_memory_is_refused_with_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "free_memory", lambda: 1000)
    store = HostStore(LateSide())
    for call in (lambda: store.reserve(2000), lambda: store.put(torch.randn(10))):
        with pytest.raises(LongspanError, match="(?=.*2,000|.*67,108,864)(?=.*1,000 bytes are free)"):
            call()
    monkeypatch.setattr(host, "free_memory", lambda: None)
    x = torch.randn(10)
    assert torch.equal(store.put(x).get(), x)


# --- the end


def test_transfers_are_counted_since_the_last_report(disk: DiskStore) -> None:
    stored = disk.put(torch.randn(5000))
    _written(disk)
    stored.get()
    found = disk.stats.take()
    assert found["bytes"] == 40_000 and found["seconds"] > 0
    assert not any(disk.stats.take().values())
    host = HostStore(LateSide(), in_flight=0)
    host.put(torch.randn(10)).get()
    assert host.stats.take() == {"bytes": 80, "seconds": 2, "waited": 2}


def _killed(folder: Path) -> None:
    store = DiskStore(str(folder), CPU)
    store.reserve(1 << 22)
    _held = [store.put(torch.randn(100_000)) for _ in range(8)]
    assert not list(folder.iterdir())
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_that_is_killed_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="exit code -9"):
        run_forked(_killed, tmp_path)
    assert not list(tmp_path.iterdir())
