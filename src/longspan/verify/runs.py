"""The runs, without and with sharding, and how far the one is from the other.

Rank 0 alone runs unsharded, and sends its results tensor by tensor, a piece at a time, so that no other rank ever holds
more of them. Shape suffixes: B rows of the batch, S tokens, L my tokens, V vocabulary.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import longspan
from longspan.checkpoint import Checkpoint
from longspan.comm.digests import local_part
from longspan.comm.errors import on_every_rank
from longspan.comm.mesh import SequenceSharding
from longspan.comm.objects import gather_objects
from longspan.core.errors import LongspanError
from longspan.hf.loading import find_source, load_from
from longspan.hf.parallelize import parallelize
from longspan.hf.support import Place, check_model, is_masked_lm, switch_dropout_off
from longspan.hf.weights.shard_slices import my_box
from longspan.hf.weights.sources import FirstRank, Origin
from longspan.ranks.launch import threads_per_rank
from longspan.verify.compare import NUDGES, Criterion, Part, Sums, compare_rows, judge, layer_of, row_pieces
from longspan.verify.config import VerifyConfig
from longspan.verify.report import Report, equality

Tensors = dict[str, Tensor]
"""`"loss"` [1], `"logits"` [B * S, V], and under each parameter's name its gradient."""


# How long ranks may wait for rank 0's runs: fp64 on a CPU takes a real model hours, not a group's usual minutes.
_PATIENCE = timedelta(days=2)


@dataclass(frozen=True)
class Link:
    """This rank's tie to the others, over data x sequence; on a single process all of it is trivial.

    Attributes:
        rank: my place among all ranks.
        size: number of ranks.
        group: for tensors on the device.
        patient: for Python values, through the CPU; waits longer than other groups do.
        device: where this rank's tensors are.
    """

    rank: int
    size: int
    group: dist.ProcessGroup | None
    patient: dist.ProcessGroup | None
    device: torch.device

    @classmethod
    def of(cls, sp: SequenceSharding) -> Link:
        """Collective: every rank makes it."""
        group = sp.mesh_group
        patient = None if group is None else dist.new_group(backend="gloo", timeout=_PATIENCE)
        place = (sp.data_rank * sp.size + sp.rank) * sp.tensor_size + sp.tensor_rank
        return cls(place, sp.job_size, group, patient, sp.device)

    def from_first(self, x: Tensor) -> None:
        """Overwrite `x` with what rank 0 has in it."""
        if self.group is not None:
            dist.broadcast(x, group_src=0, group=self.group)

    def gather(self, value: Any) -> list[Any]:
        """`value` of every rank, in rank order."""
        return gather_objects(value, self.patient)


def check_same_weights(model: nn.Module, link: Link) -> None:
    """Refuse to compare runs of different models.

    Raises:
        LongspanError: on every rank, naming those whose weights are not rank 0's.
    """
    checksums = link.gather([_checksum(tensor) for tensor in model.state_dict().values()])
    differing = [rank for rank, other in enumerate(checksums) if other != checksums[0]]
    if differing:
        raise LongspanError(
            f"ranks {differing} hold other weights than rank 0; check that every machine sees the same model files"
        )


def _checksum(x: Tensor) -> int:
    return zlib.crc32(x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)


# ---- The unsharded runs, on rank 0 alone.


def unsharded_runs(
    model: nn.Module | None, batch_BS: dict[str, Tensor], config: VerifyConfig, link: Link
) -> tuple[Tensors, Tensors]:
    """The reference run and the run in the dtype asked for, one after the other; on rank 0, elsewhere empty.

    In fp32 the latter is run `NUDGES` times more, with weights that differ in their last place, and of each number the
    one that is furthest from the reference is kept: see `Criterion`. `model` is left as it was.
    """

    def run() -> tuple[Tensors, Tensors]:
        if link.rank != 0:
            return {}, {}
        assert model is not None
        try:
            with _all_cores():
                wide = torch.float64 if config.fp64 else torch.float32
                same = wide == next(model.parameters()).dtype
                unsharded = run_unsharded(model, batch_BS)
                reference = unsharded if same else run_unsharded(_widened(model, wide), batch_BS)
                for seed in range(NUDGES if config.dtype == "fp32" and not same else 0):
                    keep_furthest(unsharded, run_unsharded(nudged(model, seed), batch_BS), reference)
        except torch.OutOfMemoryError as failure:
            way_out = "--no-fp64 or a smaller --context" if config.fp64 else "a smaller --context"
            raise LongspanError(
                f"the unsharded run does not fit on {link.device}: {failure}; try {way_out}"
            ) from failure
        return reference, unsharded

    return on_every_rank(run, link.patient)


def _widened(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    wide = copy.deepcopy(model).to(dtype)
    if dtype == torch.float64 and isinstance(wide, transformers.PreTrainedModel):
        wide.set_experts_implementation("eager")  # the grouped product of a mixture of experts has no fp64
    return wide


def nudged(model: nn.Module, seed: int) -> nn.Module:
    """A copy whose weights were each rounded once more: moved at random, by at most eps relative."""
    moved = copy.deepcopy(model)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for x in moved.parameters():
            by = torch.rand(x.shape, generator=draw, dtype=torch.float64).mul_(2).sub_(1).mul_(torch.finfo(x.dtype).eps)
            x.copy_(x.double() * (1 + by.to(x.device)))
    return moved


def keep_furthest(found: Tensors, other: Tensors, reference: Tensors) -> None:
    """In `found`, take each number of `other` that is further from `reference`, in place."""
    for name, exact in reference.items():
        for start, stop in row_pieces(exact.shape):
            mine, theirs, truth = (x[name][start:stop] for x in (found, other, reference))
            further = (theirs.double() - truth.double()).abs() > (mine.double() - truth.double()).abs()
            mine[further] = theirs[further]


def run_unsharded(model: nn.Module, batch_BS: dict[str, Tensor]) -> Tensors:
    """Forward and backward on one process.

    transformers computes the loss in fp32 whatever the logits are, so in fp64 it is written out here. What else it
    computes in fp32 by definition (the statistics of some norms, rotary angles) is so in every run.

    Returns:
        On the CPU, in the model's dtype: `"loss"` [1], `"logits"` [B * S, V], and under each parameter's name its
        gradient (none for a parameter without one). The model's gradients are cleared.
    """
    out = model(**batch_BS)
    loss = out.loss
    if out.logits.dtype == torch.float64:
        predictions_BSV, labels_BS = out.logits, batch_BS["labels"]
        if not (isinstance(model, transformers.PreTrainedModel) and is_masked_lm(model)):
            predictions_BSV, labels_BS = predictions_BSV[:, :-1], labels_BS[:, 1:]
        loss = torch.nn.functional.cross_entropy(predictions_BSV.flatten(0, 1), labels_BS.flatten(), ignore_index=-100)
        if getattr(out, "aux_loss", None) is not None:
            loss = loss + model.router_aux_loss_coef * out.aux_loss
    loss.backward()
    tensors = {"loss": loss.detach().reshape(1).cpu(), "logits": out.logits.detach().flatten(0, 1).cpu()}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            tensors[name] = parameter.grad.cpu()
    model.zero_grad(set_to_none=True)
    return tensors


@contextmanager
def _all_cores() -> Iterator[None]:
    """All of this process's cores for one rank, while the others wait for it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(threads_per_rank(1))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


# ---- What the sharded run has, and how far it is from the references.


@dataclass(frozen=True)
class Models:
    """The model twice: whole, on the ranks that need it, and how the sharded one is made.

    Attributes:
        whole: for the unsharded runs, on its device: on every rank, or with FSDP on the first alone.
        shard: makes the sharded model, as `longspan train` does. Collective.
    """

    whole: nn.Module | None
    shard: Callable[[], nn.Module]


def make_models(
    origin: Origin, config: VerifyConfig, sp: SequenceSharding, link: Link, load: Callable[[nn.Module], None]
) -> Models:
    """Collective.

    Args:
        origin: of the model.
        config: of the comparison.
        sp: how the sequence lies over the ranks.
        link: to the other ranks.
        load: reads the weights of a checkpoint into a whole model on one rank, or does nothing.

    Raises:
        LongspanError: on every rank, if the model cannot be made or sharded, or ranks hold other weights than rank 0.
    """
    sharded = config.fsdp and sp.world_size > 1
    apart = config.fsdp and sp.job_size > 1  # each rank gets its shards, and only the first holds the whole model
    source = find_source(origin, sp, later=config.resume is not None) if apart else None

    def prepared(model: Any) -> Any:
        if origin.adapter is not None:  # the model's config does not set the adapter's dropout
            switch_dropout_off(model)
        return model.train()

    def make() -> nn.Module | None:
        # Before the long runs, not after them.
        check_model(origin.on_meta(), Place(sp.device, sp.ring_size), config.kernel)
        if source is not None and link.rank:
            return None
        given = source.whole if isinstance(source, FirstRank) else None
        whole: Any = origin.build() if given is None else origin.adapted(given)
        load(whole)
        return prepared(whole).to(sp.device)  # type: ignore[no-any-return]

    whole = on_every_rank(make, sp.mesh_group)
    # In bf16, FSDP keeps weights and sums of gradients in fp32.
    bf16 = sharded and config.dtype == "bf16"
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else None
    options: dict[str, Any] = {
        "mp_policy": policy,
        "kernel": config.kernel,
        "memory": "auto" if config.chooses else config.levels(),
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
        check_same_weights(whole, link)
    return Models(whole, shard)


def sharded_parts(
    sp: SequenceSharding, model: nn.Module, loss: Tensor
) -> Iterator[tuple[str, tuple[Part, tuple[int, ...]]]]:
    """Name, this rank's part, and whole shape of loss and gradients; in the same order on every rank."""
    first = torch.zeros(1, dtype=torch.int64, device=sp.device)
    yield "loss", (Part(first, loss.detach().reshape(1)), (1,))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield name, (gradient_part(parameter, sp), tuple(parameter.shape))


def logits_part(config: VerifyConfig, sp: SequenceSharding, logits_BLV: Tensor) -> tuple[Part, tuple[int, ...]]:
    """The same of this rank's logits."""
    # From the layout, not from sp.positions(): what is under test must not choose what it is compared with.
    spans = sp.layout.padded_spans(config.tokens, sp.rank)
    mine = torch.cat([torch.arange(*span, device=sp.device) for span in spans])
    real = mine < config.tokens
    rows_B = torch.arange(config.batch, device=sp.device) + sp.data_rank * config.batch
    rows_BL = rows_B[:, None] * config.tokens + mine[real]
    logits_BLV = logits_BLV.detach()[:, real]
    shape = (config.batch * config.parallel.data_degree * config.tokens, logits_BLV.shape[-1])
    return Part(rows_BL.flatten(), logits_BLV.flatten(0, 1)), shape


def gradient_part(parameter: nn.Parameter, sp: SequenceSharding) -> Part:
    """What this rank holds of a parameter's gradient: all of it, its rows (FSDP2), its part over a tensor group, or the
    rows of that. No gradient is zeros.
    """
    values = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
    rows, *rest = my_box(parameter, sp)
    mine = torch.arange(rows.start, rows.stop, device=parameter.device)
    return Part(mine, local_part(values), tuple(rest))


def make_report(
    config: VerifyConfig,
    sp: SequenceSharding,
    link: Link,
    references: tuple[Tensors, Tensors],
    parts: dict[str, tuple[Part, tuple[int, ...]]],
    checkpoint: Checkpoint | None = None,
) -> Report:
    """Compare my `parts` with rank 0's `references` (reference, unsharded run), and hear what the other ranks found.

    `checkpoint` is where the weights were read from, if it was one.
    """
    mine = {name: _measure(name, part, shape, references, link) for name, (part, shape) in parts.items()}
    everyone = link.gather(mine)
    criterion = Criterion.of(config.dtype, config.reference)
    if config.parallel.lossy:
        layers = {layer_of(name) for name in parts} - {None}
        criterion = criterion.lossy(config.parallel.wire_dtype, len(layers))
    losses = link.gather(float(parts["loss"][0].values))
    equalities = [equality("loss", losses, [f"{loss:.9g}" for loss in losses])]
    if not config.fsdp:
        checksums = link.gather(
            [_checksum(part.values) for name, (part, _) in parts.items() if name not in ("loss", "logits")]
        )
        held = sp.tensor_size  # ranks that hold the same parts have the same place in their tensor groups
        alike = [mine == checksums[rank % held] for rank, mine in enumerate(checksums)]
        equalities.append(equality("gradients", alike))
    return Report(
        setup=_setup(config, sp, checkpoint),
        criterion=criterion,
        checks=judge({name: [sums[name] for sums in everyone] for name in mine}, criterion),
        equalities=tuple(equalities),
        places=tuple(link.gather((sp.data_rank, sp.layout.spans(config.tokens, sp.rank)))),
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
        "memory": "auto" if config.chooses else config.levels().described(),
        "data": config.data,
        "seed": config.seed,
        "device": device,
        "longspan": longspan.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _measure(
    name: str,
    part: Part,
    shape: tuple[int, ...],
    references: tuple[Tensors, Tensors],
    link: Link,
) -> Sums:
    """Compare my part of one tensor with rank 0's references, a bounded piece at a time."""
    total = Sums()
    for start, stop in row_pieces(shape):
        pieces = torch.zeros(2, stop - start, *shape[1:], dtype=torch.float64, device=link.device)
        for piece, reference in zip(pieces, references, strict=True):
            if name in reference:  # only on rank 0; a parameter without a gradient stays zero
                piece.copy_(reference[name][start:stop])
        link.from_first(pieces)
        total += compare_rows(part, start, pieces[0], pieces[1])
    return total
