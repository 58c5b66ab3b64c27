"""One training step by every method: forward, backward, AdamW, from the same weights and tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from longspan.bench.methods import Candidate
from longspan.bench.workloads import ShardingCache, Workload
from longspan.comm.digests import local_part
from longspan.hf.parallelize import parallelize


@dataclass(frozen=True)
class StepInputs:
    """A model and its tokens, the same on every rank.

    Attributes:
        config: keys of the model's config.json.
        context: tokens of a sequence.
        dtype: compute dtype; weights and optimizer states are fp32.
        shardings: the sharding of each candidate.
        seed: of weights and tokens.
    """

    config: dict[str, Any]
    context: int
    dtype: torch.dtype
    shardings: ShardingCache
    seed: int = 0

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

    def tokens(self, replica: int) -> Tensor:
        """Return the token ids of one replica, int64 `[1, context]`."""
        generator = torch.Generator().manual_seed(self.seed + replica)
        ids = torch.randint(0, self.config["vocab_size"], (1, self.context), generator=generator)
        return ids.to(self.device)


def longspan_step(candidate: Candidate, inputs: StepInputs) -> Workload:
    """Return a step of `longspan.parallelize`: the sequence axes with FSDP2, and the tensor axis."""
    sp = inputs.shardings.get(candidate)
    # Without FSDP (the tensor axis alone), autocast computes in bf16, as in `longspan train`.
    fsdp = sp.shards_weights(fsdp=True, cpu_offload=False)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if inputs.bf16 and fsdp else None
    style = candidate.method.job.get("tensor_style", "tp")
    model = parallelize(inputs.model(), sp, mp_policy=policy, tensor_style=style)
    if not candidate.method.options.get("prefetch", True):
        _disable_prefetch(model)
    ids = inputs.tokens(sp.data_rank)
    return step_workload(
        model,
        lambda: model(input_ids=ids, labels=ids).loss,
        inputs,
        autocast=inputs.bf16 and not fsdp,
        sequences=candidate.mesh.data,
    )


def _disable_prefetch(model: nn.Module) -> None:
    """Let FSDP gather each group's weights only when they are needed."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_modules_to_forward_prefetch([])
            # An empty list would restore FSDP's default (the previous group). The module itself is gathered already.
            module.set_modules_to_backward_prefetch([module])


def step_workload(
    model: Any, compute_loss: Callable[[], Tensor], inputs: StepInputs, *, autocast: bool, sequences: int = 1
) -> Workload:
    """Return forward, backward and AdamW of a sharded model as a workload."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    last: dict[str, Tensor] = {}

    def forward() -> Tensor:
        with torch.autocast(inputs.device.type, torch.bfloat16, enabled=autocast):
            return compute_loss()

    def backward(loss: Tensor) -> None:
        loss.backward()
        last["loss"] = loss.detach()
        optimizer.step()
        optimizer.zero_grad()

    def state_bytes() -> int:
        states = [x for state in optimizer.state.values() for x in state.values()]
        return sum(local_part(x).nbytes for x in (*model.parameters(), *states) if isinstance(x, Tensor))

    return Workload(forward, backward, lambda: dict(last), sequences, state_bytes)
