"""Each planted fault of `make faults` has its line in the sources, and tests that run."""

from __future__ import annotations

import shlex

import pytest
from _pytest.mark import KeywordMatcher
from _pytest.mark.expression import Expression

from tests.conftest import COLLECTED
from tests.faults import FAULTS, ROOT, not_found


def test_every_fault_has_its_line() -> None:
    assert not_found() == []


def test_every_fault_has_tests(request: pytest.FixtureRequest) -> None:
    """Of the files that this run has collected: all, unless it was given some."""
    by_file: dict[str, list[pytest.Item]] = {}
    for item in request.config.stash[COLLECTED]:
        by_file.setdefault(item.path.relative_to(ROOT).as_posix(), []).append(item)
    without = []
    for fault in FAULTS:
        path, *words = shlex.split(fault.tests)
        assert (ROOT / path).is_file(), fault.name
        expression = Expression.compile(words[1] if words else path.removesuffix(".py").rpartition("/")[2])
        items = by_file.get(path)
        if items is not None and not any(expression.evaluate(KeywordMatcher.from_item(item)) for item in items):
            without.append(f"{fault.name}: {fault.tests}")
    assert without == []
