"""Shard tensors and batches: order, padding, positions, documents, labels, meshes; without a model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import longspan
from longspan.attn.segments import chunk_segments, document_segments, padding_segments
from longspan.comm.mesh import MeshGroups
from longspan.core.errors import LongspanError
from longspan.core.layout import Layout
from longspan.hf.batch.shard import IGNORE, SequenceInfo, real_tokens, shard_batch
from tests.models import sharding
from tests.pool import RankPool, on_ranks

pytestmark = pytest.mark.fast

ONE_DEVICE = longspan.SequenceSharding(MeshGroups("cpu"))

ROW = ((0, 3), (3, 4), (4, 7))
IDS = torch.tensor([[4, 4, 4, 9, 2, 2, 2]])
BORDERS = torch.tensor([0, 3, 4, 7], dtype=torch.int32)
RESTART = torch.tensor([[0, 1, 2, 0, 0, 1, 2]])


def _ones(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.int64)


def _tokens(rows: int = 1, n: int = 7) -> Tensor:
    return _ones(rows, n)


def _info(batch: dict[str, Any], shift: bool = True) -> SequenceInfo:
    info: SequenceInfo = shard_batch({"input_ids": _tokens(), **batch}, ONE_DEVICE, shift=shift)["longspan"]
    return info


@pytest.mark.parametrize(
    "marks",
    [
        {"document_ids": IDS},
        {"seq_idx": IDS.int()},
        {"cu_seq_lens_q": BORDERS},
        {"cu_seq_lens_q": BORDERS, "cu_seq_lens_k": BORDERS, "max_length_q": 3, "max_length_k": torch.tensor(3)},
        {"position_ids": RESTART},
        {"position_ids": RESTART[0]},
        {"position_ids": RESTART, "document_ids": IDS, "seq_idx": IDS, "cu_seq_lens_k": BORDERS.long()},
        {"document_ids": IDS, "attention_mask": _tokens()},
        {"position_ids": torch.arange(7), "document_ids": IDS},
    ],
)
def test_every_way_to_mark_documents(marks: dict[str, Any]) -> None:
    info = _info(marks)
    assert info.segments == (ROW,) and info.starts is None


def test_one_document_is_no_segment() -> None:
    for marks in ({"document_ids": _tokens()}, {"cu_seq_lens_q": torch.tensor([0, 7])}, {"seq_idx": None}):
        assert _info(marks).segments is None


def test_padding_between_documents() -> None:
    mask = torch.tensor([[1, 1, 0, 1, 1, 1, 0]])
    rows = (((0, 2), (3, 4), (4, 6)),)
    assert _info({"document_ids": IDS, "attention_mask": mask}).segments == rows
    assert _info({"document_ids": IDS.masked_fill(mask == 0, -1)}).segments == rows
    # Positions of padding are ignored.
    positions = torch.tensor([[0, 1, 1, 0, 0, 1, 1]])
    assert _info({"document_ids": IDS, "attention_mask": mask, "position_ids": positions}).segments == rows


def test_documents_that_begin_at_another_position() -> None:
    info = _info({"position_ids": RESTART + 2})
    assert info.segments == (ROW,) and info.starts == ((2, 2, 2),) and info.max_position == 4
    assert chunk_segments(info.segments, 3, info.starts) == (((0, 1), (1, 3), (3, 4), (4, 5), (5, 7)),)
    assert chunk_segments((ROW,), 2) == (((0, 2), (2, 3), (3, 4), (4, 6), (6, 7)),)
    assert chunk_segments((((2, 9),), ()), 3) == (((2, 5), (5, 8), (8, 9)), ())


def test_positions_of_pictures_with_a_fourth_axis() -> None:
    """The first axis counts tokens and marks documents; the model rotates by the others: time, height and width."""
    axes = torch.stack([RESTART, *(RESTART + shift for shift in (40, 5, 6))])
    info = _info({"position_ids": axes})
    assert info.segments == (ROW,) and info.starts is None and info.max_position == 42
    cut = shard_batch({"input_ids": _tokens(), "position_ids": axes}, ONE_DEVICE)
    assert torch.equal(cut["position_ids"], axes)
    info = _info({"position_ids": axes[1:]})  # without the count of tokens, restarts mark nothing
    assert info.segments is None and info.max_position == 42


def test_labels_of_a_masked_lm_are_not_shifted() -> None:
    labels = torch.arange(7)[None]
    cut = shard_batch({"input_ids": _tokens(), "labels": labels}, ONE_DEVICE, shift=False)
    assert torch.equal(cut["labels"], labels)
    shifted = shard_batch({"input_ids": _tokens(), "labels": labels}, ONE_DEVICE)
    assert shifted["labels"].tolist() == [[1, 2, 3, 4, 5, 6, IGNORE]]


def _sharded() -> tuple[dict[str, Any], list[Tensor]]:
    sp = sharding()
    types = torch.tensor([[0, 0, 0, 1, 1, 1, 1]])
    batch = {"input_ids": _tokens(), "token_type_ids": types, "document_ids": IDS, "max_length_q": None}
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0]])
    infos = [shard_batch({"input_ids": _tokens(2, 5), "attention_mask": m}, sp)["longspan"] for m in (mask, None)]
    return shard_batch(batch, sp), [real_tokens(info) for info in infos]


def test_token_types_and_real_tokens_are_sharded(pool2: RankPool) -> None:
    parts, real = zip(*pool2.run(_sharded), strict=True)
    assert torch.cat([part["token_type_ids"] for part in parts], 1)[0, :7].tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert all(sorted(part) == ["input_ids", "longspan", "position_ids", "token_type_ids"] for part in parts)
    padded, plain = zip(*real, strict=True)
    assert torch.cat(padded, 1).int().tolist() == [[0, 0, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0]]
    assert torch.cat(plain, 1).int().tolist() == [[1, 1, 1, 1, 1, 0]] * 2


BAD_SHAPES: list[tuple[dict[str, Any], str]] = [
    ({}, "a batch needs `input_ids` or `inputs_embeds`"),
    ({"input_ids": _ones(1, 4), "inputs_embeds": torch.ones(1, 4, 2)}, "one of them"),
    ({"input_ids": _ones(4)}, r"`input_ids` must be a tensor of 2 dimensions .* got \(4,\)"),
    ({"input_ids": _ones(1, 0)}, r"a batch without tokens: `input_ids` has the shape \(1, 0\)"),
    ({"input_ids": _ones(1, 4), "labels": _ones(1, 5)}, r"`labels` has the shape \(1, 5\), the batch has 1 rows of 4"),
    ({"input_ids": _ones(2, 4), "attention_mask": _ones(2, 3)}, r"`attention_mask` has the shape \(2, 3\)"),
    ({"input_ids": _ones(1, 4), "attention_mask": _ones(1, 1, 4, 4)}, "a mask over pairs of tokens is not supported"),
    ({"input_ids": _ones(2, 4), "position_ids": _ones(3, 4)}, r"`position_ids` has the shape \(3, 4\)"),
    ({"input_ids": _ones(1, 4), "speaker_ids": _ones(1, 4)}, "`speaker_ids` .* does not know how to cut it"),
    (
        {"input_ids": _ones(1, 4), "labels": _ones(1, 4), "attention_mask": torch.tensor([[1, 1, 0, 0]])},
        "`labels` of row 0 ask for a loss on 1 tokens of right-hand padding .* set the labels there to -100",
    ),
]  # fmt: skip


BAD_MARKS: list[tuple[dict[str, Any], str]] = [
    ({"cu_seq_lens_q": torch.tensor([0, 3, 6])}, r"documents of `cu_seq_lens_q` have 6 tokens together, .* has 7"),
    ({"cu_seq_lens_k": torch.tensor([0, 5, 3, 7])}, r"`cu_seq_lens_k` must rise from 0 .* got \[0, 5, 3, 7\]"),
    ({"cu_seq_lens_q": torch.tensor([1, 7])}, r"`cu_seq_lens_q` must rise from 0"),
    ({"cu_seq_lens_q": [0, 7]}, r"`cu_seq_lens_q` must be a tensor, got \[0, 7\]"),
    (
        {"input_ids": _tokens(2), "cu_seq_lens_q": BORDERS},
        r"`cu_seq_lens_q` marks the documents of one row, the batch has 2; give document_ids",
    ),
    ({"max_length_q": 2}, "`max_length_q` is the length of the longest document; give cu_seq_lens_q with it"),
    (
        {"cu_seq_lens_q": BORDERS, "cu_seq_lens_k": torch.tensor([0, 2, 7])},
        "`cu_seq_lens_q` and `cu_seq_lens_k` .*: 3 of 3, 1, 3 tokens in row 0, and 2 of 2, 5",
    ),
    ({"document_ids": IDS, "cu_seq_lens_q": torch.tensor([0, 7])}, "mark different documents: 3 .*, and 1 of 7 tokens"),
    ({"document_ids": IDS[:, :6]}, r"`document_ids` has the shape \(1, 6\), the batch has 1 rows of 7 tokens"),
    ({"document_ids": IDS.tolist()}, "`document_ids` must be a tensor, got list"),
    (
        {"document_ids": torch.tensor([[1, 1, 2, 2, 1, 1, 1]])},
        "`document_ids` of row 0: id 1 comes back after another document",
    ),
    (
        {"document_ids": IDS, "attention_mask": torch.tensor([[1, 0, 1, 1, 1, 1, 1]])},
        "`attention_mask` has zeros inside a document; only padding is supported",
    ),
    (
        {"document_ids": IDS, "position_ids": torch.tensor([[0, 1, 2, 0, 0, 0, 1]])},
        "`position_ids` restart at token 5 of row 0, in the middle of a document",
    ),
    (
        {"document_ids": torch.tensor([[0, 0, 0, -1, 1, 1, 1]]), "labels": _tokens()},
        r"1 tokens of padding \(tokens 3 to 3\); set .* and of the first token behind it to -100",
    ),
    (
        {"document_ids": torch.tensor([[0, 0, 0, 0, 0, -1, -1]]), "labels": _tokens()},
        r"1 tokens of right-hand padding \(tokens 5 to 6\); set the labels .* to -100",
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("batch", "text"), [*BAD_SHAPES, *(({"input_ids": _tokens(), **marks}, text) for marks, text in BAD_MARKS)]
)
def test_refused(batch: dict[str, Any], text: str) -> None:
    with pytest.raises(LongspanError, match=text):
        shard_batch(batch, ONE_DEVICE)


def test_labels_on_padding_of_a_masked_lm() -> None:
    """It attends to nothing there, on either side; a causal LM's last padding predicts the first token."""
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1]])
    labels = torch.where(mask == 1, 5, IGNORE)
    assert _info({"attention_mask": mask, "labels": labels}).segments == _info({"attention_mask": mask}, False).segments
    _info({"attention_mask": mask, "labels": labels}, shift=False)
    with pytest.raises(LongspanError, match=r"1 tokens of padding \(tokens 0 to 1\); set the labels there to -100"):
        _info({"attention_mask": mask, "labels": labels.index_fill(1, torch.tensor([1]), 5)}, shift=False)


def test_the_batch_of_transformers_packing_collator() -> None:
    from transformers import DataCollatorWithFlattening

    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    batch: dict[str, Any] = dict(collator([{"input_ids": list(range(3, 3 + n))} for n in (3, 1, 3)]))
    assert {"cu_seq_lens_q", "max_length_k", "seq_idx", "position_ids"} <= batch.keys()
    assert _info(batch).segments == (ROW,)


# ---------------------------------------------------------------------------------------------------------------------
# On several ranks.


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


@on_ranks(2)
def test_gather_refuses_an_impossible_length() -> None:
    text = "gather: 2 ranks hold 4 entries each, which is a sequence of 7 to 8, not of length=5"
    with pytest.raises(LongspanError, match=text):
        _sp(ulysses=2).gather(torch.zeros(1, 4), dim=1, length=5)


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


def test_other_values_pass_through(pool2: RankPool) -> None:
    part = pool2.run(_cut, {"input_ids": _ones(1, 4), "num_items_in_batch": torch.tensor(7), "name": "x"})[0]
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
    sp = _sp(data=2, ulysses=2)
    rank = dist.get_rank()
    assert (sp.data_rank, sp.rank) == divmod(rank, 2) and (sp.data_size, sp.size, sp.fsdp_size) == (2, 2, 4)
    assert sp.group is not None and dist.get_process_group_ranks(sp.group) == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert sp.fsdp_group is not None and sp.fsdp_group.size() == 4
