"""Raise on every rank if any rank fails: a rank that raises alone leaves the others waiting in the next collective."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch.distributed as dist

from longspan.comm.objects import broadcast_object, gather_objects
from longspan.core.errors import LongspanError

if TYPE_CHECKING:
    from collections.abc import Sequence

T = TypeVar("T")


def on_every_rank(action: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """Run `action` on every rank and return this rank's result; if it raises on any rank, raise on all. Collective.

    Raises:
        LongspanError: as `raise_on_every_rank`.
        Exception: on a rank where `action` raised another kind of exception, that exception.
    """
    results: list[T] = []
    problem: Exception | None = None
    try:
        results.append(action())
    except Exception as error:  # of any kind: the other ranks must raise too
        problem = error
    raise_on_every_rank(problem, group)
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
    results: list[T] = []
    problem: Exception | None = None
    if group is None or group.rank() == 0:
        try:
            results.append(action())
        except Exception as error:  # of any kind: the other ranks must raise too
            problem = error
    sent = problem if problem is None or isinstance(problem, LongspanError) else LongspanError(error_text(problem))
    results, sent = broadcast_object((results, sent), group)
    raised = problem or sent
    if raised is not None:
        raise raised
    return results[0]


def raise_on_every_rank(
    problem: Exception | None,
    group: dist.ProcessGroup | None,
    what: str = "failed",
    failed: Sequence[bool] | None = None,
) -> None:
    """Raise on every rank if any rank has a problem. Collective, unless `failed` shows that no rank has one.

    Args:
        problem: this rank's.
        group: the ranks; None for one.
        what: describes the failure in the message: "rank 3 `what`: ...".
        failed: which ranks have a problem, in group order, if an earlier collective has shown it.

    Raises:
        LongspanError: the problem of the first rank that has one, naming that rank unless all have one.
        Exception: `problem`, if it is of another kind.
    """
    if failed is not None and not any(failed):
        return
    texts = gather_objects(None if problem is None else error_text(problem), group)
    ranks = [rank for rank, text in enumerate(texts) if text is not None]
    if problem is not None and (len(ranks) == len(texts) or not isinstance(problem, LongspanError)):
        raise problem
    if ranks:
        assert group is not None
        first = dist.get_global_rank(group, ranks[0])
        raise LongspanError(f"rank {first} {what}: {texts[ranks[0]]}") from problem


def error_text(error: Exception) -> str:
    """Return an error in one line, with its type unless it is a LongspanError."""
    text = str(error)
    return text if isinstance(error, LongspanError) else f"{type(error).__name__}: {(text.splitlines() or ['?'])[0]}"
