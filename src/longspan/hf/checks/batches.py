"""Compare the batches of all ranks at every forward, before it could hang.

The host knows which collectives run and how large they are: names, shapes, dtypes, whether there are labels and
gradients. The hosts gather a digest of these at each forward, and of the values if they are on the CPU.

Reading values on a GPU would make the host wait. Their digest is computed on the device and added to the all-reduce of
the loss, with factors that cancel if all ranks of a sequence group have the same values. The host reads that sum at one
of the next forwards, once it has arrived, and reports a difference in the next gather.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from longspan.comm.consistency import ReplicaCheck, digest_of_text, gather_numbers, is_on_cpu
from longspan.comm.mesh import SequenceSharding
from longspan.comm.objects import gather_objects, raise_on_every_rank
from longspan.compat.torch_api import not_compiled
from longspan.core.errors import LongspanError
from longspan.core.formatting import differences, listed, odd_ones
from longspan.hf.batch import WIDTH, SequenceInfo, device_digest, digest

THOROUGH = 3
"""First forwards in which the host waits for values on a GPU and compares them: most faults appear there."""

_APART = 1 << 20  # separates the difference within a tensor group from that within a sequence group
_REFUSED, _LATE = 1, 2  # flags of a rank in a gather


@dataclass(frozen=True)
class _Pending:
    """A comparison in a loss's all-reduce: the sum of all ranks' digests (0 if they are equal), and my own."""

    forward: int
    values: Tensor
    arrived: torch.cuda.Event | None
    widths: tuple[int, ...]  # by rank: how many ranks share its batch


class BatchCheck:
    """Compare the ranks' batches in the first `forwards` of a model, None for all; `replicas` compares weights with
    them.
    """

    def __init__(self, sp: SequenceSharding, forwards: int | None, replicas: ReplicaCheck) -> None:
        self.sp, self.left, self.replicas, self.forward = sp, forwards, replicas, 0
        self.group = sp.host_group if forwards != 0 or replicas.every else None
        self.sharing = sp  # the sharding of the forward in progress
        self.widths = (sp.size,) * sp.job_size
        self.mine: Tensor | None = None  # digest of the batch, if the loss's all-reduce compares it
        self.pending: deque[_Pending] = deque()

    @property
    def thorough(self) -> bool:
        """Whether the host may wait for a GPU in this forward."""
        return self.left != 0 and self.forward < THOROUGH

    @not_compiled
    def compare(
        self,
        model: nn.Module,
        batch: Mapping[str, Any],
        router: bool,
        problem: Exception | None,
        sharing: SequenceSharding | None = None,
    ) -> None:
        """Raise on every rank if any rank refuses its batch, by its `problem`, or if batches differ. Collective.

        `batch` is full, or sharded by `shard_batch`; `router`: whether the router loss is requested; `sharing`: the
        sharding of the ranks that share this rank's batch, by default a sequence group.
        """
        self.mine, self.sharing = None, sharing or self.sp
        weights = self.replicas.number(model)
        if self.left == 0 and problem is not None:
            raise problem
        if self.group is None or (self.left == 0 and not weights):
            return
        thorough = self.thorough
        self.forward += 1
        if self.left:
            self.left -= 1
        # What must be equal in a sequence group, except the values of tensors, and on all ranks.
        structure = {f"`{key}`": _format(value) for key, value in batch.items() if value is not None}
        call_facts = _call_facts(model, batch, router)
        if self.sharing is not self.sp:
            structure[f"`{WIDTH}`"] = str(self.sharing.size)
        content = _content(batch, thorough)
        if content is None and problem is None and _has_labels(batch):  # otherwise no all-reduce would carry it
            self.mine = _on_device(batch)
        flags = (_REFUSED if problem is not None else 0) | (_LATE if self._found_difference() else 0)
        width = 0 if batch.get(WIDTH) is not None else self.sharing.size  # 0: the one it asks for cannot be used
        numbers = [flags, _number(call_facts), _number(structure), content or 0, weights, width]
        rows = gather_numbers(numbers, self.group, torch.device("cpu"))
        self.widths = tuple(row[5] for row in rows)
        self._raise_differences(rows, structure, call_facts, problem)
        held = self.sp.tensor_size  # ranks `tensor_size` apart hold the same weights
        if any(len({row[4] for row in rows[i::held]}) > 1 for i in range(held)):
            self.replicas.refuse(model, self.group, held)

    def _raise_differences(
        self, rows: list[list[int]], structure: dict[str, str], call_facts: dict[str, str], problem: Exception | None
    ) -> None:
        assert self.group is not None
        ranks = dist.get_process_group_ranks(self.group)
        batches = [(row[5], row[2], row[3]) for row in rows]
        group = self._unequal_group(batches, self.widths)
        if group is not None:
            details = listed(differences(gather_objects(structure, self.group)[group], ranks[group]))
            raise LongspanError(self._batch_error(ranks[group], batches[group], details), code="LS301")
        raise_on_every_rank(problem, self.group, "refused its batch", [bool(row[0] & _REFUSED) for row in rows])
        if len({row[1] for row in rows}) > 1:
            details = listed(differences(gather_objects(call_facts, self.group), ranks))
            raise LongspanError(f"every rank must call the model in the same way: {details}")
        if any(row[0] & _LATE for row in rows):
            self._raise_late(ranks)

    def _unequal_group(self, batches: list[Any], widths: tuple[int, ...]) -> slice | None:
        """Return the first group of ranks that share a batch, by the widest of them, and have different ones."""
        tensor = self.sp.tensor_size
        for width in sorted(set(widths) - {0}, reverse=True):  # ranks that share a batch are neighbours
            for first in range(0, len(widths), width * tensor):
                group = slice(first, first + width * tensor)
                if width in widths[group] and len(set(batches[group])) > 1:
                    return group
        return None

    def _batch_error(self, ranks: list[int], batches: list[Any], details: str) -> str:
        odd = odd_ones(batches)
        others, same = ([ranks[i] for i in range(len(ranks)) if (i in odd) == wrong] for wrong in (True, False))
        return (
            f"the ranks of a sequence group need the same full batch: ranks {', '.join(map(str, others))} were given "
            f"another one than ranks {', '.join(map(str, same))} ({details or 'same shapes, other values'}); "
            f"seed or shard the data loader by sp.data_rank (of {self.sp.data_size}), not by the process's rank"
        )

    # --- the comparison in the all-reduce of the loss

    @not_compiled
    def to_carry(self) -> Tensor | None:
        """Return this rank's term for the loss's all-reduce, fp64 []; None if this batch is compared already.

        Terms are below 2^31, so sums over ranks are exact. Equal batches of a sequence group cancel.
        """
        if self.mine is None or self.sp.size * self.sp.tensor_size == 1:
            return None
        term = self.mine * (1 if self.sharing.rank else 1 - self.sharing.size)
        if self.sp.tensor_size > 1:  # the loss is not summed over the tensor group
            difference = self.mine * (1 if self.sp.tensor_rank else 1 - self.sp.tensor_size)
            dist.all_reduce(difference, group=self.sp.mesh.get_group("tensor"))  # type: ignore[union-attr]
            term = term + difference.abs() * _APART
        return term

    @not_compiled
    def carried(self, total: Tensor) -> None:
        """Store the sum from a loss's all-reduce, without waiting for it."""
        if self.mine is None:
            return
        values = torch.stack([total.detach(), self.mine])
        arrived = None
        if values.is_cuda:
            host = torch.empty(2, dtype=values.dtype, pin_memory=True)
            host.copy_(values, non_blocking=True)
            values, arrived = host, torch.cuda.Event()
            arrived.record()
        self.pending.append(_Pending(self.forward, values, arrived, self.widths))
        self.mine = None

    def _found_difference(self) -> bool:
        """Return whether a sum that has arrived shows different batches."""
        while self.pending:
            first = self.pending[0]
            if first.arrived is not None and not first.arrived.query():
                return False
            if first.values[0] != 0:
                return True
            self.pending.popleft()
        return False

    def _raise_late(self, ranks: list[int]) -> None:
        assert self.group is not None
        while self.pending:  # the sums are the same on every rank, so all stop at the same forward
            first = self.pending.popleft()
            if first.arrived is not None:
                first.arrived.synchronize()
            if first.values[0] != 0:
                break
        else:
            return
        batches = gather_objects((first.forward, float(first.values[1])), self.group)
        group = self._unequal_group(batches, first.widths)
        if group is not None:
            ago = f"{self.forward - first.forward} forwards before this one"
            raise LongspanError(self._batch_error(ranks[group], batches[group], ago), code="LS301")


def _number(facts: Mapping[str, str]) -> int:
    return digest_of_text(json.dumps(facts, sort_keys=True))


def _format(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, SequenceInfo):  # shards differ, their source must not
        return f"cut from {value!r}"
    if isinstance(value, bool | int | float | str):
        return repr(value)
    return type(value).__name__


def _call_facts(model: nn.Module, batch: Mapping[str, Any], router: bool) -> dict[str, str]:
    """Return what must be equal on all ranks, also across replicas, as it decides their joint collectives."""
    facts = {
        "a batch's labels": "given" if _has_labels(batch) else "missing",
        "num_items_in_batch": _format_number(batch.get("num_items_in_batch")),
        "the router loss": "asked for" if router else "not asked for",
        "the model's mode": "training" if model.training else "evaluation",
        "torch.is_grad_enabled()": str(torch.is_grad_enabled()),
    }
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            facts[f"autocast of {device}"] = str(torch.get_autocast_dtype(device))
    return facts


def _has_labels(batch: Mapping[str, Any]) -> bool:
    return batch.get("labels") is not None or batch.get("shift_labels") is not None


def _format_number(items: Any) -> str:
    if items is None:
        return "missing"
    return "given" if isinstance(items, Tensor) and items.device.type != "cpu" else str(float(items))


def _content(batch: Mapping[str, Any], wait: bool) -> int | None:
    """Return a digest of the values; None if they are on a GPU and the host must not wait."""
    info = batch.get("longspan")
    if isinstance(info, SequenceInfo):
        return int(info.digest or 0) if wait or not isinstance(info.digest, Tensor) else None
    return digest(batch) if wait or is_on_cpu(batch) else None


def _on_device(batch: Mapping[str, Any]) -> Tensor:
    """Return the digest of the values on their device, without waiting: fp64 [], an integer below 2^31."""
    info = batch.get("longspan")
    given = info.digest if isinstance(info, SequenceInfo) else device_digest(batch)
    assert isinstance(given, Tensor)
    return ((given >> 33) & 0x7FFFFFFF).double()
