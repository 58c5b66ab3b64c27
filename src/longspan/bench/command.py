"""`longspan bench`: its flags; check them, start the ranks, measure, print and write."""

from __future__ import annotations

import contextlib
import datetime
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tyro.conf import Positional  # imports no torch; tyro looks the annotation up when it makes the help

from longspan.core.errors import LongspanError, require
from longspan.core.memory import flags_last
from longspan.core.parallel import ParallelConfig
from longspan.core.sections import values
from longspan.core.validation import LARGEST_COUNT, check_number, check_output
from longspan.ranks import launch
from longspan.ranks.job import RankFlags, read_job

if TYPE_CHECKING:
    import torch

    from longspan.ranks.heartbeat import Heartbeat

Benchmark = Literal["link", "collectives", "attention", "step"]
_ON_MESH, _COMPARING, _PRINTED = ("link", "collectives"), ("attention", "step"), ("collectives", "attention", "step")
USED_BY: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("data_degree", "ring", "ulysses", "tensor"), _ON_MESH),
    **dict.fromkeys(("out", "name"), ("link",)),
    "sizes": _ON_MESH,
    **dict.fromkeys(
        ("methods", "contexts", "model", "heads", "kv_heads", "head_dim", "predict", "trace", "overlap_chunks"),
        _COMPARING,
    ),
    **dict.fromkeys(("ffn", "layers", "vocab"), ("step",)),
    **dict.fromkeys(("json", "png"), _PRINTED),
    "quick": _PRINTED,
    "dtype": ("link", *_COMPARING),
}
"""The benchmarks that use a flag; a flag that is not listed is used by all."""

MAX_CONTEXT = 1 << 27

ELEMENT_BYTES = 4
"""Collectives are measured in fp32, as gradients are summed in it; other transfers do not depend on the dtype."""


@flags_last
@dataclass(frozen=True)
class BenchConfig(RankFlags):
    """Measure your machines, and the methods on them.

    link: latency and bandwidth of the collectives on each axis of a mesh, and the matmul, attention and memory speed of
    one rank, written to a hardware file for the planner. collectives: every collective at every size, next to the fit.
    attention, step: one attention or one training step by every method, in turns, on 2 ranks unless --nproc says more.
    All ranks are busy concurrently. The command starts its ranks; under torchrun (several machines) it joins them.
    """

    what: Positional[Benchmark]
    """What to measure: link, collectives, attention or step."""
    parallel: ParallelConfig = field(
        default_factory=ParallelConfig, metadata={"only": ("data_degree", "ring", "ulysses", "tensor")}
    )
    """link, collectives: the mesh; an axis of 1 has no link."""
    sizes: tuple[int, ...] = (64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
    """link, collectives: bytes of a collective's whole tensor (64k, 1M): the input of a sum or all-to-all, the result
    of a gather. Rounded up to a multiple of the ranks."""
    rounds: int = 10
    """Measurements of everything; the median counts."""
    dtype: Literal["bf16", "fp32"] = "bf16"
    """dtype of matmul, attention and step. Collectives are measured in fp32."""
    out: Path = Path("runs/link.toml")
    """link: the file to write. With several machines, the first one writes it."""
    name: str = "measured"
    """link: the hardware's name in the file."""
    methods: tuple[str, ...] = ()
    """attention, step: what to compare: tp, megatron-sp, fsdp, ulysses, ring, usp (every mesh with both axes,
    or one, as usp-2x4: ulysses x ring), usp-swapped (ring inside), ulysses-overlap, ulysses-default, ulysses-int8,
    ulysses-fp8, fsdp-no-prefetch, ulysses-no-prefetch, deepspeed, alst, yunchang. Default: the first six, and the
    installed ones of the last three."""
    contexts: tuple[int, ...] = (2048, 8192)
    """attention, step: tokens of a sequence (8k); each is measured."""
    model: str | None = None
    """attention, step: a built-in name or a config.json. Its heads, or the whole model with random weights, replace the
    sizes below."""
    heads: int = 16
    """attention, step: query heads."""
    kv_heads: int = 4
    """attention, step: KV heads."""
    head_dim: int = 64
    """attention, step: elements of a head. The hidden size is heads x head_dim."""
    overlap_chunks: int = 4
    """attention, step: chunks of heads of ulysses-overlap. ulysses-default chooses them as `SequenceSharding` does;
    other methods send all heads at once."""
    ffn: int = 2816
    """step: the MLP's intermediate size."""
    layers: int = 2
    """step: decoder layers."""
    vocab: int = 1024
    """step: the vocabulary."""
    predict: bool = False
    """attention, step: also measure the links of each mesh, with the sizes that the methods send, and print the
    planner's prediction."""
    trace: Path | None = None
    """attention, step: folder for each method's Chrome trace of all ranks and timeline (HTML, and PNG with
    matplotlib)."""
    json: bool = False
    """attention, step, collectives: print JSON (schema longspan.bench/1) instead of tables."""
    png: Path | None = None
    """attention, step, collectives: draw the figures (needs matplotlib)."""
    quick: bool = False
    """Only test that it runs. attention, step: one context of 512 tokens, 2 rounds; collectives: the 3 smallest sizes,
    2 rounds."""

    @property
    def compares(self) -> bool:
        """Whether it compares methods."""
        return self.what in _COMPARING

    @property
    def tokens(self) -> tuple[int, ...]:
        """The contexts; one with `quick`."""
        return (512,) if self.quick else self.contexts

    @property
    def bytes_each(self) -> tuple[int, ...]:
        """The sizes in ascending order; three with `quick`."""
        sizes = tuple(sorted(set(self.sizes)))
        return sizes[:3] if self.quick else sizes

    @property
    def times(self) -> int:
        """The rounds; at most two with `quick`."""
        return min(2, self.rounds) if self.quick else self.rounds

    def check(self) -> None:
        """Raise on invalid values, the same on every rank."""
        defaults = values(BenchConfig(self.what))
        for name, value in values(self).items():
            users = USED_BY.get(name, (self.what,))
            if self.what not in users and value != defaults[name]:
                raise LongspanError(
                    f"--{name.replace('_', '-')} is a flag of `bench {'` and `bench '.join(users)}`, not of `bench "
                    f"{self.what}`; leave it out"
                )
        self.parallel.check()
        check_number("--rounds", self.rounds, 1, LARGEST_COUNT)
        self.check_ranks()
        if self.compares:
            self._check_comparison()
        if self.png is not None:
            check_output("--png", self.png, example="bench.png")
        if self.trace is not None:
            check_output("--trace", self.trace, folder=True)
        self._check_sizes()

    def _check_comparison(self) -> None:
        if not self.contexts:
            raise LongspanError("--contexts needs a number of tokens, such as --contexts 2k 8k")
        for context in self.contexts:
            check_number("--contexts", context, 2, MAX_CONTEXT)
        for name in ("heads", "kv_heads", "head_dim", "overlap_chunks", "ffn", "layers", "vocab"):
            check_number(f"--{name.replace('_', '-')}", getattr(self, name), 1, 1 << 24)
        if self.model is None and self.heads % self.kv_heads:
            raise LongspanError(f"--heads {self.heads} is no multiple of --kv-heads {self.kv_heads}; give a multiple")

    def check_contexts(self, ranks: int) -> None:
        """Raise on contexts that the ranks of the job do not divide."""
        for context in self.tokens:
            if context % (2 * ranks):
                below = max(1, context // (2 * ranks)) * 2 * ranks
                raise LongspanError(
                    f"--contexts {context} does not divide into two equal parts for each of {ranks} ranks (a zigzag "
                    f"ring has two), so methods would not have equal work; give {below} or {below + 2 * ranks}"
                )

    def _check_sizes(self) -> None:
        for size in self.sizes:
            check_number("--sizes", size, 1, LARGEST_COUNT)
        ranks = self.parallel.ranks
        grain = ELEMENT_BYTES * ranks
        different = len({-(-size // grain) for size in self.bytes_each})
        if ranks > 1 and different < 3:
            given = " ".join(map(str, self.sizes))
            raise LongspanError(
                f"--sizes {given} gives {different} different sizes, rounded up to a multiple of {grain} bytes for "
                f"{ranks} ranks; to fit a latency and a bandwidth takes 3, such as --sizes 64k 1M 16M"
            )


def run(config: BenchConfig) -> int:
    """Measure on ranks started here or by torchrun; the first rank prints and writes the results.

    Returns:
        The exit code 0.
    """
    ranks = _count_ranks(config)
    mesh = f"--nproc {ranks}" if config.compares else config.parallel.flags
    launch.open_first(config, lambda _: check_ranks(config, ranks), ranks, mesh)
    # With --json, stdout has the results alone: libraries print there too.
    with launch.stdout_to_stderr() if config.json else contextlib.nullcontext():
        found = launch.launch(_bench_rank, config, ranks, nproc=ranks)
    if launch.is_first_rank():
        from longspan.bench.output import write_output

        write_output(config, found)
    return 0


def _count_ranks(config: BenchConfig) -> int:
    """Return the ranks of the job: of the mesh, or for a comparison of torchrun's job or `--nproc`."""
    if not config.compares:
        return config.parallel.ranks
    job = read_job()
    return job.world_size if job is not None else config.nproc or 2


def check_ranks(config: BenchConfig, ranks: int) -> None:
    """Raise if the config cannot be measured on this number of ranks, or on the first rank if its results cannot be
    written.
    """
    if config.what == "link":
        if launch.is_first_rank():  # which writes it
            check_output("--out", config.out, example="link.toml")
        return
    if ranks < 2:
        raise LongspanError(f"bench {config.what} compares what {ranks} rank sends with nothing; give 2 ranks or more")
    if config.compares:
        from longspan.bench.methods import read_config, select

        config.check_contexts(ranks)
        select(config.methods, config.what, ranks)
        read_config(config)
    if config.png is not None:
        require("--png", "matplotlib")


def _bench_rank(config: BenchConfig, ranks: int) -> Any:
    with launch.joined(config.timeout, config.start_timeout) as heartbeat:
        found = worker(config, ranks, heartbeat)
    return found if launch.is_first_rank() else None  # all ranks have the same, and traces are large


def worker(config: BenchConfig, ranks: int, heartbeat: Heartbeat | None = None) -> Any:
    """Measure on this rank; every rank of the job calls it.

    Returns:
        The same on every rank: the hardware file's content for `link`, else the results in the schema of the JSON.
    """
    import torch

    from longspan.ranks import agreement

    config.check()
    # What the first rank alone uses may differ.
    settings = agreement.settings(config, leave_out=("out", "name", "json", "png", "trace"))
    agreement.open_together(
        heartbeat or launch.unwatched(config), lambda: check_ranks(config, ranks), lambda _: settings
    )
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    measured = _describe_run(device, ranks)
    if config.what == "link":
        from longspan.bench.hardware import measure_hardware

        return measure_hardware(config, device, config.name, measured)
    if config.what == "collectives":
        from longspan.bench.links import measure_collectives

        return {"what": "collectives", "measured": measured, "rows": measure_collectives(config, device)}
    from longspan.bench.compare import compare

    return compare(config, ranks, device, measured)


def _describe_run(device: torch.device, ranks: int) -> str:
    import torch
    import torch.distributed as dist

    backend = dist.get_backend() if dist.is_initialized() else "no collectives"
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    count = f"{ranks} rank{'s' if ranks > 1 else ''}"
    return f"{datetime.date.today()} on {socket.gethostname()}, {kind}, torch {torch.__version__}, {backend}, {count}"
