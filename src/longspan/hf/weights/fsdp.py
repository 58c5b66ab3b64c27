"""Shard a model's weights by FSDP2. Each group of weights is gathered and released as a whole:

    embedding              gathered for its forward only: its backward needs no weights
    each layer             of tower or decoder: gathered one layer ahead in forward and backward, released after each
    final norm and head    gathered during the last layer, released after the head's backward, which comes next
    root: all others       usually a few rows: norms and positions next to the embedding

A weight shared by two modules (a head tied to the embedding, layers of Zamba) needs a group that stays gathered from
its first use to its last. Only the root group does, so embedding and head, or those layers, then belong to it.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from transformers import PreTrainedModel

from longspan.comm.mesh import SequenceSharding, mesh_of_one
from longspan.comm.tensor import as_local
from longspan.compat.reading import decoder_layers
from longspan.compat.torch_api import average_gradients
from longspan.core.errors import LongspanError
from longspan.hf.model.support import final_norm
from longspan.hf.model.vision import tower_blocks
from longspan.hf.weights.experts import ExpertGroups, ExpertSharding


def apply_fsdp(
    model: PreTrainedModel,
    sp: SequenceSharding,
    mp_policy: MixedPrecisionPolicy | None,
    *,
    cpu_offload: bool = False,
    experts: ExpertGroups | None = None,
) -> None:
    """Call `fully_shard` on the groups of a model. Gradients are averaged over data x sequence.

    `cpu_offload` holds shards, gradients and optimizer state in pinned host memory: a group's weights are copied to the
    device to gather them, and its gradient back once it is averaged. On one rank, groups only serve that.
    `experts`: how these are sharded over data x sequence; None: as other weights.
    """
    options: dict[str, Any] = {
        "mesh": sp.fsdp_mesh or mesh_of_one(sp.device),
        "mp_policy": mp_policy or MixedPrecisionPolicy(),
        "offload_policy": CPUOffloadPolicy() if cpu_offload else OffloadPolicy(),
    }
    sharding = None if experts is None else ExpertSharding(model, sp, experts)
    if sharding is not None:
        options["shard_placement_fn"] = sharding.placement
    embedding, tail = outer_groups(model)
    layers: list[nn.Module] = [layer for layer in decoder_layers(model) if not _shares(layer, model)]
    tower = tower_blocks(model)
    if embedding is not None:
        reads_table = _backward_reads_table(embedding)
        group = fully_shard(embedding, **options, reshard_after_forward=True)
        group.set_unshard_in_backward(reads_table)
    for layer in [*tower, *layers]:
        fully_shard(layer, **options, reshard_after_forward=True)
    if tail:
        fully_shard(tail, **options, reshard_after_forward=False)
    fully_shard(model, **options)
    average_gradients(model, sp.fsdp_size)
    if sharding is not None:
        sharding.finish(model)
    _prefetch(tower, tower)  # by itself: a batch may have no pictures
    _prefetch([*([] if embedding is None else [embedding]), *layers, *tail[:1]], backward=[*layers, *tail[:1]])


def check_cpu_offload(device: torch.device, cpu_offload: bool) -> None:
    """Raise if `cpu_offload` is set and the device is the CPU."""
    if cpu_offload and device.type == "cpu":
        raise LongspanError(
            "cpu_offload=True moves weights, gradients and optimizer states to host memory; on a CPU there is "
            "nothing to move; leave it out"
        )


def reshard(model: nn.Module) -> None:
    """Release the weights that a forward gathered and no backward released."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def gather_group_of(model: nn.Module, module: nn.Module) -> None:
    """Gather the weights of a module's group."""
    owners = [m for m in model.modules() if isinstance(m, FSDPModule) and any(x is module for x in m.modules())]
    if owners:
        owners[-1].unshard()  # modules come outer ones first


def outer_groups(model: PreTrainedModel) -> tuple[nn.Module | None, list[nn.Module]]:
    """Return the groups outside the layers, before FSDP: the input embedding, None if it shares a weight with another
    module; final norm and head in the order in which they run, an empty list if they share one.
    """
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    # A masked LM's head has more layers than the last matmul.
    head = next((child for child in model.children() if output in child.modules()), None)
    tail = [] if head is None else [*final_norm(model), head]
    if not isinstance(embedding, nn.Module) or _shares(embedding, model):
        embedding = None
    if tail and (_shares(nn.ModuleList(tail), model) or any(decoder_layers(module) for module in tail)):
        tail = []
    return embedding, tail


def _shares(module: nn.Module, model: nn.Module) -> bool:
    """Return whether another module holds one of this module's parameters."""
    mine, inside = {id(p) for p in module.parameters()}, set(module.modules())
    others = (m for m in model.modules() if m not in inside)
    return any(id(p) in mine for m in others for p in m.parameters(recurse=False))


def _backward_reads_table(embedding: nn.Module) -> bool:
    """Return whether autograd saves weights of an embedding for its backward; a plain look-up saves only the ids.

    Run it on one token, as an embedding may be any module (PEFT's wrapper, a family's own class).
    """
    if not isinstance(embedding, nn.Embedding):
        return True
    saved: list[int] = []

    def note(x: Tensor) -> Tensor:
        saved.append(x.numel())
        return x

    token = torch.zeros(1, 1, dtype=torch.long, device=embedding.weight.device)
    with as_local(embedding), torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        embedding.forward(token)  # without hooks
    return any(size >= embedding.weight.numel() for size in saved)


def _prefetch(forward: list[nn.Module], backward: list[nn.Module]) -> None:
    """Let each group gather the next one while it computes, in forward and backward order."""
    for group, following in itertools.pairwise(forward):
        assert isinstance(group, FSDPModule) and isinstance(following, FSDPModule)
        group.set_modules_to_forward_prefetch([following])
    for group, following in itertools.pairwise(backward):
        assert isinstance(group, FSDPModule) and isinstance(following, FSDPModule)
        following.set_modules_to_backward_prefetch([group])
