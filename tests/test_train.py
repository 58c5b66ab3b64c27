"""`longspan train`: the same losses as a plain loop, on every mesh, and across every interruption."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from longspan import checkpoint
from longspan.cli import main
from longspan.core.errors import LongspanError
from longspan.core.memory import FASTEST
from longspan.core.sections import replace
from longspan.ranks import launch
from longspan.ranks.launch import RankFailed
from longspan.train import TrainConfig, run
from longspan.train.old_resolve import resolve_memory
from tests.command import ForkedLauncher
from tests.models import needs_mixers, widened
from tests.pictures import GRIDS
from tests.pool import RankError, RankPool, run_forked
from tests.tolerance import excess, excess_of_losses, roughly
from tests.training import (
    cut_after,
    flags,
    log_of,
    losses_of,
    plain_loop,
    refused,
    said_by,
    small_run,
    train,
    train_on,
    weights_of,
    write_config,
)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("model"))


@pytest.fixture
def config(llama: Path, tmp_path: Path) -> TrainConfig:
    return small_run(llama, tmp_path / "run", steps=6)


def _plain_losses(config: TrainConfig, dtype: torch.dtype = torch.float32) -> dict[int, float]:
    """The same training as a plain loop over the unsharded model."""
    torch.manual_seed(config.seed)
    model_config = AutoConfig.from_pretrained(config.model.config)
    auto: Any = AutoModelForImageTextToText if hasattr(model_config, "vision_config") else AutoModelForCausalLM
    model = auto.from_config(model_config, dtype=torch.float32).train()
    model = widened(model) if dtype == torch.float64 else model
    return plain_loop(model, config, "documents" if config.data.pack == "documents" else "stream")


# --- the same numbers


PLAIN_LOOP = [
    ("stream", ("alone", "data x ring, all-gathered, contiguous", "data x ulysses, accumulating")),
    ("documents", ("ring x ulysses",)),
]

LOGGED = {
    "ring x ulysses": "4 cpu ranks, data 1 x ring 2 x ulysses 2 (zigzag, p2p); fp32",
    "data x ulysses, accumulating": "4 cpu ranks, data 2 x ulysses 2; fp32",
}


@pytest.mark.parametrize(("pack", "names"), PLAIN_LOOP)
def test_losses_are_those_of_a_plain_loop(
    config: TrainConfig, pool4: RankPool, pack: Any, names: tuple[str, ...]
) -> None:
    """The first rank alone logs the mesh."""
    config = replace(config, pack=pack, steps=4)
    plain, exact = _plain_losses(config), _plain_losses(config, torch.float64)
    assert plain[4] < plain[1] - 0.4
    meshes: dict[str, dict[str, Any]] = {
        "alone": {},
        "ring x ulysses": {"ring": 2, "ulysses": 2, "ring_impl": "p2p"},
        "data x ring, all-gathered, contiguous": {
            "data_degree": 2, "ring": 2, "layout": "contiguous", "ring_impl": "allgather", "fsdp": False,
        },
        "data x ulysses, accumulating": {"ulysses": 2, "data_degree": 2, "micro_batch": 1},
    }  # fmt: skip
    for name in names:
        other = replace(config, out=config.out / name, save_every=0, export="never", **meshes[name])
        if other.parallel.ranks == 1:
            train(other)
        else:
            first, *others = pool4.run(said_by, other, timeout=240)
            assert LOGGED.get(name, "") in first and others == [""] * 3
            record = log_of(other.out)[-1]
            assert 0 < record["communication"] < 1
        assert excess_of_losses(losses_of(other.out), plain, exact) <= 1, name


@needs_mixers
def test_recurrent_layers_train(tmp_path: Path, pool2: RankPool) -> None:
    sizes = {"mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2, "head_dim": 8}
    path = write_config(tmp_path, model_type="nemotron_h", hybrid_override_pattern="M*-", chunk_size=16, **sizes)
    config = small_run(path, tmp_path / "run", steps=3, pack="stream", ring=2, save_every=0, export="never")
    plain, exact = _plain_losses(config), _plain_losses(config, torch.float64)
    train_on(pool2, config)
    assert excess_of_losses(losses_of(config.out), plain, exact) <= 1


def test_a_vision_language_model_trains_on_text(tmp_path: Path, pool2: RankPool) -> None:
    """Its tower stays as it is, also in a run that resumes."""
    tower, text = (GRIDS["Qwen2_5_VL"][f"{part}_config"] for part in ("vision", "text"))
    ids = {"image_token_id": 380, "video_token_id": 381}
    sizes = {"vision_config": tower, "text_config": text | {"vocab_size": 384, "max_position_embeddings": 512}}
    path = write_config(tmp_path, model_type="qwen2_5_vl", **ids, **sizes)
    config = small_run(path, tmp_path / "run", steps=3, ring=2)
    plain, exact = _plain_losses(config), _plain_losses(config, torch.float64)
    train_on(pool2, replace(config, steps=2))
    train_on(pool2, config)
    assert excess_of_losses(losses_of(config.out), plain, exact) <= 1
    torch.manual_seed(config.seed)
    first = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(path), dtype=torch.float32)
    trained = AutoModelForImageTextToText.from_pretrained(config.out / "hf")
    for (name, before), after in zip(first.named_parameters(), trained.parameters(), strict=True):
        assert torch.equal(before, after) == ("visual" in name), name


def test_bf16_stays_near_fp32(config: TrainConfig, pool2: RankPool) -> None:
    short = replace(config, steps=3, save_every=0)
    plain = _plain_losses(short)
    train_on(pool2, replace(short, ulysses=2, dtype="bf16"))
    losses = losses_of(short.out)
    assert all(abs(losses[step] / plain[step] - 1) < roughly(torch.bfloat16) for step in plain)
    assert losses != plain
    assert {x.dtype for x in weights_of(short.out).values()} == {torch.bfloat16}


def test_memory_options_change_only_rounding(config: TrainConfig, pool2: RankPool) -> None:
    short = replace(config, steps=2, save_every=1, export="never", ulysses=2, context=512)
    train_on(pool2, replace(short, out=short.out / "plain"))
    longest = replace(short, memory="longest", offload="disk", checkpointing="selective")
    train_on(pool2, longest)
    plain, found = losses_of(short.out / "plain"), losses_of(longest.out)
    assert all(abs(found[step] - plain[step]) < roughly(torch.float32) * plain[step] for step in plain)
    lines = log_of(longest.out)
    assert all(line["offload_gb_per_s"] > 0 and 0 <= line["offload_waited"] < 1 for line in lines)
    again = replace(longest, out=longest.out / "again")
    cut_after(longest, 1, again.out)
    train_on(pool2, again)
    assert losses_of(again.out)[2] == found[2]  # to the bit


def test_the_longest_context_is_resolved_before_anything_starts(config: TrainConfig) -> None:
    asked = replace(config, context="max", rank_memory=1.0, ulysses=2)
    found, said = resolve_memory(asked)
    assert found.context == 512 and found.memory.memory == "fastest"
    assert "would fit, the model's positions end at 512" in said[1]
    longer = replace(asked, context=1 << 16, memory="auto", rank_memory=0.01, rope_scaling="yarn")
    with pytest.raises(LongspanError, match=r"do not fit on ulysses=2 .*Item by item.*(suffice|fits with)"):
        resolve_memory(longer)
    assert resolve_memory(config) == (config, [])


def test_a_mesh_that_plan_rejects_is_refused_with_the_same_message(
    config: TrainConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = "needs at least 16 query heads"
    assert main(["plan", "--model", str(config.model.config), "--gpus", "16", "--context", "512", "--json"]) == 0
    rejected = json.loads(capsys.readouterr().out)["rejected"]
    (reason,) = {why for each in rejected if each["mesh"]["ulysses"] == 16 for why in each["reasons"] if wanted in why}
    with pytest.raises(LongspanError, match=re.escape(reason)):
        run(replace(config, ulysses=16, context=512, dry_run=True))


def test_memory_options_are_chosen_if_the_model_does_not_fit(config: TrainConfig) -> None:
    """Without a memory flag, the run logs its choice; `--memory fastest` prevents it."""
    tight = replace(config, context=512, rank_memory=0.003)
    found, said = resolve_memory(tight)
    assert found.memory.level == "fastest" and found.memory.to_memory() != FASTEST
    assert found.memory.to_memory().describe() in said[-1]
    assert resolve_memory(replace(tight, memory="fastest"))[0].memory.to_memory() == FASTEST
    with pytest.raises(LongspanError, match=r"To start it all the same, give --memory fastest"):
        resolve_memory(replace(tight, rank_memory=0.001))


# --- resuming


@pytest.fixture(scope="module")
def finished(llama: Path, pool2: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finished")
    train_on(pool2, replace(small_run(llama, out, steps=6), ulysses=2))
    return out


@pytest.fixture
def uninterrupted(config: TrainConfig, finished: Path) -> TrainConfig:
    """A copy of a finished run on two ranks."""
    shutil.copytree(finished, config.out)
    return replace(config, ulysses=2)


def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(
    uninterrupted: TrainConfig, pool2: RankPool, tmp_path: Path
) -> None:
    resumed = cut_after(uninterrupted, 2, tmp_path / "resumed")
    train_on(pool2, resumed)
    assert losses_of(resumed.out) == losses_of(uninterrupted.out)
    log = (resumed.out / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in log] == [1, 2, 3, 4, 5, 6]
    assert json.loads(log[-1])["tokens"] == 6 * 4 * 61
    expected = weights_of(uninterrupted.out)
    assert all(torch.equal(x, expected[name]) for name, x in weights_of(resumed.out).items())


def test_elastic_batches_train_as_documents_one_by_one_and_resume_to_the_bit(
    llama: Path, pool2: RankPool, pool4: RankPool, tmp_path: Path
) -> None:
    data = tmp_path / "texts.jsonl"
    texts = [("longer " * (7 * number % 9) + f"text {number}")[: 3 + 11 * number % 58] for number in range(40)]
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    config = small_run(llama, tmp_path / "one by one", data=str(data), pack="none", batch=8, steps=4, ulysses=2)
    train_on(pool2, config)
    expected = losses_of(config.out)
    elastic = replace(config, out=tmp_path / "elastic", pack="auto", elastic=True, gpu="l40s")
    train_on(pool2, elastic)
    assert losses_of(elastic.out) == pytest.approx(expected, rel=1e-4)
    resumed = cut_after(elastic, 2, tmp_path / "resumed")
    train_on(pool2, resumed)
    assert losses_of(resumed.out) == losses_of(elastic.out)
    weights = weights_of(elastic.out)
    assert all(torch.equal(x, weights[name]) for name, x in weights_of(resumed.out).items())
    other = replace(elastic, out=tmp_path / "other", ring=2, ulysses=1, data_degree=2)
    train_on(pool4, other)
    assert losses_of(other.out) == pytest.approx(expected, rel=1e-4)
    for change, message in (
        ({"pack": "best-fit"}, "--elastic takes documents one by one, and --pack best-fit does not"),
        ({"elastic": False, "gpu": "h100"}, "--gpu h100 is for the schedule of --elastic"),
        ({"micro_batch": 2}, "--micro-batch 2: with --elastic the schedule decides"),
        ({"optimizer_in_backward": True, "clip": 0}, "--elastic accumulates gradients over rounds"),
    ):
        refused(replace(elastic, out=tmp_path / "none"), message, **change)


def test_a_run_resumes_on_another_mesh_in_the_same_order(
    uninterrupted: TrainConfig, pool4: RankPool, tmp_path: Path
) -> None:
    anew = replace(uninterrupted, out=tmp_path / "plain")  # its data from the beginning
    plain, exact = _plain_losses(anew), _plain_losses(anew, torch.float64)
    for name, changes in {
        "alone": {"ulysses": 1},
        "unsharded": {"ulysses": 2, "data_degree": 2, "fsdp": False},
        "ring": {"ring": 2, "ulysses": 2, "ring_impl": "p2p"},
    }.items():
        other = replace(cut_after(uninterrupted, 4, tmp_path / name), **changes)  # type: ignore[arg-type]
        train(other) if other.parallel.ranks == 1 else train_on(pool4, other)
        assert excess_of_losses(losses_of(other.out), plain, exact) <= 1, name
        states = [
            json.loads((c.checkpoints / "step-00000006" / "complete.json").read_text())["state"]
            for c in (other, uninterrupted)
        ]
        assert states[0]["data"]["sequences"] == states[1]["data"]["sequences"] == 24
        assert states[0]["tokens"] == states[1]["tokens"]


def test_resuming_from_an_older_checkpoint_drops_later_steps(uninterrupted: TrainConfig, pool2: RankPool) -> None:
    from longspan.checkpoint import complete_steps

    back = replace(uninterrupted, resume=str(uninterrupted.checkpoints / "step-00000002"), steps=5, keep=1)
    train_on(pool2, back)
    assert complete_steps(back.checkpoints) == [5]
    assert sorted(losses_of(back.out)) == [1, 2, 3, 4, 5]


def test_a_finished_run_is_exported_again_and_then_has_nothing_to_do(
    uninterrupted: TrainConfig, pool2: RankPool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = losses_of(uninterrupted.out)
    shutil.rmtree(uninterrupted.out / "hf")
    train_on(pool2, uninterrupted)
    assert losses_of(uninterrupted.out) == before
    assert weights_of(uninterrupted.out)

    def written() -> dict[Path, tuple[int, int]]:
        files = [path for path in uninterrupted.out.rglob("*") if path.is_file() and path.name != ".lock"]
        return {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in files}

    held = written()
    train_on(pool2, uninterrupted)  # the ranks, as torchrun starts them
    with monkeypatch.context() as patched:  # the command, which starts none
        patched.setattr("longspan.ranks.launch.launch", lambda *_, **__: pytest.fail("ranks were started"))
        assert run(replace(uninterrupted, lr=1.0)) == 0
    said = r"nothing to do: \S+ is at step 6 of --steps 6, and \S+hf holds its export; .*\n"
    assert re.fullmatch(said, capsys.readouterr().out)
    assert written() == held
    (uninterrupted.out / "hf" / "config.json").write_text("")
    assert checkpoint.exported_step(uninterrupted.out / "hf") is None


# --- outputs


def test_the_export_is_a_hugging_face_folder(tmp_path: Path, config: TrainConfig, pool2: RankPool) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = write_config(tmp_path, tie_word_embeddings=True)
    train_on(pool2, replace(config, config=path, ulysses=2, steps=2))
    folder = config.out / "hf"
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert "longspan" not in (folder / "config.json").read_text()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("the", return_tensors="pt").input_ids
    assert model.generate(ids, max_new_tokens=2).shape[1] <= ids.shape[1] + 2
    from longspan.train.inputs import open_local

    def loss_of(batch: list[Any]) -> tuple[float, float]:
        ids = torch.stack([torch.from_numpy(sequence.ids) for sequence in batch])
        single, exact = (m(input_ids=ids, labels=ids).loss.item() for m in (model, widened(model)))
        return single, exact

    more = replace(config, config=path, ulysses=2, steps=3, export="never")
    train_on(pool2, more)
    batches = list(islice(iter(open_local(more).sequences(61)), 12))
    assert excess(losses_of(more.out)[3], *loss_of(batches[8:])) <= 1
    again = replace(more, config=None, model=str(folder), steps=1, out=tmp_path / "again", export="never")
    assert again.model.tokenizer_name == again.model.model
    train_on(pool2, again)
    assert excess(losses_of(again.out)[1], *loss_of(batches[:4])) <= 1


def test_every_reported_step_is_logged_in_full(config: TrainConfig, pool2: RankPool) -> None:
    train_on(pool2, replace(config, ulysses=2, steps=5, log_every=2, save_every=0))
    records = log_of(config.out)
    assert [record["step"] for record in records] == [1, 2, 4, 5]
    last = records[-1]
    assert last["lr"] < records[1]["lr"] == 1e-2
    assert last["tokens"] == 5 * 4 * 61
    assert 0 < last["communication"] < 1
    assert last["mfu"] is None  # no peak is known for a CPU
    assert last["peak_memory_gib"] > 0.05
    assert last["tokens_per_s"] == pytest.approx(4 * 61 / last["step_s"])
    assert list((config.out / "tensorboard").glob("events.*"))


# --- interruptions, through the launcher


def _wait_for(condition: Callable[[], bool], limit_s: float = 120) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.05)


@pytest.mark.launcher
def test_sigterm_saves_and_the_same_command_resumes(config: TrainConfig, pool2: RankPool, tmp_path: Path) -> None:
    config = replace(config, ulysses=2, steps=12, save_every=0, schedule="constant")
    whole = replace(config, out=tmp_path / "whole", export="never")
    train_on(pool2, whole)
    log = config.out / "metrics.jsonl"
    process = ForkedLauncher(tmp_path, main, ["train", *flags(config)])
    _wait_for(lambda: (log.exists() and len(log.read_text().splitlines()) >= 3) or process.poll() is not None)
    process.send_signal(signal.SIGTERM)
    stdout, stderr = process.communicate(timeout=90)
    assert process.returncode == 143, stderr
    stopped = max(losses_of(config.out))
    assert f"stopped by a signal after step {stopped}" in stdout
    assert (config.checkpoints / f"step-{stopped:08d}" / "complete.json").exists()
    assert 3 <= stopped < 12
    train_on(pool2, config)
    assert losses_of(config.out) == losses_of(whole.out)


# --- refused


def test_invalid_settings_are_refused_before_anything_is_read(config: TrainConfig) -> None:
    refused(config, r"needs either --model NAME_OR_PATH or --config FILE, got neither", config=None)
    refused(config, r"got both", model="x")
    refused(config, r"needs --data", data="")
    refused(config, r"--steps must be at least 1, got 0", steps=0)
    refused(config, r"--keep must be at least 0, got -1", keep=-1)
    refused(config, r"--context 2 is too short: .* for each of the 4 ranks", context=2, ulysses=4)
    refused(config, r"for each of the 8 ranks", context=7, ring=2, ulysses=4)
    refused(config, r"--ring must be at least 1, got 0", ring=0)
    refused(config, r"mesh: --ring 3 --ulysses 2 needs 6", nproc=3, ring=3, ulysses=2)
    refused(config, r"--lr must be above 0, got 0", lr=0)
    refused(config, r"--warmup 7 is longer than the run of --steps 6", warmup=7)
    refused(
        config,
        r"--batch 4 is not a multiple of .* --data-degree 3 = 3; give --batch 3 or 6",
        data_degree=3,
        micro_batch=1,
    )


def test_unsuitable_models_and_tokenizers_are_refused(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused(config, r"--context 513 is longer than the 512 positions .*give --context 512 or less, or", context=513)
    (tmp_path / "my-model").mkdir()
    monkeypatch.chdir(tmp_path)
    hub = r"/my-modle \(did you mean my-model\?\), and as a name on the Hugging Face hub it would need the network, but"
    refused(config, rf"--model my-modle: there is .*{hub}", config=None, model="my-modle")
    refused(config, rf"--data my-modle: there is no file or folder /.*{hub}", data="my-modle")
    refused(config, r"--tokenizer no/such: there is no file or folder /.*/no/such, and as a", tokenizer="no/such")
    refused(config, r"--config .*no\.json does not exist; give the path", config=tmp_path / "no.json")
    for kind, said in {"t5": "an encoder-decoder", "paligemma": "a vision-language model"}.items():
        other = tmp_path / f"{kind}.json"
        transformers.AutoConfig.for_model(kind).to_json_file(other)
        refused(config, rf"--config \S+{kind}\.json is {said} \({kind}\); longspan takes causal", config=other)
    refused(config, r"--dropout 0\.1: only 0 is allowed", dropout=0.1)
    small = write_config(tmp_path, vocab_size=300)
    refused(config, r"--tokenizer bytes has 384 ids, the model's vocabulary only 300", config=small)


def test_refused_runs_make_no_folder(config: TrainConfig, tmp_path: Path) -> None:
    for changes in ({"context": 513}, {"data": "gone.txt"}, {"lr": float("nan")}, {"tokenizer": "./gone"}):
        refused(config, "", **changes)
        assert not config.out.exists(), changes
    (tmp_path / "file").touch()
    refused(config, r"--out .* cannot be written", out=tmp_path / "file")


def test_the_largest_seed_trains(config: TrainConfig) -> None:
    train(replace(config, seed=(1 << 63) - 1, steps=1, batch=2, save_every=0, export="never"))
    assert len(losses_of(config.out)) == 1


def _deterministic() -> bool:
    from longspan.train.loop import be_deterministic

    be_deterministic()
    return torch.are_deterministic_algorithms_enabled() and os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_deterministic_kernels_are_switched_on() -> None:
    assert run_forked(_deterministic)


def test_every_rank_and_step_has_its_own_seed() -> None:
    from longspan.train.loop import step_seed

    largest = (1 << 63) - 1
    drawn = {step_seed(s, step, rank) for s in (0, 1, largest) for step in (0, 1, 1 << 30) for rank in (0, 1, 1 << 16)}
    assert len(drawn) == 27
    for seed in drawn:
        torch.manual_seed(seed)
    assert step_seed(3, 4, 5) == 3800777695958491832  # fixed, so that a resumed run draws the same


def test_a_rank_that_reads_other_data_is_named(config: TrainConfig, pool2: RankPool) -> None:
    """Files of the same names and sizes, with different text."""
    said = r"the ranks read different data \(unlike most: rank 1\); every machine needs the same files"
    with pytest.raises(RankError, match=said):
        pool2.run(_train_on_own_data, replace(config, ulysses=2), timeout=240)


def _train_on_own_data(config: TrainConfig) -> None:
    from longspan.data import DocumentSource
    from longspan.train.loop import Trainer

    trainer = Trainer(config)
    source = DocumentSource(config.data.name, seed=torch.distributed.get_rank())
    trainer.inputs = replace(trainer.inputs, source=source)
    trainer.run()


class _Signalled(Exception):
    """Stands for a process that a signal has ended."""


@pytest.mark.parametrize("phase", ["save", "export"])
def test_a_signal_after_the_last_step_saves_without_export(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    from longspan.train.loop import Trainer

    def at_once(*_: object) -> None:
        raise _Signalled  # the default action would end this process

    def signalled(self: Trainer, *args: Any, **options: Any) -> None:
        if self.step == config.steps:
            signal.raise_signal(signal.SIGTERM)
        plain(self, *args, **options)

    plain = getattr(Trainer, f"_{phase}")
    monkeypatch.setattr(Trainer, f"_{phase}", signalled)
    before = signal.signal(signal.SIGTERM, at_once)
    try:
        with pytest.raises(launch.Stopped if phase == "save" else _Signalled):
            train(config)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (config.checkpoints / "step-00000006" / "complete.json").exists()
    assert not (config.out / "hf").exists()


def test_failed_ranks_are_restarted_up_to_max_restarts(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    resumes: list[str] = []

    def fail(entry: Any, tried: TrainConfig, **_: Any) -> None:
        resumes.append(tried.checkpoint.resume)
        if len(resumes) < 3:
            raise RankFailed("rank 1 of 2 was killed")

    monkeypatch.setattr(launch, "launch", fail)
    asked = replace(config, ulysses=2, max_restarts=2, resume="never")
    assert run(asked) == 0
    assert resumes == ["never", "auto", "auto"]
    assert "rank 1 of 2 was killed; restart 2 of 2" in capsys.readouterr().err
    resumes.clear()
    with pytest.raises(RankFailed, match=r"rank 1 of 2 was killed"):
        run(replace(asked, max_restarts=1))
    refused(config, r"--max-restarts 1 restarts ranks that this command starts", max_restarts=1)
    refused(config, r"--timeout must be at least 1, got 0", timeout=0)


def test_resuming_another_run_is_refused(uninterrupted: TrainConfig) -> None:
    refused(uninterrupted, r"--resume never, but .* holds a run at step 6; give another --out", resume="never")
    refused(uninterrupted, r"is at step 6, after --steps 5; give more steps", steps=5)
    refused(uninterrupted, r"the run would not be the same: seed was 0, is 1", seed=1)
    refused(uninterrupted, r"checkpoint no/such does not exist", resume="no/such")
    (uninterrupted.checkpoints / "step-00000006" / "__0_0.distcp").write_bytes(b"cut")
    refused(
        uninterrupted,
        r"checkpoint file .*__0_0\.distcp has 3 bytes instead of \d+; resume from the newest .*: .*step-00000004",
        resume=str(uninterrupted.checkpoints / "step-00000006"),
    )
