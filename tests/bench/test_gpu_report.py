"""The reports of GPUs (`make gpu`, `make gpus`), on shapes for a CPU: every item runs, and wrong results get their
verdict.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import longspan
from benchmarks import peers
from benchmarks.gpu import exchange, kernels, model, ranks, report
from benchmarks.gpu.setup import FAILED, MEASURED, OK, WRONG, Row, Setup, beside
from benchmarks.workloads import AttentionInputs, Candidate
from longspan.attn.kernels import flash
from longspan.attn.methods import ring
from longspan.core.memory import Memory
from longspan.hf import preconditions
from tests.attn import flash_emulated
from tests.attn.late import LateTransport
from tests.fakes import fake_world

NEEDS_GPU = r"needs a GPU|is for NVIDIA's GPUs|from a GPU|to host memory|is not installed|no case"
"""Why a row may be skipped on a CPU."""


def run_report(folder: Path, *args: str) -> dict[str, Any]:
    """Run the command on a CPU, and return its exit code, its page, and its JSON."""
    for name in ("bitsandbytes", "peft", "functorch.compile", "transformers.processing_utils"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)  # here once, and not in the process of every item
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # OpenMP does not survive the fork of an item
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(sys, "argv", ["gpu", "--quick", "--device", "cpu", "--out", str(folder), *args])
        report.main()
    torch.set_num_threads(threads)
    (data,) = folder.glob("*-cpu.json")
    (text,) = folder.glob("*-cpu.md")
    return {"code": ended.value.code, "name": data.stem, "text": text.read_text(), **json.loads(data.read_text())}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report of all items of one GPU."""
    return run_report(tmp_path_factory.mktemp("report"))


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report of all items of several GPUs, with a rival that attends as longspan does."""

    def attend(candidate: Candidate, inputs: AttentionInputs) -> peers.Attend:
        sp = inputs.shardings.get(candidate)
        return lambda q, k, v: longspan.attention(q, k, v, sp, length=inputs.context)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(peers._ATTENTIONS, ranks.RIVAL, attend)
        patch.setattr(ranks, "installed", lambda package: True)
        return run_report(tmp_path_factory.mktemp("several"), "--several")


def check_rows(found: dict[str, Any], items: report.Items) -> None:
    for name, (_, _, title) in items.items():
        rows = found["results"][name]
        assert rows, name
        bad = [row for row in rows if row["verdict"].startswith((FAILED, "stopped", WRONG))]
        bad += [row for row in rows if row["verdict"].startswith("skipped: ") and not re.search(NEEDS_GPU, str(row))]
        assert not bad, (name, bad)
        assert all(row["figure"] or row["verdict"].startswith("skipped: ") for row in rows), rows
        assert f"## {title}" in found["text"]
    assert found["code"] == 0


def planned_rows(found: dict[str, Any], *names: str) -> list[dict[str, Any]]:
    rows = [row for name in names for row in found["results"][name]]
    return [row for row in rows if isinstance(row["data"], dict) and "planned" in row["data"]]


@pytest.mark.slow
@pytest.mark.timeout(600)
class TestReport:
    def test_every_item_has_run_and_nothing_is_wrong(self, found: dict[str, Any]) -> None:
        check_rows(found, report.ITEMS)
        rows = planned_rows(found, "steps", "adapters")
        assert len(rows) == 4
        for row in rows:
            measured, planned = row["data"]["measured"], row["data"]["planned"]
            assert measured["sent"] == planned["sent"], row
            assert 0.8 < planned["memory"] / measured["memory"] < 1.25, row  # nothing is sent

    def test_the_page_names_machine_date_command_and_versions(self, found: dict[str, Any]) -> None:
        text, env = found["text"], found["environment"]
        parts = env["cpu"], env["date"], f"torch {version('torch')}", "--quick --device cpu", "GPU: none", env["commit"]
        for part in parts:
            assert part in text, part

    def test_rows_on_ranks_are_verified_planned_and_compared(self, several: dict[str, Any]) -> None:
        check_rows(several, report.SEVERAL)
        assert several["name"].endswith("gpus-cpu") and "ranks: 2, device cpu" in several["text"]
        rows = planned_rows(several, *list(report.SEVERAL)[1:])
        assert len(rows) == 7, [row["what"] for row in rows]
        for row in rows:
            measured, planned = row["data"]["measured"]["sent"], row["data"]["planned"]["sent"]
            # Which rank encodes a picture, and how many tokens an expert gets, the planner assumes.
            assumed = "vision" in row["what"] or "hybrid" in row["what"]
            assert planned == pytest.approx(measured, rel=0.1 if assumed else 0), row
        assert several["results"]["mesh"][0]["verdict"] == OK
        (compared,) = (row for row in rows if row["ratio"] is not None)
        assert compared["data"]["rival"]["memory"] > 0
        assert "slower than the rival, of 1 compared: " in several["text"]


def test_both_reports_keep_their_time() -> None:
    for several, most in ((False, 8), (True, 30)):
        assert report.MINUTES[several] * 60 + report.GRACE_S <= most * 60
    for item in (*report.ITEMS.values(), *report.SEVERAL.values()):
        assert item[1] <= report.MINUTES[item in report.SEVERAL.values()] * 60


def test_one_gpu_is_refused_where_several_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def hardware(setup: Setup) -> Iterator[Row]:
        yield Row("", "", MEASURED, {"gpu": "one", "gpus": 1})

    monkeypatch.setattr(report, "_hardware", hardware)
    monkeypatch.setattr(sys, "argv", ["gpu", "--several"])
    with pytest.raises(SystemExit, match="2 to 8 GPUs together, and torch finds 1 here; `make gpu` measures it"):
        report.main()


def test_where_the_rival_is_faster_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = {"seconds": 3.0, "sent": 1.0, "memory": 1.0}
    rows = [
        Row(what, *beside(SETUP, step, step, {**step, "seconds": seconds}))
        for what, seconds in (("a", 2.0), ("b", 4.0))
    ]
    rows.append(Row("c", *beside(SETUP, step, step, "it is not installed")))
    report.write(tmp_path, SETUP, {}, report.SEVERAL, {"published": rows}, 1.0)
    text = capsys.readouterr().out
    assert "slower than the rival, of 2 compared: a (1.50)\n" in text and "of the rival's time" in text
    assert "1.500" in text and "0.750" in text and "it is not installed" in text


def _divide_by_zero(setup: Setup, case: ranks.Case) -> Any:
    return 1 // 0


def test_a_row_whose_ranks_fail_says_so_and_the_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "train_on_ranks", _divide_by_zero)
    row = ranks.case_row(replace(SETUP, ranks=2), ranks.KINDS[0])
    assert row.verdict == FAILED and "ZeroDivisionError" in row.figure


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


def test_flash_attention_4_is_called_as_the_kernel_calls_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its names of arguments (flash_attn/cute/interface.py), with None for a window without a limit."""

    def limits(left: int | None, right: int | None) -> dict[str, int]:
        return {"window_size_left": -1 if left is None else left, "window_size_right": -1 if right is None else right}

    def fwd(
        q: Any, k: Any, v: Any, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None, max_seqlen_q: Any = None,
        max_seqlen_k: Any = None, softmax_scale: Any = None, causal: bool = False, window_size_left: Any = None,
        window_size_right: Any = None, return_lse: bool = False,
    ) -> Any:  # fmt: skip
        assert return_lse
        longest = (q.shape[-3], k.shape[-3]) if cu_seqlens_q is None else (max_seqlen_q, max_seqlen_k)
        return emulated_forward(
            q, k, v, cu_seqlens_q, cu_seqlens_k, *longest, 0.0, causal, False, scale=softmax_scale,
            **limits(window_size_left, window_size_right),
        )[:2]  # fmt: skip

    def bwd(
        q: Any, k: Any, v: Any, out: Any, dout: Any, lse: Any, softmax_scale: Any = None, causal: bool = False,
        cu_seqlens_q: Any = None, cu_seqlens_k: Any = None, max_seqlen_q: Any = None, max_seqlen_k: Any = None,
        window_size_left: Any = None, window_size_right: Any = None,
    ) -> Any:  # fmt: skip
        longest = (q.shape[-3], k.shape[-3]) if cu_seqlens_q is None else (max_seqlen_q, max_seqlen_k)
        state, empty = torch.zeros(2, dtype=torch.uint64), torch.empty(0)
        return emulated_backward(
            dout, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, *longest, 0.0, causal, state, empty,
            scale=softmax_scale, **limits(window_size_left, window_size_right),
        )  # fmt: skip

    with flash_emulated.emulated():
        emulated_forward, emulated_backward = flash._flash, flash._flash_backward
        interface = SimpleNamespace(_flash_attn_fwd=fwd, _flash_attn_bwd=bwd)
        monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", interface)
        rows = list(kernels.flash4(SETUP))
    assert rows[0].verdict == OK and "7 cases" in rows[0].figure, rows[0]
    assert [row.what.split(",")[0] for row in rows[1:]] == ["FlashAttention-2", "FlashAttention-4"] * 3


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
