"""Quantize keys and values of a cache to one byte per element with a scale per vector.

A vector is the D elements of one head of one token. Its scale is its largest magnitude / the format's largest number,
so an outlier costs only its own vector's precision. An element is off by at most half a step: with int8 the vector's
largest magnitude / 254; with fp8 (e4m3) 1/16 of the element, or the largest magnitude / 458,752 if that is more. A
vector takes D + 4 bytes. A vector with a nonfinite element becomes NaN.

A decode step spends more time on launches than on work, so both are few: six to encode, one or two to decode. A call of
compiled code costs the host as much as several launches, so one compiled kernel decodes only a long fp8 cache: it reads
and writes 3 bytes per element instead of 7.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from longspan.compat.torch_api import compiles_fp8

_COMPILED_FROM = 1 << 22
"""Elements of fp8 from which a compiled kernel decodes. By arithmetic, not measured: its bytes take an H100 10 us less,
and the host, for which its call takes 30 us, is ahead of the device with so many."""
_SMALLEST = 2.0**-100  # smallest magnitude that a vector is scaled by: not 0, and its scale is a normal number


@dataclass(frozen=True)
class QuantizedFormat:
    """A format of one byte per element: int8 or a floating-point dtype of 8 bits, and its largest number."""

    dtype: torch.dtype
    largest: float

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Quantize vectors `[..., D]`: return bytes `[..., D]` and fp32 scales `[..., 1]`."""
        x = x.float() if x.itemsize > 4 else x
        scale = torch.linalg.vector_norm(x, torch.inf, -1, keepdim=True, dtype=torch.float32)
        scale.clamp_min_(_SMALLEST).div_(self.largest)
        wide = x / scale  # in fp32; rounding may exceed `largest`, by less than half a step
        if not self.dtype.is_floating_point:
            wide.round_()
        return wide.to(self.dtype).view(torch.uint8), scale  # as uint8: a CPU cannot index 8-bit floats

    def decode(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """Undo `encode`: return vectors `[..., D]` in `dtype`."""
        codes = codes.view(self.dtype)
        if self.dtype.is_floating_point and codes.numel() >= _COMPILED_FROM and compiles_fp8(codes.device):
            return one_kernel()(codes, scale, dtype)
        if self.dtype.is_floating_point:  # exact in every dtype, and 8 bits are not multiplied by fp32
            codes = codes.to(dtype if dtype.itemsize < 4 else torch.float32)
        # The product is computed in fp32 and rounded once, on a GPU without a tensor of it.
        return torch.mul(codes, scale, out=torch.empty_like(codes, dtype=dtype))


def product(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the product of 8-bit floats and scales, computed in fp32 and rounded once."""
    return (codes.float() * scale).to(dtype)


@functools.cache
def one_kernel() -> Callable[[Tensor, Tensor, torch.dtype], Tensor]:
    """Return `product`, compiled; if the compiler fails, warn once and run it as it is."""
    compiled = torch.compile(product, fullgraph=True, dynamic=True)
    broken = list[Exception]()

    def run(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        if not broken:
            try:
                return compiled(codes, scale, dtype)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # a compiler raises any kind
                broken.append(error)
                warnings.warn(f"an fp8 cache is decoded without the compiler, which failed: {error}", stacklevel=2)
        return product(codes, scale, dtype)

    return run


QUANTIZED_FORMATS = {"int8": QuantizedFormat(torch.int8, 127.0), "fp8": QuantizedFormat(torch.float8_e4m3fn, 448.0)}
