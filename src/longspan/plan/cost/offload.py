"""What the memory options move to the host's memory or to a disk: bytes that lie there, and seconds that nothing hides.

Kept activations leave in the forward, layer by layer, and come back in the backward; under `cpu_offload` the weights
come for both, and gradients go. Of a KV cache in the host's memory each layer's keys and values come for the layer. A
GPU's link to its host has both directions at once; the GPUs of a node share its disk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from longspan.plan.cost.cached import brought_bytes, held_bytes
from longspan.plan.cost.compute import layer_seconds
from longspan.plan.cost.memory import elements_at_rest, on_host, scale_of, weights_at_rest
from longspan.plan.cost.memory_options import DISK_BUFFERS
from longspan.plan.cost.per_rank import micro_batches
from longspan.plan.cost.saved import autocasts, kept_bytes, kept_per_token, offloads
from longspan.plan.cost.weights import shard_elements, sums_gradients_once

if TYPE_CHECKING:
    from longspan.plan.hardware import Hardware
    from longspan.plan.job import Job, Mesh
    from longspan.plan.models.shape import ModelShape

HOST_ITEMS = {
    "weights": "weights at rest, fp32: this GPU's shard",
    "optimizer": "optimizer state",
    "gradients": "gradients, fp32",
    "activations": "what checkpointing keeps of the layers",
    "kv_cache": "keys and values of all layers",
    "disk_buffers": "what is on its way to or from the disk",
}
"""What a rank may hold in its host's memory, and what it is."""

HOST_SHARE = 0.9
"""Part of a node's memory that ranks may fill: the rest is the system's, the processes' and the file cache's."""

PINNED_WEIGHT = 4
"""Bytes of a weight that cross to the GPU under `cpu_offload`: it is cast there."""


@dataclass(frozen=True)
class Offloaded:
    """What lies outside a GPU, and what it costs.

    Attributes:
        host_bytes: of one rank in its host's memory, item by item (`HOST_ITEMS`).
        disk_bytes: of one rank in its file.
        ranks_per_node: ranks that share a host and its disk.
        seconds: of a step, that nothing hides.
        needed: bytes/s that the slowest-pressed of host link and disk would need to be hidden, as (what, needed, has).
    """

    host_bytes: dict[str, int]
    disk_bytes: int
    ranks_per_node: int
    seconds: float
    needed: tuple[str, float, float] | None

    @property
    def host_node_bytes(self) -> int:
        """Of all ranks of a node."""
        return sum(self.host_bytes.values()) * self.ranks_per_node

    @property
    def disk_node_bytes(self) -> int:
        """Of all ranks of a node."""
        return self.disk_bytes * self.ranks_per_node

    def fits(self, hardware: Hardware) -> bool:
        """Whether a node's memory holds it, and its disk where its size is known."""
        disk = hardware.disk_bytes == 0 or self.disk_node_bytes <= hardware.disk_bytes
        return self.host_node_bytes <= HOST_SHARE * hardware.host_memory and disk


NOTHING = Offloaded({}, 0, 1, 0.0, None)


def outside(model: ModelShape, job: Job, mesh: Mesh, hardware: Hardware) -> Offloaded:
    """Bytes outside the GPU; `seconds` and `needed` left at nothing."""
    s = scale_of(model, job, mesh, hardware)
    moves = job.mode == "train" and offloads(job, s)
    caches = job.mode != "train" and job.cache_offload == "host" and not s.on_cpu
    if not moves and not caches and not on_host(job, s):
        return NOTHING
    host: dict[str, int] = {"kv_cache": held_bytes(model, job, mesh)} if caches else {}
    if on_host(job, s):
        host |= weights_at_rest(model, job, mesh)
        if job.mode == "train":
            host["gradients"] = elements_at_rest(model, job, mesh) * 4
    kept = kept_bytes(model, job, mesh, s) if moves else 0
    disk = kept if job.memory.offload == "disk" else 0
    if disk:
        host["disk_buffers"] = min(kept, -(-kept * DISK_BUFFERS // len(model.layers)))
    elif kept:
        host["activations"] = kept
    host = {name: host[name] for name in HOST_ITEMS if host.get(name)}
    return Offloaded(host, disk, min(mesh.gpus, hardware.gpus_per_node), 0.0, None)


def offloaded(model: ModelShape, job: Job, mesh: Mesh, hardware: Hardware) -> Offloaded:
    """Bytes outside the GPU, and the time that they cost."""
    there = outside(model, job, mesh, hardware)
    if not there.host_bytes and not there.disk_bytes:
        return there
    s = scale_of(model, job, mesh, hardware)
    train, micro, autocast = job.mode == "train", micro_batches(job, mesh), autocasts(job)
    ranks = mesh.weights if job.weight_sharding else 1
    summed = 1 if sums_gradients_once(model, job, mesh, hardware) else micro
    seconds, pressed = 0.0, ("", 0.0, 1.0)
    for layer, count in model.layer_kinds:
        computing = layer_seconds(model, layer, job, mesh, hardware)
        weights = shard_elements(layer.parameters, ranks, mesh.tensor) * PINNED_WEIGHT if on_host(job, s) else 0
        moves = train and offloads(job, s)
        kept = kept_per_token(layer, job, mesh, s, autocast).total * s.tokens if moves else 0
        cached = brought_bytes(layer.mixer.cache_bytes(job, mesh), job) if there.host_bytes.get("kv_cache") else 0
        in_node = kept * there.ranks_per_node if there.disk_bytes else 0
        gradients = weights * summed / micro
        link, write, read = hardware.host_bandwidth, hardware.disk_write, hardware.disk_read
        # (what, bytes, bytes/s, seconds of computing beside it): the two directions of the link run at once.
        forward = [("host link", max(kept, weights + cached), link), ("disk", in_node, write)]
        backward = [("host link", max(kept + weights, gradients), link), ("disk", in_node, read)]
        for moved, beside in ((forward, computing.forward), (backward, computing.backward * train)):
            if not beside:
                continue
            seconds += count * micro * max(0.0, max(number / speed for _, number, speed in moved) - beside)
            worst = max(((what, number / beside, speed) for what, number, speed in moved), key=lambda x: x[1] / x[2])
            pressed = max(pressed, worst, key=lambda x: x[1] / x[2])
    if on_host(job, s):  # what stands outside the layers waits, and the optimizer steps on the host
        root = shard_elements(model.root, ranks, mesh.tensor) * PINNED_WEIGHT
        seconds += micro * root * (2 if train else 1) / hardware.host_bandwidth
    return Offloaded(there.host_bytes, there.disk_bytes, there.ranks_per_node, seconds, pressed if pressed[0] else None)
