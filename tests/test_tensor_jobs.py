"""`longspan train` and `longspan verify` with a tensor axis: one loop's losses, resumed on another mesh, exported."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from longspan.train import TrainConfig
from longspan.verify import VerifyConfig, worker
from tests.test_train import _plain_losses
from tests.tolerance import excess_of_losses
from tests.training import losses_of, train, write_config


def _job(config: TrainConfig, then: TrainConfig, check: VerifyConfig) -> list[bool]:
    train(config)
    train(then)
    reports = [worker(dataclasses.replace(check, **changes)) for changes in _VERIFIED]
    return [report.passed for report in reports]


_VERIFIED: tuple[dict[str, Any], ...] = (
    {"tensor": 2, "ulysses": 2},
    {"tensor": 2, "ring": 2, "tensor_style": "megatron-sp", "fsdp": False},
)


def test_train_resume_on_another_mesh_export_and_verify(tmp_path: Path, pool4: Any) -> None:
    path = write_config(tmp_path)
    config = TrainConfig(
        data="pydoc", config=path, context=61, batch=4, steps=2, lr=1e-2, warmup=0, clip=0.5, dtype="fp32",
        log_every=1, save_every=2, keep=0, out=tmp_path / "run",
    )  # fmt: skip
    whole = dataclasses.replace(config, steps=4, out=tmp_path / "plain", schedule="constant")
    first = dataclasses.replace(config, tensor=2, ulysses=2, tensor_style="megatron-sp", schedule="constant")
    then = dataclasses.replace(first, steps=4, tensor=2, data_degree=2, ulysses=1, tensor_style="tp")
    passed = pool4.run(_job, first, then, VerifyConfig(config=path, context=60), timeout=300)
    assert passed == [[True, True]] * 4
    plain, exact = _plain_losses(whole), _plain_losses(whole, torch.float64)
    found = losses_of(config.out)
    assert excess_of_losses(found, plain, exact) <= 1, (found, exact)
    from transformers import AutoModelForCausalLM

    assert sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(config.out / "hf").parameters()) > 0
