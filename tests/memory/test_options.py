"""Memory options: gradients against fp64 on every kind of mesh, what is recomputed, and what is refused."""

from __future__ import annotations

import copy
import dataclasses
import functools
import warnings
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import longspan
from longspan.comm.mesh import MeshGroups
from longspan.core import tile_sizes
from longspan.core.errors import LongspanError
from longspan.core.memory import FASTEST, LONGEST, Memory
from longspan.hf.memory import AutoMemory, hardware_of
from longspan.memory.activations import NormedLinear
from longspan.memory.offload.host import HostStore
from longspan.memory.tiles import Tiled
from longspan.plan import Hardware, Job, cost
from longspan.plan.from_model import shape_of_model
from longspan.plan.hardware import CATALOGUE
from tests.choose import each_value, grouped, pairwise
from tests.counting import count_sent
from tests.fakes import fake_world
from tests.memory.side_stream import offload_on_cpus
from tests.models import (
    Truth,
    batch,
    build,
    check_gradients,
    check_loss,
    compare,
    gradients,
    sharding,
    truth_of,
)
from tests.pool import RankPool
from tests.syncs import on_gpu, one_gpu

ONE_DEVICE = longspan.SequenceSharding(MeshGroups("cpu"))

MEMORY_OPTIONS: dict[str, Memory] = {
    "full": Memory(checkpointing="full"),
    "tiled": Memory(tiled=True),
    "selective": Memory(checkpointing="selective"),
    "grouped": Memory(checkpointing="grouped"),
    "head_slices": Memory(head_slices=0),
    "longest": LONGEST,
    "offload": Memory(checkpointing="full", offload="host"),
    "all": Memory(checkpointing="selective", head_slices=0, tiled=True, offload="host"),
}


def _prepare() -> None:
    """Let small models run in several tiles, and offload on CPUs."""
    tile_sizes.FEWEST_ROWS = 2, 2
    offload_on_cpus()


@functools.cache
def _truth(family: str) -> Truth:
    return truth_of(build(family), _inputs(family))


def _inputs(family: str) -> dict[str, Tensor]:
    """Packed documents, and labels that are very unevenly masked."""
    if family == "GptOss":  # its eager attention in transformers does not support packed documents
        return batch()
    ends = torch.tensor([[5, 21], [11, 21], [21, 21], [2, 13]])
    positions = torch.stack([torch.cat([torch.arange(a), torch.arange(b - a), torch.arange(21 - b)]) for a, b in ends])
    return {**batch(), "position_ids": positions}


def _on_a_mesh(truth: Truth, family: str, memory: Memory, data: int, ring: int, fsdp: bool) -> None:
    _prepare()
    sp = sharding(data, ring)
    model = longspan.parallelize(build(family), sp, fsdp=fsdp, memory=memory).train()
    compare(truth, model, _inputs(family), sp)


@pytest.mark.parametrize(
    ("memory_option", "family"), each_value(MEMORY_OPTIONS, ["Llama", "Gemma3Text", "GptOss", "Qwen3Moe"])
)
def test_each_memory_option_on_two_ranks(pool2: RankPool, family: str, memory_option: str) -> None:
    pool2.run(_on_a_mesh, _truth(family), family, MEMORY_OPTIONS[memory_option], 1, 1, True)


@pytest.mark.parametrize(
    ("data", "ring", "fsdp", "memory_option"),
    each_value(
        grouped([(1, 2, True), (2, 2, True), (1, 1, False), (1, 4, True)]),
        ["grouped", "selective", "longest", "all"],
    ),
)
def test_memory_options_on_four_ranks(pool4: RankPool, memory_option: str, data: int, ring: int, fsdp: bool) -> None:
    pool4.run(_on_a_mesh, _truth("Qwen3"), "Qwen3", MEMORY_OPTIONS[memory_option], data, ring, fsdp)


def _frozen() -> Any:
    """Return a model whose first attention has no gradient, not even of its input; its MLP is trained."""
    model = build("Qwen3")
    for module in (model.model.embed_tokens, model.model.layers[0].self_attn, model.model.layers[0].input_layernorm):
        module.requires_grad_(False)
    return model


def _on_frozen(truth: Truth) -> None:
    sp = sharding(ring=2)
    memory = Memory(checkpointing="selective")
    compare(truth, longspan.parallelize(_frozen(), sp, memory=memory).train(), _inputs("Qwen3"), sp)


def test_a_frozen_attention_is_saved_for_its_mlp(pool2: RankPool) -> None:
    pool2.run(_on_frozen, truth_of(_frozen(), _inputs("Qwen3")))


def _groups(truth: Truth, cases: list[tuple[Memory, int, bool]]) -> None:
    _prepare()
    for memory, ring, fsdp in cases:
        sp = sharding(1, ring)
        model = longspan.parallelize(_deep(), sp, fsdp=fsdp, memory=memory).train()
        compare(truth, model, _inputs("Qwen3"), sp)


def _deep() -> Any:
    return build("Qwen3", num_hidden_layers=5, layer_types=None)


def test_layers_that_share_a_saved_input(pool2: RankPool) -> None:
    """Groups of 2 layers, the last one shorter."""
    options = [
        Memory(checkpointing="grouped"),
        Memory(checkpointing="grouped", tiled=True),
        Memory(checkpointing="grouped", offload="host", head_slices=0),
    ]
    cases = [(memory, 1 + i % 2, i < 2) for i, memory in enumerate(options)]
    pool2.run(_groups, truth_of(_deep(), _inputs("Qwen3")), cases)


@pytest.mark.parametrize(("per_checkpoint", "runs"), [(1, [2] * 5), (3, [3, 3, 2, 3, 2]), (2, [3, 2, 3, 2, 2])])
def test_how_often_each_layer_runs(monkeypatch: pytest.MonkeyPatch, per_checkpoint: int, runs: list[int]) -> None:
    monkeypatch.setattr("longspan.hf.memory.layers_per_checkpoint", lambda *_: per_checkpoint)
    model = longspan.parallelize(_deep(), ONE_DEVICE, memory=Memory(checkpointing="grouped")).train()
    calls = [_Calls(layer.self_attn) for layer in model.model.layers]
    for _ in range(2):  # the second time after a forward that failed
        for call in calls:
            call.count = 0
        loss = model(**batch()).loss
        loss.backward()
        assert [call.count for call in calls] == runs
        broken = model.model.layers[2].mlp.register_forward_pre_hook(_breaks)
        with pytest.raises(RuntimeError, match="planted"):
            model(**batch())
        broken.remove()


def _breaks(*_: Any) -> None:
    raise RuntimeError("planted")


def test_a_layer_whose_input_was_changed_starts_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks change the outputs of layers 1 and 2, so the inputs of layers 2 and 3 are saved."""
    truth, made = _deep(), _deep()
    for model in (truth, made):
        model.model.layers[1].register_forward_hook(lambda module, args, out: out * 1.5)
        model.model.layers[2].register_forward_hook(lambda module, args, out: out.mul_(0.5))
    monkeypatch.setattr("longspan.hf.memory.layers_per_checkpoint", lambda *_: 5)
    model = longspan.parallelize(made, ONE_DEVICE, memory=Memory(checkpointing="grouped")).train()
    calls = [_Calls(layer.self_attn) for layer in model.model.layers]
    whole = truth_of(truth, batch())
    loss = model(**batch()).loss
    loss.backward()
    check_loss(float(loss.detach()), whole)
    check_gradients(gradients(model), whole)
    assert [call.count for call in calls] == [3, 2, 2, 3, 2]


def _on_ranks_without_heads(truth: Truth) -> None:
    _prepare()
    memory = Memory(checkpointing="selective", head_slices=0, tiled=True, offload="host")
    sp = sharding()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of idle ranks
        model = longspan.parallelize(_two_heads(), sp, memory=memory).train()
    compare(truth, model, batch(), sp)


def _two_heads() -> Any:
    return build("GptOss", num_attention_heads=2, num_key_value_heads=1)


def test_memory_options_on_ranks_without_heads(pool4: RankPool) -> None:
    pool4.run(_on_ranks_without_heads, truth_of(_two_heads(), batch()))


# The input of a DistilBERT layer is the output of the previous layer's last norm. An OPT layer flattens its tokens.
@pytest.mark.parametrize(
    ("family", "memory_option"),
    [(f, "all") for f in ("GPT2", "Olmo2", "Llama4Text", "Mixtral", "ModernBert", "OPT")] + [("DistilBert", "longest")],
)
def test_other_families_on_one_device(monkeypatch: pytest.MonkeyPatch, family: str, memory_option: str) -> None:
    monkeypatch.setattr(tile_sizes, "FEWEST_ROWS", (2, 2))
    offload_on_cpus(monkeypatch.setattr)
    truth = truth_of(build(family), batch())
    model = longspan.parallelize(build(family), ONE_DEVICE, memory=MEMORY_OPTIONS[memory_option]).train()
    loss = model(**batch()).loss
    loss.backward()
    check_loss(float(loss.detach()), truth)
    check_gradients(gradients(model), truth)


# ---------------------------------------------------------------------------------------------------------------------
# What is recomputed, and what is saved.


def _sent(memory: Memory, ring: int) -> Counter[tuple[str, int]]:
    """Count what rank 0 of four sends in a step, except weights, by operation and bytes."""
    with fake_world(0, 4):
        sp = longspan.SequenceSharding(longspan.init_mesh(ring=ring, ulysses=4 // ring))
        options: dict[str, Any] = {"fsdp": False, "weights": "same", "check_batches": 0, "check_weights": 0}
        model = longspan.parallelize(build("Llama"), sp, memory=memory, **options).train()
        with count_sent() as sent:
            model(**batch()).loss.backward()
    return Counter((one.op, one.bytes) for one in sent)


@pytest.mark.parametrize("ring", [1, 4])
def test_a_recomputed_layer_sends_again(ring: int) -> None:
    plain = _sent(FASTEST, ring)
    assert sum(_sent(Memory(checkpointing="full"), ring).values()) > sum(plain.values())


class _Calls:
    """Counts how often a module runs."""

    def __init__(self, module: nn.Module) -> None:
        self.count, compute = 0, module.forward

        @functools.wraps(compute)
        def forward(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return compute(*args, **kwargs)

        module.forward = forward  # type: ignore[assignment]


def _layers(memory: Memory, family: str = "Llama") -> tuple[Any, list[_Calls]]:
    model = build(family)
    calls = [_Calls(layer.mlp) for layer in model.model.layers]
    return longspan.parallelize(model, ONE_DEVICE, memory=memory).train(), calls


@pytest.mark.parametrize(
    ("memory", "runs"),
    [
        (FASTEST, 1),
        (Memory(checkpointing="full"), 2),
        (Memory(tiled=True), 2 * 84 // 4 + 1),  # 21 tiles forward, 21 backward, and two of the check
        (Memory(tiled=True, checkpointing="full"), 2 * 84 // 4 + 1),  # not recomputed, as it is a layer's last
    ],
)
def test_how_often_an_mlp_runs(monkeypatch: pytest.MonkeyPatch, memory: Memory, runs: int) -> None:
    monkeypatch.setattr("longspan.hf.memory.mlp_rows", lambda *_: 4)
    model, calls = _layers(memory)
    model(**batch()).loss.backward()
    checks = 1 if memory.tiled else 0
    assert [call.count for call in calls] == [runs + checks] * 2


def test_a_retained_graph_supports_a_second_backward() -> None:
    for memory in (Memory(checkpointing="selective"), LONGEST):
        model = longspan.parallelize(build("Llama"), ONE_DEVICE, memory=memory, logits=True).train()
        loss = model(**batch()).loss
        loss.backward(retain_graph=True)
        once = gradients(model)
        loss.backward()
        for name, grad in gradients(model).items():
            assert torch.allclose(grad, 2 * once[name], rtol=1e-5, atol=1e-7)


def test_the_backward_of_a_tiled_mlp_repeats_its_dropout() -> None:
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(4, 16, bias=False), nn.Dropout(0.5), nn.Linear(16, 1, bias=False))
    Tiled(mlp, "mlp", lambda *_: 3, draws=True)
    x = torch.randn(2, 5, 4, requires_grad=True)
    out = mlp(x)
    torch.rand(100)  # other numbers are drawn in between
    (grad,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close((grad * x).sum(-1), out[..., 0])  # the output is linear in the input


class NormThenMlp(nn.Module):
    """A norm and an MLP that reads its output; with two branches a linear layer reads it, too."""

    def __init__(self, branches: int) -> None:
        super().__init__()
        self.norm, self.mlp = nn.RMSNorm(8), nn.Sequential(nn.Linear(8, 32), nn.SiLU(), nn.Linear(32, 8))
        self.linear = nn.Linear(8, 8) if branches == 2 else None
        self.waits = False

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        if self.waits:
            normed.retain_grad()
            self.normed = normed
        out: Tensor = x + self.mlp(normed)
        return out if self.linear is None else out + self.linear(normed)


def norm_gradients(branches: int, *, tiled: bool, frozen: bool = False, waits: bool = False) -> list[Tensor]:
    """Return gradients of input, weights, and of the norm's output if it is retained, after two backwards."""
    torch.manual_seed(0)
    module = NormThenMlp(branches).double()
    module.norm.weight.requires_grad_(not frozen)
    module.waits = waits
    if tiled:
        norm = Tiled(module.norm, "norm", lambda *_: 4, cheap=True)
        Tiled(module.mlp, "mlp", lambda *_: 3)
        if module.linear is not None:
            NormedLinear(module.linear)
        made, compute = [], norm.compute_with
        norm.compute_with = lambda tile, parameters: made.append(tile.shape[1]) or compute(tile, parameters)  # type: ignore[method-assign, func-returns-value, assignment]
    x = torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True)
    loss = module(x).square().sum()
    if tiled:
        made.clear()
    loss.backward(retain_graph=True)
    if tiled and branches == 1 and not waits:
        assert made == [3, 3, 3, 1]  # recomputed by the MLP's tiles, not by the norm's own backward
    loss.backward()
    found = [x, *module.parameters(), *([module.normed] if waits else [])]
    return [p.grad for p in found if p.grad is not None]


@pytest.mark.parametrize(("branches", "waits", "frozen"), pairwise([1, 2], [False, True], [False, True]))
def test_the_backward_of_a_tiled_mlp_continues_through_its_norm(branches: int, waits: bool, frozen: bool) -> None:
    plain, tiles = (norm_gradients(branches, tiled=t, frozen=frozen, waits=waits) for t in (False, True))
    assert len(plain) == len(tiles)
    for a, b in zip(plain, tiles, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-12)


def test_an_mlp_without_gradients_runs_tile_by_tile() -> None:
    """Scoring needs it, and layers whose outputs are recomputed as the next layer's input."""
    module, seen = NormThenMlp(1), list[int]()
    module.mlp[0].register_forward_pre_hook(lambda _, given: seen.append(given[0].shape[1]))
    x = torch.randn(2, 5, 8)
    with torch.no_grad():
        whole = module(x)
        Tiled(module.norm, "norm", lambda *_: 4, cheap=True)
        Tiled(module.mlp, "mlp", lambda *_: 3)
        seen.clear()
        torch.testing.assert_close(module(x), whole)
    assert seen == [4, 2, 3, 3, 3, 1]  # two of the check, then the tiles


def test_a_module_whose_tokens_are_not_independent_is_refused() -> None:
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.up(x - x.mean(1, keepdim=True))
            return y

    module = Mean()
    Tiled(module, "layers.0.mlp", lambda *_: 3)
    with pytest.raises(LongspanError, match=r"layers\.0\.mlp \(Mean\).*cannot run tile by tile; use tiled=False"):
        module(torch.randn(1, 8, 4))


# ---------------------------------------------------------------------------------------------------------------------
# What is refused.


def test_conflicting_memory_options() -> None:
    with pytest.raises(LongspanError, match=r"offload='host' .*checkpointing='full'"):
        Memory(offload="host")
    with pytest.raises(LongspanError, match=r"checkpointing='some' is unknown; choose 'none', 'selective'"):
        Memory(checkpointing="some")  # type: ignore[arg-type]
    with pytest.raises(LongspanError, match=r"tiled must be True or False"):
        Memory(tiled=2)  # type: ignore[arg-type]
    with pytest.raises(LongspanError, match=r"memory='least' is unknown; choose fastest, longest or auto"):
        longspan.parallelize(build("Llama"), ONE_DEVICE, memory="least")  # type: ignore[arg-type]


def test_unsupported_memory_options_of_a_model() -> None:
    with pytest.raises(LongspanError, match=r"bert\.encoder\.layer\.0\.output \(BertOutput\).*use tiled=False"):
        longspan.parallelize(build("Bert"), ONE_DEVICE, memory=Memory(tiled=True))
    model = longspan.parallelize(build("Llama"), ONE_DEVICE, memory=Memory(checkpointing="full")).train()
    model.gradient_checkpointing_enable()
    with pytest.raises(LongspanError, match=r"gradient_checkpointing_enable\(\).*checkpointed twice"):
        model(**batch())


# ---------------------------------------------------------------------------------------------------------------------
# `memory="auto"`.


def test_offload_of_layers_whose_heads_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """The room that is reserved for attention is that of the largest heads."""
    offload_on_cpus(monkeypatch.setattr)
    plain = build("Gemma4Text")
    truth = gradients_of(copy.deepcopy(plain), batch())
    model = longspan.parallelize(plain, ONE_DEVICE, memory=Memory(checkpointing="selective", offload="host"))
    for name, gradient in gradients_of(model, batch()).items():
        torch.testing.assert_close(gradient, truth[name], rtol=1e-4, atol=1e-6)


FOR_AUTO = {"Llama": {}, "Bamba": {}, "Gemma": {"head_dim": 8}, "Starcoder2": {"sliding_window": 6}, "ModernBert": {}}
"""The planner has no config of the families after the second."""


@pytest.mark.parametrize("family", ["Bamba", *(family for family in FOR_AUTO if family != "Bamba")])
def test_auto_chooses_options_that_fit_and_explains_them(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = build(family, max_position_embeddings=1 << 17, **FOR_AUTO[family])
    long = batch(rows=1, n=1500)
    shape, cpu = shape_of_model(plain), hardware_of(torch.device("cpu"))
    jobs = (Job(context=1500, dtype="fp32", weight_sharding=False, memory=memory) for memory in (FASTEST, LONGEST))
    needed = [cost(shape, job, cpu).memory_total_bytes for job in jobs]  # memory for one of them
    room = _with(cpu, sum(needed) / 2)
    monkeypatch.setattr("longspan.hf.memory.hardware_of", lambda device, _=None: room)
    truth = gradients_of(copy.deepcopy(plain), long)
    model = longspan.parallelize(plain, ONE_DEVICE, memory="auto").train()
    assert "attention: chosen at the first forward" in longspan.explain(model)
    model(**batch()).loss.backward()
    manager = model.longspan_state.memory
    assert manager.options == FASTEST
    model.zero_grad()
    model(**long).loss.backward()
    assert manager.options != FASTEST
    for name, grad in gradients(model).items():
        assert torch.allclose(grad, truth[name], rtol=1e-3, atol=1e-6), name
    text = longspan.explain(model)
    assert manager.options.describe() in text and "does not fit" in text and "attention of " in text
    with pytest.raises(LongspanError, match=r"do not fit on one rank.*Item by item"):
        model(**batch(rows=4, n=120000))


def _options_by_step(sizes: list[tuple[int, int]]) -> list[Memory]:
    sp = longspan.SequenceSharding(longspan.init_mesh(data=2))
    model = longspan.parallelize(build("Llama"), sp, memory="auto").train()
    options = []
    for lengths in sizes:
        model(**batch(rows=1, n=lengths[sp.data_rank])).loss.backward()
        state = model.longspan_state.memory
        options.append(state.options)
        assert state.auto.most_tokens == max(map(max, sizes[: len(options)]))
    return options


def test_replicas_with_batches_of_different_sizes_choose_together(pool2: RankPool) -> None:
    first, second = pool2.run(_options_by_step, [(8, 16), (24, 16), (20, 22)], timeout=60)
    assert first == second


def _with_memory_of_ranks(room: list[float]) -> Memory:
    sp = longspan.SequenceSharding(longspan.init_mesh(ulysses=2))
    model = longspan.parallelize(build("Llama"), sp, memory="auto").train()
    with mock.patch("longspan.hf.memory.usable_memory", lambda *_: room[sp.rank]):
        model(**batch(rows=1, n=100)).loss.backward()
    return model.longspan_state.memory.options  # type: ignore[no-any-return]


def test_the_fullest_rank_decides(pool2: RankPool) -> None:
    shape, cpu = shape_of_model(build("Llama")), hardware_of(torch.device("cpu"))
    jobs = (Job(100, dtype="fp32", memory=memory).on(ulysses=2) for memory in (FASTEST, LONGEST))
    most, least = (cost(shape, job, cpu).memory_total_bytes for job in jobs)
    assert pool2.run(_with_memory_of_ranks, [2 * most, 2 * most]) == [FASTEST] * 2
    first, second = pool2.run(_with_memory_of_ranks, [2 * most, (most + least) / 2])
    assert first == second != FASTEST


@pytest.mark.parametrize(
    ("free", "held", "others", "fits"),
    [
        (1, 0, 0, True),
        (0.4, 0.6, 0, True),  # this process' allocator has cached the rest
        (0.5, 0, 0, False),  # another process has taken it
        (0.5, 0.5, 0.5, False),  # tensors of this process that are not the model's
    ],
)
def test_auto_plans_with_free_memory(
    free: float, held: float, others: float, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In parts of what the fastest options need; the device itself is large."""
    with on_gpu():
        sp, model = one_gpu(), build("Llama", max_position_embeddings=1 << 20).to("cuda")
        own = sum(p.nbytes for p in model.parameters())
        job = Job(context=1 << 20, dtype="fp32", weight_sharding=False)
        needed = int(1.01 * cost(shape_of_model(model), job, CATALOGUE["h100"]).memory_total_bytes)
        for name, value in {
            "mem_get_info": (int(free * needed), 1 << 50), "memory_reserved": int(held * needed),
            "memory_allocated": own + int(others * needed), "get_device_name": "NVIDIA H100",
        }.items():  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
        chosen = AutoMemory(model, sp, False, None, "tp").for_batch(job.context, 1, {}, False)
    assert chosen is not None and (chosen[0] == FASTEST) == fits


def test_auto_omits_options_that_conflict(monkeypatch: pytest.MonkeyPatch) -> None:
    def least(auto: Any, length: int, rows: int, fixed: dict[str, Any], *_: Any) -> tuple[Memory, str]:
        return Memory(**{"checkpointing": "full", "tiled": True, **fixed}), "a fake planner"

    monkeypatch.setattr("longspan.hf.memory.AutoMemory.for_batch", least)
    model = longspan.parallelize(build("Mixtral"), ONE_DEVICE, memory="auto").train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    loss = model(**batch(), output_router_logits=True).loss
    assert model.longspan_state.memory.options == Memory(tiled=True)
    plain = longspan.parallelize(build("Mixtral"), ONE_DEVICE).train()
    assert torch.allclose(loss, plain(**batch(), output_router_logits=True).loss)


def _with(hardware: Hardware, held: float) -> Hardware:
    return dataclasses.replace(hardware, memory_bytes=held)


def gradients_of(model: Any, whole: dict[str, Tensor]) -> dict[str, Tensor]:
    model.train()(**whole).loss.backward()
    return gradients(model)


def test_auto_reserves_room_when_it_chooses_an_offload(monkeypatch: pytest.MonkeyPatch) -> None:
    offload_on_cpus(monkeypatch.setattr)
    memory = Memory(checkpointing="full", offload="host")
    monkeypatch.setattr("longspan.hf.memory.AutoMemory.for_batch", lambda *_: (memory, "a fake planner"))
    model = longspan.parallelize(build("Llama"), ONE_DEVICE, memory="auto").train()
    reserved: list[int] = []
    plain = HostStore.reserve
    monkeypatch.setattr(HostStore, "reserve", lambda store, size: (reserved.append(size), plain(store, size))[1])
    model(**batch()).loss.backward()
    assert len(reserved) == 1 and reserved[0] > 0


def test_losses_are_counted_if_only_the_loss_is_requested() -> None:
    """A trainer reads from this count whether a forward computed the loss of all ranks."""
    model = longspan.parallelize(build("Llama"), ONE_DEVICE).eval()
    hooks = model.longspan_state.forward
    with hooks.options.during(loss_only=True):
        model(**batch())
    assert hooks.losses.computed == 1
    longspan.token_logprobs(model, batch())
    assert hooks.losses.computed == 1
