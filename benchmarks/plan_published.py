"""Plans beside published figures of other libraries' long training steps: seconds and memory of each.

    python -m benchmarks.plan_published > benchmarks/reports/2026-11-28-plan-published.md

Each row states the settings of the published run, and the options of `longspan` that come nearest. No GPU is needed.
"""

from __future__ import annotations

from dataclasses import dataclass

from longspan.core.memory import Memory
from longspan.plan import Job, ParallelConfig, Plan, cost, read_hardware, read_model

TRL = "[TRL](https://github.com/huggingface/trl/pull/6846)"
EARLIER = "[TRL](https://github.com/huggingface/trl/pull/6845)"
BLOG = "[blog](https://huggingface.co/blog/ulysses-sp)"
OFFLOADED = Memory(checkpointing="full", offload="host")
HOST = Memory(checkpointing="full", offload="host", cpu_offload=True)
TILED = Memory(checkpointing="full", offload="host", cpu_offload=True, tiled=True)
ZERO_3 = Memory(checkpointing="full", cpu_offload=True)

LOGIT_BYTES = 10
"""Of each logit that the blog's loss holds whole: bf16, fp32, and its gradient in fp32."""

ZERO_3_BYTES = 14.2e9
"""Of the blog's runs besides, the same at each of four lengths: what ZeRO-3 holds beyond FSDP2 with `cpu_offload`."""


@dataclass(frozen=True)
class Row:
    """A published step, and the plan beside it."""

    model: str
    context: int
    mesh: ParallelConfig
    memory: Memory
    source: str
    seconds: float | None = None  # published
    gigabytes: float | None = None  # published
    whole_logits: bool = False  # whether the published run held logits whole, and ZeRO-3's buffers

    @property
    def plan(self) -> Plan:
        """The plan of these settings on H100s."""
        job = Job(context=self.context, memory=self.memory)
        return cost(read_model(self.model), job.on(**self.mesh.degrees), read_hardware("h100"))

    def besides(self, plan: Plan) -> float:
        """Return the bytes that the published run holds and longspan does not."""
        return ZERO_3_BYTES + LOGIT_BYTES * plan.c.tokens * plan.model.vocab if self.whole_logits else 0.0


M = 1 << 20
ROWS = [
    Row("qwen3-8b", M, ParallelConfig(ring=8), OFFLOADED, TRL, 380, 56.2),
    Row("qwen3-8b", M, ParallelConfig(ring=8), OFFLOADED, EARLIER, 364, 56.2),
    Row("qwen3-8b", 2 * M, ParallelConfig(ring=16), OFFLOADED, EARLIER, 696),
    Row("qwen3-8b", 4 * M, ParallelConfig(ring=32), OFFLOADED, EARLIER, 1346),
    Row("qwen3-30b-a3b", M, ParallelConfig(ring=8), HOST, EARLIER, 483, 46.0),
    Row("qwen3-32b", M, ParallelConfig(ring=8), TILED, EARLIER, 1295),
    *(
        Row("qwen3-4b", n << 10, ParallelConfig(ulysses=4), ZERO_3, BLOG, gigabytes=published, whole_logits=True)
        for n, published in ((32, 35.0), (64, 50.5), (96, 66.0))
    ),
]

NOTES = """
- TRL: one sequence a step, bf16, FSDP2 with a ring (`cp_size`), gradient checkpointing with offload to the host, a loss
  in chunks; attention by cuDNN, as `kernel="auto"` chooses on an H100.
- The 46.0 GB of TRL's 30B-A3B and the 60.8 GB of its 32B are less than the fp32 weights, gradients and AdamW states of
  an eighth of the model (61.1 and 65.5 GB), so these are planned in the host's memory.
- TRL's 32B ran its MLP in tiles ([review](https://github.com/huggingface/trl/pull/6846)); how many is not said. Those
  of longspan are smaller, and norms are tiled too, so the 39.6 GB planned are not comparable with the 60.8 GB. With
  attention at 45 % of the peak, as was assumed before, the step would be planned at 1,534 s.
- The blog: DeepSpeed ZeRO-3 with the optimizer on the host, Ulysses 4, gradient checkpointing, FlashAttention-2, and
  logits that are held whole. longspan never holds them (`longspan.losses`), which is why its own plan is far below. The
  last column adds what that run holds besides: 10 bytes a logit, which is the slope of its figures over the length, and
  14.2 GB that do not depend on the length.
"""


def _options(row: Row) -> str:
    return f"{row.mesh}, {row.memory.describe()}"


def table() -> str:
    """Return the report."""
    head = ["model", "tokens", "GPUs", "options of longspan", "published", "seconds", "planned", "ratio"]
    head += ["GB", "planned", "with what the other run holds", "ratio"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in ROWS:
        plan = row.plan
        planned, whole = plan.memory_total_bytes / 1e9, (plan.memory_total_bytes + row.besides(plan)) / 1e9
        times = ["", "", ""] if row.seconds is None else [f"{row.seconds:,.0f}", f"{plan.step_seconds:,.0f}",
                                                          f"{plan.step_seconds / row.seconds:.2f}"]  # fmt: skip
        memory = ["", "", "", ""]
        if row.gigabytes is not None:
            memory = [f"{row.gigabytes:.1f}", f"{planned:.1f}", f"{whole:.1f}", f"{whole / row.gigabytes:.2f}"]
        name, tokens, gpus = row.model, f"{row.context:,}", str(row.mesh.ranks)
        lines.append("| " + " | ".join([name, tokens, gpus, _options(row), row.source, *times, *memory]) + " |")
    assumed = read_hardware("h100")
    title = "# Plans beside published figures\n\n- command: `python -m benchmarks.plan_published`; no GPU is needed\n"
    title += f"- assumed: H100, {assumed.matmul_efficiency:.0%} of peak in matrix products, {assumed.attention_words}\n"
    return "\n".join([title, *lines, NOTES.rstrip(), ""])


if __name__ == "__main__":
    print(table(), end="")
