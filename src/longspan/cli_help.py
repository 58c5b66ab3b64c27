"""The help of a command: its fields' docstrings, wrapped at the terminal's width."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import inspect
import io
import shutil
import sys
import textwrap
import typing
from collections.abc import Iterator
from typing import Any, TextIO


def width() -> int:
    """Columns of the terminal; 80 where there is none, at least 40."""
    return max(40, shutil.get_terminal_size().columns)


def indented(name: str, text: str, column: int) -> str:
    """`name`, and from `column` on `text`, in as many lines as it takes."""
    hanging = " " * column
    return textwrap.fill(text, width(), initial_indent=f"  {name}".ljust(column), subsequent_indent=hanging)


def paragraphs(text: str) -> str:
    """`text` with its long lines wrapped."""
    return "\n".join(
        textwrap.fill(line, width(), subsequent_indent=line[: -len(line.lstrip())]) for line in text.split("\n")
    )


def documented(config_class: type[Any]) -> Any:
    """tyro's rule for a config class: as tyro's own, but where a line of a docstring ends in the source means nothing.

    Left alone, it breaks every line of the help where the source does, on any terminal.
    """
    import tyro

    texts = field_texts(config_class)
    kinds = typing.get_type_hints(config_class, include_extras=True)

    def rule(info: Any) -> Any:
        if info.type is not config_class:
            return None
        constructors = tyro.constructors
        return constructors.StructConstructorSpec(
            instantiate=config_class,
            fields=tuple(
                constructors.StructFieldSpec(field.name, kinds[field.name], getattr(info.default, field.name), text)
                for field in dataclasses.fields(config_class)
                for text in [texts.get(field.name)]
            ),
        )

    return rule


def field_texts(config_class: type[Any]) -> dict[str, str]:
    """The docstring of every field, in one line."""
    texts: dict[str, str] = {}
    for cls in reversed(config_class.__mro__):
        if not dataclasses.is_dataclass(cls):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
        assert isinstance(body, ast.ClassDef)
        for statement, after in zip(body.body, body.body[1:], strict=False):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                text = after.value if isinstance(after, ast.Expr) else None
                if isinstance(text, ast.Constant) and isinstance(text.value, str):
                    texts[statement.target.id] = " ".join(text.value.split())
    return texts


class _Held(io.TextIOWrapper):
    """What is printed, until it is shown: with the characters and colours that its stream can show."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(io.BytesIO(), encoding=stream.encoding or "utf-8", errors="replace")
        self._stream = stream

    def isatty(self) -> bool:
        return self._stream.isatty()

    def text(self) -> str:
        """All that was printed."""
        self.seek(0)
        return self.read()


@contextlib.contextmanager
def wrapped() -> Iterator[None]:
    """What is printed inside is shown at the end, its long lines wrapped.

    Raises:
        BrokenPipeError: if whoever reads stdout has gone.
    """
    held = _Held(sys.stdout)
    try:
        with contextlib.redirect_stdout(held):
            yield
    finally:
        for line in held.text().splitlines():
            print(paragraphs(line) if "\x1b" not in line and line[:1].isalnum() else line)
        sys.stdout.flush()
