"""Latency and bandwidth of the collectives that longspan uses, on every axis of a mesh."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from longspan.bench.config import ELEMENT_BYTES, BenchConfig
from longspan.bench.fit import Fit, bytes_sent, fit
from longspan.bench.timing import median_seconds
from longspan.comm.mesh import OneDeviceMesh
from longspan.compat.torch_api import flatten_mesh, gather_into, scatter_into

FSDP_AXES = ("data", "ring", "ulysses")
"""Weights are sharded, and gradients summed, over these together: the "axis" fsdp."""


def _all_to_all(x: Tensor, y: Tensor, n: int, group: dist.ProcessGroup) -> None:
    dist.all_to_all_single(y[:n], x[:n], group=group)


def _all_gather(x: Tensor, y: Tensor, n: int, group: dist.ProcessGroup) -> None:
    gather_into(y[:n], x[: n // group.size()], group=group)


def _reduce_scatter(x: Tensor, y: Tensor, n: int, group: dist.ProcessGroup) -> None:
    scatter_into(y[: n // group.size()], x[:n], group=group)


def _all_reduce(x: Tensor, y: Tensor, n: int, group: dist.ProcessGroup) -> None:
    dist.all_reduce(y[:n], group=group)


def _p2p(x: Tensor, y: Tensor, n: int, group: dist.ProcessGroup) -> None:
    after, before = (group.rank() + 1) % group.size(), (group.rank() - 1) % group.size()
    send = dist.P2POp(dist.isend, x[:n], group=group, group_peer=after)
    receive = dist.P2POp(dist.irecv, y[:n], group=group, group_peer=before)
    for request in dist.batch_isend_irecv([send, receive]):
        request.wait()


Collective = Callable[[Tensor, Tensor, int, dist.ProcessGroup], None]
"""Of the first n elements of the send buffer and of the receive buffer, as the whole tensor, in the group."""

COLLECTIVES: dict[str, Collective] = {
    "all_to_all": _all_to_all,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "p2p": _p2p,
}


def collectives_of(axis: str) -> tuple[str, ...]:
    """Which collectives are measured on `axis`: only the ring shifts to the next rank (p2p)."""
    return tuple(name for name in COLLECTIVES if name != "p2p" or axis == "ring")


def measure_links(
    config: BenchConfig, mesh: DeviceMesh | OneDeviceMesh, device: torch.device
) -> dict[str, dict[str, Fit]]:
    """Axis (of more than one rank) -> collective -> its fit; the same on every rank. Collective over all ranks.

    All groups of an axis work at once, as they do in a training step, and so share what wires they share.
    """
    if isinstance(mesh, OneDeviceMesh):
        return {}
    split = [axis for axis, size in config.degrees.items() if size > 1]
    links = {axis: _measure_axis(config, axis, mesh.get_group(axis), device) for axis in split}
    sharding = [axis for axis in split if axis in FSDP_AXES]
    if len(sharding) == 1:  # the very same ranks
        links["fsdp"] = {name: links[sharding[0]][name] for name in collectives_of("fsdp")}
    elif sharding:
        group = flatten_mesh(mesh[FSDP_AXES], "data_sequence").get_group()
        links["fsdp"] = _measure_axis(config, "fsdp", group, device)
    return links


def _measure_axis(config: BenchConfig, axis: str, group: dist.ProcessGroup, device: torch.device) -> dict[str, Fit]:
    ranks = group.size()
    counts = [-(-size // (ELEMENT_BYTES * ranks)) * ranks for size in sorted(set(config.sizes))]
    # Zeros stay zeros however often they are summed. They are written, as pages never written cost a CPU nothing.
    x, y = (torch.empty(max(counts), dtype=torch.float32, device=device).zero_() for _ in range(2))
    fits = {}
    for name in collectives_of(axis):
        works = [partial(COLLECTIVES[name], x, y, n, group) for n in counts]
        seconds = median_seconds(works, config.rounds, device)
        fits[name] = fit([bytes_sent(name, ELEMENT_BYTES * n, ranks) for n in counts], seconds)
    return fits
