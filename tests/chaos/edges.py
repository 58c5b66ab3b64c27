"""Seeded faults at the API: one rank differs from the others in a batch, an option or the model.

Each try draws a mesh, FSDP or not, full batches or shards, a fault, its rank and its step. The fault is refused clearly
if every rank raises the same `LongspanError`. Bad outcomes are a hang, no error at all, an error of Python, and errors
that differ between ranks.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy

import longspan
from longspan.core.errors import LongspanError
from tests.chaos.counts import Budget, Counts
from tests.models import batch, build, rows_of
from tests.pool import RankError, RankHang, RankPool

LIMIT_S = 30.0
STEPS = 6
RAW = "an error of Python: "


@dataclass(frozen=True)
class Try:
    """One draw."""

    seed: int
    fault: str
    rank: int
    step: int
    data: int
    ring: int
    fsdp: bool

    def __str__(self) -> str:
        how = f"data={self.data} ring={self.ring} fsdp={self.fsdp}"
        return f"seed {self.seed}: {self.fault} on rank {self.rank} at step {self.step}, {how}"


# --- faults: each changes the arguments of one rank, to `parallelize` or to one forward

Arguments = dict[str, Any]


def _values(given: Arguments) -> None:
    ids = given["input_ids"].clone()
    ids.view(-1)[given.pop("random").randrange(ids.numel())] ^= 1
    given["input_ids"] = ids


def _drop(given: Arguments) -> None:
    del given["labels"]


def _shorter(given: Arguments) -> None:
    less = given["random"].randrange(1, 6)
    for key in ("input_ids", "labels"):
        given[key] = given[key][:, :-less]


def _fewer(given: Arguments) -> None:
    for key in ("input_ids", "labels"):
        given[key] = given[key][:1]


def _int32(given: Arguments) -> None:
    given["input_ids"] = given["input_ids"].int()


def _labels_of_another_length(given: Arguments) -> None:
    given["labels"] = given["labels"][:, :-1]


BATCH: dict[str, Callable[[Arguments], Any]] = {
    "another id": _values,
    "no labels": _drop,
    "shorter": _shorter,
    "fewer rows": _fewer,
    "int32 ids": _int32,
    "labels of another length": _labels_of_another_length,
    "a mask": lambda given: given.update(attention_mask=torch.ones_like(given["input_ids"])),
    "a left-hand padding": lambda given: given.update(
        attention_mask=(torch.arange(given["input_ids"].shape[1]) > 2).long().expand_as(given["input_ids"]),
        labels=given["labels"].masked_fill(torch.arange(given["input_ids"].shape[1]) <= 3, -100),
    ),
    "documents": lambda given: given.update(
        document_ids=(torch.arange(given["input_ids"].shape[1]) > 4).long().expand_as(given["input_ids"])
    ),
    "other positions": lambda given: given.update(position_ids=torch.arange(1, given["input_ids"].shape[1] + 1)),
    "ids out of range": lambda given: given.update(input_ids=given["input_ids"] + 1000),
    "no ids": lambda given: given.pop("input_ids"),
    "a text": lambda given: given.update(position_ids="0"),
    "an unknown key": lambda given: given.update(unknown=torch.ones(3)),
    "a count of items": lambda given: given.update(num_items_in_batch=5),
}
MODES = ("eval", "no_grad", "autocast")
LATE = ("an early optimizer", "adapters after", "another head", "another parameter")
OPTIONS: dict[str, Arguments] = {
    "fsdp": {"fsdp": None},
    "kernel": {"kernel": "eager"},
    "mp_policy": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16)},
    "weights": {"weights": "broadcast"},
    "check_batches": {"check_batches": 2},
    "check_weights": {"check_weights": 7},
    "a bad option": {"weights": "mine"},
}
CONFIG: dict[str, Arguments] = {
    "rms_norm_eps": {"rms_norm_eps": 1e-4},
    "rope_theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}},
    "activation": {"hidden_act": "gelu"},
    "layers": {"num_hidden_layers": 1},
    "heads": {"num_key_value_heads": 4},
    "positions": {"max_position_embeddings": 256},
}
WEIGHTS = ("a bit", "another seed", "a buffer", "frozen", "bf16", "another class", "meta")
FAULTS = (*BATCH, *MODES, *LATE, *OPTIONS, *CONFIG, *WEIGHTS)


def draw(seed: int, ranks: int) -> Try:
    """Return the try of a seed."""
    r = random.Random(seed)
    data = r.choice([d for d in (1, 2) if ranks % d == 0])
    ring = r.choice([x for x in (1, 2, 4) if ranks // data % x == 0])
    one = Try(seed, r.choice(FAULTS), r.randrange(ranks), r.randrange(STEPS), data, ring, r.random() < 0.5)
    if one.fault in BATCH and data == ranks:  # replicas of one rank may read any batch
        return replace(one, data=1)
    if one.fault == "an early optimizer":  # a fault under FSDP only
        return replace(one, fsdp=True)
    return one


# --- on a rank


def attempt(one: Try) -> str:
    """Run a try on this rank; return the text of its error, or ""."""
    try:
        _play(one)
    except LongspanError as error:
        return str(error)
    except Exception as error:
        return f"{RAW}{type(error).__name__}: {error}"
    return ""


def _play(one: Try) -> None:
    mine, r = dist.get_rank() == one.rank, random.Random(one.seed)
    ulysses = dist.get_world_size() // (one.data * one.ring)
    sp = longspan.SequenceSharding(longspan.init_mesh(data=one.data, ring=one.ring, ulysses=ulysses))
    model, options = _model(one, mine, r)
    early = torch.optim.SGD(model.parameters(), lr=0.0) if mine and one.fault == "an early optimizer" else None
    model = longspan.parallelize(model, sp, **{"fsdp": one.fsdp, **options})
    optimizer = early or torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS + 2):
        now = mine and step == one.step
        whole: Arguments = rows_of(batch(seed=step), sp.data_rank, one.data)
        whole["labels"] = whole["labels"].clamp(min=0)
        if now and one.fault in BATCH:
            given = {**whole, "random": r}
            BATCH[one.fault](given)
            given.pop("random", None)
            whole = given
        if now and one.fault in LATE:
            model = _spoil(model, one.fault)
        with contextlib.ExitStack() as stack:
            _mode(model, one.fault if now else "", stack)
            loss = model(**whole).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def _model(one: Try, mine: bool, r: random.Random) -> tuple[Any, Arguments]:
    fault = one.fault if mine else ""
    model = build("Qwen3" if fault == "another class" else "Llama", **CONFIG.get(fault, {}))
    if fault == "a bit":
        p = r.choice(list(model.parameters())).detach().view(-1).view(torch.int32)
        p[r.randrange(len(p))] ^= 1 << r.randrange(31)
    elif fault == "another seed":
        model = build("Llama", seed=7)
    elif fault == "a buffer":
        model.model.rotary_emb.inv_freq[1] *= 1.001
    elif fault == "frozen":
        r.choice(list(model.parameters())).requires_grad_(False)
    elif fault == "bf16":
        model.bfloat16()
    elif fault == "meta":
        model.to("meta")
    options = dict(OPTIONS.get(fault, {}))
    if "fsdp" in options:
        options["fsdp"] = not one.fsdp
    return model, options


def _spoil(model: Any, fault: str) -> Any:
    if fault == "adapters after":
        from peft import LoraConfig, get_peft_model

        return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    if fault == "another head":
        model.lm_head = torch.nn.Linear(32, 61)
    elif fault == "another parameter":
        model.model.norm.register_parameter("late", torch.nn.Parameter(torch.zeros(3)))
    return model


def _mode(model: Any, fault: str, stack: contextlib.ExitStack) -> None:
    model.train(fault != "eval")
    if fault == "no_grad":
        stack.enter_context(torch.no_grad())
    if fault == "autocast":
        stack.enter_context(torch.autocast("cpu", torch.bfloat16))


# --- the campaign


def run(budget: Budget, counts: Counts) -> None:
    """Make the tries on a pool of four ranks."""
    pool = RankPool(4, warm=("torch", "transformers"))
    try:
        for seed in budget.seeds(200):
            one = draw(seed, pool.world_size)
            counts.add(*judge(one, pool))
    finally:
        pool.close()


def judge(one: Try, pool: RankPool) -> tuple[str, str]:
    """Run a try on the pool's ranks; return its outcome and a note."""
    try:
        errors = pool.run(attempt, one, timeout=LIMIT_S)
    except RankHang as hang:
        return "hung", f"{one}: {str(hang).splitlines()[0]}"
    except RankError as error:
        return "wrong", f"{one}: {error}"
    if not any(errors):
        return "silent", str(one)
    if any(error.startswith(RAW) for error in errors):
        return "traceback", f"{one}: {errors}"
    return "refused" if len(set(errors)) == 1 else "wrong", f"{one}: {errors}"
