"""Offload of activations: tensors return bit for bit, memory stays bounded, and errors say what to do."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
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
from longspan.memory.offload.host import HostStore
from tests.memory.side_stream import LateSide

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


# --- memory is bounded


def _tracked(alive: set[int], nbytes: int, number: int) -> Tensor:
    """Return a tensor; its number is in `alive` until its memory is freed."""
    array = np.random.default_rng(number).integers(0, 255, nbytes, np.uint8)
    alive.add(number)
    weakref.finalize(array, alive.discard, number)
    return torch.from_numpy(array)


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


# --- errors


def test_a_tensor_written_to_in_flight_is_an_error() -> None:
    side = LateSide()
    store = HostStore(side)
    x = torch.randn(100)
    stored = store.put(x)
    x.add_(1)
    side.step()
    store.reserve(0)  # releases what has been copied
    with pytest.raises(LongspanError, match="in place"):
        stored.get()


def test_strides_are_restored_and_a_tensor_put_twice_is_two_entries() -> None:
    store = HostStore(LateSide(), in_flight=0)
    x = torch.randn(2, 50, 3, 4).permute(0, 2, 3, 1)
    first, second = store.put(x), store.put(x)
    assert first.get().stride() == x.stride()
    del first
    assert torch.equal(second.get(), x)


def test_stores_of_each_device() -> None:
    assert store_for(Memory(), torch.device("cpu")) is None
    for device in ("cpu", "mps"):
        with pytest.raises(LongspanError, match=f"from a GPU to host memory; this device is {device}"):
            store_for(Memory(checkpointing="full", offload="host"), torch.device(device))


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


def test_transfers_are_counted_since_the_last_report() -> None:
    store = HostStore(LateSide(), in_flight=0)
    store.put(torch.randn(10)).get()
    assert store.stats.take() == {"bytes": 80, "seconds": 2, "waited": 2}
    assert not any(store.stats.take().values())
