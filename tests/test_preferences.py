"""Preferences: rows of two answers, and their DPO by `longspan train`."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from longspan.core.sections import make, replace
from longspan.data import Tokenizer
from longspan.data.tokenizer import answers_of, common_prompt
from longspan.train import TrainConfig
from longspan.train.inputs import open_local
from longspan.train.old_preview import preview
from longspan.train.old_resolve import reference_bytes, resolve_memory
from tests.chats import CHATML, make_tokenizer, write_rows
from tests.choose import confirming
from tests.pool import RankPool
from tests.training import LLAMA, log_of, refused, train, train_on

OPTIMIZER = {"lr": 3e-3, "weight_decay": 0.1, "betas": (0.9, 0.95), "clip": 1.0}
LORA = {"lora": 4, "lora_targets": ("q_proj", "v_proj", "down_proj")}


def rows(count: int) -> list[dict[str, Any]]:
    """Prompts of a chat with two answers, whose lengths vary."""
    made = []
    for n in range(count):
        prompt = [{"role": "user", "content": f"What is the {n}?" + " The other." * (n % 5)}]
        answers = [f"It is the one, {n}" + " and that" * (n % 3), "the question" * (n % 4 + 1) + str(n)]
        chosen, rejected = ([{"role": "assistant", "content": answer}] for answer in answers)
        made.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
    return made


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, its tokenizer and 24 preferences."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("preferences")
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    LlamaForCausalLM(LlamaConfig(**LLAMA | ids)).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    write_rows(folder / "pairs.jsonl", rows(24))
    return folder


@pytest.fixture
def config(base: Path, tmp_path: Path) -> TrainConfig:
    return make(
        TrainConfig, model=str(base / "model"), data=str(base / "pairs.jsonl"), dpo=0.5, pack="none", shuffle=0,
        steps=4, batch=4, micro_batch=2, context=256, schedule="constant", dtype="fp32", log_every=1, save_every=2,
        keep=0, export="never", out=tmp_path / "run", **OPTIMIZER,
    )  # fmt: skip


REPORTED = {
    "loss": "loss", "rewards/accuracies": "reward_accuracy", "rewards/margins": "reward_margin",
    "rewards/chosen": "reward_chosen", "rewards/rejected": "reward_rejected",
}  # fmt: skip


def _of_trl(config: TrainConfig, folder: Path, lora: bool) -> list[dict[str, float]]:
    """Train by TRL's DPOTrainer on this process; return what each step reports, under our names."""
    import peft
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    losses = []

    class Recording(trl.DPOTrainer):  # type: ignore[misc]
        def compute_loss(self, *args: Any, **options: Any) -> Any:
            out = super().compute_loss(*args, **options)
            losses.append(out.item())
            return out

        def log(self, logs: dict[str, float], *args: Any) -> None:  # it rounds
            found.append({name: sum(v) / len(v) for name, v in self._metrics["train"].items()})
            super().log(logs, *args)

    found: list[dict[str, float]] = []
    beta1, beta2 = OPTIMIZER["betas"]  # type: ignore[misc]
    options = trl.DPOConfig(
        str(folder), max_steps=config.last_step, per_device_train_batch_size=config.sequences, beta=config.data.dpo,
        learning_rate=OPTIMIZER["lr"], lr_scheduler_type="constant", weight_decay=OPTIMIZER["weight_decay"],
        adam_beta1=beta1, adam_beta2=beta2, max_grad_norm=OPTIMIZER["clip"], max_length=None, use_cpu=True, bf16=False,
        train_sampling_strategy="sequential", report_to="none", save_strategy="no", disable_tqdm=True, logging_steps=1,
        gradient_checkpointing=False,
    )  # fmt: skip
    torch.manual_seed(0)
    trainer = Recording(
        model=AutoModelForCausalLM.from_pretrained(config.model.model, dtype=torch.float32), args=options,
        train_dataset=Dataset.from_list([json.loads(line) for line in Path(config.data.name).read_text().splitlines()]),
        processing_class=AutoTokenizer.from_pretrained(config.model.model),
        peft_config=peft.LoraConfig(r=4, lora_alpha=8, target_modules=list(LORA["lora_targets"]), task_type="CAUSAL_LM")
        if lora else None,
    )  # fmt: skip
    if lora:
        _same_lora(trainer.model, config)
    trainer.train()
    steps = [{ours: step[theirs] for theirs, ours in REPORTED.items() if theirs in step} for step in found]
    return [{**step, "loss": loss} for step, loss in zip(steps, losses, strict=False)]


def _same_lora(model: Any, config: TrainConfig) -> None:
    """Give TRL's model the random weights of LoRA with which a run starts."""
    from transformers import AutoModelForCausalLM

    from longspan.train.optimizer import tuned

    ours = tuned(AutoModelForCausalLM.from_pretrained(config.model.model), config.tuning, config.seed)
    model.load_state_dict(ours.state_dict())


def _reported(out: Path) -> list[dict[str, float]]:
    return [{name: record[name] for name in REPORTED.values()} for record in log_of(out)]


def _evaluations(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "evaluation.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("tuning", [{}, LORA], ids=["all weights", "lora"])
def test_losses_and_rewards_are_those_of_trl(
    config: TrainConfig, tuning: dict[str, Any], pool2: RankPool, tmp_path: Path
) -> None:
    """Of two ranks that share each sequence, and of TRL's DPOTrainer on one process."""
    pytest.importorskip("trl")
    config = replace(config, **tuning, ulysses=2, save_every=0)
    expected = _of_trl(config, tmp_path / "trl", lora=bool(tuning))
    train_on(pool2, config)
    for found, theirs in zip(_reported(config.out), expected, strict=True):
        assert found == pytest.approx(theirs, abs=2e-5)
    assert _reported(config.out)[0]["reward_margin"] == 0 != _reported(config.out)[-1]["reward_margin"]


MESHES: dict[str, dict[str, Any]] = {
    "replicas": {"data_degree": 2},
    "lora on a tensor axis": {"tensor": 2, "fsdp": False, **LORA},
    "dora": {"ring": 2, **LORA, "dora": True},
}


@pytest.mark.parametrize("kind", [*confirming(["dora"]), "replicas", "lora on a tensor axis"])
def test_a_run_resumes_on_another_mesh_with_the_same_rewards_and_evaluations(
    config: TrainConfig, base: Path, kind: str, pool2: RankPool, tmp_path: Path
) -> None:
    """Of two sources with weights. Several pairs share a sequence; seven of them do not divide by the replicas."""
    held_out = write_rows(base / "held-out.jsonl", rows(31)[24:])
    tuning = {name: value for name, value in MESHES[kind].items() if name in LORA or name == "dora"}
    config = replace(
        config, **tuning, pack="best-fit", micro_batch=1, batch=2, eval_data=(str(held_out),), eval_every=2,
        context=160, data=(f"{config.data.name}=0.7", f"{held_out}=0.3"),
    )  # fmt: skip
    train(config)
    mesh = replace(config, out=tmp_path / "mesh", **MESHES[kind])
    train_on(pool2, replace(mesh, steps=2))
    train(replace(config, out=mesh.out))
    assert [r["tokens"] for r in log_of(mesh.out)] == [r["tokens"] for r in log_of(config.out)]
    for found, expected in zip(_reported(mesh.out), _reported(config.out), strict=True):
        assert found == pytest.approx(expected, abs=2e-5)
    evaluated, expected = _evaluations(mesh.out), _evaluations(config.out)
    assert [r["step"] for r in evaluated] == [0, 2, 4] and {r["pairs"] for r in evaluated} == {7}
    assert 0 < evaluated[-1]["accuracy"] <= 1 and evaluated[-1]["margin"] > evaluated[0]["margin"] == 0
    for one, two in zip(evaluated, expected, strict=True):
        keys = ("loss", "accuracy", "margin", "chosen", "rejected")
        assert [one[key] for key in keys] == pytest.approx([two[key] for key in keys], abs=2e-5)
        assert one["sources"]["held-out"]["loss"] == one["loss"] and one["positions"] == []


def test_another_reference_is_refused_on_resume(config: TrainConfig, base: Path, tmp_path: Path) -> None:
    """With LoRA the checkpoint contains it."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base / "model")
    model.lm_head.weight.data[0] += 1
    shutil.copytree(base / "model", tmp_path / "other")
    model.save_pretrained(tmp_path / "other")
    train(replace(config, steps=1, schedule="constant"))
    refused(config, "reference was [0-9]+, is [0-9]+", model=str(tmp_path / "other"))


def test_the_reference_is_as_exact_in_bf16(config: TrainConfig, pool2: RankPool) -> None:
    """FSDP casts the weights of both, so the copy is stored in bf16."""
    train_on(pool2, replace(config, ulysses=2, dtype="bf16", steps=1))
    assert _reported(config.out)[0]["reward_margin"] == 0


def _pair(row: dict[str, Any], template: str | None = CHATML) -> list[str]:
    """Return the two answers of a row as text, with a bar before what has a loss."""
    tokenizer = make_tokenizer(template)
    found = Tokenizer(tokenizer).ids(json.dumps(row), "preference", "a.jsonl, line 3")
    texts = []
    for ids in answers_of(found):
        border = int((ids < 0).sum())
        assert (ids[:border] < 0).all() and (ids[border:] >= 0).all()
        texts.append(f"{tokenizer.decode(~ids[:border])}|{tokenizer.decode(ids[border:])}")
    return texts


USER, ONE, OTHER = ({"role": role, "content": text} for role, text in
                    (("user", "Which?"), ("assistant", "the one"), ("assistant", "the other")))  # fmt: skip
IN_CHAT = [
    f"<|im_start|>user\nWhich?<|im_end|>\n<|im_start|>assistant\n|{text}<|im_end|>\n"
    for text in ("the one", "the other")
]


def test_rows_of_texts_and_chats_become_pairs() -> None:
    """As TRL's: with a prompt, or with one that both answers begin with; the last is that of UltraFeedback."""
    assert _pair({"prompt": "Which? ", "chosen": "one", "rejected": "other"}) == [
        "Which? |one<|endoftext|>",
        "Which? |other<|endoftext|>",
    ]
    assert _pair({"chosen": "Which? the one", "rejected": "Which? that"})[1] == "Which? th|at<|endoftext|>"
    assert _pair({"prompt": [USER], "chosen": [ONE], "rejected": [OTHER]}) == IN_CHAT
    assert _pair({"chosen": [USER, ONE], "rejected": [USER, OTHER]}) == IN_CHAT
    assert _pair({"prompt": "Which?", "chosen": [USER, ONE], "rejected": [USER, OTHER]}) == IN_CHAT


@pytest.mark.parametrize(
    ("chosen", "rejected"),
    [
        ("ab c", "ab d"), ("ab", "abc"), ("x", "y"), ("a  b", "a  c"), ("one", "two"),
        ([USER, ONE], [USER, OTHER]), ([USER, ONE], [USER, OTHER, USER, ONE]), ([USER, ONE, USER], [USER, ONE, ONE]),
    ],
)  # fmt: skip
def test_the_common_prompt_is_that_of_trl(chosen: Any, rejected: Any) -> None:
    trl = pytest.importorskip("trl")
    theirs = trl.extract_prompt({"chosen": chosen, "rejected": rejected})
    assert common_prompt(chosen, rejected, "") == theirs


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"prompt": "a", "chosen": "b", "rejected": "b"}, "`chosen` and `rejected` are the same, so neither is preferred"),
    ({"prompt": "a", "chosen": "b"}, "has no 'chosen' and 'rejected', which rows of --dpo need; it has 'prompt'"),
    ({"prompt": "a", "chosen": "b", "rejected": None}, "needs a `prompt` and a `rejected`, both texts .* an empty rej"),
    ({"prompt": "a", "chosen": "", "rejected": "b"}, "needs a `prompt` and a `chosen`, .* str and an empty chosen"),
    ({"prompt": "a", "chosen": [ONE], "rejected": "b"}, "needs a `prompt` and a `chosen`"),
    ({"chosen": [ONE], "rejected": [OTHER]}, "has no `prompt` of messages, and .* begin with different ones"),
    ({"prompt": [USER], "chosen": [{"role": "assistant"}], "rejected": 3}, "needs a `prompt` and a `rejected`"),
    ({"text": "The sea."}, "has no 'chosen' and 'rejected', which rows of --dpo need; it has 'text'"),
]


@pytest.mark.parametrize(("row", "error"), REFUSED)
def test_rows_that_are_no_preferences_are_refused_by_file_and_row(
    config: TrainConfig, row: dict[str, Any], error: str, tmp_path: Path
) -> None:
    path = write_rows(tmp_path / "bad.jsonl", [*rows(1), row])
    refused(config, rf"{path}, line 2:? {error}", data=(str(path),), batch=2)


def test_what_does_not_go_with_preferences_is_refused(config: TrainConfig, tmp_path: Path) -> None:
    refused(config, "--pack documents would cut the pairs of --dpo 0.5", pack="documents")
    refused(config, "--loss-on last has no meaning with --dpo 0.5", loss_on="last")
    refused(config, "--format chat has no meaning with --dpo 0.5", format="chat")
    refused(config, "--text-field a has no meaning with --dpo 0.5", text_field="a")
    refused(config, "--dpo must be above 0, got 0.0", dpo=0.0)
    refused(config, "--data pydoc is text, and --dpo was asked for", data=(*config.data.data, "pydoc"))
    (tmp_path / "a.txt").write_text("The sea.")
    refused(config, "a.txt is text, and --dpo was asked for", eval_data=(str(tmp_path / "a.txt"),))
    refused(config, "has no field 'text'; .* with --dpo `chosen` and `rejected`", dpo=None)


def _lengths(config: TrainConfig, context: int) -> list[tuple[int, int]]:
    """Return the tokens of both answers of every sequence."""
    stream = open_local(config).stream(open_local(config).source, context, epochs=1)
    return [(s.starts[1], len(s.ids) - s.starts[1]) for s in stream]


def test_a_long_pair_loses_the_end_of_its_longer_answer_or_is_left_out(config: TrainConfig) -> None:
    """TRL cuts each answer at its max_length, which is half a context of two long answers."""
    pairs, cut = _lengths(config, 256), _lengths(config, 110)
    assert cut == [(min(a, max(55, 110 - b)), min(b, max(55, 110 - a))) for a, b in pairs] != pairs
    assert _lengths(replace(config, too_long="drop"), 110) == [(a, b) for a, b in pairs if a + b <= 110] != []
    assert len(_lengths(config, 60)) < len(pairs)  # a prompt may leave no room for an answer


def test_the_planner_leaves_room_for_the_reference(config: TrainConfig) -> None:
    options = {"memory": "auto", "rank_memory": 0.5, "data_degree": 2, "dtype": "bf16"}
    for changes, besides in (({}, r" besides 0\.00 GB of the reference"), (LORA, "")):
        _, messages = resolve_memory(replace(config, **options, **changes))
        assert re.match(rf"0\.50 GB for a rank{besides}, ", messages[0])
    weights = 10**9
    assert reference_bytes(replace(config, **options), weights) == weights  # bf16 over two ranks
    assert reference_bytes(replace(config, **options, fsdp=False), weights) == 4 * weights
    assert reference_bytes(replace(config, tensor=2), weights) == 2 * weights


def test_a_preview_shows_both_answers(config: TrainConfig, capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    preview(replace(config, preview=1), open_local(config), Console(width=80, no_color=True, highlight=False))
    assert "⟦It is the one, 0<|im_end|>" in (text := capsys.readouterr().out) and "⟦the question0<|im_end|>" in text


def test_an_adapter_is_no_reference(config: TrainConfig, base: Path, tmp_path: Path) -> None:
    settings = {"base_model_name_or_path": str(base / "model"), "peft_type": "LORA"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    refused(config, "compares with the model before training", model=str(tmp_path))
