"""Everything `longspan verify` can be asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from longspan.core.errors import LongspanError
from longspan.core.memory_flags import MemoryFlags, flags_last
from longspan.core.parallel import ParallelConfig
from longspan.core.rope import RopeFlags
from longspan.core.validation import LARGEST_COUNT, LARGEST_SEED, LONGEST_WAIT_S, check_name, check_number
from longspan.ranks.rendezvous import START_TIMEOUT_S

_MOST_TOKENS = 1 << 30


@flags_last
@dataclass(frozen=True)
class VerifyConfig(MemoryFlags, RopeFlags):
    """Prove on your own model that the sharded run computes what one process computes.

    The same batch goes through the plain Hugging Face model on one process and through the sharded one on all ranks;
    loss, logits and every gradient are compared. Ends with code 0 if they agree up to rounding, with 1 if they do not.
    """

    model: str | None = None
    """Name or folder of a Hugging Face causal (or masked) LM, with its weights. Give this, --config or --resume."""
    config: Path | None = None
    """A model's config.json: verify it with random weights. (Beside --resume: see there.)"""
    resume: str | None = None
    """A checkpoint of `longspan train`: a run's folder (its newest one), or OUT/checkpoints/step-... Its files are
    compared with their checksums, and its weights are what is verified; the model's config is in it. A --config beside
    it has to be the same, key by key; it is needed only where transformers cannot make the one that is kept."""
    context: int = 1024
    """Tokens per sequence (also 8k). One fewer is used where the ranks divide it, so that padding is exercised."""
    parallel: ParallelConfig = field(default_factory=lambda: ParallelConfig(ring_impl="p2p"))
    """How ranks share the work. Here --ring-impl is p2p, which auto chooses in long runs."""
    nproc: int | None = None
    """Ranks on this machine; by default as many as the degrees need."""
    batch: int = 1
    """Sequences per replica."""
    data: str | None = None
    """Text to run: a .txt, .jsonl or .parquet file, a folder of these, "pydoc", or a dataset's name.
    By default random tokens."""
    tokenizer: str | None = None
    """Tokenizer for --data: a name, a folder, or "bytes". By default the model's (--model), or "bytes" (--config,
    --resume)."""
    text_field: str = "text"
    """Column of --data that holds the text (.jsonl, .parquet, datasets)."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """fp32 tells a fault from rounding sharply; bf16 shows that sharding adds nothing to bf16's own noise."""
    fsdp: bool = True
    """Shard the weights (FSDP2) and compare each rank's shard of every gradient. Off: whole gradients on every rank."""
    dropout: float = 0.0
    """0 alone: a comparison is made without the model's dropout, which draws other numbers on other ranks."""
    fp64: bool = True
    """Compare with an fp64 run. Off, for a model that does not fit in fp64: with an fp32 run."""
    kernel: Literal[
        "auto", "sdpa", "flash", "tiled", "block", "flex", "cudnn", "flash3", "flash4", "flash_attn", "eager"
    ] = "auto"
    """Local attention kernel of the sharded run."""
    seed: int = 0
    """Seed of the random weights (--config alone) and the random tokens."""
    json: bool = False
    """Print the report as JSON, and nothing else, on stdout (schema: docs/reference/json.md)."""
    timeout: int | None = None
    """Seconds after which a rank that is stopped, hung or cut off ends the job and is named. By default 60, with GPUs
    300. Loading, a save or an export may take longer."""
    start_timeout: int = START_TIMEOUT_S
    """Seconds within which all ranks must have started."""

    @property
    def tokens(self) -> int:
        """Tokens per sequence that are run: `context`, or one fewer where the ranks divide it."""
        ranks = self.parallel.sequence_ranks
        if ranks == 1:  # megatron-sp shards the sequence over the tensor axis
            ranks = self.parallel.tensor
        return self.context - (ranks > 1 and self.context % ranks == 0)

    @property
    def reference(self) -> Literal["fp64", "fp32"]:
        """The dtype of the run that everything is compared with."""
        return "fp64" if self.fp64 else "fp32"

    def check(self) -> None:
        """Refuse what cannot be verified.

        Raises:
            LongspanError: with the numbers and the way out.
        """
        if self.resume is None and (self.model is None) == (self.config is None):
            given = "neither" if self.model is None else "both"
            raise LongspanError(
                f"verify needs either --model NAME_OR_PATH or --config FILE, got {given}; or --resume DIR for the "
                "weights of a checkpoint"
            )
        if self.resume is not None and self.model is not None:
            raise LongspanError(f"--resume {self.resume} and --model {self.model} both name weights; give one of them")
        if self.resume is not None and self.config is None and self.rope_scaling != "as-is":
            raise LongspanError(
                f"--rope-scaling {self.rope_scaling} changes a model's config, and --resume {self.resume} takes the "
                "one that the run was trained with, its scaling included; leave it out"
            )
        self.rope()
        self.levels()
        for name in ("batch", "context", "nproc"):
            if getattr(self, name) is not None:
                check_number(f"--{name}", getattr(self, name), 1, LARGEST_COUNT)
        self.parallel.check()
        if self.dropout != 0:
            raise LongspanError(
                f"--dropout {self.dropout:g} would draw other numbers on other ranks, and nothing could be compared; "
                "leave it out: verify switches dropout off"
            )
        check_number("--seed", self.seed, 0, LARGEST_SEED, whole=True)
        if self.timeout is not None:
            check_number("--timeout", self.timeout, 1, LONGEST_WAIT_S)
        check_number("--start-timeout", self.start_timeout, 1, LONGEST_WAIT_S)
        for name in ("text_field", "data", "model", "resume", "tokenizer"):
            if getattr(self, name) is not None:
                check_name(f"--{name.replace('_', '-')}", getattr(self, name))
        replicas, ranks = self.parallel.data_degree, self.parallel.sequence_ranks
        tokens = self.batch * replicas * self.context
        if tokens > _MOST_TOKENS:
            raise LongspanError(
                f"--batch {self.batch} x --data-degree {replicas} x --context {self.context} are {tokens:,} "
                f"tokens; verify holds them all on every rank, at most {_MOST_TOKENS:,}: give a smaller batch"
            )
        if self.tokenizer is not None and self.data is None:
            raise LongspanError(f"--tokenizer {self.tokenizer} is for the text of --data; give --data too, or neither")
        if self.context < max(4, 2 * ranks):
            raise LongspanError(
                f"--context {self.context} is too short for {ranks} ranks: give at least 2 tokens per rank, "
                f"--context {max(4, 2 * ranks)} or more"
            )
