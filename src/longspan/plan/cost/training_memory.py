"""Memory of a training step: its peak candidates.

In order: the loss (all activations are saved, logits exist); the head's backward; the backward of the last layer, of
the one before it (activations are still saved, the last layer's gradients are in flight) and of the first (gradients of
all others exist); the gradients of embeddings and head, and the optimizer; the backward of a vision tower. Others, such
as a tiled norm, were below these for every model, mesh and option that was tried.

Letters: b bytes per element, d hidden size, t tensor ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

from longspan.core.tile_sizes import HEAD_ROWS, NARROW_PARTS, head_tile
from longspan.plan.cost.saved import (
    freed_per_token,
    mlp_backward_bytes,
    norm_bytes,
    recomputed_per_token,
    saved_in_a_step,
)
from longspan.plan.cost.vision import embedding_bytes, in_block_backward, pixel_bytes, saved_by_tower
from longspan.plan.cost.weights import (
    always_gathered,
    gathered_bytes,
    gathers,
    layer_gradient,
    outer_groups,
    own_head,
    shard_bytes,
    shard_elements,
    tower_elements,
    trained,
    trained_by_all_layers,
    trained_elements,
    trained_elements_of,
)
from longspan.plan.job import CostContext
from longspan.plan.layers.base import Parameter, SavedActivations
from longspan.plan.shape import LayerShape

Peak = dict[str, int]
"""Bytes by item, at one time in a step; items at rest are added to all of them."""


def training_peaks(c: CostContext, once: bool) -> list[Peak]:
    """Return the peak candidates; `once`: whether gradients of all micro-batches are summed over the ranks once."""
    step = _Step(c, once)
    at_loss, last_layer, before_it, first_layer = (saved + step.rotary_tables for saved in saved_in_a_step(c))
    held = pixel_bytes(c) + embedding_bytes(c) + saved_by_tower(c)  # until the tower's backward, which is the last
    peaks = [
        *step.loss(at_loss),
        *step.layer_backward(last_layer, step.in_last_layer()),
        *step.layer_backward(before_it, step.in_layer_before()),
        *step.layer_backward(first_layer, step.in_first_layer()),
        *step.outside_layers(),
        *step.tower_backward(),
    ]
    return [{**peak, "vision": held + peak.get("vision", 0)} for peak in peaks]


class _Step:
    """The sizes that several peak candidates share, and the candidates.

    Gradients of a layer are in the compute dtype in its backward, then flat in fp32 for the reduce-scatter, then a
    shard. An untied head is its own FSDP group: it is gathered together with the last layer, and scattered before that
    layer's backward, in which the sent buffer is still held. A tied head's gradient stays to the end.
    """

    def __init__(self, c: CostContext, once: bool) -> None:
        model, t = c.model, c.mesh.tensor
        self.c, self.model = c, model
        self.layers = [layer for layer, _ in model.layer_kinds]
        self.ranks, self.sharded, self.to_host = c.weight_ranks, gathers(c), c.on_host
        # Trained elements of the largest layer, of the head, and of the head's own FSDP group (0 if it is tied or not
        # sharded).
        self.largest = max(trained_elements_of(layer, c) for layer in self.layers) // t
        largest_shard = max(layer_gradient(layer, c) for layer in self.layers)
        self.head = model.vocab * c.d // t * model.head.trained
        self.head_apart = own_head(model) > 0 and self.sharded
        outer = dict(outer_groups(model)).get("final norm and head", ())
        self.own_head = sum(p.numel for p in trained(outer)) // t * self.head_apart
        # Bytes of hidden states, or of their gradient.
        self.hidden = c.tokens * c.d * c.b // c.hidden_shards
        # Bytes per element of the reduce-scatter's flat fp32 input.
        self.flat = 4 * self.sharded
        # Bytes of gradients at rest on the device; and of earlier micro-batches', not sharded until they are summed.
        self.at_rest = 0 if self.to_host else 4 * trained_elements(c)
        untrained = 0 if c.job.pictures else model.tower_params
        accumulated = 4 * ((trained_by_all_layers(c) - untrained) // t) if once else self.at_rest
        self.earlier = accumulated if c.job.batch > c.mesh.data else 0
        # Bytes of the gradients of a vision tower, which come last.
        self.of_tower = 4 * tower_elements(c) if c.job.pictures and not (self.to_host or self.earlier) else 0
        # Bytes of cast weights: from the host, a layer's fp32 shard before it is cast; from 4 bits, a matrix.
        self.casts = 0
        if self.to_host:
            self.casts = max(shard_bytes(layer.parameters, self.ranks, 4, t) for layer in self.layers)
        self.casts += max(_unpacked(layer.parameters) for layer in self.layers) * c.b
        # Bytes of a layer's gradients in the compute dtype, and of a tied head's, which stay.
        self.layer_gradients = (self.largest + (0 if self.head_apart else self.head)) * c.b
        # Bytes of a layer's gradient shard, unless earlier micro-batches have made it.
        self.shard = 0 if self.earlier else largest_shard
        # Cosines and sines of the rank's positions, which all layers share.
        dims = (model.positions.dims or 0) if model.positions.rotary else 0
        self.rotary_tables = SavedActivations(hidden=2 * dims * c.tokens * c.b)
        # Of whichever layer needs most in its backward: bytes of a recomputed all-to-all, beyond what the layer saves
        # (0 if none is recomputed), of the MLP and its sums of gradients, and of attention.
        self.exchanged = max(_recomputed_exchange(layer, c) for layer in self.layers)
        if self.exchanged:
            self.exchanged -= max(recomputed_per_token(layer, c).total for layer in self.layers) * c.tokens
        self.mlp, self.mlp_sums = max((mlp_backward_bytes(layer, c) for layer in self.layers), key=sum)
        buffers = max((layer.mixer.backward_buffers(c) for layer in self.layers), key=lambda each: each.total)
        self.attention = {"comm_buffers": buffers.comm, "attention_workspace": buffers.workspace}
        # Saved activations that are free when the attention is reached.
        self.before_attention = (
            min((freed_per_token(layer, c) for layer in self.layers), key=lambda each: each.total) * c.tokens
        )

    def gathered(self, layers: int, heads: int = 0) -> int:
        """Return the bytes of so many gathered layers, and times the head's own group."""
        return gathered_bytes(self.c, layers, heads)

    # Loss and head.

    def loss(self, at_loss: SavedActivations) -> Iterator[Peak]:
        """Yield the peaks in the loss, and in the head's backward."""
        c = self.c
        final_norm = SavedActivations(hidden=c.tokens * (norm_bytes(c) + c.d * c.b))
        in_loss = self.casts + (self.gathered(0, heads=2) if self.head_apart else self.gathered(1))
        in_head = self.casts + self.gathered(1, heads=1)
        for items, gathered in zip(self._tiled_loss(), (in_loss, in_head), strict=True):
            gradients = self.earlier + items["gradients"]
            saved = (at_loss + final_norm).items()
            yield {**saved, **items, "gradients": gradients, "gathered_weights": gathered}

    def _tiled_loss(self) -> list[Peak]:
        """Return the forward and the backward of `longspan.losses.cross_entropy`.

        From the forward on there are the gradients of the head's input and, in fp32, of its weights; the backward casts
        them.
        """
        c = self.c
        # In fp32 one buffer is logits, then probabilities, then gradient. A cast makes another, autograd a third.
        rows, vocab = head_tile(self.model.vocab, on_cpu=False), -(-self.model.vocab // self.c.mesh.tensor)
        tile = min(c.tokens, rows) * vocab * (4 if c.b == 4 else 8)
        if c.b == 2:  # twice the rows, cast part by part
            narrow = min(c.tokens, 2 * rows)
            tile = (narrow * 2 + -(-narrow // NARROW_PARTS) * 4) * vocab
        cast = self.head * c.b if c.b == 2 else 0
        more = min(cast, HEAD_ROWS * c.d * c.b)
        return [
            {"logits": tile, "hidden": self.hidden, "gradients": self.head * 4 + more},
            {"hidden": self.hidden, "gradients": self.head * 4 + cast},
        ]

    # A layer's backward.

    def in_last_layer(self) -> dict[str, int]:
        """Return the bytes of gradients and gathered weights in the last layer's backward: the head's are in flight."""
        head = self.own_head * 4 + (0 if self.earlier else self.own_head * 4 // self.ranks)
        return {
            "gradients": self.earlier + self.layer_gradients + head,
            "gathered_weights": self.casts + self.gathered(2),
        }

    def in_layer_before(self) -> dict[str, int]:
        """Return the same one layer earlier: the last layer's gradients are in flight."""
        return {
            "gradients": self.earlier + self.layer_gradients + self.largest * self.flat + self.shard,
            "gathered_weights": self.casts + self.gathered(2),
        }

    def in_first_layer(self) -> dict[str, int]:
        """Return the same in the first layer: all other gradients are at rest, but for an untied embedding's."""
        embedding = 0
        if not (self.earlier or self.to_host):
            embedding = 4 * sum(
                shard_elements(trained(parameters), self.ranks, self.c.mesh.tensor)
                for what, parameters in outer_groups(self.model)
                if what in ("the embedding", "positions")
            )
        own = self.shard if self.sharded and not self.to_host else 0
        in_flight = self.layer_gradients * self.sharded + self.largest * self.flat
        return {
            "gradients": self.at_rest - self.of_tower - embedding - own + in_flight,
            "gathered_weights": self.casts * self.to_host + self.gathered(1),
        }

    def layer_backward(self, saved: SavedActivations, rest: dict[str, int]) -> Iterator[Peak]:
        """Yield the peaks in a layer's backward: its recomputed all-to-all, its MLP, its attention.

        `rest`: gradients and gathered weights.
        """
        items = {**saved.items(), **rest}
        if self.exchanged:  # the layer has not saved anything yet but its normalised input
            yield {**items, "attention_workspace": self.exchanged, "hidden": 2 * self.hidden}
        gradients = rest["gradients"] + self.mlp_sums
        yield {**items, "gradients": gradients, "mlp": self.mlp, "hidden": 2 * self.hidden}
        in_attention = (saved - self.before_attention).items()
        yield {**in_attention, **rest, **self.attention, "hidden": self.hidden}

    # Outside the layers.

    def outside_layers(self) -> Iterator[Peak]:
        """Yield the peaks in the embeddings' backward and the optimizer."""
        model, c, t = self.model, self.c, self.c.mesh.tensor
        shard = trained_elements(c)
        # The first layer's gradients may still be in flight; a tied table waits for them.
        first_layer = 0 if model.tied else self.largest
        in_flight = (_trained(model.root) // t - self.own_head + first_layer) * self.flat
        yield {"gradients": self.at_rest + self.head * c.b * self.sharded + in_flight}
        if model.tied:  # the table's two gradients and their sum; an fp32 head's gradient becomes the sum
            of_root = shard_elements(trained(model.root), self.ranks, t)
            in_layers = 0 if self.to_host else 4 * (shard - of_root) - self.of_tower
            tables = (2 if c.b == 4 else 3) * self.head * c.b
            gradients = in_layers + tables + self.largest * self.flat
            yield {"gradients": gradients, "gathered_weights": self.gathered(0)}

    def tower_backward(self) -> Iterator[Peak]:
        """Yield the peak in the backward of a vision tower's last block: all other gradients are at rest."""
        tower, c = self.model.tower, self.c
        if tower is None or not c.job.pictures:
            return
        block = sum(p.numel for p in tower.block)
        gradients = self.at_rest - self.of_tower + block * (c.b * self.sharded + self.flat)
        gathered = (always_gathered(self.model) + 2 * block) * c.b * self.sharded
        yield {"gradients": gradients, "gathered_weights": self.casts + gathered, "vision": in_block_backward(c)}


def _trained(parameters: tuple[Parameter, ...]) -> int:
    return sum(p.numel for p in trained(parameters))


def _unpacked(parameters: tuple[Parameter, ...]) -> int:
    """Return the elements of the largest packed weight, which a product unpacks; 0 for none."""
    return max((p.numel for p in parameters if p.packed), default=0)


def _recomputed_exchange(layer: LayerShape, c: CostContext) -> int:
    """Return the bytes of a checkpointed layer's recomputed all-to-all, the rank's q, k and v included; 0 if none is.

    The larger of sending q, k and v (sent and received buffer), and of receiving the output (what arrived, the output
    in head layout, as received, and in token layout).
    """
    if c.mesh.ulysses == 1 or c.job.memory.checkpointing == "none":
        return 0
    (qkv, out, packed), n = layer.mixer.forward_buffers(c), layer.mixer.chunks(c)
    receiving = packed + 3 * out if n == 1 else -(-(packed + 2 * out) // n) + out
    return max(qkv + -(-2 * packed // n), qkv + receiving * c.job.memory.recomputes_layers)
