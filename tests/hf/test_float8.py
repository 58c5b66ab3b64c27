"""Linear layers that torchao has converted to float8: equal to the same model on one process, or refused."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

import longspan
from longspan.comm.mesh import MeshGroups
from longspan.core import tile_sizes
from longspan.core.errors import LongspanError
from longspan.core.memory import FASTEST, LONGEST, Memory
from longspan.hf.forward.float8 import check_float8
from longspan.plan import Job, ParallelConfig, cost, read_hardware
from longspan.plan.from_model import shape_of_model
from tests.counting import count_sent
from tests.fakes import fake_world
from tests.models import batch, build, gradients, on_mesh, rows_of
from tests.pool import RankPool

PER_TOKEN = "rowwise_with_gw_hp"
CHECKPOINTED = Memory(checkpointing="full")
ONE_DEVICE = longspan.SequenceSharding(MeshGroups("cpu"))


def _float8(recipe: str, *, head: bool = False, **options: Any) -> Any:
    float8 = pytest.importorskip("torchao.float8")
    config = dataclasses.replace(float8.Float8LinearConfig.from_recipe_name(recipe), emulate=True, **options)
    model = build("Llama", hidden_size=32, intermediate_size=64, attention_bias=True).double().train()
    return float8.convert_to_float8_training(
        model, config=config, module_filter_fn=lambda _, name: head or name != "lm_head"
    )


def _compare(model: Any, sp: longspan.SequenceSharding, memory: Any, n: int = 21, plain: Any = None) -> None:
    """Torchao computes scales in fp32, so gradients in fp64 agree to about 1e-7."""
    plain, whole = copy.deepcopy(model) if plain is None else plain, batch(rows=2, n=n)
    sharded = longspan.parallelize(copy.deepcopy(model), sp, memory=memory)
    expected = plain(**whole).loss
    expected.backward()
    loss = sharded(**rows_of(whole, sp.data_rank, sp.data_size)).loss
    loss.backward()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-7)
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


def _one_scale() -> None:
    plain = _float8("tensorwise")
    gathered = _float8("tensorwise", enable_fsdp_float8_all_gather=True)
    _compare(gathered, on_mesh({"ring": 2, "ulysses": 2}), FASTEST, 24, plain)
    _compare(gathered, on_mesh({"data": 2, "ulysses": 2}), CHECKPOINTED, 24, copy.deepcopy(plain))
    with pytest.raises(LongspanError, match="21 tokens would be padded to 24; pad the batch to 24"):
        longspan.parallelize(plain, on_mesh({"ulysses": 4}))(**batch(rows=2))


def test_one_scale_for_all_tokens_is_that_of_all_ranks(pool4: RankPool) -> None:
    """And FSDP may gather weights in float8."""
    pytest.importorskip("torchao.float8")
    pool4.run(_one_scale)


@pytest.mark.parametrize(("dtype", "memory"), [("fp32", CHECKPOINTED), ("bf16", FASTEST)])
def test_a_step_sends_what_is_planned(monkeypatch: pytest.MonkeyPatch, dtype: Any, memory: Memory) -> None:
    pytest.importorskip("torchao.float8")
    from torchao.float8 import float8_utils

    def all_reduce(x: torch.Tensor, op: str, group: Any) -> torch.Tensor:  # torchao calls a functional one
        torch.distributed.all_reduce(x, group=group)
        return x

    monkeypatch.setattr(float8_utils, "all_reduce", all_reduce)
    model, policy = _float8("tensorwise", enable_fsdp_float8_all_gather=True).float(), None
    if dtype == "bf16":
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    job = Job(context=24, dtype=dtype, memory=memory, parallel=ParallelConfig(ulysses=2))
    plan = cost(shape_of_model(model, "test"), job, read_hardware("cpu"))
    with fake_world(0, 2):
        sharded = longspan.parallelize(model, on_mesh({"ulysses": 2}), memory=memory, mp_policy=policy)
        with count_sent() as sent:
            sharded(**batch(rows=1, n=24)).loss.backward()
    planned = Counter[tuple[str, int]]()
    for each in plan.comm:
        planned[each.op, each.bytes_per_gpu] += each.count
    assert Counter((one.op, one.bytes) for one in sent) == planned


def test_any_recipe_runs_on_one_device() -> None:
    _compare(_float8("tensorwise"), ONE_DEVICE, FASTEST)


def test_scales_of_features_and_of_tiles_are_refused() -> None:
    """A tile sees some of the tokens, and would round them by another scale."""
    with fake_world(0, 2), pytest.raises(LongspanError, match=f'each rank.*"{PER_TOKEN}"'):
        sp = longspan.SequenceSharding(longspan.init_mesh(ulysses=2, device_type="cpu"))
        check_float8(_float8("rowwise"), sp)
    with pytest.raises(LongspanError, match="down_proj is in float8.* tile .*use tiled=False"):
        longspan.parallelize(_float8("tensorwise"), ONE_DEVICE, memory=LONGEST)


def test_heads_tensor_axis_and_slices_are_refused() -> None:
    with pytest.raises(LongspanError, match=r"lm_head is in float8.*module_filter_fn"):
        longspan.parallelize(_float8(PER_TOKEN, head=True), ONE_DEVICE)
    model = _float8(PER_TOKEN)
    with fake_world(0, 2), pytest.raises(LongspanError, match=r"float8.*`tensor=2`.*`ulysses=2`"):
        sp = longspan.SequenceSharding(longspan.init_mesh(tensor=2, device_type="cpu"))
        check_float8(model, sp)
    assert not any(layer.mixing.sliceable for layer, _ in shape_of_model(model, "test").layer_kinds)  # type: ignore[attr-defined]
    with pytest.raises(LongspanError, match=r"Float8Linear.*head_slices=1"):
        longspan.parallelize(model, ONE_DEVICE, memory=dataclasses.replace(FASTEST, head_slices=2))
