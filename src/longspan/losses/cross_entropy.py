"""Cross entropy tile by tile, of logits that are there or of `DeferredLogits`, forward and backward.

The gradient of a token's cross entropy is known as soon as its logits are, up to the factor that the loss is multiplied
by afterwards. So where logits are deferred, the forward makes each tile once, takes its loss and its gradients, adds up
the head's in fp32, and lets the tile go; the backward multiplies by the factor. (As Liger's fused kernel does,
arXiv:2410.10989, section 3.2; with any head and anything done to its output.)

Shape suffixes: T tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longspan.compat.torch_api import graph_is_kept
from longspan.core.errors import LongspanError
from longspan.core.tile_sizes import HEAD_ROWS, LOSS_TILE, NARROW_PARTS, head_tile
from longspan.losses.deferred_logits import DeferredLogits, Head
from longspan.losses.fused_heads import SECOND_BACKWARD, head_loss
from longspan.losses.vocab_parallel import Vocabulary

IGNORE = -100
"""The label of a token that no loss is computed for (the convention of `torch.nn.functional.cross_entropy`)."""

TILE_ELEMENTS = LOSS_TILE


@dataclass(frozen=True)
class Terms:
    """What the loss of a token is made of, beside -log p(label).

    Attributes:
        label_smoothing: a share of it is the mean of -log p over the vocabulary (arXiv:1512.00567, section 7).
        z_loss: times the square of the log-sum-exp is added (PaLM, arXiv:2204.02311, section 5).
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0


CROSS_ENTROPY = Terms()


def loss_sum(logits: Tensor | DeferredLogits, labels: Tensor, terms: Terms = CROSS_ENTROPY) -> Tensor:
    """The sum of the tokens' losses, fp64 []. No collective in here.

    Args:
        logits: `[..., V]`, any floating dtype; computed with in fp32 (fp64 for fp64).
        labels: int64, as many as tokens; -100 where no loss is computed.
        terms: of the loss.
    """
    labels_T = labels.reshape(-1).to(logits.device)
    total: Any
    if isinstance(logits, DeferredLogits) and logits.head.loss != "tiled":
        total = head_loss(logits.head.loss, logits, labels_T, terms)
    elif isinstance(logits, DeferredLogits):
        hidden_TD = logits.hidden.reshape(-1, logits.hidden.shape[-1])
        total = _DeferredSum.apply(logits, labels_T, terms, hidden_TD, *logits.head.trained().values())  # type: ignore[no-untyped-call]
    else:
        total = _Sum.apply(logits.reshape(-1, logits.shape[-1]), labels_T, terms)  # type: ignore[no-untyped-call]
    result: Tensor = total
    return result


class _Sum(torch.autograd.Function):
    """Of logits that are there: the forward keeps one number per token (its log-sum-exp), the backward makes their
    gradient from it."""

    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, labels_T: Tensor, terms: Terms) -> Tensor:
        dtype = torch.promote_types(logits_TV.dtype, torch.float32)
        lse_T = torch.empty(len(labels_T), dtype=dtype, device=logits_TV.device)
        total = torch.zeros((), dtype=torch.float64, device=logits_TV.device)
        for part in _tiles(logits_TV):
            tile, labels = logits_TV[part], labels_T[part]
            at = _index(labels)
            log_p = torch.log_softmax(tile, -1, dtype=dtype).gather(-1, at)[:, 0]
            lse_T[part] = tile.gather(-1, at)[:, 0].to(dtype) - log_p
            mean_T = tile.mean(-1, dtype=dtype) if terms.label_smoothing else None
            loss_T = _losses(-log_p, mean_T, lse_T[part], terms)
            total += torch.where(labels == IGNORE, 0, loss_T).sum(dtype=torch.float64)
        ctx.save_for_backward(logits_TV, labels_T, lse_T)
        ctx.terms = terms
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        logits_TV, labels_T, lse_T = ctx.saved_tensors
        grad_TV = torch.empty_like(logits_TV)
        scale_T = torch.where(labels_T == IGNORE, 0, grads[0]).to(lse_T.dtype)
        in_place = grad_TV.dtype == lse_T.dtype
        scratch: Tensor | None = None
        for part in _tiles(logits_TV):
            into = grad_TV[part]
            if not in_place:  # one tile for all: the first is the largest
                scratch = torch.empty_like(into, dtype=lse_T.dtype) if scratch is None else scratch
                into = scratch[: len(into)]
            p = torch.sub(logits_TV[part], lse_T[part, None], out=into).exp_()
            _to_gradient(p, labels_T[part], scale_T[part], lse_T[part], ctx.terms)
            if not in_place:
                grad_TV[part] = p
        return grad_TV, None, None


class _DeferredSum(torch.autograd.Function):
    """Of logits that are not: each tile is made once, in the forward, with its gradients."""

    @staticmethod
    def forward(
        ctx: Any, logits: DeferredLogits, labels_T: Tensor, terms: Terms, hidden_TD: Tensor, *parameters: Tensor
    ) -> Tensor:
        of_hidden, *of_parameters = ctx.needs_input_grad[3:]
        wanted = [p for p, asked in zip(parameters, of_parameters, strict=True) if asked]
        sums = [torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for p in wanted]
        grad_TD = torch.empty_like(hidden_TD) if of_hidden else None
        total = torch.zeros((), dtype=torch.float64, device=hidden_TD.device)
        tile = _tile_of(logits, hidden_TD, of_hidden, of_parameters)
        rows = tile.rows
        for start in range(0, len(labels_T), rows):
            part = slice(start, start + rows)
            into = None if grad_TD is None else grad_TD[part]
            total += tile(hidden_TD[part], labels_T[part], terms, into, sums)
        ctx.asked, ctx.dtypes = of_parameters, [p.dtype for p in wanted]
        # Not by `save_for_backward`: they are given away in the backward, and nothing may hold them then.
        ctx.made = grad_TD, sums
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Return the gradients times the incoming one; in place unless another backward will follow."""
        if ctx.made is None:
            raise LongspanError(SECOND_BACKWARD)
        grad_TD, sums = ctx.made
        if graph_is_kept():
            grad_TD, sums = None if grad_TD is None else grad_TD.clone(), [x.clone() for x in sums]
        else:
            ctx.made = None
        if grad_TD is not None:
            grad_TD.mul_(grads[0].to(grad_TD.dtype))
        found = iter([x.mul_(grads[0].to(x.dtype)).to(dtype) for x, dtype in zip(sums, ctx.dtypes, strict=True)])
        return None, None, None, grad_TD, *(next(found) if asked else None for asked in ctx.asked)


def _tile_of(logits: DeferredLogits, hidden_TD: Tensor, of_hidden: bool, of_parameters: list[bool]) -> Any:
    """The function that computes a tile: loss, and gradients, added to what they belong to."""
    rows = head_tile(logits.widest, hidden_TD.device.type == "cpu")
    plain = logits.plain
    if plain is not None and (of_hidden or any(of_parameters)):
        return _PlainTile(logits.head, logits.head.weight, rows, len(hidden_TD))
    trained = logits.head.trained()
    wanted = [name for name, asked in zip(trained, of_parameters, strict=True) if asked]
    # Stand-ins: hooks on the parameters themselves count a gradient as that of the whole backward.
    return _AnyTile(logits, {name: trained[name].detach().requires_grad_() for name in wanted}, of_hidden, rows)


class _AnyTile:
    """A tile of any head: gradients by autograd."""

    def __init__(self, logits: DeferredLogits, wanted: dict[str, Tensor], of_hidden: bool, rows: int) -> None:
        self.logits, self.wanted, self.of_hidden, self.rows = logits, wanted, of_hidden, rows

    def __call__(
        self, hidden_TD: Tensor, labels_T: Tensor, terms: Terms, into: Tensor | None, sums: list[Tensor]
    ) -> Tensor:
        asked = self.of_hidden or bool(self.wanted)
        with torch.set_grad_enabled(asked):
            x = hidden_TD.detach().requires_grad_(self.of_hidden)
            made = self.logits.of(x, self.wanted or None)
        loss, grad_TV = _of_tile(made.detach(), labels_T, terms, asked, part=self.logits.head.vocabulary)
        if asked:
            assert grad_TV is not None
            inputs = [*([x] if self.of_hidden else []), *self.wanted.values()]
            found = list(torch.autograd.grad(made, inputs, grad_TV.to(made.dtype), allow_unused=True))
            if into is not None:
                into.copy_(found.pop(0))
            for total, more in zip(sums, found, strict=True):
                if more is not None:
                    total.add_(more)
        return loss


class _PlainTile:
    """A tile of a head that is one matrix product, in buffers that all tiles share.

    In half precision a tile has twice the rows, as every one reads and writes the fp32 sum of the head's gradient; what
    is computed in fp32 is then some of its rows at a time (`NARROW_PARTS`), and the whole takes no more memory.
    """

    def __init__(self, head: Head, weight_VD: Tensor, rows: int, tokens: int) -> None:
        self.head, self.weight_VD = head, weight_VD
        self.narrow = weight_VD.dtype.itemsize < 4
        self.rows = min(tokens, 2 * rows) if self.narrow else min(tokens, rows)
        self.part = max(1, -(-self.rows // NARROW_PARTS)) if self.narrow else self.rows
        self.logits = weight_VD.new_empty(self.rows, len(weight_VD))

    def __call__(
        self, hidden_TD: Tensor, labels_T: Tensor, terms: Terms, into: Tensor | None, sums: list[Tensor]
    ) -> Tensor:
        tile = self.head.observed(torch.mm(hidden_TD, self.weight_VD.t(), out=self.logits[: len(hidden_TD)]))
        total = torch.zeros((), dtype=torch.float64, device=tile.device)
        for logits, labels in zip(tile.split(self.part), labels_T.split(self.part), strict=True):
            loss, grad = _of_tile(logits, labels, terms, True, in_place=True, part=self.head.vocabulary)
            assert grad is not None
            total += loss
            if grad.dtype != logits.dtype:
                logits.copy_(grad)
        if into is not None:
            torch.mm(tile, self.weight_VD, out=into)
        for gradient in sums:
            _add_product(gradient, tile, hidden_TD)
        return total


def _add_product(total_VD: Tensor, grad_TV: Tensor, hidden_TD: Tensor) -> None:
    """`total += grad.T @ hidden`; where the total is wider than the product, some rows at a time."""
    if total_VD.dtype == grad_TV.dtype:
        total_VD.addmm_(grad_TV.t(), hidden_TD)
        return
    for start in range(0, len(total_VD), HEAD_ROWS):
        part = slice(start, start + HEAD_ROWS)
        total_VD[part] += grad_TV[:, part].t() @ hidden_TD


def _of_tile(
    tile_TV: Tensor,
    labels_T: Tensor,
    terms: Terms,
    grad: bool,
    in_place: bool = False,
    part: Vocabulary | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The sum of a tile's losses, fp64 [], and its gradient `[T, V]` in fp32 at least, which may lie in the tile.

    Of a `part` of the vocabulary: the sum of the whole vocabulary's losses, the gradient of this part; collective.
    """
    dtype = torch.promote_types(tile_TV.dtype, torch.float32)
    label_T = (tile_TV.gather(-1, _index(labels_T))[:, 0] if part is None else part.of_label(tile_TV, labels_T)).to(
        dtype
    )
    mean_T = tile_TV.mean(-1, dtype=dtype) if terms.label_smoothing else None
    x = tile_TV if in_place and tile_TV.dtype == dtype else tile_TV.to(dtype, copy=True)
    highest_T = x.amax(-1, keepdim=True)
    highest_T = highest_T if part is None else part.group.largest(highest_T)
    p_TV = x.sub_(highest_T).exp_()
    sum_T = p_TV.sum(-1, keepdim=True)
    if part is not None:
        numbers = [sum_T[:, 0], label_T, *([] if mean_T is None else [mean_T * (part.width / part.size)])]
        sum_T, label_T, *means = part.group.sum_out(torch.stack(numbers)).unbind()
        sum_T, mean_T = sum_T[:, None], means[0] if means else None
    lse_T = (sum_T.log() + highest_T)[:, 0]
    loss_T = _losses(lse_T - label_T, mean_T, lse_T, terms)
    counts = labels_T != IGNORE
    total = torch.where(counts, loss_T, 0).sum(dtype=torch.float64)
    if not grad:
        return total, None
    p_TV.div_(sum_T)
    _to_gradient(p_TV, labels_T, counts.to(dtype), lse_T, terms, part)
    return total, p_TV


def _losses(loss_T: Tensor, mean_T: Tensor | None, lse_T: Tensor, terms: Terms) -> Tensor:
    """The tokens' losses from -log p(label), the mean of each token's logits and their log-sum-exp."""
    if mean_T is not None:
        loss_T = (1 - terms.label_smoothing) * loss_T + terms.label_smoothing * (lse_T - mean_T)
    return loss_T + terms.z_loss * lse_T.square() if terms.z_loss else loss_T


def _to_gradient(
    p_TV: Tensor, labels_T: Tensor, scale_T: Tensor, lse_T: Tensor, terms: Terms, part: Vocabulary | None = None
) -> None:
    """Probabilities become the gradient of each token's loss with regard to its logits, times `scale_T`; in place."""
    p_TV.mul_((scale_T if not terms.z_loss else scale_T * (1 + 2 * terms.z_loss * lse_T))[:, None])
    if terms.label_smoothing:
        size = p_TV.shape[-1] if part is None else part.size
        p_TV.sub_((terms.label_smoothing / size * scale_T)[:, None])
    at = _index(labels_T)
    if part is not None:
        mine_T, at = part.find(labels_T)
        scale_T = torch.where(mine_T, scale_T, 0)
    p_TV.scatter_add_(-1, at, -(1 - terms.label_smoothing) * scale_T[:, None])


def _index(labels: Tensor) -> Tensor:
    """Labels to index with; any class will do where none counts. Other labels out of range raise, as torch's do."""
    return torch.where(labels == IGNORE, 0, labels)[:, None]


def _tiles(logits_TV: Tensor) -> Iterator[slice]:
    rows = max(1, TILE_ELEMENTS[logits_TV.device.type == "cpu"] // max(1, logits_TV.shape[-1]))
    for i in range(0, len(logits_TV), rows):
        yield slice(i, i + rows)
