"""Decode steps of constant shapes (`cuda_graph=True`): equal to plain transformers' on CPUs, without a graph.

In place of a graph, the captured function runs again. A graph replays kernels with the arguments of the capture; so
operators, shapes and numbers must be those of any later step.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import longspan
from longspan.attn.kernels.base import SoftmaxAccumulator
from longspan.attn.score import Scores
from longspan.cache import static
from longspan.cache.static import FlashDecode, FormulaDecode, Slots, StaticDecode
from longspan.core import cache as kv_placement
from longspan.core.errors import LongspanError
from longspan.generate.config import GenerateConfig
from longspan.hf.cache import kv_cache
from longspan.hf.state import state_of
from tests.fakes import fake_world
from tests.flags import make
from tests.generate.generating import PROMPT, check_generated, generated, made, parallelized, plain, prompt
from tests.pool import RankPool
from tests.syncs import Seen, gpu_llama, on_gpu, one_gpu

NEW = 20
OPTIONS = (("max_new_tokens", NEW),)


def _same(run: Callable[[], list[Any]]) -> Callable[[], list[Any]]:
    run()  # as before a capture
    return run


def _static(model: Any, capture: Any = _same, device: str = "cpu", **options: Any) -> longspan.ShardedCache:
    """Return a cache whose decode steps have constant shapes."""
    cache = longspan.ShardedCache(model, **options)
    cache.static = StaticDecode(torch.device(device), capture)
    state_of(model).forward.replay_decode_steps()
    return cache


# ---------------------------------------------------------------------------------------------------------------------
# Tokens and logits.


def _generated(model: Any, inputs: dict[str, Tensor], expected: Any) -> None:
    captures: list[int] = []

    def capture(run: Any) -> Any:
        captures.append(cache.get_seq_length())
        return _same(run)

    cache = _static(model, capture)
    check_generated(generated(model, {**inputs, "past_key_values": cache}, max_new_tokens=NEW), expected)
    assert captures == [PROMPT, PROMPT + 9], captures  # eight steps, an ordinary one, and the next capture


def _on_meshes(name: str, rings: tuple[int, ...], cases: list[Any]) -> None:
    with mock.patch.object(static, "_FIRST", 8), mock.patch.object(kv_placement, "GENERATED_RUN", 3):
        for ring in rings:
            model, _ = parallelized(name, ring, fsdp=False)
            for inputs, expected in cases:
                _generated(model, inputs, expected)


@pytest.mark.parametrize(
    ("name", "rings"),
    [
        ("Llama", (1, 2, 4)),
        ("Gemma3Text", (2,)),
        ("Gemma2", (1,)),
        ("GptOss", (4,)),
        ("Llama4Text", (2,)),
        ("DeepseekV3", (2,)),
    ],
)
def test_tokens_on_4_ranks(pool4: RankPool, name: str, rings: tuple[int, ...]) -> None:
    """With padded rows, windows, chunks, sinks, softcaps and latent vectors; ranks take turns in storing tokens."""
    cases = [(prompt(3, padded=True), plain(name, 3, True, OPTIONS))]
    if name == "Llama":
        cases.append((prompt(), plain(name, 1, False, OPTIONS)))
    pool4.run(_on_meshes, name, rings, cases)


def _on_a_tensor_axis(expected: Any) -> None:
    sp = longspan.SequenceSharding(longspan.init_mesh(ring=2, tensor=2))
    with mock.patch.object(static, "_FIRST", 8):
        _generated(longspan.parallelize(made("Llama"), sp, fsdp=False), prompt(3, padded=True), expected)


def test_tokens_on_a_tensor_axis(pool4: RankPool) -> None:
    pool4.run(_on_a_tensor_axis, plain("Llama", 3, True, OPTIONS))


def _one() -> longspan.SequenceSharding:
    return longspan.SequenceSharding(longspan.init_mesh())


def _alone(name: str = "Llama") -> Any:
    return longspan.parallelize(made(name), _one(), fsdp=False)


def test_turns_and_crops() -> None:
    """Further turns and a crop between steps of constant shapes; each is captured anew."""
    model, plain_model, ids = _alone(), made("Llama"), prompt()["input_ids"]
    cache, plain_ids = _static(model), ids
    for more in (prompt(1, 9, seed=1)["input_ids"], prompt(1, 1, seed=2)["input_ids"]):
        ids = model.generate(ids, past_key_values=cache, max_new_tokens=5, do_sample=False, eos_token_id=None)
        plain_ids = plain_model.generate(plain_ids, max_new_tokens=5, do_sample=False, eos_token_id=None)
        assert torch.equal(ids, plain_ids)
        ids, plain_ids = torch.cat([ids, more], 1), torch.cat([plain_ids, more], 1)
    with torch.no_grad():
        for span in ((30, 31), (31, 32), (20, 32), (32, 33), (33, 34)):  # behind (31, 32) and (20, 32), 32 tokens each
            cache.crop(span[0])
            logits = model(input_ids=ids[:, slice(*span)], past_key_values=cache).logits[:, -1]
            expected = plain_model(input_ids=ids[:, : span[1]]).logits[:, -1]
            torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------------------------------------------------------------
# Two steps are the same to a GPU.


class _Trace(TorchDispatchMode):
    """Records operators with everything but the content of tensors, and constants with it."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tree_map(
            lambda x: (x.dtype, tuple(x.shape), x.stride()) if isinstance(x, Tensor) else x, (args, kwargs)
        )
        if func is torch.ops.aten.lift_fresh.default:  # torch.tensor(numbers)
            given = args[0].tolist()
        self.operators.append(re.sub(r" at 0x\w+", "", f"{func.name()} {given}"))
        return func(*args, **kwargs or {})


def _traces(model: Any, inputs: dict[str, Tensor], steps: int, **options: Any) -> list[list[str]]:
    """Return the operators of some steps, each captured for itself."""
    traces: list[list[str]] = []

    def capture(run: Callable[[], list[Any]]) -> Callable[[], list[Any]]:
        run()
        with _Trace() as trace:
            out = run()
        traces.append(trace.operators)
        return lambda: out

    cache = _static(model, capture, **options)
    with torch.no_grad():
        model(**inputs, past_key_values=cache, logits_to_keep=1)
        cache.generated_from = inputs["input_ids"].shape[1]
        for step in range(steps):
            mask = torch.ones(len(inputs["input_ids"]), cache.get_seq_length() + 1, dtype=torch.int64)
            model(input_ids=inputs["input_ids"][:, :1], past_key_values=cache, attention_mask=mask, logits_to_keep=1)
            assert len(traces) == step + 1
            assert cache.static is not None
            cache.static._replay = None
    return traces


@contextlib.contextmanager
def _no_messages() -> Iterator[None]:
    names = ("all_gather_into_tensor", "all_gather_single", "all_to_all_single", "broadcast", "all_reduce")
    nothing = {name: lambda *_, **__: None for name in names if hasattr(dist, name)}
    with fake_world(0, 2), mock.patch.multiple(dist, **nothing):
        yield


@pytest.mark.parametrize(
    "name", ["Llama", "Gemma3Text", "Gemma2", "GptOss", "Llama4Text", "DeepseekV3", "Mistral", "GPT2"]
)
def test_steps_have_the_same_operators(name: str) -> None:
    """Also where the next token goes to another rank, and windows and chunks have moved on."""
    first, *others = _traces(_alone(name), prompt(3, padded=True), 4)
    assert len(first) > 50 and all(trace == first for trace in others)
    with _no_messages(), mock.patch.object(kv_placement, "GENERATED_RUN", 2):
        sp = longspan.SequenceSharding(longspan.init_mesh(ring=2, device_type="cpu"))
        model = longspan.parallelize(made(name), sp, fsdp=False, check_batches=0)
        first, *others = _traces(model, {"input_ids": prompt(2)["input_ids"]}, 5)
    assert len(first) > 50 and all(trace == first for trace in others)


def test_steps_that_differ_are_seen() -> None:
    """An ordinary step's operators depend on the number of cached tokens."""
    model, ids = _alone(), prompt()["input_ids"]
    cache, traces = longspan.ShardedCache(model), []
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache)
        for _ in range(2):
            with _Trace() as trace:
                model(input_ids=ids[:, :1], past_key_values=cache)
            traces.append(trace.operators)
    assert len(traces[0]) == len(traces[1]) and traces[0] != traces[1]


@contextlib.contextmanager
def _graphs(seen: Seen) -> Iterator[list[tuple[list[str], Counter[str], int]]]:
    """Stand in for CUDA graphs; yield waits, launches and the largest tensor of each capture, then of each replay."""
    log: list[tuple[list[str], Counter[str], int]] = []

    @contextlib.contextmanager
    def capturing(*_: Any, **options: Any) -> Iterator[None]:
        assert options == {"capture_error_mode": "thread_local"}
        before, seen.launches = seen.launches, Counter()
        seen.clear()
        yield
        log.append((list(seen), seen.launches, seen.largest))
        seen.launches = before

    graph = mock.Mock(replay=lambda: log.append((list(seen), Counter(), 0)))
    nowhere = mock.MagicMock()
    stubs = {"Stream": nowhere, "current_stream": nowhere, "stream": lambda _: contextlib.nullcontext()}
    with mock.patch.multiple(torch.cuda, CUDAGraph=lambda: graph, graph=capturing, **stubs):
        yield log


@torch.no_grad()
def test_a_step_on_a_gpu() -> None:
    """Captured once, with flash attention, without a wait; then a replay, and a few launches around it."""
    ids = torch.zeros(2, 300, dtype=torch.int64)
    with on_gpu() as seen, _graphs(seen) as log:
        model, ids = gpu_llama(one_gpu()), ids.to("cuda", non_blocking=True)
        cache = longspan.ShardedCache(model, cuda_graph=True)
        model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
        sizes = set()
        for _ in range(5):
            seen.clear()
            seen.launches.clear()
            seen.largest = 0
            logits = model(input_ids=ids[:, :1], past_key_values=cache, logits_to_keep=1).logits
            assert logits.shape == (2, 1, 64) and seen == []
            sizes.add(seen.largest)
        assert seen.launches.total() <= 8, seen.launches  # numbers, inputs and positions, and the copied logits
    (waits, launches, largest), *replays = log
    assert waits == [] and launches["_flash_attention_forward"] == 2 and len(replays) == 5
    assert (
        sizes == {largest, max(sizes - {largest})} and max(sizes) == largest
    )  # the capacity; and later next to nothing


@pytest.mark.parametrize(("rows", "heads", "kv_heads"), [(1, 4, 2), (3, 4, 4), (2, 6, 1)])
def test_flash_reads_the_slots_of_each_row(rows: int, heads: int, kv_heads: int) -> None:
    """A call with `seqused_k`, as torch's kernel reads it; one row sees nothing."""
    T, D, g = 40, 8, torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(rows, h, n, D, generator=g) for h, n in ((heads, 1), (kv_heads, T), (kv_heads, T)))
    slots = Slots(None, None, (0, 0, T), torch.tensor([30, *range(5, 5 + rows), *[31] * (rows - 1), 4 + rows]))

    def kernel(q: Tensor, k: Tensor, v: Tensor, ends_q: Tensor, ends_k: Tensor, *fixed: Any, **options: Any) -> Any:
        used = options.pop("seqused_k")
        assert fixed == (1, T, 0.0, False, False) and options.pop("scale") and set(options.values()) == {-1}
        assert ends_q.tolist() == list(range(len(q) + 1)) and len(ends_k) == len(ends_q) == len(used) + 1
        outs, lses = [], []
        for i, (start, n) in enumerate(zip(ends_k.tolist(), used.tolist(), strict=False)):
            s = torch.einsum("gd,tkd->gt", q[i], k[start : start + n]) * D**-0.5
            outs.append(s.softmax(-1) @ v[start : start + n, 0] if n else torch.zeros_like(q[i]))
            lses.append(s.logsumexp(-1) if n else torch.full((len(s),), torch.inf))
        return torch.stack(outs), torch.stack(lses, 1)

    found, expected = (SoftmaxAccumulator(q, D) for _ in range(2))
    with mock.patch.object(static, "flash_varlen", kernel):
        FlashDecode().accumulate(found, q, k, v, slots, Scores())
    FormulaDecode().accumulate(expected, q, k, v, slots, Scores())
    assert expected.results()[1][-1].isneginf().all()
    torch.testing.assert_close(found.results(), expected.results())


# ---------------------------------------------------------------------------------------------------------------------
# What is refused.


@torch.no_grad()
def test_a_step_that_cannot_be_captured() -> None:
    ids = torch.zeros(1, 8, dtype=torch.int64)
    with on_gpu() as seen, _graphs(seen):
        model, ids = gpu_llama(one_gpu()), ids.to("cuda", non_blocking=True)
        cache = longspan.ShardedCache(model, cuda_graph=True)
        model(input_ids=ids, past_key_values=cache)
        failing = mock.Mock(side_effect=RuntimeError("operation not permitted when stream is capturing"))
        with mock.patch.object(torch.cuda, "graph", failing), pytest.raises(LongspanError, match="cannot be captured"):
            model(input_ids=ids[:, :1], past_key_values=cache)
    assert torch.is_autocast_cache_enabled()


def test_what_cannot_be_captured_is_refused() -> None:
    with pytest.raises(LongspanError, match="needs a CUDA GPU"):
        longspan.ShardedCache(_alone(), cuda_graph=True)
    cases: dict[str, tuple[Any, dict[str, Any]]] = {
        "dtype='exact'; this is 'int8'": (_alone(), {"dtype": "int8"}),
        "offload='none'; this is 'host'": (_alone(), {"offload": "host"}),
        "kernel='auto' or 'flash'": (longspan.parallelize(made("Llama"), _one(), fsdp=False, kernel="tiled"), {}),
        "a RoPE that does not depend on the length": (_alone("dynamic"), {}),
    }
    for reason, (model, options) in cases.items():
        state = state_of(model)
        with mock.patch.object(state, "sp", mock.Mock(wraps=state.sp, device=torch.device("cuda"))):
            with pytest.raises(LongspanError, match=f"needs {reason}; leave it out"):
                kv_cache.check_capturable(state, **{"dtype": "exact", "offload": "none", **options})
            state.forward.shards_weights = True
            with pytest.raises(LongspanError, match="FSDP shards these"):
                kv_cache.check_capturable(state, "exact", "none")
    with pytest.raises(LongspanError, match="beam search"):
        model = _alone()
        model.generate(**prompt(), past_key_values=_static(model), num_beams=2, max_new_tokens=3)


@pytest.mark.parametrize("flag", ["cache=int8", "cache=exact,offload=host", "weights=sharded", "kernel=tiled"])
def test_the_command_refuses_before_it_starts(flag: str) -> None:
    name, _, value = flag.partition("=")
    with pytest.raises(LongspanError, match=f"--cuda-graph needs --{name} .*, got {value}"):
        make(GenerateConfig, model="any", cuda_graph=True, **{name: value}).check()
