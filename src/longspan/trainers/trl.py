"""What TRL's trainers do to a model, undone, and how they count processes, set right.

TRL replaces a model's forward by one with a "fused" head, which projects hidden states by the head's weight. Of a cut
sequence that would be one rank's tokens, with the labels of all. `longspan.hf.forward.scored` answers the same call.

A trainer that generates (GRPO) draws a prompt as often as it wants completions, for all processes at once, and ranks
the completions of a prompt among themselves. The ranks of a sequence group must draw, shuffle and rank as one process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import set_seed

from longspan.compat.trl_api import count_tokens_once, fused_head_of
from longspan.core.errors import LongspanError
from longspan.hf.forward.scored import Scoring
from longspan.hf.support import transformers_model

if TYPE_CHECKING:
    from longspan.comm.mesh import SequenceSharding


def take_back_fused_head(model: Any, trainer: Any) -> Scoring:
    """Give a model its own forward back, if TRL has replaced it, and say what that was to compute.

    Raises:
        LongspanError: for a head in fp32.
    """
    inner: Any = transformers_model(model)
    wanted = fused_head_of(inner)
    if wanted is None:
        return Scoring()
    if wanted.get("cast_lm_head_to_fp32"):
        raise LongspanError(
            "cast_lm_head_to_fp32=True does not go together with a cut sequence, whose head is computed tile by tile "
            "in its own dtype, softmax and sums in fp32; leave it False"
        )
    del inner.forward
    trains_entropy = getattr(trainer, "entropy_coef", 0.0) or getattr(trainer, "use_adaptive_entropy", False)
    return Scoring(float(wanted.get("temperature", 1.0)), bool(trains_entropy))


def generate_elsewhere(trainer: Any, sp: SequenceSharding) -> None:
    """Have a trainer that generates count sequence groups, where something else than its model generates.

    Args:
        trainer: of any kind.
        sp: the sharding, of more than one rank.

    Raises:
        LongspanError: for one that would call its model's `generate`, or load a vLLM with its weights; for completions
            of a prompt that do not lie on one replica; for what is computed over the completions of all processes.
    """
    if not (hasattr(trainer, "num_generations") or hasattr(trainer, "generation_config")):
        return
    args, name = trainer.args, type(trainer).__name__.removeprefix("Sharded")
    if getattr(trainer, "rollout_func", None) is None or getattr(args, "use_vllm", False):
        raise LongspanError(
            f"{name} generates by its model, or by a vLLM that it gives the model's weights, and a parallelized model "
            f"does neither in this version; give GRPOTrainer a rollout_func= that generates elsewhere (and no "
            f"use_vllm), or compute the loss in a loop of your own from longspan.token_logprobs"
        )
    rows = args.per_device_train_batch_size * args.steps_per_generation
    if rows % trainer.num_generations:
        raise LongspanError(
            f"num_generations={trainer.num_generations} completions of a prompt must lie on one replica, and "
            f"per_device_train_batch_size={args.per_device_train_batch_size} x steps_per_generation="
            f"{args.steps_per_generation} gives it {rows}; make that a multiple"
        )
    over_all = {"scale_rewards": "batch", "multi_objective_aggregation": "normalize_then_sum"}
    found = [f"{key}={value!r}" for key, value in over_all.items() if getattr(args, key, None) == value]
    found += [f"top_entropy_quantile={q}" for q in [getattr(args, "top_entropy_quantile", 1.0)] if q < 1]
    if found and sp.size > 1:
        raise LongspanError(
            f"{found[0]} takes a deviation or a quantile over all processes, which have each completion {sp.size} "
            f"times; leave it out"
        )
    args.generation_batch_size = rows * sp.data_size
    set_seed(args.seed + sp.data_rank)  # the trainer's is another one on each rank
    count_tokens_once(trainer, sp.size)
