"""The harness's model class: `--model longspan`."""

from __future__ import annotations

from typing import Any

from lm_eval import utils
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs

from longspan.core.errors import LongspanError
from longspan.lm_eval.scorer import Leader, Tokens

_BATCHES_PER_CALL = 64
"""Batches that the ranks compute in one call; the harness caches results between calls."""


@register_model("longspan")
class LongspanLM(TemplateLM):  # type: ignore[misc]
    """The harness's `hf` model, over several ranks; for the first rank alone.

    Args:
        add_bos_token: add the tokenizer's special tokens; None: as the tokenizer does.
        batch_size: rows of a batch.
        max_gen_toks: most tokens to generate, unless a task gives a number.
        options: of `longspan.lm_eval.scorer.load_scorer`: pretrained, ring, ulysses, tensor, dtype,
            tokenizer, max_length, fsdp.
        max_batch_size, device: passed by the harness to every model; unused.
    """

    def __init__(
        self,
        *,
        add_bos_token: bool | None = None,
        batch_size: int | str = 1,
        max_gen_toks: int = 256,
        max_batch_size: int | None = None,
        device: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if not str(batch_size).isdecimal() or int(batch_size) < 1:
            raise LongspanError(f"batch_size={batch_size!r}: give a number of rows, 1 or more")
        self.add_bos_token, self.max_gen_toks, self.batch_size = add_bos_token, max_gen_toks, int(batch_size)
        self.leader = Leader(**options, batch_size=self.batch_size)
        self.tokenizer = self.leader.scorer.tokenizer
        self.name = str(self.leader.scorer.model.config.name_or_path)

    @property
    def max_length(self) -> int:
        return self.leader.scorer.max_length

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id  # type: ignore[no-any-return]

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        """Name for the harness's caches."""
        return self.tokenizer.name_or_path.replace("/", "__")  # type: ignore[no-any-return]

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return self.tokenizer.apply_chat_template(  # type: ignore[no-any-return]
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> Tokens:
        """Return the tokens of a text; add no special tokens to a text that starts with one."""
        if add_special_tokens is None:
            begins = string.startswith(self.tokenizer.decode(self.prefix_token_id))
            add_special_tokens = False if begins else self.add_bos_token
        added = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return self.tokenizer.encode(string, **added)  # type: ignore[no-any-return]

    def _loglikelihood_tokens(self, requests: list[Any], **kwargs: Any) -> list[tuple[float, bool]]:
        order = sorted(range(len(requests)), key=lambda i: -len(requests[i][1]) - len(requests[i][2]))
        results: list[Any] = [None] * len(requests)
        for rows in _batches(order, _BATCHES_PER_CALL * self.batch_size, "log-likelihoods"):
            answers = self.leader.ask("loglikelihoods", pairs=[tuple(requests[i][1:]) for i in rows])
            for i, answer in zip(rows, answers, strict=True):
                results[i] = answer
                if requests[i][0] is not None:
                    self.cache_hook.add_partial("loglikelihood", requests[i][0], answer)
        return results

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return log p of each whole text; a text longer than the model is split into windows."""
        windows: list[tuple[int, tuple[Tokens, Tokens]]] = []
        for i, request in enumerate(requests):
            rolled = utils.get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            windows += [(i, utils.make_disjoint_window(pair)) for pair in rolled]
        results = [0.0] * len(requests)
        answers = self._loglikelihood_tokens([(None, *pair) for _, pair in windows])
        for (i, _), (log_p, _) in zip(windows, answers, strict=True):
            results[i] += log_p
        for request, total in zip(requests, results, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return results

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the text generated for each context; contexts with the same options share batches."""
        prompts = [self.tok_encode(request.args[0]) for request in requests]
        by_options: dict[str, list[int]] = {}
        for i in sorted(range(len(requests)), key=lambda i: -len(prompts[i])):
            by_options.setdefault(repr(requests[i].args[1]), []).append(i)
        results = [""] * len(requests)
        for same in by_options.values():
            options = self._options(requests[same[0]].args[1])
            for rows in _batches(same, self.batch_size, "generation"):
                texts = self.leader.ask("generate", prompts=[prompts[i] for i in rows], **options)
                for i, text in zip(rows, texts, strict=True):
                    results[i] = text
                    self.cache_hook.add_partial("generate_until", requests[i].args, text)
        return results

    def _options(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return a task's options for `Scorer.generate`; greedy unless the task samples."""
        options = normalize_gen_kwargs(given, self.max_gen_toks)
        eos = self.tokenizer.decode(self.eot_token_id, skip_special_tokens=False)
        stops = handle_stop_sequences(options.pop("until", None), eos=eos)
        if options.get("temperature", 0.0) == 0.0:
            options["do_sample"] = options.get("do_sample") or False
            options.pop("temperature", None)
        max_new = options.pop("max_gen_toks")
        return {**options, "stops": stops, "max_new": max_new}


def _batches(rows: list[int], size: int, what: str) -> Any:
    """Yield batches of rows with a progress bar."""
    from tqdm import tqdm

    return tqdm([rows[i : i + size] for i in range(0, len(rows), size)], desc=what, disable=None)
