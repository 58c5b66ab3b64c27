"""Documents, padding and labels of a batch, without a model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import longspan
from longspan.attn.segments import chunk_segments
from longspan.comm.mesh import OneDeviceMesh
from longspan.core.errors import LongspanError
from longspan.hf.batch import IGNORE, SequenceInfo, real_tokens, shard_batch
from tests.models import sharding
from tests.pool import RankPool

ROW = ((0, 3), (3, 4), (4, 7))
IDS = torch.tensor([[4, 4, 4, 9, 2, 2, 2]])
BORDERS = torch.tensor([0, 3, 4, 7], dtype=torch.int32)
RESTART = torch.tensor([[0, 1, 2, 0, 0, 1, 2]])


def _tokens(rows: int = 1, n: int = 7) -> Tensor:
    return torch.ones(rows, n, dtype=torch.int64)


def _info(batch: dict[str, Any], shift: bool = True) -> SequenceInfo:
    sp = longspan.SequenceSharding(OneDeviceMesh("cpu"))
    info: SequenceInfo = shard_batch({"input_ids": _tokens(), **batch}, sp, shift=shift)["longspan"]
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


def test_labels_of_a_masked_lm_are_not_shifted() -> None:
    sp = longspan.SequenceSharding(OneDeviceMesh("cpu"))
    labels = torch.arange(7)[None]
    cut = shard_batch({"input_ids": _tokens(), "labels": labels}, sp, shift=False)
    assert torch.equal(cut["labels"], labels) and not cut["longspan"].shifted
    shifted = shard_batch({"input_ids": _tokens(), "labels": labels}, sp)
    assert shifted["labels"].tolist() == [[1, 2, 3, 4, 5, 6, IGNORE]] and shifted["longspan"].shifted


def _sharded() -> tuple[dict[str, Any], list[Tensor]]:
    sp, cpu = sharding(), torch.device("cpu")
    types = torch.tensor([[0, 0, 0, 1, 1, 1, 1]])
    batch = {"input_ids": _tokens(), "token_type_ids": types, "document_ids": IDS, "max_length_q": None}
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0]])
    infos = [shard_batch({"input_ids": _tokens(2, 5), "attention_mask": m}, sp)["longspan"] for m in (mask, None)]
    return shard_batch(batch, sp), [real_tokens(info, sp, 2, cpu) for info in infos]


def test_token_types_and_real_tokens_are_sharded(pool2: RankPool) -> None:
    parts, real = zip(*pool2.run(_sharded), strict=True)
    assert torch.cat([part["token_type_ids"] for part in parts], 1)[0, :7].tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert all(sorted(part) == ["input_ids", "longspan", "position_ids", "token_type_ids"] for part in parts)
    padded, plain = zip(*real, strict=True)
    assert torch.cat(padded, 1).int().tolist() == [[0, 0, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0]]
    assert torch.cat(plain, 1).int().tolist() == [[1, 1, 1, 1, 1, 0]] * 2


BAD: list[tuple[dict[str, Any], str]] = [
    ({"cu_seq_lens_q": torch.tensor([0, 3, 6])}, r"documents of `cu_seq_lens_q` have 6 tokens together, .* has 7"),
    ({"cu_seq_lens_k": torch.tensor([0, 5, 3, 7])}, r"`cu_seq_lens_k` must rise from 0 .* got \[0, 5, 3, 7\]"),
    ({"cu_seq_lens_q": torch.tensor([1, 7])}, r"`cu_seq_lens_q` must rise from 0"),
    ({"cu_seq_lens_q": [0, 7]}, r"`cu_seq_lens_q` must be a tensor of integers \[documents \+ 1\], got \[0, 7\]"),
    ({"cu_seq_lens_q": torch.tensor([[0, 7]])}, r"got the shape \(1, 2\), torch.int64"),
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


@pytest.mark.parametrize(("batch", "text"), BAD)
def test_refused(batch: dict[str, Any], text: str) -> None:
    with pytest.raises(LongspanError, match=text):
        _info(batch)


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
