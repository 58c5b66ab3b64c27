"""Arguments of parallelize must be equal on every rank: each rank names the difference, and nothing hangs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy

import longspan
from longspan.core.errors import LongspanError
from longspan.core.formatting import differences, odd_ones
from tests.models import batch, build, compare, sharding, truth_of
from tests.pool import RankError, RankPool


def _flip(model: Any) -> None:
    model.model.layers[1].mlp.up_proj.weight.detach().view(torch.int32)[3, 5] ^= 1


# Differences of rank 1's model.
FAULTS: dict[str, Callable[[Any], Any]] = {
    "bit": _flip,
    "buffer": lambda model: model.model.rotary_emb.inv_freq[0].add_(1),
    "frozen": lambda model: model.model.layers[0].mlp.up_proj.weight.requires_grad_(False),
    "dtype": lambda model: model.bfloat16(),
    "meta": lambda model: model.to("meta"),
}


def _refused(
    sp: longspan.SequenceSharding, mine: Any = None, changes: Any = None, family: str = "Llama", fault: str = "",
    **options: Any,
) -> str:  # fmt: skip
    """Parallelize with a difference on rank 1: its `mine` options, `changes` to its config, or a `fault`."""
    model = build("Llama", seed=dist.get_rank() % 2 if fault == "seed" else 0)
    if dist.get_rank() == 1:
        options |= mine or {}
        model = build(family, **(changes or {})) if changes or family != "Llama" else model
        FAULTS.get(fault, lambda _: None)(model)
    with pytest.raises(LongspanError) as error:
        longspan.parallelize(model, sp, **options)
    return str(error.value)


CASES: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"fault": "bit"}, ("model.layers.1.mlp.up_proj.weight on rank 1, not as on ranks 0, 2, 3", "weights='broadcast'")),
    ({"fault": "bit", "fsdp": False}, ("model.layers.1.mlp.up_proj.weight on rank 1,", "torch.manual_seed")),
    ({"fault": "seed", "fsdp": False}, ("model.embed_tokens.weight and ", " more of 23 on ranks 1, 3")),
    ({"fault": "buffer"}, ("model.rotary_emb.inv_freq on rank 1",)),
    ({"fault": "frozen"}, ("weight is float32 [48, 32] on rank 1, float32 [48, 32], trained on ranks 0, 2, 3",)),
    ({"fault": "dtype"}, ("parameter model.embed_tokens.weight is bfloat16 [61, 32], trained on rank 1",)),
    ({"fault": "meta"}, ("no values (meta device) on rank 1",)),
    ({"mine": {"fsdp": False}}, ("fsdp is False on rank 1, True on ranks 0, 2, 3",)),
    ({"mine": {"kernel": "eager"}}, ("kernel is 'eager' on rank 1, 'auto' on ranks 0, 2, 3",)),
    ({"mine": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16)}}, ("mp_policy is", "None on ranks 0, 2, 3")),
    ({"mine": {"check_batches": 0}}, ("check_batches is 0 on rank 1, None on ranks 0, 2, 3",)),
    ({"mine": {"weights": "broadcast"}}, ("weights is 'broadcast' on rank 1",)),
    ({"changes": {"rms_norm_eps": 1e-3}}, ("config.rms_norm_eps is 0.001 on rank 1, 1e-06 on ranks 0, 2, 3",)),
    ({"changes": {"num_hidden_layers": 3}}, ("config.num_hidden_layers is 3 on rank 1, 2 on",)),
    ({"family": "Qwen3"}, ("the model's class is Qwen3ForCausalLM on rank 1, LlamaForCausalLM on ranks 0, 2, 3",)),
    ({"mine": {"kernel": "flash"}}, ("rank 1 cannot parallelize the model: ", "kernel='flash' is for NVIDIA")),
    ({"mine": {"weights": "none"}}, ("rank 1 cannot parallelize the model: weights='none' is unknown",)),
    ({"mine": {"check_weights": -1}}, ("rank 1 cannot parallelize the model: check_weights must be at least 0",)),
]  # fmt: skip


def _all_refused(cases: list[dict[str, Any]]) -> list[str]:
    sp = sharding(data=2)
    return [_refused(sp, **case) for case in cases]


def test_differences_are_named_on_every_rank(pool4: RankPool) -> None:
    results = pool4.run(_all_refused, [case for case, _ in CASES], timeout=120)
    for (case, texts), messages in zip(CASES, zip(*results, strict=True), strict=True):
        if case.get("mine", {}).get("kernel") != "flash":
            assert len(set(messages)) == 1, (case, messages)
        assert all(text in messages[0] for text in texts), (case, messages[0])


def _another_error() -> None:
    sp = sharding()
    longspan.parallelize(torch.nn.Linear if dist.get_rank() == 2 else build("Llama"), sp)  # type: ignore[type-var]


def test_an_error_of_another_kind_raises_on_all_ranks(pool4: RankPool) -> None:
    with pytest.raises(RankError) as error:
        pool4.run(_another_error, timeout=30)
    failures = error.value.failures
    assert len(failures) == 4
    assert all("rank 2 cannot parallelize the model" in failures[rank].message for rank in (0, 1, 3))


def _broadcast(fsdp: bool) -> None:
    sp = sharding(data=2)
    model = build("Llama", seed=dist.get_rank())
    model.model.rotary_emb.inv_freq.add_(dist.get_rank())
    if not fsdp:  # which FSDP refuses: not in the order of its memory
        model.lm_head.weight.data = model.lm_head.weight.data.t().contiguous().t()
    model = longspan.parallelize(model, sp, fsdp=fsdp, weights="broadcast")
    whole = batch()
    compare(truth_of(build("Llama", seed=0), whole), model, whole, sp)


@pytest.mark.parametrize("fsdp", [True, False])
def test_broadcast_weights(pool4: RankPool, fsdp: bool) -> None:
    pool4.run(_broadcast, fsdp)


def _meta() -> None:
    sp = sharding()
    with torch.device("meta"):
        model = build("Llama")
    with pytest.raises(LongspanError, match=r"embed_tokens.weight of LlamaForCausalLM is on the meta device"):
        longspan.parallelize(model, sp, fsdp=False)
    model = longspan.parallelize(model, sp)
    model.to_empty(device="cpu")
    full = build("Llama").state_dict()
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    set_model_state_dict(model, full, options=StateDictOptions(full_state_dict=True))
    model.model.rotary_emb.inv_freq.copy_(build("Llama").model.rotary_emb.inv_freq)
    compare(truth_of(build("Llama"), batch()), model, batch(), sp)


def test_models_on_the_meta_device(pool2: RankPool) -> None:
    pool2.run(_meta)


def _drift(every: int, fault: str) -> str:
    """Diverging replicas: one rank's optimizer has another learning rate, or a bit of its memory flips."""
    sp = sharding(data=2)
    model = longspan.parallelize(build("Llama"), sp, fsdp=False, check_weights=every)
    odd = dist.get_rank() == 3
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3 if odd and fault == "lr" else 1e-3)
    whole = {key: x[2 * sp.data_rank : 2 * sp.data_rank + 2] for key, x in batch().items()}
    for step in range(3 * every):
        with torch.no_grad():
            model(**whole)  # evaluation does not count
        if fault == "bit" and odd and step == every:
            model.lm_head.weight.data.view(torch.int32)[0, 0] ^= 1 << 20
        try:
            model(**whole).loss.backward()
        except LongspanError as error:
            return f"{step} {error}"
        optimizer.step()
        optimizer.zero_grad()
    return "unseen"


def test_diverging_replicas_raise(pool4: RankPool) -> None:
    for fault, step, name in (("bit", 3, "lm_head.weight on rank 3"), ("lr", 1, "model.embed_tokens.weight and")):
        messages = set(pool4.run(_drift, 2, fault))
        assert len(messages) == 1
        message = messages.pop()
        assert message.startswith(f"{step} the weights of the ranks have diverged: {name}"), message
        assert "rank 3, not as on ranks 0, 1, 2" in message and "2 training forwards ago" in message


def test_differences_and_odd_ones() -> None:
    assert odd_ones([1, 1, 2, 1]) == [2] and odd_ones([2, 1]) == [1] and odd_ones([3, 1, 1]) == [0]
    facts = [{"a": "1", "b": "x"}, {"a": "2"}, {"a": "1", "b": "x"}, {"a": "2", "b": "x"}, {"a": "1", "b": "x"}]
    assert differences(facts, [4, 5, 6, 7, 8]) == [
        "a is 2 on ranks 5, 7, 1 on ranks 4, 6, 8",
        "b is missing on rank 5, x on ranks 4, 6, 7, 8",
    ]
