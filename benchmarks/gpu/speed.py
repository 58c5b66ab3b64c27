"""Speed of kernels, masks and copies on the device, against its peak."""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import longspan
from benchmarks.gpu.kernels import known, own_flash
from benchmarks.gpu.setup import BELOW, FAILED, MEASURED, OK, STOPPED, Row, Setup, brief
from longspan.attn.mask import Mask
from longspan.core.errors import LongspanError
from tests.fakes import fake_world

HEADS, KV_HEADS, DIM = 32, 8, 128


def _tensors(
    setup: Setup, n: int, heads: int = HEADS, kv_heads: int = KV_HEADS, dim: int = DIM, dtype: Any = torch.bfloat16
) -> list[Tensor]:
    g = torch.Generator(setup.device).manual_seed(0)
    shapes = [(1, n, h, dim) for h in (heads, kv_heads, kv_heads, heads)]
    q, k, v, grad = (torch.randn(s, device=setup.device, generator=g, dtype=dtype) for s in shapes)
    return [q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), grad]


def both_ways(
    setup: Setup, n: int, dtype: torch.dtype = torch.bfloat16, dim: int = 0, **how: Any
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return a forward, and a forward with its backward."""
    heads, kv_heads, usual = (4, 2, 32) if setup.quick else (HEADS, KV_HEADS, DIM)
    q, k, v, grad = _tensors(setup, n, heads, kv_heads, dim or usual, dtype)
    sp = setup.one_device()

    def forward() -> Tensor:
        return longspan.attention(q.detach(), k.detach(), v.detach(), sp, **how)

    def both() -> None:
        q.grad = k.grad = v.grad = None
        longspan.attention(q, k, v, sp, **how).backward(grad)

    return forward, both


def kernel_speed(setup: Setup) -> Iterator[Row]:
    """TFLOP/s of each kernel, forward and backward, by mask; "auto" should be within a tenth of the fastest."""
    long = setup.size(16384, 256)
    tried: list[tuple[str, int, dict[str, Any], Mask]] = [
        ("causal", n, {}, Mask()) for n in ((long,) if setup.quick else (16384, 65536))
    ]
    cuts = torch.linspace(0, long, 33).round().to(torch.int64)
    segments = (tuple(itertools.pairwise(cuts.tolist())),)
    tried += [
        ("a window of an eighth", long, {"window": long // 8}, Mask(window=long // 8)),
        ("32 documents", long, {"cu_seqlens": cuts}, Mask(segments=segments)),
    ]
    tried += [("causal", n, {}, Mask()) for n in (() if setup.quick else (131072, 4096))]
    for what, n, how, mask in tried:
        yield from _speed_of(setup, f"{what}, {n:,} tokens", n, how, mask)


def _speed_of(setup: Setup, what: str, n: int, how: dict[str, Any], mask: Mask) -> Iterator[Row]:
    heads, _, dim = (4, 2, 32) if setup.quick else (HEADS, KV_HEADS, DIM)
    flops = 4 * heads * dim * sum(region.pairs for region in mask.regions(0, n, n))
    best: dict[str, float] = {}
    rows: list[tuple[str, float, float]] = []
    for kernel in ("auto", *known(setup)):
        if kernel == "eager" or not setup.time_left(10.0 if setup.on_gpu else 1.0):
            continue
        own_flash()
        try:
            forward, both = both_ways(setup, n, kernel=kernel, **how)
            f = setup.seconds(forward)
            b = max(setup.seconds(both) - f, 1e-9)
        except LongspanError:  # such as flex without a GPU, which has no backward; or cudnn with a window
            continue
        except Exception as error:
            yield Row(f"{kernel}, {what}", brief(error), FAILED)
            continue
        rows.append((kernel, flops / f / 1e12, 2.5 * flops / b / 1e12))
        best[kernel] = f + b
    if not rows:
        yield Row(what, "", f"{STOPPED}: the item's time was up")
    for kernel, f_rate, b_rate in rows:
        slower = best[kernel] / min(best.values())
        verdict = MEASURED if kernel != "auto" or not setup.on_gpu else OK if slower <= 1.1 else BELOW
        figure = f"forward {f_rate:.4g}, backward {b_rate:.4g} TFLOP/s; {slower:.2f} x the fastest's time"
        yield Row(f"{kernel}, {what}", figure, verdict, {"forward": f_rate, "backward": b_rate})


def many_documents(setup: Setup) -> Iterator[Row]:
    """1,000 documents in one batch: a thousandth of the pairs of a causal mask."""
    n, documents = setup.size(131072, 4000), 1000
    borders = torch.linspace(0, n, documents + 1).round().to(torch.int64)
    _, dense = both_ways(setup, n)
    _, cut = both_ways(setup, n, cu_seqlens=borders)
    causal, packed = setup.seconds(dense, least=2), setup.seconds(cut, least=2)
    setup.wait()
    start = time.perf_counter()
    cut()
    host = time.perf_counter() - start
    setup.wait()
    share = packed / causal
    verdict = MEASURED if not setup.on_gpu else OK if share <= 0.1 else BELOW
    figure = f"{packed * 1e3:.2f} ms, {share:.3f} of the causal one's; the host needs {host * 1e3:.2f} ms"
    yield Row(f"{documents:,} documents in {n:,} tokens, forward + backward", figure, verdict, share)


def block_masks(setup: Setup) -> Iterator[Row]:
    """Cost of FlexAttention's BlockMask in a layer: longspan's call against the kernel with a prepared mask."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def near(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q >= kv) & (q - kv < 1024)

    run = torch.compile(flex_attention, dynamic=False) if setup.on_gpu else flex_attention
    for n in (256,) if setup.quick else (16384, 65536):
        what = f"{n:,} tokens, a mask_mod"
        if not setup.time_left(15.0 if setup.on_gpu else 0.0):
            yield Row(what, "", f"{STOPPED}: the item's time was up")
            continue
        forward, _ = both_ways(setup, n, mask_mod=near, causal=False, kernel="flex")
        sizes = (4, 2, 32) if setup.quick else (HEADS, KV_HEADS, DIM)
        q, k, v = (x.detach().transpose(1, 2) for x in _tensors(setup, n, *sizes)[:3])
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            how = {"device": setup.device, "_compile": setup.on_gpu}
            ready = create_block_mask(near, None, None, n, n, **how)
            build = setup.seconds(partial(create_block_mask, near, None, None, n, n, **how), 2)
            kernel = setup.seconds(partial(run, q, k, v, block_mask=ready, enable_gqa=True))
            ours = setup.seconds(forward)
        share = (ours - kernel) / kernel
        figure = f"{share:.2f} of the kernel's {kernel * 1e3:.2f} ms extra; torch builds one in {build * 1e3:.2f} ms"
        yield Row(what, figure, MEASURED if not setup.on_gpu else OK if share <= 0.05 else BELOW, share)


# --- waits for the device

LAYERS: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"window": 100},
    "long window": {"window": 300},
    "documents": {"documents": True},
    "sinks": {"sinks": True},
    "softcap": {"softcap": 20.0},
    "prefix": {"prefix": 50},
    "chunks": {"chunk_size": 128},
}


def syncs(setup: Setup) -> Iterator[Row]:
    """Waits of the host for the device in one layer, forward and backward: none. Without a GPU, meta tensors stand for
    tensors on one."""
    for name, options in LAYERS.items():
        n = 512
        given: dict[str, Any] = dict(options)
        if "documents" in given:
            given["documents"] = (torch.arange(n) * 7 // n)[None]
        try:
            found = _cuda_waits(setup, n, given) if setup.on_gpu else _counted_waits(n, given)
        except Exception as error:
            yield Row(name, brief(error), FAILED)
            continue
        figure = f"{len(found)}" + (f" ({', '.join(sorted(set(found)))[:120]})" if found else "")
        yield Row(name, figure, BELOW if found else OK, found)


def _cuda_waits(setup: Setup, n: int, given: dict[str, Any]) -> list[str]:
    if given.pop("sinks", False):
        given["sinks"] = torch.zeros(HEADS, device=setup.device, requires_grad=True)
    _, both = both_ways(setup, n, **given)
    both()  # compiled and loaded
    setup.wait()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            both()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return [str(w.message).splitlines()[0] for w in seen if "synchroniz" in str(w.message)]


def _counted_waits(n: int, given: dict[str, Any]) -> list[str]:
    from tests.syncs import on_gpu, one_gpu

    with on_gpu() as found:
        q, k, v = (torch.empty(1, n, h, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True) for h in (8, 2, 2))
        if given.pop("sinks", False):
            given["sinks"] = torch.empty(8, device="cuda", requires_grad=True)
        found.clear()
        longspan.attention(q, k, v, one_gpu(), **given).sum().backward()
    return list(found)


# --- copies around the all-to-all


def copies(setup: Setup) -> Iterator[Row]:
    """Pack and unpack of the all-to-all: bytes read and written over time, against a copy on the same device."""
    n, dtype = setup.size(32768, 512), torch.bfloat16
    source = torch.empty(1, n, HEADS, DIM, dtype=dtype, device=setup.device).normal_()
    into = torch.empty_like(source)
    copy = 2 * source.nbytes / setup.seconds(lambda: into.copy_(source))
    yield Row("a plain copy", f"{copy / 1e9:.0f} GB/s", MEASURED, copy)
    with fake_world(0, 8):  # sends nothing, so only the copies remain
        group = torch.distributed.group.WORLD
        whole = longspan.exchange.seq_to_heads(source, group)
        runs = {
            "seq_to_heads (packs)": lambda: longspan.exchange.seq_to_heads(source, group),
            "heads_to_seq (unpacks)": lambda: longspan.exchange.heads_to_seq(whole, group),
        }
        for what, run in runs.items():
            rate = 2 * source.nbytes / setup.seconds(run)
            verdict = MEASURED if not setup.on_gpu else OK if rate >= 0.85 * copy else BELOW
            figure = f"{rate / 1e9:.0f} GB/s, {rate / copy:.2f} of a plain copy (goal 0.85)"
            yield Row(f"{what}, {n:,} tokens of 8 ranks", figure, verdict, rate / copy)


def host_time(setup: Setup) -> Iterator[Row]:
    """Host time of one attention on tiny tensors: the cost of a layer without computing."""
    for name, options in {"plain": {}, "16 documents": {"cu_seqlens": torch.arange(0, 257, 16)}}.items():
        q, k, v, grad = _tensors(setup, 256, 4, 2, 64)
        sp = setup.one_device()

        def run(q: Any = q, k: Any = k, v: Any = v, grad: Any = grad, sp: Any = sp, options: Any = options) -> None:
            longspan.attention(q, k, v, sp, **options).backward(grad)

        yield Row(f"{name}, 256 tokens, forward + backward", f"{setup.seconds(run, 10) * 1e6:.0f} us", MEASURED)
