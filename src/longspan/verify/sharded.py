"""The sharded run, and its errors relative to the unsharded ones.

Rank 0 holds the unsharded results and broadcasts them tensor by tensor, in bounded chunks. Shape suffixes: B rows of
the batch, S tokens, L local tokens, V vocabulary.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import longspan
from longspan.checkpoint import Checkpoint
from longspan.comm.digests import local_part
from longspan.comm.errors import on_every_rank
from longspan.comm.mesh import SequenceSharding
from longspan.core.errors import LongspanError
from longspan.hf.loading import find_source, load_from
from longspan.hf.parallelize import parallelize
from longspan.hf.support import Place, check_model, switch_dropout_off
from longspan.hf.weights.shard_slices import my_box
from longspan.hf.weights.sources import FirstRank, Origin
from longspan.verify.compare import ErrorSums, LocalRows, compare_rows, row_chunks
from longspan.verify.config import VerifyConfig
from longspan.verify.judge import Criterion, judge, layer_of
from longspan.verify.report import Report, equality
from longspan.verify.unsharded import Tensors
from longspan.verify.world import World


def check_same_weights(model: nn.Module, world: World) -> None:
    """Raise if ranks hold different weights. Collective.

    Raises:
        LongspanError: on every rank, naming those that differ from rank 0.
    """
    checksums = world.gather([_checksum(tensor) for tensor in model.state_dict().values()])
    differing = [rank for rank, other in enumerate(checksums) if other != checksums[0]]
    if differing:
        raise LongspanError(
            f"ranks {differing} hold other weights than rank 0; check that every machine sees the same model files"
        )


def _checksum(x: Tensor) -> int:
    return zlib.crc32(x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)


@dataclass(frozen=True)
class Models:
    """The unsharded model, and a function that makes the sharded one.

    Attributes:
        whole: for the unsharded runs; with FSDP None except on rank 0.
        shard: makes the sharded model as `longspan train` does. Collective.
    """

    whole: nn.Module | None
    shard: Callable[[], nn.Module]


def make_models(
    origin: Origin, config: VerifyConfig, sp: SequenceSharding, world: World, load: Callable[[nn.Module], None]
) -> Models:
    """Load the model for both runs. Collective.

    Args:
        origin: source of the model.
        config: of the comparison.
        sp: the sharding.
        world: all ranks.
        load: loads a checkpoint's weights into the whole model, or does nothing.

    Raises:
        LongspanError: on every rank, if the model cannot be made or sharded, or ranks hold other weights than rank 0.
    """
    sharded = config.fsdp and sp.world_size > 1
    apart = config.fsdp and sp.job_size > 1  # ranks get their shards; rank 0 alone holds the whole model
    source = find_source(origin, sp, later=config.resume is not None) if apart else None

    def prepared(model: Any) -> Any:
        if origin.adapter is not None:  # the adapter has its own dropout, which the config does not set
            switch_dropout_off(model)
        return model.train()

    def make() -> nn.Module | None:
        # Fail before the long runs.
        check_model(origin.on_meta(), Place(sp.device, sp.ring_size), config.kernel)
        if source is not None and world.rank:
            return None
        given = source.whole if isinstance(source, FirstRank) else None
        whole: Any = origin.build() if given is None else origin.adapted(given)
        load(whole)
        return prepared(whole).to(sp.device)  # type: ignore[no-any-return]

    whole = on_every_rank(make, sp.mesh_group)
    # With FSDP, bf16 keeps weights and sums of gradients in fp32.
    bf16 = sharded and config.dtype == "bf16"
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else None
    options: dict[str, Any] = {
        "mp_policy": policy,
        "kernel": config.kernel,
        "memory": "auto" if config.chooses else config.to_memory(),
        "tensor_style": config.parallel.tensor_style,
    }

    def shard() -> nn.Module:
        if source is not None:
            kept = torch.float32 if bf16 else None
            model: nn.Module = load_from(source, origin, sp, prepare=prepared, kept=kept, **options)
            return model
        assert whole is not None
        return parallelize(whole.float() if bf16 else whole, sp, fsdp=config.fsdp, **options)

    if source is None:
        assert whole is not None
        check_same_weights(whole, world)
    return Models(whole, shard)


def sharded_parts(
    sp: SequenceSharding, model: nn.Module, loss: Tensor
) -> Iterator[tuple[str, tuple[LocalRows, tuple[int, ...]]]]:
    """Yield name, local rows and whole shape of the loss and every gradient, in the same order on every rank."""
    first = torch.zeros(1, dtype=torch.int64, device=sp.device)
    yield "loss", (LocalRows(first, loss.detach().reshape(1)), (1,))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield name, (gradient_part(parameter, sp), tuple(parameter.shape))


def logits_part(config: VerifyConfig, sp: SequenceSharding, logits_BLV: Tensor) -> tuple[LocalRows, tuple[int, ...]]:
    """Return this rank's rows and the whole shape of the logits `[B * S, V]`."""
    # From the layout, not from sp.positions(), which is under test.
    spans = sp.layout.padded_spans(config.tokens, sp.rank)
    mine = torch.cat([torch.arange(*span, device=sp.device) for span in spans])
    real = mine < config.tokens
    rows_B = torch.arange(config.batch, device=sp.device) + sp.data_rank * config.batch
    rows_BL = rows_B[:, None] * config.tokens + mine[real]
    logits_BLV = logits_BLV.detach()[:, real]
    shape = (config.batch * config.parallel.data_degree * config.tokens, logits_BLV.shape[-1])
    return LocalRows(rows_BL.flatten(), logits_BLV.flatten(0, 1)), shape


def gradient_part(parameter: nn.Parameter, sp: SequenceSharding) -> LocalRows:
    """Return this rank's rows of a gradient: of FSDP2's shard, the tensor rank's part, or both. No gradient counts as
    zeros.
    """
    values = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
    rows, *rest = my_box(parameter, sp)
    mine = torch.arange(rows.start, rows.stop, device=parameter.device)
    return LocalRows(mine, local_part(values), tuple(rest))


def make_report(
    config: VerifyConfig,
    sp: SequenceSharding,
    world: World,
    references: tuple[Tensors, Tensors],
    parts: dict[str, tuple[LocalRows, tuple[int, ...]]],
    checkpoint: Checkpoint | None = None,
) -> Report:
    """Compare this rank's `parts` with rank 0's `references` (reference, unsharded run). Collective.

    Args:
        config: of the comparison.
        sp: the sharding.
        world: all ranks.
        references: results of both unsharded runs, on rank 0.
        parts: local rows and whole shape of each tensor.
        checkpoint: source of the weights, if any.
    """
    mine = {name: _measure(name, part, shape, references, world) for name, (part, shape) in parts.items()}
    everyone = world.gather(mine)
    criterion = Criterion.of(config.dtype, config.reference)
    if config.parallel.lossy:
        layers = {layer_of(name) for name in parts} - {None}
        criterion = criterion.lossy(config.parallel.wire_dtype, len(layers))
    losses = world.gather(float(parts["loss"][0].values))
    equalities = [equality("loss", losses, [f"{loss:.9g}" for loss in losses])]
    if not config.fsdp:
        checksums = world.gather(
            [_checksum(part.values) for name, (part, _) in parts.items() if name not in ("loss", "logits")]
        )
        # Ranks with the same tensor rank hold the same parts.
        equal = [mine == checksums[rank % sp.tensor_size] for rank, mine in enumerate(checksums)]
        equalities.append(equality("gradients", equal))
    return Report(
        setup=_setup(config, sp, checkpoint),
        criterion=criterion,
        checks=judge({name: [sums[name] for sums in everyone] for name in mine}, criterion),
        equalities=tuple(equalities),
        rank_tokens=tuple(world.gather((sp.data_rank, sp.layout.spans(config.tokens, sp.rank)))),
    )


def _setup(config: VerifyConfig, sp: SequenceSharding, found: Checkpoint | None) -> dict[str, Any]:
    device = torch.cuda.get_device_name(sp.device) if sp.device.type == "cuda" else sp.device.type
    return {
        "model": str(config.model or config.config) if found is None else str(found.path),
        "weights": "random" if config.model is None and found is None else "given",
        "checkpoint": found
        and {
            "step": found.step,
            "files": len(found.files),
            "bytes": sum(record.size for record in found.files.values()),
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


def _measure(
    name: str,
    part: LocalRows,
    shape: tuple[int, ...],
    references: tuple[Tensors, Tensors],
    world: World,
) -> ErrorSums:
    """Compare the local rows of one tensor with rank 0's references, in bounded chunks. Collective."""
    total = ErrorSums()
    for start, stop in row_chunks(shape):
        chunks = torch.zeros(2, stop - start, *shape[1:], dtype=torch.float64, device=world.device)
        for chunk, reference in zip(chunks, references, strict=True):
            if name in reference:  # only on rank 0; a parameter without a gradient stays zero
                chunk.copy_(reference[name][start:stop])
        world.broadcast(chunks)
        total += compare_rows(part, start, chunks[0], chunks[1])
    return total
