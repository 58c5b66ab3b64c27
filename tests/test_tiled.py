"""What the kernel by tiles calls, and what it copies for that."""

from __future__ import annotations

import pytest
import torch

from longspan.attn.kernels.base import Blocks
from longspan.attn.kernels.tiled import TILED
from longspan.attn.mask import Mask
from longspan.attn.score import Scores
from longspan.core.layout import Layout


def calls_of(rank: int, layout: Layout, n: int, mask: Mask, batch: int = 1) -> list[int]:
    """Kernel calls of a rank, for each block of keys."""
    k_spans, owners = layout.runs(n)
    device = torch.device("cpu")
    q_spans = layout.block(n, rank)
    blocks = Blocks(mask, Scores().kind, batch, 4, 0, (n, n), q_spans, k_spans, owners, device)
    return [0 if block is None else len(block.calls) for block in TILED.prepare(blocks)]


@pytest.mark.parametrize("ring", [2, 4, 8])
@pytest.mark.parametrize("short", [0, 5])
def test_a_step_of_a_causal_zigzag_ring_is_one_call(ring: int, short: int) -> None:
    """It was 3 for a rank's own block, 2 for another (1 for the last rank's, which is one run of tokens)."""
    layout = Layout(ring, 1, "zigzag")
    for rank in range(ring):
        assert calls_of(rank, layout, ring * 64 - short, Mask()) == [1] * ring


DOCUMENTS = ((0, 40), (40, 200), (200, 256))
MASKS: dict[str, tuple[Mask, list[list[int]]]] = {  # before: 9, 9, 7, 7 and 12 calls of both ranks
    "prefix": (Mask(prefix=16), [[2, 1], [1, 1]]),
    "bidirectional": (Mask(causal=False), [[1, 1], [1, 1]]),
    "documents": (Mask(segments=(DOCUMENTS,)), [[3, 1], [1, 1]]),
    "documents of two rows": (Mask(segments=(DOCUMENTS, DOCUMENTS)), [[3, 1], [1, 1]]),
    "padding of two rows": (Mask(segments=(((0, 256),), ((0, 250),))), [[2, 2], [1, 1]]),
}


@pytest.mark.parametrize("name", MASKS)
def test_calls_of_other_masks(name: str) -> None:
    mask, expected = MASKS[name]
    batch = len(mask.segments) if mask.segments else 1
    found = [calls_of(rank, Layout(2, 1, "zigzag"), 256, mask, batch) for rank in (0, 1)]
    assert found == expected


def test_documents_of_one_device_are_a_call_each() -> None:
    ends = [(i, i + 16) for i in range(0, 256, 16)]
    assert calls_of(0, Layout(), 256, Mask(segments=(tuple(ends),))) == [16]
