"""The plan of one mesh, and the search over all meshes: what fits, how long it takes, why not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from longspan.core.errors import LongspanError
from longspan.core.experts import divisors
from longspan.core.formatting import size
from longspan.core.memory import FASTEST
from longspan.core.parallel import ParallelConfig
from longspan.core.validation import LARGEST_COUNT, check_number, format_value
from longspan.plan.cost.communication import Collective, communication
from longspan.plan.cost.peak_memory import HOST_SHARE, Offloaded, offloaded_bytes, peak_memory
from longspan.plan.cost.times import Bottleneck, model_flops, offload_wait, optimizer_seconds, step_times
from longspan.plan.hardware import Hardware
from longspan.plan.job import CostContext, Job
from longspan.plan.limits import GB, notes, pictures_refusal, refusal, unsupported
from longspan.plan.shape import ModelShape


@dataclass(frozen=True)
class Plan:
    """The cost of one job. Each part is computed when it is first read.

    Attributes:
        model: the model.
        job: the job, on a mesh that can hold it.
        hardware: the kind of GPU.
        decisions: what the planner decided where the job left it open, and why.
    """

    model: ModelShape
    job: Job
    hardware: Hardware
    decisions: tuple[str, ...] = ()

    @property
    def mesh(self) -> ParallelConfig:
        return self.job.parallel

    @cached_property
    def c(self) -> CostContext:
        return CostContext(self.model, self.job)

    # Memory.

    @cached_property
    def memory_bytes(self) -> dict[str, int]:
        """Bytes at the peak, max over ranks, by item (`longspan.plan.cost.peak_memory.ITEMS`)."""
        return peak_memory(self.c, self.hardware)

    @property
    def memory_total_bytes(self) -> int:
        return sum(self.memory_bytes.values())

    @property
    def headroom_bytes(self) -> int:
        """Free bytes of the GPU's memory; negative if the plan does not fit."""
        return int(self.hardware.memory_bytes) - self.memory_total_bytes

    @cached_property
    def offloaded(self) -> Offloaded:
        """What is in the host's memory."""
        return offloaded_bytes(self.c, self.hardware)

    @property
    def fits(self) -> bool:
        """Whether it fits in the GPU's memory and the host's."""
        return self.headroom_bytes >= 0 and self.offloaded.fits(self.hardware)

    def short_of(self, most: int = 2) -> tuple[str, ...]:
        """Return which memory is too small, with the `most` largest items of the GPU's; empty if the plan fits."""
        short = []
        if self.headroom_bytes < 0:
            largest = f" (most of it: {format_items(self.memory_bytes, most)})" if most else ""
            short.append(
                f"needs {_rounded(self.memory_total_bytes)} of {_rounded(self.hardware.memory_bytes)} per GPU{largest}"
            )
        if not self.offloaded.fits(self.hardware):
            stored, node = self.offloaded, self.hardware
            short.append(
                f"needs {stored.host_node_bytes / GB:,.0f} GB of {HOST_SHARE * node.host_memory / GB:,.0f} GB of host "
                f"memory per node (of each GPU: {format_items(stored.host_bytes)})"
            )
        return tuple(short)

    @cached_property
    def max_context(self) -> int:
        """The longest context that fits on this mesh, the rest of the job unchanged; 0 if none fits."""
        return longest_context(self.model, self.job, self.hardware)

    # Communication.

    @cached_property
    def comm(self) -> tuple[Collective, ...]:
        return communication(self.c, self.hardware)

    @cached_property
    def comm_seconds(self) -> float:
        return sum(c.seconds for c in self.comm)

    @property
    def comm_bytes_per_gpu_per_layer(self) -> float:
        """Bytes that one GPU sends for the sequence and tensor methods, per layer and micro-batch."""
        method = sum(c.bytes_total for c in self.comm if c.method)
        return method / len(self.model.layers) / self.c.micro_batches

    # Time.

    @cached_property
    def _times(self) -> tuple[float, float]:
        return step_times(self.c, self.hardware)

    @property
    def compute_seconds(self) -> float:
        """Seconds of computing in a step, optimizer included."""
        return self._times[0] + optimizer_seconds(self.c, self.hardware)

    @property
    def exposed_seconds(self) -> float:
        """Seconds of communication in a step that nothing overlaps with."""
        return max(0.0, self.comm_seconds - self._times[1])

    @cached_property
    def _offload_wait(self) -> tuple[float, Bottleneck | None]:
        return offload_wait(self.c, self.hardware, self.offloaded)

    @property
    def offload_seconds(self) -> float:
        """Seconds of a step that wait for the host link."""
        return self._offload_wait[0]

    @property
    def step_seconds(self) -> float:
        """Seconds of a step: computing, exposed communication, exposed offload."""
        return self.compute_seconds + self.exposed_seconds + self.offload_seconds

    @property
    def tokens_per_second(self) -> float:
        tokens = self.job.batch * (1 if self.job.mode == "decode" else self.job.context)
        return tokens / self.step_seconds

    @property
    def mfu(self) -> float:
        """Model FLOP utilisation: FLOPs that the step needs over the peak of all GPUs."""
        return model_flops(self.model, self.job) / (self.step_seconds * self.hardware.flops * self.mesh.ranks)

    # Remarks.

    @property
    def runs(self) -> bool:
        """Whether this version of longspan runs the mesh and what the job asks for."""
        return not unsupported(self.model, self.job)

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """What the user should know: decisions, cautions, what offload takes of the host."""
        decisions = () if self.job.memory == FASTEST else self.decisions
        return (*decisions, *self.cautions, *self._offload_notes())

    @cached_property
    def cautions(self) -> tuple[str, ...]:
        """Notes on what is assumed or changed: replicated KV heads, positions that end early, waits for weights."""
        return (*notes(self.c), *self._weight_notes())

    @property
    def reasons(self) -> tuple[str, ...]:
        """Reasons why it does not fit, and the notes."""
        return (*self.short_of(), *self.notes)

    def _offload_notes(self) -> Iterator[str]:
        stored, (waiting, bottleneck) = self.offloaded, self._offload_wait
        if stored.host_bytes:
            yield (
                f"host memory: {sum(stored.host_bytes.values()) / GB:.1f} GB per GPU, "
                f"{stored.host_node_bytes / GB:,.0f} GB per node ({format_items(stored.host_bytes)})"
            )
        if bottleneck is not None:
            needed, has = bottleneck
            hidden = "it overlaps" if needed <= has else f"{waiting:.1f} s of a step wait for it"
            bandwidth = f"{needed / GB:.1f} GB/s of {has / GB:.0f} GB/s"
            yield f"the host link needs {bandwidth} to overlap with computing: {hidden}"

    def _weight_notes(self) -> Iterator[str]:
        """Yield a note if a step mostly waits for weights: in decoding, FSDP gathers all of them for every token."""
        gathers = [each for each in self.comm if each.op == "all_gather" and each.what.startswith("weights of")]
        gathering = sum(each.seconds for each in gathers)
        if gathering > self.step_seconds / 2:
            unit = {"train": "step", "prefill": "prefill", "decode": "token"}[self.job.mode]
            gathered = size(sum(each.bytes_total for each in gathers))
            yield (
                f"FSDP gathers {gathered} of weights per GPU and {unit}, which takes {gathering:.3g} s, more than half "
                f"of it; a tensor axis gathers less, and --no-fsdp, if all weights fit, gathers nothing"
            )


def format_items(items: dict[str, int], most: int | None = None) -> str:
    """Format items with their sizes, the largest first."""
    largest = sorted((name for name in items if items[name]), key=lambda name: -items[name])[:most]
    return ", ".join(f"{name} {_rounded(items[name])}" for name in largest)


def _rounded(number: float) -> str:
    """Format bytes in GB with one digit; below 0.1 GB in a smaller unit."""
    return f"{number / GB:.1f} GB" if number >= 0.1 * GB else size(number)


@dataclass(frozen=True)
class Search:
    """The plans of all meshes of some GPUs.

    Attributes:
        plans: of every mesh that can hold the job: those that fit first, then by speed.
        rejected: the other meshes, each with its reason.
    """

    plans: tuple[Plan, ...]
    rejected: tuple[tuple[ParallelConfig, str], ...]

    @cached_property
    def fastest(self) -> Plan | None:
        """The fastest plan that fits, even if this version does not run it, or None."""
        return next((plan for plan in self.plans if plan.fits), None)

    @cached_property
    def recommended(self) -> Plan | None:
        """The fastest plan that fits and that this version runs, or None."""
        return next((plan for plan in self.plans if plan.fits and plan.runs), None)


def cost(model: ModelShape, job: Job, hardware: Hardware) -> Plan:
    """Return memory, communication and time of a job.

    Raises:
        LongspanError: if the job's mesh cannot hold it; see `refusal`.
    """
    _check_types(model=model, job=job, hardware=hardware)
    problem = refusal(model, job)
    if problem is not None:
        raise LongspanError(problem)
    return Plan(model, job, hardware)


MOST_GPUS = 1 << 14
"""The most GPUs whose meshes are searched: a highly composite number of them has some 11,000 meshes."""


def search(
    model: ModelShape,
    job: Job,
    gpus: int,
    hardware: Hardware,
    plan_of: Callable[[ModelShape, Job, Hardware], Plan] = cost,
) -> Search:
    """Return the plans of every mesh of `gpus` GPUs, each by `plan_of`, ranked by whether they fit, step time and
    memory. The axes of `job.parallel` are ignored.

    Raises:
        LongspanError: if `gpus` is below 1 or above `MOST_GPUS`.
    """
    _check_types(model=model, job=job, hardware=hardware)
    check_number("gpus", gpus, 1, MOST_GPUS, whole=True)
    plans: list[Plan] = []
    rejected: list[tuple[ParallelConfig, str]] = []
    for one in on_meshes(job, gpus):
        problem = refusal(model, one)
        if problem is None:
            plans.append(plan_of(model, one, hardware))
        else:
            rejected.append((one.parallel, problem))
    plans.sort(key=sort_key)
    return Search(tuple(plans), tuple(rejected))


def sort_key(plan: Plan) -> tuple[bool, float, int]:
    """Return the key that sorts plans: those that fit, the fastest first; then the others, least memory first."""
    return not plan.fits, plan.step_seconds if plan.fits else plan.memory_total_bytes, plan.memory_total_bytes


def _check_types(**values: object) -> None:
    types = {
        "model": (ModelShape, "read_model"),
        "job": (Job, "Job"),
        "hardware": (Hardware, "read_hardware"),
    }
    for name, value in values.items():
        kind, maker = types[name]
        if not isinstance(value, kind):
            raise LongspanError(f"{name} is {format_value(value)}; make one with longspan.plan.{maker}")


def on_meshes(job: Job, gpus: int) -> Iterator[Job]:
    """Yield the job on every mesh: every way to write `gpus` as data x ring x ulysses x tensor."""
    for data in divisors(gpus):
        for ring in divisors(gpus // data):
            for ulysses in divisors(gpus // data // ring):
                yield job.on(data=data, ring=ring, ulysses=ulysses, tensor=gpus // data // ring // ulysses)


def longest_context(model: ModelShape, job: Job, hardware: Hardware, limit: int = 1 << 34) -> int:
    """Return the longest context up to `limit` that fits in memory and in the model's positions; 0 if none fits."""
    _check_types(model=model, job=job, hardware=hardware)
    check_number("limit", limit, 1, LARGEST_COUNT, whole=True)

    def fits(context: int) -> bool:
        return Plan(model, replace(job, context=context), hardware).fits

    low, high = 0, job.parallel.sequence_ranks
    while high < limit and fits(high):
        low, high = high, high * 2
    longest = bisect_largest(fits, low, high)
    if longest and pictures_refusal(model, replace(job, context=longest)) is not None:
        return 0
    return longest if model.furthest is None else min(longest, model.furthest)


def bisect_largest(fits: Callable[[int], bool], low: int, high: int) -> int:
    """Return the largest context that fits, between `low`, which does, and `high`, which does not.

    Memory never decreases as the context grows.
    """
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
