"""Private names of TRL and lm-evaluation-harness. TRL is not imported: this inspects what it has made."""

from __future__ import annotations

import inspect
from typing import Any

from longspan.core.errors import LongspanError, require

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


def harness_command_line() -> Any:
    """Return the class of the harness's command line, which every rank runs after it has registered longspan's model.

    Versions: lm-eval 0.4.13. Public way: the command `lm_eval`, which knows no models of other packages. When gone, or
    not installed: LongspanError.
    """
    require("lm-evaluation-harness", "lm_eval")
    try:
        from lm_eval._cli import HarnessCLI
    except ImportError as error:
        raise LongspanError(f"lm-eval cannot be imported: {error}; pip install 'lm-eval==0.4.13'") from error
    return HarnessCLI
