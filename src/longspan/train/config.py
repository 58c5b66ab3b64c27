"""Everything `longspan train` can be asked for."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Literal

from longspan.core.errors import LongspanError
from longspan.core.memory import Memory, MemoryLevel
from longspan.core.memory_flags import MemoryFlags, flags_last
from longspan.core.parallel import ParallelConfig
from longspan.core.rope import RopeFlags
from longspan.core.validation import (
    LARGEST_COUNT,
    LARGEST_SEED,
    LONGEST_WAIT_S,
    check_name,
    check_number,
    path_of,
)
from longspan.ranks.rendezvous import START_TIMEOUT_S


@flags_last
@dataclass(frozen=True)
class TrainConfig(MemoryFlags, RopeFlags):
    """Train a Hugging Face causal LM on long sequences, each sharded over several ranks.

    Alone, this starts its ranks itself; under torchrun (several machines) it joins them. SIGTERM or Ctrl-C saves a
    checkpoint and ends with code 143 or 130; the same command then goes on from there.
    """

    default_level: ClassVar[MemoryLevel] = "auto"

    data: str = ""
    """Text: a .txt (one document), .jsonl or .parquet file, a folder of these, "pydoc" (0.5 MB of English that comes
    with Python), or the name of a dataset on the Hugging Face hub (NAME or NAME:CONFIG)."""
    model: str | None = None
    """Name or folder of a Hugging Face causal LM to go on training. Give this or --config."""
    config: Path | None = None
    """A model's config.json: train it from random weights."""
    tokenizer: str | None = None
    """Name or folder of a tokenizer, or "bytes" (one token per byte, 384 ids). By default the model's (--model), or
    "bytes" (--config)."""
    text_field: str = "text"
    """Column that holds the text (.jsonl, .parquet, datasets)."""
    split: str = "train"
    """Split of a dataset from the hub."""
    shuffle: int = 1024
    """Documents that are shuffled among themselves at a time (and the files, once). 0: in the order found."""
    pack: Literal["stream", "documents"] = "stream"
    """How sequences are filled; both put documents one after the other and cut them where a sequence is full.
    stream: attention sees the whole sequence. documents: it never crosses from one document into another."""

    context: int | Literal["max"] = 8192
    """Tokens per sequence (also 8k or 1M: k is 1024, M is 1024 * 1024). max: the longest that the planner says fits,
    with the memory options that it takes, and within the model's positions."""
    rank_memory: float | None = None
    """GB that a rank may take for weights, optimizer and activations, where --memory auto or --context max choose. By
    default those of its GPU, or on a CPU its share of the machine's."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """How ranks share the work."""
    nproc: int | None = None
    """Ranks on this machine; by default as many as the degrees need."""
    batch: int | None = None
    """Sequences per optimizer step, over the whole job. By default micro_batch x data_degree."""
    micro_batch: int = 1
    """Sequences that go through the model at once, per replica; the rest of --batch is accumulated."""

    reduce: Literal["auto", "last", "each"] = "auto"
    """When the gradients of accumulated micro-batches are summed over the ranks. each: after each of them. last: once,
    after the last; with --fsdp every rank then holds the gradients of the whole model in fp32. auto: last, but with
    --fsdp only where these take at most an eighth of the memory."""

    steps: int = 1000
    """Optimizer steps."""
    lr: float = 3e-4
    """Learning rate after warm-up."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """How the learning rate goes on after warm-up: down to 0 at the last step, or not at all."""
    warmup: int = 0
    """Steps over which the learning rate rises from 0."""
    weight_decay: float = 0.1
    """AdamW's weight decay; not applied to norms and biases."""
    optimizer: Literal["adamw", "adamw8bit"] = "adamw"
    """adamw8bit keeps AdamW's two states in 8 bits a value, with a scale for each 256 (torchao's AdamW8bit, the extra
    `adamw8bit`), instead of 32: a quarter of their memory, and other numbers. The states stay fp32 for a weight
    whose part on a rank is not a multiple of 256 values."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's betas."""
    clip: float = 1.0
    """Largest global norm of the gradients; 0 for no clipping."""
    optimizer_in_backward: bool = False
    """Update each weight in the backward, as its gradient arrives, and free the gradient at once: those of all weights
    never exist together. The same numbers to the bit. Needs --clip 0, no accumulation, and --fsdp or one rank."""
    grad_dtype: Literal["fp32", "bf16"] = "fp32"
    """In what FSDP sums gradients over the ranks. bf16 halves what is sent and what is held for it, and rounds every
    sum to 8 bits: the one setting here, beside --dtype, that changes the numbers. Weights' gradients and the optimizer
    are fp32 either way."""
    dropout: float | None = None
    """0 sets every dropout of the model to 0, so that one with attention dropout (GPT-2) can be trained: that of
    attention would depend on the number of ranks, and is refused. By default the model's config says."""
    dtype: Literal["fp32", "bf16"] = "bf16"
    """bf16 computes in bf16, with weights, gradient sums and optimizer in fp32."""
    fsdp: bool = True
    """Shard weights, gradients and optimizer over all ranks (FSDP2). Off: every rank holds all of them."""
    offload_folder: str = ""
    """Folder of the file that --offload disk writes to, on a disk of the rank's own machine. By default the system's
    for temporary files."""
    kernel: Literal[
        "auto", "sdpa", "flash", "tiled", "block", "flex", "cudnn", "flash3", "flash4", "flash_attn", "eager"
    ] = "auto"
    """Local attention kernel."""
    deterministic: bool = False
    """Take kernels alone that give the same bits every time (torch.use_deterministic_algorithms): on GPUs needed, and
    slower, for a run that is resumed to the bit. On a CPU all are, and nothing changes."""
    seed: int = 0
    """Seed of random weights, of the order of the data and of dropout."""

    out: Path = Path("runs/train")
    """Folder of the run: metrics.jsonl, tensorboard/, checkpoints/ and, at the end, hf/ (Hugging Face format). With
    several machines, one that all of them see."""
    save_every: int = 500
    """Steps between checkpoints; one is also made at the end. 0: only at the end."""
    async_save: bool = True
    """Write checkpoints beside the training: it waits only until its state is copied to the host's memory, where that
    takes at most half of what is free there; otherwise, and with --no-async-save, it waits until all is written."""
    keep: int = 2
    """Newest checkpoints that are kept. 0: all."""
    resume: str = "auto"
    """auto: go on from the newest checkpoint in --out that is whole, if any. never: start anew. Or the path of a
    checkpoint. Another mesh, --fsdp or --context may be used; the order of the data is kept."""
    change_batch: bool = False
    """Go on from a checkpoint with another number of sequences per step than it was made with."""
    export: Literal["end", "saves", "never"] = "end"
    """When to write hf/: at the end, with every checkpoint, or never. To export a run that was stopped, resume it with
    --steps set to the steps it has done."""
    profile: int | None = None
    """Record this step (counted from the run's first): OUT/profile/ gets a trace of all ranks for Chrome and Perfetto,
    and a timeline, a page and with matplotlib a PNG, with what of the communication is exposed on each rank. Not the
    first step that is done, in which much is set up."""
    spike: float = 2.0
    """A loss above so many times the median of the 20 steps before is a spike. 0: none is."""
    on_spike: Literal["warn", "stop"] = "warn"
    """What to do about a spike: say so and go on, or stop."""
    zero_gradients: int = 5
    """Stop after so many steps in a row whose gradient norm is exactly 0. 0: never."""
    check_weights: int = 100
    """With --no-fsdp, compare the ranks' weights every so many forwards. 0: never."""
    check_at_rest: bool = False
    """Checksums of the weights after each step, compared before the next: finds memory that changed by itself."""
    log_every: int = 10
    """Steps between reports; the reported step is profiled for its share of communication."""

    timeout: int | None = None
    """Seconds after which a rank that is stopped, hung or cut off ends the job and is named. By default 60, with GPUs
    300. Loading, a save or an export may take longer."""
    start_timeout: int = START_TIMEOUT_S
    """Seconds within which all ranks must have started."""
    grace: int = 25
    """Seconds that the ranks get to save and end after SIGTERM or Ctrl-C; then they are killed. Give longer where a
    step and a save take longer."""
    dry_run: bool = False
    """Check the run as far as that needs no ranks and no weights (model, text, folders, checkpoint, RoPE scaling,
    memory options), say what it would do, and end. Nothing is written."""
    max_restarts: int = 0
    """How often the ranks are started again, from the newest checkpoint, after one of them died or was lost. Under
    torchrun, give its --max-restarts."""

    def levels(self) -> Memory:
        """The memory options that are asked for.

        Raises:
            LongspanError: for memory options that cannot be together.
        """
        return replace(super().levels(), offload_folder=self.offload_folder)

    @property
    def tokens(self) -> int:
        """Tokens per sequence, once `max` is settled (`longspan.train.memory_choice.settled`)."""
        assert self.context != "max"
        return self.context

    @property
    def sequences(self) -> int:
        """Sequences per optimizer step."""
        return self.micro_batch * self.parallel.data_degree if self.batch is None else self.batch

    @property
    def checkpoints(self) -> Path:
        """The folder of the run's checkpoints."""
        return self.out / "checkpoints"

    @property
    def exported(self) -> Path:
        """The Hugging Face folder of the run."""
        return self.out / "hf"

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer that is used."""
        return self.tokenizer or self.model or "bytes"

    def check(self) -> None:
        """Refuse what makes no sense, as far as it can be seen without reading anything.

        Raises:
            LongspanError: with the numbers and the way out.
        """
        if (self.model is None) == (self.config is None):
            given = "neither" if self.model is None else "both"
            raise LongspanError(f"train needs either --model NAME_OR_PATH or --config FILE, got {given}")
        if not self.data:
            raise LongspanError("train needs --data: a file, a folder, a dataset's name, or pydoc for a first try")
        self._check_ranges()
        self.levels()
        self.rope()
        if self.context != "max" and self.context < max(2, self.parallel.sequence_ranks):
            raise LongspanError(
                f"--context {self.context} is too short: a sequence needs 2 tokens to learn from, and one for each "
                f"of the {self.parallel.sequence_ranks} ranks that share it"
            )
        if self.warmup > self.steps:
            raise LongspanError(f"--warmup {self.warmup} is longer than the run of --steps {self.steps}")
        at_once = self.micro_batch * self.parallel.data_degree
        if self.sequences < at_once or self.sequences % at_once:
            below = max(at_once, self.sequences // at_once * at_once)
            raise LongspanError(
                f"--batch {self.sequences} is not a multiple of --micro-batch {self.micro_batch} x --data-degree "
                f"{self.parallel.data_degree} = {at_once}; give --batch {below} or {below + at_once}"
            )
        tensor = self.parallel.tensor
        if self.optimizer == "adamw8bit" and tensor > 1:
            raise LongspanError(
                f"--optimizer adamw8bit packs weights of which ranks hold whole rows, and --tensor {tensor} "
                f"cuts them in columns too: the states of those would stay fp32; leave --optimizer at adamw, or use "
                f"--tensor 1 --ulysses {self.parallel.ulysses * tensor}"
            )
        self._check_gradients()

    def _check_gradients(self) -> None:
        """Refuse what cannot be had together in the way gradients are summed, and used."""
        if self.grad_dtype != "fp32" and (not self.fsdp or self.parallel.fsdp_ranks == 1):
            why = "with --no-fsdp gradients are summed in fp32"
            if self.parallel.fsdp_ranks == 1:
                ranks = "one rank" if self.parallel.ranks == 1 else "the tensor axis alone"
                why = f"{ranks} sums no gradients"
            raise LongspanError(f"--grad-dtype {self.grad_dtype} is of FSDP's sums over ranks, and {why}; leave it out")
        if not self.optimizer_in_backward:
            return
        flag = "--optimizer-in-backward"
        if self.clip:
            raise LongspanError(
                f"{flag} updates each weight before the norm of all gradients is known, and --clip {self.clip:g} needs "
                f"it; say --clip 0"
            )
        at_once = self.micro_batch * self.parallel.data_degree
        if self.sequences > at_once:
            raise LongspanError(
                f"{flag} updates in every backward, and --batch {self.sequences} accumulates gradients over "
                f"{self.sequences // at_once} of them; give --batch {at_once}, or --micro-batch "
                f"{self.sequences // self.parallel.data_degree}"
            )
        if not self.fsdp and self.parallel.fsdp_ranks > 1:
            raise LongspanError(
                f"{flag} needs gradients that are summed one by one, and with --no-fsdp they are summed when the "
                f"backward has ended; leave --no-fsdp out"
            )
        if self.check_at_rest:
            raise LongspanError(
                f"{flag} makes a step of the optimizer for each weight, and --check-at-rest reads all weights around "
                f"each; leave one of them out"
            )

    def _check_ranges(self) -> None:
        for name in ("micro_batch", "batch", "steps", "log_every", "context", "nproc"):
            if getattr(self, name) not in (None, "max"):
                check_number(f"--{name.replace('_', '-')}", getattr(self, name), 1, LARGEST_COUNT)
        for name in ("warmup", "save_every", "keep", "shuffle"):
            check_number(f"--{name.replace('_', '-')}", getattr(self, name), 0, LARGEST_COUNT)
        self.parallel.check()
        check_number("--seed", self.seed, 0, LARGEST_SEED, whole=True)
        if self.rank_memory is not None:
            check_number("--rank-memory", self.rank_memory, 0, above=True)
        if self.profile is not None:
            check_number("--profile", self.profile, 1, self.steps)
        check_number("--spike", self.spike, 0)
        check_number("--zero-gradients", self.zero_gradients, 0, LARGEST_COUNT)
        check_number("--check-weights", self.check_weights, 0, LARGEST_COUNT)
        check_number("--grace", self.grace, 0, LONGEST_WAIT_S)
        check_number("--max-restarts", self.max_restarts, 0, LARGEST_COUNT)
        if self.timeout is not None:
            check_number("--timeout", self.timeout, 1, LONGEST_WAIT_S)
        check_number("--start-timeout", self.start_timeout, 1, LONGEST_WAIT_S)
        if self.dropout not in (None, 0):
            raise LongspanError(
                f"--dropout {self.dropout:g}: it takes 0 alone, which switches the model's dropout off; other values "
                "are set in the model's config"
            )
        check_number("--lr", self.lr, 0, above=True)
        check_number("--weight-decay", self.weight_decay, 0)
        check_number("--clip", self.clip, 0)
        for beta in self.betas:
            check_number("--betas", beta, 0, 1, below=True)
        for name in ("text_field", "split", "resume", "model", "tokenizer"):
            if getattr(self, name) is not None:
                check_name(f"--{name.replace('_', '-')}", getattr(self, name))
        if self.resume not in ("auto", "never"):
            path_of("--resume", self.resume)
