"""Send Python objects between ranks; raise on every rank if any rank fails, as the others would wait for ever.

torch's own object collectives (`broadcast_object_list`, `all_gather_object`) return while a thread of gloo may still
hold their last tensor. A script that ends right then aborts ("terminate called without an active exception"): that
thread needs the interpreter to free the tensor. So every call here waits until gloo has released its tensors.
"""

from __future__ import annotations

import pickle
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.core.errors import LongspanError

T = TypeVar("T")

_RELEASE_S = 5.0


def gather_objects(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Return every rank's `value`, in rank order. Collective; `group` is None for one rank."""
    if group is None or group.size() == 1:
        return [value]
    gathered, sent = _gather(pickle.dumps(value), group)
    _wait_for_release(sent)
    return [pickle.loads(data) for data in gathered]


def broadcast_object(value: Any, group: dist.ProcessGroup | None) -> Any:
    """Return the `value` of the group's first rank on every rank. Collective; `group` is None for one rank."""
    if group is None or group.size() == 1:
        return value
    first = group.rank() == 0
    data, sent = _broadcast(pickle.dumps(value) if first else b"", group)
    _wait_for_release(sent)
    return value if first else pickle.loads(data)


def _gather(data: bytes, group: dist.ProcessGroup) -> tuple[list[bytes], list[weakref.ref[Tensor]]]:
    size = torch.tensor([len(data)], device=_device(group))
    sizes = [torch.empty_like(size) for _ in range(group.size())]
    dist.all_gather(sizes, size, group=group)
    lengths = [int(x) for x in sizes]
    padded = torch.frombuffer(bytearray(data.ljust(max(lengths))), dtype=torch.uint8).to(size.device)
    received = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(received, padded, group=group)
    gathered = [_bytes(x[:n]) for x, n in zip(received, lengths, strict=True)]
    return gathered, [weakref.ref(x) for x in (*sizes, size, padded, *received)]


def _broadcast(data: bytes, group: dist.ProcessGroup) -> tuple[bytes, list[weakref.ref[Tensor]]]:
    size = torch.tensor([len(data)], device=_device(group))
    dist.broadcast(size, group_src=0, group=group)
    x = torch.frombuffer(bytearray(data or bytes(int(size))), dtype=torch.uint8).to(size.device)
    dist.broadcast(x, group_src=0, group=group)
    return _bytes(x), [weakref.ref(size), weakref.ref(x)]


def _device(group: dist.ProcessGroup) -> torch.device:
    """Return the CPU if the group supports it, else this rank's GPU."""
    only_gpu = dist.get_backend(group) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if only_gpu else torch.device("cpu")


def _bytes(x: Tensor) -> bytes:
    return x.cpu().numpy().tobytes()


def _wait_for_release(sent: list[weakref.ref[Tensor]]) -> None:
    """Wait until gloo has released the tensors that were sent, at most `_RELEASE_S` seconds."""
    deadline = time.monotonic() + _RELEASE_S
    while any(x() is not None for x in sent) and time.monotonic() < deadline:
        time.sleep(0.0001)


# ---------------------------------------------------------------------------------------------------------------------
# Errors.


def on_every_rank(action: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """Run `action` on every rank and return this rank's result; if it raises on any rank, raise on all. Collective.

    Raises:
        LongspanError: as `raise_on_every_rank`.
        Exception: on a rank where `action` raised another kind of exception, that exception.
    """
    results, problem = attempted(action)
    raise_on_every_rank(problem, group)
    return results[0]


def attempted(action: Callable[[], T]) -> tuple[list[T], Exception | None]:
    """Run `action`; return its result in a list, or its error, of any kind: the other ranks must raise too."""
    try:
        return [action()], None
    except Exception as error:
        return [], error


def on_first_rank(action: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """Run `action` on the group's first rank and return its result on all; if it raises, raise on all. Collective.

    Args:
        action: its result is pickled; it may raise anything.
        group: the ranks; None for one.

    Raises:
        LongspanError: on every rank, of the same subclass.
        Exception: on the first rank, if `action` raised another kind of exception.
    """
    results, problem = attempted(action) if group is None or group.rank() == 0 else ([], None)
    sent = problem if problem is None or isinstance(problem, LongspanError) else LongspanError(error_text(problem))
    everywhere: tuple[list[T], LongspanError | None] = broadcast_object((results, sent), group)
    results, sent = everywhere
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
