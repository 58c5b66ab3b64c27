"""Documents from files or from a dataset, as a stream that can be left and taken up again anywhere."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from longspan.errors import LongspanError
from longspan.pretrained import first_line

#: The data that every Python brings along: the language reference's topics, 0.5 MB of English text.
PYDOC = "pydoc"

#: What is read from a file of each kind: the builder of `datasets`, and its options.
_READERS: dict[str, tuple[str, dict[str, Any]]] = {
    ".txt": ("text", {"sample_by": "document"}),  # one file, one document, line breaks kept
    ".jsonl": ("json", {}),
    ".parquet": ("parquet", {}),
}
#: A window of documents that are shuffled among themselves ends at this many characters, so that it fits in memory.
_WINDOW_CHARACTERS = 64 << 20


@dataclass(frozen=True)
class Place:
    """A place in the stream of documents: before the document `document` of a window of an epoch.

    `reader` is what `datasets` needs to find the window's first document again; None is the start of the epoch.
    """

    epoch: int = 0
    window: int = 0
    reader: dict[str, Any] | None = None
    document: int = 0


class DocumentSource:
    """Documents in an order that depends on the data and the seed alone, one epoch after another, without end.

    Documents are read as a stream and shuffled in windows: the next `shuffle` documents (fewer, when they are long)
    are read and permuted by a generator that is seeded with the seed, the epoch and the window. So a place in the
    order is a few numbers, and resuming reads one window again instead of everything before it. The list of files is
    shuffled as well. `shuffle=0` keeps everything in the order found.

    Args:
        data: a `.txt`, `.jsonl` or `.parquet` file, a directory of these, "pydoc", or a name on the Hugging Face hub
            (`NAME` or `NAME:CONFIG`). A `.txt` file is one document.
        text_field: the column that holds the text (`.jsonl`, `.parquet`, hub).
        split: the split of a dataset from the hub.
        shuffle: documents per window; 0 for none.
        seed: of the shuffling.

    Attributes:
        identity: what the order of the documents depends on; a run may be resumed where these are the same.

    Raises:
        LongspanError: for data that is missing, holds no readable file or cannot be read, and for a missing column.
    """

    def __init__(
        self, data: str, *, text_field: str = "text", split: str = "train", shuffle: int = 1024, seed: int = 0
    ):
        if shuffle < 0:
            raise LongspanError(f"--shuffle {shuffle} must be 0 (no shuffling) or a number of documents")
        self.data, self.text_field, self.split, self.shuffle, self.seed = data, text_field, split, shuffle, seed
        path = Path(data).expanduser()
        self.identity: dict[str, Any] = {"text_field": text_field, "shuffle": shuffle, "seed": seed}
        if data == PYDOC and not path.exists():
            self.text_field = "text"
            texts = _pydoc_texts()
            self._dataset = _in_memory(texts)
            self.identity["data"] = [[PYDOC, sum(map(len, texts))]]  # the text differs between Python versions
        elif path.exists():
            files = _files(path)
            self.identity["data"] = [[file.name, file.stat().st_size] for file in files]
            if shuffle:
                random.Random(f"files {seed}").shuffle(files)
            self._dataset = _open_files(files, text_field)
        else:
            self._dataset = _open_hub(data, split)
            self.identity["data"] = [[data, split]]

    def documents(self, start: Place | None = None) -> Iterator[tuple[Place, str]]:
        """Every document with its place, from `start` on, without end: after the last comes the next epoch's first.

        Raises:
            LongspanError: for text that cannot be read, and for data without a single document with text.
        """
        place, found = start or Place(), start is not None
        while True:
            windows = self._windows(place)
            for window_place, texts in windows:
                for index in range(window_place.document, len(texts)):
                    if texts[index]:
                        found = True
                        yield replace(window_place, document=index), texts[index]
            if not found:
                raise LongspanError(f"--data {self.data} holds no text: every document is empty, or there is none")
            place = Place(epoch=place.epoch + 1)

    def _windows(self, start: Place) -> Iterator[tuple[Place, list[str]]]:
        """The windows of one epoch from the one that holds `start` on, each shuffled."""
        self._dataset.load_state_dict(copy.deepcopy(start.reader))
        rows = self._rows()
        place = start
        while texts := self._read_window(rows):
            if self.shuffle:
                random.Random(f"documents {self.seed} {place.epoch} {place.window}").shuffle(texts)
            yield place, texts
            place = Place(place.epoch, place.window + 1, self._dataset.state_dict())

    def _read_window(self, rows: Iterator[Any]) -> list[str]:
        texts: list[str] = []
        characters = 0
        while len(texts) < max(1, self.shuffle) and characters < _WINDOW_CHARACTERS:
            row = next(rows, None)
            if row is None:
                break
            texts.append(self._text(row))
            characters += len(texts[-1])
        return texts

    def _rows(self) -> Iterator[Any]:
        try:
            yield from self._dataset
        except LongspanError:
            raise
        except Exception as error:  # whatever the readers of `datasets` raise for a broken file
            raise _unreadable(self.data, error) from error

    def _text(self, row: dict[str, Any]) -> str:
        if self.text_field not in row:
            raise LongspanError(
                f"--data {self.data} has no field {self.text_field!r}; it has {', '.join(map(repr, row))}: choose one "
                "of them with --text-field"
            )
        text = row[self.text_field]
        if text is not None and not isinstance(text, str):
            raise LongspanError(
                f"the field {self.text_field!r} of --data {self.data} holds {type(text).__name__}, not text; choose "
                "another one with --text-field"
            )
        return text or ""


def _files(path: Path) -> list[Path]:
    """The readable files of `path`, in the order of their names."""
    kinds = ", ".join(_READERS)
    if path.is_file():
        if path.suffix not in _READERS:
            raise LongspanError(f"--data {path}: a {path.suffix or 'file without an ending'} is not read; give {kinds}")
        files = [path]
    else:
        files = sorted(file for file in path.rglob("*") if file.is_file() and file.suffix in _READERS)
        files = [file for file in files if not any(p.startswith(".") for p in file.relative_to(path).parts)]
        if not files:
            raise LongspanError(f"--data {path}: the directory holds no {kinds} file")
    filled = [file for file in files if file.stat().st_size]
    if not filled:
        raise LongspanError(f"--data {path} is empty ({len(files)} file{'s' * (len(files) > 1)} of 0 bytes)")
    return filled


def _open_files(files: list[Path], text_field: str) -> Any:
    import datasets

    parts = []
    for suffix, (builder, options) in _READERS.items():
        names = [str(file) for file in files if file.suffix == suffix]
        if not names:
            continue
        try:
            part = datasets.load_dataset(builder, data_files=names, split="train", streaming=True, **options)
        except Exception as error:
            raise _unreadable(", ".join(names), error) from error
        if suffix == ".txt" and text_field != "text":
            part = part.rename_column("text", text_field)
        parts.append(part)
    return parts[0] if len(parts) == 1 else datasets.concatenate_datasets(parts)


def _open_hub(name: str, split: str) -> Any:
    import datasets

    repository, _, config = name.partition(":")
    try:
        return datasets.load_dataset(repository, config or None, split=split, streaming=True)
    except Exception as error:
        raise LongspanError(
            f"--data {name} is neither a file nor a directory, and as the name of a dataset it cannot be opened: "
            f"{first_line(error)}"
        ) from error


def _pydoc_texts() -> list[str]:
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]


def _in_memory(texts: list[str]) -> Any:
    import datasets

    return datasets.Dataset.from_dict({"text": texts}).to_iterable_dataset()


def _unreadable(data: str, error: Exception) -> LongspanError:
    cause: BaseException = error
    while cause.__cause__ is not None:  # `datasets` wraps what pyarrow and the decoders say
        cause = cause.__cause__
    return LongspanError(f"--data {data} cannot be read: {type(cause).__name__}: {first_line(cause)}")
