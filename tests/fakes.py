"""A process group of torch's "fake" backend, which sends nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextlib.contextmanager
def fake_world(rank: int, size: int) -> Iterator[None]:
    """Make this process one rank of `size`; receive buffers stay as they are, so states that are not finite pass."""
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        with mock.patch("longspan.mixers.state_passing.raise_on_every_rank"):
            yield
    finally:
        dist.destroy_process_group()
