"""Messages as late as possible, between ranks that run one after another in one process, on a CPU or one GPU."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from tests.attn.inflight import WeakTensor
from tests.counting import GATHERS, SCATTERS

SLEEP_CYCLES = 500_000
"""A quarter of a millisecond."""


class LateTransport:
    """Sends the messages of ranks that run one after another: all of them again and again, until `unsettled` is False.

    A rank receives what the others sent last (zeros at first), so that after as many passes as a rank has exchanges
    every message is right. Until a message is waited for, its receive buffer holds NaN and its send buffer has not been
    read. On a GPU both are copied on a side stream, behind a kernel that sleeps.

    Args:
        device: "cuda" or "cpu".
    """

    def __init__(self, device: str) -> None:
        self.stream = torch.cuda.Stream() if device == "cuda" else None
        self.messages: dict[Any, Tensor] = {}
        self.before: dict[Any, Tensor] | None = None
        self.passes = self.exchanges = 0
        self.prefix: Any = None
        self.posted: Counter[Any] = Counter()

    def begin(self, prefix: Any) -> None:
        """Start one rank's run of the case that `prefix` names."""
        self.prefix, self.posted = prefix, Counter()

    def unsettled(self) -> bool:
        """Whether another pass over all ranks is needed."""
        if self.stream is not None:
            torch.cuda.synchronize()
        before, self.before = self.before, dict(self.messages)
        if before is None or before.keys() != self.messages.keys():
            return True
        self.passes += 1
        changed = any(not torch.equal(x, before[key]) for key, x in self.messages.items())
        return changed and self.passes <= self.exchanges  # some kernels sum in any order

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Replace the collectives of `torch.distributed`."""
        replaced: dict[str, Any] = {"all_to_all_single": self.all_to_all, "batch_isend_irecv": self.batch}
        replaced |= dict.fromkeys(GATHERS, self.all_gather) | dict.fromkeys(SCATTERS, self.reduce_scatter)
        with mock.patch.multiple(dist, **{name: f for name, f in replaced.items() if hasattr(dist, name)}):
            yield

    def all_to_all(
        self,
        out: Tensor,
        x: Tensor,
        out_splits: Any = None,
        splits: Any = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        sends, receives = (
            list(enumerate(t.split(s) if s else t.chunk(group.size()))) for t, s in ((x, splits), (out, out_splits))
        )
        return self._start(group, sends, receives, async_op)

    def all_gather(self, out: Tensor, x: Tensor, group: Any = None, async_op: bool = False) -> Any:
        size = group.size()
        return self._start(group, [(r, x) for r in range(size)], list(enumerate(out.chunk(size))), async_op)

    def reduce_scatter(self, out: Tensor, x: Tensor, group: Any = None, async_op: bool = False) -> Any:
        parts = torch.empty_like(x).chunk(group.size())
        return self._start(
            group, list(enumerate(x.chunk(group.size()))), list(enumerate(parts)), async_op,
            lambda: out.copy_(torch.stack(parts).sum(0).view_as(out)),
        )  # fmt: skip

    def batch(self, ops: list[Any]) -> list[Any]:
        sends, receives = (
            [(op.group_peer, op.tensor) for op in ops if op.op is kind] for kind in (dist.isend, dist.irecv)
        )
        return [self._start(ops[0].group, sends, receives, True)]

    def _start(
        self, group: Any, sends: Any, receives: Any, async_op: bool, finish: Callable[[], object] = lambda: None
    ) -> Any:
        ranks, me = tuple(dist.get_process_group_ranks(group)), group.rank()
        self.posted["exchanges"] += 1
        self.exchanges = max(self.exchanges, self.posted["exchanges"])
        outgoing = [(self._key("send", ranks, me, peer), WeakTensor(x)) for peer, x in sends]
        incoming = [(self._key("receive", ranks, peer, me), WeakTensor(x)) for peer, x in receives]
        for _, x in receives:
            x.fill_(torch.nan if x.is_floating_point() else torch.iinfo(x.dtype).min)

        def move() -> None:
            for key, weak in outgoing:
                self.messages[key] = _alive(weak).clone()
            for key, weak in incoming:
                x = _alive(weak)
                x.copy_(self.messages[key].view_as(x)) if key in self.messages else x.zero_()

        work = _Late(self.stream, move, finish)
        if not async_op:
            work.wait()
        return work if async_op else None

    def _key(self, way: str, ranks: tuple[int, ...], source: int, target: int) -> Any:
        pair = way, ranks, source, target
        self.posted[pair] += 1
        return self.prefix, ranks, source, target, self.posted[pair]


class _Late:
    """A message in flight."""

    def __init__(self, stream: Any, move: Callable[[], None], finish: Callable[[], object]) -> None:
        self.move, self.finish, self.event = move, finish, None
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                torch.cuda._sleep(SLEEP_CYCLES)
                move()
                self.event = stream.record_event()

    def wait(self, *args: Any) -> bool:
        if self.event is None:
            self.move()
        else:
            torch.cuda.current_stream().wait_event(self.event)
        self.finish()
        return True


def _alive(weak: WeakTensor) -> Tensor:
    x = weak()
    assert x is not None, "a tensor was freed while its message was in flight"
    return x
