"""Record what ranks post, and match it as NCCL would.

NCCL has no tags: in one communicator, the k-th message that a rank sends to another matches the k-th receive that the
other has posted from it. Messages that were posted together (`batch_isend_irecv`) are one group call, which ends when
the last of them is matched. gloo, which the tests use, matches by tags and sends eagerly, so it hides an order that
hangs, or mixes up blocks, on GPUs.

`record` records every step of one rank; `faults` simulates the steps of all ranks. A rank starts a step after its
previous one has ended, whatever the communicator. NCCL is less strict (a stream per communicator, the host waits for
neither), but a step there waits only for earlier steps of the same rank, so a schedule that ends here ends there.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from tests.counting import GATHERS, SCATTERS

Group = tuple[str, tuple[int, ...]]
"""A communicator: its description and its ranks in the world. Names differ from rank to rank, these do not."""


@dataclass(frozen=True)
class Message:
    """One posted tensor."""

    sends: bool  # whether it is a send; else a receive
    peer: int  # the other rank, by its number in the world
    bytes: int  # its size
    dtype: str  # of its elements
    tag: int  # ignored by backends that match by order; matched messages must have the same

    def __str__(self) -> str:
        way = "send to" if self.sends else "receive from"
        return f"{way} {self.peer} ({self.bytes} bytes, {self.dtype}, tag {self.tag})"


@dataclass(frozen=True)
class Step:
    """One group call of messages, or one collective."""

    group: Group  # the communicator
    messages: tuple[Message, ...] = ()  # in the order in which they were posted; empty for a collective
    collective: str = ""  # its name with the facts that must be equal on all ranks
    sends: tuple[int, ...] = ()  # bytes to every rank of the group, for an All-to-All
    receives: tuple[int, ...] = ()  # bytes from every rank of the group, likewise

    def __str__(self) -> str:
        return f"{self.collective or '; '.join(map(str, self.messages))} in {self.group[0]}{list(self.group[1])}"


# --- recording


def _group_of(group: dist.ProcessGroup | None) -> Group:
    group = group or dist.group.WORLD
    assert group is not None
    return group.group_desc, tuple(dist.get_process_group_ranks(group))


def _collective(name: str, group: Any, x: Tensor) -> Step:
    return Step(_group_of(group), collective=f"{name} of {x.nbytes} bytes, {x.dtype}")


@contextlib.contextmanager
def record() -> Iterator[list[Step]]:
    """Record what the calling rank starts through `torch.distributed`, in order."""
    log: list[Step] = []
    names = ("batch_isend_irecv", "P2POp", "isend", "irecv", "all_to_all_single", "all_reduce", "all_gather")
    names += ("broadcast", "barrier", "reduce", *GATHERS, *SCATTERS)
    originals = {name: getattr(dist, name) for name in names if hasattr(dist, name)}
    ours: dict[str, Any] = {}

    def message(op: Any) -> Message:
        x = op.tensor
        return Message(op.op is originals["isend"], op.peer, x.nbytes, str(x.dtype).removeprefix("torch."), op.tag)

    def batch_isend_irecv(ops: list[Any]) -> Any:
        log.append(Step(_group_of(ops[0].group), tuple(map(message, ops))))
        return originals["batch_isend_irecv"](ops)

    def p2p_op(op: Any, *args: Any, **kw: Any) -> Any:
        # P2POp accepts torch's own functions alone.
        return originals["P2POp"](next((originals[n] for n in ("isend", "irecv") if op is ours[n]), op), *args, **kw)

    def single(name: str) -> Any:
        def posted(tensor: Tensor, peer: Any = None, group: Any = None, tag: int = 0, **kw: Any) -> Any:
            other = kw.get("group_dst" if name == "isend" else "group_src")
            op = originals["P2POp"](originals[name], tensor, peer, group, tag, other)
            log.append(Step(_group_of(group), (message(op),)))
            return originals[name](tensor, peer, group, tag, **kw)

        return posted

    def all_to_all_single(
        out: Tensor, x: Tensor, recv: Any = None, send: Any = None, group: Any = None, **kw: Any
    ) -> Any:
        size = dist.get_world_size(group)
        cut = [[t.shape[0] // size] * size if rows is None else rows for t, rows in ((x, send), (out, recv))]
        row = x[:1].nbytes if x.shape[0] else out[:1].nbytes
        sends, receives = (tuple(row * n for n in rows) for rows in cut)
        log.append(Step(_group_of(group), (), f"all_to_all, {x.dtype}", sends, receives))
        return originals["all_to_all_single"](out, x, recv, send, group=group, **kw)

    def plain(name: str, position: int) -> Any:
        def run(*args: Any, **kw: Any) -> Any:
            tensors = [
                *args,
                *(kw[k] for k in ("output", "output_tensor", "input", "input_tensor", "tensor") if k in kw),
            ]
            x = tensors[position]
            log.append(_collective(name, kw.get("group"), x))
            return originals[name](*args, **kw)

        return run

    def barrier(group: Any = None, *args: Any, **kw: Any) -> Any:
        log.append(Step(_group_of(group), collective="barrier"))
        return originals["barrier"](group, *args, **kw)

    ours |= {"batch_isend_irecv": batch_isend_irecv, "P2POp": p2p_op, "barrier": barrier}
    ours |= {name: single(name) for name in ("isend", "irecv")} | {"all_to_all_single": all_to_all_single}
    ours |= {name: plain(name, 0) for name in ("all_reduce", "broadcast", "reduce", *GATHERS) if name in originals}
    ours |= {name: plain(name, 1) for name in ("all_gather", *SCATTERS) if name in originals}
    try:
        for name, function in ours.items():
            setattr(dist, name, function)
        yield log
    finally:
        for name, function in originals.items():
            setattr(dist, name, function)


# --- matching

At = tuple[int, int]
"""A rank and the number of its step."""


def faults(programs: Sequence[Sequence[Step]]) -> list[str]:
    """Return what would hang or be mixed up if messages were matched by order alone.

    Args:
        programs: the steps of every rank, by its number in the world.
    """
    partners: dict[At, set[At]] = defaultdict(set)
    found = [*_match_messages(programs, partners), *_match_collectives(programs, partners)]
    return found or _play(programs, partners)


def _match_messages(programs: Sequence[Sequence[Step]], partners: dict[At, set[At]]) -> Iterator[str]:
    lines: dict[tuple[Group, int, int], tuple[list[Any], list[Any]]] = defaultdict(lambda: ([], []))
    for rank, program in enumerate(programs):
        for number, step in enumerate(program):
            for m in step.messages:
                ends = (rank, m.peer) if m.sends else (m.peer, rank)
                lines[step.group, *ends][not m.sends].append(((rank, number), m))
    for (group, source, target), (sends, receives) in lines.items():
        line = f"{source} -> {target} in {group[0]}"
        for k, (send, receive) in enumerate(itertools.zip_longest(sends, receives)):
            if send is None or receive is None:
                who, alone = (source, send) if receive is None else (target, receive)
                yield f"{line}: message {k} has no other side: rank {who}, step {alone[0][1]}: {alone[1]}"
                continue
            one, other = (((m.bytes, m.dtype, m.tag), at) for at, m in (send, receive))
            if one[0] != other[0]:
                yield f"{line}: message {k} is {one[0]} where it is sent, {other[0]} where it is received"
            partners[one[1]].add(other[1])
            partners[other[1]].add(one[1])


def _match_collectives(programs: Sequence[Sequence[Step]], partners: dict[At, set[At]]) -> Iterator[str]:
    by_group: dict[Group, dict[int, list[tuple[At, Step]]]] = defaultdict(lambda: defaultdict(list))
    for rank, program in enumerate(programs):
        for number, step in enumerate(program):
            if step.collective:
                by_group[step.group][rank].append(((rank, number), step))
    for group, of_rank in by_group.items():
        for k, each in enumerate(itertools.zip_longest(*(of_rank[rank] for rank in group[1]))):
            there = [one for one in each if one is not None]
            names = sorted({step.collective for _, step in there} | ({"nothing"} if None in each else set()))
            if len(names) > 1:
                yield f"{group[0]}{list(group[1])}: collective {k} is {' and '.join(names)}"
                continue
            yield from _match_parts(group, k, [step for _, step in there])
            for at, _ in there:
                partners[at] |= {other for other, _ in there} - {at}


def _match_parts(group: Group, k: int, steps: list[Step]) -> Iterator[str]:
    """Check that the parts of an all-to-all have the sizes that their receivers expect."""
    if any(step.sends for step in steps):
        for (i, one), (j, other) in itertools.product(enumerate(steps), repeat=2):
            if one.sends[j] != other.receives[i]:
                yield (
                    f"{group[0]}{list(group[1])}: collective {k}: {one.sends[j]} bytes from {group[1][i]} to "
                    f"{group[1][j]}, which expects {other.receives[i]}"
                )


def _play(programs: Sequence[Sequence[Step]], partners: dict[At, set[At]]) -> list[str]:
    """Run every rank as far as possible; return which ranks then wait for which."""
    now = [0] * len(programs)
    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(programs):
            while now[rank] < len(program) and all(now[r] >= n for r, n in partners[rank, now[rank]]):
                now[rank] += 1
                moved = True
    return [
        f"rank {rank} waits for {sorted(r for r, n in partners[rank, at] if now[r] < n)} in step {at}: {program[at]}"
        for rank, (program, at) in enumerate(zip(programs, now, strict=True))
        if at < len(program)
    ]
