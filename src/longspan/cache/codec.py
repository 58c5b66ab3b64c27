"""How a cache writes keys and values: as they are, or in a byte per element with a scale per head and token.

A scale is the largest magnitude of the D elements of one key (or value) of one head, over the largest number of the
code. So one outlier costs its own token's precision alone, and nothing that is held is ever written again when more
comes. A key of D elements takes D + 4 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longspan.core.cached import CODES
from longspan.core.errors import LongspanError


@dataclass(frozen=True)
class Codec:
    """Keys and values as they are.

    Attributes:
        name: as `ShardedCache(dtype=...)` takes it.
    """

    name: str

    def encode(self, x_BKTD: Tensor) -> tuple[Tensor, ...]:
        """What is held of keys or values: tensors `[B, K, T, width]`."""
        return (x_BKTD,)

    def decode(self, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Keys or values `[B, K, T, D]` of what is held."""
        return parts[0].to(dtype)


@dataclass(frozen=True)
class Scaled(Codec):
    """One byte per element.

    Attributes:
        code: int8, or a floating-point type of 8 bits.
        largest: the largest number that is written.
    """

    code: torch.dtype
    largest: float

    def encode(self, x_BKTD: Tensor) -> tuple[Tensor, ...]:
        """Bytes `[B, K, T, D]`, and scales in fp32 `[B, K, T, 1]`."""
        wide = x_BKTD.float()
        scale = wide.abs().amax(-1, keepdim=True) / self.largest
        wide = wide / torch.where(scale > 0, scale, 1.0)
        if not self.code.is_floating_point:
            wide = wide.round_()
        # By way of bytes: index operations of CPUs know no 8-bit floats.
        return wide.clamp_(-self.largest, self.largest).to(self.code).view(torch.uint8), scale

    def decode(self, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        codes, scale = parts
        return (codes.view(self.code).float() * scale).to(dtype)


PLAIN = Codec("exact")
_SCALED = {"int8": Scaled("int8", torch.int8, 127.0), "fp8": Scaled("fp8", torch.float8_e4m3fn, 448.0)}


def codec_of(name: str) -> Codec:
    """The codec of a name.

    Raises:
        LongspanError: for another than those of `CODES`.
    """
    if name not in CODES:
        raise LongspanError(f"dtype={name!r} is unknown; choose {', '.join(CODES)}")
    return _SCALED.get(name, PLAIN)
