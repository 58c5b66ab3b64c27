"""Accept a multimodal model by rule: find its encoders, and check on a small copy that the rule holds.

The rule: encoder functions (`get_image_features`, ...) return embeddings for placeholder tokens, the forward inserts
them, also if they were computed before (`return_rows`), and the language model sees nothing else of the pictures. A
forward that changes them first, or adds some of its own (Gemma-3n's to a short sound), is stopped where it would insert
them (`rows_of_forward`), and they are inserted at the language model's entrance (`insert_rows`).

Shape suffixes: B rows, n tokens of the sequence.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from longspan.compat.reading import encode_again, insert_rows, return_rows, text_part, vision_core
from longspan.compat.torch_api import to_device
from longspan.compat.transformers_api import new_model, own_positions, set_attention
from longspan.core.errors import LongspanError
from longspan.hf.model.encoders import Encoder, Units
from longspan.hf.model.examples import MODALITIES, encoder_arguments, example, rows_in, run_encoder, sizes_in, with_rows
from longspan.hf.model.pretrained import first_line
from longspan.hf.model.small import shrunk

_TOKENS = ("{}_token_id", "{}_token_index", "{}_patch_id")
"""Entries of a config with the id of a modality's placeholders."""


@dataclass(frozen=True)
class RuleEncoder(Encoder):
    """Whatever the model's encoder function accepts. A unit is a picture or sound, if they can be encoded apart."""

    keys: tuple[str, ...]  # batch keys that the encoder function reads
    apart: bool
    kind: Any = field(compare=False)  # class of the module with the function
    frames: int = 1  # of an example's video
    inside: bool = False  # whether the forward changes or adds rows before it inserts them

    @property
    def all_keys(self) -> tuple[str, ...]:
        return self.keys

    def units(self, core: Any, batch: Mapping[str, Any]) -> Units:
        given, cuts = self._given(batch), self._cuts(batch)
        rows, pixels = self._rows(core, given), given[self.pixels]
        if cuts is None:
            return Units((self._patches(core, pixels),), (sum(rows),))
        if len(rows) != len(cuts):
            rows = [sum(self._rows(core, self.part(core, batch, i, i + 1))) for i in range(len(cuts))]
        return Units(tuple(self._patches(core, pixels[start:stop]) for start, stop in cuts), tuple(rows))

    def _patches(self, core: Any, pixels: Tensor) -> int:
        """Return the patches, or frames of sound, that some pixels have: their cost."""
        if self.modality == "audio":
            return int(len(pixels) * max(pixels.shape[1:]))
        if pixels.dim() < 4:
            return pixels.numel() // pixels.shape[-1]
        patch = getattr(getattr(core.config, "vision_config", None), "patch_size", None) or pixels.shape[-1]
        side = patch if isinstance(patch, int) else patch[0]
        return max(1, pixels.numel() // (pixels.shape[-3] * side**2))

    def part(self, core: Any, batch: Mapping[str, Any], start: int, stop: int) -> dict[str, Any]:
        given, cuts = self._given(batch), self._cuts(batch)
        if cuts is None or (start, stop) == (0, len(cuts)):
            return given
        first, last = cuts[start][0], cuts[stop - 1][1]
        return {key: x[start:stop] if len(x) == len(cuts) else x[first:last] for key, x in given.items()}

    def encode(self, core: Any, batch: Mapping[str, Any], start: int, stop: int, device: torch.device) -> Any:
        part = {key: to_device(x, device) for key, x in self.part(core, batch, start, stop).items()}
        return run_encoder(core, self.modality, part, self.inside)

    def smallest(self, core: Any, device: torch.device) -> dict[str, Any]:
        found = example(core, self.modality, torch.Generator().manual_seed(0), 1, self.frames, self.inside)
        if found is None:
            raise LongspanError(f"{self.kind.__name__}: longspan cannot make a small {self.modality} for it")
        return {key: x.to(device) if x.is_floating_point() else x for key, x in found.items()}

    def _given(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        return {key: batch[key] for key in self.keys if batch.get(key) is not None}

    def _cuts(self, batch: Mapping[str, Any]) -> list[tuple[int, int]] | None:
        """Return the entries of the first dim of each picture's pixels; None if pictures cannot be encoded apart."""
        return pictures_in(self._given(batch), self.pixels) if self.apart else None

    def _rows(self, core: Any, given: dict[str, Any]) -> list[int]:
        """Return the embeddings of each picture, or of all, counted on the meta device."""
        config = _Config(core.config)
        counted = _count(self.kind, config, self.modality, self.inside, _Shapes(given))
        if counted is None:  # some encoders drop pictures of zeros, which pad a row
            values = {key: x.float().cpu() if x.is_floating_point() else x for key, x in given.items()}
            counted = sizes_in(run_encoder(_twin(self.kind, config), self.modality, values, self.inside))
        return counted


def pictures_in(given: Mapping[str, Tensor], pixels: str) -> list[tuple[int, int]] | None:
    """Return where each picture begins and ends in the first dim of the pixels; None if that is not known."""
    n = len(given[pixels])
    for key, x in given.items():
        if key != pixels and x.dim() == 2 and x.shape[1] in (2, 3) and not x.is_floating_point():
            sizes = x.prod(1).tolist()
            if sum(sizes) == n and all(len(y) in (n, len(x)) for y in given.values()):
                ends = torch.tensor(sizes).cumsum(0).tolist()
                return list(zip([0, *ends], ends, strict=False))
    if all(len(x) == n for x in given.values()):
        return [(i, i + 1) for i in range(n)]
    return None


class _Shapes:
    """Entries of a batch, equal if they make equally many embeddings: by shapes, and values of integers."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.given = given
        self.key = tuple(
            (key, tuple(x.shape), None if x.is_floating_point() else tuple(x.flatten().tolist()))
            for key, x in given.items()
        )

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Shapes) and self.key == other.key


@functools.lru_cache(maxsize=1024)
def _count(kind: Any, config: _Config, modality: str, inside: bool, shapes: _Shapes) -> list[int] | None:
    given, shapes.given = shapes.given, {}  # keep no pixels
    given = {key: x.to("meta", torch.float32) if x.is_floating_point() else x for key, x in given.items()}
    try:
        return sizes_in(run_encoder(_twin(kind, config), modality, given, inside))
    except Exception:  # of any kind: the function reads values that do not exist on the meta device
        return None


@functools.lru_cache(maxsize=8)
def _twin(kind: Any, config: _Config) -> Any:
    """Return a module of the class on the meta device."""
    with torch.device("meta"):
        return kind(copy.deepcopy(config.config)).eval()


class _Config:
    """A config as the key of a cache: equal if all values are."""

    def __init__(self, config: Any) -> None:
        self.config, self.key = copy.deepcopy(config), config.to_json_string(use_diff=False)
        set_attention(self.config, "eager")  # every module has it

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Config) and self.key == other.key


def encoders_by_rule(model: PreTrainedModel) -> tuple[RuleEncoder, ...]:
    """Return the modalities of a model for which the rule holds.

    Raises:
        LongspanError: if there are none, with the reason.
    """
    found, problem = _checked(plain_class(model), _Config(model.config))
    if problem is not None:
        raise LongspanError(f"{type(model).__name__} {problem}")
    return found


def plain_class(module: nn.Module) -> Any:
    """Return a module's class, without that of FSDP."""
    return next(kind for kind in type(module).__mro__ if not kind.__name__.startswith("FSDP"))


@functools.lru_cache(maxsize=64)
def _checked(kind: Any, config: _Config) -> tuple[tuple[RuleEncoder, ...], str | None]:
    """Return the encoders of a class and config for which the rule holds, or why there are none.

    A small copy with random weights is checked on the CPU, so the answer is the same on every rank.
    """
    found, problems = list[RuleEncoder](), list[str]()
    with torch.random.fork_rng(devices=[]), contextlib.ExitStack() as stack:
        stack.enter_context(torch.device("cpu"))
        torch.manual_seed(0)
        try:
            model = new_model(kind, shrunk(config.config, {}), torch.float32).eval()
        except Exception as error:  # of any kind
            return (), f"cannot be checked: no small copy of it can be made ({first_line(error)[:120]})"
        _enlarge(model)
        for modality in MODALITIES:
            failed = list[str]()
            of = [(2, False), (1, False)] if modality == "video" else [(1, False), (1, True)]
            for frames, inside in of:
                try:
                    encoder = _try(model, modality, frames, inside)
                except LongspanError as error:
                    failed.append(str(error))
                else:
                    found += [] if encoder is None else [encoder]
                    break
            else:
                problems.append(failed[0])
                if modality == "image" and "otherwise" in failed[0]:  # so may videos, whatever their types are
                    return (), failed[0]
    if found:
        return tuple(found), None
    return (), problems[0] if problems else "has no encoder of images, videos or audio that longspan finds"


@torch.no_grad()
def _enlarge(model: nn.Module) -> None:
    """Enlarge the weights so that pictures matter."""
    for p in model.parameters():
        if p.dim() > 1 and 0 < (std := float(p.std())) < 0.1:
            p.mul_(min(0.15, 1 / math.sqrt(p.shape[-1])) / std)


def _try(model: Any, modality: str, frames: int, inside: bool) -> RuleEncoder | None:
    """Return a modality's encoder; None if the model has none; raise if the rule does not hold."""
    core = vision_core(model)
    keys = encoder_arguments(core, modality)
    if not keys:
        return None
    token = next(
        (name for form in _TOKENS if isinstance(getattr(model.config, name := form.format(modality), None), int)), None
    )
    if token is None:
        raise LongspanError(f"names no token that stands for the embeddings of its {modality}s")
    given = example(core, modality, torch.Generator().manual_seed(0), frames=frames, inside=inside)
    if given is None:
        raise LongspanError(f"reads {modality}s from {', '.join(keys)} in a way that longspan does not know")
    encoder = RuleEncoder(modality, keys[0], token, tuple(keys), True, plain_class(core), inside=inside)
    with torch.no_grad():
        whole = run_encoder(core, modality, given, inside)
        units = pictures_in(given, keys[0])
        parts = [] if units is None else [encoder.part(core, given, i, i + 1) for i in range(len(units))]
        rows = rows_in(whole)
        try:
            apart = [rows_in(run_encoder(core, modality, part, inside)) for part in parts]
            independent = bool(parts) and _close(torch.cat(apart), rows)
        except Exception:  # of any kind
            independent = False
        encoder = dataclasses.replace(encoder, apart=independent, frames=frames)
        sizes = [len(x) for x in apart] if independent else sizes_in(whole)
        _Check(model, core, encoder, getattr(model.config, token), given, whole, sizes).run()
        try:
            counted = sum(encoder.units(core, given).rows)
        except Exception as error:  # of any kind
            raise LongspanError(
                f"makes embeddings of its {modality}s whose number is known too late ({first_line(error)[:120]})"
            ) from error
        assert counted == len(rows), (counted, len(rows))
    return encoder


def _close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and float((a - b).abs().max()) <= 1e-4 * max(1e-6, float(b.abs().max()))


class _Check:
    """Compare a small model with what ranks would compute of it."""

    def __init__(
        self,
        model: Any,
        core: Any,
        encoder: RuleEncoder,
        token: int,
        given: Mapping[str, Any],
        output: Any,
        sizes: list[int],
    ) -> None:
        self.model, self.core, self.encoder, self.token = model, core, encoder, token
        self.modality = modality = encoder.modality
        self.given, self.output, self.rows = given, output, rows_in(output)
        g = torch.Generator().manual_seed(1)
        first = list[int]()
        for size in sizes:
            first += [*torch.randint(3, 20, (3,), generator=g).tolist(), *self._start(), *[token] * size]
        first += torch.randint(3, 20, (5,), generator=g).tolist()
        second = torch.randint(3, 20, (len(first),), generator=g).tolist()
        self.ids = torch.tensor([first, second])
        self.kinds = (self.ids == token).long() * (MODALITIES.index(modality) + 1)
        accepted = inspect.signature(model.forward).parameters
        self.mask = torch.ones_like(self.ids)
        self.mask[1, :2] = 0  # padding
        self.batch = {"input_ids": self.ids, "attention_mask": self.mask, **given}
        self.batch |= {name: self.kinds for name in ("mm_token_type_ids", "token_type_ids") if name in accepted}

    def _start(self) -> list[int]:
        """Return the token before a picture or sound, by which some models find where to count positions anew."""
        names = (f"{self.modality}_start_token_id", *(("vision_start_token_id",) * (self.modality != "audio")))
        return [x for name in names if isinstance(x := getattr(self.model.config, name, None), int)][:1]

    def run(self) -> None:
        try:
            expected, seen = self._forward(self.batch)
        except Exception as error:  # of any kind
            raise LongspanError(
                f"cannot be checked: its small copy does not run ({first_line(error)[:120]})"
            ) from error
        everything = torch.arange(self.ids.shape[1])
        positions = self._positions()
        text = torch.where(self.ids == self.token, 5, self.ids)
        try:
            found, _ = self._part(everything, positions)
            if not _equal_masks(
                seen.get("attention_mask"), self._part(everything, positions, text)[1]["attention_mask"]
            ):
                raise LongspanError(
                    f"lets the tokens of its {self.modality}s see each other, or other tokens see them, otherwise than "
                    f"text"
                )
            if not _close(found[self.mask == 1], expected[self.mask == 1]):
                raise LongspanError(f"uses its {self.modality}s otherwise than as embeddings of their placeholders")
            third = len(everything) // 3
            for mine in (torch.cat([everything[:third], everything[2 * third :]]), everything[third : 2 * third]):
                self._compare(seen, self._part(mine, positions)[1], mine)
        except LongspanError:
            raise
        except Exception as error:  # of any kind
            raise LongspanError(f"does not run on a part of its tokens ({first_line(error)[:120]})") from error

    def _positions(self) -> Tensor:
        own = own_positions(self.model)
        found = None if own is None else own(self.batch, 0)
        return torch.arange(self.ids.shape[1])[None] if found is None else found

    def _part(self, mine: Tensor, positions: Tensor, ids: Tensor | None = None) -> tuple[Tensor, dict[str, Any]]:
        """Run some tokens as a rank does: `ids` are others than those with pictures."""
        of_all = self.ids if ids is None else ids
        before = (of_all == self.token).flatten().cumsum(0).view_as(of_all) - 1
        kinds = torch.where(of_all == self.ids, self.kinds, 0)
        part, chosen = of_all[:, mine], before[:, mine]
        batch: dict[str, Any] = {
            "input_ids": part,
            "attention_mask": self.mask[:, mine],
            "position_ids": positions[..., mine],
        }
        batch |= {"token_type_ids": kinds[:, mine]} if "token_type_ids" in self.batch else {}
        output = with_rows(self.output, self.rows[chosen[part == self.token]])
        with contextlib.ExitStack() as stack:
            if self.encoder.inside:
                stack.callback(insert_rows(self.core, part == self.token, rows_in(output)).remove)
            else:
                batch |= {key: x[:1] for key, x in self.given.items()}
                return_rows(self.core, {self.modality: output})
                stack.callback(encode_again, self.core)
            return self._forward(batch)

    def _forward(self, batch: Mapping[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """Return the logits, and what the language model was called with."""
        text, seen = text_part(self.core), dict[str, Any]()
        forward = text.forward

        def recording(*args: Any, **kwargs: Any) -> Any:
            seen.update(dict(zip(inspect.signature(forward).parameters, args, strict=False)) | kwargs)
            return forward(*args, **kwargs)

        text.forward = recording
        try:
            return self.model(**batch, use_cache=False).logits, seen
        finally:
            del text.forward

    def _compare(self, whole: Mapping[str, Any], part: Mapping[str, Any], mine: Tensor) -> None:
        before = (self.ids == self.token).flatten().cumsum(0).view_as(self.ids) - 1
        chosen = before[:, mine][self.ids[:, mine] == self.token]
        for name, x in _tensors(whole):
            if "mask" in name.split(".")[0] and name.split(".")[0] != "visual_pos_masks":
                continue
            y = dict(_tensors(part)).get(name)
            expected = self._cut(x, mine, chosen)
            if name == "position_ids" and y is not None:  # the model takes what it is given; `run` compares the logits
                continue
            if (
                y is None
                or y.shape != expected.shape
                or not (_close(y.float(), expected.float()) if y.numel() else True)
            ):
                raise LongspanError(
                    f"gives its language model `{name}`, which a part of the tokens cannot compute like all of them"
                )

    def _cut(self, x: Tensor, mine: Tensor, chosen: Tensor) -> Tensor:
        n, rows = self.ids.shape[1], len(self.rows)
        for dim, size in enumerate(x.shape):
            if size == n:
                return x.index_select(dim, mine)
        return x[chosen] if x.dim() and len(x) == rows else x


def _tensors(seen: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(seen, Tensor):
        yield name, seen
    items = seen.items() if isinstance(seen, Mapping) else enumerate(seen) if isinstance(seen, list | tuple) else ()
    for key, x in items:
        yield from _tensors(x, f"{name}.{key}" if name else str(key))


def _equal_masks(a: Any, b: Any) -> bool:
    return all(
        (x is None) == (y is None) and (x is None or (x.shape == y.shape and torch.equal(x, y)))
        for x, y in zip(_leaves(a), _leaves(b), strict=True)
    )


def _leaves(mask: Any) -> list[Any]:
    return [x for key in sorted(mask) for x in _leaves(mask[key])] if isinstance(mask, Mapping) else [mask]
