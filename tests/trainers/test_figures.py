"""The figures of a step: tokens, FLOPs, a device's peak, and the share of communication."""

from __future__ import annotations

import time

import pytest
import torch

from longspan.comm.collectives import ring_shift
from longspan.hf.model.support import layers_without_backward
from longspan.plan.from_model import shape_of
from longspan.trainers.figures import CommunicationSampler, count_tokens, model_flops, peak_flops
from tests.models import build
from tests.pool import RankPool


def _shares_with_a_late_rank() -> list[float | None]:
    """Rank 1 is late for a collective, and for a ring's messages."""
    sampler, shares, x = CommunicationSampler(torch.device("cpu")), [], torch.ones(1)
    for communicate in (torch.distributed.all_reduce, lambda x: ring_shift(x, torch.distributed.group.WORLD)):
        communicate(x)
        torch.distributed.all_reduce(x)
        with sampler.measure():
            time.sleep(0.1 + 0.3 * torch.distributed.get_rank())
            communicate(x)
            time.sleep(0.1)
        shares.append(sampler.share)
    return shares


def test_communication_is_the_time_in_flight(pool2: RankPool) -> None:
    for waiting, late in zip(*pool2.run(_shares_with_a_late_rank), strict=True):
        assert 0 < late < waiting < 1


def test_without_collectives_the_share_is_zero() -> None:
    sampler = CommunicationSampler(torch.device("cpu"))
    assert sampler.share is None
    with sampler.measure():
        torch.ones(10).sum()
    assert sampler.share == 0


def _llama(**changes: object) -> tuple[torch.nn.Module, object]:
    from transformers import AutoModelForCausalLM, LlamaConfig

    shape = dict(vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4)
    config = LlamaConfig(**{**shape, "num_key_value_heads": 2, **changes})  # type: ignore[arg-type]
    return AutoModelForCausalLM.from_config(config), config


def test_flops_are_those_of_the_matrices_and_the_pairs() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    model, config = _llama(attn_implementation="eager")
    ids = torch.zeros(1, 32, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    # The counter sees every pair of the eager attention, also those that the mask hides; and no rotary embedding.
    rotary = 2 * (16 // 4 // 2) * 32
    hidden = 2 * 12 * 16 * (32 * 31 // 2)  # two layers
    assert model_flops(shape_of(config), tokens=32, attention_pairs=32 * 33 // 2) + hidden == pytest.approx(
        counter.get_total_flops() - rotary, rel=0.02
    )


def test_layers_without_a_backward() -> None:
    """Those in front of everything that is trained."""
    model = build("Llama", num_hidden_layers=3, tie_word_embeddings=False)
    assert layers_without_backward(model) == 0
    model.model.layers[:2].requires_grad_(False)
    assert layers_without_backward(model) == 0
    model.get_input_embeddings().requires_grad_(False)
    assert layers_without_backward(model) == 2
    model.lm_head.weight = model.get_input_embeddings().weight.requires_grad_(True)
    assert layers_without_backward(model) == 0


def test_flops_of_experts_windows_recurrences_frozen_weights_and_a_reference() -> None:
    from transformers import MixtralConfig, Qwen3NextConfig

    sizes = dict(vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4)
    mixture = dict(sizes, num_key_value_heads=4, num_local_experts=8, num_experts_per_tok=2, sliding_window=5)
    shape = shape_of(MixtralConfig(**mixture))  # type: ignore[arg-type]
    weights = 50 * 16 + 2 * (4 * 16 * 16 + 16 * 8 + 2 * 3 * 16 * 24)  # the head, attention, router, 2 experts
    pairs = 2 * 2 * 2 * 16 * (5 * 6 / 2 + 27 * 5)  # two layers; scores and values
    assert model_flops(shape, 32, 32 * 33 // 2) == 6 * 32 * weights + 3 * pairs
    assert model_flops(shape, 32, 32 * 33 // 2, trained=0.0, forwards=2) == 6 * 32 * weights + 4 * pairs
    assert model_flops(shape, 32, 32 * 33 // 2, backwards=0) == 2 * 32 * weights + pairs  # a teacher
    frozen = 2 * 32 * (4 * 16 * 16 + 16 * 8 + 2 * 3 * 16 * 24) + 2 * pairs / 2  # no backward of the first layer
    assert model_flops(shape, 32, 32 * 33 // 2, frozen=1) == 6 * 32 * weights + 3 * pairs - frozen
    recurrent = shape_of(Qwen3NextConfig(**sizes, layer_types=["linear_attention", "full_attention"]))  # type: ignore[arg-type]
    assert model_flops(recurrent, 64, 64) > 6 * 64 * sum(layer.matmul_params_active for layer in recurrent.layers)


def test_tokens_and_pairs_are_counted_without_padding_and_within_documents() -> None:
    ids = torch.zeros(2, 6, dtype=torch.int64)
    padded = torch.tensor([[1, 1, 1, 0, 0, 0], [1] * 6])
    assert count_tokens({"input_ids": ids, "attention_mask": padded}).tolist() == [9, 6 + 21]
    packed = torch.tensor([[0, 1, 2, 0, 1, 0]])
    assert count_tokens({"input_ids": ids[:1], "position_ids": packed}).tolist() == [6, 6 + 3 + 1]
    ids, of_pair = ids[:1], {"chosen_input_ids": ids, "rejected_input_ids": ids}
    of_pair |= {"chosen_attention_mask": padded[:1], "rejected_attention_mask": padded[1:]}
    generated = {"prompt_ids": ids, "prompt_mask": padded[:1], "completion_ids": ids, "completion_mask": padded[1:]}
    assert count_tokens(of_pair).tolist() == [9, 6 + 21]
    assert count_tokens(generated).tolist() == [9, 45]
    assert count_tokens({"inputs_embeds": torch.zeros(1, 4, 8)}).tolist() == [4, 10]


def test_a_peak_is_that_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, found = torch.device("cuda"), []
    for name in ("NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA A100-SXM4-80GB", "Tesla T4"):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
        found.append(peak_flops(gpu, torch.bfloat16))
    assert found == [989.5e12, 989.5e12, None, 312e12, None]
    assert peak_flops(gpu, torch.float32) is None
