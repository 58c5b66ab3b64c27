"""Are the batches of all ranks alike? Compared at every forward, before anything in it could hang.

What decides which collectives run, and how large they are, is known to the host: names, shapes, dtypes, whether there
are labels, gradients or not. The hosts gather a digest of it at each forward. So do they with the content where it lies
on the CPU. On a GPU reading it would make the host wait, so there its digest is made on the device and travels in the
sum of the loss, with factors that cancel out where all ranks of a sequence group have the same; the host looks at that
sum when it has arrived anyway, at one of the next forwards, and tells the others in their next gather.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from longspan.comm.consistency import (
    ReplicaCheck,
    gather_numbers,
    host_group,
    is_on_cpu,
)
from longspan.comm.digests import digest_of_text
from longspan.comm.errors import raise_on_every_rank
from longspan.comm.objects import gather_objects
from longspan.compat.torch_api import not_compiled
from longspan.core.errors import LongspanError
from longspan.core.rank_differences import differences, listed, odd_ones
from longspan.hf.batch import SequenceInfo, device_digest, digest

if TYPE_CHECKING:
    from longspan.comm.mesh import SequenceSharding

THOROUGH = 3
"""First forwards in which the content is compared on the host also where it lies on a GPU: most faults show there."""

_APART = 1 << 20  # keeps what a tensor group has found apart from what a sequence group has
_REFUSED, _LATE = 1, 2  # flags of a rank in a gather


@dataclass(frozen=True)
class _Underway:
    """A comparison that travels with a loss: the sum of all ranks' digests (0 where they are alike), and my own."""

    forward: int
    values: Tensor
    arrived: torch.cuda.Event | None


class BatchCheck:
    """Compares, at each forward of a model, what the ranks call it with.

    Args:
        sp: the sharding; of more than one rank.
        forwards: so many first forwards are compared; None for all.
        replicas: whether weights are still alike, asked in the same gather.
    """

    def __init__(self, sp: SequenceSharding, forwards: int | None, replicas: ReplicaCheck) -> None:
        self.sp = sp
        self.left = forwards
        self.replicas = replicas
        self.group = host_group(sp) if forwards != 0 or replicas.every else None
        self.forward = 0
        self.mine: Tensor | None = None
        self.underway: deque[_Underway] = deque()

    @property
    def thorough(self) -> bool:
        """Whether the host may wait for a GPU in this forward."""
        return self.left != 0 and self.forward < THOROUGH

    @not_compiled
    def compare(self, model: nn.Module, batch: Mapping[str, Any], router: bool, problem: Exception | None) -> None:
        """Raise on every rank alike if any refuses its batch, or if batches differ. Collective, in every forward due.

        Args:
            model: about to run.
            batch: whole, or cut by `shard_batch`.
            router: whether the loss of routers is asked for.
            problem: why this rank refuses its batch, if it does.

        Raises:
            LongspanError: naming the ranks, and what differs.
        """
        self.mine = None
        weights = self.replicas.number(model)
        if self.left == 0 and problem is not None:
            raise problem
        if self.group is None or (self.left == 0 and not weights):
            return
        thorough = self.thorough
        self.forward += 1
        if self.left:
            self.left -= 1
        form, wide = _form(batch), _wide(model, batch, router)
        content = _content(batch, thorough)
        if content is None and problem is None:
            self.mine = _on_device(batch)
        flags = (_REFUSED if problem is not None else 0) | (_LATE if self._found_late() else 0)
        numbers = [flags, _number(wide), _number(form), content or 0, weights]
        rows = gather_numbers(numbers, self.group, torch.device("cpu"))
        self._refuse(rows, form, wide, problem)
        held = self.sp.tensor_size  # ranks that hold the same weights have the same place in their tensor group
        if any(len({row[4] for row in rows[i::held]}) > 1 for i in range(held)):
            self.replicas.refuse(model, self.group, held)

    def _refuse(
        self, rows: list[list[int]], form: dict[str, str], wide: dict[str, str], problem: Exception | None
    ) -> None:
        assert self.group is not None
        ranks = dist.get_process_group_ranks(self.group)
        seen = [(row[2], row[3]) for row in rows]
        same = self.sp.size * self.sp.tensor_size  # ranks that are given the same batch are neighbours
        groups = [range(first, first + same) for first in range(0, self.sp.job_size, same)]
        apart = next((group for group in groups if len({seen[i] for i in group}) > 1), None)
        if apart is not None:
            facts = gather_objects(form, self.group)
            found = differences([facts[i] for i in apart], [ranks[i] for i in apart])
            raise LongspanError(self._say_apart([ranks[i] for i in apart], [seen[i] for i in apart], listed(found)))
        raise_on_every_rank(problem, self.group, "refused its batch", [bool(row[0] & _REFUSED) for row in rows])
        if len({row[1] for row in rows}) > 1:
            found = differences(gather_objects(wide, self.group), ranks)
            raise LongspanError(f"every rank must call the model alike: {listed(found)}")
        if any(row[0] & _LATE for row in rows):
            self._refuse_late(ranks)

    def _say_apart(self, ranks: list[int], seen: list[Any], details: str) -> str:
        odd = odd_ones(seen)
        others, same = ([ranks[i] for i in range(len(ranks)) if (i in odd) == wrong] for wrong in (True, False))
        return (
            f"the ranks of a sequence group need the same full batch: ranks {', '.join(map(str, others))} were given "
            f"another one than ranks {', '.join(map(str, same))} ({details or 'alike in shape, of other values'}); "
            f"seed or shard the data loader by sp.data_rank (of {self.sp.data_size}), not by the process's rank"
        )

    # --- what travels with the loss

    @not_compiled
    def to_carry(self) -> Tensor | None:
        """This rank's summand for the loss's all-reduce, fp64 []; None where this forward's batch is compared already.

        Below 2^31 each, so that sums over ranks are exact, and in a sequence group they cancel out if all are alike.
        """
        if self.mine is None or self.sp.size * self.sp.tensor_size == 1:
            return None
        apart = self.mine * (1 if self.sp.rank else 1 - self.sp.size)
        if self.sp.tensor_size > 1:  # the loss is not summed over these
            more = self.mine * (1 if self.sp.tensor_rank else 1 - self.sp.tensor_size)
            dist.all_reduce(more, group=self.sp.mesh.get_group("tensor"))  # type: ignore[union-attr]
            apart = apart + more.abs() * _APART
        return apart

    @not_compiled
    def carried(self, total: Tensor) -> None:
        """Take the sum that came with a loss, without waiting for it."""
        if self.mine is None:
            return
        values = torch.stack([total.detach(), self.mine])
        arrived = None
        if values.is_cuda:
            host = torch.empty(2, dtype=values.dtype, pin_memory=True)
            host.copy_(values, non_blocking=True)
            values, arrived = host, torch.cuda.Event()
            arrived.record()
        self.underway.append(_Underway(self.forward, values, arrived))
        self.mine = None

    def _found_late(self) -> bool:
        """Look at the sums that have arrived; whether one of them says that batches differed."""
        while self.underway:
            first = self.underway[0]
            if first.arrived is not None and not first.arrived.query():
                return False
            if first.values[0] != 0:
                return True
            self.underway.popleft()
        return False

    def _refuse_late(self, ranks: list[int]) -> None:
        assert self.group is not None
        while self.underway:  # the sums are the same on every rank, so all stop at the same forward
            first = self.underway.popleft()
            if first.arrived is not None:
                first.arrived.synchronize()
            if first.values[0] != 0:
                break
        else:
            return
        seen = gather_objects((first.forward, float(first.values[1])), self.group)
        same = self.sp.size * self.sp.tensor_size
        for start in range(0, self.sp.job_size, same):
            group = slice(start, start + same)
            if len(set(seen[group])) > 1:
                text = self._say_apart(
                    ranks[group], seen[group], f"{self.forward - first.forward} forwards before this one"
                )
                raise LongspanError(text)


def _number(facts: Mapping[str, str]) -> int:
    return digest_of_text(json.dumps(facts, sort_keys=True))


def _form(batch: Mapping[str, Any]) -> dict[str, str]:
    """What must be alike in a sequence group, but for the values of tensors."""
    return {f"`{key}`": _format_value(value) for key, value in batch.items() if value is not None}


def _format_value(value: Any) -> str:
    if isinstance(value, Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        return f"{kind} {list(value.shape)}"
    if isinstance(value, SequenceInfo):  # the parts differ, what they were cut from must not
        return f"cut from {value.describe()}"
    if isinstance(value, bool | int | float | str):
        return repr(value)
    return type(value).__name__


def _wide(model: nn.Module, batch: Mapping[str, Any], router: bool) -> dict[str, str]:
    """What must be alike on all ranks, of other replicas too: it decides which collectives they run together."""
    items = batch.get("num_items_in_batch")
    labels = batch.get("labels") is not None or batch.get("shift_labels") is not None
    facts = {
        "a batch's labels": "given" if labels else "missing",
        "num_items_in_batch": _format_number(items),
        "the router loss": "asked for" if router else "not asked for",
        "the model's mode": "training" if model.training else "evaluation",
        "torch.is_grad_enabled()": str(torch.is_grad_enabled()),
    }
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            facts[f"autocast of {device}"] = str(torch.get_autocast_dtype(device))
    return facts


def _format_number(items: Any) -> str:
    if items is None or (isinstance(items, Tensor) and items.device.type != "cpu"):
        return "given" if items is not None else "missing"
    return str(float(items))


def _content(batch: Mapping[str, Any], wait: bool) -> int | None:
    """A digest of the values; None where the host would have to wait for them, and shall not."""
    info = batch.get("longspan")
    if isinstance(info, SequenceInfo):
        if info.digest is not None or info.device_digest is None:
            return info.digest or 0
        return int(info.device_digest) if wait else None
    return digest(batch) if wait or is_on_cpu(batch) else None


def _on_device(batch: Mapping[str, Any]) -> Tensor:
    """The digest of the values where they lie, without waiting: fp64 [], an integer below 2^31."""
    info = batch.get("longspan")
    given = info.device_digest if isinstance(info, SequenceInfo) else device_digest(batch)
    assert given is not None
    return ((given >> 33) & 0x7FFFFFFF).double()
