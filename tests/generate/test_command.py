"""`longspan generate` and `longspan score`: results equal those of one process."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import runpy
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer, LlamaConfig, Qwen3NextConfig

from longspan import cli
from longspan.core.errors import LongspanError
from longspan.core.formatting import size
from longspan.generate.config import GenerateConfig
from longspan.generate.fit import choose_weights
from longspan.generate.job import format_report, open_fitting_prompt
from longspan.generate.rank import TextStream
from longspan.generate.score import ScoreConfig, open_text
from longspan.plan.from_model import read_model
from longspan.plan.generation import check_fits, check_score_fits, peak_items, scoring_peak_items
from longspan.plan.hardware import read_hardware
from longspan.plan.job import Job
from longspan.verify import VerifyConfig
from longspan.verify.job import worker as verify_worker
from tests.command import ForkedLauncher
from tests.flags import make, replace
from tests.generate.generating import run_generate, run_score
from tests.pool import RankPool
from tests.train.chats import make_tokenizer
from tests.train.training import LLAMA

pytestmark = pytest.mark.versions

ROOT = Path(__file__).parents[2]
PROMPT = "A ring of ranks – each holds a part of what was read, and none holds all of it. " * 2
NEW = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model over bytes that never ends its text, in a folder without a tokenizer."""
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(5)
    config = LlamaConfig(
        **LLAMA | {"vocab_size": 260, "eos_token_id": 259, "max_position_embeddings": 4096, "initializer_range": 0.2}
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def _config(folder: Path, **more: Any) -> GenerateConfig:
    return make(GenerateConfig, **{"model": str(folder), "prompt": PROMPT, "max_new_tokens": NEW, "json": True, **more})


def _plain(folder: Path, **more: Any) -> list[int]:
    """Return the ids that transformers generates on one process."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([ByT5Tokenizer()(PROMPT, add_special_tokens=False)["input_ids"]])
    torch.manual_seed(0)
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": 259, "pad_token_id": 0, **more}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, ids.shape[1] :].tolist()


def test_a_second_question_reuses_the_saved_cache(pool2: RankPool, tmp_path: Path) -> None:
    """The example's model finds the answers; the second run, on another mesh, uses the cache that the first saved."""
    ask = runpy.run_path(str(ROOT / "examples" / "ask.py"))
    ask["look_up"]().save_pretrained(tmp_path / "hf")
    book = ask["book"](0)
    (tmp_path / "book.txt").write_text(book)
    where: dict[str, Any] = {"model": str(tmp_path / "hf"), "file": tmp_path / "book.txt"}
    config = make(GenerateConfig, **where, cache_dir=tmp_path / "kept", json=True, prefill_chunk=200)
    for town, mesh, reused in (
        ("Oslo", {"ulysses": 2, "weights": "sharded"}, 0),
        ("Paris", {"ring": 2, "weights": "replicated"}, len(book)),
    ):
        asked = replace(config, question=f"Who lives in {town}?", **mesh)  # type: ignore[arg-type]
        report = pool2.run(run_generate, asked)[0]
        assert report["text"].strip() == re.findall(rf"{town}\? (.*)", book)[0]
        assert report["ended_by"] == "the model"
        assert abs(report["reused_tokens"] - reused) < 3  # the line ends between text and question
    (kept,) = (tmp_path / "kept").iterdir()
    others: tuple[dict[str, Any], ...] = ({"question": "Who?"}, {"question": "Who?", "cache": "int8"}, {})
    assert [open_fitting_prompt(replace(config, **more)).key == kept.name for more in others] == [True, False, False]


def test_adapters_are_generated_scored_and_verified(
    folder: Path, pool2: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Results equal PEFT's in one process; the tokenizer is the base model's (bytes)."""
    from peft import LoraConfig, PeftModel, get_peft_model

    torch.manual_seed(3)
    lora = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    get_peft_model(AutoModelForCausalLM.from_pretrained(folder), lora).save_pretrained(tmp_path)
    plain: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), str(tmp_path)).eval()
    ids = torch.tensor([ByT5Tokenizer()(PROMPT, add_special_tokens=False)["input_ids"]])
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": 259, "pad_token_id": 0}
    greedy = plain.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)[0, ids.shape[1] :].tolist()
    assert greedy != _plain(folder)
    for mesh in ({"ulysses": 2, "weights": "sharded"}, {"ring": 2, "weights": "replicated"}):
        assert pool2.run(run_generate, _config(tmp_path, temperature=0.0, **mesh))[0]["ids"] == greedy
    assert cli.main(["score", "--model", str(tmp_path), "--text", PROMPT, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    with torch.no_grad():
        loss = float(plain(input_ids=ids, labels=ids).loss)
    assert -found["mean_logprob"] == pytest.approx(loss, rel=1e-5)
    report = pool2.run(verify_worker, make(VerifyConfig, model=str(tmp_path), context=64, ulysses=2, dtype="fp32"))[0]
    assert report.passed and any("lora" in check.name for check in report.checks)


def _text(ids: list[int]) -> str:
    return str(ByT5Tokenizer().decode(ids, skip_special_tokens=True))


def test_text_equals_one_process(
    folder: Path, pool2: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    greedy = _plain(folder)
    out = tmp_path / "new" / "text.txt"
    assert cli.main([*_flags(folder), "--temperature", "0", "--out", str(out)]) == 0
    said = capsys.readouterr()
    assert said.out == _text(greedy).removesuffix("\n") + "\n"
    assert out.read_bytes().decode() == _text(greedy)
    assert f"new     {NEW} tokens, ended by --max-new-tokens" in said.err
    assert "first token after" in said.err and "planned" in said.err

    sampled = _plain(folder, do_sample=True, temperature=0.7, top_k=9)
    drawn = {"temperature": 0.7, "top_k": 9}
    for mesh in (
        {"ulysses": 2, "weights": "sharded", "prefill_chunk": 50},
        {"ring": 2, "weights": "replicated", "cache": "exact,offload=host"},
        {"tensor": 2, "tensor_style": "megatron-sp", "prefill_chunk": 50},
    ):  # fmt: skip
        for report in pool2.run(run_generate, _config(folder, temperature=0.0, **mesh)):
            assert report["ids"] == greedy and report["text"] == _text(greedy)
            assert report["prompt_tokens"] == len(PROMPT.encode())
            assert report["cached_tokens"] == report["prompt_tokens"] + NEW - 1
        if "cache" in mesh:
            assert f"{size(max(report['device_cache_bytes']))} of it at once on the device" in format_report(report)
        if "ring" in mesh:  # each rank has all KV heads of some tokens
            assert sum(report["cache_bytes"]) == report["cached_tokens"] * 2 * 2 * 2 * 8 * 4
    assert pool2.run(run_generate, _config(folder, **drawn, ulysses=2, prefill_chunk=50))[0]["ids"] == sampled


def test_a_model_with_recurrent_layers(pool2: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Qwen3-Next, on two meshes; the second reads the text from the first one's saved cache."""
    torch.manual_seed(5)
    layers = {"layer_types": ["linear_attention", "full_attention"], "num_experts": 4, "num_experts_per_tok": 2}
    sizes = {"head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "moe_intermediate_size": 16}
    ends = {"vocab_size": 260, "eos_token_id": 259, "initializer_range": 0.2}
    config = Qwen3NextConfig(**LLAMA | layers | sizes | ends)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "hf")
    greedy = _plain(tmp_path / "hf")
    kept = {"cache_dir": tmp_path / "kept"}
    for mesh, reused in (
        ({"ulysses": 2, **kept}, False),
        ({"ring": 2, **kept}, True),
        ({"ring": 2, "cache": "exact,offload=host", "prefill_chunk": 50}, False),
    ):
        for report in pool2.run(run_generate, _config(tmp_path / "hf", temperature=0.0, **mesh)):
            assert report["ids"] == greedy and (report["reused_tokens"] > 0) == reused
            assert report["state_bytes"] > 0
    assert f"{size(report['state_bytes'])} of it states of recurrent layers" in format_report(report)
    assert cli.main([*_flags(tmp_path / "hf"), "--temperature", "0", "--cuda-graph"]) == 2
    assert "is recurrent" in capsys.readouterr().err


def _flags(folder: Path, command: str = "generate") -> list[str]:
    return [command, "--model", str(folder), "--prompt", PROMPT, "--max-new-tokens", str(NEW)]


def test_a_prompt_comes_from_stdin_a_file_or_a_chat(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    book = tmp_path / "book.txt"
    book.write_text(PROMPT)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(PROMPT.encode())))
    with_bytes = ByT5Tokenizer()(PROMPT.rstrip() + "\n\nWho?", add_special_tokens=False)["input_ids"]
    for given in ({"file": book}, {}):
        found = open_fitting_prompt(_config(folder, **{"prompt": None, "question": "Who?", **given}))
        assert found.ids.tolist() == with_bytes
    tokenizer = ByT5Tokenizer()
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}>>"
    tokenizer.save_pretrained(tmp_path / "chat")
    chat = open_fitting_prompt(_config(folder, tokenizer=str(tmp_path / "chat"), prompt="x", question="Who?"))
    assert _text(chat.ids.tolist()) == "<user>x\n\nWho?>>"
    plain = open_fitting_prompt(
        _config(folder, tokenizer=str(tmp_path / "chat"), prompt="x", question="Who?", template="none")
    )
    assert _text(plain.ids.tolist()) == "x\n\nWho?"


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that ends its turns, as the template does, and whose generation_config.json has another end."""
    path = tmp_path_factory.mktemp("chat")
    torch.manual_seed(5)
    config = LlamaConfig(**LLAMA | {"vocab_size": 384, "eos_token_id": 0, "initializer_range": 0.2})
    model: Any = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        model.lm_head.weight[2] *= 4
    model.save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path


def _asked(folder: Path, **more: Any) -> GenerateConfig:
    return _config(folder, **{"prompt": None, "question": "What is the other?", "temperature": 0.0, **more})


def test_a_question_is_answered_in_the_chat_template(chat: Path, pool2: RankPool) -> None:
    """Alone, on every mesh: the tokens of transformers, until the template's end of a turn."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(chat), AutoTokenizer.from_pretrained(chat)
    messages = [{"role": "user", "content": "What is the other?"}]
    made = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    found = model.generate(**made, max_new_tokens=NEW, do_sample=False, eos_token_id=[0, 2], pad_token_id=0)[0]
    expected = found[made["input_ids"].shape[1] :].tolist()
    assert expected[-1] == 2 and 1 < len(expected) < NEW
    for mesh in ({"ring": 2}, {"ulysses": 2}):
        for report in pool2.run(run_generate, _asked(chat, **mesh)):
            assert report["ids"] == expected and report["ended_by"] == "the model"
            assert report["prompt_tokens"] == made["input_ids"].shape[1]


def test_a_question_needs_no_text(chat: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal, with an empty stdin, without one, and under torchrun, which shares none."""
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    asked = "<|im_start|>user\nWhat is the other?<|im_end|>\n<|im_start|>assistant\n"
    tokenizer = make_tokenizer()
    for stdin in (terminal, io.TextIOWrapper(io.BytesIO()), None):
        monkeypatch.setattr("sys.stdin", stdin)
        assert tokenizer.decode(open_fitting_prompt(_asked(chat)).ids) == asked
    with pytest.raises(LongspanError, match="there is no text; give --prompt TEXT or --file FILE, or pipe it in"):
        open_fitting_prompt(_asked(chat, question=None))
    with monkeypatch.context() as torchrun:
        torchrun.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"of another")))
        torchrun.setattr("longspan.ranks.launch.is_started_rank", lambda: True)
        assert tokenizer.decode(open_fitting_prompt(_asked(chat)).ids) == asked
    with pytest.raises(LongspanError, match="--cache-dir saves .*before the question, and there is nothing"):
        open_fitting_prompt(_asked(chat, cache_dir=tmp_path / "kept"))
    make_tokenizer("{{ raise_exception('no chats here') }}").save_pretrained(tmp_path / "other")
    with pytest.raises(LongspanError, match="refuses the chat: no chats here"):
        open_fitting_prompt(_asked(chat, tokenizer=str(tmp_path / "other")))


def test_characters_of_several_tokens_are_written_whole() -> None:
    out, ids = io.StringIO(), [b + 3 for b in "é – 日本".encode()]
    stream = TextStream(ByT5Tokenizer(), [out])
    stream.put(torch.tensor([[7, 8]]))  # the prompt
    for token in ids:
        stream.put(torch.tensor([token]))
        assert "\ufffd" not in out.getvalue()
    stream.end()
    assert out.getvalue() == stream.text == "é – 日本" and stream.ids == ids and len(stream.times) == 2


def test_scores_equal_one_process(folder: Path, pool2: RankPool, tmp_path: Path) -> None:
    ids = torch.tensor([ByT5Tokenizer()(PROMPT, add_special_tokens=False)["input_ids"]])
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder).double()(ids).logits[0, :-1]
    expected = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    for mesh, name in (
        ({"ring": 2}, "a.npz"),
        ({"ulysses": 2, "weights": "replicated"}, "a.jsonl"),
        ({"ring": 2}, "a.parquet"),
    ):
        out = tmp_path / name
        report = pool2.run(run_score, make(ScoreConfig, model=str(folder), text=PROMPT, out=out, **mesh))[1]
        if out.suffix == ".npz":
            written = np.load(out)
            found_ids, found = written["ids"].tolist(), written["logprobs"].tolist()
            assert np.isnan(found[0])
        elif out.suffix == ".jsonl":
            rows = [json.loads(line) for line in out.read_text().splitlines()]
            found_ids, found = [row["id"] for row in rows], [row["logprob"] for row in rows]
            assert found[0] is None
        else:
            import pyarrow.parquet

            table = pyarrow.parquet.read_table(out)
            found_ids, found = table["id"].to_pylist(), table["logprob"].to_pylist()
        assert found_ids == ids[0].tolist()
        torch.testing.assert_close(torch.tensor(found[1:], dtype=torch.float64), expected, rtol=1e-5, atol=1e-5)
        assert report["tokens"] == ids.shape[1] and report["scored_tokens"] == ids.shape[1] - 1
        assert report["mean_logprob"] == pytest.approx(float(expected.mean()), rel=1e-6)
        assert report["perplexity"] == pytest.approx(float((-expected.mean()).exp()), rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": ""}, "--model is missing"),
        ({"file": Path("x")}, "--prompt and --file both give a text"),
        ({"temperature": 0, "top_k": 3}, "--temperature 0 does not sample"),
        ({"question": " "}, "--question is empty"),
        ({"top_p": 1.5}, "--top-p must be at most 1"),
        ({"out": Path("/")}, "--out / is a folder"),
    ],
)
def test_invalid_flags_are_refused(folder: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LongspanError, match=message):
        _config(folder, **changes).check()


def test_too_long_texts_are_refused_before_loading(folder: Path) -> None:
    said = r"--max-new-tokens 4000 and .* 4,096 positions .* give --max-new-tokens \d+ or less.*rope_parameters: "
    with pytest.raises(LongspanError, match=said):
        open_fitting_prompt(_config(folder, max_new_tokens=4000))
    with pytest.raises(LongspanError, match=r"the text has [\d,]+ tokens, .* 4,096 positions .*factor: 4.0"):
        open_fitting_prompt(_config(folder, prompt=PROMPT * 80))
    with pytest.raises(LongspanError, match="--template chat: the tokenizer bytes has no chat template"):
        open_fitting_prompt(_config(folder, template="chat"))
    with pytest.raises(LongspanError, match=r"do not fit on one rank of .*Item by item: .*ranks of this kind suffice"):
        open_fitting_prompt(_config(folder, rank_memory=0.00027))
    with pytest.raises(
        LongspanError, match=r"do not fit on one rank of .*Item by item: .*logits.*tokens fit \(--max-tok"
    ):
        open_text(make(ScoreConfig, model=str(folder), text=PROMPT, rank_memory=0.0006))
    with pytest.raises(LongspanError, match=r"the text has 1 tokens; score needs at least 2"):
        open_text(make(ScoreConfig, model=str(folder), text="a"))


def test_the_suggested_mesh_fits_and_smaller_ones_do_not() -> None:
    model, hardware = read_model("llama-3.1-8b"), read_hardware("a100-80gb")
    job, chunk = Job(1_500_000, mode="prefill", weight_sharding=False), 8192
    with pytest.raises(LongspanError) as refused:
        check_fits(model, job, hardware, chunk)
    said = str(refused.value)
    assert "1,500,000 tokens do not fit on one rank" in said and "kv_cache 196.6 GB" in said
    assert "4 ranks of this kind suffice: --ring 1 --ulysses 4 with FSDP" in said
    sharded = dataclasses.replace(job, weight_sharding=True)
    check_fits(model, sharded.on(ulysses=4), hardware, chunk)
    assert sum(peak_items(model, sharded.on(ring=2), hardware, chunk).values()) > hardware.memory_bytes
    longest = int(said.split(" tokens fit")[0].split()[-1].replace(",", ""))
    check_fits(model, dataclasses.replace(job, context=longest), hardware, chunk)
    with pytest.raises(LongspanError):
        check_fits(model, dataclasses.replace(job, context=longest + 1), hardware, chunk)

    with pytest.raises(LongspanError) as refused:
        check_score_fits(model, job, hardware)
    ranks = int(str(refused.value).split(" ranks of this kind suffice: --ring 1")[0].split()[-1])
    check_score_fits(model, sharded.on(ulysses=ranks), hardware)
    items = scoring_peak_items(model, job, hardware)
    assert items["kv_cache"] == 0 and items["mlp"] >= 2 * 2 * 14336 * job.context  # all tokens at once, in bf16
    assert sum(items.values()) > hardware.memory_bytes


def test_weights_are_replicated_where_they_fit_else_on_a_tensor_axis() -> None:
    llama = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128256, dtype="bfloat16",
    )  # fmt: skip

    def chosen(gb: float, **more: Any) -> tuple[str, str, str | None]:
        config, reason = choose_weights(make(GenerateConfig, model="x", rank_memory=gb, **more), llama, 8000)
        return config.weights, str(config.parallel), reason

    assert chosen(40, ulysses=4) == (
        "replicated",
        "ulysses=4",
        "replicated, as they fit; nothing is gathered for a token",
    )
    weights, mesh, reason = chosen(12, ulysses=4, ring=2)
    assert (weights, mesh) == ("replicated", "ring=2 tensor=4")
    assert reason is not None and re.fullmatch(
        r"replicated with ring=2 tensor=4 instead of ring=2 ulysses=4, with ring=2 ulysses=4 they do not "
        r"fit \(\d+\.\d\d of 12.00 GB per rank\); nothing is gathered for a token",
        reason,
    )
    weights, mesh, reason = chosen(12, ring=4)
    assert (weights, mesh) == ("sharded", "ring=4")
    assert reason is not None and reason.startswith("sharded, every token gathers them: replicated with ring=4 they")
    assert chosen(1, ulysses=4)[:2] == ("sharded", "ulysses=4")
    assert chosen(1, ulysses=4, weights="replicated") == ("replicated", "ulysses=4", None)
    assert chosen(40) == ("auto", "one rank", None)


@pytest.mark.launcher
def test_ctrl_c_ends_all_ranks_and_keeps_the_text(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "text.txt"
    more = ["3000", "--temperature", "0", "--ring", "2", "--weights", "replicated", "--out", str(out)]
    process = ForkedLauncher(tmp_path, cli.main, [*_flags(folder)[:-1], *more])
    deadline = time.monotonic() + 200
    while not (out.exists() and len(out.read_bytes()) > 20) and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.interrupt()
    shown, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert said.endswith("longspan: stopped by SIGINT\n")
    shorter, longer = sorted((shown.rstrip("\n"), out.read_bytes().decode().rstrip("\n")), key=len)
    assert longer.startswith(shorter)  # the signal may come between the two writes of a word
    assert out.read_bytes().decode().startswith(_text(_plain(folder))[:10])
