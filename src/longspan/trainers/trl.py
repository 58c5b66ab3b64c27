"""TRL's trainers: replace what reads the logits of whole sequences, and count sequence groups as processes.

TRL replaces a model's forward by one with a "fused" head, which multiplies hidden states by the head's weight. With a
sharded sequence it would combine one rank's tokens with the labels of all. `longspan.hf.forward.logprobs` replaces it.

Trainers that compare the logits of two models, or of whole sequences (GKD, distillation; ORPO, CPO with SimPO), compute
the same by tiles: `loss_with_teacher`, `replace_whole_logits`.

A trainer that generates (GRPO) draws each prompt once per completion for all processes, and ranks the completions of a
prompt against each other. The ranks of a sequence group must draw, shuffle and rank as one process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from transformers import set_seed

from longspan.comm.agree import on_first_rank
from longspan.comm.collectives import sum_over
from longspan.compat.friends_api import (
    count_flops_of_replicas,
    count_tokens_once,
    draws_by_itself,
    fused_head_of,
    metrics_of,
    micro_batches,
    pictures_of_distillation,
)
from longspan.core.errors import LongspanError
from longspan.hf.forward.distillation import distill_with_entropy, distillation_loss
from longspan.hf.forward.logprobs import score_for_trl
from longspan.hf.model.support import transformers_model
from longspan.losses.cross_entropy import IGNORE

if TYPE_CHECKING:
    from longspan.comm.mesh import SequenceSharding


_MIXIN = "longspan.trainers.mixin"
_OF_WHOLE_LOGITS = ("TPOTrainer",)


def refuse_whole_logits(kind: type) -> None:
    """Raise for trainers that compute their loss from the logits of whole sequences, if no function replaces it."""
    for name in (cls.__name__ for cls in kind.__mro__ if cls.__name__ in _OF_WHOLE_LOGITS):
        raise LongspanError(
            f"{name} computes its loss from the logits of whole sequences, and a parallelized model returns the logits "
            f"of this rank's tokens; use DPOTrainer, KTOTrainer, ORPOTrainer or CPOTrainer, or compute the loss in "
            f"your own loop with longspan.token_logprobs"
        )


def replace_whole_logits(trainer: Any) -> None:
    """Let ORPO and CPO, with SimPO, compute their log-probabilities by tiles; do nothing for other trainers."""
    if _defines(trainer, "concatenated_forward") in ("ORPOTrainer", "CPOTrainer"):
        trainer.concatenated_forward = functools.partial(_concatenated_forward, trainer)


def _concatenated_forward(trainer: Any, model: Any, batch: dict[str, Any]) -> tuple[Tensor, ...]:
    """Return what ORPO's and CPO's `concatenated_forward` do: the log-probabilities of chosen and rejected rows, the
    means of their logits (without padding, whose logits TRL counts), the cross entropy of chosen rows, and the router
    loss.

    The cross entropy is the mean over the tokens of all replicas, as one process computes it.
    """
    is_orpo = _defines(trainer, "concatenated_forward") == "ORPOTrainer"
    padding = trainer.padding_value if is_orpo else trainer.pad_token_id
    joined = trainer.concatenated_inputs(batch, padding_value=padding, device=trainer.accelerator.device)
    ids, mask, labels = (joined[f"concatenated_{key}"] for key in ("input_ids", "attention_mask", "labels"))
    tokens = torch.where(mask != 0, ids, IGNORE)
    router = {"output_router_logits": True} if trainer.aux_loss_enabled else {}
    scores = model(input_ids=ids, attention_mask=mask, labels=tokens, fused_lm_head=True, **router)
    chosen, logps_BL, dtype = len(batch["chosen_labels"]), scores.log_probs, scores.log_probs.dtype
    real_BL, counts_BL = ((x[:, 1:] != IGNORE).to(dtype) for x in (tokens, labels))
    logps_B = (logps_BL * counts_BL).sum(-1)
    if is_orpo or trainer.loss_type in ("ipo", "simpo"):
        logps_B = logps_B / counts_BL.sum(-1)
    nll = logps_BL.new_zeros(())
    if is_orpo or trainer.cpo_alpha:
        of_nll = (real_BL if is_orpo else counts_BL)[:chosen]
        nll = -(logps_BL[:chosen] * of_nll).sum() / trainer.accelerator.gather_over_replicas(of_nll.sum()).mean()
    halves = slice(chosen), slice(chosen, None)
    logits = [(scores.mean_logits[rows] * real_BL[rows]).sum() / real_BL[rows].sum() for rows in halves]
    found = (logps_B[:chosen], logps_B[chosen:], *logits, nll)
    return (*found, scores.aux_loss) if router else found


def _defines(trainer: Any, method: str) -> str | None:
    """Return the name of the class of TRL that defines a method of a trainer; None if it is of somebody else."""
    kinds = [cls for cls in type(trainer).__mro__ if method in vars(cls) and cls.__module__ != _MIXIN]
    return kinds[0].__name__ if kinds and kinds[0].__module__.startswith("trl.") else None


def replace_fused_head(model: Any, trainer: Any) -> Callable[..., Any] | None:
    """Restore a model's own forward if TRL has replaced it, and return what computes the same of a sharded sequence."""
    inner: Any = transformers_model(model)
    options = fused_head_of(inner)
    if options is None:
        return None
    if options.get("cast_lm_head_to_fp32"):
        raise LongspanError(
            "cast_lm_head_to_fp32=True does not work with a sharded sequence: the head is computed tile by tile in its "
            "own dtype, softmax and sums in fp32; leave it False"
        )
    del inner.forward
    trains_entropy = getattr(trainer, "entropy_coef", 0.0) or getattr(trainer, "use_adaptive_entropy", False)
    return functools.partial(
        score_for_trl,
        temperature=float(options.get("temperature", 1.0)),
        entropy_grad=bool(trains_entropy),
        uniform_gradient=_has_uniform_gradient(trainer),
    )


def _has_uniform_gradient(trainer: Any) -> bool:
    """Return whether a trainer's loss is that of TRL's `SFTTrainer`, a multiple of the sum of log-probabilities."""
    is_sft = _defines(trainer, "compute_loss") == "SFTTrainer"
    return is_sft and trainer.args.loss_type == "nll" and trainer.compute_loss_func is None


# --- distillation


def loss_with_teacher(trainer: Any) -> Callable[..., Any] | None:
    """Return a trainer's `compute_loss(model, inputs, return_outputs, num_items_in_batch)` by `distillation_loss`.

    None if its loss has no teacher.
    """
    losses = {"GKDTrainer": _gkd_loss, "DistillationTrainer": _loss_of_completions}
    compute = losses.get(_defines(trainer, "compute_loss") or "")
    if compute is None or getattr(trainer, "teacher_model", None) is None:
        return None
    _prepare_distillation(trainer, trainer.longspan_sp)

    def compute_loss(model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        loss = compute(trainer, model, inputs, num_items_in_batch)
        return (loss, None) if return_outputs else loss

    return compute_loss


def _gkd_loss(trainer: Any, model: Any, inputs: Any, items: Any) -> Tensor:
    """As `GKDTrainer.compute_loss`, which samples with its temperature, and compares at temperature 1."""
    batch = {key: inputs[key] for key in ("input_ids", "attention_mask", "labels")}
    return distillation_loss(model, trainer.teacher_model, {**batch, "num_items_in_batch": items}, beta=trainer.beta)


def _loss_of_completions(trainer: Any, model: Any, inputs: Any, items: Any) -> Tensor:
    """As `DistillationTrainer.compute_loss`, which logs the student's entropy."""
    sp = trainer.longspan_sp
    ids, mask = (
        torch.cat([inputs[f"{part}_{key}"] for part in ("prompt", "completion")], 1) for key in ("ids", "mask")
    )
    counts = inputs["completion_mask"] * inputs.get("tool_mask", 1)
    completions = torch.where(counts != 0, inputs["completion_ids"], IGNORE)
    labels = torch.cat([torch.full_like(inputs["prompt_ids"], IGNORE), completions], 1)
    if trainer.model.training and inputs.get("num_items_in_batch") is not None:
        # Every rank of a group has counted its tokens.
        items = inputs["num_items_in_batch"].clamp(min=1) / sp.model_size
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels, "num_items_in_batch": items}
    loss, entropy = distill_with_entropy(
        model, trainer.teacher_model, {**batch, **pictures_of_distillation(inputs)}, trainer.beta, trainer.temperature
    )
    sums = torch.stack([entropy, (labels[:, 1:] != IGNORE).sum().double() / sp.size])
    sums = sum_over(sums, sp.fsdp_group)
    mode = "train" if trainer.model.training else "eval"
    metrics_of(trainer)[mode]["entropy"].append(float(sums[0] / sums[1].clamp(min=1)))
    return loss


def _prepare_distillation(trainer: Any, sp: SequenceSharding) -> None:
    """Make the replicas of a trainer with a teacher draw prompts as processes do, and generate in step."""
    args, name = trainer.args, type(trainer).__name__.removeprefix("Sharded")
    wrong = {
        f"{name} with use_vllm=True loads its weights into a vLLM, which a parallelized model does not support; leave "
        f"it out: the model generates sharded": getattr(args, "use_vllm", False),
        f"{name} computes no logits, which compute_metrics= reads; leave it out": trainer.compute_metrics,
        _TOOLS: _calls_tools(trainer, sp),
    }
    for message, applies in wrong.items():
        if applies:
            raise LongspanError(message)
    trainer.teacher_model.requires_grad_(False)
    trainer.generation_config.use_cache = True
    if draws_by_itself(trainer):  # GKD draws the same numbers on every rank: whether to generate is one of them
        set_seed(args.seed + sp.data_rank)
        count_tokens_once(trainer, sp.model_size)


# --- rollouts


def _is_async(trainer: Any) -> bool:
    return _defines(trainer, "compute_loss") == "AsyncGRPOTrainer"


def divides_by_processes(trainer: Any) -> bool:
    """Return whether a trainer divides batches and losses by accelerate's number of processes, which replicas are."""
    return _defines(trainer, "compute_loss") in ("AsyncGRPOTrainer", "DistillationTrainer")


def loss_of_rollouts(trainer: Any, compute: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return an AsyncGRPOTrainer's `compute_loss`, `compute`, with the trees of its rows as a parallelized model takes
    them; None for other trainers.
    """
    if not _is_async(trainer):
        return None

    def compute_loss(model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        def forward(**batch: Any) -> Any:
            tree = {key: batch.pop(key) for key in list(batch) if key.startswith("tree_")}
            return model(**batch, **trees_of_segments(tree, batch["input_ids"].shape[1]))

        found = compute(forward, inputs, return_outputs, num_items_in_batch)
        if trainer.aux_loss_enabled:  # summed over all ranks, and divided by replicas
            metrics_of(trainer)["train"]["aux_loss"][-1] /= trainer.longspan_sp.model_size
        return found

    return compute_loss


def trees_of_segments(tree: dict[str, Any], tokens: int) -> dict[str, Tensor]:
    """Return `tin` and `tout` `[1, tokens]`, as of `longspan.TreeMask`, of segments in preorder.

    A segment, `tree_cu_seqlens_q` its borders, attends to its path from the root: `tree_cu_seqlens_k` the borders of
    the segments' paths in `tree_kv_index`, places of tokens.
    """
    borders, ends = tree["tree_cu_seqlens_q"].long().cpu(), tree["tree_cu_seqlens_k"].long().cpu()
    numbers = torch.arange(len(borders) - 1)
    tin = numbers.repeat_interleave(borders.diff(), output_size=tokens)
    on_path = tin[tree["tree_kv_index"].cpu()]  # the segment of each token of each path
    behind = torch.zeros_like(numbers).scatter_reduce_(0, on_path, 1 + numbers.repeat_interleave(ends.diff()), "amax")
    return {"tin": tin[None], "tout": behind[tin][None]}


def spread_rollouts(trainer: Any, sp: SequenceSharding) -> None:
    """Let the first rank of an AsyncGRPOTrainer read its rollouts, and each replica train on its row of each batch."""
    count_flops_of_replicas(trainer, sp.model_size)
    make = trainer.get_train_dataloader

    def loader() -> DataLoader[Any]:
        first = micro_batches(trainer, make) if trainer.accelerator.is_main_process else ()
        return DataLoader(_Rows(first, sp), batch_size=None)

    trainer.get_train_dataloader = loader


class _Rows(IterableDataset[dict[str, Tensor]]):
    """This replica's row of each batch of the first rank."""

    def __init__(self, batches: Any, sp: SequenceSharding) -> None:
        self.batches, self.sp = batches, sp

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        batches, at = iter(self.batches), self.sp.data_rank
        while (batch := on_first_rank(lambda: next(batches, None), self.sp.host_group)) is not None:
            yield {key: x[at : at + 1] for key, x in batch.items()}


_TOOLS = "tools= with data > 1: replicas would call tools, and so generate, a different number of times; use data=1"


def _calls_tools(trainer: Any, sp: SequenceSharding) -> bool:
    tools = getattr(trainer, "tools", None) or getattr(trainer, "environments", None)
    return sp.data_size > 1 and bool(tools) and getattr(trainer, "rollout_func", None) is None


def count_sequence_groups(trainer: Any, sp: SequenceSharding) -> None:
    """Make a trainer that generates count sequence groups; do nothing for other trainers."""
    if _is_async(trainer):
        spread_rollouts(trainer, sp)
    generates = hasattr(trainer, "num_generations") or hasattr(trainer, "generation_config")
    if not generates or trainer.longspan_loss is not None:
        return
    args, name = trainer.args, type(trainer).__name__.removeprefix("Sharded")
    own_loop = "compute the loss in your own loop with longspan.token_logprobs"
    at_once, steps = args.per_device_train_batch_size, getattr(args, "steps_per_generation", 1)
    rows = at_once * steps
    generations = getattr(trainer, "num_generations", 1)
    over_all = {"scale_rewards": "batch", "multi_objective_aggregation": "normalize_then_sum"}
    collective = [f"{key}={value!r}" for key, value in over_all.items() if getattr(args, key, None) == value]
    if (quantile := getattr(args, "top_entropy_quantile", 1.0)) < 1:
        collective.append(f"top_entropy_quantile={quantile}")
    wrong = {
        f"{name} compares its model with a teacher by all tokens' logits or hidden states, and a parallelized model "
        f"returns those of this rank's tokens; use DistillationTrainer or GKDTrainer, or compute the loss in your own "
        f"loop with longspan.distillation_loss": hasattr(trainer, "teacher_model"),
        f"{name} generates in a way that is not known to work over ranks; use GRPOTrainer or RLOOTrainer, or "
        f"{own_loop}": _defines(trainer, "_generate_single_turn") not in ("GRPOTrainer", "RLOOTrainer"),
        f"{name} with use_vllm=True loads its weights into a vLLM, which a parallelized model does not support; leave "
        f"it out: the model generates over its ranks": getattr(args, "use_vllm", False),
        _TOOLS: _calls_tools(trainer, sp),
        f"num_generations={generations} completions of a prompt must be on one replica, and "
        f"per_device_train_batch_size={at_once} x steps_per_generation={steps} gives it {rows}; make that a multiple": (
            rows % generations
        ),
        f"{', '.join(collective)} computes a deviation or a quantile over all processes, which have each completion "
        f"{sp.model_size} times; leave it out": collective and sp.model_size > 1,
    }
    for message, applies in wrong.items():
        if applies:
            raise LongspanError(message)
    if hasattr(trainer, "generation_config"):  # the Trainer turns off the cache of its model's config
        trainer.generation_config.use_cache = True
    args.generation_batch_size = rows * sp.data_size
    set_seed(args.seed + sp.data_rank)  # the trainer seeds each rank differently
    count_tokens_once(trainer, sp.model_size)
