"""`longspan verify` of a transformer of diffusers: correct runs pass, and a planted fault is found."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from longspan.core.errors import LongspanError
from longspan.verify import VerifyConfig, run, worker
from longspan.verify.report import Report, diagnosis, print_table
from tests.choose import confirming
from tests.diffusion.diffusing import CONFIGS, make_model
from tests.flags import make
from tests.pool import RankPool

pytest.importorskip("diffusers")


def _folder(path: Path, name: str) -> Path:
    """Write a transformer's config."""
    (path / name).mkdir()
    (path / name / "config.json").write_text(json.dumps({"_class_name": name, **CONFIGS[name]}))
    return path / name


def _config(path: Path, **changes: Any) -> VerifyConfig:
    return make(VerifyConfig, **{"model": str(path / "config.json"), "context": 64, "ulysses": 2, **changes})


def _failing(report: Report) -> set[str]:
    return {line for line, checks in report.groups().items() if not all(check.passed for check in checks)}


CHOSEN = ("WanTransformer3DModel", "FluxTransformer2DModel")


@pytest.mark.parametrize("name", [*CHOSEN, *confirming(name for name in CONFIGS if name not in CHOSEN)])
def test_a_class_passes(pool2: RankPool, tmp_path: Path, name: str) -> None:
    config = _config(_folder(tmp_path, name), fsdp=name != "FluxTransformer2DModel")
    report = pool2.run(worker, config)[0]
    assert report.passed and report.exit_code == 0, _failing(report)
    names = {check.name for check in report.checks}
    assert names >= {
        "loss",
        "output",
        "hidden_states",
        "encoder_hidden_states",
        *dict(make_model(name).named_parameters()),
    }
    assert any(max(check.sharded) > 0 for check in report.checks)


def test_the_weights_of_a_pipeline_pass_on_4_ranks(
    pool4: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_model("LTXVideoTransformer3DModel").float().save_pretrained(tmp_path / "transformer")
    (tmp_path / "model_index.json").write_text('{"_class_name": "LTXPipeline"}')
    report = pool4.run(worker, _config(tmp_path, model=str(tmp_path), ring=2, batch=2))[0]
    assert report.passed, _failing(report)
    print_table(report)
    text = " ".join(capsys.readouterr().out.split())
    assert "weights given, tokens 75, " in text and "text random latents and text" in text


def _swap_two_ranks(patch: pytest.MonkeyPatch) -> None:
    original = dist.all_to_all_single

    def swapped(recv: torch.Tensor, send: torch.Tensor, *args: Any, **options: Any) -> Any:
        work = original(recv, send, *args, **options)
        recv.copy_(recv.roll(dist.get_rank(), 0))
        return work

    patch.setattr(dist, "all_to_all_single", swapped)


def _do_not_sum_gradients(patch: pytest.MonkeyPatch) -> None:
    from longspan.hf.weights.gradients import GradientAverage

    patch.setattr(GradientAverage, "_average_bucket", lambda self, bucket: None)


def _with(plant: Callable[[pytest.MonkeyPatch], None], config: VerifyConfig) -> Report:
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        return worker(config)


def test_finds_planted_faults(pool2: RankPool, tmp_path: Path) -> None:
    config = _config(_folder(tmp_path, "WanTransformer3DModel"), fsdp=False)
    report = pool2.run(_with, _swap_two_ranks, config)[0]
    assert "output" in _failing(report) and "the output differs on rank" in diagnosis(report)
    report = pool2.run(_with, _do_not_sum_gradients, config)[0]
    assert {"attention q", "mlp"} <= _failing(report) and not {"output", "loss"} & _failing(report)


def test_bad_input_is_refused_before_any_rank_starts(tmp_path: Path) -> None:
    folder = _folder(tmp_path, "WanTransformer3DModel")
    for match, changes in [
        (r"--dtype bf16 does not apply to a WanTransformer3DModel, .* leave it out", {"dtype": "bf16"}),
        (r"has no tensor axis, got --tensor 2; use --ring or --ulysses", {"tensor": 2}),
        (r"--text pydoc does not apply", {"text": "pydoc"}),
        (r"--memory longest does not apply", {"memory": "longest"}),
    ]:
        with pytest.raises(LongspanError, match=match):
            run(_config(folder, **changes))
    (folder / "config.json").write_text('{"_class_name": "UNet2DConditionModel"}')
    with pytest.raises(LongspanError, match=r"is a UNet2DConditionModel; longspan takes transformers of diffusers"):
        run(_config(folder))
