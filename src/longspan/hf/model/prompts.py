"""What models read: tokenizers, the ids of a text, images, and datasets by name, file or folder."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from longspan.core.errors import LongspanError
from longspan.core.validation import existing_path
from longspan.hf.model.pretrained import check_source, first_line, has_tokenizer

if TYPE_CHECKING:
    from numpy.typing import NDArray

BYTES = "bytes"
"""A tokenizer that needs no file: one token per byte (ByT5's: 256 bytes after 3 special tokens, 384 ids in all)."""

PYDOC = "pydoc"
"""A dataset that needs no file: 0.5 MB of English that comes with Python."""

BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv", ".arrow": "arrow", ".txt": "text"}
"""What reads a file in `datasets`, by its suffix."""

PIECE_CHARACTERS = 1 << 16
"""Long texts are tokenised in pieces of about this many characters."""


def load_tokenizer(name: str) -> Any:
    """Return the Hugging Face tokenizer of a name or folder, or the byte tokenizer for "bytes".

    Raise if it has no end-of-text token to separate documents.
    """
    if name != BYTES:
        check_source("--tokenizer", name)
    from transformers import AutoTokenizer, ByT5Tokenizer

    if name == BYTES:
        return ByT5Tokenizer()
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except Exception as error:
        if not has_tokenizer(name):  # perhaps the model's folder, and no flag named it
            raise LongspanError(
                f"{name} has no tokenizer: expected tokenizer.json, tokenizer.model, vocab.json or vocab.txt; give "
                f"--tokenizer NAME_OR_PATH, or --tokenizer {BYTES}"
            ) from error
        raise LongspanError(
            f"--tokenizer {name} cannot be loaded: {first_line(error)} (or use --tokenizer {BYTES})"
        ) from error
    if tokenizer.eos_token_id is None:
        raise LongspanError(
            f"--tokenizer {name} has no end-of-text token to separate documents; set its eos_token and save it"
        )
    return tokenizer


def text_ids(tokenizer: Any, text: str, *, last: bool = False) -> NDArray[np.int64]:
    """Return the ids of a text: with the begin token if the tokenizer adds one itself, `last` with the end token."""
    ids: list[int] = []
    for piece in split_text(text):
        ids += tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"]
    begin = tokenizer.bos_token_id
    if begin is not None and tokenizer("a")["input_ids"][:1] == [begin]:
        ids = [begin, *ids]
    return np.asarray([*ids, tokenizer.eos_token_id] if last else ids, dtype=np.int64)


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


def open_dataset(
    source: str,
    name: str | None = None,
    *,
    split: str = "train",
    data_dir: str | None = None,
    data_files: Any = None,
    streaming: bool = False,
) -> Any:
    """Return a dataset of `datasets`: of a file, a folder, the hub, or "pydoc"; a .txt file is one row, `text`.

    `name`, `data_dir` and `data_files` are those of `datasets.load_dataset`. A file, texts and "pydoc" have one split,
    train; of files `split` may be a part of it, such as "train[:90%]".
    """
    import datasets

    given = {"name (dataset_config)": name, "data_dir": data_dir, "data_files": data_files}
    if source == PYDOC:
        _check_split(source, split, split)
        _check_whole(source, given)
        made = datasets.Dataset.from_generator(_pydoc)
        return made.to_iterable_dataset() if streaming else made
    options = {"data_dir": data_dir, "data_files": data_files, "streaming": streaming}
    path = existing_path("dataset", source)
    if path is None:
        if source not in BUILDERS.values():
            check_source("dataset", source, kind="dataset")
        return datasets.load_dataset(source, name, split=split, **options)
    if path.is_dir() and ((path / "state.json").exists() or (path / "dataset_dict.json").exists()):
        _check_whole(source, given)
        stored = datasets.load_from_disk(str(path))  # by `Dataset.save_to_disk`
        if not isinstance(stored, dict):
            _check_split(source, split, split)
        return stored[split] if isinstance(stored, dict) else stored
    inside = path.rglob("*") if path.is_dir() else [path]
    files = sorted(x for x in inside if x.suffix in BUILDERS and x.name != "dataset_infos.json")
    if len(kinds := {file.suffix for file in files}) > 1:  # `datasets` would read the most frequent kind alone
        raise LongspanError(
            f"{path} has files of several kinds ({', '.join(sorted(kinds))}), and a dataset has one; give one of the "
            "files, or a folder with one kind. Several folders with the same columns make a mixture, `datasets`",
            code="LS501",
        )
    texts = [file for file in files if file.suffix == ".txt"]
    if texts or path.is_file():
        _check_split(source, split.partition("[")[0], split)
        _check_whole(source, given)
    if texts:  # by default `datasets` makes a row of each line
        names = [str(file) for file in texts]
        return datasets.load_dataset("text", data_files=names, sample_by="document", split=split, streaming=streaming)
    if path.is_dir():
        return datasets.load_dataset(str(path), name, split=split, **options)
    if path.suffix not in BUILDERS:
        raise LongspanError(f"{path} is no file of {', '.join(BUILDERS)}; convert it, or rename it")
    return datasets.load_dataset(BUILDERS[path.suffix], data_files=str(path), split=split, streaming=streaming)


def _check_split(source: str, name: str, split: str) -> None:
    if name != "train":
        raise LongspanError(
            f"{source} has no split {split!r}: all of it is `train`; to evaluate, give `eval_datasets`", code="LS501"
        )


def _check_whole(source: str, given: dict[str, Any]) -> None:
    for key, value in given.items():
        if value is not None:
            raise LongspanError(
                f"{key}: {value!r} chooses a part of a dataset, and {source} has none; leave it out", code="LS501"
            )


def _pydoc() -> Iterator[dict[str, str]]:
    from pydoc_data.topics import topics

    for text in topics.values():
        yield {"text": text}


@contextlib.contextmanager
def naming(source: str) -> Iterator[None]:
    """Put the source before what a library says of its content."""
    try:
        yield
    except LongspanError:
        raise
    except Exception as error:  # `datasets` raises any kind
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        text = first_line(cause)
        if type(cause).__name__ == "CastError":  # of `datasets.table`
            text = "its rows have different columns; give files of one kind, or convert them to the same columns"
        raise LongspanError(f"{source} cannot be read: {text}", code="LS501") from error


def read_image(path: Path, flag: str) -> Any:
    """Return an image file in RGB; `flag` gave it."""
    from PIL import Image

    try:
        with Image.open(path) as opened:
            return opened.convert("RGB")
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        why = getattr(error, "strerror", None) or first_line(error)
        raise LongspanError(f"{flag} {path} cannot be read as an image: {why}", code="LS505") from error
