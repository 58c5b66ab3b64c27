"""A plan as the command that runs it."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

from longspan.core.memory import FASTEST, LONGEST, Memory, flags_to_add
from longspan.plan.job import Job, Mesh
from longspan.plan.models.catalogue import CONFIGS, ELSEWHERE, HUB
from longspan.plan.search import Plan


def command(plan: Plan) -> str | None:
    """Return the command that runs a plan, quoted for a shell, or None if this version has none.

    Words in capitals are placeholders: DATA and FILE for a text; a folder of weights for built-in models whose weights
    on the hub cannot be trained as they are.
    """
    if not plan.runs:
        return None
    return _train_command(plan) if plan.job.mode == "train" else _generate_command(plan)


def _train_command(plan: Plan) -> str:
    job, mesh = plan.job, plan.mesh
    words = [_model_flag(plan.model.name), "--data DATA", f"--context {job.context}"]
    if mesh.ring > 1:
        words.append(f"--ring {mesh.ring}")
        words += [f"--layout {job.layout}"] if job.layout != "auto" else []
        words += [f"--ring-impl {job.ring_impl}"] if job.ring_impl != "auto" else []
    if mesh.ulysses > 1:
        words += [f"--overlap-chunks {job.overlap_chunks}"] if job.overlap_chunks > 1 else []
        words += [f"--wire-dtype {job.wire_dtype}"] if job.wire_dtype != "exact" else []
    words += [f"--ulysses {mesh.ulysses}", *_tensor_flags(job, mesh)]
    words += [f"--data-degree {mesh.data}", f"--batch {job.batch}", f"--dtype {job.dtype}", *_rope_flags(plan)]
    words += memory_flags(job.memory)
    words += [] if job.weight_sharding else ["--no-fsdp"]
    return _started(plan, "train", words)


def _generate_command(plan: Plan) -> str | None:
    """Return the command for a prompt, or None if `generate` cannot run it."""
    job, mesh, memory = plan.job, plan.mesh, plan.job.memory
    has_options = (memory.tiled_mlp, memory.head_chunks, memory.cpu_offload) != (1, 1, False)
    if mesh.data > 1 or job.batch > 1 or has_options:
        return None
    model = _model_flag(plan.model.name)
    if model.startswith("--config "):  # a config alone has no weights: name its folder
        model = f"--model {_quoted(_config_file(plan.model.name).parent)}"
    words = [model, "--file FILE"]
    words += [f"--ring {mesh.ring}"] if mesh.ring > 1 else []
    words += [f"--layout {job.layout}"] if job.layout != "auto" else []
    words += [f"--ulysses {mesh.ulysses}", *_tensor_flags(job, mesh), f"--dtype {job.dtype}"]
    words += [f"--cache {job.cache}"] if job.cache != "exact" else []
    words += [f"--cache-offload {job.cache_offload}"] if job.cache_offload != "none" else []
    words += [] if job.cache_latent else ["--no-cache-latent"]
    words += [f"--prefill-chunk {job.prefill_chunk}"] if job.prefill_chunk is not None else []
    words += [f"--weights {'sharded' if job.weight_sharding else 'replicated'}"] if mesh.gpus > 1 else []
    return _started(plan, "generate", [*words, *_rope_flags(plan)])


def _tensor_flags(job: Job, mesh: Mesh) -> list[str]:
    if mesh.tensor == 1:
        return []
    return [f"--tensor {mesh.tensor}", *([] if job.tensor_style == "tp" else [f"--tensor-style {job.tensor_style}"])]


def _rope_flags(plan: Plan) -> list[str]:
    scaling = plan.model.scaling(plan.job.context)
    return [] if scaling is None else [f"{flag} {shlex.quote(value)}" for flag, value in scaling.flags.items()]


def _started(plan: Plan, name: str, words: list[str]) -> str:
    mesh = plan.mesh
    # torchrun starts as many ranks on each node: 12 GPUs in nodes of 8 are two nodes of 6.
    per_node = max(n for n in range(1, min(mesh.gpus, plan.hardware.gpus_per_node) + 1) if mesh.gpus % n == 0)
    nodes = mesh.gpus // per_node
    if nodes == 1:
        return " ".join([f"longspan {name}", *words, f"--nproc {mesh.gpus}"])
    torchrun = f"torchrun --nnodes {nodes} --nproc-per-node {per_node} --rdzv-backend c10d --rdzv-endpoint HOST:29500"
    return " ".join([torchrun, f"-m longspan {name}", *words])


def _model_flag(name: str) -> str:
    if name in CONFIGS:
        return f"--model {HUB[name]}" if name in HUB else ELSEWHERE[name]
    return f"--config {_quoted(_config_file(name))}"


def _config_file(name: str) -> Path:
    path = Path(name)
    return path if path.suffix == ".json" and not path.is_dir() else path / "config.json"


def _quoted(path: Path) -> str:
    # A leading "-" would make it a flag.
    return shlex.quote(f"./{path}" if str(path).startswith("-") else str(path))


def memory_flags(memory: Memory) -> list[str]:
    """Return the flags of `longspan plan` and `longspan train` for these memory options."""
    if memory == FASTEST:
        return ["--memory fastest"]
    if memory == Memory(checkpointing="full"):
        return ["--grad-checkpointing"]
    without_offload = replace(memory, offload="none", offload_folder="", cpu_offload=False)
    if without_offload == LONGEST:
        return ["--memory longest", *flags_to_add(LONGEST, memory)]
    return flags_to_add(FASTEST, memory)
