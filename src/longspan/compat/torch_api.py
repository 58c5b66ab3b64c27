"""torch's private and version-bound names, without those of attention and checkpoints."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from longspan.core.errors import LongspanError

Function = TypeVar("Function", bound=Callable[..., Any])

NO_GROUP_WARNING = "torch.distributed is disabled"
"""How Distributed Checkpoint's warning begins if there is no process group."""

FSDP_KEEPS_INTEGERS = torch.__version__ >= "2.13"
"""Whether FSDP gathers integer weights unchanged under mixed precision; torch 2.11 casts them, too."""

WRAPPED = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""What `torch.compile` and torch's checkpoint wrapper insert into names of parameters."""


def compiles_fp8(device: torch.device) -> bool:
    """Return whether Triton can compile kernels that read 8-bit floats on a device."""
    from torch.utils._triton import has_triton

    return device.type == "cuda" and has_triton() and torch.cuda.get_device_capability(device) >= (8, 9)


def not_compiled(function: Function) -> Function:
    """`torch.compiler.disable` with types: a compiler runs `function` as it is."""
    disabled: Function = torch.compiler.disable(function)
    return disabled


_MOST_PINNED = 1 << 26
"""Bytes of the largest tensor that `to_device` pins: torch keeps pinned memory for later tensors."""


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Move a tensor; a small one from the host to a GPU through pinned memory, so that the host does not wait."""
    if x.device.type == "cpu" and device.type == "cuda" and x.nbytes <= _MOST_PINNED and not x.requires_grad:
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)


def has_forward_hooks(module: nn.Module) -> bool:
    """Return whether hooks read the module's output."""
    return bool(module._forward_hooks)


def waits_for_gradient(x: Tensor) -> bool:
    """Return whether the gradient of a non-leaf tensor is needed, by a hook or `retain_grad`."""
    return bool(x._backward_hooks) or x.retains_grad


def profiler_records() -> bool:
    """Return whether a profiler of torch records; there can be only one."""
    return bool(torch._C._autograd._profiler_enabled())


def named_range(name: str) -> contextlib.AbstractContextManager[Any]:
    """Return a range for a profiler's trace; a null context if none records, or in a compiler.

    Making the range in any case costs microseconds in every layer.
    """
    if torch.compiler.is_compiling() or not profiler_records():
        return contextlib.nullcontext()
    return torch.profiler.record_function(name)


def graph_is_kept() -> bool:
    """Return whether the running backward keeps its graph (`retain_graph=True`); call it inside of one."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


ELEMENTWISE: dict[str, Callable[[Any], Tensor]] = {
    "MulBackward0": lambda node: node._saved_self * node._saved_other,
    "SiluBackward0": lambda node: F.silu(node._saved_self),
    "GeluBackward0": lambda node: F.gelu(node._saved_self, approximate=node._saved_approximate),
}
"""The result of an operation, recomputed from its autograd node, by the node's name."""


def saved_tensors_are_hooked() -> bool:
    """Return whether saved-tensor hooks are active, such as a checkpointed layer's: only the innermost apply."""
    ignore_tracing = True
    return torch._C._autograd._top_saved_tensors_default_hooks(ignore_tracing) is not None


_FACTS = ("shape", "dtype", "device", "layout", "ndim", "itemsize", "requires_grad", "grad_fn", "is_leaf", "is_cpu",
          "is_cuda", "is_meta", "retains_grad", "_backward_hooks")  # fmt: skip
TENSOR_FACTS = {getattr(Tensor, name).__get__ for name in _FACTS} | {
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.__len__,
}  # fmt: skip
"""Functions that `__torch_function__` receives when code reads a fact about a tensor, such as its shape."""


def as_subclass(kind: type[Tensor], data: Tensor, requires_grad: bool = True) -> Any:
    """Return a leaf of a subclass of `Tensor` with this data."""
    return Tensor._make_subclass(kind, data, requires_grad)


def without_torch_function(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function of torch on subclasses of `Tensor` as if they were plain tensors."""
    with torch._C.DisableTorchFunctionSubclass():
        return function(*args, **kwargs)


# --- collectives and groups

# torch 2.13 warns of the old names, 2.11 has no others.
_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"


def gather_into(out: Tensor, x: Tensor, group: dist.ProcessGroup, async_op: bool = False) -> dist.Work | None:
    """All-gather `x` `[n, ...]` in rank order into `out` `[ranks * n, ...]`; return the work if `async_op`."""
    work: dist.Work | None = getattr(dist, _GATHER)(out, x, group=group, async_op=async_op)
    return work


def scatter_into(out: Tensor, x: Tensor, group: dist.ProcessGroup, async_op: bool = False) -> dist.Work | None:
    """Reduce-scatter `x` `[ranks * n, ...]`: `out` `[n, ...]` is my part of the sum; return as `gather_into`."""
    work: dist.Work | None = getattr(dist, _SCATTER)(out, x, group=group, async_op=async_op)
    return work


def find_group(name: str) -> dist.ProcessGroup:
    """Return the process group of a `group_name`, as operators take plain values only."""
    names: Any = dist.distributed_c10d
    group: dist.ProcessGroup = names._resolve_process_group(name)
    return group


def flatten_mesh(mesh: DeviceMesh, axis: str) -> DeviceMesh:
    """Return all axes of `mesh` as one called `axis`, with one process group per set of ranks. Collective.

    `DeviceMesh.from_group` makes unrelated meshes.
    """
    return mesh._flatten(axis)


def group_of_partition(partition: Sequence[Sequence[int]]) -> dist.ProcessGroup:
    """Return this rank's group of a partition of all ranks, with the job's timeouts. Collective.

    If the default group is bound to a device, its NCCL communicator is split once for all groups; `new_group` would
    split it on every rank for each group. From torch 2.13 on the groups have no gloo backend, which would connect their
    hosts. Otherwise each rank makes only its own group.
    """
    ranks = [list(group) for group in partition]
    if dist.distributed_c10d._get_default_group().bound_device_id is None:
        mine = next(group for group in ranks if dist.get_rank() in group)
        return copy_job_timeout(dist.new_group(mine, use_local_synchronization=True))
    only: dict[str, Any] = {}
    if "backend" in inspect.signature(dist.split_group).parameters:
        only["backend"] = "cuda:nccl"
    made = dist.split_group(split_ranks=ranks, **only)
    assert made is not None
    return copy_job_timeout(made)


def copy_job_timeout(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Give each backend of a group the timeout that the default group's has for the same device.

    torch gives the groups of a DeviceMesh its own default (10 minutes for NCCL). Backends without a timeout are left
    alone.
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
    """Set the timeout of the default group's gloo backend, if it has one, next to that of its NCCL backend."""
    with contextlib.suppress(RuntimeError):
        dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))._set_default_timeout(timeout)


ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Environment variables that configure torch's allocator; torch reads one of them."""


def use_expandable_segments() -> None:
    """Let torch's allocator on GPUs grow its segments, unless the user has configured it.

    Batches of different lengths fragment segments of a fixed size.
    """
    configured: str = getattr(torch._C, "_accelerator_getAllocatorSettings", str)()
    if not configured and not any(name in os.environ for name in ALLOCATOR):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


# --- autograd and tensors


def when_backward_ends(callback: Callable[[], None]) -> None:
    """Call `callback` once, when the running backward has accumulated all its gradients.

    `register_multi_grad_hook` must know the gradients in advance.
    """
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(callback)


def version_of(x: Tensor) -> int:
    """Return how often operators have written to the memory of `x`, or of its views.

    Tensors of `torch.inference_mode` do not count: 0.
    """
    return 0 if x.is_inference() else x._version


# --- modules


def wrapped_by_ddp(model: nn.Module) -> bool:
    """Return whether DistributedDataParallel, around `model` or a module that contains it, runs its forward now."""
    wrapper: Any = DistributedDataParallel._active_ddp_module
    return wrapper is not None and any(module is model for module in wrapper.module.modules())


def is_replica(model: nn.Module) -> bool:
    """Return whether `model` is a copy that `torch.nn.DataParallel` made for one forward."""
    return bool(getattr(model, "_is_replica", False))


def average_gradients(model: nn.Module, ranks: int) -> None:
    """Let FSDP2 divide sums of gradients by `ranks`, after the plain sum that gloo has.

    Its own divisor is the number of ranks over which a weight is sharded, which are fewer for experts. It applies
    another one twice to weights of one rank (torch 2.13), so a hook divides those. A module may have several groups of
    weights from torch 2.13 on.
    """
    for module in (module for module in model.modules() if isinstance(module, FSDPModule)):
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(float(ranks))
        for group in getattr(module._get_fsdp_state(), "_fsdp_param_groups", ()):
            if ranks > 1 and group.mesh_info.shard_mesh_size == 1:
                group.gradient_divide_factor, group._all_reduce_hook = 1.0, functools.partial(_divide, ranks)


def _divide(ranks: int, grad: Tensor) -> None:
    """Run in a stream of its own, to which FSDP does not tie the memory of what it reduces."""
    grad.div_(ranks)
    if grad.is_cuda:
        grad.record_stream(torch.cuda.current_stream())


class PlacementOn:
    """A `shard_placement_fn` for FSDP2: shard the parameters given to `add` over another mesh, of one axis.

    torch has these from 2.13 on.
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
            raise LongspanError(
                f"FSDP of torch {torch.__version__} has one mesh for all weights, experts another; use torch 2.13, "
                f"or leave out `experts`"
            )

    def add(self, parameter: nn.Parameter) -> None:
        """Shard this parameter over the mesh."""
        self._parameters.add(parameter)

    def __call__(self, parameter: nn.Parameter) -> Any:
        """Return FSDP2's description, None for other parameters."""
        added = parameter in self._parameters
        return self._result(placement=None, mesh_info=self._mesh_info) if added else None


def replace_shards(model: nn.Module, weights: Mapping[tuple[nn.Module, str], DTensor]) -> None:
    """Make each `DTensor` the parameter that FSDP2 holds at rest; it shares the memory of the parameter's shard.

    FSDP2 takes over parameters that were replaced before its first forward, as by `load_state_dict(assign=True)`, but
    not the size of gradients where experts do not divide evenly.
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
    """Let torch find the tensors in values of a class, as in a list."""
    _pytree.register_pytree_node(kind, flatten, lambda leaves, rest: unflatten(list(leaves), rest))


def flatten_tree(tree: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Return the values in nested lists, tuples and dicts, and a function that returns the same tree with others."""
    leaves, kind = _pytree.tree_flatten(tree)
    return leaves, lambda others: _pytree.tree_unflatten(others, kind)


def own_parameters(module: nn.Module) -> dict[str, Any]:
    """Return the dict of a module's own parameters, to replace one by a tensor for a while; FSDP2 writes to it too.

    `register_parameter` takes leaves alone.
    """
    return module._parameters


def orthogonalized(matrix: Tensor) -> Tensor:
    """Return torch.optim.Muon's orthogonalisation of a whole matrix, in bf16, by its own five Newton-Schulz steps.

    torch.optim.Muon itself orthogonalises a sharded matrix by collectives in each of these steps.
    """
    from torch.optim import _muon

    settings = (_muon.DEFAULT_A, _muon.DEFAULT_B, _muon.DEFAULT_C), _muon.DEFAULT_NS_STEPS, _muon.EPS
    made: Tensor = _muon._zeropower_via_newtonschulz(matrix, *settings)
    return made


class _ConstantsOnCpu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **{**(kwargs or {}), **({"device": "cpu"} if func in (torch.tensor, torch.arange) else {})})


class _OnMeta(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = _pytree.tree_leaves((args, kwargs))
        if func is torch.ops.aten._to_copy.default and (args[0].is_meta or not args[0].is_floating_point()):
            kwargs = {**kwargs, "device": args[0].device}  # of no values, and how many a mask selects is known
        elif any(isinstance(x, Tensor) and x.is_meta for x in leaves) and "copy" not in func.__name__:
            with contextlib.suppress(RuntimeError):  # another device is an error but for indices
                return func(*_pytree.tree_map(_floats_to_meta, args), **_pytree.tree_map(_floats_to_meta, kwargs))
            args, kwargs = _pytree.tree_map(_to_meta, (args, kwargs))
        return func(*args, **kwargs)


def _floats_to_meta(x: Any) -> Any:
    return _to_meta(x) if isinstance(x, Tensor) and x.is_floating_point() else x


def _to_meta(x: Any) -> Any:
    return x.to("meta") if isinstance(x, Tensor) and x.dim() else x


@contextlib.contextmanager
def on_meta() -> Iterator[None]:
    """Within this, move tensors to the meta device where they meet one that is there, integers as late as possible."""
    with _ConstantsOnCpu(), _OnMeta():  # type: ignore[no-untyped-call]
        yield
