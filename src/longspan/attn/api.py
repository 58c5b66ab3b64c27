"""Exact attention over a sharded sequence: `attention()` prepares a plan and executes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from longspan.attn.kernels.choice import AnyKernel, Choice
from longspan.attn.mask import Mask, MaskMod
from longspan.attn.prepare import AttentionPlan, Shapes, check, check_tensors, choose_beside, prepare
from longspan.attn.score import Bias, Scores
from longspan.attn.segments import cu_seqlens_segments, document_segments, paired_segments
from longspan.comm.arguments import check_integers, check_sharding, check_tensor
from longspan.core.errors import LongspanError
from longspan.core.segments import Segments
from longspan.core.validation import LARGEST_COUNT, check_flag, check_number, format_value

if TYPE_CHECKING:
    from longspan.comm.mesh import SequenceSharding

_OF_MASK = ("causal", "window", "chunk", "prefix", "q_start", "mask_mod")
_KEPT_PLANS = 8  # for one who calls attention() layer by layer and keeps no plan


@dataclass(frozen=True, eq=False)
class Options:
    """What `longspan.attention` is told of an attention, as one value; see there for each."""

    causal: bool = True
    length: int | None = None
    kv_length: int | None = None
    window: int | None = None
    chunk: int | None = None
    prefix: int | Sequence[int] | Tensor | None = None
    documents: Tensor | None = None
    kv_documents: Tensor | None = None
    cu_seqlens: Tensor | None = None
    q_start: int = 0
    mask_mod: MaskMod | None = None
    sinks: Tensor | None = None
    softcap: float | None = None
    alibi: Tensor | None = None
    bias: Bias | None = None
    scale: float | None = None
    dropout: float = 0.0
    mask: Mask | None = None
    head_chunks: int = 1

    @property
    def scores(self) -> Scores:
        """How scores are made."""
        return Scores(self.scale, self.softcap, self.sinks, self.alibi, self.bias)

    def mask_options(self) -> list[str]:
        """The names of those that were given and that a plan already has."""
        return [
            field.name
            for field in dataclasses.fields(self)
            if field.name not in ("sinks", "softcap", "alibi", "bias", "scale", "dropout")
            and getattr(self, field.name) is not field.default
        ]

    def mask_of(self, q: Tensor, k: Tensor, sp: SequenceSharding) -> tuple[Mask, tuple[int, int]]:
        """The mask, and the lengths of queries and keys; documents are read on the host.

        Raises:
            LongspanError: for what is no mask of these tensors.
        """
        check_flag("causal", self.causal)
        for name, value in (("length", self.length), ("kv_length", self.kv_length)):
            if value is not None:
                check_number(name, value, 1, LARGEST_COUNT, whole=True)
        check_number("q_start", self.q_start, 0, LARGEST_COUNT, whole=True)
        n = q.shape[1] * sp.size if self.length is None else self.length
        m = self.kv_length
        if m is None:
            m = n if k.shape[1] == q.shape[1] else k.shape[1] * sp.size
        if self.mask is not None:
            self._check_mask(self.mask)
        start = self.q_start if self.mask is None else self.mask.q_start
        segments, kv_segments = _segments(q.shape[0], n, m, start, self.documents, self.kv_documents, self.cu_seqlens)
        if self.mask is not None:
            return self._with_segments(self.mask, segments, kv_segments), (n, m)
        prefix = _prefix(self.prefix)
        mask = Mask(self.causal, self.window, self.chunk, prefix, segments, kv_segments, self.q_start, self.mask_mod)
        return mask, (n, m)

    def _check_mask(self, mask: Mask) -> None:
        if not isinstance(mask, Mask):
            raise LongspanError(f"mask={format_value(mask)} is no longspan.Mask (nor a kind of it)")
        twice = [name for name in self.mask_options() if name in _OF_MASK]
        if twice:
            raise LongspanError(
                f"`mask` says all of {', '.join(_OF_MASK)}, and {', '.join(twice)} was given too; say it in the mask"
            )

    def _with_segments(self, mask: Mask, segments: Segments | None, kv_segments: Segments | None) -> Mask:
        """The mask that was given as a value, with documents where they were given beside it."""
        if segments is None and kv_segments is None:
            return mask
        if mask.segments is not None:
            raise LongspanError("documents are given twice: in the mask (segments), and beside it")
        return dataclasses.replace(mask, segments=segments, kv_segments=kv_segments)

    def check_dropout(self) -> None:
        """Refuse what is not supported.

        Raises:
            LongspanError: with the value.
        """
        if not isinstance(self.dropout, int | float) or self.dropout:
            raise LongspanError(
                f"dropout={format_value(self.dropout)}: attention dropout that does not depend on the number of ranks "
                "is not supported; use 0.0"
            )


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
    mask: Mask | None = None,
    head_chunks: int = 1,
    kernel: AnyKernel = "auto",
    plan: AttentionPlan | None = None,
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
        mask: a `longspan.Mask` instead of causal, window, chunk, prefix, q_start and mask_mod; it may be of a kind of
            one's own (docs/how-to/extend.md).
        head_chunks: pieces in which the heads go through exchange and attention, one after the other, so that what is
            there between the two All-to-Alls is 1/pieces (arXiv:2602.21196); twice that where `sp.overlap_chunks`
            hides the exchange. At most the KV heads of a rank; 0 for as many as these. From 2 on, and for 0, only q, k,
            v and output of my tokens and the log-sum-exp are saved: the backward exchanges q, k, v and output again,
            and the kernel must give the log-sum-exp.
        kernel: the local attention, by name ("auto", "sdpa", "flash", "tiled", "flex", "cudnn", "flash3", "flash4",
            "flash_attn", "eager"), a kernel of one's own (`BlockKernel`, `longspan.kernel_with_lse`), any function
            `f(q, k, v, *, causal, scale, ...)`, or a table of what "auto" shall take (`longspan.kernel_table`);
            `longspan.explain_kernel` says what it takes and why.
        plan: of `longspan.prepare_attention`, made before for tensors like these. It has the mask, lengths, chunks and
            kernel, so none of them may be given again; what belongs to a layer (scale, softcap, sinks, alibi, bias) is.

    Returns:
        `[batch, tokens, query heads, head_dim of v]`. Without a ring it is in fp32 to the bit what the same kernel
        gives on one device (with a softcap up to rounding); a ring differs by the order of a sum.

    Raises:
        LongspanError: for tensors of wrong rank, dtypes or shapes that do not fit, heads that do not, and whatever
            the kernel cannot do; a plan used with tensors that it was not made for. All of it from facts that are alike
            on every rank, before anything is sent.
    """
    options = Options(
        causal, length, kv_length, window, chunk, prefix, documents, kv_documents, cu_seqlens, q_start, mask_mod, sinks,
        softcap, alibi, bias, scale, dropout, mask, head_chunks,
    )  # fmt: skip
    scores = options.scores
    if plan is None:
        plan = _plan(q, k, v, sp, options, scores, kernel)
    else:
        options.check_dropout()
        _check_plan(plan, options, kernel)
        plan.check(q, k, v, scores)
    return plan(q, k, v, scores)


def prepare_attention(
    q: Tensor, k: Tensor, v: Tensor, sp: SequenceSharding, *, kernel: AnyKernel = "auto", **options: Any
) -> AttentionPlan:
    """Make once what every layer with the same mask and shapes can execute: `longspan.attention(..., plan=plan)`.

    Everything is checked here, documents are read on the host, and what a kernel needs to know of the batch goes to the
    device. A layer that is given the plan does none of that.

    Args:
        q: as for `attention`; only its shape, dtype, device and whether it needs gradients are looked at.
        k: as q.
        v: as q.
        sp: the sharding.
        kernel: as for `attention`.
        options: everything else that `attention` takes: causal, window, documents, ... Of `sinks`, `alibi` and `bias`
            only whether they are given matters.

    Raises:
        LongspanError: as `attention`.
    """
    given = Options(**options)
    shapes, mask, lengths = _asked(q, k, v, sp, given)
    return prepare(shapes, sp, mask, given.scores, lengths, kernel, head_chunks=given.head_chunks)


def explain_kernel(
    q: Tensor, k: Tensor, v: Tensor, sp: SequenceSharding, *, kernel: AnyKernel = "auto", **options: Any
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
    given = Options(**options)
    shapes, mask, lengths = _asked(q, k, v, sp, given)
    check(shapes, sp, mask, given.scores, lengths)
    return choose_beside(shapes, sp, mask, given.scores, lengths, kernel, lse=given.head_chunks != 1)[1]


def _plan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sp: SequenceSharding,
    options: Options,
    scores: Scores,
    kernel: AnyKernel,
) -> AttentionPlan:
    """The plan for this call: one of the last few, where it is the same attention again (the next layer)."""
    shapes, mask, lengths = _asked(q, k, v, sp, options)
    # A function, or a mask of one's own, may have changed though it is equal; and a compiler must not look into the
    # store.
    unknown = mask.mod is not None or scores.bias is not None or type(mask) is not Mask
    if unknown or not isinstance(kernel, Hashable) or torch.compiler.is_compiling():
        return prepare(shapes, sp, mask, scores, lengths, kernel, head_chunks=options.head_chunks)
    key = (shapes, mask, scores.kind, lengths, kernel, options.head_chunks)
    plan = sp.plans.get(key)
    if plan is None:
        plan = sp.plans[key] = prepare(shapes, sp, mask, scores, lengths, kernel, head_chunks=options.head_chunks)
        if len(sp.plans) > _KEPT_PLANS:
            sp.plans.popitem(last=False)
    else:
        plan.check_scores(scores)
        sp.plans.move_to_end(key)
    return plan


def _asked(
    q: Tensor, k: Tensor, v: Tensor, sp: SequenceSharding, options: Options
) -> tuple[Shapes, Mask, tuple[int, int]]:
    """The tensors' shapes, the mask, and the lengths of queries and keys."""
    options.check_dropout()
    check_number("head_chunks", options.head_chunks, 0, LARGEST_COUNT, whole=True)
    check_sharding(sp)
    check_tensors(q, k, v)
    mask, lengths = options.mask_of(q, k, sp)
    return Shapes.of(q, k, v, options.scores), mask, lengths


def _check_plan(plan: AttentionPlan, options: Options, kernel: AnyKernel) -> None:
    if not isinstance(plan, AttentionPlan):
        raise LongspanError(f"plan={format_value(plan)} is no plan; make one with longspan.prepare_attention")
    again = options.mask_options() + (["kernel"] if kernel != "auto" else [])
    if again:
        raise LongspanError(
            f"a plan has {', '.join(again)} already; give longspan.prepare_attention the options of the mask, and "
            f"longspan.attention the plan and what belongs to the layer (scale, softcap, sinks, alibi, bias)"
        )


def _segments(
    batch: int,
    n: int,
    m: int,
    q_start: int,
    documents: Tensor | None,
    kv_documents: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Segments | None, Segments | None]:
    """Segments of queries and of keys, from whichever form they are given in."""
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
