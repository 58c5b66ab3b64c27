"""The device mesh and the sharding of a sequence over it: explicit values, no global state.

A mesh has four named axes in a fixed order: `data`, `ring`, `ulysses`, `tensor`. Neighbouring ranks share the axes to
the right, so the ones that communicate most (`tensor`, `ulysses`) stay inside a node, and `ring` and `data` span nodes.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from longspan.comm.link import measure_link
from longspan.compat.torch_api import copy_job_timeout, flatten_mesh
from longspan.compat.torch_api import find_group as find_group
from longspan.core.errors import LongspanError
from longspan.core.layout import choose_layout
from longspan.core.parallel import AXES, ParallelConfig, axes_of_width, widths_of
from longspan.core.validation import LARGEST_COUNT, check_choice, check_number, checked_call, format_value
from longspan.ranks.job import HOST_TIMEOUT_S, join_group, read_job

GLOO_TIMEOUT_S, NCCL_TIMEOUT_S = 1800, 600  # torch's own defaults


@dataclass(frozen=True)
class OneDeviceMesh:
    """The mesh of a single process without a process group: every axis has size 1.

    It has the part of `DeviceMesh` that `SequenceSharding` uses, so that the same code runs on one device.
    """

    device_type: str
    mesh_dim_names: ClassVar[tuple[str, ...]] = AXES
    shape: ClassVar[tuple[int, ...]] = (1, 1, 1, 1)


class NarrowMesh:
    """A mesh with smaller sequence groups. It implements the part of `DeviceMesh` that `SequenceSharding` uses.

    Process groups are made only along axes larger than 1: gloo starts threads for each group of a DeviceMesh, even for
    those of one rank.

    Args:
        device_type: as in `DeviceMesh`.
        ranks: [data, ring, ulysses, tensor].
    """

    mesh_dim_names: ClassVar[tuple[str, ...]] = AXES

    def __init__(self, device_type: str, ranks: torch.Tensor) -> None:
        self.device_type, self.ranks, self.shape = device_type, ranks, tuple(ranks.shape)
        self.coordinate: list[int] = (ranks == dist.get_rank()).nonzero()[0].tolist()
        self.groups: dict[tuple[str, ...], dist.ProcessGroup] = {}

    def get_local_rank(self, axis: str) -> int:
        return self.coordinate[AXES.index(axis)]

    def group_of(self, axes: tuple[str, ...]) -> dist.ProcessGroup | None:
        """Return my group along those axes that are larger than 1; None if there are none. Collective."""
        large = [i for i, axis in enumerate(AXES) if axis in axes and self.shape[i] > 1]
        names = tuple(AXES[i] for i in large)
        if large and names not in self.groups:
            size = math.prod(self.shape[i] for i in large)
            rows = self.ranks.movedim(large, list(range(-len(large), 0))).reshape(-1, size)
            mine, _ = dist.new_subgroups_by_enumeration(rows.tolist())
            self.groups[names] = copy_job_timeout(mine)
        return self.groups.get(names)


@checked_call()
def init_mesh(
    data: int = 1,
    ring: int = 1,
    ulysses: int = 1,
    tensor: int = 1,
    *,
    device_type: str | None = None,
    timeout: float | None = None,
) -> DeviceMesh | OneDeviceMesh:
    """Build the mesh, and join the job that torchrun's environment describes if this process has not joined one.

    Args:
        data: number of replicas that read different sequences.
        ring: size of the ring inside a sequence group.
        ulysses: size of the Ulysses (all-to-all) group inside a sequence group.
        tensor: size of the tensor-parallel group.
        device_type: "cpu" or "cuda"; default: the process group's, or "cuda" if torch finds a CUDA device.
        timeout: seconds within which every rank must join (default 600). If given, also the timeout of collectives of
            the process group made here and of the mesh's groups (default: torch's, 10 minutes with GPUs, otherwise 30).

    Returns:
        A `DeviceMesh` with the axes `("data", "ring", "ulysses", "tensor")`; a `OneDeviceMesh` without a process group
        and with every axis 1.

    Raises:
        LongspanError: if an axis is no positive integer, the product is not the number of processes, a rank does not
            join in time, or the environment describes an impossible job.
    """
    parallel = ParallelConfig(data, ring, ulysses, tensor)
    sizes = parallel.degrees
    if device_type is not None:
        check_choice("device_type", device_type, ("cpu", "cuda"))
        if device_type == "cuda" and not torch.cuda.is_available():
            raise LongspanError("device_type='cuda': torch finds no CUDA device; leave it out, or use 'cpu'")
    job = None if dist.is_initialized() else read_job()
    world = dist.get_world_size() if dist.is_initialized() else job.world_size if job else 1
    if parallel.ranks != world:
        axes = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
        raise LongspanError(
            f"init_mesh({axes}) needs {parallel.ranks} processes, this job has {world}; start it with "
            f"`torchrun --nproc-per-node {parallel.ranks} ...`, or choose axes whose product is {world}",
            code="LS102",
        )
    device_type = device_type or _device_type()
    if not dist.is_initialized():
        if world == 1:
            return OneDeviceMesh(device_type)
        default_s = NCCL_TIMEOUT_S if device_type == "cuda" else GLOO_TIMEOUT_S
        join_group(device_type, timeout, timeout or default_s)
    mesh = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=AXES)
    for group in mesh.get_all_groups():
        copy_job_timeout(group)
    return mesh


def mesh_of_one(device: torch.device) -> DeviceMesh:
    """Make a 1-D mesh of this process alone, for FSDP; make a process group of one if there is none.

    Raises:
        LongspanError: if the process has joined a larger job meanwhile.
    """
    if not dist.is_initialized():
        backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    if dist.get_world_size() != 1:
        raise LongspanError(
            f"the mesh was made on a single process, which has since joined a job of {dist.get_world_size()}; call "
            "longspan.init_mesh after that, with axes for all of them"
        )
    return init_device_mesh(device.type, (1,))


def _device_type() -> str:
    if dist.is_initialized() and dist.get_backend() in ("gloo", "mpi"):
        return "cpu"
    return "cuda" if torch.cuda.is_available() else "cpu"


class SequenceSharding:
    """How one sequence is sharded over the ranks of a mesh: a value that is passed explicitly.

    Making one is collective (it may create process groups): every rank must make the same ones in the same order.

    Args:
        mesh: from `init_mesh`, or any `DeviceMesh` with the four axes.
        layout: "zigzag" (balances a causal mask over the ring), "contiguous" (shortest routes under a sliding window;
            as good for a bidirectional mask), another registered layout (`longspan.core.layout`), or "auto": zigzag in
            a ring, otherwise contiguous (the Ulysses all-to-all restores the order of the tokens, so no other layout
            balances better).
        overlap_chunks: number of chunks of heads whose all-to-alls overlap with the attention of another chunk, in
            forward and backward; at most the query heads of a rank (in a ring its KV heads). 1: all heads at once, no
            overlap. "auto": `OVERLAPPED_CHUNKS` if the ranks of a Ulysses group are on several hosts and the
            all-to-all takes long on their link, which is measured here; otherwise 1
            (`longspan.core.routes`). The forward is equal bit for bit.

    Attributes:
        parallel: the axes and the options, as one value.
        size: ranks of the sequence group.
        rank: this rank in the sequence group.
        group: the sequence group; None on a single process.
        ring_size, ring_rank, ring_group: the same of the ring.
        ulysses_size, ulysses_rank, ulysses_group: the same of the Ulysses group.
        data_size: number of replicas.
        data_rank: this rank's replica.
        tensor_size, tensor_rank: the ranks that share each layer's weights and hold the same tokens, and this rank.
        replica_group, replica_size, replica_rank: the ranks that run one sequence, ring x ulysses x tensor in this
            order, and this rank.

    Raises:
        LongspanError: for a mesh without the four axes, an unknown layout, or overlap_chunks below 1.
    """

    @checked_call()
    def __init__(
        self,
        mesh: DeviceMesh | OneDeviceMesh | NarrowMesh,
        layout: str = "auto",
        *,
        overlap_chunks: int | Literal["auto"] = "auto",
    ) -> None:
        if not isinstance(mesh, DeviceMesh | OneDeviceMesh | NarrowMesh):
            raise LongspanError(f"the mesh is {format_value(mesh)} ({type(mesh).__name__}); use longspan.init_mesh")
        names = tuple(mesh.mesh_dim_names or ())
        if names != AXES:
            raise LongspanError(f"the mesh has the axes {names}, SequenceSharding needs {AXES}; use longspan.init_mesh")
        self._options: Any = {"layout": layout, "overlap_chunks": overlap_chunks}
        sizes: Any = dict(zip(AXES, mesh.shape, strict=True))
        self.parallel = ParallelConfig(**sizes, **self._options)
        self.mesh = mesh
        self.prepared: OrderedDict[Any, Any] = OrderedDict()  # the last few of `longspan.attention`
        self._expert_meshes: dict[int, DeviceMesh] = {}  # by ranks of a group
        self.overlap_chunks = overlap_chunks
        self.data_size, self.ring_size, self.ulysses_size, self.tensor_size = mesh.shape
        self.size: int = self.ring_size * self.ulysses_size
        self.layout = choose_layout(layout, self.ring_size, self.ulysses_size)
        self.device = torch.device(mesh.device_type)
        if self.device.type == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.data_rank, self.ring_rank, self.ulysses_rank, self.tensor_rank = (
            0 if isinstance(mesh, OneDeviceMesh) else mesh.get_local_rank(axis) for axis in AXES
        )
        self.ring_group = self._group_of("ring")
        self.ulysses_group = self._group_of("ulysses")
        self.group = self._group_of("ring", "ulysses")
        self.replica_group = self._group_of("ring", "ulysses", "tensor")
        self.rank: int = self.ring_rank * self.ulysses_size + self.ulysses_rank
        self.replica_size: int = self.size * self.tensor_size
        self.replica_rank: int = self.rank * self.tensor_size + self.tensor_rank
        self.all_to_all_link = None
        if overlap_chunks == "auto" and self.ulysses_size > 1:
            assert self.ulysses_group is not None and self.replica_group is not None
            self.all_to_all_link = measure_link(self.ulysses_group, self.replica_group, self.device)
        if self.ring_size > 1 and self.device.type == "cuda":
            # NCCL makes a group's communicator on its first use, which all ranks must join; a ring's messages may
            # concern only some of them.
            dist.barrier(group=self.ring_group, device_ids=[self.device.index])

    def _group_of(self, *axes: str) -> dist.ProcessGroup | None:
        """Return the group of the ranks along some neighbouring axes; None on a single process. Collective."""
        if isinstance(self.mesh, OneDeviceMesh):
            return None
        if isinstance(self.mesh, NarrowMesh):
            return self.mesh.group_of(axes)
        large = tuple(axis for axis in axes if self.mesh[axis].size() > 1)
        if len(large) < 2:
            return self.mesh.get_group(large[0] if large else axes[-1])
        return copy_job_timeout(flatten_mesh(self.mesh[large], "_".join(large)).get_group())

    @cached_property
    def fsdp_mesh(self) -> DeviceMesh | None:
        """The 1-D mesh of data x sequence: weights are sharded and gradients averaged over it. None on one process."""
        if not isinstance(self.mesh, DeviceMesh):
            return None
        flat = flatten_mesh(self.mesh["data", "ring", "ulysses"], "data_sequence")
        copy_job_timeout(flat.get_group())
        return flat

    def shards_weights(self, *, fsdp: bool, cpu_offload: bool) -> bool:
        """Whether FSDP shards the weights: over several ranks, or on one rank that offloads them to the host."""
        return fsdp and (self.world_size > 1 or cpu_offload)

    @property
    def world_group(self) -> dist.ProcessGroup | None:
        """The group of data x sequence, over which losses are summed and gradients averaged. None on one process."""
        return None if self.fsdp_mesh is None else self.fsdp_mesh.get_group()

    @property
    def world_size(self) -> int:
        """Ranks in data x sequence."""
        return self.data_size * self.size

    @cached_property
    def mesh_group(self) -> dist.ProcessGroup | None:
        """The process group of all ranks of the mesh, for consistency checks. None on one process."""
        if self.tensor_size == 1 or not isinstance(self.mesh, DeviceMesh):
            return self.world_group
        return copy_job_timeout(flatten_mesh(self.mesh, "all").get_group())

    @cached_property
    def host_group(self) -> dist.ProcessGroup | None:
        """The group by which the hosts of `mesh_group` communicate without waiting for their GPUs. None on one process.

        It is `mesh_group` itself, whose CPU tensors gloo sends, unless another library made a group for GPUs only.

        Raises:
            LongspanError: if gloo cannot connect the hosts.
        """
        group = self.mesh_group
        if group is None or "cpu:" in dist.get_backend_config(group):
            return group
        try:
            made: dist.ProcessGroup = dist.new_group(
                dist.get_process_group_ranks(group),
                timeout=timedelta(seconds=HOST_TIMEOUT_S),
                backend="gloo",
                use_local_synchronization=True,
            )
        except RuntimeError as error:
            raise LongspanError(
                f"the hosts cannot connect over gloo ({str(error).splitlines()[0]}), which compares their batches; set "
                f"the network interface in GLOO_SOCKET_IFNAME, or switch the comparison off: "
                f"parallelize(..., check_batches=0, check_weights=0)"
            ) from error
        return made

    def expert_mesh(self, size: int) -> DeviceMesh:
        """Return data x sequence as a mesh of `replicas` x `experts`: groups of `size` neighbours. Collective."""
        if size not in self._expert_meshes:
            assert self.fsdp_mesh is not None
            ranks = self.fsdp_mesh.mesh.view(-1, size)
            mesh = DeviceMesh(self.device.type, ranks, mesh_dim_names=("replicas", "experts"))
            for group in mesh.get_all_groups():
                copy_job_timeout(group)
            self._expert_meshes[size] = mesh
        return self._expert_meshes[size]

    @property
    def widths(self) -> tuple[int, ...]:
        """Numbers of ranks that `of_width` takes: the divisors of the sequence group's size."""
        return widths_of(self.size)

    def of_width(self, width: int) -> SequenceSharding:
        """Return the sharding of the same ranks in groups of `width`: `data_size * size / width` replicas.

        Each group is a part of a sequence group, and has its ring and ulysses axes by
        `longspan.core.parallel.axes_of_width`. Groups of all widths are made at the first call for a width below
        `size`, which is collective: every rank of the mesh must make it.

        Raises:
            LongspanError: if `width` does not divide `size`.
        """
        if width not in self.widths:
            allowed = ", ".join(map(str, self.widths))
            raise LongspanError(
                f"{format_value(width)} ranks cannot share a sequence in a group of {self.size}; allowed are {allowed}"
            )
        return self if width == self.size else self._narrower[width]

    @property
    def has_widths(self) -> bool:
        """Whether the groups of all widths are made, so that `of_width` is not collective."""
        return self.size == 1 or "_narrower" in vars(self)

    @cached_property
    def _narrower(self) -> dict[int, SequenceSharding]:
        assert isinstance(self.mesh, DeviceMesh)
        made = {}
        for width in self.widths[:-1]:
            shape = (self.world_size // width, *axes_of_width(self.ulysses_size, width), self.tensor_size)
            mesh = NarrowMesh(self.mesh.device_type, self.mesh.mesh.reshape(shape))
            made[width] = SequenceSharding(mesh, **self._options)
            for shared in ("fsdp_mesh", "mesh_group", "host_group"):
                vars(made[width])[shared] = getattr(self, shared)
        return made

    @property
    def job_size(self) -> int:
        """Ranks of the mesh."""
        return self.world_size * self.tensor_size

    def shard(self, x: torch.Tensor, dim: int = 1, pad_value: float = 0) -> torch.Tensor:
        """Return the local tokens of `x` along `dim`; see `longspan.comm.shard.shard`."""
        from longspan.comm.shard import shard

        return shard(x, self, dim, pad_value)

    def gather(self, x: torch.Tensor, dim: int = 1, length: int | None = None) -> torch.Tensor:
        """Return all tokens of `x` along `dim`, in order, on every rank; see `longspan.comm.shard.gather`."""
        from longspan.comm.shard import gather

        return gather(x, self, dim, length)

    @checked_call()
    def positions(self, n: int) -> torch.Tensor:
        """Return the global positions of the local tokens of `n`, int64 [n_local]. Padding repeats the last one."""
        check_number("n", n, 1, LARGEST_COUNT, whole=True)
        spans = self.layout.padded_spans(n, self.rank)
        return torch.cat([torch.arange(*span, device=self.device) for span in spans]).clamp_(max=n - 1)

    def __repr__(self) -> str:
        axes = [f"{axis}={size}" for axis, size in zip(AXES, self.mesh.shape, strict=True)]
        return f"SequenceSharding({', '.join(axes)}, layout={self.layout.kind}, rank={self.rank} of {self.size})"


def group_name(group: dist.ProcessGroup) -> str:
    """Return the name by which a custom operator, which takes only plain values, finds the group."""
    name: Any = group.group_name
    return str(name)


def make_sharding(parallel: ParallelConfig) -> SequenceSharding:
    """Return the sharding that a command's flags ask for, on a mesh over all ranks of the job. Collective."""
    mesh = init_mesh(parallel.data, parallel.ring, parallel.ulysses, parallel.tensor)
    return SequenceSharding(mesh, parallel.layout, overlap_chunks=parallel.overlap_chunks)
