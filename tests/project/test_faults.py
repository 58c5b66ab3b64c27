"""Each planted fault of `make faults` has its line in the sources, and tests that run; marks select all their tests."""

from __future__ import annotations

import shlex

import pytest
from _pytest.mark import KeywordMatcher
from _pytest.mark.expression import Expression

from tests.conftest import COLLECTED, MARKS_OF_FILES, names_mark
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


@pytest.mark.parametrize("mark", MARKS_OF_FILES)
def test_no_file_with_a_marked_test_is_left_out(request: pytest.FixtureRequest, mark: str) -> None:
    marked = {item.path for item in request.config.stash[COLLECTED] if item.get_closest_marker(mark)}
    assert [path for path in sorted(marked) if not names_mark(path, mark)] == []
