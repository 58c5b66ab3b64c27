"""`benchmarks.methods`: all compute the same, send what the formulas say, and are predicted; `benchmarks.cluster`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import cluster, methods, peers
from benchmarks.methods import (
    MAX_SIZES,
    METHODS,
    Comparison,
    compare,
    formula,
    installed,
    job_of,
    predict,
    read_config,
    select,
    shape_of,
    tables,
    thin_out,
)
from benchmarks.workloads import AttentionInputs, Candidate, Method, ShardingCache, StepInputs
from longspan.core.errors import LongspanError
from longspan.core.parallel import ParallelConfig
from longspan.plan.cost.times import hidden_layer_seconds, layer_seconds
from longspan.plan.hardware import CATALOGUE, MeasuredLink
from longspan.plan.job import CostContext
from tests.counting import count_sent
from tests.pool import RankPool

ROOT = Path(__file__).parents[2]
SMALL: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 8, "dtype": "fp32", "rounds": 2, "contexts": (32,)}
SHAPE = {"ffn": 32, "layers": 1, "vocab": 32}


def _compare(what: str, **changes: Any) -> tuple[str, dict[str, Any]] | None:
    """Return the tables and the results of a comparison, on the first rank."""
    found = compare(Comparison(what, **{**SMALL, **changes}))
    return found and (tables(found), json.loads(json.dumps(found)))


def _attention_results(world: int) -> dict[str, dict[str, Any]]:
    """Return, for every method's attention, the largest relative errors on this rank, against one process in fp64."""
    import torch
    import torch.nn.functional as F

    case = AttentionInputs(32, 4, 2, 8, torch.float32, ShardingCache(torch.device("cpu")))
    q, k, v, grad = (x.double().transpose(1, 2) for x in case.tensors())
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
    out.backward(grad)
    expected = {"out": out.detach(), **dict(zip(("dq", "dk", "dv"), (x.grad for x in leaves), strict=True))}
    errors: dict[str, dict[str, Any]] = {}
    for row in select((), "attention", world):
        work = row.method.attention(row, case)
        work.run()
        errors[row.name] = {}
        for name, x in work.results().items():
            errors[row.name][name] = _error(x.double(), expected[name].transpose(1, 2), row.mesh)
    return errors


def _error(x: Any, expected: Any, mesh: ParallelConfig) -> float:
    """Return the relative error of a rank's part: of all tokens and heads, of its heads, or of its tokens."""
    import torch.distributed as dist

    from longspan.core.layout import choose_layout

    rank, ranks = dist.get_rank(), dist.get_world_size()
    if x.shape == expected.shape:
        part = expected
    elif x.shape[1] == expected.shape[1]:
        part = expected.chunk(ranks, 2)[rank]
    elif mesh.tensor > 1:
        part = expected.chunk(ranks, 1)[rank]
    else:
        spans = choose_layout("auto", mesh.ring, mesh.ulysses).padded_spans(expected.shape[1], rank)
        part = expected[:, [at for span in spans for at in range(*span)]]
    return float((x - part).abs().max() / expected.abs().max())


def test_every_method_computes_the_same_attention(pool2: RankPool) -> None:
    for errors in pool2.run(_attention_results, 2, timeout=240):
        assert {"tp", "megatron-sp", "fsdp", "ulysses", "ring"} <= set(errors)
        for name, of_method in errors.items():
            assert set(of_method) == {"out", "dq", "dk", "dv"}
            assert max(of_method.values()) < 1e-5, (name, of_method)


def test_counted_bytes_of_an_attention_are_those_of_the_formula(pool2: RankPool) -> None:
    text, found = pool2.run(
        functools.partial(_compare, "attention", methods=("tp", "megatron-sp", "fsdp", "ulysses", "ring")), timeout=240
    )[0]
    rows = {row["method"]: row for row in found["rows"]}
    for name, row in rows.items():
        assert row["sent_bytes"] == row["formula_bytes"], name
        assert row["seconds"]["total"]["median"] > 0 and row["peak_bytes"] > 0
        assert len(row["figures"]) == 2 and len(row["rounds"]) == 2
        for figures in row["figures"]:
            parts = figures["computing"] + figures["exposed"] + figures["rest"]
            assert parts == pytest.approx(figures["step"])
    # A sum over 2 ranks: 4 x 32 x 32 x 4 bytes. Ulysses: half of a rank's Q, K, V and O.
    assert rows["tp"]["method_bytes"] == 4 * 32 * 32 * 4 and rows["fsdp"]["method_bytes"] == 0
    assert rows["ulysses"]["method_bytes"] == 2 * (2 * 4 + 2 * 2) * 8 * 16 * 4 // 2
    assert "TP sends 2.67 times Ulysses' bytes (formula 2.67)" in text
    assert text.count("= sent") == 5 and "fsdp shards no sequence: 2 sequences at once" in text
    assert max(map(len, text.splitlines())) <= 140


def _losses() -> dict[str, list[float]]:
    """Return two steps' losses by every method of one sequence; assert that its bytes are the formula's."""
    import torch
    import torch.distributed as dist

    import longspan

    config = Comparison("step", **{**SMALL, **SHAPE})
    model = read_config(config)
    case = StepInputs(model, 32, torch.float32, ShardingCache(torch.device("cpu")))
    found = {}
    rows = select(("tp", "megatron-sp", "ulysses", "fsdp-no-prefetch"), "step", dist.get_world_size())
    # A peer's step with longspan's attention, and that of every installed peer.
    own = Candidate("own", Method("own", lambda ranks: {}, step=peers.peer_step, planned=False), rows[2].mesh)
    sp = case.shardings.get(own)
    peers._ATTENTIONS["own"] = lambda *_: lambda q, k, v: longspan.attention(q, k, v, sp, causal=True, length=32)
    names = [kind.name for kind in METHODS.values() if kind.package and installed(kind.package)]
    for row in (*rows, own, *(select(names, "step", dist.get_world_size()) if names else ())):
        work = row.method.step(row, case)
        losses = []
        for _ in range(2):
            with count_sent() as log:
                work.run()
            losses.append(float(work.results()["loss"]))
        if row.method.planned:
            method, around = formula("step", shape_of("step", model), job_of(config, row, 32))
            sent = sum(each.bytes for each in log)
            assert sent == sum(method.values()) + sum(around.values()), (row.name, log, method)
        assert work.state_bytes() > 0
        found[row.name] = losses
    return found


def test_every_method_takes_the_same_step_and_sends_its_formulas_bytes(pool2: RankPool) -> None:
    for found in pool2.run(_losses, timeout=240):
        assert {"tp", "megatron-sp", "ulysses", "own"} <= set(found)
        del found["fsdp-no-prefetch"]  # one sequence per rank
        assert found == {name: pytest.approx(found["ulysses"], rel=1e-5) for name in found}


# --- selection, and refused input


def test_every_mesh_of_the_ranks_is_a_row() -> None:
    names = [row.name for row in select((), "step", 12)]
    assert names[:5] == ["tp", "megatron-sp", "fsdp", "ulysses", "ring"]
    assert names[5:9] == ["usp-2x6", "usp-3x4", "usp-4x3", "usp-6x2"]
    assert [row.mesh for row in select(("usp-3x4",), "step", 12)] == [ParallelConfig(ulysses=3, ring=4)]
    assert not [row for row in select((), "step", 2) if row.method.name == "usp"]


@pytest.mark.parametrize(
    ("name", "ranks", "message"),
    [
        ("ulises", 2, "ulises is unknown; did you mean ulysses"),
        ("usp", 2, "2 ranks have no mesh for it"),
        ("usp-3x2", 4, "usp-3x2.*is unknown"),
        ("fsdp-no-prefetch", 2, "not measured as attention"),
    ],
)
def test_an_impossible_method_is_refused(name: str, ranks: int, message: str) -> None:
    with pytest.raises(LongspanError, match=message):
        select((name,), "attention", ranks)


def test_a_peer_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "installed", lambda package: package != "yunchang")
    with pytest.raises(LongspanError, match=r"yunchang.*not installed \(pip install --no-deps yunchang"):
        select(("yunchang",), "attention", 2)
    assert not [row for row in select((), "attention", 2) if row.method.name == "yunchang"]
    assert all(kind.attention or kind.step for kind in METHODS.values())


def test_undivided_heads_are_a_reason_or_an_error(pool2: RankPool) -> None:
    """Tensor parallelism of 3 heads over 2 ranks is not measured; if it was named, that is an error."""
    text, found = pool2.run(functools.partial(_compare, "attention", heads=3, kv_heads=3, methods=()), timeout=240)[0]
    rows = {row["method"]: row for row in found["rows"]}
    assert "tensor=2 does not divide" in rows["tp"]["reason"] and "seconds" in rows["ulysses"]
    assert "tp is not measured" in text
    with pytest.raises(AssertionError, match="--methods tp at 32 tokens: tensor=2 does not divide"):
        pool2.run(functools.partial(_compare, "attention", heads=3, kv_heads=3, methods=("tp",)))


@pytest.mark.parametrize("method", ["ulysses", "ulysses-overlap", "ring", "usp-2x2"])
def test_an_attention_is_predicted_as_in_a_step(method: str) -> None:
    """Communication of chunks or of the ring overlaps with computing by the share that the link hides."""
    config = Comparison("attention", dtype="fp32")
    (candidate,) = select([method], "attention", 4)
    shape, job = shape_of("attention", read_config(config)), job_of(config, candidate, 4096)
    totals = []
    for hidden in (0.0, 0.5, 1.0):
        links = {on: MeasuredLink(1e-3, 1e9, (), hidden) for on in (("ulysses", "all_to_all"), ("ring", "p2p"))}
        hardware = dataclasses.replace(CATALOGUE["cpu"], measured=links)
        found = predict("attention", shape, job, hardware)
        c = CostContext(shape, job)
        computing = layer_seconds(shape.layers[0], c, hardware)
        attention = computing.attention_forward + computing.attention_backward
        hidden_seconds = hidden_layer_seconds(shape.layers[0], computing, c, hardware)
        assert found["total"] == pytest.approx(found["communication"] - hidden_seconds + attention)
        totals.append(found["total"])
    assert (totals[0] > totals[1] > totals[2]) == (method != "ulysses")


def test_measured_sizes_are_few_and_keep_both_ends() -> None:
    assert thin_out([100, 105, 200]) == (100, 200)
    found = thin_out([2**n for n in range(12)])
    assert len(found) == MAX_SIZES and (found[0], found[-1]) == (1, 2**11)


# --- the emulated cluster


def _cluster(*args: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.cluster", *args]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, **options)


def _namespaces() -> set[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    return {line.split()[0] for line in listed.splitlines() if line.strip()}


PRINT = "import os; print(*(os.environ[n] for n in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE'))); "


def test_a_cluster_runs_a_command_and_is_removed() -> None:
    try:
        cluster.check_machine()
    except cluster.CannotBuild as error:
        pytest.skip(str(error))
    before = _namespaces()
    hosts = ["--hosts", "2", "--ranks-per-host", "2"]
    last = "raise SystemExit(7 * (os.environ['RANK'] == '3'))"
    done = _cluster(*hosts, "--", "python", "-S", "-c", PRINT + last)
    assert (done.returncode, done.stdout) == (7, "0 0 4 2\n"), done.stderr
    assert _namespaces() <= before
    command = [sys.executable, "-m", "benchmarks.cluster", *hosts, "--", "sleep", "611"]
    with subprocess.Popen(command, cwd=ROOT) as killed:  # by SIGKILL, so only the watcher can clean up
        deadline = time.monotonic() + 60
        while not _sleepers() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert _sleepers()
        killed.kill()
    while (_namespaces() - before or _sleepers()) and time.monotonic() < deadline + 60:
        time.sleep(0.1)
    assert not _namespaces() - before and not _sleepers()


def _sleepers() -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # a process that has ended since the folder was listed
            if path.read_bytes().endswith(b"/sleep\x00611\x00"):
                found.append(str(path))
    return found


def test_an_impossible_cluster_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*args: str) -> str:
        monkeypatch.setattr(sys, "argv", ["cluster", *args])
        with pytest.raises(SystemExit) as stop:
            raise SystemExit(cluster.main())
        assert stop.value.code == 2
        return capsys.readouterr().err

    monkeypatch.setattr(cluster.signal, "signal", lambda *_: None)
    assert "must be above 0" in run("--hosts", "0", "--", "true")
    assert "200 hosts x 90 ranks" in run("--hosts", "200", "--ranks-per-host", "90", "--", "true")
    assert "no-such-program" in run("--", "no-such-program")
    assert "give a command" in run()
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setattr("shutil.which", lambda tool: f"/sbin/{tool}")
    assert "need root" in run("--", "true")
