"""The device mesh and the sharding of a sequence over it: explicit values, no global state.

A mesh has four named axes in a fixed order: `data`, `ring`, `ulysses`, `tensor`. Neighbouring ranks share the axes to
the right, so the ones that communicate most (`tensor`, `ulysses`) stay inside a node, and `ring` and `data` span nodes.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from longspan.comm.link import measure_link
from longspan.compat.torch_api import copy_job_timeout, flatten_mesh, group_of_partition, use_expandable_segments
from longspan.compat.torch_api import find_group as find_group
from longspan.core.errors import LongspanError
from longspan.core.layout import choose_layout
from longspan.core.parallel import AXES, Axes, ParallelConfig, axes_of_width, widths_of
from longspan.core.validation import LARGEST_COUNT, check_choice, check_number, format_value
from longspan.ranks.job import HOST_TIMEOUT_S, join_process_group, read_job

GLOO_TIMEOUT_S, NCCL_TIMEOUT_S = 1800, 600  # torch's own defaults


@dataclass(frozen=True, eq=False, repr=False)
class MeshGroups:
    """This rank's place in a mesh, and its process groups; by default a single process, which has none.

    Attributes:
        device_type: as in `DeviceMesh`.
        ranks: [data, ring, ulysses, tensor].
        coordinate: this rank's index along each axis.
        ring, ulysses, sequence, model: the groups along the axis, ring x ulysses, and ring x ulysses x tensor.
        fsdp_mesh: the 1-D mesh of data x ring x ulysses.
        world: the group of all ranks.
    """

    mesh_dim_names: ClassVar[tuple[str, ...]] = AXES

    device_type: str
    ranks: torch.Tensor = field(default_factory=lambda: torch.zeros(1, 1, 1, 1, dtype=torch.int64))
    coordinate: Sequence[int] = (0, 0, 0, 0)
    ring: dist.ProcessGroup | None = None
    ulysses: dist.ProcessGroup | None = None
    sequence: dist.ProcessGroup | None = None
    model: dist.ProcessGroup | None = None
    fsdp_mesh: DeviceMesh | None = None
    world: dist.ProcessGroup | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.ranks.shape)

    @classmethod
    def of(cls, mesh: DeviceMesh) -> MeshGroups:
        """Return the groups of a mesh; the first call makes those along several axes larger than 1. Collective."""
        sizes = dict(zip(AXES, mesh.shape, strict=True))

        def large(*axes: str) -> tuple[str, ...]:
            return tuple(axis for axis in axes if sizes[axis] > 1) or axes[-1:]

        @functools.cache
        def flat(*axes: str) -> DeviceMesh:
            if len(axes) == 1:
                return mesh[axes[0]]
            joined = flatten_mesh(mesh[axes], "_".join(axes))
            copy_job_timeout(joined.get_group())
            return joined

        def along(*axes: str) -> dist.ProcessGroup:
            # A group of one axis needs no mesh of its own, which takes a millisecond to make.
            axes = large(*axes)
            return mesh.get_group(axes[0]) if len(axes) == 1 else flat(*axes).get_group()

        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        return cls(
            mesh.device_type,
            mesh.mesh,
            coordinate,
            ring=along("ring"),
            ulysses=along("ulysses"),
            sequence=along("ring", "ulysses"),
            model=along("ring", "ulysses", "tensor"),
            fsdp_mesh=flat(*large("data", "ring", "ulysses")),
            world=along(*AXES),
        )

    def resized(self, shape: Sequence[int], made: dict[Partition, dist.ProcessGroup]) -> MeshGroups:
        """Return the groups of the same ranks along axes of other sizes, None along axes of size 1. Collective.

        Reuse the groups in `made`, and add new ones to it. gloo starts threads for each group of a
        DeviceMesh, even for those of one rank, so this makes none.
        """
        ranks = self.ranks.reshape(tuple(shape))

        def along(*axes: str) -> dist.ProcessGroup | None:
            partition = _partition(ranks, axes)
            if partition and partition not in made:
                made[partition] = group_of_partition(partition)
            return made.get(partition)

        return replace(
            self,
            ranks=ranks,
            coordinate=(ranks == dist.get_rank()).nonzero()[0].tolist(),
            ring=along("ring"),
            ulysses=along("ulysses"),
            sequence=along("ring", "ulysses"),
            model=along("ring", "ulysses", "tensor"),
        )


Partition = tuple[tuple[int, ...], ...]
"""All ranks, cut into groups."""


def _partition(ranks: torch.Tensor, axes: Sequence[str]) -> Partition:
    """Return the ranks of each group along `axes`; empty if the groups have one rank each."""
    large = tuple(i for i, axis in enumerate(AXES) if axis in axes and ranks.shape[i] > 1)
    if not large:
        return ()
    rows = ranks.movedim(large, tuple(range(-len(large), 0))).flatten(-len(large)).flatten(0, -2)
    return tuple(map(tuple, rows.tolist()))


def init_mesh(
    data: int = 1,
    ring: int = 1,
    ulysses: int = 1,
    tensor: int = 1,
    *,
    device_type: str | None = None,
    timeout: float | None = None,
) -> DeviceMesh | MeshGroups:
    """Build the mesh, and join the job that torchrun's environment describes if this process has not joined one.

    On GPUs, let torch's allocator use `expandable_segments`, unless it is configured.

    Args:
        data: number of replicas that read different sequences.
        ring: size of the ring inside a sequence group.
        ulysses: size of the Ulysses (all-to-all) group inside a sequence group.
        tensor: size of the tensor-parallel group.
        device_type: "cpu" or "cuda"; default: the process group's, or "cuda" if torch finds a CUDA device.
        timeout: seconds within which every rank must join (default 600). If given, also the timeout of collectives of
            the process group made here and of the mesh's groups (default: torch's, 10 minutes with GPUs, otherwise 30).

    Returns:
        A `DeviceMesh` with the axes `("data", "ring", "ulysses", "tensor")`; `MeshGroups` for a single process without
        a process group.

    Raises:
        LongspanError: if an axis is no positive integer, the product is not the number of processes, a rank does not
            join in time, or the environment describes an impossible job.
    """
    axes = Axes(data, ring, ulysses, tensor)
    if device_type is not None:
        check_choice("device_type", device_type, ("cpu", "cuda"))
        if device_type == "cuda" and not torch.cuda.is_available():
            raise LongspanError("device_type='cuda': torch finds no CUDA device; leave it out, or use 'cpu'")
    return _join(axes, device_type, timeout)


def _join(axes: Axes, device_type: str | None = None, timeout: float | None = None) -> DeviceMesh | MeshGroups:
    """Return the mesh of the axes. Join the job first, if `joined` (ranks/launch.py) or the user has not."""
    job = None if dist.is_initialized() else read_job()
    world = dist.get_world_size() if dist.is_initialized() else job.world_size if job else 1
    if axes.ranks != world:
        sizes = ", ".join(f"{axis}={size}" for axis, size in axes.degrees.items())
        raise LongspanError(
            f"init_mesh({sizes}) needs {axes.ranks} processes, this job has {world}; start it with "
            f"`torchrun --nproc-per-node {axes.ranks} ...`, or choose axes whose product is {world}",
            code="LS102",
        )
    device_type = device_type or _device_type()
    if device_type == "cuda":
        use_expandable_segments()
    if not dist.is_initialized():
        if world == 1:
            return MeshGroups(device_type)
        default_s = NCCL_TIMEOUT_S if device_type == "cuda" else GLOO_TIMEOUT_S
        join_process_group(device_type, timeout, timeout or default_s)
    mesh = init_device_mesh(device_type, tuple(axes.degrees.values()), mesh_dim_names=AXES)
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
            a ring, otherwise contiguous (the Ulysses all-to-all restores the order of the tokens).
        overlap_chunks: as in `ParallelConfig`. With "auto", the link between hosts is measured here. The forward is
            equal bit for bit.

    Attributes:
        parallel: the axes and the options, as one value.
        size, rank, group: ranks of the sequence group, this rank in it, and the group (None on a single process).
        ring_size, ring_rank, ring_group: the same of the ring.
        ulysses_size, ulysses_rank, ulysses_group: the same of the Ulysses group.
        data_size, data_rank: number of replicas, and this rank's.
        tensor_size, tensor_rank: the ranks that share each layer's weights and hold the same tokens, and this rank.
        model_group, model_size, model_rank: the ranks that together run one replica of the model, ring x ulysses x
            tensor in this order, and this rank. `data_size * model_size` is `world_size`, as in Megatron.
        fsdp_mesh, fsdp_group, fsdp_size: data x ring x ulysses. FSDP shards weights, gradients are averaged and losses
            summed over these ranks. The mesh has one axis; it and the groups are None on a single process.
        world_group, world_size: all ranks of the mesh.

    Raises:
        LongspanError: for a mesh without the four axes, an unknown layout, or overlap_chunks below 1.
    """

    def __init__(
        self,
        mesh: DeviceMesh | MeshGroups,
        layout: str = "auto",
        *,
        overlap_chunks: int | Literal["auto"] = "auto",
    ) -> None:
        if not isinstance(mesh, DeviceMesh | MeshGroups):
            raise LongspanError(f"the mesh is {format_value(mesh)} ({type(mesh).__name__}); use longspan.init_mesh")
        names = tuple(mesh.mesh_dim_names or ())
        if names != AXES:
            raise LongspanError(f"the mesh has the axes {names}, SequenceSharding needs {AXES}; use longspan.init_mesh")
        given: Any = {**dict(zip(AXES, mesh.shape, strict=True)), "layout": layout, "overlap_chunks": overlap_chunks}
        self._make(mesh, ParallelConfig(**given))

    @classmethod
    def of(cls, parallel: ParallelConfig) -> SequenceSharding:
        """Join the job, as `init_mesh` does, and return the sharding that a command's flags describe. Collective."""
        return cls.__new__(cls)._make(_join(parallel), parallel)

    def _make(
        self, mesh: DeviceMesh | MeshGroups, parallel: ParallelConfig, widest: SequenceSharding | None = None
    ) -> SequenceSharding:
        self.mesh, self.parallel, self._widest = mesh, parallel, widest
        self.groups = groups = mesh if isinstance(mesh, MeshGroups) else MeshGroups.of(mesh)
        self.prepared: OrderedDict[Any, Any] = OrderedDict()  # the last few of `longspan.attention`
        self._expert_meshes: dict[int, DeviceMesh] = {}  # by ranks of a group
        self._narrower: dict[int, SequenceSharding] = {}  # by width
        self.overlap_chunks = parallel.overlap_chunks
        self.data_size, self.ring_size, self.ulysses_size, self.tensor_size = groups.shape
        self.data_rank, self.ring_rank, self.ulysses_rank, self.tensor_rank = groups.coordinate
        self.size: int = self.ring_size * self.ulysses_size
        self.rank: int = self.ring_rank * self.ulysses_size + self.ulysses_rank
        self.model_size: int = self.size * self.tensor_size
        self.model_rank: int = self.rank * self.tensor_size + self.tensor_rank
        self.fsdp_size: int = self.data_size * self.size
        self.world_size: int = self.data_size * self.model_size
        self.ring_group, self.ulysses_group = groups.ring, groups.ulysses
        self.group, self.model_group, self.world_group = groups.sequence, groups.model, groups.world
        self.fsdp_mesh = groups.fsdp_mesh
        self.fsdp_group = None if self.fsdp_mesh is None else self.fsdp_mesh.get_group()
        self.layout = choose_layout(parallel.layout, self.ring_size, self.ulysses_size)
        self.device = torch.device(groups.device_type)
        if self.device.type == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.all_to_all_link = None
        if parallel.overlap_chunks == "auto" and self.ulysses_size > 1:
            assert self.ulysses_group is not None and self.model_group is not None
            self.all_to_all_link = measure_link(self.ulysses_group, self.model_group, self.device)
        if self.ring_size > 1 and self.device.type == "cuda":
            # NCCL makes a group's communicator on its first use, which all ranks must join; a ring's messages may
            # concern only some of them.
            dist.barrier(group=self.ring_group, device_ids=[self.device.index])
        return self

    def shards_weights(self, *, fsdp: bool, cpu_offload: bool) -> bool:
        """Whether FSDP shards the weights: over several ranks, or on one rank that offloads them to the host."""
        return fsdp and (self.fsdp_size > 1 or cpu_offload)

    @cached_property
    def host_group(self) -> dist.ProcessGroup | None:
        """The group by which the hosts of all ranks communicate without waiting for their GPUs. None on one process.

        It is `world_group` itself, whose CPU tensors gloo sends, unless another library made a group for GPUs only.

        Raises:
            LongspanError: if gloo cannot connect the hosts.
        """
        if self._widest is not None:
            return self._widest.host_group
        group = self.world_group
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
        if width < self.size and not self.has_widths:
            made = dict[Partition, dist.ProcessGroup]()
            for axis in ("ulysses", "tensor"):  # narrower widths use these groups, too
                if partition := _partition(self.groups.ranks, [axis]):
                    made[partition] = self.mesh.get_group(axis)  # type: ignore[union-attr]
            self._narrower = {narrow: self._narrow(narrow, made) for narrow in self.widths[:-1]}
        return self if width == self.size else self._narrower[width]

    def _narrow(self, width: int, made: dict[Partition, dist.ProcessGroup]) -> SequenceSharding:
        ring, ulysses = axes_of_width(self.ulysses_size, width)
        parallel = replace(self.parallel, data=self.fsdp_size // width, ring=ring, ulysses=ulysses)
        groups = self.groups.resized([*parallel.degrees.values()], made)
        return SequenceSharding.__new__(SequenceSharding)._make(groups, parallel, self._widest or self)

    @property
    def has_widths(self) -> bool:
        """Whether the groups of all widths are made, so that `of_width` is not collective."""
        return len(self._narrower) == len(self.widths) - 1

    def shard(self, x: torch.Tensor, dim: int = 1, pad_value: float = 0) -> torch.Tensor:
        """Return the local tokens of `x` along `dim`; see `longspan.comm.shard.shard`."""
        from longspan.comm.shard import shard

        return shard(x, self, dim, pad_value)

    def gather(self, x: torch.Tensor, dim: int = 1, length: int | None = None) -> torch.Tensor:
        """Return all tokens of `x` along `dim`, in order, on every rank; see `longspan.comm.shard.gather`."""
        from longspan.comm.shard import gather

        return gather(x, self, dim, length)

    def positions(self, n: int) -> torch.Tensor:
        """Return the global positions of the local tokens of `n`, int64 [n_local]. Padding repeats the last one."""
        check_number("n", n, 1, LARGEST_COUNT, whole=True)
        spans = self.layout.padded_spans(n, self.rank)
        return torch.cat([torch.arange(*span, device=self.device) for span in spans]).clamp_(max=n - 1)

    def __repr__(self) -> str:
        axes = [f"{axis}={size}" for axis, size in self.parallel.degrees.items()]
        return f"SequenceSharding({', '.join(axes)}, layout={self.layout.kind}, rank={self.rank} of {self.size})"


def group_name(group: dist.ProcessGroup) -> str:
    """Return the name by which a custom operator, which takes only plain values, finds the group."""
    name: Any = group.group_name
    return str(name)
