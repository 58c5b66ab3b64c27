"""The flags of `longspan generate`, and those that `longspan score` shares."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from longspan.core.cache import CacheConfig
from longspan.core.errors import LongspanError
from longspan.core.model import Model
from longspan.core.parallel import ParallelConfig
from longspan.core.validation import LARGEST_SEED, check_counts, check_name, check_number, check_output
from longspan.ranks.job import Timeouts


@dataclass(frozen=True)
class ModelFlags(Model):
    """A model, its tokenizer and its ranks."""

    tokenizer: str | None = None
    """Name or folder of a tokenizer, or "bytes" (one token per byte). By default the model's, or "bytes" where its
    folder has none."""
    weights: Literal["auto", "replicated", "sharded"] = "auto"
    """replicated: every rank holds all weights, or its part of a tensor axis. sharded: over all ranks (FSDP2), gathered
    layer by layer for every forward. For score, auto is sharded. For generate, which runs a forward for every new
    token, auto is replicated where the planner says that they fit; else with the Ulysses ranks as a tensor axis, if
    these fit; else sharded."""
    rank_memory: float | None = None
    """GB that the planner assumes for a rank's weights, activations and cache. Default: the memory of its GPU, or its
    share of the machine's."""
    json: bool = False
    """Print only the report, as JSON, to stdout (schema: docs/reference/json.md)."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    timeouts: Timeouts = field(default_factory=Timeouts)

    @property
    def fsdp(self) -> bool:
        return self.weights != "replicated"

    def check(self) -> None:
        """Raise on invalid values, without reading any file."""
        super().check()
        if self.model.endswith(".json"):
            raise LongspanError(f"--model {self.model} has no weights; give the folder of a model that has some")
        if self.tokenizer is not None:
            check_name("--tokenizer", self.tokenizer)
        if self.parallel.data > 1:
            raise LongspanError(f"--data {self.parallel.data}: there is one text for all ranks; leave it out")
        if self.weights == "replicated" and self.parallel.experts not in (1, "auto"):
            raise LongspanError(
                f"--experts {self.parallel.experts} shards weights, and --weights replicated does not; leave one out"
            )
        if self.rank_memory is not None:
            check_number("--rank-memory", self.rank_memory, 0, above=True)


@dataclass(frozen=True)
class GenerateConfig(ModelFlags):
    """Answer a question, also about a long text, or continue a text, with a KV cache sharded over all ranks.

    The text streams to stdout; progress and the report go to stderr. The command starts its ranks, or joins them under
    torchrun, on several machines. Ctrl-C ends all ranks and keeps the text written so far.
    """

    prompt: str | None = None
    """The text to continue, or to ask about. Without it and --file, the text is read from stdin."""
    file: Path | None = None
    """A text file (UTF-8) to continue, or to ask about."""
    question: str | None = None
    """A question to the model: alone, about the text, after which it is put with an empty line between, or about the
    pictures. It is sent in the tokenizer's chat template; without a template, the model continues it as a text."""
    image: tuple[Path, ...] = ()
    """Images before the text, for a vision-language model."""
    video: Path | None = None
    """A video before the text: a folder of frames, in the order of their names, or a file, which needs a decoder."""
    fps: float | None = None
    """Frames per second of the folder of --video. Default: 2."""
    template: Literal["auto", "chat", "none"] = "auto"
    """Wrap text and question as a user's message in the tokenizer's chat template. auto: with --question, if the
    tokenizer has a template."""
    max_new_tokens: int = 256
    """Most tokens to generate; the model may end its text earlier."""
    prefill_chunk: int | None = None
    """Tokens of the prompt per forward, over all ranks; bounds the memory of a long prompt. Default: 8k per rank."""
    cuda_graph: bool = False
    """Replay each new token's forward as a CUDA graph, so that the host does not limit the speed. Needs a GPU, --cache
    exact, and weights that are not sharded by FSDP."""
    cache_dir: Path | None = None
    """Folder to save the KV cache of the text in, without the --question: the next question about the same text loads
    it, on any mesh. It takes as much disk as the cache takes memory. All machines must see the folder."""
    temperature: float | None = None
    """0: always the most likely token. Above 0: sample from the logits divided by it. Default: the model's
    generation_config.json."""
    top_k: int | None = None
    """Sample from this many of the most likely tokens. 0: from all. Default: the model's generation_config.json."""
    top_p: float | None = None
    """Sample from the most likely tokens whose probabilities sum up to this. Default: the model's
    generation_config.json."""
    seed: int = 0
    """Seed of the sampling; any mesh gives the same text."""
    out: Path | None = None
    """Also write the text to this file, token by token."""
    cache: CacheConfig = field(default_factory=CacheConfig)
    """The KV cache. exact: the model's dtype. int8, fp8: an approximation (errors: docs/how-to/inference.md). Options:
    offload=host, where the GPU holds two layers at a time, and the rest is in host memory; latent=false, for keys and
    values instead of the latent vectors of DeepSeek's attention (MLA)."""

    @property
    def pictures(self) -> bool:
        """Whether the prompt has images or a video."""
        return bool(self.image) or self.video is not None

    @property
    def chunk(self) -> int:
        return self.prefill_chunk or 8192 * self.parallel.ranks

    def check(self) -> None:
        """Raise on invalid values, without reading any file."""
        super().check()
        if self.prompt is not None and self.file is not None:
            raise LongspanError("--prompt and --file both give a text; give one of them (and ask by --question)")
        if self.pictures and self.cache_dir is not None:
            raise LongspanError("--cache-dir saves the cache of a text alone; leave it out with --image or --video")
        if self.pictures and self.template == "none":
            raise LongspanError(
                "--template none, but the chat template says where --image and --video are; leave it out"
            )
        if self.fps is not None:
            check_number("--fps", self.fps, 0, 1e6, above=True)
            if self.video is None:
                raise LongspanError(f"--fps {self.fps:g} is that of --video, which is missing; give both, or neither")
        for name in ("prompt", "question"):
            given = getattr(self, name)
            if given is not None and not given.strip():
                raise LongspanError(f"--{name} is empty; leave it out, or give a text")
        check_counts(self, 1, "max_new_tokens", "prefill_chunk")
        check_counts(self, 0, "top_k")
        if self.temperature is not None:
            check_number("--temperature", self.temperature, 0, 1e6)
        if self.top_p is not None:
            check_number("--top-p", self.top_p, 0, 1, above=True)
        if self.temperature == 0 and (self.top_k is not None or self.top_p is not None):
            raise LongspanError("--temperature 0 does not sample, so --top-k and --top-p have no effect; leave one out")
        check_number("--seed", self.seed, 0, LARGEST_SEED, whole=True)
        for flag, value, accepted in (
            ("--cache", str(self.cache), ("exact", "exact,latent=false")),
            ("--weights", self.weights, ("auto", "replicated")),
            ("--kernel", self.kernel, ("auto", "flash")),
        ):
            if self.cuda_graph and value not in accepted:
                raise LongspanError(
                    f"--cuda-graph needs {flag} {' or '.join(accepted)}, got {value}; leave one of them out"
                )
        if (chunks := self.parallel.overlap_chunks) != ParallelConfig.overlap_chunks:
            raise LongspanError(f"--overlap-chunks {chunks} does not work with a KV cache; leave it out")
        if self.out is not None:
            check_output("--out", self.out, example="text.txt")
        if self.cache_dir is not None:
            check_output("--cache-dir", self.cache_dir, folder=True)
            if not self.cache.latent:
                raise LongspanError("--cache-dir does not support --cache latent=false; leave one of them out")
