"""Fake streams and events of a fake GPU (`tests/syncs.py`), whose asynchronous work is done as late as possible."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock


class FakeStream:
    """A stream; what it is asked to wait for, or to record, is forgotten."""

    device_index = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, other: FakeStream) -> None:
        pass

    def wait_event(self, event: FakeEvent) -> None:
        event.reached = True

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        return event or FakeEvent()


class FakeEvent:
    """An event that the device reaches only when a stream, or the host, waits for it."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.reached = False

    def record(self, stream: FakeStream | None = None) -> None:
        pass

    def wait(self, stream: FakeStream | None = None) -> None:
        self.reached = True

    def query(self) -> bool:
        return self.reached

    def synchronize(self) -> None:
        self.reached = True

    def elapsed_time(self, other: FakeEvent) -> float:
        return 0.0


@contextlib.contextmanager
def fake_streams() -> Iterator[None]:
    """Replace the streams and events of `torch.cuda`."""
    compute = FakeStream()
    with mock.patch.multiple(
        "torch.cuda",
        Stream=FakeStream,
        Event=FakeEvent,
        stream=lambda stream: contextlib.nullcontext(),
        current_stream=lambda device=None: compute,
    ):
        yield


class _Properties:
    total_memory, major, minor, multi_processor_count = 80 << 30, 9, 0, 132


@contextlib.contextmanager
def fake_gpus(count: int) -> Iterator[None]:
    """Let torch's device meshes and FSDP believe in `count` GPUs with fake streams; within `on_gpu()`."""
    with (
        fake_streams(),
        mock.patch.multiple(
            "torch.cuda",
            is_available=lambda: True,
            device_count=lambda: count,
            set_device=lambda device: None,
            get_device_properties=lambda device=None: _Properties(),
        ),
    ):
        yield
