"""Compare the batches of all ranks at every forward, before it could hang.

The host knows which collectives run and how large they are: names, shapes, dtypes, whether there are labels and
gradients. The hosts gather a digest of these at each forward, and of the values if they are on the CPU. Reading values
on a GPU makes the host wait, so they are compared in the first three forwards, and in every hundredth.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
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
from longspan.hf.batch.shard import WIDTH, has_labels

FIRST, EVERY = 3, 100
"""The host waits for values on a GPU and compares them in the `FIRST` forwards, where most faults appear, and then in
each `EVERY`-th.
"""


class BatchCheck:
    """Compare the ranks' batches in the first `forwards` of a model, None for all; `replicas` compares weights with
    them.
    """

    def __init__(self, sp: SequenceSharding, forwards: int | None, replicas: ReplicaCheck) -> None:
        self.sp, self.left, self.replicas, self.forward = sp, forwards, replicas, 0
        self.group = sp.host_group if forwards != 0 or replicas.every else None

    @property
    def thorough(self) -> bool:
        """Whether the host may wait for a GPU in this forward."""
        return self.left != 0 and (self.forward < FIRST or (self.forward + 1) % EVERY == 0)

    @not_compiled
    def compare(
        self,
        model: nn.Module,
        batch: Mapping[str, Any],
        router: bool,
        problem: Exception | None,
        sharing: SequenceSharding,
    ) -> None:
        """Raise on every rank if any rank refuses its batch, by its `problem`, or if batches differ. Collective.

        `batch` is whole; `router`: whether the router loss is requested; `sharing`: the sharding of the ranks that
        share this rank's batch.
        """
        weights = self.replicas.number(model)
        if self.left == 0 and problem is not None:
            raise problem
        if self.group is None or (self.left == 0 and not weights):
            return
        content = _digest(batch) if self.thorough or is_on_cpu(batch) else 0  # 0: the host must not wait for a GPU
        self.forward += 1
        if self.left:
            self.left -= 1
        # What must be equal in a sequence group, except the values of tensors, and on all ranks.
        structure = {f"`{key}`": _format(value) for key, value in batch.items() if value is not None}
        call_facts = _call_facts(model, batch, router)
        asked = batch.get(WIDTH)
        usable = asked is None or (type(asked) is int and asked == sharing.size)
        width = sharing.size if usable else 0  # 0: nobody shares this batch
        failed = 0 if problem is None else 2 if "longspan" in batch else 1
        numbers = [failed, _number(call_facts), _number(structure), content, weights, width]
        rows = gather_numbers(numbers, self.group, torch.device("cpu"))
        self._raise_differences(rows, structure, call_facts, problem)
        held = self.sp.tensor_size  # ranks `tensor_size` apart hold the same weights
        if any(len({row[4] for row in rows[i::held]}) > 1 for i in range(held)):
            self.replicas.refuse(model, self.group, held)

    def _raise_differences(
        self, rows: list[list[int]], structure: dict[str, str], call_facts: dict[str, str], problem: Exception | None
    ) -> None:
        assert self.group is not None
        ranks = dist.get_process_group_ranks(self.group)
        # First: parts of one batch differ.
        raise_on_every_rank(problem, self.group, "refused its batch", [row[0] == 2 for row in rows])
        batches = [(row[5], row[2], row[3]) for row in rows]
        group = self._unequal_group(batches, tuple(row[5] for row in rows))
        if group is not None:
            details = listed(differences(gather_objects(structure, self.group)[group], ranks[group]))
            raise LongspanError(self._batch_error(ranks[group], batches[group], details), code="LS301")
        raise_on_every_rank(problem, self.group, "refused its batch", [bool(row[0]) for row in rows])
        if len({row[1] for row in rows}) > 1:
            details = listed(differences(gather_objects(call_facts, self.group), ranks))
            raise LongspanError(f"every rank must call the model in the same way: {details}")

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


def _number(facts: Mapping[str, str]) -> int:
    return digest_of_text(json.dumps(facts, sort_keys=True))


def _format(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, bool | int | float | str):
        return repr(value)
    return type(value).__name__


def _call_facts(model: nn.Module, batch: Mapping[str, Any], router: bool) -> dict[str, str]:
    """Return what must be equal on all ranks, also across replicas, as it decides their joint collectives."""
    facts = {
        "a batch's labels": "given" if has_labels(batch) else "missing",
        "num_items_in_batch": _format_number(batch.get("num_items_in_batch")),
        "the router loss": "asked for" if router else "not asked for",
        "the model's mode": "training" if model.training else "evaluation",
        "torch.is_grad_enabled()": str(torch.is_grad_enabled()),
    }
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            facts[f"autocast of {device}"] = str(torch.get_autocast_dtype(device))
    return facts


def _format_number(items: Any) -> str:
    if items is None:
        return "missing"
    return "given" if isinstance(items, Tensor) and items.device.type != "cpu" else str(float(items))


def _digest(batch: Mapping[str, Any]) -> int:
    """Return a checksum of a batch: names, shapes, dtypes and bytes of its tensors, and its plain values."""
    crc = 0
    for key, value in sorted(batch.items()):
        if isinstance(value, Tensor):
            x = value.detach().cpu().contiguous()
            crc = zlib.crc32(f"{key} {tuple(x.shape)} {x.dtype}".encode(), crc)
            crc = zlib.crc32(x.view(-1).view(torch.uint8).numpy().data, crc)
        elif isinstance(value, bool | int | float | str):
            crc = zlib.crc32(f"{key} {value!r}".encode(), crc)
    return crc
