"""What documents are read from: local files, texts in memory, a dataset of the Hugging Face hub.

A reader gives the documents of one epoch in order, says where it stands as a few plain values (`tell`), and goes
on from there (`seek`). Local files are read here and not through `datasets`, which takes file names for patterns, fills
columns that a file lacks with nulls, and knows no line numbers: a row without text must be named, not passed over.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn, Protocol

from longspan.core.errors import LongspanError
from longspan.core.validation import format_value, near
from longspan.hf.pretrained import first_line, not_found

KINDS = (".txt", ".jsonl", ".parquet")
"""The files that are read. A .txt file is one document, line breaks kept."""

_LONGEST_LINE = 1 << 30  # bytes of one row of .jsonl
_LOOKED_AT = 1 << 20  # bytes of each .jsonl file whose rows are looked at before anything else is done
_LOOKED_AT_IN_ALL = 64 << 20


class Reader(Protocol):
    """The documents of one epoch."""

    def seek(self, state: dict[str, Any] | None) -> None:
        """Go on where `tell` said this; None is the beginning."""

    def tell(self) -> dict[str, Any]:
        """Where to go on after the last document that was given."""

    def __iter__(self) -> Iterator[str]:
        """The documents from there on; an empty one is an empty text."""


class LocalFiles:
    """Files one after the other: the .txt first, then the .jsonl, then the .parquet, each kind in the order given.

    Every row of .jsonl and .parquet must have the field. An empty text, or an explicit null, is an empty document.

    Args:
        files: regular files that end as `KINDS` say.
        text_field: the column that holds the text (.jsonl, .parquet).

    Raises:
        LongspanError: for a file that cannot be read, and for one whose columns, or whose first rows, lack the field;
            on iteration for any other row.
    """

    def __init__(self, files: list[Path], text_field: str) -> None:
        self.files = sorted(files, key=lambda file: KINDS.index(file.suffix))
        self.text_field = text_field
        self._at = {"file": 0, "row": 0, "offset": 0}
        budget = _LOOKED_AT_IN_ALL
        for file in self.files:
            if file.suffix == ".parquet":
                self._open_parquet(file)
            elif file.suffix == ".jsonl" and budget > 0:
                for _, row, offset in self._lines(file, 1, 0):
                    self._text_of(file, row[0], row[1])
                    if offset >= _LOOKED_AT:
                        break
                budget -= min(file.stat().st_size, _LOOKED_AT)

    def seek(self, state: dict[str, Any] | None) -> None:
        at = state or {"file": 0, "row": 0, "offset": 0}
        if at.keys() != self._at.keys():
            raise LongspanError(
                f"the place {format_value(state)} in the data was written by another version of longspan; start "
                "another run from its weights: --model OUT/hf --out ANOTHER"
            )
        self._at = dict(at)

    def tell(self) -> dict[str, Any]:
        return dict(self._at)

    def __iter__(self) -> Iterator[str]:
        readers = {".txt": self._read_text, ".jsonl": self._read_lines, ".parquet": self._read_parquet}
        while self._at["file"] < len(self.files):
            file = self.files[self._at["file"]]
            yield from readers[file.suffix](file)
            self._at = {"file": self._at["file"] + 1, "row": 0, "offset": 0}

    def _given(self, row: int, offset: int = 0) -> None:
        self._at = {"file": self._at["file"], "row": row, "offset": offset}

    def _read_text(self, file: Path) -> Iterator[str]:
        if self._at["row"] == 0:
            try:
                text = file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                _unreadable(file, error)
            self._given(1)
            yield text

    # --- .jsonl

    def _read_lines(self, file: Path) -> Iterator[str]:
        for number, row, offset in self._lines(file, self._at["row"] + 1, self._at["offset"]):
            text = self._text_of(file, *row)
            self._given(number, offset)
            yield text

    def _lines(self, file: Path, first: int, offset: int) -> Iterator[tuple[int, tuple[int, Any], int]]:
        """From a line on: its number, (number, row), and where the next one begins. Blank lines are passed over."""
        try:
            with file.open("rb") as lines:
                lines.seek(offset)
                number = first
                while line := lines.readline(_LONGEST_LINE):
                    if len(line) == _LONGEST_LINE:
                        raise LongspanError(f"--data {file}: line {number} is longer than {_LONGEST_LINE:,} bytes")
                    offset += len(line)
                    if line.strip():
                        yield number, (number, _parse(file, number, line)), offset
                    number += 1
        except OSError as error:
            _unreadable(file, error)

    def _text_of(self, file: Path, number: int, row: Any) -> str:
        if not isinstance(row, dict):
            raise LongspanError(
                f"--data {file}: line {number} holds {format_value(row)}, not an object with the field "
                f"{self.text_field!r}"
            )
        if self.text_field not in row:
            self._refuse_rows(file, row)
        text = row[self.text_field]
        if not isinstance(text, str | None):
            raise LongspanError(
                f"the field {self.text_field!r} of --data {file}, line {number}, holds {type(text).__name__}, not "
                "text; choose another with --text-field"
            )
        return text or ""

    def _refuse_rows(self, file: Path, row: dict[str, Any]) -> NoReturn:
        """Say how many rows of a file lack the field: it is read to its end."""
        lacking, total = [], 0
        for number, (_, other), _ in self._lines(file, 1, 0):
            total += 1
            if not (isinstance(other, dict) and self.text_field in other):
                lacking.append(number)
        there = ", ".join(map(repr, row)) or "nothing"
        raise LongspanError(
            f"--data {file}: {len(lacking)} of {total} rows have no field {self.text_field!r}, the first in line "
            f"{lacking[0]}; line {lacking[0]} has {there}: choose a field that all rows have with --text-field, or "
            "take those rows out (a row with an empty text is passed over)"
        )

    # --- .parquet

    def _open_parquet(self, file: Path) -> Any:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            table = pq.ParquetFile(file)
        except (OSError, pa.ArrowException) as error:
            _unreadable(file, error)
        names = table.schema_arrow.names
        if names.count(self.text_field) != 1:
            raise LongspanError(
                f"--data {file} has no field {self.text_field!r}; it has {', '.join(map(repr, names))}: choose one of "
                "them with --text-field, which all files must have"
            )
        kind = table.schema_arrow.field(self.text_field).type
        plain = kind.value_type if pa.types.is_dictionary(kind) else kind
        if str(plain) not in ("string", "large_string", "string_view", "null"):
            raise LongspanError(
                f"the field {self.text_field!r} of --data {file} holds {plain}, not text; choose another with "
                "--text-field"
            )
        return table

    def _read_parquet(self, file: Path) -> Iterator[str]:
        import pyarrow as pa

        table = self._open_parquet(file)
        row, wanted = 0, self._at["row"]
        try:
            for group in range(table.num_row_groups):
                size = table.metadata.row_group(group).num_rows
                if row + size <= wanted:  # given already
                    row += size
                    continue
                for batch in table.iter_batches(1024, row_groups=[group], columns=[self.text_field]):
                    for text in batch.column(0):
                        row += 1
                        if row > wanted:
                            self._given(row)
                            yield text.as_py() or ""
        except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
            _unreadable(file, error)


def _parse(file: Path, number: int, line: bytes) -> Any:
    try:
        text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        row = json.loads(text)
        if "\\u" in text:  # the one way to a lone surrogate, which is no character and has no UTF-8
            json.dumps(row, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise LongspanError(
            f"--data {file} cannot be read: line {number} is not JSON in UTF-8 ({type(error).__name__}: "
            f"{first_line(error)})"
        ) from error
    return row


def _unreadable(file: Path, error: Exception) -> NoReturn:
    raise LongspanError(f"--data {file} cannot be read: {type(error).__name__}: {first_line(error)}") from error


class Texts:
    """Texts in memory."""

    def __init__(self, texts: list[str]) -> None:
        self.texts = texts
        self._row = 0

    def seek(self, state: dict[str, Any] | None) -> None:
        self._row = state["row"] if state else 0

    def tell(self) -> dict[str, Any]:
        return {"row": self._row}

    def __iter__(self) -> Iterator[str]:
        while self._row < len(self.texts):
            self._row += 1
            yield self.texts[self._row - 1]


class HubDataset:
    """A dataset of the Hugging Face hub, as a stream. A null counts as an empty text.

    Args:
        name: `OWNER/NAME`, or `OWNER/NAME:CONFIG`.
        split: of the dataset.
        text_field: the column that holds the text.

    Raises:
        LongspanError: if it cannot be opened; on iteration for rows that cannot be read or have no such column.
    """

    def __init__(self, name: str, split: str, text_field: str) -> None:
        import datasets

        self.name, self.text_field = name, text_field
        repository, _, config = name.partition(":")
        try:
            self._dataset: Any = datasets.load_dataset(repository, config or None, split=split, streaming=True)
        except Exception as error:
            if isinstance(error, ConnectionError):
                raise not_found("--data", name, "dataset", f"but {first_line(error)}") from error
            raise LongspanError(
                f"--data {name} is neither a file nor a directory{near(name)}, and as the name of a dataset it cannot "
                f"be opened: {first_line(error)}"
            ) from error

    def seek(self, state: dict[str, Any] | None) -> None:
        self._dataset.load_state_dict(copy.deepcopy(state))

    def tell(self) -> dict[str, Any]:
        state: dict[str, Any] = self._dataset.state_dict()
        return state

    def __iter__(self) -> Iterator[str]:
        try:
            for row in self._dataset:
                yield self._text_of(row)
        except LongspanError:
            raise
        except Exception as error:  # whatever the readers of `datasets` raise
            cause: BaseException = error
            while cause.__cause__ is not None:  # it wraps what pyarrow and the decoders say
                cause = cause.__cause__
            raise LongspanError(
                f"--data {self.name} cannot be read: {type(cause).__name__}: {first_line(cause)}"
            ) from error

    def _text_of(self, row: dict[str, Any]) -> str:
        if self.text_field not in row:
            raise LongspanError(
                f"--data {self.name} has no field {self.text_field!r}; it has {', '.join(map(repr, row))}: choose one "
                "of them with --text-field"
            )
        text = row[self.text_field]
        if not isinstance(text, str | None):
            raise LongspanError(
                f"the field {self.text_field!r} of --data {self.name} holds {type(text).__name__}, not text; choose "
                "another with --text-field"
            )
        return text or ""
