"""Diffusion transformers of diffusers on real ranks against one process: output and every gradient."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor

import longspan
from longspan.comm.reshard import shard_along
from longspan.core.errors import LongspanError
from longspan.diffusion import attention
from longspan.diffusion.attention import ShardedAttention, attend
from longspan.diffusion.check import run
from longspan.diffusion.structure import Attention, map_tensors
from longspan.diffusion.tokens import Sizes, Tokens
from tests.choose import confirming
from tests.counting import count_sent
from tests.diffusion.diffusing import (
    CLASSES,
    CONFIGS,
    MESHES,
    compare,
    make_inputs,
    make_model,
    sharding,
    small_on_meshes,
)
from tests.models import build
from tests.pool import RankPool, on_ranks

pytestmark = pytest.mark.versions

pytest.importorskip("diffusers")


IN_THOUSANDTHS = ("FluxTransformer2DModel", "QwenImageTransformer2DModel")
"""Models whose time steps are between 0 and 1."""


def _equals_one_process(
    name: str,
    fsdp: bool,
    checkpointing: bool,
    config: dict[str, Any] | None = None,
    axes: dict[str, int] | None = None,
    **changes: Any,
) -> None:
    model: Any = make_model(name, **(config or {}))
    expected = run(copy.deepcopy(model), make_inputs(name) | changes)
    if checkpointing:
        model.enable_gradient_checkpointing()
    model = longspan.parallelize(model, sharding(**(axes or {})), fsdp=fsdp)
    compare(run(model, make_inputs(name) | changes), expected)


def _some(*names: str) -> list[Any]:
    return [*names, *confirming(name for name in CONFIGS if name not in names)]


@pytest.mark.parametrize("name", _some("LTXVideoTransformer3DModel", "HunyuanVideoTransformer3DModel"))
@on_ranks(4)
def test_equals_one_process_on_4_ranks(name: str) -> None:
    """The others also in `test_fewer_frames_or_text_tokens_than_ranks`."""
    _equals_one_process(name, fsdp=False, checkpointing=True)


@pytest.mark.parametrize("name", ["HunyuanVideoTransformer3DModel", *confirming(["WanTransformer3DModel"])])
@on_ranks(4)
def test_rings_equal_one_process(name: str) -> None:
    """More ranks than heads, and both axes; text of uneven lengths with padding, which a ring's keys leave out.

    Layers of a forward have one mask, which is read once.
    """
    _equals_one_process(name, False, True, {"num_attention_heads": 2}, {"ring": 4})
    expected = run(make_model(name), make_inputs(name))
    model = longspan.parallelize(make_model(name), sharding(ring=2, ulysses=2))
    with mock.patch.object(attention, "_visible", wraps=attention._visible) as visible:
        compare(run(model, make_inputs(name)), expected)
    assert visible.call_count == 1


@on_ranks(4)
def test_fewer_frames_or_text_tokens_than_ranks() -> None:
    """A rank without a frame, or without text, still takes part in every collective."""
    image = torch.randn(2, 3, 1, 8, 6, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[[1, 1, 0, 0, 0]], [[1, 1, 1, 1, 1]]]).bool()
    _equals_one_process("LatteTransformer3DModel", True, False, hidden_states=image, encoder_attention_mask=mask)
    frames = torch.randn(2, 3, 3, 8, 6, dtype=torch.float64, requires_grad=True)
    none = {"encoder_attention_mask": None, "enable_temporal_attentions": False}
    _equals_one_process("LatteTransformer3DModel", True, True, hidden_states=frames, **none)
    word = torch.randn(2, 1, 10, dtype=torch.float64, requires_grad=True)
    _equals_one_process("CogVideoXTransformer3DModel", True, True, encoder_hidden_states=word)
    small_on_meshes("SD3Transformer2DModel", [{"ulysses": 4}], (1, 5, 5), 1)  # its text comes last, without a mask
    for name, mask_name in {
        "HunyuanVideoTransformer3DModel": "encoder_attention_mask",
        "QwenImageTransformer2DModel": "encoder_hidden_states_mask",
    }.items():
        _equals_one_process(name, True, True, **{"encoder_hidden_states": word, mask_name: torch.ones(2, 1).long()})


@pytest.mark.parametrize("name", _some("FluxTransformer2DModel"))
@on_ranks(2)
def test_bf16_is_as_exact_as_on_one_rank(name: str) -> None:
    """Against the same weights and inputs in fp64; bf16 represents the time steps, which models round to it."""
    model: Any = make_model(name).bfloat16()
    scale = 1000 if name in IN_THOUSANDTHS else 1
    inputs = {**make_inputs(name), "timestep": torch.tensor([250.0, 500.0]) / scale}
    rounded = _to(inputs, torch.bfloat16)
    exact, one = copy.deepcopy(model).double(), copy.deepcopy(model)
    expected = run(exact, _to(rounded, torch.float64))
    own = _errors(run(one, rounded), expected)
    sharded = longspan.parallelize(model, sharding())
    found = _errors(run(sharded, _to(rounded, torch.bfloat16)), expected)
    assert own["output"] < 0.02
    assert found["output"] < 1.1 * own["output"] and found["gradients"] < 1.1 * own["gradients"], (found, own)


def _to(inputs: Any, dtype: torch.dtype) -> Any:
    """Cast floating tensors, and make them leaves."""

    def cast(_: str, x: Tensor) -> Tensor:
        return x.detach().to(dtype).requires_grad_(x.requires_grad) if x.is_floating_point() else x

    return map_tensors(inputs, cast)


def _errors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Return the relative error of the output, and that of all gradients together."""
    found = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in found.items()}
    errors = {"output": float((found["output"] - expected["output"]).norm() / expected["output"].norm())}
    of_gradients = [name for name in expected if name != "output"]
    wrong = sum(float((found[name] - expected[name]).square().sum()) for name in of_gradients)
    errors["gradients"] = (wrong / sum(float(expected[name].square().sum()) for name in of_gradients)) ** 0.5
    return errors


@pytest.mark.parametrize("name", CONFIGS)
@on_ranks(2)
def test_each_rank_keeps_its_tokens(name: str) -> None:
    """The mean over the tokens of all ranks is one process's loss, and so are its gradients."""
    sp = sharding()
    results = []
    for sharded in (False, True):
        model: Any = make_model(name)
        model = longspan.parallelize(model, sp, gather_output=False) if sharded else model
        inputs = make_inputs(name)
        out = model(**inputs).sample
        if not sharded:
            target = torch.randn_like(out)
        mine = longspan.shard_target(model, target, out) if sharded else target
        loss = longspan.global_mean((out - mine).square(), sp) if sharded else (out - mine).square().mean()
        loss.backward()
        grads = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
        grads["hidden_states"] = inputs["hidden_states"].grad
        results.append({"loss": loss.detach(), **grads})
    compare(results[1], results[0])


@on_ranks(2)
def test_a_target_of_another_shape_raises() -> None:
    sp = sharding()
    plain, inputs = make_model("LatteTransformer3DModel"), make_inputs("LatteTransformer3DModel")
    model: Any = longspan.parallelize(copy.deepcopy(plain), sp, gather_output=False)
    expected = plain(**inputs).sample
    out = model(**inputs, return_dict=False)[0]
    torch.testing.assert_close(out, longspan.shard_target(model, expected, out))
    assert out.shape == (10, 6, 24)
    with pytest.raises(LongspanError, match=r"shape \(2, 6, 2, 8, 6\) has no part like this rank's output \(10, 6,"):
        longspan.shard_target(model, expected[:, :, :2], out)
    with pytest.raises(LongspanError, match="parallelized with gather_output=False, got LatteTransformer3DModel"):
        longspan.shard_target(plain, expected, out)
    model.register_forward_hook(lambda *_: 1 / 0, prepend=True)
    with torch.no_grad():
        with pytest.raises(ZeroDivisionError):
            model(**inputs)
        assert not torch.is_grad_enabled()  # as before the forward


def _on_every_mesh(name: str) -> None:
    """The replicas have equal inputs; each computes its share of their gradients."""
    ranks = dist.get_world_size()
    for data in (1, 2, 4):
        if data == ranks:
            return
        config, changes = _wide(name) if ranks // data == 8 else ({}, {})
        model: Any = make_model(name, **config)
        expected = run(copy.deepcopy(model), make_inputs(name) | changes)
        sharded = longspan.parallelize(model, sharding(data=data, ulysses=ranks // data), fsdp=data < 4)
        actual = run(sharded, make_inputs(name) | changes)
        of_model = {"output", *(key for key, _ in model.named_parameters())}
        compare({key: x if key in of_model else x * data for key, x in actual.items()}, expected)


def _wide(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return changes of a config and of inputs: a head and a token of text for each of 8 ranks."""
    config = {"num_attention_heads": 8} | ({"cross_attention_dim": 64} if name[:3] in ("LTX", "Lat") else {})
    if name[:3] not in ("Hun", "Qwe"):
        return config, {}
    torch.manual_seed(2)
    text, mask = torch.randn(2, 9, 10, dtype=torch.float64, requires_grad=True), torch.ones(2, 9, dtype=torch.int64)
    mask[0, 3:] = 0
    key = "encoder_attention_mask" if name.startswith("Hun") else "encoder_hidden_states_mask"
    return config, {"encoder_hidden_states": text, key: mask}


def check_every_mesh(get_pool: Callable[[int], RankPool], ranks: int, name: str) -> None:
    """Assert that a class equals one process on every mesh of so many ranks."""
    get_pool(ranks).run(_on_every_mesh, name, timeout=300)


@pytest.mark.parametrize(("ranks", "name"), confirming((ranks, name) for ranks in (2, 4, 8) for name in CONFIGS))
def test_every_mesh(get_pool: Callable[[int], RankPool], ranks: int, name: str) -> None:
    check_every_mesh(get_pool, ranks, name)


def check_class(get_pool: Callable[[int], RankPool], ranks: int, name: str) -> None:
    """Assert that a class equals one process on every mesh of so many ranks."""
    get_pool(ranks).run(small_on_meshes, name, MESHES[ranks], timeout=300)


@pytest.mark.parametrize(("ranks", "name"), confirming((ranks, name) for ranks in MESHES for name in CLASSES))
def test_every_class(get_pool: Callable[[int], RankPool], ranks: int, name: str) -> None:
    check_class(get_pool, ranks, name)


@pytest.mark.parametrize("name", ["LTX2Video", "Mochi", "ZImage", "Sana"])
@on_ranks(4)
def test_other_structures(name: str) -> None:
    """Video and audio; a text of which each row holds another part, on every rank; refiners and a joint list; linear
    attention and convolutions over rows of pixels.
    """
    name = next(kind for kind in CLASSES if kind.startswith(name + "T"))
    small_on_meshes(name, [{"ring": 2, "ulysses": 2}])


LENGTHS = 5, 11
B, H, S, D = 2, 5, 16, 4
MASKS = {"none": None, "keys": (B, 1, 1, S), "pairs": (S, S), "heads": (B, H, S, S), "bias": (1, H, 1, S)}


@pytest.mark.parametrize(("mask", "causal"), [*((mask, False) for mask in MASKS), ("none", True)])
@on_ranks(4)
def test_attention_of_two_streams(mask: str, causal: bool) -> None:
    """Masks are in the order of a processor: all text tokens, then all of the video."""
    sp = sharding()
    tokens = Tokens(sp)
    tokens.sizes = Sizes(LENGTHS)
    call = Attention((0, 1), (0, 1))
    torch.manual_seed(0)
    whole = [torch.randn(B, H, S, D, dtype=torch.float64, requires_grad=True) for _ in "qkv"]
    weight, shape = torch.randn(B, H, S, D, dtype=torch.float64), MASKS[mask]
    bias = None if shape is None else torch.randn(shape, dtype=torch.float64)
    given = bias if bias is None or mask == "bias" else bias > -1
    if given is not None and given.dtype == torch.bool and given.shape[-2] > 1:
        given = given | torch.eye(S, dtype=torch.bool)  # every query sees a key
    expected = F.scaled_dot_product_attention(*whole, attn_mask=given, is_causal=causal)
    grads = torch.autograd.grad((expected * weight).sum(), whole)

    text, video = (torch.arange(S).split([5, 11])[i] for i in (0, 1))
    mine = torch.cat([shard_along(stream, 0, sp.group) for stream in (text, video)])
    local = [x.detach()[:, :, mine].requires_grad_() for x in whole]
    with ShardedAttention(tokens, [call]) as mode:
        out = F.scaled_dot_product_attention(*local, attn_mask=given, is_causal=causal)
    assert mode.calls == 1
    torch.testing.assert_close(out, expected[:, :, mine])
    found = torch.autograd.grad((out * weight[:, :, mine]).sum(), local)
    torch.testing.assert_close(list(found), [grad[:, :, mine] for grad in grads])
    with pytest.raises(LongspanError, match=r"mask of shape \(16, 3\) fits neither all 16 tokens nor this rank's"):
        attend(tokens, call, *local, attn_mask=torch.ones(16, 3, dtype=torch.bool))
    with pytest.raises(LongspanError, match="got dropout_p=0.5"):
        attend(tokens, call, *local, dropout_p=0.5)


@pytest.mark.confirms
@on_ranks(2)
def test_variants_equal_one_process() -> None:
    """A time step for each token, two images in one sequence, an image besides the text, no text mask."""
    of_tokens = torch.arange(2 * 75).view(2, 75) * 6
    _equals_one_process("WanTransformer3DModel", True, True, timestep=of_tokens)
    _equals_one_process("LTXVideoTransformer3DModel", True, True, timestep=of_tokens[:, :15])
    _equals_one_process("LTXVideoTransformer3DModel", True, True, timestep=of_tokens[:, :1])
    _equals_one_process("WanTransformer3DModel", True, False, {"num_attention_heads": 3})
    images = {"img_shapes": [[(1, 3, 3), (1, 2, 3)]] * 2, "encoder_hidden_states_mask": None}
    _equals_one_process("QwenImageTransformer2DModel", True, False, {"zero_cond_t": True}, **images)
    _equals_one_process("FluxTransformer2DModel", True, True, {"guidance_embeds": False}, guidance=None)
    _equals_one_process(
        "LatteTransformer3DModel", True, True, enable_temporal_attentions=False, encoder_attention_mask=None
    )
    text, image = (
        torch.randn(2, n, width, dtype=torch.float64, requires_grad=True) for n, width in ((512, 10), (3, 7))
    )
    both = {"encoder_hidden_states": text, "encoder_hidden_states_image": image}
    reads_images = {"image_dim": 7, "added_kv_proj_dim": 48}
    _equals_one_process("WanTransformer3DModel", True, False, reads_images, **both)
    both["encoder_hidden_states_image"] = torch.randn(4, 3, 7, dtype=torch.float64, requires_grad=True)
    _equals_one_process("WanTransformer3DModel", True, False, {**reads_images, "pos_embed_seq_len": 6}, **both)
    flat = {"img_shapes": [(1, 3, 5)] * 2}
    _equals_one_process("QwenImageTransformer2DModel", True, False, **flat)
    _equals_one_process("FluxTransformer2DModel", True, True, guidance=torch.tensor([3.0], dtype=torch.float64))


@pytest.mark.parametrize("fsdp", [False, True])
@on_ranks(2)
def test_gradients_accumulate(fsdp: bool) -> None:
    name = "LTXVideoTransformer3DModel"
    inputs = make_inputs(name)
    grads = []
    for sharded in (False, True):
        model: Any = make_model(name)
        model = longspan.parallelize(model, sharding(), fsdp=fsdp) if sharded else model
        with longspan.no_sync(model) if sharded else contextlib.nullcontext():
            model(**inputs).sample.square().sum().backward()
        model(**inputs).sample.sum().backward()
        grads.append({key: p.grad for key, p in model.named_parameters()})
    compare(grads[1], grads[0])


@on_ranks(2)
def test_compiled_blocks() -> None:
    """Attention between ranks and the split of tokens run as they are."""
    expected = run(make_model("WanTransformer3DModel", num_layers=1), make_inputs("WanTransformer3DModel"))
    model: Any = longspan.parallelize(make_model("WanTransformer3DModel", num_layers=1), sharding(), fsdp=False)
    model.blocks[0].compile(backend="eager")
    compare(run(model, make_inputs("WanTransformer3DModel")), expected)


@on_ranks(2)
def test_a_backward_that_raised_changes_no_later_one() -> None:
    """As one that ran out of memory."""
    name = "WanTransformer3DModel"
    expected = run(make_model(name), make_inputs(name))
    model: Any = longspan.parallelize(make_model(name), sharding(), fsdp=False)
    fault = model.blocks[0].attn1.to_q.weight.register_hook(lambda grad: grad.view(-1, 7))
    with pytest.raises(RuntimeError, match="shape"):
        model(**make_inputs(name)).sample.sum().backward()
    fault.remove()
    model.zero_grad()
    compare(run(model, make_inputs(name)), expected)


@on_ranks(4)
def test_replicas_average_their_gradients() -> None:
    """Each replica makes the loss of its own batch, as in data parallelism."""
    sp = sharding(data=2, ulysses=2)
    expected: dict[str, Tensor] = {}
    for replica in range(2):
        model, inputs = make_model("WanTransformer3DModel"), _other_inputs(replica)
        weights = dict(model.named_parameters())
        for name, x in run(model, inputs).items():
            if name in weights:
                expected[name] = expected.get(name, 0) + x / 2
            elif replica == sp.data_rank:  # its output and the gradients of its inputs
                expected[name] = x
    for fsdp in (False, True):
        model = longspan.parallelize(make_model("WanTransformer3DModel"), sp, fsdp=fsdp)
        actual = run(model, _other_inputs(sp.data_rank))
        compare(actual, expected)


def _other_inputs(seed: int) -> Any:
    inputs = make_inputs("WanTransformer3DModel")
    return {**inputs, "hidden_states": (inputs["hidden_states"].detach() + seed).requires_grad_()}


@on_ranks(2)
def test_a_recomputed_block_sees_the_lengths_of_its_forward() -> None:
    """Two forwards of different sizes, then their backwards."""
    large = make_inputs("HunyuanVideoTransformer3DModel")
    small = {**large, "hidden_states": large["hidden_states"].detach()[:, :, :2]}
    grads = []
    for sharded in (False, True):
        model: Any = make_model("HunyuanVideoTransformer3DModel")
        model.enable_gradient_checkpointing()
        if sharded:
            model = longspan.parallelize(model, sharding(), fsdp=False)
        losses = [model(**inputs).sample.square().sum() for inputs in (large, small)]
        sum(losses).backward()  # type: ignore[union-attr]
        grads.append({name: p.grad for name, p in model.named_parameters()})
    compare(grads[1], grads[0])


@pytest.mark.parametrize("name", ["WanTransformer3DModel", "QwenImageTransformer2DModel"])
@on_ranks(2)
def test_a_checkpoint_saves_this_ranks_tokens_only(name: str) -> None:
    model: Any = make_model(name)
    model.enable_gradient_checkpointing()
    model = longspan.parallelize(model, sharding(), fsdp=False)
    seen, inner = [], model._gradient_checkpointing_func

    def checkpoint(block: Any, *args: Any) -> Any:
        seen.append(args[0].shape[1])
        return inner(block, *args)

    model._gradient_checkpointing_func = checkpoint
    model(**make_inputs(name))
    tokens = 75 if name.startswith("Wan") else 15
    assert seen == [tokens // 2 + (dist.get_rank() == 0)] * 2


@pytest.mark.parametrize("temporal", [True, False])
@on_ranks(4)
def test_latte_sends_what_the_formula_says(temporal: bool) -> None:
    """A switch of N*d/P * (P-1)/P elements before and after a spatial block; the first finds the frames whole."""
    model: Any = longspan.parallelize(make_model("LatteTransformer3DModel"), sharding(), check_batches=0, fsdp=False)
    inputs = make_inputs("LatteTransformer3DModel")
    batch, _, frames, height, width = (2, 3, 8, 8, 6)
    inputs |= {"hidden_states": torch.randn(batch, 3, frames, height, width, dtype=torch.float64)}
    inputs |= {"encoder_attention_mask": None, "enable_temporal_attentions": temporal}
    model.temp_pos_embed = torch.zeros(1, frames, 32)
    with torch.no_grad(), count_sent() as log:
        model(**inputs)
    tokens, size = frames * height // 2 * width // 2, 8
    switch = size * batch * tokens * 32 // 4 * 3 // 4
    output = size * batch * tokens * 24 // 4 * 3  # what is joined at the end
    assert [(sent.op, sent.bytes) for sent in log] == [*[("all_to_all", switch)] * 3, ("all_gather", output)]


@on_ranks(2)
def test_attention_sends_what_the_formula_says() -> None:
    """Ulysses: q, k and v in one all-to-all, the output in another."""
    model: Any = longspan.parallelize(make_model("FluxTransformer2DModel"), sharding(), check_batches=0, fsdp=False)
    with torch.no_grad(), count_sent() as log:
        model(**make_inputs("FluxTransformer2DModel"))
    image, text = ((8, 3), (7, 2))[dist.get_rank()]
    others = 20 - image - text
    scatter, gather = 8 * 2 * 32 * 3 * (image + text), 8 * 2 * 32 * others
    joined = 8 * 2 * 6 * 8
    expected = [*[("all_to_all", scatter), ("all_to_all", gather)] * 2, ("all_gather", joined)]
    assert [(sent.op, sent.bytes) for sent in log] == expected


@pytest.mark.parametrize("name", _some("WanTransformer3DModel", "FluxTransformer2DModel", "LatteTransformer3DModel"))
@on_ranks(2)
def test_lora_trains_its_adapters_only(name: str) -> None:
    pytest.importorskip("peft")
    from peft import LoraConfig, inject_adapter_in_model

    grads, argument = [], "joint_attention_kwargs" if name.startswith("Flux") else "attention_kwargs"
    scale = {} if name.startswith("Latte") else {argument: {"scale": 0.5}}
    for sharded in (False, True):
        model: Any = make_model(name)
        model.requires_grad_(False)
        lora = LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False)
        model = inject_adapter_in_model(lora, model).double()
        torch.manual_seed(3)
        for p in model.parameters():
            p.data = torch.randn_like(p) / 4 if p.requires_grad else p.data
        model = longspan.parallelize(model, sharding()) if sharded else model
        model(**make_inputs(name), **scale).sample.square().sum().backward()
        grads.append({key: p.grad for key, p in model.named_parameters() if p.requires_grad})
    assert len(grads[0]) >= 8 and all(float(grad.abs().max()) > 0 for grad in grads[0].values())
    compare(grads[1], grads[0])


@on_ranks(2)
def test_sampling_between_backward_and_step() -> None:
    """FSDP gathers weights for the sampling, and the next forward must not use them again."""
    grads = []
    for sharded in (False, True):
        model: Any = make_model("WanTransformer3DModel")
        model = longspan.parallelize(model, sharding()) if sharded else model
        optimizer, inputs = torch.optim.SGD(model.parameters(), lr=1e-3), make_inputs("WanTransformer3DModel")
        for _ in range(2):
            optimizer.zero_grad()
            model(**inputs).sample.square().mean().backward()
            with torch.no_grad():
                model(**inputs)
            optimizer.step()
        grads.append({name: p.grad for name, p in model.named_parameters()})
    compare(grads[1], grads[0])


@pytest.mark.parametrize("name", _some("LatteTransformer3DModel", "QwenImageTransformer2DModel"))
@on_ranks(2)
def test_denoising_computes_the_same_video(name: str) -> None:
    """A sampler's loop: each rank draws the same noise."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    videos = []
    for sharded in (False, True):
        model: Any = make_model(name).eval()
        model = longspan.parallelize(model, sharding()) if sharded else model
        scheduler = FlowMatchEulerDiscreteScheduler()
        scheduler.set_timesteps(3)
        inputs = make_inputs(name)
        video = inputs["hidden_states"].detach()
        with torch.no_grad():
            for step in scheduler.timesteps:
                time = step.expand(2) / (1000 if name in IN_THOUSANDTHS else 1)
                noise = model(**{**inputs, "hidden_states": video, "timestep": time}, return_dict=False)[0]
                noise = noise[:, :3] if name.startswith("Latte") else noise  # the other channels are a variance
                video = scheduler.step(noise, step, video, return_dict=False)[0]
        videos.append(video)
    torch.testing.assert_close(videos[1], videos[0], rtol=1e-5, atol=1e-5 * float(videos[0].abs().max()))


# ---------------------------------------------------------------------------------------------------------------------
# What is refused.


@on_ranks(2)
def test_a_rank_with_other_inputs_is_named() -> None:
    model: Any = make_model("WanTransformer3DModel")
    # In the order of a set, which Python's hash seed decides: it differs between torchrun's ranks.
    model.register_to_config(_use_default_values=["eps", "qk_norm"][:: 1 - 2 * dist.get_rank()])
    model = longspan.parallelize(model, sharding())
    inputs = make_inputs("WanTransformer3DModel")
    if dist.get_rank() == 1:
        inputs["hidden_states"] = torch.randn_like(inputs["hidden_states"])
    with pytest.raises(
        LongspanError, match=r"ranks 1 were given another one than ranks 0 \(same shapes, other values\)"
    ):
        model(**inputs)
    frames = 4 if dist.get_rank() == 1 else 5
    inputs["hidden_states"] = torch.zeros(2, 3, frames, 6, 10, dtype=torch.float64)
    with pytest.raises(LongspanError, match=r"`hidden_states` is float64 \[2, 3, [45], 6, 10\]"):
        model(**inputs)
    inputs = make_inputs("WanTransformer3DModel")
    for changes, match in (
        (
            {"attention_kwargs": {"scale": 0.5 + dist.get_rank()}},
            r"`attention_kwargs\['scale'\]` is 1.5 on rank 1, 0.5 on rank 0",
        ),
        ({"mask": 1} if dist.get_rank() else {}, "`mask` is 1 on rank 1, missing on rank 0"),
        ({"attention_kwargs": 3 if dist.get_rank() else {}}, "`attention_kwargs` is 3 on rank 1, missing on rank 0"),
    ):
        with pytest.raises(LongspanError, match=match):
            model(**inputs, **changes)


@on_ranks(4)
def test_a_refusal_of_one_replica_is_shared() -> None:
    """Before the forward: the other replica would wait in a gather of weights."""
    sp = sharding(data=2, ulysses=2)
    for name, changes in (
        ("LTXVideoTransformer3DModel", {"hidden_states": torch.zeros(2, 1, 6), "height": 1, "width": 1}),
        ("WanTransformer3DModel", {"hidden_states": torch.zeros(2, 3, 1, 2, 2)}),
    ):
        model: Any = longspan.parallelize(make_model(name), sp)
        with pytest.raises(LongspanError, match=r"`hidden_states` has 1 tokens, fewer than the 2 ranks"):
            model(**make_inputs(name) | (changes if sp.data_rank else {}))
    model = longspan.parallelize(make_model("LTXVideoTransformer3DModel"), sp)
    with pytest.raises(LongspanError, match="the rotary embedding has 16 tokens, `hidden_states`"):
        model(**make_inputs("LTXVideoTransformer3DModel") | ({"height": 4, "width": 4} if sp.data_rank else {}))


@on_ranks(2)
def test_refused_calls() -> None:
    sp, video = sharding(), torch.zeros(2, 3, 5, 6, 10, dtype=torch.float64)
    wan: Any = longspan.parallelize(make_model("WanTransformer3DModel"), sp, fsdp=False)
    inputs = make_inputs("WanTransformer3DModel")
    with pytest.raises(LongspanError, match=r"`attention_kwargs` may hold a LoRA `scale` alone, got \['mask'\]"):
        wan(**inputs, attention_kwargs={"mask": video})
    flux: Any = longspan.parallelize(make_model("FluxTransformer2DModel"), sp)
    inputs = make_inputs("FluxTransformer2DModel")
    with pytest.raises(LongspanError, match="`controlnet_block_samples` is not supported for FluxTransformer2DModel"):
        flux(**inputs, controlnet_block_samples=[video])
    with pytest.raises(LongspanError, match="`img_ids` has 14 tokens, `hidden_states` 15"):
        flux(**{**inputs, "img_ids": inputs["img_ids"][1:]})
    with pytest.raises(LongspanError, match="`hidden_states` has 1 tokens, fewer than the 2 ranks"):
        flux(**{**inputs, "hidden_states": inputs["hidden_states"][:, :1], "img_ids": torch.zeros(1, 3)})
    ltx: Any = longspan.parallelize(make_model("LTXVideoTransformer3DModel"), sp, fsdp=False)
    inputs = make_inputs("LTXVideoTransformer3DModel")
    with pytest.raises(LongspanError, match="the rotary embedding has 16 tokens, `hidden_states` 15; give one entry"):
        ltx(**inputs | {"height": 4, "width": 4})
    with pytest.raises(LongspanError, match="`timestep` has 2 tokens, `hidden_states` 15; give one entry per token"):
        ltx(**inputs | {"timestep": torch.tensor([[3, 700], [4, 5]])})


def test_a_size_that_the_patch_size_does_not_divide_is_refused() -> None:
    """On one rank as on several, and before any collective."""
    for name, config, shape, dim in (
        ("LatteTransformer3DModel", {}, (2, 3, 5, 8, 7), 4),
        ("WanTransformer3DModel", {"patch_size": (2, 2, 2)}, (2, 3, 5, 6, 10), 2),
        ("CogVideoXTransformer3DModel", {"patch_size_t": 2, "sample_frames": 13}, (2, 3, 3, 6, 10), 1),
        ("HunyuanVideoTransformer3DModel", {"patch_size_t": 2}, (2, 3, 5, 6, 10), 2),
    ):
        model: Any = longspan.parallelize(make_model(name, **config), sharding(ulysses=1))
        inputs = {**make_inputs(name), "hidden_states": torch.zeros(shape, dtype=torch.float64)}
        with pytest.raises(
            LongspanError, match=rf"dimension {dim} has {shape[dim]} entries, which the patch size 2 doe"
        ):
            model(**inputs)


@pytest.mark.parametrize("before", [True, False])
@on_ranks(2)
def test_caches_of_diffusers_are_refused(before: bool) -> None:
    """Enabled on the model, or applied to it directly; before or after `parallelize`."""
    from diffusers import FasterCacheConfig, FirstBlockCacheConfig, PyramidAttentionBroadcastConfig
    from diffusers.hooks import apply_faster_cache, apply_first_block_cache, apply_pyramid_attention_broadcast

    time = {"current_timestep_callback": lambda: 500}
    faster = FasterCacheConfig(**time, is_guidance_distilled=True)
    caches = {
        "WanTransformer3DModel has diffusers' FasterCacheDenoiserHook": lambda m: apply_faster_cache(m, faster),
        "blocks.0 has diffusers' FBCHeadBlockHook": lambda m: apply_first_block_cache(m, FirstBlockCacheConfig()),
        "blocks.0 has diffusers' FBCHead.*remove it": lambda m: m.enable_cache(FirstBlockCacheConfig()),
        "blocks.0.attn1 has diffusers' PyramidAttentionBroadcastHook": lambda m: apply_pyramid_attention_broadcast(
            m, PyramidAttentionBroadcastConfig(**time, spatial_attention_block_identifiers=("blocks.*attn1",))
        ),
    }
    for message, apply in caches.items():
        model: Any = make_model("WanTransformer3DModel")
        if before:
            apply(model)
            with pytest.raises(LongspanError, match=message):
                longspan.parallelize(model, sharding(), fsdp=False)
            continue
        model = longspan.parallelize(model, sharding(), fsdp=False)
        apply(model)
        with pytest.raises(LongspanError, match=message):
            model(**make_inputs("WanTransformer3DModel"))


@on_ranks(2)
def test_weights_may_be_stored_in_another_dtype() -> None:
    outputs = []
    inputs = {
        k: x.detach().float() if x.is_floating_point() else x for k, x in make_inputs("WanTransformer3DModel").items()
    }
    for sharded in (False, True):
        model: Any = make_model("WanTransformer3DModel").float()
        model = longspan.parallelize(model, sharding(), fsdp=False) if sharded else model
        model.enable_layerwise_casting(storage_dtype=torch.bfloat16, compute_dtype=torch.float32)
        outputs.append(model(**inputs).sample)
    torch.testing.assert_close(outputs[1], outputs[0])


@on_ranks(2)
def test_an_attention_changed_after_parallelize_is_refused() -> None:
    model: Any = longspan.parallelize(make_model("WanTransformer3DModel"), sharding(), fsdp=False)
    inputs, attention = make_inputs("WanTransformer3DModel"), model.blocks[0].attn1
    for module in (attention, model.blocks[1].attn2):
        before, module.processor = module.processor, _Mean()
        with pytest.raises(
            LongspanError, match=r"blocks.[01].attn[12].processor is _Mean, which longspan does not know there"
        ):
            model(**inputs)
        module.processor = before


@on_ranks(2)
def test_refused_models() -> None:
    from diffusers import PriorTransformer
    from diffusers.models.attention_processor import AttnProcessor

    sp = sharding()
    with pytest.raises(LongspanError, match="PriorTransformer of diffusers cannot be sharded: .*no rule for its argu"):
        longspan.parallelize(PriorTransformer(2, 8, num_layers=1, embedding_dim=8, num_embeddings=3), sp)
    model: Any = make_model("CogVideoXTransformer3DModel")
    model.transformer_blocks[1].attn1.processor = AttnProcessor()
    with pytest.raises(
        LongspanError, match=r"transformer_blocks.1.attn1.processor is AttnProcessor, which longspan does"
    ):
        longspan.parallelize(model, sp)
    with pytest.raises(LongspanError, match="transformer_blocks.0.attn1 has 1 heads, which 2 ranks cannot share"):
        longspan.parallelize(make_model("CogVideoXTransformer3DModel", num_attention_heads=1), sp)
    with pytest.raises(LongspanError, match="HunyuanVideoTransformer3DModel of diffusers cannot be sharded: "):
        longspan.parallelize(make_model("HunyuanVideoTransformer3DModel", image_condition_type="token_replace"), sp)
    with pytest.raises(LongspanError, match="`memory` is an option of language models"):
        longspan.parallelize(make_model("WanTransformer3DModel"), sp, memory="longest")
    with pytest.raises(LongspanError, match="gather_output=False is an option of diffusion transformers"):
        longspan.parallelize(build("Llama"), sp, gather_output=False)
    with pytest.raises(LongspanError, match="diffusion transformers have no tensor axis, got tensor=2"):
        longspan.parallelize(make_model("WanTransformer3DModel"), sharding(tensor=2))
    with pytest.raises(LongspanError, match="has dropout, which would depend on the number of ranks"):
        longspan.parallelize(make_model("CogVideoXTransformer3DModel", dropout=0.1), sp)
    model = longspan.parallelize(make_model("WanTransformer3DModel"), sp)
    with pytest.raises(LongspanError, match="is parallelized already"):
        longspan.parallelize(model, sp)
    with pytest.raises(LongspanError, match=r"copy.deepcopy of a parallelized model would share"):
        copy.deepcopy(model)


@on_ranks(2)
def test_sharded_weights_are_gathered_to_save_them() -> None:
    model: Any = longspan.parallelize(make_model("WanTransformer3DModel"), sharding())
    with pytest.raises(LongspanError, match="save_pretrained cannot save shards"):
        model.save_pretrained("anywhere")
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    plain = make_model("WanTransformer3DModel").state_dict()
    if dist.get_rank() == 0:
        assert weights.keys() == plain.keys() and all(torch.equal(weights[name], plain[name]) for name in plain)
    assert longspan.explain(model) == "mesh: data=1 ring=1 ulysses=2\nattention between ranks: in 2 layers"
    with pytest.raises(LongspanError, match="WanTransformer3DModel is a diffusion transformer; this is for language"):
        longspan.find_nonfinite(model, make_inputs("WanTransformer3DModel"))


@on_ranks(2)
def test_an_attention_by_another_function_raises() -> None:
    model: Any = longspan.parallelize(make_model("WanTransformer3DModel"), sharding(), fsdp=False)
    dispatch = "diffusers.models.transformers.transformer_wan.dispatch_attention_fn"
    with (
        mock.patch(dispatch, lambda query, key, value, **kwargs: value),
        pytest.raises(LongspanError, match=r"blocks.0.attn1 called scaled_dot_product_attention 0 times, not 1,"),
    ):
        model(**make_inputs("WanTransformer3DModel"))


class _Mean:
    def __call__(self, attn: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states.mean(1, keepdim=True).expand_as(hidden_states)
