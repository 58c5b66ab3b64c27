"""The model, the tokenizer and the data that a `TrainConfig` names."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from longspan import checkpoint
from longspan.checked import check_output
from longspan.checkpoint import Checkpoint
from longspan.data import DocumentSource, SequenceStream, TextTokenizer, load_tokenizer
from longspan.errors import LongspanError
from longspan.pretrained import first_line, read_model_config
from longspan.train.config import TrainConfig


@dataclass(frozen=True)
class Inputs:
    """What a run is made from, opened and checked; the weights are not loaded yet.

    Attributes:
        model_config: the Hugging Face config, untouched by longspan.
        tokenizer: the Hugging Face tokenizer.
        source: the documents.
        resume: the checkpoint to go on from, or None.
        identity: what the order of the data depends on, as it is kept in checkpoints.
    """

    model_config: Any
    tokenizer: Any
    source: DocumentSource
    resume: Checkpoint | None
    identity: dict[str, Any]

    def sequences(self, context: int) -> SequenceStream:
        """The sequences that are still to be trained on."""
        state = self.resume.state["data"] if self.resume else None
        return SequenceStream(self.source, TextTokenizer(self.tokenizer), context, state)


def open_inputs(config: TrainConfig) -> Inputs:
    """Open everything a run needs, and refuse what it cannot use. No process group is needed, no weights are loaded.

    Raises:
        LongspanError: for a missing or unfit model, tokenizer, text or checkpoint.
    """
    model_config = load_model_config(config)
    tokenizer = load_tokenizer(config.tokenizer_name)
    _check_vocabulary(config, model_config, tokenizer)
    source = DocumentSource(
        config.data, text_field=config.text_field, split=config.split, shuffle=config.shuffle, seed=config.seed
    )
    identity = {**source.identity, "tokenizer": [type(tokenizer).__name__, len(tokenizer)]}
    inputs = Inputs(model_config, tokenizer, source, _find_checkpoint(config), identity)
    _check_same_data(inputs)
    return inputs


def check_inputs(config: TrainConfig) -> None:
    """`open_inputs`, and read the first sequence: all that can go wrong before any weight is loaded.

    Raises:
        LongspanError: as `open_inputs`, and for text that is unreadable or too short for one sequence.
    """
    # Nothing is made yet: what is refused, here or by the ranks, leaves nothing behind.
    check_output("--out", config.checkpoints, folder=True)
    next(iter(open_inputs(config).sequences(config.context)))


def load_model_config(config: TrainConfig) -> Any:
    """The model's Hugging Face config.

    Raises:
        LongspanError: if there is none, or its position range is shorter than the context.
    """
    flag = "--model" if config.model else "--config"
    return read_model_config(flag, str(config.model or config.config), config.context)


def build_model(config: TrainConfig, model_config: Any) -> Any:
    """The model on the CPU in fp32, in training mode: pretrained, or random from the seed alone.

    Raises:
        LongspanError: if transformers cannot make a causal LM of it.
    """
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(config.seed)
    # Sharding rewrites the config it is given; the export needs it as it was.
    own = copy.deepcopy(model_config)
    try:
        if config.model is not None:
            model = AutoModelForCausalLM.from_pretrained(config.model, config=own, dtype=torch.float32)
        else:
            model = AutoModelForCausalLM.from_config(own, dtype=torch.float32)
    except Exception as error:
        name = config.model or config.config
        raise LongspanError(f"{name} cannot be made into a causal LM: {first_line(error)}") from error
    if config.grad_checkpointing:
        # transformers 5.23 renames it and warns of the old name.
        rename = hasattr(model, "activation_checkpointing_enable")
        enable = model.activation_checkpointing_enable if rename else model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    return model.train()


def _check_vocabulary(config: TrainConfig, model_config: Any, tokenizer: Any) -> None:
    size = model_config.get_text_config().vocab_size
    if len(tokenizer) > size:
        raise LongspanError(
            f"--tokenizer {config.tokenizer_name} has {len(tokenizer)} ids, the model's vocabulary only {size}; use "
            f"the model's own tokenizer, or a config with vocab_size {len(tokenizer)} or more"
        )


def _find_checkpoint(config: TrainConfig) -> Checkpoint | None:
    if config.resume == "never":
        steps = checkpoint.complete_steps(config.checkpoints)
        if steps:
            raise LongspanError(
                f"--resume never, but {config.out} holds a run at step {steps[-1]}; give another --out, or remove it"
            )
        return None
    if config.resume == "auto":
        found = checkpoint.latest(config.checkpoints)
    else:
        from pathlib import Path

        found = Checkpoint.at(Path(config.resume))
    if found is not None and found.step > config.steps:
        raise LongspanError(
            f"checkpoint {found.path} is at step {found.step}, after --steps {config.steps}; give more steps or "
            "another --out"
        )
    return found


def _check_same_data(inputs: Inputs) -> None:
    if inputs.resume is None:
        return
    before = inputs.resume.state["identity"]
    changed = [name for name in inputs.identity if inputs.identity[name] != before.get(name)]
    if changed:
        parts = [f"{name} was {before.get(name)}, is {inputs.identity[name]}" for name in changed]
        raise LongspanError(
            f"checkpoint {inputs.resume.path} was made with other data, so its order cannot be kept: "
            f"{'; '.join(parts)}; give the same, or start another run from its weights: --model OUT/hf --out ANOTHER"
        )
