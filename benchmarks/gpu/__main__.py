"""Measure longspan on one GPU: items in order of value, each with figures and verdicts, and a report.

    python -m benchmarks.gpu                        # under 8 minutes; also `make gpu`
    python -m benchmarks.gpu --quick --device cpu   # the same items on shapes for a CPU

It needs torch, transformers and tyro, one GPU, no network. Every item runs in its own process within its own time, so
one that fails, hangs or breaks the GPU's context does not affect the others. The report goes to
`benchmarks/reports/<date>-gpu.md` and `.json` (or `--out FOLDER`). Exit code: 1 if a result was wrong or an item
failed, else 0.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks import common
from benchmarks.gpu import exchange, kernels, model
from benchmarks.gpu.setup import FAILED, MEASURED, STOPPED, WRONG, Row, Setup, brief

Item = Callable[[Setup], Iterator[Row]]

ITEMS: dict[str, tuple[Item, int, str]] = {
    "accuracy": (kernels.accuracy, 70, "Kernels against fp64"),
    "speed": (kernels.speed, 70, "TFLOP/s of each kernel"),
    "options": (model.options, 50, "Gradients under every memory option"),
    "decode": (model.decode, 30, "KV caches, token by token"),
    "late": (exchange.late, 70, "Messages as late as possible, four ranks"),
    "nccl": (exchange.nccl, 30, "NCCL in a group of one"),
    "memory": (model.memory, 80, "Peak memory of rank 0 of 8, against the plan"),
    "flex": (kernels.flex, 60, "FlexAttention"),
}
"""Name -> function, its seconds (`PATIENCE` times as many with `--quick`), heading."""

PATIENCE = 4

GRACE_S = 15
"""Seconds that an item may exceed its time before it is killed, as it checks the clock between measurements."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), help="by default the GPU if there is one")
    parser.add_argument("--quick", action="store_true", help="small shapes; always on a CPU")
    parser.add_argument("--items", nargs="*", choices=ITEMS, default=list(ITEMS), help="some of them only")
    parser.add_argument("--minutes", type=float, default=7.75, help="for all items")
    parser.add_argument("--out", type=Path, default=common.REPORTS, help="folder of the report")
    args = parser.parse_args()
    begin = time.monotonic()
    hardware = next(iter(_run(_hardware, Setup("cuda", True, begin + 60), 60))).data or {}
    device = args.device or ("cuda" if hardware.get("gpu") else "cpu")
    if device == "cuda" and not hardware.get("gpu"):
        raise SystemExit("torch finds no CUDA device here; `--device cpu` runs what a CPU can do")
    quick = args.quick or device == "cpu"
    patience = PATIENCE if quick else 1  # with small shapes all items should run, on a busy machine too
    found: dict[str, list[Row]] = {}
    for name in args.items:
        item, limit, title = ITEMS[name]
        left = patience * args.minutes * 60 - (time.monotonic() - begin)
        found[name] = _show(title, _run(item, Setup(device, quick, 0), min(patience * limit, left)))
    bad = sum(row.verdict in (WRONG, FAILED) for rows in found.values() for row in rows)
    write(args.out, device, hardware, found, time.monotonic() - begin)
    raise SystemExit(1 if bad else 0)


def _show(title: str, rows: Iterator[Row]) -> list[Row]:
    print(f"\n{title}", flush=True)
    shown = []
    for row in rows:
        shown.append(row)
        print(f"  {row.verdict:>10}  {row.what}: {row.figure}", flush=True)
    return shown


def _hardware(setup: Setup) -> Iterator[Row]:
    """Yield the GPU's properties; run in a child process, as a process that uses the GPU cannot fork others that do."""
    if not torch.cuda.is_available():
        yield Row("", "", MEASURED)
        return
    p = torch.cuda.get_device_properties(0)
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"], capture_output=True, text=True
    )  # fmt: skip
    yield Row("", "", MEASURED, {
        "gpu": p.name, "gpu_memory_gib": round(p.total_memory / 2**30, 1), "capability": f"{p.major}.{p.minor}",
        "cuda": torch.version.cuda, "driver": driver.stdout.strip(),
    })  # fmt: skip


# --- one item, in a child process


def _run(item: Item, setup: Setup, limit_s: float) -> Iterator[Row]:
    """Yield the rows of an item as they arrive; kill it if it exceeds its time by `GRACE_S`."""
    if limit_s <= 1:
        yield Row("not begun", "", f"{STOPPED}: the time of the whole report was up")
        return
    begin = time.monotonic()
    context = multiprocessing.get_context("fork")  # everything is imported, and this process has not used the GPU
    receiver, sender = context.Pipe(duplex=False)
    until = begin + limit_s
    child = context.Process(target=_child, args=(item, Setup(setup.device, setup.quick, until), sender))
    child.start()
    sender.close()
    try:
        while receiver.poll(max(0.0, until + GRACE_S - time.monotonic())):
            yield receiver.recv()
        yield Row("the rest", "", f"{STOPPED}: killed after {time.monotonic() - begin:.0f} s")
    except EOFError:
        child.join(5)
        if child.exitcode:
            yield Row("the rest", f"its process ended with {child.exitcode}", FAILED)
    finally:
        if child.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid or 0, signal.SIGKILL)  # with the ranks that it has started
            child.kill()
        child.join()


def _child(item: Item, setup: Setup, out: Any) -> None:
    os.setsid()
    try:
        for row in item(setup):
            out.send(row)
    except BaseException as error:
        traceback.print_exc()
        out.send(Row("the rest", brief(error), FAILED))


# --- the report


def write(folder: Path, device: str, hardware: dict[str, Any], found: dict[str, list[Row]], seconds: float) -> None:
    """Write `<date>-gpu.md` and `.json`."""
    env = {**common.environment(["longspan", "torch", "transformers", "triton", "flash-attn"]), **hardware}
    env["command"] = "python -m benchmarks.gpu" + "".join(f" {word}" for word in sys.argv[1:])
    rows = [row for each in found.values() for row in each]
    counts = Counter(row.verdict.split(":")[0] for row in rows)
    gpu = (
        f"{env['gpu']}, {env['gpu_memory_gib']} GiB, CUDA {env['cuda']}, driver {env['driver']}"
        if "gpu" in env
        else "none"
    )
    summary = ", ".join(f"{n} {verdict}" for verdict, n in sorted(counts.items()))
    env["ranks"] = f"device {device}; GPU: {gpu}; {seconds:.0f} s"
    lines = [f"- verdicts: {summary}", ""]
    for name, each in found.items():
        item, _, title = ITEMS[name]
        cells = [[row.what, row.figure, row.verdict] for row in each]
        doc = " ".join((item.__doc__ or "").split())
        lines += [f"## {title}", "", doc, "", common.table(["what", "figure", "verdict"], cells), ""]
    data = {name: [asdict(row) for row in each] for name, each in found.items()}
    title = f"longspan on {env.get('gpu', 'a CPU') if device == 'cuda' else 'a CPU'}"
    common.write_report("gpu" if device == "cuda" else "gpu-cpu", title, env, "\n".join(lines), data, folder)
    print(summary)


if __name__ == "__main__":
    main()
