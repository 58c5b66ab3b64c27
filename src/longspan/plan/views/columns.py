"""Tables that fit the width of a terminal.

A column with `folds` breaks its cells between words; others keep them on one line. If the columns do not fit, those of
the highest `spare` are left out first, and a caption names them and the width that shows all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

ROOM = 24
"""Width of a folding column below which other columns are left out instead."""


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        name: its header.
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


@dataclass(frozen=True)
class Columns:
    """A table whose width is not known yet.

    Attributes:
        title: shown above the table.
        columns: with equal numbers of cells.
        styles: one per row, or None.
        sections: rows with a line above.
        captions: lines below the table.
        header: whether headers are shown.
    """

    title: str
    columns: Sequence[Column]
    styles: Sequence[str | None] = ()
    sections: Sequence[int] = ()
    captions: Sequence[str] = ()
    header: bool = True

    def show(self, console: Console) -> None:
        """Print the table, at most as wide as the console."""
        shown = list(self.columns)
        while self._width(shown, console) > console.width and any(column.spare for column in shown):
            shown.remove(max(shown, key=lambda column: column.spare))
        console.print(Text(self.title, style="italic"))
        console.print(self._table(shown))
        left_out = ", ".join(column.name for column in self.columns if column not in shown)
        full = self._width(self.columns, console)
        more = [f"not shown: {left_out} (a terminal of {full} columns shows all)"] if left_out else []
        for caption in (*self.captions, *more):
            console.print(Text(caption, style="dim"))
        console.print()

    def _width(self, shown: Sequence[Column], console: Console) -> int:
        """Return the least width of a table with these columns."""
        return Measurement.get(console, console.options.update(max_width=1 << 16), self._table(shown)).minimum

    def _table(self, shown: Sequence[Column]) -> Padding:
        table = Table(
            show_header=self.header, box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0)
        )
        for column in shown:
            widest = max(map(len, column.cells))
            header = column.name if len(column.name) <= widest else column.name.replace(" ", "\n", 1)
            table.add_column(
                Text(header, style="bold"),
                justify="right" if column.right else "left",
                no_wrap=not column.folds,
                overflow="fold",
                min_width=min(ROOM, widest) if column.folds else max(widest, *map(len, header.split("\n"))),
            )
        for row in range(len(self.columns[0].cells)):
            if row in self.sections:
                table.add_section()
            style = self.styles[row] if self.styles else None
            table.add_row(*(Text(column.cells[row]) for column in shown), style=style)
        return Padding(table, (0, 0, 0, 2), expand=False)
