"""Memory of a training step: its peak candidates.

In order: the loss (all activations are saved, logits exist); the head's backward; the backward of the last layer, of
the one before it (activations are still saved, the last layer's gradients are in flight) and of the first (gradients of
all others exist); the gradients of embeddings and head; the optimizer; the sum of gradients if weights are replicated.

Letters: b bytes per element, d hidden size, t tensor ranks.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from longspan.core.tile_sizes import GRADIENT_BUCKET, HEAD_ROWS, LOSS_TILE, NARROW_PARTS, head_tile
from longspan.plan.cost.saved import (
    autocasts,
    checkpoint_per_token,
    freed_per_token,
    mlp_backward_bytes,
    mlp_gradient_sum_bytes,
    mlp_norm_backward_bytes,
    norm_backward_bytes,
    norm_bytes,
    recomputed_per_token,
    saved_in_a_step,
    saved_per_token,
)
from longspan.plan.cost.weights import (
    elements_at_rest,
    gathered_bytes,
    gathers,
    on_host,
    outer_groups,
    own_head,
    shard_elements,
    weight_ranks,
)
from longspan.plan.layers import SavedActivations
from longspan.plan.layers.base import offloads

if TYPE_CHECKING:
    from collections.abc import Iterator

    from longspan.plan.job import Job, Mesh
    from longspan.plan.layers import CostContext
    from longspan.plan.models.shape import LayerShape, ModelShape

Peak = dict[str, int]
"""Bytes by item, at one time in a step; items at rest are added to all of them."""


def training_peaks(model: ModelShape, job: Job, mesh: Mesh, c: CostContext, once: bool) -> list[Peak]:
    """Return the peak candidates; `once`: whether gradients of all micro-batches are summed over the ranks once."""
    step = _Step(model, job, mesh, c, once)
    at_loss, last_layer, before_it, first_layer = (
        saved + step.rotary_tables for saved in saved_in_a_step(model, job, mesh, c)
    )
    at_loss -= step.on_disk
    return [
        *step.loss(at_loss),
        *step.layer_backward(last_layer, **step.gradients_of_last_layer),
        *step.layer_backward(before_it, **step.gradients_of_layer_before),
        *step.layer_backward(first_layer, **step.gradients_of_first_layer),
        *step.outside_layers(at_loss),
    ]


@dataclass(frozen=True)
class _Step:
    """The sizes that several peak candidates share, and the candidates.

    Gradients of a layer are in the compute dtype in its backward, then flat in fp32 for the reduce-scatter, then a
    shard. An untied head is its own FSDP group: it is gathered together with the last layer, and scattered before that
    layer's backward, in which the sent buffer is still held. A tied head's gradient stays to the end.
    """

    model: ModelShape
    job: Job
    mesh: Mesh
    c: CostContext
    once: bool

    # Sizes.

    @cached_property
    def layers(self) -> list[LayerShape]:
        """One of each kind."""
        return [layer for layer, _ in self.model.layer_kinds]

    @cached_property
    def sharded(self) -> bool:
        """Whether weights are gathered, and gradients scattered."""
        return gathers(self.job, self.mesh)

    @cached_property
    def to_host(self) -> bool:
        """Whether gradients go to the host's memory."""
        return on_host(self.job, self.c)

    @cached_property
    def ranks(self) -> int:
        """Ranks over which weights are sharded."""
        return weight_ranks(self.job, self.mesh)

    @cached_property
    def at_rest(self) -> int:
        """Bytes of all gradients at rest on the device."""
        return 0 if self.to_host else 4 * elements_at_rest(self.model, self.job, self.mesh)

    @cached_property
    def earlier(self) -> int:
        """Bytes of the gradients of earlier micro-batches; not sharded until they are summed."""
        if self.job.batch <= self.mesh.data:
            return 0
        return self.model.params // self.mesh.tensor * 4 if self.once else self.at_rest

    @cached_property
    def largest(self) -> int:
        """Elements of the largest layer."""
        return max(layer.params for layer in self.layers) // self.mesh.tensor

    @cached_property
    def head(self) -> int:
        """Elements of the head."""
        return self.model.vocab * self.c.d // self.mesh.tensor

    @cached_property
    def own_head(self) -> int:
        """Elements of the head's own FSDP group; 0 if it is tied or not sharded."""
        return own_head(self.model) // self.mesh.tensor * self.sharded

    @cached_property
    def hidden(self) -> int:
        """Bytes of hidden states, or of their gradient."""
        return self.c.tokens * self.c.d * (4 if autocasts(self.job) else self.c.b) // self.c.hidden_shards

    @cached_property
    def flat(self) -> int:
        """Bytes per element of the reduce-scatter's flat fp32 input, which gloo copies."""
        return (8 if self.c.on_cpu else 4) if self.sharded else 0

    @cached_property
    def casts(self) -> int:
        """Bytes of cast weights: autocast's bf16 copies; from the host, a layer's fp32 shard before it is cast."""
        bf16 = 2 * _matrix_elements(self.model) // self.mesh.tensor if autocasts(self.job) else 0
        return bf16 + (self.largest * 4 // self.ranks if self.to_host else 0)

    @cached_property
    def rotary_tables(self) -> SavedActivations:
        """Cosines and sines of the rank's positions, which all layers share."""
        dims = (self.model.positions.dims or 0) if self.model.positions.rotary else 0
        return SavedActivations(hidden=2 * dims * self.c.tokens * (4 if autocasts(self.job) else self.c.b))

    @cached_property
    def on_disk(self) -> SavedActivations:
        """The part of a layer's checkpoint that a CPU, which does not read ahead, has on disk until the attention's
        own backward: all that attention saves but its output.
        """
        job, mesh, c = self.job, self.mesh, self.c
        if not (c.on_cpu and offloads(job, c) and job.memory.checkpointing == "save_attention"):
            return SavedActivations()
        saved = min(checkpoint_per_token(layer, job, mesh, c).attention for layer in self.layers)
        return SavedActivations(attention=max(0, saved - self._freed.attention) * c.tokens)

    @cached_property
    def _freed(self) -> SavedActivations:
        freed = (freed_per_token(layer, self.job, self.mesh, self.c) for layer in self.layers)
        return min(freed, key=lambda saved: saved.total)

    def gathered(self, layers: int, heads: int = 0) -> int:
        """Return the bytes of so many gathered layers, and times the head's own group."""
        return gathered_bytes(self.model, self.job, self.mesh, layers, heads)

    # Loss and head.

    def loss(self, at_loss: SavedActivations) -> Iterator[Peak]:
        """Yield the peaks in the loss, and in the head's backward."""
        c = self.c
        final_norm = SavedActivations(hidden=c.tokens * (norm_bytes(self.job, c) + c.d * c.b))
        in_loss = self.casts + (self.gathered(0, heads=2) if self.own_head else self.gathered(1))
        in_head = self.casts + self.gathered(1, heads=1)
        peaks = self._tiled_loss() if self.job.tiled_loss else self._whole_logits()
        for items, gathered in zip(peaks, (in_loss, in_head), strict=True):
            gradients = self.earlier + items["gradients"]
            yield {
                **(at_loss + final_norm).items(), **items, "gradients": gradients, "gathered_weights": gathered
            }  # fmt: skip

    def _whole_logits(self) -> list[Peak]:
        """Return the loss's backward: logits, their gradient, an fp32 tile (of bf16 logits: cast, then computed); and
        the head's: logits, the gradients of its input and of its weights.
        """
        c = self.c
        logits = c.tokens * -(-self.model.vocab // self.mesh.tensor) * c.b
        tile = min(logits // c.b * 4, 4 * LOSS_TILE[c.on_cpu]) * (2 if c.b == 2 else 1)
        return [
            {"logits": 2 * logits + tile, "gradients": 0},
            {"logits": logits, "hidden": self.hidden, "gradients": self.head * (c.b if self.sharded else 4)},
        ]

    def _tiled_loss(self) -> list[Peak]:
        """Return the forward and the backward of `longspan.losses.cross_entropy`.

        From the forward on there are the gradients of the head's input and, in fp32, of its weights; the backward casts
        them.
        """
        c, autocast = self.c, autocasts(self.job)
        # In fp32 one buffer is logits, then probabilities, then gradient. A cast makes another, autograd a third.
        rows, vocab = head_tile(self.model.vocab, c.on_cpu), -(-self.model.vocab // self.mesh.tensor)
        tile = min(c.tokens, rows) * vocab * (4 if c.b == 4 else 8)
        if c.b == 2 and not autocast:  # twice the rows, cast part by part
            narrow = min(c.tokens, 2 * rows)
            tile = (narrow * 2 + -(-narrow // NARROW_PARTS) * 4) * vocab
        cast = self.head * c.b if c.b == 2 and not autocast else 0
        more = self.head * (4 + 2) if autocast else min(cast, HEAD_ROWS * c.d * c.b)
        return [
            {"logits": tile, "hidden": self.hidden, "gradients": self.head * 4 + more},
            {"hidden": self.hidden, "gradients": self.head * 4 + cast},
        ]

    # A layer's backward.

    @cached_property
    def _layer_gradients(self) -> int:
        """Bytes of a layer's gradients in the compute dtype, and of a tied head's, which stay."""
        return (self.largest + (0 if self.own_head else self.head)) * self.c.b

    @cached_property
    def _scattered(self) -> int:
        """Bytes of a layer's gradient shard, unless earlier micro-batches have made it."""
        return 0 if self.earlier else self.largest * 4 // self.ranks

    @property
    def gradients_of_last_layer(self) -> dict[str, int]:
        """Gradients and gathered weights in the last layer's backward."""
        sent_head = self.own_head * 4 + (0 if self.earlier else self.own_head * 4 // self.ranks)
        return {
            "gradients": self.earlier + self._layer_gradients + sent_head,
            "gathered": self.casts + self.gathered(2),
        }

    @property
    def gradients_of_layer_before(self) -> dict[str, int]:
        """The same one layer earlier: the last layer's saved activations are freed, its gradients are in flight."""
        in_flight = self.largest * self.flat + self._scattered
        return {
            "gradients": self.earlier + self._layer_gradients + in_flight,
            "gathered": self.casts + self.gathered(2),
        }

    @property
    def gradients_of_first_layer(self) -> dict[str, int]:
        """The same in the first layer: all other gradients are at rest, but for those of an untied embedding."""
        embedding = 0
        if not (self.earlier or self.to_host):
            embedding = 4 * sum(
                shard_elements(parameters, self.ranks, self.mesh.tensor)
                for what, parameters in outer_groups(self.model)
                if what in ("the embedding", "positions")
            )
        own = self._scattered if self.sharded and not self.to_host else 0
        in_flight = self._layer_gradients * self.sharded + self.largest * self.flat
        return {
            "gradients": self.at_rest - embedding - own + in_flight,
            "gathered": self.casts * self.to_host + self.gathered(1),
        }

    def layer_backward(self, saved: SavedActivations, *, gradients: int, gathered: int) -> Iterator[Peak]:
        """Yield the peaks in a layer's backward: its recomputed all-to-all, its MLP, its norm, its attention."""
        job, mesh, c = self.job, self.mesh, self.c
        rest = {"gradients": gradients, "gathered_weights": gathered}
        exchanged = max(_recomputed_exchange(layer, job, mesh, c) for layer in self.layers)
        if exchanged:  # the layer has not saved anything yet but its normalised input
            recomputed = max(recomputed_per_token(layer, job, mesh, c).total for layer in self.layers) * c.tokens
            yield {**saved.items(), **rest, "attention_workspace": exchanged - recomputed, "hidden": 2 * self.hidden}
        in_mlp = saved - self.on_disk
        mlp, sums = self._mlp_backward
        yield {
            **in_mlp.items(), **rest, "gradients": gradients + sums, "mlp": mlp, "hidden": 2 * self.hidden
        }  # fmt: skip
        if job.memory.tiled_norms:  # the MLP's backward is over
            of_mlp = min(saved_per_token(layer, job, mesh, c).mlp for layer in self.layers) * c.tokens
            in_norm = in_mlp - SavedActivations(mlp=of_mlp)
            yield {**in_norm.items(), **rest, "hidden": 2 * self.hidden + norm_backward_bytes(job, c)}
        buffers = max((layer.mixer.backward_buffers(job, mesh, c) for layer in self.layers), key=lambda b: b.total)
        in_attention = saved - self._freed * c.tokens
        yield {**in_attention.items(), **rest, **buffers.items(), "hidden": self.hidden}

    @cached_property
    def _mlp_backward(self) -> tuple[int, int]:
        """Bytes of the MLP that needs most, and of the sums of its weights' gradients."""
        job, mesh, c = self.job, self.mesh, self.c
        of_layers = [
            (
                mlp_backward_bytes(layer, job, mesh, c) + mlp_norm_backward_bytes(layer, job, mesh, c),
                mlp_gradient_sum_bytes(layer, job, mesh, c),
            )
            for layer in self.layers
        ]
        return max(of_layers, key=sum)

    # Outside the layers.

    def outside_layers(self, at_loss: SavedActivations) -> Iterator[Peak]:
        """Yield the peaks in the embeddings' backward, the optimizer, the head's reduce-scatter, the gradient sum."""
        model, job, mesh, c = self.model, self.job, self.mesh, self.c
        t, shard = mesh.tensor, elements_at_rest(model, job, mesh)
        # The first layer's gradients may still be in flight; a tied table waits for them.
        first_layer = 0 if model.tied else self.largest
        in_flight = (model.root_params // t - self.own_head + first_layer) * self.flat
        yield {"gradients": self.at_rest + self.head * c.b * self.sharded + in_flight}
        # A CPU's AdamW makes two fp32 temporaries of one shard.
        yield {"gradients": self.at_rest, "optimizer": 8 * self._largest_shard if c.on_cpu else 0}
        if self.own_head:  # in flight while the last layer is gathered
            gradients = self.earlier + self.own_head * max(self.flat, 4 + c.b)
            yield {
                **at_loss.items(), "hidden": self.hidden, "gradients": gradients, "gathered_weights": self.gathered(1)
            }  # fmt: skip
        if model.tied:  # the table's two gradients and their sum; an fp32 head's gradient becomes the sum
            in_layers = 0 if self.to_host else 4 * (shard - shard_elements(model.root, self.ranks, t))
            tables = (2 if job.tiled_loss and c.b == 4 else 3) * self.head * c.b
            gradients = in_layers + tables + self.largest * self.flat
            yield {"gradients": gradients, "gathered_weights": self.gathered(0)}
        if not self.sharded and mesh.weights > 1:
            yield {"gradients": shard * 4 + 4 * min(shard, GRADIENT_BUCKET)}

    @cached_property
    def _largest_shard(self) -> int:
        parameters = [*(p for layer in self.layers for p in layer.parameters), *self.model.root]
        return max(shard_elements((p,), self.ranks, self.mesh.tensor) for p in parameters)


def _recomputed_exchange(layer: LayerShape, job: Job, mesh: Mesh, c: CostContext) -> int:
    """Return the bytes of a checkpointed layer's recomputed all-to-all, the rank's q, k and v included; 0 if none is.

    The larger of sending q, k and v (sent and received buffer), and of receiving the output (what arrived, the output
    in head layout, as received, and in token layout).
    """
    if mesh.ulysses == 1 or job.memory.checkpointing not in ("full", "selective"):
        return 0
    (qkv, out, packed), n = layer.mixer.forward_buffers(mesh, c), layer.mixer.chunks(job, mesh)
    receiving = packed + 3 * out if n == 1 else -(-(packed + 2 * out) // n) + out
    return max(qkv + -(-2 * packed // n), qkv + receiving * (job.memory.checkpointing == "full"))


@functools.lru_cache(maxsize=256)
def _matrix_elements(model: ModelShape) -> int:
    layers = sum(
        count * sum(p.numel for p in layer.parameters if len(p.shape) > 1) for layer, count in model.layer_kinds
    )
    return layers + model.vocab * model.d_model
