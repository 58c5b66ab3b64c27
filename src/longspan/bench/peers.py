"""Other libraries' attention, each in the best way that it documents, with torch's SDPA as its kernel where it can be;
and a training step of a Hugging Face model with that attention in every layer.

Only this file knows their calling conventions. They are imported when they are asked for. DeepSpeed has two Ulysses:
`DistributedAttention` and, for Hugging Face models, `UlyssesSPAttentionHF` (ALST). yunchang is the library of USP (Fang
& Zhao 2024, arXiv:2405.07719).
"""

from __future__ import annotations

import importlib
import logging
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

from longspan.bench.methods import Row
from longspan.bench.step import StepCase, step_work
from longspan.bench.workloads import Case, Work, attention_work, leaves_of
from longspan.compat.torch_attention import flash_cpu, flash_cpu_backward
from longspan.compat.transformers_api import register_attention
from longspan.core.errors import LongspanError
from longspan.hf.weights.fsdp import apply_fsdp

Attend = Callable[[Tensor, Tensor, Tensor], Any]
"""q [B, L, H, D], k and v [B, L, K, D] of a rank's tokens, a contiguous part of the sequence, to [B, L, H, D]."""


def sdpa(q_BSHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor) -> Tensor:
    """torch's causal attention of tokens-first tensors."""
    q, k, v = (x.transpose(1, 2) for x in (q_BSHD, k_BSKD, v_BSKD))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2)


def peer_attention(row: Row, case: Case) -> Work:
    """The attention of a rank that holds a contiguous part of the tokens.

    Raises:
        LongspanError: for heads that the library cannot share out over these ranks.
    """
    attend = _ATTENDS[row.kind.name](row, case)
    q, k, v, grad = (x.chunk(row.mesh.gpus, 1)[dist.get_rank()] for x in case.tensors())
    return attention_work(leaves_of(q, k, v), grad, attend)


def peer_step(row: Row, case: StepCase) -> Work:
    """A peer's attention in every layer of the model that longspan's step has; the rest is that step's own.

    Each rank has a contiguous part of the tokens and whole logits of them, as the libraries' tutorials have it. Weights
    are sharded by FSDP2 over all ranks, in the same groups and with the same prefetch, so that the steps differ in what
    is compared; DeepSpeed's engine (ZeRO) would bring a sharding of its own.

    Raises:
        LongspanError: as `peer_attention`; for a model whose attention is more than causal softmax attention.
    """
    model = case.model()
    config = model.config
    if config.model_type not in ("llama", "qwen2", "qwen3") or getattr(config, "use_sliding_window", False):
        raise LongspanError(f"a step with {row.name} is measured of Llama and Qwen alone, not of {config.model_type}")
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    attend = _ATTENDS[row.kind.name](
        row, Case(case.context, heads, kv_heads, config.head_dim, case.dtype, case.shardings)
    )

    def of_transformers(module: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        return attend(*(x.transpose(1, 2) for x in (q, k, v))), None

    name = f"bench-{row.name}-{case.context}"
    register_attention(name, of_transformers, lambda *_, **__: None)
    model.set_attn_implementation(name)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if case.bf16 else None
    apply_fsdp(model.to(case.device), case.shardings.of(row), policy)

    ids = case.tokens(0)
    local = case.context // row.mesh.gpus
    mine = slice(dist.get_rank() * local, (dist.get_rank() + 1) * local)
    labels = F.pad(ids, (0, 1), value=-100)[:, 1:][:, mine].flatten()
    inputs = {"input_ids": ids[:, mine], "position_ids": torch.arange(case.context, device=case.device)[None, mine]}

    def loss_of() -> Tensor:
        logits = model(**inputs, use_cache=False).logits.flatten(0, 1).float()
        part = F.cross_entropy(logits, labels, reduction="sum") / (case.context - 1)
        whole = part.detach().clone()
        dist.all_reduce(whole)
        loss: Tensor = part + (whole - part.detach())  # the value of all tokens, the gradient of mine
        return loss

    return step_work(model, loss_of, case, autocast=False)


def _deepspeed(row: Row, case: Case) -> Attend:
    """`deepspeed.sequence.layer.DistributedAttention`, batch first; KV heads fewer than ranks are repeated for it."""
    ranks, group = _ready(row, case)
    from deepspeed.sequence.layer import DistributedAttention

    repeats = -(-ranks // case.kv_heads)
    module = DistributedAttention(sdpa, group, scatter_idx=2, gather_idx=1, num_kv_heads=case.kv_heads * repeats)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        if repeats > 1:  # it refuses fewer
            k, v = k.repeat_interleave(repeats, dim=2), v.repeat_interleave(repeats, dim=2)
        return module(q, k, v, 0)

    return attend


def _alst(row: Row, case: Case) -> Attend:
    """ALST's `UlyssesSPAttentionHF`, called as a Hugging Face layer calls it."""
    ranks, group = _ready(row, case)
    from types import SimpleNamespace

    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    local = case.context // ranks
    module = UlyssesSPAttentionHF(
        attn=sdpa_attention_forward, batch_size=1, attn_head_count=case.heads, attn_head_size=case.head_dim,
        kv_head_count=case.kv_heads, num_hidden_layers=1, process_group=group, local_seq_length=local,
        global_seq_length=case.context,
    )  # fmt: skip
    layer = SimpleNamespace(training=True, num_key_value_groups=case.heads // case.kv_heads, is_causal=True)
    first = dist.get_rank() * local
    position_ids = torch.arange(first, first + local, device=case.device)[None]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        heads_first = [x.transpose(1, 2) for x in (q, k, v)]
        out, _ = module(layer, *heads_first, None, position_ids=position_ids)
        return out.unflatten(-1, (case.heads, case.head_dim))

    return attend


def _yunchang(row: Row, case: Case) -> Attend:
    """yunchang's `LongContextAttention`: its exchange, its ring. On a CPU torch's kernels in the place of its own."""
    mesh = row.mesh
    for what, heads in (("heads", case.heads), ("KV heads", case.kv_heads)):
        if heads % mesh.ulysses:
            raise LongspanError(f"yunchang needs {what} that {mesh.ulysses} ranks divide, and there are {heads}")
    yunchang = _imported("yunchang")
    yunchang.set_seq_parallel_pg(mesh.ulysses, mesh.ring, dist.get_rank(), mesh.gpus)
    if case.device.type == "cuda":
        kind = yunchang.kernels.AttnType.FA
        module = yunchang.LongContextAttention(ring_impl_type="basic", attn_type=kind)
    else:
        ring = importlib.import_module("yunchang.ring.ring_pytorch_attn")
        ring.pytorch_attn_forward, ring.pytorch_attn_backward = _cpu_forward, _cpu_backward  # type: ignore[attr-defined]
        ring.RingAttentionFunc = _with_every_gradient(ring.RingAttentionFunc)  # type: ignore[attr-defined]
        kind = yunchang.kernels.AttnType.TORCH_FLASH
        module = yunchang.LongContextAttention(ring_impl_type="basic_pytorch", attn_type=kind)
        if mesh.ring == 1:  # a ring of one is one kernel's call
            module.ring_attn_fn = lambda q, k, v, **_: sdpa(q, k, v)
    return lambda q, k, v: module(q, k, v, causal=True)


_ATTENDS: dict[str, Callable[[Row, Case], Attend]] = {"deepspeed": _deepspeed, "alst": _alst, "yunchang": _yunchang}


def _with_every_gradient(function: Any) -> Any:
    """yunchang 0.6.4 computes the right gradients, but one too few, the first to its group."""

    class Mended(function):  # type: ignore[misc]
        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
            found = function.backward(ctx, *grads)
            return found if len(found) == 6 else (None, *found, *[None] * (5 - len(found)))

    return Mended if function.__name__ == "RingAttentionFunc" else function


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Output [B, S, H, D] and log-sum-exp [B, H, S] of a block."""
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
    wide = [x.repeat_interleave(groups, dim=2) for x in (k, v)]
    heads_first = [x.transpose(1, 2) for x in (dout, q, *wide, out)]
    lse = softmax_lse.transpose(1, 2).contiguous().float()
    dq, dk, dv = flash_cpu_backward(*heads_first, lse, 0.0, causal, scale=softmax_scale)
    of_kv = [x.unflatten(1, (kv_heads, groups)).sum(2).transpose(1, 2).contiguous() for x in (dk, dv)]
    return dq.transpose(1, 2).contiguous(), of_kv[0], of_kv[1]


def _ready(row: Row, case: Case) -> tuple[int, Any]:
    """Ranks and their group, DeepSpeed imported quietly and having adopted the process group that is there."""
    ranks = row.mesh.gpus
    for what, heads in (("heads", case.heads), ("KV heads", max(case.kv_heads, ranks))):
        if heads % ranks:
            raise LongspanError(f"{row.name} needs {what} that {ranks} ranks divide, and there are {heads}")
    if case.device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        comm = _imported("deepspeed.comm")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    comm.init_distributed(dist_backend=dist.get_backend(), verbose=False, dist_init_required=False)
    return ranks, dist.group.WORLD


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise LongspanError(
            f"{name} is installed but cannot be imported: {type(error).__name__}: {error}; leave its methods out"
        ) from error
