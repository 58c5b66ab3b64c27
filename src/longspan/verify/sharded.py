"""The sharded run, and its errors relative to the unsharded ones.

Rank 0 holds the unsharded results and broadcasts them tensor by tensor, in bounded chunks. Shape suffixes: B rows of
the batch, S tokens, L local tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import longspan
from longspan.checkpoint import Checkpoint
from longspan.comm.consistency import check_same_model
from longspan.comm.digests import digests_of, local_part, weights_of
from longspan.comm.errors import on_every_rank
from longspan.comm.mesh import SequenceSharding
from longspan.comm.objects import gather_objects
from longspan.hf.loading import find_source, load_from
from longspan.hf.parallelize import parallelize
from longspan.hf.support import check_model, switch_dropout_off
from longspan.hf.weights.origin import Origin
from longspan.hf.weights.sources import FirstRank, my_slices
from longspan.verify.compare import ErrorSums, LocalRows, compare_rows, row_chunks
from longspan.verify.config import VerifyConfig
from longspan.verify.judge import Criterion, judge, layer_of
from longspan.verify.report import Equality, Report
from longspan.verify.unsharded import Tensors


def make_models(
    origin: Origin, config: VerifyConfig, sp: SequenceSharding, load: Callable[[nn.Module], None]
) -> tuple[nn.Module | None, Callable[[], nn.Module]]:
    """Load the unsharded model, and return it with a function that makes the sharded one. Both collective.

    `load` loads a checkpoint's weights into the unsharded model, or does nothing.

    Returns:
        The unsharded model (with FSDP None except on rank 0), and the function, which shards as `longspan train` does.

    Raises:
        LongspanError: on every rank, if the model cannot be made or sharded, or ranks hold different weights.
    """
    sharded = config.fsdp and sp.world_size > 1
    source = find_source(origin, sp, later=config.resume is not None) if config.fsdp and sp.job_size > 1 else None

    def prepared(model: Any) -> Any:
        if origin.adapter is not None:  # the adapter has its own dropout, which the config does not set
            switch_dropout_off(model)
        return model.train()

    def make() -> nn.Module | None:
        # Fail before the long runs.
        check_model(origin.on_meta(), sp.device, sp.ring_size, config.kernel)
        if source is not None and dist.get_rank(sp.mesh_group):
            return None
        given = source.full_model if isinstance(source, FirstRank) else None
        model: Any = origin.build() if given is None else origin.adapted(given)
        load(model)
        return prepared(model).to(sp.device)  # type: ignore[no-any-return]

    unsharded = on_every_rank(make, sp.mesh_group)
    # With FSDP, bf16 keeps weights and sums of gradients in fp32.
    bf16 = sharded and config.dtype == "bf16"
    options: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else None,
        "kernel": config.kernel,
        "memory": "auto" if config.chooses else config.to_memory(),
        "tensor_style": config.parallel.tensor_style,
    }

    def shard() -> nn.Module:
        if source is not None:
            cast_to = torch.float32 if bf16 else None
            model: nn.Module = load_from(source, origin, sp, prepare=prepared, cast_to=cast_to, **options)
            return model
        assert unsharded is not None
        return parallelize(unsharded.float() if bf16 else unsharded, sp, fsdp=config.fsdp, **options)

    if source is None:
        assert unsharded is not None
        check_same_model(sp, {}, digests_of(weights_of(unsharded)), None)  # before the long runs
    return unsharded, shard


def sharded_parts(sp: SequenceSharding, model: nn.Module, loss: Tensor) -> Iterator[tuple[str, LocalRows]]:
    """Yield the local rows of the loss and every gradient, in the same order on every rank."""
    first = torch.zeros(1, dtype=torch.int64, device=sp.device)
    yield "loss", LocalRows(first, loss.detach().reshape(1), (1,))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield name, gradient_part(parameter, sp)


def logits_part(config: VerifyConfig, sp: SequenceSharding, logits_BLV: Tensor) -> LocalRows:
    """Return this rank's rows of the logits `[B * S, V]`."""
    # From the layout, not from sp.positions(), which is under test.
    spans = sp.layout.padded_spans(config.tokens, sp.rank)
    mine = torch.cat([torch.arange(*span, device=sp.device) for span in spans])
    real = mine < config.tokens
    rows_B = torch.arange(config.batch, device=sp.device) + sp.data_rank * config.batch
    rows_BL = rows_B[:, None] * config.tokens + mine[real]
    logits_BLV = logits_BLV.detach()[:, real]
    shape = (config.batch * config.parallel.data_degree * config.tokens, logits_BLV.shape[-1])
    return LocalRows(rows_BL.flatten(), logits_BLV.flatten(0, 1), shape)


def gradient_part(parameter: nn.Parameter, sp: SequenceSharding) -> LocalRows:
    """Return this rank's rows of a gradient: of FSDP2's shard, the tensor rank's part, or both. No gradient counts as
    zeros.
    """
    values = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
    rows, *rest = my_slices(parameter, sp)
    mine = torch.arange(rows.start, rows.stop, device=parameter.device)
    return LocalRows(mine, local_part(values), tuple(parameter.shape), tuple(rest))


def make_report(
    config: VerifyConfig,
    sp: SequenceSharding,
    hosts: dist.ProcessGroup | None,
    references: tuple[Tensors, Tensors],
    parts: dict[str, LocalRows],
    checkpoint: Checkpoint | None = None,
) -> Report:
    """Compare this rank's `parts` with rank 0's results of the reference run and of the unsharded run. Collective.

    `hosts` is the group of all ranks for Python objects; `checkpoint` the source of the weights, if any.
    """
    mine = {name: _measure(name, part, references, sp) for name, part in parts.items()}
    everyone = gather_objects(mine, hosts)
    criterion = Criterion.of(config.dtype, config.reference)
    if config.parallel.lossy:
        layers = {layer_of(name) for name in parts} - {None}
        criterion = criterion.lossy(config.parallel.wire_dtype, len(layers))
    losses = gather_objects(float(parts["loss"].values), hosts)
    equalities = [Equality.of("loss", losses, [f"{loss:.9g}" for loss in losses])]
    if not config.fsdp:
        digests = digests_of({name: part.values for name, part in parts.items() if name not in ("loss", "logits")})
        of_ranks = gather_objects(digests, hosts)
        # Ranks with the same tensor rank hold the same parts.
        equal = [digests == of_ranks[rank % sp.tensor_size] for rank, digests in enumerate(of_ranks)]
        equalities.append(Equality.of("gradients", equal))
    return Report(
        setup=_setup(config, sp, checkpoint),
        criterion=criterion,
        checks=judge({name: [sums[name] for sums in everyone] for name in mine}, criterion),
        equalities=tuple(equalities),
        rank_tokens=tuple(gather_objects((sp.data_rank, sp.layout.spans(config.tokens, sp.rank)), hosts)),
    )


def _setup(config: VerifyConfig, sp: SequenceSharding, checkpoint: Checkpoint | None) -> dict[str, Any]:
    device = torch.cuda.get_device_name(sp.device) if sp.device.type == "cuda" else sp.device.type
    return {
        "model": str(config.model or config.config) if checkpoint is None else str(checkpoint.path),
        "weights": "random" if config.model is None and checkpoint is None else "given",
        "checkpoint": checkpoint
        and {
            "step": checkpoint.step,
            "files": len(checkpoint.files),
            "bytes": sum(record.size for record in checkpoint.files.values()),
        },
        "context": config.context,
        "tokens": config.tokens,
        "batch": config.batch,
        "data_degree": config.parallel.data_degree,
        "ring": config.parallel.ring,
        "ulysses": config.parallel.ulysses,
        "tensor": config.parallel.tensor,
        "tensor_style": config.parallel.tensor_style if config.parallel.tensor > 1 else None,
        "layout": sp.layout.kind,
        "ring_impl": config.parallel.ring_impl if config.parallel.ring > 1 else None,
        "wire_dtype": config.parallel.wire_dtype if config.parallel.lossy else "exact",
        "dtype": config.dtype,
        "reference": config.reference,
        "fsdp": config.fsdp,
        "kernel": config.kernel,
        "memory": "auto" if config.chooses else config.to_memory().describe(),
        "data": config.data,
        "seed": config.seed,
        "device": device,
        "longspan": longspan.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _measure(name: str, part: LocalRows, references: tuple[Tensors, Tensors], sp: SequenceSharding) -> ErrorSums:
    """Compare the local rows of one tensor with rank 0's references, in bounded chunks. Collective."""
    total = ErrorSums()
    for start, stop in row_chunks(part.shape):
        chunks = torch.zeros(2, stop - start, *part.shape[1:], dtype=torch.float64, device=sp.device)
        for chunk, reference in zip(chunks, references, strict=True):
            if name in reference:  # only on rank 0; a parameter without a gradient stays zero
                chunk.copy_(reference[name][start:stop])
        if sp.mesh_group is not None:
            dist.broadcast(chunks, group_src=0, group=sp.mesh_group)
        total += compare_rows(part, start, chunks[0], chunks[1])
    return total
