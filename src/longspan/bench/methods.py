"""The methods that `bench attention` and `bench step` put side by side: a line each, and the meshes each has.

What a line names as "module:function" makes the work of one rank (`longspan.bench.workloads`); nothing is imported
before it is asked for.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from longspan.core.cache_dtype import CACHE_DTYPES
from longspan.core.errors import LongspanError
from longspan.core.validation import spell
from longspan.plan.job import Mesh


@dataclass(frozen=True)
class Kind:
    """A method, on any number of ranks.

    Attributes:
        name: what `--methods` calls it.
        meshes: for a number of ranks the rows it has, by name.
        attention: makes its attention, "" where it has none.
        step: makes its training step, "" where it has none.
        package: what must be installed for it, "" for longspan's own.
        job: what the planner's job has of it.
        options: for whoever makes its work.
        planned: whether the planner has formulas for it.
    """

    name: str
    meshes: Callable[[int], Mapping[str, Mesh]]
    attention: str = ""
    step: str = ""
    package: str = ""
    job: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    planned: bool = True

    def __reduce__(self) -> tuple[Any, ...]:
        # A rank tells the launcher what it measured: by the name, as functions have none.
        return _kind, (self.name,)


def _kind(name: str) -> Kind:
    return KINDS[name]


@dataclass(frozen=True)
class Row:
    """A method on a mesh.

    Attributes:
        name: of the row.
        kind: the method.
        mesh: the sizes of the axes.
    """

    name: str
    kind: Kind
    mesh: Mesh


def _usp(ranks: int) -> dict[str, Mesh]:
    """Every mesh with both axes, as ulysses x ring."""
    sizes = [u for u in range(2, ranks) if ranks % u == 0]
    return {f"usp-{u}x{ranks // u}": Mesh(ulysses=u, ring=ranks // u) for u in sizes}


def _coded(code: str, ranks: int) -> dict[str, Mesh]:
    return {f"ulysses-{code}": Mesh(ulysses=ranks)}


def _swapped(ranks: int) -> dict[str, Mesh]:
    return {f"{name}-swapped": mesh for name, mesh in _usp(ranks).items()}


def _yunchang(ranks: int) -> dict[str, Mesh]:
    both = {f"yunchang-{u}x{r.ring}": r for u, r in ((m.ulysses, m) for m in _usp(ranks).values())}
    return {f"yunchang-{ranks}x1": Mesh(ulysses=ranks), **both}


_PEER: dict[str, Any] = {
    "attention": "longspan.bench.peers:peer_attention",
    "step": "longspan.bench.peers:peer_step",
    "planned": False,
}

_SEQUENCE: dict[str, Any] = {
    "attention": "longspan.bench.workloads:sequence_attention",
    "step": "longspan.bench.step:sequence_step",
}
_TENSOR: dict[str, Any] = {
    "attention": "longspan.bench.workloads:tensor_attention",
    "step": "longspan.bench.step:tensor_step",
}

KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("tp", lambda ranks: {"tp": Mesh(tensor=ranks)}, **_TENSOR),
        Kind(
            "megatron-sp",
            lambda ranks: {"megatron-sp": Mesh(tensor=ranks)},
            job={"tensor_style": "megatron-sp"},
            **_TENSOR,
        ),
        Kind("fsdp", lambda ranks: {"fsdp": Mesh(data=ranks)}, **_SEQUENCE),
        Kind("ulysses", lambda ranks: {"ulysses": Mesh(ulysses=ranks)}, **_SEQUENCE),
        Kind(
            "ulysses-overlap",
            lambda ranks: {"ulysses-overlap": Mesh(ulysses=ranks)},
            # Each chunk of heads under way while the attention of another computes; every other method sends all heads
            # at once, whatever `SequenceSharding` would choose.
            options={"overlap": True},
            **_SEQUENCE,
        ),
        Kind(
            "ulysses-default",
            lambda ranks: {"ulysses-default": Mesh(ulysses=ranks)},
            options={"overlap": "auto"},  # as `SequenceSharding` chooses by the link
            **_SEQUENCE,
        ),
        *(
            # An approximation: a byte for each element that travels.
            Kind(
                f"ulysses-{code}",
                functools.partial(_coded, code),
                job={"wire_dtype": code},
                options={"wire_dtype": code},
                **_SEQUENCE,
            )
            for code in CACHE_DTYPES
            if code != "exact"
        ),
        Kind("ring", lambda ranks: {"ring": Mesh(ring=ranks)}, **_SEQUENCE),
        Kind("usp", _usp, **_SEQUENCE),
        # Weights gathered when they are needed, and no sooner.
        Kind(
            "fsdp-no-prefetch",
            lambda ranks: {"fsdp-no-prefetch": Mesh(data=ranks)},
            step=_SEQUENCE["step"],
            options={"prefetch": False},
        ),
        Kind(
            "ulysses-no-prefetch",
            lambda ranks: {"ulysses-no-prefetch": Mesh(ulysses=ranks)},
            step=_SEQUENCE["step"],
            options={"prefetch": False},
        ),
        # Neighbours in rank order in the ring, the exchange between those far apart: what not to do across nodes.
        Kind("usp-swapped", _swapped, options={"swapped": True}, planned=False, **_SEQUENCE),
        Kind(
            "deepspeed",
            lambda ranks: {"deepspeed": Mesh(ulysses=ranks)},
            package="deepspeed",
            **_PEER,
        ),
        Kind(
            "alst",
            lambda ranks: {"alst": Mesh(ulysses=ranks)},
            package="deepspeed",
            **_PEER,
        ),
        Kind(
            "yunchang",
            _yunchang,
            package="yunchang",
            **_PEER,
        ),
    )
}

DEFAULT = ("tp", "megatron-sp", "fsdp", "ulysses", "ring", "usp")
"""The methods that are measured where none is named; with them the peers that are installed."""


def chosen(names: Sequence[str], what: str, ranks: int) -> tuple[Row, ...]:
    """The rows that are asked for, by the names of methods or of rows ("usp", "usp-2x4").

    Raises:
        LongspanError: for an unknown method, one that has nothing to measure here, or a peer that is not installed.
    """
    every = {name: Row(name, kind, mesh) for kind in KINDS.values() for name, mesh in kind.meshes(ranks).items()}
    rows: list[Row] = []
    for name in names or DEFAULT:
        found = [row for row in every.values() if name in (row.name, row.kind.name)]
        if not found and name in KINDS:
            if not names:
                continue
            raise LongspanError(f"--methods {name}: {ranks} ranks have no mesh for it; give a number with two factors")
        if not found:
            close = difflib.get_close_matches(name, [*KINDS, *every], n=1, cutoff=0.5)
            nearest = f"did you mean {close[0]}?" if close else f"there are {', '.join(KINDS)}"
            raise LongspanError(f"--methods {spell(name)} is unknown; {nearest}")
        kind = found[0].kind
        if not getattr(kind, what):
            has = [other.name for other in KINDS.values() if getattr(other, what)]
            raise LongspanError(f"--methods {name} is not measured by `bench {what}`; it has {', '.join(has)}")
        if kind.package and not installed(kind.package):
            raise LongspanError(
                f"--methods {name} needs {kind.package}, which is not installed (pip install --no-deps {kind.package}; "
                "DS_BUILD_OPS=0 for deepspeed); install it, or leave the method out"
            )
        rows += [row for row in found if row not in rows]
    if not names:
        peers = [kind for kind in KINDS.values() if kind.package and getattr(kind, what) and installed(kind.package)]
        rows += [every[name] for kind in peers for name in kind.meshes(ranks)]
    return tuple(rows)


def installed(package: str) -> bool:
    """Whether a package is there to be imported."""
    return importlib.util.find_spec(package) is not None


def builder(path: str) -> Callable[..., Any]:
    """The function that "module:function" names."""
    module, _, name = path.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found
