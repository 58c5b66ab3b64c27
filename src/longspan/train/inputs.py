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
    from longspan.hf.weights.sources import Origin


@dataclass(frozen=True)
class Inputs:
    """What a run is made from, opened and checked; the weights are not loaded yet.

    Attributes:
        model_config: the Hugging Face config, untouched by longspan.
        tokenizer: the Hugging Face tokenizer.
        source: the documents.
        resume: the checkpoint to go on from, or None.
        identity: what a run that goes on from this one must have in common with it, as it is kept in checkpoints.
        passed_over: what is wrong with newer checkpoints than `resume`.
        rope: the RoPE scaling that `model_config` was given, or None.
    """

    model_config: Any
    tokenizer: Any
    source: DocumentSource
    resume: Checkpoint | None
    identity: dict[str, Any]
    passed_over: tuple[str, ...] = ()
    rope: RopeScaling | None = None

    def sequences(self, context: int) -> SequenceStream:
        """The sequences that are still to be trained on."""
        state = self.resume.state["data"] if self.resume else None
        return SequenceStream(self.source, TextTokenizer(self.tokenizer), context, state)


def open_inputs(config: TrainConfig, *, verify: bool = True, ranks: Ranks | None = None) -> Inputs:
    """Open everything a run needs, and refuse what it cannot use. No weights are loaded.

    Collective where there is a process group: what one rank refuses, all do, and all go on from the same checkpoint.

    Args:
        config: of the run.
        verify: compare the content of the checkpoint to go on from with its checksums.
        ranks: who takes part; by default those of the job's own group, or this process alone.

    Raises:
        LongspanError: for a missing or unfit model, tokenizer, text or checkpoint.
    """
    ranks = ranks or Ranks()
    return find_resume(config, ranks.each(lambda: open_here(config)), ranks, verify=verify)


def open_here(config: TrainConfig) -> Inputs:
    """The part of `open_inputs` that each rank does by itself: all but the checkpoint to go on from.

    Raises:
        LongspanError: for a missing or unfit model, tokenizer or text.
    """
    if config.optimizer.optimizer == "adamw8bit":
        from longspan.compat.torchao_api import check_torchao

        check_torchao()
    model_config, rope = load_model_config(config)
    tokenizer = load_tokenizer(config.model.tokenizer_name)
    _check_vocabulary(config, model_config, tokenizer)
    source = DocumentSource(
        config.data.data,
        text_field=config.data.text_field,
        split=config.data.split,
        shuffle=config.data.shuffle,
        seed=config.seed,
    )
    identity = run_identity(config, model_config, tokenizer, source)
    return Inputs(model_config, tokenizer, source, None, identity, rope=rope)


def find_resume(config: TrainConfig, opened: Inputs, ranks: Ranks, *, verify: bool = True) -> Inputs:
    """`opened`, and the checkpoint to go on from, if there is one. Collective where there is a process group.

    Raises:
        LongspanError: on every rank, for a checkpoint that is damaged or of another run.
    """
    resume, passed_over = _find_checkpoint(config, ranks, verify)
    inputs = dataclasses.replace(opened, resume=resume, passed_over=tuple(passed_over))
    ranks.each(lambda: _check_same_run(config, inputs))
    return inputs


def finished(config: TrainConfig, inputs: Inputs) -> str | None:
    """What is said where the run has all its steps, and its export: nothing is to be done then. Else None."""
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


def check_inputs(config: TrainConfig) -> Inputs:
    """`open_inputs`, and read the first sequence: all that can go wrong before any weight is loaded.

    Raises:
        LongspanError: as `open_inputs`, for text that is unreadable or too short for one sequence, for an `--out` that
            another run uses or that cannot be written, and for an `OUT/hf` that longspan did not write.
    """
    # Nothing is made yet: what is refused, here or by the ranks, leaves nothing behind.
    check_output("--out", config.checkpoints, folder=True)
    inputs = open_inputs(config, verify=False)
    next(iter(inputs.sequences(config.tokens)))
    try:
        # Under torchrun one of the ranks may have it already.
        if config.out.exists() and not launch.under_torchrun():
            checkpoint.RunLock(config.out).release()
    except OSError as error:
        raise LongspanError(f"--out {config.out} cannot be written: {error}") from error
    if config.checkpoint.export != "never":
        checkpoint.check_replaceable(config.exported)
    return inputs


def load_model_config(config: TrainConfig) -> tuple[Any, RopeScaling | None]:
    """The model's Hugging Face config, and the RoPE scaling that it was given.

    Raises:
        LongspanError: if there is none, or its position range is shorter than the context and cannot be made longer.
    """
    found, scaling = read_model_config(*model_flag(config), config.tokens, config.model.rope())
    return found if config.model.dropout is None else without_dropout(found), scaling


def model_flag(config: TrainConfig) -> tuple[str, str]:
    """The option that names the model's config, and what it names."""
    if config.model.model is not None:
        refuse_adapter("--model", config.model.model)
    return ("--model" if config.model.model else "--config"), str(config.model.model or config.model.config)


def model_origin(config: TrainConfig, model_config: Any) -> Origin:
    """What the model is made from: pretrained, or random from the seed alone; in fp32."""
    import torch
    from transformers import AutoModelForCausalLM

    from longspan.hf.weights.sources import Origin

    # In messages of what is wrong with its weights, the option; a config has none.
    said = f"--model {config.model.model}" if config.model.model is not None else str(config.model.config)
    return Origin(AutoModelForCausalLM, model_config, torch.float32, config.model.model, config.seed, said)


def prepare_model(model: Any) -> Any:
    """`model` as it is trained, before it is sharded."""
    return model.train()


def _check_vocabulary(config: TrainConfig, model_config: Any, tokenizer: Any) -> None:
    size = model_config.get_text_config().vocab_size
    if len(tokenizer) > size:
        raise LongspanError(
            f"--tokenizer {config.model.tokenizer_name} has {len(tokenizer)} ids, the model's vocabulary only {size}; "
            f"use the model's own tokenizer, or a config with vocab_size {len(tokenizer)} or more"
        )


def _find_checkpoint(config: TrainConfig, ranks: Ranks, verify: bool) -> tuple[Checkpoint | None, list[str]]:
    if config.checkpoint.resume == "never":
        steps = ranks.first(lambda: checkpoint.complete_steps(config.checkpoints))
        if steps:
            raise LongspanError(
                f"--resume never, but {config.out} holds a run at step {steps[-1]}; give another --out, or remove it"
            )
        return None, []
    found, passed_over = checkpoint.choose(config.checkpoints, ranks, config.checkpoint.resume, content=verify)
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
            f"(--batch, or else --micro-batch x --data-degree); give --batch {before}, or --change-batch to go on so"
        )
    if changed:
        parts = [format_change(config.data.data, name, before, now) for name, (before, now) in changed.items()]
        raise LongspanError(
            f"checkpoint {inputs.resume.path} was made with other data or another model, so the run would not be the "
            f"same: {'; '.join(parts)}; give the same, or start another run from its weights: --model OUT/hf --out "
            "ANOTHER"
        )
