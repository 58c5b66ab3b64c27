"""Everything `longspan bench` can be asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tyro.conf import Positional  # imports no torch; tyro looks the annotation up when it makes the help

from longspan.core.errors import LongspanError
from longspan.core.parallel import ParallelConfig
from longspan.core.sections import values
from longspan.core.validation import LARGEST_COUNT, LARGEST_JOB, LONGEST_WAIT_S, check_number, check_output
from longspan.ranks.rendezvous import START_TIMEOUT_S

What = Literal["link", "collectives", "attention", "step"]
_MESHED, _COMPARED, _SHOWN = ("link", "collectives"), ("attention", "step"), ("collectives", "attention", "step")
FOR: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("data_degree", "ring", "ulysses", "tensor"), _MESHED),
    **dict.fromkeys(("out", "name"), ("link",)),
    "sizes": _MESHED,
    **dict.fromkeys(
        ("methods", "contexts", "model", "heads", "kv_heads", "head_dim", "predict", "trace", "overlap_chunks"),
        _COMPARED,
    ),
    **dict.fromkeys(("ffn", "layers", "vocab"), ("step",)),
    **dict.fromkeys(("json", "png"), _SHOWN),
    "quick": _SHOWN,
    "dtype": ("link", *_COMPARED),
}
"""What a flag is of; a flag that is not here is of all."""

MOST_CONTEXT = 1 << 27

ELEMENT_BYTES = 4
"""Collectives are measured in fp32: gradients are summed in it, and what is only moved has no dtype."""


@dataclass(frozen=True)
class BenchConfig:
    """Measure your machines, and the methods on them.

    link: latency and bandwidth of the collectives on each axis of a mesh, and one rank's matmul, attention and memory,
    written to a hardware file for the planner. collectives: every collective at every size, beside the fit. attention,
    step: one attention, or one training step, by every method on all ranks, interleaved. All ranks are busy at once.
    Alone, this starts its ranks itself; under torchrun (several machines) it joins them.
    """

    what: Positional[What]
    """What to measure: link, collectives, attention or step."""
    parallel: ParallelConfig = field(
        default_factory=ParallelConfig, metadata={"only": ("data_degree", "ring", "ulysses", "tensor")}
    )
    """link, collectives: the mesh; an axis of 1 has no link."""
    nproc: int | None = None
    """Ranks on this machine; by default as many as the degrees need, and of attention and step 2."""
    sizes: tuple[int, ...] = (64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
    """link, collectives: bytes of a collective's whole tensor (64k, 1M): what a rank exchanges or sums, or has after a
    gather. Rounded up to what the ranks divide."""
    rounds: int = 10
    """How often everything is measured; the median counts."""
    dtype: Literal["bf16", "fp32"] = "bf16"
    """dtype of matmul, attention and step. Collectives are measured in fp32."""
    out: Path = Path("runs/link.toml")
    """link: the file to write; its folder is made. With several machines, the first one writes it."""
    name: str = "measured"
    """link: the hardware's name in the file."""
    methods: tuple[str, ...] = ()
    """attention, step: what to put side by side: tp, megatron-sp, fsdp, ulysses, ring, usp (every mesh with both axes,
    or one, as usp-2x4: ulysses x ring), usp-swapped (ring inside), ulysses-overlap, ulysses-default, ulysses-int8,
    ulysses-fp8, fsdp-no-prefetch, ulysses-no-prefetch, deepspeed, alst, yunchang. By default the first six, and the
    peers that are installed."""
    contexts: tuple[int, ...] = (2048, 8192)
    """attention, step: tokens of a sequence (8k); each is measured."""
    model: str | None = None
    """attention, step: a built-in name or the path of a config.json, whose heads, or whole model with random weights,
    is measured in place of the sizes below."""
    heads: int = 16
    """attention, step: query heads."""
    kv_heads: int = 4
    """attention, step: KV heads."""
    head_dim: int = 64
    """attention, step: elements of a head. The hidden size is heads x head_dim."""
    overlap_chunks: int = 4
    """attention, step: chunks in which ulysses-overlap sends the heads. ulysses-default chooses them from the measured
    link; every other method sends all at once."""
    ffn: int = 2816
    """step: the MLP's intermediate size."""
    layers: int = 2
    """step: decoder layers."""
    vocab: int = 1024
    """step: the vocabulary."""
    predict: bool = False
    """attention, step: measure each method's mesh too, its links with messages as large as those that are sent, and
    show the planner's prediction beside."""
    trace: Path | None = None
    """attention, step: a folder for a Chrome trace of all ranks and a timeline (HTML, and PNG with matplotlib) of each
    method."""
    json: bool = False
    """attention, step, collectives: print JSON (schema longspan.bench/1) instead of tables."""
    png: Path | None = None
    """attention, step, collectives: draw the figures (needs matplotlib)."""
    quick: bool = False
    """attention, step: one context of 512 tokens, 2 rounds; collectives: the 3 smallest sizes, 2 rounds: whether it
    runs."""
    timeout: int | None = None
    """Seconds after which a rank that is stopped, hung or cut off ends the job and is named. By default 60, with GPUs
    300. Loading, a save or an export may take longer."""
    start_timeout: int = START_TIMEOUT_S
    """Seconds within which all ranks must have started."""

    @property
    def compares(self) -> bool:
        """Whether it puts methods side by side."""
        return self.what in _COMPARED

    @property
    def tokens(self) -> tuple[int, ...]:
        """The contexts, once `quick` is settled."""
        return (512,) if self.quick else self.contexts

    @property
    def bytes_each(self) -> tuple[int, ...]:
        """The sizes in ascending order, once `quick` is settled."""
        every = tuple(sorted(set(self.sizes)))
        return every[:3] if self.quick else every

    @property
    def times(self) -> int:
        """The rounds, once `quick` is settled."""
        return min(2, self.rounds) if self.quick else self.rounds

    def check(self) -> None:
        """Refuse what cannot be measured, as far as every rank can see it alike.

        Raises:
            LongspanError: with the numbers and the way out.
        """
        defaults = values(BenchConfig(self.what))
        for name, value in values(self).items():
            whats = FOR.get(name, (self.what,))
            if self.what not in whats and value != defaults[name]:
                raise LongspanError(
                    f"--{name.replace('_', '-')} is of `bench {'` and `bench '.join(whats)}`, not of `bench "
                    f"{self.what}`; leave it out"
                )
        self.parallel.check()
        check_number("--rounds", self.rounds, 1, LARGEST_COUNT)
        if self.nproc is not None:
            check_number("--nproc", self.nproc, 1, LARGEST_JOB)
        if self.timeout is not None:
            check_number("--timeout", self.timeout, 1, LONGEST_WAIT_S)
        check_number("--start-timeout", self.start_timeout, 1, LONGEST_WAIT_S)
        if self.compares:
            self._check_compared()
        if self.png is not None:
            check_output("--png", self.png, example="bench.png")
        if self.trace is not None:
            check_output("--trace", self.trace, folder=True)
        self._check_sizes()

    def _check_compared(self) -> None:
        if not self.contexts:
            raise LongspanError("--contexts needs a number of tokens, such as --contexts 2k 8k")
        for context in self.contexts:
            check_number("--contexts", context, 2, MOST_CONTEXT)
        for name in ("heads", "kv_heads", "head_dim", "overlap_chunks", "ffn", "layers", "vocab"):
            check_number(f"--{name.replace('_', '-')}", getattr(self, name), 1, 1 << 24)
        if self.model is None and self.heads % self.kv_heads:
            raise LongspanError(
                f"--heads {self.heads} is no multiple of --kv-heads {self.kv_heads}; every KV head serves equally many"
            )

    def check_ranks(self, ranks: int) -> None:
        """Refuse contexts that the ranks of the job do not divide.

        Raises:
            LongspanError: with the nearest that they do.
        """
        for context in self.tokens:
            if context % (2 * ranks):
                below = max(1, context // (2 * ranks)) * 2 * ranks
                raise LongspanError(
                    f"--contexts {context} does not divide into two equal parts for each of {ranks} ranks (a zigzag "
                    f"ring has two), so methods would not have equal work; give {below} or {below + 2 * ranks}"
                )

    def _check_sizes(self) -> None:
        given = " ".join(map(str, self.sizes))
        if wrong := [size for size in self.sizes if size < 1]:
            raise LongspanError(f"--sizes {given}: {wrong[0]} is no number of bytes; give sizes of at least 1 byte")
        for size in self.sizes:
            check_number("--sizes", size, 1, LARGEST_COUNT)
        ranks = self.parallel.ranks
        grain = ELEMENT_BYTES * ranks
        different = len({-(-size // grain) for size in self.bytes_each})
        if ranks > 1 and different < 3:
            raise LongspanError(
                f"--sizes {given} gives {different} different sizes, rounded up to a multiple of {grain} bytes for "
                f"{ranks} ranks; a latency, a bandwidth and how well they fit need 3, such as --sizes 64k 1M 16M"
            )

    def check_out(self) -> None:
        """Refuse an `out` that could not be written, before anything is measured. Makes nothing.

        Only the machine of the first rank can tell.

        Raises:
            LongspanError: with the reason.
        """
        check_output("--out", self.out, example="link.toml")
