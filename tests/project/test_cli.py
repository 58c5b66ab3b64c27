"""The command line: flags, files of flags, help without torch, exit codes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from longspan import cli
from longspan.core.errors import LongspanError
from longspan.core.memory import LONGEST, Memory
from longspan.core.parallel import ParallelConfig
from longspan.core.reading import field_texts, flags_of, parse_integer
from longspan.plan.command import PlanConfig
from longspan.plan.shape import Tuning
from longspan.ranks.launch import RankFailed, Stopped
from longspan.verify import VerifyConfig
from tests.pool import THREADS

pytestmark = pytest.mark.versions

ROOT = Path(__file__).parents[2]


def _parse(*args: str) -> VerifyConfig:
    return cli.parse(VerifyConfig, list(args), prog="longspan verify")


def _file(tmp_path: Path, text: str) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return str(path)


# --- flags


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


def test_a_wrong_flag_is_refused_with_the_closest_one(capsys: pytest.CaptureFixture[str]) -> None:
    for args, said in {
        ("--ulyses", "4"): "--ulysses INT",
        ("--no-fspd",): "--no-fsdp",
        ("run.yaml",): "Unrecognized options: run.yaml",
        ("--dtype", "Fp32"): "'fp32', 'bf16'",
        ("--memory", "longest,ofload=host"): "there is no key 'ofload'; did you mean 'offload'?",
        ("--memory", "longest,host"): "write key=value after the first word",
        ("--memory", "tiled=true,tiled=false"): "tiled is set twice",
        ("--memory", "offload=host"): "add checkpointing='full'",
        ("--memory", "head_slices=two"): "'two' is not an integer",
        ("--experts", "lots"): "'lots' is not an integer (128k and 1M are 131072 and 1048576, 1e6 is 1000000) or auto",
        ("--ring", "0"): "ring must be at least 1, got 0",
    }.items():
        with pytest.raises(SystemExit) as stop:
            _parse("--seed", "3", *args)
        error = " ".join(capsys.readouterr().err.replace("│", " ").split())
        assert stop.value.code == 2 and said in error, args
    assert _parse("--text=--seed").text == "--seed"


def test_a_value_with_options_is_one_flag() -> None:
    config = _parse("--memory", "longest,offload=host,tiled=false")
    assert config.memory.to_memory() == replace(LONGEST, offload="host", tiled=False)
    assert str(config.memory) == "longest,offload=host,tiled=false"
    assert _parse("--memory", "checkpointing=full").memory.to_memory() == Memory(checkpointing="full")
    tuning = cli.parse(PlanConfig, ["--tuning", "16,targets=q_proj+v_proj,dora=true"], prog="x").tuning
    assert tuning == Tuning(16, ("q_proj", "v_proj"), dora=True)
    assert str(tuning) == "16,targets=q_proj+v_proj,dora=true" and str(Tuning(dora=True)) == "dora=true"
    with pytest.raises(LongspanError, match="targets='': an item is empty"):
        Tuning.read("16,targets=")


# --- files of flags


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    path = _file(
        tmp_path,
        "context: 8k\nfsdp: false\nbatch: 2\ntext: pydoc\nmemory: {checkpointing: full}\nseed: 3\nring: 2\n"
        "layout: contiguous\noverlap-chunks: 2\nulysses: 4\ntimeout:\n",
    )
    config = _parse("--config", path, "--ulysses", "2", "--fsdp", "--seed=5", "--text_field", "body")
    assert (config.text, config.context, config.parallel.ulysses, config.fsdp) == ("pydoc", 8192, 2, True)
    parallel = config.parallel
    assert (parallel.ring, parallel.layout, parallel.overlap_chunks, parallel.ranks) == (2, "contiguous", 2, 4)
    assert (config.seed, config.batch, config.text_field, config.timeouts.timeout) == (5, 2, "body", None)
    assert config.memory.to_memory() == Memory(checkpointing="full")
    assert _parse(f"--config={path}").fsdp is False
    plan = cli.parse(PlanConfig, ["--config", _file(tmp_path, "gpu: {name: a, efficiency: 5e-1}")], prog="x")
    assert plan.hardware.gpu.efficiency == 0.5  # YAML reads it as text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ulysses: 1.5", r"run.yaml: ulysses: 1.5 is invalid: give a whole number"),
        ("ulyses: 4", r"run.yaml: there is no key 'ulyses'; did you mean ulysses\?"),
        ("zzz: 4", r"there is no key 'zzz'; longspan verify --help lists all"),
        ("ring: 0", r"run.yaml: ring must be at least 1, got 0"),
        ("overlap-chunks: 2\noverlap_chunks: 2", r"overlap_chunks is set twice"),
        ("seed: [", r"is not YAML: .*line 1"),
        ("- seed", r"must be a mapping of keys to values"),
        ("", r"run.yaml must be a mapping of keys to values, but it is empty"),
        ("memory: {offload: host, offload: none}", r"run.yaml: 'offload' is set twice"),
        ("batch: 8kk", r"batch: '8kk' is invalid: '8kk' is not an integer"),
        ("fsdp: 'no'", r"fsdp: 'no' is invalid: give true or false"),
        ("model: 5", r"model: 5 is invalid: give text"),
        ("dtype: Fp32", r"dtype: 'Fp32' is invalid: did you mean 'fp32'\? Choose 'auto', 'fp32' or 'bf16'"),
        ("no-fsdp: true", r"there is no key 'no-fsdp'; did you mean fsdp"),
        ("memory: {ofload: host}", r"memory: .* there is no key 'ofload'; did you mean 'offload'"),
        ("memory: 5", r"memory: 5 is invalid: 5 is neither a word nor a mapping"),
        ('model: "a\\0b"', r"NUL byte"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(LongspanError, match=message):
        _parse("--config", _file(tmp_path, text))


def test_a_closed_stdout_ends_a_command_quietly() -> None:
    """`longspan plan --help | head -1`."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": "1"}
    for args in ("--help", "plan --help"):
        command = f"{sys.executable} -m longspan {args}"
        piped = ["bash", "-c", f"{command} | true; echo ${{PIPESTATUS[0]}}"]
        done = subprocess.run(piped, capture_output=True, text=True, timeout=60, env=environment)
        assert (done.stdout, done.stderr) == ("141\n", "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has it")
def test_a_full_disk_behind_stdout_is_one_line() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "longspan", "plan", "--help"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, env=environment)
    assert done.returncode == 2
    assert done.stderr.startswith("longspan: error: the disk is full") and done.stderr.count("\n") == 1


def test_a_missing_file_is_refused() -> None:
    with pytest.raises(LongspanError, match=r"--config no\.yaml cannot be read: .*No such file"):
        _parse("--config", "no.yaml")
    with pytest.raises(LongspanError, match=r"--config needs a file"):
        _parse("--config")
    with pytest.raises(LongspanError, match=r"--config is given twice"):
        _parse("--config", "a.yaml", "--config=b.yaml")


# --- help


HELP_WITHOUT_TORCH = """
import sys
from longspan.cli import COMMANDS, main
for args in ([], *([name] for name in COMMANDS)):  # of `train METHOD` TRL makes the help, which imports torch
    assert main([*args, "--help"]) == 0
assert main(["--version"]) == 0
heavy = {"torch", "transformers", "datasets", "numpy", "pyarrow", "tensorboard", "peft"} & set(sys.modules)
assert not heavy, heavy
"""


def test_help_of_every_command_needs_no_torch() -> None:
    done = subprocess.run([sys.executable, "-c", HELP_WITHOUT_TORCH], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_help_lists_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", "--help"]) == 0
    said = capsys.readouterr().out
    assert [name for name in flags_of(VerifyConfig) if f"--{name.replace('_', '-')}" not in said] == []
    words = "".join(said.replace("│", " ").split())
    for text in (field_texts(VerifyConfig) | field_texts(ParallelConfig)).values():
        assert text.replace(" ", "") in words
    assert said.index("--context") < said.index("--model") < said.index("--timeout")  # its own flags first
    assert "--config" in said and "{None}" not in said
    assert cli.main(["--help"]) == 0
    said = capsys.readouterr().out
    assert "usage: longspan COMMAND" in said and all(command in said for command in cli.COMMANDS)
    assert cli.main([]) == 2 and capsys.readouterr().out == said
    assert cli.main(["--version"]) == 0 and capsys.readouterr().out.startswith("longspan 0.")


# --- exit codes


def _plant(monkeypatch: pytest.MonkeyPatch, outcome: BaseException | int) -> None:
    """Let `longspan verify` raise or return the outcome."""

    def run(config: VerifyConfig) -> int:
        if isinstance(outcome, int):
            return outcome
        raise outcome

    monkeypatch.setattr("longspan.verify.run", run)


@pytest.mark.parametrize(
    ("outcome", "code", "said"),
    [
        (LongspanError("2 is not 3; say 3"), 2, "longspan: error: 2 is not 3; say 3\n"),
        (RankFailed("rank 1 died", "Traceback ...\n"), 1, "Traceback ...\nlongspan: error: rank 1 died\n"),
        (Stopped(15), 143, "longspan: stopped by SIGTERM\n"),
        (Stopped(15, "2 ranks were killed"), 143, "longspan: stopped by SIGTERM: 2 ranks were killed\n"),
        (KeyboardInterrupt(), 130, ""),
        (1, 1, ""),
    ],
)
def test_exit_codes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], outcome: Any, code: int, said: str
) -> None:
    _plant(monkeypatch, outcome)
    assert cli.main(["verify", "--seed", "3"]) == code
    assert capsys.readouterr().err == said


def test_a_model_without_weights_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No flag that was not given is blamed."""
    shutil.copy(ROOT / "examples" / "llama-tiny.json", tmp_path / "config.json")
    for command in (["verify"], ["generate", "--prompt", "x"]):
        assert cli.main([*command, "--model", str(tmp_path)]) == 2
        error = capsys.readouterr().err
        assert f"--model {tmp_path} has no weights: expected model.safetensors, " in error
        assert f"give {tmp_path}/config.json" in error and "tokenizer" not in error


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trian"]) == 2
    assert capsys.readouterr().err == "longspan: error: there is no command 'trian'; did you mean 'train'?\n"
    assert cli.main(["--model", "x"]) == 2
    assert "no command '--model'; give one first: train, " in capsys.readouterr().err
    assert cli.main(["version", "extra"]) == 2
    assert "longspan version takes no argument, got 'extra'" in capsys.readouterr().err
    assert cli.main(["-V"]) == cli.main(["help", "verify"]) == 0


@pytest.mark.launcher
def test_torchrun_prints_an_error_once_although_its_first_rank_is_slow(tmp_path: Path) -> None:
    """torchrun ends every rank when one has failed: the others must wait for the one that prints the error."""
    script = tmp_path / "slow_first_rank.py"
    script.write_text(
        "import os, sys, time\nfrom longspan.cli import main\n"
        "if os.environ['LOCAL_RANK'] == '0':\n    time.sleep(2)\nsys.exit(main())\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": THREADS}
    flags = ["--model", str(ROOT / "examples" / "llama-tiny.json"), "--ulysses", "4"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, str(script), "verify", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode != 0
    message = "longspan: error: torchrun or srun started 2 processes, but ulysses=4 needs 4"
    assert done.stderr.count(message) == 1, done.stderr


@pytest.mark.parametrize(
    ("outcome", "code", "said"),
    [
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
    monkeypatch.setattr("longspan.cli.time.sleep", waits.append)
    job = {"RANK": "5", "WORLD_SIZE": "8", "MASTER_ADDR": "localhost", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x"}
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    _plant(monkeypatch, outcome)
    for local_rank, waited in (("1", [cli._FIRST_RANK_S]), ("0", [])):
        waits.clear()
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        assert cli.main(["verify"]) == code
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
