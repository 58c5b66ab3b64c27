"""`bench attention`, `step`, `collectives`: methods compute the same; counted bytes, output, refused input."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import cluster
from longspan import cli
from longspan.bench import BenchConfig
from longspan.bench.methods import METHODS, select
from longspan.core.errors import LongspanError
from longspan.core.sections import make
from longspan.plan.job import Mesh
from tests.command import ForkedLauncher
from tests.pool import RankPool

ROOT = Path(__file__).parents[1]
SMALL: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 8, "dtype": "fp32", "rounds": 2, "contexts": (32,)}
SHAPE = {"ffn": 32, "layers": 1, "vocab": 32}


def _compare(what: str, **changes: Any) -> tuple[str, dict[str, Any]]:
    """Return the tables and the JSON of a comparison."""
    import torch
    import torch.distributed as dist

    from longspan.bench.compare import compare
    from longspan.bench.output import as_json, print_tables

    found = compare(
        make(BenchConfig, what=what, **{**SMALL, **changes}), dist.get_world_size(), torch.device("cpu"), "here"
    )
    out = io.StringIO()
    data = json.loads(json.dumps(as_json(found)[0]))
    print_tables(data, out)
    return out.getvalue(), data


def _attention_results(world: int) -> dict[str, dict[str, Any]]:
    """Return, for every method's attention, the largest relative errors on this rank, against one process in fp64."""
    import torch
    import torch.nn.functional as F

    from longspan.bench.meters import run
    from longspan.bench.workloads import AttentionInputs, ShardingCache

    case = AttentionInputs(32, 4, 2, 8, torch.float32, ShardingCache(torch.device("cpu")))
    q, k, v, grad = (x.double().transpose(1, 2) for x in case.tensors())
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
    out.backward(grad)
    expected = {"out": out.detach(), **dict(zip(("dq", "dk", "dv"), (x.grad for x in leaves), strict=True))}
    errors: dict[str, dict[str, Any]] = {}
    for row in select((), "attention", world):
        work = row.method.attention(row, case)
        run(work)
        errors[row.name] = {}
        for name, x in work.results().items():
            errors[row.name][name] = _error(x.double(), expected[name].transpose(1, 2), row.mesh)
    return errors


def _error(x: Any, expected: Any, mesh: Mesh) -> float:
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
    from longspan.bench import peers
    from longspan.bench.compare import formula
    from longspan.bench.meters import count_sent, run
    from longspan.bench.methods import Candidate, Method, installed, job_of, read_config, shape_of
    from longspan.bench.workloads import ShardingCache, StepInputs

    config = make(BenchConfig, what="step", **{**SMALL, **SHAPE})
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
                run(work)
            losses.append(float(work.results()["loss"]))
        if row.method.planned:
            method, around = formula("step", shape_of("step", model), job_of(config, row, 32), row.mesh)
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


def _collectives() -> tuple[dict[str, Any], str]:
    import torch

    from longspan.bench.links import measure_collectives
    from longspan.bench.output import as_json, print_tables

    config = make(BenchConfig, what="collectives", ulysses=2, sizes=(64, 1024, 4096, 1 << 40), quick=True)
    rows = measure_collectives(config, torch.device("cpu"))
    found, _ = as_json({"what": "collectives", "measured": "here", "rows": rows})
    out = io.StringIO()
    print_tables(found, out)
    return found, out.getvalue()


def test_collectives_are_shown_with_fit_and_formula(pool2: RankPool) -> None:
    found, text = pool2.run(_collectives)[0]
    assert {row["op"] for row in found["rows"]} == {"all_to_all", "all_gather", "reduce_scatter", "all_reduce", "p2p"}
    assert len(found["rows"]) == 15 and all(row["sent"] == row["formula"] for row in found["rows"])
    assert all(row["fitted"] > 0 and row["seconds"]["low"] <= row["seconds"]["high"] for row in found["rows"])
    assert text.count("= sent") == 15


@pytest.mark.launcher
def test_a_step_with_a_trace_from_the_command_line(tmp_path: Path) -> None:
    flags = (
        "--quick --nproc 2 --dtype fp32 --heads 2 --kv-heads 2 --head-dim 8 --ffn 32 --layers 1 --vocab 32 --rounds 1"
    )
    args = ["bench", "step", *flags.split(), "--methods", "ulysses", "--trace", str(tmp_path / "t"), "--json"]
    process = ForkedLauncher(tmp_path, cli.main, [*args, "--png", str(tmp_path / "a.png")])
    stdout, stderr = process.communicate(timeout=240)
    assert process.returncode == 0, stderr
    found = json.loads(stdout)  # nothing else on stdout
    assert found["schema"] == "longspan.bench/1" and found["ranks"] == 2
    assert {path.name for path in (tmp_path / "t").iterdir()} == {
        f"ulysses-512.{x}" for x in ("trace.json", "html", "png")
    }
    names = {
        e["name"].split(" ")[0]
        for e in json.loads((tmp_path / "t" / "ulysses-512.trace.json").read_text())["traceEvents"]
    }
    assert {"longspan.attention", "longspan::scatter_heads", "FSDP::all_gather", "gloo:all_to_all"} <= names
    assert (tmp_path / "a.png").stat().st_size > 1000


# --- selection, and refused input


def test_every_mesh_of_the_ranks_is_a_row() -> None:
    names = [row.name for row in select((), "step", 12)]
    assert names[:5] == ["tp", "megatron-sp", "fsdp", "ulysses", "ring"]
    assert names[5:9] == ["usp-2x6", "usp-3x4", "usp-4x3", "usp-6x2"]
    assert [row.mesh for row in select(("usp-3x4",), "step", 12)] == [Mesh(ulysses=3, ring=4)]
    assert not [row for row in select((), "step", 2) if row.method.name == "usp"]


REFUSED: list[tuple[dict[str, Any], int, str]] = [
    ({"methods": ("ulises",)}, 2, "'ulises' is unknown; did you mean ulysses"),
    ({"methods": ("usp",)}, 2, "2 ranks have no mesh for it"),
    ({"methods": ("usp-3x2",)}, 4, "usp-3x2.*is unknown"),
    ({"contexts": (1000,)}, 3, "--contexts 1000 .* 3 ranks .*give 996 or 1002"),
    ({"contexts": ()}, 2, "--contexts needs"),
    ({"heads": 6, "kv_heads": 4}, 2, "--heads 6 is no multiple of --kv-heads 4"),
    ({"model": "llama-2-7"}, 2, "did you mean 'llama-2-7b'"),
    ({}, 1, "2 ranks or more"),
    ({"ulysses": 2}, 2, "--ulysses is a flag of `bench link` and `bench collectives`, not of `bench attention`"),
    ({"layers": 3}, 2, "--layers is a flag of `bench step`"),
    ({}, 5000, "5000 processes on this machine"),
]


@pytest.mark.parametrize(("changes", "ranks", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_bad_input_is_refused_before_a_rank_starts(
    changes: dict[str, Any], ranks: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from longspan.bench.command import run
    from longspan.ranks import launch

    monkeypatch.setattr(launch, "launch", lambda *_, **__: pytest.fail("ranks were started"))
    with pytest.raises(LongspanError, match=message):
        run(make(BenchConfig, what="attention", nproc=ranks, **{"contexts": (1024 * 12,), **changes}))


def test_a_peer_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from longspan.bench import methods

    monkeypatch.setattr(methods, "installed", lambda package: package != "yunchang")
    with pytest.raises(LongspanError, match=r"yunchang.*not installed \(pip install --no-deps yunchang"):
        select(("yunchang",), "attention", 2)
    assert not [row for row in select((), "attention", 2) if row.method.name == "yunchang"]
    with pytest.raises(LongspanError, match="not measured by `bench attention`; it has tp"):
        select(("fsdp-no-prefetch",), "attention", 2)
    assert all(kind.attention or kind.step for kind in METHODS.values())


def test_undivided_heads_are_a_reason_or_an_error(pool2: RankPool) -> None:
    """Tensor parallelism of 3 heads over 2 ranks is not measured; if it was named, that is an error."""
    text, found = pool2.run(functools.partial(_compare, "attention", heads=3, kv_heads=3, methods=()), timeout=240)[0]
    rows = {row["method"]: row for row in found["rows"]}
    assert "tensor=2 does not divide" in rows["tp"]["reason"] and "seconds" in rows["ulysses"]
    assert "tp is not measured" in text
    with pytest.raises(AssertionError, match="--methods tp at 32 tokens: tensor=2 does not divide"):
        pool2.run(functools.partial(_compare, "attention", heads=3, kv_heads=3, methods=("tp",)))


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
