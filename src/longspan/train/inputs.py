"""The model, tokenizer and data of a `TrainConfig`, and what a resumed run must have in common with its checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longspan import checkpoint
from longspan.checkpoint import Checkpoint, Ranks
from longspan.checkpoint.identity import differences, model_identity
from longspan.core.errors import LongspanError
from longspan.core.rope import RopeScaling
from longspan.core.sections import values
from longspan.core.validation import check_output, read_text
from longspan.data import (
    KINDS,
    DocumentSource,
    Mixture,
    SequenceStream,
    Tokenizer,
    load_tokenizer,
    split_weight,
)
from longspan.data.stream import Pack
from longspan.hf.pretrained import (
    base_of,
    language_model_class,
    load_processor,
    read_model_config,
    takes_pictures,
    without_dropout,
)
from longspan.ranks import launch
from longspan.train.config import DataSection, TrainConfig
from longspan.train.trackers import check_installed

if TYPE_CHECKING:
    from longspan.hf.weights.origin import Origin


@dataclass(frozen=True)
class Inputs:
    """The checked inputs of a run; weights are not loaded yet."""

    model_config: Any  # untouched by longspan
    tokenizer: Any
    source: DocumentSource | Mixture
    data: DataSection  # with "auto" resolved
    identity: dict[str, Any]  # what a resumed run must have in common with this one, for its checkpoints
    rope: RopeScaling | None = None  # applied to `model_config`
    resume: Checkpoint | None = None
    passed_over: tuple[str, ...] = ()  # what is wrong with newer checkpoints than `resume`
    evaluated: dict[str, DocumentSource | Mixture] = field(default_factory=dict)  # by the names of --eval-data
    processor: Any = None  # of a vision-language model, if the data has images

    @property
    def pack(self) -> Pack:
        assert self.data.pack != "auto"
        return self.data.pack

    @property
    def tokens(self) -> Tokenizer:
        """What makes ids of the documents."""
        tokens = Tokenizer(self.tokenizer, self.data.loss_on, self.model_config.get_text_config().vocab_size)
        if self.processor is None:
            return tokens
        from longspan.hf.vision import FAMILIES

        encoders = [each for each in FAMILIES[self.model_config.model_type] if each.modality == "image"]
        placeholders = tuple(getattr(self.model_config, each.token) for each in encoders)
        return dataclasses.replace(tokens, processor=self.processor, placeholders=placeholders)

    @property
    def images(self) -> Tokenizer | None:
        """Return the tokenizer if the data has images, for `deal` and `collate`."""
        return None if self.processor is None else self.tokens

    def sequences(self, context: int) -> SequenceStream:
        """Return the sequences that are still to be trained on."""
        return self.stream(self.source, context, self.resume.state["data"] if self.resume else None)

    def evaluation_sequences(self, name: str, context: int) -> SequenceStream:
        """Return all sequences of a source of --eval-data, in order."""
        return self.stream(self.evaluated[name], context, epochs=1)

    def stream(
        self,
        source: DocumentSource | Mixture,
        context: int,
        state: dict[str, Any] | None = None,
        *,
        epochs: int | None = None,
    ) -> SequenceStream:
        """Return the sequences of documents, as they are made for training: one pass with `epochs=1`."""
        return SequenceStream(
            source,
            self.tokens,
            context,
            state,
            pack=self.pack,
            too_long=self.data.too_long,
            window=self.data.pack_window,
            epochs=epochs,
        )


def open_local(config: TrainConfig) -> Inputs:
    """Open and check model config, tokenizer and text on this rank."""
    check_installed(config.logging.track)
    if config.optimizer.optimizer in ("adamw8bit", "adamw4bit"):
        from longspan.compat.torch_checkpoint import check_torchao

        check_torchao(config.optimizer.optimizer)
    model_config, rope = load_model_config(config)
    tokenizer, size = load_tokenizer(config.model.tokenizer_name), model_config.get_text_config().vocab_size
    if len(tokenizer) > size:
        raise LongspanError(
            f"--tokenizer {config.model.tokenizer_name} has {len(tokenizer)} ids, the model's vocabulary only {size}; "
            f"use the model's own tokenizer, or a config with vocab_size {len(tokenizer)} or more"
        )
    if config.data.chat_template is not None:
        tokenizer.chat_template = read_text("--chat-template", config.data.chat_template)
    source = open_source(config.data.data, config.data, config.seed)
    processor = _open_processor(config, model_config, tokenizer) if "images" in source.kinds() else None
    data = dataclasses.replace(config.data, pack=resolve_pack(config.data, source))
    if not config.tuning.trains_all or config.optimizer.no_decay:
        _check_names(config, model_config, rope, images=processor is not None)
    identity = run_identity(config, model_config, tokenizer, source, processor)
    evaluated = _open_evaluated(config)
    return Inputs(model_config, tokenizer, source, data, identity, rope, evaluated=evaluated, processor=processor)


def _open_processor(config: TrainConfig, model_config: Any, tokenizer: Any) -> Any:
    """Return the model's processor with our tokenizer; both have the chat template that writes images."""
    if not takes_pictures(model_config):
        raise LongspanError(
            f"--data {config.data.name} has images, and the model ({model_config.model_type}) has no vision tower that "
            "longspan shards; give a vision-language model, or train on the text of chats alone by --format chat",
            code="LS505",
        )
    processor = load_processor(config.model.tokenizer_name)
    if not tokenizer.is_fast:
        raise LongspanError(
            f"--tokenizer {config.model.tokenizer_name} is not a fast tokenizer, which chats with images "
            "need; give a folder with tokenizer.json"
        )
    if config.data.chat_template is None and processor.chat_template is not None:
        tokenizer.chat_template = processor.chat_template
    processor.tokenizer, processor.chat_template = tokenizer, tokenizer.chat_template
    return processor


def open_source(names: Sequence[str], data: DataSection, seed: int) -> DocumentSource | Mixture:
    """Return the documents of one or several sources (`SOURCE` or `SOURCE=WEIGHT`)."""
    weighted = [split_weight(name) for name in names]
    sources = [
        DocumentSource(
            name,
            text_field=data.text_field,
            format=data.format if data.dpo is None else "preference",
            split=data.split,
            shuffle=data.shuffle,
            seed=seed,
        )
        for name, _ in weighted
    ]
    return sources[0] if len(sources) == 1 else Mixture(sources, [weight for _, weight in weighted])


def resolve_pack(data: DataSection, source: DocumentSource | Mixture) -> Pack:
    """Return how documents become sequences; "auto" keeps rows whole, unless there is text too, which may be longer."""
    if "images" in source.kinds():
        if data.elastic:
            raise LongspanError(
                f"--elastic: --data {data.name} has images, which all ranks of a sequence group share; leave it out",
                code="LS505",
            )
        if data.pack not in ("auto", "none"):
            raise LongspanError(
                f"--pack {data.pack}: --data {data.name} has images, whose chats are not packed; give --pack none",
                code="LS505",
            )
        return "none"
    if data.elastic:
        return "none"
    if data.pack != "auto":
        return data.pack
    kinds = source.kinds()
    return "best-fit" if "text" not in kinds else "documents" if len(kinds) > 1 else "stream"


def _open_evaluated(config: TrainConfig) -> dict[str, DocumentSource | Mixture]:
    """Return the sources of --eval-data in their own order, by short names if these differ."""
    given = config.evaluation.eval_data
    short = [path.stem if path.suffix in KINDS else path.name for path in map(Path, given)]
    names = short if len(set(short)) == len(short) else given
    data = dataclasses.replace(config.data, split=config.evaluation.eval_split, shuffle=0)
    with naming_eval_data():
        for name in given:
            if split_weight(name)[0] != name:
                raise LongspanError(f"--data {name}: every source is read once, so none has a weight; leave it out")
        return {name: open_source([source], data, seed=0) for name, source in zip(names, given, strict=True)}


@contextlib.contextmanager
def naming_eval_data() -> Iterator[None]:
    """Name the right flag in errors of the body, which reads --eval-data."""
    try:
        yield
    except LongspanError as error:
        raise LongspanError(re.sub(r"--(data|split)\b(?!-)", r"--eval-\1", str(error))) from error


def find_resume(config: TrainConfig, inputs: Inputs, ranks: Ranks, *, content: bool = True) -> Inputs:
    """Return `inputs` with the checkpoint to resume from, if any. Collective over `ranks`.

    `content` compares the checkpoint's files with their checksums, too.
    """
    resume, passed_over = _find_checkpoint(config, ranks, content)
    inputs = dataclasses.replace(inputs, resume=resume, passed_over=tuple(passed_over))
    ranks.each(lambda: _check_same_run(config, inputs))
    return inputs


def check_inputs(config: TrainConfig) -> Inputs:
    """Return the inputs after all checks that need no other rank: read a sequence, look at `--out`. Write nothing."""
    check_output("--out", config.checkpoints, folder=True)
    inputs = find_resume(config, open_local(config), Ranks(), content=False)
    next(iter(inputs.sequences(config.context_tokens)))
    for name, source in inputs.evaluated.items():
        with naming_eval_data():
            if next(iter(inputs.evaluation_sequences(name, config.context_tokens)), None) is None:
                raise LongspanError(f"--data {source.data} has no token with a loss; give other data", code="LS504")
    try:
        if config.out.exists() and not launch.under_torchrun():  # under torchrun another rank may hold the lock already
            checkpoint.RunLock(config.out).release()
    except OSError as error:
        raise LongspanError(f"--out {config.out} cannot be written: {error}") from error
    if config.checkpoint.export != "never":
        checkpoint.check_replaceable(config.exported)
    return inputs


def stopped_early(config: TrainConfig, evaluation: Mapping[str, Any] | None) -> bool:
    """Return whether --patience ends a run, from the state of its evaluations (`evaluation.Progress`)."""
    patience = config.evaluation.patience
    return bool(patience and evaluation is not None and evaluation["since"] >= patience)


def step_to_export(config: TrainConfig, last: int, evaluation: Mapping[str, Any] | None) -> int:
    """Return the step whose weights are exported after `last` steps: with --export best the best, unless it is 0."""
    best = evaluation["step"] if config.checkpoint.export == "best" and evaluation is not None else None
    return best or last


def finished(config: TrainConfig, inputs: Inputs) -> str | None:
    """Return a message if the run has done all its steps, or stopped early, and exported them, else None."""
    resume = inputs.resume
    if config.checkpoint.resume != "auto" or resume is None:
        return None
    evaluation = resume.state.get("evaluation")
    early = stopped_early(config, evaluation)
    if resume.step != config.last_step and not early:
        return None
    exported = f", and {config.exported} holds its export"
    if config.checkpoint.export == "never":
        exported = ""
    elif checkpoint.exported_step(config.exported) != step_to_export(config, resume.step, evaluation):
        return None
    more, why = "--steps", ""
    if early:
        more, why = "--patience", f", where --patience {config.evaluation.patience} stopped it"
    return (
        f"nothing to do: {config.out} is at step {resume.step} of --steps {config.last_step}{why}{exported}; give more "
        f"{more} to go on, or another --out to start anew"
    )


def _check_names(config: TrainConfig, model_config: Any, rope: RopeScaling | None, *, images: bool) -> None:
    """Raise for patterns and targets that the model does not have, on a model without weights."""
    from longspan.hf.preconditions import check_axes
    from longspan.train.optimizer import matching, tuned

    empty = model_origin(config, model_config).on_meta()
    model = tuned(empty, config.tuning, config.seed, config.model.adapter, images=images)
    matching(model, "--no-decay", config.optimizer.no_decay)
    check_axes(lambda: model, config.parallel, fsdp=config.fsdp)  # LoRA, too
    adapter = config.tuning.lora is not None and config.tuning.lora_export == "adapter"
    if config.tuning.lora_export == "merged" and config.checkpoint.export != "never":
        checkpoint.check_mergeable(model)
    if rope is not None and adapter and config.checkpoint.export != "never":
        raise LongspanError(
            "--rope-scaling changes the model's config, which the folder of an adapter does not contain; give "
            "--lora-export merged"
        )


def load_model_config(config: TrainConfig) -> tuple[Any, RopeScaling | None]:
    """Return the model's Hugging Face config, and the RoPE scaling that was applied to it."""
    model_config, rope = read_model_config(*model_flag(config), config.context_tokens, config.model.rope())
    keeps = config.model.dropout is None and config.data.dpo is None  # rewards would be noise
    return model_config if keeps else without_dropout(model_config), rope


def model_flag(config: TrainConfig) -> tuple[str, str]:
    """Return the flag that names the model's config, and its value."""
    if config.model.model is None:
        return "--config", str(config.model.config)
    return "--model", config.model.model


def model_origin(config: TrainConfig, model_config: Any) -> Origin:
    """Return the source of the model's weights, in fp32: pretrained, or random from the seed alone."""
    import torch

    from longspan.hf.weights.origin import Origin

    auto = language_model_class(model_config)
    computed = torch.bfloat16 if config.dtype == "bf16" else torch.float32
    four_bits = computed if config.tuning.quantize == "nf4" else None
    name = None if config.model.model is None else base_of("--model", config.model.model)
    return Origin(
        auto, model_config, torch.float32, name, config.seed, " ".join(model_flag(config)), four_bits=four_bits
    )


def _find_checkpoint(config: TrainConfig, ranks: Ranks, content: bool) -> tuple[Checkpoint | None, list[str]]:
    if config.checkpoint.resume == "never":
        steps = ranks.first(lambda: checkpoint.complete_steps(config.checkpoints))
        if steps:
            raise LongspanError(
                f"--resume never, but {config.out} holds a run at step {steps[-1]}; give another --out, or remove it"
            )
        return None, []
    if config.checkpoint.resume == "auto":
        found, passed_over = checkpoint.newest_undamaged(config.checkpoints, ranks, content=content)
    else:
        found, passed_over = checkpoint.read_verified(config.checkpoint.resume, ranks, content=content), []
    if found is not None and config.knows_steps and found.step > config.last_step:
        raise LongspanError(
            f"checkpoint {found.path} is at step {found.step}, after --steps {config.last_step}; give more steps or "
            "another --out"
        )
    return found, passed_over


def _check_same_run(config: TrainConfig, inputs: Inputs) -> None:
    if inputs.resume is None:
        return
    changed = differences(inputs.resume.state["identity"], inputs.identity)
    if config.checkpoint.change_batch:
        changed.pop(BATCH, None)
    if set(changed) == {BATCH}:
        before, now = changed[BATCH]
        raise LongspanError(
            f"checkpoint {inputs.resume.path} was made with {before} sequences per step, now there would be {now} "
            f"(--batch, or else --micro-batch x --data-degree); give --batch {before}, or --change-batch to accept it"
        )
    if changed:
        parts = [format_change(config.data.name, name, before, now) for name, (before, now) in changed.items()]
        raise LongspanError(
            f"checkpoint {inputs.resume.path} was made with other data or another model, so the run would not be the "
            f"same: {'; '.join(parts)}; give the same, or start another run from its weights: --model OUT/hf --out "
            "ANOTHER"
        )


_SAMPLE_BYTES = 64 << 10
_MOST_SAMPLED = 1024  # files
_NAMED = 6  # files in a message; of the rest their number
_LONGEST = 100  # characters of a value in a message
_SETTINGS = (
    "lr", "schedule", "warmup", "decay", "min_lr", "steps", "weight_decay", "no_decay", "betas", "clip", "optimizer",
    "dtype", "grad_dtype", "context", "wire_dtype", "dpo",
)  # fmt: skip
BATCH = "batch"
"""The key of an identity that may change with `--change-batch`."""


def run_identity(
    config: TrainConfig, model_config: Any, tokenizer: Any, source: DocumentSource | Mixture, processor: Any = None
) -> dict[str, Any]:
    """Return what a resumed run must have in common with this one, as plain values for its checkpoints."""
    samples = sample_files(source.files)
    identity = {
        **source.identity,
        "pack": resolve_pack(config.data, source),
        "loss_on": config.data.loss_on,
        "too_long": config.data.too_long,
        BATCH: config.sequences,
        "tokenizer": describe_tokenizer(tokenizer),
        **model_identity(model_config),
    }
    if not config.tuning.trains_all:
        identity["tuning"] = {k: v for k, v in dataclasses.asdict(config.tuning).items() if k != "lora_export"}
    without_lora = config.data.dpo is not None and config.tuning.lora is None
    if config.model.model is not None and (without_lora or config.tuning.quantize != "none"):
        from longspan.hf.weights.origin import WeightFiles

        # A checkpoint has neither the reference nor 4-bit weights.
        files = WeightFiles.find(base_of("--model", config.model.model))
        identity["reference" if without_lora else "base"] = files and zlib.crc32(str(files.digests()).encode())
    if processor is not None:
        identity["processor"] = processor.image_processor.to_dict()
    if samples:
        identity["data"] = [[*entry, samples.get(entry[0])] for entry in identity["data"]]
    plain: dict[str, Any] = json.loads(json.dumps(identity, default=str))
    return plain


def describe_tokenizer(tokenizer: Any) -> dict[str, Any]:
    """Return class, size and a digest of a tokenizer's vocabulary, special tokens, chat template and fast rules."""
    rules: dict[str, Any] = {"vocabulary": sorted(tokenizer.get_vocab().items())}
    rules["chat_template"] = getattr(tokenizer, "chat_template", None)
    rules["special"] = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    if getattr(tokenizer, "is_fast", False):
        backend = json.loads(tokenizer.backend_tokenizer.to_str())
        rules["backend"] = {k: v for k, v in backend.items() if k not in ("version", "truncation", "padding")}
    digest = hashlib.sha256(json.dumps(rules, sort_keys=True).encode()).hexdigest()[:16]
    return {"class": type(tokenizer).__name__, "size": len(tokenizer), "content": digest}


def sample_files(files: Mapping[str, Path]) -> dict[str, str]:
    """Return a checksum of the beginning, middle and end of each file, by name; of many files, sample 1,024."""
    samples = {}
    for name in sorted(files)[:: -(-len(files) // _MOST_SAMPLED) or 1]:
        crc, size = 0, files[name].stat().st_size
        with files[name].open("rb") as opened:
            for start in sorted({0, max(0, size // 2 - _SAMPLE_BYTES // 2), max(0, size - _SAMPLE_BYTES)}):
                opened.seek(start)
                crc = zlib.crc32(opened.read(_SAMPLE_BYTES), crc)
        samples[name] = f"{crc:08x}"
    return samples


def settings_of(config: TrainConfig) -> dict[str, Any]:
    """Return the settings that a resumed run may change and that change its numbers, as plain values."""
    given = values(config) | {"steps": config.last_step}
    return {name: json.loads(json.dumps(given[name])) for name in _SETTINGS}


# --- messages


def format_change(data: str, name: str, before: Any, now: Any) -> str:
    """Format one difference between a checkpoint's identity and this run's; of the data, name the changed files."""
    if name == "data" and all(isinstance(entry, list) and len(entry) == 3 for entry in [*(before or []), *(now or [])]):
        return f"the files of --data {data} differ: {_changed_files(before, now)}"
    return f"{name} was {_shortened(before)}, is {_shortened(now)}"


def _shortened(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _changed_files(before: list[Any], now: list[Any]) -> str:
    old, new = ({name: (size, crc) for name, size, crc in files} for files in (before, now))
    changed = []
    for name in sorted(old.keys() & new.keys()):
        (old_size, old_crc), (size, crc) = old[name], new[name]
        if old_size != size:
            changed.append(f"{name} ({old_size:,} bytes then, {size:,} now)")
        elif old_crc != crc and None not in (old_crc, crc):
            changed.append(f"{name} (as long, with other text)")
    kinds = {"new": sorted(new.keys() - old.keys()), "gone": sorted(old.keys() - new.keys()), "changed": changed}
    return "; ".join(f"{kind}: {_listed(names)}" for kind, names in kinds.items() if names) or "their order"


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def changed_settings(resume: Checkpoint, config: TrainConfig) -> str | None:
    """Return a line that names every setting that differs from the checkpoint's, with both values, or None."""
    before, now = resume.state.get("settings"), settings_of(config)
    if not isinstance(before, dict):
        return None
    parts = [
        f"{name} was {before[name]}, is {value}"
        for name, value in now.items()
        if name in before
        and before[name] != value
        and not (name == "steps" and config.optimizer.schedule == "constant")
    ]
    return f"{', '.join(parts)} from step {resume.step + 1} on" if parts else None
