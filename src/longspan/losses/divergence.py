"""Divergences of a student's next-token distribution from a teacher's, by tiles: no logits of either model exist.

With p the student's distribution and q the teacher's, both at one temperature (generalized Jensen-Shannon divergence,
arXiv:2306.13649, equation 1):

    beta = 0      KL(q || p), forward
    beta = 1      KL(p || q), reverse
    between       beta KL(q || m) + (1 - beta) KL(p || m), where m = beta q + (1 - beta) p

With `top_k` both are distributions over the teacher's k most likely tokens and one entry for all others.

Shape suffixes: T tokens, D hidden size, V vocabulary, or this rank's shard of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from longspan.comm import collectives
from longspan.core.tile_sizes import DIVERGENCE_TENSORS
from longspan.losses.cross_entropy import scaled
from longspan.losses.deferred_logits import DeferredLogits, VocabShard


@dataclass(eq=False)
class Divergence:
    """A `TokenLoss`: the divergence of each token's prediction from the teacher's of the same token.

    Attributes:
        teacher: of this rank's tokens; no gradient.
        beta: selects the divergence, 0 to 1.
        temperature: divides the logits of both models.
        top_k: of the teacher's tokens; None for the whole vocabulary.
        entropy: None, or a sum to which the entropies of labelled tokens are added, of the student at this temperature;
            fp64 [].
    """

    teacher: DeferredLogits
    beta: float = 0.0
    temperature: float = 1.0
    top_k: int | None = None
    entropy: Tensor | None = None
    tensors = DIVERGENCE_TENSORS

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
        self.teacher.head.regather()  # the teacher's own forward has released it
        with torch.no_grad():
            hidden_TD = self.teacher.hidden.reshape(-1, self.teacher.hidden.shape[-1])[span]
            log_q_TV = _log_softmax(self.teacher.compute(hidden_TD).to(dtype).div(self.temperature), shard)
            log_p_TV = _log_softmax(tile_TV.to(dtype).div(self.temperature), shard)
            loss_T, grad_TV = self._loss_and_gradient(log_p_TV, log_q_TV, needs_grad, shard)
            if self.entropy is not None:
                entropy_T = -total_of(log_p_TV.exp().mul_(log_p_TV), shard)
                self.entropy += scaled(entropy_T, labels_T, None).sum(dtype=torch.float64)
            if grad_TV is not None:
                grad_TV.mul_((scaled(torch.ones_like(loss_T), labels_T, weights_T) / self.temperature)[:, None])
            return scaled(loss_T, labels_T, weights_T).sum(dtype=torch.float64), grad_TV

    def _loss_and_gradient(
        self, log_p_TV: Tensor, log_q_TV: Tensor, needs_grad: bool, shard: VocabShard | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return each token's divergence, and its gradient by the student's logits over the temperature.

        With r = log p - log q of each entry, the gradient is p - q for the forward KL, p (r - KL) for the reverse, and
        (1 - beta) p (log p - log m - KL(p || m)) between. All tokens that `top_k` leaves out have the r of their common
        entry, so that sums over the vocabulary are sums over the entries; their q in a gradient is p e^-r.
        """
        p_TV, q_TV, r_TV = log_p_TV.exp(), log_q_TV.exp(), log_p_TV - log_q_TV
        of_entry_TV = q_TV
        if self.top_k is not None:
            others_TV, tiny = ~largest(log_q_TV, self.top_k, shard), torch.finfo(p_TV.dtype).tiny
            of_p, of_q = (total_of(torch.where(others_TV, x, 0), shard).clamp_min(tiny).log() for x in (p_TV, q_TV))
            r_TV = torch.where(others_TV, (of_p - of_q)[:, None], r_TV)
            of_entry_TV = torch.where(others_TV, p_TV * (of_q - of_p).exp()[:, None], q_TV)
        if 0 < self.beta < 1:
            r_TV.clamp_min_(-80)  # e^-r is finite, and p so small that it counts for nothing
            over_m_TV = torch.expm1(-r_TV).mul_(self.beta).log1p_().neg_()  # log(p / m)
            of_p_T = total_of(p_TV * over_m_TV, shard)
            loss_T = (1 - self.beta) * of_p_T + self.beta * total_of(q_TV.mul_(over_m_TV - r_TV), shard)
            return loss_T, p_TV.mul_(over_m_TV.sub_(of_p_T[:, None])).mul_(1 - self.beta) if needs_grad else None
        # Its sum is 0; without it, the normalizers' rounding would be as large as a small divergence.
        excess_TV = p_TV - of_entry_TV
        if self.beta == 0:
            return total_of(excess_TV - q_TV.mul_(r_TV), shard), excess_TV if needs_grad else None
        of_p_TV = p_TV * r_TV
        loss_T = total_of(of_p_TV - excess_TV, shard)
        return loss_T, of_p_TV.sub_(p_TV.mul_(total_of(of_p_TV, shard)[:, None])) if needs_grad else None


def largest(x_TV: Tensor, k: int, shard: VocabShard | None) -> Tensor:
    """Return which entries are a token's k largest, bool `[T, V]`; of equal ones the first. Collective with a shard."""
    best_Tk = x_TV.topk(min(k, x_TV.shape[-1]), -1).values
    if shard is not None:
        padded = x_TV.new_full((1, len(x_TV), min(k, shard.widest)), -math.inf)
        padded[0, :, : best_Tk.shape[-1]] = best_Tk
        best_Tk = collectives.all_gather(padded, shard.group.name).movedim(0, 1).flatten(1).topk(k, -1).values
    last_T = best_Tk[:, -1:]
    above_TV, equal_TV = x_TV > last_T, x_TV == last_T
    above_T = above_TV.sum(-1, keepdim=True)
    before_T = torch.zeros_like(above_T)  # equal ones on earlier ranks
    if shard is not None:
        counts = torch.stack([above_TV.sum(-1), equal_TV.sum(-1)])[None]
        above_PT, equal_PT = collectives.all_gather(counts, shard.group.name).unbind(1)
        above_T, before_T = above_PT.sum(0)[:, None], equal_PT[: shard.group.rank].sum(0)[:, None]
    return above_TV | (equal_TV & (equal_TV.cumsum(-1) + before_T <= k - above_T))


def total_of(x_TV: Tensor, shard: VocabShard | None) -> Tensor:
    """Return each token's sum over the whole vocabulary, `[T]`. Collective with a shard."""
    return x_TV.sum(-1) if shard is None else shard.group.sum_out(x_TV.sum(-1))


def _log_softmax(logits_TV: Tensor, shard: VocabShard | None) -> Tensor:
    return torch.log_softmax(logits_TV, -1) if shard is None else shard.log_softmax(logits_TV, logits_TV.dtype)
