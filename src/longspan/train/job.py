"""The job of `longspan train`: check the config, start the ranks, train, and restart them if asked to."""

from __future__ import annotations

import sys

from longspan.core.errors import LongspanError
from longspan.core.sections import replace
from longspan.core.validation import check_processes
from longspan.hf.pretrained import check_names
from longspan.ranks import agreement, launch
from longspan.train.config import TrainConfig


def run(config: TrainConfig) -> int:
    """Train on ranks started here or by torchrun; with `dry_run` print what would be done.

    Returns:
        The exit code 0.

    Raises:
        LongspanError: on bad input; nearly always before any rank starts.
        longspan.ranks.launch.RankFailed: if a rank died, was lost or ended early, more often than `max_restarts`.
        longspan.ranks.launch.Stopped: if a signal ended the run early, after a checkpoint was saved.
    """
    config.check()
    under_torchrun = launch.under_torchrun()
    if not under_torchrun:  # before slow imports
        check_names(config.model.model, config.model.config, config.data.data, config.model.tokenizer)
    launch.check_nproc(config.parallel.ranks, config.nproc, config.parallel.flags)
    if config.max_restarts and (config.parallel.ranks == 1 or under_torchrun):
        raise LongspanError(
            f"--max-restarts {config.max_restarts} restarts ranks that this command starts, and it starts none; give "
            "torchrun's --max-restarts, or leave it out on one rank"
        )
    if config.dry_run:
        from longspan.train.summary import dry_run

        lines = dry_run(_resolved(config))
        if launch.is_first_rank():
            print(*lines, sep="\n", flush=True)
        return 0
    if not under_torchrun:  # under torchrun, the ranks check after the rendezvous: checks may be slow
        check_processes(config.parallel.ranks, config.parallel.flags)
        from longspan.train.inputs import check_inputs, finished

        config = _resolved(config)
        nothing_to_do = finished(config, check_inputs(config))
        if nothing_to_do is not None:
            print(nothing_to_do, flush=True)
            return 0
    try:
        _train(config)
    except launch.Stopped as stop:
        if stop.not_saved:
            print(f"longspan: {stop.not_saved}", file=sys.stderr)
        raise
    return 0


def _resolved(config: TrainConfig) -> TrainConfig:
    """Resolve --context max and --memory auto by the planner; the first rank prints the choice."""
    from longspan.train.memory_choice import resolve

    config, messages = resolve(config)
    config.check()
    if messages and launch.is_first_rank():
        print(*messages, sep="\n", flush=True)
    return config


def _train(config: TrainConfig) -> None:
    for restart in range(config.max_restarts + 1):
        try:
            launch.launch(_train_rank, config, nproc=config.parallel.ranks, grace_s=config.grace)
            return
        except launch.RankFailed as error:
            if restart == config.max_restarts:
                raise
            text = f"longspan: {error}; restart {restart + 1} of {config.max_restarts}"
            print(text, file=sys.stderr, flush=True)
            config = replace(config, resume="auto")


def _train_rank(config: TrainConfig) -> None:
    with launch.joined(config.timeout, config.start_timeout) as heartbeat:
        from transformers.utils.logging import disable_progress_bar

        from longspan.train.inputs import check_inputs
        from longspan.train.loop import Trainer

        if launch.started_elsewhere():
            with agreement.refusing_together(heartbeat.peers, alive=True):
                config = _resolved(config)
                check_inputs(config)
        disable_progress_bar()  # it would show one per rank and file
        Trainer(config, heartbeat).run()
