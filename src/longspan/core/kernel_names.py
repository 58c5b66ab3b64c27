"""Names of the local attention kernels, as flags take them. `longspan.attn.kernels` has the kernels."""

from __future__ import annotations

from typing import Literal

KernelName = Literal[
    "auto", "sdpa", "flash", "tiled", "block", "flex", "cudnn", "flash3", "flash4", "flash_attn", "eager"
]
