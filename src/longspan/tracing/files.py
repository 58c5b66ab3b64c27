"""Write a trace as three files: JSON for Chrome and Perfetto, an HTML page and a picture."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

from longspan.core.errors import LongspanError
from longspan.tracing.drawing import draw_timeline
from longspan.tracing.merge import write_trace
from longspan.tracing.page import render
from longspan.tracing.spans import read_trace


def write(what: str, path: Path, write_to: Callable[[Path], object], out: IO[str] | None = None) -> None:
    """Make the folder, write a file, and print its path to `out`, by default stdout.

    Raises:
        LongspanError: if it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_to(path)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise LongspanError(f"the {what} cannot be written to {path}: {error}") from error
    print(f"{what} written to {path}", file=out or sys.stdout)


def write_timeline(events: Sequence[dict[str, Any]], stem: Path, title: str, out: IO[str] | None = None) -> None:
    """Write STEM.trace.json, STEM.html and, with matplotlib, STEM.png of a merged trace.

    Raises:
        LongspanError: for a trace without a step, or if a file cannot be written.
    """
    traces = read_trace(events)
    write("trace", Path(f"{stem}.trace.json"), partial(write_trace, events=events), out)
    page = render(traces, title)
    write("timeline", Path(f"{stem}.html"), lambda path: path.write_text(page, encoding="utf-8"), out)
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        print("no PNG of it: pip install matplotlib", file=out or sys.stdout)
        return
    write("timeline", Path(f"{stem}.png"), lambda path: draw_timeline(traces, title, path), out)
