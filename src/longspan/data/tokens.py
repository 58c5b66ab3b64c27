"""Tokenizers: any of the Hugging Face ones, or bytes."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from longspan.core.errors import LongspanError
from longspan.hf.pretrained import check_source

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: The tokenizer that needs no file: one token per byte (ByT5's: 256 bytes after 3 special tokens, 384 ids in all).
BYTES = "bytes"

#: Long documents are tokenised in pieces of about this many characters, so that ids come as they are needed.
PIECE_CHARACTERS = 1 << 20


def load_tokenizer(name: str) -> Any:
    """The Hugging Face tokenizer of that name or folder, or the byte tokenizer for "bytes".

    Raises:
        LongspanError: if there is none, or it has no token for the end of a text, which separates documents.
    """
    if name != BYTES:
        check_source("--tokenizer", name)
    from transformers import AutoTokenizer, ByT5Tokenizer

    if name == BYTES:
        return ByT5Tokenizer()
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except Exception as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise LongspanError(f"--tokenizer {name} cannot be loaded: {first} (or use --tokenizer {BYTES})") from error
    if tokenizer.eos_token_id is None:
        raise LongspanError(
            f"--tokenizer {name} has no end-of-text token to separate documents; set its eos_token and save it"
        )
    return tokenizer


@dataclass(frozen=True)
class TextTokenizer:
    """Documents to ids: [begin] text end, where `begin` is used by the tokenizers that put it there themselves."""

    tokenizer: Any

    def pieces(self, document: str) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """The ids of one document, piece by piece, each with its number."""
        parts = self.parts(document)
        for number, part in enumerate(parts):
            yield number, self.ids(part, first=number == 0, last=number == len(parts) - 1)

    def parts(self, document: str) -> list[str]:
        """The pieces of a document that are tokenised one by one."""
        return split_text(document)

    def ids(self, part: str, *, first: bool, last: bool) -> NDArray[np.int64]:
        """The ids of one piece of a document, which may be its first or its last one."""
        ids = self.tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"]
        if first and self._begins:
            ids = [self.tokenizer.bos_token_id, *ids]
        if last:
            ids = [*ids, self.tokenizer.eos_token_id]
        return np.asarray(ids, dtype=np.int64)

    @functools.cached_property
    def _begins(self) -> bool:
        begin = self.tokenizer.bos_token_id
        return begin is not None and self.tokenizer("a")["input_ids"][:1] == [begin]


def split_text(text: str, limit: int = PIECE_CHARACTERS) -> list[str]:
    """Cut a text into parts of at most `limit` characters, after a line break if there is one, else after a space."""
    parts = []
    start = 0
    while len(text) - start > limit:
        cut = max(text.rfind("\n", start, start + limit), -1) + 1 or text.rfind(" ", start, start + limit) + 1
        cut = cut if cut > start else start + limit
        parts.append(text[start:cut])
        start = cut
    return [*parts, text[start:]]
