"""A Hugging Face Llama training step: `longspan.parallelize` under its memory options, and ALST (DeepSpeed).

    python -m benchmarks.hf_step_vs_alst                    # against ALST, with the loss of its tutorial and tiled
    python -m benchmarks.hf_step_vs_alst --what longest     # the longest settings of both
    python -m benchmarks.hf_step_vs_alst --what options     # each memory option of longspan alone
    python -m benchmarks.hf_step_vs_alst --quick            # small, for a first look

A step is forward, backward, the sum of the gradients over ranks, and AdamW, on replicated weights, so that only the
sequence method differs. Losses and gradients are compared first. Times come from alternating steps in the same
processes. The floor is one rank's part of the work without communication (its results are wrong): the rest is the cost
of a sequence method. Peak memory comes from new processes for each method: the rise of the process's high-water mark
over a step (`VmHWM`, reset through /proc/self/clear_refs), and the peak bytes of tensors by torch's profiler, which
does not depend on the C library.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks import common, peers
from longspan.compat.transformers_api import register_attention
from longspan.core.memory import LONGEST, Memory

MIB = 2**20
FLOOR = "floor"
MEMORY_OPTIONS = {  # the name of the method after "longspan"
    "checkpointing=selective": Memory(checkpointing="selective"),
    "checkpointing=full": Memory(checkpointing="full"),
    "tiled": Memory(tiled=True),
    "head_slices=0": Memory(head_slices=0),
    "checkpointing=grouped": Memory(checkpointing="grouped"),
    "longest": LONGEST,
    "few": dataclasses.replace(LONGEST, checkpointing="grouped"),
}
# For memory: the C library returns freed blocks of 64 KiB and more to the system, so the resident set follows tensors.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}


@dataclass(frozen=True)
class Shape:
    """A Llama, and the tiles of ALST's loss."""

    layers: int = 4
    hidden: int = 512
    ffn: int = 1408
    q_heads: int = 8
    kv_heads: int = 2
    vocab: int = 32000
    tile_mib: int = 64

    def __str__(self) -> str:
        return (
            f"Llama: {self.layers} layers, hidden {self.hidden}, {self.q_heads} query and {self.kv_heads} KV heads, "
            f"FFN {self.ffn}, vocabulary {self.vocab:,}"
        )


@dataclass(frozen=True)
class Comparison:
    """What to compare: the first method with the `reference`, and all others."""

    title: str
    methods: tuple[str, ...]
    reference: str
    tokens: tuple[int, ...]
    dtypes: tuple[str, ...]
    shape: Shape
    goals: str


COMPARISONS = {
    "alst": Comparison(
        "A Hugging Face Llama training step: longspan against ALST", ("longspan", "alst", "alst+tiled", FLOOR),
        "alst+tiled", (8192, 16384), ("fp32", "bf16"), Shape(),
        "Goals: time at most 0.9, peak memory at most 0.7 of ALST's with its tiled loss. `alst` has the loss of ALST's "
        "tutorial (the model's own, weighted over ranks), `alst+tiled` its TiledFusedLogitsLoss.",
    ),
    "longest": Comparison(
        "The longest settings: longspan against ALST", ("longspan longest", "alst longest"),
        "alst longest", (8192, 16384, 32768), ("fp32",), Shape(hidden=256, ffn=704),
        "Goals: peak at most 0.5 and growth at most 0.65 of ALST's, time at most 1.0. ALST: tiled loss, tiled MLP (as "
        "many tiles as its documentation says), transformers' gradient checkpointing. At the shorter lengths the peak "
        "is that of the optimizer's temporaries and of the gradients' sum, at the longer ones of a layer's backward.",
    ),
    "options": Comparison(
        "Each memory option alone", ("longspan", *(f"longspan {name}" for name in MEMORY_OPTIONS)),
        "longspan", (8192,), ("fp32",), Shape(layers=8, hidden=256, ffn=704, kv_heads=8, vocab=2048),
        "`longest` is that of `memory`; `few` the same with checkpointing=grouped.",
    ),
}  # fmt: skip


def main(
    what: Literal["alst", "longest", "options"] = "alst",
    ranks: tuple[int, ...] = (2,),
    tokens: tuple[int, ...] = (),
    repeats: int = 5,
    memory: bool = True,
    time: bool = True,
    quick: bool = False,
    name: str = "",
) -> None:
    """Compare methods.

    Args:
        what: the comparison.
        ranks: sequence-parallel ranks (Ulysses).
        tokens: lengths; by default those of the comparison.
        repeats: timed steps of each method, and steps whose peak memory is measured.
        memory: measure memory.
        time: measure times.
        quick: 2,048 tokens and 2 layers.
        name: of the report.
    """
    given = COMPARISONS[what]
    shape = dataclasses.replace(given.shape, layers=2) if quick else given.shape
    name = (name or f"hf-step-{what}") + ("-quick" if quick else "")
    env = common.environment(["longspan", "torch", "transformers", "deepspeed"])
    rows: list[dict[str, Any]] = []
    for world in ranks:
        for n in tokens or ((2048,) if quick else given.tokens):
            for dtype in given.dtypes:
                row: dict[str, Any] = {"ranks": world, "tokens": n, "dtype": dtype, "memory": {}, "cpu": {}, "wall": {}}
                if time:
                    row |= common.run_ranks(time_all, world, shape, n, dtype, given.methods, repeats)
                for method in given.methods if memory else ():
                    if method != FLOOR:
                        arguments = shape, n, dtype, method, repeats
                        row["memory"][method] = common.run_ranks(measure_memory, world, *arguments, env=MALLOC)
                rows.append(row)  # a report after every row, in case a long run is interrupted
                text = render(rows, given, shape)
                common.write_report(name, given.title, env, text, {"shape": dataclasses.asdict(shape), "rows": rows})


# --- the model, the batch and the methods -----------------------------------------------------------


def build_model(shape: Shape, tokens: int, dtype: str, attention: str = "sdpa") -> Any:
    """Return the same small Llama on every call and rank."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=shape.hidden, intermediate_size=shape.ffn, num_hidden_layers=shape.layers,
        num_attention_heads=shape.q_heads, num_key_value_heads=shape.kv_heads, vocab_size=shape.vocab,
        max_position_embeddings=tokens, use_cache=False, tie_word_embeddings=False, attn_implementation=attention,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(common.DTYPES[dtype]).train()


class Method:
    """One method's model, shard of the batch and optimizer; `step()` is measured."""

    def __init__(self, name: str, shape: Shape, tokens: int, dtype: str) -> None:
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(0, shape.vocab, (1, tokens), generator=generator)
        batch = {"input_ids": ids, "labels": ids.clone()}
        batch["labels"][:, : tokens // 10] = -100
        self.model = build_model(shape, tokens, dtype, without_exchange() if name == FLOOR else "sdpa")
        kind, _, option = name.partition(" ")
        if kind == "longspan":
            import longspan

            sp = longspan.SequenceSharding(longspan.init_mesh(ulysses=dist.get_world_size()))
            memory: Any = MEMORY_OPTIONS[option] if option else "fastest"
            self.model = longspan.parallelize(self.model, sp, fsdp=False, memory=memory)
            mine = batch
        elif name == FLOOR:
            mine = {key: x[:, : tokens // dist.get_world_size()].contiguous() for key, x in batch.items()}
        else:
            peers.start_deepspeed()
            if option == "longest":
                self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
                peers.tile_mlps(self.model)
            alst_step = peers.AlstStep(self.model, tokens, 1, None if name == "alst" else shape.tile_mib)
            mine = alst_step.shard(batch)
        self.forward_backward: Callable[[], torch.Tensor] = (
            (lambda: alst_step(mine)) if kind.startswith("alst") else (lambda: _forward_backward(self.model, mine))
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def step(self) -> float:
        self.optimizer.zero_grad(set_to_none=True)
        loss = float(self.forward_backward())
        self.optimizer.step()
        return loss


def without_exchange() -> str:
    """Register a transformers attention that does one rank's share of the work without communication; return its name.

    It reads local tokens of all heads as all tokens of the local heads: the sizes are right, the values are not.
    """

    def attend(module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> Any:
        ranks = dist.get_world_size()
        q, k, v = (x.reshape(x.shape[0], max(1, x.shape[1] // ranks), -1, x.shape[3]) for x in (q, k, v))
        k, v = (x.repeat(1, 1, q.shape[2] // x.shape[2], 1) for x in (k, v))  # at most once, unless KV heads < ranks
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return o.reshape(q.shape[0], module.config.num_attention_heads, -1, q.shape[3]).transpose(1, 2), None

    register_attention("without_exchange", attend, lambda *_, **__: None)
    return "without_exchange"


def _forward_backward(model: Any, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    loss.backward()
    return loss.detach()


# --- time -------------------------------------------------------------------------------------------


def time_all(shape: Shape, tokens: int, dtype: str, names: Sequence[str], repeats: int) -> dict[str, Any]:
    """Compare gradients with the last method but the floor, then time alternating steps."""
    methods = {name: Method(name, shape, tokens, dtype) for name in names}
    errors = gradient_errors({name: method for name, method in methods.items() if name != FLOOR})
    if max(errors.values()) > (1e-4 if dtype == "fp32" else 5e-2):
        raise RuntimeError(f"the methods disagree, so their times cannot be compared: {errors}")
    wall, cpu = common.alternate({name: method.step for name, method in methods.items()}, repeats)
    return {"grad_errors": errors, "wall": wall, "cpu": cpu}


def gradient_errors(methods: dict[str, Method]) -> dict[str, float]:
    """Return the largest relative difference of a parameter's gradient from the last method's, in norm."""
    grads = {}
    for name, method in methods.items():
        method.forward_backward()
        grads[name] = {key: p.grad.double() for key, p in method.model.named_parameters() if p.grad is not None}
        method.optimizer.zero_grad(set_to_none=True)
    base = grads[list(methods)[-1]]
    return {
        name: max(float((found[key] - x).norm() / x.norm()) for key, x in base.items()) for name, found in grads.items()
    }


# --- memory -----------------------------------------------------------------------------------------


def measure_memory(shape: Shape, tokens: int, dtype: str, name: str, repeats: int) -> dict[str, float]:
    """Return the peak MiB of one step above the level before it, the largest over ranks."""
    method = Method(name, shape, tokens, dtype)
    method.step()  # allocates optimizer state, gloo's buffers and tables
    rises = []
    for _ in range(repeats):
        method.optimizer.zero_grad(set_to_none=True)  # a step's own gradients belong to its rise
        rises.append(rss_rise(method.step))
    method.optimizer.zero_grad(set_to_none=True)
    mine = torch.tensor([common.median(rises), common.memory_rise(method.step)], dtype=torch.float64)
    dist.all_reduce(mine, op=dist.ReduceOp.MAX)
    return dict(zip(("rss_rise_mib", "tensor_peak_mib"), (mine / MIB).tolist(), strict=True))


def rss_rise(step: Callable[[], object]) -> float:
    """Return the bytes by which the resident set rises during a step."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")
    before = status_kib("VmRSS")
    step()
    return (status_kib("VmHWM") - before) * 1024.0


def status_kib(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {field}")


# --- the table --------------------------------------------------------------------------------------


def render(rows: list[dict[str, Any]], given: Comparison, shape: Shape) -> str:
    of = f"of {given.reference}"
    header = ["P", "tokens", "dtype", "method", "step s", of, "CPU time", "peak RSS rise MiB", of]
    header += ["tensor peak MiB", of]
    cells = []
    for row in rows:
        for name in given.methods:
            line = [str(row["ranks"]), f"{row['tokens']:,}", row["dtype"], name]
            timed = name in row["wall"]
            line.append(f"{common.median(row['wall'][name]):.2f}" if timed else "")
            for clock in ("wall", "cpu"):
                times = row[clock]
                line.append(f"{common.paired_ratio(times[name], times[given.reference]):.3f}" if timed else "")
            for key in ("rss_rise_mib", "tensor_peak_mib"):
                mine, theirs = (row["memory"].get(each, {}).get(key) for each in (name, given.reference))
                line += [f"{mine:.0f}", f"{mine / theirs:.3f}"] if mine and theirs else ["", ""]
            cells.append(line)
    notes = f"tiles of ALST's loss of {shape.tile_mib} MiB. Times and ratios are medians over rounds."
    lines = [common.table(header, cells), "", given.goals, "", f"{shape}; batch 1, AdamW; {notes}"]
    first, last = rows[0], rows[-1]
    if last["tokens"] > first["tokens"] and last["memory"] and first["dtype"] == last["dtype"]:
        more = (last["tokens"] - first["tokens"]) / last["ranks"]
        grown = {
            name: 1024 * (found["rss_rise_mib"] - first["memory"][name]["rss_rise_mib"]) / more
            for name, found in last["memory"].items()
        }
        each = "; ".join(f"{name} {kib:.1f}, {kib / grown[given.reference]:.3f}" for name, kib in grown.items())
        lines.append(f"Growth of the peak RSS rise, KiB per further token of a rank, and {of}: {each}.")
    if errors := [max(row["grad_errors"].values()) for row in rows if "grad_errors" in row]:
        lines.append(f"Largest relative difference of a parameter's gradient on the first step: {max(errors):.1e}.")
    return "\n".join(lines)


if __name__ == "__main__":
    common.command(main, __doc__)
