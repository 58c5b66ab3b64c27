"""What must be alike on every rank is compared before the first collective, and a difference named by rank and key.

Ranks that differ would train wrongly without a word (another learning rate), or wait for one another without end
(another number of steps, layers or ranks). They are compared over the job's store, which needs no process group.
"""

from __future__ import annotations

import contextlib
import json
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from longspan.core.errors import LongspanError
from longspan.core.rank_differences import differences, format_ranks, listed
from longspan.core.sections import values
from longspan.ranks.rendezvous import GROUP_TIMEOUT_S, Peers, poll

#: What a value is cut to, so that a rank says a few kilobytes in all; a checksum then stands for the rest.
_LONGEST = 80
#: Differences that are named; of the rest their number.
_NAMED = 6
_REFUSED = "refused"
#: Seconds that rank 0 stays for the others to hear a refusal.
_LEAVE_S = 3.0

Facts = Mapping[str, Any]


def agree(peers: Peers, facts: Facts, *, alive: bool = False) -> None:
    """Compare `facts` over all ranks. Every rank calls this, in the same order.

    Args:
        peers: the ranks.
        facts: what must be alike, by name; values are compared by their text.
        alive: whether a heartbeat watches the ranks meanwhile, so that one which is merely slow may be waited for;
            without one, a rank that says nothing for the peers' time-out is refused.

    Raises:
        LongspanError: the same on every rank: each key that differs, and which rank has which value; or what a rank
            refused to start with; or the ranks that said nothing.
    """
    if peers.alone:
        return
    said = {key: short(value) for key, value in facts.items()}
    try:
        verdict = _exchange(peers, json.dumps(said), alive)
    except RuntimeError as error:  # of the store's connection
        raise LongspanError(f"the job's store is gone, so the rank that holds it has ended: {error}") from error
    if verdict:
        raise LongspanError(verdict)


@contextlib.contextmanager
def refusing_together(peers: Peers, *, alive: bool = False) -> Iterator[None]:
    """End all ranks with whatever this rank raises inside: tell the others, which wait in `agree`.

    Raises:
        LongspanError: as it was raised inside; on the others by `agree`.
        Exception: any other exception, as it was raised inside.
    """
    try:
        yield
    except Exception as error:
        if peers.alone:
            raise
        verdict = str(error) if isinstance(error, LongspanError) else f"{type(error).__name__}: {error}"
        with contextlib.suppress(RuntimeError):  # the store is gone: what was refused matters more
            verdict = _exchange(peers, json.dumps({_REFUSED: verdict}), alive)
        if not isinstance(error, LongspanError):
            raise
        raise LongspanError(verdict) from error


def _exchange(peers: Peers, said: str, alive: bool) -> str:
    """Rank 0 reads what all ranks have said, and tells them what it makes of it: empty if they agree."""
    number = peers.next_round()
    key = f"agreement/{number}"
    limit_s = GROUP_TIMEOUT_S if alive else peers.timeout_s
    deadline = time.monotonic() + limit_s
    peers.set(f"{key}/{peers.rank}", said)
    if peers.rank == 0:
        waiting = list(range(peers.world_size))

        def heard_all() -> bool:
            waiting[:] = [rank for rank in waiting if peers.get(f"{key}/{rank}") is None]
            return not waiting

        if poll(heard_all, deadline):
            every = peers.get_all([f"{key}/{rank}" for rank in range(peers.world_size)])
            verdict = compare([json.loads(text) for text in every])
        else:
            verdict = _nothing_from(waiting, peers, limit_s)
        peers.set(f"{key}/verdict", verdict)
        if verdict:  # this rank may hold the store, and ends now
            poll(lambda: peers.missing(f"{key}/heard") == [0], time.monotonic() + _LEAVE_S)
        return verdict
    if not poll(lambda: peers.get(f"{key}/verdict") is not None, deadline + 1.0):
        return _nothing_from(peers.missing(key) or [0], peers, limit_s)
    verdict = peers.get(f"{key}/verdict") or ""
    peers.set(f"{key}/heard/{peers.rank}", "yes")
    return verdict


def _nothing_from(ranks: list[int], peers: Peers, limit_s: float) -> str:
    return (
        f"{format_ranks(ranks)} of {peers.world_size} said nothing of what must be alike on all ranks for {limit_s:g} "
        "s; see what keeps them, or give a longer --timeout"
    )


def compare(every: list[dict[str, str]]) -> str:
    """What differs between ranks, given what each of them said; empty if nothing does."""
    refused = {rank: said[_REFUSED] for rank, said in enumerate(every) if set(said) == {_REFUSED}}
    if refused:
        texts = set(refused.values())
        if len(refused) == len(every) and len(texts) == 1:
            return texts.pop()
        return "; ".join(f"{format_ranks(_having(refused, text))}: {text}" for text in sorted(texts))
    different = differences(every, range(len(every)))
    if not different:
        return ""
    return (
        f"the ranks were not given the same: {listed(different, _NAMED)}; start every rank with the same command, "
        "files and versions"
    )


def _having(values: Mapping[int, str | None], value: str | None) -> list[int]:
    return [rank for rank, other in values.items() if other == value]


def short(value: Any) -> str:
    """A value as text; long ones cut, with a checksum of the whole."""
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)
    if len(text) <= _LONGEST:
        return text
    return f"{text[: _LONGEST - 15]}... #{zlib.crc32(text.encode(errors='replace')):08x}"


def settings(config: Any, leave_out: Iterable[str] = ()) -> dict[str, Any]:
    """Every setting of a configuration but those that may differ from machine to machine."""
    return {name: _plain(value) for name, value in values(config).items() if name not in {"nproc", *leave_out}}


def _plain(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float, str, list, tuple, type(None))) else str(value)


def versions() -> dict[str, str]:
    """The libraries whose versions decide what is computed and sent, and the device that it runs on."""
    from importlib.metadata import PackageNotFoundError, version

    import torch

    import longspan

    found = {"torch": str(torch.__version__), "longspan": longspan.__version__}
    with contextlib.suppress(PackageNotFoundError):
        found["transformers"] = version("transformers")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return {**{f"version of {name}": said for name, said in found.items()}, "device": device}


def model_facts(model_config: Any) -> dict[str, Any]:
    """A Hugging Face config, key by key; not where it was read from."""
    values = model_config.to_dict()
    return {f"model config's {key}": value for key, value in sorted(values.items()) if key != "_name_or_path"}
