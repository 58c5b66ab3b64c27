"""Readers of documents: local files, texts in memory, a dataset of the Hugging Face hub.

Local files are not read through `datasets`, which takes file names for patterns, fills missing columns with nulls, and
knows no line numbers: a row without text must be an error that names the row.
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

_LONGEST_LINE = 1 << 30  # bytes of a .jsonl row
_START = {"file": 0, "row": 0, "offset": 0}


class Reader(Protocol):
    """The documents of one epoch, from a state on: a few plain values that `tell` returned, or None."""

    def seek(self, state: dict[str, Any] | None) -> None: ...

    def tell(self) -> dict[str, Any]: ...

    def __iter__(self) -> Iterator[str]: ...


class LocalFiles:
    """Files one after another: .txt, then .jsonl, then .parquet, each kind in the given order.

    Every row of .jsonl and .parquet must have the field `text_field`. An explicit null is an empty text.

    Raises:
        LongspanError: for a file that cannot be read, or whose columns or first row lack the field; on iteration for
            any other row.
    """

    def __init__(self, files: list[Path], text_field: str) -> None:
        self.files = sorted(files, key=lambda file: KINDS.index(file.suffix))
        self.text_field = text_field
        self._at = dict(_START)
        for file in self.files:
            if file.suffix == ".parquet":
                self._open_parquet(file)
            elif file.suffix == ".jsonl":
                for number, row, _ in self._rows(file, 1, 0):
                    self._text_of(file, number, row)
                    break

    def seek(self, state: dict[str, Any] | None) -> None:
        self._at = dict(state or _START)

    def tell(self) -> dict[str, Any]:
        return dict(self._at)

    def __iter__(self) -> Iterator[str]:
        readers = {".txt": self._read_text, ".jsonl": self._read_lines, ".parquet": self._read_parquet}
        while self._at["file"] < len(self.files):
            file = self.files[self._at["file"]]
            yield from readers[file.suffix](file)
            self._at = {"file": self._at["file"] + 1, "row": 0, "offset": 0}

    def _read_text(self, file: Path) -> Iterator[str]:
        if self._at["row"] == 0:
            try:
                text = file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                _unreadable(file, error)
            self._at["row"] = 1
            yield text

    def _read_lines(self, file: Path) -> Iterator[str]:
        for number, row, offset in self._rows(file, self._at["row"] + 1, self._at["offset"]):
            text = self._text_of(file, number, row)
            self._at |= {"row": number, "offset": offset}
            yield text

    def _rows(self, file: Path, number: int, offset: int) -> Iterator[tuple[int, Any, int]]:
        """Yield line number, row and the offset of the next line, from a line on. Skip blank lines."""
        try:
            with file.open("rb") as lines:
                lines.seek(offset)
                while line := lines.readline(_LONGEST_LINE):
                    if len(line) == _LONGEST_LINE:
                        raise LongspanError(f"--data {file}: line {number} is longer than {_LONGEST_LINE:,} bytes")
                    offset += len(line)
                    if line.strip():
                        yield number, _parse(file, number, line), offset
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
            raise LongspanError(
                f"--data {file}: line {number} has no field {self.text_field!r}; it has "
                f"{', '.join(map(repr, row)) or 'nothing'}: choose a field that all rows have with --text-field, or "
                "remove that row (a row with an empty text is skipped)"
            )
        return _checked_text(row[self.text_field], f"the field {self.text_field!r} of --data {file}, line {number},")

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
        row, done = 0, self._at["row"]
        try:
            for group in range(table.num_row_groups):
                size = table.metadata.row_group(group).num_rows
                if row + size <= done:
                    row += size
                    continue
                for batch in table.iter_batches(1024, row_groups=[group], columns=[self.text_field]):
                    for text in batch.column(0):
                        row += 1
                        if row > done:
                            self._at["row"] = row
                            yield text.as_py() or ""
        except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
            _unreadable(file, error)


def _parse(file: Path, number: int, line: bytes) -> Any:
    try:
        text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        row = json.loads(text)
        if "\\u" in text:  # may be a lone surrogate, which has no UTF-8
            json.dumps(row, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise LongspanError(
            f"--data {file} cannot be read: line {number} is not JSON in UTF-8 ({type(error).__name__}: "
            f"{first_line(error)})"
        ) from error
    return row


def _checked_text(value: Any, what: str) -> str:
    if not isinstance(value, str | None):
        raise LongspanError(f"{what} holds {type(value).__name__}, not text; choose another with --text-field")
    return value or ""


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
    """A dataset of the Hugging Face hub (`OWNER/NAME`, or `OWNER/NAME:CONFIG`), as a stream. A null is an empty text.

    Raises:
        LongspanError: if it cannot be opened; on iteration for rows that cannot be read or have no such column.
    """

    def __init__(self, name: str, split: str, text_field: str) -> None:
        import datasets

        self.name, self.text_field = name, text_field
        repository, _, config = name.partition(":")
        try:
            self._dataset: Any = datasets.load_dataset(repository, config or None, split=split, streaming=True)
        except ConnectionError as error:
            raise not_found("--data", name, "dataset", f"but {first_line(error)}") from error
        except Exception as error:
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
        except Exception as error:  # of any of the readers of `datasets`
            cause: BaseException = error
            while cause.__cause__ is not None:  # it wraps the errors of pyarrow and the decoders
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
        return _checked_text(row[self.text_field], f"the field {self.text_field!r} of --data {self.name}")
