"""A model's training step on the device: its peak memory against the plan, and its time."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import torch

import longspan
from benchmarks.gpu.setup import BELOW, FAILED, MEASURED, OK, SKIPPED, STOPPED, Row, Setup, brief, needs_cuda
from longspan.core.memory import Memory
from longspan.plan import Job, Mesh, cost, read_hardware
from longspan.plan.models.read import shape_from_config
from tests.fakes import fake_world

LLAMA: dict[str, Any] = {
    "hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 8,
    "num_hidden_layers": 4, "vocab_size": 32000, "max_position_embeddings": 1 << 22,
}  # fmt: skip
LONG = {**LLAMA, "hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 8, "num_hidden_layers": 2}
LONG |= {"vocab_size": 8192}
"""Small enough for two million tokens in half a minute."""

TINY = {**LLAMA, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "num_hidden_layers": 2}
TINY |= {"vocab_size": 256}


class Trainer:
    """A Llama with random weights and its training step in bf16; with FSDP, weights are fp32."""

    def __init__(self, setup: Setup, config: dict[str, Any], sp: longspan.SequenceSharding, fsdp: bool) -> None:
        import transformers
        from torch.distributed.fsdp import MixedPrecisionPolicy

        self.setup, self.vocabulary = setup, config["vocab_size"]
        torch.manual_seed(0)
        with torch.device(setup.device):
            made = transformers.LlamaConfig(**config)
            model = transformers.AutoModelForCausalLM.from_config(made, dtype=torch.float32 if fsdp else torch.bfloat16)
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if fsdp else None
        self.model = longspan.parallelize(model, sp, fsdp=fsdp, mp_policy=policy)
        self.model.train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def step(self, context: int) -> None:
        tokens = torch.randint(0, self.vocabulary, (1, context), device=self.setup.device)
        self.model(input_ids=tokens, labels=tokens).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def memory(setup: Setup) -> Iterator[Row]:
    """Peak of rank 0 in a fake world of 8 (nothing is sent), against `longspan plan`."""
    line = needs_cuda(setup, "peak memory of rank 0 of 8")
    if line is not None:
        yield line
        return
    capacity = torch.cuda.get_device_properties(0).total_memory
    for axes in ({"ulysses": 8}, {"ring": 8}, {"ring": 2, "ulysses": 4}):
        for local in (32768, 65536, 131072, 262144):
            context = 8 * local
            what = f"{local:,} tokens a rank, {' x '.join(f'{axis} {size}' for axis, size in axes.items())}"
            planned = planned_bytes(axes, context)
            # Per rank and layer: 4 D H S^2 / 2 / 8 in the forward, the same recomputed, 2.5 times that in the backward.
            seconds = 4.5 * LONG["num_hidden_layers"] * 4 * LONG["hidden_size"] * context**2 / 2 / 8 / 3e14
            if planned > 0.9 * capacity:
                yield Row(what, f"{planned / 2**30:.1f} GiB planned", f"{SKIPPED}: more than the device has")
            elif not setup.time_left(seconds + 5):
                yield Row(what, f"about {seconds:.0f} s", f"{STOPPED}: the item's time was up")
            else:
                try:
                    yield _memory_of(setup, what, axes, context, planned)
                except Exception as error:
                    yield Row(what, brief(error), FAILED)


def planned_bytes(axes: dict[str, int], context: int) -> float:
    """Return the planned bytes of a step of this item, without the reserve."""
    job = Job(context=context, dtype="bf16", memory=Memory(checkpointing="full"), ring_impl="p2p")
    shape = shape_from_config({"model_type": "llama", **LONG}, "benchmark")
    plan = cost(shape, job, Mesh(**axes), read_hardware("h100"))
    return plan.memory_total_bytes - plan.memory_bytes.get("reserve", 0)


def _memory_of(setup: Setup, what: str, axes: dict[str, int], context: int, planned: float) -> Row:
    with fake_world(0, 8):
        sp = longspan.SequenceSharding(longspan.init_mesh(**axes), ring_impl="p2p")
        trainer = Trainer(setup, LONG, sp, fsdp=True)
        trainer.model.gradient_checkpointing_enable()
        trainer.step(1024)  # allocates the optimizer's state
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        trainer.step(context)
        setup.wait()
        peak = torch.cuda.max_memory_allocated()
        del trainer
    gc.collect()
    torch.cuda.empty_cache()
    ratio = planned / peak
    figure = f"{peak / 2**30:.2f} GiB, planned {planned / 2**30:.2f}: {ratio:.3f} (goal 0.9 to 1.1)"
    return Row(what, figure, OK if 0.9 <= ratio <= 1.1 else BELOW, ratio)


def step_time(setup: Setup) -> Iterator[Row]:
    """A training step with and without activation checkpointing, which recomputes a third: at most 1.4 of the time."""
    config, context = (TINY, 256) if setup.quick else (LLAMA, 16384)
    seconds: dict[bool, float] = {}
    for again in (False, True):
        trainer = Trainer(setup, config, setup.one_device(), fsdp=False)
        if again:
            trainer.model.gradient_checkpointing_enable()
        seconds[again] = setup.seconds(lambda trainer=trainer: trainer.step(context), 3, 2.0)
        del trainer
        gc.collect()
        name = "with" if again else "without"
        figure = f"{seconds[again] * 1e3:.1f} ms, {context / seconds[again]:,.0f} tokens/s"
        yield Row(f"a step of {context:,} tokens {name} checkpointing", figure, MEASURED, seconds[again])
    ratio = seconds[True] / seconds[False]
    verdict = MEASURED if not setup.on_gpu else OK if ratio <= 1.4 else BELOW
    yield Row("with over without", f"{ratio:.3f} (goal 1.4)", verdict, ratio)
