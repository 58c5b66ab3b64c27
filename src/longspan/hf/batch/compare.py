"""Compare the batches of all ranks at every forward, before it could hang.

The host knows which collectives run and how large they are: names, shapes, dtypes, whether there are labels and
gradients. The hosts gather a digest of these at each forward, and of the values if they are on the CPU. Reading values
on a GPU makes the host wait, and pixels are many, so they are compared in the first three forwards, and in every
hundredth.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from longspan.comm.agree import Facts, agree
from longspan.comm.mesh import SequenceSharding
from longspan.comm.weights import ReplicaCheck, is_on_cpu
from longspan.compat.torch_api import not_compiled
from longspan.core.errors import LongspanError
from longspan.core.formatting import differences, listed, odd_ones
from longspan.hf.batch.shard import WIDTH, has_labels
from longspan.hf.model.vision import PIXEL_KEYS

FIRST, EVERY = 3, 100
"""The host waits for values on a GPU and compares them in the `FIRST` forwards, where most faults appear, and then in
each `EVERY`-th.
"""

_VALUES = "the values"


class BatchCheck:
    """Compare the ranks' batches in the first `forwards` of a model, None for all; `replicas` compares weights."""

    def __init__(self, sp: SequenceSharding, forwards: int | None, replicas: ReplicaCheck) -> None:
        self.sp, self.left, self.replicas, self.forward = sp, forwards, replicas, 0
        self.group = sp.host_group if forwards != 0 else None

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
        if self.left == 0:
            if problem is not None:
                raise problem
            self.replicas.compare(model, self.sp)
            return
        # The host must not wait for a GPU, nor read gigabytes of pixels each time.
        small = {key: x for key, x in batch.items() if self.thorough or key not in PIXEL_KEYS}
        values = {_VALUES: str(_digest(small))} if self.thorough or is_on_cpu(small) else {}
        shared = {f"`{key}`": _format(value) for key, value in batch.items() if value is not None}
        asked = batch.get(WIDTH)
        usable = asked is None or (type(asked) is int and asked == sharing.size)
        cut = problem is not None and "longspan" in batch  # the parts of one batch differ
        agree(
            self.group,
            Facts(_call_facts(model, batch, router), _called_differently),
            problem,
            what="refused its batch",
            shared=None if cut else Facts({**shared, **values}, self._batches_differ),
            neighbours=sharing.model_size if usable else 0,  # 0: nobody shares this batch
        )
        self.forward += 1
        if self.left:
            self.left -= 1
        self.replicas.compare(model, self.sp)

    def _batches_differ(self, every: list[dict[str, str]], ranks: list[int]) -> LongspanError:
        odd = odd_ones([json.dumps(each, sort_keys=True) for each in every])
        others, same = (
            ", ".join(str(rank) for i, rank in enumerate(ranks) if (i in odd) == wrong) for wrong in (True, False)
        )
        structures = [{key: text for key, text in each.items() if key != _VALUES} for each in every]
        details = listed(differences(structures, ranks)) or "same shapes, other values"
        return LongspanError(
            f"the ranks of a sequence group need the same full batch: ranks {others} were given another one than ranks "
            f"{same} ({details}); seed or shard the data loader by sp.data_rank (of {self.sp.data_size}), not by the "
            f"process's rank",
            code="LS301",
        )


def _called_differently(every: list[dict[str, str]], ranks: list[int]) -> LongspanError:
    return LongspanError(f"every rank must call the model in the same way: {listed(differences(every, ranks))}")


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
