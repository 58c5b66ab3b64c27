"""Whole documents packed by best fit: none is cut or lost, runs resume, and the loss is that of documents alone."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longspan.core.errors import LongspanError
from longspan.core.sections import replace
from longspan.data import (
    BYTES,
    DocumentSource,
    Mixture,
    Sequence,
    SequenceStream,
    Tokenizer,
    deal,
    load_tokenizer,
    split_weight,
)
from longspan.data.packing import best_fit
from longspan.data.stream import collate
from tests.chats import write_rows
from tests.pool import RankPool
from tests.training import log_of, small_run, train, write_config


@given(st.lists(st.integers(1, 20), max_size=40))
def test_best_fit_decreasing(lengths: list[int]) -> None:
    """Against the definition, written out; and the rest of the sequences is packed the same without some."""
    packed = best_fit(list(enumerate(lengths)), 20)
    sums: list[int] = []
    of_document = {}
    for number, length in sorted(enumerate(lengths), key=lambda item: -item[1]):
        fits = [i for i, used in enumerate(sums) if used + length <= 20]
        chosen = max(fits, key=lambda i: sums[i], default=len(sums))
        sums[chosen : chosen + 1] = [length + (sums[chosen] if chosen < len(sums) else 0)]
        of_document[number] = chosen
    expected = [sorted(n for n, i in of_document.items() if i == sequence) for sequence in range(len(sums))]
    assert sorted(packed) == sorted(expected)
    rest = [number for numbers in packed[2:] for number in numbers]
    assert best_fit([(number, lengths[number]) for number in sorted(rest)], 20) == packed[2:]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """29 texts of 2 to 50 bytes, with their end tokens 3 to 51, whose first letter names them."""
    rows = [{"text": chr(ord("A") + i) + "x" * (i * 17 % 49 + 1)} for i in range(29)]
    return write_rows(tmp_path_factory.mktemp("texts") / "a.jsonl", rows)


def _stream(path: Path, context: int, state: Any = None, **options: Any) -> SequenceStream:
    source = DocumentSource(str(path), shuffle=options.pop("shuffle", 8))
    given = {"pack": "best-fit", "window": 4, **options}
    return SequenceStream(source, Tokenizer(load_tokenizer(BYTES)), context, state, **given)


def _take(path: Path, context: int, count: int, state: Any = None, **options: Any) -> list[Sequence]:
    return list(itertools.islice(_stream(path, context, state, **options), count))


def _documents(sequences: list[Sequence]) -> list[str]:
    """Return each document's text."""
    found = []
    for sequence in sequences:
        for start, end in sequence.spans("best-fit"):
            assert sequence.ids[end - 1] == 1  # its end token
            found.append(bytes(int(i) - 3 for i in sequence.ids[start : end - 1]).decode())
    return found


def test_every_document_is_whole_and_comes_once(texts: Path) -> None:
    expected = sorted(json.loads(line)["text"] for line in texts.read_text().splitlines())
    once = list(_stream(texts, 60, epochs=1))
    assert sorted(_documents(once)) == expected
    filled = sum(len(sequence.ids) for sequence in once)
    assert filled / (60 * len(once)) > 0.85  # and the larger the window, the less is wasted
    assert filled / (60 * len(list(_stream(texts, 60, window=32, epochs=1)))) > 0.95
    alone = list(_stream(texts, 60, pack="none", shuffle=0, epochs=1))
    assert sorted(_documents(alone)) == expected and all(sequence.starts == (0,) for sequence in alone)
    assert [s.where[0][-7:].strip() for s in alone[:2]] == ["line 1", "line 2"]


@pytest.mark.parametrize("pack", ["best-fit", "none"])
def test_packing_resumes_to_the_bit(texts: Path, pack: str) -> None:
    whole = _take(texts, 60, 70, pack=pack)  # some epochs
    for index in (0, 1, 4, 12, 33, 50):
        state = json.loads(json.dumps(whole[index].state))
        for got, expected in zip(_take(texts, 60, 9, state, pack=pack), whole[index + 1 :], strict=False):
            assert (got.ids.tolist(), got.starts) == (expected.ids.tolist(), expected.starts)
            for key in ("sequences", "used", "counts"):
                assert got.state[key] == expected.state[key]


@pytest.mark.parametrize("context", [52, 200])
def test_another_context_resumes_with_the_documents_that_are_left(texts: Path, context: int) -> None:
    first = _take(texts, 100, 6, window=7, epochs=1)
    rest = list(_stream(texts, context, first[2].state, epochs=1))
    assert sorted(_documents(first[:3] + rest)) == sorted(_documents(list(_stream(texts, 100, epochs=1))))


def test_longer_documents_are_truncated_or_dropped_and_counted(texts: Path) -> None:
    lengths = [len(json.loads(line)["text"]) + 1 for line in texts.read_text().splitlines()]
    longer = sum(length > 20 for length in lengths)
    cut = list(_stream(texts, 20, epochs=1))
    assert sum(len(s.starts) for s in cut) == 29 and max(len(s.ids) for s in cut) == 20
    assert cut[-1].state["counts"] == {"truncated": longer, "left_out": 0}
    dropped = list(_stream(texts, 20, too_long="drop", epochs=1))
    assert len(_documents(dropped)) == 29 - longer
    assert dropped[-1].state["counts"] == {"truncated": 0, "left_out": longer}
    resumed = list(_stream(texts, 20, dropped[3].state, too_long="drop", epochs=1))
    assert resumed[-1].state["counts"] == dropped[-1].state["counts"]
    with pytest.raises(LongspanError, match=r"none of 29 documents can be used: they are longer than --context 2"):
        _take(texts, 2, 1, too_long="drop")


def _packed_together(path: Path) -> Any:
    import torch.distributed as dist

    from longspan.data import merge_rounds, rounds

    stream = _stream(path, 60, epochs=2)
    assert dist.group.WORLD is not None
    mine = rounds(stream, 120, dist.get_world_size(), dist.get_rank())
    return [(s.ids.tolist(), s.starts, s.state) for s in stream.pack(merge_rounds(mine, dist.group.WORLD, str(path)))]


def test_ranks_that_share_tokenisation_pack_as_one(texts: Path, pool2: RankPool) -> None:
    plain = [(s.ids.tolist(), s.starts, s.state) for s in _stream(texts, 60, epochs=2)]
    assert pool2.run(_packed_together, texts) == [plain, plain]


# --- padding


def test_padding_has_no_loss_and_is_no_document() -> None:
    trained = np.array([False, True, False, True, True])
    sequences = [Sequence(np.arange(5) + 10, (0, 3), {}, trained), Sequence(np.arange(70) + 10, (0,), {})]
    step = next(deal(iter(sequences), batch=2, micro_batch=2, data_size=1, data_rank=0, pack="best-fit", context=100))
    (batch,) = step.micro_batches
    assert {key: tuple(value.shape) for key, value in batch.items()} == dict.fromkeys(batch, (2, 100))
    assert batch["document_ids"][0].tolist() == [0, 0, 0, 1, 1] + [-1] * 95
    assert batch["position_ids"][0, :5].tolist() == [0, 1, 2, 0, 1]
    assert batch["labels"][0].tolist() == [-100, 11, -100, -100, 14] + [-100] * 95
    assert (step.tokens, step.padded, step.label_tokens) == (75, 200, 2 + 69)
    assert len(collate([sequences[1]], "none", 1000)["input_ids"][0]) == 128  # steps of 64


def _losses_and_gradients(path: Path, pack: str, ulysses: int) -> Any:
    """Return the sums over one epoch of texts: loss of every label token, and a gradient."""
    import longspan
    from tests.models import build

    model = build("Llama", vocab_size=384)
    sp = longspan.SequenceSharding(longspan.init_mesh(ulysses=ulysses))
    longspan.parallelize(model, sp, fsdp=False)
    total = torch.zeros(())
    for sequence in _stream(path, 60, pack=pack, epochs=1):
        batch = collate([sequence], "best-fit", 60)
        loss = model(**batch, num_items_in_batch=1).loss
        loss.backward()
        total += loss.detach()
    return total, model.model.layers[0].self_attn.q_proj.weight.grad


def test_the_loss_of_packed_documents_is_that_of_documents_alone(texts: Path, pool2: RankPool) -> None:
    packed, alone = (pool2.run(_losses_and_gradients, texts, pack, 2)[0] for pack in ("best-fit", "none"))
    for found, expected in zip(packed, alone, strict=True):
        assert (found - expected).norm() < 1e-5 * expected.norm()


# --- several sources


def test_tokens_per_second_counts_all_steps_without_padding(texts: Path, tmp_path: Path) -> None:
    config = small_run(write_config(tmp_path), tmp_path / "run", data=str(texts), pack="best-fit", batch=1)
    train(replace(config, log_every=3, steps=4, save_every=0, export="never", track="none"))
    first, second, third = log_of(tmp_path / "run")
    between = second["tokens"] - first["tokens"]
    assert second["tokens_per_s"] * second["step_s"] * 2 == pytest.approx(between)
    assert between < 2 * 61 and second["padding"] > 0
    assert third["tokens_per_s"] * third["step_s"] == pytest.approx(third["tokens"] - second["tokens"])


def _mixture(folder: Path, weights: tuple[float, ...] = (3.0, 1.0)) -> Mixture:
    for name, length in (("a", 40), ("b", 5)):
        write_rows(folder / f"{name}.jsonl", [{"text": name * (length + i % 3)} for i in range(20)])
    return Mixture([DocumentSource(str(folder / f"{name}.jsonl"), shuffle=6) for name in "ab"], list(weights))


def test_sources_have_their_share_of_the_text(tmp_path: Path) -> None:
    """By characters: each source starts anew when it ends, whatever its documents' lengths."""
    mixture = _mixture(tmp_path)
    texts = [document.text for _, document in itertools.islice(mixture.documents(), 400)]
    of_a, of_b = (sum(len(text) for text in texts if text[0] == name) for name in "ab")
    assert of_a / (of_a + of_b) == pytest.approx(0.75, abs=0.01)
    assert {text[0] for text in texts[:8]} == {"a", "b"}  # and not one after the other
    once = [document.text for _, document in mixture.documents(epochs=1)]
    assert len(once) == 40 and len([text for text in once if text[0] == "b"]) == 20
    assert [name for name, *_ in mixture.identity["data"]] == ["1:a.jsonl", "2:b.jsonl"]


@pytest.mark.parametrize("pack", ["stream", "best-fit"])
def test_a_mixture_resumes_to_the_bit(tmp_path: Path, pack: Any) -> None:
    def take(count: int, state: Any = None) -> list[Any]:
        stream = SequenceStream(_mixture(tmp_path), Tokenizer(load_tokenizer(BYTES)), 64, state, pack=pack, window=3)
        return [(s.ids.tolist(), s.starts, s) for s in itertools.islice(stream, count)]

    whole = take(60)
    assert whole[-1][2].state["place"]["places"][0]["epoch"] > 0
    for index in (0, 3, 22, 41):
        state = json.loads(json.dumps(whole[index][2].state))
        assert [found[:2] for found in take(9, state)] == [found[:2] for found in whole[index + 1 : index + 10]]


def test_weights_are_read_from_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "year=2024").mkdir()
    assert split_weight("a.jsonl=0.7") == ("a.jsonl", 0.7)
    assert split_weight("owner/name:en=2") == ("owner/name:en", 2.0)
    assert split_weight("year=2024") == ("year=2024", 1.0)
    assert split_weight("year=2024=0.5") == ("year=2024", 0.5)
    for wrong in ("a=0", "a=-1", "a=1e999"):
        with pytest.raises(LongspanError, match=rf"--data {wrong}: a weight is a number above 0"):
            split_weight(wrong)
