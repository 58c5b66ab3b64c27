"""Tokenizers: any Hugging Face tokenizer, or bytes."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from longspan.core.errors import LongspanError
from longspan.hf.pretrained import check_source, first_line

if TYPE_CHECKING:
    from numpy.typing import NDArray

BYTES = "bytes"
"""A tokenizer that needs no file: one token per byte (ByT5's: 256 bytes after 3 special tokens, 384 ids in all)."""

PIECE_CHARACTERS = 1 << 20
"""Long documents are tokenised in pieces of about this many characters."""


def load_tokenizer(name: str) -> Any:
    """Return the Hugging Face tokenizer of a name or folder, or the byte tokenizer for "bytes".

    Raises:
        LongspanError: if there is none, or it has no end-of-text token to separate documents.
    """
    if name != BYTES:
        check_source("--tokenizer", name)
    from transformers import AutoTokenizer, ByT5Tokenizer

    if name == BYTES:
        return ByT5Tokenizer()
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except Exception as error:
        raise LongspanError(
            f"--tokenizer {name} cannot be loaded: {first_line(error)} (or use --tokenizer {BYTES})"
        ) from error
    if tokenizer.eos_token_id is None:
        raise LongspanError(
            f"--tokenizer {name} has no end-of-text token to separate documents; set its eos_token and save it"
        )
    return tokenizer


@dataclass(frozen=True)
class TextTokenizer:
    """Documents to ids: the begin token if the tokenizer adds one itself, the text, the end token."""

    tokenizer: Any

    def ids(self, piece: str, *, first: bool, last: bool) -> NDArray[np.int64]:
        """Return the ids of one piece of a document; `first` adds the begin token, `last` the end token."""
        ids = self.tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"]
        if first and self._adds_begin:
            ids = [self.tokenizer.bos_token_id, *ids]
        if last:
            ids = [*ids, self.tokenizer.eos_token_id]
        return np.asarray(ids, dtype=np.int64)

    @functools.cached_property
    def _adds_begin(self) -> bool:
        begin = self.tokenizer.bos_token_id
        return begin is not None and self.tokenizer("a")["input_ids"][:1] == [begin]


def split_text(text: str, limit: int = PIECE_CHARACTERS) -> list[str]:
    """Split a text into pieces of at most `limit` characters, after a line break if possible, else after a space."""
    pieces = []
    start = 0
    while len(text) - start > limit:
        cut = text.rfind("\n", start, start + limit) + 1 or text.rfind(" ", start, start + limit) + 1
        cut = cut if cut > start else start + limit
        pieces.append(text[start:cut])
        start = cut
    return [*pieces, text[start:]]
