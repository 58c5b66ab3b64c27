"""Memory of attention on a fake GPU, in units of the bytes of q of a rank's tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import longspan
from longspan.attn.mask import Mask
from longspan.attn.prepare import prepare
from longspan.attn.score import Scores
from longspan.attn.shapes import Shapes
from longspan.core.memory import Memory
from longspan.plan import Job, Mesh
from longspan.plan.layers import CostContext
from longspan.plan.layers.softmax import Softmax
from tests.fakes import fake_world
from tests.live import LiveBytes
from tests.syncs import on_gpu

LOCAL, HEADS, DIM = 4096, 32, 128
UNIT = LOCAL * HEADS * DIM * 2
NOTHING: dict[str, Any] = {"all_to_all_single": lambda *_, **__: None, "batch_isend_irecv": lambda _: []}


@pytest.fixture(autouse=True)
def _no_transfers() -> Iterator[None]:
    with mock.patch.multiple(dist, **NOTHING):
        yield


@dataclass(frozen=True)
class Units:
    """Peaks above q, k and v, and in the backward above what the forward saved; it includes the output's gradient."""

    forward: float
    saved: float
    backward: float


def units(
    mesh: dict[str, int],
    kv_heads: int = 8,
    mask: Mask | None = None,
    scores: Any = None,
    *,
    rank: int = 0,
    inside: bool = False,
    **options: Any,
) -> Units:
    """Return the bytes of one attention in bf16 through the flash kernel; see `LiveBytes` for `inside`."""
    mask, scores = mask or Mask(), scores or Scores()
    with fake_world(rank, size := mesh.get("ring", 1) * mesh.get("ulysses", 1)):
        sp = longspan.SequenceSharding(longspan.init_mesh(**mesh, device_type="cpu"))
        with on_gpu():
            q, k, v = (
                torch.empty(1, LOCAL, heads, DIM, dtype=torch.bfloat16, device="cuda", requires_grad=True)
                for heads in (HEADS, kv_heads, kv_heads)
            )
            plan = prepare(
                Shapes.of(q, k, v, scores), sp, mask, scores, (LOCAL * size, LOCAL * size), "flash", **options
            )
            with LiveBytes([q, k, v], inside=inside) as live:
                out = plan(q, k, v, scores)
                forward, saved = live.peak, live.now
                loss = _Loss.apply(out)  # type: ignore[no-untyped-call]
                del out
                before = live.now
                live.restart()
                loss.backward()
                return Units(forward / UNIT, saved / UNIT, (live.peak - before) / UNIT)


class _Loss(torch.autograd.Function):
    """Makes a gradient that nothing but autograd holds, as a model's layers do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.like = x.shape, x.dtype
        return x.new_empty(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Tensor:
        shape, dtype = ctx.like
        return torch.empty(shape, dtype=dtype, device="cuda")


MORE = 5 * 4 / (2 * DIM)  # log-sum-exps in fp32, and other small tensors


def about(x: float) -> Any:
    return pytest.approx(x + MORE / 2, abs=MORE / 2)


DOCUMENTS = Mask(segments=(((0, 10_000), (10_000, 8 * LOCAL)),))


@pytest.mark.parametrize("mask", [Mask(), Mask(causal=False), Mask(window=1000), DOCUMENTS])
def test_ulysses_with_its_all_to_all_recomputed(mask: Mask) -> None:
    """The largest buffers are the all-to-alls': q, k and v; in the backward q, k, v, output and its gradient."""
    used = units({"ulysses": 8}, mask=mask, recompute_all_to_all=True)
    assert used.forward == about(2 * 1.5) and used.saved == about(1)
    assert used.backward == about(1 + 2 * 3.5)


def test_ulysses() -> None:
    """Saved are q, k and v behind the all-to-all, and the output on both sides of it."""
    used = units({"ulysses": 8})
    assert used.forward == used.saved == about(3.5)
    assert used.backward == about(1 + 1.5)  # the output's gradient, and those of q, k and v


def test_one_device_allocates_what_it_returns() -> None:
    used = units({})
    assert (used.forward, used.saved, used.backward) == (about(1), about(1), about(1 + 1.5))


@pytest.mark.parametrize("options", [{"recompute_all_to_all": True}, {"head_chunks": 4}])
def test_chunks_on_one_device(options: dict[str, Any]) -> None:
    used = units({}, **options)
    chunk = (1.5 if "head_chunks" in options else 0) / 4
    assert used.forward <= 1 + chunk + MORE and used.backward <= 1 + 1.5 + chunk + MORE


def test_a_chunk_of_heads_needs_its_share() -> None:
    """Four chunks need a quarter above what is returned: q, k and v's gradients, or the output."""
    whole, chunks = (units({"ulysses": 2}, 16, recompute_all_to_all=True, head_chunks=n) for n in (1, 4))
    assert chunks.forward == about(1 + whole.forward / 4)
    assert chunks.backward == about(1 + 2 + (whole.backward - 1) / 4)


def test_a_ring() -> None:
    """In fp32: the running output; in the backward dq, and at most three blocks of dK and dV."""
    used = units({"ring": 8})
    assert used.forward <= 2 + 1 + 3 * 0.5 + MORE  # sums, a block's output, my block and two in flight
    assert used.saved == about(1 + 0.5)
    kv_grad = 2 * 0.5
    assert used.backward <= 1 + 2 + 1 + 2 * 0.5 + 0.5 + 3 * kv_grad + MORE


def test_sinks_rescale_the_output_in_its_own_dtype() -> None:
    with on_gpu():
        sinks = torch.empty(HEADS, device="cuda", requires_grad=True)
    assert units({}, scores=Scores(sinks=sinks)).forward <= 1 + 2 * MORE


MESHES = [{}, {"ulysses": 2}, {"ulysses": 8}, {"ring": 2}, {"ring": 8}, {"ring": 4, "ulysses": 2}]
WAYS: dict[str, tuple[Memory, dict[str, Any]]] = {
    "saved": (Memory(), {}),
    "recomputed": (Memory(checkpointing="selective"), {"recompute_all_to_all": True}),
    "in two chunks": (Memory(head_chunks=2), {"head_chunks": 2}),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kv_heads", [8, 32])
def test_planned_bytes_of_a_backward(way: str, kv_heads: int) -> None:
    """What the kernel allocates inside is included."""
    memory, options = WAYS[way]
    for mesh in MESHES:
        job = Job(context=LOCAL * math.prod(mesh.values()), dtype="bf16", memory=memory)
        c = CostContext(job, Mesh(**mesh), HEADS * DIM, on_cpu=False)
        layer = Softmax(HEADS, kv_heads, DIM, DIM)
        planned = layer.backward_buffers(c).total / UNIT
        ranks = {0, math.prod(mesh.values()) - 1}
        used = max(units(mesh, kv_heads, rank=rank, inside=True, **options).backward for rank in ranks)
        assert planned == pytest.approx(used, rel=0.01), mesh
