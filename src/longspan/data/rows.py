"""Rows of files and datasets as documents: text, a chat, a prompt with its completion, token ids, or two answers.

A chat's row carries references to its images only: absolute paths, or the bytes of an image as a data URI. Ids are made
once, by the rank that tokenises the row; the ranks that train on the row read its images again for their pixels.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from longspan.core.errors import LongspanError
from longspan.core.validation import format_value

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
    """One document, before it is tokenised."""

    text: str  # or of another kind the columns of its row as JSON, so that ranks can compare and share it
    kind: Kind = "text"
    where: str = ""  # file or dataset with the row, for messages


def flag_of(asked: Format) -> str:
    """Return the flag that asks for a kind of rows."""
    return "--dpo" if asked == "preference" else f"--format {asked}"


def kind_of(columns: Iterable[str], text_field: str, asked: Format, where: str) -> Kind:
    """Return the kind of the rows that have these columns. Given a row, "auto" also finds images in its messages."""
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
    """Return a row as a document; `folder` is where relative paths of images begin."""
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


# --- images of chats

_INLINE = ("image", "path", "url")  # keys of a content part that refer to an image
_EMBEDDED = "data:"


def has_images(row: dict[str, Any]) -> bool:
    """Return whether a row of a chat has images: a column `images`, or content parts of the type image."""
    return "images" in row or bool(_parts(row.get("messages")))


def with_references(row: dict[str, Any], folder: Path | None, where: str) -> dict[str, Any]:
    """Return a chat whose `images` are references in the order of its content parts `{"type": "image"}`.

    Texts become content parts, which templates of vision-language models expect. Images that no content part refers to
    are put before the first turn of the user, as TRL does. `folder` is where relative paths begin.
    """
    messages = row["messages"]
    if not isinstance(messages, list) or not all(
        isinstance(message, dict) and isinstance(message.get("content"), str | list | None) for message in messages
    ):
        return row  # refused by `check_messages`
    messages = [{**message, "content": _in_parts(message.get("content"))} for message in messages]
    parts = _parts(messages)
    inline = [next((part[key] for key in _INLINE if part.get(key) is not None), None) for part in parts]
    column = row.get("images") or []
    images = column if isinstance(column, list) else [column]
    if images and not parts:
        first = next((message for message in messages if message.get("role") == "user"), None)
        if first is None:
            raise LongspanError(
                f"{where} has {len(images)} images, and no turn of the user to show them in", code="LS505"
            )
        first["content"] = [{"type": "image"}] * len(images) + (first["content"] or [])
    elif images and any(found is not None for found in inline):
        raise LongspanError(
            f"{where} has images both in the column `images` and in `messages`; give one of them", code="LS505"
        )
    elif images and len(parts) != len(images):
        raise LongspanError(
            f"{where} has {len(images)} `images` and {len(parts)} content parts of the type image; they need one each",
            code="LS505",
        )
    elif not images and None in inline:
        raise LongspanError(
            f"{where}: image {inline.index(None) + 1} of `messages` has no `path`, and there is no column `images`",
            code="LS505",
        )
    for part in parts:
        for key in _INLINE:
            part.pop(key, None)
    return {**row, "messages": messages, "images": [_reference(x, folder, where) for x in images or inline]}


def _in_parts(content: Any) -> Any:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [dict(x) if isinstance(x, dict) else x for x in content] if isinstance(content, list) else content


def _parts(messages: Any) -> list[dict[str, Any]]:
    """Return the content parts of a chat that are images."""
    contents = [m.get("content") for m in messages if isinstance(m, dict)] if isinstance(messages, list) else []
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return [part for part in parts if isinstance(part, dict) and part.get("type") == "image"]


def _reference(value: Any, folder: Path | None, where: str) -> str:
    if isinstance(value, dict):  # of a dataset's column of images
        value = value.get("bytes") or value.get("path")
    if hasattr(value, "save"):  # PIL's, decoded by `datasets`
        file = io.BytesIO()
        value.save(file, "PNG")
        value = file.getvalue()
    if isinstance(value, bytes):
        return f"{_EMBEDDED};base64,{base64.b64encode(value).decode()}"
    if not isinstance(value, str) or not value:
        raise LongspanError(f"{where}: an image is {type(value).__name__}; give a path, or its bytes", code="LS505")
    if value.startswith(_EMBEDDED):
        return value
    if "://" in value:
        raise LongspanError(f"{where}: the image {value} is not downloaded; give the path of a file", code="LS505")
    return str(Path(folder or "", value).absolute())
