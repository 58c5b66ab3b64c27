"""The unsharded runs on rank 0 alone, the sharded run, and its errors relative to them.

The unsharded runs are the reference, and the run in the dtype that is verified. Rank 0 holds their results and
broadcasts them tensor by tensor, in bounded chunks. Shape suffixes: B rows of the batch, S tokens, L local tokens, V
vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.overrides import TorchFunctionMode

import longspan
from longspan.comm.agree import gather_objects, on_every_rank
from longspan.comm.mesh import SequenceSharding
from longspan.comm.weights import digests_of, local_part
from longspan.compat.reading import mixer_layers
from longspan.core.errors import LongspanError
from longspan.core.reading import values
from longspan.hf.loading import load_sharded
from longspan.hf.model.support import check_model, is_masked_lm, switch_dropout_off
from longspan.hf.model.vision import encoders_of
from longspan.hf.weights.origin import Origin
from longspan.hf.weights.sources import my_slices
from longspan.ranks.launch import threads_per_rank
from longspan.verify import inputs
from longspan.verify.config import VerifyConfig
from longspan.verify.inputs import Inputs
from longspan.verify.judge import (
    NUDGES,
    OUTPUTS,
    Criterion,
    ErrorSums,
    LocalRows,
    compare_rows,
    judge,
    product_error,
    row_chunks,
)
from longspan.verify.report import Equality, Report

Tensors = dict[str, Tensor]
"""`"loss"` [1], `"logits"` [B * S, V], and under each parameter's name its gradient."""


def compare(opened: Inputs) -> Report:
    """Return the report of a language model, the same on every rank. Collective."""
    config = opened.config
    sp = SequenceSharding.of(config.parallel)
    origin = inputs.model_origin(config, opened.model_config)
    # Fail before the long runs.
    on_every_rank(lambda: check_model(origin.on_meta(), sp.device, sp.ring_size, config.kernel), sp.world_group)
    references = unsharded_runs(
        lambda: prepared(origin.build()).to(sp.device),
        lambda model: run_unsharded(model, opened.batch(0, len(opened.rows), sp.device)),
        config,
        sp.host_group,
    )
    model = load_as_sharded(origin, config, sp)
    mine = opened.batch(sp.data_rank * config.batch, (sp.data_rank + 1) * config.batch, sp.device)
    mine = as_dtype(mine, model)
    out = model(**mine)
    out.loss.backward()
    parts = {"loss": whole_part(out.loss.detach().reshape(1)), **gradient_parts(model, sp)}
    with torch.no_grad():  # in training, the model returns no logits
        out = model(**{name: x for name, x in mine.items() if name != "labels"})
    parts["logits"] = logits_part(config, sp, out.logits)
    return make_report(config, sp, references, parts, {"pictures": opened.pictures})


def unsharded_runs(
    make: Callable[[], nn.Module],
    run_once: Callable[[nn.Module], Tensors],
    config: VerifyConfig,
    hosts: dist.ProcessGroup | None,
) -> tuple[Tensors, Tensors]:
    """Return the results of the reference run and of the run in the verified dtype; empty except on rank 0. Collective.

    In fp32 the latter runs `NUDGES` more times with weights changed in the last place; of each number, the result
    furthest from the reference counts (see `Criterion`). `make` returns the model, which does not change; `run_once`
    runs it, or a copy.
    """

    def run() -> tuple[Tensors, Tensors]:
        if hosts is not None and hosts.rank() != 0:
            return {}, {}
        try:
            with _all_cores():
                model = make()
                wide = torch.float64 if config.fp64 else torch.float32
                same = wide == next(model.parameters()).dtype
                unsharded = run_once(model)
                reference = unsharded if same else run_once(_widened(model, wide))
                for seed in range(NUDGES if config.run_dtype == "fp32" and not same else 0):
                    keep_furthest(unsharded, run_once(nudged(model, seed)), reference)
        except torch.OutOfMemoryError as failure:
            hint = "--no-fp64 or a smaller --context" if config.fp64 else "a smaller --context"
            raise LongspanError(f"the unsharded run does not fit: {failure}; try {hint}") from failure
        return reference, unsharded

    return on_every_rank(run, hosts)


def _widened(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    wide = copy.deepcopy(model).to(dtype)
    if dtype == torch.float64 and isinstance(wide, transformers.PreTrainedModel):
        wide.set_experts_implementation("eager")  # grouped matmuls have no fp64
    return wide


def nudged(model: nn.Module, seed: int) -> nn.Module:
    """Return a copy with every weight changed at random by at most one eps, like one more rounding."""
    moved = copy.deepcopy(model)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for x in moved.parameters():
            by = torch.rand(x.shape, generator=draw, dtype=torch.float64).mul_(2).sub_(1).mul_(torch.finfo(x.dtype).eps)
            x.copy_(x.double() * (1 + by.to(x.device)))
    return moved


def keep_furthest(results: Tensors, other: Tensors, reference: Tensors) -> None:
    """Replace numbers of `results` in place by those of `other` that are further from `reference`."""
    for name, exact in reference.items():
        for start, stop in row_chunks(exact.shape, 1 << 18):  # in the CPU's cache
            mine, theirs, truth = (x[name][start:stop] for x in (results, other, reference))
            further = (theirs - truth).abs_() > (mine - truth).abs_()
            torch.where(further, theirs, mine, out=mine)


def run_unsharded(model: nn.Module, batch_BS: dict[str, Tensor]) -> Tensors:
    """Run forward and backward on one process, then clear the gradients; return `Tensors` on the CPU.

    transformers always computes the loss in fp32, so the fp64 loss is computed here. Statistics of some norms and
    rotary angles are fp32 in every run; recurrent layers are not (`fp64_casts`).
    """
    with fp64_casts(model):
        out = model(**as_dtype(batch_BS, model))
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


def as_dtype(batch: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Return a batch with its pixels in the dtype of the model's weights."""
    dtype = next(model.parameters()).dtype
    return {name: x.to(dtype) if x.is_floating_point() else x for name, x in batch.items()}


def fp64_casts(model: nn.Module) -> AbstractContextManager[object]:
    """Return a context in which casts to fp32 are casts to fp64, for a model in fp64 with recurrent layers or a tower.

    transformers computes these layers, and a vision tower's rotations, in fp32. Two such runs share roundings, so
    neither would measure the other's.
    """
    wide = next(model.parameters()).dtype == torch.float64
    return _Fp64Casts() if wide and (mixer_layers(model) or encoders_of(model)) else nullcontext()


class _Fp64Casts(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        return func(*map(_widest, args), **{name: _widest(value) for name, value in (kwargs or {}).items()})


def _widest(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@contextmanager
def _all_cores() -> Iterator[None]:
    """Use all cores of the machine for this rank, while the others wait."""
    threads = torch.get_num_threads()
    torch.set_num_threads(threads_per_rank(1))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def prepared(model: Any) -> Any:
    """Return a loaded model in training mode; an adapter has a dropout of its own, which the config does not set."""
    switch_dropout_off(model)
    return model.train()


def load_as_sharded(origin: Origin, config: VerifyConfig, sp: SequenceSharding) -> Any:
    """Load and parallelize the model of a `VerifyConfig`. Collective."""
    # With FSDP, bf16 keeps weights and sums of gradients in fp32.
    bf16 = config.fsdp and sp.fsdp_size > 1 and config.run_dtype == "bf16"
    return load_sharded(
        origin,
        sp,
        prepare=prepared,
        cast_to=torch.float32 if bf16 else None,
        fsdp=config.fsdp,
        mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else None,
        kernel=config.kernel,
        memory="auto" if config.memory.chooses else config.memory.to_memory(),
        tensor_style=config.parallel.tensor_style,
        experts=config.parallel.experts,
    )


def whole_part(x: Tensor) -> LocalRows:
    """Return a tensor that every rank holds whole."""
    return LocalRows(torch.arange(len(x), device=x.device), x, tuple(x.shape))


def gradient_parts(model: nn.Module, sp: SequenceSharding) -> dict[str, LocalRows]:
    """Return this rank's rows of every gradient, in the same order on every rank."""
    return {name: gradient_part(p, sp) for name, p in model.named_parameters() if p.requires_grad}


def logits_part(config: VerifyConfig, sp: SequenceSharding, logits_BLV: Tensor) -> LocalRows:
    """Return this rank's rows of the logits `[B * S, V]`."""
    # From the layout, not from sp.positions(), which is under test.
    spans = sp.layout.padded_spans(config.tokens, sp.rank)
    mine = torch.cat([torch.arange(*span, device=sp.device) for span in spans])
    real = mine < config.tokens
    rows_B = torch.arange(config.batch, device=sp.device) + sp.data_rank * config.batch
    rows_BL = rows_B[:, None] * config.tokens + mine[real]
    logits_BLV = logits_BLV.detach()[:, real]
    shape = (config.batch * config.parallel.data * config.tokens, logits_BLV.shape[-1])
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
    references: tuple[Tensors, Tensors],
    parts: dict[str, LocalRows],
    about: dict[str, Any],
) -> Report:
    """Compare this rank's `parts` with rank 0's results of `unsharded_runs`. Collective.

    `about` is what the report says of the inputs.
    """
    hosts = sp.host_group
    mine = {name: _measure(name, part, references, sp) for name, part in parts.items()}
    everyone = gather_objects(mine, hosts)
    criterion = Criterion.of(config.run_dtype, config.reference)
    losses = gather_objects(float(parts["loss"].values), hosts)
    equalities = [Equality.of("loss", losses)]
    if not config.fsdp:
        digests = digests_of({name: part.values for name, part in parts.items() if name not in OUTPUTS})
        of_ranks = gather_objects(digests, hosts)
        # Ranks with the same tensor rank hold the same parts.
        equal = [digests == of_ranks[rank % sp.tensor_size] for rank, digests in enumerate(of_ranks)]
        equalities.append(Equality.of("gradients", equal))
    return Report(
        setup=_setup(config, sp) | about,
        criterion=criterion,
        checks=judge({name: [sums[name] for sums in everyone] for name in mine}, criterion),
        equalities=tuple(equalities),
        product_error=max(gather_objects(product_error(sp.device), hosts)),
    )


def _setup(config: VerifyConfig, sp: SequenceSharding) -> dict[str, Any]:
    parallel, flags = config.parallel, values(config)
    return {
        "model": config.model,
        "weights": "random" if config.random_weights else "given",
        "tokens": config.tokens,
        **{name: flags[name] for name in _SHOWN},
        "dtype": config.run_dtype,
        "tensor_style": parallel.tensor_style if parallel.tensor > 1 else None,
        "experts": parallel.experts,
        "layout": sp.layout.kind,
        "reference": config.reference,
        "memory": "auto" if config.memory.chooses else config.memory.to_memory().describe(),
        "device": torch.cuda.get_device_name(sp.device) if sp.device.type == "cuda" else sp.device.type,
        "longspan": longspan.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


_SHOWN = (
    "context", "batch", "data", "ring", "ulysses", "tensor", "fsdp", "kernel", "text", "seed"
)  # fmt: skip


def _measure(name: str, part: LocalRows, references: tuple[Tensors, Tensors], sp: SequenceSharding) -> ErrorSums:
    """Compare the local rows of one tensor with rank 0's references, in bounded chunks. Collective."""
    total = ErrorSums()
    for start, stop in row_chunks(part.shape):
        chunks = torch.zeros(2, stop - start, *part.shape[1:], dtype=torch.float64, device=sp.device)
        for chunk, reference in zip(chunks, references, strict=True):
            if name in reference:  # only on rank 0; a parameter without a gradient stays zero
                chunk.copy_(reference[name][start:stop])
        if sp.world_group is not None:
            dist.broadcast(chunks, group_src=0, group=sp.world_group)
        total += compare_rows(part, start, chunks[0], chunks[1])
    return total
