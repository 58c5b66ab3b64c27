"""The sources have the line of each planted fault of `make faults`."""

from __future__ import annotations

from tests.faults import not_found


def test_every_fault_has_its_line() -> None:
    assert not_found() == []
