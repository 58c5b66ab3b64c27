"""TRL's private names. TRL is not imported: all of this inspects a trainer or model that it has made."""

from __future__ import annotations

import inspect
from typing import Any

_PATCHED = "_fused_forward"


def fused_head_of(model: Any) -> dict[str, Any] | None:
    """Return the arguments of TRL's fused head, if it replaces a model's forward (`temperature`, ...); else None.

    Versions: TRL 1.16. When gone: None, and TRL's forward raises in the first step.
    """
    patched = vars(model).get("forward")
    function = getattr(patched, "__func__", patched)
    code = getattr(function, "__code__", None)
    if function is None or code is None or code.co_name != _PATCHED:
        return None
    return dict(inspect.getclosurevars(function).nonlocals)


def count_tokens_once(trainer: Any, times: int) -> None:
    """Wrap a GRPOTrainer's generation, which sums tokens over all processes, so that shared tokens count once.

    Versions: TRL 1.16. When gone: an AttributeError when the trainer is made.

    Args:
        trainer: the trainer.
        times: ranks that generate the same tokens.
    """
    generate = trainer._generate

    def counted(prompts: list[Any]) -> Any:
        before = trainer.state.num_input_tokens_seen
        generated = generate(prompts)
        seen = before + (trainer.state.num_input_tokens_seen - before) // times
        trainer.state.num_input_tokens_seen = seen
        trainer._metrics["train" if trainer.model.training else "eval"]["num_tokens"] = [seen]
        return generated

    trainer._generate = counted
