"""Recurrent layers: linear attention, plain, with decay or with the delta rule, and Mamba-2.

`longspan.mixers` runs them; tests compare what they send with it to the byte.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from longspan.core.cache import is_sharded
from longspan.core.layout import Layout
from longspan.plan.job import CostContext, Job
from longspan.plan.layers.base import Buffers, Sent, TokenMixing

STATE_BYTES = 4
"""Bytes of a state's element: fp32 in any job."""

PLAIN_CHUNK = 64
"""Tokens of a chunk in plain torch."""

PLAIN = {
    ("head", False): ((4, 2, 3, 2, 0), (0, 0, 1, 3, 0)),
    ("head", True): ((7, 4, 6, 3, 2), (0, 3, 3, 0, 3)),
    ("key", True): ((71, 4, 2, 3, 2), (17, 1, 1, 1, 0)),
}
"""What plain torch saves, and what its backward holds besides, by (kind of decays, whether there is a delta rule).

In fp32 elements per value head and token, as multiples of K, V, C, K * V / C and K * K / C; C is `PLAIN_CHUNK`.
"""

STATES = "states of recurrent layers"
"""What is sent, in plans."""


@dataclass(frozen=True)
class Linear(TokenMixing):
    """A recurrent layer: a state of `[head_dim, v_head_dim]` per value head, sent as `longspan.mixers` does."""

    # of the transition, what the state before a run is multiplied by: `head_dim` for a matrix (delta rule), 1 for
    # factors (decay), 0 for 1
    columns: int = 0
    chunk: int = 64  # tokens that its algorithm computes together
    channels: int = 0  # of its short convolution; 0 for none
    kernel: int = 1  # tokens that one result of the convolution depends on
    # Decays of linear attention that `longspan.mixers` computes: one per "head", or per "key" dim; "": other layers.
    decays: str = ""

    @property
    def name(self) -> str:
        return "linear"

    @property
    def state_elements(self) -> int:
        return self.q_heads * self.head_dim * self.v_head_dim

    @property
    def _summary_elements(self) -> int:
        """Elements of a state, and beside it the transition, as they are sent."""
        return self.q_heads * self.head_dim * (self.v_head_dim + self.columns)

    # Compute.

    def flops(self, job: Job, times: float) -> float:
        tokens = job.batch * (1 if job.mode == "decode" else job.context)
        return times * tokens * self._flops_per_token(job, receives=False)

    def max_flops(self, c: CostContext) -> float:
        return c.tokens * self._flops_per_token(c.job, receives=c.mesh.sequence_ranks > 1)

    def _flops_per_token(self, job: Job, receives: bool) -> float:
        """Return the FLOPs of all heads, by chunks (arXiv:2412.06464, section 3.3), or of one step.

        The delta rule computes what each token writes: one more product of keys with keys, a product of their inverse
        with keys and values, and one of keys with the state. If a state is received, its values are wider by the
        transition's columns, and the output is corrected.
        """
        K, V, C, delta = self.head_dim, self.v_head_dim, self.chunk, self.columns > 1
        if job.mode == "decode":
            return 2.0 * self.state_elements * (3 if delta else 2)
        width = V + (self.columns if receives and delta else 0)
        within = 2.0 * C * (3 * K + 2 * width if delta else K + V)
        with_state = 2.0 * K * width * (3 if delta else 2)
        return self.q_heads * (within + with_state + (2.0 * K * V if receives else 0.0))

    # Communication.

    def sent(self, c: CostContext) -> list[Sent]:
        """Return one all-gather of states, whatever the length, one of tokens for the convolution, and their gradients.

        LASP-2 (arXiv:2502.07563), and with decay or delta rule the transition beside each state.
        """
        if c.mesh.sequence_ranks == 1 or c.job.mode == "decode":
            return []
        rows = c.sequences * _runs(c.layout, c.job.context) * (c.mesh.sequence_ranks - 1)
        state = STATE_BYTES * rows * self._summary_elements
        tokens = c.b * rows * (self.kernel - 1) * self.channels
        forwards, backwards = c.job.layer_passes
        if c.job.prompt_chunks:
            forwards = sum(count for n, count in c.job.prompt_chunks if is_sharded(c.layout, n))
        return [
            Sent(op, "sequence", what, size, calls)
            for what, size in (("tokens for short convolutions", tokens), (STATES, state))
            for op, calls in (("all_gather", forwards), ("reduce_scatter", backwards))
            if size
        ]

    # Memory.

    def cache_by_rank(self, c: CostContext, generated: int = 0, chunk: int | None = None, step: int = 0) -> list[int]:
        """Return on every rank the bytes of the state, and of the last tokens that its convolution reads."""
        convolved = (self.kernel - 1) * self.channels
        return [c.sequences * (self.state_elements * STATE_BYTES + convolved * c.b)] * c.mesh.sequence_ranks

    def saved(self, c: CostContext) -> int:
        """Return an estimate.

        Fused kernels save the channels of convolution and recurrence, the gate and the output; where a state is
        received, also values that are wider by the transition, and the output for them. Plain torch saves what each
        chunk computes. Besides, for a layer and not a token, the states that were gathered.
        """
        keys, values = self.kv_heads * self.head_dim, self.q_heads * self.v_head_dim
        plain = self._in_plain_torch(c)[0]
        sharded = c.mesh.sequence_ranks > 1
        wider = 2 * self.q_heads * self.columns if sharded and self.columns > 1 and not plain else 0
        gathered = self._gathered(c) if sharded and self.columns else 0
        return -(-gathered // c.tokens) + c.b * (3 * (values + 2 * keys) + wider) + plain

    def _in_plain_torch(self, c: CostContext) -> tuple[int, int]:
        """Return the bytes per token that plain torch saves, and that its backward holds besides; zeros for kernels."""
        if c.job.fused or not self.decays:
            return 0, 0
        K, V, C = self.head_dim, self.v_head_dim, PLAIN_CHUNK
        sizes = K, V, C, K * V / C, K * K / C
        saved, held = (
            round(4 * self.q_heads * sum(n * size for n, size in zip(times, sizes, strict=True)))
            for times in PLAIN[self.decays, self.columns > 1]
        )
        return saved, held

    def _gathered(self, c: CostContext) -> int:
        """Return the bytes of the states of all runs."""
        return (
            STATE_BYTES * c.sequences * _runs(c.layout, c.job.context) * c.mesh.sequence_ranks * self._summary_elements
        )

    def backward_buffers(self, c: CostContext) -> Buffers:
        """Return the gradients of the states of all runs, which the reduce-scatter sums, and a workspace.

        The workspace is the fp64 tree that computes these gradients (`longspan.mixers.combine`), or plain torch's if
        that is larger.
        """
        plain = c.tokens * self._in_plain_torch(c)[1]
        if c.mesh.sequence_ranks == 1:
            return Buffers(workspace=plain)
        gathered = self._gathered(c)
        return Buffers(comm=gathered, workspace=max(plain, (6 if self.columns == 1 else 3) * gathered))


@dataclass(frozen=True)
class ShortConv(Linear):
    """A short convolution between two gates, alone (LFM2): it has no heads and no state."""

    def saved(self, c: CostContext) -> int:
        """Return the input's three parts, the convolution's input and output, and the gated output."""
        return 6 * c.b * self.channels


@functools.lru_cache(maxsize=4096)
def _runs(layout: Layout, context: int) -> int:
    """Return the most runs of a rank: it sends as many states."""
    return max(len(layout.padded_spans(context, rank)) for rank in range(layout.size))
