"""Other libraries' attention and training steps, in the best configuration that each documents.

This file alone knows their calling conventions; each library is imported when it is measured. DeepSpeed has two
implementations of Ulysses: `DistributedAttention` and, for Hugging Face models, `UlyssesSPAttentionHF` (ALST). It needs
`DS_BUILD_OPS=0 pip install --no-deps deepspeed` and its small dependencies (see README.md).
yunchang is the library of USP (Fang & Zhao 2024, arXiv:2405.07719). The local kernel is torch's SDPA where possible.
"""

from __future__ import annotations

import importlib
import logging
import math
import os
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

from benchmarks.workloads import (
    AttentionInputs,
    Candidate,
    StepInputs,
    Workload,
    as_leaves,
    attention_workload,
    step_workload,
)
from longspan.compat.torch_attention import flash_cpu, flash_cpu_backward
from longspan.compat.transformers_api import register_attention
from longspan.core.errors import LongspanError
from longspan.hf.weights.fsdp import apply_fsdp

Attend = Callable[[Tensor, Tensor, Tensor], Any]
"""(q [B, L, H, D], k and v [B, L, K, D]) -> [B, L, H, D], each rank with a contiguous part of the tokens."""


def peer_attention(candidate: Candidate, inputs: AttentionInputs) -> Workload:
    """Return a peer's attention."""
    attend = _ATTENTIONS[candidate.method.name](candidate, inputs)
    q, k, v, grad = (x.chunk(candidate.mesh.ranks, 1)[dist.get_rank()] for x in inputs.tensors())
    return attention_workload(as_leaves(q, k, v), grad, attend)


def peer_step(candidate: Candidate, inputs: StepInputs) -> Workload:
    """Return longspan's training step with a peer's attention in every layer.

    Each rank computes the logits of its contiguous tokens, as in the libraries' tutorials. FSDP2 shards the weights
    over all ranks as in longspan's step, so that the steps differ in the compared part alone (DeepSpeed's engine would
    use ZeRO).
    """
    model = inputs.model()
    config = model.config
    if config.model_type not in ("llama", "qwen2", "qwen3") or getattr(config, "use_sliding_window", False):
        raise LongspanError(
            f"a step with {candidate.name} is measured of Llama and Qwen alone, not of {config.model_type}"
        )
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    sizes = AttentionInputs(inputs.context, heads, kv_heads, config.head_dim, inputs.dtype, inputs.shardings)
    attend = _ATTENTIONS[candidate.method.name](candidate, sizes)

    def hf_attention(module: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        return attend(*(x.transpose(1, 2) for x in (q, k, v))), None

    name = f"bench-{candidate.name}-{inputs.context}"
    register_attention(name, hf_attention, lambda *_, **__: None)
    model.set_attn_implementation(name)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if inputs.bf16 else None
    sp = inputs.shardings.get(candidate)
    apply_fsdp(model if model.device.type == "meta" else model.to(inputs.device), sp, policy)
    inputs.fill(model, sp)

    ids = inputs.tokens(0)
    local = inputs.context // candidate.mesh.ranks
    mine = slice(dist.get_rank() * local, (dist.get_rank() + 1) * local)
    labels = F.pad(ids, (0, 1), value=-100)[:, 1:][:, mine].flatten()
    batch = {"input_ids": ids[:, mine], "position_ids": torch.arange(inputs.context, device=inputs.device)[None, mine]}

    def compute_loss() -> Tensor:
        logits = model(**batch, use_cache=False).logits.flatten(0, 1).float()
        local_loss = F.cross_entropy(logits, labels, reduction="sum") / (inputs.context - 1)
        total = local_loss.detach().clone()
        dist.all_reduce(total)
        loss: Tensor = local_loss + (total - local_loss.detach())  # the global value with the local gradient
        return loss

    return step_workload(model, compute_loss)


# --- DeepSpeed


def start_deepspeed(device_type: str = "cpu") -> None:
    """Import DeepSpeed without its log messages and let it adopt the existing process group."""
    if device_type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        comm = _import("deepspeed.comm")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    comm.init_distributed(dist_backend=dist.get_backend(), verbose=False, dist_init_required=False)


def sdpa(q_BSHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor) -> Tensor:
    """Return torch's causal attention of tokens-first tensors, as a user of DeepSpeed would call it."""
    q, k, v = (x.transpose(1, 2) for x in (q_BSHD, k_BSKD, v_BSKD))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2)


def deepspeed_attention(group: dist.ProcessGroup, kv_heads: int, local: Attend = sdpa) -> Attend:
    """Return `deepspeed.sequence.layer.DistributedAttention` with the kernel `local`.

    Batch first (`batch_dim_idx=0`), as models hold their tensors: at batch 1 the sequence-first layout makes the same
    copies, and at larger batches one more transpose. DeepSpeed refuses fewer KV heads than ranks, so each KV head is
    repeated until every rank has one.
    """
    from deepspeed.sequence.layer import DistributedAttention

    repeats = -(-group.size() // kv_heads)
    module = DistributedAttention(local, group, scatter_idx=2, gather_idx=1, num_kv_heads=kv_heads * repeats)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        if repeats > 1:
            k, v = k.repeat_interleave(repeats, dim=2), v.repeat_interleave(repeats, dim=2)
        return module(q, k, v, 0)

    return attend


def alst_attention(
    group: dist.ProcessGroup, heads: int, kv_heads: int, head_dim: int, context: int, batch: int = 1
) -> Attend:
    """Return ALST's `UlyssesSPAttentionHF`, called as a Hugging Face layer calls it."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    local = context // group.size()
    module = UlyssesSPAttentionHF(
        attn=sdpa_attention_forward, batch_size=batch, attn_head_count=heads, attn_head_size=head_dim,
        kv_head_count=kv_heads, num_hidden_layers=1, process_group=group, local_seq_length=local,
        global_seq_length=context,
    )  # fmt: skip
    layer = SimpleNamespace(training=True, num_key_value_groups=heads // kv_heads, is_causal=True)
    first = group.rank() * local

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        position_ids = torch.arange(first, first + local, device=q.device).repeat(batch, 1)
        out, _ = module(layer, *(x.transpose(1, 2) for x in (q, k, v)), None, position_ids=position_ids)
        return out.unflatten(-1, (heads, head_dim))

    return attend


def _deepspeed(candidate: Candidate, inputs: AttentionInputs) -> Attend:
    return deepspeed_attention(_deepspeed_group(candidate, inputs), inputs.kv_heads)


def _alst(candidate: Candidate, inputs: AttentionInputs) -> Attend:
    group = _deepspeed_group(candidate, inputs)
    return alst_attention(group, inputs.heads, inputs.kv_heads, inputs.head_dim, inputs.context)


def _deepspeed_group(candidate: Candidate, inputs: AttentionInputs) -> dist.ProcessGroup:
    ranks = candidate.mesh.ranks
    _check_heads(candidate.name, inputs.heads, max(inputs.kv_heads, ranks), ranks)
    start_deepspeed(inputs.device.type)
    assert dist.group.WORLD is not None
    return dist.group.WORLD


# --- a whole step under ALST


def tile_mlps(model: Any) -> None:
    """Use ALST's TiledMLP in every layer of a Llama as documented: tokens / hidden size tiles, maximum over ranks."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP
    from transformers.models.llama.modeling_llama import LlamaMLP

    plain = LlamaMLP.forward

    def forward(self: Any, x: Tensor) -> Any:
        shards = torch.tensor(math.ceil(x.shape[1] / x.shape[2]))
        dist.all_reduce(shards, op=dist.ReduceOp.MAX)
        weights = [self.down_proj.weight, self.gate_proj.weight, self.up_proj.weight]
        return TiledMLP.apply(plain, self, x, int(shards), weights)

    for layer in model.model.layers:
        layer.mlp.forward = forward.__get__(layer.mlp)


class AlstStep:
    """Forward and backward of a Hugging Face causal LM under ALST, as in its tutorial.

    `register_with_transformers` replaces transformers' `sdpa` entry for the whole process. The batch is sharded as by
    `UlyssesSPDataLoaderAdapter` (labels shifted first, contiguous parts), without the adapter's all-gathers, in ALST's
    favour. Transformers 5 passes `position_ids` to the attention function and `shift_labels` to the loss.

    Args:
        model: built with `attn_implementation="sdpa"`, replicated on every rank.
        seq_length: tokens of the whole sequence.
        batch_size: sequences in a batch.
        tiled_loss_mib: None for the loss of ALST's tutorial (the model's own, weighted over ranks), else ALST's
            `TiledFusedLogitsLoss` with tiles of about this many MiB of fp32 logits.
    """

    def __init__(self, model: Any, seq_length: int, batch_size: int, tiled_loss_mib: int | None = None) -> None:
        from deepspeed.runtime.sequence_parallel import parallel_state_sp as mpu
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

        if mpu._SEQUENCE_PARALLEL_GROUP is None:
            UlyssesSPAttentionHF.register_with_transformers(
                model_name_or_path=model, core_attn_implementation="sdpa",
                sequence_parallel_size=dist.get_world_size(), micro_batch_size=batch_size,
                seq_length=seq_length, seq_length_is_variable=False,
            )  # fmt: skip
        self.model = model
        self.group = mpu.get_sequence_parallel_group()
        self.tiled_loss_mib = tiled_loss_mib

    def shard(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's part of the full batch, as `UlyssesSPDataLoaderAdapter` would yield it."""
        ranks, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        n = batch["input_ids"].shape[1]
        full = {
            "input_ids": batch["input_ids"],
            "position_ids": torch.arange(n).expand_as(batch["input_ids"]),
            "shift_labels": F.pad(batch["labels"], (0, 1), value=-100)[:, 1:],
        }
        return {k: v[:, rank * n // ranks : (rank + 1) * n // ranks].contiguous() for k, v in full.items()}

    def __call__(self, shard: dict[str, Tensor]) -> Tensor:
        """Run forward, backward and the sum of gradients over ranks; return the global mean loss.

        The gradients are summed as by DeepSpeed's engine without ZeRO (`allreduce_bucket`): one flat bucket in fp32,
        its default for sequence parallelism on CPU.
        """
        loss = self._tutorial_loss(shard) if self.tiled_loss_mib is None else self._tiled_loss(shard)
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        flat = torch._utils._flatten_dense_tensors(grads).float()
        dist.all_reduce(flat, group=self.group)
        if self.tiled_loss_mib is None:
            flat.div_(dist.get_world_size(self.group))  # the differentiable all-gather's backward sums over ranks
        for grad, new in zip(grads, torch._utils._unflatten_dense_tensors(flat, grads), strict=True):
            grad.copy_(new)
        return loss.detach()

    def _tutorial_loss(self, shard: dict[str, Tensor]) -> Tensor:
        from torch.distributed.nn.functional import all_gather

        out = self.model(input_ids=shard["input_ids"], position_ids=shard["position_ids"], use_cache=False)
        labels = shard["shift_labels"]
        vocab = self.model.config.vocab_size
        mean = self.model.loss_function(logits=out.logits, labels=None, shift_labels=labels, vocab_size=vocab)
        means = torch.stack(all_gather(mean, group=self.group))
        tokens = torch.stack(all_gather((labels != -100).sum(), group=self.group))
        loss = torch.where(tokens > 0, means * tokens, torch.zeros_like(means)).sum() / tokens.sum()
        loss.backward()
        return loss

    def _tiled_loss(self, shard: dict[str, Tensor]) -> Tensor:
        from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss

        hidden = self.model.model(
            input_ids=shard["input_ids"], position_ids=shard["position_ids"], use_cache=False
        ).last_hidden_state
        labels, vocab = shard["shift_labels"], self.model.config.vocab_size
        tokens = (labels != -100).sum()
        dist.all_reduce(tokens, group=self.group)

        def loss_sum(head: Any, x: Tensor, y: Tensor) -> Tensor:
            logits = head(x).float().view(-1, vocab)
            return F.cross_entropy(logits, y.view(-1), ignore_index=-100, reduction="sum") / tokens

        assert self.tiled_loss_mib is not None
        tiles = max(1, -(-labels.numel() * vocab * 4 // (self.tiled_loss_mib * 2**20)))
        head = self.model.lm_head
        mine = TiledFusedLogitsLoss.apply(loss_sum, head, hidden, labels, None, tiles, list(head.parameters()), "sum")
        mine.backward()
        loss = mine.detach().clone()
        dist.all_reduce(loss, group=self.group)
        return loss


# --- yunchang


def _yunchang(candidate: Candidate, inputs: AttentionInputs) -> Attend:
    """Return yunchang's `LongContextAttention` with its all-to-all and ring; on a CPU with torch's kernels."""
    mesh = candidate.mesh
    _check_heads("yunchang", inputs.heads, inputs.kv_heads, mesh.ulysses)
    yunchang = _import("yunchang")
    yunchang.set_seq_parallel_pg(mesh.ulysses, mesh.ring, dist.get_rank(), mesh.ranks)
    kinds = yunchang.kernels.AttnType
    if inputs.device.type == "cuda":
        module = yunchang.LongContextAttention(ring_impl_type="basic", attn_type=kinds.FA)
    else:
        ring = importlib.import_module("yunchang.ring.ring_pytorch_attn")
        ring.pytorch_attn_forward, ring.pytorch_attn_backward = _cpu_forward, _cpu_backward
        ring.RingAttentionFunc = _with_every_gradient(ring.RingAttentionFunc)
        module = yunchang.LongContextAttention(ring_impl_type="basic_pytorch", attn_type=kinds.TORCH_FLASH)
        if mesh.ring == 1:  # no ring: one call of the kernel
            module.ring_attn_fn = lambda q, k, v, **_: sdpa(q, k, v)
    return lambda q, k, v: module(q, k, v, causal=True)


_ATTENTIONS: dict[str, Callable[[Candidate, AttentionInputs], Attend]] = {
    "deepspeed": _deepspeed,
    "alst": _alst,
    "yunchang": _yunchang,
}


def _with_every_gradient(function: Any) -> Any:
    """Fix yunchang 0.6.4, whose backward returns the gradients of q, k and v without the one of the group."""
    if function.__name__ != "RingAttentionFunc":  # fixed already
        return function

    class Fixed(function):
        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
            found = function.backward(ctx, *grads)
            return found if len(found) == 6 else (None, *found, *[None] * (5 - len(found)))

    return Fixed


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Return output [B, S, H, D] and log-sum-exp [B, H, S] of a block."""
    groups = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(groups, dim=2) for x in (k, v))
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    out, lse = flash_cpu(*heads_first, 0.0, causal, scale=softmax_scale)
    return out.transpose(1, 2), lse.to(q.dtype)


def _cpu_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    *,
    softmax_lse: Tensor,
    softmax_scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    groups, kv_heads = q.shape[2] // k.shape[2], k.shape[2]
    repeated = [x.repeat_interleave(groups, dim=2) for x in (k, v)]
    heads_first = [x.transpose(1, 2) for x in (dout, q, *repeated, out)]
    lse = softmax_lse.transpose(1, 2).contiguous().float()
    dq, dk, dv = flash_cpu_backward(*heads_first, lse, 0.0, causal, scale=softmax_scale)
    dk, dv = (x.unflatten(1, (kv_heads, groups)).sum(2).transpose(1, 2).contiguous() for x in (dk, dv))
    return dq.transpose(1, 2).contiguous(), dk, dv


def _check_heads(name: str, heads: int, kv_heads: int, ranks: int) -> None:
    for what, count in (("heads", heads), ("KV heads", kv_heads)):
        if count % ranks:
            raise LongspanError(f"{name} needs {what} that {ranks} ranks divide, and there are {count}")


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise LongspanError(
            f"{name} is installed but cannot be imported: {type(error).__name__}: {error}; leave its methods out"
        ) from error
