"""The stages that refuse a forward: a model that changed since `parallelize`, or arguments that cannot be sharded."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from longspan.comm.digests import digests_of, local_part
from longspan.compat.torch_api import WRAPPED, is_replica, version_of, wrapped_by_ddp
from longspan.core.errors import LongspanError
from longspan.hf.checks.misuse import NO_DDP
from longspan.hf.forward.stage import ForwardCall, ModelTraits, Stage
from longspan.hf.support import HELP, refuse_dropout

if TYPE_CHECKING:
    from longspan.comm.mesh import SequenceSharding
    from longspan.hf.weights.gradients import GradientSum

_SEARCHES = 3  # first training forwards that search for optimizers


class SupportedArguments(Stage):
    """Refuse arguments that a sharded forward does not support."""

    def __init__(self, traits: ModelTraits) -> None:
        self.traits = traits

    def check(self, call: ForwardCall) -> None:
        batch, name, argument = call.batch, self.traits.name, self.traits.cache_name
        cache = batch.get("cache")
        if cache is not None or batch.get("use_cache"):
            given = f"{argument} is a {type(cache).__name__}" if cache is not None else "use_cache=True"
            raise LongspanError(
                f"{given}: a parallelized model keeps its keys and values in a cache sharded over the ranks; pass "
                f"{argument}=longspan.ShardedCache(model) (`generate` makes one itself), or leave both out"
            )
        if batch.get("output_attentions"):
            raise LongspanError(
                "output_attentions=True is not supported on a parallelized model: attention weights are never made; "
                "leave it out"
            )
        if batch.get("encoder_hidden_states") is not None:
            raise LongspanError(f"encoder_hidden_states ask {name} for cross attention to another sequence; {HELP}")
        if batch.get("labels") is not None and not self.traits.accepts("labels"):
            raise LongspanError(f"{name} takes no labels: it has no head that predicts tokens; leave them out")
        if call.model.training:
            refuse_dropout(self.traits.dropout)


class GradientsSummed(Stage):
    """Refuse parameters whose gradient would not be summed."""

    def __init__(self, gradients: GradientSum) -> None:
        self.gradients = gradients

    def restore(self) -> None:
        """Restore the gradients that a backward set aside before it raised."""
        self.gradients.forget_unfinished()

    def check(self, call: ForwardCall) -> None:
        self.gradients.check(call.model)


class ModelChangeCheck(Stage):
    """Refuse a model that was wrapped, recast or given other parameters after `parallelize`.

    Args:
        model: before its weights are sharded.
        sp: the sharding.
        policy: FSDP's mixed precision, if any.
        sharded: whether its weights will be sharded, which replaces its parameters.
    """

    def __init__(
        self, model: nn.Module, sp: SequenceSharding, policy: MixedPrecisionPolicy | None, *, sharded: bool
    ) -> None:
        self.device, self.policy, self.sharded = sp.device.type, policy, sharded
        self.names = _names(model)
        parameters = model.named_parameters() if sharded else ()
        self.replaced: list[tuple[str, weakref.ref[Tensor]]] = [(name, weakref.ref(p)) for name, p in parameters]
        self.searches = _SEARCHES

    def check(self, call: ForwardCall) -> None:
        model = call.model
        if wrapped_by_ddp(model):
            raise LongspanError(NO_DDP)
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
        names = _names(model)
        if names == self.names:
            return
        trained = _names(model, trained=True)
        for what, some in (("was added", names - self.names), ("is gone", self.names - names)):
            if some:
                some = some & trained or some
                also = f" ({len(some)} are)" if len(some) > 1 else ""
                raise LongspanError(
                    f"parameter {min(some)} {what} after parallelize{also}: its gradient would not be summed over the "
                    f"ranks; change the model first (PEFT's adapters, another head), then parallelize it"
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
                    f"nothing; make it from model.parameters() after longspan.parallelize"
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


def _optimizers() -> list[torch.optim.Optimizer]:
    """Return every live optimizer."""
    return [x for x in gc.get_objects() if issubclass(type(x), torch.optim.Optimizer)]
