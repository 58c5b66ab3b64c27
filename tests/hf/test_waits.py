"""What makes the host wait at the start of a forward, on a fake GPU (`tests/syncs.py`) in a world of two ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPooling

import longspan
from longspan.hf.batch import compare, host
from longspan.hf.model.encoders import GridEncoder
from tests import models
from tests.fakes import fake_world
from tests.hf import pictures
from tests.live import NOTHING
from tests.streams import fake_gpus
from tests.syncs import GPU, Seen, on_gpu

N = 24
ONES, POSITIONS = torch.ones(2, N, dtype=torch.int64), torch.arange(N)[None].expand(2, -1)
PACKED = {**models.batch(1, N), "position_ids": torch.cat([torch.arange(4), torch.arange(20)])[None]}
TREE = dict(longspan.pack_tree([[3, 4, 5, 6]] * 2, [[7, 8, 9], [10, 11, 12, 13, 14]]))
HOLES = {"attention_mask": (torch.arange(N) % 7 > 0).int()[None].expand(2, -1)}


def _padded() -> dict[str, Tensor]:
    batch, mask = models.batch(2, N), ONES.clone()
    mask[1, 20:] = 0
    return {**batch, "attention_mask": mask, "labels": torch.where(mask == 1, batch["labels"], -100)}


BATCHES: dict[str, dict[str, Any]] = {
    "text": models.batch(2, N),
    "mask and positions": {**models.batch(2, N), "attention_mask": ONES, "position_ids": POSITIONS},
    "weights": {**models.batch(2, N), "loss_weights": torch.rand(2, N)},
    "padded": _padded(),
    "packed": PACKED,
    "cu_seqlens": {**models.batch(1, N), "cu_seq_lens_q": torch.tensor([0, 5, N], dtype=torch.int32)},
    "a mask with holes": {"input_ids": models.batch(2, N)["input_ids"], **HOLES},
    "selected logits": {"input_ids": models.batch(2, N)["input_ids"], "logits_to_keep": torch.tensor([3, 20])},
    "tree": TREE,
    "elastic": {**PACKED, "sequence_width": 2, "num_items_in_batch": 9},
    "pictures": pictures.batch("Qwen2_5_VL"),
}


def _encoded(self: GridEncoder, core: Any, batch: Any, start: int, stop: int, device: Any) -> Any:
    """Stand in for a tower, in which transformers itself reads the grids."""

    rows = sum(self.units(core, self.part(core, batch, start, stop)).rows)
    return BaseModelOutputWithPooling(pooler_output=(torch.empty(rows, 32, dtype=torch.bfloat16, device=GPU),))


@contextlib.contextmanager
def _forward(name: str, *, fsdp: bool = False) -> Iterator[tuple[Any, Seen]]:
    """Yield a model on the first of two ranks whose batches are compared as later forwards are, and what waits."""
    nothing: dict[str, Any] = {
        **NOTHING,
        **dict.fromkeys(("all_gather_single", "reduce_scatter_tensor"), lambda *_, **__: None),
    }
    nothing = {key: value for key, value in nothing.items() if hasattr(dist, key)}
    same = mock.patch("longspan.comm.agree.gather_numbers", lambda mine, *_, **__: [mine] * 2)
    with fake_world(0, 2), mock.patch.multiple(dist, **NOTHING), same, on_gpu() as seen, fake_gpus(2):
        sp = longspan.SequenceSharding(longspan.init_mesh(ulysses=2, device_type="cuda"))
        if name == "pictures":
            model = pictures.build("Qwen2_5_VL")
        else:
            model = models.build("Llama", **(models.ropes("longrope", 64) if name == "elastic" else {}))
        sp.of_width(1)
        model = model.to(torch.bfloat16).to(device="cuda")
        model = longspan.parallelize(model, sp, fsdp=fsdp, kernel="tiled" if "holes" in name else "flash")
        model.longspan_state.forward.batches.forward = compare.FIRST
        unchecked = mock.patch("transformers.models.qwen2_5_vl.modeling_qwen2_5_vl.torch_compilable_check")
        with mock.patch.object(GridEncoder, "encode", _encoded), unchecked:  # transformers waits for a number of them
            yield model, seen


def _twice(model: Any, batch: dict[str, Any], seen: Seen) -> None:
    """Leave in `seen` what waits in the second forward: a RoPE makes its tables in the first."""
    model(**batch)
    seen.clear()
    model(**batch)


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_on_a_gpu_is_read_by_one_copy(name: str) -> None:
    """Ids and labels alone are not read."""
    batch = BATCHES[name]
    with _forward(name) as (model, seen):
        copied = host.copy_to_host

        def true(xs: Any) -> Any:  # the fake GPU has no values
            copied(xs)
            return {key: batch[key].contiguous() for key in xs}

        given = {k: x.to("cuda", non_blocking=True) if isinstance(x, Tensor) else x for k, x in batch.items()}
        with mock.patch.object(host, "copy_to_host", true):
            _twice(model, given, seen)
    assert seen == ([] if name == "text" else ["a copy to the host"])


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_on_the_host_is_read_there(name: str) -> None:
    with _forward(name) as (model, seen):
        _twice(model, BATCHES[name], seen)
    assert seen == []


@pytest.mark.parametrize("name", ["padded", "pictures"])
def test_fsdp_moves_no_batch_before_it_is_cut(name: str) -> None:
    """Nor do the pixels of other ranks move."""
    with _forward(name, fsdp=True) as (model, seen):
        _twice(model, BATCHES[name], seen)
    assert seen == []


def test_tensors_are_copied_to_the_host_together() -> None:
    xs = {
        "a": torch.rand(3, 5), "b": torch.arange(7), "c": torch.tensor([True, False]), "d": torch.tensor(3),
        "e": torch.arange(6, dtype=torch.int32).view(2, 3).t(), "f": torch.rand(2, dtype=torch.bfloat16),
    }  # fmt: skip
    for key, x in host.copy_to_host(xs).items():
        assert x.dtype == xs[key].dtype and torch.equal(x, xs[key])
    assert host.copy_to_host({}) == {}
