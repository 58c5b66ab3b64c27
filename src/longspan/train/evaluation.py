"""Evaluation between the steps of a run: losses on other data, by source and position, and a sampled text.

The losses are exact means over tokens, and equal on every mesh. Neither they nor the sample change what is trained.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from longspan.comm.objects import on_every_rank
from longspan.data import collate, shared_sequences
from longspan.hf.batch import shard_batch
from longspan.hf.forward.logprobs import token_logprobs
from longspan.hf.vision import PICTURE_KEYS
from longspan.losses.cross_entropy import IGNORE
from longspan.train.inputs import naming_eval_data
from longspan.train.preferences import mean_of_pairs

if TYPE_CHECKING:
    from torch import Tensor

    from longspan.comm.mesh import SequenceSharding
    from longspan.train.config import TrainConfig
    from longspan.train.inputs import Inputs
    from longspan.train.preferences import Preferences

_FIRST_BUCKET = 16  # tokens, at least
_MOST_BUCKETS = 8


def mean_of_tokens(sums: Tensor) -> dict[str, float]:
    """Return the mean loss in nats, its perplexity and the number of tokens, of sums (loss, tokens)."""
    total, tokens = sums.tolist()
    loss = total / tokens if tokens else math.nan
    return {"loss": loss, "tokens": int(tokens), "perplexity": math.exp(loss) if loss < 700 else math.inf}


def _formatted(means: dict[str, float]) -> str:
    if "pairs" in means:
        what = f"accuracy {means['accuracy']:.1%}  margin {means['margin']:.3f}  {means['pairs']:,} pairs"
    else:
        perplexity = means["perplexity"]
        value = f"{perplexity:,.2f}" if perplexity < 1e6 else f"{perplexity:.2e}"
        what = f"perplexity {value}  {means['tokens']:,} tokens"
    return f"loss {means['loss']:.4f}  {what}"


@dataclass(frozen=True)
class Evaluated:
    """One evaluation: means over all tokens that have a loss, or all pairs of answers (`mean_of_pairs`).

    `positions` are by the number of tokens that a prediction sees, its own input included: more than the first and at
    most the second number.
    """

    step: int  # optimizer steps done
    overall: dict[str, float] | None  # None without data
    sources: dict[str, dict[str, float]]  # by name
    positions: dict[tuple[int, int], dict[str, float]]  # without buckets that have no tokens
    seconds: float
    sample: str | None = None  # the text that continues the prompt
    best: bool = False  # whether the loss is the lowest so far

    def record(self) -> dict[str, Any]:
        """Return plain values for `evaluation.jsonl`."""
        return {
            "step": self.step,
            **(self.overall or {}),
            "sources": self.sources,
            "positions": [{"above": a, "to": b, **means} for (a, b), means in self.positions.items()],
            "seconds": self.seconds,
            "sample": self.sample,
            "best": self.best,
        }

    def scalars(self) -> dict[str, float]:
        """Return the losses for trackers, by their names there."""
        if self.overall is None:
            return {}
        found = {f"eval/{k}": x for k, x in self.overall.items() if k not in ("tokens", "pairs")}
        found |= {f"eval/loss_by_source/{name}": means["loss"] for name, means in self.sources.items()}
        return found | {f"eval/loss_by_position/{b}": means["loss"] for (_, b), means in self.positions.items()}

    def lines(self) -> list[str]:
        """Format for a log."""
        lines = []
        if self.overall is not None:
            best = "  best" if self.best else ""
            lines.append(f"eval {self.step}  {_formatted(self.overall)}  {self.seconds:.1f} s{best}")
            if len(self.sources) > 1:
                lines += _columns("by source", self.sources)
            if len(self.positions) > 1:
                by_position = {f"{a:,}-{b:,}": means for (a, b), means in self.positions.items()}
                lines += _columns("by tokens before", by_position)
        if self.sample is not None:
            lines.append(f"sample {self.step}  {self.sample!r}")
        return lines


def _columns(title: str, losses: dict[str, dict[str, float]], width: int = 78) -> list[str]:
    lines = [f"  {title}:"]
    for name, means in losses.items():
        part = f"  {name} {means['loss']:.4f}"
        if len(lines[-1]) + len(part) > width:
            lines.append("   ")
        lines[-1] += part
    return lines


def buckets(context: int) -> list[int]:
    """Return the ends of the buckets of positions: the context, its half and so on, ascending, at most 8."""
    ends = [context]
    while len(ends) < _MOST_BUCKETS and (half := -(-ends[-1] // 2)) >= _FIRST_BUCKET:
        ends.append(half)
    return ends[::-1]


@dataclass
class Progress:
    """The lowest loss so far, and how many evaluations there have been since; saved with checkpoints."""

    of: list[Any]  # what the losses depend on besides the weights; losses of other data are not compared
    best: float | None = None
    step: int | None = None
    since: int = 0

    def add(self, step: int, loss: float) -> bool:
        """Count an evaluation; return whether its loss is the lowest."""
        lowest = math.isfinite(loss) and (self.best is None or loss < self.best)
        if lowest:
            self.best, self.step, self.since = loss, step, 0
        else:
            self.since += 1
        return lowest

    @classmethod
    def resumed(cls, of: list[Any], state: dict[str, Any] | None) -> Progress:
        """Return that of a checkpoint, or a new one if there is none or it is of other data."""
        return cls(**state) if state is not None and state["of"] == of else cls(of)


@dataclass
class Evaluator:
    """Evaluates a model, by the loss of `preferences` or else of tokens. Collective.

    `at` reports this rank's phase to the heartbeat; `autocast` says whether forwards need it, as in the training.
    """

    config: TrainConfig
    inputs: Inputs
    sp: SequenceSharding
    at: Callable[..., None]
    preferences: Preferences | None = None
    autocast: bool = False
    progress: Progress = field(init=False)

    def __post_init__(self) -> None:
        resume = self.inputs.resume
        state = None if resume is None else resume.state.get("evaluation")
        self.progress = Progress.resumed(evaluation_identity(self.config, self.inputs), state)

    @property
    def active(self) -> bool:
        return bool(self.inputs.evaluated) or self.config.evaluation.sample_prompt is not None

    def due(self, step: int) -> bool:
        """Return whether to evaluate after this step."""
        return self.active and (step % self.config.evaluation.eval_every == 0 or step == self.config.last_step)

    def __call__(self, model: Any, step: int) -> Evaluated:
        """Evaluate the model after a step; its modes and the training's random numbers stay as they are."""
        start = time.perf_counter()
        modes = {module: module.training for module in model.modules()}
        model.eval()
        try:
            with torch.no_grad(), torch.autocast(self.sp.device.type, torch.bfloat16, enabled=self.autocast):
                overall, sources, positions = self._losses(model, step)
                sample = self._sample(model, step)
        finally:
            for module, training in modes.items():
                module.training = training
        best = overall is not None and self.progress.add(step, overall["loss"])
        return Evaluated(step, overall, sources, positions, time.perf_counter() - start, sample, best)

    def _losses(self, model: Any, step: int) -> tuple[Any, dict[str, Any], dict[tuple[int, int], Any]]:
        if not self.inputs.evaluated:
            return None, {}, {}
        ends = buckets(self.config.context_tokens)
        sums = torch.stack([self._sums(model, name, ends, step) for name in self.inputs.evaluated])
        if self.sp.host_group is not None:  # ranks of a tensor axis have the same tokens
            sums = sums if self.sp.tensor_rank == 0 else torch.zeros_like(sums)
            dist.all_reduce(sums, group=self.sp.host_group)
        mean = mean_of_tokens if self.preferences is None else mean_of_pairs
        sources = {name: mean(of_source.sum(0)) for name, of_source in zip(self.inputs.evaluated, sums, strict=True)}
        by_bucket = [] if self.preferences else zip(pairwise([0, *ends]), sums.sum(0), strict=True)
        return mean(sums.sum((0, 1))), sources, {span: mean(sum_) for span, sum_ in by_bucket if sum_[1]}

    def _sums(self, model: Any, name: str, ends: list[int], step: int) -> Tensor:
        """Return this rank's sums of a source: fp64 [buckets, (loss, tokens)], or [1, fields of `mean_of_pairs`]."""
        config, sp = self.config, self.sp
        sums = torch.zeros((), dtype=torch.float64, device=sp.device)
        lasts = torch.tensor(ends[:-1], device=sp.device)
        stream = self.inputs.evaluation_sequences(name, config.context_tokens)
        size = config.sequences_per_forward * config.context_tokens
        with naming_eval_data(), shared_sequences(stream, size, sp.host_group) as every:
            sequences = islice(every, config.evaluation.eval_sequences)
            while group := list(islice(sequences, config.sequences_per_forward)):
                self.at("evaluating", step, unlimited=True)
                first = sp.data_rank * config.micro_batch
                mine = group[first : first + config.micro_batch]  # of this replica; none may be left
                chosen = mine or group[:1]  # forwards are collective
                collated = functools.partial(
                    collate, chosen, self.inputs.pack, config.context_tokens, self.inputs.images
                )
                # A rank may fail alone to read an image.
                batch = collated() if self.inputs.processor is None else on_every_rank(collated, sp.host_group)
                batch = {key: x.to(sp.device) for key, x in batch.items()}
                cut = shard_batch({key: x for key, x in batch.items() if key not in PICTURE_KEYS}, sp)
                if self.preferences is None:
                    found = _sums_of_tokens(model, cut if self.inputs.processor is None else batch, cut, lasts)
                else:
                    found = self.preferences.sums(cut)
                # Each rank of a sequence group has its own tokens, and all answers.
                if mine and (self.preferences is None or sp.rank == 0):
                    sums = sums + found
                else:
                    sums = sums + torch.zeros_like(found)
        return sums.view(-1, sums.shape[-1]).cpu()

    def _sample(self, model: Any, step: int) -> str | None:
        from transformers import GenerationConfig

        options, tokenizer = self.config.evaluation, self.inputs.tokenizer
        if options.sample_prompt is None:
            return None
        self.at("sampling", step, unlimited=True)
        ids = torch.from_numpy(self.inputs.tokens.text_ids(options.sample_prompt))[None].to(self.sp.device)
        settings = GenerationConfig(
            max_new_tokens=options.sample_tokens,
            do_sample=False,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.eos_token_id,
        )
        out = model.generate(ids, generation_config=settings)
        return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


def _sums_of_tokens(model: Any, batch: dict[str, Any], cut: dict[str, Any], lasts: Tensor) -> Tensor:
    """Return the sum of losses and the number of tokens by bucket, whose last tokens are given: fp64 [buckets, 2].

    `cut` is this rank's part of `batch`, without pictures.
    """
    # The input at position p sees p + 1 tokens.
    bucket = torch.bucketize(cut["position_ids"].expand_as(cut["labels"]) + 1, lasts).flatten()
    found = torch.stack([-token_logprobs(model, batch), cut["labels"] != IGNORE], -1)  # 0 where there is no label
    return found.new_zeros(len(lasts) + 1, 2, dtype=torch.float64).index_add_(0, bucket, found.double().flatten(0, 1))


def evaluation_identity(config: TrainConfig, inputs: Inputs) -> list[Any]:
    """Return what evaluation losses depend on besides the weights, as plain values."""
    sources = [source.identity["data"] for source in inputs.evaluated.values()]
    data = config.data
    return [*sources, config.evaluation.eval_sequences, config.context_tokens, inputs.pack, data.loss_on, data.dpo]
