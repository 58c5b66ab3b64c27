"""What `longspan bench link` leaves: a hardware file for the planner, and the same as a table for people."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

from longspan.bench.fit import Fit

if TYPE_CHECKING:
    from rich.table import Table

    from longspan.bench.compute import Compute

WIDTH = 100


@dataclass(frozen=True)
class Measurement:
    """What was measured; the same on every rank.

    Attributes:
        name: the hardware's name.
        dtype: of matmul and attention.
        measured: when, where and by what.
        ranks_per_node: ranks on one machine.
        compute: the speed of one rank.
        degrees: mesh axis, or "fsdp" -> its number of ranks; those that have links.
        links: the same -> collective -> its fit.
        on_gpu: whether ranks are GPUs.
    """

    name: str
    dtype: str
    measured: str
    ranks_per_node: int
    compute: Compute
    degrees: Mapping[str, int]
    links: Mapping[str, Mapping[str, Fit]]
    on_gpu: bool = False


def as_toml(measurement: Measurement) -> str:
    """The hardware file (schema: docs/bench.md)."""
    compute = measurement.compute
    lines = [
        f"name = {_text(measurement.name)}",
        f"memory_bytes = {compute.memory_bytes}",
        f"flops = {_float(compute.flops)}",
        f"memory_bandwidth = {_float(compute.memory_bandwidth)}",
        f"gpus_per_node = {measurement.ranks_per_node}",
        "matmul_efficiency = 1.0  # flops is what was measured, not a data sheet's",
        f"attention_flops = {_float(compute.attention_flops)}",
        f"attention_forward_flops = {_float(compute.attention_forward_flops)}",
        f"attention_block = {_float(compute.attention_block)}",
        f"attention_width = {_float(compute.attention_width)}",
        # Where no `hidden` says it: a GPU sends while it computes, a CPU's ranks need the cores for both. A GPU's
        # libraries keep some memory.
        f"overlaps = {'true' if measurement.on_gpu else 'false'}",
        f"on_cpu = {'false' if measurement.on_gpu else 'true'}",
        f"reserve_bytes = {_float(2e9 if measurement.on_gpu else 0.0)}",
        f"dtype = {_text(measurement.dtype)}",
        f"measured = {_text(measurement.measured)}",
    ]
    for axis, fits in measurement.links.items():
        for op, fit in fits.items():
            lines += [
                "",
                f"[links.{axis}.{op}]",
                f"latency = {_float(fit.latency)}",
                f"bandwidth = {_float(fit.bandwidth)}",
                f"residual = {fit.residual:.4f}",
            ]
            if fit.points:
                lines.append(f"points = [{', '.join(f'[{sent:.0f}, {_float(took)}]' for sent, took in fit.points)}]")
            if fit.hidden is not None:
                lines.append(f"hidden = {fit.hidden:.2f}")
    return "\n".join(lines) + "\n"


def _text(text: str) -> str:
    # JSON's strings are TOML's, but for the one control character that JSON lets stand.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _float(value: float) -> str:
    return f"{value:.4e}"  # with an exponent, because without one or a point TOML would read an integer


def print_table(measurement: Measurement, file: IO[str] | None = None) -> None:
    """Print the measurement in at most 100 columns, to stdout if no `file` is given."""
    from rich.console import Console

    console = Console(file=file, highlight=False, markup=False)
    console.width = min(console.width, WIDTH) if console.is_terminal else WIDTH
    compute, dtype = measurement.compute, measurement.dtype
    console.print(f"longspan bench link  {measurement.name}: {measurement.measured}")
    console.print()
    for label, value in {
        f"matmul, {dtype}": f"{compute.flops / 1e12:.4g} TFLOP/s",
        f"causal attention, {dtype}, forward": f"{compute.attention_forward_flops / 1e12:.4g} TFLOP/s",
        f"causal attention, {dtype}, forward + backward": f"{compute.attention_flops / 1e12:.4g} TFLOP/s",
        "memory bandwidth": f"{compute.memory_bandwidth / 1e9:.4g} GB/s",
        "memory": f"{compute.memory_bytes / 2**30:.4g} GiB",
    }.items():
        console.print(f"{label:44} {value:>18}  per rank")
    console.print()
    if measurement.links:
        console.print(_link_table(measurement))
        console.print()
        console.print("time = latency + bytes sent per rank / bandwidth; residual = the fit's median relative error;")
        console.print("hidden = the share of the time that computing of the same length runs beside")
    else:
        console.print("No axis of the mesh is above 1, so there is no link to measure: compute and memory alone.")


def _link_table(measurement: Measurement) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 2, 0, 0))
    for name in ("axis", "ranks", "collective", "latency", "bandwidth", "residual", "hidden"):
        table.add_column(name, justify="left" if name in ("axis", "collective") else "right")
    for axis, fits in measurement.links.items():
        for number, (op, fit) in enumerate(fits.items()):
            first = number == 0
            table.add_row(
                axis if first else "",
                str(measurement.degrees[axis]) if first else "",
                op,
                f"{fit.latency * 1e6:.1f} us",
                f"{fit.bandwidth / 1e9:.4g} GB/s",
                f"{fit.residual:.0%}",
                "-" if fit.hidden is None else f"{fit.hidden:.0%}",
            )
    return table
