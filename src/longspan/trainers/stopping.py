"""A job that is told to stop: all ranks save and stop after the same step."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from transformers import Trainer, TrainerCallback


def stop_together(trainer: Trainer) -> None:
    """Have SIGTERM, which reaches the ranks at different moments, save and stop all of them after the same step.

    Args:
        trainer: made with `enable_jit_checkpoint=True`, whose callback would save on each rank by itself.
    """
    jit = next(c for c in trainer.callback_handler.callbacks if hasattr(c, "jit_manager"))
    trainer.add_callback(StopTogether(jit))


class StopTogether(TrainerCallback):  # type: ignore[misc]
    """Asks all ranks after each step whether any has been told to stop.

    Args:
        jit: transformers' `JITCheckpointCallback`; it keeps its handler of the signal, and does nothing else any more.
    """

    def __init__(self, jit: Any) -> None:
        self.jit, self.manager = jit, jit.jit_manager
        jit.jit_manager = None

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Collective."""
        asked = torch.tensor(float(self.manager.is_checkpoint_requested), device=args.device)
        dist.all_reduce(asked, op=dist.ReduceOp.MAX)
        if asked:
            control.should_save = control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Put the handler back that was there before."""
        self.jit.jit_manager = self.manager
        self.jit.on_train_end(args, state, control)
