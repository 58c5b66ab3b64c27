"""The harness's model class: `--model longspan`. The first rank runs the harness; the others repeat its calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from tqdm import tqdm

from longspan.comm.agree import broadcast_object
from longspan.comm.mesh import SequenceSharding
from longspan.core.errors import LongspanError
from longspan.core.parallel import ParallelConfig
from longspan.hf.forward.logprobs import token_logprobs
from longspan.hf.loading import from_pretrained
from longspan.hf.model.pretrained import tokenizer_of
from longspan.losses.cross_entropy import IGNORE

_LOAD, _END = "load", "end"
_DTYPES = ("auto", "float32", "bfloat16", "float16")

Request = tuple[Any, list[int], list[int]]
"""(texts, or None; tokens of the context; tokens of the continuation)."""


@register_model("longspan")
class LongspanLM(HFLM):  # type: ignore[misc]
    """The harness's `hf` model, over the ranks of the job. Collective: the other ranks call `follow`.

    Args:
        pretrained: folder of a model or a PEFT adapter, or a name on the Hugging Face hub.
        ring, ulysses, tensor: sizes of the axes.
        dtype: of the weights: "auto", "float32", "bfloat16" or "float16".
        tokenizer: name or folder; by default the model's.
        fsdp: shard the weights.
        device: passed by the harness to every model; unused.
        options: of the harness's `hf` model: max_length, add_bos_token, ...
    """

    def __init__(
        self,
        pretrained: str,
        *,
        ring: int = 1,
        ulysses: int = 1,
        tensor: int = 1,
        dtype: str = "auto",
        tokenizer: str | None = None,
        batch_size: int | str = 1,
        fsdp: bool = True,
        device: str | None = None,
        **options: Any,
    ) -> None:
        if not str(batch_size).isdecimal() or int(batch_size) < 1:
            raise LongspanError(f"batch_size={batch_size!r}: give a number of rows, 1 or more")
        if dtype not in _DTYPES:
            raise LongspanError(f"dtype={dtype!r}: use one of {', '.join(_DTYPES)}")
        mesh: dict[str, Any] = {"ring": ring, "ulysses": ulysses, "tensor": tensor}
        options |= {"tokenizer": tokenizer or tokenizer_of("pretrained", pretrained), "batch_size": int(batch_size)}
        _tell(_LOAD, pretrained=pretrained, dtype=dtype, fsdp=fsdp, **mesh, **options)
        of: Any = "auto" if dtype == "auto" else getattr(torch, dtype)
        model = from_pretrained(pretrained, SequenceSharding.of(ParallelConfig(**mesh)), dtype=of, fsdp=fsdp)
        super().__init__(model.eval(), **options)

    @torch.no_grad()
    def _loglikelihood_tokens(
        self, requests: Sequence[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """Return log p(continuation | context), and whether greedy decoding gives it; whole logits never exist.

        Batches are of similar lengths, the longest first, so that running out of memory happens early.
        """
        for _, _, continuation in requests:
            if len(continuation) > self.max_length:
                raise LongspanError(
                    f"a continuation of {len(continuation)} tokens is longer than the model's {self.max_length}; give "
                    "max_length"
                )
        _tell("_loglikelihood_tokens", requests=[(None, *tokens) for _, *tokens in requests], disable_tqdm=True)
        answers: list[Any] = [None] * len(requests)
        order = sorted(range(len(requests)), key=lambda i: -len(requests[i][1]) - len(requests[i][2]))
        starts = range(0, len(order), self.batch_size)
        for start in tqdm(starts, desc="log-likelihoods", disable=disable_tqdm or None):
            rows = order[start : start + self.batch_size]
            batch = self._predicting([requests[i] for i in rows])
            log_p, top1 = token_logprobs(self.model, batch, top1=True, gather=True)
            predicted = batch["shift_labels"] != IGNORE
            for row, i in enumerate(rows):
                answers[i] = float(log_p[row][predicted[row]].sum()), bool(top1[row][predicted[row]].all())
                if requests[i][0] is not None:
                    self.cache_hook.add_partial("loglikelihood", requests[i][0], answers[i])
        return answers

    def _predicting(self, requests: Sequence[Request]) -> dict[str, Tensor]:
        """Return a batch that predicts the continuations, padded on the right. Long contexts lose their start."""
        rows = [(context + continuation)[-self.max_length - 1 :] for _, context, continuation in requests]
        ids = torch.full((len(rows), max(map(len, rows)) - 1), self.tokenizer.pad_token_id)
        labels, mask = torch.full_like(ids, IGNORE), torch.zeros_like(ids)
        for i, (row, (_, _, continuation)) in enumerate(zip(rows, requests, strict=True)):
            n = len(row) - 1
            ids[i, :n], mask[i, :n] = torch.tensor(row[:-1]), 1
            labels[i, n - len(continuation) : n] = torch.tensor(continuation)
        batch = {"input_ids": ids, "shift_labels": labels, **({} if mask.all() else {"attention_mask": mask})}
        return {name: x.to(self.device) for name, x in batch.items()}

    def _model_generate(self, context: Tensor, **options: Any) -> Tensor:
        given = {"context": context, **options}
        _tell("_model_generate", **{name: x.cpu() if isinstance(x, Tensor) else x for name, x in given.items()})
        found = {name: x.to(self.device) if isinstance(x, Tensor) else x for name, x in given.items()}
        return super()._model_generate(**found)  # type: ignore[no-any-return]


def _tell(name: str, **arguments: Any) -> None:
    """Let the other ranks make the first rank's call; no effect on them."""
    if dist.is_initialized() and dist.get_rank() == 0:
        broadcast_object((name, arguments), dist.group.WORLD)


def follow() -> None:
    """Repeat the first rank's calls on another rank, until it calls `end`."""
    model: Any = None
    while (call := broadcast_object(None, dist.group.WORLD)) != (_END, {}):
        name, arguments = call
        if name == _LOAD:
            model = LongspanLM(**arguments)
        else:
            getattr(model, name)(**arguments)


def end() -> None:
    """End `follow` on the other ranks."""
    _tell(_END)
