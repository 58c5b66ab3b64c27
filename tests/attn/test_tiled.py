"""Calls and copies of the tiled kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import longspan
from longspan.attn.kernels import tiled
from longspan.attn.kernels.base import Blocks
from longspan.attn.kernels.tiled import TILED
from longspan.attn.mask import Mask
from longspan.attn.score import Scores
from longspan.core.layout import Layout
from tests.attn.attention import one_device
from tests.fakes import fake_world


def calls_of(rank: int, layout: Layout, n: int, mask: Mask, batch: int = 1) -> list[int]:
    """Kernel calls of a rank, for each block of keys."""
    k_spans, owners = layout.runs(n)
    device = torch.device("cpu")
    q_spans = layout.block(n, rank)
    blocks = Blocks(mask, Scores().kind, batch, 4, 0, (n, n), q_spans, k_spans, owners, device)
    return [0 if block is None else len(block.calls) for block in TILED.prepare(blocks)]


@pytest.mark.parametrize(("ring", "short"), [(2, 5), (4, 0), (8, 5)])
def test_a_step_of_a_causal_zigzag_ring_is_one_call(ring: int, short: int) -> None:
    layout = Layout(ring, 1, "zigzag")
    for rank in range(ring):
        assert calls_of(rank, layout, ring * 64 - short, Mask()) == [1] * ring


DOCUMENTS = ((0, 40), (40, 200), (200, 256))
MASKS: dict[str, tuple[Mask, list[list[int]]]] = {
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


class Copied(TorchDispatchMode):
    """Bytes that are copied, cast or padded."""

    NAMES = ("copy_", "clone", "_to_copy", "constant_pad_nd", "cat", "stack")

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in self.NAMES:
            self.bytes += out.nbytes
        return out


def copied(ring: int, dtype: torch.dtype, v_dim: int, documents: int = 0, **options: Any) -> tuple[float, float]:
    """Bytes that forward and backward copy, over those of q, k, v, the output and its gradient together."""
    n, B = 512, 2
    with fake_world(0, ring):
        sp = longspan.SequenceSharding(longspan.init_mesh(ring=ring))
        q, k, v = (
            torch.zeros(B, n // ring, heads, dim, dtype=dtype, requires_grad=True)
            for heads, dim in ((4, 16), (2, 16), (2, v_dim))
        )
        ids = (torch.arange(n) // (n // documents)).expand(B, n) if documents else None
        with Copied() as forward:
            out = longspan.attention(q, k, v, sp, documents=ids, kernel="tiled", **options)
        grad = torch.ones_like(out)
        with Copied() as backward:
            out.backward(grad)
    own = sum(x.nbytes for x in (q, k, v, out, grad))
    return forward.bytes / own, backward.bytes / own


MASKED: list[dict[str, Any]] = [{}, {"documents": 4}, {"documents": 64}, {"window": 70}]


@pytest.mark.parametrize(
    ("dtype", "v_dim", "once", "each"),
    [
        (torch.float32, 16, (0.6, 0.3), 0.0),  # k and v packed, and their gradients
        (torch.bfloat16, 16, (1.3, 2.3), 0.55),  # cast to fp32 for a CPU; k and v of every block
        (torch.float32, 8, (0.6, 1.05), 0.2),  # padded to one head_dim; v of every block
    ],
)
@pytest.mark.parametrize("ring", [1, 4])
def test_copies_do_not_grow_with_the_number_of_tiles(
    ring: int, dtype: torch.dtype, v_dim: int, once: tuple[float, float], each: float
) -> None:
    """Queries, output and its gradient are copied once, keys and values once per block."""
    for mask in MASKED:
        forward, backward = copied(ring, dtype, v_dim, **mask)
        assert forward <= once[0] + each * ring and backward <= once[1] + each * ring, (mask, forward, backward)


def test_a_gpus_kernel_gets_the_output_and_its_gradient_tokens_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise torch copies both in each call (attention_backward.cu)."""
    seen: list[bool] = []

    def forward(q: Any, k: Any, v: Any, *args: Any, scale: float) -> Any:
        return *tiled._flash_cpu(q, k, v, *args[:2], scale=scale), None

    def backward(grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *rest: Any, scale: float) -> Any:
        seen.extend(x.transpose(1, 2).is_contiguous() for x in (grad, out))
        return tiled._flash_cpu_backward(grad, q, k, v, out, lse, *rest[4:6], scale=scale)

    monkeypatch.setattr(tiled, "_flash_of", lambda *_: "cuda")
    monkeypatch.setattr(tiled, "_flash_cuda", forward)
    monkeypatch.setattr(tiled, "_flash_cuda_backward", backward)
    q, k, v = (torch.zeros(1, 64, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    out = longspan.attention(q, k, v, one_device(), documents=torch.arange(64)[None] // 16, kernel="tiled")
    out.backward(torch.ones(1, 4, 64, 8).transpose(1, 2))
    assert seen == [True] * 8
