"""Trees of shared prefixes: losses, log-probabilities and gradients are those of the separate sequences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import longspan
from longspan.attn.tree import read_trees
from longspan.core.errors import LongspanError
from tests.attn.attention import one_device
from tests.attn.trees import COMPLETIONS, FAMILIES, PROMPTS, WHOLE, compare_trees, labels_of_rollouts, pack, separately
from tests.models import Run, build, check_gradients, check_loss, gradients, truth_by
from tests.tolerance import excess


@pytest.mark.parametrize("family", FAMILIES)
def test_one_device(family: str) -> None:
    truth = truth_by(build(family, **FAMILIES[family]), separately)
    compare_trees(family, one_device(), truth)


@pytest.mark.confirms
def test_compiled_layers() -> None:
    compare_trees("Mistral", one_device(), truth_by(build("Mistral", **FAMILIES["Mistral"]), separately), compiled=True)


def _policy_loss(scores: list[Tensor]) -> Tensor:
    return torch.stack([(row.exp() * (i + 1)).sum() for i, row in enumerate(scores)]).sum()


def _policy(model: Any) -> Run:
    alone = []
    for prompt, ids in zip(PROMPTS, COMPLETIONS, strict=True):
        log_p = model(input_ids=torch.tensor([prompt + ids])).logits[0].log_softmax(-1)
        rest = ids if prompt else ids[1:]
        alone.append(log_p[-len(rest) - 1 : -1].gather(-1, torch.tensor(rest)[:, None])[:, 0])
    loss = _policy_loss(alone)
    loss.backward()
    return Run(float(loss.detach()), torch.cat(alone).detach(), gradients(model), None)


def test_a_loss_of_log_probabilities() -> None:
    """A policy's loss: shared tokens get the gradients of all their rollouts."""
    truth = truth_by(build("Llama"), _policy)
    model = longspan.parallelize(build("Llama"), one_device())
    packed = longspan.pack_tree([torch.tensor(ids) for ids in PROMPTS], COMPLETIONS)
    found = packed.completions(longspan.token_logprobs(model, packed, gather=True))
    rows = [row[0 if prompt else 1 : len(ids)] for row, prompt, ids in zip(found, PROMPTS, COMPLETIONS, strict=True)]
    loss = _policy_loss(rows)
    loss.backward()
    check_loss(float(loss.detach()), truth)
    check_gradients(gradients(model), truth)
    assert excess(torch.cat(rows), truth.single.logits, truth.exact.logits) <= 1


def test_the_pack() -> None:
    packed, once = pack(), pack(count="once")
    n = packed["input_ids"].shape[1]
    # 14 tokens of a prompt, once for 5 rollouts and the start of a sixth; each branch copies one token.
    assert n < sum(map(len, WHOLE)) - 4 * 12
    for ids, path in zip(WHOLE, packed.paths, strict=True):
        assert packed["input_ids"][0, path].tolist() == ids
        assert packed["position_ids"][0, path].tolist() == list(range(len(ids)))
    labels = labels_of_rollouts()
    trained = sum((row >= 0).int().sum() for row in labels)
    assert packed["loss_weights"].sum() == trained
    assert once["loss_weights"].sum() == (packed["shift_labels"] >= 0).sum() < trained
    mask = longspan.TreeMask(packed["tin"], packed["tout"]).dense(1, 1, torch.arange(n), torch.arange(n))[0, 0]
    for path in packed.paths:
        assert (mask[path[-1]].nonzero()[:, 0] == path).all()
    few = pack(shortest=10)  # only the prompts' first 8 tokens, and more of four rollouts
    assert sum(map(len, WHOLE)) > few["input_ids"].shape[1] > n


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=9), st.integers(1, 3))
def test_any_sequences(rollouts: list[list[int]], shortest: int) -> None:
    packed = longspan.pack_tree([[]] * len(rollouts), rollouts, shortest=shortest)
    n = packed["input_ids"].shape[1]
    assert n <= sum(map(len, rollouts))
    mask = longspan.TreeMask(packed["tin"], packed["tout"])
    dense = mask.dense(1, 1, torch.arange(n), torch.arange(n))[0, 0]
    regions = mask.regions(0, n, n)
    assert sum(region.pairs for region in regions) == dense.sum()
    assert len(regions) <= int(packed["tin"].max()) + 1
    uses = torch.zeros(n)
    for ids, path in zip(rollouts, packed.paths, strict=True):
        assert packed["input_ids"][0, path].tolist() == ids
        assert dense[path[-1]].nonzero()[:, 0].tolist() == path.tolist()
        assert packed["shift_labels"][0, path[:-1]].tolist() == ids[1:]
        uses[path[:-1]] += 1
    assert torch.equal(uses, packed["loss_weights"][0])


def test_labels_are_shifted_along_paths() -> None:
    packed = pack()
    shifted = dict(longspan.shard_batch(packed, one_device()))
    del packed["shift_labels"], packed["loss_weights"], packed["position_ids"]
    packed["labels"] = packed["input_ids"]
    batch = longspan.shard_batch(packed, one_device())
    assert torch.equal(batch["position_ids"], shifted["position_ids"])
    trained = shifted["labels"] >= 0
    assert torch.equal(batch["labels"][trained], shifted["labels"][trained])
    assert (batch["labels"][0, [int(path[-1]) for path in pack().paths if len(path) != 17]] == -100).all()


def test_several_trees_with_padding() -> None:
    """Two rows of different lengths: the weighted mean over both."""
    halves = [longspan.pack_tree(PROMPTS[a:b], COMPLETIONS[a:b]) for a, b in ((0, 4), (4, 9))]
    n = max(half["input_ids"].shape[1] for half in halves)
    rows: dict[str, list[Tensor]] = {}
    for half in halves:
        more = n - half["input_ids"].shape[1]
        for name, x in half.items():
            fill = -100.0 if name == "shift_labels" else float(x.max()) + (name == "tout") if name[0] == "t" else 0
            rows.setdefault(name, []).append(F.pad(x, (0, more), value=fill))
        rows.setdefault("attention_mask", []).append(F.pad(torch.ones_like(half["input_ids"]), (0, more)))
    losses = []
    for batch in ({name: torch.cat(of) for name, of in rows.items()}, longspan.pack_tree(PROMPTS, COMPLETIONS)):
        model = longspan.parallelize(build("Llama").double(), one_device())
        model(**batch).loss.backward()
        losses.append(gradients(model))
    torch.testing.assert_close(losses[0], losses[1])


IDS = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(0))
WEIGHTS = torch.rand(2, 9, generator=torch.Generator().manual_seed(1)) / 20
"""They add up to less than 1."""


def _weighted(model: Any) -> Run:
    logits, weights = model(input_ids=IDS).logits, WEIGHTS[:, 1:].flatten()
    losses = F.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten(), reduction="none")
    loss = (losses * weights).sum() / weights.sum()
    loss.backward()
    return Run(float(loss.detach()), logits.detach(), gradients(model), None)


@pytest.mark.parametrize("logits", [False, True])
def test_weights_without_a_tree(logits: bool) -> None:
    truth = truth_by(build("Llama"), _weighted)
    model = longspan.parallelize(build("Llama").train(), one_device(), logits=logits)
    loss = model(input_ids=IDS, labels=IDS, loss_weights=WEIGHTS).loss
    loss.backward()
    check_loss(float(loss.detach()), truth)
    check_gradients(gradients(model), truth)


# ---------------------------------------------------------------------------------------------------------------------
# What is refused.


@pytest.mark.parametrize(
    ("tin", "tout", "message"),
    [
        ([0, 1, 2], [3, 3], r"need one shape, .* got \(3,\) and \(2,\)"),
        ([0.0, 1.0], [2, 2], "`tin` must be a tensor of integers"),
        ([0, 1, 2], [3, 1, 3], r"token 1 of row 0 \(tin 1, tout 1\) has tout <= tin"),
        ([0, 2, 1], [3, 3, 2], "token 2 of row 0 .* smaller tin than the token before it"),
        ([0, 1, 2, 3], [2, 3, 3, 4], r"tokens 0 \(tin 0, tout 2\) and 1 \(tin 1, tout 3\) .* token 2 would have two p"),
        ([0, 0], [1, 2], "overlap|tout"),
    ],
)
def test_intervals_that_are_no_tree(tin: list[Any], tout: list[int], message: str) -> None:
    if message == "overlap|tout":  # equal starts: the second one sees the first, which nothing else does
        assert read_trees(torch.tensor(tin), torch.tensor(tout)) == (((0, 2, 2),),)
        return
    with pytest.raises(LongspanError, match=message):
        longspan.TreeMask(torch.tensor(tin), torch.tensor(tout))


def test_attention_refuses() -> None:
    q = torch.randn(1, 6, 2, 8)
    tree = longspan.TreeMask(torch.arange(6), torch.full((6,), 6))
    sp = one_device()
    for options, message in (
        ({"mask": longspan.TreeMask(torch.arange(5), torch.full((5,), 5))}, "of 5 tokens does not fit 1 rows of 6"),
        ({"mask": tree, "alibi": torch.ones(2)}, "`alibi` measures distances along the row"),
        ({"mask": tree, "window": 3}, "`mask` was given together with window"),
        ({"mask": tree, "kernel": "sdpa"}, "cannot do trees"),
    ):  # fmt: skip
        with pytest.raises(LongspanError, match=message):
            longspan.attention(q, q, q, sp, **options)
    with pytest.raises(LongspanError, match="trees need a causal mask"):
        longspan.Mask(causal=False, nodes=tree.nodes)
    # A chain is a causal mask.
    assert torch.equal(longspan.attention(q, q, q, sp, mask=tree), longspan.attention(q, q, q, sp, kernel="tiled"))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (([[1], [1]], [[2], []]), r"completions\[1\] is empty"),
        (([[1]], [[2, 3]], [[1]]), r"masks\[0\] must have a 0 or 1 for each of the 2"),
    ],
)
def test_packs_that_are_refused(args: Any, message: str) -> None:
    with pytest.raises(LongspanError, match=message):
        longspan.pack_tree(*args)


def test_rows_that_share_prefixes() -> None:
    """A batch of padded rows, as trainers have it, packed inside: the rows' results."""
    n = max(map(len, WHOLE))
    ids = torch.tensor([[0] * (i % 2) + row + [0] * (n - len(row) - i % 2 + 1) for i, row in enumerate(WHOLE)])
    mask = torch.tensor(
        [[0] * (i % 2) + [1] * len(row) + [0] * (n - len(row) - i % 2 + 1) for i, row in enumerate(WHOLE)]
    )
    batch = {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": ids.masked_fill((mask.cumsum(-1) < 2) | (mask == 0) | (ids < 12), -100),
    }
    model = longspan.parallelize(build("Llama"), one_device())
    found, expected = (
        longspan.token_logprobs(model, batch, entropy=True, top1=True, gather=True, shared_prefixes=shared)
        for shared in (True, False)
    )
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)
    for change, message in (
        ({"labels": ids}, "`labels` must be the tokens or -100"),
        ({"labels": torch.full_like(ids, 7)}, "`labels` must be the tokens or -100"),
        ({"position_ids": torch.arange(n + 1)[None]}, "`position_ids` must count each row's tokens from 0"),
        ({"attention_mask": 1 - mask}, "zeros at the ends|labels"),
        ({"token_type_ids": mask}, "this one has `token_type_ids`"),
    ):
        with pytest.raises(LongspanError, match=message):
            longspan.token_logprobs(model, {**batch, **change}, gather=True, shared_prefixes=True)
    with pytest.raises(LongspanError, match="needs gather=True"):
        longspan.token_logprobs(model, batch, shared_prefixes=True)
