"""TRL's AsyncGRPOTrainer through `longspan.trainer` logs what one process logs, and hands its weights to a server.

The stand-in for the server holds a copy of the model in the first rank's process. It loads the weights that the trainer
hands over, and returns completions with their log-probabilities by these weights.
"""

from __future__ import annotations

import contextlib
import functools
import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import longspan
from tests.choose import confirming
from tests.models import build
from tests.pool import RankPool
from tests.train.chats import tokenizer
from tests.trainers.fitting import COMMON, as_launched, quiet, sentence

pytestmark = pytest.mark.versions

pytest.importorskip("trl")

TEMPERATURE = 0.7
COMPARED = ("loss", "grad_norm", "learning_rate", "ratio", "kl", "entropy", "clip_ratio/")
"""Other metrics are times, and those of batches when they are read: accelerate reads one ahead."""


class Server:
    """Rollout worker and weight transfer of a trainer: four completions of two prompts for each version."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder).eval()
        self.rollout_buffer, self.metrics_queue = queue.Queue[Any](), queue.Queue[Any]()
        self.calls, self.names = list[str](), list[str]()

    def init_weight_transfer(self) -> None:
        with torch.no_grad():
            for p in self.model.parameters():
                p.fill_(torch.nan)  # every weight must be handed over
        self.calls.append("init")

    def pause(self) -> None:
        self.calls.append("pause")

    def send_weights(self, iterator: Iterator[tuple[str, Tensor]]) -> None:
        mine = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, x in iterator:
                mine[name].copy_(x)
                self.names.append(name)
        self.calls.append("send")

    def resume(self) -> None:
        self.calls.append("resume")

    def destroy(self) -> None:
        self.calls.append("destroy")

    def start(self) -> None:
        assert self.calls == ["init", "pause", "send", "resume"]

    def stop(self) -> None:
        pass

    def check_health(self, stale_after_s: float) -> None:
        raise AssertionError("the trainer waits for completions")

    def update_model_version(self, model_version: int) -> None:
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

        for at in range(12 if model_version == 1 else 8):  # accelerate reads a batch ahead
            group = 3 * model_version + at // 4
            prompt = tokenizer()(sentence(group))["input_ids"]
            ids = torch.tensor(prompt + tokenizer()(sentence(1000 + 12 * model_version + at))["input_ids"])
            with torch.no_grad():
                log_p = torch.log_softmax(self.model(input_ids=ids[None]).logits[0, :-1] / TEMPERATURE, -1)
            old = torch.nn.functional.pad(log_p.gather(-1, ids[1:, None])[:, 0], (1, 0)) - 0.1 * (at == 1)
            mask = torch.arange(len(ids)) >= len(prompt)
            self.rollout_buffer.put(
                RolloutSample(
                    prompt=[], completion=[], input_ids=ids.numpy(), completion_mask=mask.long().numpy(),
                    old_log_probs=old.numpy().astype(np.float32), advantage=float(at % 4) - 1.5,
                    model_version=model_version, group_id=group, metrics={"reward": float(at)},
                )
            )  # fmt: skip


def _dense(q: Tensor, k: Tensor, v: Tensor, of_q: Tensor, of_k: Tensor, *_: Any, **options: Any) -> Tensor:
    """FlashAttention 3's varlen function on a CPU: the queries of a segment are the last of its path."""
    outs = []
    for a, b, c, d in zip(of_q[:-1], of_q[1:], of_k[:-1], of_k[1:], strict=True):
        one = [x.transpose(0, 1)[None] for x in (q[a:b], k[c:d], v[c:d])]
        mask = torch.ones(b - a, d - c, dtype=torch.bool).tril(int((d - c) - (b - a)))
        out = torch.nn.functional.scaled_dot_product_attention(
            *one, attn_mask=mask, scale=options["softmax_scale"], enable_gqa=True
        )
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs)


def run(mesh: dict[str, int] | None, folder: Path, out: Path) -> tuple[list[dict[str, Any]], list[str], list[str]]:
    """Return a run's log, and the first rank's calls and names of weights; on one process if `mesh` is None."""
    with contextlib.nullcontext() if mesh is None else as_launched():
        return _run(mesh, folder, out)


def _run(mesh: dict[str, int] | None, folder: Path, out: Path) -> tuple[list[dict[str, Any]], list[str], list[str]]:
    from datasets import Dataset
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing

    quiet()
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None  # it asks for a GPU's name
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=_dense)
    cls, rows_at_once, options = AsyncGRPOTrainer, 4, dict[str, Any]()
    if mesh is not None:
        options["sp"] = longspan.SequenceSharding(longspan.init_mesh(**mesh))
        cls, rows_at_once = longspan.trainer(cls), 4 // options["sp"].data_size
    args = AsyncGRPOConfig(
        output_dir=str(out), per_device_train_batch_size=rows_at_once, gradient_accumulation_steps=2, token_budget=0,
        temperature=TEMPERATURE, num_generations=4, dtype="float32",
        **{name: x for name, x in COMMON.items() if name != "max_length"},
    )  # fmt: skip
    server = Server(folder)
    trainer = cls(
        model=str(folder), args=args, processing_class=tokenizer(), rollout_worker=server, weight_transfer=server,
        train_dataset=Dataset.from_list([{"prompt": sentence(at)} for at in range(8)]), **options,
    )  # fmt: skip
    trainer.train()
    return list(trainer.state.log_history), server.calls, server.names


@functools.cache
def plain(folder: Path) -> tuple[list[dict[str, Any]], list[str], list[str]]:
    return run(None, folder, folder / "plain")


@pytest.mark.parametrize("mesh", [{"data": 2, "ulysses": 2}, *confirming([{"ring": 2}])], ids=str)
def test_logs_are_those_of_one_process(
    get_pool: Callable[[int], RankPool], mesh: dict[str, int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp() / "policy"
    if not folder.exists():
        build("Llama").save_pretrained(folder)
    expected, calls, names = plain(folder)
    ranks = functools.reduce(lambda a, b: a * b, mesh.values())
    found = get_pool(ranks).run(run, mesh, folder, folder / "out")
    assert found[0][1:] == (calls, names)
    assert calls == ["init", *["pause", "send", "resume"] * 5, "destroy"]
    for log, *_ in found:
        assert len(log) == len(expected)
        for mine, theirs in zip(log[:-1], expected[:-1], strict=True):
            assert {"loss", "ratio", "kl", "entropy", "grad_norm"} <= theirs.keys()
            for key, value in theirs.items():
                if key.startswith(COMPARED):
                    assert mine[key] == pytest.approx(value, rel=5e-4, abs=1e-6), (key, mine["step"])
    assert 0 < expected[-2]["kl"] < 0.01  # the server has the trained weights, of the last steps
