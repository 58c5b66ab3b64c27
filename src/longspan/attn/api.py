"""Exact attention over a sharded sequence: `attention()` composes mask, exchange, ring and local kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from longspan.attn.kernels.choice import Choice, Kernel, choose_kernel, tell
from longspan.attn.mask import Mask, MaskMod
from longspan.attn.methods.local import local_attention
from longspan.attn.methods.ring import Ring, reference_ring, ring_attention, routes_of
from longspan.attn.methods.ulysses import ulysses_attention
from longspan.attn.score import Bias, Scores
from longspan.attn.segments import cu_seqlens_segments, document_segments, paired_segments
from longspan.comm.arguments import check_integers, check_sharding, check_tensor
from longspan.core.checked import LARGEST_COUNT, check_flag, check_number, spell
from longspan.core.errors import LongspanError
from longspan.core.heads import HeadShard, check_heads, split_heads
from longspan.core.routes import choose_impl
from longspan.core.segments import Segments

if TYPE_CHECKING:
    from longspan.comm.mesh import SequenceSharding


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sp: SequenceSharding,
    *,
    causal: bool = True,
    length: int | None = None,
    kv_length: int | None = None,
    window: int | None = None,
    chunk: int | None = None,
    prefix: int | Sequence[int] | Tensor | None = None,
    documents: Tensor | None = None,
    kv_documents: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    q_start: int = 0,
    mask_mod: MaskMod | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    alibi: Tensor | None = None,
    bias: Bias | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    kernel: Kernel = "auto",
) -> Tensor:
    """My queries over the whole sequence, exactly, with gradients, on every mesh of ring x ulysses.

    Args:
        q: my tokens, `[batch, tokens, query heads, head_dim]`, as `sp.shard` cut them.
        k: my tokens, `[batch, tokens, KV heads, head_dim]`; the KV heads divide the query heads (MHA, GQA, MQA). Its
            tokens may be those of another sequence, or of a longer one, cut by `sp.shard` for themselves.
        v: as `k`; its head_dim may differ.
        sp: the sharding.
        causal: whether a token sees only itself and what comes before it.
        length: real tokens of the whole sequence, where `sp.shard` padded; by default all that the ranks hold.
        kv_length: the same of the keys; by default `length` where the ranks hold as many keys as queries.
        window: a token sees the last `window` tokens, itself included; without `causal` as many to the other side.
        chunk: tokens see only their own chunk of so many tokens (Llama-4).
        prefix: the first so many tokens are seen by all (prefix-LM); one number, or one per row of the batch.
        documents: int64 `[batch, length]`, an id for every token of the whole sequence, the same on every rank;
            tokens of different ids do not see each other, an id below 0 is padding. (Read on the host once a call.)
            Where the keys are longer than the queries (`q_start`): an id for every key.
        kv_documents: int64 `[batch, kv_length]`, for cross attention: queries of an id see the keys of that id.
        cu_seqlens: int `[documents + 1]`, instead of `documents`: where documents begin, and the length at the end, the
            same in every row of the batch (flash attention's form).
        q_start: the position of the first query among the keys: chunked prefill has `q_start=kv_length - length`.
        mask_mod: a function `(b, h, q, kv) -> bool tensor` that must be true too (FlexAttention's form). Heads and
            positions are those of the whole model and sequence, on every rank; it must be the same on every rank.
        sinks: one learnt logit per query head, `[query heads]` (gpt-oss). Its gradient is this rank's part.
        softcap: scores become softcap * tanh(scores / softcap) (Gemma-2).
        alibi: one slope per query head, `[query heads]`: -slope * |i - j| is added (arXiv:2108.12409).
        bias: a function `(h, q, kv) -> tensor` whose value is added to the score. If what it computes with is learnt,
            only `kernel="eager"` gives that its gradient.
        scale: of the scores; 1/sqrt(head_dim) by default.
        dropout: only 0.0. A random mask that does not depend on the number of ranks has no kernel, so it is refused.
        kernel: the local attention, by name ("auto", "sdpa", "block", "flash_attn", "flex", "eager") or any callable;
            `longspan.explain_kernel` says what "auto" takes and why.

    Returns:
        `[batch, tokens, query heads, head_dim of v]`. Without a ring it is in fp32 to the bit what the same kernel
        gives on one device (with a softcap up to rounding); a ring differs by the order of a sum.

    Raises:
        LongspanError: for tensors of wrong rank, dtypes or shapes that do not fit, heads that do not, and whatever
            the kernel cannot do. All of it from facts that are alike on every rank, before anything is sent.
    """
    mask, scores, (n, m) = _values(
        q, k, v, sp, causal=causal, length=length, kv_length=kv_length, window=window, chunk=chunk, prefix=prefix,
        documents=documents, kv_documents=kv_documents, cu_seqlens=cu_seqlens, q_start=q_start, mask_mod=mask_mod,
        sinks=sinks, softcap=softcap, alibi=alibi, bias=bias, scale=scale, dropout=dropout,
    )  # fmt: skip
    return attend(q, k, v, sp, mask, scores, length=n, kv_length=m, kernel=kernel)


def explain_kernel(
    q: Tensor, k: Tensor, v: Tensor, sp: SequenceSharding, *, kernel: Kernel = "auto", **options: Any
) -> Choice:
    """Which kernel `attention` would run for these tensors, and why; nothing is computed or sent.

    The same is logged (logger "longspan", level INFO) when an attention first runs.

    Args:
        q: as for `attention`; only shapes, dtypes and whether they need gradients are looked at.
        k: as q.
        v: as q.
        sp: the sharding.
        kernel: as for `attention`.
        options: everything else that `attention` takes: causal, window, documents, ...

    Returns:
        A `Choice`: its `name`, its `reason`, and both as `str()`.

    Raises:
        LongspanError: as `attention`.
    """
    mask, scores, lengths = _values(q, k, v, sp, **options)
    return _checked(q, k, v, sp, mask, scores, lengths, kernel)


def _values(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sp: SequenceSharding,
    *,
    length: int | None = None,
    kv_length: int | None = None,
    causal: bool = True,
    window: int | None = None,
    chunk: int | None = None,
    prefix: int | Sequence[int] | Tensor | None = None,
    documents: Tensor | None = None,
    kv_documents: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    q_start: int = 0,
    mask_mod: MaskMod | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    alibi: Tensor | None = None,
    bias: Bias | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
) -> tuple[Mask, Scores, tuple[int, int]]:
    """The options of `attention` as a mask, scores and the lengths of queries and keys."""
    check_sharding(sp)
    _check_tensors(q, k, v)
    check_flag("causal", causal)
    for name, value in (("length", length), ("kv_length", kv_length)):
        if value is not None:
            check_number(name, value, 1, LARGEST_COUNT, whole=True)
    check_number("q_start", q_start, 0, LARGEST_COUNT, whole=True)
    if not isinstance(dropout, int | float) or dropout:
        raise LongspanError(
            f"dropout={spell(dropout)}: attention dropout that does not depend on the number of ranks is not "
            "supported; use 0.0"
        )
    n = q.shape[1] * sp.size if length is None else length
    m = kv_length
    if m is None:
        m = n if k.shape[1] == q.shape[1] else k.shape[1] * sp.size
    rows, kv_segments = _rows(q.shape[0], n, m, q_start, documents, kv_documents, cu_seqlens)
    mask = Mask(causal, window, chunk, _prefix(prefix), rows, kv_segments, q_start, mask_mod)
    return mask, Scores(scale, softcap, sinks, alibi, bias), (n, m)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sp: SequenceSharding,
    mask: Mask,
    scores: Scores,
    *,
    length: int,
    kv_length: int | None = None,
    kernel: Kernel,
) -> Tensor:
    """`attention` with its mask and scores as values: what the model integration calls, once per layer."""
    lengths = length, length if kv_length is None else kv_length
    choice = _checked(q, k, v, sp, mask, scores, lengths, kernel)
    if not torch.compiler.is_compiling():
        tell(choice)
    mask = mask.limited_to(max(lengths))
    if sp.ring_size > 1:
        by_blocks = reference_ring if choice.name == "eager" else ring_attention

        def inner(q: Tensor, k: Tensor, v: Tensor, scores: Scores, share: HeadShard) -> Tensor:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            kv_bytes = (k.numel() + v.numel()) * k.element_size() * sp.ring_size
            impl = choose_impl(sp.ring_impl, kv_bytes, routes_of(sp.layout, lengths, mask, q.shape[0]))
            ring = Ring(sp.ring_group, sp.ring_rank, sp.layout, lengths, impl, share.kv_head_index, choice.name)
            return by_blocks(q, k, v, ring, mask, scores).transpose(1, 2)
    else:
        run = choice.name if isinstance(kernel, str) else kernel

        def inner(q: Tensor, k: Tensor, v: Tensor, scores: Scores, share: HeadShard) -> Tensor:
            return local_attention(q, k, v, mask, scores, run, share.kv_head_index)

    if sp.ulysses_size == 1 or sp.ulysses_group is None:
        (share,) = split_heads(q.shape[2], k.shape[2], 1)
        return inner(q, k, v, scores, share)
    cut = lengths if sp.ring_size == 1 else None
    return ulysses_attention(q, k, v, sp.ulysses_group, scores, inner, lengths=cut, kv_replication=sp.kv_replication)


def _checked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sp: SequenceSharding,
    mask: Mask,
    scores: Scores,
    lengths: tuple[int, int],
    kernel: Kernel,
) -> Choice:
    """Everything that can be refused, refused; the kernel otherwise."""
    _check_tensors(q, k, v)
    for name, x, n in (("length", q, lengths[0]), ("kv_length", k, lengths[1])):
        local = sp.layout.local_length(n)
        if local != x.shape[1]:
            raise LongspanError(
                f"a sequence of {name}={n} over {sp.size} ranks gives {local} tokens to each, the tensors have "
                f"{x.shape[1]}; cut them with sp.shard"
            )
    mask.check(q.shape[0], *lengths)
    if mask.kv_segments is None and mask.q_start == 0 and lengths[0] != lengths[1] and mask.causal:
        raise LongspanError(
            f"{lengths[0]} queries and {lengths[1]} keys: say where the queries are among the keys (q_start="
            f"{max(0, lengths[1] - lengths[0])} for the last of them), or causal=False"
        )
    if mask.mod is not None:
        at = torch.zeros(1, dtype=torch.int64, device=q.device)
        mask.mod_of((0, 1), (0, 1), at, at)  # refuses what is no mask
    scores.check(q.shape[2])
    check_heads(q.shape[2], k.shape[2])
    _check_mesh(k.shape[2], sp)
    grad = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (q, k, v, scores.sinks, scores.alibi)
    )
    limited = mask.limited_to(max(lengths))
    same = lengths[0] == lengths[1]
    return choose_kernel(kernel, limited, scores, device=q.device, grad=grad, ring=sp.ring_size, same_length=same)


def _check_mesh(kv_heads: int, sp: SequenceSharding) -> None:
    if sp.kv_replication or sp.ulysses_size <= kv_heads:
        return
    fits = max(u for u in range(1, kv_heads + 1) if sp.size % u == 0)
    raise LongspanError(
        f"`ulysses={sp.ulysses_size}` needs at least {sp.ulysses_size} KV heads when KV replication is refused, the "
        f"model has {kv_heads}; try `ulysses={fits}, ring={sp.size // fits}`, or allow `kv_replication=True`"
    )


def _rows(
    batch: int,
    n: int,
    m: int,
    q_start: int,
    documents: Tensor | None,
    kv_documents: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Segments | None, Segments | None]:
    """Runs of queries and of keys, from whichever form they are given in."""
    if cu_seqlens is not None:
        if documents is not None or kv_documents is not None:
            raise LongspanError("`cu_seqlens` and `documents` say the same in two ways; pass one of them")
        check_integers("cu_seqlens", cu_seqlens, 1)
        return (cu_seqlens_segments(cu_seqlens, m) * batch), None
    whole = n if kv_documents is not None else max(n, m) if q_start else n
    for name, ids, size in (("documents", documents, whole), ("kv_documents", kv_documents, m)):
        if ids is not None:
            check_tensor(name, ids)
        if ids is not None and tuple(ids.shape) != (batch, size):
            raise LongspanError(
                f"`{name}` has the shape {tuple(ids.shape)}, it needs an id for every token of the whole sequence: "
                f"{(batch, size)}"
            )
        if ids is not None:
            check_integers(name, ids)
    if kv_documents is not None:
        if documents is None:
            documents = torch.zeros(batch, n, dtype=torch.int64)
        return paired_segments(documents, kv_documents)
    return (None if documents is None else document_segments(documents)), None


def _prefix(prefix: int | Sequence[int] | Tensor | None) -> int | tuple[int, ...] | None:
    if isinstance(prefix, Tensor):
        check_integers("prefix", prefix)
        prefix = prefix.tolist() if prefix.dim() else int(prefix)
    if prefix is None:
        return None
    each = prefix if isinstance(prefix, list | tuple) else (prefix,)
    for one in each:
        check_number("prefix", one, whole=True)
    return int(each[0]) if each is not prefix else tuple(int(one) for one in each)


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
    shapes = {name: tuple(x.shape) for name, x in (("q", q), ("k", k), ("v", v))}
    spelled = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
    if any(len(shape) != 4 for shape in shapes.values()):
        raise LongspanError(f"attention needs [batch, tokens, heads, head_dim], four dimensions each, got {spelled}")
    if not q.device == k.device == v.device:
        raise LongspanError(f"q, k and v must be on one device, got q {q.device}, k {k.device}, v {v.device}")
    if len({x.dtype for x in (q, k, v)}) > 1 or not q.is_floating_point():
        raise LongspanError(
            f"attention needs q, k and v of one floating dtype, got q {q.dtype}, k {k.dtype}, v {v.dtype}; cast them"
        )
    if len({shape[0] for shape in shapes.values()}) > 1 or shapes["k"][1] != shapes["v"][1]:
        raise LongspanError(f"q, k and v must have the same batch, k and v the same tokens, got {spelled}")
    if min(*q.shape[:2], k.shape[1]) < 1:
        raise LongspanError(f"attention over no tokens: {spelled}")
    if shapes["q"][3] != shapes["k"][3] or shapes["k"][2] != shapes["v"][2]:
        raise LongspanError(f"q and k need the same head_dim, k and v the same number of heads, got {spelled}")
