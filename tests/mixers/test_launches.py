"""Launches of a recurrent layer's exchange on a fake GPU (`tests/syncs.py`), by ranks, and its precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import longspan
from longspan.comm.mesh import MeshGroups
from longspan.mixers import linear_attention
from longspan.mixers.short_conv import short_conv
from longspan.mixers.state_passing import state_passing
from tests.fakes import fake_world
from tests.syncs import on_gpu

Layer = Callable[[longspan.SequenceSharding], Tensor]


def _ones(*shape: int) -> Tensor:
    return torch.ones(*shape, device="cuda", requires_grad=True)


def _cheap(q: Any, k: Any, v: Any, initial_state: Any = None, **_: Any) -> tuple[Tensor, Tensor]:
    state = v.new_zeros(1, 2, 4, v.shape[3]) if initial_state is None else initial_state
    return v + q.sum() + k.sum(), state + v.sum(1).unsqueeze(2)


def _matrices(sp: longspan.SequenceSharding) -> Tensor:
    return state_passing(_cheap, *(_ones(1, 8, 2, 4) for _ in "qkv"), sp)[0]


def _factors(sp: longspan.SequenceSharding) -> Any:
    return longspan.linear_attention(*(_ones(1, 8, 2, 4) for _ in "qkv"), sp, decay=_ones(1, 8, 2))


def _convolution(sp: longspan.SequenceSharding) -> Tensor:
    return short_conv(_ones(1, 8, 4), _ones(4, 4), sp)


def _launches(layer: Layer, ranks: int) -> tuple[int, int, int]:
    """Return those of a forward and of a backward on the last rank, which combines all other ranks' states, and what
    waited in another forward.
    """
    names = [name for name in dir(dist) if name.startswith(("all_gather_", "reduce_scatter_"))]
    nothing: dict[str, Any] = dict.fromkeys(names, lambda *_, **__: None)
    with fake_world(ranks - 1, ranks), mock.patch.multiple(dist, **nothing), on_gpu() as seen:
        sp = longspan.SequenceSharding(longspan.init_mesh(ring=ranks, device_type="cpu"), "contiguous")
        out = layer(sp)
        forward = seen.launches.total()
        seen.launches.clear()
        out.sum().backward()
        backward = seen.launches.total()
        seen.clear()
        layer(sp)
        return forward, backward, len(seen)


@pytest.mark.parametrize("layer", [_matrices, _factors, _convolution])
def test_launches_grow_as_the_logarithm_of_the_ranks(layer: Layer) -> None:
    """Eight times the ranks are three more levels: two products forward, two more and two joins backward."""
    few, many = _launches(layer, 8), _launches(layer, 64)
    most = (0, 0) if layer is _convolution else (3 * 2, 3 * (2 + 4))
    assert many[0] - few[0] <= most[0] and many[1] - few[1] <= most[1], (few, many)
    assert few[2] == many[2] == 0


class _Products(TorchDispatchMode):
    """Collects the dtypes of products that are added to something."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten.baddbmm:
            self.dtypes.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


def test_states_are_combined_in_fp64_on_a_gpu() -> None:
    with _Products() as products:
        _launches(_matrices, 8)
    assert products.dtypes and {*products.dtypes} == {torch.float64}


def test_plain_torch_on_a_gpu_is_warned_of_once() -> None:
    linear_attention._warn_of_plain_torch.cache_clear()
    with pytest.warns(UserWarning, match=r"plain torch on this GPU.* its extra 'fla'") as caught, on_gpu():
        sp = longspan.SequenceSharding(MeshGroups("cuda"))
        for _ in range(2):
            longspan.linear_attention(*(_ones(1, 8, 2, 4) for _ in "qkv"), sp, decay=_ones(1, 8, 2))
    assert len([w for w in caught if "plain torch" in str(w.message)]) == 1
