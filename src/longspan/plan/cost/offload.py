"""What memory options move to the host's memory or to a disk: bytes stored, and seconds that nothing overlaps with.

Checkpoints leave layer by layer in the forward, and return in the backward. With `cpu_offload` weights arrive for both,
and gradients leave. An offloaded KV cache arrives layer by layer. A GPU's host link carries both directions at a time;
the GPUs of a node share its disk.
"""

from __future__ import annotations

from dataclasses import dataclass

from longspan.plan.cost.memory import cache_bytes, fetched_bytes
from longspan.plan.cost.saved import DISK_BUFFERS, checkpoint_bytes, checkpoint_per_token
from longspan.plan.cost.times import layer_seconds
from longspan.plan.cost.weights import elements_at_rest, shard_elements, sums_gradients_once, weights_at_rest
from longspan.plan.hardware import Hardware
from longspan.plan.job import CostContext

HOST_ITEMS = {
    "weights": "weights at rest, fp32: this GPU's shard",
    "optimizer": "optimizer state",
    "gradients": "gradients, fp32",
    "activations": "checkpoints of the layers",
    "kv_cache": "keys and values of all layers",
    "disk_buffers": "checkpoints on their way to or from the disk",
}
"""What a rank may hold in its host's memory, with a description."""

HOST_SHARE = 0.9
"""Fraction of a node's memory that ranks may fill: the system, processes and the file cache need the rest."""

PINNED_WEIGHT = 4
"""Bytes of a weight that cross to the GPU under `cpu_offload`: the GPU casts it."""


Bottleneck = tuple[str, float, float]
"""Host link or disk, the bytes/s that it needs to overlap fully, and its bytes/s."""


@dataclass(frozen=True)
class Offloaded:
    """What is stored outside a GPU.

    Attributes:
        host_bytes: of one rank in its host's memory, by item (`HOST_ITEMS`).
        disk_bytes: of one rank in its file.
        ranks_per_node: ranks that share a host and its disk.
    """

    host_bytes: dict[str, int]
    disk_bytes: int
    ranks_per_node: int

    @property
    def host_node_bytes(self) -> int:
        """Bytes in the host's memory, all ranks of a node."""
        return sum(self.host_bytes.values()) * self.ranks_per_node

    @property
    def disk_node_bytes(self) -> int:
        """Bytes on disk, all ranks of a node."""
        return self.disk_bytes * self.ranks_per_node

    def fits(self, hardware: Hardware) -> bool:
        """Whether it fits in a node's memory, and on its disk if the disk's size is known."""
        disk = hardware.disk_bytes == 0 or self.disk_node_bytes <= hardware.disk_bytes
        return self.host_node_bytes <= HOST_SHARE * hardware.host_memory and disk


def offloaded_bytes(c: CostContext, hardware: Hardware) -> Offloaded:
    """Return the bytes outside the GPU."""
    job = c.job
    train, host = job.mode == "train", dict[str, int]()
    if not train and job.cache_offload == "host" and not c.on_cpu:
        host["kv_cache"] = cache_bytes(c)
    if c.on_host:
        host |= weights_at_rest(c)
        if train:
            host["gradients"] = elements_at_rest(c) * 4
    checkpoints = checkpoint_bytes(c) if train and c.offloads else 0
    disk = checkpoints if job.memory.offload == "disk" else 0
    if disk:
        host["disk_buffers"] = min(checkpoints, -(-checkpoints * DISK_BUFFERS // len(c.model.layers)))
    elif checkpoints:
        host["activations"] = checkpoints
    host = {name: host[name] for name in HOST_ITEMS if host.get(name)}
    return Offloaded(host, disk, min(c.mesh.gpus, hardware.gpus_per_node))


def offload_wait(c: CostContext, hardware: Hardware, stored: Offloaded) -> tuple[float, Bottleneck | None]:
    """Return the seconds of a step that wait for host link or disk, and the slower of these; None if nothing moves."""
    if not stored.host_bytes and not stored.disk_bytes:
        return 0.0, None
    train, micro, ranks, tensor = c.job.mode == "train", c.micro_batches, c.weight_ranks, c.mesh.tensor
    sums = 1 if sums_gradients_once(c, hardware) else micro
    link, write, read = hardware.host_bandwidth, hardware.disk_write, hardware.disk_read
    seconds, bottleneck = 0.0, ("", 0.0, 1.0)
    for layer, count in c.model.layer_kinds:
        computing = layer_seconds(layer, c, hardware)
        weights = shard_elements(layer.parameters, ranks, tensor) * PINNED_WEIGHT if c.on_host else 0
        moves = train and c.offloads
        saved = checkpoint_per_token(layer, c).total * c.tokens if moves else 0
        cached = fetched_bytes(layer.mixer.cache_bytes(c), c.job) if stored.host_bytes.get("kv_cache") else 0
        on_disk = saved * stored.ranks_per_node if stored.disk_bytes else 0
        gradients = weights * sums / micro
        # (name, bytes, bytes/s); the two directions of the link run concurrently.
        forward = [("host link", max(saved, weights + cached), link), ("disk", on_disk, write)]
        backward = [("host link", max(saved + weights, gradients), link), ("disk", on_disk, read)]
        for moved, overlap in ((forward, computing.forward), (backward, computing.backward * train)):
            if not overlap:
                continue
            seconds += count * micro * max(0.0, max(size / speed for _, size, speed in moved) - overlap)
            worst = max(((what, size / overlap, speed) for what, size, speed in moved), key=lambda x: x[1] / x[2])
            bottleneck = max(bottleneck, worst, key=lambda x: x[1] / x[2])
    if c.on_host:  # nothing overlaps with the weights outside the layers
        root = shard_elements(c.model.root, ranks, tensor) * PINNED_WEIGHT
        seconds += micro * root * (2 if train else 1) / hardware.host_bandwidth
    return seconds, bottleneck if bottleneck[0] else None
