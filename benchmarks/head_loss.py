"""The loss of a language-model head without its logits: our tiles, torch's `linear_cross_entropy`, and full logits.

    python benchmarks/head_loss.py [--quick]

Forward and backward of one rank's tokens, in one process, in alternation. `error`: of the loss, against fp64.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import common
import torch
import torch.nn.functional as F
from torch import nn

from longspan.losses.cross_entropy import loss_sum
from longspan.losses.deferred_logits import Head


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="1,024 tokens")
    parser.add_argument("--name", default="head-loss", help="name of the report")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for tokens in args.tokens[:1] if args.quick else args.tokens:
        for dtype in common.DTYPES:
            rows += case(tokens, args.hidden, args.vocab, dtype, args.rounds)
    header = ["tokens", "dtype", "loss", "ms", "over our tiles", "error"]
    cells = [
        [f"{row['tokens']:,}", row["dtype"], row["loss"], f"{1e3 * common.median(row['seconds']):.0f}",
         f"{row['ratio']:.2f}", f"{row['error']:.1e}"]
        for row in rows
    ]  # fmt: skip
    text = common.table(header, cells) + f"\n\nHidden {args.hidden}, vocabulary {args.vocab:,}, one thread."
    print(text)
    common.write_report(args.name, "The loss of a head", common.environment(["torch"]), text, rows)


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
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    losses = {}
    for _ in range(rounds + 1):
        for name, way in ways.items():
            head.weight.grad = x.grad = None
            start = time.perf_counter()
            loss = way()
            loss.backward()
            seconds[name].append(time.perf_counter() - start)
            losses[name] = float(loss.detach())
    return [
        {"tokens": tokens, "dtype": dtype, "loss": name, "seconds": found[1:],
         "ratio": common.paired_ratio(found[1:], seconds["our tiles"][1:]), "error": abs(losses[name] / exact - 1)}
        for name, found in seconds.items()
    ]  # fmt: skip


if __name__ == "__main__":
    main()
