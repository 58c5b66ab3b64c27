"""Cross entropy tile by tile, forward and backward, of existing logits or of `DeferredLogits`.

The gradient of a token's cross entropy is known as soon as its logits are, up to the factor that the loss is multiplied
by later. So with deferred logits the forward computes each tile once, with its loss and its gradients, accumulates the
head's gradient in fp32, and frees the tile; the backward multiplies by the factor. (Liger's fused kernel does the same,
arXiv:2410.10989, section 3.2; this works with any head and any step after it.)

Shape suffixes: T tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from longspan.compat.torch_api import graph_is_kept
from longspan.core.errors import LongspanError
from longspan.core.tile_sizes import HEAD_ROWS, LOSS_TILE, NARROW_PARTS, head_tile
from longspan.losses.deferred_logits import DeferredLogits, Head, VocabShard
from longspan.losses.tile_gradients import TileGradients

IGNORE = -100
"""The label of a token without a loss (the convention of `torch.nn.functional.cross_entropy`)."""


class TokenLoss(Protocol):
    """A loss of each token's logits."""

    @property
    def tensors(self) -> int:
        """How many tensors as large as a tile's logits it computes with; cross entropy has 1."""

    def of_tile(
        self,
        span: slice,
        tile_TV: Tensor,
        labels_T: Tensor,
        weights_T: Tensor | None,
        needs_grad: bool,
        in_place: bool = False,
        shard: VocabShard | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the sum of a tile's losses, fp64 [], and its gradient `[T, V]` in fp32 or wider, perhaps in the tile.

        `span`: which of this rank's tokens the tile holds. With a `shard` of the vocabulary, return the loss over the
        whole vocabulary and the gradient of the shard; collective.
        """


@dataclass(frozen=True)
class LossTerms:
    """Cross entropy: -log p(label), with other terms of a token's loss."""

    label_smoothing: float = 0.0  # weight of the mean of -log p over the vocabulary (arXiv:1512.00567, section 7)
    z_loss: float = 0.0  # weight of the squared log-sum-exp (PaLM, arXiv:2204.02311, section 5)
    tensors = 1

    def of_tile(
        self,
        span: slice,
        tile_TV: Tensor,
        labels_T: Tensor,
        weights_T: Tensor | None,
        needs_grad: bool,
        in_place: bool = False,
        shard: VocabShard | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """As `TokenLoss.of_tile`."""
        dtype = torch.promote_types(tile_TV.dtype, torch.float32)
        of_label_T = tile_TV.gather(-1, _index(labels_T))[:, 0] if shard is None else shard.of_label(tile_TV, labels_T)
        label_T = of_label_T.to(dtype)
        mean_T = tile_TV.mean(-1, dtype=dtype) if self.label_smoothing else None
        x = tile_TV if in_place and tile_TV.dtype == dtype else tile_TV.to(dtype, copy=True)
        highest_T = x.amax(-1, keepdim=True)
        highest_T = highest_T if shard is None else shard.group.largest(highest_T)
        p_TV = x.sub_(highest_T).exp_()
        sum_T = p_TV.sum(-1, keepdim=True)
        if shard is not None:
            numbers = [sum_T[:, 0], label_T, *([] if mean_T is None else [mean_T * (shard.width / shard.size)])]
            sum_T, label_T, *means = shard.group.sum_out(torch.stack(numbers)).unbind()
            sum_T, mean_T = sum_T[:, None], means[0] if means else None
        lse_T = (sum_T.log() + highest_T)[:, 0]
        loss_T = _losses(lse_T - label_T, mean_T, lse_T, self)
        total = scaled(loss_T, labels_T, weights_T).sum(dtype=torch.float64)
        if not needs_grad:
            return total, None
        p_TV.div_(sum_T)
        _to_gradient(p_TV, labels_T, scaled(torch.ones_like(lse_T), labels_T, weights_T), lse_T, self, shard)
        return total, p_TV


CROSS_ENTROPY = LossTerms()


def loss_sum(
    logits: Tensor | DeferredLogits, labels: Tensor, terms: TokenLoss = CROSS_ENTROPY, weights: Tensor | None = None
) -> Tensor:
    """Return the sum of the tokens' losses, fp64 []. Not collective, unless the vocabulary is sharded.

    `logits` `[..., V]` have any floating dtype; computed in fp32 (fp64 for fp64). `labels` are int64, one per token,
    -100 for no loss; `weights`, of their shape, are factors of each token's loss.
    """
    labels_T = labels.reshape(-1).to(logits.device)
    weights_T = None if weights is None else weights.reshape(-1).to(logits.device)
    total: Any
    if isinstance(logits, DeferredLogits):
        hidden_TD = logits.hidden.reshape(-1, logits.hidden.shape[-1])
        # The head's parameters, whole as FSDP has gathered them: it reduce-scatters the gradients that they get here.
        total = _DeferredLossSum.apply(  # type: ignore[no-untyped-call]
            logits, labels_T, weights_T, terms, hidden_TD, *logits.head.bare.trained().values()
        )
    else:
        total = _LossSum.apply(logits.reshape(-1, logits.shape[-1]), labels_T, weights_T, terms)  # type: ignore[no-untyped-call]
    result: Tensor = total
    return result


class _LossSum(torch.autograd.Function):
    """Loss of existing logits. The forward saves one number per token, its log-sum-exp; the backward computes the
    gradient from it.
    """

    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, labels_T: Tensor, weights_T: Tensor | None, terms: LossTerms) -> Tensor:
        dtype = torch.promote_types(logits_TV.dtype, torch.float32)
        lse_T = torch.empty(len(labels_T), dtype=dtype, device=logits_TV.device)
        total = torch.zeros((), dtype=torch.float64, device=logits_TV.device)
        for span in _tiles(logits_TV):
            tile, labels = logits_TV[span], labels_T[span]
            index = _index(labels)
            log_p = torch.log_softmax(tile, -1, dtype=dtype).gather(-1, index)[:, 0]
            lse_T[span] = tile.gather(-1, index)[:, 0].to(dtype) - log_p
            mean_T = tile.mean(-1, dtype=dtype) if terms.label_smoothing else None
            loss_T = _losses(-log_p, mean_T, lse_T[span], terms)
            total += scaled(loss_T, labels, None if weights_T is None else weights_T[span]).sum(dtype=torch.float64)
        ctx.save_for_backward(logits_TV, labels_T, weights_T, lse_T)
        ctx.terms = terms
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        logits_TV, labels_T, weights_T, lse_T = ctx.saved_tensors
        grad_TV = torch.empty_like(logits_TV)
        scale_T = scaled(grads[0], labels_T, weights_T).to(lse_T.dtype)
        in_place = grad_TV.dtype == lse_T.dtype
        scratch: Tensor | None = None
        for span in _tiles(logits_TV):
            into = grad_TV[span]
            if not in_place:  # one buffer for all tiles: the first is the largest
                scratch = torch.empty_like(into, dtype=lse_T.dtype) if scratch is None else scratch
                into = scratch[: len(into)]
            p = torch.sub(logits_TV[span], lse_T[span, None], out=into).exp_()
            _to_gradient(p, labels_T[span], scale_T[span], lse_T[span], ctx.terms)
            if not in_place:
                grad_TV[span] = p
        return grad_TV, None, None, None


class _DeferredLossSum(torch.autograd.Function):
    """Loss of deferred logits: the forward computes each tile once, with its gradients.

    Its inputs are the hidden states and the head's weights as `BareModule.trained` returns them (under FSDP gathered,
    on a tensor axis plain shards), so that autograd passes their gradients on to FSDP and to the `DTensor`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: DeferredLogits,
        labels_T: Tensor,
        weights_T: Tensor | None,
        terms: TokenLoss,
        hidden_TD: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        by_name = dict(zip(logits.head.bare.trained_names(), parameters, strict=True))
        gradients = TileGradients(hidden_TD, by_name, ctx.needs_input_grad[4:])
        total = torch.zeros((), dtype=torch.float64, device=hidden_TD.device)
        rows = head_tile(terms.tensors * logits.widest, hidden_TD.device.type == "cpu")
        add: Any = functools.partial(_add_autograd_tile, logits, gradients)
        if logits.is_matmul and gradients.needed:
            add = _MatmulTile(logits.head, gradients, rows, len(hidden_TD))
            rows = add.rows
        for start in range(0, len(labels_T), rows):
            span = slice(start, min(start + rows, len(labels_T)))
            weights = None if weights_T is None else weights_T[span]
            total += add(span, hidden_TD[span], labels_T[span], weights, terms)
        # Not by `save_for_backward`: the backward returns these buffers, so nothing else may hold them.
        ctx.gradients = [gradients.of_hidden, *gradients.of_parameters()]
        ctx.dtypes = [x.dtype for x in (hidden_TD, *parameters)]
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Multiply the gradients by the incoming one; in place unless another backward will follow."""
        gradients: list[Tensor | None] | None = ctx.gradients
        if gradients is None:
            raise LongspanError(SECOND_BACKWARD)
        if graph_is_kept():
            gradients = [None if x is None else x.clone() for x in gradients]
        else:
            ctx.gradients = None
        pairs = zip(gradients, ctx.dtypes, strict=True)
        scaled = (None if x is None else x.mul_(grads[0].to(x.dtype)).to(dtype) for x, dtype in pairs)
        return None, None, None, None, *scaled


def _add_autograd_tile(
    logits: DeferredLogits, gradients: TileGradients, span: slice, hidden_TD: Tensor, labels_T: Tensor,
    weights_T: Tensor | None, terms: TokenLoss,
) -> Tensor:  # fmt: skip
    """Return the loss of a tile of any head, and add the gradients, which autograd computes."""
    with torch.set_grad_enabled(gradients.needed):
        x = gradients.leaf(hidden_TD)
        tile = logits.compute(x, gradients.stand_ins)
    shard = logits.head.vocab_shard
    loss, grad_TV = terms.of_tile(span, tile.detach(), labels_T, weights_T, gradients.needed, shard=shard)
    if grad_TV is not None:
        gradients.add(span, x, [tile], [grad_TV.to(tile.dtype)])
    return loss


class _MatmulTile:
    """A tile of a head that is one matrix product, in buffers that all tiles share.

    In half precision a tile has twice the rows, because each tile reads and writes the fp32 sum of the head's gradient.
    The fp32 steps then go through some rows at a time (`NARROW_PARTS`), so memory does not grow.
    """

    def __init__(self, head: Head, gradients: TileGradients, rows: int, tokens: int) -> None:
        self.head, self.gradients, self.weight_VD = head, gradients, head.weight
        narrow = self.weight_VD.dtype.itemsize < 4
        self.rows = min(tokens, 2 * rows) if narrow else min(tokens, rows)
        self.fp32_rows = max(1, -(-self.rows // NARROW_PARTS)) if narrow else self.rows
        self.buffer = self.weight_VD.new_empty(self.rows, len(self.weight_VD))
        wide = torch.promote_types(self.weight_VD.dtype, torch.float32)
        for name, weight_VD in gradients.stand_ins.items():  # the weight, unless it is frozen
            gradients.sums[name] = torch.zeros_like(weight_VD.detach(), dtype=wide)

    def __call__(
        self, span: slice, hidden_TD: Tensor, labels_T: Tensor, weights_T: Tensor | None, terms: TokenLoss
    ) -> Tensor:
        """Return the loss, and add the gradients."""
        tile = self.head.observe(torch.mm(hidden_TD, self.weight_VD.t(), out=self.buffer[: len(hidden_TD)]))
        total = torch.zeros((), dtype=torch.float64, device=tile.device)
        for start in range(0, len(tile), self.fp32_rows):
            rows = slice(start, min(start + self.fp32_rows, len(tile)))
            logits, weights = tile[rows], None if weights_T is None else weights_T[rows]
            of_all = slice(span.start + rows.start, span.start + rows.stop)
            loss, grad = terms.of_tile(
                of_all, logits, labels_T[rows], weights, True, in_place=True, shard=self.head.vocab_shard
            )
            assert grad is not None
            total += loss
            if grad is not logits:
                logits.copy_(grad)
            del grad  # before the next one is allocated
        # `tile` now holds the gradient of its logits.
        if self.gradients.of_hidden is not None:
            torch.mm(tile, self.weight_VD, out=self.gradients.of_hidden[span])
        for sum_VD in self.gradients.sums.values():
            _add_product(sum_VD, tile, hidden_TD)
        return total


def _add_product(total_VD: Tensor, grad_TV: Tensor, hidden_TD: Tensor) -> None:
    """`total += grad.T @ hidden`; some rows at a time if the total is wider than the product."""
    if total_VD.dtype == grad_TV.dtype:
        total_VD.addmm_(grad_TV.t(), hidden_TD)
        return
    for start in range(0, len(total_VD), HEAD_ROWS):
        rows = slice(start, start + HEAD_ROWS)
        total_VD[rows] += grad_TV[:, rows].t() @ hidden_TD


def _losses(loss_T: Tensor, mean_T: Tensor | None, lse_T: Tensor, terms: LossTerms) -> Tensor:
    """Return the tokens' losses from -log p(label), the mean of each token's logits and their log-sum-exp."""
    if mean_T is not None:
        loss_T = (1 - terms.label_smoothing) * loss_T + terms.label_smoothing * (lse_T - mean_T)
    return loss_T + terms.z_loss * lse_T.square() if terms.z_loss else loss_T


def scaled(x: Tensor, labels_T: Tensor, weights_T: Tensor | None) -> Tensor:
    """Return `x`, a number or one per token, times the tokens' weights; 0 where a label is -100."""
    x_T = torch.where(labels_T == IGNORE, 0, x)
    return x_T if weights_T is None else x_T * weights_T.to(x_T.dtype)


def _to_gradient(
    p_TV: Tensor, labels_T: Tensor, scale_T: Tensor, lse_T: Tensor, terms: LossTerms, shard: VocabShard | None = None
) -> None:
    """Turn probabilities, in place, into the gradient of each token's loss by its logits, times `scale_T`."""
    p_TV.mul_((scale_T if not terms.z_loss else scale_T * (1 + 2 * terms.z_loss * lse_T))[:, None])
    if terms.label_smoothing:
        size = p_TV.shape[-1] if shard is None else shard.size
        p_TV.sub_((terms.label_smoothing / size * scale_T)[:, None])
    index = _index(labels_T)
    if shard is not None:
        mine_T, index = shard.find(labels_T)
        scale_T = torch.where(mine_T, scale_T, 0)
    p_TV.scatter_add_(-1, index, -(1 - terms.label_smoothing) * scale_T[:, None])


def _index(labels: Tensor) -> Tensor:
    """Return labels to index with; 0 for ignored tokens. Other labels out of range raise, as torch's do."""
    return torch.where(labels == IGNORE, 0, labels)[:, None]


def _tiles(logits_TV: Tensor) -> Iterator[slice]:
    rows = max(1, LOSS_TILE[logits_TV.device.type == "cpu"] // max(1, logits_TV.shape[-1]))
    for i in range(0, len(logits_TV), rows):
        yield slice(i, i + rows)


SECOND_BACKWARD = (
    "a second backward through a loss without logits: the first one freed its gradients; call the model again, pass "
    "retain_graph=True to the first backward, or call longspan.parallelize(..., logits=True)"
)
