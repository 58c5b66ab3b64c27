"""Linear attention and its gated variants: a state of fixed size instead of a KV cache."""

from __future__ import annotations

from dataclasses import dataclass

from longspan.plan.job import Job, Mesh, layer_passes, local_batch, local_tokens
from longspan.plan.layers.base import CostContext, Mixer, Sent


@dataclass(frozen=True)
class Linear(Mixer):
    """A state of [head_dim, v_head_dim] per value head, read and updated once per token."""

    @property
    def name(self) -> str:
        return "linear"

    @property
    def cached_per_token(self) -> int:
        return 0

    @property
    def state_elements(self) -> int:
        """Elements of the state."""
        return self.q_heads * self.head_dim * self.v_head_dim

    def flops(self, job: Job, times: float) -> float:
        tokens = job.batch * (1 if job.mode == "decode" else job.context)
        return times * 4.0 * tokens * self.state_elements

    def max_flops(self, job: Job, mesh: Mesh) -> float:
        return 4.0 * local_batch(job, mesh) * local_tokens(job, mesh) * self.state_elements / mesh.tensor

    def sent(self, job: Job, mesh: Mesh) -> list[Sent]:
        """Return one AllGather of the states, independent of the length (LASP-2: Sun et al. 2025, arXiv:2502.07563)."""
        p = mesh.sequence
        if p == 1 or job.mode == "decode":
            return []
        state = job.bytes_per_element * local_batch(job, mesh) * self.state_elements // mesh.tensor
        return [Sent("all_gather", "sequence", "states of linear attention", state * (p - 1), sum(layer_passes(job)))]

    def cache_by_rank(
        self, job: Job, mesh: Mesh, generated: int = 0, chunk: int | None = None, step: int = 0
    ) -> list[int]:
        state = local_batch(job, mesh) * (self.state_elements // mesh.tensor) * job.bytes_per_element
        return [state] * mesh.sequence

    def saved(self, c: CostContext, *, recompute_all_to_all: bool = False) -> int:
        """Return an estimate: input, output and gates."""
        return c.b * 3 * (self.q_heads * self.v_head_dim + 2 * self.kv_heads * self.head_dim) // c.mesh.tensor
