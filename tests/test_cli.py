"""The command line: flags, files of flags, help without torch, exit codes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import is_dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from longspan import cli
from longspan.cli_help import field_texts
from longspan.cli_values import parse_integer
from longspan.core.errors import LongspanError
from longspan.core.sections import make, options
from longspan.ranks.launch import RankFailed, Stopped
from longspan.train import TrainConfig
from longspan.verify import VerifyConfig
from tests.pool import THREADS

ROOT = Path(__file__).parents[1]


def _parse(*args: str) -> TrainConfig:
    config = cli.parse(TrainConfig, list(args), prog="longspan train", summary="train")
    assert isinstance(config, TrainConfig)
    return config


def _file(tmp_path: Path, text: str) -> str:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return str(path)


# --- flags


def test_flags_are_the_fields() -> None:
    flags = "--config a.json --data pydoc --context 128k --ring 2 --ulysses 4 --ring-impl p2p --no-fsdp --out here"
    more = "--betas 0.8 0.9 --schedule linear --pack documents --nproc 4"
    assert _parse(*flags.split(), *more.split()) == make(
        TrainConfig, config=Path("a.json"), data="pydoc", context=131072, ring=2, ulysses=4, ring_impl="p2p",
        fsdp=False, betas=(0.8, 0.9), schedule="linear", pack="documents", nproc=4, out=Path("here"),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "number"),
    [("8192", 8192), ("8k", 8192), ("8K", 8192), ("1M", 1 << 20), ("8_192", 8192), ("-1", -1), ("1.5e3", 1500)],
)
def test_integers_may_have_a_unit(text: str, number: int) -> None:
    assert parse_integer(text) == number
    assert _parse(f"--context={text}").context == number


@pytest.mark.parametrize("text", ["", "k", "8.5k", "8kk", "eight"])
def test_other_integers_are_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="is not an integer"):
        parse_integer(text)
    with pytest.raises(SystemExit) as stop:
        _parse("--context", text)
    assert stop.value.code == 2
    assert "--context" in capsys.readouterr().err


def test_the_error_for_an_unknown_flag_suggests_the_right_one() -> None:
    for given, meant in {
        "--ulyses": "--ulysses",
        "--contxt=8k": "--context",
        "--no-fspd": "--fsdp",
        "--learning_rate": "--lr",
        "--learning-rat=1": "--lr",
        "--per_device_train_batch_size": "--micro-batch",
        "--num_train_epochs": "--steps",
        "--output_dir": "--out",
        "--max-grad-norm": "--clip",
        "--sequence_len": "--context",
        "--bf16": "--dtype",
    }.items():
        with pytest.raises(LongspanError, match=rf"^longspan train has no option --.*; did you mean {meant}\?$"):
            _parse("--lr", "1e-3", given, "4")
    with pytest.raises(LongspanError, match=r"no option --qqqq; longspan train --help lists all"):
        _parse("--qqqq")
    with pytest.raises(LongspanError, match=r"did you mean --from run.toml\?"):
        _parse("run.toml")
    assert _parse("--data=--learning_rate").data.data == ("--learning_rate",)
    assert _parse("--data", "a.jsonl=0.7", "b/=0.3", "--lr", "1").data.data == ("a.jsonl=0.7", "b/=0.3")


# --- files of flags


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    path = _file(
        tmp_path,
        'context = "8k"\n'
        "fsdp = false\nmicro_batch = 2\n"
        '[data]\ndata = "pydoc"\nshuffle = 0\n'
        "[memory]\ngrad-checkpointing = true\n"
        "[optimizer]\nlr = 1e-3\nbetas = [0.8, 0.9]\n"
        '[parallel]\nring = 2\nlayout = "contiguous"\nring-impl = "p2p"\nulysses = 4\n',
    )
    config = _parse("--from", path, "--ulysses", "2", "--fsdp", "--lr=0.5", "--micro_batch", "3")
    assert (config.data.data, config.context, config.parallel.ulysses, config.fsdp) == (("pydoc",), 8192, 2, True)
    parallel = config.parallel
    assert (parallel.ring, parallel.layout, parallel.ring_impl, parallel.ranks) == (2, "contiguous", "p2p", 4)
    assert (config.optimizer.lr, config.optimizer.betas, config.micro_batch) == (0.5, (0.8, 0.9), 3)
    assert config.memory.grad_checkpointing and config.data.shuffle == 0
    assert _parse(f"--from={path}").fsdp is False


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ulysses = 4", r"line 1: ulysses belongs in the table \[parallel\]; move it there"),
        ("[parallel]\nsteps = 4", r"line 2: steps belongs above all tables"),
        ("[parallel]\nulysses = 1.5", r"line 2: ulysses = 1.5 is invalid: give a whole number"),
        ("[parallel]\nulyses = 4", r"line 2: unknown key 'ulyses'; did you mean 'ulysses'\?"),
        ("zzz = 4", r"unknown key 'zzz'; longspan train --help lists all"),
        ("learning_rate = 1e-4", r"line 1: unknown key 'learning_rate'; did you mean 'lr'\?"),
        ("[paralell]\nulysses = 4", r"line 1: unknown table \[paralell\]; did you mean 'parallel'"),
        ("[train]\nulysses = 4", r"unknown table \[train\]; .*hoose 'checkpoint'"),
        (
            "[checkpoint]\nsave_every = 3\nsave-every = 4",
            r"line 3: save-every is also set in .*line 2, spelled differently",
        ),
        ("lr = 1\nlr = 2", r"is not TOML: .*line 2"),
        ("[optimizer]\nlr = '0.1'", r"line 2: lr = '0.1' is invalid: give a number"),
        ("steps = '8kk'", r"steps = '8kk' is invalid: '8kk' is not an integer"),
        ("fsdp = 'no'", r"fsdp = 'no' is invalid: give true or false"),
        ("out = 5", r"out = 5 is invalid: give a path"),
        ("[data]\ndata = ['pydoc', 7]", r"data = \['pydoc', 7\] is invalid: give text"),
        ("[data]\ndata = []", r"data = \[\] is invalid: give a list of texts"),
        ("[optimizer]\nbetas = [0.9, 0.9, '--lr', 9]", r"give a list of 2 numbers"),
        (
            "[optimizer]\nschedule = 'Linear'",
            r"schedule = 'Linear' is invalid: did you mean 'linear'\? Choose 'cosine', 'linear', 'constant' or 'wsd'",
        ),
        ("no-fsdp = true", r"unknown key 'no-fsdp'; did you mean 'fsdp'"),
        ('out = "a\\u0000b"', r"NUL byte"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(LongspanError, match=message):
        _parse("--from", _file(tmp_path, text))


def test_text_of_a_file_is_never_a_flag(tmp_path: Path) -> None:
    path = _file(
        tmp_path, 'out = "--help"\n[data]\ndata = "--steps"\n[model]\nmodel = "--no-fsdp"\ntokenizer = "--lr=7"'
    )
    config = _parse("--from", path)
    paths = [str(tmp_path / name) for name in ("--steps", "--no-fsdp", "--lr=7", "--help")]  # none is a name on a hub
    assert [*config.data.data, config.model.model, config.model.tokenizer, str(config.out)] == paths
    assert (config.last_step, config.fsdp, config.optimizer.lr) == (1000, True, 3e-4)


def test_sources_of_a_file_have_weights_and_relative_paths(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").touch()
    (tmp_path / "year=2024").mkdir()
    path = _file(tmp_path, '[data]\ndata = ["a.jsonl=0.7", "year=2024", "owner/name=2", "pydoc"]')
    expected = (f"{tmp_path}/a.jsonl=0.7", f"{tmp_path}/year=2024", "owner/name=2", "pydoc")
    assert _parse("--from", path).data.data == expected
    assert _parse("--data", "~/a=0.5").data.data == (f"{Path.home()}/a=0.5",)


def test_paths_of_a_file_are_relative_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In any working folder; names stay names; a path that exists only in the working folder is refused."""
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "texts").mkdir()
    (tmp_path / "elsewhere" / "gpt2").mkdir(parents=True)
    path = tmp_path / "jobs" / "run.toml"
    path.write_text(
        'out = "../runs/a"\n[model]\nconfig = "tiny.json"\ntokenizer = "bytes"\nmodel = "gpt2-medium"\n'
        '[data]\ndata = "texts"\n[memory]\noffload-folder = "spill"\n[checkpoint]\nresume = "auto"'
    )
    for folder, named in ((tmp_path, "jobs/run.toml"), (tmp_path / "jobs", "run.toml"), (tmp_path / "jobs", str(path))):
        monkeypatch.chdir(folder)
        config = _parse("--from", named)
        assert config.model.config is not None and config.model.config.absolute() == tmp_path / "jobs" / "tiny.json"
        assert [Path(name).absolute() for name in config.data.data] == [tmp_path / "jobs" / "texts"]
        assert os.path.abspath(config.out) == str(tmp_path / "runs" / "a") and "jobs/.." not in str(config.out)
        assert Path(config.memory.offload_folder).absolute() == tmp_path / "jobs" / "spill"
        names = config.model.tokenizer, config.checkpoint.resume, config.model.model
        assert names == ("bytes", "auto", "gpt2-medium")
        # Flags are relative to the working folder.
        assert _parse("--from", named, "--out", "x", "--config", "y.json").out == Path("x")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert _parse("--from", _file(tmp_path, '[model]\nmodel = "/abs/m"')).model.model == "/abs/m"
    with pytest.raises(
        LongspanError, match=r"line 2: model = 'gpt2' .* does not exist, but .*; write 'elsewhere/gpt2'"
    ):
        _parse("--from", _file(tmp_path, '[model]\nmodel = "gpt2"'))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--lr", "nan"], "--lr must be finite and above 0, got nan"),
        (["--weight-decay=-inf"], "--weight-decay must be finite and at least 0, got -inf"),
        (["--betas", "nan", "0.9"], "--betas must be at least 0 and below 1, got nan"),
        (["--seed", str(1 << 63)], "--seed must be at most 9,223,372,036,854,775,807, got 9223372036854775808"),
        (["--steps", "9" * 25], "--steps must be at most 1,099,511,627,776, got"),
        (["--ulysses", "70000"], "--ulysses must be at most 65,536, got 70000"),
        (["--ring", "300", "--ulysses", "300"], "--ring 300 --ulysses 300 must be at most 65,536, got 90000"),
        (["--data-degree", "60000"], "starts 60000 processes on this machine"),
        (["--config", "nope.json"], "--config nope.json does not exist"),
        (["--data", "./gone"], "--data ./gone is neither a file nor a directory"),
        (["--tokenizer", "a/b/c"], "--tokenizer a/b/c does not exist, and no name on the Hugging Face hub either"),
        (["--data=~nobody-of-this-name/x"], "no user of that name"),
        (["--data", "x" * 5000], "is too long for a path"),
        (["--out", "/proc/version/out"], "cannot be written"),
        (["--out", "/proc/nope"], "--out /proc/nope/checkpoints cannot be written: /proc takes no files"),
        (["--schedule", "cosin"], "--schedule 'cosin' is unknown; did you mean 'cosine'? Choose 'cosine', 'linear', "),
        (["--memory=longets"], "--memory 'longets' is unknown; did you mean 'longest'? Choose 'by-flags', 'fastest', "),
        (["--optimizer", "zzz"], "--optimizer 'zzz' is unknown; choose 'adamw', "),
        (["--text-field", ""], "--text-field is empty"),
    ],
)
def test_values_out_of_range_are_refused(
    flags: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without asking the hub or writing anything."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: pytest.fail("asked the network"))
    monkeypatch.chdir(tmp_path)
    model = str(ROOT / "examples" / "llama-tiny.json")
    assert cli.main(["train", "--config", model, "--data", "pydoc", "--context", "64", *flags]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1, error
    assert list(tmp_path.iterdir()) == []


def test_the_error_names_the_line_of_a_value_out_of_range(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _file(tmp_path, 'steps = 0\n[data]\ndata = "pydoc"\n[model]\nconfig = "x.json"\n[optimizer]\nlr = nan')
    assert cli.main(["train", "--from", path, "--steps", "3"]) == 2
    assert capsys.readouterr().err.endswith(f"got nan (given in {path}, line 7)\n")
    assert cli.main(["train", "--from", path, "--lr", "1", "--steps", "-3"]) == 2
    assert capsys.readouterr().err.endswith("got -3\n")


def test_a_closed_stdout_ends_a_command_quietly() -> None:
    """`longspan plan ... | head -1`."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": "1"}
    for flags in ("--json", ""):
        command = f"{sys.executable} -m longspan plan --model llama-3.1-8b {flags}"
        piped = ["bash", "-c", f"{command} | true; echo ${{PIPESTATUS[0]}}"]
        done = subprocess.run(piped, capture_output=True, text=True, timeout=60, env=environment)
        assert (done.stdout, done.stderr) == ("141\n", "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has it")
def test_a_full_disk_behind_stdout_is_one_line() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "longspan", "plan", "--model", "llama-3.1-8b"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, env=environment)
    assert done.returncode == 2
    assert done.stderr.startswith("longspan: error: the disk is full") and done.stderr.count("\n") == 1


def test_a_missing_file_is_refused() -> None:
    with pytest.raises(LongspanError, match=r"--from no\.toml cannot be read: .*No such file"):
        _parse("--from", "no.toml")
    with pytest.raises(LongspanError, match=r"--from needs a file"):
        _parse("--from")
    with pytest.raises(LongspanError, match=r"--from is given twice"):
        _parse("--from", "a.toml", "--from=b.toml")


def test_the_demo_is_valid() -> None:
    config = _parse("--from", str(ROOT / "examples" / "demo.toml"))
    config.check()
    assert config.context >= 8192 and config.parallel.ulysses == config.parallel.ranks == 4
    assert config.model.config is not None and config.model.config.is_file() and config.out == ROOT / "runs" / "demo"


# --- help


HELP_WITHOUT_TORCH = """
import sys
from longspan.cli import COMMANDS, main
for args in ([], *([name] for name in COMMANDS)):
    assert main([*args, "--help"]) == 0
assert main(["--version"]) == 0
heavy = {"torch", "transformers", "datasets", "numpy", "pyarrow", "tensorboard", "peft"} & set(sys.modules)
assert not heavy, heavy
"""


def test_help_of_every_command_needs_no_torch() -> None:
    done = subprocess.run([sys.executable, "-c", HELP_WITHOUT_TORCH], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("name", "config"), [("train", TrainConfig), ("verify", VerifyConfig)])
def test_help_lists_every_option(name: str, config: type, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([name, "--help"]) == 0
    said = capsys.readouterr().out
    for option in options(config).values():
        assert f"--{option.flag}" in said
    words = " ".join(said.replace("│", " ").split())
    for field, text in field_texts(config).items():
        # The help of tyro 0.9 has no texts of sections.
        assert text in words or (version("tyro").startswith("0.") and is_dataclass(getattr(config(), field)))
    assert "--from" in said and "{None}" not in said
    assert cli.main(["--help"]) == 0
    said = capsys.readouterr().out
    assert "usage: longspan COMMAND" in said and all(command in said for command in cli.COMMANDS)
    assert cli.main([]) == 2 and capsys.readouterr().out == said
    assert cli.main(["--version"]) == 0 and capsys.readouterr().out.startswith("longspan 0.")


# --- exit codes


def _plant(monkeypatch: pytest.MonkeyPatch, outcome: BaseException | int) -> None:
    """Let `longspan train` raise or return the outcome."""

    def run(config: TrainConfig) -> int:
        if isinstance(outcome, int):
            return outcome
        raise outcome

    monkeypatch.setattr("longspan.train.run", run)


@pytest.mark.parametrize(
    ("outcome", "code", "said"),
    [
        (LongspanError("2 is not 3; say 3"), 2, "longspan: error: 2 is not 3; say 3\n"),
        (RankFailed("rank 1 died", "Traceback ...\n"), 1, "Traceback ...\nlongspan: error: rank 1 died\n"),
        (Stopped(15), 143, "longspan: stopped by SIGTERM\n"),
        (KeyboardInterrupt(), 130, ""),
        (1, 1, ""),
    ],
)
def test_exit_codes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], outcome: Any, code: int, said: str
) -> None:
    _plant(monkeypatch, outcome)
    assert cli.main(["train", "--steps", "3"]) == code
    assert capsys.readouterr().err == said


def test_a_model_without_weights_or_tokenizer_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No flag that was not given is blamed."""
    shutil.copy(ROOT / "examples" / "llama-tiny.json", tmp_path / "config.json")
    data = ["--data", "pydoc", "--context", "64", "--out", str(tmp_path / "out")]
    for command in (["train", *data], ["generate", "--prompt", "x"]):
        assert cli.main([*command, "--model", str(tmp_path)]) == 2
        error = capsys.readouterr().err
        assert f"--model {tmp_path} has no weights: expected model.safetensors, " in error
        assert f"give --config {tmp_path}/config.json" in error and "tokenizer" not in error
    (tmp_path / "model.safetensors").touch()
    assert cli.main(["train", *data, "--model", str(tmp_path)]) == 2
    assert f"error: {tmp_path} has no tokenizer: expected tokenizer.json, " in capsys.readouterr().err


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trian"]) == 2
    assert capsys.readouterr().err == "longspan: error: there is no command 'trian'; did you mean 'train'?\n"
    assert cli.main(["--model", "x"]) == 2
    assert "no command '--model'; give one first: train, " in capsys.readouterr().err
    assert cli.main(["-V"]) == cli.main(["help", "train"]) == 0


@pytest.mark.launcher
def test_torchrun_prints_an_error_once_although_its_first_rank_is_slow(tmp_path: Path) -> None:
    """torchrun ends every rank when one has failed: the others must wait for the one that prints the error."""
    script = tmp_path / "slow_first_rank.py"
    script.write_text(
        "import os, sys, time\nfrom longspan.cli import main\n"
        "if os.environ['LOCAL_RANK'] == '0':\n    time.sleep(2)\nsys.exit(main())\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": THREADS}
    flags = ["--data", "pydoc", "--config", str(ROOT / "examples" / "llama-tiny.json"), "--ulysses", "4"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, str(script), "train", *flags, "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode != 0
    message = "longspan: error: torchrun started 2 processes, but --ulysses 4 needs 4"
    assert done.stderr.count(message) == 1, done.stderr


@pytest.mark.parametrize(
    ("outcome", "code", "said"),
    [
        (None, 2, "longspan: error: longspan train has no option --ulises; did you mean --ulysses?\n"),
        (LongspanError("only here"), 2, "longspan: error: only here\n"),
        (SystemExit("a library stopped"), 1, "a library stopped\n"),
        (SystemExit(3), 3, ""),
        (1, 1, ""),  # as a failed `verify`, whose report the first rank prints
        (Stopped(15), 143, ""),
    ],
)
def test_ranks_with_an_error_wait_for_the_first_rank_of_their_machine(
    outcome: Any, code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """But stopped ranks do not wait."""
    waits: list[float] = []
    monkeypatch.setattr("longspan.ranks.launch.time.sleep", waits.append)
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    if outcome is not None:
        _plant(monkeypatch, outcome)
    for local_rank, waited in (("1", [30]), ("0", [])):
        waits.clear()
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        assert cli.main(["train", *(["--ulises", "4"] if outcome is None else [])]) == code
        stopped = isinstance(outcome, Stopped)
        assert capsys.readouterr().err == ("longspan: stopped by SIGTERM\n" if stopped and local_rank == "0" else said)
        assert waits == ([] if stopped else waited)


def test_help_fits_80_columns_and_names_no_empty_default(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for command in cli.COMMANDS:
        assert cli.main([command, "--help"]) == 0
        text = capsys.readouterr().out
        assert max(map(len, text.splitlines())) <= 80, command
        assert not re.search(r"\(default:\s*(None)?\)", text), command
