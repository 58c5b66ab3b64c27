"""Each planted fault of `make faults` still has its line in the sources."""

from __future__ import annotations

from tests.faults import not_found


def test_every_fault_has_its_line() -> None:
    assert not_found() == []
