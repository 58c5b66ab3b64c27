"""`longspan bench`: the fit, the links of each axis, the hardware file, and refused input."""

from __future__ import annotations

import io
import math
import os
import random
import tomllib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longspan import cli
from longspan.bench import BenchConfig, run, worker
from longspan.bench.hardware import FORWARD_AND_BACKWARD, as_toml, causal_attention_flops, overhead, print_hardware
from longspan.bench.links import bytes_sent, fit
from longspan.bench.timing import median_seconds
from longspan.core.errors import LongspanError
from longspan.plan.hardware import MeasuredLink
from longspan.ranks import launch
from tests.counting import count_sent
from tests.flags import make, replace
from tests.pool import RankPool

SIZES = [2.0**n for n in range(12, 27, 2)]
FOUR = {"all_to_all", "all_gather", "reduce_scatter", "all_reduce"}


def _config(**changes: Any) -> BenchConfig:
    return replace(make(BenchConfig, sizes=(1 << 10, 4 << 10, 8 << 10), rounds=2), **changes)


COMPUTE = {
    "memory_bytes": 80_000_000_000, "flops": 3.1e14, "memory_bandwidth": 2e12, "attention_flops": 1.2e14,
    "attention_forward_flops": 1.4e14, "attention_block": 256.0, "attention_width": 16.0,
}  # fmt: skip


def _hardware(links: dict[str, dict[str, MeasuredLink]], **changes: Any) -> dict[str, Any]:
    of_cpu = {"overlaps": False, "on_cpu": True, "reserve_bytes": 0.0, "dtype": "bf16", "measured": "today on HOST"}
    first = {"name": "mine", **COMPUTE, "gpus_per_node": 8, "matmul_efficiency": 1.0}
    return {**first, **of_cpu, **changes, "links": links}


# --- the fit


def test_a_fit_recovers_latency_and_bandwidth() -> None:
    for latency, bandwidth in ((15e-6, 3e11), (5e-4, 1e9), (0.0, 1e8), (1e-3, 2e10)):
        found = fit(SIZES, [latency + x / bandwidth for x in SIZES])
        assert found.latency == pytest.approx(latency, rel=1e-6, abs=1e-12)
        assert found.bandwidth == pytest.approx(bandwidth, rel=1e-6)
        assert found.residual < 1e-6
    for seed in range(20):
        draw = random.Random(seed)
        found = fit(SIZES, [(2e-5 + x / 1e10) * math.exp(draw.gauss(0, 0.05)) for x in SIZES])
        assert found.latency == pytest.approx(2e-5, rel=0.2)
        assert found.bandwidth == pytest.approx(1e10, rel=0.2)
        assert 0.001 < found.residual < 0.15


def test_small_messages_count_as_much_as_large_ones() -> None:
    """A fit of absolute errors would return a latency of 0, because the largest message takes 20 % longer."""
    seconds = [1e-4 + x / 1e9 for x in SIZES]
    seconds[-1] *= 1.2
    assert fit(SIZES, seconds).latency == pytest.approx(1e-4, rel=0.1)


_positive = st.floats(1e-7, 1e2)


@given(st.lists(st.tuples(st.floats(1, 1e10), _positive), min_size=2, max_size=8, unique_by=lambda pair: pair[0]))
def test_a_fit_is_never_negative_nor_infinite(times: list[tuple[float, float]]) -> None:
    sent, seconds = zip(*times, strict=True)
    found = fit(sent, seconds)
    assert 0 <= found.latency < math.inf
    assert 0 < found.bandwidth <= 10.001 * max(x / t for x, t in times)
    assert 0 <= found.residual < math.inf


def test_a_fit_with_a_negative_free_minimum_is_the_best_nonnegative_line() -> None:
    seconds = [x**1.1 / 1e9 for x in SIZES]
    found = fit(SIZES, seconds)

    def cost(latency: float, per_byte: float) -> float:
        return sum(((latency + per_byte * x) / t - 1) ** 2 for x, t in zip(SIZES, seconds, strict=True))

    best = cost(found.latency, 1 / found.bandwidth)
    assert found.latency == 0
    assert all(cost(x, y / found.bandwidth) >= best for x in (0.0, 1e-9, 1e-7) for y in (0.99, 1.0, 1.01))


def _sent_when_measured() -> dict[str, tuple[int, float]]:
    """Return, for every measured collective, the bytes that this rank sends, and those that its fit uses."""
    import torch
    import torch.distributed as dist

    from longspan.bench.links import collectives_of, start

    group, ranks = dist.group.WORLD, dist.get_world_size()
    x, y = torch.zeros(2, 24 * ranks)
    sent = {}
    assert group is not None
    for name in collectives_of("ring"):
        with count_sent() as log:
            start(name, x, y, len(x), group)
        sent[name] = sum(entry.bytes for entry in log), bytes_sent(name, x.nbytes, ranks)
        assert {entry.op for entry in log} == {name}
    return sent


def test_a_rank_sends_the_bytes_of_the_fit(pool4: RankPool) -> None:
    for sent in pool4.run(_sent_when_measured):
        assert set(sent) == {*FOUR, "p2p"}
        assert {name: both for name, both in sent.items() if both[0] != both[1]} == {}


def test_flops_of_attention_are_half_of_torchs_count() -> None:
    """torch counts the pairs that a causal mask excludes."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from longspan.compat.torch_attention import flash_cuda, flash_cuda_backward

    tokens, heads, head_dim = 24, 3, 8
    q, k, v = torch.empty(3, 1, heads, tokens, head_dim, device="meta", dtype=torch.bfloat16)
    with FlopCounterMode(display=False) as forward:
        out, lse, ends_q, ends_k, *_, seed, offset, _ = flash_cuda(q, k, v, 0.0, True)
    with FlopCounterMode(display=False) as backward:
        flash_cuda_backward(out, q, k, v, out, lse, ends_q, ends_k, tokens, tokens, 0.0, True, seed, offset)
    counted = forward.get_total_flops(), backward.get_total_flops()
    assert causal_attention_flops(tokens, heads, head_dim) == counted[0] / 2
    assert FORWARD_AND_BACKWARD * counted[0] == sum(counted)


# --- links


def _links(config: BenchConfig) -> dict[str, dict[str, MeasuredLink]]:
    import torch

    from longspan.bench.links import measure_links
    from longspan.comm.mesh import init_mesh

    mesh = init_mesh(*config.parallel.degrees.values(), device_type="cpu")
    return measure_links(config, mesh, torch.device("cpu"))


@pytest.mark.parametrize(
    ("degrees", "axes"),
    [
        ({"data": 2, "ulysses": 2}, ["data", "ulysses", "fsdp"]),
        ({"ring": 2, "tensor": 2}, ["ring", "tensor", "fsdp"]),
    ],
    ids=str,
)
def test_every_axis_above_1_is_measured(pool4: RankPool, degrees: dict[str, int], axes: list[str]) -> None:
    results = pool4.run(_links, _config(**degrees))
    links = results[0]
    assert results == [links] * 4  # the slowest rank's time
    assert list(links) == axes
    for axis, fits in links.items():
        assert set(fits) == (FOUR | {"p2p"} if axis == "ring" else FOUR)
        assert all(fit.latency >= 0 and fit.bandwidth > 0 and fit.residual >= 0 for fit in fits.values())
        shares = {op: fit.hidden for op, fit in fits.items() if fit.hidden is not None}
        assert all(0 <= share <= 1 for share in shares.values())
        # What longspan overlaps with computing.
        expected = {"ulysses": {"all_to_all"}, "ring": {"p2p"}}.get(axis, set())
        assert set(shares) == expected


def _results_of_collectives() -> dict[str, list[float]]:
    """Return each collective's receive buffer on this rank; the input is 10 * rank + (0, 1, 2, 3)."""
    import torch
    import torch.distributed as dist

    from longspan.bench.links import collectives_of, start

    assert dist.group.WORLD is not None
    found = {}
    for name in collectives_of("ring"):
        x = torch.arange(4.0) + 10 * dist.get_rank()
        ways = [x.clone() if name == "all_reduce" else torch.full((4,), -1.0) for _ in range(2)]
        start(name, x, ways[0], 4, dist.group.WORLD)
        works = start(name, x, ways[1], 4, dist.group.WORLD, overlapped=True)
        assert works  # still in flight
        for work in works:
            work.wait()
        assert torch.equal(*ways)
        found[name] = ways[0].tolist()
    return found


def test_collectives_compute_what_their_names_say(pool2: RankPool) -> None:
    first, second = pool2.run(_results_of_collectives)
    assert first == {
        "all_to_all": [0, 1, 10, 11],
        "all_gather": [0, 1, 10, 11],
        "reduce_scatter": [10, 12, -1, -1],
        "all_reduce": [10, 12, 14, 16],
        "p2p": [10, 11, 12, 13],
    }
    assert second["reduce_scatter"] == [14, 16, -1, -1] and second["p2p"] == [0, 1, 2, 3]


def test_the_hidden_share_is_the_time_that_overlap_saves() -> None:
    import torch

    from longspan.bench import links

    for sent, computed, both, share in (
        ([1.0] * 5, [1.0] * 5, [1.25] * 5, 0.75),
        ([2.0] * 5, [1.0] * 5, [2.5] * 5, 0.5),  # at most the shorter one can be hidden
        ([1.0] * 5, [1.0] * 5, [2.5] * 5, 0.0),
        ([1.0] * 5, [1.0] * 5, [0.9] * 5, 1.0),
        ([1.0, 1.0, 9.0, 1.0, 9.0], [1.0] * 5, [1.5, 1.5, 9.5, 1.5, 1.5], 0.5),  # two rounds were disturbed
    ):
        with mock.patch.object(links, "time_rounds", lambda *_, times=(sent, computed, both): list(times)):
            assert links.hidden_share(list, 1e-4, torch.device("cpu")) == pytest.approx(share)


def _medians() -> list[float]:
    import time

    import torch
    import torch.distributed as dist

    rank = dist.get_rank()
    clock = iter(range(10**6))
    works = [lambda n=n: [next(clock) for _ in range(n * rank)] for n in (1, 5)]
    # A clock that advances by one second per read; rank 1's works read it `n` more times.
    with mock.patch.object(time, "perf_counter", lambda: float(next(clock))):
        return median_seconds(works, 3, torch.device("cpu"))


def test_the_slowest_rank_counts(pool2: RankPool) -> None:
    assert pool2.run(_medians) == [[2.0, 6.0]] * 2


# --- the hardware file


def test_the_file_has_all_figures() -> None:
    links = {
        "ulysses": {"all_to_all": MeasuredLink(1.5e-5, 3e11, residual=0.04), "all_gather": MeasuredLink(0.0, 1e11)},
        "fsdp": {"all_gather": MeasuredLink(5e-6, 2.5e10, ((1024.0, 1e-5), (4096.0, 2e-5)), 0.25, 1.25)},
    }
    hardware = _hardware(links)
    found = tomllib.loads(as_toml(hardware))
    fits = found.pop("links")
    assert found == {key: value for key, value in hardware.items() if key != "links"}
    assert fits == {
        "ulysses": {
            "all_to_all": {"latency": 1.5e-5, "bandwidth": 3e11, "residual": 0.04},
            "all_gather": {"latency": 0.0, "bandwidth": 1e11, "residual": 0.0},
        },
        "fsdp": {
            "all_gather": {"latency": 5e-6, "bandwidth": 2.5e10, "residual": 1.25, "points": [[1024, 1e-5],
                           [4096, 2e-5]], "hidden": 0.25},
        },
    }  # fmt: skip


def test_the_file_keeps_any_name() -> None:
    for name in ('8 "fat" nodes', "a\\b\nc\td", "Rechner für 🦙", "\x7f"):
        values = tomllib.loads(as_toml(_hardware({}, name=name)))
        assert values["name"] == name and "links" not in values
        assert all(isinstance(values[key], float) for key in ("flops", "memory_bandwidth", "attention_flops"))


def test_the_table_has_speeds_and_links() -> None:
    out = io.StringIO()
    print_hardware(_hardware({"ring": {"p2p": MeasuredLink(1.5e-5, 3e11, hidden=0.73, residual=0.04)}}), out)
    assert "310 TFLOP/s" in out.getvalue() and "2000 GB/s" in out.getvalue()
    for cell in ("ring", "p2p", "15.0 us", "300 GB/s", "4%", "73%"):
        assert cell in out.getvalue()
    assert max(map(len, out.getvalue().splitlines())) <= 80


def test_without_an_axis_only_compute_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    out = tmp_path / "new" / "one.toml"
    assert run(_config(out=out, dtype="fp32", rounds=1, sizes=(1,))) == 0
    printed = capsys.readouterr().out
    assert "No axis of the mesh is above 1, so there is no link to measure" in printed
    assert f"written to {out}" in printed
    values = tomllib.loads(out.read_text())
    assert "links" not in values and values["gpus_per_node"] == 1
    assert min(values[key] for key in ("flops", "attention_flops", "attention_forward_flops", "memory_bandwidth")) > 0


def _worker(config: BenchConfig) -> dict[str, Any]:
    from longspan.bench import hardware

    with mock.patch.object(hardware, "measure_compute", lambda *_: COMPUTE):
        return worker(config)


def test_two_ranks_measure_one_hardware(pool2: RankPool, tmp_path: Path) -> None:
    first, second = pool2.run(_worker, _config(ulysses=2, out=tmp_path / "two.toml"))
    assert first == second and first["name"] == "two" and "2 ranks" in first["measured"]
    assert (first["gpus_per_node"], first["overlaps"], first["on_cpu"], first["reserve_bytes"]) == (1, False, True, 0)
    assert {axis: set(ops) for axis, ops in first["links"].items()} == {"ulysses": FOUR, "fsdp": FOUR}


# --- the command line, and refused input


def _parse(line: str) -> BenchConfig:
    return cli.parse(BenchConfig, line.split(), prog="longspan bench")


def test_flags() -> None:
    config = _parse("--data 2 --ring 2 --tensor 3 --sizes 64k 1M --dtype=fp32")
    sizes: dict[str, Any] = {"sizes": (1 << 16, 1 << 20), "dtype": "fp32"}
    assert config == make(BenchConfig, data=2, ring=2, tensor=3, **sizes)
    assert config.parallel.ranks == 12
    assert _parse("").sizes[0] == 64 << 10 and _parse("").sizes[-1] == 64 << 20


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"ulysses": 0}, r"^ulysses must be at least 1, got 0$"),
    ({"data": -1}, r"^data must be at least 1, got -1$"),
    ({"rounds": 0}, r"^--rounds must be at least 1, got 0$"),
    ({"sizes": (4096, 0)}, r"^--sizes must be at least 1, got 0$"),
    (
        {"sizes": (1, 8, 4096), "ulysses": 2},
        r"^--sizes 1 8 4096 gives 2 different sizes, rounded up to a multiple of 8 bytes for 2 ranks; .* --sizes 64k",
    ),
    ({"sizes": (), "ring": 2}, r"gives 0 different sizes"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_bad_input_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LongspanError, match=message):
        run(_config(**changes))


def test_an_unwritable_out_is_refused_before_ranks_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "launch", lambda *_, **__: pytest.fail("ranks were started"))
    (tmp_path / "file").touch()
    with pytest.raises(LongspanError, match=rf"^--out {tmp_path} is a folder; give a file, such as --out .*link\.toml"):
        run(_config(out=tmp_path, ulysses=2))
    with pytest.raises(LongspanError, match=r"^--out .*/file/link\.toml cannot be written: .*; give another file"):
        run(_config(out=tmp_path / "file" / "link.toml", ulysses=2))
    monkeypatch.setattr(os, "access", lambda path, _: path != tmp_path)
    with pytest.raises(LongspanError, match=r"cannot be written: permission denied; give another file"):
        run(_config(out=tmp_path / "link.toml", ulysses=2))


def test_all_ranks_raise_if_the_first_cannot_write_out(pool2: RankPool, tmp_path: Path) -> None:
    with pytest.raises(AssertionError) as caught:
        pool2.run(_worker_with_bad_out_on_rank_0, str(tmp_path))
    failures = caught.value.failures  # type: ignore[attr-defined]
    assert len(failures) == 2
    assert {failure.message.split(" is a folder")[0] for failure in failures.values()} == {f"rank 0: --out {tmp_path}"}


def _worker_with_bad_out_on_rank_0(folder: str) -> None:
    import torch.distributed as dist

    out = Path(folder) if dist.get_rank() == 0 else Path(folder, "link.toml")
    worker(_config(ulysses=2, out=out))


def test_the_planner_reads_the_file(tmp_path: Path) -> None:
    """Hardware that was measured on GPUs overlaps, and its links replace the catalogue's."""
    from longspan.plan import read_hardware

    links = {"ulysses": {"all_to_all": MeasuredLink(0.25, 4.0)}}
    path = tmp_path / "link.toml"
    path.write_text(as_toml(_hardware(links, overlaps=True, on_cpu=False, reserve_bytes=2e9)))
    found = read_hardware(str(path))
    assert (found.overlaps, found.on_cpu, found.reserve_bytes, found.measured_dtype) == (True, False, 2e9, "bf16")
    assert found.seconds("all_to_all", "ulysses", 8.0, 1, 8) == 2.25
    path.write_text(as_toml(_hardware(links)))
    assert not read_hardware(str(path)).overlaps and read_hardware(str(path)).on_cpu


def test_overhead_follows_from_two_sizes() -> None:
    for speed, more in ((7e10, 512.0), (3e14, 0.0), (1e10, 4.0)):
        small, large = (speed / (1 + more / size) for size in (1024, 4096))
        assert overhead(1024, small, 4096, large) == pytest.approx(more)
        assert overhead(1024, 2 * speed, 4096, speed) == 0.0  # a faster small size is noise
        assert overhead(1024, speed, 4096, 5 * speed) == 4096  # as is a small size that is too slow for any overhead
