"""Models that score a row by its last token: sequence classification, reward models.

Their head `score` gives every token a few numbers, and the model's own code then takes those of the last token that is
no padding, found by the ids. That token may lie on any rank. So the head's output is gathered, which is as many numbers
a token as there are labels, the model is given the ids of all tokens, and its base model my part of them; what it picks
is what it picks on one process, on every rank.

Each rank's backward takes the gradient of its own tokens from what is picked, so that the sum over a sequence group is
the gradient of one loss, whoever computes that loss (the model, or a trainer from the logits).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from longspan.core.errors import LongspanError
from longspan.hf.forward.outputs import Gathered
from longspan.hf.support import HELP

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from longspan.comm.mesh import SequenceSharding
    from longspan.hf.batch import SequenceInfo


class PooledHead:
    """The head and the base model of a sequence classifier, which see all tokens and mine.

    Args:
        model: with a child `score`; hooks are put on it and on its base model.
        sp: its sharding.
    """

    def __init__(self, model: PreTrainedModel, sp: SequenceSharding) -> None:
        self.name, self.sp = type(model).__name__, sp
        self.ids: Tensor | None = None  # of my tokens, in the forward under way
        self.info: SequenceInfo | None = None
        self.config: Any = model.config
        base: Any = model.base_model
        base.register_forward_pre_hook(self._give_mine, with_kwargs=True)
        model.score.register_forward_hook(self._gather)

    def check(self, batch: Mapping[str, Any]) -> None:
        """Refuse what the model's pooling would refuse, or misread, after its forward.

        Raises:
            LongspanError: for several rows and no padding token, labels of another number of rows, a row of padding
                alone.
        """
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

    def begin(self, batch: Mapping[str, Any], cut: dict[str, Any]) -> None:
        """Give the model the ids of all tokens. Collective where the batch was cut beforehand.

        Args:
            batch: as the model was called with it.
            cut: of it, what the model's forward gets; `input_ids` are replaced.
        """
        info: SequenceInfo = cut["longspan"]
        self.info, self.ids = info, cut.get("input_ids")
        if self.ids is None:
            return
        cut["input_ids"] = batch["input_ids"]
        if "longspan" in batch:
            with torch.no_grad():
                cut["input_ids"] = self.sp.with_layout(info.layout).gather(
                    batch["input_ids"], dim=1, length=info.length
                )

    def _give_mine(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.ids is not None:
            if args:
                args = (self.ids, *args[1:])
            else:
                kwargs = {**kwargs, "input_ids": self.ids}
        self.ids = None
        return args, kwargs

    def _gather(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        """`[B, n_local, labels]` of my tokens as `[B, n, labels]` of all."""
        info = self.info
        if info is None:
            raise LongspanError(f"the head of {self.name} was called outside of its forward; call the model")
        if output.dim() != 3:
            raise LongspanError(
                f"{self.name} gives its head {tuple(args[0].shape)}, not every token: it pools hidden states; {HELP}"
            )
        gathered: Tensor = Gathered.apply(output, self.sp, info.layout, info.length)  # type: ignore[no-untyped-call]
        return gathered
