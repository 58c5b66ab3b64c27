"""`memory="auto"`: the fastest memory options that fit this device, chosen by the planner for each larger batch."""

from __future__ import annotations

import dataclasses
import math
import os
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from longspan.comm.consistency import gather_numbers
from longspan.core.memory import Memory
from longspan.core.parallel import TensorStyle
from longspan.hf.shapes import shape_of_model
from longspan.plan.hardware import CATALOGUE, Hardware, read_hardware
from longspan.plan.job import Job, Mesh
from longspan.plan.suggestions import choose_memory

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from transformers import PreTrainedModel

    from longspan.comm.mesh import SequenceSharding

PROCESS_BYTES = 1 << 30
"""Bytes of Python and its libraries on a CPU, or of a CUDA context on a GPU, which no plan counts."""


def device_memory(device: torch.device) -> int:
    """Return the bytes of the GPU's memory, or on CPU of this rank's part of the machine's."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // max(1, local_ranks)


def hardware_of(device: torch.device, rank_bytes: float | None = None) -> Hardware:
    """Return this device for the planner: from the catalogue by its name, else as an H100, with its own memory.

    Args:
        device: of the ranks.
        rank_bytes: memory of a rank; by default the device's, without `PROCESS_BYTES`.
    """
    if rank_bytes is None:
        rank_bytes = max(device_memory(device) - PROCESS_BYTES, PROCESS_BYTES / 4)
    if device.type == "cpu":
        return dataclasses.replace(read_hardware("cpu"), memory_bytes=rank_bytes)
    named = torch.cuda.get_device_name(device).lower().replace(" ", "-")
    known = max((name for name in CATALOGUE if name.split("-")[0] in named), key=len, default="h100")
    return dataclasses.replace(read_hardware(known), memory_bytes=rank_bytes)


def hardware_of_ranks(rank_memory: float | None, ranks_here: int) -> Hardware:
    """Return this machine's device for the planner, before or after its ranks start.

    Args:
        rank_memory: GB that a rank may use; None: its GPU's memory, or on a CPU its share of the machine's.
        ranks_here: ranks on this machine; torchrun's LOCAL_WORLD_SIZE wins.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rank_bytes = None if rank_memory is None else 1e9 * rank_memory
    if rank_bytes is None and device.type == "cpu" and "LOCAL_WORLD_SIZE" not in os.environ:
        rank_bytes = max(device_memory(device) / ranks_here - PROCESS_BYTES, PROCESS_BYTES / 4)
    return hardware_of(device, rank_bytes)


class AutoMemory:
    """Choose memory options by the planner.

    Args:
        model: the transformers model.
        sp: its sharding.
        fsdp: whether weights are sharded.
        mp_policy: FSDP's mixed precision, for the compute dtype.
        style: of the tensor axis.

    Attributes:
        largest: tokens of the largest batch so far.

    Raises:
        LongspanError: for a model that the planner cannot read.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        sp: SequenceSharding,
        fsdp: bool,
        mp_policy: MixedPrecisionPolicy | None,
        style: TensorStyle,
    ) -> None:
        self.sp, self.largest = sp, 0
        self.group = sp.host_group if sp.data_size > 1 else None
        self.shape = shape_of_model(model)
        compute_dtype = (mp_policy and mp_policy.param_dtype) or next(model.parameters()).dtype
        self.job = Job(
            context=1,
            dtype="fp32" if compute_dtype == torch.float32 else "bf16",
            weight_sharding=fsdp and sp.world_size > 1,
            tensor_style=style,
        )
        self.hardware: Hardware | None = None

    def largest_of_replicas(self, length: int, rows: int) -> tuple[int, int]:
        """Return the length and rows of the replica whose batch has the most tokens. Collective over the hosts.

        Replicas need the same options: a recomputation gathers weights, which all ranks do together.
        """
        if self.group is None:
            return length, rows
        length, rows = max(gather_numbers([length, rows], self.group, torch.device("cpu")), key=math.prod)
        return length, rows

    def choose(self, length: int, rows: int, fixed: dict[str, Any]) -> tuple[Memory, str]:
        """Return the fastest options that fit the smallest device of all ranks, and the reason. Collective.

        Args:
            length: tokens of a sequence.
            rows: sequences of a replica.
            fixed: memory options that stay, by the fields of `Memory`.

        Raises:
            LongspanError: if nothing fits: with the memory item by item, and what would fit.
        """
        sp = self.sp
        if self.hardware is None:
            least = torch.tensor(hardware_of(sp.device).memory_bytes, dtype=torch.float64, device=sp.device)
            if sp.job_size > 1:
                dist.all_reduce(least, op=dist.ReduceOp.MIN)
            self.hardware = hardware_of(sp.device, float(least))
        job = dataclasses.replace(self.job, context=length, batch=rows * sp.data_size)
        mesh = Mesh(sp.data_size, sp.ring_size, sp.ulysses_size, sp.tensor_size)
        return choose_memory(self.shape, job, mesh, self.hardware, fixed)
