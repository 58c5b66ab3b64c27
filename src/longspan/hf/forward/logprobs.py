"""Log-probabilities and entropies in place of logits: `longspan.token_logprobs`, and the stage for TRL's trainers.

Head and softmax run tile by tile over the tokens, in the forward and again in the backward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from longspan.core.errors import LongspanError
from longspan.core.validation import check_number
from longspan.hf.batch.shard import has_labels
from longspan.hf.forward.stage import ForwardCall, Stage
from longspan.hf.state import state_of
from longspan.losses.cross_entropy import IGNORE
from longspan.losses.deferred_logits import DeferredLogits
from longspan.losses.logprobs import EXTRAS, logprobs_of, uniform_logprobs


def token_logprobs(
    model: nn.Module,
    batch: Mapping[str, Any],
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    top1: bool = False,
    gather: bool = False,
    shared_prefixes: bool = False,
) -> Any:
    """Return the log-probability of each label of a batch, and if requested the entropy of each prediction.

    Head and softmax run tile by tile over the tokens, in the forward and again in the backward, so that the logits of
    all tokens never exist at once. On every mesh the numbers equal those of one process. Collective.

    Args:
        model: as `longspan.parallelize` returned it.
        batch: as for its forward; the log-probabilities are those of `labels` (or `shift_labels`), by default of all
            `input_ids`.
        temperature: divides the logits.
        entropy: also return entropies.
        top1: also return whether the label is the most likely token (of several, the first).
        shared_prefixes: compute shared prefixes of rows once, as `longspan.pack_tree` does, for example a prompt with
            several completions. The results are those of the rows; the first token of a row has no log-probability.
            Needs `gather`.
        gather: False: return those of my tokens, `[B, n_local]`. True: of all tokens in order, `[B, n]`, on every rank.

    Returns:
        Log-probabilities, fp32 (fp64 for fp64). Entry i is log p(label i + 1 | tokens to i), where the logits at i
        predict the next token; for a masked LM log p(label i). 0 where the label is -100, and at the last token. With
        `entropy` a pair of these and the entropies, in nats, 0 in the same places. With `top1` one tensor more: 1 where
        the label is the most likely token, else 0; no gradient.

        Differentiable. Gradients of parameters are averaged over all ranks, as with `loss`. With `gather`, the ranks
        of a sequence group compute the same loss of all tokens, which counts once. Without it, make the loss by
        `longspan.global_mean`: a plain mean over a rank's own tokens is exact only if every rank has as many.

    Raises:
        LongspanError: for a model that is not parallelized or has no head, a temperature of 0 or less, or a batch that
            the model's forward refuses.
    """
    options = state_of(model).forward.options
    check_number("temperature", temperature, 1e-6, 1e6)
    if shared_prefixes and not gather:
        raise LongspanError("shared_prefixes=True returns the rows' results, which needs gather=True")
    extras = ("is_top1",) if top1 else ()

    def score(call: ForwardCall, logits: Any, labels: Tensor) -> Any:
        scores = _scores(call, logits, labels, temperature, entropy, extras)
        if gather:
            scores = tuple(_gathered(call, x).clone() for x in scores)
        return scores if entropy or top1 else scores[0]

    whole = {key: value for key, value in batch.items() if key != "loss_weights"}  # no mean is computed
    if not has_labels(whole):
        whole["labels"] = whole.get("input_ids")
    with options.during(score=score, shared_prefixes=shared_prefixes):
        return model(**whole, fused_lm_head=True)


def _scores(
    call: ForwardCall, logits: Any, labels: Tensor, temperature: float, entropy: bool, extras: tuple[str, ...]
) -> tuple[Tensor, ...]:
    if not isinstance(logits, DeferredLogits):
        raise LongspanError(f"{call.traits.name} does not call its head as transformers' models do")
    return logprobs_of(logits if temperature == 1 else logits / temperature, labels, entropy, extras)


def _gathered(call: ForwardCall, x_BL: Tensor) -> Tensor:
    """Return `[B, n]` of all tokens, in the rows that the caller gave."""
    whole = call.info.gather(x_BL)
    return whole if call.packed is None else call.packed.unpack(whole)


@dataclass
class ScoredOutput(ModelOutput):  # type: ignore[misc]
    """The output of TRL's fused head, under its names; tensors `[B, n - 1]`, 0 if the next token is not labelled.

    Attributes:
        loss: minus the mean of `log_probs` over this replica's labelled tokens.
        log_probs: log p(next token).
        entropy: of the prediction, in nats; has a gradient with `entropy_grad`.
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

    labels: Tensor | None = None

    def reset(self) -> None:
        self.labels = None

    def check(self, call: ForwardCall) -> None:
        if call.traits.labels_per_row:
            raise LongspanError(f"{call.traits.name} labels rows: there are no log-probabilities of tokens")
        if not call.has_labels:
            raise LongspanError("log-probabilities are those of labels, and the batch has no labels; give them")
        if call.options.check is not None:
            call.options.check(call)

    def before(self, call: ForwardCall) -> None:
        call.inputs.pop("num_items_in_batch", None)
        self.labels = call.inputs.pop("labels")
        call.inputs["return_dict"] = True

    def after(self, call: ForwardCall, output: Any) -> Any:
        assert self.labels is not None
        return (call.options.score or score_for_trl)(call, output["logits"], self.labels)


def score_for_trl(
    call: ForwardCall,
    logits: Any,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    entropy_grad: bool = False,
    uniform_gradient: bool = False,
) -> ScoredOutput:
    """Return what TRL's fused head returns, for the rows of this replica.

    `temperature` divides the logits; with `entropy_grad` entropies have a gradient; with `uniform_gradient` the loss is
    a multiple of the sum of log-probabilities.
    """
    extras = tuple(name for name in EXTRAS if not (entropy_grad and name == "entropy"))
    names = ("log_probs", *(["entropy"] if entropy_grad else []), *extras, "label_mask")
    if uniform_gradient and torch.is_grad_enabled() and isinstance(logits, DeferredLogits):
        names, scored = ("log_probs", "entropy", "is_top1", "label_mask"), uniform_logprobs(logits, labels)
    else:
        scored = _scores(call, logits, labels, temperature, entropy_grad, extras)
    call.note_token_losses(-scored[0], labels)
    # Copied: FSDP's hook on an output that is a view would be lost with an operation in place.
    mine = (*scored, (labels != IGNORE).to(scored[0].dtype))
    scores = {name: _gathered(call, x)[:, :-1].clone() for name, x in zip(names, mine, strict=True)}
    scores |= {name: scores[name].bool() for name in ("is_top1", "label_mask")}
    loss = -scores["log_probs"].sum() / scores["label_mask"].sum().clamp(min=1)
    return ScoredOutput(loss=loss, **scores, aux_loss=call.router_loss)
