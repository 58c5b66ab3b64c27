"""Fill the shards of a model that was sharded without weights: each rank reads its rows from files, or the first rank
makes the full model and sends them.

Until it is sharded, the model has stubs: of any shape in the memory of one number, on the CPU, so that libraries that
add to a model (PEFT) make their own parameters on the CPU, with values. While it is sharded, it has meta tensors.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from longspan.comm.agree import broadcast_object, gather_numbers, on_every_rank
from longspan.comm.mesh import SequenceSharding
from longspan.comm.weights import local_part
from longspan.compat.transformers_api import keys_in_model
from longspan.core.errors import LongspanError
from longspan.core.tile_sizes import even_span
from longspan.hf.model.pretrained import without_progress_bars
from longspan.hf.weights.origin import Origin, WeightFiles
from longspan.hf.weights.quantized import quantize_into

Parameters = Mapping[str, nn.Parameter]
Layers = Mapping[str, Any]
Dtypes = Mapping[str, torch.dtype]


class Files:
    """Each rank reads its own rows, or nothing without `files`.

    The model's parameters are stubs, with ties; `keys` are those in the files, of tied names for one.
    """

    def __init__(self, model: Any, keys: Mapping[str, str], files: WeightFiles | None) -> None:
        self.model = model
        self.files = files
        self.keys = dict(keys)
        for tied in tied_names(model):
            self.keys[tied[0]] = next(keys[name] for name in tied if name in keys)
        for name, x in list(model.named_buffers(remove_duplicate=False)):
            if name in keys:  # FSDP does not shard buffers
                values = torch.zeros(x.shape, dtype=x.dtype)
                set_tensor(model, name, values if files is None else values.copy_(files.read(keys[name])))

    @classmethod
    def of(cls, origin: Origin, files: WeightFiles | None, later: bool) -> Files | None:
        """Return the source; None if transformers must convert weights (merge experts, quantize) or match names."""
        if (files is None and not later) or getattr(origin.config, "quantization_config", None) is not None:
            return None
        meta = origin.on_meta()
        own = meta.state_dict()
        groups = [*tied_names(meta), *([name] for name, _ in meta.named_buffers() if name in own)]
        shapes = {names[0]: tuple(own[names[0]].shape) for names in groups}
        if files is not None:
            shapes = {key: tensor.shape for key, tensor in files.tensors.items()}
        names = keys_in_model(meta, shapes)
        if names is None or any(name in own and shapes[key] != tuple(own[name].shape) for key, name in names.items()):
            return None
        keys = {name: key for key, name in names.items() if name in own}
        unique = len(keys) == sum(name in own for name in names.values())
        if not unique or any(sum(name in keys for name in group) != 1 for group in groups):
            return None
        dtypes = {key: own[name].dtype if name in own else origin.dtype for key, name in names.items()}
        model, info = _with_stubs(origin, type(meta), {key: stub(shapes[key], dtypes[key]) for key in shapes})
        if info["missing_keys"] or info["mismatched_keys"]:
            return None
        if files is not None:
            origin.check(info)
        return cls(model, keys, files)

    def fill(
        self, parameters: Parameters, layers: Layers, dtypes: Mapping[str, torch.dtype], sp: SequenceSharding
    ) -> None:
        """Read this rank's rows of sharded parameters, by their names in `model`. Collective.

        Values are rounded to `dtypes` before the parameters' own dtype. Layers with 4-bit weights, by the weights'
        names: each rank reads and quantizes all, one at a time.
        """
        files = self.files
        if files is None:
            return

        def read() -> None:
            for name, p in parameters.items():
                rows, *others = my_slices(p, sp)
                if rows.start < rows.stop:
                    part = files.read(self.keys[name], rows.start, rows.stop)[:, *others]
                    local_part(p).copy_(part.to(dtypes[name]))
            for name, layer in layers.items():
                quantize_into(layer, files.read(self.keys[name]).to(dtypes[name]), my_slices(layer.weight, sp)[0])

        on_every_rank(read, sp.world_group)


def _with_stubs(origin: Origin, cls: Any, stubs: dict[str, Tensor]) -> tuple[Any, dict[str, Any]]:
    """Load stubs, by the files' keys, as if they were weights: transformers ties weights, chooses dtypes and makes the
    buffers that are in no file. Return the model and transformers' loading info.
    """
    with without_progress_bars():
        loaded: tuple[Any, dict[str, Any]] = cls.from_pretrained(
            None,
            config=copy.deepcopy(origin.config),
            state_dict=stubs,
            dtype=origin.dtype,
            output_loading_info=True,
            **origin.options,
        )
    return loaded


@dataclass(frozen=True)
class _TensorInfo:
    """A parameter or buffer on the first rank; `first` is the first of its tied names."""

    first: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trained: bool


class FirstRank:
    """The first rank makes the full model and sends the others, whose parameters are stubs, a parameter at a time."""

    def __init__(self, model: Any, full_model: Any, parameters: Mapping[str, _TensorInfo]) -> None:
        self.model = model
        self.full_model = full_model
        # Now, as an adapter would rename them.
        self.values = None if full_model is None else dict(full_model.named_parameters())
        self.parameters = parameters

    @classmethod
    def of(cls, origin: Origin, sp: SequenceSharding) -> FirstRank | None:
        """Return the source; None if the loaded model has other weights than one made from its config. Collective."""
        is_first = sp.data_rank == sp.rank == sp.tensor_rank == 0

        def make() -> tuple[Any, Any]:
            with torch.random.fork_rng(devices=[]):  # the other ranks draw no numbers
                full_model = origin.build() if is_first else None
            return full_model, origin.on_meta()

        full_model, model = on_every_rank(make, sp.world_group)
        assert sp.world_group is not None
        infos = None if full_model is None else (_parameters(full_model), _buffers(full_model))
        parameters, buffers = broadcast_object(infos, sp.world_group)
        same_names = _parameters(model).keys() == parameters.keys() and _buffers(model).keys() == buffers.keys()
        if not all(row[0] for row in gather_numbers([same_names], sp.world_group)):
            return None
        made: dict[str, nn.Parameter] = {}
        for name, x in parameters.items():
            if x.first == name:
                made[name] = nn.Parameter(stub(x.shape, x.dtype), requires_grad=x.trained)
            set_tensor(model, name, made[x.first])
        values = {} if full_model is None else dict(full_model.named_buffers(remove_duplicate=False))
        for name, x in buffers.items():
            data = values[name].to(sp.device) if values else torch.empty(x.shape, dtype=x.dtype, device=sp.device)
            data = data.clone(memory_format=torch.contiguous_format)  # longrope writes into its buffer in a forward
            dist.broadcast(_bytes(data), group_src=0, group=sp.world_group)
            set_tensor(model, name, data.cpu())
        return cls(model, full_model, parameters)

    def fill(
        self, parameters: Parameters, layers: Layers, dtypes: Mapping[str, torch.dtype], sp: SequenceSharding
    ) -> None:
        """As `Files.fill`, with what the first rank sends. Collective; every rank passes the same names."""
        for name, p in parameters.items():
            assert isinstance(p, DTensor)
            slices = [slices_of(p, sp, rank, t) for rank in range(sp.fsdp_size) for t in range(sp.tensor_size)]
            counts = [torch.Size(s.stop - s.start for s in each).numel() for each in slices]
            mine = torch.empty(max(counts), dtype=self.parameters[name].dtype, device=sp.device)
            sent = None
            if self.values is not None:
                full = self.values[name].detach().to(sp.device)
                parts = [full[each].flatten() for each in slices]
                sent = [_bytes(F.pad(x, (0, len(mine) - len(x)))) for x in parts]  # scatter needs equal sizes
            dist.scatter(_bytes(mine), sent, group_src=0, group=sp.world_group)
            local = local_part(p)
            local.copy_(mine[: local.numel()].view(local.shape))
        for name, layer in layers.items():
            x = self.parameters[name]
            whole = torch.empty(x.shape, dtype=x.dtype, device=sp.device)
            if self.values is not None:
                whole.copy_(self.values[name].detach())
            dist.broadcast(_bytes(whole), group_src=0, group=sp.world_group)
            quantize_into(layer, whole, my_slices(layer.weight, sp)[0])


def _bytes(x: Tensor) -> Tensor:
    """View as bytes, which every backend can send."""
    return x.contiguous().view(-1).view(torch.uint8)


def _parameters(model: nn.Module) -> dict[str, _TensorInfo]:
    return {
        name: _TensorInfo(tied[0], tuple(p.shape), p.dtype, p.requires_grad)
        for tied, p in zip(tied_names(model), model.parameters(), strict=True)
        for name in tied
    }


def _buffers(model: nn.Module) -> dict[str, _TensorInfo]:
    buffers = model.named_buffers(remove_duplicate=False)
    return {name: _TensorInfo(name, tuple(x.shape), x.dtype, False) for name, x in buffers}


_FIX = "load the whole model with transformers, change it, and give it to longspan.parallelize"


def stub(shape: Iterable[int], dtype: torch.dtype) -> Tensor:
    """Return a stub of NaN, which shows in whatever is computed from it; of zeros for integers."""
    value = math.nan if dtype.is_floating_point else 0
    return torch.full((), value, dtype=dtype).expand(tuple(shape))


def tied_names(model: nn.Module) -> list[list[str]]:
    """Return the names of each parameter, in the model's order: several for a tied one."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(p, []).append(name)
    return list(names.values())


def set_tensor(model: nn.Module, name: str, value: Tensor) -> None:
    """Set a parameter or buffer by its name."""
    owner, _, own = name.rpartition(".")
    setattr(model.get_submodule(owner), own, value)


def to_meta(model: nn.Module, stubs: Mapping[nn.Parameter, str]) -> dict[str, str]:
    """Move stubs to the meta device; ties and other parameters stay. Return by name in `model` the name in `stubs`.

    `model` may wrap the model that the stubs belonged to, and have other parameters.
    """
    names = {}
    missing = dict(stubs)
    for (first, *others), p in zip(tied_names(model), list(model.parameters()), strict=True):
        if p not in stubs:
            if p.is_floating_point() and bool(p.isnan().any()):
                raise LongspanError(
                    f"`prepare` computed {first} from weights, which are not loaded yet (or it is NaN); {_FIX}"
                )
            continue
        names[first] = missing.pop(p)
        empty = nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="meta"), requires_grad=p.requires_grad)
        for name in (first, *others):
            set_tensor(model, name, empty)
    if missing:
        name = next(iter(missing.values()))
        raise LongspanError(f"`prepare` has replaced parameter {name}, which is not loaded yet; {_FIX}")
    return names


def materialize(model: nn.Module, device: torch.device) -> None:
    """Allocate tensors that are on the meta device (under FSDP2, this rank's shards); the others keep their values."""
    ties = tied_names(model)
    tensors: dict[str, Any] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    values = {name: local_part(x).clone() for name, x in tensors.items() if not x.is_meta}
    del tensors
    model.to_empty(device=device)
    for first, *others in ties:
        for name in others:
            set_tensor(model, name, model.get_parameter(first))
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, x in values.items():
        local_part(tensors[name]).copy_(x)


def tensor_parts(p: Tensor) -> int:
    """Return over how many ranks of the tensor group a weight is sharded; 1 for none."""
    return _tensor_shard(p)[1]


def my_slices(p: Tensor, sp: SequenceSharding) -> tuple[slice, ...]:
    """Return the slices of a weight that this rank holds, one per dimension."""
    return slices_of(p, sp, sp.data_rank * sp.size + sp.rank, sp.tensor_rank)


def slices_of(p: Tensor, sp: SequenceSharding, rank: int, tensor_rank: int) -> tuple[slice, ...]:
    """Return the slices of a weight that the given rank of data x sequence and of the tensor group holds."""
    shape = list(p.shape)
    starts = [0] * len(shape)
    dim, parts = _tensor_shard(p)
    if parts > 1:
        starts[dim], stop = even_span(shape[dim], tensor_rank, parts)
        shape[dim] = stop - starts[dim]
    if isinstance(p, DTensor) and "tensor" not in (p.device_mesh.mesh_dim_names or ())[:1]:
        first, stop = even_span(shape[0], rank, sp.fsdp_size)
        starts[0], shape[0] = starts[0] + first, stop - first
    return tuple(slice(start, start + length) for start, length in zip(starts, shape, strict=True))


def _tensor_shard(p: Tensor) -> tuple[int, int]:
    """Return the dimension that is sharded over the tensor group, and over how many ranks."""
    names = (p.device_mesh.mesh_dim_names or ()) if isinstance(p, DTensor) else ()
    if not isinstance(p, DTensor) or "tensor" not in names:
        return 0, 1
    axis = names.index("tensor")
    placement = p.placements[axis]
    return (placement.dim, p.device_mesh.size(axis)) if isinstance(placement, Shard) else (0, 1)
