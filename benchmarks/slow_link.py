"""Slow networks on one machine: every rank on its own host, joined by links of a chosen rate.

    python -m benchmarks.slow_link --check                  # is the rate real?  (as root, on Linux)
    python -m benchmarks.slow_link --ranks 4 --rate 1gbit -- benchmarks/some_script.py --its-option

Ranks of one machine talk over loopback, at gigabytes a second, where no algorithm that saves bytes or hides them can
show anything. Here each rank lives in a network namespace with one interface; a further namespace holds the bridge that
joins them. A token bucket (`tc tbf`) at each end of every cable holds it to the rate in both directions: what a host
sends, and what the bridge sends to it, so that several senders to one host share its link, as on a real switch.

    from benchmarks import slow_link
    with slow_link.hosts(4, rate="1gbit") as net:
        answer = slow_link.run_on(net, "benchmarks/some_script.py", ["--as-rank"])

A host may have several ranks (`ranks_per_host`): they share its namespace and its link, and among themselves they talk
over its loopback, as fast as the kernel copies. `python -m benchmarks.cluster` runs any command on such hosts.

The machine's own network does not change. Namespaces have this process's id in their names; they and their processes
are removed when the block ends. If this process is killed, a watcher process removes them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
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

FRAME, PAYLOAD = 1514, 1448
"""Bytes of a full Ethernet frame as the kernel counts them against the rate, and of TCP's data in it (MTU 1500)."""

BURST = 128 << 10
"""Bytes that may leave at once. At least one segment of 64 KiB as TCP hands it down, or the kernel must cut it up."""

QUEUE = 16 << 20
"""Bytes that wait before the bridge drops: TCP's windows of several senders to one host fit in, so nothing is lost."""

UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


class CannotBuild(RuntimeError):
    """This machine cannot have slow links; the message says what is missing."""


class RankFailed(RuntimeError):
    """A rank ended with an error, or all took too long."""


@dataclass(frozen=True)
class Hosts:
    """Hosts that are up. Host r has the address 10.0.0.(r + 1).

    Attributes:
        names: their network namespaces, in rank order.
        bridge: the namespace of the bridge that joins them.
        rate: of every link and direction, as `tc` writes it; None: not limited.
        delay: one way, as `tc` writes it; None: none.
        ranks_per_host: ranks that share a host.
    """

    names: tuple[str, ...]
    bridge: str
    rate: str | None
    delay: str | None
    ranks_per_host: int = 1

    @property
    def ranks(self) -> int:
        """Of all hosts; rank r is on host r // ranks_per_host."""
        return len(self.names) * self.ranks_per_host

    @property
    def bytes_per_second(self) -> float:
        """TCP's data a second over one link, one direction: the rate less the headers of full frames."""
        return float("inf") if self.rate is None else bits_per_second(self.rate) / 8 * PAYLOAD / FRAME


def bits_per_second(rate: str) -> float:
    """ "1gbit", "250mbit", "64kbit" -> bits a second."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate)
    if match is None or float(match[1]) == 0:
        raise ValueError(f"rate {rate!r}: write a number above 0 and kbit, mbit or gbit, such as 1gbit")
    return float(match[1]) * UNITS[match[2]]


# --- building -------------------------------------------------------------------------------------


def check_machine(delay: str | None = None, rate: str | None = "1gbit") -> None:
    """Raise `CannotBuild` unless this process can build hosts, with links of a rate and a delay where given."""
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
    """`n` hosts (at most 250), each with one link of `rate` both ways, up within the block.

    Args:
        n: how many.
        rate: of each link, each direction, such as "1gbit"; None: as fast as the kernel copies.
        delay: added to each frame on its way, such as "1ms" (needs the kernel's netem).
        ranks_per_host: ranks that share a host, its link and its loopback.

    Raises:
        CannotBuild: without Linux, root, `ip` and `tc`, or what the kernel would need.
        ValueError: for a rate that is none, or a number of hosts out of range.
    """
    if not 1 <= n <= 250:
        raise ValueError(f"{n} hosts: 1 to 250 are possible")
    most = max(64, 4 * (os.cpu_count() or 1))
    if not 1 <= n * ranks_per_host <= most:
        raise ValueError(f"{n} hosts x {ranks_per_host} ranks: 1 to {most} processes are started on this machine")
    if rate is not None:
        bits_per_second(rate)
    check_machine(delay, rate)
    _delete(_stale())
    stem = f"{PREFIX}-{os.getpid()}-{time.monotonic_ns() % 10**6}"
    bridge, names = f"{stem}-bridge", tuple(f"{stem}-{rank}" for rank in range(n))
    reaper = _reaper([*names, bridge])
    try:
        for name in (bridge, *names):
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", bridge, "link", "add", "bridge", "type", "bridge")
        _ip("-n", bridge, "link", "set", "bridge", "up")
        for rank, name in enumerate(names):
            _plug_in(name, f"10.0.0.{rank + 1}/24", bridge, f"port{rank}", rate, delay)
        yield Hosts(names, bridge, rate, delay, ranks_per_host)
    finally:
        _delete([*names, bridge])
        reaper.communicate()  # it sees the end of its input, and finds nothing left


def _reaper(names: Sequence[str]) -> subprocess.Popen[bytes]:
    """A process that removes the namespaces as soon as this one has gone, whatever it died of.

    It waits for the end of a pipe of which this process alone has the other side, in a session of its own, so that no
    signal to this one's group reaches it.
    """
    code = "import sys\nsys.stdin.read()\nfrom benchmarks import slow_link\nslow_link._delete(sys.argv[1:])"
    return subprocess.Popen(
        [sys.executable, "-c", code, *names],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=ROOT,
        start_new_session=True,
    )


def _plug_in(name: str, address: str, bridge: str, port: str, rate: str | None, delay: str | None) -> None:
    """A cable from the host to a port of the bridge, limited at both of its ends."""
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
    """Give all links another rate while ranks run; a rank may do it. They were made with one, and without a delay."""
    bits_per_second(rate)
    for rank, name in enumerate(net.names):
        _limit(name, net.bridge, f"port{rank}", rate)


def cut(net: Hosts, rank: int, *, noticed: bool = False) -> None:
    """Take a host off the network until `mend`: frames vanish without a word, or (`noticed`) its link goes down."""
    state = ["down"] if noticed else ["nomaster"]
    _ip("-n", net.bridge, "link", "set", f"port{rank}", *state)


def mend(net: Hosts, rank: int) -> None:
    """Join a host that was cut off again."""
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
    """Remove those of the namespaces that exist, and what still runs in them; interfaces and limits go along."""
    for name in names:
        inside = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout
        for pid in inside.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _stale() -> list[str]:
    """Namespaces of processes that are gone."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    found = [(m[0], m[1]) for m in re.finditer(rf"^{PREFIX}-(\d+)-\S+", listed, re.MULTILINE)]
    return [name for name, pid in found if not Path(f"/proc/{pid}").exists()]


# --- running --------------------------------------------------------------------------------------


def run_on(
    net: Hosts,
    target: str,
    args: Sequence[str] = (),
    timeout: float = 600.0,
    *,
    cores: Sequence[int] | None = None,
    env: dict[str, str] | None = None,
) -> Any:
    """Run `python target args...` on every host, a rank each; return the JSON in the last line that rank 0 prints.

    Ranks find one another by torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT) and
    GLOO_SOCKET_IFNAME, so `dist.init_process_group("gloo")` does. They run in the repository's root.

    Args:
        net: from `hosts`.
        target: a script (a path that ends in .py) or a module, as for `python -m`.
        args: its arguments.
        timeout: seconds until all ranks are killed.
        cores: the CPU core of each rank, in rank order and from the start again if there are fewer; None: any.
        env: more variables for the ranks.

    Raises:
        RankFailed: if a rank fails (the others are killed), or time is up, or rank 0's last line is no JSON; with the
            ends of what the ranks wrote.
    """
    with tempfile.TemporaryDirectory() as folder:
        outs = [Path(folder, f"{rank}.out") for rank in range(net.ranks)]
        errs = [Path(folder, f"{rank}.err") for rank in range(net.ranks)]
        with started_on(net, target, args, Path(folder), cores=cores, env=env) as ranks:
            _wait(ranks, timeout)
        codes = [process.returncode for process in ranks]
        if any(codes):
            raise RankFailed("\n".join([f"exit codes by rank: {codes}", *map(tail, errs)]))
        lines = outs[0].read_text().strip().splitlines()
        try:
            return json.loads(lines[-1])
        except (IndexError, json.JSONDecodeError):
            raise RankFailed(f"rank 0 must print JSON in its last line; it printed {lines[-1:]}") from None


@contextlib.contextmanager
def started_on(
    net: Hosts,
    target: str,
    args: Sequence[str],
    folder: Path,
    *,
    cores: Sequence[int] | None = None,
    env: dict[str, str] | None = None,
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The processes of `run_on`, by rank, killed when the block ends; rank r writes FOLDER/r.out and FOLDER/r.err."""
    program = [target] if target.endswith(".py") else ["-m", target]
    with started(net, [sys.executable, *program, *args], folder, cores=cores, env=env) as ranks:
        yield ranks


@contextlib.contextmanager
def started(
    net: Hosts,
    words: Sequence[str],
    folder: Path,
    *,
    cores: Sequence[int] | None = None,
    env: dict[str, str] | None = None,
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The same for any command, on every rank."""
    common = {
        "WORLD_SIZE": str(net.ranks), "LOCAL_WORLD_SIZE": str(net.ranks_per_host), "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": str(PORT), "GLOO_SOCKET_IFNAME": INTERFACE,
    }  # fmt: skip
    base = {"OMP_NUM_THREADS": "1", **os.environ, **(env or {}), **common}
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(net.ranks):
            host, local = divmod(rank, net.ranks_per_host)
            command = ["ip", "netns", "exec", net.names[host], *words]
            if cores:
                command = ["taskset", "-c", str(cores[rank % len(cores)]), *command]
            with (folder / f"{rank}.out").open("wb") as out, (folder / f"{rank}.err").open("wb") as err:
                ranks.append(
                    subprocess.Popen(
                        command,
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
                os.killpg(process.pid, signal.SIGKILL)  # a rank's own children too
            process.wait()


def _wait(ranks: Sequence[subprocess.Popen[bytes]], timeout: float) -> None:
    """Until all have ended, one has failed (the others then get 2 s to say why they too fail), or time is up."""
    deadline = time.monotonic() + timeout
    while None in (codes := [process.poll() for process in ranks]) and time.monotonic() < deadline:
        if any(codes):
            deadline = min(deadline, time.monotonic() + 2)
        time.sleep(0.05)


def tail(path: Path, lines: int = 15) -> str:
    """The end of what a rank wrote."""
    return "\n".join([f"--- rank {path.stem}", *path.read_text(errors="replace").splitlines()[-lines:]])


def as_rank(body: Callable[[], Any]) -> None:
    """On a host: join the other ranks by gloo, run `body`, print rank 0's value as JSON for `run_on` to read."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    value = body()
    if dist.get_rank() == 0:
        print(json.dumps(value))
    dist.barrier()
    dist.destroy_process_group()


def exit_on_missing(main: Callable[[], None]) -> None:
    """Run a benchmark's `main`; say what the machine lacks and exit with 2, and clean up after SIGTERM too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as an exception, so that namespaces are removed
    try:
        main()
    except CannotBuild as error:
        print(f"slow links cannot be built here: {error}", file=sys.stderr)
        sys.exit(2)
    except RankFailed as error:
        print(error, file=sys.stderr)
        sys.exit(1)


# --- the check ------------------------------------------------------------------------------------

CHECK_BYTES = 64 << 20


def check(rate: str) -> bool:
    """Send 64 MiB over links of `rate`: one way, both ways, two hosts to one. Are all within 10 % of the prediction?"""
    with hosts(3, rate=rate) as net:
        measured = run_on(net, "benchmarks.slow_link", ["--check-as-rank"], timeout=60 + 20 * 8 * CHECK_BYTES / 1e8)
        alone = CHECK_BYTES / net.bytes_per_second
    predicted = {"one to another": alone, "both ways at once": alone, "two to one": 2 * alone}
    good = True
    for name, seconds in predicted.items():
        ratio = measured[name] / seconds
        good &= abs(ratio - 1) < 0.1
        print(f"{rate}, {CHECK_BYTES >> 20} MiB, {name:18}: predicted {seconds:.3f} s, measured {measured[name]:.3f} s")
    print("the rate is real" if good else "the rate is NOT what was asked for (more than 10 % off)")
    return good


def _check_as_rank() -> dict[str, float]:
    """The least of three times of each pattern; a rank of `check`."""
    import torch
    import torch.distributed as dist

    rank = dist.get_rank()
    x, *buffers = (torch.ones(CHECK_BYTES, dtype=torch.uint8) for _ in range(3))
    patterns = {
        "one to another": [(1, 0)],
        "both ways at once": [(1, 0), (0, 1)],
        "two to one": [(1, 0), (2, 0)],
    }
    seconds = {}
    for name, pairs in patterns.items():
        times = []
        for _ in range(3):
            dist.barrier()
            start = time.perf_counter()
            # Receives first: between two ranks gloo sends one way after the other if both post their sends first.
            mine = [source for source, to in pairs if to == rank]
            works = [dist.irecv(buffers[i], source) for i, source in enumerate(mine)]
            works += [dist.isend(x, to) for source, to in pairs if source == rank]
            for work in works:
                assert work is not None
                work.wait()
            dist.barrier()
            times.append(time.perf_counter() - start)
        seconds[name] = min(times)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="measure the rate; exit 1 if it is off by more than 10 %%")
    parser.add_argument("--check-as-rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rate", default="1gbit", help="of each link, each direction")
    parser.add_argument("--delay", help="added one way, such as 1ms")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds")
    parser.add_argument("program", nargs="*", help="a script or module, and its arguments, after --")
    args = parser.parse_args()
    if args.check_as_rank:
        as_rank(_check_as_rank)
    elif args.check:
        sys.exit(0 if check(args.rate) else 1)
    elif args.program:
        with hosts(args.ranks, args.rate, args.delay) as net:
            print(json.dumps(run_on(net, args.program[0], args.program[1:], args.timeout)))
    else:
        parser.error("nothing to do: --check, or a program after --")


if __name__ == "__main__":
    exit_on_missing(main)
