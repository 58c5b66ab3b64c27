"""The job of `longspan verify`: open the inputs, start the ranks, compare, print."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from longspan.hf.model.pretrained import check_names
from longspan.ranks import launch
from longspan.ranks.facts import settings
from longspan.verify.config import VerifyConfig

if TYPE_CHECKING:
    from longspan.ranks.watch import Watch
    from longspan.verify.report import Report


def run(config: VerifyConfig) -> int:
    """Verify on ranks started here or by torchrun, print the report, and return the exit code, on every rank."""
    from longspan.verify.report import print_json, print_table

    report: Report = launch.run(config, open_inputs, _compare)
    if launch.is_first_rank():
        print_json(report) if config.json else print_table(report)
    return report.exit_code


def worker(config: VerifyConfig) -> Report:
    """Verify on this rank; every rank of the job calls it and returns the same report."""
    config.check()
    report: Report = launch.run_rank(config, open_inputs, _compare)
    return report


def open_inputs(config: VerifyConfig) -> Any:
    """Return the model and the batch to verify, checked; weights are not loaded."""
    check_names(config.model, config.text, config.tokenizer)
    from longspan.verify import diffusion, inputs

    is_diffusion = diffusion.config_file(config) is not None
    return diffusion.open_transformer(config) if is_diffusion else inputs.open_inputs(config)


def _compare(opened: Callable[[], Any], watch: Watch) -> Report:
    from longspan.comm.agree import open_together
    from longspan.verify import diffusion, runs

    inputs = open_together(opened, lambda inputs: {**settings(inputs.config), **inputs.facts})
    with launch.stdout_to_stderr():  # stdout is for the report
        return diffusion.compare(inputs) if isinstance(inputs, diffusion.Transformer) else runs.compare(inputs)
