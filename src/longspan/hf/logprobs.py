"""Log-probabilities and entropies of a batch's tokens, without logits: what evaluation, distillation and RL need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor, nn

from longspan.core.errors import LongspanError
from longspan.core.validation import check_flag, check_number, checked_call
from longspan.hf.batch import check_batch, shard_batch
from longspan.hf.forward.outputs import Gathered
from longspan.hf.state import state_of
from longspan.hf.weights.fsdp import reshard
from longspan.losses.deferred_logits import DeferredLogits
from longspan.losses.logprobs import logprobs_of

if TYPE_CHECKING:
    pass


@overload
def token_logprobs(
    model: nn.Module,
    batch: Mapping[str, Any],
    *,
    temperature: float = 1.0,
    entropy: Literal[False] = False,
    top1: Literal[False] = False,
    gather: bool = False,
) -> Tensor: ...
@overload
def token_logprobs(
    model: nn.Module,
    batch: Mapping[str, Any],
    *,
    temperature: float = 1.0,
    entropy: Literal[True],
    top1: Literal[False] = False,
    gather: bool = False,
) -> tuple[Tensor, Tensor]: ...
@overload
def token_logprobs(
    model: nn.Module,
    batch: Mapping[str, Any],
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    top1: Literal[True],
    gather: bool = False,
) -> tuple[Tensor, ...]: ...
@checked_call(batch=check_batch)
def token_logprobs(
    model: nn.Module,
    batch: Mapping[str, Any],
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    top1: bool = False,
    gather: bool = False,
) -> Any:
    """The log-probability of each label of a batch, and if asked for the entropy of what the model predicts there.

    Head and softmax go tile by tile over the tokens, in the forward and once more in the backward, so that logits never
    exist as a whole. On every mesh the numbers are those of one process. Every rank calls this.

    Args:
        model: as `longspan.parallelize` returned it.
        batch: as for its forward; `labels` (or `shift_labels`) say whose probabilities, by default all `input_ids`.
        temperature: logits are divided by it.
        entropy: whether entropies are asked for.
        top1: whether it is asked for, if the label is the likeliest token (of several, the first).
        gather: False: those of my tokens, `[B, n_local]`. True: those of all tokens in order, `[B, n]`, on every rank.

    Returns:
        Log-probabilities, fp32 (fp64 for fp64). Entry i is log p(label i + 1 | tokens to i), where the logits at i
        predict the next token; for a masked LM log p(label i). 0 where the label is -100, and at the last token. With
        `entropy` a pair: the same and the entropies, in nats, 0 likewise. With `top1` one more: 1 where the label is
        the likeliest token, else 0; no gradient.

        Differentiable. Gradients of parameters are summed over all ranks, as with `loss`: without `gather` each rank
        makes a loss of its own tokens, and their sum is what is trained on; with `gather` all ranks of a sequence group
        make the same loss of the whole, and each of them sends back its own tokens' part of its gradient, so that the
        sum is the gradient of this one loss.

    Raises:
        LongspanError: for a model that was not parallelized or has no head, for a temperature of 0 or less, or a batch
            that the model's forward refuses.
    """
    state = state_of(model)
    forward = state.forward
    check_number("temperature", temperature, 1e-6, 1e6)
    check_flag("entropy", entropy)
    check_flag("top1", top1)
    check_flag("gather", gather)
    given = dict(batch)
    if "longspan" not in given and given.get("labels") is None and given.get("shift_labels") is None:
        if given.get("input_ids") is None:
            raise LongspanError("the batch has no labels, and no input_ids to take for them; give labels")
        given["labels"] = given["input_ids"]
    cut = shard_batch(given, state.sp, shift=not forward.traits.labels_per_token)
    labels = cut.pop("labels", None)
    if labels is None:
        raise LongspanError("the batch was cut without labels; give them to longspan.shard_batch")
    with forward.deferring():
        logits = model(**cut).logits
    if not isinstance(logits, DeferredLogits):
        raise LongspanError(f"{forward.traits.name} does not call its head as transformers' models do")
    if temperature != 1:
        logits = logits / temperature
    found = logprobs_of(logits, labels, entropy, ("is_top1",) if top1 else ())
    if not torch.is_grad_enabled():
        reshard(model)
    if gather:
        info = cut["longspan"]
        found = tuple(Gathered.apply(x, state.sp, info.layout, info.length) for x in found)  # type: ignore[no-untyped-call]
    return found if entropy or top1 else found[0]
