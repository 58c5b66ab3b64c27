"""Tables that fit the width of a terminal.

A column with `folds` breaks its cells between words; others keep them on one line. If the columns do not fit, those of
the highest `spare` are left out first, and a caption names them and the width that shows all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

ROOM = 24
"""Width of a folding column below which other columns are left out instead."""

GAP = 2
"""Spaces between columns, and before the first."""


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        name: its header, which breaks between words.
        cells: one per row.
        spare: 0: always shown; of the others the highest is left out first.
        folds: whether its cells may break between words.
        right: whether cells are right-aligned.
    """

    name: str
    cells: Sequence[str]
    spare: int = 0
    folds: bool = False
    right: bool = False

    @property
    def least(self) -> int:
        """Width below which a word, or a cell that does not fold, would break."""
        return max([_longest_word(self.name), *(_longest_word(c) if self.folds else len(c) for c in self.cells)])

    @property
    def most(self) -> int:
        """Width with all cells on one line."""
        return max([_header_width(self.name), *(len(cell) for cell in self.cells)])

    @property
    def wanted(self) -> int:
        """Width that it gets before other columns do."""
        return max(self.least, min(self.most, ROOM)) if self.folds else self.most


def _longest_word(text: str) -> int:
    return max((len(word) for word in text.split(" ")), default=0)


def _header_width(head: str) -> int:
    """Return the width of a header on one line, or on two if that is narrower."""
    words = head.split(" ")
    cuts = [max(len(" ".join(words[:i])), len(" ".join(words[i:]))) for i in range(1, len(words))]
    return min([len(head), *cuts])


def _folded(text: str, width: int) -> list[str]:
    """Return lines of whole words, at most `width` wide."""
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
    """A table whose width is not known yet.

    Attributes:
        title: shown above the table.
        columns: with equal numbers of cells.
        styles: one per row, or None.
        sections: rows with an empty line above.
        captions: lines below the table.
        header: whether headers are shown.
    """

    title: str
    columns: Sequence[Column]
    styles: Sequence[str | None] = ()
    sections: Sequence[int] = ()
    captions: Sequence[str] = ()
    header: bool = True

    @property
    def full(self) -> int:
        """Width of a terminal that shows every column."""
        return _taken([column.wanted for column in self.columns])

    def show(self, console: Console) -> None:
        """Print the table, at most as wide as the console."""
        shown, widths = self._shown(console.width)
        console.print(Text(self.title, style="italic"))
        if self.header:
            for line in _lines([column.name for column in shown], shown, widths, to_bottom=True):
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
        """Return the columns that fit, and their widths."""
        shown = list(self.columns)
        while _taken([column.wanted for column in shown]) > width and any(column.spare for column in shown):
            shown.remove(max(shown, key=lambda column: column.spare))
        widths = [column.most for column in shown]
        while _taken(widths) > width:  # shrink the widest folding column by a character
            foldable = [i for i, column in enumerate(shown) if column.folds and widths[i] > column.least]
            if not foldable:
                break
            widths[max(foldable, key=widths.__getitem__)] -= 1
        return shown, widths


def _taken(widths: Sequence[int]) -> int:
    return sum(widths) + GAP * (len(widths) + 1)


def _lines(
    cells: Sequence[str], columns: Sequence[Column], widths: Sequence[int], to_bottom: bool = False
) -> list[str]:
    """Return a row as lines; cells with fewer lines are aligned to the top, or to the bottom."""
    folded = [_folded(cell, width) for cell, width in zip(cells, widths, strict=True)]
    height = max(map(len, folded))
    blank = [[""] * (height - len(lines)) for lines in folded]
    stacked = [(b + lines if to_bottom else lines + b) for b, lines in zip(blank, folded, strict=True)]
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
