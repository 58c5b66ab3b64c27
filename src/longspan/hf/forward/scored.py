"""Log-probabilities in place of logits, for TRL's trainers: `model(**batch, labels=labels, fused_lm_head=True)`.

Head and softmax run tile by tile in forward and backward. Every rank gets the numbers of all tokens in order, so that a
trainer computes the same from them as on one process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers.utils import ModelOutput

from longspan.core.errors import LongspanError
from longspan.hf.forward.outputs import Gathered
from longspan.losses.cross_entropy import IGNORE
from longspan.losses.deferred_logits import DeferredLogits
from longspan.losses.logprobs import EXTRAS, logprobs_of

if TYPE_CHECKING:
    from longspan.comm.mesh import SequenceSharding
    from longspan.hf.batch import SequenceInfo


@dataclass(frozen=True)
class Scoring:
    """Options of log-probabilities that are not arguments of the call.

    Attributes:
        temperature: divides the logits.
        entropy: whether entropies have a gradient.
    """

    temperature: float = 1.0
    entropy: bool = False


@dataclass
class ScoredOutput(ModelOutput):  # type: ignore[misc]
    """The output of TRL's fused head, under its names; tensors `[B, n - 1]`, 0 if the next token is not labelled.

    Attributes:
        loss: minus the mean of `log_probs` over this replica's labelled tokens.
        log_probs: log p(next token).
        entropy: of the prediction, in nats; has a gradient if `Scoring.entropy`.
        is_top1, mean_logits, log_sum_sq_probs: see `longspan.losses.logprobs.EXTRAS`; no gradient.
        label_mask: whether the next token is labelled.
        aux_loss: a mixture of experts' load-balancing loss, if requested.
    """

    loss: Tensor | None = None
    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    log_sum_sq_probs: Tensor | None = None
    mean_logits: Tensor | None = None
    is_top1: Tensor | None = None
    label_mask: Tensor | None = None
    aux_loss: Tensor | None = None
    logits: Tensor | None = None


def labels_to_score(cut: dict[str, Any]) -> Tensor:
    """Remove the labels from a sharded batch, and return them.

    Raises:
        LongspanError: if there are none.
    """
    labels = cut.pop("labels", None)
    cut.pop("num_items_in_batch", None)
    if labels is None:
        raise LongspanError("fused_lm_head=True asks for the log-probabilities of labels, and there are none")
    return labels  # type: ignore[no-any-return]


def scored_output(
    model: Any,
    output: Any,
    labels: Tensor,
    sp: SequenceSharding,
    info: SequenceInfo,
    aux_loss: Tensor | None,
    wanted: Scoring,
) -> ScoredOutput:
    """Return the log-probabilities of all tokens of the replica.

    Args:
        model: whose forward it is.
        output: its output, with `DeferredLogits`.
        labels: of my tokens, shifted: `[B, n_local]`.
        sp: the sharding.
        info: of the batch.
        aux_loss: of its routers.
        wanted: options.

    Raises:
        LongspanError: if the model does not call its head as transformers' models do.
    """
    logits = output["logits"]
    if not isinstance(logits, DeferredLogits):
        raise LongspanError(f"{type(model).__name__} does not call its head as transformers' models do")
    if wanted.temperature != 1:
        logits = logits / wanted.temperature
    extras = tuple(name for name in EXTRAS if not (wanted.entropy and name == "entropy"))
    names = ("log_probs", *(["entropy"] if wanted.entropy else []), *extras, "label_mask")
    mine = (
        *logprobs_of(logits, labels, wanted.entropy, extras),
        (labels != IGNORE).to(logits.hidden.dtype),
    )
    found: dict[str, Any] = {
        name: Gathered.apply(x, sp, info.layout, info.length)[:, :-1]  # type: ignore[no-untyped-call]
        for name, x in zip(names, mine, strict=True)
    }
    found |= {name: found[name].bool() for name in ("is_top1", "label_mask")}
    loss = -found["log_probs"].sum() / found["label_mask"].sum().clamp(min=1)
    return ScoredOutput(loss=loss, **found, aux_loss=aux_loss)
