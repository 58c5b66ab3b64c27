"""A byte per element, and a scale per vector: for what is held (a KV cache) and for what travels (an exchange).

A vector is the D elements of one head of one token. Its scale is its largest magnitude over the largest number of the
code, so one outlier costs its own vector's precision alone: an element is off by at most half a step, which is the
vector's largest magnitude / 254 with int8; with fp8 (e4m3) it is 1/16 of the element, or the largest magnitude /
458,752 where that is more. A vector of D elements takes D + 4 bytes. What is not finite makes its vector NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longspan.core.cache_dtype import SCALE_BYTES

Runs = Sequence[tuple[int, int]]
"""What a packed row is made of: so many vectors of so many elements, one run after the other."""


@dataclass(frozen=True)
class QuantizedFormat:
    """A code of one byte per element.

    Attributes:
        code: int8, or a floating-point type of 8 bits.
        largest: the largest number that is written.
    """

    code: torch.dtype
    largest: float

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Bytes `[..., D]`, and scales in fp32 `[..., 1]`, of vectors `[..., D]`."""
        wide = x.float()
        scale = wide.abs().amax(-1, keepdim=True) / self.largest
        wide = wide / torch.where(scale > 0, scale, 1.0)
        if not self.code.is_floating_point:
            wide = wide.round_()
        # By way of bytes: index operations of CPUs know no 8-bit floats.
        return wide.clamp_(-self.largest, self.largest).to(self.code).view(torch.uint8), scale

    def decode(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """Vectors `[..., D]` of what `encode` gave."""
        return (codes.view(self.code).float() * scale).to(dtype)


QUANTIZED_FORMATS = {"int8": QuantizedFormat(torch.int8, 127.0), "fp8": QuantizedFormat(torch.float8_e4m3fn, 448.0)}


_PIECE = 1 << 22
"""Elements that are in fp32 at once while a buffer is coded: what that takes does not grow with the buffer."""


def quantized_width(runs: Runs) -> int:
    """Bytes of a packed row once it is coded."""
    return sum(count * (d + SCALE_BYTES) for count, d in runs)


def quantize_rows(flat: Tensor, rows: int, blocks: Sequence[Runs], code: str) -> Tensor:
    """A buffer of packed rows, coded: uint8, each vector's bytes with its scale behind them.

    Args:
        flat: `rows` rows of the first block, then those of the second, and so on.
        rows: of each block.
        blocks: what a row of each is made of.
        code: a key of `QUANTIZED_FORMATS`.
    """
    out = flat.new_empty(rows * sum(map(quantized_width, blocks)), dtype=torch.uint8)
    for plain, coded, _ in _vectors(flat, out, rows, blocks):
        codes, scale = QUANTIZED_FORMATS[code].encode(plain)
        coded[..., :-SCALE_BYTES] = codes
        coded[..., -SCALE_BYTES:] = scale.contiguous().view(torch.uint8)
    return out


def dequantize_rows(coded: Tensor, rows: int, blocks: Sequence[Runs], code: str, dtype: torch.dtype) -> Tensor:
    """The rows that `quantize_rows` was given, in `dtype` and rounded."""
    out = coded.new_empty(rows * sum(count * d for runs in blocks for count, d in runs), dtype=dtype)
    for plain, vectors, d in _vectors(out, coded, rows, blocks):
        # A copy: four bytes anywhere are no aligned number.
        scale = vectors[..., d:].clone(memory_format=torch.contiguous_format).view(torch.float32)
        plain.copy_(QUANTIZED_FORMATS[code].decode(vectors[..., :d].contiguous(), scale, dtype))
    return out


def _vectors(plain: Tensor, coded: Tensor, rows: int, blocks: Sequence[Runs]) -> list[tuple[Tensor, Tensor, int]]:
    """Views of two flat buffers, run by run and some rows at a time: `[rows, vectors, d]`,
    `[rows, vectors, d + 4]`, and d.
    """
    found = []
    at = coded_at = 0
    if all(runs == blocks[0] for runs in blocks):  # alike on all ranks: one block
        rows, blocks = rows * len(blocks), blocks[:1]
    for block in blocks:
        runs = _merged(block)
        width, wide = sum(count * d for count, d in runs), quantized_width(runs)
        of_plain = plain[at : at + rows * width].view(rows, width)
        of_coded = coded[coded_at : coded_at + rows * wide].view(rows, wide)
        at, coded_at, col, coded_col = at + rows * width, coded_at + rows * wide, 0, 0
        for count, d in runs:
            stop, coded_stop = col + count * d, coded_col + count * (d + SCALE_BYTES)
            vectors = of_plain[:, col:stop].unflatten(1, (count, d))
            bytes_of = of_coded[:, coded_col:coded_stop].unflatten(1, (count, d + SCALE_BYTES))
            pieces = (x.split(max(1, _PIECE // (count * d))) for x in (vectors, bytes_of))
            found += [(*piece, d) for piece in zip(*pieces, strict=True)]
            col, coded_col = stop, coded_stop
    return found


def _merged(runs: Runs) -> list[tuple[int, int]]:
    """Neighbouring runs of vectors of one size as one; none that is empty."""
    out: list[tuple[int, int]] = []
    for count, d in runs:
        if count and out and out[-1][1] == d:
            out[-1] = (out[-1][0] + count, d)
        elif count:
            out.append((count, d))
    return out
