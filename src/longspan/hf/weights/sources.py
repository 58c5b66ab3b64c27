"""Fill the shards of a model that was sharded without weights: each rank reads its rows from files, or the first rank
makes the full model and sends them.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from longspan.comm.consistency import gather_numbers
from longspan.comm.digests import local_part
from longspan.comm.errors import on_every_rank
from longspan.comm.objects import broadcast_object
from longspan.compat.transformers_api import keys_in_model
from longspan.hf.pretrained import without_progress_bars
from longspan.hf.weights.files import WeightFiles
from longspan.hf.weights.meta_init import set_tensor, stub, tied_names
from longspan.hf.weights.origin import Origin
from longspan.hf.weights.shard_slices import my_slices, slices_of

if TYPE_CHECKING:
    from longspan.comm.mesh import SequenceSharding


class Files:
    """Each rank reads its own rows.

    Args:
        model: its parameters are stubs, with ties.
        keys: the key in the files of each parameter and persistent buffer; of tied names, of one.
        files: None: read nothing.
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
        self, parameters: Mapping[str, nn.Parameter], dtypes: Mapping[str, torch.dtype], sp: SequenceSharding
    ) -> None:
        """Read this rank's rows. Collective.

        Args:
            parameters: sharded, by their names in `model`.
            dtypes: to round to before the parameters' own dtype, by the same names.
            sp: the sharding.
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

        on_every_rank(read, sp.mesh_group)


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
    """The first rank makes the full model and sends the others their rows, a parameter at a time.

    Args:
        model: its parameters are stubs.
        full_model: the full model on the first rank, None on the others.
        parameters: of the model, by name.
    """

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

        full_model, model = on_every_rank(make, sp.mesh_group)
        assert sp.mesh_group is not None
        infos = None if full_model is None else (_parameters(full_model), _buffers(full_model))
        parameters, buffers = broadcast_object(infos, sp.mesh_group)
        same_names = _parameters(model).keys() == parameters.keys() and _buffers(model).keys() == buffers.keys()
        if not all(row[0] for row in gather_numbers([same_names], sp.mesh_group, sp.device)):
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
            dist.broadcast(_bytes(data), group_src=0, group=sp.mesh_group)
            set_tensor(model, name, data.cpu())
        return cls(model, full_model, parameters)

    def fill(
        self, parameters: Mapping[str, nn.Parameter], dtypes: Mapping[str, torch.dtype], sp: SequenceSharding
    ) -> None:
        """As `Files.fill`: scatter the rows of each parameter. Collective; every rank passes the same names."""
        for name, p in parameters.items():
            assert isinstance(p, DTensor)
            slices = [slices_of(p, sp, rank, t) for rank in range(sp.world_size) for t in range(sp.tensor_size)]
            counts = [torch.Size(s.stop - s.start for s in each).numel() for each in slices]
            mine = torch.empty(max(counts), dtype=self.parameters[name].dtype, device=sp.device)
            sent = None
            if self.values is not None:
                full = self.values[name].detach().to(sp.device)
                sent = [_bytes(_padded(full[each].flatten(), mine)) for each in slices]  # scatter needs equal sizes
            dist.scatter(_bytes(mine), sent, group_src=0, group=sp.mesh_group)
            local = local_part(p)
            local.copy_(mine[: local.numel()].view(local.shape))


def _padded(x: Tensor, padding: Tensor) -> Tensor:
    return x if len(x) == len(padding) else torch.cat([x, padding[len(x) :]])


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
