"""A layer on a fake GPU (`tests/syncs.py`) never makes the host wait, and allocates no large tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import longspan
from longspan.attn.kernels import flex as longspan_flex
from tests.choose import confirming, each_value
from tests.fakes import fake_world
from tests.syncs import GPU, Seen, on_gpu, one_gpu

# ---------------------------------------------------------------------------------------------------------------------
# The counter.

NUMBERS = [1, 2, 3]
WAITS: dict[str, Any] = {
    "item": lambda x: x.sum().item(),
    "int": lambda x: int(x[0]),
    "bool": lambda x: bool((x > 1).any()),
    "if": lambda x: 1 if x.max() > 0 else 0,
    "a slice by a value": lambda x: x[: x[0]],
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "to": lambda x: x.to("cpu"),
    "copy to the host": lambda x: torch.zeros(3, dtype=torch.int64).copy_(x),
    "nonzero": lambda x: x.nonzero(),
    "a boolean index": lambda x: x[x > 1],
    "masked_select": lambda x: x.masked_select(x > 1),
    "unique": lambda x: x.unique(),
    "repeat_interleave": lambda x: torch.repeat_interleave(x),
    "equal": lambda x: torch.equal(x, x),
    "new numbers": lambda x: torch.tensor(NUMBERS, device=x.device),
    "new_tensor": lambda x: x.new_tensor(NUMBERS),
    "from the host": lambda x: torch.tensor(NUMBERS).to(x.device),
    "cuda": lambda x: torch.tensor(NUMBERS).cuda(),
    "copy from the host": lambda x: x.copy_(torch.tensor(NUMBERS)),
    "synchronize": lambda x: torch.cuda.synchronize(),
}


def test_operations_that_wait_are_recorded() -> None:
    for name, operation in WAITS.items():
        with on_gpu() as found:
            x = torch.arange(3, device="cuda")
            assert found == []
            operation(x)
        assert len(found) == 1, (name, found)


def test_operations_that_do_not_wait_are_not_recorded() -> None:
    with on_gpu() as found:
        x = torch.arange(3, device=GPU)
        assert x.device == GPU and x.is_cuda and not x.is_cpu and x.device.type == "cuda"
        y = torch.empty(2, 3, device="cuda:0", dtype=torch.bfloat16, requires_grad=True)
        ((y * x).float().softmax(-1) @ torch.ones(3, device=y.device)).sum().backward()
        assert y.grad is not None and y.grad.device == GPU
        torch.zeros_like(y).index_select(1, x)[:, 1:].to(torch.float32)
        x.masked_fill(x > 1, 0).new_zeros(3)
        torch.repeat_interleave(x, 2, output_size=6)
        torch.tensor(NUMBERS).pin_memory().to(x.device, non_blocking=True)
        torch.empty(3, dtype=torch.int64, device="cuda").copy_(torch.tensor(NUMBERS), non_blocking=True)
        host = torch.arange(5)  # the host's own tensors are real
        assert host.tolist() == [0, 1, 2, 3, 4] and int(host[host > 2].sum()) == 7 and bool(host.any())
    assert found == []
    assert torch.empty(1).device.type == "cpu" and not torch.empty(1, device="meta").is_cuda


class _WaitsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        assert grad.is_cuda and grad.device == GPU
        return grad * torch.tensor(NUMBERS, device=grad.device)


def test_waits_in_a_backward_are_recorded() -> None:
    with on_gpu() as found:
        x = torch.ones(3, device="cuda", requires_grad=True)
        _WaitsInBackward.apply(x).sum().backward()
    assert found == ["tensor of numbers, to the device"]


# ---------------------------------------------------------------------------------------------------------------------
# Attention.

N = 512
IDS = (torch.arange(N) * 7 // N)[None].expand(2, -1).contiguous()
MASKS: dict[str, dict[str, Any]] = {
    "causal": {},
    "bidirectional": {"causal": False},
    "short window": {"window": 100},
    "long window": {"window": 300},
    "window to both sides": {"window": 60, "causal": False},
    "chunks": {"chunk_size": 128},
    "prefix": {"prefix": 50},
    "a prefix for each row": {"prefix": (50, 100)},
    "documents": {"documents": IDS},
    "documents in a window": {"documents": IDS, "window": 30},
    "cu_seqlens": {"cu_seqlens": torch.tensor([0, 100, 512])},
    "padding": {"documents": torch.where(torch.arange(N) < 480, 0, -1)[None].expand(2, -1).contiguous()},
    "sinks": {"sinks": 8},
    "softcap": {"softcap": 20.0},
    "alibi": {"alibi": 8},
    "a mask function": {"mask_mod": lambda b, h, q, kv: (q - kv) % 2 == 0},
    "keys of another length": {"kv_length": 1024, "q_start": N},
}
IN_A_RING = [name for name in MASKS if name != "keys of another length"]


def _waits(
    sp: longspan.SequenceSharding, heads: tuple[int, int] = (8, 2), n: int = N, dim: int = 64,
    dtype: torch.dtype = torch.bfloat16, **options: Any,
) -> Seen:  # fmt: skip
    """Return what waits in one layer, forward and backward, on this rank of `sp`."""
    with on_gpu() as found:
        n, m = n // sp.size, options.get("kv_length", n) // sp.size
        shapes = [(2, tokens, h, dim) for tokens, h in ((n, heads[0]), (m, heads[1]), (m, heads[1]))]
        q, k, v = (torch.empty(s, dtype=dtype, device="cuda", requires_grad=True) for s in shapes)
        for name in ("sinks", "alibi"):
            if name in options:
                options[name] = torch.empty(options[name], device="cuda", requires_grad=name == "sinks")
        of_layer = {name: options.pop(name) for name in ("sinks", "alibi", "softcap") if name in options}
        plan = longspan.prepare_attention(q, k, v, sp, **options, **of_layer)
        found.clear()  # the host may wait once per batch, but not in a layer
        out = longspan.attention(q, k, v, sp, plan=plan, **of_layer)
        assert out.is_cuda and out.shape == q.shape
        out.sum().backward()
        assert q.grad is not None and q.grad.shape == q.shape
    return found


@pytest.mark.parametrize(("name", "kernel"), each_value(MASKS, ["auto", "tiled"]))
def test_one_device(name: str, kernel: str) -> None:
    assert _on_one_device(kernel=kernel, **MASKS[name]) == []


def _on_one_device(**options: Any) -> Seen:
    with mock.patch("torch.cuda.current_device", lambda: 0):
        sp = one_gpu()
    return _waits(sp, **options)


def _in_a_world(ring: int, ulysses: int, heads: tuple[int, int], **options: Any) -> list[Seen]:
    """Return `_waits` of every rank of a fake world, which sends no messages."""
    found = []
    nothing: dict[str, Any] = {"batch_isend_irecv": lambda ops: []}
    nothing |= dict.fromkeys(
        ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"), lambda *a, **k: None
    )
    for rank in range(ring * ulysses):
        with fake_world(rank, ring * ulysses):
            mesh = longspan.init_mesh(ring=ring, ulysses=ulysses, device_type="cpu")
            sp = longspan.SequenceSharding(mesh)
            with mock.patch.multiple(dist, **nothing):
                found.append(_waits(sp, heads, **options))
    return found


@pytest.mark.parametrize(
    ("name", "ring", "heads"),
    [(name, 2 if i % 4 else 4, (8, 2) if i % 5 else (6, 3)) for i, name in enumerate(IN_A_RING)],
)
def test_a_ring_and_usp(name: str, ring: int, heads: tuple[int, int]) -> None:
    assert _in_a_world(ring, 4 // ring, heads, **MASKS[name]) == [[]] * 4


def _of_flex_shapes(q: Any, k: Any, v: Any, *_: Any) -> Any:
    """Stand in for FlexAttention, which refuses tensors without data: an output and a log-sum-exp."""
    q, v = q.flatten(2, 3), v.flatten(2, 3)
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)


def _of_flex_gradients(q: Any, k: Any, v: Any, out: Any, lse: Any, grad: Any, *_: Any) -> Any:
    assert out.shape == grad.shape == (*q.shape[:4], v.shape[4]) and lse.shape == (*q.shape[:4], 1)
    return tuple(torch.empty_like(x.flatten(2, 3)) for x in (q, k, v))


@pytest.fixture
def uncompiled() -> Iterator[None]:
    """Replace FlexAttention: there is no GPU to compile it for."""
    forward, backward = (lambda compiled: _of_flex_shapes), (lambda compiled: _of_flex_gradients)
    with mock.patch.multiple(longspan_flex, _flex_attention=forward, _flex_backward=backward):
        yield


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would be compiled for a real GPU")
@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.usefixtures("uncompiled")
class TestFlex:
    @pytest.mark.parametrize("name", ["long window", "documents", "prefix", "softcap", "a mask function"])
    def test_one_device(self, name: str) -> None:
        assert _on_one_device(kernel="flex", **MASKS[name]) == []

    @pytest.mark.parametrize("name", ["documents", "a mask function"])
    def test_a_ring(self, name: str) -> None:
        assert _in_a_world(2, 1, (8, 2), kernel="flex", **MASKS[name]) == [[]] * 2


def test_heads_in_uneven_groups() -> None:
    assert _in_a_world(1, 2, (6, 3)) == [[]] * 2


# ---------------------------------------------------------------------------------------------------------------------
# fp32, wide heads, and head_dims that are no multiple of 8: no flash attention supports these.

TOKENS = 4096
NO_FLASH = [(torch.float32, 100), (torch.bfloat16, 512), *confirming([(torch.float32, 64), (torch.bfloat16, 100)])]


def _four_tensors(dim: int, tokens: int) -> int:
    """Return the bytes of four fp32 tensors of all tokens: at most half of the scores of one block."""
    return 4 * 2 * tokens * 8 * dim * 4


@pytest.mark.parametrize(("dtype", "dim"), [(torch.bfloat16, 64), *NO_FLASH])
def test_no_tensor_contains_all_scores(dtype: torch.dtype, dim: int) -> None:
    for seen in _in_a_world(2, 1, (8, 2), n=TOKENS, dim=dim, dtype=dtype):
        assert seen.largest <= _four_tensors(dim, TOKENS // 2)
    if dim == 64:
        assert _on_one_device(n=TOKENS, dim=dim, dtype=dtype, kernel="tiled").largest <= _four_tensors(dim, TOKENS)


def test_batches_of_many_lengths_build_few_plans_of_cudnn() -> None:
    calls = []
    with on_gpu() as found:
        sp = one_gpu()
        for n in (*range(512, 552, 2), 514):
            q, k, v = (torch.empty(1, n, h, 64, dtype=torch.bfloat16, device="cuda") for h in (8, 2, 2))
            found.launches.clear()
            longspan.attention(q, k, v, sp)
            calls.append(found.launches["_scaled_dot_product_cudnn_attention"])
    assert calls == [1] * 8 + [0] * 12 + [1]
