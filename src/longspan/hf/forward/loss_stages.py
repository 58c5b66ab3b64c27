"""The stages that compute losses of the global batch.

A causal LM calls its loss function, which `LossFunction` replaces. Other models need their labels held back from the
forward, and the loss computed from the logits afterwards: a masked LM computes its own cross entropy, a sequence
classifier has one vector of logits per row, and a mixture of experts adds the loss of its routers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from longspan.compat.torch_api import not_compiled, version_of
from longspan.core.errors import LongspanError
from longspan.hf.batch import real_tokens
from longspan.hf.forward.loss import mean_loss, mean_row_loss, problem_of
from longspan.hf.forward.stage import ForwardCall, ForwardOptions, ModelTraits, Stage
from longspan.hf.support import no_router_loss
from longspan.losses.load_balancing import load_balancing_loss

if TYPE_CHECKING:
    from longspan.comm.mesh import SequenceSharding
    from longspan.hf.checks.batches import BatchCheck
    from longspan.hf.tensor_parallel.layers import TensorParallel
    from longspan.losses.deferred_logits import DeferredLogits


class GlobalLoss:
    """Mean losses over the global batch. Their all-reduce also carries the batch comparison of GPUs.

    Attributes:
        computed: losses so far; a trainer reads whether a forward added one.
    """

    def __init__(self, sp: SequenceSharding, batches: BatchCheck | None, options: ForwardOptions) -> None:
        self.sp, self.batches, self.options = sp, batches, options
        self.computed = 0

    def of_tokens(self, logits: Tensor | DeferredLogits, labels: Tensor, items: Any) -> Tensor:
        """Return the mean over labelled tokens, or the sum divided by `items`."""
        self.computed += 1
        return mean_loss(logits, labels, self.sp, items, self.batches)

    def of_rows(self, logits: Tensor, labels: Tensor, config: Any) -> Tensor:
        """Return the mean over a classifier's rows."""
        self.computed += 1
        return mean_row_loss(logits, labels, problem_of(config, labels), self.sp, self.options.rows, self.batches)


class LossFunction(Stage):
    """A causal LM calls `compute` as its loss function; raise if it computes another loss, or adds to this one."""

    def __init__(self, traits: ModelTraits, losses: GlobalLoss) -> None:
        self.name, self.losses = traits.name, losses
        self.call: ForwardCall | None = None

    def reset(self) -> None:
        self.call = None

    def before(self, call: ForwardCall) -> None:
        self.call = call

    def after(self, call: ForwardCall, output: Any) -> Any:
        if call.has_labels and call.loss is None:
            raise LongspanError(
                f"{self.name} computed a loss of its own instead of calling its loss_function, so it would "
                f"be that of one rank's tokens; remove what patches its forward (a fused loss, say)"
            )
        if call.loss is not None:
            self._check_nothing_was_added(*call.loss, output)
        return output

    @not_compiled
    def compute(
        self,
        logits: Tensor | DeferredLogits,
        labels: Tensor,
        vocab_size: int | None = None,
        num_items_in_batch: Any = None,
        **_: Any,
    ) -> Tensor:
        """Return the mean of the global batch; `labels` are shifted already."""
        loss = self.losses.of_tokens(logits, labels, num_items_in_batch)
        if self.call is not None:
            self.call.loss = loss, version_of(loss)
        return loss

    def _check_nothing_was_added(self, loss: Tensor, version: int, output: Any) -> None:
        """Raise for another term in the loss: it would be one rank's, and its gradient would be summed over ranks."""
        returned = output.get("loss") if isinstance(output, dict) else output[0]
        if returned is not loss or version_of(loss) != version:
            raise LongspanError(
                f"{self.name} adds a term of its own to the loss of its tokens; longspan knows how to sum "
                f"the load-balancing loss of a mixture of experts over the ranks, and no other"
            )


class HeldBackLabels(Stage):
    """Hold labels back from the model, and compute the loss from its logits.

    The model returns a `ModelOutput`, which becomes a tuple again if the caller asked for one.
    """

    def __init__(self, losses: GlobalLoss) -> None:
        self.losses = losses
        self.labels: Tensor | None = None
        self.items: Any = None
        self.as_tuple = False

    def reset(self) -> None:
        self.labels = self.items = None

    def before(self, call: ForwardCall) -> None:
        inputs = call.inputs
        self.labels, self.items = inputs.pop("labels", None), inputs.pop("num_items_in_batch", None)
        return_dict = inputs.pop("return_dict", None)
        self.as_tuple = not (getattr(call.model.config, "return_dict", True) if return_dict is None else return_dict)
        inputs["return_dict"] = True

    def after(self, call: ForwardCall, output: Any) -> Any:
        losses = {} if call.router_loss is None else {"aux_loss": call.router_loss}
        if self.labels is not None:
            losses["loss"] = self.loss(call, output["logits"], self.labels)
            if call.router_loss is not None:
                losses["loss"] = losses["loss"] + call.model.router_aux_loss_coef * call.router_loss
        if losses:
            output = type(output)(**{**output, **losses})  # a new output: the order of its entries counts
        return output.to_tuple() if self.as_tuple else output

    def loss(self, call: ForwardCall, logits: Any, labels: Tensor) -> Tensor:
        return self.losses.of_tokens(logits, labels, self.items)


class RouterLoss(Stage):
    """Compute a mixture of experts' load-balancing loss over all tokens of the global batch."""

    def __init__(self, traits: ModelTraits, sp: SequenceSharding, tensor: TensorParallel | None) -> None:
        self.traits, self.sp, self.tensor = traits, sp, tensor

    def check(self, call: ForwardCall) -> None:
        if self.traits.top_k is None:
            raise LongspanError(no_router_loss(self.traits.name))

    def before(self, call: ForwardCall) -> None:
        call.inputs["return_dict"] = True

    def after(self, call: ForwardCall, output: Any) -> Any:
        assert call.tokens is not None and self.traits.top_k is not None
        logits = output["router_logits"]
        if output["logits"].requires_grad and not any(x.requires_grad for x in logits):
            raise LongspanError(
                "the router logits have no gradient, so the router loss would train nothing: reentrant gradient "
                'checkpointing loses it; pass {"use_reentrant": False}'
            )
        real_BL = real_tokens(call.info, self.sp, len(call.tokens), call.tokens.device)
        routed = real_BL if self.tensor is None else self.tensor.my_rows(real_BL)
        call.router_loss = load_balancing_loss(logits, self.traits.top_k, self.sp, routed)
        return output
