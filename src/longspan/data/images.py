"""Images of chats: found in rows, and read.

A row carries references only: absolute paths, or the bytes of an image as a data URI. Ids are made once, by the rank
that tokenises the row; the ranks that train on the row read its images again for their pixels.
"""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

from longspan.core.errors import LongspanError
from longspan.hf.pretrained import first_line

_INLINE = ("image", "path", "url")  # keys of a content part that refer to an image
_EMBEDDED = "data:"


def has_images(row: dict[str, Any]) -> bool:
    """Return whether a row of a chat has images: a column `images`, or content parts of the type image."""
    return "images" in row or bool(_parts(row.get("messages")))


def with_references(row: dict[str, Any], folder: Path | None, where: str) -> dict[str, Any]:
    """Return a chat whose `images` are references in the order of its content parts `{"type": "image"}`.

    Texts become content parts, which templates of vision-language models expect. Images that no content part refers to
    are put before the first turn of the user, as TRL does.

    Args:
        row: `messages`, and optionally `images`.
        folder: where relative paths begin; None: in no folder.
        where: the row, for messages.

    Raises:
        LongspanError: if content parts and images do not match, or an image is no reference.
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


def read_image(source: str | Path, what: str) -> Any:
    """Return an image in RGB, of a file or a reference. Messages begin with `what`."""
    from PIL import Image

    embedded = str(source).startswith(_EMBEDDED)
    try:
        with Image.open(io.BytesIO(base64.b64decode(str(source).partition(",")[2])) if embedded else source) as opened:
            return opened.convert("RGB")
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        name = what if embedded else f"{what} {source}"
        why = getattr(error, "strerror", None) or first_line(error)
        raise LongspanError(f"{name} cannot be read as an image: {why}", code="LS505") from error


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
