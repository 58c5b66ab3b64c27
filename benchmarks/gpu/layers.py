"""What layers cost on one GPU: recurrent ones, experts, trees, adapters, vision, video; where a step's time goes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import longspan
from benchmarks.gpu.setup import BELOW, MEASURED, OK, SKIPPED, Row, Setup, written
from benchmarks.gpu.steps import BF16, FULL, WIDE, Step, device_hardware, fake_step, first_rank, measure, trained
from longspan.core.memory import FASTEST, Memory
from longspan.diffusion import check
from longspan.diffusion.small import Draw, make_inputs
from longspan.hf.state import state_of
from longspan.plan import Job, longest_context
from longspan.plan.from_model import shape_from_config
from longspan.plan.names import find_config
from longspan.plan.shape import Tuning
from tests.diffusion.diffusing import make_model
from tests.fakes import fake_world
from tests.hf import pictures
from tests.models import build

RANKS = 8


def _seconds(setup: Setup, run: Callable[[], object]) -> tuple[str, str, float]:
    seconds = setup.seconds(run)
    return f"{1e3 * seconds:.2f} ms", MEASURED, seconds


def _backward(out: Tensor) -> None:
    out.float().square().mean().backward()


# --- recurrent layers

# Arguments of `linear_attention`: whether there is a decay per head, one per key dim, and the delta rule.
KINDS = {
    "linear attention": (False, False, False),
    "decay per head": (True, False, False),
    "decay per key dim (GLA)": (True, True, False),
    "delta rule": (False, False, True),
    "gated delta rule": (True, False, True),
    "KDA": (True, True, True),
}
MODELS: dict[str, dict[str, Any]] = {
    "Mamba2": {"hidden_size": 1024, "num_heads": 32, "head_dim": 64, "state_size": 128, "chunk_size": 256},
    "Mamba": {"hidden_size": 1024, "state_size": 16},
    "Lfm2": {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8},
}
LONG = {"max_position_embeddings": 1 << 20}


def mixers(setup: Setup) -> Iterator[Row]:
    """Forward and backward of recurrent layers on the last rank of 8, which receives the states of seven; nothing is
    sent. Each kind of linear attention runs in plain torch and by flash-linear-attention; small models of Mamba and of
    short convolutions run as transformers chooses."""
    missing = None if importlib.util.find_spec("fla") else "flash-linear-attention is not installed"
    missing = missing if setup.on_gpu else "flash-linear-attention needs a GPU"
    for name, around in (("plain torch", _without_fla), ("flash-linear-attention", contextlib.nullcontext)):
        for what, kind in KINDS.items():
            measured = functools.partial(_last_rank, setup, functools.partial(_linear_attention, setup, *kind), around)
            if missing is None or around is _without_fla:
                yield setup.row(f"{what}, {name}", measured, 3.0)
            else:
                yield Row(f"{what}, {name}", "", f"{SKIPPED}: {missing}")
    for family, changes in MODELS.items():
        model = functools.partial(_recurrent_model, setup, family, setup.size(changes, {}))
        yield setup.row(f"a model of {family}", functools.partial(_last_rank, setup, model), 5.0)


@contextlib.contextmanager
def _without_fla() -> Iterator[None]:
    """Let imports of flash-linear-attention fail."""
    imported = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "fla"}
    sys.modules.update({"fla": None} | dict.fromkeys(imported))  # type: ignore[arg-type]
    try:
        yield
    finally:
        del sys.modules["fla"]
        sys.modules.update(imported)


def _last_rank(
    setup: Setup, make: Callable[..., Callable[[], object]], around: Callable[[], Any] = contextlib.nullcontext
) -> tuple[str, str, float]:
    """Time what `make` returns on the last rank of a ring."""
    with fake_world(RANKS - 1, RANKS), around():
        sp = longspan.SequenceSharding(longspan.init_mesh(ring=RANKS, device_type=setup.device))
        return _seconds(setup, make(sp))


def _linear_attention(
    setup: Setup, decays: bool, per_key: bool, delta: bool, sp: longspan.SequenceSharding
) -> Callable[[], object]:
    n, heads, dim = setup.size((16384, 16, 128), (64, 2, 8))
    options: dict[str, Any] = {"device": setup.device, "dtype": BF16 if setup.on_gpu else None}
    q, k, v = (torch.randn(1, n, heads, dim, **options).requires_grad_() for _ in range(3))
    more: dict[str, Tensor] = {}
    if decays:
        more["decay"] = -torch.rand(1, n, heads, *[dim][:per_key], **options) / 10
    if delta:
        more["beta"] = torch.rand(1, n, heads, **options)

    def run() -> None:
        keys = torch.nn.functional.normalize(k, dim=-1)
        _backward(longspan.linear_attention(q, keys, v, sp=sp, length=RANKS * n, **more))

    return run


def _recurrent_model(
    setup: Setup, family: str, changes: dict[str, Any], sp: longspan.SequenceSharding
) -> Callable[[], object]:
    model = build(family, **changes, **(LONG if family == "Lfm2" else {})).to(
        setup.device, BF16 if setup.on_gpu else None
    )
    model = longspan.parallelize(model, sp, fsdp=False, check_batches=0).train()
    ids = torch.randint(61, (1, RANKS * setup.size(16384, 32)), device=setup.device)
    return lambda: model(input_ids=ids, labels=ids).loss.backward()


# --- host waits


def waits(setup: Setup) -> Iterator[Row]:
    """A training step of a vision-language model and of a video transformer on the first rank of 4, after four steps:
    its time, how often the host waited for the GPU, and where."""
    for what, make in {"Qwen3-VL, images and video": _vision, "Wan, a video": _video}.items():

        def run(make: Callable[..., Callable[[], object]] = make) -> tuple[str, str, list[str]]:
            with fake_world(0, 4):
                step = make(setup, longspan.SequenceSharding(longspan.init_mesh(ulysses=4, device_type=setup.device)))
                for _ in range(4):  # in the first three, the ranks' batches are compared
                    step()
                with setup.waits() as found:
                    step()
                seconds = setup.seconds(step)
            places = ", ".join(dict.fromkeys(found))
            verdict = MEASURED if not setup.on_gpu else BELOW if found else OK
            return f"{1e3 * seconds:.2f} ms, {len(found)} waits {places}", verdict, found

        yield setup.row(what, run, 5.0)


def _vision(setup: Setup, sp: longspan.SequenceSharding) -> Callable[[], object]:
    text = pictures.FAMILIES["Qwen3VL"]["text_config"] | LONG
    model = pictures.build("Qwen3VL", text_config=text).to(setup.device)
    model = longspan.parallelize(model, sp, fsdp=False).train()
    side, parts = setup.size(32, 4), list[pictures.Part]()
    for _ in range(8):  # all over the sequence
        parts += [3, ("image", 1, side, side), 3, ("video", 2, side, side)]
    batch = {name: x.to(setup.device) for name, x in pictures.batch("Qwen3VL", (tuple(parts),)).items()}
    return lambda: model(**batch).loss.backward()


def _video(setup: Setup, sp: longspan.SequenceSharding) -> Callable[[], object]:
    name, dtype = "WanTransformer3DModel", BF16 if setup.on_gpu else torch.float32
    changes: dict[str, Any] = setup.size({"num_attention_heads": 16, "attention_head_dim": 128, "ffn_dim": 8192}, {})
    with mock.patch.object(check, "_difference", return_value=""):  # ranks that do not exist send nothing to compare
        model = longspan.parallelize(make_model(name, **changes).to(setup.device, dtype), sp, fsdp=False)
    generator, grid = torch.Generator().manual_seed(0), setup.size((8, 30, 52), (5, 3, 5))
    text, device = setup.size(512, 7), torch.device(setup.device)
    inputs = make_inputs(type(model), Draw(model.config, 1, grid, text, generator, device, dtype, "BCFHW"))
    return lambda: _backward(model(**inputs, return_dict=False)[0])


# --- experts, trees, adapters


def experts(setup: Setup) -> Iterator[Row]:
    """A training step of a mixture of 64 experts on one device, by one product per expert and by grouped products."""
    changes: dict[str, Any] = {
        "hidden_size": 1024, "num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 512, "head_dim": 64,
        "num_attention_heads": 16,
    }  # fmt: skip
    ids = torch.randint(61, (1, setup.size(16384, 64)), device=setup.device)
    for name, tiled in (("eager", False), ("grouped_mm", False), ("grouped_mm", True)):

        def run(name: str = name, tiled: bool = tiled) -> tuple[str, str, float]:
            model = build("Qwen3Moe", **setup.size(changes, {})).to(setup.device, BF16)
            model.set_experts_implementation(name)
            options: dict[str, Any] = {"fsdp": False, "memory": Memory(tiled=tiled)}
            model = longspan.parallelize(model, setup.one_device(), **options).train()

            def step() -> None:
                model(input_ids=ids, labels=ids).loss.backward()

            figure, verdict, seconds = _seconds(setup, step)
            with setup.waits() as found:
                step()
            return f"{figure}, {len(found)} waits", verdict, seconds

        yield setup.row(f"experts by {name}{', tiled' if tiled else ''}", run, 5.0)


def trees(setup: Setup) -> Iterator[Row]:
    """One prompt with 8 completions as a tree: log-probabilities, and on a GPU a training step (FlexAttention has no
    backward without one), by kernels that compute trees."""
    prompt, completion = setup.size((8192, 1024), (48, 8))
    tokens = torch.randint(3, 61, (prompt + 8 * completion,), generator=torch.Generator().manual_seed(0)).tolist()
    completions = [tokens[prompt + i * completion :][:completion] for i in range(8)]
    batch = {name: x.to(setup.device) for name, x in longspan.pack_tree([tokens[:prompt]] * 8, completions).items()}
    for kernel in ("auto", "flex"):

        def run(kernel: str = kernel) -> tuple[str, str, float]:
            sizes = setup.size({"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 4}, {})
            model = build("Llama", **sizes, **LONG).to(setup.device, BF16)
            options: dict[str, Any] = {"fsdp": False, "kernel": kernel}
            model = longspan.parallelize(model, setup.one_device(), **options).train(setup.on_gpu)
            if setup.on_gpu:
                return _seconds(setup, lambda: model(**batch).loss.backward())
            with torch.no_grad():
                return _seconds(setup, lambda: model(**batch))

        yield setup.row(f"{batch['input_ids'].numel():,} tokens, kernel={kernel!r}", run, 20.0)


def adapters(setup: Setup) -> Iterator[Row]:
    """LoRA and QLoRA (4-bit weights, bitsandbytes) on one device, against the plan."""
    full, small = {"num_hidden_layers": 8, "num_attention_heads": 16}, {"hidden_size": 128, "vocab_size": 512}
    for what, quantize in (("LoRA", False), ("QLoRA", True)):
        tuning = Tuning(lora=16, quantize=quantize)
        step = Step({**WIDE, **setup.size(full, small)}, {}, setup.size(16384, 256), FULL, tuning=tuning)
        yield from fake_step(setup, what, step)


# --- memory="auto"


def auto(setup: Setup) -> Iterator[Row]:
    """`memory="auto"` while half of the GPU's memory is taken: a step that without memory options needs 0.8 of it."""
    config = {**WIDE, **setup.size({"num_hidden_layers": 32}, {"hidden_size": 128, "intermediate_size": 352})}
    shape, hardware = shape_from_config(config, "benchmark"), device_hardware(setup)
    most = dataclasses.replace(hardware, memory_bytes=0.8 * hardware.memory_bytes)
    context = min(longest_context(shape, Job(1, memory=FASTEST), most), setup.size(1 << 18, 512))

    def run() -> tuple[str, str, float]:
        free = torch.cuda.mem_get_info()[1] // 2 if setup.on_gpu else 0
        taken = torch.empty(free, dtype=torch.uint8, device=setup.device)
        with fake_world(0, 1):
            model = Step(config, {}, context).build(torch.device(setup.device))
            model = longspan.parallelize(model, setup.one_device(), memory="auto").train()
            ids = torch.zeros(1, context, dtype=torch.int64, device=setup.device)
            with torch.autocast(setup.device, BF16):
                model(input_ids=ids, labels=ids).loss.backward()
        peak = torch.cuda.max_memory_allocated() - taken.nbytes if setup.on_gpu else 0
        chosen = state_of(model).memory.options.describe()
        return f"{chosen}; peak {peak / 2**30:.1f} of {free / 2**30:.1f} GiB", OK, peak

    yield setup.row(f"{context:,} tokens", run, 10.0)


# --- where a step's time goes


def _llama(setup: Setup) -> Step:
    """Return a step of four layers of Llama-3.1-8B on the first rank of 8, of 16,384 tokens a rank."""
    config = {**find_config("llama-3.1-8b")[1], "num_hidden_layers": 4, "vocab_size": 32768}
    small = {**WIDE, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 64}
    return Step(setup.size(config, small), {"ulysses": RANKS}, RANKS * setup.size(16384, 32))


def kernels_of_a_step(setup: Setup) -> Iterator[Row]:
    """A profile of a training step of four layers of Llama-3.1-8B, 16,384 tokens a rank: the kernels (on a CPU the
    operators) that take most of its time, and how long the GPU was busy."""
    step = _llama(setup)
    with first_rank(setup, step) as sp:
        run, _ = trained(step, sp)
        seconds = setup.seconds(run)
        activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA][: setup.on_gpu]]
        with profile(activities=activities) as profiler:
            run()
            setup.wait()
    on_gpu = [x for x in profiler.key_averages() if "CUDA" in str(x.device_type)] if setup.on_gpu else None
    name = "self_device_time_total" if setup.on_gpu else "self_cpu_time_total"
    spent = sorted(((getattr(x, name), x) for x in on_gpu or profiler.key_averages()), key=lambda x: -x[0])
    total = max(1e-9, sum(micros for micros, _ in spent))
    share = total / 1e6 / seconds
    yield Row("the step", f"{1e3 * seconds:.1f} ms; busy for {share:.2f} of it", MEASURED, {"seconds": seconds})
    for micros, event in spent[:12]:
        figure = f"{micros / total:.3f} of the time, {micros / 1e3:.2f} ms, {event.count} calls"
        yield Row(event.key[:80], figure, MEASURED, {"micros": micros, "calls": event.count})


def compiled(setup: Setup) -> Iterator[Row]:
    """The same step as it is, with layers compiled one by one (`longspan.compile_layers`), and with Liger's fused norm,
    RoPE and SwiGLU."""

    def run(change: Callable[[Any], object], patched: Callable[[], Any]) -> tuple[Any, ...]:
        step = _llama(setup)
        with first_rank(setup, step) as sp, patched():
            found = measure(setup, *trained(step, sp, change, warm=step.context))  # of this length, for a compiler
        return written(found), MEASURED, found

    compiling = functools.partial(longspan.compile_layers, **setup.size({}, {"backend": "eager"}))
    yield setup.row("as it is", functools.partial(run, _as_it_is, contextlib.nullcontext), 10.0)
    yield setup.row("compiled layers", functools.partial(run, compiling, contextlib.nullcontext), 20.0)
    if importlib.util.find_spec("liger_kernel") is None:
        yield Row("Liger", "", f"{SKIPPED}: liger-kernel is not installed")
    else:
        yield setup.row("Liger", functools.partial(run, _as_it_is, _liger), 10.0)


def _as_it_is(model: Any) -> None:
    pass


def _liger() -> Any:
    """Let Llamas that are made within this use Liger's norm, RoPE and SwiGLU."""
    from liger_kernel.transformers import LigerRMSNorm, LigerSwiGLUMLP, liger_rotary_pos_emb
    from transformers.models.llama import modeling_llama

    fused = {"LlamaRMSNorm": LigerRMSNorm, "LlamaMLP": LigerSwiGLUMLP, "apply_rotary_pos_emb": liger_rotary_pos_emb}
    return mock.patch.multiple(modeling_llama, **fused)
