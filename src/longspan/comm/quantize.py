"""Quantize to one byte per element with a scale per vector, for KV caches and for all-to-alls.

A vector is the D elements of one head of one token. Its scale is its largest magnitude / the format's largest number,
so an outlier costs only its own vector's precision. An element is off by at most half a step: with int8 the vector's
largest magnitude / 254; with fp8 (e4m3) 1/16 of the element, or the largest magnitude / 458,752 if that is more. A
vector takes D + 4 bytes. A vector with a nonfinite element becomes NaN.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longspan.core.cache import SCALE_BYTES

Runs = tuple[tuple[int, int], ...]
"""Content of a packed row: (number of vectors, elements of a vector), one run after the other."""


_SMALLEST = 2.0**-149  # above 0 in fp32: a vector of zeros is divided by it


@dataclass(frozen=True)
class QuantizedFormat:
    """A format of one byte per element: int8 or a floating-point dtype of 8 bits, and its largest number."""

    dtype: torch.dtype
    largest: float

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Quantize vectors `[..., D]`: return bytes `[..., D]` and fp32 scales `[..., 1]`."""
        wide = x.float()
        scale = wide.abs().amax(-1, keepdim=True) / self.largest
        wide = wide / scale.clamp_min(_SMALLEST)
        if not self.dtype.is_floating_point:
            wide = wide.round_()
        # As uint8: a CPU's index operations do not support 8-bit floats.
        return wide.clamp_(-self.largest, self.largest).to(self.dtype).view(torch.uint8), scale

    def decode(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """Undo `encode`: return vectors `[..., D]` in `dtype`."""
        codes = codes.view(self.dtype)
        if self.dtype.is_floating_point:  # exact in every dtype, and 8 bits are not multiplied by fp32
            codes = codes.to(dtype if dtype.itemsize < 4 else torch.float32)
        # The product is computed in fp32 and rounded once, on a GPU without a tensor of it.
        return torch.mul(codes, scale, out=torch.empty_like(codes, dtype=dtype))


QUANTIZED_FORMATS = {"int8": QuantizedFormat(torch.int8, 127.0), "fp8": QuantizedFormat(torch.float8_e4m3fn, 448.0)}


_MAX_ELEMENTS = 1 << 22
"""Elements converted to fp32 at a time, so that the temporary memory does not grow with the buffer."""


@functools.lru_cache(maxsize=256)
def row_width(runs: Runs, wire_dtype: str = "exact") -> int:
    """Return the elements of a packed row: with another wire dtype than "exact" its bytes."""
    extra = 0 if wire_dtype == "exact" else SCALE_BYTES
    return sum(count * (d + extra) for count, d in runs)


def quantize_rows(flat: Tensor, rows: int, blocks: Sequence[Runs], wire_dtype: str) -> Tensor:
    """Quantize a buffer of packed rows to uint8: each vector's bytes, followed by its scale. "exact": return `flat`.

    Args:
        flat: `rows` rows of the first block, then those of the second, and so on.
        rows: number of rows of each block.
        blocks: content of a row of each block.
        wire_dtype: "exact", or a key of `QUANTIZED_FORMATS`.
    """
    if wire_dtype == "exact":
        return flat
    out = flat.new_empty(rows * sum(row_width(runs, wire_dtype) for runs in blocks), dtype=torch.uint8)
    for vectors, vector_bytes in _vectors(flat, out, rows, blocks):
        codes, scale = QUANTIZED_FORMATS[wire_dtype].encode(vectors)
        vector_bytes[..., :-SCALE_BYTES] = codes
        vector_bytes[..., -SCALE_BYTES:] = scale.contiguous().view(torch.uint8)
    return out


def dequantize_rows(
    quantized: Tensor, rows: int, blocks: Sequence[Runs], wire_dtype: str, dtype: torch.dtype
) -> Tensor:
    """Undo `quantize_rows`: return the rounded rows in `dtype`."""
    if wire_dtype == "exact":
        return quantized
    out = quantized.new_empty(rows * sum(map(row_width, blocks)), dtype=dtype)
    for vectors, vector_bytes in _vectors(out, quantized, rows, blocks):
        codes, scale = vector_bytes.split([vectors.shape[2], SCALE_BYTES], 2)
        # Copy: the four bytes of a scale are not aligned.
        scale = scale.clone(memory_format=torch.contiguous_format).view(torch.float32)
        vectors.copy_(QUANTIZED_FORMATS[wire_dtype].decode(codes.contiguous(), scale, dtype))
    return out


def _vectors(flat: Tensor, quantized: Tensor, rows: int, blocks: Sequence[Runs]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield views of both buffers, run by run, some rows at a time: `[rows, vectors, d]`, `[rows, vectors, d + 4]`."""
    if all(runs == blocks[0] for runs in blocks):  # treat equal blocks as one
        rows, blocks = rows * len(blocks), blocks[:1]
    runs_of_blocks = [_merge_equal(block) for block in blocks]
    plain = flat.split([rows * row_width(runs) for runs in runs_of_blocks])
    coded = quantized.split([rows * row_width(runs, "int8") for runs in runs_of_blocks])
    for runs, *buffers in zip(runs_of_blocks, plain, coded, strict=True):
        columns = [
            buffer.view(rows, -1).split([count * (d + extra) for count, d in runs], 1)
            for buffer, extra in zip(buffers, (0, SCALE_BYTES), strict=True)
        ]
        for (count, d), vectors, vector_bytes in zip(runs, *columns, strict=True):
            some_rows = max(1, _MAX_ELEMENTS // (count * d))
            yield from zip(
                vectors.unflatten(1, (count, d)).split(some_rows),
                vector_bytes.unflatten(1, (count, d + SCALE_BYTES)).split(some_rows),
                strict=True,
            )


def _merge_equal(runs: Runs) -> Runs:
    """Merge neighbouring runs with vectors of one size; drop empty runs."""
    out: list[tuple[int, int]] = []
    for count, d in runs:
        if count and out and out[-1][1] == d:
            out[-1] = (out[-1][0] + count, d)
        elif count:
            out.append((count, d))
    return tuple(out)
