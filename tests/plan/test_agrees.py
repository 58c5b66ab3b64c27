"""`longspan train` runs what `longspan plan` recommends: every printed file is run with `--dry_run`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from longspan.cli import main
from longspan.plan import Job, cost, read_hardware, read_model, search
from longspan.plan.names import MODELS, weights_of
from longspan.plan.views.report import command
from tests.choose import confirming

pytestmark = pytest.mark.versions

SMALL = {
    "vocab_size": 400,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "intermediate_size": 96,
}
LONGROPE = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
FILES: dict[str, dict[str, Any]] = {
    "linear": {"model_type": "llama", **SMALL, "max_position_embeddings": 4096,
               "rope_scaling": {"type": "linear", "factor": 2.0}},
    "dynamic": {"model_type": "llama", **SMALL, "max_position_embeddings": 4096,
                "rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "phi3": {"model_type": "phi3", **SMALL, "num_key_value_heads": 8, "pad_token_id": 0,
             "max_position_embeddings": 8192, "rope_scaling": {"type": "longrope", **LONGROPE}},
    "gpt2": {"model_type": "gpt2", "vocab_size": 400, "n_embd": 64, "n_layer": 2, "n_head": 8, "attn_pdrop": 0.0},
    "short": {"model_type": "gpt2", "vocab_size": 400, "n_embd": 64, "n_layer": 2, "n_head": 8, "attn_pdrop": 0.0,
              "n_positions": 500},
    "gpt2-dropout": {"model_type": "gpt2", "vocab_size": 400, "n_embd": 64, "n_layer": 2, "n_head": 8},
}  # fmt: skip
CONFIGS = {name: model["config"] for name, model in MODELS.items() if "vision_config" not in model["config"]}
CHEAP = ("--memory checkpointing=full", "--memory longest", "--memory longest,checkpointing=grouped,head_slices=0")

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def longspan(capfd: pytest.CaptureFixture[str]) -> Run:
    """Run a command of longspan; return its exit code, stdout, and its own lines of stderr."""

    def run(*words: str) -> tuple[int, str, str]:
        capfd.readouterr()
        code = main(list(words))
        out, error = capfd.readouterr()
        # transformers warns there as well.
        return code, out, "\n".join(line for line in error.splitlines() if line.startswith("longspan: "))

    return run


FEWER = {
    "kimi-linear-48b-a3b": {
        "num_hidden_layers": 4, "linear_attn_config": {"full_attn_layers": [4], "kda_layers": [1, 2, 3]},
    },
    "nemotron-h-8b": {"hybrid_override_pattern": "M-*-"},
    "minimax-text-01": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text of a million bytes, and configs: `FILES`, and the built-in ones with fewer layers."""
    folder = tmp_path_factory.mktemp("agrees")
    (folder / "text.txt").write_text("To be, or not to be, that is the question. " * 25_000)
    for name, config in FILES.items():
        (folder / f"{name}.json").write_text(json.dumps(config))
    for name, config in CONFIGS.items():
        layers = FEWER.get(name, {"num_hidden_layers": 6 if "gemma" in name else 4})  # of each kind one
        (folder / f"{name}.json").write_text(json.dumps({**config, **layers}))
    return folder


def printed(report: dict[str, Any]) -> dict[str, str]:
    """Return file and command of the recommended mesh, of another and, if they are compared, of the methods."""
    plans = [report["recommended"], *report["plans"], *(method["plan"] for method in report["methods"])]
    files = {plan["yaml"]: plan["command"] for plan in plans if plan is not None and plan["yaml"] is not None}
    return dict(list(files.items())[: 2 + len(report["methods"])])


def as_run(file: str, command: str, folder: Path, name: str) -> list[str]:
    """Write a printed file to the folder, with a built-in model's config; return the command's words, with a text."""
    if name in CONFIGS:
        file = file.replace(str(weights_of(name)), str(folder / f"{name}.json"))
    (folder / "plan.yaml").write_text(file)
    words = command.replace("DATA", str(folder / "text.txt")).split()
    return [*words[words.index("train") :], "--output_dir", str(folder / "out"), "--dry_run"]


def each_built_in() -> Iterator[tuple[str, str]]:
    gpus = ("--gpu h100 --gpus 8", "--gpu a100-40gb --gpus 12 --batch 4", "--gpu cpu --gpus 4 --dtype fp32",
            "--gpu b200 --gpus 32", "--gpu mi300x --gpus 1")  # fmt: skip
    for i, name in enumerate(CONFIGS):
        yield name, f"{gpus[i % 5]} --context {('8k', '300k', '512k')[i % 3]} {CHEAP[i % 3]}"


BUILT_IN = ("qwen3-30b-a3b", "gemma-3-1b", "gpt-oss-20b")  # experts, windows, sinks; all others confirm
OPTIONS = [
    ("llama-3.1-8b", "--gpus 8 --context 512k --memory checkpointing=full"),  # the README's
    ("llama-3.1-8b", "--gpus 2 --context 512k --memory longest,offload=host --documents"),
    ("qwen3-8b", "--gpus 4 --context 300k --no-fsdp --memory longest"),
    ("linear", "--gpus 2 --context 100k"),
    ("short", "--gpus 2 --context max"),
]
MORE = [("gemma-3-4b", "--gpus 4 --context 512k --memory auto --compare"), ("phi3", "--gpus 2 --context 8k")]
MORE += [("dynamic", "--gpus 2 --context 100k"), ("gpt2", "--gpus 2 --context 1k"), ("gpt2", "--gpus 2 --context max")]
MORE += [
    ("qwen3-0.6b", "--gpus 1 --gpu l40s --context max --dtype fp32 --memory auto,offload=none"),
    ("llama-3.1-8b", "--gpus 8 --context 512k --memory auto --compare"),
]


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        *(case for case in each_built_in() if case[0] in BUILT_IN),
        *OPTIONS,
        *confirming([*(case for case in each_built_in() if case[0] not in BUILT_IN), *MORE]),
    ],
)
def test_train_accepts_every_file_that_plan_prints(
    name: str, asked: str, folder: Path, longspan: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    model = name if name in CONFIGS else str(folder / f"{name}.json")
    code, out, error = longspan("plan", "--model", model, *asked.split(), "--json")
    assert code in (0, 1), error
    report = json.loads(out)
    assert (report["recommended"] is not None) == (code == 0)
    assert report["recommended"] is None or report["recommended"]["yaml"] is not None
    for file, line in printed(report).items():
        code, out, error = longspan(*as_run(file, line, folder, name))
        assert code == 0, (file, error)
        planned = [reason for plan in report["plans"] for reason in plan["reasons"] if "positions end at" in reason]
        assert ("rope_parameters: " in file) == bool(planned)
    assert not (folder / "out").exists()


def test_built_in_models_have_a_source_and_most_a_command() -> None:
    """Or the test above would test nothing."""
    found = [
        bool(search(read_model(name), Job(context=8192), 8, read_hardware("b200")).recommended) for name in CONFIGS
    ]
    assert sum(found) > len(CONFIGS) / 2
    assert all(
        ("hub" in model) != ("make" in model) for model in MODELS.values() if model["config"] in CONFIGS.values()
    )


@pytest.mark.parametrize(
    ("name", "asked", "message"),
    [
        ("gpt2", "--context 2048", "longer than the 1024 learnt positions of"),
        ("phi3", "--context 100k", "longer than the 8192 positions of"),
    ],
)  # fmt: skip
def test_plan_and_train_refuse_with_the_same_error(
    name: str, asked: str, message: str, folder: Path, longspan: Run
) -> None:
    model = name if name in CONFIGS else str(folder / f"{name}.json")
    code, _, by_plan = longspan("plan", "--model", model, "--gpus", "2", *asked.split())
    assert code == 2 and message in by_plan
    file = str(folder / f"{name}.json")
    run = [
        "--model_name_or_path",
        file,
        "--dataset_name",
        str(folder / "text.txt"),
        "--output_dir",
        str(folder / "out"),
    ]
    code, _, by_train = longspan("train", "sft", *run, *asked.split(), "--dry_run")
    assert code == 2
    assert by_train.replace(f"model_name_or_path {file}", model) == by_plan


def test_a_model_that_train_refuses_is_not_recommended(folder: Path, longspan: Run) -> None:
    asked, why = "--context 1k", "attention dropout (attn_pdrop=0.1)"
    model = str(folder / "gpt2-dropout.json")
    code, out, error = longspan("plan", "--model", model, *asked.split(), "--json")
    assert code == 1, error
    report = json.loads(out)
    assert report["recommended"] is None and not any(plan["fits"] and plan["runs"] for plan in report["plans"])
    fitting = [plan for plan in report["plans"] if plan["fits"]]
    assert fitting and all(any(why in reason for reason in plan["reasons"]) for plan in fitting)
    _, out, _ = longspan("plan", "--model", model, *asked.split())
    assert "nothing that fits is recommended" in out and "plan.yaml" not in out


def test_train_refuses_a_built_in_name_with_a_fix(folder: Path, longspan: Run) -> None:
    for name, fix in (("llama-3.1-8b", "meta-llama/Llama-3.1-8B"), ("gpt-7b", "CONFIG_OF_GPT-7B")):
        run = ["--model_name_or_path", name, "--dataset_name", str(folder / "text.txt")]
        code, _, error = longspan("train", "sft", *run, "--output_dir", str(folder / "out"), "--dry_run")
        assert code == 2 and error.count("\n") == 0 and fix in error


def test_nodes_that_do_not_divide_the_gpus() -> None:
    """torchrun starts the same number of ranks on each node."""
    for gpus, nodes, per_node in ((8, 1, 8), (12, 2, 6), (16, 2, 8), (18, 3, 6)):
        plan = cost(read_model("qwen3-0.6b"), Job(context=8192).on(ring=gpus), read_hardware("h100"))
        assert nodes == 1 or f"--nnodes {nodes} --nproc-per-node {per_node} " in str(command(plan))
