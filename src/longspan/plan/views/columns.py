"""Tables that suit the width of a terminal: what carries the answer is whole, and what there is no room for is named.

A column that is not `folds` keeps its cells on one line; one that does breaks them between words, never inside one.
Where all columns do not fit, those of the highest `spare` go first, and the table's caption says which, and the width
that shows them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

ROOM = 24
"""Characters of a column that folds, below which other columns rather go."""

GAP = 2
"""Characters between columns, and before the first."""


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        name: its head; it breaks between words.
        cells: one for each row.
        spare: 0 for what is always shown; of the others the highest goes first.
        folds: whether its cells may be broken between words.
        right: whether they stand to the right.
    """

    name: str
    cells: Sequence[str]
    spare: int = 0
    folds: bool = False
    right: bool = False

    @property
    def least(self) -> int:
        """Characters below which a word, or a cell that does not fold, would be broken."""
        return max([_longest_word(self.name), *(_longest_word(c) if self.folds else len(c) for c in self.cells)])

    @property
    def most(self) -> int:
        """Characters that it takes on one line."""
        return max([_in_lines(self.name), *(len(cell) for cell in self.cells)])

    @property
    def wanted(self) -> int:
        """Characters that it is given before other columns are."""
        return max(self.least, min(self.most, ROOM)) if self.folds else self.most


def _longest_word(text: str) -> int:
    return max((len(word) for word in text.split(" ")), default=0)


def _in_lines(head: str) -> int:
    """Characters of a head that is broken into two lines where that is narrower."""
    words = head.split(" ")
    cuts = [max(len(" ".join(words[:i])), len(" ".join(words[i:]))) for i in range(1, len(words))]
    return min([len(head), *cuts])


def _folded(text: str, width: int) -> list[str]:
    """Lines of whole words, each as long as `width` allows."""
    lines = [""]
    for word in text.split(" "):
        if not lines[-1]:
            lines[-1] = word
        elif len(lines[-1]) + 1 + len(word) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


@dataclass(frozen=True)
class Columns:
    """A table before its width is known.

    Attributes:
        title: above it.
        columns: all of the same number of cells.
        styles: one for each row, None for none.
        sections: rows before which a line is left free.
        captions: lines below it.
        header: whether heads are shown.
    """

    title: str
    columns: Sequence[Column]
    styles: Sequence[str | None] = ()
    sections: Sequence[int] = ()
    captions: Sequence[str] = ()
    header: bool = True

    @property
    def full(self) -> int:
        """Characters of a terminal on which every column is shown."""
        return _taken([column.wanted for column in self.columns])

    def show(self, console: Console) -> None:
        """Print it, as wide as the console."""
        shown, widths = self._shown(console.width)
        console.print(Text(self.title, style="italic"))
        if self.header:
            for line in _lines([column.name for column in shown], shown, widths, at_the_foot=True):
                _print(console, line, "bold")
            _print(console, " " + "─" * (_taken(widths) - 2))
        for row in range(len(self.columns[0].cells)):
            if row in self.sections:
                console.print()
            for line in _lines([column.cells[row] for column in shown], shown, widths):
                _print(console, line, self.styles[row] if self.styles else None)
        left_out = [column.name for column in self.columns if column not in shown]
        more = [f"not shown: {', '.join(left_out)} (a terminal of {self.full} columns shows all)"] if left_out else []
        for caption in (*self.captions, *more):
            console.print(Text(caption, style="dim"))
        console.print()

    def _shown(self, width: int) -> tuple[list[Column], list[int]]:
        """The columns for a terminal of so many characters, and the characters of each."""
        shown = list(self.columns)
        while _taken([column.wanted for column in shown]) > width and any(column.spare for column in shown):
            shown.remove(max(shown, key=lambda column: column.spare))
        widths = [column.most for column in shown]
        while _taken(widths) > width:  # from the widest that folds, a character at a time
            foldable = [i for i, column in enumerate(shown) if column.folds and widths[i] > column.least]
            if not foldable:
                break
            widths[max(foldable, key=widths.__getitem__)] -= 1
        return shown, widths


def _taken(widths: Sequence[int]) -> int:
    return sum(widths) + GAP * (len(widths) + 1)


def _lines(
    cells: Sequence[str], columns: Sequence[Column], widths: Sequence[int], at_the_foot: bool = False
) -> list[str]:
    """A row as lines; a cell that is shorter than others stands at the head of them, or at the foot."""
    folded = [_folded(cell, width) for cell, width in zip(cells, widths, strict=True)]
    height = max(map(len, folded))
    blank = [[""] * (height - len(lines)) for lines in folded]
    stacked = [(b + lines if at_the_foot else lines + b) for b, lines in zip(blank, folded, strict=True)]
    return [
        (" " * GAP)
        + (" " * GAP)
        .join(
            part.rjust(width) if column.right else part.ljust(width)
            for part, column, width in zip(parts, columns, widths, strict=True)
        )
        .rstrip()
        for parts in zip(*stacked, strict=True)
    ]


def _print(console: Console, line: str, style: str | None = None) -> None:
    console.print(Text(line, style=style or "", no_wrap=True), soft_wrap=True)
