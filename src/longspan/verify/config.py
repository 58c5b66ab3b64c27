"""The flags of `longspan verify`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from longspan.core.errors import LongspanError
from longspan.core.memory import MemoryChoice
from longspan.core.model import Model
from longspan.core.parallel import ParallelConfig
from longspan.core.validation import LARGEST_SEED, check_counts, check_name, check_number
from longspan.ranks.job import Timeouts

_MOST_TOKENS = 1 << 30


@dataclass(frozen=True)
class VerifyConfig(Model):
    """Prove on your own model that the sharded run computes what one process computes.

    The same batch runs through the Hugging Face model on one process and through the sharded model on all ranks; loss,
    logits and every gradient are compared. The exit code is 0 if they agree up to rounding, else 1. The model is a
    causal or masked LM, a vision-language model, or a transformer or pipeline of diffusers, with its weights; a
    config.json is verified with random weights.
    """

    context: int = 1024
    """Tokens per sequence (also 8k). One less is used if the ranks divide it, to test padding."""
    batch: int = 1
    """Sequences per replica."""
    text: str | None = None
    """Text to run: a .txt, .jsonl or .parquet file, a folder of these, "pydoc", or a dataset's name.
    By default random tokens. A vision-language model also gets random pictures."""
    tokenizer: str | None = None
    """Tokenizer for --text: a name, a folder, or "bytes". By default the model's, or "bytes" for
    random weights."""
    text_field: str = "text"
    """Column of --text that holds the text (.jsonl, .parquet, datasets)."""
    fsdp: bool = True
    """Shard the weights (FSDP2) and compare each rank's shard of every gradient. Off: whole gradients on every rank."""
    fp64: bool = True
    """Compare with an fp64 run. Off: with an fp32 run, if the model does not fit in fp64."""
    seed: int = 0
    """Seed of the random weights and the random tokens."""
    json: bool = False
    """Print only the report, as JSON, to stdout (schema: docs/reference/json.md)."""

    memory: MemoryChoice = field(default_factory=MemoryChoice)
    """Memory options of the sharded run: fastest, longest or auto, or options: checkpointing=full,offload=host
    (docs/how-to/memory.md)."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    timeouts: Timeouts = field(default_factory=Timeouts)

    @property
    def random_weights(self) -> bool:
        return self.model.endswith(".json")

    @property
    def run_dtype(self) -> Literal["fp32", "bf16"]:
        """fp32 detects small faults; bf16 shows that sharding adds nothing to the rounding of bf16."""
        return "bf16" if self.dtype == "bf16" else "fp32"

    @property
    def tokens(self) -> int:
        """Tokens per sequence: `context`, or one less if the ranks divide it."""
        ranks = self.parallel.sequence_ranks
        if ranks == 1:  # megatron-sp shards the sequence over the tensor axis
            ranks = self.parallel.tensor
        return self.context - (ranks > 1 and self.context % ranks == 0)

    @property
    def reference(self) -> Literal["fp64", "fp32"]:
        """The dtype of the run that everything is compared with."""
        return "fp64" if self.fp64 else "fp32"

    def check(self) -> None:
        """Raise on values that cannot be verified."""
        super().check()
        if self.memory.chooses and self.memory.options:
            raise LongspanError(
                f"--memory {self.memory}: verify takes auto or options, but not both; plan says what auto chooses"
            )
        check_counts(self, 1, "batch", "context")
        check_number("--seed", self.seed, 0, LARGEST_SEED, whole=True)
        for name in ("text_field", "text", "tokenizer"):
            if getattr(self, name) is not None:
                check_name(f"--{name.replace('_', '-')}", getattr(self, name))
        replicas, ranks = self.parallel.data, self.parallel.sequence_ranks
        tokens = self.batch * replicas * self.context
        if tokens > _MOST_TOKENS:
            raise LongspanError(
                f"--batch {self.batch} x --data {replicas} x --context {self.context} are {tokens:,} "
                f"tokens; verify holds them all on every rank, at most {_MOST_TOKENS:,}: give a smaller batch"
            )
        for flag, given in (("--tokenizer", self.tokenizer), ("--text-field", self.text_field)):
            if given not in (None, "text") and self.text is None:
                raise LongspanError(f"{flag} {given} is for --text; give --text too, or neither")
        if self.context < max(4, 2 * ranks):
            raise LongspanError(
                f"--context {self.context} is too short for {ranks} ranks: give at least 2 tokens per rank, "
                f"--context {max(4, 2 * ranks)} or more"
            )
