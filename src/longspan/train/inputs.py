"""The model, the tokenizer and the data that a `TrainConfig` names."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from longspan import checkpoint
from longspan.checkpoint import Checkpoint, Ranks
from longspan.checkpoint.identity import differences
from longspan.core.errors import LongspanError
from longspan.core.rope import RopeScaling
from longspan.core.validation import check_output
from longspan.data import DocumentSource, SequenceStream, TextTokenizer, load_tokenizer
from longspan.hf.pretrained import read_model_config, refuse_adapter, without_dropout
from longspan.ranks import launch
from longspan.train.config import TrainConfig
from longspan.train.identity import BATCH, format_change, run_identity

if TYPE_CHECKING:
    from longspan.hf.weights.origin import Origin


@dataclass(frozen=True)
class Inputs:
    """The checked inputs of a run; weights are not loaded yet.

    Attributes:
        model_config: the Hugging Face config, untouched by longspan.
        tokenizer: the Hugging Face tokenizer.
        source: the documents.
        identity: what a resumed run must have in common with this one, for its checkpoints.
        rope: the RoPE scaling applied to `model_config`, or None.
        resume: the checkpoint to resume from, or None.
        passed_over: what is wrong with newer checkpoints than `resume`.
    """

    model_config: Any
    tokenizer: Any
    source: DocumentSource
    identity: dict[str, Any]
    rope: RopeScaling | None = None
    resume: Checkpoint | None = None
    passed_over: tuple[str, ...] = ()

    def sequences(self, context: int) -> SequenceStream:
        """Return the sequences that are still to be trained on."""
        state = self.resume.state["data"] if self.resume else None
        return SequenceStream(self.source, TextTokenizer(self.tokenizer), context, state)


def open_local(config: TrainConfig) -> Inputs:
    """Open and check model config, tokenizer and text on this rank.

    Raises:
        LongspanError: for a missing or unsuitable model, tokenizer or text.
    """
    if config.optimizer.optimizer == "adamw8bit":
        from longspan.compat.torch_checkpoint import check_torchao

        check_torchao()
    model_config, rope = load_model_config(config)
    tokenizer, size = load_tokenizer(config.model.tokenizer_name), model_config.get_text_config().vocab_size
    if len(tokenizer) > size:
        raise LongspanError(
            f"--tokenizer {config.model.tokenizer_name} has {len(tokenizer)} ids, the model's vocabulary only {size}; "
            f"use the model's own tokenizer, or a config with vocab_size {len(tokenizer)} or more"
        )
    source = DocumentSource(
        config.data.data,
        text_field=config.data.text_field,
        split=config.data.split,
        shuffle=config.data.shuffle,
        seed=config.seed,
    )
    return Inputs(model_config, tokenizer, source, run_identity(config, model_config, tokenizer, source), rope)


def find_resume(config: TrainConfig, inputs: Inputs, ranks: Ranks, *, content: bool = True) -> Inputs:
    """Return `inputs` with the checkpoint to resume from, if any. Collective over `ranks`.

    `content` compares the checkpoint's files with their checksums, too.

    Raises:
        LongspanError: on every rank, if the checkpoint of --resume, or every checkpoint of the run, is damaged or of
            another run.
    """
    resume, passed_over = _find_checkpoint(config, ranks, content)
    inputs = dataclasses.replace(inputs, resume=resume, passed_over=tuple(passed_over))
    ranks.each(lambda: _check_same_run(config, inputs))
    return inputs


def check_inputs(config: TrainConfig) -> Inputs:
    """Return the inputs after all checks that need no other rank: read a sequence, look at `--out`. Write nothing.

    Raises:
        LongspanError: as `open_local` and `find_resume`, for too little text for one sequence, an `--out` that another
            run uses or that cannot be written, or an `OUT/hf` that longspan did not write.
    """
    check_output("--out", config.checkpoints, folder=True)
    inputs = find_resume(config, open_local(config), Ranks(), content=False)
    next(iter(inputs.sequences(config.tokens)))
    try:
        if config.out.exists() and not launch.under_torchrun():  # under torchrun another rank may hold the lock already
            checkpoint.RunLock(config.out).release()
    except OSError as error:
        raise LongspanError(f"--out {config.out} cannot be written: {error}") from error
    if config.checkpoint.export != "never":
        checkpoint.check_replaceable(config.exported)
    return inputs


def finished(config: TrainConfig, inputs: Inputs) -> str | None:
    """Return a message if the run has done all its steps and exported them, else None."""
    resume = inputs.resume
    if config.checkpoint.resume != "auto" or resume is None or resume.step != config.steps:
        return None
    exported = f", and {config.exported} holds its export"
    if config.checkpoint.export == "never":
        exported = ""
    elif checkpoint.exported_step(config.exported) != resume.step:
        return None
    return (
        f"nothing to do: {config.out} is at step {resume.step} of --steps {config.steps}{exported}; give more --steps "
        "to go on, or another --out to start anew"
    )


def load_model_config(config: TrainConfig) -> tuple[Any, RopeScaling | None]:
    """Return the model's Hugging Face config, and the RoPE scaling that was applied to it.

    Raises:
        LongspanError: if there is none, or it has fewer positions than the context and cannot be extended.
    """
    model_config, rope = read_model_config(*model_flag(config), config.tokens, config.model.rope())
    return model_config if config.model.dropout is None else without_dropout(model_config), rope


def model_flag(config: TrainConfig) -> tuple[str, str]:
    """Return the flag that names the model's config, and its value."""
    if config.model.model is None:
        return "--config", str(config.model.config)
    refuse_adapter("--model", config.model.model)
    return "--model", config.model.model


def model_origin(config: TrainConfig, model_config: Any) -> Origin:
    """Return the source of the model's weights, in fp32: pretrained, or random from the seed alone."""
    import torch
    from transformers import AutoModelForCausalLM

    from longspan.hf.weights.origin import Origin

    label = str(config.model.config) if config.model.model is None else f"--model {config.model.model}"
    return Origin(AutoModelForCausalLM, model_config, torch.float32, config.model.model, config.seed, label)


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
    if found is not None and found.step > config.steps:
        raise LongspanError(
            f"checkpoint {found.path} is at step {found.step}, after --steps {config.steps}; give more steps or "
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
        parts = [format_change(config.data.data, name, before, now) for name, (before, now) in changed.items()]
        raise LongspanError(
            f"checkpoint {inputs.resume.path} was made with other data or another model, so the run would not be the "
            f"same: {'; '.join(parts)}; give the same, or start another run from its weights: --model OUT/hf --out "
            "ANOTHER"
        )
