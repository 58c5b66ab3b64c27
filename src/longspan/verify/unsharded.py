"""The unsharded runs, on rank 0 alone: the reference, and the run in the dtype that is verified.

Shape suffixes: B rows of the batch, S tokens, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

from longspan.comm.errors import on_every_rank
from longspan.core.errors import LongspanError
from longspan.hf.support import is_masked_lm
from longspan.ranks.launch import threads_per_rank
from longspan.verify.compare import row_chunks
from longspan.verify.config import VerifyConfig
from longspan.verify.judge import NUDGES

Tensors = dict[str, Tensor]
"""`"loss"` [1], `"logits"` [B * S, V], and under each parameter's name its gradient."""


def unsharded_runs(
    model: nn.Module | None, batch_BS: dict[str, Tensor], config: VerifyConfig, hosts: dist.ProcessGroup | None
) -> tuple[Tensors, Tensors]:
    """Return the results of the reference run and of the run in the verified dtype; empty except on rank 0. Collective.

    In fp32 the latter runs `NUDGES` more times with weights changed in the last place; of each number, the result
    furthest from the reference counts (see `Criterion`). `model` does not change.
    """

    def run() -> tuple[Tensors, Tensors]:
        if model is None or (hosts is not None and hosts.rank() != 0):
            return {}, {}
        try:
            with _all_cores():
                wide = torch.float64 if config.fp64 else torch.float32
                same = wide == next(model.parameters()).dtype
                unsharded = run_unsharded(model, batch_BS)
                reference = unsharded if same else run_unsharded(_widened(model, wide), batch_BS)
                for seed in range(NUDGES if config.dtype == "fp32" and not same else 0):
                    keep_furthest(unsharded, run_unsharded(nudged(model, seed), batch_BS), reference)
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
        for start, stop in row_chunks(exact.shape):
            mine, theirs, truth = (x[name][start:stop] for x in (results, other, reference))
            further = (theirs.double() - truth.double()).abs() > (mine.double() - truth.double()).abs()
            mine[further] = theirs[further]


def run_unsharded(model: nn.Module, batch_BS: dict[str, Tensor]) -> Tensors:
    """Run forward and backward on one process, then clear the gradients.

    transformers always computes the loss in fp32, so the fp64 loss is computed here. Statistics of some norms and
    rotary angles are fp32 in every run.

    Returns:
        On the CPU, in the model's dtype: "loss" `[1]`, "logits" `[B * S, V]`, and the gradient of each parameter that
        has one, under its name.
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
    """Use all cores of the machine for this rank, while the others wait."""
    threads = torch.get_num_threads()
    torch.set_num_threads(threads_per_rank(1))
    try:
        yield
    finally:
        torch.set_num_threads(threads)
