"""Print how large rounding is on this CPU, compared with the limits of `tests.tolerance`.

python -m tests.attn.rounding

Prints the largest error of attention in units (limit `MARGIN`), over all cases of `tests/attn/attention.py`, 3 seeds,
fp32 and fp64 and every kernel, on one device. Then, for every family of models on the meshes of `ON_4_RANKS`, the error
of each gradient relative to one device's (limit `FACTOR`, and a floor), and relative to its limit (limit 1). Set
ATEN_CPU_CAPABILITY and OMP_NUM_THREADS for other kernels.
"""

from __future__ import annotations

import dataclasses
import os
import warnings

import torch

import longspan
from longspan.core.errors import LongspanError
from tests.attn.attention import CASES, one_device, run
from tests.models import (
    FAMILIES,
    ON_4_RANKS,
    Truth,
    build,
    gradient_excess,
    gradients,
    inputs_of,
    rows_of,
    sharding,
    truth_about,
)
from tests.oracle import errors
from tests.pool import RankPool
from tests.tolerance import FEW


def attention() -> tuple[float, str]:
    """Return the largest error of any output or gradient in units, and its case."""
    sp = one_device()
    worst = (0.0, "")
    for dtype in (torch.float32, torch.float64):
        for name, plain in CASES.items():
            for seed in range(3):
                case = dataclasses.replace(plain, dtype=dtype, seed=seed)
                for kernel in ("auto", "eager", "tiled"):
                    try:
                        found = errors(case, run(case, sp, kernel))
                    except LongspanError:
                        continue  # the kernel does not support the mask
                    for tensor, units in found.items():
                        worst = max(worst, (units, f"{tensor} of {name}, {dtype}, {kernel}, seed {seed}"))
    return worst


def of_model(family: str, truth: Truth) -> list[tuple[float, float, str]]:
    """Return, for every gradient, its error relative to one device's and to its limit, and its name."""
    whole, rows = inputs_of(family), []
    for data, ring, fsdp in ON_4_RANKS:
        sp = sharding(data, ring)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of ranks without heads
            model = longspan.parallelize(build(family), sp, fsdp=fsdp)
        model(**rows_of(whole, sp.data_rank, sp.data_size)).loss.backward()
        found = gradients(model)
        for name, used in gradient_excess(found, truth).items():
            exact = truth.exact.gradients[name]
            apart, noise = (float((x[name].double() - exact).norm()) for x in (found, truth.single.gradients))
            beside = apart / noise if noise and exact.numel() >= FEW else 0.0
            rows.append((beside, used, f"{name} of {family}, data {data} x ring {ring}, FSDP {fsdp}"))
    return rows


def main() -> None:
    print(
        f"torch {torch.__version__}, kernels {torch.backends.cpu.get_cpu_capability()}, "
        f"{os.environ.get('OMP_NUM_THREADS', 'as many as cores')} threads",
        flush=True,
    )
    print("attention: largest error {:.2f} units ({})".format(*attention()), flush=True)
    pool, rows = RankPool(4), []
    for family in FAMILIES:
        rows += pool.run(of_model, family, truth_about(family), timeout=240)[0]
    pool.close()
    beside, used = sorted(rows, reverse=True), sorted((row[1], row[2]) for row in rows)
    print(f"models: {len(rows)} gradients; error beside one device's, of those of {FEW} numbers and more:")
    print(f"  largest {beside[0][0]:.2f} ({beside[0][2]}); 99 in 100 are at most {beside[len(rows) // 100][0]:.2f}")
    print(f"  largest part of the limit {used[-1][0]:.2f} ({used[-1][1]})")


if __name__ == "__main__":
    main()
