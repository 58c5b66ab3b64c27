"""A cluster on one machine: run a command on N hosts x R ranks, fast within a host, with slow links between hosts.

    python -m benchmarks.cluster --hosts 2 --ranks-per-host 2 --mbit 200 -- python -m benchmarks.methods step
    python -m benchmarks.cluster --check     # whether links have their rate

Ranks of one machine communicate over loopback at gigabytes per second, where saved or hidden bytes make no difference.
Here each host is a network namespace with one interface, and another namespace contains the bridge that joins them. A
token bucket (`tc tbf`) at each end of each link limits both directions, so several senders to one host share its link,
as on a real switch. Ranks of one host share its link and communicate over its loopback.

Needs root, Linux and iproute2. The machine's own network does not change. The command runs once per rank with
torchrun's variables, so longspan's commands and `torch.distributed` join as under torchrun. Output of rank 0 is printed
live; of other ranks the end, if they fail. The exit code is that of the first failed rank, 124 after the timeout, 2 if
the machine cannot build hosts. Namespaces and processes are always removed, by a watcher if this process is killed.

    from benchmarks import cluster
    with cluster.hosts(4, rate="1gbit") as net:
        answer = cluster.run_on(net, some_function, tokens=4096)
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PREFIX = "longspan"
INTERFACE = "eth0"  # of every host
PORT = 29500
TIMED_OUT = 124
CHECK_BYTES = 64 << 20

FRAME, PAYLOAD = 1514, 1448
"""Bytes of a full Ethernet frame as the kernel counts them, and of TCP's data in it (MTU 1500)."""

BURST = 128 << 10
"""Bytes that may be sent at once: at least one segment of 64 KiB, or the kernel must split it."""

QUEUE = 16 << 20
"""Bytes that the bridge holds before it drops any: TCP's windows of several senders to one host fit."""

UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


class CannotBuild(RuntimeError):
    """This machine cannot build hosts; the message says what is missing."""


class RankFailed(RuntimeError):
    """A rank failed, or the time is over."""


@dataclass(frozen=True)
class Hosts:
    """Running hosts; host r has the address 10.0.0.(r + 1).

    Attributes:
        names: their network namespaces, in rank order.
        bridge: the namespace of the bridge.
        rate: of every link and direction, as `tc` writes it; None: unlimited.
        ranks_per_host: ranks that share a host.
    """

    names: tuple[str, ...]
    bridge: str
    rate: str | None
    ranks_per_host: int = 1

    @property
    def ranks(self) -> int:
        """Ranks of all hosts; rank r is on host r // ranks_per_host."""
        return len(self.names) * self.ranks_per_host

    @property
    def bytes_per_second(self) -> float:
        """TCP's data per second over one link, one direction: the rate without the headers of full frames."""
        return float("inf") if self.rate is None else bits_per_second(self.rate) / 8 * PAYLOAD / FRAME


def bits_per_second(rate: str) -> float:
    """Parse "1gbit", "250mbit" or "64kbit"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate)
    if match is None or float(match[1]) == 0:
        raise ValueError(f"rate {rate!r}: write a number above 0 and kbit, mbit or gbit, such as 1gbit")
    return float(match[1]) * UNITS[match[2]]


# --- hosts


def check_machine(delay: str | None = None, rate: str | None = "1gbit") -> None:
    """Raise `CannotBuild` unless this process can build hosts with links of this rate and delay."""
    if not sys.platform.startswith("linux"):
        raise CannotBuild(f"slow links need Linux's network namespaces; this is {sys.platform}")
    tools = ("ip",) if rate is None and delay is None else ("ip", "tc")
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing:
        raise CannotBuild(f"not found: {', '.join(missing)}; install iproute2 (apt-get install iproute2)")
    if os.geteuid() != 0:
        raise CannotBuild("network namespaces need root; run as root (sudo -E env PATH=$PATH python ...)")
    name = f"{PREFIX}-{os.getpid()}-try"
    try:
        _ip("netns", "add", name)
        if rate is not None:
            _tc(name, "lo", "root", *_bucket("1gbit"))
        if delay is not None:
            _tc(name, "lo", "root", "netem", "delay", delay)
    finally:
        _delete([name])


@contextlib.contextmanager
def hosts(n: int, rate: str | None = "1gbit", delay: str | None = None, ranks_per_host: int = 1) -> Iterator[Hosts]:
    """Build `n` hosts (at most 250) for the duration of the context.

    Args:
        n: number of hosts.
        rate: of each link and direction, such as "1gbit"; None: as fast as the kernel copies.
        delay: added to each frame, such as "1ms" (needs the kernel's netem).
        ranks_per_host: ranks that share a host.

    Raises:
        CannotBuild: without Linux, root, `ip` and `tc`, or a kernel that has them.
        ValueError: for a bad rate or number.
    """
    if not 1 <= n <= 250:
        raise ValueError(f"{n} hosts: 1 to 250 are possible")
    most = max(64, 4 * (os.cpu_count() or 1))
    if not 1 <= n * ranks_per_host <= most:
        raise ValueError(f"{n} hosts x {ranks_per_host} ranks: 1 to {most} processes are possible on this machine")
    if rate is not None:
        bits_per_second(rate)
    check_machine(delay, rate)
    _delete(_stale())
    stem = f"{PREFIX}-{os.getpid()}-{time.monotonic_ns() % 10**6}"
    bridge, names = f"{stem}-bridge", tuple(f"{stem}-{rank}" for rank in range(n))
    watcher = _start_watcher([*names, bridge])
    try:
        for name in (bridge, *names):
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", bridge, "link", "add", "bridge", "type", "bridge")
        _ip("-n", bridge, "link", "set", "bridge", "up")
        for rank, name in enumerate(names):
            _connect(name, f"10.0.0.{rank + 1}/24", bridge, f"port{rank}", rate, delay)
        yield Hosts(names, bridge, rate, ranks_per_host)
    finally:
        _delete([*names, bridge])
        watcher.communicate()  # its input ends, and it finds nothing to remove


def _start_watcher(names: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a process that removes the namespaces when its input ends, as it does when this process dies."""
    code = "import sys\nsys.stdin.read()\nfrom benchmarks import cluster\ncluster._delete(sys.argv[1:])"
    return subprocess.Popen(
        [sys.executable, "-c", code, *names],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=ROOT,
        start_new_session=True,  # a signal to this process's group does not reach it
    )


def _connect(name: str, address: str, bridge: str, port: str, rate: str | None, delay: str | None) -> None:
    """Connect a host to a port of the bridge, limited at both ends."""
    _ip("-n", bridge, "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", name)
    _ip("-n", bridge, "link", "set", port, "master", "bridge", "up")
    _ip("-n", name, "addr", "add", address, "dev", INTERFACE)
    _ip("-n", name, "link", "set", INTERFACE, "up")
    if rate is not None:
        _limit(name, bridge, port, rate)
    if delay is not None:
        parent = ["root"] if rate is None else ["parent", "1:1"]
        _tc(bridge, port, *parent, "netem", "delay", delay, "limit", "100000")


def set_rate(net: Hosts, rate: str) -> None:
    """Change the rate of all links while ranks run; a rank may do it. Not for links with a delay or without a rate."""
    bits_per_second(rate)
    for rank, name in enumerate(net.names):
        _limit(name, net.bridge, f"port{rank}", rate)


def cut(net: Hosts, rank: int, *, noticed: bool = False) -> None:
    """Disconnect a host until `mend`: frames vanish, or (`noticed`) its link goes down."""
    state = ["down"] if noticed else ["nomaster"]
    _ip("-n", net.bridge, "link", "set", f"port{rank}", *state)


def mend(net: Hosts, rank: int) -> None:
    """Reconnect a host after `cut`."""
    _ip("-n", net.bridge, "link", "set", f"port{rank}", "master", "bridge", "up")


def _limit(name: str, bridge: str, port: str, rate: str) -> None:
    _tc(name, INTERFACE, "root", *_bucket(rate))
    _tc(bridge, port, "root", "handle", "1:", *_bucket(rate))


def _bucket(rate: str) -> list[str]:
    return ["tbf", "rate", rate, "burst", str(BURST), "limit", str(QUEUE)]


def _ip(*args: str) -> None:
    _command("ip", *args)


def _tc(namespace: str, interface: str, *args: str) -> None:
    _command("tc", "-n", namespace, "qdisc", "replace", "dev", interface, *args)


def _command(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        why = done.stderr.strip() or f"exit code {done.returncode}"
        hint = " (the kernel lacks this: a rate needs CONFIG_NET_SCH_TBF, a delay CONFIG_NET_SCH_NETEM)"
        raise CannotBuild(f"`{' '.join(command)}`: {why}{hint if command[0] == 'tc' else ''}")


def _delete(names: Sequence[str]) -> None:
    """Remove those of the namespaces that exist, with their processes, interfaces and limits."""
    for name in names:
        inside = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout
        for pid in inside.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _stale() -> list[str]:
    """Return the namespaces of processes that have ended."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    found = [(m[0], m[1]) for m in re.finditer(rf"^{PREFIX}-(\d+)-\S+", listed, re.MULTILINE)]
    return [name for name, pid in found if not Path(f"/proc/{pid}").exists()]


# --- ranks


@contextlib.contextmanager
def started(
    net: Hosts, words: Sequence[str], folder: Path, *, cores: Sequence[int] = (), env: dict[str, str] | None = None
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start a command on every rank, in the repository's root; kill the processes at the end of the context.

    They have torchrun's variables and GLOO_SOCKET_IFNAME. Rank r writes FOLDER/r.out and FOLDER/r.err.

    Args:
        net: from `hosts`.
        words: the command.
        folder: for the output.
        cores: the CPU core of each rank, in rank order, repeated if there are fewer; by default any.
        env: more variables.
    """
    common = {
        "WORLD_SIZE": str(net.ranks), "LOCAL_WORLD_SIZE": str(net.ranks_per_host), "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": str(PORT), "GLOO_SOCKET_IFNAME": INTERFACE,
    }  # fmt: skip
    base = {"OMP_NUM_THREADS": "1", **os.environ, **(env or {}), **common}
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(net.ranks):
            host, local = divmod(rank, net.ranks_per_host)
            pinned = ["taskset", "-c", str(cores[rank % len(cores)])] if cores else []
            with (folder / f"{rank}.out").open("wb") as out, (folder / f"{rank}.err").open("wb") as err:
                ranks.append(
                    subprocess.Popen(
                        [*pinned, "ip", "netns", "exec", net.names[host], *words],
                        env={**base, "RANK": str(rank), "LOCAL_RANK": str(local)},
                        cwd=ROOT,
                        stdout=out,
                        stderr=err,
                        start_new_session=True,
                    )
                )
        yield ranks
    finally:
        for process in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also a rank's children
            process.wait()


def _wait(
    ranks: Sequence[subprocess.Popen[bytes]], timeout: float, others_s: float, poll: Callable[[], None]
) -> list[int | None]:
    """Wait for all ranks, or `others_s` seconds after one failed, or until the timeout; return the exit codes."""
    deadline, failed = time.monotonic() + timeout, False
    while None in (codes := [process.poll() for process in ranks]) and time.monotonic() < deadline:
        if any(codes) and not failed:  # give the others time to report why they fail
            failed, deadline = True, min(deadline, time.monotonic() + others_s)
        poll()
        time.sleep(0.05)
    return codes


def run(net: Hosts, words: Sequence[str], timeout: float, env: dict[str, str] | None = None) -> int:
    """Run a command on every rank, print rank 0's output live, and return the exit code."""
    with tempfile.TemporaryDirectory() as temporary:
        folder, printed = Path(temporary), {"out": 0, "err": 0}

        def forward_output() -> None:
            for name, stream in (("out", sys.stdout), ("err", sys.stderr)):
                with (folder / f"0.{name}").open("rb") as file:
                    file.seek(printed[name])
                    text = file.read()
                    printed[name] += len(text)
                stream.write(text.decode(errors="replace"))
                stream.flush()

        with started(net, words, folder, env=env) as ranks:
            codes = _wait(ranks, timeout, 35, forward_output)
            forward_output()
        failed = [(code, rank) for rank, code in enumerate(codes) if code]
        for _, rank in [pair for pair in failed if pair[1]][:3]:
            print(_tail(folder / f"{rank}.err"), file=sys.stderr)
        if failed:
            code = failed[0][0]
            return code if code > 0 else 128 - code
        if None in codes:
            waiting = [rank for rank, code in enumerate(codes) if code is None]
            print(f"time is up after {timeout:g} s; still running: ranks {waiting}", file=sys.stderr)
            return TIMED_OUT
        return 0


def run_on(
    net: Hosts, body: Callable[..., Any], *, timeout: float = 600.0, cores: Sequence[int] = (),
    env: dict[str, str] | None = None, **arguments: Any,
) -> Any:  # fmt: skip
    """Run a top-level function of a script on every rank, joined by gloo; return rank 0's value, which is JSON.

    `arguments` of the function are JSON, too; the others are those of `started`.

    Raises:
        RankFailed: if a rank fails, or the time is over; with the ends of their output.
    """
    script = str(Path(body.__code__.co_filename).resolve())
    words = [sys.executable, "-m", "benchmarks.cluster", "--as-rank", script, body.__name__, json.dumps(arguments)]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with started(net, words, folder, cores=cores, env=env) as ranks:
            _wait(ranks, timeout, 2, lambda: None)
        codes = [process.returncode for process in ranks]
        if any(codes):
            tails = [_tail(folder / f"{rank}.err") for rank in range(net.ranks)]
            raise RankFailed("\n".join([f"exit codes by rank: {codes}", *tails]))
        return json.loads((folder / "0.out").read_text().strip().splitlines()[-1])


def _tail(path: Path) -> str:
    return "\n".join([f"--- rank {path.stem}", *path.read_text(errors="replace").splitlines()[-15:]])


def _as_rank(script: str, name: str, arguments: str) -> None:
    """On a rank of `run_on`: join the others by gloo, run the function, and print rank 0's value as JSON."""
    import torch
    import torch.distributed as dist

    sys.path.insert(0, str(Path(script).parent))
    body = runpy.run_path(script)[name]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    value = body(**json.loads(arguments))
    if dist.get_rank() == 0:
        print(json.dumps(value))
    dist.barrier()
    dist.destroy_process_group()


def exit_on_missing(main: Callable[[], None]) -> None:
    """Run a benchmark's `main`; exit with 2 and the reason if the machine cannot build hosts."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception, so that namespaces are removed
    try:
        main()
    except CannotBuild as error:
        print(f"slow links cannot be built here: {error}", file=sys.stderr)
        sys.exit(2)
    except RankFailed as error:
        print(error, file=sys.stderr)
        sys.exit(1)


# --- the check of the rate


def check(rate: str) -> bool:
    """Send 64 MiB one way, both ways, and from two hosts to one; return whether times are within 10 % of the rate's."""
    with hosts(3, rate=rate) as net:
        limit_s = 60 + 20 * 8 * CHECK_BYTES / bits_per_second(rate)
        measured = run_on(net, measure_patterns, timeout=limit_s)
        alone = CHECK_BYTES / net.bytes_per_second
    predicted = {"one to another": alone, "both ways concurrently": alone, "two to one": 2 * alone}
    good = True
    for name, seconds in predicted.items():
        good &= abs(measured[name] / seconds - 1) < 0.1
        print(f"{rate}, {CHECK_BYTES >> 20} MiB, {name:22}: predicted {seconds:.3f} s, measured {measured[name]:.3f} s")
    print("links have their rate" if good else "links do NOT have their rate (more than 10 % off)")
    return good


def measure_patterns() -> dict[str, float]:
    """Return the shortest of three times of each pattern."""
    import torch
    import torch.distributed as dist

    rank = dist.get_rank()
    x, *buffers = (torch.ones(CHECK_BYTES, dtype=torch.uint8) for _ in range(3))
    patterns = {"one to another": [(1, 0)], "both ways concurrently": [(1, 0), (0, 1)], "two to one": [(1, 0), (2, 0)]}
    seconds = {}
    for name, pairs in patterns.items():
        times = []
        for _ in range(3):
            dist.barrier()
            start = time.perf_counter()
            # Receives first: if two gloo ranks both post their sends first, the transfers run one after the other.
            sources = [source for source, to in pairs if to == rank]
            works = [dist.irecv(buffers[i], source) for i, source in enumerate(sources)]
            works += [dist.isend(x, to) for source, to in pairs if source == rank]
            for work in works:
                assert work is not None
                work.wait()
            dist.barrier()
            times.append(time.perf_counter() - start)
        seconds[name] = min(times)
    return seconds


# --- the command


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
        prog="python -m benchmarks.cluster", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=2, help="network namespaces, each with one link to a switch")
    parser.add_argument("--ranks-per-host", type=int, default=2, help="ranks that share a host")
    parser.add_argument("--mbit", type=float, default=200.0, help="rate of each link and direction; 0: not limited")
    parser.add_argument("--delay", help="added one way to every frame between hosts, such as 1ms")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds")
    parser.add_argument("--check", action="store_true", help="measure the rate; exit 1 if it is off by more than 10 %%")
    parser.add_argument("--as-rank", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("command", nargs="*", help="the command, after --")
    args = parser.parse_args()
    if args.mbit < 0 or args.hosts < 1 or args.ranks_per_host < 1 or args.timeout <= 0:
        parser.error("--hosts, --ranks-per-host and --timeout must be above 0, --mbit at least 0")
    if args.as_rank:
        _as_rank(*args.as_rank)
        return 0
    if not args.command and not (args.check and args.mbit):
        parser.error("give a command after --, or --check and a rate")
    rate = f"{args.mbit:g}mbit" if args.mbit else None
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception, so that hosts are removed
    try:
        if args.check:
            return int(not check(str(rate)))
        words = words_of(args.command)
        with hosts(args.hosts, rate, args.delay, args.ranks_per_host) as net:
            return run(net, words, args.timeout)
    except (CannotBuild, ValueError, FileNotFoundError) as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
