"""Read a batch's documents and padding: every key that marks them becomes `SequenceInfo.segments`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longspan.attn.segments import Segments, cu_seqlens_segments, document_segments, padding_segments
from longspan.comm.arguments import check_integers
from longspan.core.errors import LongspanError

ID_KEYS = ("document_ids", "seq_idx")
BORDER_KEYS = ("cu_seq_lens_q", "cu_seq_lens_k")
LONGEST_KEYS = ("max_length_q", "max_length_k")


@dataclass(frozen=True, eq=False)
class VisibleKeys:
    """A `mask_mod` that hides the zeros of an attention mask, bool [B, n], from every query."""

    mask: Tensor

    def __call__(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        """Return whether the mask is 1 at the key, which may lie in padding beyond the end."""
        return self.mask.to(kv.device)[b, kv.clamp(max=self.mask.shape[1] - 1)]


def tokens_of(inputs: Mapping[str, Any]) -> Tensor:
    """Return the ids of a batch, or its embeddings."""
    tokens: Tensor = inputs["input_ids"] if inputs.get("input_ids") is not None else inputs["inputs_embeds"]
    return tokens


def segments_of(
    batch: Mapping[str, Any], positions: Tensor | None, batch_size: int, n: int
) -> tuple[Segments | None, tuple[tuple[int, ...], ...] | None, VisibleKeys | None]:
    """Return `segments`, `starts` and `visible` of the `SequenceInfo`, from all keys that mark documents or padding."""
    mask = batch.get("attention_mask")
    documents = _documents_of(batch, n)
    if documents is None:
        if mask is not None:
            rows, holes = padding_segments(mask)
            return rows, None, VisibleKeys(mask.bool()) if holes else None
        if positions is None or not bool((positions.diff(dim=-1) != 1).any()):
            return None, None, None
        documents = _restarts(positions).cumsum(-1).expand(batch_size, -1)
    elif mask is not None:
        documents = _without_padding(documents, mask)
    rows = document_segments(documents)
    if rows is None or positions is None:
        return rows, None, None
    positions = positions.expand(batch_size, -1)
    restarts = _restarts(positions)
    _refuse_restarts_in_documents(restarts, documents)
    if mask is not None or not bool(restarts.any()):
        return rows, None, None
    at = [torch.tensor([start for start, _ in row], dtype=torch.int64, device=positions.device) for row in rows]
    starts = tuple(tuple(positions[b, i].tolist()) for b, i in enumerate(at))
    return rows, starts if any(any(row) for row in starts) else None, None


def _restarts(positions: Tensor) -> Tensor:
    """Return where a position id is not that of the previous token plus 1, bool [B, n]."""
    restarts = torch.zeros_like(positions, dtype=torch.bool)
    restarts[:, 1:] = positions.diff(dim=-1) != 1
    return restarts


def _documents_of(batch: Mapping[str, Any], n: int) -> Tensor | None:
    """Return the documents that the batch marks, as ids [B, n], below 0 for padding; None if it marks none."""
    marked: dict[str, Tensor] = {key: batch[key].to(torch.int64) for key in ID_KEYS if batch.get(key) is not None}
    marked |= {key: _ids_between(key, batch, n) for key in BORDER_KEYS if batch.get(key) is not None}
    if not marked:
        for key in LONGEST_KEYS:
            if batch.get(key) is not None:
                raise LongspanError(f"`{key}` is the length of the longest document; give cu_seq_lens_q with it")
        return None
    (first, ids), *others = marked.items()
    rows = document_segments(ids, first)
    for key, also in others:
        if (rows_of_key := document_segments(also, key)) != rows:
            raise LongspanError(
                f"`{first}` and `{key}` mark different documents: {_format_documents(rows, n)}, and "
                f"{_format_documents(rows_of_key, n)}; give one of them"
            )
    return ids


def _format_documents(rows: Segments | None, n: int) -> str:
    """Return the lengths of the first row's documents as text."""
    row = ((0, n),) if rows is None else rows[0]
    sizes = [str(stop - start) for start, stop in row[:6]]
    return f"{len(row)} of {', '.join(sizes)}{', ...' if len(row) > 6 else ''} tokens in row 0"


def _ids_between(key: str, batch: Mapping[str, Any], n: int) -> Tensor:
    """Return document ids from FlashAttention's cumulative lengths."""
    borders, tokens = batch[key], tokens_of(batch)
    if tokens.shape[0] != 1:
        raise LongspanError(
            f"`{key}` marks the documents of one row, the batch has {tokens.shape[0]}; give document_ids [B, n]"
        )
    check_integers(key, borders)
    sizes = [stop - start for start, stop in cu_seqlens_segments(borders, n, key)[0]]
    lengths = torch.tensor(sizes, device=borders.device)
    return torch.arange(len(sizes), device=borders.device).repeat_interleave(lengths)[None]


def _without_padding(documents: Tensor, mask: Tensor) -> Tensor:
    """Return `documents` with the mask's padding marked; padding may be between documents, not inside."""
    ids = documents.masked_fill(mask == 0, -1)
    try:
        document_segments(ids)
    except LongspanError as error:  # the documents alone are valid, so the mask splits one
        raise LongspanError("`attention_mask` has zeros inside a document; only padding is supported") from error
    return ids


def _refuse_restarts_in_documents(restarts: Tensor, documents: Tensor) -> None:
    inside = restarts.clone()
    inside[:, 1:] &= (documents.diff(dim=-1) == 0) & (documents[:, 1:] >= 0)
    if bool(inside.any()):
        b, i = inside.nonzero()[0].tolist()
        raise LongspanError(
            f"`position_ids` restart at token {i} of row {b}, in the middle of a document; give position ids that "
            f"restart where documents begin, or none"
        )
