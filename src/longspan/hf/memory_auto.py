"""Memory options by the planner: the fastest that fit this device, for the batch that is there."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from longspan.core.memory import Memory
from longspan.plan.hardware import CATALOGUE, Hardware, read_hardware
from longspan.plan.job import Job, Mesh, TensorStyle
from longspan.plan.models.read import shape_from_config
from longspan.plan.models.shape import ModelShape
from longspan.plan.suggestions import choose

if TYPE_CHECKING:
    from longspan.comm.mesh import SequenceSharding

BASE_OF_A_RANK = 1 << 30
"""Bytes that Python and its libraries take on a CPU (or a CUDA context on a GPU), which no plan counts."""


def device_memory(device: torch.device) -> int:
    """Bytes of the GPU's memory, or on CPU of this rank's share of the machine's."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // max(1, ranks_here)


def hardware_of(device: torch.device, rank_bytes: float | None = None) -> Hardware:
    """This device for the planner: of the catalogue by its name, else like the usual one, with its own memory.

    Args:
        device: of the ranks.
        rank_bytes: what a rank may take; by default the device's, without what plans do not count.
    """
    held = max(device_memory(device) - BASE_OF_A_RANK, BASE_OF_A_RANK) if rank_bytes is None else rank_bytes
    if device.type == "cpu":
        return dataclasses.replace(read_hardware("cpu"), memory_bytes=held)
    named = torch.cuda.get_device_name(device).lower().replace(" ", "-")
    known = max((name for name in CATALOGUE if name.split("-")[0] in named), key=len, default="h100")
    return dataclasses.replace(read_hardware(known), memory_bytes=held)


def hardware_of_ranks(rank_memory: float | None, ranks_here: int) -> Hardware:
    """Return this machine's device for the planner, before or after its ranks start.

    Args:
        rank_memory: GB that a rank may use; None: its GPU's memory, or on a CPU its share of the machine's.
        ranks_here: ranks on this machine; torchrun's LOCAL_WORLD_SIZE wins.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    nbytes = None if rank_memory is None else 1e9 * rank_memory
    if nbytes is None and device.type == "cpu" and "LOCAL_WORLD_SIZE" not in os.environ:
        nbytes = max(device_memory(device) / ranks_here - BASE_OF_A_RANK, BASE_OF_A_RANK / 4)
    return hardware_of(device, nbytes)


def config_shape(config: Any) -> ModelShape:
    """The planner's model of a Hugging Face config.

    Raises:
        LongspanError: for a model that the planner does not know; `longspan.hf.shapes` reads any.
    """
    return shape_from_config(config.to_dict(), type(config).__name__.removesuffix("Config"))


def memory_options_for(
    shape: ModelShape,
    sp: SequenceSharding,
    hardware: Hardware,
    *,
    tokens: int,
    batch: int,
    dtype: torch.dtype,
    fsdp: bool,
    style: TensorStyle = "tp",
    fixed: Mapping[str, Any] | None = None,
) -> tuple[Memory, str]:
    """The fastest memory options that fit, and why.

    Args:
        shape: the model.
        sp: the mesh.
        hardware: the device.
        tokens: of one sequence.
        batch: sequences at a time, over all replicas.
        dtype: of the activations.
        fsdp: whether weights are sharded.
        style: of the tensor axis.
        fixed: memory options that stay as they are given, by the fields of `Memory`.

    Raises:
        LongspanError: where nothing fits: with the sum, item by item, and what would do.
    """
    job = Job(
        context=tokens,
        batch=batch,
        dtype="fp32" if dtype == torch.float32 else "bf16",
        weight_sharding=fsdp and sp.world_size > 1,
        tensor_style=style,
    )
    mesh = Mesh(sp.data_size, sp.ring_size, sp.ulysses_size, sp.tensor_size)
    return choose(shape, job, mesh, hardware, fixed)
