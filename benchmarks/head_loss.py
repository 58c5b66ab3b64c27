"""The loss of a language-model head without its logits: our tiles, torch's `linear_cross_entropy`, and full logits.

    python benchmarks/head_loss.py

Forward and backward of one rank's tokens, in one process, in alternation. `error`: of the loss, against fp64.
"""

from __future__ import annotations

import functools
from typing import Any

import common
import torch
import torch.nn.functional as F
from torch import nn

from longspan.losses.cross_entropy import loss_sum
from longspan.losses.deferred_logits import Head


def main(
    tokens: tuple[int, ...] = (1024, 4096), hidden: int = 512, vocab: int = 32000, rounds: int = 5,
    name: str = "head-loss",
) -> None:  # fmt: skip
    """Time the ways of computing the loss."""
    torch.set_num_threads(1)
    env = common.environment(["torch"])
    rows = [row for n in tokens for dtype in common.DTYPES for row in case(n, hidden, vocab, dtype, rounds)]
    header = ["tokens", "dtype", "loss", "ms", "over our tiles", "error"]
    cells = [
        [f"{row['tokens']:,}", row["dtype"], row["loss"], f"{1e3 * common.median(row['seconds']):.0f}",
         f"{row['ratio']:.2f}", f"{row['error']:.1e}"]
        for row in rows
    ]  # fmt: skip
    text = common.table(header, cells) + f"\n\nHidden {hidden}, vocabulary {vocab:,}, one thread."
    common.write_report(name, "The loss of a head", env, text, rows)


def case(tokens: int, hidden: int, vocab: int, dtype: str, rounds: int) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    head = nn.Linear(hidden, vocab, bias=False).to(common.DTYPES[dtype])
    x = torch.randn(1, tokens, hidden).to(head.weight.dtype).requires_grad_()
    labels = torch.randint(0, vocab, (1, tokens))
    exact = float(F.cross_entropy(x[0].double() @ head.weight.double().T, labels[0], reduction="sum"))
    deferring = Head(head)

    def tiles() -> torch.Tensor:
        deferring.defer_next = True
        return loss_sum(head(x), labels)

    ways: dict[str, Any] = {"our tiles": tiles, "full logits": lambda: loss_sum(head(x), labels)}
    if hasattr(F, "linear_cross_entropy"):
        options = torch.nn.LinearCrossEntropyOptions
        for policy in ("auto", "accurate"):
            ways[f"torch, {policy}"] = lambda policy=policy: F.linear_cross_entropy(
                x[0], head.weight, labels[0], reduction="sum", ignore_index=-100, options=options(acc_policy=policy)
            )
    losses = {}

    def step(name: str) -> None:
        head.weight.grad = x.grad = None
        loss = ways[name]()
        loss.backward()
        losses[name] = float(loss.detach())

    wall, _ = common.alternate({name: functools.partial(step, name) for name in ways}, rounds)
    return [
        {"tokens": tokens, "dtype": dtype, "loss": name, "seconds": seconds,
         "ratio": common.paired_ratio(seconds, wall["our tiles"]), "error": abs(losses[name] / exact - 1)}
        for name, seconds in wall.items()
    ]  # fmt: skip


if __name__ == "__main__":
    common.command(main, __doc__)
