"""64-bit checksums of tensors, which ranks compare instead of the tensors.

A tensor's bytes are read as 64-bit words x, in rows of `ROW`. Its digest is the sum over rows r and columns i of
m_r * w_i * x_ri modulo 2^64, where m and w are pseudo-random odd numbers. An odd factor is invertible, so any change
within one word changes the digest; other changes are missed with a probability of about 2^-63. A digest takes one pass
over memory, on the tensor's device, without synchronising with the host.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

ROW = 1 << 12
"""Words per row, few enough for their factors to stay in cache."""

_AT_ONCE = 1 << 26  # words that a GPU multiplies in one temporary tensor: 512 MiB


class Digester:
    """Compute digests of tensors on one device."""

    def __init__(self, device: torch.device) -> None:
        self.factors = _odd_numbers(0, ROW, device)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the digest of a tensor's bytes (of this rank's shard of a `DTensor`), int64 [] on its device.

        The digest does not depend on shape and dtype.
        """
        words = _words(local_part(x))
        rows = len(words) // ROW
        total = (words[rows * ROW :] * self.factors[: len(words) - rows * ROW]).sum()
        if rows:
            sums = self._sums_of_rows(words[: rows * ROW].view(rows, ROW))
            total = total + (sums * _odd_numbers(ROW, rows, sums.device)).sum()
        return total

    def _sums_of_rows(self, words: Tensor) -> Tensor:
        if words.device.type == "cpu":
            return torch.mv(words, self.factors)
        parts = words.split(max(1, _AT_ONCE // ROW))
        return torch.cat([(part * self.factors).sum(1) for part in parts])

    def joint(self, tensors: Iterable[Tensor]) -> Tensor:
        """Return one digest of several tensors, in order, int64 []."""
        each = [self(x) for x in tensors]
        if not each:
            return self.factors.new_zeros(())
        whole = torch.stack(each)
        return (whole * _odd_numbers(2 * ROW, len(each), whole.device)).sum()


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name, except those on the meta device; with the scales of 4-bit weights."""
    both: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for path, module in model.named_modules():
        scales = getattr(module, "quant_state", None)  # bitsandbytes' layers
        if scales is not None:
            each = {"absmax": scales.absmax, "offset": scales.offset, "nested": scales.nested and scales.state2.absmax}
            both |= {f"{path}.weight.{name}": x for name, x in each.items() if isinstance(x, Tensor)}
    return {name: x for name, x in both.items() if not x.is_meta}


def digests_of(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the digest of every tensor by name; the host waits once per device."""
    out: dict[str, int] = {}
    by_device: dict[torch.device, list[str]] = {}
    for name, x in tensors.items():
        by_device.setdefault(local_part(x).device, []).append(name)
    for device, names in by_device.items():
        digester = Digester(device)
        values = torch.stack([digester(tensors[name]) for name in names]).tolist()
        out |= dict(zip(names, values, strict=True))
    return {name: out[name] for name in tensors}


def digest_of_text(text: str) -> int:
    """Return a checksum of a text, below 2^32."""
    return zlib.crc32(text.encode())


@torch.no_grad()
def local_part(x: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, or the tensor itself, detached."""
    return (x.to_local() if isinstance(x, DTensor) else x).detach()


def _words(x: Tensor) -> Tensor:
    """Return the bytes of a tensor as int64 [words], padded with zeros."""
    data = x.contiguous().view(-1).view(torch.uint8)
    if len(data) % 8 or data.storage_offset() % 8:
        data = torch.nn.functional.pad(data, (0, -len(data) % 8)) if len(data) % 8 else data.clone()
    return data.view(torch.int64)


def _odd_numbers(first: int, count: int, device: torch.device) -> Tensor:
    """Return pseudo-random odd numbers, splitmix64 of first, first + 1, ...; int64 [count]."""
    x = torch.arange(first + 1, first + count + 1, device=device) * -0x61C8864680B583EB
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        # A right shift of int64 copies the sign bit; the mask removes the copies.
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return x | 1
