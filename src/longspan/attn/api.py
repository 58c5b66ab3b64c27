"""Exact attention over a sharded sequence: `attention()` prepares a plan and executes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from longspan.attn.kernels.choice import AnyKernel, Choice
from longspan.attn.mask import Mask
from longspan.attn.prepare import (
    AttentionPlan,
    check_attention,
    choose_kernel_and_overlap,
    prepare,
)
from longspan.attn.score import Scores
from longspan.attn.segments import Segments, check_documents, cu_seqlens_segments, document_segments, paired_segments
from longspan.attn.shapes import Shapes, check_tensors
from longspan.comm.arguments import check_integers, check_sharding
from longspan.compat.torch_api import not_compiled
from longspan.core.errors import LongspanError
from longspan.core.layout import Lengths
from longspan.core.validation import LARGEST_COUNT, check_number, format_value

if TYPE_CHECKING:
    from longspan.comm.mesh import SequenceSharding

_CACHED_PLANS = 8  # per sharding, for callers that pass no plan


@dataclass(frozen=True, eq=False)
class AttentionOptions:
    """The keyword options of `longspan.attention`, whose docstring documents each.

    An option that belongs to the mask or to the scores is a field of `Mask` or `Scores` and stands nowhere else.
    """

    mask: Mask
    scores: Scores
    length: int | None = None
    kv_length: int | None = None
    documents: Tensor | None = None
    kv_documents: Tensor | None = None
    cu_seqlens: Tensor | None = None
    dropout: float = 0.0
    head_chunks: int = 1
    in_plan: tuple[str, ...] = ()
    """Names of the given options that a plan already contains."""

    @classmethod
    def of(cls, options: dict[str, Any]) -> AttentionOptions:
        """Sort keyword options into the mask, the scores and the rest; check each by itself.

        Raises:
            LongspanError: for values that are not allowed.
            TypeError: for an unknown option.
        """
        if not options:
            return _NOTHING
        for name in options:
            if name not in _DEFAULTS:
                raise TypeError(f"longspan.attention has no option {name!r}; it has {', '.join(_DEFAULTS)}")
        given = {name: value for name, value in options.items() if value is not _DEFAULTS[name]}
        of_mask = {name: given.pop(name) for name in _MASK_OPTIONS if name in given}
        of_scores = {name: given.pop(name) for name in _SCORE_OPTIONS if name in given}
        in_plan = (*of_mask, *(name for name in given if name != "dropout"))
        dropout = given.get("dropout", 0.0)
        if not isinstance(dropout, int | float) or dropout:
            raise LongspanError(
                f"dropout={format_value(dropout)}: attention dropout that does not depend on the number of ranks is "
                "not supported; use 0.0"
            )
        for name, least in (("length", 1), ("kv_length", 1), ("head_chunks", 0)):
            if name in given:
                check_number(name, given[name], least, LARGEST_COUNT, whole=True)
        if "mask" in given:
            if not isinstance(given["mask"], Mask):
                raise LongspanError(f"mask={format_value(given['mask'])} is no longspan.Mask")
            if of_mask:
                raise LongspanError(f"`mask` was given together with {', '.join(of_mask)}; set them in the mask")
        else:
            if "prefix" in of_mask:
                of_mask["prefix"] = _read_prefix(of_mask["prefix"])
            given["mask"] = Mask(**of_mask)
        return cls(**given, scores=Scores(**of_scores), in_plan=in_plan)

    def mask_and_lengths(self, shapes: Shapes, sp: SequenceSharding) -> tuple[Mask, Lengths]:
        """Return the mask with the segments of `documents`, `kv_documents` or `cu_seqlens`, read on the host, and the
        numbers of real queries and real keys of the whole sequence.
        """
        check_sharding(sp)
        q_tokens, k_tokens = shapes.q[1], shapes.k[1]
        queries = q_tokens * sp.size if self.length is None else self.length
        keys = self.kv_length
        if keys is None:
            keys = queries if k_tokens == q_tokens else k_tokens * sp.size
        segments, kv_segments = self._segments(shapes.q[0], queries, keys)
        if segments is None and kv_segments is None:
            return self.mask, (queries, keys)
        if self.mask.segments is not None:
            raise LongspanError("documents are given twice: as segments of the mask, and as an argument; pass one")
        return dataclasses.replace(self.mask, segments=segments, kv_segments=kv_segments), (queries, keys)

    def _segments(self, batch: int, queries: int, keys: int) -> tuple[Segments | None, Segments | None]:
        documents, kv_documents = self.documents, self.kv_documents
        if self.cu_seqlens is not None:
            if documents is not None or kv_documents is not None:
                raise LongspanError("`cu_seqlens` and `documents` both define documents; pass one of them")
            check_integers("cu_seqlens", self.cu_seqlens, 1)
            return cu_seqlens_segments(self.cu_seqlens, keys) * batch, None
        of_keys = kv_documents is None and self.mask.q_start
        check_documents("documents", documents, (batch, max(queries, keys) if of_keys else queries))
        check_documents("kv_documents", kv_documents, (batch, keys))
        if kv_documents is not None:
            if documents is None:
                documents = torch.zeros(batch, queries, dtype=torch.int64)
            return paired_segments(documents, kv_documents)
        return (None if documents is None else document_segments(documents)), None


def _defaults(kind: type[Any], *hidden: str) -> dict[str, Any]:
    return {field.name: field.default for field in dataclasses.fields(kind) if field.name not in hidden}


_MASK_OPTIONS = _defaults(Mask, "segments", "kv_segments", "bidirectional", "nodes")
_SCORE_OPTIONS = _defaults(Scores, "first_head")
_DEFAULTS = {
    **_MASK_OPTIONS,
    **_SCORE_OPTIONS,
    **_defaults(AttentionOptions, "mask", "scores", "in_plan"),
    "mask": None,
}


_NOTHING = AttentionOptions(Mask(), Scores())
"""No options: what every layer with a plan passes."""


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sp: SequenceSharding,
    *,
    kernel: AnyKernel = "auto",
    plan: AttentionPlan | None = None,
    **options: Any,
) -> Tensor:
    """Attend from the local queries to the whole sequence, exactly, with gradients, on every mesh of ring x ulysses.

    Args:
        q: local tokens, `[batch, tokens, query heads, head_dim]`, as `sp.shard` cut them.
        k: local tokens, `[batch, tokens, KV heads, head_dim]`; the KV heads divide the query heads (MHA, GQA, MQA).
            Keys may belong to another or to a longer sequence, which `sp.shard` cut by itself.
        v: as `k`; its head_dim may differ.
        sp: the sharding.
        kernel: the local attention kernel: a name ("auto", "sdpa", "flash", "cudnn", "tiled", "flex", "eager"), or a
            custom kernel (`BlockKernel`, `longspan.kernel_with_lse`). `longspan.explain_kernel` returns the choice.
        plan: from `longspan.prepare_attention`, for tensors of these shapes. It contains the mask, lengths, chunks and
            kernel, so none of them may be given again; options of a layer (scale, softcap, sinks, alibi, bias) are.
        options: any of the following.

            Mask (fields of `longspan.Mask`):

            - causal: whether a token sees only itself and earlier tokens; default True.
            - window: a token sees the last `window` tokens, itself included; without `causal` also the next ones.
            - chunk_size: tokens see only their own chunk of `chunk_size` tokens (Llama-4).
            - prefix: every token sees the first `prefix` tokens (prefix-LM); one number, or one per batch row.
            - q_start: position of the first query among the keys: `kv_length - length` for chunked prefill.
            - mask_mod: a function `(b, h, q, kv) -> bool tensor` that must be true too (FlexAttention's form). Heads
              and positions are those of the whole model and sequence; it must be the same on every rank.
            - mask: a `longspan.Mask`, a subclass (docs/how-to/extend.md) or `longspan.TreeMask(...)`, instead of these.

            Sequence:

            - length: real tokens of the whole sequence, if `sp.shard` padded it; default: the tokens of all ranks.
            - kv_length: the same for keys; default `length` if the ranks hold as many keys as queries.
            - documents: int64 `[batch, length]`, the document id of every token of the whole sequence, the same on
              every rank; tokens of different ids do not see each other, an id below 0 is padding. Read on the host
              once per call. If keys are longer than queries (`q_start`): an id for every key.
            - kv_documents: int64 `[batch, kv_length]`, for cross attention: queries see the keys of their id.
            - cu_seqlens: int `[documents + 1]`, instead of `documents`: starts of the documents and the length at the
              end, the same in every batch row (flash attention's form).

            Scores:

            - scale: factor of the scores; default 1/sqrt(head_dim).
            - softcap: scores become softcap * tanh(scores / softcap) (Gemma-2).
            - sinks: one learnt logit per query head, `[query heads]` (gpt-oss). Its gradient is this rank's part.
            - alibi: one slope per query head, `[query heads]`: -slope * |i - j| is added (arXiv:2108.12409).
            - bias: a function `(h, q, kv) -> tensor` whose value is added to the score. Only `kernel="eager"` gives
              gradients to a learnt bias.
            - dropout: only 0.0; a random mask that does not depend on the number of ranks has no kernel.

            Memory:

            - head_chunks: process the heads in this many chunks, one after the other, each with its own all-to-alls,
              so that only 1/head_chunks of the tensors between the two all-to-alls exist at a time
              (arXiv:2602.21196); twice that if `sp.overlap_chunks` overlaps the all-to-all. At most a rank's number of
              KV heads; 0 for that number. With 0 or more than 1, only local q, k, v, the output and the log-sum-exp
              are saved, and the backward recomputes the all-to-all; the kernel must return the log-sum-exp.

    Returns:
        `[batch, tokens, query heads, head_dim of v]`. Without a ring it equals bit for bit, in fp32, what the same
        kernel returns on one device (with a softcap up to rounding); a ring differs by the order of a sum.

    Raises:
        LongspanError: for ranks, dtypes, shapes and head counts that do not fit, for what the kernel cannot compute,
            and for a plan of other tensors. Every rank raises the same, before anything is sent.
    """
    if torch.compiler.is_compiling() and plan is None and _breaks_graphs(sp, options):
        out: Tensor = _uncompiled_attention(q, k, v, sp, kernel=kernel, **options)
        return out
    given, shapes = _read(q, k, v, options)
    if plan is None:
        plan = _cached_plan(shapes, sp, given, kernel)
    else:
        _check_given_plan(plan, given, kernel)
        plan.check(shapes, given.scores)
    return plan(q, k, v, given.scores)


_uncompiled_attention = not_compiled(attention)


def _breaks_graphs(sp: SequenceSharding, options: dict[str, Any]) -> bool:
    """Return whether the attention runs in a ring or in chunks of heads, which a compiler skips.

    One break here is cheaper than one in every function down to there: the compiler would trace masks and routes again
    for each of them, and could not use cached plans.
    """
    check_sharding(sp)
    return sp.ring_size > 1 or sp.overlap_chunks not in (1, "auto") or options.get("head_chunks", 1) != 1


def prepare_attention(
    q: Tensor, k: Tensor, v: Tensor, sp: SequenceSharding, *, kernel: AnyKernel = "auto", **options: Any
) -> AttentionPlan:
    """Prepare once what every layer with this mask and these shapes executes: `longspan.attention(..., plan=plan)`.

    This runs all checks, reads documents on the host, and copies the kernel's index tensors to the device. A layer with
    the plan does none of that. Arguments and errors are those of `attention`; of the tensors only shape, dtype, device
    and `requires_grad` matter, and of `sinks`, `alibi` and `bias` whether they are given.
    """
    given, shapes = _read(q, k, v, options)
    mask, lengths = given.mask_and_lengths(shapes, sp)
    return prepare(shapes, sp, mask, given.scores, lengths, kernel, head_chunks=given.head_chunks)


def explain_kernel(
    q: Tensor, k: Tensor, v: Tensor, sp: SequenceSharding, *, kernel: AnyKernel = "auto", **options: Any
) -> Choice:
    """Return which kernel `attention` would run for these tensors, and why; nothing is computed or sent.

    Arguments and errors are those of `attention`; of the tensors only shape, dtype, device and `requires_grad` matter.
    The logger "longspan" reports the same at level INFO when an attention first runs.

    Returns:
        The choice, with its `name` and `reason`; `str()` has both.
    """
    given, shapes = _read(q, k, v, options)
    (mask, lengths), scores, needs_lse = given.mask_and_lengths(shapes, sp), given.scores, given.head_chunks != 1
    check_attention(shapes, sp, mask, scores, lengths)
    return choose_kernel_and_overlap(shapes, sp, mask, scores, lengths, kernel, needs_lse=needs_lse)[1]


def _read(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> tuple[AttentionOptions, Shapes]:
    given = AttentionOptions.of(options)
    check_tensors(q, k, v)
    return given, Shapes.of(q, k, v, given.scores)


def _cached_plan(shapes: Shapes, sp: SequenceSharding, given: AttentionOptions, kernel: AnyKernel) -> AttentionPlan:
    """Return the plan of this call, from the last few if the same attention ran before (the next layer)."""
    (mask, lengths), scores = given.mask_and_lengths(shapes, sp), given.scores
    # A function or a custom mask may have changed although it compares equal; and a compiler must not trace the cache.
    opaque = mask.mask_mod is not None or scores.bias is not None or type(mask) is not Mask
    if opaque or not isinstance(kernel, Hashable) or torch.compiler.is_compiling():
        return prepare(shapes, sp, mask, scores, lengths, kernel, head_chunks=given.head_chunks)
    key = (shapes, mask, scores.kind, lengths, kernel, given.head_chunks)
    plan = sp.prepared.get(key)
    if plan is None:
        plan = sp.prepared[key] = prepare(shapes, sp, mask, scores, lengths, kernel, head_chunks=given.head_chunks)
        if len(sp.prepared) > _CACHED_PLANS:
            sp.prepared.popitem(last=False)
    else:
        plan.check_scores(scores)
        sp.prepared.move_to_end(key)
    return plan


def _check_given_plan(plan: AttentionPlan, given: AttentionOptions, kernel: AnyKernel) -> None:
    if not isinstance(plan, AttentionPlan):
        raise LongspanError(f"plan={format_value(plan)} is no plan; make one with longspan.prepare_attention")
    again = [*given.in_plan, *(["kernel"] if kernel != "auto" else [])]
    if again:
        raise LongspanError(
            f"a plan contains {', '.join(again)}; pass options of the mask to longspan.prepare_attention, and to "
            f"longspan.attention only the plan and options of the layer (scale, softcap, sinks, alibi, bias)"
        )


def _read_prefix(prefix: int | Sequence[int] | Tensor) -> int | tuple[int, ...]:
    if isinstance(prefix, Tensor):
        check_integers("prefix", prefix)
        prefix = prefix.tolist() if prefix.dim() else int(prefix)
    numbers = prefix if isinstance(prefix, list | tuple) else (prefix,)
    for number in numbers:
        check_number("prefix", number, whole=True)
    return int(numbers[0]) if numbers is not prefix else tuple(int(number) for number in numbers)
