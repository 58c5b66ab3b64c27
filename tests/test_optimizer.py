"""Memory of gradients and optimizer states: the step in the backward, bf16 sums, offload, 8-bit states."""

from __future__ import annotations

import functools
import json
import math
import re
import shutil
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import longspan
from longspan.comm.mesh import mesh_of_one
from longspan.core.errors import LongspanError
from longspan.core.sections import replace
from longspan.data.stream import Sequence, deal
from longspan.train import TrainConfig
from longspan.train.loop import Trainer
from longspan.train.optimizer import Muon, make_optimizer, make_scheduler
from tests.choose import confirming, each_value
from tests.fakes import fake_world
from tests.memory import peak_of
from tests.models import build
from tests.pool import RankError, RankPool, on_ranks, run_forked
from tests.tolerance import roughly
from tests.training import LLAMA, log_of, losses_of, refused, small_run, train, train_on, weights_of, write_config


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    """4 steps of one sequence of 60 tokens."""
    return small_run(write_config(tmp_path), tmp_path / "run", batch=1, clip=0)


def _same_weights(one: TrainConfig, other: TrainConfig) -> bool:
    expected = weights_of(one.out)
    return all(torch.equal(x, expected[name]) for name, x in weights_of(other.out).items())


# --- the step in the backward


@pytest.mark.parametrize(
    "mesh", [{"data_degree": 2, "batch": 2, "dtype": "bf16", "save_every": 0}, *confirming([{"ulysses": 2}])]
)
def test_the_step_in_the_backward_is_the_step_after_it(
    config: TrainConfig, pool2: RankPool, mesh: dict[str, Any]
) -> None:
    """On Ulysses ranks: the run below that resumes."""
    plain = replace(config, **mesh)
    inside = replace(plain, optimizer_in_backward=True, out=config.out / "inside")
    for one in (plain, inside):
        train_on(pool2, one)
    assert losses_of(inside.out) == losses_of(plain.out)
    assert _same_weights(plain, inside)
    for mine, theirs in zip(log_of(inside.out), log_of(plain.out), strict=True):
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=roughly(torch.float32))
        assert mine["lr"] == theirs["lr"]


def test_a_run_resumes_with_and_without_the_step_in_the_backward(config: TrainConfig, pool2: RankPool) -> None:
    whole = replace(config, ulysses=2, schedule="constant")
    train_on(pool2, whole)
    parts = replace(whole, out=config.out / "parts")
    for steps, inside in ((1, True), (2, False), (4, True)):
        train_on(pool2, replace(parts, steps=steps, optimizer_in_backward=inside))
    assert losses_of(parts.out) == losses_of(whole.out)
    assert _same_weights(whole, parts)


def _model(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**LLAMA, **changes}))


def _batch(n: int = 24) -> dict[str, torch.Tensor]:
    ids = torch.arange(n)[None] * 7 % 384
    return {"input_ids": ids, "labels": ids}


def _gradients_at_once(size: int) -> tuple[int, int, int, float, float]:
    """Return of one step: weights, most gradients alive at once, those left, the norm, that of a plain backward."""
    sp = longspan.SequenceSharding(longspan.init_mesh(ulysses=size))
    model = longspan.parallelize(_model(tie_word_embeddings=True), sp)
    model(**_batch()).loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    plain = (norm.full_tensor() if hasattr(norm, "full_tensor") else norm).item()
    model.zero_grad()
    weights = list(model.parameters())
    alive: list[int] = []
    # Before longspan's hook, which frees the gradient.
    for p in weights:
        p.register_post_accumulate_grad_hook(lambda _: alive.append(sum(p.grad is not None for p in weights)))
    updates = longspan.optimizer_in_backward(model, torch.optim.SGD(weights, lr=0.0))
    model(**_batch()).loss.backward()
    left = sum(p.grad is not None for p in weights)
    assert len(alive) == len(weights)
    return len(weights), max(alive), left, updates.grad_norm(), plain


def test_at_most_one_gradient_exists_at_a_time(pool2: RankPool) -> None:
    for weights, most, left, norm, plain in [*pool2.run(_gradients_at_once, 2), _gradients_at_once(1)]:
        assert weights > 10 and (most, left) == (1, 0)
        assert norm == pytest.approx(plain, rel=roughly(torch.float32))


def _diverging(config: TrainConfig) -> str:
    try:
        train(config)
    except LongspanError as error:
        return str(error)
    return ""


def test_divergence_is_detected_before_the_weights_change(config: TrainConfig, pool2: RankPool) -> None:
    wild = replace(config, ulysses=2, lr=1e30, warmup=0, save_every=0, optimizer_in_backward=True, export="never")
    for said in pool2.run(_diverging, wild, timeout=240):
        assert "at step 2: the run has diverged" in said
        assert ("first not finite: " in said) or ("weights were updated before" in said)


@on_ranks(2)
def test_find_nonfinite_updates_nothing() -> None:
    sp = longspan.SequenceSharding(longspan.init_mesh(ulysses=2))
    model = longspan.parallelize(_model(), sp)
    longspan.optimizer_in_backward(model, torch.optim.SGD(model.parameters(), lr=1.0))
    before = [p.detach().clone() for p in model.parameters()]
    assert longspan.find_nonfinite(model, _batch()) is None
    assert all(torch.equal(a.to_local(), b.to_local()) for a, b in zip(before, model.parameters(), strict=True))


@on_ranks(2)
def test_misuse_of_the_step_in_the_backward_is_refused() -> None:
    sp = longspan.SequenceSharding(longspan.init_mesh(ulysses=2))
    model = _model()
    sgd = torch.optim.SGD(model.parameters())
    sharded = longspan.parallelize(_model(), sp)
    weights = list(sharded.parameters())

    def refuse(model: torch.nn.Module, optimizer: torch.optim.Optimizer, text: str) -> None:
        with pytest.raises(LongspanError, match=text):
            longspan.optimizer_in_backward(model, optimizer)

    refuse(model, sgd, "is not parallelized")
    plain = longspan.parallelize(model, sp, fsdp=False)
    refuse(plain, sgd, r"use longspan.parallelize\(..., fsdp=True\), or call optimizer.step\(\) after")
    text = r"SGD does not hold 1 of .* make it from model.parameters\(\) after longspan.parallelize"
    refuse(sharded, torch.optim.SGD(weights[1:]), text)
    updates = longspan.optimizer_in_backward(sharded, torch.optim.SGD(weights))
    refuse(sharded, torch.optim.SGD(weights), r"already; remove\(\) that first")
    text = r"gradients cannot accumulate .* call remove\(\)"
    with pytest.raises(LongspanError, match=text), longspan.no_sync(sharded):
        pass
    updates.remove()
    with longspan.no_sync(sharded):
        pass


def test_flags_that_exclude_the_step_in_the_backward_are_refused(config: TrainConfig) -> None:
    inside = replace(config, ulysses=2, optimizer_in_backward=True)
    refused(inside, r"--clip 1 needs it; use --clip 0", clip=1.0)
    refused(inside, r"--batch 4 accumulates gradients over 4 of them; give --batch 1, or --micro-batch 4", batch=4)
    refused(inside, r"leave --no-fsdp out", fsdp=False)
    refused(inside, r"--check-at-rest reads all weights around each", check_at_rest=True)
    assert not config.out.exists()


# --- gradients summed in bf16


def test_gradients_summed_in_bf16_are_near_and_not_equal(config: TrainConfig, pool2: RankPool) -> None:
    plain = replace(config, ulysses=2, dtype="bf16", steps=3, export="never", save_every=0)
    rounded = replace(plain, grad_dtype="bf16", out=config.out / "rounded")
    train_on(pool2, plain)
    train_on(pool2, rounded)
    losses, exact = losses_of(rounded.out), losses_of(plain.out)
    assert losses != exact and losses[1] == exact[1]  # no gradient has been summed before the first loss
    assert all(abs(losses[step] / exact[step] - 1) < roughly(torch.bfloat16) for step in exact)


def test_sums_in_bf16_are_refused_without_fsdp_and_on_one_rank(config: TrainConfig) -> None:
    refused(
        config, r"with --no-fsdp gradients are summed in fp32; leave it out", grad_dtype="bf16", ulysses=2, fsdp=False
    )
    refused(config, r"one rank sums no gradients; leave it out", grad_dtype="bf16")


# --- FSDP's offload


def test_every_group_is_offloaded_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    from longspan.hf.weights import fsdp

    policies: list[Any] = []

    def noted(module: Any, *, offload_policy: Any, **options: Any) -> Any:
        policies.append(offload_policy)
        return fully_shard(module, **options)  # a mesh of CPUs takes no offload

    monkeypatch.setattr(fsdp, "fully_shard", noted)
    with fake_world(0, 2):
        sp = longspan.SequenceSharding(longspan.init_mesh(ulysses=2))
        gpu: Any = SimpleNamespace(device=torch.device("cuda"), fsdp_mesh=sp.fsdp_mesh, world_size=2)
        for asked, kind in ((True, CPUOffloadPolicy), (False, OffloadPolicy)):
            policies.clear()
            fsdp.apply_fsdp(_model(), gpu, None, cpu_offload=asked)
            assert [type(policy) for policy in policies] == [kind] * 5  # embedding, 2 layers, norm and head, the root
    with pytest.raises(LongspanError, match="on a CPU there is nothing to move"):
        fsdp.check_cpu_offload(torch.device("cpu"), True)


def _train_offloaded(configs: list[TrainConfig]) -> list[str]:
    """Train each config on this process alone; return the kinds of its parameters."""
    from longspan.hf import preconditions
    from longspan.hf.weights import fsdp
    from longspan.train.loop import Trainer

    preconditions.check_cpu_offload = lambda *_: None  # a CPU has nothing to move
    fsdp.CPUOffloadPolicy = fsdp.OffloadPolicy  # type: ignore[misc, assignment]
    kinds = []
    for config in configs:
        trainer = Trainer(config)
        trainer.run()
        kinds.append(type(next(trainer.model.parameters())).__name__)
    return kinds


def test_one_rank_offloads_too(config: TrainConfig) -> None:
    """On one rank, FSDP's groups train, save, resume and export as a plain model."""
    config = replace(config, schedule="constant")
    whole = replace(config, out=config.out / "whole")
    train(whole)
    offloaded = replace(config, cpu_offload=True)
    jobs = [replace(offloaded, steps=2), replace(offloaded, resume="auto")]
    assert run_forked(_train_offloaded, jobs) == ["DTensor", "DTensor"]
    assert losses_of(config.out) == losses_of(whole.out)
    assert _same_weights(whole, config)


def test_a_process_of_a_job_is_no_mesh_of_one() -> None:
    with fake_world(0, 2), pytest.raises(LongspanError, match=r"has since joined a job of 2; call longspan\.init_mesh"):
        mesh_of_one(torch.device("cpu"))


# --- memory of gradients


def _peaks_of_sums(folder: Path) -> list[float]:
    """Return the peak of a backward and its sum, over the bytes of the gradients."""
    from longspan.hf.weights.gradients import GradientAverage

    sp = longspan.SequenceSharding(longspan.init_mesh(ulysses=2))
    found = []
    for sizes, dtype in (((1 << 20,), torch.float32), ((1 << 14,) * 64, torch.float32), ((1 << 10, 1 << 10), "rows")):
        if dtype == "rows":  # one matrix in bf16: summed in fp32, some rows at a time
            weights = [torch.nn.Parameter(torch.ones(sizes, dtype=torch.bfloat16))]
        else:
            weights = [torch.nn.Parameter(torch.ones(size)) for size in sizes]
        GradientAverage(weights, sp).bucket_elements = 1 << 16
        factors = [torch.full_like(p, 2.0) for p in weights]

        def step(pairs: list[Any]) -> None:
            torch.autograd.backward([(p * x).sum() for p, x in pairs])

        trace = folder / f"trace-{sp.rank}.json"
        peak = peak_of(functools.partial(step, list(zip(weights, factors, strict=True))), trace)
        assert all(p.grad is not None and bool((p.grad == 2).all()) for p in weights)
        found.append(peak / sum(p.nbytes for p in weights))
    return found


def test_a_gradient_larger_than_a_bucket_is_summed_in_place(pool2: RankPool, tmp_path: Path) -> None:
    """The forward's p * x, of p's size, is freed by then."""
    for alone, together, rows in pool2.run(_peaks_of_sums, tmp_path):
        assert alone < 1.1  # the gradient
        assert together < 2.2  # all products of the forward are there when the first gradient comes
        assert rows < 1.8  # pieces of 0.125, a few of which gloo's threads may still hold; a whole copy is 2


def test_the_gradient_of_the_head_is_not_copied(tmp_path: Path) -> None:
    sp = longspan.SequenceSharding(longspan.init_mesh())
    model = longspan.parallelize(_model(vocab_size=1 << 15, num_hidden_layers=1, tie_word_embeddings=False), sp)
    model.model.embed_tokens.weight.requires_grad_(False)
    head = model.lm_head.weight.nbytes
    batch = _batch(8)

    def step() -> None:
        model(**batch).loss.backward()

    step()
    model.zero_grad()
    # A tile of logits of all 8 tokens and its fp32 softmax in place, a few activations, and one gradient of the head.
    tile = 8 * 4 * (1 << 15)
    assert peak_of(step, tmp_path / "trace.json") < head + 2 * tile + 500_000 < 2 * head


# --- nothing keeps full-sequence tensors alive


class _Entered(Exception):
    """Raised by the first layer."""


@pytest.mark.parametrize(("layout", "documents"), each_value(["contiguous", "zigzag"], [False, True]))
def test_layers_run_without_any_full_sequence_tensor(tmp_path: Path, layout: Any, documents: bool) -> None:
    """The caller holds ids and labels of a million tokens; no other tensor has the full length, in any dtype."""
    n, ranks = 1 << 20, 64
    held: list[int] = []
    recorded = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)

    def entered(*_: Any) -> None:
        recorded.stop()
        recorded.export_chrome_trace(str(tmp_path / "trace.json"))
        events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        alive: dict[int, int] = {}
        for event in sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"]):
            alive.pop(event["args"]["Addr"], None)
            if event["args"]["Bytes"] > 0:
                alive[event["args"]["Addr"]] = event["args"]["Bytes"]
        held.extend(alive.values())
        raise _Entered

    with fake_world(5, ranks):
        sp = longspan.SequenceSharding(longspan.init_mesh(ring=8, ulysses=8), layout)
        config = {"hidden_size": 8, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 2}
        model = _model(**config, num_hidden_layers=1, vocab_size=64, max_position_embeddings=n).train()
        model = longspan.parallelize(model, sp, fsdp=False, weights="broadcast", check_batches=0, check_weights=0)
        model.model.layers[0].register_forward_pre_hook(entered)
        ids = torch.zeros(1, n, dtype=torch.int64)
        batch = {"input_ids": ids, "labels": ids}
        if documents:
            batch["position_ids"] = (torch.arange(n) % 4096)[None]
        recorded.start()
        with pytest.raises(_Entered):
            model(**batch)
    assert held and max(held) < n  # a bool for each token would be n bytes
    assert max(held) >= n // ranks * 8 * 4  # mine: the hidden states


def _cut_in_the_thread(config: TrainConfig) -> list[int]:
    from longspan.train.loop import Trainer

    trainer = Trainer(config)
    with trainer._batches() as batches:
        micro = next(batches).micro_batches
    trainer.outputs.release()
    return [x.untyped_storage().nbytes() for one in micro for x in one.values() if isinstance(x, torch.Tensor)]


def test_a_step_of_train_holds_only_its_own_tokens(config: TrainConfig, pool2: RankPool) -> None:
    one = replace(config, ulysses=2, pack="documents", context=400)
    for sizes in pool2.run(_cut_in_the_thread, one, timeout=240):
        assert sizes == [200 * 8] * 3  # ids, labels, position ids


def test_sequences_are_freed_once_they_are_dealt_out() -> None:
    seen: list[weakref.ref[Sequence]] = []

    def sequences() -> Iterator[Sequence]:
        for i in range(8):
            made = [Sequence(np.full(16, i), (), {})]
            seen.append(weakref.ref(made[0]))
            yield made.pop()

    dealt = deal(sequences(), batch=4, micro_batch=1, data_size=1, data_rank=0, pack="stream")
    assert len(next(dealt).micro_batches) == 4
    assert [ref() for ref in seen] == [None] * 4


# --- states of 8 bits


@pytest.fixture
def eight(tmp_path: Path, config: TrainConfig) -> TrainConfig:
    """A config whose matrices have a multiple of 256 values on each of two ranks."""
    small = {"hidden_size": 64, "num_hidden_layers": 1, "num_key_value_heads": 4}
    return replace(config, config=write_config(tmp_path, **small), ulysses=2, optimizer="adamw8bit")


def _train_eagerly(config: TrainConfig) -> None:
    """torchao compiles its step for each shape of a weight, which takes a compiler longer than all of a test."""
    with torch.compiler.set_stance("force_eager"):
        train(config)


def _eagerly(pool: RankPool, config: TrainConfig) -> None:
    pool.run(_train_eagerly, config, timeout=240)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_run_with_states_of_few_bits_resumes_to_the_bit(
    eight: TrainConfig, bits: int, pool2: RankPool, tmp_path: Path
) -> None:
    eight = replace(eight, optimizer=f"adamw{bits}bit")
    _eagerly(pool2, eight)
    cut = replace(eight, out=tmp_path / "cut")
    shutil.copytree(eight.checkpoints / "step-00000002", cut.checkpoints / "step-00000002")
    inside = replace(cut, out=tmp_path / "inside", optimizer_in_backward=True)
    shutil.copytree(cut.checkpoints, inside.checkpoints)
    for again in (cut, inside) if bits == 8 else (cut,):
        _eagerly(pool2, again)
        after = {step: loss for step, loss in losses_of(eight.out).items() if step > 2}
        assert losses_of(again.out) == after and len(after) == 2
        assert _same_weights(eight, again)
    index = json.loads((eight.checkpoints / "step-00000004" / "index.json").read_text())["tensors"]
    codes = index["optimizer.state.lm_head.weight.exp_avg.codes"]
    values = weights_of(eight.out)["lm_head.weight"].numel()
    assert codes["dtype"] == "uint8" and math.prod(codes["shape"]) == values * bits // 8
    assert index["optimizer.state.model.norm.weight.exp_avg"]["dtype"] == "float32"
    if bits == 8:
        plain = replace(eight, optimizer="adamw", out=tmp_path / "plain")
        _eagerly(pool2, plain)
        losses, exact = losses_of(eight.out), losses_of(plain.out)
        assert losses != exact
        assert all(abs(losses[step] / exact[step] - 1) < 0.1 for step in exact)  # after 4 steps at a high rate
    # Another mesh whose shards have a multiple of 256 values; then an optimizer with fp32 states.
    alone = replace(eight, ulysses=1, steps=6)
    _train_eagerly(alone)
    assert sorted(losses_of(alone.out)) == list(range(1, 7))
    with pytest.raises(RankError, match="has 8 or 4 bits a value in one of the two only; use the --optimizer it was"):
        _eagerly(pool2, replace(cut, optimizer="adamw" if bits == 8 else "adamw8bit", steps=6))


def test_8_bit_states_without_torchao_are_refused_before_anything_starts(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("torchao.optim", "torchao.prototype.low_bit_optim"):
        monkeypatch.setitem(sys.modules, name, None)
    message = r"\[adamw8bit\]\" \(torchao\) on every machine, or leave --optimizer"
    refused(config, message, optimizer="adamw8bit")
    assert not config.out.exists()


# --- Muon


def _muon_steps() -> None:
    """3 steps on sharded weights, one of a single row and one that 2 ranks do not divide, to the bit of torch's own."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    whole = [torch.nn.Parameter(torch.randn(shape)) for shape in ((6, 10), (11, 6), (1, 8), (7,))]
    sharded = [torch.nn.Parameter(distribute_tensor(p.detach().clone(), mesh)) for p in whole]
    muon = torch.optim.Muon(whole[:3], lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(whole[3:], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    others, matrices = [{"params": sharded[3:]}], [{"params": sharded[:3], "weight_decay": 0.1}]
    ours = Muon(others, matrices, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    for _ in range(3):
        for p, mine in zip(whole, sharded, strict=True):
            p.grad = torch.randn_like(p)
            mine.grad = distribute_tensor(p.grad, mesh)
        for optimizer in (muon, adamw, ours):
            optimizer.step()
    for p, mine in zip(whole, sharded, strict=True):
        assert torch.equal(mine.full_tensor(), p)  # type: ignore[attr-defined]


def test_muon_on_shards_is_torchs_on_whole_matrices(pool2: RankPool) -> None:
    pool2.run(_muon_steps)


def test_a_run_with_muon_trains_as_one_process_and_resumes(
    config: TrainConfig, pool2: RankPool, tmp_path: Path
) -> None:
    """Updates are rounded to bf16, so runs on other meshes differ by more than fp32's rounding."""
    alone = replace(config, optimizer="muon", out=tmp_path / "alone", no_decay=("*embed*",), min_lr=1e-3)
    both = replace(alone, ulysses=2, out=tmp_path / "both")
    train(alone)
    train_on(pool2, both)
    one, two = losses_of(alone.out), losses_of(both.out)
    assert one[4] < one[1] - 0.2
    assert two == pytest.approx(one, rel=roughly(torch.bfloat16) / 8)
    index = json.loads((both.checkpoints / "step-00000004" / "index.json").read_text())["tensors"]
    muon = {name.split(".", 2)[2].rpartition(".")[0] for name in index if name.endswith("momentum_buffer")}
    adamw = {name.split(".", 2)[2].rpartition(".")[0] for name in index if name.endswith("exp_avg")}
    assert adamw == {name for name in weights_of(both.out) if "norm" in name or "embed" in name or "lm_head" in name}
    assert muon == weights_of(both.out).keys() - adamw
    cut = replace(both, out=tmp_path / "cut")
    shutil.copytree(both.checkpoints / "step-00000002", cut.checkpoints / "step-00000002")
    train_on(pool2, cut)
    assert losses_of(cut.out) == {step: loss for step, loss in two.items() if step > 2}
    assert [record["lr"] for record in log_of(cut.out)] == [record["lr"] for record in log_of(both.out)[2:]]


def test_muon_is_refused_where_matrices_cannot_be_gathered(config: TrainConfig) -> None:
    refused(config, r"muon gathers .* --tensor 2 .*--tensor 1 --ulysses 4", optimizer="muon", tensor=2, ulysses=2)
    refused(config, r"which --optimizer-in-backward does not", optimizer="muon", optimizer_in_backward=True)


def test_a_resumed_run_may_exempt_other_weights_from_decay(config: TrainConfig) -> None:
    first = replace(config, steps=2, export="never", track="none")
    train(first)
    trainer = Trainer(replace(first, steps=3, no_decay=("*embed*",), weight_decay=0.2))
    decayed, others = trainer.optimizer.param_groups
    assert (len(decayed["params"]), decayed["weight_decay"]) == (15, 0.2)
    assert (len(others["params"]), others["weight_decay"]) == (6, 0.0)
    assert all(trainer.optimizer.state[p]["step"] == 2 for p in decayed["params"] + others["params"])
    assert decayed["lr"] == others["lr"] > 0 and others.keys() == decayed.keys()
    trainer.run()


def test_weights_without_decay(config: TrainConfig) -> None:
    refused(config, r"--no-decay \*norms\* is the name of no weight; they are named", no_decay=("*norms*",))
    model = build("GptOss")  # its experts' biases are matrices
    config = replace(config, no_decay=("*embed_tokens*",))
    decayed, others = make_optimizer(model, config, torch.device("cpu")).param_groups
    names = {p: name for name, p in model.named_parameters()}
    exempt = {names[p] for p in others["params"]}
    assert decayed["weight_decay"] > others["weight_decay"] == 0
    assert exempt == {name for name in names.values() if re.search("norm|bias|sinks|embed_tokens", name)}


# --- schedules


@pytest.mark.parametrize(
    ("options", "rates"),
    [
        ({"schedule": "cosine"}, [0, 0.5, 1, 0.5, 0]),
        ({"schedule": "cosine", "min_lr": 0.2}, [0, 0.5, 1, 0.6, 0.2]),
        ({"schedule": "linear", "min_lr": 0.2}, [0, 0.5, 1, 0.6, 0.2]),
        ({"schedule": "wsd"}, [0, 0.5, 1, 1, 0]),
        ({"schedule": "wsd", "decay": 6, "min_lr": 0.2}, [0.2, 0.6, 1, 1 - 0.8 * (1 / 3) ** 0.5, 0.2]),
        ({"schedule": "constant"}, [0, 0.5, 1, 1, 1]),
    ],
    ids=str,
)
def test_rates_of_a_schedule(config: TrainConfig, options: dict[str, Any], rates: list[float]) -> None:
    """Before the first step, in the warm-up of 4 steps, behind it, halfway through the rest, and after the last."""
    config = replace(config, lr=1.0, warmup=4, steps=12, **options)
    config.check()
    model = torch.nn.Linear(2, 2)
    for step, rate in zip((0, 2, 4, 8, 12), rates, strict=True):
        optimizer = torch.optim.AdamW([{"params": model.parameters(), "decays": True}], lr=config.optimizer.lr)
        make_scheduler(optimizer, config, step)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(rate, abs=1e-9), step


def test_impossible_schedules_are_refused(config: TrainConfig) -> None:
    refused(config, r"--min-lr 0\.1 is not below --lr 0\.01; give less", min_lr=0.1)
    refused(config, r"--min-lr 0\.001: --schedule constant does not decay", min_lr=1e-3, schedule="constant")
    refused(config, r"--decay 2 is of --schedule wsd, and --schedule cosine decays over all", decay=2)
    refused(config, r"--warmup 1 and --decay 4 are longer than .* --steps 4 together", decay=4, schedule="wsd")


# --- tokens of a step, and compiled layers


def test_a_batch_by_tokens_is_whole_forwards(config: TrainConfig) -> None:
    by_tokens = replace(config, batch=None, batch_tokens=500, data_degree=2)
    assert by_tokens.sequences == 8  # of 61 tokens; 2 in a forward
    assert replace(by_tokens, batch_tokens=1).sequences == 2
    refused(config, r"--batch 1 and --batch-tokens 500 both set the size of a step", batch_tokens=500)


def test_compiled_layers_train_alike(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor would take a compiler longer than all of a test; tests/test_compile.py compares its gradients."""
    import longspan.train.loop

    compiled: list[torch.nn.Module] = []

    def by_autograd(model: torch.nn.Module) -> None:
        compiled.append(model)
        longspan.compile_layers(model, backend="aot_eager")

    monkeypatch.setattr(longspan.train.loop, "compile_layers", by_autograd)
    train(replace(config, steps=2, export="never"))
    assert not compiled
    train(replace(config, steps=2, export="never", compile=True, out=config.out / "compiled"))
    assert len(compiled) == 1
    assert losses_of(config.out / "compiled") == pytest.approx(losses_of(config.out), rel=roughly(torch.float32))


def test_ranks_with_other_parts_of_a_weight_share_no_compiled_step(monkeypatch: pytest.MonkeyPatch) -> None:
    from longspan.compat import torch_checkpoint

    seen: list[str] = []
    kind = torch_checkpoint._low_bit_class("adamw8bit")
    monkeypatch.setattr(kind, "step", lambda *_: seen.append(torch.compiler.config.cache_key_tag))
    for rows in (9, 8, 9):
        weight = torch.nn.Parameter(torch.ones(rows, 8))
        torch_checkpoint.low_bit_adamw("adamw8bit", [{"params": [weight]}], 0.1, (0.9, 0.95)).step()
    assert seen[0] == seen[2] != seen[1]
