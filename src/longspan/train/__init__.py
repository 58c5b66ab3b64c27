"""`longspan train METHOD`: TRL's trainers on sharded sequences, by one file.

- `arguments`: TRL's keys and ours; `command`: starts the ranks and trains.
- `resolve`: what the planner decides before the start; `model`, `datasets`: what is trained, on what.
- `callbacks`: records a step, prints sequences.

Importing this package does not import torch.
"""

from dataclasses import dataclass

from longspan.core.errors import require


@dataclass(frozen=True)
class Method:
    """One of TRL's trainers: its classes are `{name}Config` and `{name}Trainer`.

    Attributes:
        module: where they are.
        columns: what a row needs, besides its `prompt`; empty: chats, completions, texts or token ids.
        sequences: of a row.
        reference: whether the loss compares with the model before training.
        teacher: whether it compares with another model, `teacher_model_name_or_path`.
    """

    name: str
    module: str = "trl"
    columns: tuple[str, ...] = ()
    sequences: int = 1
    reference: bool = False
    teacher: bool = False


_PAIR = ("chosen", "rejected")
METHODS = {
    "sft": Method("SFT"),
    "dpo": Method("DPO", columns=_PAIR, sequences=2, reference=True),
    "kto": Method("KTO", columns=("completion", "label"), reference=True),
    "reward": Method("Reward", columns=_PAIR, sequences=2),
    "cpo": Method("CPO", "trl.experimental.cpo", columns=_PAIR, sequences=2),
    "orpo": Method("ORPO", "trl.experimental.orpo", columns=_PAIR, sequences=2),
    "gkd": Method("GKD", "trl.experimental.gkd", columns=("messages",), teacher=True),
    "distillation": Method("Distillation", columns=("prompt",), teacher=True),
}

_HELP = f"""usage: longspan train METHOD --config run.yaml [--key value ...]

METHOD is one of {", ".join(METHODS)}.

Train on long sequences by TRL's trainers. The keys are those of TRL (`trl sft`,
...), and ours. Complete files: examples/*.yaml.

longspan train sft --help   all keys, ours first
"""


def run(argv: list[str]) -> int:
    """Run `longspan train` with its arguments; see `longspan.train.command.run`."""
    if not argv or argv[0] in ("-h", "--help"):
        print(_HELP)
        return 0 if argv else 2
    require("longspan train", "transformers", "safetensors", "datasets", "trl", "yaml")
    from longspan.train.command import run

    return run(argv)
