"""Shard tensors and batches: order, padding, positions, labels shifted before they are sharded, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import longspan
from longspan.attn.segments import document_segments, padding_segments
from longspan.comm.mesh import OneDeviceMesh
from longspan.core.errors import LongspanError
from longspan.core.layout import Layout
from longspan.hf.batch import IGNORE, shard_batch
from tests.pool import RankPool, on_ranks


def _sp(**sizes: int) -> longspan.SequenceSharding:
    return longspan.SequenceSharding(longspan.init_mesh(**sizes))


def _round_trip(n: int, dim: int, ring: int, layout: str) -> None:
    mesh = longspan.init_mesh(ring=ring, ulysses=dist.get_world_size() // ring)
    sp = longspan.SequenceSharding(mesh, layout=layout)
    shape = [2, 3, 2]
    shape[dim] = n
    whole = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    mine = sp.shard(whole, dim=dim)
    assert mine.shape[dim] == sp.layout.local_length(n) == len(sp.positions(n))
    back = sp.gather(mine, dim=dim, length=n)
    assert torch.equal(back, whole)
    # Every rank uses the full tensor in its own loss; the gradient of a shard is the sum over ranks.
    (grad,) = torch.autograd.grad(back, whole, torch.full_like(back, dist.get_rank() + 1.0))
    expected = torch.zeros_like(whole)
    for start, stop in sp.layout.spans(n, sp.rank):
        expected.narrow(dim, start, stop - start).fill_(sum(range(1, sp.size + 1)))
    assert torch.equal(grad, expected)
    positions = sp.gather(sp.positions(n), dim=0, length=n)
    assert torch.equal(positions, torch.arange(n))


@settings(max_examples=10)
@given(
    n=st.integers(1, 37),
    dim=st.integers(0, 2),
    mesh=st.sampled_from([(2, 1), (2, 2), (4, 1), (4, 2), (4, 4)]),
    layout=st.sampled_from(["zigzag", "contiguous"]),
)
def test_gather_is_the_inverse_of_shard(get_pool: Any, n: int, dim: int, mesh: tuple[int, int], layout: str) -> None:
    get_pool(mesh[0]).run(_round_trip, n, dim, mesh[1], layout)


def _wrong_length() -> str:
    sp = _sp(ulysses=2)
    with pytest.raises(LongspanError) as error:
        sp.gather(torch.zeros(1, 4), dim=1, length=5)
    return str(error.value)


def test_gather_refuses_an_impossible_length(pool2: RankPool) -> None:
    assert pool2.run(_wrong_length)[0] == (
        "gather: 2 ranks hold 4 entries each, which is a sequence of 7 to 8, not of length=5"
    )


def _cut(batch: dict[str, Any]) -> dict[str, Any]:
    return shard_batch(batch, _sp(ulysses=dist.get_world_size()))


def test_labels_are_shifted_before_they_are_sharded(pool2: RankPool) -> None:
    ids = torch.arange(1, 8)[None]
    parts = pool2.run(_cut, {"input_ids": ids, "labels": ids})
    assert torch.equal(torch.cat([p["input_ids"] for p in parts], 1), torch.tensor([[1, 2, 3, 4, 5, 6, 7, 0]]))
    labels = torch.cat([p["labels"] for p in parts], 1)
    # Token 4 is the last of rank 0; its label, 5, is a token of rank 1.
    assert torch.equal(labels, torch.tensor([[2, 3, 4, 5, 6, 7, IGNORE, IGNORE]]))
    assert torch.equal(torch.cat([p["position_ids"] for p in parts], 1), torch.tensor([[0, 1, 2, 3, 4, 5, 6, 6]]))
    assert all(p["longspan"].length == 7 and p["longspan"].segments is None for p in parts)


def test_shift_labels_are_not_shifted_again(pool2: RankPool) -> None:
    shifted = torch.tensor([[2, 3, 4, IGNORE]])
    parts = pool2.run(_cut, {"input_ids": torch.ones(1, 4, dtype=torch.int64), "shift_labels": shifted})
    assert torch.equal(torch.cat([p["labels"] for p in parts], 1), shifted)
    assert "shift_labels" not in parts[0]


def test_restarting_positions_are_documents_as_in_transformers(pool2: RankPool) -> None:
    batch = {
        "input_ids": torch.ones(2, 6, dtype=torch.int64),
        "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 4, 5]]),
    }
    info = pool2.run(_cut, batch)[0]["longspan"]
    assert info.segments == (((0, 4), (4, 6)), ((0, 6),)) and info.max_position == 5
    masked = pool2.run(_cut, {**batch, "attention_mask": torch.ones(2, 6)})[0]["longspan"]
    assert masked.segments is None  # with a mask given, transformers does not look for packed sequences


def test_segments_of_masks_and_documents() -> None:
    assert padding_segments(torch.ones(2, 3)) == (None, False)
    assert padding_segments(torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0]])) == ((((1, 4),), ((0, 2),)), False)
    assert padding_segments(torch.tensor([[0, 1, 0, 1], [0, 0, 0, 0]])) == ((((1, 4),), ()), True)
    assert document_segments(torch.zeros(2, 4, dtype=torch.int64)) is None
    assert document_segments(torch.tensor([[5, 5, 2, -1]])) == (((0, 2), (2, 3)),)
    assert document_segments(torch.tensor([[-1, -1]])) == ((),)


def _ids(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, dtype=torch.int64)


BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "a batch needs `input_ids` or `inputs_embeds`"),
    ({"input_ids": _ids(1, 4), "inputs_embeds": torch.ones(1, 4, 2)}, "one of them"),
    ({"input_ids": _ids(4)}, r"`input_ids` must be a tensor of 2 dimensions .* got \(4,\)"),
    ({"input_ids": _ids(1, 0)}, r"a batch without tokens: `input_ids` has the shape \(1, 0\)"),
    ({"input_ids": _ids(1, 4), "labels": _ids(1, 5)}, r"`labels` has the shape \(1, 5\), the batch has 1 rows of 4"),
    ({"input_ids": _ids(2, 4), "attention_mask": _ids(2, 3)}, r"`attention_mask` has the shape \(2, 3\)"),
    ({"input_ids": _ids(1, 4), "attention_mask": _ids(1, 1, 4, 4)}, "a mask over pairs of tokens is not supported"),
    ({"input_ids": _ids(2, 4), "position_ids": _ids(3, 4)}, r"`position_ids` has the shape \(3, 4\)"),
    ({"input_ids": _ids(1, 4), "speaker_ids": _ids(1, 4)}, "`speaker_ids` .* does not know how to cut it"),
    (
        {"input_ids": _ids(1, 4), "labels": _ids(1, 4), "attention_mask": torch.tensor([[1, 1, 0, 0]])},
        "`labels` of row 0 ask for a loss on 1 tokens of right-hand padding .* set the labels there to -100",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("batch", "text"), BAD)
def test_bad_batches_are_refused(batch: dict[str, Any], text: str) -> None:
    with pytest.raises(LongspanError, match=text):
        shard_batch(batch, longspan.SequenceSharding(OneDeviceMesh("cpu")))


def test_other_values_pass_through(pool2: RankPool) -> None:
    part = pool2.run(_cut, {"input_ids": _ids(1, 4), "num_items_in_batch": torch.tensor(7), "name": "x"})[0]
    assert part["num_items_in_batch"] == 7 and part["name"] == "x"


# ---------------------------------------------------------------------------------------------------------------------
# The mesh.


def test_a_mesh_of_another_size_than_the_job_is_refused() -> None:
    with pytest.raises(
        LongspanError, match=r"init_mesh\(data=1, ring=1, ulysses=4, tensor=1\) needs 4 processes, this"
    ):
        longspan.init_mesh(ulysses=4)
    with pytest.raises(LongspanError, match="ulysses must be at least 1, got 0"):
        longspan.init_mesh(ulysses=0)
    with pytest.raises(LongspanError, match=r"data must be an integer at least 1"):
        longspan.init_mesh(data=1.5)  # type: ignore[arg-type]


@on_ranks(4)
def test_meshes() -> None:
    with pytest.raises(
        LongspanError, match="needs 3 processes, this job has 4; start it with `torchrun --nproc-per-node"
    ):
        longspan.init_mesh(ulysses=3)
    usp = longspan.SequenceSharding(longspan.init_mesh(ring=2, ulysses=2))
    assert usp.layout == Layout(2, 2, "zigzag") and usp.size == 4
    assert (usp.rank, usp.ring_rank, usp.ulysses_rank) == (dist.get_rank(), dist.get_rank() // 2, dist.get_rank() % 2)
    with pytest.raises(LongspanError, match="layout='diagonal' is unknown; choose 'auto', 'contiguous' or 'zigzag'"):
        longspan.SequenceSharding(longspan.init_mesh(ulysses=4), layout="diagonal")
    with pytest.raises(LongspanError, match="ring_impl='bus' is unknown; choose 'auto', 'p2p' or 'allgather'"):
        longspan.SequenceSharding(longspan.init_mesh(ring=4), ring_impl="bus")
    sp = _sp(data=2, ulysses=2)
    rank = dist.get_rank()
    assert (sp.data_rank, sp.rank) == divmod(rank, 2) and (sp.data_size, sp.size, sp.world_size) == (2, 2, 4)
    assert sp.group is not None and dist.get_process_group_ranks(sp.group) == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert sp.world_group is not None and sp.world_group.size() == 4
