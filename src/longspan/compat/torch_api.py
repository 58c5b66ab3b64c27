"""torch's private and version-bound names outside of attention and checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from longspan.compat.gone import gone

Function = TypeVar("Function", bound=Callable[..., Any])

NO_GROUP_WARNING = "torch.distributed is disabled"
"""How the warning begins that Distributed Checkpoint gives where there is no process group.

Versions: all. Public way: none, it has no category of its own. When gone: the warning is shown.
"""

WRAPPED = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""What `torch.compile` and torch's checkpoint wrapper put into the names of parameters.

Versions: all. Public way: none. When gone: a model that was wrapped after `parallelize` is refused, as
one whose parameters have other names.
"""


def not_compiled(function: Function) -> Function:
    """`torch.compiler.disable`, which has no types: a compiler runs `function` as it is.

    Versions: all. Public way: this one. When gone: an AttributeError at the import.
    """
    disabled: Function = torch.compiler.disable(function)
    return disabled


def waits_for_gradient(x: Tensor) -> bool:
    """Whether somebody asked for the gradient of a tensor that is no leaf: by a hook, or `retain_grad`.

    Versions: torch 2.11 to 2.13 (`_backward_hooks`). Public way: none for hooks. When gone: an AttributeError.
    """
    return bool(x._backward_hooks) or x.retains_grad


def named_range(name: str) -> contextlib.AbstractContextManager[Any]:
    """A range of this name in a profiler's trace; nothing where none records, or where a compiler looks on.

    Versions: torch 2.11 to 2.13 (`record_function` is public; whether a profiler is on is not). Public way: the range
    without asking, which costs microseconds in every layer. When gone: the range is always made.
    """
    if torch.compiler.is_compiling() or not getattr(torch._C._autograd, "_profiler_enabled", lambda: True)():
        return contextlib.nullcontext()
    return torch.profiler.record_function(name)


def graph_is_kept() -> bool:
    """Whether the backward under way was asked to keep its graph (`retain_graph=True`); inside one alone.

    Versions: all. Public way: none. When gone: it is not, and a second backward raises torch's error.
    """
    found = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: False)
    return bool(found())


ELEMENTWISE: dict[str, Callable[[Any], Tensor]] = {
    "MulBackward0": lambda node: node._saved_self * node._saved_other,
    "SiluBackward0": lambda node: F.silu(node._saved_self),
    "GeluBackward0": lambda node: F.gelu(node._saved_self, approximate=node._saved_approximate),
}
"""By the name of an operation's node in a graph, which holds what went in: its result, computed again.

Versions: all. Public way: none (the names are in torch's notes on autograd). When gone: under another
name of the node such a result is saved, as by torch itself; under another name of what it holds, an AttributeError.
"""


def saved_tensors_are_hooked() -> bool:
    """Whether hooks on what autograd saves are in force, such as a checkpointed layer's: only the innermost apply.

    Versions: all. Public way: none. When gone: they always are, and whoever asks does without its own.
    """
    found = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda ignore_tracing: True)
    return found(True) is not None


# --- collectives and groups

# The public names of two collectives changed: torch 2.13 warns of the old ones, torch before it has only those.
_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"


def gather_into(out: Tensor, x: Tensor, group: dist.ProcessGroup, async_op: bool = False) -> dist.Work | None:
    """The backend's all-gather: every rank's `x` `[n, ...]` one after the other in `out` `[ranks * n, ...]`. What to
    wait for, where it is to be under way (`async_op`).

    Versions: torch 2.13 by the new name, 2.11 and 2.12 by the old. Public way: this one. When gone: an AttributeError.
    """
    work: dist.Work | None = getattr(dist, _GATHER)(out, x, group=group, async_op=async_op)
    return work


def scatter_into(out: Tensor, x: Tensor, group: dist.ProcessGroup, async_op: bool = False) -> dist.Work | None:
    """The backend's reduce-scatter: my part `[n, ...]` of the sum of every rank's `x` `[ranks * n, ...]` in `out`. What
    to wait for, where it is to be under way (`async_op`).

    Versions: torch 2.13 by the new name, 2.11 and 2.12 by the old. Public way: this one. When gone: an AttributeError.
    """
    work: dist.Work | None = getattr(dist, _SCATTER)(out, x, group=group, async_op=async_op)
    return work


def find_group(name: str) -> dist.ProcessGroup:
    """The process group of a `group_name`: an operator takes plain values, and finds its group again by that.

    Versions: all. Public way: none. When gone: LongspanError.
    """
    resolve: Any = getattr(dist.distributed_c10d, "_resolve_process_group", None)
    if resolve is None:
        raise gone("torch", "torch.distributed.distributed_c10d._resolve_process_group", "collectives in operators")
    group: dist.ProcessGroup = resolve(name)
    return group


def default_store() -> Any:
    """The store by which the ranks of the default process group have met.

    Versions: all. Public way: none for a group that somebody else made. When gone: LongspanError.
    """
    found: Any = getattr(dist.distributed_c10d, "_get_default_store", None)
    if found is None:
        raise gone(
            "torch",
            "torch.distributed.distributed_c10d._get_default_store",
            "meeting the ranks of a process group that stands already",
            "call longspan.init_mesh before torch.distributed.init_process_group, whose work it then does",
        )
    return found()


def flatten_mesh(mesh: DeviceMesh, axis: str) -> DeviceMesh:
    """All axes of `mesh` as one, called `axis`; one process group for each set of ranks, made once. Collective.

    Versions: all. Public way: none (`DeviceMesh.from_group` makes meshes that know nothing of one
    another). When gone: LongspanError.
    """
    flatten: Any = getattr(mesh, "_flatten", None)
    if flatten is None:
        raise gone(
            "torch",
            "DeviceMesh._flatten",
            "one group over several axes",
            "a mesh in which only one of data, ring and ulysses is larger than 1",
        )
    flat: DeviceMesh = flatten(axis)
    return flat


def copy_job_timeout(group: dist.ProcessGroup, device_type: str) -> dist.ProcessGroup:
    """Let a group made from the default one have its time-out: torch gives each new group its own default (10 minutes
    for NCCL), whatever the job's was set to. Groups of a kind that has no time-out are left alone.

    Versions: all. Public way: none for groups that a DeviceMesh makes. When gone: such groups give up
    after torch's own default.
    """
    try:
        backend: Any = dist.distributed_c10d._get_default_group()._get_backend(torch.device(device_type))
        dist.distributed_c10d._set_pg_timeout(backend.options._timeout, group)
    except (AttributeError, RuntimeError):  # a backend without options, or none for the device
        pass
    return group


def give_hosts_time(timeout: timedelta) -> None:
    """Let the default group's messages between hosts wait so long, beside those between its GPUs.

    Versions: all. Public way: none for one of two backends of a group. When gone: they give up as early.
    """
    try:
        group: Any = dist.distributed_c10d._get_default_group()
        group._get_backend(torch.device("cpu"))._set_default_timeout(timeout)
    except (AttributeError, RuntimeError):
        pass


# --- autograd and tensors

_HAS_VERSIONS = hasattr(Tensor, "_version")


def when_backward_ends(callback: Callable[[], None]) -> None:
    """Call `callback` once, when the backward that is running has accumulated all its gradients.

    Versions: all. Public way: none that knows the end (`register_multi_grad_hook` has to be told before
    which gradients will come). When gone: LongspanError.
    """
    engine: Any = getattr(torch.autograd.Variable, "_execution_engine", None)
    if not hasattr(engine, "queue_callback"):
        raise gone(
            "torch",
            "torch.autograd.Variable._execution_engine.queue_callback",
            "summing gradients when a backward ends",
            "longspan.parallelize(..., fsdp=True), which sums them otherwise",
        )
    engine.queue_callback(callback)


def version_of(x: Tensor) -> int:
    """How often `x`'s memory has been written to by operators; its views count with it.

    Versions: all. Public way: none, though torch's pages on autograd speak of it. When gone:
    LongspanError.
    """
    if not _HAS_VERSIONS:
        raise gone("torch", "Tensor._version", "telling whether a tensor has been written to")
    return x._version


# --- modules


def wrapped_by_ddp(model: nn.Module) -> bool:
    """Whether a DistributedDataParallel around `model`, or around what holds it, runs its forward now.

    Versions: all. Public way: none. When gone: False; `forbid_ddp` refuses such a wrapper before.
    """
    wrapper: Any = getattr(DistributedDataParallel, "_active_ddp_module", None)
    return wrapper is not None and any(module is model for module in wrapper.module.modules())


def forbid_ddp(model: nn.Module, refusal: Iterable[str]) -> None:
    """Have DistributedDataParallel iterate over `refusal`, which raises, before it does anything with `model`.

    Versions: all. Public way: none. When gone: `wrapped_by_ddp` still refuses it in its first forward.
    """
    model._ddp_params_and_buffers_to_ignore = refusal  # type: ignore[assignment]


def is_replica(model: nn.Module) -> bool:
    """Whether `model` is a copy that `torch.nn.DataParallel` has made for one forward.

    Versions: all. Public way: none. When gone: False.
    """
    return bool(getattr(model, "_is_replica", False))


def before_casting(model: nn.Module, check: Callable[[Callable[[Tensor], Tensor]], None]) -> None:
    """Call `check` with what `to`, `half`, `cuda` and their kin are about to do to every tensor of `model`.

    Versions: all. Public way: none that meets all of them. When gone: LongspanError.
    """
    apply: Any = getattr(type(model), "_apply", None)
    if apply is None:
        raise gone("torch", "torch.nn.Module._apply", "refusing to cast a parallelized model")

    def checked(fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        check(fn)
        # Not `apply`: FSDP makes another class of the model afterwards.
        applied: nn.Module = type(model)._apply(model, fn, recurse)
        return applied

    model._apply = checked  # type: ignore[method-assign]


def sum_gradients(module: Any) -> None:
    """Have FSDP sum a module's gradients over the ranks, and not average them, by a plain sum: gloo has no other.

    Args:
        module: an `FSDPModule`.

    Versions: torch 2.11 to 2.13 (`set_force_sum_reduction_for_comms` is public, and newer than FSDP2). Public way: this
    one. When gone: LongspanError.
    """
    if not hasattr(module, "set_force_sum_reduction_for_comms"):
        raise gone("torch", "FSDPModule.set_force_sum_reduction_for_comms", "sums of gradients", "fsdp=False")
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)


def register_tree(
    kind: type, flatten: Callable[[Any], tuple[list[Any], Any]], unflatten: Callable[[list[Any], Any], Any]
) -> None:
    """Let torch look inside values of a class: at the tensors in it, as at those in a list.

    Versions: all. Public way: none yet. When gone: LongspanError.
    """
    try:
        from torch.utils import _pytree
    except ImportError as error:
        raise gone("torch", "torch.utils._pytree", "training without logits", "logits=True") from error
    _pytree.register_pytree_node(kind, flatten, lambda leaves, rest: unflatten(list(leaves), rest))


def own_parameters(module: nn.Module) -> dict[str, Any]:
    """The dict in which a module keeps its own parameters, to put a tensor in a parameter's place for a while.

    Versions: torch 2.11 to 2.13, and what FSDP2 writes to as well. Public way: none (`register_parameter` takes leaves
    alone). When gone: LongspanError.
    """
    found: dict[str, Any] | None = getattr(module, "_parameters", None)
    if found is None:
        raise gone("torch", "nn.Module._parameters", "a layer cut over a tensor axis", "`tensor=1`")
    return found
