"""Models that score a row by its last token: sequence classifiers, reward models.

Their head `score` computes a few numbers per token, and the model selects those of the last token that is not padding,
by the ids. That token may be on any rank. So every rank gathers the head's output (one number per token and label); the
model gets the ids of all tokens, and its base model this rank's. Every rank then selects as one process does.

In backward each rank takes the gradient of its own tokens, so the sum over a sequence group is the gradient of one
loss, whether the model or a trainer computes it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from longspan.comm.mesh import SequenceSharding
from longspan.core.errors import LongspanError
from longspan.hf.batch import SequenceInfo
from longspan.hf.forward.logits import gather_tokens
from longspan.hf.forward.loss import GlobalLoss, HeldBackLabels
from longspan.hf.forward.stage import ForwardCall
from longspan.hf.support import HELP


class PooledHead(HeldBackLabels):
    """Give a sequence classifier the ids of all tokens, its base model mine, and gather the output of its `score`.

    The loss is that of rows. Like transformers, it ignores `num_items_in_batch`.
    """

    def __init__(self, model: PreTrainedModel, name: str, sp: SequenceSharding, losses: GlobalLoss) -> None:
        super().__init__(losses)
        self.name, self.sp, self.config = name, sp, model.config
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
        self.info, self.ids = call.info, call.inputs.get("input_ids")
        if self.ids is None:
            return
        ids = call.batch["input_ids"]
        if "longspan" in call.batch:  # sharded by `longspan.shard_batch`
            with torch.no_grad():
                ids = self.sp.gather(ids, dim=1, length=call.info.length)
        call.inputs["input_ids"] = ids

    def loss(self, call: ForwardCall, logits: Any, labels: Tensor) -> Tensor:
        return self.losses.of_rows(logits, labels, call.model.config)

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
        return gather_tokens(output, self.sp, self.info)
