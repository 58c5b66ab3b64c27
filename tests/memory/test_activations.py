"""Recomputed activation functions of MLPs: the same gradients bit for bit, with fewer saved tensors."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import longspan
from longspan.comm.mesh import MeshGroups
from longspan.memory import activations
from longspan.memory.activations import RecomputedActivations
from tests.choose import each_value
from tests.models import batch, build, gradients

ONE_DEVICE = longspan.SequenceSharding(MeshGroups("cpu"))


@pytest.fixture(autouse=True)
def _small_mlps_recompute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "_FEWEST", 0)


class SwiGLU(nn.Module):
    """Written as transformers writes it."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate_proj, self.up_proj = nn.Linear(16, 40, bias=False), nn.Linear(16, 40, bias=False)
        self.down_proj, self.act = nn.Linear(40, 16, bias=False), act

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("act", "dtype"), each_value([nn.SiLU(), nn.GELU(approximate="tanh"), nn.GELU()], [torch.float32, torch.bfloat16])
)
def test_two_of_four_tensors_are_saved_and_gradients_are_equal_bit_for_bit(
    monkeypatch: pytest.MonkeyPatch, act: nn.Module, dtype: torch.dtype
) -> None:
    x, saved, found = torch.randn(2, 100, 16, dtype=dtype), dict[int, int](), []
    pack = activations._pack

    def noted(tensor: Tensor) -> Any:
        packed = pack(tensor)
        owner = getattr(packed, "__self__", None)
        if isinstance(owner, activations.SavedTensor):
            saved[owner.x.untyped_storage().data_ptr()] = owner.x.untyped_storage().nbytes()
        return packed

    monkeypatch.setattr(activations, "_pack", noted)
    for recomputes in (False, True):
        mlp = SwiGLU(act).to(dtype)
        if recomputes:
            RecomputedActivations(mlp)
        leaf = x.clone().requires_grad_()
        out = mlp(leaf)
        out.square().sum().backward()
        found.append([out, leaf.grad, *(p.grad for p in mlp.parameters())])
    weights = 3 * 16 * 40
    assert sum(saved.values()) == (200 * 16 + 2 * 200 * 40 + weights) * dtype.itemsize  # its input, gate and up
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_second_derivatives_are_equal() -> None:
    def second(recomputes: bool) -> Tensor:
        mlp = SwiGLU(nn.SiLU()).double()
        if recomputes:
            RecomputedActivations(mlp)
        x = torch.linspace(-1, 1, 1600, dtype=torch.float64).reshape(1, 100, 16).requires_grad_()
        (first,) = torch.autograd.grad(mlp(x).square().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        return second

    assert torch.equal(second(False), second(True))


def test_a_graph_is_freed_without_garbage_collection() -> None:
    mlp = SwiGLU(nn.Tanh())  # saves its output
    RecomputedActivations(mlp)
    gc.disable()
    try:
        out = mlp(torch.randn(1, 100, 16, requires_grad=True))
        mark = nn.Identity()
        out.grad_fn.metadata["mark"] = mark
        reference = weakref.ref(mark)
        del mark, out
        assert reference() is None
    finally:
        gc.enable()


class Overwritten(nn.Module):
    """Changes a saved tensor."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.exp()
        z = torch.sin(y)
        y.add_(1)
        return z


def test_a_tensor_changed_in_place_is_an_error() -> None:
    module = Overwritten()
    RecomputedActivations(module)
    out = module(torch.randn(1, 200, 16, requires_grad=True))
    with pytest.raises(longspan.LongspanError, match="changed in place after it was saved"):
        out.sum().backward()


@pytest.mark.parametrize(
    ("checkpointed", "family"), each_value([False, True], ["Llama", "Gemma3Text", "Phi3", "Qwen3Moe", "GptOss", "GPT2"])
)
def test_every_family_bit_for_bit(monkeypatch: pytest.MonkeyPatch, family: str, checkpointed: bool) -> None:
    """Also under transformers' own checkpointing, whose hooks come first."""

    def step() -> dict[str, Any]:
        model = longspan.parallelize(build(family), ONE_DEVICE).train()
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model(**batch()).loss.backward()
        return gradients(model)

    recomputed = step()
    monkeypatch.setattr("longspan.memory.activations._FEWEST", 1 << 40)
    plain = step()
    assert plain.keys() == recomputed.keys() and all(torch.equal(plain[name], recomputed[name]) for name in plain)


def test_hooks_of_an_outer_checkpoint_see_all_saved_tensors() -> None:
    mlp = SwiGLU(nn.SiLU())
    RecomputedActivations(mlp)
    seen = []

    def pack(x: Tensor) -> Tensor:
        seen.append(x.shape)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        mlp(torch.randn(1, 100, 16, requires_grad=True))
    assert len([shape for shape in seen if shape[-1] == 40]) >= 4
