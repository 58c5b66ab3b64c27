"""`longspan score`: log-probabilities of a text's tokens, the text sharded over the ranks."""

from __future__ import annotations

import json
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longspan.core.errors import LongspanError, require
from longspan.core.validation import check_counts, check_output
from longspan.generate.config import ModelFlags
from longspan.ranks import launch

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from longspan.generate.prompt import Prompt
    from longspan.ranks.watch import Watch

_ENDINGS = (".jsonl", ".npz", ".parquet")


@dataclass(frozen=True)
class ScoreConfig(ModelFlags):
    """Perplexity of a long text, and the log-probability of each token given all before it.

    Any mesh gives the numbers of one process.
    """

    text: str | None = None
    """The text. Without it and --file, the text is read from stdin."""
    file: Path | None = None
    """A text file (UTF-8)."""
    max_tokens: int | None = None
    """Score only this many first tokens."""
    out: Path | None = None
    """Write token ids and log-probabilities to this file: .jsonl, .npz or .parquet. The first token has no
    log-probability."""

    def check(self) -> None:
        """Raise on invalid values, without reading any file."""
        super().check()
        if self.text is not None and self.file is not None:
            raise LongspanError("--text and --file both give a text; give one of them")
        if self.text == "":
            raise LongspanError("--text is empty; leave it out, or give a text")
        check_counts(self, 2, "max_tokens")
        if self.out is not None:
            check_output("--out", self.out, example="scores.jsonl")
            if self.out.suffix not in _ENDINGS:
                raise LongspanError(f"--out {self.out} must end in {', '.join(_ENDINGS[:-1])} or {_ENDINGS[-1]}")
            if self.out.suffix == ".parquet":
                require(f"--out {self.out}", "pyarrow")


def run(config: ScoreConfig) -> int:
    """Score a text on ranks started here or by torchrun, and print the report; return the exit code 0."""
    report = launch.run(config, open_text, score)
    if launch.is_first_rank():
        text = (
            "tokens                {tokens:,} ({scored_tokens:,} of them scored)\n"
            "mean log-probability  {mean_logprob:.6f}\n"
            "perplexity            {perplexity:.4f}\n"
            "tokens/s              {tokens_per_s:,.0f}"
        )
        print(json.dumps(report) if config.json else text.format(**report))
    return 0


def open_text(config: ScoreConfig) -> Prompt:
    """Return the token ids of a `ScoreConfig`'s text; no weights are loaded."""
    from longspan.generate.fit import check_score_memory
    from longspan.generate.prompt import open_ids, read_text, tokenizer_name
    from longspan.hf.model.pretrained import check_names, read_model_config
    from longspan.hf.model.prompts import load_tokenizer, text_ids
    from longspan.hf.preconditions import check_axes

    check_names(config.model, None, config.tokenizer)
    model_config = read_model_config("--model", config.model, 1)
    tokenizer = load_tokenizer(tokenizer_name(config))
    ids = text_ids(tokenizer, read_text(config.text, config.file, "--text"))[: config.max_tokens]
    prompt = open_ids(config, model_config, ids)
    if len(ids) < max(2, config.parallel.ranks):
        raise LongspanError(
            f"the text has {len(ids)} tokens; score needs at least 2, and one for each of the "
            f"{config.parallel.ranks} ranks of {config.parallel}"
        )
    check_axes(prompt.origin.on_meta, config.parallel, fsdp=config.fsdp)
    check_score_memory(config, model_config, len(ids))
    return prompt


def score(opened: Callable[[], Prompt], watch: Watch) -> dict[str, Any]:
    """Score on this rank, and write the file; return the report, equal on every rank. Collective."""
    import torch

    from longspan.generate.rank import load
    from longspan.hf.forward.logprobs import token_logprobs

    prompt, sp, model = load(opened, watch)
    config = prompt.flags
    watch.at("scoring", 1)
    began = time.perf_counter()
    ids = torch.from_numpy(prompt.ids)[None].to(sp.device)
    with torch.no_grad():
        logprobs = token_logprobs(model, {"input_ids": ids}, gather=True)[0, :-1].double().cpu()
    seconds = time.perf_counter() - began
    if sp.model_rank == 0 and config.out is not None:
        write(config.out, prompt.ids, logprobs.numpy())
    mean = float(logprobs.mean())
    return {
        "tokens": prompt.tokens,
        "scored_tokens": len(logprobs),
        "mean_logprob": mean,
        "perplexity": math.exp(-mean) if -mean < math.log(sys.float_info.max) else math.inf,
        "tokens_per_s": prompt.tokens / seconds,
    }


def write(path: Path, ids: NDArray[np.int64], logprobs: NDArray[np.float64]) -> None:
    """Write ids `[S]` and log-probabilities `[S - 1]`, of ids[1:], in the format of the path's suffix.

    The first token's log-probability is null (jsonl, parquet) or NaN (npz).
    """
    import numpy as np

    path.parent.mkdir(parents=True, exist_ok=True)
    nullable = [None, *logprobs.tolist()]
    if path.suffix == ".npz":
        np.savez(path, ids=ids, logprobs=np.concatenate([[np.nan], logprobs]))
    elif path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.table({"id": ids, "logprob": pyarrow.array(nullable)}), path)
    else:
        rows = (json.dumps({"id": i, "logprob": logprob}) for i, logprob in zip(ids.tolist(), nullable, strict=True))
        path.write_text("\n".join(rows) + "\n", encoding="utf-8")
