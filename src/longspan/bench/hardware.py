"""The hardware file of `longspan bench`: the links of a mesh, and the speed of one rank while all ranks are busy.

Shapes: [S, d] x [d, 4d] for the matmul, [1, H, S, D] for attention.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import IO, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from longspan.bench.command import BenchConfig
from longspan.bench.links import measure_links
from longspan.bench.timing import DTYPES, median_seconds, reduce
from longspan.comm.mesh import init_mesh

FORWARD_AND_BACKWARD = 3.5
"""FLOPs of attention's forward and backward over those of its forward: 2 matmuls, and 5 in a backward that recomputes
the scores, as flash kernels do (Dao, "FlashAttention-2", 2023, section 4.1)."""


@dataclass(frozen=True)
class _Shapes:
    """Shapes large enough for full speed and small enough to take seconds in all."""

    rows: int
    widths: tuple[int, ...]
    tokens: int
    heads: int
    head_dim: int
    copy_bytes: int


_SHAPES = {
    "cuda": _Shapes(4096, (2048, 4096, 8192), tokens=16384, heads=16, head_dim=128, copy_bytes=1 << 30),
    "cpu": _Shapes(512, (256, 512), tokens=4096, heads=4, head_dim=64, copy_bytes=128 << 20),
}


def measure_compute(config: BenchConfig, device: torch.device) -> dict[str, float]:
    """Return the speed and the memory of a rank, of the slowest and the smallest, by the keys of the hardware file.

    The ranks are measured while all are busy. Collective over all ranks.

    - `flops`: FLOP/s of the matmul at its fastest shape.
    - `attention_flops`: FLOP/s of causal attention, forward and backward, in the limit of long sequences, wide heads;
      `attention_forward_flops`: the same of the forward alone.
    - `attention_block`: tokens of a block on the diagonal, of which the kernel computes both halves but needs one: S
      tokens take (1 + attention_block / S) times as long as their FLOPs say.
    - `attention_width`: cost of the softmax, which does not depend on the head_dim D, in units of D: heads take
      (1 + attention_width / D) times as long as their FLOPs say.
    - `memory_bandwidth`: bytes/s read and written by a copy.
    - `memory_bytes`: of the GPU, or of the host divided by its ranks.
    """
    shapes = _SHAPES[device.type]
    options: dict[str, Any] = {"dtype": DTYPES[config.dtype], "device": device}

    def seconds(*runs: Callable[[], object]) -> list[float]:
        return median_seconds(runs, config.rounds, device)

    def matmul(d: int) -> float:
        x_Sd, w_dF = torch.randn(shapes.rows, d, **options), torch.randn(d, 4 * d, **options)
        return 2 * shapes.rows * d * 4 * d / seconds(partial(torch.mm, x_Sd, w_dF))[0]

    def attention(tokens: int, head_dim: int) -> tuple[float, float]:
        """Return FLOP/s of the forward, and of forward and backward."""
        shape = (1, shapes.heads, tokens, head_dim)
        q, k, v = (torch.randn(shape, requires_grad=True, **options) for _ in range(3))
        gradient = torch.randn(shape, **options)

        def forward() -> Tensor:
            with torch.no_grad():
                return scaled_dot_product_attention(q, k, v, is_causal=True)

        def forward_and_backward() -> object:
            return torch.autograd.grad(scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v), gradient)

        alone, both = seconds(forward, forward_and_backward)
        flops = causal_attention_flops(tokens, shapes.heads, head_dim)
        return flops / alone, FORWARD_AND_BACKWARD * flops / both

    S, D = shapes.tokens, shapes.head_dim
    usual, shorter, narrower = attention(S, D), attention(S // 4, D), attention(S, D // 2)
    block, width = overhead(S // 4, shorter[1], S, usual[1]), overhead(D // 2, narrower[1], D, usual[1])
    best = (1 + block / S) * (1 + width / D)
    # Write it, as reading pages that were never written costs a CPU nothing.
    source = torch.empty(shapes.copy_bytes, dtype=torch.uint8, device=device).zero_()
    return {
        "memory_bytes": _memory_bytes(device),
        "flops": max(map(matmul, shapes.widths)),
        "memory_bandwidth": 2 * shapes.copy_bytes / seconds(partial(torch.empty_like(source).copy_, source))[0],
        "attention_flops": usual[1] * best,
        "attention_forward_flops": usual[0] * best,
        "attention_block": block,
        "attention_width": width,
    }


def causal_attention_flops(tokens: int, heads: int, head_dim: int) -> float:
    """Return the FLOPs of causal attention's forward: two matmuls of [S, S, D] per head, half of the pairs."""
    return 4 * tokens * tokens * head_dim * heads / 2


def overhead(small: int, small_flops: float, large: int, large_flops: float) -> float:
    """Return x such that a FLOP at `size` takes (1 + x / size) times as long as in the limit, from two sizes.

    0 if the small size is not slower.
    """
    per_flop = max(0.0, (1 / small_flops - 1 / large_flops) / (1 / small - 1 / large))
    # At most half of the time at the large size: two times within the noise do not determine the limit.
    return min(per_flop / max(1e-30, 1 / large_flops - per_flop / large), float(large)) if per_flop else 0.0


def _memory_bytes(device: torch.device) -> int:
    """Return the memory of the rank that has the least."""
    if device.type == "cuda":
        mine = torch.cuda.mem_get_info(device)[1]
    else:
        mine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks_on_node()
    return int(reduce(torch.tensor(float(mine), dtype=torch.float64), dist.ReduceOp.MIN, device))


def ranks_on_node() -> int:
    """Return the ranks on this machine, from torchrun's environment; 1 for a single process."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


# --- the file


def measure_hardware(config: BenchConfig, device: torch.device, name: str, measured: str) -> dict[str, Any]:
    """Return the content of the hardware file, with `links` by axis and collective. Collective.

    `measured` is the date, machine and versions.
    """
    mesh, on_gpu = init_mesh(**config.parallel.degrees, device_type=device.type), device.type == "cuda"
    links = measure_links(config, mesh, device)
    return {
        "name": name,
        **measure_compute(config, device),
        "gpus_per_node": ranks_on_node(),
        "matmul_efficiency": 1.0,  # flops is measured, not from a data sheet
        # Default for links without `hidden`: a GPU sends while it computes; CPU ranks need their cores for both.
        "overlaps": on_gpu,
        "on_cpu": not on_gpu,
        "reserve_bytes": 2e9 if on_gpu else 0.0,
        "dtype": config.dtype,
        "measured": measured,
        "links": links,
    }


def as_toml(hardware: Mapping[str, Any]) -> str:
    """Return the hardware file (schema: docs/reference/json.md)."""
    tables: dict[str, dict[str, Any]] = {"": {key: value for key, value in hardware.items() if key != "links"}}
    for axis, fits in hardware["links"].items():
        for op, fit in fits.items():
            points = [[round(sent), seconds] for sent, seconds in fit.points]
            more = {"points": points or None, "hidden": fit.hidden}
            table = {"latency": fit.latency, "bandwidth": fit.bandwidth, "residual": fit.residual, **more}
            tables[f"links.{axis}.{op}"] = {key: value for key, value in table.items() if value is not None}
    lines = []
    for name, keys in tables.items():
        lines += ["", f"[{name}]"] if name else []
        lines += [f"{key} = {_toml(value)}" for key, value in keys.items()]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4e}"  # TOML would read a number without exponent and point as an integer
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    # A JSON value is a TOML value, except for DEL in a text, which JSON does not escape.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def print_hardware(hardware: Mapping[str, Any], file: IO[str] | None = None) -> None:
    """Print the speed of a rank and its links in at most 80 columns, by default to stdout."""
    dtype = hardware["dtype"]
    print(f"longspan bench  {hardware['name']}: {hardware['measured']}\n", file=file)
    for label, value in {
        f"matmul, {dtype}": f"{hardware['flops'] / 1e12:.4g} TFLOP/s",
        f"causal attention, {dtype}, forward": f"{hardware['attention_forward_flops'] / 1e12:.4g} TFLOP/s",
        f"causal attention, {dtype}, forward + backward": f"{hardware['attention_flops'] / 1e12:.4g} TFLOP/s",
        "memory bandwidth": f"{hardware['memory_bandwidth'] / 1e9:.4g} GB/s",
        "memory": f"{hardware['memory_bytes'] / 2**30:.4g} GiB",
    }.items():
        print(f"{label:44} {value:>18}  per rank", file=file)
    if not hardware["links"]:
        print("\nNo axis of the mesh is above 1, so there is no link to measure, only compute and memory.", file=file)
        return
    row = "{:8} {:15} {:>12} {:>14} {:>9} {:>7}".format
    print(f"\n{row('axis', 'collective', 'latency', 'bandwidth', 'residual', 'hidden')}", file=file)
    for axis, fits in hardware["links"].items():
        for op, fit in fits.items():
            hidden = "-" if fit.hidden is None else f"{fit.hidden:.0%}"
            figures = f"{fit.latency * 1e6:.1f} us", f"{fit.bandwidth / 1e9:.4g} GB/s", f"{fit.residual:.0%}", hidden
            print(row(axis, op, *figures), file=file)
    print("\ntime = latency + bytes sent per rank / bandwidth; residual = the fit's median", file=file)
    print("relative error; hidden = the share of the time that overlaps with computing", file=file)
