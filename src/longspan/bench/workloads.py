"""What `bench attention` measures: one attention by every method, from the same numbers and on the same terms.

Each workload starts from q, K and V laid out as its method holds them before attention, and ends with the output laid
out as the method needs it afterwards. Tensor parallelism holds all tokens of its heads and sends nothing for attention
itself; a layer costs it two sums of hidden states. Its workload is therefore attention on its heads plus these two
sums, with a hidden size of heads x head_dim. FSDP alone shards no sequence: every rank computes its own.

Shapes: q `[B, L, H, D]`, k and v `[B, L, K, D]`; L local tokens, N all tokens.
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
from longspan.bench.methods import Candidate
from longspan.comm.mesh import OneDeviceMesh, SequenceSharding, init_mesh
from longspan.comm.shard import shard
from longspan.comm.tensor import TensorGroup
from longspan.core.cache_dtype import CacheDtype
from longspan.core.errors import LongspanError
from longspan.core.heads import split_heads
from longspan.core.parallel import AXES
from longspan.plan.job import Mesh


@dataclass(frozen=True)
class Workload:
    """Work of this rank that can be repeated.

    Attributes:
        forward: runs the forward; its result is passed to `backward`.
        backward: runs the backward, and in a training step the optimizer.
        results: returns this rank's part of the last run's tensors, by name.
        sequences: sequences of the given context that all ranks compute together.
        state_bytes: returns the bytes of weights and optimizer states on this rank.
    """

    forward: Callable[[], Any]
    backward: Callable[[Any], None]
    results: Callable[[], dict[str, Tensor]]
    sequences: int = 1
    state_bytes: Callable[[], int] = lambda: 0


@dataclass(frozen=True)
class AttentionInputs:
    """Sizes and numbers of one attention, the same on every rank.

    Attributes:
        context: tokens of the sequence.
        heads: query heads.
        kv_heads: KV heads.
        head_dim: elements of a head.
        dtype: of every tensor.
        shardings: the sharding of each candidate.
        seed: of the numbers.
    """

    context: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    shardings: ShardingCache
    seed: int = 0

    @property
    def device(self) -> torch.device:
        """This rank's device."""
        return self.shardings.device

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return q, K, V and the gradient of the output, of all tokens."""
        generator = torch.Generator().manual_seed(self.seed)

        def draw(heads: int) -> Tensor:
            x = torch.randn(1, self.context, heads, self.head_dim, generator=generator)
            return x.to(self.device, self.dtype)

        return draw(self.heads), draw(self.kv_heads), draw(self.kv_heads), draw(self.heads)


class ShardingCache:
    """One `SequenceSharding` per mesh and exchange, as process groups are expensive to make.

    Args:
        device: this rank's device.
        chunks: chunks of heads of a method that overlaps its all-to-all with attention.
    """

    def __init__(self, device: torch.device, chunks: int = 4) -> None:
        self.device, self.chunks = device, chunks
        self._shardings: dict[tuple[Mesh, bool, int | Literal["auto"], CacheDtype], SequenceSharding] = {}

    def get(self, candidate: Candidate) -> SequenceSharding:
        """Return the sharding of a candidate. Collective."""
        options = candidate.method.options
        overlap = options.get("overlap", False)
        chunks: int | Literal["auto"] = "auto" if overlap == "auto" else self.chunks if overlap else 1
        key = candidate.mesh, bool(options.get("swapped")), chunks, options.get("wire_dtype", "exact")
        if key not in self._shardings:
            mesh = _device_mesh(candidate.mesh, self.device.type, swapped=key[1])
            self._shardings[key] = SequenceSharding(mesh, overlap_chunks=chunks, wire_dtype=key[3])
        return self._shardings[key]


def _device_mesh(mesh: Mesh, device_type: str, *, swapped: bool) -> DeviceMesh | OneDeviceMesh:
    """Return the mesh; `swapped` puts neighbouring ranks into a ring, and ranks far apart into a Ulysses group."""
    if swapped:
        ranks = torch.arange(mesh.gpus).view(1, mesh.ulysses, mesh.ring, 1).transpose(1, 2).contiguous()
        return DeviceMesh(device_type, ranks, mesh_dim_names=AXES)
    return init_mesh(mesh.data, mesh.ring, mesh.ulysses, mesh.tensor, device_type=device_type)


def attention_workload(
    leaves: list[Tensor], grad: Tensor, attend: Callable[..., Tensor], sequences: int = 1
) -> Workload:
    """Return forward and backward of an attention; gradients accumulate in `.grad` of the leaves q, K and V."""
    last: dict[str, Tensor] = {}

    def forward() -> Tensor:
        for x in leaves:
            x.grad = None
        return attend(*leaves)

    def backward(out: Tensor) -> None:
        out.backward(grad)
        last["out"] = out.detach()

    def results() -> dict[str, Tensor]:
        grads = {name: x.grad for name, x in zip(("dq", "dk", "dv"), leaves, strict=True) if x.grad is not None}
        return {**last, **grads}

    return Workload(forward, backward, results, sequences)


def as_leaves(*xs: Tensor) -> list[Tensor]:
    """Return copies that require gradients."""
    return [x.detach().clone().requires_grad_() for x in xs]


def sequence_attention(candidate: Candidate, inputs: AttentionInputs) -> Workload:
    """Return `longspan.attention` on the candidate's mesh; with FSDP alone, a whole sequence per rank."""
    sp = inputs.shardings.get(candidate)
    q, k, v, grad = (shard(x, sp) for x in inputs.tensors())
    return attention_workload(
        as_leaves(q, k, v),
        grad,
        lambda q, k, v: attention(q, k, v, sp, causal=True, length=inputs.context),
        sequences=candidate.mesh.data,
    )


def tensor_attention(candidate: Candidate, inputs: AttentionInputs) -> Workload:
    """Return attention on this rank's heads of all tokens, and the two sums of hidden states of a layer."""
    group = TensorGroup.of(inputs.shardings.get(candidate).mesh.get_group("tensor"))  # type: ignore[union-attr]
    if inputs.heads % group.size or inputs.kv_heads % group.size:
        raise LongspanError(
            f"tensor={group.size} does not divide {inputs.heads} query heads and {inputs.kv_heads} KV heads; use a "
            "divisor of both"
        )
    megatron_sp = candidate.method.job.get("tensor_style") == "megatron-sp"
    enter, leave = (group.gather_tokens, group.scatter_tokens) if megatron_sp else (group.copy_in, group.sum_out)
    one_device = SequenceSharding(OneDeviceMesh(inputs.device.type))
    mine = split_heads(inputs.heads, inputs.kv_heads, group.size)[group.rank]
    q_heads, kv_heads = slice(mine.q_start, mine.q_stop), slice(mine.kv_start, mine.kv_stop)
    # The heads of the other ranks, which the row-parallel product would fill.
    padding = (mine.q_start * inputs.head_dim, (inputs.heads - mine.q_stop) * inputs.head_dim)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q_BNHD = enter(q.flatten(2)).unflatten(2, (-1, inputs.head_dim))
        out = attention(q_BNHD[:, :, q_heads], k, v, one_device, causal=True)
        hidden = leave(F.pad(out.flatten(2), padding))
        # Stands for the MLP: each rank contributes an equal part of the sum.
        hidden = leave(enter(hidden) / group.size)
        out_BNHD: Tensor = hidden.unflatten(2, (-1, inputs.head_dim))
        return out_BNHD

    q, k, v, grad = inputs.tensors()
    if megatron_sp:
        q, grad = (x.chunk(group.size, 1)[group.rank].contiguous() for x in (q, grad))
    return attention_workload(as_leaves(q, k[:, :, kv_heads], v[:, :, kv_heads]), grad, attend)
