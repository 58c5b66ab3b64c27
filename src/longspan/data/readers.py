"""Readers of documents: local files, texts in memory, a dataset of the Hugging Face hub.

A reader yields the documents of one epoch, from a state on that `seek` takes: a few plain values that `tell` returned,
or None for the beginning. `kinds` says what the documents are, as far as the first row of each file does.

Local files are not read through `datasets`, which takes file names for patterns, fills missing columns with nulls, and
knows no line numbers: a row without text must be an error that names the row.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from longspan.core.errors import LongspanError
from longspan.core.validation import near
from longspan.data.rows import (
    Document,
    Format,
    Kind,
    check_no_images,
    check_object,
    columns_of,
    document_of,
    flag_of,
    kind_of,
)
from longspan.hf.pretrained import first_line, not_found

KINDS = (".txt", ".jsonl", ".parquet")
"""The files that are read. A .txt file is one document, line breaks kept."""

_LONGEST_LINE = 1 << 30  # bytes of a .jsonl row
_START = {"file": 0, "row": 0, "offset": 0}


class LocalFiles:
    """Files one after another: .txt, then .jsonl, then .parquet, each kind in the given order.

    What the rows of a .jsonl or .parquet file are follows from the columns of its first row, or from `format`; every
    row must have these columns. An explicit null is an empty text.
    """

    def __init__(self, files: list[Path], text_field: str, format: Format = "auto") -> None:
        self.files = sorted(files, key=lambda file: KINDS.index(file.suffix))
        self.text_field, self.format = text_field, format
        self._kinds: dict[Path, Kind] = {}
        self._at = dict(_START)
        for file in self.files:
            if file.suffix == ".parquet":
                self._open_parquet(file)
            elif file.suffix == ".txt" and format not in ("auto", "text"):
                raise LongspanError(f"--data {file} is text, and {flag_of(format)} was asked for; remove the file")
            elif file.suffix == ".jsonl":
                for number, row, _ in self._rows(file, 1, 0):
                    self._document(file, number, row)
                    break

    def kinds(self) -> set[Kind]:
        return {"text" if file.suffix == ".txt" else self._kinds.get(file, "text") for file in self.files}

    def seek(self, state: dict[str, Any] | None) -> None:
        self._at = dict(state or _START)

    def tell(self) -> dict[str, Any]:
        return dict(self._at)

    def __iter__(self) -> Iterator[Document]:
        readers = {".txt": self._read_text, ".jsonl": self._read_lines, ".parquet": self._read_parquet}
        while self._at["file"] < len(self.files):
            file = self.files[self._at["file"]]
            yield from readers[file.suffix](file)
            self._at = {"file": self._at["file"] + 1, "row": 0, "offset": 0}

    def _read_text(self, file: Path) -> Iterator[Document]:
        if self._at["row"] == 0:
            try:
                text = file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                _unreadable(file, error)
            self._at["row"] = 1
            yield Document(text, where=f"--data {file}")

    def _read_lines(self, file: Path) -> Iterator[Document]:
        for number, row, offset in self._rows(file, self._at["row"] + 1, self._at["offset"]):
            document = self._document(file, number, row)
            self._at |= {"row": number, "offset": offset}
            yield document

    def _rows(self, file: Path, number: int, offset: int) -> Iterator[tuple[int, Any, int]]:
        """Yield line number, row and the offset of the next line, from a line on. Skip blank lines."""
        try:
            with file.open("rb") as lines:
                lines.seek(offset)
                while line := lines.readline(_LONGEST_LINE):
                    if len(line) == _LONGEST_LINE:
                        raise LongspanError(
                            f"--data {file}: line {number} is longer than {_LONGEST_LINE:,} bytes", code="LS501"
                        )
                    offset += len(line)
                    if line.strip():
                        yield number, _parse(file, number, line), offset
                    number += 1
        except OSError as error:
            _unreadable(file, error)

    def _document(self, file: Path, number: int, row: Any) -> Document:
        where = f"--data {file}, line {number}"
        row = check_object(row, self.text_field, where)
        if file not in self._kinds:
            self._kinds[file] = kind_of(row, self.text_field, self.format, where)
        if self.format == "auto":
            check_no_images(row, self._kinds[file], where)
        return document_of(row, self._kinds[file], self.text_field, where, file.parent)

    def _open_parquet(self, file: Path) -> Any:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            table = pq.ParquetFile(file)
        except (OSError, pa.ArrowException) as error:
            _unreadable(file, error)
        names = [name for name in table.schema_arrow.names if table.schema_arrow.names.count(name) == 1]
        kind = self._kinds[file] = kind_of(names, self.text_field, self.format, f"--data {file}")
        if kind == "text":
            column = table.schema_arrow.field(self.text_field).type
            plain = column.value_type if pa.types.is_dictionary(column) else column
            if str(plain) not in ("string", "large_string", "string_view", "null"):
                raise LongspanError(
                    f"the field {self.text_field!r} of --data {file} holds {plain}, not text; choose another with "
                    "--text-field",
                    code="LS501",
                )
        return table

    def _read_parquet(self, file: Path) -> Iterator[Document]:
        import pyarrow as pa

        table = self._open_parquet(file)
        kind = self._kinds[file]
        columns = columns_of(kind, self.text_field, table.schema_arrow.names)
        first, done = 0, self._at["row"]
        try:
            for group in range(table.num_row_groups):
                size = table.metadata.row_group(group).num_rows
                if first + size <= done:
                    first += size
                    continue
                for batch in table.iter_batches(1024, row_groups=[group], columns=columns):
                    for index in range(max(0, done - first), batch.num_rows):
                        row = {name: batch.column(name)[index].as_py() for name in columns}
                        self._at["row"] = first + index + 1
                        where = f"--data {file}, row {self._at['row']}"
                        yield document_of(without_nulls(row), kind, self.text_field, where, file.parent)
                    first += batch.num_rows
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
            f"{first_line(error)})",
            code="LS501",
        ) from error
    return row


def without_nulls(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row without the nulls that columnar files write for the missing keys of nested values.

    A null column stays: it is the value of the row.
    """

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items() if item is not None}
        return [plain(item) for item in value] if isinstance(value, list) else value

    return {name: plain(value) for name, value in row.items()}


def _unreadable(file: Path, error: Exception) -> NoReturn:
    raise LongspanError(
        f"--data {file} cannot be read: {type(error).__name__}: {first_line(error)}", code="LS501"
    ) from error


class Texts:
    """Texts in memory."""

    def __init__(self, texts: list[str]) -> None:
        self.texts = texts
        self._row = 0

    def kinds(self) -> set[Kind]:
        return {"text"}

    def seek(self, state: dict[str, Any] | None) -> None:
        self._row = state["row"] if state else 0

    def tell(self) -> dict[str, Any]:
        return {"row": self._row}

    def __iter__(self) -> Iterator[Document]:
        while self._row < len(self.texts):
            self._row += 1
            yield Document(self.texts[self._row - 1], where=f"text {self._row}")


class HubDataset:
    """A dataset of the Hugging Face hub (`OWNER/NAME` or `OWNER/NAME:CONFIG`), as a stream. A null is an empty text."""

    def __init__(self, name: str, split: str, text_field: str, format: Format = "auto") -> None:
        import datasets

        self.name, self.text_field, self.format = name, text_field, format
        self._kind: Kind | None = None
        self._row = 0
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

    def kinds(self) -> set[Kind]:
        names = self._dataset.column_names  # None if the files do not tell
        if self._kind is None and names is not None:
            self._kind = kind_of(names, self.text_field, self.format, f"--data {self.name}")
        elif self._kind is None:
            self.seek(None)
            next(iter(self), None)
            self.seek(None)
        return {self._kind or "text"}

    def seek(self, state: dict[str, Any] | None) -> None:
        self._row = state["row"] if state else 0
        self._dataset.load_state_dict(copy.deepcopy(state["dataset"]) if state else None)

    def tell(self) -> dict[str, Any]:
        return {"row": self._row, "dataset": self._dataset.state_dict()}

    def __iter__(self) -> Iterator[Document]:
        try:
            for row in self._dataset:
                self._row += 1
                where = f"--data {self.name}, row {self._row}"
                if self._kind is None:
                    self._kind = kind_of(row, self.text_field, self.format, where)
                if self.format == "auto":
                    check_no_images(row, self._kind, where)
                yield document_of(without_nulls(row), self._kind, self.text_field, where)
        except LongspanError:
            raise
        except Exception as error:  # of any of the readers of `datasets`
            cause: BaseException = error
            while cause.__cause__ is not None:  # it wraps the errors of pyarrow and the decoders
                cause = cause.__cause__
            raise LongspanError(
                f"--data {self.name} cannot be read: {type(cause).__name__}: {first_line(cause)}", code="LS501"
            ) from error


Reader = LocalFiles | Texts | HubDataset
