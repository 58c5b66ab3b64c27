"""Losses over a sharded sequence, exact means over the global batch, and the stages that compute them.

Each rank sums over its own tokens; one all-reduce adds the sums and the counts of all ranks. The mean of the ranks'
means would be wrong if ranks hold different numbers of labelled tokens.

The model's forward never sees the labels: the loss is computed from its logits afterwards, by one function for labels
of tokens and one for labels of rows. A mixture of experts adds the loss of its routers.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from longspan.comm.arguments import check_integers, check_sharding, check_tensor, describe
from longspan.comm.collectives import scale_gradient, sum_over
from longspan.comm.mesh import SequenceSharding
from longspan.compat.torch_api import to_device
from longspan.core.errors import LongspanError
from longspan.core.validation import check_number
from longspan.hf.batch.shard import SequenceInfo, real_tokens
from longspan.hf.forward.stage import ForwardCall, Stage
from longspan.hf.model.support import HELP, no_router_loss
from longspan.losses.cross_entropy import CROSS_ENTROPY, IGNORE, LossTerms, TokenLoss, loss_sum
from longspan.losses.deferred_logits import DeferredLogits
from longspan.losses.load_balancing import load_balancing_loss
from longspan.losses.logprobs import logprobs_of

if TYPE_CHECKING:
    from longspan.hf.forward.tensor import TensorParallel


def causal_lm_loss(
    logits: Tensor,
    shifted_labels: Tensor,
    sp: SequenceSharding,
    num_items_in_batch: Tensor | int | None = None,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """Return the mean cross entropy of the global batch (data x sequence), equal on every rank.

    The average of the ranks' gradients is its gradient, as every rank counts it: each gets its tokens' part of the
    gradient times the number of ranks.

    Args:
        logits: my tokens, `[B, L, V]`, any floating dtype; softmax and sums run in fp32 (fp64 for fp64), tile by tile,
            so that no second tensor of this size exists in the forward.
        shifted_labels: the token that each should predict, int64 `[B, L]`, -100 for no loss.
        sp: the sharding.
        num_items_in_batch: divide by this instead of the number of unmasked tokens. For gradient accumulation: the
            number of unmasked tokens in all micro-batches of all ranks.
        label_smoothing: as in `torch.nn.functional.cross_entropy`.
        z_loss: weight of each token's squared log-sum-exp (PaLM, arXiv:2204.02311, section 5).

    Returns:
        A scalar, fp32 (fp64 for fp64); 0 if no token of the global batch is unmasked.

    Raises:
        LongspanError: if shapes or dtypes do not fit, or (on a CPU) a label is outside the vocabulary.
    """
    check_sharding(sp)
    check_tensor("logits", logits)
    check_integers("shifted_labels", shifted_labels)
    if logits.dim() < 2 or not logits.is_floating_point() or not logits.shape[-1]:
        raise LongspanError(f"`logits` must be a floating tensor [batch, tokens, vocabulary], got {describe(logits)}")
    if isinstance(num_items_in_batch, Tensor):
        if num_items_in_batch.numel() != 1 or num_items_in_batch.is_complex():
            raise LongspanError(f"`num_items_in_batch` must be one number, got {describe(num_items_in_batch)}")
    elif num_items_in_batch is not None:
        check_number("num_items_in_batch", num_items_in_batch, 0, 1 << 62)
    if shifted_labels.device.type == "cpu":  # on a GPU the host would wait, and torch's own assertion stops the kernel
        check_labels("shifted_labels", shifted_labels, logits.shape[-1])
    check_number("label_smoothing", label_smoothing, 0, 1)
    check_number("z_loss", z_loss, 0, 1e6)
    return GlobalLoss(sp).of_tokens(logits, shifted_labels, num_items_in_batch, LossTerms(label_smoothing, z_loss))


def problem_of(config: Any, labels: Tensor) -> str:
    """Return a sequence classifier's problem type as transformers does: "regression", "single_label_classification"
    or "multi_label_classification".
    """
    if config.problem_type is not None:
        return str(config.problem_type)
    if config.num_labels == 1:
        return "regression"
    return f"{'multi' if labels.is_floating_point() else 'single'}_label_classification"


def check_labels(name: str, labels: Tensor, size: int, kind: str = "vocabulary has {} ids") -> None:
    """Raise for labels outside the vocabulary, or outside the classes that `kind` names."""
    wrong = labels[(labels != IGNORE) & ((labels < 0) | (labels >= size))]
    if len(wrong):
        raise LongspanError(
            f"`{name}` holds {int(wrong[0])}, the {kind.format(size)}: 0 to {size - 1}, or {IGNORE} where no loss is "
            f"computed"
        )


class GlobalLoss:
    """Mean losses over the global batch, equal on every rank."""

    def __init__(self, sp: SequenceSharding) -> None:
        self.sp = sp
        self.computed = 0  # losses so far; a trainer reads whether a forward added one
        self.share = torch.ones(
            ()
        )  # the last loss's label tokens / its divisor; 1 without accumulation and elastic batches

    def of_tokens(
        self,
        logits: Tensor | DeferredLogits,
        labels: Tensor,
        items: Any,
        terms: TokenLoss = CROSS_ENTROPY,
        weights: Tensor | None = None,
    ) -> Tensor:
        """Return `causal_lm_loss`; with `weights` of my tokens the weighted mean."""
        if logits.shape[:-1] != labels.shape:
            raise LongspanError(
                f"logits of shape {tuple(logits.shape)} do not belong to labels of shape {tuple(labels.shape)}"
            )
        labels = labels.to(logits.device)
        count = labels != IGNORE
        if weights is not None:
            count = torch.where(count, weights.to(labels.device), 0).double()
        loss = self._mean(loss_sum(logits, labels, terms, weights), count.sum(), items)
        return loss.to(torch.promote_types(logits.dtype, torch.float32))

    def of_rows(self, logits: Tensor, labels: Tensor, config: Any, rows: int | None) -> Tensor:
        """Return the loss of a sequence classifier over all rows of the global batch.

        `logits` `[B, labels]` of this replica's rows, of which the first `rows` count, are equal on the ranks of its
        sequence group.
        """
        dtype = torch.promote_types(logits.dtype, torch.float32)
        problem = problem_of(config, labels)
        logits_BC, labels = logits[:rows].to(dtype), to_device(labels[:rows], logits.device)
        if problem == "single_label_classification":
            total = F.cross_entropy(logits_BC, labels.reshape(-1), ignore_index=IGNORE, reduction="sum")
            count = (labels != IGNORE).sum()
        else:
            of_entry = F.mse_loss if problem == "regression" else F.binary_cross_entropy_with_logits
            total = of_entry(logits_BC, labels.reshape(logits_BC.shape).to(dtype), reduction="sum")
            count = torch.tensor(logits_BC.numel(), device=logits.device)
        return self._mean(total, count).to(dtype)

    def _mean(self, total: Tensor, count: Tensor, items: Tensor | int | None = None) -> Tensor:
        """Return the sum of all ranks' totals, divided by that of their counts or by `items`, in one all-reduce.

        Gradients are averaged over the ranks, and every rank counts this loss, so its backward multiplies by their
        number.
        """
        self.computed += 1
        sums = sum_over(torch.stack([total.double(), count.double()]), self.sp.fsdp_group)
        if items is None:
            items = torch.where(sums[1] > 0, sums[1], 1).detach()
        items = items.to(sums.device) if isinstance(items, Tensor) else items
        self.share = sums[1].detach() / items
        return scale_gradient(sums, self.sp.fsdp_size)[0] / items


@functools.cache
def computes_own_loss(forward: Callable[..., Any]) -> bool:
    """Return whether a model's forward that is not of transformers does more for its loss than call `loss_function`.

    The model never sees the labels, so such a term would be missing. transformers' own are known: the tests compare
    their losses.
    """
    code: Any = getattr(forward, "__code__", None)  # of the outermost function: what wraps one of transformers' is not
    if code is not None and Path(code.co_filename).is_relative_to(Path(transformers.__file__).parent):
        return False
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, SyntaxError, TypeError):
        return True
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if not any("loss" in ast.unparse(target) for target in targets):
                continue
            of_tokens = isinstance(node.value, ast.Call) and ast.unparse(node.value.func).endswith("loss_function")
            if isinstance(node, ast.AugAssign) or not (of_tokens or isinstance(node.value, ast.Constant)):
                return True
    return False


class HeldBackLabels(Stage):
    """Hold labels back from the model, and compute the loss from its logits.

    The model returns a `ModelOutput`, which becomes a tuple again if the caller asked for one.
    """

    def __init__(self, losses: GlobalLoss) -> None:
        self.losses = losses
        self.labels: Tensor | None = None
        self.weights: Tensor | None = None  # of my labels in the loss, `[B, L]`
        self.items: Any = None
        self.as_tuple = False

    def reset(self) -> None:
        self.labels = self.weights = self.items = None

    def check(self, call: ForwardCall) -> None:
        """Raise for labels from which the model's own forward would compute another loss."""
        if not call.has_labels:
            return
        known = call.traits.labels_per_token or call.model.can_generate()
        if not known or computes_own_loss(type(call.model).forward):
            raise LongspanError(
                f"{call.traits.name} computes a loss of its own from labels, which would be that of one rank's tokens; "
                f"leave `labels` out, and compute the loss from its outputs"
            )
        if getattr(call.model.config, "z_loss_coefficient", 0):
            raise LongspanError(
                f"{call.traits.name} adds a term of its own, the z-loss, to the loss of its tokens; set "
                f"config.z_loss_coefficient = 0"
            )

    def before(self, call: ForwardCall) -> None:
        inputs = call.inputs
        self.labels, self.weights = inputs.pop("labels", None), inputs.pop("loss_weights", None)
        self.items = inputs.pop("num_items_in_batch", None)
        return_dict = inputs.pop("return_dict", None)
        self.as_tuple = not (getattr(call.model.config, "return_dict", True) if return_dict is None else return_dict)
        inputs["return_dict"] = True

    def after(self, call: ForwardCall, output: Any) -> Any:
        # The head's weight is still whole: `reshard_after_forward=False` of the norm and head (hf/weights/fsdp.py).
        losses = {} if call.router_loss is None else {"aux_loss": call.router_loss}
        if self.labels is not None:
            losses["loss"] = self.loss(call, output["logits"], self.labels)
            if call.router_loss is not None:
                # Rounds of an elastic batch share its router loss by their labels, so that it counts once.
                share = self.losses.share if call.info.elastic else 1
                losses["loss"] = losses["loss"] + share * call.model.router_aux_loss_coef * call.router_loss
            if self.items is not None and call.options.replicas > 1:  # by which the trainer will multiply it
                losses["loss"] = losses["loss"] / call.options.replicas
        if losses:
            output = type(output)(**{**output, **losses})  # a new output: the order of its entries counts
        return output.to_tuple() if self.as_tuple else output

    def loss(self, call: ForwardCall, logits: Any, labels: Tensor) -> Tensor:
        """Return the mean of the global batch; `labels` are shifted already."""
        if call.options.token_losses is not None and isinstance(logits, DeferredLogits):
            call.note_token_losses(-logprobs_of(logits, labels)[0], labels)
        terms = call.options.token_loss
        if not isinstance(terms, LossTerms) and not isinstance(logits, DeferredLogits):
            raise LongspanError(f"{call.traits.name} does not call its head as transformers' models do")
        return self.losses.of_tokens(logits, labels, self.items, terms, self.weights)


class PooledHead(HeldBackLabels):
    """Models that score a row by its last token: sequence classifiers, reward models.

    Their head `score` computes a few numbers per token, and the model selects those of the last token that is not
    padding, by the ids. That token may be on any rank. So every rank gathers the head's output; the model gets the ids
    of all tokens, and its base model this rank's. The loss is that of rows. Like transformers, it ignores
    `num_items_in_batch`.
    """

    def __init__(self, model: PreTrainedModel, name: str, losses: GlobalLoss) -> None:
        super().__init__(losses)
        self.name, self.config = name, model.config
        self.ids: Tensor | None = None  # of my tokens, until the base model takes them
        self.info: SequenceInfo | None = None
        base: Any = model.base_model
        base.register_forward_pre_hook(self._pass_my_ids, with_kwargs=True)
        model.score.register_forward_hook(self._gather)

    def reset(self) -> None:
        super().reset()
        self.ids = self.info = None

    def check(self, call: ForwardCall) -> None:
        """Raise for what the model's pooling would refuse, or misread, after its forward."""
        batch = call.batch
        tokens = batch["input_ids"] if batch.get("input_ids") is not None else batch.get("inputs_embeds")
        rows = len(tokens) if isinstance(tokens, Tensor) else 0
        if rows > 1 and self.config.get_text_config().pad_token_id is None:
            raise LongspanError(
                f"{self.name} finds the last token of each of {rows} rows by the padding token, and its config has "
                f"none; set config.pad_token_id"
            )
        mask = batch.get("attention_mask")
        if isinstance(mask, Tensor) and mask.dim() == 2 and not bool(mask.bool().any(-1).all()):
            row = int(mask.bool().any(-1).int().argmin())
            raise LongspanError(
                f"`attention_mask` hides every token of row {row}, so it has none to score; drop the row"
            )
        labels = batch.get("labels")
        if labels is not None and (not isinstance(labels, Tensor) or labels.dim() == 0 or len(labels) != rows):
            got = tuple(labels.shape) if isinstance(labels, Tensor) else type(labels).__name__
            raise LongspanError(f"`labels` of {self.name} must be a tensor with one entry for each of {rows} rows, "
                                f"got {got}")  # fmt: skip

    def before(self, call: ForwardCall) -> None:
        super().before(call)
        self.labels, self.info, self.ids = call.batch.get("labels"), call.info, call.inputs.get("input_ids")
        if self.ids is not None:
            call.inputs["input_ids"] = to_device(call.batch["input_ids"], self.ids.device)

    def loss(self, call: ForwardCall, logits: Any, labels: Tensor) -> Tensor:
        return self.losses.of_rows(logits, labels, call.model.config, call.options.rows)

    def _pass_my_ids(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.ids is not None:
            if args:
                args = (self.ids, *args[1:])
            else:
                kwargs = {**kwargs, "input_ids": self.ids}
        self.ids = None
        return args, kwargs

    def _gather(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        """Gather `[B, n_local, labels]` to `[B, n, labels]`."""
        if self.info is None:
            raise LongspanError(f"the head of {self.name} was called outside of its forward; call the model")
        if output.dim() != 3:
            raise LongspanError(
                f"{self.name} calls its head with {tuple(args[0].shape)}, not every token: it pools hidden states; "
                f"{HELP}"
            )
        return self.info.gather(output)


class RouterLoss(Stage):
    """Compute a mixture of experts' load-balancing loss over all tokens of the global batch."""

    def __init__(self, tensor: TensorParallel | None) -> None:
        self.tensor = tensor

    def check(self, call: ForwardCall) -> None:
        if call.traits.top_k is None:
            raise LongspanError(no_router_loss(call.traits.name))

    def before(self, call: ForwardCall) -> None:
        call.inputs["return_dict"] = True

    def after(self, call: ForwardCall, output: Any) -> Any:
        assert call.traits.top_k is not None
        logits = output["router_logits"]
        if output["logits"].requires_grad and not any(x.requires_grad for x in logits):
            raise LongspanError(
                "the router logits have no gradient, so the router loss would train nothing: reentrant gradient "
                'checkpointing loses it; pass {"use_reentrant": False}'
            )
        real_BL = real_tokens(call.info)
        routed = real_BL if self.tensor is None else self.tensor.my_rows(real_BL)
        call.router_loss = load_balancing_loss(logits, call.traits.top_k, call.sp, routed)
        return output
