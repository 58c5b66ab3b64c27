"""Log-probabilities and entropies of tokens from `DeferredLogits`: each tile is made in the forward, and again in the
backward, which does not know the gradients of its numbers before.

Shape suffixes: T tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from longspan.core.tile_sizes import head_tile
from longspan.losses.cross_entropy import IGNORE
from longspan.losses.deferred_logits import DeferredLogits
from longspan.losses.vocab_parallel import Vocabulary


def logprobs_of(
    logits: DeferredLogits, labels: Tensor, entropy: bool = False, extras: tuple[str, ...] = ()
) -> tuple[Tensor, ...]:
    """log p(label), and if asked for the entropy of p, at every token, in the shape of `labels`; 0 where the label is
    -100.

    Args:
        logits: `[..., V]`.
        labels: int64, of the shape of the tokens.
        entropy: whether it is asked for.
        extras: names of `EXTRAS`, what else is asked for.

    Returns:
        One tensor or more, fp32 (fp64 for fp64), differentiable but for the extras.
    """
    hidden_TD = logits.hidden.reshape(-1, logits.hidden.shape[-1])
    labels_T = labels.reshape(-1).to(logits.device)
    found: Any = _Logprobs.apply(  # type: ignore[no-untyped-call]
        logits, (entropy, extras), labels_T, hidden_TD, *logits.head.trained().values()
    )
    return tuple(x.view(labels.shape) for x in found)


class _Logprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: DeferredLogits,
        wanted: tuple[bool, tuple[str, ...]],
        labels_T: Tensor,
        hidden_TD: Tensor,
        *parameters: Tensor,
    ) -> tuple[Tensor, ...]:
        parts = [
            _numbers(logits.of(hidden_TD[part]), labels_T[part], *wanted, part=logits.head.vocabulary)
            for part in _parts(logits, len(labels_T))
        ]
        ctx.logits, (ctx.entropy, extras), ctx.autocast = logits, wanted, _autocast_of(logits.device)
        ctx.save_for_backward(labels_T, hidden_TD, *parameters)
        found = tuple(torch.cat(numbers) for numbers in zip(*parts, strict=True))
        if extras:
            ctx.mark_non_differentiable(*found[-len(extras) :])
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Tile by tile: each is made again, and autograd goes through it."""
        ctx.logits.head.regather()
        labels_T, hidden_TD, *parameters = ctx.saved_tensors
        of_hidden, *of_parameters = ctx.needs_input_grad[3:]
        names = [name for name, asked in zip(ctx.logits.head.trained(), of_parameters, strict=True) if asked]
        mine = [p for p, asked in zip(parameters, of_parameters, strict=True) if asked]
        # Stand-ins: hooks on the parameters themselves count a gradient as that of the whole backward.
        wanted = {name: p.detach().requires_grad_() for name, p in zip(names, mine, strict=True)}
        sums = [torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for p in mine]
        grad_TD = torch.empty_like(hidden_TD) if of_hidden else None
        for part in _parts(ctx.logits, len(labels_T)):
            with torch.enable_grad(), torch.autocast(**ctx.autocast):
                x = hidden_TD[part].detach().requires_grad_(of_hidden)
                made = ctx.logits.of(x, wanted or None)
                numbers = _numbers(made, labels_T[part], ctx.entropy, part=ctx.logits.head.vocabulary)
            inputs = [*([x] if of_hidden else []), *wanted.values()]
            of_numbers = [g[part] for g in grads[: len(numbers)]]
            found = list(torch.autograd.grad(numbers, inputs, of_numbers, allow_unused=True))
            if grad_TD is not None:
                grad_TD[part] = found.pop(0)
            for total, more in zip(sums, found, strict=True):
                if more is not None:
                    total.add_(more)
        made = iter([total.to(p.dtype) for total, p in zip(sums, mine, strict=True)])
        return None, None, None, grad_TD, *(next(made) if asked else None for asked in of_parameters)


def _autocast_of(device: torch.device) -> dict[str, Any]:
    """A backward runs outside of the autocast that its forward ran in."""
    kind = device.type
    return {"device_type": kind, "dtype": torch.get_autocast_dtype(kind), "enabled": torch.is_autocast_enabled(kind)}


EXTRAS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "entropy": lambda logits, log_p, labels: -(log_p.exp() * log_p).sum(-1),
    "is_top1": lambda logits, log_p, labels: logits.argmax(-1) == labels,
    "mean_logits": lambda logits, log_p, labels: logits.to(log_p.dtype).mean(-1),
    "log_sum_sq_probs": lambda logits, log_p, labels: torch.logsumexp(2 * log_p, -1),
}
"""Of a token's logits `[T, V]`, their log-probabilities, and labels `[T]`: the entropy, in nats; whether the label is
the likeliest token, as 1 or 0; the mean of the logits; the logarithm of the sum of squared probabilities. None has a
gradient, so that a backward does not compute it again.
"""


_PARTS: dict[str, Callable[[Tensor, Tensor, Tensor, Vocabulary], Tensor]] = {
    "entropy": lambda logits, log_p, labels, part: part.group.sum_out(-(log_p.exp() * log_p).sum(-1)),
    "is_top1": lambda logits, log_p, labels, part: part.is_top1(logits, labels),
    "mean_logits": lambda logits, log_p, labels, part: part.group.sum_out(logits.to(log_p.dtype).sum(-1)) / part.size,
    "log_sum_sq_probs": lambda logits, log_p, labels, part: part.group.sum_out((2 * log_p).exp().sum(-1)).log(),
}
"""`EXTRAS`, of a part of the vocabulary; collective."""


def _numbers(
    logits_TV: Tensor,
    labels_T: Tensor,
    entropy: bool,
    extras: tuple[str, ...] = (),
    part: Vocabulary | None = None,
) -> tuple[Tensor, ...]:
    counts, dtype = labels_T != IGNORE, torch.promote_types(logits_TV.dtype, torch.float32)
    if part is not None:
        all_log_p = part.log_softmax(logits_TV, dtype)
        log_p = part.group.sum_out(part.of_label(all_log_p, labels_T))
        asked = [*(["entropy"] if entropy else []), *extras]
        found = [log_p, *(_PARTS[name](logits_TV, all_log_p, labels_T, part).to(log_p.dtype) for name in asked)]
        return tuple(torch.where(counts, x, 0) for x in found)
    all_log_p = torch.log_softmax(logits_TV, -1, dtype=dtype)
    log_p = all_log_p.gather(-1, torch.where(counts, labels_T, 0)[:, None])[:, 0]
    found = [log_p, *([EXTRAS["entropy"](logits_TV, all_log_p, labels_T)] if entropy else [])]
    found += [EXTRAS[name](logits_TV, all_log_p, labels_T).to(log_p.dtype) for name in extras]
    return tuple(torch.where(counts, x, 0) for x in found)


def _parts(logits: DeferredLogits, tokens: int) -> Iterator[slice]:
    rows = head_tile(logits.widest, logits.device.type == "cpu")
    for start in range(0, tokens, rows):
        yield slice(start, start + rows)
