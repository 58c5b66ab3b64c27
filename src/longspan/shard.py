"""Full batch <-> this rank's part.

`shard` and `gather` move one tensor; `shard_batch` cuts a whole training batch: it shifts the labels BEFORE the cut (a
rank's last token is judged by the next rank's first), makes positions global, and carries what the attention must know
of the whole sequence in one value, `SequenceInfo`, that travels with the batch through the model's own keyword
arguments. It is never stored: gradient checkpointing may run a layer again long after the next batch has come in.
"""

from __future__ import annotations

import dataclasses
import itertools
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.errors import LongspanError
from longspan.mesh import find_group, group_name

if TYPE_CHECKING:
    from longspan.layout import Layout
    from longspan.mesh import SequenceSharding

IGNORE = -100
"""The label of a token that no loss is computed for (the convention of `torch.nn.functional.cross_entropy`)."""

Rows = tuple[tuple[tuple[int, int], ...], ...]
"""For each row of the batch the runs of tokens [start, stop) that attend among themselves."""


@dataclass(frozen=True)
class SequenceInfo:
    """What one rank must know of the whole batch that its part was cut from.

    Attributes:
        length: real tokens of the sequence, padding by `shard` not counted.
        rows: documents and padding, None where every token of a row sees its whole row.
        max_position: the largest position id of the whole batch.
        digest: `digest` of the whole batch, by which ranks that were given different ones are found out; None where
            it is not on the CPU.
    """

    length: int
    rows: Rows | None
    max_position: int
    digest: int | None = None


def digest(batch: Mapping[str, Any]) -> int:
    """A checksum of a batch: names, shapes, dtypes and all bytes of its tensors, and its plain values."""
    crc = 0
    for key, value in sorted(batch.items()):
        if isinstance(value, Tensor):
            whole = value.detach().cpu().contiguous()
            crc = zlib.crc32(f"{key} {tuple(whole.shape)} {whole.dtype}".encode(), crc)
            crc = zlib.crc32(whole.view(-1).view(torch.uint8).numpy().data, crc)
        elif value is None or isinstance(value, bool | int | float | str):
            crc = zlib.crc32(f"{key} {value!r}".encode(), crc)
    return crc


def shard(x: Tensor, sp: SequenceSharding, dim: int = 1, pad_value: float = 0) -> Tensor:
    """My part of `x` along `dim`, as `sp.layout` cuts it, padded with `pad_value` behind the end of the sequence.

    Differentiable: the gradient of `x` is this rank's part of it, zero outside my tokens.
    """
    if sp.size == 1:
        return x
    n = x.shape[dim]
    parts = []
    for start, stop in sp.layout.padded_spans(n, sp.rank):
        real = max(0, min(stop, n) - start)
        if real:
            parts.append(x.narrow(dim, start, real))
        if real < stop - start:
            shape = list(x.shape)
            shape[dim] = stop - start - real
            parts.append(x.new_full(shape, pad_value))
    # A rank that holds padding alone still belongs to the graph of `x`.
    if len(parts) == 1 and sp.layout.spans(n, sp.rank):
        return parts[0]
    return torch.cat([x.narrow(dim, 0, 0), *parts], dim)


def gather(x: Tensor, sp: SequenceSharding, dim: int = 1, length: int | None = None) -> Tensor:
    """All ranks' parts of `x` along `dim`, in the sequence's order, on every rank; cut to `length` tokens if given.

    Differentiable: each rank uses the whole for its own part of the loss, so the gradient of my part is the sum of
    what all ranks send back for it (a reduce-scatter).

    Raises:
        LongspanError: if `length` does not belong to parts of this size.
    """
    local = x.shape[dim]
    total = local * sp.size
    if length is not None and (length < 1 or sp.layout.local_length(length) != local):
        shortest = next(n for n in range(max(1, total - 2 * sp.size), total + 1) if sp.layout.local_length(n) == local)
        raise LongspanError(
            f"gather: {sp.size} ranks hold {local} entries each, which is a sequence of {shortest} to {total}, not of "
            f"length={length}"
        )
    if sp.size > 1:
        assert sp.group is not None
        first = x.movedim(dim, 0)
        x = torch.ops.longspan.all_gather(first.contiguous(), sp.size, group_name(sp.group))
        x = in_order(x, sp.layout, total).movedim(0, dim)
    return x if length is None else x.narrow(dim, 0, length)


def in_order(x: Tensor, layout: Layout, n: int) -> Tensor:
    """Tokens along dimension 0, rank after rank, put into the sequence's order; `n` tokens, padding included."""
    held = [span for rank in range(layout.size) for span in layout.padded_spans(n, rank)]
    order = sorted(range(len(held)), key=lambda i: held[i])
    if order == list(range(len(held))):
        return x
    pieces = x.split([stop - start for start, stop in held])
    return torch.cat([pieces[i] for i in order])


# torch 2.13 renames the two collectives and warns of the old names; older versions have only those.
_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"


def gather_into(out: Tensor, x: Tensor, group: dist.ProcessGroup) -> None:
    """The backend's all-gather: every rank's `x` one after the other in `out`."""
    getattr(dist, _GATHER)(out, x, group=group)


def scatter_into(out: Tensor, x: Tensor, group: dist.ProcessGroup) -> None:
    """The backend's reduce-scatter: my part of the sum of every rank's `x` in `out`."""
    getattr(dist, _SCATTER)(out, x, group=group)


@torch.library.custom_op("longspan::all_gather", mutates_args=())
def _all_gather(x: Tensor, size: int, group: str) -> Tensor:
    out = x.new_empty(size * x.shape[0], *x.shape[1:])
    gather_into(out, x.contiguous(), group=find_group(group))
    return out


@_all_gather.register_fake
def _(x: Tensor, size: int, group: str) -> Tensor:
    return x.new_empty(size * x.shape[0], *x.shape[1:])


@torch.library.custom_op("longspan::reduce_scatter", mutates_args=())
def _reduce_scatter(x: Tensor, size: int, group: str) -> Tensor:
    out = x.new_empty(x.shape[0] // size, *x.shape[1:])
    scatter_into(out, x.contiguous(), group=find_group(group))
    return out


@_reduce_scatter.register_fake
def _(x: Tensor, size: int, group: str) -> Tensor:
    return x.new_empty(x.shape[0] // size, *x.shape[1:])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, ctx.size, ctx.group = inputs


_all_gather.register_autograd(
    lambda ctx, grad: (torch.ops.longspan.reduce_scatter(grad, ctx.size, ctx.group), None, None), setup_context=_setup
)
_reduce_scatter.register_autograd(
    lambda ctx, grad: (torch.ops.longspan.all_gather(grad, ctx.size, ctx.group), None, None), setup_context=_setup
)


# ---------------------------------------------------------------------------------------------------------------------
# A whole batch.

_CUT = {"input_ids", "inputs_embeds", "labels", "shift_labels", "position_ids", "attention_mask"}


def shard_batch(batch: Mapping[str, Any], sp: SequenceSharding) -> dict[str, Any]:
    """Cut a batch beforehand, in the data loader: `model(**shard_batch(batch, sp))` is `model(**batch)`.

    Args:
        batch: the same full batch on every rank of a sequence group: `input_ids` [B, n] (or `inputs_embeds`
            [B, n, d]), and as wanted `labels` [B, n] (unshifted, -100 where no loss is computed), or
            `shift_labels` [B, n] (already shifted), `position_ids` [B, n] or [1, n], `attention_mask` [B, n]
            (1 real, 0 padding; padding at the left or right end). What is no tensor of the sequence passes through.
        sp: the sharding.

    Returns:
        The same keys with this rank's tokens, `labels` shifted, `position_ids` always present and global, the
        `attention_mask` replaced by what it says, and the key `longspan` with the `SequenceInfo`.

        As in transformers (with `use_cache=False`), position ids that restart mark packed documents, which never
        attend to each other, but only where no `attention_mask` is given.

    Raises:
        LongspanError: for a batch without tokens, tensors of another length, a mask with holes, labels on
            right-hand padding, or a key that has the length of the sequence and is not understood.
    """
    if "longspan" in batch:
        return dict(batch)
    out = cut_batch(batch, sp)
    if all(x.device.type == "cpu" for x in batch.values() if isinstance(x, Tensor)):
        out["longspan"] = dataclasses.replace(out["longspan"], digest=digest(batch))
    return out


def cut_batch(batch: Mapping[str, Any], sp: SequenceSharding) -> dict[str, Any]:
    """`shard_batch` without the digest, for one who has the whole batch at hand."""
    batch_size, n, device = _batch_shape(batch)
    _check_lengths(batch, batch_size, n)
    out = {key: value for key, value in batch.items() if key not in _CUT}
    for key in ("input_ids", "inputs_embeds"):
        if batch.get(key) is not None:
            out[key] = shard(batch[key], sp)
    mask, positions = batch.get("attention_mask"), batch.get("position_ids")
    rows = _rows_of(mask, positions, batch_size)
    shifted = _shifted_labels(batch)
    if shifted is not None:
        if mask is not None and rows is not None:
            _refuse_labels_on_padding(shifted, rows, n)
        out["labels"] = shard(shifted, sp, pad_value=IGNORE)
    if positions is None:
        out["position_ids"] = sp.positions(n).to(device)[None]
        max_position = n - 1
    else:
        positions = positions if positions.dim() == 2 else positions[None]
        out["position_ids"] = shard(positions, sp)
        max_position = int(positions.max())
    out["longspan"] = SequenceInfo(length=n, rows=rows, max_position=max_position)
    return out


def _batch_shape(batch: Mapping[str, Any]) -> tuple[int, int, torch.device]:
    given = [key for key in ("input_ids", "inputs_embeds") if batch.get(key) is not None]
    if len(given) != 1:
        raise LongspanError(
            f"a batch needs `input_ids` or `inputs_embeds` (one of them), this one has {sorted(batch) or 'nothing'}"
        )
    tokens = batch[given[0]]
    ndim = 2 if given == ["input_ids"] else 3
    if not isinstance(tokens, Tensor) or tokens.dim() != ndim:
        shape = tuple(tokens.shape) if isinstance(tokens, Tensor) else type(tokens).__name__
        raise LongspanError(f"`{given[0]}` must be a tensor of {ndim} dimensions [batch, tokens, ...], got {shape}")
    if tokens.shape[0] == 0 or tokens.shape[1] == 0:
        raise LongspanError(f"a batch without tokens: `{given[0]}` has the shape {tuple(tokens.shape)}")
    return tokens.shape[0], tokens.shape[1], tokens.device


def _check_lengths(batch: Mapping[str, Any], batch_size: int, n: int) -> None:
    for key, value in batch.items():
        if not isinstance(value, Tensor) or key in ("input_ids", "inputs_embeds"):
            continue
        shape = tuple(value.shape)
        if key == "position_ids":
            if shape not in ((batch_size, n), (1, n), (n,)):
                raise LongspanError(
                    f"`position_ids` has the shape {shape}, the batch has {batch_size} rows of {n} tokens"
                )
        elif key in _CUT:
            if shape != (batch_size, n):
                hint = " (a mask over pairs of tokens is not supported)" if value.dim() == 4 else ""
                raise LongspanError(
                    f"`{key}` has the shape {shape}, the batch has {batch_size} rows of {n} tokens{hint}"
                )
        elif value.dim() >= 1 and n in shape and n > 1:
            raise LongspanError(
                f"`{key}` of shape {shape} seems to have one entry per token, and longspan does not know how to cut "
                f"it; it cuts {', '.join(sorted(_CUT))}"
            )


def _shifted_labels(batch: Mapping[str, Any]) -> Tensor | None:
    """Labels such that entry i is the token that the logits at i predict."""
    labels, shifted = batch.get("labels"), batch.get("shift_labels")
    if shifted is not None:
        return shifted if isinstance(shifted, Tensor) else None
    if labels is None:
        return None
    out = torch.full_like(labels, IGNORE)
    out[:, :-1] = labels[:, 1:]
    return out


def _rows_of(mask: Tensor | None, positions: Tensor | None, batch_size: int) -> Rows | None:
    if mask is not None:
        return mask_rows(mask)
    if positions is None:
        return None
    positions = positions if positions.dim() == 2 else positions[None]
    ids = torch.zeros_like(positions)
    ids[:, 1:] = (positions.diff(dim=-1) != 1).cumsum(-1)
    rows = document_rows(ids)
    return rows if rows is None or len(rows) == batch_size else rows * batch_size


def mask_rows(mask: Tensor) -> Rows | None:
    """The real tokens of each row of a padding mask [B, n], or None where nothing is padded.

    Raises:
        LongspanError: if a row has no real token, or zeros between its ones.
    """
    real = mask.bool()
    if bool(real.all()):
        return None
    n = real.shape[1]
    count = real.sum(-1)
    first = real.int().argmax(-1)
    last = n - 1 - real.flip(-1).int().argmax(-1)
    rows: list[tuple[tuple[int, int], ...]] = []
    for b, (total, start, stop) in enumerate(torch.stack([count, first, last + 1], -1).tolist()):
        if total == 0:
            raise LongspanError(f"`attention_mask` hides every token of row {b}; drop the row")
        if total != stop - start:
            raise LongspanError(
                f"`attention_mask` has zeros between the ones of row {b} ({total} ones in tokens {start} to "
                f"{stop - 1}); only padding at the left or right end is supported"
            )
        rows.append(((start, stop),))
    return tuple(rows)


def document_rows(documents: Tensor) -> Rows | None:
    """The documents of each row, as runs of equal ids in `documents` [B, n]; an id below 0 marks padding.

    None where every row is one document. Only the borders travel to the host.

    Raises:
        LongspanError: if one id comes back after another: a document is one run of tokens.
    """
    n = documents.shape[1]
    border = documents.diff(dim=-1) != 0
    if not bool(border.any()) and bool((documents >= 0).all()):
        return None
    at = [[0] for _ in range(documents.shape[0])]
    for b, i in border.nonzero().tolist():
        at[b].append(i + 1)
    rows: list[tuple[tuple[int, int], ...]] = []
    for b, starts in enumerate(at):
        ids = documents[b, torch.tensor(starts, device=documents.device)].tolist()
        real = [i for i in ids if i >= 0]
        if len(set(real)) != len(real):
            twice = next(i for i in real if real.count(i) > 1)
            raise LongspanError(
                f"`documents` of row {b}: id {twice} comes back after another document; each document must be one "
                f"run of tokens with an id of its own"
            )
        spans = zip(ids, starts, [*starts[1:], n], strict=True)
        rows.append(tuple((start, stop) for i, start, stop in spans if i >= 0))
    return tuple(rows)


def cu_seqlens_rows(cu_seqlens: Tensor, n: int) -> Rows:
    """The documents of one row from where they begin, [documents + 1], the row's length `n` at the end.

    Raises:
        LongspanError: if they do not begin at 0, do not rise, or do not sum up to `n`.
    """
    ends = [int(end) for end in cu_seqlens.reshape(-1).tolist()]
    if len(ends) < 2 or ends[0] != 0 or any(b < a for a, b in itertools.pairwise(ends)):
        raise LongspanError(
            f"`cu_seqlens` must rise from 0 to the length, one entry more than documents; got {_few(ends)}"
        )
    if ends[-1] != n:
        raise LongspanError(
            f"the documents of `cu_seqlens` have {ends[-1]} tokens together, the sequence has {n}; its last entry "
            f"must be {n}"
        )
    return (tuple((a, b) for a, b in itertools.pairwise(ends) if b > a),)


def _few(numbers: list[int]) -> str:
    spelled = ", ".join(str(number) for number in numbers[:8])
    return f"[{spelled}{', ...' if len(numbers) > 8 else ''}]"


def paired_rows(documents: Tensor, kv_documents: Tensor) -> tuple[Rows, Rows]:
    """For cross attention: run number m of the first attends to run number m of the second, which has its id.

    Raises:
        LongspanError: as `document_rows`.
    """
    out = []
    for b in range(len(documents)):
        q_runs, k_runs = (_runs_by_id(ids[b]) for ids in (documents, kv_documents))
        both = [i for i in q_runs if i in k_runs]
        out.append((tuple(q_runs[i] for i in both), tuple(k_runs[i] for i in both)))
    return tuple(q for q, _ in out), tuple(k for _, k in out)


def _runs_by_id(ids: Tensor) -> dict[int, tuple[int, int]]:
    rows = document_rows(ids[None])
    runs = rows[0] if rows is not None else ((0, len(ids)),)
    return {int(ids[start]): (start, stop) for start, stop in runs}


def _refuse_labels_on_padding(shifted: Tensor, rows: Rows, n: int) -> None:
    for b, row in enumerate(rows):
        stop = row[-1][1]
        wrong = int((shifted[b, stop:] != IGNORE).sum()) if stop < n else 0
        if wrong:
            raise LongspanError(
                f"`labels` of row {b} ask for a loss on {wrong} tokens of right-hand padding (the `attention_mask` "
                f"ends at token {stop}); set the labels there to {IGNORE}"
            )
