"""Flash attention's two operators as on a GPU, for CPU tensors, in plain formulas.

The checks and the windows are those of torch's `flash_api.cpp`: the diagonal ends at the last query and the last key of
a sequence; is_causal sets the right limit to 0; a limit of at least the longest sequence of keys is none; if a window
has one limit, the other is the longest sequence of keys. Rows without keys return zero and +inf. Half precision is
computed in fp32. For comparisons, fp32 and fp64, which a GPU's kernel refuses, are accepted.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from longspan.attn.kernels import flash

NAMES = {"forward": torch.ops.aten._flash_attention_forward, "backward": torch.ops.aten._flash_attention_backward}


@dataclass
class Calls:
    """Arguments by name of each forward and of each backward."""

    forward: list[dict[str, Any]] = field(default_factory=list)
    backward: list[dict[str, Any]] = field(default_factory=list)


@contextlib.contextmanager
def emulated() -> Iterator[Calls]:
    """Let kernel "flash" accept CPU tensors of any floating dtype."""
    calls = Calls()

    def forward(*args: Any, **options: Any) -> Any:
        calls.forward.append(_bound("forward", args, options))
        return _forward(**calls.forward[-1])

    def backward(*args: Any, **options: Any) -> Any:
        calls.backward.append(_bound("backward", args, options))
        return _backward(**calls.backward[-1])

    with mock.patch.multiple(flash, _flash=forward, _flash_backward=backward, _unfit=lambda need: None):
        yield calls


def _bound(way: str, args: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    """Return arguments by torch's names; fail if they do not fit its signature."""
    schema = NAMES[way].default._schema.arguments
    names = [x.name for x in schema if not x.kwarg_only]
    assert len(args) == len(names) and set(options) <= {x.name for x in schema if x.kwarg_only}
    return {**dict(zip(names, args, strict=True)), **options}


def _check(q: Tensor, k: Tensor, v: Tensor, *more: Tensor, ends: tuple[Tensor | None, Tensor | None]) -> None:
    """Make the checks of `mha_fwd`, `mha_varlen_fwd` and their backwards."""
    for x in (q, k, v, *more):
        assert x.dtype == q.dtype and x.is_floating_point()
        assert x.stride(-1) == 1, "Input tensor must have contiguous last dimension"
        assert x.dim() == (4 if ends[0] is None else 3)
    H, D = q.shape[-2:]
    assert D <= 256 and D % 8 == 0, f"head_dim {D}"
    assert H % k.shape[-2] == 0, "number of heads in key/value must divide number of heads in query"
    assert k.shape == v.shape and k.shape[-1] == D
    assert all(x.shape == q.shape for x in more)
    assert (ends[0] is None) == (ends[1] is None)
    for x, end in zip((q, k), ends, strict=True):
        if end is None:
            assert q.shape[0] == k.shape[0]
            continue
        assert end.dtype == torch.int32 and end.dim() == 1 and end.is_contiguous() and end.numel() > 1
        assert int(end[0]) == 0 and int(end[-1]) == x.shape[0], "borders that exclude tokens"
        assert bool((end.diff() > 0).all()), "an empty sequence"


def _window(left: int | None, right: int | None, causal: bool, max_q: int, max_k: int) -> tuple[int, int]:
    """Return the limits as the kernel reads them; no negative one but -1 is valid."""
    left, right = -1 if left is None else left, -1 if right is None else right
    assert left >= -1 and right >= -1, f"window {left}, {right} would be read as no limit"
    assert (left, right) != (-1, 0) or causal, "a causal call says is_causal"
    if causal:
        assert (left, right) == (-1, -1), "with a limit, FA2 does not pack the query heads of a lone query"
        right = 0
    left, right = (-1 if limit >= max_k else limit for limit in (left, right))
    if left < 0 <= right:
        left = max_k
    if right < 0 <= left:
        right = max_k
    return left, right


def _allowed(Q: int, T: int, window: tuple[int, int]) -> Tensor:
    i, j = torch.arange(Q)[:, None] + T - Q, torch.arange(T)
    ok = torch.ones(Q, T, dtype=torch.bool)
    if window[0] >= 0:
        ok &= j >= i - window[0]
    if window[1] >= 0:
        ok &= j <= i + window[1]
    return ok


def seen_by(Q: int, T: int, window: tuple[int, int], max_q: int = 0, max_k: int = 0) -> Tensor:
    """Return the keys of each query in a call with this window, bool [Q, T]."""
    max_q, max_k = max(Q, max_q), max(T, max_k)
    causal = window == (-1, 0)
    return _allowed(Q, T, _window(*((-1, -1) if causal else window), causal, max_q, max_k))


def _sequences(ends: Tensor | None, rows: int) -> list[Any]:
    """Return the index of each sequence in a tensor of tokens: a row of the batch, or a slice between borders."""
    if ends is None:
        return list(range(rows))
    return [slice(int(a), int(b)) for a, b in itertools.pairwise(ends)]


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _scores(q: Tensor, k: Tensor, scale: float, window: tuple[int, int]) -> Tensor:
    """Return [H, Q, T] of q [Q, H, D] and k [T, K, D]."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    s = torch.einsum("qhd,thd->hqt", _wide(q), _wide(k)) * scale
    return s.masked_fill(~_allowed(q.shape[0], k.shape[0], window), -torch.inf)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int,
    max_k: int, dropout_p: float, is_causal: bool, return_debug_mask: bool, scale: float,
    window_size_left: int | None = None, window_size_right: int | None = None,
) -> Any:  # fmt: skip
    _check(query, key, value, ends=(cum_seq_q, cum_seq_k))
    assert dropout_p == 0 and not return_debug_mask
    of_q, of_k = _sequences(cum_seq_q, query.shape[0]), _sequences(cum_seq_k, key.shape[0])
    _check_longest(query, of_q, max_q)
    _check_longest(key, of_k, max_k)
    window = _window(window_size_left, window_size_right, is_causal, max_q, max_k)
    out, lse = torch.empty_like(query), []
    for a, b in zip(of_q, of_k, strict=True):
        s = _scores(query[a], key[b], scale, window)
        total = s.logsumexp(-1)
        nothing = torch.isneginf(total)
        p = (s - total.masked_fill(nothing, 0)[..., None]).exp()
        v = _wide(value[b]).repeat_interleave(query.shape[-2] // key.shape[-2], 1)
        out[a] = torch.einsum("hqt,thd->qhd", p, v).to(query.dtype)
        lse.append(total.masked_fill(nothing, torch.inf))
    return out, torch.stack(lse) if cum_seq_q is None else torch.cat(lse, 1), None, None, None


def _check_longest(x: Tensor, sequences: list[Any], longest: int) -> None:
    """Check the longest sequence: the kernel starts as many blocks, so a smaller number would exclude tokens."""
    assert max(x[at].shape[0] for at in sequences) == longest


def _backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
    cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int, max_k: int, dropout_p: float, is_causal: bool,
    rng_state: Tensor, unused: Tensor, scale: float, window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> Any:  # fmt: skip
    _check(query, key, value, out, grad_out, ends=(cum_seq_q, cum_seq_k))
    assert dropout_p == 0 and rng_state.dtype == torch.uint64
    of_q, of_k = _sequences(cum_seq_q, query.shape[0]), _sequences(cum_seq_k, key.shape[0])
    _check_longest(query, of_q, max_q)
    _check_longest(key, of_k, max_k)
    H, K = query.shape[-2], key.shape[-2]
    dense = cum_seq_q is None
    assert logsumexp.shape == ((query.shape[0], H, query.shape[1]) if dense else (H, query.shape[0]))
    assert logsumexp.is_contiguous() and logsumexp.dtype == torch.promote_types(query.dtype, torch.float32)
    window = _window(window_size_left, window_size_right, is_causal, max_q, max_k)
    dq, dk, dv = (torch.empty_like(x) for x in (query, key, value))
    for a, b in zip(of_q, of_k, strict=True):
        q, k, v, g, o = (_wide(x) for x in (query[a], key[b], value[b], grad_out[a], out[a]))
        lse = logsumexp[a] if dense else logsumexp[:, a]
        p = (_scores(query[a], key[b], scale, window) - lse[..., None]).exp()
        wide_k, wide_v = (x.repeat_interleave(H // K, 1) for x in (k, v))
        dp = torch.einsum("qhd,thd->hqt", g, wide_v)
        ds = p * (dp - (g * o).sum(-1).T[..., None]) * scale
        dq[a] = torch.einsum("hqt,thd->qhd", ds, wide_k).to(query.dtype)
        for total, weights, x in ((dk, ds, q), (dv, p, g)):
            by_head = torch.einsum("hqt,qhd->thd", weights, x)
            total[b] = by_head.unflatten(1, (K, H // K)).sum(2).to(query.dtype)
    return dq, dk, dv
