"""The weights that ranks must have alike: compare them by digests when they are sharded, and during training.

Of tensors, 64-bit checksums are compared. A tensor's bytes are read as 64-bit words x, in rows of `ROW`. Its digest is
the sum over rows r and columns i of m_r * w_i * x_ri modulo 2^64, where m and w are pseudo-random odd numbers. An odd
factor is invertible, so any change within one word changes the digest; other changes are missed with a probability of
about 2^-63. A digest takes one pass over memory, on the tensor's device, without synchronising with the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from longspan.comm.agree import Facts, agree, on_every_rank
from longspan.compat.friends_api import float8_layers, float8_scales_span_tokens
from longspan.core.errors import LongspanError
from longspan.core.formatting import differences, format_ranks, listed, odd_ones

if TYPE_CHECKING:
    from longspan.comm.mesh import SequenceSharding

T = TypeVar("T")


# ---------------------------------------------------------------------------------------------------------------------
# The model that `parallelize` gets.


FLOAT8_PER_TOKEN = 'Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp"), whose scales are of single tokens'


def check_float8_scales(model: nn.Module, sp: SequenceSharding) -> None:
    """Raise for linear layers in float8 that would round differently than on one device."""
    layers = float8_layers(model)
    path = next((path for path, layer in layers.items() if float8_scales_span_tokens(layer)), None)
    if path is not None and sp.fsdp_size > 1:
        raise LongspanError(
            f"layer {path} is in float8 with scales over all tokens, but each rank would round its tokens by its own "
            f"scale; use {FLOAT8_PER_TOKEN}"
        )


def agree_on_model(sp: SequenceSharding, check: Callable[[], tuple[T, Mapping[str, str], Mapping[str, int]]]) -> T:
    """Run this rank's own checks, then compare what they found over all ranks. Collective.

    Args:
        sp: the sharding.
        check: raises, or returns its result, facts by their names in errors, and digests of weights by name.

    Raises:
        LongspanError: naming the ranks, and the keys or weights that differ; if `check` raised another kind of
            exception, that one on its own rank.
    """
    what = "cannot parallelize the model"
    return on_every_rank(check, sp.world_group, lambda found: Facts(found[1:], _models_differ), what)[0]


def digests_to_compare(model: nn.Module, sp: SequenceSharding, weights: str) -> dict[str, int]:
    """Return digests of the weights if `parallelize(weights=...)` says that all ranks have the same."""
    return digests_of(weights_of(model)) if sp.world_size > 1 and weights == "same" else {}


def _models_differ(every: list[Any], ranks: list[int]) -> LongspanError:
    facts, weights = zip(*every, strict=True)
    if found := differences(facts, ranks):
        return LongspanError(
            f"parallelize must be given the same on every rank: {listed(found)}; start every rank with the same "
            f"settings, model and versions",
            code="LS104",
        )
    return LongspanError(
        f"the ranks have different weights: {_format_differing(weights, ranks)}; call torch.manual_seed with one seed "
        f"on every rank before the model is made, load the same files everywhere, or copy the weights of rank "
        f"{ranks[0]} to all: parallelize(..., weights='broadcast')",
        code="LS405",
    )


def _format_differing(weights: Sequence[Mapping[str, int]], ranks: Sequence[int]) -> str:
    """Describe which parameters differ, and on which ranks."""
    names = dict.fromkeys(name for each in weights for name in each)
    wrong = {name: odd_ones([each.get(name) for each in weights]) for name in names}
    wrong = {name: odd for name, odd in wrong.items() if odd}
    first = next(iter(wrong))
    same = [rank for i, rank in enumerate(ranks) if i not in wrong[first]]
    also = f" and {len(wrong) - 1} more of {len(names)}" if len(wrong) > 1 else ""
    return f"{first}{also} on {format_ranks([ranks[i] for i in wrong[first]])}, not as on {format_ranks(same)}"


def broadcast_weights(model: nn.Module, sp: SequenceSharding) -> None:
    """Copy the parameters and buffers of the first rank to all ranks. Collective."""
    group = sp.world_group
    if group is None or sp.world_size == 1:
        return
    source = dist.get_process_group_ranks(group)[0]
    with torch.no_grad():
        for x in weights_of(model).values():
            data = x.detach().to(sp.device).contiguous()
            dist.broadcast(data.view(-1).view(torch.uint8), source, group=group)
            if data.data_ptr() != x.data_ptr():
                x.copy_(data)


# ---------------------------------------------------------------------------------------------------------------------
# Replicated weights during training.


class ReplicaCheck:
    """Compare weights that are replicated, so that each rank updates its own copy (no FSDP).

    `every` counts the training forwards from one comparison to the next; 0 for none.
    """

    def __init__(self, every: int) -> None:
        self.every, self.seen = every, 0

    def compare(self, model: nn.Module, sp: SequenceSharding) -> None:
        """Raise on every rank, naming parameter and ranks, in every `every`-th training forward. Collective in it."""
        if not self.every or not (model.training and torch.is_grad_enabled()):
            return
        self.seen += 1
        if self.seen % self.every == 0:
            facts = Facts(digests_of(dict(model.named_parameters())), self._diverged)
            # Ranks of a tensor group hold different weights. All must raise if those of one FSDP group differ.
            on_every_rank(lambda: agree(sp.fsdp_group, facts), sp.world_group if sp.tensor_size > 1 else None)

    def _diverged(self, every: list[Any], ranks: list[int]) -> LongspanError:
        return LongspanError(
            f"the weights of the ranks have diverged: {_format_differing(every, ranks)}; they were equal "
            f"{self.every} training forwards ago (forward {self.seen} now). Either the ranks' optimizers "
            f"differ, or a rank's memory was damaged: continue from an earlier checkpoint, and test that machine",
            code="LS405",
        )


def is_on_cpu(values: Mapping[str, Any]) -> bool:
    """Whether the host can read all tensors of a batch without waiting for a GPU."""
    return all(x.device.type == "cpu" for x in values.values() if isinstance(x, Tensor))


# ---------------------------------------------------------------------------------------------------------------------
# Digests.


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
