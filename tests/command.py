"""Jobs that start ranks, without importing torch again in every process.

The launcher is a process of its own, forked from the server of the pools, and its ranks are forks of it: real processes
with real signals and exit codes. Only their imports are shared. For what depends on a new Python (warnings of imports)
tests start the real command.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from longspan.ranks import launch
from tests.pool import THREADS, fork_server, run_forked


def _fork_ranks() -> None:
    launch.START_METHOD = "fork"
    os.environ["OMP_NUM_THREADS"] = THREADS  # the test that started the server may have removed it


def launch_forked(entry: Callable[..., Any], *args: Any, nproc: int) -> Any:
    """Return the result, or raise the error, of `longspan.ranks.launch.launch` in a forked launcher."""
    result, error = run_forked(_launch, entry, args, nproc)
    if error is not None:
        raise error
    return result


def _launch(entry: Callable[..., Any], args: tuple[Any, ...], nproc: int) -> tuple[Any, Exception | None]:
    _fork_ranks()
    try:
        return launch.launch(entry, *args, nproc=nproc), None
    except Exception as error:
        return None, error


class ForkedLauncher:
    """A process that runs `fn(*args)`, which may start ranks; to be used like a `subprocess.Popen` of text."""

    def __init__(self, folder: Path, fn: Callable[..., Any], *args: Any) -> None:
        self._files = folder / "stdout", folder / "stderr"
        self._process = fork_server().Process(target=_redirected, args=(*map(str, self._files), fn, *args))
        self._process.start()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, signum: int) -> None:
        os.kill(self.pid, signum)

    def interrupt(self) -> None:
        """Send SIGINT to the launcher and all ranks, as a terminal does."""
        os.killpg(self.pid, signal.SIGINT)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the end; return stdout and stderr."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("a forked launcher", timeout or 0)
        stdout, stderr = (file.read_text() for file in self._files)
        return stdout, stderr

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


def _redirected(stdout: str, stderr: str, fn: Callable[..., Any], *args: Any) -> None:
    os.setsid()
    for fd, name in ((1, stdout), (2, stderr)):
        with open(name, "w") as file:
            os.dup2(file.fileno(), fd)
    _fork_ranks()
    sys.exit(fn(*args))
