"""Chats, prompts with completions and token ids: which tokens have a loss, and what is refused."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longspan.core.errors import LongspanError
from longspan.core.sections import make, replace
from longspan.data import (
    BYTES,
    DocumentSource,
    Mixture,
    Sequence,
    SequenceStream,
    Tokenizer,
    deal,
    load_tokenizer,
)
from longspan.data.tokenizer import LossOn
from longspan.train import TrainConfig
from tests.chats import CHATML, GENERATION, chat, make_tokenizer, write_rows
from tests.pool import RankPool
from tests.training import log_of, losses_of, small_run, train, train_on, write_config


@pytest.fixture(scope="module")
def chatml() -> Any:
    return make_tokenizer(CHATML)


def _ids(tokenizer: Any, kind: Any, loss_on: LossOn = "assistant", **row: Any) -> np.ndarray[Any, Any]:
    return Tokenizer(tokenizer, loss_on, 384).ids(json.dumps(row), kind, "--data a.jsonl, line 7")


def _split(tokenizer: Any, marked: np.ndarray[Any, Any]) -> tuple[str, list[str]]:
    """Return the whole text, and each run of tokens with a loss."""
    text = tokenizer.decode(np.where(marked < 0, ~marked, marked).tolist())
    runs = [list(group) for trained, group in itertools.groupby(marked.tolist(), lambda i: i >= 0) if trained]
    return text, [tokenizer.decode(run) for run in runs]


@pytest.mark.parametrize("template", [CHATML, GENERATION], ids=["prefixes", "generation mask"])
def test_the_assistants_turns_have_a_loss(template: str) -> None:
    tokenizer = make_tokenizer(template)
    text, trained = _split(tokenizer, _ids(tokenizer, "chat", messages=chat(3)))
    assert text == tokenizer.apply_chat_template(chat(3), tokenize=False)
    assert trained == ["It is the one, 0<|im_end|>\n", "It is the one, 3 and that<|im_end|>\n"]
    assert _split(tokenizer, _ids(tokenizer, "chat", "last", messages=chat(3)))[1] == trained[1:]
    assert _split(tokenizer, _ids(tokenizer, "chat", "all", messages=chat(3)))[1] == [text]


def test_a_tokenizer_without_offsets_has_the_same_labels(chatml: Any) -> None:
    by_bytes = load_tokenizer(BYTES)
    by_bytes.chat_template = GENERATION
    text, trained = _split(by_bytes, _ids(by_bytes, "chat", messages=chat(4)))
    assert (text, trained) == _split(chatml, _ids(chatml, "chat", messages=chat(4)))


@pytest.mark.parametrize("family", ["cohere", "gemma3", "lfm2", "qwen3_instruct_2507", "smolvlm"])
def test_prefixes_find_what_trl_marks_in_real_templates(family: str) -> None:
    """The template of a model family, and TRL's copy of it with {% generation %}."""
    pytest.importorskip("trl")
    from trl import chat_template_utils

    plain, marked = (
        make_tokenizer(getattr(chat_template_utils, f"{family}_{kind}"))
        for kind in ("chat_template", "training_chat_template")
    )
    assert _ids(plain, "chat", messages=chat(3)).tolist() == _ids(marked, "chat", messages=chat(3)).tolist()


def test_tools_reasoning_and_options_reach_the_template(chatml: Any) -> None:
    chatml = make_tokenizer(
        "{% if tools %}{{ tools | tojson }}{% endif %}{{ style }}{% for m in messages %}{{ '<|im_start|>' + m.role }}"
        "{% if m.reasoning_content %}{{ '(' + m.reasoning_content + ')' }}{% endif %}"
        "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}{{ m.content or '' }}<|im_end|>"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
    )
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "two"},
    ]
    row = {"messages": messages, "tools": json.dumps([{"name": "add"}]), "chat_template_kwargs": {"style": "short"}}
    text, trained = _split(chatml, _ids(chatml, "chat", **row))
    assert text.startswith('[{"name": "add"}]short<|im_start|>user1+1?')
    assert trained == ['(hm){"name": "add", "arguments": {"a": 1}}<|im_end|>', "two<|im_end|>"]


def test_the_completion_has_a_loss(chatml: Any) -> None:
    end = "<|endoftext|>"
    text, trained = _split(chatml, _ids(chatml, "completion", prompt="What is", completion=" the one"))
    assert (text, trained) == (f"What is the one{end}", [f" the one{end}"])
    # " the" is one token: the prompt's ids are those that the model will be given.
    marked = _ids(chatml, "completion", prompt="What is ", completion="the one")
    assert (~marked[marked < 0]).tolist() == chatml("What is ").input_ids
    assert _split(chatml, marked) == (f"What is the one{end}", [f"the one{end}"])
    by_bytes = load_tokenizer(BYTES)  # ends every text by itself
    assert _split(by_bytes, _ids(by_bytes, "completion", prompt="a", completion="b"))[1] == ["b</s>"]
    text, trained = _split(chatml, _ids(chatml, "completion", prompt=chat(1)[:2], completion=chat(1)[2:3]))
    assert text == chatml.apply_chat_template(chat(1)[:3], tokenize=False)
    assert trained == ["It is the one, 0<|im_end|>\n"]
    assert _split(chatml, _ids(chatml, "completion", "all", prompt="What", completion="?"))[1] == [f"What?{end}"]


def test_given_ids_stay_as_they_are(chatml: Any) -> None:
    assert _ids(chatml, "ids", input_ids=[5, 6, 7]).tolist() == [5, 6, 7]
    assert _ids(chatml, "ids", input_ids=[5, 6, 7], labels=[-100, 6, -100]).tolist() == [~5, 6, ~7]


def _refused(match: str, tokenizer: Any, kind: Any = "chat", loss_on: LossOn = "assistant", **row: Any) -> None:
    with pytest.raises(LongspanError, match=match):
        _ids(tokenizer, kind, loss_on, **row)


def test_malformed_rows_are_refused_by_file_and_row(chatml: Any) -> None:
    at = r"^--data a\.jsonl, line 7"
    _refused(
        at + r" has no turn of the assistant, so nothing to learn; remove.* \[LS502, see", chatml, messages=chat(1)[:2]
    )
    _refused(at + r" begins with a turn of the assistant", chatml, messages=chat(1)[2:])
    _refused(at + r": `messages` must be a list of messages, got \[\]", chatml, messages=[])
    _refused(
        at + r": message 1 of `messages` needs `role` and `content`; it has 'from'", chatml, messages=[{"from": 1}]
    )
    robot = [{"role": "robot", "content": "x"}]
    _refused(at + r": message 1 has the unknown role 'robot'; use system, developer", chatml, messages=robot)
    picture = [{"role": "user", "content": [{"type": "image"}]}]
    _refused(at + r": message 1 holds image; images are read with --format images", chatml, messages=picture)
    _refused(at + r": the content of message 1 is int", chatml, messages=[{"role": "user", "content": 3}])
    _refused(at + r" has `tools` that are no JSON", chatml, messages=chat(1), tools="[")
    _refused(at + r" needs a `prompt` and a `completion`, both texts", chatml, "completion", prompt="a", completion=[])
    _refused(at + r" needs .* has str and an empty completion", chatml, "completion", prompt="a", completion="")
    _refused(at + r": `input_ids` must be a list of whole numbers, got \['a'\]", chatml, "ids", input_ids=["a"])
    _refused(at + r".* has the ids 1 to 384; the model's vocabulary has 0 to 383", chatml, "ids", input_ids=[1, 384])
    _refused(at + r" has 2 `input_ids` and 1 `labels`", chatml, "ids", input_ids=[1, 2], labels=[1])
    _refused(at + r": label 0 is 2, and the id there 1", chatml, "ids", input_ids=[1, 2], labels=[2, -100])
    _refused(at + r" has no token with a loss", chatml, "ids", input_ids=[1, 2], labels=[-100, -100])
    _refused(
        r"^the tokenizer has no chat template.*--chat-template.* \[LS503, see", make_tokenizer(None), messages=chat(1)
    )


def test_templates_that_hide_where_the_assistant_speaks_are_refused() -> None:
    broken = make_tokenizer("{% for message in messages %}")
    _refused(r"^the chat template is no valid Jinja, at its line 1: Unexpected end", broken, messages=chat(1))
    strict = make_tokenizer("{{ raise_exception('roles must alternate') }}")
    _refused(r"line 7: the chat template refuses it: roles must alternate", strict, messages=chat(1))
    last_only = make_tokenizer(
        "{% for m in messages %}{{ '<|im_start|>' + m.role + ' ' }}{% if loop.last %}{{ '(thought) ' }}{% endif %}"
        "{{ m.content + '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
    )
    messages = chat(1)[1:]
    _refused(r"up to message 2 is no beginning of the whole chat .* by --loss-on last", last_only, messages=messages)
    # "the" is one token, and the template ends the assistant's turn within it.
    merged = make_tokenizer(
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}{{ '' }}{% endif %}"
    )
    messages = [{"role": "user", "content": "t"}, {"role": "assistant", "content": "he"}]
    _refused(r"a token reaches over the border of a turn, at 'the'", merged, messages=messages)


# --- from files to batches


def _columns(tmp_path: Path, row: dict[str, Any], **options: Any) -> str:
    path = write_rows(tmp_path / "a.jsonl", [row])
    return next(DocumentSource(str(path), shuffle=0, **options).documents())[1].kind


def test_the_columns_name_the_format(tmp_path: Path) -> None:
    assert _columns(tmp_path, {"messages": chat(), "source": "x"}) == "chat"
    assert _columns(tmp_path, {"prompt": "a", "completion": "b"}) == "completion"
    assert _columns(tmp_path, {"input_ids": [1], "attention_mask": [1]}) == "ids"
    assert _columns(tmp_path, {"text": "a", "prompt": "a"}) == "text"
    assert _columns(tmp_path, {"text": "a", "messages": chat()}, format="chat") == "chat"
    with pytest.raises(LongspanError, match=r"line 1 has the columns of more than one format; choose --format chat"):
        _columns(tmp_path, {"text": "a", "messages": chat()})
    with pytest.raises(LongspanError, match=r"has no 'prompt' and 'completion', which rows of --format completion"):
        _columns(tmp_path, {"text": "a"}, format="completion")
    with pytest.raises(LongspanError, match=r"Other rows need `messages`, `prompt` and `completion`, or `input_ids`"):
        _columns(tmp_path, {"conversations": []})
    (tmp_path / "b.txt").write_text("text")
    with pytest.raises(LongspanError, match=r"b\.txt is text, and --format chat was asked for"):
        DocumentSource(str(tmp_path), format="chat")


def test_chats_of_parquet_files_are_those_of_jsonl(tmp_path: Path, chatml: Any) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"messages": chat(i)} for i in range(5)]
    rows[2]["messages"][2]["reasoning_content"] = "hm"  # the column has nulls for all others
    write_rows(tmp_path / "a.jsonl", rows)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=2)
    found = []
    for name in ("a.jsonl", "a.parquet"):
        documents = DocumentSource(str(tmp_path / name), shuffle=0).documents()
        found.append([(document.text, document.where[-2:]) for _, document in itertools.islice(documents, 5)])
    assert found[0] == found[1] and json.loads(found[0][2][0]) == rows[2]
    (tmp_path / "b.jsonl").write_text('{"messages": [{"role": "user"}]}\n{"text": "late"}\n')
    with pytest.raises(LongspanError, match=r"b\.jsonl, line 2 has no 'messages', which rows of --format chat need"):
        list(itertools.islice(DocumentSource(str(tmp_path / "b.jsonl"), shuffle=0).documents(), 2))


def _stream(path: Path, tokenizer: Any, context: int, state: Any = None, **options: Any) -> SequenceStream:
    source = DocumentSource(str(path), shuffle=options.pop("shuffle", 4))
    return SequenceStream(source, Tokenizer(tokenizer), context, state, **options)


def _values(sequence: Sequence) -> Any:
    return sequence.ids.tolist(), sequence.starts, None if sequence.trained is None else sequence.trained.tolist()


def test_labels_of_chats_reach_the_batch(tmp_path: Path, chatml: Any) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"messages": chat(i)} for i in range(4)])
    marked = np.concatenate([_ids(chatml, "chat", messages=chat(i)) for i in range(4)])
    stream = iter(_stream(path, chatml, 64, shuffle=0, pack="documents"))
    step = next(deal(stream, batch=2, micro_batch=2, data_size=1, data_rank=0, pack="documents"))
    batch = step.micro_batches[0]
    assert batch["input_ids"].flatten().tolist() == np.where(marked < 0, ~marked, marked)[:128].tolist()
    expected = np.where(marked < 0, -100, marked)[:128]
    assert batch["labels"].flatten().tolist() == expected.tolist()
    assert step.label_tokens == (batch["labels"][:, 1:] != -100).sum() > 20 and step.tokens == 128


def test_a_stream_of_chats_resumes_and_leaves_out_what_has_no_loss(tmp_path: Path, chatml: Any) -> None:
    rows = [{"messages": chat(i)} for i in range(7)]
    rows[3]["messages"][1]["content"] = "a long prompt " * 30
    path = write_rows(tmp_path / "a.jsonl", rows)
    whole = list(itertools.islice(_stream(path, chatml, 16), 60))
    assert all(sequence.label_tokens("stream") for sequence in whole)
    for index in (0, 5, 33):
        state = json.loads(json.dumps(whole[index].state))
        rest = list(itertools.islice(_stream(path, chatml, 16, state), 9))
        assert [_values(s) for s in rest] == [_values(s) for s in whole[index + 1 : index + 10]]
    # One pass in order ends with a shorter sequence.
    once = list(_stream(path, chatml, 64, shuffle=0, epochs=1))
    assert len(once[-1].ids) < 64 and sum(len(s.starts) for s in once) <= 7
    total = sum(len(_ids(chatml, "chat", **row)) for row in rows)
    assert sum(len(s.ids) for s in once) == total - 64 * (-(-total // 64) - len(once))


def test_training_on_chats_has_the_losses_of_trl(tmp_path: Path, pool2: RankPool) -> None:
    """Two ranks that share each sequence, and TRL's SFTTrainer on one process: `benchmarks/sft_vs_trl.py`."""
    pytest.importorskip("trl")
    from benchmarks.sft_vs_trl import flags, trl_losses, write_inputs

    model, data = write_inputs(tmp_path, 16)
    config = make(TrainConfig, **flags(model, data, 4, 4, 512), out=tmp_path / "run", ulysses=2)
    train_on(pool2, config)
    assert list(losses_of(config.out).values()) == pytest.approx(trl_losses(model, data, 4, 4, 512), abs=2e-6)
    log = log_of(config.out)[-1]
    assert 0.1 < log["padding"] < 0.9 and log["tokens"] < 16 * 512


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("coloured", [False, True])
def test_a_preview_shows_what_the_model_will_see(tmp_path: Path, width: int, coloured: bool) -> None:
    import io

    from rich.console import Console
    from rich.text import Text

    from longspan.train.inputs import open_local
    from longspan.train.old_preview import preview

    tokenizer = make_tokenizer(GENERATION)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    rows = [{"messages": chat(i)} for i in range(9)]
    rows[1]["messages"][1]["content"] = "\x1b[31m" + "a long question " * 45
    path = write_rows(tmp_path / "a.jsonl", rows)
    config = make(
        TrainConfig, config=write_config(tmp_path, max_position_embeddings=1024), tokenizer=str(tmp_path / "tokenizer"),
        data=str(path), context=900, pack="best-fit", shuffle=0, preview=2, out=tmp_path / "run",
    )  # fmt: skip
    file = io.StringIO()
    preview(config, open_local(config), Console(file=file, width=width, force_terminal=coloured, highlight=False))
    shown = Text.from_ansi(file.getvalue()).plain if coloured else file.getvalue()
    assert max(map(len, shown.splitlines())) <= width
    assert "sequence 2 of 2" in shown and not (tmp_path / "run").exists()
    assert "a.jsonl, line 2" in shown and "\\x1b[31ma long question" in shown and " ... " in shown
    if coloured:
        assert "\x1b[1;32mIt is the one, 0<|im_end|>" in file.getvalue()
    else:
        assert "⟦It is the one, 0<|im_end|>\n⟧<|im_start|>user" in shown


def test_a_streamed_dataset_of_chats_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chatml: Any) -> None:
    """Parquet files read by `datasets` as a stream, as those of the hub are; several files and row groups."""
    import datasets
    import pyarrow as pa
    import pyarrow.parquet as pq

    for part in range(2):
        rows = [{"messages": chat(10 * part + i), "id": i} for i in range(6)]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"{part}.parquet", row_group_size=2)
    load = datasets.load_dataset
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(
        datasets, "load_dataset",
        lambda *_, **__: load("parquet", data_files=[str(tmp_path / f"{i}.parquet") for i in range(2)], split="train",
                              streaming=True),
    )  # fmt: skip
    monkeypatch.setattr("longspan.data.source.check_on_hub", lambda *_: None)

    def take(count: int, state: Any = None) -> list[Sequence]:
        source = DocumentSource("someone/chats", shuffle=5)
        assert source.kinds() == {"chat"}
        stream = SequenceStream(source, Tokenizer(chatml), 300, state, pack="best-fit", window=2)
        return list(itertools.islice(stream, count))

    whole = take(14)
    assert whole[-1].state["place"]["epoch"] > 0
    assert {name for s in whole for name in s.where} == {f"--data someone/chats, row {i + 1}" for i in range(12)}
    for index in (0, 4, 8):
        state = json.loads(json.dumps(whole[index].state))
        assert [_values(s) for s in take(4, state)] == [_values(s) for s in whole[index + 1 : index + 5]]


def test_rows_stay_whole_unless_all_is_text(tmp_path: Path) -> None:
    from longspan.train.inputs import resolve_pack

    chats = DocumentSource(str(write_rows(tmp_path / "a.jsonl", [{"messages": chat()}])))
    (tmp_path / "b").mkdir()
    texts = DocumentSource(str(write_rows(tmp_path / "b" / "a.jsonl", [{"text": "a"}])))
    data = TrainConfig().data
    assert (resolve_pack(data, chats), resolve_pack(data, texts)) == ("best-fit", "stream")
    assert resolve_pack(data, Mixture([texts, chats], [1, 1])) == "documents"  # a long text would be truncated
    assert resolve_pack(make(TrainConfig, pack="documents").data, chats) == "documents"
    with pytest.raises(LongspanError, match=r"--too-long drop: --pack stream cuts documents and drops none"):
        make(TrainConfig, data="x", pack="stream", too_long="drop").data.check()


def test_a_run_on_chats_and_text_resumes_on_another_mesh(tmp_path: Path, pool2: RankPool) -> None:
    """Two sources, best fit, from two ranks to one: the same losses as without an interruption."""
    tokenizer = make_tokenizer(GENERATION)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    chats = write_rows(tmp_path / "a.jsonl", [{"messages": chat(i)} for i in range(30)])
    texts = write_rows(tmp_path / "b.jsonl", [{"text": "the other answer " * (i % 7 + 1)} for i in range(50)])
    config = small_run(
        write_config(tmp_path), tmp_path / "whole", tokenizer=str(tmp_path / "tokenizer"), context=200, pack="best-fit",
        pack_window=3,
        data=(f"{chats}=3", str(texts)), schedule="constant", export="never", ulysses=2, shuffle=7,
    )  # fmt: skip
    train_on(pool2, config)
    part = replace(config, out=tmp_path / "part")
    train_on(pool2, replace(part, steps=2))
    train(replace(part, ulysses=1))
    whole, resumed = losses_of(config.out), losses_of(part.out)
    assert list(resumed) == [1, 2, 3, 4]
    assert [whole[i] for i in (1, 2)] == [resumed[i] for i in (1, 2)]
    assert list(resumed.values()) == pytest.approx(list(whole.values()), rel=1e-5)
    assert [log["tokens"] for log in log_of(part.out)] == [log["tokens"] for log in log_of(config.out)]
