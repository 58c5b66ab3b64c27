"""Masks as values: who may attend to whom, said in a few integers, never as a tensor of S x S."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longspan.compat.torch_attention import tree_leaves
from longspan.core.errors import LongspanError
from longspan.core.layout import Span
from longspan.core.regions import Region
from longspan.core.segments import Segments
from longspan.core.validation import check_flag, check_function, format_value

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""`mask_mod(b, h, q, kv) -> bool`, FlexAttention's form: row of the batch, query head, positions of query and key."""


@dataclass(frozen=True)
class Mask:
    """Query token i attends to key token j if all of these hold; i and j count from the start of the whole sequence.

    Attributes:
        causal: j <= i.
        window: i - j < window (sliding window); where the mask is not causal, also j - i < window. None: no limit.
        chunk: i // chunk == j // chunk (chunked attention of Llama-4). None: no chunks.
        prefix: j <= i as `causal` says, or j < prefix (prefix-LM: the first tokens are seen by all). One number for all
            rows of the batch, or one per row. Needs `causal`.
        segments: i and j lie in the same run of tokens of their row of the batch (documents, or what padding leaves).
            None: one run.
        kv_segments: for cross attention, where keys are no tokens of the queries' sequence: the runs of keys; run
            number m of `segments` attends to run number m of these. None: the keys' runs are `segments`.
        q_start: the position of query 0 among the keys (chunked prefill: queries are the last tokens of the keys').
        mod: and this function of (row, head, i, j) is true. A head is that of the whole model, on every rank.
    """

    causal: bool = True
    window: int | None = None
    chunk: int | None = None
    prefix: int | tuple[int, ...] | None = None
    segments: Segments | None = None
    kv_segments: Segments | None = None
    q_start: int = 0
    mod: MaskMod | None = None

    def __post_init__(self) -> None:
        for name in ("window", "chunk"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise LongspanError(
                    f"{name}={format_value(value)} must be at least 1 token (1: a token sees only itself)"
                )
        for prefix in self._prefixes:
            if prefix < 0:
                raise LongspanError(f"prefix={prefix} must be at least 0 tokens")
        if self.prefix is not None and not self.causal:
            raise LongspanError("prefix is what is seen in spite of `causal`; with causal=False everything is seen")
        if self.prefix is not None and (self.window or self.chunk):
            raise LongspanError("prefix together with window or chunk has no one meaning; say it as a mask_mod")
        if self.kv_segments is not None and (self.causal or self.window or self.chunk or self.q_start):
            raise LongspanError(
                "keys of another sequence (cross attention) have no order with the queries; use causal=False without "
                "window and chunk"
            )
        check_flag("causal", self.causal)
        if self.mod is not None:
            check_function("mask_mod", self.mod, "b, h, q, kv")
        if self.q_start < 0:
            raise LongspanError(f"q_start={self.q_start} must be at least 0")

    @property
    def _prefixes(self) -> tuple[int, ...]:
        if self.prefix is None:
            return ()
        return self.prefix if isinstance(self.prefix, tuple) else (self.prefix,)

    @property
    def by_row(self) -> bool:
        """Whether rows of the batch may differ."""
        return self.segments is not None or self.kv_segments is not None or isinstance(self.prefix, tuple)

    def limited_to(self, length: int) -> Mask:
        """The same mask for a sequence of `length`: windows and chunks that reach over all of it are dropped."""
        out = self
        if type(self) is not Mask:  # what a window means there, only its own kind knows
            return out
        if out.window is not None and out.window >= length:
            out = dataclasses.replace(out, window=None)
        if out.chunk is not None and out.chunk >= length:
            out = dataclasses.replace(out, chunk=None)
        return out

    def regions(self, row: int, queries: int, keys: int) -> tuple[Region, ...]:
        """The mask of one row of the batch, `mod` left out, in the order of the keys.

        Args:
            row: the row.
            queries: real queries; they have the positions q_start to q_start + queries - 1.
            keys: real keys.
        """
        spans = (self.q_start, self.q_start + queries), (0, keys)
        parts = (
            part.within(q, k)
            for q, k in self._runs(row, *spans)
            if q[0] < q[1] and k[0] < k[1]
            for part in self.parts(row, q, k)
        )
        return tuple(part for part in parts if part is not None)

    def parts(self, row: int, queries: Span, keys: Span) -> Iterator[Region]:
        """`pairwise` as disjoint regions, in the order of the keys, for one segment's queries and keys.

        A kind of mask of one's own overrides these two; everything else follows from them.

        Args:
            row: the row of the batch.
            queries: positions of the segment's queries.
            keys: positions of its keys.
        """
        lo = 0 if self.causal else None
        hi = None if self.window is None else self.window - 1
        if self.window is not None and not self.causal:
            lo = 1 - self.window
        prefix = 0 if self.prefix is None else self._prefixes[row if isinstance(self.prefix, tuple) else 0]
        if prefix > keys[0]:
            yield Region(*queries, keys[0], min(prefix, keys[1]))
        if prefix < keys[1]:
            yield Region(*queries, max(prefix, keys[0]), keys[1], lo, hi)

    def _runs(self, row: int, queries: Span, keys: Span) -> Iterator[tuple[Span, Span]]:
        """Runs of queries and the runs of keys they may see, chunks cut too."""
        q_runs = (queries,) if self.segments is None else self.segments[row]
        k_runs = ((keys,) if self.segments is None else q_runs) if self.kv_segments is None else self.kv_segments[row]
        for q, k in zip(q_runs, k_runs, strict=True):
            if self.chunk is None:
                yield q, k
                continue
            first, last = min(q[0], k[0]) // self.chunk, -(-max(q[1], k[1]) // self.chunk)
            for c in range(first, last):
                piece = c * self.chunk, (c + 1) * self.chunk
                yield _common(q, piece), _common(k, piece)

    def pairwise(self, q: Tensor, kv: Tensor, prefix: Tensor | int = 0) -> Tensor:
        """The mask by its definition, element by element, segments and `mod` left out.

        Args:
            q: positions of queries, int64.
            kv: positions of keys, of a shape that goes with it.
            prefix: how many keys are seen by all, of a shape that goes with both.

        Returns:
            bool, of the shape of all together.
        """
        allowed = torch.ones_like(kv, dtype=torch.bool)
        if self.causal:
            allowed = allowed & (kv <= q)
        if self.window is not None:
            allowed = allowed & (q - kv < self.window) & (kv - q < self.window)
        if self.chunk is not None:
            allowed = allowed & (q // self.chunk == kv // self.chunk)
        if self.prefix is not None:
            allowed = allowed | (kv < prefix)
        return allowed

    def dense(self, batch: int, heads: int, i: Tensor, j: Tensor, *, first_head: int = 0) -> Tensor:
        """The mask written out for queries at positions `i` and keys at `j`: the plain reference, by definition.

        For tests, the eager kernel and the reference ring; O(queries x keys).

        Args:
            batch: rows of the batch.
            heads: query heads here; only a `mod` tells them apart.
            i: positions of queries, int64 [Q].
            j: positions of keys, int64 [K].
            first_head: the number of the first of these heads in the whole model.

        Returns:
            bool [B or 1, H or 1, Q, K].
        """
        prefixes = torch.tensor(self._prefixes or (0,), device=i.device)[:, None, None]
        allowed = self.pairwise(i[None, :, None], j[None, None], prefixes).expand(len(prefixes), len(i), len(j))
        if self.segments is not None:
            q_ids, k_ids = self.ids(batch, i, j)
            allowed = allowed & (q_ids[:, :, None] == k_ids[:, None, :]) & (q_ids >= 0)[:, :, None]
        allowed = allowed[:, None]
        if self.mod is not None:
            allowed = allowed & self.mod_of((0, batch), (first_head, first_head + heads), i, j)
        return allowed

    def ids(self, batch: int, i: Tensor, j: Tensor) -> tuple[Tensor, Tensor]:
        """The number of the run that each position of a query and of a key lies in: int64 [B, len(i)] and [B, len(j)].

        -1 for none.
        """
        if self.segments is None:
            return i.new_zeros(batch, len(i)), j.new_zeros(batch, len(j))
        return _ids(self.segments, i), _ids(self.segments if self.kv_segments is None else self.kv_segments, j)

    def mod_of(self, rows: Span, heads: Span, i: Tensor, j: Tensor) -> Tensor:
        """`mod` called as FlexAttention calls it, for all rows, heads and positions: bool [B or 1, H or 1, Q, K].

        One row or head stands for all where `mod` does not look at its number.

        Raises:
            LongspanError: if it does not give one truth value for each.
        """
        assert self.mod is not None
        by_row, by_head = _looks_at(self.mod, i.device)
        b = torch.arange(rows[0], rows[1] if by_row else rows[0] + 1, device=i.device)
        h = torch.arange(heads[0], heads[1] if by_head else heads[0] + 1, device=i.device)
        allowed = over_indices(self.mod, b, h, i, j)
        if allowed.dtype != torch.bool:
            raise LongspanError(f"mask_mod must return booleans, it returned {allowed.dtype}")
        return allowed

    def check(self, batch: int, queries: int, keys: int | None = None) -> None:
        """Refuse a mask that does not belong to `batch` rows of so many queries and keys.

        Raises:
            LongspanError: with the numbers.
        """
        keys = queries if keys is None else keys
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
        for name, rows, end in (
            ("documents", self.segments, max(keys, queries)),
            ("kv_documents", self.kv_segments, keys),
        ):
            if rows is None:
                continue
            if len(rows) != batch:
                raise LongspanError(f"`{name}` has {len(rows)} rows, the tensors have a batch of {batch}")
            last = max((run[1] for row in rows for run in row), default=0)
            if last > end:
                raise LongspanError(f"`{name}` reaches to token {last}, the sequence has {end}")


def over_indices(function: Callable[..., Tensor], *indices: Tensor) -> Tensor:
    """`function` of scalar indices, for all combinations of them: FlexAttention's calling convention, by vmap."""
    for dim in reversed(range(len(indices))):
        function = torch.vmap(function, in_dims=tuple(0 if d == dim else None for d in range(len(indices))))
    return function(*indices)


class _Watched(Tensor):
    """A number that knows whether anybody has looked at it."""

    seen = False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, _Watched):
                x.seen = True
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def _looks_at(mod: MaskMod, device: torch.device) -> tuple[bool, bool]:
    """Whether a mask function uses the row of the batch, and the head: most use neither, and need one call for all."""
    b, h = (torch.zeros((), dtype=torch.int64, device=device).as_subclass(_Watched) for _ in range(2))
    at = torch.zeros((), dtype=torch.int64, device=device)
    allowed: object = mod(b, h, at, at)
    if not isinstance(allowed, Tensor):
        raise LongspanError(
            f"mask_mod must return a boolean tensor for (b, h, q, kv), it returned {format_value(allowed)}"
        )
    return b.seen, h.seen


def _common(a: Span, b: Span) -> Span:
    return max(a[0], b[0]), min(a[1], b[1])


def _ids(rows: Segments, positions: Tensor) -> Tensor:
    """The number of the run that each position lies in, int64 [B, len(positions)]; -1 for none."""
    ids = torch.full((len(rows), len(positions)), -1, dtype=torch.int64, device=positions.device)
    for b, row in enumerate(rows):
        # By a search and not run by run: there may be thousands.
        runs = sorted((start, stop, number) for number, (start, stop) in enumerate(row) if stop > start)
        if runs:
            starts, stops, numbers = torch.tensor(list(zip(*runs, strict=True)), device=positions.device)
            at = (torch.bucketize(positions, starts, right=True) - 1).clamp(min=0)  # the last that starts before
            ids[b] = torch.where((positions >= starts[at]) & (positions < stops[at]), numbers[at], -1)
    return ids


def row_groups(mask: Mask, batch: int) -> tuple[Span, ...]:
    """Runs of rows of the batch [b0, b1) that have the same mask, so that they can be computed together."""
    if not mask.by_row:
        return ((0, batch),)
    kinds = [
        (
            None if mask.segments is None else mask.segments[b],
            None if mask.kv_segments is None else mask.kv_segments[b],
            mask.prefix[b] if isinstance(mask.prefix, tuple) else None,
        )
        for b in range(batch)
    ]
    borders = [0, *(b for b in range(1, batch) if kinds[b] != kinds[b - 1]), batch]
    return tuple(itertools.pairwise(borders))
