"""`longspan train` by TRL: its log equals that of TRL's own scripts on one process, and what it refuses."""

from __future__ import annotations

import functools
import json
import math
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml

from longspan.core.errors import LongspanError
from tests.choose import confirming
from tests.pool import RankPool, run_forked
from tests.train.chats import write_rows
from tests.train.training import COMMON, LLAMA, config_of, log_of, losses_of, train, write_config

pytestmark = pytest.mark.versions

pytest.importorskip("trl")

MESHES = {2: {"ring": 2}, 4: {"data": 2, "ulysses": 2}}


def by_trl(method: str, config: Path) -> None:
    """Run TRL's script on one process; GKD, which has none, by its trainer."""
    from importlib import import_module

    if method == "gkd":
        return _gkd(yaml.safe_load(config.read_text()))

    script = import_module(f"trl.scripts.{method}")
    *parsed, rest = script.make_parser().parse_args_and_config(["--config", str(config)], return_remaining_strings=True)
    assert not rest
    script.main(*parsed)


def _gkd(keys: dict[str, Any]) -> None:
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    folder, teacher, (data,) = (
        keys.pop("model_name_or_path"),
        keys.pop("teacher_model_name_or_path"),
        keys.pop("datasets"),
    )
    model, other = (AutoModelForCausalLM.from_pretrained(name) for name in (folder, teacher))
    rows, tokenizer = load_dataset(**data, split="train"), AutoTokenizer.from_pretrained(folder)
    GKDTrainer(model, other, GKDConfig(**keys), train_dataset=rows, processing_class=tokenizer).train()


STEPS = 8
SHORT = {"max_steps": STEPS, "save_steps": STEPS}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "sft": ("sft", {"assistant_only_loss": True, "packing": True, **SHORT}),
    "dpo": ("dpo", {"per_device_train_batch_size": 2, "learning_rate": 3e-4, **SHORT}),
    "gkd": ("gkd", {"lmbda": 0.3, "max_new_tokens": 6, **SHORT}),
}


def taught(toy: Path, method: str) -> dict[str, str]:
    return {"teacher_model_name_or_path": str(toy / "teacher")} if method == "gkd" else {}


@functools.cache
def plain_log(toy: Path, kind: str) -> list[dict[str, Any]]:
    method, changes = KINDS[kind]
    out = toy / f"plain-{kind}"
    by_trl(method, config_of(toy, method, out, **changes, **taught(toy, method)))
    return log_of(out, STEPS)


@pytest.mark.parametrize(("kind", "ranks"), [("sft", 4), ("gkd", 2), *confirming([("dpo", 2)])])
def test_the_log_is_that_of_trl(
    get_pool: Callable[[int], RankPool], toy: Path, kind: str, ranks: int, tmp_path: Path
) -> None:
    method, changes = KINDS[kind]
    mesh = MESHES[ranks]
    rows = changes.get("per_device_train_batch_size", 4) // mesh.get("data", 1)
    options = {**changes, **mesh, "per_device_train_batch_size": rows}
    config = config_of(toy, method, tmp_path / "run", **options, **taught(toy, method))
    get_pool(ranks).run(train, [method, "--config", str(config)], timeout=240)
    expected, found = plain_log(toy, kind), log_of(tmp_path / "run", STEPS)
    assert len(found) == len(expected) == STEPS
    for ours, trl in zip(found, expected, strict=True):
        for key in trl.keys() - {"epoch"}:
            assert math.isclose(ours[key], trl[key], rel_tol=2e-4, abs_tol=2e-4), (key, ours, trl)


def test_random_weights_by_bytes_resume_on_another_mesh(pool2: RankPool, tmp_path: Path) -> None:
    """A config.json and Python's help texts are enough; a run that ended goes on on another mesh as if it had not."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    keys = {
        **COMMON, "model_name_or_path": str(tmp_path), "dataset_name": "pydoc", "packing": True, "save_steps": 3,
        "packing_strategy": "wrapped", "context": "96", "per_device_train_batch_size": 2, "max_steps": 6,
        "output_dir": str(tmp_path / "whole"),
    }  # fmt: skip
    del keys["max_length"]
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(keys))
    pool2.run(train, ["sft", "--config", str(path), "--ulysses", "2"], timeout=240)
    shutil.copytree(tmp_path / "whole" / "checkpoint-3", tmp_path / "cut" / "checkpoint-3")
    cut = ["sft", "--config", str(path), "--output_dir", str(tmp_path / "cut"), "--ring", "2"]
    pool2.run(train, cut, timeout=240)
    whole, resumed = log_of(tmp_path / "whole", 6), log_of(tmp_path / "cut", 6)
    assert [entry["step"] for entry in resumed] == [1, 2, 3, 4, 5, 6]
    for ours, plain in zip(resumed, whole, strict=True):
        assert math.isclose(ours["loss"], plain["loss"], rel_tol=2e-4)
    pool2.run(train, cut, timeout=240)  # there is nothing left to do
    assert log_of(tmp_path / "cut", 6) == resumed and not (tmp_path / "cut" / "checkpoint-7").exists()
    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM.from_pretrained(tmp_path / "cut").num_parameters() > 10_000  # plain transformers


FEATURES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tensor axis": ({}, {"tensor": 2}),
    "elastic": ({"elastic": True, "context": 128}, {"ulysses": 2}),
    "4 bits": (
        {"load_in_4bit": True, "use_peft": True, "lora_r": 4, "lora_dropout": 0.0, "lora_target_modules": "all-linear"},
        {"ring": 2},
    ),
    "a stream, profiled": ({"streaming": True, "packing": True}, {"ulysses": 2, "profile": 2}),
    "muon": ({"optim": "muon"}, {"ring": 2}),
    "states of 4 bits": ({"optim": "adamw_torch_4bit"}, {"ring": 2}),
    "frozen, bf16": ({"freeze": ["*embed*", "*layers.0*"], "bf16": True}, {"ring": 2}),
}
"""Keys of a run on one process, and what is added on two ranks."""


def _alone(argv: list[str]) -> None:
    from longspan.train.command import run

    with torch.compiler.set_stance("force_eager"):  # torchao's optimizers compile their step, which takes long
        assert run(argv) == 0


CONFIRMING = ("tensor axis", "elastic")  # the tests of trainers show the same


def _eagerly(argv: list[str]) -> None:
    with torch.compiler.set_stance("force_eager"):
        train(argv)


@pytest.mark.parametrize("name", [*(x for x in FEATURES if x not in CONFIRMING), *confirming(CONFIRMING)])
def test_features_train_as_on_one_process(pool2: RankPool, toy: Path, name: str, tmp_path: Path) -> None:
    if name == "4 bits":
        pytest.importorskip("bitsandbytes")
    if name == "states of 4 bits":
        pytest.importorskip("torchao.optim")
    changes, mesh = FEATURES[name]
    changes = {"max_steps": 4, "save_steps": 4, **changes}
    alone, both = (config_of(toy, "sft", tmp_path / out, **changes, **add) for out, add in (("a", {}), ("b", mesh)))
    run_forked(_alone, ["sft", "--config", str(alone)])
    pool2.run(_eagerly, ["sft", "--config", str(both)], timeout=240)
    tolerance = 2e-2 if name in ("frozen, bf16", "muon") else 2e-4  # Muon orthogonalises in bf16
    losses = losses_of(tmp_path / "a", 4)
    assert len(losses) == 4 and losses_of(tmp_path / "b", 4) == pytest.approx(losses, rel=tolerance)
    assert (tmp_path / "b" / "profile" / "step-2.trace.json").exists() == ("profile" in mesh)


@pytest.mark.parametrize("method", ["sft", "reward"])
def test_lora_is_exported_for_peft(pool2: RankPool, toy: Path, method: str, tmp_path: Path) -> None:
    from peft import AutoPeftModelForCausalLM, AutoPeftModelForSequenceClassification

    changes = {"use_peft": True, "lora_r": 4, "lora_target_modules": ["q_proj"], "lora_dropout": 0.0, "max_steps": 2}
    if method == "reward":
        changes["lora_task_type"] = "SEQ_CLS"
    config = config_of(toy, method, tmp_path / "run", **changes)
    pool2.run(train, [method, "--config", str(config), "--ulysses", "2"], timeout=240)
    auto = AutoPeftModelForSequenceClassification if method == "reward" else AutoPeftModelForCausalLM
    options = {"num_labels": 1} if method == "reward" else {}
    names = [name for name, _ in auto.from_pretrained(tmp_path / "run", **options).named_parameters()]
    assert sum("lora_A" in name for name in names) == 2


def test_each_eval_dataset_has_its_own_loss(pool2: RankPool, toy: Path, tmp_path: Path) -> None:
    changes = {
        "eval_strategy": "steps", "eval_steps": 2, "max_steps": 4, "save_steps": 2, "load_best_model_at_end": True,
        "metric_for_best_model": "eval_held-out_loss",
        "eval_datasets": [str(toy / "chats.jsonl"), {"path": str(toy / "held-out.jsonl")}],
    }  # fmt: skip
    shutil.copy(toy / "chats.jsonl", toy / "held-out.jsonl")
    config = config_of(toy, "sft", tmp_path / "run", **changes)
    pool2.run(train, ["sft", "--config", str(config), "--ring", "2"], timeout=240)
    state = json.loads((tmp_path / "run" / "checkpoint-4" / "trainer_state.json").read_text())
    evaluated = [entry for entry in state["log_history"] if "eval_chats_loss" in entry or "eval_held-out_loss" in entry]
    assert len(evaluated) == 4
    assert all(any("_loss_to_" in key for key in entry) for entry in evaluated)  # by position in the context
    assert state["best_model_checkpoint"].endswith("checkpoint-4")


# --- what a row is


def shaped_rows(rows: list[dict[str, Any]], method: str = "sft", template: bool = True) -> list[dict[str, Any]]:
    from datasets import Dataset

    from longspan.train.datasets import shaped

    return list(shaped(Dataset.from_list(rows), method, "text", template, "rows.jsonl"))


def test_a_text_file_is_a_row(tmp_path: Path) -> None:
    from longspan.hf.model.prompts import open_dataset

    texts = ["a line\nand another", "one\n\nafter an empty one"]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    assert open_dataset(str(tmp_path))["text"][:] == texts
    assert [row["text"] for row in open_dataset(str(tmp_path / "0.txt"), streaming=True)] == texts[:1]


def test_a_file_has_the_split_train_alone(toy: Path) -> None:
    """Else a run that asks for the split test would be evaluated on what it is trained on."""
    from longspan.hf.model.prompts import open_dataset

    for source in (toy / "chats.jsonl", toy / "texts", toy / "texts" / "0.txt", "pydoc"):
        with pytest.raises(LongspanError, match="has no split 'test': .* give `eval_datasets`"):
            open_dataset(str(source), split="test")
        with pytest.raises(LongspanError, match="'main' chooses a part of a dataset, and .* has none"):
            open_dataset(str(source), "main")
    assert len(open_dataset(str(toy / "chats.jsonl"), split="train[:90%]")) == 54


def test_a_signal_after_the_last_step_stops_all_ranks(pool2: RankPool, toy: Path, tmp_path: Path) -> None:
    """Although it reached only one of them; the other one would wait for it in the export."""
    config = config_of(toy, "sft", tmp_path / "run", max_steps=2, save_steps=2, ulysses=2)
    assert pool2.run(_stopped_late, ["sft", "--config", str(config)], timeout=240) == [15, 15]


def _stopped_late(argv: list[str]) -> int:
    import transformers

    from longspan.ranks.launch import Stopped

    finalize = transformers.Trainer._finalize_training

    def late(trainer: Any, *args: Any) -> Any:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return finalize(trainer, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.Trainer, "_finalize_training", late)
        with pytest.raises(Stopped) as stopped:
            train(argv)
    return stopped.value.signum


QUESTION, ANSWER = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": [QUESTION, ANSWER], "prompt_id": 3}, {"messages": [QUESTION, ANSWER]}),
        (
            {"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So."}], "id": "x"},
            {"messages": [QUESTION, ANSWER]},
        ),
        (
            {"instruction": "Add.", "input": "1 and 1", "output": "2"},
            {
                "prompt": [{"role": "user", "content": "Add.\n\n1 and 1"}],
                "completion": [{"role": "assistant", "content": "2"}],
            },
        ),
        ({"prompt": "1 + 1 =", "completion": " 2", "more": 0}, {"prompt": "1 + 1 =", "completion": " 2"}),
        ({"text": "It was.", "url": "x"}, {"text": "It was."}),
    ],
    ids=["chat", "ShareGPT", "Alpaca", "completion", "text"],
)
def test_rows_get_the_columns_of_trl(row: dict[str, Any], expected: dict[str, Any]) -> None:
    assert shaped_rows([row]) == [expected]


@pytest.mark.parametrize(
    ("rows", "method", "match"),
    [
        ([{"body": "x"}], "sft", "rows.jsonl has the columns body, and no .*dataset_text_field"),
        ([{"text": "x", "messages": [QUESTION]}], "sft", "the columns of more than one kind .*columns: "),
        ([{"text": 3}], "sft", "the column 'text' holds int, not text"),
        ([{"conversations": [{"from": "bot", "value": "x"}]}], "sft", "row 0: a turn of `conversations` has the role"),
        ([{"instruction": "x", "output": ""}], "sft", "row 0: `instruction` and `output` must be texts"),
        ([{"text": "x"}], "dpo", "no `chosen` and `rejected`, which dpo needs; it has text"),
        ([{"prompt": "x", "completion": "y"}], "kto", "no `label`, which kto needs; it has prompt, completion"),
        ([{"text": "x"}], "gkd", "has the columns text, and no .*chats: messages"),
    ],
)
def test_rows_that_would_be_trained_wrongly_are_refused(rows: Any, method: str, match: str) -> None:
    with pytest.raises(LongspanError, match=match):
        shaped_rows(rows, method)


# --- the command


def test_shares_of_a_mixture_are_positive_and_large_enough_for_a_row() -> None:
    from datasets import Dataset

    from longspan.train.datasets import Source, _mixed

    rows = Dataset.from_list([{"text": "a"}] * 4)
    sources = [Source("one", rows), Source("two", rows)]
    for fractions in ([0.0, 0.0], [-1.0, 2.0]):
        with pytest.raises(LongspanError, match="`fraction` of one is .*must be more than 0"):
            _mixed(sources, fractions, False, 0)
    with pytest.raises(LongspanError, match="`fraction` gives one no row of its 4"):
        _mixed(sources, [0.01, 0.99], False, 0)
    assert len(_mixed(sources, [0.25, 0.75], False, 0)) == 5


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (
            {"--resume_from_checkpoint": "no/checkpoint-3/"},
            "checkpoint no/checkpoint-3 does not exist",
        ),
        ({"--ulises": "2"}, "there is no key --ulises; did you mean --ulysses"),
        ({"--max_steps": "many"}, "max_steps: invalid int value: 'many'"),
        ({"--memory": "checkpoint=full"}, "memory: there is no key 'checkpoint'; did you mean 'checkpointing'"),
        ({"--context": "4m", "--memory": "fastest"}, "positions"),
        ({"--model_name_or_path": "no/such/folder"}, "model_name_or_path no/such/folder"),
        (
            {"--model_name_or_path": "a/model", "--model_revision": "v9"},
            "model_revision: v9 of a/model cannot be fetched",
        ),
        ({"--streaming": "true", "--max_steps": "-1"}, "max_steps"),
        ({"--dataset_name": "pydoc"}, "either `dataset_name` .* got both"),
        ({"--timeout": "-1"}, "timeout"),
        ({"--profile": "0"}, "profile"),
        (
            {"--attn_implementation": "kernels-community/flash-attn2"},
            "attn_implementation: .* is no kernel of longspan",
        ),
        ({"--attn_implementation": "sdpa", "--kernel": "flash"}, "are different kernels"),
        ({"--deepspeed": "zero.json"}, "deepspeed: 'zero.json' does not work with longspan train"),
        ({"--optim": "adam"}, "optim: invalid choice: 'adam'; did you mean 'adamw"),
        ({"--early_stopping_patience": "3"}, "needs `load_best_model_at_end: true`"),
        ({"--elastic": "true", "--packing": "true"}, "elastic: it packs samples itself"),
        ({"--test_split_size": "1.5"}, "test_split_size: test_size=1.5 should be either"),
        ({"--test_split_size": "0.5", "--streaming": "true"}, "test_split_size: a stream cannot be split"),
        ({"--test_split_size": "0.5", "--eval_datasets": "pydoc"}, "test_split_size: it holds rows out"),
        ({"--dataset_config": "main"}, "dataset_config: it has no effect with `datasets`; give `name` in its entry"),
        ({"--freeze": "nothing*"}, "freeze: nothing. is the name of no weight"),
    ],
)
def test_bad_input_is_refused_before_a_rank_starts(
    toy: Path, changes: dict[str, str], match: str, tmp_path: Path
) -> None:
    from longspan.train.command import run

    config = config_of(toy, "sft", tmp_path / "run")
    argv = ["sft", "--config", str(config), *(text for pair in changes.items() for text in pair)]
    with pytest.raises(LongspanError, match=match):
        run(argv)


def test_a_teacher_is_checked_before_a_rank_starts(toy: Path, tmp_path: Path) -> None:
    from longspan.train.command import run

    write_config(tmp_path, vocab_size=400)
    config = str(config_of(toy, "gkd", tmp_path / "run"))
    for given, match in (
        ([], "train needs `teacher_model_name_or_path`"),
        ([str(tmp_path)], "its vocabulary has 400 tokens and the model's 384"),
        ([str(toy / "teacher"), "--context", "400"], "528"),  # with 128 tokens that are generated
        ([str(toy / "teacher"), "--packing", "true"], "packing: gkd trains on whole rows"),
    ):
        with pytest.raises(LongspanError, match=match):
            run(["gkd", "--config", config, *(["--teacher_model_name_or_path"] * bool(given)), *given])


def test_every_method_has_its_classes_in_trl() -> None:
    from longspan.train import METHODS
    from longspan.train.arguments import class_of, parser_of

    for method in METHODS:
        assert class_of(method, "Trainer") and parser_of(method).prog == f"longspan train {method}"


def test_a_dry_run_says_what_would_run(toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from longspan.train.command import run

    config = config_of(toy, "sft", tmp_path / "run", context="max", rank_memory=2.0)
    assert run(["sft", "--config", str(config), "--ulysses", "2", "--dry_run"]) == 0
    out = capsys.readouterr().out
    assert "2.00 GB for a rank" in out and "context: 512 tokens" in out  # the end of the model's positions
    assert "nothing is trained or written" in out
    assert not (tmp_path / "run").exists()


def test_files_of_a_folder_have_the_same_columns(tmp_path: Path) -> None:
    from longspan.hf.model.prompts import naming, open_dataset

    write_rows(tmp_path / "chats.jsonl", [{"messages": [QUESTION, ANSWER]}])
    write_rows(tmp_path / "texts.jsonl", [{"text": "a text"}])
    with pytest.raises(LongspanError, match="different columns; give files of one kind"), naming(str(tmp_path)):
        open_dataset(str(tmp_path))


def test_a_bad_row_is_named(toy: Path, tmp_path: Path) -> None:
    """TRL tokenises; the error that it raises says neither file nor row."""
    from longspan.train.command import run

    rows = [{"messages": [QUESTION, ANSWER]}, {"messages": [QUESTION]}]
    path = write_rows(tmp_path / "chats.jsonl", rows)
    config = config_of(toy, "sft", tmp_path / "run", datasets=[{"path": str(path)}], assistant_only_loss=True)
    with pytest.raises(LongspanError, match=r"chats.jsonl, row 1: it has no token of the assistant"):
        run(["sft", "--config", str(config)])
    path.write_text('{"messages": []}\n{"messages": \n')
    with pytest.raises(LongspanError, match=r"chats.jsonl cannot be read: .*row 1"):
        run(["sft", "--config", str(config)])


def test_a_bad_row_of_a_stream_is_named(toy: Path, tmp_path: Path) -> None:
    """It is tokenised in training."""
    from longspan.train.command import run

    path = write_rows(tmp_path / "chats.jsonl", [{"messages": [QUESTION, ANSWER]}] * 2 + [{"messages": [QUESTION]}])
    data = {"datasets": [{"path": str(path)}], "streaming": True, "assistant_only_loss": True, "max_steps": 2}
    with pytest.raises(LongspanError, match=r"chats.jsonl, row 2: it has no token of the assistant"):
        run(["sft", "--config", str(config_of(toy, "sft", tmp_path / "run", **data))])


def test_a_new_run_is_not_mixed_with_an_older_one(toy: Path, tmp_path: Path) -> None:
    """A restart would resume the checkpoint of the most steps."""
    from longspan.train.command import run

    (tmp_path / "run" / "checkpoint-90").mkdir(parents=True)
    config = config_of(toy, "sft", tmp_path / "run", resume_from_checkpoint="false")
    with pytest.raises(LongspanError, match="checkpoint-90 is of an older run"):
        run(["sft", "--config", str(config), "--ring", "2", "--max_restarts", "1"])


def test_preview_shows_what_has_a_loss(toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from longspan.train.command import run

    config = config_of(toy, "sft", tmp_path / "run", assistant_only_loss=True)
    run(["sft", "--config", str(config), "--preview", "1"])
    out = capsys.readouterr().out
    assert "⟦It is the one" in out and "⟦What" not in out


def test_settings_must_be_equal_on_all_ranks(pool2: RankPool, toy: Path, tmp_path: Path) -> None:
    config = config_of(toy, "sft", tmp_path / "run", ulysses=2)
    (error,) = set(pool2.run(_train_differently, ["sft", "--config", str(config)], timeout=240))
    assert "learning_rate is 0.1 on rank 1, 0.003 on rank 0" in error


def _train_differently(argv: list[str]) -> str:
    import torch.distributed as dist

    try:
        train([*argv, *(["--learning_rate", "0.1"] if dist.get_rank() == 1 else [])])
    except LongspanError as error:
        return str(error)
    return "accepted"


def test_a_bad_row_is_looked_for_in_the_newest_rows_of_a_stream() -> None:
    """It may be endless: an error in the arguments would never be reported."""
    import itertools
    from types import SimpleNamespace

    from datasets import IterableDataset

    from longspan.train.datasets import Data, _remembering, find_row

    stream = IterableDataset.from_generator(lambda: ({"text": str(at)} for at in itertools.count()))
    nothing: Any = SimpleNamespace(training=None)
    assert find_row(Data(stream, None, (_remembering("endless", stream),)), nothing, None) is None


def test_ranks_compare_what_was_planned() -> None:
    """Machines of other memory may be planned otherwise."""
    from types import SimpleNamespace

    from transformers import LlamaConfig

    from longspan.core.formatting import differences
    from longspan.core.memory import FASTEST, LONGEST
    from longspan.train.command import _facts

    ranks = [SimpleNamespace(config=LlamaConfig(), context=64, memory=memory) for memory in (FASTEST, LONGEST)]
    facts: list[Any] = [_facts(SimpleNamespace(resolved=resolved)) for resolved in ranks]  # type: ignore[arg-type]
    (found,) = differences([{key: str(value) for key, value in of_rank.items()} for of_rank in facts], [0, 1])
    assert found.startswith("memory (if the planner chose it, give rank_memory) is ")
