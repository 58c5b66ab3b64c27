"""Attention masks as values: a few integers that say who attends to whom, never an S x S tensor."""

from __future__ import annotations

import dataclasses
import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from longspan.attn.segments import Segments
from longspan.attn.tree import Trees, along_paths, read_trees, tree_regions
from longspan.core.errors import LongspanError
from longspan.core.layout import Span
from longspan.core.regions import Region
from longspan.core.validation import LARGEST_COUNT, check_flag, check_function, check_number, format_value

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""FlexAttention's `mask_mod(b, h, q, kv) -> bool`: batch row, query head, query position, key position."""


@dataclass(frozen=True)
class Mask:
    """Query i attends to key j if all of these conditions hold; positions count from the start of the whole sequence.

    To add an option, add a field here and extend `pairwise`; if regions can describe it, extend `segment_regions` and
    name it in `BY_REGIONS` (attn/kernels/base.py), else in the `computes` of each kernel that follows it: other kernels
    refuse it. If it differs from row to row, extend `varies_by_row` and `row_groups`; for models, extend `_mask` of
    hf/forward/attention.py. The keywords of `longspan.attention` (api.py) are written by hand: every field but
    `segments`, `nodes` and `bidirectional` has one.

    Attributes:
        causal: j <= i.
        window: i - j < window (sliding window); without `causal` also j - i < window. None: no limit.
        chunk_size: i // chunk_size == j // chunk_size (Llama-4's chunked attention). None: no chunks.
        prefix: every query sees keys j < prefix in spite of `causal` (prefix-LM). One number for all rows of the batch,
            or one per row.
        segments: i and j lie in the same segment of their batch row (a document, or what is not padding). None: one
            segment.
        kv_segments: for cross attention: segment m of `segments` attends to segment m of these. None: keys have the
            queries' segments.
        q_start: position of query 0 among the keys (chunked prefill: the queries are the last tokens).
        mask_mod: a function of (row, head, i, j) that must return True. Heads are those of the whole model.
        bidirectional: for each batch row spans of tokens (disjoint, in order) whose queries also see the later keys of
            their own span in spite of `causal` (the tokens of an image in Gemma-3). `window` still hides earlier keys.
        nodes: for each batch row the nodes of trees, whose tokens see their own path only (`TreeMask`). `window` and
            `chunk_size` then count along paths.
    """

    causal: bool = True
    window: int | None = None
    chunk_size: int | None = None
    prefix: int | tuple[int, ...] | None = None
    segments: Segments | None = None
    kv_segments: Segments | None = None
    q_start: int = 0
    mask_mod: MaskMod | None = None
    bidirectional: Segments | None = None
    nodes: Trees | None = None

    def __post_init__(self) -> None:
        for name in ("window", "chunk_size"):
            value = getattr(self, name)
            if value is not None:
                check_number(name, value, 1, LARGEST_COUNT, whole=True)
        for prefix in self._prefixes:
            check_number("prefix", prefix, 0, LARGEST_COUNT, whole=True)
        if self.prefix is not None and not self.causal:
            raise LongspanError("`prefix` needs a causal mask; with causal=False every key is seen already")
        if self.prefix is not None and (self.window or self.chunk_size):
            raise LongspanError("`prefix` cannot be combined with `window` or `chunk_size`; use a `mask_mod`")
        if self.bidirectional is not None and (not self.causal or self.prefix is not None):
            given = "a prefix" if self.causal else "causal=False"
            raise LongspanError(
                f"`bidirectional` spans need a causal mask without a prefix, got {given}; a prefix can be a span, too"
            )
        if self.nodes is not None and type(self) is not Mask:
            raise LongspanError(
                f"a {type(self).__name__} defines its own regions, without `nodes`; use a TreeMask alone"
            )
        if self.nodes is not None and (not self.causal or self.prefix is not None or self.bidirectional is not None):
            raise LongspanError("trees need a causal mask without `prefix` and `bidirectional`; leave these out")
        if self.kv_segments is not None and (self.causal or self.window or self.chunk_size or self.q_start):
            raise LongspanError(
                "keys of another sequence (cross attention) have no order with the queries; use causal=False without "
                "window and chunk_size"
            )
        check_flag("causal", self.causal)
        if self.mask_mod is not None:
            check_function("mask_mod", self.mask_mod, "b, h, q, kv")
        check_number("q_start", self.q_start, 0, LARGEST_COUNT, whole=True)

    @property
    def _prefixes(self) -> tuple[int, ...]:
        if self.prefix is None:
            return ()
        return self.prefix if isinstance(self.prefix, tuple) else (self.prefix,)

    @property
    def varies_by_row(self) -> bool:
        """Whether rows of the batch may have different masks."""
        by_row = self.segments, self.kv_segments, self.bidirectional, self.nodes
        return any(x is not None for x in by_row) or isinstance(self.prefix, tuple)

    def limited_to(self, length: int) -> Mask:
        """Drop a window or chunk size that reaches over a whole sequence of `length` tokens."""
        if type(self) is not Mask:  # a subclass may give its window another meaning
            return self
        out = self
        if out.window is not None and out.window >= length:
            out = dataclasses.replace(out, window=None)
        if out.chunk_size is not None and out.chunk_size >= length:
            out = dataclasses.replace(out, chunk_size=None)
        return out

    def regions(self, row: int, queries: int, keys: int) -> tuple[Region, ...]:
        """Return one batch row's mask as disjoint regions, in the order of the keys; `mask_mod` is left out.

        A region's queries [q0, q1) attend to its keys [k0, k1) where lo <= query - key <= hi (None: no limit).

        Args:
            row: the batch row.
            queries: number of real queries; their positions are q_start to q_start + queries - 1.
            keys: number of real keys.
        """
        regions = (
            region.within(q, k)
            for q, k in self._segment_pairs(row, (self.q_start, self.q_start + queries), (0, keys))
            if q[0] < q[1] and k[0] < k[1]
            for region in self.segment_regions(row, q, k)
        )
        return tuple(region for region in regions if region is not None)

    def segment_regions(self, row: int, queries: Span, keys: Span) -> Iterator[Region]:
        """Yield `pairwise` for one segment as disjoint regions, in the order of the keys.

        A custom mask overrides this and `pairwise`; everything else follows from the two.

        Args:
            row: the batch row.
            queries: positions of the segment's queries.
            keys: positions of its keys.
        """
        if self.nodes is not None:
            yield from tree_regions(self.nodes[row], self.window, self.chunk_size)
            return
        lo = 0 if self.causal else None
        hi = None if self.window is None else self.window - 1
        if self.window is not None and not self.causal:
            lo = 1 - self.window
        if self.bidirectional is not None:
            yield from self._around_spans(self.bidirectional[row], queries, keys, hi)
            return
        prefix = 0 if self.prefix is None else self._prefixes[row if isinstance(self.prefix, tuple) else 0]
        if prefix > keys[0]:
            yield Region(*queries, keys[0], min(prefix, keys[1]))
        if prefix < keys[1]:
            yield Region(*queries, max(prefix, keys[0]), keys[1], lo, hi)

    def _around_spans(self, spans: tuple[Span, ...], queries: Span, keys: Span, hi: int | None) -> Iterator[Region]:
        """Yield the regions of bidirectional spans, whose queries see all their keys, and of the queries between."""
        at = queries[0]
        first = max(0, bisect_right(spans, (at, at)) - 1)  # there may be thousands of spans
        for start, stop in itertools.islice(spans, first, None):
            if start >= queries[1]:
                break
            begin, end = max(start, at), min(stop, queries[1])
            if begin < end:
                if at < begin:
                    yield Region(at, begin, *keys, 0, hi)
                yield Region(begin, end, keys[0], min(stop, keys[1]), None, hi)
                at = end
        if at < queries[1]:
            yield Region(at, queries[1], *keys, 0, hi)

    def _segment_pairs(self, row: int, queries: Span, keys: Span) -> Iterator[tuple[Span, Span]]:
        """Yield each segment's queries and keys; chunks of `chunk_size` cut segments too, but not trees."""
        q_spans = (queries,) if self.segments is None else self.segments[row]
        k_spans = ((keys,) if self.segments is None else q_spans) if self.kv_segments is None else self.kv_segments[row]
        for q, k in zip(q_spans, k_spans, strict=True):
            if self.chunk_size is None or self.nodes is not None:
                yield q, k
                continue
            first, stop = min(q[0], k[0]) // self.chunk_size, -(-max(q[1], k[1]) // self.chunk_size)
            for number in range(first, stop):
                chunk = number * self.chunk_size, (number + 1) * self.chunk_size
                yield _intersect(q, chunk), _intersect(k, chunk)

    def pairwise(self, q: Tensor, kv: Tensor, prefix: Tensor | int = 0) -> Tensor:
        """Evaluate the mask by its definition, element by element, without segments and `mask_mod`.

        Args:
            q: positions of queries, int64.
            kv: positions of keys, broadcastable with `q`.
            prefix: number of keys that a query sees in spite of `causal`, broadcastable with both.

        Returns:
            bool, of the broadcast shape.
        """
        allowed = torch.ones_like(kv, dtype=torch.bool)
        if self.causal:
            ahead = self.prefix is not None or self.bidirectional is not None
            allowed = allowed & ((kv <= q) | (kv < prefix) if ahead else kv <= q)
        if self.window is not None:
            allowed = allowed & (q - kv < self.window)
            if not self.causal:
                allowed = allowed & (kv - q < self.window)
        if self.chunk_size is not None:
            allowed = allowed & (q // self.chunk_size == kv // self.chunk_size)
        return allowed

    def dense(self, batch: int, heads: int, i: Tensor, j: Tensor, *, first_head: int = 0) -> Tensor:
        """Materialize the mask for queries at positions `i` and keys at `j`.

        The plain reference, O(queries x keys): for tests, the eager kernel and the reference ring.

        Args:
            batch: number of batch rows.
            heads: number of local query heads; only a `mask_mod` distinguishes them.
            i: positions of queries, int64 [Q].
            j: positions of keys, int64 [K].
            first_head: index of the first local head in the whole model.

        Returns:
            bool [B or 1, H or 1, Q, K].
        """
        if self.nodes is None:
            prefixes_BQ = self.prefixes(i)
            allowed_BQK = self.pairwise(i[None, :, None], j[None, None], prefixes_BQ[..., None])
            allowed_BQK = allowed_BQK.expand(len(prefixes_BQ), len(i), len(j))
        else:
            (at_BQ, _), (at_BK, end_BK) = along_paths(self.nodes, i), along_paths(self.nodes, j)
            on_path_BQK = (j <= i[:, None]) & (i[:, None] < end_BK[:, None])
            allowed_BQK = self.pairwise(at_BQ[..., None], at_BK[:, None]) & on_path_BQK
        if self.segments is not None:
            q_ids, k_ids = self.segment_ids(batch, i, j)
            allowed_BQK = allowed_BQK & (q_ids[:, :, None] == k_ids[:, None, :]) & (q_ids >= 0)[:, :, None]
        allowed_BHQK = allowed_BQK[:, None]
        if self.mask_mod is not None:
            heads_span = first_head, first_head + heads
            allowed_BHQK = allowed_BHQK & self.evaluate_mask_mod((0, batch), heads_span, i, j)
        return allowed_BHQK

    def prefixes(self, i: Tensor) -> Tensor:
        """Return how many keys the query at each position sees in spite of `causal`: int64 [B or 1, len(i)]."""
        if self.bidirectional is None:
            return torch.tensor(self._prefixes or (0,), device=i.device)[:, None].expand(-1, len(i))
        numbers_BQ = _segment_of(self.bidirectional, i)
        ends = [torch.tensor([0, *(stop for _, stop in row)], device=i.device) for row in self.bidirectional]
        return torch.stack([end[number + 1] for end, number in zip(ends, numbers_BQ, strict=True)])

    def segment_ids(self, batch: int, i: Tensor, j: Tensor) -> tuple[Tensor, Tensor]:
        """Return the segment of each query and key position, -1 for none: int64 [B, len(i)] and [B, len(j)]."""
        if self.segments is None:
            return i.new_zeros(batch, len(i)), j.new_zeros(batch, len(j))
        k_segments = self.segments if self.kv_segments is None else self.kv_segments
        return _segment_of(self.segments, i), _segment_of(k_segments, j)

    def evaluate_mask_mod(self, rows: Span, heads: Span, i: Tensor, j: Tensor) -> Tensor:
        """Call `mask_mod` as FlexAttention does, for all rows, heads and positions: bool [B or 1, H or 1, Q, K].

        The row or head dimension is 1 if the function does not use that index.

        Raises:
            LongspanError: if the function does not return one boolean for each pair.
        """
        assert self.mask_mod is not None
        b, h = (torch.arange(*span, device=i.device) for span in (rows, heads))
        allowed = over_indices("mask_mod", self.mask_mod, b, h, i, j)
        if allowed.dtype != torch.bool:
            raise LongspanError(f"mask_mod must return booleans, it returned {allowed.dtype}")
        for dim in (0, 1):  # vmap expands what does not depend on an index
            allowed = allowed.narrow(dim, 0, 1) if allowed.stride(dim) == 0 else allowed
        return allowed

    def check(self, batch: int, queries: int, keys: int) -> None:
        """Raise if the mask does not fit a batch of `batch` rows with these numbers of queries and keys.

        Raises:
            LongspanError: with the numbers.
        """
        if isinstance(self.prefix, tuple) and len(self.prefix) != batch:
            raise LongspanError(f"`prefix` has {len(self.prefix)} entries, the tensors have a batch of {batch}")
        for prefix in self._prefixes:
            if prefix > keys:
                raise LongspanError(f"prefix={prefix} is longer than the {keys} keys")
        if self.q_start + queries > keys and self.causal and self.segments is None:
            raise LongspanError(
                f"queries at {self.q_start} to {self.q_start + queries - 1} lie behind the {keys} keys; a causal mask "
                f"needs keys up to the last query (or causal=False)"
            )
        if self.nodes is not None:
            sizes = [row[-1][1] for row in self.nodes]
            if self.q_start or queries != keys or sizes != [keys] * batch:
                raise LongspanError(
                    f"a tree mask of {len(sizes)} rows of {sizes[0]} tokens does not fit {batch} rows of {queries} "
                    f"queries and {keys} keys (q_start={self.q_start}); it needs an entry for every token"
                )
        for name, rows, end in (
            ("documents", self.segments, max(keys, queries)),
            ("kv_documents", self.kv_segments, keys),
            ("bidirectional", self.bidirectional, keys),
        ):
            if rows is None:
                continue
            if len(rows) != batch:
                raise LongspanError(f"`{name}` has {len(rows)} rows, the tensors have a batch of {batch}")
            if rows is self.bidirectional and any(a[1] > b[0] for row in rows for a, b in itertools.pairwise(row)):
                raise LongspanError("`bidirectional` spans of a row overlap or are not in order; merge and sort them")
            last = max((span[1] for row in rows for span in row), default=0)
            if last > end:
                raise LongspanError(f"`{name}` reaches to token {last}, the sequence has {end}")


def TreeMask(
    tin: Tensor,
    tout: Tensor,
    *,
    window: int | None = None,
    chunk_size: int | None = None,
    mask_mod: MaskMod | None = None,
) -> Mask:
    """Return the mask of trees: token q sees k <= q with `tin[k] <= tin[q] < tout[k]`, its path to the root.

    Sequences with shared prefixes form a tree whose nodes contain shared tokens once. Number the nodes in preorder: a
    node's `tin` is its number, its `tout` the first number after its descendants. Either all tokens of a node have its
    numbers, or each token is a node. The cost follows the pairs that attend. `longspan.pack_tree` makes trees.

    Args:
        tin: int64 `[length]`, or `[batch, length]` for a tree in each row; never falls along a row.
        tout: likewise. Several roots are several trees, which do not see each other.
        window: a token sees the last `window` tokens of its path, itself included.
        chunk_size: tokens see only their own chunk, counted along the path.
        mask_mod: a function that must be true too; its positions count the tokens of the row, not of a path.

    Raises:
        LongspanError: for tokens out of preorder, and for intervals that overlap without nesting.
    """
    nodes = read_trees(tin, tout)
    return Mask(window=window, chunk_size=chunk_size, mask_mod=mask_mod, nodes=nodes)


def over_indices(name: str, function: Callable[..., Tensor], *indices: Tensor) -> Tensor:
    """Call a function of scalar indices for all combinations of them by vmap: FlexAttention's calling convention.

    Raises:
        LongspanError: if the function, called `name`, returns no tensor.
    """

    def checked(*at: Tensor) -> Tensor:
        value: object = function(*at)
        if not isinstance(value, Tensor):
            raise LongspanError(f"{name} must return a tensor for each pair, it returned {format_value(value)}")
        return value

    over = checked
    for dim in reversed(range(len(indices))):
        over = torch.vmap(over, in_dims=tuple(0 if d == dim else None for d in range(len(indices))))
    return over(*indices)


def row_groups(mask: Mask, batch: int) -> tuple[Span, ...]:
    """Return runs of batch rows [b0, b1) that have the same mask, so that one call can compute them."""
    if not mask.varies_by_row:
        return ((0, batch),)
    prefixes = mask.prefix if isinstance(mask.prefix, tuple) else None
    by_row = mask.segments, mask.kv_segments, prefixes, mask.bidirectional, mask.nodes
    masks = [tuple(None if rows is None else rows[b] for rows in by_row) for b in range(batch)]
    borders = [0, *(b for b in range(1, batch) if masks[b] != masks[b - 1]), batch]
    return tuple(itertools.pairwise(borders))


def _intersect(a: Span, b: Span) -> Span:
    return max(a[0], b[0]), min(a[1], b[1])


def _segment_of(rows: Segments, positions: Tensor) -> Tensor:
    """Return the segment number of each position, -1 for none: int64 [B, len(positions)]."""
    ids = torch.full((len(rows), len(positions)), -1, dtype=torch.int64, device=positions.device)
    for b, row in enumerate(rows):
        spans = sorted((start, stop, number) for number, (start, stop) in enumerate(row) if stop > start)
        if spans:  # binary search: there may be thousands of segments
            starts, stops, numbers = torch.tensor(list(zip(*spans, strict=True)), device=positions.device)
            last_before = (torch.bucketize(positions, starts, right=True) - 1).clamp(min=0)
            inside = (positions >= starts[last_before]) & (positions < stops[last_before])
            ids[b] = torch.where(inside, numbers[last_before], -1)
    return ids
