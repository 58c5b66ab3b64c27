"""The loss and log-probabilities without logits, compared with one process in fp64."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import longspan
from longspan.comm.mesh import MeshGroups
from longspan.core.errors import LongspanError
from longspan.losses.cross_entropy import IGNORE, LossTerms, loss_sum
from longspan.losses.deferred_logits import DeferredLogits, Head
from longspan.losses.divergence import Divergence
from longspan.losses.logprobs import EXTRAS, logprobs_of, uniform_logprobs
from tests.choose import pairwise
from tests.models import Run, batch, build, check_gradients, gradients, rows_of, sharding, truth_by
from tests.pool import RankPool, on_ranks
from tests.tolerance import excess

T, D, V = 50, 12, 37


class _Lora(nn.Module):
    """A head as PEFT wraps it: a frozen matmul, and two small trained ones."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.a, self.b = base.requires_grad_(False), nn.Linear(D, 3, bias=False), nn.Linear(3, V, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2 * self.b(self.a(x))


ONE_DEVICE = longspan.SequenceSharding(MeshGroups("cpu"))

HEADS: dict[str, Any] = {
    "plain": lambda base: base,
    "bias": lambda base: nn.Linear(D, V),
    "lora": _Lora,
    "frozen": lambda base: base.requires_grad_(False),
}
STEPS: dict[str, Any] = {
    "none": lambda x: x,
    "scaled": lambda x: x * 0.3,
    "capped": lambda x: torch.tanh(x / 2.0) * 2.0,
    "float": lambda x: (x / 4).float()[..., :31] if x.dtype != torch.float64 else (x / 4)[..., :31],
}


def _case(head: str, dtype: torch.dtype) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    module = HEADS[head](nn.Linear(D, V, bias=False)).to(dtype)
    hidden = torch.randn(2, T // 2, D).to(dtype).requires_grad_()
    labels = torch.randint(0, 31, (2, T // 2))
    labels[0, :20] = IGNORE
    return module, hidden, labels


def _plain_loss(logits: Tensor, labels: Tensor, terms: LossTerms) -> Tensor:
    x, y = logits.flatten(0, 1), labels.flatten()
    loss = F.cross_entropy(x, y, reduction="sum", label_smoothing=terms.label_smoothing)
    return loss + terms.z_loss * (x.logsumexp(-1).square() * (y != IGNORE)).sum()


@pytest.mark.parametrize(
    ("head", "steps", "terms", "deferred"), pairwise(HEADS, STEPS, [LossTerms(), LossTerms(0.1, 1e-2)], [True, False])
)
def test_loss_and_gradients(
    monkeypatch: pytest.MonkeyPatch, head: str, steps: str, terms: LossTerms, deferred: bool
) -> None:
    monkeypatch.setattr("longspan.losses.cross_entropy.head_tile", lambda *_: 7)  # tiles that do not end with rows
    found = []
    for compute, dtype in ((loss_sum, torch.float32), (_plain_loss, torch.float32), (_plain_loss, torch.float64)):
        module, hidden, labels = _case(head, dtype)
        trained = [hidden, *(p for p in module.parameters() if p.requires_grad)]
        if deferred and compute is loss_sum:
            Head(module).defer_next = True
        logits = STEPS[steps](module(hidden))
        if isinstance(logits, Tensor) and compute is loss_sum:  # through the public function
            options = {"label_smoothing": terms.label_smoothing, "z_loss": terms.z_loss}
            loss = longspan.causal_lm_loss(logits, labels, ONE_DEVICE, 1, **options)
        else:
            loss = compute(logits, labels, terms)
        found.append([loss.detach(), *torch.autograd.grad(loss * 0.25, trained)])
    for mine, single, exact in zip(*found, strict=True):
        assert excess(mine, single, exact) <= 1


def test_low_precision_heads_accumulate_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    # bf16 has 8 bits: a gradient accumulated over 50 tokens one by one would lose most of them.
    grads = []
    for rows in (1, T):
        monkeypatch.setattr("longspan.losses.cross_entropy.head_tile", lambda *_, rows=rows: rows)
        module, hidden, labels = _case("plain", torch.bfloat16)
        Head(module).defer_next = True
        loss_sum(module(hidden), labels).backward()
        assert module.weight.grad is not None and module.weight.grad.dtype == torch.bfloat16
        grads.append(module.weight.grad.float())
    assert float((grads[0] - grads[1]).norm() / grads[1].norm()) < torch.finfo(torch.bfloat16).eps


class _Largest(TorchDispatchMode):
    """Records the most elements of any tensor that an operator returns."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, Tensor):
                self.most = max(self.most, x.numel())
        return out


@pytest.mark.parametrize("what", ["loss", "logprobs", "divergence"])
def test_no_tensor_is_as_large_as_the_logits(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    for name in ("cross_entropy", "logprobs"):
        monkeypatch.setattr(f"longspan.losses.{name}.head_tile", lambda *_: 8)
    module, hidden, labels = _case("plain", torch.float32)
    Head(module).defer_next = True
    with _Largest() as seen:
        logits = module(hidden)
        if what == "divergence":
            teacher, of_teacher, _ = _case("plain", torch.float32)
            Head(teacher).defer_next = True
            loss = loss_sum(logits, labels, Divergence(teacher(of_teacher.detach()), beta=0.5, top_k=3))
        elif what == "loss":
            loss = loss_sum(logits, labels)
        else:
            loss = sum(x.sum() for x in logprobs_of(logits, labels, entropy=True))
        loss.backward()
    assert seen.most == max(8 * V, V * D, T * D) < T * V


@pytest.mark.parametrize("head", ["plain", "lora"])
def test_a_sum_of_log_probabilities_needs_each_tile_once(monkeypatch: pytest.MonkeyPatch, head: str) -> None:
    """The results and gradients of `logprobs_of`, which computes each tile twice."""
    monkeypatch.setattr("longspan.losses.logprobs.head_tile", lambda *_: 8)
    found, computed = [], list[int]()
    for uniform in (True, False):
        module, hidden, labels = _case(head, torch.float32)
        deferring = Head(module)
        deferring.defer_next, deferring.observer = True, lambda x: computed.append(len(x))
        logits = module(hidden)
        scores = uniform_logprobs(logits, labels) if uniform else logprobs_of(logits, labels, False, EXTRAS[:2])
        trained = [p for p in module.parameters() if p.requires_grad]
        found.append([*scores, *torch.autograd.grad(-scores[0].sum() / 7, [hidden, *trained])])
        assert sum(computed) == (T if uniform else 3 * T)
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    Head(module).defer_next = True
    with pytest.raises(LongspanError, match="no multiple of the sum"):
        uniform_logprobs(module(hidden), labels)[0].square().sum().backward()


@pytest.mark.parametrize(
    ("use", "text"),
    [
        (lambda x: torch.softmax(x, -1), "calls softmax on logits"),
        (lambda x: x.argmax(-1), r"reads logits\.argmax"),
        (lambda x: x[:, -1], r"reads logits\["),
        (lambda x: x * torch.ones(V), r"multiplies logits by a tensor of shape \(37,\)"),
        (lambda x: torch.tanh(input=x), "calls tanh on logits"),
    ],
)
def test_reading_deferred_logits_raises_with_the_fix(use: Any, text: str) -> None:
    module, hidden, _ = _case("plain", torch.float32)
    Head(module).defer_next = True
    logits = module(hidden)
    assert isinstance(logits, DeferredLogits) and logits.shape == (2, T // 2, V)
    with pytest.raises(LongspanError, match=text + r".*longspan\.parallelize\(\.\.\., logits=True\)"):
        logprobs_of(use(logits), torch.zeros(2, T // 2, dtype=torch.int64))
    assert isinstance(module(hidden), Tensor)  # only one call is deferred


def test_a_second_backward() -> None:
    """A retained graph gives the same gradients again; without it, it raises."""
    module, hidden, labels = _case("plain", torch.float32)
    Head(module).defer_next = True
    loss = loss_sum(module(hidden), labels)
    loss.backward(retain_graph=True)
    first = [hidden.grad.clone(), module.weight.grad.clone()]
    loss.backward()
    for x, once in zip((hidden.grad, module.weight.grad), first, strict=True):
        torch.testing.assert_close(x, 2 * once)
    with pytest.raises(LongspanError, match=r"a second backward .*logits=True"):
        loss.backward()


def test_training_outputs_have_no_logits_unless_asked() -> None:
    model = longspan.parallelize(build("Llama"), longspan.SequenceSharding(longspan.init_mesh())).train()
    out = model(**batch())
    assert list(out) == ["loss"] and out.logits is None
    assert model.eval()(**batch()).logits.shape == (4, 21, 61)
    asked = longspan.parallelize(build("Llama"), longspan.SequenceSharding(longspan.init_mesh()), logits=True).train()
    assert asked(**batch()).logits.shape == (4, 21, 61)


@pytest.mark.parametrize("what", ["loss", "logprobs"])
def test_autocast_applies_to_tiles(what: str) -> None:
    # The backward runs without autocast; it must recompute the same values as the forward.
    grads = []
    for deferred in (True, False):
        module, hidden, labels = _case("plain", torch.float32)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            if deferred:
                Head(module).defer_next = True
            logits = module(hidden)
            if what == "loss":
                loss = loss_sum(logits, labels)
            elif deferred:
                loss = logprobs_of(logits, labels)[0].square().sum()
            else:
                log_p = torch.log_softmax(logits, -1, dtype=torch.float32)
                chosen = log_p.gather(-1, labels.clamp_min(0)[..., None])[..., 0]
                loss = torch.where(labels == IGNORE, 0, chosen).square().sum()
            assert isinstance(logits, DeferredLogits) == deferred and logits.dtype == torch.bfloat16
        grads.append(torch.autograd.grad(loss, [hidden, module.weight]))
    for mine, plain in zip(*grads, strict=True):
        assert float((mine - plain).norm() / plain.norm()) < torch.finfo(torch.bfloat16).eps / 8


# ---------------------------------------------------------------------------------------------------------------------
# Log-probabilities of tokens.


WEIGHTS = torch.rand(4, 21, generator=torch.Generator().manual_seed(5))
"""A loss of log-probabilities and entropies with another factor for each token, as in RL."""


def _reference(model: Any, temperature: float) -> Run:
    whole = batch()
    labels = torch.full_like(whole["labels"], IGNORE)
    labels[:, :-1] = whole["labels"][:, 1:]
    log_p = torch.log_softmax(model(input_ids=whole["input_ids"]).logits / temperature, -1)
    counts = labels != IGNORE
    chosen = torch.where(counts, log_p.gather(-1, labels.clamp_min(0)[..., None])[..., 0], 0)
    entropy = torch.where(counts, -(log_p.exp() * log_p).sum(-1), 0)
    loss = (WEIGHTS * (chosen + 0.1 * entropy)).sum()
    loss.backward()
    return Run(float(loss.detach()), torch.stack([chosen, entropy]).detach(), gradients(model), None)


@on_ranks(2)
def test_a_training_step_does_not_warn() -> None:
    model = longspan.parallelize(build("Llama"), sharding()).train()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(**batch()).loss.backward()


def _logprobs(truth: Any, data: int, ring: int, fsdp: bool, gather: bool) -> None:
    sp = sharding(data, ring)
    model = longspan.parallelize(build("Llama"), sp, fsdp=fsdp)
    mine, weights = rows_of(batch(), sp.data_rank, data), WEIGHTS.chunk(data)[sp.data_rank]
    found = longspan.token_logprobs(model, mine, temperature=0.7, entropy=True, gather=gather)
    if gather:  # replicas are averaged
        (data * (weights * (found[0] + 0.1 * found[1])).sum()).backward()
    else:
        scores = sp.shard(weights) * (found[0] + 0.1 * found[1])
        real = sp.shard(torch.ones(len(scores), 21)) > 0
        (WEIGHTS.numel() * longspan.global_mean(scores, sp, mask=real)).backward()
    check_gradients(gradients(model), truth)
    for i, x in enumerate(found):
        whole = x.detach() if gather else sp.gather(x.detach(), dim=1, length=21)
        exact, single = (run.logits[i].chunk(data)[sp.data_rank] for run in (truth.exact, truth.single))
        assert excess(whole, single, exact) <= 1
    with torch.no_grad():
        again = longspan.token_logprobs(model, mine, temperature=0.7, gather=gather)
    assert torch.equal(again, found[0])
    dist.barrier()


@pytest.mark.parametrize(
    ("data", "ring", "fsdp", "gather"), [(1, 2, True, True), (2, 2, True, False), (2, 1, False, True)]
)
def test_token_logprobs(pool4: RankPool, data: int, ring: int, fsdp: bool, gather: bool) -> None:
    truth = truth_by(build("Llama"), lambda model: _reference(model, 0.7))
    pool4.run(_logprobs, truth, data, ring, fsdp, gather)


def test_token_logprobs_errors() -> None:
    with pytest.raises(LongspanError, match="is not parallelized"):
        longspan.token_logprobs(build("Llama"), batch())
    model = longspan.parallelize(build("Llama"), longspan.SequenceSharding(longspan.init_mesh()))
    with pytest.raises(LongspanError, match=r"temperature.*0"):
        longspan.token_logprobs(model, batch(), temperature=0)
    with pytest.raises(LongspanError, match="no labels"):
        longspan.token_logprobs(model, {"inputs_embeds": torch.zeros(1, 4, 32)})
