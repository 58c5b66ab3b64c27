"""How many chunks of heads an all-to-all is cut into, so that one is sent while another is computed.

Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass

OVERLAPPED_CHUNKS = 4
"""Chunks of heads for `overlap_chunks="auto"`: a quarter of an all-to-all that attention hides stays exposed."""

CHUNK_START_S = 1e-4
"""Seconds that each further chunk costs besides its message: kernel launches and copies."""

MIN_TIME_OVER_OVERHEAD = 8
"""Use chunks if the all-to-all takes at least this many times as long as the overhead that chunks add. If nothing
overlaps with it, at most an eighth of its time is lost; if enough does, three quarters are hidden.
"""


@dataclass(frozen=True)
class AllToAllLink:
    """The measured time of an all-to-all of a Ulysses group.

    Attributes:
        start_s: seconds of an empty message.
        per_byte_s: seconds per byte of a rank's buffer, its own part included.
    """

    start_s: float
    per_byte_s: float


def choose_overlap_chunks(sent_bytes: int, link: AllToAllLink | None) -> int:
    """Return the number of chunks for `overlap_chunks="auto"`: several if the all-to-all takes long on this link.

    Args:
        sent_bytes: bytes of a rank's q, k and v.
        link: between the ranks of a Ulysses group; None inside one host, where chunks gain nothing.
    """
    if link is None:
        return 1
    added = (OVERLAPPED_CHUNKS - 1) * (link.start_s + CHUNK_START_S)
    takes = link.start_s + sent_bytes * link.per_byte_s
    return OVERLAPPED_CHUNKS if takes >= MIN_TIME_OVER_OVERHEAD * added else 1
