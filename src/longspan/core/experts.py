"""Which rank computes which experts, if they are sharded over data x sequence."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

Experts = int | Literal["auto"]
"""Ranks of data x sequence over which experts are sharded; "auto": `most_ranks`."""


@dataclass(frozen=True)
class ExpertLayout:
    """Which rank of a group computes which experts."""

    experts: int  # in all
    ranks: int  # over which the weights are sharded: `shard_size` neighbouring experts on each, fewer on the last ones
    size: int  # ranks of a group. A rank computes the shards of the ranks that are a multiple of `size` away.

    @property
    def shard_size(self) -> int:
        return -(-self.experts // self.ranks)

    @property
    def held(self) -> int:
        """Experts that a rank computes, with padding on the last ranks."""
        return self.shard_size * (self.ranks // self.size)

    def of(self, rank: int) -> list[int]:
        """Return the experts of a rank in its order; padding is `experts` or more."""
        starts = range(rank * self.shard_size, self.ranks * self.shard_size, self.size * self.shard_size)
        return [start + i for start in starts for i in range(self.shard_size)]

    def fits(self, fewest: int = 1) -> bool:
        """Whether every rank has experts, and `fewest` places for them."""
        filled = (sum(expert < self.experts for expert in self.of(rank)) for rank in range(self.size))
        return self.size == 1 or (self.held >= fewest and all(filled))

    def slots(self, experts: Any) -> Any:
        """Return `rank * held + place on that rank` of an expert, or of a tensor of them."""
        owner = experts // self.shard_size
        place = owner // self.size * self.shard_size + experts % self.shard_size
        return owner % self.size * self.held + place


def divisors(ranks: int) -> list[int]:
    """Return the sizes of groups that divide the ranks, in order."""
    small = [size for size in range(1, math.isqrt(ranks) + 1) if ranks % size == 0]
    return sorted({*small, *(ranks // size for size in small)})


def most_ranks(experts: int, ranks: int, fewest: int = 1) -> int:
    """Return the largest group that leaves no rank without experts."""
    return max(size for size in divisors(ranks) if ExpertLayout(experts, ranks, size).fits(fewest))
