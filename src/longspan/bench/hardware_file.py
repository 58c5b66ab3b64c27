"""`longspan bench link`: measure the hardware, and write it as a file for the planner and as a table."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from rich.table import Table

    from longspan.bench.compute import Compute
    from longspan.bench.config import BenchConfig
    from longspan.bench.links import Fit, MessageSizes

WIDTH = 100


@dataclass(frozen=True)
class MeasuredHardware:
    """The links and the speed of the ranks, the same on every rank."""

    name: str
    dtype: str  # of matmul and attention
    measured: str  # date, machine and versions
    ranks_per_node: int
    compute: Compute  # speed of one rank
    degrees: Mapping[str, int]  # mesh axis or "fsdp" -> its ranks
    links: Mapping[str, Mapping[str, Fit]]  # mesh axis or "fsdp" -> collective -> its fit
    on_gpu: bool = False


def measure_hardware(
    config: BenchConfig,
    device: torch.device,
    name: str,
    measured: str,
    messages: MessageSizes | None = None,
    compute: Compute | None = None,
) -> MeasuredHardware:
    """Measure the links of the config's mesh, and the speed of a rank unless it is given. Collective.

    Args:
        config: of `bench link`.
        device: this rank's device.
        name: of the hardware.
        measured: date, machine and versions.
        messages: the only collectives and sizes to measure; by default those of the config.
        compute: the speed of a rank.
    """
    from longspan.bench.compute import measure_compute, ranks_on_node
    from longspan.bench.links import measure_links
    from longspan.comm.mesh import init_mesh

    mesh = init_mesh(**config.parallel.degrees, device_type=device.type)
    links = measure_links(config, mesh, device, messages)
    degrees = {**config.parallel.degrees, "fsdp": config.parallel.ranks // config.parallel.tensor}
    return MeasuredHardware(
        name=name,
        dtype=config.dtype,
        measured=measured,
        ranks_per_node=ranks_on_node(),
        compute=measure_compute(config, device) if compute is None else compute,
        degrees={axis: degrees[axis] for axis in links},
        links=links,
        on_gpu=device.type == "cuda",
    )


def as_toml(hardware: MeasuredHardware) -> str:
    """Return the hardware file (schema: docs/reference/json.md)."""
    compute = hardware.compute
    lines = [
        f"name = {_text(hardware.name)}",
        f"memory_bytes = {compute.memory_bytes}",
        f"flops = {_float(compute.flops)}",
        f"memory_bandwidth = {_float(compute.memory_bandwidth)}",
        f"gpus_per_node = {hardware.ranks_per_node}",
        "matmul_efficiency = 1.0  # flops is measured, not from a data sheet",
        f"attention_flops = {_float(compute.attention_flops)}",
        f"attention_forward_flops = {_float(compute.attention_forward_flops)}",
        f"attention_block = {_float(compute.attention_block)}",
        f"attention_width = {_float(compute.attention_width)}",
        # Default for links without `hidden`: a GPU sends while it computes; CPU ranks need their cores for both.
        f"overlaps = {'true' if hardware.on_gpu else 'false'}",
        f"on_cpu = {'false' if hardware.on_gpu else 'true'}",
        f"reserve_bytes = {_float(2e9 if hardware.on_gpu else 0.0)}",
        f"dtype = {_text(hardware.dtype)}",
        f"measured = {_text(hardware.measured)}",
    ]
    for axis, fits in hardware.links.items():
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
    # A JSON string is a TOML string, except for DEL, which JSON does not escape.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _float(value: float) -> str:
    return f"{value:.4e}"  # TOML would read a number without exponent and point as an integer


def print_table(hardware: MeasuredHardware, file: IO[str] | None = None) -> None:
    """Print the hardware in at most 100 columns, by default to stdout."""
    from rich.console import Console

    console = Console(file=file, highlight=False, markup=False)
    console.width = min(console.width, WIDTH) if console.is_terminal else WIDTH
    compute, dtype = hardware.compute, hardware.dtype
    console.print(f"longspan bench link  {hardware.name}: {hardware.measured}")
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
    if hardware.links:
        console.print(_link_table(hardware))
        console.print()
        console.print("time = latency + bytes sent per rank / bandwidth; residual = the fit's median relative error;")
        console.print("hidden = the share of the time that overlaps with computing of the same length")
    else:
        console.print("No axis of the mesh is above 1, so there is no link to measure, only compute and memory.")


def _link_table(hardware: MeasuredHardware) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 2, 0, 0))
    for name in ("axis", "ranks", "collective", "latency", "bandwidth", "residual", "hidden"):
        table.add_column(name, justify="left" if name in ("axis", "collective") else "right")
    for axis, fits in hardware.links.items():
        for number, (op, fit) in enumerate(fits.items()):
            first = number == 0
            table.add_row(
                axis if first else "",
                str(hardware.degrees[axis]) if first else "",
                op,
                f"{fit.latency * 1e6:.1f} us",
                f"{fit.bandwidth / 1e9:.4g} GB/s",
                f"{fit.residual:.0%}",
                "-" if fit.hidden is None else f"{fit.hidden:.0%}",
            )
    return table
