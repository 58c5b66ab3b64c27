"""Faults at the edges of the API: one rank differs from the others in something, drawn by chance from a seed.

    python -m tests.chaos.edges --tries 300 --seed 1

Each try draws a mesh, FSDP or not, batches whole or cut beforehand, a fault, the rank that has it, and when. It is
refused clearly if every rank ends with the same `LongspanError`. What is left is a hang, silence (nobody minds), or an
error that is not clear: one of Python's own, or another on each rank.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy

import longspan
from longspan.core.errors import LongspanError
from tests.models import batch, build, rows_of
from tests.pool import RankError, RankHang, RankPool

LIMIT_S = 30.0
STEPS = 6
RAW = "of Python's own: "


@dataclass(frozen=True)
class Try:
    """One draw: who has which fault, when, on which mesh."""

    seed: int
    fault: str
    rank: int
    step: int
    data: int
    ring: int
    fsdp: bool
    cut: bool

    def __str__(self) -> str:
        how = f"data={self.data} ring={self.ring} fsdp={self.fsdp} cut={self.cut}"
        return f"seed {self.seed}: {self.fault} on rank {self.rank} at step {self.step}, {how}"


@dataclass
class Table:
    """Counts of what became of all tries, and those that did not end well."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def add(self, one: Try, outcome: str, text: str) -> None:
        self.counts["tried"] += 1
        self.counts[outcome] += 1
        if outcome != "refused":
            self.wrong.append(f"{outcome}: {one}: {text}")

    def __str__(self) -> str:
        columns = ("tried", "refused", "hung", "silent", "unclear")
        return "  ".join(f"{name} {self.counts[name]}" for name in columns)


# --- faults. Each changes what one rank gives: to parallelize, or to one forward.

Given = dict[str, Any]


def _values(given: Given) -> None:
    ids = given["input_ids"].clone()
    ids.view(-1)[given.pop("random").randrange(ids.numel())] ^= 1
    given["input_ids"] = ids


def _drop(given: Given) -> None:
    del given["labels"]


def _shorter(given: Given) -> None:
    for key in ("input_ids", "labels"):
        given[key] = given[key][:, : -given["random"].randrange(1, 6)] if key == "input_ids" else given[key]
    given["labels"] = given["labels"][:, : given["input_ids"].shape[1]]


def _fewer(given: Given) -> None:
    for key in ("input_ids", "labels"):
        given[key] = given[key][:1]


def _int32(given: Given) -> None:
    given["input_ids"] = given["input_ids"].int()


def _labels_of_another_length(given: Given) -> None:
    given["labels"] = given["labels"][:, :-1]


BATCH: dict[str, Callable[[Given], Any]] = {
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
OPTIONS: dict[str, Given] = {
    "fsdp": {"fsdp": None},
    "kernel": {"kernel": "eager"},
    "mp_policy": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16)},
    "weights": {"weights": "broadcast"},
    "check_batches": {"check_batches": 2},
    "check_weights": {"check_weights": 7},
    "check_at_rest": {"check_at_rest": True},
    "a bad option": {"weights": "mine"},
}
CONFIG: dict[str, Given] = {
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
    """The try of a seed."""
    r = random.Random(seed)
    data = r.choice([d for d in (1, 2) if ranks % d == 0])
    ring = r.choice([x for x in (1, 2, 4) if ranks // data % x == 0])
    one = Try(
        seed, r.choice(FAULTS), r.randrange(ranks), r.randrange(STEPS), data, ring, r.random() < 0.5, r.random() < 0.5
    )
    if one.fault in BATCH and data == ranks:  # replicas of one rank may read what they like
        return replace(one, data=1)
    if one.fault == "an early optimizer":  # which harms under FSDP only
        return replace(one, fsdp=True)
    return one


# --- on a rank


def attempt(one: Try) -> str:
    """Play a try on this rank; the text of the error, "" where there was none."""
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
        whole: Given = rows_of(batch(seed=step), sp.data_rank, one.data)
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
            loss = model(**_cut(whole, sp) if one.cut else whole).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def _cut(whole: Given, sp: longspan.SequenceSharding) -> Given:
    try:
        return longspan.shard_batch(whole, sp)
    except LongspanError:
        return whole  # refused on this rank alone, before the model: as in a loader that does not cut


def _model(one: Try, mine: bool, r: random.Random) -> tuple[Any, Given]:
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


def campaign(pool: RankPool, tries: int, seed: int = 0, seconds: float = float("inf")) -> Table:
    """Play `tries` tries with the seeds from `seed` on, within about `seconds`, on the pool's ranks."""
    table, start = Table(), time.monotonic()
    for number in range(seed, seed + tries):
        if time.monotonic() - start > seconds:
            break
        one = draw(number, pool.world_size)
        table.add(one, *_judge(one, pool))
    return table


def _judge(one: Try, pool: RankPool) -> tuple[str, str]:
    try:
        said = pool.run(attempt, one, timeout=LIMIT_S)
    except RankHang as hang:
        return "hung", str(hang).splitlines()[0]
    except RankError as error:
        return "unclear", str(error)
    if not any(said):
        return "silent", ""
    clear = len(set(said)) == 1 and not said[0].startswith(RAW)
    return ("refused", "") if clear else ("unclear", str(said))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tries", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0, help="of the first try; each further one has the next")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=600.0, help="no try begins later")
    args = parser.parse_args()
    pool = RankPool(args.ranks, warm=("torch", "transformers"))
    try:
        table = campaign(pool, args.tries, args.seed, args.seconds)
    finally:
        pool.close()
    print(
        f"edges of the API, {args.ranks} ranks, seeds {args.seed} to {args.seed + table.counts['tried'] - 1}: {table}"
    )
    print("\n".join(table.wrong))
    raise SystemExit(bool(table.wrong))


if __name__ == "__main__":
    main()
