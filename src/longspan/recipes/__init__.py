"""`longspan recipes`: complete TOML files for `longspan train`, to start from.

A recipe is a file of this package. Its first line says what it does.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from longspan.core.errors import LongspanError
from longspan.core.validation import check_output, nearest


@dataclass(frozen=True)
class RecipesConfig:
    """List the recipes, or write one to a file.

    Change the lines marked EDIT, then run `longspan train --from FILE.toml`.
    """

    name: str = ""
    """The recipe to write. By default all are listed."""
    out: Path | None = None
    """The file to write. By default NAME.toml in the current folder."""


def recipes() -> dict[str, str]:
    """Return the text of each recipe, by its name."""
    found = {file.name: file.read_text() for file in files(__package__).iterdir() if file.name.endswith(".toml")}
    return {name.removesuffix(".toml"): found[name] for name in sorted(found)}


def run(config: RecipesConfig) -> int:
    """List the recipes, or write one; return the exit code 0."""
    known = recipes()
    if not config.name:
        if config.out is not None:
            raise LongspanError(f"--out {config.out} needs --name, one of {', '.join(known)}")
        _list(known)
        return 0
    if config.name not in known:
        raise LongspanError(f"--name {config.name} is no recipe; {nearest(config.name, known)}")
    path = config.out or Path(f"{config.name}.toml")
    if path.exists():
        raise LongspanError(f"--out {path} exists; give another file")
    check_output("--out", path)
    path.write_text(known[config.name])
    edits = known[config.name].count("# EDIT")
    print(f"wrote {path}: change its {edits} lines marked EDIT, then: longspan train --from {path}")
    return 0


def _list(known: dict[str, str]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    for name, text in known.items():
        table.add_row(name, text.partition("\n")[0].removeprefix("# "))
    Console(width=min(100, shutil.get_terminal_size().columns), highlight=False).print(table)
    print("\nlongspan recipes --name NAME writes NAME.toml")
