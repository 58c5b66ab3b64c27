"""`longspan verify` of vision-language models: correct runs pass, and faults of pictures are found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from longspan.core.errors import LongspanError
from longspan.verify import VerifyConfig, run, worker
from longspan.verify.inputs import open_inputs
from longspan.verify.report import Report, print_table
from tests.choose import confirming
from tests.flags import make
from tests.hf.pictures import GRIDS, IMAGE, SQUARES, VIDEO, build
from tests.pool import RankPool

Configs = Callable[[str], Path]


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> Configs:
    """The config.json of a family."""
    folder = tmp_path_factory.mktemp("pictures")

    def write(family: str) -> Path:
        if not (folder / family).exists():
            build(family).config.save_pretrained(folder / family)
        return folder / family / "config.json"

    return write


def _config(path: Path, **changes: Any) -> VerifyConfig:
    return make(VerifyConfig, **{"model": str(path), "context": 64, **changes})


def _failing(report: Report) -> set[str]:
    return {line for line, checks in report.groups().items() if not all(check.passed for check in checks)}


@pytest.mark.parametrize(
    ("family", "mesh"),
    [
        ("Qwen3VL", {"ring": 2}),
        ("Llava", {"ulysses": 2, "fsdp": False}),
        *confirming((f, {"ring": 2}) for f in GRIDS if f != "Qwen3VL"),
        *confirming((f, {"ring": 2, "context": 128}) for f in SQUARES if f != "Llava"),
    ],
    ids=str,
)
def test_a_family_passes(configs: Configs, pool2: RankPool, family: str, mesh: dict[str, int]) -> None:
    report = pool2.run(worker, _config(configs(family), **mesh))[0]
    assert report.passed, _failing(report)
    names = {check.name for check in report.checks}
    assert names == {"loss", "logits", "logits, worst token", *dict(build(family).named_parameters())}
    assert {"vision tower", "projector"} <= {*report.groups()}


def test_replicas_pass_in_bf16_with_weights_of_a_folder(
    pool4: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The third of four rows has pictures of its own, and the last one none."""
    build("Qwen2_5_VL").save_pretrained(tmp_path)
    given = {"model": str(tmp_path), "dtype": "bf16", "memory": "longest"}
    report = pool4.run(worker, _config(tmp_path, **given, data=2, batch=2, ring=2))[0]
    assert report.passed, _failing(report)
    print_table(report)
    text = " ".join(capsys.readouterr().out.split())
    assert "tokens 63, " in text and "data 2, ring 2, " in text and "6 images, 3 videos" in text


def test_a_row_holds_pictures_and_text(configs: Configs) -> None:
    inputs = open_inputs(_config(configs("Qwen2_5_VL"), ulysses=2, batch=3))
    whole, last = (inputs.batch(start, 3, torch.device("cpu")) for start in (0, 2))
    assert whole["image_grid_thw"].tolist() == [[1, 4, 6], [1, 2, 4]] * 2 and "pixel_values" not in last
    ids = whole["input_ids"]
    assert [int((ids[0] == token).sum()) for token in (IMAGE, VIDEO)] == [8, 12]
    assert bool((whole["labels"][(ids == IMAGE) | (ids == VIDEO)] == -100).all())
    assert whole["mm_token_type_ids"].tolist() == ((ids == IMAGE) + 2 * (ids == VIDEO)).tolist()


# --- planted faults are found


def _embeddings_one_row_off(patch: pytest.MonkeyPatch) -> None:
    from longspan.hf.forward import vision

    original = vision.all_to_all_rows
    patch.setattr(vision, "all_to_all_rows", lambda *args: original(*args).roll(dist.get_rank(), 0))


def _tower_gradients_not_summed(patch: pytest.MonkeyPatch) -> None:
    from longspan.compat.reading import tower_modules
    from longspan.hf import loading
    from longspan.hf.state import state_of

    original = loading.parallelize

    def without(model: Any, *args: Any, **options: Any) -> Any:
        made: Any = original(model, *args, **options)
        tower = {p for module in tower_modules(made) for p in module.parameters()}
        sums: Any = state_of(made).gradients
        sums.parameters = [p for p in sums.parameters if p not in tower]
        return made

    patch.setattr(loading, "parallelize", without)


def _no_gradients_of_other_ranks_embeddings(patch: pytest.MonkeyPatch) -> None:
    from longspan.hf.forward import vision

    original = vision.all_to_all_rows

    def one_way(rows: Tensor, send: list[int], receive: list[int], group: str) -> Tensor:
        out = original(rows, send, receive, group)
        mine = torch.arange(len(receive)).repeat_interleave(torch.tensor(receive)) == dist.get_rank()
        if out.requires_grad:
            out.register_hook(lambda grad: grad * mine[:, None])
        return out

    patch.setattr(vision, "all_to_all_rows", one_way)


def _positions_begin_again_on_each_rank(patch: pytest.MonkeyPatch) -> None:
    """As if they were computed from the ids of a rank's tokens."""
    from longspan.hf.forward.stage import ModelTraits

    original = ModelTraits.positions

    def cut(traits: ModelTraits, batch: Any, past: int = 0) -> Tensor | None:
        found = original(traits, batch, past)
        assert found is not None
        found[..., 32:] -= found[..., 32:].min()
        return found

    patch.setattr(ModelTraits, "positions", cut)


def _with(plant: Callable[[pytest.MonkeyPatch], None], config: VerifyConfig) -> Report:
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        return worker(config)


TOWER = {"vision tower", "projector"}


@pytest.mark.parametrize(
    ("plant", "changes", "wrong", "right"),
    [
        (_embeddings_one_row_off, {}, {"logits", "loss"}, set()),
        (_tower_gradients_not_summed, {"fsdp": False}, TOWER, {"logits", "loss", "mlp", "embeddings"}),
        (_no_gradients_of_other_ranks_embeddings, {}, TOWER, {"logits", "loss", "mlp", "embeddings"}),
        (_positions_begin_again_on_each_rank, {}, {"logits", "attention q"}, set()),
    ],
)
def test_finds(
    configs: Configs, pool2: RankPool, plant: Any, changes: dict[str, Any], wrong: set[str], right: set[str]
) -> None:
    reports = pool2.run(_with, plant, _config(configs("Qwen2_5_VL"), ulysses=2, **changes))
    assert all(report.exit_code == 1 for report in reports)
    failing = _failing(reports[0])
    assert failing >= wrong and not failing & right, failing


# --- refused


def test_bad_input_is_refused_before_any_rank_starts(configs: Configs, tmp_path: Path) -> None:
    with pytest.raises(LongspanError, match=r"takes 5 tokens, more than three quarters of the 4 in .* --context 10 or"):
        run(_config(configs("InternVL"), context=4))
    other = tmp_path / "config.json"
    other.write_text('{"model_type": "blip"}')
    with pytest.raises(LongspanError, match=r"Blip.*mixes tokens without going through attention"):
        run(_config(other))
