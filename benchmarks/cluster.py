"""A cluster on one machine: run a command on N hosts x R ranks, fast within a host, with slow links between hosts.

    python -m benchmarks.cluster --hosts 2 --ranks-per-host 2 --mbit 200 -- python -m longspan bench step --quick

Needs root, Linux and iproute2 (`benchmarks/slow_link.py` builds the hosts). The command runs once per rank with
torchrun's variables, so longspan's commands and `torch.distributed` join as under torchrun. Output of rank 0 is printed
live; of other ranks the end, if they fail. The exit code is that of the first failed rank, 124 after the timeout, 2 if
the machine cannot build hosts. Namespaces and processes are always removed.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import slow_link

TIME_IS_UP = 124


def run(net: slow_link.Hosts, words: Sequence[str], timeout: float, env: dict[str, str] | None = None) -> int:
    """Run a command on every rank of the hosts, print rank 0's output, and return the exit code."""
    with tempfile.TemporaryDirectory() as temporary:
        folder, shown = Path(temporary), {"out": 0, "err": 0}

        def show() -> None:
            for name, stream in (("out", sys.stdout), ("err", sys.stderr)):
                with (folder / f"0.{name}").open("rb") as file:
                    file.seek(shown[name])
                    text = file.read()
                    shown[name] += len(text)
                stream.write(text.decode(errors="replace"))
                stream.flush()

        with slow_link.started(net, words, folder, env=env) as ranks:
            deadline, failed = time.monotonic() + timeout, False
            while None in (codes := [process.poll() for process in ranks]) and time.monotonic() < deadline:
                if any(codes) and not failed:  # give the others time to report why they fail
                    failed, deadline = True, min(deadline, time.monotonic() + 35)
                show()
                time.sleep(0.1)
            codes = [process.poll() for process in ranks]
            show()
        wrong = [(code, rank) for rank, code in enumerate(codes) if code]
        for _, rank in [pair for pair in wrong if pair[1]][:3]:
            print(slow_link.tail(folder / f"{rank}.err"), file=sys.stderr)
        if wrong:
            return wrong[0][0] if wrong[0][0] > 0 else 128 - wrong[0][0]
        if None in codes:
            waiting = [rank for rank, code in enumerate(codes) if code is None]
            print(f"time is up after {timeout:g} s; still running: ranks {waiting}", file=sys.stderr)
            return TIME_IS_UP
        return 0


def words_of(command: Sequence[str]) -> list[str]:
    """Return the command with the path of its program; "python" is this interpreter.

    Raises:
        FileNotFoundError: if there is no such program.
    """
    program = sys.executable if command[0] in ("python", "python3") else shutil.which(command[0])
    if program is None:
        raise FileNotFoundError(f"there is no program {command[0]!r}; name one that is in PATH, or python")
    return [program, *command[1:]]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cluster",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--hosts", type=int, default=2, help="network namespaces, each with one link to a switch")
    parser.add_argument("--ranks-per-host", type=int, default=2, help="ranks that share a host")
    parser.add_argument("--mbit", type=float, default=200.0, help="rate of each link and direction; 0: not limited")
    parser.add_argument("--delay", help="added one way to every frame between hosts, such as 1ms")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds")
    parser.add_argument("command", nargs="+", help="the command, after --")
    args = parser.parse_args()
    if args.mbit < 0 or args.hosts < 1 or args.ranks_per_host < 1 or args.timeout <= 0:
        parser.error("--hosts, --ranks-per-host and --timeout must be above 0, --mbit at least 0")
    # Raise an exception, so that hosts are removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        words = words_of(args.command)
        rate = f"{args.mbit:g}mbit" if args.mbit else None
        with slow_link.hosts(args.hosts, rate, args.delay, args.ranks_per_host) as net:
            return run(net, words, args.timeout)
    except (slow_link.CannotBuild, ValueError, FileNotFoundError) as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
