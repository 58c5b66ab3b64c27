"""Run the notebooks of docs/notebooks and store what they print; the site shows them. Needs no Jupyter.

    python docs/run_notebooks.py

Every code cell is Python, as a script would have it, or one shell command after `!`.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "notebooks"


def main() -> None:
    for path in sorted(FOLDER.glob("*.ipynb")):
        notebook = json.loads(path.read_text())
        printed = execute(notebook, shell)
        for number, cell in enumerate(code_cells(notebook), 1):
            text = next(printed)
            output = {"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)}
            cell |= {"execution_count": number, "outputs": [output] if text else []}
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


def code_cells(notebook: dict[str, Any]) -> Iterator[dict[str, Any]]:
    return (cell for cell in notebook["cells"] if cell["cell_type"] == "code")


def execute(notebook: dict[str, Any], run_shell: Callable[[str], str]) -> Iterator[str]:
    """Run the code cells in order in one namespace; yield what each prints, and the value of its last expression."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(code_cells(notebook), 1):
        source = "".join(cell["source"])
        if source.startswith("!"):
            yield run_shell(source.removeprefix("!"))
            continue
        body = ast.parse(source).body
        last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(ast.Module(body, []), f"cell {number}", "exec"), namespace)
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), namespace)
                if value is not None:
                    print(repr(value))
        yield out.getvalue()


def shell(command: str) -> str:
    return subprocess.run(command, shell=True, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main()
