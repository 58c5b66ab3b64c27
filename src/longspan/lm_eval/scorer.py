"""Log-likelihoods and generation of token lists on a parallelized model; every rank repeats the first rank's calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from longspan.comm.objects import broadcast_object
from longspan.core.errors import LongspanError
from longspan.core.parallel import ParallelConfig
from longspan.hf.forward.logprobs import token_logprobs
from longspan.losses.cross_entropy import IGNORE

if TYPE_CHECKING:
    from longspan.comm.mesh import SequenceSharding

Tokens = list[int]


@dataclass(frozen=True)
class Scorer:
    """A parallelized model for evaluation; results are the same on every rank."""

    model: Any  # from `longspan.parallelize`, in evaluation mode.
    sp: SequenceSharding
    tokenizer: Any  # of Hugging Face
    max_length: int  # most tokens that the model accepts
    batch_size: int = 1  # most rows of a batch

    @property
    def pad(self) -> int:
        """The padding token; its value has no effect."""
        return next((x for x in (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id) if x is not None), 0)

    @torch.no_grad()
    def loglikelihoods(self, pairs: Sequence[tuple[Tokens, Tokens]]) -> list[tuple[float, bool]]:
        """Return log p(continuation | context) of each pair, and whether greedy decoding gives the continuation.

        Whole logits never exist. A pair longer than `max_length` loses its first tokens.
        """
        for context, continuation in pairs:
            _check_pair(context, continuation, self.max_length)
        results: list[tuple[float, bool]] = [(0.0, False)] * len(pairs)
        for rows in _batches([len(a) + len(b) for a, b in pairs], self.batch_size):
            sequences = [(pairs[row][0] + pairs[row][1])[-self.max_length - 1 :] for row in rows]
            batch = self._predicting(sequences, [len(pairs[row][1]) for row in rows])
            log_p, top1 = token_logprobs(self.model, batch, top1=True, gather=True)
            predicted = batch["shift_labels"] != IGNORE
            for i, row in enumerate(rows):
                results[row] = float(log_p[i][predicted[i]].sum()), bool(top1[i][predicted[i]].all())
        return results

    def _predicting(self, sequences: list[Tokens], predicted: list[int]) -> dict[str, Tensor]:
        """Return a batch that predicts the last `predicted` tokens of each row, padded on the right."""
        length = max(map(len, sequences)) - 1
        ids = torch.full((len(sequences), length), self.pad)
        labels, mask = torch.full_like(ids, IGNORE), torch.zeros_like(ids)
        for i, (row, count) in enumerate(zip(sequences, predicted, strict=True)):
            n = len(row) - 1
            ids[i, :n], mask[i, :n] = torch.tensor(row[:-1]), 1
            labels[i, n - count : n] = torch.tensor(row[-count:])
        batch = {"input_ids": ids, "shift_labels": labels}
        if not bool(mask.all()):
            batch["attention_mask"] = mask
        return {name: x.to(self.sp.device) for name, x in batch.items()}

    @torch.no_grad()
    def generate(self, prompts: Sequence[Tokens], stops: Sequence[str], max_new: int, **options: Any) -> list[str]:
        """Return the text generated for each prompt, up to the first stop, the end-of-text token, or `max_new` tokens.

        Args:
            prompts: token ids; too long ones lose their first tokens.
            stops: texts that end a row; they are not returned.
            max_new: most new tokens.
            options: of transformers' `generate`.
        """
        room = self.max_length - max_new
        if room < 1:
            raise LongspanError(
                f"{max_new} tokens to generate leave no room for a prompt: the model is given at most "
                f"{self.max_length}; ask for fewer (max_gen_toks), or give max_length"
            )
        results = [""] * len(prompts)
        for rows in _batches([len(prompt) for prompt in prompts], self.batch_size):
            ids, mask = self._prompts([prompts[row][-room:] for row in rows])
            n = ids.shape[1]
            out = self.model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=max_new,
                pad_token_id=self.pad,
                stopping_criteria=StoppingCriteriaList([_Stops(self.tokenizer, stops, n)]),
                **options,
            )
            for i, row in enumerate(rows):
                results[row] = until(self.tokenizer.decode(out[i, n:], skip_special_tokens=True), stops)
        return results

    def _prompts(self, prompts: list[Tokens]) -> tuple[Tensor, Tensor]:
        length = max(map(len, prompts))
        ids = torch.full((len(prompts), length), self.pad)
        mask = torch.zeros_like(ids)
        for i, prompt in enumerate(prompts):
            ids[i, length - len(prompt) :], mask[i, length - len(prompt) :] = torch.tensor(prompt), 1
        return ids.to(self.sp.device), mask.to(self.sp.device)


class _Stops(StoppingCriteria):  # type: ignore[misc]
    """Ends a row when its new text contains a stop."""

    def __init__(self, tokenizer: Any, stops: Sequence[str], start: int) -> None:
        self.tokenizer, self.stops, self.start = tokenizer, [stop for stop in stops if stop], start

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        texts = self.tokenizer.batch_decode(input_ids[:, self.start :])
        done = [any(stop in text for stop in self.stops) for text in texts]
        return torch.tensor(done, device=input_ids.device)


def until(text: str, stops: Sequence[str]) -> str:
    """Return the text before the first stop."""
    for stop in stops:
        text = text.split(stop)[0] if stop else text
    return text


def _batches(lengths: Sequence[int], size: int) -> Iterator[list[int]]:
    """Yield batches of rows of similar lengths, the longest first, so that running out of memory happens early."""
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    for start in range(0, len(order), size):
        yield order[start : start + size]


def _check_pair(context: Tokens, continuation: Tokens, max_length: int) -> None:
    if not context or not continuation:
        raise LongspanError(
            f"a log-likelihood needs a context and a continuation, these have {len(context)} and {len(continuation)} "
            f"tokens"
        )
    if len(continuation) > max_length:
        raise LongspanError(
            f"a continuation of {len(continuation)} tokens is longer than the model's {max_length}; give max_length"
        )


_LOAD, _END = "load", "end"


class Leader:
    """A `Scorer` over all ranks, used by the first rank while the others run `serve`. `options` are `load_scorer`'s."""

    def __init__(self, **options: Any) -> None:
        if dist.is_initialized() and dist.get_rank() != 0:
            raise LongspanError("only the first rank calls the model; the others call longspan.lm_eval.scorer.serve()")
        broadcast_object((_LOAD, options), _world())
        self.scorer = load_scorer(**options)

    def ask(self, name: str, **arguments: Any) -> Any:
        """Call a method of the scorer on every rank and return its result."""
        broadcast_object((name, arguments), _world())
        return getattr(self.scorer, name)(**arguments)


def serve() -> None:
    """Repeat the first rank's calls on another rank, until it calls `end`."""
    scorer: Scorer | None = None
    while True:
        name, arguments = broadcast_object(None, _world())
        if name == _END:
            return
        if name == _LOAD:
            scorer = load_scorer(**arguments)
        else:
            getattr(scorer, name)(**arguments)


def end() -> None:
    """End `serve` on the other ranks."""
    broadcast_object((_END, {}), _world())


def load_scorer(
    pretrained: str,
    ring: int = 1,
    ulysses: int = 1,
    tensor: int = 1,
    dtype: str = "auto",
    tokenizer: str | None = None,
    max_length: int | None = None,
    batch_size: int = 1,
    fsdp: bool = True,
) -> Scorer:
    """Load a pretrained model over the ranks of the job. Collective.

    Args:
        pretrained: folder of a model or a PEFT adapter, or a name on the Hugging Face hub.
        ring: size of the ring axis.
        ulysses: size of the ulysses axis.
        tensor: size of the tensor axis.
        dtype: of the weights: "auto", "float32", "bfloat16" or "float16".
        tokenizer: name or folder; by default the model's.
        max_length: most tokens that the model accepts; by default from its config.
        batch_size: most rows of a batch.
        fsdp: shard the weights.
    """
    import torch
    from transformers import AutoTokenizer

    from longspan.comm.mesh import make_sharding
    from longspan.hf.loading import from_pretrained
    from longspan.hf.pretrained import tokenizer_of

    if dtype not in _DTYPES:
        raise LongspanError(f"dtype={dtype!r}: use one of {', '.join(_DTYPES)}")
    sp = make_sharding(ParallelConfig(ring=ring, ulysses=ulysses, tensor=tensor))
    of: Any = "auto" if dtype == "auto" else getattr(torch, dtype)
    model = from_pretrained(pretrained, sp, dtype=of, fsdp=fsdp).eval()
    reader = AutoTokenizer.from_pretrained(tokenizer or tokenizer_of("pretrained", pretrained))
    return Scorer(model, sp, reader, max_length or _longest(model.config, reader), batch_size)


_DTYPES = ("auto", "float32", "bfloat16", "float16")
_DEFAULT_LENGTH = 2048


def _longest(config: Any, tokenizer: Any) -> int:
    """Return the most tokens that the model accepts, from config or tokenizer as the harness does."""
    for name in ("n_positions", "max_position_embeddings", "n_ctx"):
        if isinstance(length := getattr(config, name, None), int):
            return length
    length = tokenizer.model_max_length
    return int(length) if length and length < 10**9 else _DEFAULT_LENGTH


def _world() -> dist.ProcessGroup | None:
    return dist.group.WORLD if dist.is_initialized() else None
