"""Reading, tokenising, packing and dealing out text."""

from __future__ import annotations

import contextlib
import http.server
import itertools
import json
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longspan.core.errors import LongspanError
from longspan.data import (
    BYTES,
    PYDOC,
    DocumentSource,
    Sequence,
    SequenceStream,
    Tokenizer,
    deal,
    load_tokenizer,
    prefetch,
)
from longspan.hf.prompts import split_text
from tests.pool import RankPool

EOS = 1
NOBODY = 65534
"""A user who owns nothing."""


@pytest.fixture(scope="module")
def by_bytes() -> Tokenizer:
    return Tokenizer(load_tokenizer(BYTES))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """13 documents of different lengths in files of all three kinds."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    root = tmp_path_factory.mktemp("data")
    for name in "ab":
        (root / f"{name}.txt").write_text(f"text file {name}\n\nwith lines\n")
    (root / "deeper").mkdir()
    lines = [json.dumps({"text": f"json {i} " + "x" * i, "n": i}) for i in range(6)]
    (root / "deeper" / "c.jsonl").write_text("\n".join(lines))
    pq.write_table(pa.table({"text": [f"parquet {i}" for i in range(5)], "n": list(range(5))}), root / "d.parquet")
    (root / "notes.md").write_text("not read")
    (root / ".hidden.txt").write_text("not read")
    return root


def _documents(source: DocumentSource, count: int, start: Any = None) -> list[str]:
    return [document.text for _, document in itertools.islice(source.documents(start), count)]


def _text(sequence: Sequence) -> str:
    return bytes(int(i) - 3 for i in sequence.ids if i > 2).decode()


def _without_reader(state: dict[str, Any]) -> dict[str, Any]:
    return state | {"place": state["place"] | {"reader": None}}


def _take(source: DocumentSource, tokenizer: Tokenizer, context: int, count: int, state: Any = None) -> list[Sequence]:
    return list(itertools.islice(SequenceStream(source, tokenizer, context, state), count))


# --- documents


def test_all_kinds_of_files_are_read_in_order(folder: Path) -> None:
    documents = _documents(DocumentSource(str(folder), shuffle=0), 13)
    assert documents[:2] == ["text file a\n\nwith lines\n", "text file b\n\nwith lines\n"]
    assert documents[2:8] == [f"json {i} " + "x" * i for i in range(6)]
    assert documents[8:] == [f"parquet {i}" for i in range(5)]


@pytest.mark.parametrize("shuffle", [1, 4])
def test_an_epoch_is_a_permutation_and_epochs_differ(folder: Path, shuffle: int) -> None:
    plain = _documents(DocumentSource(str(folder), shuffle=0), 13)
    shuffled = _documents(DocumentSource(str(folder), shuffle=shuffle, seed=5), 39)
    epochs = [shuffled[i : i + 13] for i in (0, 13, 26)]
    assert all(sorted(epoch) == sorted(plain) for epoch in epochs)
    assert shuffled == _documents(DocumentSource(str(folder), shuffle=shuffle, seed=5), 39)
    if shuffle > 1:
        assert epochs[0] != plain and epochs[0] != epochs[1]
        assert epochs[0] != _documents(DocumentSource(str(folder), shuffle=shuffle, seed=6), 13)


@pytest.mark.parametrize("shuffle", [0, 4])
def test_documents_resume_from_any_place(folder: Path, shuffle: int) -> None:
    whole = list(itertools.islice(DocumentSource(str(folder), shuffle=shuffle).documents(), 30))
    for index in (0, 1, 3, 4, 12, 13, 17):
        place = json.loads(json.dumps(whole[index][0].__dict__))  # through a checkpoint's JSON
        again = _documents(DocumentSource(str(folder), shuffle=shuffle), 12, type(whole[0][0])(**place))
        assert again == [document.text for _, document in whole[index : index + 12]]


def test_a_hub_dataset_is_opened_by_name_config_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked = []

    def load_dataset(*args: Any, **options: Any) -> Any:
        asked.append((args, options))
        return datasets.Dataset.from_dict({"body": ["a", "b"]}).to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    source = DocumentSource("someone/corpus:en", text_field="body", split="validation", shuffle=0)
    assert _documents(source, 3) == ["a", "b", "a"]
    DocumentSource("someone/corpus")
    streamed = {"streaming": True}
    assert asked[0] == (("someone/corpus", "en"), {"split": "validation", **streamed})
    assert asked[1] == (("someone/corpus", None), {"split": "train", **streamed})


# --- tokens


@given(st.text(alphabet="ab \n", max_size=60), st.integers(1, 9))
def test_split_text_loses_nothing(text: str, limit: int) -> None:
    parts = split_text(text, limit)
    assert "".join(parts) == text
    assert all(len(part) <= limit for part in parts)
    assert split_text("one\ntwo three", 6) == ["one\n", "two ", "three"]


def test_documents_have_the_begin_token_of_the_tokenizer() -> None:
    class Begins:
        bos_token_id, eos_token_id = 7, 8

        def __call__(self, text: str, add_special_tokens: bool = True, **_: Any) -> dict[str, list[int]]:
            return {"input_ids": [7] * add_special_tokens + [ord(c) for c in text]}

    tokenizer = Tokenizer(Begins())
    assert tokenizer.text_ids("ab", first=True, last=True).tolist() == [7, 97, 98, 8]
    assert tokenizer.text_ids("ab", first=False, last=False).tolist() == [97, 98]


def test_the_byte_tokenizer_can_be_saved(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    load_tokenizer(BYTES).save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again("hé").input_ids == load_tokenizer(BYTES)("hé").input_ids
    assert load_tokenizer(str(tmp_path)).eos_token_id == EOS


# --- sequences


def test_sequences_concatenate_to_the_documents(folder: Path, by_bytes: Tokenizer) -> None:
    source = DocumentSource(str(folder))
    text = "".join(_documents(source, 13))
    total = len(text.encode()) + 13  # and an end token each
    context = 7
    sequences = _take(DocumentSource(str(folder)), by_bytes, context, total // context)
    ids = np.concatenate([sequence.ids for sequence in sequences])
    assert all(len(sequence.ids) == context for sequence in sequences)
    assert bytes(int(i) - 3 for i in ids if i > 2).decode() == text[: sum(ids > 2)]
    starts = [n * context + start for n, sequence in enumerate(sequences) for start in sequence.starts]
    assert starts == [0, *(np.flatnonzero(ids == EOS) + 1)][: len(starts)]
    assert len(starts) in (13, 14)


@pytest.mark.parametrize("context", [5, 150])
def test_a_stream_resumes_from_any_state(folder: Path, by_bytes: Tokenizer, context: int) -> None:
    whole = _take(DocumentSource(str(folder), shuffle=4), by_bytes, context, 12)  # passes the end of the data at 150
    for index in (0, 3, 8):
        state = json.loads(json.dumps(whole[index].state))
        assert state["sequences"] == index + 1
        rest = _take(DocumentSource(str(folder), shuffle=4), by_bytes, context, 3, state)
        for expected, got in zip(whole[index + 1 :], rest, strict=False):
            assert got.ids.tolist() == expected.ids.tolist()
            assert got.starts == expected.starts
            # The reader may spell the same place in another way.
            assert _without_reader(got.state) == _without_reader(expected.state)
    # Another context resumes at the same token.
    longer = _take(DocumentSource(str(folder), shuffle=4), by_bytes, context + 3, 2, whole[2].state)
    ids = np.concatenate([s.ids for s in longer])
    assert ids.tolist() == np.concatenate([s.ids for s in whole[3:]])[: len(ids)].tolist()


def test_pieces_of_a_long_document_make_no_difference(
    tmp_path: Path, by_bytes: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "long.txt").write_text("many words in one line " * 40)
    whole = _take(DocumentSource(str(tmp_path)), by_bytes, 50, 30)
    monkeypatch.setattr("longspan.data.stream.split_text", lambda text: split_text(text, 37))
    pieces = _take(DocumentSource(str(tmp_path)), by_bytes, 50, 30)
    assert [s.ids.tolist() for s in pieces] == [s.ids.tolist() for s in whole]
    assert [s.starts for s in pieces] == [s.starts for s in whole]
    resumed = _take(DocumentSource(str(tmp_path)), by_bytes, 50, 25, pieces[4].state)
    assert [s.ids.tolist() for s in resumed] == [s.ids.tolist() for s in whole[5:]]


# --- over several ranks


class _Counting:
    """A tokenizer of bytes that counts what it is asked for."""

    def __init__(self) -> None:
        self.inner, self.texts = load_tokenizer(BYTES), list[str]()
        self.bos_token_id, self.eos_token_id = None, EOS

    def __call__(self, text: str, **options: Any) -> Any:
        self.texts.append(text)
        return self.inner(text, **options)


def _tokenised_together(
    folder: Path, context: int, count: int, state: dict[str, Any] | None, piece: int
) -> tuple[Any, list[str]]:
    """Return the sequences of a stream that all ranks tokenise, and the text that this rank tokenised."""
    import torch.distributed as dist

    from longspan.data import merge_rounds, rounds

    counting = _Counting()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("longspan.data.stream.split_text", lambda text: split_text(text, piece))
        stream = SequenceStream(DocumentSource(str(folder), shuffle=4), Tokenizer(counting), context, state)
        own = rounds(stream, 2 * context, dist.get_world_size(), dist.get_rank())
        assert dist.group.WORLD is not None
        found = itertools.islice(stream.pack(merge_rounds(own, dist.group.WORLD, str(folder))), count)
        return [(s.ids.tolist(), s.starts, s.state) for s in found], counting.texts


def test_ranks_that_share_tokenisation_have_the_stream_of_one_rank(
    folder: Path, by_bytes: Tokenizer, pool4: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, from the beginning and from any state, over several epochs, with documents of many pieces."""
    context = 50
    folder = shutil.copytree(folder, tmp_path / "data")
    (folder / "long.txt").write_text("many words in one line, as long as a book. " * 60)
    monkeypatch.setattr("longspan.data.stream.split_text", lambda text: split_text(text, 100))
    whole = _take(DocumentSource(str(folder), shuffle=4), by_bytes, context, 100)
    plain = [(s.ids.tolist(), s.starts, s.state) for s in whole]
    assert any(state["piece"] > 2 for *_, state in plain) and plain[-1][2]["place"]["epoch"] > 0
    for first in (0, 7, 31):
        state = plain[first - 1][2] if first else None
        every = pool4.run(_tokenised_together, folder, context, 60, state, 100)
        assert all(found == plain[first : first + 60] for found, _ in every)
        sizes = [sum(map(len, texts)) for _, texts in every]
        assert max(sizes) - min(sizes) <= 100  # a piece at most
        assert sum(sizes) <= 60 * context + 4 * context + 100  # nothing twice


def _one_cannot_read(folder: Path) -> str:
    import torch.distributed as dist

    from longspan.data import merge_rounds, rounds

    rank = dist.get_rank()
    with tempfile.TemporaryDirectory() as own:
        shutil.copytree(folder, own, dirs_exist_ok=True)
        source = DocumentSource(own, shuffle=0)
        if rank == 2:  # gone on this machine since it was listed
            (Path(own) / "d.parquet").unlink()
        stream = SequenceStream(source, Tokenizer(load_tokenizer(BYTES)), 16)
        assert dist.group.WORLD is not None
        with pytest.raises(LongspanError) as error:
            for _ in stream.pack(merge_rounds(rounds(stream, 32, 4, rank), dist.group.WORLD, own)):
                pass
    return str(error.value)


def test_all_ranks_raise_the_read_error_of_one(folder: Path, pool4: RankPool) -> None:
    said = set(pool4.run(_one_cannot_read, folder))
    assert len(said) == 1 and re.match(r"rank 2 failed: --data \S+d\.parquet cannot be read", said.pop())


# --- steps


@pytest.mark.parametrize("data_size", [1, 4])
def test_the_data_ranks_share_one_order(folder: Path, by_bytes: Tokenizer, data_size: int) -> None:
    sequences = _take(DocumentSource(str(folder)), by_bytes, 16, 16)
    ranks = []
    for rank in range(data_size):
        stream = iter(SequenceStream(DocumentSource(str(folder)), by_bytes, 16))
        steps = deal(stream, batch=8, micro_batch=2, data_size=data_size, data_rank=rank, pack="stream")
        ranks.append([next(steps), next(steps)])
    for number in range(2):
        expected = [s.ids.tolist() for s in sequences[number * 8 : number * 8 + 8]]
        micros = [ranks[i % data_size][number].micro_batches[i // data_size] for i in range(4)]
        assert [row for micro in micros for row in micro["input_ids"].tolist()] == expected
        assert {rank[number].label_tokens for rank in ranks} == {8 * 15}
        assert {rank[number].attention_pairs for rank in ranks} == {8 * (16 * 17 // 2)}
        assert len({rank[number].checksum for rank in ranks}) == 1
        assert all(rank[number].state == sequences[number * 8 + 7].state for rank in ranks)


def test_documents_restart_positions_and_predict_nothing_across() -> None:
    sequences = iter([Sequence(np.arange(8) + 10, (3, 6), {}), Sequence(np.arange(8) + 20, (0,), {})])
    step = next(deal(sequences, batch=2, micro_batch=2, data_size=1, data_rank=0, pack="documents"))
    (micro,) = step.micro_batches
    assert micro["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 0, 1], list(range(8))]
    assert micro["labels"].tolist() == [[-100, 11, 12, -100, 14, 15, -100, 17], [-100, *range(21, 28)]]
    assert step.label_tokens == 5 + 7 == int((micro["labels"][:, 1:] != -100).sum())
    assert step.attention_pairs == (6 + 6 + 3) + 36


def test_prefetch_yields_items_and_raises_errors() -> None:
    def items() -> Any:
        yield 1
        yield 2
        raise LongspanError("three is refused")

    with prefetch(items()) as ahead:
        assert [next(ahead), next(ahead)] == [1, 2]
        with pytest.raises(LongspanError, match="three is refused"):
            next(ahead)
    with prefetch(itertools.count(), depth=1) as endless:
        assert next(endless) == 0
    assert not any(thread.name.startswith("longspan-data") for thread in threading.enumerate())
    with prefetch(iter([5])) as short:
        assert list(short) == [5]


# --- bad input


def _refused(match: str, data: str | Path, context: int = 10, **options: Any) -> None:
    with pytest.raises(LongspanError, match=match):
        source = DocumentSource(str(data), **options)
        _take(source, Tokenizer(load_tokenizer(BYTES)), context, 1)


def test_missing_unknown_and_empty_data_is_refused(folder: Path, tmp_path: Path) -> None:
    _refused(r"--data no/such/thing is neither a file nor a directory, nor can it be the name", "no/such/thing")
    _refused(r"notes\.md: a \.md is not read; give \.txt, \.jsonl, \.parquet", folder / "notes.md")
    _refused(r"the directory holds no \.txt, \.jsonl, \.parquet file", tmp_path)
    (tmp_path / "a.txt").touch()
    _refused(r"is empty \(1 file of 0 bytes\) \[LS504, see", tmp_path)
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n{"text": null}\n')
    _refused(r"holds no text: every document is empty", tmp_path)
    _refused(r"--shuffle -1 must be 0", PYDOC, shuffle=-1)
    (tmp_path / "a.txt").write_text("twelve bytes")
    said = r"not enough text for one sequence: --data .* gives 13 tokens, --context needs 14"
    _refused(said, tmp_path / "a.txt", context=14)
    assert _take(DocumentSource(str(tmp_path / "a.txt")), Tokenizer(load_tokenizer(BYTES)), 13, 1)


def test_unreadable_files_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_text("this is no parquet")
    _refused(r"--data .*a\.parquet.* cannot be read: ArrowInvalid", tmp_path / "a.parquet")
    (tmp_path / "b.jsonl").write_text('{"text": "ok"}\nnot json\n')
    _refused(r"--data .*b\.jsonl cannot be read", tmp_path / "b.jsonl")
    (tmp_path / "c.txt").write_bytes(b"\xff\xfe latin")
    _refused(r"--data .*c\.txt cannot be read: UnicodeDecodeError", tmp_path / "c.txt")


def test_rows_without_the_field_are_refused(tmp_path: Path) -> None:
    rows = [{"text": "there"} if i % 2 else {"body": "not there"} for i in range(7)]
    (tmp_path / "a.jsonl").write_text("\n\n".join(map(json.dumps, rows)))
    _refused(r"a\.jsonl, line 1 has no field 'text'; it has 'body'", tmp_path)
    late = [{"text": "x" * 1000}] * 1500 + [{"Text": "late"}]  # behind what is looked at beforehand
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, late)))
    assert _documents(DocumentSource(str(tmp_path), shuffle=0), 1500)
    with pytest.raises(LongspanError, match=r"line 1501 has no field 'text'; it has 'Text'"):
        _documents(DocumentSource(str(tmp_path), shuffle=0), 1501)
    for line, said in (
        ('{"text": 3}', r"line 2, holds int, not text"),
        ("[1]", r"line 2 holds \[1\], not an object"),
        ('{"text": "\\ud800"}', r"line 2 is not JSON in UTF-8 \(UnicodeEncodeError"),
        ('{"text": ' + "[" * 100_000, r"line 2 is not JSON.* \[LS501, see"),
    ):
        (tmp_path / "a.jsonl").write_text('{"text": "ok"}\n' + line)
        _refused(said, tmp_path)
    (tmp_path / "a.jsonl").write_text('\ufeff{"text": ""}\r\n\n{"text": null}\n{"text": "the only one \\u00e4"}')
    assert _documents(DocumentSource(str(tmp_path)), 2) == ["the only one ä"] * 2


def test_columns_of_parquet_files_are_checked(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    (tmp_path / "a.txt").write_text("one of 51")
    pq.write_table(pa.table({"body": ["x"] * 50}), tmp_path / "b.parquet")
    _refused(r"b\.parquet has no field 'text'; it has 'body'", tmp_path)
    pq.write_table(pa.table({"text": [1] * 50}), tmp_path / "b.parquet")
    _refused(r"the field 'text' of --data .*b\.parquet holds int64, not text", tmp_path)
    for kind in (pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())):
        column = pa.array(["y", None, "z"], pa.string()).cast(kind)
        pq.write_table(pa.table({"n": [1, 2, 3], "text": column}), tmp_path / "b.parquet")
        assert _documents(DocumentSource(str(tmp_path), shuffle=0), 3) == ["one of 51", "y", "z"]


@pytest.mark.parametrize("name", ["a*.txt", "[ab].txt", "a::b.txt", "x y.jsonl"])
def test_a_file_name_is_no_pattern(name: str, tmp_path: Path) -> None:
    mine = json.dumps({"text": "mine"}) if name.endswith(".jsonl") else "mine"
    for other in ("ab.txt", "a.txt", "b.txt", "whatx.txt"):
        (tmp_path / other).write_text("another's")
    (tmp_path / name).write_text(mine)
    assert _documents(DocumentSource(str(tmp_path / name)), 3) == ["mine"] * 3
    assert _documents(DocumentSource(str(tmp_path)), 5).count("mine") == 1


def test_anything_but_a_regular_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("there")
    odd = tmp_path / "b.txt"
    odd.symlink_to("gone.txt")
    _refused(r"b\.txt is a link to gone\.txt, which does not exist", tmp_path)
    odd.unlink()
    os.mkfifo(odd)
    _refused(r"b\.txt is no regular file", tmp_path)
    odd.unlink()
    (tmp_path / "loop").symlink_to(tmp_path)
    _refused(r"the link makes the folder .* be read twice", tmp_path)
    (tmp_path / "loop").unlink()
    elsewhere = tmp_path.parent / f"{tmp_path.name}-elsewhere"
    elsewhere.mkdir()
    (elsewhere / "c.txt").write_text("linked")
    (tmp_path / "linked").symlink_to(elsewhere)
    assert _documents(DocumentSource(str(tmp_path), shuffle=0), 2) == ["there", "linked"]


@contextlib.contextmanager
def _as_nobody(folder: Path) -> Iterator[None]:
    """Root may read everything, so where the tests run as root another user owns the folder, and is who reads it."""
    if os.geteuid() != 0:
        yield
        return
    for path in (folder, *folder.iterdir()):
        os.chown(path, NOBODY, -1)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_file_without_permission_is_refused() -> None:
    with tempfile.TemporaryDirectory() as name:  # pytest's own folder is closed to other users
        (folder := Path(name)).joinpath("a.txt").write_text("there")
        (folder / "closed").mkdir(mode=0)
        with _as_nobody(folder):
            _refused(r"closed cannot be listed: Permission denied", folder)
        (folder / "closed").rmdir()
        (folder / "a.txt").chmod(0)
        with _as_nobody(folder):
            _refused(r"a\.txt cannot be read: .*Permission denied", folder)


def test_a_missing_path_does_not_ask_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: pytest.fail("asked the hub"))
    for data in ("gone.jsonl", "./gone", "/gone", "a/b/c", "gone/", "hf://datasets/x/y", "a b"):
        _refused(r"is neither a file nor a directory, nor can it be the name of a dataset", data)


def test_the_hub_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One HEAD request per name; a missing name is refused with a suggestion."""
    from huggingface_hub import constants

    from longspan.hf.pretrained import check_source

    class Hub(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            asked.append(self.path)
            self.send_response(200 if "there" in self.path else 404)
            for name, value in {"X-Repo-Commit": "a" * 40, "ETag": '"x"', "Content-Length": "2"}.items():
                self.send_header(name, value)
            if "there" not in self.path:
                self.send_header("X-Error-Code", "EntryNotFound" if "bare" in self.path else "RepoNotFound")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    asked: list[str] = []
    (tmp_path / "texts").mkdir()
    monkeypatch.chdir(tmp_path)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", constants.ENDPOINT + "/{repo_id}/resolve/{revision}/{filename}"
        )
        check_source("--model", "me/there")
        check_source("--model", "me/bare")  # a model without config.json: transformers says it
        check_source("--data", "me/there:en", kind="dataset")
        said = r"--data texs: there .*/texs \(did you mean texts\?\), and the Hugging Face hub has no dataset"
        with pytest.raises(LongspanError, match=said):
            check_source("--data", "texs", kind="dataset")
        server.shutdown()
    assert len(asked) == 4


def test_an_unknown_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LongspanError, match=r"--tokenizer no/such: there is no .* HF_HUB_OFFLINE is set; give"):
        load_tokenizer("no/such")
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(tmp_path)
    with pytest.raises(LongspanError, match=r"has no end-of-text token to separate documents; set its eos_token"):
        load_tokenizer(str(tmp_path))
