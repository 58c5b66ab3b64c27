"""TRL's private names. TRL itself is not imported: what is asked is asked of a trainer or model that it has made."""

from __future__ import annotations

import inspect
from typing import Any

_PATCHED = "_fused_forward"


def fused_head_of(model: Any) -> dict[str, Any] | None:
    """What TRL's fused head, which stands for a model's forward, was made with (`temperature`,
    `cast_lm_head_to_fp32`, ...); None for a model whose forward is its own.

    Versions: TRL 1.16. Public way: none. When gone: None, and the first step ends in the error of TRL's forward.
    """
    patched = vars(model).get("forward")
    function = getattr(patched, "__func__", patched)
    code = getattr(function, "__code__", None)
    if function is None or code is None or code.co_name != _PATCHED:
        return None
    return dict(inspect.getclosurevars(function).nonlocals)


def count_tokens_once(trainer: Any, times: int) -> None:
    """Have a GRPOTrainer, which adds up the tokens of all processes, count those that several ranks have once.

    Args:
        trainer: whose method for generating is wrapped.
        times: ranks that have the same tokens.

    Versions: TRL 1.16. Public way: none. When gone: an AttributeError when the trainer is made.
    """
    generate = trainer._generate

    def counted(prompts: list[Any]) -> Any:
        before = trainer.state.num_input_tokens_seen
        found = generate(prompts)
        seen = before + (trainer.state.num_input_tokens_seen - before) // times
        trainer.state.num_input_tokens_seen = seen
        trainer._metrics["train" if trainer.model.training else "eval"]["num_tokens"] = [seen]
        return found

    trainer._generate = counted
