"""The stage that distributes a vision tower's work: each rank encodes some of the pictures, and receives the embeddings
of its own placeholders.

Every rank of a group runs the tower once per modality, so that FSDP's gathers and the collectives of the backward are
the same on all: a rank without units encodes the smallest one and discards its embeddings.

Shape suffixes: B rows, n tokens of the sequence, L of this rank.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from longspan.comm.agree import gather_numbers
from longspan.comm.collectives import all_to_all_rows
from longspan.comm.mesh import SequenceSharding, group_name
from longspan.compat.reading import (
    ENCODER_OUTPUTS,
    encode_again,
    insert_rows,
    return_rows,
    text_part,
    tower_modules,
)
from longspan.compat.torch_api import to_device
from longspan.core.errors import LongspanError
from longspan.core.layout import split_by_cost
from longspan.hf.batch.documents import tokens_of
from longspan.hf.batch.host import read_on_host
from longspan.hf.cache.kv_cache import CachedInfo
from longspan.hf.forward.stage import ForwardCall, Stage
from longspan.hf.model.encoders import Encoder, Units
from longspan.hf.model.examples import rows_in, with_rows
from longspan.hf.model.rule import RuleEncoder
from longspan.hf.model.support import draws
from longspan.hf.model.vision import PICTURE_KEYS, PIXEL_KEYS, core_of

if TYPE_CHECKING:
    from longspan.hf.state import ParallelState


class VisionTower(Stage):
    """Replace a batch's pixels by the embeddings of this rank's placeholders."""

    def __init__(self, model: PreTrainedModel, state: ParallelState) -> None:
        self.traits, self.sp, self.core, self.state = state.traits, state.sp, core_of(model), state
        self.joint = False
        language = set(text_part(self.core).parameters())
        of_tower = {p for p in self.core.parameters() if p not in language}  # and a learnt newline
        self.others = [p for p in model.parameters() if p not in of_tower]
        tower = tower_modules(model)
        self.tower = {name: module for name, module in model.named_modules() if module in tower}
        self.found = dict[Encoder, Pictures]()  # of the forward
        self.inserted = list[RemovableHandle]()
        self.unused = list[Tensor]()  # outputs of the tower without rows, whose backward must run
        self.core.get_input_embeddings().register_forward_hook(self._join_unused)

    def reset(self) -> None:
        self.found, self.unused = {}, []
        encode_again(self.core)
        while self.inserted:
            self.inserted.pop().remove()

    def _join_unused(self, module: Any, args: Any, embeddings: Tensor) -> Tensor | None:
        """Add the sum of `unused`, which is 0, to the embeddings of tokens."""
        unused, self.unused = self.unused, []
        return torch.stack([x.sum() for x in unused]).sum().to(embeddings.dtype) + embeddings if unused else None

    def _is_joint(self) -> bool:
        """Whether replicas run the tower together, also one without pictures.

        FSDP gathers its weights on all replicas, and if nothing else is trained, a loss without pictures has no
        backward, for which the other replicas would wait.
        """
        if self.sp.data_size == 1 or self.state.gradients is None:
            return self.sp.data_size > 1
        return torch.is_grad_enabled() and not any(p.requires_grad for p in self.others)

    def check(self, call: ForwardCall) -> None:
        self.joint = self._is_joint()
        prompt = None if call.cache is None else call.cache.pictures
        if prompt is None:
            self.found = self._find(call, call.batch, call.batch.get("input_ids"), 0)
            return
        assert call.cache is not None
        past, (rows, new) = call.cache.kv_placement.length, tokens_of(call.batch).shape[:2]
        if past >= prompt.ids_Bn.shape[1]:  # generated tokens
            return
        if prompt.found is None:
            call.pictures |= prompt.batch  # with the first chunk
            ids_Bn = None if call.batch.get("input_ids") is None else prompt.ids_Bn
            prompt.found = self._find(call, call.batch | prompt.batch, ids_Bn, past)
        chunk = {encoder: x.of_chunk(encoder, self.core, past, new, rows) for encoder, x in prompt.found.items()}
        self.found = {encoder: x for encoder, x in chunk.items() if x is not None}

    def _find(
        self, call: ForwardCall, batch: Mapping[str, Any], ids_Bn: Tensor | None, past: int
    ) -> dict[Encoder, Pictures]:
        """Return the pictures of a batch; raise if they do not fit the model or the ids, of which `past` are cached."""
        if batch.get(ENCODER_OUTPUTS) is not None:
            raise LongspanError(f"`{ENCODER_OUTPUTS}` would be embeddings of all ranks' pictures; give the pixels")
        for name in ("vision_feature_layer", "vision_feature_select_strategy", "vision_aspect_ratio"):
            if batch.get(name) is not None:
                raise LongspanError(f"`{name}` is read from the model's config; set it there and leave it out")
        known = {key for encoder in self.traits.encoders for key in encoder.all_keys}
        unknown = next((key for key in PIXEL_KEYS if batch.get(key) is not None and key not in known), None)
        if unknown is not None:
            raise LongspanError(
                f"{self.traits.name} takes no `{unknown}`, only {', '.join(sorted(known))}; leave it out"
            )
        encoders = [encoder for encoder in self.traits.encoders if batch.get(encoder.pixels) is not None]
        if call.cache is None:
            self._refuse_unfilled(call, encoders)
        if not encoders:
            return {}
        if call.model.training:
            self._refuse_dropout()
        if ids_Bn is None:
            raise LongspanError(
                f"`{encoders[0].pixels}` with `inputs_embeds`: placeholders are found among ids; give `input_ids`"
            )
        batch = {**batch, "input_ids": ids_Bn}
        batch |= read_on_host(batch, ids=True)
        ids_Bn = batch["input_ids"]
        found, facts, crc = dict[Encoder, Pictures](), list[str](), 0
        for encoder in encoders:
            for key in PICTURE_KEYS:
                if not isinstance(x := batch.get(key), Tensor | None):
                    raise LongspanError(
                        f"`{key}` must be a tensor, got {type(x).__name__}; stack it as the processor does"
                    )
            units = encoder.units(self.core, batch)
            if not units.rows:
                raise LongspanError(f"`{encoder.pixels}` holds no {encoder.modality}; leave it out of such a batch")
            if 0 in units.rows:  # a tower raises, on the rank that encodes it
                raise LongspanError(
                    f"{encoder.modality} {units.rows.index(0)} of `{encoder.pixels}` is too small for the vision "
                    f"tower, which makes no embedding of it; enlarge it"
                )
            token = getattr(call.model.config, encoder.token)
            placeholders_Bn = ids_Bn == token
            rows = sum(units.rows)
            if past and int(placeholders_Bn[:, past:].sum()) == rows:  # pixels of the new turn alone
                placeholders_Bn[:, :past] = False
            given = int(placeholders_Bn.sum())
            if given != rows:
                raise LongspanError(
                    f"`input_ids` has {given} {encoder.modality} placeholders (id {token}), `{encoder.pixels}` gives "
                    f"{rows} embeddings; give as many placeholders as the processor makes, and cut none off"
                )
            spans = split_by_cost(units.patches, self.sp.size)
            call.patches[encoder.modality] = max(sum(units.patches[start:stop]) for start, stop in spans)
            numbers_Bn = placeholders_Bn.flatten().cumsum(0).view_as(ids_Bn) - 1
            found[encoder] = Pictures(batch, units, numbers_Bn.masked_fill(~placeholders_Bn, -1))
            facts.append(f"{len(units.rows)} {encoder.modality} units of {rows} embeddings")
            crc = zlib.crc32(placeholders_Bn.numpy().tobytes(), zlib.crc32(repr(units).encode(), crc))
        # How they split into units decides how much is sent where.
        call.pictures["pictures"] = f"{', '.join(facts)}, checksum {crc}"
        return found

    def _refuse_unfilled(self, call: ForwardCall, encoders: list[Encoder]) -> None:
        """Raise for placeholders without pixels, which would keep the embedding of their token."""
        ids = call.batch.get("input_ids")
        filled = {getattr(call.model.config, encoder.token) for encoder in encoders}
        for encoder in self.traits.encoders:
            token = getattr(call.model.config, encoder.token)
            count = 0 if ids is None or token in filled else int((ids == token).sum())
            if count:
                raise LongspanError(
                    f"`input_ids` has {count} {encoder.modality} placeholders (id {token}), and no `{encoder.pixels}` "
                    f"fills them; give the pixels, or leave the placeholders out"
                )

    def _refuse_dropout(self) -> None:
        for name, module in self.tower.items():
            if module.training and draws(module):
                raise LongspanError(
                    f"layer {name} of the vision tower has dropout, which would depend on the rank that encodes a "
                    f"picture; switch it off by longspan.parallelize(..., dropout=0.0) (train: `dropout: 0`), "
                    f"or call eval() on the tower"
                )
            if module.training and isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
                raise LongspanError(
                    f"layer {name} of the vision tower normalises over the batch, and so over the pictures that a rank "
                    f"encodes; call eval() on the tower"
                )

    def encode(self, call: ForwardCall) -> None:
        """Run the tower. Collective."""
        info = call.info
        whole = not info.sharded
        outputs = {}
        for encoder, everywhere in self._encoders(call):
            pictures = self.found.get(encoder)
            by_rule = isinstance(encoder, RuleEncoder) and not everywhere
            other = self._like_other_replica(encoder, pictures) if by_rule else None
            if pictures is not None:
                output = _embed(pictures, encoder, self.core, self.sp, whole=whole)
                if encoder.inside:
                    here_BL = call.inputs["input_ids"] == getattr(call.model.config, encoder.token)
                    self.inserted.append(insert_rows(self.core, here_BL, rows_in(output)))
                else:
                    outputs[encoder.modality] = output
                continue
            # Only another replica has such pictures. Placeholders without pixels keep the embedding of their token.
            tokens = tokens_of(call.batch)
            batch = encoder.smallest(self.core, tokens.device) if other is None else other
            pictures = Pictures(batch, encoder.units(self.core, batch), torch.full(tokens.shape[:2], -1))
            self.unused.append(rows_in(_embed(pictures, encoder, self.core, self.sp, whole=whole)))
        if self.traits.encoders and call.cache is not None:
            call.inputs = {key: value for key, value in call.inputs.items() if key not in PICTURE_KEYS}
        if outputs:
            # The model's forward inserts at my placeholders what its encoder functions return: these rows.
            pixels = {key: x for pictures in self.found.values() for key, x in pictures.batch.items()}
            returned = [encoder for encoder in self.found if encoder.modality in outputs]
            keys = {key for encoder in returned for key in encoder.all_keys if pixels.get(key) is not None}
            call.inputs |= {key: to_device(pixels[key][:1], self.sp.device) for key in keys}
            return_rows(self.core, outputs)

    def _like_other_replica(self, encoder: Encoder, pictures: Pictures | None) -> dict[str, Tensor]:
        """Return a picture of ones, of the shape of one that a replica has, for those that have none. Collective."""
        mine = None
        if pictures is not None:
            given = encoder.part(self.core, pictures.batch, 0, 1)
            mine = {
                key: (x.dtype, tuple(x.shape), None if x.is_floating_point() else x.tolist())
                for key, x in given.items()
            }
        every: list[Any] = [None] * dist.get_world_size(self.sp.host_group)
        dist.all_gather_object(every, mine, group=self.sp.host_group)
        described = next(x for x in every if x is not None)
        return {
            key: torch.ones(shape, dtype=dtype) if values is None else torch.tensor(values, dtype=dtype)
            for key, (dtype, shape, values) in described.items()
        }

    def _encoders(self, call: ForwardCall) -> list[tuple[Encoder, bool]]:
        """Return the encoders that run in this forward, and whether all replicas have pictures for them. Collective, if
        replicas run them together.
        """
        encoders = self.traits.encoders
        mine = everywhere = [int(encoder in self.found) for encoder in encoders]
        info = call.info
        prompt = info.cache.generated_from if isinstance(info, CachedInfo) else None
        generated = isinstance(info, CachedInfo) and prompt is not None and info.step.past >= prompt
        if self.joint and not generated:
            assert self.sp.host_group is not None
            rows = gather_numbers(mine, self.sp.host_group)
            mine, everywhere = ([of(column) for column in zip(*rows, strict=True)] for of in (max, min))
        runs = zip(encoders, mine, everywhere, strict=True)
        return [(encoder, bool(all_have)) for encoder, some, all_have in runs if some]

    def after(self, call: ForwardCall, output: Any) -> Any:
        """Remove the tower's output, of which this rank has only a part."""
        if not self.found or not isinstance(output, ModelOutput):
            return output
        kind: Any = type(output)
        parts = {f"{each.modality}_{name}" for each in self.traits.encoders for name in ("outputs", "hidden_states")}
        return kind(**{name: value for name, value in output.items() if name not in parts})


class EncodePictures(Stage):
    """Run the vision tower, when the memory options of the batch are chosen."""

    def __init__(self, vision: VisionTower) -> None:
        self.vision = vision

    def before(self, call: ForwardCall) -> None:
        self.vision.encode(call)


@dataclass(frozen=True)
class Pictures:
    """A modality's pictures in a forward, and the embedding of each token."""

    batch: Mapping[str, Any]  # with the encoder's keys
    units: Units  # what the tower can encode alone: an image, a tile of one, or a video frame
    numbers_Bn: Tensor  # into the units' embeddings, int64; -1: the token is no placeholder

    def of_chunk(self, encoder: Encoder, core: Any, start: int, new: int, rows: int) -> Pictures | None:
        """Return the units that `new` tokens from `start` need, in `rows` rows; None if they need none.

        Beams repeat each row of a prompt.
        """
        numbers_Bn = self.numbers_Bn[:, start : start + new]
        numbers_Bn = F.pad(numbers_Bn, (0, new - numbers_Bn.shape[1]), value=-1)  # drafted tokens
        numbers_Bn = numbers_Bn.repeat_interleave(rows // len(numbers_Bn), 0)
        sizes = torch.tensor(self.units.rows)
        units_Bn = torch.bucketize(numbers_Bn, sizes.cumsum(0), right=True)
        wanted = units_Bn[numbers_Bn >= 0].unique()
        if not len(wanted):
            return None
        shift = torch.zeros_like(sizes)  # by which the embeddings of a unit move up
        shift[wanted] = (sizes.cumsum(0) - sizes)[wanted] - (sizes[wanted].cumsum(0) - sizes[wanted])
        numbers_Bn = torch.where(numbers_Bn >= 0, numbers_Bn - shift[units_Bn], -1)
        chosen = wanted.tolist()
        units = Units(*(tuple(x[i] for i in chosen) for x in (self.units.patches, self.units.rows)))
        return Pictures(encoder.select(core, self.batch, chosen), units, numbers_Bn)


@dataclass
class PromptPictures:
    """The pictures of a prompt that `generate` may read in chunks; each encodes the units that it needs."""

    ids_Bn: Tensor  # of the whole prompt
    batch: dict[str, Any]  # batch keys of pictures
    found: dict[Encoder, Pictures] | None = None  # once the first chunk is checked


def _embed(pictures: Pictures, encoder: Encoder, core: Any, sp: SequenceSharding, *, whole: bool) -> Any:
    """Return the tower's output for my placeholders, in their order, of units that the ranks share out. Collective.

    Neighbouring units go to one rank, so that the most that a rank encodes is least; some ranks may have none.
    Embeddings are sent in one all-to-all, and their gradients back in another.
    `whole`: every rank holds all tokens.
    """
    units, rank = pictures.units, sp.rank
    spans = split_by_cost(units.patches, sp.size)  # the units of each rank
    ends = [0, *itertools.accumulate(units.rows)]
    rows_of_ranks = [(ends[start], ends[stop]) for start, stop in spans]  # and their embeddings
    numbers_of_ranks = [_numbers_of(pictures.numbers_Bn, None if whole else sp, rank) for rank in range(sp.size)]
    needed = [x.unique() for x in numbers_of_ranks]  # a beam needs the same as the others
    first, last = rows_of_ranks[rank]
    sent = [x[(x >= first) & (x < last)] - first for x in needed]  # to each rank: which of my embeddings
    mine = needed[rank]
    received = [int(((mine >= a) & (mine < b)).sum()) for a, b in rows_of_ranks]

    start, stop = spans[rank]
    if start == stop:  # idle: encode the smallest, select none of it; its backward runs
        start = units.patches.index(min(units.patches))
        stop = start + 1
    output = encoder.encode(core, pictures.batch, start, stop, sp.device)
    rows = rows_in(output)
    rows = rows[to_device(torch.cat(sent), rows.device)]
    if sp.size > 1:
        assert sp.group is not None
        rows = all_to_all_rows(rows, [len(x) for x in sent], received, group_name(sp.group))
    if not torch.equal(mine, numbers_of_ranks[rank]):  # repeated, or in another order
        rows = rows[to_device(torch.bucketize(numbers_of_ranks[rank], mine), rows.device)]
    return with_rows(output, rows)


def _numbers_of(numbers_Bn: Tensor, sp: SequenceSharding | None, rank: int) -> Tensor:
    """Return the indices of the embeddings of a rank's placeholders, in their order."""
    n = numbers_Bn.shape[1]
    spans = ((0, n),) if sp is None else sp.layout.spans(n, rank)
    numbers_BL = torch.cat([numbers_Bn[:, :0], *(numbers_Bn[:, start:stop] for start, stop in spans)], 1)
    return numbers_BL[numbers_BL >= 0]
