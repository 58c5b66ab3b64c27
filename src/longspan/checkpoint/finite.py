"""Raise on NaN and infinity in weights and optimizer state, before they are saved and after they are loaded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longspan.checkpoint.ranks import Ranks
from longspan.comm.digests import local_part
from longspan.core.errors import LongspanError


def check_finite(tensors: dict[str, Any], what: str, ranks: Ranks, hint: str) -> None:
    """Raise on every rank if a floating-point tensor holds NaN or infinity on any, naming the first. Collective."""
    local = {name: local_part(x) for name, x in tensors.items() if isinstance(x, Tensor) and x.is_floating_point()}
    # A sum takes a quarter of the time of `isfinite`, and is finite only if all numbers are. It may overflow, so
    # `isfinite` decides if one is not. One stacked tensor: each bool() would wait for a GPU's queue.
    sums = [x.sum(dtype=torch.float32) for x in local.values() if x.numel()]
    problem = None
    if sums and not bool(torch.isfinite(torch.stack([x.to(sums[0].device) for x in sums])).all()):
        problem = next((text for name, x in local.items() if (text := _problem(name, x))), None)
    problems = {rank: text for rank, text in enumerate(ranks.gather(problem)) if text}
    if problems:
        rank = min(problems)
        where = f" on rank {rank}" if ranks.size > 1 else ""
        raise LongspanError(f"{what}: {problems[rank]}{where} (of {len(problems)} ranks with such numbers); {hint}")


def short_name(name: str) -> str:
    """Return a tensor's name as users know it: "model." is that of a checkpoint's part."""
    return name.removeprefix("model.") if name.startswith("model.") else f"the optimizer's {name}"


def _problem(name: str, x: Tensor) -> str | None:
    wrong = ~torch.isfinite(x)
    count = int(wrong.sum())
    return f"{short_name(name)} holds {x[wrong][0].item()} ({count:,} of {x.numel():,} numbers)" if count else None
