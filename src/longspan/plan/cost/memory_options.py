"""What each memory option of `longspan.core.memory.Memory` keeps and adds, in bytes: one formula each, so that what a
measurement corrects stands in one place. What attention keeps is its mixer's to say (`longspan.plan.layers`).

Letters: L tokens of a rank, b bytes per element, d hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from longspan.core.tile_sizes import FEWEST_ROWS, norm_rows

if TYPE_CHECKING:
    from longspan.plan.cost.saved import Scale
    from longspan.plan.job import Job, Mesh
    from longspan.plan.models.shape import LayerShape

OFFLOADED_LAYERS = 2
"""Layers' worth of what checkpointing keeps that stays on the GPU under offload: one that leaves, or comes back, while
the next one is made, or used.
"""

DISK_BUFFERS = 4
"""Layers' worth of it that lie in the host's memory under `offload="disk"`, on their way to or from the file."""

TILE = 0.25
"""Intermediates of a tile over the hidden states, in bytes, where `tiled_mlp` is 0."""

WEIGHT_SUM = 4
"""Bytes per MLP weight of a layer in which a tiled MLP adds up its gradients: fp32."""


def stream_bytes(s: Scale, autocast: bool) -> int:
    """Bytes per token of the residual stream: what a layer takes in, and what checkpointing keeps of each."""
    return s.d * (4 if autocast else s.b)


def norm_bytes(s: Scale, features: int, autocast: bool, *, again: bool = False) -> int:
    """Bytes per token that an RMSNorm saves: its input in fp32, one number, and the normalised input. Computed `again`
    (`tiled_norms`): its input as it came.
    """
    kept = features * (4 if autocast else s.b)
    return kept if again else features * 4 + 4 + kept


def mlp_tiles(layer: LayerShape, job: Job, mesh: Mesh, s: Scale) -> int:
    """Tiles of tokens that the layer's MLP works through."""
    if job.memory.tiled_mlp:
        return min(job.memory.tiled_mlp, max(1, s.tokens))
    return max(1, min(s.tokens // FEWEST_ROWS[s.on_cpu], round(_intermediates(layer, mesh, s) / (TILE * s.d * s.b))))


def _intermediates(layer: LayerShape, mesh: Mesh, s: Scale) -> int:
    """Bytes per token of an MLP's intermediates: what its forward saves, and two gradients under way."""
    return (layer.mlp.saved(s) + 2 * s.b * layer.mlp.width) // mesh.tensor


def recomputes_mlp_act(job: Job) -> bool:
    """Whether the MLP keeps what its matrices gave alone: where neither checkpointing nor tiles keep nothing of it."""
    memory = job.memory
    return job.mode == "train" and memory.recompute_mlp_act and memory.checkpointing == "none" and memory.tiled_mlp == 1


def mlp_act_bytes(layer: LayerShape, mesh: Mesh, s: Scale) -> int:
    """Bytes per token of what an MLP computes from its matrices' outputs by elementwise work."""
    return layer.mlp.saved_intermediates // 2 * s.b * layer.mlp.width // mesh.tensor


def mlp_under_way(layer: LayerShape, job: Job, mesh: Mesh, s: Scale) -> int:
    """Bytes of the intermediates of an MLP whose backward runs, beside what is saved: two gradients of the widest, and
    what is computed again; in tiles, those of one tile and what its forward, run again, has saved.
    """
    if job.memory.tiled_mlp == 1:
        again = mlp_act_bytes(layer, mesh, s) * s.tokens if recomputes_mlp_act(job) else 0
        return 2 * s.b * layer.mlp.width * s.tokens // mesh.tensor + again
    return _intermediates(layer, mesh, s) * -(-s.tokens // mlp_tiles(layer, job, mesh, s))


def norm_under_way(job: Job, s: Scale) -> int:
    """Bytes that the backward of a norm behind the attention holds, in tiles, beside the gradients that a layer's
    backward holds anyway: of a tile three copies in fp32, and its own result of all tokens; but not where a tiled MLP,
    whose backward goes on through its norm, has made that.
    """
    result = s.tokens * s.d * s.b // s.hidden_shards if job.memory.tiled_mlp == 1 else 0
    return result + _norm_tile(min(s.tokens, norm_rows(s.tokens, s.on_cpu)), s)


def norm_of_mlp_under_way(layer: LayerShape, job: Job, mesh: Mesh, s: Scale) -> int:
    """Bytes of the norm in a tile of an MLP whose backward goes on through it."""
    if job.memory.tiled_mlp == 1 or not job.memory.tiled_norms:
        return 0
    return _norm_tile(-(-s.tokens // mlp_tiles(layer, job, mesh, s)), s)


def _norm_tile(rows: int, s: Scale) -> int:
    return 3 * 4 * s.d * rows


def mlp_weight_sums(layer: LayerShape, job: Job, mesh: Mesh, s: Scale) -> int:
    """Bytes in which a tiled MLP adds up its weights' gradients, tile by tile; none where they are fp32 as they are, or
    where all tokens are one tile.
    """
    if mlp_tiles(layer, job, mesh, s) == 1 or job.dtype == "fp32" or not job.weight_sharding:
        return 0
    return WEIGHT_SUM * layer.mlp_params // mesh.tensor
