"""The examples run."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import longspan
from examples.grpo import grpo_loss
from tests.models import build, gradients, rows_of, sharding
from tests.pool import THREADS, RankPool, run_forked
from tests.tolerance import last_place
from tests.trainers.fitting import as_launched

pytestmark = [pytest.mark.versions, pytest.mark.launcher]

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    """Two ranks in which no other test has changed the settings of a library."""
    pool = RankPool(2, timeout=240)
    yield pool
    pool.close()


def run_example(example: str, *flags: str) -> str:
    """Run an example in this process, or as this rank of a pool; return what it prints."""
    path = ROOT / "examples" / f"{example}.py"
    launched = as_launched() if torch.distributed.is_initialized() else contextlib.nullcontext()
    with (
        launched,
        mock.patch.object(sys, "argv", [str(path), *flags]),
        contextlib.redirect_stdout(io.StringIO()) as out,
    ):
        runpy.run_path(str(path), run_name="__main__")
    return out.getvalue()


SHORT = ("--context", "201", "--steps", "2", "--ulysses")


@pytest.mark.parametrize("example", ["finetune", "grpo"])
def test_a_training_loop_does_not_depend_on_the_ranks(ranks: RankPool, example: str) -> None:
    alone = run_forked(run_example, example, *SHORT, "1")
    sharded = ranks.run(run_example, example, *SHORT, "2", *(["--shared-prefixes"] * (example == "grpo")))[0]
    losses = [re.findall(r"loss (-?[\d.]+)", said) for said in (alone, sharded)]
    assert len(losses[0]) == len(losses[1]) == 2
    for one, two in zip(*losses, strict=True):
        assert abs(float(one) - float(two)) < 1.5 * last_place(one), losses  # the same, or the next decimal


def test_a_sampled_video_does_not_depend_on_the_ranks(ranks: RankPool) -> None:
    pytest.importorskip("diffusers")
    alone = run_forked(run_example, "video", "--steps", "2", "--batch", "2")
    sharded = ranks.run(run_example, "video", "--steps", "2", "--batch", "2", "--ulysses", "2")[0]
    found = [re.findall(r"-?\d+\.\d+", said) for said in (alone, sharded)]
    assert len(found[0]) == len(found[1]) == 6
    assert [float(x) for x in found[1]] == pytest.approx([float(x) for x in found[0]], abs=2e-3)


def test_answers_about_a_video_do_not_depend_on_the_ranks(ranks: RankPool) -> None:
    short = ("--steps", "4", "--train-mib", "0", "--frames", "24", "--videos", "1", "--mib", "0", "--ulysses")
    alone = run_forked(run_example, "moving_shapes", *short, "1")
    sharded = ranks.run(run_example, "moving_shapes", *short, "2")[0]
    losses = [[float(x) for x in re.findall(r"loss ([\d.]+)", said)] for said in (alone, sharded)]
    assert len(losses[0]) == 2 and losses[1] == pytest.approx(losses[0], abs=2e-6)
    answers = [re.findall(r"before: (\S+)|after: (\S+)|order: (\[.*\])", said) for said in (alone, sharded)]
    assert len(answers[0]) == 3 and answers[0] == answers[1]


@pytest.mark.parametrize("example", ["trainer", "sft"])
def test_trainers_log_and_save(ranks: RankPool, example: str, tmp_path: Path) -> None:
    if example == "sft":
        pytest.importorskip("trl")
    said = ranks.run(run_example, example, *SHORT, "2", "--out", str(tmp_path))[0]
    assert len(re.findall(r"'loss': '?[\d.]+", said)) == 2, said
    assert (tmp_path / "model.safetensors").is_file()


def _rollouts() -> dict[str, Any]:
    """Return completions of different lengths, with log-probabilities of an older policy."""
    draw = torch.Generator().manual_seed(4)
    ids = torch.randint(3, 61, (4, 21), generator=draw)
    ids[:, :8] = ids[:1, :8]  # a prompt, of which two rows lack the start
    mask = torch.ones_like(ids)
    for row, (before, behind) in enumerate([(0, 0), (3, 2), (0, 9), (5, 1)]):
        mask[row, :before] = mask[row, 21 - behind :] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :8] = -100
    old = -4 + torch.randn(4, 21, dtype=torch.float64, generator=draw)
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels, "position_ids": positions}
    advantages = torch.tensor([1.0, -0.5, 0.3, -1.2], dtype=torch.float64)
    return {"batch": batch, "old": old, "advantages": advantages, "items": (labels[:, 1:] != -100).sum()}


SHAPE = {"clip": 0.3, "beta": 0.1, "entropy_bonus": 0.05}


def _grpo_on_logits() -> tuple[float, dict[str, torch.Tensor]]:
    """Return the same loss from logits, on one process."""
    model, reference, given = build("GPT2").double(), build("GPT2", seed=1).double(), _rollouts()
    labels = given["batch"].pop("labels")
    chosen = labels[:, 1:].clamp_min(0)[..., None]
    everything = model(**given["batch"]).logits[:, :-1].log_softmax(-1)
    near = reference(**given["batch"]).logits[:, :-1].log_softmax(-1).gather(-1, chosen)[..., 0].detach()
    logps = everything.gather(-1, chosen)[..., 0]
    ratio, by_row = (logps - given["old"][:, :-1]).exp(), given["advantages"][:, None]
    gain = torch.min(ratio * by_row, ratio.clamp(1 - SHAPE["clip"], 1 + SHAPE["clip"]) * by_row)
    kl = (near - logps).exp() - (near - logps) - 1
    entropy = -(everything.exp() * everything).sum(-1)
    each = SHAPE["beta"] * kl - gain - SHAPE["entropy_bonus"] * entropy
    loss = each[labels[:, 1:] != -100].sum() / given["items"]
    loss.backward()
    return float(loss.detach()), gradients(model)


def _grpo_sharded(meshes: list[tuple[int, int, bool, bool]]) -> list[tuple[float, dict[str, torch.Tensor]]]:
    found = []
    for data, ring, fsdp, shared in meshes:
        sp, given = sharding(data, ring), _rollouts()
        policy, reference = (longspan.parallelize(build("GPT2", seed=seed).double(), sp, fsdp=fsdp) for seed in (0, 1))
        mine = {name: rows_of({name: value}, sp.data_rank, data)[name] for name, value in given["batch"].items()}
        old, advantages = (given[name].chunk(data)[sp.data_rank] for name in ("old", "advantages"))
        loss = grpo_loss(policy, reference, mine, old, advantages, given["items"] / data, **SHAPE, shared=shared)
        loss.backward()
        of_replicas = loss.detach().clone() / sp.fsdp_size
        torch.distributed.all_reduce(of_replicas)
        found.append((float(of_replicas), gradients(policy)))
    return found


def test_the_grpo_loss_equals_one_process(pool2: RankPool, pool4: RankPool) -> None:
    """Ratio, clip, KL to a reference and entropy, in fp64.

    GPT-2 casts nothing to fp32: there a shared token's gradient would be rounded once, and not once per row.
    """
    loss, expected = _grpo_on_logits()
    on_2, on_4 = [(1, 2, True, True), (1, 1, False, False)], [(2, 2, True, False), (1, 2, False, True)]
    for pool, meshes in ((pool2, on_2), (pool4, on_4)):
        for of_rank in pool.run(_grpo_sharded, meshes):
            for found, grads in of_rank:
                assert found == pytest.approx(loss, rel=1e-9)
                torch.testing.assert_close(grads, expected, rtol=1e-8, atol=1e-12)


@pytest.mark.confirms
@pytest.mark.skipif(sys.platform != "linux", reason="limits memory by a control group, or RLIMIT_DATA")
def test_two_ranks_read_twice_what_one_ranks_limit_allows(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": THREADS}
    command = [sys.executable, str(ROOT / "examples" / "recall.py"), "--quick", "--save", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    said = re.search(r"one rank reads at most ([\d,]+) tokens; ([\d,]+) fail: out of memory", done.stdout)
    assert said is not None, done.stdout
    longest, reach = (int(n.replace(",", "")) for n in said.groups())
    assert longest >= 2048 and reach == 2 * longest
    assert f"2 ranks: {reach:,} tokens complete" in done.stdout, done.stdout
