"""Recipes parse, and `longspan launch` makes scripts of them that run, and manifests that a cluster takes."""

from __future__ import annotations

import os
import re
import stat
import subprocess
from pathlib import Path

import pytest
import yaml

from longspan.cli import main
from longspan.cli_values import read_flags
from longspan.core.sections import make
from longspan.recipes import recipes
from longspan.train import TrainConfig
from tests.chats import chat, make_tokenizer, write_rows
from tests.training import LLAMA

ROOT = Path(__file__).parents[1]


@pytest.fixture
def recipe(tmp_path) -> Path:
    """A recipe of four ranks that needs no network."""
    path = tmp_path / "tiny run.toml"
    path.write_text(
        f'out = "run"\ncontext = 64\nsteps = 2\ndtype = "fp32"\n[model]\nconfig = "{ROOT}/examples/llama-tiny.json"\n'
        '[data]\ndata = "pydoc"\n[parallel]\nulysses = 4\n'
    )
    return path


def program(folder: Path, name: str, script: str) -> None:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IEXEC)


@pytest.mark.parametrize("name", recipes())
def test_recipe_is_written_and_is_a_valid_config(name, tmp_path, capsys):
    out = tmp_path / "mine.toml"
    assert main(["recipes", "--name", name, "--out", str(out)]) == 0
    assert re.search(r"change its [1-9]\d* lines marked EDIT", capsys.readouterr().out)
    values, _ = read_flags(TrainConfig, out, "longspan train")
    if "quantize" in values:
        pytest.importorskip("bitsandbytes")
    make(TrainConfig, **values).check()
    assert main(["recipes", "--name", name, "--out", str(out)]) == 2  # it is not overwritten
    assert "exists" in capsys.readouterr().err


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    """A small model with a tokenizer and a chat template, and data of each kind."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("toy")
    make_tokenizer().save_pretrained(folder / "model")
    LlamaForCausalLM(LlamaConfig(**LLAMA)).save_pretrained(folder / "model")
    write_rows(folder / "chat.jsonl", [{"messages": chat(n)} for n in range(20)])
    write_rows(folder / "text.jsonl", [{"text": "The sea was calm. " * (n % 9 + 1)} for n in range(40)])
    pairs = [{"prompt": chat(n)[:2], "chosen": chat(n)[2:3], "rejected": chat(n)[4:5]} for n in range(20)]
    write_rows(folder / "preference.jsonl", pairs)
    return folder


@pytest.mark.parametrize("name", recipes())
def test_recipe_trains_a_toy_model(name, toy, tmp_path, capsys):
    """In one process: ranks and sizes are the test's, everything else is the recipe's."""
    path = tmp_path / "recipe.toml"
    path.write_text(recipes()[name])
    values, _ = read_flags(TrainConfig, path, "longspan train")
    kind = "preference" if "dpo" in values else values.get("format", "text")
    data = toy / f"{kind}.jsonl"
    flags = {"model": toy / "model", "data": data, "out": tmp_path / "run", "context": 256, "steps": 2, "batch": 1}
    if "eval_data" in values:
        flags["eval-data"] = data
    flags |= {"ulysses": 1, "ring": 1, "data-degree": 1, "warmup": 1, "dtype": "fp32", "rope-scaling": "as-is"}
    status = main(
        ["train", "--from", str(path), *(part for key, value in flags.items() for part in (f"--{key}", str(value)))]
    )
    printed = capsys.readouterr()
    assert status == 0, printed.err
    assert "step 2/2" in printed.out and any((tmp_path / "run" / "hf").glob("*config.json"))


def test_list_names_every_recipe(capsys):
    assert main(["recipes"]) == 0
    listed = capsys.readouterr().out
    assert all(re.search(rf"^{name} +[A-Z]", listed, re.MULTILINE) for name in recipes())
    assert main(["recipes", "--name", "longer-contxt"]) == 2
    assert "longer-context" in capsys.readouterr().err


def test_sbatch_script_runs_the_recipe(recipe, tmp_path, capsys):
    script = tmp_path / "job.sh"
    flags = ["--gpus-per-node", "4", "--partition", "long", "--time", "2-00:00:00", "--out", str(script)]
    assert main(["launch", "--recipe", str(recipe), *flags]) == 0
    subprocess.run(["bash", "-n", script], check=True)
    text = script.read_text()
    for line in (
        "nodes=1",
        "ntasks-per-node=4",
        "gpus-per-node=4",
        "time=2-00:00:00",
        "partition=long",
        "signal=TERM@120",
    ):
        assert f"#SBATCH --{line}\n" in text
    # Slurm reads options only above the first command.
    assert text.rindex("#SBATCH") < text.index("set -euo pipefail")
    program(tmp_path / "bin", "srun", """printf '%s\\n' "$@" """)
    env = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    run = subprocess.run(["bash", script], env=env, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    command = run.stdout.splitlines()
    assert main([*command[command.index("longspan") + 1 :], "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "4 cpu ranks" in printed and str(tmp_path / "run") in printed


def test_submit_gives_the_script_to_sbatch(recipe, tmp_path, monkeypatch, capfd):
    program(tmp_path / "bin", "sbatch", "cat; echo Submitted batch job 7; exit 3")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    assert main(["launch", "--recipe", str(recipe), "--gpus-per-node", "4", "--submit"]) == 3
    printed = capfd.readouterr().out
    assert printed.startswith("#!/bin/bash\n#SBATCH --job-name=tiny-run\n") and "Submitted batch job 7" in printed


def test_jobset_has_a_pod_per_node_that_starts_torchrun(recipe, capsys):
    flags = [
        "--to",
        "kubernetes",
        "--nodes",
        "2",
        "--gpus-per-node",
        "2",
        "--image",
        "registry/longspan:1",
        "--volume",
        "disk",
    ]
    assert main(["launch", "--recipe", str(recipe), *flags, "--volume", "disk"]) == 0
    manifest = yaml.safe_load(capsys.readouterr().out)
    assert (manifest["apiVersion"], manifest["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert manifest["metadata"] == {"name": "tiny-run"}
    (rule,) = manifest["spec"]["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["DeadlineExceeded"])
    (replicated,) = manifest["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    assert job["parallelism"] == job["completions"] == 2 and job["completionMode"] == "Indexed"
    assert job["backoffLimit"] == 0 and job["activeDeadlineSeconds"] == 86400
    pod = job["template"]["spec"]
    assert pod["restartPolicy"] == "Never" and pod["terminationGracePeriodSeconds"] == 120
    (container,) = pod["containers"]
    assert container["image"] == "registry/longspan:1" and container["workingDir"] == str(recipe.parent)
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 2}}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts == {"work": str(recipe.parent), "shm": "/dev/shm"}
    assert pod["volumes"][0] == {"name": "work", "persistentVolumeClaim": {"claimName": "disk"}}
    command = container["command"][2]
    subprocess.run(["bash", "-n", "-c", command], check=True)
    # The first pod's host name: JobSet, replicated job, its index, the pod's index; in the subdomain of the JobSet.
    assert replicated["name"] == "ranks" and "--master-addr tiny-run-ranks-0-0.tiny-run " in command
    assert "--nnodes 2 --nproc-per-node 2 --node-rank $JOB_COMPLETION_INDEX" in command


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--nodes", "3"], r"4 ranks .* are 24 GPUs; give --nodes 1, or data_degree = 6 in \[parallel\]"),
        (["--gpus-per-node", "4", "--time", "1 day"], "--time 1 day is not hours:minutes:seconds"),
        (["--gpus-per-node", "4", "--image", "x"], "--image x has no meaning with --to slurm"),
        (["--gpus-per-node", "4", "--to", "kubernetes", "--image", "x"], "--to kubernetes needs --volume"),
        (["--gpus-per-node", "4", "--name", "My job"], "--name My job must be lower-case"),
        (["--gpus-per-node", "4", "--gpu", "h1000"], "--gpu h1000 is unknown"),
    ],
)  # fmt: skip
def test_bad_input(recipe, flags, error, capsys):
    assert main(["launch", "--recipe", str(recipe), *flags]) == 2
    assert re.search(error, capsys.readouterr().err)


def test_a_recipe_that_is_missing_is_named_by_its_flag(tmp_path, capsys):
    assert main(["launch", "--recipe", str(tmp_path / "gone.toml")]) == 2
    assert f"--recipe {tmp_path / 'gone.toml'} cannot be read" in capsys.readouterr().err


def test_a_recipe_that_does_not_fit_is_refused_with_the_sum_and_what_would(recipe, tmp_path, capsys):
    path = tmp_path / "large.toml"
    (tmp_path / "small.toml").write_text('like = "h100"\nname = "toy GPU"\nmemory_bytes = 2.1e9\n')
    path.write_text(recipe.read_text().replace("context = 64", 'context = "64k"'))
    flags = ["--gpus-per-node", "4", "--gpu", str(tmp_path / "small.toml")]
    assert main(["launch", "--recipe", str(path), *flags]) == 2
    error = capsys.readouterr().err
    assert re.search(r"65,536 tokens do not fit on .* of toy GPU with .* Item by item: [a-z_]+ [0-9]", error)
    assert re.search(r"GPUs suffice|longest context that fits", error)


def test_dockerfile_copies_what_exists_and_installs_from_registries_only():
    lines = (ROOT / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    instructions = [line.split() for line in lines if line.strip() and not line.startswith("#")]
    assert {parts[0] for parts in instructions} <= {"ARG", "FROM", "RUN", "COPY", "WORKDIR", "ENV", "ENTRYPOINT"}
    for parts in instructions:
        if parts[0] == "COPY":
            assert all((ROOT / source).exists() for source in parts[1:-1])
    assert not any(
        re.search(r"https?://(?!pypi\.org|download\.pytorch\.org)", " ".join(parts)) for parts in instructions
    )
