"""Latent attention to the tokens that an indexer chooses (DeepSeek-V3.2), as `longspan.attn.indexed` computes it.

Queries stay on their rank. Index keys and latent vectors of all tokens are gathered to it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from longspan.core.cache import is_sharded, tokens_per_rank
from longspan.core.layout import Layout
from longspan.core.tile_sizes import INDEXED_TILE, rows_of_tile
from longspan.plan.job import CostContext, Job
from longspan.plan.layers.base import Buffers, Sent, TokenMixing

INDEX_BYTES = 4
"""Bytes of a score of the indexer, and of a chosen token's number."""


@dataclass(frozen=True)
class Indexed(TokenMixing):
    """Attention over latent vectors, which are keys and values of one head.

    Attributes:
        width: elements of a latent vector, rotary part included.
        rank: elements of it that are values; of chosen blocks, their number over all KV heads.
        top_k: tokens that each query attends to, at most.
        index_heads: heads of the indexer; 0 for a layer that attends to what a layer before it has chosen.
        index_dim: elements of an index key.
        beside: elements that are gathered and cached with an index key: of positions (Qwen4-Exp), or weights in a pool
            (GLM-5.3).
        block: tokens that a score is for.
        rate: tokens that a cached vector stands for.
    """

    width: int = 0
    rank: int = 0
    top_k: int = 0
    index_heads: int = 0
    index_dim: int = 0
    beside: int = 0
    block: int = 1
    rate: int = 1

    @property
    def name(self) -> str:
        return "indexed"

    @property
    def cached_per_token(self) -> int:
        """Elements of a latent vector and an index key."""
        return self.width + self.index_dim + self.beside

    @property
    def value_dim(self) -> int:
        """Elements of a head's partial output."""
        return self.rank

    def seen(self, context: int) -> int:
        return min(context, self.top_k)

    # Compute: 2 * (W + R) FLOPs per query head and chosen token, and 2 * (D + 1) per head of the indexer and token.

    @property
    def _of_chosen(self) -> float:
        return 2.0 * self.q_heads * (self.width + self.rank)

    @property
    def _of_scored(self) -> float:
        return 2.0 * self.index_heads * (self.index_dim + 1) / self.block

    def flops(self, job: Job, times: float) -> float:
        """Return the FLOPs, with `times` of attention; an indexer has no backward, which is two thirds of a step."""
        n = job.context
        scored, chosen = (float(n), float(self.seen(n))) if job.mode == "decode" else _pairs(((0, n),), self.top_k)
        once = times / (3.0 if job.mode == "train" else 1.0)
        return job.batch * (times * chosen * self._of_chosen + once * scored * self._of_scored)

    def max_flops(self, c: CostContext) -> float:
        n, mesh = c.job.context, c.mesh
        if c.job.mode == "decode":
            scored, chosen = n / (1 if self.block > 1 else mesh.ring), self.seen(n) / mesh.ring
        else:
            scored, chosen = _most_pairs(c.layout, n, self.top_k)
        return c.sequences * (chosen * self._of_chosen + scored * self._of_scored)

    def _scored(self, context: int) -> tuple[int, int]:
        """Return how many keys an indexer scores for a query, and the tensors of scores that it holds at a time."""
        return context, 2

    def _tile(self, c: CostContext) -> int:
        """Return the bytes of a tile: an indexer's scores; or what attention reads, with its backward.

        That holds elements, their gradient in fp32 and a product in it, 8 bytes of each score, and 24 of an index.
        """
        seen, (scored, held) = self.seen(c.job.context), self._scored(c.job.context)
        scores = c.sequences * scored * self.index_heads
        rows = min(c.tokens, rows_of_tile(INDEXED_TILE, seen * (self.width + 2 * self.q_heads), on_cpu=False))
        read = seen * (self.width * (4 + 2 * c.b) + 8 * self.q_heads + 24 * self.kv_heads)
        scores *= min(c.sequence_tokens, rows_of_tile(INDEXED_TILE, scores, on_cpu=False))
        return max(4 * held * scores, rows * read)

    # Communication.

    def sent(self, c: CostContext) -> list[Sent]:
        if c.mesh.sequence_ranks == 1:
            return []
        if c.job.mode == "decode":
            return self._few(c, 1, c.job.context + 1)
        if c.job.prompt_chunks:
            return self._prompt(c)
        forwards, backwards = c.job.layer_passes
        return [
            *self._gathered("all_gather", "sequence", c.tokens * (c.mesh.sequence_ranks - 1), c, forwards),
            *self._gathered("reduce_scatter", "sequence", c.tokens * (c.mesh.sequence_ranks - 1), c, backwards)[:1],
        ]

    def _gathered(self, op: str, axis: str, tokens: int, c: CostContext, calls: int = 1) -> list[Sent]:
        latents = Sent(op, axis, "latent vectors", tokens * self.width * c.b, calls)
        return [latents, Sent(op, axis, "index keys", tokens * (self.index_dim + self.beside) * c.b, calls)]

    def _prompt(self, c: CostContext) -> list[Sent]:
        """Return what the chunks of a prompt send: their tokens to all ranks, and those before them over the ring."""
        sent, past, chunk = list[Sent](), 0, c.job.prefill_chunk
        for tokens, count in c.job.prompt_chunks:
            for _ in range(count):
                if not is_sharded(c.layout, tokens):
                    sent += self._few(c, tokens, past + tokens)
                else:
                    mine = c.layout.local_length(tokens) * c.sequences
                    sent += self._of_chunk(c, mine * (c.mesh.sequence_ranks - 1))
                    if past >= self.rate and c.mesh.ring > 1:
                        held = max(tokens_per_rank(c.layout, past, chunk=chunk, rate=self.rate)) * c.sequences
                        sent += self._gathered("all_gather", "ring", held * (c.mesh.ring - 1), c)
                past += tokens
        return sent

    def _of_chunk(self, c: CostContext, tokens: int) -> list[Sent]:
        """Return what a rank sends of its new tokens, to so many tokens' places on other ranks."""
        return self._gathered("all_gather", "sequence", tokens, c)

    def _few(self, c: CostContext, tokens: int, length: int) -> list[Sent]:
        """Return what a few new tokens, the last of `length`, send over a ring: outputs in fp32, and scores in fp32 or,
        where a score is for several tokens, the index keys before them.
        """
        others, new = c.mesh.ring - 1, c.sequences * tokens
        if not others:
            return []
        outputs = Sent("all_gather", "ring", "O and log-sum-exp of all parts",
                       new * self.q_heads * (self.value_dim + 1) * 4 * others)  # fmt: skip
        if not self.index_heads:
            return [outputs]
        if self.block > 1:
            held = self._held(c, length - tokens) * c.sequences
            return [*self._gathered("all_gather", "ring", held * others, c)[1:], outputs]
        scores = new * self._held(c, length) * INDEX_BYTES * others
        return [Sent("all_gather", "ring", "scores of the indexer", scores), outputs]

    def _held(self, c: CostContext, length: int) -> int:
        """Return the vectors of the rank that holds most."""
        if c.job.mode == "decode":  # ranks stay balanced
            return -(-length // self.rate // c.mesh.ring)
        return max(tokens_per_rank(c.layout, length, chunk=c.job.prefill_chunk, rate=self.rate))

    # Memory.

    def cache_by_rank(self, c: CostContext, generated: int = 0, chunk: int | None = None, step: int = 0) -> list[int]:
        """Return the bytes of latent vectors and index keys of a ring rank's tokens, on each of its Ulysses ranks."""
        tokens = tokens_per_rank(c.layout, c.job.context, generated, 0, chunk or c.job.prefill_chunk, self.rate)
        each = c.sequences * self.cached_per_token * c.b
        return [n * each for n in tokens for _ in range(c.mesh.ulysses)]

    def saved(self, c: CostContext) -> int:
        """Return the bytes of queries, those over latent vectors, both outputs, all ranks' vectors and the choice."""
        heads = self.q_heads * (self.head_dim + self.width + self.rank + self.v_head_dim)
        chosen = INDEX_BYTES * self.seen(c.job.context) if self.index_heads else 0
        return c.b * (heads + c.mesh.sequence_ranks * self.width) + chosen

    def forward_buffers(self, c: CostContext) -> tuple[int, int, int]:
        queries = c.tokens * self.q_heads * (self.head_dim + self.width) * c.b
        return queries, c.tokens * self.q_heads * (self.rank + self.v_head_dim) * c.b, 0

    def ring_buffers(self, c: CostContext) -> Buffers:
        """Return the vectors of all ranks, received and in order, and a tile."""
        tokens = c.job.context * c.sequences
        return Buffers(2 * tokens * (self.width + self.index_dim) * c.b, self._tile(c))

    def backward_buffers(self, c: CostContext) -> Buffers:
        """Return the gradients of all ranks' vectors, which the reduce-scatter sums, those of queries, and a tile."""
        tokens = c.job.context * c.sequences
        queries = c.tokens * self.q_heads * (self.width + self.head_dim + self.rank) * c.b
        return Buffers(tokens * self.width * (4 + c.b), queries + self._tile(c))

    # Limits.

    def ulysses_refusal(self, job: Job) -> str | None:
        t = job.parallel.tensor
        if t > 1:
            return f"tensor={t}: latent attention with an indexer is sharded by tokens only; use `ulysses` or `ring`"
        return None


@dataclass(frozen=True)
class ChosenBlocks(Indexed):
    """Attention to chosen blocks of keys (MiniMax-M3, Qwen4-Exp); `width` are the keys and values of all KV heads."""

    @property
    def name(self) -> str:
        return "blocks"

    @property
    def value_dim(self) -> int:
        return self.v_head_dim

    @property
    def _of_chosen(self) -> float:
        return 2.0 * self.q_heads * (self.head_dim + self.v_head_dim)

    def saved(self, c: CostContext) -> int:
        heads = self.q_heads * (self.head_dim + 2 * self.v_head_dim) + self.width
        return c.b * (heads + c.mesh.sequence_ranks * self.width) + 8 * self.rank

    def forward_buffers(self, c: CostContext) -> tuple[int, int, int]:
        queries, out = self.q_heads * self.head_dim + self.width, self.q_heads * self.v_head_dim
        return c.tokens * queries * c.b, c.tokens * out * c.b, 0


@dataclass(frozen=True)
class Compressed(Indexed):
    """A window of tokens and compressed entries (DeepSeek-V4), all or the best `top_k`; keys are values of one head.

    `width` and `rank` are the head's; `rate` are the tokens that an entry stands for.

    Attributes:
        window_tokens: of the window.
        projected: elements per token of each of a compressor's two projections.
        index_projected: the same of the indexer's.
    """

    window_tokens: int = 0
    projected: int = 0
    index_projected: int = 0

    @property
    def name(self) -> str:
        return "compressed"

    def _scored(self, context: int) -> tuple[int, int]:
        return context // self.rate, 3

    def seen(self, context: int) -> int:
        entries = context // self.rate
        return min(context, self.window_tokens) + (min(entries, self.top_k) if self.index_heads else entries)

    def flops(self, job: Job, times: float) -> float:
        scored, attended = self._pairs_of(((0, job.context),))
        once = times / (3.0 if job.mode == "train" else 1.0)
        return job.batch * (times * attended * self._of_chosen + once * scored * self._of_scored)

    def max_flops(self, c: CostContext) -> float:
        pairs = [self._pairs_of(c.layout.spans(c.job.context, rank)) for rank in range(c.layout.size)]
        scored, attended = max(pairs)
        return c.sequences * (attended * self._of_chosen + scored * self._of_scored)

    def _pairs_of(self, spans: tuple[tuple[int, int], ...]) -> tuple[float, float]:
        """Return the pairs of queries in these spans with entries that they see, and with keys that they attend to."""
        seen, _ = _pairs(spans, 1)
        best = _pairs(spans, self.top_k * self.rate)[1] if self.index_heads else seen
        return seen / self.rate, _pairs(spans, self.window_tokens)[1] + best / self.rate

    def sent(self, c: CostContext) -> list[Sent]:
        others = c.tokens * (c.mesh.sequence_ranks - 1) * c.b
        if c.job.mode == "decode" or c.job.prompt_chunks:
            return super().sent(c)
        if not others:
            return []
        forwards, backwards = c.job.layer_passes
        return [
            *self._projections("all_gather", others, forwards),
            *self._projections("reduce_scatter", others, backwards),
        ]

    def _projections(self, op: str, others: int, calls: int) -> list[Sent]:
        widths = [("keys of the window", self.width, 1), ("projections of a compressor", self.projected, 2)]
        if op == "all_gather":
            widths.append(("index keys", self.index_projected, 2))
        return [Sent(op, "sequence", what, others * width, n * calls) for what, width, n in widths]

    def _of_chunk(self, c: CostContext, tokens: int) -> list[Sent]:
        return self._projections("all_gather", tokens * c.b, 1)

    def cache_by_rank(self, c: CostContext, generated: int = 0, chunk: int | None = None, step: int = 0) -> list[int]:
        """Return the bytes of a ring rank's entries, and on every rank those of the window and of open windows."""
        n, rate, streams = c.job.context + generated, self.rate, self.projected // self.width
        open_tokens = n - max(0, n // rate - (streams - 1)) * rate
        both = open_tokens * 2 * (self.projected + self.index_projected) + min(n, self.window_tokens - 1) * self.width
        entries = super().cache_by_rank(c, generated, chunk, step)
        return [held + c.sequences * both * c.b for held in entries]

    def saved(self, c: CostContext) -> int:
        """Return an estimate: what attention saves, and two projections of all tokens with their softmax in fp32."""
        chosen = INDEX_BYTES * self.top_k if self.index_heads else 0
        of_all = c.b * self.width + 2 * self.projected * (2 * c.b + 4)
        return c.b * 3 * self.q_heads * self.width + c.mesh.sequence_ranks * of_all + chosen

    def ring_buffers(self, c: CostContext) -> Buffers:
        elements = self.width + 2 * self.projected + 2 * self.index_projected
        return Buffers(2 * c.job.context * c.sequences * elements * c.b, self._tile(c))

    def backward_buffers(self, c: CostContext) -> Buffers:
        of_all = c.job.context * c.sequences * (self.width + 2 * self.projected) * (4 + c.b)
        return Buffers(of_all, c.tokens * 2 * self.q_heads * self.width * c.b + self._tile(c))


def _pairs(spans: tuple[tuple[int, int], ...], top_k: int) -> tuple[float, float]:
    """Return the (query, key) pairs of causal queries in these spans, and those within the best `top_k` of each."""
    every = sum((a + 1 + b) * (b - a) / 2 for a, b in spans)
    short = [(a, min(b, top_k)) for a, b in spans if a < top_k]  # queries that see all of their past
    whole = sum((a + 1 + b) * (b - a) / 2 for a, b in short)
    return every, whole + top_k * sum(max(0, b - max(a, top_k)) for a, b in spans)


@functools.lru_cache(maxsize=4096)
def _most_pairs(layout: Layout, n: int, top_k: int) -> tuple[float, float]:
    return max(_pairs(layout.spans(n, rank), top_k) for rank in range(layout.size))
