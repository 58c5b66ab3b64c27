"""The metrics of a step, and their outputs."""

from __future__ import annotations

import io
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longspan.comm.collectives import ring_shift
from longspan.hf.planning import shape_of
from longspan.hf.support import layers_without_backward
from longspan.train.metrics import (
    CommunicationSampler,
    Display,
    StepMetrics,
    covered,
    model_flops,
    peak_flops,
    peak_memory,
)
from longspan.train.trackers import MetricsLog
from tests.models import build
from tests.pool import RankPool
from tests.training import log_of, said_by, small_run, write_config


def _metrics(step: int, **changes: object) -> StepMetrics:
    values = dict(loss=2.5, grad_norm=0.5, lr=1e-3, tokens=100 * step, tokens_per_s=1234.5, step_s=2.0)
    values |= dict(communication=0.25, peak_memory_gib=1.5, mfu=None)
    return StepMetrics(step=step, **{**values, **changes})  # type: ignore[arg-type]


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


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10))))
def test_covered_is_the_length_of_the_union(spans: list[tuple[int, int]]) -> None:
    cells = {cell for start, length in spans for cell in range(start, start + length)}
    assert covered((start, start + length) for start, length in spans) == len(cells)


def _llama(**changes: object) -> tuple[torch.nn.Module, object]:
    from transformers import AutoModelForCausalLM, LlamaConfig

    shape = dict(vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4)
    config = LlamaConfig(**{**shape, "num_key_value_heads": 2, **changes})  # type: ignore[arg-type]
    return AutoModelForCausalLM.from_config(config), config


@pytest.mark.parametrize("tied", [False, True])
def test_flops_are_those_of_the_matrices_and_the_pairs(tied: bool) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    model, config = _llama(tie_word_embeddings=tied, attn_implementation="eager")
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
    frozen = 2 * 32 * (4 * 16 * 16 + 16 * 8 + 2 * 3 * 16 * 24) + 2 * pairs / 2  # no backward of the first layer
    assert model_flops(shape, 32, 32 * 33 // 2, frozen=1) == 6 * 32 * weights + 3 * pairs - frozen
    recurrent = shape_of(Qwen3NextConfig(**sizes, layer_types=["linear_attention", "full_attention"]))  # type: ignore[arg-type]
    assert model_flops(recurrent, 64, 64) > 6 * 64 * sum(layer.matmul_params_active for layer in recurrent.layers)


def test_the_peak_of_an_unknown_device_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    assert peak_flops(torch.device("cpu"), "bf16") is None
    for name, peak in {"NVIDIA H200": 989e12, "NVIDIA H20": 148e12, "NVIDIA L4": 121e12, "NVIDIA L40S": 362e12}.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
        assert peak_flops(torch.device("cuda"), "bf16") == peak
        assert peak_flops(torch.device("cuda"), "fp32") is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Some other one")
    assert peak_flops(torch.device("cuda"), "bf16") is None


def test_peak_memory_is_that_of_the_process() -> None:
    before, reserved, ratio = peak_memory(torch.device("cpu"))
    assert 0.05 < before < 64 and reserved == ratio == 0
    block = torch.ones(1 << 28)  # 1 GiB
    assert peak_memory(torch.device("cpu"))[0] >= max(before, 1.0)
    del block


def test_the_log_is_jsonl_and_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = MetricsLog(tmp_path)
    log.write(_metrics(1, loss=2 / 3))
    log.write(_metrics(2, communication=None))
    log.close()
    records = log_of(tmp_path)
    assert [record["step"] for record in records] == [1, 2]
    assert records[0]["loss"] == 2 / 3
    assert records[1]["communication"] is None
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [event.step for event in board.Scalars("train/loss")] == [1, 2]
    assert [event.step for event in board.Scalars("train/communication")] == [1]


def test_a_resumed_log_drops_what_came_after(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    for step in (1, 2, 3):
        log.write(_metrics(step))
    log.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "cut sh')  # a line that a killed run did not finish
    log = MetricsLog(tmp_path, resumed_step=2)
    log.write(_metrics(3, loss=9.0))
    log.close()
    records = log_of(tmp_path)
    assert [(record["step"], record["loss"]) for record in records] == [(1, 2.5), (2, 2.5), (3, 9.0)]


def test_a_line_has_the_known_metrics() -> None:
    line = _metrics(10).line(steps=100)
    for part in ("step 10/100", "loss 2.5000", "1,234 tokens/s", "comm 25%", "mem 1.50 GiB", "ETA 0:03:00"):
        assert part in line
    assert "MFU" not in line
    assert "MFU 41.2%" in _metrics(10, mfu=0.412).line(100)
    assert "comm" not in _metrics(10, communication=None).line(100)
    assert "mem 1.50 GiB  reserved 1.80  x1.20" in _metrics(1, peak_reserved_gib=1.8, reserved_ratio=1.2).line(2)


def test_the_display_is_lines_a_bar_or_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def shown(**options: Any) -> str:
        out = io.StringIO()
        with redirect_stdout(out):
            display = Display(steps=4, **options)
            with display.live(1):
                display.step(1, None)
                display.step(2, _metrics(2))
            display.log("done")
        return out.getvalue()

    lines = shown().splitlines()
    assert len(lines) == 2 and lines[0].startswith("step 2/4") and lines[1] == "done"
    assert shown(enabled=False) == ""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "160")
    text = shown()
    assert "step 2/4" in text and "m2/4" in text and "loss 2.5000" in text and text.endswith("done\n")


def test_a_run_prints_and_logs_speed_utilisation_and_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The share of communication is None on one process."""
    monkeypatch.setattr("longspan.train.loop.peak_flops", lambda *_: 1e12)
    config = small_run(write_config(tmp_path), tmp_path / "run", steps=1, export="never")
    line = next(line for line in said_by(config).splitlines() if line.startswith("step 1/1"))
    (record,) = log_of(config.out)
    assert 0 < record["mfu"] < 1 and f"MFU {record['mfu']:.1%}" in line
    assert f"{record['tokens_per_s']:,.0f} tokens/s  mem {record['peak_memory_gib']:.2f} GiB" in line
