"""RoPE scaling: extend a model beyond its original positions, the same way in `plan`, `train` and `verify`.

Rotary embeddings rotate queries and keys by angles that the model has learnt for its original positions. By a factor
over these positions, `linear` divides all angles, `dynamic` raises the base with the length of the sequence, `yarn`
divides the slow angles only, and `longrope` divides each angle by its own number.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from longspan.core.errors import LongspanError
from longspan.core.reading import OneFlag
from longspan.core.validation import LARGEST_COUNT, check_number, existing_path, read_text

RopeKind = Literal["linear", "dynamic", "yarn", "longrope"]
RopeChoice = Literal["as-is", "auto", "linear", "dynamic", "yarn", "longrope"]

KINDS: tuple[RopeKind, ...] = get_args(RopeKind)

ONLY: dict[str, tuple[RopeKind, ...]] = {"phi3": ("longrope",)}
"""The kinds that transformers supports for a model type, if not all."""

_LARGEST_FACTOR = 1 << 20
_STATES_ITS_ORIGINAL = ("yarn", "longrope", "llama3")


@dataclass(frozen=True)
class RopeAsked(OneFlag):
    """The requested scaling: `yarn,factor=4`, or in YAML `{scaling: yarn, factor: 4}`."""

    # `as-is`: that of the model's config. `auto`: if the context needs it, yarn, or linear if the config has linear. Or
    # a kind.
    scaling: RopeChoice = "as-is"
    factor: float | None = None  # positions over original positions; None: the smallest integer that the context needs
    original: int | None = None  # positions before any scaling; None: from the config
    file: str = ""  # of longrope: JSON with "short_factor" and "long_factor", or a config.json that has them
    short: tuple[float, ...] = field(init=False, default=())  # its divisors of each angle, in sequences of at most the
    long: tuple[float, ...] = field(init=False, default=())  # original positions, and in longer ones

    def __post_init__(self) -> None:
        if self.scaling == "as-is" and (self.factor, self.original, self.file) != (None, None, ""):
            raise LongspanError(f"{self} has options of a scaling; choose one first: auto, {', '.join(KINDS)}")
        if self.factor is not None:
            check_number("factor", self.factor, 1, _LARGEST_FACTOR)
        if self.original is not None:
            check_number("original", self.original, 1, LARGEST_COUNT)
        if self.file and self.scaling != "longrope":
            raise LongspanError(f"file={self.file} is for longrope, and the scaling is {self.scaling}")
        if self.scaling == "longrope" and not self.file:
            raise LongspanError(
                "longrope needs a divisor for each angle, found by a search for each model; give "
                "longrope,file=FILE, JSON with short_factor and long_factor, or use yarn"
            )
        if self.file:
            for name, divisors in zip(("short", "long"), _read_factors(Path(self.file)), strict=True):
                object.__setattr__(self, name, divisors)


AS_IS, AUTO = RopeAsked(), RopeAsked("auto")


def _read_factors(path: Path) -> tuple[tuple[float, ...], tuple[float, ...]]:
    flag = "the longrope file"
    if existing_path(flag, str(path)) is None:
        raise LongspanError(f"{flag} {path} does not exist; give JSON with short_factor and long_factor")
    try:
        content = json.loads(read_text(flag, path))
        table = _parameters(content) or content
        short, long = (tuple(map(float, table[key])) for key in ("short_factor", "long_factor"))
    except LongspanError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise LongspanError(
            f"{flag} {path} cannot be used: {type(error).__name__}: {error}; give JSON with the lists short_factor and "
            "long_factor"
        ) from error
    if not short or len(short) != len(long) or not all(0 < x < math.inf for x in short + long):
        raise LongspanError(
            f"{flag} {path}: short_factor has {len(short)} numbers and long_factor {len(long)}; give as many in both, "
            "all above 0: one for each angle of a head"
        )
    return short, long


# ---------------------------------------------------------------------------------------------------------------------
# The config.


@dataclass(frozen=True)
class RopeState:
    """The positions of a model, as its config has them."""

    positions: int | None  # `max_position_embeddings`; None if the config does not have it
    rotary: bool = True  # rotary rather than learnt
    kind: str = "default"  # of its scaling, as in transformers; "default": none
    factor: float | None = None  # of its scaling
    stated: int | None = None  # original positions in the config
    dims: int | None = None  # rotary dimensions of a head; None: unknown
    kinds: tuple[RopeKind, ...] = KINDS  # scalings that the model supports

    @property
    def reach(self) -> int | None:
        """The longest sequence without further scaling; None: no limit."""
        return None if self.rotary and self.kind == "dynamic" else self.positions

    @property
    def original(self) -> int | None:
        """Positions before any scaling."""
        if self.kind in _STATES_ITS_ORIGINAL:
            return self.stated or self.positions
        if self.kind == "linear" and self.positions is not None and self.factor is not None:
            return max(1, int(self.positions / self.factor))
        return self.positions

    @property
    def scaling(self) -> str:
        """The config's scaling in words; "" for none."""
        if self.kind == "default":
            return ""
        factor = "" if self.factor is None else f" x {self.factor:g}"
        return f"{self.kind}{factor}"


UNSTATED = RopeState(None)


def full_table(parameters: Mapping[str, Any]) -> tuple[str | None, Mapping[str, Any]]:
    """Return the rotary table of the layers with full attention: its key if there are several tables, and the table.

    In some models (Gemma-3) layers with a window have their own table. They need no scaling: distances within a window
    do not grow.
    """
    tables = {key: value for key, value in parameters.items() if isinstance(value, Mapping)}
    if not tables:
        return None, parameters
    if "full_attention" not in tables:
        raise LongspanError(
            f"the model's config has rotary tables for {', '.join(tables)}, and none for full_attention, which RoPE "
            "scaling would change; change the config.json by hand"
        )
    return "full_attention", tables["full_attention"]


def _parameters(config: Mapping[str, Any]) -> Mapping[str, Any]:
    keys = ("rope_parameters", "rope_scaling")
    return next((config[key] for key in keys if isinstance(config.get(key), Mapping)), dict[str, Any]())


def rope_state(config: Mapping[str, Any], positions: int | None, rotary: bool, dims: int | None = None) -> RopeState:
    """Read a config of transformers 5 (`rope_parameters`) or 4 (`rope_scaling`).

    Args:
        config: the keys of a `config.json` (of a multimodal model its text part).
        positions: its `max_position_embeddings`.
        rotary: whether the model has rotary embeddings.
        dims: rotary dimensions of a head.
    """
    parameters = _parameters(config)
    several = any(isinstance(value, Mapping) for value in parameters.values())
    # Beam's layers with full attention have no positions: None instead of a table.
    table: Mapping[str, Any] = (parameters.get("full_attention") or {}) if several else parameters
    kind = table.get("rope_type", table.get("type")) or "default"
    factor, stated = table.get("factor"), table.get("original_max_position_embeddings")
    stated = config.get("original_max_position_embeddings") or stated  # Phi-3 has it there, and transformers prefers it
    if not isinstance(stated, int):
        stated = None
    kind = "longrope" if kind == "su" else "default" if kind == "mrope" else str(kind)
    if factor is None and kind in _STATES_ITS_ORIGINAL and positions and stated:
        factor = positions / stated
    kinds = ONLY.get(str(config.get("model_type", "")), KINDS)
    factor = float(factor) if isinstance(factor, int | float) else None
    return RopeState(positions, rotary, kind, factor, stated, dims, kinds)


# ---------------------------------------------------------------------------------------------------------------------
# The scaling.


@dataclass(frozen=True)
class RopeScaling:
    """The scaling that a model gets."""

    kind: RopeKind  # of scaling
    factor: float  # positions over original positions
    original: int  # positions before any scaling
    positions: int  # `max_position_embeddings` of the scaled config
    asked: RopeAsked  # what it answers
    replaced: str = ""  # the config's scaling in words; "" for none

    @property
    def settings(self) -> dict[str, Any]:
        """The flag that asks for this scaling, with its value."""
        factor = int(self.factor) if self.factor == int(self.factor) else self.factor
        original = "" if self.asked.original is None else f",original={self.original}"
        file = f",file={self.asked.file}" if self.asked.file else ""
        return {"rope": f"{self.kind},factor={factor}{original}{file}"}

    def __str__(self) -> str:
        end = "and grows with the sequence" if self.kind == "dynamic" else f"= {self.positions:,} positions"
        instead = f", in place of the config's {self.replaced}" if self.replaced else ""
        return f"RoPE scaling: {self.kind}, {self.original:,} original positions x {self.factor:g} {end}{instead}"


def scaling_for(state: RopeState, asked: RopeAsked, context: int, where: str) -> RopeScaling | None:
    """Return the scaling for sequences of `context` tokens, or None if the config stays as it is.

    `where` names the model in messages.

    Raises:
        LongspanError: if no scaling gives the model such positions, with the numbers and the fix.
    """
    within = state.reach is None or context <= state.reach
    if not within and (asked.scaling == "as-is" or not state.rotary):
        raise LongspanError(_too_long(state, context, where))
    if asked.scaling == "as-is" or (asked.scaling == "auto" and within):
        return None
    if not state.rotary:
        raise LongspanError(f"--rope {asked.scaling}: {where} has no rotary embeddings; remove the flag")
    if state.kind not in ("default", "llama3", *KINDS):
        raise LongspanError(
            f"--rope {asked.scaling}: {where} has RoPE of the kind {state.kind}, which cannot be replaced; "
            f"give --context {state.positions} or less, or change its config.json by hand"
        )
    kind = _kind_for(state) if asked.scaling == "auto" else asked.scaling
    if kind not in state.kinds:
        longrope = ",file=FILE" if state.kinds[0] == "longrope" else ""
        raise LongspanError(
            f"--rope {kind}: transformers supports only {', '.join(state.kinds)} for models of the type of "
            f"{where}; give --rope {state.kinds[0]}{longrope}, or --context {state.positions} or less"
        )
    original = asked.original or state.original
    if original is None:
        raise LongspanError(
            f"--rope {kind}: the config of {where} has no max_position_embeddings; give --rope {kind},original=N"
        )
    if within and asked.factor is None:
        have = "any number" if state.reach is None else f"{state.reach:,}"
        own = f" by {state.scaling}" if state.scaling else ""
        raise LongspanError(
            f"--rope {asked.scaling}: the {context:,} tokens of --context are within the positions of {where} "
            f"({have}{own}), so they need no scaling; give a factor, or --rope auto"
        )
    needed = max(1, -(-context // original))
    factor = float(needed) if asked.factor is None else asked.factor
    reach = int(original * factor)
    if kind != "dynamic" and context > reach:
        raise LongspanError(
            f"rope: factor={factor:g} x {original} original positions of {where} are {reach} positions, and --context "
            f"is {context}; give factor={needed} or none, or --context {reach} or less"
        )
    if kind == "longrope" and state.dims is not None and len(asked.long) != state.dims // 2:
        raise LongspanError(
            f"rope: file={asked.file} has {len(asked.long)} numbers, and a head of {where} has "
            f"{state.dims // 2} angles ({state.dims} rotary dimensions); give one number per angle"
        )
    positions = original if kind == "dynamic" else reach  # transformers' dynamic RoPE begins to scale there
    return RopeScaling(kind, factor, original, positions, asked, state.scaling)


def furthest(state: RopeState, asked: RopeAsked) -> int | None:
    """Return the longest context that `scaling_for` accepts; None: no limit."""
    if not state.rotary or asked.scaling == "as-is":
        return state.reach
    original = asked.original or state.original
    if asked.factor is None or original is None or asked.scaling == "dynamic":
        return None
    scaled = int(original * asked.factor)
    return max(scaled, state.reach or scaled) if asked.scaling == "auto" else scaled


def _kind_for(state: RopeState) -> RopeKind:
    """Return the scaling that changes least: yarn keeps fast angles; a model trained with linear scaling keeps that."""
    return "linear" if state.kind == "linear" else "yarn"


def _too_long(state: RopeState, context: int, where: str) -> str:
    fix = f"give --context {state.positions} or less"
    if not state.rotary:
        return (
            f"--context {context} is longer than the {state.positions} learnt positions of {where} "
            f"(max_position_embeddings), and RoPE scaling needs rotary ones; {fix}"
        )
    kind, original = _kind_for(state), state.original or 1
    kind = kind if kind in state.kinds else state.kinds[0]
    factors = ",file=FILE" if kind == "longrope" else ""
    return (
        f"--context {context} is longer than the {state.positions} positions of {where} (max_position_embeddings); "
        f"{fix}, or --rope {kind}{factors} (x {-(-context // original)} of its {original} original positions)"
    )


def scaled_table(table: Mapping[str, Any], scaling: RopeScaling) -> dict[str, Any]:
    """Return the `rope_parameters` of a scaling, from those of the config.

    The base and the rotary part of a head stay. If the config has the same kind of scaling, its other parameters stay
    too (yarn's betas and mscale), except an attention factor, which belongs to the old factor.
    """
    same = table.get("rope_type", table.get("type")) == scaling.kind
    stays = [key for key in table if same or key in ("rope_theta", "partial_rotary_factor", "mrope_section")]
    scaled = {key: table[key] for key in stays if key not in ("attention_factor", "type")}
    scaled |= {"rope_type": scaling.kind, "factor": float(scaling.factor)}
    if scaling.kind in ("yarn", "longrope"):
        scaled["original_max_position_embeddings"] = scaling.original
    if scaling.kind == "longrope":
        scaled |= {"short_factor": list(scaling.asked.short), "long_factor": list(scaling.asked.long)}
    return scaled
