"""ALST's whole training step, from DeepSpeed; `longspan.bench.peers` has the attention of other libraries.

Needs `DS_BUILD_OPS=0 pip install --no-deps deepspeed` and its small dependencies (see README.md).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F


def without_exchange() -> str:
    """Register a transformers attention that does one rank's share of the work without communication; return its name.

    It reads local tokens of all heads as all tokens of the local heads: the sizes are right, the values are not.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    def attend(module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> Any:
        ranks = dist.get_world_size()
        q, k, v = (x.reshape(x.shape[0], max(1, x.shape[1] // ranks), -1, x.shape[3]) for x in (q, k, v))
        k, v = (x.repeat(1, 1, q.shape[2] // x.shape[2], 1) for x in (k, v))  # at most once, unless KV heads < ranks
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return o.reshape(q.shape[0], module.config.num_attention_heads, -1, q.shape[3]).transpose(1, 2), None

    AttentionInterface.register("without_exchange", attend)
    AttentionMaskInterface.register("without_exchange", lambda *_, **__: None)
    return "without_exchange"


# --- a Hugging Face model under ALST ---------------------------------------------------------------


def tile_mlps(model: Any) -> None:
    """Use ALST's TiledMLP in every layer of a Llama as documented: tokens / hidden size tiles, maximum over ranks."""
    import math

    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP
    from transformers.models.llama.modeling_llama import LlamaMLP

    plain = LlamaMLP.forward

    def forward(self: Any, x: torch.Tensor) -> Any:
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

    def shard(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return this rank's part of the full batch, as `UlyssesSPDataLoaderAdapter` would yield it."""
        ranks, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        n = batch["input_ids"].shape[1]
        full = {
            "input_ids": batch["input_ids"],
            "position_ids": torch.arange(n).expand_as(batch["input_ids"]),
            "shift_labels": F.pad(batch["labels"], (0, 1), value=-100)[:, 1:],
        }
        return {k: v[:, rank * n // ranks : (rank + 1) * n // ranks].contiguous() for k, v in full.items()}

    def __call__(self, shard: dict[str, torch.Tensor]) -> torch.Tensor:
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

    def _tutorial_loss(self, shard: dict[str, torch.Tensor]) -> torch.Tensor:
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

    def _tiled_loss(self, shard: dict[str, torch.Tensor]) -> torch.Tensor:
        from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss

        hidden = self.model.model(
            input_ids=shard["input_ids"], position_ids=shard["position_ids"], use_cache=False
        ).last_hidden_state
        labels, vocab = shard["shift_labels"], self.model.config.vocab_size
        tokens = (labels != -100).sum()
        dist.all_reduce(tokens, group=self.group)

        def loss_sum(head: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
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
