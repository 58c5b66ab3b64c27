"""Experts sharded over data x sequence: what one process computes, weights at rest as FSDP's, and refusals."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import longspan
from longspan import LongspanError, generate, verify
from longspan.core import tile_sizes
from longspan.core.memory import Memory
from longspan.generate import score
from longspan.generate.config import GenerateConfig
from longspan.generate.score import ScoreConfig
from longspan.hf.preconditions import Checked, ParallelizeOptions
from longspan.hf.weights import experts as expert_parallel
from longspan.hf.weights.experts import ExpertLayout
from longspan.ranks import launch
from longspan.trainers.muon import muon
from longspan.verify import VerifyConfig
from longspan.verify.report import Report
from tests.choose import confirming
from tests.fakes import fake_world
from tests.flags import make, replace
from tests.hf import pictures
from tests.models import (
    Case,
    Truth,
    batch,
    build,
    compare,
    compare_cases,
    gradients,
    lora_on_experts,
    on_mesh,
    rows_of,
    truth_of,
)
from tests.pool import on_ranks
from tests.streams import fake_gpus
from tests.syncs import on_gpu
from tests.train.training import write_config

pytestmark = pytest.mark.skipif(
    torch.__version__ < "2.13", reason="FSDP2 shards parameters of one module over several meshes from torch 2.13"
)

PICTURES: pictures.Rows = (*pictures.ROWS, pictures.ROWS[1])
TILES = Memory(tiled=True, checkpointing="full")
GLM: dict[str, Any] = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1,
    "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "head_dim": 8,
}  # fmt: skip
FAMILIES: dict[str, tuple[dict[str, Any], list[Case]]] = {
    "Mixtral": (
        {"output_router_logits": True},
        [({"ulysses": 4}, {"experts": 4}), ({"data": 2, "ring": 2}, {"experts": 2, "memory": TILES})],
    ),
    # Of 7 experts the last rank at rest has one, and one place of padding.
    "Qwen3Moe": (
        {"num_experts": 7, "output_router_logits": True},
        [({"ring": 2, "ulysses": 2}, {"experts": 2, "memory": "longest"}), ({"data": 2, "ulysses": 2}, {"experts": 4})],
    ),
    "GptOss": ({"num_experts_per_tok": 1}, [({"ring": 4}, {"experts": 4}), ({"ulysses": 4}, {"experts": 2})]),
    "Llama4Text": ({"num_experts_per_tok": 1}, [({"data": 2, "ring": 2}, {"experts": "auto"})]),
    "DeepseekV3": ({"n_routed_experts": 8}, [({"ring": 2, "ulysses": 2}, {"experts": 2})]),
    "Glm4Moe": (GLM, [({"data": 2, "ulysses": 2}, {"experts": 4, "memory": TILES})]),
}


def a_model(family: str, **changes: Any) -> Any:
    model = build(family, **{"vocab_size": 64, **changes})
    if family == "GptOss":  # every token to one expert, on one rank, and none to the others
        with torch.no_grad():
            for layer in model.model.layers:
                layer.mlp.router.bias[2] = 50.0
    return model


CONFIRMING = ("DeepseekV3", "Glm4Moe")  # modules like Qwen3-MoE's


@pytest.mark.parametrize("family", [*(f for f in FAMILIES if f not in CONFIRMING), *confirming(CONFIRMING)])
def test_loss_logits_and_gradients_equal_those_of_one_process(pool4: Any, family: str) -> None:
    changes, cases = FAMILIES[family]
    make = functools.partial(a_model, family, **changes)
    pool4.run(compare_cases, make, cases, truth_of(make(), batch()), timeout=180)


SKEWED = {"num_local_experts": 16, "num_experts_per_tok": 1, "num_hidden_layers": 1, "layer_types": ["full_attention"]}


@pytest.mark.parametrize(
    ("family", "changes"),
    [("GptOss", SKEWED), *confirming([("Qwen3Moe", {"num_experts": 16, "num_hidden_layers": 1})])],
)
def test_on_two_and_eight_ranks(pool2: Any, pool8: Any, family: str, changes: dict[str, Any]) -> None:
    make = functools.partial(a_model, family, **changes)
    truth = truth_of(make(), batch())
    pool2.run(compare_cases, make, [({"ulysses": 2}, {"experts": 2})], truth, timeout=180)
    case: Case = {"data": 2, "ring": 2, "ulysses": 2}, {"experts": 4}
    pool8.run(compare_cases, make, [case], truth, timeout=180)


def _compare_with_pictures(truth: Truth) -> None:
    """One replica has no video."""
    sp = on_mesh({"data": 2, "ulysses": 2})
    mine = pictures.batch("Qwen3VLMoe", PICTURES, keep=(2 * sp.data_rank, 2 * sp.data_rank + 1))
    model = longspan.parallelize(pictures.build("Qwen3VLMoe"), sp, experts=4, memory="longest").train()
    compare(truth, model, {}, sp, mine)


@pytest.mark.confirms
def test_text_of_a_vision_language_model(pool4: Any) -> None:
    pool4.run(_compare_with_pictures, pictures.truth_about("Qwen3VLMoe", PICTURES), timeout=180)


def test_lora_on_experts(pool4: Any) -> None:
    make = functools.partial(_with_lora, 8)
    cases: list[Case] = [({"ulysses": 4}, {"experts": 4}), ({"data": 2, "ring": 2}, {"experts": 2, "memory": TILES})]
    pool4.run(compare_cases, make, cases, truth_of(make(), batch()), timeout=180)


def _with_lora(experts: int) -> Any:
    return lora_on_experts(a_model("Qwen3Moe", num_experts=experts))


# ---------------------------------------------------------------------------------------------------------------------
# Beside FSDP alone.

MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def _step(model: Any, sp: longspan.SequenceSharding) -> tuple[float, dict[str, Any]]:
    """Accumulate two backwards, clip by torch's own function, and step; return the norm and the weights' shards."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    whole = rows_of(batch(), sp.data_rank, sp.data_size)
    with longspan.no_sync(model):
        model(**whole).loss.backward()
    model(**whole).loss.backward()
    norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return float(norm.full_tensor()), dict(model.named_parameters())


@on_ranks(4)
def test_weights_at_rest_clipping_and_accumulation_are_those_of_fsdp_alone() -> None:
    sp = on_mesh({"data": 2, "ulysses": 2})
    for experts, policy, tolerance in ((2, None, 1e-5), (4, MIXED, 2e-2)):
        (norm_alone, alone), (norm, weights) = (
            _step(longspan.parallelize(a_model("Qwen3Moe", num_experts=7), sp, experts=n, mp_policy=policy), sp)
            for n in (1, experts)
        )
        assert abs(norm - norm_alone) <= tolerance * norm
        for name, p in weights.items():
            q: Any = alone[name]
            assert (p.placements, p.device_mesh, p.shape) == (q.placements, q.device_mesh, q.shape), name
            assert p.to_local().shape == q.to_local().shape and p.grad.dtype == torch.float32
            if policy is None:
                torch.testing.assert_close(p.to_local(), q.to_local(), rtol=1e-3, atol=1e-4)


def _loaded(folder: Path) -> None:
    sp = on_mesh({"ring": 2, "ulysses": 2})
    loaded = longspan.from_pretrained(folder, sp, dtype=torch.float32, experts=2)
    plain = longspan.parallelize(a_model("Qwen3Moe", num_experts=7), sp)
    for model in (loaded, plain):
        model(**batch()).loss.backward()
    found, expected = gradients(loaded), gradients(plain)
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-6)
    ids = batch(rows=1)["input_ids"]
    generated = [model.eval().generate(ids, max_new_tokens=4, do_sample=False) for model in (loaded, plain)]
    assert torch.equal(*generated)


def test_loaded_shard_by_shard_and_generation(pool4: Any, tmp_path: Path) -> None:
    a_model("Qwen3Moe", num_experts=7).save_pretrained(tmp_path)
    pool4.run(_loaded, tmp_path, timeout=180)


@on_ranks(2)
def test_a_step_and_log_probabilities_are_those_of_fsdp_alone() -> None:
    sp, found = on_mesh({"data": 2}), []
    rows = rows_of(batch(), sp.data_rank, sp.data_size)
    memory = Memory(checkpointing="grouped")
    for experts in (1, 2):
        model = longspan.parallelize(a_model("Qwen3Moe"), sp, experts=experts, memory=memory)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        model(**rows).loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        optimizer.step()
        logprobs = longspan.token_logprobs(model.eval(), rows)[0]
        found.append((float(norm.full_tensor()), float(logprobs.detach().sum())))
    assert found[0] == pytest.approx(found[1], rel=1e-5)


@on_ranks(2)
def test_replicas_with_other_lengths_run_equally_many_tiles() -> None:
    """Qwen2-MoE's shared experts run before the others; Llama-4 calls experts in its own way; jitter is random."""
    sp = on_mesh({"data": 2})
    tile_sizes.FEWEST_ROWS = 2, 2
    whole = batch(rows=1, n=5 if sp.data_rank else 21)  # 3 tiles and 11: the last ones are empty
    for family, memory in (("Qwen2Moe", Memory(tiled=True)), ("Llama4Text", "longest")):
        found = []
        for options in ({"experts": 2, "memory": memory}, {}):
            model = longspan.parallelize(a_model(family), sp, **options).train()
            for _ in range(2):  # from the second forward on, norms compute no whole output
                model.zero_grad()
                model(**whole).loss.backward()
            found.append(gradients(model))
            model.eval()
            with torch.no_grad():
                model(**whole)
        for name, grad in found[1].items():
            torch.testing.assert_close(found[0][name], grad, rtol=1e-4, atol=1e-6)
    jitter = longspan.parallelize(a_model("Mixtral", router_jitter_noise=0.1), sp, experts=2, memory=TILES).train()
    jitter(**whole).loss.backward()
    assert gradients(jitter).keys() == dict(jitter.named_parameters()).keys()


# ---------------------------------------------------------------------------------------------------------------------
# On a GPU.


@pytest.mark.parametrize(
    ("family", "memory"),
    [
        ("Qwen3Moe", "fastest"),
        ("LoRA", "longest"),  # of Qwen-3-MoE
        *confirming([("Llama4Text", "longest"), ("Qwen3Moe", Memory(checkpointing="full")), ("Qwen3Moe", "longest")]),
    ],
)
def test_the_host_waits_once_per_layer_and_step(family: str, memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the numbers of rows of all tiles; the backward, which computes tiles and layers again, never waits."""
    made, model = expert_parallel.Route, _with_lora(8) if family == "LoRA" else a_model(family)

    def even(slots: torch.Tensor, *rest: Any) -> Any:  # the fake GPU reads zeros
        rows = [len(slots) // 2] * 2
        return made(slots, rows, rows, *rest[2:])

    monkeypatch.setattr(expert_parallel, "Route", even)
    monkeypatch.setattr(tile_sizes, "FEWEST_ROWS", (16, 16))  # so each of four ranks has two tiles
    nothing = dict.fromkeys(("all_to_all_single", "all_reduce"), lambda *_, **__: None)
    with fake_world(0, 4), on_gpu() as seen, fake_gpus(4), mock.patch.multiple(dist, **nothing):
        sp = longspan.SequenceSharding(longspan.init_mesh(ulysses=4, device_type="cuda"), overlap_chunks=1)
        options: dict[str, Any] = {"weights": "same", "check_batches": 0, "check_weights": 0, "mp_policy": MIXED}
        model = longspan.parallelize(model.to("cuda"), sp, kernel="flash", memory=memory, experts=2, **options).train()
        ids = torch.zeros(1, 128, dtype=torch.int64, device="cuda")
        for _ in range(2):  # in the first one, a tiled MLP is checked
            seen.clear()
            loss = model(input_ids=ids, labels=ids).loss
            forward = list(seen)
            loss.backward()
        layers = sum(hasattr(module, "longspan_experts") for module in model.modules())
        for_masks = ["tensor of numbers, to the device", "equal"] if family == "Llama4Text" else []
        assert forward == seen == [*for_masks, *["tolist"] * layers]


def _orthogonalized(matrix: torch.Tensor) -> torch.Tensor:
    """Muon's five steps in fp64."""
    from torch.optim import _muon

    a, b, c = _muon.DEFAULT_A, _muon.DEFAULT_B, _muon.DEFAULT_C
    x = matrix.double() / matrix.double().norm().clamp(min=_muon.EPS)
    x = x if len(x) <= len(x.T) else x.T
    for _ in range(_muon.DEFAULT_NS_STEPS):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return (x if x.shape == matrix.shape else x.T).to(matrix.dtype)


def _muon_steps(model: Any) -> dict[str, torch.Tensor]:
    optimizer = muon()(model, lr=1e-2)
    for _ in range(2):
        model(**batch()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    full = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in model.named_parameters()}
    return {name: p.detach() for name, p in full.items()}


@on_ranks(2)
def test_muon_takes_the_steps_of_one_process() -> None:
    """In fp64: the rows of a router's gradient sum up to zero, and bf16 turns that direction's rounding into steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("longspan.trainers.muon.orthogonalized", _orthogonalized)
        alone = _muon_steps(a_model("Mixtral", output_router_logits=True))
        model = a_model("Mixtral", output_router_logits=True)
        found = _muon_steps(longspan.parallelize(model, on_mesh({"ulysses": 2}), experts=2))
    for name, p in alone.items():
        by_muon = name.endswith("proj.weight") or "gate.weight" in name
        tolerance = 3e-5 * float(p.abs().max()) if by_muon else 1e-4  # AdamW's steps of 0.01 depend on signs
        assert (found[name] - p).abs().max() <= tolerance, name


# ---------------------------------------------------------------------------------------------------------------------
# Commands.

MOE = {
    "model_type": "qwen3_moe", "head_dim": 8, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "output_router_logits": True,
}  # fmt: skip
PROMPT = "A ring of ranks: each holds a part of what was read. "


def _wrongly(config: VerifyConfig) -> Report:
    """Send every row to another expert."""
    with pytest.MonkeyPatch.context() as patch:
        slots = ExpertLayout.slots
        patch.setattr(ExpertLayout, "slots", lambda self, experts: slots(self, experts ^ 1))
        return verify.worker(config)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    config = transformers.AutoConfig.from_pretrained(write_config(path, **MOE))
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


@pytest.mark.parametrize("command", ["verify", "generate", "score"])
def test_commands_refuse_before_ranks_start(
    command: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What does not fit, and a torch that is too old."""
    from torch.distributed.fsdp._fully_shard import _fsdp_common

    monkeypatch.setattr(launch, "launch", lambda *_, **__: pytest.fail("ranks were started"))
    jobs: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "verify": (verify.run, VerifyConfig, {"context": 64}),
        "generate": (generate.run, GenerateConfig, {"prompt": PROMPT, "weights": "sharded"}),
        "score": (score.run, ScoreConfig, {"text": PROMPT}),
    }
    run, kind, options = jobs[command]
    given = make(kind, model=str(folder), ulysses=4, experts=3, **options)
    with pytest.raises(LongspanError, match=r"experts=3.* does not divide the number .*, 4; use 1, 2, 4$"):
        run(given)
    monkeypatch.delattr(_fsdp_common, "ShardPlacementResult")
    for experts in (2, "auto"):
        with pytest.raises(LongspanError, match=r"use torch 2\.13, or leave out `experts`$"):
            run(replace(given, experts=experts))


@on_ranks(2)
def test_every_rank_raises_the_same_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of options that differ, and of a torch that is too old on one rank; no group was made for experts."""
    from torch.distributed.fsdp._fully_shard import _fsdp_common

    sp, second = on_mesh({"ulysses": 2}), dist.get_rank() == 1
    with pytest.raises(LongspanError, match="experts.*\n?.*rank 1"):
        longspan.parallelize(a_model("Qwen3Moe"), sp, experts=2 if second else "auto")
    if second:
        monkeypatch.delattr(_fsdp_common, "ShardPlacementResult")
    with pytest.raises(LongspanError, match="rank 1.*\n?.*use torch 2.13"):
        longspan.parallelize(a_model("Qwen3Moe"), sp, experts="auto")
    assert not sp._expert_meshes


# ---------------------------------------------------------------------------------------------------------------------
# Layouts and refusals.


@pytest.mark.parametrize(
    ("experts", "ranks", "size"), [(8, 4, 2), (7, 4, 2), (7, 4, 4), (16, 8, 2), (5, 8, 2), (9, 8, 4)]
)
def test_every_expert_has_one_place_in_a_group(experts: int, ranks: int, size: int) -> None:
    layout = ExpertLayout(experts, ranks, size)
    places = [layout.of(rank) for rank in range(size)]
    assert all(len(place) == layout.held for place in places)
    slots = layout.slots(torch.arange(experts)).tolist()
    assert [places[slot // layout.held][slot % layout.held] for slot in slots] == list(range(experts))


def _refusal(model: Any, mesh: dict[str, int], **options: Any) -> str:
    ranks = 1
    for size in mesh.values():
        ranks *= size
    with fake_world(0, ranks), pytest.raises(LongspanError) as error:
        Checked(model, on_mesh(mesh), ParallelizeOptions(**options))
    return str(error.value)


@pytest.mark.parametrize(
    ("family", "changes", "mesh", "options", "said"),
    [
        ("Qwen3Moe", {}, {"ulysses": 4}, {"experts": 3}, ("experts=3", "sequence, 4;", "use 1, 2, 4")),
        ("Qwen3Moe", {}, {"ulysses": 4}, {"experts": 8}, ("experts=8", "sequence, 4;", "use 1, 2, 4")),
        ("Qwen3Moe", {}, {"data": 8}, {"experts": 8}, ("any of the 4 experts", "mlp.experts", "use `experts=4`")),
        ("Qwen3Moe", {"num_experts": 5}, {"ulysses": 4}, {"experts": 4}, ("5 experts", "use `experts=2`")),
        ("Qwen3Moe", {}, {"ulysses": 2}, {"experts": 2, "fsdp": False}, ("fsdp=False", "leave one out")),
        ("Qwen3Moe", {}, {"ulysses": 2, "tensor": 2}, {"experts": 2}, ("tensor=2", "leave out one")),
        ("Qwen3Moe", {}, {"ulysses": 2}, {"experts": 0}, ("experts", "0")),
        ("Qwen3Moe", {}, {"ulysses": 2}, {"experts": "all"}, ("experts", "all")),
        ("Llama", {}, {"ulysses": 2}, {"experts": 2}, ("LlamaForCausalLM", "no layer", "leave it out")),
    ],
)
def test_experts_that_do_not_fit_are_refused(
    family: str, changes: dict[str, Any], mesh: dict[str, int], options: dict[str, Any], said: tuple[str, ...]
) -> None:
    """With the numbers and what fits, before any collective."""
    text = _refusal(build(family, **{"vocab_size": 64, **changes}), mesh, **options)
    assert all(part in text for part in said), text


def test_lora_needs_two_experts_on_a_rank() -> None:
    text = _refusal(_with_lora(4), {"ulysses": 4}, experts=4)
    assert "PEFT's LoRA needs 2" in text and "experts=2" in text


def test_experts_that_are_called_in_another_way_are_refused() -> None:
    model = build("Mixtral")
    model.model.layers[1].mlp.experts.forward = lambda hidden, counts: hidden
    text = _refusal(model, {"ulysses": 2}, experts=2)
    assert "layers.1.mlp.experts (MixtralExperts)" in text and "as transformers does" in text


def test_auto_leaves_a_dense_model_alone() -> None:
    with fake_world(0, 2):
        assert Checked(build("Llama"), on_mesh({"ulysses": 2}), ParallelizeOptions(experts="auto")).experts is None
