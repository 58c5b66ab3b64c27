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
        starts: for each run of `rows` the position id of its first token, where position ids restart; None: all 0.
        shifted: whether the labels are shifted: those of a causal LM are, those of a masked LM are not.
        digest: `digest` of the whole batch, by which ranks that were given different ones are found out; None where
            it is not on the CPU.
    """

    length: int
    rows: Rows | None
    max_position: int
    starts: tuple[tuple[int, ...], ...] | None = None
    shifted: bool = True
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

_CUT = {"input_ids", "inputs_embeds", "labels", "shift_labels", "position_ids", "attention_mask", "token_type_ids"}

# What says which tokens belong together. It becomes `SequenceInfo.rows` and goes no further.
_IDS = ("document_ids", "seq_idx")
_BORDERS = ("cu_seq_lens_q", "cu_seq_lens_k")
_LONGEST = ("max_length_q", "max_length_k")


def shard_batch(batch: Mapping[str, Any], sp: SequenceSharding, *, shift: bool = True) -> dict[str, Any]:
    """Cut a batch beforehand, in the data loader: `model(**shard_batch(batch, sp))` is `model(**batch)`.

    Args:
        batch: the same full batch on every rank of a sequence group: `input_ids` [B, n] (or `inputs_embeds`
            [B, n, d]), and as wanted `labels` [B, n] (unshifted, -100 where no loss is computed), or
            `shift_labels` [B, n] (already shifted), `position_ids` [B, n] or [1, n], `token_type_ids` [B, n],
            `attention_mask` [B, n] (1 real, 0 padding; padding at the left or right end). Packed documents are marked
            in any of these ways: `document_ids` or `seq_idx` [B, n] (an id for every token, below 0 for padding),
            `cu_seq_lens_q` and `cu_seq_lens_k` [documents + 1] for a batch of one row (as transformers'
            `DataCollatorWithFlattening` gives them, with `max_length_q` and `max_length_k`), or position ids that
            restart. What is no tensor of the sequence passes through.
        sp: the sharding.
        shift: whether `labels` are to be shifted: the token at i + 1 is what the logits at i predict. True for a
            causal LM, False for a masked LM (BERT), whose logits at i predict the token at i.

    Returns:
        The same keys with this rank's tokens, `labels` shifted, `position_ids` always present and global, the
        `attention_mask` and what marks documents replaced by what they say, and the key `longspan` with the
        `SequenceInfo`.

        Documents never attend to each other. As in transformers (with `use_cache=False`), position ids that restart
        mark documents only where no `attention_mask` is given; they do so for every family, also where transformers
        parts such documents in its flash attention alone (gpt-oss, encoders). Position ids are taken as they are: those
        that are not given count through the whole row, also where `document_ids` or `cu_seq_lens_q` mark documents.

    Raises:
        LongspanError: for a batch without tokens, tensors of another length, a mask with holes, labels on padding,
            documents that do not fit the batch or are marked in two ways that contradict each other, or a key that has
            the length of the sequence and is not understood.
    """
    if "longspan" in batch:
        return dict(batch)
    out = cut_batch(batch, sp, shift=shift)
    if all(x.device.type == "cpu" for x in batch.values() if isinstance(x, Tensor)):
        out["longspan"] = dataclasses.replace(out["longspan"], digest=digest(batch))
    return out


def cut_batch(batch: Mapping[str, Any], sp: SequenceSharding, *, shift: bool = True) -> dict[str, Any]:
    """`shard_batch` without the digest, for one who has the whole batch at hand."""
    batch_size, n, device = _batch_shape(batch)
    _check_lengths(batch, batch_size, n)
    own = {*_CUT, *_IDS, *_BORDERS, *_LONGEST}
    out = {key: value for key, value in batch.items() if key not in own}
    for key in ("input_ids", "inputs_embeds", "token_type_ids"):
        if batch.get(key) is not None:
            out[key] = shard(batch[key], sp)
    positions = batch.get("position_ids")
    if positions is not None and positions.dim() == 1:
        positions = positions[None]
    rows, starts = _rows_of(batch, positions, batch_size, n)
    labels = _labels_of(batch, shift)
    if labels is not None:
        if rows is not None:
            _refuse_labels_on_padding(labels, rows, n, shift)
        out["labels"] = shard(labels, sp, pad_value=IGNORE)
    if positions is None:
        out["position_ids"] = sp.positions(n).to(device)[None]
        max_position = n - 1
    else:
        out["position_ids"] = shard(positions, sp)
        max_position = int(positions.max())
    out["longspan"] = SequenceInfo(n, rows, max_position, starts, shifted=shift)
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
        if value is None or key in ("input_ids", "inputs_embeds", *_BORDERS, *_LONGEST):
            continue
        if not isinstance(value, Tensor):
            if key in _CUT or key in _IDS:
                raise LongspanError(f"`{key}` must be a tensor, got {type(value).__name__}")
            continue
        shape = tuple(value.shape)
        if key == "position_ids":
            if shape not in ((batch_size, n), (1, n), (n,)):
                raise LongspanError(
                    f"`position_ids` has the shape {shape}, the batch has {batch_size} rows of {n} tokens"
                )
        elif key in _CUT or key in _IDS:
            if shape != (batch_size, n):
                hint = " (a mask over pairs of tokens is not supported)" if value.dim() == 4 else ""
                raise LongspanError(
                    f"`{key}` has the shape {shape}, the batch has {batch_size} rows of {n} tokens{hint}"
                )
        elif value.dim() >= 1 and n in shape and n > 1:
            raise LongspanError(
                f"`{key}` of shape {shape} seems to have one entry per token, and longspan does not know how to cut "
                f"it; it cuts {', '.join(sorted({*_CUT, *_IDS}))}"
            )


def _labels_of(batch: Mapping[str, Any], shift: bool) -> Tensor | None:
    """Labels such that entry i is the token that the logits at i predict."""
    labels: Tensor | None = batch.get("labels")
    shifted: Tensor | None = batch.get("shift_labels")
    if shifted is not None:
        if not shift:
            raise LongspanError("`shift_labels` are labels of a causal LM; a masked LM takes `labels`")
        return shifted
    if labels is None or not shift:
        return labels
    out = torch.full_like(labels, IGNORE)
    out[:, :-1] = labels[:, 1:]
    return out


# ---------------------------------------------------------------------------------------------------------------------
# Which tokens belong together.


def _rows_of(
    batch: Mapping[str, Any], positions: Tensor | None, batch_size: int, n: int
) -> tuple[Rows | None, tuple[tuple[int, ...], ...] | None]:
    """`rows` and `starts` of the `SequenceInfo`, from all in the batch that says which tokens belong together."""
    mask = batch.get("attention_mask")
    documents = _documents_of(batch, n)
    if documents is None:
        if mask is not None:
            return mask_rows(mask), None
        if positions is None or not bool((positions.diff(dim=-1) != 1).any()):
            return None, None
        documents = _restarts(positions).cumsum(-1).expand(batch_size, -1)
    elif mask is not None:
        documents = _without_padding(documents, mask)
    rows = document_rows(documents)
    for b, row in enumerate(rows or ()):
        if not row:
            raise LongspanError(f"every token of row {b} is padding; drop the row")
    if rows is None or positions is None:
        return rows, None
    positions = positions.expand(batch_size, -1)
    restarts = _restarts(positions)
    _refuse_restarts_in_documents(restarts, documents)
    if mask is not None or not bool(restarts.any()):
        return rows, None
    at = [torch.tensor([start for start, _ in row], dtype=torch.int64, device=positions.device) for row in rows]
    starts = tuple(tuple(positions[b, i].tolist()) for b, i in enumerate(at))
    return rows, starts if any(any(row) for row in starts) else None


def _restarts(positions: Tensor) -> Tensor:
    """Where a position id does not follow that of the token before, bool [B, n]."""
    restarts = torch.zeros_like(positions, dtype=torch.bool)
    restarts[:, 1:] = positions.diff(dim=-1) != 1
    return restarts


def _documents_of(batch: Mapping[str, Any], n: int) -> Tensor | None:
    """The documents that the batch names, as ids [B, n], all below 0 for padding. None where it names none."""
    found: dict[str, Tensor] = {key: batch[key].to(torch.int64) for key in _IDS if batch.get(key) is not None}
    found |= {key: _ids_between(key, batch, n) for key in _BORDERS if batch.get(key) is not None}
    if not found:
        for key in _LONGEST:
            if batch.get(key) is not None:
                raise LongspanError(f"`{key}` is the length of the longest document; give cu_seq_lens_q with it")
        return None
    (first, ids), *others = found.items()
    rows = document_rows(ids, first)
    for key, also in others:
        if (rows_of_key := document_rows(also, key)) != rows:
            raise LongspanError(
                f"`{first}` and `{key}` mark different documents: {_spell(rows, n)}, and {_spell(rows_of_key, n)}; "
                f"give one of them"
            )
    return ids


def _spell(rows: Rows | None, n: int) -> str:
    """The first row's documents in words."""
    row = ((0, n),) if rows is None else rows[0]
    sizes = [str(stop - start) for start, stop in row[:6]]
    return f"{len(row)} of {', '.join(sizes)}{', ...' if len(row) > 6 else ''} tokens in row 0"


def _ids_between(key: str, batch: Mapping[str, Any], n: int) -> Tensor:
    """Ids from the borders of documents, as FlashAttention takes them."""
    borders, tokens = batch[key], batch["input_ids"] if batch.get("input_ids") is not None else batch["inputs_embeds"]
    if tokens.shape[0] != 1:
        raise LongspanError(
            f"`{key}` marks the documents of one row, the batch has {tokens.shape[0]}; give document_ids [B, n]"
        )
    if not isinstance(borders, Tensor) or borders.dim() != 1 or borders.is_floating_point():
        got = f"the shape {tuple(borders.shape)}, {borders.dtype}" if isinstance(borders, Tensor) else repr(borders)
        raise LongspanError(f"`{key}` must be a tensor of integers [documents + 1], got {got}")
    sizes = [stop - start for start, stop in cu_seqlens_rows(borders, n, key)[0]]
    longest = batch.get(f"max_length_{key[-1]}")
    if longest is not None and int(longest) < max(sizes):
        raise LongspanError(
            f"`max_length_{key[-1]}` is {int(longest)}, the longest document of `{key}` has {max(sizes)} tokens"
        )
    lengths = torch.tensor(sizes, device=tokens.device)
    return torch.arange(len(sizes), device=tokens.device).repeat_interleave(lengths)[None]


def _without_padding(documents: Tensor, mask: Tensor) -> Tensor:
    """`documents` with the mask's padding marked; padding may lie between documents, not inside."""
    ids = documents.masked_fill(mask == 0, -1)
    try:
        document_rows(ids)
    except LongspanError as error:  # the documents alone are sound, so it is the mask that parts one
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


def document_rows(documents: Tensor, name: str = "documents") -> Rows | None:
    """The documents of each row, as runs of equal ids in `documents` [B, n]; an id below 0 marks padding.

    None where every row is one document. Only the borders travel to the host. `name` is what the caller's user calls
    the ids, for messages.

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
                f"`{name}` of row {b}: id {twice} comes back after another document; each document must be one "
                f"run of tokens with an id of its own"
            )
        spans = zip(ids, starts, [*starts[1:], n], strict=True)
        rows.append(tuple((start, stop) for i, start, stop in spans if i >= 0))
    return tuple(rows)


def cu_seqlens_rows(cu_seqlens: Tensor, n: int, name: str = "cu_seqlens") -> Rows:
    """The documents of one row from where they begin, [documents + 1], the row's length `n` at the end.

    `name` is what the caller's user calls them, for messages.

    Raises:
        LongspanError: if they do not begin at 0, do not rise, or do not sum up to `n`.
    """
    ends = [int(end) for end in cu_seqlens.reshape(-1).tolist()]
    if len(ends) < 2 or ends[0] != 0 or any(b < a for a, b in itertools.pairwise(ends)):
        raise LongspanError(f"`{name}` must rise from 0 to the length, one entry more than documents; got {_few(ends)}")
    if ends[-1] != n:
        raise LongspanError(
            f"the documents of `{name}` have {ends[-1]} tokens together, the sequence has {n}; its last entry "
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


def chunk_rows(rows: Rows, chunk: int, starts: tuple[tuple[int, ...], ...] | None = None) -> Rows:
    """Every run cut into chunks of `chunk` tokens, which count from the start of the run (Llama-4's chunked attention).

    Where position ids restart, chunks end where the position ids of a run pass a multiple of `chunk`: `starts` are
    those of the first tokens.
    """
    return tuple(
        tuple(
            span
            for (start, stop), at in zip(row, starts[b] if starts else (0,) * len(row), strict=True)
            for span in itertools.pairwise([start, *range(start + chunk - at % chunk, stop, chunk), stop])
        )
        for b, row in enumerate(rows)
    )


def real_tokens(info: SequenceInfo, sp: SequenceSharding, batch_size: int, device: torch.device) -> Tensor:
    """Which of my tokens are real, neither padding of the batch nor `shard`'s own; bool [B, n_local]."""
    rows = info.rows or (((0, info.length),),) * batch_size
    real = torch.zeros(batch_size, info.length, dtype=torch.bool)
    for b, row in enumerate(rows):
        for start, stop in row:
            real[b, start:stop] = True
    return shard(real.to(device), sp)


def _refuse_labels_on_padding(labels: Tensor, rows: Rows, n: int, shift: bool) -> None:
    for b, row in enumerate(rows):
        ends = [0, *(i for run in row for i in run), n]
        gaps = list(zip(ends[::2], ends[1::2], strict=True))
        # Shifted, the last token of left-hand padding predicts the first real one, as in one process.
        for start, stop in gaps[1:] if shift and row else gaps:
            wrong = int((labels[b, start:stop] != IGNORE).sum()) if start < stop else 0
            if wrong:
                where = "right-hand padding" if stop == n else "padding"
                also = " and of the first token behind it" if shift and stop < n else ""
                raise LongspanError(
                    f"`labels` of row {b} ask for a loss on {wrong} tokens of {where} (tokens {start} to {stop - 1}); "
                    f"set the labels there{also} to {IGNORE}"
                )
