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
from longspan.hf.forward.gathering import gather_tokens
from longspan.hf.forward.stage import ForwardCall, ForwardOptions, Stage
from longspan.losses.cross_entropy import IGNORE
from longspan.losses.deferred_logits import DeferredLogits
from longspan.losses.logprobs import EXTRAS, logprobs_of

if TYPE_CHECKING:
    from longspan.comm.mesh import SequenceSharding


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


class ScoredLabels(Stage):
    """`fused_lm_head=True`: return the labels' log-probabilities in place of logits."""

    def __init__(self, sp: SequenceSharding, options: ForwardOptions) -> None:
        self.sp, self.options = sp, options
        self.labels: Tensor | None = None

    def reset(self) -> None:
        self.labels = None

    def before(self, call: ForwardCall) -> None:
        call.inputs.pop("num_items_in_batch", None)
        self.labels = call.inputs.pop("labels", None)
        if self.labels is None:
            raise LongspanError("fused_lm_head=True asks for the log-probabilities of labels, and there are none")

    def after(self, call: ForwardCall, output: Any) -> Any:
        assert self.labels is not None
        logits, options = output["logits"], self.options.scoring
        if not isinstance(logits, DeferredLogits):
            raise LongspanError(f"{type(call.model).__name__} does not call its head as transformers' models do")
        if options.temperature != 1:
            logits = logits / options.temperature
        extras = tuple(name for name in EXTRAS if not (options.entropy and name == "entropy"))
        names = ("log_probs", *(["entropy"] if options.entropy else []), *extras, "label_mask")
        labelled = (self.labels != IGNORE).to(logits.hidden.dtype)
        mine = (*logprobs_of(logits, self.labels, options.entropy, extras), labelled)
        scores: dict[str, Any] = {
            name: gather_tokens(x, self.sp, call.info)[:, :-1] for name, x in zip(names, mine, strict=True)
        }
        scores |= {name: scores[name].bool() for name in ("is_top1", "label_mask")}
        loss = -scores["log_probs"].sum() / scores["label_mask"].sum().clamp(min=1)
        return ScoredOutput(loss=loss, **scores, aux_loss=call.router_loss)
