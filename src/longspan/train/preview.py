"""Print the first sequences of a run as the model will see them, with the tokens that have a loss."""

from __future__ import annotations

import itertools
from typing import Any

from rich.console import Console
from rich.rule import Rule
from rich.text import Text

_MOST = 240  # characters of a run of tokens
_LOSS = "bold green"


def preview(trainer: Any, count: int, console: Console | None = None) -> None:
    """Print the first `count` sequences, on the first rank."""
    loader = trainer.get_train_dataloader()
    if not trainer.is_world_process_zero():
        return
    console = console or Console(highlight=False)
    coloured = console.color_system is not None and not console.no_color
    tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
    for number, (ids, labels) in enumerate(itertools.islice(_sequences(loader), count), 1):
        losses = sum(label >= 0 for label in labels)
        console.print(Rule(Text(f"sequence {number} of {count}", "bold")))
        console.print(f"{len(ids):,} tokens, {losses:,} with a loss")
        text = Text()
        for loss, run in itertools.groupby(zip(ids, labels, strict=True), lambda pair: pair[1] >= 0):
            shown = _shortened(tokenizer.decode([token for token, _ in run]))
            text.append(shown if coloured or not loss else f"⟦{shown}⟧", _LOSS if loss else "default")
        console.print(text, soft_wrap=False, overflow="fold")
    legend = Text.assemble(("Green", _LOSS), " tokens have a loss.")
    console.print(legend if coloured else Text("⟦ ⟧ enclose tokens with a loss."))


def _sequences(loader: Any) -> Any:
    """Return ids and labels of each row; DPO's and reward models' rows have no labels."""
    for batch in loader:
        labels = batch.get("labels", batch["input_ids"])
        for ids, row in zip(batch["input_ids"].tolist(), labels.tolist(), strict=True):
            yield ids, row if isinstance(row, list) else ids


def _shortened(text: str) -> str:
    """Return a text without characters that would control the terminal, and without the middle of a long one."""
    left_out = len(text) - _MOST
    if left_out > 0:
        text = f"{text[: _MOST // 2]} ... {left_out:,} characters ... {text[-_MOST // 2 :]}"
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
