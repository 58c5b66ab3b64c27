"""`longspan.distillation_loss`: the divergence of a student from a frozen teacher that is sharded beside it.

The teacher's forward keeps its hidden states of my tokens. The student's loss then computes both heads tile by tile, so
that the logits of neither exist, and the two may differ in width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from longspan.core.errors import LongspanError
from longspan.core.validation import check_number
from longspan.hf.batch.shard import has_labels
from longspan.hf.forward.stage import ForwardCall
from longspan.hf.state import ParallelState, state_of
from longspan.hf.weights.fsdp import reshard
from longspan.losses.deferred_logits import DeferredLogits
from longspan.losses.divergence import Divergence

if TYPE_CHECKING:
    from longspan.comm.mesh import SequenceSharding


def distillation_loss(
    student: nn.Module,
    teacher: nn.Module,
    batch: Mapping[str, Any],
    *,
    beta: float = 0.0,
    temperature: float = 1.0,
    top_k: int | None = None,
) -> Tensor:
    """Return the mean divergence of the student's predictions from the teacher's, as `loss` of the student's forward.

        loss = longspan.distillation_loss(student, teacher, batch, beta=0.5)
        loss.backward()

    Both heads and the divergence run tile by tile over the tokens, so that the logits of neither model exist. On every
    mesh loss and gradients equal those of one process. The teacher gets no gradients, and is put into evaluation mode.
    Collective.

    Args:
        student: as `longspan.parallelize` returned it.
        teacher: the same, over the same ranks and with the student's vocabulary; of any width, depth and family.
        batch: as for the student's forward. The divergence is computed where the next token has a label, by default
            everywhere but in padding; `num_items_in_batch` and `loss_weights` have their usual meaning.
        beta: 0 for the forward KL(teacher || student), 1 for the reverse KL(student || teacher), and between them the
            generalized Jensen-Shannon divergence, with the mixture beta * teacher + (1 - beta) * student (GKD,
            arXiv:2306.13649, and TRL).
        temperature: divides the logits of both models. The loss is not multiplied by its square.
        top_k: compare the probabilities of the teacher's k most likely tokens (of equal ones the first), and that of
            all others together. None compares the whole vocabulary.

    Returns:
        A scalar, fp32 (fp64 for fp64), equal on every rank: the mean over the unmasked tokens of the global batch, plus
        the student's router loss if its config asks for it.

    Raises:
        LongspanError: on every rank, before either model runs: for models that are not parallelized, have no head or
            are sharded over different ranks, different vocabularies, a `temperature` of 0 or less, a `beta` outside
            0 to 1, a `top_k` of 0 or less or of more than the vocabulary, or a batch that a forward refuses.
    """
    return _distill(student, teacher, batch, beta, temperature, top_k)


def distill_with_entropy(
    student: nn.Module, teacher: nn.Module, batch: Mapping[str, Any], beta: float, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return `distillation_loss`, and the sum of the student's entropies at this rank's labelled tokens, fp64 []."""
    entropy = torch.zeros((), dtype=torch.float64, device=state_of(student).sp.device)
    return _distill(student, teacher, batch, beta, temperature, None, entropy), entropy


def _distill(
    student: nn.Module,
    teacher: nn.Module,
    batch: Mapping[str, Any],
    beta: float,
    temperature: float,
    top_k: int | None,
    entropy: Tensor | None = None,
) -> Tensor:
    mine, other = state_of(student), state_of(teacher)
    whole = dict(batch)
    if not has_labels(whole):
        whole["labels"] = _every_token(whole)
    found = list[DeferredLogits]()

    def check(call: ForwardCall) -> None:
        _check(mine, other, beta, temperature, top_k)
        call.pictures["a distillation"] = f"beta={beta} temperature={temperature} top_k={top_k}"

    def keep(call: ForwardCall, logits: Any, labels: Tensor) -> None:
        if not isinstance(logits, DeferredLogits):
            raise LongspanError(f"{call.traits.name} does not call its head as transformers' models do")
        found.append(logits)

    of_teacher = {key: x for key, x in whole.items() if key not in ("loss_weights", "num_items_in_batch")}
    with torch.no_grad(), other.forward.options.during(score=keep, check=check, shared_prefixes=False):
        teacher.eval()(**of_teacher, fused_lm_head=True)
    divergence = Divergence(found.pop(), beta, temperature, top_k, entropy)
    try:
        with mine.forward.options.during(token_loss=divergence, loss_only=True):
            loss: Tensor = student(**whole).loss
        return loss
    finally:
        reshard(teacher)  # its head, which the loss gathered


def _every_token(batch: Mapping[str, Any]) -> Any:
    """Return labels that are the tokens themselves, without padding."""
    ids, mask = batch.get("input_ids"), batch.get("attention_mask")
    if not isinstance(ids, Tensor) or not isinstance(mask, Tensor) or mask.shape != ids.shape:
        return ids
    return torch.where(mask.to(ids.device) != 0, ids, -100)


def _check(student: ParallelState, teacher: ParallelState, beta: Any, temperature: Any, top_k: Any) -> None:
    """Raise for arguments that do not fit the models."""
    if student is teacher:
        raise LongspanError("student and teacher are the same model; parallelize two")
    check_number("temperature", temperature, 1e-6, 1e6)
    check_number("beta", beta, 0, 1)
    heads = student.head, teacher.head
    for role, state, head in zip(("student", "teacher"), (student, teacher), heads, strict=True):
        if head is None or state.traits.labels_per_row:
            raise LongspanError(
                f"the {role}, {state.traits.name}, has no head whose logits can be computed tile by tile; use a "
                f"language model with one linear head"
            )
    size, of_teacher = (state.config.get_text_config().vocab_size for state in (student, teacher))
    if size != of_teacher:
        raise LongspanError(
            f"the teacher's vocabulary has {of_teacher} tokens and the student's {size}, so their predictions cannot "
            f"be compared; use a teacher with the student's tokenizer, or resize_token_embeddings before parallelize"
        )
    if top_k is not None:
        check_number("top_k", top_k, 1, size, whole=True)
    if _place(student.sp) != _place(teacher.sp):
        raise LongspanError(
            f"the teacher is sharded over {_axes(teacher.sp)} and the student over {_axes(student.sp)}, so a rank does "
            f"not hold the same tokens of both; pass the same SequenceSharding to both calls of longspan.parallelize"
        )
    if len({head is None or head.vocab_shard is None for head in heads}) > 1:
        raise LongspanError(
            "the tensor axis shards the vocabulary of one of the two models only; use tensor=1, and more ulysses"
        )
    if student.traits.labels_per_token != teacher.traits.labels_per_token:
        raise LongspanError(
            f"{student.traits.name} and {teacher.traits.name} do not predict the same tokens: one is a masked language "
            f"model; use two of one kind"
        )


def _axes(sp: SequenceSharding) -> str:
    axes = f"data={sp.data_size} ring={sp.ring_size} ulysses={sp.ulysses_size} tensor={sp.tensor_size}"
    return f"{axes}, layout {sp.layout.kind},"


def _place(sp: SequenceSharding) -> tuple[str, int, int]:
    """Return what decides which tokens this rank holds."""
    return _axes(sp), sp.data_rank, sp.model_rank
