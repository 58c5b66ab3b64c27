"""Measure longspan on one GPU, or on several: items in order of value, each with figures and verdicts, and a report.

    python -m benchmarks.gpu                            # one GPU, under 8 minutes; also `make gpu`
    python -m benchmarks.gpu --several                  # 2 to 8 GPUs, under 30 minutes; also `make gpus`
    python -m benchmarks.gpu --quick --device cpu       # the same items on shapes for a CPU; `--several`: on 2 ranks

It needs torch, transformers and tyro, and no network. Every item runs in its own process within its own time, so one
that fails, hangs or breaks the GPU's context does not affect the others. The report goes to
`benchmarks/reports/<date>-gpu.md` and `.json`, with `--several` to `<date>-gpus` (or `--out FOLDER`). Exit code: 1 if
a result was wrong or an item failed, else 0.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import common
from benchmarks.gpu import exchange, kernels, layers, model, ranks, steps
from benchmarks.gpu.setup import FAILED, MEASURED, STOPPED, WRONG, Row, Setup, brief

Item = Callable[[Setup], Iterator[Row]]
Items = dict[str, tuple[Item, int, str]]
"""Name -> function, its seconds (`PATIENCE` times as many with `--quick`), heading."""

ITEMS: Items = {
    "accuracy": (kernels.accuracy, 40, "Kernels against fp64"),
    "steps": (steps.steps, 80, "Steps of rank 0 of 8, against the plan"),
    "waits": (layers.waits, 25, "Host waits of vision and video"),
    "mixers": (layers.mixers, 40, "Recurrent layers, with and without flash-linear-attention"),
    "profile": (layers.kernels_of_a_step, 20, "Where a step's time goes"),
    "compiled": (layers.compiled, 45, "Compiled and fused layers"),
    "flash4": (kernels.flash4, 75, "FlashAttention-4"),
    "first": (kernels.first_calls, 15, "First calls at new lengths"),
    "experts": (layers.experts, 15, "Experts"),
    "auto": (layers.auto, 15, 'memory="auto" with half the memory taken'),
    "adapters": (layers.adapters, 25, "LoRA and QLoRA"),
    "speed": (kernels.speed, 50, "TFLOP/s of each kernel"),
    "options": (model.options, 30, "Gradients under every memory option"),
    "decode": (model.decode, 25, "KV caches, token by token"),
    "late": (exchange.late, 40, "Messages as late as possible, four ranks"),
    "nccl": (exchange.nccl, 20, "NCCL in a group of one"),
    "trees": (layers.trees, 30, "Trees, by FlexAttention too"),
    "flex": (kernels.flex, 40, "FlexAttention"),
}
"""Items of one GPU. Some end early and leave their time to the last ones: all together may exceed the whole."""

SEVERAL: Items = {
    "mesh": (ranks.mesh, 180, "The mesh, verified, and its links"),
    "published": (ranks.published, 480, "Steps that others publish"),
    "kinds": (ranks.kinds, 300, "Other kinds of models"),
    "generation": (ranks.generated, 120, "Prefill and decode"),
    "longest": (ranks.longest, 360, "The longest context"),
    "million": (ranks.million, 900, "A million tokens"),
}
"""Items of several GPUs."""

MINUTES = {False: 7.75, True: 29.0}
"""Of all items together, on one GPU and on several."""

MOST_RANKS = 8

PATIENCE = 4

GRACE_S = 15
"""Seconds that an item may exceed its time before it is killed, as it checks the clock between measurements."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), help="by default the GPU if there is one")
    parser.add_argument("--several", action="store_true", help="measure 2 to 8 GPUs together")
    parser.add_argument("--quick", action="store_true", help="small shapes; always on a CPU")
    parser.add_argument("--items", nargs="*", choices=(*ITEMS, *SEVERAL), help="some of them only")
    parser.add_argument("--minutes", type=float, help="for all items; by default 7.75, with --several 29")
    parser.add_argument("--out", type=Path, default=common.REPORTS, help="folder of the report")
    args = parser.parse_args()
    begin = time.monotonic()
    hardware = next(iter(_run(_hardware, Setup("cuda", True, begin + 60), 60))).data or {}
    device = args.device or ("cuda" if hardware.get("gpu") else "cpu")
    gpus = hardware.get("gpus", 0) if device == "cuda" else 2  # on a CPU: ranks
    if gpus == 0:
        raise SystemExit("torch finds no CUDA device here; `--device cpu` runs what a CPU can do")
    if args.several and gpus < 2:
        raise SystemExit("`make gpus` measures 2 to 8 GPUs together, and torch finds 1 here; `make gpu` measures it")
    quick, items = args.quick or device == "cpu", SEVERAL if args.several else ITEMS
    setup = Setup(device, quick, 0, min(gpus, MOST_RANKS) if args.several else 1)
    patience = PATIENCE if quick else 1  # with small shapes all items should run, on a busy machine too
    minutes = args.minutes or MINUTES[args.several]
    found: dict[str, list[Row]] = {}
    for name, (item, limit, title) in items.items():
        if name in (args.items or items):
            left = patience * minutes * 60 - (time.monotonic() - begin)
            found[name] = _show(title, _run(item, setup, min(patience * limit, left)))
    bad = sum(row.verdict in (WRONG, FAILED) for rows in found.values() for row in rows)
    write(args.out, setup, hardware, items, found, time.monotonic() - begin)
    raise SystemExit(1 if bad else 0)


def _show(title: str, rows: Iterator[Row]) -> list[Row]:
    print(f"\n{title}", flush=True)
    shown = []
    for row in rows:
        shown.append(row)
        more = "".join(f"; {label} {x}" for label, x in (("planned", row.planned), ("rival", row.rival)) if x)
        print(f"  {row.verdict:>10}  {row.what}: {row.figure}{more}", flush=True)
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
        "gpu": p.name, "gpus": torch.cuda.device_count(), "gpu_memory_gib": round(p.total_memory / 2**30, 1),
        "capability": f"{p.major}.{p.minor}",
        "cuda": torch.version.cuda, "driver": driver.stdout.strip(),
    })  # fmt: skip


# --- one item, in a child process


def _run(item: Item, setup: Setup, limit_s: float) -> Iterator[Row]:
    """Yield the rows of an item as they arrive; kill it if it exceeds its time by `GRACE_S`."""
    if limit_s <= 1:
        yield Row("not begun", "", f"{STOPPED}: the time of the whole report was up")
        return
    begin = time.monotonic()
    # A fork needs no imports, but cannot use the GPU if this process has: importing torchao does.
    context: Any = multiprocessing.get_context("spawn" if torch.cuda.is_initialized() else "fork")
    receiver, sender = context.Pipe(duplex=False)
    until = begin + limit_s
    child = context.Process(target=_child, args=(item, replace(setup, until=until), sender))
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
    gc.freeze()  # ranks are forks: leave imported objects out of garbage collection
    try:
        for row in item(setup):
            out.send(row)
    except BaseException as error:
        traceback.print_exc()
        out.send(Row("the rest", brief(error), FAILED))


# --- the report


COLUMNS = {
    "what": "what", "figure": "figure", "planned": "planned (over measured)", "rival": "rival",
    "ratio": "of the rival's time", "verdict": "verdict",
}  # fmt: skip
"""Field of a row -> its heading. A table contains the columns that some row fills."""


def write(
    folder: Path, setup: Setup, hardware: dict[str, Any], items: Items, found: dict[str, list[Row]], seconds: float
) -> None:
    """Write `<date>-gpu.md` and `.json`, or `<date>-gpus`."""
    packages = ["longspan", "torch", "transformers", "triton", "flash-attn", "flash-attn-4", "fla-core", "liger-kernel"]
    env = {**common.environment([*packages, "deepspeed"]), **hardware}
    env["command"] = "python -m benchmarks.gpu" + "".join(f" {word}" for word in sys.argv[1:])
    rows = [row for each in found.values() for row in each]
    counts = Counter(row.verdict.split(":")[0] for row in rows)
    gpu = (
        f"{env['gpus']} x {env['gpu']}, {env['gpu_memory_gib']} GiB, CUDA {env['cuda']}, driver {env['driver']}"
        if "gpu" in env
        else "none"
    )
    summary = ", ".join(f"{n} {verdict}" for verdict, n in sorted(counts.items()))
    env["ranks"] = f"{setup.ranks}, device {setup.device}; GPU: {gpu}; {seconds:.0f} s"
    lines = [f"- verdicts: {summary}"]
    compared = [row for row in rows if row.ratio is not None]
    slower = ", ".join(f"{row.what} ({row.ratio:.2f})" for row in compared if (row.ratio or 0) > 1) or "none"
    lines += [f"- slower than the rival, of {len(compared)} compared: {slower}"] if compared else []
    lines.append("")
    for name, each in found.items():
        item, _, title = items[name]
        cells = [{**vars(row), "ratio": "" if row.ratio is None else f"{row.ratio:.3f}"} for row in each]
        used = [field for field in COLUMNS if field in ("what", "figure", "verdict") or any(x[field] for x in cells)]
        table = common.table([COLUMNS[field] for field in used], [[x[field] for field in used] for x in cells])
        lines += [f"## {title}", "", " ".join((item.__doc__ or "").split()), "", table, ""]
    data = {name: [asdict(row) for row in each] for name, each in found.items()}
    on_gpu, name = setup.device == "cuda", "gpu" if setup.ranks == 1 else "gpus"
    title = f"longspan on {f'{setup.ranks} x ' * (setup.ranks > 1)}{env.get('gpu', 'a CPU') if on_gpu else 'a CPU'}"
    common.write_report(name if on_gpu else f"{name}-cpu", title, env, "\n".join(lines), data, folder)
    print(summary)
