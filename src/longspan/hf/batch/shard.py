"""Shard a training batch by tokens.

`read_batch`, which the stage `ShardBatch` calls in its `check`, checks a whole batch, shifts its labels (a rank's last
token predicts the next rank's first) and reads its facts; `cut_batch`, called in its `before`, then only cuts. Layers
get the facts in one value, `SequenceInfo`, through the model's keyword arguments. They are never stored on the model:
activation checkpointing may rerun a layer after the next batch has arrived.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longspan.attn.segments import Segments
from longspan.attn.tree import Trees, along_paths, children, read_trees
from longspan.comm.arguments import check_integers, check_sharding, describe
from longspan.comm.mesh import SequenceSharding
from longspan.comm.shard import shard
from longspan.compat.torch_api import to_device
from longspan.core.errors import LongspanError
from longspan.core.formatting import listed
from longspan.core.validation import check_flag
from longspan.hf.batch.documents import BORDER_KEYS, ID_KEYS, LONGEST_KEYS, VisibleKeys, segments_of, tokens_of
from longspan.hf.batch.host import TREE_KEYS, read_on_host
from longspan.hf.model.support import HELP
from longspan.hf.model.vision import PICTURE_KEYS
from longspan.losses.cross_entropy import IGNORE as IGNORE


@dataclass(frozen=True, eq=False, repr=False)
class SequenceInfo:
    """Facts about one whole batch that every layer of its forward needs, equal on the ranks that share it.

    What stages alone need is in `ForwardCall`; what holds for all forwards of a model, in `ModelTraits`.
    """

    sp: SequenceSharding  # of the ranks that share the batch: of an elastic batch narrower than the model's
    rows: int
    length: int  # tokens of the sequence, without the padding that `longspan.comm.shard` adds
    segments: Segments | None  # documents and padding; None if every token of a row may see its whole row
    max_position: int  # the largest position id of the batch
    # For each run of `segments` the position id of its first token, if position ids restart; None: all 0.
    starts: tuple[tuple[int, ...], ...] | None = None
    visible: VisibleKeys | None = None  # which keys are real, if a mask has zeros between the ones of a row
    bidirectional: Segments | None = None  # each row's spans of tokens that see each other in a causal model
    nodes: Trees | None = None  # trees of shared prefixes, whose tokens see their own path only
    elastic: bool = False  # the batch has a `sequence_width`, which may be that of all ranks
    padding: Tensor | None = None  # which of my tokens are padding without a label, bool `[B, L]`
    # Attention plans and tables of fragments, by kind of layer.
    prepared: dict[Any, Any] = dataclasses.field(default_factory=dict)

    # No field: False in a `CachedInfo` whose few new tokens every rank computes.
    sharded = True

    @property
    def new(self) -> int:
        """Tokens of this forward: with a cache, those behind the cached ones."""
        return self.length

    @property
    def new_segments(self) -> Segments | None:
        """`segments` of the tokens of this forward."""
        return self.segments

    @property
    def local_length(self) -> int:
        """Tokens of each rank in this forward."""
        return self.sp.layout.local_length(self.new) if self.sharded else self.new

    def gather(self, x_BL: Tensor) -> Tensor:
        """Return `[B, n, ...]` of all tokens, on every rank."""
        return self.sp.gather(x_BL, dim=1, length=self.length)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out `sp`: a loader's worker sends the batch to its rank, and process groups cannot be sent."""
        return {name: value for name, value in vars(self).items() if name != "sp"}


def take_info(layer: str, kwargs: dict[str, Any]) -> SequenceInfo:
    """Take the facts of the batch out of the keyword arguments of a layer's call.

    They come with the call, not from the model: activation checkpointing may run a layer again after the next batch has
    started, and runs no hooks of the model then. They come as `longspan`, or in place of an argument that every layer
    passes on (`carry_info`).
    """
    names = [name for name, value in kwargs.items() if isinstance(value, SequenceInfo)]
    if not names:
        raise LongspanError(f"layer {layer} does not pass on keyword arguments, so it cannot know its batch; {HELP}")
    info: SequenceInfo = kwargs[names[0]]
    kwargs.update(dict.fromkeys(names))
    kwargs.pop("longspan", None)
    return info


def carry_info(kwargs: dict[str, Any], info: SequenceInfo | None) -> dict[str, Any]:
    """Put the facts of the batch in place of a layer's `attention_mask`, which is None or all ones here, and which
    layers pass on that drop other keyword arguments.
    """
    info = kwargs.get("longspan", info)
    return kwargs if info is None or "attention_mask" not in kwargs else {**kwargs, "attention_mask": info}


WIDTH = "sequence_width"
"""The key of a batch that is the number of ranks that share it."""

_INPUTS = ("input_ids", "inputs_embeds", "token_type_ids", "per_layer_inputs")
_PER_TOKEN = {
    *_INPUTS, "labels", "shift_labels", "loss_weights", "position_ids", "attention_mask", *ID_KEYS, *TREE_KEYS,
}  # fmt: skip
_PER_BATCH = {*BORDER_KEYS, *LONGEST_KEYS}
_CUT = (*_INPUTS, "labels", "loss_weights", "position_ids")  # of `read_batch`


def check_batch(name: str, batch: Any) -> None:
    """Raise unless `batch` is a mapping, before its contents are checked."""
    if not isinstance(batch, Mapping):
        raise LongspanError(f"`{name}` must be a dict of tensors such as {{'input_ids': ids}}, got {describe(batch)}")


def has_labels(batch: Mapping[str, Any]) -> bool:
    """Return whether a whole batch has labels, shifted or not."""
    return batch.get("labels") is not None or batch.get("shift_labels") is not None


def sharding_of(batch: Mapping[str, Any], sp: SequenceSharding) -> SequenceSharding:
    """Return the sharding that a batch asks for: of `sequence_width` ranks, by default `sp` itself."""
    width = batch.get(WIDTH)
    if width is None:
        return sp
    if width in sp.widths and not sp.has_widths:
        raise LongspanError(
            f"`{WIDTH}={width}` needs the groups of all widths, which the ranks make together; call sp.of_width(1) on "
            f"every rank first, or take batches from longspan.elastic_batches"
        )
    return sp.of_width(width)


def shard_batch(batch: Mapping[str, Any], sp: SequenceSharding, *, shift: bool = True) -> dict[str, Any]:
    """Shard a batch for a model of your own; a parallelized model takes the whole batch, and shards it itself.

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
        The same keys with this rank's tokens; `labels` and `loss_weights` shifted; `position_ids` always present and
        global; the `attention_mask` and marks of documents replaced by the key `longspan`, a `SequenceInfo`.

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
    pictures = next((key for key in PICTURE_KEYS if batch.get(key) is not None), None)
    if pictures is not None:
        raise LongspanError(
            f"`{pictures}` cannot be cut: which rank needs which picture depends on the model; pass the whole batch to "
            f"the parallelized model"
        )
    whole, info = read_batch({**batch, **read_on_host(batch)}, sharding_of(batch, sp), shift=shift)
    cut, info = place_batch(cut_batch(whole, info), info, tokens_of(batch).device)
    return {**cut, "longspan": info}


def read_batch(
    batch: Mapping[str, Any], sp: SequenceSharding, *, shift: bool = True, own_positions: Tensor | None = None
) -> tuple[dict[str, Any], SequenceInfo]:
    """Check a batch that the ranks of `sp` share, and return it whole, with its facts: in `ShardBatch.check`.

    The batch must contain what `read_on_host` returns. In the result `labels` and `loss_weights` are shifted, and the
    marks that the facts contain are left out. `own_positions` are ids that the model computes itself if the batch has
    none; they mark no documents.
    """
    rows, n = _batch_shape(batch)
    _check_lengths(batch, rows, n)
    trees = _trees_of(batch)
    positions = batch.get("position_ids")
    if positions is not None and positions.dim() == 1:
        positions = positions[None]
    if positions is None and trees is not None:
        positions = along_paths(trees, torch.arange(n))[0]
    of_documents = None if trees is not None else _text_positions(positions)
    segments, starts, visible = segments_of(batch, of_documents, rows, n)
    labels, weights = _labels_of(batch, shift, trees)
    if labels is not None and segments is not None:
        _refuse_labels_on_padding(labels, segments, n, shift)
    positions = own_positions if positions is None else positions
    max_position = n - 1 if positions is None else int(rotary_positions(positions).max())
    info = SequenceInfo(
        sp, rows, n, segments, max_position, starts, visible, nodes=trees, elastic=batch.get(WIDTH) is not None
    )
    replaced = {*_PER_TOKEN, *_PER_BATCH, "cache_position", WIDTH}
    whole = {key: value for key, value in batch.items() if key not in replaced}
    of_tokens = {key: batch.get(key) for key in _INPUTS}
    of_tokens |= {"labels": labels, "loss_weights": weights, "position_ids": positions}
    return whole | {key: x for key, x in of_tokens.items() if x is not None}, info


def cut_batch(whole: Mapping[str, Any], info: SequenceInfo) -> dict[str, Any]:
    """Return my tokens of what `read_batch` returned, in `ShardBatch.before`; `position_ids` are always present."""
    cut = dict(whole)
    for key in _CUT:
        if key in whole:
            dim, pad = -1 if key == "position_ids" else 1, IGNORE if key == "labels" else 0
            cut[key] = _part(whole[key], info.sp, pad, dim)
    if "position_ids" not in cut:
        cut["position_ids"] = info.sp.positions(info.length)[None]
    return cut


def place_batch(
    cut: Mapping[str, Any], info: SequenceInfo, device: torch.device
) -> tuple[dict[str, Any], SequenceInfo]:
    """Move my tokens, and what layers read of the whole batch, to a device."""
    if info.visible is not None:
        info = dataclasses.replace(info, visible=VisibleKeys(to_device(info.visible.mask, device)))
    return {key: to_device(x, device) if isinstance(x, Tensor) else x for key, x in cut.items()}, info


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


def fill_padding(
    cut: dict[str, Any],
    whole: Mapping[str, Any],
    info: SequenceInfo,
    placeholders: tuple[int, ...],
    *,
    shift: bool,
) -> SequenceInfo:
    """Replace my padding in every input of `cut`, on the device, by the first real token of `whole`; return `info` with
    it marked.

    The gradient at padding is 0, but 0 times an infinite derivative is NaN: a model that divides by its hidden states
    has an infinite derivative where an embedding is 0 (often that of the padding token). Padding that predicts a token
    (the last one before a row begins) is computed as in one process: any row's, if there are no `labels`.
    A placeholder is no filler: the language model would expect an embedding for the copy.
    """
    real_Bn = _in_rows(info)
    if info.local_length * info.sp.size == info.length and bool(real_Bn.all()):
        return info
    tokens, ids, fillers_Bn = tokens_of(cut), whole.get("input_ids"), real_Bn
    if placeholders and ids is not None:
        fillers_Bn = real_Bn & ~torch.isin(ids, torch.tensor(placeholders))
        if not fillers_Bn.any():
            return info
    b, i = divmod(int(fillers_Bn.flatten().int().argmax()), info.length)
    labels = cut.get("labels")
    real_BL = to_device(_part(_in_rows(info, before=int(shift and labels is None)), info.sp), tokens.device)
    if labels is not None:
        real_BL = real_BL | (labels != IGNORE)
    padding_BL = ~real_BL
    for placeholder in placeholders if ids is not None else ():
        padding_BL &= tokens != placeholder
    for key in _INPUTS:
        if key in cut:
            filler = to_device(whole[key].detach()[b, i], tokens.device)
            cut[key] = torch.where(padding_BL[(...,) + (None,) * (cut[key].dim() - 2)], filler, cut[key])
    if "position_ids" in whole and info.segments is not None:  # [rows, n], or [axes, rows, n]
        positions = whole["position_ids"]  # those of `shard`'s own padding are 0
        filler = to_device(positions[..., min(b, positions.shape[-2] - 1), i], tokens.device)
        cut["position_ids"] = torch.where(padding_BL, filler[..., None, None], cut["position_ids"])
    return dataclasses.replace(info, padding=padding_BL)


def _part(x: Tensor, sp: SequenceSharding, pad_value: float = 0, dim: int = 1) -> Tensor:
    """Return my tokens of `x`. Copy ids and flags: a view would keep the full sequence alive.

    Embeddings are not copied: the caller keeps them alive for their gradient anyway.
    """
    part = shard(x, sp, dim, pad_value)
    return part if sp.size == 1 or x.is_floating_point() else part.clone()


def _batch_shape(batch: Mapping[str, Any]) -> tuple[int, int]:
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
    return tokens.shape[0], tokens.shape[1]


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
                    hint = "; labels of rows are not cut: leave them out here"
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


def real_tokens(info: SequenceInfo) -> Tensor:
    """Return which of my tokens are real: neither padding of the batch nor of `shard`; bool [B, L]."""
    real = to_device(_in_rows(info), info.sp.device)
    real = real if info.visible is None else real & info.visible.mask.to(real.device)
    return _part(real, info.sp)


def _in_rows(info: SequenceInfo, before: int = 0) -> Tensor:
    """Return which tokens are in a run of `info.segments`, or at most `before` tokens before one; bool [B, n]."""
    inside = torch.zeros(info.rows, info.length, dtype=torch.bool)
    for b, row in enumerate(info.segments or (((0, info.length),),) * info.rows):
        for start, stop in row:
            inside[b, max(0, start - before) : stop] = True
    return inside


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
