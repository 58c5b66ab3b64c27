"""Several sources, interleaved by weight."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longspan.core.errors import LongspanError
from longspan.core.validation import existing_path
from longspan.data.rows import Document, Kind
from longspan.data.source import DocumentSource, Place


def split_weight(text: str) -> tuple[str, float]:
    """Return a source and its weight from `SOURCE=WEIGHT` or `SOURCE` (weight 1). A path that exists has no weight.

    Raises:
        LongspanError: for a weight that is not above 0.
    """
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
    """A place in the stream of documents of several sources.

    Attributes:
        places: where each source goes on.
        read: characters read from each source.
    """

    places: tuple[Place, ...]
    read: tuple[int, ...]

    @property
    def epoch(self) -> int:
        """The epochs that all sources have begun."""
        return min(place.epoch for place in self.places)


class Mixture:
    """Documents of several sources: each source's share of all text is its weight's share of all weights.

    The next document comes from the source that is furthest behind its share, by characters. So the order depends on
    the sources and the weights alone. Each source starts anew when it ends.

    Args:
        sources: at least two.
        weights: one for each, above 0.

    Attributes:
        data, identity, files: as those of a `DocumentSource`; names begin with the number of their source.
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
            places[source] = dataclasses.replace(at, document=at.document + 1)
            read[source] += len(document.text)
            place = MixedPlace(tuple(places), tuple(read))

    def kinds(self) -> set[Kind]:
        """Return what the documents are."""
        return set().union(*(source.kinds() for source in self.sources))

    def place(self, state: dict[str, Any]) -> MixedPlace:
        """Return a place from the plain values of its fields."""
        places = (source.place(at) for source, at in zip(self.sources, state["places"], strict=True))
        return MixedPlace(tuple(places), tuple(state["read"]))
