"""Rows of files and datasets as documents: text, a chat, a prompt with its completion, token ids, or two answers."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from longspan.core.errors import LongspanError
from longspan.core.validation import format_value
from longspan.data.images import has_images, with_references

Kind = Literal["text", "chat", "images", "completion", "ids", "preference"]
"""What a document is: the values of --format, next to "auto", and with --dpo "preference"."""

Format = Literal["auto"] | Kind

NEEDED: dict[Kind, tuple[str, ...]] = {
    "chat": ("messages",),
    "images": ("messages",),
    "completion": ("prompt", "completion"),
    "ids": ("input_ids",),
    "preference": ("chosen", "rejected"),
}
"""The columns by which a row is recognised; text has the column --text-field. Images are those of chats. "preference"
must be asked for: such rows often have `messages`, too.
"""

_RECOGNISED = ("text", "chat", "images", "completion", "ids")
_TEMPLATE_COLUMNS = ("tools", "chat_template_kwargs")
_READ: dict[Kind, tuple[str, ...]] = {
    "chat": ("messages", *_TEMPLATE_COLUMNS),
    "images": ("messages", "images", *_TEMPLATE_COLUMNS),
    "completion": ("prompt", "completion", *_TEMPLATE_COLUMNS),
    "ids": ("input_ids", "labels"),
    "preference": ("prompt", "chosen", "rejected", *_TEMPLATE_COLUMNS),
}


@dataclass(frozen=True)
class Document:
    """One document, before it is tokenised.

    Attributes:
        text: the text, or of another kind the columns of its row as JSON, so that ranks can compare and share it.
        kind: what the text is.
        where: file or dataset with the row, for messages.
    """

    text: str
    kind: Kind = "text"
    where: str = ""


def flag_of(asked: Format) -> str:
    """Return the flag that asks for a kind of rows."""
    return "--dpo" if asked == "preference" else f"--format {asked}"


def kind_of(columns: Iterable[str], text_field: str, asked: Format, where: str) -> Kind:
    """Return the kind of the rows that have these columns. Given a row, "auto" also finds images in its messages.

    Raises:
        LongspanError: if the columns of the asked kind are missing, or `asked` is "auto" and no kind or several match.
    """
    names = list(columns)
    needed = {**NEEDED, "text": (text_field,)}
    found = [kind for kind in needed if set(needed[kind]) <= set(names) and kind in (asked, *_RECOGNISED)]
    if asked == "auto" and "chat" in found:
        row = columns if isinstance(columns, dict) else dict.fromkeys(names)
        found.remove("chat" if has_images(row) else "images")
    if asked != "auto":
        if asked not in found:
            raise _missing(asked, text_field, names, where)
        return asked
    if len(found) > 1:
        kinds = ", ".join(f"--format {kind} ({' and '.join(needed[kind])})" for kind in found)
        raise LongspanError(f"{where} has the columns of more than one format; choose {kinds}")
    if not found:
        raise _missing("text", text_field, names, where)
    return found[0]


def check_no_images(row: dict[str, Any], kind: Kind, where: str) -> None:
    """Raise for a chat with `images` among chats whose first has none: its answers would be learnt without them."""
    if kind == "chat" and row.get("images"):
        raise LongspanError(
            f"{where} has `images`, and the first row has none; give --format images to train on them, or --format "
            "chat to train on the text alone",
            code="LS505",
        )


def _missing(kind: Kind, text_field: str, names: list[str], where: str) -> LongspanError:
    has = ", ".join(map(repr, names)) or "nothing"
    if kind == "text":
        return LongspanError(
            f"{where} has no field {text_field!r}; it has {has}: choose a field that all rows have with --text-field, "
            "or remove that row (a row with an empty text is skipped). Other rows need `messages`, `prompt` and "
            "`completion`, or `input_ids`; with --dpo `chosen` and `rejected`",
            code="LS501",
        )
    columns = " and ".join(map(repr, NEEDED[kind]))
    return LongspanError(f"{where} has no {columns}, which rows of {flag_of(kind)} need; it has {has}", code="LS501")


def columns_of(kind: Kind, text_field: str, names: Iterable[str]) -> list[str]:
    """Return those of a file's columns that rows of this kind use."""
    wanted = (text_field,) if kind == "text" else _READ[kind]
    return [name for name in names if name in wanted]


def document_of(row: dict[str, Any], kind: Kind, text_field: str, where: str, folder: Path | None = None) -> Document:
    """Return a row as a document; `folder` is where relative paths of images begin.

    Raises:
        LongspanError: for a row without the columns of its kind, a text that is none, or values that are no JSON.
    """
    needed = (text_field,) if kind == "text" else NEEDED[kind]
    if not all(name in row for name in needed):
        raise _missing(kind, text_field, list(row), where)
    if kind == "text":
        return Document(checked_text(row[text_field], f"the field {text_field!r} of {where},"), kind, where)
    columns = {name: row[name] for name in columns_of(kind, text_field, row) if row[name] is not None}
    if kind == "images":
        columns = with_references(columns, folder, where)
    try:
        return Document(json.dumps(columns, ensure_ascii=False), kind, where)
    except (TypeError, ValueError) as error:
        raise LongspanError(f"{where} cannot be used as rows of {flag_of(kind)}: {error}", code="LS501") from error


def checked_text(value: Any, what: str) -> str:
    """Return a text, "" for None. Raise for anything else."""
    if not isinstance(value, str | None):
        raise LongspanError(
            f"{what} holds {type(value).__name__}, not text; choose another with --text-field", code="LS501"
        )
    return value or ""


def check_object(row: Any, text_field: str, where: str) -> dict[str, Any]:
    """Return a row that is an object with fields. Raise for anything else."""
    if not isinstance(row, dict):
        raise LongspanError(
            f"{where} holds {format_value(row)}, not an object with the field {text_field!r}", code="LS501"
        )
    return row
