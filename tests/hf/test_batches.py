"""Batches that differ between ranks raise at any forward, with one message on every rank, and nothing hangs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import longspan
from longspan.core.errors import LongspanError
from longspan.hf.batch import compare
from tests.counting import count_sent
from tests.models import batch, build, rows_of, sharding
from tests.pool import RankError, RankPool, on_ranks

STEPS = 5  # the batches differ after so many forwards: more than are compared thoroughly


VALUES = "(same shapes, other values)"
# Changes of a batch, with texts in the errors.
FAULTS: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "values": (lambda b: {**b, "input_ids": b["input_ids"].roll(1, 0)}, VALUES),
    "labels": (lambda b: {"input_ids": b["input_ids"]}, "`labels` is missing on rank 3, int64 [2, 21] on rank 2"),
    "length": (lambda b: {key: x[:, :-1] for key, x in b.items()},
               "`input_ids` is int64 [2, 20] on rank 3, int64 [2, 21] on rank 2"),
    "rows": (lambda b: {key: x[:-1] for key, x in b.items()},
             "`input_ids` is int64 [1, 21] on rank 3, int64 [2, 21] on rank 2"),
    "dtype": (lambda b: {**b, "input_ids": b["input_ids"].int()},
              "`input_ids` is int32 [2, 21] on rank 3, int64 [2, 21] on rank 2"),
    "mask": (lambda b: {**b, "attention_mask": torch.ones_like(b["input_ids"])},
             "`attention_mask` is int64 [2, 21] on rank 3, missing on rank 2"),
    "documents": (lambda b: {**b, "document_ids": (torch.arange(21) > 4).long().expand(len(b["input_ids"]), -1)},
                  "`document_ids` is int64 [2, 21] on rank 3, missing on rank 2"),
    "items": (lambda b: {**b, "num_items_in_batch": 7}, "`num_items_in_batch` is 7 on rank 3, missing on rank 2"),
    "bad": (lambda b: {**b, "labels": torch.full_like(b["input_ids"], 61)}, VALUES),
    "type": (lambda b: {**b, "position_ids": "none"}, "`position_ids` is 'none' on rank 3, missing on rank 2"),
}  # fmt: skip


def _one_rank_differs(fsdp: bool, ring: int) -> list[str]:
    """Data 2 x sequence 2: rank 3 alone, of the second replica, gets another batch in the sixth forward."""
    sp = sharding(data=2, ring=ring)
    model = longspan.parallelize(build("Llama"), sp, fsdp=fsdp)
    messages = []

    def forward(whole: dict[str, Any]) -> None:
        model(**whole).loss.backward()

    for fault in FAULTS:
        for step in range(1 if messages else STEPS):
            forward(rows_of(batch(seed=step), sp.data_rank, 2))
        mine = rows_of(batch(), sp.data_rank, 2)
        with pytest.raises(LongspanError) as error:
            forward(FAULTS[fault][0](mine) if dist.get_rank() == 3 else mine)
        messages.append(str(error.value))
    return messages


@pytest.mark.parametrize(("fsdp", "ring"), [(False, 1), (True, 2)])
def test_another_batch_in_the_sixth_forward(pool4: RankPool, fsdp: bool, ring: int) -> None:
    messages = pool4.run(_one_rank_differs, fsdp, ring, timeout=60)
    assert all(each == messages[0] for each in messages)
    for (_, text), message in zip(FAULTS.values(), messages[0], strict=True):
        assert "ranks 3 were given another one than ranks 2 (" in message and text in message, message


@on_ranks(2)
def test_a_batch_that_is_cut_already_is_refused_on_every_rank() -> None:
    """Also if one rank alone has cut it, and by `token_logprobs`."""
    sp = sharding()
    model = longspan.parallelize(build("Llama"), sp)
    for ranks in ({0, 1}, {1}):
        given = longspan.shard_batch(batch(), sp) if sp.rank in ranks else batch()
        text = r"was cut by longspan.shard_batch.*; pass the whole batch"
        with pytest.raises(LongspanError, match=text):
            model(**given)
        with pytest.raises(LongspanError, match=text):
            longspan.token_logprobs(model, given)
    model(**batch()).loss.backward()


def _replicas_differ() -> list[str]:
    """What decides the collectives of all ranks must be equal on all replicas."""
    sp = sharding(data=2)
    model = longspan.parallelize(build("Llama"), sp)
    second = sp.data_rank == 1
    messages = []
    mine = rows_of(batch(), sp.data_rank, 2)
    for fault in ("labels", "items", "eval", "no_grad", "autocast"):
        model(**mine).loss.backward()
        if fault == "eval" and second:
            model.eval()
        with pytest.raises(LongspanError) as error, contextlib.ExitStack() as stack:
            if second and fault == "no_grad":
                stack.enter_context(torch.no_grad())
            if second and fault == "autocast":
                stack.enter_context(torch.autocast("cpu", torch.bfloat16))
            model(**(FAULTS[fault][0](mine) if second and fault in FAULTS else mine))
        model.train(build("Llama").training)
        messages.append(str(error.value))
    model(**mine).loss.backward()
    return messages


def test_replicas_must_call_the_model_alike(pool4: RankPool) -> None:
    messages = pool4.run(_replicas_differ, timeout=60)
    assert all(each == messages[0] for each in messages)
    texts = (
        "a batch's labels is missing on ranks 2, 3, given on ranks 0, 1",
        "num_items_in_batch is 7.0 on ranks 2, 3, missing on ranks 0, 1",
        "the model's mode is evaluation on ranks 2, 3",
        "torch.is_grad_enabled() is False on ranks 2, 3, True on ranks 0, 1",
        "autocast of cpu is torch.bfloat16 on ranks 2, 3, missing on ranks 0, 1",
    )
    for message, text in zip(messages[0], texts, strict=True):
        assert text in message, message


def _raw_error() -> None:
    model = longspan.parallelize(build("Llama"), sharding())
    if dist.get_rank() == 1:
        model(**batch(), no_such=object(), position_ids=batch())
    model(**batch())


def test_an_error_of_another_kind_raises_on_all_ranks(pool2: RankPool) -> None:
    with pytest.raises(RankError) as error:
        pool2.run(_raw_error, timeout=30)
    assert len(error.value.failures) == 2


# --- values on a GPU are compared in some forwards. Simulated: the host treats CPU tensors as a GPU's.


def _compared_now_and_then() -> tuple[list[str], int]:
    sp = sharding(data=2)
    model = longspan.parallelize(build("Llama"), sp)
    with mock.patch.object(compare, "is_on_cpu", lambda batch: False), mock.patch.object(compare, "EVERY", 8):
        for step in range(8):
            mine = rows_of(batch(seed=step), sp.data_rank, 2)
            if step >= STEPS and dist.get_rank() == 2:
                mine["input_ids"] = mine["input_ids"].roll(1, 0)
            try:
                model(**mine).loss.backward()
            except LongspanError as error:
                return [str(error)], step
    return [], -1


def test_values_on_a_gpu_are_compared_in_some_forwards(pool4: RankPool) -> None:
    results = pool4.run(_compared_now_and_then)
    assert all(each == results[0] for each in results)
    (message,), step = results[0]
    assert step == 7  # the eighth; the values have differed since the sixth
    assert f"ranks 3 were given another one than ranks 2 {VALUES}" in message


def _cost(forwards: int | None) -> list[int]:
    """Return the number of gathers in each of five forwards."""
    sp = sharding()
    model = longspan.parallelize(build("Llama"), sp, fsdp=False, check_batches=forwards)
    counts = []
    for step in range(5):
        with count_sent() as sent:
            model(**batch(seed=step)).loss.backward()
        counts.append(sum(one.op == "all_gather" for one in sent))
        assert all(one.bytes == 4 * 8 for one in sent if one.op == "all_gather")
    return counts


def test_one_small_gather_per_forward_or_none(pool2: RankPool) -> None:
    assert pool2.run(_cost, None)[0] == [1] * 5
    assert pool2.run(_cost, 2)[0] == [1, 1, 0, 0, 0]
    assert pool2.run(_cost, 0)[0] == [0] * 5
