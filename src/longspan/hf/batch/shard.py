"""Shard a training batch by tokens.

`shard_batch` shifts the labels before it shards them (a rank's last token predicts the next rank's first), and makes
position ids global. Facts about the whole sequence go to attention in one value, `SequenceInfo`, through the model's
keyword arguments. They are never stored on the model: activation checkpointing may rerun a layer after the next batch
has arrived.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longspan.attn.segments import Segments
from longspan.attn.tree import Trees, along_paths, children, read_trees
from longspan.comm.arguments import check_integers, check_sharding, describe
from longspan.comm.consistency import Digester
from longspan.comm.mesh import SequenceSharding
from longspan.comm.shard import shard
from longspan.core.errors import LongspanError
from longspan.core.formatting import listed
from longspan.core.layout import Layout
from longspan.core.validation import check_flag
from longspan.hf.batch.documents import BORDER_KEYS, ID_KEYS, LONGEST_KEYS, VisibleKeys, segments_of, tokens_of
from longspan.hf.model.vision import PICTURE_KEYS
from longspan.losses.cross_entropy import IGNORE as IGNORE


@dataclass(frozen=True, eq=False, repr=False)
class SequenceInfo:
    """Facts about the full batch that each rank needs."""

    length: int  # tokens of the sequence, without the padding that `longspan.comm.shard` adds
    segments: Segments | None  # documents and padding; None if every token of a row may see its whole row
    max_position: int  # the largest position id of the batch
    layout: Layout  # of the ranks that share the batch
    # For each run of `segments` the position id of its first token, if position ids restart; None: all 0.
    starts: tuple[tuple[int, ...], ...] | None = None
    shifted: bool = True  # labels are shifted, as a causal LM's are
    counted: bool = False  # `position_ids` were not given and count along the row
    elastic: bool = False  # the batch has a `sequence_width`
    last_positions: Tensor | None = None  # of an elastic batch, the largest position of my tokens' documents, `[B, L]`
    digest: int | Tensor | None = None  # set by `shard_batch`: `digest` of the full batch, on a GPU `device_digest`
    visible: VisibleKeys | None = None  # which keys are real, if a mask has zeros between the ones of a row
    # For each key of the batch the values of a real token, which replace padding in a forward. Empty if nothing is
    # padded on any rank.
    filler: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    bidirectional: Segments | None = None  # each row's spans of tokens that see each other in a causal model
    nodes: Trees | None = None  # trees of shared prefixes, whose tokens see their own path only
    weights: Tensor | None = None  # of my tokens' labels in the loss, `[B, L]`
    placeholders: tuple[int, ...] = ()  # ids of tokens whose embeddings come from a vision tower
    padding: Tensor | None = None  # which of my tokens are padding without a label, bool `[B, L]`
    # Attention plans and tables of fragments, by kind of layer.
    prepared: dict[Any, Any] = dataclasses.field(default_factory=dict)

    def __repr__(self) -> str:
        """Equal on all ranks of a sequence group."""
        names = ("length", "segments", "max_position", "layout", "starts", "shifted", "counted", "elastic")
        return f"SequenceInfo({', '.join(f'{name}={getattr(self, name)}' for name in names)})"


def digest(batch: Mapping[str, Any]) -> int:
    """Return a checksum of a batch: names, shapes, dtypes and bytes of its tensors, and its plain values."""
    crc = 0
    for key, value in sorted(batch.items()):
        if isinstance(value, Tensor):
            x = value.detach().cpu().contiguous()
            crc = zlib.crc32(f"{key} {tuple(x.shape)} {x.dtype}".encode(), crc)
            crc = zlib.crc32(x.view(-1).view(torch.uint8).numpy().data, crc)
        elif isinstance(value, bool | int | float | str):
            crc = zlib.crc32(f"{key} {value!r}".encode(), crc)
    return crc


def device_digest(batch: Mapping[str, Any]) -> Tensor:
    """Return a checksum of the values of a batch's tensors, int64 [] on their device, without waiting for it."""
    tensors = [value for _, value in sorted(batch.items()) if isinstance(value, Tensor)]
    device = next((x.device for x in tensors if x.device.type != "cpu"), torch.device("cpu"))
    return Digester(device).joint([x.to(device, non_blocking=True) for x in tensors])


WIDTH = "sequence_width"
"""The key of a batch that is the number of ranks that share it."""

_INPUTS = ("input_ids", "inputs_embeds", "token_type_ids", "per_layer_inputs")
TREE_KEYS = ("tin", "tout")
_PER_TOKEN = {
    *_INPUTS, "labels", "shift_labels", "loss_weights", "position_ids", "attention_mask", *ID_KEYS, *TREE_KEYS,
}  # fmt: skip
_PER_BATCH = {*BORDER_KEYS, *LONGEST_KEYS}


def check_batch(name: str, batch: Any) -> None:
    """Raise unless `batch` is a mapping, before its contents are checked."""
    if not isinstance(batch, Mapping):
        raise LongspanError(f"`{name}` must be a dict of tensors such as {{'input_ids': ids}}, got {describe(batch)}")


def width_of(batch: Mapping[str, Any]) -> Any:
    """Return the `sequence_width` that a batch asks for or was cut with; None without one."""
    cut = batch.get("longspan")
    return cut.layout.size if isinstance(cut, SequenceInfo) and cut.elastic else batch.get(WIDTH)


def sharding_of(batch: Mapping[str, Any], sp: SequenceSharding) -> SequenceSharding:
    """Return the sharding that a batch asks for or was cut with: of `sequence_width` ranks, by default `sp` itself."""
    width = width_of(batch)
    if width is None:
        return sp
    if width in sp.widths and not sp.has_widths:
        raise LongspanError(
            f"`{WIDTH}={width}` needs the groups of all widths, which the ranks make together; call sp.of_width(1) on "
            f"every rank first, or take batches from longspan.elastic_batches"
        )
    return sp.of_width(width)


def shard_batch(batch: Mapping[str, Any], sp: SequenceSharding, *, shift: bool = True) -> dict[str, Any]:
    """Shard a batch in the data loader: `model(**shard_batch(batch, sp))` equals `model(**batch)`.

    Args:
        batch: the same full batch on every rank of a sequence group: `input_ids` [B, n] (or `inputs_embeds`
            [B, n, d]), and optionally

            - `labels` [B, n] (unshifted, -100 for no loss) or `shift_labels` [B, n] (already shifted);
            - `position_ids` [B, n] or [1, n], `token_type_ids` [B, n];
            - `per_layer_inputs` [B, n, layers, d] (Gemma-3n's, with `inputs_embeds`);
            - `attention_mask` [B, n]: 1 for a real token, 0 for padding, which no token attends to;
            - `loss_weights` [B, n], floating: the weight of each label in the loss, a weighted mean; in the places of
              `labels` or of `shift_labels`, whichever is given. `num_items_in_batch` is then a sum of weights;
            - `tin` and `tout` [B, n]: trees of shared prefixes, as of `longspan.TreeMask` (`longspan.pack_tree` makes
              such batches). Position ids that are not given count along paths. `labels` are shifted along paths;
            - marks of packed documents, one of: `document_ids` or `seq_idx` [B, n] (an id per token, below 0 for
              padding); `cu_seq_lens_q` and `cu_seq_lens_k` [documents + 1] for a batch of one row (from transformers'
              `DataCollatorWithFlattening`, with `max_length_q` and `max_length_k`); position ids that restart;
            - `sequence_width`, the number of ranks that share this batch (`longspan.elastic_batches`).

            Other values pass through.
        sp: the sharding.
        shift: whether to shift `labels`. True for a causal LM, whose logits at i predict the token at i + 1. False for
            a masked LM (BERT), whose logits at i predict the token at i.

    Returns:
        The same keys with this rank's tokens; `labels` shifted; `position_ids` always present and global; the
        `attention_mask` and marks of documents replaced by the key `longspan`, a `SequenceInfo`.

        Documents never attend to each other. As in transformers (with `use_cache=False`), position ids that restart
        mark documents only without an `attention_mask`. They do so for every family, also where transformers separates
        such documents only in flash attention (gpt-oss, encoders). Position ids that are not given count through the
        whole row, also with `document_ids` or `cu_seq_lens_q`.

    Raises:
        LongspanError: for a batch without tokens, tensors of another length, labels on padding, documents that do not
            fit the batch or are marked in two contradicting ways, or an unknown key that has the length of the
            sequence.
    """
    check_sharding(sp)
    check_flag("shift", shift)
    check_batch("batch", batch)
    if "longspan" in batch:
        return dict(batch)
    sp = sharding_of(batch, sp)
    pictures = next((key for key in PICTURE_KEYS if batch.get(key) is not None), None)
    if pictures is not None:
        raise LongspanError(
            f"`{pictures}` cannot be cut in the data loader: which rank needs which picture depends on the model; pass "
            f"the whole batch to the parallelized model"
        )
    elastic, batch = batch.get(WIDTH) is not None, {key: value for key, value in batch.items() if key != WIDTH}
    out = cut_batch(batch, sp, shift=shift, elastic=elastic)
    on_cpu = all(x.device.type == "cpu" for x in batch.values() if isinstance(x, Tensor))
    out["longspan"] = dataclasses.replace(out["longspan"], digest=(digest if on_cpu else device_digest)(batch))
    return out


def cut_batch(
    batch: Mapping[str, Any],
    sp: SequenceSharding,
    *,
    shift: bool = True,
    own_positions: Tensor | None = None,
    placeholders: tuple[int, ...] = (),
    elastic: bool = False,
) -> dict[str, Any]:
    """Shard a batch as `shard_batch` does, without a digest.

    `own_positions` are ids that the model computes itself if the batch has none; they mark no documents. `sp` is the
    sharding of the ranks that share an `elastic` batch.
    """
    batch_size, n, device = _batch_shape(batch)
    _check_lengths(batch, batch_size, n)
    trees = _trees_of(batch)
    positions = batch.get("position_ids")
    if positions is not None and positions.dim() == 1:
        positions = positions[None]
    if positions is None and trees is not None:
        positions = along_paths(trees, torch.arange(n, device=device))[0]
    of_documents = None if trees is not None else _text_positions(positions)
    rows, starts, visible = segments_of(batch, of_documents, batch_size, n)
    replaced = {*_PER_TOKEN, *_PER_BATCH, "cache_position"}
    out = {key: value for key, value in batch.items() if key not in replaced}
    for key in _INPUTS:
        if batch.get(key) is not None:
            out[key] = _part(batch[key], sp)
    labels, weights = _labels_of(batch, shift, trees)
    if labels is not None:
        if rows is not None:
            _refuse_labels_on_padding(labels, rows, n, shift)
        out["labels"] = _part(labels, sp, pad_value=IGNORE)
    counted = positions is None
    positions = own_positions if counted else positions
    if positions is None:
        out["position_ids"] = sp.positions(n).to(device)[None]
        max_position = n - 1
    else:
        out["position_ids"] = _part(positions, sp, dim=-1)
        max_position = int(rotary_positions(positions).max())
    padded = sp.layout.local_length(n) * sp.size > n or any(sum(b - a for a, b in row) < n for row in rows or ())
    last = _part(_last_positions(positions, rows, tokens_of(batch)), sp) if elastic else None
    info = SequenceInfo(
        n, rows, max_position, sp.layout, starts, shift, counted=counted, visible=visible, placeholders=placeholders,
        nodes=trees, weights=None if weights is None else _part(weights, sp), elastic=elastic,
        last_positions=last,
    )  # fmt: skip
    out["longspan"] = dataclasses.replace(info, filler=_filler_of(batch, info, batch_size)) if padded else info
    return out


def _last_positions(positions: Tensor | None, rows: Segments | None, tokens: Tensor) -> Tensor:
    """Return for each token the largest position of its document, int64 [B, n]; 0 for padding."""
    batch_size, n = tokens.shape[:2]
    positions = torch.arange(n, device=tokens.device)[None] if positions is None else rotary_positions(positions)
    positions = positions.amax(0) if positions.dim() == 3 else positions
    positions, last = positions.expand(batch_size, -1), tokens.new_zeros(batch_size, n, dtype=torch.int64)
    for b, row in enumerate(rows or (((0, n),),) * batch_size):
        for start, stop in row:
            last[b, start:stop] = positions[b, start:stop].max()
    return last


def _trees_of(batch: Mapping[str, Any]) -> Trees | None:
    tin, tout = (batch.get(key) for key in TREE_KEYS)
    if tin is None and tout is None:
        return None
    if tin is None or tout is None:
        raise LongspanError(f"a batch with `{'tin' if tout is None else 'tout'}` needs `tin` and `tout`")
    marked = next((key for key in (*ID_KEYS, *BORDER_KEYS, *LONGEST_KEYS) if batch.get(key) is not None), None)
    if marked is not None:
        raise LongspanError(f"`{marked}` marks documents, and so do the roots of `tin` and `tout`; leave it out")
    return read_trees(tin, tout)


def rotary_positions(positions: Tensor) -> Tensor:
    """Return the position ids that a model rotates by: of four axes the last three, as the first counts tokens."""
    return positions[1:] if positions.dim() == 3 and len(positions) == 4 else positions


def _text_positions(positions: Tensor | None) -> Tensor | None:
    """Return the position ids that may mark documents: the first of four axes, which counts tokens; none of three."""
    if positions is None or positions.dim() < 3:
        return positions
    return positions[0] if len(positions) == 4 else None


def _filler_of(batch: Mapping[str, Any], info: SequenceInfo, batch_size: int) -> dict[str, Tensor]:
    """Return for each key the values of the batch's first real token.

    A placeholder never replaces padding: the language model would expect an embedding for the copy.
    """
    ids, real_Bn = batch.get("input_ids"), _in_rows(info, batch_size, torch.device("cpu"))
    if info.placeholders and ids is not None:
        real_Bn &= ~torch.isin(ids, torch.tensor(info.placeholders, device=ids.device)).cpu()
        if not real_Bn.any():
            return {}
    b, i = divmod(int(real_Bn.flatten().int().argmax()), info.length)
    # Copied: a view would keep the full sequence alive.
    filler = {key: batch[key].detach()[b, i].clone() for key in _INPUTS if batch.get(key) is not None}
    positions = batch.get("position_ids")
    if positions is not None and info.segments is not None:  # positions of `shard`'s own padding are 0
        positions = positions if positions.dim() > 1 else positions[None]
        filler["position_ids"] = positions[..., min(b, positions.shape[-2] - 1), i].detach().clone()
    return filler


def fill_padding(cut: dict[str, Any], sp: SequenceSharding, labels: Tensor | None) -> None:
    """Replace my padding by the filler, in every input, and mark it in `cut["longspan"]`.

    The gradient at padding is 0, but 0 times an infinite derivative is NaN: a model that divides by its hidden states
    has an infinite derivative where an embedding is 0 (often that of the padding token). Padding that predicts a token
    (the last one before a row begins) is computed as in one process: any row's, if there are no `labels` of my tokens.
    """
    info: SequenceInfo = cut["longspan"]
    if not info.filler:
        return
    tokens = tokens_of(cut)
    real_Bn = _in_rows(info, len(tokens), tokens.device, before=int(info.shifted and labels is None))
    real_BL = _part(real_Bn, sp)
    if labels is not None:
        real_BL = real_BL | (labels != IGNORE)
    padding_BL = ~real_BL
    if info.placeholders and cut.get("input_ids") is not None:
        padding_BL &= ~torch.isin(tokens, torch.tensor(info.placeholders, device=tokens.device))
    cut["longspan"] = dataclasses.replace(info, padding=padding_BL)
    for key in (*_INPUTS, "position_ids"):
        x, filler = cut.get(key), info.filler.get(key)
        if x is None or (filler is None and key == "position_ids"):
            continue
        if filler is None:  # embedded after sharding: copy the first real token of this rank
            filler = x.detach().flatten(0, 1)[real_BL.flatten().int().argmax()]
        filler = filler.to(x.device, non_blocking=True)
        if key == "position_ids":  # [rows, L], or [axes, rows, L]
            cut[key] = torch.where(padding_BL, filler[..., None, None], x)
        else:
            cut[key] = torch.where(padding_BL[(...,) + (None,) * (x.dim() - 2)], filler, x)


def _part(x: Tensor, sp: SequenceSharding, pad_value: float = 0, dim: int = 1) -> Tensor:
    """Return my tokens of `x`. Copy ids and flags: a view would keep the full sequence alive.

    Embeddings are not copied: the caller keeps them alive for their gradient anyway.
    """
    part = shard(x, sp, dim, pad_value)
    return part if sp.size == 1 or x.is_floating_point() else part.clone()


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
    if given == ["input_ids"]:
        check_integers("input_ids", tokens)
    return tokens.shape[0], tokens.shape[1], tokens.device


def _check_lengths(batch: Mapping[str, Any], batch_size: int, n: int) -> None:
    check_cache_position(batch.get("cache_position"), 0, n)
    ignored = {"input_ids", "inputs_embeds", "logits_to_keep", "cache_position", *_PER_BATCH}
    for key, value in batch.items():
        if value is None or key in ignored:
            continue
        if not isinstance(value, Tensor):
            if key in _PER_TOKEN:
                raise LongspanError(f"`{key}` must be a tensor, got {type(value).__name__}")
            continue
        shape = tuple(value.shape)
        if key in _PER_TOKEN:
            fits = (shape[:2] if key == "per_layer_inputs" else shape) == (batch_size, n)
            # Positions of pictures have three axes, or four if one counts tokens.
            positions = ((1, n), (n,), (3, batch_size, n), (4, batch_size, n))
            if not fits and not (key == "position_ids" and shape in positions):
                hint = " (a mask over pairs of tokens is not supported)" if value.dim() == 4 else ""
                if key == "labels" and shape[:1] == (batch_size,) and value.dim() < 3:
                    hint = "; labels of rows are not cut: pass them to the model together with the cut batch"
                raise LongspanError(
                    f"`{key}` has the shape {shape}, the batch has {batch_size} rows of {n} tokens{hint}"
                )
        elif n in shape and n > 1:
            raise LongspanError(
                f"`{key}` of shape {shape} seems to have one entry per token, and longspan does not know how to cut "
                f"it; it cuts {', '.join(sorted(_PER_TOKEN))}"
            )


def check_cache_position(value: Any, past: int, new: int) -> None:
    """Raise for a `cache_position` other than the positions of the new tokens; transformers needs no other."""
    if value is None:
        return
    if not isinstance(value, Tensor) or value.tolist() != list(range(past, past + new)):
        raise LongspanError(
            f"`cache_position` must be torch.arange({past}, {past + new}), positions of the new tokens; or leave it out"
        )


def _labels_of(batch: Mapping[str, Any], shift: bool, trees: Trees | None) -> tuple[Tensor | None, Tensor | None]:
    """Return labels whose entry i is the token that the logits at i predict, and their weights."""
    labels: Tensor | None = batch.get("labels")
    shifted: Tensor | None = batch.get("shift_labels")
    weights: Tensor | None = batch.get("loss_weights")
    if weights is not None and labels is None and shifted is None:
        raise LongspanError("`loss_weights` are weights of labels, and the batch has none; leave them out")
    if weights is not None and not (weights.is_floating_point() and bool(((weights >= 0) & weights.isfinite()).all())):
        raise LongspanError(f"`loss_weights` must be finite numbers of at least 0, got {describe(weights)}")
    if shifted is not None:
        if not shift:
            raise LongspanError("`shift_labels` are labels of a causal LM; a masked LM takes `labels`")
        return shifted, weights
    if labels is None or not shift:
        return labels, weights
    weights = None if weights is None else _shifted("loss_weights", weights, 0, trees)
    return _shifted("labels", labels, IGNORE, trees), weights


def _shifted(name: str, x: Tensor, fill: float, trees: Trees | None) -> Tensor:
    """Return for each token the entry of the next one on its path; `fill` at the end."""
    out = torch.full_like(x, fill)
    out[:, :-1] = x[:, 1:]
    for b, row in enumerate(trees or ()):
        values, ends = x[b].tolist(), children(row)
        for last, firsts in ends:
            several = sorted({str(values[i]) for i in firsts})
            if len(several) > 1:
                raise LongspanError(
                    f"token {last} of row {b} has several children, whose `{name}` differ ({listed(several)}), "
                    f"and can predict one: begin each child with a copy of it, as longspan.pack_tree does"
                )
        at = torch.tensor([last for last, _ in ends], device=x.device)
        out[b, at] = torch.tensor([values[f[0]] if f else fill for _, f in ends], device=x.device, dtype=x.dtype)
    return out


def real_tokens(info: SequenceInfo, sp: SequenceSharding, batch_size: int, device: torch.device) -> Tensor:
    """Return which of my tokens are real: neither padding of the batch nor of `shard`; bool [B, n_local]."""
    real = _in_rows(info, batch_size, device)
    return _part(real if info.visible is None else real & info.visible.mask.to(device), sp)


def _in_rows(info: SequenceInfo, batch_size: int, device: torch.device, before: int = 0) -> Tensor:
    """Return which tokens are in a run of `info.segments`, or at most `before` tokens before one; bool [B, n]."""
    inside = torch.zeros(batch_size, info.length, dtype=torch.bool)
    for b, row in enumerate(info.segments or (((0, info.length),),) * batch_size):
        for start, stop in row:
            inside[b, max(0, start - before) : stop] = True
    return inside.to(device)


def _refuse_labels_on_padding(labels: Tensor, rows: Segments, n: int, shift: bool) -> None:
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
