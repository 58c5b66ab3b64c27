"""The same attention, or the same training step, by every method, as work that can be repeated and timed.

An attention starts from q, K and V in the layout that its method has before attention, and ends with the output in
the layout that it needs afterwards. Tensor parallelism holds all tokens of its heads and sends nothing for attention
itself; a layer costs it two sums of hidden states. Its workload is therefore attention on its heads plus these two
sums, with a hidden size of heads x head_dim. FSDP alone shards no sequence: every rank computes its own.

Shapes: q `[B, L, H, D]`, k and v `[B, L, K, D]`; L local tokens, N all tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from longspan.attn.api import attention
from longspan.comm.mesh import MeshGroups, SequenceSharding, init_mesh
from longspan.comm.shard import shard
from longspan.comm.tensor import TensorGroup
from longspan.comm.weights import local_part
from longspan.core.errors import LongspanError
from longspan.core.heads import split_heads
from longspan.core.parallel import AXES, ParallelConfig
from longspan.hf.parallelize import parallelize


@dataclass(frozen=True)
class Method:
    """A method to compare, on any number of ranks."""

    name: str
    meshes: Callable[[int], Mapping[str, ParallelConfig]]  # number of ranks -> candidates: names and meshes
    # Functions of a candidate and its inputs that make one rank's workload; None if it has none.
    attention: Callable[[Candidate, AttentionInputs], Workload] | None = None
    step: Callable[[Candidate, StepInputs], Workload] | None = None
    package: str = ""  # that it needs; "" for longspan's own methods
    parallel: Mapping[str, Any] = field(default_factory=dict)  # options of the planner's `ParallelConfig`
    options: Mapping[str, Any] = field(default_factory=dict)  # settings of its workload
    planned: bool = True  # whether the planner has formulas for it


@dataclass(frozen=True)
class Candidate:
    """A method on a mesh: one row of the table."""

    name: str  # such as "usp-2x4"
    method: Method
    mesh: ParallelConfig


@dataclass(frozen=True)
class Workload:
    """Work of this rank that can be repeated."""

    forward: Callable[[], Any]  # returns the argument of `backward`
    backward: Callable[[Any], None]  # in a training step with the optimizer
    results: Callable[[], dict[str, Tensor]]  # this rank's tensors of the last run
    sequences: int = 1  # of all ranks
    state_bytes: Callable[[], int] = lambda: 0  # of weights and optimizer states on this rank

    def run(self) -> None:
        """Run forward and backward once."""
        self.backward(self.forward())


@dataclass(frozen=True)
class AttentionInputs:
    """Sizes and numbers of one attention, the same on every rank."""

    context: int  # tokens of the sequence
    heads: int  # query heads
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    shardings: ShardingCache
    seed: int = 0  # of the numbers

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
        self._shardings: dict[tuple[ParallelConfig, bool, int | Literal["auto"]], SequenceSharding] = {}

    def get(self, candidate: Candidate) -> SequenceSharding:
        """Return the sharding of a candidate. Collective."""
        options = candidate.method.options
        overlap = options.get("overlap", False)
        chunks: int | Literal["auto"] = "auto" if overlap == "auto" else self.chunks if overlap else 1
        key = candidate.mesh, bool(options.get("swapped")), chunks
        if key not in self._shardings:
            mesh = _device_mesh(candidate.mesh, self.device.type, swapped=key[1])
            self._shardings[key] = SequenceSharding(mesh, overlap_chunks=chunks)
        return self._shardings[key]


def _device_mesh(mesh: ParallelConfig, device_type: str, *, swapped: bool) -> DeviceMesh | MeshGroups:
    """Return the mesh; `swapped` puts neighbouring ranks into a ring, and ranks far apart into a Ulysses group."""
    if swapped:
        ranks = torch.arange(mesh.ranks).view(1, mesh.ulysses, mesh.ring, 1).transpose(1, 2).contiguous()
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
    """Return `longspan.attention` on the candidate's mesh; with FSDP alone, a full sequence per rank."""
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
    group = TensorGroup.of(inputs.shardings.get(candidate).mesh.get_group("tensor"))
    if inputs.heads % group.size or inputs.kv_heads % group.size:
        raise LongspanError(
            f"tensor={group.size} does not divide {inputs.heads} query heads and {inputs.kv_heads} KV heads; use a "
            "divisor of both"
        )
    megatron_sp = candidate.method.parallel.get("tensor_style") == "megatron-sp"
    enter, leave = (group.gather_tokens, group.scatter_tokens) if megatron_sp else (group.copy_in, group.sum_out)
    one_device = SequenceSharding(MeshGroups(inputs.device.type))
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


# --- training steps


@dataclass(frozen=True)
class StepInputs:
    """A model and its tokens, the same on every rank."""

    config: dict[str, Any]  # keys of the model's config.json
    context: int  # tokens of a sequence
    dtype: torch.dtype  # of computing; weights and optimizer states are fp32
    shardings: ShardingCache
    seed: int = 0  # of weights and tokens

    @property
    def device(self) -> torch.device:
        """This rank's device."""
        return self.shardings.device

    @property
    def bf16(self) -> bool:
        """Whether the compute dtype is bf16."""
        return self.dtype == torch.bfloat16

    def model(self) -> Any:
        """Build the model on the CPU, in fp32, from the seed."""
        options = {key: value for key, value in self.config.items() if key != "model_type"}
        config = transformers.AutoConfig.for_model(self.config["model_type"], **options)
        torch.manual_seed(self.seed)
        return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()

    def fill(self, model: Any, sp: SequenceSharding) -> None:
        """Give a sharded model its weights, if `model` made it without."""

    def tokens(self, replica: int) -> Tensor:
        """Return the token ids of one replica, int64 `[1, context]`."""
        generator = torch.Generator().manual_seed(self.seed + replica)
        ids = torch.randint(0, self.config["vocab_size"], (1, self.context), generator=generator)
        return ids.to(self.device)


def longspan_step(candidate: Candidate, inputs: StepInputs) -> Workload:
    """Return a step of `longspan.parallelize`: the sequence axes with FSDP2, and the tensor axis."""
    sp = inputs.shardings.get(candidate)
    return training_step(
        inputs.model(),
        sp,
        inputs.tokens(sp.data_rank),
        inputs.dtype,
        tensor_style=candidate.method.parallel.get("tensor_style", "tp"),
        prefetch=candidate.method.options.get("prefetch", True),
    )


def training_step(
    model: Any,
    sp: SequenceSharding,
    ids: Tensor,
    dtype: torch.dtype = torch.float32,
    *,
    fsdp: bool = True,
    prefetch: bool = True,
    **options: Any,
) -> Workload:
    """Return a step of a model as `longspan train` takes it: weights in fp32, computed in `dtype`.

    `ids` are this replica's tokens `[1, context]`; `options` are those of `longspan.parallelize`.
    """
    bf16, sharded = dtype == torch.bfloat16, sp.shards_weights(fsdp=fsdp, cpu_offload=False)
    # Without FSDP (the tensor axis alone), autocast computes in bf16.
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 and sharded else None
    model = parallelize(model, sp, fsdp=fsdp, mp_policy=policy, **options)
    if not prefetch:
        _disable_prefetch(model)

    def compute_loss() -> Tensor:
        with torch.autocast(sp.device.type, torch.bfloat16, enabled=bf16 and not sharded):
            loss: Tensor = model(input_ids=ids, labels=ids).loss
            return loss

    return step_workload(model, compute_loss, sequences=sp.data_size)


def _disable_prefetch(model: nn.Module) -> None:
    """Let FSDP gather each group's weights only when they are needed."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_modules_to_forward_prefetch([])
            # An empty list would restore FSDP's default (the previous group). The module itself is gathered already.
            module.set_modules_to_backward_prefetch([module])


def step_workload(model: Any, compute_loss: Callable[[], Tensor], sequences: int = 1) -> Workload:
    """Return forward, backward and AdamW of a sharded model as a workload."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    last: dict[str, Tensor] = {}

    def backward(loss: Tensor) -> None:
        loss.backward()
        last["loss"] = loss.detach()
        optimizer.step()
        optimizer.zero_grad()

    def state_bytes() -> int:
        states = [x for state in optimizer.state.values() for x in state.values()]
        return sum(local_part(x).nbytes for x in (*model.parameters(), *states) if isinstance(x, Tensor))

    return Workload(compute_loss, backward, lambda: dict(last), sequences, state_bytes)
