"""Compare parts of messages: numbers and fixes, whatever the sentence around them."""

from __future__ import annotations


def says(text: str, parts: str) -> bool:
    """Return whether `text` contains all `parts`, separated by " ... ", in this order."""
    at = 0
    for part in parts.split(" ... "):
        found = text.find(part, at)
        if found < 0:
            return False
        at = found + len(part)
    return True
