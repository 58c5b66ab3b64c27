"""FlexAttention's GPU path on a CPU: blocks against `create_block_mask`, and the number of compiled programs."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex
from torch.utils._python_dispatch import TorchDispatchMode

import longspan
from longspan.attn.kernels import flex
from longspan.attn.kernels.base import Blocks
from longspan.attn.mask import Mask, over_indices
from longspan.attn.score import Scores
from longspan.compat import torch_attention
from longspan.core.errors import LongspanError
from longspan.core.layout import Layout
from tests.attn.attention import compare, one_device
from tests.attn.flexing import classes, listed
from tests.choose import confirming
from tests.oracle import Case, errors, make, options
from tests.tolerance import MARGIN

CPU = torch.device("cpu")


def _blocks(mask: Mask, batch: int, lengths: tuple[int, int], layout: Layout | None = None, rank: int = 0) -> Blocks:
    layout = layout or Layout()
    k_spans, owners = layout.runs(lengths[1])
    q_spans = tuple((a + mask.q_start, b + mask.q_start) for a, b in layout.block(lengths[0], rank))
    return Blocks(mask, Scores().kind, batch, 2, 0, lengths, q_spans, k_spans, owners, CPU)


# ---------------------------------------------------------------------------------------------------------------------
# Blocks.

SIZE = 8


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "BLOCK", SIZE)


def _segments(draw: Any, rows: int, n: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Documents with padding between them."""
    out = []
    for _ in range(rows):
        borders = sorted(draw(st.sets(st.integers(0, n), min_size=2, max_size=8)))
        runs = list(itertools.pairwise(borders))
        out.append(tuple(run for run in runs if draw(st.integers(0, 4))))
    return tuple(out)


@st.composite
def problems(draw: Any) -> tuple[Mask, int, int, Layout, int]:
    """A mask, rows of the batch, a length, and a rank of a ring."""
    n, batch = draw(st.integers(1, 90)), draw(st.integers(1, 3))
    causal = draw(st.booleans())
    kind = draw(st.sampled_from(["plain", "window", "chunk", "window and chunk", "prefix", "prefixes"]))
    near = st.sampled_from([SIZE, 2 * SIZE, 3 * SIZE]) | st.integers(1, n)
    options: dict[str, Any] = {"causal": causal}
    if "window" in kind:
        options["window"] = draw(near)
    if "chunk" in kind:
        options["chunk_size"] = draw(near)
    if "prefix" in kind:
        of_row = st.integers(0, n)
        options |= {"causal": True, "prefix": draw(of_row)}
        if kind == "prefixes":
            options["prefix"] = tuple(draw(of_row) for _ in range(batch))
    if draw(st.booleans()):
        options["segments"] = _segments(draw, batch, n)
    ring = draw(st.sampled_from([1, 1, 2, 4]))
    layout = Layout(ring=ring, kind=draw(st.sampled_from(["contiguous", "zigzag"])) if ring > 1 else "contiguous")
    return Mask(**options), batch, n, layout, draw(st.integers(0, ring - 1))


def _brute_force(mask: Mask, blocks: Blocks, block: int, counts: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """The padded dense mask of one block, and torch's classes of its blocks."""
    i, j = blocks.positions(block)
    seen = mask.dense(blocks.batch, 1, i, j)[:, 0]
    seen = seen & (i < blocks.ends[0])[:, None] & (j < blocks.ends[1])
    seen = torch.nn.functional.pad(seen, (0, counts[1] * SIZE - len(j), 0, counts[0] * SIZE - len(i)))
    lengths = counts[0] * SIZE, counts[1] * SIZE
    found = torch_flex.create_block_mask(
        lambda b, h, q, kv: seen[b, q, kv], len(seen), None, *lengths, device="cpu", BLOCK_SIZE=SIZE
    )
    partial = listed(found.kv_num_blocks, found.kv_indices, counts[1])
    full = listed(found.full_kv_num_blocks, found.full_kv_indices, counts[1])
    assert partial is not None and full is not None
    return seen, partial + 2 * full


@pytest.mark.usefixtures("small_blocks")
@settings(max_examples=60)
@given(problems())
@example((Mask(prefix=SIZE + 3), 1, 40, Layout(), 0))  # prefix and causality each show a part of a block
@example((Mask(causal=False), 1, 50, Layout(ring=2, kind="zigzag"), 0))  # two spans share a block
@example((Mask(causal=False, window=32), 1, 48, Layout(ring=2, kind="zigzag"), 0))  # and the window just covers it
@example((Mask(segments=(((0, 20), (20, 64)),) * 2, causal=False), 2, 64, Layout(), 0))
def test_blocks_are_those_of_brute_force(problem: tuple[Mask, int, int, Layout, int]) -> None:
    mask, batch, n, layout, rank = problem
    blocks = _blocks(mask, batch, (n, n), layout, rank)
    for block, made in enumerate(flex.FLEX.prepare(blocks)):
        if made is None:
            assert not blocks.parts[block]
            continue
        seen, expected = _brute_force(mask, blocks, block, made.counts)
        found = classes(made.lists, made.counts)
        assert torch.equal(found.expand(batch, -1, -1, -1), expected.expand(batch, -1, -1, -1))
        for partial, full in (made.lists[1:4:2], made.lists[5::2]):  # a GPU reads both kinds with the strides of one
            assert partial is not None and (full is None or partial.stride() == full.stride())
        at = (torch.arange(size) for size in (batch, 1, *(count * SIZE for count in made.counts)))
        assert torch.equal(over_indices("mask", made.mask_mod(0), *at)[:, 0], seen.expand(batch, -1, -1))


@pytest.mark.usefixtures("small_blocks")
def test_blocks_of_keys_of_another_length() -> None:
    runs = (((0, 13), (13, 30)), ((0, 30), (30, 30))), (((0, 5), (5, 41)), ((0, 20), (20, 60)))
    cross = Mask(causal=False, segments=runs[0], kv_segments=runs[1])
    all_but_a_pair = Mask(prefix=3 * SIZE - 1, q_start=SIZE - 2)  # of the block of queries 22 to 29, keys 16 to 23
    problems_ = (cross, 2, (30, 60)), (Mask(q_start=35, window=20), 1, (25, 60)), (all_but_a_pair, 1, (32, 60))
    for mask, batch, lengths in problems_:
        blocks = _blocks(mask, batch, lengths)
        (made,) = flex.FLEX.prepare(blocks)
        assert made is not None and made.counts == (4, 8)
        _, expected = _brute_force(mask, blocks, 0, made.counts)
        assert torch.equal(classes(made.lists, made.counts), expected)


@pytest.mark.usefixtures("small_blocks")
def test_a_mask_function_is_not_called_by_prepare() -> None:
    """It may hide any pair, so no block is full; it is never called with positions of padding."""
    n, asked = 50, []
    table = torch.arange(float(n))[:, None]

    def mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        asked.append(q)
        of_q, of_k = (torch.nn.functional.embedding(at, table)[..., 0] for at in (q, kv))  # raises outside
        return (of_q + of_k) % 3 > 0

    blocks = _blocks(Mask(mask_mod=mod), 2, (n, n), Layout(ring=2, kind="zigzag"), 1)
    plain = flex.FLEX.prepare(_blocks(Mask(), 2, (n, n), Layout(ring=2, kind="zigzag"), 1))
    made = flex.FLEX.prepare(blocks)
    assert not asked
    for mine, other in zip(made, plain, strict=True):
        assert mine is not None and other is not None and mine.lists[2:4] == mine.lists[6:] == (None, None)
        expected = classes(other.lists, other.counts)
        assert (expected == 2).any() and torch.equal(classes(mine.lists, mine.counts), (expected > 0).long())
        over_indices(
            "mask", mine.mask_mod(0), *(torch.arange(size) for size in (2, 2, *(c * SIZE for c in mine.counts)))
        )
    assert asked


class _Largest(TorchDispatchMode):
    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple) else [out]:
            if isinstance(x, Tensor):
                self.nbytes = max(self.nbytes, x.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize(
    ("n", "document", "share"), [(1 << 17, 1 << 17, 1), (1 << 20, 1000, 200), *confirming([(1 << 20, 30_000, 25)])]
)
def test_blocks_of_a_long_sequence_are_small(n: int, document: int, share: int) -> None:
    """The peak is one list of all blocks for a causal mask, and `1 / share` of it for documents."""
    runs = tuple((start, min(start + document, n)) for start in range(0, n, document))
    blocks = _blocks(Mask(segments=(runs,)), 1, (n, n))
    _ = blocks.parts
    with _Largest() as largest:
        (made,) = flex.FLEX.prepare(blocks)
    assert made is not None
    everything = 4 * (n // flex.BLOCK) ** 2
    lists = sum(x.nbytes for x in made.lists if x is not None)
    assert largest.nbytes <= max(everything // share, 8 * n)  # 8 n: the positions
    assert lists <= 4 * everything // share


# ---------------------------------------------------------------------------------------------------------------------
# Programs.


FORWARD, BACKWARD = "flex_attention", "flex_attention_backward"


@contextlib.contextmanager
def _traced() -> Iterator[list[list[str]]]:
    """Trace FlexAttention as for a GPU, run it without code generation; list the operators of each compiled program."""
    made: list[list[str]] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        made.append([name for node in graph.graph.nodes if (name := str(node.target)) in (FORWARD, BACKWARD)])
        return graph.forward

    compile_ = torch.compile

    def compiled(function: Any, **kwargs: Any) -> Any:
        return compile_(function, **{"backend": backend, **kwargs})

    torch.compiler.reset()
    with mock.patch.object(torch, "compile", compiled):
        attend, backward = flex._flex_attention.__wrapped__(True), flex._flex_backward.__wrapped__(True)
    named = {"_flex_attention": lambda compiled: attend, "_flex_backward": lambda compiled: backward}
    with mock.patch.multiple(flex, **named), mock.patch.object(torch_flex, "_validate_device", lambda *_: None):
        yield made
    torch.compiler.reset()


@pytest.fixture
def programs() -> Iterator[list[list[str]]]:
    with _traced() as made:
        yield made


def _documents(n: int) -> tuple[int, ...]:
    return tuple(at // (5 + n // 7) for at in range(n))


LENGTHS = (300, 512, 100)
KINDS: dict[str, Callable[[int], Case]] = {
    "window, one KV head": lambda n: Case(n=n, window=90, kv_heads=1, batch=2),
    "a prefix for each row": lambda n: Case(n=n, prefix=(n // 3, n // 2), batch=2),
    "softcap in chunks": lambda n: Case(n=n, softcap=2.0, chunk_size=64),
    "a mask function, alibi and a bias": lambda n: Case(n=n, mod="striped", alibi=True, bias="waves"),
    "chunked prefill of documents": lambda n: Case(n=n, kv_n=2 * n, q_start=n // 2, documents=_documents(2 * n)),
}


def _found(case: Case, **more: Any) -> dict[str, float]:
    x = make(case)
    with torch.no_grad():
        out = longspan.attention(x["q"], x["k"], x["v"], one_device(), kernel="flex", **options(case, x), **more)
    return errors(case, {"out": out})


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*list(KINDS)[::2], *confirming(list(KINDS)[1::2])])
def test_a_kind_of_layer_is_compiled_once_for_all_lengths(programs: list[list[str]], kind: str) -> None:
    for n in LENGTHS:
        case = KINDS[kind](n)
        assert max(_found(case).values()) <= MARGIN, n
        assert len(programs) == 1, f"compiled anew for {n} tokens"


def _errors_and_programs(cases: list[Case], **more: Any) -> tuple[list[dict[str, float]], list[list[str]]]:
    """Return the errors of outputs and gradients of some attentions, and the programs compiled for all of them."""
    with _traced() as programs, mock.patch.object(flex.FlexKernel, "refuses", lambda *_: None):
        return [compare(case, one_device(), "flex", **more) for case in cases], programs


def _case(n: int, **scores: Any) -> Case:
    return Case(n=n, documents=_documents(n), batch=2, q_heads=8, kv_heads=4, **scores)


def _check_programs(
    found: list[dict[str, float]], programs: list[list[str]], backwards: int, forwards: int = 1
) -> None:
    assert max(max(of_case.values()) for of_case in found) <= MARGIN, found
    if torch_attention.flex_attend_backward() is None:  # before torch 2.13 a backward runs a forward
        return
    assert sorted(programs) == [[FORWARD]] * forwards + [[BACKWARD]] * backwards


@pytest.mark.slow
@pytest.mark.parametrize("scores", [{"window": 90, "softcap": 3.0}, *confirming([{"alibi": True, "bias": "waves"}])])
def test_a_backward_is_compiled_once_without_a_forward(scores: dict[str, Any]) -> None:
    _check_programs(*_errors_and_programs([_case(n, **scores) for n in LENGTHS[:2]]), 1)


@pytest.mark.slow
@pytest.mark.confirms
def test_programs_of_head_chunks() -> None:
    """A chunk of padded tokens has other strides than one that is a view of all heads."""
    cases = [_case(n) for n in (300, 512, 100, 640)]
    _check_programs(*_errors_and_programs(cases, head_chunks=2), 2, 2)


@pytest.mark.slow
def test_too_many_programs_raise(programs: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_attention, "RECOMPILE_LIMIT", 2)
    kinds = [Case(n=20), Case(n=20, chunk_size=3), Case(n=20, prefix=3)]
    with torch._dynamo.config.patch(recompile_limit=1):
        for case in kinds[:2]:
            _found(case)
        for _ in range(2):
            with pytest.raises(LongspanError, match=r"compiled 2 times.*kernel='tiled'.*recompile_limit above 2"):
                _found(kinds[2])
        assert max(_found(Case(n=300, chunk_size=3)).values()) <= MARGIN  # compiled programs still run
    assert len(programs) == 2
    with torch._dynamo.config.patch(recompile_limit=3):  # the user's own limit, if it is larger
        assert max(_found(kinds[2]).values()) <= MARGIN
