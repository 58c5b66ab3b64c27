"""How a cache writes keys and values: as they are, or in a byte per element with a scale per head and token.

The code is `longspan.comm.quantize`'s: a scale belongs to one key (or value) of one head, so nothing that is held is
ever written again when more comes.
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
class Coded(Codec):
    """One byte per element.

    Attributes:
        scaled: how.
    """

    scaled: QuantizedFormat

    def encode(self, x_BKTD: Tensor) -> tuple[Tensor, ...]:
        """Bytes `[B, K, T, D]`, and scales in fp32 `[B, K, T, 1]`."""
        return self.scaled.encode(x_BKTD)

    def decode(self, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        codes, scale = parts
        return self.scaled.decode(codes, scale, dtype)


PLAIN = Codec("exact")
_CODED = {name: Coded(name, scaled) for name, scaled in QUANTIZED_FORMATS.items()}


def codec_of(name: str) -> Codec:
    """The codec of a name.

    Raises:
        LongspanError: for another than those of `CACHE_DTYPES`.
    """
    if name not in CACHE_DTYPES:
        raise LongspanError(f"dtype={name!r} is unknown; choose {', '.join(CACHE_DTYPES)}")
    return _CODED.get(name, PLAIN)
