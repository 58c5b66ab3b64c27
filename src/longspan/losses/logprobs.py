"""Log-probabilities and entropies of tokens from `DeferredLogits`. The forward computes each tile, and the backward
recomputes it, because the gradients of the results are not known in the forward.

Shape suffixes: T tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from longspan.core.tile_sizes import head_tile
from longspan.losses.cross_entropy import IGNORE
from longspan.losses.deferred_logits import DeferredLogits, VocabShard
from longspan.losses.tile_gradients import TileGradients, autocast_state


def logprobs_of(
    logits: DeferredLogits, labels: Tensor, entropy: bool = False, extras: tuple[str, ...] = ()
) -> tuple[Tensor, ...]:
    """Return log p(label) of every token, then the entropy of p if requested, then the `extras` (names in `EXTRAS`).

    They have the shape of `labels`, and are 0 where a label is -100; fp32 (fp64 for fp64); differentiable except for
    the extras.
    """
    hidden_TD = logits.hidden.reshape(-1, logits.hidden.shape[-1])
    labels_T = labels.reshape(-1).to(logits.device)
    found: Any = _Logprobs.apply(  # type: ignore[no-untyped-call]
        logits, (entropy, extras), labels_T, hidden_TD, *logits.head.bare.trained().values()
    )
    return tuple(x.view(labels.shape) for x in found)


class _Logprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: DeferredLogits,
        requested: tuple[bool, tuple[str, ...]],
        labels_T: Tensor,
        hidden_TD: Tensor,
        *parameters: Tensor,
    ) -> tuple[Tensor, ...]:
        tiles = [
            _results(logits.compute(hidden_TD[span]), labels_T[span], *requested, shard=logits.head.vocab_shard)
            for span in _tiles(logits, len(labels_T))
        ]
        ctx.logits, (ctx.entropy, extras), ctx.autocast = logits, requested, autocast_state(logits.device)
        ctx.save_for_backward(labels_T, hidden_TD, *parameters)
        results = tuple(torch.cat(of_tiles) for of_tiles in zip(*tiles, strict=True))
        if extras:
            ctx.mark_non_differentiable(*results[-len(extras) :])
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Recompute each tile, and let autograd go through it."""
        ctx.logits.head.regather()
        labels_T, hidden_TD, *parameters = ctx.saved_tensors
        by_name = dict(zip(ctx.logits.head.bare.trained_names(), parameters, strict=True))
        gradients = TileGradients(hidden_TD, by_name, ctx.needs_input_grad[3:])
        for span in _tiles(ctx.logits, len(labels_T)):
            with torch.enable_grad(), torch.autocast(**ctx.autocast):
                x = gradients.leaf(hidden_TD[span])
                tile = ctx.logits.compute(x, gradients.stand_ins)
                results = _results(tile, labels_T[span], ctx.entropy, shard=ctx.logits.head.vocab_shard)
            gradients.add(span, x, results, [g[span] for g in grads[: len(results)]])
        sums = zip(gradients.of_parameters(), parameters, strict=True)
        return None, None, None, gradients.of_hidden, *(None if x is None else x.to(p.dtype) for x, p in sums)


EXTRAS = ("entropy", "is_top1", "mean_logits", "log_sum_sq_probs")
"""Of each token the entropy in nats; 1 where the label has the largest logit, else 0; the mean logit; the logarithm of
the sum of squared probabilities. As extras none has a gradient, so that the backward does not recompute them.
"""


def _results(
    logits_TV: Tensor, labels_T: Tensor, entropy: bool, extras: tuple[str, ...] = (), shard: VocabShard | None = None
) -> tuple[Tensor, ...]:
    """Return log p(label), the entropy if requested, and the extras of a tile, each `[T]`."""
    counts, dtype = labels_T != IGNORE, torch.promote_types(logits_TV.dtype, torch.float32)
    names = [*(["entropy"] if entropy else []), *extras]
    if shard is None:
        log_p_TV = torch.log_softmax(logits_TV, -1, dtype=dtype)
        log_p = log_p_TV.gather(-1, torch.where(counts, labels_T, 0)[:, None])[:, 0]
    else:
        log_p_TV = shard.log_softmax(logits_TV, dtype)
        log_p = shard.group.sum_out(shard.of_label(log_p_TV, labels_T))

    def total(x_TV: Tensor) -> Tensor:
        return x_TV.sum(-1) if shard is None else shard.group.sum_out(x_TV.sum(-1))

    def other(name: str) -> Tensor:
        if name == "entropy":
            return -total(log_p_TV.exp() * log_p_TV)
        if name == "mean_logits":
            return total(logits_TV.to(dtype)) / (logits_TV.shape[-1] if shard is None else shard.size)
        if name == "log_sum_sq_probs":
            return total((2 * log_p_TV).exp()).log()
        return logits_TV.argmax(-1) == labels_T if shard is None else shard.is_top1(logits_TV, labels_T)

    return tuple(torch.where(counts, x.to(log_p.dtype), 0) for x in (log_p, *map(other, names)))


def _tiles(logits: DeferredLogits, tokens: int) -> Iterator[slice]:
    rows = head_tile(logits.widest, logits.device.type == "cpu")
    for start in range(0, tokens, rows):
        yield slice(start, start + rows)
