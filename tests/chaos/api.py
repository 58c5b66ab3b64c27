"""Seeded bad arguments to the public functions: on one process, and on a fake group of four ranks."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import longspan
from longspan import plan
from tests.chaos.inputs import Attempt
from tests.fakes import fake_world

B, S, H, K, D, RANKS = 1, 16, 4, 2, 8, 4
LOCAL = S // RANKS


class _Odd:
    """An object that no function accepts."""

    def __repr__(self) -> str:
        return "an odd object"


def _tensor(*shape: int, **options: Any) -> torch.Tensor:
    return torch.zeros(*shape, **options)


#: Values that are wrong for every argument there is.
WRONG: tuple[Any, ...] = ("text", _Odd(), {"a": 1}, math.nan, b"bytes")
#: Values that are wrong for most.
ODD: tuple[Any, ...] = (
    None, -1, 0, 1.5, math.inf, -math.inf, True, 2**70, -(2**70), [], [1, 2], (), lambda *_: None, np.zeros(3),
    torch.float32,
    _tensor(()), _tensor(0), _tensor(3), _tensor(1, 0, 4, 8), _tensor(1, 16, 4, 8), _tensor(1, 16, 2, 8),
    _tensor(1, 4, 4, 8),
    _tensor(2, 4, 4, 8), _tensor(1, 4, 3, 8), _tensor(1, 4, 0, 8), _tensor(1, 4, 4, 0), _tensor(1, 4, 4, 8, 1),
    _tensor(1, 4, 4, 8, dtype=torch.int64), _tensor(1, 4, 4, 8, dtype=torch.complex64),
    _tensor(1, 4, 4, 8, dtype=torch.bool),
    _tensor(1, 4, 4, 8, dtype=torch.float64), _tensor(1, 4, 4, 8, device="meta"), _tensor(1, 16),
    _tensor(1, 16, dtype=torch.int64),
    _tensor(1, 16, dtype=torch.bool), _tensor(4), torch.full((4,), math.nan), _tensor(2, dtype=torch.int64), 10**6,
    -7, 3, 1, 2,
    torch.full((1, 16), -5), torch.full((1, 4), 99), "nope", "cuda", "cpu", "meta",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Target:
    """A function and valid arguments; those in `free` may be anything."""

    name: str
    call: Callable[..., Any]
    arguments: dict[str, Any]
    free: frozenset[str] = frozenset()


def _qkv(n: int) -> dict[str, Any]:
    return {name: torch.randn(B, n, heads, D) for name, heads in (("q", H), ("k", K), ("v", K))}


_OPTIONS: dict[str, Any] = {
    "causal": True, "length": None, "kv_length": None, "window": None, "chunk_size": None, "prefix": None,
    "documents": None, "kv_documents": None, "cu_seqlens": None,
    "q_start": 0, "mask_mod": None, "sinks": None, "softcap": None,
    "alibi": None, "bias": None, "scale": None, "dropout": 0.0, "kernel": "auto",
}  # fmt: skip


def _batch(n: int = S) -> dict[str, Any]:
    ids = torch.arange(n)[None]
    return {
        "input_ids": ids, "labels": ids.clone(), "position_ids": ids.clone(), "attention_mask": torch.ones_like(ids),
        "shift_labels": None, "document_ids": None, "seq_idx": None, "cu_seq_lens_q": None, "cu_seq_lens_k": None,
        "max_length_q": None, "max_length_k": None, "token_type_ids": None, "inputs_embeds": None,
    }  # fmt: skip


def _targets(sp: longspan.SequenceSharding) -> list[Target]:
    """Return the functions that take a sharding."""
    local, group = S // sp.size, sp.ulysses_group
    x = torch.randn(B, local, H, D)
    exchange = longspan.exchange
    mine = torch.randn(B, local * sp.ulysses_size, H // sp.ulysses_size, D)
    in_batch = _batch()

    def shard_batch(sp: Any, shift: Any, **batch: Any) -> Any:
        return longspan.shard_batch(batch, sp, shift=shift)

    return [
        Target("SequenceSharding", longspan.SequenceSharding, {"mesh": sp.mesh, "layout": "auto"}),
        Target("sp.shard", sp.shard, {"x": torch.randn(B, S, 3), "dim": 1, "pad_value": 0}, frozenset({"pad_value"})),
        Target("sp.gather", sp.gather, {"x": x, "dim": 1, "length": None}),
        Target("sp.positions", sp.positions, {"n": S}),
        Target("attention", longspan.attention, {**_qkv(local), "sp": sp, **_OPTIONS}),
        Target("explain_kernel", longspan.explain_kernel, {**_qkv(local), "sp": sp, **_OPTIONS}),
        Target("seq_to_heads", exchange.seq_to_heads, {"x": x, "group": group, "seq_dim": 1, "head_dim": 2}),
        Target("heads_to_seq", exchange.heads_to_seq, {"x": mine, "group": group, "seq_dim": 1, "head_dim": 2,
        "heads": None}),
        Target("reshard", exchange.reshard, {"x": x, "group": group, "gather_dim": 1, "shard_dim": 2, "length": None}),
        Target("shard", exchange.shard, {"x": x, "group": group, "dim": 1}),
        Target("dsp", longspan.dsp, {"sp": sp, "attends": [2, 1], "sizes": {1: 4, 2: 8}}),
        Target("ring_shift", exchange.ring_shift, {"x": x, "group": group, "hops": 1}),
        Target("shard_batch", lambda batch, sp, shift: longspan.shard_batch(batch, sp, shift=shift),
        {"batch": _batch(), "sp": sp, "shift": True}),
        Target("shard_batch(**)", shard_batch, {**in_batch, "sp": sp, "shift": True}),
        Target("causal_lm_loss", longspan.causal_lm_loss, {
            "logits": torch.randn(B, local, 32), "shifted_labels": torch.zeros(B, local, dtype=torch.int64), "sp": sp,
            "num_items_in_batch": None,
        }),
    ]  # fmt: skip


def _plain_targets() -> list[Target]:
    """Return the functions that take none."""
    model, hardware = plan.read_model("llama-3.1-8b"), plan.read_hardware("h100")
    job = plan.Job(4096).on(ulysses=2)
    costed = {"model": model, "job": job, "hardware": hardware}
    return [
        Target("init_mesh", longspan.init_mesh, {"data": 1, "ring": 1, "ulysses": 1, "tensor": 1,
        "device_type": "cpu"}),
        Target("Job", plan.Job, vars(job)),
        Target("ParallelConfig", plan.ParallelConfig, vars(job.parallel)),
        Target("read_model", plan.read_model, {"name_or_path": "llama-3.1-8b"}),
        Target("read_hardware", plan.read_hardware, {"name_or_path": "h100"}),
        Target("search", plan.search, {"model": model, "job": plan.Job(4096), "gpus": 2, "hardware": hardware}),
        Target("cost", plan.cost, costed),
        Target("longest_context", plan.longest_context, costed),
        Target("Link", plan.Link, {"bandwidth": 1e9, "latency": dict(hardware.intra.latency)}),
        Target("Hardware", lambda **changes: dataclasses.replace(hardware, **changes), {
            field.name: getattr(hardware, field.name) for field in dataclasses.fields(hardware)
        }, frozenset({"name", "measured_dtype"})),
    ]  # fmt: skip


def attempts(seed: int, tries: int) -> Iterator[Attempt]:
    """Yield `tries` calls with one or two wrong or odd arguments, half of them on four fake ranks."""
    yield from _attempts(f"{seed} alone", tries // 2, longspan.SequenceSharding(longspan.init_mesh()))
    with fake_world(0, RANKS):
        for ring, ulysses in ((2, 2), (1, 4)):
            sp = longspan.SequenceSharding(longspan.init_mesh(ring=ring, ulysses=ulysses, device_type="cpu"))
            yield from _attempts(f"{seed} ring {ring}", tries // 4, sp)


def _attempts(seed: str, tries: int, sp: longspan.SequenceSharding) -> Iterator[Attempt]:
    targets = _targets(sp) + (_plain_targets() if sp.size == 1 else [])
    for number in range(tries):
        draw = random.Random(f"{seed} {number}")
        target = targets[number % len(targets)]
        wrong = draw.random() < 0.4
        name = draw.choice(sorted(target.arguments))
        changed = {name: draw.choice(WRONG if wrong else ODD)}
        if not wrong and draw.random() < 0.3:
            changed[draw.choice(sorted(target.arguments))] = draw.choice(ODD)
        bad = wrong and name not in target.free
        yield Attempt("api", _describe(target, changed, sp), bad, _caller(target, changed))


def _caller(target: Target, changed: dict[str, Any]) -> Callable[[Path], int]:
    def run(_: Path) -> int:
        target.call(**{**target.arguments, **changed})
        return 0

    return run


def _describe(target: Target, changed: dict[str, Any], sp: longspan.SequenceSharding) -> str:
    texts = []
    for name, value in changed.items():
        text = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
        texts.append(f"{name}={text if not callable(value) or isinstance(value, torch.Tensor) else 'a function'}")
    return f"{target.name}({', '.join(texts)}) on {sp.size} ranks"
