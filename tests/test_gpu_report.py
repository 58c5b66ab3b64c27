"""The report of a GPU (`make gpu`), on shapes for a CPU: every item runs, and wrong results get their verdict."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

import longspan
from benchmarks.gpu import __main__ as report
from benchmarks.gpu import kernels, model, table
from benchmarks.gpu.setup import FAILED, MEASURED, OK, WRONG, Row, Setup
from tests.choose import confirming

ROOT = Path(__file__).parent.parent


QUICKEST = ("autocast", "memory", "syncs", "documents", "copies", "choices")


@pytest.fixture(scope="module", params=[QUICKEST, *confirming([(list(report.ITEMS),)])], ids=["quickest", "all"])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report of some items; the other items measure for minutes on a CPU."""
    folder = tmp_path_factory.mktemp("report")
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.gpu", "--quick", "--device", "cpu", "--out", str(folder)]
    command += ["--items", *request.param]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=580)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    (data,) = folder.glob("*-gpu-cpu.json")
    (text,) = folder.glob("*-gpu-cpu.md")
    return {"items": request.param, "code": done.returncode, "text": text.read_text(), **json.loads(data.read_text())}


@pytest.mark.launcher
@pytest.mark.slow
@pytest.mark.timeout(600)
class TestReport:
    def test_every_item_has_run_and_nothing_is_wrong(self, found: dict[str, Any]) -> None:
        for name in found["items"]:
            rows = found["results"][name]
            assert rows, name
            bad = [row for row in rows if row["verdict"].startswith((FAILED, "stopped", WRONG))]
            assert not bad, (name, bad)
            assert all(row["figure"] or row["verdict"].startswith("skipped: ") for row in rows), rows
        assert found["code"] == 0
        assert [row["verdict"] for row in found["results"]["memory"]] == ["skipped: needs CUDA"]

    def test_the_page_names_machine_date_command_and_versions(self, found: dict[str, Any]) -> None:
        text, env = found["text"], found["environment"]
        for part in (env["cpu"], env["date"], f"torch {version('torch')}", "--quick --device cpu", "GPU: none"):
            assert part in text, part
        for name in found["items"]:
            assert f"## {report.ITEMS[name][2]}" in text


def test_the_items_fit_into_eight_minutes() -> None:
    assert sum(limit for _, limit, _ in report.ITEMS.values()) + report.GRACE_S <= 8 * 60


SETUP = Setup("cpu", True, float("inf"))


def test_wrong_and_failing_kernels_get_their_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    case = kernels.cases(SETUP)["causal, fp32, D=16, 8/2 heads"]
    right, wrong, breaks = {}, {}, {}
    kernels._one(SETUP, "sdpa", "causal", case, right, set())
    plain = longspan.attention
    monkeypatch.setattr(longspan, "attention", lambda q, k, v, sp, **how: plain(q, k, v, sp, **how) * 1.0001)
    kernels._one(SETUP, "sdpa", "causal", case, wrong, set())
    monkeypatch.setattr(longspan, "attention", lambda *args, **how: 1 // 0)
    kernels._one(SETUP, "sdpa", "causal", case, breaks, set())
    verdicts = [
        [row.verdict for row in kernels._rows("sdpa", "fp32", tally["sdpa", "fp32"])]
        for tally in (right, wrong, breaks)
    ]
    assert verdicts == [[OK], [WRONG, WRONG], [FAILED]]


def test_a_table_is_measured_and_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "TRIED", ("sdpa", "tiled", "flash", "flashy"))  # some are missing on a CPU
    monkeypatch.setattr(table, "masks", lambda n: {"causal": {}, "mod": {"softcap": 30.0}})
    rows = list(table.table(SETUP))
    assert [row.verdict for row in rows] == [MEASURED] * 2
    assert table.write(tmp_path / "mine.toml", rows, "this machine") == 2
    found = longspan.kernel_table(tmp_path / "mine.toml").rows[:2]
    assert [(row.what, row.dtype, row.device, row.head_dim) for row in found] == [
        ("mod", "float32", "cpu", 16),
        ("causal", "float32", "cpu", 16),
    ]
    assert found[0].kernels == ("tiled",) and set(found[1].kernels) == {"sdpa", "tiled"}


def _good(setup: Setup) -> Iterator[Row]:
    yield Row("one", "1", MEASURED)


def _raises(setup: Setup) -> Iterator[Row]:
    yield Row("one", "1", OK)
    raise ValueError("no such thing")


def _dies(setup: Setup) -> Iterator[Row]:
    yield Row("one", "1", OK)
    os._exit(9)


def _hangs(setup: Setup) -> Iterator[Row]:
    yield Row("one", "1", OK)
    time.sleep(60)


def test_an_item_that_fails_or_hangs_does_not_affect_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "GRACE_S", 0)
    ends = [[(row.what, row.verdict) for row in report._run(item, SETUP, 120)][-1] for item in (_good, _raises, _dies)]
    assert ends == [("one", MEASURED), ("the rest", FAILED), ("the rest", FAILED)]
    *_, last = report._run(_hangs, SETUP, 1.5)
    assert last.verdict.startswith("stopped: killed after ")
    assert [row.verdict for row in report._run(_good, SETUP, 0)] == ["stopped: the time of the whole report was up"]


def test_planned_memory_grows_with_tokens() -> None:
    # A CPU skips the item, so call its planner here.
    small, large = (model.planned_bytes({"ring": 2, "ulysses": 4}, 8 * local) for local in (32768, 262144))
    assert 1 << 30 < small < large / 4
