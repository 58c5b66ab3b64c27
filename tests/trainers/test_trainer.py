"""`longspan.trainer`: the log of a sharded run is that of the plain class on one process."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.tracking import GeneralTracker, on_main_process

import longspan
from longspan.checkpoint import newest_undamaged, read_verified
from longspan.comm.mesh import MeshGroups
from longspan.compat.accelerate_api import ReplicaAccelerator
from longspan.core.errors import LongspanError
from longspan.trainers.callbacks import SIGNALS, StopOnSignal
from tests.checkpoint.disk import largest_file
from tests.choose import confirming
from tests.hf import pictures
from tests.models import BASE, build
from tests.pool import RankPool
from tests.trainers.fitting import Samples, arguments, as_launched, collate, made, plain, quiet, sharded, sharded_alone

pytestmark = pytest.mark.versions

LOGGED = ("loss", "grad_norm", "learning_rate", "eval_loss")

STEPS = {"max_steps": 4}

EVALUATED = {**STEPS, "eval_strategy": "steps", "eval_steps": 2}

MIXED = [{"ring": 2}, {"data": 2, "ulysses": 2}]

MESHES = {
    "elastic": {"ulysses": 4}, "tensor axis": {"data": 2, "tensor": 2},
    "tensor axis and lora": {"ulysses": 2, "tensor": 2},
}  # fmt: skip

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2},
    "accumulation of replicated weights": {"fsdp": False, "gradient_accumulation_steps": 2},
    "bf16": {"bf16": True},
    "lora": {"lora": True},
    "by length": {"train_sampling_strategy": "group_by_length"},
    "recurrent": {"family": "Qwen3Next", "memory": "auto"},
    "experts": {"family": "Mixtral", "experts": 2},
    "elastic": {"elastic": 24, "per_device_train_batch_size": 8},
    "tensor axis": {
        "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "tensor_style": "megatron-sp",
    },
    "tensor axis and lora": {"lora": True, "fsdp": False},
}  # fmt: skip


@functools.cache
def _plain(name: str) -> list[dict[str, Any]]:
    import tempfile

    ours = ("fsdp", "memory", "elastic", "experts", "tensor_style")
    options = {key: value for key, value in VARIANTS[name].items() if key not in ours}
    with tempfile.TemporaryDirectory() as folder:
        return plain(Path(folder), **EVALUATED, **options)


def compare(found: list[dict[str, Any]], expected: list[dict[str, Any]], tolerance: float = 2e-4) -> None:
    """Every number that a step logs."""
    steps = [[record for record in log if "train_runtime" not in record] for log in (found, expected)]
    assert [record["step"] for record in steps[0]] == [record["step"] for record in steps[1]]
    for mine, theirs in zip(*steps, strict=True):
        for key in LOGGED:
            assert (key in mine) == (key in theirs), key
            if key in mine:
                assert mine[key] == pytest.approx(theirs[key], rel=tolerance), (key, mine["step"])


CONFIRMING = ("plain", "by length", "tensor axis")  # other variants and the tests of `longspan train` show the same


@pytest.mark.parametrize(
    "name", [*(name for name in VARIANTS if name not in ("lora", *CONFIRMING)), *confirming(CONFIRMING)]
)
def test_the_log_is_that_of_one_process(get_pool: Callable[[int], RankPool], name: str, tmp_path: Path) -> None:
    mesh = MESHES.get(name, MIXED[list(VARIANTS).index(name) % 2])
    ranks = functools.reduce(lambda a, b: a * b, mesh.values())
    tolerance = 2e-2 if name == "bf16" else 2e-4
    for log in get_pool(ranks).run(sharded, mesh, tmp_path, {**EVALUATED, **VARIANTS[name]}):
        compare(log, _plain(name), tolerance)


class _Pictures(torch.utils.data.Dataset[dict[str, Any]]):
    """Rows of Qwen2.5-VL: with images and a video, with an image, or with text only."""

    def __init__(self, count: int, seed: int) -> None:
        rows = [pictures.ROWS[0], (4, ("image", 1, 4, 4), 5), (9,)]
        self.samples = [pictures.batch("Qwen2_5_VL", (rows[at % 3],), seed=seed + at) for at in range(count)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, at: int) -> dict[str, Any]:
        return self.samples[at]


_PER_TOKEN = {"input_ids": 0, "labels": -100, "attention_mask": 0, "mm_token_type_ids": 0}


def _collate_pictures(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Pad the tokens on the right, and join the pictures of all rows."""
    rows = [{key: x[0] for key, x in sample.items() if key in _PER_TOKEN} for sample in samples]
    rows = [{**row, "attention_mask": torch.ones_like(row["input_ids"])} for row in rows]
    padded = {
        key: torch.nn.utils.rnn.pad_sequence([row[key] for row in rows], batch_first=True, padding_value=value)
        for key, value in _PER_TOKEN.items()
    }
    keys = dict.fromkeys(key for sample in samples for key in sample if key not in _PER_TOKEN)
    return padded | {key: torch.cat([sample[key] for sample in samples if key in sample]) for key in keys}


def _seen(mesh: dict[str, int] | None, out: Path, options: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the log of a run on pictures, on one process if `mesh` is None."""
    quiet()
    rows = {"per_device_eval_batch_size": 10, "max_steps": 6, "eval_strategy": "steps", "eval_steps": 3}
    given = {
        "model": pictures.build("Qwen2_5_VL"), "data_collator": _collate_pictures, "train_dataset": _Pictures(24, 1),
        "eval_dataset": _Pictures(10, 50),
    }  # fmt: skip
    if mesh is None:
        trainer = transformers.Trainer(args=arguments(out, **rows), **given)
        trainer.train()
        return list(trainer.state.log_history)
    with as_launched():
        sp = longspan.SequenceSharding(longspan.init_mesh(**mesh))
        rows |= {"per_device_train_batch_size": 4 // sp.data_size, "per_device_eval_batch_size": 4 // sp.data_size}
        sharded_trainer: Any = longspan.trainer(transformers.Trainer)(
            args=arguments(out, **rows), **given, sp=sp, **options
        )  # type: ignore[call-arg]
        sharded_trainer.train()
        sharded_trainer.save_model()
        return list(sharded_trainer.state.log_history)


def test_a_vision_language_model_is_trained_evaluated_and_saved(
    pool2: RankPool, pool4: RankPool, tmp_path: Path
) -> None:
    """Also with the tower's layers checkpointed, and with replicas that have different pictures."""
    expected = _seen(None, tmp_path / "plain", {})
    runs = [(pool2, {"ulysses": 2}, {"memory": "longest"}), (pool4, {"data": 2, "ring": 2}, {})]
    for pool, mesh, options in runs:
        for log in pool.run(_seen, mesh, tmp_path, options):
            compare(log, expected)
    loaded = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path).eval()
    batch = _collate_pictures([_Pictures(10, 50)[at] for at in range(10)])
    last = next(record["eval_loss"] for record in reversed(expected) if "eval_loss" in record)
    assert float(loaded(**batch).loss.detach()) == pytest.approx(last, rel=2e-4)


# ---------------------------------------------------------------------------------------------------------------------
# Random numbers: dropout and NEFTune's noise.

ALPHA = 5.0


def _noisy() -> Any:
    """A model of which only noise enters the first layer."""
    from peft import LoraConfig, get_peft_model

    model = build("Llama")
    with torch.no_grad():
        model.model.embed_tokens.weight.zero_()
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], lora_dropout=0.5))


def _drawn(mesh: dict[str, int], out: Path, changes: dict[str, Any]) -> dict[str, Any]:
    """Return what a run draws: by step its noise, over what one process draws at most, and the masks of a layer."""
    found: dict[str, Any] = {"noise": [], "start": [], "masks": [], "evaluated": []}
    with as_launched():
        trainer = made(mesh, out, _noisy, neftune_noise_alpha=ALPHA, **changes)
        step, lengths = trainer.training_step, []
        layer = trainer.model.base_model.model.model.layers[0]

        def counted(model: Any, inputs: Any, *args: Any) -> Any:
            lengths.append(inputs["input_ids"].shape[1])
            return step(model, inputs, *args)

        def entering(module: Any, args: tuple[Any, ...]) -> None:
            if not module.training:
                found["evaluated"].append(float(args[0].abs().max()))
                return
            noise = args[0].detach() * (lengths[-1] * args[0].shape[-1]) ** 0.5 / ALPHA
            found["noise"].append(float(noise.abs().max()))
            found["start"].append(noise.flatten()[:4].tolist())

        trainer.training_step = counted
        layer.register_forward_pre_hook(entering)
        layer.self_attn.q_proj.lora_dropout["default"].register_forward_hook(
            lambda module, args, y: found["masks"].append((y != 0).flatten()) if module.training else None
        )
        trainer.train(resume_from_checkpoint=changes.get("resume_from_checkpoint"))
    return {**found, "state": torch.get_rng_state()}


def test_ranks_of_a_sequence_draw_numbers_of_their_own(pool4: RankPool, tmp_path: Path) -> None:
    """Noise is that of the whole length, masks are independent, replicas draw alike, a resumed run draws the same."""
    mesh = {"data": 2, "ring": 2}
    steps = {"max_steps": 3, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    ranks = pool4.run(_drawn, mesh, tmp_path, steps)
    again = pool4.run(_drawn, mesh, tmp_path, {**steps, "resume_from_checkpoint": str(tmp_path / "checkpoint-2")})
    for found, resumed in zip(ranks, again, strict=True):
        assert len(found["noise"]) == 3 and all(0.9 < noise < 1.001 for noise in found["noise"])
        assert found["evaluated"] and set(found["evaluated"]) == {0.0}
        assert torch.equal(found["state"], ranks[0]["state"])  # what draws for the whole batch
        assert resumed["start"] == found["start"][2:] and torch.equal(resumed["masks"][0], found["masks"][2])
    for first, second in ((0, 1), (2, 3)):
        for a, b in zip(ranks[first]["masks"], ranks[second]["masks"], strict=True):
            assert 0.3 < float((a == b).float().mean()) < 0.7
    for mine, other in zip(ranks[0]["start"], ranks[2]["start"], strict=True):
        assert mine == pytest.approx(other, rel=1e-5)
    assert len({str(start) for start in ranks[0]["start"]}) == 3


def test_ranks_draw_alike_after_a_resume_on_more_ranks(pool2: RankPool, pool4: RankPool, tmp_path: Path) -> None:
    """The saved run has left no file of random states for two of them."""
    steps = {"max_steps": 3, "save_strategy": "steps", "save_steps": 2}
    whole = pool2.run(_drawn, {"ring": 2}, tmp_path, steps)
    resume = {**steps, "resume_from_checkpoint": str(tmp_path / "checkpoint-2")}
    for found in pool4.run(_drawn, {"ring": 4}, tmp_path, resume):
        assert torch.equal(found["state"], whole[0]["state"])


def test_the_noise_of_elastic_batches_is_that_of_the_batch(pool4: RankPool, tmp_path: Path) -> None:
    changes = {"max_steps": 2, "elastic": 24, "per_device_train_batch_size": 8}
    noise = [x for found in pool4.run(_drawn, {"ulysses": 4}, tmp_path, changes) for x in found["noise"]]
    assert 0.9 < max(noise) < 1.001


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints.

SAVED = {**STEPS, "save_strategy": "steps", "save_steps": 2}


def _after(log: list[dict[str, Any]], step: int) -> list[dict[str, Any]]:
    return [record for record in log if record["step"] > step]


@pytest.mark.parametrize(
    ("name", "first", "mesh"),
    [("plain", {"ulysses": 2}, {"data": 2, "tensor": 2}), *confirming([("lora", {"tensor": 2}, {"ring": 2})])],
    ids=str,
)
def test_a_run_resumes_on_another_mesh(
    pool2: RankPool, pool4: RankPool, name: str, first: dict[str, int], mesh: dict[str, int], tmp_path: Path
) -> None:
    """From the newest complete checkpoint, or from one that is named; and on one device."""
    variant = VARIANTS[name]
    pool2.run(sharded, first, tmp_path, {**SAVED, **EVALUATED, **variant})
    complete = tmp_path / "checkpoint-2"
    damaged = next((tmp_path / "checkpoint-4" / "longspan").glob("*.safetensors"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    # A trainer that is killed after a save in the background leaves this: its state is written last.
    state = tmp_path / "checkpoint-4" / "trainer_state.json"
    found, (wrong,) = newest_undamaged(tmp_path)
    assert found is not None and found.path == complete and f"{damaged} is damaged: its" in wrong
    names = {name for name in found.files if "longspan/" not in name}
    assert {"config.json" if name == "plain" else "adapter_config.json", "rng_state_1.pth", "scheduler.pt"} < names
    for text, reason in ((state.read_text()[:-9], "cannot be read"), (None, "is missing")):
        state.unlink() if text is None else state.write_text(text)
        with pytest.raises(LongspanError, match=rf"trainer_state\.json {reason}"):
            read_verified(state.parent)
    pool, out, resume = (pool4, tmp_path, True) if name == "plain" else (pool2, tmp_path / "again", str(complete))
    logs = pool.run(sharded, mesh, out, {**EVALUATED, **variant, "resume_from_checkpoint": resume})
    alone = sharded_alone(tmp_path / "alone", **EVALUATED, **variant, resume_from_checkpoint=str(complete))
    for log in (*logs, alone):
        compare(_after(log, 2), _after(_plain(name), 2))


def test_a_run_on_one_device_resumes_on_several(pool2: RankPool, tmp_path: Path) -> None:
    sharded_alone(tmp_path, **SAVED, **VARIANTS["plain"])
    resume = {"resume_from_checkpoint": str(tmp_path / "checkpoint-2")}
    for log in pool2.run(sharded, {"ring": 2}, tmp_path / "again", {**EVALUATED, **VARIANTS["plain"], **resume}):
        compare(_after(log, 2), _after(_plain("plain"), 2))


def test_an_older_checkpoint_of_the_same_step_counts_until_the_new_one_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor do the older one's shards complete the new one."""
    found = []
    for killed_before_its_shards in (False, True, False):
        with monkeypatch.context() as patch:
            if killed_before_its_shards:
                patch.setattr(longspan.checkpoint.Saver, "start", lambda *_, **__: None)
            sharded_alone(tmp_path, max_steps=1, save_strategy="steps", save_steps=1)
        newest, problems = newest_undamaged(tmp_path)
        found.append((newest and newest.path.name, len(problems)))
    assert found == [("checkpoint-1", 0), ("old-checkpoint-1", 1), ("checkpoint-1", 0)]
    assert not (tmp_path / "old-checkpoint-1").exists()


def test_a_save_that_fails_removes_no_older_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("the disk is gone")

    saved = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}
    sharded_alone(tmp_path, max_steps=1, **saved)
    monkeypatch.setattr("longspan.checkpoint.saving.save_now", fail)
    with pytest.raises(LongspanError, match="checkpoint-2 cannot be written: rank 0: OSError: the disk is gone"):
        sharded_alone(tmp_path, max_steps=2, **saved, resume_from_checkpoint=True)
    found, _ = newest_undamaged(tmp_path)
    assert found is not None and found.step == 1


def _saves(mesh: dict[str, int], out: Path, changes: dict[str, Any]) -> torch.Tensor:
    """Train, save, and return the logits of a batch."""
    with as_launched():
        trainer = made(mesh, out, **changes)
        trainer.train()
        trainer.save_model()
        trainer.save_model()  # replaces the folder
        trainer.model.eval()
        batch = collate([Samples(4, 3)[at] for at in range(4)])
        del batch["labels"]
        with torch.no_grad():
            logits = trainer.model(**batch).logits
        return trainer.longspan_sp.gather(logits, dim=1, length=batch["input_ids"].shape[1])


@pytest.mark.parametrize("name", ["plain", "lora"])
def test_saved_folders_load_in_transformers_and_peft(pool2: RankPool, name: str, tmp_path: Path) -> None:
    logits = pool2.run(_saves, {"ulysses": 2}, tmp_path, {**SAVED, **VARIANTS[name]})[0]
    assert {"training_args.bin", "checkpoint-4"} <= {path.name for path in tmp_path.iterdir()}
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith(".longspan")]
    batch = collate([Samples(4, 3)[at] for at in range(4)])
    del batch["labels"]
    for folder in (tmp_path, tmp_path / "checkpoint-4"):
        if name == "lora":
            from peft import PeftModel

            model = PeftModel.from_pretrained(build("Llama"), folder)
        else:
            model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        with torch.no_grad():
            expected = model.eval()(**batch).logits
        real = batch["attention_mask"].bool()
        torch.testing.assert_close(logits[real], expected[real], rtol=1e-4, atol=1e-5)


def _best(mesh: dict[str, int], out: Path) -> tuple[int, float, float]:
    """Return the best step, its loss, and the loss of the model at the end."""
    with as_launched():
        trainer = made(
            mesh, out, load_best_model_at_end=True, eval_strategy="steps", eval_steps=2, save_strategy="steps",
            save_steps=2, learning_rate=0.1, max_steps=12, callbacks=[transformers.EarlyStoppingCallback(2)],
            save_total_limit=2,
        )  # fmt: skip
        trainer.train()
        step, best, at_the_end = trainer.state.best_global_step, trainer.state.best_metric, trainer.evaluate()
        if dist.get_rank() == 0:
            (out / f"checkpoint-{step}" / "trainer_state.json").unlink()
        before = [p.detach().clone() for p in trainer.model.parameters()]
        trainer._load_best_model()  # keeps the weights: the run is done
        assert all(torch.equal(p, x) for p, x in zip(trainer.model.parameters(), before, strict=True))
        return step, best, at_the_end["eval_loss"]


def test_the_best_model_is_loaded_at_the_end(pool2: RankPool, tmp_path: Path) -> None:
    for step, best, at_the_end in pool2.run(_best, {"ulysses": 2}, tmp_path):
        assert 0 < step < 12 and at_the_end == pytest.approx(best, rel=1e-6)
    assert len(list(tmp_path.glob("checkpoint-*"))) <= 2


class _Signal(transformers.TrainerCallback):  # type: ignore[misc]
    """A signal reaches one rank, in the middle of a step."""

    def __init__(self, signum: int) -> None:
        self.signum = signum

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 2 and dist.get_rank() == 1:
            os.kill(os.getpid(), self.signum)


def _stopped(mesh: dict[str, int], out: Path) -> list[int]:
    """Return the steps that were done, and the signals; by transformers' option, and by our callback."""
    found = []
    with as_launched():
        for signum, options in ((signal.SIGTERM, {"enable_jit_checkpoint": True}), (signal.SIGUSR1, {})):
            before = [signal.getsignal(x) for x in SIGNALS]
            trainer = made(mesh, out / str(signum), **STEPS, **options, callbacks=[_Signal(signum)])
            if not options:
                trainer.add_callback(StopOnSignal())
            trainer.train()
            stop = next(x for x in trainer.callback_handler.callbacks if isinstance(x, StopOnSignal))
            found += [trainer.state.global_step, stop.signum]
            assert [signal.getsignal(x) for x in SIGNALS] == before
    return found


def test_a_signal_is_forgotten_and_its_handler_restored_when_a_run_ends() -> None:
    before, stop, nothing = [signal.getsignal(x) for x in SIGNALS], StopOnSignal(), arguments(Path("out"))
    for _ in range(2):
        stop.on_train_begin(nothing, None, None)
        assert stop.request.signum is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.request.signum == signal.SIGTERM
        stop.close()  # by the trainer, after an error, too
        assert [signal.getsignal(x) for x in SIGNALS] == before


def test_a_signal_to_one_rank_saves_and_stops_all(pool2: RankPool, tmp_path: Path) -> None:
    expected = [3, signal.SIGTERM, 3, signal.SIGUSR1]
    assert pool2.run(_stopped, {"ulysses": 2}, tmp_path) == [expected, expected]
    for signum in SIGNALS:
        assert newest_undamaged(tmp_path / str(signum))[0].step == 3  # type: ignore[union-attr]


# ---------------------------------------------------------------------------------------------------------------------
# Evaluation, and what is refused.


def _accuracy(prediction: Any) -> dict[str, float]:
    predicted, labels = prediction.predictions.argmax(-1)[:, :-1], prediction.label_ids[:, 1:]
    return {"accuracy": float((predicted == labels)[labels != -100].mean()), "rows": float(len(labels))}


def _evaluated(mesh: dict[str, int] | None, out: Path) -> dict[str, float]:
    if mesh is None:
        trainer = transformers.Trainer(
            build("Llama"), arguments(out, per_device_eval_batch_size=10), collate, eval_dataset=Samples(10, 2),  # type: ignore[arg-type]
            compute_metrics=_accuracy,
        )  # fmt: skip
        return dict(trainer.evaluate())
    with as_launched():
        return dict(made(mesh, out, compute_metrics=_accuracy).evaluate())


def test_metrics_see_all_tokens_and_each_sample_once(pool4: RankPool, tmp_path: Path) -> None:
    """Ten samples in batches of four: two replicas fill the last batch."""
    expected = _evaluated(None, tmp_path)
    for mesh in ({"data": 2, "ring": 2}, {"ulysses": 2, "tensor": 2}):
        for found in pool4.run(_evaluated, mesh, tmp_path):
            for key in ("eval_loss", "eval_accuracy", "eval_rows"):
                assert found[key] == pytest.approx(expected[key], rel=1e-5), key


class _Stream(torch.utils.data.IterableDataset[dict[str, Any]]):
    def __iter__(self) -> Any:
        yield from Samples(10, 2).samples


def _streamed(mesh: dict[str, int], out: Path) -> list[float]:
    with as_launched():
        trainer = made(mesh, out)
        return [trainer.evaluate(data)["eval_loss"] for data in (Samples(10, 2), _Stream())]


def test_rows_that_fill_the_last_batch_of_a_stream_do_not_count(pool2: RankPool, tmp_path: Path) -> None:
    for whole, streamed in pool2.run(_streamed, {"data": 2}, tmp_path):
        assert streamed == pytest.approx(whole, rel=1e-6)


class _Marked(Samples):
    """Sequences with a number for each, as the labels of a reward model."""

    def __getitem__(self, at: int) -> dict[str, Any]:
        sample = dict(super().__getitem__(at))
        return {**sample, "labels": sample["input_ids"].float().mean() / 30 - 1}


def _collate_marked(samples: list[dict[str, Any]]) -> dict[str, Any]:
    batch = collate([{**sample, "labels": sample["input_ids"]} for sample in samples])
    return {**batch, "labels": torch.stack([sample["labels"] for sample in samples])}


def _errors(prediction: Any) -> dict[str, float]:
    off = prediction.predictions[:, 0] - prediction.label_ids
    return {"worst": float(abs(off).max()), "rows": float(len(off))}


def _regressed(mesh: dict[str, int] | None, out: Path) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Train, save, and return the log and an evaluation of ten samples."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**BASE, num_labels=1)
    model = transformers.AutoModelForSequenceClassification.from_config(config)
    given = {"data_collator": _collate_marked, "train_dataset": _Marked(64, 1), "eval_dataset": _Marked(10, 2),
             "compute_metrics": _errors}  # fmt: skip
    rows = {"max_steps": 6, "per_device_eval_batch_size": 10}
    if mesh is None:
        trainer = transformers.Trainer(model, arguments(out, **rows), **given)
        trainer.train()
        return trainer.state.log_history, dict(trainer.evaluate())
    with as_launched():
        sp = longspan.SequenceSharding(longspan.init_mesh(**mesh))
        rows |= {"per_device_train_batch_size": 4 // sp.data_size, "per_device_eval_batch_size": 4 // sp.data_size}
        sharded_trainer: Any = longspan.trainer(transformers.Trainer)(model, arguments(out, **rows), **given, sp=sp)  # type: ignore[call-arg]
        sharded_trainer.train()
        sharded_trainer.save_model()
        return sharded_trainer.state.log_history, dict(sharded_trainer.evaluate())


def test_a_classifier_is_trained_evaluated_and_saved(pool4: RankPool, tmp_path: Path) -> None:
    """Ten samples in batches of four, on two replicas: samples that fill the last batch do not count."""
    log, evaluated = _regressed(None, tmp_path / "plain")
    for mine, found in pool4.run(_regressed, {"data": 2, "ring": 2}, tmp_path):
        compare(mine, log)
        for key in ("eval_loss", "eval_worst", "eval_rows"):
            assert found[key] == pytest.approx(evaluated[key], rel=1e-4), key
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    batch = _collate_marked([_Marked(10, 2)[at] for at in range(10)])
    assert float(loaded.eval()(**batch).loss.detach()) == pytest.approx(evaluated["eval_loss"], rel=1e-4)


def test_an_evaluation_of_the_loss_computes_no_logits(pool2: RankPool, tmp_path: Path) -> None:
    assert pool2.run(_seen_logits, {"ulysses": 2}, tmp_path) == [[], []]


def _seen_logits(mesh: dict[str, int], out: Path) -> list[Any]:
    seen = []
    with as_launched():
        trainer = made(mesh, out)
        trainer.model.lm_head.register_forward_hook(lambda m, args, out: seen.append(type(out).__name__))
        trainer.evaluate()
    return [name for name in seen if name != "DeferredLogits"]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"label_smoothing_factor": 0.1}, "label_smoothing_factor=0.1 .* logits of all tokens"),
    ({"auto_find_batch_size": True}, "auto_find_batch_size"),
    ({"average_tokens_across_devices": False}, "average_tokens_across_devices=False"),
    ({"load_best_model_at_end": True, "save_only_model": True, "save_strategy": "steps", "eval_strategy": "steps"},
     "save_only_model"),
    ({"compute_loss_func": print}, "compute_loss_func"),
    ({"shared_prefixes": True}, "shared_prefixes=True is for trainers that score several completions"),
]  # fmt: skip


def _refuse_all(mesh: dict[str, int], out: Path) -> None:
    with as_launched():
        for changes, message in REFUSED:
            with pytest.raises(LongspanError, match=message):
                made(mesh, out, **changes)
        with pytest.raises(LongspanError, match="`loss_weights`: a Trainer divides the loss by the number of labels"):
            made(mesh, out)._prepare_inputs({"loss_weights": torch.ones(1)})


def test_unsupported_options_are_refused(pool2: RankPool, tmp_path: Path) -> None:
    pool2.run(_refuse_all, {"data": 2}, tmp_path)


class _OwnLoss(transformers.Trainer):  # type: ignore[misc]
    """Computes its loss from logits: of all labels, or of those of this rank's tokens."""

    cut = False

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = (longspan.shard_batch(inputs, self.longspan_sp) if self.cut else inputs)["labels"]
        inputs.pop("labels")
        logits = model(**inputs).logits
        if not self.cut:
            logits, labels = logits[:, :-1], labels[:, 1:]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class _MixedIn(longspan.TrainerMixin, _OwnLoss):  # type: ignore[misc]
    pass


class _OtherFault(_OwnLoss):
    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        model(**{key: x for key, x in inputs.items() if key != "labels"})
        raise KeyError("mine")


def _own_losses(mesh: dict[str, int], out: Path) -> list[str]:
    said = []
    with as_launched():
        quiet()
        sp = longspan.SequenceSharding(longspan.init_mesh(**mesh))
        cuts = longspan.trainer(type("_Cut", (_OwnLoss,), {"cut": True}))
        for cls in (longspan.trainer(_OwnLoss), _MixedIn, longspan.trainer(_OtherFault), cuts):
            trainer = cls(build("Llama"), arguments(out, max_steps=1), collate, Samples(64, 1), sp=sp)
            try:
                trainer.train()
                said.append(f"{trainer.state.log_history[0]['loss']:.1f}")
            except (LongspanError, KeyError) as error:
                said.append(str(error))
    return said


def test_a_loss_of_logits_and_whole_labels_is_refused(pool2: RankPool, tmp_path: Path) -> None:
    """Also in a class with the mixin. Other errors stay, and labels that are cut with the batch are legal."""
    for whole, mixed, other, cut in pool2.run(_own_losses, {"ulysses": 2}, tmp_path):
        for said in (whole, mixed):
            assert all(
                text in said for text in ("logits of this rank's", "pass labels=", "token_logprobs", "sp.gather")
            )
        assert other == "'mine'" and 3 < float(cut) < 6


def test_only_trainers_are_accepted() -> None:
    with pytest.raises(LongspanError, match=r"takes transformers\.Trainer or a subclass"):
        longspan.trainer(dict)  # type: ignore[type-var]
    with pytest.raises(
        LongspanError, match=r"got an instance of LlamaForCausalLM; call longspan\.trainer\(transf.*\)$"
    ):
        longspan.trainer(build("Llama"))
    made_twice = longspan.trainer(longspan.trainer(transformers.Trainer))
    assert made_twice.__mro__.count(longspan.TrainerMixin) == 1


def test_on_one_device_nothing_changes(tmp_path: Path) -> None:
    compare(sharded_alone(tmp_path, **EVALUATED), _plain("plain"))


# ---------------------------------------------------------------------------------------------------------------------
# Trackers.


def _tracked(mesh: dict[str, int], out: Path) -> list[dict[str, Any]]:
    with as_launched():
        trainer = made(mesh, out, max_steps=6, report_to="tensorboard", include_num_input_tokens_seen="non_padding")
        trainer.train()
        return list(trainer.state.log_history)


def test_trackers_log_once_what_one_process_logs(pool4: RankPool, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    expected = plain(tmp_path / "plain", max_steps=6, include_num_input_tokens_seen="non_padding")
    pool4.run(_tracked, {"data": 2, "ring": 2}, tmp_path / "sharded")
    (events,) = (tmp_path / "sharded").rglob("events.out.tfevents.*")
    board = EventAccumulator(str(events)).Reload()
    flops, at_most = board.Scalars("train/total_flos")[-1].value, expected[-1]["total_flos"]
    assert 0.8 * at_most < flops <= at_most  # two replicas pad their halves of a batch less
    for name in ("loss", "grad_norm", "learning_rate", "num_input_tokens_seen"):
        scalars = board.Scalars(f"train/{name}")[:6]  # tokens are logged again at the end
        assert [scalar.step for scalar in scalars] == [1, 2, 3, 4, 5, 6], name
        assert [scalar.value for scalar in scalars] == pytest.approx([log[name] for log in expected[:6]], rel=2e-4), (
            name
        )


# ---------------------------------------------------------------------------------------------------------------------
# accelerate, in a custom loop.


class _Tracker(GeneralTracker):  # type: ignore[misc]
    """A tracker that keeps the losses it logs."""

    name, requires_logging_directory = "losses", False

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    @property
    def tracker(self) -> list[float]:
        return self.losses

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        self.losses.append(values["loss"])


def _loop(mesh: dict[str, int] | None, precision: str) -> tuple[list[float], list[float]]:
    """Return the losses of six steps, and those that a tracker logged. Everything but the model is prepared."""
    tracker = _Tracker()
    accelerator = Accelerator(cpu=True, mixed_precision=precision, log_with=tracker)
    accelerator.init_trackers("loop")
    model = build("Llama").train()
    rows, replicas = 4, 1
    if mesh is not None:
        sp = longspan.SequenceSharding(longspan.init_mesh(**mesh))
        accelerator = ReplicaAccelerator.of(accelerator, sp)
        model = longspan.parallelize(model, sp)
        replicas = sp.data_size
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(
        optimizer, total_iters=6 * replicas
    )  # accelerate steps for each process
    loader = torch.utils.data.DataLoader(Samples(24, 5), rows // replicas, shuffle=True, collate_fn=collate,
                                         generator=torch.Generator().manual_seed(3))  # fmt: skip
    loader, optimizer, schedule = accelerator.prepare(loader, optimizer, schedule)
    losses = []
    for batch in loader:
        with accelerator.autocast():
            loss = model(**batch).loss
        loss.backward()
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        accelerator.log({"loss": losses[-1]}, step=len(losses))
    return losses, tracker.losses


def _loop_on(mesh: dict[str, int], precision: str) -> tuple[list[float], list[float]]:
    with as_launched():
        AcceleratorState._reset_state(reset_partial_state=True)
        return _loop(mesh, precision)


@pytest.mark.parametrize(("mesh", "precision"), [({"data": 2, "ring": 2}, "no"), ({"ulysses": 2}, "bf16")], ids=str)
def test_a_loop_on_accelerate(get_pool: Callable[[int], RankPool], mesh: dict[str, int], precision: str) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    expected, _ = _loop(None, precision)
    assert len(expected) == 6
    found = get_pool(functools.reduce(lambda a, b: a * b, mesh.values())).run(_loop_on, mesh, precision)
    for rank, (losses, logged) in enumerate(found):
        assert losses == pytest.approx(expected, rel=1e-5 if precision == "no" else 2e-2)
        assert logged == (losses if rank == 0 else [])


def test_a_full_disk_is_named_where_torch_writes(tmp_path: Path) -> None:
    sp = longspan.SequenceSharding(MeshGroups("cpu"))
    trainer: Any = longspan.trainer(transformers.Trainer)(
        build("Llama"), arguments(tmp_path), collate, Samples(4, 1), sp=sp
    )  # type: ignore[call-arg]
    with largest_file(2000), pytest.raises(LongspanError, match="random states cannot be written to .*unexpected pos"):
        trainer._save_rng_state(str(tmp_path))
