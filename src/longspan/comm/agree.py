"""Agree over ranks: raise the same error on all of them if one fails, or if they differ in what must be equal.

A rank that raises alone leaves the others waiting in the next collective. So every check sends a few numbers first: a
flag and checksums. Texts are sent only if these show a problem.

torch's own object collectives (`broadcast_object_list`, `all_gather_object`) return while a thread of gloo may still
hold their last tensor. A script that ends right then aborts ("terminate called without an active exception"): that
thread needs the interpreter to free the tensor. So calls here wait until gloo has released its tensors.
"""

from __future__ import annotations

import json
import pickle
import time
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.core.errors import LongspanError
from longspan.core.formatting import differences, format_ranks, listed
from longspan.ranks.facts import versions

T = TypeVar("T")

_RELEASE_S = 5.0
_NONE = -1
"""The digest of facts that a rank does not have."""


@dataclass(frozen=True)
class Facts:
    """What must be equal on several ranks.

    Attributes:
        values: plain values, as JSON has them.
        refuse: makes the error, from the values of all these ranks, which differ, and their numbers in the job.
    """

    values: Any
    refuse: Callable[[list[Any], list[int]], LongspanError]

    def digest(self) -> int:
        return zlib.crc32(json.dumps(self.values, sort_keys=True).encode())


def agree(
    group: dist.ProcessGroup | None,
    facts: Facts | None = None,
    problem: Exception | None = None,
    *,
    what: str = "failed",
    shared: Facts | None = None,
    neighbours: int = 1,
) -> None:
    """Raise on every rank if a rank has a problem, or if facts differ. Collective: one all-gather of four numbers.

    Args:
        group: the ranks; None for one.
        facts: what must be equal on all ranks.
        problem: the error of this rank's own checks, which may leave no facts.
        what: describes a problem in the message: "rank 3 `what`: ...".
        shared: what must be equal among this rank's neighbours. It is compared first, as it explains most problems.
        neighbours: how many ranks share it. Ranks may state other numbers; 0 if it is unknown.

    Raises:
        LongspanError: by `refuse` of the facts that differ, or as `raise_on_every_rank`.
    """
    if group is None or group.size() == 1:
        if problem is not None:
            raise problem
        return
    digests = [_NONE if each is None else each.digest() for each in (facts, shared)]
    # A forward, whose batch is shared, does not wait for gloo: more is sent before the script can end.
    rows = gather_numbers([problem is not None, *digests, neighbours], group, wait=shared is None)
    ranks = dist.get_process_group_ranks(group)
    unequal = _unequal_neighbours([(row[3], row[2]) for row in rows])
    if shared is not None and unequal is not None:
        raise shared.refuse(gather_objects(shared.values, group)[unequal], ranks[unequal])
    if any(row[0] for row in rows):
        raise_on_every_rank(problem, group, what)
    if facts is not None and len({row[1] for row in rows}) > 1:
        raise facts.refuse(gather_objects(facts.values, group), ranks)


def _unequal_neighbours(shared: Sequence[tuple[int, int]]) -> slice | None:
    """Return the first ranks, by the largest number of neighbours that one of them states, that are not all equal."""
    for count in sorted({count for count, _ in shared} - {0}, reverse=True):
        for first in range(0, len(shared), count):
            part = slice(first, first + count)
            known = {each for each in shared[part] if each[1] != _NONE}
            if any(count == stated for stated, _ in known) and len(known) > 1:
                return part
    return None


def on_every_rank(
    action: Callable[[], T],
    group: dist.ProcessGroup | None,
    facts: Callable[[T], Facts] | None = None,
    what: str = "failed",
) -> T:
    """Run `action` on every rank and return this rank's result; `agree` that it raised nowhere. Collective.

    `facts` returns what must be equal in the results of all ranks.

    Raises:
        LongspanError: as `agree`.
        Exception: on a rank where `action` raised another kind of exception, that exception.
    """
    results, found, problem = list[T](), None, None
    try:
        results.append(action())
        found = None if facts is None else facts(results[0])
    except Exception as error:  # of any kind: the other ranks must raise too
        problem = error
    agree(group, found, problem, what=what)
    return results[0]


def on_first_rank(action: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """Run `action` on the group's first rank and return its result on all; if it raises, raise on all. Collective.

    Args:
        action: its result is pickled; it may raise anything.
        group: the ranks; None for one.

    Raises:
        LongspanError: on every rank, of the same subclass.
        Exception: on the first rank, if `action` raised another kind of exception.
    """
    results, problem, sent = list[T](), None, None
    if group is None or group.rank() == 0:
        try:
            results.append(action())
        except Exception as error:
            problem = error
            sent = error if isinstance(error, LongspanError) else LongspanError(error_text(error))
    everywhere: tuple[list[T], LongspanError | None] = broadcast_object((results, sent), group)
    results, sent = everywhere
    raised = problem or sent
    if raised is not None:
        raise raised
    return results[0]


def open_together(open_inputs: Callable[[], T], facts: Callable[[T], Mapping[str, Any]]) -> T:
    """Open a command's inputs on every rank, and compare their `facts` and the versions of libraries. Collective.

    Ranks that differ would train wrongly without an error (another learning rate), or wait for each other forever
    (another number of steps, layers or ranks).
    """

    def of(opened: T) -> Facts:
        values = {**versions(), **facts(opened)}.items()
        texts = {key: x if isinstance(x, str) else json.dumps(x, sort_keys=True, default=str) for key, x in values}
        return Facts(texts, _started_differently)

    return on_every_rank(open_inputs, dist.group.WORLD if dist.is_initialized() else None, of, "")


def _started_differently(every: list[Any], ranks: list[int]) -> LongspanError:
    return LongspanError(
        f"the ranks were started differently: {listed(differences(every, ranks), 6)}; start every rank with the same "
        f"command, files and versions",
        code="LS104",
    )


def raise_on_every_rank(problem: Exception | None, group: dist.ProcessGroup, what: str) -> None:
    """Raise on every rank, when all know that some have a problem. Collective.

    Args:
        problem: this rank's.
        group: the ranks.
        what: as in `agree`.

    Raises:
        LongspanError: the problems, with the ranks that have them unless all have the same one.
        Exception: `problem`, if it is of another kind.
    """
    texts = gather_objects(None if problem is None else error_text(problem), group)
    if problem is not None and (len(set(texts)) == 1 or not isinstance(problem, LongspanError)):
        raise problem
    failed: dict[str, list[int]] = {}
    for rank, text in zip(dist.get_process_group_ranks(group), texts, strict=True):
        if text is not None:
            failed.setdefault(text, []).append(rank)
    problems = []
    for text, (first, *others) in failed.items():
        also = f" (also {format_ranks(others)})" if others else ""
        problems.append(f"{f'rank {first} {what}'.strip()}: {text}{also}")
    raise LongspanError(listed(problems)) from problem


def error_text(error: Exception) -> str:
    """Return an error in one line, with its type unless it is a LongspanError."""
    text = str(error)
    return text if isinstance(error, LongspanError) else f"{type(error).__name__}: {(text.splitlines() or ['?'])[0]}"


# ---------------------------------------------------------------------------------------------------------------------
# Numbers and objects.


def gather_numbers(mine: Sequence[int], group: dist.ProcessGroup, *, wait: bool = False) -> list[list[int]]:
    """Gather the int64 numbers of every rank, in group order; each rank has equally many.

    `wait` for gloo's release, if the script may end after this.
    """
    gathered, sent = _gather(lambda device: torch.tensor(mine, dtype=torch.int64, device=device), group)
    if wait:
        _wait_for_release(sent)
    return gathered.tolist()


def gather_objects(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Return every rank's `value`, in rank order. Collective; `group` is None for one rank."""
    if group is None or group.size() == 1:
        return [value]
    data = pickle.dumps(value)
    lengths = [length for (length,) in gather_numbers([len(data)], group, wait=True)]
    padded = bytearray(data.ljust(max(lengths)))
    gathered, sent = _gather(lambda device: torch.frombuffer(padded, dtype=torch.uint8).to(device), group)
    _wait_for_release(sent)
    return [pickle.loads(x[:n].numpy().tobytes()) for x, n in zip(gathered, lengths, strict=True)]


def broadcast_object(value: Any, group: dist.ProcessGroup | None) -> Any:
    """Return the `value` of the group's first rank on every rank. Collective; `group` is None for one rank."""
    if group is None or group.size() == 1:
        return value
    first = group.rank() == 0
    data, sent = _broadcast(pickle.dumps(value) if first else b"", group)
    _wait_for_release(sent)
    return value if first else pickle.loads(data)


def _gather(
    make: Callable[[torch.device], Tensor], group: dist.ProcessGroup
) -> tuple[Tensor, list[weakref.ref[Tensor]]]:
    x = make(_device(group))
    received = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(received, x, group=group)
    return torch.stack(received).cpu(), [weakref.ref(each) for each in (x, *received)]


def _broadcast(data: bytes, group: dist.ProcessGroup) -> tuple[bytes, list[weakref.ref[Tensor]]]:
    size = torch.tensor([len(data)], device=_device(group))
    dist.broadcast(size, group_src=0, group=group)
    x = torch.frombuffer(bytearray(data or bytes(int(size))), dtype=torch.uint8).to(size.device)
    dist.broadcast(x, group_src=0, group=group)
    return x.cpu().numpy().tobytes(), [weakref.ref(size), weakref.ref(x)]


def _device(group: dist.ProcessGroup) -> torch.device:
    """Return the CPU if the group supports it, else this rank's GPU."""
    on_cpu = "cpu:" in dist.get_backend_config(group)
    return torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())


def _wait_for_release(sent: list[weakref.ref[Tensor]]) -> None:
    """Wait until gloo has released the tensors that were sent, at most `_RELEASE_S` seconds."""
    deadline = time.monotonic() + _RELEASE_S
    while any(x() is not None for x in sent) and time.monotonic() < deadline:
        time.sleep(0.0001)
