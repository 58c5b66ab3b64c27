"""`longspan generate` and `longspan score`: text from a model over several ranks, and the likelihood of a text.

- `config`: the flags; `prompt`: token ids of the text; `fit`: whether they fit in memory, by the planner.
- `rank`: loads the model on every rank, generates, and writes the text.
- `score`: the other command.

Importing this package does not import torch, as the command line builds its help from `GenerateConfig`.
"""

from longspan.generate.config import GenerateConfig
from longspan.generate.job import run

__all__ = ["GenerateConfig", "run"]
