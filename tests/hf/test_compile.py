"""torch.compile: full graphs, and gradients that equal the eager ones.

A collective that a compiler inlines away gives zero gradients silently, so every parameter is compared.
"""

from __future__ import annotations

import functools
import shutil
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import longspan
from longspan import LongspanError, Memory, exchange
from tests.choose import confirming
from tests.models import Truth, batch, build, check_gradients, check_loss, gradients, truth_of
from tests.pool import RankPool, on_ranks
from tests.tolerance import excess


class _Block(nn.Module):
    """An attention layer with its projections and a norm, over a sharded sequence; `bias` also scales the norm."""

    def __init__(
        self, sp: longspan.SequenceSharding, q_heads: int, kv_heads: int, length: int, chunks: int, bias: bool
    ) -> None:
        super().__init__()
        self.sp, self.length, self.chunks = sp, length, chunks
        self.norm = nn.LayerNorm(32, elementwise_affine=bias)
        self.q, self.k, self.v = (nn.Linear(32, 8 * heads, bias) for heads in (q_heads, kv_heads, kv_heads))
        self.o = nn.Linear(8 * q_heads, 32, bias)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (f(y).unflatten(-1, (-1, 8)) for f in (self.q, self.k, self.v))
        out = longspan.attention(q, k, v, self.sp, length=self.length, head_chunks=self.chunks)
        return x + self.o(out.flatten(2))


def _gradients(block: nn.Module, x: Tensor) -> dict[str, Tensor]:
    block.zero_grad()
    x = x.clone().requires_grad_()
    block(x).square().sum().backward()
    assert x.grad is not None
    return {"x": x.grad, **{name: p.grad.clone() for name, p in block.named_parameters()}}


def _compare(
    q_heads: int, kv_heads: int, length: int, backend: str, ring: int = 1, chunks: int = 1, options: Any = None
) -> None:
    sp = longspan.SequenceSharding(
        longspan.init_mesh(ring=ring, ulysses=dist.get_world_size() // ring), **(options or {})
    )
    block = _Block(sp, q_heads, kv_heads, length, chunks, bias=backend != "inductor")  # fewer programs to compile
    x = sp.shard(torch.randn(2, length, 32))
    eager, exact = _gradients(block, x), _gradients(block.double(), x.double())
    block.float()  # the same weights as before: fp64 represents every fp32 number
    torch._dynamo.reset()
    fullgraph = ring == chunks == 1 and not options
    compiled = _gradients(torch.compile(block, fullgraph=fullgraph, backend=backend), x)  # type: ignore[arg-type]
    for name, grad in eager.items():
        assert grad.abs().max() > 0, name
        assert excess(compiled[f"_orig_mod.{name}" if name != "x" else name], grad, exact[name]) <= 1, name


@pytest.mark.parametrize(("q_heads", "kv_heads", "length"), [(6, 3, 15), *confirming([(4, 1, 16), (4, 2, 16)])])
def test_compiled_gradients_equal_eager(pool2: RankPool, q_heads: int, kv_heads: int, length: int) -> None:
    pool2.run(_compare, q_heads, kv_heads, length, "aot_eager", timeout=180)


@pytest.mark.parametrize(("pool", "ring"), [(2, 2), *confirming([(4, 2), (4, 4)])], indirect=["pool"])
def test_compiled_gradients_of_a_ring_equal_eager(pool: RankPool, ring: int) -> None:
    """Rings are not compiled: the graph breaks around the whole attention."""
    pool.run(_compare, 4, 2, 18, "aot_eager", ring, timeout=180)


@pytest.mark.parametrize(("chunks", "options"), [(2, {}), *confirming([(1, {"overlap_chunks": 2})])], ids=str)
def test_compiled_gradients_of_chunks_equal_eager(pool2: RankPool, chunks: int, options: dict[str, Any]) -> None:
    """Chunked all-to-alls are not compiled: collectives fill their buffers within one function."""
    pool2.run(_compare, 8, 4, 15, "aot_eager", 1, chunks, options, timeout=180)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch's inductor needs a C++ compiler (g++) on CPU")
def test_inductor_gradients_equal_eager(pool2: RankPool) -> None:
    """Ranks of the same length run the same kernels, which one of them compiles."""
    pool2.run(_with_inductor, timeout=300)


def _with_inductor() -> None:
    import torch._inductor.config

    # What each rank would do first takes six times as long: start compiler processes that import torch, compile a
    # program for each kind of vector instructions to see that it runs, and precompile headers. Without vectors, g++
    # parses fewer headers.
    options = {
        "compile_threads": 1, "cpp.vec_isa_ok": True, "cpp_cache_precompile_headers": False, "cpp.simdlen": 1,
    }  # fmt: skip
    with torch._inductor.config.patch(options):
        _compare(4, 2, 16, "inductor")


# ---------------------------------------------------------------------------------------------------------------------
# Models.

SAVED = Memory(checkpointing="selective", tiled=True)
# Ranks, family, mesh, memory, and the lengths of the batches. Dynamic shapes take most time to compile: one rank does.
MODELS: list[tuple[int, str, dict[str, int], Any, tuple[int, ...]]] = [
    (1, "Mistral", {}, SAVED, (21, 26)),
    (2, "Gemma3Text", {"tensor": 2}, Memory(), (21,)),
]


def _build(family: str) -> Any:
    """Return a model with a layer, Bamba's with one of each kind, as each is compiled."""
    one = {} if family == "Bamba" else {"num_hidden_layers": 1}
    windows = {"layer_types": ["sliding_attention"]} if family == "Gemma3Text" else {}
    return build(family, vocab_size=64, **one, **windows)


def _compare_model(
    family: str, mesh: dict[str, int], memory: Any, lengths: tuple[int, ...], truths: list[Truth]
) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    sp = longspan.SequenceSharding(longspan.init_mesh(**mesh))
    model: Any = longspan.parallelize(_build(family), sp, memory=memory)
    longspan.compile_layers(model, backend=counter, dynamic=len(lengths) > 1)
    graphs = 0
    for n, truth in zip(lengths, truths, strict=True):
        model.zero_grad()
        out = model(**batch(n=n))
        out.loss.backward()
        assert "logits" not in out
        check_loss(float(out.loss.detach()), truth)
        check_gradients(gradients(model), truth)
        assert counter.frame_count == (graphs or counter.frame_count) > 0, n  # once for all lengths
        graphs = counter.frame_count


@pytest.mark.parametrize(
    ("pool", "family", "mesh", "memory", "lengths"),
    [
        *MODELS,
        *confirming(
            [
                (2, "Bamba", {"ring": 2}, SAVED, (21,)),
                *((2, "Mistral", {"ring": 2}, SAVED, lengths) for lengths in ((21,), (21, 26))),
            ]
        ),
    ],
    indirect=["pool"],
)
def test_compiled_layers_make_no_logits_and_keep_their_memory_options(
    pool: RankPool, family: str, mesh: dict[str, int], memory: Any, lengths: tuple[int, ...]
) -> None:
    """With sliding windows, on a ring and on a tensor axis: the gradients are the same."""
    truths = [truth_of(_build(family), batch(n=n)) for n in lengths]
    pool.run(_compare_model, family, mesh, memory, lengths, truths, timeout=240)


def test_compile_layers_errors() -> None:
    with pytest.raises(LongspanError, match="is not parallelized"):
        longspan.compile_layers(build("Llama"))


@on_ranks(2, timeout=120)
def test_compiled_exchange() -> None:
    group: Any = dist.group.WORLD
    reshard = functools.partial(exchange.reshard, gather_dim=3, shard_dim=1)
    for function in (exchange.seq_to_heads, exchange.heads_to_seq, reshard):
        x = torch.randn(2, 4, 4, 3, requires_grad=True)
        w = torch.randn_like(function(x, group).detach())
        (eager,) = torch.autograd.grad((function(x, group) * w).sum(), x)
        torch._dynamo.reset()
        compiled = torch.compile(lambda x, f=function: f(x, group), fullgraph=True, backend="aot_eager")
        (ours,) = torch.autograd.grad((compiled(x) * w).sum(), x)
        assert torch.equal(ours, eager) and ours.abs().max() > 0
