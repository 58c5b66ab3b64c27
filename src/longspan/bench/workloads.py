"""What every method does with one attention, and with one training step: the same numbers in, on the same terms.

Attention: queries, keys and values of a layer are there, as the method holds them before; its output is there
afterwards, as the method needs it. Tensor parallelism holds all tokens of its heads and exchanges nothing; what it
sends for a layer is two sums of hidden states, so its row is attention on its heads and these sums, made of the heads'
outputs, as wide as all query heads together. FSDP alone shards no sequence: every rank has one of its own.

Shapes: q [B, L, H, D], k and v [B, L, K, D]; L my tokens, N all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from longspan.attn.api import attention
from longspan.bench.methods import Row
from longspan.bench.tensor import Tensors
from longspan.comm.mesh import AXES, OneDeviceMesh, SequenceSharding, init_mesh
from longspan.comm.shard import shard
from longspan.core.cache_dtype import CacheDtype
from longspan.core.errors import LongspanError
from longspan.core.heads import split_heads
from longspan.plan.job import Mesh


@dataclass(frozen=True)
class Work:
    """A piece of work on this rank, done again and again.

    Attributes:
        forward: does the forward; what it returns goes to `backward`.
        backward: does the backward, and in a step the optimizer's.
        results: of the last run, tensors by name, as far as they lie on this rank (for comparison).
        sequences: of the context's length that all ranks together handle.
        at_rest: bytes of weights and optimizer state on this rank.
    """

    forward: Callable[[], Any]
    backward: Callable[[Any], None]
    results: Callable[[], dict[str, Tensor]]
    sequences: int = 1
    at_rest: Callable[[], int] = lambda: 0


@dataclass(frozen=True)
class Case:
    """An attention: the same on every rank.

    Attributes:
        context: tokens of the sequence.
        heads: query heads.
        kv_heads: KV heads.
        head_dim: of all.
        dtype: of all.
        shardings: this rank's.
        seed: of the numbers.
    """

    context: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    shardings: Shardings
    seed: int = 0

    @property
    def device(self) -> torch.device:
        """This rank's."""
        return self.shardings.device

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Whole q, k, v and the output's gradient, the same on every rank."""
        numbers = torch.Generator().manual_seed(self.seed)

        def made(heads: int) -> Tensor:
            x = torch.randn(1, self.context, heads, self.head_dim, generator=numbers)
            return x.to(self.device, self.dtype)

        return made(self.heads), made(self.kv_heads), made(self.kv_heads), made(self.heads)


class Shardings:
    """The ranks of the rows: groups are made once for each mesh.

    Args:
        device: this rank's.
        chunks: in which a method that overlaps sends its heads.
    """

    def __init__(self, device: torch.device, chunks: int = 4) -> None:
        self.device, self.chunks = device, chunks
        self._made: dict[tuple[Mesh, bool, int | Literal["auto"], CacheDtype], SequenceSharding] = {}

    def of(self, row: Row) -> SequenceSharding:
        """A row's; `swapped`: the ring inside, the exchange between ranks that are far apart. Collective."""
        options = row.kind.options
        dtype: CacheDtype = options.get("wire_dtype", "exact")
        chunks: int | Literal["auto"] = 1
        if overlap := options.get("overlap"):
            chunks = "auto" if overlap == "auto" else self.chunks
        key = row.mesh, bool(options.get("swapped")), chunks, dtype
        if key not in self._made:
            self._made[key] = self._make(*key)
        return self._made[key]

    def _make(self, mesh: Mesh, swapped: bool, chunks: int | Literal["auto"], dtype: CacheDtype) -> SequenceSharding:
        kind = self.device.type
        made: DeviceMesh | OneDeviceMesh
        if swapped:
            ranks = torch.arange(mesh.gpus).view(1, mesh.ulysses, mesh.ring, 1).transpose(1, 2).contiguous()
            made = DeviceMesh(kind, ranks, mesh_dim_names=AXES)
        else:
            made = init_mesh(mesh.data, mesh.ring, mesh.ulysses, mesh.tensor, device_type=kind)
        return SequenceSharding(made, overlap_chunks=chunks, wire_dtype=dtype)


def attention_work(leaves: list[Tensor], grad: Tensor, attend: Callable[..., Tensor], sequences: int = 1) -> Work:
    """Forward and backward of an attention whose inputs are leaves; gradients land in `.grad`."""
    kept: dict[str, Tensor] = {}

    def forward() -> Tensor:
        for x in leaves:
            x.grad = None
        return attend(*leaves)

    def backward(out: Tensor) -> None:
        out.backward(grad)
        kept["out"] = out.detach()

    def results() -> dict[str, Tensor]:
        grads = {name: x.grad for name, x in zip(("dq", "dk", "dv"), leaves, strict=True) if x.grad is not None}
        return {**kept, **grads}

    return Work(forward, backward, results, sequences)


def leaves_of(*xs: Tensor) -> list[Tensor]:
    """Copies that gradients land in."""
    return [x.detach().clone().requires_grad_() for x in xs]


def sequence_attention(row: Row, case: Case) -> Work:
    """longspan's own, over the row's mesh. FSDP alone: a whole sequence a rank, and nothing sent."""
    sp = case.shardings.of(row)
    q, k, v, grad = case.tensors()
    mine = [shard(x, sp) for x in (q, k, v)]
    return attention_work(
        leaves_of(*mine),
        shard(grad, sp),
        lambda q, k, v: attention(q, k, v, sp, causal=True, length=case.context),
        sequences=row.mesh.data,
    )


def tensor_attention(row: Row, case: Case) -> Work:
    """Attention on my heads of all tokens, and the two sums of hidden states of a layer."""
    group = case.shardings.of(row).mesh.get_group("tensor")  # type: ignore[union-attr]
    if case.heads % group.size() or case.kv_heads % group.size():
        raise LongspanError(
            f"tensor={group.size()} does not divide {case.heads} query heads and {case.kv_heads} KV heads; use a "
            "divisor of both"
        )
    tensors = Tensors(group, by_tokens=row.kind.job.get("tensor_style") == "megatron-sp")
    one = SequenceSharding(OneDeviceMesh(case.device.type))
    q, k, v, grad = case.tensors()
    share = split_heads(case.heads, case.kv_heads, group.size())[group.rank()]
    mine = slice(share.q_start, share.q_stop)
    of_kv = slice(share.kv_start, share.kv_stop)
    width, before = case.head_dim, share.q_start * case.head_dim
    after = (case.heads - share.q_stop) * case.head_dim

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        x = tensors.enter(q.flatten(2)).unflatten(2, (-1, width))
        out = attention(x[:, :, mine], k, v, one, causal=True).flatten(2)
        hidden = tensors.leave(F.pad(out, (before, after)))
        # The MLP's place: what its row-split product would give, each rank a P-th of it.
        hidden = tensors.leave(tensors.enter(hidden) / group.size())
        out_BLHD: Tensor = hidden.unflatten(2, (-1, width))
        return out_BLHD

    inputs = [tensors.mine(q), k[:, :, of_kv], v[:, :, of_kv]]
    return attention_work(leaves_of(*inputs), tensors.mine(grad), attend)
