"""Bind a rank to the CPUs beside its GPU: Linux then places the memory that it pins there, too."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def bind_to_node_of(gpu: Any, system: Path = Path("/sys")) -> set[int]:
    """Restrict this thread, and those that it starts, to the CPUs of a GPU's NUMA node.

    A copy between a GPU and memory of another node crosses the link between the sockets.

    Args:
        gpu: properties of the GPU, as `torch.cuda.get_device_properties` returns them.
        system: where sysfs is mounted.

    Returns:
        The CPUs; empty if nothing changed: the node is unknown, there is only one, or this process may not use its
        CPUs (as under `numactl`).
    """
    try:
        address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
        node = int((system / "bus/pci/devices" / address / "numa_node").read_text())
        listed = (system / f"devices/system/node/node{node}/cpulist").read_text()
        allowed = os.sched_getaffinity(0)
        cpus = allowed & {cpu for part in listed.strip().split(",") for cpu in _range(part)}
        if not cpus or cpus == allowed:
            return set()
        os.sched_setaffinity(0, cpus)
    except (AttributeError, OSError, ValueError):  # not Linux, or no such file: an unknown node is -1
        return set()
    return cpus


def _range(part: str) -> range:
    """Return the CPUs of "3" or "0-15"."""
    first, _, last = part.partition("-")
    return range(int(first), int(last or first) + 1)
