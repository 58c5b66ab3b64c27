"""Rings and USP as four processes on one GPU. NCCL allows one process per GPU, so messages go through the CPU."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import tempfile
import traceback
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import longspan
from benchmarks.gpu.kernels import BF16, FP32, cases, options_of
from benchmarks.gpu.setup import FAILED, OK, STOPPED, WRONG, Row, Setup, brief
from longspan.bench.meters import GATHERS, SCATTERS
from tests.oracle import Case, errors, make
from tests.tolerance import MARGIN

MESHES = {"ring of 4": (1, 4, 1), "ring of 2": (2, 2, 1), "USP 2 x 2": (1, 2, 2), "ulysses of 4": (1, 1, 4)}
MASKS = ("causal", "window", "documents", "sinks", "softcap")


class _Received:
    """A message in flight; `wait` copies it to the device."""

    def __init__(self, work: Any, on_cpu: Tensor, into: Tensor | None) -> None:
        self.work, self.on_cpu, self.into = work, on_cpu, into

    def wait(self, *args: Any) -> bool:
        self.work.wait()
        if self.into is not None:
            self.into.copy_(self.on_cpu)
        return True


@contextlib.contextmanager
def through_the_cpu() -> Iterator[None]:
    """Let `torch.distributed` send tensors of any device over gloo, by copying them to the CPU."""
    names = ("batch_isend_irecv", "all_to_all_single", "all_reduce", *GATHERS, *SCATTERS)
    originals = {name: getattr(dist, name) for name in names if hasattr(dist, name)}

    def batch_isend_irecv(ops: list[Any]) -> list[Any]:
        sends = [op.op is dist.isend for op in ops]
        on_cpu = [
            op.tensor.cpu().clone() if s else torch.empty_like(op.tensor, device="cpu")
            for op, s in zip(ops, sends, strict=True)
        ]
        moved = [
            dist.P2POp(op.op, x, group=op.group, tag=op.tag, group_peer=op.group_peer)
            for op, x in zip(ops, on_cpu, strict=True)
        ]
        works = originals["batch_isend_irecv"](moved)
        return [
            _Received(work, x, None if s else op.tensor)
            for work, x, s, op in zip(works, on_cpu, sends, ops, strict=True)
        ]

    def into_first(name: str) -> Any:
        def run(out: Tensor, x: Tensor, *args: Any, **kw: Any) -> None:
            on_cpu = torch.empty_like(out, device="cpu")
            originals[name](on_cpu, x.cpu(), *args, **kw)
            out.copy_(on_cpu)

        return run

    def all_reduce(x: Tensor, *args: Any, **kw: Any) -> None:
        on_cpu = x.cpu().clone()
        originals["all_reduce"](on_cpu, *args, **kw)
        x.copy_(on_cpu)

    ours: dict[str, Any] = {name: into_first(name) for name in originals if name.split("_")[0] in ("all", "reduce")}
    ours |= {"batch_isend_irecv": batch_isend_irecv, "all_reduce": all_reduce}
    try:
        for name, function in ours.items():
            setattr(dist, name, function)
        yield
    finally:
        for name, function in originals.items():
            setattr(dist, name, function)


def rings(setup: Setup) -> Iterator[Row]:
    """Every mesh of four ranks, forward and backward, in bf16 and fp32, against fp64."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=_rank, args=(rank, f"{folder}/store", setup, sender)) for rank in range(4)]
        for rank in ranks:
            rank.start()
        sender.close()
        try:
            while True:
                yield receiver.recv()
        except EOFError:
            pass
        finally:
            for rank in ranks:
                rank.join(10)
                rank.kill()


def _rank(rank: int, store: str, setup: Setup, out: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=4, store=dist.FileStore(store, 4))
    try:
        with through_the_cpu():
            for what, sizes in MESHES.items():
                for dtype in (BF16, FP32):
                    row = _mesh(what, sizes, dtype, setup)
                    if rank == 0:
                        out.send(row)
    except Exception as error:
        traceback.print_exc()
        out.send(Row(f"rank {rank}", brief(error), FAILED))


def _mesh(what: str, sizes: tuple[int, int, int], dtype: torch.dtype, setup: Setup) -> Row:
    data, ring, ulysses = sizes
    name = f"{what}, {'bf16' if dtype == BF16 else 'fp32'}"
    late = torch.tensor([not setup.time_left(5.0)])
    dist.all_reduce(late, op=dist.ReduceOp.MAX)
    if late:
        return Row(name, "", f"{STOPPED}: the item's time was up")
    mesh = longspan.init_mesh(data=data, ring=ring, ulysses=ulysses)
    sp = longspan.SequenceSharding(mesh, ring_impl="p2p")
    worst, where, runs = 0.0, "", 0
    for mask, case in cases(setup).items():
        if case.dtype == dtype and case.kv_heads == 2 and mask.split(",")[0] in MASKS and runs < len(MASKS):
            case = dataclasses.replace(case, n=case.n - 3, documents=case.documents and case.documents[3:])
            found = errors(case, attend(case, sp, setup.device))
            of, most = max(found.items(), key=lambda item: item[1])
            runs += 1
            if not most <= worst:
                worst, where = most, f"{of} of {mask}"
    most = torch.tensor(worst, dtype=torch.float64)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    figure = f"{float(most):.2f} of {MARGIN:g} at most ({where}; {runs} cases)"
    return Row(name, figure, OK if float(most) <= MARGIN else WRONG, float(most))


def attend(case: Case, sp: longspan.SequenceSharding, device: str) -> dict[str, Tensor]:
    """Return output and gradients of the full sequence, gathered and summed over the ranks, on the CPU."""
    x = {name: t.to(device) for name, t in make(case).items()}
    leaves = {name: t.requires_grad_() for name, t in x.items() if name in ("q", "k", "v", "sinks")}
    q, k, v = (sp.shard(leaves[name]) for name in "qkv")
    out = longspan.attention(q, k, v, sp, sinks=leaves.get("sinks"), **options_of(case, x))
    out.backward(sp.shard(x["grad"]))
    found = {"out": sp.gather(out.detach().cpu(), length=case.n)}
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        found[f"d{name}"] = leaf.grad.detach().cpu()
        dist.all_reduce(found[f"d{name}"], group=sp.group)
    return found
