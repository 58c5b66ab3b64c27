"""The load-balancing loss of a mixture of experts over the global batch.

The loss is a product of two means. The sums behind both means are all-reduced before the product: a mean of the ranks'
own losses would be another number.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longspan.comm.collectives import scale_gradient, sum_over
from longspan.comm.mesh import SequenceSharding


def load_balancing_loss(
    router_logits: Sequence[Tensor], top_k: int, sp: SequenceSharding, real: Tensor | None = None
) -> Tensor:
    """Return the auxiliary loss of a mixture of experts over the global batch (data x sequence), equal on every rank.

    E * sum over experts e of f_e * p_e, where f_e is the number of times a token is routed to e per token, and p_e the
    mean routing probability of e; means over the tokens of all layers (Switch Transformer, arXiv:2101.03961, equations
    4 to 6, extended to top-k as in transformers' `load_balancing_loss_func`). The average
    of the ranks' gradients is its gradient, as for `causal_lm_loss`.

    `router_logits` are of each layer with experts those of my tokens, `[tokens, E]` (rows of the batch one after
    another); `real` are the tokens that count, bool. fp32 (fp64 for fp64).
    """
    dtype = torch.promote_types(router_logits[0].dtype, torch.float32)
    # In a tensor group each rank routes some of the tokens, so sum over it too.
    sums = sum_over(balance_sums(router_logits, top_k, real), sp.world_group)
    return balance(scale_gradient(sums, sp.fsdp_size)).to(dtype)


def balance_sums(router_logits: Sequence[Tensor], top_k: int, real: Tensor | None) -> Tensor:
    """Return the sums over my tokens, fp64 [2 E + 1]: assignments, probabilities, number of tokens."""
    assigned_E, p_E = (router_logits[0].new_zeros(router_logits[0].shape[-1], dtype=torch.float64) for _ in range(2))
    tokens = router_logits[0].new_zeros(1, dtype=torch.float64)
    for logits_TE in router_logits:
        p_TE = torch.softmax(logits_TE, -1)
        chosen_Tk = p_TE.topk(top_k, -1).indices
        counts_T = p_TE.new_ones(len(p_TE)) if real is None else real.reshape(-1).to(p_TE)
        assigned_E = assigned_E.index_add(0, chosen_Tk.flatten(), counts_T.double().repeat_interleave(top_k))
        p_E = p_E + (p_TE if real is None else p_TE * counts_T[:, None]).sum(0, dtype=torch.float64)
        tokens = tokens + counts_T.sum(dtype=torch.float64)
    return torch.cat([assigned_E, p_E, tokens])


def balance(sums: Tensor) -> Tensor:
    """Return the load-balancing loss from `balance_sums`."""
    experts = len(sums) // 2
    f_E, p_E = sums[: 2 * experts].view(2, experts) / sums[-1]
    loss: Tensor = experts * (f_E * p_E).sum()
    return loss
