"""Read a batch on the host: masks, documents, positions, trees and grids decide what is computed and sent.

A batch on the host stays there until it is cut, so only my tokens, and the pictures that I encode, move to the GPU. If
the batch is on a GPU, one copy brings all that must be read to the host: the host waits once per forward, not once per
value. A batch that contains only ids and labels is not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longspan.hf.batch.documents import BORDER_KEYS, ID_KEYS, LONGEST_KEYS
from longspan.hf.model.vision import PICTURE_KEYS, PIXEL_KEYS

TREE_KEYS = ("tin", "tout")
_TOKENS = {"input_ids", "labels", "shift_labels", "token_type_ids"}
_READ = _TOKENS | {
    "loss_weights", "position_ids", "attention_mask", "cache_position", *ID_KEYS, *BORDER_KEYS, *LONGEST_KEYS,
    *TREE_KEYS, *(key for key in PICTURE_KEYS if key not in PIXEL_KEYS), "logits_to_keep",
}  # fmt: skip


def read_on_host(batch: Mapping[str, Any], *, ids: bool = False) -> dict[str, Tensor]:
    """Copy the entries of a batch that must be read from a GPU to the host, together; leave out those on the host.

    `ids`: whether the ids of tokens must be read, too.
    """
    given = {key: x for key, x in batch.items() if key in _READ and isinstance(x, Tensor)}
    if not ids and given.keys() <= _TOKENS:
        return {}
    return copy_to_host({key: x for key, x in given.items() if x.device.type != "cpu"})


def copy_to_host(xs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors of one GPU to the host, packed into one."""
    if not xs:
        return {}
    order = sorted(xs, key=lambda key: -xs[key].itemsize)  # so that each begins at a multiple of its elements' size
    flat = [xs[key].detach().contiguous().view(-1).view(torch.uint8) for key in order]
    parts = torch.cat(flat).cpu().split([len(x) for x in flat])
    return {key: part.view(xs[key].dtype).view(xs[key].shape) for key, part in zip(order, parts, strict=True)}


@dataclass(frozen=True, eq=False)
class OnHost:
    """An argument of a forward that FSDP would move to the GPU, whole, before longspan reads it."""

    tensor: Tensor


def hide_from_fsdp(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a forward with what is read or cut on the host as `OnHost`."""
    names = _READ | {*PIXEL_KEYS}  # FSDP would cast pixels, but every tower does so itself
    return {
        key: OnHost(x) if key in names and isinstance(x, Tensor) and x.device.type == "cpu" else x
        for key, x in inputs.items()
    }


def unhide(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Undo `hide_from_fsdp`."""
    return {key: x.tensor if isinstance(x, OnHost) else x for key, x in inputs.items()}
