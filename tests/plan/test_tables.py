"""Tables of `longspan plan` at every width, and suggestions that can be followed."""

from __future__ import annotations

import functools
import io
import json
import re
from collections import Counter
from typing import Any

import pytest
from rich.console import Console

from longspan.cli import main, parse
from longspan.core.formatting import parameters, size
from longspan.core.parallel import ParallelConfig
from longspan.plan import Job, Plan, read_hardware, read_model, search
from longspan.plan.command import PlanConfig
from longspan.plan.memory_options import find_suggestions, search_memory_options
from longspan.plan.views.tables import show
from tests.choose import confirming, each_value, grouped

WIDE = 1000
SCREENS = [
    "--model llama-3.1-8b --context 128k --memory checkpointing=full --details",
    "--model llama-3.1-8b --context 128k --compare",
    "--model gemma-3-12b --context 128k --compare --mode prefill --gpus 16",
    "--model llama-3.1-8b --context max",
    "--model llama-3.1-70b --context 128k",
    "--model llama-3.1-70b --context 1M --gpus 16 --batch 4 --memory auto,offload=host",
    "--model qwen3-30b-a3b --context 100000 --mode decode --batch 8 --details",
    "--model llama-3.1-8b --context 8k --no-fsdp",
]


WIDTHS = (80, 100, 120, 200)


@functools.cache
def searched(screen: str) -> tuple[Any, ...]:
    """Search once for all widths; return what `longspan plan` shows."""
    given: list[tuple[Any, ...]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("longspan.plan.views.tables.show", lambda *args, **options: given.append((args, options)))
        assert main(["plan", *screen.split()]) in (0, 1)
    (shown,) = given
    return shown


def lines_of(screen: str, width: int) -> list[str]:
    """Return the lines of a screen on a terminal of `width` columns."""
    file = io.StringIO()
    args, options = searched(screen)
    show(*args, **options, console=Console(highlight=False, file=file, width=width))
    return file.getvalue().splitlines()


AUTO = [screen for screen in SCREENS if "--memory auto" in screen]


@pytest.mark.parametrize("screen", [*(screen for screen in SCREENS if screen not in AUTO), *confirming(AUTO)])
def test_nothing_is_cut_at_any_width(screen: str) -> None:
    """A narrow screen has every character of a very wide one, breaks no word, and no line is longer than the screen."""
    wide = lines_of(screen, WIDE)
    expected, words = _characters(wide), set(" ".join(wide).split())
    for width in WIDTHS:
        # The file and the command are lines to be copied.
        lines = [line.rstrip() for line in lines_of(screen, width)]
        copied = ("longspan train", "memory: {", "model_init_kwargs: {")
        assert max(len(line) for line in lines if not any(word in line for word in copied)) <= width
        assert _characters(lines) == expected
        assert {word for word in " ".join(lines).split() if "─" not in word} <= words


def test_the_first_screen_begins_with_the_answer_and_what_runs_it() -> None:
    """The tables of details are shown on request; without any mesh, the reasons are."""
    screen = "--model llama-3.1-8b --context 512k --gpus 8"
    lines = lines_of(screen, 100)
    assert len(lines) <= 36
    command = next(at for at, line in enumerate(lines) if "longspan train sft --" in line)
    assert command < 18 and lines[5] == "plan.yaml:" and "  ulysses: 8" in lines[6:command]
    assert lines[command] == "run: longspan train sft --config plan.yaml --dataset_name DATA"
    assert lines[3].startswith("recommended: ulysses=8: 69.83 GB of 80.00 GB per GPU, 66.9 s per step")
    assert lines[4] == "memory options: checkpointing=selective"
    assert lines[command + 1].startswith(
        "note: the model's positions end at 131,072: its config needs rope_parameters: {"
    )
    text, detailed = "\n".join(lines), "\n".join(lines_of(f"{screen} --details", 100))
    for part in (
        "memory per GPU, ",
        "sent per GPU",
        "note: memory: checkpointing=selective",
        "meshes that cannot hold the job\n",
    ):
        assert part in detailed and part not in text
    assert "\nmeshes that cannot hold the job\n" in "\n".join(lines_of("--model gemma-3-1b --context 3 --gpus 5", 100))


def _characters(lines: list[str]) -> Counter[str]:
    return Counter("".join(lines).replace(" ", "").replace("─", ""))


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 parameters"), (1, "1 parameter"), (4160, "4,160 parameters"), (123_456, "0.123M parameters"),
        (120_000, "0.12M parameters"), (999_499_999, "999M parameters"), (999_500_000, "1B parameters"),
        (8_030_261_248, "8.03B parameters"), (405.8e9, "406B parameters"), (1.5e12, "1.5T parameters"),
    ],
)  # fmt: skip
def test_counts_of_parameters(count: float, text: str) -> None:
    assert parameters(count) == text


# ---------------------------------------------------------------------------------------------------------------------
# What is recommended, and suggestions if nothing is.


def test_a_tensor_axis_is_recommended_if_only_it_fits(capsys: pytest.CaptureFixture[str]) -> None:
    """Without FSDP every GPU holds 128 GB of weights; a tensor axis shards them, if the library can cut the family."""
    args = ["plan", "--context", "8k", "--no-fsdp", "--gpus", "8", "--model"]
    for job in (["llama-3.1-8b"], ["llama-3.1-70b", "--mode", "prefill"]):
        assert main([*args, *job, "--json"]) == 0
        best = json.loads(capsys.readouterr().out)["plans"][0]
        assert best["fits"] and best["runs"] and best["mesh"]["tensor"] > 1, job
        assert f"tensor: {best['mesh']['tensor']}" in best["yaml"], job
    assert main([*args, "deepseek-v3", "--mode", "prefill", "--gpus", "64"]) in (0, 1)
    assert "planned only" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("given", "model", "context"),
    each_value(
        [
            "",
            "--memory checkpointing=full",
            "--memory checkpointing=full,cpu_offload=true",
            "--memory checkpointing=selective,tiled=true",
            "--memory longest",
            "--memory auto",
            "--memory auto,offload=host,checkpointing=full",
        ],
        grouped([("llama-3.1-70b", "256k"), ("llama-3.1-8b", "4M")]),
    ),
)
def test_suggestions_fit(model: str, context: str, given: str, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["plan", "--model", model, "--context", context, *given.split()]
    if main([*args, "--gpus", "2"]) == 0:
        return
    text = " ".join(capsys.readouterr().out.split())
    assert "nothing fits; the nearest is" in text
    advice = text[text.index("nothing fits") : text.index("meshes, the fastest")]
    assert "--gpus" not in advice
    if on_these := re.search(r"On these GPUs (.*?) fits with (.*?)( \(--memory auto finds it\))?\.", advice):
        assert main([*args, "--gpus", "2", "--memory", on_these[2].replace(" ", ""), "--json"]) == 0
        plans = json.loads(capsys.readouterr().out)["plans"]
        assert str(ParallelConfig(**next(plan["mesh"] for plan in plans if plan["fits"]))) == on_these[1]
        if on_these[3]:
            assert main([*args, "--gpus", "2", "--memory", "auto", "--json"]) == 0
            capsys.readouterr()
    config = parse(PlanConfig, args[1:], prog="p")
    job, shape, h100 = config.job(), read_model(model), read_hardware("h100")

    def best(gpus: str | int) -> Plan | None:
        count = int(str(gpus).replace(",", ""))
        found = (
            search_memory_options(shape, job, count, h100, dict(config.memory.options))
            if config.chooses
            else search(shape, job, count, h100)
        )
        # Suggestions have no tensor axis.
        return next((plan for plan in found.plans if plan.fits and plan.runs and plan.mesh.tensor == 1), None)

    if more := re.search(r"([\d,]+) GPUs suffice", advice):
        enough = best(more[1])
        assert enough is not None and enough.mesh.ranks.bit_count() == 1
        assert f": {enough.mesh}" in advice and f"{enough.memory_total_bytes / 1e9:.1f} GB each" in advice
        assert best(enough.mesh.ranks // 2) is None
    if fewer := re.search(r"So do ([\d,]+): (.*?)\.", advice):
        fitting = best(fewer[1])
        assert fitting is not None and str(fitting.mesh) == fewer[2]
    assert on_these or more or "No memory options suffice" in advice


def test_the_recommended_mesh_is_in_the_table_with_a_note_on_gathered_weights(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["plan", "--model", "deepseek-v3", "--gpus", "64", "--mode", "decode", "--details"]) == 0
    text = capsys.readouterr().out
    table, details = text.split("memory per GPU, ")
    assert re.search(rf"^ +{re.escape(details.splitlines()[0])} .*recommended", table, re.MULTILINE)
    assert "planned only" in table and "number 22 of all" in table
    assert re.search(r"gathers 1,32\d GB of weights per GPU and token, which takes 3\.\d+ s", " ".join(text.split()))
    assert not re.search(r"\de-\d", text) and "6.91 kB" in text


def test_a_plain_plan_finds_memory_options_that_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "llama-3.1-8b"]) == 0
    text = capsys.readouterr().out
    assert "recommended" in text and "tiled: true" in text
    assert main(["plan", "--model", "llama-3.1-8b", "--memory", "fastest"]) == 1
    text = " ".join(capsys.readouterr().out.split()).partition("nothing fits")[2].partition("meshes, the fastest")[0]
    assert text.count("activations_hidden") == text.count("activations_mlp") == 1


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (6912, "6.91 kB"), (999_600, "1 MB"), (776e3, "776 kB"), (80e9, "80.00 GB"), (1.314e12, "1,314 GB")],
)
def test_sizes(number: float, text: str) -> None:
    assert size(number) == text


def test_json_suggestions_are_the_printed_ones(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--model", "llama-3.1-70b", "--context", "128k", "--gpus", "8", "--memory", "fastest"]
    assert main(["plan", *args, "--json"]) == 1
    suggestions: dict[str, Any] = json.loads(capsys.readouterr().out)["suggestions"]
    assert main(["plan", *args]) == 1
    text = " ".join(capsys.readouterr().out.split())
    more = suggestions["more"]
    assert f"{more['gpus']} GPUs suffice, the job as it is: {ParallelConfig(**more['mesh'])}," in text
    assert f"On these GPUs {ParallelConfig(**suggestions['memory_options']['mesh'])} fits" in text
    assert "checkpointing: " in suggestions["memory_options"]["yaml"]
    assert main(["plan", "--model", "llama-3.1-8b", "--context", "4k", "--gpus", "8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["suggestions"] is None


def test_nothing_suffices() -> None:
    model, hardware = read_model("llama-3.1-405b"), read_hardware("l40s")
    job = Job(context=1 << 30)
    found = find_suggestions(model, job, 1, hardware)
    assert (found.memory_options, found.more, found.fewer, found.longest) == (None, None, None, None)
    assert "No memory options suffice, nor do up to 16,384 GPUs" in found.describe()
    assert search(model, job, 1, hardware).fastest is None
