"""How a cache stores keys and values: exactly, or as one byte per element with a scale per head and token.

The quantized formats are those of `longspan.comm.quantize`. A scale belongs to one key (or value) of one head, so that
appending tokens never rewrites cached ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longspan.comm.quantize import QUANTIZED_FORMATS, QuantizedFormat
from longspan.core.cache_dtype import CACHE_DTYPES
from longspan.core.errors import LongspanError


@dataclass(frozen=True)
class Codec:
    """Stores keys and values exactly.

    Attributes:
        name: the cache dtype (`ShardedCache(dtype=...)`).
    """

    name: str

    def encode(self, x_BKTD: Tensor) -> tuple[Tensor, ...]:
        """Return the stored form of keys or values: tensors `[B, K, T, width]`."""
        return (x_BKTD,)

    def decode(self, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Return keys or values `[B, K, T, D]` from their stored form."""
        return parts[0].to(dtype)


@dataclass(frozen=True)
class QuantizedCodec(Codec):
    """Stores one byte per element, `[B, K, T, D]`, and fp32 scales, `[B, K, T, 1]`."""

    format: QuantizedFormat

    def encode(self, x_BKTD: Tensor) -> tuple[Tensor, ...]:
        return self.format.encode(x_BKTD)

    def decode(self, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        quantized, scale = parts
        return self.format.decode(quantized, scale, dtype)


EXACT = Codec("exact")
_QUANTIZED = {name: QuantizedCodec(name, format) for name, format in QUANTIZED_FORMATS.items()}


def codec_of(name: str) -> Codec:
    """Return the codec of a cache dtype.

    Raises:
        LongspanError: the name is not in `CACHE_DTYPES`.
    """
    if name not in CACHE_DTYPES:
        raise LongspanError(f"dtype={name!r} is unknown; choose {', '.join(CACHE_DTYPES)}")
    return _QUANTIZED.get(name, EXACT)
