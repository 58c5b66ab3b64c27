"""What GPUs and links can do: a catalogue, or a TOML of the user's own, or one that `longspan bench link` measured.

Sizes are bytes, speeds bytes/s and FLOP/s, times seconds; a GB is 1e9 bytes. The catalogue holds the makers' figures,
so a prediction from it is only as good as the efficiencies it assumes; a measured file replaces both.
"""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from longspan.errors import LongspanError

OPS = ("all_to_all", "all_gather", "reduce_scatter", "all_reduce", "p2p")
"""The collectives that longspan and the methods beside it use."""


@dataclass(frozen=True)
class Link:
    """One kind of wire, as one GPU sees it.

    Attributes:
        bandwidth: bytes/s that a GPU sends, one direction.
        latency: seconds before the first byte of a collective, by its name.
    """

    bandwidth: float
    latency: Mapping[str, float]


# Start-up times of collectives: 5 us for an AllReduce and 15 us for an All-to-All inside a node are the reference
# documents' (section 3.7.5); between nodes several switches and a network card add to them.
_INTRA_LATENCY = {"all_to_all": 15e-6, "all_gather": 5e-6, "reduce_scatter": 5e-6, "all_reduce": 5e-6, "p2p": 3e-6}
_INTER_LATENCY = {"all_to_all": 30e-6, "all_gather": 15e-6, "reduce_scatter": 15e-6, "all_reduce": 20e-6, "p2p": 8e-6}


@dataclass(frozen=True)
class Hardware:
    """GPUs in nodes.

    Attributes:
        name: as asked for, or as the file says.
        memory_bytes: of one GPU.
        flops: dense bf16 peak of one GPU.
        memory_bandwidth: of one GPU.
        gpus_per_node: GPUs that `intra` joins.
        intra: the link inside a node.
        inter: the link between nodes, per GPU.
        matmul_efficiency: the part of `flops` that matrix products reach.
        attention_efficiency: the part of `flops` that the attention kernel reaches, backward included.
        fp32_ratio: fp32 (TF32 where there is such) peak over bf16 peak.
        reserve_bytes: what torch, CUDA and NCCL keep for themselves on each GPU.
        overlaps: whether communication runs beside computation (a GPU's does, a CPU's takes the same cores).
        on_cpu: whether ranks are processes on CPUs: what attention, loss and gloo hold there differs from a GPU.
        measured: link of (axis, op) as measured; it goes before `intra` and `inter`.
        attention_forward_flops: measured speed of the attention's forward, None to take the efficiency.
        attention_flops: the same of forward and backward together.
        attention_block: tokens of the diagonal's blocks, which the kernel computes whole: S tokens take
            (1 + attention_block / S) times as long as their FLOPs say.
        attention_width: the softmax's work on a pair in units of head_dim: heads of D take (1 + attention_width / D)
            times as long as their FLOPs say.
        measured_dtype: the dtype that `flops` was measured in; None for bf16, the makers' figure.
    """

    name: str
    memory_bytes: float
    flops: float
    memory_bandwidth: float
    gpus_per_node: int
    intra: Link
    inter: Link
    matmul_efficiency: float = 0.6
    attention_efficiency: float = 0.45
    fp32_ratio: float = 0.5
    reserve_bytes: float = 2e9
    overlaps: bool = True
    on_cpu: bool = False
    measured: Mapping[tuple[str, str], tuple[float, float]] = field(default_factory=dict)
    attention_forward_flops: float | None = None
    attention_flops: float | None = None
    attention_block: float = 0.0
    attention_width: float = 0.0
    measured_dtype: str | None = None

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "flops", "memory_bandwidth", "gpus_per_node"):
            if not getattr(self, name) > 0:
                raise LongspanError(f"hardware {self.name}: {name}={getattr(self, name)} must be above 0")
        for name in ("matmul_efficiency", "attention_efficiency", "fp32_ratio"):
            if not 0 < getattr(self, name) <= 1:
                raise LongspanError(f"hardware {self.name}: {name}={getattr(self, name)} must be in (0, 1]")
        for where in ("intra", "inter"):
            if not getattr(self, where).bandwidth > 0:
                raise LongspanError(f"hardware {self.name}: the {where} bandwidth must be above 0")

    def members_per_node(self, stride: int, size: int) -> int:
        """How many of a group of `size` ranks, `stride` apart, share a node."""
        return max(1, min(size, self.gpus_per_node // stride)) if stride <= self.gpus_per_node else 1

    def link_of(self, stride: int, size: int) -> str:
        """ "intra" where the whole group lies in one node, else "inter"."""
        return "intra" if self.members_per_node(stride, size) == size else "inter"

    def seconds(self, op: str, axis: str, sent: float, stride: int, size: int) -> float:
        """Seconds of one collective: latency + bytes / bandwidth.

        A group inside a node has the node's link. One that spans nodes has m members in each. Ring collectives
        (all_gather, reduce_scatter, all_reduce) then run a ring through every member's own network card, so they see
        m cards, but never more than the node's link. Of an All-to-All, only what is for other nodes crosses, each
        member on its own card, beside what stays inside. A shift between neighbours waits for the one that crosses.

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
            latency, bandwidth = self.measured[axis, op]
            return latency + sent / bandwidth
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
    name: str,
    memory_gb: float,
    tflops: float,
    memory_gbs: float,
    intra_gbs: float,
    inter_gbs: float,
    *,
    per_node: int = 8,
    fp32_ratio: float = 0.5,
) -> Hardware:
    return Hardware(
        name=name,
        memory_bytes=memory_gb * 1e9,
        flops=tflops * 1e12,
        memory_bandwidth=memory_gbs * 1e9,
        gpus_per_node=per_node,
        intra=Link(intra_gbs * 1e9, _INTRA_LATENCY),
        inter=Link(inter_gbs * 1e9, _INTER_LATENCY),
        fp32_ratio=fp32_ratio,
    )


# Columns: memory GB, dense bf16 TFLOP/s, memory GB/s, link inside a node and between nodes in GB/s per GPU, one way.
CATALOGUE = {
    hardware.name: hardware
    for hardware in (
        # NVIDIA A100 data sheet (June 2021): 312 TFLOP/s, 1,555 and 2,039 GB/s, NVLink 600 GB/s both directions.
        # DGX A100: one HDR InfiniBand card (200 Gbit/s) per GPU.
        _gpu("a100-40gb", 40, 312, 1555, 300, 25),
        _gpu("a100-80gb", 80, 312, 2039, 300, 25),
        # NVIDIA H100 SXM data sheet: 1,979 TFLOP/s with sparsity, 3.35 TB/s, NVLink 900 GB/s both directions. DGX H100:
        # one NDR card (400 Gbit/s) per GPU.
        _gpu("h100", 80, 989.5, 3350, 450, 50),
        # NVIDIA H200 data sheet: as H100, 141 GB at 4.8 TB/s.
        _gpu("h200", 141, 989.5, 4800, 450, 50),
        # NVIDIA DGX B200 data sheet, per GPU: 180 GB, 64 TB/s / 8, 2.25 PFLOP/s dense bf16, NVLink 1.8 TB/s both
        # directions; ConnectX-7, 400 Gbit/s.
        _gpu("b200", 180, 2250, 8000, 900, 50),
        # AMD MI300X data sheet: 1,307.4 TFLOP/s, 5.3 TB/s, 7 Infinity Fabric links of 64 GB/s each direction; all to
        # all. One 400 Gbit/s card per GPU is the usual platform.
        _gpu("mi300x", 192, 1307.4, 5300, 448, 50),
        # NVIDIA L40S data sheet: 362.05 TFLOP/s dense bf16, 48 GB at 864 GB/s, PCIe 4.0 x16 (32 GB/s) and no NVLink.
        _gpu("l40s", 48, 362.05, 864, 32, 25),
        # A CPU host whose ranks are processes joined by gloo over loopback: an order of magnitude for one core, to be
        # replaced by `longspan bench link`.
        dataclasses.replace(
            _gpu("cpu", 8, 0.1, 10, 1, 1, per_node=64, fp32_ratio=1.0),
            overlaps=False,
            on_cpu=True,
            reserve_bytes=0.0,
            intra=Link(1e9, dict.fromkeys(OPS, 200e-6)),
            inter=Link(1e9, dict.fromkeys(OPS, 200e-6)),
        ),
    )
}

_NUMBERS = {
    "memory_bytes", "flops", "memory_bandwidth", "gpus_per_node", "matmul_efficiency", "attention_efficiency",
    "fp32_ratio", "reserve_bytes", "attention_flops", "attention_forward_flops", "attention_block", "attention_width",
}  # fmt: skip
_KNOWN = _NUMBERS | {"name", "like", "overlaps", "on_cpu", "intra", "inter", "links", "dtype", "measured"}


def read_hardware(name_or_path: str) -> Hardware:
    """Hardware by its name in the catalogue, or from a TOML file.

    A file's keys are the attributes of `Hardware`, in bytes and bytes/s. `like = "h100"` takes what is left out from
    the catalogue. `[intra]` and `[inter]` hold `bandwidth` and, as wanted, `latency` (seconds, one number or one per
    op); `[links.AXIS.OP]` holds a measured `latency` and `bandwidth`, as `longspan bench link` writes them.

    Raises:
        LongspanError: for an unknown name (the nearest are named), a file that cannot be read, unknown or missing
            keys, or impossible values.
    """
    if name_or_path.lower() in CATALOGUE:
        return CATALOGUE[name_or_path.lower()]
    path = Path(name_or_path)
    if path.suffix != ".toml" and not path.exists():
        asked = name_or_path.lower()
        close = [name for name in CATALOGUE if asked and name.startswith(asked)]
        close = close or difflib.get_close_matches(asked, CATALOGUE, n=3, cutoff=0.4)
        nearest = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(CATALOGUE)}"
        raise LongspanError(f"--gpu {name_or_path} is unknown; {nearest} Or give a .toml file of your own")
    try:
        values = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise LongspanError(f"--gpu {path} cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise LongspanError(f"--gpu {path} is not TOML: {error}") from error
    return _from_toml(values, path)


def _from_toml(values: dict[str, Any], path: Path) -> Hardware:
    unknown = sorted(values.keys() - _KNOWN)
    if unknown:
        raise LongspanError(f"--gpu {path}: unknown key {unknown[0]!r}; the keys are {', '.join(sorted(_KNOWN))}")
    links = {
        (axis, op): (_number(found, "latency", path), _number(found, "bandwidth", path))
        for axis, ops in values.get("links", {}).items()
        for op, found in ops.items()
    }
    measured_here = "measured" in values
    base = read_hardware(str(values["like"])) if "like" in values else CATALOGUE["cpu"]
    needed = {"memory_bytes", "flops", "memory_bandwidth", "gpus_per_node"}
    missing = sorted(needed - values.keys())
    if missing and "like" not in values:
        raise LongspanError(f'--gpu {path} has no {", ".join(missing)}; give them, or like = "h100" for the rest')
    if "like" not in values and not measured_here:
        lacking = [where for where in ("intra", "inter") if where not in values]
        if lacking:
            raise LongspanError(f"--gpu {path} has no [{lacking[0]}] with a bandwidth in bytes/s; give it")
    changed: dict[str, Any] = {key: _number(values, key, path) for key in _NUMBERS & values.keys()}
    if "gpus_per_node" in changed:
        changed["gpus_per_node"] = int(changed["gpus_per_node"])
    for where in ("intra", "inter"):
        if where in values:
            changed[where] = _link(values[where], getattr(base, where), path)
    for flag, of_a_gpu in (("overlaps", True), ("on_cpu", False)):
        if flag in values:
            changed[flag] = bool(values[flag])
        elif "like" not in values and not measured_here:
            changed[flag] = of_a_gpu
    if measured_here and "dtype" in values:
        changed["measured_dtype"] = str(values["dtype"])
    return dataclasses.replace(base, name=str(values.get("name", path.stem)), measured=links, **changed)


def _link(values: dict[str, Any], base: Link, path: Path) -> Link:
    bandwidth = _number(values, "bandwidth", path)
    latency: Any = values.get("latency", dict(base.latency))
    if isinstance(latency, int | float):
        latency = dict.fromkeys(OPS, float(latency))
    return Link(bandwidth, {**base.latency, **latency})


def _number(values: dict[str, Any], key: str, path: Path) -> float:
    value = values.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise LongspanError(f"--gpu {path}: {key} = {value!r} must be a number of at least 0")
    return float(value)
