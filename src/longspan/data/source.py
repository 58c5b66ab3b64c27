"""Documents from files or datasets, as a shuffled stream that can resume anywhere; several sources by weight."""

from __future__ import annotations

import math
import os
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from longspan.core.errors import LongspanError
from longspan.core.validation import existing_path, means_a_path, near
from longspan.data.readers import KINDS, HubDataset, LocalFiles, Reader, Texts
from longspan.data.rows import Document, Format, Kind, flag_of
from longspan.hf.pretrained import check_on_hub
from longspan.hf.prompts import PYDOC

_WINDOW_CHARACTERS = 64 << 20
"""A window of documents that are shuffled together ends at this many characters, to fit in memory."""


@dataclass(frozen=True)
class Place:
    """A place in the stream of documents: before `document` of a window of an epoch.

    `reader` is the reader's state at the first document of the window; None is the start of the epoch.
    """

    epoch: int = 0
    window: int = 0
    reader: dict[str, Any] | None = None
    document: int = 0


class DocumentSource:
    """Documents in an order that depends on the data and the seed alone, epoch after epoch, without end.

    Documents are read as a stream and shuffled in windows: the next `shuffle` documents (fewer if they are long; 0
    keeps the order) are permuted by a generator that is seeded with the seed, the epoch and the window. So a place in
    the order is a few numbers, and resuming reads one window again. The list of files is shuffled too. See
    `longspan.train.config.DataSection` for the arguments.

    Attributes:
        identity: what the order of the documents depends on; a resumed run must have the same.
        files: the files that are read, by their name in `identity`; none for other data.
    """

    def __init__(
        self,
        data: str,
        *,
        text_field: str = "text",
        format: Format = "auto",
        split: str = "train",
        shuffle: int = 1024,
        seed: int = 0,
    ):
        if shuffle < 0:
            raise LongspanError(f"--shuffle {shuffle} must be 0 (no shuffling) or a number of documents")
        self.data, self.shuffle, self.seed = data, shuffle, seed
        path = existing_path("--data", data)
        self.identity: dict[str, Any] = {"text_field": text_field, "format": format, "shuffle": shuffle, "seed": seed}
        self.files: dict[str, Path] = {}
        self._reader: Reader
        if data == PYDOC and path is None:
            if format not in ("auto", "text"):
                raise LongspanError(f"--data {PYDOC} is text, and {flag_of(format)} was asked for; give other data")
            texts = _pydoc_texts()
            self._reader = Texts(texts)
            self.identity["data"] = [[PYDOC, sum(map(len, texts))]]  # the text differs between Python versions
        elif path is not None:
            files = _files(path)
            self.files = {file.relative_to(path).as_posix() if path.is_dir() else file.name: file for file in files}
            self.identity["data"] = [[name, file.stat().st_size] for name, file in self.files.items()]
            if shuffle:
                random.Random(f"files {seed}").shuffle(files)
            self._reader = LocalFiles(files, text_field, format)
        elif means_a_path(data):
            raise LongspanError(
                f"--data {data} is neither a file nor a directory{near(data)}, nor can it be the name of a dataset "
                "(NAME, OWNER/NAME or OWNER/NAME:CONFIG)"
            )
        else:
            check_on_hub("--data", data, "dataset")
            self._reader = HubDataset(data, split, text_field, format)
            self.identity["data"] = [[data, split]]

    def documents(self, start: Place | None = None, epochs: int | None = None) -> Iterator[tuple[Place, Document]]:
        """Yield every document with its place, from `start` on: without end, or up to a number of epochs."""
        place, found = start or Place(), start is not None
        while epochs is None or place.epoch < epochs:
            for window, documents in self._windows(place):
                for index in range(window.document, len(documents)):
                    if documents[index].text:
                        found = True
                        yield replace(window, document=index), documents[index]
            if not found:
                raise LongspanError(
                    f"--data {self.data} holds no text: every document is empty, or there is none", code="LS504"
                )
            place = Place(epoch=place.epoch + 1)

    def kinds(self) -> set[Kind]:
        """Return what the documents are."""
        return self._reader.kinds()

    def place(self, state: dict[str, Any]) -> Place:
        """Return a place from the plain values of its fields."""
        return Place(**state)

    def _windows(self, start: Place) -> Iterator[tuple[Place, list[Document]]]:
        """Yield the shuffled windows of one epoch, from the one that contains `start` on."""
        self._reader.seek(start.reader)
        unread = iter(self._reader)
        place = start
        while documents := self._read_window(unread):
            if self.shuffle:
                random.Random(f"documents {self.seed} {place.epoch} {place.window}").shuffle(documents)
            yield place, documents
            place = Place(place.epoch, place.window + 1, self._reader.tell())

    def _read_window(self, unread: Iterator[Document]) -> list[Document]:
        documents: list[Document] = []
        characters = 0
        while len(documents) < max(1, self.shuffle) and characters < _WINDOW_CHARACTERS:
            document = next(unread, None)
            if document is None:
                break
            documents.append(document)
            characters += len(document.text)
        return documents


def _files(path: Path) -> list[Path]:
    """Return the non-empty readable files of `path`, sorted by name."""
    kinds = ", ".join(KINDS)
    if path.is_dir():
        files = sorted(_walk(path, {path.resolve()}))
        if not files:
            raise LongspanError(f"--data {path}: the directory holds no {kinds} file", code="LS504")
    else:
        if path.suffix not in KINDS:
            raise LongspanError(f"--data {path}: a {path.suffix or 'file without an ending'} is not read; give {kinds}")
        files = [path]
    for file in files:
        if not file.is_file():
            raise LongspanError(f"--data {file} is no regular file; remove it, or name the files to be read")
        if not os.access(file, os.R_OK):
            raise LongspanError(f"--data {file} cannot be read: permission denied", code="LS501")
    filled = [file for file in files if file.stat().st_size]
    if not filled:
        raise LongspanError(
            f"--data {path} is empty ({len(files)} file{'s' * (len(files) > 1)} of 0 bytes)", code="LS504"
        )
    return filled


def _walk(folder: Path, seen: set[Path]) -> Iterator[Path]:
    """Yield everything with the ending of a readable file, recursively; skip hidden names, follow links."""
    try:
        entries = [entry for entry in folder.iterdir() if not entry.name.startswith(".")]
    except OSError as error:
        raise LongspanError(f"--data {folder} cannot be listed: {error.strerror}") from error
    for entry in entries:
        if existing_path("--data", str(entry.absolute())) is None:  # removed since it was listed
            continue
        if entry.is_dir():
            real = entry.resolve()
            if real in seen or (entry.is_symlink() and any(real in path.parents for path in seen)):
                raise LongspanError(f"--data {entry}: the link makes the folder {real} be read twice; remove the link")
            seen.add(real)
            yield from _walk(entry, seen)
        elif entry.suffix in KINDS:
            yield entry


def _pydoc_texts() -> list[str]:
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]


# --- several sources


def split_weight(text: str) -> tuple[str, float]:
    """Return a source and its weight from `SOURCE=WEIGHT` or `SOURCE` (weight 1). A path that exists has no weight."""
    found = re.fullmatch(r"(.+)=([0-9.eE+-]+)", text, flags=re.DOTALL)
    if found is None or existing_path("--data", text) is not None:
        return text, 1.0
    try:
        weight = float(found[2])
    except ValueError:
        return text, 1.0
    if not (weight > 0 and math.isfinite(weight)):
        raise LongspanError(f"--data {text}: a weight is a number above 0, as in --data {found[1]}=0.3")
    return found[1], weight


@dataclass(frozen=True)
class MixedPlace:
    """A place in the stream of documents of several sources."""

    places: tuple[Place, ...]  # where each source goes on
    read: tuple[int, ...]  # characters of each source

    @property
    def epoch(self) -> int:
        """The epochs that all sources have begun."""
        return min(place.epoch for place in self.places)


class Mixture:
    """Documents of several sources: each source's share of all text is its weight's share of all weights.

    The next document comes from the source that is furthest behind its share, by characters. So the order depends on
    the sources and the weights alone. Each source starts anew when it ends. `data`, `identity` and `files` are as those
    of a `DocumentSource`; names begin with the number of their source.
    """

    def __init__(self, sources: list[DocumentSource], weights: list[float]) -> None:
        self.sources, self.weights = sources, weights
        self.data = " ".join(source.data for source in sources)
        numbered = list(enumerate(sources, 1))
        self.files: dict[str, Path] = {f"{i}:{name}": file for i, s in numbered for name, file in s.files.items()}
        data = [[f"{i}:{name}", *rest] for i, source in numbered for name, *rest in source.identity["data"]]
        self.identity: dict[str, Any] = {**sources[0].identity, "data": data, "weights": weights}

    def documents(
        self, start: MixedPlace | None = None, epochs: int | None = None
    ) -> Iterator[tuple[MixedPlace, Document]]:
        """Yield every document with its place, from `start` on: without end, or up to a number of epochs of each."""
        place = start or MixedPlace((Place(),) * len(self.sources), (0,) * len(self.sources))
        unread = {i: s.documents(p, epochs) for i, (s, p) in enumerate(zip(self.sources, place.places, strict=True))}
        while unread:
            source = min(unread, key=lambda i: (place.read[i] / self.weights[i], i))
            found = next(unread[source], None)
            if found is None:
                del unread[source]
                continue
            at, document = found
            yield place, document
            places, read = list(place.places), list(place.read)
            places[source] = replace(at, document=at.document + 1)
            read[source] += len(document.text)
            place = MixedPlace(tuple(places), tuple(read))

    def kinds(self) -> set[Kind]:
        """Return what the documents are."""
        return set().union(*(source.kinds() for source in self.sources))

    def place(self, state: dict[str, Any]) -> MixedPlace:
        """Return a place from the plain values of its fields."""
        places = (source.place(at) for source, at in zip(self.sources, state["places"], strict=True))
        return MixedPlace(tuple(places), tuple(state["read"]))
