"""Cross entropy over a sharded sequence: the exact mean over every unmasked token of the global batch.

Each rank sums over its own tokens; one all-reduce of two numbers gives the sum and the count of all ranks. The mean of
ranks' means would be another number as soon as the ranks hold different counts of unmasked tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.errors import LongspanError
from longspan.mesh import find_group, group_name
from longspan.shard import IGNORE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from longspan.mesh import SequenceSharding

TILE_ELEMENTS = (1 << 24, 1 << 20)
"""Logits that are looked at together in fp32, whatever the vocabulary: 64 MiB on a GPU, 4 MiB (a cache) on a CPU."""


def causal_lm_loss(
    logits: Tensor, shifted_labels: Tensor, sp: SequenceSharding, num_items_in_batch: Tensor | int | None = None
) -> Tensor:
    """The mean cross entropy of the global batch (data x sequence), the same number on every rank.

    Its gradient on each rank is that rank's part: summed over all ranks, the parts are the gradient of the mean.

    Args:
        logits: my tokens, `[B, L, V]`, any floating dtype; softmax and sums run in fp32 (fp64 for fp64), tile by tile,
            so that no second tensor of this size exists in the forward.
        shifted_labels: what each of them should predict, int64 `[B, L]`, -100 where no loss is computed.
        sp: the sharding.
        num_items_in_batch: divide by this instead of the number of unmasked tokens; for gradient accumulation, where
            it counts the unmasked tokens of all micro-batches of all ranks.

    Returns:
        A scalar, fp32 (fp64 for fp64). 0 where no token of the global batch is unmasked.

    Raises:
        LongspanError: if the shapes do not fit.
    """
    if logits.shape[:-1] != shifted_labels.shape:
        raise LongspanError(
            f"logits of shape {tuple(logits.shape)} do not belong to labels of shape {tuple(shifted_labels.shape)}"
        )
    labels = shifted_labels.reshape(-1).to(logits.device)
    total: Any = _TokenLossSum.apply(logits.reshape(-1, logits.shape[-1]), labels)  # type: ignore[no-untyped-call]
    sums = torch.stack([total.double(), (labels != IGNORE).sum().double()])
    group = sp.world_group
    if group is not None and group.size() > 1:
        sums = torch.ops.longspan.sum_of_parts(sums, group_name(group))
    count = sums[1].detach().clamp_min(1) if num_items_in_batch is None else num_items_in_batch
    if isinstance(count, Tensor):
        count = count.to(sums.device)
    loss: Tensor = sums[0] / count
    return loss.to(torch.promote_types(logits.dtype, torch.float32))


@torch.library.custom_op("longspan::sum_of_parts", mutates_args=())
def _sum_of_parts(x: Tensor, group: str) -> Tensor:
    out = x.clone()
    dist.all_reduce(out, group=find_group(group))
    return out


@_sum_of_parts.register_fake
def _(x: Tensor, group: str) -> Tensor:
    return torch.empty_like(x)


# The sum is one number that every rank holds; each rank's backward starts from it and goes on with its own part.
_sum_of_parts.register_autograd(lambda ctx, grad: (grad, None))


class _TokenLossSum(torch.autograd.Function):
    """Sum of the tokens' cross entropies, in tiles over the tokens. No collective in here.

    The forward keeps one number per token (log-sum-exp); the backward makes the gradient tile by tile from it.
    """

    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, labels_T: Tensor) -> Tensor:
        dtype = torch.promote_types(logits_TV.dtype, torch.float32)
        lse_T = torch.empty(len(labels_T), dtype=dtype, device=logits_TV.device)
        total = torch.zeros((), dtype=torch.float64, device=logits_TV.device)
        for part in _tiles(logits_TV):
            tile, labels = logits_TV[part], labels_T[part]
            at = _index(labels)
            log_p = torch.log_softmax(tile, -1, dtype=dtype).gather(-1, at)[:, 0]
            lse_T[part] = tile.gather(-1, at)[:, 0].to(dtype) - log_p
            total -= torch.where(labels == IGNORE, 0, log_p).sum(dtype=torch.float64)
        ctx.save_for_backward(logits_TV, labels_T, lse_T)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """(softmax - one_hot) * grad, computed where it will stay if the dtype allows."""
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
            p = torch.sub(logits_TV[part], lse_T[part, None], out=into).exp_().mul_(scale_T[part, None])
            p.scatter_add_(-1, _index(labels_T[part]), -scale_T[part, None])
            if not in_place:
                grad_TV[part] = p
        return grad_TV, None


def _index(labels: Tensor) -> Tensor:
    """Labels to index with; any class will do where none counts. Other labels out of range raise, as torch's do."""
    return torch.where(labels == IGNORE, 0, labels)[:, None]


def _tiles(logits_TV: Tensor) -> Iterator[slice]:
    rows = max(1, TILE_ELEMENTS[logits_TV.device.type == "cpu"] // max(1, logits_TV.shape[-1]))
    for i in range(0, len(logits_TV), rows):
        yield slice(i, i + rows)
