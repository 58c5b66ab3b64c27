"""`longspan train sft|dpo|reward`: TRL's trainers on sharded sequences, by one file.

- `arguments`: TRL's keys and ours; `command`: starts the ranks and trains.
- `resolve`: what the planner decides before the start; `model`, `datasets`: what is trained, on what.
- `callbacks`: records a step, prints sequences.

Importing this package does not import torch.
"""

from longspan.core.errors import require

METHODS = ("sft", "dpo", "reward")

_HELP = f"""usage: longspan train {{{",".join(METHODS)}}} --config run.yaml [--key value ...]

Train on long sequences by TRL's trainers. The keys are those of `trl sft`,
`trl dpo` and `trl reward`, and ours. Complete files: examples/*.yaml.

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
