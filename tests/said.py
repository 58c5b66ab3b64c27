"""What errors say: their numbers and the way out, whatever sentence is around them."""

from __future__ import annotations


def says(text: str, parts: str) -> bool:
    """Whether `text` holds all of `parts`, which " ... " separates, in this order."""
    at = 0
    for part in parts.split(" ... "):
        found = text.find(part, at)
        if found < 0:
            return False
        at = found + len(part)
    return True
