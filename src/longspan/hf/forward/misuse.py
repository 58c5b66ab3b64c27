"""Make misuse of a parallelized model raise where it happens, or at its next forward.

Examples: a wrapper that averages gradients, a cast of its weights, a saver that would write each rank's shards as if
they were weights, a parameter added later. This changes the instances, not their classes.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from longspan.comm.mesh import SequenceSharding
from longspan.comm.weights import digests_of, local_part
from longspan.compat.torch_api import WRAPPED, before_casting, forbid_ddp, is_replica, version_of, wrapped_by_ddp
from longspan.core.errors import LongspanError
from longspan.hf.forward.stage import ForwardCall, Stage

NO_DDP = (
    "DistributedDataParallel around a parallelized model would average its gradients over the ranks a second "
    "time; call the model that longspan.parallelize returned (with accelerate, prepare the loader, "
    "optimizer and scheduler, not the model)"
)
_SAVE = (
    "on every rank call longspan.checkpoint.export(folder, model) for a Hugging Face folder, "
    "or longspan.checkpoint.save for a checkpoint to resume from"
)
_ACCELERATE = ("save_model", "save_state")  # methods of `Accelerator` that write what a model's `state_dict` returns


def refuse_wrappers_and_casts(model: nn.Module, inner: nn.Module) -> None:
    """Make DistributedDataParallel around the user's model, copies, other dtypes and adapters raise at once.

    `inner` is the transformers model in it.
    """
    for each in {id(model): model, id(inner): inner}.values():
        forbid_ddp(each, _NoDDP())
    before_casting(inner, lambda fn: _refuse_cast(inner, fn))
    for name in ("add_adapter", "load_adapter"):  # of transformers
        setattr(inner, name, functools.partial(_cannot_add, name))
    refuse_copies(inner)


def refuse_copies(model: nn.Module) -> None:
    """Make `copy.deepcopy` of a parallelized model raise: the copy's replaced methods would use the model's weights."""

    def deepcopy(memo: Any) -> NoReturn:
        raise LongspanError(
            "copy.deepcopy of a parallelized model would share its process groups and shards; copy the model before "
            "longspan.parallelize, or keep a state dict (torch.distributed.checkpoint.state_dict.get_model_state_dict)"
        )

    model.__deepcopy__ = deepcopy  # type: ignore[assignment]


class _NoDDP:
    """An iterable that raises."""

    def __iter__(self) -> Iterator[str]:
        raise LongspanError(NO_DDP, code="LS401")


def _refuse_cast(model: nn.Module, fn: Callable[[Tensor], Tensor]) -> None:
    for before in {p.dtype for p in model.parameters() if p.is_floating_point()}:
        after = before
        with contextlib.suppress(Exception):  # `fn` may be anything, and raises its own error
            after = fn(torch.empty(0, dtype=before)).dtype
        if after != before:
            raise LongspanError(
                f"a parallelized model keeps its dtype: {before} would become {after}, and its optimizer and its sums "
                f"of gradients with it; cast the model before longspan.parallelize, or compute in {after} by mp_policy "
                f"(with FSDP) or torch.autocast (without)"
            )


def refuse_saving_shards(model: nn.Module, inner: nn.Module) -> None:
    """Make `save_pretrained`, `push_to_hub` and accelerate's `save_model` raise for a model of sharded weights.

    `state_dict` stays: Distributed Checkpoint and `accelerator.get_state_dict` (which returns DTensors) call it.
    """
    for each in {id(model): model, id(inner): inner}.values():
        for name in ("save_pretrained", "push_to_hub"):
            if hasattr(each, name):
                setattr(each, name, functools.partial(_cannot_save, name))
        each.register_state_dict_pre_hook(_refuse_accelerate)


def refuse_plain_tensors_of_shards(model: nn.Module) -> None:
    """Make another vocabulary, a state dict of whole tensors and Adafactor raise for a model of sharded weights."""
    if hasattr(model, "resize_token_embeddings"):
        resize = model.resize_token_embeddings
        model.resize_token_embeddings = functools.partial(_resize, model, resize)  # type: ignore[assignment]
    model.register_load_state_dict_pre_hook(_refuse_whole_tensors)
    _watch_optimizers()


def _resize(model: Any, resize: Any, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None,
            *args: Any, **kwargs: Any) -> Any:  # fmt: skip
    before = model.get_input_embeddings().num_embeddings
    after = new_num_tokens or before
    after += -after % (pad_to_multiple_of or 1)
    if after != before:
        raise LongspanError(
            f"resize_token_embeddings from {before} to {after} tokens: embedding and head are sharded already; resize "
            f"them before longspan.parallelize",
            code="LS403",
        )
    return resize(new_num_tokens, pad_to_multiple_of, *args, **kwargs)


def _refuse_whole_tensors(model: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, p in model.named_parameters():
        given = state_dict.get(prefix + name)
        if isinstance(p, DTensor) and isinstance(given, Tensor) and not isinstance(given, DTensor):
            raise LongspanError(
                f"load_state_dict got a whole tensor for {name}, which is sharded; load it before "
                f"longspan.parallelize, or call torch.distributed.checkpoint.state_dict.set_model_state_dict(model, "
                f"state_dict, options=StateDictOptions(full_state_dict=True))"
            )


@functools.cache
def _watch_optimizers() -> None:
    """Once per process: check each optimizer before its steps."""
    register_optimizer_step_pre_hook(_refuse_adafactor)


def _refuse_adafactor(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Raise for Adafactor over shards: it combines the means of a matrix's rows and columns with plain tensors."""
    if type(optimizer).__name__ == "Adafactor" and any(
        isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"]
    ):
        raise LongspanError(
            f"{type(optimizer).__module__}.Adafactor cannot train sharded weights; use AdamW (torchao's AdamW8bit has "
            f"small states, too), or every weight on every rank by longspan.parallelize(..., fsdp=False)"
        )


def _cannot_add(method: str, *_: Any, **__: Any) -> NoReturn:
    raise LongspanError(
        f"{method} after parallelize: the gradients of its parameters would not be averaged over the ranks; add PEFT's "
        f"adapters first, then parallelize the model",
        code="LS403",
    )


def _cannot_save(method: str, *_: Any, **__: Any) -> NoReturn:
    raise LongspanError(
        f"{method} cannot save shards, and the weights of this model are sharded; {_SAVE}", code="LS404"
    )


def _refuse_accelerate(*_: Any) -> None:
    """Raise if accelerate asks for the state dict; only the call stack shows who does."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name in _ACCELERATE and frame.f_globals.get("__name__", "").startswith("accelerate."):
            raise LongspanError(
                f"accelerate's {frame.f_code.co_name} cannot save shards, and the weights of this model are sharded; "
                f"{_SAVE}",
                code="LS404",
            )


_SEARCHES = 3  # first training forwards that search for optimizers


class ModelChangeCheck(Stage):
    """Refuse a model that was wrapped, recast or given other parameters after `parallelize`.

    `model` is not sharded yet; `sharded` if it will be, which replaces its parameters.
    """

    def __init__(
        self, model: nn.Module, sp: SequenceSharding, policy: MixedPrecisionPolicy | None, *, sharded: bool
    ) -> None:
        self.device, self.policy, self.sharded = sp.device.type, policy, sharded
        self.names, self.owners = _names(model), weakref.WeakSet(_owners(model).values())
        parameters = model.named_parameters() if sharded else ()
        self.replaced: list[tuple[str, weakref.ref[Tensor]]] = [(name, weakref.ref(p)) for name, p in parameters]
        self.searches = _SEARCHES

    def check(self, call: ForwardCall) -> None:
        model = call.model
        if wrapped_by_ddp(model):
            raise LongspanError(NO_DDP, code="LS401")
        if is_replica(model):
            raise LongspanError(
                "torch.nn.DataParallel copies a parallelized model and divides its batch again; start one process per "
                "GPU (torchrun) and call the model that longspan.parallelize returned"
            )
        policy = self.policy
        if policy is not None and policy.param_dtype is not None and torch.is_autocast_enabled(self.device):
            raise LongspanError(
                f"autocast to {torch.get_autocast_dtype(self.device)} around a model whose FSDP computes in "
                f"{policy.param_dtype} (mp_policy): two rules for one dtype; call the model outside of autocast, or "
                f"parallelize it without mp_policy"
            )
        self._check_parameters(model)
        if model.training and torch.is_grad_enabled() and self.replaced and self.searches:
            self.searches -= 1
            self._check_optimizers()

    def _check_parameters(self, model: nn.Module) -> None:
        sharded = isinstance(model, FSDPModule) or any(isinstance(p, DTensor) for p in model.parameters())
        if sharded and not self.sharded:
            raise LongspanError(
                "the model was sharded (fully_shard) after longspan.parallelize(fsdp=False): its gradients would be "
                "summed twice, and divided; use longspan.parallelize(..., fsdp=True), which shards it"
            )
        replaced = next((name for name, module in _owners(model).items() if module not in self.owners), None)
        names = _names(model)
        if names == self.names and replaced is not None:
            raise LongspanError(
                f"module {replaced} was replaced after parallelize: its gradient would not be averaged over the ranks; "
                f"change the model first (its tokens, another head), then parallelize it",
                code="LS403",
            )
        if names == self.names:
            return
        trained = _names(model, trained=True)
        for what, some in (("was added", names - self.names), ("is gone", self.names - names)):
            if some:
                some = some & trained or some
                also = f" ({len(some)} are)" if len(some) > 1 else ""
                raise LongspanError(
                    f"parameter {min(some)} {what} after parallelize{also}: its gradient would not be averaged "
                    f"over the ranks; change the model first (PEFT's adapters, another head), then parallelize it",
                    code="LS403",
                )

    def _check_optimizers(self) -> None:
        """Raise if an optimizer holds the parameters that FSDP has replaced: it would train nothing."""
        self.replaced = [(name, ref) for name, ref in self.replaced if ref() is not None]
        if not self.replaced:
            return
        gc.collect()  # an unreferenced optimizer does no harm
        replaced = {id(p): name for name, ref in self.replaced if (p := ref()) is not None}
        for optimizer in _optimizers():
            held = [replaced[id(p)] for group in optimizer.param_groups for p in group["params"] if id(p) in replaced]
            if held:
                raise LongspanError(
                    f"an optimizer ({type(optimizer).__name__}) was made before longspan.parallelize: it holds "
                    f"{len(held)} parameters, {held[0]} first, that FSDP has replaced by shards, and would train "
                    f"nothing; make it from model.parameters() after longspan.parallelize",
                    code="LS402",
                )


class WeightDamageCheck(Stage):
    """Checksum this rank's weights (under FSDP its shards) between optimizer steps, to detect damaged memory.

    Checksums are computed after each optimizer step, and compared before the next step and at the next forward. A
    legitimate write (loading a state dict) increments the tensor's version counter; a write through `.data` does not.
    """

    def __init__(self, model: nn.Module) -> None:
        self.parameters = dict(model.named_parameters())
        self.known: dict[str, tuple[int, int]] = {}  # version and checksum
        self.damage: str | None = None
        self.hooked = False
        self.searches = _SEARCHES

    def check(self, call: ForwardCall) -> None:
        if not self.hooked and self.searches and torch.is_grad_enabled():
            self.searches -= 1
            self._hook_optimizers()
        self._compare()
        if self.damage is not None:
            raise LongspanError(self.damage)

    def _hook_optimizers(self) -> None:
        mine = {id(p) for p in self.parameters.values()}
        for optimizer in _optimizers():
            if any(id(p) in mine for group in optimizer.param_groups for p in group["params"]):
                self.hooked = True
                optimizer.register_step_pre_hook(lambda *_: self._compare())
                optimizer.register_step_post_hook(lambda *_: self._compare())

    def _compare(self) -> None:
        digests = digests_of(self.parameters)
        now = {name: (_version(p), digests[name]) for name, p in self.parameters.items()}
        for name, (version, digest) in self.known.items():
            if now[name][0] == version and now[name][1] != digest and self.damage is None:
                self.damage = (
                    f"the weights of {name} on this rank changed between two optimizer steps without a write: memory "
                    f"was damaged; resume from the last checkpoint, and test that machine"
                )
        self.known = now


def _version(p: Tensor) -> int:
    return version_of(p) + (version_of(local_part(p)) if isinstance(p, DTensor) else 0)


def _names(model: nn.Module, trained: bool = False) -> frozenset[str]:
    """Return the names of parameters, without those of wrappers around modules."""
    names = {name for name, p in model.named_parameters() if p.requires_grad or not trained}
    for wrapper in WRAPPED:
        names = {name.replace(wrapper, "") if wrapper in name else name for name in names}
    return frozenset(names)


def _owners(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that hold parameters, by name."""
    return {name: m for name, m in model.named_modules() if next(m.parameters(recurse=False), None) is not None}


def _optimizers() -> list[torch.optim.Optimizer]:
    """Return every live optimizer."""
    return [x for x in gc.get_objects() if issubclass(type(x), torch.optim.Optimizer)]
