"""Refuse changes to a parallelized model that would silently train something else, or fail obscurely.

Examples: a wrapper that averages gradients, an optimizer of parameters that FSDP has replaced, adapters added too late.
They raise where they happen, or at the next forward.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from longspan.comm.digests import digests_of, local_part
from longspan.compat.torch_api import (
    WRAPPED,
    before_casting,
    forbid_ddp,
    is_replica,
    not_compiled,
    version_of,
    wrapped_by_ddp,
)
from longspan.core.errors import LongspanError

if TYPE_CHECKING:
    from longspan.comm.mesh import SequenceSharding

_LOOKS = 3  # training forwards that search for optimizers


class Guard:
    """Check that a model is still as `parallelize` left it.

    Args:
        model: before its weights are sharded.
        sp: the sharding.
        policy: FSDP's mixed precision, if any.
    """

    def __init__(self, model: nn.Module, sp: SequenceSharding, policy: MixedPrecisionPolicy | None) -> None:
        self.device = sp.device.type
        self.policy = policy
        self.names = _names(model)
        self.sharded = False
        self.former: list[tuple[str, weakref.ref[Tensor]]] = []
        self.looks = _LOOKS

    def remember(self, model: nn.Module) -> None:
        """Note the parameters before FSDP replaces them, without keeping them alive."""
        self.former = [(name, weakref.ref(p)) for name, p in model.named_parameters()]
        self.sharded = True

    def check(self, model: nn.Module) -> None:
        """Raise before a forward if the model was changed.

        Raises:
            LongspanError: naming the change and the fix.
        """
        if wrapped_by_ddp(model):
            raise LongspanError(_NO_DDP)
        if is_replica(model):
            raise LongspanError(
                "torch.nn.DataParallel copies a parallelized model and divides its batch again; start one process per "
                "GPU (torchrun) and call the model that longspan.parallelize returned"
            )
        self._check_autocast()
        self._check_parameters(model)
        if model.training and torch.is_grad_enabled() and self.former and self.looks:
            self.looks -= 1
            self._check_optimizers()

    def _check_autocast(self) -> None:
        policy = self.policy
        if policy is not None and policy.param_dtype is not None and torch.is_autocast_enabled(self.device):
            raise LongspanError(
                f"autocast to {torch.get_autocast_dtype(self.device)} around a model whose FSDP computes in "
                f"{policy.param_dtype} (mp_policy): two rules for one dtype; call the model outside of autocast, or "
                f"parallelize it without mp_policy"
            )

    def _check_parameters(self, model: nn.Module) -> None:
        if not self.sharded and (isinstance(model, FSDPModule) or any(map(_is_sharded, model.parameters()))):
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
        self.former = [(name, ref) for name, ref in self.former if ref() is not None]
        if not self.former:
            return
        gc.collect()  # an unreferenced optimizer does no harm
        former = {id(p): name for name, ref in self.former if (p := ref()) is not None}
        for optimizer in _optimizers():
            held = [former[id(p)] for group in optimizer.param_groups for p in group["params"] if id(p) in former]
            if held:
                raise LongspanError(
                    f"an optimizer ({type(optimizer).__name__}) was made before longspan.parallelize: it holds "
                    f"{len(held)} parameters, {held[0]} first, that FSDP has replaced by shards, and would train "
                    f"nothing; make it from model.parameters() after longspan.parallelize"
                )


class RestCheck:
    """Checksum this rank's weights (under FSDP its shards) between optimizer steps, to detect damaged memory.

    Checksums are computed after each optimizer step, and compared before the next step and at the next forward. A
    legitimate write (loading a state dict) moves the tensor's version counter; a write through `.data` does not.

    Args:
        model: parallelized.
    """

    def __init__(self, model: nn.Module) -> None:
        self.parameters = dict(model.named_parameters())
        self.known: dict[str, tuple[int, int]] = {}
        self.damage: str | None = None
        self.hooks: list[Any] = []
        self.looks = _LOOKS

    @not_compiled
    def before_forward(self) -> None:
        """Compare the checksums and compute new ones.

        Raises:
            LongspanError: naming the parameter whose bytes changed.
        """
        if not self.hooks and self.looks and torch.is_grad_enabled():
            self.looks -= 1
            self._find_optimizers()
        self._look()
        if self.damage is not None:
            raise LongspanError(self.damage)

    def _find_optimizers(self) -> None:
        mine = {id(p) for p in self.parameters.values()}
        for optimizer in _optimizers():
            if any(id(p) in mine for group in optimizer.param_groups for p in group["params"]):
                self.hooks.append(optimizer.register_step_pre_hook(lambda *_: self._look()))
                self.hooks.append(optimizer.register_step_post_hook(lambda *_: self._look()))

    def _look(self) -> None:
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


def forbid(model: nn.Module, inner: nn.Module) -> None:
    """Make DistributedDataParallel around the model, copies of it and other dtypes raise at once.

    Args:
        model: the user's, possibly a wrapper.
        inner: the transformers model in it.
    """
    for each in {id(model): model, id(inner): inner}.values():
        forbid_ddp(each, _Refusal(_NO_DDP))
    before_casting(inner, lambda fn: _refuse_cast(inner, fn))

    def deepcopy(memo: Any) -> NoReturn:
        raise LongspanError(
            "copy.deepcopy of a parallelized model would share its process groups and shards; copy the model before "
            "longspan.parallelize, or keep a state dict (torch.distributed.checkpoint.state_dict.get_model_state_dict)"
        )

    inner.__deepcopy__ = deepcopy  # type: ignore[assignment]


_NO_DDP = (
    "DistributedDataParallel around a parallelized model would divide its gradients by the number of ranks, and they "
    "are summed already; call the model that longspan.parallelize returned (with accelerate, prepare the loader, "
    "optimizer and scheduler, not the model)"
)


class _Refusal:
    """An iterable that raises."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __iter__(self) -> Iterator[str]:
        raise LongspanError(self.text)


def _refuse_cast(model: nn.Module, fn: Callable[[Tensor], Tensor]) -> None:
    kinds = {p.dtype for p in model.parameters() if p.is_floating_point()}
    for dtype in kinds:
        found = dtype
        with contextlib.suppress(Exception):  # `fn` may be anything, and raises its own error
            found = fn(torch.empty(0, dtype=dtype)).dtype
        if found != dtype:
            raise LongspanError(
                f"a parallelized model keeps its dtype: {dtype} would become {found}, and its optimizer and its sums "
                f"of gradients with it; cast the model before longspan.parallelize, or compute in {found} by mp_policy "
                f"(with FSDP) or torch.autocast (without)"
            )


def _names(model: nn.Module, trained: bool = False) -> frozenset[str]:
    names = (name for name, p in model.named_parameters() if p.requires_grad or not trained)
    return frozenset(_plain(name) if "._" in name or name.startswith("_") else name for name in names)


def _plain(name: str) -> str:
    for wrapper in WRAPPED:
        name = name.replace(wrapper, "")
    return name


def _is_sharded(p: Tensor) -> bool:
    return isinstance(p, DTensor)


def _optimizers() -> list[torch.optim.Optimizer]:
    """Return every live optimizer."""
    return [x for x in gc.get_objects() if issubclass(type(x), torch.optim.Optimizer)]
