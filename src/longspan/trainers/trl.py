"""What TRL's trainers do to a model, undone: a parallelized model gives by itself what they need.

TRL replaces a model's forward by one with a "fused" head, which projects hidden states by the head's weight. Of a cut
sequence that would be one rank's tokens, with the labels of all. `longspan.hf.scored` answers the same call.

Versions: TRL 1.16. When gone: the trainer's own forward stays, and the first step ends in its error.
"""

from __future__ import annotations

from typing import Any

from longspan.hf.support import transformers_model

_PATCHED = "_fused_forward"


def take_back_fused_head(model: Any) -> None:
    """Give a model its own forward back, if TRL has replaced it."""
    inner: Any = transformers_model(model)
    patched = vars(inner).get("forward")
    code = getattr(getattr(patched, "__func__", patched), "__code__", None)
    if code is not None and code.co_name == _PATCHED:
        del inner.forward
