"""A model's positions: how long a sequence its config allows, and which values of the config would allow more.

A user sets `rope_parameters` and `max_position_embeddings` in the config, as transformers names them. Rotary embeddings
rotate queries and keys by angles that the model has learnt for its original positions; a scaling such as YaRN slows
some of them down by a factor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from longspan.core.errors import LongspanError

_STATES_ITS_ORIGINAL = ("yarn", "longrope", "llama3")
_EXTENDED = ("default", "linear", "yarn", "llama3")  # kinds that YaRN, or a larger linear factor, can replace
_KEPT = ("rope_theta", "partial_rotary_factor", "mrope_section")


@dataclass(frozen=True)
class ModelPositions:
    """The positions of a model, as its config has them."""

    limit: int | None = None  # `max_position_embeddings`; None if the config does not have it
    rotary: bool = True  # rotary rather than learnt
    dims: int | None = None  # rotary dimensions of a head; None: unknown
    parameters: Mapping[str, Any] = field(default_factory=dict)  # `rope_parameters`
    original: int | None = None  # positions before any scaling
    extends: bool = True  # whether transformers knows YaRN for this type of model

    @property
    def table(self) -> Mapping[str, Any]:
        """The rotary table of the layers with full attention.

        In some models (Gemma-3) layers with a window have their own table. Theirs needs no scaling: distances within a
        window do not grow. Beam's layers with full attention have no positions: None instead of a table.
        """
        several = any(isinstance(value, Mapping) for value in self.parameters.values())
        return (self.parameters.get("full_attention") or {}) if several else self.parameters

    @property
    def kind(self) -> str:
        kind = str(self.table.get("rope_type") or "default")
        return "default" if kind == "mrope" else kind

    @property
    def reach(self) -> int | None:
        """The longest sequence; None: no limit, as a dynamic RoPE grows with the length."""
        return None if self.rotary and self.kind == "dynamic" else self.limit

    def extended(self, context: int) -> dict[str, Any] | None:
        """Return what to change in the config for `context` tokens, by YaRN; None if it has no such scaling.

        The factor is the smallest integer that reaches. A model with linear scaling gets more of that.
        """
        if not (self.rotary and self.extends and self.original and self.table and self.kind in _EXTENDED):
            return None
        factor = max(1, -(-context // self.original))
        table: dict[str, Any] = {"rope_type": "linear" if self.kind == "linear" else "yarn", "factor": float(factor)}
        if self.kind != "linear":
            table["original_max_position_embeddings"] = self.original
        parameters = table if self.table is self.parameters else {"full_attention": table}
        return {"rope_parameters": parameters, "max_position_embeddings": self.original * factor}

    def check(self, context: int, where: str, *, extends: bool = False) -> None:
        """Raise if sequences are longer than the positions of a model, which messages call `where`.

        With `extends` those are accepted that `extended` gives the config.
        """
        if self.reach is None or context <= self.reach:
            return
        values = self.extended(context)
        if extends and values is not None:
            return
        learnt = "" if self.rotary else "learnt "
        fix = "" if values is None else f", or extend its config: {settings_of(values)}"
        raise LongspanError(
            f"--context {context} is longer than the {self.limit} {learnt}positions of {where} "
            f"(max_position_embeddings); give --context {self.limit} or less{fix}"
        )


def merged(own: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config's rotary parameters with changes.

    The base and the rotary part of a head stay, and with the same kind of scaling its other parameters, but an
    attention factor belongs to the old factor.
    """
    tables = {key: merged(own.get(key) or {}, table) for key, table in given.items() if isinstance(table, Mapping)}
    if tables:
        return {**own, **tables}
    same = given.get("rope_type", own.get("rope_type")) == own.get("rope_type")
    stays = {key: x for key, x in own.items() if key in _KEPT or (same and key != "attention_factor")}
    return {**stays, **given}


def settings_of(values: Mapping[str, Any]) -> str:
    """Format values of a config as in YAML."""

    def text(value: Any) -> str:
        return f"{{{settings_of(value)}}}" if isinstance(value, Mapping) else str(value)

    return ", ".join(f"{key}: {text(value)}" for key, value in values.items())


def positions_in(config: Mapping[str, Any], limit: int | None, rotary: bool) -> ModelPositions:
    """Return the positions in the keys of a `config.json` (of a multimodal model its text part).

    Args:
        config: the keys, as transformers 5 writes them (`rope_parameters`).
        limit: its `max_position_embeddings`.
        rotary: whether the model has rotary embeddings.
    """
    parameters: Any = config.get("rope_parameters")
    found = ModelPositions(limit, rotary, parameters=parameters if isinstance(parameters, Mapping) else {})
    table, original = found.table, limit
    # Phi-3 has its original positions beside the table, and transformers prefers these.
    stated = config.get("original_max_position_embeddings") or table.get("original_max_position_embeddings")
    factor = table.get("factor")
    if found.kind in _STATES_ITS_ORIGINAL and isinstance(stated, int):
        original = stated
    elif found.kind == "linear" and limit is not None and isinstance(factor, int | float):
        original = max(1, int(limit / factor))
    extends = config.get("model_type") != "phi3"  # it has LongRoPE alone
    return replace(found, original=original, extends=extends)
