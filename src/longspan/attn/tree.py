"""Trees of shared prefixes: tokens with which several sequences begin are stored once.

A tree is stored in preorder: the tokens of a node, then its children with all their descendants. A token sees its
path: the tokens before it in its node, and the nodes above. So a key is seen from its own place to the end of its
node's subtree, and a node is one region: the triangle of its tokens, and below it the rectangle of its descendants.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from longspan.attn.segments import cut_span
from longspan.comm.arguments import check_integers
from longspan.compat.torch_api import to_device
from longspan.core.errors import LongspanError
from longspan.core.regions import Region

Node = tuple[int, int, int]
"""Tokens [start, stop) of a node, and where its subtree ends."""

Trees = tuple[tuple[Node, ...], ...]
"""For each batch row its nodes in order; together they hold every token of the row."""


def read_trees(tin: Tensor, tout: Tensor) -> Trees:
    """Return the nodes of trees in which token q sees k <= q with tin[k] <= tin[q] < tout[k]; `[n]` or `[B, n]`.

    Raises:
        LongspanError: for shapes that differ, tokens out of preorder, and intervals that are no tree.
    """
    for name, x in (("tin", tin), ("tout", tout)):
        check_integers(name, x)
    if tin.shape != tout.shape or tin.dim() not in (1, 2) or 0 in tin.shape:
        raise LongspanError(
            f"`tin` and `tout` need one shape, [length] or [batch, length], got {tuple(tin.shape)} and "
            f"{tuple(tout.shape)}"
        )
    rows = zip(tin.reshape(-1, tin.shape[-1]).cpu(), tout.reshape(-1, tin.shape[-1]).cpu(), strict=True)
    return tuple(_read_row(b, *row) for b, row in enumerate(rows))


def _read_row(b: int, tin: Tensor, tout: Tensor) -> tuple[Node, ...]:
    for wrong, what in (
        (tout <= tin, "has tout <= tin, so it would not see itself"),
        (tin < torch.cat([tin[:1], tin[:-1]]), "has a smaller tin than the token before it: nodes lie in preorder"),
    ):
        if bool(wrong.any()):
            i = int(wrong.int().argmax())
            raise LongspanError(f"token {i} of row {b} (tin {int(tin[i])}, tout {int(tout[i])}) {what}")
    ends = torch.searchsorted(tin.contiguous(), tout.contiguous())  # the first token that does not see this one
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), ends.diff().nonzero()[:, 0] + 1])
    stops = torch.cat([starts[1:], torch.tensor([len(tin)])])
    nodes = tuple(zip(starts.tolist(), stops.tolist(), ends[starts].tolist(), strict=True))
    for number, above in walk(nodes):
        if above and nodes[number][2] > nodes[above[-1]][2]:
            (i, _, end), j = nodes[above[-1]], nodes[number][0]
            raise LongspanError(
                f"the intervals of tokens {i} (tin {int(tin[i])}, tout {int(tout[i])}) and {j} (tin {int(tin[j])}, "
                f"tout {int(tout[j])}) of row {b} overlap and are not nested: token {end} would have two "
                f"parents; number nodes in preorder, as longspan.pack_tree does"
            )
    return nodes


def walk(row: tuple[Node, ...]) -> Iterator[tuple[int, list[int]]]:
    """Yield the number of each node, and the numbers of those above it, from the root; the list is changed later."""
    above = list[int]()
    for number, (start, _, _) in enumerate(row):
        while above and row[above[-1]][2] <= start:
            above.pop()
        yield number, above
        above.append(number)


def depths(row: tuple[Node, ...]) -> list[int]:
    """Return for each node how many tokens are above it: the position of its first token along its path."""
    found = list[int]()
    for _, above in walk(row):
        start, stop, _ = row[above[-1]] if above else (0, 0, 0)
        found.append(found[above[-1]] + stop - start if above else 0)
    return found


def path_lengths(row: tuple[Node, ...]) -> list[int]:
    """Return the tokens of each path from the root to a node without children."""
    nodes = zip(row, depths(row), strict=True)
    return [above + stop - start for (start, stop, end), above in nodes if stop == end]


def children(row: tuple[Node, ...]) -> list[tuple[int, list[int]]]:
    """Return for each node its last token, and the first tokens of its children."""
    found = [(stop - 1, list[int]()) for _, stop, _ in row]
    for number, above in walk(row):
        if above:
            found[above[-1]][1].append(row[number][0])
    return found


def along_paths(trees: Trees, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the position of tokens along their paths, and where their subtrees end: int64 [B, len(tokens)] each.

    Tokens behind the last one (padding) count as part of the last node.
    """
    positions, ends = list[Tensor](), list[Tensor]()
    for row in trees:
        start, _, end, depth = to_device(torch.tensor([*zip(*row, strict=True), depths(row)]), tokens.device)
        node = torch.bucketize(tokens, start, right=True) - 1
        positions.append(tokens - start[node] + depth[node])
        ends.append(end[node])
    return torch.stack(positions), torch.stack(ends)


def tree_regions(row: tuple[Node, ...], window: int | None, chunk_size: int | None) -> Iterator[Region]:
    """Yield who sees whom as disjoint regions; `window` and `chunk_size` count along paths.

    Without these it is one region per node. With them it is one per node (and chunk) and each node above it that lies
    within reach.
    """
    if window is None and chunk_size is None:
        for start, stop, end in row:
            yield Region(start, end, start, stop, 0)
        return
    at_node = depths(row)
    for number, above in walk(row):
        (start, stop, _), first = row[number], at_node[number]
        spans = [(start, stop)]
        if chunk_size is not None:
            spans = list(cut_span(start, stop, start + chunk_size - first % chunk_size, chunk_size))
        for q0, q1 in spans:
            position = first + q0 - start
            lowest = 0 if window is None else max(0, position - window + 1)  # that any of the queries sees
            if chunk_size is not None:
                lowest = max(lowest, position - position % chunk_size)
            for key in itertools.chain((number,), reversed(above)):
                (k0, k1, _), at = row[key], at_node[key]
                if at + k1 - k0 <= lowest:
                    break
                # In positions along the path: (i - start + first) - (j - k0 + at) < window.
                hi = None if window is None else window - 1 + (start - first) - (k0 - at)
                yield Region(q0, q1, k0 + max(0, lowest - at), min(k1, q1), 0, hi)
