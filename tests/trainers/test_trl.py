"""TRL's trainers through `longspan.trainer`: their logs equal those of one process."""

from __future__ import annotations

import contextlib
import functools
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import longspan
from longspan.core.errors import LongspanError
from tests.choose import confirming
from tests.hf.pictures import build as build_with_tower
from tests.models import BASE, build
from tests.pool import RankPool
from tests.train.chats import image, processor, tokenizer
from tests.trainers.fitting import COMMON, as_launched, quiet, sentence

pytestmark = pytest.mark.versions

pytest.importorskip("trl")


def rows(kind: str, count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Samples of a kind of data."""
    made = []
    for at in range(seed, seed + count):
        first, second, third = sentence(3 * at), sentence(3 * at + 1), sentence(3 * at + 2)
        chat = [{"role": "user", "content": first}, {"role": "assistant", "content": second}]
        made.append({
            "text": {"text": f"{first} {second}"},
            "chat": {"messages": [*chat, {"role": "user", "content": third}, chat[1]]},
            "images": {"messages": [*chat, {"role": "user", "content": third}, chat[1]],
                       "images": [image(at + i) for i in range(at % 3)]},
            "preference": {"prompt": first, "chosen": " " + second, "rejected": " " + third},
            "judged": {"prompt": first, "completion": " " + second, "label": at % 3 != 0},
            "prompt": {"prompt": first},
        }[kind])  # fmt: skip
    return made


KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "packed": ("SFT", "text", {"packing": True, "max_length": 48}),
    "assistant only": ("SFT", "chat", {"assistant_only_loss": True}),
    "elastic": ("SFT", "chat", {"assistant_only_loss": True, "elastic": 64}),
    "lora": ("SFT", "text", {"peft": ["q_proj", "v_proj"]}),
    "recurrent": ("SFT", "text", {"family": "Bamba"}),
    "images": ("SFT", "images", {"assistant_only_loss": True}),
    "images, lora in both": ("SFT", "images", {"peft": ["q_proj", "v_proj"]}),
    "images, lora in the language model": ("SFT", "images", {"peft": r".*language_model.*(q|v)_proj"}),
    "dpo": ("DPO", "preference", {}),
    "kto": ("KTO", "judged", {}),
    "orpo": ("ORPO", "preference", {}),
    "cpo": ("CPO", "preference", {}),
    "simpo": ("CPO", "preference", {"loss_type": "simpo", "cpo_alpha": 0.0}),
    "gkd": ("GKD", "chat", {"lmbda": 0.0, "beta": 0.3, "gradient_accumulation_steps": 2}),
    "gkd on its own completions": ("GKD", "chat", {"lmbda": 0.7, "max_new_tokens": 6}),
    "distillation": ("Distillation", "prompt", {"beta": 1.0, "temperature": 0.8, "max_completion_length": 9,
                                                "gradient_accumulation_steps": 2}),
    "reward lora": ("Reward", "preference", {"peft": ["q_proj", "v_proj"], "center_rewards_coefficient": 0.01}),
}  # fmt: skip


def rewarding() -> Any:
    """A reward model."""
    from transformers import AutoModelForSequenceClassification, LlamaConfig

    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_config(LlamaConfig(**BASE, num_labels=1))


def log_of(kind: str, mesh: dict[str, int] | None, out: Path) -> list[dict[str, Any]]:
    """Return the log of a run, on one process if `mesh` is None."""
    with contextlib.nullcontext() if mesh is None else as_launched(), warnings.catch_warnings():
        warnings.filterwarnings("error", message="FSDP2-wrapped module .* returned a view")
        return _log_of(kind, mesh, out)


def _log_of(kind: str, mesh: dict[str, int] | None, out: Path) -> list[dict[str, Any]]:
    from datasets import Dataset
    from peft import LoraConfig

    quiet()
    trainer_name, data, changes = KINDS[kind]
    changes = dict(changes)
    elastic = changes.pop("elastic", None)
    options: dict[str, Any] = {}
    family = changes.pop("family", "Llama")
    if layers := changes.pop("peft", None):
        torch.manual_seed(3)
        kind = {"task_type": "SEQ_CLS"} if trainer_name == "Reward" else {"task_type": "CAUSAL_LM"}
        options["peft_config"] = LoraConfig(r=4, target_modules=layers, **kind)
    cls, config = (getattr(_module_of(trainer_name), f"{trainer_name}{kind}") for kind in ("Trainer", "Config"))
    rows_at_once = 4
    if mesh is not None:
        options["sp"] = longspan.SequenceSharding(longspan.init_mesh(**mesh))
        options |= {} if elastic is None else {"elastic": elastic}
        rows_at_once //= options["sp"].data_size
        cls = longspan.trainer(cls)
    if trainer_name in ("DPO", "KTO") and "peft_config" not in options:
        options["ref_model"] = build("Llama", seed=1)
    if trainer_name in ("GKD", "Distillation"):
        options["teacher_model"] = build("Qwen3", seed=1, hidden_size=48, num_attention_heads=6, initializer_range=0.2)
    if data == "images":
        changes["max_length"] = None
        model = build_with_tower("Llava")
    else:
        model = rewarding() if trainer_name == "Reward" else build(family)
    common = {key: x for key, x in (COMMON | changes).items() if data != "prompt" or key != "max_length"}
    args = config(
        output_dir=str(out), per_device_train_batch_size=rows_at_once, per_device_eval_batch_size=2 * rows_at_once,
        eval_strategy="steps", eval_steps=2, **common,
    )  # fmt: skip
    trainer = cls(
        model=model, args=args, train_dataset=Dataset.from_list(rows(data, 60)),
        eval_dataset=Dataset.from_list(rows(data, 8, 100)),
        processing_class=processor() if data == "images" else tokenizer(), **options,
    )  # fmt: skip
    trainer.train()
    return list(trainer.state.log_history)


def _module_of(name: str) -> Any:
    """Return the module of TRL with a trainer."""
    import importlib

    experimental = name in ("ORPO", "CPO", "GKD")
    return importlib.import_module(f"trl.experimental.{name.lower()}" if experimental else "trl")


@functools.cache
def plain(kind: str) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        return log_of(kind, None, Path(folder))


CHOSEN = ("packed", "elastic", "lora", "images", "dpo", "kto", "reward lora", "recurrent", "orpo", "simpo",
          "distillation")  # fmt: skip


@pytest.mark.parametrize("kind", [*CHOSEN, *confirming(kind for kind in KINDS if kind not in CHOSEN)])
def test_the_log_is_that_of_one_process(get_pool: Callable[[int], RankPool], kind: str, tmp_path: Path) -> None:
    replicas = kind in ("lora", "images, lora in both", "dpo", "orpo", "gkd")
    mesh = {"data": 2, "ring": 2} if replicas else {"tensor" if kind == "packed" else "ulysses": 2}
    ranks = functools.reduce(lambda a, b: a * b, mesh.values())
    for log in get_pool(ranks).run(log_of, kind, mesh, tmp_path):
        # TRL's own metrics of training are those of the rows of a rank's rounds; logits of padding count in some.
        but = {"elastic": ("entropy", "mean_token_accuracy", "num_tokens"), "orpo": ("logits/",), "cpo": ("logits/",)}
        check_equal(log, plain(kind), but.get("cpo" if kind == "simpo" else kind, ()))


def check_equal(log: list[dict[str, Any]], expected: list[dict[str, Any]], but: tuple[str, ...] = ()) -> None:
    """Compare all that each step logs."""
    assert len(log) == len(expected)
    for mine, theirs in zip(log[:-1], expected[:-1], strict=True):
        for key, value in theirs.items():
            # A reward is a tenth of the difference of two log-probabilities of about -50, whose fp32 steps are 4e-6.
            least = 5e-6 if "rewards/" in key else 1e-6
            if not any(part in key for part in ("per_second", "runtime", "step_time", *but)):
                assert mine[key] == pytest.approx(value, rel=2e-4, abs=least), (key, mine["step"])


# ---------------------------------------------------------------------------------------------------------------------
# LoRA on a model of which no rank ever has all weights; ended in a save, resumed on another mesh.


def packed(mesh: dict[str, int] | None, folder: Path, out: Path, how: str = "") -> list[dict[str, Any]]:
    """Return the log of a run on packed text, on one process if `mesh` is None; `how`: "stopped" or "resumed"."""
    with contextlib.nullcontext() if mesh is None else as_launched():
        return _packed(mesh, folder, out, how)


class _Stop(transformers.TrainerCallback):  # type: ignore[misc]
    """Ends a run with the save of step 4."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step == 4


def _packed(mesh: dict[str, int] | None, folder: Path, out: Path, how: str) -> list[dict[str, Any]]:
    import trl
    from datasets import Dataset
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    def with_lora(model: Any) -> Any:
        torch.manual_seed(3)
        return get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))

    quiet()
    changes = {"max_steps": 6, "max_length": 48, "save_strategy": "steps", "save_steps": 2}
    args = trl.SFTConfig(
        output_dir=str(out), per_device_train_batch_size=2, gradient_accumulation_steps=2, packing=True,
        packing_strategy="bfd", eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=8,
        **(COMMON | changes),
    )  # fmt: skip
    given: dict[str, Any] = {
        "args": args, "processing_class": tokenizer(), "train_dataset": Dataset.from_list(rows("text", 60)),
        "eval_dataset": Dataset.from_list(rows("text", 8, 100)), "callbacks": [_Stop()] if how == "stopped" else [],
    }  # fmt: skip
    if mesh is None:
        trainer = trl.SFTTrainer(model=with_lora(AutoModelForCausalLM.from_pretrained(folder)), **given)
    else:
        sp = longspan.SequenceSharding(longspan.init_mesh(**mesh))
        model = longspan.from_pretrained(folder, sp, prepare=with_lora)
        trainer = longspan.trainer(trl.SFTTrainer)(model=model, sp=sp, **given)
    trainer.train(resume_from_checkpoint=how == "resumed")
    return list(trainer.state.log_history)


@pytest.mark.confirms
@pytest.mark.slow
def test_a_run_that_ended_in_a_save_resumes_on_another_mesh(pool4: RankPool, tmp_path: Path) -> None:
    """LoRA on a model that no rank ever holds whole, and packed text."""
    folder, out = tmp_path / "model", tmp_path / "out"
    build("Llama").save_pretrained(folder)
    expected = packed(None, folder, tmp_path / "plain")
    pool4.run(packed, {"ring": 2, "ulysses": 2}, folder, out, "stopped")
    for name in ("complete.json", "trainer_state.json"):  # which a killed save does not reach
        (out / "checkpoint-4" / name).unlink()
    for log in pool4.run(packed, {"ulysses": 4}, folder, out, "resumed"):
        check_equal(log, expected, ("num_tokens",))  # which TRL counts from the start of a process


# ---------------------------------------------------------------------------------------------------------------------
# GRPO, with completions from a function.


def _rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Completions that depend on a prompt, and on its number in this batch."""
    seen: dict[str, int] = {}
    prompt_ids, completion_ids = [], []
    for prompt in prompts:
        turn = seen[prompt] = seen.get(prompt, -1) + 1
        prompt_ids.append(tokenizer()(prompt)["input_ids"])
        completion_ids.append(tokenizer()(sentence(1000 * len(prompt) + turn))["input_ids"])
    return {"prompt_ids": prompt_ids, "completion_ids": completion_ids,
            "logprobs": [[0.0] * len(ids) for ids in completion_ids]}  # fmt: skip


def _reward(completions: list[str], **_: Any) -> list[float]:
    return [text.count("sea") - 0.1 * len(text.split()) for text in completions]


def grpo(mesh: dict[str, int] | None, out: Path, folder: Path, changes: dict[str, Any]) -> list[dict[str, Any]]:
    """As `log_of`."""
    with contextlib.nullcontext() if mesh is None else as_launched():
        return _grpo(mesh, out, folder, changes)


def _grpo(mesh: dict[str, int] | None, out: Path, folder: Path, changes: dict[str, Any]) -> list[dict[str, Any]]:
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM

    quiet()
    options: dict[str, Any] = {"rollout_func": _rollout}
    cls: Any = trl.GRPOTrainer
    rows_at_once = 4
    if mesh is not None:
        options["sp"] = longspan.SequenceSharding(longspan.init_mesh(**mesh))
        rows_at_once //= options["sp"].data_size
        cls = longspan.trainer(cls)
    changes = dict(changes)
    options |= {name: changes.pop(name) for name in ("rollout_func", "shared_prefixes") if name in changes}
    if mesh is None:
        options.pop("shared_prefixes", None)
    common = {name: value for name, value in COMMON.items() if name != "max_length"}
    args = trl.GRPOConfig(
        output_dir=str(out), per_device_train_batch_size=rows_at_once,
        **(common | {"num_generations": 2, "max_completion_length": 32, "temperature": 0.7, "beta": 0.1} | changes),
    )  # fmt: skip
    trainer = cls(
        model=AutoModelForCausalLM.from_pretrained(folder), args=args, reward_funcs=_reward,
        train_dataset=Dataset.from_list([{"prompt": sentence(at)} for at in range(48)]),
        processing_class=tokenizer(), **options,
    )  # fmt: skip
    trainer.train()
    return list(trainer.state.log_history)


SHARED = {"steps_per_generation": 1, "shared_prefixes": True}
REUSED = {
    "rollout_func": None,
    "max_completion_length": 9,
    "steps_per_generation": 2,
    "num_iterations": 2,
    "entropy_coef": 0.05,
}


@pytest.mark.parametrize(
    ("mesh", "changes"),
    [({"ring": 2}, REUSED), ({"data": 2, "ulysses": 2}, SHARED)],
    ids=str,
)
def test_grpo_logs_what_one_process_logs(
    get_pool: Callable[[int], RankPool], mesh: dict[str, int], changes: dict[str, Any], tmp_path: Path
) -> None:
    """Ratio, KL and entropy of the policy; also on completions that the model generates over its ranks."""
    build("Llama").save_pretrained(tmp_path / "model")
    expected = grpo(None, tmp_path / "plain", tmp_path / "model", changes)
    assert any(record.get("kl", 0) > 1e-4 for record in expected)
    ranks = functools.reduce(lambda a, b: a * b, mesh.values())
    for log in get_pool(ranks).run(grpo, mesh, tmp_path, tmp_path / "model", changes):
        assert len(log) == len(expected)
        for mine, theirs in zip(log[:-1], expected[:-1], strict=True):
            for key, value in theirs.items():
                if not any(part in key for part in ("per_second", "runtime", "step_time", "/std", "reward_std")):
                    assert mine[key] == pytest.approx(value, rel=5e-4, abs=1e-6), (key, mine["step"])


def _other_trainers(out: Path) -> list[str]:
    """Return how TRL's other trainers are refused, when made or in their first step."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer
    from trl.experimental.gkd import GKDConfig, GKDTrainer
    from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer
    from trl.experimental.tpo import TPOConfig, TPOTrainer

    class OwnGKDTrainer(GKDTrainer):  # type: ignore[misc]
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs)

    said = []
    precomputed = functools.partial(DPOConfig, precompute_ref_log_probs=True)
    made: list[tuple[Any, Any, str, dict[str, Any]]] = [
        (TPOTrainer, TPOConfig, "preference", {}),
        (OwnGKDTrainer, GKDConfig, "chat", {"teacher_model": build("Llama", seed=1)}),
        (GKDTrainer, GKDConfig, "chat", {"teacher_model": build("Llama", seed=1), "compute_metrics": dict}),
        (OnlineDPOTrainer, OnlineDPOConfig, "prompt", {"reward_funcs": _reward}),
        (DPOTrainer, precomputed, "preference", {"ref_model": build("Llama", seed=1)}),
    ]
    with as_launched():
        quiet()
        for cls, config, data, more in made:
            common = COMMON | {"max_steps": 1, "per_device_train_batch_size": 2}
            try:
                longspan.trainer(cls)(
                    model=build("Llama"), args=config(output_dir=str(out), **common), processing_class=tokenizer(),
                    train_dataset=Dataset.from_list(rows(data, 8)), **more,
                    sp=longspan.SequenceSharding(longspan.init_mesh(ulysses=2)),
                ).train()  # fmt: skip
                said.append("trained")
            except LongspanError as error:
                said.append(str(error))
    return said


def test_other_trainers_are_refused_with_what_to_do(pool2: RankPool, tmp_path: Path) -> None:
    for tpo, own, gkd, online, dpo in pool2.run(_other_trainers, tmp_path, timeout=120):
        assert tpo.startswith("TPOTrainer computes its loss from the logits") and "token_logprobs" in tpo
        assert "OwnGKDTrainer compares its model with a teacher" in own and "distillation_loss" in own
        assert "compute_metrics" in gkd
        assert "OnlineDPOTrainer generates in a way" in online and "use GRPOTrainer" in online
        assert "precompute_ref_log_probs=True" in dpo and "leave it out" in dpo


REFUSED: list[tuple[dict[str, Any], dict[str, int], str]] = [
    ({"num_generations": 4, "steps_per_generation": 1}, {"data": 2}, "num_generations=4 completions .* gives it 2"),
    ({"cast_lm_head_to_fp32": True}, {"ulysses": 2}, "cast_lm_head_to_fp32=True"),
    ({"scale_rewards": "batch"}, {"ulysses": 2}, "='batch' computes a deviation or a quantile .* each completion 2 t"),
]


def _refuse_all(out: Path) -> None:
    for changes, mesh, message in REFUSED:
        with pytest.raises(LongspanError, match=message):
            grpo(mesh, out, out / "model", changes)


def test_unsupported_options_of_grpo_are_refused(pool2: RankPool, tmp_path: Path) -> None:
    build("Llama").save_pretrained(tmp_path / "model")
    pool2.run(_refuse_all, tmp_path)
