"""The first sequences of a run as the model will see them: documents, tokens with a loss, padding."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from longspan.data.stream import Sequence, collate
from longspan.train.config import TrainConfig

if TYPE_CHECKING:
    from longspan.train.inputs import Inputs

_DOCUMENTS = 8  # shown of a sequence
_HEAD, _TAIL = 240, 80  # tokens shown of a document
_LOSS, _PADDING, _TITLE = "bold green", "dim", "cyan"


def preview(config: TrainConfig, inputs: Inputs, console: Console | None = None) -> None:
    """Print the first `config.data.preview` sequences."""
    console = console or Console(highlight=False)
    coloured = console.color_system is not None and not console.no_color
    count = config.data.preview
    for number, sequence in enumerate(itertools.islice(inputs.sequences(config.context_tokens), count), 1):
        console.print(Rule(Text(f"sequence {number} of {count}", "bold")))
        _print(console, sequence, inputs, config.context_tokens, coloured)
    legend = Text.assemble(("Green", _LOSS), " tokens have a loss.")
    console.print(legend if coloured else Text("⟦ ⟧ enclose tokens with a loss."))


def _print(console: Console, sequence: Sequence, inputs: Inputs, context: int, coloured: bool) -> None:
    batch = collate([sequence], inputs.pack, context)
    ids, labels = batch["input_ids"][0].tolist(), batch["labels"][0].tolist()
    trained = [False] + [label >= 0 for label in labels[1:]]  # nothing predicts the first token
    used = len(sequence.ids)
    documents = list(itertools.pairwise(sorted({0, *sequence.starts, used})))
    padding = f", padding {1 - used / len(ids):.1%}" if used < len(ids) else ""
    several = "s" if len(documents) > 1 else ""
    console.print(
        f"{len(ids):,} tokens, {len(documents)} document{several}, {sum(trained):,} tokens with a loss{padding}; "
        + ("attention sees the whole sequence" if inputs.pack == "stream" else "attention stays within a document")
    )
    where = (() if sequence.starts[:1] == (0,) else ("continued",)) + sequence.where
    for number, (start, end) in enumerate(documents[:_DOCUMENTS]):
        name = where[number].removeprefix("--data ") if number < len(where) else ""
        losses = sum(trained[start:end])
        heading = f"document {number + 1}: {end - start:,} tokens, {losses:,} with a loss; {name}"
        console.print(Text(heading, _TITLE), overflow="fold")
        text = _text(inputs.tokenizer, ids[start:end], trained[start:end], coloured)
        console.print(text, soft_wrap=False, overflow="fold")
    if len(documents) > _DOCUMENTS:
        console.print(Text(f"... {len(documents) - _DOCUMENTS} more documents", _PADDING))


def _text(tokenizer: Any, ids: list[int], trained: list[bool], coloured: bool) -> Text:
    text = Text()
    left_out = len(ids) - _HEAD - _TAIL
    parts = [(0, len(ids))] if left_out <= 0 else [(0, _HEAD), (len(ids) - _TAIL, len(ids))]
    for part, (start, end) in enumerate(parts):
        if part:
            text.append(f" ... {left_out:,} tokens ... ", _PADDING)
        for loss, run in itertools.groupby(range(start, end), lambda i: trained[i]):
            shown = _printable(tokenizer.decode([ids[i] for i in run]))
            text.append(shown if coloured or not loss else f"⟦{shown}⟧", _LOSS if loss else "default")
    return text


def _printable(text: str) -> str:
    """Return a text without characters that would control the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
