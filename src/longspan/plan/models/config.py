"""A `config.json` with the defaults of its class; what is read through it is checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from longspan.core.errors import LongspanError
from longspan.core.validation import LARGEST_COUNT, check_number, spell

_MOST_LAYERS = 1 << 14


@dataclass(frozen=True)
class Config:
    """A config and the defaults of its class. What is read through it is checked.

    Attributes:
        values: the keys of the file.
        defaults: of the config class.
        spellings: names of a key, the usual one first.
        where: what it is of, in messages.
    """

    values: Mapping[str, Any]
    defaults: Mapping[str, Any]
    spellings: Mapping[str, tuple[str, ...]]
    where: str

    def find(self, key: str) -> tuple[str, Any]:
        """The spelling under which the config has `key`, and the value; the default where it has not."""
        names = self.spellings.get(key, (key,))
        for name in names:
            if name in self.values:
                return name, self.values[name]
        return names[0], self.defaults.get(key)

    def optional(self, key: str, minimum: int = 1) -> int | None:
        """A whole number, or None for null."""
        name, value = self.find(key)
        if value is None:
            return None
        most = _MOST_LAYERS if key == "num_hidden_layers" else LARGEST_COUNT
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise LongspanError(f"{self.where}: {name}={spell(value)} must be a whole number of at least {minimum}")
        check_number(f"{self.where}: {name}", value, minimum, most)
        return value

    def count(self, key: str, minimum: int = 1) -> int:
        """A whole number."""
        value = self.optional(key, minimum)
        if value is None:
            raise LongspanError(
                f"{self.where}: {self.find(key)[0]} is null; it must be a whole number of at least {minimum}"
            )
        return value

    def flag(self, key: str) -> bool:
        """True or false; null is false."""
        name, value = self.find(key)
        if value is not None and not isinstance(value, bool):
            raise LongspanError(f"{self.where}: {name}={value!r} must be true or false")
        return bool(value)

    @cached_property
    def d(self) -> int:
        """The hidden size."""
        return self.count("hidden_size")

    @cached_property
    def ffn(self) -> int:
        """The intermediate size; GPT-2 may leave it out."""
        return self.optional("intermediate_size") or 4 * self.d

    @cached_property
    def experts(self) -> int:
        """Routed experts of a layer that has some."""
        return self.count("num_experts", minimum=0)

    def divides(self, key: str, by: str, whole: int, parts: int) -> None:
        """Raise unless `parts` divides `whole`."""
        if whole % parts:
            near = [str(n * parts) for n in (whole // parts, whole // parts + 1) if n]
            name = self.find(by)[0]
            default = "" if name in self.values else " (the default)"
            raise LongspanError(
                f"{self.where}: {self.find(key)[0]}={whole} does not divide by {name}={parts}{default}; "
                f"{' or '.join(near)} would"
            )
