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
from longspan.hf.batch.shard import cut_batch, shard_batch, sharding_of
from longspan.hf.batch.trees import pack_batch
from longspan.hf.forward.logits import gather_tokens
from longspan.hf.forward.stage import ForwardCall, ForwardOptions, Stage
from longspan.hf.model.vision import PICTURE_KEYS
from longspan.hf.state import state_of
from longspan.hf.weights.fsdp import reshard
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
    state = state_of(model)
    forward = state.forward
    check_number("temperature", temperature, 1e-6, 1e6)
    given = dict(batch)
    if shared_prefixes:
        if not gather:
            raise LongspanError("shared_prefixes=True returns the rows' results, which needs gather=True")
        with forward.refusing(given):
            packed = pack_batch({"labels": given.get("input_ids"), **given})
        found = token_logprobs(model, packed.entries, temperature=temperature, entropy=entropy, top1=top1, gather=True)
        return tuple(map(packed.unpack, found)) if entropy or top1 else packed.unpack(found)
    with forward.refusing(given):
        if "longspan" not in given and given.get("labels") is None and given.get("shift_labels") is None:
            if given.get("input_ids") is None:
                raise LongspanError("the batch has no labels, and no input_ids to take for them; give labels")
            given["labels"] = given["input_ids"]
        sp, shift = sharding_of(given, state.sp), not forward.traits.labels_per_token
        if forward.traits.encoders and "longspan" not in given:  # the model needs the whole batch to place pictures
            cut = cut_batch({k: x for k, x in given.items() if k not in PICTURE_KEYS}, state.sp, shift=shift)
            inputs = {key: value for key, value in given.items() if key not in ("labels", "shift_labels")}
            labels = cut.pop("labels")
        else:
            inputs = cut = shard_batch(given, state.sp, shift=shift)
            labels = cut.pop("labels", None)
        if labels is None:
            raise LongspanError("the batch was cut without labels; give them to longspan.shard_batch")
    with forward.options.during(return_deferred=True):
        logits = model(**inputs).logits
    scores = _scores(model, logits, labels, temperature, entropy, ("is_top1",) if top1 else ())
    if not torch.is_grad_enabled():
        reshard(model)
    if gather:
        scores = tuple(gather_tokens(x, sp, cut["longspan"]) for x in scores)
    return scores if entropy or top1 else scores[0]


def _scores(
    model: nn.Module, logits: Any, labels: Tensor, temperature: float, entropy: bool, extras: tuple[str, ...]
) -> tuple[Tensor, ...]:
    if not isinstance(logits, DeferredLogits):
        raise LongspanError(f"{state_of(model).traits.name} does not call its head as transformers' models do")
    return logprobs_of(logits if temperature == 1 else logits / temperature, labels, entropy, extras)


@dataclass
class ScoredOutput(ModelOutput):  # type: ignore[misc]
    """The output of TRL's fused head, under its names; tensors `[B, n - 1]`, 0 if the next token is not labelled.

    Attributes:
        loss: minus the mean of `log_probs` over this replica's labelled tokens.
        log_probs: log p(next token).
        entropy: of the prediction, in nats; has a gradient if `ForwardOptions.entropy_grad`.
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

    def __init__(self, options: ForwardOptions) -> None:
        self.options = options
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
        logits, options = output["logits"], self.options
        extras = tuple(name for name in EXTRAS if not (options.entropy_grad and name == "entropy"))
        names = ("log_probs", *(["entropy"] if options.entropy_grad else []), *extras, "label_mask")
        labelled = (self.labels != IGNORE).to(logits.hidden.dtype)
        if options.uniform_gradient and torch.is_grad_enabled() and isinstance(logits, DeferredLogits):
            names, scored = ("log_probs", "entropy", "is_top1", "label_mask"), uniform_logprobs(logits, self.labels)
        else:
            scored = _scores(call.model, logits, self.labels, options.temperature, options.entropy_grad, extras)
        call.note_token_losses(options, -scored[0], self.labels)
        mine = (*scored, labelled)
        scores: dict[str, Any] = {}
        for name, x in zip(names, mine, strict=True):
            whole = gather_tokens(x, call.sp, call.info)
            # Copied: FSDP's hook on an output that is a view would be lost with an operation in place.
            scores[name] = (whole if call.packed is None else call.packed.unpack(whole))[:, :-1].clone()
        scores |= {name: scores[name].bool() for name in ("is_top1", "label_mask")}
        loss = -scores["log_probs"].sum() / scores["label_mask"].sum().clamp(min=1)
        return ScoredOutput(loss=loss, **scores, aux_loss=call.router_loss)
