"""How FSDP2 groups a model's weights: what is gathered together, when, and in which order.

    the embedding               gathered for its forward alone: its backward needs no weights
    each decoder layer          gathered one layer ahead in forward and backward, released after each
    final norm and head         gathered beside the last layer, kept to the head's backward, which comes next
    the root: what is left      norms and positions beside the embedding, a few rows as a rule

A weight that two modules share (a head tied to the embedding) must be one group's, gathered from the first use to the
last. That group is the root's, which spans the whole forward and backward; embedding and head then stay in it.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from longspan.comm.mesh import mesh_of_one
from longspan.comm.sharded_weights import as_local
from longspan.compat.torch_api import sum_gradients
from longspan.core.errors import LongspanError
from longspan.hf.support import decoder_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from longspan.comm.mesh import SequenceSharding


def apply_fsdp(
    model: PreTrainedModel, sp: SequenceSharding, mp_policy: MixedPrecisionPolicy | None, *, cpu_offload: bool = False
) -> None:
    """`fully_shard` the groups of a model. Gradients are summed: the loss is divided by all tokens. On one rank nothing
    is shared, and the groups are what `cpu_offload` brings to the device one after the other.

    Args:
        model: whose weights become shards, in place.
        sp: its sharding.
        mp_policy: FSDP's mixed precision.
        cpu_offload: shards, their gradients and so the optimizer's states stay in the host's memory, pinned; a group's
            weights go to the device when it gathers them, its gradient comes back when it is summed.

    Raises:
        LongspanError: for `cpu_offload` where the device is the CPU.
    """
    check_cpu_offload(sp.device, cpu_offload)
    options: dict[str, Any] = {
        "mesh": sp.fsdp_mesh or mesh_of_one(sp.device),
        "mp_policy": mp_policy or MixedPrecisionPolicy(),
        "offload_policy": CPUOffloadPolicy() if cpu_offload else OffloadPolicy(),
    }
    embedding, tail = outer_groups(model)
    layers: list[nn.Module] = decoder_layers(model)
    if embedding is not None:
        kept = _backward_reads_table(embedding)
        group = fully_shard(embedding, **options, reshard_after_forward=True)
        group.set_unshard_in_backward(kept)
    for layer in layers:
        fully_shard(layer, **options, reshard_after_forward=True)
    if tail:
        fully_shard(tail, **options, reshard_after_forward=False)
    fully_shard(model, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            sum_gradients(module)
    _prefetch([*([] if embedding is None else [embedding]), *layers, *tail[:1]], backward=[*layers, *tail[:1]])


def check_cpu_offload(device: torch.device, cpu_offload: bool) -> None:
    """Refuse an offload that moves nothing.

    Raises:
        LongspanError: where the device is the CPU.
    """
    if cpu_offload and device.type == "cpu":
        raise LongspanError(
            "cpu_offload=True keeps weights, gradients and optimizer states in the host's memory, and on a CPU they "
            "are there already: there is nothing to move; leave it out"
        )


def reshard(model: nn.Module) -> None:
    """Give back what a forward has gathered and no backward has released: the model has its own parameters again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def gather_group_of(model: nn.Module, module: nn.Module) -> None:
    """Gather the weights of the group that a module is in."""
    owners = [m for m in model.modules() if isinstance(m, FSDPModule) and any(x is module for x in m.modules())]
    if owners:
        owners[-1].unshard()  # modules come outer ones first


def outer_groups(model: PreTrainedModel) -> tuple[nn.Module | None, list[nn.Module]]:
    """The embedding, and final norm and head, where each can be a group of its own: its weights are nobody else's.

    Returns:
        The input embedding, None where it shares a weight (or there is none that is a module of its own); the modules
        of the last group, in the order in which they run, empty likewise. Before FSDP.
    """
    embedding, head = model.get_input_embeddings(), _child_with(model, model.get_output_embeddings())
    tail = [] if head is None else [*_final_norm(model), head]
    if not isinstance(embedding, nn.Module) or _shares(embedding, model):
        embedding = None
    if tail and (_shares(nn.ModuleList(tail), model) or any(decoder_layers(module) for module in tail)):
        tail = []
    return embedding, tail


def _child_with(model: nn.Module, inside: nn.Module | None) -> nn.Module | None:
    """The model's own child that holds a module: a masked LM's head is more than the product with the vocabulary, and
    is called as a whole.
    """
    if inside is None:
        return None
    return next((child for child in model.children() if any(module is inside for module in child.modules())), None)


def _final_norm(model: nn.Module) -> list[nn.Module]:
    """The last norm that stands beside the decoder layers and after them, or nothing."""
    last = decoder_layers(model)[-1:]
    for owner in model.modules():
        children = list(owner.children())
        lists = [i for i, child in enumerate(children) if isinstance(child, nn.ModuleList) and last == list(child)[-1:]]
        if last and lists:
            after = children[lists[-1] + 1 :]
            norms = [m for m in after if "Norm" in type(m).__name__ and list(m.parameters())]
            return norms[-1:]
    return []


def _shares(module: nn.Module, model: nn.Module) -> bool:
    """Whether a module outside of this one holds one of its parameters too."""
    mine, inside = {id(p) for p in module.parameters()}, set(module.modules())
    others = (m for m in model.modules() if m not in inside)
    return any(id(p) in mine for m in others for p in m.parameters(recurse=False))


def _backward_reads_table(embedding: nn.Module) -> bool:
    """Whether autograd keeps weights of an embedding for its backward: a look-up keeps the ids alone.

    Asked of autograd itself, with one token, as an embedding may be any module (PEFT's wrapper, a family's own class).
    """
    if not isinstance(embedding, nn.Embedding):
        return True
    kept: list[int] = []

    def note(x: Tensor) -> Tensor:
        kept.append(x.numel())
        return x

    token = torch.zeros(1, 1, dtype=torch.long, device=embedding.weight.device)
    with as_local(embedding), torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        embedding.forward(token)  # without hooks
    return any(size >= embedding.weight.numel() for size in kept)


def _prefetch(forward: list[nn.Module], backward: list[nn.Module]) -> None:
    """Each group gathers the next one while it computes, in forward and (without the embedding) in backward order."""
    for group, following in itertools.pairwise(forward):
        assert isinstance(group, FSDPModule) and isinstance(following, FSDPModule)
        group.set_modules_to_forward_prefetch([following])
    for group, following in itertools.pairwise(backward):
        assert isinstance(group, FSDPModule) and isinstance(following, FSDPModule)
        following.set_modules_to_backward_prefetch([group])
