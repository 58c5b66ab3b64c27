"""A Llama on the device: gradients under every memory option, and KV caches."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import longspan
from benchmarks.common import DTYPES
from benchmarks.gpu.setup import BELOW, MEASURED, OK, WRONG, Row, Setup
from longspan.cache.static import StaticDecode
from longspan.core.memory import LONGEST, Memory
from longspan.hf.state import state_of
from tests.models import Run, Truth, batch, build, gradient_excess, run_of, truth_by, widened
from tests.tolerance import excess, excess_of_rows

BF16, FP32 = DTYPES["bf16"], DTYPES["fp32"]
LAYERS = 2
SMALL: dict[str, Any] = {
    "hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8, "num_key_value_heads": 4,
    "num_hidden_layers": LAYERS, "vocab_size": 2048, "max_position_embeddings": 1 << 22,
}  # fmt: skip
TINY = {**SMALL, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 64}
OPTIONS = {
    "no option": Memory(),
    "full": Memory(checkpointing="full"),
    "selective": Memory(checkpointing="selective"),
    "grouped": Memory(checkpointing="grouped"),
    "offload to the host": Memory(checkpointing="full", offload="host"),
    "selective, offload to the host": Memory(checkpointing="selective", offload="host"),
    "tiled": Memory(tiled=True),
    "head_slices=2": Memory(head_slices=2),
    "longest": LONGEST,
    "several": Memory(checkpointing="selective", head_slices=2, tiled=True, offload="host"),
}


def llama(setup: Setup, dtype: torch.dtype) -> Any:
    """Return a Llama of two layers with random weights, on the CPU."""
    return build("Llama", **setup.size(SMALL, TINY)).to(dtype)


# --- loss and gradients


def options(setup: Setup) -> Iterator[Row]:
    """Loss and gradients of a Llama of two layers under every memory option, against fp64 on the CPU, in units of the
    limit that the rounding of plain transformers on the same device sets (`tests.tolerance.excess`)."""
    for (name, memory), (dtype_name, dtype) in itertools.product(OPTIONS.items(), DTYPES.items()):
        yield setup.row(f"{name}, {dtype_name}", functools.partial(check, setup, memory, dtype), 3.0)


def check(setup: Setup, memory: Memory, dtype: torch.dtype, fsdp: bool = False) -> tuple[str, str, float]:
    """Return figure, verdict and error of one training step."""
    truth = _truth(setup, dtype)
    model = llama(setup, dtype).to("cpu" if memory.cpu_offload else setup.device)
    model = longspan.parallelize(model, setup.one_device(), fsdp=fsdp, memory=memory).train()
    loss = model(**_batch(setup, setup.device)).loss
    loss.backward()
    found = gradient_excess(_gradients(model), truth)
    found["the loss"] = excess(float(loss.detach()), truth.single.loss, truth.exact.loss, dtype=dtype)
    of, worst = max(found.items(), key=lambda item: item[1])
    return f"{worst:.2f} of 1 at most ({of})", OK if worst <= 1 else WRONG, worst


def _gradients(model: Any) -> dict[str, Tensor]:
    """Return the gradients of a model on one process, on the CPU."""
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: (x.to_local() if isinstance(x, DTensor) else x).cpu() for name, x in grads.items()}


def _batch(setup: Setup, device: str) -> dict[str, Tensor]:
    return {name: x.to(device) for name, x in batch(2, setup.size(1024, 40)).items()}


@functools.cache
def _truth(setup: Setup, dtype: torch.dtype) -> Truth:
    """Return the results of plain transformers: in fp64 on the CPU, in `dtype` on the device."""

    def run(model: Any) -> Run:
        device = "cpu" if model.dtype == torch.float64 else setup.device
        found = run_of(model.to(device), _batch(setup, device))
        return Run(found.loss, found.logits.cpu(), _gradients(model), None)

    return truth_by(llama(setup, dtype), run)


# --- KV caches

CACHES: dict[str, dict[str, Any]] = {
    "exact": {},
    "exact, a CUDA graph": {"cuda_graph": True},
    "exact, in host memory": {"offload": "host"},
    "int8": {"dtype": "int8"},
    "fp8": {"dtype": "fp8"},
}
LOSSY = {"int8": 0.03, "fp8": 0.1}
"""Largest error of all logits, relative to their norm."""
MORE_LAUNCHES = 8
"""A layer and token, beyond those of transformers."""


class _Launches(TorchDispatchMode):
    """Counts operators that start a kernel: all but views and allocations."""

    supports_higher_order_operators = True
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returns = func._schema.returns if hasattr(func, "_schema") else ()
        view = returns and all(x.alias_info is not None and not x.alias_info.is_write for x in returns)
        self.count += not (view or "empty" in str(func) or "_unsafe_view" in str(func))
        return func(*args, **(kwargs or {}))


@dataclass
class _Decoded:
    """Logits of the prompt's last token and of each new one, [tokens, vocabulary], and what a token costs."""

    logits: Tensor
    seconds: float
    launches: int
    waits: int

    def __str__(self) -> str:
        return f"{self.seconds * 1e3:.2f} ms, {self.launches} launches, {self.waits} waits a token"


def decode(setup: Setup) -> Iterator[Row]:
    """A prompt, then token by token, with each kind of KV cache: logits against fp64 on the CPU, within the rounding of
    transformers' own cache on the same device; time, launches and waits of a token."""
    from transformers import DynamicCache

    plain = llama(setup, BF16 if setup.on_gpu else FP32).eval()
    prompt, new = setup.size(2048, 40), setup.size(40, 6)
    ids = torch.randint(64, (1, prompt + new), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        exact = widened(plain)(ids).logits[0, prompt - 1 :]
    model = longspan.parallelize(copy.deepcopy(plain).to(setup.device), setup.one_device(), fsdp=False)
    ids = ids.to(setup.device)
    single = _decoded(setup, plain.to(setup.device), DynamicCache(), ids, prompt)
    yield Row("transformers", str(single), MEASURED)

    def judged(how: dict[str, Any]) -> tuple[str, str, float]:
        found = _decoded(setup, model, _cache(setup, model, room=prompt + new, **how), ids, prompt)
        if (dtype := how.get("dtype")) is None:
            error, limit = excess_of_rows(found.logits, single.logits, exact), 1.0
        else:
            error, limit = float((found.logits.double() - exact).norm() / exact.norm()), LOSSY[dtype]
        more = (found.launches - single.launches) / LAYERS
        figure = f"error {error:.3g} of {limit:g} at most; {found}; {more:g} launches a layer above transformers'"
        verdict = WRONG if not error <= limit else BELOW if found.waits or more > MORE_LAUNCHES else OK
        return figure, verdict, error

    for what, how in CACHES.items():
        yield setup.row(what, functools.partial(judged, how), 3.0)


def _cache(setup: Setup, model: Any, cuda_graph: bool = False, **how: Any) -> longspan.ShardedCache:
    """Return a cache; on a CPU, the step that a graph would replay runs again."""
    cache = longspan.ShardedCache(model, cuda_graph=cuda_graph and setup.on_gpu, **how)
    if cuda_graph and not setup.on_gpu:
        cache.static = StaticDecode(setup.device, lambda run: run)
        state_of(model).forward.replay_decode_steps()
    return cache


def _decoded(setup: Setup, model: Any, cache: Any, ids: Tensor, prompt: int) -> _Decoded:
    logits, launches, times, waits = [], _Launches(), [], []
    with torch.no_grad():
        for at in (0, *range(prompt, ids.shape[1])):
            tokens = ids[:, at : at + 1] if at else ids[:, :prompt]
            with contextlib.ExitStack() as watching:
                if at == prompt + 1:
                    watching.enter_context(launches)
                elif at == prompt + 2:
                    waits = watching.enter_context(setup.waits())
                begin = time.perf_counter()
                out = model(tokens, cache=cache, use_cache=True, logits_to_keep=1)
            setup.wait()
            if at > prompt + 2:
                times.append(time.perf_counter() - begin)
            logits.append(out.logits[0, -1].cpu())
    return _Decoded(torch.stack(logits), statistics.median(times), launches.count, len(waits))
