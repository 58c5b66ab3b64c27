"""A training step of one model by every method: forward, backward, AdamW; the same weights and tokens at the start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from longspan.bench.methods import Row
from longspan.bench.tensor import Tensors
from longspan.bench.workloads import Shardings, Work
from longspan.comm.digests import local_part
from longspan.core.errors import LongspanError
from longspan.hf.parallelize import parallelize
from longspan.hf.support import decoder_layers
from longspan.plan.models.shape import ModelShape


@dataclass(frozen=True)
class StepCase:
    """A training step: the same on every rank.

    Attributes:
        config: the model's, as `AutoConfig.for_model` takes it.
        context: tokens of a sequence.
        dtype: what is computed in; weights and optimizer are fp32.
        shardings: this rank's.
        seed: of weights and tokens.
    """

    config: dict[str, Any]
    context: int
    dtype: torch.dtype
    shardings: Shardings
    seed: int = 0

    @property
    def device(self) -> torch.device:
        """This rank's."""
        return self.shardings.device

    def model(self) -> Any:
        """The model on the CPU, in fp32, the same on every rank."""
        options = {key: value for key, value in self.config.items() if key != "model_type"}
        config = transformers.AutoConfig.for_model(self.config["model_type"], **options)
        torch.manual_seed(self.seed)
        return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()

    def tokens(self, replica: int) -> Tensor:
        """The ids of one replica's sequence."""
        numbers = torch.Generator().manual_seed(self.seed + replica)
        ids = torch.randint(0, self.config["vocab_size"], (1, self.context), generator=numbers)
        return ids.to(self.device)

    @property
    def bf16(self) -> bool:
        """Whether it computes in bf16."""
        return self.dtype == torch.bfloat16


def sequence_step(row: Row, case: StepCase) -> Work:
    """`longspan.parallelize`, with FSDP2 over all ranks."""
    sp = case.shardings.of(row)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if case.bf16 and sp.world_size > 1 else None
    model = parallelize(case.model(), sp, mp_policy=policy)
    if not row.kind.options.get("prefetch", True):
        without_prefetch(model)
    ids = case.tokens(sp.data_rank)
    autocast = case.bf16 and policy is None
    return step_work(model, lambda: model(input_ids=ids, labels=ids).loss, case, autocast, sequences=row.mesh.data)


def without_prefetch(model: nn.Module) -> None:
    """Have FSDP gather a group's weights only when they are needed."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_modules_to_forward_prefetch([])
            # None at all would mean its default, the group before; itself is there already.
            module.set_modules_to_backward_prefetch([module])


def tensor_step(row: Row, case: StepCase) -> Work:
    """Split products and sums of hidden states, as `longspan.bench.tensor` has them; nothing else is sharded.

    The head and the loss are split by the vocabulary; embeddings and norms are on every rank.
    """
    mesh = case.shardings.of(row).mesh
    tensors = Tensors(mesh.get_group("tensor"), row.kind.job.get("tensor_style") == "megatron-sp")  # type: ignore[union-attr]
    model = case.model()
    norms = split_model(model, tensors)
    model.to(case.device)
    ids = case.tokens(0)
    after = (lambda: sum_partial(norms, tensors.group)) if tensors.by_tokens else (lambda: None)
    return step_work(model, lambda: split_loss(model, ids, tensors), case, case.bf16, before_update=after)


def step_work(
    model: Any,
    loss_of: Callable[[], Tensor],
    case: StepCase,
    autocast: bool,
    *,
    sequences: int = 1,
    before_update: Callable[[], None] = lambda: None,
) -> Work:
    """A step of a model that is sharded as its method does: forward, backward, AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    kept: dict[str, Tensor] = {}

    def forward() -> Tensor:
        with torch.autocast(case.device.type, torch.bfloat16, enabled=autocast):
            return loss_of()

    def backward(loss: Tensor) -> None:
        loss.backward()
        before_update()
        kept["loss"] = loss.detach()
        optimizer.step()
        optimizer.zero_grad()

    def at_rest() -> int:
        states = [x for state in optimizer.state.values() for x in state.values()]
        return sum(local_part(x).nbytes for x in (*model.parameters(), *states) if isinstance(x, Tensor))

    return Work(forward, backward, lambda: dict(kept), sequences, at_rest)


# --- tensor parallelism


def split_model(model: Any, tensors: Tensors) -> list[nn.Parameter]:
    """Keep this rank's part of every layer's products and of the head, in place; put the sums around them.

    Returns:
        The parameters whose gradients are this rank's tokens' alone where hidden states are sharded by tokens.

    Raises:
        LongspanError: for a model of other layers than Llama's, or sizes that the ranks do not divide.
    """
    ranks, rank = tensors.group.size(), tensors.group.rank()
    config = model.config
    sizes = {
        "query heads": config.num_attention_heads,
        "KV heads": config.num_key_value_heads,
        "intermediate size": config.intermediate_size,
        "vocabulary": config.vocab_size,
    }
    for name, size in sizes.items():
        if size % ranks:
            raise LongspanError(f"{ranks} tensor ranks do not divide the model's {name} {size}")
    layers: list[Any] = decoder_layers(model)
    for layer in layers:
        try:
            columns = [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj]
            columns += [layer.mlp.gate_proj, layer.mlp.up_proj]
            rows = [layer.self_attn.o_proj, layer.mlp.down_proj]
        except AttributeError as error:
            raise LongspanError(f"`bench step` splits layers like Llama's alone: {error}") from None
        for linear in columns:
            _keep(linear, 0, ranks, rank)
        for linear in rows:
            _keep(linear, 1, ranks, rank)
        _surround(layer.self_attn, tensors)
        _surround(layer.mlp, tensors)
    if model.lm_head.weight is model.get_input_embeddings().weight:
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    _keep(model.lm_head, 0, ranks, rank)
    layers[0].register_forward_pre_hook(
        lambda _, args, kwargs: ((tensors.mine(args[0]), *args[1:]), kwargs), with_kwargs=True
    )
    return [p for name, p in model.named_parameters() if "norm" in name]


def _keep(linear: Any, dim: int, ranks: int, rank: int) -> None:
    if linear.bias is not None:
        raise LongspanError("`bench step` splits products without a bias alone; measure another model")
    linear.weight = nn.Parameter(linear.weight.detach().chunk(ranks, dim)[rank].clone())


def _surround(module: Any, tensors: Tensors) -> None:
    plain = module.forward

    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        out = plain(tensors.enter(hidden_states), *args, **kwargs)
        return (tensors.leave(out[0]), *out[1:]) if isinstance(out, tuple) else tensors.leave(out)

    module.forward = forward


def split_loss(model: Any, ids: Tensor, tensors: Tensors) -> Tensor:
    """The mean loss of the next tokens, of logits that are split by the vocabulary; the same on every rank."""
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    hidden = model.model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
    logits = model.lm_head(tensors.enter(hidden))[:, :-1].flatten(0, 1).float()
    loss: Tensor = _SplitCrossEntropy.apply(logits, ids[:, 1:].flatten(), tensors.group)  # type: ignore[no-untyped-call]
    return loss


def around_split(shape: ModelShape, context: int, row: Row, element: int) -> dict[str, int]:
    """Bytes that a rank sends in `tensor_step` beside the layers, which the planner's formula has: of the split head's
    input, of the loss, and where hidden states are sharded by tokens of embeddings and norms.
    """
    t = row.mesh.tensor
    hidden = element * context * shape.d_model * (t - 1) // t
    of_loss = sum(2 * 4 * numbers * (context - 1) * (t - 1) // t for numbers in (1, 2))
    if row.kind.job.get("tensor_style") != "megatron-sp":
        return {"all_reduce": 2 * hidden + of_loss}
    norms = [p for layer in shape.layers for p in layer.parameters if "norm" in p.name]
    norms += [p for p in shape.root if "norm" in p.name]
    of_norms = sum(2 * 4 * p.numel * (t - 1) // t for p in norms)
    return {"all_gather": 2 * hidden, "reduce_scatter": hidden, "all_reduce": of_loss + of_norms}


class _SplitCrossEntropy(torch.autograd.Function):
    """Of logits [N, V / P]: the maximum, the sum and the label's logit of each token, over all ranks."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, group: dist.ProcessGroup) -> Tensor:
        first = group.rank() * logits.shape[1]
        most = logits.max(1).values
        dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
        exp = (logits - most[:, None]).exp()
        here = (labels >= first) & (labels < first + logits.shape[1])
        at = (labels - first).clamp(0, logits.shape[1] - 1)
        own = torch.where(here, logits.gather(1, at[:, None])[:, 0] - most, 0.0)
        sums = torch.stack([exp.sum(1), own])
        dist.all_reduce(sums, group=group)
        probabilities = exp.div_(sums[0][:, None])
        ctx.save_for_backward(probabilities, at, here)
        return (sums[0].log() - sums[1]).mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        probabilities, at, here = ctx.saved_tensors
        d = probabilities.scatter_add(1, at[:, None], -here[:, None].to(probabilities.dtype))
        return d * (grad / at.shape[0]), None, None


def sum_partial(parameters: list[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Add up over the ranks the gradients of parameters that each rank met with its own tokens."""
    for p in parameters:
        if p.grad is not None:
            dist.all_reduce(p.grad, group=group)
