"""Speeds of GPUs and links: from the catalogue, from your TOML, or measured by `longspan bench`.

Sizes are bytes, speeds bytes/s and FLOP/s, times seconds; a GB is 1e9 bytes. The catalogue holds the makers' figures,
so its predictions are only as good as the assumed efficiencies; a measured file replaces both.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from longspan.core.errors import LongspanError
from longspan.core.parallel import AXES
from longspan.core.validation import (
    Toml,
    check_choice,
    check_flag,
    check_number,
    existing_path,
    format_value,
    nearest,
    path_of,
    read_toml,
)

Made = TypeVar("Made")

OPS = ("all_to_all", "all_gather", "reduce_scatter", "all_reduce", "p2p")
"""The collectives of longspan and of the methods that it is compared with."""


@dataclass(frozen=True)
class Link:
    """One kind of link, as one GPU sees it.

    Attributes:
        bandwidth: bytes/s that a GPU sends in one direction.
        latency: seconds before the first byte of a collective, by op.
    """

    bandwidth: float
    latency: Mapping[str, float]

    def __post_init__(self) -> None:
        check_number("bandwidth", self.bandwidth, 0, above=True)
        if not isinstance(self.latency, Mapping):
            raise LongspanError(f"latency of a link must be seconds by collective, got {format_value(self.latency)}")
        for op in OPS:
            check_number(f"latency of {op}", self.latency.get(op), 0)


# Latencies: 5 us for an AllReduce and 15 us for an All-to-All inside a node are the reference documents' (section
# 3.7.5); between nodes several switches and a network card add to them.
_INTRA_LATENCY = {"all_to_all": 15e-6, "all_gather": 5e-6, "reduce_scatter": 5e-6, "all_reduce": 5e-6, "p2p": 3e-6}
_INTER_LATENCY = {"all_to_all": 30e-6, "all_gather": 15e-6, "reduce_scatter": 15e-6, "all_reduce": 20e-6, "p2p": 8e-6}


@dataclass(frozen=True)
class MeasuredLink:
    """One measured collective on one axis."""

    latency: float  # seconds
    bandwidth: float  # bytes/s that a rank sends. latency + sent / bandwidth is the fitted line.
    # measured (bytes that a rank sends, seconds), by ascending bytes. If given, they replace the line: a link buffers
    # small messages and sends large ones at its rate, which no single line fits.
    points: tuple[tuple[float, float], ...] = ()
    # fraction of its seconds, 0 to 1, that overlaps with computing of the same length; None: not measured
    hidden: float | None = None
    residual: float = 0.0  # median over the points of |line - measured| / measured

    def __post_init__(self) -> None:
        check_number("latency", self.latency, 0)
        check_number("bandwidth", self.bandwidth, 0, above=True)
        if self.hidden is not None:
            check_number("hidden", self.hidden, 0, 1)
        pairs = isinstance(self.points, tuple) and all(isinstance(x, tuple) and len(x) == 2 for x in self.points)
        if not pairs:
            raise LongspanError(f"points must be pairs of bytes and seconds, got {format_value(self.points)}")
        for sent, seconds in self.points:
            check_number("points with this size", sent, 0, above=True)
            check_number("points with this time", seconds, 0, above=True)
        sizes = [sent for sent, _ in self.points]
        if sorted(set(sizes)) != sizes:
            raise LongspanError(f"points must have ascending sizes, got {format_value(sizes)}")

    def seconds(self, sent: float) -> float:
        """Return the seconds of a message of which a rank sends `sent` bytes, interpolated between the points.

        Below the first point: at least the latency. Above the last: the slope of the last two points, with at least the
        throughput of the last point and at most 10 times that.
        """
        if not self.points:
            return self.latency + sent / self.bandwidth
        (least, soonest), (most, latest) = self.points[0], self.points[-1]
        if sent <= least:
            start = min(self.latency, soonest)
            return start + (soonest - start) * sent / least
        if sent >= most:
            slope = latest / most
            if len(self.points) > 1:
                before, then = self.points[-2]
                slope = min(slope, max((latest - then) / (most - before), slope / 10))
            return latest + (sent - most) * slope
        at = bisect.bisect_left(self.points, (sent,))
        (below, then), (above, later) = self.points[at - 1], self.points[at]
        return then + (later - then) * (sent - below) / (above - below)


_MEASURED_SPEEDS = ("attention_flops", "attention_forward_flops")  # None if not measured
_HOST_KEYS = ("host_memory", "host_bandwidth", "host_memory_bandwidth")

# (least, most, whether the least itself is excluded), by field of `Hardware`
_POSITIVE, _FRACTION, _NOT_NEGATIVE = (0, math.inf, True), (0, 1, True), (0, math.inf, False)
_RANGES = {
    **dict.fromkeys(("memory_bytes", "flops", "memory_bandwidth", *_HOST_KEYS, *_MEASURED_SPEEDS), _POSITIVE),
    **dict.fromkeys(("matmul_efficiency", "attention_efficiency", "fp32_ratio"), _FRACTION),
    **dict.fromkeys(("reserve_bytes", "attention_block", "attention_width"), _NOT_NEGATIVE),
}


COMMUNICATOR_BYTES, ALL_TO_ALL_BYTES = 0.7e9, 0.47e9
"""Bytes of an NCCL communicator, and of its all-to-all for each other GPU of the node.

From github.com/NVIDIA/nccl/issues/964 (A100: 0.54 GB with 2 ranks, 0.69 GB with more) and 1685 (8 H100: 3.3 GB).
"""

Curve = tuple[tuple[int, float, float], ...]
"""(keys of a query, fraction of the peak in a forward, in a backward), by ascending keys."""

# benchmarks/reports/2026-11-26-gpu.md: what kernel="auto" reaches on an H200 in bf16 at head_dim 128. A causal mask is
# computed by cuDNN, windows and documents by torch's FlashAttention-2.
_HOPPER_ATTENTION: dict[str, Curve] = {
    "causal": ((16384, 0.583, 0.515), (32768, 0.597, 0.524), (65536, 0.606, 0.534), (131072, 0.548, 0.543)),
    "window": ((512, 0.109, 0.125), (2048, 0.245, 0.276), (16384, 0.331, 0.313)),
}


@dataclass(frozen=True)
class Hardware:
    """GPUs in nodes."""

    name: str  # in the catalogue, or in the file
    memory_bytes: float  # of one GPU
    flops: float  # dense peak of one GPU, in bf16 unless `measured_dtype` says otherwise
    memory_bandwidth: float  # of one GPU
    gpus_per_node: int  # GPUs that `intra` joins
    intra: Link  # inside a node
    inter: Link  # between nodes, per GPU
    matmul_efficiency: float = 0.6  # fraction of `flops` that matrix products reach
    attention_efficiency: float = 0.45  # the same of attention, backward included, where `attention` has no curve
    attention: Mapping[str, Curve] = field(default_factory=dict)  # measured fractions by mask: "causal", "window"
    fp32_ratio: float = 0.5  # fp32 peak (TF32 if available) over bf16 peak
    reserve_bytes: float = 2e9  # held by torch, CUDA and the mesh's NCCL on each GPU
    # whether communication overlaps with computation, unless `measured` has the fraction (a CPU's takes the same cores)
    overlaps: bool = True
    # ranks are processes on CPUs, planned as a small GPU without a host: memory is rounded up (`CPU_MARGIN`)
    on_cpu: bool = False
    # measured links by (axis, op); they replace `intra` and `inter`
    measured: Mapping[tuple[str, str], MeasuredLink] = field(default_factory=dict)
    attention_forward_flops: float | None = None  # measured FLOP/s of attention's forward, instead of an efficiency
    attention_flops: float | None = None  # measured FLOP/s of forward and backward together
    # tokens per block on the diagonal, which the kernel computes in full: S tokens take (1 + block / S) times as long
    attention_block: float = 0.0
    # the softmax's work per pair in units of head_dim: heads of D take (1 + width / D) times as long
    attention_width: float = 0.0
    measured_dtype: str | None = None  # dtype that `flops` was measured in
    host_memory: float = 1e12  # of one node
    host_bandwidth: float = 25e9  # bytes/s between one GPU and its host's memory, each direction
    host_memory_bandwidth: float = 300e9  # bytes/s of a node's memory, which bounds an optimizer on the host

    def __post_init__(self) -> None:
        of = f"of hardware {self.name}"
        for name, (least, most, above) in _RANGES.items():
            if (value := getattr(self, name)) is not None or name not in _MEASURED_SPEEDS:
                check_number(f"{name} {of}", value, least, most, above=above)
        check_number(f"gpus_per_node {of}", self.gpus_per_node, 1, whole=True)
        for name in ("overlaps", "on_cpu"):
            check_flag(f"{name} {of}", getattr(self, name))
        if self.measured_dtype is not None:
            check_choice(f"measured_dtype {of}", self.measured_dtype, ("bf16", "fp32"))
        for mask, curve in self.attention.items():
            check_choice(f"attention {of}", mask, ("causal", "window"))
            for point in curve if isinstance(curve, tuple) else (curve,):
                if not (isinstance(point, tuple) and len(point) == 3):
                    raise LongspanError(
                        f"attention {of}: {mask} must be points (keys, fraction forward, fraction backward), got "
                        f"{format_value(curve)}"
                    )
                check_number(f"attention {of}: keys of {mask}", point[0], 0, above=True)
                for fraction in point[1:]:
                    check_number(f"attention {of}: a fraction of {mask}", fraction, 0, 1, above=True)
        for name in ("intra", "inter"):
            if not isinstance(getattr(self, name), Link):
                raise LongspanError(f"{name} {of} must be a Link, got {format_value(getattr(self, name))}")
        links = self.measured.values() if isinstance(self.measured, Mapping) else [None]
        if not all(isinstance(link, MeasuredLink) for link in links):
            raise LongspanError(
                f"measured {of} must be a MeasuredLink for each (axis, op), got {format_value(self.measured)}"
            )

    def attention_fractions(self, mask: str, keys: float) -> tuple[float, float]:
        """Return the fractions of the peak that attention reaches, in a forward and in a backward.

        Between measured lengths they are interpolated along the logarithm.

        Args:
            mask: "causal" for all keys before a query, "window" for fewer.
            keys: that a query attends to, at most.
        """
        curve = self.attention.get(mask)
        if not curve:
            return self.attention_efficiency, self.attention_efficiency
        at = bisect.bisect_left(curve, keys, key=lambda point: point[0])
        if at in (0, len(curve)):
            _, forward, backward = curve[min(at, len(curve) - 1)]
            return forward, backward
        (below, *lower), (above, *upper) = curve[at - 1], curve[at]
        part = math.log(keys / below) / math.log(above / below)
        forward, backward = (low + part * (high - low) for low, high in zip(lower, upper, strict=True))
        return forward, backward

    @property
    def attention_words(self) -> str:
        """The assumption about attention, in words."""
        measured = [part for _, *parts in self.attention.get("causal", ()) for part in parts]
        if not measured:
            return f"{self.attention_efficiency:.0%} in attention"
        return f"{100 * min(measured):.0f}-{max(measured):.0%} (measured) in attention"

    def members_per_node(self, stride: int, size: int) -> int:
        """Return how many of a group of `size` ranks, `stride` apart, share a node."""
        return max(1, min(size, self.gpus_per_node // stride)) if stride <= self.gpus_per_node else 1

    def link_of(self, stride: int, size: int) -> str:
        """Return "intra" if the whole group is in one node, else "inter"."""
        return "intra" if self.members_per_node(stride, size) == size else "inter"

    def hideable(self, op: str, axis: str) -> float:
        """Return the fraction of a collective's seconds, 0 to 1, that can overlap with computing.

        The rest takes the same cores, and lengthens the computing.
        """
        link = self.measured.get((axis, op))
        if link is None or link.hidden is None:
            return 1.0 if self.overlaps else 0.0
        return link.hidden

    def seconds(self, op: str, axis: str, sent: float, stride: int, size: int) -> float:
        """Return the seconds of one collective: latency + bytes / bandwidth.

        A group inside a node uses the node's link. A group that spans nodes has m members in each. Ring collectives
        (all_gather, reduce_scatter, all_reduce) then use every member's network card, so m cards, but never more than
        the node's link. In an All-to-All only data for other nodes crosses, each member on its own card, concurrently
        with data inside the node. A P2P shift waits for the neighbour that crosses.

        Args:
            op: one of `OPS`.
            axis: the mesh axis, for measured links.
            sent: bytes that one GPU sends to others.
            stride: ranks between neighbours of the group.
            size: ranks in the group.
        """
        if size == 1 or sent == 0:
            return 0.0
        if (axis, op) in self.measured:
            return self.measured[axis, op].seconds(sent)
        m = self.members_per_node(stride, size)
        if m == size:
            return self.intra.latency[op] + sent / self.intra.bandwidth
        latency = self.inter.latency[op]
        if op == "all_to_all":
            crossing = sent * (size - m) / (size - 1)
            return latency + max(crossing / self.inter.bandwidth, (sent - crossing) / self.intra.bandwidth)
        bandwidth = self.inter.bandwidth if op == "p2p" else min(self.intra.bandwidth, m * self.inter.bandwidth)
        return latency + sent / bandwidth


def _gpu(
    name: str, memory_gb: float, tflops: float, memory_gbs: float, intra_gbs: float, inter_gbs: float, **others: Any
) -> Hardware:
    """Return hardware of a DGX with 2 TB and PCIe gen 5 x16, which reaches 55 GB/s from pinned memory."""
    intra, inter = Link(intra_gbs * 1e9, _INTRA_LATENCY), Link(inter_gbs * 1e9, _INTER_LATENCY)
    values = {"gpus_per_node": 8, "host_memory": 2e12, "host_bandwidth": 55e9, **others}
    return Hardware(
        name, memory_gb * 1e9, tflops * 1e12, memory_gbs * 1e9, **{"intra": intra, "inter": inter, **values}
    )


_PCIE_4: dict[str, Any] = {"host_bandwidth": 25e9}
_LOOPBACK = Link(1e9, dict.fromkeys(OPS, 200e-6))

# Columns: memory GB, dense bf16 TFLOP/s, memory GB/s, link inside a node and between nodes in GB/s per GPU, one way.
_CATALOGUE = (
    # NVIDIA A100 data sheet (June 2021): 312 TFLOP/s, 1,555 and 2,039 GB/s, NVLink 600 GB/s both directions.
    # DGX A100: one HDR InfiniBand card (200 Gbit/s) per GPU.
    _gpu("a100-40gb", 40, 312, 1555, 300, 25, host_memory=1e12, **_PCIE_4),
    _gpu("a100-80gb", 80, 312, 2039, 300, 25, **_PCIE_4),
    # NVIDIA H100 SXM data sheet: 1,979 TFLOP/s with sparsity, 3.35 TB/s, NVLink 900 GB/s both directions. DGX H100:
    # one NDR card (400 Gbit/s) per GPU. H200: the same with 141 GB at 4.8 TB/s.
    _gpu("h100", 80, 989.5, 3350, 450, 50, attention=_HOPPER_ATTENTION),
    _gpu("h200", 141, 989.5, 4800, 450, 50, attention=_HOPPER_ATTENTION),
    # NVIDIA DGX B200 data sheet, per GPU: 180 GB, 64 TB/s / 8, 2.25 PFLOP/s dense bf16, NVLink 1.8 TB/s both
    # directions; ConnectX-7, 400 Gbit/s.
    _gpu("b200", 180, 2250, 8000, 900, 50),
    # AMD MI300X data sheet: 1,307.4 TFLOP/s, 5.3 TB/s, 7 Infinity Fabric links of 64 GB/s each direction; all to
    # all. One 400 Gbit/s card per GPU is the usual platform.
    _gpu("mi300x", 192, 1307.4, 5300, 448, 50),
    # NVIDIA L40S data sheet: 362.05 TFLOP/s dense bf16, 48 GB at 864 GB/s, PCIe 4.0 x16 (32 GB/s) and no NVLink.
    _gpu("l40s", 48, 362.05, 864, 32, 25, host_memory=1e12, **_PCIE_4),
    # Ranks as processes on one host, joined by gloo over loopback: an order of magnitude for one core. Measure
    # your own with `longspan bench`.
    _gpu(
        "cpu", 8, 0.1, 10, 1, 1, gpus_per_node=64, fp32_ratio=1.0, host_memory=512e9, host_bandwidth=10e9,
        overlaps=False, on_cpu=True, reserve_bytes=0.0, intra=_LOOPBACK, inter=_LOOPBACK,
    ),
)  # fmt: skip
CATALOGUE = {hardware.name: hardware for hardware in _CATALOGUE}

_OWN_KEYS = {each.name for each in dataclasses.fields(Hardware)} - {"measured_dtype", "attention"}
_KEYS = _OWN_KEYS | {"like", "links"}


def read_hardware(name_or_path: str | os.PathLike[str]) -> Hardware:
    """Return hardware by its name in the catalogue, or from a TOML file.

    A file's keys are the attributes of `Hardware`, in bytes and bytes/s. `like = "h100"` takes missing keys from the
    catalogue, or from another file. `[intra]` and `[inter]` hold `bandwidth` and optionally `latency` (seconds, one
    number or one per op); `[links.AXIS.OP]` holds a measured `latency` and `bandwidth`, and `points` and `hidden`,
    as `longspan bench` writes them.

    Raises:
        LongspanError: for an unknown name (the nearest is named), a file that cannot be read, unknown or missing
            keys, or impossible values; with the file and the line.
    """
    if not isinstance(name_or_path, str | os.PathLike):
        raise LongspanError(
            f"hardware {format_value(name_or_path)} is neither a name nor a path; there are {', '.join(CATALOGUE)}"
        )
    return _read(os.fspath(name_or_path), ())


def _read(name_or_path: str, readers: tuple[Path, ...]) -> Hardware:
    """Read hardware; `readers` are the files whose `like` led to it."""
    if name_or_path.lower() in CATALOGUE:
        return CATALOGUE[name_or_path.lower()]
    path = path_of("--gpu", name_or_path)
    if path.suffix != ".toml" and existing_path("--gpu", name_or_path) is None:
        sizes = [name for name in CATALOGUE if name.startswith(name_or_path.lower())]
        hint = f"did you mean {' or '.join(sizes)}?" if sizes else nearest(name_or_path.lower(), CATALOGUE)
        raise LongspanError(f"--gpu {name_or_path} is unknown ({hint}); for another GPU give a .toml file")
    circular, readers = path.resolve() in readers, (*readers, path.resolve())
    if circular:
        chain = " -> ".join(map(str, readers))
        raise LongspanError(f"--gpu {readers[0]}: `like` leads back to {chain}; name the catalogue in one of them")
    return _from_toml(read_toml("--gpu", path), readers)


def _from_toml(file: Toml, readers: tuple[Path, ...]) -> Hardware:
    measured = "measured" in file.values
    values = _table(file, _KEYS | {"dtype"} if measured else _KEYS)
    for key in ("name", "like", "measured"):
        if not isinstance(values.get(key, ""), str):
            raise file.error(f"{key} = {format_value(values[key])} must be text", key)
    if "like" in values:
        base = _read(values["like"], readers)
    else:
        needed = ["memory_bytes", "flops", "memory_bandwidth", "gpus_per_node"]
        needed += [] if measured else ["intra", "inter"]
        missing = [key for key in needed if key not in values]
        if missing:
            raise LongspanError(
                f'--gpu {file.path} has no {", ".join(missing)}; give them, or like = "h100" for the rest'
            )
        # Unless the file says otherwise: `longspan bench` measured CPUs, and a file by hand is about GPUs.
        base = CATALOGUE["cpu"] if measured else dataclasses.replace(CATALOGUE["cpu"], **_GPU_DEFAULTS)
    changed = {key: values[key] for key in values if key in _OWN_KEYS - {"measured"}}
    changed |= {key: _link(file, key, getattr(base, key)) for key in ("intra", "inter") if key in values}
    if "attention_efficiency" in values:
        changed["attention"] = {}
    if measured:
        changed["measured_dtype"] = values.get("dtype", base.measured_dtype)
    links = {
        (axis, op): _measured_link(file, "links", axis, op)
        for axis in _table(file, (*AXES, "fsdp", "sequence"), "links")
        for op in _table(file, OPS, "links", axis)
    }
    name = values.get("name", file.path.stem)
    return _made(file, lambda: dataclasses.replace(base, **{**changed, "name": name, "measured": links}))


_GPU_DEFAULTS: dict[str, Any] = {
    each.name: each.default for each in dataclasses.fields(Hardware) if each.name in ("overlaps", "on_cpu", *_HOST_KEYS)
}


def _table(file: Toml, known: Collection[str], *keys: str) -> dict[str, Any]:
    """Return the table at `keys`, empty if there is none; raise for anything else, and for unknown keys."""
    table: Any = file.values
    for key in keys:
        table = table.get(key, {})
    if not isinstance(table, dict):
        raise file.error(f"{'.'.join(keys)} = {format_value(table)} must be a table", *keys)
    for name in table:
        if name not in known:
            unknown = format_value(".".join((*keys, name)))
            raise file.error(f"unknown key {unknown}; {nearest(name, sorted(known))}", *keys, name)
    return table


def _link(file: Toml, key: str, base: Link) -> Link:
    table = _table(file, ("bandwidth", "latency"), key)
    latency = table.get("latency", {})
    by_op = _table(file, OPS, key, "latency") if isinstance(latency, dict) else dict.fromkeys(OPS, latency)
    return _made(file, lambda: Link(table.get("bandwidth"), {**base.latency, **by_op}), key)  # type: ignore[arg-type]


def _measured_link(file: Toml, *keys: str) -> MeasuredLink:
    table = _table(file, ("latency", "bandwidth", "residual", "points", "hidden"), *keys)
    points = table.get("points", [])
    if isinstance(points, list):
        points = tuple(tuple(pair) if isinstance(pair, list) else pair for pair in points)
    latency, bandwidth, hidden = (table.get(key) for key in ("latency", "bandwidth", "hidden"))
    return _made(file, lambda: MeasuredLink(latency, bandwidth, points, hidden), *keys)  # type: ignore[arg-type]


def _made(file: Toml, make: Callable[[], Made], *keys: str) -> Made:
    """Return what `make` returns; its errors, which start with the name of a key, get the file and the line."""
    try:
        return make()
    except LongspanError as error:
        key, rest = str(error).split(" ", 1)
        raise file.error(f"{'.'.join((*keys, key))} {rest}", *keys, key) from error
