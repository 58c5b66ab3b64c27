"""What a layer keeps for its backward, and what a ring holds while it computes: bytes, tensor by tensor.

It follows transformers' Llama layer and `longspan.attention`; tests compare what a layer keeps with what autograd
saves. Experts and linear attention are estimates.

Letters: b bytes per element, d hidden size. Heads: q, kv and out are the elements of one token's queries, of its keys
and values, and of its output on the rank that computes most.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from longspan.plan.cost.communication import heads_of, impl_of, lap_of, local_batch, local_tokens

if TYPE_CHECKING:
    from longspan.plan.job import Job, Mesh
    from longspan.plan.models.shapes import LayerShape, ModelShape


@dataclass(frozen=True)
class Scale:
    """What all items are made of, for one job on one mesh."""

    tokens: int
    b: int
    d: int
    on_cpu: bool
    hidden_shards: int


@dataclass(frozen=True)
class Kept:
    """Bytes that layers keep for their backward, by kind."""

    hidden: int = 0
    attention: int = 0
    mlp: int = 0

    def __add__(self, other: Kept) -> Kept:
        return Kept(self.hidden + other.hidden, self.attention + other.attention, self.mlp + other.mlp)

    def __mul__(self, times: int) -> Kept:
        return Kept(self.hidden * times, self.attention * times, self.mlp * times)

    @property
    def total(self) -> int:
        """All kinds together."""
        return self.hidden + self.attention + self.mlp

    def items(self) -> dict[str, int]:
        """Under the names of `ITEMS`."""
        return {
            "activations_hidden": self.hidden,
            "activations_attention": self.attention,
            "activations_mlp": self.mlp,
        }


@dataclass(frozen=True)
class _Heads:
    """Elements of a token's queries, keys and values, and output on the rank with most heads; its numbers of heads."""

    q: int
    kv: int
    out: int
    q_heads: int
    kv_heads: int

    @classmethod
    def of(cls, layer: LayerShape, mesh: Mesh) -> _Heads:
        """Those of one softmax layer."""
        shares = heads_of(layer.q_heads, layer.kv_heads, mesh.tensor, mesh.ulysses)
        mine = max(shares, key=lambda share: (share.q_heads, share.kv_heads))
        kv = mine.kv_heads * (layer.head_dim + layer.v_head_dim)
        return cls(mine.q_heads * layer.head_dim, kv, mine.q_heads * layer.v_head_dim, mine.q_heads, mine.kv_heads)


def norm_bytes(s: Scale, features: int, autocast: bool) -> int:
    """Bytes per token that an RMSNorm keeps: its input in fp32, one number, and the normalised input."""
    return features * 4 + 4 + features * (4 if autocast else s.b)


def kept_per_token(layer: LayerShape, job: Job, mesh: Mesh, s: Scale, autocast: bool) -> Kept:
    """Bytes per token of a rank that one layer keeps for its backward."""
    before, behind = _beside(layer, s, autocast)
    attention = _attention_kept(layer, mesh, s)
    q_norm = next((p for p in layer.parameters if "q_norm" in p.name), None)
    if q_norm is not None:
        heads = (layer.q_heads + layer.kv_heads) // mesh.tensor
        # A norm of each head (Qwen3) keeps a number a head, a norm of all of Q and one of all of K (OLMo-2) one each.
        numbers = heads if q_norm.numel == layer.head_dim else 2
        attention += norm_bytes(s, heads * layer.head_dim, autocast) + 4 * (numbers - 1)
    return Kept((before + behind) // s.hidden_shards, attention, _mlp_kept(layer, job, s) // mesh.tensor)


def gone_per_token(layer: LayerShape, job: Job, mesh: Mesh, s: Scale, autocast: bool) -> Kept:
    """Of `kept_per_token`, what is gone when the backward reaches the attention itself: all that comes behind it."""
    if layer.kind == "linear":
        return Kept()
    _, behind = _beside(layer, s, autocast)
    projected = s.b * layer.q_heads * layer.v_head_dim // mesh.tensor * (mesh.sequence > 1)
    return Kept(behind // s.hidden_shards, projected, _mlp_kept(layer, job, s) // mesh.tensor)


def _beside(layer: LayerShape, s: Scale, autocast: bool) -> tuple[int, int]:
    """What norms keep, and products take in, before the attention and behind it."""
    norms = 2 if any("post_feedforward" in p.name for p in layer.parameters) else 1
    # A linear layer keeps its input: one tensor for Q, K and V and one for gate and up; autocast makes five.
    q_k_v, gate_up = (3, 2) if autocast else (1, 1)
    normed = norms * norm_bytes(s, s.d, autocast)
    return normed + q_k_v * s.b * s.d, normed + gate_up * s.b * s.d


def _attention_kept(layer: LayerShape, mesh: Mesh, s: Scale) -> int:
    """Q, K, V, the output as computed and as it goes into the projection, and a log-sum-exp per head.

    Per token of the rank: the heads of the rank with most, over the tokens of its Ulysses group.
    """
    if layer.kind == "linear":  # an estimate: what goes in and out, and the gates
        return s.b * 3 * (layer.q_heads * layer.v_head_dim + 2 * layer.kv_heads * layer.head_dim) // mesh.tensor
    u, heads = mesh.ulysses, _Heads.of(layer, mesh)
    kept = u * (s.b * (heads.q + heads.kv + heads.out) + 4 * heads.q_heads)
    if s.on_cpu if mesh.ring == 1 else u > 1:
        # Laid heads-first for the CPU's kernel; of a ring: packed as a message, beside what the exchange brought.
        kept += u * s.b * heads.kv
    if mesh.sequence > 1:
        kept += s.b * layer.q_heads * layer.v_head_dim // mesh.tensor
    return kept


def _mlp_kept(layer: LayerShape, job: Job, s: Scale) -> int:
    if job.tiled_mlp > 1:
        return 0  # computed again, a tile at a time
    gated = 4 if layer.gated else 2
    routed = layer.experts_per_token * (gated * s.b * layer.expert_ffn + 2 * s.b * s.d) if layer.experts else 0
    return gated * s.b * (layer.ffn + layer.shared_ffn) + routed


# ---------------------------------------------------------------------------------------------------------------------
# A ring while it computes.


@dataclass(frozen=True)
class Buffers:
    """Bytes of a ring beside what its layer keeps: blocks on their way, and results under way."""

    comm: int = 0
    workspace: int = 0

    def items(self) -> dict[str, int]:
        """Under the names of `longspan.plan.cost.memory.ITEMS`."""
        return {"comm_buffers": self.comm, "attention_workspace": self.workspace}


def ring_buffers(model: ModelShape, job: Job, mesh: Mesh, s: Scale, *, backward: bool) -> Buffers:
    """Of the softmax layer that needs most, at its worst moment; nothing without a ring.

    On the rank whose block is one run of tokens: the tile on its diagonal is the whole block.
    """
    if mesh.ring == 1 or job.mode == "decode":
        return Buffers()
    layers = [layer for layer, _ in model.layer_kinds if layer.kind != "linear"]
    each = [_of_a_ring(layer, job, mesh, s, backward) for layer in layers]
    return max(each, key=lambda buffers: buffers.comm + buffers.workspace, default=Buffers())


def _of_a_ring(layer: LayerShape, job: Job, mesh: Mesh, s: Scale, backward: bool) -> Buffers:
    heads = _Heads.of(layer, mesh)
    tokens = local_tokens(job, mesh) * local_batch(job, mesh) * mesh.ulysses
    block, gradient = s.b * heads.kv * tokens, 4 * heads.kv * tokens
    of_a_tile = 4 if s.on_cpu else s.b  # bytes per element of what a tile takes and gives: a CPU's are fp32
    routes = lap_of(layer, job, mesh).routes
    gathered = impl_of(layer, job, mesh, heads.kv_heads) == "allgather"
    if not backward:
        sums = tokens * 4 * (heads.out + heads.q_heads)
        copies = tokens * 4 * (heads.q + heads.kv) * (s.b < of_a_tile)
        tile = tokens * heads.out * (of_a_tile + 4)  # a tile's output, and its weighted copy in fp32
        # My own block as a message, the one at hand and the one that comes; or all of them.
        blocks = 1 + (mesh.ring if gathered else min(routes.rounds, 2))
        return Buffers(blocks * block, sums + copies + tile)
    # The output's gradient; dQ, and dK and dV of my own block, in fp32.
    sums = tokens * (s.b * heads.out + 4 * (heads.q + heads.kv))
    copies = tokens * 4 * (heads.q + heads.kv + 2 * heads.out) * (s.b < of_a_tile)
    tile = tokens * of_a_tile * (heads.q + heads.kv)
    if gathered:
        parts = mesh.ring * block + (mesh.ring - 1) * gradient
        # All gradients are laid side by side to be reduced, and gloo makes a copy of what it is given.
        together = mesh.ring * gradient * (2 if s.on_cpu else 1)
        moments = [Buffers(parts, sums + copies + tile), Buffers(parts + together, sums)]
    else:
        ways, rounds = any(routes.right) + any(routes.left), routes.rounds
        # (blocks, gradients) while a tile is computed: at first mine, then one that has come and I add to; from round
        # 2 on a gradient comes and one leaves besides. At last one leaves and mine has come home.
        held = [(1, 0), (min(rounds, 2), 1)] + [(1 + (rounds > 2), 3)] * (rounds > 1)
        moments = [Buffers(ways * (n * block + m * gradient), sums + copies + tile) for n, m in held]
        moments.append(Buffers(ways * (block + 2 * gradient), sums))
    return max(moments, key=lambda buffers: buffers.comm + buffers.workspace)
