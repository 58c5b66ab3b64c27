"""Fewer combinations of parameters: each pair of values once, or each value once. The others are marked `confirms`.

A fault that needs three values together is rare; `make fuzz` runs the combinations that are left out here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def pairwise(*of: Iterable[Any]) -> list[Any]:
    """Return all combinations as parameters of `pytest.mark.parametrize`.

    Those that contain no pair of values that is not in one before are marked `confirms`.
    """
    axes = [list(axis) for axis in of]
    every = list(itertools.product(*(range(len(axis)) for axis in axes)))
    missing = {pair for row in every for pair in _pairs(row)}
    chosen = set()
    while missing:
        best = max(every, key=lambda row: len(missing & _pairs(row)))
        chosen.add(best)
        missing -= _pairs(best)
    return _parameters(axes, every, chosen)


def each_value(*of: Iterable[Any]) -> list[Any]:
    """Return all combinations as parameters; `confirms` marks all but as many as contain every value once."""
    axes = [list(axis) for axis in of]
    every = list(itertools.product(*(range(len(axis)) for axis in axes)))
    longest = max(map(len, axes))
    chosen = {tuple(i % len(axis) for axis in axes) for i in range(longest)}
    return _parameters(axes, every, chosen)


def confirming(values: Iterable[Any]) -> list[Any]:
    """Return the values as parameters that are all marked `confirms`."""
    return [pytest.param(*_values(value), marks=[*_marks(value), pytest.mark.confirms]) for value in values]


def grouped(rows: Iterable[Any]) -> list[Any]:
    """Return an axis whose values belong to several parameters: `grouped([(2, 1), (4, 2)])` for `world` and `ring`."""
    return [pytest.param(*_values(row), marks=_marks(row)) for row in rows]


def _pairs(row: tuple[int, ...]) -> set[Any]:
    return set(itertools.combinations(enumerate(row), 2))


def _parameters(axes: Sequence[Sequence[Any]], every: list[tuple[int, ...]], chosen: set[Any]) -> list[Any]:
    found = []
    for row in every:
        values = [axis[i] if _is_param(axis[i]) else pytest.param(axis[i]) for axis, i in zip(axes, row, strict=True)]
        marks = [mark for value in values for mark in value.marks]
        marks += [] if row in chosen else [pytest.mark.confirms]
        found.append(pytest.param(*(x for value in values for x in value.values), marks=marks))
    return found


def _is_param(value: Any) -> bool:
    return isinstance(value, type(pytest.param()))


def _values(value: Any) -> tuple[Any, ...]:
    if _is_param(value):
        return tuple(value.values)
    return value if isinstance(value, tuple) else (value,)


def _marks(value: Any) -> list[Any]:
    return list(value.marks) if _is_param(value) else []
