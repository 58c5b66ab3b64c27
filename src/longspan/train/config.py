"""The flags of `longspan train`, in a section for each component."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Literal

from longspan.core.errors import LongspanError, require
from longspan.core.memory import Memory, MemoryFlags, MemoryLevel, flags_last
from longspan.core.parallel import KernelName, ParallelConfig
from longspan.core.rope import RopeFlags
from longspan.core.validation import (
    LARGEST_COUNT,
    LARGEST_SEED,
    LONGEST_WAIT_S,
    check_counts,
    check_name,
    check_number,
    path_of,
)
from longspan.hf.pretrained import is_adapter, tokenizer_of
from longspan.plan.hardware import read_hardware
from longspan.ranks.job import RankFlags
from longspan.train.trackers import names_of


@flags_last
@dataclass(frozen=True)
class ModelSection(RopeFlags):
    """The model and its tokenizer."""

    model: str | None = None
    """Name or folder of a Hugging Face causal LM to train further, or the folder of a LoRA adapter; without images in
    the data, the tower of a vision-language model is frozen. Give this or --config."""
    config: Path | None = None
    """A model's config.json: train it from random weights."""
    tokenizer: str | None = None
    """Name or folder of a tokenizer, or "bytes" (one token per byte, 384 ids). By default the model's (--model), or
    "bytes" (--config)."""
    dropout: float | None = None
    """0 switches off every dropout of the model. Attention dropout (GPT-2) needs this: its numbers would depend on the
    number of ranks. By default the model's config decides."""
    kernel: KernelName = "auto"
    """Local attention kernel."""

    @property
    def tokenizer_name(self) -> str:
        if self.tokenizer is None and self.model is not None:
            return tokenizer_of("--model", self.model)
        return self.tokenizer or "bytes"

    @property
    def adapter(self) -> str | None:
        """The folder of the adapter to train further, if --model is one."""
        return self.model if self.model is not None and is_adapter(self.model) else None

    def check(self) -> None:
        if (self.model is None) == (self.config is None):
            given = "neither" if self.model is None else "both"
            raise LongspanError(f"train needs either --model NAME_OR_PATH or --config FILE, got {given}")
        for flag, name in (("--model", self.model), ("--tokenizer", self.tokenizer)):
            if name is not None:
                check_name(flag, name)
        self.rope()
        if self.dropout not in (None, 0):
            raise LongspanError(
                f"--dropout {self.dropout:g}: only 0 is allowed, which switches dropout off; set other values in the "
                "model's config"
            )


@dataclass(frozen=True)
class DataSection:
    """What is read, and how sequences are made from it."""

    data: tuple[str, ...] = ()
    """Text, chats or token ids: a .txt (one document), .jsonl or .parquet file, a folder of these, "pydoc" (0.5 MB of
    English that comes with Python), or the name of a dataset on the Hugging Face hub (NAME or NAME:CONFIG). Several
    are interleaved, each with its share of all text by weight: a.jsonl=0.7 b/=0.3."""
    format: Literal["auto", "text", "chat", "images", "completion", "ids"] = "auto"
    """What the rows of .jsonl, .parquet and datasets are. chat: `messages`, and optionally `tools`. images: chats with
    images, in a column `images` or in the messages, for a vision-language model. completion: `prompt` and `completion`,
    texts or messages. ids: `input_ids`, and optionally `labels`. text: --text-field. auto: by their columns."""
    text_field: str = "text"
    """Column that contains the text (.jsonl, .parquet, datasets)."""
    chat_template: Path | None = None
    """File with a Jinja template for chats, in place of the tokenizer's; exported with it."""
    loss_on: Literal["assistant", "last", "all"] = "assistant"
    """Tokens of a chat that have a loss: the assistant's turns (by the template's {% generation %} where it has one),
    the last of these turns, or all. Of a prompt with its completion: the completion, or all."""
    dpo: float | None = None
    """Train on preferences by DPO with this beta, for example 0.1. Rows have `chosen` and `rejected`, texts or
    messages, and optionally `prompt`; by default it is their common beginning. A document is a pair of answers, each
    with its prompt. The reference is the model without LoRA, or else a second, frozen copy."""
    split: str = "train"
    """Split of a dataset from the hub."""
    shuffle: int = 1024
    """Size of the shuffle buffer, in documents; files are shuffled once. 0: keep the order."""
    pack: Literal["auto", "stream", "documents", "best-fit", "none"] = "auto"
    """How documents (a text, a chat, a row) become sequences. stream: concatenated and cut; attention sees the whole
    sequence. documents: the same, and attention stays within a document. best-fit: whole documents, several to a
    sequence, each with its own attention; the rest is padding. none: a document is a sequence. auto: stream for
    text, best-fit for other rows, documents for both together; none with images."""
    elastic: bool = False
    """Give each document as many ranks as its length needs, and let short ones share a rank: the documents of a step
    (--batch) run in rounds. A rank has at most --context / (ring x ulysses) tokens at a time. Implies --pack none."""
    gpu: str | None = None
    """With --elastic: the hardware by which the schedule computes times, a name of `longspan plan --gpu` or a file of
    `longspan bench`, which knows how fast your links are. By default this device, with the links of the catalogue.
    """
    pack_window: int = 32
    """With --pack best-fit, documents of about this many sequences are packed at a time. A larger window needs less
    padding, but more memory, and time before the first step."""
    too_long: Literal["truncate", "drop"] = "truncate"
    """What happens to a document longer than --context, with --pack best-fit and none."""
    preview: int = 0
    """Print this many sequences as the model will see them (documents, tokens with a loss, padding), and exit."""

    def __post_init__(self) -> None:
        data: object = self.data
        if isinstance(data, str):  # one source, in Python
            object.__setattr__(self, "data", (data,) if data else ())

    @property
    def name(self) -> str:
        """All sources, for messages."""
        return " ".join(self.data)

    def check(self) -> None:
        if not all(self.data) or not self.data:
            raise LongspanError("train needs --data: a file, a folder, a dataset's name, or pydoc for a first try")
        check_name("--text-field", self.text_field)
        check_name("--split", self.split)
        check_counts(self, 0, "shuffle", "preview")
        check_counts(self, 1, "pack_window")
        if self.dpo is not None:
            self._check_dpo(self.dpo)
        if self.elastic and (self.pack not in ("auto", "none") or self.dpo is not None):
            other = "--dpo" if self.dpo is not None else f"--pack {self.pack}"
            raise LongspanError(f"--elastic takes documents one by one, and {other} does not; leave one of them out")
        if self.gpu is not None:
            if not self.elastic:
                raise LongspanError(f"--gpu {self.gpu} is for the schedule of --elastic; give both, or leave it out")
            read_hardware(self.gpu)
        if self.pack in ("stream", "documents") and self.too_long != "truncate":
            raise LongspanError(
                f"--too-long {self.too_long}: --pack {self.pack} cuts documents and drops none; use --pack best-fit"
            )

    def _check_dpo(self, beta: float) -> None:
        check_number("--dpo", beta, 0, above=True)
        if self.pack in ("stream", "documents"):
            raise LongspanError(f"--pack {self.pack} would cut the pairs of --dpo {beta:g}; use best-fit, or none")
        defaults = DataSection()
        for flag in ("format", "text_field", "loss_on"):
            if getattr(self, flag) != getattr(defaults, flag):
                raise LongspanError(
                    f"--{flag.replace('_', '-')} {getattr(self, flag)} has no meaning with --dpo {beta:g}, whose rows "
                    "have `chosen` and `rejected` and whose loss is on these; leave it out"
                )


@flags_last
@dataclass(frozen=True)
class MemorySection(MemoryFlags):
    """Memory options, and the memory that they may use."""

    default_level: ClassVar[MemoryLevel] = "auto"

    rank_memory: float | None = None
    """GB that a rank may use for weights, optimizer and activations, for --memory auto and --context max. By default
    its GPU's memory, or on a CPU its share of the machine's."""
    offload_folder: str = ""
    """Folder of the file that --offload disk writes, on a local disk of the rank's machine. By default the system's
    folder for temporary files."""

    def to_memory(self) -> Memory:
        """Return the requested options, as `MemoryFlags.to_memory`, with the folder."""
        return replace(super().to_memory(), offload_folder=self.offload_folder)

    def check(self) -> None:
        self.to_memory()
        if self.rank_memory is not None:
            check_number("--rank-memory", self.rank_memory, 0, above=True)


@dataclass(frozen=True)
class TuningSection:
    """Which weights are trained: all, or some, or adapters (PEFT's LoRA, the extra `peft`)."""

    freeze: tuple[str, ...] = ()
    """Weights that are not trained: patterns of their names, such as "*embed_tokens*" or "*.layers.0.*"."""
    lora: int | None = None
    """Rank of LoRA: train two small matrices beside each of the --lora-targets, and nothing else. Needs --model."""
    lora_alpha: float | None = None
    """LoRA's alpha: its update is scaled by alpha / rank. By default twice the rank."""
    lora_targets: tuple[str, ...] = ()
    """Modules that get LoRA, by the ends of their names, such as q_proj v_proj. By default all linear layers but the LM
    head and a vision tower's."""
    lora_dropout: float = 0.0
    """Dropout of LoRA's inputs, on one rank."""
    rslora: bool = False
    """Scale LoRA by alpha / sqrt(rank)."""
    dora: bool = False
    """Train a magnitude for each output of a target beside LoRA (DoRA). Every rank's host loads the whole model."""
    lora_export: Literal["adapter", "merged"] = "adapter"
    """What OUT/hf is: PEFT's folder of the adapter, or the whole model with LoRA added to its weights."""
    quantize: Literal["none", "nf4"] = "none"
    """Store the frozen weights of linear layers, but the LM head's, in 4 bits (QLoRA): bitsandbytes' NF4 with double
    quantization, the extra `qlora`. FSDP shards them. Needs --lora."""

    @property
    def trains_all(self) -> bool:
        return not self.freeze and self.lora is None

    def check(self, model: str | None, ranks: int) -> None:
        """Raise on invalid values; `model` is that of `--model`."""
        if self.lora is None and model is not None and is_adapter(model):
            return  # until `longspan.train.optimizer.continued` has read it
        if self.lora is None:
            given = {
                "--lora-alpha": self.lora_alpha, "--lora-targets": self.lora_targets, "--rslora": self.rslora,
                "--lora-dropout": self.lora_dropout, "--dora": self.dora, "--lora-export": self.lora_export == "merged",
                "--quantize": self.quantize != "none",
            }  # fmt: skip
            flag = next((flag for flag, value in given.items() if value), None)
            if flag is not None:
                raise LongspanError(f"{flag} is an option of LoRA; give its rank, too: --lora 16")
            return
        check_counts(self, 1, "lora")
        check_number("--lora-dropout", self.lora_dropout, 0, 1, below=True)
        if self.lora_alpha is not None:
            check_number("--lora-alpha", self.lora_alpha, 0, above=True)
        if model is None:
            raise LongspanError(
                f"--lora {self.lora} adapts pretrained weights, and --config has random ones; give --model"
            )
        if self.freeze:
            raise LongspanError(
                f"--freeze {self.freeze[0]}: --lora {self.lora} freezes all weights of the model; leave --freeze out, "
                "and choose what is adapted by --lora-targets"
            )
        if self.lora_dropout and ranks > 1:
            raise LongspanError(
                f"--lora-dropout {self.lora_dropout:g}: each of the {ranks} ranks would draw for its own tokens, so "
                "the run would depend on their number; give 0, or train on one rank"
            )
        require("--lora", "peft")
        if self.quantize != "none":
            if self.dora:
                raise LongspanError(
                    f"--dora trains norms of whole weights, and --quantize {self.quantize} stores these in 4 bits; "
                    "leave one of them out"
                )
            require("--quantize", "bitsandbytes", "accelerate")


@dataclass(frozen=True)
class OptimizerSection:
    """The optimizer, its learning rate, and the gradients that it gets."""

    optimizer: Literal["adamw", "adamw8bit", "adamw4bit", "muon"] = "adamw"
    """adamw8bit stores AdamW's two states in 8 bits a value, with a scale for each 256 (torchao's AdamW8bit, the extra
    `adamw8bit`), instead of 32: a quarter of the memory, and other numbers; adamw4bit in 4 bits, with a scale for each
    128. A weight whose shard is not a multiple of 256 (128) values keeps fp32 states. muon: torch.optim.Muon (momentum
    0.95) for matrices, with updates as large as AdamW's, so that --lr is AdamW's; AdamW for embeddings, LM head,
    experts stored as one tensor, norms and biases."""
    lr: float = 3e-4
    """Learning rate after warm-up."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Decay of the learning rate after warm-up, to --min-lr at the last step; constant: none; wsd (warm-up, stable,
    decay): constant, then 1 - sqrt over the last --decay steps."""
    warmup: int = 0
    """Steps over which the learning rate rises from 0 (wsd: from --min-lr)."""
    decay: int | None = None
    """Steps of the decay of --schedule wsd. By default a tenth of the run."""
    min_lr: float = 0.0
    """Learning rate at the end of the decay."""
    weight_decay: float = 0.1
    """Weight decay; not applied to norms, biases and --no-decay."""
    no_decay: tuple[str, ...] = ()
    """Weights without weight decay: patterns of their names, such as "*embed_tokens*"."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's betas."""
    clip: float = 1.0
    """Maximum global gradient norm; 0: no clipping."""
    optimizer_in_backward: bool = False
    """Update each weight in the backward, as soon as its gradient arrives, and free the gradient at once. The same
    numbers to the bit. Needs --clip 0, no accumulation, and --fsdp or one rank."""
    grad_dtype: Literal["fp32", "bf16"] = "fp32"
    """dtype of FSDP's gradient reduction. bf16 halves its traffic and memory, and rounds every sum to 8 bits. Gradients
    of weights and the optimizer stay fp32."""
    reduce: Literal["auto", "last", "each"] = "auto"
    """When to reduce accumulated gradients over the ranks. each: after each micro-batch. last: once, after the last;
    with --fsdp every rank then holds the whole model's gradients in fp32. auto: last; with --fsdp only if these take at
    most an eighth of the memory."""

    def check(self) -> None:
        check_number("--lr", self.lr, 0, above=True)
        check_counts(self, 0, "warmup")
        check_number("--weight-decay", self.weight_decay, 0)
        check_number("--min-lr", self.min_lr, 0)
        if self.min_lr >= self.lr:
            raise LongspanError(f"--min-lr {self.min_lr:g} is not below --lr {self.lr:g}; give less")
        if self.min_lr and self.schedule == "constant":
            raise LongspanError(f"--min-lr {self.min_lr:g}: --schedule constant does not decay; leave it out")
        check_counts(self, 1, "decay")
        if self.decay is not None and self.schedule != "wsd":
            raise LongspanError(
                f"--decay {self.decay} is of --schedule wsd, and --schedule {self.schedule} decays over all steps "
                "after warm-up; leave it out"
            )
        check_number("--clip", self.clip, 0)
        for beta in self.betas:
            check_number("--betas", beta, 0, 1, below=True)


@dataclass(frozen=True)
class CheckpointSection:
    """Checkpoints, and the export to Hugging Face's format."""

    save_every: int = 500
    """Steps between checkpoints; one is also saved at the end. 0: only at the end."""
    async_save: bool = True
    """Write checkpoints in the background: training waits only for the copy to host memory, if it takes at most half of
    what is free there. Otherwise, and with --no-async-save, training waits for the write."""
    keep: int = 2
    """Number of newest checkpoints to keep. 0: all."""
    resume: str = "auto"
    """auto: resume from the newest complete checkpoint in --out, if any. never: start anew. Or the path of a
    checkpoint. Mesh, --fsdp and --context may change; the order of the data is kept."""
    change_batch: bool = False
    """Allow another number of sequences per step than the checkpoint was made with."""
    export: Literal["end", "best", "saves", "never"] = "end"
    """When to write OUT/hf: at the end; at the end, but with the weights of the lowest evaluation loss; with every
    checkpoint; or never. To export a stopped run, resume it with --steps set to the steps it has done."""

    push_to_hub: str | None = None
    """Push OUT/hf to this repository of the Hugging Face hub (OWNER/NAME, or NAME) at the end. Needs a token."""
    hub_private: bool = True
    """Make the repository of --push-to-hub private, if it does not exist yet."""

    def check(self) -> None:
        if self.push_to_hub is not None and self.export == "never":
            raise LongspanError(f"--push-to-hub {self.push_to_hub} pushes the export; leave --export never out")
        check_counts(self, 0, "save_every", "keep")
        check_name("--resume", self.resume)
        if self.resume not in ("auto", "never"):
            path_of("--resume", self.resume)


@dataclass(frozen=True)
class EvaluationSection:
    """Evaluation on other data between steps, sampled text, and what follows from them."""

    eval_data: tuple[str, ...] = ()
    """Data to evaluate on, as for --data; the losses of several are also reported one by one. It is read once per
    evaluation, in order, with the settings of --data."""
    eval_sequences: int | None = None
    """Most sequences of each source to evaluate on, the first ones. By default all."""
    eval_split: str = "validation"
    """Split of a dataset from the hub, for --eval-data."""
    eval_every: int = 500
    """Steps between evaluations; there is one before the first step, too, and one after the last."""
    sample_prompt: str | None = None
    """Continue this text at every evaluation, greedily, and log it."""
    sample_tokens: int = 64
    """Most tokens of the sampled text."""
    keep_best: bool = True
    """Save a checkpoint whenever the evaluation loss is the lowest so far, and keep the best one next to --keep."""
    patience: int = 0
    """Stop after this many evaluations in a row without a lower loss than the best one. 0: never."""

    eval_tasks: str = ""
    """Tasks of lm-evaluation-harness, with commas, to evaluate OUT/hf on at the end, on the ranks of one replica. The
    results go to OUT/lm_eval. Needs the extra `eval`."""

    def check(self) -> None:
        for data in self.eval_data:
            check_name("--eval-data", data)
        if len(set(self.eval_data)) < len(self.eval_data):
            raise LongspanError(f"--eval-data {' '.join(self.eval_data)} has a source twice; leave one out")
        check_name("--eval-split", self.eval_split)
        check_counts(self, 1, "eval_every", "eval_sequences", "sample_tokens")
        check_counts(self, 0, "patience")
        if self.patience and not self.eval_data:
            raise LongspanError(f"--patience {self.patience} needs an evaluation loss; give --eval-data")
        if self.sample_prompt == "":
            raise LongspanError("--sample-prompt is empty; give a text, or leave it out")


@dataclass(frozen=True)
class LoggingSection:
    """Metrics, profiles, and checks of the run's health."""

    log_every: int = 10
    """Steps between reports; a reported step is profiled for its share of communication."""
    track: str = "tensorboard"
    """Trackers that get the reports and evaluations, with commas: tensorboard, trackio, wandb, mlflow; or none. Their
    own environment variables say where they log (WANDB_PROJECT, MLFLOW_TRACKING_URI, ...)."""
    profile: int | None = None
    """Record this step (counted from the run's first) to OUT/profile/: a trace of all ranks for ui.perfetto.dev.
    Avoid the first step: it includes setup."""
    spike: float = 2.0
    """A loss above this many times the median of the last 20 steps is a spike. 0: none is."""
    on_spike: Literal["warn", "stop"] = "warn"
    """What to do on a spike: print a warning, or stop."""
    zero_gradients: int = 5
    """Stop after this many consecutive steps with a gradient norm of exactly 0. 0: never."""
    check_weights: int = 100
    """With --no-fsdp, compare the ranks' weights every this many forwards. 0: never."""
    check_at_rest: bool = False
    """Checksum the weights after each step and compare before the next: finds memory that changed by itself."""

    def check(self) -> None:
        check_counts(self, 1, "log_every")
        names_of(self.track)
        check_number("--spike", self.spike, 0)
        check_counts(self, 0, "zero_gradients", "check_weights")


@flags_last
@dataclass(frozen=True)
class TrainConfig(RankFlags):
    """Train a Hugging Face causal LM on long sequences, each sharded over several ranks.

    Without torchrun, this starts the ranks itself; under torchrun (several machines) it joins them. SIGTERM or Ctrl-C
    saves a checkpoint and exits with code 143 or 130; run the same command again to resume.
    """

    out: Path = Path("runs/train")
    """Folder of the run: metrics.jsonl, evaluation.jsonl, tensorboard/, checkpoints/ and, at the end, hf/ (Hugging Face
    format). With several machines, a folder that all of them see."""
    context: int | Literal["max"] = 8192
    """Tokens per sequence (also 8k or 1M: k is 1024, M is 1024 * 1024). max: the longest that fits, by the planner, and
    within the model's positions."""
    steps: int | None = None
    """Optimizer steps. By default 1000, or by --tokens or --epochs."""
    tokens: int | None = None
    """Train on this many tokens, without padding, in place of --steps; the last step may pass it. A schedule ends at
    the last step. With --pack best-fit and none, the first 2,048 sequences give an estimate of the tokens per step."""
    epochs: float | None = None
    """Train on all data this many times, in place of --steps. It is read and tokenised once before the start, to count
    its sequences."""
    batch: int | None = None
    """Sequences per optimizer step, over the whole job. By default micro_batch x data_degree."""
    batch_tokens: int | None = None
    """In place of --batch, tokens per optimizer step (padding included; also 512k or 4M): as many sequences as fit in
    it, at least one forward."""
    micro_batch: int = 1
    """Sequences per forward and replica; the rest of --batch is accumulated."""
    dtype: Literal["fp32", "bf16"] = "bf16"
    """dtype of the computation; weights, gradient sums and optimizer are fp32 with bf16 too."""
    compile: bool = False
    """Compile the decoder layers (torch.compile); attention, collectives and memory options run as without."""
    fsdp: bool = True
    """Shard weights, gradients and optimizer over all ranks (FSDP2). Off: every rank holds all of them."""
    seed: int = 0
    """Seed of random weights, data order and dropout."""
    deterministic: bool = False
    """Use only deterministic kernels (torch.use_deterministic_algorithms). On GPUs, resuming to the bit needs this; it
    is slower. On a CPU it changes nothing."""
    dry_run: bool = False
    """Check the run as far as possible without ranks and weights (model, text, folders, checkpoint, RoPE scaling,
    memory options), print what it would do, and exit. Writes nothing."""
    grace: int = 25
    """Seconds that ranks have to save and exit after SIGTERM or Ctrl-C, before they are killed. Give more than a step
    and a save take."""
    max_restarts: int = 0
    """How often to restart the ranks from the newest checkpoint after one died or was lost. Under torchrun, use its
    --max-restarts."""

    model: ModelSection = field(default_factory=ModelSection)
    """The model and its tokenizer."""
    data: DataSection = field(default_factory=DataSection)
    """The text, and how sequences are made from it."""
    tuning: TuningSection = field(default_factory=TuningSection)
    """Which weights are trained."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """How ranks share the work."""
    memory: MemorySection = field(default_factory=MemorySection)
    """Memory options, and the memory that they may use."""
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    """The optimizer, its learning rate, and the gradients that it gets."""
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    """Checkpoints, and the export to Hugging Face's format."""
    evaluation: EvaluationSection = field(default_factory=EvaluationSection)
    """Evaluation on other data between steps, sampled text, and what follows from them."""
    logging: LoggingSection = field(default_factory=LoggingSection)
    """Metrics, profiles, and checks of the run's health."""

    @property
    def last_step(self) -> int:
        """Steps of the run, once `longspan.train.old_resolve.resolve_steps` has replaced --tokens and --epochs."""
        assert self.knows_steps
        return 1000 if self.steps is None else self.steps

    @property
    def knows_steps(self) -> bool:
        return self.steps is not None or (self.tokens is None and self.epochs is None)

    @property
    def context_tokens(self) -> int:
        """Tokens per sequence, once `longspan.train.old_resolve.resolve_memory` has replaced `max`."""
        assert self.context != "max"
        return self.context

    @property
    def sequences_per_forward(self) -> int:
        """Sequences in one forward, over all replicas."""
        return self.micro_batch * self.parallel.data_degree

    @property
    def sequences(self) -> int:
        """Sequences per optimizer step, over all replicas; with `batch_tokens`, whole forwards of known length."""
        if self.batch_tokens is not None and self.context != "max":
            forward = self.sequences_per_forward
            return max(1, self.batch_tokens // (forward * self.context)) * forward
        return self.sequences_per_forward if self.batch is None else self.batch

    @property
    def checkpoints(self) -> Path:
        return self.out / "checkpoints"

    @property
    def exported(self) -> Path:
        return self.out / "hf"

    def check(self) -> None:
        """Raise on invalid values, without reading any file."""
        for section in (
            self.model, self.data, self.parallel, self.memory, self.optimizer, self.checkpoint,
            self.evaluation, self.logging
        ):  # fmt: skip
            section.check()
        self.tuning.check(self.model.model, self.parallel.ranks)
        if self.checkpoint.export == "best" and not (self.evaluation.eval_data and self.evaluation.keep_best):
            raise LongspanError("--export best needs --eval-data, and the checkpoints of --keep-best")
        if self.evaluation.eval_tasks and self.checkpoint.export == "never":
            raise LongspanError(
                f"--eval-tasks {self.evaluation.eval_tasks} evaluates the export; leave --export never out"
            )
        self._check_run()
        self._check_batch()
        self._check_optimizer()
        self._check_quantize()
        if self.data.dpo is not None and self.model.adapter is not None:
            raise LongspanError(
                f"--dpo {self.data.dpo:g} compares with the model before training, and without its LoRA --model "
                f"{self.model.model} is the base model; merge the adapter first (peft.PeftModel.from_pretrained(base, "
                "adapter).merge_and_unload().save_pretrained(folder)), then give --model folder --lora 16"
            )

    def _check_quantize(self) -> None:
        """Raise on settings that 4-bit weights exclude."""
        quantize, parallel = self.tuning.quantize, self.parallel
        if quantize == "none":
            return
        if parallel.tensor > 1:
            raise LongspanError(
                f"--quantize {quantize} packs weights in blocks that cross rows and columns, and --tensor "
                f"{parallel.tensor} shards those; use --tensor 1 --ulysses {parallel.ulysses * parallel.tensor}"
            )
        for flag, given in (("--compile", self.compile), ("--cpu-offload", self.memory.to_memory().cpu_offload)):
            if given:
                raise LongspanError(f"--quantize {quantize} does not support {flag}; leave one of them out")

    def _check_run(self) -> None:
        given = {"--steps": self.steps, "--tokens": self.tokens, "--epochs": self.epochs}
        asked = [f"{flag} {value:g}" for flag, value in given.items() if value is not None]
        if len(asked) > 1:
            raise LongspanError(f"{' and '.join(asked)} all give the length of the run; give one of them")
        check_counts(self, 1, "steps", "tokens")
        if self.epochs is not None:
            check_number("--epochs", self.epochs, 0, LARGEST_COUNT, above=True)
        check_number("--seed", self.seed, 0, LARGEST_SEED, whole=True)
        self.check_ranks()
        check_number("--grace", self.grace, 0, LONGEST_WAIT_S)
        check_counts(self, 0, "max_restarts")
        if self.knows_steps:
            self.check_length()

    def check_length(self) -> None:
        """Raise on settings that do not fit the number of steps."""
        steps, options = self.last_step, self.optimizer
        if self.logging.profile is not None:
            check_number("--profile", self.logging.profile, 1, steps)
        if options.warmup > steps:
            raise LongspanError(f"--warmup {options.warmup} is longer than the run of --steps {steps}")
        if options.warmup + (options.decay or 0) > steps:
            raise LongspanError(
                f"--warmup {options.warmup} and --decay {options.decay} are longer than the run of --steps {steps} "
                "together"
            )

    def _check_batch(self) -> None:
        if self.context != "max":
            check_number("--context", self.context, 1, LARGEST_COUNT)
            ranks = self.parallel.sequence_ranks
            if self.context < max(2, ranks):
                raise LongspanError(
                    f"--context {self.context} is too short: a sequence needs 2 tokens to learn from, and one for each "
                    f"of the {ranks} ranks that share it"
                )
        check_counts(self, 1, "micro_batch", "batch", "batch_tokens")
        if self.batch is not None and self.batch_tokens is not None:
            raise LongspanError(
                f"--batch {self.batch} and --batch-tokens {self.batch_tokens} both set the size of a step; give one of "
                "them"
            )
        if self.data.elastic:
            if self.micro_batch != 1:
                raise LongspanError(
                    f"--micro-batch {self.micro_batch}: with --elastic the schedule decides how many documents a rank "
                    f"has at a time; leave it out"
                )
            return
        unit = self.sequences_per_forward
        if self.sequences < unit or self.sequences % unit:
            below = max(unit, self.sequences // unit * unit)
            raise LongspanError(
                f"--batch {self.sequences} is not a multiple of --micro-batch {self.micro_batch} x --data-degree "
                f"{self.parallel.data_degree} = {unit}; give --batch {below} or {below + unit}"
            )

    def _check_optimizer(self) -> None:
        """Raise on optimizer settings that contradict each other or the mesh."""
        options, parallel = self.optimizer, self.parallel
        if options.optimizer in ("adamw8bit", "adamw4bit") and parallel.tensor > 1:
            raise LongspanError(
                f"--optimizer {options.optimizer} needs whole rows of weights, and --tensor {parallel.tensor} shards "
                f"columns too: their states would stay fp32. Use --optimizer adamw, or --tensor 1 --ulysses "
                f"{parallel.ulysses * parallel.tensor}"
            )
        if options.optimizer == "muon":
            self._check_muon()
        if options.grad_dtype != "fp32" and (not self.fsdp or parallel.fsdp_ranks == 1):
            why = "with --no-fsdp gradients are summed in fp32"
            if parallel.fsdp_ranks == 1:
                ranks = "one rank sums" if parallel.ranks == 1 else f"the ranks of --tensor {parallel.tensor} sum"
                why = f"{ranks} no gradients"
            raise LongspanError(
                f"--grad-dtype {options.grad_dtype} applies to FSDP's sums over ranks, and {why}; leave it out"
            )
        if options.optimizer_in_backward:
            self._check_optimizer_in_backward()

    def _check_muon(self) -> None:
        """Raise where no rank can gather the whole matrices that Muon orthogonalises."""
        parallel = self.parallel
        if parallel.tensor > 1:
            raise LongspanError(
                f"--optimizer muon gathers a matrix from FSDP's ranks, and --tensor {parallel.tensor} shards it a "
                f"second time; use --optimizer adamw, or --tensor 1 --ulysses {parallel.ulysses * parallel.tensor}"
            )
        for flag, given in (
            ("--optimizer-in-backward", self.optimizer.optimizer_in_backward),
            ("--cpu-offload", self.memory.to_memory().cpu_offload),
        ):
            if given:
                raise LongspanError(
                    f"--optimizer muon gathers every matrix on the device after the backward, which {flag} does not "
                    "allow; leave one of them out"
                )

    def _check_optimizer_in_backward(self) -> None:
        flag = "--optimizer-in-backward"
        if self.optimizer.clip:
            raise LongspanError(
                f"{flag} updates each weight before the norm of all gradients is known, and --clip "
                f"{self.optimizer.clip:g} needs it; use --clip 0"
            )
        if self.data.elastic:
            raise LongspanError(
                f"{flag} updates in every backward, and --elastic accumulates gradients over rounds; leave one of them "
                "out"
            )
        accumulated = self.sequences // self.sequences_per_forward
        if accumulated > 1:
            raise LongspanError(
                f"{flag} updates in every backward, and --batch {self.sequences} accumulates gradients over "
                f"{accumulated} of them; give --batch {self.sequences_per_forward}, or --micro-batch "
                f"{self.sequences // self.parallel.data_degree}"
            )
        if not self.fsdp and self.parallel.fsdp_ranks > 1:
            raise LongspanError(
                f"{flag} needs each gradient reduced by itself, and --no-fsdp reduces after the backward; leave "
                "--no-fsdp out"
            )
        if self.logging.check_at_rest:
            raise LongspanError(
                f"{flag} runs an optimizer step per weight, and --check-at-rest reads all weights around each; leave "
                "one of them out"
            )
