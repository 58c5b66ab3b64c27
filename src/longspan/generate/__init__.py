"""`longspan generate` and `longspan score`: text from a model over several ranks, and how likely it finds a text.

`config` is what can be asked for, `prompt` turns it into token ids (and refuses what cannot be), `fit` asks the planner
whether it fits, `start` loads the model on every rank, `rank` generates, `stream` shows it; `score` is the other
command.
Importing this package does not import torch: the command line builds its help from `GenerateConfig`.
"""

from longspan.generate.config import GenerateConfig
from longspan.generate.job import run

__all__ = ["GenerateConfig", "run"]
