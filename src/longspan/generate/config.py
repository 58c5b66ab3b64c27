"""Everything `longspan generate` can be asked for, and what `longspan score` shares with it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from longspan.core.cache_dtype import CacheDtype, CacheOffload
from longspan.core.errors import LongspanError
from longspan.core.memory_flags import flags_last
from longspan.core.parallel import ParallelConfig
from longspan.core.rope import RopeFlags
from longspan.core.validation import (
    LARGEST_COUNT,
    LARGEST_SEED,
    LONGEST_WAIT_S,
    check_name,
    check_number,
    check_output,
)
from longspan.ranks.rendezvous import START_TIMEOUT_S

AXES_OF_A_REPLICA = ("ring", "ulysses", "tensor", "tensor_style", "layout")


@flags_last
@dataclass(frozen=True)
class ModelFlags(RopeFlags):
    """A model with its tokenizer, and the ranks that it runs on."""

    model: str = ""
    """Name or folder of a Hugging Face causal LM, with its weights; also RUN/hf of `longspan train`."""
    tokenizer: str | None = None
    """Name or folder of a tokenizer, or "bytes" (one token per byte). By default the model's, or "bytes" where its
    folder has none."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig, metadata={"only": AXES_OF_A_REPLICA})
    """How ranks share the work, and a KV cache: ring ranks by tokens, ulysses and tensor ranks by KV heads."""
    nproc: int | None = None
    """Ranks on this machine; by default as many as the degrees need."""
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Of weights and computing. auto: as the model's config says."""
    fsdp: bool = True
    """Shard the weights over all ranks (FSDP2): they are gathered, layer by layer, for every chunk of the prompt and
    for every new token. Off: every rank holds all of them."""
    kernel: Literal[
        "auto", "sdpa", "flash", "tiled", "block", "flex", "cudnn", "flash3", "flash4", "flash_attn", "eager"
    ] = "auto"
    """Local attention kernel."""
    json: bool = False
    """Print the report as JSON, and nothing else, on stdout (schema: docs/generate.md, docs/score.md)."""
    timeout: int | None = None
    """Seconds after which a rank that is stopped, hung or cut off ends the job and is named. By default 60, with GPUs
    300. Loading may take longer."""
    start_timeout: int = START_TIMEOUT_S
    """Seconds within which all ranks must have started."""
    rank_memory: float | None = None
    """GB that a rank may take for weights, activations and a cache, where it is planned beforehand whether they fit. By
    default those of its GPU, or on a CPU its share of the machine's."""

    def check_job(self, command: str) -> None:
        """Refuse what makes no sense of model and ranks.

        Raises:
            LongspanError: with the numbers and the way out.
        """
        if not self.model:
            raise LongspanError(f"{command} needs --model: the name or folder of a model with its weights")
        for name in ("model", "tokenizer"):
            if getattr(self, name) is not None:
                check_name(f"--{name}", getattr(self, name))
        self.parallel.check()
        if self.nproc is not None:
            check_number("--nproc", self.nproc, 1, LARGEST_COUNT)
        if self.rank_memory is not None:
            check_number("--rank-memory", self.rank_memory, 0, above=True)
        self.rope()
        if self.timeout is not None:
            check_number("--timeout", self.timeout, 1, LONGEST_WAIT_S)
        check_number("--start-timeout", self.start_timeout, 1, LONGEST_WAIT_S)


@dataclass(frozen=True)
class GenerateConfig(ModelFlags):
    """Continue a text, or answer a question about it, with a KV cache that lies over all ranks.

    The text streams to stdout, progress and the report go to stderr. Alone, this starts its ranks itself; under
    torchrun (several machines) it joins them. Ctrl-C ends all ranks, and what was written stays.
    """

    prompt: str | None = None
    """The text to go on from. Give this or --file; without either it is read from stdin."""
    file: Path | None = None
    """A text file (UTF-8) to go on from."""
    question: str | None = None
    """A question about the text, which is put behind it, with an empty line between."""
    template: Literal["auto", "chat", "none"] = "auto"
    """Whether text and question are put into the tokenizer's chat template, as a user's message. auto: where there is a
    --question, and the tokenizer has one."""
    max_new_tokens: int = 256
    """New tokens, unless the model ends its text before."""
    prefill_chunk: int | None = None
    """Tokens of the prompt that go through the model at once, over all ranks: what bounds the memory of a long prompt.
    By default 8k for each rank."""
    cache: CacheDtype = "exact"
    """How keys and values are kept. exact: as the model computes them. int8, fp8: a byte per element and an fp32 scale
    per head and token, an approximation (docs/cache.md has its error)."""
    cache_offload: CacheOffload = "none"
    """Where keys and values lie. host: in the host's memory; each layer's come to the GPU when it runs, the next one's
    meanwhile, so that the GPU has two layers of the cache at a time. What is generated is the same."""
    cache_latent: bool = True
    """Of DeepSeek's attention (MLA) the KV cache holds the vectors that keys and values are made of, where that is less
    on these ranks. --no-cache-latent: keys and values, as of any attention."""
    cache_dir: Path | None = None
    """Folder in which to save the KV cache of the text, without the --question: the next question about the same text
    loads it instead of reading the text again, on any mesh. It takes as much disk as the cache takes memory; with
    several machines, all of them must see the folder."""
    temperature: float | None = None
    """0: always the likeliest token. Above: draw, with logits divided by it. By default as the model's
    generation_config.json says."""
    top_k: int | None = None
    """Draw from so many of the likeliest tokens. 0: from all. By default as the model's generation_config.json says."""
    top_p: float | None = None
    """Draw from the likeliest tokens whose probabilities sum up to this. By default as the model's
    generation_config.json says."""
    seed: int = 0
    """Seed of what is drawn; the same text on any mesh."""
    out: Path | None = None
    """Write the text to this file as well, as it comes."""

    @property
    def chunk(self) -> int:
        """Tokens of the prompt at once."""
        return self.prefill_chunk or 8192 * self.parallel.ranks

    def check(self) -> None:
        """Refuse what makes no sense, as far as it can be seen without reading anything.

        Raises:
            LongspanError: with the numbers and the way out.
        """
        self.check_job("generate")
        if self.prompt is not None and self.file is not None:
            raise LongspanError("--prompt and --file both give a text; give one of them (and ask by --question)")
        for name in ("prompt", "question"):
            if getattr(self, name) == "":
                raise LongspanError(f"--{name} is empty; leave it out, or give a text")
        check_number("--max-new-tokens", self.max_new_tokens, 1, LARGEST_COUNT)
        if self.prefill_chunk is not None:
            check_number("--prefill-chunk", self.prefill_chunk, 1, LARGEST_COUNT)
        if self.temperature is not None:
            check_number("--temperature", self.temperature, 0, 1e6)
        if self.top_k is not None:
            check_number("--top-k", self.top_k, 0, LARGEST_COUNT)
        if self.top_p is not None:
            check_number("--top-p", self.top_p, 0, 1, above=True)
        if self.temperature == 0 and (self.top_k is not None or self.top_p is not None):
            raise LongspanError("--temperature 0 draws nothing, and --top-k and --top-p are of drawing; leave one out")
        check_number("--seed", self.seed, 0, LARGEST_SEED, whole=True)
        if self.out is not None:
            check_output("--out", self.out, example="text.txt")
        if self.cache_dir is not None:
            check_output("--cache-dir", self.cache_dir, folder=True)
            if not self.cache_latent:
                raise LongspanError("--cache-dir does not go with --no-cache-latent; leave one of them out")
