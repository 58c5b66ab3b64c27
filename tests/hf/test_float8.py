"""Linear layers that torchao has converted to float8: equal to the same model on one process, or refused."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch

import longspan
from longspan.comm.mesh import MeshGroups
from longspan.core import tile_sizes
from longspan.core.errors import LongspanError
from longspan.core.memory import FASTEST, LONGEST
from longspan.hf.weights.quantized import check_float8
from longspan.plan.from_model import shape_of_model
from tests.fakes import fake_world
from tests.models import batch, build, gradients, on_mesh
from tests.pool import RankPool

PER_TOKEN = "rowwise_with_gw_hp"
ONE_DEVICE = longspan.SequenceSharding(MeshGroups("cpu"))


def _float8(recipe: str, *, head: bool = False) -> Any:
    float8 = pytest.importorskip("torchao.float8")
    config = dataclasses.replace(float8.Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    model = build("Llama", hidden_size=32, intermediate_size=64).double().train()
    return float8.convert_to_float8_training(
        model, config=config, module_filter_fn=lambda _, name: head or name != "lm_head"
    )


def _compare(model: Any, sp: longspan.SequenceSharding, memory: Any) -> None:
    """Torchao computes scales in fp32, so gradients in fp64 agree to about 1e-7."""
    plain, whole = copy.deepcopy(model), batch(rows=2)
    sharded = longspan.parallelize(copy.deepcopy(model), sp, memory=memory)
    for each in (plain, sharded):
        loss = each(**whole).loss
        loss.backward()
    assert float(loss.detach()) == pytest.approx(float(plain(**whole).loss.detach()), rel=1e-7)
    found = gradients(sharded)
    for name, gradient in gradients(plain).items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-6 * float(gradient.abs().max()), msg=name)


def _on_meshes() -> None:
    tile_sizes.FEWEST_ROWS = 4, 4
    model = _float8(PER_TOKEN)
    for mesh, memory in (({"ring": 2, "ulysses": 2}, "longest"), ({"ulysses": 4}, "fastest")):
        _compare(model, on_mesh(mesh), memory)


def test_scales_per_token_are_exact_on_any_mesh(pool4: RankPool) -> None:
    pytest.importorskip("torchao.float8")
    pool4.run(_on_meshes)


def test_any_recipe_runs_on_one_device() -> None:
    _compare(_float8("tensorwise"), ONE_DEVICE, FASTEST)


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_scales_over_tokens_are_refused(recipe: str) -> None:
    """Ranks and tiles see some of the tokens, and would round them by another scale."""
    model = _float8(recipe)
    with fake_world(0, 2), pytest.raises(LongspanError, match=f'each rank.*"{PER_TOKEN}"'):
        sp = longspan.SequenceSharding(longspan.init_mesh(ulysses=2, device_type="cpu"))
        check_float8(model, sp, tiled=False)
    for memory in (LONGEST, "auto"):
        with pytest.raises(LongspanError, match=f'q_proj .*each tile.*"{PER_TOKEN}"'):
            longspan.parallelize(model, ONE_DEVICE, memory=memory)


def test_heads_tensor_axis_and_slices_are_refused() -> None:
    with pytest.raises(LongspanError, match=r"lm_head is in float8.*module_filter_fn"):
        longspan.parallelize(_float8(PER_TOKEN, head=True), ONE_DEVICE)
    model = _float8(PER_TOKEN)
    with fake_world(0, 2), pytest.raises(LongspanError, match=r"float8.*`tensor=2`.*`ulysses=2`"):
        sp = longspan.SequenceSharding(longspan.init_mesh(tensor=2, device_type="cpu"))
        check_float8(model, sp, tiled=False)
    assert not any(layer.mixing.sliceable for layer, _ in shape_of_model(model, "test").layer_kinds)  # type: ignore[attr-defined]
    with pytest.raises(LongspanError, match=r"Float8Linear.*head_slices=1"):
        longspan.parallelize(model, ONE_DEVICE, memory=dataclasses.replace(FASTEST, head_slices=2))
