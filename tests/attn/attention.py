"""Cases of attention, and functions that run one on any sharding."""

from __future__ import annotations

import zlib
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st

import longspan
from longspan.comm.mesh import MeshGroups
from tests.oracle import Case, errors, make, options
from tests.tolerance import MARGIN

PLAIN = {
    "mha": Case(q_heads=4, kv_heads=4),
    "gqa": Case(q_heads=8, kv_heads=4),
    "fewer KV heads than ranks": Case(q_heads=8, kv_heads=2),
    "mqa": Case(q_heads=4, kv_heads=1),
    "length does not divide": Case(n=17),
    "batch, length does not divide": Case(n=13, batch=3),
    "shorter than the ranks": Case(n=3),
    "heads do not divide": Case(q_heads=10, kv_heads=5),
    "a KV group cut unevenly": Case(q_heads=6, kv_heads=3, n=9),
    "7 queries to a KV head": Case(q_heads=14, kv_heads=2),
    "a rank without heads": Case(q_heads=3, kv_heads=3, batch=2),
    "one head": Case(q_heads=1, kv_heads=1),
    "another head_dim for v": Case(v_dim=4),
    "scale": Case(scale=0.3),
    "bidirectional": Case(causal=False, n=11),
    "window": Case(window=5, n=31, batch=2),
    "window of one": Case(window=1, n=9),
    "window over all": Case(window=99, n=9),
    "long window": Case(window=140, n=301),
    "long window by tiles": Case(window=300, n=701, q_heads=2, kv_heads=1),
    "documents": Case(documents=(0,) * 5 + (1,) * 7 + (2,), n=13, batch=2),
    "documents and padding": Case(documents=(-1,) * 2 + (7,) * 5 + (3,) * 4 + (-1,) * 3, n=14),
    "documents and window": Case(documents=(0,) * 9 + (1,) * 12, n=21, window=4),
}
"""Masks that every kernel supports."""

HARD = {
    "chunks": Case(chunk_size=5, n=23, batch=2),
    "chunks and documents": Case(chunk_size=6, documents=(0,) * 9 + (1,) * 11, n=20),
    "bidirectional window": Case(window=4, causal=False, n=25),
    "long bidirectional window": Case(window=150, causal=False, n=500, q_heads=2, kv_heads=1),
    "prefix": Case(prefix=7, n=22),
    "a prefix for each row": Case(prefix=(0, 9, 20), n=20, batch=3),
    "bidirectional spans": Case(spans=(((0, 7), (9, 10), (10, 19)), ()), n=22, batch=2),
    "bidirectional spans and window": Case(spans=(((3, 12), (20, 30)),), n=33, window=5),
    "long bidirectional spans": Case(spans=(((40, 300), (301, 420)),), n=500, window=90, q_heads=2, kv_heads=1),
    "bidirectional spans, documents, padding": Case(
        spans=(((1, 4), (6, 13)),) * 2, documents=(-1,) * 2 + (0,) * 7 + (1,) * 8, n=17, batch=2
    ),
    "bidirectional spans, chunked prefill": Case(spans=(((2, 9), (17, 23)),), n=9, kv_n=25, q_start=16, window=12),
    "trees": Case(
        trees=(((3, -1), (4, 0), (2, 1), (5, 1), (1, 0), (6, -1), (2, 5)), ((9, -1), (7, 0), (7, 0))),
        n=23,
        batch=2,
        q_heads=8,
    ),
    "trees and window": Case(trees=(((6, -1), (3, 0), (5, 1), (4, 1), (7, 0), (5, -1)),), n=30, window=5),
    "trees and chunks": Case(trees=(((6, -1), (3, 0), (5, 1), (4, 1), (7, 0), (5, -1)),), n=30, chunk_size=4),
    "trees, sinks, softcap, documents": Case(
        trees=(((5, -1), (4, 0), (6, 0), (4, -1)),),
        n=19,
        sinks=True,
        softcap=3.0,
        documents=(0,) * 16 + (-1,) * 3,
    ),
    "a long tree": Case(
        trees=(((301, -1), (40, 0), (140, 0), (3, 2), (90, 2), (170, 0)),), n=744, q_heads=2, kv_heads=1
    ),
    "a long tree and window": Case(
        trees=(((301, -1), (40, 0), (140, 0), (3, 2), (90, 2), (170, 0)),), n=744, window=290, q_heads=2, kv_heads=1
    ),
    "prefix and documents": Case(prefix=9, documents=(0,) * 6 + (1,) * 9, n=15),
    "softcap": Case(softcap=2.0, n=18, q_heads=6, kv_heads=2),
    "sinks": Case(sinks=True, n=19, q_heads=6, kv_heads=2),
    "sinks, softcap and window": Case(softcap=5.0, sinks=True, window=4, n=21, q_heads=6, kv_heads=2),
    "sinks and documents with padding": Case(sinks=True, documents=(-1,) * 3 + (0,) * 8 + (1,) * 6 + (-1,) * 2, n=19),
    "sinks on a rank without heads": Case(sinks=True, n=10, q_heads=1, kv_heads=1),
    "alibi": Case(alibi=True, n=21, q_heads=6, kv_heads=3),
    "alibi, bidirectional": Case(alibi=True, causal=False, n=21),
    "a bias": Case(bias="waves", n=17, q_heads=6, kv_heads=2),
    "a mask function": Case(mod="striped", n=21, q_heads=6, kv_heads=3, batch=2),
    "a mask function that leaves rows empty": Case(mod="late", causal=False, n=17, batch=2),
    "a mask function, documents, softcap": Case(mod="striped", documents=(0,) * 8 + (1,) * 5, n=13, softcap=3.0),
    "many short documents": Case(documents=sum(((i,) * (1 + 7 * i % 4) for i in range(24)), ()), n=60, batch=2),
    "many documents of about one length": Case(documents=sum(((i,) * (7 + i % 2) for i in range(8)), ()), n=60),
    "many short documents, bidirectional, padding": Case(
        causal=False, documents=(-1,) * 2 + sum(((i,) * (2 + i % 2) for i in range(20)), ()) + (-1,) * 3, n=55
    ),
    "cross attention": Case(causal=False, n=13, kv_n=30),
    "cross attention, few keys": Case(causal=False, n=30, kv_n=5, batch=2),
    "cross attention with documents": Case(
        causal=False, n=10, kv_n=16, documents=(0,) * 4 + (1,) * 6, kv_documents=(1,) * 7 + (0,) * 6 + (-1,) * 3
    ),
    "chunked prefill": Case(n=9, kv_n=25, q_start=16),
    "chunked prefill in the middle": Case(n=8, kv_n=40, q_start=11, window=9),
    "chunked prefill with documents": Case(n=9, kv_n=25, q_start=16, documents=(0,) * 6 + (1,) * 14 + (2,) * 5),
}
"""Masks and scores that some kernels refuse."""

CASES = {**PLAIN, **HARD}

FEW = (
    "fewer KV heads than ranks", "length does not divide", "a KV group cut unevenly", "a rank without heads",
    "another head_dim for v", "bidirectional", "documents and window", "chunks and documents",
    "a prefix for each row", "sinks, softcap and window", "sinks and documents with padding", "alibi, bidirectional",
    "a bias", "a mask function, documents, softcap", "a mask function that leaves rows empty", "many short documents",
    "cross attention with documents", "chunked prefill with documents", "bidirectional spans and window",
    "bidirectional spans, documents, padding", "trees", "trees and window", "trees, sinks, softcap, documents",
)  # fmt: skip
"""Every option and every kind of shape at least once: for tests of what all masks have in common."""


def sharding(ulysses: int, ring: int = 1, **more: Any) -> longspan.SequenceSharding:
    """Return a sharding over the ranks of the job; `more` are arguments of `SequenceSharding`."""
    return longspan.SequenceSharding(longspan.init_mesh(ring=ring, ulysses=ulysses), **more)


def one_device() -> longspan.SequenceSharding:
    return longspan.SequenceSharding(MeshGroups("cpu"))


def run(
    case: Case, sp: longspan.SequenceSharding, kernel: Any = "auto", attend: Any = None, **more: Any
) -> dict[str, torch.Tensor]:
    """Return output and gradients of the full attention, gathered and summed over the ranks of `sp`.

    `attend(inputs, [q, k, v], sinks)` may compute it otherwise than by `longspan.attention`.
    """
    x = make(case)
    leaves = {name: t.clone().requires_grad_() for name, t in x.items() if name in ("q", "k", "v", "sinks")}
    qkv, sinks = [sp.shard(leaves[name]) for name in "qkv"], leaves.get("sinks")
    if attend is None:
        out = longspan.attention(*qkv, sp, sinks=sinks, kernel=kernel, **options(case, x), **more)
    else:
        out = attend(x, qkv, sinks)
    out.backward(sp.shard(x["grad"]))
    result = {"out": sp.gather(out.detach(), length=case.n)}
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        if sp.size > 1:
            dist.all_reduce(leaf.grad, group=sp.group)
        result[f"d{name}"] = leaf.grad
    return result


def compare(case: Case, sp: longspan.SequenceSharding, kernel: Any = "auto", **more: Any) -> dict[str, float]:
    """Return the errors of output and gradients against the oracle, on one rank; see `errors_on_one_rank`."""
    return errors_on_one_rank(case, run(case, sp, kernel, **more), sp)


def errors_on_one_rank(case: Case, found: dict[str, torch.Tensor], sp: longspan.SequenceSharding) -> dict[str, float]:
    """Return the errors against the oracle on one rank of the sharding, and nothing on the others.

    All have the same results; the oracle takes longer than the attention. Each rank has its share of the cases.
    """
    return errors(case, found) if zlib.crc32(repr(case).encode()) % sp.size == sp.rank else {}


def check_all(found: dict[str, dict[str, float]]) -> None:
    for name, of_case in found.items():
        assert max(of_case.values(), default=0) <= MARGIN, (name, of_case)


def drawn_cases(longest: int, **more: Any) -> Any:
    """Return a strategy for cases of up to `longest` tokens; `more` are strategies for other fields."""
    return st.builds(
        lambda kv, group, **rest: Case(q_heads=kv * group, kv_heads=kv, **rest),
        kv=st.integers(1, 6),
        group=st.integers(1, 5),
        n=st.integers(1, longest),
        batch=st.integers(1, 3),
        dim=st.sampled_from([4, 8, 24]),
        v_dim=st.sampled_from([4, 8]),
        causal=st.booleans(),
        dtype=st.sampled_from([torch.float32, torch.float64]),
        seed=st.integers(0, 3),
        **more,
    )
