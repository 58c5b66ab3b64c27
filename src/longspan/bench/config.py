"""Everything `longspan bench` can be asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional  # imports no torch; tyro looks the annotation up when it makes the help

from longspan.core.checked import LARGEST_COUNT, LARGEST_JOB, LONGEST_WAIT_S, check_number, check_output
from longspan.core.errors import LongspanError

ELEMENT_BYTES = 4
"""Collectives are measured in fp32: gradients are summed in it, and what is only moved has no dtype."""


@dataclass(frozen=True)
class BenchConfig:
    """Measure your machines, and write a hardware file that the planner reads.

    Per axis of the mesh: latency and bandwidth of the collectives. Per rank: matmul, attention and memory. All ranks
    are busy at once. Alone, this starts its ranks itself; under torchrun (several machines) it joins them.
    """

    what: Positional[Literal["link"]]
    """What to measure: link, the links between ranks and the speed of one rank."""
    data_degree: int = 1
    """Size of the mesh's data axis: replicas."""
    ring: int = 1
    """Size of its ring axis."""
    ulysses: int = 1
    """Size of its ulysses axis."""
    tensor: int = 1
    """Size of its tensor axis. An axis of 1 has no link; data x ring x ulysses x tensor ranks in all."""
    nproc: int | None = None
    """Ranks on this machine; by default as many as the degrees need."""
    sizes: tuple[int, ...] = (64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
    """Bytes of a collective's whole tensor (64k, 1M): what a rank exchanges or sums, or has after a gather. Rounded up
    to what the ranks divide."""
    rounds: int = 10
    """How often everything is measured; the median counts."""
    dtype: Literal["bf16", "fp32"] = "bf16"
    """dtype of the matmul and of the attention. Collectives are measured in fp32."""
    out: Path = Path("runs/link.toml")
    """The file to write; its folder is made. With several machines, the first one writes it."""
    name: str = "measured"
    """The hardware's name in the file."""
    timeout: int | None = None
    """Seconds after which a rank that does not come, or is stopped, hung or cut off, ends the job and is named. By
    default 60, with GPUs 300. Loading, a save or an export may take longer."""

    @property
    def degrees(self) -> dict[str, int]:
        """Size of every mesh axis, in the mesh's order."""
        return {"data": self.data_degree, "ring": self.ring, "ulysses": self.ulysses, "tensor": self.tensor}

    @property
    def ranks(self) -> int:
        """Ranks of the whole job."""
        return self.data_degree * self.ring * self.ulysses * self.tensor

    @property
    def mesh(self) -> str:
        """How the ranks were asked for."""
        return f"--data-degree {self.data_degree} --ring {self.ring} --ulysses {self.ulysses} --tensor {self.tensor}"

    def check(self) -> None:
        """Refuse what cannot be measured, as far as every rank can see it alike.

        Raises:
            LongspanError: with the numbers and the way out.
        """
        for name in ("data_degree", "ring", "ulysses", "tensor"):
            check_number(f"--{name.replace('_', '-')}", getattr(self, name), 1, LARGEST_JOB)
        check_number(f"the product of {self.mesh}", self.ranks, 1, LARGEST_JOB)
        check_number("--rounds", self.rounds, 1, LARGEST_COUNT)
        if self.nproc is not None:
            check_number("--nproc", self.nproc, 1, LARGEST_JOB)
        if self.timeout is not None:
            check_number("--timeout", self.timeout, 1, LONGEST_WAIT_S)
        given = " ".join(map(str, self.sizes))
        if wrong := [size for size in self.sizes if size < 1]:
            raise LongspanError(f"--sizes {given}: {wrong[0]} is no number of bytes; give sizes of at least 1 byte")
        for size in self.sizes:
            check_number("--sizes", size, 1, LARGEST_COUNT)
        grain = ELEMENT_BYTES * self.ranks
        different = len({-(-size // grain) for size in self.sizes})
        if self.ranks > 1 and different < 3:
            raise LongspanError(
                f"--sizes {given} gives {different} different sizes, rounded up to a multiple of {grain} bytes for "
                f"{self.ranks} ranks; a latency, a bandwidth and how well they fit need 3, such as --sizes 64k 1M 16M"
            )

    def check_out(self) -> None:
        """Refuse an `out` that could not be written, before anything is measured. Makes nothing.

        Only the machine of the first rank can tell.

        Raises:
            LongspanError: with the reason.
        """
        check_output("--out", self.out, example="link.toml")
