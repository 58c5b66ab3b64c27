"""What the planner needs of this machine, and `memory="auto"`, which asks the planner."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import PreTrainedModel

from longspan.comm.consistency import gather_numbers
from longspan.comm.mesh import SequenceSharding
from longspan.core.experts import Experts
from longspan.core.memory import Memory
from longspan.core.parallel import TensorStyle
from longspan.plan.from_model import shape_of_model
from longspan.plan.hardware import CATALOGUE, Hardware, read_hardware
from longspan.plan.job import Job
from longspan.plan.options import choose_memory, fixed_options
from longspan.plan.tower import Pictures

PROCESS_BYTES = 1 << 30
"""Bytes of Python and its libraries on a CPU, or of a CUDA context on a GPU, which no plan counts."""


def device_memory(device: torch.device, ranks_here: int = 1) -> int:
    """Return the bytes of the GPU's memory, or on CPU of a rank's part of the machine's.

    `ranks_here`: ranks on this machine; torchrun's LOCAL_WORLD_SIZE wins.
    """
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE") or ranks_here)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // max(1, ranks_here)


def hardware_of(device: torch.device, rank_bytes: float | None = None, ranks_here: int = 1) -> Hardware:
    """Return this device for the planner: from the catalogue by its name, else as an H100, with its own memory.

    `rank_bytes`: memory of a rank; by default the device's, without `PROCESS_BYTES`.
    """
    if rank_bytes is None:
        rank_bytes = max(device_memory(device, ranks_here) - PROCESS_BYTES, PROCESS_BYTES / 4)
    if device.type == "cpu":
        return dataclasses.replace(read_hardware("cpu"), memory_bytes=rank_bytes)
    named = torch.cuda.get_device_name(device).lower().replace(" ", "-")
    known = max((name for name in CATALOGUE if name.split("-")[0] in named), key=len, default="h100")
    return dataclasses.replace(read_hardware(known), memory_bytes=rank_bytes)


def hardware_of_ranks(rank_memory: float | None, ranks_here: int) -> Hardware:
    """Return this machine's device for the planner, before or after its ranks start; `rank_memory` is in GB."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return hardware_of(device, None if rank_memory is None else 1e9 * rank_memory, ranks_here)


MODALITIES = ("image", "video")


class AutoMemory:
    """Choose memory options by the planner.

    `largest`: tokens of the largest batch so far. `patches`: of images and of video, on the rank that encodes most.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        sp: SequenceSharding,
        fsdp: bool,
        mp_policy: MixedPrecisionPolicy | None,
        style: TensorStyle,
        experts: Experts = 1,
    ) -> None:
        self.sp, self.largest, self.size, self.patches = sp, 0, (1, 0), [0] * len(MODALITIES)
        self.replicas_differ = sp.data_size > 1
        self.shape = shape_of_model(model)
        compute_dtype = (mp_policy and mp_policy.param_dtype) or next(model.parameters()).dtype
        self.job = Job(
            context=1,
            dtype="fp32" if compute_dtype == torch.float32 else "bf16",
            weight_sharding=fsdp and sp.world_size > 1,
            parallel=dataclasses.replace(sp.parallel, tensor_style=style, experts=experts),
        )
        self.hardware: Hardware | None = None

    def for_batch(
        self,
        length: int,
        rows: int,
        fixed: dict[str, Any],
        documents: bool,
        patches: Mapping[str, int] = MappingProxyType({}),
        width: int | None = None,
    ) -> tuple[Memory, str] | None:
        """Return the fastest options that fit the smallest device of all ranks, and the reason; None if no replica's
        batch is larger than all before, in tokens or patches. Collective.

        This replica has `rows` sequences of `length` tokens, or of packed documents; `patches` are by modality those of
        the rank that encodes most; the options in `fixed` stay. Replicas need the same options: a recomputation gathers
        weights, which all ranks do together. `width` ranks share an elastic batch.
        """
        sp = self.sp
        if width is not None:  # as many tokens on each rank as a sequence of all ranks
            length *= sp.size // width
        encoded = [patches.get(kind, 0) for kind in MODALITIES]
        if sp.host_group is not None and (self.replicas_differ or width is not None):
            batches = gather_numbers([length, rows, documents, *encoded], sp.host_group, torch.device("cpu"))
            length, rows, *_ = max(batches, key=lambda batch: batch[0] * batch[1])
            documents = any(has_documents for _, _, has_documents, *_ in batches)
            encoded = [
                max(numbers) for numbers in zip(*(of_pictures for _, _, _, *of_pictures in batches), strict=True)
            ]
        largest = [max(pair) for pair in zip(encoded, self.patches, strict=True)]
        if length * rows <= self.largest:
            if largest == self.patches:
                return None
            length, rows = self.size  # the options must still fit it
        if self.hardware is None:
            least = torch.tensor(hardware_of(sp.device).memory_bytes, dtype=torch.float64, device=sp.device)
            if sp.job_size > 1:
                dist.all_reduce(least, op=dist.ReduceOp.MIN)
            self.hardware = hardware_of(sp.device, float(least))
        job = dataclasses.replace(
            self.job, context=length, batch=rows * sp.data_size, documents=documents, pictures=self._pictures(largest)
        )
        chosen = choose_memory(self.shape, job, self.hardware, fixed_options(self.shape, fixed))
        self.largest, self.size, self.patches = length * rows, (length, rows), largest
        return chosen

    def _pictures(self, patches: list[int]) -> tuple[Pictures, ...]:
        """Return pictures for the planner of which every rank encodes as many patches as the one with most."""
        if self.shape.tower is None:
            return ()
        merge = self.shape.tower.merge
        return tuple(
            Pictures(kind, self.sp.size, merge, number // merge)
            for kind, number in zip(MODALITIES, patches, strict=True)
            if number
        )
