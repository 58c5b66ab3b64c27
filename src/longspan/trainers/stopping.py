"""Stop all ranks after the same step, whichever of them a signal reaches."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from transformers import Trainer, TrainerCallback


class StopTogether(TrainerCallback):  # type: ignore[misc]
    """Saves and stops on all ranks after a step in which any rank received SIGTERM.

    Args:
        jit: transformers' `JITCheckpointCallback`. It keeps its signal handler, and no longer saves on its own.
    """

    def __init__(self, jit: Any) -> None:
        self.jit, self.manager = jit, jit.jit_manager
        jit.jit_manager = None

    @classmethod
    def replace_jit(cls, trainer: Trainer) -> None:
        """Take over from the callback of a trainer that was made with `enable_jit_checkpoint=True`."""
        trainer.add_callback(cls(next(c for c in trainer.callback_handler.callbacks if hasattr(c, "jit_manager"))))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Compare the ranks. Collective."""
        requested = torch.tensor(float(self.manager.is_checkpoint_requested), device=args.device)
        dist.all_reduce(requested, op=dist.ReduceOp.MAX)
        if requested:
            control.should_save = control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Restore the previous signal handler."""
        self.jit.jit_manager = self.manager
        self.jit.on_train_end(args, state, control)
