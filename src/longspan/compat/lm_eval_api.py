"""lm-evaluation-harness's private names."""

from __future__ import annotations

from typing import Any

from longspan.core.errors import LongspanError, require


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
