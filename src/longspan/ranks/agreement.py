"""Compare what must be equal on every rank before the first collective of a model, and name each difference.

Ranks that differ would train wrongly without an error (another learning rate), or wait for each other forever (another
number of steps, layers or ranks).
"""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from longspan.core.errors import LongspanError, see
from longspan.core.formatting import differences, format_ranks, listed
from longspan.core.reading import values

T = TypeVar("T")

#: Longer values are cut to this many characters, with a checksum, so that a rank sends a few kilobytes at most.
_LONGEST = 80
#: The most differences in a message; the rest is counted.
_LISTED = 6
_REFUSED = "refused"


def open_together(open_inputs: Callable[[], T], facts: Callable[[T], Mapping[str, Any]]) -> T:
    """Open a job's inputs on every rank and compare their `facts` and versions. Collective.

    An error of any rank is raised on all, as the others wait for this one.
    """
    try:
        opened = open_inputs()
    except Exception as error:
        known = isinstance(error, LongspanError)
        verdict = compare(_gather({_REFUSED: str(error) if known else f"{type(error).__name__}: {error}"}))
        if not known:
            raise
        raise LongspanError(verdict) from error
    agree({**versions(), **facts(opened)})
    return opened


def agree(facts: Mapping[str, Any]) -> None:
    """Compare `facts` over all ranks, as text; raise the same error on every rank, naming what differs. Collective."""
    if verdict := compare(_gather({key: short(value) for key, value in facts.items()})):
        raise LongspanError(verdict)


def _gather(message: dict[str, str]) -> list[dict[str, str]]:
    import torch.distributed as dist

    if not dist.is_initialized():
        return [message]
    messages: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(messages, message)
    return messages


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
    """Return the settings of a configuration by flag, without `nproc`, which may differ between machines."""
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
