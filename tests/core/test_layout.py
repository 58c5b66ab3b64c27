"""Which rank holds which tokens and heads: arithmetic over drawn shapes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longspan.core.errors import LongspanError
from longspan.core.heads import split_heads
from longspan.core.layout import Layout

pytestmark = pytest.mark.fast


def test_an_empty_sequence_is_refused() -> None:
    with pytest.raises(LongspanError, match="at least 1 token, this one has 0"):
        Layout(2).local_length(0)


@given(kv=st.integers(1, 24), group=st.integers(1, 16), ranks=st.integers(1, 64))
def test_heads_are_split_once_evenly_with_the_kv_heads_they_need(kv: int, group: int, ranks: int) -> None:
    shards = split_heads(kv * group, kv, ranks)
    heads = [head for shard in shards for head in range(shard.q_start, shard.q_stop)]
    assert heads == list(range(kv * group))
    assert max(shard.q_heads for shard in shards) == -(-kv * group // ranks)  # the best that any cut can do
    for shard in shards:
        needed = {head // group for head in range(shard.q_start, shard.q_stop)}
        assert needed == set(range(shard.kv_start, shard.kv_stop))
        assert sum(shard.group_sizes) == shard.q_heads and len(shard.group_sizes) == shard.kv_heads


@pytest.mark.parametrize(("q", "kv"), [(0, 1), (4, 0), (6, 4)])
def test_impossible_heads(q: int, kv: int) -> None:
    with pytest.raises(LongspanError, match=f"{q}.*{kv}"):
        split_heads(q, kv, 2)


@pytest.mark.parametrize(("ring", "ulysses", "kind"), [(1, 3, "contiguous"), (2, 2, "zigzag"), (4, 1, "contiguous")])
@pytest.mark.parametrize("n", [1, 17])
def test_locate_token(ring: int, ulysses: int, kind: str, n: int) -> None:
    layout = Layout(ring, ulysses, kind)
    held = [[i for a, b in layout.padded_spans(n, rank) for i in range(a, b)] for rank in range(layout.size)]
    for token in range(n):
        rank, at = layout.locate_token(n, token)
        assert held[rank][at] == token
