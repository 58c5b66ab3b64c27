"""Checksums of tensors change with any bit, position or order, and with nothing else."""

from __future__ import annotations

import pytest
import torch

from longspan.comm.weights import ROW, Digester, digests_of, weights_of

DIGEST = Digester(torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.bool])
def test_every_flipped_bit_changes_the_digest(dtype: torch.dtype) -> None:
    """In sizes around the borders of words and rows, in the first, the last and a random byte."""
    g = torch.Generator().manual_seed(0)
    for count in (1, 3, 7, 8, 9, ROW - 1, 8 * ROW, 8 * ROW + 5, 3 * 8 * ROW + 1):
        x = (torch.rand(count, generator=g) * 3).to(dtype)
        before = int(DIGEST(x))
        assert int(DIGEST(x.clone())) == before
        size = x.nbytes
        for byte in {0, size - 1, int(torch.randint(size, (1,), generator=g))}:
            for bit in (0, 7):
                flipped = x.clone().view(torch.uint8)
                flipped[byte] ^= 1 << bit
                assert int(DIGEST(flipped)) != before, (count, byte, bit)


def test_positions_matter_and_strides_do_not() -> None:
    x = torch.arange(5 * ROW, dtype=torch.float64)
    swapped = x.clone()
    swapped[[1, 2 * ROW]] = x[[2 * ROW, 1]]
    rows = x.view(5, ROW)[[1, 0, 2, 3, 4]]
    assert len({int(DIGEST(y)) for y in (x, swapped, rows, x.flip(0), x.roll(1), x.roll(ROW))}) == 6
    square = torch.randn(40, 60)
    assert int(DIGEST(square.t())) == int(DIGEST(square.t().contiguous()))
    assert int(DIGEST(torch.cat([x[:3], x])[3:])) == int(DIGEST(x))  # not at the start of its storage
    odd = torch.arange(40, dtype=torch.uint8)
    assert int(DIGEST(odd[3:27])) == int(DIGEST(odd[3:27].clone()))


def test_digests_by_name() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 0, device="meta"))
    whole = digests_of(weights_of(model))
    assert set(whole) == {n for n in model.state_dict() if not n.startswith("2.")}
    with torch.no_grad():
        model[0].bias[1] += 1
    now = digests_of(weights_of(model))
    assert [name for name in whole if whole[name] != now[name]] == ["0.bias"]
