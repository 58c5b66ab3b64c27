"""TRL's trainers: remove their fused head, and count sequence groups as processes.

TRL replaces a model's forward by one with a "fused" head, which multiplies hidden states by the head's weight. With a
sharded sequence it would combine one rank's tokens with the labels of all. `longspan.hf.forward.logprobs` replaces it.

A trainer that generates (GRPO) draws each prompt once per completion for all processes, and ranks the completions of a
prompt against each other. The ranks of a sequence group must draw, shuffle and rank as one process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from transformers import set_seed

from longspan.compat.friends_api import count_tokens_once, fused_head_of
from longspan.core.errors import LongspanError
from longspan.hf.forward.logprobs import score_for_trl
from longspan.hf.model.support import transformers_model

if TYPE_CHECKING:
    from longspan.comm.mesh import SequenceSharding


_MIXIN = "longspan.trainers.mixin"
_OF_WHOLE_LOGITS = ("CPOTrainer", "ORPOTrainer", "TPOTrainer")


def refuse_whole_logits(kind: type) -> None:
    """Raise for trainers that compute their loss from the logits of whole sequences (ORPO; CPO, with SimPO)."""
    for name in (cls.__name__ for cls in kind.__mro__ if cls.__name__ in _OF_WHOLE_LOGITS):
        raise LongspanError(
            f"{name} computes its loss from the logits of whole sequences, and a parallelized model returns the logits "
            f"of this rank's tokens; use DPOTrainer or KTOTrainer, or compute the loss in your own loop with "
            f"longspan.token_logprobs"
        )


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
    kinds = [cls for cls in type(trainer).__mro__ if "compute_loss" in vars(cls) and cls.__module__ != _MIXIN]
    is_sft = kinds[0].__name__ == "SFTTrainer" and kinds[0].__module__.startswith("trl.")
    return is_sft and trainer.args.loss_type == "nll" and trainer.compute_loss_func is None


def count_sequence_groups(trainer: Any, sp: SequenceSharding) -> None:
    """Make a trainer that generates count sequence groups; do nothing for other trainers."""
    if not (hasattr(trainer, "num_generations") or hasattr(trainer, "generation_config")):
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
        f"returns those of this rank's tokens; in your own loop parallelize both models, and compare their logits "
        f"token by token": hasattr(trainer, "teacher_model"),
        f"{name} generates with its model, which a parallelized model does not support in training, and takes no "
        f"rollout_func=; use GRPOTrainer with one, or {own_loop}": not hasattr(trainer, "rollout_func"),
        f"{name} generates with its model, or with a vLLM that loads its weights, which a parallelized model does not "
        f"support; give {name} a rollout_func= that generates elsewhere (and no use_vllm), or {own_loop}": (
            getattr(trainer, "rollout_func", None) is None or getattr(args, "use_vllm", False)
        ),
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
    args.generation_batch_size = rows * sp.data_size
    set_seed(args.seed + sp.data_rank)  # the trainer seeds each rank differently
    count_tokens_once(trainer, sp.model_size)
