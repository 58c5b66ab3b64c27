"""Count the bytes that this rank sends, to compare them with formulas."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

# FSDP's collectives, by their names in different versions of torch.
GATHERS = ("all_gather_single", "all_gather_into_tensor")
SCATTERS = ("reduce_scatter_single", "reduce_scatter_tensor")


@dataclass(frozen=True)
class Sent:
    """A collective or message ("p2p", as in `longspan.plan.hardware.OPS`), and the bytes that leave this rank."""

    op: str
    bytes: int


@contextlib.contextmanager
def count_sent() -> Iterator[list[Sent]]:
    """Yield a list that grows by the collectives that this rank calls through `torch.distributed`.

    Counted is the least that an algorithm must send: 2 (P-1)/P of the tensor for an all-reduce, P-1 parts for an
    all-gather or reduce-scatter, everything but the rank's own part for an all-to-all, all of a message.
    """
    log: list[Sent] = []
    names = ("all_to_all_single", "all_to_all", "all_reduce", "all_gather", "isend", "batch_isend_irecv", "P2POp")
    original = {name: getattr(dist, name) for name in (*names, *GATHERS, *SCATTERS) if hasattr(dist, name)}

    def all_to_all_single(*args: Any, **kw: Any) -> Any:
        given = dict(zip(("output", "input", "output_split_sizes", "input_split_sizes", "group"), args, strict=False))
        given |= kw
        x, group = given["input"], given.get("group")
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        splits = given.get("input_split_sizes") or [x.shape[0] // size] * size
        row = x[:1].numel() if x.shape[0] else 0
        log.append(Sent("all_to_all", (sum(splits) - splits[rank]) * row * x.element_size()))
        return original["all_to_all_single"](*args, **kw)

    def all_to_all(outs: list[Tensor], xs: list[Tensor], *args: Any, **kw: Any) -> Any:
        group = args[0] if args else kw.get("group")
        log.append(Sent("all_to_all", sum(x.nbytes for i, x in enumerate(xs) if i != dist.get_rank(group))))
        return original["all_to_all"](outs, xs, *args, **kw)

    def all_reduce(tensor: Tensor, *args: Any, **kw: Any) -> Any:
        size = dist.get_world_size(args[1] if len(args) > 1 else kw.get("group"))
        log.append(Sent("all_reduce", 2 * tensor.nbytes * (size - 1) // size))
        return original["all_reduce"](tensor, *args, **kw)

    def all_gather(tensor_list: list[Tensor], tensor: Tensor, *args: Any, **kw: Any) -> Any:
        size = dist.get_world_size(args[0] if args else kw.get("group"))
        log.append(Sent("all_gather", tensor.nbytes * (size - 1)))
        return original["all_gather"](tensor_list, tensor, *args, **kw)

    def count_difference(name: str, op: str) -> Callable[..., Any]:
        def counted(output: Any = None, input: Any = None, *args: Any, **kw: Any) -> Any:
            out, x = kw.pop("output_tensor", output), kw.pop("input_tensor", input)
            log.append(Sent(op, abs(out.nbytes - x.nbytes)))  # one is the whole tensor, the other a rank's part
            return original[name](out, x, *args, **kw)

        return counted

    def isend(x: Tensor, *args: Any, **kw: Any) -> Any:
        log.append(Sent("p2p", x.nbytes))
        return original["isend"](x, *args, **kw)

    def p2p_op(op: Any, *args: Any, **kw: Any) -> Any:
        # P2POp accepts torch's own isend alone; the batch counts the message.
        return original["P2POp"](original["isend"] if op is isend else op, *args, **kw)

    def batch_isend_irecv(ops: list[Any]) -> Any:
        log.extend(Sent("p2p", op.tensor.nbytes) for op in ops if op.op is original["isend"])
        return original["batch_isend_irecv"](ops)

    counted: dict[str, Any] = {
        "all_to_all_single": all_to_all_single, "all_to_all": all_to_all, "all_reduce": all_reduce,
        "all_gather": all_gather, "isend": isend, "P2POp": p2p_op, "batch_isend_irecv": batch_isend_irecv,
        **{name: count_difference(name, "all_gather") for name in GATHERS},
        **{name: count_difference(name, "reduce_scatter") for name in SCATTERS},
    }  # fmt: skip
    try:
        for name in original:
            setattr(dist, name, counted[name])
        yield log
    finally:
        for name, function in original.items():
            setattr(dist, name, function)
