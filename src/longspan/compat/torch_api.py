"""torch's private and version-bound names, without those of attention and checkpoints."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from longspan.compat.versions import missing, needed

try:
    from torch.utils import _pytree
except ImportError:
    _pytree = None  # type: ignore[assignment]

_C10D, _PYTREE = "torch.distributed.distributed_c10d", "torch.utils._pytree"

Function = TypeVar("Function", bound=Callable[..., Any])

NO_GROUP_WARNING = "torch.distributed is disabled"
"""How Distributed Checkpoint's warning begins if there is no process group. When gone: the warning is shown."""

FSDP_KEEPS_INTEGERS = torch.__version__ >= "2.13"
"""Whether FSDP gathers integer weights unchanged under mixed precision; torch 2.11 casts them, too.

Public way: none. When gone: 4-bit weights in bytes are refused.
"""

WRAPPED = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""What `torch.compile` and torch's checkpoint wrapper insert into names of parameters.

When gone: a model that is wrapped after `parallelize` is refused, as its parameters have other names.
"""


def not_compiled(function: Function) -> Function:
    """`torch.compiler.disable` with types: a compiler runs `function` as it is.

    Public way: this one. When gone: an AttributeError at import.
    """
    disabled: Function = torch.compiler.disable(function)
    return disabled


def waits_for_gradient(x: Tensor) -> bool:
    """Return whether the gradient of a non-leaf tensor is needed, by a hook or `retain_grad`.

    Public way: none for hooks. When gone: an AttributeError.
    """
    return bool(x._backward_hooks) or x.retains_grad


def profiler_records() -> bool:
    """Return whether a profiler of torch records; there can be only one. When gone: True."""
    return bool(getattr(torch._C._autograd, "_profiler_enabled", lambda: True)())


def named_range(name: str) -> contextlib.AbstractContextManager[Any]:
    """Return a range for a profiler's trace; a null context if none records, or in a compiler.

    Public way: always make the range, which costs microseconds in every layer. When gone: that.
    """
    if torch.compiler.is_compiling() or not profiler_records():
        return contextlib.nullcontext()
    return torch.profiler.record_function(name)


def graph_is_kept() -> bool:
    """Return whether the running backward keeps its graph (`retain_graph=True`); call it inside of one.

    When gone: False, and a second backward raises torch's error.
    """
    found = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: False)
    return bool(found())


ELEMENTWISE: dict[str, Callable[[Any], Tensor]] = {
    "MulBackward0": lambda node: node._saved_self * node._saved_other,
    "SiluBackward0": lambda node: F.silu(node._saved_self),
    "GeluBackward0": lambda node: F.gelu(node._saved_self, approximate=node._saved_approximate),
}
"""The result of an operation, recomputed from its autograd node, by the node's name.

When gone: a node of another name is saved as by torch itself; other names of its inputs raise an AttributeError.
"""


def saved_tensors_are_hooked() -> bool:
    """Return whether saved-tensor hooks are active, such as a checkpointed layer's: only the innermost apply.

    When gone: True, and callers install no hooks.
    """
    found = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda ignore_tracing: True)
    return found(True) is not None


# --- collectives and groups

# Public names that changed: torch 2.13 warns of the old ones, older versions have only those.
_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"


def gather_into(out: Tensor, x: Tensor, group: dist.ProcessGroup, async_op: bool = False) -> dist.Work | None:
    """All-gather `x` `[n, ...]` in rank order into `out` `[ranks * n, ...]`; return the work if `async_op`.

    Public way: this one. When gone: an AttributeError.
    """
    work: dist.Work | None = getattr(dist, _GATHER)(out, x, group=group, async_op=async_op)
    return work


def scatter_into(out: Tensor, x: Tensor, group: dist.ProcessGroup, async_op: bool = False) -> dist.Work | None:
    """Reduce-scatter `x` `[ranks * n, ...]`: `out` `[n, ...]` is my part of the sum; return as `gather_into`.

    Public way: this one. When gone: an AttributeError.
    """
    work: dist.Work | None = getattr(dist, _SCATTER)(out, x, group=group, async_op=async_op)
    return work


def find_group(name: str) -> dist.ProcessGroup:
    """Return the process group of a `group_name`, as operators take plain values only. When gone: LongspanError."""
    resolve = needed("torch", dist.distributed_c10d, "_resolve_process_group", _C10D, "collectives in operators")
    group: dist.ProcessGroup = resolve(name)
    return group


def flatten_mesh(mesh: DeviceMesh, axis: str) -> DeviceMesh:
    """Return all axes of `mesh` as one called `axis`, with one process group per set of ranks. Collective.

    Public way: none (`DeviceMesh.from_group` makes unrelated meshes). When gone: LongspanError.
    """
    hint = "a mesh in which only one of data, ring and ulysses is larger than 1"
    flat: DeviceMesh = needed("torch", mesh, "_flatten", "DeviceMesh", "one group over several axes", hint)(axis)
    return flat


def copy_job_timeout(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Give each backend of a group the timeout that the default group's has for the same device.

    torch gives new groups its own default (10 minutes for NCCL). Backends without a timeout are left alone. Public way:
    none for groups that a DeviceMesh makes. When gone: torch's default.
    """
    mine: Any = group
    for device in getattr(mine, "_device_types", ()):
        try:
            default: Any = dist.distributed_c10d._get_default_group()._get_backend(device)
            mine._get_backend(device)._set_default_timeout(default.options._timeout)
        except (AttributeError, RuntimeError):  # a backend without options, or none for the device
            pass
    return group


def give_hosts_time(timeout: timedelta) -> None:
    """Set the timeout of the default group's gloo backend, next to that of its NCCL backend.

    When gone: both have the same timeout.
    """
    try:
        group: Any = dist.distributed_c10d._get_default_group()
        group._get_backend(torch.device("cpu"))._set_default_timeout(timeout)
    except (AttributeError, RuntimeError):
        pass


# --- autograd and tensors

_HAS_VERSIONS = hasattr(Tensor, "_version")


def when_backward_ends(callback: Callable[[], None]) -> None:
    """Call `callback` once, when the running backward has accumulated all its gradients.

    Public way: none (`register_multi_grad_hook` must know the gradients in advance). When gone: LongspanError.
    """
    engine = getattr(torch.autograd.Variable, "_execution_engine", None)
    where, use = "torch.autograd.Variable._execution_engine", "summing gradients when a backward ends"
    hint = "longspan.parallelize(..., fsdp=True), which sums them otherwise"
    needed("torch", engine, "queue_callback", where, use, hint)(callback)


def version_of(x: Tensor) -> int:
    """Return how often operators have written to the memory of `x`, or of its views. When gone: LongspanError.

    Tensors of `torch.inference_mode` do not count: 0.
    """
    if not _HAS_VERSIONS:
        raise missing("torch", "Tensor._version", "checks that a tensor was not overwritten")
    return 0 if x.is_inference() else x._version


# --- modules


def wrapped_by_ddp(model: nn.Module) -> bool:
    """Return whether DistributedDataParallel, around `model` or a module that contains it, runs its forward now.

    When gone: False; `forbid_ddp` refuses such a wrapper before.
    """
    wrapper: Any = getattr(DistributedDataParallel, "_active_ddp_module", None)
    return wrapper is not None and any(module is model for module in wrapper.module.modules())


def forbid_ddp(model: nn.Module, refusal: Iterable[str]) -> None:
    """Make DistributedDataParallel iterate over `refusal`, which raises, before it changes `model`.

    When gone: `wrapped_by_ddp` still refuses its first forward.
    """
    model._ddp_params_and_buffers_to_ignore = refusal  # type: ignore[assignment]


def is_replica(model: nn.Module) -> bool:
    """Return whether `model` is a copy that `torch.nn.DataParallel` made for one forward. When gone: False."""
    return bool(getattr(model, "_is_replica", False))


def before_casting(model: nn.Module, check: Callable[[Callable[[Tensor], Tensor]], None]) -> None:
    """Call `check` with the function that `to`, `half`, `cuda` and similar are about to apply to every tensor.

    When gone: LongspanError.
    """
    needed("torch", type(model), "_apply", "torch.nn.Module", "refusing to cast a parallelized model")

    def checked(fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        check(fn)
        # The class's at that time: FSDP changes the class of the model later.
        applied: nn.Module = type(model)._apply(model, fn, recurse)
        return applied

    model._apply = checked  # type: ignore[method-assign]


def average_gradients(model: nn.Module, ranks: int) -> None:
    """Let FSDP2 divide sums of gradients by `ranks`, after the plain sum that gloo has.

    Its own divisor is the number of ranks over which a weight is sharded, which are fewer for experts. It applies
    another one twice to weights of one rank (torch 2.13), so a hook divides those.

    Versions: from torch 2.13 a module may have several groups of weights, which only private names tell apart. When
    gone: LongspanError.
    """
    name = "set_force_sum_reduction_for_comms"
    for module in (module for module in model.modules() if isinstance(module, FSDPModule)):
        needed("torch", module, name, "FSDPModule", "sums of gradients", "fsdp=False")(True)
        module.set_gradient_divide_factor(float(ranks))
        for group in getattr(module._get_fsdp_state(), "_fsdp_param_groups", ()):
            if ranks > 1 and group.mesh_info.shard_mesh_size == 1:
                if not hasattr(group, "_all_reduce_hook"):
                    use = "averages of experts' gradients"
                    raise missing("torch", "FSDPParamGroup._all_reduce_hook", use, "leave out `experts`")
                group.gradient_divide_factor, group._all_reduce_hook = 1.0, functools.partial(_divide, ranks)


def _divide(ranks: int, grad: Tensor) -> None:
    """Run in a stream of its own, to which FSDP does not tie the memory of what it reduces."""
    grad.div_(ranks)
    if grad.is_cuda:
        grad.record_stream(torch.cuda.current_stream())


class PlacementOn:
    """A `shard_placement_fn` for FSDP2: shard the parameters given to `add` over another mesh, of one axis.

    Versions: from torch 2.13. When gone: LongspanError.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.check()
        self._result, mesh_info = self._found()
        self._mesh_info, self._parameters = mesh_info(mesh, shard_mesh_dim=0), set[nn.Parameter]()

    @staticmethod
    def _found() -> list[Any]:
        from torch.distributed.fsdp._fully_shard import _fsdp_common

        return [getattr(_fsdp_common, name, None) for name in ("ShardPlacementResult", "FSDPMeshInfo")]

    @classmethod
    def check(cls) -> None:
        """Raise if torch is too old."""
        if None in cls._found():
            where, use = "torch.distributed.fsdp._fully_shard.ShardPlacementResult", "experts over data x sequence"
            raise missing("torch", where, use, "leave out `experts`", since="2.13")

    def add(self, parameter: nn.Parameter) -> None:
        """Shard this parameter over the mesh."""
        self._parameters.add(parameter)

    def __call__(self, parameter: nn.Parameter) -> Any:
        """Return FSDP2's description, None for other parameters."""
        added = parameter in self._parameters
        return self._result(placement=None, mesh_info=self._mesh_info) if added else None


def replace_shards(model: nn.Module, weights: Mapping[tuple[nn.Module, str], DTensor]) -> None:
    """Make each `DTensor` the parameter that FSDP2 holds at rest; it shares the memory of the parameter's shard.

    FSDP2 takes over parameters that were replaced before its first forward, as by `load_state_dict(assign=True)`.
    Public way: none for the size of gradients, where experts do not divide evenly. When gone: an AttributeError.
    """
    for (module, name), whole in weights.items():
        setattr(module, name, nn.Parameter(whole, requires_grad=module.get_parameter(name).requires_grad))
    for owner in model.modules():
        groups: list[Any] = owner._get_fsdp_state()._fsdp_param_groups if isinstance(owner, FSDPModule) else []
        for held in (held for group in groups for held in group.fsdp_params):
            replaced = weights.get((held._module_info.module, held._module_info.param_name))
            if replaced is not None:
                held.sharded_size = replaced.to_local().shape


def register_tree(
    kind: type, flatten: Callable[[Any], tuple[list[Any], Any]], unflatten: Callable[[list[Any], Any], Any]
) -> None:
    """Let torch find the tensors in values of a class, as in a list. When gone: LongspanError."""
    register = needed("torch", _pytree, "register_pytree_node", _PYTREE, "training without logits", "logits=True")
    register(kind, flatten, lambda leaves, rest: unflatten(list(leaves), rest))


def tree_leaves(tree: Any) -> list[Any]:
    """Return the values in nested lists, tuples and dicts. When gone: LongspanError."""
    return list(needed("torch", _pytree, "tree_leaves", _PYTREE, "nested values")(tree))


def flatten_tree(tree: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Return `tree_leaves`, and a function that returns the same tree with other leaves. When gone: LongspanError."""
    leaves, kind = needed("torch", _pytree, "tree_flatten", _PYTREE, "nested values")(tree)
    return leaves, lambda others: _pytree.tree_unflatten(others, kind)


def own_parameters(module: nn.Module) -> dict[str, Any]:
    """Return the dict of a module's own parameters, to replace one by a tensor for a while; FSDP2 writes to it too.

    Public way: none (`register_parameter` takes leaves alone). When gone: LongspanError.
    """
    use = "a layer sharded over a tensor axis"
    found: dict[str, Any] = needed("torch", module, "_parameters", "nn.Module", use, "`tensor=1`")
    return found


def orthogonalized(matrix: Tensor) -> Tensor:
    """Return torch.optim.Muon's orthogonalisation of a whole matrix, in bf16, by its own five Newton-Schulz steps.

    Public way: torch.optim.Muon itself, which orthogonalises a sharded matrix by collectives in each of these steps.
    When gone: LongspanError.
    """
    try:
        from torch.optim import _muon

        settings = (_muon.DEFAULT_A, _muon.DEFAULT_B, _muon.DEFAULT_C), _muon.DEFAULT_NS_STEPS, _muon.EPS
        made: Tensor = _muon._zeropower_via_newtonschulz(matrix, *settings)
    except (ImportError, AttributeError) as error:
        raise missing("torch", "torch.optim._muon", "--optimizer muon") from error
    return made
