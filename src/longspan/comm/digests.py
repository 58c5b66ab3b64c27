"""Checksums of tensors, 64 bits each: what ranks compare instead of the tensors themselves.

A tensor's bytes are read as words x of 64 bits, in rows of `ROW`; its digest is the sum over rows r and places i of
m_r * w_i * x_ri modulo 2^64, where m and w are odd numbers that look random. An odd factor is invertible, so any change
inside one word, each single flipped bit among them, changes the digest; other changes go unseen with a probability of
about 2^-63. One pass over memory, on the tensor's own device, without a synchronisation with the host.
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
"""Words in a row: the factors of a row stay in a cache."""

_AT_ONCE = 1 << 26  # words that a GPU multiplies at once, in a tensor of their own: 512 MiB


class Digester:
    """Makes digests on one device, where it keeps its factors.

    Args:
        device: of the tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self.factors = _odd_numbers(0, ROW, device)

    def __call__(self, x: Tensor) -> Tensor:
        """The digest of a tensor's values, int64 [] on its device; of a sharded tensor that of this rank's shard.

        Shape and dtype are not in it.
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
        """One digest of several tensors in their order, int64 []."""
        each = [self(x) for x in tensors]
        if not each:
            return self.factors.new_zeros(())
        whole = torch.stack(each)
        return (whole * _odd_numbers(2 * ROW, len(each), whole.device)).sum()


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, those without values (on the meta device) left out."""
    both: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: x for name, x in both.items() if not x.is_meta}


def digests_of(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The digest of every tensor by name. The host waits for them once a device."""
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
    """A number below 2^32 for a text."""
    return zlib.crc32(text.encode())


@torch.no_grad()
def local_part(x: Tensor) -> Tensor:
    """This rank's part of a sharded tensor, or the tensor: its memory, outside of any graph."""
    return (x.to_local() if isinstance(x, DTensor) else x).detach()


def _words(x: Tensor) -> Tensor:
    """The bytes of a tensor as int64 [words], the last filled up with zeros."""
    data = x.contiguous().view(-1).view(torch.uint8)
    if len(data) % 8 or data.storage_offset() % 8:
        data = torch.nn.functional.pad(data, (0, -len(data) % 8)) if len(data) % 8 else data.clone()
    return data.view(torch.int64)


def _odd_numbers(first: int, count: int, device: torch.device) -> Tensor:
    """Odd numbers that look random, the same everywhere: splitmix64 of first, first + 1, ...; int64 [count]."""
    x = torch.arange(first + 1, first + count + 1, device=device) * -0x61C8864680B583EB
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        # A shift of int64 brings the sign in; the mask takes it out.
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return x | 1
