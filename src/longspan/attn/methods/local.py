"""Attention of the local queries to blocks of keys and values: on one device or Ulysses rank to one, of all keys.

`Ring` receives further blocks; the loops over blocks, their autograd function and the sums are these.

Shape suffixes: B batch, S tokens of the local block, T tokens of a KV block, H query heads, K KV heads, D head_dim
of q and k, V of v.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from longspan.attn.kernels.base import (
    BackwardInputs,
    GradientSum,
    SoftmaxAccumulator,
    returns_lse,
    tokens_first,
    without_autocast,
)
from longspan.attn.score import Scores
from longspan.compat.torch_api import named_range, not_compiled
from longspan.core.layout import Span


@dataclass(frozen=True, eq=False)
class LocalAttention:
    """Attention of one device or Ulysses rank, which has all keys of its heads: an `AttentionMethod`."""

    kernel: Any  # a `BlockKernel`, or without further blocks an `AutogradKernel`
    prepared: tuple[Any, ...]  # what the kernel prepared for each block of keys; None if nothing attends to the block
    # The KV head of every query head, int64 [H], if KV groups are uneven: KV heads are repeated by it.
    kv_head_index: Tensor | None = None

    @property
    def size(self) -> int:
        """Number of blocks."""
        return len(self.prepared)

    def __call__(self, q_BSHD: Tensor, k_BTKD: Tensor, v_BTKV: Tensor, scores: Scores) -> Tensor:
        """Attend from the local block's queries to all keys, exactly, with gradients.

        Returns:
            `[B, S, H, V]`; zero for queries that see nothing (padding).
        """
        if q_BSHD.shape[2] == 0:  # nor has any other rank of a ring
            return scores.output_without_heads(q_BSHD, v_BTKV)
        if not returns_lse(self.kernel):
            return self._run(q_BSHD, k_BTKD, v_BTKV, scores)
        q_BHSD, k_BKTD, v_BKTV = (x.transpose(1, 2) for x in (q_BSHD, k_BTKD, v_BTKV))
        out_BHSV: Tensor = _apply(q_BHSD, k_BKTD, v_BKTV, scores.sinks, self, scores)
        return out_BHSV.transpose(1, 2)

    def own_inputs(self, *qkv_BSHD: Tensor) -> tuple[Tensor, ...]:
        """See `AutogradKernel.own_inputs`."""
        if returns_lse(self.kernel) or qkv_BSHD[0].shape[2] == 0 or self.kv_head_index is not None:
            return qkv_BSHD
        owned: tuple[Tensor, ...] = self.kernel.own_inputs(*qkv_BSHD)
        return owned

    def _run(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
        """Return the attention of a kernel without log-sum-exp, whose gradients are autograd's."""
        if self.kv_head_index is not None:
            k, v = (x.index_select(2, self.kv_head_index) for x in (k, v))
        out: Tensor = self.kernel.run(q, k, v, self.prepared[0], scores)
        inputs = [x for x in (q, k, v, scores.sinks) if x is not None and x.requires_grad]
        if inputs and torch.is_grad_enabled() and not out.requires_grad:
            # Nothing attends, as all tokens are padding. Stay in the graph: other ranks have gradients to sum.
            out = out + torch.stack([x[:0].sum() for x in inputs]).sum().to(out.dtype)
        return out

    # -----------------------------------------------------------------------------------------------------------------
    # The two loops. Autocast is off in them: it would cast fp32 sums to half precision.

    def forward(self, q_BHSD: Tensor, local: KVPair, scores: Scores) -> tuple[Tensor, Tensor]:
        """Compute the forward outside of autograd, of at least one head; `local` is packed by `pack`.

        Returns:
            The output `[B, H, S, V]`, and the log-sum-exp of whole rows [B, H, S], 0 for queries that see nothing.
        """
        heads = q_BHSD.shape[1]
        total = SoftmaxAccumulator(q_BHSD, local.v.shape[3], several=self.size > 1)
        with without_autocast(q_BHSD.device):
            (kernel_q,) = self.kernel.to_kernel_layout([q_BHSD], local.v.shape[3], scores)
            for _, received in self.kv_blocks(local):
                while received:
                    block = received.pop(0)
                    prepared = self.prepared[block.source]
                    if prepared is not None:
                        k_BKTD, v_BKTV = (self.kv_of(x, (0, heads), heads) for x in (block.kv.k, block.kv.v))
                        self.kernel.accumulate(total, kernel_q, k_BKTD, v_BKTV, prepared, scores)
                        del k_BKTD, v_BKTV
                    del block  # before the next step's buffers are allocated
            del kernel_q
            if scores.sinks is not None:  # a sink is one more key per head, whose value is zero
                total.add_sinks(scores.sinks)
        out, lse = total.results()
        out = out.to(q_BHSD.dtype)
        if not owns_storage(out):  # the kernel padded its heads, and saving it would keep the padding alive
            out = tokens_first(out)
        return out, lse.masked_fill(torch.isneginf(lse), 0)

    def kv_blocks(self, local: KVPair) -> Iterator[tuple[int, list[KVBlock]]]:
        """Yield each step's KV blocks; step 0 is the local one."""
        yield 0, [KVBlock(0, 0, local)]

    def backward(
        self, q_BHSD: Tensor, local: KVPair, out_lse_grad: tuple[Tensor, Tensor, Tensor], scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Compute the gradients of q, k, v and sinks from `forward`'s results and the output's gradient."""
        out_BHSV, lse_BHS, grad_BHSV = out_lse_grad
        if self.size > 1:  # a GPU kernel takes them with tokens first, and would copy them for every block
            out_BHSV, grad_BHSV = tokens_first(out_BHSV), tokens_first(grad_BHSV)
        elif grad_BHSV.stride(3) != 1:  # such as the expanded gradient of a sum, which kernels may refuse
            grad_BHSV = tokens_first(grad_BHSV)
        with without_autocast(q_BHSD.device):
            kernel_q, kernel_out, kernel_grad = self.kernel.to_kernel_layout(
                [q_BHSD, out_BHSV, grad_BHSV], local.v.shape[3], scores
            )
            inputs = BackwardInputs(kernel_q, kernel_out, kernel_grad, lse_BHS)
            del kernel_q, kernel_out, kernel_grad
            grads = [x.to(q_BHSD.dtype) for x in self.gradients(inputs, q_BHSD.shape, local, scores)]
            del inputs
        dsinks = None
        if scores.sinks is not None:
            sink_weight_BHS = (scores.sinks.to(lse_BHS.dtype)[:, None] - lse_BHS).exp()
            delta_BHS = (grad_BHSV.to(lse_BHS.dtype) * out_BHSV).sum(-1)
            dsinks = -(sink_weight_BHS * delta_BHS).sum((0, 2)).to(scores.sinks.dtype)
        dq_BHSD, dk_BKTD, dv_BKTV = grads
        return dq_BHSD, dk_BKTD, dv_BKTV, dsinks

    def gradients(
        self, inputs: BackwardInputs, q_shape: torch.Size, local: KVPair, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq, dk and dv, as the kernel returned them if it made one call."""
        wide, heads = inputs.lse.dtype, (0, q_shape[1])
        dq = GradientSum(q_shape, wide, inputs.q.device)
        grads = self.block_gradients(inputs, dq, local, self.prepared[0], heads, scores)
        if self.kv_head_index is None:
            dk, dv = grads
            return dq.total(), dk.total(), dv.total()
        kv_grad = local.zeros(wide)
        self.add_gradients(kv_grad, grads, heads, q_shape[1])
        return dq.total(), kv_grad.k, kv_grad.v

    def block_gradients(
        self, inputs: BackwardInputs, dq: GradientSum, kv: KVPair, prepared: Any, heads: Span, scores: Scores
    ) -> KVGradients:
        """Add the gradient of query heads [start, stop) to `dq`; return those of their KV heads, as of `kv_of`.

        `prepared` is what the kernel prepared for this block; None if nothing attends to it.
        """
        k_BKTD, v_BKTV = (self.kv_of(x, heads, inputs.q.shape[1]) for x in (kv.k, kv.v))
        dk, dv = (GradientSum(x.shape, inputs.lse.dtype, x.device) for x in (k_BKTD, v_BKTV))
        if prepared is not None:
            of_heads = inputs.at(slice(None), slice(*heads))
            self.kernel.accumulate_gradients((dq, dk, dv), of_heads, k_BKTD, v_BKTV, prepared, scores.of_heads(*heads))
        return dk, dv

    def add_gradients(self, into: KVPair, grads: KVGradients, heads: Span, total: int) -> None:
        """Add the gradients that `block_gradients` returned for query heads [start, stop) out of `total`."""
        for sum_BKTD, grad in zip((into.k, into.v), grads, strict=True):
            if self.kv_head_index is None:
                grad.add_to(self.kv_of(sum_BKTD, heads, total))
            else:  # the heads were repeated
                sum_BKTD.index_add_(1, self.kv_head_index[slice(*heads)], grad.total().to(sum_BKTD.dtype))

    def kv_of(self, x_BKTD: Tensor, heads: Span, total: int) -> Tensor:
        """Return the KV heads of query heads [start, stop) out of `total`.

        Even groups: a view; two parts of one group share their KV head. Uneven groups: a copy with one KV head per
        query head.
        """
        start, stop = heads
        if self.kv_head_index is not None:
            return x_BKTD.index_select(1, self.kv_head_index[start:stop])
        group = total // x_BKTD.shape[1]
        return x_BKTD[:, start // group : -(-stop // group)]

    def pack(self, q: Tensor, k: Tensor, v: Tensor, *, saved: bool = True) -> KVPair:
        """Pack the local keys and values if they are sent; `saved`: whether autograd saves them.

        A single block is packed on a CPU, whose kernel reads it once per block of queries and is faster with contiguous
        heads, and if saving it would keep a larger buffer alive.
        """
        if self.size == 1 and not _kernel_rereads_kv(k.device) and (not saved or owns_storage(q, k, v)):
            return KVPair(k, v)
        local = KVPair.of(k.new_empty(k.numel() + v.numel()), k.shape, v.shape)
        local.k.copy_(k)
        local.v.copy_(v)
        return local


@not_compiled
def _apply(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, attention: LocalAttention, scores: Scores) -> Tensor:
    # Not traced: a compiler returns zero gradients for buffers that a collective fills.
    out: Tensor = _BlockAttention.apply(q, k, v, sinks, attention, scores)  # type: ignore[no-untyped-call]
    return out


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, attention: LocalAttention, scores: Scores
    ) -> Tensor:
        local = attention.pack(q, k, v)
        if any(ctx.needs_input_grad) and local.packed is not None and not owns_storage(q):
            # `q` is a view of the packed QKV buffer. Copy it, so that saving `q` does not keep K and V alive.
            q = tokens_first(q)
        out, lse = attention.forward(q, local, scores)
        ctx.save_for_backward(q, out, lse, sinks, *local.saved)
        ctx.shapes, ctx.attention, ctx.scores = (k.shape, v.shape), attention, scores
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        q, out, lse, sinks, *kv = ctx.saved_tensors
        local = KVPair(*kv) if len(kv) == 2 else KVPair.of(kv[0], *ctx.shapes)
        with named_range("longspan.attention"):
            scores = replace(ctx.scores, sinks=sinks)
            return *ctx.attention.backward(q, local, (out, lse, grad), scores), None, None


@dataclass(frozen=True)
class KVPair:
    """Keys and values of one block, or their gradients."""

    k: Tensor  # [B, K, T, D]
    v: Tensor  # [B, K, T, V]
    # The buffer that both are views of, so that they are one message; None if they are the caller's tensors.
    packed: Tensor | None = None

    @classmethod
    def of(cls, packed: Tensor, k_shape: torch.Size, v_shape: torch.Size) -> KVPair:
        n = k_shape.numel()
        return cls(packed[:n].view(k_shape), packed[n:].view(v_shape), packed)

    @property
    def message(self) -> Tensor:
        assert self.packed is not None
        return self.packed

    @property
    def saved(self) -> tuple[Tensor, ...]:
        """The tensors to save for the backward; K and V are saved once."""
        return (self.k, self.v) if self.packed is None else (self.packed,)

    def like(self, packed: Tensor) -> KVPair:
        return KVPair.of(packed, self.k.shape, self.v.shape)

    def zeros(self, dtype: torch.dtype) -> KVPair:
        return self.like(self.k.new_zeros(self.k.numel() + self.v.numel(), dtype=dtype))


@dataclass(frozen=True)
class KVBlock:
    """A KV block of rank `source`, sent to the right (+1) or left (-1); 0 if local."""

    source: int
    direction: int
    kv: KVPair


KVGradients = tuple[GradientSum, GradientSum]


def _kernel_rereads_kv(device: torch.device) -> bool:
    return device.type == "cpu"


def owns_storage(*xs: Tensor) -> bool:
    """Whether saving these tensors keeps at most an eighth more memory alive than their own (a sequence's padding)."""
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in xs}
    return 8 * sum(storages.values()) <= 9 * sum(x.nbytes for x in xs)
