"""The report of a GPU (`make gpu`), on shapes for a CPU: every item runs, and wrong results get their verdict."""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import pytest
import torch
import torch.distributed as dist

import longspan
from benchmarks.gpu import __main__ as report
from benchmarks.gpu import exchange, kernels, model
from benchmarks.gpu.setup import FAILED, MEASURED, OK, WRONG, Row, Setup
from longspan.attn.methods import ring
from longspan.core.memory import Memory
from longspan.hf import preconditions
from tests.attn.late import LateTransport
from tests.fakes import fake_world


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report of all items."""
    folder = tmp_path_factory.mktemp("report")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # OpenMP does not survive the fork of an item
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(sys, "argv", ["gpu", "--quick", "--device", "cpu", "--out", str(folder)])
        report.main()
    torch.set_num_threads(threads)
    (data,) = folder.glob("*-gpu-cpu.json")
    (text,) = folder.glob("*-gpu-cpu.md")
    return {"code": ended.value.code, "text": text.read_text(), **json.loads(data.read_text())}


@pytest.mark.slow
@pytest.mark.timeout(600)
class TestReport:
    def test_every_item_has_run_and_nothing_is_wrong(self, found: dict[str, Any]) -> None:
        for name in report.ITEMS:
            rows = found["results"][name]
            assert rows, name
            bad = [row for row in rows if row["verdict"].startswith((FAILED, "stopped", WRONG))]
            assert not bad, (name, bad)
            assert all(row["figure"] or row["verdict"].startswith("skipped: ") for row in rows), rows
        assert found["code"] == 0
        ratios = [row["data"] for row in found["results"]["memory"]]
        assert ratios and all(0.8 < ratio < 1.25 for ratio in ratios)  # gloo's copies are planned, and nothing is sent

    def test_the_page_names_machine_date_command_and_versions(self, found: dict[str, Any]) -> None:
        text, env = found["text"], found["environment"]
        for part in (env["cpu"], env["date"], f"torch {version('torch')}", "--quick --device cpu", "GPU: none"):
            assert part in text, part
        for name in report.ITEMS:
            assert f"## {report.ITEMS[name][2]}" in text


def test_the_items_fit_into_eight_minutes() -> None:
    assert sum(limit for _, limit, _ in report.ITEMS.values()) + report.GRACE_S <= 8 * 60


SETUP = Setup("cpu", True, float("inf"))


def test_wrong_and_failing_kernels_get_their_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "causal, fp32, D=16, 8/2 heads"
    measure = functools.partial(kernels.against_fp64, SETUP, "sdpa", {name: kernels.cases(SETUP)[name]})
    assert measure()[1] == OK
    plain = longspan.attention
    monkeypatch.setattr(longspan, "attention", lambda q, k, v, sp, **how: plain(q, k, v, sp, **how) * 1.0001)
    assert measure()[1] == WRONG
    monkeypatch.setattr(longspan, "attention", lambda *args, **how: 1 // 0)
    assert measure()[1] == FAILED


def test_a_message_that_nobody_waits_for_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = {"causal": exchange.case_of(SETUP, "causal", torch.float32)}
    measure = functools.partial(exchange.on_mesh, SETUP, {"ring": 4}, {}, "auto", tried)
    assert measure()[1] == OK
    monkeypatch.setattr(ring, "wait_for", lambda works: None)
    assert measure()[1] == WRONG


def test_a_late_message_is_read_when_it_is_waited_for() -> None:
    with fake_world(0, 1), LateTransport("cpu").installed():
        sent, received = torch.zeros(4), torch.zeros(4)
        work = dist.all_to_all_single(received, sent, group=dist.group.WORLD, async_op=True)
        assert received.isnan().all()
        sent += 1  # as a caller that reuses the buffer too early
        work.wait()
        assert received.eq(1).all()
        work = dist.all_to_all_single(received, torch.ones(4), group=dist.group.WORLD, async_op=True)
        with pytest.raises(AssertionError, match="freed"):
            work.wait()


def test_wrong_gradients_and_lossy_caches_get_their_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    measure = functools.partial(model.check, SETUP, Memory(), torch.float32)
    assert measure()[1] == OK
    plain = model._gradients
    monkeypatch.setattr(model, "_gradients", lambda m: {name: x * 1.0001 for name, x in plain(m).items()})
    assert measure()[1] == WRONG
    monkeypatch.setattr(model, "LOSSY", {"int8": 1e-4, "fp8": 1e-4})
    assert [row.verdict for row in model.decode(SETUP)][-2:] == [WRONG, WRONG]


def test_weights_in_host_memory_run_on_a_cpu_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU has nothing to move, which is refused."""
    monkeypatch.setattr(preconditions, "check_cpu_offload", lambda *args: None)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: x)
    assert [row.verdict for row in exchange.nccl(SETUP)] == [OK] * 4


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
