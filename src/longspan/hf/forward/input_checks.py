"""The stages that refuse a forward: a model changed since `parallelize`, or arguments that cannot be sharded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from longspan.core.errors import LongspanError
from longspan.hf.forward.stage import ForwardCall, ModelTraits, Stage
from longspan.hf.support import HELP, refuse_dropout

if TYPE_CHECKING:
    from longspan.hf.checks.guards import Guard, RestCheck
    from longspan.hf.weights.gradients import GradientSum


class ModelUnchanged(Stage):
    """Refuse a model that was wrapped, recast or given other parameters after `parallelize`."""

    def __init__(self, guard: Guard) -> None:
        self.guard = guard

    def check(self, call: ForwardCall) -> None:
        self.guard.check(call.model)


class WeightsUnchanged(Stage):
    """Refuse weights that changed between two steps of the optimizer."""

    def __init__(self, rest: RestCheck) -> None:
        self.rest = rest

    def check(self, call: ForwardCall) -> None:
        self.rest.before_forward()


class GradientsSummed(Stage):
    """Refuse parameters whose gradient would not be summed; restore what a backward that raised has laid aside."""

    def __init__(self, gradients: GradientSum) -> None:
        self.gradients = gradients

    def reset(self) -> None:
        self.gradients.forget_unfinished()

    def check(self, call: ForwardCall) -> None:
        self.gradients.check(call.model)


class SupportedArguments(Stage):
    """Refuse arguments that a sharded forward does not support."""

    def __init__(self, traits: ModelTraits) -> None:
        self.traits = traits

    def check(self, call: ForwardCall) -> None:
        batch, name = call.batch, self.traits.name
        self._check_cache(batch.get("cache"), batch.get("use_cache"))
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

    def _check_cache(self, cache: Any, use_cache: Any) -> None:
        argument = self.traits.cache_name
        if cache is not None or use_cache:
            given = f"{argument} is a {type(cache).__name__}" if cache is not None else "use_cache=True"
            raise LongspanError(
                f"{given}: a parallelized model keeps its keys and values in a cache sharded over the ranks; pass "
                f"{argument}=longspan.ShardedCache(model) (`generate` makes one itself), or leave both out"
            )
