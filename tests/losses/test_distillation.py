"""Divergences from a teacher without logits, compared with one process in fp64."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import longspan
from longspan.comm.tensor import TensorGroup
from longspan.core.errors import LongspanError
from longspan.losses.cross_entropy import IGNORE, loss_sum
from longspan.losses.deferred_logits import Head, VocabShard
from longspan.losses.divergence import Divergence, largest
from tests.choose import pairwise
from tests.elastic.samples import labels_of, samples_of
from tests.models import Run, batch, build, check_gradients, check_loss, gradients, on_mesh, rows_of, truth_by
from tests.oracle import plain_divergence
from tests.pool import RankPool, on_ranks

T, D, V = 50, 12, 37


class _Capped(nn.Module):
    """A head that the matmul path cannot take."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(D, V)

    def forward(self, x: Tensor) -> Tensor:
        return 3 * torch.tanh(self.base(x))


@pytest.mark.parametrize(
    ("kind", "beta", "temperature", "top_k"),
    pairwise(["matmul", "capped", "bfloat16"], [0.0, 1.0, 0.3], [1.0, 0.6], [None, 1, 5]),
)
def test_loss_and_gradients(
    monkeypatch: pytest.MonkeyPatch, kind: str, beta: float, temperature: float, top_k: int | None
) -> None:
    """A wider teacher, whose logits tie at the k-th place; tiles that do not end with rows."""
    monkeypatch.setattr("longspan.losses.cross_entropy.head_tile", lambda *_: 7)
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float64
    torch.manual_seed(0)
    module = (_Capped() if kind == "capped" else nn.Linear(D, V, bias=False)).to(dtype)
    teacher = nn.Linear(2 * D, V, bias=False).to(dtype)
    hidden, of_teacher = torch.randn(2, T // 2, D), torch.randn(2, T // 2, 2 * D)
    with torch.no_grad():
        teacher.weight[8] = teacher.weight[9] = teacher.weight[20] = 3 * of_teacher.mean((0, 1))
    hidden, of_teacher = hidden.to(dtype).requires_grad_(), of_teacher.to(dtype)
    labels = torch.randint(0, V, (2, T // 2))
    labels[0, :20] = IGNORE

    trained = [hidden, *module.parameters()]
    logits = [m(x).double() for m, x in ((module, hidden), (teacher, of_teacher))]
    of_tokens = plain_divergence(*logits, beta, temperature, top_k)
    exact = of_tokens[labels != IGNORE].sum()
    expected = [exact.detach(), *torch.autograd.grad(exact * 0.25, trained)]

    heads = Head(module), Head(teacher)
    heads[0].defer_next = heads[1].defer_next = True
    entropy = torch.zeros((), dtype=torch.float64)
    loss = loss_sum(module(hidden), labels, Divergence(teacher(of_teacher), beta, temperature, top_k, entropy))
    log_p = torch.log_softmax(logits[0] / temperature, -1)
    torch.testing.assert_close(
        entropy, -(log_p.exp() * log_p).sum(-1)[labels != IGNORE].sum().detach(), rtol=1e-6, atol=0
    )
    found = [loss.detach(), *torch.autograd.grad(loss * 0.25, trained)]
    assert teacher.weight.grad is None
    for mine, theirs in zip(found, expected, strict=True):
        limit = 2e-2 if dtype == torch.bfloat16 else 1e-12
        assert float((mine - theirs).norm() / theirs.norm()) <= limit


def test_distributions_without_common_tokens_have_finite_gradients() -> None:
    head, teacher = nn.Linear(4, 3, bias=False), nn.Linear(4, 3, bias=False)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[300.0], [0], [-300]]).expand(3, 4))
        teacher.weight.copy_(-head.weight)
    for beta in (0.0, 0.5, 1.0):
        for top_k in (None, 1):
            heads = Head(head), Head(teacher)
            heads[0].defer_next = heads[1].defer_next = True
            x = torch.ones(2, 4).requires_grad_()
            loss = loss_sum(head(x), torch.zeros(2, dtype=torch.int64), Divergence(teacher(x.detach()), beta, 1, top_k))
            assert bool(loss.isfinite()) and bool(torch.autograd.grad(loss, x)[0].isfinite().all())


def test_a_small_divergence_is_not_rounded_away() -> None:
    """In fp32 the plain formulas' own rounding is 2e-4 to 1e-3 of it."""
    torch.manual_seed(4)
    weight = 2 * torch.randn(5000, 16)
    head, teacher = (nn.Linear(16, 5000, bias=False) for _ in range(2))
    head.weight.data, teacher.weight.data = weight, weight + 0.03 * torch.randn_like(weight)
    for beta in (0.0, 0.3, 1.0):
        heads = Head(head), Head(teacher)
        heads[0].defer_next = heads[1].defer_next = True
        x, labels = torch.eye(16), torch.zeros(16, dtype=torch.int64)  # the logits are columns of the weights
        found = loss_sum(head(x), labels, Divergence(teacher(x), beta)) / 16
        exact = plain_divergence(head.weight.T.double(), teacher.weight.T.double(), beta, 1.0, None).mean()
        assert float(found) == pytest.approx(float(exact), rel=1e-5)


@on_ranks(2)
def test_the_first_of_equal_tokens_are_the_largest() -> None:
    """Also if two ranks share the vocabulary: 5 and 4 tokens."""
    x = torch.randint(4, (30, 9), generator=torch.Generator().manual_seed(0)).float()
    group = TensorGroup.of(dist.group.WORLD)
    shard = VocabShard.of(group, 9)
    for k in range(1, 10):
        first = x.sort(dim=-1, descending=True, stable=True).indices[:, :k]
        expected = torch.zeros_like(x, dtype=torch.bool).scatter_(-1, first, True)
        assert torch.equal(largest(x, k, None), expected)
        mine = slice(shard.start, shard.start + shard.width)
        assert torch.equal(largest(x[:, mine], k, shard), expected[:, mine])


# ---------------------------------------------------------------------------------------------------------------------
# Models over ranks.

OF_TEACHER = {"hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 6}


def packed() -> dict[str, Any]:
    """Rows of two documents, in which some labels are masked."""
    whole = batch()
    lengths = (8, 13)
    positions = torch.cat([torch.arange(n) for n in lengths]).expand(4, -1).contiguous()
    labels = whole["labels"].clone()
    labels[0, 3:9], labels[1], labels[:, lengths[0]] = IGNORE, IGNORE, IGNORE
    return {**whole, "labels": labels, "position_ids": positions}


INPUTS = {"rows": batch, "packed": packed}


def _reference(model: Any, teacher: Any, whole: dict[str, Any], options: dict[str, Any]) -> Run:
    other = teacher.to(model.dtype)
    inputs = {name: x for name, x in whole.items() if name != "labels"}
    logits = [m(**inputs, use_cache=False).logits[:, :-1] for m in (model, other)]
    counts = whole["labels"][:, 1:] != IGNORE
    of_tokens = plain_divergence(*logits, *(options.get(k, x) for k, x in DEFAULTS.items()))
    loss = of_tokens[counts].mean()
    loss.backward()
    return Run(float(loss.detach()), logits[0].detach(), gradients(model), None)


DEFAULTS: dict[str, Any] = {"beta": 0.0, "temperature": 1.0, "top_k": None}


def _compare(truth: Any, mesh: dict[str, int], family: str, inputs: str, options: dict[str, Any], fsdp: bool) -> None:
    sp = on_mesh(mesh)
    student = longspan.parallelize(build(family), sp, fsdp=fsdp)
    teacher = longspan.parallelize(build("Qwen3", seed=1, **OF_TEACHER), sp, fsdp=fsdp)
    whole = INPUTS[inputs]()
    mine = rows_of(whole, sp.data_rank, sp.data_size)
    loss = longspan.distillation_loss(student, teacher, mine, **options)
    loss.backward()
    check_loss(float(loss.detach()), truth)
    check_gradients(gradients(student), truth)
    assert all(p.grad is None for p in teacher.parameters())


CASES: list[tuple[dict[str, int], str, str, dict[str, Any], bool]] = [
    ({"ulysses": 2, "ring": 2}, "Llama", "packed", {"beta": 0.3, "temperature": 0.7}, True),
    ({"data": 2, "ring": 2}, "Llama", "packed", {"beta": 1.0}, True),
    ({"data": 2, "ulysses": 2}, "Llama", "packed", {"beta": 0.0, "top_k": 4}, False),
    ({"tensor": 2, "ring": 2}, "Llama", "rows", {"beta": 0.5, "top_k": 3, "temperature": 1.5}, True),
    ({"ring": 4}, "Gemma2", "rows", {"beta": 0.0}, True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_models(pool4: RankPool, case: Any) -> None:
    mesh, family, inputs, options, fsdp = case
    teacher = build("Qwen3", seed=1, **OF_TEACHER)
    truth = truth_by(build(family), lambda model: _reference(model, teacher, INPUTS[inputs](), options))
    pool4.run(_compare, truth, mesh, family, inputs, options, fsdp)


LENGTHS = (40, 9, 5, 18, 7)


def _alone(model: Any, teacher: Any) -> Run:
    """Each sample in a forward of its own; the mean over the labels of all."""
    total, items = torch.zeros((), dtype=model.dtype), labels_of(samples_of(LENGTHS))
    for sample in samples_of(LENGTHS):
        ids, labels = (torch.tensor([sample[key]]) for key in ("input_ids", "labels"))
        logits = [m(input_ids=ids).logits[:, :-1] for m in (model, teacher.to(model.dtype))]
        total = total + plain_divergence(*logits, 0.5, 1.0, None)[labels[:, 1:] != IGNORE].sum() / items
    total.backward()
    return Run(float(total.detach()), torch.zeros(1), gradients(model), None)


def _elastic(truth: Any) -> set[int]:
    sp = on_mesh({"ulysses": 4})
    student = longspan.parallelize(build("Llama"), sp)
    teacher = longspan.parallelize(build("Qwen3", seed=1, **OF_TEACHER), sp)
    (step,) = longspan.elastic_batches(samples_of(LENGTHS), sp, student, tokens_per_step=10**6, tokens_per_rank=12)
    total = 0.0
    for mine in step:
        with contextlib.nullcontext() if mine is step.batches[-1] else longspan.no_sync(student):
            loss = longspan.distillation_loss(student, teacher, mine, beta=0.5)
            loss.backward()
        total += float(loss.detach())
    check_loss(total, truth)
    check_gradients(gradients(student), truth)
    return {mine["sequence_width"] for mine in step}


def test_elastic_batches_and_accumulation(pool4: RankPool) -> None:
    teacher = build("Qwen3", seed=1, **OF_TEACHER)
    truth = truth_by(build("Llama"), lambda model: _alone(model, teacher))
    assert len(set().union(*pool4.run(_elastic, truth))) > 1


def _refused() -> list[str]:
    sp, ring = on_mesh({"ulysses": 2}), on_mesh({"ring": 2})
    student = longspan.parallelize(build("Llama"), sp)
    teacher = longspan.parallelize(build("Llama", seed=1), sp)
    cases: list[tuple[Any, dict[str, Any]]] = [
        (teacher, {"temperature": 0.0}),
        (teacher, {"temperature": -1.0}),
        (teacher, {"beta": 1.5}),
        (teacher, {"top_k": 0}),
        (teacher, {"top_k": 62}),
        (student, {}),
        (longspan.parallelize(build("Llama", seed=1), ring), {}),
        (longspan.parallelize(build("Llama", seed=1, vocab_size=64), sp), {}),
        (teacher, {"temperature": 1.0 + sp.rank}),
    ]
    said = []
    for other, options in cases:
        with pytest.raises(LongspanError) as error:
            longspan.distillation_loss(student, other, batch(), **options)
        said.append(str(error.value))
    return said


def test_wrong_arguments_are_refused_on_every_rank(pool2: RankPool) -> None:
    mine, other = pool2.run(_refused)
    parts = (
        ("temperature", "0.0"), ("temperature", "-1.0"), ("beta", "1.5"), ("top_k", "least 1"), ("top_k", "most 61"),
        ("same model",), ("ring=2", "ulysses=2", "the same SequenceSharding"), ("64", "61", "tokenizer"),
        ("temperature=1.0", "temperature=2.0"),
    )  # fmt: skip
    for text, needed in zip(mine, parts, strict=True):
        assert all(part in text for part in needed), (text, needed)
    assert other == mine
