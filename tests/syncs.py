"""A fake GPU that records what makes the host wait: tensors have shapes but no data.

Within `on_gpu()` a tensor made on device "cuda" is a tensor of torch's "meta" device that claims to be on cuda:0; CPU
tensors are real. Recorded by name is whatever makes the host wait: reading a value (`item`, `bool`, `tolist`), a shape
that depends on values (`nonzero`, a boolean index), a copy to the host, and a copy from it that is not `non_blocking`,
as in `torch.tensor(numbers, device="cuda")`. The host continues with zeros. Waits inside an operator's C++ code are not
seen; operators known to wait are listed.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import transformers
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.autograd.function import BackwardCFunction
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import longspan
from longspan.attn.kernels import choice
from longspan.comm.mesh import MeshGroups
from longspan.memory.checkpointing import LayerCall

GPU = torch.device("cuda", 0)
aten = torch.ops.aten

SHAPES = {  # the shape of the output depends on the values of the input
    "nonzero", "masked_select", "_unique2", "unique_consecutive", "unique_dim", "bincount", "argwhere",
}  # fmt: skip

FSDP_HOOKS = ("_pre_backward", "_root_post_backward_final_callback")
"""Methods of `FSDPState` that autograd's engine calls."""

_NO_WORK = {f"aten::{name}" for name in (
    "empty.memory_format", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view",
    "unbind.int", "split.Tensor", "split_with_sizes", "lift_fresh",
)}  # fmt: skip
"""Operators that launch nothing, besides those that torch knows as views."""


def one_gpu() -> longspan.SequenceSharding:
    """Return the sharding of a single process on the fake GPU. Within `on_gpu()`."""
    return longspan.SequenceSharding(MeshGroups("cuda"))


def gpu_llama(sp: longspan.SequenceSharding, **options: Any) -> Any:
    """Return a small parallelized Llama in bf16 on the fake GPU. Within `on_gpu()`."""
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=2, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).to(device="cuda").eval()
    return longspan.parallelize(model, sp, fsdp=False, **options)


class Seen(list[str]):
    """Names of operations that waited.

    Attributes:
        largest: bytes of the largest tensor on the device.
        launches: operators that start work on the device, by name: neither views, nor allocations, nor empty.
    """

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.launches = Counter[str]()


@contextlib.contextmanager
def on_gpu() -> Iterator[Seen]:
    """Pretend that device "cuda" exists; yield the list that records waits."""
    log = Seen()
    pretends = _Pretends(log)

    def pretending(function: Callable[..., Any]) -> Callable[..., Any]:
        """Run `function` in the mode: the engine of autograd enters no function modes."""

        def run(*args: Any) -> Any:
            active = pretends in _get_current_function_mode_stack()
            with contextlib.nullcontext() if active else pretends:
                return function(*args)

        return run

    patches = [
        mock.patch.object(BackwardCFunction, "apply", pretending(BackwardCFunction.apply)),
        mock.patch.object(LayerCall, "forward", pretending(LayerCall.forward)),
        *(mock.patch.object(FSDPState, name, pretending(getattr(FSDPState, name))) for name in FSDP_HOOKS),
        # It would compare the device of recomputed tensors.
        mock.patch.dict("torch.utils.checkpoint._allowed_determinism_checks_to_fns", {"default": lambda x: None}),
        mock.patch.object(choice, "_cudnn_lengths", set()),
        mock.patch("torch.cuda.current_device", lambda: 0),
        mock.patch("torch.cuda.get_device_capability", lambda *a: (9, 0)),
        mock.patch("torch.cuda.synchronize", lambda *a: log.append("torch.cuda.synchronize")),
    ]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        stack.enter_context(_Counts(log))
        stack.enter_context(pretends)
        yield log


class _Pretends(TorchFunctionMode):
    """Python's side: "cuda" becomes "meta" on the way in, and "meta" is called "cuda" on the way out."""

    def __init__(self, log: Seen) -> None:
        super().__init__()
        self.log = log

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":
            return self._property(func, args, kwargs)
        if name == "cuda":
            return args[0].to("meta")
        if name == "pin_memory":
            return args[0]
        if name == "is_pinned":
            return False
        from_host = func in (torch.tensor, torch.as_tensor) and _is_gpu(kwargs.get("device"))
        if (from_host and not isinstance(args[0], Tensor)) or (name == "new_tensor" and args[0].is_meta):
            self.log.append(f"{name} of numbers, to the device")
        if name in ("tolist", "numpy") and args[0].is_meta:
            self.log.append(name)
            return func(torch.zeros_like(args[0], device="cpu"))
        args = tuple(map(_to_meta, args))
        kwargs = {key: _to_meta(value) for key, value in kwargs.items() if key != "pin_memory"}
        if name == "to" and len(args) > 1 and isinstance(args[1], str):
            args = (args[0], args[1].replace("cuda:0", "meta").replace("cuda", "meta"), *args[2:])
        if isinstance(kwargs.get("device"), str):
            kwargs["device"] = kwargs["device"].replace("cuda:0", "meta").replace("cuda", "meta")
        return func(*args, **kwargs)

    def _property(self, func: Any, args: Any, kwargs: Any) -> Any:
        return _OF_A_GPU[func] if func in _OF_A_GPU and args[0].is_meta else func(*args, **kwargs)


_OF_A_GPU: dict[Any, Any] = {
    getter.__get__: value  # type: ignore[attr-defined]
    for getter, value in ((Tensor.device, GPU), (Tensor.is_cuda, True), (Tensor.is_meta, False), (Tensor.is_cpu, False))
}


def tensors_in(x: Any) -> Iterator[Tensor]:
    """Yield the tensors of an operator's arguments or results; a fifth of the time of torch's `tree_leaves`."""
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, list | tuple):
        for each in x:
            yield from tensors_in(each)
    elif isinstance(x, dict):
        for each in x.values():
            yield from tensors_in(each)


def _is_gpu(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def _to_meta(x: Any) -> Any:
    return torch.device("meta") if isinstance(x, torch.device) and x.type == "cuda" else x


class _Counts(TorchDispatchMode):
    """The operators' side: what needs data that is not there is counted, and answered with zeros."""

    supports_higher_order_operators = True

    def __init__(self, log: Seen) -> None:
        super().__init__()
        self.log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = self._run(func, args, kwargs or {})
        made = [x for x in tensors_in(out) if x.is_meta]
        for x in made:
            self.log.largest = max(self.log.largest, x.untyped_storage().nbytes())
        if any(x.numel() for x in made) and not (getattr(func, "is_view", False) or func.name() in _NO_WORK):
            self.log.launches[func.name().removeprefix("aten::")] += 1
        return out

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(func, HigherOrderOperator):
            return _flex(func, *args)
        packet = func.overloadpacket
        name = packet.__name__
        if packet is aten._to_copy or packet is aten.copy_:
            return self._copy(func, args, kwargs)
        if not any(x.is_meta for x in tensors_in((args, kwargs))):
            return func(*args, **kwargs)
        if packet is aten._local_scalar_dense:
            self.log.append("a value asked for (item, bool, int)")
            return torch.zeros((), dtype=args[0].dtype).item()
        if packet in (aten.equal, aten.allclose, aten.is_nonzero):
            self.log.append(name)
            return True
        by_mask = packet in (aten.index, aten.index_put, aten.index_put_) and any(
            x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1]
        )
        if by_mask or name in SHAPES or (packet is aten.repeat_interleave and kwargs.get("output_size") is None):
            self.log.append("a boolean index" if by_mask else name)
            args, kwargs = tree_map(_zeros, (args, kwargs))
            return tree_map(lambda x: x.to("meta") if isinstance(x, Tensor) else x, func(*args, **kwargs))
        return func(*args, **kwargs)

    def _copy(self, func: Any, args: Any, kwargs: Any) -> Any:
        into_place = func.overloadpacket is aten.copy_
        source = args[1] if into_place else args[0]
        target = args[0].device if into_place else kwargs.get("device") or source.device
        later = args[2] if into_place and len(args) > 2 else kwargs.get("non_blocking", False)
        if source.is_meta and target.type == "cpu":
            self.log.append("a copy to the host")
            zeros = torch.zeros(source.shape, dtype=kwargs.get("dtype") or source.dtype)
            return args[0].copy_(zeros) if into_place else zeros
        if source.device.type == "cpu" and target.type == "meta" and source.dim() + source.numel() > 1 and not later:
            self.log.append("a copy from the host")
        return func(*args, **kwargs)


def _flex(func: HigherOrderOperator, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
    """FlexAttention, whose kernel is compiled and does not wait: the shapes of what it gives."""
    if func.name() == "flex_attention":
        lse = q.new_empty(q.shape[:3], dtype=torch.float32)
        return q.new_empty(*q.shape[:3], v.shape[3]), lse, lse.clone()
    assert func.name() == "flex_attention_backward", func
    captured = rest[-2]
    return *(torch.empty_like(x) for x in (q, k, v)), tuple(None for _ in captured)


def _zeros(x: Any) -> Any:
    return torch.zeros(x.shape, dtype=x.dtype) if isinstance(x, Tensor) and x.is_meta else x
