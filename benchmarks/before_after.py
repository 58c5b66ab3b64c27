"""Compare this version with an older one: attention, a Hugging Face training step, and the host time of a layer.

    git worktree add ../longspan-before COMMIT
    python benchmarks/before_after.py --before ../longspan-before/src

Both versions have the same package name, so each runs in its own processes. The two groups take turns round by round;
one waits at a pipe while the other computes. A round's time is that of its slowest rank; ratios are medians over rounds
of new over old. Steps run without FSDP, with AdamW and each version's defaults (this one computes no logits in
training); `step, logits` requests them. `host` cases are 50 forwards of tiny tensors on one device: `call` as a user
calls it, `layer` with a plan that was prepared once per batch.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HEADS, KV_HEADS, HEAD_DIM = 8, 2, 64
SIDES = ("now", "before")
ATTENTION = [
    {"mesh": mesh, "tokens": tokens, "dtype": dtype, "mask": mask}
    for mesh in ("ulysses", "ring")
    for tokens, dtype in ((4096, "fp32"), (8192, "bf16"))
    for mask in ("causal", "window", "documents")
]
HOST = [
    {"host": what, "tokens": tokens, "documents": documents, "dtype": "fp32"}
    for tokens, documents in ((64, 0), (64, 8), (1024, 64), (1024, 512))
    for what in ("call", "layer")
]
HOST_CALLS = 50
STEPS = [{"step": logits, "tokens": 4096, "dtype": dtype} for dtype in ("fp32", "bf16") for logits in (False, True)]


# --- a rank of one version ------------------------------------------------------------------------------


def worker(rank: int, world: int, port: int) -> None:
    """Run one case for each line that rank 0 reads from stdin; print the seconds of the slowest rank."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    made: dict[str, Any] = {}
    while True:
        line: list[Any] = [sys.stdin.readline().strip() if rank == 0 else None]
        dist.broadcast_object_list(line)
        if not line[0]:
            break
        if line[0] not in made:
            made.clear()  # hold one case at a time
            made[line[0]] = build(json.loads(line[0]))
            made[line[0]]()
        dist.barrier()
        start = time.perf_counter()
        made[line[0]]()
        took = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        if rank == 0:
            print(float(took), flush=True)
    dist.destroy_process_group()


def build(case: dict[str, Any]) -> Any:
    import torch
    import torch.distributed as dist

    import longspan

    # Not from `common`, which imports parts of longspan that an older version may lack.
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[case["dtype"]]
    world, n = dist.get_world_size(), case["tokens"]
    torch.manual_seed(0)
    if "step" in case:
        return build_step(case["step"], n, dtype)
    if "host" in case:
        return build_host(case["host"], n, case["documents"])
    sp = longspan.SequenceSharding(longspan.init_mesh(**{case["mesh"]: world}))
    mask: dict[str, Any] = {
        "causal": {},
        "window": {"window": n // 8},
        "documents": {"documents": torch.arange(n)[None] // (n // 16)},
    }[case["mask"]]
    inputs = [
        sp.shard(torch.randn(1, n, heads, HEAD_DIM).to(dtype)).requires_grad_() for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]
    grad = torch.randn_like(inputs[0])

    def run() -> None:
        for x in inputs:
            x.grad = None
        longspan.attention(*inputs, sp, **mask).backward(grad)

    return run


def build_host(what: str, tokens: int, documents: int) -> Any:
    import torch

    import longspan
    from longspan.comm.mesh import OneDeviceMesh

    sp = longspan.SequenceSharding(OneDeviceMesh("cpu"))
    q, k, v = (torch.randn(1, tokens, heads, 8) for heads in (2, 1, 1))
    ids = torch.arange(tokens)[None] // (tokens // documents) if documents else None
    options = {"documents": ids} if what == "call" else {"plan": longspan.prepare_attention(q, k, v, sp, documents=ids)}

    @torch.no_grad()
    def run() -> None:
        for _ in range(HOST_CALLS):
            longspan.attention(q, k, v, sp, **options)

    return run


def build_step(logits: bool, tokens: int, dtype: Any) -> Any:
    import inspect

    import torch
    import torch.distributed as dist
    from transformers import LlamaConfig, LlamaForCausalLM

    import longspan

    config = LlamaConfig(
        hidden_size=512, intermediate_size=1408, num_hidden_layers=4, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, vocab_size=32000, max_position_embeddings=tokens,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(dtype).train()
    sp = longspan.SequenceSharding(longspan.init_mesh(ulysses=dist.get_world_size()))
    asked = {"logits": True} if logits and "logits" in inspect.signature(longspan.parallelize).parameters else {}
    model = longspan.parallelize(model, sp, fsdp=False, **asked)
    ids = torch.randint(0, 32000, (1, tokens), generator=torch.Generator().manual_seed(1))
    shard = longspan.shard_batch({"input_ids": ids, "labels": ids}, sp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def run() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(**shard).loss.backward()
        optimizer.step()

    return run


# --- the two groups in turns -----------------------------------------------------------------------


class Group:
    """The ranks of one version."""

    def __init__(self, sources: Path, world: int) -> None:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        env = {**os.environ, "PYTHONPATH": str(sources), "OMP_NUM_THREADS": "1"}
        self.ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "--worker", str(rank), str(world), str(port)],
                env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )
            for rank in range(world)
        ]  # fmt: skip

    def __call__(self, case: dict[str, Any]) -> float:
        first = self.ranks[0]
        assert first.stdin is not None and first.stdout is not None
        first.stdin.write(json.dumps(case) + "\n")
        first.stdin.flush()
        return float(first.stdout.readline() or sys.exit("a rank has died"))

    def close(self) -> None:
        for rank in self.ranks:
            assert rank.stdin is not None
            rank.stdin.close()
            rank.wait()


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        worker(*map(int, sys.argv[2:]))
        return
    import common

    common.command(compare, __doc__)


def compare(
    before: Path, ranks: int = 2, rounds: int = 9, seconds: float = 5.0, only: str = "", name: str = "before-after"
) -> None:
    """Compare both versions.

    Args:
        before: `src` of an older version.
        ranks: of each version.
        rounds: at least; up to six times as many of a short case.
        seconds: how long a case shall take each version.
        only: cases whose name contains this.
        name: of the report.
    """
    import common

    env = common.environment(["torch", "transformers"])
    here = Path(__file__).resolve().parents[1] / "src"
    groups = {"now": Group(here, ranks), "before": Group(before.resolve(), ranks)}
    rows: list[dict[str, Any]] = []
    for case in (case for case in (*ATTENTION, *STEPS, *HOST) if only in what(case)):
        took: dict[str, list[float]] = {side: [] for side in SIDES}
        first = groups["now"](case)
        for turn in range(max(rounds, min(6 * rounds, int(seconds / first)))):
            for side in SIDES if turn % 2 else reversed(SIDES):
                took[side].append(groups[side](case))
        rows.append({**case, "seconds": took, "ratio": common.paired_ratio(took["now"], took["before"])})
    for group in groups.values():
        group.close()
    cells = [
        [what(row), f"{row['tokens']:,}", row["dtype"],
         *(f"{1e3 * common.median(row['seconds'][side]):.1f}" for side in SIDES), f"{row['ratio']:.3f}"]
        for row in rows
    ]  # fmt: skip
    text = common.table(["what", "tokens", "dtype", "now ms", "before ms", "now/before"], cells) + "\n"
    for kind, key in (("attention", "mesh"), ("step", "step"), ("host", "host")):
        if ratios := [row["ratio"] for row in rows if key in row]:
            text += f"\n- {kind}: median {common.median(ratios):.3f}, {min(ratios):.3f} to {max(ratios):.3f}"
    text += (
        f"\n\n{ranks} ranks over gloo, one thread each; attention forward and backward, 8 query and 2 KV heads of 64, "
        "window = tokens/8, 16 documents; a step of a Llama of 4 layers, hidden 512, vocabulary 32,000, AdamW."
    )
    common.write_report(name, "This version compared with an older one", env, text, rows)


def what(case: dict[str, Any]) -> str:
    if "step" in case:
        return "step, logits" if case["step"] else "step"
    if "host" in case:
        return f"host, {case['host']}, {case['documents']} documents"
    return f"{case['mesh']}, {case['mask']}"


if __name__ == "__main__":
    main()
