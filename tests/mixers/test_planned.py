"""What recurrent layers hold on a fake GPU (`tests/live.py`), and the planner's formulas."""

from __future__ import annotations

import pytest
import torch

from longspan.core.layout import Layout
from longspan.mixers.combine import state_before
from longspan.mixers.fragments import fragment_table
from longspan.mixers.mixer import Tokens
from longspan.mixers.plain_torch import LinearAttention
from longspan.plan import Job
from longspan.plan.job import CostContext
from longspan.plan.layers import Linear
from tests.live import MODEL, LiveBytes
from tests.syncs import on_gpu

H = 4


@pytest.mark.parametrize("columns", [1, 16])
def test_the_tree_fits_the_planned_buffers(columns: int) -> None:
    ranks, K, V = 8, 16, 16
    mixing = Linear(H, H, K, V, columns=columns)
    c = CostContext(MODEL, Job(context=8 * ranks).on(ulysses=ranks))
    table = fragment_table(Layout(ulysses=ranks), ranks - 1, 8 * ranks, 1, None)
    with on_gpu():
        summaries = torch.ones(ranks, 1, H, K, V + columns, device="cuda", requires_grad=True)
        with LiveBytes([summaries]) as live:
            state_before(summaries, table, ranks - 1, V).sum().backward()
    planned = mixing.backward_buffers(c).total
    assert planned / 1.5 <= live.peak <= planned


def _in_plain_torch(mixing: Linear, n: int) -> tuple[int, int]:
    """Return the bytes that a fragment saves which receives a state, and the peak of its backward above these."""
    K, V = mixing.head_dim, mixing.v_head_dim
    with on_gpu():
        q, k, v = (torch.ones(1, n, H, d, device="cuda", requires_grad=True) for d in (K, K, V))
        decay = torch.ones(1, n, H, *((K,) if mixing.decays == "key" else ()), device="cuda", requires_grad=True)
        beta = torch.ones(1, n, H, device="cuda", requires_grad=True) if mixing.columns > 1 else None
        entered = torch.ones(1, H, K, V, device="cuda", requires_grad=True)
        with LiveBytes([q, k, v, decay, entered, *([] if beta is None else [beta])]) as live:
            out = LinearAttention().local(Tokens(q, k, v, decay, beta), None, True).finish(entered)
            saved = live.now
            live.restart()
            out.backward(torch.ones_like(out))
        return saved, live.peak - saved


@pytest.mark.parametrize(("decays", "delta"), [("head", False), ("head", True), ("key", True)])
@pytest.mark.parametrize(("K", "V"), [(128, 128), (64, 128), (128, 256)])
def test_plain_torch_is_planned(decays: str, delta: bool, K: int, V: int) -> None:
    mixing = Linear(H, H, K, V, columns=K if delta else 1, decays=decays)
    c = CostContext(MODEL, Job(context=1 << 20, fused=False).on(ulysses=2))
    kernels = CostContext(MODEL, Job(context=1 << 20).on(ulysses=2))
    (few, few_held), (many, many_held) = (_in_plain_torch(mixing, n) for n in (512, 1024))
    saved, held = mixing._in_plain_torch(c)
    assert saved == pytest.approx((many - few) / 512, rel=0.02)
    assert 0.98 <= held / ((many_held - few_held) / 512) <= 1.4
    assert mixing.saved(c) > 1.5 * mixing.saved(kernels)
