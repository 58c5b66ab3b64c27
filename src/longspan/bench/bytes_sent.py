"""Count the bytes that a rank sends through `torch.distributed`, to compare them with the planner's formulas."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor

# The names in different versions of torch.
_GATHERS = ("all_gather_single", "all_gather_into_tensor")
_SCATTERS = ("reduce_scatter_single", "reduce_scatter_tensor")


@contextlib.contextmanager
def count_bytes_sent() -> Iterator[Counter[str]]:
    """Yield a counter of the bytes that leave this rank, by collective (`longspan.plan.hardware.OPS`).

    Counted is the least that an algorithm must send: 2 (P-1)/P of the tensor for an all-reduce, P-1 parts for an
    all-gather or reduce-scatter, everything but the rank's own part for an all-to-all, all of a message.
    """
    sent: Counter[str] = Counter()
    names = ("all_to_all_single", "all_to_all", "all_reduce", "all_gather", "isend", "batch_isend_irecv", "P2POp")
    original = {name: getattr(dist, name) for name in (*names, *_GATHERS, *_SCATTERS) if hasattr(dist, name)}

    def all_to_all_single(*args: Any, **kw: Any) -> Any:
        given = dict(zip(("output", "input", "output_split_sizes", "input_split_sizes", "group"), args, strict=False))
        given |= kw
        x, group = given["input"], given.get("group")
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        splits = given.get("input_split_sizes") or [x.shape[0] // size] * size
        row = x[:1].numel() if x.shape[0] else 0
        sent["all_to_all"] += (sum(splits) - splits[rank]) * row * x.element_size()
        return original["all_to_all_single"](*args, **kw)

    def all_to_all(outs: list[Tensor], xs: list[Tensor], *args: Any, **kw: Any) -> Any:
        group = args[0] if args else kw.get("group")
        sent["all_to_all"] += sum(x.nbytes for i, x in enumerate(xs) if i != dist.get_rank(group))
        return original["all_to_all"](outs, xs, *args, **kw)

    def all_reduce(tensor: Tensor, *args: Any, **kw: Any) -> Any:
        size = dist.get_world_size(args[1] if len(args) > 1 else kw.get("group"))
        sent["all_reduce"] += 2 * tensor.nbytes * (size - 1) // size
        return original["all_reduce"](tensor, *args, **kw)

    def all_gather(tensor_list: list[Tensor], tensor: Tensor, *args: Any, **kw: Any) -> Any:
        sent["all_gather"] += tensor.nbytes * (dist.get_world_size(args[0] if args else kw.get("group")) - 1)
        return original["all_gather"](tensor_list, tensor, *args, **kw)

    def count_difference(name: str, op: str) -> Any:
        def counted(output: Any = None, input: Any = None, *args: Any, **kw: Any) -> Any:
            out, x = kw.pop("output_tensor", output), kw.pop("input_tensor", input)
            # One is the whole tensor, the other a rank's part.
            sent[op] += abs(out.nbytes - x.nbytes)
            return original[name](out, x, *args, **kw)

        return counted

    def isend(x: Tensor, *args: Any, **kw: Any) -> Any:
        sent["p2p"] += x.nbytes
        return original["isend"](x, *args, **kw)

    def p2p_op(op: Any, *args: Any, **kw: Any) -> Any:
        # P2POp accepts torch's own isend alone; the batch counts the message.
        return original["P2POp"](original["isend"] if op is isend else op, *args, **kw)

    def batch_isend_irecv(ops: list[Any]) -> Any:
        sent["p2p"] += sum(op.tensor.nbytes for op in ops if op.op is original["isend"])
        return original["batch_isend_irecv"](ops)

    counted: dict[str, Any] = {
        "all_to_all_single": all_to_all_single, "all_to_all": all_to_all, "all_reduce": all_reduce,
        "all_gather": all_gather, "isend": isend, "P2POp": p2p_op, "batch_isend_irecv": batch_isend_irecv,
        **{name: count_difference(name, "all_gather") for name in _GATHERS},
        **{name: count_difference(name, "reduce_scatter") for name in _SCATTERS},
    }  # fmt: skip
    try:
        for name in original:
            setattr(dist, name, counted[name])
        yield sent
    finally:
        for name, function in original.items():
            setattr(dist, name, function)
