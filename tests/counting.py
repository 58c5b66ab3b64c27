"""Counting what is sent: every collective of a piece of code, with the bytes that leave this rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

# FSDP's collectives, by their names in different versions of torch.
GATHERS = ("all_gather_single", "all_gather_into_tensor")
SCATTERS = ("reduce_scatter_single", "reduce_scatter_tensor")
P2P = ("isend", "batch_isend_irecv", "P2POp")


@dataclass(frozen=True)
class Sent:
    """One collective, or one send ("p2p"): its name and the bytes this rank sends to others."""

    op: str
    bytes: int


@contextlib.contextmanager
def count_sent() -> Iterator[list[Sent]]:
    """Record the collectives that the calling rank starts through `torch.distributed`, and what they send.

    Ring formulas for all_reduce (2 (P-1)/P of the tensor), all_gather and reduce_scatter ((P-1) parts); an
    All-to-All sends what is not for itself. Every `isend` is a "p2p" of its own, called alone or in a batch; a receive
    sends nothing and is not recorded.
    """
    log: list[Sent] = []
    names = ("all_to_all_single", "all_reduce", "all_gather", *GATHERS, *SCATTERS, *P2P)
    originals = {name: getattr(dist, name) for name in names if hasattr(dist, name)}

    def all_to_all_single(out: Tensor, x: Tensor, recv: Any = None, send: Any = None, **kw: Any) -> Any:
        group = kw.get("group")
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        splits = send or [x.shape[0] // size] * size
        rest = x[:1].numel() if x.shape[0] else 0
        log.append(Sent("all_to_all", (sum(splits) - splits[rank]) * rest * x.element_size()))
        return originals["all_to_all_single"](out, x, recv, send, **kw)

    def all_reduce(x: Tensor, *args: Any, **kw: Any) -> Any:
        size = dist.get_world_size(kw.get("group"))
        log.append(Sent("all_reduce", 2 * x.numel() * x.element_size() * (size - 1) // size))
        return originals["all_reduce"](x, *args, **kw)

    def all_gather(outs: list[Tensor], x: Tensor, *args: Any, **kw: Any) -> Any:
        size = dist.get_world_size(kw.get("group"))
        log.append(Sent("all_gather", x.numel() * x.element_size() * (size - 1)))
        return originals["all_gather"](outs, x, *args, **kw)

    def into_one(name: str, op: str) -> Any:
        def counted(output: Tensor | None = None, input: Tensor | None = None, *args: Any, **kw: Any) -> Any:
            out = kw.pop("output_tensor", output)
            x = kw.pop("input_tensor", input)
            log.append(Sent(op, abs(out.nbytes - x.nbytes)))
            return originals[name](out, x, *args, **kw)

        return counted

    def isend(x: Tensor, *args: Any, **kw: Any) -> Any:
        log.append(Sent("p2p", x.nbytes))
        return originals["isend"](x, *args, **kw)

    def p2p_op(op: Any, *args: Any, **kw: Any) -> Any:
        # torch knows its own isend only, and calls that one itself: the batch counts it.
        return originals["P2POp"](originals["isend"] if op is isend else op, *args, **kw)

    def batch_isend_irecv(ops: list[Any]) -> Any:
        log.extend(Sent("p2p", op.tensor.nbytes) for op in ops if op.op is originals["isend"])
        return originals["batch_isend_irecv"](ops)

    replacements = {"all_to_all_single": all_to_all_single, "all_reduce": all_reduce, "all_gather": all_gather}
    replacements |= {"isend": isend, "P2POp": p2p_op, "batch_isend_irecv": batch_isend_irecv}
    replacements |= {name: into_one(name, "all_gather") for name in GATHERS if name in originals}
    replacements |= {name: into_one(name, "reduce_scatter") for name in SCATTERS if name in originals}
    try:
        for name, function in replacements.items():
            setattr(dist, name, function)
        yield log
    finally:
        for name, function in originals.items():
            setattr(dist, name, function)
