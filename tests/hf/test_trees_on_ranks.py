"""Trees of shared prefixes on several ranks: every mesh and layout, and equal refusals."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import longspan
from longspan.core.errors import LongspanError
from tests.attn.trees import FAMILIES, compare_trees, pack, separately
from tests.models import Truth, build, ropes, sharding, truth_by
from tests.pool import RankPool


def _on_meshes(family: str, meshes: list[tuple[int, str, bool]], truth: Truth, options: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of ranks without heads
        for ring, layout, fsdp in meshes:
            compare_trees(family, sharding(1, ring, layout), truth, fsdp=fsdp, **options)


@pytest.mark.parametrize(
    ("family", "meshes", "options"),
    [
        ("Llama", [(1, "auto", True), (2, "zigzag", True), (4, "contiguous", False)], {}),
        ("Gemma3Text", [(2, "contiguous", True)], {"memory": "longest"}),
        ("GptOss", [(4, "zigzag", True)], {}),
    ],
)
def test_every_mesh(get_pool: Callable[[int], RankPool], family: str, meshes: Any, options: Any) -> None:
    truth = truth_by(build(family, **FAMILIES[family]), separately)
    get_pool(4).run(_on_meshes, family, meshes, truth, options)


def _on_a_tensor_axis(truth: Truth) -> None:
    sp = longspan.SequenceSharding(longspan.init_mesh(ulysses=2, tensor=2))
    compare_trees("Llama", sp, truth)


def test_a_tensor_axis(get_pool: Callable[[int], RankPool]) -> None:
    """The vocabulary is sharded: weights are of tokens, not of its shards."""
    get_pool(4).run(_on_a_tensor_axis, truth_by(build("Llama"), separately))


def _two(name: str) -> torch.Tensor:
    """Two rows, the second of one node."""
    x = pack()[name]
    return torch.cat([x, torch.full_like(x, name == "tout") if name in ("tin", "tout") else x])


REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("Llama", {}, {"tout": None}, "a batch with `tin` needs `tin` and `tout`"),
    ("Llama", {}, {"document_ids": torch.zeros(1, 49, dtype=torch.int64)}, "`document_ids` marks documents"),
    ("Llama", {}, {"tin": torch.arange(49).flip(0)[None]}, "nodes lie in preorder|tout <= tin"),
    ("Llama", {}, {"shift_labels": None}, "`loss_weights` are weights of labels"),
    ("Llama", {}, {"loss_weights": -torch.ones(1, 49)}, "`loss_weights` must be finite numbers of at least 0"),
    ("Llama", {}, {"loss_weights": torch.ones(1, 4)}, r"`loss_weights` has the shape \(1, 4\)"),
    ("Llama", {}, {"shift_labels": None, "labels": torch.arange(49)[None], "loss_weights": None},
     "several children, whose `labels` differ"),
    ("Qwen3Moe", {"output_router_logits": True}, {}, "adds a router loss"),
    ("Bert", {}, {"shift_labels": None, "loss_weights": None}, "is no causal language model"),
    ("Llama", ropes("longrope", 64), {}, r"paths of this tree have 4 to 22 tokens, .*\(longrope RoPE\).* 16 original"),
    ("Llama", ropes("dynamic", 16), {}, r"paths of this tree have 4 to 22 tokens, .*\(dynamic RoPE\).* 16 original"),
    ("Gemma3Text", {"use_bidirectional_attention": True}, {}, "attend in both directions, and a tree"),
    ("Llama", {"kernel": "sdpa"}, {}, "layer model.layers.0.self_attn: kernel='sdpa' cannot do trees"),
    ("Llama4Text", {}, {name: _two(name) for name in pack()},
     "the documents or trees of these rows differ"),
    ("Qwen3Next", {}, {}, "the recurrent layers of Qwen3NextForCausalLM .* a tree"),
]  # fmt: skip


def _refuse_all() -> None:
    """Two replicas, of which one has no tree: neither waits for the other."""
    sp = sharding(data=2)
    ids = torch.arange(49)[None]
    for family, changes, batch, message in REFUSED:
        options = {name: changes[name] for name in ("memory", "kernel") if name in changes}
        config = {name: value for name, value in changes.items() if name not in options}
        model = longspan.parallelize(build(family, **config), sp, fsdp=False, **options)
        given = {"input_ids": ids, "labels": ids} if sp.data_rank else {**pack(), **batch}
        with pytest.raises(LongspanError, match=message):
            model(**{name: x for name, x in given.items() if x is not None})


def _refuse_prefixes() -> None:
    """One of two replicas has a batch that cannot be packed, or labels that cannot be cut."""
    sp, ids = sharding(data=2), torch.arange(20)[None]
    model = longspan.parallelize(build("Llama"), sp, fsdp=False)
    for more, options, message in (
        ({"token_type_ids": ids}, {"shared_prefixes": True}, "this one has `token_type_ids`"),
        ({"labels": ids, "attention_mask": (ids < 9).long()}, {}, "tokens of right-hand padding"),
    ):
        with pytest.raises(LongspanError, match=message):
            longspan.token_logprobs(model, {"input_ids": ids, **(more if sp.data_rank else {})}, gather=True, **options)


def test_prefixes_refused_on_every_rank(pool2: RankPool) -> None:
    pool2.run(_refuse_prefixes)


def test_refused_on_every_rank(pool2: RankPool) -> None:
    assert pack()["input_ids"].shape[1] == 49
    pool2.run(_refuse_all)
