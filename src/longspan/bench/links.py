"""Latency and bandwidth of the collectives that longspan uses, on every axis of a mesh."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from longspan.bench.config import ELEMENT_BYTES, BenchConfig
from longspan.bench.fit import Fit, bytes_sent, fit, size_that_sends
from longspan.bench.timing import every_seconds, median_seconds
from longspan.comm.mesh import OneDeviceMesh
from longspan.compat.torch_api import flatten_mesh, gather_into, scatter_into

FSDP_AXES = ("data", "ring", "ulysses")
"""Weights are sharded, and gradients summed, over these together: the "axis" fsdp."""


Works = list[dist.Work]
"""What has been begun and must be waited for."""


def _begun(work: dist.Work | None) -> Works:
    return [] if work is None else [work]


def _all_to_all(x: Tensor, y: Tensor, n: int, group: dist.ProcessGroup, beside: bool = False) -> Works:
    return _begun(dist.all_to_all_single(y[:n], x[:n], group=group, async_op=beside))


def _all_gather(x: Tensor, y: Tensor, n: int, group: dist.ProcessGroup, beside: bool = False) -> Works:
    return _begun(gather_into(y[:n], x[: n // group.size()], group=group, async_op=beside))


def _reduce_scatter(x: Tensor, y: Tensor, n: int, group: dist.ProcessGroup, beside: bool = False) -> Works:
    return _begun(scatter_into(y[: n // group.size()], x[:n], group=group, async_op=beside))


def _all_reduce(x: Tensor, y: Tensor, n: int, group: dist.ProcessGroup, beside: bool = False) -> Works:
    return _begun(dist.all_reduce(y[:n], group=group, async_op=beside))


def _p2p(x: Tensor, y: Tensor, n: int, group: dist.ProcessGroup, beside: bool = False) -> Works:
    after, before = (group.rank() + 1) % group.size(), (group.rank() - 1) % group.size()
    send = dist.P2POp(dist.isend, x[:n], group=group, group_peer=after)
    receive = dist.P2POp(dist.irecv, y[:n], group=group, group_peer=before)
    requests: Works = dist.batch_isend_irecv([send, receive])
    if not beside:
        for request in requests:
            request.wait()
    return requests


Collective = Callable[..., Works]
"""Of the first n elements of the send buffer and of the receive buffer, as the whole tensor, in the group; with
`beside=True` it is only begun."""

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


Messages = Mapping[tuple[str, str], Sequence[float]]
"""(axis, collective) -> bytes that a rank sends in one call."""


def measure_links(
    config: BenchConfig, mesh: DeviceMesh | OneDeviceMesh, device: torch.device, messages: Messages | None = None
) -> dict[str, dict[str, Fit]]:
    """Axis (of more than one rank) -> collective -> its fit; the same on every rank. Collective over all ranks.

    All groups of an axis work at once, as they do in a training step, and so share what wires they share.

    Args:
        config: the mesh's degrees, rounds and sizes.
        mesh: of all ranks of the job.
        device: this rank's.
        messages: measured in place of `config.sizes`, and nothing else is.
    """
    if isinstance(mesh, OneDeviceMesh):
        return {}
    split = [axis for axis, size in config.degrees.items() if size > 1]
    sharding = [axis for axis in split if axis in FSDP_AXES]
    sized = {axis: _sizes(config, axis, config.degrees[axis], messages) for axis in split}
    if len(sharding) == 1:  # the very same ranks
        for name, of_op in _sizes(config, "fsdp", config.degrees[sharding[0]], messages).items():
            sized[sharding[0]][name] = sorted({*sized[sharding[0]].get(name, ()), *of_op})
    links = {}
    for axis, sizes in sized.items():
        axes = (axis, "fsdp") if sharding == [axis] else (axis,)
        links[axis] = _measure_axis(config, sizes, mesh.get_group(axis), device, axes)
    if len(sharding) == 1:
        links["fsdp"] = {name: found for name, found in links[sharding[0]].items() if name in collectives_of("fsdp")}
    elif sharding:
        group = flatten_mesh(mesh[FSDP_AXES], "data_sequence").get_group()
        sizes = _sizes(config, "fsdp", group.size(), messages)
        links["fsdp"] = _measure_axis(config, sizes, group, device, ("fsdp",))
    return {axis: fits for axis, fits in links.items() if fits}


def _sizes(config: BenchConfig, axis: str, ranks: int, messages: Messages | None) -> dict[str, list[int]]:
    """Collective -> the sizes in which it is measured on an axis."""
    if messages is None:
        return {name: sorted(set(config.sizes)) for name in collectives_of(axis)}
    found = {}
    for name in collectives_of(axis):
        sizes = sorted({round(size_that_sends(name, sent, ranks)) for sent in messages.get((axis, name), ())})
        if sizes:
            found[name] = sizes
    return found


def _measure_axis(
    config: BenchConfig,
    sizes: Mapping[str, Sequence[int]],
    group: dist.ProcessGroup,
    device: torch.device,
    axes: tuple[str, ...],
) -> dict[str, Fit]:
    """Collective -> its fit, on a group that is these `axes`."""
    if not sizes:
        return {}
    ranks = group.size()
    counts = {name: _counts(of_op, ranks) for name, of_op in sizes.items()}
    # Zeros stay zeros however often they are summed. They are written, as pages never written cost a CPU nothing.
    largest = max(n for of_op in counts.values() for n in of_op)
    x, y = (torch.empty(largest, dtype=torch.float32, device=device).zero_() for _ in range(2))
    fits = {}
    for name, of_op in counts.items():
        works = [partial(COLLECTIVES[name], x, y, n, group) for n in of_op]
        seconds = median_seconds(works, config.rounds, device)
        found = fit([bytes_sent(name, ELEMENT_BYTES * n, ranks) for n in of_op], seconds)
        if any(name in _begun_early(axis, device) for axis in axes):
            timed = list(zip(of_op, seconds, strict=True))
            n, alone = ([each for each in timed if each[1] < LONGEST] or timed[:1])[-1]
            begin = partial(COLLECTIVES[name], x, y, n, group, beside=True)
            found = replace(found, hidden=hidden_share(begin, alone, device))
        fits[name] = found
    return fits


LONGEST = 0.3
"""Seconds of the message that is measured beside computing: the largest that takes no longer."""


def _begun_early(axis: str, device: torch.device) -> tuple[str, ...]:
    """What longspan has under way while it computes: chunks of heads, a ring's blocks, and on GPUs, where FSDP does not
    wait for them at once, weights and gradients.
    """
    weights = ("all_gather", "reduce_scatter") if device.type == "cuda" else ()
    return {"ulysses": ("all_to_all",), "ring": ("p2p",), "fsdp": weights}.get(axis, ())


_FEWEST, _MOST = 5, 25
"""Rounds of a long collective, and of one so short that its time is mostly noise."""

_WIDTHS = {"cpu": 128, "cuda": 1024}


def hidden_share(begin: Callable[[], Works], alone: float, device: torch.device) -> float:
    """The share of a collective's seconds, 0 to 1, that matrix products as long run beside; the same on every rank.
    Collective over all ranks of the job.

    Args:
        begin: begins the collective.
        alone: about how many seconds it takes.
        device: this rank's.
    """
    d = _WIDTHS[device.type]
    a_dd, b_dd, c_dd = (torch.ones(d, d, device=device) for _ in range(3))

    def compute(times: int) -> None:
        for _ in range(times):
            torch.mm(a_dd, b_dd, out=c_dd)

    def both(times: int) -> None:
        works = begin()
        compute(times)
        for work in works:
            work.wait()

    (each,) = median_seconds([partial(compute, 16)], 3, device)
    times = max(1, round(16 * alone / each))
    in_turn = [partial(both, 0), partial(compute, times), partial(both, times)]
    count = min(_MOST, max(_FEWEST, round(LONGEST / alone)))
    rounds = zip(*every_seconds(in_turn, count, device), strict=True)
    shares = [(sent + computed - took) / min(sent, computed) for sent, computed, took in rounds]
    share: float = min(1.0, max(0.0, statistics.median(shares)))
    return share


def _counts(sizes: Sequence[int], ranks: int) -> list[int]:
    """Elements that the ranks divide, of each size; at least two, as a line has two ends."""
    counts = sorted({-(-size // (ELEMENT_BYTES * ranks)) * ranks for size in sizes})
    return counts if len(counts) > 1 else [counts[0], 4 * counts[0]]
