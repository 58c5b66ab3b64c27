"""accelerate's `Accelerator`, for models that longspan has parallelized."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.data_loader import IterableDatasetShard, prepare_data_loader
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import recursively_apply
from torch import Tensor
from torch.utils.data import IterableDataset

from longspan.core.errors import LongspanError

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from longspan.comm.mesh import SequenceSharding


class ReplicaAccelerator(Accelerator):  # type: ignore[misc]
    """An Accelerator that counts the ranks of a sequence group, which read the same batches, as one process.

    It overrides public methods alone, and calls accelerate's `prepare_data_loader`. With `counts_replicas`,
    `num_processes` is that of replicas too, for trainers that divide by it themselves; transformers' divides it by
    `get_tp_size`.
    """

    longspan_sp: SequenceSharding
    counts_replicas = False

    @property
    def num_processes(self) -> int:
        """Return the number of replicas, or of all processes."""
        return self.longspan_sp.data_size if self.counts_replicas else int(super().num_processes)

    @classmethod
    def of(cls, accelerator: Accelerator, sp: SequenceSharding) -> ReplicaAccelerator:
        """Change the class of an existing accelerator, such as that of transformers' Trainer, and return it."""
        changed: Any = accelerator
        changed.__class__, changed.longspan_sp = cls, sp
        return changed  # type: ignore[no-any-return]

    def prepare_model(self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        """Apply mixed precision and compilation alone, as longspan shards the weights and averages the gradients."""
        return super().prepare_model(model, device_placement=False, evaluation_mode=True)

    def prepare_data_loader(
        self, data_loader: DataLoader[Any], device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """Return a loader of this replica's batches."""
        if getattr(data_loader, "_is_accelerate_prepared", False):
            return super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)
        _seed_workers_by_replica(data_loader, self.longspan_sp.data_rank)
        prepared = prepare_data_loader(
            data_loader,
            self.device,
            num_processes=self.longspan_sp.data_size,
            process_index=self.longspan_sp.data_rank,
            split_batches=self.split_batches,
            put_on_device=self.device_placement if device_placement is None else device_placement,
            rng_types=self.rng_types.copy(),
            dispatch_batches=False,  # a dispatcher would count every process of the job
            even_batches=self.even_batches,
            use_seedable_sampler=self.use_seedable_sampler,
            data_seed=self.dataloader_config.data_seed,
            non_blocking=self.non_blocking,
            use_stateful_dataloader=self.use_stateful_dataloader,
        )
        if isinstance(prepared.dataset, IterableDatasetShard):
            prepared.dataset.dataset = _Counted(prepared.dataset.dataset)
        self._dataloaders.append(prepared)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Return a scheduler that steps once per replica; accelerate's steps once per process."""
        made = super().prepare_scheduler(scheduler)
        made.__class__, made.split_batches, made.replicas = _ReplicaScheduler, True, self.longspan_sp.data_size
        return made

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Return the replicas' tensors in order, without the samples that pad the last batch."""
        real = self.real_samples()
        return recursively_apply(
            lambda x: self.gather_over_replicas(x)[: real if x.dim() else None], input_data, error_on_other_type=True
        )

    def gather_over_replicas(self, x: Tensor) -> Tensor:
        """Return `[n, ...]` of each replica as one `[replicas * n, ...]`, scalars as `[replicas]`. Collective."""
        size = self.longspan_sp.data_size
        mine = x.contiguous() if x.dim() else x.reshape(1)
        if size == 1:
            return mine
        parts = [torch.empty_like(mine) for _ in range(size)]
        mesh: Any = self.longspan_sp.mesh
        dist.all_gather(parts, mine, group=mesh.get_group("data"))
        return torch.cat(parts)

    def real_samples(self) -> int | None:
        """Return the samples, over all replicas, of a loader's last batch if repeated ones pad it; else None."""
        state = self.gradient_state
        if not state.end_of_dataloader:
            return None
        remainder, loader = state.remainder, state.active_dataloader
        shard = loader.dataset
        if isinstance(shard, IterableDatasetShard):  # of a stream: its length is unknown before its end
            if loader.num_workers:
                raise LongspanError(
                    f"dataloader_num_workers={loader.num_workers}: workers do not say how many rows a stream has, and "
                    "replicas would count some twice; use 0, or data that is no stream"
                )
            remainder = shard.dataset.rows % (shard.batch_size * shard.num_processes)
        return remainder if remainder > 0 else None


class _Counted(IterableDataset[Any]):
    """A stream that counts the rows that it has returned."""

    def __init__(self, stream: Any) -> None:
        self.stream, self.rows = stream, 0

    def __getattr__(self, name: str) -> Any:
        if name == "stream":  # while it is unpickled
            raise AttributeError(name)
        return getattr(self.stream, name)

    def __iter__(self) -> Iterator[Any]:
        self.rows = 0
        for row in self.stream:
            self.rows += 1
            yield row


class _ReplicaScheduler(AcceleratedScheduler):  # type: ignore[misc]
    replicas = 1

    def step(self, *args: Any, **kwargs: Any) -> None:
        for _ in range(self.replicas):
            super().step(*args, **kwargs)


def _seed_workers_by_replica(loader: DataLoader[Any], replica: int) -> None:
    """Seed workers by replica, not by rank as transformers does: a sequence group needs equal batches."""
    init = loader.worker_init_fn
    if isinstance(init, functools.partial) and "rank" in init.keywords:
        loader.worker_init_fn = functools.partial(init.func, *init.args, **{**init.keywords, "rank": replica})
