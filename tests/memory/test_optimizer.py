"""Memory of gradients and optimizer states: bf16 sums, offload, 8-bit states."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import longspan
from longspan.comm.mesh import mesh_of_one
from longspan.core.errors import LongspanError
from tests.choose import each_value
from tests.fakes import fake_world
from tests.host_memory import peak_of
from tests.pool import RankPool
from tests.train.training import LLAMA

pytestmark = pytest.mark.versions


def _model(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**LLAMA, **changes}))


def _batch(n: int = 24) -> dict[str, torch.Tensor]:
    ids = torch.arange(n)[None] * 7 % 384
    return {"input_ids": ids, "labels": ids}


# --- gradients summed in bf16


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
        gpu: Any = SimpleNamespace(device=torch.device("cuda"), fsdp_mesh=sp.fsdp_mesh, fsdp_size=2)
        for asked, kind in ((True, CPUOffloadPolicy), (False, OffloadPolicy)):
            policies.clear()
            fsdp.apply_fsdp(_model(), gpu, None, cpu_offload=asked)
            assert [type(policy) for policy in policies] == [kind] * 5  # embedding, 2 layers, norm and head, the root
    with pytest.raises(LongspanError, match="on a CPU there is nothing to move"):
        fsdp.check_cpu_offload(torch.device("cpu"), True)


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


# --- states of 8 bits

# --- schedules


# --- tokens of a step, and compiled layers


def test_ranks_with_other_parts_of_a_weight_share_no_compiled_step(monkeypatch: pytest.MonkeyPatch) -> None:
    from longspan.compat import torch_checkpoint

    seen: list[str] = []
    kind = pytest.importorskip("torchao.optim").AdamW8bit
    monkeypatch.setattr(kind, "step", lambda *_: seen.append(torch.compiler.config.cache_key_tag))
    for rows in (9, 8, 9):
        weight = torch.nn.Parameter(torch.ones(rows, 8))
        torch_checkpoint.low_bit_adamw(kind)([weight], lr=0.1).step()  # type: ignore[call-arg]
    assert seen[0] == seen[2] != seen[1]
