"""Run pytest several times at once, in forks of one process that has imported the libraries.

    python -m tests.lanes "-m ranks --part 1/2" "-m ranks --part 2/2" "-m 'not ranks'"     # `make test`

Each fork forks the server of its pools (`tests/pool.py`) before it runs a test, so the imports, 7 s, are made once
instead of five times.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import shlex
import sys
import traceback
from collections.abc import Sequence
from multiprocessing import forkserver, resource_tracker, util
from typing import Any
from unittest import mock


def main(lanes: Sequence[str]) -> int:
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}  # as conftest.py, before the imports
    import torch

    if not torch.cuda.is_available():  # some libraries initialise CUDA, which a fork cannot use
        _import()
    sys.stdout.flush()
    forks = [fork for lane in lanes if (fork := os.fork()) or _run(lane)]
    return max(os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]) != 0 for fork in forks)


def _import() -> None:
    from tests.pool import PRELOAD

    for name in ("hypothesis", *PRELOAD):  # the last one leaves what is imported out of garbage collection
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def _run(lane: str) -> None:
    """Run pytest with the arguments of a lane; never return."""
    code: Any = 1
    try:
        from tests.pool import fork_server

        fork_server()
        resource_tracker.ensure_running()
        with mock.patch.object(util, "spawnv_passfds", _fork_server_process):
            forkserver.ensure_running()
        import pytest

        imported = ["-W", "ignore:Module already imported"]  # such as anyio, before its plugin
        code = pytest.main(["--quiet", "-p", "no:cacheprovider", *imported, *shlex.split(lane)])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(code))


def _fork_server_process(executable: Any, args: list[str], fds: list[int]) -> int:
    """Fork what multiprocessing would start as `python -c CODE`, with the same files open."""
    fork = os.fork()
    if fork == 0:
        try:
            edges = [2, *sorted(fds), os.sysconf("SC_OPEN_MAX")]
            for low, high in itertools.pairwise(edges):
                os.closerange(low + 1, high)
            exec(args[-1], {})
        finally:
            os._exit(1)
    return fork


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
