"""How long a save interrupts training, and the cost of checksums and of reading back.

    python benchmarks/checkpoint_stall.py --mib 512

A model of `--mib` MiB under FSDP2 over 2 ranks, with AdamW's state (three times as much on disk), is saved in
alternation by torch's Distributed Checkpoint alone, by `longspan.checkpoint.save` (a checksum of every byte while it is
written, all files read back by the other rank) and by `longspan.checkpoint.Saver` (the stall is until its copy is
made). Then all files are verified. Every save is synced to disk, into an empty folder, which is removed outside of the
timing.
"""

from __future__ import annotations

import shutil
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

import common
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

from longspan import checkpoint

WIDTH = 1024
SAVES = ("torch's, alone", "save", "Saver: stall", "Saver: until complete")


def main(
    mib: int = 512, ranks: int = 2, repeats: int = 5, folder: str | None = None, name: str = "checkpoint-stall"
) -> None:
    """Time saves of `mib` MiB of weights to a `folder` on the disk to be measured, by default a temporary one."""
    env = common.environment(["longspan", "torch"])
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        found = common.run_ranks(measure, ranks, mib, repeats, temporary)
    found["crc32 GB/s"] = checksum_speed()
    title = "Checkpoints: the stall of a save, and the cost of verifying"
    common.write_report(name, title, env, render(found), found)


def measure(mib: int, repeats: int, folder: str) -> dict[str, Any]:
    layers = mib * 2**20 // (4 * WIDTH * WIDTH)
    model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)])
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, WIDTH)).sum().backward()
    optimizer.step()
    seconds: dict[str, list[float]] = {name: [] for name in SAVES}
    saver, where = checkpoint.Saver(), Path(folder)

    def plain() -> None:
        weights, state = get_state_dict(model, optimizer)
        state_dict_saver.save({"model": weights, "optimizer": state}, checkpoint_id=where / "plain")

    def save() -> None:
        checkpoint.save(where / "saved", 1, model, optimizer, {})

    def background() -> None:
        saver.start(where / "background", 1, model, optimizer, {})

    def finish() -> None:
        saver.finish()

    candidates = dict(zip(SAVES, (plain, save, background), strict=False))
    for turn in range(repeats + 1):  # the first is a warm-up
        for name in sorted(candidates, key=lambda name: (list(candidates).index(name) + turn) % len(candidates)):
            start = time.perf_counter()
            timed(seconds[name], turn, candidates[name])
            if name == "Saver: stall":
                finish()
                if turn:
                    seconds["Saver: until complete"].append(time.perf_counter() - start)
            dist.barrier()
            if dist.get_rank() == 0:
                for path in where.iterdir():
                    shutil.rmtree(path)
    save()
    path = where / "saved" / "step-00000001"
    verify: list[float] = []
    for turn in range(repeats + 1):
        timed(verify, turn, lambda: checkpoint.read_verified(path, checkpoint.Ranks()))
    size = sum(file.stat().st_size for file in path.iterdir())
    return {"bytes": size, "seconds": seconds, "verify": verify}


def timed(series: list[float], turn: int, call: Any) -> None:
    dist.barrier()
    start = time.perf_counter()
    call()
    took = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    if turn:
        series.append(took.item())


def checksum_speed() -> float:
    data, best = bytes(64 << 20), float("inf")
    for _ in range(5):
        start = time.perf_counter()
        zlib.crc32(data)
        best = min(best, time.perf_counter() - start)
    return len(data) / best / 1e9


def render(found: dict[str, Any]) -> str:
    size = found["bytes"]
    rows = []
    for name, times in [*found["seconds"].items(), ("verify, from the page cache", found["verify"])]:
        middle = common.median(times)
        ratio = "" if name.startswith("verify") else f"{common.paired_ratio(times, found['seconds'][SAVES[0]]):.2f}"
        rows.append(
            [name, f"{middle:.2f}", f"{min(times):.2f}", f"{max(times):.2f}", f"{size / middle / 1e6:,.0f}", ratio]
        )
    table = common.table(["", "s, median", "least", "most", "MB/s", "of torch's"], rows)
    return (
        f"A checkpoint of {size / 1e6:,.0f} MB.\n\n{table}\n\nCRC-32 of memory, one core: "
        f"{found['crc32 GB/s']:.1f} GB/s. Ranks, and other work of the machine, share its cores and its disk."
    )


if __name__ == "__main__":
    common.command(main, __doc__)
