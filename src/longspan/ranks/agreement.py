"""Compare what must be equal on every rank before the first collective, and name each difference by rank and key.

Ranks that differ would train wrongly without an error (another learning rate), or wait for each other forever (another
number of steps, layers or ranks). The comparison uses the job's store, which needs no process group.
"""

from __future__ import annotations

import contextlib
import json
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from longspan.core.errors import LongspanError, see
from longspan.core.formatting import differences, format_ranks, listed
from longspan.core.sections import values
from longspan.ranks.rendezvous import GROUP_TIMEOUT_S, Peers, poll, store_errors

if TYPE_CHECKING:
    from longspan.ranks.heartbeat import Heartbeat

T = TypeVar("T")

#: Longer values are cut to this many characters, with a checksum, so that a rank sends a few kilobytes at most.
_LONGEST = 80
#: The most differences in a message; the rest is counted.
_LISTED = 6
_REFUSED = "refused"
#: Seconds that rank 0, which may host the store, waits for the others to read a refusal.
_READ_S = 3.0


def open_together(heartbeat: Heartbeat, open_inputs: Callable[[], T], facts: Callable[[T], Mapping[str, Any]]) -> T:
    """Open a job's inputs on every rank, compare their `facts` and versions, and make the process group. Collective.

    An error of any rank is raised on all.
    """
    import torch

    heartbeat.at("start", unlimited=True)
    peers, alive = heartbeat.peers, heartbeat.beats
    with refusing_together(peers, alive=alive):
        opened = open_inputs()
    agree(peers, {**versions(), **facts(opened)}, alive=alive)
    peers.init_process_group("cuda" if torch.cuda.is_available() else "cpu")
    return opened


def agree(peers: Peers, facts: Mapping[str, Any], *, alive: bool = False) -> None:
    """Compare `facts` over all ranks, as text; raise the same error on every rank, naming what differs. Collective.

    With `alive`, a heartbeat watches the ranks, so that this may wait for a slow one; otherwise a rank that does not
    answer within the peers' timeout is an error.
    """
    if peers.alone:
        return
    with store_errors():
        verdict = _exchange(peers, {key: short(value) for key, value in facts.items()}, alive)
    if verdict:
        raise LongspanError(verdict)


@contextlib.contextmanager
def refusing_together(peers: Peers, *, alive: bool = False) -> Iterator[None]:
    """Send an exception that this rank raises inside to the others, which wait in `agree`, so that all ranks end."""
    try:
        yield
    except Exception as error:
        if peers.alone:
            raise
        verdict = str(error) if isinstance(error, LongspanError) else f"{type(error).__name__}: {error}"
        with contextlib.suppress(RuntimeError):  # without a store, this rank's error matters more
            verdict = _exchange(peers, {_REFUSED: verdict}, alive)
        if not isinstance(error, LongspanError):
            raise
        raise LongspanError(verdict) from error


def _exchange(peers: Peers, message: Mapping[str, str], alive: bool) -> str:
    """Rank 0 reads the messages of all ranks and writes its verdict: empty if they agree."""
    key = f"agreement/{peers.next_round()}"
    limit_s = GROUP_TIMEOUT_S if alive else peers.timeout_s
    deadline = time.monotonic() + limit_s
    peers.set(f"{key}/{peers.rank}", json.dumps(message))
    if peers.rank:
        if not poll(lambda: peers.get(f"{key}/verdict") is not None, deadline + 1.0):
            return _no_answer(peers.missing(key) or [0], peers, limit_s)
        verdict = peers.get(f"{key}/verdict") or ""
        peers.set(f"{key}/read/{peers.rank}", "yes")
        return verdict
    waiting = list(range(peers.world_size))

    def all_answered() -> bool:
        waiting[:] = [rank for rank in waiting if peers.get(f"{key}/{rank}") is None]
        return not waiting

    if poll(all_answered, deadline):
        messages = peers.get_all([f"{key}/{rank}" for rank in range(peers.world_size)])
        verdict = compare([json.loads(text) for text in messages])
    else:
        verdict = _no_answer(waiting, peers, limit_s)
    peers.set(f"{key}/verdict", verdict)
    if verdict:
        poll(lambda: peers.missing(f"{key}/read") == [0], time.monotonic() + _READ_S)
    return verdict


def _no_answer(ranks: list[int], peers: Peers, limit_s: float) -> str:
    return (
        f"{format_ranks(ranks)} of {peers.world_size} did not answer within {limit_s:g} s when settings were compared; "
        "check what those ranks are doing, or give a longer --timeout"
    )


def compare(messages: list[dict[str, str]]) -> str:
    """Return what differs between the messages of ranks 0, 1, ...; empty if nothing does."""
    refused = {rank: message[_REFUSED] for rank, message in enumerate(messages) if set(message) == {_REFUSED}}
    if refused:
        texts = sorted(set(refused.values()))
        if len(refused) == len(messages) and len(texts) == 1:
            return texts[0]
        ranks = {text: [rank for rank, other in refused.items() if other == text] for text in texts}
        return "; ".join(f"{format_ranks(ranks[text])}: {text}" for text in texts)
    different = differences(messages, range(len(messages)))
    if not different:
        return ""
    return (
        f"the ranks were started differently: {listed(different, _LISTED)}; start every rank with the same command, "
        f"files and versions {see('LS104')}"
    )


def short(value: Any) -> str:
    """Return a value as text; a long one is cut, with a checksum of all of it."""
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)
    if len(text) <= _LONGEST:
        return text
    return f"{text[: _LONGEST - 15]}... #{zlib.crc32(text.encode(errors='replace')):08x}"


def settings(config: Any, leave_out: Iterable[str] = ()) -> dict[str, Any]:
    """Return the settings of a configuration, without `nproc`, which may differ between machines."""
    return {
        name: value if isinstance(value, (bool, int, float, str, list, tuple, type(None))) else str(value)
        for name, value in values(config).items()
        if name not in {"nproc", *leave_out}
    }


def versions() -> dict[str, str]:
    """Return the versions of the libraries that decide what is computed and sent, and the kind of device."""
    from importlib.metadata import PackageNotFoundError, version

    import torch

    import longspan

    found = {"torch": str(torch.__version__), "longspan": longspan.__version__}
    with contextlib.suppress(PackageNotFoundError):
        found["transformers"] = version("transformers")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return {**{f"version of {name}": number for name, number in found.items()}, "device": device}


def model_facts(model_config: Any) -> dict[str, Any]:
    """Return a Hugging Face config key by key, without the path that it was read from."""
    keys = model_config.to_dict()
    return {f"model config's {key}": value for key, value in sorted(keys.items()) if key != "_name_or_path"}
