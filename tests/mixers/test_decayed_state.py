"""Mamba's correction by the state that enters: equal to the formula, and without a state of every token."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from longspan.hf.forward.mixer_functions import _Mamba1
from longspan.mixers import decayed_state
from longspan.mixers.mixer import Tokens
from tests.live import LiveBytes
from tests.syncs import on_gpu

K = 16


@pytest.mark.parametrize("rows", [1, 3, 100])
def test_tiles_equal_the_formula(rows: int) -> None:
    torch.manual_seed(0)
    B, T, H = 2, 7, 3
    since, A, state, q = (torch.randn(*s, dtype=torch.float64) for s in ((B, T, H), (H, K), (B, H, K), (B, T, K)))
    leaves = [x.requires_grad_() for x in (since.abs().cumsum(1), -A.abs(), state, q)]
    grad = torch.randn(B, T, H, dtype=torch.float64)
    states = (leaves[0].unsqueeze(-1) * leaves[1]).exp() * leaves[2].unsqueeze(1)
    expected = torch.einsum("bthk,btk->bth", states, leaves[3])
    with mock.patch.object(decayed_state, "STATE_TILE", (0, rows * B * H * K)):
        found = decayed_state.read_decayed(*leaves)
        pairs = zip(*(torch.autograd.grad(x, leaves, grad) for x in (found, expected)), strict=True)
    for mine, theirs in [(found, expected), *pairs]:
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def _scan(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    """Stand for a kernel that saves its inputs."""
    return x * dt, x[..., :1] * A * B.sum(-1).unsqueeze(1) * C[:, :, -1].unsqueeze(1)


def _peak(T: int, H: int) -> int:
    """Return the peak of live bytes of a fragment that receives a state, forward and backward."""
    with on_gpu():
        given = [torch.ones(1, T, *shape, device="cuda") for shape in ((1, K), (1, K), (H, 1), (H,))]
        q, k, v, dt = (x.requires_grad_() for x in given)
        A, state = torch.ones(H, K, device="cuda", requires_grad=True), torch.ones(1, H, K, 1, device="cuda")
        with LiveBytes([*given, A, state]) as live:
            local = _Mamba1(_scan, A, None, None, True, {}).local(Tokens(q, k, v, dt), None, receives=True)
            local.finish(state.requires_grad_()).sum().backward()
    return live.peak


def test_a_state_of_every_token_never_exists() -> None:
    T, H = 1 << 14, 1024
    growth = (_peak(2 * T, H) - _peak(T, H)) / (4 * T * H)
    assert growth < K / 2, growth
