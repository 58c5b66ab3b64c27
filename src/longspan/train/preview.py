"""The first sequences of a run as the model will see them: documents, tokens with a loss, padding."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from longspan.data.stream import Sequence, collate
from longspan.train.config import TrainConfig

if TYPE_CHECKING:
    from longspan.train.inputs import Inputs

_DOCUMENTS = 8  # shown of a sequence
_HEAD, _TAIL = 240, 80  # tokens shown of a document
_LOSS, _PLAIN, _PADDING = "bold green", "default", "dim"
_DOCUMENT_COLOURS = ("cyan", "blue")
_SHARES = " ▁▂▃▄▅▆▇█"


def preview(config: TrainConfig, inputs: Inputs, console: Console | None = None) -> None:
    """Print the first `config.data.preview` sequences."""
    console = console or Console(highlight=False)
    view = _View(inputs, config.context_tokens, console)
    count = config.data.preview
    for number, sequence in enumerate(itertools.islice(inputs.sequences(config.context_tokens), count), 1):
        view.print(sequence, f"sequence {number} of {count}")
    console.print(view.legend())


class _View:
    def __init__(self, inputs: Inputs, context: int, console: Console) -> None:
        self.pack, self.context, self.console = inputs.pack, context, console
        self.tokenizer = inputs.tokenizer
        self.coloured = console.color_system is not None and not console.no_color

    def legend(self) -> Text:
        if self.coloured:
            return Text.assemble(("Green", _LOSS), " tokens have a loss.")
        return Text("⟦ ⟧ enclose tokens with a loss.")

    def print(self, sequence: Sequence, title: str) -> None:
        pack, console = self.pack, self.console
        batch = collate([sequence], pack, self.context)
        ids, labels = batch["input_ids"][0].tolist(), batch["labels"][0].tolist()
        trained = [False] + [label >= 0 for label in labels[1:]]  # nothing predicts the first token
        used = len(sequence.ids)
        borders = sorted({0, *sequence.starts, used})
        documents = list(itertools.pairwise(borders))
        padding = f", padding {1 - used / len(ids):.1%}" if used < len(ids) else ""
        several = "s" if len(documents) > 1 else ""
        console.print(Rule(Text(title, "bold")))
        console.print(
            f"{len(ids):,} tokens, {len(documents)} document{several}, {sum(trained):,} tokens with a loss{padding}; "
            + ("attention sees the whole sequence" if pack == "stream" else "attention stays within a document")
        )
        console.print(self._bars(documents, trained, used))
        where = (() if sequence.starts[:1] == (0,) else ("continued",)) + sequence.where
        for number, (start, end) in enumerate(documents[:_DOCUMENTS]):
            name = where[number].removeprefix("--data ") if number < len(where) else ""
            losses = sum(trained[start:end])
            heading = f"document {number + 1}: {end - start:,} tokens, {losses:,} with a loss; {name}"
            console.print(Text(heading, _DOCUMENT_COLOURS[number % 2]), overflow="fold")
            console.print(self._text(ids[start:end], trained[start:end]), soft_wrap=False, overflow="fold")
        if len(documents) > _DOCUMENTS:
            console.print(Text(f"... {len(documents) - _DOCUMENTS} more documents", _PADDING))
        if used < len(ids):
            console.print(
                Text(f"padding: {len(ids) - used:,} tokens without a loss, which nothing attends to", _PADDING)
            )

    def _bars(self, documents: list[tuple[int, int]], trained: list[bool], used: int) -> Text:
        """Return two rows of the console's width: the documents, and the share of tokens with a loss."""
        names = 10
        cells = min(self.console.width - names, len(trained))
        rows = Text("documents ", no_wrap=True)
        edges = [cell * len(trained) // cells for cell in range(cells + 1)]
        starts = [start for start, _ in documents]
        for start, end in itertools.pairwise(edges):
            if start >= used:
                rows.append("·", _PADDING)
                continue
            number = sum(first < end for first in starts) - 1
            begins = any(start <= first < end for first in starts)
            rows.append("▌" if begins else "━", _DOCUMENT_COLOURS[number % 2])
        rows.append("\nloss      ")
        for start, end in itertools.pairwise(edges):
            share = sum(trained[start:end]) / (end - start)
            rows.append(_SHARES[-int(-share * (len(_SHARES) - 1) // 1)], _LOSS)
        return rows

    def _text(self, ids: list[int], trained: list[bool]) -> Text:
        text = Text()
        left_out = len(ids) - _HEAD - _TAIL
        parts = [(0, len(ids))] if left_out <= 0 else [(0, _HEAD), (len(ids) - _TAIL, len(ids))]
        for part, (start, end) in enumerate(parts):
            if part:
                text.append(f" ... {left_out:,} tokens ... ", _PADDING)
            for loss, run in itertools.groupby(range(start, end), lambda i: trained[i]):
                shown = _printable(self.tokenizer.decode([ids[i] for i in run]))
                text.append(shown if self.coloured or not loss else f"⟦{shown}⟧", _LOSS if loss else _PLAIN)
        return text


def _printable(text: str) -> str:
    """Return a text without characters that would control the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
