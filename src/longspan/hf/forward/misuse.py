"""Make misuse of a parallelized model raise where it happens, or at its next forward.

Examples: a wrapper that averages gradients, a copy that would share weights, a parameter added later. This changes the
instances, not their classes. torch itself refuses on every rank to load, resize or train shards as plain tensors.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from longspan.comm.mesh import SequenceSharding
from longspan.compat.torch_api import WRAPPED, is_replica, wrapped_by_ddp
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


def refuse_copies(model: nn.Module) -> None:
    """Make `copy.deepcopy` of a parallelized model raise: the copy's replaced methods would use the model's weights."""

    def deepcopy(memo: Any) -> NoReturn:
        raise LongspanError(
            "copy.deepcopy of a parallelized model would share its process groups and shards; copy the model before "
            "longspan.parallelize, or keep a state dict (torch.distributed.checkpoint.state_dict.get_model_state_dict)"
        )

    model.__deepcopy__ = deepcopy  # type: ignore[assignment]


def refuse_saving_shards(model: nn.Module, inner: nn.Module, fix: str = _SAVE) -> None:
    """Make `save_pretrained` and the like raise on every rank; libraries would on the first, or write shards."""
    for each in {id(model): model, id(inner): inner}.values():
        for name in ("save_pretrained", "push_to_hub", "save_lora_adapter"):
            if hasattr(each, name):
                setattr(each, name, functools.partial(_cannot_save, name, fix))


def _cannot_save(method: str, fix: str, *_: Any, **__: Any) -> NoReturn:
    raise LongspanError(f"{method} cannot save shards, and the weights of this model are sharded; {fix}", code="LS404")


_SEARCHES = 3  # first training forwards that search for optimizers


class ModelChangeCheck(Stage):
    """Refuse a model that was wrapped or given other parameters after `parallelize`.

    `model` is not sharded yet; `sharded` if it will be, which replaces its parameters.
    """

    def __init__(
        self, model: nn.Module, sp: SequenceSharding, policy: MixedPrecisionPolicy | None, *, sharded: bool
    ) -> None:
        self.device, self.policy, self.sharded = sp.device.type, policy, sharded
        owners, found = _owners_and_parameters(model)
        self.names, self.owners = _names(found), weakref.WeakSet(owners.values())
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
        owners, parameters = _owners_and_parameters(model)
        sharded = isinstance(model, FSDPModule) or any(isinstance(p, DTensor) for p in parameters.values())
        if sharded and not self.sharded:
            raise LongspanError(
                "the model was sharded (fully_shard) after longspan.parallelize(fsdp=False): its gradients would be "
                "summed twice, and divided; use longspan.parallelize(..., fsdp=True), which shards it"
            )
        replaced = next((name for name, module in owners.items() if module not in self.owners), None)
        names = _names(parameters)
        if names == self.names and replaced is not None:
            raise LongspanError(
                f"module {replaced} was replaced after parallelize: its gradient would not be averaged over the ranks; "
                f"change the model first (its tokens, another head), then parallelize it",
                code="LS403",
            )
        if names == self.names:
            return
        trained = _names({name: p for name, p in parameters.items() if p.requires_grad})
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
        optimizers = [x for x in gc.get_objects() if issubclass(type(x), torch.optim.Optimizer)]
        for optimizer in optimizers:
            held = [replaced[id(p)] for group in optimizer.param_groups for p in group["params"] if id(p) in replaced]
            if held:
                raise LongspanError(
                    f"an optimizer ({type(optimizer).__name__}) was made before longspan.parallelize: it holds "
                    f"{len(held)} parameters, {held[0]} first, that FSDP has replaced by shards, and would train "
                    f"nothing; make it from model.parameters() after longspan.parallelize",
                    code="LS402",
                )


def _names(names: Iterable[str]) -> frozenset[str]:
    """Return the names of parameters, without those of wrappers around modules."""
    for wrapper in WRAPPED:
        names = {name.replace(wrapper, "") if wrapper in name else name for name in names}
    return frozenset(names)


def _owners_and_parameters(model: nn.Module) -> tuple[dict[str, nn.Module], dict[str, Tensor]]:
    """Return the modules that hold parameters and the parameters, by name, in one walk: each forward makes it."""
    owners: dict[str, nn.Module] = {}
    parameters: dict[str, Tensor] = {}
    seen = set[int]()  # a tied weight has its first name
    for path, module in model.named_modules():
        for name, p in module.named_parameters(recurse=False, remove_duplicate=False):
            owners[path] = module
            if id(p) not in seen:
                seen.add(id(p))
                parameters[f"{path}.{name}" if path else name] = p
    return owners, parameters
