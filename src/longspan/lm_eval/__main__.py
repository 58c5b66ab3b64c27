"""The harness's command line on as many ranks as `--model_args` name.

python -m longspan.lm_eval run --model longspan --model_args pretrained=NAME,ring=2,ulysses=2 --tasks ...

It starts its ranks, or joins those of torchrun or srun. Commands other than `run` use one process.
"""

from __future__ import annotations

import sys
from typing import Any

from longspan.cli import exit_code
from longspan.compat.friends_api import harness_command_line
from longspan.core.errors import LongspanError
from longspan.core.parallel import ParallelConfig
from longspan.ranks import launch


def main(argv: list[str] | None = None) -> int:
    """Run the harness and return its exit code."""
    given = sys.argv[1:] if argv is None else argv
    return exit_code(lambda: int(launch.launch(_rank, given, nproc=_ranks(given)) or 0))


def _parse(argv: list[str]) -> tuple[Any, Any]:
    """Return the harness's command line and the parsed arguments."""
    cli = harness_command_line()()
    sys.argv = ["lm_eval", *argv]
    return cli, cli.parse_args()


def _ranks(argv: list[str]) -> int:
    """Return the ranks of the model's mesh."""
    _, args = _parse(argv)
    if args.command != "run":
        return 1
    from lm_eval.config.evaluate_config import EvaluatorConfig

    config = EvaluatorConfig.from_cli(args)
    if config.model != "longspan":
        raise LongspanError(f"--model {config.model}: give --model longspan, or call lm_eval itself for other models")
    return ParallelConfig(**{axis: config.model_args.get(axis, 1) for axis in ("ring", "ulysses", "tensor")}).ranks


def _rank(argv: list[str]) -> int:
    from longspan.lm_eval.model import end, follow  # registers the model

    with launch.joined() as watch:
        if watch.rank != 0:
            follow()
            return 0
        code = 0
        try:
            cli, args = _parse(argv)
            cli.execute(args)
        except SystemExit as stop:  # the harness exits between two calls of the model
            code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        end()
        return code


if __name__ == "__main__":
    from longspan.lm_eval import __main__  # by its name, as spawned ranks do not import a package's `__main__`

    sys.exit(__main__.main())
