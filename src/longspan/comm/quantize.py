"""Quantize to one byte per element with a scale per vector, for KV caches and for all-to-alls.

A vector is the D elements of one head of one token. Its scale is its largest magnitude / the format's largest number,
so an outlier costs only its own vector's precision. An element is off by at most half a step: with int8 the vector's
largest magnitude / 254; with fp8 (e4m3) 1/16 of the element, or the largest magnitude / 458,752 if that is more. A
vector takes D + 4 bytes. A vector with a nonfinite element becomes NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longspan.core.cache_dtype import SCALE_BYTES

Runs = Sequence[tuple[int, int]]
"""Content of a packed row: (number of vectors, elements of a vector), one run after the other."""


@dataclass(frozen=True)
class QuantizedFormat:
    """A format of one byte per element.

    Attributes:
        dtype: int8, or a floating-point dtype of 8 bits.
        largest: largest stored number.
    """

    dtype: torch.dtype
    largest: float

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Quantize vectors `[..., D]`: return bytes `[..., D]` and fp32 scales `[..., 1]`."""
        wide = x.float()
        scale = wide.abs().amax(-1, keepdim=True) / self.largest
        wide = wide / torch.where(scale > 0, scale, 1.0)
        if not self.dtype.is_floating_point:
            wide = wide.round_()
        # As uint8: a CPU's index operations do not support 8-bit floats.
        return wide.clamp_(-self.largest, self.largest).to(self.dtype).view(torch.uint8), scale

    def decode(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """Undo `encode`: return vectors `[..., D]` in `dtype`."""
        return (codes.view(self.dtype).float() * scale).to(dtype)


QUANTIZED_FORMATS = {"int8": QuantizedFormat(torch.int8, 127.0), "fp8": QuantizedFormat(torch.float8_e4m3fn, 448.0)}


_MAX_ELEMENTS = 1 << 22
"""Elements converted to fp32 at a time, so that the temporary memory does not grow with the buffer."""


def quantized_width(runs: Runs) -> int:
    """Return the bytes of a quantized row."""
    return sum(count * (d + SCALE_BYTES) for count, d in runs)


def quantize_rows(flat: Tensor, rows: int, blocks: Sequence[Runs], wire_dtype: str) -> Tensor:
    """Quantize a buffer of packed rows to uint8: each vector's bytes, followed by its scale.

    Args:
        flat: `rows` rows of the first block, then those of the second, and so on.
        rows: number of rows of each block.
        blocks: content of a row of each block.
        wire_dtype: a key of `QUANTIZED_FORMATS`.
    """
    out = flat.new_empty(rows * sum(map(quantized_width, blocks)), dtype=torch.uint8)
    for plain, quantized, _ in _vectors(flat, out, rows, blocks):
        codes, scale = QUANTIZED_FORMATS[wire_dtype].encode(plain)
        quantized[..., :-SCALE_BYTES] = codes
        quantized[..., -SCALE_BYTES:] = scale.contiguous().view(torch.uint8)
    return out


def dequantize_rows(
    quantized: Tensor, rows: int, blocks: Sequence[Runs], wire_dtype: str, dtype: torch.dtype
) -> Tensor:
    """Undo `quantize_rows`: return the rounded rows in `dtype`."""
    out = quantized.new_empty(rows * sum(count * d for runs in blocks for count, d in runs), dtype=dtype)
    for plain, vectors, d in _vectors(out, quantized, rows, blocks):
        # Copy: the four bytes of a scale are not aligned.
        scale = vectors[..., d:].clone(memory_format=torch.contiguous_format).view(torch.float32)
        plain.copy_(QUANTIZED_FORMATS[wire_dtype].decode(vectors[..., :d].contiguous(), scale, dtype))
    return out


def _vectors(plain: Tensor, quantized: Tensor, rows: int, blocks: Sequence[Runs]) -> list[tuple[Tensor, Tensor, int]]:
    """Return views of both buffers, run by run and some rows at a time, and d of each.

    The views are `[rows, vectors, d]` and `[rows, vectors, d + 4]`.
    """
    views = []
    at = quantized_at = 0
    if all(runs == blocks[0] for runs in blocks):  # all blocks are alike: treat them as one
        rows, blocks = rows * len(blocks), blocks[:1]
    for block in blocks:
        runs = _merge_equal(block)
        width, byte_width = sum(count * d for count, d in runs), quantized_width(runs)
        plain_rows = plain[at : at + rows * width].view(rows, width)
        quantized_rows = quantized[quantized_at : quantized_at + rows * byte_width].view(rows, byte_width)
        at, quantized_at = at + rows * width, quantized_at + rows * byte_width
        col = byte_col = 0
        for count, d in runs:
            stop, byte_stop = col + count * d, byte_col + count * (d + SCALE_BYTES)
            vectors = plain_rows[:, col:stop].unflatten(1, (count, d))
            vector_bytes = quantized_rows[:, byte_col:byte_stop].unflatten(1, (count, d + SCALE_BYTES))
            parts = (x.split(max(1, _MAX_ELEMENTS // (count * d))) for x in (vectors, vector_bytes))
            views += [(*part, d) for part in zip(*parts, strict=True)]
            col, byte_col = stop, byte_stop
    return views


def _merge_equal(runs: Runs) -> list[tuple[int, int]]:
    """Merge neighbouring runs with vectors of one size; drop empty runs."""
    out: list[tuple[int, int]] = []
    for count, d in runs:
        if count and out and out[-1][1] == d:
            out[-1] = (out[-1][0] + count, d)
        elif count:
            out.append((count, d))
    return out
