"""Log-probabilities and entropies of tokens from `DeferredLogits`. The forward computes each tile, and the backward
recomputes it, because the gradients of the results are not known in the forward; unless all are the same
(`uniform_logprobs`).

Shape suffixes: T tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from longspan.compat.torch_api import graph_is_kept
from longspan.core.errors import LongspanError
from longspan.core.tile_sizes import head_tile
from longspan.losses.cross_entropy import IGNORE, SECOND_BACKWARD
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


def uniform_logprobs(logits: DeferredLogits, labels: Tensor) -> tuple[Tensor, ...]:
    """Return log p(label), the entropy and whether the label is the most likely token, as `logprobs_of` does, for a
    loss that is a multiple of the sum of the first.

    The forward computes each tile once, with its gradients. The others have no gradient.
    """
    hidden_TD = logits.hidden.reshape(-1, logits.hidden.shape[-1])
    labels_T = labels.reshape(-1).to(logits.device)
    found: Any = _UniformLogprobs.apply(logits, labels_T, hidden_TD, *logits.head.bare.trained().values())  # type: ignore[no-untyped-call]
    return tuple(x.view(labels.shape) for x in found)


class _UniformLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: DeferredLogits, labels_T: Tensor, hidden_TD: Tensor, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        by_name = dict(zip(logits.head.bare.trained_names(), parameters, strict=True))
        gradients, tiles = TileGradients(hidden_TD, by_name, ctx.needs_input_grad[2:]), []
        for span in _tiles(logits, len(labels_T)):
            with torch.set_grad_enabled(gradients.needed):
                x = gradients.leaf(hidden_TD[span])
                tile = logits.compute(x, gradients.stand_ins)
            *results, grad_TV = _results_and_gradient(tile.detach(), labels_T[span], logits.head.vocab_shard)
            if gradients.needed:
                gradients.add(span, x, [tile], [grad_TV.to(tile.dtype)])
            tiles.append(results)
        # Not by `save_for_backward`: the backward returns these buffers, so nothing else may hold them.
        ctx.gradients = [gradients.of_hidden, *gradients.of_parameters()]
        ctx.dtypes, ctx.labelled = [x.dtype for x in (hidden_TD, *parameters)], labels_T != IGNORE
        found = tuple(torch.cat(of_tiles) for of_tiles in zip(*tiles, strict=True))
        ctx.mark_non_differentiable(*found[1:])
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Multiply the gradients by the incoming one; in place unless another backward will follow."""
        gradients: list[Tensor | None] | None = ctx.gradients
        if gradients is None:
            raise LongspanError(SECOND_BACKWARD)
        incoming = grads[0][ctx.labelled]
        scale = incoming[0] if len(incoming) else grads[0].new_zeros(())
        if bool((incoming != scale).any()) and bool(incoming.isfinite().all()):
            raise LongspanError("the loss is no multiple of the sum of log-probabilities, so its gradient is not known")
        if graph_is_kept():
            gradients = [None if x is None else x.clone() for x in gradients]
        else:
            ctx.gradients = None
        pairs = zip(gradients, ctx.dtypes, strict=True)
        return None, None, *(None if x is None else x.mul_(scale.to(x.dtype)).to(dtype) for x, dtype in pairs)


def _results_and_gradient(logits_TV: Tensor, labels_T: Tensor, shard: VocabShard | None) -> tuple[Tensor, ...]:
    """Return what `uniform_logprobs` does, of a tile, and the gradient of log p(label) by the logits `[T, V]`."""
    counts, dtype = labels_T != IGNORE, torch.promote_types(logits_TV.dtype, torch.float32)
    is_top1 = logits_TV.argmax(-1) == labels_T if shard is None else shard.is_top1(logits_TV, labels_T)
    log_p_TV, log_p = _log_softmax(logits_TV, labels_T, dtype, shard)
    p_TV = log_p_TV.exp()
    entropy = -_total(log_p_TV.mul_(p_TV), shard)
    mine_T, index = (counts, torch.where(counts, labels_T, 0)[:, None]) if shard is None else shard.find(labels_T)
    p_TV.mul_(-counts.to(dtype)[:, None]).scatter_add_(-1, index, (mine_T & counts).to(dtype)[:, None])
    return *(torch.where(counts, x.to(log_p.dtype), 0) for x in (log_p, entropy, is_top1)), p_TV


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
    log_p_TV, log_p = _log_softmax(logits_TV, labels_T, dtype, shard)

    def other(name: str) -> Tensor:
        if name == "entropy":
            return -_total(log_p_TV.exp() * log_p_TV, shard)
        if name == "mean_logits":
            return _total(logits_TV.to(dtype), shard) / (logits_TV.shape[-1] if shard is None else shard.size)
        if name == "log_sum_sq_probs":
            return _total((2 * log_p_TV).exp(), shard).log()
        return logits_TV.argmax(-1) == labels_T if shard is None else shard.is_top1(logits_TV, labels_T)

    return tuple(torch.where(counts, x.to(log_p.dtype), 0) for x in (log_p, *map(other, names)))


def _log_softmax(
    logits_TV: Tensor, labels_T: Tensor, dtype: torch.dtype, shard: VocabShard | None
) -> tuple[Tensor, Tensor]:
    """Return log p of my part of the vocabulary, and of the labels; any for a label of -100."""
    if shard is None:
        log_p_TV = torch.log_softmax(logits_TV, -1, dtype=dtype)
        return log_p_TV, log_p_TV.gather(-1, torch.where(labels_T != IGNORE, labels_T, 0)[:, None])[:, 0]
    log_p_TV = shard.log_softmax(logits_TV, dtype)
    return log_p_TV, shard.group.sum_out(shard.of_label(log_p_TV, labels_T))


def _total(x_TV: Tensor, shard: VocabShard | None) -> Tensor:
    return x_TV.sum(-1) if shard is None else shard.group.sum_out(x_TV.sum(-1))


def _tiles(logits: DeferredLogits, tokens: int) -> Iterator[slice]:
    rows = head_tile(logits.widest, logits.device.type == "cpu")
    for start in range(0, tokens, rows):
        yield slice(start, start + rows)
