"""The job as a whole: check everything once, start the ranks, train."""

from __future__ import annotations

from longspan import launch
from longspan.checked import check_processes
from longspan.train.config import TrainConfig


def run(config: TrainConfig) -> int:
    """Train, on ranks that are started here or by torchrun.

    Returns:
        The exit code 0.

    Raises:
        LongspanError: on bad input; nearly always before any rank is started.
        longspan.launch.RankFailed: if a rank died.
        longspan.launch.Stopped: if a signal ended the run early, after a checkpoint was saved.
    """
    config.check()
    launch.check_nproc(config.ranks, config.nproc, config.mesh)
    if not launch.under_torchrun():
        check_processes(config.ranks, config.mesh)
    from longspan.train.inputs import check_inputs

    check_inputs(config)
    launch.launch(_train_rank, config, nproc=config.ranks)
    return 0


def _train_rank(config: TrainConfig) -> None:
    from transformers.utils.logging import disable_progress_bar

    from longspan.train.loop import Trainer

    disable_progress_bar()  # one per rank for every file that is read or written
    Trainer(config).run()
